"""LightGBM: histograms summed by its own network (tree_learner="data"), on ports that the ranks agree on beforehand.
Ke et al., 2017.

Bins are found from a sample of all ranks' rows, as one process would take it, each rank those of some features; the
library by itself takes a feature's bins from one rank's rows, which is wrong if the rows are sorted.
"""

from __future__ import annotations

import ctypes
import math
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from unisono.tables.boost.boosting_worker import RankRows
from unisono.tables.boost.library import BoostSettings, EvalSets, LazyModule, TrainedModel
from unisono.tables.boost.supervision import find_own_address, reserve_port, run_supervised
from unisono.tables.estimators.row_blocks import is_sparse
from unisono.world import World

lightgbm: Any = LazyModule("lightgbm")
basic: Any = LazyModule("lightgbm.basic")
SAMPLE_ROWS = 200_000  # LightGBM's own bin_construct_sample_cnt
SAMPLE_BYTES = 256 << 20
ZERO = 1e-35  # what LightGBM takes for zero, which it leaves out of samples
Columns = list[tuple[npt.NDArray[np.float64], npt.NDArray[np.int32]]]  # a column's values that are not 0, their rows
SAVED_ENDINGS = (".txt",)
_WAIT_MINUTES = 30  # LightGBM's own timeout; supervision.py finds dead ranks much sooner
_AFTER_S = 0.005
_OURS = ("early_stopping_rounds", "early_stopping_round", "categorical_feature", "importance_type")


# Settings -------------------------------------------------------------------------------------------------------------


def _make_params(settings: BoostSettings) -> dict[str, Any]:
    """The settings as LightGBM takes them."""
    params = {k: v for k, v in settings.params.items() if v is not None and k not in _OURS}
    params.setdefault("verbosity", params.pop("verbose", -1))
    if settings.classification:
        several = (settings.classes or 2) > 2
        params.setdefault("objective", "multiclass" if several else "binary")
        if several:
            params["num_class"] = settings.classes
    else:
        params.setdefault("objective", "regression")
    return params


def check(settings: BoostSettings, x: Any, y: Any) -> None:
    """ValueError for settings that LightGBM does not know or take, from a few rows."""
    if callable(settings.params.get("objective")):
        raise ValueError("LightGBM: an objective that is a function cannot be sent; name an objective")
    if settings.params.get("tree_learner", "data") not in ("data", "voting"):
        raise ValueError(f"LightGBM: got tree_learner={settings.params['tree_learner']!r}; expected 'data' or 'voting'")
    names = basic._ConfigAliases._get_all_param_aliases()  # every name of a setting, and its other names
    known = {*names, *(alias for aliases in names.values() for alias in aliases), "importance_type", *_OURS}
    unknown = sorted(set(settings.params) - known)
    if unknown:
        raise ValueError(f"LightGBM does not know {', '.join(map(repr, unknown))}: is it spelled right?")
    params = {**_make_params(settings), "min_data_in_leaf": 1, "min_data_in_bin": 1, "feature_pre_filter": False}
    params.pop("tree_learner", None)
    try:
        lightgbm.Booster(params, lightgbm.Dataset(x, y, params=params, **_make_dataset_options(settings, None)))
    except (basic.LightGBMError, TypeError) as error:
        raise ValueError(f"LightGBM refuses its settings: {error}") from error


# Training -------------------------------------------------------------------------------------------------------------


def train(settings: BoostSettings, data: RankRows, world: World, evals: EvalSets) -> TrainedModel:
    """One model of all ranks' rows, the same on every rank."""
    params = _make_params(settings)
    if world.size == 1:
        params.pop("tree_learner", None)
        return _train(settings, params, lightgbm.Dataset(data.x, **_make_dataset_fields(settings, data, params)), evals)
    wanted = int(settings.params.get("bin_construct_sample_cnt", SAMPLE_ROWS))
    sample = sample_columns(data, wanted, world)
    start = _compute_mean(data, world) if _starts_from_mean(params) else None
    return _train_together(settings, params, data, sample, start, world, evals)


