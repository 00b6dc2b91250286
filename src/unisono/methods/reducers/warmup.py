"""The exact mean for the first steps, then another reducer: while gradients are large and change quickly."""

from __future__ import annotations

from typing import Annotated

from unisono.methods.buckets import Bucket
from unisono.methods.checks import AtLeast, validate
from unisono.methods.facts import Example, Facts
from unisono.methods.reducer import Reducer, Stages, State, staged, stages_of
from unisono.methods.reducers._subsets import average_in_place
from unisono.world import World

FACTS = Facts(
    [
        Example(
            "warmup(topk(k=0.1), steps=2)",
            bytes=lambda sizes: sizes.sent_by("dense" if sizes.step < 2 else "topk(k=0.1)"),
        )
    ],
    refuses={"bf16, steps=-1": "steps", "5, steps=1": "inner"},
    plans=[],
)


@validate
def warmup(inner: Reducer, steps: Annotated[int, AtLeast(0, "exact reductions")]) -> Reducer:
    """The exact mean for `steps` reductions, then `inner`.

    A reduction is one window of backward passes: a step that AMP skips counts too.

    inner: the reducer after that.
    steps: how many; 10 % of all is common for PowerSGD, some epochs for top-k.

    Sends what the exact mean sends, then what `inner` sends (which is what `sends` tells).

    >>> from unisono.spec import build
    >>> build("warmup(bf16, steps=100)", kind="reducer").spec
    'warmup(inner=bf16, steps=100)'
    """

    def init(bucket: Bucket) -> State:
        return {"step": 0, "inner": inner.init(bucket)}

    def stages(bucket: Bucket, state: State, world: World) -> Stages:
        if state["step"] < steps:
            reduced, _ = yield from average_in_place(bucket, range(len(bucket.names)), world)
        else:
            reduced, state["inner"] = yield from stages_of(inner, bucket, state["inner"], world)
        state["step"] += 1
        return reduced, state

    return staged(
        init,
        stages,
        memory=inner.memory,
        exact=inner.exact,
        sends=inner.sends,
        check=inner.check,
        noise=inner.noise,
    )
