"""Collectives between real processes, over each transport; and what is left, and said, when one of them dies."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import unisono as un
from collective_matrix import check_dtype, check_everything, reference, values
from preloaded import Program
from unisono import World

TESTS = Path(__file__).parents[1]
SOURCES = Path(un.__file__).parents[1]


def through(hosts: str, *, shared: bool, check: Callable[[World], Any] = check_everything) -> list[Any]:
    """`check(world)` in processes that meet in the launcher's store; a letter for each rank's host."""

    def work() -> Any:
        os.environ.pop("UNISONO_SHM_FD")
        os.environ["UNISONO_HOST"] = hosts[int(os.environ["RANK"])]
        os.environ["UNISONO_SHARED_MEMORY"] = str(int(shared))
        world = un.join()
        result = check(world)
        world.close()
        return result

    return un.launch(work, workers=len(hosts), timeout_s=100)


def quick(world: World) -> str:
    """The parts of the matrix that can differ between processes and threads."""
    for dtype in (torch.float32, torch.bfloat16):
        check_dtype(world, dtype)
    from collective_matrix import CHECKS

    for check in CHECKS.values():
        check(world)
    return repr(world)


# Results -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [2, 3])
def test_shared_memory_equals_one_process(size: int) -> None:
    def work() -> str:
        world = un.join()
        n = 2_500_000 + 13  # 10 MB: several blocks of the stage
        raw = [values(r, [n], torch.float32) for r in range(size)]
        mean = reference(raw, "mean")
        shared = world.empty(n)
        for kind in ("private", "shared", "mixed", "slice"):
            x = shared if kind in ("shared", "slice") or (kind == "mixed" and world.rank == 0) else torch.empty(n)
            x.copy_(raw[world.rank])
            low, high = (100, n - 5) if kind == "slice" else (0, n)
            world.all_reduce(x[low:high], "mean").wait()
            torch.testing.assert_close(x[low:high], mean[low:high], rtol=1e-6, atol=1e-6, msg=kind)
        small = [world.all_reduce(torch.tensor([float(i)]), "sum") for i in range(60)]
        assert [h.wait().item() for h in small] == [float(size * i) for i in range(60)]
        text = check_everything(world) if size == 2 else quick(world)
        assert un.join() is world
        for _ in range(3):  # other worlds of the same processes
            world.close()
            assert un.join() is not world
            world = un.join()
            assert world.all_reduce(torch.ones(5000), "sum").wait().eq(size).all()
        return text

    texts = un.launch(work, workers=size, timeout_s=100)
    assert all("shared memory)" in text for text in texts)


def test_messages_equal_one_process() -> None:
    assert all("messages)" in text for text in through("aab", shared=False, check=quick))


@pytest.mark.parametrize("hosts", ["abab", "aab"])
def test_hosts_combined_equal_one_process(hosts: str) -> None:
    texts = through(hosts, shared=True, check=quick)
    for rank, text in enumerate(texts):
        assert "shared memory and messages)" in text
        assert f"host='{hosts[rank]}'" in text


def test_torchrun_starts_a_world_beside_the_programs_own_process_group(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(
        textwrap.dedent("""
            import torch, torch.distributed as dist, unisono as un
            world = un.join()
            x = torch.ones(5000) * (world.rank + 1)
            assert world.all_reduce(x, "sum").wait().eq(3).all()
            dist.init_process_group("gloo")
            y = torch.ones(3)
            dist.all_reduce(y)
            assert y.eq(2).all()
            open(f"rank{world.rank}", "w").write(repr(world))
            dist.destroy_process_group()
        """)
    )
    env = {**os.environ, "PYTHONPATH": str(SOURCES), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "script.py"]
    ended = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 0, ended.stderr
    for rank in (0, 1):
        assert re.match(rf"World\(rank={rank}, size=2.*shared memory\)", (tmp_path / f"rank{rank}").read_text())


# Failures ----------------------------------------------------------------------------------------------------


class Ranks:
    """Processes that only share a store: no launcher stops the others when one dies."""

    def __init__(self, folder: Path, text: str, hosts: str, *, shared: bool) -> None:
        self.folder = folder
        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        (folder / "script.py").write_text(textwrap.dedent(text))
        self.processes = []
        for rank, host in enumerate(hosts):
            env = {name: value for name, value in os.environ.items() if not name.startswith("UNISONO_")}
            env |= {"RANK": str(rank), "WORLD_SIZE": str(len(hosts)), "LOCAL_RANK": str(rank)}
            env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(self.store.port)}
            env |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "UNISONO_SHARED_MEMORY": str(int(shared))}
            env |= {"UNISONO_HOST": host, "OMP_NUM_THREADS": "1"}
            env |= {"PYTHONPATH": os.pathsep.join([str(SOURCES), str(TESTS)])}
            self.processes.append(Program(folder / "script.py", cwd=folder, env=env))

    def finish(self) -> list[int]:
        codes = []
        for process in self.processes:
            _, errors = process.communicate(timeout=60)
            codes.append(process.returncode)
            assert process.returncode in (0, -signal.SIGKILL), errors
        return codes

    def end(self) -> None:
        for process in self.processes:
            process.kill()
            process.communicate()


@pytest.fixture
def ranks(tmp_path: Path) -> Iterator[Callable[..., Ranks]]:
    started: list[Ranks] = []

    def start(text: str, hosts: str, *, shared: bool) -> Ranks:
        started.append(Ranks(tmp_path, text, hosts, shared=shared))
        return started[-1]

    before = set(os.listdir("/dev/shm"))
    yield start
    for each in started:
        each.end()
    others = ("torch_", "vader_segment")  # of data loaders and of Open MPI, in tests that run meanwhile
    left = {name for name in os.listdir("/dev/shm") if not name.startswith(others)}
    assert left <= before, "nothing may be left"


KILLS = """
    import json, os, signal, threading, time, torch, unisono as un
    from unisono import PeerLost

    world = un.join()
    three = world.split([[0, 1, 2], [3]])
    two = three.split([[0, 1], [2]]) if world.rank < 3 else None
    seen = []

    def lost(call):
        try:
            call()
        except PeerLost as error:
            seen.append([str(error), victim])
        else:
            raise AssertionError("nothing was raised")

    def die_soon():
        threading.Timer(0.15, os.kill, [os.getpid(), signal.SIGKILL]).start()

    def forever(call):
        while True:
            call()

    pids = world.gather_objects(os.getpid())
    big, small = torch.ones(4_000_000), torch.ones(3)
    # a large all_reduce, again and again: the death comes in its midst
    victim = pids[3]
    if world.rank == 3:
        die_soon()
        forever(lambda: world.all_reduce(big, "max").wait())
    lost(lambda: forever(lambda: world.all_reduce(big, "max").wait()))
    # small ones
    victim = pids[2]
    if world.rank == 2:
        die_soon()
        forever(lambda: three.all_reduce(small, "max").wait())
    lost(lambda: forever(lambda: three.all_reduce(small, "max").wait()))
    # a message that never comes
    victim = pids[1]
    if world.rank == 1:
        die_soon()
        time.sleep(60)
    lost(lambda: two.recv(small, 1).wait())
    with open("seen.json", "w") as file:
        json.dump(seen, file)
