"""The mark of a collective: what is called and where, in a few numbers that ride along with what ranks exchange anyway.

What: operation, shapes, dtype. If that differs between ranks, all of them raise `Mismatch`.
Where: the tag, and the line of the program that made the call. Lines may differ on purpose (`if rank == 0: ... else:
...`). They are refused where all ranks were at each of these lines together before: then some rank has skipped a call,
or makes calls in another order. Otherwise a warning is given once.

Where ranks do not meet on the host (NCCL), the marks are rolled into one number, which rides along with the next call
for which they do.

What comes after what is remembered, so that the rank that is out of turn can be named.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple
from zlib import crc32

from torch import Tensor

from unisono.runtime.frames import find_site, warn_user
from unisono.world.ledger import Ledger
from unisono.world.transports import Mismatch, PeerLost, Side

__all__ = ["CallHistory", "CallMark", "Verdict", "judge_sides", "note_trouble", "shapes_of"]

_MOST = 4096  # calls that are remembered
_FEW = 4  # tensors of a list whose shapes count
_whats: dict[Any, int] = {}


class CallMark:
    """One collective of this rank."""

    __slots__ = ("_key", "expected", "history", "number", "op", "rank", "site", "step", "tag", "what", "where")

    def __init__(
        self, history: CallHistory, op: str, tag: str, key: tuple[Any, ...], number: int, rank: int, step: int
    ) -> None:
        self.history, self.op, self.tag, self._key = history, op, tag, key
        self.number, self.rank, self.step = number, rank, step
        what = _whats.get((op, key))
        unseen, history.unseen = history.unseen, 0
        self.what = ((what if what is not None else _note_what(op, key)) ^ unseen) or 1
        self.site, direct = find_site()
        tag_number = crc32(tag.encode())
        self.where = (tag_number ^ self.site.number if self.site is not None and direct else tag_number) or 1
        self.expected = history.follow(self)

    def describe(self) -> str:
        """In words: "all_reduce sum of (64, 10) float32 'gradients/0' at train.py:88, step 12"."""
        how, dtype, shapes, count = self._key
        text = self.op + (f" {how}" if how else "")
        if shapes:
            more = f" and {count - len(shapes)} more" if count > len(shapes) else ""
            text += f" of {', '.join(str(tuple(shape)) for shape in shapes)}{more}"
        text += f" {str(dtype).removeprefix('torch.')}" if dtype is not None else ""
        return f"{text}{self.describe_place()}, step {self.step}"

    def describe_place(self) -> str:
        """Its tag and its line."""
        held = self.history.ledger.tag_names.get(self.tag, "")
        return (f" {self.tag!r}{held}" if self.tag else "") + (f" at {self.site.text}" if self.site is not None else "")

    @property
    def side(self) -> Side:
        """What the other ranks are told of it, where they disagree."""
        place = self.site.text if self.site is not None else ""
        return Side(self.rank, self.what, self.where, self.describe(), place)

    def check_places(self, wheres: Sequence[int], hear: Callable[[], Sequence[Side]]) -> None:
        """The ranks' places in the same collective (0: one that does not say): Mismatch where they are out of turn.

        `hear`: every rank's side, asked for where places differ for the first time.
        """
        if wheres.count(wheres[0]) == len(wheres):
            self.history.agree(self.where)
        elif 0 not in wheres:
            self.history.come_apart(self, wheres, hear)


def shapes_of(tensors: Sequence[Tensor]) -> tuple[Any, ...]:
    """The shapes of the first tensors, and how many there are."""
    return tuple(x.shape for x in tensors[:_FEW]), len(tensors)


def _note_what(op: str, key: tuple[Any, ...]) -> int:
    how, dtype, shapes, count = key
    number = crc32(f"{op} {how} {dtype} {[tuple(shape) for shape in shapes]} {count}".encode()) or 1
    if len(_whats) >= _MOST:
        _whats.clear()
    _whats[op, key] = number
    return number


class CallHistory:
    """What one rank has called in one order of operations."""

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger
        self.unseen = 0  # of calls whose marks nobody compared yet
        self._agreed: set[int] = set()
        self._apart: set[frozenset[int]] = set()  # places that met each other, and were let pass
        self._after: dict[int, int] = {}
        self._known: dict[int, CallMark] = {}
        self._last = 0

    def follow(self, mark: CallMark) -> int:
        """The next call; gives the one that came here the last time (0: not known)."""
        this = mark.what ^ mark.where
        expected = self._after.get(self._last, 0)
        if this not in self._known:
            if len(self._known) >= _MOST:
                self._known.clear()
                self._after.clear()
            self._known[this] = mark
        self._after[self._last] = self._last = this
        return expected

    def roll(self, mark: CallMark) -> None:
        """A call for which ranks do not meet on the host; its mark has those before it in it."""
        self.unseen = crc32(f"{mark.what}".encode())

    def agree(self, where: int) -> None:
        """All ranks were there together."""
        if where not in self._agreed:
            if len(self._agreed) >= _MOST:
                self._agreed.clear()
            self._agreed.add(where)

    def come_apart(self, mark: CallMark, wheres: Sequence[int], hear: Callable[[], Sequence[Side]]) -> None:
        """Ranks are at different places. If all have met at each of these before, some rank is out of turn; else they
        may be meant to be apart, and that is said once."""
        places = frozenset(wheres)
        if places in self._apart:
            return
        if places <= self._agreed:
            sides = hear()
            raise Mismatch(f"{mark.op}: the ranks disagree; they are at different places of the program", sides=sides)
        if len(self._apart) < _MOST:
            self._apart.add(places)
        sides = sorted(hear())
        if sides and sides[0].rank == mark.rank:
            each = ", ".join(f"rank {side.rank} is in {side.text}" for side in sides[:4])
            warn_user(
                f"ranks make one collective at different places of the program: {each}. If that is not meant, one of "
                "them has skipped a call, and they exchange different things"
            )

    def find(self, call: int) -> CallMark | None:
        """A call that was made before."""
        return self._known.get(call)

    def comes_after(self, call: int) -> int:
        """What followed it the last time."""
        return self._after.get(call, 0)


class Verdict(NamedTuple):
    """Who is out of turn: `rank` is None where two ranks differ and nothing tells which is right."""

    rank: int | None
    cause: str
    place: str
    text: str


def judge_sides(mark: CallMark, sides: Mapping[int, Side]) -> Verdict:
    """Which rank's call is not the one that was due, and whether it has skipped that."""
    calls = {rank: side.what ^ side.where for rank, side in sides.items()}
    due = mark.expected if mark.expected in calls.values() else 0
    if not due:
        ((most, count), *rest) = Counter(calls.values()).most_common()
        due = most if count > max((n for _, n in rest), default=0) else 0
    odd = sorted(rank for rank, call in calls.items() if due and call != due)
    if not odd:
        first, *others = sorted(calls)
        other = next((r for r in others if calls[r] != calls[first]), first)
        text = f"rank {other} has {sides[other].text}, rank {first} has {sides[first].text}"
        return Verdict(None, _name_cause(sides.values()), sides[other].place, text)
    rank = odd[0]
    right = next(sides[r] for r in sorted(calls) if calls[r] == due)
    who = f"rank {rank}" if len(odd) == 1 else f"ranks {', '.join(map(str, odd))}"
    has = f"{who} {'is' if len(odd) == 1 else 'are'} in {sides[rank].text}, the others in {right.text}"
    if mark.expected == due and mark.history.comes_after(due) == calls[rank]:
        return Verdict(rank, "skipped collective", right.place or sides[rank].place, f"{has}, which {who} skipped")
    return Verdict(rank, _name_cause([sides[rank], right]), sides[rank].place, has)


