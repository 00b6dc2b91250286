"""What a fit cost: the quantities of parallel computing, measured on the run itself.

words sent; latency; communication time = words / bandwidth + latency; synchronisation cost = waiting for the slowest
worker; speed-up ratio = seconds with one worker / seconds with m.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import torch

from unisono.tables.map_reduce.map_reduce import Ask, Round
from unisono.world import World, probe
from unisono.world.ledger import Sent
from unisono.world.probe import take_slowest

WORD_BYTES = 8
_BANDWIDTH_BYTES = 4 << 20


@dataclass
class FitReport:
    """The costs of one fit.

    workers: m. rounds: broadcast, map, reduce. words_sent: by all workers together, 8 bytes each.
    latency_s: a message of one word; on an engine's own MapReduce, what the quickest round took beyond its slowest
    worker. bandwidth_words_per_s: what a worker sends, in large messages; 0 where it was not measured.
    communication_s: words a worker / bandwidth + latency of its messages.
    synchronisation_s: what the average worker waited for the slowest in each round.
    compute_s: of the average worker. wall_s: of all rounds. speedup: by number of workers, of a round.
    """

    workers: int
    rounds: int
    wall_s: float
    compute_s: float
    synchronisation_s: float
    words_sent: float = 0.0
    messages: int = 0
    latency_s: float = 0.0
    bandwidth_words_per_s: float = 0.0
    speedup: dict[int, float] = field(default_factory=dict)
    solver: str = ""

    @property
    def communication_s(self) -> float:
        """words / bandwidth + latency, for one worker's share of words and messages."""
        each = self.words_sent / self.workers
        moving = each / self.bandwidth_words_per_s if self.bandwidth_words_per_s else 0.0
        return moving + self.messages * self.latency_s

    def as_dict(self) -> dict[str, Any]:
        """All quantities by name."""
        return {**asdict(self), "communication_s": self.communication_s}

    def __str__(self) -> str:
        lines = [
            f"{self.workers} worker{'s' * (self.workers != 1)}, {self.rounds} rounds, solver {self.solver}",
            f"{'wall':<22}{self.wall_s:>12.6f} s",
            f"{'compute':<22}{self.compute_s:>12.6f} s",
            f"{'synchronisation':<22}{self.synchronisation_s:>12.6f} s",
            f"{'communication':<22}{self.communication_s:>12.6f} s = words / bandwidth + latency",
            f"{'words sent':<22}{self.words_sent:>12.0f} in {self.messages} messages a worker",
            f"{'latency':<22}{self.latency_s * 1e6:>12.1f} µs",
            f"{'bandwidth':<22}{self.bandwidth_words_per_s / 1e6:>12.1f} million words/s",
        ]
        if self.speedup:
            lines.append(f"{'speed-up':<22}" + ", ".join(f"{m}: {ratio:.2f}" for m, ratio in self.speedup.items()))
        return "\n".join(lines)


def sum_costs(rounds: list[Round], workers: int) -> FitReport:
    """Add up what the rounds recorded: wall time, compute, and waiting for the slowest worker."""
    known = [r.compute_s for r in rounds if r.compute_s]
    return FitReport(
        workers=workers,
        rounds=len(rounds),
        wall_s=sum(r.wall_s for r in rounds),
        compute_s=sum(statistics.fmean(each) for each in known),
        synchronisation_s=sum(max(each) - statistics.fmean(each) for each in known),
    )


class CountingAsk:
    """An engine's `Ask` that counts words: the state to every worker, and a value back from each."""

    def __init__(self, ask: Ask) -> None:
        self.ask, self.workers, self.log, self.words = ask, ask.workers, ask.log, 0

    def __call__(self, state: Any, *, reduce: Literal["sum"] | None = None) -> Any:
        value = self.ask(state, reduce=reduce)
        self.words += self.workers * (count_words(state) + count_words(value))
        return value

    def make_report(self) -> FitReport:
        """What the rounds cost, as far as it shows from the server."""
        found = sum_costs(self.log, self.workers)
        beyond = [r.wall_s - max(r.compute_s) for r in self.log if r.compute_s]
        found.words_sent, found.messages = float(self.words), len(self.log)
        found.latency_s = max(0.0, min(beyond, default=0.0))
        return found


