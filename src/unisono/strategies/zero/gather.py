"""Values of units: where they come from before a module runs, and when they are let go.

Stages 1 and 2 keep all of them on every rank (`WholeValues`), or once for all ranks of one host (`CommonValues`). In
stage 3 no rank does (`GatheredValues`):

1. forward: before a module runs, its units are gathered, and the next one's begin to; after it, they are let go;
2. backward: when a gradient reaches the module's output, they are gathered again, in the reverse order; a trainable
   unit is let go when all its gradients are there, a frozen one when the gradient has left the module;
3. the model's own unit stays from the beginning of forward to the end of backward.

What autograd keeps of a parameter is kept as a place in its unit, and gathered when it is needed. (Inside activation
checkpointing it is a view, so memory is the unit's own: emptied and filled, never given to another.) A parameter that
is not there shows NaN in its own shape.
"""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

from unisono.background import Handle, SerialQueue
from unisono.strategies._host_memory import HostMemory
from unisono.strategies._writes import Placed, Writes, describe_settings
from unisono.strategies.zero.hooks import ModelHook
from unisono.strategies.zero.units import UNCALLED, WHOLE, Unit
from unisono.world import PeerLost, World

UNITS_GATHERED = 2  # at most, beside the model's own: the one at work, and the one that comes next
EVERY_RANK = {  # what errors say of ranks that do not come (see `unisono.runtime.frames`)
    "*": "at stage 3 the parameters are split over the ranks, so every rank runs the model as often as the others, "
    "also to evaluate it"
}
_top_hooks = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)  # others' are left alone


class Values(ABC):
    """The values of some units, for the modules that compute with them."""

    always_here = True  # they have memory that is never let go

    @abstractmethod
    def renew(self) -> None:
        """My shards have new values: every rank gets them, at once or when a module needs them."""

    def gather_late(self) -> None:
        """Have those values here that were to come later."""
        return

    def begin_writing(self) -> None:
        """The program is about to write all values anew."""
        self.gather_all()

    @abstractmethod
    def gather_all(self) -> None:
        """Have all values here."""

    def release_all(self) -> None:
        """What is here is out of date, or not needed."""
        return

    def check_used(self, unit: Unit, slot: int) -> None:
        """A gradient has come for a parameter: refuse one whose values were not there."""
        return

    def end_use(self, unit: Unit) -> None:
        """All gradients of a unit have been taken: its values are not needed any more in this pass."""
        return

    @abstractmethod
    def close(self) -> None:
        """Take the hooks off."""


class WholeValues(Values):
    """Every rank keeps all values; after a step the shards of the trainable units are gathered.

    wait: where units are stepped off the device, waits for one. Then a unit is waited for, and gathered, when a module
        needs it: a hook on every module that has parameters of its own in it.
    """

    def __init__(
        self, model: nn.Module, units: Sequence[Unit], world: World, wait: Callable[[Unit], None] | None
    ) -> None:
        self._units, self._world, self._wait = list(units), world, wait
        self._late: set[Unit] = set()  # units whose new values no module has asked for yet
        self._hooks: list[Any] = []
        where = {param: unit for unit in units for param in unit.params}
        for module in model.modules() if wait is not None else ():
            needed = list(module.parameters(recurse=isinstance(module, WHOLE)))
            for child in module.children():
                needed += child.parameters(recurse=False) if isinstance(child, UNCALLED) else ()
            own = dict.fromkeys(where[p] for p in needed if p in where)
            if own:
                self._hooks.append(
                    module.register_forward_pre_hook(_call_for_each(self._need, list(own)), prepend=True)
                )

    @torch.no_grad()
    def renew(self) -> None:
        if self._wait is not None:
            self._late = set(self._units)
            return
        for unit in self._units:
            unit.update_shard()
            self._gather(unit)

    def gather_late(self) -> None:
        self._gather_until()

    def gather_all(self) -> None:
        self._gather_until()

    def _need(self, unit: Unit) -> None:
        """A module needs a unit whose new values may still be on their way."""
        if unit in self._late:
            self._gather_until(unit.index)

    def _gather_until(self, last: int | None = None) -> None:
        """In the order of the units, whichever a rank needs first: gathering them is a matter of all ranks."""
        for unit in sorted(self._late, key=lambda unit: unit.index):
            if last is not None and unit.index > last:
                return
            assert self._wait is not None
            self._late.discard(unit)
            self._wait(unit)
            if self._world.size > 1:
                self._gather(unit)

    def _gather(self, unit: Unit) -> None:
        shards = unit.shards(unit.full)
        self._world.survive(lambda: self._world.all_gather(unit.shard, even=True, out=shards, tag=unit.tag).wait())

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()


