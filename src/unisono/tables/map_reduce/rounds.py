"""MapReduce in a World: rank 0 is the server, every rank a worker.

One round, bulk synchronous:

1. Broadcast: the server sends its state to every worker.
2. Map: every worker computes on its own part, which never moves.
3. Reduce: the values are summed (one all-reduce) or combined in pairs up a tree, and reach the server.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import numpy as np
import torch
from torch import Tensor

from unisono import packing
from unisono.world import PeerLost, World

__all__ = ["Ask", "MapReduce", "Round", "run_in_world", "sum_values"]

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
