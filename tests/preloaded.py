"""Python programs in processes that are forked from one which has imported torch: each saves two seconds of a core.

`Program` has what tests use of `subprocess.Popen`. The process that is forked from starts with the first program. All
processes that run tests use it, by a socket in the folder of their fork server (conftest.py); it ends when that folder
is gone, or after two minutes without a connection. Tests of the start itself, of limits on memory, and of other
programs start theirs themselves.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import json
import os
import runpy
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import IO, Any, NoReturn

from unisono.launchers.worker.fork_server import import_modules, leave

__all__ = ["Program"]


class Program:
    """A Python program: `file` with its arguments, in this environment and folder, on this network.

    `stdin` can be written to; `stdout` and `stderr` are read by `communicate`, or line by line. `stderr=None`: it goes
    the way of stdout.
    """

    def __init__(
        self,
        file: str | Path,
        *arguments: object,
        env: Mapping[str, str],
        cwd: str | Path | None = None,
        stderr: int | None = subprocess.PIPE,
        namespaces: Sequence[str] = (),
    ) -> None:
        asked = {
            "argv": [str(file), *map(str, arguments)],
            "env": dict(env),
            "cwd": str(cwd or Path.cwd()),
            "namespaces": list(namespaces),
        }
        reading, writing = os.pipe()
        pipes = [(reading, writing), os.pipe() if stderr is not None else (-1, writing)]
        stdin, ours = os.pipe()
        self._end, theirs = socket.socketpair()
        body = json.dumps(asked).encode()
        fds = [stdin, pipes[0][1], pipes[1][1], theirs.fileno()]
        socket.send_fds(_server(), [len(body).to_bytes(4, "little")], fds)
        _server().sendall(body)
        theirs.close()
        for fd in set(fds[:3]):
            os.close(fd)
        self.stdin: IO[str] = os.fdopen(ours, "w")
        self.stdout: IO[str] = os.fdopen(pipes[0][0])
        self.stderr: IO[str] | None = os.fdopen(pipes[1][0]) if stderr is not None else None
        self.returncode: int | None = None
        self.pid = int(self._end.recv(16))

    def poll(self) -> int | None:
        """Its status where it has ended: below 0, the signal that ended it."""
        return self._read_status(0)

    def wait(self, timeout: float | None = None) -> int:
        status = self._read_status(timeout)
        if status is None:
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0)
        return status

    def send_signal(self, signum: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, signum)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """What it writes from now to its end."""
        deadline = None if timeout is None else time.monotonic() + timeout
        self.stdin.close()
        streams = [stream for stream in (self.stdout, self.stderr) if stream is not None and not stream.closed]
        found = dict.fromkeys(streams, b"")
        with selectors.DefaultSelector() as selector:
            for stream in streams:
                selector.register(stream, selectors.EVENT_READ)
            while selector.get_map():
                left = None if deadline is None else deadline - time.monotonic()
                if left is not None and left <= 0:
                    raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0)
                for key, _ in selector.select(left):
                    stream = key.fileobj
                    assert not isinstance(stream, int)
                    piece = os.read(key.fd, 65536)
                    found[stream] += piece  # type: ignore[index]
                    if not piece:
                        selector.unregister(stream)
        for stream in streams:
            stream.close()
        self.wait(None if deadline is None else max(0.1, deadline - time.monotonic()))
        texts = [found.get(stream, b"").decode() if stream is not None else "" for stream in (self.stdout, self.stderr)]
        return texts[0], texts[1]

    def _read_status(self, timeout: float | None) -> int | None:
        if self.returncode is None:
            self._end.settimeout(timeout)
            try:
                told = self._end.recv(16)
            except (BlockingIOError, TimeoutError):
                return None
            self.returncode = int(told)
            self._end.close()
        return self.returncode


@cache
def _server() -> socket.socket:
    folder = os.environ.get("UNISONO_WARM", "0")
    if not os.path.isdir(folder):  # these tests start all workers fresh
        holder = tempfile.TemporaryDirectory(prefix="unisono-tests-")
        _server.holder = holder  # type: ignore[attr-defined]
        folder = holder.name
    path = os.path.join(folder, "programs")
    with open(f"{path}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # only one of several starts it
        with contextlib.suppress(OSError):
            return _connect(path)
        _start(path)
    return _connect(path)


def _connect(path: str) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.connect(path)
    except OSError:
        sock.close()
        raise
    return sock


def _start(path: str) -> None:
    """The process that is started forks the server and ends: the server is no child of these tests."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(path)
        listener.listen(16)
        command = [sys.executable, __file__, str(listener.fileno()), path]
        subprocess.run(command, env=environment, pass_fds=[listener.fileno()], stdin=subprocess.DEVNULL, check=True)


