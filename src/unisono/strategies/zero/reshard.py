"""Split state on the move: whole again, or split anew in another world."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from unisono.batch_norm import move_batch_norm
from unisono.strategies.zero import optimizer_shards as optimizers
from unisono.strategies.zero.offloading import Offloading
from unisono.strategies.zero.units import Unit
from unisono.strategy import Replica, share
from unisono.world import World

if TYPE_CHECKING:
    from unisono.strategies.zero import zero


class Movable(Replica):
    """A replica whose model and optimizer are split into units."""

    strategy: zero
    units: list[Unit]
    _offload: Offloading | None
    _original: list[list[Tensor]]  # what the optimizer's groups held
    _narrowed: list[tuple[Tensor, torch.dtype]]  # parameters outside of units that were cast, and from what

    @abstractmethod
    def _start(self) -> None:
        """Split model and optimizer over the ranks of the world, and watch them."""

    @abstractmethod
    def _take_off(self) -> None:
        """No more hooks, no more units."""

    @abstractmethod
    def _made(self, size: int, rank: int) -> list[Unit]:
        """The units of the model for a world of this size; without memory."""

    @abstractmethod
    def _gather_all(self) -> None:
        """Have all values here."""

    @property
    def _trainable(self) -> list[Unit]:
        return [unit for unit in self.units if unit.trainable]

    @torch.no_grad()
    def restore(self) -> None:
        """Give model and optimizer back whole, as ordinary ones; every rank calls it. Then `close()`."""
        if self.units:
            self._bring_back()
            self._join(self.units, self.world, list(range(self.world.size)))

    def _bring_back(self) -> None:
        """Have the state that is away where the optimizer would keep it."""
        if self._offload is None:
            return
        self._gather_all()
        for unit in self._trainable:
            unit.master = self._offload.master(unit).to(unit.params[0].device)
        for (unit, i), state in self._offload.states().items():
            self.optimizer.state[unit.leaves[i]] = {
                key: x.to(unit.master.device) if isinstance(x, Tensor) and x.dim() else x for key, x in state.items()
            }

    def split_again(self) -> None:
        """Split them again."""
        self._start()

    def _join(self, units: list[Unit], world: World, order: list[int]) -> None:
        """Put whole parameters and state together, from the ranks of `world` that hold parts, in this order.

        A rank that is not among them has `units` of the same layout, and nothing in them.
        """
        holds = world.rank in order

        def join(line: Tensor) -> Tensor:
            parts = world.all_gather(line if holds else line[:0], tag="restore").wait()
            return torch.cat([parts[r] for r in order])

        learning = [unit for unit in units if unit.trainable]
        states = optimizers.whole(self.optimizer, learning, join, optimizers.kinds(self.optimizer, learning, world))
        values: dict[Tensor, Tensor] = {}
        for unit in units:
            dtype = unit.master_dtype if unit.trainable else unit.dtype
            empty = torch.empty(0, dtype=dtype, device=unit.params[0].device)
            full = join((unit.master if unit.trainable else unit.shard) if holds else empty)
            values |= {p: view.to(unit.given, copy=True) for p, view in zip(unit.params, unit.views(full), strict=True)}
        self._put_back()
        self._take_off()
        for param, value in values.items():
            param.grad = None
            param.data = value
        for param, dtype in self._narrowed:
            param.data = param.data.to(dtype)
        self._narrowed = []
        self.optimizer.state.update(states)

    def rebind(self, world: World, *, source: int = 0) -> str:
        every = world.gather_objects([self.world.size, self.world.rank, self.step, bool(self.units)])
        former, _, step, split = every[source]
        holders = {other[1]: r for r, other in enumerate(every) if (other[0], *other[2:]) == (former, step, split)}
        lost = [r for r in range(former) if r not in holders] if split else []
        if lost:
            raise ValueError(
                f"rank(s) {', '.join(map(str, lost))} of the former {former} took their parts of the optimizer's state"
                + (" and of the parameters" if self.strategy.stage == 3 else "")
                + " with them: make the replica anew in the new world and un.load the last checkpoint"
            )
        self.model.zero_grad()
        if split:
            order = [holders[r] for r in range(former)]
            self._bring_back()
            mine = self.units if world.rank in order else self._made(former, 0)
            self._join(mine, world, order)
        elif self.units:
            self._forget()
        else:
            self._take_off()
        self.world = world
        self._follow(source)
        move_batch_norm(self.model, world)
        self._start()
        return (
            f"model, optimizer and step {self.step} from rank {source} of {world.size}, split over {world.size} ranks "
            f"instead of {former}; gradients that were not stepped are dropped"
        )

    def _forget(self) -> None:
        """What I hold is out of date: room for what comes."""
        units = self.units
        self._put_back()
        self._take_off()
        for unit in units:
            for param, shape in zip(unit.params, unit.shapes, strict=True):
                param.data = torch.empty(shape, dtype=unit.given, device=param.device)

    def _follow(self, source: int) -> None:
        """Take over model, optimizer and step from a rank that has all of them."""
        world = self.world
        if world.size == 1:
            return
        share(self.model, world, source)
        mine = {"optimizer": self.optimizer.state_dict(), "step": self.step, "steps": world.ledger.step_count}
        packed = world.broadcast_object(mine, source)
        if world.rank != source:
            self.optimizer.load_state_dict(packed["optimizer"])
            self.step = packed["step"]
            world.ledger.resume(packed["steps"])

    def _put_back(self) -> None:
        for group, params in zip(self.optimizer.param_groups, self._original, strict=True):
            group["params"] = params
        self.optimizer.state.clear()
