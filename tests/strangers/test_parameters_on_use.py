"""Stage 3 splits the parameters: programs that use them elsewhere than in a call of the model train as in one process.

Units of every size give the same bits; so does every way to get at a parameter.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from stranger_programs import furthest, seeded, values
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.checkpoint import checkpoint

import unisono as un
from unisono.world import Mismatch, World
from unisono.world.virtual import run_threads

RANKS, STEPS = 2, 2
UNIT_BYTES = ["200", "1000", "40000", "1048576", "None", "1073741824"]


class Net(nn.Module):
    """An encoder, a head that shares a weight with it, and a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
        self.head = nn.Linear(8, 8)
        self.head.weight = self.encoder[2].weight  # type: ignore[assignment, union-attr]
        self.scale = nn.Parameter(torch.full((8, 1), 0.3))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(self.head(self.encoder(x)), self.scale.t())


def net() -> Any:
    return seeded(lambda: Net().double())


def batch(step: int, rank: int) -> Tensor:
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(10 * step + rank)).double()


def one_by_one(model: Any, x: Tensor) -> Tensor:
    for layer in model.encoder:
        x = layer(x)
    return (model.head(x) @ model.scale).square().mean()


def in_parts(model: Any, x: Tensor) -> Tensor:
    return model.head(model.encoder(x)).square().mean() + model.scale.mean()


def recomputed(model: Any, x: Tensor) -> Tensor:
    h = checkpoint(model.encoder[:3], x, use_reentrant=False)
    return model.head(checkpoint(model.encoder[3:], h, use_reentrant=False)).square().mean()


def without_calls(model: Any, x: Tensor) -> Tensor:
    """As PEFT runs the model inside its own."""
    return model.forward(copy.copy(model.encoder)(model.encoder.forward(x)[:, :4])[:, :4]).square().mean()


