"""Which ranks are slower than the others, since when, and why: judged from what every rank measured of its steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median_low
from typing import Literal, NamedTuple

__all__ = ["Cause", "Judge", "Numbers", "Straggler", "list_leaders"]

Cause = Literal["input", "compute", "network", "host"]
SLOW = 1.5  # times the others' own time
AS_FAST = 1.2  # a straggler is one no more below this
SLOW_LINK = 3.0  # times the others' seconds for the same bytes
LEAST_S = 0.001  # of a step: less is not worth a word
LEAST_SHARE = 0.1  # of a step that a slow link has to cost
LINK_BYTES = 16 << 10  # that links are measured with
_CHECKS = 2  # in a row, to become a straggler and to be one no more


class Numbers(NamedTuple):
    """One rank's last steps: seconds and bytes a step. What all ranks tell each other."""

    own_s: float  # not waiting for others: compute and data
    data_s: float  # of these, getting batches
    kept_off_s: float  # ready to compute, while others had the cores
    wall_s: float  # 0: this rank measured nothing
    bytes_sent: float = 0.0
    samples: float = 0.0  # in a global batch, if they may be dealt by speed
    from_previous_s: float = 0.0  # for some bytes from the host before mine, in the order of the hosts; 0: not measured
    from_next_s: float = 0.0  # and from the one after it


@dataclass(frozen=True)
class Straggler:
    """A rank that is slower than the others.

    Attributes:
        rank, host: Who.
        factor: How many times as long it takes for the same samples; of a slow network, for the same bytes.
        cause: "input" (it waits for data), "host" (others use the cores of its host, or all ranks there are slow),
            "network" (bytes from and to its host take long), "compute" (none of these).
        since: The first step, as the ledger counts, in which it was seen to be slow.
    """

    rank: int
    host: str
    factor: float
    cause: Cause
    since: int

    def describe(self, *, with_host: bool) -> str:
        """The finding as a sentence.

        >>> Straggler(3, "b", 3.94, "compute", 80).describe(with_host=True)
        'rank 3 (host b) is 3.9x slower than the others since step 80: compute'
        """
        who = f"rank {self.rank} (host {self.host})" if with_host else f"rank {self.rank}"
        what = "sends and receives bytes" if self.cause == "network" else "is"
        return f"{who} {what} {self.factor:.1f}x slower than the others since step {self.since}: {self.cause}"


class Judge:
    """Names stragglers from one check after the other; a single bad check does not make one.

    >>> judge = Judge(["a", "a"])
    >>> fast, slow = Numbers(0.1, 0.0, 0.0, 0.4), Numbers(0.4, 0.0, 0.0, 0.4)
    >>> judge.judge([fast, slow], since=1), judge.stragglers
    (([], []), ())
    >>> judge.judge([fast, slow], since=21)[0]
    [Straggler(rank=1, host='a', factor=4.0, cause='compute', since=1)]
    """

    def __init__(self, hosts: Sequence[str]) -> None:
        self._hosts = list(hosts)
        self._suspected: dict[int, tuple[int, int]] = {}  # by rank: checks in a row, and since which step
        self._known: dict[int, Straggler] = {}
        self._calm: dict[int, int] = {}  # of those known: checks in a row in which they were as fast

    @property
    def stragglers(self) -> tuple[Straggler, ...]:
        """The current stragglers, by rank."""
        return tuple(self._known[rank] for rank in sorted(self._known))

    @property
    def suspects(self) -> tuple[int, ...]:
        """Ranks that become stragglers if the next check finds them slow as well."""
        return tuple(sorted(self._suspected))

    def judge(
        self, numbers: Sequence[Numbers], *, since: int, work: Sequence[float] | None = None
    ) -> tuple[list[Straggler], list[Straggler]]:
        """Who has become a straggler by this check, and who is one no more.

        `since`: the first step that the numbers are of; `work`: how much each rank had to do, where that differs.
        """
        found, over = [], []
        work = [1.0] * len(numbers) if work is None else [len(work) * w / sum(work) for w in work]
        for rank, (factor, cause) in enumerate(_compare(numbers, work, self._hosts)):
            known = self._known.get(rank)
            if known is None:
                checks, first = self._suspected.pop(rank, (0, since))
                if cause is None:
                    continue
                self._suspected[rank] = checks + 1, first
                if checks + 1 == _CHECKS:
                    del self._suspected[rank]
                    self._known[rank] = Straggler(rank, self._hosts[rank], factor, cause, first)
                    found.append(self._known[rank])
                continue
            self._calm[rank] = self._calm.get(rank, 0) + 1 if cause is None and factor < AS_FAST else 0
            if self._calm[rank] == _CHECKS:
                del self._known[rank], self._calm[rank]
                over.append(known)
            elif cause is not None:
                self._known[rank] = Straggler(rank, known.host, factor, cause, known.since)
        return found, over


