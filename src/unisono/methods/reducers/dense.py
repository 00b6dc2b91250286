"""The exact mean of every tensor. Sends 2(N-1)/N of the bucket's bytes."""

from __future__ import annotations

from unisono.methods.buckets import Bucket
from unisono.methods.facts import Convergence, Example, Facts
from unisono.methods.reducer import Reduced, Reducer, State
from unisono.world import World

FACTS = Facts(
    [Example("dense", exact=True, memory=False, bytes=lambda sizes: sizes.all_reduce(4 * sizes.numbers))],
    convergence=Convergence("exact", "the exact mean"),
    plans=[],
)


def dense() -> Reducer:
    """Every worker's numbers in full: g = (1/N) sum of all g_i.

    >>> from unisono.spec import build
    >>> build("dense", kind="reducer").exact
    True
    """

    def reduce(bucket: Bucket, state: State, world: World) -> tuple[Reduced, State]:
        lines = bucket.lines
        world.all_reduce(lines if len(lines) > 1 else lines[0], "mean", tag=bucket.tag).wait()
        return Reduced(bucket.tensors), state

    return Reducer(lambda bucket: {}, reduce, exact=True, apart=True)
