"""hivemind's averaging beside ours, both in one run.

    pip install hivemind==1.1.12 'py-cid<0.4' 'py-multihash<3'    in an environment of its own, beside this package
    python benchmarks/peers/with_hivemind.py

Keys: hivemind_average_s, ours_average_s and hivemind_over_ours_average: median seconds until 2 workers have the mean of
25 M float32 numbers (100 MB), in the same processes, in turn; ours by messages over loopback, as between hosts.
hivemind_matchmaking_s is how long it is told to look for peers, and is taken off its time.
hivemind_after_loss_s, ours_after_loss_s and hivemind_over_ours_after_loss: median seconds from the kill of one of three
peers in mid-round until both others have a mean again (10 MB; ours as gradients of an elastic run, in the memory of one
host); hivemind_no_mean_again: after how many of the kills they had none within four minutes of their start.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from measure import finish, interleaved
from with_torchft import kill_ours

NUMBERS = 25_000_000
MATCHMAKING_S = 1.0
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


def compare(repeats: int) -> dict[str, float]:
    """In each worker: both sides in turn."""
    import torch

    import unisono as un

    torch.set_num_threads(1)
    world = un.join(device="cpu")
    if world.rank == 0:
        dht, averager = make_averager([], 2, NUMBERS)
        world.broadcast_object([str(address) for address in dht.get_visible_maddrs()])
    else:
        dht, averager = make_averager(world.broadcast_object(None), 2, NUMBERS)
    x = torch.randn(NUMBERS)

    def average() -> None:
        while averager.step(timeout=60) is None:  # no group came together: again, as its optimizer does
            pass

    sides = {"hivemind": average, "ours": lambda: world.all_reduce(x, "mean").wait()}
    seconds = interleaved(sides, repeats=repeats, warmup=1, before=world.barrier)
    averager.shutdown()
    dht.shutdown()
    return seconds


def keep_averaging(log: Path, peers: list[str]) -> None:
    """A peer of three: writes when each mean was there, and of how many."""
    _, averager = make_averager(peers, 3, NUMBERS // 10)
    with log.open("w", buffering=1) as out:
        while True:
            try:
                found = averager.step(timeout=30)
            except Exception as error:
                print(f"a round failed: {error!r}", file=sys.stderr)
                continue
            out.write(f"{time.monotonic()} {len(found) if found else 0}\n")


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
        for _ in un.shard((torch.arange(240),), 24).steps(10 * passes):
            before = replica.step
            optimizer.zero_grad()
            model.weight.sum().backward()
            optimizer.step()
            out.write(f"{time.monotonic()} {world.size} {replica.step - before}\n")
            if not (Path(folder) / "end").exists():
                time.sleep(0.01)
    return 0.0


def read_means(log: Path) -> list[tuple[float, int]]:
    lines = [line.split() for line in log.read_text().splitlines()] if log.exists() else []
    return [(float(words[0]), int(words[1])) for words in lines if len(words) == 2]


def kill_one(folder: Path) -> float | None:
    """Kill one of three peers in mid-round; how long both others then need for a mean. None: they had none."""
    import hivemind

    dht = hivemind.DHT(start=True, **_ALONE)
    peers = [str(address) for address in dht.get_visible_maddrs()]
    logs = [folder / str(number) for number in range(3)]
    commands = [[sys.executable, __file__, "--peer", str(log), *peers] for log in logs]
    processes = [subprocess.Popen(command, start_new_session=True) for command in commands]  # each has further ones
    end = time.monotonic() + 240
    try:
        while not all(any(size == 3 for _, size in read_means(log)) for log in logs):
            if time.monotonic() > end:
                raise TimeoutError("three peers had no mean together")
            time.sleep(0.05)
        time.sleep(MATCHMAKING_S + 0.1)  # the next round is under way
        os.killpg(processes[1].pid, signal.SIGKILL)
        killed = time.monotonic()
        while time.monotonic() < end:
            after = [[at for at, size in read_means(logs[i]) if at > killed and size] for i in (0, 2)]
            if all(after):
                return max(map(min, after)) - killed
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
    seconds["hivemind"] -= MATCHMAKING_S
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
        lost["hivemind_after_loss_s"] = statistics.median(after)
        lost["hivemind_over_ours_after_loss"] = lost["hivemind_after_loss_s"] / lost["ours_after_loss_s"]
    finish(
        {f"{side}_average_s": found for side, found in seconds.items()}
        | {"hivemind_over_ours_average": seconds["hivemind"] / seconds["ours"]}
        | {"hivemind_matchmaking_s": MATCHMAKING_S, "kills": asked.kills, "hivemind_no_mean_again": tries.count(None)}
        | lost
        | {"hivemind": version("hivemind")}
    )


if __name__ == "__main__":
    main()
