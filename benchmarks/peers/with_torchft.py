"""torchft (replicas over gloo, with its lighthouse) beside ours, both in one run.

    pip install torchft==0.2.0    in an environment of its own, beside this package
    python benchmarks/peers/with_torchft.py

Keys: torchft_step_s, ddp_step_s, ours_step_s, shared_step_s and torchft_over_ours_step (25 M-parameter MLP with fused
AdamW, 2 workers, all sides in the same processes, in turn); torchft_recovery_s, ours_recovery_s and
torchft_recovery_over_ours (a worker of three is killed: median seconds to the next step that counts, over `kills` kills
of each side, in turn), and the worst of each; torchft_samples_lost (drawn by survivors in steps that did not count) and
ours_samples_lost (of the pass, in no step that counted). Our launcher starts a replacement; with torchft nobody does.
torchft_survivors_died: survivors that ended with an error of torchft's hook, and were started again as by torchrun.
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
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from measure import finish, interleaved
from step import adamw, bare, ddp, mlp, ours, shared, trainer

WORKERS = 3  # of which one is killed
died: list[int] = []  # survivors under torchft that ended with an error


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
    """One replica: when each step was committed or not, and among how many, until told to end."""
    import torch
    from torchft import DistributedDataParallel, Optimizer

    torch.set_num_threads(1)
    model, x, y = small_model()
    manager = make_manager(f"replica{rank}", lighthouse, load=model.load_state_dict, save=model.state_dict)
    wrapped = DistributedDataParallel(manager, model)
    optimizer = Optimizer(manager, torch.optim.AdamW(model.parameters()))
    with log.open("a", buffering=1) as out:
        while not until.exists():
            before = manager.current_step()
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(wrapped(x), y).backward()
            optimizer.step()
            counted = manager.current_step() > before
            out.write(f"{time.monotonic()} {manager.num_participants()} {len(x) if counted else 0} {len(x)}\n")
            time.sleep(0.01)
    os._exit(0)


def train_with_ours(folder: str, steps: int) -> tuple[int, int]:
    """In each worker: when each step was made, and in which world. Gives how many samples were to be seen in all."""
    import torch

    import unisono as un

    torch.set_num_threads(1)
    world = un.join(device="cpu")
    model, x, y = small_model()
    optimizer = torch.optim.AdamW(model.parameters())
    un.parallel(model, optimizer, "allreduce")
    data = (torch.arange(24 * steps), x.repeat(3 * steps, 1), y.repeat(3 * steps, 1))
    with (Path(folder) / f"{os.getpid()}.log").open("w", buffering=1) as out:
        for index, inputs, target in un.shard(data, 24):
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(model(inputs), target).backward()
            optimizer.step()
            worlds = sum(event.kind == "world" for event in world.ledger.events)
            out.write(f"{time.monotonic()} {WORKERS + worlds} {','.join(map(str, index.tolist()))}\n")
            time.sleep(0.01)
    return world.size, len(data[0])


def read_steps(file: Path) -> list[tuple[float, int]]:
    """When each step was made, and in which world: the number of replicas, or which world it was."""
    lines = [line.split() for line in file.read_text().splitlines()]
    counted = [words for words in lines if len(words) >= 3 and words[2] != "0"]
    return [(float(words[0]), int(words[1])) for words in counted]


def wait_for_steps(files: list[Path], count: int, timeout_s: float = 120) -> None:
    """Until every file has so many steps of the first world of all workers."""
    end = time.monotonic() + timeout_s
    while not all(f.exists() and sum(world == WORKERS for _, world in read_steps(f)) >= count for f in files):
        if time.monotonic() > end:
            raise TimeoutError(f"not {count} steps by {WORKERS} workers within {timeout_s} s")
        time.sleep(0.05)


def wait_for_recovery(
    files: list[Path], killed: float, meanwhile: Callable[[], None] = lambda: None, timeout_s: float = 120
) -> float:
    """Seconds to the first step of every survivor in a world that the killed worker was not in."""
    while time.monotonic() < killed + timeout_s:
        after = [[at for at, world in read_steps(f) if at > killed and world != WORKERS] for f in files]
        if all(after):
            return max(map(min, after)) - killed
        meanwhile()
        time.sleep(0.05)
    raise TimeoutError(f"no step within {timeout_s} s after a worker was killed")


def start_replica(rank: int, lighthouse: str, folder: Path) -> subprocess.Popen[bytes]:
    """One replica, as torchrun would start it, and start it again."""
    log = folder / f"replica{rank}"
    command = [sys.executable, __file__, "--replica", str(rank), lighthouse, str(log), str(folder / "end")]
    return subprocess.Popen(command, stderr=(folder / f"{log.name}.err").open("a"))


def kill_torchft(folder: Path) -> tuple[float, int]:
    """Seconds from the kill of one replica to the next step of both others, and the samples that these drew in steps
    which did not count. A survivor that ends with an error is started again, as torchrun does it."""
    from torchft.coordination import LighthouseServer

    lighthouse = LighthouseServer(bind="127.0.0.1:0", min_replicas=1, join_timeout_ms=200, quorum_tick_ms=50)
    logs = [folder / f"replica{rank}" for rank in range(WORKERS)]
    workers = [start_replica(rank, lighthouse.address(), folder) for rank in range(WORKERS)]

    def start_again() -> None:
        for rank in (0, 2):
            if workers[rank].poll() is not None:
                workers[rank] = start_replica(rank, lighthouse.address(), folder)
                died.append(rank)

    try:
        wait_for_steps(logs, 20)
        workers[1].send_signal(signal.SIGKILL)
        killed = time.monotonic()
        seconds = wait_for_recovery([logs[0], logs[2]], killed, start_again)
        lines = [line.split() for log in (logs[0], logs[2]) for line in log.read_text().splitlines()]
        vain = [line for line in lines if len(line) == 4 and float(line[0]) > killed and line[2] == "0"]
        return seconds, sum(int(line[3]) for line in vain)
    finally:
        (folder / "end").touch()
        for worker in workers:
            worker.kill()
            worker.wait()
        lighthouse.shutdown()


def kill_ours(folder: Path) -> tuple[float, int]:
    """The same under our launcher, which may go on with two; and the samples of the pass that no step counted."""
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
    ended = un.launch(partial(train_with_ours, str(folder), 400), workers=WORKERS, least=2, threads=1, output="rank0")
    thread.join()
    lines = [line.split() for log in folder.glob("*.log") for line in log.read_text().splitlines()]
    seen = {index for line in lines if len(line) == 3 for index in line[2].split(",")}
    return found[0], ended[0][1] - len(seen)


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
    lost = {"torchft": 0, "ours": 0}
    with tempfile.TemporaryDirectory() as folder:
        for number in range(asked.kills):
            for side, kill in (("torchft", kill_torchft), ("ours", kill_ours)):
                place = Path(folder) / f"{side}{number}"
                place.mkdir()
                seconds_to_step, samples = kill(place)
                recovered[side].append(seconds_to_step)
                lost[side] += samples
                print(f"kill {number + 1}: {side} made its next step after {recovered[side][-1]:.2f} s", flush=True)
    medians = {side: statistics.median(found) for side, found in recovered.items()}
    finish(
        {f"{side}_step_s": found for side, found in seconds.items()}
        | {"torchft_over_ours_step": seconds["torchft"] / seconds["ours"], "kills": asked.kills}
        | {f"{side}_recovery_s": median for side, median in medians.items()}
        | {f"{side}_worst_recovery_s": max(found) for side, found in recovered.items()}
        | {f"{side}_samples_lost": samples for side, samples in lost.items()}
        | {"torchft_survivors_died": len(died)}
        | {"torchft_recovery_over_ours": medians["torchft"] / medians["ours"], "torchft": version("torchft")}
    )


if __name__ == "__main__":
    main()