class CommonValues(Values):
    """All ranks, on one host, have one memory for all values: after a step nothing has to be gathered. Nobody writes to
    it before all have called `optimizer.step()`, and nobody reads it before all parts have been stepped.

    What the program writes to parameters by itself is followed (see `_writes`).
    """

    def __init__(self, model: nn.Module, units: Sequence[Unit], memory: HostMemory, world: World) -> None:
        self._units, self._memory, self._world = list(units), memory, world
        self._writes = Writes(model, [Placed(u.names, u.params, u.views(u.full), u.full) for u in units], memory)

    def begin_step(self, window: int, groups: Sequence[Mapping[str, Any]]) -> None:
        """The optimizer is about to step its `groups`: wait until that is so on every rank."""
        settings = [line for group in groups for line in describe_settings(group)]
        found = self._writes.describe(settings)
        self._world.survive(
            lambda: self._writes.check(self._memory.meet(f"optimizer.step() of window {window}", found), settings)
        )

    @torch.no_grad()
    def renew(self) -> None:
        for unit in self._units:
            unit.update_shard()
        self._world.survive(lambda: self._memory.meet("the end of a step"))
        self._writes.note()

    def gather_all(self) -> None:
        """They are here."""

    def begin_writing(self) -> None:
        """Wait until nobody needs the old ones."""
        self._memory.meet("load_state_dict")

    def write(self, change: Callable[[], Any]) -> None:
        """Let one rank change parameters, while the others wait."""
        self._memory.meet("replica.write")
        if self._memory.rank == 0:
            with torch.no_grad():
                change()
        self._memory.meet("the end of replica.write")
        self._writes.note()

    def end_loading(self) -> None:
        """Values came from a checkpoint: wait until all are there."""
        self._memory.meet("a checkpoint is loaded")
        self._writes.note()

    def close(self) -> None:
        self._writes.close()
        self._memory.close()


