"""ZeRO-Offload on one GPU against FSDP2's CPUOffloadPolicy and DeepSpeed's ZeRO-Offload: a GPT of 1.41 B parameters,
fp32 values and moments of AdamW on the host, computing in bf16.

All sides (--sides) run in one process and take turns. A cycle is backward, optimizer step and the next forward,
measured from the end of one forward to the end of another, several cycles later: work still under way at the end of a
step counts.

Parts (--parts, all by default):
  floors    what the machine does: the host's fused AdamW, locked memory, the link, both lanes of the update
  speed     4,096 and 16,384 tokens a step: exact, delayed and stepped-ahead update against FSDP2 and, where it is
            installed with a compiler for its own Adam, DeepSpeed (stage 2, bf16)
  budget    device_memory = 14, 18, 22 GiB at 4,096 tokens: each in a process of its own, for its peak of memory
  largest   the largest model of width 4,096 that trains (each try in a process of its own)
  loss      a GPT of 10 M parameters on the letters of a text (--text), 1,000 steps: the loss on its last tenth, exact
            and with each thing that changes training
  disk      a model whose state is larger than the device memory and the host memory it is given, together

Keys:
  offload_over_fsdp2_T, delayed_..., ahead_...    tokens a second over FSDP2's, at T tokens a step
  offload_over_deepspeed_T, ...                   and over DeepSpeed's
  fsdp2_T_s, deepspeed_T_s, offload_T_s, ...      seconds a cycle; ..._turns_s: of each turn
  no_offload_T_s, gpu_busy_share_T, ..._delayed_T a cycle with all on the GPU; share of a cycle in which kernels run
  deepspeed_error                                 why DeepSpeed is not there
  loss_exact, loss_exact_again (another seed), loss_..., ..._over_exact, kept_energy_...
                                                  held-out losses; of the gradients' energy, what was not put off
  budget_Ggib_tokens_s, budget_Ggib_peak_gib      at a budget of G GiB
  largest_parameters, largest_s                   and seconds a cycle at 4,096 tokens
  disk_parameters, disk_state_gib, disk_s         parameters; their values, master values and moments; seconds a cycle
  disk_device_peak_gib, disk_host_peak_gib        the most that was used: of the device, by a real limit, and the
                                                  process's resident memory, CUDA's libraries included
  host_adamw_gparams_s (host_adamw_omp_...), device_lane_gparams_s, both_lanes_gparams_s, pin_gb_s, h2d_gb_s, d2h_gb_s,
  duplex_gb_s                                     the floors
Without CUDA it prints {"skipped": ...} and ends well; --tiny runs all but `floors` small, on the CPU, to try it out.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parent))

from measure import finish

OFFLOAD = "zero(stage=2, precision=bf16, optimizer_on=cpu)"
SPECS = {
    "offload": OFFLOAD,
    "delayed": OFFLOAD[:-1] + ", delayed_update=True, delay_after=0)",
    "ahead": OFFLOAD[:-1] + ", step_ahead=True)",
    "deferred": OFFLOAD[:-1] + ", defer=4, keep=0.05, delay_after=0)",
    "no_offload": "zero(stage=2, precision=bf16)",
}
LOSSES = {
    "exact": OFFLOAD,
    "exact_again": OFFLOAD,
    "deferred": OFFLOAD[:-1] + ", defer=4, keep=0.05, delay_after=100)",
    "deferred_keep_20": OFFLOAD[:-1] + ", defer=4, keep=0.2, delay_after=100)",
    "deferred_2": OFFLOAD[:-1] + ", defer=2, keep=0.05, delay_after=100)",
    "delayed": OFFLOAD[:-1] + ", delayed_update=True, delay_after=100)",
    "bf16_moments": OFFLOAD[:-1] + ", moments=bf16)",
}
PEERS = ("fsdp2", "deepspeed")
SIDES = (*PEERS, *SPECS)
SUM_CYCLES = 32  # of a turn with deferred steps; every 256 all is stepped, and what to keep is chosen anew (a second)
BUDGETS_GIB = (14, 18, 22)
DISK_DEVICE_GIB, DISK_HOST_GIB = 12, 6
GIB = 2**30


class Shape(NamedTuple):
    """A GPT."""

    layers: int = 24
    width: int = 2048
    length: int = 1024
    vocabulary: int = 50304


TINY = Shape(2, 64, 32, 256)


def gpt(shape: Shape, heads: int | None = None) -> Any:
    """Blocks after norms, each added; embedding and head are not tied. `heads`: None: one for each 128 of the width."""
    import torch
    from torch import nn
    from torch.nn import functional as F

    width = shape.width
    count = heads or width // min(128, width)

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
            self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
            self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

        def forward(self, x: Any) -> Any:  # (batch, time, width)
            q, k, v = (part.unflatten(2, (count, -1)).transpose(1, 2) for part in self.qkv(self.norm1(x)).chunk(3, 2))
            seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + self.out(seen.transpose(1, 2).flatten(2))
            return x + self.down(F.gelu(self.up(self.norm2(x))))

    class GPT(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.places = nn.Embedding(shape.vocabulary, width), nn.Embedding(shape.length, width)
            self.blocks = nn.ModuleList(Block() for _ in range(shape.layers))
            self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, shape.vocabulary, bias=False)

        def forward(self, tokens: Any) -> Any:  # (batch, time)
            x = self.words(tokens) + self.places(torch.arange(tokens.shape[1], device=tokens.device))
            for block in self.blocks:
                x = block(x)
            return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1)[:-1], tokens.flatten()[1:])

    return GPT()


def adamw(model: Any) -> Any:
    import torch

    return torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)


# Sides -------------------------------------------------------------------------------------------------------


class Side(NamedTuple):
    """Something that trains. forward: the loss of a batch of tokens."""

    forward: Callable[[Any], Any]
    backward: Callable[[Any], Any]
    step: Callable[[], None]
    close: Callable[[], None]

    def cycles(self, tokens: Any, count: int) -> float:
        """Seconds a cycle."""
        loss = self.forward(tokens)
        loss.item()
        start = time.perf_counter()
        for _ in range(count):
            self.backward(loss)
            self.step()
            loss = self.forward(tokens)
        loss.item()
        return (time.perf_counter() - start) / count


def backward(loss: Any) -> None:
    loss.backward()


def ours(spec: str, shape: Shape, device: str, *, meta: bool = False) -> Side:
    """The loop that anybody writes, with `un.parallel`."""
    import torch

    import unisono as un

    with torch.device("meta" if meta else device):
        model = gpt(shape)
    optimizer = adamw(model)
    replica = un.parallel(model, optimizer, spec, world=un.join(device=device))

    def step() -> None:
        optimizer.step()
        optimizer.zero_grad()

    return Side(model, backward, step, replica.close)


def start_torch(device: str) -> None:
    """torch's processes, of which there is one: for the peers."""
    import torch.distributed as dist

    if not dist.is_initialized():
        backend = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)


