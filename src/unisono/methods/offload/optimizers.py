"""The user's optimizer as a rule for pieces of a flat line: which state it keeps, and how it steps a piece.

Adam, AdamW, SGD and Adagrad go through torch's fused kernels. Every other elementwise optimizer runs its own `step` on
a copy of itself that holds the pieces as its parameters.

`WHOLE` names torch's optimizers whose update needs whole tensors; `make_rule` tries those that it does not know. What
becomes of those that cannot be stepped in pieces, `kinds` says.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections import OrderedDict, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from unisono.methods.offload.fused import ADAGRAD, ADAM, ADAMW, SGD, call_kernel

Settings = Mapping[str, Any]  # one param group without its parameters
Scalars = Mapping[str, Any]  # what the optimizer keeps once for a parameter, such as "step"
Lines = Mapping[str, list[Tensor]]  # by name, a tensor for each piece

WHOLE = {  # torch's optimizers that cannot step a part of a parameter, and why
    "LBFGS": "it calls a closure several times and looks at all parameters together",
    "SparseAdam": "it needs sparse gradients",
    "Muon": "it orthogonalises whole matrices",
    "Adafactor": "it keeps the means of rows and columns of whole matrices",
}


class StateSpec(NamedTuple):
    """What an optimizer keeps for a parameter: lines of its shape with their first value, and single values."""

    lines: Mapping[str, float]
    scalars: tuple[str, ...]


class KernelCall(NamedTuple):
    """A fused kernel and its settings, as `unisono.methods.offload.fused.step_tiles` takes them."""

    kind: int
    numbers: list[float]
    flags: list[bool]


class Rule(ABC):
    """The state that an optimizer keeps for a parameter, and how it steps a piece of one."""

    has_kernel = False  # a fused one on the CPU: see `find_kernel`

    @abstractmethod
    def find_state(self, group: Settings) -> StateSpec:
        """Find out what is kept for the parameters of a group."""

    def advance(self, scalars: Scalars | None) -> Scalars:
        """The scalars that every call of one step gets; `scalars` are those so far, None before the first step."""
        return scalars or {}

    def find_given(self, after: Scalars) -> Scalars:
        """What a kernel is given of the scalars that `advance` has returned."""
        return after

    def read_scalars(self, given: Mapping[str, Any]) -> Scalars:
        """Scalars from a checkpoint, in the form that the optimizer keeps them in."""
        return dict(given)

    def find_kernel(self, group: Settings) -> KernelCall:
        """The fused kernel for a group, where there is one."""
        raise NotImplementedError

    def on_device(self, optimizer: torch.optim.Optimizer) -> Rule:
        """The rule with which the same optimizer is stepped on a device."""
        return self

    def apply(
        self, group: Settings, scalars: Scalars, fresh: bool, params: list[Tensor], grads: list[Tensor], lines: Lines
    ) -> Scalars:
        """Step pieces in place without a fused kernel, all of them in one call; returns the scalars after it."""
        raise NotImplementedError


class GroupStep:
    """One step of elements that belong to one param group and have been stepped equally often.

    lines: the state that is kept for each element, with its first values. scalars: what is kept once for a parameter,
    as every call of this step gets it; `after`: as it is when the step is done.

    >>> adamw = torch.optim.AdamW([torch.zeros(1)], lr=0.5, weight_decay=0.0)
    >>> step = GroupStep(make_rule(adamw), adamw.param_groups[0], None)
    >>> x, m, v = torch.zeros(2), torch.zeros(2), torch.zeros(2)
    >>> step.step([x], [torch.ones(2)], [[m], [v]])
    >>> [round(value, 6) for value in x.tolist()]
    [-0.5, -0.5]
    """

    def __init__(self, rule: Rule, settings: Settings, before: Scalars | None) -> None:
        """`before`: the scalars so far; None before the first step."""
        self.settings, self.is_fresh = settings, before is None
        self.lines = rule.find_state(settings).lines
        self.after = rule.advance(before)
        self.scalars = rule.find_given(self.after)
        self.kernel = rule.find_kernel(settings) if rule.has_kernel else None
        self._rule = rule

    def step(self, params: list[Tensor], grads: list[Tensor], state: Sequence[list[Tensor]]) -> None:
        """Step tensors in place, all of them in one call. `state`: for each of `lines`, a tensor for each of `params`;
        before the first step they may hold anything."""
        if self.is_fresh:
            for tensors, first in zip(state, self.lines.values(), strict=True):
                for x in tensors:
                    x.fill_(first)
        if self.kernel is None:
            lines = dict(zip(self.lines, state, strict=True))
            self.after = self._rule.apply(self.settings, self.scalars, self.is_fresh, params, grads, lines)
            return
        count: Tensor | None = self.scalars.get("step")
        if count is not None and params[0].is_cuda:
            # The kernel reads the count on the device. It is written by a kernel: a copy would wait for the host.
            count = torch.full((), float(count), dtype=torch.float32, device=params[0].device)
        steps = [] if count is None else [count] * len(params)
        call_kernel(*self.kernel, steps, self.is_fresh, params, grads, list(state))


class _CountingRule(Rule):
    """A fused kernel that is given the count of steps."""

    has_kernel = True

    def advance(self, scalars: Scalars | None) -> Scalars:
        return {"step": torch.tensor(0.0 if scalars is None else float(scalars["step"]), dtype=torch.float32).add_(1)}

    def read_scalars(self, given: Mapping[str, Any]) -> Scalars:
        return {"step": torch.tensor(float(given["step"]), dtype=torch.float32)}


class FusedAdam(_CountingRule):
    """Adam and AdamW."""

    def find_state(self, group: Settings) -> StateSpec:
        names = ("exp_avg", "exp_avg_sq", *(("max_exp_avg_sq",) if group["amsgrad"] else ()))
        return StateSpec(dict.fromkeys(names, 0.0), ("step",))

    def find_kernel(self, group: Settings) -> KernelCall:
        kind = ADAMW if group.get("decoupled_weight_decay") else ADAM
        numbers = _floats(group["lr"], group["weight_decay"], *group["betas"], group["eps"])
        return KernelCall(kind, numbers, [group["maximize"], group["amsgrad"]])


class SeveralSteps(FusedAdam):
    """So many of Adam's steps with one gradient, taken as one: learning rates were added up."""

    def __init__(self, count: int) -> None:
        self._count = count

    def advance(self, scalars: Scalars | None) -> Scalars:
        return {"step": super().advance(scalars)["step"].add_(self._count - 1)}

    def find_given(self, after: Scalars) -> Scalars:
        return {"step": after["step"] / self._count}  # the power that the decays are taken to

    def find_kernel(self, group: Settings) -> KernelCall:
        betas = tuple(beta**self._count for beta in group["betas"])
        return super().find_kernel({**group, "betas": betas})