class GatheredValues(Values):
    """Hooks on the modules of some units. `fetch(unit)` gives my shard of it, on the device that computes."""

    always_here = False

    def __init__(
        self, model: nn.Module, units: Sequence[Unit], world: World, fetch: Callable[[Unit], Tensor], *, ahead: bool
    ) -> None:
        self.model, self.units, self._world = model, list(units), world
        self.channel, self._fetch = world.channel(inline=True), fetch
        on_cpu = self.units[0].full.device.type == "cpu"
        self._lane = SerialQueue("unisono gather") if ahead and world.size > 1 and on_cpu else None
        self._coming: dict[Unit, Handle[None]] = {}
        self._there: set[Unit] = set()
        self._uses: dict[nn.Module, int] = {}  # how many calls of a module are under way
        self._order: list[nn.Module] = []  # in which forward needed the modules, first time
        self._pushed: list[bool] = []  # for each call under way, whether `pack` and `unpack` came with it
        self._known = False  # the model has run once: `_order` is complete
        self._task = -1
        self._of: dict[nn.Module, list[Unit]] = {}
        for unit in self.units:
            self._of.setdefault(unit.owner or model, []).append(unit)
        self._of.setdefault(model, [])
        me = weakref.ref(self)
        self._hooks: list[Any] = []
        for module in self._of:
            self._hooks += [
                module.register_forward_pre_hook(_before_hook(me), prepend=True, with_kwargs=True),
                module.register_forward_hook(_after_hook(me), with_kwargs=False, always_call=True),
            ]
        for unit in self.units:
            self.release(unit)

    @torch.no_grad()
    def renew(self) -> None:
        for unit in self.units:
            if unit.trainable:
                unit.update_shard()
        self.release_all()

    def gather_all(self) -> None:
        for unit in self.units:
            self.gather(unit)

    # Values ----------------------------------------------------------------------------------------------

    def gather(self, unit: Unit) -> None:
        """Have the values of a unit here."""
        if unit in self._there:
            return
        self._there.add(unit)
        self._start(unit).wait()
        self._coming.pop(unit, None)
        for param, view in zip(unit.params, unit.views(unit.full), strict=True):
            param.data = view

    @torch.no_grad()
    def _fill(self, unit: Unit) -> None:
        unit.full.untyped_storage().resize_(unit.nbytes)
        mine, shards = self._fetch(unit), unit.shards(unit.full)
        self._world.survive(lambda: self.channel.all_gather(mine, even=True, out=shards, tag=unit.tag).wait())

    def _start(self, unit: Unit) -> Handle[None]:
        """Begin to gather a unit: in the order of the calls, which is the same on every rank."""
        if unit not in self._coming:
            if self._lane is None:
                return Handle.of(self._fill(unit))
            self._coming[unit] = self._lane.submit(lambda: self._fill(unit))
        return self._coming[unit]

    def release(self, unit: Unit) -> None:
        """Empty a unit's memory."""
        if (coming := self._coming.pop(unit, None)) is not None:
            with suppress(PeerLost):  # whoever needs the values gathers them anew, and is told
                coming.wait()
        self._there.discard(unit)
        for param, shape in zip(unit.params, unit.shapes, strict=True):
            nothing = torch.nan if unit.dtype.is_floating_point else 0
            param.data = torch.full((), nothing, dtype=unit.dtype, device=unit.full.device).expand(shape)
        unit.full.untyped_storage().resize_(0)

    def release_all(self) -> None:
        for unit in [*self._there, *self._coming]:
            self.release(unit)

    # Forward ---------------------------------------------------------------------------------------------

    def before(self, module: nn.Module, inputs: Any) -> None:
        """A module is about to run."""
        if module not in self._of:
            raise RuntimeError(
                f"this {type(module).__name__} is a copy of one whose parameters are split over the ranks: copy the "
                "model before un.parallel, or load its state_dict() into another"
            )
        self._pushed.append(False)
        self._uses[module] = self._uses.get(module, 0) + 1
        for unit in self._of[module]:
            self.gather(unit)
        in_backward = torch._C._current_graph_task_id() != -1  # computed again, by activation checkpointing
        if module not in self._order:
            self._order.append(module)
        elif not in_backward:
            self._look_ahead(module, +1)
        if torch.is_grad_enabled() and not in_backward and any(not unit.trainable for unit in self._of[module]):
            given = [x for x in tree_leaves(inputs) if isinstance(x, Tensor) and x.requires_grad and not x.is_leaf]
            if given and module is not self.model:
                me = weakref.ref(self)
                torch.autograd.graph.register_multi_grad_hook(given, _end_hook(me, module), mode="all")
        if torch.is_grad_enabled() and _top_hooks is not None and _top_hooks(True) is None:
            torch._C._autograd._push_saved_tensors_default_hooks(self.pack, self.unpack)
            self._pushed[-1] = True

    def _look_ahead(self, module: nn.Module, direction: int) -> None:
        """Begin to gather what comes next, in the order of forward (+1) or backward (-1)."""
        for distance in range(1, UNITS_GATHERED):
            at = self._order.index(module) + distance * direction
            if 0 <= at < len(self._order):
                for unit in self._of[self._order[at]]:
                    if self._lane is not None and unit not in self._there:
                        self._start(unit)

    def after(self, module: nn.Module, output: Any) -> None:
        """A module has run, or failed."""
        self._uses[module] -= 1
        if module not in self._of:
            return
        if self._pushed.pop():
            torch._C._autograd._pop_saved_tensors_default_hooks()
        every = [x for x in tree_leaves(output) if isinstance(x, Tensor)]
        made = [x for x in every if x.requires_grad and not x.is_leaf]
        if torch._C._current_graph_task_id() != -1:
            return
        if made and torch.is_grad_enabled():
            me = weakref.ref(self)
            for x in made:
                x.register_hook(_gradient_hook(me, module))
        stays = bool(made) and (module is self.model or (self._known and module is self._order[-1]))
        self._known |= module is self.model
        if not stays and not self._uses[module]:
            for unit in self._of[module]:
                if not any(_is_inside(x, unit) for x in every):
                    self.release(unit)

    # What autograd keeps: a view of a unit is kept as its place, and is found again when backward needs it ---------

    def pack(self, x: Tensor) -> Any:
        """Called for each tensor that a module's forward keeps for backward."""
        for unit in self._there:
            if _is_inside(x, unit) and x.dtype == unit.dtype:
                return unit, x.shape, x.stride(), x.storage_offset()
        return x

    def unpack(self, packed: Any) -> Tensor:
        """The tensor again."""
        if isinstance(packed, Tensor):
            return packed
        unit, shape, stride, offset = packed
        self._watch_end()
        self.gather(unit)
        return torch.as_strided(unit.full, shape, stride, offset)

    # Backward --------------------------------------------------------------------------------------------

    def before_backward(self, module: nn.Module) -> None:
        """A gradient has reached what the module gave."""
        self._watch_end()
        for unit in self._of[module]:
            self.gather(unit)
        if module in self._order:
            self._look_ahead(module, -1)

    def _watch_end(self) -> None:
        """At the end of this backward everything is let go."""
        task = torch._C._current_graph_task_id()
        if task not in (-1, self._task):
            self._task = task
            Variable._execution_engine.queue_callback(self._end)

    def after_backward(self, module: nn.Module) -> None:
        """The gradient has left the module: what does not learn is done."""
        if not self._uses[module]:
            for unit in self._of[module]:
                if not unit.trainable:
                    self.release(unit)

    def check_used(self, unit: Unit, slot: int) -> None:
        if unit not in self._there:
            raise RuntimeError(
                f"{unit.names[slot]!r} was used outside the forward of its module, where it is not gathered (it is NaN "
                "there): call the module itself, or use zero(stage=2), or a larger unit_bytes, so that it belongs to a "
                "module around"
            )

    def end_use(self, unit: Unit) -> None:
        if unit.owner is not None and not self._uses.get(unit.owner, 0):
            self.release(unit)

    def _end(self) -> None:
        self._task = -1
        self.release_all()

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()
        if self._lane is not None:
            self._lane.close()
        self.channel.close()


