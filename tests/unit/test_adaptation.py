"""The number of workers that is found by measuring, against simulated clusters."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import pairwise

import pytest

from unisono.launchers.scaling import Adaptation, Meter

Curve = Callable[[int], float]


def amdahl(serial: float) -> Curve:
    """Steps a second of n workers, where a share of a step is not divided among them."""
    return lambda n: 10 / (serial + (1 - serial) / n)


def best_at(optimum: int) -> Curve:
    """Perfect up to `optimum` workers; each one more costs a fifth."""
    return lambda n: 10.0 * min(n, optimum) * 0.8 ** max(0, n - optimum)


class Cluster:
    """Workers that are as many as the adaptation asks for, and as fast as a curve says, with noise."""

    def __init__(self, adaptation: Adaptation, workers: int, noise: float = 0.0, seed: int = 0) -> None:
        self.adaptation, self.sizes = adaptation, [workers]
        self.lines: list[str] = []
        self._noise, self._random = noise, random.Random(seed)

    def run(self, curve: Curve, windows: int) -> list[int]:
        """The number of workers in each of the windows."""
        for _ in range(windows):
            rate = curve(self.sizes[-1]) * (1 + self._random.gauss(0, self._noise))
            decision = self.adaptation.take(self.sizes[-1], rate)
            assert abs(decision.workers - self.sizes[-1]) <= 1
            if decision.why:
                self.lines.append(decision.why)
            elif decision.workers != self.sizes[-1]:
                raise AssertionError("a change that is not explained")
            self.sizes.append(decision.workers)
        return self.sizes[-windows:]


def changes(sizes: list[int]) -> int:
    return sum(a != b for a, b in pairwise(sizes))


@pytest.mark.parametrize(
    ("curve", "most", "right"),
    [
        (amdahl(0.0), 8, 8),
        (best_at(3), 8, 3),
        (best_at(1), 4, 1),
        # The second to the seventh are worth 0.54, 0.44, 0.37, 0.32, 0.28 and 0.25: the sixth is the first that does
        # not pay. It helps and stays, but there is no seventh.
        (amdahl(0.3), 8, 6),
    ],
)
def test_it_adds_workers_as_long_as_they_pay(curve: Curve, most: int, right: int) -> None:
    cluster = Cluster(Adaptation(1, most), 1)
    cluster.run(curve, 60)
    sizes = cluster.run(curve, 2000)
    assert sizes.count(right) > 0.95 * len(sizes)
    assert max(sizes) <= right + 1
    assert changes(sizes) <= 2 * 8  # one try at one more each time that the pause has doubled


def test_it_never_leaves_its_bounds() -> None:
    assert set(Cluster(Adaptation(2, 4), 2).run(best_at(1), 500)) == {2, 3}
    assert set(Cluster(Adaptation(2, 4), 2).run(amdahl(0), 500)) == {2, 3, 4}


@pytest.mark.parametrize(("target", "right"), [(10.0, 1), (25.0, 3), (41.0, 5), (1000.0, 8)])
def test_it_adds_no_more_than_the_target_needs(target: float, right: int) -> None:
    cluster = Cluster(Adaptation(1, 8, target=target), 1)
    cluster.run(amdahl(0.0), 60)
    assert set(cluster.run(amdahl(0.0), 500)) == {right}


def test_it_removes_workers_that_the_target_does_not_need_and_keeps_a_margin() -> None:
    cluster = Cluster(Adaptation(1, 8, target=27.5), 8)
    assert cluster.run(amdahl(0.0), 300)[-1] == 4  # three make 30, which is not a tenth above 27.5
    cluster = Cluster(Adaptation(1, 8, target=27.0), 8)
    assert cluster.run(amdahl(0.0), 300)[-1] == 3
    assert changes(cluster.sizes) == 5


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(
    ("curve", "target", "right"),
    [
        (best_at(3), None, {3}),
        (amdahl(0.0), None, {8}),
        (amdahl(0.0), 35.0, {4}),
        (amdahl(0.6), None, {2, 3, 4}),  # worth 0.25, 0.18, 0.14
        (lambda n: 10 * min(n, 4.5), None, {5}),  # something else is used up
        (amdahl(0.3), None, set(range(4, 9))),  # worth 0.37 to 0.23: not to be told apart
    ],
)
def test_it_converges_and_does_not_oscillate_under_noise(
    curve: Curve, target: float | None, right: set[int], seed: int
) -> None:
    cluster = Cluster(Adaptation(1, 8, target=target), 1, noise=0.05, seed=seed)
    cluster.run(curve, 200)
    sizes = cluster.run(curve, 1000)
    assert sum(size in right for size in sizes) > 0.85 * len(sizes)
    assert changes(sizes) <= 20


def test_a_window_with_a_pause_in_it_changes_nothing() -> None:
    cluster = Cluster(Adaptation(1, 4), 1)
    cluster.run(amdahl(0.0), 60)
    for _ in range(20):
        assert cluster.run(lambda n: 0.2 * n, 1) == [4]
        assert set(cluster.run(amdahl(0.0), 10)) == {4}


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("before", "after"), [(2, 5), (6, 2), (5, 3)])
def test_it_follows_a_load_that_changes(before: int, after: int, seed: int) -> None:
    cluster = Cluster(Adaptation(1, 8), 1, noise=0.02, seed=seed)
    assert cluster.run(best_at(before), 300)[-1] == before
    cluster.run(lambda n: 0.6 * best_at(after)(n), 300)
    sizes = cluster.run(lambda n: 0.6 * best_at(after)(n), 600)
    assert sizes.count(after) > 0.9 * len(sizes)


def test_a_target_is_reached_again_after_the_load_has_changed() -> None:
    cluster = Cluster(Adaptation(1, 8, target=35.0), 1, noise=0.02)
    cluster.run(amdahl(0.0), 100)
    for share, right in ((0.5, 8), (1.0, 4), (2.0, 2), (0.9, 4)):
        cluster.run(lambda n, share=share: share * 10.0 * n, 300)
        assert set(cluster.run(lambda n, share=share: share * 10.0 * n, 300)) == {right}


def test_what_did_not_pay_is_tried_again_after_twice_as_long() -> None:
    cluster = Cluster(Adaptation(1, 8), 1)
    sizes = cluster.run(best_at(2), 400)
    tries = [i for i in range(1, len(sizes)) if sizes[i] == 3 != sizes[i - 1]]
    pauses = [b - a for a, b in pairwise(tries)]
    assert len(pauses) >= 3
    assert all(1.5 < b / a < 2.5 for a, b in pairwise(pauses))


def test_every_decision_is_explained() -> None:
    cluster = Cluster(Adaptation(1, 3), 1)
    cluster.run({1: 10.0, 2: 18.0, 3: 17.0}.__getitem__, 14)
    assert cluster.lines == [
        "1 worker: 10 steps/s: one more",
        "2 workers: 18 steps/s, 1.80x that of 1 (the second was worth 0.80 of a worker): one more",
        "3 workers: 17 steps/s, 0.94x that of 2 (the third was worth -0.11 of a worker): one less, "
        "and no more for 16 windows",
        "2 workers: 18 steps/s, 1.06x that of 3 (the third was worth -0.11 of a worker): no more for 13 windows",
    ]


def test_speed_is_measured_after_the_beginning_and_over_whole_steps() -> None:
    meter = Meter(window_s=2.0)
    assert [meter.take(0, 0.0), meter.take(1, 9.0), meter.take(2, 18.0)] == [None] * 3  # slow at first
    assert [meter.take(6, 19.0), meter.take(6, 19.0)] == [None] * 2  # many steps, but not for two seconds
    assert meter.take(12, 20.5) == 4.0
    assert meter.take(13, 40.0) is None  # long, but one step
    assert meter.take(16, 42.5) == 4 / 22
    meter.restart()
    assert meter.take(20, 60.0) is None
    assert meter.take(10, 61.0) is None  # the steps are counted anew
