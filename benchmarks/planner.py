"""Whether the plan is right: predicted against measured steps of every method, over links and models.

Four emulated hosts with one worker each; the 25 M-parameter MLP of step.py and a character transformer of 2.5 M. On
every link and model the planner measures and predicts; then every method is trained for real, in turn. Keys:

worst_regret_to_a_loss: the time to a loss under the plan's first choice over that under the fastest method (among those
    that the plan ranks), minus 1: measured steps, over what a sample teaches by the planner's file. Target 0.10.
    (worst_regret, until 2026-11-18: of the steps alone.)
worst_prediction_error: |predicted / measured - 1| of a step, the worst over methods, links and models; median_ beside
    it. Target 0.15.
plan_s: `unisono plan` on the 25 M-parameter script, 4 workers on this host, from start to end. Target 30.
worst_simulation_error: the step at 2, 4 and 8 workers, from what was measured at 4 hosts on the middle link. Target
    0.15.

shaper: what holds bytes back: the kernel, or, where that needs rights that are not there, the workers' transport.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

from measure import finish, on_hosts, tell
from step import mlp

METHODS = [
    "allreduce",
    "zero(stage=1)",
    "fp16",
    "bytegrad",
    "nuqsgd",
    "onebit",
    "powersgd(rank=1)",
    "powersgd(rank=4)",
    "topk(k=0.01)",
    "randomk(k=0.01)",
]
SCRIPT = """\
import sys
sys.path[:0] = [{here!r}]
from step import mlp
import torch, unisono as un
world = un.join(device="cpu")
torch.manual_seed(world.rank)
model, x, y = mlp()
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
un.parallel(model, optimizer, "allreduce")
for _ in range(1000):
    optimizer.zero_grad()
    torch.nn.functional.mse_loss(model(x), y).backward()
    optimizer.step()
"""
SIMULATED = ["allreduce", "fp16", "powersgd(rank=4)", "topk(k=0.01)"]
LONG_S = 2.0  # a step that is measured less often


def transformer() -> tuple[Any, Any, Any]:
    """A character transformer of 2.5 M parameters, 8 sequences of 64."""
    import torch
    from char_transformer import CharTransformer

    text = torch.randint(96, (8, 65))
    return CharTransformer(96, 256, 64), text[:, :-1], text[:, 1:]


def _make(name: str) -> tuple[Any, Any, Any]:
    """A model, its optimizer, and one step of its loop."""
    import torch
    from torch.nn import functional

    torch.manual_seed(int(os.environ["RANK"]))
    model, x, y = {"mlp": mlp, "transformer": transformer}[name]()
    if name == "mlp":
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=1e-3)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step() -> None:
        optimizer.zero_grad()
        out = model(x)
        loss = (
            functional.mse_loss(out, y) if name == "mlp" else functional.cross_entropy(out.flatten(0, 1), y.flatten())
        )
        loss.backward()
        optimizer.step()

    return model, optimizer, step


def worker(name: str, methods: list[str], rounds: int, plans: bool) -> None:
    """On each host: the planner's measurements in this loop, then every method for real, in turn."""
    import torch

    import unisono as un
    from unisono.predict.planner.candidates import find_candidates
    from unisono.predict.planner.measurement_plan import MeasurementPlan, PlanSettings

    torch.set_num_threads(1)
    world = un.join(device="cpu")
    model, optimizer, step = _make(name)
    if not plans:
        measured = measure_steps(world, model, optimizer, step, methods, rounds)
        if world.rank == 0:
            tell({"measured": measured})
        world.barrier()
        return
    done: list[bool] = []
    began = time.perf_counter()
    plan = MeasurementPlan(
        model,
        optimizer,
        world,
        find_candidates(methods),
        PlanSettings(budget_s=600.0),
        own="allreduce",
        finished=lambda: done.append(True),
    )
    while not done:
        step()
    planned_s = time.perf_counter() - began
    plan.replica.close()
    specs = [m.spec for m in plan.measured.methods if m.anatomy is not None]
    measured = measure_steps(world, model, optimizer, step, specs, rounds)
    if world.rank == 0:
        tell({"measured": measured, "plan": plan.measured.to_dict(), "planned_s": planned_s})
    world.barrier()


def measure_steps(world: Any, model: Any, optimizer: Any, step: Any, specs: list[str], rounds: int) -> dict[str, float]:
    """Seconds of a step under each method: of the slowest rank, the median over rounds and steps."""
    import copy

    import unisono as un

    start = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
    taken: dict[str, list[float]] = {spec: [] for spec in specs}
    for _ in range(rounds):
        for spec in specs:
            model.load_state_dict(start[0])
            optimizer.load_state_dict(copy.deepcopy(start[1]))
            replica = un.parallel(model, optimizer, spec, world=world)
            step()
            for _ in range(1 if taken[spec] and taken[spec][-1] > LONG_S else 3):
                world.barrier()
                began = time.perf_counter()
                step()
                taken[spec].append(max(world.gather_objects(time.perf_counter() - began)))
                if taken[spec][-1] > LONG_S:
                    break
            replica.restore()
            replica.close()
    return {spec: median(seconds) for spec, seconds in taken.items()}