"""


@pytest.mark.parametrize(
    ("hosts", "shared"), [("aaaa", True), ("aaaa", False), ("aabb", True)], ids=["shared memory", "messages", "hosts"]
)
def test_a_killed_rank_is_named_by_the_others(hosts: str, shared: bool, ranks: Callable[..., Ranks]) -> None:
    running = ranks(KILLS, hosts, shared=shared)
    assert running.finish() == [0, -9, -9, -9]
    seen = json.loads((running.folder / "seen.json").read_text())
    assert len(seen) == 3
    for text, pid in seen:  # by its death, not by a timeout
        assert re.search(rf"rank \d \(process {pid}\b.*has died", text), text


def test_a_rank_that_dies_while_a_world_is_split_is_named(ranks: Callable[..., Ranks]) -> None:
    """All others wait for it at the new world's page, where it never came."""
    text = """
        import os, signal, unisono as un
        from unisono.world.transports import shared
        os.environ["UNISONO_TIMEOUT_S"] = "10"
        world = un.join()
        pids = world.gather_objects(os.getpid())
        if world.rank == 2:
            shared.SharedTransport = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)
        try:
            world.split([[0, 1, 2]])
        except un.PeerLost as error:
            assert f"rank 2 (process {pids[2]}) has " in str(error), error
        else:
            raise AssertionError
    """
    assert ranks(text, "aaa", shared=True).finish() == [0, 0, -9]


def test_a_rank_in_another_collective_is_told_to_all(ranks: Callable[..., Ranks]) -> None:
    text = """
        import torch, unisono as un
        world = un.join()
        calls = [
            lambda: world.all_reduce(torch.ones(5000)).wait(),
            lambda: world.broadcast(torch.ones(5000)).wait(),
            lambda: world.all_reduce(torch.ones(5)).wait(),
        ]
        try:
            calls[world.rank]()
        except un.Mismatch as error:
            print(error)
        else:
            raise AssertionError
    """
    for shared in (True, False):
        assert ranks(text, "aaa", shared=shared).finish() == [0, 0, 0]


WORKING = """
    import os, sys, time, torch, unisono as un
    world = un.join()
    x = world.empty(1_000_000)
    world.all_reduce(x.zero_()).wait()
    world.send(x, 1 - world.rank)
    world.recv(torch.empty(1_000_000), 1 - world.rank).wait()
    inside = world.split("host")
    inside.all_reduce(torch.ones(5000)).wait()
    with open(f"ready{world.rank}", "w") as file:
        file.write(f"{os.getpid()}\\n")
    world.barrier()
    time.sleep(0.3)  # the test sees both files
    how = sys.argv[1]
    if how == "exception" and world.rank == 1:
        raise ValueError("deliberate")
    if how == "kill" and world.rank == 1:
        os.kill(os.getpid(), 9)
    if how != "normal":
        while True:
            world.all_reduce(x).wait()
"""


@pytest.mark.parametrize("how", ["normal", "exception", "interrupt", "kill"])
def test_nothing_is_left_in_shared_memory(how: str, run_script: Callable[..., Any], still_running: Any) -> None:
    before = set(os.listdir("/dev/shm"))
    launched = run_script(WORKING, "-n", "2", args=[how])
    pids = launched.wait_for_files("ready0", "ready1")
    if how == "interrupt":
        launched.signal(signal.SIGINT)
    code, _, _ = launched.finish()
    assert (code == 0) == (how == "normal")
    assert still_running(pids, within_s=2) == []
    assert set(os.listdir("/dev/shm")) <= before
