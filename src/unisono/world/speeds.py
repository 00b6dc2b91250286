"""Samples dealt by speed: how many each rank gets, and when other shares would make a step shorter."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple

__all__ = ["Balance", "deal_by_speed"]

LEAST_GAIN = 0.1  # of a step: for less the shares stay
MOST_SHARE = 2.0  # of an even share: activations take memory
_CHECKS = 2  # in a row that have to promise the gain
_FITTED = 32  # ranks at most whose steps are looked at


def deal_by_speed(m: int, speeds: Sequence[float]) -> list[int]:
    """How many of m samples each rank gets: in proportion to the speeds, to within one sample; at least one each where
    there are enough.

    Every rank computes the same: what is left after rounding down goes to the largest remainders, of equal ones to the
    lower rank.

    >>> deal_by_speed(32, [1.0, 0.25]), deal_by_speed(7, [1.0, 1.0, 1.0]), deal_by_speed(4, [1.0, 0.01])
    ([26, 6], [3, 2, 2], [3, 1])
    """
    total = sum(speeds)
    quotas = [m * speed / total for speed in speeds]
    counts = [int(quota) for quota in quotas]
    by_remainder = sorted(range(len(speeds)), key=lambda r: (counts[r] - quotas[r], r))
    for rank in by_remainder[: m - sum(counts)]:
        counts[rank] += 1
    if m >= len(counts):
        for rank, count in enumerate(counts):
            if not count:
                counts[counts.index(max(counts))] -= 1
                counts[rank] = 1
    return counts


class Balance:
    """Proposes how to deal, from what the ranks measured; the same on every rank that is given the same numbers.

    A step of n samples takes a rank s * (fixed + n) seconds: s is how slow it is, `fixed` what a step costs beside its
    samples (the optimizer, say), counted in samples, the same for all. How much that is shows when shares change.

    Attributes:
        fixed: As far as known; 0 before the first change.
    """

    def __init__(self) -> None:
        self.fixed = 0.0
        self._former: list[float] | None = None  # how fast each rank was by the check before
        self._promised = 0
        self._before: _Steps | None = None  # measured last, with the shares before they were changed
        self._pairs: deque[tuple[_Steps, _Steps]] = deque(maxlen=4)  # before and after a change

    def count_work(self, counts: Sequence[int]) -> list[float]:
        """How much each rank has to do in a step, in samples."""
        return [self.fixed + n for n in counts]

    def propose(self, own_s: Sequence[float], counts: Sequence[int]) -> tuple[float, ...] | None:
        """Speeds to deal by from now on, with a mean of 1; None if the shares stay as they are.

        `own_s`: seconds a step of each rank's own time; `counts`: the samples that it had in it.
        """
        if min(own_s) <= 0.0 or min(counts) <= 0:
            return None
        measured = _Steps(list(counts), list(own_s))
        if self._before is not None:
            self._pairs.append((self._before, measured))
            self._before, self.fixed = None, _fit_fixed(self._pairs, sum(counts) / len(counts))
        now = [work / s for work, s in zip(self.count_work(counts), own_s, strict=True)]
        former, self._former = self._former or now, now
        self._promised = self._promised + 1 if self._pays(self._share(now, counts), counts, now) else 0
        if self._promised < _CHECKS:
            return None
        smoothed = [math.sqrt(a * b) for a, b in zip(now, former, strict=True)]
        wanted = self._share(smoothed, counts)
        if not self._pays(wanted, counts, smoothed):
            return None
        self._former, self._promised, self._before = None, 0, measured
        return tuple(n * len(counts) / sum(wanted) for n in wanted)

    def _share(self, fast: Sequence[float], counts: Sequence[int]) -> list[float]:
        return _share_work(fast, fixed=self.fixed, samples=sum(counts))

    def _pays(self, wanted: Sequence[float], counts: Sequence[int], fast: Sequence[float]) -> bool:
        """Whether other shares would make a step shorter by at least `LEAST_GAIN`."""
        after = self._predict(deal_by_speed(sum(counts), wanted), fast)
        return after < (1.0 - LEAST_GAIN) * self._predict(counts, fast)

    def _predict(self, counts: Sequence[int], fast: Sequence[float]) -> float:
        return max(work / f for work, f in zip(self.count_work(counts), fast, strict=True))


class _Steps(NamedTuple):
    counts: list[int]
    own_s: list[float]


def _share_work(fast: Sequence[float], *, fixed: float, samples: int) -> list[float]:
    """Samples for each rank with which all need the same time; none above its limit, none below one sample.

    >>> _share_work([3.0, 1.0], fixed=0.0, samples=8), _share_work([3.0, 1.0], fixed=2.0, samples=8)
    ([6.0, 2.0], [7.0, 1.0])
    >>> _share_work([10.0, 1.0, 1.0], fixed=0.0, samples=12)
    [8.0, 2.0, 2.0]
    """
    size = len(fast)
    most, least = MOST_SHARE * samples / size, min(1.0, samples / size)
    held: dict[int, float] = {}
    while True:
        free = [r for r in range(size) if r not in held]
        if not free:
            return [held[r] for r in range(size)]
        seconds = (samples - sum(held.values()) + fixed * len(free)) / sum(fast[r] for r in free)
        shares = {r: seconds * fast[r] - fixed for r in free}
        below = {r: least for r in free if shares[r] < least}
        above = {r: most for r in free if shares[r] > most}
        if not below and not above:
            return [held[r] if r in held else shares[r] for r in range(size)]
        # One side at a time: what those below are given may bring others under their limit.
        held |= below or above


def _fit_fixed(pairs: Iterable[tuple[_Steps, _Steps]], even: float) -> float:
    """The fixed cost, in samples, that best explains how steps changed with their samples."""
    changes: list[tuple[int, int, float]] = []
    for before, after in pairs:
        ranks = sorted(range(len(before.counts)), key=lambda r: -abs(after.counts[r] / before.counts[r] - 1.0))
        changes += [(before.counts[r], after.counts[r], after.own_s[r] / before.own_s[r]) for r in ranks[:_FITTED]]

    def miss(fixed: float) -> float:
        total = 0.0
        for a, b, took in changes:
            expected = (fixed + b) / (fixed + a)
            total += min(0.5, abs(took - expected) / max(took, expected))  # a rank may have become faster or slower
        return total

    return min([0.0, *(even * 1.5**k for k in range(-8, 9))], key=miss)
