"""The settings of `un.shard`, and which of them go together."""

from __future__ import annotations

import operator
import os
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, Literal

import torch

from unisono.training.data.order import Partition
from unisono.training.data.sources import SampleSource, is_same_values


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

    def __post_init__(self) -> None:
        check_whole_number(self.seed, "seed", least=None)
        if self.batch_size is not None:
            check_whole_number(self.batch_size, "batch_size", least=1)
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
    return (text == "1" if wanted is None else bool(wanted)) and not source.divided


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


def check_whole_number(value: Any, name: str, *, least: int | None = 0) -> int:
    """`value` as an int of at least `least`, or an error that names the argument."""
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise ValueError(f"un.shard got {name}={value!r}. Expected a whole number.")
    number = operator.index(value)
    if least is not None and number < least:
        raise ValueError(f"un.shard got {name}={number}. Expected a whole number, {least} or more.")
    return number
