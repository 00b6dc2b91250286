"""What programs write to parameters by themselves where ranks have one model, or masters of higher precision: SAM,
clipped weights, states that are loaded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from stranger_programs import furthest, mlp, seeded, values
from torch import Tensor, nn

import unisono as un
from unisono.world import World
from unisono.world.virtual import run_threads

SIZE = 2
WHOLE = ["shared", "zero(stage=1)", "zero(stage=2)", "zero(stage=2, spare=True)"]  # as one process writes
NARROW = ["", ", spare=True", ", unit_bytes=64"]
Loop = Callable[[nn.Module, Any, list[int]], Any]


def batch(step: int, ranks: list[int]) -> Tensor:
    each = [torch.Generator().manual_seed(10 * step + rank) for rank in ranks]
    return torch.cat([torch.randn(3, 4, dtype=torch.float64, generator=g) for g in each])


def step(model: nn.Module, optimizer: Any, t: int, ranks: list[int]) -> None:
    optimizer.zero_grad()
    model(batch(t, ranks)).square().mean().backward()
    optimizer.step()


def run_both(spec: str, loop: Loop) -> None:
    """The loop in one process on all samples, and on every rank on its own samples: the same model."""
    alone = mlp()
    loop(alone, torch.optim.SGD(alone.parameters(), lr=0.1, momentum=0.9), list(range(SIZE)))

    def work(world: World) -> list[Tensor]:
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        un.parallel(model, optimizer, spec, world=world)
        loop(model, optimizer, [world.rank])
        return values(model)

    for found in run_threads(work, SIZE):
        assert furthest(found, values(alone)) < 1e-12


@pytest.mark.parametrize("spec", [*WHOLE, "allreduce"])
@pytest.mark.parametrize("back", ["sub_", "data", "copy_"])
def test_sharpness_aware_steps_are_those_of_one_process(spec: str, back: str) -> None:
    def loop(model: nn.Module, optimizer: Any, ranks: list[int]) -> None:
        for t in range(4):
            optimizer.zero_grad()
            model(batch(t, ranks)).square().mean().backward()
            norm = torch.norm(torch.stack([p.grad.norm() for p in model.parameters()]))
            climbs, before = [], [p.detach().clone() for p in model.parameters()]
            with torch.no_grad():
                for p in model.parameters():
                    whole = p.grad.full() if hasattr(p.grad, "full") else p.grad  # what zero asks for
                    climbs.append(whole * (0.5 / norm))
                    p.add_(climbs[-1])
            optimizer.zero_grad()
            model(batch(t, ranks)).square().mean().backward()
            with torch.no_grad():
                for p, climb, value in zip(model.parameters(), climbs, before, strict=True):
                    if back == "sub_":
                        p.sub_(climb)
                    elif back == "data":
                        p.data = value
                    else:
                        p.data.copy_(value)
            optimizer.step()

    run_both(spec, loop)


@pytest.mark.parametrize("spec", WHOLE)
def test_weights_that_are_clipped_scaled_and_loaded_are_those_of_one_process(spec: str) -> None:
    def loop(model: nn.Module, optimizer: Any, ranks: list[int]) -> None:
        start = {name: x.detach().clone() for name, x in model.state_dict().items()}
        for t in range(6):
            step(model, optimizer, t, ranks)
            with torch.no_grad():
                for p in model.parameters():
                    if t < 2:
                        p.clamp_(-0.2, 0.2)
                    elif t == 2:
                        p.data.mul_(0.9)
                    elif t == 3:
                        p.data.view(-1)[0] += 0.5  # of one element, past PyTorch's counters
            if t == 4:
                model.load_state_dict(start)

    run_both(spec, loop)


def make_small() -> nn.Module:
    return seeded(lambda: nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)))


@pytest.mark.parametrize("extra", NARROW)
@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("kind", ["precision", "dtype"])
def test_what_is_written_in_16_bits_reaches_what_the_optimizer_steps(stage: int, extra: str, kind: str) -> None:
    """Clipped to 0.1 and loaded: a small step later it is still there, and what was not written keeps 32 bits."""

    def work(world: World) -> tuple[list[Tensor], list[Tensor]]:
        model = make_small().to(torch.bfloat16 if kind == "dtype" else torch.float32)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
        narrow = ", precision='bf16'" if kind == "precision" else ""
        replica = un.parallel(model, optimizer, f"zero(stage={stage}{extra}{narrow})", world=world)
        x = batch(0, [world.rank]).to(torch.bfloat16)
        found = []
        for t in range(6):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
            found.append(max(float(p.detach().abs().max()) for p in model.parameters()))
            with torch.no_grad():
                for p in model.parameters():
                    if t == 1:
                        p.clamp_(-0.1, 0.1)
                    elif t == 2:
                        p.data.clamp_(-0.05, 0.05)
            if t == 3:
                model.load_state_dict({name: torch.full_like(p, 0.5) for name, p in model.state_dict().items()})
            elif t == 4:
                replica.write(lambda: model[0].weight.fill_(2.0))  # type: ignore[operator, union-attr]
        return torch.tensor(found), values(model)

    first, second = run_threads(work, SIZE)
    expected = torch.tensor([0.48, 0.48, 0.1, 0.05, 0.5, 2.0])
    for found, model in (first, second):
        torch.testing.assert_close(found, expected, rtol=0.05, atol=2e-3)
        assert furthest(model, first[1]) == 0.0


def test_small_steps_add_up_in_32_bits_beside_what_is_written() -> None:
    """Each is less than a bf16 number can show; a clip that leaves most values alone does not round them."""

    def work(world: World) -> float:
        model = nn.Linear(1, 2, bias=False)
        nn.init.ones_(model.weight)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        un.parallel(model, optimizer, "zero(stage=2, precision='bf16')", world=world)
        for _ in range(16):
            optimizer.zero_grad()
            model(torch.ones(1, 1)).sum().backward()
            optimizer.step()
            with torch.no_grad():
                model.weight.clamp_(-3.0, 3.0)
        return float(model.weight.detach()[0])

    for found in run_threads(work, SIZE):
        assert found == pytest.approx(1.0 - 16e-3, abs=2**-8)


@pytest.mark.parametrize("past_counters", [False, True])
@pytest.mark.parametrize("spec", ["zero(stage=1, optimizer_on=cpu)", "zero(stage=2, optimizer_on=cpu, precision=bf16)"])
def test_a_write_beside_an_optimizer_off_the_device_is_refused_with_what_to_use(spec: str, past_counters: bool) -> None:
    def work(world: World) -> float:
        model = make_small()
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
        replica = un.parallel(model, optimizer, spec, world=world)
        x = batch(0, [world.rank]).float()

        def train() -> None:
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()

        def clamp() -> None:
            with torch.no_grad():
                for p in model.parameters():
                    p.clamp_(-0.1, 0.1)

        train()
        replica.write(clamp)
        train()
        found = max(float(p.detach().abs().max()) for p in model.state_dict().values())
        if past_counters:
            model[0].weight.data.mul_(0.5)  # type: ignore[operator, union-attr]
        else:
            clamp()
        with pytest.raises(ValueError, match=r"'0\.weight' was written to .* write in replica\.write\(function\)"):
            train()
        return found

    assert all(found < 0.101 for found in run_threads(work, SIZE))


@pytest.mark.parametrize("spec", ["shared", "zero(stage=2)"])
@pytest.mark.parametrize("past_counters", [False, True])
def test_what_one_rank_alone_writes_is_named(spec: str, past_counters: bool) -> None:
    def work(world: World) -> None:
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        un.parallel(model, optimizer, spec, world=world)
        step(model, optimizer, 0, [world.rank])
        if world.rank == 1:
            bias = model[2].bias.data if past_counters else model[2].bias.detach()  # type: ignore[index, union-attr]
            bias.add_(1.0)
        step(model, optimizer, 1, [world.rank])

    with pytest.raises(ValueError, match=r"local rank\(s\) 1 wrote to parameter '2\.bias'.*rank\(s\) 0 did not"):
        run_threads(work, SIZE)
