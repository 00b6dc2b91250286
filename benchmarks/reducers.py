"""Every reducer on CPU: 2 workers, one thread each, the gradients of a 25 M-parameter MLP; bytes and seconds.

What is timed is the reduction alone. Ours: `replica.sync()` of `allreduce(reducer=...)`, which takes gradients that
already lie in their buckets through the path of a training step (exchange thread, stages, mean in `p.grad`).
Gloo: an all-reduce of each of DDP's own buckets, all begun before the first is waited for. PyTorch's hooks: the hook's
own function on those buckets, as DDP calls it, so that nothing of backward is in it. The casts: all begun, then waited
for. PowerSGD: one bucket after the other, because on gloo it fails with two under way (it begins collectives in the
callbacks of others, in an order that differs between the ranks; under DDP it fails in the same way). One large bucket
takes it about as long. New gradients are written before every repeat, untimed. Sides take turns in the same processes.

The whole training step under both (`step_*`) is there too, for PowerSGD with one bucket in DDP: it has the same compute
on both sides, so it says less.

Keys, NAME being a reducer such as powersgd_r4:
  bytes_over_dense_NAME              bytes a rank sends over those of the dense all-reduce, by the ledger
  gloo_dense_over_ours_NAME          gloo's dense all-reduce over our reduction, in time
  torch_hook_over_ours_NAME          PyTorch's hook over ours, in time (powersgd_r1, powersgd_r4, fp16, bf16)
  step_torch_hook_over_ours_NAME     the same for the whole training step (DDP refuses the bf16 hook on CPU)
The table also has the bandwidth between hosts below which a reducer beats the dense all-reduce, were nothing hidden
behind compute: 8 (bytes saved) / (seconds of our reduction).
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from measure import finish, interleaved
from step import trainer

SPECS = {
    "dense": "dense",
    "bf16": "bf16",
    "fp16": "fp16",
    "powersgd_r1": "powersgd(rank=1)",
    "powersgd_r4": "powersgd(rank=4)",
    "topk": "topk(k=0.01)",
    "topk_dgc": "topk(k=0.01, momentum=0.9)",
    "randomk": "randomk(k=0.01)",
    "qsgd": "qsgd(bits=4)",
    "nuqsgd": "nuqsgd(bits=4)",
    "nuqsgd_elias": "nuqsgd(bits=4, elias=True)",
    "bytegrad": "bytegrad",
    "signsgd": "signsgd",
    "onebit": "onebit",
    "error_feedback_nuqsgd": "error_feedback(nuqsgd(bits=4))",
    "warmup_topk": "warmup(topk(k=0.01), steps=2)",
    "masked_powersgd": "masked(powersgd(rank=4), min_size=1024)",
    "accordion_powersgd": "accordion(powersgd(rank=4), powersgd(rank=1), every=1000)",
}
SLOW = ("nuqsgd_elias",)  # seconds a time: few repeats
HOOKS = ("powersgd_r1", "powersgd_r4", "fp16", "bf16")


class DDPBucket:
    """One of DDP's buckets as its hooks see it, kept beyond the backward pass that made it."""

    def __init__(self, real: Any, buffer: Any) -> None:
        views, params = real.gradients(), real.parameters()
        self._buffer, self._params = buffer, params
        at = [g.storage_offset() - views[0].storage_offset() for g in views]
        self._gradients = [buffer[a : a + p.numel()].view(p.shape) for a, p in zip(at, params, strict=True)]
        self._index, self._last = real.index(), real.is_last()

    def buffer(self) -> Any:
        return self._buffer

    def gradients(self) -> Any:
        return self._gradients

    def parameters(self) -> Any:
        return self._params

    def index(self) -> int:
        return self._index

    def is_last(self) -> bool:
        return self._last


def wide_mlp(width: int) -> Any:
    """step.py's MLP of 25.2 M parameters at width 2048."""
    import torch
    from torch import nn

    layers = [m for _ in range(6) for m in (nn.Linear(width, width), nn.ReLU())]
    return nn.Sequential(*layers[:-1]), torch.randn(8, width), torch.randn(8, width)


def buckets_of_ddp(width: int) -> list[DDPBucket]:
    """The buckets DDP makes of the MLP, after it has laid them out anew (which it does once)."""
    import torch

    torch.manual_seed(0)
    model, x, y = wide_mlp(width)
    found: dict[int, DDPBucket] = {}

    def keep(_, bucket):  # without annotations: DDP checks them
        found[bucket.index()] = DDPBucket(bucket, torch.empty_like(bucket.buffer()))
        future: Any = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    wrapped = torch.nn.parallel.DistributedDataParallel(model)
    wrapped.register_comm_hook(None, keep)
    for _ in range(3):
        found.clear()
        torch.nn.functional.mse_loss(wrapped(x), y).backward()
    return [found[i] for i in sorted(found)]


