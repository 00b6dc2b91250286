"""Every reducer on one GPU: what it adds to the step of an 85 M-parameter transformer; and the kernels alone.

The model is 12 blocks of width 768 (d_ff 3072) on random activations, with float32 gradients, computed in TF32 or, with
--compute bf16, under autocast (whose casts make the host's part of the step longer). The batch is chosen so that the
bare step keeps the GPU busy for about --compute-ms. The world is of one: nothing is sent, so what a step takes longer
is the work of compressing. Each side takes turns with the bare loop. DDP (NCCL, a world of one) stands beside it, plain
and with PyTorch's PowerSGD hook.

Keys:
  compute_ms, busy_ms            the bare step; how long it keeps the GPU busy (less: the host is what holds it up)
  NAME_adds_ms                   how much longer a step with a reducer takes than the bare one before it (median)
  ddp_adds_ms, torch_hook_r1_adds_ms, torch_hook_r4_adds_ms
  topk_1pct_124m_ms              error feedback, selection of 1 % of 124 M values and packing
  topk_reduce_124m_ms            the whole reduction: that, and the mean scattered into the gradient
  torch_topk_ms                  torch.topk of the same, alone
  read_ms, copy_ms               reading 124 M values once (sum), and clone()
  nuqsgd_encode_ms               4-bit codes of 124 M values
  nuqsgd_encode_share_of_copy    bytes read and written a second, over those of clone()
Without CUDA it prints {"skipped": ...} and ends well.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from measure import added, finish
from reducers import SPECS, hook_of, why_not

WIDTH, LAYERS, LENGTH = 768, 12, 1024
VALUES = 124_000_000
ON_CPU = ("nuqsgd_elias",)  # its coding is the CPU's work


def transformer(layers: int) -> Any:
    """Blocks as in GPT: attention and a feed-forward of four times the width, each after a norm, each added."""
    from torch import nn
    from torch.nn import functional as F

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
            self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
            self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

        def forward(self, x: Any) -> Any:  # (batch, time, width)
            q, k, v = (
                part.unflatten(2, (WIDTH // 64, 64)).transpose(1, 2) for part in self.qkv(self.norm1(x)).chunk(3, 2)
            )
            seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + self.out(seen.transpose(1, 2).flatten(2))
            return x + self.down(F.gelu(self.up(self.norm2(x))))

    return nn.Sequential(*[Block() for _ in range(layers)])


def trainer(wrap: Callable[[Any, Any], Any], asked: argparse.Namespace, batch: int) -> Callable[[], None]:
    """One training step as a function, until the GPU has done it."""
    import torch

    torch.manual_seed(0)
    model = transformer(asked.layers).cuda()
    x = torch.randn(batch, LENGTH, WIDTH, device="cuda")
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    called = wrap(model, optimizer)

    def step() -> None:
        optimizer.zero_grad()
        with torch.autocast("cuda", torch.bfloat16, enabled=asked.compute == "bf16"):
            loss = called(x).float().pow(2).mean()
        loss.backward()
        optimizer.step()
        torch.cuda.synchronize()

    return step


def bare(model: Any, optimizer: Any) -> Any:
    return model


def ours(spec: str, settings: dict[str, Any]) -> Callable[[Any, Any], Any]:
    def wrap(model: Any, optimizer: Any) -> Any:
        import unisono as un

        un.parallel(model, optimizer, f"allreduce(reducer={spec})", **settings)
        return model

    return wrap


def ddp(hook: str | None) -> Callable[[Any, Any], Any]:
    def wrap(model: Any, optimizer: Any) -> Any:
        import torch

        wrapped = torch.nn.parallel.DistributedDataParallel(model)
        if hook is not None:
            function, state = hook_of(hook)
            wrapped.register_comm_hook(state, function)
        return wrapped

    return wrap


def batch_for(asked: argparse.Namespace) -> tuple[int, float]:
    """The batch whose bare step keeps the GPU busy for about so long, and how long: a guess and two corrections."""
    batch, busy = 4, 0.0
    for _ in range(3):
        batch = max(1, round(batch * asked.compute_ms / busy)) if busy else batch
        step = trainer(bare, asked, batch)
        for _ in range(3):
            step()
        busy = device_work(step)[1]
    return batch, busy


def device_work(step: Callable[[], None]) -> tuple[int, float]:
    """Kernels of a step, and the milliseconds they keep the GPU busy: the rest of what is added is the host's."""
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        step()
    kernels = [e for e in seen.events() if e.device_type == DeviceType.CUDA]
    return len(kernels), sum(e.device_time for e in kernels) / 1e3


