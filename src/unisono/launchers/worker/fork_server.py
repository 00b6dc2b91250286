"""The fork server: a process of one thread that has imported torch, and forks a worker from itself on request.

Started by file, as `python fork_server.py FD OWNER 0 ""` by a program that launches functions (FD: an end of its socket
pair, OWNER: its process id) or as `python fork_server.py FD 0 IDLE_S PATH` for `unisono run --warm` (FD: a socket that
listens at PATH).

1. Import what workers need. No thread may exist, and CUDA is not touched: a fork copies neither.
2. Serve: a connection is a run. It asks for workers, and is told how each ended. Its end, or that of its process, is
   the end of its workers. The kernel ends all workers when the server ends (they ask for it, see program.py).
3. In the child: become what a fresh process would have been, and run worker/program.py's `main`.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import io
import json
import os
import resource
import select
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from unisono.launchers.runtime.local_channel import LocalChannel

__all__: list[str] = []

_HERE = os.path.dirname(os.path.abspath(__file__))
_ROOT = os.path.dirname(os.path.dirname(os.path.dirname(_HERE)))
_RUN = "UNISONO_RUN"


def main(fd: int, owner: int, idle_s: float, path: str) -> int:
    """Serve until the owner ends or nothing was asked for `idle_s`; in a forked child, run the worker."""
    for signum in (signal.SIGINT, signal.SIGHUP):  # they are the launchers' business
        signal.signal(signum, signal.SIG_IGN)
    if sys.path and os.path.abspath(sys.path[0]) == _HERE:
        del sys.path[0]
    if _ROOT not in sys.path:
        sys.path.append(_ROOT)
    if not owner and os.fork():  # the launcher waits for this process only; the server is nobody's child
        return 0
    server = _Server(fd, owner, idle_s, path)
    import_modules()
    os.chdir("/")  # it keeps no folder in use
    request = server.serve()
    if request is not None:
        imported = set(sys.modules)
        arguments = _become_worker(request, server.python_path)
        from unisono.launchers.worker import program

        leave(program.main(arguments), imported)
    return 0


# What training needs: torch, what optimizers import at their first use, all that `unisono` exports, and what workers on
# one host meet by (the others wait for one that joins). Names, as it is the workers that use these, not this program.
_PRELOADED = (
    "unisono",
    "numpy",
    "torch",
    "torch._dynamo",
    "cloudpickle",
    "unisono.launchers.worker.program",
    "unisono.world.transports.shared",
)
# With large libraries, which most programs do not use, and some have to set up before the import.
_LATER = ("huggingface", "keras", "lightning", "skorch")


def import_modules() -> None:
    for name in _PRELOADED:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    package = sys.modules[_PRELOADED[0]]
    for name in package.__all__:
        if name not in _LATER:
            with contextlib.suppress(ImportError):
                getattr(package, name)
    gc.collect()
    gc.freeze()  # so that a worker's collections do not copy these pages


# -- 2. serve ----------------------------------------------------------------------------------------------------------


@dataclass
class _Request:
    """One worker to fork: what it is to run, and the open files that came along."""

    body: dict[str, Any]
    streams: Sequence[int]
    folder: int
    descriptors: Mapping[str, int]


@dataclass
class _Connection:
    """A run that has connected, with the workers that it asked for."""

    channel: LocalChannel
    peer_fd: int  # readable when the launcher has ended
    workers: dict[int, int] = field(default_factory=dict)  # descriptor of the process -> process id
    ended: set[int] = field(default_factory=set)


class _Server:
    """Everything that the server waits for, in one poll."""

    def __init__(self, fd: int, owner: int, idle_s: float, path: str) -> None:
        from unisono.launchers.fork_context import process_context, start_variables
        from unisono.launchers.runtime.local_channel import LocalChannel

        self.door, self.idle_s, self.path = LocalChannel(fd), idle_s, path
        self.door.set_timeout(0)
        self._channel_type = LocalChannel
        self.owner_fd = os.pidfd_open(owner) if owner else -1
        self.owner_gone = owner != 0 and os.getppid() != owner
        self.connections: dict[int, _Connection] = {}
        self.dying: list[int] = []  # workers that were killed and are to be reaped
        self.stopping = False
        self.start_variables, self.context = start_variables(os.environ), process_context()
        self.threads = os.environ.get("OMP_NUM_THREADS", "")
        self.python_path = _own_path()
        self.started = time.time()

    def serve(self) -> _Request | None:
        """Serve; returns None at the end of the server, and in a forked child its request."""
        idle = False
        while not (self.owner_gone or idle or (self.stopping and not self.connections)):
            door = [] if self.stopping else [self.door.fileno()]
            owner = [self.owner_fd] if self.owner_fd >= 0 else []
            processes = [connection.peer_fd for connection in self.connections.values()]
            for connection in self.connections.values():
                processes += [fd for fd in connection.workers if fd not in connection.ended]
            ready = self._poll([*door, *owner, *self.connections, *processes])
            idle = not ready and not self.connections and not self.dying
            for fd in ready:
                if fd in owner:
                    self.owner_gone = True
                elif fd in door:
                    self._on_door()
                elif (request := self._on_ready(fd)) is not None:
                    return request
            self._reap()
        for connection in list(self.connections.values()):
            self._close(connection)
        self._unlink()
        return None

    def _poll(self, fds: Sequence[int]) -> list[int]:
        poll = select.poll()
        for fd in fds:
            poll.register(fd, select.POLLIN)
        wait_s = self.idle_s if self.idle_s and not self.connections else None
        if self.dying:
            wait_s = 0.02
        return [fd for fd, _ in poll.poll(None if wait_s is None else wait_s * 1000)]

    def _on_door(self) -> None:
        """A run connects: to the listening socket, or with a socket that the program sends."""
        try:
            if self.owner_fd < 0:
                channel = self._channel_type(self.door.sock.accept()[0])
            else:
                message, fds = self.door.receive()
                if message is None:
                    self.owner_gone = True
                    return
                channel = self._channel_type(fds[0])
        except BlockingIOError:
            return
        try:
            if not channel.is_of_this_user():
                raise PermissionError
            channel.set_timeout(0)
            self.connections[channel.fileno()] = _Connection(channel, os.pidfd_open(channel.read_peer()[0]))
        except OSError:  # another user's, or one that has ended
            channel.close()

    def _on_ready(self, fd: int) -> _Request | None:
        if fd in self.connections:
            return self._on_message(self.connections[fd])
        for connection in list(self.connections.values()):
            if fd == connection.peer_fd:
                self._close(connection)
            elif fd in connection.workers and fd not in connection.ended:
                connection.ended.add(fd)
                how = os.waitid(os.P_PIDFD, fd, os.WEXITED | os.WNOWAIT)  # does not reap it
                assert how is not None
                status = how.si_status if how.si_code == os.CLD_EXITED else -how.si_status
                self._tell(connection, kind="ended", pid=connection.workers[fd], status=status)
        return None

    def _on_message(self, connection: _Connection) -> _Request | None:
        try:
            message, fds = connection.channel.receive()
        except BlockingIOError:
            return None
        if message is None:
            self._close(connection)
            return None
        if message["kind"] == "fork":
            for worker in [fd for fd in connection.ended if connection.workers[fd] in message["closed"]]:
                os.waitpid(connection.workers.pop(worker), 0)
                connection.ended.remove(worker)
                os.close(worker)
            return self._fork(connection, message, fds)
        if message["kind"] == "stop":
            self.stopping = True
            self._unlink()
        runs = sum(bool(other.workers) for other in self.connections.values())
        age_s = time.time() - self.started
        self._tell(connection, kind="status", pid=os.getpid(), age_s=age_s, runs=runs)
        return None

    def _fork(self, connection: _Connection, body: dict[str, Any], fds: list[int]) -> _Request | None:
        """Fork a worker; in it, the request. The files are its streams, its folder, and those that `body` names."""
        request = _Request(body, fds[:3], fds[3], dict(zip(body["descriptors"], fds[4:], strict=True)))
        reason = self._reason_not_to(request)
        pid = os.fork() if not reason else -1
        if pid == 0:
            self._close_all()
            request.body["server"] = os.getppid()
            request.body["server_threads"] = self.threads
            return request
        for fd in fds:
            os.close(fd)
        if reason:
            self._tell(connection, kind="refused", reason=reason)
            return None
        fd = os.pidfd_open(pid)
        connection.workers[fd] = pid
        self._tell(connection, [fd], kind="forked", pid=pid)
        return None

    def _reason_not_to(self, request: _Request) -> str:
        """Why the launcher must start a fresh process instead; "" if this server can fork."""
        from unisono.launchers.fork_context import find_difference, start_variables

        env = request.body["env"]
        names = find_difference(start_variables(env), self.start_variables)
        facts = find_difference(request.body["context"], self.context)
        if names or facts:
            return f"it has another {names or facts} than the fork server"
        if not env.get("OMP_NUM_THREADS", "1").isdigit():
            return "OMP_NUM_THREADS is not a number"
        path = request.body["path"]
        for place, folder in enumerate(path):
            if folder not in self.python_path and (shadowed := _shadowed_modules(folder, path[:place])):
                return f"{folder} has its own {', '.join(shadowed[:3])}"
        tasks = len(os.listdir("/proc/self/task"))
        if tasks != 1:
            return f"the fork server has {tasks} threads"
        return ""

    def _tell(self, connection: _Connection, fds: Sequence[int] = (), **fields: Any) -> None:
        with contextlib.suppress(OSError):  # its end is noticed when it is read
            connection.channel.send(fields, fds)

    def _close(self, connection: _Connection) -> None:
        """End the workers of a run that is over."""
        for fd in connection.workers:
            if fd not in connection.ended:
                signal.pidfd_send_signal(fd, signal.SIGKILL)
            os.close(fd)
        self.dying += connection.workers.values()
        self._reap()
        del self.connections[connection.channel.fileno()]
        os.close(connection.peer_fd)
        connection.channel.close()

    def _reap(self) -> None:
        self.dying = [pid for pid in self.dying if os.waitpid(pid, os.WNOHANG)[0] == 0]

    def _unlink(self) -> None:
        if self.path:
            with contextlib.suppress(OSError):
                os.unlink(self.path)
            self.path = ""  # from now on it may be another server's

    def _close_all(self) -> None:
        """In a forked child: close all descriptors of the server."""
        for connection in self.connections.values():
            for fd in (connection.peer_fd, *connection.workers):
                os.close(fd)
            connection.channel.close()
        if self.owner_fd >= 0:
            os.close(self.owner_fd)
        self.door.close()


def _own_path() -> list[str]:
    """Where this interpreter looks for modules without a PYTHONPATH: each worker has its own variable.

    What the variable adds cannot be told from sys.path: it may also name folders that the interpreter has of itself
    (engines start programs with all of sys.path in it), and each is listed once.
    """
    if not os.environ.get("PYTHONPATH"):
        return list(sys.path)
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, "-c", "import json, sys; print(json.dumps([entry for entry in sys.path if entry]))"]
    return list(json.loads(subprocess.run(command, env=env, stdout=subprocess.PIPE, check=True).stdout))


def _shadowed_modules(folder: str, before: Sequence[str]) -> list[str]:
    """Modules that the server has imported from elsewhere, and a fresh process would find in `folder`.

    It looks in the folders `before` first: what the server has from there is none of them. (Setuptools, once imported,
    has a folder with a `packaging` of its own at the end of sys.path.)
    """
    try:
        names = os.listdir(folder)
    except OSError:
        return []
    here = os.path.join(os.path.realpath(folder), "")
    earlier = [os.path.join(os.path.realpath(other), "") for other in before]
    found = set()
    for entry in names:
        name, _, ending = entry.partition(".")
        if name in ("sitecustomize", "usercustomize"):
            found.add(name)
        file = getattr(sys.modules.get(name), "__file__", None)
        if file is None or name == "__main__":
            continue
        file = os.path.realpath(file)
        if file.startswith((here, *(f"{other}{name}{end}" for other in earlier for end in (".", "/")))):
            continue
        if ending.endswith(("py", "so", "pyc")) or (not ending and os.path.exists(f"{here}{name}/__init__.py")):
            found.add(name)
    return sorted(found)


# -- 3. in the child ---------------------------------------------------------------------------------------------------


def _become_worker(request: _Request, python_path: Sequence[str]) -> list[str]:
    """Make this process what a fresh one would have been; the arguments of its program."""
    body = request.body
    os.setsid()
    _reset_signals(body["ignored_signals"], body["blocked_signals"])
    _replace_streams(request.streams)
    os.fchdir(request.folder)
    for fd in (*request.streams, request.folder):
        os.close(fd)
    os.umask(body["umask"])
    os.sched_setaffinity(0, body["cores"])
    for name, soft in body["limits"].items():
        kind = getattr(resource, name)
        resource.setrlimit(kind, (soft, resource.getrlimit(kind)[1]))
    _replace_environment(body, request.descriptors)
    entries = [os.path.abspath(e) for e in os.environ.get("PYTHONPATH", "").split(os.pathsep) if e]
    sys.path[:] = list(dict.fromkeys([*entries, *python_path]))
    _refresh_modules(body["server_threads"])
    return list(body["program"])


def _reset_signals(ignored: Sequence[int], blocked: Sequence[int]) -> None:
    for signum in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        with contextlib.suppress(OSError, ValueError):  # some belong to the C library
            signal.signal(signum, signal.SIG_IGN if signum in ignored else signal.SIG_DFL)
    for name in ("SIGPIPE", "SIGXFSZ"):  # as Python does
        signal.signal(getattr(signal, name), signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_SETMASK, blocked)


def _replace_streams(fds: Sequence[int]) -> None:
    """New stream objects: what Python finds out about a stream when it starts is true of the old ones only."""
    for number, fd in enumerate(fds):
        os.dup2(fd, number, inheritable=True)
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        old = getattr(sys, f"__{name}__")
        raw = io.FileIO(number, "r" if number == 0 else "w", closefd=False)
        raw.name = f"<{name}>"  # as Python's own
        buffer: Any = io.BufferedReader(raw) if number == 0 else io.BufferedWriter(raw)
        new = io.TextIOWrapper(
            buffer, old.encoding, old.errors, line_buffering=number == 2 or raw.isatty(), write_through=False
        )
        new.mode = "r" if number == 0 else "w"  # type: ignore[misc]
        setattr(sys, name, new)
        setattr(sys, f"__{name}__", new)


def _replace_environment(body: Mapping[str, Any], descriptors: Mapping[str, int]) -> None:
    os.environ.clear()
    os.environ.update(body["env"])
    os.environ["UNISONO_LAUNCHER_PID"] = str(body["server"])  # with which this process ends
    for name, fd in descriptors.items():
        os.environ[name] = str(fd)
        os.set_inheritable(fd, True)
    _show_run(os.environ.get(_RUN, ""))
    time.tzset()


def _show_run(runs: str) -> None:
    """Write the run's name where /proc shows it, for the guard: into the server's padded variable of that name."""
    with open("/proc/self/environ", "rb") as file:
        shown = b"\0" + file.read()
    begin = shown.find(b"\0" + _RUN.encode() + b"=") + len(_RUN) + 2
    end = shown.find(b"\0", begin)
    if begin > len(_RUN) + 1 and len(runs) <= end - begin:
        with open("/proc/self/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
        address = int(fields[47])  # env_start, the 50th field; the first two are before the bracket
        text = runs.encode().ljust(end - begin, b":")
        ctypes.memmove(address + begin - 1, text, len(text))


def _refresh_modules(server_threads: str) -> None:
    """Reset what libraries found out at import, or must not share with the server: seeds, threads, caches."""
    import tempfile

    from unisono.launchers.runtime import status

    status.attach()
    tempfile.tempdir = None
    importlib.invalidate_caches()
    threads = os.environ.get("OMP_NUM_THREADS", "")
    torch = sys.modules.get("torch")
    if torch is not None and threads != server_threads:
        torch.set_num_threads(int(threads) if threads else len(os.sched_getaffinity(0)))
    if torch is not None:
        torch.default_generator.seed()
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed()
        _set_blas_threads(os.environ.get("OPENBLAS_NUM_THREADS") or threads or str(len(os.sched_getaffinity(0))))


def _set_blas_threads(count: str) -> None:
    """Give NumPy's OpenBLAS its threads: the server loaded it with one, so as to have no threads itself."""
    if not count.isdigit() or count == "1":
        return
    with open("/proc/self/maps") as file:
        libraries = {line.split()[-1] for line in file if "openblas" in line and ".so" in line}
    for path in libraries:
        library = ctypes.CDLL(path)
        for name in ("scipy_openblas_set_num_threads64_", "openblas_set_num_threads64_", "openblas_set_num_threads"):
            if hasattr(library, name):
                getattr(library, name)(int(count))
                break


def leave(status: int, imported: Collection[str]) -> NoReturn:
    """End as an interpreter does, but let the server's modules be: to take them apart would copy all their pages."""
    import atexit
    import threading

    threading._shutdown()  # type: ignore[attr-defined]  # waits for threads that are not daemons
    atexit._run_exitfuncs()
    for name in set(sys.modules) - set(imported) | {"__main__"}:
        sys.modules.pop(name, None)
    gc.collect()
    try:
        for stream in (sys.stdout, sys.stderr):
            if stream is not None and not stream.closed:
                stream.flush()
    except OSError:
        status = status or 120  # as Python
    os._exit(status)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]), sys.argv[4]))
