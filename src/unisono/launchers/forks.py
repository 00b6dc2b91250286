"""Workers forked from a process that has imported torch already: they begin in milliseconds instead of seconds.

A fork server (worker/fork_server.py) belongs to a program: the first `un.launch` starts it, later ones use it, and it
ends with the program. Or to a user, for `unisono run --warm`. A run holds a connection to its server; the connection's
end is the end of the run's workers, as the launcher's end is that of fresh ones.

A user has one server for each interpreter, version of torch, state of Unisono's sources, set of namespaces, and set of
variables that count when a process starts (fork_context.py). Its socket lies in a folder that only the user can enter,
and both ends ask the kernel who is at the other. It ends after ten minutes without a run, or by `unisono warm stop`.

The variable UNISONO_WARM set to 0 keeps all workers fresh; 1, or a folder for its sockets, makes all runs use the
user's server.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import hashlib
import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from unisono.launchers.fork_context import process_context, soft_limits, start_variables
from unisono.launchers.job import StartMethod
from unisono.launchers.processes import Command, Process, Streams, set_allocator
from unisono.launchers.runtime.files import NotPrivate, find_private_folder
from unisono.launchers.runtime.local_channel import LocalChannel

__all__ = [
    "ForkStarter",
    "NoServer",
    "WarmServer",
    "connect_starter",
    "connect_warm",
    "list_warm",
    "server_command",
    "server_environment",
    "stop_warm",
]

_SERVER = Path(__file__).parent / "worker" / "fork_server.py"
_PADDING = 512  # room for the names of runs, each of 24 digits; see _show_run in fork_server.py
_ANSWER_S = 600.0  # a server that has just been started imports torch first: a minute and more if the machine is busy


class NoServer(Exception):
    """The fork server has ended, or cannot be reached."""


def connect_starter(method: StartMethod) -> ForkStarter:
    """A connection to the user's fork server, or to this program's own; NoServer or OSError if it cannot be reached."""
    if method == "warm" or os.environ.get("UNISONO_WARM", ""):
        return ForkStarter(connect_warm(), say_why=method == "warm")
    global _own
    with _own_lock:
        if _own is None or not _own.usable():
            if _own is not None:
                _own.close()
            _own = _OwnServer()
        return ForkStarter(_own.connect())


# -- the server of this program ----------------------------------------------------------------------------------------


class _OwnServer:
    """The fork server of this process, and the socket over which it is sent its connections."""

    def __init__(self) -> None:
        self.owner = os.getpid()
        self.control, theirs = LocalChannel.pair()
        command = server_command(theirs.fileno(), owner=self.owner)
        with theirs:
            self.process = subprocess.Popen(
                command,
                env=server_environment(os.environ),
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
        atexit.register(self.close)

    def usable(self) -> bool:
        """Whether it is this process's own and still runs."""
        return self.owner == os.getpid() and self.process.poll() is None

    def connect(self) -> LocalChannel:
        """A connection for one run."""
        ours, theirs = LocalChannel.pair()
        with theirs:
            try:
                self.control.send({"kind": "connection"}, [theirs.fileno()])
            except OSError as error:
                ours.close()
                raise NoServer(str(error)) from error
        return ours

    def close(self) -> None:
        """End the server; a copy of this object in a forked child leaves it alone."""
        if self.owner != os.getpid():
            return
        with contextlib.suppress(OSError):
            self.control.sock.shutdown(socket.SHUT_RDWR)  # also where a forked child holds a copy of it
        self.control.close()
        try:
            self.process.wait(timeout=0.5)
        except subprocess.TimeoutExpired:  # it is still importing torch
            self.process.kill()
            self.process.wait()
        atexit.unregister(self.close)


_own: _OwnServer | None = None
_own_lock = threading.Lock()


def server_command(fd: int, *, owner: int = 0, idle_s: float = 0.0, path: str = "") -> list[str]:
    """The command that starts a fork server."""
    return [sys.executable, str(_SERVER), str(fd), str(owner), str(idle_s), path]


def server_environment(env: Mapping[str, str]) -> dict[str, str]:
    """The environment of a fork server: a worker's, and room for the name of a run."""
    found = {name: value for name, value in env.items() if not (name.startswith("UNISONO_") and name.endswith("_FD"))}
    set_allocator(found)
    found["OPENBLAS_NUM_THREADS"] = "1"  # it starts its threads when it is loaded
    found["UNISONO_RUN"] = env.get("UNISONO_RUN", "").ljust(_PADDING, ":")
    return found


