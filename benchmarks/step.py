"""A full training step against DistributedDataParallel and against the bare loop, in the same processes, in turn.

Keys: ddp_over_ours_2 and _4 (25 M-parameter MLP, batch 8 a worker), ddp_over_ours_cnn_2 (compute-bound CNN),
world_of_one_overhead (our loop over the bare loop, less one), ledger_overhead (what recording a step costs, as a share
of our step on 2 workers). With --gpu: ddp_over_ours_gpu in a world of one.

--gpt: a loop as one trains GPT-2 (124 M parameters, 16 x 1024 tokens a step, bf16, fused AdamW, compiled by inductor)
on one GPU: gpt_step_ms of the bare loop, and NAME_over_bare_gpt of each side (--sides: which).

--only shared: the strategy `shared` on the MLP, with fused SGD and fused AdamW on all sides:
ddp_over_shared_<optimizer>_<workers>, shared_over_bare_<optimizer>_<workers> (AdamW: also shared_over_bare_<workers>),
ours_over_bare_<optimizer>_<workers> for --workers (2 and 4; 8 where there are as many cores);
same_bits_<optimizer>_<workers>: whether the parameters are those of `allreduce`.

--only hosts: 4 emulated hosts of 2 workers on one machine: shared_bytes_a_host, hierarchical_bytes_a_host (what a host
sends of gradients in a step, by the ledger, in MB), and hierarchical_over_shared (their steps).

--only parts: where a step of `shared` goes (AdamW, 2 workers or --workers N), in milliseconds of processor time of rank
0's thread: backward_ms, with fill_ms (gradients copied into the host's memory) in it; optimizer_ms, with plan_ms,
mean_ms, kernel_ms and meet_ms in it; bare_step_ms, bare_optimizer_ms.
"""

from __future__ import annotations

import argparse
import os
import sys
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from measure import added, finish, interleaved, keep_busy


def mlp() -> tuple[Any, Any, Any]:
    """25.2 M parameters: memory-bound at batch 8."""
    import torch
    from torch import nn

    layers = [m for _ in range(6) for m in (nn.Linear(2048, 2048), nn.ReLU())]
    return nn.Sequential(*layers[:-1]), torch.randn(8, 2048), torch.randn(8, 2048)


def cnn() -> tuple[Any, Any, Any]:
    """0.3 M parameters on 32 x 32 images: compute-bound."""
    import torch
    from torch import nn

    widths = [3, 32, 64, 128]
    blocks = [
        m
        for a, b in pairwise(widths)
        for m in (nn.Conv2d(a, b, 3, padding=1), nn.BatchNorm2d(b), nn.ReLU(), nn.MaxPool2d(2))
    ]
    model = nn.Sequential(*blocks, nn.Flatten(), nn.Linear(128 * 16, 64))
    return model, torch.randn(32, 3, 32, 32), torch.randn(32, 64)


def plain_sgd(params: Any) -> Any:
    """As most programs make it."""
    import torch

    return torch.optim.SGD(params, lr=1e-3)


def sgd(params: Any) -> Any:
    """By torch's fused kernel."""
    import torch

    return torch.optim.SGD(params, lr=1e-3, momentum=0.9, fused=True)


def adamw(params: Any) -> Any:
    """By torch's fused kernel."""
    import torch

    return torch.optim.AdamW(params, lr=1e-3, fused=True)


def trainer(make: Any, wrap: Any, device: Any, make_optimizer: Any = plain_sgd) -> Any:
    """One training step as a function: the loop every user writes."""
    import torch

    torch.manual_seed(int(os.environ.get("RANK", "0")))  # each rank has a batch of its own
    model, x, y = make()
    model, x, y = model.to(device), x.to(device), y.to(device)
    optimizer = make_optimizer(model.parameters())
    called = wrap(model, optimizer)
    loss_fn = torch.nn.functional.mse_loss

    def step() -> None:
        optimizer.zero_grad()
        loss_fn(called(x), y).backward()
        optimizer.step()
        if x.is_cuda:
            torch.cuda.synchronize()

    step.model = model  # type: ignore[attr-defined]
    return step


def bare(model: Any, optimizer: Any) -> Any:
    return model


def ours(model: Any, optimizer: Any) -> Any:
    import unisono as un

    un.parallel(model, optimizer, "allreduce")
    return model


def shared(model: Any, optimizer: Any) -> Any:
    import unisono as un

    un.parallel(model, optimizer, "shared")
    return model


def hierarchical(model: Any, optimizer: Any) -> Any:
    import unisono as un

    un.parallel(model, optimizer, "hierarchical(dense)")
    return model


