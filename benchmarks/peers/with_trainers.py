"""Accelerate and Lightning: their step over gloo, over our backend of torch.distributed, and with our methods.

    pip install accelerate transformers lightning    in an environment of its own, beside this package
    python benchmarks/peers/with_trainers.py

Keys: LIBRARY_gloo_s, LIBRARY_backend_s, LIBRARY_ours_s: median seconds of a step of the 25 M-parameter MLP with fused
AdamW on 2 workers of one thread; LIBRARY_gloo_over_backend and LIBRARY_gloo_over_ours. A process has one kind of
process group, so each side has workers of its own, in turn, `--rounds` times. Lightning's step
includes loading a batch.
"""

from __future__ import annotations

import argparse
import importlib.util
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from measure import finish
from step import adamw, mlp

SIDES = ("gloo", "backend", "ours")
WARMUP = 3
PACKAGES = {"accelerate": ("accelerate", "transformers"), "lightning": ("lightning",)}


def accelerate_steps(side: str, steps: int) -> list[float]:
    """In each worker: seconds of each step of a loop as Accelerate's documentation writes it."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    if side == "ours":
        from unisono.huggingface import Accelerator
    else:
        from accelerate import Accelerator

        dist.init_process_group("gloo" if side == "gloo" else "unisono")
    accelerator = Accelerator(cpu=True)
    model, x, y = mlp()
    model, optimizer = accelerator.prepare(model, adamw(model.parameters()))
    taken = []
    for _ in range(steps):
        start = time.perf_counter()
        optimizer.zero_grad()
        accelerator.backward(torch.nn.functional.mse_loss(model(x), y))
        optimizer.step()
        taken.append(time.perf_counter() - start)
    return taken


def lightning_steps(side: str, steps: int) -> list[float]:
    """In each worker: seconds between the ends of Lightning's steps."""
    import lightning.pytorch as pl
    import torch
    from lightning.pytorch.strategies import DDPStrategy
    from torch.utils.data import DataLoader, TensorDataset

    torch.set_num_threads(1)
    ends = []

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = mlp()[0]

        def training_step(self, batch: Any, index: int) -> Any:
            return torch.nn.functional.mse_loss(self.net(batch[0]), batch[1])

        def on_train_batch_end(self, *_: Any) -> None:
            ends.append(time.perf_counter())

        def configure_optimizers(self) -> Any:
            return adamw(self.parameters())

    if side == "ours":
        import unisono.lightning

        many: dict[str, Any] = {"strategy": unisono.lightning.Strategy("allreduce")}
    else:
        backend = "gloo" if side == "gloo" else "unisono"
        many = {"strategy": DDPStrategy(process_group_backend=backend), "devices": 2}
    rows = 2 * 8 * (steps + 1)
    loader = DataLoader(TensorDataset(torch.randn(rows, 2048), torch.randn(rows, 2048)), batch_size=8)
    pl.Trainer(max_steps=steps + 1, accelerator="cpu", barebones=True, **many).fit(Module(), loader)
    return [b - a for a, b in pairwise(ends)]


def compare(steps_of: Callable[[str, int], list[float]], steps: int, rounds: int) -> dict[str, float]:
    """Median seconds of a step of each side; of two workers, the slower one's."""
    import unisono as un

    taken: dict[str, list[float]] = {side: [] for side in SIDES}
    for _ in range(rounds):
        for side in SIDES:
            by_rank = un.launch(partial(steps_of, side, WARMUP + steps), workers=2, threads=1, output="rank0")
            taken[side] += [max(both) for both in zip(*by_rank, strict=True)][WARMUP:]
    return {side: statistics.median(found) for side, found in taken.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--only", nargs="+", choices=PACKAGES, default=list(PACKAGES))
    asked = parser.parse_args()
    from importlib.metadata import version

    results: dict[str, Any] = {}
    for name in asked.only:
        missing = [package for package in PACKAGES[name] if importlib.util.find_spec(package) is None]
        if missing:
            print(f"skipped: {name}: pip install {' '.join(missing)}, in an environment of its own")
            continue
        steps_of = accelerate_steps if name == "accelerate" else lightning_steps
        seconds = compare(steps_of, asked.steps, asked.rounds)
        results |= {f"{name}_{side}_s": found for side, found in seconds.items()} | {name: version(name)}
        results |= {f"{name}_gloo_over_{side}": seconds["gloo"] / seconds[side] for side in SIDES[1:]}
    if results:
        finish(results)


if __name__ == "__main__":
    main()
