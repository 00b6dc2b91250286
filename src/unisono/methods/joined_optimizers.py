"""Several optimizers of one model, seen as one: Muon for the hidden matrices and AdamW for the rest, say.

The program keeps its own optimizers and steps each of them. A method sees one optimizer whose groups are those of the
members, one member after the other, and whose state is looked up in the member that holds the parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, MutableMapping, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.optim import Optimizer

Given = Optimizer | Sequence[Optimizer]  # what a program may give: one, or several


class JoinedOptimizers(Optimizer):
    """The optimizers `members` as one. Hooks that are registered here are called for every member, with that member.

    >>> a, b = torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(3))
    >>> joined = JoinedOptimizers([torch.optim.SGD([a], lr=0.1), torch.optim.AdamW([b], lr=0.2)])
    >>> [group["lr"] for group in joined.param_groups], describe_optimizer(joined)
    ([0.1, 0.2], 'SGD + AdamW')
    """

    def __init__(self, members: Sequence[Optimizer]) -> None:
        # Optimizer's own would make groups and hooks of its own: all of them are the members'.
        self.members = list(members)
        self.defaults: dict[str, Any] = {}

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The members' own groups."""
        return [group for member in self.members for group in member.param_groups]

    @property
    def state(self) -> MutableMapping[Tensor, Any]:  # type: ignore[override]
        """The members' states."""
        return _JoinedState(self.members)

    def __getstate__(self) -> dict[str, Any]:
        return vars(self)

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)

    def __repr__(self) -> str:
        return f"JoinedOptimizers({', '.join(map(repr, self.members))})"

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Step every member, in order."""
        if closure is not None:
            raise ValueError("several optimizers step with one window of gradients: step each with its own closure")
        for member in self.members:
            member.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        for member in self.members:
            member.zero_grad(set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> NoReturn:
        raise ValueError("add a group to one of the optimizers, not to all of them together")

    # State: numbered through, over all members ------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The members' state dicts as one: parameters are numbered through, over all of them."""
        state: dict[int, Any] = {}
        groups: list[dict[str, Any]] = []
        for member in self.members:
            own, first = member.state_dict(), sum(len(group["params"]) for group in groups)
            state |= {first + number: entry for number, entry in own["state"].items()}
            groups += [{**g, "params": [first + number for number in g["params"]]} for g in own["param_groups"]]
        return {"state": state, "param_groups": groups}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take what `state_dict()` gave."""
        for member, own in zip(self.members, split_state(state_dict, self.counts), strict=True):
            member.load_state_dict(own)

    @property
    def counts(self) -> list[int]:
        """How many groups each member has."""
        return [len(member.param_groups) for member in self.members]

    # Hooks: on every member -------------------------------------------------------------------------------------------

    def register_step_pre_hook(self, hook: Any) -> Any:
        return self._register("register_step_pre_hook", hook)

    def register_step_post_hook(self, hook: Any) -> Any:
        return self._register("register_step_post_hook", hook)

    def register_state_dict_pre_hook(self, hook: Any, prepend: bool = False) -> Any:
        return self._register("register_state_dict_pre_hook", hook, prepend=prepend)

    def register_state_dict_post_hook(self, hook: Any, prepend: bool = False) -> Any:
        return self._register("register_state_dict_post_hook", hook, prepend=prepend)

    def register_load_state_dict_pre_hook(self, hook: Any, prepend: bool = False) -> Any:
        return self._register("register_load_state_dict_pre_hook", hook, prepend=prepend)

    def register_load_state_dict_post_hook(self, hook: Any, prepend: bool = False) -> Any:
        return self._register("register_load_state_dict_post_hook", hook, prepend=prepend)

    def _register(self, how: str, hook: Callable[..., Any], **options: bool) -> _Handles:
        return _Handles([getattr(member, how)(hook, **options) for member in self.members])


class _Handles:
    """The handles of one hook on several optimizers."""

    def __init__(self, handles: Sequence[Any]) -> None:
        self._handles = handles

    def remove(self) -> None:
        """Take the hook off all of them."""
        for handle in self._handles:
            handle.remove()


class _JoinedState(MutableMapping[Tensor, Any]):
    """The states of several optimizers, by parameter."""

    def __init__(self, members: Sequence[Optimizer]) -> None:
        self._members = members

    def _find(self, param: Tensor) -> Any:
        """The state dict of the member that holds a parameter; None if none does."""
        for member in self._members:
            if param in member.state or any(param is p for group in member.param_groups for p in group["params"]):
                return member.state
        return None

    def __getitem__(self, param: Tensor) -> Any:
        found = self._find(param)
        if found is None:
            raise KeyError(param)
        return found[param]

    def __setitem__(self, param: Tensor, value: Any) -> None:
        found = self._find(param)
        if found is None:
            raise KeyError(param)
        found[param] = value

    def __delitem__(self, param: Tensor) -> None:
        self.pop(param)

    def __contains__(self, param: object) -> bool:
        return any(param in member.state for member in self._members)

    def get(self, param: Tensor, default: Any = None) -> Any:
        """Without making an entry, which `[]` does."""
        return next((member.state[param] for member in self._members if param in member.state), default)

    def pop(self, param: Tensor, *default: Any) -> Any:
        for member in self._members:
            if param in member.state:
                return member.state.pop(param)
        if not default:
            raise KeyError(param)
        return default[0]

    def __iter__(self) -> Iterator[Tensor]:
        return (param for member in self._members for param in member.state)

    def __len__(self) -> int:
        return sum(len(member.state) for member in self._members)

    def clear(self) -> None:
        for member in self._members:
            member.state.clear()


def members_of(optimizer: Optimizer) -> list[Optimizer]:
    """The program's own optimizers: those that were joined, or the only one."""
    return optimizer.members if isinstance(optimizer, JoinedOptimizers) else [optimizer]


