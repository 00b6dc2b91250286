"""What is to be boosted: settings that travel to the workers, and what comes back."""

from __future__ import annotations

import importlib
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, NamedTuple

__all__ = ["Boosted", "Evals", "Later", "Task", "library_of"]

LIBRARIES = {"xgboost": "unisono.boost.xgb", "lightgbm": "unisono.boost.lgbm"}
Evals = tuple[tuple[Any, Any], ...]  # (x, y) of each evaluation set, labels numbered


@dataclass(frozen=True)
class Task:
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


class Boosted(NamedTuple):
    """A trained model in the library's own format."""

    model: bytes
    evals: dict[str, dict[str, list[float]]]


def library_of(name: str) -> ModuleType:
    """The file of this folder that knows the library; ModuleNotFoundError says what to install."""
    if name not in LIBRARIES:
        raise ValueError(f"got library={name!r}; expected one of {', '.join(map(repr, LIBRARIES))}")
    _installed(name)
    return importlib.import_module(LIBRARIES[name])


class Later:
    """A module that is imported when something of it is first asked for."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        return getattr(_installed(self._name), attribute)


def _installed(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as missing:
        raise ModuleNotFoundError(
            f"boosting with {name} needs it installed ({missing}): pip install 'unisono[boost]'"
        ) from missing
