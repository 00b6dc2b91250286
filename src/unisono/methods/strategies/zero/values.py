"""Values of units, as the modules find them: on every rank (`WholeValues`), or once for all ranks of a host
(`CommonValues`), at stages 1 and 2. In stage 3 no rank has all of them: see `gather`.

While values are not here, or not up to date, their parameters are of a class made here, which stands between them and
every function of torch: whatever uses one, its values are brought first (`Watched`).
"""

from __future__ import annotations

import copy
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.utils._pytree import tree_leaves

from unisono.methods.strategies._host_memory import HostMemory, Placed, Writes, describe_settings
from unisono.methods.strategies.zero.codes import gather_codes, round_line
from unisono.methods.strategies.zero.hooks import ModelHook
from unisono.methods.strategies.zero.units import UNCALLED, WHOLE, Unit
from unisono.world import World


class Values(ABC):
    """The values of some units, for the modules that compute with them."""

    always_here = True  # they have memory that is never let go

    @abstractmethod
    def renew(self, units: Sequence[Unit]) -> None:
        """My shards of these units have new values: every rank gets them, at once or when a module needs them."""

    def end_step(self, units: Sequence[Unit], world: World) -> None:
        """The optimizer has stepped my shards of these units."""
        self.renew(units)

    def gather_late(self) -> None:
        """Have those values here that were to come later."""
        return

    def begin_step(self, window: int, groups: Sequence[Mapping[str, Any]], *, again: bool) -> None:
        """The optimizer is about to step its `groups`: what the program has written to values since the last step
        counts, or is refused. `again`: a step has broken off, and what it wrote is no write of the program's."""
        if not again:
            self.refuse_written()
            self.take_written()

    def take_written(self) -> None:
        """What the program has written to values since the last step counts: of my shards, from what this rank sees."""
        return

    def refuse_written(self) -> None:
        """Refuse what the program has written since, where it cannot count."""
        return

    def settle(self, what: str) -> None:
        """Before `what`, all ranks have written the same, or nothing."""
        self.refuse_written()

    def begin_writing(self) -> None:
        """The program is about to write all values anew."""
        self.gather_all("model.load_state_dict()")

    def write(self, change: Callable[[], Any], take: Callable[[], None]) -> None:
        """Let the program change parameters by `change()`, on every rank; `take` takes them into the shards."""
        self.begin_writing()
        with torch.no_grad():
            change()
        take()

    def begin_loading(self) -> None:
        """Shards are about to get values from a checkpoint."""
        self.take_written()

    def end_loading(self) -> None:
        """They have them."""
        return

    def take_shards(self, units: Sequence[Unit]) -> None:
        """After `begin_loading`, every rank has written its shards of these units: all get the new values."""
        self.renew(units)

    @abstractmethod
    def gather_all(self, why: str = "") -> None:
        """Have all values here; `why`: what the program has called, for the errors of ranks that disagree."""

    def release_all(self) -> None:
        """What is here is out of date, or not needed."""
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
        needs it, by a hook on every module that has parameters of its own in it, or when anything else uses it.
    """

    def __init__(
        self, model: nn.Module, units: Sequence[Unit], world: World, wait: Callable[[Unit], None] | None
    ) -> None:
        self._units, self._world, self._wait = list(units), world, wait
        self._coded = [unit for unit in units if unit.coded]
        self.always_here = not self._coded
        self._late: set[Unit] = set()  # units whose new values nothing has asked for yet
        self._is_torn = False  # a rank was lost while they were sent: shards are newer
        self._watched = Watched(self._units, weakref.WeakMethod(self.use))
        self._versions: list[int] = []  # of the parameters, where steps are taken elsewhere
        self._seen: dict[Unit, Tensor] = {}  # there, what some values were: `p.data.copy_(x)` changes no version
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
        self.release_all()

    @torch.no_grad()
    def release_all(self) -> None:  # nothing is let go, but the values are those that count
        for unit in self._coded:  # which are exact now, on every rank: what would arrive of them
            unit.full.copy_(round_line(unit.full))
        self._versions = [param._version for unit in self._units for param in unit.params]
        self._seen = {}
        for unit in self._units if self._wait is not None else ():
            if unit not in self._late:
                self._look(unit)

    def _look(self, unit: Unit) -> None:
        """These values are as they should be. On a GPU to compare them would hold the program up."""
        if unit.full.device.type == "cpu" and unit.numel:
            self._seen[unit] = unit.read_some()

    def _find_changed(self, unit: Unit) -> list[int]:
        """The parameters that the program gave other values or another place, past PyTorch's counters."""
        seen, found = self._seen.get(unit), unit.find_moved()
        if seen is not None and not seen.equal(now := unit.read_some()):
            found += (now != seen).any(1).nonzero().flatten().tolist()
        return found

    def take_written(self) -> None:
        for unit in self._units if self._wait is None and not self._is_torn else ():
            unit.bring_back()
            for one in unit.held:
                one.take_written(unit.full)

    def refuse_written(self) -> None:
        if self._wait is None:
            return
        changed = {unit.params[slot] for unit in self._units for slot in self._find_changed(unit)}
        every = ((name, param) for unit in self._units for name, param in zip(unit.names, unit.params, strict=True))
        for (name, param), before in zip(every, self._versions, strict=True):
            if param._version != before or param in changed:
                raise ValueError(
                    f"parameter {name!r} was written to since the last step, and what the optimizer steps is off the "
                    "device, with an update that may have been under way: write in replica.write(function), which "
                    "every rank calls"
                )

    @torch.no_grad()
    def renew(self, units: Sequence[Unit]) -> None:
        if self._wait is not None:
            self._late |= set(units)
            for unit in units:
                if unit.steps_here:
                    unit.update_shard()
                self._watched.hide(unit)
            self.release_all()
            return
        for unit in units:  # all of them before a rank may be lost
            if not unit.coded:
                unit.update_shard()
        for unit in units:
            self._gather(unit)

    def end_step(self, units: Sequence[Unit], world: World) -> None:
        """A rank may be lost meanwhile: the step counts, and others of several optimizers are to end it."""
        world.run_tolerating_loss(lambda: self.renew(units))
        self._is_torn = world.elastic is not None and world.elastic.is_idle

    def end_loading(self) -> None:
        if self._coded:  # what was loaded is exact, and perhaps not all was
            self.renew(self._units)
        else:
            self.release_all()

    def gather_late(self) -> None:
        self._gather_until()

    @torch.no_grad()
    def gather_all(self, why: str = "") -> None:
        """Exact ones; what the program has written counts."""
        self._gather_until()
        if self._coded:
            self.take_written()
        for unit in self._coded:
            self._gather(unit, exact=True)
            if self._wait is not None:
                self._look(unit)

    def use(self, params: list[Parameter], _function: Any, call: Callable[[], Any]) -> Any:
        """Do `call` with the new values of `params`."""
        self._gather_until(max(self._watched.unit_of[param].index for param in params))
        return call()

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
            self._watched.show(unit)
            self._wait(unit)
            if self._world.size > 1:
                self._gather(unit)
            self._look(unit)

    def _gather(self, unit: Unit, *, exact: bool = False) -> None:
        gather_values(unit, unit.master.to(unit.dtype) if unit.coded else unit.shard, self._world, exact=exact)

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()
        for unit in self._units:
            self._watched.show(unit)