def ddp(model: Any, optimizer: Any) -> Any:
    import torch

    return torch.nn.parallel.DistributedDataParallel(model)


def compare(name: str, repeats: int) -> dict[str, float]:
    """In each worker: DDP, ours and the bare loop in turn."""
    import torch.distributed as dist

    import unisono as un

    world = un.join(device="cpu")
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    make = {"mlp": mlp, "cnn": cnn}[name]
    sides = {side.__name__: trainer(make, side, world.device) for side in (ddp, ours, bare)}
    seconds = interleaved(sides, repeats=repeats, warmup=5, before=world.barrier)
    dist.destroy_process_group()
    return seconds


def compare_shared(name: str, repeats: int) -> dict[str, float]:
    """In each worker: DDP, ours, the shared model and the bare loop in turn."""
    import torch
    import torch.distributed as dist

    import unisono as un

    world = un.join(device="cpu")
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    make_optimizer = {"sgd": sgd, "adamw": adamw}[name]
    sides = {side.__name__: trainer(mlp, side, world.device, make_optimizer) for side in (ddp, ours, shared, bare)}
    seconds = interleaved(sides, repeats=repeats, warmup=5, before=world.barrier)
    pairs = zip(sides["ours"].model.parameters(), sides["shared"].model.parameters(), strict=True)
    seconds["same_bits"] = float(all(torch.equal(x, y) for x, y in pairs))
    dist.destroy_process_group()
    return seconds


def compare_hosts(per_host: int, repeats: int) -> dict[str, float]:
    """On emulated hosts: the shared model and two levels in turn; and the bytes of gradients that this rank sent."""
    rank = int(os.environ["RANK"])
    os.environ["UNISONO_HOST"] = f"host{rank // per_host}"
    os.environ.pop("UNISONO_SHM_FD", None)
    import unisono as un

    world, sent = un.join(device="cpu"), {}
    sides = {side.__name__: trainer(mlp, side, world.device, sgd) for side in (shared, hierarchical)}
    for name, step in sides.items():
        before = len(world.ledger.records)
        step()
        between = [r for r in list(world.ledger.records)[before:] if r.tag.startswith("gradients") and _crosses(r)]
        sent[f"{name}_bytes"] = float(sum(r.bytes_sent for r in between))
    return {**interleaved(sides, repeats=repeats, before=world.barrier), **sent}


def time_parts(side: str, repeats: int) -> dict[str, float]:
    """Processor time of the parts of a step, of this thread: it is about the same on a machine that others use."""
    import time
    from collections import defaultdict

    import torch

    import unisono as un
    from unisono.methods.strategies._host_memory import HostMemory
    from unisono.methods.strategies.shared import gradients
    from unisono.methods.strategies.shared import step as steps

    world, taken = un.join(device="cpu"), defaultdict(float)

    def timed(name: str, call: Any) -> Any:
        def run(*args: Any, **kwargs: Any) -> Any:
            start = time.thread_time()
            try:
                return call(*args, **kwargs)
            finally:
                taken[name] += time.thread_time() - start

        return run

    wrap = {"bare": bare, "shared": shared}[side]
    step = timed("step", trainer(mlp, wrap, world.device, lambda params: held.append(adamw(params)) or held[0]))
    for _ in range(5):
        step()
    for owner, name, key in (
        (gradients.Place, "fill", "fill"),
        (steps.HostStep, "prepare", "plan"),
        (steps.HostStep, "_take_mean", "mean"),
        (steps.GroupStep, "step", "kernel"),
        (HostMemory, "meet", "meet"),
        (torch.Tensor, "backward", "backward"),
    ):
        setattr(owner, name, timed(key, getattr(owner, name)))
    held[0].step = timed("optimizer", held[0].step)
    taken.clear()
    for _ in range(repeats):
        step()
    return {f"{name}_ms": seconds / repeats * 1e3 for name, seconds in taken.items()}


held: list[Any] = []


