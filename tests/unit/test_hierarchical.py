"""hierarchical: the mean over ranks whatever the hosts, bytes across hosts, what leaders keep."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from method_cases import reduce_window
from unisono import World, run_threads
from unisono.methods.buckets import Bucket
from unisono.methods.reducer import Reducer, Stages, State, finish, staged
from unisono.methods.reducers import _cast as cast
from unisono.methods.reducers.bf16 import bf16
from unisono.methods.reducers.dense import dense
from unisono.methods.reducers.error_feedback import error_feedback
from unisono.methods.reducers.hierarchical import hierarchical

SHAPES = [(6, 5), (), (9,)]
HOSTS = {
    "one": ["a", "a", "a"],
    "even": ["a", "a", "b", "b"],
    "uneven": ["a", "b", "a", "a", "b"],
    "alone": ["a", "b", "c"],
    "mixed": ["a", "b", "b", "c", "b"],
}
hosts_of = pytest.mark.parametrize("hosts", HOSTS.values(), ids=HOSTS)


def make(world: World, index: int = 0) -> Bucket:
    named = [(f"p{index}.{i}", torch.zeros(s, dtype=torch.float64)) for i, s in enumerate(SHAPES)]
    return Bucket(index, named, world.empty)


def gradients(rank: int, step: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return [torch.randn(s, generator=generator, dtype=torch.float64) for s in SHAPES]


def fill(bucket: Bucket, tensors: list[Tensor]) -> None:
    bucket.flat.zero_()
    for view, x in zip(bucket.tensors, tensors, strict=True):
        view.copy_(x)


def mean(size: int, step: int, i: int) -> Tensor:
    return torch.stack([gradients(rank, step)[i] for rank in range(size)]).mean(0)


@hosts_of
@pytest.mark.parametrize("inside", [None, dense()])
def test_exact_levels_give_the_mean_over_ranks(hosts: list[str], inside: Reducer | None) -> None:
    reducer = hierarchical(dense(), inside=inside)

    def work(world: World) -> list[Tensor]:
        bucket = make(world)
        fill(bucket, gradients(world.rank, 0))
        return [x.clone() for x in reducer.reduce(bucket, reducer.init(bucket), world)[0].mean]

    assert reducer.exact
    first, *others = run_threads(work, len(hosts), hosts=hosts)
    assert all(all(map(torch.equal, first, other)) for other in others)
    for i, x in enumerate(first):
        assert torch.allclose(x, mean(len(hosts), 0, i), rtol=0, atol=1e-14)


def test_one_host_never_uses_what_is_for_between_hosts() -> None:
    def never(bucket: Bucket, state: State, world: World) -> Any:
        raise AssertionError

    reducer = hierarchical(Reducer(lambda bucket: {}, never))
    run_threads(lambda world: reducer.reduce(make(world), reducer.init(make(world)), world), 2)


@hosts_of
def test_bytes_across_hosts_are_those_of_the_reducer_between_leaders(hosts: list[str]) -> None:
    inner = bf16()
    reducer = hierarchical(inner)
    count = len(set(hosts))
    leaders = [hosts.index(host) for host in dict.fromkeys(hosts)]

    def work(world: World) -> tuple[int, int]:
        bucket = make(world)
        reducer.reduce(bucket, reducer.init(bucket), world)
        name = f"[{','.join(map(str, leaders))}]"
        far = [r for r in world.ledger.records if r.channel.endswith(name) and count > 1]
        near = [r for r in world.ledger.records if r not in far]
        return sum(r.bytes_sent for r in far), sum(r.bytes_sent for r in near)

    nbytes = make(World()).nbytes
    for rank, (far, near) in enumerate(run_threads(work, len(hosts), hosts=hosts)):
        ranks = hosts.count(hosts[rank])
        if count == 1:
            assert (far, near) == (0, math.ceil(2 * (ranks - 1) * nbytes / ranks))
            continue
        assert inner.sends is not None
        last = [r for r, host in enumerate(hosts) if host == hosts[rank]][-1] == rank
        back = 0 if last else nbytes  # a chain from the leader on: its last rank passes nothing on
        assert far == (inner.sends(make(World()), count) if rank in leaders else 0)
        assert near == math.ceil(2 * (ranks - 1) * nbytes / ranks) + back


@hosts_of
def test_what_leaders_keep_and_all_results_are_the_sum_of_mean_gradients(hosts: list[str]) -> None:
    size, steps = len(hosts), 5
    reducer = hierarchical(error_feedback(thirds()))

    def work(world: World) -> tuple[list[Tensor], list[Tensor]]:
        bucket = make(world)
        state, total = reducer.init(bucket), [torch.zeros_like(x) for x in bucket.tensors]
        for t in range(steps):
            fill(bucket, gradients(world.rank, t))
            reduced, state = reduce_window(reducer, bucket, state, world)
            for sum_, x in zip(total, reduced.mean, strict=True):
                sum_.add_(x)
        return total, bucket.views(state["across"]["residual"])

    results = run_threads(work, size, hosts=hosts)
    leaders = [hosts.index(host) for host in dict.fromkeys(hosts)]
    for i in range(len(SHAPES)):
        kept = torch.stack([results[r][1][i] for r in leaders]).mean(0)
        given = torch.stack([mean(size, t, i) for t in range(steps)]).sum(0)
        assert torch.allclose(results[0][0][i] + kept, given, rtol=0, atol=1e-13)
        assert not any(results[r][1][i].any() for r in range(size) if r not in leaders)


def thirds(stages_more: bool = False) -> Reducer:
    """Sends every third element in turn, in float64, and tells what it sent."""

    def stages(bucket: Bucket, state: State, world: World) -> Stages:
        from unisono.methods.reducer import Reduced

        bucket.flat.mul_(torch.arange(bucket.flat.numel()) % 3 == state["step"] % 3)
        sent = [x.clone() for x in bucket.tensors]
        handle = world.all_reduce(bucket.flat, "mean", tag=bucket.tag)
        yield
        handle.wait()
        if stages_more and bucket.index % 2 == 0:
            yield
            yield
        return Reduced(bucket.tensors, lambda _: sent), {"step": state["step"] + 1}

    return staged(
        lambda bucket: {"step": 0}, stages, sends=lambda bucket, n: math.ceil(2 * (n - 1) * bucket.nbytes / n)
    )


@hosts_of
@pytest.mark.parametrize("inside", [None, thirds()])
def test_the_mean_is_that_of_what_was_sent(hosts: list[str], inside: Reducer | None) -> None:
    """So feedback around it, as well as inside it, loses nothing."""
    size = len(hosts)
    reducer = error_feedback(hierarchical(thirds(), inside=inside))

    def work(world: World) -> tuple[list[Tensor], list[Tensor]]:
        bucket = make(world)
        state, total = reducer.init(bucket), [torch.zeros_like(x) for x in bucket.tensors]
        for t in range(5):
            fill(bucket, gradients(world.rank, t))
            reduced, state = reduce_window(reducer, bucket, state, world)
            for sum_, x in zip(total, reduced.mean, strict=True):
                sum_.add_(x)
        return total, bucket.views(state["residual"])

    results = run_threads(work, size, hosts=hosts)
    for i in range(len(SHAPES)):
        kept = torch.stack([residual[i] for _, residual in results]).mean(0)
        given = torch.stack([mean(size, t, i) for t in range(5)]).sum(0)
        assert torch.allclose(results[0][0][i] + kept, given, rtol=0, atol=1e-12)


@pytest.mark.parametrize("hosts", [HOSTS["even"], HOSTS["uneven"]])
def test_an_overflow_on_one_host_changes_no_memory_on_any(hosts: list[str]) -> None:
    reducer = hierarchical(error_feedback(thirds()), inside=error_feedback(thirds()))

    def work(world: World) -> None:
        bucket = make(world)
        state = reducer.init(bucket)
        for t in range(4):
            given = gradients(world.rank, t)
            if t == 2 and world.rank == 1:
                given[0][0, 0] = math.nan
            fill(bucket, given)
            before = [state[level]["residual"].clone() for level in ("inside", "across")]
            reduced, state = reduce_window(reducer, bucket, state, world)
            after = [state[level]["residual"] for level in ("inside", "across")]
            assert all(bool(torch.isfinite(x).all()) for x in reduced.mean) == (t != 2)
            if t == 2:
                assert all(map(torch.equal, before, after))

    run_threads(work, len(hosts), hosts=hosts)


@pytest.mark.parametrize("hosts", [HOSTS["even"], HOSTS["uneven"]])
def test_buckets_under_way_together_keep_one_order_on_every_rank(hosts: list[str]) -> None:
    """Leaders have more stages than the others, and more for some buckets than for others."""
    reducer = hierarchical(thirds(stages_more=True))

    def work(world: World) -> list[list[Tensor]]:
        buckets = [make(world, i) for i in range(4)]
        states = [reducer.init(bucket) for bucket in buckets]
        assert reducer.stages is not None
        under_way: list[Stages] = []
        for i, bucket in enumerate(buckets):
            fill(bucket, gradients(world.rank, i))
            under_way = [
                work for work in [*under_way, reducer.stages(bucket, states[i], world)] if next(work, 1) is None
            ]
        while under_way:
            under_way = [work for work in under_way if next(work, 1) is None]
        return [[x.clone() for x in bucket.tensors] for bucket in buckets]

    def one_by_one(world: World) -> list[list[Tensor]]:
        found = []
        for i in range(4):
            bucket = make(world, i)
            fill(bucket, gradients(world.rank, i))
            assert reducer.stages is not None
            finish(reducer.stages(bucket, reducer.init(bucket), world))
            found.append([x.clone() for x in bucket.tensors])
        return found

    size = len(hosts)
    expected = run_threads(one_by_one, size, hosts=hosts)[0]
    for means in run_threads(work, size, hosts=hosts, timeout_s=10):
        for a, b in zip(means, expected, strict=True):
            assert all(map(torch.equal, a, b))


def test_in_another_world_every_leader_takes_over_the_mean_of_what_was_kept() -> None:
    reducer = hierarchical(error_feedback(thirds()))
    old, new = ["a", "a", "b", "b"], ["a", "b", "b", "c", "c"]

    def first(world: World) -> State:
        bucket = make(world)
        fill(bucket, gradients(world.rank, 0))
        return reducer.reduce(bucket, reducer.init(bucket), world)[1]

    states = run_threads(first, 4, hosts=old)
    kept = (states[0]["across"]["residual"] + states[2]["across"]["residual"]) / 2
    averaged = torch.stack([state["across"]["residual"] for state in states]).mean(0)  # as a checkpoint is loaded

    def second(world: World) -> tuple[Tensor, Tensor]:
        bucket = make(world)
        state = {**states[0], "across": {**states[0]["across"], "residual": averaged.clone()}}
        state["across"]["inner"] = dict(state["across"]["inner"])
        fill(bucket, [torch.zeros(s, dtype=torch.float64) for s in SHAPES])
        _, state = reduce_window(reducer, bucket, state, world)
        return bucket.flat.clone(), state["across"]["residual"]

    results = run_threads(second, 5, hosts=new)
    after = torch.stack([results[r][1] for r in (0, 1, 3)]).mean(0)
    assert torch.allclose(results[0][0] + after, kept, rtol=0, atol=1e-14)
    assert not any(results[r][1].any() for r in (2, 4))


def test_an_overflow_while_rates_change_leaves_what_is_kept_inside_at_its_weight() -> None:
    reducer = hierarchical(dense(), inside=error_feedback(thirds()))

    def work(world: World) -> None:
        bucket = make(world)
        state = reducer.init(bucket)
        for t, lr in enumerate((0.5, 0.5, 1.0)):
            given = gradients(world.rank, t)
            if t == 2 and world.rank == 3:
                given[0][0, 0] = math.inf
            fill(bucket, given)
            bucket.lr = [lr] * len(SHAPES)
            before = state["inside"]["residual"].clone()
            _, state = reduce_window(reducer, bucket, state, world)
        assert before.any()
        assert torch.equal(state["inside"]["residual"], before / 2)
        assert state["inside"]["lr"] == [1.0] * len(SHAPES)

    run_threads(work, 4, hosts=HOSTS["even"])


def test_other_leaders_take_over_what_was_kept_and_where_it_stood() -> None:
    """As many ranks on as many hosts as before, but placed otherwise."""
    reducer = hierarchical(error_feedback(thirds()))

    def first(world: World) -> State:
        bucket = make(world)
        state = reducer.init(bucket)
        for t in range(2):
            fill(bucket, gradients(world.rank, t))
            _, state = reduce_window(reducer, bucket, state, world)
        return state

    states = run_threads(first, 4, hosts=["a", "a", "b", "b"])
    kept = (states[0]["across"]["residual"] + states[2]["across"]["residual"]) / 2

    def second(world: World) -> tuple[Tensor, State]:
        bucket, state = make(world), states[world.rank]
        fill(bucket, [torch.zeros(s, dtype=torch.float64) for s in SHAPES])
        _, state = reduce_window(reducer, bucket, state, world)
        return bucket.flat.clone(), state["across"]

    results = run_threads(second, 4, hosts=["a", "b", "a", "b"])
    after = (results[0][1]["residual"] + results[1][1]["residual"]) / 2
    assert torch.allclose(results[0][0] + after, kept, rtol=0, atol=1e-14)
    assert not results[2][1]["residual"].any()
    assert [results[r][1]["inner"]["step"] for r in (0, 1)] == [3, 3]


def test_what_another_reducer_kept_on_every_rank_goes_to_the_leaders() -> None:
    reducer = hierarchical(error_feedback(thirds()))

    def work(world: World) -> tuple[Tensor, Tensor, Tensor]:
        bucket = make(world)
        state = reducer.init(bucket)
        fill(bucket, gradients(world.rank, 0))
        state["across"]["residual"].copy_(bucket.flat)
        given = bucket.flat.clone()
        bucket.flat.zero_()
        _, state = reduce_window(reducer, bucket, state, world)
        return given, bucket.flat.clone(), state["across"]["residual"]

    results = run_threads(work, 4, hosts=HOSTS["even"])
    expected = torch.stack([given for given, _, _ in results]).mean(0)
    assert torch.allclose(results[0][1] + (results[0][2] + results[2][2]) / 2, expected, rtol=0, atol=1e-14)


def test_memory_for_casts_is_made_once_for_each_level() -> None:
    reducer = hierarchical(bf16(), inside=bf16())

    def work(world: World) -> int:
        named = [("p", torch.zeros(40))]
        bucket = Bucket(0, named, world.empty)
        for _ in range(4):
            reducer.reduce(bucket, reducer.init(bucket), world)
        return sum(len(lines) for lines in cast._lines[bucket].values())

    assert run_threads(work, 4, hosts=HOSTS["even"]) == [2, 1, 2, 1]


def test_worlds_are_split_once() -> None:
    reducer = hierarchical(dense())

    def work(world: World) -> int:
        bucket = make(world)
        for _ in range(3):
            reducer.reduce(bucket, reducer.init(bucket), world)
        return len(world._children)

    assert run_threads(work, 4, hosts=HOSTS["even"]) == [2] * 4


def test_what_is_no_reducer_is_refused() -> None:
    with pytest.raises(TypeError, match="across must be a Reducer object"):
        hierarchical("bf16")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="inside must be a Reducer object"):
        hierarchical(bf16(), inside="dense")  # type: ignore[arg-type]