def fsdp2(shape: Shape, device: str) -> Side:
    """FSDP2 with CPUOffloadPolicy and MixedPrecisionPolicy, a fused AdamW on the host."""
    import torch
    import torch.distributed as dist
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

    start_torch(device)
    with torch.device(device):
        model = gpt(shape)
    model.cpu()
    settings: dict[str, Any] = {
        "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16),
        "offload_policy": CPUOffloadPolicy(pin_memory=device == "cuda"),
        "mesh": dist.init_device_mesh(device, (1,)),
    }
    for block in model.blocks:
        fully_shard(block, **settings)
    fully_shard(model, **settings)
    optimizer = adamw(model)

    def step() -> None:
        optimizer.step()
        optimizer.zero_grad()

    return Side(model, backward, step, lambda: None)


def deepspeed(shape: Shape, device: str) -> Side:
    """DeepSpeed's ZeRO-Offload: stage 2 in bf16, its own Adam on the host, which it compiles at the first use."""
    import torch

    os.environ.setdefault("DS_SKIP_CUDA_CHECK", "1")  # that Adam is for the CPU
    os.environ |= {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29531",
    }
    import deepspeed
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    if device != "cuda":
        raise RuntimeError("it is measured on a GPU")
    start_torch(device)
    deepspeed.init_distributed("nccl")
    with torch.device(device):
        model = gpt(shape).bfloat16()
    adam = DeepSpeedCPUAdam(model.parameters(), lr=1e-4, weight_decay=0.01, adamw_mode=True)
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "bf16": {"enabled": True},
        "zero_optimization": {
            "stage": 2,
            "overlap_comm": True,
            "contiguous_gradients": True,
            "offload_optimizer": {"device": "cpu", "pin_memory": True},
        },
    }
    engine, *_ = deepspeed.initialize(model=model, optimizer=adam, config=config)
    return Side(engine, engine.backward, engine.step, lambda: None)


