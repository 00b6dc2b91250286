"""Between emulated hosts with links of a given speed: the all-reduce, a training step, and the time to a loss.

4 hosts with one worker each, one thread a worker. Parts (--only): `ring`, `step`, `loss`; `tune` says which learning
rates `loss` should have, on one host. <link> is 100mbit or 1gbit; with --mbit also others; 0: no emulated hosts, but
processes that talk by messages as fast as they go (`unshaped`; needs no rights). Keys:

ring: ring_fraction_<link>, gloo_fraction_<link>: of the bound 2(N-1)/N bytes/bandwidth, by our all-reduce of 20 MB
    (below 500 Mbit/s) or 100 MB and by gloo's. The shaper counts whole frames: about 0.96 is all that TCP can reach.
    ring_fraction_encrypted_<link>: ours with UNISONO_ENCRYPT=1. Unshaped: gloo_over_ring, gloo_over_ring_encrypted.
step: ddp_over_<method>_<mbit>, dense_over_<method>_<mbit>: the step of DistributedDataParallel, and ours with the exact
    mean, over the step with the method, on the 25 M-parameter MLP of step.py; ddp_s_<mbit>, dense_s_<mbit>: in seconds.
loss: <method>_seconds, _steps: to the loss that DDP reaches in --steps steps (time_to_loss.py), on the slowest link;
    <method>_step_s: the median; best: the method of ours that was first; best_over_ddp_<link>,
    best_over_torch_powersgd_<link>: the times of DDP, and of the best rank of PyTorch's PowerSGD hook, over its time.

Needs root and iproute2. `tcp` is the congestion control on the hosts: Reno, which is least affected by the shaper's one
queue for data and acknowledgements (see results/README.md).
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import time_to_loss
from measure import finish, interleaved, on_hosts, tell
from step import ddp, mlp, trainer

METHODS = {
    "ddp": "",
    "dense": "allreduce",
    "dense_after_backward": "allreduce(overlap=False)",
    "fp16": "fp16",
    "bytegrad": "bytegrad",
    "nuqsgd": "nuqsgd",
    "onebit": "onebit",
    "topk_1pct": "topk(k=0.01)",
    "topk_1pct_after_backward": "allreduce(reducer=topk(k=0.01), overlap=False)",
    "randomk_1pct": "randomk(k=0.01)",
    "powersgd_r4": "powersgd(rank=4)",
    "powersgd_r1": "powersgd(rank=1)",
}
PARTS = ("ring", "step", "loss")
TIMEOUT_S = 1800


# On each host ------------------------------------------------------------------------------------------------


def ring(megabytes: int, repeats: int, world: Any) -> dict[str, float]:
    """Seconds of an all-reduce, ours and gloo's in turn."""
    import torch
    import torch.distributed as dist

    x, group = torch.zeros(megabytes * 250_000), dist.group.WORLD
    sides = {
        "gloo": lambda: group.allreduce([x]).wait(),
        "ring": lambda: world.all_reduce(x, "mean").wait(),
    }

    def before() -> None:
        """Small messages on both sides' connections: TCP treats one that was idle for long otherwise."""
        dist.barrier()
        world.barrier()

    return interleaved(sides, repeats=repeats, warmup=1, before=before)


def step(methods: list[str], repeats: int, world: Any) -> dict[str, float]:
    """Seconds a step of every method, in turn."""
    import unisono as un

    def wrapped(spec: str) -> Any:
        def wrap(model: Any, optimizer: Any) -> Any:
            un.parallel(model, optimizer, spec)
            return model

        return trainer(mlp, wrap, world.device)

    sides = {name: wrapped(METHODS[name]) if name != "ddp" else trainer(mlp, ddp, world.device) for name in methods}
    for name, run in sides.items():  # DDP orders its buckets by the first step, and needs a second one with them
        taken = time.perf_counter()
        run()
        say(f"  {name}: first step in {time.perf_counter() - taken:.2f} s")
    return interleaved(sides, repeats=repeats, warmup=0, before=world.barrier)


