"""What the launcher asks of an engine: start one agent (agent.py) for each worker, where the engine has room.

Everything else is the same for all engines and lies in engine_run.py: the store, who is who, output, results, the
report. An engine is a frozen dataclass whose fields are its settings; `run` is for programs and `call` for functions.

Also what runs in an engine's own processes (a Ray actor, a Spark task): one worker's agent beside the data, and
functions that were pickled by us, so that the import path of the driver is known there before they are opened.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import importlib
import importlib.util
import ipaddress
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TypeVar

from unisono.launchers.failures import EngineError
from unisono.launchers.runtime.addresses import open_listener
from unisono.launchers.runtime.files import anonymous_file
from unisono.launchers.runtime.table_part import TableFiles, TablePart, write_listing

if TYPE_CHECKING:
    from unisono.launchers.job import Job

__all__ = [
    "AGENT",
    "FAILED",
    "TAKEN",
    "UNREACHED",
    "Engine",
    "EngineError",
    "Packed",
    "ProcessStarted",
    "Started",
    "Work",
    "agent_command",
    "find_program",
    "import_engine",
    "replace_tables",
    "run_agent",
    "signals_kept",
    "split_host",
]

T = TypeVar("T")
UNREACHED = 97  # exit status of an agent that cannot reach the launcher
TAKEN = 75  # and of one whose place has another
AGENT = "UNISONO_AGENT"  # the variable with all that an agent is told, as JSON; see worker/agent.py


@dataclass(frozen=True)
class Work:
    """What to start: `agent` in each of `workers` places, with the variables of `env`."""

    workers: int
    agent: Sequence[str]
    env: Mapping[str, str]
    addresses: Sequence[tuple[str, int]]  # of the launcher's channel
    token: str
    elastic: bool = False  # the others go on where an agent is lost


class Started(Protocol):
    """A job that the engine is running."""

    def poll(self) -> int | None:
        """How it ended, None while it runs."""

    def stop(self, signum: signal.Signals) -> None:
        """Ask it to end."""

    def words(self) -> str:
        """What the engine itself has said."""

    def sessions(self) -> Sequence[int]:
        """Ids of processes that it started on this host, each leading a session."""

    def revive(self, missing: AbstractSet[int]) -> None:
        """Start agents again in these places, if they have ended there and the engine can; asked now and then in an
        elastic run."""

    def close(self) -> None:
        """Forget it; it has ended."""


@dataclass(frozen=True)
class Engine:
    """The common part of all engines."""

    name: ClassVar[str] = ""

    @property
    def local(self) -> bool:
        """Whether all workers are certain to be on this host, so that nothing need listen to other hosts."""
        return False

    @property
    def restarts(self) -> int:
        """How often the engine starts all workers again after a failure."""
        return 0

    @property
    def start_s(self) -> float:
        """How long the engine may take until all workers have reported to the launcher."""
        return 120.0

    def environment(self) -> str:
        """Whose variables tell a worker its rank: a key of launch_env.py."""
        raise NotImplementedError

    def python_there(self) -> str | None:
        """The Python that the hosts run; None for the one that runs here."""
        return None

    def hosts_to_reach(self) -> Sequence[str]:
        """Hosts that must reach this one, as far as they are known."""
        return ()

    def open(self, workers: int) -> Engine:
        """The engine for one run: this one, or one that holds what the run needs until its job is closed."""
        return self

    def listen(self, backlog: int) -> socket.socket:
        """Where agents reach the launcher, or its store."""
        if self.local:
            return open_listener("127.0.0.1", ports="", backlog=backlog)
        return open_listener("", backlog=backlog)

    def own_addresses(self) -> Sequence[str]:
        """The launcher's addresses, where the engine knows them."""
        return ["127.0.0.1"] if self.local else []

    def threads(self, workers: int) -> int | None:
        """Computing threads per worker; None: the cores of its host, divided by the workers there."""
        return None

    def check(self, workers: int) -> None:
        """Raise EngineError or ValueError where it is known at once that the job cannot run."""

    def start(self, work: Work) -> Started:
        """Start the job."""
        raise NotImplementedError

    def manifest(self, job: Job) -> str:
        """What to hand to a cluster that starts the workers itself, as text."""
        raise NotImplementedError

    def explain(self, words: str, workers: int) -> str:
        """What to do about a failure to start, from what the engine said; "" where its own words must do."""
        return ""

    def run(self, program: Sequence[str], workers: int, *, job: Job | None = None) -> int:
        """Run a program (a script, or -m and a module, with its arguments) and return the exit status.

        For the command line: it takes over signals, shows the output, and one report on standard error.
        """
        from unisono.launchers.engine_run import open_remote_run
        from unisono.launchers.job import Job
        from unisono.launchers.terminal import run_in_terminal

        job = job if job is not None else Job(program, workers)
        self.check(job.engine_places)
        return run_in_terminal(job, open_remote_run(job, self))

    def call(
        self,
        fn: Callable[..., T],
        workers: int,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        least: int | None = None,
        **settings: Any,
    ) -> list[T]:
        """Run a function in every worker and return their results in rank order; `settings` as of `unisono.launch`.

        Tables of the engine among the arguments become parts of them: an engine that has tables has a field `tables`.
        """
        from unisono.launchers.launch_function import run_function

        lifted, keywords, tables = replace_tables(args, kwargs or {}, self.is_table)
        engine = copy.copy(self)
        if tables and least is not None:
            raise ValueError("launch: got least= with a table of the engine: a replacement cannot be given its part")
        if tables:
            object.__setattr__(engine, "tables", tuple(tables))
        return run_function(fn, workers, lifted, keywords, engine=engine, least=least, **settings)

    def is_table(self, value: Any) -> bool:
        """Whether a value is data that lies in this engine, and is to be trained on there."""
        return False


