"""Optimizers whose step of a tensor needs the whole tensor, written as users write them: for the tests alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


class Lamb(torch.optim.Optimizer):
    """You et al., 2020: Adam's direction, as long as the tensor's norm says."""

    def __init__(self, params: Any, lr: float = 0.01, betas: tuple[float, float] = (0.9, 0.99)) -> None:
        super().__init__(params, {"lr": lr, "betas": betas})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            first, second = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state.update(step=0, m=torch.zeros_like(p), v=torch.zeros_like(p))
                state["step"] += 1
                state["m"].lerp_(p.grad, 1 - first)
                state["v"].lerp_(p.grad.square(), 1 - second)
                m, v = (state[k] / (1 - beta ** state["step"]) for k, beta in (("m", first), ("v", second)))
                way = m / (v.sqrt() + 1e-6)
                p.sub_(way, alpha=group["lr"] * float(p.norm() / way.norm().clamp_min(1e-12)))


class Soap(torch.optim.Optimizer):
    """A small Shampoo: a Gram matrix for each side, replaced in every step, and their inverse fourth roots."""

    def __init__(self, params: Any, lr: float = 0.05) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                g = p.grad.reshape(len(p), -1)
                state = self.state[p]
                if not state:
                    state["grams"] = [torch.eye(n, dtype=p.dtype) * 1e-3 for n in g.shape]
                state["grams"] = [state["grams"][0] + g @ g.T, state["grams"][1] + g.T @ g]
                left, right = (_inverse_root(x) for x in state["grams"])
                p.sub_((left @ g @ right).view_as(p), alpha=group["lr"])


def _inverse_root(gram: Tensor) -> Tensor:
    values, vectors = torch.linalg.eigh(gram)
    return vectors @ torch.diag(values.clamp_min(1e-12) ** -0.25) @ vectors.T


class Signs(torch.optim.Optimizer):
    """One that steps every element by itself, which no name says."""

    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad.sign(), alpha=group["lr"])


class Codes(torch.optim.Optimizer):
    """Momentum, which large tensors keep in 8 bits: codes, and the size of what they stand for."""

    def __init__(self, params: Any, lr: float = 0.05, large: int = 30) -> None:
        super().__init__(params, {"lr": lr, "large": large})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if p.numel() < group["large"]:
                    m = state.setdefault("m", torch.zeros_like(p)).mul_(0.9).add_(p.grad)
                else:
                    if not state:
                        state.update(codes=torch.full_like(p, 128, dtype=torch.uint8), size=p.new_zeros(1))
                    m = (state["codes"].to(p.dtype) - 128) / 127 * state["size"] * 0.9 + p.grad
                    state["size"] = m.abs().max().view(1)
                    state["codes"] = (m / state["size"] * 127 + 128).round().to(torch.uint8)
                p.sub_(m, alpha=group["lr"])


class Together(Signs):
    """One whose step of a tensor depends on the others."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        params = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.stack([p.grad.norm() for p in params]).norm()
        for p in params:
            p.sub_(p.grad / norm)


class MyMuon(torch.optim.Muon):
    """A class derived from torch's, under another name."""


def split_by_shape(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    matrices = [p for p in model.parameters() if p.dim() == 2]
    return matrices, [p for p in model.parameters() if p.dim() != 2]


def muon(model: nn.Module, kind: type[torch.optim.Muon] = torch.optim.Muon, **settings: Any) -> list[Any]:
    matrices, rest = split_by_shape(model)
    return [kind(matrices, lr=0.05, **settings), torch.optim.AdamW(rest, lr=0.02)]


def soap(model: nn.Module) -> list[Any]:
    matrices, rest = split_by_shape(model)
    return [Soap(matrices), torch.optim.SGD(rest, lr=0.05, momentum=0.9)]


MAKERS: dict[str, Callable[[nn.Module], Any]] = {
    "muon": lambda model: muon(model, adjust_lr_fn="original"),
    "muon by rms": lambda model: muon(model, adjust_lr_fn="match_rms_adamw", nesterov=False),
    "my muon": lambda model: muon(model, MyMuon),
    "soap": soap,
    "lamb": lambda model: Lamb(model.parameters()),
    "codes": lambda model: Codes(model.parameters()),
    "adafactor": lambda model: torch.optim.Adafactor(model.parameters(), lr=0.05),
}
