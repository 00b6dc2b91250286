"""hivemind's averaging beside ours, both in one run.

    pip install hivemind==1.1.12 'py-cid<0.4' 'py-multihash<3'    in an environment of its own, beside this package
    python benchmarks/peers/with_hivemind.py

Keys: hivemind_average_s, ours_average_s and hivemind_over_ours_average: median seconds until 2 workers have the mean of
25 M float32 numbers (100 MB), in the same processes, in turn; ours by messages over loopback, as between hosts.
hivemind's time begins when its peers have met (until 2026-11-19: with the time that it is told to look for them taken
off, MATCHMAKING_S).
hivemind_after_loss_s, ours_after_loss_s and hivemind_over_ours_after_loss: median seconds from the kill of one of three
peers in mid-round until both others have a mean again (10 MB; ours as gradients of an elastic run, in the memory of one
host); hivemind_no_mean_again: after how many of the kills they had none within four minutes of their start.
Of a peer that is lost in a round, hivemind leaves the numbers out, and those that it was to average stay as they are on
each of the others: hivemind_same_after_loss is the share of the numbers that are the same on both after that round
(ours: all), and hivemind_whole_after_loss_s the time until both have finished a later one, without its matchmaking.
"""

from __future__ import annotations

import argparse
import contextlib
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
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from measure import finish
from with_torchft import kill_ours

NUMBERS = 25_000_000
MATCHMAKING_S = 1.0
PLACES = 300  # of the numbers of a round, that are compared
# On this machine only: no relay, and no port of a router opened.
_ALONE = {"nat_port_map": False, "auto_nat": False, "use_relay": False, "host_maddrs": ["/ip4/127.0.0.1/tcp/0"]}


def make_averager(peers: list[Any], size: int, numbers: int) -> Any:
    """A peer that averages float32 numbers, uncompressed, with `size` others."""
    import hivemind
    import torch

    dht = hivemind.DHT(initial_peers=peers, start=True, **_ALONE)
    averager = hivemind.averaging.DecentralizedAverager(
        averaged_tensors=[torch.randn(numbers)],
        dht=dht,
        prefix="benchmark",
        target_group_size=size,
        min_group_size=2,
        min_matchmaking_time=MATCHMAKING_S,
        request_timeout=0.5,
        start=True,
    )
    return dht, averager


def find_group(averager: Any) -> Any:
    """A round whose peers have met, and which waits for the word to begin."""
    from hivemind.averaging.control import AveragingStage

    while True:  # no group came together: again, as its optimizer does
        group = averager.step(wait=False, require_trigger=True, timeout=60)
        while group.stage != AveragingStage.AWAITING_TRIGGER and not group.done():
            time.sleep(0.01)
        if not group.done():
            return group


def compare(repeats: int) -> dict[str, float]:
    """In each worker: both sides in turn."""
    import torch

    import unisono as un

    torch.set_num_threads(1)
    world = un.join(device="cpu")
    taken: dict[str, list[float]] = {"hivemind": [], "ours": []}
    if world.rank == 0:
        dht, averager = make_averager([], 2, NUMBERS)
    peers = world.broadcast_object([str(at) for at in dht.get_visible_maddrs()] if world.rank == 0 else None)
    if world.rank != 0:
        dht, averager = make_averager(peers, 2, NUMBERS)
    x = torch.randn(NUMBERS)
    for number in range(repeats + 1):
        group = find_group(averager)
        for side in taken:
            world.barrier()
            start = time.perf_counter()
            if side == "ours":
                world.all_reduce(x, "mean").wait()
            else:
                group.allow_allreduce()
                group.result(timeout=60)
            if number > 0:
                taken[side].append(time.perf_counter() - start)
    seconds = {side: statistics.median(found) for side, found in taken.items()}
    averager.shutdown()
    dht.shutdown()
    return seconds


