"""One step of the user's optimizer on tensors that lie on the device: torch's fused kernels, or the optimizer's own."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from unisono.offload.optimizers import FusedAdagrad, FusedAdam, FusedSGD, Lines, Own, Rule, Scalars, Settings, rule_for


def device_rule(optimizer: torch.optim.Optimizer) -> Rule:
    """The rule that steps on the device; torch's fused Adagrad is for the CPU alone."""
    rule = rule_for(optimizer)
    return Own(optimizer) if isinstance(rule, FusedAdagrad) else rule


def apply(
    rule: Rule,
    group: Settings,
    scalars: Scalars,
    *,
    fresh: bool,
    params: list[Tensor],
    grads: list[Tensor],
    lines: Lines,
) -> Scalars:
    """Step the tensors in place, all of them in one call; returns the scalars after it.

    >>> adamw = torch.optim.AdamW([torch.zeros(1)], lr=0.5, weight_decay=0.0)
    >>> rule, x, m, v = rule_for(adamw), torch.zeros(2), torch.zeros(2), torch.zeros(2)
    >>> settings, lines = adamw.param_groups[0], {"exp_avg": [m], "exp_avg_sq": [v]}
    >>> _ = apply(rule, settings, rule.advance(None), fresh=True, params=[x], grads=[torch.ones(2)], lines=lines)
    >>> [round(value, 6) for value in x.tolist()]
    [-0.5, -0.5]
    """
    if isinstance(rule, FusedAdam):
        _adam(group, scalars, params, grads, lines)
    elif isinstance(rule, FusedSGD):
        _sgd(group, fresh, params, grads, lines)
    else:
        assert isinstance(rule, Own), f"no way to step {type(rule).__name__} on the device"
        return rule.apply(group, scalars, fresh, params, grads, lines)
    return scalars


def _adam(group: Settings, scalars: Scalars, params: list[Tensor], grads: list[Tensor], lines: Lines) -> None:
    fused: Any = torch._fused_adamw_ if group.get("decoupled_weight_decay") else torch._fused_adam_
    # The kernel reads the count of steps on the device; it is written by a kernel, a copy would wait for the host.
    step = torch.full((), float(scalars["step"]), device=params[0].device)
    fused(
        *(params, grads, lines["exp_avg"], lines["exp_avg_sq"], lines.get("max_exp_avg_sq", [])),
        [step] * len(params),
        lr=float(group["lr"]),
        beta1=float(group["betas"][0]),
        beta2=float(group["betas"][1]),
        weight_decay=float(group["weight_decay"]),
        eps=float(group["eps"]),
        amsgrad=group["amsgrad"],
        maximize=group["maximize"],
    )


def _sgd(group: Settings, fresh: bool, params: list[Tensor], grads: list[Tensor], lines: Lines) -> None:
    torch._fused_sgd_(
        params,
        grads,
        lines.get("momentum_buffer", []),
        weight_decay=float(group["weight_decay"]),
        momentum=float(group["momentum"]),
        lr=float(group["lr"]),
        dampening=float(group["dampening"]),
        nesterov=group["nesterov"],
        maximize=group["maximize"],
        is_first_step=fresh and group["momentum"] != 0,
    )
