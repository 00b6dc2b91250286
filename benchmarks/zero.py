"""Training steps of each ZeRO stage against FSDP2 used directly and DDP, in the same processes, in turn; then memory.

Keys: fsdp2_over_ours_S_N for stage S on N workers (25 M-parameter MLP, batch 8 a worker, AdamW), with `_text` for a
6 M-parameter transformer; ddp_over_ours_S_N; peak_over_formula_S_N: the peak of a worker's memory that the model
caused, measured in processes of their own, over what `un.memory` says.
FSDP2 is `fully_shard` on every block and on the model, with gloo: stages 1 and 2 keep parameters after forward.
With --optimizer muon, other keys: see muon_steps.py.
"""

from __future__ import annotations

import argparse
import os
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from measure import finish, interleaved

STAGES = (1, 2, 3)


def mlp(width: int = 2048) -> tuple[Any, Any, Any, Any]:
    """25.2 M parameters: memory-bound at batch 8."""
    import torch
    from torch import nn

    layers = [m for _ in range(6) for m in (nn.Linear(width, width), nn.ReLU())]
    model = nn.Sequential(*layers[:-1])
    return model, torch.randn(8, width), torch.randn(8, width), [m for m in model if isinstance(m, nn.Linear)]


def text() -> tuple[Any, Any, Any, Any]:
    """A transformer of 6.3 M parameters, 8 layers of width 256, on 4 sequences of 64: compute-bound."""
    import torch
    from torch import nn

    blocks = [
        nn.TransformerEncoderLayer(256, 4, 1024, dropout=0.0, batch_first=True, norm_first=True) for _ in range(8)
    ]
    return nn.Sequential(*blocks), torch.randn(4, 64, 256), torch.randn(4, 64, 256), blocks


def trainer(make: Any, side: str) -> Any:
    """One training step as a function."""
    import torch
    from torch.distributed.fsdp import fully_shard

    import unisono as un

    torch.manual_seed(int(os.environ.get("RANK", "0")))  # each rank has a batch of its own
    model, x, y, blocks = make()
    called = model
    if side.startswith("fsdp2"):
        for block in blocks:
            fully_shard(block, reshard_after_forward=side.endswith("3"))
        fully_shard(model, reshard_after_forward=side.endswith("3"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    if side == "ddp":
        called = torch.nn.parallel.DistributedDataParallel(model)
    elif side.startswith("ours"):
        un.parallel(model, optimizer, f"zero(stage={side[-1]})")

    def step() -> None:
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(called(x), y).backward()
        optimizer.step()

    return step


def compare(name: str, repeats: int) -> dict[str, float]:
    """In each worker: all sides in turn."""
    import torch.distributed as dist

    import unisono as un

    world = un.join(device="cpu")
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    names = ["ddp", *(f"{side}_{stage}" for stage in STAGES for side in ("fsdp2", "ours"))]
    sides = {side: trainer({"mlp": mlp, "text": text}[name], side) for side in names}
    seconds = interleaved(sides, repeats=repeats, warmup=4, before=world.barrier)
    dist.destroy_process_group()
    return seconds


def proportional_bytes() -> int:
    """Memory of this process; what it shares with others counts in part."""
    with open("/proc/self/smaps_rollup", encoding="ascii") as file:
        return next(int(line.split()[1]) << 10 for line in file if line.startswith("Pss:"))


def peak(stage: int) -> tuple[int, int]:
    """In a process of its own: the peak that training causes, seen every few milliseconds, and the prediction."""
    import threading

    import torch

    import unisono as un
    from unisono.launchers.runtime.machine import give_back_freed_memory

    world = un.join(device="cpu")
    warm = torch.nn.Linear(64, 64)  # libraries that come with the first use
    warm(torch.randn(2, 64)).sum().backward()
    torch.optim.AdamW(warm.parameters()).step()
    give_back_freed_memory()
    before, most, ended = proportional_bytes(), [0], threading.Event()

    def watch() -> None:
        while not ended.wait(0.003):
            most[0] = max(most[0], proportional_bytes())

    watcher = threading.Thread(target=watch)
    watcher.start()
    step = trainer(mlp, f"ours_{stage}")
    for _ in range(4):
        step()
    ended.set()
    watcher.join()
    model, x, y, _ = mlp()
    optimizer, loss = torch.optim.AdamW(model.parameters()), torch.nn.functional.mse_loss
    report = un.memory(model, optimizer, batch=(x, y), loss=loss, workers=world.size)
    return most[0] - before, report.need(f"zero(stage={stage})").device


def main() -> None:
    import unisono as un

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--workers", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--models", nargs="+", default=["mlp", "text"])
    parser.add_argument("--optimizer", choices=["adamw", "muon"], default="adamw")
    parser.add_argument("--strategy", default="zero(stage=2)", help="with muon: the method that is measured")
    parser.add_argument("--peer", help="with muon: a checkout of karpathy/nanochat (or NANOCHAT in the environment)")
    parser.add_argument("--layers", type=int, default=8, help="with muon: 8 make 25 M parameters")
    parser.add_argument("--gpu", action="store_true", help="with muon: one worker on a GPU, a GPT of 124 M parameters")
    parser.add_argument("--offload", action="store_true", help="with muon: only whether its offload is exact")
    options = parser.parse_args()
    if options.optimizer == "muon":
        import muon_steps

        muon_steps.main(options)
        return
    results: dict[str, Any] = {}
    for workers in options.workers:
        for name in options.models:
            each = un.launch(compare, workers=workers, args=(name, options.repeats), threads=1)
            seconds = {side: max(found[side] for found in each) for side in each[0]}
            tail = f"_{workers}" if name == "mlp" else f"_{name}_{workers}"
            for side, taken in seconds.items():
                print(f"{name} {workers} workers {side}: {1e3 * taken:.1f} ms")
                results[f"{side}_s{tail}"] = taken
            for stage in STAGES:
                ours = seconds[f"ours_{stage}"]
                results[f"fsdp2_over_ours_{stage}{tail}"] = seconds[f"fsdp2_{stage}"] / ours
                results[f"ddp_over_ours_{stage}{tail}"] = seconds["ddp"] / ours
        for stage in STAGES:
            found = un.launch(peak, workers=workers, args=(stage,), threads=1)
            measured, predicted = max(m for m, _ in found), found[0][1]
            print(f"{workers} workers stage {stage}: peak {measured / 1e6:.1f} MB, predicted {predicted / 1e6:.1f} MB")
            results[f"peak_over_formula_{stage}_{workers}"] = measured / predicted
    finish(results)


if __name__ == "__main__":
    main()
