"""A run folder as N ranks would write it, at R steps a second: for tests, for the benchmark, and to look at the page.

python tests/simulated_run.py FOLDER --ranks 64 --steps-a-second 50 --seconds 60
"""

from __future__ import annotations

import argparse
import json
import math
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from unisono.launchers.runtime.run_folder import RunFolder, name_rank_file

__all__ = ["SimulatedRun"]


class SimulatedRun:
    """Ranks that step together: who is slow has more compute, and the others wait for it.

    Arguments:
        folder: where the run folder is made.
        ranks: how many.
        steps_s: steps a second, were no rank slow.
        slow: by rank, how many times as long its compute takes.
        began: unix time of the first step; earlier than now gives a history.
        hosts: how many hosts the ranks are on.
    """

    def __init__(
        self,
        folder: Path,
        *,
        ranks: int,
        steps_s: float,
        slow: Mapping[int, float] | None = None,
        began: float | None = None,
        hosts: int = 1,
        seed: int = 0,
    ) -> None:
        self.ranks, self.step_s, self.slow = ranks, 1.0 / steps_s, dict(slow or {})
        self.began = time.time() if began is None else began
        self.now = self.began  # the end of the last step
        self.step = 0
        self.lost: set[int] = set()
        self.silent: set[int] = set()
        self._random = np.random.default_rng(seed)
        (folder / "ranks").mkdir(parents=True, exist_ok=True)
        record = RunFolder.create(
            ["train.py"],
            folder=folder / "run",
            workers=ranks,
            command=["unisono", "run", "-n", str(ranks), "train.py", "--epochs", "3"],
            started=self.began - 2.0,
            versions={"unisono": "simulated", "torch": "simulated"},
        )
        if record is None:
            raise OSError(f"no run folder could be made in {folder}")
        self.record, self.folder = record, record.path
        for rank in range(ranks):
            self._append(rank, [self._header(rank, hosts)])

    def write(self, until: float | None = None) -> int:
        """Write all steps that have ended by a time (default: now); gives their number."""
        until = time.time() if until is None else until
        lines: list[list[str]] = [[] for _ in range(self.ranks)]
        first = self.step
        while (length := self._draw_step(until, lines)) > 0.0:
            self.now += length
            self.step += 1
        for rank, some in enumerate(lines):
            if some:
                self._append(rank, some)
        return self.step - first

    def lose(self, rank: int, text: str = "killed by SIGKILL") -> None:
        """Have a worker die."""
        self.lost.add(rank)
        self.record.event("worker lost", rank=rank, place=rank, text=f"rank {rank} was lost: {text}")

    def say(self, rank: int, kind: str, /, **values: Any) -> None:
        """Write an event of a rank's ledger."""
        self._append(rank, [json.dumps(["event", kind, self.step, round(self.now - self.began, 6), values])])

    def finish(self, outcome: str = "ok", report: str = "") -> None:
        """Write the end of all workers and of the launcher."""
        for rank in set(range(self.ranks)) - self.lost:
            self._append(rank, [json.dumps(["end", round(self.now - self.began, 6), {"outcome": outcome}])])
        self.record.finish(outcome, exit_status=0 if outcome == "ok" else 1, report=report)

    def _append(self, rank: int, lines: list[str]) -> None:
        with open(self.folder / name_rank_file(rank), "a", encoding="utf-8") as file:
            file.write("\n".join(lines) + "\n")

    def _header(self, rank: int, hosts: int) -> str:
        values = {
            "format": 1,
            "rank": rank,
            "size": self.ranks,
            "generation": 0,
            "place": rank,
            "host": f"node{rank * hosts // self.ranks}",
            "pid": 10_000 + rank,
            "device": "cpu",
            "strategy": "allreduce",
            "parameters": 25_557_032,
            "clock": 0.0,
            "unix": self.began,
            "time": 0.0,
        }
        return json.dumps(["header", values])

    def _draw_step(self, until: float, lines: list[list[str]]) -> float:
        """One step of every rank, if it ends by then: its length, else 0."""
        noise = self._random.gamma(40.0, 1 / 40.0, self.ranks)
        compute = 0.62 * self.step_s * noise
        data = 0.05 * self.step_s * noise[::-1]
        for rank, factor in self.slow.items():
            compute[rank] *= factor
        alive = np.array([r for r in range(self.ranks) if r not in self.lost and r not in self.silent], dtype=int)
        if not len(alive):
            return 0.0
        own = compute + data
        moving = 0.16 * self.step_s
        length = float(own[alive].max()) + moving
        if self.now + length > until:
            return 0.0
        start = self.now - self.began
        for rank in alive.tolist():
            waiting = length - moving - own[rank]
            lines[rank].append(
                f'["step",{self.step},{start:.6f},{length:.6f},{compute[rank]:.6f},{moving:.6f},{waiting:.6f},'
                f"{data[rank]:.6f},0.0,{4_194_304},3,{0.2 * moving:.6f}]"
            )
            if self.step % 5 == 0:
                loss = 2.3 * math.exp(-self.step / 600) + 0.21 + 0.03 * float(noise[rank])
                values = {"loss": round(loss, 5), "accuracy": round(1.0 - loss / 2.6, 5)}
                lines[rank].append(json.dumps(["metrics", self.step, round(start + length, 6), values, "mean"]))
        return length


def _main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--steps-a-second", type=float, default=20.0)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--every", type=float, default=0.1, help="seconds between two writes")
    parser.add_argument("--slow", default="", help="such as 3:2.5, the compute of rank 3 takes 2.5 times as long")
    options = parser.parse_args()
    slow = {
        int(rank): float(factor) for rank, _, factor in (part.partition(":") for part in options.slow.split()) if rank
    }
    run = SimulatedRun(options.folder, ranks=options.ranks, steps_s=options.steps_a_second, slow=slow)
    print(run.folder, os.getpid(), flush=True)
    until = time.monotonic() + options.seconds
    while time.monotonic() < until:
        run.write()
        time.sleep(options.every)
    run.finish()


if __name__ == "__main__":
    _main()
