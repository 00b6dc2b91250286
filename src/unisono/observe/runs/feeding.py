"""Feeds what was asked for with the metrics of a run: `python -m unisono.runs.feeding FOLDER tensorboard,wandb`.

A process of its own reads the run's folder as it grows. So training does not wait for a library or a network; values
of all ranks are joined without a message between them; and it goes on when a worker, or rank 0, is lost. Whoever made
the folder starts it: the launcher, or rank 0 where there is none of ours.
"""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from unisono.observe.runs.reading import Batch, RankLog, RunReader
from unisono.observe.runs.sinks import Asked, Sink, open_sink, read_asked

__all__ = ["Feeder", "Joiner", "main", "start_feeding", "stop_feeding"]

EVERY_S = 0.5
COSTS_EVERY_S = 5.0
_LATE_S = 10.0  # a rank that has not said its value for so long is not waited for
_STOPPING_S = 30.0
_PARTS = ("wall", "compute", "communication", "waiting", "data")


def start_feeding(folder: Path, asked: str) -> subprocess.Popen[bytes] | None:
    """Start the process; None, and a word, where that cannot be done."""
    command = [sys.executable, "-m", "unisono.observe.runs.feeding", str(folder), asked, str(os.getpid())]
    root = str(Path(__file__).parents[3])
    paths = [root, *filter(None, [os.environ.get("PYTHONPATH", "")])]
    try:
        return subprocess.Popen(
            command,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
            stdin=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C comes to whoever started it, which then ends this
        )
    except OSError as error:
        print(f"unisono: nothing is logged to {asked}: {error.strerror}; training continues", file=sys.stderr)
        return None


def stop_feeding(process: subprocess.Popen[bytes]) -> None:
    """The run is over, and its folder says so: wait until all has been handed on."""
    try:
        process.wait(_STOPPING_S)
    except subprocess.TimeoutExpired:
        print(
            f"unisono: not everything that was logged was sent within {_STOPPING_S:.0f} s; the run's folder has it",
            file=sys.stderr,
        )
        process.kill()
        process.wait()


class Joiner:
    """Values of the ranks, joined step by step as soon as every rank that logs a metric has said its own."""

    def __init__(self) -> None:
        self._hows: dict[str, str] = {}
        self._waiting: dict[str, dict[int, dict[int, float]]] = {}  # by name and step: each rank's value
        self._times: dict[tuple[str, int], float] = {}
        self._reached: dict[str, dict[int, tuple[int, float]]] = {}  # by name: the step where each rank is, and when
        self._newest: dict[str, dict[int, float]] = {}  # by name: each rank's value at the last step that was given

    def take_event(self, event: dict[str, Any]) -> None:
        """See Listener: the launcher's events hold no metrics."""

    def take_batch(self, rank: RankLog, batch: Batch) -> None:
        """See Listener."""
        for name, (how, values) in batch.values.items():
            self.take(rank, name, how, values)

    def take(self, rank: RankLog, name: str, how: str, values: Sequence[tuple[float, float, float]]) -> None:
        """Take a rank's values of a metric. One that is each rank's own gets the rank into its name."""
        name = f"{name}/rank{rank.rank}" if how == "rank" else name
        self._hows[name] = how
        steps = self._waiting.setdefault(name, {})
        for step, at, value in values:
            steps.setdefault(int(step), {})[rank.place] = value
            self._times[name, int(step)] = at + rank.offset
        step, at, _ = values[-1]
        self._reached.setdefault(name, {})[rank.place] = int(step), at + rank.offset

    def give(self, *, last: bool = False) -> list[tuple[int, float, dict[str, float]]]:
        """What is complete by now (`last`: all that there is), by step: unix time and values."""
        found: dict[int, tuple[float, dict[str, float]]] = {}
        for name, steps in self._waiting.items():
            reached = self._reached[name].values()
            everyone, newest = min(step for step, _ in reached), max(at for _, at in reached)
            for step in sorted(steps):
                at = self._times[name, step]
                if not last and step > everyone and newest - at < _LATE_S:
                    break
                del self._times[name, step]
                found.setdefault(step, (at, {}))[1][name] = self._join(name, step, at, steps.pop(step))
        return [(step, *found[step]) for step in sorted(found)]

    def _join(self, name: str, step: int, at: float, values: dict[int, float]) -> float:
        """Each rank's value at this step, or its newest before it: in a long run ranks write of different steps. One
        that has said nothing for long does not count."""
        newest = self._newest.setdefault(name, {})
        newest.update(values)
        for place, (reached, when) in self._reached[name].items():
            if reached < step and at - when >= _LATE_S:
                newest.pop(place, None)
        return _join(list(newest.values()), self._hows[name])


