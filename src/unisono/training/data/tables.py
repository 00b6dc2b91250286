"""Tables whose rows are divided among the workers: every global batch takes some rows of each rank's own.

`un.launch(train, workers=2, args=(frame,), on=un.on.spark(...))` with a Spark DataFrame or RDD, or a Ray Dataset, gives
every worker a `TablePart` in its place: the rows of its own partitions, mapped from files that its agent wrote.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from fractions import Fraction

import numpy as np

from unisono.launchers.runtime.table_part import TablePart as TablePart
from unisono.training.data.order import Indices, choose_index_dtype, draw_permutation

__all__ = ["TablePart", "count_prefix", "select_batches"]


def count_prefix(counts: Sequence[int], total: int) -> list[int]:
    """How many of each rank's samples are among the first `total` of all, when each rank's are spread evenly.

    Rank i's sample j stands at (2 j + 1) / (2 counts[i]); equal places go to the lower rank first. So every batch has
    each rank's share of it to within one sample, all ranks end together, and each sample comes once.

    >>> [count_prefix([6, 3], total) for total in (3, 6, 9)]
    [[2, 1], [4, 2], [6, 3]]
    """
    n = sum(counts)
    if not 0 <= total <= n:
        raise ValueError(f"count_prefix got total={total}. Expected 0 to {n}, the sum of the counts.")
    taken = [(2 * total * m + n) // (2 * n) for m in counts]  # those at places up to total / n
    while (missing := total - sum(taken)) > 0:
        after = [(Fraction(2 * t + 1, m), r) for r, (t, m) in enumerate(zip(taken, counts, strict=True)) if t < m]
        for _, r in heapq.nsmallest(missing, after):
            taken[r] += 1
    while (excess := sum(taken) - total) > 0:
        last = [(Fraction(2 * t - 1, m), r) for r, (t, m) in enumerate(zip(taken, counts, strict=True)) if t]
        for _, r in heapq.nlargest(excess, last):
            taken[r] -= 1
    return taken


def select_batches(
    counts: Sequence[int], *, rank: int, batch_size: int, first: int, stop: int, seed: int, epoch: int, shuffle: bool
) -> Iterator[tuple[Indices, float]]:
    """`rank`'s own samples of the global batches `first` to `stop`, and their weight n_i N / m as in `un.shard`.

    A rank that has no sample in a batch gets its first one with weight 0.

    >>> place = {"rank": 1, "batch_size": 3, "first": 0, "stop": 2}
    >>> for mine, weight in select_batches([4, 2], **place, seed=0, epoch=0, shuffle=False):
    ...     print(mine.tolist(), round(weight, 3))
    [0] 0.667
    [1] 0.667
    """
    n = counts[rank]
    # Each rank draws an order of its own; stream 0 is that of data which all ranks see.
    drawn = (
        draw_permutation(n, seed=seed, epoch=epoch, stream=1 + rank)
        if shuffle
        else np.arange(n, dtype=choose_index_dtype(n))
    )
    begin = count_prefix(counts, min(first * batch_size, sum(counts)))
    for batch in range(first, stop):
        end = count_prefix(counts, min((batch + 1) * batch_size, sum(counts)))
        held, total = end[rank] - begin[rank], sum(end) - sum(begin)
        yield (drawn[begin[rank] : end[rank]], held * len(counts) / total) if held else (drawn[:1], 0.0)
        begin = end
