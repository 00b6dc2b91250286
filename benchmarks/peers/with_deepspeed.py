"""DeepSpeed's ZeRO beside ours, on CPU ranks, both in one run.

    pip install deepspeed==0.19.8    in an environment of its own, beside this package
    python benchmarks/peers/with_deepspeed.py

Keys: deepspeed_zero_{1,2,3}_s, ours_zero_{1,2,3}_s and deepspeed_over_ours_zero_{1,2,3}: median seconds of a step of
the 25 M-parameter MLP with torch's AdamW on 2 ranks, one thread each, in the same processes, in turn. DeepSpeed's
buckets are its defaults, its collectives gloo's.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from measure import finish, interleaved
from step import adamw, mlp


def deepspeed_trainer(stage: int) -> Any:
    """A step as DeepSpeed's documentation writes it."""
    import deepspeed
    import torch

    torch.manual_seed(int(os.environ["RANK"]))  # samples of its own; rank 0's model is everyone's
    model, x, y = mlp()
    config = {
        "train_micro_batch_size_per_gpu": len(x),
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    engine, *_ = deepspeed.initialize(model=model, optimizer=adamw(model.parameters()), config=config)

    def step() -> None:
        engine.backward(torch.nn.functional.mse_loss(engine(x), y))
        engine.step()

    return step


def our_trainer(stage: int) -> Any:
    import torch

    import unisono as un

    torch.manual_seed(int(os.environ["RANK"]))
    model, x, y = mlp()
    optimizer = adamw(model.parameters())
    un.parallel(model, optimizer, f"zero(stage={stage})")

    def step() -> None:
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()

    return step


def compare(stage: int, repeats: int) -> dict[str, float]:
    """In each worker: both sides in turn."""
    import torch

    import unisono as un

    torch.set_num_threads(1)
    world = un.join(device="cpu")
    import deepspeed

    deepspeed.init_distributed(dist_backend="gloo")
    sides = {"deepspeed": deepspeed_trainer(stage), "ours": our_trainer(stage)}
    return interleaved(sides, repeats=repeats, warmup=3, before=world.barrier)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=15)
    asked = parser.parse_args()
    if importlib.util.find_spec("deepspeed") is None:
        print("skipped: deepspeed is not installed here; pip install deepspeed, in an environment of its own")
        return
    os.environ["DS_ACCELERATOR"] = "cpu"
    from importlib.metadata import version

    import unisono as un

    results: dict[str, Any] = {}
    for stage in (1, 2, 3):
        by_rank = un.launch(partial(compare, stage, asked.repeats), workers=2, threads=1, output="rank0")
        seconds = {side: max(found[side] for found in by_rank) for side in by_rank[0]}
        results |= {f"{side}_zero_{stage}_s": found for side, found in seconds.items()}
        results[f"deepspeed_over_ours_zero_{stage}"] = seconds["deepspeed"] / seconds["ours"]
    finish(results | {"deepspeed": version("deepspeed")})


if __name__ == "__main__":
    main()