def count_words(value: Any) -> int:
    """Count the numbers in a value, inside arrays and outside; text counts by its bytes.

    >>> count_words({"do": "gradient", "coef": torch.zeros(3, 2), "b": [1.0, 2.0]})
    9
    """
    if isinstance(value, dict):
        return sum(count_words(item) for item in value.values())
    if isinstance(value, list | tuple):
        return sum(count_words(item) for item in value)
    if isinstance(value, str | bytes):
        return -(-len(value) // WORD_BYTES)
    return int(value.numel()) if isinstance(value, torch.Tensor) else int(getattr(value, "size", value is not None))


def count_sent(world: World, before: Sent) -> tuple[float, int]:
    """Count the words that all ranks have sent since `before` (of `ledger.sent()`), and the messages of one rank.

    Every rank must call it: the counts are summed over the ranks.
    """
    now = world.ledger.sent()
    mine = [float(now.bytes_sent - before.bytes_sent), float(now.collectives - before.collectives)]
    sums = torch.tensor(mine, dtype=torch.float64)
    total, messages = world.all_reduce(sums, "sum", tag="report").wait().tolist()
    return total / WORD_BYTES, round(messages / world.size)


def measure_link(world: World) -> tuple[float, float]:
    """Measure the latency (seconds) and each worker's bandwidth (words a second)."""
    if world.size == 1:
        return 0.0, 0.0
    latency_s, s_per_byte = probe.measure_link(world, most_bytes=_BANDWIDTH_BYTES, tag="report")
    return latency_s, 1 / max(WORD_BYTES * s_per_byte, 1e-15)


def measure_speedup(
    work: Callable[[float], torch.Tensor], world: World, *, budget_s: float = 0.5, repeats: int = 3
) -> dict[int, float]:
    """Seconds of a round with one worker over those with 1, 2, ..., m workers that share the same rows.

    `work(fraction)` maps so much of my rows. With k of m workers each has m/k as many rows: my own stand in for those
    of the workers that rest. Where all this would take longer than `budget_s`, fewer rows are mapped and the seconds
    scaled up; the exchange is never scaled.
    """
    m = world.size
    if m == 1:
        return {1: 1.0}
    start = time.perf_counter()
    vector = work(1.0)
    (once_s,) = take_slowest(world, [time.perf_counter() - start], "report")
    passes = sum(m / k for k in range(1, m + 1)) * repeats
    fraction = min(1.0, budget_s / max(once_s * passes, 1e-9))
    seconds = {k: _time_round(work, vector.clone(), world, k, fraction, repeats) for k in range(1, m + 1)}
    return {k: seconds[1] / s for k, s in seconds.items()}


def _time_round(
    work: Callable[[float], torch.Tensor], vector: torch.Tensor, world: World, k: int, fraction: float, repeats: int
) -> float:
    """Measure a round that k workers share, in seconds of the slowest one; the others wait."""
    groups = [list(range(k)), *([list(range(k, world.size))] if k < world.size else [])]
    group = world.split(groups)
    times = []
    for _ in range(repeats):
        world.barrier()
        computed_s = exchanged_s = 0.0
        if world.rank < k:
            start = time.perf_counter()
            left = world.size / k
            while left > 1e-9:
                work(fraction * min(left, 1.0))
                left -= 1.0
            computed_s = time.perf_counter() - start
            group.barrier()
            start = time.perf_counter()
            group.all_reduce(vector, "sum", tag="speedup").wait()
            exchanged_s = time.perf_counter() - start
        computed_s, exchanged_s = take_slowest(world, [computed_s, exchanged_s], "report")
        times.append(computed_s / fraction + exchanged_s)
    group.close()
    return min(times)
