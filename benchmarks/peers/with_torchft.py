"""torchft (replicas over gloo, with its lighthouse) beside ours, both in one run.

    pip install torchft==0.2.0    in an environment of its own, beside this package
    python benchmarks/peers/with_torchft.py

Keys: torchft_step_s, ddp_step_s, ours_step_s, shared_step_s and torchft_over_ours_step (25 M-parameter MLP with fused
AdamW, 2 workers, all sides in the same processes, in turn). One of three workers after the other is killed, and
replaced: SIDE_recovery_s (median seconds from a kill to the next step that counts on both others),
SIDE_worst_recovery_s, SIDE_join_pause_s (median of the longest time between two steps of a survivor while the
replacement joins) and SIDE_samples_lost, for `ours`, for `torchft` (a lighthouse with the settings of its README) and
for `torchft_quick` (with join_timeout_ms=200), and torchft_recovery_over_ours, torchft_quick_recovery_over_ours.
Samples lost: with torchft those that survivors drew in steps which did not count; with ours those of all passes that
were in no step, as a parameter counts them.
SIDE_survivors_died: survivors that ended with an error, and were started again as by torchrun.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from measure import finish, interleaved
from step import adamw, bare, ddp, mlp, ours, shared, trainer

WORKERS = 3  # of which one is killed
LIGHTHOUSES = {  # how long a quorum waits for a replica that was there before: its README's, and a short one
    "torchft": {"join_timeout_ms": 10_000, "quorum_tick_ms": 100},
    "torchft_quick": {"join_timeout_ms": 200, "quorum_tick_ms": 50},
}


def make_manager(replica: str, lighthouse: str, *, load: Any, save: Any, **settings: Any) -> Any:
    """A replica group of one process, as torchft's examples make it; `settings` override theirs."""
    import torch.distributed as dist
    from torchft import Manager, ProcessGroupGloo

    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=20)),
        load_state_dict=load,
        state_dict=save,
        rank=0,
        world_size=1,
        store_addr="127.0.0.1",
        store_port=store.port,
        lighthouse_addr=lighthouse,
        replica_id=replica,
        hostname="127.0.0.1",
        timeout=timedelta(seconds=20),
        **{"min_replica_size": 1, "use_async_quorum": True, **settings},
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


def step_times(repeats: int) -> dict[str, float]:
    """All sides on 2 workers."""
    from torchft.coordination import LighthouseServer

    import unisono as un

    server = LighthouseServer(bind="127.0.0.1:0", min_replicas=2, join_timeout_ms=10_000, quorum_tick_ms=50)
    by_rank = un.launch(partial(compare_steps, server.address(), repeats), workers=2, threads=1, output="rank0")
    server.shutdown()
    seconds = {side: max(found[side] for found in by_rank) for side in by_rank[0]}
    ratios = {"torchft_over_ours_step": seconds["torchft"] / seconds["ours"]}
    return {f"{side}_step_s": found for side, found in seconds.items()} | ratios


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


def train_with_ours(folder: str, passes: int) -> float:
    """In each worker: when each step was made, and by how many. How many samples of the passes were in no step."""
    import torch

    import unisono as un

    torch.set_num_threads(1)
    world = un.join(device="cpu")
    model, x, y = small_model()
    model.register_parameter("uses", torch.nn.Parameter(torch.zeros(240)))  # each sample adds 1 by its gradient
    weights = [p for name, p in model.named_parameters() if name != "uses"]
    optimizer = torch.optim.SGD([{"params": weights, "lr": 0.01}, {"params": [model.uses], "lr": 24.0}])
    replica = un.parallel(model, optimizer, "allreduce")
    data = (torch.arange(240), x.repeat(30, 1), y.repeat(30, 1))
    with (Path(folder) / f"{os.getpid()}.log").open("w", buffering=1) as out:
        for index, inputs, target in un.shard(data, 24).steps(10 * passes):
            before = replica.step
            optimizer.zero_grad()
            (torch.nn.functional.mse_loss(model(inputs), target) - model.uses[index].mean()).backward()
            optimizer.step()
            counted = len(index) if replica.step > before else 0
            generation = world.elastic.membership.generation
            out.write(f"{time.monotonic()} {world.size} {counted} {len(index)} {generation}\n")
            if not (Path(folder) / "end").exists():
                time.sleep(0.01)
    return float((passes - model.uses.detach().round()).clamp(min=0).sum())