class ProcessStarted:
    """An engine's job that is a process of this host, such as mpirun or srun."""

    def __init__(
        self,
        command: Sequence[str],
        env: Mapping[str, str],
        *,
        input_text: str | None = None,
        label: str = "",
        keep: Sequence[int] = (),
    ) -> None:
        """`keep`: descriptors that it needs open here for as long as it runs."""
        self.label, self._keep = label, keep
        self._output = anonymous_file("unisono-engine")
        self.process = subprocess.Popen(
            list(command),
            env={**os.environ, **env},
            stdin=subprocess.DEVNULL if input_text is None else subprocess.PIPE,
            stdout=self._output,
            stderr=self._output,
            start_new_session=True,
        )
        if self.process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self.process.stdin.write((input_text or "").encode())
                self.process.stdin.flush()  # left open: its end tells the other side that the launcher is gone

    def poll(self) -> int | None:
        return self.process.poll()

    def stop(self, signum: signal.Signals) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signum)

    def words(self) -> str:
        """The last 16 KiB of what it wrote."""
        size = os.fstat(self._output).st_size
        data = os.pread(self._output, 1 << 14, max(0, size - (1 << 14)))
        return data.decode("utf-8", "replace").strip()

    def sessions(self) -> Sequence[int]:
        return [self.process.pid]

    def revive(self, missing: AbstractSet[int]) -> None:
        """See Started: only a job as a whole can be started."""

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        if self.process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self.process.stdin.close()
        for fd in (self._output, *self._keep):
            os.close(fd)


def agent_command(python: str | None, what: str = "agent") -> list[str]:
    """How an agent is started: by file with this Python, or as a module of the Python of other hosts."""
    if python is None:
        return [sys.executable, str(Path(__file__).parents[1] / "worker" / "start.py"), what]
    return [python, "-m", "unisono.launchers.worker.start", what]


