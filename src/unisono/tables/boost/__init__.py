"""Gradient boosting by all workers of a world, with scikit-learn's interface: XGBoost and LightGBM through their own
collectives, forests and bagged boosting by trees that the workers grow apart. `pip install 'unisono[boost]'`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from unisono.tables.estimators import import_on_use

if TYPE_CHECKING:  # the same as below, for type checkers: a test compares them
    from unisono.tables.boost.boosted import Bagged as Bagged
    from unisono.tables.boost.boosted import Forest as Forest
    from unisono.tables.boost.boosted import LightGBM as LightGBM
    from unisono.tables.boost.boosted import XGBoost as XGBoost

_MODULE_OF = dict.fromkeys(("Bagged", "Forest", "LightGBM", "XGBoost"), "unisono.tables.boost.boosted")

__all__ = sorted(_MODULE_OF)
__getattr__ = import_on_use("unisono.boost", _MODULE_OF)


def __dir__() -> list[str]:
    return __all__
