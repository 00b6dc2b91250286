"""The optimizer's side of units: it steps one leaf for each part of a parameter in my shard.

Between steps its groups hold the program's own parameters, so that what frameworks do with them (clipping, looking
for names) is what it is in one process. While it steps they hold the leaves. So it is with its state, which is kept by
leaf: see `program_state`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from unisono.methods.joined_optimizers import members_of
from unisono.methods.offload.optimizers import Rule, make_rule, read_settings
from unisono.methods.strategies.zero.program_state import ProgramState, Scalars, refuse
from unisono.methods.strategies.zero.units import Part, Unit
from unisono.training.checkpoint.slices import Piece, Stored, as_pieces, map_state
from unisono.world import World

if TYPE_CHECKING:
    from unisono.methods.strategies.zero.offloads import Offloads

EVERY_RANK = {  # what errors say of ranks that do not come (see `unisono.launchers.runtime.frames`)
    "gather": "under zero each rank has a part of the optimizer's state, so every rank calls optimizer.state_dict(), "
    "and one of them writes the file; un.save(folder, replica) lets each write its part"
}


class OptimizerShards:
    """An optimizer that steps leaves, with their part of the state, instead of the parameters that it was made with."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer, self._members = optimizer, members_of(optimizer)
        self._units: list[Unit] = []
        self._of: dict[Tensor, list[Parameter]] = {}  # the leaves of every parameter that is split
        self._whole: list[list[Parameter]] | None = None  # what the groups hold otherwise, while they hold leaves
        self._places: dict[Tensor, tuple[Unit, int]] = {}  # the part of a parameter that is here, in `unit.parts`
        self._shown: list[ProgramState] = []  # by member; what it shows between steps
        self._known: dict[Tensor, float] = {}  # the parameters that have state, wherever it is, and their steps
        self._rules: dict[int, Rule] = {}  # by member
        self._offload: Offloads | None = None
        self._agree: Callable[[str], None] = lambda what: None

    def _find_numbers(self) -> dict[Tensor, int]:
        """By parameter, its number in `optimizer.state_dict()`."""
        self.settle()
        return {p: i for i, p in enumerate(p for group in self.optimizer.param_groups for p in group["params"])}

    def find_split_numbers(self, member: int = 0) -> tuple[int, set[int]]:
        """Of one of several optimizers: the number of its first parameter among those of all, and its own numbers of
        the parameters that are split."""
        self.settle()
        before, mine = self._members[:member], self._members[member]
        first = sum(len(group["params"]) for other in before for group in other.param_groups)
        params = [p for group in mine.param_groups for p in group["params"]]
        return first, {number for number, param in enumerate(params) if param in self._of}

    def states(self, unit: Unit) -> Any:
        """The state of the optimizer that steps a unit, by leaf."""
        return self._shown[unit.member].own if self._shown else self._members[unit.member].state

    def split(
        self, units: Sequence[Unit], offload: Offloads | None, agree: Callable[[str], None]
    ) -> dict[int, dict[str, Any]]:
        """Make the leaves of some units, for the optimizer to step.

        agree(what): every rank does what the program does, and no step is under way.
        Returns the state of whole parameters, by their number, for units that are stepped elsewhere.
        """
        self._offload, self._agree = offload, agree
        self._places = {unit.params[part.slot]: (unit, i) for unit in units for i, part in enumerate(unit.parts)}
        self._units, self._of = list(units), {}
        numbers, leaves = self._find_numbers(), self._of
        before = {}
        for unit in units:
            states = self.states(unit)
            for one in unit.held:
                one.leaves = []
                for part in one.parts:
                    if one.steps_here:
                        leaf = Parameter(one.shape(part, one.master[part.at : part.at + part.length]))
                    else:  # only to stand in the optimizer's groups
                        leaf = Parameter(torch.full((), math.nan, dtype=torch.float32).expand(part.length))
                    param = one.params[part.slot]
                    one.leaves.append(leaf)
                    leaves.setdefault(param, []).append(leaf)
                    if one.steps_here:
                        for key, value in states.get(param, {}).items():
                            states[leaf][key] = _cut(value, key, one, part)
            for param in unit.params:
                state = states.pop(param, None)
                leaves.setdefault(param, [])
                if state:
                    self._known[param] = _count_steps(state)
                if state and not unit.steps_here:
                    before[numbers[param]] = dict(state)
        for i, member in enumerate(self._members):
            mine: dict[Tensor, list[Parameter]] = {
                p: leaves[p] for unit in units if unit.member == i for p in unit.params
            }
            self._shown.append(ProgramState(member.state, mine, self._known, self._look, self._reset))
            member.state = self._shown[-1]  # type: ignore[assignment]
        return before

    def settle(self) -> None:
        """Between steps: take over what the program has put in the place of the optimizer's state, which can only be
        nothing."""
        self.end_step()
        for member, shown in zip(self._members, self._shown, strict=False):
            given, member.state = member.state, shown  # type: ignore[assignment]
            shown.check_lent()
            if given is not shown:
                if any(given.values()):
                    raise refuse("optimizer.state = ...")
                shown.clear()

    def begin_step(self) -> None:
        """Let the optimizer's groups hold the leaves, until `end_step`."""
        if self._whole is None:
            self.settle()
            for member, shown in zip(self._members, self._shown, strict=False):
                member.state = shown.own
            groups = self.optimizer.param_groups
            self._whole = [group["params"] for group in groups]
            for group in groups:
                group["params"] = [leaf for p in group["params"] for leaf in self._of.get(p, [p])]

    def end_step(self) -> None:
        """Let the optimizer's groups hold the program's parameters again."""
        for group, params in zip(self.optimizer.param_groups, self._whole or (), strict=False):
            group["params"] = params
        for member, shown in zip(self._members, self._shown, strict=False):
            if member.state is shown.own:
                member.state = shown  # type: ignore[assignment]
        self._whole = None

    def put_back(self) -> None:
        """Let the optimizer step the parameters that it was made with, without state."""
        self.end_step()
        self.drop_state()
        for member, shown in zip(self._members, self._shown, strict=False):
            member.state = shown.own
        self._of, self._shown, self._known = {}, [], {}

    def drop_state(self, *, away: bool = False) -> None:
        """Forget the state of all leaves; `away`: of those alone that are stepped elsewhere."""
        for unit in (unit for unit in self._units if not (away and unit.steps_here)):
            for leaf in (leaf for one in unit.held for leaf in one.leaves):
                self.states(unit).pop(leaf, None)

    # What the program sees of it between steps

    def note_stepped(self, units: Sequence[Unit], find_used: Callable[[Unit], Sequence[bool]]) -> None:
        """These units were stepped, with gradients of the parameters that were used."""
        for unit in units:
            stepped = [p for p, is_used in zip(unit.params, find_used(unit), strict=True) if is_used]
            new = [p for p in stepped if p not in self._known]
            if new and unit.steps_here:
                states = self.states(unit)
                keeps = any(states.get(leaf) for leaf in unit.leaves) or not unit.leaves
                new = [p for p in new if keeps and (p not in self._places or states.get(self._leaf(p)))]
            elif new:
                member = self._members[unit.member]
                rule = self._rules[unit.member] = self._rules.get(unit.member) or make_rule(member)
                kept = [(rule.find_state(read_settings(group)), {*group["params"]}) for group in member.param_groups]
                new = [p for p in new if any(p in params and (x.lines or x.scalars) for x, params in kept)]
            self._known |= dict.fromkeys(new, 0.0)
            self._known |= {p: self._known[p] + 1 for p in stepped if p in self._known}

    def take_loaded(self, member: Optimizer) -> None:
        """`load_state_dict()` has made a state for what is not split."""
        shown = next(x for one, x in zip(self._members, self._shown, strict=True) if one is member)
        if member.state is not shown:
            shown.own, member.state = member.state, shown  # type: ignore[assignment]

    def _leaf(self, param: Tensor) -> Parameter:
        unit, i = self._places[param]
        return unit.leaves[i]

    def _look(self, param: Tensor) -> tuple[Scalars, set[str]] | None:
        """See `ProgramState`. Of a parameter that has no part here the count of steps, where it is counted as here."""
        if param in self._places:
            return self._look_here(*self._places[param])
        mine = next(shown for shown in self._shown if param in shown)
        for other in (p for p in self._places if p in mine):
            scalars, lines = self._look_here(*self._places[other])
            if "step" in scalars and self._known[other] != float(scalars["step"]):
                return None
            step, count = scalars.get("step"), self._known[param]
            if step is not None:
                step = torch.full_like(step, count) if isinstance(step, Tensor) else type(step)(count)
            return {} if step is None else {"step": step}, lines
        return None

    def _look_here(self, unit: Unit, i: int) -> tuple[Scalars, set[str]]:
        if self._offload is not None and not unit.steps_here:
            shard = self._offload.state(unit)
            return dict(shard.scalars(unit.parts[i].at) or {}), {*shard.names()} - {"master"}
        every = self.states(unit).get(unit.leaves[i], {})
        lines = {key for key, value in every.items() if isinstance(value, Tensor) and key != "step"}
        return {key: value for key, value in every.items() if key not in lines}, lines

    def _reset(self, params: Sequence[Tensor], what: str) -> None:
        self._agree(what)
        chosen = {*params}
        for unit in self._units:
            for one in unit.held:
                for part, leaf in zip(one.parts, one.leaves, strict=True):
                    if one.params[part.slot] in chosen:
                        self.states(unit).pop(leaf, None)
        if self._offload is not None:
            self._offload.reset(chosen)
        for param in chosen:
            self._known.pop(param, None)

    # State of whole parameters

    def gather(
        self, world: World, on: torch.device | None = None, *, member: int | None = None
    ) -> dict[Tensor, dict[str, Any]]:
        """The state of whole parameters, on every rank; each calls it. `on`: where that is to be (None: where they
        are); `member`: that of one of several optimizers alone."""
        tag = "optimizer.state_dict()"
        world.barrier(tag=tag)  # names the call, where a rank makes it alone

        def join_shards(unit: Unit, lines: list[Tensor], _: Tensor) -> Tensor:
            return torch.cat(world.all_gather(lines[0], even=unit.owners is None, tag=tag).wait())

        units = [unit for unit in self._units if member in (None, unit.member)]
        return self.join(units, lambda unit: [unit], world, join_shards, on)

    def join(
        self,
        units: Sequence[Unit],
        given: Given,
        world: World,
        join_shards: Callable[[Unit, list[Tensor], Tensor], Tensor],
        on: torch.device | None = None,
    ) -> dict[Tensor, dict[str, Any]]:
        """Put the state of whole parameters together; `join_shards` joins the ranks' shards of a line.

        units: those that were split; on a rank that holds nothing of them, others of the same layout.
        given: what this rank gives of each.
        """
        kinds = self._gather_kinds([one for unit in units for one in given(unit)], world)
        every: dict[Tensor, dict[str, Any]] = {}
        for unit in units:
            states: list[dict[str, Any]] = [{} for _ in unit.params]
            entries = [kinds.get(name, {}) for name in unit.names]
            keys = dict.fromkeys((key, kind[1]) for entry in entries for key, kind in entry.items() if _is_line(kind))
            for key, dtype in keys:
                empty = torch.empty(0, dtype=dtype, device=on or unit.params[0].device)
                full = join_shards(unit, [self._state_line(one, key, empty) for one in given(unit)], empty)
                for slot, view in enumerate(unit.views(full)):
                    if key in entries[slot]:
                        states[slot][key] = view.clone()
            for state, entry in zip(states, entries, strict=True):
                for key, kind in entry.items():
                    if not _is_line(kind):
                        state[key] = map_state(kind[1], Tensor, lambda x: x.clone())
            every.update({p: s for p, s in zip(unit.params, states, strict=True) if s})
        return every

    def _state_line(self, unit: Unit, key: str, like: Tensor) -> Tensor:
        """One state of all parts of a shard, at their places."""
        line = like.new_zeros(unit.shard_length)
        for part, leaf in zip(unit.parts, unit.leaves, strict=True):
            value = self.states(unit).get(leaf, {}).get(key)
            if value is not None and has_element_each(value.shape, key, leaf.shape):  # of others it may be a row
                line[part.at : part.at + part.length].copy_(value.reshape(-1))
        return line

    def _gather_kinds(self, units: Sequence[Unit], world: World) -> Kinds:
        """Ask all ranks what state each parameter has."""
        mine: Kinds = {}
        for unit in units:
            for part, leaf in zip(unit.parts, unit.leaves, strict=True):
                entry = mine.setdefault(unit.names[part.slot], {})
                for key, value in self.states(unit).get(leaf, {}).items():
                    line = isinstance(value, Tensor) and has_element_each(value.shape, key, leaf.shape)
                    entry[key] = ["line", value.dtype] if line else ["value", value]
        merged: Kinds = {}
        for other in world.gather_objects(mine):
            for name, entry in other.items():
                merged.setdefault(name, {}).update(entry)
        return merged

    # Checkpoints

    def pieces(self) -> dict[str, Any]:
        """What `optimizer.state_dict()` would be with whole parameters, as far as this rank has them: a Piece for each
        state that is split."""
        state: dict[int, dict[str, Any]] = {}
        numbers = self._find_numbers()
        for unit, part, leaf in self._leaves(self._units):
            for key, value in self.states(unit).get(leaf, {}).items():
                if isinstance(value, Tensor) and has_element_each(value.shape, key, leaf.shape):
                    value = Piece.of(value.reshape(-1), part.start, shape=unit.shapes[part.slot])
                elif unit.owners is not None:  # nobody else has it
                    value = as_pieces(value)
                state.setdefault(numbers[unit.params[part.slot]], {})[key] = value
        packed = [{**group, "params": [numbers[p] for p in group["params"]]} for group in self.optimizer.param_groups]
        return {"state": dict(sorted(state.items())), "param_groups": packed}

    def load(self, saved: Any, member: int | None = None) -> None:
        """Load my part of a saved state, and that of which I keep a copy; `member`: of one of several optimizers alone,
        with the numbers that its parameters have among those of all."""
        optimizer, numbers = self.optimizer, self._find_numbers()
        every = [one for unit in self._units if member in (None, unit.member) for one in unit.held]
        for param in (p for one in every for p in one.params):
            self._known.pop(param, None)
            if state := saved["state"].get(numbers.get(param, -1)):
                self._known[param] = _count_steps(state)
        for unit, part, leaf in self._leaves(every):
            states = self.states(unit)
            states.pop(leaf, None)
            for key, value in saved["state"].get(numbers.get(unit.params[part.slot], -1), {}).items():
                states[leaf][key] = _read(value, key, unit, part, optimizer)
        groups = optimizer.param_groups if member is None else members_of(optimizer)[member].param_groups
        for group, other in zip(groups, saved["param_groups"], strict=True):
            settings = {key: value for key, value in other.items() if key != "params"}
            group.update(map_state(settings, Stored, lambda x: x.full()))  # a learning rate may be a tensor

    def _leaves(self, units: Sequence[Unit]) -> Iterator[tuple[Unit, Part, Parameter]]:
        for unit in units:
            for part, leaf in zip(unit.parts, unit.leaves, strict=True):
                yield unit, part, leaf


