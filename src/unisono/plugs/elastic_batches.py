"""The training data of a library's own loop in an elastic run: the library counts each step once, whatever is lost.

A loop of one's own asks for a batch again if a worker was lost in its step. A library's loop counts batches in
variables of its own, so here the step is repeated before the library goes on:

1. The library draws a window of batches, as many as it accumulates, and ends it with the optimizer's step.
2. If a worker was lost, that step has changed nothing. The plug asks for `redraw()`, which forms the world anew and
   gives this rank's part of the same window among the workers left. It trains on that; then the library goes on.
3. A worker that comes later begins with the first batch that the others are about to draw. The library's counters
   become what theirs are.

The global batch is the library's batch size of one worker, times the workers that the run began with.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from unisono.methods.strategy.healing import Healing, follow
from unisono.training.data import Shard
from unisono.training.data.settings import ShardSettings
from unisono.world import World

__all__ = ["ElasticBatches", "deal_loader", "name_shard"]

_LOADER_OPTIONS = (
    *("num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn", "multiprocessing_context"),
    *("prefetch_factor", "persistent_workers"),
)


def name_shard(world: World, name: str) -> str:
    """The name of the data of this `fit`: that of the first one is `name`. A worker that comes later finds by it
    whether the others are in the same one."""
    count = sum(known.partition(" ")[0] == name for known in world.shards)
    return name if not count else f"{name} {count + 1}"


def deal_loader(loader: Any, world: World, *, name: str) -> Shard:
    """A shard of a DataLoader of one worker's batches."""
    batches, dataset = getattr(loader, "batch_sampler", None), getattr(loader, "dataset", loader)
    is_stream = isinstance(dataset, IterableDataset)
    if type(batches) is not BatchSampler or is_stream:
        how = "no length" if is_stream else "no batch size" if batches is None else "its own batch sampler"
        raise ValueError(
            f"unisono.{name}: in an elastic run (-n MIN:MAX) batches are redistributed when workers join or leave; "
            f"those of {type(dataset).__name__} with {how} cannot be. Give a DataLoader of a map-style dataset with a "
            "batch_size, or use a fixed number of workers (-n N)"
        )
    first = world.broadcast_object(world.size)  # of the workers that the run began with, also for those that come later
    options = {option: getattr(loader, option) for option in _LOADER_OPTIONS}
    whole: DataLoader[Any] = DataLoader(
        loader.dataset,
        batch_size=batches.batch_size * first,
        sampler=batches.sampler,
        drop_last=batches.drop_last,
        **options,
    )
    chosen = name_shard(world, name)
    world.shards[chosen] = shard = Shard(whole, ShardSettings(None), world=world, name=chosen)
    return shard


class ElasticBatches:
    """Gives out a shard's batches in windows of `window`, in place of a library's DataLoader.

    Arguments:
        read, load: the library's counters, plain values, as they are before a window; only a worker that has just come
            loads those of another.
        whole_windows: leave out the last window of an epoch where it is short.
    """

    def __init__(
        self,
        shard: Shard,
        *,
        window: int = 1,
        read: Callable[[], Any] = dict,
        load: Callable[[Any], None] = lambda _: None,
        whole_windows: bool = False,
    ) -> None:
        self.shard, self.world = shard, shard.world
        self.dataset = shard.source.dataset
        shard.jumps = True
        self._window, self._whole_windows = window, whole_windows
        self._read, self._load = read, load
        self._noted = read()
        self.is_first = True  # this worker has had no batch yet
        self._reading: Iterator[Any] | None = None  # the pass under way
        self._is_over = False  # it has ended by itself
        self._drawn: tuple[int, int] = (0, 0)  # epoch and first batch of the window in use
        self._kept: list[Any] | None = None  # a window that was drawn and not given out
        self._commits = -1
        follow(self, world=self.world)

    def __len__(self) -> int:
        """Batches of an epoch, the same at any number of workers."""
        count = len(self.shard)
        return count - count % self._window if self._whole_windows else count

    @property
    def epoch(self) -> float:
        """Epochs so far, with the fraction of the one under way."""
        epoch, batch = self._drawn
        return epoch + min(1.0, (batch + self._window) / len(self))

    def move_to(self, epoch: int, batch: int) -> None:
        """Begin there, as a checkpoint says."""
        self.shard.restart(epoch, batch)

    def restart(self) -> None:
        """Forget the batches given out so far, which were not trained on: Keras looks at one to build its model."""
        if self._reading is not None:
            self._reading.close()  # type: ignore[attr-defined]
        self._reading, self._kept, self.is_first = None, None, True
        self.shard.restart()

    # The library's counters -------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The library's counters before the window in use."""
        return {"counters": self._noted}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take those of the others, in a worker that has just come. Else they are only passed on: a repeated step
        changes none, and if another rank had made the step, the library is about to count it."""
        self._noted = state["counters"]
        if self.is_first:
            self._load(state["counters"])

    # Drawing ----------------------------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Any]:
        """The batches of an epoch, or of what is left of it."""
        self._end_pass()
        self._reading, self._is_over = iter(self.shard), False
        while window := self._next_window():
            yield from window

    def _end_pass(self) -> None:
        """Go to the next epoch, wherever the library has left this one: it may not ask for more than the last batch."""
        if self._reading is not None and not self._is_over:
            self._reading.close()  # type: ignore[attr-defined]
            self.shard.set_epoch(self.shard.epoch + 1)
        self._reading, self._kept = None, None

    def _next_window(self) -> list[Any]:
        window, self._kept = self._kept, None
        if window is None:
            self._noted = self._read()
            window = [] if self.shard.batch >= len(self) else self._draw()
        self.is_first = False
        return window

    def _draw(self) -> list[Any]:
        """The batches of the next window; none at the end of the epoch. If the world is formed anew meanwhile, the
        window begins again."""
        assert self._reading is not None
        found: list[Any] = []
        while not found or len(found) < min(self._window, len(self) - self._drawn[1]):
            batch = next(self._reading, None)
            if batch is None:
                if self.is_first:
                    self._healing.find_epoch(self.shard.name)
                self._is_over = True
                return []
            if (self.shard.batch - 1) % self._window == 0:
                found = []
                self._drawn = self.shard.epoch, self.shard.batch - 1
            found.append(batch)
        self._commits = self._healing.commits
        return found

    @property
    def _healing(self) -> Healing:
        healing = Healing.of(self.world)
        assert healing is not None
        return healing

    def redraw(self) -> list[Any] | None:
        """After the optimizer's step: the window once more, if a worker was lost in it; None if the step was made."""
        if self._healing.commits != self._commits or not self._healing.elastic.is_idle:
            return None
        before, schedules = self._drawn, self._healing.read_schedules()
        window = self._draw()
        if self._drawn == before and window:
            return window
        # Another rank had made the step, and this one has its model now. What follows the step here, the program does.
        self._healing.load_schedules(schedules)
        self._kept = window
        return None