class FusedSGD(Rule):
    """SGD; its momentum begins as the first gradient."""

    has_kernel = True

    def find_state(self, group: Settings) -> StateSpec:
        return StateSpec({"momentum_buffer": 0.0} if group["momentum"] else {}, ())

    def find_kernel(self, group: Settings) -> KernelCall:
        numbers = _floats(group["lr"], group["weight_decay"], group["momentum"], group["dampening"])
        return KernelCall(SGD, numbers, [group["maximize"], group["nesterov"]])


class FusedAdagrad(_CountingRule):
    """Adagrad."""

    def find_state(self, group: Settings) -> StateSpec:
        return StateSpec({"sum": float(group["initial_accumulator_value"])}, ("step",))

    def find_kernel(self, group: Settings) -> KernelCall:
        numbers = _floats(group["lr"], group["weight_decay"], group["lr_decay"], group["eps"])
        return KernelCall(ADAGRAD, numbers, [group["maximize"]])

    def on_device(self, optimizer: torch.optim.Optimizer) -> Rule:
        return OwnRule(optimizer)  # torch's fused Adagrad is for the CPU alone


def _floats(*values: float | Tensor) -> list[float]:
    return [float(value) for value in values]


class OwnRule(Rule):
    """Any elementwise optimizer, by its own `step`. What it keeps is found by trying it."""

    def __init__(self, optimizer: torch.optim.Optimizer, *, keeps_attributes: bool = False) -> None:
        """`keeps_attributes`: what it keeps beside its groups and state stays as it is, whatever a step does."""
        step = type(optimizer).step
        # Without the wrapper that runs the user's hooks: they are for whole steps.
        self._step: Any = step.__wrapped__ if getattr(step, "hooked", False) else step  # type: ignore[attr-defined]
        self.optimizer_class = type(optimizer)
        self._attributes = {k: v for k, v in vars(optimizer).items() if k not in ("state", "param_groups", "step")}
        if keeps_attributes:
            self._attributes = {k: _copy_own(v) for k, v in self._attributes.items()}
        self._found: dict[tuple[Any, ...], StateSpec] = {}

    def find_state(self, group: Settings) -> StateSpec:
        key = tuple((k, v) for k, v in sorted(group.items()) if isinstance(v, (bool, str)) or v is None or v == 0)
        if key not in self._found:
            self._found[key] = _try(self, group)
        return self._found[key]

    def apply(
        self, group: Settings, scalars: Scalars, fresh: bool, params: list[Tensor], grads: list[Tensor], lines: Lines
    ) -> Scalars:
        leaves = [torch.nn.Parameter(p, requires_grad=False) for p in params]
        states: list[dict[str, Any]] = []
        for i, (leaf, grad) in enumerate(zip(leaves, grads, strict=True)):
            leaf.grad = grad
            opening = self.first_state(group, leaf) if fresh else _copy(scalars)
            states.append(opening if fresh else {**opening, **{name: line[i] for name, line in lines.items()}})
        self.step(group, leaves, states)
        for i, (param, leaf, state) in enumerate(zip(params, leaves, states, strict=True)):
            if leaf.data_ptr() != param.data_ptr():  # it replaced the values instead of changing them
                param.copy_(leaf.detach())
            for name, line in lines.items():
                value = state.get(name)
                if value is not None and value is not line[i]:
                    line[i].copy_(value)
        return {k: v for k, v in states[0].items() if k not in lines}

    def first_state(self, group: Settings, leaf: Tensor) -> dict[str, Any]:
        """The state that the optimizer gives a parameter as it is constructed: mostly none."""
        try:
            new = self.optimizer_class([{**group, "params": [leaf]}], **self._attributes["defaults"])
        except Exception:  # whatever a constructor wants that is not among its defaults
            return {}
        return dict(new.state.get(leaf, {}))

    def step(self, group: Settings, leaves: list[torch.nn.Parameter], states: list[dict[str, Any]]) -> dict[str, Any]:
        """One step of a copy of the optimizer that holds these parameters; returns the copy's attributes."""
        twin = object.__new__(self.optimizer_class)
        vars(twin).update(self._attributes)
        twin.param_groups = [{**group, "params": leaves}]
        twin.state = defaultdict(dict, zip(leaves, states, strict=True))
        twin._optimizer_step_pre_hooks = OrderedDict()
        twin._optimizer_step_post_hooks = OrderedDict()
        self._step(twin)
        for leaf, state in zip(leaves, states, strict=True):
            if twin.state[leaf] is not state:
                state.clear()
                state.update(twin.state[leaf])
        return vars(twin)


