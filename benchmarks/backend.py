"""PyTorch's own parallelism over the backend unisono and over gloo: the same programs, in the same processes, in turn.

Keys, on N = 2 and 4 workers of this host: ddp_gloo_over_unisono_N (DistributedDataParallel, 25 M-parameter MLP, batch 8
a worker), fsdp2_gloo_over_unisono_N (fully_shard on every layer, the same MLP), tensor_gloo_over_unisono_N
(parallelize_module on the MLPs of a transformer, column- and row-wise), pipeline_gloo_over_unisono_N (1F1B, one stage a
worker), allreduce_gloo_over_unisono_N (all_reduce of one 25 MB bucket). ours_allreduce_over_ddp_on_unisono_N: the step
of DDP over this backend, over that of `un.parallel(…, "allreduce")`.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from measure import finish, interleaved, keep_busy

WIDTH, LAYERS = 2048, 6
SIDES = ("gloo", "unisono")
Step = Callable[[], None]


def mlp() -> Any:
    """25.2 M parameters: memory-bound at batch 8."""
    from torch import nn

    layers = [m for _ in range(LAYERS) for m in (nn.Linear(WIDTH, WIDTH), nn.ReLU())]
    return nn.Sequential(*layers[:-1])


def trainer(
    model: Any, called: Any, rows: int = 8, width: int = WIDTH, wrap: Callable[[Any], Any] = lambda optimizer: None
) -> Step:
    """One training step as a function."""
    import torch

    x, y = torch.randn(rows, width), torch.randn(rows, width)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    wrap(optimizer)

    def step() -> None:
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(called(x), y).backward()
        optimizer.step()

    return step


def ddp(group: Any, mesh: Any) -> Step:
    import torch

    torch.manual_seed(int(os.environ["RANK"]))
    model = mlp()
    return trainer(model, torch.nn.parallel.DistributedDataParallel(model, process_group=group))


def fsdp2(group: Any, mesh: Any) -> Step:
    import torch
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(int(os.environ["RANK"]))
    model = mlp()
    for layer in model:
        if isinstance(layer, torch.nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return trainer(model, model)


def tensor(group: Any, mesh: Any) -> Step:
    """Six MLP blocks of a transformer of width 256 on 2,048 tokens, each cut by columns and then by rows: an all-reduce
    of 2 MB a block and direction."""
    import torch
    from torch import nn
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(256, 512), nn.GELU(), nn.Linear(512, 256)) for _ in range(LAYERS)]
    for block in blocks:
        parallelize_module(block, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    model = nn.Sequential(*blocks)
    return trainer(model, model, rows=2048, width=256)


def pipeline(group: Any, mesh: Any) -> Step:
    """A stage a worker, eight micro-batches, 1F1B."""
    import torch
    from torch import nn
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    torch.manual_seed(0)
    rank, size, width = group.rank(), group.size(), 1024
    layers = [m for _ in range(2) for m in (nn.Linear(width, width), nn.ReLU())]
    model = nn.Sequential(*layers)
    stage = PipelineStage(model, rank, size, torch.device("cpu"), group=group)
    schedule = Schedule1F1B(stage, n_microbatches=8, loss_fn=nn.functional.mse_loss)
    x, y = torch.randn(512, width), torch.randn(512, width)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def step() -> None:
        optimizer.zero_grad()
        if rank == 0:
            schedule.step(x)
        elif rank == size - 1:
            schedule.step(target=y, losses=[])
        else:
            schedule.step()
        optimizer.step()

    return step


def allreduce(group: Any, mesh: Any) -> Step:
    """One bucket of DDP's."""
    import torch
    import torch.distributed as dist

    x = torch.randn(25 << 18)
    return lambda: dist.all_reduce(x.mul_(0.5), group=group)


def ours() -> Step:
    import torch

    import unisono as un

    torch.manual_seed(int(os.environ["RANK"]))
    model = mlp()
    return trainer(model, model, wrap=lambda optimizer: un.parallel(model, optimizer, "allreduce"))


PROGRAMS = {"ddp": ddp, "fsdp2": fsdp2, "tensor": tensor, "pipeline": pipeline, "allreduce": allreduce}


def compare(name: str, repeats: int) -> dict[str, float]:
    """In each worker: one program over both backends in turn."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh

    import unisono as un

    world = un.join(device="cpu")
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    sides: dict[str, Step] = {}
    for backend in SIDES:
        group = dist.new_group(backend=backend)
        mesh = DeviceMesh.from_group(group, "cpu")
        sides[backend] = PROGRAMS[name](group, mesh)
    if name == "ddp":
        sides["ours"] = ours()
    seconds = interleaved(sides, repeats=repeats, warmup=5, before=world.barrier)
    dist.destroy_process_group()
    return seconds


def main() -> None:
    import unisono as un

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=40)
    parser.add_argument("--workers", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--programs", nargs="+", default=list(PROGRAMS), choices=list(PROGRAMS))
    parser.add_argument(
        "--busy", type=int, nargs="?", const=2, default=0, help="so many other processes compute meanwhile"
    )
    asked = parser.parse_args()
    results: dict[str, Any] = {"busy": asked.busy}
    with keep_busy(asked.busy):
        for workers in asked.workers:
            for name in asked.programs:
                seconds = un.launch(compare, workers=workers, args=(name, asked.repeats), threads=1)[0]
                print(f"{name}, {workers} workers: " + ", ".join(f"{k} {v * 1e3:.2f} ms" for k, v in seconds.items()))
                results[f"{name}_gloo_over_unisono_{workers}"] = seconds["gloo"] / seconds["unisono"]
                if name == "ddp":
                    results[f"ours_allreduce_over_ddp_on_unisono_{workers}"] = seconds["unisono"] / seconds["ours"]
    finish(results)


if __name__ == "__main__":
    main()
