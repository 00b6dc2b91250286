"""The settings of `un.shard`, which of them go together, and checks that all ranks have the same files and seeds."""

from __future__ import annotations

import hashlib
import operator
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal

import numpy as np
import torch

from unisono.training.data.order import Partition
from unisono.training.data.sources import SampleSource, is_same_data, is_same_values
from unisono.world import World


@dataclass(frozen=True)
class ShardSettings:
    """The arguments of `shard`; None for the default, or for a DataLoader's own choice."""

    batch_size: int | None = None
    shuffle: bool | None = None
    seed: int = 0
    stratify: Any = None
    cost: Any = None
    weigh_by: Literal["samples", "cost"] = "samples"
    partition: Partition | None = None
    drop_last: bool | None = None
    read: Callable[[Any], Any] | None = None
    collate_fn: Callable[[list[Any]], Any] | None = None
    num_workers: int | None = None
    pin_memory: bool | None = None
    balance: bool | None = None
    buffer: int = 1024
    lanes: int = 48

    def __post_init__(self) -> None:
        check_whole_number(self.seed, "seed", least=None)
        if self.batch_size is not None:
            check_whole_number(self.batch_size, "batch_size", least=1)
        check_whole_number(self.buffer, "buffer", least=1)
        check_whole_number(self.lanes, "lanes", least=1)
        if self.num_workers is not None:
            check_whole_number(self.num_workers, "num_workers")
        if self.balance not in (None, True, False):
            raise ValueError(f"un.shard got balance={self.balance!r}. Expected True or False.")

    def matches(self, other: ShardSettings) -> bool:
        """Whether both ask for the same."""
        return all(is_same_values(getattr(self, f.name), getattr(other, f.name)) for f in fields(self))


def select_loader_options(settings: ShardSettings) -> dict[str, Any]:
    """The DataLoader options among the settings."""
    options: dict[str, Any] = {}
    if settings.num_workers is not None:
        options["num_workers"] = int(settings.num_workers)
    if settings.pin_memory is not None:
        options["pin_memory"] = settings.pin_memory and torch.cuda.is_available()
    return options


def decide_shuffle(wanted: bool | None, source: SampleSource) -> bool:
    """Whether the order is drawn anew for every epoch."""
    if source.parts is not None:
        return bool(source.shuffle if wanted is None else wanted)
    if source.samples is None:
        if wanted:
            raise ValueError(
                "un.shard got shuffle=True for an iterable dataset, whose samples come in the order it gives "
                "them. Shuffle inside the dataset, the same on every rank (its set_epoch(n) is called where "
                "it has one), and leave shuffle out."
            )
        return False
    if wanted is None:
        return True if source.shuffle is None else bool(source.shuffle)
    if source.sampler is not None or source.batch_sampler is not None:
        raise ValueError(
            f"un.shard got shuffle={wanted} with a DataLoader whose own sampler decides the order. "
            "Leave shuffle out, or leave the sampler out of the DataLoader."
        )
    return wanted


def decide_balance(wanted: bool | None, source: SampleSource) -> bool:
    """Whether samples are dealt by the ranks' speeds: as `wanted`, or as UNISONO_BALANCE says for all shards; never if
    each rank has samples of its own."""
    text = os.environ.get("UNISONO_BALANCE", "").strip()
    if wanted is None and text not in ("", "0", "1"):
        raise ValueError(f"got UNISONO_BALANCE={text!r} in the environment. Expected 1 or 0.")
    return (text == "1" if wanted is None else bool(wanted)) and not source.divided and source.parts is None


