"""Divided streams: lanes of parts, and windows of samples whose numbers all ranks know.

1. **Lanes.** The parts of the data are dealt to a fixed number of lanes, by seed and epoch, never by the number of
   workers. Each worker reads some lanes whole; no other reads them.
2. **Windows.** In window w every lane gives its next block of samples, shuffled. How many there are, and where the
   next block begins, is known from the parts, or else the ranks tell each other once a window.
3. **Batches.** The samples of a window are dealt to the global batches so that each has every lane's share. With the
   cursors of a window's start, any rank continues any lane there: after a checkpoint, on another number of workers, or
   in place of a lost one.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import count, islice
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from unisono import rng
from unisono.launchers.runtime.frames import warn_user
from unisono.training.data.arrays import arrive, carry
from unisono.training.data.order import balance_parts, count_prefix, draw_permutation
from unisono.training.data.parts import START, Cursor, Mix, Part, Source, settle
from unisono.training.data.settings import ShardSettings, agree_on_files
from unisono.training.data.sources import SampleSource, identity
from unisono.world import PeerLost, World

Blocks = dict[int, tuple[list[Any], Cursor | None]]  # of each lane its samples, and where the next block begins
_BLOCK = 16  # least samples in a lane's block of a mix: so its share is met to within 3 %
_KEPT = 4  # windows whose beginnings are remembered, for an elastic world that goes back a few batches
_PARTS_STREAM = 2**63  # of random numbers: the order of parts; below it those of blocks


class Regrouped(Exception):
    """A rank was lost, or the ranks of a new generation are at different places: read on from `batch` (None: where this
    rank is)."""

    def __init__(self, batch: int | None = None, window: int | None = None) -> None:
        super().__init__(batch, window)
        self.batch, self.window = batch, window


@dataclass(frozen=True)
class Window:
    """The beginning of a window: what is needed to read from there.

    Attributes:
        number: 0, 1, ... in its epoch.
        before: Samples of the epoch in the windows before it, on all ranks.
        cursors: Where each lane begins; None for one that has ended.
    """

    number: int
    before: int
    cursors: list[Cursor | None]


@dataclass(frozen=True)
class Lane:
    """Parts that are read one after the other, and how many samples of them a window takes."""

    source: Source
    parts: list[Part]
    block: int
    branch: int  # of a mix

    @property
    def samples(self) -> int | None:
        """How many there are, if all parts say so."""
        known = [part.samples for part in self.parts if part.samples is not None]
        return sum(known) if len(known) == len(self.parts) else None

    def locate(self, passed: int) -> Cursor | None:
        """The cursor after so many samples, if `samples` is known; None at the end."""
        for i, part in enumerate(self.parts):
            assert part.samples is not None
            if passed < part.samples:
                return [i, passed or None]
            passed -= part.samples
        return None


def open_stream(source: SampleSource, settings: ShardSettings, *, shuffle: bool, world: World) -> Stream | None:
    """The stream of a source in parts; None for other data. Every rank must have the same parts."""
    if source.why_whole and world.size > 1:
        kind = type(source.dataset).__name__
        warn_user(f"un.shard: every rank reads the whole {kind} and keeps its own samples: {source.why_whole}.")
    if source.parts is None:
        return None
    lanes, buffer = int(settings.lanes), int(settings.buffer)
    stream = Stream(source.parts, lanes=lanes, buffer=buffer, shuffle=shuffle, options=source.options)
    agree_on_files(stream.list_names(), world)
    stream.check_lanes(world)
    return stream


class Stream:
    """A source, or a mix of them, divided among the ranks."""

    def __init__(self, source: Source, *, lanes: int, buffer: int, shuffle: bool, options: dict[str, Any]) -> None:
        self.source, self.shuffle = source, shuffle
        # Samples are pinned nowhere: batches are made of them later.
        self.options = {name: value for name, value in options.items() if name != "pin_memory"}
        self.branches = list(source.sources.values()) if isinstance(source, Mix) else [source]
        self.shares = list(source.weights.values()) if isinstance(source, Mix) else [1.0]
        self.parts = [branch.parts() for branch in self.branches]
        for branch, parts in zip(self.branches, self.parts, strict=True):
            branch.note_files()
            if not parts:
                raise ValueError(f"un.shard got an empty {type(branch).__name__}. Expected at least one part.")
        shares = zip(self.parts, self.shares, strict=True)
        self.lanes = [choose_lanes(len(parts), max(1, round(lanes * share))) for parts, share in shares]
        self.buffer = buffer
        self.stops_early = isinstance(source, Mix) and source.stop == "first"
        self._kept: deque[tuple[int, Window]] = deque(maxlen=_KEPT)  # with their epochs
        self._spare: Any = None

    @property
    def is_known(self) -> bool:
        """Whether every part says how many samples it has."""
        return all(part.samples is not None for parts in self.parts for part in parts)

    @property
    def samples(self) -> int | None:
        """How many there are in an epoch, if that is known."""
        if not self.is_known or self.stops_early:
            return None
        return sum(part.samples or 0 for parts in self.parts for part in parts)

    def list_names(self) -> list[str]:
        """The parts with their lengths: the ranks, and a resumed run, must have the same."""
        return [f"{part.name} ({part.weight})" for parts in self.parts for part in parts]

    def digest_names(self) -> list[str]:
        """A short sum of each name, for a checkpoint."""
        return [hashlib.blake2b(name.encode(), digest_size=4).hexdigest() for name in self.list_names()]

    def check_lanes(self, world: World) -> None:
        """Say so if there are fewer lanes than ranks: by mistake, or because there are no more parts."""
        lanes, parts = sum(self.lanes), sum(map(len, self.parts))
        if lanes >= world.size:
            return
        if parts >= world.size:
            raise ValueError(
                f"un.shard got lanes for {lanes} workers at most, and there are {world.size}. Give lanes={world.size} "
                "or more: it is part of the order, so keep it for the whole run."
            )
        warn_user(
            f"un.shard: every rank reads all of the stream and keeps its own samples: it has {parts} part(s) (files, "
            f"row groups, shards) for {world.size} workers. Write it in at least {world.size} to read each sample once."
        )

    def resume(self, name: str, epoch: int, state: Mapping[str, Any]) -> None:
        """Go to the place of a checkpoint; ValueError if the parts are not those that it was saved with."""
        saved = list(state.get("parts", []))
        if saved == self.digest_names():
            self._kept.clear()  # of another seed, perhaps
            self.load(epoch, state["place"])
            return
        pairs = zip(self.list_names(), self.digest_names(), saved, strict=False)
        other = next((part for part, ours, theirs in pairs if ours != theirs), None)
        what = f"{other} was missing then, or had another size" if other else f"there were {len(saved)} parts"
        raise ValueError(
            f"{name} was saved with other files than it has now: {what}. Give the files it was saved with, or start "
            "afresh under another name=."
        )

    def describe(self) -> str:
        """What decides the order, in words."""
        return f"{'+'.join(map(str, self.lanes))} lanes, buffer={self.buffer}"

    def deal(self, *, seed: int, epoch: int, batch_size: int) -> list[Lane]:
        """The lanes of an epoch: the same for every rank and number of ranks."""
        found: list[Lane] = []
        total = float(max(self.buffer, batch_size))
        if len(self.branches) > 1:  # blocks are whole numbers: small ones would miss the shares
            total = max(total, *(_BLOCK * n / share for n, share in zip(self.lanes, self.shares, strict=True)))
        for number, (source, parts, lanes) in enumerate(zip(self.branches, self.parts, self.lanes, strict=True)):
            n = len(parts)
            stream = _PARTS_STREAM + number
            order = draw_permutation(n, seed=seed, epoch=epoch, stream=stream) if self.shuffle else np.arange(n)
            weights = np.array([parts[i].weight for i in order], np.float64)
            block = max(1, round(total * self.shares[number] / lanes))
            dealt = balance_parts(weights, lanes)
            found += [Lane(source, [parts[order[i]] for i in places], block, number) for places in dealt]
        return found

    # Places ----------------------------------------------------------------------------------------------------------

    def find_window(self, epoch: int, passed: int, lanes: int) -> Window:
        """The latest known window that begins at or before so many samples of the epoch."""
        known = [window for kept, window in self._kept if kept == epoch and window.before <= passed]
        return max(known, key=lambda w: w.number, default=Window(0, 0, [START] * lanes))

    def save(self, epoch: int, passed: int) -> list[Any]:
        """The place of so many samples of an epoch, for other ranks and for checkpoints."""
        window = self.find_window(epoch, passed, sum(self.lanes))
        return [window.number, window.before, window.cursors]

    def load(self, epoch: int, place: Sequence[Any]) -> None:
        """Take over a place that another rank, or another run, has saved."""
        number, before, cursors = place
        self._keep(epoch, Window(number, before, list(cursors)))

    def _keep(self, epoch: int, window: Window) -> None:
        known = [item for item in self._kept if item[0] == epoch and item[1].number != window.number]
        self._kept = deque([*known, (epoch, window)], maxlen=_KEPT)

    # Reading ---------------------------------------------------------------------------------------------------------

    def is_whole(self, world: World) -> bool:
        """Whether every rank reads all of it: there are fewer lanes than ranks."""
        return sum(self.lanes) < world.size

    def read(
        self, world: World, *, seed: int, epoch: int, batch: int, batch_size: int
    ) -> Iterator[tuple[list[Any], int]]:
        """This rank's samples of each global batch from `batch` on (all samples of it if `is_whole`), and how many the
        batch has on all ranks: 0 at the end."""
        lanes = self.deal(seed=seed, epoch=epoch, batch_size=batch_size)
        window = self.find_window(epoch, batch * batch_size, len(lanes))
        skip = batch * batch_size - window.before
        mine: list[Any] = []
        held = 0  # samples of the batch under way, on all ranks
        for counts, blocks in self._read_windows(world, lanes, window, seed=seed, place=[epoch, batch]):
            total, at = sum(counts), min(skip, sum(counts))
            skip -= at
            begin = _spread(lanes, counts, at)
            while at < total:
                taken = min(batch_size - held, total - at)
                at, held = at + taken, held + taken
                end = _spread(lanes, counts, at)
                for lane, samples in blocks.items():
                    mine += samples[begin[lane] : end[lane]]
                begin = end
                if held == batch_size:
                    yield mine, held
                    mine, held = [], 0
        if held:
            yield mine, held
        yield [], 0

    def _read_windows(
        self, world: World, lanes: list[Lane], window: Window, *, seed: int, place: list[int]
    ) -> Iterator[tuple[list[int], dict[int, list[Any]]]]:
        """For each window the number of samples in each lane, and the samples of my lanes."""
        epoch = place[0]
        active = [i for i, cursor in enumerate(window.cursors) if cursor is not None]
        mine = {i: window.cursors[i] for i in (active if self.is_whole(world) else active[world.rank :: world.size])}
        blocks = self._read_blocks(lanes, mine, window.number, seed=seed, epoch=epoch)
        while any(cursor is not None for cursor in window.cursors):
            self._keep(epoch, window)
            found, error = _take_blocks(blocks, {i for i in mine if window.cursors[i] is not None})
            counts, cursors = self._count_window(world, lanes, window, found, error, place)
            if self.stops_early and len({lanes[i].branch for i, c in enumerate(cursors) if c}) < len(self.branches):
                cursors = [None] * len(lanes)
            self._spare = next((samples[0] for samples, _ in found.values() if samples), self._spare)
            yield counts, {i: found[i][0] for i in sorted(found)}
            window = Window(window.number + 1, window.before + sum(counts), cursors)
        self._keep(epoch, window)

    def _count_window(
        self, world: World, lanes: list[Lane], window: Window, found: Blocks, error: Any, place: list[int]
    ) -> tuple[list[int], list[Cursor | None]]:
        """How many samples each lane gives in this window, and where the next one begins: from what the parts say, or
        from what each rank has read."""
        ends: dict[int, Any] = {i: [len(samples), cursor] for i, (samples, cursor) in found.items()}
        if self.is_known:
            if error is not None:
                raise error
            counts, cursors = _compute_window(lanes, window)
            for i, (count, _) in ends.items():
                if count != counts[i]:
                    names = ", ".join(part.name for part in lanes[i].parts)
                    raise ValueError(f"{names}: {count} samples were found where the index says {counts[i]}.")
            return counts, cursors
        if self.is_whole(world):
            if error is not None:
                raise error
            every = [ends]
        else:
            try:
                every = _exchange(world, [*place, window.number], ends, error)
            except Regrouped as moved:
                if moved.window is not None:  # all begin where the one begins that knows least
                    self._kept = deque(k for k in self._kept if k[0] != place[0] or k[1].number <= moved.window)
                raise
        counts, cursors = [0] * len(lanes), [None] * len(lanes)
        for i, (count, cursor) in (item for ends in every for item in ends.items()):
            counts[i], cursors[i] = count, cursor
        return counts, cursors

    def _read_blocks(
        self, lanes: list[Lane], cursors: dict[int, Cursor | None], number: int, *, seed: int, epoch: int
    ) -> Iterator[Any]:
        reader = _BlockReader(lanes, cursors, number, seed=seed, epoch=epoch, shuffle=self.shuffle)
        if not self.options.get("num_workers") or not cursors:
            return iter(reader)
        generator = torch.Generator().manual_seed(epoch)
        loader = DataLoader(reader, batch_size=None, collate_fn=identity, generator=generator, **self.options)
        return map(arrive, loader)

    def find_spare(self) -> Any:
        """A sample for a batch of which this rank has none: it is computed, and weighs nothing."""
        for source, parts in zip(self.branches, self.parts, strict=True):
            if self._spare is None:
                self._spare = next((sample for sample, _ in source.read_lane(parts, START)), None)
        return self._spare


class _BlockReader(IterableDataset[Any]):
    """The blocks of some lanes, window by window, as {lane: (samples, next cursor)}; each process of a DataLoader reads
    lanes of its own."""

    def __init__(
        self, lanes: list[Lane], cursors: dict[int, Cursor | None], number: int, *, seed: int, epoch: int, shuffle: bool
    ) -> None:
        self.lanes, self.cursors, self.number = lanes, cursors, number
        self.seed, self.epoch, self.shuffle = seed, epoch, shuffle

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        mine = list(self.cursors) if info is None else list(self.cursors)[info.id :: info.num_workers]
        readers = {i: self.lanes[i].source.read_lane(self.lanes[i].parts, self.cursors[i] or START) for i in mine}
        for window in count(self.number):
            if not readers:
                return
            blocks = {i: self._read_block(i, reader, window, seeds=info is not None) for i, reader in readers.items()}
            readers = {i: reader for i, reader in readers.items() if blocks[i][1] is not None}
            yield blocks if info is None else carry(blocks)

    def _read_block(
        self, lane: int, reader: Iterator[tuple[Any, Cursor]], window: int, *, seeds: bool
    ) -> tuple[list[Any], Cursor | None]:
        stream = (lane << 32) + window
        if seeds:  # else a resumed run would augment samples in another way than one that was never stopped
            rng.seed_all(int(draw_permutation(2**16, seed=self.seed, epoch=self.epoch, stream=stream)[0]))
        read = list(islice(reader, self.lanes[lane].block))
        samples, cursor = [sample for sample, _ in read], settle(read[-1][1]) if read else None
        if self.shuffle:
            order = draw_permutation(len(samples), seed=self.seed, epoch=self.epoch, stream=stream)
            samples = [samples[i] for i in order]
        return samples, cursor if len(read) == self.lanes[lane].block else None


def _take_blocks(blocks: Iterator[Any], wanted: set[int]) -> tuple[Blocks, Exception | None]:
    """The next block of each lane, and the error that came instead, if any."""
    found: Blocks = {}
    try:
        while wanted - set(found):
            found |= next(blocks)
    except Exception as error:
        return found, error
    return found, None


def _exchange(world: World, place: list[int], ends: dict[int, Any], error: Exception | None) -> list[dict[int, Any]]:
    """What each rank has read of a window. An error of one is raised on all."""
    elastic = world.elastic
    mine = [
        place,
        None if error is None else f"{type(error).__name__}: {error}",
        [[i, *end] for i, end in ends.items()],
    ]
    try:
        with nullcontext() if elastic is None else elastic.inside():
            every = world.gather_objects(mine)
    except PeerLost as lost:
        if elastic is None or elastic.healer is None:
            raise
        elastic.broken = lost
        raise Regrouped from None
    if error is not None:
        raise error
    for rank, (_, failure, _) in enumerate(every):
        if failure is not None:
            raise RuntimeError(f"rank {rank} could not read its part of the stream: {failure}")
    places = [list(one[0]) for one in every]
    if any(other != place for other in places):
        if elastic is None or len({other[0] for other in places}) > 1:
            raise RuntimeError(
                f"the ranks read this stream at different places (epoch, batch, window): {places}. Every rank must "
                "draw the same batches."
            )
        # In a pass for validation ranks may be some batches apart; a newcomer may not know the latest window.
        raise Regrouped(min(batch for _, batch, _ in places), min(number for *_, number in places))
    return [{i: [held, cursor] for i, held, cursor in one[2]} for one in every]


def _compute_window(lanes: list[Lane], window: Window) -> tuple[list[int], list[Cursor | None]]:
    """The samples of each lane in a window, and the cursors after it, if the lanes' lengths are known."""
    counts, cursors = [], list[Cursor | None]()
    for lane, cursor in zip(lanes, window.cursors, strict=True):
        if cursor is None:
            counts.append(0)
            cursors.append(None)
            continue
        assert lane.samples is not None
        passed = sum(part.samples or 0 for part in lane.parts[: cursor[0]]) + (cursor[1] or 0)
        counts.append(min(lane.block, lane.samples - passed))
        cursors.append(lane.locate(passed + counts[-1]))
    return counts, cursors