def _name_cause(sides: Iterable[Side]) -> str:
    """Different shapes of one operation, or different operations."""
    found = list(sides)
    names = {side.text.split(" ", 1)[0] for side in found}
    whats = {side.what for side in found}
    return "different shape" if len(names) == 1 and len(whats) > 1 else "different collective"


def note_trouble(error: Mismatch | PeerLost, mark: CallMark | None, ledger: Ledger) -> None:
    """Enter into the ledger who is out of turn, where ranks disagree or one has ended; and say it in the error."""
    if mark is None:
        return
    if isinstance(error, Mismatch):
        _note_mismatch(error, mark, ledger)
    elif error.ended is not None:
        text = (
            f"rank {error.ended} has ended its program without {mark.describe()}, where rank {mark.rank} waits for it"
        )
        place = mark.site.text if mark.site is not None else ""
        ledger.event("verdict", rank=error.ended, cause="skipped collective", place=place, text=text)
        error.ended = None  # it may be raised again


def _note_mismatch(error: Mismatch, mark: CallMark, ledger: Ledger) -> None:
    if error.is_noted:
        return
    error.is_noted = True
    sides = {side.rank: side for side in error.sides}
    sides.setdefault(mark.rank, mark.side)
    if len(sides) < 2:
        return
    verdict = judge_sides(mark, sides)
    if len({side.text for side in sides.values()}) == 1:
        text = f"before {mark.describe()}, the ranks have called different things on their GPUs (NCCL)"
        verdict = Verdict(verdict.rank, "different collective", verdict.place, text)
    listed = "; ".join(f"rank {rank}: {side.text}" for rank, side in sorted(sides.items())[:8])
    said = verdict.text[:1].upper() + verdict.text[1:]
    error.args = (f"{error.args[0]}\nAs collective {mark.number}: {listed}.\n{said}.",)
    ledger.event("verdict", rank=verdict.rank, cause=verdict.cause, place=verdict.place, text=verdict.text)