_FUSED: dict[type[torch.optim.Optimizer], tuple[type[Rule], tuple[str, ...]]] = {
    torch.optim.Adam: (FusedAdam, ("_fused_adam_", "_fused_adamw_")),
    torch.optim.AdamW: (FusedAdam, ("_fused_adam_", "_fused_adamw_")),
    torch.optim.SGD: (FusedSGD, ("_fused_sgd_",)),
    torch.optim.Adagrad: (FusedAdagrad, ("_fused_adagrad_",)),
}


def make_rule(optimizer: torch.optim.Optimizer) -> Rule:
    """Make the rule by which pieces of the parameters of `optimizer` are stepped.

    >>> adam = torch.optim.AdamW([torch.zeros(3)])
    >>> list(make_rule(adam).find_state(adam.param_groups[0]).lines)
    ['exp_avg', 'exp_avg_sq']
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"got {type(optimizer).__name__}: expected a torch.optim.Optimizer")
    name = type(optimizer).__name__
    if reason := find_need_of_whole(optimizer):
        raise _make_refusal(name, reason)
    if any(group.get("differentiable") for group in optimizer.param_groups):
        raise ValueError(f"{name}(differentiable=True) keeps a graph of its steps: set differentiable=False")
    rule, kernels = _FUSED.get(type(optimizer), (None, ()))
    if rule is not None and all(hasattr(torch, kernel) for kernel in kernels):
        return rule()
    own = OwnRule(optimizer)
    for group in optimizer.param_groups:
        own.find_state(read_settings(group))
    return own


def find_need_of_whole(optimizer: torch.optim.Optimizer) -> str:
    """Why an optimizer of torch's, or one derived from it, cannot step a part of a parameter; "" if it can."""
    bases = [base.__name__ for base in type(optimizer).__mro__ if base.__module__.startswith("torch.")]
    return next((WHOLE[name] for name in bases if name in WHOLE), "")


