"""Gradient boosting by all workers of a world, with scikit-learn's interface: XGBoost and LightGBM through their own
collectives, forests and bagged boosting by trees that the workers grow apart. `pip install 'unisono[boost]'`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from unisono.boost.ensembles import Bagged, Forest
    from unisono.boost.shared_model import LightGBM, XGBoost

_LAZY = {
    "Bagged": "unisono.boost.ensembles",
    "Forest": "unisono.boost.ensembles",
    "LightGBM": "unisono.boost.shared_model",
    "XGBoost": "unisono.boost.shared_model",
}

__all__ = ["Bagged", "Forest", "LightGBM", "XGBoost"]


def __getattr__(name: str) -> Any:
    """Import on first use: workers need no scikit-learn, and each library only where it is asked for."""
    if name in _LAZY:
        import importlib

        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'unisono.boost' has no attribute {name!r}")