def _count_steps(state: Mapping[str, Any]) -> float:
    """How many steps a parameter has taken, by its whole state; NaN where its optimizer counts otherwise."""
    count = map_state(state.get("step", 0.0), Stored, lambda x: x.full())
    return float(count) if not isinstance(count, Tensor) or count.numel() == 1 else math.nan


Given = Callable[[Unit], list[Unit]]  # what this rank gives of a unit: its shard, another's copy, or nothing
Kinds = dict[str, dict[str, Any]]  # parameter's name -> key -> ["line", dtype] or ["value", value]


def _is_line(kind: Any) -> bool:
    return bool(kind[0] == "line")


def has_element_each(shape: torch.Size, key: str, of: torch.Size) -> bool:
    """Whether a state of this shape has an element for each of the parameter's."""
    return shape == of and key != "step"


def _cut(value: Any, key: str, unit: Unit, part: Part) -> Any:
    if not isinstance(value, Tensor) or not has_element_each(value.shape, key, unit.shapes[part.slot]):
        on = unit.master.device
        return map_state(value, Tensor, lambda x: x.to(on, copy=True) if x.dim() and unit.owners else x.clone())
    dtype = unit.master_dtype if value.is_floating_point() else value.dtype
    mine = value.reshape(-1)[part.start : part.start + part.length].to(unit.master.device, dtype, copy=True)
    return unit.shape(part, mine)


