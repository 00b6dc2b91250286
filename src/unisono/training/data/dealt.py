"""What a rank was given of its data: samples, their classes if known, and means of numbers that belong to batches."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from unisono.training.data.arrays import Arrays, list_arrays
from unisono.training.data.order import Indices
from unisono.world import World

_MOST_CLASSES, _MOST_SAMPLES = 1000, 5_000_000  # classes are not counted beyond either


class Dealt:
    """Counts of one shard on this rank.

    >>> dealt = Dealt(Arrays((torch.zeros(4, 2), torch.tensor([0, 1, 1, 5]))))
    >>> dealt.count(np.array([1, 2, 3]), with_classes=True)
    >>> dealt.samples, dealt.by_class()
    (3, {'1': 2, '5': 1})
    """

    def __init__(self, dataset: Any) -> None:
        self.samples = 0
        self._dataset: Any = dataset  # None: its labels have been looked for
        self._names: list[Any] = []
        self._codes: NDArray[np.int64] | None = None
        self._counts = np.zeros(0, dtype=np.int64)

    def count(self, indices: Indices, *, with_classes: bool = False) -> None:
        """Count samples that were given out, and on demand their classes."""
        self.samples += len(indices)
        if not with_classes:
            return
        if self._dataset is not None:
            self._names, self._codes = _find_labels(self._dataset)
            self._dataset, self._counts = None, np.zeros(len(self._names), dtype=np.int64)
        if self._codes is not None:
            self._counts += np.bincount(self._codes[indices], minlength=len(self._counts))

    def by_class(self) -> dict[str, int]:
        """How many samples of each class; empty if classes are not known."""
        return {str(name): int(n) for name, n in zip(self._names, self._counts, strict=True) if n}


def _find_labels(dataset: Any) -> tuple[list[Any], NDArray[np.int64] | None]:
    """The classes, and each sample's class by number; None unless the dataset's labels are whole numbers."""
    labels = getattr(dataset, "targets", None)
    if isinstance(dataset, torch.utils.data.TensorDataset):
        labels = dataset.tensors[-1]
    elif isinstance(dataset, Arrays):
        labels = list_arrays(dataset.data)[-1][1] if not isinstance(dataset.data, torch.Tensor | np.ndarray) else None
    if isinstance(labels, torch.Tensor):
        labels = labels.detach().cpu().numpy() if labels.dtype != torch.bfloat16 else None
    elif isinstance(labels, list) and labels and isinstance(labels[0], int):
        labels = np.asarray(labels)
    if not isinstance(labels, np.ndarray) or labels.ndim != 1 or labels.dtype.kind not in "biu" or not len(labels):
        return [], None
    if len(labels) > _MOST_SAMPLES:
        return [], None
    names, codes = np.unique(labels, return_inverse=True)
    return (list(names), codes.astype(np.int64)) if len(names) <= _MOST_CLASSES else ([], None)


class Means:
    """This rank's sums of one shard since `take` was last called: each number times the samples of its batch.

    In elastic runs a batch may be given out twice: the later numbers then replace the earlier ones.
    """

    def __init__(self) -> None:
        self._sums: dict[tuple[int, ...], Tensor] = {}  # by epoch and batch in elastic runs, else under ()

    def add(self, values: tuple[Any, ...], samples: int, place: tuple[int, ...]) -> None:
        """Add the numbers of a batch of so many samples. Numbers on a GPU stay there."""
        numbers = [torch.as_tensor(value).detach().to(torch.float64).reshape(()) for value in values]
        before = self._sums.pop(place, None)
        if samples:  # else the batch is a stand-in, whose samples are other ranks'
            sums = torch.stack([*numbers, numbers[0].new_tensor(1.0)]) * samples
            self._sums[place] = sums if place or before is None else before + sums
        elif not place and before is not None:
            self._sums[place] = before

    def take(self, world: World) -> float | tuple[float, ...]:
        """The means over all samples of all ranks; every rank calls it. NaN if nothing was added."""
        mine = torch.stack(list(self._sums.values())).sum(0).tolist() if self._sums else []
        self._sums = {}
        every = [sums for sums in world.gather_objects(mine) if sums]  # a rank that has come may have had no batch
        if not every:
            return math.nan
        *totals, samples = (sum(column) for column in zip(*every, strict=True))
        return totals[0] / samples if len(totals) == 1 else tuple(total / samples for total in totals)
