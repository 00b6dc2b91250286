"""Workers that wait for a few others only: neighbours, whose delays wander from one to the next, or parameter servers,
where pushes and pulls queue."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from unisono.predict.simulation.stragglers import Floats, Stragglers

_LEAST_BLOCK = 64


@dataclass(frozen=True)
class Service:
    """What one push and its pull take: of the servers, of the worker's own link, and on the way.

    push_s, apply_s, pull_s: how long a server's link in, its processor and its link out are busy; pushes are served
        one after the other, in the order in which they come. Several servers hold equal parts, and get the parts of a
        push at the same time: they are one server that is so many times as fast.
    own_push_s, own_pull_s: what the worker's own link takes at least.
    latency_s: one way.
    """

    push_s: float
    apply_s: float
    pull_s: float
    own_push_s: float = 0.0
    own_pull_s: float = 0.0
    latency_s: float = 0.0


class _Queues:
    """The three queues of a server, and until when each is busy."""

    def __init__(self, service: Service) -> None:
        self.service, self.free = service, (0.0, 0.0, 0.0)

    def serve(self, pushed: Floats) -> tuple[Floats, tuple[Floats, Floats, Floats]]:
        """When each of these pushes, sorted by when they begin, has its answer; and when each queue let it go."""
        s = self.service
        received = wait_in_line(pushed + s.latency_s, s.push_s, self.free[0])
        whole = np.maximum(received, pushed + s.latency_s + s.own_push_s)
        applied = wait_in_line(whole, s.apply_s, self.free[1])
        sent = wait_in_line(applied, s.pull_s, self.free[2])
        return np.maximum(sent, applied + s.own_pull_s) + s.latency_s, (received, applied, sent)

    def keep(self, left: tuple[Floats, Floats, Floats], count: int) -> None:
        """Note that the first `count` pushes of a block were served."""
        self.free = (float(left[0][count - 1]), float(left[1][count - 1]), float(left[2][count - 1]))


def wait_in_line(arrivals: Floats, service_s: float, free: float) -> Floats:
    """When each leaves a queue that serves one after the other: d_i = max(a_i, d_(i-1)) + service, at once for all.

    >>> wait_in_line(np.array([0.0, 1.0, 5.0]), 2.0, 0.0)
    array([2., 4., 7.])
    """
    ahead = service_s * np.arange(len(arrivals))
    waiting = np.maximum.accumulate(np.maximum(arrivals, free) - ahead)
    return np.asarray(waiting + ahead + service_s)


def simulate_servers(
    service: Service,
    compute_s: float,
    stragglers: Stragglers,
    workers: int,
    steps: int,
    rng: np.random.Generator,
    *,
    staleness: int | None,
) -> Floats:
    """Seconds from one window to the next, in the mean over workers: one number for each tenth of `steps` but the first
    in which the queues fill (`staleness=0`: one for each step). All workers together finish `workers` windows in it.

    staleness: windows that a worker may be ahead of the slowest; None: any.
    """
    given = (service, compute_s, stragglers, workers, steps, rng)
    return _simulate_rounds(*given) if staleness == 0 else _simulate_pushes(*given, staleness)


def _simulate_rounds(
    service: Service, compute_s: float, stragglers: Stragglers, workers: int, steps: int, rng: np.random.Generator
) -> Floats:
    """All push, one step is taken with the mean, all pull."""
    rates, begin, s = stragglers.rates(workers), np.zeros(workers), service
    ends = np.empty(steps)
    ahead = s.pull_s * np.arange(workers)
    for step in range(steps):
        pushed = np.sort(begin + compute_s * rates * stragglers.draw(rng, (workers,)))
        received = wait_in_line(pushed + s.latency_s, s.push_s, 0.0)
        whole = max(received[-1], pushed[-1] + s.latency_s + s.own_push_s) + s.apply_s
        begin = whole + np.maximum(ahead + s.pull_s, s.own_pull_s) + s.latency_s
        ends[step] = begin[-1]
        rng.shuffle(begin)  # answers come in any order
    return np.diff(ends, prepend=0.0)


def _simulate_pushes(
    service: Service,
    compute_s: float,
    stragglers: Stragglers,
    workers: int,
    steps: int,
    rng: np.random.Generator,
    staleness: int | None,
) -> Floats:
    """Each push is a step of its own. Served block by block, exactly: a block ends before the first push that one of
    its own answers leads to, and where the slowest worker's count changes."""
    rates, queues = stragglers.rates(workers), _Queues(service)
    done = np.zeros(workers, dtype=np.int64)  # windows finished
    free_at = np.zeros(workers)  # when the last answer came
    pushes = compute_s * rates * stragglers.draw(rng, (workers,))  # when each pushes next; inf: it waits
    least, at_least = 0, workers  # the slowest worker's count, and how many have no more
    finished, total, block = 0, workers * max(steps, 10), _LEAST_BLOCK
    marks, times = [max(1, total * i // 10) for i in range(1, 11)], list[float]()
    while len(times) < len(marks):
        size = min(workers, block)
        first = np.argpartition(pushes, size - 1)[:size] if size < workers else np.arange(workers)
        order = first[np.argsort(pushes[first], kind="stable")]
        order = order[: np.searchsorted(pushes[order], np.inf)]
        answered, left = queues.serve(pushes[order])
        again = answered + compute_s * rates[order] * stragglers.draw(rng, (len(order),))
        count = _count_undisturbed(pushes[order], again)
        if staleness is not None:
            lasts = np.flatnonzero(done[order[:count]] == least)
            count = min(count, int(lasts[at_least - 1]) + 1) if len(lasts) >= at_least else count
        queues.keep(left, count)
        who, block = order[:count], max(_LEAST_BLOCK, 4 * count)
        at_least -= int((done[who] == least).sum())
        done[who] += 1
        free_at[who] = answered[:count]
        waits = done[who] - least > staleness if staleness is not None else np.zeros(count, dtype=bool)
        pushes[who] = np.where(waits, np.inf, again[:count])
        if staleness is not None and at_least == 0:
            least, now = int(done.min()), float(answered[:count].max())
            at_least = int((done == least).sum())
            freed = np.flatnonzero(np.isinf(pushes) & (done - least <= staleness))
            work = compute_s * rates[freed] * stragglers.draw(rng, (len(freed),))
            pushes[freed] = np.maximum(free_at[freed], now) + work
        while len(times) < len(marks) and finished + count >= marks[len(times)]:
            times.append(float(answered[marks[len(times)] - finished - 1]))
        finished += count
    return np.diff(times) / np.diff(marks) * workers


def _count_undisturbed(pushes: Floats, again: Floats) -> int:
    """How many of these sorted pushes come before any push that follows one of them."""
    earliest = np.minimum.accumulate(again)
    late = np.flatnonzero(pushes[1:] > earliest[:-1])
    return int(late[0]) + 1 if len(late) else len(pushes)


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
