"""Runs a function in worker processes: the function travels in an inherited file, each result in another.

Pickle is used here and nowhere else: between the launcher and its own children, through descriptors that no other
process can open; and on other hosts through the authenticated channel of the run (channel.py).
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import linecache
import os
import pickle
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from unisono.launchers.failures import WorkerError, format_preemption
from unisono.launchers.job import ElasticSettings, Job, TimedOut
from unisono.launchers.local import LocalRun
from unisono.launchers.output import MODES, Mode
from unisono.launchers.runtime.files import anonymous_file
from unisono.launchers.supervisor import Supervisor

if TYPE_CHECKING:
    from unisono.launchers.engines.engine import Engine

__all__ = ["call_on", "run_function"]

T = TypeVar("T")


def run_function(
    fn: Callable[..., T],
    workers: int,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    threads: int | None,
    output: Mode,
    timeout_s: float | None,
    faults: str | None,
    least: int | None = None,
) -> list[T]:
    """See `unisono.launchers.launch`."""
    _check(fn, workers, threads, output, timeout_s)
    elastic = _read_least(least, workers)
    payload = _pack(fn, args, kwargs)
    descriptors = [anonymous_file("unisono-function")]
    try:
        _write(descriptors[0], payload)
        descriptors += [anonymous_file(f"unisono-result-{rank}") for rank in range(workers)]
        job = Job(
            ["--function"],
            workers,
            threads=threads,
            output=output,
            inherit=False,
            timeout_s=timeout_s,
            payload_fd=descriptors[0],
            result_fds=descriptors[1:],
            start="fork" if "torch" in sys.modules else "fresh",
            faults=faults,
            elastic=elastic,
        )
        _supervise(job, LocalRun(job))
        there = [rank for rank, fd in enumerate(job.result_fds) if least is None or os.pread(fd, 1, 0)]
        return [_result(rank, job.result_fds[rank]) for rank in there]
    finally:
        for fd in descriptors:
            os.close(fd)


def call_on(
    engine: Engine,
    fn: Callable[..., T],
    workers: int,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    threads: int | None,
    output: Mode,
    timeout_s: float | None,
    faults: str | None,
    least: int | None = None,
) -> list[T]:
    """Run a function on an engine; see `unisono.launchers.launch`."""
    from unisono.launchers.engine_run import open_remote_run

    _check(fn, workers, threads, output, timeout_s)
    elastic = _read_least(least, workers)
    if elastic is not None and engine.restarts:
        raise ValueError("launch: got least= with max_restarts=, which starts all workers again; expected one of them")
    engine.check(workers)
    job = Job(
        ["--function"],
        workers,
        threads=threads,
        output=output,
        inherit=False,
        timeout_s=timeout_s,
        faults=faults,
        elastic=elastic,
    )
    run = open_remote_run(job, engine, _pack(fn, args, kwargs))
    _supervise(job, run)
    there = [rank for rank, data in enumerate(run.results) if least is None or data]
    return [_unpack(rank, run.results[rank]) for rank in there]


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
        if name == "pickle" and getattr(fn, "__module__", None) == "__main__":
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


def _result(rank: int, fd: int) -> Any:
    if not os.pread(fd, 1, 0):
        raise _no_result(rank)
    with open(fd, "rb", closefd=False) as file:
        file.seek(1)
        return pickle.load(file)  # noqa: S301  # written by our own child into a file that only the two of us hold


def _unpack(rank: int, data: bytes) -> Any:
    if not data:
        raise _no_result(rank)
    return pickle.loads(memoryview(data)[1:])  # noqa: S301  # came over the run's own authenticated channel


def _no_result(rank: int) -> WorkerError:
    text = f"unisono: worker {rank} ended with exit status 0 before the function returned (os._exit in it?)"
    return WorkerError(text, rank=rank, exit_status=0, step=None, traceback="")


def _write(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]
