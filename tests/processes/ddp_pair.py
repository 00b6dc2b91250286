"""Two copies of a model on the same data, one under torch's DDP and one under Unisono, compared bit by bit.

A mismatch is noted, not raised: a rank that stopped in the middle of a case would leave the others waiting.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import unisono as un

Loss = Callable[[nn.Module], Tensor]
MakeOptimizer = Callable[[Iterable[Tensor]], torch.optim.Optimizer]

settings: dict[str, Any] = {}  # of every replica in this run
mismatches: list[str] = []  # of the case now running


def expect(holds: object, what: str) -> None:
    if not holds:
        mismatches.append(what)


def expect_same(ours: Tensor | None, theirs: Tensor | None, what: str, *, rtol: float = 0.0) -> None:
    """The same bits, or close where rtol says so; None only where the other is None."""
    if ours is None or theirs is None:
        expect(ours is theirs, f"{what}: ours {_short(ours)}, reference {_short(theirs)}")
        return
    if ours.layout != theirs.layout:
        expect(False, f"{what}: ours is {ours.layout}, reference {theirs.layout}")
        return
    ours, theirs = (x.detach().coalesce().to_dense() if x.is_sparse else x.detach() for x in (ours, theirs))
    try:
        torch.testing.assert_close(ours, theirs, rtol=rtol, atol=rtol * 0.1, equal_nan=True)
    except AssertionError as error:
        expect(False, f"{what}: {' '.join(str(error).split())}")


def _short(x: Tensor | None) -> str:
    return "None" if x is None else f"{x.dtype} {list(x.shape)}"


def batch(step: int, *shape: int, rank: int | None = None, dtype: torch.dtype = torch.float32) -> Tensor:
    """Random numbers of one rank (by default this one) at one step."""
    generator = torch.Generator().manual_seed(1000 * step + (dist.get_rank() if rank is None else rank))
    return torch.randn(*(shape or (4, 6)), generator=generator, dtype=torch.float64).to(dtype)


def sgd(params: Iterable[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1, momentum=0.9, weight_decay=0.01)


def mlp(dtype: torch.dtype = torch.float32) -> nn.Module:
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 3)).to(dtype)


def mean_square(step: int) -> Loss:
    x = batch(step)
    return lambda model: model(x).square().mean()


class Side:
    """One of the two: a model to call, its parameters, its optimizer, its `no_sync`."""

    def __init__(self, model: nn.Module, inner: nn.Module, optimizer: torch.optim.Optimizer, no_sync: Any) -> None:
        self.model, self.inner, self.optimizer, self.no_sync = model, inner, optimizer, no_sync


class Pair:
    """The two sides; `with Pair(make) as pair` closes ours at the end."""

    def __init__(
        self,
        make: Callable[[], nn.Module] = mlp,
        optimizer: MakeOptimizer = sgd,
        *,
        ddp: dict[str, Any] | None = None,
        around: Callable[[nn.Module], nn.Module] = lambda model: model,
        rtol: float = 0.0,
        **own: Any,
    ) -> None:
        torch.manual_seed(dist.get_rank())  # parallel() and DDP both start from rank 0's
        first = make()
        second = copy.deepcopy(first)
        self.rtol, self._ddp = rtol, ddp or {}
        optimizers = optimizer(first.parameters()), optimizer(second.parameters())
        bound = around(first)
        self.replica = un.parallel(bound, optimizers[0], "allreduce", **{**settings, **own})
        self.ours = Side(bound, first, optimizers[0], self.replica.no_sync)
        wrapped = DistributedDataParallel(second, **self._ddp)
        self.theirs = Side(wrapped, second, optimizers[1], wrapped.no_sync)
        self.compare_params("at the start")

    def __enter__(self) -> Pair:
        return self

    def __exit__(self, *_: object) -> None:
        self.replica.close()

    @property
    def sides(self) -> tuple[Side, Side]:
        return self.ours, self.theirs

    def wrap_again(self) -> None:
        """DDP must be made anew after parameters were frozen or unfrozen; Unisono must not."""
        wrapped = DistributedDataParallel(self.theirs.inner, **self._ddp)
        self.theirs.model, self.theirs.no_sync = wrapped, wrapped.no_sync

    def zero_grad(self, *, set_to_none: bool = True) -> None:
        for side in self.sides:
            side.optimizer.zero_grad(set_to_none=set_to_none)

    def backward(self, loss: Loss, when: str = "") -> None:
        for side in self.sides:
            loss(side.model).backward()
        self.compare_grads(when)

    def update(self, when: str = "") -> None:
        for side in self.sides:
            side.optimizer.step()
        self.compare_params(when)

    def step(self, loss: Loss, when: str = "") -> None:
        self.zero_grad()
        self.backward(loss, when)
        self.update(when)

    def train(self, loss_at: Callable[[int], Loss] = mean_square, steps: int = 5) -> None:
        for t in range(steps):
            self.step(loss_at(t), f"step {t}")

    def compare_grads(self, when: str) -> None:
        for name, ours, theirs in self._named():
            expect_same(ours.grad, theirs.grad, f"gradient of {name} {when}", rtol=self.rtol)
            if ours.grad is not None and theirs.grad is not None and not ours.grad.is_sparse:
                expect(
                    ours.grad.stride() == theirs.grad.stride(),
                    f"strides of the gradient of {name} {when}: {ours.grad.stride()}, DDP has {theirs.grad.stride()}",
                )

    def compare_params(self, when: str) -> None:
        for name, ours, theirs in self._named():
            expect_same(ours, theirs, f"parameter {name} {when}", rtol=self.rtol)

    def _named(self) -> Iterator[tuple[str, nn.Parameter, nn.Parameter]]:
        others = self.theirs.inner.parameters()
        for (name, ours), theirs in zip(self.ours.inner.named_parameters(), others, strict=True):
            yield name, ours, theirs