def penalised(model: Any, x: Tensor) -> Tensor:
    x = x.clone().requires_grad_()
    out = model(x)
    (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    return out.square().mean() + (slope.norm(2, dim=1) - 1).square().mean()


def decayed(model: Any, x: Tensor) -> Tensor:
    before = sum((p * p).sum() for p in model.parameters())
    loss = model(x).square().mean()
    return loss + 0.01 * before + 0.02 * sum(p.pow(4).sum() for p in model.parameters())


def functional(model: Any, x: Tensor) -> Tensor:
    doubled = {name: 2 * p for name, p in model.named_parameters() if name != "head.weight"}
    detached = {name: p.detach() for name, p in model.named_parameters()}
    slopes = torch.func.grad(lambda p: torch.func.functional_call(model, p, (torch.ones(1, 4).double(),)).sum())(
        detached
    )
    factor = 1 + sum(slope.square().sum() for slope in slopes.values())
    return factor * (torch.func.functional_call(model, doubled, (x,)) - model(x)).square().mean()


def evaluated(model: Any, x: Tensor) -> Tensor:
    with torch.inference_mode():
        seen = model.head(model.encoder(torch.ones(1, 4).double())).mean().item()
    return (model.head(model.encoder(x)) - seen).square().mean()


def differentiated(model: Any, x: Tensor) -> Tensor:
    """A forward that differentiates itself, as that of energies and forces."""

    def differentiate(_module: nn.Module, _given: Any, out: Tensor) -> Tensor:
        return out + torch.autograd.grad(out.sum(), x, create_graph=True)[0].sum(1, keepdim=True)

    x = x.clone().requires_grad_()
    handle = model.encoder.register_forward_hook(differentiate)
    try:
        return model(x).square().mean()
    finally:
        handle.remove()


def copied(model: Any, x: Tensor) -> Tensor:
    target = copy.deepcopy(model).requires_grad_(False)
    return (model(x) - 0.9 * target(x) + 1).square().mean()


LOSSES = [
    *(one_by_one, in_parts, recomputed, without_calls, penalised, decayed, functional, evaluated, differentiated),
    copied,
]


def train(
    model: Any,
    step: Callable[[Any, Any, int], None],
    spec: str = "",
    world: World | None = None,
) -> list[Tensor]:
    """`step(model, optimizer, number)`; the model's values at the end."""
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    if spec:
        un.parallel(model, optimizer, spec, world=world)
    for number in range(STEPS):
        step(model, optimizer, number)
    return values(model)


def in_one_process(step: Callable[[Any, Any, Tensor], None]) -> list[Tensor]:
    return train(net(), lambda m, o, t: step(m, o, torch.cat([batch(t, r) for r in range(RANKS)])))


def on_ranks(step: Callable[[Any, Any, Tensor], None], spec: str) -> list[list[Tensor]]:
    return run_threads(lambda w: train(net(), lambda m, o, t: step(m, o, batch(t, w.rank)), spec, w), RANKS)


@pytest.mark.parametrize("loss_of", LOSSES, ids=lambda f: f.__name__)
def test_whatever_uses_a_parameter_has_its_values_in_units_of_any_size(loss_of: Callable[..., Tensor]) -> None:
    def step(model: Any, optimizer: Any, x: Tensor) -> None:
        optimizer.zero_grad()
        loss_of(model, x).backward()
        optimizer.step()

    expected = in_one_process(step)
    found = [x for size in UNIT_BYTES for x in on_ranks(step, f"zero(stage=3, unit_bytes={size})")]
    assert furthest(found[0], expected) < 1e-12
    assert all(torch.equal(x, y) for one in found for x, y in zip(one, found[0], strict=True))


def test_the_same_with_units_that_come_ahead_and_state_off_the_device() -> None:
    def step(model: Any, optimizer: Any, x: Tensor) -> None:
        optimizer.zero_grad()
        sum(loss_of(model, x) for loss_of in LOSSES).backward()
        optimizer.step()

    expected = in_one_process(step)
    for more in ("overlap=True", "optimizer_on=cpu", "optimizer_on=disk, params_on=disk", "spare=True"):
        for found in on_ranks(step, f"zero(stage=3, unit_bytes=1000, {more})"):
            assert furthest(found, expected) < 1e-12, more


# Copies and averages ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", ["zero(stage=3, unit_bytes=300)", "zero(stage=3)", "zero(stage=2, optimizer_on=cpu)"])
def test_an_average_of_parameters_and_the_best_copy_are_those_of_one_process(spec: str) -> None:
    def run(x_of: Callable[[int], Tensor], spec: str = "", world: World | None = None) -> list[Tensor]:
        model = best = net()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        if spec:
            un.parallel(model, optimizer, spec, world=world)
        averages = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
        for step in range(3):
            optimizer.zero_grad()
            model(x_of(step)).square().mean().backward()
            optimizer.step()
            averages.update_parameters(model)
            if step == 1:
                best = copy.deepcopy(model)
        with torch.no_grad():
            seen = [averages(batch(9, 0)), pickle.loads(pickle.dumps(best))(batch(9, 0))]
        return [*values(averages.module), *values(best), parameters_to_vector(model.parameters()).detach(), *seen]

    expected = run(lambda t: torch.cat([batch(t, r) for r in range(RANKS)]))
    for found in run_threads(lambda w: run(lambda t: batch(t, w.rank), spec, w), RANKS):
        assert furthest(found, expected) < 1e-12


# What the program writes to parameters by itself -----------------------------------------------------------------


def set_vector(model: Any) -> None:
    vector_to_parameters(parameters_to_vector(model.parameters()).detach() * 0.5 + 0.01, model.parameters())


def set_data(model: Any) -> None:
    model.head.bias.data = torch.full((8,), 0.25).double()


def copy_in(model: Any) -> None:
    with torch.no_grad():
        model.encoder[0].weight.copy_(torch.ones(8, 4))


def clamp(model: Any) -> None:
    with torch.no_grad():
        for p in model.parameters():
            p.clamp_(-0.1, 0.1)


def decay_data(model: Any) -> None:
    for p in model.parameters():
        p.data.mul_(0.5)


WRITES = [set_vector, set_data, copy_in, clamp, decay_data]


@pytest.mark.parametrize("write", WRITES, ids=lambda f: f.__name__)
@pytest.mark.parametrize("when", ["before the step", "after the step"])
def test_what_a_program_writes_to_parameters_counts(write: Callable[[Any], None], when: str) -> None:
    def step(model: Any, optimizer: Any, x: Tensor) -> None:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        if when == "before the step":
            write(model)
        optimizer.step()
        if when == "after the step":
            write(model)

    expected = in_one_process(step)
    for more in ("", "unit_bytes=300", "optimizer_on=cpu, unit_bytes=300", "optimizer_on=disk", "spare=True"):
        for found in on_ranks(step, f"zero(stage=3, {more})".replace(", )", ")")):
            assert furthest(found, expected) < 1e-12, more


@pytest.mark.parametrize("more", ["", ", optimizer_on=cpu"])
def test_in_bf16_a_write_counts_and_what_it_left_keeps_its_precision(more: str) -> None:
    def work(world: World) -> None:
        model = net().float()
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
        replica = un.parallel(model, optimizer, f"zero(stage=3, precision=bf16{more})", world=world)
        for step in range(3):
            optimizer.zero_grad()
            model(batch(step, world.rank).float()).square().mean().backward()
            optimizer.step()
            clamp(model)
        replica.restore()
        replica.close()
        limit = torch.tensor(0.1).bfloat16().item()
        assert max(float(p.detach().abs().max()) for p in model.parameters()) == pytest.approx(limit, abs=1e-3)
        first = model.encoder[0].weight
        kept = first.abs() < 0.09
        assert (first[kept] != first[kept].bfloat16()).any()

    run_threads(work, RANKS)


# What one rank does alone ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("alone", "named"),
    [
        (lambda model: model.state_dict(), "model.state_dict()"),
        (copy.deepcopy, "deepcopy of 'scale'"),
        (lambda model: model.head.bias.norm(), "norm of 'head.bias'"),
    ],
    ids=["state_dict", "deepcopy", "a norm"],
)
@pytest.mark.parametrize("overlap", [True, False])
def test_what_one_rank_does_alone_is_named_on_every_rank(
    alone: Callable[[Any], Any], named: str, overlap: bool
) -> None:
    def work(world: World) -> str:
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        un.parallel(model, optimizer, f"zero(stage=3, unit_bytes=300, overlap={overlap})", world=world)

        def loop() -> None:
            for step in range(4):
                optimizer.zero_grad()
                model(batch(step, world.rank)).square().mean().backward()
                optimizer.step()
                if world.rank == 0 and step == 1:
                    alone(model)

        with pytest.raises(Mismatch) as error:
            loop()
        return str(error.value)

    for text in run_threads(work, RANKS):
        assert named in text
        assert "test_parameters_on_use.py" in text
        assert "all_gather" in text
