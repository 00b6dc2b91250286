"""Estimators with scikit-learn's interface, fitted by all workers of a world: one pass over each worker's rows, one
small exchange, round after round. `pip install 'unisono[sklearn]'`."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # the same as below, for type checkers: a test compares them
    from unisono.tables.estimators.files import Files as Files
    from unisono.tables.estimators.fit_report import FitReport as FitReport
    from unisono.tables.estimators.least_squares import LeastSquares as LeastSquares
    from unisono.tables.estimators.logistic import LogisticRegression as LogisticRegression

_MODULE_OF = {
    "Files": "unisono.tables.estimators.files",
    "FitReport": "unisono.tables.estimators.fit_report",
    "LeastSquares": "unisono.tables.estimators.least_squares",
    "LogisticRegression": "unisono.tables.estimators.logistic",
}

__all__ = sorted(_MODULE_OF)


def import_on_use(package: str, module_of: Mapping[str, str]) -> Callable[[str], Any]:
    """The `__getattr__` of a package: workers need no scikit-learn, start faster without, and need a library only if it
    is asked for."""

    def find(name: str) -> Any:
        if name not in module_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(importlib.import_module(module_of[name]), name)

    return find


__getattr__ = import_on_use("unisono.estimators", _MODULE_OF)


def __dir__() -> list[str]:
    return __all__
