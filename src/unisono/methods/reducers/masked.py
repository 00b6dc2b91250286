"""Some tensors by one reducer, the rest exactly or by another: chosen by name and by size."""

from __future__ import annotations

import fnmatch
from typing import Annotated
from weakref import WeakKeyDictionary

from torch.optim import Optimizer

from unisono.methods.buckets import Bucket
from unisono.methods.checks import AtLeast, Note, validate
from unisono.methods.facts import Example, Facts
from unisono.methods.reducer import Reducer, SpareLines, Stages, State, all_reduce_bytes, staged
from unisono.methods.reducers._subsets import Subset, find_runs, reduce_subsets, widen
from unisono.world import World

Patterns = Annotated[str | list[str], Note("patterns of names, such as '*.weight' or ['head.*', '*.bias']")]

FACTS = Facts(
    [
        Example(
            "masked(topk(k=0.1), skip='p6')",  # the suite's tensors are p0, p1, ...
            bytes=lambda sizes: (
                sizes.sent_by("topk(k=0.1)", [shape for i, shape in enumerate(sizes.shapes) if i != 6])
                + sizes.sent_by("dense", sizes.shapes[6:7])
            ),
        ),
        Example(
            "masked(powersgd(rank=1), only='p1*', rest=dense)",
            bytes=lambda sizes: (
                sizes.sent_by("powersgd(rank=1)", [sizes.shapes[1], *sizes.shapes[10:]])
                + sizes.sent_by("dense", [sizes.shapes[0], *sizes.shapes[2:10]])
            ),
        ),
    ],
    refuses={"bf16, min_size=-1": "min_size", "bf16, only=3": "only", "5": "inner"},
    trains_as=["allreduce(reducer=masked(topk(k=0.1), only='*.weight'))"],
    plans=[],
)


@validate
def masked(
    inner: Reducer,
    *,
    only: Patterns = "*",
    skip: Patterns = "",
    min_size: Annotated[int, AtLeast(0, "elements")] = 0,
    rest: Reducer | None = None,
) -> Reducer:
    """Reduce by `inner` the tensors that the mask lets through, and the rest by `rest`.

    inner: for tensors whose name fits `only` and not `skip`, and that have at least `min_size` elements.
    only, skip: patterns as in file names (`*.weight`, `head.*`), in a list or with commas between them. A pattern
        that fits no tensor is no error.
    min_size: elements.
    rest: for the others; None: their exact mean.

    Sends what both send. The two are under way together.

    >>> from unisono.spec import build
    >>> build("masked(bf16, skip='head.*', min_size=1024)", kind="reducer").exact
    False
    """
    wanted, unwanted = _split_patterns(only), _split_patterns(skip)
    found: WeakKeyDictionary[Bucket, tuple[list[int], list[int]]] = WeakKeyDictionary()
    spare = SpareLines()

    def partition(bucket: Bucket) -> tuple[list[int], list[int]]:
        """The tensors for `inner`, and the others."""
        if bucket not in found:
            fits = [
                p.numel() >= min_size and _matches(name, wanted) and not _matches(name, unwanted)
                for name, p in zip(bucket.names, bucket.params, strict=True)
            ]
            found[bucket] = [i for i, fit in enumerate(fits) if fit], [i for i, fit in enumerate(fits) if not fit]
        return found[bucket]

    def init(bucket: Bucket) -> State:
        mine, others = partition(bucket)
        return {"inner": _init_subset(bucket, mine, inner), "rest": _init_subset(bucket, others, rest)}

    def stages(bucket: Bucket, state: State, world: World) -> Stages:
        mine, others = partition(bucket)
        subsets = [Subset(mine, inner, state["inner"]), Subset(others, rest, state["rest"])]
        reduced, (state["inner"], state["rest"]) = yield from reduce_subsets(bucket, subsets, spare, world)
        return reduced, state

    def sends(bucket: Bucket, size: int) -> int:
        return sum(
            _count_sent(bucket, which, reducer, size) for which, reducer in zip(partition(bucket), both, strict=True)
        )

    def check(optimizer: Optimizer, world: World) -> None:
        for reducer in both:
            if reducer is not None and reducer.check is not None:
                reducer.check(optimizer, world)

    both = (inner, rest)
    given = [reducer for reducer in both if reducer is not None]
    known = all(reducer.sends is not None for reducer in given)
    return staged(
        init,
        stages,
        exact=all(reducer.exact for reducer in given),
        memory=any(reducer.memory for reducer in given),
        sends=sends if known else None,
        check=check,
        noise=max(reducer.noise for reducer in given),
    )


def _split_patterns(given: Patterns) -> list[str]:
    texts = [given] if isinstance(given, str) else given
    return [part.strip() for text in texts for part in text.split(",") if part.strip()]


def _matches(name: str, patterns: list[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def _init_subset(bucket: Bucket, which: list[int], reducer: Reducer | None) -> State:
    if reducer is None or not which:
        return {}
    part = bucket.part(which)
    return reducer.init(bucket) if part is bucket else widen(bucket, which, part, {}, reducer.init(part))


def _count_sent(bucket: Bucket, which: list[int], reducer: Reducer | None, size: int) -> int:
    if not which:
        return 0
    if reducer is None:
        count = sum(here.stop - here.start for here, _ in find_runs(bucket, which))
        return all_reduce_bytes(count * bucket.flat.element_size(), size)
    assert reducer.sends is not None
    return reducer.sends(bucket.part(which), size)