def gather_values(unit: Unit, mine: Tensor, world: World, *, exact: bool) -> None:
    """Gather every rank's shard of a unit into its line: as it is, or as bytes if the unit's values travel so."""
    shards = unit.shards(unit.full)
    if unit.coded and not exact:
        gather_codes(mine, shards, world, unit.tag)
    else:
        world.all_gather(mine, even=unit.owners is None, out=shards, tag=unit.tag).wait()


class CommonValues(Values):
    """All ranks, on one host, have one memory for all values: after a step nothing has to be gathered. Nobody writes to
    it before all have called `optimizer.step()`, and nobody reads it before all parts have been stepped.

    What the program writes to parameters by itself only its own rank sees, until it is taken over (see `Writes`).
    """

    def __init__(self, model: nn.Module, units: Sequence[Unit], memory: HostMemory, world: World) -> None:
        self._units, self._memory, self._world = list(units), memory, world
        placed = []
        for unit in units:
            line, unit.full = unit.full, memory.view(unit.full)
            placed.append(Placed(unit.names, unit.params, unit.views(unit.full), unit.full, line))
            for param, view in zip(unit.params, placed[-1].views, strict=True):
                param.data = view
        self._writes = Writes(model, placed, memory, on_taken=self.take_written)

    def begin_step(self, window: int, groups: Sequence[Mapping[str, Any]], *, again: bool) -> None:
        """Wait until every rank is about to step: all have to have written the same."""
        settings = [line for group in groups for line in describe_settings(group)]
        self._world.run_tolerating_loss(
            lambda: self._writes.begin_step(f"optimizer.step() of window {window}", settings)
        )

    def take_written(self) -> None:
        for unit in self._units:
            unit.bring_back()
            unit.take_written(unit.full)

    def settle(self, what: str) -> None:
        self._writes.settle(what)

    @torch.no_grad()
    def renew(self, units: Sequence[Unit]) -> None:
        self._writes.end_step()
        for unit in units:
            unit.update_shard()
        self._world.run_tolerating_loss(lambda: self._memory.meet("the end of a step"))

    def gather_all(self, why: str = "") -> None:
        """No-op: full values are always in shared memory."""

    def begin_writing(self) -> None:
        """Wait until no rank needs the old values."""
        self._memory.meet("load_state_dict")

    def write(self, change: Callable[[], Any], take: Callable[[], None]) -> None:
        """Let one rank change parameters, while the others wait."""
        self._writes.write(change)

    def begin_loading(self) -> None:
        """Wait until nobody reads what is about to be written."""
        self.take_written()
        self._memory.meet("loading a checkpoint")

    def end_loading(self) -> None:
        """Wait until all values are there."""
        self._writes.take_loaded("a checkpoint is loaded")

    def take_shards(self, units: Sequence[Unit]) -> None:
        self.end_loading()

    def close(self) -> None:
        self._memory.close()


