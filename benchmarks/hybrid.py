"""How long the stages of a pipeline stand still, against the formula: (p - 1) / (m + p - 1) of a step.

Keys: bubble_S_P for schedule S (gpipe, 1f1b) on P stages of equal cost and M microbatches: the part of a step in which
a stage computes nothing, the mean over the stages, the median over the steps. bubble_error_P: how far that of 1f1b is
from the formula, as a part of it. bubble_1f1b_slept_P: stages that sleep instead of computing, so that a busy machine
says little. Each stage has one thread: run it on a machine with a core for each, and nothing else.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from measure import finish

LAYERS, WIDTH, ROWS = 6, 512, 256
SLEEP_S = 0.03


def measure(schedule: str, microbatches: int, steps: int, sleeps: bool) -> list[float]:
    """The idle part of each step on this stage."""
    import torch
    from torch import nn

    import unisono as un

    torch.set_num_threads(1)
    mesh = un.mesh(data=1, pipeline=-1)
    model = nn.Sequential(*[make_block(sleeps) for _ in range(mesh.sizes[2])])
    x = torch.randn(microbatches * ROWS, WIDTH, requires_grad=True)  # so that the first stage works as the others do
    y = torch.randn(microbatches * ROWS, WIDTH)
    pipe = mesh.pipe(model, x[:ROWS], nn.functional.mse_loss, microbatches=microbatches, schedule=schedule)
    optimizer = torch.optim.SGD(pipe.module.parameters(), lr=1e-3)
    un.parallel(pipe.module, optimizer, world=mesh.data)
    parts = []
    for step in range(steps + 3):
        optimizer.zero_grad()
        x.grad = None
        pipe.bubble.clear()
        mesh.world.barrier()
        pipe.step(x, y)
        if step >= 3:  # the first ones meet, and learn shapes
            parts.append(pipe.bubble.fraction)
        optimizer.step()
    return parts


def make_block(sleeps: bool) -> Any:
    """A stage: matrix products, or sleep of the same length on every machine."""
    import torch
    from torch import nn

    class Sleep(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            time.sleep(SLEEP_S)
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Any) -> Any:  # type: ignore[override]
            time.sleep(2 * SLEEP_S)
            return grad.clone()

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            many = [m for _ in range(LAYERS) for m in (nn.Linear(WIDTH, WIDTH), nn.Tanh())]
            self.layers = nn.Linear(WIDTH, 1) if sleeps else nn.Sequential(*many)

        def forward(self, x: Any) -> Any:
            return Sleep.apply(x * self.layers(x)) if sleeps else self.layers(x)

    return Block()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stages", type=int, nargs="*", help="default: 2, and 4 where there are as many cores")
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--steps", type=int, default=20)
    args = parser.parse_args()
    import unisono as un

    cores = len(os.sched_getaffinity(0))
    results: dict[str, Any] = {"microbatches": args.microbatches, "cores": cores}
    for count in args.stages or [n for n in (2, 4) if n <= cores]:
        ideal = (count - 1) / (args.microbatches + count - 1)
        for schedule, sleeps in (("GPipe", False), ("1F1B", False), ("1F1B", True)):
            given = (schedule, args.microbatches, args.steps, sleeps)
            every = un.launch(measure, count, args=given, threads=1, timeout_s=600)
            found = statistics.median(statistics.mean(step) for step in zip(*every, strict=True))
            name = f"{schedule.lower()}{'_slept' if sleeps else ''}_{count}"
            print(f"{name}: {found:.4f} of a step, by formula {ideal:.4f}", file=sys.stderr)
            results[f"bubble_{name}"] = found
        results[f"bubble_formula_{count}"] = ideal
        results[f"bubble_error_{count}"] = abs(results[f"bubble_1f1b_{count}"] / ideal - 1.0)
    finish(results)


if __name__ == "__main__":
    main()
