"""XGBoost: histograms summed by its own collective, whose tracker rank 0 hosts. Chen and Guestrin, 2016,
arXiv:1603.02754."""

from __future__ import annotations

import contextlib
import ctypes
import json
import re
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from unisono.tables.boost.boosting_worker import RankRows
from unisono.tables.boost.library import BoostSettings, EvalSets, LazyModule, TrainedModel
from unisono.tables.boost.supervision import find_own_address, run_supervised
from unisono.world import World

xgboost: Any = LazyModule("xgboost")
SAVED_ENDINGS = (".json", ".ubj")
_OURS = ("early_stopping_rounds", "missing", "enable_categorical", "feature_types", "importance_type")
_TRACKER_S = 0.005  # the tracker is ready by then, and looks for workers only every 0.1 s
_WAIT_S = 1800  # XGBoost's own timeout; supervision.py finds dead ranks much sooner


# Settings -------------------------------------------------------------------------------------------------------------


def _make_params(settings: BoostSettings) -> dict[str, Any]:
    """The settings as XGBoost takes them."""
    params = {k: v for k, v in settings.params.items() if v is not None and k not in _OURS}
    if settings.classification:
        several = (settings.classes or 2) > 2
        objective = params.setdefault("objective", "multi:softprob" if several else "binary:logistic")
        if objective == "multi:softmax":  # its model is the same; its output is too little for predict_proba
            params["objective"] = "multi:softprob"
        if several:
            params["num_class"] = settings.classes
    else:
        params.setdefault("objective", "reg:squarederror")
    return params


def check(settings: BoostSettings, x: Any, y: Any) -> None:
    """ValueError for settings that XGBoost does not know or take, from a few rows."""
    if settings.params.get("callbacks") is not None or callable(settings.params.get("objective")):
        raise ValueError("XGBoost: callbacks and objectives that are functions cannot be sent; name an objective")
    if settings.params.get("tree_method") == "exact" or settings.params.get("booster", "gbtree") == "gblinear":
        raise ValueError(
            'XGBoost: tree_method="exact" and booster="gblinear" sum no histograms: use tree_method="hist"'
        )
    params = _make_params(settings)

    def configure() -> None:
        rows = xgboost.DMatrix(x, y, **_make_matrix_options(settings, None))
        xgboost.Booster(params, [rows]).save_config()

    try:
        _, said = _run_and_listen(configure)
    except (xgboost.core.XGBoostError, TypeError) as error:
        lines = [line for line in str(error).splitlines() if line.strip()]
        raise ValueError(f"XGBoost refuses its settings: {lines[0]}") from error
    unknown = [name for text in said for name in re.findall(r"Parameters: \{ (.*?) \} are not used", text)]
    if unknown:
        raise ValueError(f"XGBoost does not know, or here does not use, {', '.join(unknown)}: is it spelled right?")


def _run_and_listen(fn: Callable[[], Any]) -> tuple[Any, list[str]]:
    """Run `fn` in a thread of its own, as XGBoost hands out messages by thread; returns its value and the messages."""
    said: list[str] = []

    def run() -> Any:
        with _Messages(said):
            return fn()

    with ThreadPoolExecutor(1) as thread:
        return thread.submit(run).result(), said


class _Messages:
    """Keeps XGBoost's messages of this thread, which would otherwise go to standard error."""

    def __init__(self, said: list[str]) -> None:
        kind = ctypes.CFUNCTYPE(None, ctypes.c_char_p)
        self._keep = kind(lambda text: said.append(text.decode("utf-8", "replace")))

    def __enter__(self) -> None:
        xgboost.core._LIB.XGBRegisterLogCallback(self._keep)

    def __exit__(self, *_: object) -> None:
        _kept.append(self._keep)  # it may be called for as long as the thread lives


_kept: list[Any] = []


# Training -------------------------------------------------------------------------------------------------------------


def train(settings: BoostSettings, data: RankRows, world: World, evals: EvalSets) -> TrainedModel:
    """One model of all ranks' rows, the same on every rank."""
    if world.size == 1:
        return _train(settings, data, evals)
    tracker, address = None, {}
    if world.rank == 0:
        options = {"host_ip": find_own_address(world), "sortby": "task", "timeout": max(1, round(settings.timeout_s))}
        tracker = xgboost.tracker.RabitTracker(n_workers=world.size, **options)
        tracker.start()
        time.sleep(_TRACKER_S)
        address = tracker.worker_args()
    address = world.broadcast_object(address)
    said: list[str] = []

    def run() -> TrainedModel:
        # Ranks are given by the order of the task's names.
        mine = {"dmlc_task_id": f"{world.rank:08d}", "dmlc_timeout": max(_WAIT_S, round(settings.timeout_s))}
        with _Messages(said), xgboost.collective.CommunicatorContext(**address, **mine):
            if xgboost.collective.get_rank() != world.rank:
                raise RuntimeError(f"rank {world.rank} is rank {xgboost.collective.get_rank()} for XGBoost")
            return _train(settings, data, evals)

    try:
        found = run_supervised(run, world, timeout_s=settings.timeout_s)
    except BaseException:
        if tracker is not None:
            threading.Thread(target=_free, args=(tracker,), daemon=True).start()
        raise
    if tracker is not None:
        tracker.wait_for(max(1, round(settings.timeout_s)))
    return found


def _free(tracker: Any) -> None:
    """Free a tracker after a failure: it waits for its workers, one of which may be gone, and then raises."""
    with contextlib.suppress(ValueError):
        tracker.free()


