"""In a worker of `unisono plan`: `un.parallel` gives the program a replica that measures (see measurement_plan.py)."""

from __future__ import annotations

import atexit
import json
import warnings
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer

from unisono.launchers.runtime.variables import read_observer_settings
from unisono.methods.facts import Convergence
from unisono.methods.spec import describe
from unisono.methods.strategy import Replica, Strategy
from unisono.predict.planner.candidates import find_candidates
from unisono.predict.planner.choice import choose
from unisono.predict.planner.measured import DDP, Measured, MeasuredMethod
from unisono.predict.planner.measurement_plan import MeasurementPlan, PlanSettings, steps_needed
from unisono.predict.planner.report import write_report
from unisono.world import World

__all__ = ["bind"]

_plans: list[MeasurementPlan] = []


def bind(model: nn.Module, optimizer: Optimizer, strategy: Strategy, world: World) -> Replica:
    """What `un.parallel` calls: the program trains on, and its steps are used to measure."""
    settings = PlanSettings(**read_observer_settings())
    if _plans:
        raise RuntimeError(
            "unisono plan: the program calls un.parallel a second time, and a plan is for one model: plan each by a "
            "script of its own"
        )
    # In a silent world the others count as equal to this rank.
    warnings.filterwarnings("ignore", message="the ranks train on the same samples")
    own = describe(strategy)
    also = [*([own] if "..." not in own else []), DDP] if not settings.methods else []
    candidates = find_candidates(settings.methods, also, ranks=world.size)
    needed = steps_needed(sum(not candidate.unpredicted for candidate in candidates), settings.verify)
    plan = MeasurementPlan(
        model,
        optimizer,
        world,
        candidates,
        settings,
        own=own,
        choose=lambda measured: [row.spec for row in choose(measured, settings.allow).ranked[: settings.verify]],
        finished=lambda: _end(plan, settings),
    )
    _plans.append(plan)
    if world.rank == 0:
        atexit.register(_write_unfinished, plan, settings, needed)
        _write(settings.file, {"state": "bound"})
    return plan.replica


def _end(plan: MeasurementPlan, settings: PlanSettings) -> None:
    """Hand over what was measured, and end the program."""
    if plan.world.rank == 0:
        atexit.unregister(_write_unfinished)
        _hand_over(plan.measured, settings)
    plan.world.barrier()
    raise SystemExit(0)


def _write_unfinished(plan: MeasurementPlan, settings: PlanSettings, needed: int) -> None:
    """The program has ended by itself: what there is."""
    if plan.is_comparing:
        plan.measured.methods.append(
            MeasuredMethod(DDP, Convergence("exact", ""), why="not measured: the program ended in it")
        )
        _hand_over(plan.measured, settings)
        return
    plan.measured.unfinished = (
        f"the program ended after {plan.measured.steps} optimizer steps, and the plan needs {needed}: give it more "
        "(more epochs, or more data), or fewer --methods"
    )
    _hand_over(plan.measured, settings)


def _hand_over(measured: Measured, settings: PlanSettings) -> None:
    """To the command: by a file where there is its folder, else as text, as from another host."""
    if not _write(settings.file, {"state": "measured", "measured": measured.to_dict()}):
        print(write_report(measured, choose(measured, settings.allow)), flush=True)


def _write(file: str, what: dict[str, Any]) -> bool:
    if not file or not Path(file).parent.is_dir():
        return False
    Path(file).write_text(json.dumps(what))
    return True
