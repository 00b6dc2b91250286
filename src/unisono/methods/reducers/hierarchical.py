"""Two levels: the mean inside each host over its fast memory, then a reducer across hosts over the network."""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.optim import Optimizer

from unisono.methods.buckets import Bucket
from unisono.methods.checks import validate
from unisono.methods.facts import Example, Facts
from unisono.methods.reducer import Reduced, Reducer, Stages, State, staged, stages_of
from unisono.methods.reducers._subsets import average_in_place, find_lines
from unisono.world import World

FACTS = Facts(
    [Example("hierarchical(topk(k=0.1))", bytes=lambda sizes: sizes.sent_by("dense"))],  # all ranks on one host
    refuses={"5": "across", "bf16, inside=5": "inside"},
    plans=[],
)


class _Levels(NamedTuple):
    """A world's hosts: the ranks of mine, the leaders of all."""

    inside: World
    leaders: World
    hosts: int
    leads: bool
    ranks: str  # who leads whom


@validate
def hierarchical(across: Reducer, *, inside: Reducer | None = None) -> Reducer:
    """Reduce inside each host, then across hosts, between one leader of each, and give the result back inside.

    With m_h the mean over the n_h ranks of host h, of H hosts and N ranks, the leaders reduce (n_h H / N) m_h: their
    mean is the mean over all ranks, also where hosts differ in size. On one host it is the mean inside, and `across`
    has nothing to do (what it kept on several hosts waits until there are several again).

    across: between the hosts' leaders. What it keeps lives on them; the other ranks keep zeros.
    inside: between the ranks of a host (None: their exact mean).

    While leaders talk, a leader's exchange works on no other bucket (backward does go on): all ranks of a world must
    go through the same stages, whatever they have to do in them.

    Across hosts it sends what `across` sends in a world of H; inside, what `inside` sends and the result once.
    Nothing is lost over time: the sum of all results, plus the mean over hosts of what their leaders keep, is the sum
    of all mean gradients. In a world of other ranks or hosts every leader takes over that mean.

    >>> from unisono.spec import build
    >>> build("hierarchical(bf16)", kind="reducer").spec
    'hierarchical(across=bf16)'
    """
    worlds: WeakKeyDictionary[World, _Levels] = WeakKeyDictionary()

    def init(bucket: Bucket) -> State:
        return {"ranks": "", "inside": inside.init(bucket) if inside else {}, "across": across.init(bucket)}

    def first(bucket: Bucket, state: State, world: World) -> Stages:
        if inside is None:
            return average_in_place(bucket, range(len(bucket.names)), world)
        return stages_of(inside, bucket, state["inside"], world)

    def stages(bucket: Bucket, state: State, world: World) -> Stages:
        if len(set(world.hosts)) == 1:
            reduced, state["inside"] = yield from first(bucket, state, world)
            return reduced, state
        levels = _find_levels(worlds, world)
        yield from _carry_over(state, levels, world)
        # 1. inside
        near, state["inside"] = yield from first(bucket, state, levels.inside)
        near = _write_back(bucket, near)
        # 2. across, in one stage: every rank must have the same stages, and the others have none here
        lost = _reduce_across(across, bucket, state, world, levels) if levels.leads else None
        # 3. back
        handle = levels.inside.broadcast(bucket.flat, tag=bucket.tag)
        yield
        handle.wait()
        return _build_result(bucket, near, lost), state

    def check(optimizer: Optimizer, world: World) -> None:
        for reducer in (across, inside):
            if reducer is not None and reducer.check is not None:
                reducer.check(optimizer, world)

    return staged(
        init,
        stages,
        exact=across.exact and (inside is None or inside.exact),
        memory=across.memory or (inside is not None and inside.memory),
        check=check,
        noise=max(across.noise, inside.noise if inside is not None else 0.0),
    )


def _find_levels(worlds: WeakKeyDictionary[World, _Levels], world: World) -> _Levels:
    """The worlds inside a world, split once; every rank comes here with the same bucket."""
    if world not in worlds:
        hosts = list(dict.fromkeys(world.hosts))
        leaders = [world.hosts.index(host) for host in hosts]
        others = [[r] for r in range(world.size) if r not in leaders]
        worlds[world] = _Levels(
            inside=world.split("host"),
            leaders=world.split([leaders, *others]),
            hosts=len(hosts),
            leads=world.rank in leaders,
            ranks=f"{world.size}: {' '.join(map(str, leaders))}",
        )
    return worlds[world]


def _reduce_across(
    across: Reducer, bucket: Bucket, state: State, world: World, levels: _Levels
) -> Callable[[], list[Tensor]] | None:
    """Reduce between the leaders; gives what did not get through, as a loss of this rank's own input."""
    weight = levels.inside.size * levels.hosts / world.size
    if weight != 1.0:
        bucket.flat.mul_(weight)
    bucket.zero_gaps()
    given = bucket.flat.clone() if not across.exact else bucket.flat
    far, state["across"] = across.reduce(bucket, state["across"], levels.leaders)
    far = _write_back(bucket, far)
    if across.exact:
        return None
    share = world.size / levels.hosts

    def lost() -> list[Tensor]:
        views = bucket.views(given)
        return [(x - sent) * share for x, sent in zip(views, far.sent_of(views), strict=True)]

    return lost


def _carry_over(state: State, levels: _Levels, world: World) -> Generator[None, None, None]:
    """In a world of other ranks or leaders than before: what leaders kept, in the mean over hosts, goes to every one,
    and the rest of their state too. At first it is each rank's own what there is (of another reducer, say)."""
    if state["ranks"] == levels.ranks:
        return
    lines, former = find_lines(state["across"]), state["ranks"]
    if former:
        rest = world.broadcast_object(_drop_lines(state["across"]))  # rank 0 leads, and led
        _take_values(state["across"], rest)
    if lines:
        found = torch.stack([line.any() for line in lines]).any().to(torch.uint8)
        handle = world.all_reduce(found, "max", tag="what leaders kept")
        yield
        handle.wait()
        if bool(found):
            handle = world.all_reduce(lines, "mean", tag="what leaders kept")
            yield
            handle.wait()
            size, _, leaders = former.partition(": ")
            share = int(size) / len(leaders.split()) if former else 1.0
            torch._foreach_mul_(lines, share if levels.leads else 0.0)
    state["ranks"] = levels.ranks


def _drop_lines(state: State) -> State:
    return {
        key: _drop_lines(value) if isinstance(value, dict) else value
        for key, value in state.items()
        if not isinstance(value, Tensor)
    }


def _take_values(state: State, rest: State) -> None:
    for key, value in rest.items():
        if isinstance(value, dict):
            _take_values(state[key], value)
        else:
            state[key] = value


def _write_back(bucket: Bucket, reduced: Reduced) -> Reduced:
    """Bring a result into the bucket, whose memory is free then: what was sent may have lain there."""
    if isinstance(reduced.sent, list):
        reduced = reduced._replace(sent=[x.clone() for x in reduced.sent])
    for view, x in zip(bucket.tensors, reduced.mean, strict=True):
        if view.data_ptr() != x.data_ptr():
            view.copy_(x)
    return reduced


def _build_result(bucket: Bucket, near: Reduced, lost: Callable[[], list[Tensor]] | None) -> Reduced:
    """The mean; and what got through: what did inside, less what a leader could not pass on."""
    if lost is None and near.sent is None:
        return Reduced(bucket.tensors)

    def sent(given: list[Tensor]) -> list[Tensor]:
        through = near.sent_of(given)
        return through if lost is None else [x - less for x, less in zip(through, lost(), strict=True)]

    return Reduced(bucket.tensors, sent)