def hook_of(name: str) -> tuple[Any, Any]:
    """PyTorch's hook for a reducer and its state, its warm-up as short as it allows."""
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
    from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

    if name.startswith("powersgd"):
        rank = int(name.removeprefix("powersgd_r"))
        return powerSGD_hook, PowerSGDState(None, matrix_approximation_rank=rank, start_powerSGD_iter=2)
    return getattr(default_hooks, f"{name}_compress_hook"), None


def through(name: str, buckets: list[DDPBucket]) -> Callable[[], None]:
    """All buckets through PyTorch's hook for a reducer."""
    hook, state = hook_of(name)

    def together() -> None:
        for future in [hook(state, bucket) for bucket in buckets]:
            future.wait()

    def in_turn() -> None:
        for bucket in buckets:
            hook(state, bucket).wait()

    return in_turn if name.startswith("powersgd") else together


def compare(name: str, spec: str, width: int, repeats: int) -> dict[str, Any]:
    """In each worker: one reducer against gloo's dense all-reduce, our dense one and PyTorch's hook, in turn."""
    import torch
    import torch.distributed as dist

    import unisono as un

    world = un.join(device="cpu")
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    theirs = buckets_of_ddp(width)
    torch.manual_seed(0)
    model, _, _ = wide_mlp(width)
    replica = un.parallel(model, torch.optim.SGD(model.parameters(), lr=1e-3), f"allreduce(reducer={spec})")
    params = list(model.parameters())
    draw = torch.Generator().manual_seed(world.rank)
    given = torch.randn(sum(p.numel() for p in params) + 4096, generator=draw).mul_(1e-3)
    turn = 0

    def before() -> None:
        """New gradients on every side: the same numbers, moved on a little in every turn."""
        nonlocal turn
        turn = (turn + 1) % 64
        at = 64 * turn
        for param in params:
            fresh = given[at : at + param.numel()].view(param.shape)
            at += param.numel()
            if param.grad is None:
                param.grad = fresh.clone()
            else:
                param.grad.copy_(fresh)
        at = 64 * turn
        for bucket in theirs:
            bucket.buffer().copy_(given[at : at + bucket.buffer().numel()])
            at += bucket.buffer().numel()
        replica.after_step()  # the next sync is a window of its own
        world.barrier()

    group: Any = dist.group.WORLD

    def gloo() -> None:
        for work in [group.allreduce([bucket.buffer()]) for bucket in theirs]:
            work.wait()

    sides: dict[str, Callable[[], Any]] = {"gloo": gloo, "ours": replica.sync}
    if name in HOOKS:
        sides["torch"] = through(name, theirs)
    warmup, repeats = (1, min(3, repeats)) if name in SLOW else (4, repeats)
    found: dict[str, Any] = dict(interleaved(sides, repeats=repeats, warmup=warmup, before=before))
    rows = list(world.ledger.rows)[warmup:]
    found["bytes"] = sum(row.bytes_sent for row in rows) / len(rows)
    found["params"] = sum(p.numel() for p in params)
    replica.close()
    if name in HOOKS and name != "bf16":  # DDP refuses that hook on CPU
        found |= whole_steps(name, spec, width, repeats, world)
    gc.collect()  # a hook's last callbacks hold the group: were they its last holders, its thread would join itself
    dist.destroy_process_group()
    return found


def whole_steps(name: str, spec: str, width: int, repeats: int, world: Any) -> dict[str, float]:
    """Forward, backward, exchange and optimizer: DDP with the hook against ours."""
    import torch

    import unisono as un

    def hooked(model: Any, optimizer: Any) -> Any:
        cap = 1000 if name.startswith("powersgd") else None
        wrapped = torch.nn.parallel.DistributedDataParallel(model, bucket_cap_mb=cap)
        hook, state = hook_of(name)
        wrapped.register_comm_hook(state, hook)
        return wrapped

    def ours(model: Any, optimizer: Any) -> Any:
        un.parallel(model, optimizer, f"allreduce(reducer={spec})")
        return model

    sides = {f"step_{s}": trainer(lambda: wide_mlp(width), w, "cpu") for s, w in (("torch", hooked), ("ours", ours))}
    return interleaved(sides, repeats=repeats, warmup=5, before=world.barrier)


