"""The cost model: replays by hand, lines fitted to points, formulas of rings, other sizes of the world."""

from __future__ import annotations

import math
import random

import pytest

from unisono.predict.costs import Anatomy, Job, Link, Network, Operation, fit, predict, replay


def flat(bytes_per_s: float = 100.0, *, ranks: int = 2) -> Network:
    """Operations take bytes / bytes_per_s, whatever their kind."""
    line = (0.0, 1 / bytes_per_s)
    return Network(ranks, 1, Link(0.0, bytes_per_s * 8), fitted={"all_reduce": line, "all_gather": line})


def reduce(nbytes: int) -> tuple[Operation, ...]:
    return (Operation("all_reduce", nbytes),)


# Replays, by hand ------------------------------------------------------------------------------------------------


def test_what_ends_before_backward_is_hidden() -> None:
    # compute 10: backward ends at 8; buckets ready at 4 and 6 take 2 s each on the wire: 4-6, 6-8.
    step = Anatomy("allreduce", 2, 10.0, (Job(4.0, 0.0, reduce(200), 8.0), Job(6.0, 0.0, reduce(200), 8.0)))
    timing = replay(step, flat())
    assert (timing.total, timing.exposed, timing.hidden, timing.compression) == (10.0, 0.0, 4.0, 0.0)


def test_a_job_waits_for_the_one_before_and_the_program_for_both() -> None:
    # wire: 4-9, then 9-14; backward ended at 8 and waits 6; the optimizer's 2 s follow.
    step = Anatomy("allreduce", 2, 10.0, (Job(4.0, 0.0, reduce(500), 8.0), Job(6.0, 0.0, reduce(500), 8.0)))
    timing = replay(step, flat())
    assert (timing.total, timing.exposed, timing.hidden) == (16.0, 6.0, 4.0)


def test_without_overlap_all_of_it_follows() -> None:
    jobs = (Job(4.0, 1.0, reduce(500)), Job(6.0, 1.0, reduce(500)))
    timing = replay(Anatomy("allreduce", 2, 10.0, jobs, overlaps=False), flat())
    assert (timing.total, timing.exposed, timing.compression) == (22.0, 10.0, 2.0)


def test_compression_takes_the_lane_and_communication_may_go_on_behind_it() -> None:
    # one after the other: 0-3 work, 3-5 wire, 5-8 work, 8-10 wire
    jobs = [Job(0.0, 3.0, reduce(200), 0.0), Job(0.0, 3.0, reduce(200), 0.0)]
    assert replay(Anatomy("topk", 2, 1.0, tuple(jobs)), flat()).total == 11.0
    # behind: work 0-3, 3-6; wire 3-5, 6-8
    behind = tuple(Job(0.0, 3.0, reduce(200), 0.0, behind=True) for _ in range(2))
    timing = replay(Anatomy("topk", 2, 1.0, behind), flat())
    assert (timing.total, timing.compression, timing.exposed, timing.hidden) == (9.0, 6.0, 2.0, 2.0)
    # a third that needs the first's result, on the wire till 5 only: work 6-7; one that needs the second's: 8-9
    assert replay(Anatomy("powersgd", 2, 1.0, (*behind, Job(0.0, 1.0, (), 0.0, awaits=0))), flat()).total == 9.0
    assert replay(Anatomy("powersgd", 2, 1.0, (*behind, Job(0.0, 1.0, (), 0.0, awaits=1))), flat()).total == 10.0


def test_what_is_waited_for_early_makes_the_rest_late() -> None:
    # gathered for forward: handed over at 0, needed at 1, there at 4; so backward's job begins at 2+3 and ends at 7.
    jobs = (Job(0.0, 0.0, (Operation("all_gather", 400),), 1.0), Job(2.0, 0.0, reduce(200), 3.0))
    timing = replay(Anatomy("zero", 2, 4.0, jobs), flat())
    assert timing.total == 4.0 + 3.0 + 1.0


def test_one_exchange_in_so_many_steps_costs_each_its_share_and_a_delayed_one_what_does_not_fit() -> None:
    jobs = (Job(1.0, 0.5, reduce(750)),)
    timing = replay(Anatomy("local_sgd", 2, 1.0, jobs, overlaps=False, every=4), flat())
    assert (timing.total, timing.exposed, timing.compression) == (1.0 + 8.0 / 4, 7.5 / 4, 0.5 / 4)
    late = replay(Anatomy("local_sgd", 2, 1.0, jobs, every=4, kind="delayed"), flat())
    assert late.total == pytest.approx(1.0 + (8.0 - 4.0) / 4)
    assert replay(Anatomy("hogwild", 2, 1.0, jobs, kind="asynchronous"), flat()).total == 1.0


def test_the_interval_follows_the_spread_of_compute_and_network() -> None:
    samples = tuple(1.0 + i / 100 for i in range(-10, 11))
    step = Anatomy("allreduce", 2, 1.0, (Job(1.0, 0.0, reduce(100)),), samples_s=samples)
    timing, low, high = predict(step, flat())
    assert timing.total == 2.0
    assert (low, high) == (pytest.approx(0.92 + 0.95), pytest.approx(1.08 + 1.05))


def test_an_anatomy_goes_through_json() -> None:
    step = Anatomy("qsgd", 4, 0.1, (Job(0.05, 0.01, reduce(7), behind=True, awaits=0), Job(0.1, 0.0)), samples_s=(0.1,))
    assert Anatomy.from_dict(step.to_dict()) == step


