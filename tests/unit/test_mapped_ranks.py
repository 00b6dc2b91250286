"""Ranks that map each other's memory, with host memory as the device's: every collective against PyTorch in fp64."""

from __future__ import annotations

import os
import subprocess
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from mapped_ranks import StandIn

from unisono.world import Mismatch, PeerLost, World, rendezvous
from unisono.world.transports import cuda_memory, cuda_route, cuda_shared, meeting_page
from unisono.world.transports.arithmetic import STEPS, check_op
from unisono.world.transports.cuda_memory import NotShareable
from unisono.world.transports.cuda_shared import CudaSharedTransport, reduce_lines
from unisono.world.transports.meeting_page import PAGE_NAME

DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int32, torch.int64, torch.uint8]
DTYPES += [torch.bool, torch.complex64, torch.uint16, torch.uint64, torch.int8]


def run_mapped(fn: Callable[[CudaSharedTransport, StandIn], Any], size: int, **how: Any) -> list[Any]:
    """`fn(transport, memory)` on threads that talk as processes on one device do; errors are results."""
    fd = os.memfd_create(PAGE_NAME)
    results: list[Any] = [None] * size
    memories = [StandIn(refuses=how.get("refuses") == rank) for rank in range(size)]

    def work(rank: int) -> None:
        memory = memories[rank]
        try:
            transport = CudaSharedTransport(fd, rank, size, memory, timeout_s=how.get("timeout_s", 20.0))
            results[rank] = fn(transport, memory)
            transport.close()
        except Exception as error:
            results[rank] = error

    threads = [threading.Thread(target=work, args=(r,), daemon=True) for r in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    os.close(fd)
    assert not any(thread.is_alive() for thread in threads)
    for memory in memories:
        memory.close()
    return results


def numbers(rank: int, n: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * seed + rank)
    whole = torch.randint(0, 2 if dtype == torch.bool else 6, (n,), generator=generator)
    if dtype.is_floating_point or dtype.is_complex:
        return (whole.double() - 2.5 + torch.rand(n, generator=generator, dtype=torch.float64)).to(dtype)
    return whole.to(dtype)


def lay(memory: StandIn, x: torch.Tensor, shareable: bool) -> torch.Tensor:
    """`x`, in memory that others can map or not."""
    if not shareable or not x.numel():
        return x
    line = memory.allocate(x.nbytes + 64)[64:].view(x.dtype)
    line.copy_(x)
    return line


def reference(parts: list[torch.Tensor], op: str) -> torch.Tensor:
    wide = torch.complex128 if parts[0].dtype.is_complex else torch.float64
    is_whole = not parts[0].dtype.is_floating_point and not parts[0].dtype.is_complex
    values = [p.to(torch.int64 if is_whole else wide) for p in parts]
    total = values[0]
    for value in values[1:]:
        total = STEPS[op](total, value)
    return total / len(parts) if op == "mean" else total


def is_allowed(dtype: torch.dtype, op: str) -> bool:
    try:
        check_op(dtype, op)  # type: ignore[arg-type]
    except TypeError:
        return False
    return True


def compare(found: torch.Tensor, right: torch.Tensor) -> None:
    if found.dtype.is_floating_point or found.dtype.is_complex:
        rough = 2e-2 if found.dtype.itemsize == 2 else 1e-5
        torch.testing.assert_close(found, right.to(found.dtype), rtol=rough, atol=1e-3)
    else:
        whole = torch.uint8 if found.dtype == torch.bool else found.dtype
        assert torch.equal(found.to(torch.int64), right.to(whole).to(torch.int64))


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("shareable", [True, False])
@pytest.mark.parametrize("n", [0, 5, 1000, 4099])
def test_all_reduce_of_every_dtype(size: int, shareable: bool, n: int) -> None:
    cases = [(dtype, op) for dtype in DTYPES for op in STEPS if is_allowed(dtype, op)]

    def work(transport: CudaSharedTransport, memory: StandIn) -> list[torch.Tensor]:
        found = []
        for dtype, op in cases:
            x = lay(memory, numbers(transport.rank, n, dtype), shareable)
            transport.all_reduce([x], op)  # type: ignore[arg-type]
            found.append(x.clone())
        return found

    every = run_mapped(work, size)
    for i, (dtype, op) in enumerate(cases):
        right = reference([numbers(r, n, dtype) for r in range(size)], op)
        for found in every:
            compare(found[i], right)
            assert torch.equal(found[i].view(torch.uint8), every[0][i].view(torch.uint8))


def test_what_needs_no_kernel_of_its_own_is_reduced_in_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_shared, "_TILE", 64)
    lines = [numbers(r, 101, torch.float32) for r in range(3)]
    right = reference(lines, "mean")
    out = torch.empty(101)
    reduce_lines(lines, "mean", [lines[1], out])
    compare(lines[1], right)
    assert torch.equal(lines[1], out)