def batch(count: int, shape: Shape, device: str) -> Any:
    import torch

    generator = torch.Generator().manual_seed(0)
    return torch.randint(shape.vocabulary, (count // shape.length, shape.length), generator=generator).to(device)


def busy_s(side: Side, tokens: Any) -> float:
    """Seconds of a cycle in which some kernel runs; copies are none. Two cycles more, halved."""
    return (kernels_s(side, tokens, 3) - kernels_s(side, tokens, 1)) / 2


def kernels_s(side: Side, tokens: Any, cycles: int) -> float:
    """Seconds in which some kernel runs, in so many cycles and the forward before them."""
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        side.cycles(tokens, cycles)
    kernels = [e for e in seen.events() if e.device_type == DeviceType.CUDA and not e.name.startswith("Mem")]
    total = end = 0.0  # microseconds; kernels of several streams may run at once
    for start, stop in sorted((e.time_range.start, e.time_range.end) for e in kernels):
        total += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return total / 1e6


# Parts -------------------------------------------------------------------------------------------------------


def speed(
    shape: Shape, sizes: list[int], device: str, *, names: list[str], repeats: int, cycles: int
) -> dict[str, Any]:
    """All sides in turn."""
    found: dict[str, Any] = {}
    sides: dict[str, Side] = {}
    for name in names:
        start = time.perf_counter()
        try:
            peer = {"fsdp2": fsdp2, "deepspeed": deepspeed}.get(name)
            sides[name] = ours(SPECS[name], shape, device) if peer is None else peer(shape, device)
        except Exception as error:
            if name != "deepspeed":
                raise
            found["deepspeed_error"] = f"{type(error).__name__}: {error}"[:300]
        print(f"{name}: {time.perf_counter() - start:.1f} s to make, {resident_gib():.1f} GiB by now", flush=True)
    for size in sizes:
        tokens = batch(size, shape, device)
        times: dict[str, list[float]] = {name: [] for name in sides}
        for turn in range(repeats + 1):
            for name, side in sides.items():
                each = max(cycles, SUM_CYCLES) if name == "deferred" else cycles
                taken = side.cycles(tokens, each if turn else 2)
                times[name] += [taken] if turn else []
        medians = {name: statistics.median(taken) for name, taken in times.items()}
        found |= {f"{name}_{size}_s": taken for name, taken in medians.items()}
        found |= {f"{name}_{size}_turns_s": taken for name, taken in times.items()}
        for peer_name in PEERS:
            for name in SPECS:
                if name in medians and peer_name in medians and name != "no_offload":
                    found[f"{name}_over_{peer_name}_{size}"] = medians[peer_name] / medians[name]
        for name, key in (("offload", ""), ("delayed", "delayed_")) if device == "cuda" else ():
            if name in sides:
                found[f"gpu_busy_share_{key}{size}"] = busy_s(sides[name], tokens) / medians[name]
        print(json.dumps(found), flush=True)
    for side in sides.values():
        side.close()
    return found


def resident_gib() -> float:
    """Of this process, at its peak."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def one(given: dict[str, Any], device: str) -> dict[str, Any]:
    """One side alone: seconds a cycle, peak of device memory and of the process's."""
    import torch

    cuda, shape, cycles = device == "cuda", Shape(*given["shape"]), given.get("cycles", 5)
    if cuda and "device_gib" in given:
        free = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(1.05 * given["device_gib"] * GIB / free)
    side, tokens = (
        ours(given["spec"], shape, device, meta=given.get("meta", False)),
        batch(given["tokens"], shape, device),
    )
    side.cycles(tokens, min(3, cycles))  # a budget is filled when the first step has shown what it needs
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    taken = side.cycles(tokens, cycles)
    peak = torch.cuda.max_memory_allocated() / GIB if cuda else 0.0
    side.close()
    return {"s": taken, "peak_gib": peak, "host_peak_gib": resident_gib()}


def alone(asked: argparse.Namespace, arguments: dict[str, Any], timeout_s: float) -> dict[str, Any]:
    """`one` in a process of its own."""
    command = [sys.executable, __file__, "--one", json.dumps(arguments), *(["--tiny"] if asked.tiny else [])]
    try:
        ran = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s)
    except subprocess.TimeoutExpired:
        return {"error": f"took longer than {timeout_s:.0f} s"}
    lines = [line for line in ran.stdout.splitlines() if line.startswith("{")]
    if ran.returncode or not lines:
        said = (ran.stderr.strip() or "nothing was printed").splitlines()[-1]
        return {"error": said[:300]}
    result: dict[str, Any] = json.loads(lines[-1])
    return result


def budget(asked: argparse.Namespace, shape: Shape, size: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for gib in BUDGETS_GIB:
        spec = OFFLOAD[:-1] + f', device_memory="{gib}GiB")'
        result = alone(asked, {"spec": spec, "shape": shape, "tokens": size}, 240)
        if "error" in result:
            found[f"budget_{gib}gib_error"] = result["error"]
            continue
        found[f"budget_{gib}gib_tokens_s"] = size / result["s"]
        found[f"budget_{gib}gib_peak_gib"] = result["peak_gib"]
        print(json.dumps(found), flush=True)
    return found


def largest(asked: argparse.Namespace, shape: Shape, layers: list[int], size: int, room: str) -> dict[str, Any]:
    """From large to small until one trains."""
    for count in layers:
        tried = shape._replace(layers=count)
        spec = OFFLOAD[:-1] + f', device_memory="{room}")'
        result = alone(asked, {"spec": spec, "shape": tried, "tokens": size, "meta": True}, 420)
        print(json.dumps({"layers": count, **result}), flush=True)
        if "error" not in result:
            return {"largest_parameters": parameters(tried), "largest_s": result["s"]}
    return {"largest_parameters": 0}


def beyond(asked: argparse.Namespace, shape: Shape, size: int) -> dict[str, Any]:
    """State on the device, on the host and on disk."""
    rooms = f'host_memory="{DISK_HOST_GIB}GiB", device_memory="{DISK_DEVICE_GIB}GiB"'
    spec = f"zero(stage=2, precision=bf16, optimizer_on=disk, {rooms})"
    arguments = {"spec": spec, "shape": shape, "tokens": size, "meta": True, "cycles": 2, "device_gib": DISK_DEVICE_GIB}
    result = alone(asked, arguments, 300)
    if "error" in result:
        return {"disk_error": result["error"]}
    found = {
        "disk_parameters": parameters(shape),
        "disk_state_gib": parameters(shape) * 14 / GIB,
        "disk_s": result["s"],
    }
    return found | {"disk_device_peak_gib": result["peak_gib"], "disk_host_peak_gib": result["host_peak_gib"]}


def parameters(shape: Shape) -> int:
    import torch

    with torch.device("meta"):
        return sum(p.numel() for p in gpt(shape).parameters())


# Losses ------------------------------------------------------------------------------------------------------


SMALL = Shape(6, 384, 256, 256)


def train(spec: str, seed: int, path: Path, shape: Shape, device: str, *, steps: int, rows: int) -> dict[str, Any]:
    """The loss on the last tenth of a text, after so many steps on the rest."""
    import torch

    import unisono as un

    text = torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.uint8).long()
    border, length = text.numel() * 9 // 10, shape.length
    draw = torch.Generator().manual_seed(seed)

    def take(low: int, high: int, generator: Any) -> Any:
        starts = torch.randint(low, high - length, (rows,), generator=generator)
        return torch.stack([text[at : at + length] for at in starts]).to(device)

    torch.manual_seed(seed)
    model = gpt(shape)
    model.apply(start_small)
    model = model.to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.99), weight_decay=0.1, fused=True)
    ramp = max(1, steps // 20)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda t: min((t + 1) / ramp, 0.1 + 0.45 * (1 + math.cos(math.pi * min(1.0, t / steps))))
    )
    replica = un.parallel(model, optimizer, spec, world=un.join(device=device))
    for _ in range(steps):
        model(take(0, border, draw)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    shares = replica.kept_energy
    replica.restore()
    replica.close()
    held = torch.Generator().manual_seed(99)
    with torch.no_grad():
        found = [float(model(take(border, text.numel(), held))) for _ in range(1 if steps < 100 else 60)]
    return {"loss": statistics.mean(found), "kept_energy": statistics.mean(shares) if shares else None}


def start_small(module: Any) -> None:
    """GPT-2's first values."""
    from torch import nn

    if isinstance(module, (nn.Linear, nn.Embedding)):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)


