"""What lies in the host's memory: parameters of one dtype in one line, the ranks' gradients beside it, the optimizer's
state; and who steps what (`Line.pieces`).

`optimizer.state[p]` holds views of lines that all ranks map, in the parameters' shapes, whole for every program that
looks at it, and values of its own for what is kept once a parameter (the count of steps). Each rank writes the part
that it steps. What programs write to these views by themselves is followed as what they write to parameters (`Writes`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from unisono.methods.buckets import FlatLayout, alignment
from unisono.methods.joined_optimizers import members_of
from unisono.methods.offload.kinds import find_kind
from unisono.methods.offload.optimizers import (
    GroupStep,
    OwnRule,
    Rule,
    Scalars,
    make_rule,
    read_settings,
)
from unisono.methods.strategies._crossing import Piece
from unisono.methods.strategies._host_memory import HostMemory, Placed, cut


class Line:
    """Some parameters of one dtype.

    values: those of all of them, for all ranks of the host. seen: this rank's view of them, in which its program writes
    alone; `views` are the same in the parameters' shapes and strides.
    gradients: a line for each rank of the host; `gradient_views` as above, by rank.
    """

    def __init__(self, named: Sequence[tuple[str, Parameter]], memory: HostMemory) -> None:
        self.names = [name for name, _ in named]
        self.params = [param for _, param in named]
        self.dtype = self.params[0].dtype
        self._layout = FlatLayout(self.params)
        self.numel = self._layout.numel
        self.values = memory.line(self.numel, self.dtype)
        self.seen = memory.view(self.values)
        self.views = self._layout.views(self.seen)
        self.gradients = memory.lines(self.numel, self.dtype)
        self.gradient_views = [self._layout.views(line) for line in self.gradients]

    def view(self, line: Tensor) -> list[Tensor]:
        """Views of a line of this layout, in the parameters' shapes and strides."""
        return self._layout.views(line)

    def bounds(self, slot: int) -> tuple[int, int]:
        """Where a parameter begins and ends in the line."""
        start = self._layout.starts[slot]
        return start, start + self._layout.lengths[slot]

    def pieces(self, rank: int, parts: int, slots: Container[int] | None = None) -> list[Piece]:
        """What is the part of `rank`, of so many: an equal share of the elements of some parameters (None: of those
        that are trainable)."""
        chosen = [s for s, p in enumerate(self.params) if (p.requires_grad if slots is None else s in slots)]
        # The chosen parameters one behind the other, without those that nobody steps.
        together = FlatLayout([self.params[s] for s in chosen], self.dtype, contiguous=True)
        low, high = cut(together.numel, rank, parts, step=alignment(self.dtype)) if rank < parts else (0, 0)
        moved = [self._layout.starts[s] - at for s, at in zip(chosen, together.starts, strict=True)]
        found = together.overlaps(low, high)
        return [Piece(chosen[k], first + moved[k], last + moved[k]) for k, first, last in found]


def cut_tiles(pieces: Sequence[Piece], tile: int) -> list[Piece]:
    """Cut pieces into tiles of at most `tile` elements."""
    return [Piece(slot, at, min(stop, at + tile)) for slot, start, stop in pieces for at in range(start, stop, tile)]


def group_lines(named: Sequence[tuple[str, Parameter]], memory: HostMemory) -> list[Line]:
    """Lay parameters out in lines of the host's memory: one line for each dtype."""
    kinds: dict[torch.dtype, list[tuple[str, Parameter]]] = {}
    for name, param in named:
        kinds.setdefault(param.dtype, []).append((name, param))
    return [Line(some, memory) for some in kinds.values()]


# The optimizer's state -----------------------------------------------------------------------------------------------


def check_optimizer(optimizer: Optimizer) -> None:
    """Refuse an optimizer that cannot be shared out; one that torch does not bring is tried on small matrices."""
    for member in members_of(optimizer):
        for group in member.param_groups:
            if find_kind(member, group) == "elements":
                choose_rule(member, group).find_state(read_settings(group))


