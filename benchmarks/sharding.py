"""Hybrid sharding between emulated hosts, against FSDP2's (HSDP) over gloo, in the same processes, in turn; and what
gathers in 8 bits send and cost.

4 hosts with 2 workers each, one thread a worker, links of 1 Gbit/s, AdamW; a transformer of 25 M parameters. Few
positions a worker, so that eight workers on few cores are not all compute. Parts (--only): `steps`, `bytes`, `loss`.

Keys:

steps: hsdp_over_ours, hsdp_over_ours_powersgd: the step of `fully_shard` on a mesh of (hosts, workers of a host) over
    that of zero(stage=3, within=host), and with across=powersgd(rank=4); <side>_s: seconds.
    across_bytes, across_over_formula: sent between hosts a step and worker by the ledger, and over 2 (H - 1)/H of its
    shard's bytes; crossed_by_gathers: bytes of gathers and reduce-scatters between ranks of different hosts.
bytes: gather_int8_bytes: what gathers send in 8 bits over what they send in fp32, by the ledger, as one of 8 workers.
loss: loss_int8_over_exact: the loss on held-out text after the task of evidence.py, with gather="int8" over without.

`steps` needs root and iproute2.
"""

from __future__ import annotations

import argparse
import re
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from measure import finish, interleaved

OURS = {
    "ours": "zero(stage=3, within=host)",
    "ours_powersgd": "zero(stage=3, within=host, across=powersgd(rank=4))",
}
LAYERS, WIDTH = 8, 512


def make_model() -> tuple[Any, Any]:
    """A transformer of 25.2 M parameters, and its blocks."""
    from torch import nn

    blocks = [
        nn.TransformerEncoderLayer(WIDTH, 8, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)
        for _ in range(LAYERS)
    ]
    return nn.Sequential(*blocks), blocks


def make_step(side: str, per_host: int, positions: int, world: Any) -> Any:
    """One training step as a function."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    import unisono as un

    torch.manual_seed(world.rank)  # each rank has a batch of its own
    model, blocks = make_model()
    if side == "hsdp":
        mesh = init_device_mesh("cpu", (world.size // per_host, per_host), mesh_dim_names=("replicate", "shard"))
        for module in (*blocks, model):
            fully_shard(module, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    if side != "hsdp":
        un.parallel(model, optimizer, OURS[side])
    x, y = (torch.randn(1, positions, WIDTH) for _ in range(2))

    def step() -> None:
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()

    return step


def compare(sides: list[str], per_host: int, positions: int, repeats: int) -> dict[str, Any]:
    """In each worker: seconds of each side's step, and what ours sends between hosts."""
    import torch.distributed as dist

    import unisono as un

    world = un.join(device="cpu")
    dist.init_process_group("gloo", timeout=timedelta(seconds=300))
    steps = {side: make_step(side, per_host, positions, world) for side in sides}
    for side, step in steps.items():
        began = time.perf_counter()
        step()
        if world.rank == 0:
            print(f"  {side}: first step in {time.perf_counter() - began:.2f} s", file=sys.stderr, flush=True)
    seconds = interleaved(steps, repeats=repeats, warmup=1, before=world.barrier)
    found: dict[str, Any] = {"seconds": seconds}
    if "ours" in steps:
        found |= count_crossing(steps["ours"], world)
    dist.destroy_process_group()
    return found


def count_crossing(step: Any, world: Any) -> dict[str, int]:
    """What a step of this worker sends between hosts, by the ledger."""
    since = time.perf_counter()
    step()
    crossed = {"across": 0, "others": 0, "rest": 0}
    for record in list(world.ledger.records):
        ranks = list(range(world.size))
        for part in re.findall(r"\[([\d,]+)\]", record.channel):
            ranks = [ranks[int(r)] for r in part.split(",")]
        if record.start < since or len({world.hosts[r] for r in ranks}) == 1:
            continue
        moves = record.op in ("all_gather", "reduce_scatter", "all_to_all")
        kind = "across" if record.tag.startswith("across/") else "others" if moves else "rest"
        crossed[kind] += record.bytes_sent
    return crossed