def check_choices(settings: ShardSettings, source: SampleSource) -> None:
    """Refuse settings that do not go together, with the reason."""
    if settings.partition not in (None, "contiguous", "strided"):
        raise ValueError(f"un.shard got partition={settings.partition!r}. Expected 'contiguous' or 'strided'.")
    if settings.weigh_by not in ("samples", "cost"):
        raise ValueError(f"un.shard got weigh_by={settings.weigh_by!r}. Expected 'samples' or 'cost'.")
    if settings.weigh_by == "cost" and settings.cost is None:
        raise ValueError("un.shard got weigh_by='cost' without cost=. Expected a cost for every sample with it.")
    deciding = [name for name in ("stratify", "cost", "partition") if getattr(settings, name) is not None]
    if len(deciding) > 1:
        raise ValueError(
            f"un.shard got {' and '.join(f'{name}=' for name in deciding)}, each of which decides which rank "
            "gets a sample. Expected one of them."
        )
    if source.samples is None and deciding and deciding != ["partition"]:
        raise ValueError(
            f"un.shard got {deciding[0]}= for an iterable dataset, whose samples are not known before they "
            "are read. Expected a map-style dataset, tensors or a list of files with it."
        )
    if source.parts is not None and (deciding or settings.balance):
        given = deciding[0] if deciding else "balance"
        raise ValueError(
            f"un.shard got {given}= for a stream in parts: where a sample lies decides which rank reads it. Leave it "
            "out."
        )
    if source.divided and deciding:
        raise ValueError(
            f"un.shard got {deciding[0]}= for a table that is divided among the workers already: where a row lies "
            "decides which rank gets it. Leave it out, or divide the table accordingly before (repartition)."
        )
    if source.divided and settings.balance:
        raise ValueError(
            "un.shard got balance=True for a table that is divided among the workers already: where a row lies decides "
            "which rank gets it. Leave it out, or divide the table by the workers' speeds before (repartition)."
        )
    if settings.stratify is not None and (source.sampler is not None or source.batch_sampler is not None):
        raise ValueError("un.shard got stratify= with a DataLoader whose own sampler decides the order. Leave one out.")


def count_rows(dataset: Any, world: World) -> list[int]:
    """How many samples lie with each rank."""
    counts = [int(n) for n in world.gather_objects(len(dataset))]
    empty = [rank for rank, n in enumerate(counts) if not n]
    if empty and any(counts):
        raise ValueError(
            f"un.shard got a table of which no row lies with rank {', '.join(map(str, empty))}: the ranks have "
            f"{counts}. Expected rows with each: repartition it, or use fewer workers."
        )
    return counts


def find_known(world: World, data: Any, settings: ShardSettings, name: str | None) -> Any:
    """The shard of this world that was made for the same data and settings, or under the same name; else None."""
    if name is None:
        unnamed = [s for s in world.shards.values() if not s.named]
        return next((s for s in unnamed if s.settings.matches(settings) and is_same_data(s.data, data)), None)
    known = world.shards.get(name)
    if known is not None and not (known.settings.matches(settings) and is_same_data(known.data, data)):
        known.adopt(data, settings)
    return known


def are_parts_uneven(size: int | None, total: int | None, ranks: int, *, drop_last: bool, decided: bool) -> bool:
    """Whether a batch of `total` samples' may be divided so that the ranks' weights differ; `decided`: by something
    else than their number."""
    if ranks == 1:
        return False
    if size is None or total is None or size % ranks or decided:
        return True
    return not drop_last and total % size % ranks != 0


def check_sizes(size: int | None, n: int | None, workers: int, *, kind: str, has_batches: bool) -> None:
    """Refuse a batch size, or a number of samples (None if unknown), that is too small for the workers."""
    if size is None and not has_batches:
        raise ValueError("un.shard got no batch_size. Expected the samples in a global batch, over all workers.")
    if n == 0:
        raise ValueError(f"un.shard got an empty {kind}. Expected at least one sample.")
    if n is not None and n < workers:
        raise ValueError(
            f"un.shard got {n} samples for {workers} workers. Expected at least one each: use at most {n} workers."
        )
    if size is not None and size < workers:
        raise ValueError(
            f"un.shard got batch_size={size} for {workers} workers. batch_size counts the samples of all workers: give "
            f"at least {workers} (to keep {size} on each worker, {size * workers}), or use fewer workers."
        )


