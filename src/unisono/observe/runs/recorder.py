"""In a worker: writes its steps, metrics and events to the run's folder, about twice a second.

Nothing is sent between ranks, and nothing is waited for: each rank writes a file of its own, in the thread that trains.
What is written stays bounded. The first steps are written one by one; from then on there is a line for all steps
since the last line, and lines come more rarely the longer a run lasts.
"""

from __future__ import annotations

import json
import math
import os
import platform
import re
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice, takewhile
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook

from unisono.launchers.runtime import status
from unisono.launchers.runtime.run_folder import FORMAT, SUMMED, WRITE_S, find_boot, find_version, find_write_s
from unisono.observe.runs.backward import Losses, follow_backward, leave_backward
from unisono.units import as_json
from unisono.world import World
from unisono.world.ledger import Event, Row

__all__ = ["Arriving", "Facts", "LineWriter", "Pending", "Recorder", "read_outcome", "start_copies"]

LOSS = "loss"
DETAILED_STEPS = 5_000  # each a line of its own
DETAILED_VALUES = 20_000  # of metrics, likewise
DETAILED_EVENTS = 2_000
KEPT_KINDS = ("verdict", "straggler", "straggler over", "shares", "world", "fault", "worker lost", "outlier")
LONGEST_EVENT = 4_000  # characters
SUMS_EVERY_S, SUMS_GROWTH = 5.0, 1.1  # bytes by tag and samples: the sums so far
TRACED_STEPS, TRACED_FIRST, TRACED_ENTRIES = 100, 20, 5_000  # written with all collectives: the last, and the first


@dataclass(frozen=True)
class Facts:
    """What is known of the training, apart from the world."""

    strategy: str = ""
    parameters: int = 0
    not_measured: Sequence[str] = ()
    bytes_by_formula: bool = False
    mesh: tuple[Sequence[int], Sequence[int]] | None = None  # (data, tensor, pipeline): sizes, this rank's place


class LineWriter(Protocol):
    """Writes whole lines of a worker's record; never raises."""

    def write(self, text: str, *, last: bool = False) -> None: ...


@dataclass
class Arriving:
    """A number of a GPU that is being copied to this host's memory."""

    copy: Tensor
    arrived: Any  # a CUDA event


@dataclass
class Pending:
    """The values of one call, on their way into the record: plain numbers once `settle` has said so."""

    step: int
    time: float
    values: dict[str, float | Arriving]
    how: str = "mean"
    noticed: bool = False  # not by the program: it is what backward was called on

    def settle(self, *, wait: bool) -> bool:
        """Whether all numbers are here; `wait` until they are."""
        arriving = {name: value for name, value in self.values.items() if isinstance(value, Arriving)}
        if not wait and not all(value.arrived.query() for value in arriving.values()):
            return False
        for name, value in arriving.items():
            value.arrived.synchronize()
            self.values[name] = float(value.copy)
        return True


def start_copies(values: Mapping[str, Any]) -> dict[str, float | Arriving]:
    """Numbers as they are; a tensor of a GPU begins to travel, and nobody waits for it."""
    found: dict[str, float | Arriving] = {}
    for name, value in values.items():
        if isinstance(value, Tensor) and value.is_cuda and value.numel() == 1:
            copy = torch.empty((), dtype=value.dtype, pin_memory=True)
            copy.copy_(value.detach().reshape(()), non_blocking=True)
            arrived = torch.cuda.Event()
            arrived.record(torch.cuda.current_stream(value.device))
            found[name] = Arriving(copy, arrived)
        else:
            found[name] = float(value.detach() if isinstance(value, Tensor) else value)
    return found


