"""Estimators with scikit-learn's interface, fitted by all workers of a world: one pass over each worker's rows, one
small exchange, round after round. `pip install 'unisono[sklearn]'`."""

from __future__ import annotations

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


def __getattr__(name: str) -> Any:
    """Import on first use: what runs in workers needs no scikit-learn, and starts faster without."""
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'unisono.estimators' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_MODULE_OF[name]), name)


def __dir__() -> list[str]:
    return __all__
