"""Horovod (over its gloo) beside ours, in the same processes, in turn.

    HOROVOD_WITH_PYTORCH=1 HOROVOD_WITH_GLOO=1 HOROVOD_WITHOUT_MPI=1 pip install --no-build-isolation horovod==0.28.1
    python benchmarks/peers/with_horovod.py

In an environment of its own, beside this package. Its sources set C++ 14, which torch 2.13 refuses: both
`set(CMAKE_CXX_STANDARD 14)` in CMakeLists.txt and horovod/torch/CMakeLists.txt have to become 20 before the build (two
minutes on one core).

Keys: horovod_step_s, ours_step_s, shared_step_s and horovod_over_ours_step (25 M-parameter MLP with fused AdamW, 2
workers of one thread); horovod_SIZE_s, ours_SIZE_s and horovod_over_ours_SIZE for an all-reduce of SIZE 100mb and 4kb.
`horovod_difference`: the largest difference of a weight from ours after these steps, over the largest weight. Horovod
looks for new work once a HOROVOD_CYCLE_TIME, 1 ms by its default, which is kept.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from measure import finish, interleaved
from step import adamw, mlp, ours, shared, trainer

SIZES = {"100mb": 25_000_000, "4kb": 1_000}  # numbers of 4 bytes


def horovod_trainer(rank: int) -> Any:
    """The step of `step.trainer` as Horovod's documentation writes it."""
    import horovod.torch as hvd
    import torch

    torch.manual_seed(rank)
    model, x, y = mlp()
    optimizer = hvd.DistributedOptimizer(adamw(model.parameters()), named_parameters=model.named_parameters())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)

    def step() -> None:
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()

    step.model = model  # type: ignore[attr-defined]
    return step


def compare(port: int, repeats: int) -> dict[str, float]:
    """In each worker: all sides in turn."""
    import torch

    import unisono as un

    torch.set_num_threads(1)
    world = un.join(device="cpu")
    place = {"RANK": world.rank, "LOCAL_RANK": world.rank, "CROSS_RANK": 0}
    place |= {"SIZE": world.size, "LOCAL_SIZE": world.size, "CROSS_SIZE": 1}
    place |= {"HOSTNAME": "localhost", "GLOO_RENDEZVOUS_ADDR": "127.0.0.1", "GLOO_RENDEZVOUS_PORT": port}
    place |= {"GLOO_IFACE": "lo", "CONTROLLER": "gloo", "CPU_OPERATIONS": "gloo"}
    os.environ.update({f"HOROVOD_{name}": str(value) for name, value in place.items()})
    import horovod.torch as hvd

    hvd.init()
    sides = {side.__name__: trainer(mlp, side, world.device, adamw) for side in (ours, shared)}
    sides["horovod"] = horovod_trainer(world.rank)
    seconds = interleaved(sides, repeats=repeats, warmup=5, before=world.barrier)
    found = {f"{side}_step_s": taken for side, taken in seconds.items()}
    pairs = zip(sides["ours"].model.parameters(), sides["horovod"].model.parameters(), strict=True)
    apart = [((a - b).abs().max() / a.abs().max()).item() for a, b in pairs]
    found["horovod_difference"] = max(apart)
    for name, numbers in SIZES.items():
        x = torch.randn(numbers)
        both = {
            "horovod": partial(hvd.allreduce_, x, name=name),
            "ours": lambda x=x: world.all_reduce(x, "mean").wait(),
        }
        taken = interleaved(both, repeats=repeats, before=world.barrier)
        found |= {f"{side}_{name}_s": each for side, each in taken.items()}
    hvd.shutdown()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=15)
    asked = parser.parse_args()
    if importlib.util.find_spec("horovod") is None:
        print("skipped: horovod is not installed here; the top of this file says how it is built")
        return
    from importlib.metadata import version

    from horovod.runner.common.util.hosts import get_host_assignments, parse_hosts
    from horovod.runner.http.http_server import RendezvousServer

    import unisono as un

    server = RendezvousServer()
    port = server.start()
    server.init(get_host_assignments(parse_hosts("localhost:2"), 2))
    by_rank = un.launch(partial(compare, port, asked.repeats), workers=2, threads=1, output="rank0")
    server.stop()
    results = {key: max(found[key] for found in by_rank) for key in by_rank[0]}
    for what in ("step", *SIZES):
        results[f"horovod_over_ours_{what}"] = results[f"horovod_{what}_s"] / results[f"ours_{what}_s"]
    finish(results | {"horovod": version("horovod")})


if __name__ == "__main__":
    main()
