"""The signature of a collective: what is called and where, in a few numbers that travel with what ranks exchange.

What: operation, shapes, dtype. If that differs between ranks, all of them raise `Mismatch`.
Where: the tag, and the line of the program that made the call. Lines may differ on purpose (`if rank == 0: ... else:
...`). They are refused if all ranks were at each of these lines together before: then some rank has skipped a call,
or makes calls in another order. Otherwise a warning is given once.

If ranks do not meet on the host (NCCL), their signatures are rolled into one number, which travels with the next call
for which they do.

What comes after what is remembered, so that the rank that is out of turn can be named.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple
from zlib import crc32

from torch import Tensor

from unisono.launchers.runtime.frames import find_site, warn_user
from unisono.world.ledger import Ledger
from unisono.world.transports import CallDescription, Mismatch, PeerLost

__all__ = ["Call", "CallHistory", "Verdict", "judge_calls", "note_trouble", "shapes_of"]

_MOST = 4096  # calls that are remembered
_FEW = 4  # tensors of a list whose shapes count
_whats: dict[Any, int] = {}


class Call:
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
        """The tag of this call and its line in the program."""
        held = self.history.ledger.tag_names.get(self.tag, "")
        return (f" {self.tag!r}{held}" if self.tag else "") + (f" at {self.site.text}" if self.site is not None else "")

    @property
    def place(self) -> str:
        """Where this call stands, and at which step: it travels with every message, so it has to cost little."""
        return f"{self.site.text if self.site is not None else ''} step {self.step}"

    @property
    def description(self) -> CallDescription:
        """What the other ranks are told of this call if they disagree."""
        place = self.site.text if self.site is not None else ""
        return CallDescription(self.rank, self.what, self.where, self.describe(), place)

    def check_places(self, wheres: Sequence[int], hear: Callable[[], Sequence[CallDescription]]) -> None:
        """Compare the ranks' places in the same collective (0: not told); Mismatch if a rank is out of turn.

        `hear`: gives every rank's call; asked when places differ for the first time.
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
        self.unseen = 0  # of calls whose signatures nobody compared yet
        self._agreed: set[int] = set()
        self._apart: set[frozenset[int]] = set()  # places that met each other, and were let pass
        self._after: dict[int, int] = {}
        self._last = 0

    def follow(self, call: Call) -> int:
        """Note the next call; returns the number of the call that came here the last time (0: not known)."""
        this = call.what ^ call.where
        expected = self._after.get(self._last, 0)
        if len(self._after) >= _MOST and self._last not in self._after:
            self._after.clear()
        self._after[self._last] = self._last = this
        return expected

    def roll(self, call: Call) -> None:
        """Note a call for which ranks do not meet on the host; its signature includes those before it."""
        self.unseen = crc32(f"{call.what}".encode())

    def agree(self, where: int) -> None:
        """Note a place at which all ranks were together."""
        if where not in self._agreed:
            if len(self._agreed) >= _MOST:
                self._agreed.clear()
            self._agreed.add(where)

    def come_apart(self, call: Call, wheres: Sequence[int], hear: Callable[[], Sequence[CallDescription]]) -> None:
        """Ranks are at different places. If all have met at each of these before, some rank is out of turn; else that
        may be on purpose, and a warning is given once."""
        places = frozenset(wheres)
        if places in self._apart:
            return
        if places <= self._agreed:
            calls = hear()
            raise Mismatch(f"{call.op}: the ranks disagree; they are at different places of the program", calls=calls)
        if len(self._apart) < _MOST:
            self._apart.add(places)
        calls = sorted(hear())
        if calls and calls[0].rank == call.rank:
            each = ", ".join(f"rank {other.rank} is in {other.text}" for other in calls[:4])
            warn_user(
                f"ranks make one collective at different places of the program: {each}. If that is not meant, one of "
                "them has skipped a call, and they exchange different things"
            )

    def comes_after(self, number: int) -> int:
        """The number of the call that followed this one the last time."""
        return self._after.get(number, 0)


class Verdict(NamedTuple):
    """Who is out of turn: `rank` is None if two ranks differ and nothing tells which is right."""

    rank: int | None
    cause: str
    place: str
    text: str


def judge_calls(call: Call, calls: Mapping[int, CallDescription]) -> Verdict:
    """Which rank's call is not the one that was due, and whether it has skipped that."""
    numbers = {rank: other.what ^ other.where for rank, other in calls.items()}
    due = call.expected if call.expected in numbers.values() else 0
    if not due:
        ((most, count), *rest) = Counter(numbers.values()).most_common()
        due = most if count > max((n for _, n in rest), default=0) else 0
    odd = sorted(rank for rank, number in numbers.items() if due and number != due)
    if not odd:
        first, *others = sorted(numbers)
        other = next((r for r in others if numbers[r] != numbers[first]), first)
        text = f"rank {other} has {calls[other].text}, rank {first} has {calls[first].text}"
        return Verdict(None, _name_cause(calls.values()), calls[other].place, text)
    rank = odd[0]
    right = next(calls[r] for r in sorted(numbers) if numbers[r] == due)
    who = f"rank {rank}" if len(odd) == 1 else f"ranks {', '.join(map(str, odd))}"
    has = f"{who} {'is' if len(odd) == 1 else 'are'} in {calls[rank].text}, the others in {right.text}"
    if call.expected == due and call.history.comes_after(due) == numbers[rank]:
        return Verdict(rank, "skipped collective", right.place or calls[rank].place, f"{has}, which {who} skipped")
    return Verdict(rank, _name_cause([calls[rank], right]), calls[rank].place, has)


def _name_cause(calls: Iterable[CallDescription]) -> str:
    """Different shapes of one operation, or different operations."""
    found = list(calls)
    names = {call.text.split(" ", 1)[0] for call in found}
    whats = {call.what for call in found}
    return "different shape" if len(names) == 1 and len(whats) > 1 else "different collective"


def note_trouble(error: Mismatch | PeerLost, call: Call | None, ledger: Ledger) -> None:
    """Enter into the ledger who is out of turn if ranks disagree or one has ended, and add it to the error's text."""
    if call is None:
        return
    if isinstance(error, Mismatch):
        _note_mismatch(error, call, ledger)
    elif error.ended is not None:
        text = (
            f"rank {error.ended} has ended its program without {call.describe()}, where rank {call.rank} waits for it"
        )
        place = call.site.text if call.site is not None else ""
        ledger.event("verdict", rank=error.ended, cause="skipped collective", place=place, text=text)
        error.ended = None  # it may be raised again


def _note_mismatch(error: Mismatch, call: Call, ledger: Ledger) -> None:
    if error.is_noted:
        return
    error.is_noted = True
    calls = {other.rank: other for other in error.calls}
    calls.setdefault(call.rank, call.description)
    if len(calls) < 2:
        return
    verdict = judge_calls(call, calls)
    if len({other.text for other in calls.values()}) == 1:
        text = f"before {call.describe()}, the ranks have called different things on their GPUs (NCCL)"
        verdict = Verdict(verdict.rank, "different collective", verdict.place, text)
    listed = "; ".join(f"rank {rank}: {other.text}" for rank, other in sorted(calls.items())[:8])
    said = verdict.text[:1].upper() + verdict.text[1:]
    error.args = (f"{error.args[0]}\nAs collective {call.number}: {listed}.\n{said}.",)
    ledger.event("verdict", rank=verdict.rank, cause=verdict.cause, place=verdict.place, text=verdict.text)