def describe_optimizer(optimizer: Optimizer) -> str:
    """The class of an optimizer; of several, all of them: "Muon + AdamW"."""
    return " + ".join(type(member).__name__ for member in members_of(optimizer))


def split_state(state: dict[str, Any], counts: Sequence[int]) -> list[dict[str, Any]]:
    """Take `JoinedOptimizers.state_dict()` apart: a state dict for each member; `counts`: how many groups each has."""
    groups, found, first = list(state["param_groups"]), [], 0
    if sum(counts) != len(groups):
        raise ValueError(f"got {len(groups)} parameter groups for optimizers with {counts}: expected {sum(counts)}")
    for count in counts:
        mine, groups = groups[:count], groups[count:]
        last = first + sum(len(group["params"]) for group in mine)
        own = {number - first: entry for number, entry in state["state"].items() if first <= number < last}
        found.append({"state": own, "param_groups": [_renumber(group, -first) for group in mine]})
        first = last
    return found


def _renumber(group: dict[str, Any], by: int) -> dict[str, Any]:
    return {**group, "params": [number + by for number in group["params"]]}


def join_optimizers(given: Given) -> Optimizer:
    """One optimizer for all that a program gave: itself, or several as one. Refuses what is no optimizer."""
    if isinstance(given, Optimizer):
        return given
    if not isinstance(given, (list, tuple)):
        raise TypeError(
            f"optimizer must be a torch.optim.Optimizer, got {type(given).__name__}: give one, or a list of several"
        )
    for i, one in enumerate(given):
        if not isinstance(one, Optimizer):
            raise TypeError(f"optimizer {i} of the list must be a torch.optim.Optimizer, got {type(one).__name__}")
    members = [member for one in given for member in members_of(one)]
    if not members:
        raise ValueError("got an empty list of optimizers: give the one, or those, that step the model's parameters")
    return members[0] if len(members) == 1 else JoinedOptimizers(members)


def check_members(optimizer: Optimizer, names: dict[torch.nn.Parameter, str]) -> None:
    """Of several optimizers: refuse, by name, a parameter that two of them hold, and one that learns and none holds.

    names: those of the model's parameters.
    """
    members = members_of(optimizer)
    if len(members) == 1:
        return
    holders: dict[Any, int] = {}
    for i, member in enumerate(members):
        for param in (p for group in member.param_groups for p in group["params"]):
            if param in holders:
                here, there = _number(members, i), _number(members, holders[param])
                raise ValueError(
                    f"parameter {names.get(param, '?')!r} is in two optimizers, {there} and {here}: both would step "
                    "it. Give each parameter to one of them"
                )
            holders[param] = i
    left = [name for param, name in names.items() if param.requires_grad and param not in holders]
    if left:
        more = f" and {len(left) - 3} more" if len(left) > 3 else ""
        raise ValueError(
            f"no optimizer holds {', '.join(map(repr, left[:3]))}{more}, of which gradients are required: none would "
            "step them. Give them to one of the optimizers, or freeze them (requires_grad_(False))"
        )


def _number(members: Sequence[Optimizer], i: int) -> str:
    return f"number {i} ({type(members[i]).__name__})"


def refuse_several(optimizer: Optimizer, method: str, why: str) -> None:
    """Refuse several optimizers, for a method that cannot work with them."""
    if len(members_of(optimizer)) > 1:
        raise ValueError(
            f"{method} takes one optimizer, got {describe_optimizer(optimizer)}: {why}. Give it one optimizer with "
            "several parameter groups, or use another method (allreduce, shared, zero, local_sgd, diloco, ...)"
        )