class Recorder:
    """One rank's lines. The ledger tells it of steps and events, `un.log` of values."""

    def __init__(
        self,
        world: World,
        lines: LineWriter,
        facts: Facts | None = None,
        *,
        place: int | None = None,
        on_close: Callable[[str], None] | None = None,
    ) -> None:
        self.world, self.ledger, self.facts = world, world.ledger, facts or Facts()
        self.place = world.rank if place is None else place
        self._lines, self._on_close = lines, on_close
        self._lock = threading.RLock()
        self._pid = os.getpid()
        self._rows: list[Row] = []
        self._events: list[Event] = []
        self._values: list[Pending] = []
        self.last_loss: Tensor | None = None  # that backward was called on, in the step that ended last
        self._losses: Losses | None = None  # None: the program logs its loss itself
        self._steps_left, self._values_left, self._events_left = DETAILED_STEPS, DETAILED_VALUES, DETAILED_EVENTS
        self._since = self._sums_at = self.ledger.clock()
        self._due = self._since + WRITE_S
        self._seat: tuple[str, int, int] | None = None  # of the last header
        self._traced_until = -1
        self.is_closed = False
        self.ledger.listener = self
        self._thread, self._steps = threading.get_ident(), register_optimizer_step_post_hook(self._end_step)
        if follow_backward(self):
            self._losses = Losses()
        self.write()

    # What it is told ------------------------------------------------------------------------------------------------

    def on_row(self, row: Row) -> None:
        """Called by the ledger at the end of a step."""
        self._rows.append(row)
        if self._losses is not None and (losses := self._losses.take()):
            loss = losses[0] if len(losses) == 1 else torch.stack([x.float().reshape(()) for x in losses]).mean()
            self.last_loss = loss
            self._values.append(Pending(row.step + 1, row.start + row.wall, start_copies({LOSS: loss}), noticed=True))
        if row.start + row.wall >= self._due:
            self.write()

    def on_event(self, event: Event) -> None:
        """Something happened; what a reader waits for is written at once."""
        self._events.append(event)
        if event.kind == "verdict":
            self.write()

    def log(self, values: Mapping[str, Any], how: str = "mean", step: int | None = None) -> None:
        """Record metrics of this rank at its current step, or at the given one."""
        if os.getpid() != self._pid:  # a process that was forked from the worker, such as one that reads data
            return
        if LOSS in values and self._losses is not None:  # what backward was called on is noticed no more
            self._losses = None
            leave_backward(self)
            self._values = [one for one in self._values if not one.noticed]
        now = self.ledger.clock()
        self._values.append(Pending(self.ledger.step_count if step is None else step, now, start_copies(values), how))
        if now >= self._due:
            self.write()

    def before_backward(self, tensors: Any) -> None:
        """See BackwardListener."""
        if self._losses is not None:
            self._losses.note(tensors)

    @contextmanager
    def one_loss(self) -> Iterator[Callable[[Tensor], None]]:
        """What backward is called on inside are parts of one loss, which is told at the end."""
        losses = self._losses
        since = 0 if losses is None else losses.count
        yield lambda loss: None if losses is None else losses.replace(since, loss)

    def after_backward(self) -> None:
        """See BackwardListener."""

    def _end_step(self, *_: Any) -> None:
        """An optimizer has made a step: losses are told how many passes it had."""
        if self._losses is not None and threading.get_ident() == self._thread:
            self._losses.end_step()

    def note_scaled(self, scaled: Any, loss: Any) -> None:
        """See BackwardListener."""
        if self._losses is not None:
            self._losses.note_scaled(scaled, loss)

    def update(self, facts: Facts) -> None:
        """Note another model or method, and write a new header."""
        self.facts, self._seat = facts, None
        self.write()

    # Writing --------------------------------------------------------------------------------------------------------

    def write(self, *, last: bool = False) -> None:
        """Write all that was recorded since the last call."""
        if self.is_closed or os.getpid() != self._pid:  # a process that was forked from the worker
            return
        with self._lock:
            now = self.ledger.clock()
            elapsed = now - self._since
            self._due = now + find_write_s(elapsed, self.world.size)
            text = [*self._write_header(now)]
            if last or (self._traced_until < 0 and self.ledger.step_count >= TRACED_FIRST + 5):
                text += self._write_trace(TRACED_STEPS if last else TRACED_FIRST)
            text += [*self._write_rows(), *self._write_values(last=last), *self._write_events()]
            summed_s = self._sums_at - self._since
            if last or (elapsed >= summed_s + SUMS_EVERY_S and elapsed >= SUMS_GROWTH * summed_s):
                self._sums_at = now
                text += self._write_sums()
            if text:
                self._lines.write("\n".join(text) + "\n", last=last)

    def close(self, outcome: str | None = None) -> None:
        """Write the rest and how the program ended."""
        with self._lock:
            if self.is_closed or os.getpid() != self._pid:
                return
            how = status.describe_ending()
            outcome = outcome if outcome is not None else read_outcome(how)
            self.write(last=True)
            self._lines.write(
                _line("end", round(self.ledger.clock(), 6), {"outcome": outcome, "how": how}) + "\n", last=True
            )
            self.is_closed = True
            self._steps.remove()
            leave_backward(self)
            if self.ledger.listener is self:
                self.ledger.listener = None
        if self._on_close is not None:
            self._on_close(outcome)

    def _write_header(self, now: float) -> Iterable[str]:
        world, facts = self.world, self.facts
        seat = (world.name, world.rank, world.size)
        if seat == self._seat:
            return
        self._seat = seat
        generation = world.name.rpartition(".")[2]
        device = str(world.device)
        if world.device.type == "cuda":
            device = f"{device} ({torch.cuda.get_device_name(world.device)})"
        yield _line(
            "header",
            {
                "format": FORMAT,
                "rank": world.rank,
                "size": world.size,
                "generation": int(generation) if generation.isdigit() else 0,
                "place": self.place,
                "host": world.host,
                "hosts": len(set(world.hosts)),
                **({} if world.transport is None else {"encrypted": world.transport.is_encrypted}),
                "machine": socket.gethostname(),
                "boot": find_boot(),
                "pid": self._pid,
                "device": device,
                "strategy": facts.strategy,
                "parameters": facts.parameters,
                "versions": {
                    "unisono": find_version(),
                    "torch": torch.__version__,
                    "python": platform.python_version(),
                },
                "clock": 0.0 if world.host == world.hosts[0] else None,
                "unix": time.time() - self.ledger.clock(),
                "time": now,
                "fields": ["step", "start", *SUMMED],
                "not_measured": list(facts.not_measured),
                "bytes_by_formula": facts.bytes_by_formula,
                **({} if facts.mesh is None else {"mesh": list(facts.mesh[0]), "at": list(facts.mesh[1])}),
            },
        )

    def _write_rows(self) -> list[str]:
        rows, self._rows = self._rows, []
        one_by_one, rest = rows[: self._steps_left], rows[self._steps_left :]
        self._steps_left -= len(one_by_one)
        lines = [
            f'["step",{r.step},{r.start:.6f},{r.wall:.6f},{r.compute:.6f},{r.communication:.6f},{r.waiting:.6f},'
            f"{r.data:.6f},{r.hidden:.6f},{r.bytes_sent},{r.collectives},{r.compression:.6f}]"
            for r in one_by_one
        ]
        if rest:
            sums = [sum(getattr(row, name) for row in rest) for name in SUMMED]
            longest = max(row.wall for row in rest)
            numbers = [rest[0].step, rest[-1].step, rest[0].start, *sums, longest]
            lines.append(_line("steps", *(round(number, 6) for number in numbers)))
        return lines

    def _write_values(self, *, last: bool) -> list[str]:
        values, self._values = self._values, []
        ready = list(takewhile(lambda one: one.settle(wait=last), values))
        self._values[:0] = values[len(ready) :]
        if len(ready) > self._values_left:
            ready = _join_in_time(ready)
        self._values_left = max(0, self._values_left - len(ready))
        return [_line("metrics", one.step, round(one.time, 6), as_json(one.values), one.how) for one in ready]

    def _write_events(self) -> list[str]:
        events, self._events = self._events, []
        if len(events) > self._events_left:  # some methods have one every round: the newest of each kind stands for all
            newest = {event.kind: event for event in events}
            events = [event for event in events if event.kind in KEPT_KINDS or event is newest[event.kind]]
        self._events_left = max(0, self._events_left - len(events))
        return [_line("event", e.kind, e.step, round(e.start, 6), _shorten(as_json(e.values))) for e in events]

    def _write_sums(self) -> list[str]:
        lines = [_line("tags", self.ledger.by_tag())]
        data, totals = _count_data(self.world), self.ledger.totals()
        if data or totals.data:
            lines.append(_line("data", {**data, "seconds": round(totals.data, 6), "steps": totals.steps}))
        if self.world.transport is not None and self.world.transport.is_encrypted:
            from unisono.world.transports.sealing import measure_speed
            from unisono.world.transports.socket_links import count_encrypted_bytes

            nbytes = count_encrypted_bytes()
            lines.append(_line("encryption", {"bytes": nbytes, "seconds": round(nbytes / measure_speed(), 3)}))
        return lines + [_line(name, as_json(read())) for name, read in list(self.ledger.accounts.items())]

    def _write_trace(self, steps: int) -> list[str]:
        """The collectives and spans of the last steps, for a trace of all ranks."""
        first = max(self.ledger.step_count - steps, self._traced_until)
        self._traced_until = self.ledger.step_count
        spans = _take_from(self.ledger.spans, first)
        records = _take_from(self.ledger.records, first)
        lines = [_line("span", s.kind, s.step, round(s.start, 6), round(s.end, 6)) for s in spans]
        for r in records:
            times = (None if math.isnan(t) else round(t, 6) for t in (r.start, r.last, r.end))
            lines.append(_line("record", r.op, r.tag, r.bytes_sent, r.channel, r.sequence, r.step, *times))
        return lines


