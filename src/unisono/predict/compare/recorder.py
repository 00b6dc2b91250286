"""In a worker: records each step of a program that knows nothing of it, and ends it after so many.

`un.parallel` calls `bind` here instead of binding itself (UNISONO_OBSERVER). From then on every call of backward is
seen: its loss is noted, and after it the rows that the ledger has got meanwhile. Nothing is sent between ranks. Each
rank writes a file of its own, FOLDER/rank-R.jsonl: a line about itself, then a line a step (`STEP_FIELDS`).
"""

from __future__ import annotations

import atexit
import json
import math
import threading
from collections import deque
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from unisono.launchers.runtime.variables import read_observer_settings
from unisono.methods.spec import describe
from unisono.methods.strategy import Replica, Strategy, binding
from unisono.observe.runs.backward import Losses, follow_backward, leave_backward
from unisono.predict.compare.results import STEP_FIELDS, Arrival
from unisono.world import World
from unisono.world.ledger import Ledger, Row, Span

_WRITE_EVERY_S = 0.5
_recorders: dict[int, StepRecorder] = {}  # by thread: each rank's program is one


class Enough(SystemExit):
    """Ends the program: so many steps were asked for. A clean end, as sys.exit() is one."""


def bind(model: nn.Module, optimizer: Optimizer, strategy: Strategy, world: World) -> Replica:
    """Bind the strategy, and record what follows; of several models, the first one's."""
    replica = binding.bind_for(model, optimizer, strategy, world)
    if threading.get_ident() not in _recorders:
        settings = read_observer_settings()
        recorder = StepRecorder(replica, strategy, Path(settings["folder"]), settings["steps"])
        atexit.register(recorder.close)
    return replica