def steps(asked: argparse.Namespace, batch: int) -> dict[str, float]:
    """What each side adds to the bare step."""
    import gc

    import torch

    sides: dict[str, Callable[[Any, Any], Any]] = {}
    settings: dict[str, Any] = {"overlap": False} if asked.after else {}
    if asked.bucket_mb:
        settings["bucket_bytes"] = asked.bucket_mb << 20
    for name, spec in SPECS.items():
        if (asked.only and name not in asked.only) or name in ON_CPU:
            continue
        if reason := why_not(spec):
            print(f"{name}: left out ({reason})", flush=True)
            continue
        sides[f"{name}_adds_ms"] = ours(spec, settings)
    sides |= {"ddp_adds_ms": ddp(None)}
    sides |= {f"torch_hook_r{rank}_adds_ms": ddp(f"powersgd_r{rank}") for rank in (1, 4)}
    found: dict[str, float] = {}
    alone = trainer(bare, asked, batch)
    for key, wrap in sides.items():
        try:
            side = trainer(wrap, asked, batch)
            seconds, more = added({"side": side}, alone, repeats=asked.repeats, warmup=8)
        except Exception as error:  # the others are still worth having
            print(f"{key}: failed ({type(error).__name__}: {str(error).splitlines()[0]})", flush=True)
            continue
        found.setdefault("compute_ms", seconds * 1e3)
        found[key] = more["side"] * 1e3
        told = f"{found[key]:7.3f} ms to {seconds * 1e3:.2f}"
        if asked.profile:
            (count, busy), (bare_count, bare_busy) = device_work(side), device_work(alone)
            told += f"; {count - bare_count} kernels more, GPU busy {busy - bare_busy:.3f} ms more than {bare_busy:.2f}"
        print(f"{key.removesuffix('_adds_ms'):>22} adds {told}", flush=True)
        del side
        gc.collect()
        torch.cuda.empty_cache()
    return found


def kernels(values: int, repeats: int) -> dict[str, float]:
    """The kernels on one long gradient."""
    import torch

    x = torch.randn(values, device="cuda", generator=torch.Generator("cuda").manual_seed(0))
    k = values // 100
    found = {
        "read_ms": milliseconds(lambda: x.sum(), repeats),
        "copy_ms": milliseconds(lambda: x.clone(), repeats),
        "torch_topk_ms": milliseconds(lambda: torch.topk(x, k, sorted=False), repeats),
    }
    for part in (topk_kernel, topk_reduction, nuqsgd_encode):
        found |= part(x, repeats)
    if "nuqsgd_encode_ms" in found:  # 4 bytes read and half a byte written, against 4 and 4
        found["nuqsgd_encode_share_of_copy"] = (4.5 / found["nuqsgd_encode_ms"]) / (8 / found["copy_ms"])
    for key, value in found.items():
        print(f"{key:>28} {value:8.4f}", flush=True)
    return found


def or_nothing(part: Callable[[Any, int], dict[str, float]]) -> Callable[[Any, int], dict[str, float]]:
    """What fails is told about; the rest is still worth having."""

    def run(x: Any, repeats: int) -> dict[str, float]:
        try:
            return part(x, repeats)
        except Exception as error:
            print(f"{part.__name__}: failed ({type(error).__name__}: {error})", flush=True)
            return {}

    return run


