"""How the compute times of workers differ: drawn from a distribution, or from what was measured."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from statistics import NormalDist
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from unisono.units import parse_share_times

Floats = NDArray[np.float64]
Kind = Literal["even", "lognormal", "exponential", "pauses", "measured"]
_EXPECTED = "lognormal:0.1, exponential:0.2, pauses:1%x3 or none"


@dataclass(frozen=True)
class Stragglers:
    """A worker's compute time in a step, over the undisturbed one: independent draws, and workers slow for good.

    even: always 1. lognormal: mean 1, `a` the standard deviation of the logarithm. exponential: at least 1 - a and an
    exponential time of mean a on top, so mean 1. pauses: b times as long in a share `a` of steps. measured: one of
    `samples`, over their mean.

    slow_share, slow_times: so many of the workers, rounded, take so many times as long in every step.
    """

    kind: Kind = "even"
    a: float = 0.0
    b: float = 1.0
    samples: tuple[float, ...] = ()
    slow_share: float = 0.0
    slow_times: float = 1.0

    def __post_init__(self) -> None:
        if self.kind == "measured" and not (self.samples and min(self.samples) >= 0 and sum(self.samples) > 0):
            raise ValueError("measured stragglers need at least one sample, all from 0 up and one above 0")

    @cached_property
    def _sorted(self) -> Floats:
        samples = np.sort(np.asarray(self.samples, dtype=float))
        return np.asarray(samples / samples.mean())

    @property
    def mean(self) -> float:
        """The mean factor of a worker that is not slow for good."""
        return 1.0 + self.a * (self.b - 1.0) if self.kind == "pauses" else 1.0

    def count_slow(self, workers: int) -> int:
        """How many of so many workers are slow for good."""
        return int(self.slow_share * workers + 0.5)

    def rates(self, workers: int) -> Floats:
        """Each worker's constant factor: the slow ones are spread evenly among the others."""
        rates = np.ones(workers)
        slow = self.count_slow(workers)
        if slow:
            rates[(np.arange(slow) * workers) // slow] = self.slow_times
        return rates

    def quantile(self, u: Floats) -> Floats:
        """The factor that a share `u` of draws is below, for workers that are not slow for good."""
        if self.kind == "even":
            return np.ones_like(u)
        if self.kind == "lognormal":
            normal = NormalDist()
            z = np.array([normal.inv_cdf(min(max(x, 1e-300), 1 - 2**-53)) for x in u.ravel()]).reshape(u.shape)
            return np.asarray(np.exp(self.a * z - self.a**2 / 2))
        if self.kind == "exponential":
            return np.asarray(1.0 - self.a - self.a * np.log1p(-np.minimum(u, 1 - 2**-53)))
        if self.kind == "pauses":
            return np.where(u < 1 - self.a, 1.0, self.b)
        at = np.minimum((u * len(self._sorted)).astype(int), len(self._sorted) - 1)
        return np.asarray(self._sorted[at])

    def draw(self, rng: np.random.Generator, shape: tuple[int, ...]) -> Floats:
        """Independent factors, of workers that are not slow for good."""
        if self.kind == "even":
            return np.ones(shape)
        if self.kind == "lognormal":
            return np.asarray(np.exp(self.a * rng.standard_normal(shape) - self.a**2 / 2))
        if self.kind == "exponential":
            return 1.0 - self.a + self.a * rng.standard_exponential(shape)
        if self.kind == "pauses":
            return np.where(rng.random(shape) < 1 - self.a, 1.0, self.b)
        return rng.choice(self._sorted, size=shape)

    def draw_slowest(self, rng: np.random.Generator, workers: int, steps: int) -> Floats:
        """The largest factor of all workers, for each of so many steps. One draw a step: the maximum of n draws is
        below x with probability F(x)^n."""
        slow = self.count_slow(workers)
        found = np.zeros(steps)
        for count, times in ((workers - slow, 1.0), (slow, self.slow_times)):
            if count:
                found = np.maximum(found, times * self.quantile(rng.random(steps) ** (1.0 / count)))
        return found

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        values: dict[str, Any] = {"kind": self.kind, "a": self.a, "b": self.b, "samples": len(self.samples)}
        return {**values, "slow_share": self.slow_share, "slow_times": self.slow_times}

    def describe(self) -> str:
        """How workers' times differ, in words."""
        words = {
            "even": "all workers alike",
            "lognormal": f"compute times spread lognormally by {self.a:g}",
            "exponential": f"compute times with an exponential part of {self.a:.0%}",
            "pauses": f"{100 * self.a:g} % of steps {self.b:g} times as long",
            "measured": f"compute times drawn from {len(self.samples)} measured ones",
        }[self.kind]
        return words + (
            f", {100 * self.slow_share:g} % of workers {self.slow_times:g} times as slow" if self.slow_share else ""
        )


EVEN = Stragglers()


def parse_stragglers(text: str | None, slow: str | None = None, samples: Sequence[float] = ()) -> Stragglers:
    """Stragglers as a command line names them; without `text`, the measured ones (`samples`), if there are any.

    >>> parse_stragglers("lognormal:0.1", "1%x3").slow_times
    3.0
    """
    if slow is not None:
        share, times = parse_share_times(slow, "--slow")
        return replace(parse_stragglers(text, samples=samples), slow_share=share, slow_times=times)
    if text is None:
        return Stragglers("measured", samples=tuple(samples)) if len(samples) > 1 else EVEN
    word, _, value = text.strip().lower().partition(":")
    if word == "none" and not value:
        return EVEN
    if word == "pauses":
        return Stragglers("pauses", *parse_share_times(value, "--stragglers pauses"))
    try:
        a = float(value)
    except ValueError:
        a = math.nan
    if word == "lognormal" and 0 <= a <= 5:
        return Stragglers("lognormal", a)
    if word == "exponential" and 0 <= a <= 1:
        return Stragglers("exponential", a)
    raise ValueError(f"--stragglers: got {text!r}, expected {_EXPECTED} (lognormal takes 0 to 5, exponential 0 to 1)")