def _read(value: Any, key: str, unit: Unit, part: Part, optimizer: Optimizer) -> Any:
    if isinstance(value, (Stored, Tensor)) and has_element_each(value.shape, key, unit.shapes[part.slot]):
        dtype = unit.master.dtype if value.dtype.is_floating_point else value.dtype  # codes stay what they are
        return unit.shape(part, read_part(value, part, dtype, unit.master.device))
    fused = any(group.get("capturable") or group.get("fused") for group in optimizer.param_groups)

    def read(value: Stored | Tensor) -> Tensor:
        found = value.full() if isinstance(value, Stored) else value
        on_device = fused or (unit.owners is not None and found.dim() > 0)
        return found.clone().to(unit.master.device) if on_device else found.clone()

    return map_state(value, (Stored, Tensor), read)


def read_part(value: Stored | Tensor, part: Part, dtype: torch.dtype, device: torch.device | None = None) -> Tensor:
    """Read the elements of a part from a saved tensor."""
    out = torch.empty(part.length, dtype=dtype, device=device)
    return as_stored(value).read(part.start, part.start + part.length, out=out)


def as_stored(value: Stored | Tensor) -> Stored:
    """View a saved tensor as `Stored`, whether it is in memory or in a file."""
    return value if isinstance(value, Stored) else Stored.of(value)