def _call_for_each(need: Callable[[Unit], None], units: list[Unit]) -> Any:
    @torch._dynamo.disable  # type: ignore[untyped-decorator]
    def hook(module: nn.Module, args: Any) -> None:
        for unit in units:
            need(unit)

    return ModelHook(hook)


# Parameters that are hidden: what uses one has its values come ------------------------------------------------------

Use = Callable[[list[Parameter], Any, Callable[[], Any]], Any]

_VALUES = {"data", "T", "mT", "H", "mH", "real", "imag", "__cuda_array_interface__"}  # properties that show values
_METHODS = """
    size dim ndimension numel nelement element_size is_floating_point is_complex is_signed is_inference is_same_size
    get_device requires_grad_ retain_grad register_hook register_post_accumulate_grad_hook is_shared __len__
    new_empty new_zeros new_ones new_full new_tensor
"""
_FUNCTIONS = """
    numel is_floating_point is_complex is_same_size get_device empty_like zeros_like ones_like full_like rand_like
    randn_like randint_like result_type
"""


_properties = [x for x in (getattr(Tensor, name) for name in set(dir(Tensor)) - _VALUES) if hasattr(type(x), "__set__")]
_SHAPE_ONLY = frozenset(  # what can be asked of a parameter without its values
    [getattr(Tensor, name) for name in _METHODS.split()]
    + [getattr(torch, name) for name in _FUNCTIONS.split()]
    + [access for x in _properties for access in (x.__get__, x.__set__, x.__delete__)]
)
_LAYOUT = frozenset({Tensor.stride, Tensor.is_contiguous, Tensor.storage_offset})  # a stand-in has one of its own


class Watched:
    """Parameters of some units, whose uses are looked at while they are hidden.

    find_use: gives a function `use(params, function, call)` that does `call`, which calls `function`, while `params`
        have their values and are not hidden; None if nothing watches the parameters any more.
    """

    def __init__(self, units: Sequence[Unit], find_use: Callable[[], Use | None]) -> None:
        self.unit_of = {param: unit for unit in units for param in unit.params}
        self._present = {param: type(param) for param in self.unit_of}
        layouts = {id(p): torch.empty_strided(p.shape, p.stride(), dtype=p.dtype, device="meta") for p in self.unit_of}
        self._absent = {kind: _make_absent_class(kind, find_use, layouts) for kind in set(self._present.values())}

    def hide(self, unit: Unit) -> None:
        """From here on uses of a unit's parameters are looked at."""
        for param in unit.params:
            param.__class__ = self._absent[self._present[param]]

    def show(self, unit: Unit) -> None:
        """Make a unit's parameters ordinary ones again."""
        for param in unit.params:
            param.__class__ = self._present[param]


def _make_absent_class(
    base: type[Parameter], find_use: Callable[[], Use | None], layouts: Mapping[int, Tensor]
) -> type[Parameter]:
    class Absent(base):  # type: ignore[misc, valid-type]
        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            kwargs = kwargs or {}
            if func in _LAYOUT:
                return func(layouts[id(args[0])], *args[1:], **kwargs)
            if func in _SHAPE_ONLY:
                return super().__torch_function__(func, types, args, kwargs)
            use = find_use()
            if use is None:
                raise RuntimeError(
                    f"{name_function(func)} of a parameter whose values zero has split over the ranks, and its replica "
                    "is gone: keep what un.parallel returned, or call restore() and close() of it on every rank before"
                )
            params: list[Any] = [x for x in tree_leaves((args, kwargs)) if type(x) is cls]
            return use(params, func, lambda: func(*args, **kwargs))

        def __deepcopy__(self, memo: Any) -> Any:
            use = find_use()
            if use is None:
                return super().__deepcopy__(memo)
            return use([self], copy.deepcopy, lambda: copy.deepcopy(self, memo))

        def __repr__(self) -> str:
            """Without the values: a look from one rank, in a debugger say, must not wait for the others."""
            return f"Parameter of shape {list(self.shape)}, dtype {self.dtype}, whose values come when it is used"

    Absent.__name__ = Absent.__qualname__ = base.__name__
    return Absent


def name_function(function: Any) -> str:
    """The name of a function of torch, or of a property: `norm`, `data`."""
    name = str(getattr(function, "__name__", function))
    return str(getattr(function.__self__, "__name__", name)) if name in ("__get__", "__set__") else name