class StepRecorder:
    """One rank's steps, written to its file now and then."""

    def __init__(self, replica: Replica, strategy: Strategy, folder: Path, steps: int | None = None) -> None:
        self.replica, self.ledger, self.steps = replica, replica.world.ledger, steps
        self._taken = self.ledger.step_count  # rows that are taken; a loaded checkpoint may have had some
        self._first = self._taken
        self._losses = Losses()  # of this window
        self._samples: int | None = 0
        self._positions: dict[str, int | None] = {}  # by shard: samples that it has given out
        self._waiting: deque[tuple[Row, list[Tensor], int | None]] = deque()  # to be written
        self._written_at = self.ledger.clock()
        self._thread = threading.get_ident()
        folder.mkdir(parents=True, exist_ok=True)
        world = replica.world
        # Settings for windows at the start in which a method exchanges as all-reduce does, and how many these are.
        starts = [[name, getattr(strategy, name, 0)] for name in ("start", "warmup")]
        on_gpu = any(p.is_cuda for p in replica.model.parameters())  # what it does is timed on the host alone
        self._file = open(folder / f"rank-{world.rank}.jsonl", "w", encoding="utf-8")  # noqa: SIM115 - until close()
        self._write_line(
            {
                "rank": world.rank,
                "size": world.size,
                "hosts": len(set(world.hosts)),
                "device": str(world.device),
                "strategy": describe(strategy),
                "start": self.ledger.clock(),
                "parameters": sum(p.numel() for p in replica.model.parameters()),
                "not_measured": sorted({*replica.not_measured, *(["compression"] if on_gpu else [])}),
                "bytes_by_formula": replica.bytes_by_formula,
                "begins": next((each for each in starts if isinstance(each[1], int) and each[1] > 0), []),
                "fields": list(STEP_FIELDS),
            }
        )
        self._file.flush()
        _recorders[self._thread] = self
        self._steps = replica.optimizer.register_step_post_hook(lambda *_: self._losses.end_step())
        follow_backward(self)

    # Around backward --------------------------------------------------------------------------------------------

    def before_backward(self, tensors: Any) -> None:
        """Note the loss and the samples; end the program where it has made its steps."""
        self.take_rows()  # a short window ends with the optimizer's step
        if self.steps is not None and self._taken - self._first >= self.steps:
            self.close()
            raise Enough(0)
        self._losses.note(tensors)
        self._count_samples()

    def after_backward(self) -> None:
        """See BackwardListener."""
        self.take_rows()

    def note_scaled(self, scaled: Any, loss: Any) -> None:
        """See BackwardListener."""
        self._losses.note_scaled(scaled, loss)

    def take_rows(self) -> None:
        """Take what the ledger has got since: one row for each window that has ended."""
        fresh = self.ledger.step_count - self._taken
        if fresh <= 0:
            return
        kept = self.ledger.rows
        rows = [kept[-i] for i in range(min(fresh, len(kept)), 0, -1)]
        if len(rows) < fresh or rows[0].step != self._taken:
            self._taken = self.ledger.step_count
            raise RuntimeError(
                f"the script resumed from a checkpoint (step {self._taken}), perhaps that of the previous run: methods "
                "are compared from the same start. Give it no folder to resume from, or an empty one for each run"
            )
        self._taken += fresh
        for row in rows:
            self._waiting.append((row, self._losses.take(), self._samples))
        if self.ledger.clock() - self._written_at >= _WRITE_EVERY_S:
            self.write()

    def _count_samples(self) -> None:
        """Add the samples, over all ranks, of the batches that are out now and were not at the last backward pass."""
        for name, shard in self.replica.world.shards.items():
            if not shard.is_out or self._samples is None:
                continue
            given = _samples_given(shard)
            if given is None:
                self._samples = None
            else:
                before = self._positions.get(name)
                self._samples += given - before if before is not None and before <= given else shard.batch_size
                self._positions[name] = given

    # Writing ----------------------------------------------------------------------------------------------------

    def write(self) -> None:
        """Write the steps that have been noted since the last write."""
        arrivals = _find_arrivals(self.ledger, self._waiting[0][0].step) if self._waiting else {}
        while self._waiting:
            row, losses, samples = self._waiting.popleft()
            values = [float(loss) for loss in losses]
            mean = sum(values) / len(values) if values else None
            known = {
                "step": row.step - self._first + 1,
                "end": row.start + row.wall,
                "loss": None if mean is None or math.isnan(mean) else mean,
                "finite": mean is None or math.isfinite(mean),
                "samples": samples or None,
                "arrivals": arrivals.get(row.step, []),
            }
            self._write_line([known[name] if name in known else getattr(row, name) for name in STEP_FIELDS])
        self._file.flush()
        self._written_at = self.ledger.clock()

    def _write_line(self, values: Any) -> None:
        self._file.write(json.dumps(values) + "\n")

    def close(self) -> None:
        """Write the remaining steps and stop recording."""
        if self._file.closed:
            return
        self.take_rows()
        self.write()
        self._file.close()
        _recorders.pop(self._thread, None)
        self._steps.remove()
        leave_backward(self)


def _find_arrivals(ledger: Ledger, first: int) -> dict[int, list[Arrival]]:
    """Of collectives whose last arrival is not known here (messages between hosts), by step from `first` on: which one,
    when this rank arrived, and from when to when the program stood still for it. Who was last is found out where all
    ranks' times are."""
    blocked: dict[int, list[Span]] = {}
    for span in reversed(list(ledger.spans)):
        if span.step < first:
            break
        if span.kind == "blocked":
            blocked.setdefault(span.step, []).append(span)
    found: dict[int, list[Arrival]] = {}
    for record in reversed(list(ledger.records)):
        if record.step < first:
            break
        if record.last != record.last and record.op not in ("send", "recv"):
            for span in blocked.get(record.step, ()):
                start, end = max(span.start, record.start), min(span.end, record.end)
                if start < end:
                    key = f"{record.channel}/{record.sequence}"
                    found.setdefault(record.step, []).append((key, record.start, start, end))
                    break
    return found


def _samples_given(shard: Any) -> int | None:
    """How many samples a shard has given out over all ranks, from its first epoch on; None: that cannot be known."""
    if shard.batch_size is None:
        return None
    if shard.samples is None:  # a stream: of this epoch
        return int(shard.batch * shard.batch_size)
    each = len(shard) * shard.batch_size if shard.drop_last else shard.samples
    return int(shard.epoch * each + min(shard.batch * shard.batch_size, each))
