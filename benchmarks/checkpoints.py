"""What saving costs a training: a blocking save, one in the background, and torch.distributed.checkpoint's async_save.

CPU: two workers train 100 M parameters with AdamW (1.2 GB of state) under allreduce; the three kinds of saves take
turns. A save stalls the training for as long as its call takes, and whatever it slows the steps after it comes on top.
`--gpu`: one process, 1.4 B parameters on a CUDA device (16.8 GB of state); there the stall is what a save and the step
after it take together beyond a step alone, with the device synchronised.

Keys:
  stall_share             the call of a background save over that of a blocking one (target 0.05)
  delay_share             the same with what the steps meanwhile took beyond normal ones
  steps_meanwhile         a step while a background save is being written, over a normal one (target 1.1)
  dcp_stall_over_ours     the call of async_save over that of a background save (target 2)
  dcp_steps_meanwhile     a step while async_save writes, over a normal one
  stall_s, first_stall_s  the call of a background save; that of the first, which takes the memory for the copy
  blocking_s, dcp_s       the call of a blocking save, and of async_save
  written_s, dcp_written_s  until it was on the disk, with training meanwhile
  step_s, state_gbyte     a normal step; what is saved

    PYTHONPATH=src python benchmarks/checkpoints.py            # the CPU figures
    PYTHONPATH=src python benchmarks/checkpoints.py --gpu      # needs 34 GB of host memory and 70 GB of disk
    PYTHONPATH=src python benchmarks/checkpoints.py --kills 50 # kills during background saves; all must load
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from measure import finish


def build(width: int, layers: int, device: str) -> tuple[Any, Any]:
    """A model of `layers` square matrices, and AdamW."""
    import torch

    torch.manual_seed(0)
    with torch.device(device):
        model = torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(layers)))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-4, fused=device == "cuda")


class Training:
    """A training whose steps are timed."""

    def __init__(self, width: int, layers: int, batch: int, device: str) -> None:
        import torch

        import unisono as un

        self.torch, self.un, self.device = torch, un, device
        self.world = un.join(device=device)
        self.model, self.optimizer = build(width, layers, device)
        self.replica = un.parallel(self.model, self.optimizer, "allreduce")
        generator = torch.Generator(device).manual_seed(1 + self.world.rank)
        self.x = torch.randn(batch, width, device=device, generator=generator)

    def sync(self) -> float:
        """The time when the device has done all that it was told to."""
        if self.device == "cuda":
            self.torch.cuda.synchronize()
        return time.perf_counter()

    def step(self) -> float:
        """One step; its seconds."""
        began = self.sync()
        self.optimizer.zero_grad()
        self.model(self.x).square().mean().backward()
        self.optimizer.step()
        return self.sync() - began

    def meet(self) -> None:
        """All ranks are here."""
        self.world.gather_objects(None)

    def agree(self, busy: bool) -> bool:
        """Whether any rank is still writing."""
        return any(self.world.gather_objects(busy))

    def time_save(self, save: Callable[[], Any], is_busy: Callable[[], bool]) -> dict[str, Any]:
        """Seconds of the call, of each step while it is written, and until it was written."""
        self.meet()
        began = self.sync()
        save()
        called = time.perf_counter() - began
        first = self.step() if self.device == "cuda" else 0.0
        both = time.perf_counter() - began
        steps = []
        while self.agree(is_busy()):
            steps.append(self.step())
        return {"call": called, "both": both, "steps": steps, "written": time.perf_counter() - began, "first": first}


def work(asked: argparse.Namespace, folder: str) -> dict[str, Any]:
    """One worker: rounds of the three kinds of saves."""
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp

    device = "cuda" if asked.gpu else "cpu"
    training = Training(asked.width, asked.layers, asked.batch, device)
    un, replica, world = training.un, training.replica, training.world
    un.save  # noqa: B018 - imported before anything is timed
    from unisono.training.checkpoint.behind import find_saves

    store = dist.FileStore(f"{folder}/store", world.size)
    dist.init_process_group("gloo", store=store, rank=world.rank, world_size=world.size)
    for _ in range(3):
        training.step()
    normal, found = [], {"blocking": [], "background": [], "dcp": []}
    futures: list[Any] = []

    def save_dcp() -> None:
        state = {"model": training.model.state_dict(), "optimizer": training.optimizer.state_dict()}
        shutil.rmtree(f"{folder}/dcp", ignore_errors=True) if world.rank == 0 else None
        training.meet()
        futures[:] = [dcp.async_save(state, checkpoint_id=f"{folder}/dcp")]

    kinds: dict[str, tuple[Callable[[], Any], Callable[[], bool]]] = {
        "blocking": (lambda: un.save(f"{folder}/now", replica, keep=1), lambda: False),
        "background": (
            lambda: un.save(f"{folder}/behind", replica, keep=1, background=True),
            lambda: find_saves(replica).is_busy,
        ),
        "dcp": (save_dcp, lambda: not futures[0].done()),
    }
    for _ in range(1 + asked.repeats):
        for name, (save, is_busy) in kinds.items():
            normal += [training.step() for _ in range(asked.steps)]
            found[name].append(training.time_save(save, is_busy))
            un.wait_saved() if name == "background" else futures[0].result() if name == "dcp" else None
    return {"normal": normal, **found, "parameters": sum(p.numel() for p in training.model.parameters())}


def judge(ranks: list[dict[str, Any]], *, gpu: bool) -> dict[str, float]:
    """The figures, of the rank that waited longest."""
    one = ranks[0]
    step = statistics.median(one["normal"])

    def take(name: str, key: str) -> float:
        return max(statistics.median(x[key] for x in rank[name][1:]) for rank in ranks)

    def take_steps(name: str) -> list[float]:
        return [s for rank in ranks for x in rank[name][1:] for s in x["steps"]]

    stall = {
        name: take(name, "both") - step if gpu else take(name, "call") for name in ("blocking", "background", "dcp")
    }
    more = statistics.median(sum(s - step for s in x["steps"]) for x in one["background"][1:])
    figures = {
        "stall_share": stall["background"] / stall["blocking"],
        "delay_share": (stall["background"] + max(more, 0.0)) / stall["blocking"],
        "dcp_stall_over_ours": stall["dcp"] / stall["background"],
        "stall_s": stall["background"],
        "first_stall_s": one["background"][0]["both"] - step if gpu else one["background"][0]["call"],
        "blocking_s": stall["blocking"],
        "dcp_s": stall["dcp"],
        "written_s": take("background", "written"),
        "dcp_written_s": take("dcp", "written"),
        "step_s": step,
        "state_gbyte": one["parameters"] * 12 / 1e9,
    }
    for key, name in (("steps_meanwhile", "background"), ("dcp_steps_meanwhile", "dcp")):
        if steps := take_steps(name):
            figures[key] = statistics.median(steps) / step
    return figures


# Kills ----------------------------------------------------------------------------------------------------

VICTIM = """
import sys, torch, unisono as un
world = un.join(device="cpu")
model = torch.nn.Linear(400, 400, bias=False)
replica = un.parallel(model, torch.optim.SGD(model.parameters(), lr=1.0), sys.argv[2])
while True:
    replica.step += 1
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(replica.step)
    un.save(sys.argv[1], replica, keep=2, background=True, extra={"step": replica.step})
    if replica.step == 3 and world.rank == 0:
        print("ready", flush=True)
