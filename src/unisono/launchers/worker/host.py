"""The launcher's hand on a host that ssh reaches: starts torchrun there, and ends it when the launcher goes.

Started by start.py, without torch; one line of JSON on standard input says what to do (ssh.py). Standard input stays
open for as long as the launcher lives.
"""

from __future__ import annotations

import json
import os
import secrets
import select
import signal
import subprocess
import sys
import time

from unisono.launchers import guard
from unisono.launchers.channel import Channel, Unreachable, connect
from unisono.launchers.processes import pid_fd

__all__ = ["serve_host"]

_UNREACHED = 97


def serve_host() -> int:
    """Run torchrun as told, to its end or the launcher's."""
    setup = json.loads(_first_line())
    try:
        channel = connect([(host, port) for host, port in setup["launcher"]], bytes.fromhex(setup["token"]))
    except Unreachable as error:
        print(f"unisono: {error}", file=sys.stderr)
        return _UNREACHED
    channel.send_json(kind="host")
    here, there = channel.sock.getsockname()[0], channel.sock.getpeername()[0]
    run_id = secrets.token_hex(12)
    runs = ":".join(filter(None, [setup["env"].get("UNISONO_RUN"), run_id]))
    meeting = [
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint={there}:{setup['store_port']}",
        f"--rdzv-id={runs.partition(':')[0]}",
        "--rdzv-conf=is_host=0,join_timeout=60,close_timeout=5",
        f"--local-addr={here}",
    ]
    if setup["store_port"] is None:  # this is the only host
        meeting = ["--standalone"]
    command = [*setup["torchrun"], *meeting, "--no-python", *setup["agent"]]
    env = {**os.environ, **setup["env"], "UNISONO_RUN": runs, "UNISONO_LAUNCHER": f"{there}:{_port(channel)}"}
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # of a closed session: what it means is read from standard input
    process = subprocess.Popen(command, env=env, stdin=subprocess.DEVNULL, start_new_session=True)
    try:
        return _watch(process, channel)
    finally:
        guard.sweep(run_id, [process.pid], patience_s=0.5)
        if process.poll() is None:
            process.kill()
        process.wait()


def _first_line() -> bytes:
    """Read without a buffer, so that what follows stays visible to `poll`."""
    line = b""
    while not line.endswith(b"\n") and (data := os.read(0, 1)):
        line += data
    return line


def _port(channel: Channel) -> int:
    port: int = channel.sock.getpeername()[1]
    return port


def _watch(process: subprocess.Popen[bytes], channel: Channel) -> int:
    """Until torchrun ends, or the launcher: then torchrun is told to, and has two seconds."""
    poll = select.poll()
    ended = pid_fd(process.pid)
    for fd in (0, channel.fileno(), *([ended] if ended is not None else [])):
        poll.register(fd, select.POLLIN)
    while process.poll() is None:
        for fd, _ in poll.poll(500):
            if fd == ended:
                continue
            data = os.read(fd, 4096) if fd == 0 else channel.sock.recv(4096)
            if not data:
                process.terminate()
                deadline = time.monotonic() + 2.0
                while process.poll() is None and time.monotonic() < deadline:
                    time.sleep(0.05)
                return 1
    return process.returncode