def import_engine(module: str, name: str) -> Any:
    """The Python package of an engine."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name != module:
            raise
        extra = module.removeprefix("py")
        text = f"{name} is not installed in this Python: pip install 'unisono[{extra}]'"
        raise ModuleNotFoundError(text, name=module) from None


@contextlib.contextmanager
def signals_kept() -> Iterator[None]:
    """Engines set handlers of their own for Ctrl-C and SIGTERM as they start; the launcher has its."""
    main = threading.current_thread() is threading.main_thread()
    kept = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)} if main else {}
    try:
        yield
    finally:
        for number, handler in kept.items():
            signal.signal(number, handler)


def split_host(text: str) -> tuple[str, str | None]:
    """A host and the number of workers behind it, None where there is none; "" where it is no host. An IPv6 address
    with a number is in brackets.

    >>> split_host("user@b:2"), split_host("fd00::7"), split_host("user@[fd00::7]:4")
    (('user@b', '2'), ('fd00::7', None), ('user@fd00::7', '4'))
    """
    with contextlib.suppress(ValueError):
        ipaddress.IPv6Address(text.rpartition("@")[2])
        return text, None
    found = re.fullmatch(r"(.*@)?(?:\[(.*)\]|([^:]*))(?::(.*))?", text)
    if found is None:
        return "", None
    user, address, name, count = found.groups()
    host = address or name or ""
    return (user or "") + host if host else "", count


def find_program(name: str, *, advice: str) -> str:
    """The path of an engine's command; EngineError with `advice` where there is none."""
    found = shutil.which(name)
    if found is None:
        raise EngineError(f"`{name}` is not installed here (looked in PATH={os.environ.get('PATH', '')}). {advice}")
    return found


# In an engine's own processes ----------------------------------------------------------------------------------------


FAILED = 1


def run_agent(env: Mapping[str, str], rank: int, workers: int, parts: Sequence[TableFiles] = ()) -> tuple[int, str]:
    """Run the agent of `rank` to its end; its exit status and what it wrote itself (only where it could not start).

    A process of its own: engines use theirs for other tasks too, and it must end with this one, however this one ends.
    """
    place = {"RANK": str(rank), "WORLD_SIZE": str(workers), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    told = json.dumps({**json.loads(env[AGENT]), "parent": os.getpid()})
    env = {**os.environ, **env, **place, AGENT: told}
    with write_listing(parts) as listing, tempfile.TemporaryFile() as output:
        if parts:
            env["UNISONO_PARTS"] = f"/proc/{os.getpid()}/fd/{listing.fileno()}"
        agent = subprocess.Popen(agent_command(None), env=env, stdin=subprocess.DEVNULL, stdout=output, stderr=output)
        try:
            status = agent.wait()
        except BaseException:
            agent.terminate()
            agent.wait()
            raise
        finally:
            for part in parts:
                part.close()
        output.seek(0)
        words = output.read(1 << 14).decode("utf-8", "replace").strip()
    return status, words


def replace_tables(
    args: Sequence[Any], kwargs: Mapping[str, Any], is_table: Callable[[Any], bool]
) -> tuple[tuple[Any, ...], dict[str, Any], list[Any]]:
    """The arguments with a `TablePart` in place of each table, also inside lists, tuples and dicts; and the tables."""
    tables: list[Any] = []

    def lift(value: Any) -> Any:
        if is_table(value):
            number = next((i for i, table in enumerate(tables) if table is value), len(tables))
            if number == len(tables):
                tables.append(value)
            return TablePart.placeholder(number)
        if type(value) in (list, tuple):
            return type(value)(lift(item) for item in value)
        if type(value) is dict:
            return {key: lift(item) for key, item in value.items()}
        return value

    return tuple(lift(value) for value in args), {key: lift(value) for key, value in kwargs.items()}, tables


_opened: dict[bytes, Any] = {}
_KEPT = 8  # programs that a process keeps open


class Packed:
    """`Packed(value).open()` is the value, in a process that has the same modules in the same places, or installed."""

    def __init__(self, value: Any) -> None:
        name = "cloudpickle" if importlib.util.find_spec("cloudpickle") else "pickle"
        try:
            self.data: bytes = importlib.import_module(name).dumps(value)
        except Exception as error:
            more = "; pip install cloudpickle to send lambdas" if name == "pickle" else ""
            raise TypeError(
                f"{value!r} cannot be sent to the engine's workers: {error}. Make what it refers to inside the "
                f"function, or pass names and settings instead of live objects{more}."
            ) from error
        self.key = hashlib.sha256(self.data).digest()
        self.path = [entry or os.getcwd() for entry in sys.path]

    def open(self) -> Any:
        """The value; made once in a process."""
        if self.key not in _opened:
            sys.path += [entry for entry in self.path if entry not in sys.path and os.path.exists(entry)]
            import pickle

            while len(_opened) >= _KEPT:
                del _opened[next(iter(_opened))]
            _opened[self.key] = pickle.loads(self.data)  # noqa: S301  # came from the driver by the engine's channel
        return _opened[self.key]
