"""Who waits for whom in simulations: maxima, queues, neighbours, failures; against closed forms and other programs."""

from __future__ import annotations

import heapq
import math

import numpy as np
import pytest
import torch

import unisono as un
from unisono.methods.spec import build
from unisono.methods.strategies._graphs import neighbours
from unisono.predict.simulation.cluster import Failures
from unisono.predict.simulation.steps import draw_slowest_sums
from unisono.predict.simulation.stragglers import EVEN, Stragglers, parse_stragglers
from unisono.predict.simulation.waiting import Service, simulate_neighbours, simulate_servers, wait_in_line
from unisono.world import World

LOGNORMAL = Stragglers("lognormal", 0.3)


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


# The slowest of all ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [1, 10, 10_000])
def test_the_slowest_of_n_exponentials_takes_the_harmonic_number(workers: int) -> None:
    slowest = Stragglers("exponential", 1.0).draw_slowest(rng(), workers, 100_000)
    assert slowest.mean() == pytest.approx(sum(1 / i for i in range(1, workers + 1)), rel=0.02)


@pytest.mark.parametrize(
    "people",
    [
        LOGNORMAL,
        Stragglers("pauses", 0.02, 3.0),
        Stragglers("measured", samples=(1.0, 1.1, 1.5, 0.9)),
        Stragglers("lognormal", 0.3, slow_share=0.25, slow_times=1.5),
    ],
)
def test_one_draw_of_the_slowest_is_as_the_largest_of_a_draw_of_each(people: Stragglers) -> None:
    workers, steps = 16, 20_000
    each = people.draw(rng(1), (steps, workers)) * people.rates(workers)
    at_once = people.draw_slowest(rng(2), workers, steps)
    for q in (0.1, 0.5, 0.9):
        assert np.quantile(at_once, q) == pytest.approx(np.quantile(each.max(-1), q), rel=0.03)
    assert each.mean() == pytest.approx(people.mean * people.rates(workers).mean(), rel=0.01)


def test_as_many_workers_are_slow_for_good_as_asked() -> None:
    people = parse_stragglers(None, "10%x3")
    assert sorted(people.rates(20).tolist()) == [1.0] * 18 + [3.0] * 2
    assert people.rates(4).tolist() == [1.0] * 4
    assert people.draw_slowest(rng(), 20, 3).tolist() == [3.0] * 3


def test_waits_of_a_real_program_in_threads_are_those_simulated() -> None:
    """Ranks carry clocks that they advance themselves, and meet at the latest of all."""
    ranks, steps, every = 4, 200, 5

    def train(world: World) -> tuple[float, float]:
        own = rng(100 + world.rank)
        clocks = torch.zeros(2, dtype=torch.float64)
        for step in range(steps):
            clocks += float(LOGNORMAL.draw(own, (1,))[0])
            world.all_reduce(clocks[:1], "max").wait()
            if step % every == every - 1:
                world.all_reduce(clocks[1:], "max").wait()
        return float(clocks[0]), float(clocks[1])

    together, apart = un.run_threads(train, ranks)[0]
    assert LOGNORMAL.draw_slowest(rng(), ranks, 20_000).mean() == pytest.approx(together / steps, rel=0.06)
    rounds = draw_slowest_sums(LOGNORMAL, rng(), ranks, 4_000, every)
    assert rounds.mean() / every == pytest.approx(apart / steps, rel=0.06)
    assert apart < together


# Queues at servers -----------------------------------------------------------------------------------------------


def test_a_queue_waits_as_long_as_m_d_1_does() -> None:
    service, load = 1.0, 0.7
    arrivals = np.cumsum(rng(3).exponential(service / load, 400_000))
    waited = wait_in_line(arrivals, service, 0.0) - arrivals - service
    assert waited.mean() == pytest.approx(load * service / (2 * (1 - load)), rel=0.03)


