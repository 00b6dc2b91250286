"""How long the stages of a pipeline stand still, against the formula of their schedule: (p - 1) / (m + p - 1) of 1F1B.

Keys: bubble_S_P for schedule S (gpipe, 1f1b, interleaved1f1b, interleavedzerobubble, zbvzerobubble) on P workers, of
stages of equal cost and M microbatches: the part of its time in which a rank computes nothing, the mean over the ranks,
the median over the steps. bubble_formula_S_P: what its order costs at best. bubble_error_P: how far that of 1f1b
is from the formula, as a part of it. bubble_S_slept_P: stages that sleep instead of computing, so that a busy machine
says little; bubble_error_slept_P is that of 1f1b. bubble_S_imbalance_P, bubble_S_uneven_P, bubble_S_messages_P: what
makes the difference. Each worker has one thread: run it on a machine with a core for each, and nothing else. A stage
computes for about 0.1 s a microbatch, as the sleeping ones do; a message of 0.5 MB and what torch does between two
computations take some 0.7 ms, which of shorter stages is more.
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

LAYERS, WIDTH, ROWS = 24, 512, 256
SLEEP_S = 0.03
SCHEDULES = ("GPipe", "1F1B", "Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble")


def measure(schedule: str, microbatches: int, steps: int, sleeps: bool) -> tuple[list[float], dict[str, Any]]:
    """The idle part of each step's schedule on this rank, and what the bubble is made of."""
    import torch
    from torch import nn

    import unisono as un

    torch.set_num_threads(1)
    mesh = un.mesh(data=1, pipeline=-1)
    chunks = 1 if schedule in ("GPipe", "1F1B") else 2
    model = nn.Sequential(*[make_block(sleeps, chunks) for _ in range(chunks * mesh.sizes[2])])
    x = torch.randn(microbatches * ROWS, WIDTH, requires_grad=True)  # so that the first stage works as the others do
    y = torch.randn(microbatches * ROWS, WIDTH)
    pipe = mesh.pipe(model, x[:ROWS], nn.functional.mse_loss, microbatches=microbatches, schedule=schedule)
    optimizer = torch.optim.SGD(pipe.module.parameters(), lr=1e-3)
    un.parallel(pipe.module, optimizer, world=mesh.data)
    parts = []
    idle_s = seconds = 0.0
    for step in range(steps + 3):
        optimizer.zero_grad()
        x.grad = None
        mesh.world.barrier()
        pipe.step(x, y)
        if step >= 3:  # the first ones meet, and learn shapes: from here on the bubble counts anew
            parts.append((pipe.bubble.idle_s - idle_s) / (pipe.bubble.seconds - seconds))
            idle_s, seconds = pipe.bubble.idle_s, pipe.bubble.seconds
        optimizer.step()
    return parts, pipe.bubble.describe()


def make_block(sleeps: bool, chunks: int) -> Any:
    """A stage: matrix products, or sleep of the same length on every machine; of several a rank, each is shorter."""
    import torch
    from torch import nn

    class Sleep(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            time.sleep(SLEEP_S / chunks)
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Any) -> Any:  # type: ignore[override]
            time.sleep(2 * SLEEP_S / chunks)
            return grad.clone()

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            many = [m for _ in range(LAYERS // chunks) for m in (nn.Linear(WIDTH, WIDTH), nn.Tanh())]
            self.layers = nn.Linear(WIDTH, 1) if sleeps else nn.Sequential(*many)

        def forward(self, x: Any) -> Any:
            return Sleep.apply(x * self.layers(x)) if sleeps else self.layers(x)

    return Block()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--workers", "--stages", type=int, nargs="*", help="default: 2, and 4 where there are as many cores"
    )
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--schedules", nargs="+", default=list(SCHEDULES), choices=list(SCHEDULES))
    args = parser.parse_args()
    cores = len(os.sched_getaffinity(0))
    results: dict[str, Any] = {"microbatches": args.microbatches, "cores": cores}
    for count in args.workers or [n for n in (2, 4) if n <= cores]:
        for schedule in args.schedules:
            for sleeps in (False, True):
                results |= compare(schedule, count, sleeps, args)
        for slept in ("", "_slept"):
            if (key := f"bubble_1f1b{slept}_{count}") in results:
                ideal = results[f"bubble_formula_1f1b_{count}"]
                results[f"bubble_formula_{count}"] = ideal
                results[f"bubble_error{slept}_{count}"] = abs(results[key] / ideal - 1.0)
    finish(results)


def compare(schedule: str, count: int, sleeps: bool, args: argparse.Namespace) -> dict[str, Any]:
    """One schedule on so many workers, beside its formula."""
    import unisono as un

    given = (schedule, args.microbatches, args.steps, sleeps)
    every = un.launch(measure, count, args=given, threads=1, timeout_s=600)
    found = statistics.median(statistics.mean(step) for step in zip(*(parts for parts, _ in every), strict=True))
    told = every[0][1]
    name, slept = schedule.lower(), "_slept" if sleeps else ""
    why = {part: round(told[part], 4) for part in ("imbalance", "uneven", "messages")}
    print(f"{name}{slept}, {count}: {found:.4f} of its time, by formula {told['ideal']:.4f}; {why}", file=sys.stderr)
    return {
        f"bubble_{name}{slept}_{count}": found,
        f"bubble_formula_{name}_{count}": told["ideal"],
        **{f"bubble_{name}{slept}_{part}_{count}": value for part, value in why.items()},
    }


if __name__ == "__main__":
    main()
