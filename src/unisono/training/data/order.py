"""Who gets which samples: the arithmetic behind `un.shard`, on numbers alone.

Two questions are kept apart. The *global order* (which samples make up global batch 0, 1, 2, ...) depends on
the seed, the epoch, the number of samples and the batch size, never on the number of workers. The *part*
(which of a global batch's samples are mine) depends on rank and size alone, and on the ranks' speeds if samples are
dealt by them. So the workers, and their speeds, may change between any two batches.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from fractions import Fraction
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from unisono.launchers.runtime.table_part import TablePart as TablePart
from unisono.world.speeds import deal_by_speed

Indices = NDArray[np.signedinteger]
Partition = Literal["contiguous", "strided"]

_WORD = 2**64


def draw_permutation(n: int, *, seed: int, epoch: int, stream: int = 0) -> Indices:
    """A random order of `range(n)` that is the same on every machine and with every numpy version.

    Each index is given random high bits by the counter-based generator Philox, keyed by (seed, epoch), and
    the words are sorted. The words are distinct, so any sorting algorithm gives the same answer; numpy's own
    `shuffle` promises no such thing from one version to the next. `stream` tells apart independent permutations of one
    seed (any integer, taken modulo 2^64) and epoch.

    >>> sorted(draw_permutation(5, seed=0, epoch=0).tolist())
    [0, 1, 2, 3, 4]
    """
    key = np.array([seed % _WORD, epoch % _WORD], dtype=np.uint64)
    counter = np.array([0, 0, 0, stream], dtype=np.uint64)
    words = np.random.Philox(key=key, counter=counter).random_raw(n)
    low_bits = np.uint64((1 << max(n, 1).bit_length()) - 1)
    words &= ~low_bits
    words |= np.arange(n, dtype=np.uint64)
    words.sort()
    words &= low_bits
    return words.astype(choose_index_dtype(n))


def choose_index_dtype(n: int) -> type[np.signedinteger]:
    """The smallest of int32 and int64 that counts to n."""
    return np.int32 if n < 2**31 else np.int64


def order_epoch(
    n: int, *, batch_size: int, seed: int, epoch: int, shuffle: bool, classes: Indices | None = None
) -> Indices:
    """The order of one epoch: global batch b is `order[b * batch_size : (b + 1) * batch_size]`.

    It is a permutation of `range(n)`. Without `shuffle` samples keep their own order (within each class, if `classes`
    is given: a class number 0, 1, ... for each sample, see `stratify_order`).

    >>> order_epoch(6, batch_size=4, seed=0, epoch=0, shuffle=False).tolist()
    [0, 1, 2, 3, 4, 5]
    """
    drawn = draw_permutation(n, seed=seed, epoch=epoch) if shuffle else np.arange(n, dtype=choose_index_dtype(n))
    if classes is None:
        return drawn
    # If classes do not divide evenly, some batches get one sample more of a class. Which ones is drawn as
    # well: counted through in turn, a rare class would sit in neighbouring batches.
    full = n // batch_size
    places = draw_permutation(full, seed=seed, epoch=epoch if shuffle else 0, stream=1)
    return stratify_order(drawn, classes, batch_size, places)


def stratify_order(drawn: Indices, classes: Indices, batch_size: int, places: Indices) -> Indices:
    """Rearranges `drawn` so that every global batch has the class mix of the whole.

    A batch of m samples holds floor(m * n_c / n) or ceil(m * n_c / n) of class c, for every class and every
    batch, the short last one too. (Such a rounding of a table with whole margins always exists; with all rows
    alike but one it can be written down: round the odd row within the bounds that leave the others possible,
    then deal the rest.)

    Inside a batch the samples lie class by class, so dealing them out in turn, as "strided" does, gives every
    rank the batch's class mix to within one sample a class, and parts that differ by at most one sample.

    drawn: a permutation of the samples; its order is kept within a class.
    classes: class number of each sample, by sample index.
    places: a permutation of the full batches.
    """
    n, full = len(drawn), len(places)
    counts = np.bincount(classes).astype(np.int64)
    # 1. Of each class: `short` in the last batch, `base` in every full one, `spare` dealt over the full ones.
    base = counts * batch_size // n if full else np.zeros_like(counts)
    short = _fill_short_batch(counts, base, full=full, size=n - full * batch_size)
    spare = counts - full * base - short
    # 2. The batch of each sample: dealt in turn, first the even part of its class, then the spares.
    grouped = drawn[np.argsort(_narrow(classes[drawn]), kind="stable")]
    class_of = np.repeat(np.arange(len(counts)), counts)
    turn = np.arange(n) - (np.cumsum(counts) - counts)[class_of] - short[class_of]
    beyond = turn - (full * base)[class_of]
    spares_before = np.cumsum(spare) - spare
    row = np.where(beyond < 0, turn, beyond + spares_before[class_of])
    row = np.where(turn < 0, full, places[row % full] if full else full)
    # 3. Batch after batch, class by class inside.
    return grouped[np.argsort(_narrow(row), kind="stable")]


def _fill_short_batch(counts: Indices, base: Indices, *, full: int, size: int) -> Indices:
    """How many of each class go to the last, short batch of `size` samples, so that the full batches work out."""
    n = int(counts.sum())
    left_over = counts - full * base
    low: Indices = np.maximum(counts * size // n, left_over - full)
    high = np.minimum(-(-counts * size // n), left_over)
    wanted = size - int(low.sum())
    remainders = np.where(high > low, counts * size - low * n, -n * max(n, 1))
    low[np.argsort(-remainders, kind="stable")[:wanted]] += 1
    assert (low <= high).all()
    assert low.sum() == size
    return low


def _narrow(keys: Indices) -> NDArray[np.integer]:
    """The keys in 16 bits if they fit: numpy sorts those by radix, six times faster."""
    return keys.astype(np.uint16) if keys.size and keys.max() < 2**16 else keys


def slice_part(m: int, *, rank: int, size: int, partition: Partition) -> slice:
    """The part of a global batch of m samples that is `rank`'s; parts differ by at most one sample.

    >>> [slice_part(7, rank=r, size=3, partition="contiguous") for r in range(3)]
    [slice(0, 3, 1), slice(3, 5, 1), slice(5, 7, 1)]
    >>> slice_part(7, rank=1, size=3, partition="strided")
    slice(1, 7, 3)
    """
    if partition == "strided":
        return slice(rank, m, size)
    each, over = divmod(m, size)
    start = rank * each + min(rank, over)
    return slice(start, start + each + (rank < over), 1)


def cut_by_speed(m: int, speeds: Sequence[float], *, rank: int, partition: Partition) -> slice | Indices:
    """The part of a global batch of m samples that is `rank`'s, if samples are dealt by speed.

    "contiguous" parts lie one after the other. Of "strided" ones each is spread evenly over the batch, as far as
    another size of every part allows: sample j of the n_i of rank i stands at (2 j + 1) / (2 n_i).

    >>> [cut_by_speed(6, [2.0, 1.0], rank=r, partition="contiguous") for r in range(2)]
    [slice(0, 4, 1), slice(4, 6, 1)]
    >>> [cut_by_speed(6, [2.0, 1.0], rank=r, partition="strided").tolist() for r in range(2)]
    [[0, 2, 3, 5], [1, 4]]
    """
    counts = deal_by_speed(m, speeds)
    if partition == "contiguous":
        start = sum(counts[:rank])
        return slice(start, start + counts[rank], 1)
    places = np.concatenate([(2 * np.arange(n) + 1) / (2 * max(n, 1)) for n in counts])
    owners = np.repeat(np.arange(len(counts)), counts)
    return np.flatnonzero(owners[np.argsort(places, kind="stable")] == rank)


def balance_parts(costs: NDArray[np.float64], size: int, speeds: Sequence[float] | None = None) -> list[Indices]:
    """Divide a batch so that every rank needs about the same time: the longest sample first, to the rank that would
    have it done first.

    This is LPT (Graham, 1969): with equal speeds the heaviest rank carries at most 4/3 - 1/(3 size) of the least
    possible. Ties go to the rank with fewer samples, then to the lower rank, so that every rank computes the same
    answer. With speeds, every rank has at least one sample if there are enough.

    costs: of each sample of the batch, 0 or more. speeds: cost that each rank gets done in a second; None if all are
    the same. Gives each rank's positions in the batch, ascending.

    >>> [part.tolist() for part in balance_parts(np.array([3.0, 1.0, 2.0, 4.0]), 2)]
    [[1, 3], [0, 2]]
    >>> [part.tolist() for part in balance_parts(np.array([3.0, 1.0, 2.0, 4.0]), 2, [4.0, 1.0])]
    [[0, 1, 3], [2]]
    """
    longest_first = np.argsort(-costs, kind="stable")
    parts: list[list[int]] = [[] for _ in range(size)]
    if speeds is not None:
        _deal_costs(costs, longest_first, speeds, parts)
        return [np.array(sorted(part), dtype=np.int64) for part in parts]
    loads = [(0.0, 0, rank) for rank in range(size)]
    for position, cost in zip(longest_first.tolist(), costs[longest_first].tolist(), strict=True):
        load, count, rank = loads[0]
        parts[rank].append(position)
        heapq.heapreplace(loads, (load + cost, count + 1, rank))
    return [np.array(sorted(part), dtype=np.int64) for part in parts]


def _deal_costs(
    costs: NDArray[np.float64], longest_first: Indices, speeds: Sequence[float], parts: list[list[int]]
) -> None:
    """Fill `parts` with positions, by who would be done first; samples without a cost follow the speeds too."""
    rate, loads = np.asarray(speeds, np.float64), np.zeros(len(parts))
    counts = np.zeros(len(parts), np.int64)
    for position in longest_first.tolist():
        done = (loads + costs[position]) / rate
        rank = int(np.lexsort((counts / rate, done))[0])
        parts[rank].append(position)
        loads[rank] += costs[position]
        counts[rank] += 1
    if len(costs) >= len(parts):
        for part in parts:
            if not part:  # it gets the cheapest sample of the rank that has most of them
                part.append(max(parts, key=len).pop())


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
