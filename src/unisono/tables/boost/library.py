"""The interface to a boosting library: its functions, the settings of a fit, and the model that comes back."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, cast

from unisono.world import World

if TYPE_CHECKING:
    from unisono.tables.boost.boosting_worker import RankRows

LIBRARIES = {"xgboost": "unisono.tables.boost.xgb", "lightgbm": "unisono.tables.boost.lgbm"}
EvalSets = tuple[tuple[Any, Any], ...]  # (x, y) of each evaluation set, labels numbered


@dataclass(frozen=True)
class BoostSettings:
    """Settings of a fit. `classes` is None for a regression, and until the labels of all ranks are known."""

    library: str
    classification: bool
    rounds: int
    params: dict[str, Any] = field(default_factory=dict)
    classes: int | None = None
    timeout_s: float = 60.0
    target: str | None = None  # the column to learn of an engine's table
    members: int = 0  # models that are grown apart and merged; 0: one model by all
    shards: bool = False  # of members: grown on a worker's own rows; False: on bootstraps of all rows
    seed: int = 0

    @property
    def sees_all_rows(self) -> bool:
        """Whether every worker needs all rows: members that are grown on bootstraps of them."""
        return bool(self.members) and not self.shards


class TrainedModel(NamedTuple):
    """A trained model in the library's own format."""

    model: bytes
    evals: dict[str, dict[str, list[float]]]


class Library(Protocol):
    """The functions of `xgb.py` and `lgbm.py`."""

    SAVED_ENDINGS: tuple[str, ...]  # of the files that its boosters write

    def check(self, settings: BoostSettings, x: Any, y: Any) -> None:
        """ValueError for settings that the library does not know or take, from a few rows."""

    def train(self, settings: BoostSettings, data: RankRows, world: World, evals: EvalSets) -> TrainedModel:
        """One model of all ranks' rows, the same on every rank."""

    def make_member_trainer(self, settings: BoostSettings, data: RankRows, mean: float) -> Callable[[int, Any], bytes]:
        """A function that trains one model, given its number and how often each row counts."""

    def merge_models(self, models: Sequence[bytes]) -> bytes:
        """One model that predicts the mean of the models' margins."""

    def load(self, model: bytes) -> Any:
        """The library's own booster."""

    def predict(self, booster: Any, x: Any, params: dict[str, Any]) -> Any:
        """Predicted numbers, or probabilities: of shape rows, or rows × classes."""

    def compute_importances(self, booster: Any, columns: int) -> Any:
        """The gain of each column."""


def find_library(name: str) -> Library:
    """The file of this folder that knows the library; ModuleNotFoundError says what to install."""
    if name not in LIBRARIES:
        raise ValueError(f"got library={name!r}; expected one of {', '.join(map(repr, LIBRARIES))}")
    _import_library(name)
    return cast(Library, importlib.import_module(LIBRARIES[name]))


class LazyModule:
    """A module that is imported when something of it is first asked for."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        return getattr(_import_library(self._name), attribute)


def _import_library(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as missing:
        raise ModuleNotFoundError(
            f"boosting with {name} needs it installed ({missing}): pip install 'unisono[boost]'"
        ) from missing
