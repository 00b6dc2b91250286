"""Links that the transport emulates: when operations end, on a clock of the test's own, and that results are right."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from unisono.launchers.runtime.link_emulation import FRAMED, Link, Wire
from unisono.world.transports import Transport
from unisono.world.transports.shaped import ShapedTransport
from unisono.world.transports.threads import Hub, ThreadTransport

RATE = 100e6
SIGN = 128  # bytes that a rank tells the next before each operation


class Clock(threading.local):
    """Each rank's own time, which goes on when it waits."""

    now = 0.0

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def run_ranks(
    run: Callable[[Transport, Clock], Any], *, hosts: Sequence[int], links: Sequence[Link], starts: Sequence[float] = ()
) -> tuple[list[Any], list[float]]:
    """`run` on every rank, `hosts[r]` being rank r's host: what each returned, and its time then."""
    clock, hub = Clock(), Hub(len(hosts), 60.0)
    wire = Wire(Wire.create(len(links)), len(links), clock=lambda: clock.now, sleep=clock.sleep)

    def work(rank: int) -> tuple[Any, float]:
        clock.now = starts[rank] if starts else 0.0
        transport = ShapedTransport(ThreadTransport(hub, rank), wire, [links[host] for host in hosts], hosts)
        return run(transport, clock), clock.now

    with ThreadPoolExecutor(len(hosts)) as pool:
        found = [future.result() for future in [pool.submit(work, rank) for rank in range(len(hosts))]]
    return [value for value, _ in found], [now for _, now in found]


def seconds(nbytes: float, rate: float = RATE) -> float:
    return 8 * FRAMED * nbytes / rate


@pytest.mark.parametrize("latency_s", [0.0, 0.02])
def test_an_all_reduce_takes_the_rounds_and_bytes_of_a_ring(latency_s: float) -> None:
    def run(transport: Transport, _: Clock) -> list[float]:
        x = torch.full((100_000,), float(transport.rank))
        transport.all_reduce([x], "sum")
        return [x.min().item(), x.max().item()]

    values, ends = run_ranks(run, hosts=[0, 1, 2, 3], links=[Link(RATE, latency_s)] * 4)
    assert values == [[6.0, 6.0]] * 4
    assert ends == pytest.approx([seconds(2 * 3 / 4 * 400_000 + SIGN) + 2 * 3 * latency_s] * 4)


def test_the_slowest_link_and_the_last_rank_set_the_time() -> None:
    def run(transport: Transport, _: Clock) -> None:
        transport.all_reduce([torch.zeros(100_000)], "mean")

    slow = Link(RATE / 10)
    _, ends = run_ranks(run, hosts=[0, 1, 2], links=[Link(RATE), slow, Link(RATE)], starts=[0.0, 0.0, 3.0])
    # The slow link has had three seconds: it would have been through, but for the rank that came last.
    assert ends == pytest.approx([3.0 + seconds(2 * 2 / 3 * 400_000 + SIGN)] * 3)
    _, ends = run_ranks(run, hosts=[0, 1, 2], links=[Link(RATE), slow, Link(RATE)])
    assert ends == pytest.approx([seconds(2 * 2 / 3 * 400_000 + SIGN, RATE / 10)] * 3)


def test_workers_of_a_host_share_its_link_and_what_stays_there_is_free() -> None:
    def run(transport: Transport, _: Clock) -> list[list[float]]:
        parts = [torch.full((25_000,), float(10 * transport.rank + r)) for r in range(4)]
        outs = [torch.empty(25_000) for _ in range(4)]
        transport.all_to_all(parts, outs)
        return [[out.min().item(), out.max().item()] for out in outs]

    values, ends = run_ranks(run, hosts=[0, 0, 1, 1], links=[Link(RATE)] * 2)
    assert values == [[[10.0 * r + rank] * 2 for r in range(4)] for rank in range(4)]
    # Each of two workers sends 100,000 bytes to both of the other host; one of them tells the next its sign.
    assert max(ends) == pytest.approx(seconds(2 * 2 * 100_000 + SIGN))
    assert min(ends) == pytest.approx(max(ends))


def test_gathered_and_scattered_bytes_are_those_that_pass_each_link() -> None:
    counts = [100_000, 200_000, 300_000]

    def gather(transport: Transport, _: Clock) -> list[int]:
        outs = [torch.empty(count) for count in counts]
        transport.all_gather(torch.full((counts[transport.rank],), float(transport.rank)), outs)
        return [int(out.mean()) for out in outs]

    values, ends = run_ranks(gather, hosts=[0, 1, 2], links=[Link(RATE, 0.01)] * 3)
    assert values == [[0, 1, 2]] * 3
    assert ends == pytest.approx([seconds(4 * (200_000 + 300_000) + SIGN) + 2 * 0.01] * 3)

    def scatter(transport: Transport, _: Clock) -> list[float]:
        out = torch.empty(counts[transport.rank])
        transport.reduce_scatter(torch.ones(600_000), counts, "sum", out)
        return [out.min().item(), out.max().item()]

    values, ends = run_ranks(scatter, hosts=[0, 1, 2], links=[Link(RATE, 0.01)] * 3)
    assert values == [[3.0, 3.0]] * 3
    assert ends == pytest.approx([seconds(4 * (200_000 + 300_000) + SIGN) + 2 * 0.01] * 3)


