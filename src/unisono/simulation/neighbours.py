"""Workers that wait for a few neighbours only: delays wander from neighbour to neighbour."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from unisono.simulation.stragglers import Floats, Stragglers

__all__ = ["Heard", "list_heard", "simulate_neighbours"]

Heard = list[NDArray[np.int64]]  # for each message that a worker gets: from whom, by worker


def list_heard(graph: str, exchange: int, workers: int) -> Heard:
    """Whom each worker hears in an exchange, as `gossip` has it.

    >>> [who.tolist() for who in list_heard("ring", 0, 4)]
    [[3, 0, 1, 2], [1, 2, 3, 0]]
    """
    ranks = np.arange(workers)
    if workers < 2:
        return []
    if graph == "ring":
        return [(ranks - 1) % workers] + ([(ranks + 1) % workers] if workers > 2 else [])
    if graph == "exponential":
        rounds = max(1, (workers - 1).bit_length())
        return [(ranks - 2 ** (exchange % rounds)) % workers]
    if graph == "shift_one":
        half = workers // 2
        lower = ranks[:half]
        upper = (exchange + lower) % half + half
        pair = np.empty(workers, dtype=np.int64)
        pair[lower], pair[upper] = upper, lower
        return [pair]
    raise ValueError(f"a graph is ring, exponential or shift_one, got {graph!r}")


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
