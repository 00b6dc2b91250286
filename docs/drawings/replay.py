"""What was done, laid out in time: work and messages have fixed widths, and everything begins as soon as it can."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from drawings.causes import Atom, Causes, Message

WORK = {"forward": 1.0, "backward": 1.5, "step": 0.75}
WIDE, NARROW = 1.25, 0.5  # of messages, and of small ones


@dataclass
class Box:
    """Work of one rank."""

    rank: int
    kind: str
    start: float
    end: float


@dataclass
class Passing:
    """A message on its way."""

    message: Message
    start: float
    end: float


@dataclass
class Layout:
    """A drawing without sizes: times are in units."""

    boxes: list[Box] = field(default_factory=list)
    passing: list[Passing] = field(default_factory=list)
    windows: dict[int, list[float]] = field(default_factory=dict)  # when each began, by rank
    length: float = 0.0


class _Replay:
    def __init__(self, causes: Causes, small: set[str], speeds: Mapping[int, float]) -> None:
        self._causes, self._small, self._speeds = causes, small, speeds
        self._at: dict[Any, int] = {}  # the next atom, by lane
        self._clock: dict[Any, float] = {}
        self._begun: dict[Any, dict[Any, float]] = {}
        self._free: dict[str, float] = {}  # when the last message of an order ends
        self._passing: dict[Any, Passing] = {}
        self.layout = Layout()

    def run(self) -> Layout:
        lanes = sorted(lane for lane in self._causes.atoms if isinstance(lane, int))
        for lane in lanes:
            self._clock[lane] = 0.0
        while self._go_on():
            pass
        self.layout.passing = [self._passing[key] for key in sorted(self._passing, key=self._order)]
        ends = [b.end for b in self.layout.boxes] + [p.end for p in self.layout.passing]
        self.layout.length = max(ends)
        return self.layout

    def _order(self, key: Any) -> tuple[float, str]:
        return (self._passing[key].start, str(key))

    def _go_on(self) -> bool:
        """One atom of each lane that can; whether there was one."""
        moved = False
        for lane in sorted(self._clock, key=str):
            atoms = self._causes.atoms.get(lane, [])
            at = self._at.get(lane, 0)
            if at < len(atoms) and self._do(lane, atoms[at]):
                self._at[lane] = at + 1
                moved = True
        return moved

    def _do(self, lane: Any, atom: Atom) -> bool:
        clock = self._clock[lane]
        if atom.what == "work":
            self._clock[lane] = clock + WORK[atom.about] * atom.width / self._speeds.get(lane, 1.0)
            self._add_box(Box(lane, atom.about, clock, self._clock[lane]))
        elif atom.what == "window":
            self.layout.windows.setdefault(lane, []).append(clock)
        elif atom.what == "begin":
            self._begun.setdefault(atom.about, {})[lane if isinstance(lane, int) else lane[0]] = clock
            self._find(atom.about)  # messages of an order pass in the order in which they begin
        elif atom.what == "spawn":
            self._clock[atom.about] = clock
        elif atom.what == "wait":
            found = self._find(atom.about)
            if found is None:
                return False
            self._clock[lane] = max(clock, found.end)
        elif atom.what == "join":
            job = atom.about
            if job in self._clock:  # not of a time before these windows
                if self._at.get(job, 0) < len(self._causes.atoms.get(job, [])):
                    return False
                self._clock[lane] = max(clock, self._clock[job])
        return True

    def _find(self, key: Any) -> Passing | None:
        """A message's way, once all who have to begin it have."""
        if key in self._passing:
            return self._passing[key]
        message, begun = self._causes.messages[key], self._begun.get(key, {})
        who = message.ranks[:1] if message.op == "send" else message.ranks
        if not all(rank in begun for rank in who):
            return None
        start = max(*(begun[rank] for rank in who), self._free.get(message.order, 0.0), 0.0)
        end = start + (NARROW if is_small(message, self._small) else WIDE)
        self._free[message.order] = end
        self._passing[key] = Passing(message, start, end)
        return self._passing[key]

    def _add_box(self, box: Box) -> None:
        """Pieces of one pass are one box."""
        mine = [b for b in self.layout.boxes if b.rank == box.rank]
        if mine and mine[-1].kind == box.kind != "step" and abs(mine[-1].end - box.start) < 1e-9:
            mine[-1].end = box.end
        else:
            self.layout.boxes.append(box)


def is_small(message: Message, small: set[str]) -> bool:
    """Whether it is one of those that say something about the others."""
    return message.tag in small


def replay(causes: Causes, small: set[str], speeds: Mapping[int, float] | None = None) -> Layout:
    """Lay out what was done. `small`: tags of messages that are drawn small; `speeds`: of ranks that are slower."""
    return _Replay(causes, small, speeds or {}).run()
