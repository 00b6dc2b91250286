"""What a `Trainer` reports: the history, when to stop early, and one progress display for the world."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

__all__ = ["Display", "EarlyStopping", "History", "format_logs"]

SPLIT = ("compute", "communication", "waiting", "data")
Logs = dict[str, float]


class History:
    """One row of world-wide values an epoch: `history["val_loss"]` is a column, `history.rows[-1]` a row."""

    def __init__(self, rows: list[Logs] | None = None, *, stopped_early: bool = False) -> None:
        self.rows: list[Logs] = rows or []
        self.stopped_early = stopped_early

    def __getitem__(self, name: str) -> list[float]:
        if not any(name in row for row in self.rows):
            raise KeyError(f"no {name!r} in this history of {', '.join(self.rows[-1]) if self.rows else 'no epochs'}")
        return [row.get(name, math.nan) for row in self.rows]

    def __len__(self) -> int:
        return len(self.rows)


class EarlyStopping:
    """Stop after `patience` epochs in which `monitor` did not improve by more than `min_delta`.

    `monitor` is `val_loss` (`loss` without validation) unless given. `mode` says whether "min" or "max" is better:
    unless given, "min" for names that end in "loss".
    """

    def __init__(self, patience: int, *, monitor: str = "", min_delta: float = 0.0, mode: str = "") -> None:
        if patience < 1 or mode not in ("", "min", "max"):
            raise ValueError(f'got patience={patience}, mode={mode!r}; expected 1 or more epochs, and "min" or "max"')
        self.patience, self.monitor, self.min_delta, self.mode = patience, monitor, min_delta, mode
        self.best, self.waited = math.inf, 0

    def should_stop(self, logs: Logs) -> bool:
        """Take one epoch's row; true when patience is used up. NaN is never an improvement."""
        name = self.monitor or ("val_loss" if "val_loss" in logs else "loss")
        if name not in logs:
            raise ValueError(f"early stopping watches {name!r}; this run has {', '.join(logs)}")
        rising = self.mode == "max" or not (self.mode or name.endswith("loss"))
        value = -logs[name] if rising else logs[name]
        improved = value < self.best - self.min_delta
        self.best, self.waited = (value, 0) if improved else (self.best, self.waited + 1)
        return self.waited >= self.patience

    def state_dict(self) -> dict[str, Any]:
        return {"best": self.best, "waited": self.waited}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.best, self.waited = state["best"], state["waited"]


class Display:
    """One progress bar for the whole world on a terminal, and a line an epoch; silent if not `enabled`."""

    def __init__(self, *, enabled: bool, epochs: int, steps: int | None) -> None:
        self.epochs, self.steps = epochs, steps
        self._console: Any = None
        self._bar: Any = None
        if enabled:
            from rich.console import Console

            self._console = Console(soft_wrap=True, highlight=False, markup=False)
        self.live: bool = enabled and self._console.is_terminal

    def __enter__(self) -> Display:
        if self.live:
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
            from rich.table import Column

            live = TextColumn("{task.fields[live]}", table_column=Column(no_wrap=True, overflow="ellipsis"))
            columns = ("{task.description}", BarColumn(16), MofNCompleteColumn(), live)
            self._bar = Progress(*columns, console=self._console, transient=True)
            self._bar.start()
            self._task = self._bar.add_task("", total=self.steps, live="")
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def advance(self, epoch: int, batch: int, live: Logs | None) -> None:
        if self._bar is not None:
            words = {"description": f"epoch {epoch + 1}/{self.epochs}", **({"live": format_logs(live)} if live else {})}
            self._bar.update(self._task, completed=batch, **words)

    def print_line(self, epoch: int, logs: Logs) -> None:
        if self._console is not None:
            self._console.print(f"epoch {epoch + 1:>{len(str(self.epochs))}}/{self.epochs}   {format_logs(logs)}")


def format_logs(logs: Logs) -> str:
    """One row for people.

    >>> format_logs({"loss": 0.25, "samples/s": 12345.6, "compute": 0.9, "communication": 0.06, "waiting": 0.04})
    'loss 0.2500   12,346 samples/s   compute 90% · communication 6% · waiting 4%'
    """
    plain = {name: value for name, value in logs.items() if name not in (*SPLIT, "samples/s")}
    words = [f"{name} {value:.4f}" if abs(value) < 1e4 else f"{name} {value:.3e}" for name, value in plain.items()]
    words += [f"{logs[name]:,.0f} {name}" for name in ("samples/s",) if name in logs]
    split = [f"{name} {logs[name]:.0%}" for name in SPLIT if name in logs]
    return "   ".join([*words, " · ".join(split)] if split else words)