def read_steps(file: Path) -> list[tuple[float, int, int]]:
    """When each step that counted was made, by how many workers, and in which generation of the world (torchft: 0)."""
    lines = [line.split() for line in file.read_text().splitlines()] if file.exists() else []
    counted = [words for words in lines if len(words) >= 4 and words[2] != "0"]
    return [(float(words[0]), int(words[1]), int(words[4]) if len(words) > 4 else 0) for words in counted]


def wait_for(found: Callable[[], Any], what: str, meanwhile: Callable[[], None], timeout_s: float = 120) -> Any:
    """What `found` gives, as soon as it gives something."""
    end = time.monotonic() + timeout_s
    while not (value := found()):
        if time.monotonic() > end:
            raise TimeoutError(f"{what}: not within {timeout_s} s")
        meanwhile()
        time.sleep(0.05)
    return value


@dataclass
class Losses:
    """What the kills of one side cost."""

    recovery_s: list[float] = field(default_factory=list)
    pause_s: list[float] = field(default_factory=list)  # the longest between two steps of a survivor as one joins
    samples_lost: int = 0
    died: int = 0  # survivors that ended with an error

    def add(self, other: Losses) -> None:
        self.recovery_s += other.recovery_s
        self.pause_s += other.pause_s
        self.samples_lost += other.samples_lost
        self.died += other.died


def kill_again(
    kills: int, live: Callable[[], dict[Path, int]], replace: Callable[[], None], meanwhile: Callable[[], None]
) -> Losses:
    """Kill one of three after the other: `live` gives processes by log, `replace` starts the lost one anew."""
    losses, since = Losses(), 0.0

    def by_all() -> dict[Path, int]:
        """The workers, once each has made 20 steps with all others."""
        workers = live()
        whole = [sum(at > since and size == WORKERS for at, size, _ in read_steps(log)) >= 20 for log in workers]
        return workers if len(workers) == WORKERS and all(whole) else {}

    def first_steps() -> list[float]:
        """Of the survivors, without the killed one: among fewer, or in a world that has its replacement already."""
        steps = [
            [at for at, size, made_in in read_steps(log) if at > killed and (size != WORKERS or made_in > generation)]
            for log in survivors
        ]
        return [found[0] for found in steps if found] if all(steps) else []

    workers = wait_for(by_all, "20 steps by all workers", meanwhile)
    for number in range(kills):
        lost = sorted(workers)[number % WORKERS]
        survivors = [log for log in workers if log != lost]
        generation = max(made_in for log in workers for *_, made_in in read_steps(log))
        os.kill(workers[lost], signal.SIGKILL)
        killed = time.monotonic()
        recovered = max(wait_for(first_steps, "a step after a kill", meanwhile))
        losses.recovery_s.append(recovered - killed)
        replace()
        since = recovered
        workers = wait_for(by_all, "a replacement's steps", meanwhile)
        for log in survivors:
            after = [at for at, *_ in read_steps(log) if at >= recovered]
            losses.pause_s.append(max(b - a for a, b in pairwise(after)))
    return losses


def start_replica(rank: int, lighthouse: str, folder: Path) -> subprocess.Popen[bytes]:
    """One replica, as torchrun would start it, and start it again."""
    log = folder / f"replica{rank}"
    command = [sys.executable, __file__, "--replica", str(rank), lighthouse, str(log), str(folder / "end")]
    return subprocess.Popen(command, stderr=(folder / f"{log.name}.err").open("a"), start_new_session=True)


def kill_torchft(folder: Path, kills: int, settings: dict[str, int]) -> Losses:
    """Of three replicas; samples lost are those that survivors drew in steps which did not count. Whoever has ended is
    started again, as torchrun does it."""
    from torchft.coordination import LighthouseServer

    lighthouse = LighthouseServer(bind="127.0.0.1:0", min_replicas=1, **settings)
    workers = [start_replica(rank, lighthouse.address(), folder) for rank in range(WORKERS)]
    died: list[int] = []

    def live() -> dict[Path, int]:
        return {folder / f"replica{rank}": worker.pid for rank, worker in enumerate(workers)}

    def start_again(*, killed: bool) -> None:
        """The one that was killed, or whoever has ended by itself."""
        for rank, worker in enumerate(workers):
            if worker.poll() is not None and (worker.returncode == -signal.SIGKILL) == killed:
                workers[rank] = start_replica(rank, lighthouse.address(), folder)
                if not killed:
                    died.append(rank)

    try:
        losses = kill_again(kills, live, partial(start_again, killed=True), partial(start_again, killed=False))
        lines = [line.split() for log in live() for line in log.read_text().splitlines()]
        losses.samples_lost = sum(int(line[3]) for line in lines if len(line) == 4 and line[2] == "0")
        losses.died = len(died)
        return losses
    finally:
        (folder / "end").touch()
        for worker in workers:
            worker.kill()
            worker.wait()
        lighthouse.shutdown()


