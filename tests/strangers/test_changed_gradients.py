"""Programs that change gradients, or set them: in hooks, through `.data`, by torch.func.grad, around a step."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from stranger_programs import furthest, mlp, seeded, values
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import TensorDataset

import unisono as un
from unisono.world import World
from unisono.world.virtual import run_threads

OVERLAPPING = "allreduce(overlap=True, bucket_bytes=64)"
SPECS = [OVERLAPPING, "shared", "zero(stage=1)", "zero(stage=3, unit_bytes=64)", "zero(stage=2, optimizer_on=cpu)"]
EXACT = SPECS[:4]
every_method = pytest.mark.parametrize("spec", SPECS)
Program = Callable[[nn.Module, Any, Callable[[], Any], list[int]], Any]


def loss(model: nn.Module, step: int, ranks: list[int]) -> Tensor:
    each = [torch.Generator().manual_seed(10 * step + rank) for rank in ranks]
    x = torch.cat([torch.randn(3, 4, dtype=torch.float64, generator=g) for g in each])
    return (model(x) - x.sum(1, keepdim=True)).square().mean()


def run_both(spec: str, program: Program, *, make: Callable[[], nn.Module] = mlp, size: int = 2) -> None:
    """`program(model, optimizer, bind, ranks)` in one process on all samples, and on every rank on its own: the same
    model. `bind(spec)` is un.parallel, or nothing."""

    def train(ranks: list[int], world: World | None) -> list[Tensor]:
        model = make()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

        def bind() -> Any:
            return None if world is None else un.parallel(model, optimizer, spec, world=world)

        program(model, optimizer, bind, ranks)
        return values(model)

    expected = train(list(range(size)), None)
    for found in run_threads(lambda world: train([world.rank], world), size):
        assert furthest(found, expected) < 1e-12


def halve(param: Tensor) -> None:
    assert param.grad is not None
    param.grad.mul_(0.5)


@pytest.mark.parametrize("clear", ["none", "zero", "keep"])
@pytest.mark.parametrize("late", [False, True])
@every_method
def test_hooks_that_change_gradients_as_they_accumulate(spec: str, late: bool, clear: str) -> None:
    """Before `un.parallel` or after it; a rank that does not use a parameter runs no hook of it."""
    if clear == "keep" and "optimizer_on" in spec:
        pytest.skip("refused: what was stepped with has left")

    def program(model: Any, optimizer: Any, bind: Any, ranks: list[int]) -> None:
        bound = bind() if late else None
        for param in model.parameters():
            param.register_post_accumulate_grad_hook(halve)
        bound = bound or bind()
        for step in range(3):
            if clear != "keep":
                optimizer.zero_grad(set_to_none=clear == "none")
            loss(model, step, ranks).backward()
            optimizer.step()

    run_both(spec, program)


@pytest.mark.parametrize("late", [False, True])
@every_method
def test_hooks_of_the_optimizer_change_gradients_and_weights(spec: str, late: bool) -> None:
    """Before each step all gradients are halved, after it the weights are bounded; registered at any time."""

    def change(optimizer: Any, *_: Any) -> None:
        for param in optimizer.param_groups[0]["params"]:
            halve(param)

    @torch.no_grad()
    def bound(optimizer: Any, *_: Any) -> None:
        for param in optimizer.param_groups[0]["params"]:
            param.clamp_(-0.4, 0.4)

    def program(model: Any, optimizer: Any, bind: Any, ranks: list[int]) -> None:
        made = bind() if late else None
        optimizer.register_step_pre_hook(change)
        if "optimizer_on" not in spec:  # there a write is refused, with what to use
            optimizer.register_step_post_hook(bound)
        made = made or bind()
        for step in range(3):
            optimizer.zero_grad()
            loss(model, step, ranks).backward()
            optimizer.step()

    run_both(spec, program)


@pytest.mark.parametrize("spec", ["allreduce(overlap=True, bucket_bytes=64)", "allreduce(overlap=False)", "shared"])
def test_other_memory_for_a_gradient(spec: str) -> None:
    def program(model: Any, optimizer: Any, bind: Any, ranks: list[int]) -> None:
        made = bind()
        for step in range(4):
            optimizer.zero_grad(set_to_none=step % 2 == 0)
            loss(model, step, ranks).backward()
            for param in model.parameters():
                param.grad.data = param.grad.data * 0.5
            optimizer.step()
        del made

    run_both(spec, program)


@pytest.mark.parametrize("spec", EXACT)
def test_a_gradient_that_is_scaled_after_the_step_counts_so_in_the_next(spec: str) -> None:
    """A decayed sum of gradients, kept in `p.grad`."""
    if spec == "shared":
        pytest.skip("refused: it has been stepped with")

    def program(model: Any, optimizer: Any, bind: Any, ranks: list[int]) -> None:
        made = bind()
        for step in range(3):
            loss(model, step, ranks).backward()
            optimizer.step()
            for param in model.parameters():
                halve(param)
        del made

    run_both(spec, program)


@pytest.mark.parametrize("how", ["autograd", "func"])
@every_method
def test_gradients_that_the_program_sets_count_by_the_weight_of_their_batch(spec: str, how: str) -> None:
    """Five samples on two ranks, three and two; the last batch has three, two and one."""
    x = seeded(lambda: torch.randn(13, 4, dtype=torch.float64))

    def batches(world: World | None) -> Iterator[Tensor]:
        if world is None:
            return iter([x[:5], x[5:10], x[10:]])
        return (b for (b,) in un.shard(TensorDataset(x), 5, shuffle=False, drop_last=False, world=world))

    def train(world: World | None) -> list[Tensor]:
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        replica = None if world is None else un.parallel(model, optimizer, spec, world=world)
        for batch in batches(world):
            optimizer.zero_grad()
            params = dict(model.named_parameters())

            def compute(given: Any, batch: Tensor = batch) -> Tensor:
                found: Tensor = torch.func.functional_call(model, given, (batch,))
                return found.square().mean()

            if how == "func":
                grads = torch.func.grad(compute)({name: p.detach() for name, p in params.items()})
            else:
                found = torch.autograd.grad(model(batch).square().mean(), [*params.values()])
                grads = dict(zip(params, found, strict=True))
            for name, param in params.items():
                param.grad = grads[name]
            optimizer.step()
        trained = values(model)
        del replica
        return trained

    expected = train(None)
    for found in run_threads(train, 2):
        assert furthest(found, expected) < 1e-12


@pytest.mark.parametrize("line_search", [None, "strong_wolfe"])
def test_lbfgs_decides_by_the_loss_of_all_ranks(line_search: str | None) -> None:
    """The parts of the ranks differ tenfold: by its own loss each would take a step of its own."""

    def train(ranks: list[int], world: World | None) -> list[Tensor]:
        model = mlp()
        optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=6, line_search_fn=line_search)
        replica = None if world is None else un.parallel(model, optimizer, "allreduce", world=world)

        def closure() -> Tensor:
            optimizer.zero_grad()
            each = [loss(model, 7, [rank]) * 10**rank for rank in ranks]
            total = torch.stack(each).mean()
            total.backward()
            return total

        for _ in range(3):
            optimizer.step(closure)
        found = values(model)
        del replica
        return found

    expected = train([0, 1], None)
    for found in run_threads(lambda world: train([world.rank], world), 2):
        assert furthest(found, expected) < 1e-9


def test_what_has_added_up_inside_no_sync_alone_is_exchanged_by_sync() -> None:
    def program(model: Any, optimizer: Any, bind: Any, ranks: list[int]) -> None:
        replica = bind()
        for step in range(2):
            optimizer.zero_grad()
            if replica is None:
                loss(model, step, ranks).backward()
            else:
                with replica.no_sync():
                    loss(model, step, ranks).backward()
                replica.sync()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()

    run_both("allreduce", program)


class TwoKinds(nn.Module):
    """Layers in fp64, and a last one in fp32."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.o = nn.Linear(4, 8).double(), nn.Linear(8, 8).double(), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.o(self.b(torch.tanh(self.a(x))).float()).double()
        return found


