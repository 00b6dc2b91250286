"""Launchers start the same program N times and tell each copy who it is; `launch` does it for a function."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from unisono.launchers.failures import EngineError, WorkerError

if TYPE_CHECKING:
    from unisono.launchers.engines.engine import Engine
    from unisono.launchers.output import Mode

__all__ = ["EngineError", "WorkerError", "launch"]

T = TypeVar("T")


def launch(
    fn: Callable[..., T],
    workers: int,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    on: Engine | None = None,
    threads: int | None = None,
    output: Mode = "auto",
    timeout_s: float | None = None,
    faults: str | None = None,
    least: int | None = None,
) -> list[T]:
    """Run `fn(*args, **kwargs)` in `workers` new processes, on this host or on an engine, and return their results in
    rank order (None of one that ended with `sys.exit(0)`).

    For notebooks and programs: no `if __name__ == "__main__"` is needed, and with cloudpickle installed
    (`pip install unisono[notebook]`) `fn` may be a lambda or a function of a notebook. Inside `fn`, `unisono.join()`
    gives the worker's world.

    Arguments:
        fn: called in every worker, with the same arguments.
        workers: how many processes.
        args, kwargs: what `fn` is called with; copied to the workers.
        on: the engine that starts the workers, such as `un.on.mpi()`; None for this host.
        threads: computing threads per worker; default: the usable cores divided among the workers.
        output: "auto" and "prefix" show the workers' lines with the rank in front, "rank0" only rank 0's lines,
            "files" writes unisono-output/rank-0.out and so on.
        timeout_s: stop the workers and raise TimeoutError after so many seconds; None: no limit.
        faults: a fault script such as "kill 1@40", for tests of what happens then; None: that of UNISONO_FAULTS, if
            any. A fault that did not fire is a WorkerError.
        least: lost workers are replaced, and training continues as long as so many remain; None: the loss of a
            worker ends the run. The results are those of the workers at the end, which may be fewer.

    Raises WorkerError with one report when a worker fails; the others are stopped. When it returns or raises, no
    process of theirs is left. An engine that is not installed, not reachable or too small raises EngineError.

    In a program that has imported torch, workers are forked from a process that has too: the first call starts it,
    later ones begin at once, and it ends with the program (with UNISONO_WARM=0 in the environment: never).

    >>> launch(pow, workers=2, args=(2, 10))
    [1024, 1024]
    """
    from unisono.launchers.launch_function import run_function

    if not isinstance(args, Sequence) or isinstance(args, str) or not isinstance(kwargs, Mapping | None):
        raise TypeError(f"launch: got args={args!r}, kwargs={kwargs!r}; expected a tuple and a dict, as in args=(0.1,)")

    settings: dict[str, Any] = {"threads": threads, "output": output, "timeout_s": timeout_s, "faults": faults}
    if on is None:
        return run_function(fn, workers, tuple(args), dict(kwargs or {}), least=least, **settings)
    from unisono.launchers.engines.engine import Engine

    if not isinstance(on, Engine):
        raise TypeError(f"launch: got on={on!r}; expected an engine of un.on, such as un.on.mpi()")
    return on.call(fn, workers, tuple(args), kwargs, least=least, **settings)
