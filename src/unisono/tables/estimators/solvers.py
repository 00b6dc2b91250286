"""The solvers, which run on the server: all workers together compute the value and the gradient at a point.

A solver sees a smooth function, and an l1 penalty that its proximal step takes care of.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

__all__ = ["SolverResult", "descend", "run_lbfgs"]

Array = npt.NDArray[np.float64]
SmoothFunction = Callable[[Array], tuple[float, Array]]


@dataclass
class SolverResult:
    """The point at which a solver stopped."""

    at: Array
    value: float
    iterations: int
    converged: bool


def descend(
    smooth: SmoothFunction, start: Array, *, l1: Array, step: float, tol: float, max_iter: int, accelerate: bool = False
) -> SolverResult:
    """x ← prox(x - step ∇f(x)), where prox shrinks by step · l1; stops when that moves x by less than `tol`
    relative to the first move.

    With `accelerate`, each step starts from a point beyond x (Beck and Teboulle, 2009); the momentum starts anew
    whenever it points uphill (O'Donoghue and Candès, 2015). If the value explodes, the step is halved.
    """
    x, ahead, momentum = start, start, 1.0
    first, lowest, value, move = 0.0, np.inf, np.inf, np.zeros_like(start)
    for iteration in range(1, max_iter + 1):
        value, gradient = smooth(ahead)
        if not np.isfinite(value) or value > 10 * max(lowest, 0.0) + 1e-3 * abs(lowest):
            step, ahead, momentum = step / 2, x, 1.0
            lowest = np.inf if not np.isfinite(lowest) else lowest
            continue
        lowest = min(lowest, value)
        new = _shrink(ahead - step * gradient, step * l1)
        move = (new - ahead) / step
        size = float(np.abs(move).max(initial=0.0))
        first = first or size
        if size <= tol * first:
            return SolverResult(new, value, iteration, True)
        if not accelerate:
            x = ahead = new
            continue
        if float(move @ (new - x)) < 0:  # uphill
            momentum = 1.0
        following = (1 + np.sqrt(1 + 4 * momentum**2)) / 2
        ahead = new + (momentum - 1) / following * (new - x)
        x, momentum = new, following
    return SolverResult(x, value, max_iter, False)


def run_lbfgs(smooth: SmoothFunction, start: Array, *, tol: float, max_iter: int) -> SolverResult:
    """Limited-memory BFGS (scipy's) on the gradients of all workers; stops as `descend` does."""
    from scipy.optimize import minimize

    _, gradient = smooth(start)
    first = float(np.abs(gradient).max(initial=0.0))
    if first == 0.0:
        return SolverResult(start, 0.0, 1, True)
    options = {"maxiter": max_iter, "maxfun": 2 * max_iter, "gtol": tol * first, "ftol": 0.0, "maxcor": 10}
    ended = minimize(smooth, start, jac=True, method="L-BFGS-B", options=options)
    # A line search that finds nothing lower has come to the end of the digits.
    converged = ended.status == 0 or (ended.status == 2 and float(np.abs(ended.jac).max()) <= 1e-4 * first)
    return SolverResult(np.asarray(ended.x), float(ended.fun), int(ended.nit) or 1, bool(converged))


def _shrink(x: Array, by: Array) -> Array:
    return np.sign(x) * np.maximum(np.abs(x) - by, 0.0) if np.any(by) else x
