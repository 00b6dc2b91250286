"""Values of units at stage 3: where they come from before a module runs, and when they are let go.

1. forward: before a module runs, its units are gathered, and the next one's begin to; after it, they are let go;
2. backward: when a gradient reaches the module's output, they are gathered again, in the reverse order; a trainable
   unit is let go when all its gradients are there, a frozen one when the gradient has left the module;
3. the model's own unit stays from the beginning of forward to the end of backward;
4. anywhere else (a part of the module is called alone, its `forward` itself, an average of parameters): whatever uses
   a parameter has its unit gathered first (`values.Watched`). The last few such units stay. What the program has
   written to them goes into the shards when they are let go.

What autograd keeps of a parameter is kept as a place in its unit, and gathered when it is needed. Each gathering has
memory of its own: a view that someone still holds (a graph of second derivatives, say) stays as it is.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.nn import Parameter
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

from unisono.background import Handle, SerialQueue
from unisono.methods.strategies.zero.groups import Groups
from unisono.methods.strategies.zero.hooks import ModelHook
from unisono.methods.strategies.zero.units import Unit
from unisono.methods.strategies.zero.values import Values, Watched, gather_values, name_function
from unisono.world import Mismatch, PeerLost

UNITS_GATHERED = 2  # at most, beside the model's own: the one at work, and the one that comes next
UNITS_IN_USE = 2  # at most, of those that are used outside the forward of their modules
EVERY_RANK = {  # what errors say of ranks that do not come (see `unisono.launchers.runtime.frames`)
    "*": "at stage 3 the parameters are split over the ranks, so every rank runs the model as often as the others, "
    "also to evaluate it, and every rank reads, copies or saves the parameters (state_dict()) if one does"
}
_top_hooks = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)  # others' are left alone


class GatheredValues(Values):
    """Hooks on the modules of some units.

    fetch(unit): gives my shard of it, on the device that computes.
    take_written(unit, before): the program has perhaps written to the whole values of a unit; `before`: what they were,
        for each of `unit.held`, None if that is what its shards are still.
    """

    always_here = False

    def __init__(
        self,
        model: nn.Module,
        units: Sequence[Unit],
        groups: Groups,
        fetch: Callable[[Unit], Tensor],
        take_written: Callable[[Unit, list[Tensor] | None], None],
        *,
        ahead: bool,
    ) -> None:
        self.model, self.units, self._world = model, list(units), groups.world
        self.channel, self._fetch, self._take_written = groups.inside.channel(inline=True), fetch, take_written
        on_cpu = self.units[0].full.device.type == "cpu"
        self._lane = SerialQueue("unisono gather") if ahead and groups.size > 1 and on_cpu else None
        self._coming: dict[Unit, Handle[None]] = {}
        self._there: dict[Unit, list[tuple[int, int]]] = {}  # with its parameters' versions and places as gathered
        self._exact: set[Unit] = set()  # of these, as they are and not as bytes; and what is not coded
        self._in_use: dict[Unit, list[Tensor] | None] = {}  # by `use`, the last one last; see `take_written`
        self._uses: dict[nn.Module, int] = {}  # how many calls of a module are under way
        self._order: list[nn.Module] = []  # in which forward needed the modules, first time
        self._pushed: list[bool] = []  # for each call under way, whether `pack` and `unpack` came with it
        self._known = False  # the model has run once: `_order` is complete
        self._task = -1
        self._of: dict[nn.Module, list[Unit]] = {}
        for unit in self.units:
            self._of.setdefault(unit.owner or model, []).append(unit)
        self._of.setdefault(model, [])
        self._watched = Watched(self.units, weakref.WeakMethod(self.use))
        self._nothing = {unit: [_stand_in(param) for param in unit.params] for unit in self.units}
        self._hooks: list[Any] = []
        # torch.compile does not look into these.
        before, after = (ModelHook(torch._dynamo.disable(_weakly(x))) for x in (self.before, self.after))
        for module in self._of:
            self._hooks += [
                module.register_forward_pre_hook(before, prepend=True, with_kwargs=True),
                module.register_forward_hook(after, with_kwargs=False, always_call=True),
            ]
        for unit in self.units:
            self.release(unit)

    @torch.no_grad()
    def renew(self, units: Sequence[Unit]) -> None:
        for unit in units:
            unit.update_shard()
        self.release_all()

    def gather_all(self, why: str = "") -> None:
        if any(unit not in self._there or unit not in self._exact for unit in self.units):
            self._announce(why)
        for unit in self.units:
            self.gather(unit, exact=True)

    # Values ----------------------------------------------------------------------------------------------

    def gather(self, unit: Unit, *, exact: bool = False) -> None:
        """Have the values of a unit here; `exact`: as they are, where they are computed with as bytes."""
        exact = exact or not unit.coded
        if unit in self._there and (unit in self._exact) == exact:
            return
        if unit in self._there or (exact and unit.coded):
            self.release(unit)
        with _outside_transforms():
            self._start(unit, exact).wait()
            self._coming.pop(unit, None)
            self._watched.show(unit)
            for param, view in zip(unit.params, unit.views(unit.full), strict=True):
                param.data = view
        self._there[unit] = [(param._version, param.data_ptr()) for param in unit.params]
        if exact:
            self._exact.add(unit)
        self._hide(unit)

    def _announce(self, why: str) -> None:
        """A collective that no forward has, in this thread, whose line of the program goes with it: a rank that alone
        saves or reads parameters must not take part in what the others gather for a forward."""
        if not why or self.channel.size == 1:
            return
        for coming in list(self._coming.values()):
            coming.wait()
        self._world.run_tolerating_loss(lambda: self.channel.barrier(tag=why))

    @torch.no_grad()
    def _fill(self, unit: Unit, exact: bool) -> None:
        with torch.inference_mode(False):
            unit.full = torch.empty(unit.numel, dtype=unit.dtype, device=unit.full.device)
        mine = self._fetch(unit)
        self._world.run_tolerating_loss(lambda: gather_values(unit, mine, self.channel, exact=exact))
        if self._world.elastic is not None and self._world.elastic.is_idle:  # broken off: else it passes for a write
            unit.my_shard(unit.full).copy_(unit.seen(mine))
            if unit.spare is not None:
                unit.spare.my_shard(unit.full).copy_(unit.spare.seen(unit.spare.shard))

    def _start(self, unit: Unit, exact: bool = False) -> Handle[None]:
        """Begin to gather a unit: in the order of the calls, which is the same on every rank."""
        if unit not in self._coming:
            if self._lane is None:
                return Handle.of(self._fill(unit, exact))
            self._coming[unit] = self._lane.submit(lambda: self._fill(unit, exact))
        return self._coming[unit]

    def release(self, unit: Unit) -> None:
        """Let go of a unit's memory, once the program's own writes to it are in the shards."""
        if (coming := self._coming.pop(unit, None)) is not None:
            with suppress(PeerLost, Mismatch):  # whoever needs the values gathers them anew, and is told
                coming.wait()
        self._watched.show(unit)
        with _outside_transforms():
            if (marks := self._there.pop(unit, None)) is not None:
                now = [(param._version, param.data_ptr()) for param in unit.params]
                if unit in self._in_use or now != marks:
                    self._keep_writes(unit, now != marks)
            for param, nothing in zip(unit.params, self._nothing[unit], strict=True):
                param.data = nothing
            unit.full = unit.full.new_empty(0)
        self._exact.discard(unit)
        self._watched.hide(unit)

    @torch.no_grad()
    def _keep_writes(self, unit: Unit, is_written: bool) -> None:
        """What the program has written to a unit goes into the shards. `p.data.mul_()` counts in no version: a unit
        that was used outside forward and backward is compared."""
        before = self._in_use.pop(unit, None)
        for name, param, view in zip(unit.names, unit.params, unit.views(unit.full), strict=True):
            if param.shape != view.shape:
                raise ValueError(
                    f"{name!r} was given values of shape {tuple(param.shape)}, expected {tuple(view.shape)}: change a "
                    "model's shapes before un.parallel"
                )
            if param.data_ptr() != view.data_ptr():  # p.data = x
                view.copy_(param)
        if before is None and unit not in self._exact:
            before = [one.seen(one.shard) for one in unit.held]
        if is_written or before is not None:
            self._take_written(unit, before)

    def _release_unused(self, unit: Unit) -> None:
        """Not if its module runs: forward itself may take a derivative, and goes on after it."""
        if not self._uses.get(unit.owner or self.model, 0):
            self.release(unit)

    def release_all(self) -> None:
        for unit in [*self._there, *self._coming]:
            self.release(unit)

    def take_written(self) -> None:
        self.release_all()

    # Uses outside the forward of a module --------------------------------------------------------------------

    def use(self, params: list[Parameter], function: Any, call: Callable[[], Any]) -> Any:
        """Do `call`, which calls `function`, while the values of `params` are here."""
        units = dict.fromkeys(self._watched.unit_of[param] for param in params)
        in_backward = torch._C._current_graph_task_id() != -1
        if in_backward:
            self._watch_end()
        outside = not in_backward and not self._pushed
        for unit in units:
            if unit not in self._there:
                name = next(name for name, x in zip(unit.names, unit.params, strict=True) if x in set(params))
                self._announce(f"{name_function(function)} of {name!r}" if outside else "")
                self.gather(unit, exact=outside)
                self._in_use[unit] = [x.my_shard(unit.full).clone() for x in unit.held] if outside else None
            elif unit in self._in_use:
                self._in_use[unit] = self._in_use.pop(unit)  # the last one
            self._watched.show(unit)
        pushed = self._push()
        try:
            return call()
        finally:
            if pushed:
                torch._C._autograd._pop_saved_tensors_default_hooks()
            for unit in units:
                self._hide(unit)
            for unit in list(self._in_use)[:-UNITS_IN_USE]:
                self._release_unused(unit)

    def _hide(self, unit: Unit) -> None:
        """Outside the forward of its module, each use of a parameter is looked at."""
        if not self._uses.get(unit.owner or self.model, 0):
            self._watched.hide(unit)

    def _push(self) -> bool:
        """Let autograd keep places in units, not views."""
        pushes = torch.is_grad_enabled() and _top_hooks is not None and _top_hooks(True) is None and not _in_transform()
        if pushes:
            torch._C._autograd._push_saved_tensors_default_hooks(self.pack, self.unpack)
        return pushes

    # Forward ---------------------------------------------------------------------------------------------

    def before(self, module: nn.Module, *inputs: Any) -> None:
        """A module is about to run. A shallow copy of one has its hooks as well; its parameters come on use."""
        if module not in self._of:
            return
        self._pushed.append(False)
        self._uses[module] = self._uses.get(module, 0) + 1
        for unit in self._of[module]:
            self.gather(unit)
            self._watched.show(unit)
        in_backward = torch._C._current_graph_task_id() != -1  # computed again, by activation checkpointing
        if module not in self._order:
            self._order.append(module)
        elif not in_backward:
            self._look_ahead(module, +1)
        if torch.is_grad_enabled() and not in_backward and any(not unit.trainable for unit in self._of[module]):
            given = [x for x in tree_leaves(inputs) if isinstance(x, Tensor) and x.requires_grad and not x.is_leaf]
            if given and module is not self.model:
                end = _weakly(self.after_backward, module)
                torch.autograd.graph.register_multi_grad_hook(given, end, mode="all")
        self._pushed[-1] = self._push()

    def _look_ahead(self, module: nn.Module, direction: int) -> None:
        """Begin to gather what comes next, in the order of forward (+1) or backward (-1)."""
        for distance in range(1, UNITS_GATHERED):
            at = self._order.index(module) + distance * direction
            if 0 <= at < len(self._order):
                for unit in self._of[self._order[at]]:
                    if self._lane is not None and unit not in self._there:
                        self._start(unit)

    def after(self, module: nn.Module, _inputs: Any, output: Any) -> None:
        """A module has run, or failed."""
        if module not in self._of:
            return
        self._uses[module] -= 1
        if self._pushed.pop():
            torch._C._autograd._pop_saved_tensors_default_hooks()
        for unit in self._of[module]:
            self._hide(unit)
        made = [x for x in tree_leaves(output) if isinstance(x, Tensor) and x.requires_grad and not x.is_leaf]
        if torch._C._current_graph_task_id() != -1:
            return
        if made and torch.is_grad_enabled():
            for x in made:
                x.register_hook(_weakly(self.before_backward, module))
        stays = bool(made) and (module is self.model or (self._known and module is self._order[-1]))
        self._known |= module is self.model
        if not stays and not self._uses[module]:
            for unit in self._of[module]:
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

    def before_backward(self, module: nn.Module, _gradient: Tensor) -> None:
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

    def after_backward(self, module: nn.Module, _gradients: Any) -> None:
        """The gradient has left the module: what does not learn is done."""
        if not self._uses[module]:
            for unit in self._of[module]:
                if not unit.trainable:
                    self.release(unit)

    def end_use(self, unit: Unit) -> None:
        if unit.owner is not None:
            self._release_unused(unit)

    def _end(self) -> None:
        self._task = -1
        for unit in [*self._there, *self._coming]:
            self._release_unused(unit)

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()
        for unit in self.units:
            self._watched.show(unit)
        if self._lane is not None:
            self._lane.close()
        self.channel.close()


def _stand_in(param: Parameter) -> Tensor:
    """What a parameter shows whose values are not here, to code that gets past Python: NaN, or 0 for whole numbers."""
    nothing = torch.nan if param.is_floating_point() or param.is_complex() else 0
    return torch.full((), nothing, dtype=param.dtype, device=param.device).expand(param.shape)


def _in_transform() -> bool:
    """Whether this is inside torch.func.grad, vmap and the like."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def _outside_transforms() -> AbstractContextManager[Any]:
    """Inside the block, tensors are ordinary ones."""
    if not _in_transform():
        return nullcontext()
    from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

    return temporarily_clear_interpreter_stack()


def _is_inside(x: Tensor, unit: Unit) -> bool:
    """Whether a tensor lies in a unit's memory. One that wraps others (a DTensor over a part) keeps what it has: the
    unit's memory is filled again before its module's backward."""
    plain = x.layout == torch.strided and not is_traceable_wrapper_subclass(x)
    storage = x.untyped_storage() if plain else None
    return storage is not None and storage.nbytes() > 0 and storage.data_ptr() == unit.full.untyped_storage().data_ptr()


def _weakly(method: Callable[..., None], *given: Any) -> Callable[..., None]:
    """A hook that keeps nothing alive: calls a method with what is given here, then what the hook gets."""
    found = weakref.WeakMethod(method)

    def hook(*got: Any) -> None:
        call = found()
        if call is not None:
            call(*given, *got)

    return hook
