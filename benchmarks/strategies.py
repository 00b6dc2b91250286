"""What a slow worker costs under each strategy: 4 workers on one host, all alike, or one of them 3 times as slow.

A window is forward, backward and step of a model of 3.1 M parameters (12.6 MB in float32). Its compute is emulated:
each layer sleeps, a third of its time in forward and the rest in backward, so that 4 workers do not compete for a few
cores; the slow worker sleeps 3 times as long. What the strategies send and add is real. Strategies and both conditions
are run in turn, several rounds; the results are medians over the rounds. Methods in which workers wait for each other
run a fixed number of windows, the others (async_average, hogwild, parameter_server with staleness) for a fixed time, in
which each worker makes as many windows as it can.

Keys, for each strategy:
  over_allreduce_X  samples a second of all workers, one of them slow, over those of synchronous all-reduce
  kept_X            windows a second of the workers that are not slow: with the slow one over without it
and
  hidden_diloco, hidden_gossip  by the ledger, all workers alike: the share of communication that ran behind compute,
                    hidden / (hidden + communication), of diloco with fragments and a delay, and of gossip on a ring
  ahead_X           of parameter_server with a bound: the most windows that a worker was ahead of the slowest

parameter_server_64 has a bound that does not bind in so short a run; parameter_server_4 has one that does: its workers
win 4 windows on the slow one, once, and from then on go at its pace, as a bound says they must.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parent))

from measure import finish

WORKERS, SLOWER = 4, 3
LAYERS, WIDTH, BATCH = 12, 512, 8


class Case(NamedTuple):
    spec: str
    together: bool = True  # workers wait for each other, so each makes as many windows as the others
    adam: bool = False


CASES = {
    "allreduce": Case("allreduce(overlap=True, bucket_bytes=4194304)"),
    "local_sgd": Case("local_sgd(every=8, start=0)"),
    "diloco": Case("diloco(every=8)"),
    "diloco_streaming": Case("diloco(every=8, fragments=4, delay=1)"),
    "crossbow": Case("crossbow"),
    "gossip": Case("gossip(ring)"),
    "gossip_exponential": Case("gossip(exponential)"),
    "gossip_8bit": Case("gossip(ring, bits=8)"),
    "qadam": Case("qadam(warmup=1, overlap=True, bucket_bytes=4194304)", adam=True),
    "parameter_server_0": Case("parameter_server(servers=2, staleness=0)"),
    "parameter_server_4": Case("parameter_server(servers=2, staleness=4)", together=False),
    "parameter_server_64": Case("parameter_server(servers=2, staleness=64)", together=False),
    "parameter_server_async": Case("parameter_server(servers=2, staleness=None)", together=False),
    "async_average": Case("async_average(every_s=0.2)", together=False),
    "hogwild": Case("hogwild", together=False),
}


class Plan(NamedTuple):
    """Rounds, seconds of compute a window, and windows of those that run together (half of them with a slow one)."""

    rounds: int = 3
    compute: float = 0.09
    windows: int = 14


class Found(NamedTuple):
    """One run. Windows a second are the mean over those that are not slow; times are seconds of the same, by window."""

    windows: float
    samples: float
    still: float
    hidden: float
    ahead: dict[int, int]


def network(compute: float) -> Any:
    """Linear layers that sleep, `compute` seconds a window in all."""
    import torch
    from torch import nn

    class Sleep(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            time.sleep(compute / LAYERS / 3)
            return x.view_as(x)

        @staticmethod
        def backward(ctx: Any, grad: Any) -> Any:
            time.sleep(compute / LAYERS * 2 / 3)
            return grad

    class Layer(nn.Linear):
        def forward(self, x: Any) -> Any:
            return Sleep.apply(super().forward(x))

    return nn.Sequential(*(Layer(WIDTH, WIDTH) for _ in range(LAYERS)))


def train(name: str, slow: bool, plan: Plan, world: Any) -> dict[str, Any]:
    """One run, in each worker: what this worker did."""
    import torch

    import unisono as un

    torch.manual_seed(world.rank)  # each has a batch of its own
    case = CASES[name]
    model = network(plan.compute * (SLOWER if slow and world.rank == WORKERS - 1 else 1))
    make = torch.optim.Adam if case.adam else torch.optim.SGD
    optimizer = make(model.parameters(), lr=1e-4)
    replica: Any = un.parallel(model, optimizer, case.spec, world=world)
    x = torch.randn(BATCH, WIDTH)

    def window() -> None:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    for _ in range(2):
        window()
    world.barrier()
    world.ledger.restart()
    start, windows = time.perf_counter(), 0
    count = plan.windows // 2 if slow else plan.windows
    until = start + plan.windows * plan.compute * 1.25
    while windows < count if case.together else time.perf_counter() < until:
        window()
        windows += 1
    if case.together:
        world.barrier()  # windows after the last exchange would not be waited for: in a long run they are
    seconds = time.perf_counter() - start
    totals = world.ledger.totals(last=windows)
    ahead = replica.staleness()["ahead"] if hasattr(replica, "staleness") else {}
    replica.close()  # not after a barrier: those that wait for a slow one go on when it has left
    world.barrier()
    return {
        "windows": windows,
        "seconds": seconds,
        "still": totals.communication + totals.waiting,
        "communication": totals.communication,
        "hidden": totals.hidden,
        "ahead": [[k, v] for k, v in ahead.items()],
    }


def joined(runs: list[dict[str, Any]]) -> Found:
    """What all workers did in a run."""
    others = runs[: WORKERS - 1]
    hidden, open_ = (sum(r[key] for r in runs) for key in ("hidden", "communication"))
    ahead: dict[int, int] = {}
    for k, v in (pair for r in runs for pair in r["ahead"]):
        ahead[k] = ahead.get(k, 0) + v
    return Found(
        windows=statistics.mean(r["windows"] / r["seconds"] for r in others),
        samples=sum(r["windows"] / r["seconds"] for r in runs) * BATCH,
        still=statistics.mean(r["still"] / max(1, r["windows"]) for r in others),
        hidden=hidden / (hidden + open_) if hidden + open_ > 0 else float("nan"),
        ahead=dict(sorted(ahead.items())),
    )


def work(names: list[str], plan: Plan) -> list[list[Any]]:
    """In each worker: everything, in turn."""
    import unisono as un

    world, found = un.join(device="cpu"), []
    for i in range(plan.rounds):
        for name in names:
            for slow in (False, True):
                began = time.perf_counter()
                run = joined(world.gather_objects(train(name, slow, plan, world)))
                found.append([name, slow, [*run[:4], [[k, v] for k, v in run.ahead.items()]]])
                if world.rank == 0:
                    told = f"{run.windows:.2f} windows/s, {run.samples:.0f} samples/s"
                    how = "one slow" if slow else "all alike"
                    took = f"({time.perf_counter() - began:.1f} s)"
                    print(f"[{i + 1}/{plan.rounds}] {name}, {how}: {told} {took}", flush=True)
    return found


def medians(rows: list[list[Any]]) -> dict[tuple[str, bool], Found]:
    """Over the rounds; histograms are added up."""
    groups: dict[tuple[str, bool], list[list[Any]]] = {}
    for name, slow, run in rows:
        groups.setdefault((name, slow), []).append(run)
    made = {}
    for key, runs in groups.items():
        ahead: dict[int, int] = {}
        for k, v in (pair for run in runs for pair in run[4]):
            ahead[k] = ahead.get(k, 0) + v
        made[key] = Found(*(statistics.median(run[i] for run in runs) for i in range(4)), dict(sorted(ahead.items())))
    return made


def table(found: dict[tuple[str, bool], Found], names: list[str]) -> str:
    """Markdown."""
    rows = ["| strategy | windows/s | one slow | kept | samples/s, one slow | over all-reduce | ms still | hidden |"]
    rows.append("|---|---:|---:|---:|---:|---:|---:|---:|")
    base = found["allreduce", True].samples
    for name in names:
        a, b = found[name, False], found[name, True]
        hidden = f"{a.hidden:.2f}" if a.hidden == a.hidden else ""
        cells = (f"{b.windows:.2f}", f"{b.windows / a.windows:.2f}", f"{b.samples:.0f}", f"{b.samples / base:.2f}")
        rows.append(f"| {name} | {a.windows:.2f} | {' | '.join(cells)} | {a.still * 1e3:.1f} | {hidden} |")
    rows.append("")
    rows.append("windows/s: of each worker that is not slow. ms still: what a window of theirs stood still for")
    rows.append("communication and waiting, all workers alike; hidden: the share of communication behind compute.")
    return "\n".join(rows)


def histograms(found: dict[tuple[str, bool], Found]) -> str:
    """How far ahead of the slowest worker windows began, one of them slow."""
    lines = ["windows ahead of the slowest worker, one of them slow (how many windows were so far ahead):"]
    for (name, slow), run in found.items():
        if slow and run.ahead and name != "parameter_server_0":
            lines.append(f"  {name}: " + ", ".join(f"{k}: {v}" for k, v in run.ahead.items()))
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=CASES, metavar="NAME", help=f"of {', '.join(CASES)}")
    parser.add_argument("--rounds", type=int, help=f"(default: {Plan().rounds})")
    parser.add_argument("--quick", action="store_true", help="one short round: does it run")
    asked = parser.parse_args()
    plan = Plan(rounds=1, compute=0.03, windows=8) if asked.quick else Plan()
    plan = plan._replace(rounds=asked.rounds or plan.rounds)
    names = [n for n in CASES if not asked.only or n in asked.only or n == "allreduce"]
    import unisono as un

    start = time.perf_counter()
    found = medians(un.launch(work, workers=WORKERS, args=(names, plan), threads=1)[0])
    print(f"\n{table(found, names)}\n\n{histograms(found)}\n\n({time.perf_counter() - start:.0f} s)")
    results: dict[str, Any] = {}
    for name in names:
        alike, slowed = found[name, False], found[name, True]
        if name != "allreduce":
            results[f"over_allreduce_{name}"] = slowed.samples / found["allreduce", True].samples
        results[f"kept_{name}"] = slowed.windows / alike.windows
        if name in ("parameter_server_4", "parameter_server_64"):
            results[f"ahead_{name}"] = max(slowed.ahead)
    for key, name in (("hidden_diloco", "diloco_streaming"), ("hidden_gossip", "gossip")):
        if name in names:
            results[key] = found[name, False].hidden
    finish(results)


if __name__ == "__main__":
    main()