@pytest.mark.parametrize("joined", [1 << 20, 1024])
@pytest.mark.parametrize("shareable", [True, False])
def test_a_list_of_tensors_is_reduced_in_blocks(shareable: bool, joined: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_shared, "_JOINED", joined)
    counts = [3, 0, 700, 41]

    def work(transport: CudaSharedTransport, memory: StandIn) -> list[torch.Tensor]:
        parts = [lay(memory, numbers(transport.rank, n, torch.float32, seed=n), shareable) for n in counts]
        transport.all_reduce(parts, "sum")
        transport.all_reduce(parts[1:2], "sum")
        transport.all_reduce([parts[1], parts[1]], "sum")
        transport.broadcast(parts[2:], 1)
        return [part.clone() for part in parts]

    for found in run_mapped(work, 2):
        for part, n in zip(found, counts, strict=True):
            compare(part, reference([numbers(r, n, torch.float32, seed=n) for r in range(2)], "sum"))


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("shareable", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
def test_other_collectives(size: int, shareable: bool, dtype: torch.dtype) -> None:
    counts = [7, 0, 300][:size]

    def work(transport: CudaSharedTransport, memory: StandIn) -> dict[str, Any]:
        rank, found = transport.rank, {}
        whole = lay(memory, numbers(rank, sum(counts), dtype), shareable)
        out = torch.empty(counts[rank], dtype=dtype)
        transport.reduce_scatter(whole, counts, "max" if not dtype.is_complex else "sum", out)
        found["reduce_scatter"] = out
        outs = [torch.empty(10 * r, dtype=dtype) for r in range(size)]
        transport.all_gather(lay(memory, numbers(rank, 10 * rank, dtype), shareable), outs)
        found["all_gather"] = outs
        sent = lay(memory, numbers(rank, 500, dtype), shareable)
        transport.broadcast([sent], size - 1)
        found["broadcast"] = sent.clone()
        parts = [numbers(10 * rank + r, 3 * rank + 5 * r, dtype) for r in range(size)]
        into = [torch.empty(3 * r + 5 * rank, dtype=dtype) for r in range(size)]
        transport.all_to_all(parts, into)
        found["all_to_all"] = into
        return found

    for rank, found in enumerate(run_mapped(work, size)):
        start = sum(counts[:rank])
        op = "max" if not dtype.is_complex else "sum"
        right = reference([numbers(r, sum(counts), dtype) for r in range(size)], op)
        compare(found["reduce_scatter"], right[start : start + counts[rank]])
        for r in range(size):
            assert torch.equal(found["all_gather"][r], numbers(r, 10 * r, dtype))
            assert torch.equal(found["all_to_all"][r], numbers(10 * r + rank, 3 * r + 5 * rank, dtype))
        assert torch.equal(found["broadcast"], numbers(size - 1, 500, dtype))


@pytest.mark.parametrize("n", [0, 9, 1_000_000])
@pytest.mark.parametrize("shareable", [True, False])
def test_messages_of_any_size_go_both_ways(n: int, shareable: bool) -> None:
    def work(transport: CudaSharedTransport, memory: StandIn) -> list[torch.Tensor]:
        found = [torch.empty(n) for _ in range(3)]
        other = 1 - transport.rank

        def send() -> None:
            for i in range(3):
                transport.send(lay(memory, numbers(transport.rank, n, torch.float32, seed=i), shareable), other)

        sending = threading.Thread(target=send)
        sending.start()
        for x in found:
            transport.recv(x, other)
        sending.join()
        return found

    for rank, found in enumerate(run_mapped(work, 2)):
        for i, x in enumerate(found):
            assert torch.equal(x, numbers(1 - rank, n, torch.float32, seed=i))


@pytest.mark.parametrize("n", [4, 500_000])
def test_a_message_of_another_size_or_dtype_is_refused(n: int) -> None:
    def work(transport: CudaSharedTransport, memory: StandIn) -> None:
        if transport.rank == 0:
            transport.send(torch.zeros(n), 1)
            return
        try:
            transport.recv(torch.zeros(n, dtype=torch.int32), 0)
        except Mismatch as error:
            transport.abandon(error)
            raise

    _, error = run_mapped(work, 2)
    assert isinstance(error, Mismatch)
    assert "it sent" in str(error)


def test_groups_have_a_transport_of_their_own() -> None:
    def work(transport: CudaSharedTransport, memory: StandIn) -> list[float]:
        child = transport.split([[0, 2], [1]])
        x = torch.full((1000,), float(transport.rank))
        if child.size > 1:
            child.all_reduce([x], "sum")
        child.close()
        return x.unique().tolist()

    assert run_mapped(work, 3) == [[2.0], [1.0], [2.0]]


def test_an_allocation_is_mapped_once_and_given_back_when_it_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_shared, "_LOOK_AGAIN_S", 0.0)

    def work(transport: CudaSharedTransport, memory: StandIn) -> tuple[int, int]:
        before, first = memory.mapped, memory.allocate(4096)
        for _ in range(3):
            transport.all_reduce([first.view(torch.float32)], "sum")
        once = memory.mapped - before
        memory.lose(first)
        before = memory.unmapped
        transport.all_reduce([memory.allocate(4096).view(torch.float32)], "sum")
        return once, memory.unmapped - before

    assert run_mapped(work, 2) == [(1, 1), (1, 1)]


