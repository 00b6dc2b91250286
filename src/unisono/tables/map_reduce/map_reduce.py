"""`un.mapreduce`, and how a MapReduce program runs: in this world, in launched workers, or on an engine.

In a world rank 0 is the server and every rank a worker. One round, bulk synchronous:

1. Broadcast: the server sends its state to every worker.
2. Map: every worker computes on its own part, which never moves.
3. Reduce: the values are summed (one all-reduce) or combined in pairs up a tree, and reach the server.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import numpy as np
import torch
from torch import Tensor

from unisono import packing
from unisono.launchers import launch
from unisono.launchers.engines.engine import Engine
from unisono.tables.map_reduce.worker_data import open_shared, share_arrays, split
from unisono.world import PeerLost, World, join

Reduce = Literal["sum"] | Callable[[Any, Any], Any]


@dataclass
class Round:
    """How long a round took; `compute_s` has every worker's seconds in `map`, and is empty if they are not known."""

    wall_s: float
    compute_s: list[float] = field(default_factory=list)


class Ask(Protocol):
    """What the server's program calls to run a round."""

    workers: int
    log: list[Round]

    def __call__(self, state: Any, *, reduce: Literal["sum"] | None = None) -> Any:
        """Broadcast `state`, map it on every part, return the reduced value.

        `reduce="sum"` adds the values; None reduces them as the program says.
        """


@dataclass(frozen=True)
class MapReduce:
    """A MapReduce program.

    `drive(ask)` is the server's program and returns the result; `prepare(part)` runs once on each worker, and what it
    returns stays there and is given to every `map(prepared, state)`.
    """

    map: Callable[[Any, Any], Any]
    reduce: Reduce
    drive: Callable[[Ask], Any]
    prepare: Callable[[Any], Any] | None = None


def run_in_world(program: MapReduce, part: Any, world: World) -> tuple[Any, list[Round]]:
    """Run `program` with every rank's own `part`; returns the result and the rounds, on every rank."""
    prepared = program.prepare(part) if program.prepare is not None else part
    rounds = _WorldRounds(program, prepared, world)
    if world.rank != 0:
        result = rounds.serve()
    else:
        try:
            result = program.drive(rounds)
        except PeerLost:
            raise
        except Exception as error:
            rounds.share(("failed", isinstance(error, ValueError), str(error)))
            raise
        rounds.share(("ended", result, None))
    return result, rounds.list_rounds()


class _WorldRounds:
    """Runs rounds in a world; an `Ask` on rank 0, which the other ranks `serve`."""

    def __init__(self, program: MapReduce, part: Any, world: World) -> None:
        self.program, self.part, self.world = program, part, world
        self.workers = world.size
        self.log: list[Round] = []
        self._compute_s: list[float] = []
        self._usual_bytes = 0  # length of the last message

    def __call__(self, state: Any, *, reduce: Literal["sum"] | None = None) -> Any:
        start = time.perf_counter()
        self.share(("map", state, reduce))
        value = self._round(state, reduce)
        self.log.append(Round(time.perf_counter() - start))
        return value

    def serve(self) -> Any:
        """Answer rank 0 until it has its result, and return that."""
        while True:
            what, first, second = self.share()
            if what == "ended":
                return first
            if what == "failed":
                raise (ValueError if first else RuntimeError)(second)
            self._round(first, second)

    def _round(self, state: Any, reduce: Literal["sum"] | None) -> Any:
        start = time.perf_counter()
        value = self.program.map(self.part, state)
        self._compute_s.append(time.perf_counter() - start)
        how = reduce or self.program.reduce
        return sum_values(value, self.world) if how == "sum" else _combine_up_tree(value, how, self.world)

    def list_rounds(self) -> list[Round]:
        """The server's rounds with every worker's seconds, on every rank."""
        walls = self.world.broadcast_object([r.wall_s for r in self.log])
        seconds = self.world.gather_objects(self._compute_s)
        return [Round(wall, list(each)) for wall, *each in zip(walls, *seconds, strict=True)]

    def share(self, message: tuple[Any, Any, Any] | None = None) -> Any:
        """Rank 0's message, on every rank: in one collective if it is as long as the one before, else in two.

        `World.broadcast_object` takes half as long again: a gradient round is short, and its messages are alike.
        """
        if self.world.size == 1:
            return message
        head = torch.zeros(8 + self._usual_bytes, dtype=torch.uint8)
        data = torch.empty(0, dtype=torch.uint8)
        if message is not None:
            data = _to_tensor(message)
            head[:8] = torch.tensor([len(data)]).view(torch.uint8)
            if len(data) == self._usual_bytes:
                head[8:] = data
        self.world.broadcast(head, tag="state").wait()
        length = int(head[:8].view(torch.int64))
        if length == self._usual_bytes:
            data = head[8:]
        else:
            data = data if message is not None else torch.empty(length, dtype=torch.uint8)
            self.world.broadcast(data, tag="state").wait()
        self._usual_bytes = length
        return message if message is not None else packing.from_bytes(data.numpy().tobytes())


def sum_values(value: Any, world: World) -> Any:
    """The sum over all ranks of numbers, arrays or tensors, also in tuples, lists and dicts of one structure."""
    leaves: list[Tensor] = []
    rebuild = _flatten(value, leaves)
    if world.size > 1:
        world.all_reduce(leaves, "sum", tag="reduce").wait()
    return rebuild()


def _flatten(value: Any, leaves: list[Tensor]) -> Callable[[], Any]:
    """Append copies of the numbers to `leaves`; returns a function that builds the value again from them."""
    if isinstance(value, tuple | list):
        parts = [_flatten(item, leaves) for item in value]
        return lambda: type(value)(part() for part in parts)
    if isinstance(value, dict):
        named = {key: _flatten(value[key], leaves) for key in value}
        return lambda: {key: part() for key, part in named.items()}
    if isinstance(value, bool | np.bool_) or not isinstance(value, int | float | np.generic | np.ndarray | Tensor):
        raise TypeError(f'reduce="sum" adds numbers, arrays and tensors, got {type(value).__name__}: give a function')
    array = value.detach().clone() if isinstance(value, Tensor) else torch.from_numpy(np.array(value))
    leaves.append(array)
    if isinstance(value, Tensor):
        return lambda: array
    return array.numpy if isinstance(value, np.ndarray) else array.item


def _combine_up_tree(value: Any, reduce: Callable[[Any, Any], Any], world: World) -> Any:
    """Combine all values in rank order; rank 0 returns the result. Each rank sends once, in log2(N) stages."""
    step = 1
    while step < world.size:
        if world.rank % (2 * step):
            _send(value, world.rank - step, world)
            return None
        if world.rank + step < world.size:
            value = reduce(value, _receive(world.rank + step, world))
        step *= 2
    return value


def _send(value: Any, dst: int, world: World) -> None:
    data = _to_tensor(value)
    world.send(torch.tensor([len(data)]), dst, tag="reduce").wait()
    world.send(data, dst, tag="reduce").wait()


def _receive(src: int, world: World) -> Any:
    length = torch.empty(1, dtype=torch.int64)
    world.recv(length, src, tag="reduce").wait()
    data = torch.empty(int(length), dtype=torch.uint8)
    world.recv(data, src, tag="reduce").wait()
    return packing.from_bytes(data.numpy().tobytes())


def _to_tensor(value: Any) -> Tensor:
    return torch.frombuffer(bytearray(packing.to_bytes(value)), dtype=torch.uint8)


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
            "leave workers= and on= out, every rank then does its part"
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
