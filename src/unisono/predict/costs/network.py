"""How long an operation between ranks takes: as fitted to what was measured, or by the formula of its algorithm."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from statistics import median
from typing import Literal, NamedTuple

OPS = ("all_reduce", "reduce_scatter", "all_gather", "broadcast", "all_to_all", "send", "exchange")
Among = Literal["all", "inside", "across"]
_HEAD_BYTES = 512  # what an exchange of objects sends at least
_SEGMENT_BYTES = 256 << 10  # a chain passes a tensor on in such pieces


@dataclass(frozen=True)
class Operation:
    """One collective, and the bytes that each rank gives to it.

    nbytes: the whole tensor for all_reduce, reduce_scatter and broadcast; a rank's own part for all_gather, send and
        exchange; the sum of a rank's parts for all_to_all.
    among: all ranks, those inside a host, or one of each host.
    """

    op: str
    nbytes: int
    among: Among = "all"

    def __post_init__(self) -> None:
        if self.op not in OPS:
            raise ValueError(f"an operation is one of {', '.join(OPS)}, got {self.op!r}")


class Link(NamedTuple):
    """Between two ranks: time of a message = latency_s + bits / bits_per_s."""

    latency_s: float
    bits_per_s: float

    @property
    def s_per_byte(self) -> float:
        """Seconds that a byte takes."""
        return 8 / self.bits_per_s

    def seconds(self, nbytes: float) -> float:
        """Seconds that a message takes."""
        return self.latency_s + nbytes * self.s_per_byte


class LinearCost(NamedTuple):
    """time = latency_s + bytes * s_per_byte."""

    latency_s: float
    s_per_byte: float

    def at(self, nbytes: float, operations: float = 1) -> float:
        """Seconds that an operation on `nbytes` takes, or several on so many together."""
        return operations * self.latency_s + nbytes * self.s_per_byte


@dataclass(frozen=True)
class Network:
    """`ranks` ranks, `per_host` of them on each host; links `between` hosts, and `inside` one (memory that they share).

    fitted: by operation, (latency, seconds a byte) as measured in this very world: they count before the formulas.
    curves: by operation, the measured points (bytes, seconds), where a line does not tell all (a link whose first bytes
        pass at once): they count from the smallest size on, beyond the largest with the rate between the last two.
    steals: by operation, the seconds of compute that a second of it takes away where they go on side by side, as
        moving bytes is work for cores too. Nothing where cores are free.
    spread: how far a measured time lies from its line, as a share of it.
    """

    ranks: int
    per_host: int
    between: Link
    inside: Link | None = None
    fitted: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    curves: Mapping[str, Sequence[tuple[float, float]]] = field(default_factory=dict)
    steals: Mapping[str, float] = field(default_factory=dict)
    spread: float = 0.05

    @property
    def hosts(self) -> int:
        """How many hosts there are."""
        return -(-self.ranks // self.per_host)

    @property
    def link(self) -> Link:
        """The slowest kind of link that messages cross: between hosts or, on one host, inside it."""
        return self.between if self.hosts > 1 else self.inside or self.between

    def seconds(self, operation: Operation) -> float:
        """How long an operation takes in this world, from when its last rank has arrived."""
        if self._size(operation) < 2:
            return 0.0
        nbytes = max(operation.nbytes, _HEAD_BYTES) if operation.op == "exchange" else operation.nbytes
        if operation.among == "all":
            curve = self.curves.get(operation.op, ())
            if len(curve) > 1 and curve[0][0] <= nbytes:
                return _interpolate(curve, nbytes)
            if operation.op in self.fitted:
                return LinearCost(*self.fitted[operation.op]).at(nbytes)
        return self.formula(operation).at(nbytes)

    def formula(self, operation: Operation) -> LinearCost:
        """What an operation costs by the formula of its algorithm on these links."""
        if operation.among == "inside" or self.hosts == 1:
            return self._inside(operation.op, self._size(operation))
        if operation.among == "across" or self.per_host == 1:
            return self._between(operation.op, self._size(operation), operation.nbytes)
        return self._two_level(operation)

    def _size(self, operation: Operation) -> int:
        sizes = {"inside": min(self.per_host, self.ranks), "across": self.hosts}
        return sizes.get(operation.among, self.ranks)

    def _between(self, op: str, n: int, nbytes: int) -> LinearCost:
        """Messages between `n` ranks: rings, a chain, or all at once; each begins with a word to the next rank."""
        messages, share = _messages(op, n), sent_share(op, n)
        fill = (n - 2) * min(nbytes, _SEGMENT_BYTES) * self.between.s_per_byte if op == "broadcast" else 0.0
        return LinearCost(messages * self.between.latency_s + fill, share * self.between.s_per_byte)

    def _inside(self, op: str, n: int) -> LinearCost:
        """Memory that `n` ranks share: two meetings, and the bytes that a rank reads and writes."""
        link = self.inside or self.between
        moved = {"all_reduce": 2.0, "all_gather": float(n), "all_to_all": 2.0, "exchange": float(n)}.get(op, 1.0)
        return LinearCost(2 * link.latency_s, moved * link.s_per_byte)

    def _two_level(self, operation: Operation) -> LinearCost:
        """Inside each host, between the hosts' first ranks, inside again; all_to_all and messages go by themselves."""
        op, nbytes, each = operation.op, operation.nbytes, self.per_host
        if op in ("all_to_all", "exchange", "send"):
            line = self._between(op, self.ranks, nbytes)
            away = (self.ranks - each) / (self.ranks - 1)  # of the bytes that leave a rank, those to other hosts
            crowd = away * each if op != "send" else 1.0  # the ranks of a host share its link
            return LinearCost(line.latency_s, line.s_per_byte * crowd)
        if op == "all_gather":  # hosts pass on all of their ranks' parts
            across = self._between(op, self.hosts, nbytes * each)
            first, last = self._inside(op, each), self._inside("broadcast", each)
            s_per_byte = first.s_per_byte + each * across.s_per_byte + self.ranks * last.s_per_byte
            return LinearCost(first.latency_s + across.latency_s + last.latency_s, s_per_byte)
        across = self._between(op, self.hosts, nbytes)
        if op == "broadcast":
            first, last = self._inside(op, each), LinearCost(0.0, 0.0)
        else:
            first, last = self._inside("all_reduce", each), self._inside("broadcast", each)
        part = 1 / self.hosts if op == "reduce_scatter" else 1.0
        return LinearCost(
            first.latency_s + across.latency_s + last.latency_s,
            first.s_per_byte + across.s_per_byte + part * last.s_per_byte,
        )

    # The same, otherwise ----------------------------------------------------------------------------------------

    def with_ranks(self, ranks: int, per_host: int | None = None) -> Network:
        """The same links under another number of ranks: what was fitted grows as the formulas do."""
        other = replace(self, ranks=ranks, per_host=per_host or self.per_host, fitted={}, curves={})
        return self._carry(other)

    def with_bandwidth(self, bits_per_s: float) -> Network:
        """The same with links of another speed between hosts (inside the host, where there is one only).

        What was fitted keeps its latency and changes as the formula does.
        """
        if self.hosts == 1:
            inside = Link((self.inside or self.between).latency_s, bits_per_s)
            other = replace(self, inside=inside, fitted={}, curves={})
        else:
            other = replace(self, between=Link(self.between.latency_s, bits_per_s), fitted={}, curves={})
        return self._carry(other)

    def _carry(self, other: Network) -> Network:
        """`other` with the fitted lines and the curves, times how the formula's line changes."""
        fitted: dict[str, tuple[float, float]] = {}
        curves: dict[str, list[tuple[float, float]]] = {}
        for op, line in self.fitted.items():
            mine, theirs = self.formula(Operation(op, 0)), other.formula(Operation(op, 0))
            slower, later = _ratio(theirs.s_per_byte, mine.s_per_byte), _ratio(theirs.latency_s, mine.latency_s)
            fitted[op] = (line[0] * later, line[1] * slower)
            for nbytes, seconds in self.curves.get(op, ()):
                moving = min(seconds, nbytes * line[1])  # the rest is latency
                curves.setdefault(op, []).append((nbytes, (seconds - moving) * later + moving * slower))
        return replace(other, fitted=fitted, curves=curves)


