"""Estimators with scikit-learn's interface, fitted by all workers of a world: one pass over each worker's rows, one
small exchange, round after round. `pip install 'unisono[sklearn]'`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from unisono.estimators.files import Files
    from unisono.estimators.fit_report import FitReport
    from unisono.estimators.least_squares import LeastSquares
    from unisono.estimators.logistic import LogisticRegression

_LAZY = {
    "Files": "unisono.estimators.files",
    "LeastSquares": "unisono.estimators.least_squares",
    "LogisticRegression": "unisono.estimators.logistic",
    "FitReport": "unisono.estimators.fit_report",
}

__all__ = ["Files", "FitReport", "LeastSquares", "LogisticRegression"]


def __getattr__(name: str) -> Any:
    """Import on first use: what runs in workers needs no scikit-learn, and starts faster without."""
    if name in _LAZY:
        import importlib

        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'unisono.estimators' has no attribute {name!r}")
