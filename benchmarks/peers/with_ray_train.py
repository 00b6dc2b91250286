"""Ray Train beside ours inside the same Ray: how long after the loss of a worker training goes on.

    pip install 'ray[train]'    in an environment of its own, beside this package
    python benchmarks/peers/with_ray_train.py

3 workers of one thread train a small MLP; one after the other is killed. Ray Train starts all of them again from the
last checkpoint, which rank 0 writes every 10 steps; ours (`least=2`, on Ray) goes on with two until a third is there.
Keys, SIDE is ray_train or ours_on_ray, medians over the kills: SIDE_recovery_s (to the next step that counts), of
these the longest SIDE_worst_recovery_s; SIDE_whole_s (until three workers train); SIDE_steps_repeated (of the steps
that had been made, those that were made again); ray_train_over_ours_recovery, ray_train_over_ours_whole.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from measure import finish

WORKERS = 3
EVERY = 10  # steps from one of Ray Train's checkpoints to the next


def train_with_ray(settings: dict[str, Any]) -> None:
    """In each of Ray Train's workers: a loop as its documentation writes it."""
    import ray.train.torch
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    torch.manual_seed(0)
    model: Any = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 1))
    optimizer, step = torch.optim.AdamW(model.parameters()), 0
    if checkpoint := ray.train.get_checkpoint():
        with checkpoint.as_directory() as saved:
            state = torch.load(Path(saved) / "state.pt")
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        step = state["step"]
    model, (x, y) = ray.train.torch.prepare_model(model), (torch.randn(8, 64), torch.randn(8, 1))
    is_over, end = torch.zeros(1), Path(settings["folder"]) / "end"
    with (Path(settings["folder"]) / f"{os.getpid()}.log").open("w", buffering=1) as out:
        while not is_over:
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
            step += 1
            out.write(f"{time.monotonic()} {step} {WORKERS}\n")
            if step % EVERY == 0:
                with tempfile.TemporaryDirectory() as folder:
                    found = None
                    if dist.get_rank() == 0:
                        state = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
                        torch.save(state, Path(folder) / "state.pt")
                        found = ray.train.Checkpoint.from_directory(folder)
                    ray.train.report({"step": step}, checkpoint=found)
            is_over[0] = end.exists()
            dist.all_reduce(is_over)  # all end after the same step
            time.sleep(0.01)


def train_with_ours(folder: str, steps: int) -> None:
    """In each of our workers."""
    import torch

    import unisono as un

    torch.set_num_threads(1)
    world = un.join(device="cpu")
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 1))
    optimizer = torch.optim.AdamW(model.parameters())
    replica = un.parallel(model, optimizer, "allreduce")
    with (Path(folder) / f"{os.getpid()}.log").open("w", buffering=1) as out:
        for x, y in un.shard((torch.randn(240, 64), torch.randn(240, 1)), 24).steps(steps):
            before = replica.step
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
            if replica.step > before:
                out.write(f"{time.monotonic()} {replica.step} {world.size}\n")
            if not (Path(folder) / "end").exists():
                time.sleep(0.01)


def read_steps(log: Path) -> list[tuple[float, int, int]]:
    """When a worker made each step, which that was, and how many workers made it."""
    lines = [line.split() for line in log.read_text().splitlines()]
    return [(float(words[0]), int(words[1]), int(words[2])) for words in lines if len(words) == 3]