def _messages(op: str, n: int) -> int:
    """How many messages follow each other in an operation; the first one agrees on what is done."""
    if op == "send":
        return 1
    rounds = {"all_reduce": 2 * (n - 1), "all_to_all": 1, "broadcast": n - 1 if n > 2 else 1}
    return 1 + rounds.get(op, n - 1)


def sent_share(op: str, ranks: int) -> float:
    """Bytes that a rank sends for each byte that it gives to an operation (see `Operation.nbytes`)."""
    rest = ranks - 1
    shares = {
        "all_reduce": 2 * rest / ranks,
        "reduce_scatter": rest / ranks,
        "all_to_all": rest / ranks,
        "all_gather": float(rest),
        "exchange": float(rest),
    }
    return shares.get(op, 1.0)


def all_reduce_bytes(nbytes: int, ranks: int) -> int:
    """Bytes that one rank sends to all-reduce `nbytes`: 2(N-1)/N of them, in whole bytes.

    >>> all_reduce_bytes(100, 4), all_reduce_bytes(100, 1)
    (150, 0)
    """
    return -(-2 * (ranks - 1) * nbytes // ranks)


def _ratio(a: float, b: float) -> float:
    return a / b if b else 1.0


def _interpolate(curve: Sequence[tuple[float, float]], nbytes: float) -> float:
    """Seconds on a measured curve: linear between two points, and beyond the last one at the rate of the last two."""
    (low, before), (high, after) = next(((a, b) for a, b in pairwise(curve) if nbytes <= b[0]), tuple(curve[-2:]))
    return before + max(0.0, after - before) * (nbytes - low) / max(high - low, 1)


def fit(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """(latency, seconds a byte) of the line through points (bytes, seconds), robust against a few slow ones.

    Least squares of the error as a share of the time, so that small messages count as much as large ones, on the
    median of each size. Neither number is negative.

    >>> latency_s, s_per_byte = fit([(0, 0.001), (1000, 0.002), (1000, 9.0), (1000, 0.002), (10000, 0.011)])
    >>> round(latency_s, 6), round(s_per_byte, 9)
    (0.001, 1e-06)
    """
    if not points:
        raise ValueError("a line needs at least one measured point")
    typical = [(nbytes, max(seconds, 1e-9)) for nbytes, seconds in take_medians(points)]
    sums = [0.0] * 5
    for x, y in typical:
        w = 1 / y**2
        sums = [s + w * each for s, each in zip(sums, (1.0, x, x * x, y, x * y), strict=True)]
    one, sx, sxx, sy, sxy = sums
    spread = one * sxx - sx * sx
    if spread <= 1e-12 * one * sxx or math.isclose(one * sxx, sx * sx, rel_tol=1e-12):
        x, y = typical[-1]
        return (0.0, y / x) if x else (y, 0.0)
    slope = (one * sxy - sx * sy) / spread
    start = (sy - slope * sx) / one
    if slope < 0:
        return sy / one, 0.0
    return (start, slope) if start >= 0 else (0.0, sxy / sxx)


def take_medians(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Points (bytes, seconds), one for each size: the median of its times."""
    sizes = sorted({nbytes for nbytes, _ in points})
    return [(nbytes, median(s for n, s in points if n == nbytes)) for nbytes in sizes]