def read_outcome(how: str) -> str:
    """One word for how a program ended, from what `runtime.status` says of it.

    >>> read_outcome("has ended its program with status 0 at 15:53:30"), read_outcome("has ended its program")
    ('ok', 'ok')
    >>> read_outcome("has failed (ValueError: a bad batch)"), read_outcome("has ended its program with status 3")
    ('failed', 'failed')
    """
    if "was interrupted" in how or "has saved and left" in how:
        return "interrupted" if "was interrupted" in how else "preempted"
    return "failed" if how.startswith("has failed") or re.search(r"with status [1-9]", how) else "ok"


def _count_data(world: World) -> dict[str, Any]:
    """What this rank was given by `un.shard` so far."""
    if not world.shards:
        return {}
    classes: dict[str, int] = {}
    for shard in world.shards.values():
        for name, count in shard.dealt.by_class().items():
            classes[name] = classes.get(name, 0) + count
    samples = sum(shard.dealt.samples for shard in world.shards.values())
    return {"samples": samples, **({"classes": classes} if classes else {})}


def _take_from(entries: Iterable[Any], first: int) -> list[Any]:
    """Those of step `first` and later, in their order; the last of them, where there are very many."""
    recent = takewhile(lambda entry: entry.step >= first, reversed(list(entries)))
    return list(islice(recent, TRACED_ENTRIES))[::-1]


def _join_in_time(values: Sequence[Pending]) -> list[Pending]:
    """One value a name, for all that were logged since the last line."""
    groups: dict[str, list[Pending]] = {}
    for one in values:
        groups.setdefault(one.how, []).append(one)
    joined = []
    for how, group in groups.items():
        series: dict[str, list[Any]] = {}
        for one in group:
            for name, number in one.values.items():
                series.setdefault(name, []).append(number)
        take = {"min": min, "max": max}.get(how, lambda numbers: sum(numbers) / len(numbers))
        numbers = {name: take(found) for name, found in series.items()}
        joined.append(Pending(group[-1].step, group[-1].time, numbers, how))
    return joined


def _shorten(values: dict[str, Any]) -> dict[str, Any]:
    """An event may hold a value for every parameter: of long lists only their length."""
    if len(json.dumps(values)) <= LONGEST_EVENT:
        return values
    long = {name: len(value) for name, value in values.items() if isinstance(value, list | dict) and len(value) > 8}
    return values | {name: f"{count} values" for name, count in long.items()}


def _line(*items: Any) -> str:
    return json.dumps(items, separators=(",", ":"))