def kill_ours(folder: Path, kills: int, program: Callable[[str, int], float] = train_with_ours) -> Losses:
    """The same under our launcher, which may go on with two; samples lost are those of all passes in no step.

    `program` has a folder for its logs, and how many passes of ten steps it may make; it returns the samples lost."""
    import unisono as un

    found: list[Losses] = []

    def live() -> dict[Path, int]:
        pids = {log: int(log.stem) for log in folder.glob("*.log")}
        return {log: pid for log, pid in pids.items() if Path(f"/proc/{pid}/stat").exists()}

    def watch() -> None:
        try:
            found.append(kill_again(kills, live, lambda: None, lambda: None))
        finally:
            (folder / "end").touch()

    thread = threading.Thread(target=watch)
    thread.start()
    train = partial(program, str(folder), 60 * (kills + 1))  # steps after the last kill go without pauses
    lost = un.launch(train, workers=WORKERS, least=2, threads=1, output="rank0")
    thread.join()
    found[0].samples_lost = round(max(lost))
    return found[0]


def compare_kills(kills: int, log: Path | None) -> dict[str, Any]:
    """The sides one after the other, in pieces of five kills, in turn; those that `log` has are counted with them."""
    sides = {side: Losses() for side in ("ours", *LIGHTHOUSES)}
    for line in log.read_text().splitlines() if log is not None and log.exists() else []:
        side, part = json.loads(line)
        sides[side].add(Losses(**part))
    with tempfile.TemporaryDirectory() as folder:
        for number in range(0, kills, 5):
            for side, whole in sides.items():
                place = Path(folder) / f"{side}{number}"
                place.mkdir()
                count = min(5, kills - number)
                part = kill_ours(place, count) if side == "ours" else kill_torchft(place, count, LIGHTHOUSES[side])
                whole.add(part)
                if log is not None:
                    with log.open("a") as out:
                        out.write(json.dumps([side, asdict(part)]) + "\n")
                seconds = " ".join(f"{s:.2f}" for s in part.recovery_s)
                print(f"{side}: next step after {seconds} s", flush=True)
    results: dict[str, Any] = {"kills": len(sides["ours"].recovery_s)}
    for side, whole in sides.items():
        recovery_s = statistics.median(whole.recovery_s)
        results |= {f"{side}_recovery_s": recovery_s, f"{side}_worst_recovery_s": max(whole.recovery_s)}
        results |= {
            f"{side}_join_pause_s": statistics.median(whole.pause_s),
            f"{side}_samples_lost": whole.samples_lost,
        }
        if side != "ours":
            results[f"{side}_recovery_over_ours"] = recovery_s / results["ours_recovery_s"]
            results[f"{side}_survivors_died"] = whole.died
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--kills", type=int, default=10, help="of each side (default 10)")
    parser.add_argument("--log", type=Path, help="a file: kills of earlier calls are counted too, and new ones added")
    parser.add_argument("--only", nargs="+", choices=("step", "kills"), default=["step", "kills"])
    parser.add_argument("--replica", nargs=4, metavar=("RANK", "LIGHTHOUSE", "LOG", "UNTIL"), help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if importlib.util.find_spec("torchft") is None:
        print("skipped: torchft is not installed here; pip install torchft==0.2.0, in an environment of its own")
        return
    if asked.replica:
        rank, lighthouse, log, until = asked.replica
        train_with_torchft(int(rank), lighthouse, Path(log), Path(until))
    from importlib.metadata import version

    results = {}
    if "step" in asked.only:
        results |= step_times(asked.repeats)
    if "kills" in asked.only:
        results |= compare_kills(asked.kills, asked.log)
    finish(results | {"torchft": version("torchft")})


if __name__ == "__main__":
    main()
