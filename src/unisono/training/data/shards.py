"""`un.shard`: my part of every global batch; each sample once an epoch, also when the world changes."""

from __future__ import annotations

import hashlib
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from itertools import count, islice
from typing import Any, Literal

from unisono.training.data.dealt import Dealt, Means
from unisono.training.data.order import (
    Indices,
    Partition,
    balance_parts,
    cut_by_speed,
    order_epoch,
    select_batches,
    slice_part,
)
from unisono.training.data.settings import (
    ShardSettings,
    agree_on_files,
    agree_on_seeds,
    check_choices,
    check_whole_number,
    decide_balance,
    decide_shuffle,
    select_loader_options,
)
from unisono.training.data.sources import FileList, is_same_data, move_to_device, open_source, read_classes, read_costs
from unisono.world import World, join

_LOOKALIKES = 4  # so many unnamed shards of one make look like a dataset that is built anew for every epoch


def shard(
    data: Any,
    batch_size: int | None = None,
    *,
    shuffle: bool | None = None,
    seed: int = 0,
    stratify: Any = None,
    cost: Any = None,
    weigh_by: Literal["samples", "cost"] = "samples",
    partition: Partition | None = None,
    drop_last: bool | None = None,
    read: Callable[[Any], Any] | None = None,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    num_workers: int | None = None,
    pin_memory: bool | None = None,
    balance: bool | None = None,
    epoch: int = 0,
    name: str | None = None,
    world: World | None = None,
) -> Shard:
    """My part of every global batch of `data`, collated and on the world's device.

    The global batches, `batch_size` samples each, depend on data, settings, seed and epoch, never on the
    number of workers N. Of a batch of m samples rank i gets n_i; sum n_i = m. While it is in use, `world.weight`
    is n_i * N / m, so that the replica's mean (1/N) * sum_i weight_i * g_i of gradients of mean losses is the
    gradient on the joined batch. If m < N, a rank without a sample gets the first one with weight 0.
    Called again with the same data and settings, as in a loop over epochs, it returns the same shard; every
    completed pass moves it to the next epoch.

    Args:
        data: Tensors or arrays (one, or a tuple, list or dict of them); a map-style dataset; an iterable one,
            which every rank reads whole, keeping its own samples; a list of files, in one order on every rank (sort
            them: the ranks compare); a worker's part of a Spark DataFrame or RDD or a Ray Dataset, of which each
            batch takes every rank's share; or a DataLoader, with its batch size as the global one, and its sampler.
            Random samplers of torch's are seeded here; one of your own must give the same on every rank.
        batch_size: Samples in a global batch, at least one a worker. A DataLoader brings its own.
        shuffle: Another order every epoch. By default yes; as a DataLoader has it; no for an iterable dataset.
        seed: Decides the shuffled order, together with the epoch.
        stratify: A class for every sample: each batch, and each rank's part, has the class mix of the whole.
        cost: A cost for every sample (its length, say), or a function that tells it (of a path, for files),
            called once a sample: each batch is dealt so that all ranks have about the same cost.
        weigh_by: "cost" weighs ranks by their cost instead of their samples: for losses that are means over
            tokens, with cost the number of tokens.
        partition: "contiguous" (the default) or "strided" parts of a batch, without `stratify` and `cost`.
        drop_last: Leave out a short last batch. By default no; as a DataLoader has it.
        read: For a list of files, path to sample; without it the path is the sample.
        collate_fn, num_workers, pin_memory: As for a DataLoader; without CUDA nothing is pinned.
        balance: Deal every batch by the ranks' measured speeds, so that a slow one gets fewer samples (`weight` makes
            up for it). By default no, or what UNISONO_BALANCE=1 in the environment says. The same on every rank.
        epoch: Number of the first epoch.
        name: What a checkpoint calls this shard; by default "shard0", "shard1", ... as they are made.
        world: By default this process's, `un.join()`.

    Returns:
        The shard: iterable, with `len()`, `epoch`, `set_epoch()`, `state_dict()`, `load_state_dict()`.

    >>> import torch
    >>> for x in shard(torch.arange(5), batch_size=2, shuffle=False):
    ...     print(x.tolist())
    [0, 1]
    [2, 3]
    [4]
    """
    settings = ShardSettings(
        batch_size=batch_size,
        shuffle=shuffle,
        seed=seed,
        stratify=stratify,
        cost=cost,
        weigh_by=weigh_by,
        partition=partition,
        drop_last=drop_last,
        read=read,
        collate_fn=collate_fn,
        num_workers=num_workers,
        pin_memory=pin_memory,
        balance=balance,
    )
    here = join() if world is None else world
    known = _find_known(here, data, settings, name)
    return known if known is not None else _make_shard(here, data, settings, name, epoch)


