"""Checks that all ranks have the same data: lists of files, which hosts may list in another order, and seeds."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from unisono.world import World

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
            f"un.shard got {len(names)} files in a worker that joins a run, other ones than the first workers' "
            f"{every[0]['count']}, or in another order. Give every worker the same sorted list."
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
        "rank the same sorted list; look whether all hosts see the same folder."
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
