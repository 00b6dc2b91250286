"""`unisono run --debugpy`, with a client that speaks the debug adapter protocol as an editor does."""

from __future__ import annotations

import argparse
import json
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from unisono.cli.vscode import open_ports

pytest.importorskip("debugpy")
RUN = [sys.executable, "-m", "unisono", "run"]
PROGRAM = "import sys; print('debugged' if sys.modules['debugpy'].is_client_connected() else 'alone')"


def find_ports(count: int) -> int:
    """The first of some ports in a row that are free."""
    for first in range(21000, 32000, count):
        try:
            for port in range(first, first + count):
                socket.create_server(("127.0.0.1", port)).close()
        except OSError:
            continue
        return first
    raise AssertionError("no free ports")


def attach(port: int) -> None:
    """Attach, and stay until the program has ended."""
    deadline = time.monotonic() + 120
    while True:
        try:
            link = socket.create_connection(("127.0.0.1", port))
            break
        except ConnectionRefusedError:
            assert time.monotonic() < deadline, "no worker listens"
            time.sleep(0.05)
    with link, link.makefile("rb") as lines:

        def send(number: int, command: str, arguments: dict[str, Any]) -> None:
            body = json.dumps({"seq": number, "type": "request", "command": command, "arguments": arguments}).encode()
            link.sendall(b"Content-Length: %d\r\n\r\n%b" % (len(body), body))

        send(1, "initialize", {"adapterID": "debugpy", "clientID": "test"})
        send(2, "attach", {"connect": {"host": "127.0.0.1", "port": port}})
        while line := lines.readline():
            size = int(line.partition(b":")[2])
            lines.readline()
            if json.loads(lines.read(size)).get("event") == "initialized":
                send(3, "configurationDone", {})


def test_each_rank_waits_for_its_debugger_and_the_editor_is_told_where(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(PROGRAM)
    (tmp_path / ".vscode").mkdir()
    mine = {"name": "mine", "type": "debugpy", "request": "launch"}
    stale = {"name": "unisono: rank 7", "type": "debugpy", "request": "attach"}
    (tmp_path / ".vscode" / "launch.json").write_text(json.dumps({"version": "0.2.0", "configurations": [mine, stale]}))
    first = find_ports(2)
    command = [*RUN, "-n", "2", "--debugpy", "--debug-port", str(first), "train.py"]
    run = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    clients = [threading.Thread(target=attach, args=(first + rank,)) for rank in range(2)]
    for client in clients:
        client.start()
    out, err = run.communicate(timeout=120)
    for client in clients:
        client.join(60)
    assert run.returncode == 0, err
    assert sorted(out.split()) == ["[0]", "[1]", "debugged", "debugged"]
    assert err.count("wait for a debugger") == 1
    written = json.loads((tmp_path / ".vscode" / "launch.json").read_text())
    assert [entry["name"] for entry in written["configurations"]] == ["mine", "unisono: rank 0", "unisono: rank 1"]
    assert [entry["connect"]["port"] for entry in written["configurations"][1:]] == [first, first + 1]
    assert written["compounds"][0]["configurations"] == ["unisono: rank 0", "unisono: rank 1"]


def test_a_port_in_use_is_named(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(PROGRAM)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        command = [
            sys.executable,
            "-m",
            "unisono",
            "run",
            "-n",
            "1",
            "--debugpy",
            "--debug-port",
            str(port),
            "train.py",
        ]
        ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 2
    assert f"port {port} is in use" in ended.stderr


def test_a_launch_file_that_cannot_be_written_ends_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A container's folder of programs is often read-only."""
    monkeypatch.chdir(tmp_path)
    Path(".vscode").touch()
    options = argparse.Namespace(debugpy=True, debug_port=find_ports(2), on="local", workers=(None, 2), pdb=False)
    assert open_ports(options, argparse.ArgumentParser(), 2) == options.debug_port
    assert "launch.json, which cannot be written: File exists" in capsys.readouterr().err