def bytes_for(spec: str, width: int, workers: int) -> int | None:
    """Bytes a rank sends in a world of `workers`, by the reducer's closed form; None where it has none."""
    import torch

    from unisono.methods.buckets import BUCKET_BYTES, Bucket, group_into_buckets
    from unisono.methods.spec import build

    reducer = build(spec, kind="reducer")
    sends = reducer.sends
    if sends is None:
        return None
    with torch.device("meta"):
        model, _, _ = wide_mlp(width)
    buckets = group_into_buckets(list(model.named_parameters()), BUCKET_BYTES)
    made = [Bucket(i, named, lambda n, dtype: torch.empty(n, dtype=dtype)) for i, named in enumerate(buckets)]
    return sum(sends(bucket, workers) for bucket in made)


def break_even(spec: str, found: dict[str, Any], width: int, workers: int) -> str:
    """Mbit/s below which the reducer beats the dense all-reduce between so many hosts."""
    dense = 2 * (workers - 1) / workers * 4 * found["params"]
    sent = found["bytes"] if workers == 2 else bytes_for(spec, width, workers)
    if sent is None:
        return "?"
    saved = dense - sent
    return f"{saved * 8 / found['ours'] / 1e6:,.0f}" if saved > 0 else "never"


def why_not(spec: str) -> str:
    """Why a spec cannot be built; nothing where it can."""
    from unisono.methods.spec import build

    try:
        build(spec, kind="reducer")
    except Exception as error:  # whatever it is, the others can still be measured
        return f"{type(error).__name__}: {str(error).splitlines()[0]}"
    return ""


def row(name: str, spec: str, found: dict[str, Any], dense_bytes: float, width: int) -> str:
    torch_ms = f"{found['torch'] * 1e3:.1f}" if "torch" in found else ""
    between = [break_even(spec, found, width, hosts) if name != "dense" else "" for hosts in (2, 4)]
    ratio = found["bytes"] / dense_bytes
    times = (f"{found['ours'] * 1e3:.1f}", f"{found['gloo'] * 1e3:.1f}", torch_ms)
    cells = (name, f"{ratio:.5f}", *times, *between)
    return "| " + " | ".join(f"{c:>{w}}" for c, w in zip(cells, WIDTHS, strict=True)) + " |"


HEAD = ("reducer", "bytes/dense", "ms", "gloo dense", "torch hook", "Mbit/s, 2 hosts", "4 hosts")
WIDTHS = (22, 11, 8, 10, 10, 15, 8)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--only", nargs="+", choices=SPECS, metavar="NAME", help=f"of {', '.join(SPECS)}")
    parser.add_argument("--quick", action="store_true", help="1.6 M parameters, 3 repeats: does it run")
    asked = parser.parse_args()
    width, repeats = (512, 3) if asked.quick else (2048, asked.repeats)
    import unisono as un

    lines, results, dense_bytes = [], {}, 4 * 6 * (width * width + width)  # 2(N-1)/N = 1 at N = 2
    print(f"{6 * (width * width + width) / 1e6:.1f} M parameters, 2 workers, one thread each", flush=True)
    for name, spec in SPECS.items():
        if asked.only and name not in asked.only:
            continue
        if reason := why_not(spec):
            print(f"{name}: left out ({reason})", flush=True)
            continue
        start = time.perf_counter()
        try:
            found = un.launch(compare, workers=2, args=(name, spec, width, repeats), threads=1, timeout_s=600)[0]
        except (un.WorkerError, TimeoutError) as error:
            print(f"{name}: failed ({str(error).strip().splitlines()[-1]})", flush=True)
            continue
        lines.append(row(name, spec, found, dense_bytes, width))
        print(f"{lines[-1]}  ({time.perf_counter() - start:.0f} s)", flush=True)
        results[f"bytes_over_dense_{name}"] = round(found["bytes"] / dense_bytes, 6)
        results[f"gloo_dense_over_ours_{name}"] = found["gloo"] / found["ours"]
        if "torch" in found:
            results[f"torch_hook_over_ours_{name}"] = found["torch"] / found["ours"]
        if "step_torch" in found:
            results[f"step_torch_hook_over_ours_{name}"] = found["step_torch"] / found["step_ours"]
    print("\n| " + " | ".join(f"{c:>{w}}" for c, w in zip(HEAD, WIDTHS, strict=True)) + " |")
    print("|" + "|".join("-" * (w + 1) + ":" for w in WIDTHS) + "|")
    print("\n".join(lines))
    finish(results)


if __name__ == "__main__":
    main()