def test_the_noise_scale_is_measured_of_parameters_of_several_dtypes() -> None:
    def work(world: World) -> int:
        model = seeded(TwoKinds)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        replica = un.parallel(model, optimizer, "allreduce(overlap=True, bucket_bytes=64)", world=world)
        assert replica.noise is not None
        replica.noise.every = 1
        for step in range(2):
            optimizer.zero_grad()
            loss(model, step, [world.rank]).backward()
            optimizer.step()
        return replica.noise.measured

    assert min(run_threads(work, 2)) > 0


@pytest.mark.parametrize("how", ["no_sync", "accumulate"])
def test_gradients_that_were_not_cleared_are_refused_where_they_have_left(how: str) -> None:
    """Also if the passes of the next window are several."""

    def work(world: World) -> None:
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        more = ", accumulate=2" if how == "accumulate" else ""
        replica = un.parallel(model, optimizer, f"zero(stage=2, optimizer_on=cpu{more})", world=world)

        def train() -> None:
            with replica.no_sync() if how == "no_sync" else nullcontext():
                loss(model, 0, [world.rank]).backward()
            loss(model, 1, [world.rank]).backward()
            optimizer.step()

        train()
        with pytest.raises(RuntimeError, match=r"have not been cleared.* call optimizer\.zero_grad\(\)"):
            train()

    run_threads(work, 2)


class Checkpointed(nn.Module):
    """The middle runs again in backward, by a backward pass inside the pass."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.o = nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.o(checkpoint(self.b, torch.tanh(self.a(x)), use_reentrant=True))
        return found


@pytest.mark.parametrize("overlap", [False, True])
def test_a_pass_inside_a_pass_keeps_what_was_reduced_before_it(overlap: bool) -> None:
    """Of the last layer, whose unit is complete before the pass inside begins."""

    def program(model: Any, optimizer: Any, bind: Any, ranks: list[int]) -> None:
        made = bind()
        for step in range(3):
            optimizer.zero_grad()
            loss(model, step, ranks).backward()
            optimizer.step()
        del made

    run_both(f"zero(stage=1, unit_bytes=64, overlap={overlap})", program, make=lambda: seeded(Checkpointed).double())


def test_a_loaded_state_counts_steps_of_each_parameter_by_itself() -> None:
    """One takes no part in the first step after it is loaded; the optimizer steps by its own code."""

    def train(ranks: list[int], world: World | None) -> list[Tensor]:
        model = mlp()
        optimizer = torch.optim.Adamax(model.parameters(), lr=0.05)
        replica = None if world is None else un.parallel(model, optimizer, "shared", world=world)
        for step in range(4):
            if step == 2:
                optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
            optimizer.zero_grad()
            model[2].requires_grad_(step != 2)  # type: ignore[index, operator]
            loss(model, step, ranks).backward()
            optimizer.step()
        found = values(model)
        del replica
        return found

    expected = train([0, 1], None)
    for found in run_threads(lambda world: train([world.rank], world), 2):
        assert furthest(found, expected) < 1e-12