def measure_steps(asked: argparse.Namespace) -> dict[str, Any]:
    """Seconds and bytes on the emulated hosts; a side's step takes as long as on its slowest worker."""
    import unisono as un
    from unisono.launchers.lab.hosts import find_obstacle

    if reason := find_obstacle():
        return {"skipped": reason}
    lab = un.on.lab(hosts=asked.hosts, net=f"{asked.mbit:g}mbit")
    given = (asked.sides, asked.per_host, asked.positions, asked.repeats)
    every = un.launch(
        compare, workers=asked.hosts * asked.per_host, args=given, threads=1, output="rank0", timeout_s=3000, on=lab
    )
    seconds = {side: max(one["seconds"][side] for one in every) for side in asked.sides}
    results: dict[str, Any] = {f"{side}_s": taken for side, taken in seconds.items()}
    if "hsdp" in seconds:
        results |= {f"hsdp_over_{side}": seconds["hsdp"] / s for side, s in seconds.items() if side != "hsdp"}
    if "ours" in seconds:
        model, _ = make_model()
        shard = sum(4 * p.numel() for p in model.parameters()) / asked.per_host
        sent = max(one["across"] for one in every)
        results |= {"across_bytes": sent, "across_over_formula": sent / (2 * (asked.hosts - 1) / asked.hosts * shard)}
        results["crossed_by_gathers"] = max(one["others"] for one in every)
    return results


def measure_bytes(asked: argparse.Namespace) -> dict[str, Any]:
    """Gathers of a step as one of so many workers, of which only this one exists."""
    import torch

    import unisono as un

    sent = {}
    for gather in ("", ", gather=int8"):
        world = un.simulate(asked.hosts * asked.per_host)
        model, _ = make_model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        un.parallel(model, optimizer, f"zero(stage=3{gather})", world=world)
        model(torch.randn(1, 4, WIDTH)).sum().backward()
        optimizer.step()
        gathers = [record for record in world.ledger.records if record.op == "all_gather"]
        sent[gather] = sum(record.bytes_sent for record in gathers if record.tag.startswith("unit/"))
    return {"gather_int8_bytes": sent[", gather=int8"] / sent[""]}


def measure_loss(asked: argparse.Namespace) -> dict[str, Any]:
    """The task of evidence.py, over seeds, in workers of this machine."""
    import statistics

    import unisono as un

    found = un.launch(train, workers=asked.workers, args=(asked.seeds,), threads=1, timeout_s=3000)[0]
    exact, coded = (statistics.mean(found[spec]) for spec in ("zero(stage=3)", "zero(stage=3, gather=int8)"))
    return {"loss_exact": exact, "loss_int8": coded, "loss_int8_over_exact": coded / exact}


def train(seeds: int) -> dict[str, list[float]]:
    """In each worker: the losses on held-out text, by spec."""
    import evidence_tasks as tasks

    import unisono as un

    world = un.join(device="cpu")
    found: dict[str, list[float]] = {}
    for seed in range(seeds):
        for spec in ("zero(stage=3)", "zero(stage=3, gather=int8)"):
            run = tasks.Run("text", tasks.Variant(spec, adam=True), seed, tasks.STEPS["text"])
            found.setdefault(spec, []).append(tasks.train(run, world)["loss"])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = {"steps": measure_steps, "bytes": measure_bytes, "loss": measure_loss}
    parser.add_argument("--only", nargs="+", choices=parts, default=list(parts), metavar="PART")
    parser.add_argument("--sides", nargs="+", choices=["hsdp", *OURS], default=["hsdp", *OURS])
    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument("--per-host", type=int, default=2, help="workers of a host (default 2)")
    parser.add_argument("--positions", type=int, default=32, help="of a worker's batch (default 32)")
    parser.add_argument("--mbit", type=float, default=1000.0)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--workers", type=int, default=4, help="of `loss`")
    parser.add_argument("--seeds", type=int, default=3, help="of `loss`")
    asked = parser.parse_args()
    shape = {name: getattr(asked, name) for name in ("hosts", "per_host", "mbit", "positions")}
    results: dict[str, Any] = dict(shape)
    for part in asked.only:
        found = parts[part](asked)
        for key, value in found.items():
            print(f"{part}: {key} = {value}", flush=True)
        results |= found
    finish(results)


if __name__ == "__main__":
    main()