"""


def kill_often(count: int, folder: Path) -> dict[str, float]:
    """Kill two workers at random moments of background saves; what is there must load, whole and consistent."""
    import random

    import torch

    import unisono as un

    (folder / "victim.py").write_text(VICTIM)
    whole = 0
    for number in range(count):
        run = folder / "run"
        command = [sys.executable, "-m", "unisono", "run", "-n", "2", str(folder / "victim.py"), str(run), "allreduce"]
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        process = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        assert process.stdout is not None
        assert "ready" in process.stdout.readline(), process.communicate()
        time.sleep(random.uniform(0.0, 0.4))
        process.kill()
        process.communicate()
        time.sleep(0.3)  # the workers go with the launcher
        model = torch.nn.Linear(400, 400, bias=False)
        replica = un.parallel(model, torch.optim.SGD(model.parameters(), lr=1.0), world=un.World())
        loaded = un.load(run, replica)
        right = not loaded.skipped and model.weight.unique().tolist() == [loaded.extra["step"]] == [loaded.step]
        whole += right
        print(f"kill {number + 1}: step {loaded.step}, {'whole' if right else loaded}", flush=True)
    return {"kills": count, "whole": whole}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--gpu", action="store_true", help="1.4 B parameters on a CUDA device, in one process")
    parser.add_argument("--kills", type=int, help="only kill so many runs during background saves")
    parser.add_argument("--width", type=int)
    parser.add_argument("--layers", type=int)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--steps", type=int, default=4, help="normal steps before each save")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--folder", default=None, help="where to save (default: a temporary folder)")
    asked = parser.parse_args()
    asked.width = asked.width or (8192 if asked.gpu else 4096)
    asked.layers = asked.layers or (21 if asked.gpu else 6)
    import unisono as un

    with tempfile.TemporaryDirectory(dir=asked.folder) as folder:
        if asked.kills:
            finish(kill_often(asked.kills, Path(folder)))
            return
        workers = 1 if asked.gpu else 2
        ranks = un.launch(work, workers=workers, args=(asked, folder), threads=None if asked.gpu else 1, timeout_s=3000)
        finish(judge(ranks, gpu=asked.gpu))


if __name__ == "__main__":
    main()
