"""The optimizer's state in memory of the host: one for all its ranks, whole for every program that looks at it.

`optimizer.state[p]` holds views of lines that all ranks map, in the parameters' shapes, and values of its own for what
is kept once a parameter (the count of steps). Each rank writes the part that it steps.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from unisono.offload.optimizers import OwnRule, Rule, Scalars, make_rule, read_settings
from unisono.strategies._host_memory import HostMemory
from unisono.strategies.shared.lines import Line

__all__ = ["Age", "HostState", "check_optimizer", "choose_rule"]

_WHOLE = {
    "LBFGS": "it looks at all parameters at once",
    "Adafactor": "it factors whole matrices",
    "Muon": "it orthogonalises whole matrices",
    "SparseAdam": "it needs sparse gradients",
}


def check_optimizer(optimizer: Optimizer) -> None:
    """Refuse an optimizer that needs whole parameters; one that torch does not bring is tried on a small matrix."""
    name = type(optimizer).__name__
    for base in type(optimizer).__mro__:
        if base.__name__ in _WHOLE and base.__module__.startswith("torch."):
            raise ValueError(
                f"shared lets every worker step a part of each parameter, and {name} cannot step a part of one: "
                f"{_WHOLE[base.__name__]}. Use an optimizer that steps every element by itself (SGD, AdamW, ...), or "
                "the allreduce strategy"
            )
    for group in optimizer.param_groups:
        choose_rule(optimizer, group).find_state(read_settings(group))


def choose_rule(optimizer: Optimizer, group: Mapping[str, Any], *, is_real: bool = True) -> Rule:
    """torch's fused kernel where it has one and the program does not ask for another form; else the optimizer's own
    step."""
    rule = make_rule(optimizer)
    if rule.has_kernel and (group.get("fused") is False or group.get("foreach") or not is_real):
        return OwnRule(optimizer)
    return rule


@dataclass(eq=False)
class Age:
    """What parameters with the same history of steps have in common: the values kept once a parameter. None: they have
    not been stepped."""

    scalars: Scalars | None = None


@dataclass(eq=False)
class _Known:
    """A parameter's state as it was left: the dict of the optimizer, and the lines in it."""

    state: dict[str, Any]
    lines: dict[str, Tensor]
    age: Age

    def is_in(self, state: dict[str, Any]) -> bool:
        """Whether that is still the optimizer's."""
        return state is self.state and all(state.get(key) is view for key, view in self.lines.items())


class HostState:
    """Lines of state, and which parameters share an age."""

    def __init__(self, optimizer: Optimizer, lines: Sequence[Line], memory: HostMemory) -> None:
        self.optimizer, self._memory = optimizer, memory
        self._lines = list(lines)
        self._slots = {p: (line, slot) for line in lines for slot, p in enumerate(line.params)}
        self._state: dict[tuple[Line, str], tuple[Tensor, list[Tensor]]] = {}
        self._known: dict[Parameter, _Known] = {}
        self._fresh = Age()
        self._rules: dict[tuple[bool, bool], Rule] = {}
        self.allocate()

    def rule(self, group: Mapping[str, Any], line: Line) -> Rule:
        """By which parameters of a group are stepped."""
        own = group.get("fused") is False or bool(group.get("foreach"))
        key = (own, line.dtype.is_floating_point)
        if key not in self._rules:
            self._rules[key] = choose_rule(self.optimizer, group, is_real=line.dtype.is_floating_point)
        return self._rules[key]

    def allocate(self) -> None:
        """Have memory for all that the optimizer keeps, with its settings as they are; every rank of a host asks alike.
        What it holds already moves there, from the host's first rank."""
        for group in self.optimizer.param_groups:
            found = dict.fromkeys(self._slots[p][0] for p in group["params"] if p in self._slots)
            for line in found:
                for key in self.rule(group, line).find_state(read_settings(group)).lines:
                    if (line, key) not in self._state:
                        memory = self._memory.line(line.numel, line.dtype)
                        self._state[line, key] = memory, line.view(memory)
        if self._memory.rank == 0:
            self.adopt(write=True)
        self._memory.meet("the optimizer's state")
        self.adopt(write=False)

    # Ages ---------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def adopt(self, *, write: bool = True) -> None:
        """Take what the program has put into the optimizer since (`load_state_dict`, a state that was cleared)."""
        ages: dict[Any, Age] = {}
        for group in self.optimizer.param_groups:
            for param in group["params"]:
                if param in self._slots:
                    self._adopt(param, group, ages, write)

    def _adopt(self, param: Parameter, group: dict[str, Any], ages: dict[Any, Age], write: bool) -> None:
        state, known = self.optimizer.state.get(param), self._known.get(param)
        if not state:
            self._known.pop(param, None)
            return
        if known is not None and known.is_in(state):
            return
        line, slot = self._slots[param]
        rule, settings = self.rule(group, line), read_settings(group)
        keys = rule.find_state(settings).lines
        if any(state.get(key) is None for key in keys):  # as that of SGD without momentum, when it gets some
            self._known.pop(param, None)
            return
        lines = {key: self._state[line, key][1][slot] for key in keys}
        for key, view in lines.items():
            if write and state[key] is not view:
                view.copy_(state[key])
            state[key] = view
        scalars = rule.read_scalars({k: v for k, v in state.items() if k not in lines and v is not None})
        age = ages.setdefault((id(group), *((k, str(_describe(v))) for k, v in sorted(scalars.items()))), Age(scalars))
        self._known[param] = _Known(state, lines, age)

    def age(self, param: Parameter) -> Age:
        """That of a parameter."""
        known = self._known.get(param)
        return self._fresh if known is None else known.age

    def tiles(self, line: Line, keys: Iterable[str], start: int, stop: int) -> list[Tensor]:
        """The state of some elements, by the names of its lines."""
        return [self._state[line, key][0][start:stop] for key in keys]

    def has_room(self, line: Line, keys: Iterable[str]) -> bool:
        """Whether there is memory for such lines."""
        return all((line, key) in self._state for key in keys)

    def grow_older(self, params: Sequence[Parameter], keys: Sequence[str], scalars: Scalars) -> None:
        """Parameters have been stepped: what is kept once a parameter is this now."""
        age = Age(scalars)
        for param in params:
            line, slot = self._slots[param]
            state = self.optimizer.state[param]
            known = self._known.get(param)
            if known is None or known.state is not state or known.lines.keys() != set(keys):
                lines = {key: self._state[line, key][1][slot] for key in keys}
                state.update(lines)
                self._known[param] = known = _Known(state, lines, age)
            known.age = age
            for key, value in scalars.items():
                there = state.get(key)
                if isinstance(value, Tensor) and isinstance(there, Tensor) and there.shape == value.shape:
                    there.copy_(value)
                else:
                    state[key] = value.clone() if isinstance(value, Tensor) else value

    # The end ------------------------------------------------------------------------------------------------------

    def leave(self) -> None:
        """Give every rank a state of its own."""
        for param, known in self._known.items():
            if self.optimizer.state.get(param) is known.state:
                for key, view in known.lines.items():
                    if known.state.get(key) is view:
                        known.state[key] = view.clone(memory_format=torch.preserve_format)
        self._known = {}


def _describe(value: Any) -> Any:
    return value.tolist() if isinstance(value, Tensor) else value
