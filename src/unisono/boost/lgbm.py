"""LightGBM: histograms summed by its own network (tree_learner="data"), on ports that the ranks agree on beforehand.
Ke et al., 2017."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from unisono.boost.address import own_address, reserved_port
from unisono.boost.lgbm_bins import SAMPLE_ROWS, Columns, bins_of, connected, sampled
from unisono.boost.rows import Shard
from unisono.boost.task import Boosted, Evals, Later, Task
from unisono.boost.watch import watched
from unisono.world import World

__all__ = ["check", "importances", "load", "member_trainer", "merged", "predict", "saved_endings", "train"]

lightgbm: Any = Later("lightgbm")
saved_endings = (".txt",)
_WAIT_MINUTES = 30  # of its network: who is alive is watched beside it
_AFTER_S = 0.005
_OURS = ("early_stopping_rounds", "early_stopping_round", "categorical_feature", "importance_type")


# Settings -------------------------------------------------------------------------------------------------------------


def params_of(task: Task) -> dict[str, Any]:
    """The settings in LightGBM's own names."""
    params = {k: v for k, v in task.params.items() if v is not None and k not in _OURS}
    params.setdefault("verbosity", params.pop("verbose", -1))
    if task.classification:
        several = (task.classes or 2) > 2
        params.setdefault("objective", "multiclass" if several else "binary")
        if several:
            params["num_class"] = task.classes
    else:
        params.setdefault("objective", "regression")
    return params


def check(task: Task, x: Any, y: Any) -> None:
    """ValueError for settings that LightGBM does not know or take, from a few rows."""
    if callable(task.params.get("objective")):
        raise ValueError("LightGBM: an objective that is a function cannot be sent; name an objective")
    if task.params.get("tree_learner", "data") not in ("data", "voting"):
        raise ValueError(f"LightGBM: got tree_learner={task.params['tree_learner']!r}; expected 'data' or 'voting'")
    unknown = sorted(set(task.params) - _known())
    if unknown:
        raise ValueError(f"LightGBM does not know {', '.join(map(repr, unknown))}: is it spelled right?")
    params = {**params_of(task), "min_data_in_leaf": 1, "min_data_in_bin": 1, "feature_pre_filter": False}
    params.pop("tree_learner", None)
    try:
        lightgbm.Booster(params, lightgbm.Dataset(x, y, params=params, **_dataset_options(task, None)))
    except (lightgbm.basic.LightGBMError, TypeError) as error:
        raise ValueError(f"LightGBM refuses its settings: {error}") from error


def _known() -> set[str]:
    """Every name of a setting, and its other names."""
    names = lightgbm.basic._ConfigAliases._get_all_param_aliases()
    return set(names) | {alias for aliases in names.values() for alias in aliases} | {"importance_type", *_OURS}


# Training -------------------------------------------------------------------------------------------------------------


def train(task: Task, shard: Shard, world: World, evals: Evals) -> Boosted:
    """One model of all ranks' rows, the same on every rank."""
    params = params_of(task)
    if world.size == 1:
        params.pop("tree_learner", None)
        return _train(task, params, lightgbm.Dataset(shard.x, **_rows(task, shard, params)), evals)
    wanted = int(task.params.get("bin_construct_sample_cnt", SAMPLE_ROWS))
    sample = sampled(shard, wanted, world)
    start = _mean(shard, world) if _starts_from_mean(params) else None
    return _together(task, params, shard, sample, start, world, evals)


def _together(
    task: Task,
    params: dict[str, Any],
    shard: Shard,
    sample: tuple[Columns, int, int],
    start: float | None,
    world: World,
    evals: Evals,
) -> Boosted:
    params = {"tree_learner": "data", **params, "num_machines": world.size}
    wait_minutes = max(_WAIT_MINUTES, math.ceil(task.timeout_s / 60))
    categories = _categories(task, shard.names)
    with reserved_port() as (port, held):
        machines = world.gather_objects(f"{own_address(world)}:{port}")

        def run() -> Boosted:
            # In a network, LightGBM 4.7 gives a feature another one's forced bins.
            apart = bins_of(*sample, params, categories) if "forcedbins_filename" in params else None
            held.close()
            # A rank connects to those above it, and tries again only after 0.2 s where they do not listen yet.
            time.sleep(_AFTER_S * min(world.size - 1 - world.rank, 10))
            with connected(machines, port, wait_minutes=wait_minutes, params=params):
                bins = bins_of(*sample, params, categories) if apart is None else apart
                sample[0].clear()
                rows = lightgbm.Dataset(
                    shard.x, reference=bins, **_rows(task, shard, params), init_score=_init(start, shard.y)
                )
                return _train(task, params, rows, evals, start)

        return watched(run, world, timeout_s=task.timeout_s)


def _train(task: Task, params: dict[str, Any], rows: Any, evals: Evals, start: float | None = None) -> Boosted:
    history: dict[str, Any] = {}
    callbacks = [lightgbm.record_evaluation(history)] if evals else []
    patience = task.params.get("early_stopping_rounds", task.params.get("early_stopping_round"))
    if patience is not None:
        callbacks.append(lightgbm.early_stopping(patience, verbose=False))
    model = lightgbm.train(
        params,
        rows,
        task.rounds,
        valid_sets=[rows.create_valid(x, y, init_score=_init(start, y)) for x, y in evals],
        valid_names=[f"validation_{i}" for i in range(len(evals))],
        callbacks=callbacks,
    )
    text = model.model_to_string()
    kept = {k: {m: list(v) for m, v in each.items()} for k, each in history.items()}
    return Boosted(
        (_without_network(text) if start is None else _shifted(_without_network(text), start)).encode(), kept
    )


