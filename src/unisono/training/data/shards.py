"""`un.shard`: my part of every global batch; each sample once an epoch, also when the world changes."""

from __future__ import annotations

import copy
import hashlib
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
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
    are_parts_uneven,
    check_choices,
    check_sizes,
    check_whole_number,
    count_rows,
    decide_balance,
    decide_shuffle,
    find_known,
    select_loader_options,
)
from unisono.training.data.sources import FileList, move_to_device, open_source, read_classes, read_costs
from unisono.training.data.streams import Regrouped, open_stream
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
    buffer: int = 1024,
    lanes: int = 48,
    epoch: int = 0,
    name: str | None = None,
    world: World | None = None,
) -> Shard:
    """This worker's part of every global batch of `data`, collated and on the world's device.

    The global batches, `batch_size` samples each, depend on data, settings, seed and epoch, never on the
    number of workers N. Of a batch of m samples rank i gets n_i; sum n_i = m. While it is in use, `world.weight`
    is n_i * N / m, so that the replica's mean (1/N) * sum_i weight_i * g_i of gradients of mean losses is the
    gradient on the joined batch. If m < N, a rank without a sample gets the first one with weight 0.
    Called again with the same data and settings, as in a loop over epochs, it returns the same shard; every
    completed pass moves it to the next epoch.

    Args:
        data: Tensors or arrays (one, or a tuple, list or dict of them); a map-style dataset; a stream in parts, each
            of which one rank reads (`un.records`, `un.mix`, `un.pack`, Hugging Face, WebDataset, MosaicML, litdata, or
            your own with `parts()` and `read_part(part, at)`); another iterable dataset, which every rank reads whole,
            keeping its own samples; a list of files, in one order on every rank (sort them: the ranks compare); a
            worker's part of a Spark DataFrame or RDD or a Ray Dataset, of which each batch takes every rank's share;
            or a DataLoader, with its batch size as the global one, and its sampler.
            torch's random samplers are seeded here; a sampler of yours must give the same order on every rank.
        batch_size: Samples in a global batch, at least one per worker. A DataLoader brings its own.
        shuffle: A new order every epoch. Default: yes; for a DataLoader, its own setting; for an iterable dataset, no.
        seed: Decides the shuffled order, together with the epoch.
        stratify: A class for every sample: each batch, and each rank's part, has the class mix of the whole.
        cost: A cost for every sample (its length, say), or a function that returns it (of a path, for files),
            called once per sample: each batch is divided so that all ranks have about the same cost.
        weigh_by: "cost" weighs ranks by their cost instead of their samples: for losses that are means over
            tokens, with cost the number of tokens.
        partition: "contiguous" (the default) or "strided" parts of a batch, without `stratify` and `cost`.
        drop_last: Leave out a short last batch. Default: no; for a DataLoader, its own setting.
        read: For a list of files, path to sample; without it the path is the sample.
        collate_fn, num_workers, pin_memory: As for a DataLoader; without CUDA nothing is pinned.
        balance: Divide every batch by the ranks' measured speeds, so that a slow one gets fewer samples (`weight` makes
            up for it). Default: no, or as UNISONO_BALANCE in the environment sets it. The same on every rank.
        buffer: Of a stream in parts, about how many samples, on all ranks together, are shuffled with each other.
        lanes: Of a stream in parts, how many of them are read side by side, on all ranks together: the most workers
            that can divide it, and part of the order.
        epoch: Number of the first epoch.
        name: This shard's name in a checkpoint; by default "shard0", "shard1", ... as they are made.
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
        buffer=buffer,
        lanes=lanes,
    )
    here = join() if world is None else world
    known = find_known(here, data, settings, name)
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
        jumps: Whether a worker that joins the others begins in their epoch, instead of passing through those before
            without batches.
    """

    jumps = False

    def __init__(self, data: Any, settings: ShardSettings, *, world: World, name: str, epoch: int = 0) -> None:
        self.named = True  # by the user: `shard` then finds it by its name, not by its data
        self.data, self.settings, self.name, self.world = data, settings, name, world
        self.source = source = open_source(
            data, collate_fn=settings.collate_fn, read=settings.read, options=select_loader_options(settings)
        )
        self.samples, self.seed = source.samples, int(settings.seed)
        self._counts: list[int] = []  # how many samples each rank holds, if each holds others
        if source.divided:
            self._counts = count_rows(self.source.dataset, world)
            self.samples = sum(self._counts)
        if isinstance(source.dataset, FileList):
            agree_on_files(source.dataset.paths, world)
        if source.seeds:
            agree_on_seeds(source.seeds, world)
        self.batch_size = source.batch_size if settings.batch_size is None else int(settings.batch_size)
        self.drop_last = bool(source.drop_last if settings.drop_last is None else settings.drop_last)
        self.shuffle = decide_shuffle(settings.shuffle, source)
        check_choices(settings, source)
        self._stream = open_stream(source, settings, shuffle=self.shuffle, world=world)
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
        self._saved_source: tuple[int, Any] = (0, None)  # batches, and the state of a stateful stream after them
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
        samples = self.samples if self._stream is None else self._stream.samples
        if samples is None:
            raise TypeError(f"{self.name} reads an iterable dataset: its length is not known beforehand.")
        assert self.batch_size is not None
        total = samples if source.sampler is None else len(source.sampler)
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
                    try:
                        given = next(feed, None)
                    except Regrouped as moved:  # in an elastic world: read on from where all ranks are
                        self.batch, feed = self.batch if moved.batch is None else moved.batch, None
                        continue
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
        whole = self._read_stream if self.samples is None else self._read_indexed
        feed = (whole if self._stream is None else self._read_parts)(world)
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
        (begun, state), self._saved_source = self._saved_source, (0, None)
        is_there = begun == self.batch
        stream = self.source.read_stream(epoch=self.epoch, state=state if is_there else None)
        read = 0 if is_there else self.batch * self.batch_size
        next(islice(stream, read, read), None)  # samples of batches that were given out before
        for first in count(self.batch):
            samples = list(islice(stream, self.batch_size))
            if not samples and first == 0:
                raise self._refuse_empty()
            if not samples or (self.drop_last and len(samples) < self.batch_size):
                return
            mine, weight = self._assign(len(samples), world)
            kept = samples[mine] if isinstance(mine, slice) else [samples[i] for i in mine]
            self.dealt.samples += len(kept) if weight else 0
            yield self.source.collate(kept), weight
            if len(samples) < self.batch_size:
                return

    def _refuse_empty(self) -> ValueError:
        return ValueError(f"{self.name} got no samples from {type(self.data).__name__}. Expected at least one.")

    def _read_parts(self, world: World) -> Iterator[tuple[Any, float]]:
        assert self._stream is not None
        assert self.batch_size is not None
        place = {"seed": self.seed, "epoch": self.epoch, "batch": self.batch, "batch_size": self.batch_size}
        for samples, m in self._stream.read(world, **place):
            if not m and not self.batch:
                raise self._refuse_empty()
            if not m or (self.drop_last and m < self.batch_size):
                return
            kept, weight = samples, len(samples) * world.size / m
            if self._stream.is_whole(world):
                mine, weight = self._assign(m, world)
                kept = samples[mine] if isinstance(mine, slice) else [samples[i] for i in mine]
            self.dealt.samples += len(kept) if weight else 0
            yield self.source.collate(kept or [self._stream.find_spare()]), weight

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
    def position(self) -> list[Any]:
        """The epoch, and the batches of it that were given out; of a stream in parts also where these lie."""
        return self.locate(self.batch)

    def locate(self, batch: int) -> list[Any]:
        """The position before a batch of this epoch."""
        if self._stream is None or self.batch_size is None:
            return [self.epoch, batch]
        return [self.epoch, batch, self._stream.save(self.epoch, batch * self.batch_size)]

    def describe_batch(self) -> str:
        """This rank's samples of the batch given out last, in words: their numbers; of a stream, its place."""
        place = f"batch {self.batch - 1} of epoch {self.epoch} of {self.name}"
        if self.samples is None:
            return place
        numbers = next(self._select_samples(self.world, self.batch - 1))[0].tolist()
        more = f" and {len(numbers) - 16} more" if len(numbers) > 16 else ""
        return f"{', '.join(map(str, numbers[:16]))}{more} ({place})"

    def cut(self) -> None:
        """End the pass under way here; what is left of it is not given out."""
        self._is_cut = True

    def move_to(self, epoch: int, batch: int, place: Sequence[Any] | None = None) -> None:
        """Go to another rank's position; a pass through an earlier epoch ends here."""
        if self._stream is not None and place is not None:
            self._stream.load(epoch, place)
        if self.jumps and self._given[1] == (0, 0):
            self.set_epoch(epoch)
        if self.epoch < epoch:
            self._is_cut = True
        elif self.epoch == epoch:
            self.batch = batch
        elif self.is_out:  # the first batches of a pass that the other has not begun
            self.batch = self._first_batch
        self._moves += 1

    def restart(self, epoch: int = 0, batch: int = 0) -> None:
        """Begin here, as if no batch had been given out."""
        self.epoch, self.batch, self._first_batch = epoch, batch, batch
        self._given = (0, (0, 0))
        self._moves += 1

    def rebind(self, world: World) -> None:
        """Share the data among the ranks of another world; a pass that is under way goes on there."""
        if self._counts:
            self._counts = count_rows(self.source.dataset, world)
            self.samples = sum(self._counts)
        if isinstance(self.source.dataset, FileList) and world.elastic is None:  # else: as each worker made it
            agree_on_files(self.source.dataset.paths, world)
        if self._stream is not None:
            self._stream.check_lanes(world)
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
            **self._save_stream(),
        }

    def _save_stream(self) -> dict[str, Any]:
        if self._stream is not None:
            return {"parts": self._stream.digest_names(), "place": self.position[2]}
        save = getattr(self.source.dataset, "state_dict", None)
        reads_ahead = self.samples is not None or self.source.options.get("num_workers") or self.source.why_whole
        return (
            {"source": [self.batch, copy.deepcopy(save())]}
            if callable(save) and self.is_out and not reads_ahead
            else {}
        )

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to a saved position, with its seed; ValueError if data or settings are not the saved ones."""
        expected = {"samples": self.samples, "settings": self.describe_order()}
        for key, ours in expected.items():
            if state[key] != ours:
                raise ValueError(
                    f"{self.name} was saved with {key}: {state[key]}, but is now made with {key}: {ours}. "
                    "Give the data and settings it was saved with, or start again under another name=."
                )
        epoch, batch = check_whole_number(state["epoch"], "epoch"), check_whole_number(state["batch"], "batch")
        if batch and self._counts != (counts := list(state.get("counts", []))):
            raise ValueError(
                f"{self.name} was saved in mid-epoch with {counts} samples on the ranks, which now have "
                f"{self._counts}: which of them were read is not known. Divide the table as it was, or resume from "
                "the end of an epoch."
            )
        if self._stream is not None:
            self._stream.resume(self.name, epoch, state)
        self._saved_source = tuple(state.get("source", (0, None)))
        self.epoch, self.batch, self._first_batch = epoch, batch, batch
        self.seed = int(state["seed"])
        self._moves += 1

    def describe_order(self) -> str:
        """The settings that decide the global batches, in words: what a saved position depends on."""
        own = self.source.batch_sampler if self.source.batch_sampler is not None else self.source.sampler
        order = type(own).__name__ if own is not None else "shuffled" if self.shuffle else "in order"
        text = f"batch_size={self.batch_size}, {order}, drop_last={self.drop_last}"
        if self._stream is not None:
            return f"{text}, {self._stream.describe()}"
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
        self.data, self.settings, self.source, self._stream = data, settings, other.source, other._stream
        self._classes, self._costs, self._partition = other._classes, other._costs, other._partition
        self.balances = other.balances
        self._moves += 1

    def _check_sizes(self, world: World) -> None:
        has_batches = self.source.batch_sampler is not None
        check_sizes(self.batch_size, self.samples, world.size, kind=type(self.data).__name__, has_batches=has_batches)
        if self.samples is not None and not has_batches and not len(self):
            raise ValueError(
                f"un.shard got drop_last=True with {self.samples} samples and batch_size={self.batch_size}, which "
                f"leaves no batch. Expected batch_size <= {self.samples}, or drop_last=False."
            )
        sampler = self.source.sampler
        total = self.samples if sampler is None or world.size == 1 else len(sampler)
        decided = bool(self.balances or self._counts or self.settings.cost is not None)
        uneven = are_parts_uneven(self.batch_size, total, world.size, drop_last=self.drop_last, decided=decided)
        world.batch_weights.is_needed |= uneven


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
