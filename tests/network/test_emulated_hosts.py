"""`unisono run --hosts N --net LINK`, `un.on.lab`: workers on hosts of their own, and nothing is left of these."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import unisono as un

SOURCES = Path(__file__).parents[2] / "src"
SAY = """
import json, os, socket
def say(**more):
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((os.environ["MASTER_ADDR"], 9))
        address = probe.getsockname()[0]
    me = {"pid": os.getpid(), "network": os.readlink("/proc/self/ns/net"), "address": address}
    print(json.dumps({**me, "host": os.environ["UNISONO_HOST"], **more}), flush=True)
"""
SENDING = """
import time
count = 1 << 21
if os.environ["RANK"] == "0":
    with socket.create_server(("10.77.0.1", 5000)) as server:
        say()
        connection, _ = server.accept()
    began, came = None, 0
    while data := connection.recv(1 << 16):
        began = began or time.perf_counter()
        came += len(data)
    say(bits_per_s=8 * came / (time.perf_counter() - began), came=came)
else:
    deadline = time.monotonic() + 60
    while True:
        try:
            connection = socket.create_connection(("10.77.0.1", 5000))
            break
        except ConnectionRefusedError:
            assert time.monotonic() < deadline
            time.sleep(0.01)
    connection.sendall(bytes(count))
    connection.close()
    say()
"""


class Launched:
    """`unisono run` with an output that is read line by line."""

    def __init__(self, folder: Path, program: str, *options: str, before: Sequence[str] = (), python: str = "") -> None:
        (folder / "script.py").write_text(SAY + program)
        env = {**os.environ, "PYTHONPATH": str(SOURCES), "PYTHONDONTWRITEBYTECODE": "1"}
        command = [*before, python or sys.executable, "-m", "unisono", "run", *options, "--output", "prefix"]
        self.process = subprocess.Popen(
            [*command, "script.py"], env=env, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    def hear(self, count: int) -> list[dict[str, Any]]:
        """What the next lines of workers say."""
        assert self.process.stdout is not None
        lines = [self.process.stdout.readline() for _ in range(count)]
        assert all(lines), self.process.communicate()
        return [json.loads(line.partition("] ")[2]) for line in lines]

    def end(self) -> tuple[int, str]:
        """Its status, and what it said on standard error."""
        _, err = self.process.communicate(timeout=60)
        return self.process.returncode, err


def find_processes(launcher: int) -> list[int]:
    """Processes on the hosts of a run: as long as there is one, or the launcher, its namespaces are there."""
    found, mark = [], f"UNISONO_LAB={launcher}:".encode()
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):  # it ended meanwhile, or is no process
            if any(item.startswith(mark) for item in (entry / "environ").read_bytes().split(b"\0")):
                found.append(int(entry.name))
    return found


def await_nothing_left(run: Launched) -> None:
    deadline = time.monotonic() + 60
    while left := find_processes(run.process.pid):
        assert time.monotonic() < deadline, f"processes {left} still have emulated hosts"
        time.sleep(0.02)


def test_hosts_have_addresses_of_their_own_and_no_more_passes_than_was_asked_for(tmp_path: Path) -> None:
    run = Launched(tmp_path, SENDING, "--hosts", "2", "--net", "20mbit")
    workers = run.hear(3)
    status, err = run.end()
    assert status == 0, err
    said = re.search(r"2 emulated hosts: asked 20 Mbit/s, measured ([\d.]+) Mbit/s of payload, latency ", err)
    assert said is not None, err
    assert float(said[1]) < 21
    assert {(worker["host"], worker["address"]) for worker in workers} == {
        ("host0", "10.77.0.1"),
        ("host1", "10.77.0.2"),
    }
    assert len({worker["network"] for worker in workers} | {os.readlink("/proc/self/ns/net")}) == 3
    (measured,) = [worker for worker in workers if "came" in worker]
    assert measured["came"] == 1 << 21
    assert 1e6 < measured["bits_per_s"] < 21e6
    await_nothing_left(run)


@pytest.mark.parametrize("how", ["error", "SIGINT", "SIGKILL"])
def test_nothing_is_left_of_a_run(tmp_path: Path, how: str) -> None:
    program = "say()\nimport time\nwhile not os.path.exists('fail'): time.sleep(0.02)\nraise LookupError"
    run = Launched(tmp_path, program, "--hosts", "2")
    workers = run.hear(2)
    assert {worker["pid"] for worker in workers} < set(find_processes(run.process.pid))  # and their agents
    if how == "error":
        (tmp_path / "fail").touch()
    else:
        run.process.send_signal(signal.Signals[how])
    status, err = run.end()
    assert status == {"error": 1, "SIGINT": 130, "SIGKILL": -9}[how], err
    await_nothing_left(run)


def test_a_user_without_rights_has_hosts_too(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("all other tests of this file show it: they run without root")
    become = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", "env"]  # which has no rights left
    folder = Path(tempfile.mkdtemp())  # pytest's own are closed to others
    try:
        folder.chmod(0o755)
        version = "import sys; assert sys.version_info >= (3, 10)"
        check = [f"{version}; import sys; sys.path.append({str(SOURCES)!r}); import unisono.cli"]
        usable = [
            python
            for python in (sys.executable, "/usr/bin/python3")
            if not subprocess.run([*become, python, "-c", *check], capture_output=True, cwd=folder).returncode
        ]
        if not usable:
            pytest.skip("another user can run no Python here that finds these sources")
        made = subprocess.run([*become, "unshare", "-Urn", "true"], capture_output=True, text=True)
        if made.returncode:
            pytest.skip(f"users cannot make namespaces here: {made.stderr.strip()}")
        run = Launched(folder, "say(user=os.stat('script.py').st_uid)", "--hosts", "2", before=become, python=usable[0])
        workers = run.hear(2)
        status, err = run.end()
    finally:
        shutil.rmtree(folder)
    assert status == 0, err
    assert sorted(worker["address"] for worker in workers) == ["10.77.0.1", "10.77.0.2"]
    await_nothing_left(run)


def exchange() -> dict[str, Any]:
    """A worker: 1 MB through a world of ours, and through a group of torch's own."""
    import torch.distributed as dist

    world = un.join()
    world.barrier()
    ours, theirs = torch.full((250_000,), float(world.rank)), torch.full((250_000,), float(world.rank))
    began = time.perf_counter()
    world.all_reduce(ours, "mean").wait()
    took_s = time.perf_counter() - began
    dist.init_process_group("gloo")
    dist.all_reduce(theirs)
    dist.destroy_process_group()
    return {"hosts": world.hosts, "ours": ours.mean().item(), "theirs": theirs.mean().item(), "took_s": took_s}


@pytest.mark.parametrize("shaper", ["kernel", "transport"])
def test_a_function_on_emulated_hosts_exchanges_as_slowly_as_asked_for(shaper: Any) -> None:
    found = un.launch(exchange, workers=2, on=un.on.lab(net="40mbit,5ms", shaper=shaper), threads=1)
    for each in found:
        assert each["hosts"] == ("host0", "host1")
        assert each["ours"] == 0.5
        assert each["theirs"] == 1.0
        assert each["took_s"] > 0.9 * 8 * 1e6 / 40e6  # a ring of two: each sends all of it once
