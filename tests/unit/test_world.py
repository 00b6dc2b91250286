"""The world's collectives, in worlds of threads and in shared memory between threads, against one process."""

from __future__ import annotations

import math
import operator
import os
import threading
import time
from collections.abc import Callable
from functools import reduce
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import unisono as un
from collective_matrix import CHECKS, DTYPES, check_direct_messages, check_dtype, check_equal, reference, values
from unisono import Mismatch, PeerLost, World, run_threads
from unisono.world.ledger import Ledger
from unisono.world.operations import Operations
from unisono.world.transports import Transport
from unisono.world.transports.arithmetic import combine
from unisono.world.transports.cuda_route import Route
from unisono.world.transports.meeting_page import PAGE_NAME, ROW
from unisono.world.transports.shared import SharedTransport
from unisono.world.transports.simulated import SimulatedTransport
from unisono.world.transports.sockets import SocketTransport
from unisono.world.transports.two_level import TwoLevelTransport


def on_threads(fn: Callable[[World], Any], make: Callable[[int], World], size: int) -> list[Any]:
    """`fn(world)` on threads whose worlds talk as processes do: as real, and quick to start."""
    results: list[Any] = [None] * size
    errors: list[BaseException] = []

    def work(rank: int) -> None:
        try:
            world = make(rank)
            results[rank] = fn(world)
            world.close()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(r,), daemon=True) for r in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return results


def run_shared(fn: Callable[[World], Any], size: int, *, timeout_s: float = 20.0) -> list[Any]:
    """Through the shared memory of one host."""
    fd = os.memfd_create(PAGE_NAME)

    def make(rank: int) -> World:
        return World(SharedTransport(fd, rank, size, timeout_s=timeout_s), hosts=["localhost"] * size)

    try:
        return on_threads(fn, make, size)
    finally:
        os.close(fd)


def run_messages(fn: Callable[[World], Any], size: int) -> list[Any]:
    """Through sockets, each rank as on a host of its own."""
    store = dist.HashStore()

    def make(rank: int) -> World:
        hosts = [f"host{r}" for r in range(size)]
        return World(SocketTransport(store, rank, size, timeout_s=20.0), hosts=hosts)

    return on_threads(fn, make, size)


def run_hosts(fn: Callable[[World], Any], hosts: str) -> list[Any]:
    """Through both: a letter for each rank's host."""
    store, size = dist.HashStore(), len(hosts)
    pages = {host: os.memfd_create(PAGE_NAME) for host in hosts}

    def make(rank: int) -> World:
        mine = [r for r in range(size) if hosts[r] == hosts[rank]]
        flat = SocketTransport(store, rank, size, timeout_s=20.0)
        inside = (
            SharedTransport(pages[hosts[rank]], mine.index(rank), len(mine), timeout_s=20.0) if len(mine) > 1 else None
        )
        return World(TwoLevelTransport.build(flat, inside, list(hosts)), hosts=list(hosts))

    try:
        return on_threads(fn, make, size)
    finally:
        for fd in pages.values():
            os.close(fd)


RUNNERS = {"threads": run_threads, "shared": run_shared}
Runner = Callable[..., list[Any]]


@pytest.fixture(params=RUNNERS)
def runner(request: pytest.FixtureRequest) -> Runner:
    return RUNNERS[request.param]


# The matrix --------------------------------------------------------------------------------------------------


# Every dtype, and every size with one of them: what is done with a number does not depend on how many ranks there are.
@pytest.mark.parametrize(
    ("dtype", "size"), [*((d, 3) for d in DTYPES), *((torch.float32, n) for n in (1, 2, 5))], ids=str
)
def test_every_collective_equals_one_process_in_threads(dtype: torch.dtype, size: int) -> None:
    run_threads(lambda world: check_dtype(world, dtype), size)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_collective_equals_one_process_in_shared_memory(dtype: torch.dtype) -> None:
    run_shared(lambda world: check_dtype(world, dtype), 3)


@pytest.mark.parametrize("size", [1, 2, 3, 5])
@pytest.mark.parametrize("name", CHECKS)
def test_lists_direct_messages_objects_and_groups_in_threads(name: str, size: int) -> None:
    run_threads(CHECKS[name], size)


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("name", CHECKS)
def test_lists_direct_messages_objects_and_groups_in_shared_memory(name: str, size: int) -> None:
    run_shared(CHECKS[name], size)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_collective_equals_one_process_through_messages(dtype: torch.dtype) -> None:
    run_messages(lambda world: check_dtype(world, dtype), 3)


