"""torchft (replicas over gloo, with its lighthouse) beside ours, both in one run.

    pip install torchft==0.2.0    in an environment of its own, beside this package
    python benchmarks/peers/with_torchft.py

Keys: torchft_step_s, ddp_step_s, ours_step_s, shared_step_s and torchft_over_ours_step (25 M-parameter MLP with fused
AdamW, 2 workers, all sides in the same processes, in turn); torchft_recovery_s, ours_recovery_s and
torchft_recovery_over_ours (a worker of three is killed: median seconds to the next step that counts, over `kills` kills
of each side, in turn), and the worst of each. Neither side starts the killed worker again within that time.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from measure import finish, interleaved
from step import adamw, bare, ddp, mlp, ours, shared, trainer

WORKERS = 3  # of which one is killed


def make_manager(replica: str, lighthouse: str, **state: Any) -> Any:
    """A replica group of one process, as torchft's examples make it."""
    import torch.distributed as dist
    from torchft import Manager, ProcessGroupGloo

    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=20)),
        load_state_dict=state.get("load"),
        state_dict=state.get("save"),
        min_replica_size=1,
        rank=0,
        world_size=1,
        store_addr="127.0.0.1",
        store_port=store.port,
        lighthouse_addr=lighthouse,
        replica_id=replica,
        hostname="127.0.0.1",
        timeout=timedelta(seconds=20),
        use_async_quorum=True,
    )
    manager.kept_store = store
    return manager


def torchft_trainer(rank: int, lighthouse: str) -> Any:
    """The step of `step.trainer`, with torchft's wrappers around model and optimizer."""
    import torch
    from torchft import DistributedDataParallel, Optimizer

    torch.manual_seed(rank)
    model, x, y = mlp()
    manager = make_manager(
        f"replica{rank}", lighthouse, load=lambda state: model.load_state_dict(state), save=model.state_dict
    )
    wrapped, optimizer = DistributedDataParallel(manager, model), Optimizer(manager, adamw(model.parameters()))

    def step() -> None:
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(wrapped(x), y).backward()
        optimizer.step()

    step.manager = manager  # type: ignore[attr-defined]
    return step


def compare_steps(lighthouse: str, repeats: int) -> dict[str, float]:
    """In each worker: all sides in turn."""
    import torch.distributed as dist

    import unisono as un

    world = un.join(device="cpu")
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    sides = {side.__name__: trainer(mlp, side, world.device, adamw) for side in (ddp, ours, shared, bare)}
    sides["torchft"] = torchft_trainer(world.rank, lighthouse)
    seconds = interleaved(sides, repeats=repeats, warmup=5, before=world.barrier)
    sides["torchft"].manager.shutdown(wait=False)
    dist.destroy_process_group()
    return seconds


def small_model() -> tuple[Any, Any, Any]:
    import torch

    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 1)), torch.randn(8, 64), torch.randn(8, 1)


def train_with_torchft(rank: int, lighthouse: str, log: Path, until: Path) -> None:
    """One replica: when each step was committed, until told to end."""
    import torch
    from torchft import DistributedDataParallel, Optimizer

    torch.set_num_threads(1)
    model, x, y = small_model()
    manager = make_manager(f"replica{rank}", lighthouse, load=model.load_state_dict, save=model.state_dict)
    wrapped = DistributedDataParallel(manager, model)
    optimizer = Optimizer(manager, torch.optim.AdamW(model.parameters()))
    with log.open("w", buffering=1) as out:
        while not until.exists():
            before = manager.current_step()
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(wrapped(x), y).backward()
            optimizer.step()
            if manager.current_step() > before:
                out.write(f"{time.monotonic()} {manager.num_participants()}\n")
            time.sleep(0.01)
    os._exit(0)


def train_with_ours(folder: str, steps: int) -> int:
    """In each worker: when each step was made, and among how many."""
    import torch

    import unisono as un

    torch.set_num_threads(1)
    world = un.join(device="cpu")
    model, x, y = small_model()
    optimizer = torch.optim.AdamW(model.parameters())
    un.parallel(model, optimizer, "allreduce")
    with (Path(folder) / f"{os.getpid()}.log").open("w", buffering=1) as out:
        for inputs, target in un.shard((x.repeat(3, 1), y.repeat(3, 1)), 24).steps(steps):
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(model(inputs), target).backward()
            optimizer.step()
            out.write(f"{time.monotonic()} {world.size}\n")
            time.sleep(0.01)
    return world.size


def read_steps(file: Path) -> list[tuple[float, int]]:
    lines = [line.split() for line in file.read_text().splitlines()]
    return [(float(words[0]), int(words[1])) for words in lines if len(words) == 2]


