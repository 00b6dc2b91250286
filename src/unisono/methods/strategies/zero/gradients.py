"""Gradients of which every rank keeps a part: their norms, and what may be done to them.

`ShardedGradients` holds them all; a `ShardedGradient` is `p.grad` of one parameter, on which clipping, norms and adding
up work as on any gradient.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Collection, Container, Sequence
from typing import Any

import torch
from torch import Tensor

from unisono.methods.strategies._lazy_gradient import LazyGradient
from unisono.methods.strategies.zero.units import Unit
from unisono.world import World


class ShardedGradients:
    """The gradients of some units in one window. Parameters are numbered through, over all units.

    used: whether any rank had a gradient, by number.
    used_up: the units that the optimizer has stepped.
    changed: the numbers of the optimizers (of several) whose gradients the program has changed.
    overflow: those of which some rank had a value that is not finite, so AMP is to skip their step on all ranks.
    """

    def __init__(self, units: Sequence[Unit], world: World, inside: World | None = None) -> None:
        """`inside`: the ranks that have one shard each, where others of the world have the same (see `groups`)."""
        self.units, self._world, self._inside = list(units), world, inside or world
        self.places = [(unit, slot) for unit in self.units for slot in range(len(unit.params))]
        self.first = {unit: number for number, (unit, slot) in reversed(list(enumerate(self.places))) if slot == 0}
        self._shown = [self._make(number) for number in range(len(self.places))]
        self.open_window()

    def _make(self, number: int) -> ShardedGradient:
        unit, slot = self.places[number]
        return ShardedGradient(unit.shapes[slot], unit.dtype, unit.params[slot].device, self, number)

    def open_window(self) -> None:
        """Begin with gradients that nobody has."""
        self.used = [False] * len(self.places)
        self.used_up: set[Unit] = set()
        self.overflow: set[Unit] = set()
        self.changed: set[int] = set()
        self.hidden: set[Unit] = set()  # reduced, and not shown to the optimizer yet
        self._squares: dict[Unit, list[Tensor]] = {}  # of gradients that have left
        self._factors = [1.0] * len(self.places)  # by which they are to be multiplied
        self._last_factor: tuple[Any, float] = (None, 1.0)
        self.forget_norms()

    def forget_norms(self) -> None:
        """The gradients have changed."""
        self._norms: dict[float, list[Tensor]] = {}
        self._served: set[int] = set()  # the numbers whose norms were asked for

    # What the user may do with them, through a `ShardedGradient` ---------------------------------------------

    @torch.no_grad()
    def norm(self, number: int, order: float) -> Tensor:
        """The norm of a parameter's gradient, over all ranks.

        Those of all parameters are found with one collective, and serve for one sweep over them: a GradScaler changes
        gradients behind our back. Every rank asks in the same order.
        """
        if self._world.axes is not None:
            self._world.axes.check_norm()
        if order not in self._norms or number in self._served:
            sums = self._power_sums(order)
            inf = math.isinf(order)
            self._world.run_tolerating_loss(
                lambda: self._inside.all_reduce(sums, "max" if inf else "sum", tag="norms").wait()
            )
            roots = sums if inf else sums ** (1.0 / order)
            self._norms = {order: [x.to(unit.dtype) for x, (unit, _) in zip(roots, self.places, strict=True)]}
            self._served = set()
        self._served.add(number)
        return self._norms[order][number]

    def _power_sums(self, order: float) -> Tensor:
        device = self.units[0].params[0].device
        wide = any(unit.dtype == torch.float64 for unit in self.units)
        sums = torch.zeros(len(self.places), dtype=torch.float64 if wide else torch.float32, device=device)
        for unit in self.units:
            first = self.first[unit]
            if not unit.steps_here and order != 2:
                raise NotImplementedError(
                    f"the norm of order {order} of gradients that have left for the host: only the 2-norm is known"
                )
            for i, part in enumerate(unit.parts):
                number = first + part.slot
                if not unit.steps_here:
                    sums[number] = self._squares[unit][i] * self._factors[number] ** 2
                elif self.used[number] and unit.gradient is not None:
                    sums[number] = sum_powers(unit.gradient[part.at : part.at + part.length], order)
        return sums

    @torch.no_grad()
    def scale(self, numbers: Sequence[int], factor: Any) -> None:
        """Multiply my parts of some gradients."""
        self.forget_norms()
        chosen = {number for number in numbers if not self._is_gone(self.places[number][0])}
        for number in chosen:
            self._factors[number] *= self._as_float(factor)
        for mine in self._take_lines(chosen):
            mine.mul_(factor.to(mine.device) if isinstance(factor, Tensor) and mine.is_cpu else factor)

    def clear(self, number: int) -> None:
        """Make my part of a gradient zero."""
        self.forget_norms()
        if not self._is_gone(self.places[number][0]):
            self._factors[number] = 0.0
            for mine in self._take_lines([number]):
                mine.zero_()

    @torch.no_grad()
    def unscale(self, numbers: Sequence[int], found_inf: Tensor, factor: Tensor) -> None:
        """Multiply my parts as a GradScaler does, and tell it of values that are not finite, on whichever rank."""
        self.forget_norms()
        if not all(self.places[number][0].steps_here for number in numbers):
            raise NotImplementedError("a GradScaler, for gradients that have left for the host: compute in bf16")
        mine = self._take_lines(set(numbers))
        if mine:
            torch._amp_foreach_non_finite_check_and_unscale_(mine, found_inf, factor)
        if any(self.places[number][0] in self.overflow for number in numbers):
            found_inf.fill_(1.0)
        if self._world.axes is not None:
            self._world.axes.agree_overflow(found_inf)

    def _is_gone(self, unit: Unit) -> bool:
        """Whether its gradients were stepped with off the device; elsewhere the next pass may add to them."""
        return unit in self.used_up and not unit.steps_here

    def _take_lines(self, numbers: Collection[int]) -> list[Tensor]:
        """My parts of some gradients, and those of which I keep a copy, to be changed: whole lines where all of a unit
        are chosen."""
        found = []
        self.changed |= {self.places[number][0].member for number in numbers}
        for unit in self.units:
            first = self.first[unit]
            chosen = {slot for slot in range(len(unit.params)) if first + slot in numbers}
            for one in unit.held if chosen else ():
                if one.gradient is not None and len(chosen) == len(unit.params):
                    found.append(one.gradient)
                elif one.gradient is not None:
                    found += [one.gradient[p.at : p.at + p.length] for p in one.parts if p.slot in chosen]
        torch.autograd.graph.increment_version(found)  # which torch does not do below __torch_dispatch__
        return found

    def _as_float(self, factor: Any) -> float:
        """A factor as a number; clipping gives the same tensor for each gradient."""
        if all(unit.steps_here for unit in self.units):
            return 1.0
        if factor is not self._last_factor[0]:
            self._last_factor = (factor, float(factor))
        return self._last_factor[1]

    @torch.no_grad()
    def clamp(self, number: int, low: Any, high: Any) -> None:
        """Limit the elements of a gradient."""
        self.forget_norms()
        if self.places[number][0].gradient is None:
            raise NotImplementedError("limits of the elements of gradients that have left for the host: clip the norm")
        for mine in self._take_lines([number]):
            mine.clamp_(low, high)

    def full(self, number: int) -> Tensor:
        """A parameter's whole gradient, gathered."""
        unit, slot = self.places[number]
        if unit.gradient is None:
            raise RuntimeError(f"{unit.names[slot]!r} has no gradient here: none yet, or it has left for the host")
        shards = self._inside.all_gather(unit.gradient, even=unit.owners is None, tag="full gradient").wait()
        return unit.views(torch.cat(shards))[slot].clone()

    # What leaves for the host --------------------------------------------------------------------------------

    def keep_norms(self, unit: Unit) -> None:
        """The gradient of a unit leaves: its norms are needed if gradients are to be clipped."""
        if not unit.steps_here and unit.parts:
            assert unit.gradient is not None
            views = [unit.gradient[part.at : part.at + part.length] for part in unit.parts]
            self._squares[unit] = [x.to(_wide_dtype(x)).square() for x in torch._foreach_norm(views)]

    def factor(self, units: Collection[Unit]) -> float:
        """What the gradients of these units, which left, are to be multiplied by."""
        every = zip(self.places, self._factors, self.used, strict=True)
        chosen = [factor for (unit, _), factor, used in every if used and unit in units]
        found = {math.nan if math.isnan(factor) else factor for factor in chosen}  # that of clipping by such a norm
        if len(found) > 1:
            raise ValueError(
                "the gradients of this window were multiplied by different numbers after they had left for the host: "
                "multiply all by the same, as clipping does, or use optimizer_on='device'"
            )
        return found.pop() if found else 1.0

    def find_used(self, unit: Unit) -> list[bool]:
        """Which parameters had a gradient in this window, on any rank."""
        return self.used[self.first[unit] :][: len(unit.params)]

    def absent(self, unit: Unit) -> list[tuple[int, int]]:
        """The elements of my shard whose parameters had no gradient in this window, on any rank."""
        used = self.find_used(unit)
        return [(p.at, p.at + p.length) for p in unit.parts if not used[p.slot]]

    # `p.grad` of the model's parameters, and of the optimizer's leaves ---------------------------------------------

    def take_local(self, number: int) -> tuple[Tensor | None, bool]:
        """What backward has added to a gradient on this rank, and whether there was none from before."""
        unit, slot = self.places[number]
        shown, grad = self._shown[number], unit.params[slot].grad
        fresh = grad is not shown or shown.cleared or self._is_cleared(unit, slot)
        local = shown.local if grad is shown else grad
        if isinstance(local, ShardedGradient):
            self.check(local)
        if grad is shown:
            shown.cleared, shown.local = False, None
            shown.tasks.clear()
        else:  # the program may have kept the one that it cleared, which is not that of this pass
            self._shown[number] = self._make(number)
        if local is not None and local.is_sparse:
            raise TypeError(
                f"the gradient of {unit.names[slot]!r} is sparse, which zero cannot split: make its module "
                "with sparse=False, or use the allreduce strategy"
            )
        return local, fresh

    def is_zeroed(self, number: int) -> bool:
        """Whether the program has made a gradient zero and kept it (`zero_grad(set_to_none=False)`): as in one process
        the optimizer steps with it, whether or not a pass adds to it."""
        unit, slot = self.places[number]
        shown = self._shown[number]
        return unit.params[slot].grad is shown and shown.cleared and not self._is_cleared(unit, slot)

    def holds_any_of(self, task: int, numbers: Container[int]) -> bool:
        """Whether something that a backward pass has added waits to be reduced; `numbers`: where it added first."""
        for number, (unit, slot) in enumerate(self.places):
            shown, grad = self._shown[number], unit.params[slot].grad
            if grad is shown and shown.local is not None and task in shown.tasks:
                return True
            if number in numbers and isinstance(grad, Tensor) and grad is not shown and bool(grad.count_nonzero()):
                return True
        return False

    def _is_cleared(self, unit: Unit, slot: int) -> bool:
        """Whether `optimizer.zero_grad()` let go of my part of a gradient, in a step that runs its closure again."""
        mine = [leaf for part, leaf in zip(unit.parts, unit.leaves, strict=True) if part.slot == slot]
        return unit.steps_here and unit not in self.hidden and any(leaf.grad is None for leaf in mine)

    def check(self, gradient: ShardedGradient) -> None:
        """Refuse one that was cleared: the memory holds later ones."""
        if self._shown[gradient.number] is not gradient:
            unit, slot = self.places[gradient.number]
            raise RuntimeError(
                f"this gradient of {unit.names[slot]!r} was cleared (zero_grad()), and another backward pass has taken "
                "its memory: to keep a gradient of which each rank has a part, take grad.full(), on every rank, before"
            )

    def show(self, number: int, used: bool = True) -> None:
        """Let the model see a gradient."""
        unit, slot = self.places[number]
        unit.params[slot].grad = self._shown[number] if used else None

    def show_to_optimizer(self, unit: Unit, used: Sequence[Any]) -> None:
        """Let the optimizer see the gradients of my parts of a unit; `used`: of which of its parameters."""
        self.hidden.discard(unit)
        for one in unit.held:
            for part, leaf in zip(one.parts, one.leaves, strict=True):
                if not used[part.slot]:
                    leaf.grad = None
                elif unit.steps_here and one.gradient is not None:
                    leaf.grad = one.shape(part, one.gradient[part.at : part.at + part.length])

    def drop_cleared(self) -> None:
        """A parameter whose `p.grad` was taken away after backward is not stepped."""
        for number, (unit, slot) in enumerate(self.places):
            grad = unit.params[slot].grad
            if not self.used[number] or grad is self._shown[number]:
                continue
            if grad is not None:
                raise ValueError(
                    f"the gradient of {unit.names[slot]!r} was replaced after backward, and the optimizer holds parts "
                    "of the former one: change it in place (clipping, mul_), or clear it"
                )
            self.used[number] = False
            self.changed.add(unit.member)
            for one in unit.held:
                for part, leaf in zip(one.parts, one.leaves, strict=True):
                    if part.slot == slot:
                        leaf.grad = None

    def use_late(self) -> None:
        """Where a reducer sends what it kept from earlier windows: a parameter that no rank used in this one may have a
        gradient too."""
        for unit in self.units:
            for part in unit.parts:
                number = self.first[unit] + part.slot
                if not self.used[number] and unit.gradient is not None:
                    self.used[number] = bool(unit.gradient[part.at : part.at + part.length].any())

    # Values that are not finite ------------------------------------------------------------------------------

    def find_nonfinite(self) -> set[Unit]:
        """The units of which my shard holds a value that is not finite."""
        every = [(u, u.gradient) for u in self.units if u.gradient is not None and u.shard_length]
        if not every:
            return set()
        shards = [(unit, torch.view_as_real(x) if x.is_complex() else x) for unit, x in every]
        on = self.units[0].params[0].device
        sums = torch.stack([x.sum(dtype=_wide_dtype(x)).abs().double().to(on) for _, x in shards])
        if math.isfinite(sums.sum().item()):  # then all are; else a sum may be too large, and all are looked at
            return set()
        return {unit for unit, x in shards if not torch.isfinite(x).all()}