# -- in the process that is forked from --------------------------------------------------------------------------------

_IDLE_S, _LOOK_S = 120.0, 2.0


def _serve(listener: socket.socket, path: str) -> None:
    import_modules()
    tasks = len(os.listdir("/proc/self/task"))
    assert tasks == 1, f"{tasks} threads: they would not be there in a process that is forked"
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # of those below nobody waits here
    used = time.monotonic()
    with selectors.DefaultSelector() as selector:
        selector.register(listener, selectors.EVENT_READ)
        while os.path.exists(path) and time.monotonic() < used + _IDLE_S:
            for key, _ in selector.select(_LOOK_S):
                sock = key.fileobj
                assert isinstance(sock, socket.socket)
                if sock is listener:
                    selector.register(listener.accept()[0], selectors.EVENT_READ)
                elif not _take(sock, selector):
                    selector.unregister(sock)
                    sock.close()
            if len(selector.get_map()) > 1:
                used = time.monotonic()


def _take(connection: socket.socket, selector: selectors.BaseSelector) -> bool:
    """Start one program; False where the other end is gone."""
    head, fds, _, _ = socket.recv_fds(connection, 4, 4)
    if not head:
        return False
    size, body = int.from_bytes(head, "little"), b""
    while len(body) < size:
        body += connection.recv(size - len(body))
    if os.fork() == 0:
        try:
            for key in selector.get_map().values():
                os.close(key.fd)
            selector.close()
            _keep(json.loads(body), *fds)
        finally:
            os._exit(1)  # where it could not be started
    for fd in fds:
        os.close(fd)
    return True


def _keep(asked: dict[str, Any], stdin: int, out: int, err: int, told: int) -> NoReturn:
    """Fork the program, tell its number, wait for its end, and tell its status."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    pid = os.fork()
    if pid == 0:
        for number, fd in enumerate((stdin, out, err)):
            os.dup2(fd, number)
        for fd in {stdin, out, err, told}:
            os.close(fd)
        _run(asked)
    for fd in {stdin, out, err}:
        os.close(fd)
    os.write(told, str(pid).encode().ljust(16))
    _, status = os.waitpid(pid, 0)
    os.write(told, str(os.waitstatus_to_exitcode(status)).encode().ljust(16))
    os._exit(0)


def _run(asked: dict[str, Any]) -> NoReturn:
    imported = set(sys.modules)
    files = [os.open(name, os.O_RDONLY) for name in asked["namespaces"]]  # in a user namespace they are out of reach
    for fd in files:
        if ctypes.CDLL(None, use_errno=True).setns(fd, 0):
            raise OSError(ctypes.get_errno(), "setns")
        os.close(fd)
    os.chdir(asked["cwd"])
    os.environ.clear()
    os.environ.update(asked["env"])
    sys.argv = asked["argv"]
    sys.path[:0] = [os.path.dirname(os.path.abspath(sys.argv[0])), *_split(asked["env"].get("PYTHONPATH", ""))]
    status: int
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
        status = 0
    except SystemExit as ended:
        status = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException:
        traceback.print_exc()
        status = 1
    leave(status, imported)


def _split(path: str) -> Sequence[str]:
    return [part for part in path.split(os.pathsep) if part]


if __name__ == "__main__":
    if os.fork() == 0:
        _serve(socket.socket(fileno=int(sys.argv[1])), sys.argv[2])
