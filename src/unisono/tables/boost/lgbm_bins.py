"""LightGBM's network, and the bins of its features, the same on every rank.

Bins are found from a sample of all ranks' rows, as one process would take it, each rank those of some features; the
library by itself takes a feature's bins from one rank's rows, which is wrong if the rows are sorted.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from unisono.tables.boost.library import LazyModule
from unisono.tables.boost.rank_rows import RankRows
from unisono.tables.estimators.row_blocks import is_sparse
from unisono.world import World

__all__ = ["Columns", "connect_network", "find_bins", "sample_columns"]

SAMPLE_ROWS = 200_000  # LightGBM's own bin_construct_sample_cnt
SAMPLE_BYTES = 256 << 20
ZERO = 1e-35  # what LightGBM takes for zero, which it leaves out of samples
Columns = list[tuple[npt.NDArray[np.float64], npt.NDArray[np.int32]]]  # a column's values that are not 0, their rows

basic: Any = LazyModule("lightgbm.basic")
lightgbm: Any = LazyModule("lightgbm")


@contextmanager
def connect_network(machines: Sequence[str], port: int, *, wait_minutes: int, params: dict[str, Any]) -> Iterator[None]:
    """Connect this thread to LightGBM's network; ranks are numbered in the order of `machines`."""
    count = ctypes.c_int(0)  # a call that reads the parameters: this thread is then as silent as they say
    verbosity = _format_params({"verbosity": params["verbosity"]})
    _call("LGBM_GetSampleCount", ctypes.c_int32(1), verbosity, ctypes.byref(count))
    _call(
        "LGBM_NetworkInit",
        ctypes.c_char_p(",".join(machines).encode()),
        ctypes.c_int(port),
        ctypes.c_int(wait_minutes),
        ctypes.c_int(len(machines)),
    )
    try:
        yield
    finally:
        _call("LGBM_NetworkFree")


def sample_columns(data: RankRows, wanted: int, world: World) -> tuple[Columns, int, int]:
    """A sample of all ranks' rows by columns, in their order and as large as one process would take it; its number of
    rows, and that of all rows."""
    rows = world.gather_objects(data.rows)
    bytes_a_row = max(1, (data.x.data.nbytes if is_sparse(data.x) else data.x.nbytes) // data.rows)
    bytes_a_row = max(world.gather_objects(bytes_a_row))
    total, wanted = sum(rows), min(wanted, max(10_000, SAMPLE_BYTES // bytes_a_row))
    counts = [each if total <= wanted else max(1, wanted * each // total) for each in rows]
    mine = data.x
    if total > wanted:
        chosen = np.random.default_rng([1, world.rank]).choice(data.rows, counts[world.rank], replace=False)
        mine = data.x[np.sort(chosen)]
    parts = _gather_sparse(mine, world) if is_sparse(mine) else _gather_dense(mine, world)
    return parts, sum(counts), total


def _gather_dense(mine: Any, world: World) -> Columns:
    columns = mine.shape[1]
    lines = np.array(mine.T, order="C")  # a copy: a mapped array may not be written, which torch would warn of
    every = world.all_gather(torch.from_numpy(lines).view(-1)).wait()
    parts = [part.numpy().reshape(columns, -1) for part in every]  # each columns × rows
    found: Columns = []
    for column in range(columns):
        values = np.concatenate([part[column] for part in parts], dtype=np.float64)
        found.append(_drop_zeros(values, np.arange(len(values), dtype=np.int32)))
    return found


def _gather_sparse(mine: Any, world: World) -> Columns:
    import scipy.sparse

    shape = (-1, mine.shape[1])
    arrays = [torch.from_numpy(np.array(line)) for line in (mine.data, mine.indices, mine.indptr)]
    parts = [tuple(line.numpy() for line in part) for part in world.gather_objects(arrays)]
    whole = scipy.sparse.vstack(
        [scipy.sparse.csr_matrix(part, shape=(len(part[2]) - 1, shape[1])) for part in parts], "csr"
    ).tocsc()
    whole.sort_indices()
    borders = zip(whole.indptr[:-1], whole.indptr[1:], strict=True)
    return [_drop_zeros(whole.data[a:b].astype(np.float64), whole.indices[a:b].astype(np.int32)) for a, b in borders]


def _drop_zeros(
    values: npt.NDArray[np.float64], rows: npt.NDArray[np.int32]
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.int32]]:
    kept = ~(np.abs(values) <= ZERO)  # NaN is kept
    return (values, rows) if kept.all() else (values[kept], rows[kept])


def find_bins(
    columns: Columns, sample_rows: int, total_rows: int, params: dict[str, Any], categories: Sequence[int]
) -> Any:
    """A Dataset without rows, for reference: LightGBM finds the bins, in a network each rank those of some features."""
    values = (ctypes.c_void_p * len(columns))(*[line.ctypes.data for line, _ in columns])
    rows = (ctypes.c_void_p * len(columns))(*[line.ctypes.data for _, line in columns])
    lengths = (ctypes.c_int32 * len(columns))(*[len(line) for line, _ in columns])
    made = lightgbm.Dataset(None, params=params)
    handle = ctypes.c_void_p()
    _call(
        "LGBM_DatasetCreateFromSampledColumn",
        values,
        rows,
        ctypes.c_int32(len(columns)),
        lengths,
        ctypes.c_int32(sample_rows),
        ctypes.c_int32(1),
        ctypes.c_int64(total_rows),
        _format_params({**params, "categorical_column": list(categories)} if categories else params),
        ctypes.byref(handle),
    )
    made._handle = handle
    return made


def _format_params(params: dict[str, Any]) -> ctypes.c_char_p:
    return ctypes.c_char_p(basic._param_dict_to_str(params).encode())


def _call(name: str, *arguments: Any) -> None:
    basic._safe_call(getattr(basic._LIB, name)(*arguments))