def worker(part: str, asked: argparse.Namespace) -> None:
    """One part on this host; rank 0 tells what was found."""
    tcp = set_congestion_control(asked.tcp)
    import torch
    import torch.distributed as dist

    import unisono as un

    torch.set_num_threads(1)
    world = un.join(device="cpu")
    dist.init_process_group("gloo", timeout=timedelta(seconds=300))
    found: Any
    if part == "ring":
        found = ring(asked.megabytes, asked.repeats, world)
    elif part == "step":
        found = step(asked.methods, asked.repeats, world)
    else:
        found = time_to_loss.race(asked.racers, asked.steps, asked.text, world, say)
    if world.rank == 0:
        tell({"tcp": tcp, "found": found})
    world.barrier()


def set_congestion_control(name: str) -> str:
    """Have this host's connections use it, if it is an emulated one, which is a network namespace of its own; what they
    then use."""
    setting = Path("/proc/sys/net/ipv4/tcp_congestion_control")
    try:
        if "UNISONO_NET" not in os.environ:  # there, all hosts are this machine
            setting.write_text(name, encoding="ascii")
    except OSError as error:
        print(f"TCP stays as it is: {error}", file=sys.stderr, flush=True)
    return setting.read_text(encoding="ascii").strip()


def say(line: str) -> None:
    """A line of progress from rank 0, whose output is kept for the results."""
    if os.environ["RANK"] == "0":
        print(line, file=sys.stderr, flush=True)


# The parts ---------------------------------------------------------------------------------------------------


def on_link(part: str, mbit: float, asked: argparse.Namespace, *arguments: str) -> Any:
    """Run one part on all hosts."""
    given = ["--worker", part, "--tcp", asked.tcp, *arguments]
    told = on_hosts(given, hosts=asked.hosts, mbit=mbit or None, timeout_s=TIMEOUT_S)
    return told["found"], told["tcp"]


def measure_ring(mbit: float, asked: argparse.Namespace) -> dict[str, Any]:
    megabytes = asked.megabytes or (20 if 0 < mbit < 500 else 100)
    given = ["--megabytes", str(megabytes), "--repeats", str(asked.repeats or 5)]
    results: dict[str, Any] = {}
    for encrypt, kind in (("0", ""), ("1", "encrypted")):
        os.environ["UNISONO_ENCRYPT"] = encrypt
        seconds, results["tcp"] = on_link("ring", mbit, asked, *given)
        told = ", ".join(f"{side} {taken:.3f} s" for side, taken in seconds.items())
        print(f"  {megabytes} MB {kind}: {told}", flush=True)
        if not mbit:
            results["_".join(filter(None, ["gloo_over_ring", kind]))] = seconds["gloo"] / seconds["ring"]
            continue
        bound = 2 * (asked.hosts - 1) / asked.hosts * megabytes * 8 / mbit
        for side in ["ring"] if kind else list(seconds):
            results["_".join(filter(None, [side, "fraction", kind, named(mbit)]))] = bound / seconds[side]
    del os.environ["UNISONO_ENCRYPT"]
    return results


def measure_step(mbit: float, asked: argparse.Namespace) -> dict[str, Any]:
    methods = list(dict.fromkeys(["ddp", "dense", *asked.methods]))
    repeats = str(asked.repeats or (2 if 0 < mbit < 500 else 5))
    found, _ = on_link("step", mbit, asked, "--repeats", repeats, "--methods", *methods)
    link = f"{mbit:g}" if mbit else "unshaped"
    results = {f"{name}_s_{link}": found[name] for name in ("ddp", "dense")}
    for name, seconds in found.items():
        shares = {f"{other}_over_{name}_{link}": found[other] / seconds for other in ("ddp", "dense")}
        told = ", ".join(f"{share:7.2f} x {key.split('_')[0]}" for key, share in shares.items())
        print(f"  {name:<26}{seconds * 1e3:>10.1f} ms a step  {told}", flush=True)
        results |= {key: share for key, share in shares.items() if not key.startswith(f"{name}_over_{name}")}
    return results