def judge(found: dict[str, Any]) -> dict[str, Any]:
    """The plan's regret, and each method's error."""
    from unisono.predict.planner.choice import choose
    from unisono.predict.planner.measured import Measured

    plan = choose(Measured.from_dict(found["plan"]), ("exact", "rounded", "compressed"))
    measured: dict[str, float] = found["measured"]
    for row in plan.ranked:
        timing = row.prediction.timing
        print(
            f"  {row.spec:<20}predicted {row.seconds * 1e3:>9.1f} ms, measured {measured[row.spec] * 1e3:>9.1f} ms "
            f"({row.seconds / measured[row.spec] - 1:+.0%}); compute {timing.compute * 1e3:.1f}, exposed "
            f"{timing.exposed * 1e3:.1f}, compression {timing.compression * 1e3:.1f}",
            flush=True,
        )
    to_a_loss = [measured[row.spec] * (row.to_a_loss / row.seconds) for row in plan.ranked]
    print(f"  {' '.join(plan.reasons)}", flush=True)
    return {
        "regret": to_a_loss[0] / min(to_a_loss) - 1,
        "errors": [abs(row.seconds / measured[row.spec] - 1) for row in plan.ranked],
        "first": plan.ranked[0].spec,
    }


def time_command() -> float:
    """`unisono plan` as a user runs it."""
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "train.py"
        script.write_text(SCRIPT.format(here=str(Path(__file__).parent)))
        began = time.perf_counter()
        done = subprocess.run(
            [sys.executable, "-m", "unisono", "plan", "-n", "4", str(script)], capture_output=True, text=True
        )
        taken = time.perf_counter() - began
    print(done.stdout if not done.returncode else done.stderr, flush=True)
    if done.returncode:
        raise SystemExit("`unisono plan` failed")
    return taken


def run_links(asked: argparse.Namespace) -> dict[str, Any]:
    """Every link and model."""
    results: dict[str, Any] = {}
    regrets, errors = [], []
    for mbit in asked.mbit:
        for name in asked.models:
            print(f"{name}, {asked.hosts} hosts, links of {mbit:g} Mbit/s", flush=True)
            arguments = ["--worker", name, "--rounds", str(asked.rounds), "--methods", *asked.methods]
            found = on_hosts(arguments, hosts=asked.hosts, mbit=mbit, timeout_s=1800, by_transport=asked.by_transport)
            verdict = judge(found)
            regrets.append(verdict["regret"])
            errors += verdict["errors"]
            results[f"first_{name}_{mbit:g}"] = verdict["first"]
            results[f"regret_{name}_{mbit:g}"] = verdict["regret"]
            results[f"worst_error_{name}_{mbit:g}"] = max(verdict["errors"])
    results |= {"worst_regret_to_a_loss": max(regrets), "worst_prediction_error": max(errors)}
    results["median_prediction_error"] = median(errors)
    return results


def run_simulation(asked: argparse.Namespace) -> dict[str, Any]:
    """From a plan at some hosts on the middle link: steps at 2, 4 and 8, simulated and measured."""
    from unisono.launchers.runtime.machine import usable_cores
    from unisono.predict.planner.measured import Measured
    from unisono.predict.simulation.plan_file import compare_with_measured, make_plan

    mbit = sorted(asked.mbit)[len(asked.mbit) // 2]
    common = ["--worker", "transformer", "--rounds", str(asked.rounds), "--methods", *SIMULATED]
    how: dict[str, Any] = {"mbit": mbit, "timeout_s": 1800, "by_transport": asked.by_transport}
    planned = on_hosts(common, hosts=asked.hosts, **how)
    measured = {asked.hosts: planned["measured"]}
    for hosts in {2, 4, 8} - {asked.hosts}:
        measured[hosts] = on_hosts([*common, "--no-plan"], hosts=hosts, **how)["measured"]
    plan = make_plan(Measured.from_dict(planned["plan"]))
    found = compare_with_measured(plan, measured, cores=usable_cores(), one_machine=True)
    for each in found:
        print(
            f"  {each.spec:<20}{each.workers} workers: simulated {each.simulated_s * 1e3:>9.1f} ms, measured "
            f"{each.measured_s * 1e3:>9.1f} ms ({each.error:+.0%})",
            flush=True,
        )
    return {"worst_simulation_error": max(abs(each.error) for each in found)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument("--mbit", type=float, nargs="+", default=[100.0, 1000.0, 5000.0], help="speeds of the links")
    parser.add_argument("--models", nargs="+", choices=("mlp", "transformer"), default=["mlp", "transformer"])
    parser.add_argument("--methods", nargs="+", default=METHODS)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--by-transport", action="store_true", help="have the workers' transport hold bytes back")
    parser.add_argument("--skip-command", action="store_true", help="do not time `unisono plan` itself")
    parser.add_argument("--skip-simulation", action="store_true", help="do not compare the simulation")
    parser.add_argument("--no-plan", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--worker", choices=("mlp", "transformer"), help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.worker:
        worker(asked.worker, asked.methods, asked.rounds, not asked.no_plan)
        return
    from unisono.launchers.lab.hosts import find_obstacle

    results: dict[str, Any] = {} if asked.skip_command else {"plan_s": time_command()}
    if reason := find_obstacle():
        print(f"{reason}: the transport holds bytes back instead", flush=True)
        asked.by_transport = True
    results["shaper"] = "transport" if asked.by_transport else "kernel"
    results |= run_links(asked)
    if not asked.skip_simulation:
        results |= run_simulation(asked)
    finish(results)


if __name__ == "__main__":
    main()
