"""What tests run in workers: functions by name, so that workers import this file and no test."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import unisono as un

ROWS = 22


def shares(part: Any, others: Any = (), batch_size: int = 4) -> dict[str, Any]:
    """Every batch of one epoch of an unshuffled shard: its values of y, and my weight; and all samples here."""
    world = un.join(device="cpu")
    batches = [(batch["y"].tolist(), world.weight) for batch in un.shard(part, batch_size=batch_size, shuffle=False)]
    samples = two_tables(part, {"check": others})
    return {"rows": len(part), "batches": batches, "mean": _mean(part), "samples": samples}


def _mean(part: Any) -> float:
    """The mean of y as a training loop finds it: by gradient descent with the weights of unequal batches."""
    import torch

    world = un.join(device="cpu")
    model = torch.nn.Linear(1, 1, bias=False, dtype=torch.float64)
    torch.nn.init.zeros_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    un.parallel(model, optimizer, "allreduce")
    for batch in un.shard(part, batch_size=ROWS):  # one batch: the gradient is that of the whole table
        optimizer.zero_grad()
        (
            0.5 * (model(torch.ones(len(batch["y"]), 1, dtype=torch.float64)) - batch["y"][:, None]) ** 2
        ).mean().backward()
        optimizer.step()
    assert world.size == 2
    return 2 * float(model.weight)


def two_tables(train: Any, others: dict[str, Any]) -> tuple[list[Any], list[Any]]:
    """The samples that lie here, of two tables."""
    return [train[i] for i in range(len(train))], [others["check"][i] for i in range(len(others["check"]))]


def kill_the_engines_process(flag: str) -> tuple[int, str]:
    """Rank 1 kills the process of the engine that runs its agent; once, where `flag` is a file to leave."""
    world = un.join(device="cpu")
    if world.rank == 1 and not Path(flag).exists():
        Path(flag).touch()
        stat = Path(f"/proc/{os.environ['UNISONO_AGENT_PID']}/stat").read_text()  # whose parent it is
        os.kill(int(stat.rpartition(")")[2].split()[1]), signal.SIGKILL)
        signal.pause()
    world.barrier()
    return world.rank, os.environ["UNISONO_ATTEMPT"]


def fail_on_rank_1() -> None:
    """An ordinary error."""
    world = un.join(device="cpu")
    if world.rank == 1:
        raise KeyError("no such column")
    world.barrier()


def gradient(part: Any, w: Any) -> Any:
    """Of the squares, on a part (x, y)."""
    x, y = part
    return x.T @ (x @ w - y)


def descend(x: Any, y: Any, rounds: int) -> Any:
    """Gradient descent on the squares in this process, as `gradient` and an update of w - g / rows have it."""
    w = 0.0 * x[0]
    for _ in range(rounds):
        w = w - gradient((x, y), w) / len(y)
    return w


def gradient_and_place(part: Any, state: tuple[Any, str]) -> tuple[Any, list[tuple[int, int]]]:
    """The same, and where the part is: its process and object. In the third round a process is killed, once."""
    w, flag = state
    if flag.endswith("2") and not Path(flag).exists():
        Path(flag).touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return gradient(part, w), pids(part, None)


def dies_once(part: Any, flag_and_round: Any) -> int:
    """Kills its process in round 2, where the flag is not yet there."""
    flag, number = flag_and_round
    if number == 2 and not Path(flag).exists():
        Path(flag).touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return len(part)


def pids(part: Any, state: Any) -> list[tuple[int, int]]:
    """Which process maps the part, and which object the part is there."""
    del state
    return [(os.getpid(), id(part))]