def _crosses(record: Any) -> bool:
    """Whether a record is of ranks on different hosts: one of a host's own names two ranks that follow each other."""
    ranks = [int(r) for r in record.channel.rpartition("[")[2].rstrip("]").split(",") if r.isdigit()]
    return len({r // 2 for r in ranks}) > 1


def alone(repeats: int) -> dict[str, float]:
    """In a world of one: the same model and memory, bound and not bound in turn."""
    import statistics
    import time

    import torch

    import unisono as un

    held: list[Any] = []
    step = trainer(mlp, lambda model, optimizer: held.extend((model, optimizer)) or model, torch.device("cpu"))
    times: dict[str, list[float]] = {"bare": [], "ours": []}
    for _ in range(repeats // 4):
        for side, taken in times.items():
            replica = un.parallel(*held, "allreduce") if side == "ours" else None
            step()
            for _ in range(4):
                start = time.perf_counter()
                step()
                taken.append(time.perf_counter() - start)
            if replica is not None:
                replica.close()
    return {side: statistics.median(taken) for side, taken in times.items()}


def ledger_seconds() -> float:
    """What the ledger's own work costs a step of ten collectives and ten spans."""
    import time

    from unisono.world.ledger import Ledger, Record

    ledger, steps = Ledger(), 2000
    start = time.perf_counter()
    for _ in range(steps):
        for i in range(10):
            began = ledger.clock()
            ledger.close_record(Record("all_reduce", "gradients", 1000, "world", i, 0, began, began, ledger.clock()))
            ledger.close_span("blocked", began, ledger.clock())
        ledger.step()
    return (time.perf_counter() - start) / steps


def on_gpu(repeats: int) -> dict[str, Any]:
    """One GPU: DDP with NCCL in a world of one against ours and the bare loop."""
    import torch
    import torch.distributed as dist

    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29577")
    dist.init_process_group("nccl", rank=0, world_size=1, device_id=torch.device("cuda", 0))
    results: dict[str, Any] = {"gpu": torch.cuda.get_device_name(0)}
    for name, make in (("gpu", mlp), ("gpu_cnn", cnn)):
        over, plain = {}, trainer(make, bare, "cuda")
        for side in (ddp, ours):  # one after the other: what runs before the bare step is part of what it takes
            seconds, more = added({"side": trainer(make, side, "cuda")}, plain, repeats=repeats * 10, warmup=20)
            over[side] = 1 + more["side"] / seconds
            print(f"{name}: {side.__name__} {over[side]:.4f} of {seconds * 1e3:.3f} ms", flush=True)
        results[f"ddp_over_ours_{name}"] = over[ddp] / over[ours]
        results[f"ours_over_bare_{name}"] = over[ours]
    dist.destroy_process_group()
    return results


GPT_SIDES = {
    "allreduce": "allreduce",
    "zero2": "zero(stage=2)",
    "zero3": "zero(stage=3)",
    "powersgd": "powersgd(rank=4)",
    "ddp": "",
    "fsdp2": "",
}


def gpt_loop(side: str, model: Any, tokens: Any) -> Any:
    """One step as a function, until the GPU has done it."""
    import torch
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    import unisono as un

    if side == "fsdp2":
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
        for block in model.blocks:
            fully_shard(block, mp_policy=policy)
        fully_shard(model, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    called = torch.compile(torch.nn.parallel.DistributedDataParallel(model) if side == "ddp" else model)
    if GPT_SIDES.get(side):
        un.parallel(model, optimizer, GPT_SIDES[side])

    def step() -> None:
        with torch.autocast("cuda", torch.bfloat16):
            loss = called(tokens)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        torch.cuda.synchronize()

    return step


def on_gpt(repeats: int, names: list[str]) -> dict[str, Any]:
    """The bare loop, and each side after it."""
    from copy import deepcopy

    import torch
    import torch.distributed as dist
    from gpu_offload import Shape, gpt

    if not {"ddp", "fsdp2"}.isdisjoint(names):
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29576")
        dist.init_process_group("nccl", rank=0, world_size=1, device_id=torch.device("cuda", 0))
    torch.set_float32_matmul_precision("high")
    results: dict[str, Any] = {"gpu": torch.cuda.get_device_name(0)}
    torch.manual_seed(0)
    shape = Shape(layers=12, width=768)
    model = gpt(shape, heads=12).cuda()
    model.head.weight = model.words.weight
    tokens = torch.randint(shape.vocabulary, (16, shape.length), device="cuda")
    plain = gpt_loop("bare", deepcopy(model), tokens)  # copies: what is compiled for one serves the next
    for name in names:
        seconds, more = added({name: gpt_loop(name, deepcopy(model), tokens)}, plain, repeats=repeats, warmup=5)
        print(f"{name} adds {more[name] * 1e3:.2f} ms to {seconds * 1e3:.2f}", flush=True)
        results.setdefault("gpt_step_ms", seconds * 1e3)
        results[f"{name}_over_bare_gpt"] = 1 + more[name] / seconds
    if dist.is_initialized():
        dist.destroy_process_group()
    return results


def on_cpu(repeats: int) -> dict[str, Any]:
    """2 and 4 workers on this host, and a world of one."""
    import unisono as un

    results: dict[str, Any] = {}
    for name, workers in (("mlp", 2), ("mlp", 4), ("cnn", 2)):
        seconds = un.launch(compare, workers=workers, args=(name, repeats), threads=1)[0]
        print(f"{name}, {workers} workers: " + ", ".join(f"{k} {v * 1e3:.1f} ms" for k, v in seconds.items()))
        suffix = f"cnn_{workers}" if name == "cnn" else str(workers)
        results[f"ddp_over_ours_{suffix}"] = seconds["ddp"] / seconds["ours"]
        results[f"ours_over_bare_{suffix}"] = seconds["ours"] / seconds["bare"]
        if suffix == "2":
            results["ledger_overhead"] = ledger_seconds() / seconds["ours"]
    seconds = un.launch(alone, workers=1, args=(repeats * 3,), threads=1)[0]
    print("alone: " + ", ".join(f"{k} {v * 1e3:.2f} ms" for k, v in seconds.items()))
    results["world_of_one_overhead"] = seconds["ours"] / seconds["bare"] - 1
    return results


def on_one_host(repeats: int, workers: list[int]) -> dict[str, Any]:
    """The shared model, DDP, all-reduce and the bare loop."""
    import unisono as un

    results: dict[str, Any] = {}
    for name in ("adamw", "sgd"):
        for count in workers:
            seconds = un.launch(compare_shared, workers=count, args=(name, repeats), threads=1)[0]
            results[f"same_bits_{name}_{count}"] = bool(seconds.pop("same_bits"))
            print(f"{name}, {count} workers: " + ", ".join(f"{k} {v * 1e3:.1f} ms" for k, v in seconds.items()))
            results[f"ddp_over_shared_{name}_{count}"] = seconds["ddp"] / seconds["shared"]
            results[f"shared_over_bare_{name}_{count}"] = seconds["shared"] / seconds["bare"]
            results[f"ours_over_bare_{name}_{count}"] = seconds["ours"] / seconds["bare"]
            if name == "adamw":
                results[f"shared_over_bare_{count}"] = seconds["shared"] / seconds["bare"]
    return results


def on_emulated_hosts(repeats: int) -> dict[str, Any]:
    """4 hosts of 2 workers."""
    import unisono as un

    found = un.launch(compare_hosts, workers=8, args=(2, repeats), threads=1)
    host = {name: sum(one[name] for one in found[:2]) / 1e6 for name in ("shared_bytes", "hierarchical_bytes")}
    print(", ".join(f"{k} {v:.1f} MB a host and step" for k, v in host.items()))
    print(", ".join(f"{name} {found[0][name] * 1e3:.1f} ms" for name in ("shared", "hierarchical")))
    ratio = found[0]["hierarchical"] / found[0]["shared"]
    return {f"{name}_a_host": value for name, value in host.items()} | {"hierarchical_over_shared": ratio}


def by_parts(repeats: int, workers: int) -> dict[str, Any]:
    """Where a step goes."""
    import unisono as un

    alone = un.launch(time_parts, workers=workers, args=("bare", repeats), threads=1)[0]
    found = un.launch(time_parts, workers=workers, args=("shared", repeats), threads=1)[0]
    return {**found, "bare_step_ms": alone["step_ms"], "bare_optimizer_ms": alone["optimizer_ms"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=40)
    parser.add_argument("--gpu", action="store_true", help="one GPU, NCCL, a world of one")
    parser.add_argument("--gpt", action="store_true", help="GPT-2 on one GPU")
    parser.add_argument("--sides", nargs="+", choices=GPT_SIDES, default=[*GPT_SIDES], help="of --gpt")
    parser.add_argument(
        "--busy", type=int, nargs="?", const=2, default=0, help="so many other processes compute meanwhile"
    )
    parser.add_argument(
        "--only", choices=["shared", "hosts", "parts"], help="one host and one model; emulated hosts; parts"
    )
    parser.add_argument("--workers", type=int, nargs="+", help="of --only shared: 2 4, and 8 where there are 8 cores")
    asked = parser.parse_args()
    cores = len(os.sched_getaffinity(0))
    with keep_busy(asked.busy):
        if asked.gpt:
            finish(on_gpt(asked.repeats, asked.sides))
            return
        if asked.only == "shared":
            finish(on_one_host(asked.repeats, asked.workers or [2, 4, *([8] if cores >= 8 else [])]))
            return
        if asked.only == "parts":
            finish(by_parts(asked.repeats, (asked.workers or [2])[0]))
            return
        if asked.only == "hosts":
            finish(on_emulated_hosts(max(5, asked.repeats // 4)))
            return
        finish(on_gpu(asked.repeats) if asked.gpu else on_cpu(asked.repeats) | {"busy": asked.busy})


if __name__ == "__main__":
    main()