def _train_together(
    settings: BoostSettings,
    params: dict[str, Any],
    data: RankRows,
    sample: tuple[Columns, int, int],
    start: float | None,
    world: World,
    evals: EvalSets,
) -> TrainedModel:
    params = {"tree_learner": "data", **params, "num_machines": world.size}
    wait_minutes = max(_WAIT_MINUTES, math.ceil(settings.timeout_s / 60))
    categories = _find_categories(settings, data.names)
    with reserve_port() as (port, held):
        machines = world.gather_objects(f"{find_own_address(world)}:{port}")

        def run() -> TrainedModel:
            # In a network, LightGBM 4.7 gives a feature another one's forced bins.
            apart = find_bins(*sample, params, categories) if "forcedbins_filename" in params else None
            held.close()
            # A rank connects to those above it. If they do not listen yet, it tries again only after 0.2 s.
            time.sleep(_AFTER_S * min(world.size - 1 - world.rank, 10))
            with connect_network(machines, port, wait_minutes=wait_minutes, params=params):
                bins = find_bins(*sample, params, categories) if apart is None else apart
                sample[0].clear()
                fields = _make_dataset_fields(settings, data, params)
                rows = lightgbm.Dataset(data.x, reference=bins, **fields, init_score=_make_init(start, data.y))
                return _train(settings, params, rows, evals, start)

        return run_supervised(run, world, timeout_s=settings.timeout_s)


def _train(
    settings: BoostSettings, params: dict[str, Any], rows: Any, evals: EvalSets, start: float | None = None
) -> TrainedModel:
    history: dict[str, Any] = {}
    callbacks = [lightgbm.record_evaluation(history)] if evals else []
    patience = settings.params.get("early_stopping_rounds", settings.params.get("early_stopping_round"))
    if patience is not None:
        callbacks.append(lightgbm.early_stopping(patience, verbose=False))
    model = lightgbm.train(
        params,
        rows,
        settings.rounds,
        valid_sets=[rows.create_valid(x, y, init_score=_make_init(start, y)) for x, y in evals],
        valid_names=[f"validation_{i}" for i in range(len(evals))],
        callbacks=callbacks,
    )
    text = model.model_to_string()
    kept = {k: {m: list(v) for m, v in each.items()} for k, each in history.items()}
    return TrainedModel(
        (_strip_network(text) if start is None else _shift_model(_strip_network(text), start)).encode(), kept
    )


def _starts_from_mean(params: dict[str, Any]) -> bool:
    """Whether boosting starts from the mean of y.

    LightGBM takes the mean of the ranks' means; here it is that of all rows, as in one process, which is then added to
    the first tree as LightGBM itself does.
    """
    plain = params.get("boosting", params.get("boosting_type", "gbdt")) in ("gbdt", "gbrt")
    asked = params["objective"] in ("regression", "regression_l2", "l2", "mean_squared_error", "mse", "rmse", "l2_root")
    return plain and asked and bool(params.get("boost_from_average", True)) and not params.get("reg_sqrt")


def _compute_mean(data: RankRows, world: World) -> float:
    y = data.y.astype(np.float32).astype(np.float64)  # as LightGBM keeps it
    sums = (
        [float(y.sum()), float(len(y))] if data.weight is None else [float(y @ data.weight), float(data.weight.sum())]
    )
    total, weight = (sum(each) for each in zip(*world.gather_objects(sums), strict=True))
    return float(total / max(weight, 1e-300))


def _make_init(start: float | None, y: Any) -> Any:
    return None if start is None else np.full(len(y), start)


def _strip_network(text: str) -> str:
    """Remove the ranks' addresses: they are no part of the model, and differ between ranks."""
    return re.sub(r"\[(machines|local_listen_port|num_machines|time_out|tree_learner): [^\]]*\]\n", "", text)


def _make_dataset_fields(settings: BoostSettings, data: RankRows, params: dict[str, Any]) -> dict[str, Any]:
    options = _make_dataset_options(settings, data.names)
    return {"label": data.y, "weight": data.weight, "params": params, **options}


