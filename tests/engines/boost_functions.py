"""What the tests of boosting run in workers: by name, so that workers import this file and no test."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
SMALL = {"n_estimators": 8, "n_jobs": 1}
NAMES = ["a", "b", "c", "d"]


def table(rows: int = 2001) -> tuple[Array, Array]:
    """Few distinct values, so that the bins of one process and of several workers are the same."""
    rng = np.random.default_rng(0)
    x = rng.integers(0, 32, (rows, 4)).astype(float)
    return x, x @ [3.0, -2.0, 1.0, 0.5] + rng.standard_normal(rows)


def check_model(on: Any, rows: Any) -> None:
    """XGBoost on a table of the engine, against the library itself in this process."""
    import xgboost

    from unisono.boost import XGBoost

    x, y = table()
    model = XGBoost(workers=2, on=on, **SMALL).fit(rows, "y")
    expected = xgboost.XGBRegressor(**SMALL).fit(x, y).predict(x)
    np.testing.assert_allclose(model.predict(x), expected, rtol=1e-4, atol=1e-3)
    assert (model.n_rows_, list(model.feature_names_in_)) == (len(y), NAMES)