# -- a run's connection ------------------------------------------------------------------------------------------------


class ForkStarter:
    """A run's connection to a fork server."""

    def __init__(self, channel: LocalChannel, *, say_why: bool = False) -> None:
        self._channel: LocalChannel | None = channel
        self._say_why = say_why
        self._context = process_context()
        self._ended: dict[int, int] = {}
        self._closed: list[int] = []  # processes that the server may reap
        self.refusals: list[str] = []

    def fork(self, command: Command, timeout_s: float | None) -> Process | None:
        """A forked process; None if the server refuses or is gone. Raises TimeoutError if it is too slow."""
        if self._channel is None:
            return None
        streams = Streams(command.stdin, command.stdout, command.stderr)
        try:
            answer, fds = self._ask(command, streams, _ANSWER_S if timeout_s is None else min(_ANSWER_S, timeout_s))
        except BaseException as error:
            streams.close_ours()
            if isinstance(error, TimeoutError) and (timeout_s is None or timeout_s > _ANSWER_S):
                raise RuntimeError(
                    f"the process that forks workers has not answered for {_ANSWER_S:g} s; UNISONO_WARM=0 starts each "
                    "worker as a process of its own"
                ) from None
            if not isinstance(error, NoServer):
                raise
            self._channel.close()
            self._channel = None
            return None
        finally:
            streams.close_theirs()
        if answer["kind"] == "forked":
            return Process(answer["pid"], fds[0], streams, wait_status=self._wait_status, let_go=self._let_go)
        streams.close_ours()
        self._note_refusal(answer["reason"])
        return None

    def close(self) -> None:
        """The run is over: the server ends and reaps what is left."""
        if self._channel is not None:
            self._channel.close()
            self._channel = None

    def _ask(self, command: Command, streams: Streams, timeout_s: float) -> tuple[dict[str, Any], list[int]]:
        assert self._channel is not None
        folder = os.open(".", os.O_PATH | os.O_DIRECTORY)
        try:
            self._channel.set_timeout(None)
            self._channel.send(self._describe(command), [*streams.theirs, folder, *command.descriptors.values()])
        except OSError as error:
            raise NoServer(str(error)) from error
        finally:
            os.close(folder)
        deadline = time.monotonic() + timeout_s
        self._closed.clear()
        while True:
            answer, received = self._receive(deadline)
            if answer["kind"] in ("forked", "refused"):
                return answer, received

    def _describe(self, command: Command) -> dict[str, Any]:
        """What a fresh child would inherit from this process."""
        ignored = [s for s in signal.valid_signals() if signal.getsignal(s) is signal.SIG_IGN]
        umask = os.umask(0o077)
        os.umask(umask)
        return {
            "kind": "fork",
            "closed": self._closed,
            "program": list(command.program),
            "env": dict(command.env),
            "descriptors": list(command.descriptors),
            "context": self._context,
            "path": _import_folders(command),
            "ignored_signals": [int(s) for s in ignored if s not in (signal.SIGPIPE, signal.SIGXFSZ)],
            "blocked_signals": [int(s) for s in signal.pthread_sigmask(signal.SIG_BLOCK, [])],
            "umask": umask,
            "limits": soft_limits(),
            "cores": sorted(os.sched_getaffinity(0)),
        }

    def _receive(self, deadline: float) -> tuple[dict[str, Any], list[int]]:
        """The next message; TimeoutError at the deadline. Takes note of processes that have ended."""
        assert self._channel is not None
        self._channel.set_timeout(max(0.001, deadline - time.monotonic()))
        message, fds = self._channel.receive()
        if message is None:
            raise NoServer("the fork server has ended")
        if message["kind"] == "ended":
            self._ended[message["pid"]] = message["status"]
        return message, fds

    def _wait_status(self, pid: int) -> int:
        """The exit status of a forked process; killed, if the server has ended with it."""
        deadline = time.monotonic() + 5.0
        with contextlib.suppress(NoServer, TimeoutError):
            while pid not in self._ended and self._channel is not None:
                self._receive(deadline)
        return self._ended.get(pid, -signal.SIGKILL)

    def _let_go(self, pid: int) -> None:
        """Told to the server with the next fork; till then no other process has this id."""
        self._ended.pop(pid, None)
        self._closed.append(pid)

    def _note_refusal(self, reason: str) -> None:
        if self._say_why and not self.refusals:
            print(f"unisono: workers are started without the warm server: {reason}", file=sys.stderr)
        self.refusals.append(reason)