def choose_rule(optimizer: Optimizer, group: Mapping[str, Any], *, is_real: bool = True) -> Rule:
    """torch's fused kernel where it has one and the program does not ask for another form; else the optimizer's own
    step."""
    rule = make_rule(optimizer)
    if rule.has_kernel and (group.get("fused") is False or group.get("foreach") or not is_real):
        return OwnRule(optimizer)
    return rule


@dataclass(eq=False)
class StepCount:
    """What the optimizer keeps once for a parameter, such as its count of steps; parameters that have always been
    stepped together share one. None: they have not been stepped."""

    scalars: Scalars | None = None


@dataclass(eq=False)
class ParameterState:
    """A parameter of the optimizer, and its state as the last step left it: the optimizer's own dict, and the lines in
    that dict. None: it has not been stepped."""

    param: Parameter
    line: Line
    slot: int
    count: StepCount
    state: dict[str, Any] | None = None
    lines: dict[str, Tensor] = field(default_factory=dict)

    def is_as_left(self, state: dict[str, Any]) -> bool:
        """Whether the optimizer still has the state that the last step left."""
        return state is self.state and all(state.get(key) is view for key, view in self.lines.items())


class HostState:
    """The lines of state in the host's memory, and which parameters have been stepped equally often."""

    def __init__(
        self, optimizer: Optimizer, lines: Sequence[Line], memory: HostMemory, owned: Container[Parameter]
    ) -> None:
        """`owned`: parameters that are stepped whole, by others than this."""
        self.optimizer, self._memory = optimizer, memory
        self._state: dict[tuple[Line, str], tuple[Tensor, list[Tensor]]] = {}  # of the host, and what is seen of it
        self._placed: list[Placed] = []  # since they were asked for
        self._fresh = StepCount()
        places = [(p, line, slot) for line in lines for slot, p in enumerate(line.params) if p not in owned]
        self._known = {  # by the parameter's id: a tensor's hash is slow
            id(p): ParameterState(p, line, slot, self._fresh) for p, line, slot in places
        }
        self._order: list[list[int]] = []  # the parameters of each group, as they were found
        self._groups: list[list[ParameterState]] = []
        self._rules: dict[tuple[Optimizer, bool, bool], Rule] = {}
        self.allocate()

    def groups(self) -> list[tuple[Optimizer, dict[str, Any], list[ParameterState]]]:
        """The groups of the optimizer, or of several, and what of their parameters lies in the host's memory."""
        every = [(member, group) for member in members_of(self.optimizer) for group in member.param_groups]
        order = [[id(p) for p in group["params"]] for _, group in every]
        if order != self._order:
            self._order = order
            self._groups = [[self._known[i] for i in ids if i in self._known] for ids in order]
        return [(member, group, some) for (member, group), some in zip(every, self._groups, strict=True)]

    def rule(self, optimizer: Optimizer, group: Mapping[str, Any], line: Line) -> Rule:
        """The rule by which the parameters of an optimizer's group in a line are stepped."""
        own = group.get("fused") is False or bool(group.get("foreach"))
        key = (optimizer, own, line.dtype.is_floating_point)
        if key not in self._rules:
            self._rules[key] = choose_rule(optimizer, group, is_real=line.dtype.is_floating_point)
        return self._rules[key]

    def allocate(self) -> None:
        """Have memory for all that the optimizer keeps, with its settings as they are; every rank of a host asks alike.
        What it holds already moves there, from the host's first rank."""
        for member, group, some in self.groups():
            for line in dict.fromkeys(one.line for one in some):
                for key in self.rule(member, group, line).find_state(read_settings(group)).lines:
                    if (line, key) not in self._state:
                        memory = self._memory.line(line.numel, line.dtype)
                        seen = self._memory.view(memory)
                        views = self._state[line, key] = memory, line.view(seen)
                        names = [f"{name} ({key} in optimizer.state)" for name in line.names]
                        self._placed.append(Placed(names, views[1], views[1], seen, memory))
        if self._memory.rank == 0:
            self.adopt(first=True)
        self._memory.meet("the optimizer's state")
        self.adopt(write=False)

    def take_placed(self) -> list[Placed]:
        """The lines that other ranks see, too, and that are new since this was last called."""
        placed, self._placed = self._placed, []
        return [one for one in placed if not one.is_own]

    # Steps --------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def adopt(self, *, write: bool = True, first: bool = False) -> None:
        """Take what the program has put into the optimizer since (`load_state_dict`, a state that was cleared), as if
        it had written that in place; `first`: this rank has it for all."""
        counts: dict[Any, StepCount] = {}
        for member, group, some in self.groups():
            for one in some:
                state = member.state.get(one.param)
                if not state:
                    self._forget(one)
                elif not one.is_as_left(state):
                    self._adopt(one, state, self.rule(member, group, one.line), group, counts, write, first)

    def _forget(self, one: ParameterState) -> None:
        one.state, one.lines, one.count = None, {}, self._fresh

    def _adopt(
        self,
        one: ParameterState,
        state: dict[str, Any],
        rule: Rule,
        group: dict[str, Any],
        counts: dict[Any, StepCount],
        write: bool,
        first: bool,
    ) -> None:
        settings = read_settings(group)
        keys = rule.find_state(settings).lines
        if any(state.get(key) is None for key in keys):  # as that of SGD without momentum, when it gets some
            self._forget(one)
            return
        lines = self._views(one, keys)
        for key, view in lines.items():
            if (write or first) and state[key] is not view:
                (one.line.view(self._state[one.line, key][0])[one.slot] if first else view).copy_(state[key])
            state[key] = view
        rest = {k: v for k, v in state.items() if k not in lines and v is not None}
        scalars = rule.read_scalars({k: v.clone() if isinstance(v, Tensor) else v for k, v in rest.items()})
        same = (id(group), *((k, str(_describe(v))) for k, v in sorted(scalars.items())))
        one.state, one.lines, one.count = state, lines, counts.setdefault(same, StepCount(scalars))

    def _views(self, one: ParameterState, keys: Iterable[str]) -> dict[str, Tensor]:
        return {key: self._state[one.line, key][1][one.slot] for key in keys}

    def tiles(self, line: Line, keys: Iterable[str], start: int, stop: int) -> list[Tensor]:
        """The state of elements [start, stop) of a line of parameters: a tensor for each key."""
        return [self._state[line, key][0][start:stop] for key in keys]

    def count_lines(self) -> int:
        """The most lines of state that a parameter may have."""
        return max(Counter(line for line, _ in self._state).values(), default=0)

    def has_room(self, line: Line, keys: Iterable[str]) -> bool:
        """Whether all these lines of state have memory."""
        return all((line, key) in self._state for key in keys)

    def advance(self, some: Sequence[ParameterState], step: GroupStep) -> None:
        """Parameters have taken a step: show its state in the optimizer."""
        count, scalars = StepCount(step.after), step.after
        for one in some:
            state = one.state
            if state is None or one.lines.keys() != step.lines.keys():
                state = one.state = self.optimizer.state[one.param]
                one.lines = self._views(one, step.lines)
                state.update(one.lines)
            one.count = count
            for key, value in scalars.items():
                there = state.get(key)
                if isinstance(value, Tensor) and isinstance(there, Tensor) and there.shape == value.shape:
                    there.copy_(value)
                else:
                    state[key] = value.clone() if isinstance(value, Tensor) else value

    # The end ------------------------------------------------------------------------------------------------------

    def leave(self) -> None:
        """Copy the optimizer's state out of the host's memory: every rank has its own from now on."""
        for one in self._known.values():
            state = self.optimizer.state.get(one.param, {})
            for key, view in one.lines.items():
                if state.get(key) is view:
                    state[key] = view.clone(memory_format=torch.preserve_format)
            self._forget(one)


def _describe(value: Any) -> Any:
    return value.tolist() if isinstance(value, Tensor) else value