class ShardedGradient(LazyGradient):
    """The mean gradient of a parameter, of which every rank holds a part.

    `norm()`, `torch.nn.utils.clip_grad_norm_`, `mul_` and `zero_` do what they do on a whole gradient; each must be
    called on every rank. `full()` gathers it. Anything else is refused.
    """

    number: int
    local: Tensor | None
    cleared: bool
    tasks: set[int]

    @staticmethod
    def __new__(
        cls, shape: torch.Size, dtype: torch.dtype, device: torch.device, owner: ShardedGradients, number: int
    ) -> ShardedGradient:
        made: ShardedGradient = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=device)
        return made

    def __init__(
        self, shape: torch.Size, dtype: torch.dtype, device: torch.device, owner: ShardedGradients, number: int
    ) -> None:
        self.owner, self.number = weakref.ref(owner), number
        self.cleared = False  # by zero_()
        self.local = None  # what backward passes have added since, on this rank alone
        self.tasks = set()  # which passes

    def full(self) -> Tensor:
        """The whole gradient, on every rank; every rank calls it."""
        return self.find_owner().full(self.number)

    def __repr__(self) -> str:  # type: ignore[override]
        return f"ShardedGradient(shape={list(self.shape)}, dtype={self.dtype}; full() gathers it on every rank)"

    def find_owner(self) -> ShardedGradients:
        owner: ShardedGradients = super().find_owner()
        owner.check(self)
        return owner

    def add_pass(self, other: Tensor, alpha: float) -> Any:
        """Kept until it is reduced."""
        if isinstance(other, ShardedGradient) or alpha != 1:
            raise NotImplementedError("only a backward pass may add to a gradient that is split over the ranks")
        self.local = other.detach() if self.local is None else self.local + other
        self.tasks.add(torch._C._current_graph_task_id())
        return self

    def find_norm(self, order: float, dtype: torch.dtype | None) -> Tensor:
        self._refuse_local("its norm")
        found = self.find_owner().norm(self.number, order)
        return found if dtype is None else found.to(dtype)

    def _refuse_local(self, what: str) -> None:
        if self.local is not None:
            raise NotImplementedError(
                f"{what}, of a gradient that is split over the ranks, and to which a backward pass has added whose "
                "window has not ended: read it after the window, or call optimizer.zero_grad() before the window, "
                "which sets it to None"
            )

    def change(self, how: str, number: Any) -> None:
        self.multiply_all([self], number if how == "mul" else 1.0 / number)

    def clear(self) -> None:
        self.local, self.cleared = None, True
        self.find_owner().clear(self.number)

    def limit(self, low: Any, high: Any) -> Any:
        self._refuse_local("limits of its elements")
        self.find_owner().clamp(self.number, low, high)
        return self

    @classmethod
    def multiply_all(cls, gradients: Sequence[ShardedGradient], factor: Any) -> None:
        for owner, numbers in _by_owner([x for x in gradients if not x.cleared]).items():
            owner.scale(numbers, factor)
        for gradient in (x for x in gradients if x.local is not None):  # which is autograd's own memory
            gradient.local = gradient.local * factor

    @classmethod
    def unscale_all(cls, gradients: Sequence[ShardedGradient], found_inf: Tensor, factor: Tensor) -> None:
        for gradient in gradients:
            gradient._refuse_local("a GradScaler's look at it")
        for owner, numbers in _by_owner(gradients).items():
            owner.unscale(numbers, found_inf, factor)

    @classmethod
    def on_values(cls, func: Any, args: Any, kwargs: Any) -> Any:
        what = func.overloadpacket
        raise NotImplementedError(
            _REFUSALS.get(what)
            or f"{what} of a gradient that is split over the ranks: norms, clipping, mul_ and zero_ work on it; for "
            "anything else take grad.full(), on every rank"
        )