def _import_folders(command: Command) -> list[str]:
    """The folders in which a program finds its own modules: the server compares them with what it has imported."""
    entries = [entry for entry in command.env.get("PYTHONPATH", "").split(os.pathsep) if entry]
    first = command.program[0]
    if first == "--function":
        entries += [entry or "." for entry in sys.path]
    elif first == "-m":
        entries.insert(0, ".")
    elif not first.startswith("--"):
        entries.insert(0, os.path.dirname(os.path.realpath(first)))
    return list(dict.fromkeys(os.path.abspath(entry) for entry in entries))


# -- the server of the user -------------------------------------------------------------------------------------------


_IDLE_S = 600.0  # UNISONO_WARM_IDLE_S sets another
_PACKAGE = Path(__file__).parents[1]


def connect_warm() -> LocalChannel:
    """A connection to the user's fork server, which is started if there is none."""
    path = _socket_path()
    with contextlib.suppress(OSError):
        return LocalChannel.connect(path)
    with open(path.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # only one of several commands starts it
        with contextlib.suppress(OSError):
            return LocalChannel.connect(path)
        _start(path)
    return LocalChannel.connect(path)


class WarmServer(NamedTuple):
    """A fork server of the user: its process, how long ago it was started, and the runs that it has workers for."""

    pid: int
    age_s: float
    runs: int


def list_warm() -> list[WarmServer]:
    """The user's fork servers."""
    return _ask_all("status")


def stop_warm() -> list[WarmServer]:
    """Have the user's fork servers end after their current runs; returns them."""
    return _ask_all("stop")


def _ask_all(kind: str) -> list[WarmServer]:
    found = []
    for path in sorted(_private_folder().glob("*.socket")):
        with contextlib.suppress(OSError, ValueError), LocalChannel.connect(path, timeout_s=60) as channel:
            channel.send({"kind": kind})
            answer, _ = channel.receive()
            if answer is not None:
                found.append(WarmServer(answer["pid"], answer["age_s"], answer["runs"]))
    return found


def _start(path: Path) -> None:
    with contextlib.suppress(FileNotFoundError):
        path.unlink()
    quiet = subprocess.DEVNULL
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(str(path))
        listener.listen(128)
        idle_s = float(os.environ.get("UNISONO_WARM_IDLE_S", _IDLE_S))
        command = server_command(listener.fileno(), idle_s=idle_s, path=str(path))
        env = server_environment({name: value for name, value in os.environ.items() if name != "UNISONO_RUN"})
        streams: dict[str, Any] = {"stdin": quiet, "stdout": quiet, "stderr": quiet}
        # The process that is started forks the server and ends: the server is no child of this command.
        subprocess.run(command, env=env, pass_fds=(listener.fileno(),), start_new_session=True, check=False, **streams)


def _socket_path() -> Path:
    folder = _private_folder()
    facts = [sys.executable, sys.version, str(_PACKAGE), *map(str, _source_times())]
    facts.append(json.dumps(start_variables(server_environment(os.environ)), sort_keys=True))
    facts.append(str(process_context()["namespaces"]))  # a server that was started in others' would refuse every worker
    return folder / f"{hashlib.sha256(' '.join(facts).encode()).hexdigest()[:16]}.socket"


def _private_folder() -> Path:
    try:
        return find_private_folder()
    except NotPrivate as error:
        raise NoServer(str(error)) from None


def _source_times() -> Iterator[int]:
    """When torch and each of Unisono's sources were last changed: a server that imported others is not used."""
    torch = importlib.util.find_spec("torch")
    if torch is not None and torch.origin is not None:
        yield os.stat(torch.origin).st_mtime_ns
    files = sorted(_PACKAGE.rglob("*.py"))
    yield len(files)
    yield max(file.stat().st_mtime_ns for file in files)
