"""What a slow worker costs, and how much of it `un.shard(balance=True)` wins back: one host, a thread a worker.

The last worker is 4 times as slow from the first step on, by a fault script ("slow 1 x4@1-300"). Three sides are run in
turn, several rounds: undisturbed, slow, and slow with samples dealt by speed. A step's time is the median over the last
third of a run, when the shares have come to rest; the results are medians over the rounds. 4 workers are run too where
there are 4 cores.

Keys, for 2 workers (and for 4, with _4 at the end):
  step_ms_undisturbed, step_ms_slow, step_ms_balanced  milliseconds a step
  recovered_share  (slow - balanced) / (slow - undisturbed)
  possible_share   the same, if samples cost all of a step: N - 1 workers of speed 1 and one of 1/4 share a batch
  samples_slow     of a batch that the slow worker has in the end, balanced
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from measure import finish

SLOWER, EACH, WIDTH = 4, 128, 768  # times as slow; samples a worker; width of the model


def train(steps: int, balance: bool) -> tuple[float, float]:
    """In each worker: milliseconds a step at the end, and its samples then."""
    import torch

    import unisono as un

    torch.set_num_threads(1)
    torch.manual_seed(0)
    world = un.join(device="cpu")
    layers = [torch.nn.Linear(WIDTH, WIDTH), torch.nn.ReLU(), torch.nn.Linear(WIDTH, WIDTH), torch.nn.ReLU()]
    model = torch.nn.Sequential(*layers, torch.nn.Linear(WIDTH, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    un.parallel(model, optimizer)
    x = torch.randn(16 * EACH * world.size, WIDTH)
    step, weight = 0, 1.0
    while step < steps:
        for batch in un.shard(x, EACH * world.size, balance=balance):
            weight = world.weight
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            optimizer.step()
            step += 1
            if step == steps:
                break
    walls = [row.wall for row in world.ledger.rows]
    return statistics.median(walls[-(steps // 3) :]) * 1e3, weight * EACH


def measure(workers: int, rounds: int, steps: int) -> dict[str, float]:
    """All sides in turn."""
    import unisono as un

    script = f"slow {workers - 1} x{SLOWER}@1-{steps}"
    sides: dict[str, dict[str, Any]] = {
        "undisturbed": {"balance": False, "faults": ""},
        "slow": {"balance": False, "faults": script},
        "balanced": {"balance": True, "faults": script},
    }
    taken: dict[str, list[float]] = {name: [] for name in sides}
    samples: list[float] = []
    for _ in range(rounds):
        for name, side in sides.items():
            found = un.launch(train, workers=workers, args=(steps, side["balance"]), threads=1, faults=side["faults"])
            taken[name].append(statistics.median(ms for ms, _ in found))
            samples += [found[-1][1]] if side["balance"] else []
    ms = {name: statistics.median(values) for name, values in taken.items()}
    best = workers / (workers - 1 + 1 / SLOWER)
    return {
        **{f"step_ms_{name}": value for name, value in ms.items()},
        "recovered_share": (ms["slow"] - ms["balanced"]) / (ms["slow"] - ms["undisturbed"]),
        "possible_share": (SLOWER - best) / (SLOWER - 1),
        "samples_slow": statistics.median(samples),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=300)
    asked = parser.parse_args()
    if asked.steps < 150:
        parser.error("--steps: at least 150, so that the shares come to rest before the last third")
    from unisono.launchers.runtime.machine import usable_cores

    results: dict[str, float] = {"rounds": asked.rounds, "steps": asked.steps, "cores": usable_cores()}
    results |= measure(2, asked.rounds, asked.steps)
    if usable_cores() >= 4:
        results |= {f"{name}_4": value for name, value in measure(4, asked.rounds, asked.steps).items()}
    finish(results)


if __name__ == "__main__":
    main()