def _make_dataset_options(settings: BoostSettings, names: Sequence[str] | None) -> dict[str, Any]:
    categories = settings.params.get("categorical_feature", "auto")
    return {"feature_name": "auto" if names is None else list(names), "categorical_feature": categories}


def _find_categories(settings: BoostSettings, names: Sequence[str] | None) -> list[int]:
    """The numbers of the columns whose values are categories."""
    asked = settings.params.get("categorical_feature", "auto")
    if isinstance(asked, str):
        return []
    places = {name: number for number, name in enumerate(names or ())}
    unknown = [each for each in asked if isinstance(each, str) and each not in places]
    if unknown:
        raise ValueError(f"LightGBM: categorical_feature names {unknown[0]!r}, which is no column")
    return sorted(places[each] if isinstance(each, str) else int(each) for each in asked)


# The model ------------------------------------------------------------------------------------------------------------


def load(model: bytes) -> Any:
    """LightGBM's own booster."""
    return lightgbm.Booster(model_str=model.decode())


def predict(booster: Any, x: Any, params: dict[str, Any]) -> Any:
    """Numbers, or probabilities: rows, or rows × classes. After early stopping, of the best round."""
    return booster.predict(x)


def compute_importances(booster: Any, columns: int) -> Any:
    """The gain of each column."""
    return np.asarray(booster.feature_importance("gain"), dtype=np.float64)


# Models that are grown apart ------------------------------------------------------------------------------------------


def make_member_trainer(settings: BoostSettings, data: RankRows, mean: float) -> Callable[[int, Any], bytes]:
    """A function that trains one model, given its number and how often each row counts; bins are found once."""
    params = _make_params(settings)
    params.pop("tree_learner", None)
    if params.get("linear_tree"):
        raise ValueError("LightGBM: models with linear_tree=True cannot be merged")
    options = _make_dataset_options(settings, data.names)
    whole = lightgbm.Dataset(data.x, label=data.y, params=params, free_raw_data=False, **options).construct()

    def grow(number: int, counts: Any) -> bytes:
        drawn = np.flatnonzero(counts)
        weight = counts[drawn] if data.weight is None else counts[drawn] * data.weight[drawn]
        rows = whole.subset(drawn, params=params)
        rows.construct().set_weight(weight)
        model = lightgbm.train({**params, "seed": settings.seed + number}, rows, settings.rounds)
        return str(model.model_to_string()).encode()

    return grow


def merge_models(models: Sequence[bytes]) -> bytes:
    """One model that predicts the mean of the models' margins: all their trees, leaves divided by how many."""
    parts = [_split_model(model.decode()) for model in models]
    trees = [_change_values(tree, lambda value: value / len(models)) for _, mine, _ in parts for tree in mine]
    return _join_model(parts[0][0], trees, parts[0][2]).encode()


def _shift_model(model: str, by: float) -> str:
    """Add `by` to every prediction, through the first tree."""
    head, trees, tail = _split_model(model)
    return _join_model(head, [_change_values(trees[0], lambda value: value + by), *trees[1:]], tail)


def _split_model(model: str) -> tuple[str, list[str], str]:
    """Split a model's text into what comes before the trees, the trees, and what comes after."""
    body, end, tail = model.partition("end of trees")
    head, *trees = re.split(r"^Tree=\d+\n", body, flags=re.MULTILINE)
    return head, trees, end + tail


def _join_model(head: str, trees: Sequence[str], tail: str) -> str:
    written = [f"Tree={number}\n{tree}" for number, tree in enumerate(trees)]
    sizes = " ".join(str(len(tree.encode())) for tree in written)
    return re.sub(r"^tree_sizes=.*$", f"tree_sizes={sizes}", head, flags=re.MULTILINE) + "".join(written) + tail


def _change_values(tree: str, change: Callable[[float], float]) -> str:
    """A tree with other values in its leaves and nodes."""

    def line(found: re.Match[str]) -> str:
        return found[1] + " ".join(repr(change(float(value))) for value in found[2].split())

    return re.sub(r"^((?:leaf|internal)_value=)(.*)$", line, tree, flags=re.MULTILINE)


# Its network, and the bins of its features ----------------------------------------------------------------------------


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
