"""`p.grad` of parameters whose gradients lie in memory of the host: it reads as the mean over all ranks.

Every rank's gradient lies in a line of its own, and the mean is taken where it is needed: by the optimizer's step, of
the part that a rank steps, or by a program that reads `p.grad`. What a program does to `p.grad` (clipping, scaling) it
does on every rank alike; each rank keeps that for itself, so that it counts once.
"""

from __future__ import annotations

import copy
import math
import sys
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from unisono.methods.exchange.overlap import UNSHARED
from unisono.methods.strategies._lazy_gradient import LazyGradient
from unisono.methods.strategies.shared.lines import Line
from unisono.world.transports.arithmetic import combine

Change = tuple[str, Any]  # "mul" or "div", and by what


class Mean(NamedTuple):
    """How the mean of a gradient is found, with what the program did to it."""

    own: Tensor | None  # this rank's own copy, in the order of memory, with all changes done
    is_taken: bool  # it lies in the line of the host's first rank
    is_cleared: bool
    changes: tuple[Change, ...]

    @property
    def lies_ready(self) -> bool:
        """Whether it can be read as it is in the line of the host's first rank."""
        return self.own is None and self.is_taken and not self.is_cleared and not self.changes

    @property
    def is_untouched(self) -> bool:
        """Whether it is still to be taken, and nothing was done to it."""
        return self.own is None and not self.is_taken and not self.is_cleared and not self.changes

    def take(self, out: Tensor, ranks: Sequence[Tensor]) -> None:
        """Write it into `out`, with all changes done; `ranks`: the same elements of every rank's line."""
        if self.is_cleared:
            out.zero_()
            return
        if self.is_taken:
            out.copy_(ranks[0])
        else:
            combine(ranks, "mean", out)
        do_changes(out, self.changes)


