"""Where each element's optimizer state lives and who steps it: lines cut into parts, each part on one lane.

`host` and `disk`: stepped by the CPU. `staged`: state in host memory, which passes through the GPU to be stepped there,
while the CPU steps its own parts; the PCI express link works in both directions meanwhile. `resident`: on the GPU.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from collections.abc import Set as AbstractSet
from typing import Literal, NamedTuple

from unisono.offload.segments import Run as Run

Lane = Literal["host", "disk", "staged", "resident"]
PART = 8 << 20  # elements: 100 MB of Adam's state, 2 ms of a fast link
_BORDER = 1 << 12  # parts begin on such a multiple
_HOST_PARTS = 4  # the CPU's are as many times larger: they wait for no slot, and starting its threads takes time
_LEAST = 1 << 18  # a smaller part than this is not worth a lane of its own

_LINK_GBS = 55.0  # GB/s each way: PCI express 5.0 x16, measured on an H200
_HOST_RATE = 0.2625  # Gparam/s a core: fused AdamW, measured with 16 cores (4.2 in all)


class Part(NamedTuple):
    """The elements from `start` to before `stop` of unit `unit`."""

    unit: int
    start: int
    stop: int
    lane: Lane

    @property
    def length(self) -> int:
        """How many elements it has."""
        return self.stop - self.start


def staged_share(threads: int, *, state_bytes: int = 12, compute_bytes: int = 2) -> float:
    """The share of the elements that goes through the GPU, so that both lanes end together.

    With c Gparam/s of the CPU, a link of b GB/s each way, s bytes of state and p of parameters an element:
    (s f + p (1 - f)) / b = (1 - f) / c.

    >>> round(staged_share(16), 2), round(staged_share(4), 2)
    (0.48, 0.81)
    """
    rate = _HOST_RATE * threads
    share = (_LINK_GBS - compute_bytes * rate) / (_LINK_GBS + (state_bytes - compute_bytes) * rate)
    return min(1.0, max(0.0, share))


def cut(
    lengths: Sequence[int],
    *,
    share: float = 0.0,
    resident: AbstractSet[int] = frozenset(),
    disk: AbstractSet[int] = frozenset(),
    part: int = PART,
) -> list[Part]:
    """The parts of all lines, in order.

    Every line is divided between the lanes, not the lines among them: the first is then ready as soon as it can be.
    The same arguments give the same parts, so that a run that is resumed steps each element where it was stepped
    before.

    >>> cut([10_000_000, 500], share=0.5)
    ... # doctest: +NORMALIZE_WHITESPACE
    [Part(unit=0, start=0, stop=5001216, lane='host'), Part(unit=0, start=5001216, stop=10000000, lane='staged'),
     Part(unit=1, start=0, stop=500, lane='staged')]
    """
    parts: list[Part] = []
    seen = given = 0
    for unit, length in enumerate(lengths):
        if unit in resident:
            parts += _pieces(unit, 0, length, "resident", part)
        elif unit in disk:
            parts += _pieces(unit, 0, length, "disk", length)  # the stepper divides it, as its room on disk is divided
        else:
            seen += length
            border = _border(length, share * seen - given)
            given += length - border
            parts += _pieces(unit, 0, border, "host", _HOST_PARTS * part)
            parts += _pieces(unit, border, length, "staged", part)
    return parts


def _border(length: int, wanted: float) -> int:
    """Where the host's part of a line ends, if the other lane should have the `wanted` last elements."""
    border = round((length - wanted) / _BORDER) * _BORDER
    if border < min(_LEAST, length):
        return 0 if wanted > length / 2 else length
    return length if length - border < _LEAST else border


def _pieces(unit: int, start: int, stop: int, lane: Lane, part: int) -> Iterator[Part]:
    """From `start` to `stop` in equal parts of at most `part` elements."""
    if stop <= start:
        return
    count = -(-(stop - start) // part)
    each = -(-(stop - start) // (count * _BORDER)) * _BORDER
    for low in range(start, stop, each):
        yield Part(unit, low, min(low + each, stop), lane)


def clip(runs: Sequence[Run], start: int, stop: int) -> list[Run]:
    """The runs inside [start, stop), counted from `start`.

    >>> clip([Run(0, 10, 0), Run(16, 30, 1)], 8, 20)
    [Run(start=0, stop=2, group=0), Run(start=8, stop=12, group=1)]
    """
    found = ((max(r.start, start), min(r.stop, stop), r.group) for r in runs)
    return [Run(low - start, high - start, group) for low, high, group in found if low < high]


def clip_ranges(ranges: Sequence[tuple[int, int]], start: int, stop: int) -> list[tuple[int, int]]:
    """The ranges inside [start, stop), counted from `start`.

    >>> clip_ranges([(0, 4), (6, 12)], 3, 8)
    [(0, 1), (3, 5)]
    """
    found = ((max(low, start), min(high, stop)) for low, high in ranges)
    return [(low - start, high - start) for low, high in found if low < high]


def gaps(runs: Sequence[Run], length: int) -> list[tuple[int, int]]:
    """What lies between the runs: padding.

    >>> gaps([Run(0, 10, 0), Run(16, 30, 0)], 32)
    [(10, 16), (30, 32)]
    """
    starts, stops = [r.start for r in runs], [r.stop for r in runs]
    return [(low, high) for low, high in zip([0, *stops], [*starts, length], strict=True) if low < high]


def resident_units(
    lengths: Sequence[int],
    budget_bytes: float,
    *,
    share: float,
    state_bytes: int = 12,
    gradient_bytes: int = 2,
    slots: int,
    part: int = PART,
    delayed: bool = False,
    compute_bytes: int = 2,
) -> frozenset[int]:
    """The units whose state fits on the device: as many of the first as possible.

    The first, because the next forward needs them first. `budget_bytes` is what the optimizer may have there, gradients
    included: the slots and gradients of what passes through are counted too. A delayed update keeps the gradients of
    two steps and a second copy of the values (`compute_bytes` an element).

    >>> sorted(resident_units([1 << 20] * 4, 40 << 20, share=0.0, slots=6))
    [0, 1]
    """
    gradient_bytes *= 1 + delayed
    budget_bytes -= sum(lengths) * compute_bytes * delayed
    for count in range(len(lengths), -1, -1):
        here, rest = sum(lengths[:count]), sum(lengths[count:])
        most = min(part, max(lengths, default=0))
        passing = rest * share * gradient_bytes + (slots * state_bytes * most if share and rest else 0)
        scratch = 4 * most * ((here > 0) + (share > 0 and rest > 0))
        if here * (state_bytes + gradient_bytes) + passing + scratch <= budget_bytes:
            return frozenset(range(count))
    return frozenset()