def check_whole_number(value: Any, name: str, *, least: int | None = 0) -> int:
    """`value` as an int of at least `least`, or an error that names the argument."""
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise ValueError(f"un.shard got {name}={value!r}. Expected a whole number.")
    number = operator.index(value)
    if least is not None and number < least:
        raise ValueError(f"un.shard got {name}={number}. Expected a whole number, {least} or more.")
    return number


_MARK_BYTES = 8


def agree_on_files(paths: Sequence[Any], world: World) -> None:
    """Raise, on every rank, if the ranks have different files, or have them in different orders.

    Files are compared by their paths below the folder that holds all of a rank's files: that folder may have another
    name on each host.
    """
    if world.size == 1 and world.elastic is None:
        return
    names = _strip_folder([os.fsdecode(path) for path in paths])
    marks = [_digest([name]) for name in names]
    mine = {"count": len(names), "order": _digest(marks), "files": _digest(sorted(marks))}
    every = world.gather_objects(mine)
    if all(other == mine for other in every):
        return
    if all(other == every[0] for other in every):
        raise ValueError(
            f"un.shard got {len(names)} files in a worker that joins a run, and the first workers have "
            f"{every[0]['count']} or another order. Give every worker the same sorted list."
        )
    first = _find_difference(world.gather_objects(b"".join(mark[:_MARK_BYTES] for mark in marks)))
    here = world.gather_objects(names[first] if first < len(names) else "")
    differences = "; ".join(f"rank {r} on {world.hosts[r]} has {x or 'no more'}" for r, x in enumerate(here))
    if len({other["files"] for other in every}) == 1:
        raise ValueError(
            f"un.shard got the same {len(names)} files in different orders: as number {first}, {differences}. Each "
            "sample would be read by several ranks or by none: a folder has no order of its own, so sort them, "
            "un.shard(sorted(files), ...)."
        )
    counts = ", ".join(str(other["count"]) for other in every)
    raise ValueError(
        f"un.shard got different files on the ranks ({counts} of them): as number {first}, {differences}. Give every "
        "rank the same sorted list; check that all hosts see the same folder."
    )


def agree_on_seeds(seeds: Sequence[str], world: World) -> None:
    """Raise, on every rank, if the ranks have different seeds for a stream that shuffles itself."""
    if len(set(world.gather_objects(_digest(seeds)))) > 1:
        raise ValueError(
            "un.shard got a WebDataset that the ranks shuffle with different seeds: samples would be read by several "
            "ranks or by none. Give the same on every rank: WebDataset(..., seed=0) and .shuffle(1000, seed=0)."
        )


def _strip_folder(paths: list[str]) -> list[str]:
    """The paths below the folder that all have in common.

    >>> _strip_folder(["/data/a/x.txt", "/data/b/x.txt"])
    ['a/x.txt', 'b/x.txt']
    """
    parts = [path.split(os.sep) for path in paths]
    low, high = min(parts), max(parts)  # what these two have in common, all have
    most = min(len(low), len(high)) - 1  # not the name of a file
    shared = next((i for i in range(most) if low[i] != high[i]), most)
    return [os.sep.join(part[shared:]) for part in parts]


def _digest(parts: Iterable[str | bytes]) -> bytes:
    summed = hashlib.blake2b(digest_size=16)
    for part in parts:
        summed.update(part if isinstance(part, bytes) else part.encode("utf-8", "surrogateescape"))
    return summed.digest()


def _find_difference(every: Sequence[bytes]) -> int:
    """The first place at which the ranks' marks differ; the end of the shortest list if they do not."""
    lists = [np.frombuffer(marks, f"V{_MARK_BYTES}") for marks in every]
    shortest = min(len(marks) for marks in lists)
    differs = np.zeros(shortest, bool)
    for marks in lists[1:]:
        differs |= marks[:shortest] != lists[0][:shortest]
    return int(differs.argmax()) if differs.any() else shortest
