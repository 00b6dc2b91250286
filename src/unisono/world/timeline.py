"""Every rank's ledger side by side, on one clock: a table, and a trace for Chrome or Perfetto."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from unisono.launchers.runtime.trace_file import TraceFile
from unisono.units import as_json
from unisono.world.ledger import Event, Ledger, Record, Row, Span, Totals
from unisono.world.world import World

_PINGS = 8


@dataclass(frozen=True)
class Report:
    """What a world did. `offsets[r]` added to rank r's clock gives rank 0's."""

    ranks: list[Totals]
    offsets: list[float]
    rows: list[list[Row]]
    records: list[list[Record]]
    spans: list[list[Span]]
    events: list[list[Event]]

    def split(self) -> dict[str, float]:
        """The mean step over all ranks, in seconds: compute, communication, waiting, data, and wall."""
        steps = max(1, sum(t.steps for t in self.ranks))
        return {
            name: sum(getattr(t, name) for t in self.ranks) / steps
            for name in ("compute", "communication", "waiting", "data", "hidden", "wall")
        }

    def table(self) -> str:
        """Totals by rank, a line each: milliseconds a step, and bytes in all. With a pipeline, also the bubble: the
        part of it in which a stage had nothing to compute."""
        piped = any(t.bubble for t in self.ranks)
        bubble = ["bubble"] if piped else []
        head = ("rank", "steps", "step ms", "compute", *bubble, "comm", "waiting", "data", "hidden", "MB sent")
        lines = ["".join(f"{name:>10}" for name in head)]
        for t in self.ranks:
            each = 1e3 / max(1, t.steps)
            idle = [t.bubble] if piped else []
            times = (t.wall, t.compute, *idle, t.communication, t.waiting, t.data, t.hidden)
            lines.append(
                f"{t.rank:>10}{t.steps:>10}"
                + "".join(f"{x * each:>10.2f}" for x in times)
                + f"{t.bytes_sent / 1e6:>10.2f}"
            )
        return "\n".join(lines)

    def trace(self, path: str | Path) -> None:
        """Write a trace for chrome://tracing or ui.perfetto.dev: a process a rank, steps above, messages below."""
        starts: list[float] = []
        for rank, offset in enumerate(self.offsets):
            for kept in (self.rows[rank], self.records[rank], self.spans[rank], self.events[rank]):
                starts += [entry.start + offset for entry in kept]
        zero = min(starts, default=0.0)
        trace = TraceFile()
        for rank in range(len(self.ranks)):
            track = trace.rank(rank, self.offsets[rank] - zero)
            for row in self.rows[rank]:
                track.event("steps", f"step {row.step}", row.start, row.start + row.wall, asdict(row))
            for span in self.spans[rank]:
                track.event("program", span.kind, span.start, span.end)
            for r in self.records[rank]:
                track.collective(r.channel, r.op, r.tag, r.start, r.last, r.end, r.bytes_sent)
            for event in self.events[rank]:
                track.moment("events", event.kind, event.start, as_json({"step": event.step, **event.values}))
        trace.write(path)


def gather(ledger: Ledger, world: World) -> Report:
    """Collect every rank's ledger; every rank calls it and gets the same report.

    1. clocks: each rank's offset to rank 0, by messages there and back (ranks of one host share a clock);
    2. arrivals: where a transport did not know when the last rank arrived, from all ranks' own times;
    3. totals and events.
    """
    offset = _measure_offset(world)
    offsets = [float(o) for o in world.gather_objects(offset)]
    unknown: dict[tuple[str, int], float] = {
        (r.channel, r.sequence): r.start + offset
        for r in list(ledger.records)
        if r.last != r.last and r.op not in ("send", "recv")
    }
    if any(world.gather_objects(bool(unknown))):
        latest: dict[tuple[str, int], float] = {}
        for arrivals in world.gather_objects([[*key, at] for key, at in unknown.items()]):
            for channel, sequence, at in arrivals:
                latest[channel, sequence] = max(latest.get((channel, sequence), at), at)
        ledger.fill_in_arrivals({key: at - offset for key, at in latest.items()})
    kept: dict[str, Any] = {"rows": Row, "records": Record, "spans": Span, "events": Event}
    mine = {name: [asdict(entry) for entry in list(getattr(ledger, name))] for name in kept}
    every = world.gather_objects({"totals": asdict(ledger.totals()), **mine})
    return Report(
        ranks=[Totals(**e["totals"]) for e in every],
        offsets=offsets,
        **{name: [[kind(**entry) for entry in e[name]] for e in every] for name, kind in kept.items()},
    )


def _measure_offset(world: World) -> float:
    """Seconds to add to my clock to have rank 0's: the quickest of some messages there and back."""
    best, offset = float("inf"), 0.0
    token = torch.zeros(1, dtype=torch.float64)
    for rank in range(1, world.size):
        if world.hosts[rank] == world.hosts[0]:
            continue
        for _ in range(_PINGS):
            if world.rank == 0:
                world.recv(token, rank, tag="clock").wait()
                token[0] = world.ledger.clock()
                world.send(token, rank, tag="clock").wait()
            elif world.rank == rank:
                sent = world.ledger.clock()
                world.send(token, 0, tag="clock").wait()
                world.recv(token, 0, tag="clock").wait()
                back = world.ledger.clock()
                if back - sent < best:
                    best, offset = back - sent, float(token[0]) - (sent + back) / 2
    return offset