class Kills:
    """Kills a worker again and again, and reads in the workers' logs what came of it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.recovery_s: list[float] = []
        self.whole_s: list[float] = []
        self.steps_repeated: list[int] = []

    def run(self, kills: int) -> None:
        """In a thread beside the run; lets it end in any case."""
        try:
            since = 0.0
            for number in range(kills):
                workers = self._wait(partial(self._find_whole, since), "20 steps by all workers")
                since = self._kill(workers, number)
        finally:
            (self.folder / "end").touch()

    def _kill(self, workers: list[Path], number: int) -> float:
        """Kill one of the workers, and wait until as many train again: when they did."""
        lost = sorted(workers)[number % WORKERS]
        os.kill(int(lost.stem), signal.SIGKILL)
        killed = time.monotonic()
        last = max(step for log in workers for at, step, _ in read_steps(log) if at <= killed)

        def find_first() -> tuple[float, int] | None:
            """The first step that was made without the lost one: by fewer workers, or by those that replace all."""
            logs = [log for log in self.folder.glob("*.log") if log != lost]
            rows = [(log, *row) for log in logs for row in read_steps(log)]
            found = [
                (at, step) for log, at, step, size in rows if at > killed and (size < WORKERS or log not in workers)
            ]
            return min(found, default=None)

        first, step = self._wait(find_first, "a step after a kill")
        self.recovery_s.append(first - killed)
        self.steps_repeated.append(max(0, last - step + 1))
        found = self._wait(partial(self._find_whole, first, 1), "a step by three workers")
        whole = max(min(at for at, _, size in read_steps(log) if at >= first and size == WORKERS) for log in found)
        self.whole_s.append(whole - killed)
        return whole

    def _find_whole(self, since: float, steps: int = 20) -> list[Path]:
        """The logs of those that have made so many steps in three since then; none if they are fewer."""
        rows = {log: read_steps(log) for log in self.folder.glob("*.log")}
        made = [log for log, of in rows.items() if sum(at >= since and size == WORKERS for at, _, size in of) >= steps]
        alive = [log for log in made if Path(f"/proc/{log.stem}/stat").exists()]
        return alive if len(alive) == WORKERS else []

    def _wait(self, find: Callable[[], Any], what: str, timeout_s: float = 180) -> Any:
        end = time.monotonic() + timeout_s
        while not (found := find()):
            if time.monotonic() > end:
                raise TimeoutError(f"{what}: not within {timeout_s} s")
            time.sleep(0.05)
        return found

    def summarize(self, side: str) -> dict[str, float]:
        """As keys of the results."""
        print(f"{side}: next step after {' '.join(f'{s:.2f}' for s in self.recovery_s)} s", flush=True)
        found = {"recovery_s": self.recovery_s, "whole_s": self.whole_s, "steps_repeated": self.steps_repeated}
        medians = {f"{side}_{key}": float(statistics.median(values)) for key, values in found.items()}
        return medians | {f"{side}_worst_recovery_s": max(self.recovery_s)}


def run_ray_train(folder: Path, kills: int) -> None:
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    TorchTrainer(
        train_with_ray,
        train_loop_config={"folder": str(folder)},
        torch_config=TorchConfig(backend="gloo"),
        scaling_config=ScalingConfig(num_workers=WORKERS),
        run_config=RunConfig(
            name="kills", storage_path=str(folder), failure_config=FailureConfig(max_failures=kills + 1)
        ),
    ).fit()


def run_ours(folder: Path, kills: int) -> None:
    import unisono as un

    train = partial(train_with_ours, str(folder), 2000 * (kills + 1))  # steps after the last kill go without pauses
    un.launch(train, workers=WORKERS, least=2, threads=1, on=un.on.ray(), output="rank0")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=5, help="of each side (default 5)")
    asked = parser.parse_args()
    if importlib.util.find_spec("ray") is None or importlib.util.find_spec("pyarrow") is None:
        print("skipped: Ray Train is not installed here; pip install 'ray[train]', in an environment of its own")
        return
    import ray

    ray.init(num_cpus=WORKERS + 1, include_dashboard=False, log_to_driver=False)
    results: dict[str, Any] = {"kills": asked.kills}
    for side, run in {"ray_train": run_ray_train, "ours_on_ray": run_ours}.items():
        with tempfile.TemporaryDirectory() as folder:
            kills = Kills(Path(folder))
            thread = threading.Thread(target=kills.run, args=(asked.kills,))
            thread.start()
            run(Path(folder), asked.kills)
            thread.join()
            results |= kills.summarize(side)
    for key in ("recovery", "whole"):
        results[f"ray_train_over_ours_{key}"] = results[f"ray_train_{key}_s"] / results[f"ours_on_ray_{key}_s"]
    finish(results | {"ray": ray.__version__})
    ray.shutdown()


if __name__ == "__main__":
    main()
