"""When sending less pays: a training step between emulated hosts with links of a given speed, method by method.

The 25 M-parameter MLP of step.py, one worker a host, one thread each. Keys: dense_over_<method>_<mbit>: the step with
the exact mean over the step with the method, at links of so many Mbit/s; dense_s_<mbit>: the dense step in seconds.
Needs root and iproute2.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from measure import finish, interleaved, on_hosts, tell
from step import mlp, trainer

METHODS = {
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


def worker(repeats: int, methods: list[str]) -> None:
    """On each host: seconds a step of every method, in turn."""
    import torch

    import unisono as un

    torch.set_num_threads(1)
    world = un.join(device="cpu")

    def wrapped(spec: str) -> Any:
        def wrap(model: Any, optimizer: Any) -> Any:
            un.parallel(model, optimizer, spec)
            return model

        return trainer(mlp, wrap, world.device)

    sides = {name: wrapped(METHODS[name]) for name in methods}
    found = interleaved(sides, repeats=repeats, warmup=1, before=world.barrier)
    if world.rank == 0:
        tell(found)
    world.barrier()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, default=2, help="emulated hosts (default 2)")
    parser.add_argument("--mbit", type=float, nargs="+", default=[100.0, 1000.0, 10000.0], help="speeds of the links")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.worker:
        worker(asked.repeats, asked.methods)
        return
    from unisono.lab.hosts import find_obstacle

    if reason := find_obstacle():
        finish({"skipped": reason})
        return
    methods = list(dict.fromkeys(["dense", *asked.methods]))
    results: dict[str, Any] = {"hosts": asked.hosts}
    for mbit in asked.mbit:
        print(f"{asked.hosts} hosts, links of {mbit:g} Mbit/s", flush=True)
        arguments = ["--worker", "--repeats", str(asked.repeats), "--methods", *methods]
        found = on_hosts(arguments, hosts=asked.hosts, mbit=mbit, timeout_s=1800)
        results[f"dense_s_{mbit:g}"] = found["dense"]
        for name, seconds in found.items():
            print(f"  {name:<26}{seconds * 1e3:>10.1f} ms a step  {found['dense'] / seconds:>7.2f} x dense", flush=True)
            if name != "dense":
                results[f"dense_over_{name}_{mbit:g}"] = found["dense"] / seconds
    finish(results)


if __name__ == "__main__":
    main()
