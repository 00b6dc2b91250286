"""Parameters that an optimizer steps whole (Muon's matrices, say), in the memory of a host: each has one owner there.

The owner steps it by the optimizer's own code, on a leaf that lies in the host's memory, so nothing is sent. It alone
has the optimizer's state of it. `optimizer.state_dict()`, which every rank calls, shows that of all, as a checkpoint
needs it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from unisono.methods.joined_optimizers import members_of
from unisono.methods.offload.kinds import choose_owners, find_kinds
from unisono.methods.strategies._host_memory import HostMemory
from unisono.methods.strategies.shared.gradients import Place
from unisono.methods.strategies.shared.lines import Line

EVERY_RANK = {  # what errors say of ranks that do not come (see `unisono.launchers.runtime.frames`)
    "show_all": "under shared each rank has the optimizer's state of the tensors that it owns, so every rank calls "
    "optimizer.state_dict(), and one of them writes the file, or un.save(folder, replica)"
}
States = dict[str, dict[str, Any]]  # by the parameter's name


class OwnedTensors:
    """The parameters of some lines that are stepped whole, and the leaves of those that this rank owns.

    names: of all of them, by parameter.
    """

    def __init__(self, optimizer: Optimizer, lines: Sequence[Line], memory: HostMemory) -> None:
        kinds = find_kinds(optimizer)
        places = [(line, s) for line in lines for s, p in enumerate(line.params) if kinds.get(p) == "tensors"]
        owners = choose_owners([line.params[slot].shape for line, slot in places], memory.size)
        self._optimizer, self._memory = optimizer, memory
        self.names = {line.params[slot]: line.names[slot] for line, slot in places}
        self._leaves: dict[Parameter, Parameter] = {}
        for (line, slot), owner in zip(places, owners, strict=True):
            if owner == memory.rank:
                self._leaves[line.params[slot]] = Parameter(line.view(line.values)[slot], requires_grad=False)
        self._whole: list[tuple[dict[str, Any], list[Parameter]]] = []  # groups that hold leaves, and what else they do
        self._shown: list[tuple[Optimizer, Parameter]] = []  # states of others' that are shown
        self._hooks: list[Any] = []
        for member in members_of(optimizer) if places else ():
            self._hooks += [
                member.register_state_dict_pre_hook(self.show_all),
                member.register_state_dict_post_hook(lambda *_: self._hide()),
                member.register_load_state_dict_post_hook(self.drop_others),
            ]
        for member in members_of(optimizer):
            self.drop_others(member)

    def find(self, optimizer: Optimizer) -> list[Parameter]:
        """Those of one of several optimizers."""
        return [p for group in optimizer.param_groups for p in group["params"] if p in self.names]

    @property
    def mine(self) -> list[str]:
        """The names of those that this rank owns."""
        return [self.names[p] for p in self._leaves]

    # A step -------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def begin_step(self, optimizer: Optimizer, places: Sequence[Place]) -> None:
        """Let the optimizer's groups hold the leaves of what this rank owns, with the mean of each gradient, and
        nothing of what others own, until `end_step`."""
        self.end_step()
        known = {id(place.param): place for place in places}
        for group in optimizer.param_groups:
            self._whole.append((group, group["params"]))
            for param in (p for p in group["params"] if p in self.names):
                place = known[id(param)]
                place.take_over()
                if (leaf := self._leaves.get(param)) is not None:
                    leaf.grad = _take_mean(place) if place.used and param.grad is not None else None
                    _move(optimizer, param, leaf)
            kept = [p for p in group["params"] if p in self._leaves or p not in self.names]
            group["params"] = [self._leaves.get(p, p) for p in kept]

    def end_step(self) -> None:
        """Let the groups hold the program's parameters again."""
        whole, self._whole = self._whole, []
        for group, params in whole:
            group["params"] = params
        for optimizer in members_of(self._optimizer) if whole else ():
            for param, leaf in self._leaves.items():
                _move(optimizer, leaf, param)
                leaf.grad = None

    # State --------------------------------------------------------------------------------------------------------

    def states(self, optimizer: Optimizer) -> States:
        """Those of what this rank owns, of one optimizer."""
        return {self.names[p]: dict(optimizer.state[p]) for p in self._leaves if p in optimizer.state}

    def show_all(self, optimizer: Optimizer) -> None:
        """Bring the states of others' here, for `optimizer.state_dict()`; every rank of a host calls it."""
        self.end_step()
        if self.find(optimizer):
            self.take(optimizer, self._memory.home.gather_objects(self.states(optimizer)))

    def take(self, optimizer: Optimizer, every: Sequence[States]) -> None:
        """Take the states of what others own, until `_hide()`."""
        params = {name: p for p, name in self.names.items()}
        for name, state in (item for states in every for item in states.items()):
            if params[name] not in optimizer.state:
                optimizer.state[params[name]] = state
                self._shown.append((optimizer, params[name]))

    def _hide(self) -> None:
        shown, self._shown = self._shown, []
        for optimizer, param in shown:
            optimizer.state.pop(param, None)

    def drop_others(self, optimizer: Optimizer) -> None:
        """A whole state was loaded: keep that of what this rank owns."""
        for param in self.find(optimizer):
            if param not in self._leaves:
                optimizer.state.pop(param, None)

    def close(self, every: Mapping[Optimizer, Sequence[States]] | None = None) -> None:
        """Take the hooks off; `every`: the states of all ranks, for each rank to have all of them from now on."""
        self.end_step()
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        for optimizer, states in (every or {}).items():
            self.take(optimizer, states)
        self._shown = []


def _move(optimizer: Optimizer, before: Parameter, after: Parameter) -> None:
    if before in optimizer.state:
        optimizer.state[after] = optimizer.state.pop(before)


def _take_mean(place: Place) -> Tensor:
    """The gradient that a whole tensor is stepped with, in memory of this rank's own."""
    start, stop = place.line.bounds(place.slot)
    mean, found = place.describe(), torch.empty(stop - start, dtype=place.line.dtype)
    if mean.own is not None:
        found.copy_(mean.own)
    else:
        mean.take(found, [ranks[start:stop] for ranks in place.line.gradients])
    return found.as_strided(place.param.shape, place.param.stride())