def measure_loss(mbit: float, asked: argparse.Namespace) -> dict[str, Any]:
    text = ["--text", asked.text] if asked.text else []
    given = ["--steps", str(asked.steps), "--racers", *asked.racers, *text]
    found, _ = on_link("loss", mbit, asked, *given)
    results: dict[str, Any] = {"loss_target": found["target"], "loss_text": asked.text or "the standard library"}
    reached = {name: at for name, at in found["reached"].items() if at is not None}
    for name in found["reached"]:
        seconds, steps = reached.get(name, (None, None))
        step_s = found["step_s"][name]
        results |= {f"{name}_seconds": seconds, f"{name}_steps": steps, f"{name}_step_s": step_s}
        told = f"{seconds:8.1f} s, {steps:5.1f} steps" if name in reached else "not reached"
        told += f", {step_s * 1e3:.0f} ms a step"
        print(f"  {name:<28}{told}", flush=True)
    first: Callable[[dict[str, Any]], str] = lambda some: min(some, key=lambda name: some[name][0])  # noqa: E731
    torchs = {name: at for name, at in reached.items() if name.startswith("torch_powersgd")}
    ours = {name: at for name, at in reached.items() if name not in torchs and name != "ddp"}
    if ours:
        best = first(ours)
        results |= {"best": best, f"best_over_ddp_{named(mbit)}": reached["ddp"][0] / ours[best][0]}
        if torchs:
            name = first(torchs)
            results |= {"best_torch_powersgd": name}
            results |= {f"best_over_torch_powersgd_{named(mbit)}": torchs[name][0] / ours[best][0]}
    return results


def measure_rates(asked: argparse.Namespace) -> None:
    """Print the steps of each method to the target, by learning rate."""
    import unisono as un

    names = list(dict.fromkeys(["ddp", *asked.racers]))
    given = (names, asked.steps, asked.text, asked.rates)
    curves = un.launch(time_to_loss.tune, workers=asked.hosts, args=given, threads=1, timeout_s=None)[0]
    target = min(curve[-1] for name, curve in curves.items() if name.startswith("ddp "))
    print(f"target {target:.4f}")
    for name, curve in curves.items():
        turns = next((i + 1 for i, loss in enumerate(curve) if loss <= target), None)
        when = f"reached in {turns * time_to_loss.TURN} steps" if turns else "not reached"
        print(f"{name:<40} {when:>22}, loss {curve[-1]:.4f}", flush=True)


def named(mbit: float) -> str:
    return f"{mbit / 1000:g}gbit" if mbit >= 1000 else f"{mbit:g}mbit"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=(*PARTS, "tune"), default=PARTS, metavar="PART")
    parser.add_argument("--hosts", type=int, default=4, help="emulated hosts (default 4)")
    parser.add_argument("--mbit", type=float, nargs="+", default=[100.0, 1000.0], help="speeds of the links")
    parser.add_argument("--repeats", type=int, default=0, help="of an all-reduce and of a step (default: by the link)")
    parser.add_argument("--megabytes", type=int, default=0, help="of an all-reduce (default: by the link)")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS), help="of which steps are timed")
    racers = time_to_loss.METHODS
    parser.add_argument(
        "--racers", nargs="+", choices=racers, default=list(time_to_loss.DEFAULT), help="that go for the loss"
    )
    parser.add_argument("--steps", type=int, default=80, help="of DDP, to the loss that the others go for")
    parser.add_argument("--text", help="the text to learn (default: the standard library's sources)")
    parser.add_argument("--rates", type=float, nargs="+", default=list(time_to_loss.RATES), help="that `tune` tries")
    parser.add_argument("--tcp", default="reno", help="congestion control on the hosts (default reno)")
    parser.add_argument("--worker", choices=PARTS, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.worker:
        worker(asked.worker, asked)
        return
    if "tune" in asked.only:
        measure_rates(asked)
        return
    from unisono.launchers.lab.hosts import find_obstacle

    if any(asked.mbit) and (reason := find_obstacle()):
        finish({"skipped": reason})
        return
    results: dict[str, Any] = {"hosts": asked.hosts}
    start = time.perf_counter()
    for part, measure in (("ring", measure_ring), ("step", measure_step), ("loss", measure_loss)):
        links = asked.mbit if part != "loss" else [min(asked.mbit)]
        for mbit in links if part in asked.only else []:
            print(f"{part}: {asked.hosts} hosts, links of {mbit:g} Mbit/s", flush=True)
            results |= measure(mbit, asked)
            print(f"  ({time.perf_counter() - start:.0f} s)", flush=True)
    finish(results)


if __name__ == "__main__":
    main()
