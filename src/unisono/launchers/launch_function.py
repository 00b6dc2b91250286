"""Runs a function in worker processes: the function travels in an inherited file, each result in another.

Pickle is used here and nowhere else: between the launcher and its own children, through descriptors that no other
process can open; and on other hosts through the authenticated channel of the run (channel.py).
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import io
import json
import linecache
import os
import pickle
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import IO, TYPE_CHECKING, Any, TypeVar

from unisono.launchers.failures import WorkerError, format_preemption
from unisono.launchers.job import ElasticSettings, Job, TimedOut
from unisono.launchers.local import LocalRun
from unisono.launchers.output import MODES, Mode
from unisono.launchers.runtime.files import anonymous_file, open_closed_streams
from unisono.launchers.supervisor import Supervisor

if TYPE_CHECKING:
    from unisono.launchers.engines.engine import Engine

__all__ = ["run_function"]

T = TypeVar("T")


def run_function(
    fn: Callable[..., T],
    workers: int,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    engine: Engine | None = None,
    threads: int | None = None,
    output: Mode = "auto",
    timeout_s: float | None = None,
    faults: str | None = None,
    least: int | None = None,
) -> list[T]:
    """See `unisono.launchers.launch`; `engine`: what starts the workers, None for this host."""
    _check(fn, workers, threads, output, timeout_s)
    open_closed_streams()
    elastic = _read_least(least, workers)
    if elastic is not None and engine is not None and engine.restarts:
        raise ValueError("launch: got least= with max_restarts=, which starts all workers again; expected one of them")
    if engine is not None:
        engine.check(workers)
    job = Job(
        ["--function"],
        workers,
        threads=threads,
        output=output,
        inherit=False,
        timeout_s=timeout_s,
        start="fork" if "torch" in sys.modules or elastic is not None else "fresh",  # a replacement is there at once
        faults=faults,
        elastic=elastic,
    )
    payload = _pack(fn, args, kwargs)
    if engine is not None:
        from unisono.launchers.engine_run import open_remote_run

        run = open_remote_run(job, engine, payload)
        _supervise(job, run)
        return _read_results([io.BytesIO(data) for data in run.results], least)
    names = ["unisono-function", *(f"unisono-result-{rank}" for rank in range(workers))]
    with contextlib.ExitStack() as opened:
        sent, *returned = [opened.enter_context(open(anonymous_file(name), "r+b")) for name in names]
        sent.write(payload)
        sent.flush()
        job = replace(job, payload_fd=sent.fileno(), result_fds=[file.fileno() for file in returned])
        _supervise(job, LocalRun(job))
        return _read_results(returned, least)


def _read_results(files: Sequence[IO[bytes]], least: int | None) -> list[Any]:
    """What the workers returned; their files are our own children's, or came over the run's authenticated channel."""
    found = []
    for rank, file in enumerate(files):
        file.seek(0)
        if file.read(1):
            found.append(pickle.load(file))  # noqa: S301
        elif least is None:
            text = f"unisono: worker {rank} ended with exit status 0 before the function returned (os._exit in it?)"
            raise WorkerError(text, rank=rank, exit_status=0, step=None, traceback="")
    return found


def _read_least(least: object, workers: int) -> ElasticSettings | None:
    if least is None:
        return None
    if isinstance(least, bool) or not isinstance(least, int) or not 1 <= least <= workers:
        raise ValueError(f"launch: got least={least!r}; expected a whole number from 1 to workers={workers}")
    return ElasticSettings(least, workers)


def _check(fn: object, workers: object, threads: object, output: object, timeout_s: float | None) -> None:
    if not callable(fn):
        raise TypeError(f"launch: got {fn!r} to run; expected a function, as in launch(train, workers=2)")
    for name, value in (("workers", workers), ("threads", threads)):
        if isinstance(value, bool) or not isinstance(value, int | None) or (name == "workers" and value is None):
            raise TypeError(f"launch: got {name}={value!r}; expected a whole number from 1 up")
        if value is not None and value < 1:
            raise ValueError(f"launch: got {name}={value}; expected a whole number from 1 up")
    if output not in MODES:
        raise ValueError(f"launch: got output={output!r}; expected one of {', '.join(map(repr, MODES))}")
    if timeout_s is not None and not (isinstance(timeout_s, int | float) and timeout_s > 0):
        raise ValueError(f"launch: got timeout_s={timeout_s!r}; expected seconds above 0, or None for no limit")


def _pack(fn: Callable[..., object], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bytes:
    """The payload of worker/program.py: the header's length, the header as JSON, then the pickled call."""
    name = "cloudpickle" if importlib.util.find_spec("cloudpickle") else "pickle"
    try:
        function = getattr(fn, "func", fn)  # of a partial
        if name == "pickle" and getattr(function, "__module__", None) == "__main__":
            raise pickle.PicklingError("it is defined in the running program, which workers do not import")
        call: bytes = importlib.import_module(name).dumps((fn, args, kwargs))
    except Exception as error:
        advice = (
            "Install cloudpickle (pip install unisono[notebook]) to send lambdas and functions of notebooks, or move "
            "the function to a module."
            if name == "pickle"
            else "Make what it refers to inside the function, or pass names and settings instead of live objects."
        )
        raise TypeError(f"launch: {fn!r} or its arguments cannot be sent to workers: {error}. {advice}") from error
    code = getattr(fn, "__code__", None)
    file = code.co_filename if code is not None else ""
    sources = {file: "".join(linecache.getlines(file))} if file and not os.path.exists(file) else {}
    path = [entry or os.getcwd() for entry in sys.path]
    header = json.dumps({"pickler": name, "path": path, "argv": sys.argv, "sources": sources}).encode()
    return len(header).to_bytes(8, "little") + header + call


def _supervise(job: Job, run: Supervisor[Any]) -> None:
    try:
        outcome = run.supervise()
    except TimedOut as stop:
        raise TimeoutError(f"launch: not finished after {job.timeout_s} s; the workers were stopped.\n{stop}") from None
    if outcome.preempted:
        text = format_preemption(job.workers, outcome.step)
        raise WorkerError(text, rank=0, exit_status=outcome.exit_status, step=outcome.step, traceback="")
    if outcome.failure is not None:
        raise WorkerError(
            outcome.report,
            rank=outcome.failure.rank,
            exit_status=outcome.exit_status,
            step=outcome.step,
            traceback=outcome.failure.traceback,
        )