class Shard:
    """This rank's part of a dataset; made by `shard`.

    Attributes:
        name: What a checkpoint calls it.
        world: The world whose ranks share the data.
        samples: Number of samples in the whole; None for an iterable dataset.
        batch_size: Samples in a global batch; None if a batch sampler decides.
        epoch: The epoch that is being read, or comes next.
        batch: Global batches of this epoch that were given out.
        dealt: What this rank was given so far.
        balances: Whether samples are dealt by the ranks' speeds (`world.speeds`).
        is_out: Whether a batch has been given out, and the pass has not ended.
    """

    def __init__(self, data: Any, settings: ShardSettings, *, world: World, name: str, epoch: int = 0) -> None:
        self.named = True  # by the user: `shard` then finds it by its name, not by its data
        self.data, self.settings, self.name, self.world = data, settings, name, world
        self.source = source = open_source(
            data, collate_fn=settings.collate_fn, read=settings.read, options=select_loader_options(settings)
        )
        self.samples, self.seed = source.samples, int(settings.seed)
        self._counts: list[int] = []  # how many samples each rank holds, if each holds others
        if source.divided:
            self._count_samples(world)
        if isinstance(source.dataset, FileList):
            agree_on_files(source.dataset.paths, world)
        if source.seeds:
            agree_on_seeds(source.seeds, world)
        self.batch_size = source.batch_size if settings.batch_size is None else int(settings.batch_size)
        self.drop_last = bool(source.drop_last if settings.drop_last is None else settings.drop_last)
        self.shuffle = decide_shuffle(settings.shuffle, source)
        check_choices(settings, source)
        self.balances = decide_balance(settings.balance, source)
        self._check_sizes(world)
        has_classes, has_costs = settings.stratify is not None, settings.cost is not None
        self._classes = read_classes(settings.stratify, source.samples or 0) if has_classes else None
        self._costs = read_costs(settings.cost, source) if has_costs else None
        self._partition: Partition = "strided" if has_classes else settings.partition or "contiguous"
        self.batch = self._first_batch = 0
        self.epoch = check_whole_number(epoch, "epoch")
        self.dealt = Dealt(source.dataset)
        self._means = Means()
        self._given = (0, (0, 0))  # of the batch given out last: this rank's samples of it, and its epoch and number
        self.is_out = False
        self._reader = 0  # number of the newest iterator
        self._moves = 0  # how often position or world were changed
        self._is_cut = False  # whether the pass under way ends before its next batch

    def __repr__(self) -> str:
        whole = "a stream" if self.samples is None else f"{self.samples} samples"
        where = f"epoch {self.epoch}, batch {self.batch}"
        return f"<Shard {self.name!r}: {whole}, {self.describe_order()}, {where}>"

    def __len__(self) -> int:
        """Batches in an epoch; the same on every rank."""
        source = self.source
        if source.batch_sampler is not None:
            return len(source.batch_sampler)
        if self.samples is None:
            raise TypeError(f"{self.name} reads an iterable dataset: its length is not known beforehand.")
        assert self.batch_size is not None
        total = self.samples if source.sampler is None else len(source.sampler)
        return total // self.batch_size if self.drop_last else -(-total // self.batch_size)

    # Iterating ------------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Any]:
        """This rank's part of each global batch of the epoch, or of what a resumed epoch has left."""
        return self._iterate(None)

    def _iterate(self, limit: int | None) -> Iterator[Any]:
        """One pass, up to so many batches from the first of epoch 0 on."""
        self._reader = me = self._reader + 1
        self.batch = self._first_batch
        feed: Iterator[tuple[Any, float]] | None = None
        moves = -1
        try:
            while True:
                world = self.world
                if world.elastic is not None:
                    world.elastic.before_batch(self)
                if self._is_cut:
                    break
                if limit is not None and self.epoch * len(self) + self.batch >= limit:
                    return
                with world.ledger.span("data"):
                    if feed is None or moves != self._moves:  # moved: read on from the new place
                        feed, moves = self._read_batches(world), self._moves
                    before = self.dealt.samples
                    given = next(feed, None)
                if given is None:
                    break
                self.is_out = True
                self.batch += 1
                self._given = (self.dealt.samples - before, (self.epoch, self.batch))
                world.batch_weights.draw(self.name, *given, about=self._given)
                if world.elastic is not None:
                    world.elastic.after_batch(self)
                yield given[0]
                if me != self._reader:
                    raise RuntimeError(
                        f"{self.name} is being read by a newer iterator, and a shard has one position only. "
                        "For two independent passes, give two shards different names (name=)."
                    )
            self._is_cut = False
            self.set_epoch(self.epoch + 1)
        finally:
            if me == self._reader:
                self.is_out = False
                self.world.batch_weights.end_pass(self.name)

    def steps(self, count: int) -> Iterator[Any]:
        """So many batches from the first of epoch 0 on, epoch after epoch: `for x, y in shard.steps(1000): ...`

        It counts places in the data, not what it has given out: after a checkpoint was loaded it gives what is left, a
        batch that is given out once more (in an elastic run) counts once, and all ranks end alike.
        """
        if self.samples is None:
            raise TypeError(f"{self.name} reads an iterable dataset: its length is not known beforehand.")
        each, at = len(self), self._first_batch
        while self.epoch * each + at < count:
            yield from self._iterate(count)
            at = self.batch

    def add(self, *values: Any) -> None:
        """Add numbers of the batch in use (its loss, a share of hits) to the means that `mean()` gives.

        A number is that of this rank's part of the batch, and counts as often as that has samples.
        """
        weights = self.world.batch_weights
        if not values or not (self.is_out or weights.about(self.name)):
            raise ValueError(f"{self.name}.add takes numbers of the batch that is out: call it inside the loop")
        weights.is_needed = True  # from here on batches that are drawn ahead are followed
        samples, place = weights.about(self.name) or self._given
        # In an elastic run a batch may be given out once more: then the later numbers count.
        self._means.add(values, samples, () if self.world.elastic is None else place)

    def mean(self) -> float | tuple[float, ...]:
        """The means, over the samples of all ranks, of what was added since they were last asked for.

        Every rank calls it, after the loop. One number if one was added at a time. It is the same on all ranks, also
        on one that has come for a lost one and had no batch of this pass; what a lost one had added is left out.

        >>> import torch
        >>> batches = shard(torch.arange(5.0), batch_size=2, shuffle=False)
        >>> for x in batches:
        ...     batches.add(x.mean())
        >>> batches.mean()
        2.0
        """
        return self._means.take(self.world)

    def _read_batches(self, world: World) -> Iterator[tuple[Any, float]]:
        feed = self._read_stream(world) if self.samples is None else self._read_indexed(world)
        if world.device.type == "cpu":
            return feed
        return ((move_to_device(batch, world.device), weight) for batch, weight in feed)

    def _read_indexed(self, world: World) -> Iterator[tuple[Any, float]]:
        ahead: deque[tuple[Indices, float]] = deque()  # the batches that are being read ahead, and their weights
        first = self.batch

        def parts() -> Iterator[tuple[Indices, int]]:
            for number, (mine, weight) in enumerate(self._select_samples(world, first), first):
                ahead.append((mine, weight))
                yield mine, self._derive_seed(number, world)

        for batch in self.source.read(parts(), seed=self._derive_seed(first, world)):
            mine, weight = ahead.popleft()
            if weight:  # else they are other ranks'
                self.dealt.count(mine, with_classes=world.ledger.listener is not None)
            yield batch, weight

    def _select_samples(self, world: World, first: int) -> Iterator[tuple[Indices, float]]:
        """My samples of each global batch from `first` on, and their weight."""
        if not self._counts:
            for indices in self._iterate_global_batches(first):
                mine, weight = self._assign(len(indices), world, indices)
                yield indices[mine], weight
            return
        assert self.batch_size is not None
        yield from select_batches(
            self._counts,
            rank=world.rank,
            batch_size=self.batch_size,
            first=first,
            stop=len(self),
            seed=self.seed,
            epoch=self.epoch,
            shuffle=self.shuffle,
        )

    def _derive_seed(self, batch: int, world: World) -> int:
        place = f"{self.seed} {self.epoch} {batch} {world.rank}".encode()
        return int.from_bytes(hashlib.blake2b(place, digest_size=7).digest(), "big")

    def _read_stream(self, world: World) -> Iterator[tuple[Any, float]]:
        assert self.batch_size is not None
        stream = self.source.read_stream(epoch=self.epoch)
        read = self.batch * self.batch_size
        next(islice(stream, read, read), None)  # samples of batches that were given out before
        for first in count(self.batch):
            samples = list(islice(stream, self.batch_size))
            if not samples and first == 0:
                raise ValueError(f"{self.name} got no samples from {type(self.data).__name__}. Expected at least one.")
            if not samples or (self.drop_last and len(samples) < self.batch_size):
                return
            mine, weight = self._assign(len(samples), world)
            kept = samples[mine] if isinstance(mine, slice) else [samples[i] for i in mine]
            self.dealt.samples += len(kept) if weight else 0
            yield self.source.collate(kept), weight
            if len(samples) < self.batch_size:
                return

    def _iterate_global_batches(self, start: int) -> Iterator[Indices]:
        source, size = self.source, self.batch_size
        if source.sampler is not None or source.batch_sampler is not None:
            batches = source.draw_batches(size or 0, seed=self.seed, epoch=self.epoch)
            yield from batches[start : len(batches) if size is None else len(self)]
            return
        assert size is not None
        assert source.samples is not None
        order = order_epoch(
            source.samples,
            batch_size=size,
            seed=self.seed,
            epoch=self.epoch,
            shuffle=self.shuffle,
            classes=self._classes,
        )
        for i in range(start, len(self)):
            yield order[i * size : (i + 1) * size]

    def _assign(self, m: int, world: World, indices: Indices | None = None) -> tuple[slice | Indices, float]:
        """My positions in a global batch of m samples, and their weight."""
        speeds = world.speeds if self.balances else None  # those of now: they change between two batches
        mine: slice | Indices
        if self._costs is None or indices is None:
            if speeds is None:
                mine = slice_part(m, rank=world.rank, size=world.size, partition=self._partition)
            else:
                mine = cut_by_speed(m, speeds, rank=world.rank, partition=self._partition)
            held = len(range(m)[mine]) if isinstance(mine, slice) else len(mine)
            return (mine, held * world.size / m) if held else (slice(0, 1), 0.0)
        costs = self._costs[indices]
        mine = balance_parts(costs, world.size, speeds)[world.rank]
        if not len(mine):
            return slice(0, 1), 0.0
        if self.settings.weigh_by == "cost" and costs.any():
            return mine, float(costs[mine].sum() * world.size / costs.sum())
        return mine, len(mine) * world.size / m

    def redistribute(self) -> None:
        """Called after `world.speeds` changed: read again what worker processes have read ahead.

        What has not been read yet is dealt by the new speeds in any case.
        """
        if self.samples is not None and self.source.options.get("num_workers"):
            self._moves += 1

    # Position -------------------------------------------------------------------------------------------

    def set_epoch(self, epoch: int) -> None:
        """Go to the beginning of `epoch`; the epoch that is being read or resumed keeps its place."""
        if check_whole_number(epoch, "epoch") != self.epoch:
            self.epoch, self.batch, self._first_batch = epoch, 0, 0
            self._moves += 1

    @property
    def position(self) -> list[int]:
        """The epoch, and the batches of it that were given out."""
        return [self.epoch, self.batch]

    def cut(self) -> None:
        """End the pass under way here; what is left of it is not given out."""
        self._is_cut = True

    def move_to(self, epoch: int, batch: int) -> None:
        """Go to another rank's position; a pass through an earlier epoch ends here."""
        if self.epoch < epoch:
            self._is_cut = True
        elif self.epoch == epoch:
            self.batch = batch
        elif self.is_out:  # the first batches of a pass that the other has not begun
            self.batch = self._first_batch
        self._moves += 1

    def rebind(self, world: World) -> None:
        """Share the data among the ranks of another world; a pass that is under way goes on there."""
        if self._counts:
            self._count_samples(world)
        if isinstance(self.source.dataset, FileList) and world.elastic is None:  # else: as each worker made it
            agree_on_files(self.source.dataset.paths, world)
        self._check_sizes(world)
        self.world.batch_weights.forget(self.name)
        self.world.shards.pop(self.name, None)
        self.world, world.shards[self.name] = world, self
        self._moves += 1

    def state_dict(self) -> dict[str, Any]:
        """The position: the same for every rank and world size. A batch that is out counts as read."""
        return {
            "epoch": self.epoch,
            "batch": self.batch,
            "seed": self.seed,
            "samples": self.samples,
            "settings": self.describe_order(),
            **({"counts": self._counts} if self._counts else {}),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to a saved position, with its seed; ValueError if data or settings are not the saved ones."""
        expected = {"samples": self.samples, "settings": self.describe_order()}
        for key, ours in expected.items():
            if state[key] != ours:
                raise ValueError(
                    f"{self.name} was saved with {key}: {state[key]}, but is now made with {key}: {ours}. "
                    "Give the data and settings it was saved with, or start anew under another name=."
                )
        epoch, batch = check_whole_number(state["epoch"], "epoch"), check_whole_number(state["batch"], "batch")
        if batch and self._counts != (counts := list(state.get("counts", []))):
            raise ValueError(
                f"{self.name} was saved in mid-epoch with {counts} samples on the ranks, which now have "
                f"{self._counts}: which of them were read is not known. Divide the table as it was, or resume from "
                "the end of an epoch."
            )
        self.epoch, self.batch, self._first_batch = epoch, batch, batch
        self.seed = int(state["seed"])
        self._moves += 1

    def describe_order(self) -> str:
        """The settings that decide the global batches, in words: what a saved position depends on."""
        own = self.source.batch_sampler if self.source.batch_sampler is not None else self.source.sampler
        order = type(own).__name__ if own is not None else "shuffled" if self.shuffle else "in order"
        text = f"batch_size={self.batch_size}, {order}, drop_last={self.drop_last}"
        if self._classes is None:
            return text
        return f"{text}, stratify={hashlib.blake2b(self._classes.tobytes(), digest_size=6).hexdigest()}"

    def adopt(self, data: Any, settings: ShardSettings) -> None:
        """Read another object with the same number of samples and the same settings from now on."""
        other = Shard(data, settings, world=self.world, name=self.name)
        if (other.samples, other.describe_order()) != (self.samples, self.describe_order()):
            raise ValueError(
                f"un.shard got name={self.name!r} for other data or settings than before: {other!r}, where "
                f"the name stands for {self!r}. Give each its own name, or leave names out."
            )
        self.data, self.settings, self.source = data, settings, other.source
        self._classes, self._costs, self._partition = other._classes, other._costs, other._partition
        self.balances = other.balances
        self._moves += 1

    def _count_samples(self, world: World) -> None:
        """Ask every rank how many samples lie with it."""
        self._counts = [int(n) for n in world.gather_objects(len(self.source.dataset))]
        self.samples = sum(self._counts)
        empty = [rank for rank, n in enumerate(self._counts) if not n]
        if empty and self.samples:
            raise ValueError(
                f"un.shard got a table of which no row lies with rank {', '.join(map(str, empty))}: the ranks have "
                f"{self._counts}. Expected rows with each: divide it anew (repartition), or use fewer workers."
            )

    def _has_uneven_parts(self, world: World) -> bool:
        """Whether a batch may be divided so that the ranks' weights differ."""
        size, n = self.batch_size, self.samples
        if world.size == 1:
            return False
        decided = self.balances or self._counts or self.settings.cost is not None
        if size is None or n is None or size % world.size or decided:
            return True
        total = n if self.source.sampler is None else len(self.source.sampler)
        return not self.drop_last and total % size % world.size != 0

    def _check_sizes(self, world: World) -> None:
        size, n = self.batch_size, self.samples
        if size is None and self.source.batch_sampler is None:
            raise ValueError("un.shard got no batch_size. Expected the samples in a global batch, over all workers.")
        if n == 0:
            raise ValueError(f"un.shard got an empty {type(self.data).__name__}. Expected at least one sample.")
        if n is not None and n < world.size:
            raise ValueError(
                f"un.shard got {n} samples for {world.size} workers. Expected at least one each: use at most "
                f"{n} workers."
            )
        if size is not None and size < world.size:
            raise ValueError(
                f"un.shard got batch_size={size} for {world.size} workers. batch_size counts the samples of "
                f"all workers: give at least {world.size} (to keep {size} on each worker, "
                f"{size * world.size}), or use fewer workers."
            )
        if n is not None and self.source.batch_sampler is None and not len(self):
            raise ValueError(
                f"un.shard got drop_last=True with {n} samples and batch_size={size}, which leaves no batch. "
                f"Expected batch_size <= {n}, or drop_last=False."
            )
        world.batch_weights.is_needed |= self._has_uneven_parts(world)


def _find_known(world: World, data: Any, settings: ShardSettings, name: str | None) -> Shard | None:
    """The shard of this world that was made for the same data and settings, or under the same name."""
    if name is None:
        unnamed: list[Shard] = [s for s in world.shards.values() if not s.named]
        return next((s for s in unnamed if s.settings.matches(settings) and is_same_data(s.data, data)), None)
    known: Shard | None = world.shards.get(name)
    if known is not None and not (known.settings.matches(settings) and is_same_data(known.data, data)):
        known.adopt(data, settings)
    return known


def _make_shard(world: World, data: Any, settings: ShardSettings, name: str | None, epoch: int) -> Shard:
    chosen = name or next(free for i in count() if (free := f"shard{i}") not in world.shards)
    made = Shard(data, settings, world=world, name=chosen, epoch=epoch)
    twins = [s for s in world.shards.values() if type(s.data) is type(data) and s.samples == made.samples]
    if name is None and sum(s.describe_order() == made.describe_order() for s in twins) >= _LOOKALIKES:
        warnings.warn(
            f"un.shard made {chosen} for yet another {type(data).__name__} of the same size and settings, "
            "and each of them starts at its first epoch. Make the dataset once, before the loop over epochs, "
            "or give a name= that stands for all of them.",
            stacklevel=3,
        )
    saved = world.pending_shards.pop(chosen, None)
    if saved is not None:
        made.load_state_dict(saved)
    made.named = name is not None
    world.shards[chosen] = made
    return made