def read_settings(group: Mapping[str, Any]) -> Settings:
    """Read the settings of a param group as they are now; what is changed in place later does not change them."""
    return {k: v.clone() if isinstance(v, Tensor) else _copy_own(v) for k, v in group.items() if k != "params"}


def _copy(scalars: Scalars) -> dict[str, Any]:
    return {k: v.clone() if isinstance(v, Tensor) else v for k, v in scalars.items()}


def _copy_own(value: Any) -> Any:
    """A copy of a small tensor or of a container; what is in a container may be the model, and is shared."""
    if isinstance(value, Tensor):
        return value.clone() if value.numel() <= 1 else value
    return copy.copy(value) if type(value) in (list, dict, set) else value


def _make_refusal(name: str, reason: str) -> ValueError:
    return ValueError(
        f"{name} cannot be stepped in pieces on the host: {reason}. Use an optimizer that treats every element alone "
        f"(AdamW, SGD, ...), or keep the optimizer on the device and whole"
    )


_SHAPE, _CUT = (4, 6), 7  # a small matrix, and where its line is cut in two


def _try(rule: OwnRule, group: Settings) -> StateSpec:
    """Step a small matrix, and the same numbers as two lines: the results must agree. Returns what was kept."""
    name = rule.optimizer_class.__name__
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(_SHAPE, generator=generator, dtype=torch.float64)
    grads = [torch.randn(_SHAPE, generator=generator, dtype=torch.float64) * size for size in (1.0, 100.0, 0.01)]
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        try:
            whole, kept = _run_steps(rule, group, start, grads)
            line = start.flatten()
            lines = [g.flatten() for g in grads]
            first, _ = _run_steps(rule, group, line[:_CUT], [g[:_CUT] for g in lines])
            second, _ = _run_steps(rule, group, line[_CUT:], [g[_CUT:] for g in lines])
        except ValueError:
            raise
        except Exception as error:
            raise _make_refusal(name, f"a try on a small matrix failed with {type(error).__name__}: {error}") from error
    if not torch.allclose(whole.flatten(), torch.cat([first, second]), rtol=1e-9, atol=1e-12):
        raise _make_refusal(name, "a small matrix stepped whole and in two pieces came out differently")
    return kept


def _run_steps(rule: OwnRule, group: Settings, start: Tensor, grads: Sequence[Tensor]) -> tuple[Tensor, StateSpec]:
    leaf = torch.nn.Parameter(start.clone(), requires_grad=False)
    state = rule.first_state(group, leaf)
    opening = _copy(state)
    before = _find_numbers(rule._attributes)
    for grad in grads:
        leaf.grad = grad.clone()
        given = dict(group)
        after = rule.step(given, [leaf], [state])
        if _find_numbers(after) != before or _find_numbers(after["param_groups"][0]) != _find_numbers(group):
            raise _make_refusal(rule.optimizer_class.__name__, "it changes its own settings as it steps")
    lines = {k: v for k, v in state.items() if isinstance(v, Tensor) and v.shape == leaf.shape}
    first = {k: 0.0 if opening.get(k) is None else float(opening[k].flatten()[0]) for k in lines}
    return leaf.detach(), StateSpec(first, tuple(k for k in state if k not in lines))


def _find_numbers(attributes: Mapping[str, Any]) -> dict[str, Any]:
    """The numbers among some attributes, to see whether they change."""
    found = {}
    for key, value in attributes.items():
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            found[key] = value
        elif isinstance(value, Tensor) and value.numel() == 1:
            found[key] = float(value)
    return found