def push_one_by_one(service: Service, compute: np.ndarray, steps: int, staleness: int | None) -> list[float]:
    """When each window of all workers ended, by a heap of events; worker w computes for `compute[w]`."""
    count = len(compute)
    free, done, waiting = [0.0, 0.0, 0.0], [0] * count, dict[int, float]()
    heap = [(float(c), w) for w, c in enumerate(compute)]
    heapq.heapify(heap)
    ends = []
    while len(ends) < count * steps:
        t, w = heapq.heappop(heap)
        free[0] = max(t + service.latency_s, free[0]) + service.push_s
        whole = max(free[0], t + service.latency_s + service.own_push_s)
        free[1] = max(whole, free[1]) + service.apply_s
        free[2] = max(free[1], free[2]) + service.pull_s
        end = max(free[2], free[1] + service.own_pull_s) + service.latency_s
        before = min(done)
        done[w] += 1
        ends.append(end)
        waiting[w] = end
        now = end if min(done) > before else 0.0
        for v, since in list(waiting.items()):
            if staleness is None or done[v] - min(done) <= staleness:
                heapq.heappush(heap, (max(since, now) + float(compute[v]), v))
                del waiting[v]
    return ends


@pytest.mark.parametrize("staleness", [1, 3, None])
@pytest.mark.parametrize("push_s", [0.001, 0.05, 0.4])
def test_blocks_of_pushes_end_as_one_by_one(staleness: int | None, push_s: float) -> None:
    service = Service(push_s, 0.01, 2 * push_s, 3 * push_s, push_s, 0.002)
    people = Stragglers(slow_share=0.3, slow_times=1.37)
    workers, steps = 7, 40
    times = simulate_servers(service, 1.0, people, workers, steps, rng(), staleness=staleness)
    ends = push_one_by_one(service, people.rates(workers), steps, staleness)
    tenths = [ends[workers * steps * i // 10 - 1] for i in range(1, 11)]
    assert (times * steps / 10).tolist() == pytest.approx(np.diff(tenths).tolist())


def test_servers_without_a_queue_take_compute_and_the_way_and_busy_ones_a_push_after_the_other() -> None:
    idle = Service(0.01, 0.02, 0.03, 0.04, 0.05, 0.001)
    assert simulate_servers(idle, 1.0, EVEN, 1, 50, rng(), staleness=None).mean() == pytest.approx(1.112)
    busy = Service(0.02, 0.0, 0.03)
    for staleness in (2, None):
        assert simulate_servers(busy, 1.0, EVEN, 200, 40, rng(), staleness=staleness).mean() == pytest.approx(6.0)
    # in rounds: the last push comes at 1 + 200 * 0.02, and the last pull 200 * 0.03 later
    assert simulate_servers(busy, 1.0, EVEN, 200, 40, rng(), staleness=0)[0] == pytest.approx(1 + 4 + 6)


def test_with_a_bound_the_slowest_sets_the_pace_and_without_one_it_does_not() -> None:
    free, people = Service(0.0, 0.0, 0.0), Stragglers(slow_share=0.1, slow_times=3.0)
    none, bound = (simulate_servers(free, 1.0, people, 10, 200, rng(), staleness=s).mean() for s in (None, 2))
    assert none == pytest.approx(10 / (9 + 1 / 3), rel=0.01)
    assert bound == pytest.approx(3.0, rel=0.05)


def test_a_bound_lets_chance_even_out() -> None:
    free = Service(0.0, 0.0, 0.0)
    means = [simulate_servers(free, 1.0, LOGNORMAL, 50, 200, rng(4), staleness=s).mean() for s in (0, 1, 4, None)]
    assert means == sorted(means, reverse=True)
    assert means[0] == pytest.approx(LOGNORMAL.draw_slowest(rng(), 50, 20_000).mean(), rel=0.03)
    assert means[-1] == pytest.approx(1.0, rel=0.02)


# Neighbours ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("graph", ["ring", "exponential", "shift_one"])
@pytest.mark.parametrize("workers", [2, 4, 6, 8])
def test_workers_hear_whom_gossip_hears(graph: str, workers: int) -> None:
    for exchange in range(5):
        heard = build(f"gossip({graph})").pattern().hears(exchange, np.arange(workers), workers).heard
        for rank in range(workers):
            found = {int(who[rank]) for who in heard}
            assert found == set(neighbours(graph, exchange, rank, workers).heard)  # type: ignore[arg-type]


def ring(workers: int, people: Stragglers, travel: float, *, steps: int = 50, overlap: bool = True) -> np.ndarray:
    return simulate_neighbours(
        1.0,
        people,
        workers,
        steps,
        rng(),
        heard=lambda exchange: neighbours("ring", exchange, np.arange(workers), workers).heard,  # type: ignore[arg-type]
        travel_s=lambda who: np.full(workers, travel),
        overlap=overlap,
    )


def test_models_travel_behind_compute_or_before_it() -> None:
    assert ring(8, EVEN, 0.4).tolist() == pytest.approx([1.0] * 50)
    assert ring(8, EVEN, 1.7).tolist() == pytest.approx([1.7] * 50)
    assert ring(8, EVEN, 0.4, overlap=False).tolist() == pytest.approx([1.4] * 50)


def test_a_slow_workers_delay_wanders_round_the_ring() -> None:
    """Of 21 workers one takes 2 s: after t steps one that is d places from it is at max(t, 2 (t - d)) s."""
    people = Stragglers(slow_share=0.04, slow_times=2.0)
    steps = ring(21, people, 0.0, steps=30)
    places = [0, *range(1, 11), *range(1, 11)]
    means = [sum(max(t, 2 * (t - d)) for d in places) / 21 for t in range(31)]
    assert np.cumsum(steps).tolist() == pytest.approx(means[1:])
    assert steps[-1] == pytest.approx(2.0)


# Failures --------------------------------------------------------------------------------------------------------


def test_restarts_cost_what_a_program_that_is_interrupted_loses() -> None:
    failures = Failures(1000.0, "restart", 5.0, 0.0, 20.0, 60.0, 4.0)
    hosts, draws = 10, rng(5)
    spent = done = 0.0
    left = draws.exponential(1000.0 / hosts)

    def survive(seconds: float) -> bool:
        nonlocal spent, left
        took = min(seconds, left)
        spent, left = spent + took, left - took
        if left > 0:
            return True
        left = draws.exponential(1000.0 / hosts)
        return False

    while done < 60.0 * 4000:
        while not survive(60.0 + 4.0):
            while not survive(5.0 + 20.0):
                pass
        done += 60.0
    assert failures.keep(hosts, 0) == pytest.approx(done / spent, rel=0.03)


def test_the_best_interval_between_checkpoints_is_the_best_and_near_youngs() -> None:
    failures = Failures(30 * 86400.0, "restart", checkpoint_s=5.0)
    best = failures.best_interval(100)
    assert best == pytest.approx(math.sqrt(2 * 5.0 * 30 * 864), rel=0.02)
    kept = [
        Failures(30 * 86400.0, "restart", checkpoint_s=5.0, checkpoint_every_s=s).keep(100, 0)
        for s in (0.7 * best, best, 1.4 * best)
    ]
    assert max(kept) == kept[1]


def test_going_on_as_fewer_costs_the_pauses_and_the_missing_hosts() -> None:
    failures = Failures(1e6, detect_s=10.0, recover_s=0.13, start_s=60.0)
    hosts = 100
    lost = hosts / 1e6 * (10.0 + 2 * 0.13) + 60.0 / 1e6
    assert 1 - failures.keep(hosts, 1) == pytest.approx(lost, rel=0.1)
    assert 1 - failures.keep(hosts, 1, waits=False) == pytest.approx(60.0 / 1e6, rel=0.1)
    assert Failures().keep(hosts, 1) == 1.0
    kept = [Failures(mtbf, start_s=60.0).keep(hosts, 1) for mtbf in (1e3, 1e4, 1e5)]
    assert kept == sorted(kept)
    assert all(0 <= share <= 1 for share in kept)


def test_a_cluster_that_never_reaches_a_checkpoint_keeps_nothing() -> None:
    assert Failures(3600.0, "restart").keep(10_000, 0) < 1e-6


# Bad input -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["normal:1", "lognormal", "lognormal:-1", "lognormal:x", "exponential:2", "pauses:3"])
def test_stragglers_that_are_none_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="expected"):
        parse_stragglers(text)