def _starts_from_mean(params: dict[str, Any]) -> bool:
    """Whether boosting starts from the mean of y.

    LightGBM takes the mean of the ranks' means; here it is that of all rows, as in one process, which is then added to
    the first tree as LightGBM itself does.
    """
    plain = params.get("boosting", params.get("boosting_type", "gbdt")) in ("gbdt", "gbrt")
    asked = params["objective"] in ("regression", "regression_l2", "l2", "mean_squared_error", "mse", "rmse", "l2_root")
    return plain and asked and bool(params.get("boost_from_average", True)) and not params.get("reg_sqrt")


def _mean(shard: Shard, world: World) -> float:
    y = shard.y.astype(np.float32).astype(np.float64)  # as LightGBM keeps it
    sums = (
        [float(y.sum()), float(len(y))]
        if shard.weight is None
        else [float(y @ shard.weight), float(shard.weight.sum())]
    )
    total, weight = (sum(each) for each in zip(*world.gather_objects(sums), strict=True))
    return float(total / max(weight, 1e-300))


def _init(start: float | None, y: Any) -> Any:
    return None if start is None else np.full(len(y), start)


def _without_network(text: str) -> str:
    """Where the ranks were reached is no part of the model, and differs between ranks."""
    return re.sub(r"\[(machines|local_listen_port|num_machines|time_out|tree_learner): [^\]]*\]\n", "", text)


def _rows(task: Task, shard: Shard, params: dict[str, Any]) -> dict[str, Any]:
    options = _dataset_options(task, shard.names)
    return {"label": shard.y, "weight": shard.weight, "params": params, **options}


def _dataset_options(task: Task, names: Sequence[str] | None) -> dict[str, Any]:
    categories = task.params.get("categorical_feature", "auto")
    return {"feature_name": "auto" if names is None else list(names), "categorical_feature": categories}


def _categories(task: Task, names: Sequence[str] | None) -> list[int]:
    """The numbers of the columns whose values are categories."""
    asked = task.params.get("categorical_feature", "auto")
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


def importances(booster: Any, columns: int) -> Any:
    """The gain of each column."""
    return np.asarray(booster.feature_importance("gain"), dtype=np.float64)


# Models that are grown apart ------------------------------------------------------------------------------------------


def member_trainer(task: Task, shard: Shard, mean: float) -> Callable[[int, Any], bytes]:
    """A function of a member's number and its rows' counts that trains it; the rows are cut into bins once."""
    params = params_of(task)
    params.pop("tree_learner", None)
    if params.get("linear_tree"):
        raise ValueError("LightGBM: models with linear_tree=True cannot be merged")
    options = _dataset_options(task, shard.names)
    whole = lightgbm.Dataset(shard.x, label=shard.y, params=params, free_raw_data=False, **options).construct()

    def grow(number: int, counts: Any) -> bytes:
        drawn = np.flatnonzero(counts)
        weight = counts[drawn] if shard.weight is None else counts[drawn] * shard.weight[drawn]
        rows = whole.subset(drawn, params=params)
        rows.construct().set_weight(weight)
        model = lightgbm.train({**params, "seed": task.seed + number}, rows, task.rounds)
        return str(model.model_to_string()).encode()

    return grow


def merged(models: Sequence[bytes]) -> bytes:
    """One model that predicts the mean of the models' margins: all their trees, leaves divided by how many."""
    parts = [_taken_apart(model.decode()) for model in models]
    trees = [_changed(tree, lambda value: value / len(models)) for _, mine, _ in parts for tree in mine]
    return _put_together(parts[0][0], trees, parts[0][2]).encode()


def _shifted(model: str, by: float) -> str:
    """The model whose predictions are so much larger: by the first tree."""
    head, trees, tail = _taken_apart(model)
    return _put_together(head, [_changed(trees[0], lambda value: value + by), *trees[1:]], tail)


def _taken_apart(model: str) -> tuple[str, list[str], str]:
    """What stands before the trees, the trees, and what stands behind."""
    body, end, tail = model.partition("end of trees")
    head, *trees = re.split(r"^Tree=\d+\n", body, flags=re.MULTILINE)
    return head, trees, end + tail


def _put_together(head: str, trees: Sequence[str], tail: str) -> str:
    written = [f"Tree={number}\n{tree}" for number, tree in enumerate(trees)]
    sizes = " ".join(str(len(tree.encode())) for tree in written)
    return re.sub(r"^tree_sizes=.*$", f"tree_sizes={sizes}", head, flags=re.MULTILINE) + "".join(written) + tail


def _changed(tree: str, change: Callable[[float], float]) -> str:
    """A tree with other values in its leaves and nodes."""

    def line(found: re.Match[str]) -> str:
        return found[1] + " ".join(repr(change(float(value))) for value in found[2].split())

    return re.sub(r"^((?:leaf|internal)_value=)(.*)$", line, tree, flags=re.MULTILINE)
