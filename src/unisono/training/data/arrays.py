"""Tensors and arrays as a dataset: rows picked by whole batches, with no collating sample by sample."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeGuard

import numpy as np
import torch
from numpy.typing import NDArray

from unisono.training.data.order import Indices

Array = torch.Tensor | NDArray[Any]


class Arrays:
    """A dataset of tensors or arrays, one row a sample.

    whole: read whole batches at once; False: sample by sample, for a `collate_fn` of the user's.
    """

    def __init__(self, data: Any, *, whole: bool = True) -> None:
        self.data, self.whole = data, whole
        lengths = {name: _count_rows(name, array) for name, array in list_arrays(data)}
        if len(set(lengths.values())) > 1:
            found = ", ".join(f"{name} has {length}" for name, length in lengths.items())
            raise ValueError(
                f"un.shard got arrays of different lengths: {found}. Expected the same first "
                "dimension for all, one row a sample. For a list of separate samples, give a Dataset "
                "(__len__ and __getitem__)."
            )
        self.length = next(iter(lengths.values()), 0)

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        return _map_arrays(lambda array: array[index], self.data)

    def __getitems__(self, indices: list[int]) -> Any:
        return self.take(np.asarray(indices, dtype=np.int64)) if self.whole else [self[i] for i in indices]

    def take(self, indices: Indices) -> Any:
        """These rows of every array, in the structure of the data; arrays of numbers become tensors."""
        rows = torch.from_numpy(np.ascontiguousarray(indices))

        def pick(array: Array) -> Any:
            if isinstance(array, torch.Tensor):
                return array.index_select(0, rows.to(array.device))
            picked = np.asarray(array)[indices]
            return torch.from_numpy(picked) if _is_numeric(picked) else picked

        return _map_arrays(pick, self.data)


def is_arrays(data: Any) -> bool:
    """Whether `data` is a tensor or array, or a tuple, list or dict of them."""
    if isinstance(data, Mapping):
        data = list(data.values())
    return _is_array(data) or (isinstance(data, list | tuple) and len(data) > 0 and all(map(_is_array, data)))


def _is_array(x: Any) -> TypeGuard[Array]:
    return isinstance(x, torch.Tensor | np.ndarray)


def list_arrays(data: Any) -> list[tuple[str, Array]]:
    """The arrays in `data`, each with its name in errors."""
    if _is_array(data):
        return [("data", data)]
    pairs = data.items() if isinstance(data, Mapping) else enumerate(data)
    return [(f"[{key!r}]", array) for key, array in pairs]


def _map_arrays(function: Callable[[Array], Any], data: Any) -> Any:
    if _is_array(data):
        return function(data)
    if isinstance(data, Mapping):
        return {key: function(array) for key, array in data.items()}
    if hasattr(data, "_fields"):  # a named tuple
        return type(data)(*(function(array) for array in data))
    return type(data)(function(array) for array in data)


def is_same_array(a: Array, b: Array) -> bool:
    """Whether both hold the same numbers: in the same memory, or in copies of one another."""
    if type(a) is not type(b) or a.shape != b.shape or a.dtype != b.dtype:
        return False
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        if a.device != b.device or a.layout != torch.strided or b.layout != torch.strided:
            return a is b
        shared = (a.data_ptr(), a.stride()) == (b.data_ptr(), b.stride())
        return shared or (_equal(a[:8], b[:8]) and _equal(a, b))  # most others differ at once
    x, y = np.asarray(a), np.asarray(b)
    shared = x.__array_interface__["data"] == y.__array_interface__["data"] and x.strides == y.strides
    return shared or all(np.array_equal(x[n], y[n], equal_nan=x.dtype.kind in "fc") for n in (slice(8), slice(None)))


def _equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    """As `torch.equal`, but NaN equals NaN."""
    inexact = a.is_floating_point() or a.is_complex()
    return torch.equal(a, b) or (inexact and torch.allclose(a, b, rtol=0, atol=0, equal_nan=True))


def _count_rows(name: str, array: Array) -> int:
    if array.ndim == 0:
        raise ValueError(f"un.shard got {name} without dimensions (a single number). Expected one row a sample.")
    return int(array.shape[0])


def _is_numeric(array: NDArray[Any]) -> bool:
    """Whether torch has the dtype: no strings, objects, swapped bytes or long doubles."""
    widest = {"b": 1, "i": 8, "u": 8, "f": 8, "c": 16}
    return array.dtype.isnative and array.dtype.itemsize <= widest.get(array.dtype.kind, 0)


def pin(batch: Any) -> Any:
    """The batch with its tensors in pinned memory, from which a GPU copies directly."""
    return _map_arrays(lambda x: x.pin_memory() if isinstance(x, torch.Tensor) and x.device.type == "cpu" else x, batch)


class CarriedTensor:
    """A tensor on its way between processes, by value: torch would send each as a file of its own, and a process has
    only so many."""

    def __init__(self, x: torch.Tensor) -> None:
        self.data = x.contiguous().reshape(-1).view(torch.uint8).numpy()
        self.dtype, self.shape = x.dtype, tuple(x.shape)


def carry(sample: Any) -> Any:
    """A sample with its tensors as `CarriedTensor`s."""
    if isinstance(sample, torch.Tensor):
        is_plain = sample.device.type == "cpu" and sample.layout == torch.strided and not sample.requires_grad
        return CarriedTensor(sample) if is_plain and type(sample) is torch.Tensor else sample
    return _map_items(carry, sample)


def arrive(sample: Any) -> Any:
    """What was given to `carry`."""
    if isinstance(sample, CarriedTensor):
        return torch.from_numpy(sample.data).view(sample.dtype).reshape(sample.shape)
    return _map_items(arrive, sample)


def _map_items(function: Callable[[Any], Any], sample: Any) -> Any:
    if type(sample) is dict:
        return {key: function(value) for key, value in sample.items()}
    return type(sample)(map(function, sample)) if type(sample) in (list, tuple) else sample
