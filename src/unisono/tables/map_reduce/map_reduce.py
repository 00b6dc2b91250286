"""`un.mapreduce`, and how a MapReduce program runs: in this world, in launched workers, or on an engine."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
from collections.abc import Callable
from typing import Any, Literal

from unisono.launchers import launch
from unisono.launchers.engines.engine import Engine
from unisono.tables.map_reduce.rounds import Ask, MapReduce, run_in_world
from unisono.tables.map_reduce.worker_data import open_shared, share_arrays, split
from unisono.world import join

__all__ = ["find_native", "launch_workers", "mapreduce", "run"]


def mapreduce(
    map: Callable[..., Any],  # noqa: A002  # the names that everyone knows
    reduce: Literal["sum"] | Callable[[Any, Any], Any],
    data: Any,
    *,
    state: Any = None,
    update: Callable[[Any, Any], Any] | None = None,
    rounds: int = 1,
    until: Callable[[Any, Any], bool] | None = None,
    prepare: Callable[[Any], Any] | None = None,
    workers: int | None = None,
    on: Any = None,
    own: bool = False,
) -> Any:
    """Map `data` in parallel and reduce the values: once, or round after round with a state.

    Without `update`: every worker computes `map(part)`, or `map(part, state)` if a state is given, on its own
    part of the data; the values are reduced, and the reduced value is returned. With `update`, this is repeated:
    the server broadcasts the state, reduces the values and makes the next state by `update(state, reduced)`; the
    last state is returned. The parts stay with their workers for all rounds.

    Arguments:
        map: runs on every worker.
        reduce: "sum" (numbers, arrays, tensors; also in tuples and dicts), or an associative function of two values,
            which are combined in the order of the parts.
        data: arrays, tensors, sparse matrices, lists or frames, split by rows; a tuple of them, split alike; files.
        state, update, rounds: see above. `until(old, new)`: stop as soon as it is true of two consecutive states.
        prepare: runs once on each part; `map` is given what it returns.
        workers: how many local workers to launch; None: the world that this process is in.
        on: where to launch them, as in `un.launch`.
        own: in a running world, whether `data` is this rank's own part already, and not the whole.

    States and values are numbers, text, arrays, tensors, and lists, tuples and dicts of them.

    >>> mapreduce(len, "sum", ["every", "word", "once"])
    3
    >>> import numpy as np
    >>> x = np.arange(6.0)
    >>> mapreduce(lambda part, w: (w * part - part).dot(part), "sum", x, state=0.0,
    ...           update=lambda w, gradient: w - gradient / 55, rounds=5)
    1.0
    """
    _check_arguments(map, reduce, update, rounds, until)
    with_state = state is not None or update is not None
    program = MapReduce(
        map if with_state else lambda part, _: map(part),
        reduce,
        lambda ask: _run_rounds(ask, state, update, rounds, until),
        prepare,
    )
    return run(program, data, workers=workers, on=on, own=own)


def run(program: MapReduce, data: Any, *, workers: int | None = None, on: Any = None, own: bool = False) -> Any:
    """Run a program in this world, or on the workers that `workers` and `on` name; returns its result."""
    if (engine := find_native(on)) is not None:
        return engine(program, data, workers, on)
    if workers is None and on is None:
        world = join()
        return run_in_world(program, data if own else split(data, world.rank, world.size), world)[0]
    return launch_workers(_work, program, data, workers=workers, on=on)[0]


def find_native(on: Any) -> Callable[[MapReduce, Any, int | None, Any], Any] | None:
    """The MapReduce of an engine's own: the function `run` in this folder's file of the engine's name.

    None for engines without one: they launch a world, and the program runs in that.
    """
    if not isinstance(on, Engine):
        return None
    name = on.name.lower()
    if not name.isidentifier() or importlib.util.find_spec(f"unisono.tables.map_reduce.{name}") is None:
        return None
    found: Callable[[MapReduce, Any, int | None, Any], Any] = importlib.import_module(
        f"unisono.tables.map_reduce.{name}"
    ).run
    return found


def launch_workers(
    work: Callable[[Any, Any], Any], argument: Any, data: Any, *, workers: int | None, on: Any
) -> list[Any]:
    """Launch workers and return each one's `work(argument, data)`. On this host they map large arrays: no copies."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ValueError(
            f"got workers={workers} inside a world that already runs on {os.environ['WORLD_SIZE']} workers: "
            "leave workers= and on= away, every rank then does its part"
        )
    given: dict[str, Any] = {name: value for name, value in (("workers", workers), ("on", on)) if value is not None}
    with share_arrays(data) if on is None else contextlib.nullcontext(data) as sent:
        return launch(work, args=(argument, sent), output="rank0", **given)


def _work(program: MapReduce, data: Any) -> Any:
    world = join("cpu")
    result, _ = run_in_world(program, split(open_shared(data), world.rank, world.size), world)
    return result if world.rank == 0 else None


def _run_rounds(
    ask: Ask,
    state: Any,
    update: Callable[[Any, Any], Any] | None,
    rounds: int,
    until: Callable[[Any, Any], bool] | None,
) -> Any:
    """The server's side of `mapreduce`: one round, or round after round until the last state."""
    if update is None:
        return ask(state)
    for _ in range(rounds):
        before, state = state, update(state, ask(state))
        if until is not None and until(before, state):
            break
    return state


def _check_arguments(map_: object, reduce: object, update: object, rounds: object, until: object) -> None:
    if not callable(map_):
        raise TypeError(f"mapreduce: got {map_!r} as map; expected a function of a part of the data (and the state)")
    if reduce != "sum" and not callable(reduce):
        raise ValueError(f'mapreduce: got reduce={reduce!r}; expected "sum", or a function of two values')
    if isinstance(rounds, bool) or not isinstance(rounds, int) or rounds < 1:
        raise ValueError(f"mapreduce: got rounds={rounds!r}; expected a whole number from 1 up")
    if update is None and (rounds != 1 or until is not None):
        raise ValueError("mapreduce: several rounds need update=, which makes the next state from what was reduced")