def end_with_parent() -> None:
    """Have this peer, and the processes that it starts, killed when the benchmark is gone, however that ended."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os.killpg(0, signal.SIGKILL)  # it leads a session of its own

    threading.Thread(target=watch, daemon=True).start()


def keep_averaging(log: Path, peers: list[str]) -> None:
    """A peer of three: writes when each mean was there, of how many, and some of its numbers."""
    import torch

    torch.manual_seed(os.getpid())
    end_with_parent()
    _, averager = make_averager(peers, 3, NUMBERS // 10)
    with log.open("w", buffering=1) as out:
        while True:
            with averager.get_tensors() as (x,):
                x.normal_()  # else all have the same from the first round on
            try:
                found = averager.step(timeout=30)
            except Exception as error:
                print(f"a round failed: {error!r}", file=sys.stderr)
                continue
            at = time.monotonic()
            with averager.get_tensors() as (x,):
                some = x[:: len(x) // PLACES].tolist()
            out.write(f"{at} {len(found) if found else 0} {json.dumps(some)}\n")


def average_with_ours(folder: str, passes: int) -> float:
    """In each of our three workers: the same mean, as that of gradients in a run that goes on without a lost worker."""
    import torch

    import unisono as un

    torch.set_num_threads(1)
    world = un.join(device="cpu")
    model = torch.nn.Linear(NUMBERS // 10, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    replica = un.parallel(model, optimizer, "allreduce")
    with (Path(folder) / f"{os.getpid()}.log").open("w", buffering=1) as out:
        for _ in un.shard((torch.arange(240),), 24).steps(4 * passes):
            before = replica.step
            optimizer.zero_grad()
            model.weight.sum().backward()
            optimizer.step()
            generation = world.elastic.membership.generation
            out.write(f"{time.monotonic()} {world.size} {replica.step - before} 24 {generation}\n")
            if not (Path(folder) / "end").exists():
                time.sleep(0.01)
    return 0.0


@dataclass
class Round:
    """A mean that a peer got: when, of how many, and some of its numbers."""

    at: float
    size: int
    numbers: list[float]


@dataclass
class Loss:
    """What both others had after a kill: seconds to the end of that round, the share of it that both have alike, and
    seconds to the end of a later round."""

    mean_s: float
    same: float
    whole_s: float


def read_means(log: Path) -> list[Round]:
    lines = [line.split(" ", 2) for line in log.read_text().splitlines()] if log.exists() else []
    return [Round(float(at), int(size), json.loads(some)) for at, size, some in lines if some.endswith("]")]


def compare_rounds(one: list[Round], other: list[Round], killed: float) -> Loss:
    first, second = zip(one[:2], other[:2], strict=True)
    same = [abs(a - b) < 1e-3 for a, b in zip(first[0].numbers, first[1].numbers, strict=True)]
    ends = [max(found.at for found in both) - killed for both in (first, second)]
    return Loss(ends[0], sum(same) / len(same), ends[1] - MATCHMAKING_S)


def kill_one(folder: Path) -> Loss | None:
    """Kill one of three peers in mid-round, and wait for two more means. None: there were none."""
    import hivemind

    dht = hivemind.DHT(start=True, **_ALONE)
    peers = [str(address) for address in dht.get_visible_maddrs()]
    logs = [folder / str(number) for number in range(3)]
    commands = [[sys.executable, __file__, "--peer", str(log), *peers] for log in logs]
    processes = [subprocess.Popen(command, start_new_session=True) for command in commands]  # each has further ones
    end = time.monotonic() + 240
    try:
        while not all(any(found.size == 3 for found in read_means(log)) for log in logs):
            if time.monotonic() > end:
                raise TimeoutError("three peers had no mean together")
            time.sleep(0.05)
        time.sleep(MATCHMAKING_S + 0.1)  # the next round is under way
        os.killpg(processes[1].pid, signal.SIGKILL)
        killed = time.monotonic()
        while time.monotonic() < end:
            one, other = ([found for found in read_means(logs[i]) if found.at > killed and found.size] for i in (0, 2))
            if min(len(one), len(other)) >= 2:
                return compare_rounds(one, other, killed)
            time.sleep(0.05)
        return None
    finally:
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        dht.shutdown()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--kills", type=int, default=3)
    parser.add_argument("--peer", nargs="+", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.peer:
        keep_averaging(Path(asked.peer[0]), asked.peer[1:])
    if importlib.util.find_spec("hivemind") is None:
        print("skipped: hivemind is not installed here; pip install hivemind, in an environment of its own")
        return
    from importlib.metadata import version

    import unisono as un

    os.environ["UNISONO_SHARED_MEMORY"] = "0"
    by_rank = un.launch(partial(compare, asked.repeats), workers=2, threads=1, output="rank0")
    seconds = {side: max(found[side] for found in by_rank) for side in by_rank[0]}
    print(f"an average: {seconds}", flush=True)
    tries = []
    for _ in range(asked.kills):
        with tempfile.TemporaryDirectory() as folder:
            tries.append(kill_one(Path(folder)))
    after, lost = [found for found in tries if found is not None], {}
    if asked.kills:
        os.environ.pop("UNISONO_SHARED_MEMORY")
        with tempfile.TemporaryDirectory() as folder:
            ours = kill_ours(Path(folder), asked.kills, average_with_ours)
        lost["ours_after_loss_s"] = statistics.median(ours.recovery_s)
    if after:
        lost["hivemind_after_loss_s"] = statistics.median(found.mean_s for found in after)
        lost["hivemind_same_after_loss"] = statistics.median(found.same for found in after)
        lost["hivemind_whole_after_loss_s"] = statistics.median(found.whole_s for found in after)
        lost["hivemind_over_ours_after_loss"] = lost["hivemind_after_loss_s"] / lost["ours_after_loss_s"]
    finish(
        {f"{side}_average_s": found for side, found in seconds.items()}
        | {"hivemind_over_ours_average": seconds["hivemind"] / seconds["ours"]}
        | {"kills": asked.kills, "hivemind_no_mean_again": tries.count(None)}
        | lost
        | {"hivemind": version("hivemind")}
    )


if __name__ == "__main__":
    main()