# One of each kind: between hosts it is messages, within them shared memory, and the tests above have all dtypes there.
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64], ids=str)
def test_every_collective_equals_one_process_between_hosts(dtype: torch.dtype) -> None:
    run_hosts(lambda world: check_dtype(world, dtype), "abab")


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("name", CHECKS)
def test_lists_direct_messages_objects_and_groups_through_messages(name: str, size: int) -> None:
    run_messages(CHECKS[name], size)


@pytest.mark.parametrize("hosts", ["aabb", "aab", "baabc"])
@pytest.mark.parametrize("name", CHECKS)
def test_lists_direct_messages_objects_and_groups_between_hosts(name: str, hosts: str) -> None:
    run_hosts(CHECKS[name], hosts)


@pytest.mark.parametrize("n", [1, 40_000, 500_000])
def test_rings_of_many_ranks_and_segments(n: int) -> None:
    """Fewer messages a step than are received ahead, and more; more ranks than a ring has scratch memory."""

    def work(world: World) -> None:
        size, me = world.size, world.rank
        inputs = [[values(10 * r + k, [n // size + k], torch.float64) for k in range(size)] for r in range(size)]
        got = world.reduce_scatter(inputs[me], "sum").wait()
        check_equal(got, reference([parts[me] for parts in inputs], "sum"), "ring", exact=False)
        whole = [values(r, [n // size + r], torch.float64) for r in range(size)]
        for x, expected in zip(world.all_gather(whole[me]).wait(), whole, strict=True):
            check_equal(x, expected, "ring")
        for src in (0, size - 1):
            x = values(me, [n], torch.float32)
            check_equal(world.broadcast(x, src).wait(), values(src, [n], torch.float32), "chain")
        x = values(me, [n], torch.float32)
        inputs_ = [values(r, [n], torch.float32) for r in range(size)]
        check_equal(world.all_reduce(x, "mean").wait(), reference(inputs_, "mean"), "mean", exact=False)

    run_messages(work, 7)


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64], ids=str)
def test_a_large_mean_between_hosts_is_that_of_one_process(dtype: torch.dtype) -> None:
    """So large that it travels in two parts."""
    n = 1_048_583 if dtype == torch.float32 else 524_309
    inputs = [torch.randn(n, dtype=dtype, generator=torch.Generator().manual_seed(r)) for r in range(3)]
    found = run_messages(lambda world: world.all_reduce(inputs[world.rank].clone(), "mean").wait(), 3)
    expected = torch.stack(inputs).to(torch.complex128 if dtype.is_complex else torch.float64).mean(0).to(dtype)
    for x in found:
        torch.testing.assert_close(x, expected)
        assert torch.equal(x, found[0])


@pytest.mark.parametrize(("n", "rounds"), [(1, 1), (1024, 1), (1025, 2), (200_000, 1)])
def test_few_numbers_between_hosts_go_to_all_ranks_at_once(n: int, rounds: int) -> None:
    """With the bits of one process that adds in rank order, in one round or two; many tell their sign in a round."""
    inputs = [torch.randn(n, generator=torch.Generator().manual_seed(r)) for r in range(4)]
    expected = (inputs[0] + inputs[1] + inputs[2] + inputs[3]) * 0.25

    def work(world: World) -> None:
        transport: Any = world.transport
        before = transport._mail.rounds
        got = world.all_reduce(inputs[world.rank].clone(), "mean").wait()
        assert transport._mail.rounds - before == rounds
        assert torch.allclose(got, expected, atol=1e-6) if n > 65_536 else torch.equal(got, expected)

    run_messages(work, 4)


# Shared memory -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("size", "dtype"), [(2, torch.float32), (3, torch.bfloat16), (2, torch.int64), (3, torch.complex128)], ids=str
)
def test_shared_tensors_are_reduced_in_place_and_mix_with_private_ones(size: int, dtype: torch.dtype) -> None:
    n = 3 * (4 << 20) // dtype.itemsize + 77  # more than two blocks of the stage, and no round number

    def work(world: World) -> None:
        raw = [(torch.arange(n) % 101 + r).to(dtype) for r in range(size)]
        total = torch.stack(raw).sum(0).to(dtype)
        shared = world.empty(n, dtype)
        private = torch.empty(n, dtype=dtype)
        for kind in ("shared", "private", "mixed", "slice", "slices elsewhere"):
            x = shared if kind == "shared" or (kind == "mixed" and world.rank == 0) else private
            low, high = (0, n)
            if "slice" in kind:
                low, high = 1000, n - 333
                x = shared[low:high] if kind == "slice" else shared[low + world.rank * 64 :][: high - low]
            x.copy_(raw[world.rank][low:high])
            world.all_reduce(x, "sum").wait()
            assert x.equal(total[low:high]), kind
        shared.copy_(raw[world.rank])
        part = n // size
        even = shared[: part * size]
        got = world.reduce_scatter(even, "sum").wait()
        assert got.equal(total[part * world.rank : part * (world.rank + 1)])
        assert shared.equal(raw[world.rank]), "the input is left alone"
        for got, expected in zip(world.all_gather(shared, even=True).wait(), raw, strict=True):
            assert got.equal(expected)
        world.release(shared)

    run_shared(work, size)


def test_more_small_messages_than_slots_are_under_way_at_once() -> None:
    def work(world: World) -> list[float]:
        handles = [world.all_reduce(torch.tensor(float(world.rank + i)), "sum") for i in range(100)]
        return [h.wait().item() for h in reversed(handles)]

    assert run_shared(work, 2) == [[1.0 + 2 * i for i in reversed(range(100))]] * 2


def test_counters_go_round_at_two_to_the_32() -> None:
    """Meetings, small and direct messages count in 32 bits, which a long run exceeds."""
    near = 2**32 - 20

    def work(world: World) -> None:
        transport = world.transport
        assert isinstance(transport, SharedTransport)
        page, small, direct = transport._page, transport._small, transport._direct
        world.barrier()
        gate.wait()
        page._round = small._next = near
        page.counters.publish(world.rank * ROW, near)
        page.counters.publish(small._rows[world.rank], near)
        page.counters.publish(small._rows[world.rank] + 4, near - 16)
        for other in range(world.size):
            page.counters.publish(direct.row(world.rank, other), near)
            page.counters.publish(direct.row(other, world.rank) + 4, near)
        gate.wait()
        for i in range(40):
            assert world.all_reduce(torch.tensor([i + world.rank]), "sum").wait().item() == 2 * i + 1
            x = torch.full((3000,), float(world.rank))
            assert world.all_reduce(x, "max").wait().eq(1).all()
            assert world.gather_objects(i) == [i, i]
        for _ in range(10):
            check_direct_messages(world)
        assert page._round > 2**32
        assert small._next > 2**32

    gate = threading.Barrier(2, timeout=20)
    run_shared(work, 2)


# Handles -----------------------------------------------------------------------------------------------------


def test_done_tells_whether_wait_returns_at_once(runner: Runner) -> None:
    gate = threading.Event()

    def work(world: World) -> None:
        if world.rank == 1:
            gate.wait(10)
        small, large = torch.ones(3), torch.ones(5000)
        handles = [world.all_reduce(small, "sum"), world.all_reduce(large, "sum")]
        if world.rank == 0:
            time.sleep(0.05)
            assert not any(h.done() for h in handles)
            gate.set()
        for h in handles:
            assert h.wait()[0].item() == 2.0
            assert h.done()

    runner(work, 2)


def test_an_operations_error_is_raised_again_at_each_wait(runner: Runner) -> None:
    def work(world: World) -> list[str]:
        seen = []
        for n in (3, 5000):
            handle = world.all_reduce(torch.ones(n + world.rank), "sum")
            for _ in range(2):
                with pytest.raises(Mismatch) as caught:
                    handle.wait()
                seen.append(str(caught.value))
        assert world.all_reduce(torch.ones(4000), "sum").wait().eq(2).all(), "the world goes on"
        return seen

    for seen in runner(work, 2):
        assert seen[0] == seen[1]
        assert "rank 0" in seen[0]
        assert "rank 1" in seen[2]


@pytest.mark.parametrize("inline", [True, False])
def test_an_operation_on_a_stream_runs_at_once_and_is_finished_by_who_waits(
    monkeypatch: pytest.MonkeyPatch, inline: bool
) -> None:
    steps: list[str] = []

    def finish(value: str) -> str:
        steps.append("finish")
        return f"{value}, finished"

    def run(transport: Transport) -> tuple[float, str]:
        steps.append("run")
        return 0.0, "result"

    transport = SimulatedTransport(0, 2, bits_per_s=1e9, latency_s=0.0)
    monkeypatch.setattr(
        "unisono.world.operations.choose_route", lambda *_: Route(transport, finish=finish, at_once=True)
    )
    operations = Operations("world", transport, transport, Ledger(), inline=inline)
    on_device: Any = SimpleNamespace(is_cuda=True)
    handle = operations.run(operations.record("all_reduce", "x", 0), on_device, run)
    assert steps == ["run"]
    assert [handle.wait(), handle.wait()] == ["result, finished"] * 2
    assert steps == ["run", "finish"]
    assert len(operations.ledger.records) == 1
    assert not operations.ledger.spans, "the host did not stand still"
    operations.close()


# Bad input ---------------------------------------------------------------------------------------------------


def in_two(call: Callable[[World], Any], error: type[Exception], *words: str) -> None:
    """`call` must raise `error` with `words` on both ranks, and neither may hang."""

    def work(world: World) -> str:
        with pytest.raises(error) as caught:
            call(world)
        return str(caught.value)

    for run in RUNNERS.values():
        for text in run(work, 2):
            for word in words:
                assert word in text


@pytest.mark.parametrize("rank", [-1, 2, 7])
def test_a_rank_that_is_not_there_is_refused(rank: int) -> None:
    in_two(lambda w: w.broadcast(torch.ones(1), rank), ValueError, "broadcast needs a rank of 0..1", f"got {rank}")
    in_two(lambda w: w.send(torch.ones(1), rank), ValueError, "send needs another rank of 0..1", f"got {rank}")
    in_two(lambda w: w.recv(torch.ones(1), rank), ValueError, "recv needs another rank of 0..1")
    in_two(lambda w: w.broadcast_object(1, rank), ValueError, "broadcast_object needs a rank of 0..1")


def test_what_makes_no_sense_is_refused_before_anything_is_sent() -> None:
    in_two(lambda w: w.send(torch.ones(1), w.rank), ValueError, "another rank", "I am rank")
    in_two(lambda w: w.broadcast(torch.ones(1), "0"), TypeError, "whole number", "'0'")
    in_two(lambda w: w.all_to_all([torch.ones(1)]), ValueError, "one tensor for each of the 2 ranks, got 1")
    in_two(lambda w: w.reduce_scatter([torch.ones(1)] * 3), ValueError, "2 ranks, got 3")
    in_two(lambda w: w.reduce_scatter(torch.ones(3)), ValueError, "divisible by the 2 ranks", "(3,)", "pad it")
    in_two(lambda w: w.reduce_scatter(torch.tensor(1.0)), ValueError, "divisible by the 2 ranks")
    in_two(lambda w: w.all_to_all([torch.ones(1), torch.ones(1).int()]), TypeError, "one dtype", "int32")
    in_two(lambda w: w.all_reduce(torch.ones(1).long()), TypeError, "mean of torch.int64", "op='sum'")
    in_two(lambda w: w.all_reduce(torch.ones(1).bool(), "sum"), TypeError, "sum of torch.bool")
    in_two(lambda w: w.all_reduce(torch.ones(1) + 0j, "max"), TypeError, "no order")
    in_two(lambda w: w.all_reduce(torch.ones(1), "median"), ValueError, "'median'")
    in_two(lambda w: w.all_reduce([torch.ones(1), 3]), TypeError, "list of tensors, got int")
    in_two(lambda w: w.all_reduce(torch.eye(2).to_sparse(), "sum"), TypeError, "dense")
    in_two(lambda w: w.all_gather(torch.ones(1), out=[torch.ones(1)]), ValueError, "got 1")
    in_two(lambda w: w.reduce_scatter(torch.ones(4), out=torch.ones(3)), ValueError, "shape (2,)", "(3,)")
    in_two(lambda w: w.broadcast_object({1, 2}, w.rank), TypeError, "set")
    in_two(lambda w: w.split("rack"), ValueError, "'host' or lists of ranks", "'rack'")
    in_two(lambda w: w.split([[0]]), ValueError, "exactly one group", "[[0]]")
    in_two(lambda w: w.split([[0, 1], [1]]), ValueError, "exactly one group")
    with pytest.raises(ValueError, match="at least one rank"):
        run_threads(lambda world: None, 0)


def test_tensors_of_two_devices_are_refused() -> None:
    with pytest.raises(ValueError, match=r"one device.*'cpu', 'meta'"):
        World().all_reduce([torch.ones(1), torch.ones(1, device="meta")])


@pytest.mark.parametrize("pair", [(3, 4), (3, 5000), (5000, 6000), (0, 5000)], ids=str)
def test_sizes_that_differ_raise_on_every_rank(pair: tuple[int, int]) -> None:
    in_two(lambda w: w.all_reduce(torch.ones(pair[w.rank]), "sum").wait(), Mismatch, "rank 1")
    in_two(lambda w: w.broadcast(torch.ones(pair[w.rank])).wait(), Mismatch, "rank 1")
    in_two(lambda w: w.reduce_scatter([torch.ones(pair[w.rank])] * 2).wait(), Mismatch, "rank 1")
    in_two(lambda w: w.all_gather(torch.ones(pair[w.rank]), even=True).wait(), Mismatch, "all_gather")


@pytest.mark.parametrize("odd", [0, 2])
@pytest.mark.parametrize(
    "call",
    [
        lambda w, odd: w.all_reduce(torch.ones(7 + odd), "sum").wait(),
        lambda w, odd: w.all_reduce(torch.ones(70_000 if odd else 3), "sum").wait(),
        lambda w, odd: w.all_reduce(torch.ones(7, dtype=torch.float64 if odd else torch.float32), "sum").wait(),
        lambda w, odd: w.all_reduce(torch.ones(7), "max" if odd else "min").wait(),
        lambda w, odd: w.broadcast(torch.ones(70_000 if odd else 3)).wait(),
        lambda w, odd: w.broadcast(torch.ones(3), int(odd)).wait(),
        lambda w, odd: w.all_gather(torch.ones(4 + odd), even=True).wait(),
        lambda w, odd: w.reduce_scatter([torch.ones(4 + odd)] * 3).wait(),
        lambda w, odd: w.gather_objects(1) if odd else w.all_reduce(torch.ones(3)).wait(),
    ],
    ids=["size", "large", "dtype", "op", "broadcast", "src", "even", "parts", "objects"],
)
def test_messages_that_do_not_match_are_told_on_every_rank(call: Callable[[World, bool], Any], odd: int) -> None:
    """Or one rank's bytes would be added to another's."""

    def work(world: World) -> str:
        with pytest.raises(Mismatch) as caught:
            call(world, world.rank == odd)
        with pytest.raises(PeerLost, match="lost before"):
            world.barrier()
        return str(caught.value)

    for text in run_messages(work, 3):
        assert "the ranks disagree" in text
        assert f"rank {odd} has" in text


def test_dtypes_that_differ_are_named_by_rank() -> None:
    dtypes = (torch.float32, torch.float64)

    def words(n: int) -> tuple[Callable[[World], torch.Tensor], tuple[str, ...]]:
        return lambda w: torch.ones(n, dtype=dtypes[w.rank]), ("rank 0", "float32", "rank 1", "float64")

    for n in (3, 5000):
        make, names = words(n)
        in_two(lambda w, make=make: w.all_reduce(make(w), "sum").wait(), Mismatch, *names)
        in_two(lambda w, make=make: w.all_gather(make(w)).wait(), Mismatch, *names)
        in_two(lambda w, make=make: w.all_to_all([make(w)] * 2).wait(), Mismatch, *names)


def test_other_ops_and_other_collectives_are_told() -> None:
    for n in (3, 5000):
        x = torch.ones(n)
        in_two(lambda w, x=x: w.all_reduce(x.clone(), ("sum", "max")[w.rank]).wait(), Mismatch, "sum", "max")
        calls = [
            lambda w, x=x: w.all_reduce(x.clone(), "sum").wait(),
            lambda w, x=x: w.broadcast(x.clone()).wait(),
            lambda w, x=x: w.all_gather(x).wait(),
            lambda w, x=x: w.all_gather(x, even=True).wait(),
            lambda w, x=x: w.gather_objects({"a": 1}),
            lambda w: w.split([[0], [1]]),
        ]
        for other in calls[1:]:
            for pair in ((calls[0], other), (other, calls[0])):
                in_two(lambda w, pair=pair: pair[w.rank](w), Mismatch)
    in_two(lambda w: w.broadcast(torch.ones(2), w.rank).wait(), Mismatch, "broadcast")


def test_a_collective_that_only_one_rank_calls_is_told_at_the_next() -> None:
    def work(world: World) -> None:
        if world.rank == 0:
            extra = world.all_reduce(torch.ones(1), "sum")
        world.all_reduce(torch.ones(5000), "sum").wait()
        if world.rank == 0:
            extra.wait()

    with pytest.raises(Mismatch):
        run_shared(work, 2)


def test_memory_of_other_sizes_is_refused() -> None:
    def work(world: World) -> None:
        with pytest.raises(Mismatch, match="rank 0 400, rank 1 800"):
            world.empty(100 * (world.rank + 1))

    run_shared(work, 2)


def test_recv_names_what_was_sent_and_what_was_expected() -> None:
    def work(world: World) -> None:
        if world.rank == 0:
            world.send(torch.ones(3), 1).wait()
        else:
            with pytest.raises(Mismatch, match=r"recv from rank 0.*float32.*int16"):
                world.recv(torch.ones(5, dtype=torch.int16), 0).wait()

    for run in RUNNERS.values():
        run(work, 2)


def test_the_first_error_of_a_world_of_threads_is_raised_and_the_others_do_not_hang() -> None:
    def work(world: World) -> None:
        inside = world.split([[0, 1, 2]])
        if world.rank == 1:
            raise KeyError("mine")
        with pytest.raises(PeerLost, match="rank 1 failed"):
            (world if world.rank else inside).barrier()

    with pytest.raises(KeyError, match="mine"):
        run_threads(work, 3)


def test_a_rank_that_never_comes_ends_the_wait_with_its_name() -> None:
    def work(world: World) -> None:
        if world.rank == 0:
            for call in (lambda: world.all_reduce(torch.ones(5000)).wait(), world.barrier):
                with pytest.raises(PeerLost, match=r"waited 0.3 s for rank 1 .* of 2"):
                    call()
            with pytest.raises(PeerLost, match="recv from rank 1: waited"):
                world.recv(torch.ones(1), 1).wait()
        else:
            time.sleep(1.2)

    run_shared(work, 2, timeout_s=0.3)


# Worlds ------------------------------------------------------------------------------------------------------


def test_a_world_of_one_returns_its_input_and_starts_nothing() -> None:
    before = threading.active_count()
    world = World()
    x = torch.arange(4.0)
    assert world.all_reduce(x).wait() is x
    assert world.broadcast(x).wait() is x
    assert world.reduce_scatter(x).wait().equal(x)
    assert world.reduce_scatter([x]).wait() is x
    out = torch.zeros(4)
    assert world.reduce_scatter(x, out=out).wait() is out
    assert out.equal(x)
    out = torch.zeros(4)
    assert world.all_gather(x, out=[out]).wait()[0] is out
    assert out.equal(x)
    assert world.all_gather(x).wait()[0].equal(x)
    assert world.all_to_all([x]).wait()[0].equal(x)
    out = torch.zeros(4)
    assert world.all_to_all([x], out=[out]).wait()[0] is out
    assert out.equal(x)
    world.barrier()
    assert world.gather_objects("a") == ["a"]
    assert world.empty(3).shape == (3,)
    world.release(world.empty(3))
    inside = world.split("host").split([[0]]).channel()
    assert (inside.rank, inside.size, inside.local_size) == (0, 1, 1)
    assert threading.active_count() == before
    for call in (world.send, world.recv):
        with pytest.raises(ValueError, match="another rank"):
            call(x, 0)
    assert repr(world) == "World(rank=0, size=1, host='localhost', device='cpu', alone)"
    world.close()


def test_hosts_part_a_world() -> None:
    def work(world: World) -> tuple[int, int, list[int], int]:
        inside = world.split("host")
        return world.local_rank, world.local_size, inside.gather_objects(world.rank), un.join().rank

    got = run_threads(work, 5, hosts=["a", "b", "a", "c", "b"])
    assert got == [
        (0, 2, [0, 2], 0),
        (0, 2, [1, 4], 1),
        (1, 2, [0, 2], 2),
        (0, 1, [3], 3),
        (1, 2, [1, 4], 4),
    ]


def test_a_closed_world_refuses_and_closes_the_worlds_inside(runner: Runner) -> None:
    def work(world: World) -> None:
        inside = world.split([[1, 0]])
        inside.all_reduce(torch.ones(5000)).wait()
        world.barrier()
        world.close()
        world.close()
        for closed in (world, inside):
            for call in (
                lambda w: w.all_reduce(torch.ones(3)),
                lambda w: w.send(torch.ones(3), 1 - w.rank),
                lambda w: w.split([[0, 1]]),
                lambda w: w.empty(3),
            ):
                with pytest.raises(RuntimeError, match="closed"):
                    call(closed)

    runner(work, 2)


def test_fifty_worlds_leave_no_threads_descriptors_or_mappings(runner: Runner) -> None:
    def work(world: World) -> None:
        inside = world.split([[1, 0]])
        handles = [w.all_reduce(torch.ones(n), "sum") for w in (world, inside) for n in (3, 5000)]
        shared = world.empty(1000)
        sent = world.send(torch.ones(3), 1 - world.rank)
        world.recv(torch.ones(3), 1 - world.rank).wait()
        for handle in (*handles, sent, world.all_reduce(shared)):
            handle.wait()
        world.barrier()

    def left() -> tuple[int, int, int]:
        with open("/proc/self/maps") as file:
            mapped = sum("unisono" in line for line in file)
        return threading.active_count(), len(os.listdir("/proc/self/fd")), mapped

    runner(work, 2)
    before = left()
    for _ in range(50):
        runner(work, 2)
    threads, descriptors, mapped = left()
    assert threads <= before[0]
    assert descriptors <= before[1]
    assert mapped <= before[2] + 20  # cycles wait for the garbage collector


def test_weight_tells_its_listeners_of_changes_only() -> None:
    class Listener:
        def __init__(self) -> None:
            self.seen: list[float] = []

        def weight_changed(self, value: float) -> None:
            self.seen.append(value)

    world, listener = World(), Listener()
    world.on_weight(listener)
    for value in (1.0, 0.5, 0.5, 1.0):
        world.weight = value
    assert listener.seen == [0.5, 1.0]


# Arithmetic --------------------------------------------------------------------------------------------------


def test_narrow_floats_are_summed_wide_and_rounded_once() -> None:
    big = torch.tensor([60000.0], dtype=torch.float16)
    out = torch.empty_like(big)
    combine([big, big, -big], "sum", out)
    assert out.item() == 60000.0
    combine([big] * 5, "mean", out)
    assert out.item() == 60000.0
    ones = [torch.tensor([256.0], dtype=torch.bfloat16)] + [torch.tensor([1.0], dtype=torch.bfloat16)] * 4
    total = torch.empty(1, dtype=torch.bfloat16)
    combine(ones, "sum", total)
    assert total.item() == 260.0  # rounding after each addition would stay at 256


@pytest.mark.parametrize("place", [0, 1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint64], ids=str)
def test_the_result_may_replace_any_of_its_parts(dtype: torch.dtype, place: int) -> None:
    parts = [values(r, [9], dtype) for r in range(3)]
    expected = torch.empty(9, dtype=dtype)
    combine(parts, "sum", expected)
    combine(parts, "sum", parts[place])
    assert parts[place].equal(expected)


def test_not_a_number_is_passed_on() -> None:
    def work(world: World) -> list[float]:
        x = torch.tensor([math.nan if world.rank == 1 else 1.0, 1.0])
        return [world.all_reduce(x.clone(), op).wait()[0].item() for op in ("sum", "max", "min")]

    for result in run_threads(work, 3):
        assert all(math.isnan(x) for x in result)


# Connecting --------------------------------------------------------------------------------------------------


def test_products_and_bits_equal_those_of_one_process() -> None:
    def work(world: World) -> None:
        for dtype in (torch.int32, torch.uint8, torch.float32, torch.uint64, torch.bfloat16):
            every = [torch.tensor([3, 5, 6 + r, 12], dtype=torch.int64).to(dtype) for r in range(world.size)]
            ops = ("product",) if dtype.is_floating_point else ("product", "and", "or", "xor")
            for op in ops:
                step = {"product": operator.mul, "and": operator.and_, "or": operator.or_, "xor": operator.xor}[op]
                wanted = reduce(step, [x.to(torch.int64) for x in every]).to(dtype)
                assert torch.equal(world.all_reduce(every[world.rank].clone(), op).wait(), wanted), (dtype, op)  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="bits of integers"):
            world.all_reduce(torch.ones(2), "xor")

    un.run_threads(work, 3)
