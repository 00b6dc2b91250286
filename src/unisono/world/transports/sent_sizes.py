"""Whether each rank of an all_to_all expects what the others send it, without another message if they agree."""

from __future__ import annotations

from collections.abc import Sequence
from zlib import crc32

__all__ = ["WEIGHTS", "describe_uneven", "weigh_sizes"]

WEIGHTS = 1 << 61


def weigh_sizes(rank: int, sent: Sequence[int], expected: Sequence[int]) -> int:
    """A number that adds up to a multiple of `WEIGHTS` over all ranks if each expects what the others send: each
    pair of ranks has a weight, and its size counts once with it, for the sender, and once against it.

    >>> (weigh_sizes(0, [3, 5], [3, 7]) + weigh_sizes(1, [6, 2], [5, 2])) % WEIGHTS == 0
    False
    >>> (weigh_sizes(0, [3, 5], [3, 7]) + weigh_sizes(1, [7, 2], [5, 2])) % WEIGHTS
    0
    """
    total = sum(n * crc32(b"%d %d" % (rank, r)) for r, n in enumerate(sent))
    return (total - sum(n * crc32(b"%d %d" % (r, rank)) for r, n in enumerate(expected))) % WEIGHTS


def describe_uneven(every: Sequence[tuple[Sequence[int], Sequence[int]]]) -> str:
    """Who sends something else than the other expects; `every`: what each rank sends to, and expects of, each."""
    pairs = [(s, d) for s in range(len(every)) for d in range(len(every)) if every[s][0][d] != every[d][1][s]]
    each = [
        f"rank {s} sends {every[s][0][d]} elements to rank {d}, which expects {every[d][1][s]}" for s, d in pairs[:4]
    ]
    more = f", and {len(pairs) - 4} more" if len(pairs) > 4 else ""
    return f"all_to_all: the ranks disagree; {'; '.join(each)}{more}"