class Place:
    """The gradient of one parameter: where the ranks' gradients lie, and what the program did to their mean.

    has_mean: the mean lies in the line of the host's first rank, for all of it to read.
    changes: what it is to be multiplied or divided by, in order. own: this rank's own copy of the mean, where the
    program changed it otherwise; then `changes` have been done to it.
    """

    def __init__(self, line: Line, slot: int, rank: int, note: Callable[[], None]) -> None:
        self.line, self.slot, self._note = line, slot, note
        self.name, self.param = line.names[slot], line.params[slot]
        self.mine = line.gradient_views[rank][slot]
        self._lines = [views[slot] for views in line.gradient_views]
        self.shown = MeanGradient(self.param, self)
        self.is_zero = True  # my line holds zeros here
        self.open_window()

    def open_window(self) -> None:
        """Begin with a gradient that nobody has."""
        self.fired = self.used = self.has_mean = self.is_over = False
        self.begin()

    def begin(self) -> None:
        """Nothing has been done to the mean."""
        self.cleared = False  # by zero_()
        self.local: Tensor | None = None  # what backward passes have added since, on this rank alone
        self.own: Tensor | None = None
        self.changes: list[Change] = []

    # Filling ------------------------------------------------------------------------------------------------------

    def fill(self) -> bool:
        """Bring the gradient of this rank into its line; False where there is none."""
        grad, mine = self.param.grad, self.mine
        if grad is None:
            if not self.is_zero:
                mine.zero_()
                self.is_zero = True
            return False
        self.is_zero = False
        if grad is self.shown:
            self._fill_again()
        elif grad.dtype != mine.dtype:
            raise TypeError(
                f"{self.name!r} is {grad.dtype} now, and was {mine.dtype} when its memory was shared: convert the "
                "model before un.parallel, or call close() on the replica, convert it and call un.parallel again"
            )
        elif grad.data_ptr() != mine.data_ptr() or grad.stride() != mine.stride():
            if grad.is_sparse:
                raise TypeError(
                    f"the gradient of {self.name!r} is sparse, but its module does not say so: use "
                    "nn.Embedding(sparse=True) or nn.EmbeddingBag(sparse=True), or dense gradients"
                )
            mine.copy_(grad.detach())
        self.param.grad = mine
        return True

    def _fill_again(self) -> None:
        """The gradient of the window before was not taken away, and passes may have added to it."""
        local = self.local
        if self.cleared:
            self.mine.zero_()
        else:
            assert self.own is not None  # kept before the others wrote anew
            self.mine.copy_(self.own)
        if local is not None:
            self.mine.add_(local)
        self.begin()

    @property
    def is_kept(self) -> bool:
        """Whether the mean of the window before is still to count in the next."""
        return self.param.grad is self.shown and not self.cleared

    def keep(self) -> None:
        """Take the mean of the window before, before the ranks write anew."""
        local, self.local = self.local, None
        self.is_over = False
        self._read(to_change=True)
        self.local = local

    def part_with_kept(self, *, is_readable: bool) -> None:
        """Where the program took the gradient off the parameter and still holds it, that object stays the mean of the
        window before: on memory of its own, if the ranks have not begun to write anew; else reading it is refused."""
        if self.param.grad is self.shown or sys.getrefcount(self.shown) <= UNSHARED:
            return
        former = copy.copy(self)
        if is_readable:
            former._read(to_change=True)
        former.is_over, former.shown = not is_readable, self.shown
        self.shown.owner = lambda: former  # which lives as long as the gradient
        self.shown = MeanGradient(self.param, self)

    def take_over(self) -> None:
        """Where the program gave the parameter another gradient (`p.grad = x`), that one counts."""
        grad = self.param.grad
        if grad is not None and grad is not self.shown:
            self.begin()
            self.used = True
            self.own = _empty_like(self.mine).copy_(grad.detach())
            self.param.grad = self.shown

    # Reading ------------------------------------------------------------------------------------------------------

    def read(self, *, to_change: bool) -> Tensor:
        """The gradient as the program sees it; `to_change`: memory of this rank's own."""
        self._check()
        return self._read(to_change=to_change)

    def read_unchanged(self) -> tuple[Tensor, list[Change]]:
        """The gradient to read alone, and what it is still to be multiplied or divided by."""
        self._check()
        if self.own is None and self.has_mean and self.local is None and not self.cleared:
            return self._lines[0], self.changes
        return self._read(to_change=False), []

    def _check(self) -> None:
        self._note()
        if self.is_over:
            raise RuntimeError(
                f"the gradient of {self.name!r} has been stepped with, and the other workers may be writing the next: "
                "read and log gradients before optimizer.step(), or clear them (optimizer.zero_grad())"
            )

    def _read(self, *, to_change: bool) -> Tensor:
        as_it_is = self.local is None and not (self.changes or self.cleared)
        if self.own is None and self.has_mean and as_it_is and not to_change:
            return self._lines[0]
        if self.own is None:
            self.own = _empty_like(self.mine)
            self.describe().take(self.own, self._lines)
            self.changes = []
        if self.local is not None:
            self.own.add_(self.local)
            self.local = None
        return self.own

    def describe(self) -> Mean:
        """What a step is made with, as it is now: the program may clear it before others have ended theirs."""
        own = None if self.own is None else self.own.as_strided((self.own.numel(),), (1,))
        return Mean(own, self.has_mean, self.cleared, tuple(self.changes))

    # Changing -----------------------------------------------------------------------------------------------------

    def change(self, how: str, factor: Any) -> None:
        """Multiply or divide."""
        self._note()
        if isinstance(factor, Tensor):
            factor = factor.detach().clone()
        if self.own is not None:
            do_changes(self.own, [(how, factor)])
        elif not self.cleared:
            self.changes.append((how, factor))
        if self.local is not None:  # autograd's own memory
            self.local = self.local * factor if how == "mul" else self.local / factor

    def clear(self) -> None:
        """Forget it."""
        self.begin()
        self.cleared = True


def do_changes(x: Tensor, changes: Sequence[Change]) -> None:
    """Multiply and divide in place, one after the other, as the program did."""
    for how, factor in changes:
        if how == "mul":
            x.mul_(factor)
        else:
            x.div_(factor)