def test_few_bytes_go_to_all_ranks_at_once_and_take_one_latency() -> None:
    counts = [1000, 2000, 3000]

    def gather(transport: Transport, _: Clock) -> list[int]:
        outs = [torch.empty(count) for count in counts]
        transport.all_gather(torch.full((counts[transport.rank],), float(transport.rank)), outs)
        return [int(out.mean()) for out in outs]

    values, ends = run_ranks(gather, hosts=[0, 1, 2], links=[Link(RATE, 0.01)] * 3)
    assert values == [[0, 1, 2]] * 3
    assert ends == pytest.approx([seconds(4 * 2 * 3000 + SIGN) + 0.01] * 3)


def test_a_broadcast_ends_at_its_source_first() -> None:
    def run(transport: Transport, _: Clock) -> float:
        x = torch.full((250_000,), float(transport.rank))
        transport.broadcast([x], 1)
        return x.mean().item()

    values, ends = run_ranks(run, hosts=[0, 1, 2], links=[Link(RATE, 0.05)] * 3)
    assert values == [1.0] * 3
    assert ends[1] < ends[2] < ends[0]
    assert ends[0] - ends[2] == pytest.approx(0.05)


def test_a_message_arrives_when_its_bytes_have_passed_both_links_and_no_later_for_who_is_late() -> None:
    def run(transport: Transport, clock: Clock) -> float:
        x = torch.full((100_000,), float(transport.rank))
        if transport.rank == 0:
            transport.send(x, 1)
        else:
            transport.recv(x, 0)
        return x.mean().item()

    took = seconds(400_000 + SIGN)
    values, ends = run_ranks(run, hosts=[0, 1], links=[Link(RATE, 0.02)] * 2)
    assert values == [0.0, 0.0]
    assert ends == pytest.approx([took, took + 0.02])
    _, ends = run_ranks(run, hosts=[0, 1], links=[Link(RATE, 0.02)] * 2, starts=[0.0, 9.0])
    assert ends == pytest.approx([took, 9.0])


def test_messages_to_one_host_share_the_way_into_it() -> None:
    def run(transport: Transport, _: Clock) -> None:
        x = torch.zeros(100_000)
        if transport.rank:
            transport.send(x, 0)
        for source in range(1, 4) if transport.rank == 0 else ():
            transport.recv(x, source)

    _, ends = run_ranks(run, hosts=[0, 1, 2, 3], links=[Link(RATE)] * 4)
    assert ends == pytest.approx([3 * seconds(400_000 + SIGN), *[seconds(400_000 + SIGN)] * 3])


def test_objects_and_groups_pass_over_the_same_links() -> None:
    def run(transport: Transport, clock: Clock) -> tuple[list[bytes], float]:
        found = transport.exchange(bytes([transport.rank]) * 1000)
        after = clock.now
        pair = transport.split([[0, 2], [1, 3]])
        began = clock.now
        pair.all_reduce([torch.zeros(100_000)], "sum")
        assert after > 0
        return found, clock.now - began

    values, _ = run_ranks(run, hosts=[0, 1, 2, 3], links=[Link(RATE)] * 4)
    assert [found for found, _ in values] == [[bytes([r]) * 1000 for r in range(4)]] * 4
    assert [took for _, took in values] == pytest.approx([seconds(2 * 1 / 2 * 400_000 + SIGN)] * 4)


def test_latency_alone_comes_on_top_of_what_the_kernel_took() -> None:
    class Slow(ThreadTransport):
        """As over a link that the kernel shapes."""

        def __init__(self, hub: Hub, rank: int, clock: Clock) -> None:
            super().__init__(hub, rank)
            self._clock = clock

        def all_reduce(self, parts: Any, op: Any) -> float:
            if parts[0].numel() > 1:
                self._clock.now += 2.0
            return super().all_reduce(parts, op)

    clock, hub = Clock(), Hub(2, 60.0)
    wire = Wire(Wire.create(2), 2, clock=lambda: clock.now, sleep=clock.sleep)

    def work(rank: int) -> float:
        transport = ShapedTransport(Slow(hub, rank, clock), wire, [Link(None, 0.02)] * 2, [0, 1])
        transport.all_reduce([torch.zeros(1000)], "sum")
        return clock.now

    with ThreadPoolExecutor(2) as pool:
        ends = list(pool.map(work, range(2)))
    assert ends == pytest.approx([2.0 + 0.02] * 2)


def test_a_link_is_taken_by_one_after_the_other() -> None:
    clock = Clock()
    wire = Wire(Wire.create(1), 1, clock=lambda: clock.now, sleep=clock.sleep)
    link = Link(8e6 * FRAMED)  # a million bytes of payload a second
    assert wire.take(0, link, up=1e6) == pytest.approx(1.0)
    assert wire.take(0, link, up=1e6) == pytest.approx(2.0)
    assert wire.take(0, link, down=1e6) == pytest.approx(1.0)  # the other way is free
    clock.now = 5.0
    assert wire.take(0, link, up=1e6) == pytest.approx(6.0)
    wire.keep(0, 8.0)
    assert wire.take(0, link, up=1e6, down=2e6) == pytest.approx(10.0)
    wire.hold(10.0)
    assert clock.now == pytest.approx(10.0)