def test_the_host_waits_for_the_device_before_each_meeting() -> None:
    """What a rank tells the others to read is there, and what it has read has come."""

    def work(transport: CudaSharedTransport, memory: StandIn) -> list[bool]:
        page, seen = transport._page, []
        arrive, settled = page.arrive, memory.settled

        def watched(item: bytes = b"") -> None:
            nonlocal settled
            seen.append(memory.settled > settled)
            settled = memory.settled
            arrive(item)

        page.arrive = watched  # type: ignore[method-assign]
        x, outs = torch.zeros(1000), [torch.zeros(1000) for _ in range(2)]
        transport.all_reduce([x], "sum")
        transport.all_gather(x, outs)
        transport.broadcast([x], 0)
        transport.reduce_scatter(x, [500, 500], "sum", torch.zeros(500))
        return seen

    for seen in run_mapped(work, 2):
        assert seen == [True] * 8


def test_different_calls_are_refused_by_name() -> None:
    def work(transport: CudaSharedTransport, memory: StandIn) -> None:
        n = 1000 if transport.rank else 2000
        transport.all_reduce([torch.zeros(n)], "sum")

    for error in run_mapped(work, 2):
        assert isinstance(error, Mismatch)
        assert "rank 0 has sum of 2000" in str(error)


def test_sizes_that_the_others_do_not_expect_are_refused() -> None:
    def work(transport: CudaSharedTransport, memory: StandIn) -> None:
        n = 6 if transport.rank else 5
        transport.all_to_all([torch.zeros(5), torch.zeros(5)], [torch.zeros(n), torch.zeros(5)])

    for error in run_mapped(work, 2):
        assert isinstance(error, Mismatch)
        assert "rank 0 sends 5 elements to rank 1, which expects 6" in str(error)


