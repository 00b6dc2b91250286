"""The socket at which a run can be asked something, and what `unisono scale` says."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from unisono.cli.command_line import main
from unisono.launchers import control
from unisono.launchers.control import MOST_CONNECTIONS, Control
from unisono.launchers.runtime.files import find_private_folder
from unisono.launchers.runtime.local_channel import EventLoop, LocalChannel


class Listening:
    """A run that is only its socket, served by a thread."""

    def __init__(self, folder: Path, pid: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.pid, self.path, self.wanted = pid, folder / f"{pid}.run", 2
        self.loop = EventLoop()
        self.control = Control(self.loop, self.answer)
        with monkeypatch.context() as patch:
            patch.setattr(control.os, "getpid", lambda: pid)
            self.control.open()
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        if request["do"] == "scale":
            self.wanted = request["workers"]
        facts = {"pid": self.pid, "program": f"train-{self.pid}.py", "workers": 2, "wanted": self.wanted}
        return {**facts, "least": 1, "most": 4, "step": 7, "adapts": False}

    def _serve(self) -> None:
        while not self._end.is_set():
            self.loop.pump(0.01)

    def close(self) -> None:
        self._end.set()
        self._thread.join()
        self.control.close()
        self.loop.close()


@pytest.fixture
def listen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], Listening]]:
    """listen(pid): a run of that launcher."""
    tmp_path.chmod(0o700)
    monkeypatch.setenv("UNISONO_WARM", str(tmp_path))
    runs: list[Listening] = []

    def start(pid: int) -> Listening:
        runs.append(Listening(tmp_path, pid, monkeypatch))
        return runs[-1]

    yield start
    for run in runs:
        run.close()
        assert not run.path.exists()


def test_the_one_run_is_found(listen, capsys):
    assert main(["scale"]) == 1
    told = "unisono scale: no run with -n MIN:MAX of this user is active on this host\n"
    assert capsys.readouterr() == ("", told)
    run = listen(11)
    assert main(["scale"]) == 0
    assert capsys.readouterr() == ("workers: 2 (MIN 1, MAX 4), step 7\n", "")
    assert main(["scale", "3"]) == 0
    assert capsys.readouterr() == ("workers: 2, 3 to be (MIN 1, MAX 4), step 7\n", "")
    assert run.wanted == 3


def test_of_several_runs_one_has_to_be_named(listen, capsys):
    first, second = listen(11), listen(12)
    assert main(["scale", "3"]) == 1
    told = capsys.readouterr().err
    assert "there are 2 runs; name one:\n" in told
    assert "  --run 11   train-11.py: workers: 2 (MIN 1, MAX 4), step 7\n" in told
    assert "  --run 12   train-12.py: " in told
    assert main(["scale", "3", "--run", "12"]) == 0
    assert (first.wanted, second.wanted) == (2, 3)


def test_a_socket_that_was_left_behind_is_told_and_removed_by_the_next_run(listen, tmp_path, capsys):
    dead, lives = tmp_path / "13.run", listen(11)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
        sock.bind(str(dead))
    assert main(["scale", "--run", "13"]) == 1
    assert "the launcher 13 was killed and its socket was left behind" in capsys.readouterr().err
    listen(12)
    assert not dead.exists()
    assert lives.path.exists()


def test_a_wait_ends_where_another_number_is_asked_for(listen, monkeypatch, capsys):
    run = listen(11)
    monkeypatch.setattr("unisono.cli.under_way.time.sleep", lambda _: setattr(run, "wanted", 4))
    assert main(["scale", "3", "--wait"]) == 1
    assert "the run aims at 4 workers now" in capsys.readouterr().err


def test_another_user_is_not_answered(listen, monkeypatch):
    run = listen(11)
    monkeypatch.setattr(LocalChannel, "is_of_this_user", lambda _: False)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
        sock.settimeout(30)
        sock.connect(str(run.path))
        assert sock.recv(1) == b""


def test_connections_that_say_nothing_do_not_keep_others_out(listen):
    run = listen(11)
    silent = []
    for _ in range(MOST_CONNECTIONS + 5):
        silent.append(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
        silent[-1].connect(str(run.path))
        silent[-1].settimeout(30)
    assert control.ask(11, {"do": "status"}).workers == 2
    assert silent[0].recv(1) == b""
    for sock in silent:
        sock.close()


def test_a_folder_that_others_can_enter_is_not_used(listen, tmp_path, capsys):
    tmp_path.chmod(0o755)
    assert main(["scale"]) == 1
    assert "is not a folder of this user alone" in capsys.readouterr().err


@pytest.mark.parametrize("runtime", ["", "missing"])
def test_a_runtime_folder_that_is_not_there_is_not_used(
    runtime: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("UNISONO_WARM", raising=False)
    monkeypatch.setenv("XDG_RUNTIME_DIR", runtime and str(tmp_path / runtime))
    monkeypatch.chdir(tmp_path)
    assert find_private_folder() == Path(f"/tmp/unisono-{os.getuid()}")
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert find_private_folder() == tmp_path / "unisono"