def _train(settings: BoostSettings, data: RankRows, evals: EvalSets) -> TrainedModel:
    params, history = _make_params(settings), dict[str, dict[str, list[float]]]()
    rows = _make_matrix(settings, data, params)
    options = _make_matrix_options(settings, data.names)
    if isinstance(rows, xgboost.QuantileDMatrix):
        others = [xgboost.QuantileDMatrix(x, y, ref=rows, **options) for x, y in evals]
    else:
        others = [xgboost.DMatrix(x, y, **options) for x, y in evals]
    model = xgboost.train(
        params,
        rows,
        settings.rounds,
        evals=[(each, f"validation_{i}") for i, each in enumerate(others)],
        evals_result=history,
        early_stopping_rounds=settings.params.get("early_stopping_rounds"),
        verbose_eval=False,
    )
    return TrainedModel(
        bytes(model.save_raw("ubj")), {k: {m: list(v) for m, v in each.items()} for k, each in history.items()}
    )


def _make_matrix(settings: BoostSettings, data: RankRows, params: dict[str, Any]) -> Any:
    options = _make_matrix_options(settings, data.names)
    weight = None if data.weight is None else np.asarray(data.weight, dtype=np.float32)
    if params.get("tree_method", "hist") in ("hist", "auto"):
        return xgboost.QuantileDMatrix(data.x, data.y, weight=weight, max_bin=params.get("max_bin"), **options)
    return xgboost.DMatrix(data.x, data.y, weight=weight, **options)


def _make_matrix_options(settings: BoostSettings, names: Sequence[str] | None) -> dict[str, Any]:
    return {
        "missing": settings.params.get("missing", np.nan),
        "feature_names": None if names is None else list(names),
        "feature_types": settings.params.get("feature_types"),
        "enable_categorical": bool(settings.params.get("enable_categorical", False)),
        "nthread": settings.params.get("n_jobs", settings.params.get("nthread")),
    }


# The model ------------------------------------------------------------------------------------------------------------


def load(model: bytes) -> Any:
    """XGBoost's own booster."""
    return xgboost.Booster(model_file=bytearray(model))


def predict(booster: Any, x: Any, params: dict[str, Any]) -> Any:
    """Numbers, or probabilities: rows, or rows × classes. After early stopping, of the best round."""
    rows = xgboost.DMatrix(
        x,
        missing=params.get("missing", np.nan),
        feature_names=booster.feature_names,
        feature_types=booster.feature_types,
        enable_categorical=bool(params.get("enable_categorical", False)),
    )
    best = booster.attr("best_iteration")
    return booster.predict(rows, iteration_range=(0, int(best) + 1) if best is not None else (0, 0))


def compute_importances(booster: Any, columns: int) -> Any:
    """The gain of each column."""
    names = booster.feature_names or [f"f{i}" for i in range(columns)]
    gains = booster.get_score(importance_type="gain")
    return np.array([gains.get(name, 0.0) for name in names], dtype=np.float64)


# Models that are grown apart ------------------------------------------------------------------------------------------


def make_member_trainer(settings: BoostSettings, data: RankRows, mean: float) -> Callable[[int, Any], bytes]:
    """A function that trains one model, given its number and how often each row counts; bins are found once."""
    params = _make_params(settings)
    # All members start from the same value: their sum counts it once.
    params.setdefault("base_score", 0.5 if (settings.classes or 0) > 2 else mean)
    plain = RankRows(data.x, data.y, None, data.names, data.where)
    rows = _make_matrix(settings, plain, params)

    def grow(number: int, counts: Any) -> bytes:
        weight = counts if data.weight is None else counts * data.weight
        rows.set_weight(np.asarray(weight, dtype=np.float32))
        model = xgboost.train({**params, "seed": settings.seed + number}, rows, settings.rounds, verbose_eval=False)
        return bytes(model.save_raw("json"))

    return grow


def merge_models(models: Sequence[bytes]) -> bytes:
    """One model that predicts the mean of the models' margins: their trees side by side, leaves divided by how many."""
    whole, *others = [json.loads(model) for model in models]
    parts = [_find_trees(each) for each in (whole, *others)]
    rounds = {len(part["iteration_indptr"]) for part in parts}
    starts = {json.dumps(each["learner"]["learner_model_param"]) for each in (whole, *others)}
    if len(rounds) > 1 or len(starts) > 1:
        raise ValueError("the models to merge differ in rounds, classes or base score")
    trees: list[Any] = []
    groups: list[int] = []
    borders = [0]
    for first in range(rounds.pop() - 1):
        for part in parts:
            begin, end = part["iteration_indptr"][first : first + 2]
            trees += [_scale_leaves(tree, 1.0 / len(parts)) for tree in part["trees"][begin:end]]
            groups += part["tree_info"][begin:end]
        borders.append(len(trees))
    for number, tree in enumerate(trees):
        tree["id"] = number
    together = _find_trees(whole)
    one = int(together["gbtree_model_param"].get("num_parallel_tree", "1"))
    together["gbtree_model_param"] |= {"num_trees": str(len(trees)), "num_parallel_tree": str(one * len(parts))}
    together |= {"trees": trees, "tree_info": groups, "iteration_indptr": borders}
    return json.dumps(whole).encode()


def _find_trees(model: dict[str, Any]) -> dict[str, Any]:
    booster = model["learner"]["gradient_booster"]
    if booster["name"] != "gbtree":
        raise ValueError(f'models of booster={booster["name"]!r} cannot be merged: use booster="gbtree"')
    found: dict[str, Any] = booster["model"]
    return found


def _scale_leaves(tree: dict[str, Any], factor: float) -> dict[str, Any]:
    leaf = np.array(tree["left_children"]) == -1
    values = np.array(tree["split_conditions"], dtype=np.float64)
    tree["split_conditions"] = np.where(leaf, values * factor, values).tolist()
    tree["base_weights"] = (np.array(tree["base_weights"], dtype=np.float64) * factor).tolist()
    return tree
