"""What a step of a small model costs between hosts: ours against DistributedDataParallel over gloo, in turn.

Models are MLPs whose gradients have 0.2, 2 and 27 MB, on 4 emulated hosts with links of --mbit Mbit/s (needs root and
iproute2), or with --loopback between as many processes that talk by messages. Every worker has one thread.

Keys: ddp_over_ours_<size>, and for each size and side <side>_ms_<size>; rounds_<size>: collectives of our step, by the
ledger; python_calls_<size>: calls of Python functions in our step, in all its threads, less those of the bare loop;
segments_<size>, ddp_segments_<size>: TCP segments that rank 0's host sent in a step (null with --loopback).
"""

from __future__ import annotations

import argparse
import sys
import threading
from datetime import timedelta
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from measure import finish, interleaved, on_hosts, tell

WIDTHS = {"0.2mb": 190, "2mb": 670, "27mb": 2560}
COUNTED = 10  # steps whose calls, collectives and segments are counted


def make_step(width: int, wrap: Any) -> Any:
    """The loop that every user writes, on a batch of this rank's own."""
    import torch
    from torch import nn

    model = nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    called = wrap(model, optimizer)
    x, y = torch.randn(16, 64), torch.randn(16, 10)

    def step() -> None:
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(called(x), y).backward()
        optimizer.step()

    return step


class CallCounter:
    """Counts calls of Python functions: in this thread while it is on, and in threads that begin while it is on."""

    def __init__(self) -> None:
        self.calls = 0

    def __enter__(self) -> CallCounter:
        threading.setprofile(self._note)
        sys.setprofile(self._note)
        return self

    def __exit__(self, *_: object) -> None:
        threading.setprofile(None)
        sys.setprofile(None)

    def _note(self, frame: Any, event: str, arg: Any) -> None:
        self.calls += event == "call"


def count_calls(width: int, wrap: Any) -> float:
    """Calls of Python functions in one step, in all threads that it needs."""
    with CallCounter() as counter:
        step = make_step(width, wrap)
        for _ in range(3):
            step()
        before = counter.calls
        for _ in range(COUNTED):
            step()
        return (counter.calls - before) / COUNTED


def count_rounds(ledger: Any, run: Any) -> float:
    """Collectives of one run, but for checks that come every few steps."""
    before = ledger.sent().collectives
    for _ in range(COUNTED):
        run()
    new = list(ledger.records)[before - ledger.sent().collectives :]
    return sum(not record.tag.startswith("stragglers") for record in new) / COUNTED


def count_segments(run: Any) -> float:
    """TCP segments that this network namespace sends, one run's."""
    before = _read_segments()
    for _ in range(COUNTED):
        run()
    return (_read_segments() - before) / COUNTED


def _read_segments() -> int:
    names, values = (
        line.split() for line in Path("/proc/self/net/snmp").read_text().splitlines() if line.startswith("Tcp:")
    )
    return int(values[names.index("OutSegs")])


def work(sizes: list[str], repeats: int) -> None:
    """In each worker: both sides in turn; rank 0 tells what came out."""
    import torch
    import torch.distributed as dist

    import unisono as un

    torch.set_num_threads(1)
    world = un.join(device="cpu")
    dist.init_process_group("gloo", timeout=timedelta(seconds=300))
    torch.manual_seed(world.rank)

    def ours(model: Any, optimizer: Any) -> Any:
        un.parallel(model, optimizer, "allreduce")
        return model

    wraps = {"ddp": lambda model, _: torch.nn.parallel.DistributedDataParallel(model), "ours": ours}
    found: dict[str, float] = {}
    for size in sizes:
        sides = {side: make_step(WIDTHS[size], wrap) for side, wrap in wraps.items()}
        seconds = interleaved(sides, repeats=repeats, warmup=5, before=world.barrier)
        found |= {f"{side}_ms_{size}": taken * 1e3 for side, taken in seconds.items()}
        found[f"ddp_over_ours_{size}"] = seconds["ddp"] / seconds["ours"]
        bare = count_calls(WIDTHS[size], lambda model, _: model)
        found[f"python_calls_{size}"] = count_calls(WIDTHS[size], ours) - bare
        found[f"rounds_{size}"] = count_rounds(world.ledger, sides["ours"])
        for name, side in (("segments", "ours"), ("ddp_segments", "ddp")):
            world.barrier()
            found[f"{name}_{size}"] = count_segments(sides[side])
    dist.destroy_process_group()
    if world.rank == 0:
        tell(found)
    world.barrier()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument("--mbit", type=float, default=1000.0, help="speed of a link between emulated hosts")
    parser.add_argument("--loopback", action="store_true", help="no links: processes that talk by messages")
    parser.add_argument("--sizes", nargs="+", choices=list(WIDTHS), default=list(WIDTHS))
    parser.add_argument("--repeats", type=int, default=40)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.worker:
        work(asked.sizes, asked.repeats)
        return
    arguments = ["--worker", "--repeats", str(asked.repeats), "--sizes", *asked.sizes]
    found = on_hosts(arguments, hosts=asked.hosts, mbit=None if asked.loopback else asked.mbit)
    if asked.loopback:
        found |= {key: None for key in found if "segments" in key}
    finish({**found, "hosts": asked.hosts, "mbit": None if asked.loopback else asked.mbit})


if __name__ == "__main__":
    main()