def wait_for_steps(files: list[Path], count: int, timeout_s: float = 120) -> None:
    """Until every file has so many steps of all workers."""
    end = time.monotonic() + timeout_s
    while not all(f.exists() and sum(size == WORKERS for _, size in read_steps(f)) >= count for f in files):
        if time.monotonic() > end:
            raise TimeoutError(f"not {count} steps by {WORKERS} workers within {timeout_s} s")
        time.sleep(0.05)


def kill_torchft(folder: Path) -> float:
    """Seconds from the kill of one replica to the first step that the slowest of the others committed after it."""
    from torchft.coordination import LighthouseServer

    lighthouse = LighthouseServer(bind="127.0.0.1:0", min_replicas=1, join_timeout_ms=200, quorum_tick_ms=50)
    logs, until = [folder / f"replica{rank}" for rank in range(WORKERS)], folder / "end"
    workers = [
        subprocess.Popen(
            [sys.executable, __file__, "--replica", str(rank), lighthouse.address(), str(log), str(until)],
            stderr=(folder / f"{log.name}.err").open("w"),
        )
        for rank, log in enumerate(logs)
    ]
    try:
        wait_for_steps(logs, 20)
        workers[1].send_signal(signal.SIGKILL)
        killed = time.monotonic()
        return wait_for_recovery([logs[0], logs[2]], killed)
    finally:
        until.touch()
        for worker in workers:
            worker.kill()
            worker.wait()
        lighthouse.shutdown()


def wait_for_recovery(files: list[Path], killed: float, timeout_s: float = 120) -> float:
    """Seconds to the first step of every survivor in a world without the killed worker."""
    while time.monotonic() < killed + timeout_s:
        first = [min((at for at, size in read_steps(f) if at > killed and size < WORKERS), default=None) for f in files]
        if None not in first:
            return max(at for at in first if at is not None) - killed
        time.sleep(0.05)
    raise TimeoutError(f"no step within {timeout_s} s after a worker was killed")


def kill_ours(folder: Path) -> float:
    """The same under our launcher: it may go on with two."""
    import threading

    import unisono as un

    found: list[float] = []

    def watch() -> None:
        while len(logs := sorted(folder.glob("*.log"))) < WORKERS:
            time.sleep(0.05)
        wait_for_steps(logs, 20)
        os.kill(int(logs[1].stem), signal.SIGKILL)
        found.append(wait_for_recovery([logs[0], logs[2]], time.monotonic()))

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    un.launch(partial(train_with_ours, str(folder), 400), workers=WORKERS, least=2, threads=1, output="rank0")
    thread.join()
    return found[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--kills", type=int, default=5, help="of each side (default 5)")
    parser.add_argument("--replica", nargs=4, metavar=("RANK", "LIGHTHOUSE", "LOG", "UNTIL"), help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if importlib.util.find_spec("torchft") is None:
        print("skipped: torchft is not installed here; pip install torchft==0.2.0, in an environment of its own")
        return
    if asked.replica:
        rank, lighthouse, log, until = asked.replica
        train_with_torchft(int(rank), lighthouse, Path(log), Path(until))
    from importlib.metadata import version

    from torchft.coordination import LighthouseServer

    import unisono as un

    server = LighthouseServer(bind="127.0.0.1:0", min_replicas=2, join_timeout_ms=10_000, quorum_tick_ms=50)
    by_rank = un.launch(partial(compare_steps, server.address(), asked.repeats), workers=2, threads=1)
    server.shutdown()
    seconds = {side: max(found[side] for found in by_rank) for side in by_rank[0]}
    recovered: dict[str, list[float]] = {"torchft": [], "ours": []}
    with tempfile.TemporaryDirectory() as folder:
        for number in range(asked.kills):
            for side, kill in (("torchft", kill_torchft), ("ours", kill_ours)):
                place = Path(folder) / f"{side}{number}"
                place.mkdir()
                recovered[side].append(kill(place))
                print(f"kill {number + 1}: {side} made its next step after {recovered[side][-1]:.2f} s", flush=True)
    medians = {side: statistics.median(found) for side, found in recovered.items()}
    finish(
        {f"{side}_step_s": found for side, found in seconds.items()}
        | {"torchft_over_ours_step": seconds["torchft"] / seconds["ours"], "kills": asked.kills}
        | {f"{side}_recovery_s": median for side, median in medians.items()}
        | {f"{side}_worst_recovery_s": max(found) for side, found in recovered.items()}
        | {"torchft_recovery_over_ours": medians["torchft"] / medians["ours"], "torchft": version("torchft")}
    )


if __name__ == "__main__":
    main()