def test_an_unknown_operation_is_refused() -> None:
    with pytest.raises(ValueError, match="gatherv"):
        Operation("gatherv", 1)


# Lines ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bits_per_s", [1e8, 1e10])
def test_a_fit_finds_latency_and_bandwidth_in_noise_with_outliers(bits_per_s: float) -> None:
    rng = random.Random(5)
    points = []
    for nbytes in (256, 4096, 65_536, 1 << 20, 8 << 20):
        for i in range(5):
            seconds = (0.0005 + nbytes * 8 / bits_per_s) * rng.uniform(0.97, 1.05)
            points.append((nbytes, seconds * (20 if i == 0 else 1)))
    latency_s, s_per_byte = fit(points)
    assert latency_s == pytest.approx(0.0005, rel=0.15)
    assert s_per_byte == pytest.approx(8 / bits_per_s, rel=0.1)


def test_a_fit_never_gives_negative_numbers() -> None:
    assert fit([(1000, 0.002), (1_000_000, 0.001)])[1] == 0.0
    assert fit([(1000, 1e-6), (1_000_000, 1.0)])[0] >= 0.0
    assert fit([(1000, 0.5)]) == (0.0, 0.0005)
    with pytest.raises(ValueError, match="at least one"):
        fit([])


# Formulas ---------------------------------------------------------------------------------------------------------


def test_rings_between_hosts_cost_what_the_papers_say() -> None:
    net = Network(4, 1, Link(0.001, 8e6))  # 1 MB/s
    assert net.seconds(Operation("all_reduce", 4_000_000)) == pytest.approx(2 * 3 / 4 * 4 + 7 * 0.001)
    assert net.seconds(Operation("reduce_scatter", 4_000_000)) == pytest.approx(3 / 4 * 4 + 4 * 0.001)
    assert net.seconds(Operation("all_gather", 1_000_000)) == pytest.approx(3 + 4 * 0.001)
    assert net.seconds(Operation("all_to_all", 4_000_000)) == pytest.approx(3 + 2 * 0.001)
    assert net.seconds(Operation("send", 1_000_000)) == pytest.approx(1 + 0.001)


def test_each_byte_crosses_the_network_once_a_host() -> None:
    net = Network(8, 4, Link(0.0, 8e6), Link(0.0, math.inf))
    assert net.seconds(Operation("all_reduce", 1_000_000)) == pytest.approx(1.0)  # two hosts: 2 * 1/2
    assert net.seconds(Operation("all_gather", 1_000_000)) == pytest.approx(4.0)  # four ranks' parts to the other host
    assert net.seconds(Operation("all_reduce", 1_000_000, "inside")) == 0.0


def test_what_was_fitted_counts_and_grows_as_the_formula_does() -> None:
    net = Network(4, 1, Link(0.001, 8e6), fitted={"all_reduce": (0.014, 3e-6)})  # twice the formula's
    assert net.seconds(Operation("all_reduce", 1_000_000)) == pytest.approx(3.014)
    eight = net.with_ranks(8)
    assert eight.seconds(Operation("all_reduce", 1_000_000)) == pytest.approx(2 * (7 / 4 + 15 * 0.001))
    faster = net.with_bandwidth(16e6)
    assert faster.seconds(Operation("all_reduce", 1_000_000)) == pytest.approx(1.514)
    assert net.with_ranks(1).seconds(Operation("all_reduce", 1_000_000)) == 0.0


def test_measured_points_count_between_them_and_their_last_rate_beyond() -> None:
    points = [(1000, 0.001), (1_000_000, 0.1), (2_000_000, 1.1)]  # the first megabyte passes almost at once
    net = Network(2, 1, Link(0.0, 8e6), fitted={"all_reduce": (0.0, 1e-6)}, curves={"all_reduce": points})
    assert net.seconds(Operation("all_reduce", 1_500_000)) == pytest.approx(0.6)
    assert net.seconds(Operation("all_reduce", 3_000_000)) == pytest.approx(2.1)
    assert net.seconds(Operation("all_reduce", 500)) == pytest.approx(0.0005)


def test_measured_points_move_with_the_bandwidth() -> None:
    net = Network(
        2, 1, Link(0.0, 8e6), fitted={"all_reduce": (0.5, 1e-6)}, curves={"all_reduce": [(0, 0.5), (1e6, 1.6)]}
    )
    assert net.with_bandwidth(16e6).seconds(Operation("all_reduce", 1_000_000)) == pytest.approx(0.6 + 0.5)
    assert net.with_bandwidth(8e6).seconds(Operation("all_reduce", 1_000_000)) == pytest.approx(1.6)


def test_the_large_sizes_say_the_rate_also_where_most_sizes_are_small() -> None:
    points = [(512, 0.02), (4096, 0.019), (32_768, 0.021), (262_144, 0.05), (2_097_152, 0.3)]
    assert fit(points)[1] == pytest.approx(0.28 / 2_097_152, rel=0.1)


def test_what_is_hidden_takes_cores_away_where_none_is_free() -> None:
    # 4 s of messages, of which the program waits for 1; each hidden second takes half a second of compute.
    step = Anatomy("allreduce", 2, 10.0, (Job(5.0, 0.0, reduce(400), 8.0),))
    net = Network(2, 1, Link(0.0, 800.0), fitted={"all_reduce": (0.0, 0.01)}, steals={"all_reduce": 0.5})
    timing = replay(step, net)
    assert (timing.total, timing.hidden) == (pytest.approx(10 + 1 + 1.5), pytest.approx(3.0))
