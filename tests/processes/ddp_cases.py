"""The corner cases of DDP, one function each: every rank runs all of them, in this order, in one launch."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from ddp_pair import Loss, Pair, batch, expect, expect_same, mean_square, mlp, sgd
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

CASES: dict[str, Callable[[], None]] = {}
MAIN: list[str] = []  # those that also run where ranks only have messages


def case(fn: Callable[[], None]) -> Callable[[], None]:
    CASES[fn.__name__] = fn
    return fn


def main_case(fn: Callable[[], None]) -> Callable[[], None]:
    MAIN.append(fn.__name__)
    return case(fn)


# Which parameters ------------------------------------------------------------------------------------------


@main_case
def plain_model() -> None:
    with Pair() as pair:
        pair.train()
        expect(pair.replica.step == 5, f"step is {pair.replica.step} after 5 windows")


class Branches(nn.Module):
    """Uses the branches it is told to; `never` is not used by any rank."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 5)
        self.branches = nn.ModuleList([nn.Linear(5, 3), nn.Linear(5, 3)])
        self.never = nn.Linear(5, 3)

    def forward(self, x: Tensor, which: Iterable[int]) -> Tensor:
        hidden = self.first(x).tanh()
        return sum((self.branches[i](hidden) for i in which), start=hidden.new_zeros(()))


@main_case
def unused_parameters_that_differ_by_rank() -> None:
    with Pair(Branches, ddp={"find_unused_parameters": True}) as pair:
        before = pair.ours.inner.never.weight.detach().clone()
        for t in range(5):
            both, mine, first = [0, 1], [dist.get_rank()], [0]
            which = (mine, both, first, mine, both)[t]
            x = batch(t)
            pair.step(lambda model, x=x, which=which: model(x, which).square().mean(), f"step {t}")
        never = pair.ours.inner.never.weight
        expect(never.grad is None, "a parameter unused everywhere has a gradient")
        expect_same(never, before, "a parameter unused everywhere, under weight decay")


@case
def unused_in_the_second_backward_keeps_what_it_had() -> None:
    with Pair(Branches, ddp={"find_unused_parameters": True}) as pair:
        for t in range(3):
            pair.zero_grad()
            for which in ([0, 1], [dist.get_rank()], [0]):
                x = batch(t)
                pair.backward(lambda model, x=x, which=which: model(x, which).square().mean(), f"step {t} {which}")
            pair.update(f"step {t}")


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(6, 6)
        self.leave = nn.Linear(6, 6)
        self.leave.weight = self.enter.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.leave(self.enter(self.enter(x).tanh()))


@main_case
def tied_parameters() -> None:
    with Pair(Tied) as pair:
        pair.train()


def _freeze(pair: Pair, frozen: bool) -> None:
    for side in pair.sides:
        side.inner[2].requires_grad_(not frozen)


@main_case
def frozen_and_later_unfrozen() -> None:
    with Pair() as pair:
        pair.train(steps=2)
        for t, frozen in enumerate([True, False, True]):
            pair.zero_grad()
            _freeze(pair, frozen)
            pair.wrap_again()
            for k in range(2):
                pair.step(mean_square(10 * t + k), f"frozen={frozen} step {k}")
            expect((pair.ours.inner[2].weight.grad is None) == frozen, f"frozen={frozen} but its gradient says not")


@case
def frozen_from_the_start() -> None:
    def make() -> nn.Module:
        model = mlp()
        model[0].requires_grad_(False)
        return model

    with Pair(make) as pair:
        pair.train(steps=2)
        for side in pair.sides:
            side.inner[0].requires_grad_(True)
        pair.wrap_again()
        pair.train(steps=2)


@case
def frozen_while_gradients_wait() -> None:
    with Pair() as pair:
        pair.zero_grad()
        pair.backward(mean_square(0), "before")
        _freeze(pair, True)
        pair.wrap_again()
        pair.backward(mean_square(1), "frozen")
        _freeze(pair, False)
        pair.wrap_again()
        pair.backward(mean_square(2), "unfrozen")
        pair.update("at the end")


