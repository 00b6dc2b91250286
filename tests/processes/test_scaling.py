"""Another number of workers while they train: by `unisono scale`, and found by measuring."""

from __future__ import annotations

import os
import re
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

import unisono as un
from unisono.cli.command_line import main
from unisono.launchers.control import ask
from unisono.launchers.forks import connect_warm, stop_warm
from unisono.launchers.runtime.files import find_private_folder

MODEL = """
import torch
from torch import nn

def make():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1)).double()
    x = torch.randn(96, 6, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
    return model, torch.optim.Adam(model.parameters(), lr=0.01), (x, x.sum(1, keepdim=True))
"""
SCRIPT = (
    MODEL
    + """
import atexit, sys, time
from pathlib import Path
import unisono as un

def wait_while(condition):
    while condition():
        time.sleep(0.01)

atexit.register(wait_while, Path("hold").exists)
Path("starts").write_text("yes\\n")
wait_while(Path("not-yet").exists)
world = un.join(device="cpu")
model, optimizer, data = make()
replica = un.parallel(model, optimizer, "allreduce")
shard = un.shard(data, batch_size=6)
sizes, naps = [], {1: 0.01, **{n: float(nap) for n, nap in enumerate(sys.argv[1:], 1)}}
done = False
while not done:
    for x, y in shard:
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
        time.sleep(naps.get(world.size, 0.01))
        if sizes[-1:] != [world.size]:
            sizes.append(world.size)
        if world.rank == 0 and sizes[-3:] == [2, 3, 2]:
            Path("both-ways").write_text("seen\\n")
        if world.rank == 0 and replica.step == 3:
            Path("trains").write_text("yes\\n")
        done = world.size == 1 and Path("stop").exists()
        if done:
            break
torch.save([replica.step, list(model.parameters())], "result.pt")
print("the end", world.rank)
"""
)


