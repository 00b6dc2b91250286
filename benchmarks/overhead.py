"""What it costs to watch a run: marks on collectives, parameters compared, the watchdog, slow ranks, and recording.

Two workers train with steps of about 20 ms, in turn with everything on and with everything off (UNISONO_CHECKS=off, no
record), in the same processes. Keys: overhead (seconds of a step on over off, less one: the median of pairs of blocks;
at most 0.01), overhead_mean (of all blocks together), step_s, mark_us (on a collective), check_us (a comparison of
parameters, which comes every 20 steps or 0.4 s).
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from measure import finish

STEP_S = 0.020
BLOCK = 40  # steps


def make_model() -> tuple[Any, Any]:
    """Ten layers with 1.1 M parameters."""
    import torch
    from torch import nn

    layers = [m for _ in range(10) for m in (nn.Linear(330, 330), nn.Tanh())]
    model = nn.Sequential(*layers)
    return model, torch.optim.SGD(model.parameters(), lr=1e-3)


def train(pairs: int, folder: str) -> dict[str, Any]:
    """In each worker: blocks of steps in turn, with a replica of their own."""
    import torch

    import unisono as un

    os.environ["UNISONO_RUN_FOLDER"] = folder
    world = un.join(device="cpu")
    torch.manual_seed(0)
    model, optimizer = make_model()
    data = torch.randn(4096, 330, generator=torch.Generator().manual_seed(world.rank))

    def run_block(samples: int, steps: int) -> float:
        batches = [data[i * 8 % 2048 : i * 8 % 2048 + samples] for i in range(steps)]
        start = time.perf_counter()
        for x in batches:
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
        return (time.perf_counter() - start) / steps

    def time_side(side: str, samples: int, recorder: list[Any]) -> float:
        """A block with everything on, or off."""
        os.environ["UNISONO_CHECKS"] = side
        if side == "off":
            recorder[:] = [world.ledger.listener]
            world.ledger.listener = None
        replica = un.parallel(model, optimizer, "allreduce")
        run_block(samples, 3)
        world.barrier()
        seconds = run_block(samples, BLOCK)
        replica.close()
        if side == "off":
            world.ledger.listener = recorder[0]
        return seconds

    kept: list[Any] = []
    samples = 32
    for _ in range(6):  # as many samples as take so long
        took = torch.tensor([time_side("on", samples, kept)])
        samples = max(1, min(2048, round(samples * STEP_S / world.all_reduce(took, "mean").wait().item())))
    sides: dict[str, list[float]] = {"on": [], "off": []}
    for i in range(pairs):
        for side in ("on", "off") if i % 2 else ("off", "on"):
            sides[side].append(time_side(side, samples, kept))
    os.environ["UNISONO_CHECKS"] = "on"
    is_recorded = any(Path(folder).glob("ranks/*.jsonl"))
    return {**sides, "samples": samples, "recorded": is_recorded}


def time_parts() -> dict[str, float]:
    """Microseconds of what is done for a collective, and for a comparison of parameters, each alone."""
    import torch

    from unisono.methods.strategy import parameter_watch
    from unisono.world.transports.silent import SilentTransport
    from unisono.world.world import World

    def best_us(run: Any, count: int, repeats: int = 60) -> float:
        found = []
        for _ in range(repeats):
            start = time.perf_counter()
            for _ in range(count):
                run()
            found.append((time.perf_counter() - start) / count)
        return min(found) * 1e6

    x, took = torch.ones(8), {}
    for side in ("on", "off"):
        os.environ["UNISONO_CHECKS"] = side
        world = World(SilentTransport(0, 2, lambda *_: None, hosts=["a"] * 2, posts=True), hosts=["a"] * 2)
        took[side] = best_us(lambda world=world: world.all_reduce(x, "max", tag="used").wait(), 100)
    os.environ["UNISONO_CHECKS"] = "on"
    model, _ = make_model()
    chunks = parameter_watch._divide(parameter_watch._list_chunks(model))[0]
    check_us = best_us(lambda: parameter_watch._sum_up(chunks).tolist(), 5)
    return {"mark_us": took["on"] - took["off"], "check_us": check_us}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=40, help="blocks of 40 steps on each side")
    asked = parser.parse_args()
    import unisono as un

    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "ranks").mkdir()
        found = un.launch(train, workers=2, args=(asked.pairs, folder), threads=1)
    on, off = (
        [statistics.fmean(each) for each in zip(*(f[side] for f in found), strict=True)] for side in ("on", "off")
    )
    results = {
        "overhead": statistics.median(a / b for a, b in zip(on, off, strict=True)) - 1,
        "overhead_mean": sum(on) / sum(off) - 1,
        "step_s": statistics.median(off),
        "samples": found[0]["samples"],
        "recorded": found[0]["recorded"],
        **time_parts(),
    }
    for name, value in results.items():
        print(f"{name:>14}: {value:.4g}" if isinstance(value, float) else f"{name:>14}: {value}")
    finish(results)


if __name__ == "__main__":
    main()
