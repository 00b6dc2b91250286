"""Workers that hang, each in another way: every one is named, with the cause and its line of the program."""

from __future__ import annotations

import ctypes
import inspect
import os
import re
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from test_collectives import Ranks
from test_collectives import ranks as ranks
from test_engine_run import Here
from torch import nn
from torch.utils.data import DataLoader, Dataset

import unisono as un
from unisono.launchers.control import Gone, ask_for_report, ask_for_stacks
from unisono.launchers.runtime import stacks
from unisono.launchers.worker import program

pytestmark = pytest.mark.timeout(120)
DEADLINE_S = 2.0


class Slow(Dataset[int]):
    """Its second batch never comes."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, i: int) -> int:
        if i >= 4:
            time.sleep(600)  # the loader
        return i


def hold_lock() -> None:
    """In native code that never returns, and does not let go of Python's lock."""
    library, mutex = ctypes.PyDLL(None), ctypes.create_string_buffer(64)
    for _ in range(2):
        library.pthread_mutex_lock(mutex)  # the lock


def hang(deadline_s: float, processes: int) -> None:
    """In every worker: rank 0 waits for the others, which hang in their own ways.

    The deadline holds from the first step on: on a busy machine, loaders take a while to begin.
    """
    world, channels = un.join(device="cpu"), []
    split = world.split
    world.split = lambda *groups, **how: channels.append(split(*groups, **how)) or channels[-1]  # type: ignore[method-assign, func-returns-value]
    model = nn.Linear(3, 3)
    replica = un.parallel(model, torch.optim.SGD(model.parameters(), 0.1), "allreduce")
    for _ in DataLoader(Slow(), batch_size=4, num_workers=processes) if world.rank == 1 else range(2):
        model(torch.randn(2, 3) + world.rank).sum().backward()  # the exchange
        for channel in channels:
            channel.transport.set_timeout(deadline_s)
        if world.rank == 2:
            hold_lock()
        while world.rank == 3:
            sum(range(1000))  # the code
    replica.close()


def line_of(text: str) -> str:
    lines = Path(__file__).read_text().splitlines()
    (found,) = [number for number, line in enumerate(lines, 1) if line.endswith(f"# {text}")]
    return rf"{Path(__file__).name}:{found}"


@pytest.mark.parametrize(("where", "processes"), [("here", 0), ("engine", 1)])
def test_workers_that_hang_are_named_with_cause_and_place(
    where: str, processes: int, capfd: pytest.CaptureFixture[str]
) -> None:
    """`processes`: that load data beside a worker; the loader hangs in one of them."""
    with pytest.raises(un.WorkerError) as caught:
        un.launch(hang, 4, args=(DEADLINE_S, processes), on=None if where == "here" else Here(), timeout_s=60)
    said = next(line for line in str(caught.value).splitlines() if "a collective has taken" in line)
    assert re.search(rf"rank 0 waits in all_reduce gradients/0 \(bias and 1 more\) at {line_of('the exchange')}", said)
    assert f"rank 1 is in its data loader at {line_of('the loader')}" in said
    assert f"rank 2 is in native code that holds Python's lock (GIL) at {line_of('the lock')}" in said
    assert re.search(rf"rank 3 is in Python code at {Path(__file__).name}:\d+", said)
    told = [line for line in capfd.readouterr().err.splitlines() if "a collective has taken" in line]
    assert "they give up after 2 s" in told[0], "it is said once at a quarter of the time"
    assert len(told) == 2


def test_stacks_are_told_who_asks_and_the_run_goes_on(tmp_path: Path) -> None:
    """A run in another thread of this process, whose rank 1 waits for a file."""

    def waits(folder: str) -> int:
        world = un.join(device="cpu")
        if world.rank == 1:
            while not os.path.exists(f"{folder}/go"):
                time.sleep(0.01)  # the wait
        world.barrier()  # the barrier
        return world.rank

    results: list[Any] = []
    run = threading.Thread(target=lambda: results.append(un.launch(waits, 2, args=(str(tmp_path),), timeout_s=60)))
    run.start()
    try:
        report = _ask_until(lambda text: "rank 0 waits in all_reduce" in text and "rank 1 is in Python code" in text)
    finally:
        (tmp_path / "go").touch()
        run.join()
    assert results == [[0, 1]]
    assert f"rank 0 waits in all_reduce barrier at {line_of('the barrier')}" in report["text"]
    assert f"rank 1 is in Python code at {line_of('the wait')}" in report["text"]
    assert [verdict["rank"] for verdict in report["verdicts"]] == [1]
    assert all(f'File "{__file__}"' in text for text in report["stacks"].values())
    with pytest.raises(Gone):
        ask_for_stacks(os.getpid())


def _ask_until(ready: Callable[[str], bool]) -> dict[str, Any]:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        try:
            found = ask_for_report(os.getpid())
        except (Gone, ValueError):
            time.sleep(0.02)
            continue
        if ready(found["text"]):
            return found
    raise AssertionError("the workers never came there")


def test_ranks_that_no_launcher_watches_read_each_others_stacks(ranks: Callable[..., Ranks], tmp_path: Path) -> None:
    text = """
        import os, time, torch, unisono as un
        world = un.join(device="cpu")
        world.barrier()
        world.transport.timeout_s = 2.0
        channel = world.channel()
        while world.rank == 1 and not os.path.exists("done"):
            time.sleep(0.01)
        try:
            if world.rank != 1:
                channel.all_reduce(torch.ones(3), tag="x").wait()
        except un.PeerLost:
            open("done", "w").close()
    """
    started = ranks(text, "aaa", shared=True)
    said = "".join(process.communicate(timeout=60)[1] for process in started.processes)
    assert "2 ranks (0, 2) wait in all_reduce x at script.py:11; rank 1 is in Python code at script.py:8" in said
    assert [process.returncode for process in started.processes] == [0, 0, 0]


def test_worker_and_launcher_mean_the_same_signal() -> None:
    assert program._STACKS_SIGNAL == stacks.SIGNAL
    assert 'environ["UNISONO_STACKS_FD"]' in inspect.getsource(program.main)
    assert stacks.VARIABLE == "UNISONO_STACKS_FD"


def test_a_process_without_the_handler_is_not_signalled() -> None:
    """The signal would end it."""
    file = stacks.StackFile()
    pid = os.fork()
    if pid == 0:
        signal.signal(stacks.SIGNAL, signal.SIG_DFL)
        time.sleep(60)
        os._exit(0)
    try:
        assert stacks.read_stacks({pid: file}) == {pid: ""}
        assert os.waitpid(pid, os.WNOHANG) == (0, 0), "it still runs"
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        file.close()
