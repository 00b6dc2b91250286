"""Compute that was measured under each method for a few steps only, made steadier by that of all the others.

The program computes the same under every method, so most of what differs is chance. How much of it is, follows from how
far the steps of one method lie apart: where that explains the differences between methods, they count for little.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean, median, variance

from unisono.predict.costs import Anatomy

__all__ = ["steady"]

_FEWEST = 4  # methods from which on something can be said
_CLEAR = 3.0  # standard errors: a difference beyond that is no chance
_MEDIAN = 1.57  # the variance of a median over that of a mean
_DEVIATION = 1.4826  # a standard deviation over a median distance from the middle


def steady(anatomies: Sequence[Anatomy]) -> list[Anatomy]:
    """The same with less chance in `compute_s`; times of jobs move along.

    >>> steps = [(0.10, 0.12, 0.11), (0.09, 0.11, 0.13), (0.11, 0.10, 0.12), (0.08, 0.09, 0.085)]
    >>> some = [Anatomy(f"m{i}", 1, sorted(s)[1], samples_s=s) for i, s in enumerate(steps)]
    >>> [round(each.compute_s, 3) for each in steady(some)]
    [0.11, 0.11, 0.11, 0.085]
    """
    series = [_slowest(each) for each in anatomies]
    spread = [variance(steps) for steps in series if len(steps) > 1]
    if len(anatomies) < _FEWEST or not spread:
        return list(anatomies)
    own = [median(steps) for steps in series]
    chance = [_MEDIAN * (variance(s) if len(s) > 1 else fmean(spread)) / len(s) for s in series]
    centre, typical = median(own), fmean(chance)
    apart = (_DEVIATION * median(abs(each - centre) for each in own)) ** 2
    real = max(0.0, apart - typical)
    steadied = []
    for anatomy, mine, error in zip(anatomies, own, chance, strict=True):
        error = (error + typical) / 2  # of three steps' own spread little is known
        share = real / (real + error) if real + error else 1.0
        if (mine - centre) ** 2 > _CLEAR**2 * error:
            share = 1.0
        steadied.append(anatomy.slowed((centre + share * (mine - centre)) / mine, work=1.0))
    return steadied


def _slowest(anatomy: Anatomy) -> list[float]:
    """Of every step, the rank that computed longest. Samples are by rank, then by step."""
    steps = len(anatomy.samples_s) // anatomy.ranks
    return [max(anatomy.samples_s[step::steps]) for step in range(steps)]