def losses(asked: argparse.Namespace, names: list[str]) -> dict[str, Any]:
    """Each in a process of its own, all at the same time."""
    command = [sys.executable, __file__, *(["--tiny"] if asked.tiny else []), "--text", asked.text, "--loss"]
    env = {**os.environ, "OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // len(names)))}
    running = {name: subprocess.Popen([*command, name], stdout=subprocess.PIPE, text=True, env=env) for name in names}
    found: dict[str, Any] = {}
    for name, process in running.items():
        said = process.communicate()[0].splitlines()
        ended = json.loads(said[-1]) if process.returncode == 0 else {"loss": math.nan, "kept_energy": None}
        found[f"loss_{name}"] = ended["loss"]
        if name != "exact" and "loss_exact" in found:
            found[f"loss_{name}_over_exact"] = ended["loss"] / found["loss_exact"]
        if ended["kept_energy"] is not None:
            found[f"kept_energy_{name}"] = ended["kept_energy"]
    return found


# Floors ------------------------------------------------------------------------------------------------------


def rate(work: Callable[[], Any], amount: float, repeats: int = 5) -> float:
    """`amount` a second, of the median of some runs after one."""
    import torch

    times = []
    for _ in range(repeats + 1):
        torch.cuda.synchronize()
        start = time.perf_counter()
        work()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return amount / statistics.median(times[1:])


def link(nbytes: int = 4 << 30) -> dict[str, float]:
    """Locking memory, and copying it."""
    import torch

    from unisono.methods.offload.device import Slab

    start = time.perf_counter()
    slab = Slab(2 * nbytes, pinned=True)
    found = {"pin_gb_s": 2 * nbytes / 1e9 / (time.perf_counter() - start)}
    host = [slab.take_line(nbytes, torch.uint8) for _ in range(2)]
    there = [torch.zeros(nbytes, dtype=torch.uint8, device="cuda") for _ in range(2)]
    side = torch.cuda.Stream()

    def duplex() -> None:
        there[0].copy_(host[0], non_blocking=True)
        with torch.cuda.stream(side):
            host[1].copy_(there[1], non_blocking=True)

    found["h2d_gb_s"] = rate(lambda: there[0].copy_(host[0], non_blocking=True), nbytes / 1e9)
    found["d2h_gb_s"] = rate(lambda: host[1].copy_(there[1], non_blocking=True), nbytes / 1e9)
    found["duplex_gb_s"] = rate(duplex, nbytes / 1e9)  # each way
    slab.close()
    return found


LANES: dict[str, dict[str, Any]] = {
    "host_adamw_gparams_s": {"gpu_share": False},
    "device_lane_gparams_s": {"gpu_share": 1.0},
    "both_lanes_gparams_s": {"gpu_share": True},
}


def floors(elements: int = 400_000_000) -> dict[str, float]:
    """What the machine does, at most."""
    found = link()
    for name, options in LANES.items():
        gc.collect()
        found[name] = update_rate(elements, options)
        print(json.dumps(found), flush=True)
    return found


def update_rate(elements: int, options: dict[str, Any]) -> float:
    """Gparam/s of an update alone: from the gradients' arrival to the last new value."""
    import torch

    from unisono.methods.offload.pipeline import Pipeline, Run, Shard

    each = elements // 8
    lines = [Shard(torch.zeros(each, dtype=torch.bfloat16, device="cuda"), [Run(0, each, 0)]) for _ in range(8)]
    optimizer = torch.optim.AdamW([torch.zeros(1)], lr=1e-4)
    pipeline = Pipeline(optimizer, lines, device=torch.device("cuda"), **options)
    gradient = torch.randn(each, dtype=torch.bfloat16, device="cuda")
    times = []
    for _ in range(5):
        for u in range(8):
            pipeline.offer(u, gradient)
        torch.cuda.synchronize()
        start = time.perf_counter()
        pipeline.step()
        pipeline.finish()
        times.append(time.perf_counter() - start)
    pipeline.close()
    return each * 8 / 1e9 / statistics.median(times[1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default="floors,speed,loss,budget,largest,disk")
    parser.add_argument("--repeats", type=int, default=3, help="turns of each side")
    parser.add_argument("--cycles", type=int, default=4, help="cycles in a turn")
    parser.add_argument("--sides", default=",".join(SIDES), help="of `speed`; some 20 GB of host memory each")
    parser.add_argument("--layers", default="72,64,56,48,40", help="tries of `largest`, of 201 M parameters each")
    parser.add_argument("--text", default="build/data/tinyshakespeare.txt", help="of `loss`: a file of text")
    parser.add_argument("--runs", default=",".join(LOSSES), help="of `loss`")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--loss", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    import torch

    if not torch.cuda.is_available() and not asked.tiny:
        finish({"skipped": "needs a CUDA device"})
        return
    device = "cpu" if asked.tiny else "cuda"
    shape, sizes = (TINY, [64]) if asked.tiny else (Shape(), [4096, 16_384])
    if asked.one:
        given = json.loads(asked.one)
        print(json.dumps(one(given, device)))
        return
    if asked.loss:
        small, steps, rows = (TINY, 12, 4) if asked.tiny else (SMALL, 1000, 32)
        spec, seed = LOSSES[asked.loss], int(asked.loss.endswith("_again"))
        print(json.dumps(train(spec, seed, Path(asked.text), small, device, steps=steps, rows=rows)))
        return
    found: dict[str, Any] = {"tiny": True} if asked.tiny else {"device": torch.cuda.get_device_name()}
    parts = asked.parts.split(",")
    if "floors" in parts and not asked.tiny:
        found |= floors()
    if "budget" in parts:
        found |= budget(asked, shape, sizes[0])
    if "largest" in parts:
        wide = TINY if asked.tiny else Shape(width=4096)
        layers = [2] if asked.tiny else [int(n) for n in asked.layers.split(",")]
        found |= largest(asked, wide, layers, sizes[0], "120GiB")
    if "disk" in parts:
        found |= beyond(asked, TINY if asked.tiny else Shape(layers=48), 64 if asked.tiny else 1024)
    if "loss" in parts and Path(asked.text).exists():
        found |= losses(asked, asked.runs.split(","))
    if "speed" in parts:
        names = asked.sides.split(",")
        if unknown := set(names) - set(SIDES):
            parser.error(f"--sides are {', '.join(SIDES)}, got {', '.join(sorted(unknown))}")
        found |= speed(shape, sizes, device, names=names, repeats=asked.repeats, cycles=asked.cycles)
    finish(found)


if __name__ == "__main__":
    main()
