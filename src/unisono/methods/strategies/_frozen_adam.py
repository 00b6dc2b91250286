"""Adam's step with a v that stands still: shared by the methods that exchange momenta."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Adam, AdamW, Optimizer

from unisono.methods.joined_optimizers import refuse_several


class Moved(NamedTuple):
    """How a parameter was stepped: x <- kept x - rate m / (sqrt(v') + eps)."""

    rate: float
    kept: float


class FrozenAdam:
    """Steps the parameters whose v is frozen, in the optimizer's place: `step` hides their gradients from it, and
    `give_back` follows. The optimizer's own state goes on: `exp_avg`, `step`, and the frozen `exp_avg_sq`."""

    def __init__(self, model: nn.Module, optimizer: Optimizer) -> None:
        self._model, self._optimizer = model, optimizer
        self.corrections: dict[str, float] = {}  # by parameter: 1 - b2^T
        self._switched = False
        self._held: list[tuple[Tensor, Tensor]] = []  # gradients that the optimizer is not to see

    def freeze(self, warmup: int) -> None:
        """Freeze v of what has made its `warmup` steps: all that has made any, the first time."""
        enough = warmup if self._switched else 1
        self._switched = True
        beta2 = {p: group["betas"][1] for group in self._optimizer.param_groups for p in group["params"]}
        for name, param in self._model.named_parameters():
            state = self._optimizer.state.get(param)
            if name in self.corrections or not state or float(state["step"]) < enough:
                continue
            v = state["exp_avg_sq"]
            present = torch.count_nonzero(v)
            if present:
                v.copy_(torch.where(v == 0, v.sum() / present, v))
                self.corrections[name] = 1.0 - float(beta2[param] ** float(state["step"]))

    def step(self, warmup: int | None = None, *, update_variance: bool = False) -> dict[str, Moved]:
        """Step with the gradients that there are; how each parameter was. Nothing where a fused step overflows.
        `warmup`: freeze v first of what has made so many steps."""
        overflow = getattr(self._optimizer, "found_inf", None)  # a fused Adam is asked to step, and does not
        if overflow is not None and float(overflow):
            return {}
        if warmup is not None:
            self.freeze(warmup)
        names = {p: name for name, p in self._model.named_parameters()}
        moved: dict[str, Moved] = {}
        for group in self._optimizer.param_groups:
            params = [p for p in group["params"] if p.grad is not None and names[p] in self.corrections]
            if params and update_variance:
                self._update_variance(group, {names[p]: p for p in params})
            if params:
                rates = self._step(group, params, [self.corrections[names[p]] for p in params])
                kept = 1.0 - float(group["lr"]) * group["weight_decay"] if group["decoupled_weight_decay"] else 1.0
                moved |= {names[p]: Moved(rate, kept) for p, rate in zip(params, rates, strict=True)}
            self._held += [(p, p.grad) for p in params]
        for param, _ in self._held:
            param.grad = None
        return moved

    def give_back(self) -> None:
        """The optimizer has stepped the others: the program sees all gradients again."""
        for param, grad in self._held:
            param.grad = grad
        self._held = []

    def denominators(self, names: Iterable[str], like: Iterable[Tensor]) -> list[Tensor]:
        """sqrt(v') + eps, in the dtypes of `like`; 1 where v is not frozen: a rank's own."""
        params = dict(self._model.named_parameters())
        eps = {p: group["eps"] for group in self._optimizer.param_groups for p in group["params"]}
        found = []
        for name, other in zip(names, like, strict=True):
            param = params[name]
            if name in self.corrections:
                v = self._optimizer.state[param]["exp_avg_sq"].to(other.dtype)
                found.append((v / self.corrections[name]).sqrt_().add_(eps[param]))
            else:
                found.append(torch.ones_like(other))
        return found

    def state(self) -> dict[str, Any]:
        """What all ranks have alike, for checkpoints."""
        return {"frozen": dict(self.corrections), "switched": self._switched}

    def load(self, state: dict[str, Any]) -> None:
        """Take `state()`."""
        self.corrections, self._switched = dict(state.get("frozen", {})), state.get("switched", False)

    def _update_variance(self, group: dict[str, Any], params: dict[str, Tensor]) -> None:
        """v <- b2 v + (1 - b2) g^2, with the gradients of all; and its correction, as after so many updates."""
        beta2, scale = group["betas"][1], getattr(self._optimizer, "grad_scale", None)
        for name, param in params.items():
            assert param.grad is not None
            grad = param.grad if scale is None else param.grad / float(scale)
            if group["weight_decay"] and not group["decoupled_weight_decay"]:
                grad = grad.add(param, alpha=-group["weight_decay"] if group["maximize"] else group["weight_decay"])
            self._optimizer.state[param]["exp_avg_sq"].mul_(beta2).addcmul_(grad, grad, value=1.0 - beta2)
            self.corrections[name] = 1.0 - (1.0 - self.corrections[name]) * beta2

    def _step(self, group: dict[str, Any], params: list[Tensor], corrections: list[float]) -> list[float]:
        """Adam's step with v as it is; the rate of each parameter."""
        states = [self._optimizer.state[p] for p in params]
        grads = [p.grad for p in params if p.grad is not None]
        scale = getattr(self._optimizer, "grad_scale", None)
        if scale is not None:
            grads = list(torch._foreach_div(grads, float(scale)))
        if group["maximize"]:
            grads = list(torch._foreach_neg(grads))
        lr, beta1, decay = float(group["lr"]), group["betas"][0], group["weight_decay"]
        if decay and group["decoupled_weight_decay"]:
            torch._foreach_mul_(params, 1.0 - lr * decay)
        elif decay:
            grads = list(torch._foreach_add(grads, params, alpha=decay))
        torch._foreach_add_([s["step"] for s in states], 1.0)
        momenta = [s["exp_avg"] for s in states]
        torch._foreach_lerp_(momenta, grads, 1.0 - beta1)
        roots = torch._foreach_sqrt([s["exp_avg_sq"] for s in states])
        torch._foreach_div_(roots, [c**0.5 for c in corrections])
        torch._foreach_add_(roots, group["eps"])
        rates = [lr / (1.0 - beta1 ** float(s["step"])) for s in states]
        torch._foreach_addcdiv_(params, momenta, roots, [-rate for rate in rates])
        return rates


def check_adam(method: str, model: nn.Module, optimizer: Optimizer) -> None:
    """Refuse what FrozenAdam cannot step, by name."""
    refuse_several(optimizer, method, "it takes over the step of one Adam, whose momenta it exchanges")
    if type(optimizer) not in (Adam, AdamW):
        raise TypeError(
            f"{method} takes over the step of torch.optim.Adam or AdamW, got {type(optimizer).__name__}: make one of "
            "those, or use allreduce(reducer=bytegrad), which works with any optimizer"
        )
    for group in optimizer.param_groups:
        for option in ("amsgrad", "capturable", "differentiable"):
            if group.get(option):
                raise ValueError(f"{method} has no {option} once v is frozen: make the optimizer with {option}=False")
    if any(getattr(module, "sparse", False) is True for module in model.modules()):
        raise ValueError("Adam cannot step sparse gradients: make the embeddings with sparse=False")
    for name, param in model.named_parameters():
        if param.is_complex():
            raise ValueError(f"{method} averages momenta of real numbers, but {name!r} is {param.dtype}")