def _is_inside(x: Tensor, unit: Unit) -> bool:
    """Whether a tensor lies in a unit's memory. One that wraps others (a DTensor over a part) keeps what it has: the
    unit's memory is filled again before its module's backward."""
    plain = x.layout == torch.strided and not is_traceable_wrapper_subclass(x)
    storage = x.untyped_storage() if plain else None
    return storage is not None and storage.nbytes() > 0 and storage.data_ptr() == unit.full.untyped_storage().data_ptr()


# Hooks that keep nothing alive, and that torch.compile does not look into --------------------------------------


def _call_for_each(need: Callable[[Unit], None], units: list[Unit]) -> Any:
    @torch._dynamo.disable  # type: ignore[untyped-decorator]
    def hook(module: nn.Module, args: Any) -> None:
        for unit in units:
            need(unit)

    return ModelHook(hook)


def _before_hook(me: weakref.ref[GatheredValues]) -> Any:
    @torch._dynamo.disable  # type: ignore[untyped-decorator]
    def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
        values = me()
        if values is not None:
            values.before(module, (args, kwargs))

    return ModelHook(hook)


def _after_hook(me: weakref.ref[GatheredValues]) -> Any:
    @torch._dynamo.disable  # type: ignore[untyped-decorator]
    def hook(module: nn.Module, args: Any, output: Any) -> None:
        values = me()
        if values is not None:
            values.after(module, output)

    return ModelHook(hook)


def _gradient_hook(me: weakref.ref[GatheredValues], module: nn.Module) -> Any:
    def hook(gradient: Tensor) -> None:
        values = me()
        if values is not None:
            values.before_backward(module)

    return hook


def _end_hook(me: weakref.ref[GatheredValues], module: nn.Module) -> Any:
    def hook(gradients: Any) -> None:
        values = me()
        if values is not None:
            values.after_backward(module)

    return hook