def test_memory_that_cannot_be_mapped_is_found_out_at_the_start() -> None:
    for error in run_mapped(lambda transport, memory: None, 3, refuses=1):
        assert isinstance(error, NotShareable)
        assert str(error) == "rank 1: not permitted"  # and no rank has given up: the others would lose it


@pytest.fixture
def ended() -> int:
    """A process that is gone."""
    process = subprocess.Popen(["true"])
    process.wait()
    return process.pid


def test_a_rank_that_died_before_it_came_is_noticed(ended: int) -> None:
    others = iter([f"{ended} ".encode(), b""])
    base: Any = SimpleNamespace(rank=0, size=2, exchange=lambda mine: [mine, next(others)])
    with pytest.raises(PeerLost, match=f"process {ended}. has ended"):
        CudaSharedTransport.connect(base, StandIn, timeout_s=0.5)


def test_a_rank_that_died_before_it_came_to_its_group_is_noticed(ended: int) -> None:
    def work(transport: CudaSharedTransport, memory: StandIn) -> None:
        if transport.rank == 0:
            transport._page.pids[1] = ended
        transport.split([[0, 1]])

    errors = run_mapped(work, 2, timeout_s=0.5)
    assert f"process {ended}) has ended" in str(errors[0])


def test_what_a_rank_says_last_is_why_it_left() -> None:
    def work(transport: CudaSharedTransport, memory: StandIn) -> None:
        if transport.rank:
            transport.abandon(PeerLost("a long reason, of which nothing is left"))
            transport.abandon(PeerLost("short"))
        else:
            transport.all_reduce([torch.ones(4)], "sum")

    error, _ = run_mapped(work, 2)
    assert error.args[0].endswith("gave up: short")


# Collectives and messages at the same time -------------------------------------------------------------------


def test_copies_of_messages_to_several_ranks_are_apart() -> None:
    """And from that of a collective: each is read when its reader comes."""
    n = 500_000

    def work(transport: CudaSharedTransport, memory: StandIn) -> Any:
        if transport.rank:
            x = torch.empty(n)
            if transport.rank == 1:
                wait_until(lambda: transport._page.counters[transport._direct.row(0, 2)] > 0)
            transport.recv(x, 0)
        else:
            sends = [threading.Thread(target=transport.send, args=(torch.full((n,), float(r)), r)) for r in (1, 2)]
            for r, send in enumerate(sends, 1):
                send.start()
                wait_until(lambda r=r: transport._page.counters[transport._direct.row(0, r)] > 0)  # it is announced
            x = torch.zeros(n)
        transport.all_reduce([y := torch.full((n,), 5.0)], "sum")
        for send in sends if transport.rank == 0 else ():
            send.join()
        return x.unique().tolist(), y.unique().tolist()

    assert run_mapped(work, 3) == [([float(r)], [15.0]) for r in range(3)]


def test_a_message_leaves_what_a_collective_has_mapped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_shared, "_LOOK_AGAIN_S", 0.0)
    n = 500_000

    def work(transport: CudaSharedTransport, memory: StandIn) -> int:
        first = memory.allocate(4096)
        transport.all_reduce([first], "sum")
        transport._announce("all_gather", "sum", memory.allocate(4096))
        before = memory.unmapped
        if transport.rank:
            memory.lose(first)  # the message tells that it is gone
            transport.send(lay(memory, torch.ones(n), True), 0)
        else:
            transport.recv(torch.empty(n), 1)
        found = memory.unmapped - before  # the collective is still under way
        transport._end("all_gather")
        return found

    assert run_mapped(work, 2) == [0, 0]


