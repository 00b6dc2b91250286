"""Where each element's optimizer state lives and who steps it: shards cut into blocks, each with one home.

`cpu` and `disk`: stepped by the CPU. `staged`: state in host memory, which passes through the GPU to be stepped there,
while the CPU steps its own blocks; the PCI express link works in both directions meanwhile. `resident`: on the GPU.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from collections.abc import Set as AbstractSet

from unisono.methods.offload.blocks import Home, Run

BLOCK_ELEMENTS = 8 << 20  # of a block that the device steps: 100 MB of Adam's state, 2 ms of a fast link
_BORDER = 1 << 12  # blocks begin on such a multiple
_CPU_BLOCKS = 4  # the CPU's are as many times larger: they wait for no buffer, and starting its threads takes time
_LEAST = 1 << 18  # fewer elements than these are not worth a block of their own

_LINK_GBS = 55.0  # GB/s each way: PCI express 5.0 x16, measured on an H200
_HOST_RATE = 0.2625  # Gparam/s a core: fused AdamW, measured with 16 cores (4.2 in all)


def staged_share(threads: int, *, state_bytes: int = 12, compute_bytes: int = 2) -> float:
    """The share of the elements that goes through the GPU, so that it and the CPU end together.

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
    block: int = BLOCK_ELEMENTS,
) -> list[tuple[int, int, int, Home]]:
    """The blocks of all shards, in order: unit, first element, end, home.

    Every shard is divided between the CPU and the device, not the shards among them: the first is then ready as soon as
    it can be. The same arguments give the same blocks, so that a run that is resumed steps each element where it was
    stepped before.

    >>> cut([10_000_000, 500], share=0.5)
    [(0, 0, 5001216, 'cpu'), (0, 5001216, 10000000, 'staged'), (1, 0, 500, 'staged')]
    """
    blocks: list[tuple[int, int, int, Home]] = []
    seen = given = 0
    for unit, length in enumerate(lengths):
        if unit in resident:
            blocks += [(unit, *span, "resident") for span in _divide(0, length, block)]
        elif unit in disk:
            blocks += [(unit, *span, "disk") for span in _divide(0, length, length)]  # it is divided into chunks
        else:
            seen += length
            border = _find_border(length, share * seen - given)
            given += length - border
            blocks += [(unit, *span, "cpu") for span in _divide(0, border, _CPU_BLOCKS * block)]
            blocks += [(unit, *span, "staged") for span in _divide(border, length, block)]
    return blocks


def _find_border(length: int, wanted: float) -> int:
    """Where the CPU's elements of a shard end, if the device should have the `wanted` last elements."""
    border = round((length - wanted) / _BORDER) * _BORDER
    if border < min(_LEAST, length):
        return 0 if wanted > length / 2 else length
    return length if length - border < _LEAST else border


def _divide(start: int, stop: int, most: int) -> Iterator[tuple[int, int]]:
    """From `start` to `stop` in equal spans of at most `most` elements."""
    if stop <= start:
        return
    count = -(-(stop - start) // most)
    each = -(-(stop - start) // (count * _BORDER)) * _BORDER
    for low in range(start, stop, each):
        yield low, min(low + each, stop)


def clip(runs: Sequence[Run], start: int, stop: int) -> list[Run]:
    """The runs inside [start, stop), counted from `start`.

    >>> clip([Run(0, 10, 0), Run(16, 30, 1)], 8, 20)
    [Run(start=0, stop=2, group=0), Run(start=8, stop=12, group=1)]
    """
    found = ((max(r.start, start), min(r.stop, stop), r.group) for r in runs)
    return [Run(low - start, high - start, group) for low, high, group in found if low < high]


def find_gaps(runs: Sequence[Run], length: int) -> list[tuple[int, int]]:
    """What lies between the runs: padding.

    >>> find_gaps([Run(0, 10, 0), Run(16, 30, 0)], 32)
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
    buffers: int,
    block: int = BLOCK_ELEMENTS,
    delayed: bool = False,
    compute_bytes: int = 2,
) -> frozenset[int]:
    """The units whose state fits on the device: as many of the first as possible.

    The first, because the next forward needs them first. `budget_bytes` is what the optimizer may have there, gradients
    included: the buffers and gradients of what passes through are counted too. A delayed update keeps the gradients of
    two steps and a second copy of the values (`compute_bytes` an element).

    >>> sorted(resident_units([1 << 20] * 4, 40 << 20, share=0.0, buffers=6))
    [0, 1]
    """
    gradient_bytes *= 1 + delayed
    budget_bytes -= sum(lengths) * compute_bytes * delayed
    for count in range(len(lengths), -1, -1):
        here, rest = sum(lengths[:count]), sum(lengths[count:])
        most = min(block, max(lengths, default=0))
        passing = rest * share * gradient_bytes + (buffers * state_bytes * most if share and rest else 0)
        scratch = 4 * most * ((here > 0) + (share > 0 and rest > 0))
        if here * (state_bytes + gradient_bytes) + passing + scratch <= budget_bytes:
            return frozenset(range(count))
    return frozenset()