def _empty_like(view: Tensor) -> Tensor:
    """Memory in the same order, so that a place in a line is the same place here."""
    line = torch.empty(view.numel(), dtype=view.dtype)
    return line.as_strided(view.shape, view.stride())


class MeanGradient(LazyGradient):
    """`p.grad`: reads as the mean over all ranks, and may be changed in place, on every rank alike.

    Norms, `mul_`, `div_`, `zero_` and a GradScaler's unscaling need no memory; anything else that changes it makes a
    copy of this rank's own.
    """

    @staticmethod
    def __new__(cls, param: Parameter, place: Place) -> MeanGradient:
        made: MeanGradient = torch.Tensor._make_wrapper_subclass(
            cls, param.shape, strides=place.mine.stride(), dtype=param.dtype, device=param.device
        )
        return made

    def __init__(self, param: Parameter, place: Place) -> None:
        self.owner = weakref.ref(place)

    def _read(self, *, to_change: bool) -> Tensor:
        place: Place = self.find_owner()
        return place.read(to_change=to_change)

    def __repr__(self) -> str:  # type: ignore[override]
        return f"MeanGradient({self._read(to_change=False)!r})"

    # What torch asks of the memory itself

    def numpy(self, *, force: bool = False) -> Any:
        return self._read(to_change=True).numpy(force=force)

    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        return self._read(to_change=False).__array__(*args, **kwargs)

    def tolist(self) -> Any:
        return self._read(to_change=False).tolist()

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        memo[id(self)] = made = self.clone()
        return made

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.clone().__reduce_ex__(protocol)

    # What needs no memory

    def add_pass(self, other: Tensor, alpha: float) -> Any:
        """Kept apart, since the others may not read or write yet."""
        if torch._C._current_graph_task_id() == -1 or alpha != 1:
            return NotImplemented
        place = self.find_owner()
        place.local = other.detach() if place.local is None else place.local + other
        return self

    def find_norm(self, order: float, dtype: torch.dtype | None) -> Tensor:
        raw, changes = self.find_owner().read_unchanged()
        found: Tensor = torch.linalg.vector_norm(raw, order, dtype=dtype)
        do_changes(found, [(how, abs(factor)) for how, factor in changes])
        return found

    def change(self, how: str, number: Any) -> None:
        self.find_owner().change(how, number)

    def clear(self) -> None:
        self.find_owner().clear()

    @classmethod
    def unscale_all(cls, gradients: Sequence[MeanGradient], found_inf: Tensor, factor: Tensor) -> None:
        for gradient in gradients:
            raw, _ = gradient.find_owner().read_unchanged()
            if raw.numel() and not math.isfinite(torch.linalg.vector_norm(raw, math.inf).item()):
                found_inf.fill_(1.0)
            gradient.change("mul", factor)

    @classmethod
    def on_values(cls, func: Any, args: Any, kwargs: Any) -> Any:
        """On the gradient as a plain tensor. What shares memory with it may be written to later."""
        schema = func._schema
        makes_view = any(r.alias_info is not None and not r.alias_info.is_write for r in schema.returns)
        written: list[tuple[Tensor, Tensor]] = []  # my copies, and what stands for them

        def unwrap(x: Any, to_change: bool) -> Any:
            if isinstance(x, MeanGradient):
                plain = x._read(to_change=to_change)
                written.append((plain, x))
                return plain
            if isinstance(x, (list, tuple)):
                return type(x)(unwrap(one, to_change) for one in x)
            return x

        writes = {a.name: a.alias_info is not None and a.alias_info.is_write for a in schema.arguments}
        names = [a.name for a in schema.arguments]
        plain_args = [unwrap(x, writes[name] or makes_view) for name, x in zip(names, args, strict=False)]
        plain_kwargs = {name: unwrap(x, writes.get(name, False) or makes_view) for name, x in kwargs.items()}
        with torch._C._AutoDispatchBelowAutograd():
            result = func(*plain_args, **plain_kwargs)
        return next((shown for plain, shown in written if plain is result), result)