def _join(values: Sequence[float], how: str) -> float:
    if how in ("min", "max"):
        return min(values) if how == "min" else max(values)
    total = sum(values)  # not math.fsum, which raises where it overflows
    return total if how == "sum" else total / len(values)


class Feeder:
    """Reads a run folder as it grows, and passes new metrics to the sinks."""

    def __init__(self, folder: Path, asked: Sequence[Asked], parent: int | None = None) -> None:
        """`parent`: the process that started this one, and without which it ends."""
        self.joiner, self._parent = Joiner(), os.getppid() if parent is None else parent
        self.reader = RunReader(folder, listener=self.joiner)
        self._asked, self._sinks = list(asked), list[Sink]()
        self._costs_at = time.monotonic()
        self._costs: dict[int, tuple[int, dict[str, float]]] = {}

    def run(self) -> None:
        """Feed the sinks until the run is over."""
        while True:
            over = self.reader.run.get("ended") is not None or os.getppid() != self._parent
            self.step(last=over)
            if over:
                break
            time.sleep(EVERY_S)
        self.close()

    def step(self, *, last: bool = False) -> None:
        """Read what is new and hand it on."""
        self.reader.poll()
        if not self.reader.ranks and not last:
            return
        self._open()
        fresh = self.joiner.give(last=last)
        if last or time.monotonic() - self._costs_at >= COSTS_EVERY_S:
            self._costs_at = time.monotonic()
            fresh += self._find_costs()
        for step, at, values in fresh:
            known = {name: value for name, value in values.items() if math.isfinite(value)}
            for sink in list(self._sinks) if known else ():
                self._guard(sink, partial(sink.add, step, at, known))
        for sink in list(self._sinks):
            self._guard(sink, sink.flush)

    def close(self) -> None:
        """Close all sinks, with the outcome of the run."""
        outcome = str(self.reader.run.get("outcome") or "killed")
        for sink in list(self._sinks):
            self._guard(sink, partial(sink.close, outcome))

    def _open(self) -> None:
        """When the first worker has written: then it is known what the run is."""
        asked, self._asked = self._asked, []
        for one in asked:
            try:
                self._sinks.append(open_sink(one, self.reader))
            except Exception as error:  # noqa: PERF203  # a library's own: not logged in, no such server, a port in use
                _say(f"nothing is logged to {one}: {_explain(error)}; training continues")

    def _guard(self, sink: Sink, call: Callable[[], None]) -> None:
        try:
            call()
        except Exception as error:  # a library's own
            self._sinks.remove(sink)
            _say(f"nothing more is logged to {sink.asked}: {_explain(error)}; training continues")

    def _find_costs(self) -> list[tuple[int, float, dict[str, float]]]:
        """The cost of a mean step since the last call, over all ranks."""
        sums, steps, sent, step, at = dict.fromkeys(_PARTS, 0.0), 0, 0.0, 0, 0.0
        for place, rank in self.reader.ranks.items():
            before_steps, before = self._costs.get(place, (0, dict.fromkeys(rank.rows.totals, 0.0)))
            steps += rank.rows.steps - before_steps
            for part in _PARTS:
                sums[part] += rank.rows.totals[part] - before[part]
            sent += rank.rows.totals["bytes_sent"] - before["bytes_sent"]
            self._costs[place] = rank.rows.steps, dict(rank.rows.totals)
            step, at = max(step, rank.last_step + 1), max(at, rank.last_unix)
        if not steps:
            return []
        values = {f"step/{'total' if part == 'wall' else part}_ms": 1e3 * sums[part] / steps for part in _PARTS}
        return [(step, at, {**values, "step/bytes_sent": sent / steps})]


def _explain(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:200]}" if lines else type(error).__name__


def _say(text: str) -> None:
    print(f"unisono: {text}", file=sys.stderr, flush=True)


def main(arguments: Sequence[str]) -> int:
    """Entry point of the feeding process: feed the sinks until the run is over."""
    folder, asked, parent = arguments
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # whoever started it decides
    Feeder(Path(folder), read_asked(asked), int(parent)).run()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