def _compare(
    numbers: Sequence[Numbers], work: Sequence[float], hosts: Sequence[str]
) -> list[tuple[float, Cause | None]]:
    """Of every rank, how many times the others' time it takes for the same work, and why; no cause: not too long.

    `work`: how much each had, with a mean of 1.
    The others are their median, of an even number the lower one: if half of all ranks are slow, those still are.
    """
    found = [_compare_own(rank, numbers, work) for rank in range(len(numbers))]
    if len(set(hosts)) > 1:
        _blame_hosts(found, hosts)
    for rank, factor in _compare_links(numbers, hosts).items():
        if found[rank][1] is None:
            found[rank] = factor, "network"
    return found


def _compare_own(rank: int, numbers: Sequence[Numbers], work: Sequence[float]) -> tuple[float, Cause | None]:
    others = [r for r in range(len(numbers)) if r != rank and numbers[r].wall_s > 0 and work[r] > 0]
    if not others or numbers[rank].wall_s <= 0 or work[rank] <= 0:
        return 1.0, None

    def exceed(seconds: Sequence[float]) -> tuple[float, float]:
        """By how much this rank exceeds the others for a mean share of the work; and the others' value."""
        base = median_low(seconds[r] / work[r] for r in others)
        return seconds[rank] / work[rank] - base, base

    excess, base = exceed([n.own_s for n in numbers])
    factor = 1.0 + excess / base if base > 0 else 1.0
    if factor < SLOW or excess < LEAST_S:
        return factor, None
    if exceed([n.data_s for n in numbers])[0] >= excess / 2:
        return factor, "input"
    return factor, "host" if exceed([n.kept_off_s for n in numbers])[0] >= excess / 2 else "compute"


def _blame_hosts(found: list[tuple[float, Cause | None]], hosts: Sequence[str]) -> None:
    """If all of a host's ranks compute slowly, name the host as the cause."""
    for host in dict.fromkeys(hosts):
        mine = [rank for rank, name in enumerate(hosts) if name == host]
        if len(mine) > 1 and all(found[rank][1] in ("compute", "host") for rank in mine):
            for rank in mine:
                found[rank] = found[rank][0], "host"


def list_leaders(hosts: Sequence[str]) -> list[int]:
    """The first rank of every host: those between which links are measured.

    >>> list_leaders(["a", "a", "b", "c"])
    [0, 2, 3]
    """
    return [list(hosts).index(host) for host in dict.fromkeys(hosts)]


def _compare_links(numbers: Sequence[Numbers], hosts: Sequence[str]) -> dict[int, float]:
    """The first rank of each host whose links are slow, with how many times the others' time they take.

    A slow link is that of a host if all bytes that it gets, or all that it sends, are slow: with one neighbour alone it
    may be that neighbour's. So it takes three hosts to tell.
    """
    leaders = list_leaders(hosts)
    measured = [numbers[r] for r in leaders]
    if len(leaders) < 3 or any(min(n.from_previous_s, n.from_next_s) <= 0 for n in measured):
        return {}
    gets = [min(n.from_previous_s, n.from_next_s) for n in measured]
    many = len(leaders)
    sends = [min(measured[(i + 1) % many].from_previous_s, measured[i - 1].from_next_s) for i in range(many)]
    takes = [max(pair) for pair in zip(gets, sends, strict=True)]
    found = {}
    for i, rank in enumerate(leaders):
        base = median_low(takes[:i] + takes[i + 1 :])
        costs_s = (takes[i] - base) * numbers[rank].bytes_sent / LINK_BYTES
        if takes[i] >= SLOW_LINK * base and costs_s >= LEAST_SHARE * numbers[rank].wall_s:
            found[rank] = takes[i] / base
    return found