@pytest.fixture
def scale(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """scale(*arguments) is `unisono scale *arguments`: its exit status, standard output and standard error."""

    def run(*arguments: str) -> tuple[int, str, str]:
        return (main(["scale", *arguments]), *capsys.readouterr())

    return run


def check_result(folder: Path) -> None:
    """The weights are those of one process and plain PyTorch, after as many steps."""
    names: dict = {}
    exec(MODEL, names)
    model, optimizer, data = names["make"]()
    steps, found = torch.load(folder / "result.pt")
    shard = un.shard(data, batch_size=6, world=un.World())
    left = steps
    while left:
        for x, y in shard:
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
            left -= 1
            if not left:
                break
    for a, b in zip(found, model.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)


def test_workers_come_and_leave_as_asked_and_the_weights_are_those_of_one_process(run_script, scale, tmp_path):
    launched = run_script(SCRIPT, "-n", "1:3")
    launched.wait_for_files("trains")
    pid = str(launched.process.pid)
    socket_path = find_private_folder() / f"{pid}.run"
    for count in ("2", "3", "1"):
        status, out, err = scale(count, "--run", pid, "--wait")
        assert (status, err) == (0, "")
        assert re.match(rf"workers: {count} \(MIN 1, MAX 3\), step \d+\n", out)
    status, out, err = scale("4", "--run", pid)
    assert (status, out, err) == (1, "", "unisono scale: got 4 workers; this run takes 1 to 3 (-n 1:3)\n")
    ask_nonsense(socket_path)
    scale("3", "--run", pid, "--wait")
    (tmp_path / "hold").touch()
    scale("1", "--run", pid, "--wait")
    status, out, err = scale("3", "--run", pid)  # those that have left are still there
    assert (status, err) == (0, "")
    assert out.startswith("workers: 1, 3 to be (MIN 1, MAX 3), step")
    (tmp_path / "hold").unlink()
    for count in ("3", "1"):
        assert scale(count, "--run", pid, "--wait")[0] == 0
    (tmp_path / "stop").touch()
    status, out, err = launched.finish()
    assert status == 0, err
    assert out == "[0] the end 0\n"
    assert "lost" not in err
    formed = re.findall(r"^unisono: (\d) workers? continues?$", err, re.MULTILINE)
    assert re.fullmatch("2312?312?31", "".join(formed)), err  # newcomers may come one by one
    assert not socket_path.exists()
    check_result(tmp_path)


def ask_nonsense(path: Path) -> None:
    """Whatever comes is answered with an error, and the run goes on."""
    for text in (
        b"what?",
        b"[]",
        b"[" * 60_000,
        b'{"do": "scale", "workers": true}',
        b'{"do": "scale", "workers": "2"}',
        b"\xff\xfe",
        b"+",
        b"x" * 100_000,
    ):
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
            sock.settimeout(30)
            sock.connect(str(path))
            sock.send(text)
            assert b'"error"' in sock.recv(1 << 16), text
    for _ in range(40):  # they say nothing, and leave
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
            sock.connect(str(path))


def test_the_number_of_workers_that_pays_is_found_both_ways(run_script, scale, tmp_path):
    launched = run_script(SCRIPT, "-n", "1:3", "--adapt", "--window", "0.05", args=["0.04", "0.01", "0.04"])
    launched.wait_for_files("both-ways")
    assert scale("1", "--run", str(launched.process.pid), "--wait")[0] == 0
    (tmp_path / "stop").touch()
    status, _, err = launched.finish()
    assert status == 0, err
    assert re.search(r"unisono: 1 worker: [\d.]+ steps/s: one more\n", err)
    assert re.search(r"unisono: 2 workers: .* \(the second was worth [\d.]+ of a worker\): one more\n", err)
    assert re.search(r"unisono: 3 workers: .* \(the third was worth -?[\d.]+ of a worker\): one less", err)
    assert "unisono: the number of workers was asked for, and is not adapted any more\n" in err
    assert "lost" not in err
    check_result(tmp_path)


def ask_until_known(scale, pid: str) -> None:
    """The socket is there when all workers have been started."""
    while scale("--run", pid)[0]:
        time.sleep(0.01)


@pytest.fixture
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Launchers of tests beside this one are no part of it; the fork server, if there is one, is theirs."""
    (tmp_path / "own").mkdir(mode=0o700)
    if is_warm := os.environ["UNISONO_WARM"] != "0":
        connect_warm().close()
        for path in find_private_folder().glob("*.socket"):
            (tmp_path / "own" / path.name).symlink_to(path)
    monkeypatch.setenv("UNISONO_WARM", str(tmp_path / "own"))
    yield
    if not is_warm:
        stop_warm()


@pytest.mark.usefixtures("own_folder")
def test_a_killed_launcher_is_named_and_its_socket_removed_by_the_next(run_script, scale, tmp_path):
    first = run_script(SCRIPT, "-n", "1:1")
    first.wait_for_files("trains")
    first.signal(signal.SIGKILL)
    first.process.wait()
    path = find_private_folder() / f"{first.process.pid}.run"
    assert path.exists()
    status, _, err = scale("--run", str(first.process.pid))
    assert (status, "was killed" in err) == (1, True), err
    (tmp_path / "not-yet").touch()
    (tmp_path / "starts").unlink()
    second = run_script(SCRIPT, "-n", "1:2", "--adapt")
    second.wait_for_files("starts")
    pid = str(second.process.pid)
    ask_until_known(scale, pid)
    assert not path.exists()
    assert scale("2", "--run", pid)[0] == 0  # before the first step
    (tmp_path / "not-yet").unlink()
    for count in ("2", "1"):
        status, _, err = scale(count, "--run", pid, "--wait")
        assert status == 0, err
    (tmp_path / "stop").touch()
    status, _, err = second.finish()
    assert status == 0, err
    assert "lost" not in err
    status, _, err = scale("--run", pid)
    assert (status, err) == (
        1,
        f"unisono scale: process {pid} is no launcher of a run of this user that is under way\n",
    )
    check_result(tmp_path)


def train_until(folder: str) -> tuple[str, int]:
    world = un.join(device="cpu")
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    replica = un.parallel(model, optimizer, "allreduce")
    for _ in range(10**6):
        for x in un.shard(torch.ones(8, 2), batch_size=4):
            optimizer.zero_grad()
            model(x).sum().backward()
            optimizer.step()
            if replica.step >= 3:
                Path(folder, "trains").touch()
            if world.broadcast_object(Path(folder, "stop").exists(), 0):
                return "the end", world.rank
    raise AssertionError("it was not stopped")


def test_a_launched_function_has_the_result_of_the_worker_that_had_a_place_last(tmp_path):
    """The number of workers changes from two to one and back, so that the second place is given away twice."""
    told: list[Exception] = []

    def change() -> None:
        try:
            while not (tmp_path / "trains").exists():
                time.sleep(0.01)
            for count in (1, 2):
                ask(os.getpid(), {"do": "scale", "workers": count})
                while ask(os.getpid(), {"do": "status"}).workers != count:
                    time.sleep(0.01)
        except Exception as error:
            told.append(error)
        (tmp_path / "stop").touch()

    thread = threading.Thread(target=change)
    thread.start()
    results = un.launch(train_until, workers=2, least=1, args=(str(tmp_path),), timeout_s=60)
    thread.join()
    assert told == []
    assert results == [("the end", 0), ("the end", 1)]