def _spread(lanes: list[Lane], counts: list[int], total: int) -> list[int]:
    """How many samples of each lane are among the first `total` of a window: first each branch's share of a mix, then
    each lane's share of its branch."""
    if lanes[-1].branch == 0:
        return count_prefix(counts, total) if total else [0] * len(counts)
    branches = [[i for i, lane in enumerate(lanes) if lane.branch == b] for b in range(lanes[-1].branch + 1)]
    sums = [sum(counts[i] for i in branch) for branch in branches]
    taken = [0] * len(counts)
    for branch, share in zip(branches, count_prefix(sums, total) if total else [0] * len(sums), strict=True):
        held = count_prefix([counts[i] for i in branch], share) if share else [0] * len(branch)
        for i, n in zip(branch, held, strict=True):
            taken[i] = n
    return taken


def choose_lanes(parts: int, most: int) -> int:
    """How many lanes so many parts are dealt to: as even as possible, since a lane that is longer than others is left
    over at the end.

    >>> [choose_lanes(parts, 48) for parts in (5, 48, 50, 53, 1000)]
    [5, 48, 25, 27, 40]
    """
    if parts <= most:
        return parts
    return max(range(most // 2, most + 1), key=lambda lanes: (round(parts / (lanes * -(-parts // lanes)), 2), lanes))