def test_two_threads_describe_memory_at_the_same_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_shared, "_LOOK_AGAIN_S", 0.0)

    def work(transport: CudaSharedTransport, memory: StandIn) -> None:
        lines, is_there = [memory.allocate(64) for _ in range(3)], memory.is_there
        transport._describe(lines[0])
        other = threading.Thread(target=transport._describe, args=(lines[2],))

        def look(segment: Any) -> bool:
            if other.ident is None:
                other.start()
                other.join(0.2)
            return is_there(segment)

        memory.is_there = look  # type: ignore[method-assign]
        transport._describe(lines[1])
        other.join()

    assert run_mapped(work, 1) == [None]


# Ranks that leave --------------------------------------------------------------------------------------------


def wait_until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_a_writer_that_fails_tells_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else they would take its next call for the end of this one."""

    def fail(lines: Any, op: Any, outs: Any) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(cuda_shared, "reduce_lines", fail)

    def work(transport: CudaSharedTransport, memory: StandIn) -> str:
        with pytest.raises(RuntimeError) as error:
            transport.all_reduce([lay(memory, torch.ones(1000), True)], "sum")
        return f"{error.type.__name__} {error.value}"

    found = sorted(run_mapped(work, 2, timeout_s=3.0))
    assert found[1] == "RuntimeError out of memory"
    assert found[0].startswith("PeerLost all_reduce: rank ")
    assert "gave up: out of memory" in found[0]


def write_slowly(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """When a writer has ended."""
    ended: list[float] = []

    def slowly(lines: Any, op: Any, outs: Any) -> None:
        time.sleep(0.5)
        ended.append(time.monotonic())

    monkeypatch.setattr(cuda_shared, "reduce_lines", slowly)
    return ended


def test_a_rank_that_cannot_map_waits_for_who_writes_to_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meeting_page, "_CHECK_S", 0.005)
    ended = write_slowly(monkeypatch)

    def work(transport: CudaSharedTransport, memory: StandIn) -> float:
        memory.refuses = transport.rank == 1
        x = lay(memory, torch.ones(1000), True)
        time.sleep(0.0 if transport.rank else 0.1)  # the last one writes
        with pytest.raises(PeerLost):
            transport.all_reduce([x], "sum")
        return time.monotonic()

    found = run_mapped(work, 2)
    assert found[1] >= ended[0]


def test_nobody_writes_to_a_rank_that_has_left() -> None:
    """It may be using its memory for something else."""

    def work(transport: CudaSharedTransport, memory: StandIn) -> list[float]:
        x = lay(memory, torch.full((1000,), 1.0 + transport.rank), True)
        if transport.rank:
            transport._announce("all_reduce", "sum", x)
            transport.abandon(PeerLost("enough"))
            time.sleep(0.3)
            return x.unique().tolist()
        time.sleep(0.1)
        mine, lines, _ = transport._announce("all_reduce", "sum", x)
        time.sleep(0.1)
        with pytest.raises(PeerLost):
            transport._write("all_reduce", lambda: reduce_lines(lines, "sum", lines))
        return mine.unique().tolist()

    assert run_mapped(work, 2) == [[1.0], [2.0]]


def test_a_rank_that_gives_up_waits_for_who_writes_to_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    ended = write_slowly(monkeypatch)

    def work(transport: CudaSharedTransport, memory: StandIn) -> float:
        x = lay(memory, torch.ones(1000), True)
        if transport.rank == 2:
            transport._announce("all_reduce", "sum", x)
            time.sleep(0.1)
            transport.abandon(PeerLost("enough"))
            return 0.0
        time.sleep(0.2 if transport.rank == 0 else 0.0)  # the last one writes
        with pytest.raises(PeerLost):
            transport.all_reduce([x], "sum")
        return time.monotonic()

    found = run_mapped(work, 3)
    assert found[1] >= ended[0]


# Which way CUDA tensors travel -------------------------------------------------------------------------------


class Told:
    """A transport of which one rank is here; the others tell what they are said to."""

    def __init__(self, devices: str, processes: str) -> None:
        self.rank, self.size, self._devices, self._processes = 0, len(devices), devices, processes

    def exchange(self, mine: bytes) -> list[bytes]:
        return [f"{a.strip()}\n{b}".encode() for a, b in zip(self._devices, self._processes, strict=True)]


@pytest.mark.parametrize(
    ("devices", "processes", "hosts", "way"),
    [
        ("AB", "12", ["a", "a"], "NCCL"),
        ("AAA", "123", ["a", "a", "a"], "mapped"),
        ("AAB", "123", ["a", "a", "a"], None),  # some share a device, some do not
        ("AA", "11", ["a", "a"], None),  # threads of one process
        ("AA", "12", ["a", "b"], None),  # emulated hosts
        ("A ", "12", ["a", "a"], None),  # one trains on the CPU
    ],
)
def test_ranks_that_all_share_a_device_map_its_memory(
    devices: str, processes: str, hosts: list[str], way: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="A"))
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    monkeypatch.setattr(rendezvous, "_connect_nccl", lambda *_: "NCCL")
    monkeypatch.setattr(rendezvous, "_map_device", lambda *_: "mapped")
    transport: Any = Told(devices, processes)
    assert rendezvous._connect_devices(transport, torch.device("cuda", 0), hosts) == way


class OnDevice(torch.Tensor):
    """A result in memory of another stream than the program's."""

    is_cuda = True
    streams: list[Any] = []  # noqa: RUF012

    def record_stream(self, stream: Any) -> None:
        self.streams.append(stream)


