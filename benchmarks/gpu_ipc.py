"""Ranks that share one GPU: all-reduces through each other's device memory, through the host (where memory cannot be
mapped), and by gloo; and the step of a model under each.

Keys end in the number of ranks. host_over_ipc_*, gloo_over_ipc_*: the others' time over ours, in turn in the same
processes, on tensors of any origin. share_of_copy_*: the bytes that an all-reduce of 100 MB has to move (each rank's
tensor read once and written once) over its time, as a share of what `copy_` of 100 MB moves (bytes read and written)
in its own time, without its launch; *_after_work: after kernels of every rank, as in training, when the device has to
change between processes. step_*: a step of an MLP of 25 M parameters; ipc_after exchanges after backward.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from measure import finish, interleaved

ROW = 10  # of our all-reduces, timed together
SIZES = {"100mb": 25_000_000, "1mb": 250_000, "4b": 1}


def measure(repeats: int) -> dict[str, float]:
    """In each worker."""
    import torch
    import torch.distributed as dist

    import unisono as un

    world = un.join(device="cuda:0")
    assert world.transport is not None
    every = [list(range(world.size))]
    by_host = un.World(world.transport.split(every), device=world.device, hosts=world.hosts, name="host")
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    mapped = world._operations.accelerated
    found: dict[str, float] = {"maps": float(mapped is not None and mapped.name == "CUDA IPC")}
    stream = torch.cuda.current_stream()

    def ended(run: Callable[[], Any]) -> Callable[[], None]:
        def both() -> None:
            run()
            stream.synchronize()

        return both

    def meet() -> None:
        torch.cuda.synchronize()
        by_host.barrier()

    for name, n in SIZES.items():
        x = torch.ones(n, device="cuda")
        ours = ended(lambda x=x: world.all_reduce(x, "mean").wait())
        host = ended(lambda x=x: by_host.all_reduce(x, "mean").wait())
        gloo = ended(lambda x=x: dist.all_reduce(x, dist.ReduceOp.MAX))
        few = 2 if name == "100mb" else repeats // 4
        slow = interleaved({"host": host, "gloo": gloo, "ours": ours}, repeats=few, warmup=1, before=meet)
        fast = interleaved({"ours": lambda run=ours: [run() for _ in range(ROW)]}, repeats=repeats, before=meet)["ours"]
        found |= {f"host_{name}_s": slow["host"], f"gloo_{name}_s": slow["gloo"], f"ipc_{name}_s": fast / ROW}
    x = torch.ones(SIZES["100mb"], device="cuda")
    times = []
    for _ in range(repeats):
        x.mul_(1.0)
        meet()
        start = time.perf_counter()
        x.mul_(1.0)
        world.all_reduce(x, "mean").wait()
        stream.synchronize()
        times.append(time.perf_counter() - start)
    found["ipc_after_work_s"] = statistics.median(times)
    meet()
    if world.rank == 0:
        y, copies = torch.empty_like(x), []
        for _ in range(50):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            y.copy_(x)
            end.record()
            end.synchronize()
            copies.append(begin.elapsed_time(end) / 1e3)
        found["copy_s"] = statistics.median(copies)
    by_host.barrier()
    found |= measure_steps(world, by_host, meet, repeats)
    dist.destroy_process_group()
    return found


def measure_steps(world: Any, by_host: Any, meet: Callable[[], None], repeats: int) -> dict[str, float]:
    import torch
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel

    import unisono as un

    def make() -> nn.Module:
        torch.manual_seed(0)
        layers = [layer for _ in range(6) for layer in (nn.Linear(2048, 2048), nn.ReLU())]
        return nn.Sequential(*layers).cuda()

    def step_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[], None]:
        torch.manual_seed(1 + world.rank)
        x = torch.randn(256, 2048, device="cuda")

        def step() -> None:
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
            torch.cuda.current_stream().synchronize()

        return step

    sides = {}
    for name, used in (("ipc", world), ("ipc_after", world), ("host", by_host), ("ddp_gloo", None), ("bare", None)):
        model: nn.Module = make()
        if name == "ddp_gloo":
            model = DistributedDataParallel(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        if used is not None:
            un.parallel(model, optimizer, "allreduce", world=used, overlap=name == "ipc")
        sides[name] = step_of(model, optimizer)
    seconds = interleaved(sides, repeats=max(3, repeats // 6), warmup=2, before=meet)
    return {f"step_{name}_s": taken for name, taken in seconds.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    asked = parser.parse_args()
    import torch

    import unisono as un

    if not torch.cuda.is_available():
        finish({"skipped": "needs a CUDA device"})
        return
    results: dict[str, Any] = {}
    for ranks in asked.ranks:
        found = un.launch(measure, workers=ranks, args=(asked.repeats,), threads=1)[0]
        results[f"maps_{ranks}"] = bool(found["maps"])
        for name in SIZES:
            ours = found[f"ipc_{name}_s"]
            results[f"host_over_ipc_{name}_{ranks}"] = found[f"host_{name}_s"] / ours
            results[f"gloo_over_ipc_{name}_{ranks}"] = found[f"gloo_{name}_s"] / ours
            results[f"ipc_us_{name}_{ranks}"] = 1e6 * ours
        copy = ranks * found["copy_s"]
        results[f"copy_us_{ranks}"] = 1e6 * found["copy_s"]
        results[f"share_of_copy_{ranks}"] = copy / found["ipc_100mb_s"]
        results[f"share_of_copy_after_work_{ranks}"] = copy / found["ipc_after_work_s"]
        for name in ("ipc", "ipc_after", "host", "ddp_gloo", "bare"):
            results[f"step_ms_{name}_{ranks}"] = 1e3 * found[f"step_{name}_s"]
    finish(results)


if __name__ == "__main__":
    main()
