"""What `un.shard` was asked for, and which settings go together; a refusal gives its reason."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, Literal

import torch

from unisono.data.order import Partition
from unisono.data.sources import Source, same_values


@dataclass(frozen=True)
class Settings:
    """What `shard` was asked for; None where the default or a DataLoader's own choice holds."""

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

    def __post_init__(self) -> None:
        whole_number(self.seed, "seed", least=None)
        if self.batch_size is not None:
            whole_number(self.batch_size, "batch_size", least=1)
        if self.num_workers is not None:
            whole_number(self.num_workers, "num_workers")

    def same_as(self, other: Settings) -> bool:
        """Whether both ask for the same."""
        return all(same_values(getattr(self, f.name), getattr(other, f.name)) for f in fields(self))


def loader_options(asked: Settings) -> dict[str, Any]:
    """The DataLoader options among the settings."""
    options: dict[str, Any] = {}
    if asked.num_workers is not None:
        options["num_workers"] = int(asked.num_workers)
    if asked.pin_memory is not None:
        options["pin_memory"] = asked.pin_memory and torch.cuda.is_available()
    return options


def shuffle_or_not(asked: bool | None, source: Source) -> bool:
    """Whether the order is drawn anew for every epoch."""
    if source.samples is None:
        if asked:
            raise ValueError(
                "un.shard got shuffle=True for an iterable dataset, whose samples come in the order it gives "
                "them. Shuffle inside the dataset, the same on every rank (its set_epoch(n) is called where "
                "it has one), and leave shuffle out."
            )
        return False
    if asked is None:
        return True if source.shuffle is None else bool(source.shuffle)
    if source.sampler is not None or source.batch_sampler is not None:
        raise ValueError(
            f"un.shard got shuffle={asked} with a DataLoader whose own sampler decides the order. "
            "Leave shuffle out, or leave the sampler out of the DataLoader."
        )
    return asked


def check_choices(asked: Settings, source: Source) -> None:
    """Refuses settings that do not go together, with the reason."""
    if asked.partition not in (None, "contiguous", "strided"):
        raise ValueError(f"un.shard got partition={asked.partition!r}. Expected 'contiguous' or 'strided'.")
    if asked.weigh_by not in ("samples", "cost"):
        raise ValueError(f"un.shard got weigh_by={asked.weigh_by!r}. Expected 'samples' or 'cost'.")
    if asked.weigh_by == "cost" and asked.cost is None:
        raise ValueError("un.shard got weigh_by='cost' without cost=. Expected a cost for every sample with it.")
    deciding = [name for name in ("stratify", "cost", "partition") if getattr(asked, name) is not None]
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
    if source.placed and deciding:
        raise ValueError(
            f"un.shard got {deciding[0]}= for a table that is divided among the workers already: where a row lies "
            "decides which rank gets it. Leave it out, or divide the table accordingly before (repartition)."
        )
    if asked.stratify is not None and (source.sampler is not None or source.batch_sampler is not None):
        raise ValueError("un.shard got stratify= with a DataLoader whose own sampler decides the order. Leave one out.")


def whole_number(value: Any, name: str, *, least: int | None = 0) -> int:
    """`value` as an int of at least `least`, or an error that names the argument."""
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise ValueError(f"un.shard got {name}={value!r}. Expected a whole number.")
    number = operator.index(value)
    if least is not None and number < least:
        raise ValueError(f"un.shard got {name}={number}. Expected a whole number, {least} or more.")
    return number