@pytest.mark.parametrize("maps", [True, False])
def test_memory_of_a_result_is_not_given_out_while_the_program_reads_it(
    maps: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A later collective would write to it, in a stream of its own, before the program's stream has read it."""
    here, x = SimpleNamespace(query=lambda: True), SimpleNamespace(device=SimpleNamespace(index=0))
    base: Any = SimpleNamespace(rank=0, size=2, takes_cuda=False)
    mapped: Any = SimpleNamespace(serves=lambda device: True, meets_on_host=True)
    monkeypatch.setattr(torch.cuda, "Event", SimpleNamespace)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: here)
    monkeypatch.setattr(cuda_route, "_streams", {0: SimpleNamespace()})
    finish = cuda_route.choose_route(base, mapped if maps else None, x).finish  # type: ignore[arg-type]
    results = [torch.ones(3).as_subclass(OnDevice), torch.ones(3)]
    OnDevice.streams.clear()
    assert finish is not None
    assert finish(results) is results
    assert OnDevice.streams == [here]


def test_a_timeout_is_that_of_all_ways() -> None:
    ways: list[Any] = [
        SimpleNamespace(rank=0, size=2, set_timeout=lambda s, i=i: set_to.append((i, s))) for i in (0, 1)
    ]
    set_to: list[tuple[int, float]] = []
    for way in ways:
        way.timeout_s, way.close = 9.0, lambda: None
    world = World(ways[0], hosts=["a", "a"], accelerated=ways[1])
    world.set_timeout(5.0)
    world.close()
    assert set_to == [(0, 5.0), (1, 5.0)]


def refuse(device: torch.device) -> StandIn:
    raise NotShareable("cuIpcOpenMemHandle: operation not supported (801)")


def test_where_mapping_is_refused_the_first_rank_says_what_happens_instead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_memory, "CudaMemory", refuse)
    transport: Any = SimpleNamespace(rank=0, size=1, timeout_s=9.0, exchange=lambda data: [data])
    with pytest.warns(UserWarning, match=r"pass through host memory.*operation not supported"):
        assert rendezvous._map_device(transport, torch.device("cuda", 0), None) is None
    monkeypatch.setenv("UNISONO_PEER_MEMORY", "0")
    assert rendezvous._map_device(transport, torch.device("cuda", 0), None) is None
