"""A replica that looks as if it held only its part of the state: for the tests of checkpoints."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import unisono as un
from unisono.training.checkpoint.slices import Piece, Stored
from unisono.world import World
from unisono.world.virtual import run_threads

State = dict[Any, Any]  # of tensors by name; of an optimizer's state by number


def make(world: World | None = None, strategy: str = "allreduce") -> un.Replica:
    """Two layers and a batch norm: parameters, buffers, one of them whole numbers. The same weights each time."""
    model = torch.nn.Sequential(torch.nn.Linear(5, 8), torch.nn.BatchNorm1d(8), torch.nn.Tanh(), torch.nn.Linear(8, 3))
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    return un.parallel(model, optimizer, strategy, world=world or World())


def train(replica: un.Replica, count: int, seed: int = 0) -> un.Replica:
    """Every rank the same samples: the result depends on the number of ranks no more than by rounding."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(count):
        replica.optimizer.zero_grad()
        x, y = torch.randn(6, 5, generator=generator), torch.randn(6, 3, generator=generator)
        torch.nn.functional.mse_loss(replica.model(x), y).backward()
        replica.optimizer.step()
    return replica


def state_of(replica: un.Replica) -> State:
    """Model and optimizer in one plain dict of copies."""
    tensors = [*replica.model.named_parameters(), *replica.model.named_buffers()]
    found = {f"model.{name}": x.detach().clone() for name, x in tensors}
    for number, entry in replica.optimizer.state_dict()["state"].items():
        found |= {f"state.{number}.{key}": x.clone() for key, x in entry.items()}
    return found


def check_same(found: State, right: State) -> None:
    assert found.keys() == right.keys()
    for name, x in right.items():
        assert found[name].dtype == x.dtype, name
        assert torch.equal(found[name], x), name


class Split:
    """Makes an allreduce replica look as if it held only its part of parameters and optimizer state.

    Their elements, one after the other in the order of the model, are cut into equal parts, wherever that falls.
    What a rank holds nothing of, its optimizer's state does not even mention.
    """

    def __init__(self, replica: un.Replica) -> None:
        self.replica, self.world = replica, replica.world
        self.names = [name for name, _ in replica.model.named_parameters()]
        self.parameters = dict(replica.model.named_parameters())
        self.loaded: State | None = None
        self.same_world: bool | None = None
        replica.sharded_state = self.sharded_state
        replica.load_sharded_state = self.load_sharded_state
        replica.model.register_state_dict_pre_hook(self.refuse)
        self.quiet = False

    def refuse(self, *_: object) -> None:
        """The model's own state_dict() would gather all of it, on every rank."""
        assert self.quiet

    def range_of(self, name: str) -> tuple[int, int]:
        """Which elements of a parameter are mine."""
        sizes = [self.parameters[other].numel() for other in self.names]
        each = math.ceil(sum(sizes) / self.world.size)
        before = sum(sizes[: self.names.index(name)])
        clip = [min(max(each * (self.world.rank + r) - before, 0), self.parameters[name].numel()) for r in (0, 1)]
        return clip[0], clip[1]

    def piece(self, name: str, whole: torch.Tensor) -> Piece:
        start, stop = self.range_of(name)
        return Piece.of(whole.detach().reshape(-1)[start:stop].clone(), start, shape=whole.shape)

    def sharded_state(self) -> State:
        self.quiet = True
        model: State = dict(self.replica.model.state_dict())
        self.quiet = False
        model |= {name: self.piece(name, x) for name, x in self.parameters.items()}
        optimizer = self.replica.optimizer.state_dict()
        state: State = {}
        for number, name in enumerate(self.names):
            start, stop = self.range_of(name)
            if number in optimizer["state"] and start < stop:
                entry = optimizer["state"][number]
                state[number] = {k: x if x.dim() == 0 else self.piece(name, x) for k, x in entry.items()}
        return {"model": model, "optimizer": {"state": state, "param_groups": optimizer["param_groups"]}}

    def load_sharded_state(self, whole: State, *, same_world: bool) -> None:
        self.same_world, self.loaded = same_world, (loaded := {})

        def part(key: str, name: str, x: Stored) -> None:
            assert isinstance(x, Stored)
            start, stop = self.range_of(name) if name in self.parameters and x.shape else (0, x.numel())
            loaded[key] = (x, start, x.read(start, stop))

        for name, x in whole["model"].items():
            part(f"model.{name}", name, x)
        for number, entry in (whole["optimizer"] or {"state": {}})["state"].items():
            for key, x in entry.items():
                part(f"state.{number}.{key}", self.names[number], x)

    def collect(self) -> State:
        """The whole state again, from what every rank has read of it."""
        assert self.loaded is not None
        found: State = {}
        mine = {key: [start, values] for key, (_, start, values) in self.loaded.items()}
        for part in self.world.gather_objects(mine):
            for key, (start, values) in part.items():
                stored = self.loaded[key][0]
                whole = found.setdefault(key, torch.full((stored.numel(),), 77, dtype=stored.dtype))
                whole[start : start + values.numel()] = values
        return {key: x.reshape(self.loaded[key][0].shape) for key, x in found.items()}


def change_pieces(replica: un.Replica, change: Callable[[State, int], None]) -> Split:
    split = Split(replica)

    def changed() -> State:
        state = split.sharded_state()
        change(state["model"], replica.world.rank)
        return state

    replica.sharded_state = changed
    return split


def save_split(path: Path, size: int, count: int = 3) -> State:
    """Train and save from `size` ranks, each its part; the state that all of them had."""

    def saving(world: World) -> State:
        replica = train(make(world), count)
        Split(replica)
        un.save(path, replica, extra={"mine": world.rank})
        return state_of(replica)

    return run_threads(saving, size)[0]


def save_whole(path: Path, size: int) -> State:
    def saving(world: World) -> State:
        replica = train(make(world), 3)
        un.save(path, replica)
        return state_of(replica)

    return run_threads(saving, size)[0]


def load_split(path: Path, size: int) -> list[tuple[State, bool, int]]:
    """Each rank's view of all parts together, whether the world was the same, and how many elements it read."""

    def loading(world: World) -> tuple[State, bool, int]:
        replica = make(world)
        split = Split(replica)
        assert un.load(path, replica).step == 3
        assert split.loaded is not None
        read = sum(values.numel() for _, _, values in split.loaded.values())
        return split.collect(), bool(split.same_world), read

    return run_threads(loading, size)


def load_whole(path: Path, size: int) -> list[State]:
    def loading(world: World) -> State:
        replica = make(world)
        un.load(path, replica)
        return state_of(replica)

    return run_threads(loading, size)


def damage(target: Path, kind: str) -> None:
    if kind == "truncated":
        os.truncate(target, target.stat().st_size - 1)
    elif kind == "flipped":
        data = bytearray(target.read_bytes())
        data[-1] ^= 1
        target.write_bytes(data)
    else:
        target.unlink()
