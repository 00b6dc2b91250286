"""Gradient boosting by all workers of a world, with scikit-learn's interface: XGBoost and LightGBM through their own
collectives, forests and bagged boosting by trees that the workers grow apart. `pip install 'unisono[boost]'`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # the same as below, for type checkers: a test compares them
    from unisono.tables.boost.ensembles import Bagged as Bagged
    from unisono.tables.boost.ensembles import Forest as Forest
    from unisono.tables.boost.shared_model import LightGBM as LightGBM
    from unisono.tables.boost.shared_model import XGBoost as XGBoost

_MODULE_OF = {
    "Bagged": "unisono.tables.boost.ensembles",
    "Forest": "unisono.tables.boost.ensembles",
    "LightGBM": "unisono.tables.boost.shared_model",
    "XGBoost": "unisono.tables.boost.shared_model",
}

__all__ = sorted(_MODULE_OF)


def __getattr__(name: str) -> Any:
    """Import on first use: workers need no scikit-learn, and a library only if it is asked for."""
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'unisono.boost' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_MODULE_OF[name]), name)


def __dir__() -> list[str]:
    return __all__
