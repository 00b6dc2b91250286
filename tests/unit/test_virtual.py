"""Costs without machines: bytes and seconds of a simulated world against the closed forms of rings."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

import unisono as un
from collective_matrix import DTYPES, ops_of, values
from unisono import World
from unisono.background import is_among_ranks

BITS, LATENCY = 8e6, 0.25  # a byte a microsecond


def total(world: World) -> float:
    return world.transport.seconds  # type: ignore[union-attr]


FORMS: dict[str, tuple[Callable[[World, torch.Tensor], Any], Callable[[int, int], tuple[float, int]]]] = {
    # how it is called; (bytes on one link, messages in a row) of N ranks and b bytes
    "all_reduce": (lambda w, x: w.all_reduce(x), lambda n, b: (2 * (n - 1) / n * b, 2 * (n - 1))),
    "reduce_scatter": (lambda w, x: w.reduce_scatter(x), lambda n, b: ((n - 1) / n * b, n - 1)),
    "all_gather": (lambda w, x: w.all_gather(x, even=True), lambda n, b: ((n - 1) * b, n - 1)),
    "broadcast": (lambda w, x: w.broadcast(x), lambda n, b: (b, n - 1)),
    "send": (lambda w, x: w.send(x, 1), lambda n, b: (b, 1)),
}


@pytest.mark.parametrize("device", ["meta", "cpu"])
@pytest.mark.parametrize("size", [2, 4, 8])
@pytest.mark.parametrize("name", FORMS)
def test_bytes_and_seconds_follow_the_closed_forms(name: str, size: int, device: str) -> None:
    call, form = FORMS[name]
    world = un.simulate(size, bits_per_s=BITS, latency_s=LATENCY)
    x = torch.zeros(size * 1000, device=device)
    call(world, x).wait()
    nbytes, messages = form(size, 4000 * size)
    assert total(world) == pytest.approx(nbytes * 8 / BITS + messages * LATENCY)
    assert world.ledger.records[-1].bytes_sent == math.ceil(nbytes)
    assert world.ledger.records[-1].op == name
    world.close()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_other_ranks_count_as_equal_to_this_one(dtype: torch.dtype) -> None:
    world = un.simulate(3, rank=1)
    x = values(0, [6], dtype)
    for op in ops_of(dtype):
        copies = torch.stack([x] * 3)
        got = world.all_reduce(x.clone(), op).wait()
        part = world.reduce_scatter(x.clone(), op).wait()
        if op == "sum" and dtype != torch.uint64:
            wide = copies.to(torch.complex128 if dtype.is_complex else torch.float64 if x.is_floating_point() else int)
            assert got.equal(wide.sum(0).to(dtype))
        elif op != "sum":
            assert got.equal(x)
        assert part.equal(got[2:4])
    assert [y.equal(x) for y in world.all_gather(x).wait()] == [True] * 3
    assert world.gather_objects({"a": 1}) == [{"a": 1}] * 3
    world.barrier()
    world.close()


def test_the_ledger_shows_virtual_seconds_without_passing_them() -> None:
    world = un.simulate(4, bits_per_s=1e6, latency_s=0.0)
    world.ledger.restart()
    began = time.perf_counter()
    for _ in range(3):
        handle = world.all_reduce(torch.zeros(1_000_000, device="meta"), tag="gradients")
        while not handle.done():  # a program that comes late to its wait stands still for as long
            pass
        handle.wait()
        world.ledger.step()
    took_s = time.perf_counter() - began
    each = 2 * 3 / 4 * 4_000_000 * 8 / 1e6
    totals = world.ledger.totals()
    assert totals.communication == pytest.approx(3 * each, abs=0.5)
    assert took_s < totals.communication, "minutes"
    assert totals.wall == pytest.approx(3 * each, abs=5)
    assert [r.end - r.start for r in world.ledger.records] == pytest.approx([each] * 3, abs=0.5)
    report = world.ledger.gather(world)
    assert len(report.ranks) == 4
    assert report.split()["communication"] == pytest.approx(each, abs=0.5)
    world.close()


def test_worlds_inside_a_simulated_world_share_its_clock() -> None:
    """The strategies talk through a channel of their own: its seconds must reach the ledger."""
    world = un.simulate(8, bits_per_s=BITS, latency_s=0.0, per_host=4)
    assert (world.local_size, world.host) == (4, "host0")
    x = torch.zeros(1000, device="meta")
    channel, inside = world.channel(), world.split("host")
    assert (channel.size, inside.size) == (8, 4)
    channel.all_reduce(x).wait()
    inside.all_reduce(x).wait()
    assert total(world) == pytest.approx(2 * 7 / 8 * 0.004 + 2 * 3 / 4 * 0.004)
    assert world.ledger.records[-1].end - world.ledger.records[-1].start >= 2 * 3 / 4 * 0.004
    alone = world.split([[r] for r in range(8)])
    assert alone.size == 1
    world.close()


def test_bad_settings_are_refused() -> None:
    for bad in ({"size": 0}, {"size": 4, "rank": 4}, {"size": 4, "rank": -1}):
        with pytest.raises(ValueError, match=r"expected size >= 1 and 0 <= rank < size"):
            un.simulate(**bad)
    for bad in ({"bits_per_s": 0}, {"latency_s": -1.0}, {"latency_s": math.nan}):
        with pytest.raises(ValueError, match=r"expected bits_per_s > 0"):
            un.simulate(2, **bad)
    assert un.simulate(1).size == 1


def test_a_world_of_threads_has_the_device_that_was_asked_for_and_backward_runs_in_its_own_thread() -> None:
    def work(world: World) -> tuple[torch.device, bool]:
        return world.device, torch._C._is_multithreading_enabled()

    assert un.run_threads(work, 2, device="meta") == [(torch.device("meta"), False)] * 2
    assert un.run_threads(work, 1)[0][0] == torch.device("cpu")
    assert torch._C._is_multithreading_enabled()


def test_rank_threads_of_a_gpu_are_at_it_and_know_that_they_are_among_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """A new thread begins at the first GPU; where others draw random numbers, none may capture a CUDA graph."""
    chosen: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    assert un.run_threads(lambda world: is_among_ranks(), 2, device="cuda:3") == [True, True]
    assert chosen == [torch.device("cuda:3")] * 2
    assert un.run_threads(lambda world: is_among_ranks(), 1) == [False]
    assert not is_among_ranks()