@or_nothing
def topk_kernel(x: Any, repeats: int) -> dict[str, float]:
    """p = residual + gradient; the largest 1 % of p as values and places; the rest as the new residual."""
    import torch

    from unisono.methods.kernels.select import Plan, Segment, select_top

    n, k = x.numel(), x.numel() // 100
    residual, after = x.flip(0).mul_(0.5), torch.empty_like(x)
    values, places = torch.empty(k, device="cuda"), torch.empty(k, dtype=torch.int32, device="cuda")
    plan = Plan([Segment(0, n, k)])
    found = {"topk_1pct_124m_ms": milliseconds(lambda: select_top(plan, x, residual, after, values, places), repeats)}
    picked = torch.topk((x + residual).abs(), k, sorted=False).values.sum()
    if not torch.isclose(values.abs().sum(), picked):
        raise ValueError(f"the sum of the selected magnitudes is {values.abs().sum()}, torch.topk's {picked}")
    return found


@or_nothing
def topk_reduction(x: Any, repeats: int) -> dict[str, float]:
    """The reduction of one bucket in a world of one."""
    import torch

    from unisono.methods.buckets import Bucket
    from unisono.methods.spec import build
    from unisono.world import World

    bucket = Bucket(0, [("x", x.view(1000, -1))], lambda n, dtype: torch.empty(n, dtype=dtype, device="cuda"))
    reducer, world = build("topk(k=0.01)", kind="reducer"), World()
    state = reducer.init(bucket)

    def fill() -> None:
        bucket.flat[: x.numel()].copy_(x)

    def reduce() -> None:
        nonlocal state
        _, state = reducer.reduce(bucket, state, world)

    return {"topk_reduce_124m_ms": milliseconds(reduce, repeats, fill)}


@or_nothing
def nuqsgd_encode(x: Any, repeats: int) -> dict[str, float]:
    from unisono.methods.kernels.noise import noise
    from unisono.methods.spec import build

    codec = build("nuqsgd(bits=4)", kind="reducer").codec
    source = noise(0, 1)
    return {"nuqsgd_encode_ms": milliseconds(lambda: codec.encode(x, source), repeats)}


def milliseconds(run: Callable[[], Any], repeats: int, before: Callable[[], Any] | None = None) -> float:
    """Median time on the GPU, between two events; `before` is not timed."""
    import torch

    times = []
    for i in range(repeats + 3):
        if before is not None:
            before()
        torch.cuda.synchronize()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        torch.cuda.synchronize()
        if i >= 3:
            times.append(start.elapsed_time(end))
    return statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument(
        "--compute-ms", type=float, default=19.0, help="how long the bare step should keep the GPU busy"
    )
    parser.add_argument("--compute", choices=("tf32", "bf16"), default="tf32")
    parser.add_argument("--only", nargs="+", choices=SPECS, metavar="NAME", help=f"of {', '.join(SPECS)}")
    parser.add_argument("--bucket-mb", type=int, help="size of our buckets (default: the strategy's)")
    parser.add_argument("--after", action="store_true", help="our exchange after backward instead of during it")
    parser.add_argument("--profile", action="store_true", help="tell the GPU's part of what is added")
    parser.add_argument("--kernels", action="store_true", help="the kernels only")
    parser.add_argument("--quick", action="store_true", help="2 layers, 10 M values, 3 repeats: does it run")
    asked = parser.parse_args()
    import torch

    if not torch.cuda.is_available():
        finish({"skipped": "no CUDA device"})
        return
    import torch.distributed as dist

    asked.layers, values = (2, 10_000_000) if asked.quick else (LAYERS, VALUES)
    asked.repeats = 3 if asked.quick else asked.repeats
    torch.set_float32_matmul_precision("high")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29578")
    results: dict[str, Any] = {"gpu": torch.cuda.get_device_name(0)}
    start = time.perf_counter()
    results |= kernels(values, asked.repeats)
    if not asked.kernels:
        dist.init_process_group("nccl", rank=0, world_size=1, device_id=torch.device("cuda", 0))
        batch, busy = batch_for(asked)
        million = sum(p.numel() for p in transformer(asked.layers).parameters()) / 1e6
        print(f"{million:.1f} M parameters, batch {batch} x {LENGTH}, GPU busy {busy:.2f} ms a step", flush=True)
        results |= {"batch": batch, "busy_ms": busy, "compute": asked.compute, **steps(asked, batch)}
        dist.destroy_process_group()
    print(f"({time.perf_counter() - start:.0f} s)")
    finish(results)


if __name__ == "__main__":
    main()
