"""Workers that wait for a few neighbours only: delays wander from neighbour to neighbour."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from unisono.predict.simulation.stragglers import Floats, Stragglers

__all__ = ["Heard", "simulate_neighbours"]

Heard = Sequence[NDArray[np.int64]]  # for each message that a worker gets: from whom, by worker


def simulate_neighbours(
    compute_s: float,
    stragglers: Stragglers,
    workers: int,
    steps: int,
    rng: np.random.Generator,
    *,
    heard: Callable[[int], Heard],
    travel_s: Callable[[NDArray[np.int64]], Floats],
    work_s: float = 0.0,
    every: int = 1,
    overlap: bool = True,
) -> Floats:
    """Seconds of each window, in the mean over workers.

    A worker's model of a window's beginning travels while it computes (or before it does, without `overlap`), and it
    ends the window when its own work is done and its neighbours' models are there.

    heard: whom the workers hear in the i-th exchange. travel_s: how long a model is on its way from each of these
    workers to worker 0, 1, ... work_s: what a worker does to an exchange (packing, mixing).
    """
    rates, now = stragglers.rates(workers), np.zeros(workers)
    ends = np.empty(steps)
    for step in range(steps):
        computed = compute_s * rates * stragglers.draw(rng, (workers,))
        come = now
        if step % every == 0:
            for who in heard(step // every):
                come = np.maximum(come, np.maximum(now, now[who]) + travel_s(who))
            computed = computed + work_s * rates
        now = np.maximum(now + computed, come) if overlap else come + computed
        ends[step] = now.mean()
    return np.diff(ends, prepend=0.0)