_NO_DIMENSION = "the norm of a split gradient along a dimension: take grad.full(), on every rank"
_REFUSALS: dict[Any, str] = {
    torch.ops.aten.linalg_vector_norm: _NO_DIMENSION,
    torch.ops.aten.norm: _NO_DIMENSION,
    torch.ops.aten.add_: (
        "a gradient that is split over the ranks cannot be added to a tensor, as p.data.add_(p.grad) does: call "
        "optimizer.step(), or train with allreduce, under which every rank has whole gradients"
    ),
}


def _by_owner(gradients: Sequence[ShardedGradient]) -> dict[ShardedGradients, list[int]]:
    found: dict[ShardedGradients, list[int]] = {}
    for x in gradients:
        found.setdefault(x.find_owner(), []).append(x.number)
    return found


def sum_powers(x: Tensor, order: float) -> Tensor:
    """What adds up over ranks to a norm of this order: a sum of powers, or a maximum. In fp64 on the CPU, where x is
    fp64 too; else in fp32."""
    if not x.numel():
        return torch.zeros((), dtype=_wide_dtype(x), device=x.device)
    x = x.abs() if x.is_complex() else x
    found: Tensor = torch.linalg.vector_norm(x, order, dtype=_wide_dtype(x))
    return found if math.isinf(order) else found**order


def _wide_dtype(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32