class Shapes(nn.Module):
    """A scalar, an empty parameter (one of them alone in its dtype), and many of one shape."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.nothing = nn.Parameter(torch.empty(0))
        self.nothing_wide = nn.Parameter(torch.empty(0, 3, dtype=torch.float64))
        self.layers = nn.ModuleList([nn.Linear(6, 6) for _ in range(8)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        return x * self.scale + self.nothing.sum() + self.nothing_wide.sum()


@case
def scalar_and_empty_parameters() -> None:
    with Pair(Shapes) as pair:
        pair.train(steps=3)


@case
def parameters_larger_than_a_bucket_and_many_buckets() -> None:
    with Pair(bucket_bytes=100) as pair:
        pair.train(steps=3)
    with Pair(lambda: nn.Sequential(nn.Linear(6, 3000), nn.Linear(3000, 300)), bucket_bytes=50_000) as pair:
        pair.train(steps=3)


class Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.single = nn.Linear(6, 8)
        self.brain = nn.Linear(8, 8, dtype=torch.bfloat16)
        self.wide = nn.Linear(8, 3, dtype=torch.float64)
        self.single_again = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.brain(self.single(x).bfloat16()).double()
        return self.single_again(self.wide(hidden).float())


@main_case
def mixed_dtypes() -> None:
    with Pair(Mixed) as pair:
        pair.train()


@case
def complex_parameters() -> None:
    with Pair(lambda: nn.Linear(6, 3, dtype=torch.complex64)) as pair:
        pair.train(lambda t: lambda model: model(batch(t).to(torch.complex64)).abs().mean(), steps=3)


@main_case
def channels_last() -> None:
    def make() -> nn.Module:
        model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.Flatten(), nn.Linear(64, 2))
        return model.to(memory_format=torch.channels_last)

    def loss_at(t: int) -> Loss:
        x = batch(t, 2, 3, 8, 8).to(memory_format=torch.channels_last)
        return lambda model: model(x).square().mean()

    with Pair(make) as pair:
        pair.train(loss_at)


@main_case
def sparse_embedding() -> None:
    def make() -> nn.Module:
        return nn.Sequential(nn.Embedding(10, 4, sparse=True), nn.Linear(4, 2))

    def loss_at(t: int) -> Loss:
        rows = torch.tensor([[1, 1, 3], [7, 1, 8]][dist.get_rank()]) + t % 2
        return lambda model: model(rows).square().mean()

    with Pair(make, lambda params: torch.optim.SGD(params, lr=0.1)) as pair:
        pair.train(loss_at)


# Which passes ----------------------------------------------------------------------------------------------


@main_case
def several_forwards_before_one_backward() -> None:
    def loss_at(t: int) -> Loss:
        first, second = batch(t), batch(t + 50)
        return lambda model: (model(first) * model(second).tanh()).square().mean()

    with Pair() as pair:
        pair.train(loss_at)


@main_case
def several_backwards_without_zero_grad() -> None:
    with Pair() as pair:
        for t in range(3):
            pair.zero_grad()
            for k in range(3):
                pair.backward(mean_square(10 * t + k), f"step {t} backward {k}")
            pair.update(f"step {t}")


@main_case
def no_sync_then_sync() -> None:
    with Pair() as pair:
        for t in range(3):
            pair.zero_grad()
            for k in range(3):
                loss = mean_square(10 * t + k)
                for side in pair.sides:
                    with side.no_sync() if k < 2 else contextlib.nullcontext():
                        loss(side.model).backward()
                pair.compare_grads(f"step {t} pass {k}")
            pair.update(f"step {t}")


@case
def no_sync_only_then_a_local_step() -> None:
    with Pair() as pair:
        pair.train(steps=1)
        pair.zero_grad()
        for side in pair.sides:
            with side.no_sync():
                mean_square(7)(side.model).backward()
        pair.compare_grads("local")
        pair.update("local step")


def _windows(pair: Pair, sizes: Iterable[int], accumulate: int) -> None:
    """DDP synchronises the last pass of each window; a short window of ours ends with the step."""
    for w, size in enumerate(sizes):
        pair.zero_grad()
        for k in range(size):
            loss = mean_square(10 * w + k)
            loss(pair.ours.model).backward()
            with pair.theirs.no_sync() if k < size - 1 else contextlib.nullcontext():
                loss(pair.theirs.model).backward()
        if size >= accumulate:
            pair.compare_grads(f"window {w}")
        pair.update(f"window {w}")
        pair.compare_grads(f"after window {w}")


@main_case
def accumulation_with_a_short_last_window() -> None:
    with Pair(accumulate=4) as pair:
        _windows(pair, [4, 4, 2, 4, 1], 4)
        expect(pair.replica.step == 5, f"step is {pair.replica.step} after 5 windows")


@case
def more_passes_than_a_window_before_a_step() -> None:
    with Pair(accumulate=2, rtol=1e-5) as pair:  # a mean and a later one added, where DDP takes one of the sum
        _windows(pair, [2, 3, 2, 5], 6)


@case
def zero_grad_in_place() -> None:
    with Pair() as pair:
        for t in range(4):
            pair.zero_grad(set_to_none=False)
            pair.backward(mean_square(t), f"step {t}")
            pair.update(f"step {t}")


class Fails(torch.autograd.Function):
    on = False

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        if Fails.on:
            raise ArithmeticError("on purpose")
        return grad


class FailsInTheMiddle(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.leave(Fails.apply(self.enter(x)).tanh())


@main_case
def an_error_in_backward_then_a_good_step() -> None:
    with Pair(FailsInTheMiddle) as pair:
        pair.train(steps=2)
        for t in range(2):
            Fails.on = True
            try:
                mean_square(90 + t)(pair.ours.model).backward()
                expect(False, "the error did not come through")
            except ArithmeticError:
                pass
            Fails.on = False
            pair.step(mean_square(80 + t), f"after error {t}")
        pair.train(steps=2)


@case
def checkpointed_activations() -> None:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.enter, self.middle, self.leave = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.leave(checkpoint(self.middle, self.enter(x), use_reentrant=self.reentrant).tanh())

    for Checkpointed.reentrant in (False, True):
        with Pair(Checkpointed) as pair:
            pair.train(steps=3)
            if not Checkpointed.reentrant:  # each re-entrant backward ends with an exchange of its own
                expect(pair.replica.step == 3, f"step is {pair.replica.step} after 3 windows")


@main_case
def double_backward() -> None:
    def loss_at(t: int) -> Loss:
        def loss(model: nn.Module) -> Tensor:
            x = batch(t).requires_grad_(True)
            out = model(x)
            (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
            return out.square().mean() + (slope.norm() - 1.0).square()

        return loss

    with Pair() as pair:
        pair.train(loss_at)


# Around the loop -------------------------------------------------------------------------------------------


@main_case
def gradient_clipping() -> None:
    with Pair() as pair:
        for t in range(4):
            pair.zero_grad()
            pair.backward(mean_square(t))
            norms = [nn.utils.clip_grad_norm_(side.inner.parameters(), 0.01) for side in pair.sides]
            expect_same(norms[0], norms[1], f"norm at step {t}")
            pair.compare_grads(f"clipped at step {t}")
            pair.update(f"step {t}")


@case
def autocast_bf16() -> None:
    def loss_at(t: int) -> Loss:
        def loss(model: nn.Module) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                return model(x).float().square().mean()

        x = batch(t)
        return loss

    with Pair() as pair:
        pair.train(loss_at)


def _amp_step(pair: Pair, scalers: list[torch.amp.GradScaler], passes: list[Tensor], when: str) -> None:
    """A window of passes; DDP synchronises the last."""
    pair.zero_grad()
    for side, scaler in zip(pair.sides, scalers, strict=True):
        for k, x in enumerate(passes):
            theirs_early = side is pair.theirs and k < len(passes) - 1
            with side.no_sync() if theirs_early else contextlib.nullcontext():
                with torch.autocast("cpu", torch.float16):
                    out = side.model(x)
                scaler.scale(out.float().square().mean()).backward()
        scaler.step(side.optimizer)
        scaler.update()
    pair.compare_params(when)
    scales = torch.tensor([scaler.get_scale() for scaler in scalers])
    expect(scales[0] == scales[1], f"{when}: our scale is {scales[0]}, DDP's {scales[1]}")
    other = scales.clone()
    dist.broadcast(other, 0)
    expect(torch.equal(scales, other), f"{when}: the ranks' scales differ: {scales} and {other}")


def _overflows_on_rank_1(x: Tensor) -> Tensor:
    return x * 1e30 if dist.get_rank() == 1 else x


@main_case
def autocast_fp16_with_overflow_on_one_rank() -> None:
    with Pair() as pair:
        scalers = [torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2) for _ in pair.sides]
        for t in range(5):
            before = scalers[0].get_scale()
            _amp_step(pair, scalers, [_overflows_on_rank_1(batch(t)) if t == 2 else batch(t)], f"step {t}")
            expect((scalers[0].get_scale() == before / 2) == (t == 2), f"step {t}: scale {scalers[0].get_scale()}")
        expect(pair.replica.step == 5, f"step is {pair.replica.step}: skipped optimizer steps count as windows")


@case
def a_short_window_after_a_skipped_step() -> None:
    with Pair(accumulate=2) as pair:
        scalers = [torch.amp.GradScaler("cpu", init_scale=1024.0) for _ in pair.sides]
        _amp_step(pair, scalers, [batch(0), batch(1)], "window 0")
        _amp_step(pair, scalers, [batch(2), _overflows_on_rank_1(batch(3))], "skipped window")
        _amp_step(pair, scalers, [batch(4)], "short window")
        _amp_step(pair, scalers, [batch(5), batch(6)], "last window")


@main_case
def optimizers() -> None:
    makers: dict[str, Callable[[Iterable[Tensor]], torch.optim.Optimizer]] = {
        "SGD with Nesterov": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
        "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01),
        "AdamW, one by one": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=False),
        "AdamW, fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    }
    for make in makers.values():
        with Pair(mlp, make) as pair:
            pair.train(steps=3)


@main_case
def lbfgs_with_a_closure() -> None:
    def lbfgs(params: Iterable[Tensor]) -> torch.optim.Optimizer:
        return torch.optim.LBFGS(params, lr=0.1, max_iter=4, tolerance_change=-1.0, tolerance_grad=-1.0)

    for accumulate in (1, 2):
        with Pair(mlp, lbfgs, accumulate=accumulate) as pair:
            for t in range(3):
                loss_at = mean_square(t)
                for side in pair.sides:

                    def closure(side: Any = side, loss: Loss = loss_at) -> Tensor:
                        side.optimizer.zero_grad()
                        value = loss(side.model)
                        value.backward()
                        return value

                    side.optimizer.step(closure)
                pair.compare_grads(f"accumulate={accumulate} step {t}")
                pair.compare_params(f"accumulate={accumulate} step {t}")


@case
def compiled_before_and_after() -> None:
    def compiled(model: nn.Module) -> nn.Module:
        return torch.compile(model, backend="aot_eager")

    with Pair(around=compiled) as pair:
        pair.train(steps=3)
    with Pair() as pair:
        pair.ours.model = compiled(pair.ours.model)
        pair.train(steps=3)


@main_case
def two_models() -> None:
    generator = Pair(lambda: nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 6)))
    critic = Pair(lambda: nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1)))
    with generator, critic:
        for t in range(4):
            for g, c in zip(generator.sides, critic.sides, strict=True):
                c.optimizer.zero_grad()
                fake = g.model(batch(t, 5, 4)).detach()
                (c.model(torch.cat([batch(t + 50, 5, 6), fake])).tanh() * batch(0, 10, 1, rank=0)).mean().backward()
                c.optimizer.step()
                g.optimizer.zero_grad()
                (-c.model(g.model(batch(t + 90, 5, 4))).mean()).backward()  # the critic gets gradients as well
                g.optimizer.step()
            for pair in (critic, generator):
                pair.compare_grads(f"step {t}")
                pair.compare_params(f"step {t}")


# Buffers ---------------------------------------------------------------------------------------------------


def normalised() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 3))


@main_case
def buffers_broadcast() -> None:
    with Pair(normalised, buffers="broadcast") as pair:
        for t in range(4):
            pair.step(mean_square(t), f"step {t}")
            for ours, theirs in zip(pair.ours.inner.buffers(), pair.theirs.inner.buffers(), strict=True):
                rank0 = theirs.clone()  # DDP sends rank 0's before the next forward, Unisono after backward
                dist.broadcast(rank0, 0)
                expect_same(ours, rank0, f"buffers at step {t}")


@main_case
def buffers_local() -> None:
    with Pair(normalised, ddp={"broadcast_buffers": False}, buffers="local") as pair:
        for t in range(4):
            pair.step(mean_square(t), f"step {t}")
            for ours, theirs in zip(pair.ours.inner.buffers(), pair.theirs.inner.buffers(), strict=True):
                expect_same(ours, theirs, f"buffers at step {t}")


@main_case
def buffers_average() -> None:
    """DDP cannot: its buffers stay local, and are averaged by hand after each step."""
    with Pair(normalised, ddp={"broadcast_buffers": False}, buffers="average") as pair:
        for t in range(4):
            pair.step(mean_square(t), f"step {t}")
            for ours, theirs in zip(pair.ours.inner.buffers(), pair.theirs.inner.buffers(), strict=True):
                if theirs.is_floating_point():
                    theirs.mul_(0.5)
                    dist.all_reduce(theirs)
                expect_same(ours, theirs, f"buffers at step {t}")


# Beyond DDP: against gradients averaged by hand -----------------------------------------------------------


def _averaged_by_hand(model: nn.Module) -> None:
    for param in model.parameters():
        grad = torch.zeros_like(param) if param.grad is None else param.grad.to_dense()
        dist.all_reduce(grad.mul_(0.5))
        param.grad = grad


@main_case
def a_rank_whose_loss_does_not_touch_the_model() -> None:
    with Pair() as pair:
        pair.theirs.model = pair.theirs.inner
        for t in range(5):
            pair.zero_grad()
            idle = t in (1, 3) and dist.get_rank() == t // 2
            loss = (lambda model: torch.zeros((), requires_grad=True) * 2) if idle else mean_square(t)
            loss(pair.ours.model).backward()
            pair.ours.optimizer.step()  # an idle rank takes part here: no other exchange may come before
            loss(pair.theirs.model).backward()
            _averaged_by_hand(pair.theirs.inner)
            pair.theirs.optimizer.step()
            pair.compare_grads(f"after step {t}")
            pair.compare_params(f"after step {t}")


@case
def sparse_gradients_missing_on_one_rank_or_all() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.layer = nn.Embedding(10, 4, sparse=True), nn.Linear(4, 2)

        def forward(self, rows: Tensor | None) -> Tensor:
            return self.layer(self.table(rows) if rows is not None else torch.ones(3, 4))

    with Pair(Two, lambda params: torch.optim.SGD(params, lr=0.1)) as pair:
        pair.theirs.model = pair.theirs.inner
        for t in range(4):
            pair.zero_grad()
            used = t != 3 and (t != 1 or dist.get_rank() == 0)
            rows = torch.tensor([1, 2, 2]) + dist.get_rank() if used else None
            for side in pair.sides:
                side.model(rows).square().mean().backward()
            if t == 3:
                expect(pair.ours.inner.table.weight.grad is None, "a table unused everywhere has a gradient")
            _averaged_by_hand(pair.theirs.inner)
            pair.update(f"step {t}")


@case
def gradients_outlive_the_replica() -> None:
    with Pair(optimizer=sgd) as pair:
        pair.train(steps=2)
        pair.zero_grad()
        pair.backward(mean_square(5))
    pair.compare_grads("after close")
    pair.update("after close")
    pair.zero_grad()
    loss = mean_square(6)(pair.ours.model)
    loss.backward()
    for side in pair.sides:
        local = torch.autograd.grad(mean_square(6)(side.inner), list(side.inner.parameters()))
        if side is pair.ours:
            for param, grad in zip(side.inner.parameters(), local, strict=True):
                expect_same(param.grad, grad, "a gradient after close is local")
