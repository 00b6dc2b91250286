"""What programs do with `optimizer.state` between steps: the numbers of one process, or an error."""

from __future__ import annotations

import copy
import pickle
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import unisono as un

Program = Callable[[nn.Sequential, Optimizer], None]
ZERO = [
    "zero(stage=1)",
    "zero(stage=2, optimizer_on='cpu')",
    "zero(stage=2, optimizer_on='disk')",
    "zero(stage=3)",
    "zero(stage=3, optimizer_on='cpu', params_on='cpu')",
]


def clear(_: nn.Sequential, optimizer: Optimizer) -> None:
    optimizer.state.clear()
    assert not optimizer.state


def replace(_: nn.Sequential, optimizer: Optimizer) -> None:
    optimizer.state = defaultdict(dict)


def delete_some(model: nn.Sequential, optimizer: Optimizer) -> None:
    for param in (model[0].weight, model[3]):
        if param in optimizer.state:
            del optimizer.state[param]
    optimizer.state.pop(model[2].bias, None)
    optimizer.state[model[0].bias] = {}
    assert not [p for p in model[0].parameters() if optimizer.state.get(p)]


def halve_loaded(_: nn.Sequential, optimizer: Optimizer) -> None:
    state = copy.deepcopy(optimizer.state_dict())
    for entry in state["state"].values():
        entry["exp_avg"].mul_(0.5)
    optimizer.load_state_dict(state)


def read(model: nn.Sequential, optimizer: Optimizer) -> None:
    held = [p for p in model.parameters() if p is not model[3].unused]
    assert list(optimizer.state) == held
    assert [p in optimizer.state for p in model.parameters()] == [p in set(held) for p in model.parameters()]
    assert {float(state["step"]) for state in optimizer.state.values()} == {3.0}
    assert {*optimizer.state[held[0]]} == {"step", "exp_avg", "exp_avg_sq"}


def halve(model: nn.Sequential, optimizer: Optimizer) -> None:
    for param in model.parameters():
        if param in optimizer.state:
            optimizer.state[param]["exp_avg"].mul_(0.5)
            optimizer.state[param]["exp_avg_sq"] = optimizer.state[param]["exp_avg_sq"] * 0.25


def halve_and_load(model: nn.Sequential, optimizer: Optimizer) -> None:
    before = copy.deepcopy(optimizer.state_dict())
    halve(model, optimizer)
    optimizer.load_state_dict(before)


class Leaving(nn.Module):
    """A parameter that gets no gradient, and has no state."""

    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Parameter(torch.ones(2, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return x


def make() -> tuple[nn.Sequential, Optimizer]:
    model = nn.Sequential(nn.Linear(5, 24), nn.Tanh(), nn.Linear(24, 3), Leaving()).double()
    for i, param in enumerate(model[:3].parameters()):
        param.data = torch.linspace(-1, 1, param.numel(), dtype=torch.float64).mul(i + 1).sin().view(param.shape)
    return model, torch.optim.AdamW(model.parameters(), lr=0.05)


def train(program: Program, world: un.World | None, spec: str = "", steps: int = 5) -> tuple[list[Tensor], Any]:
    """In one process: both ranks' samples."""
    model, optimizer = make()
    replica = None if world is None else un.parallel(model, optimizer, spec)
    ranks = range(2) if world is None else [world.rank]
    for step in range(steps):
        if step == 3:
            program(model, optimizer)
        optimizer.zero_grad()
        found = [torch.arange(20, dtype=torch.float64).add(7 * step + rank).cos().view(4, 5) for rank in ranks]
        (sum(model(x).square().mean() for x in found) / len(found)).backward()
        optimizer.step()
    if replica is not None:
        replica.restore()
        replica.close()
    return [p.detach().clone() for p in model.parameters()], optimizer.state


@pytest.mark.parametrize(
    ("spec", "program"),
    [
        (spec, program)
        for spec in [*ZERO, "shared"]
        for program in (clear, replace, delete_some, halve_loaded, read)
        if program is not halve_loaded or "disk" not in spec  # which state_dict() refuses there
    ]
    + [("shared", halve), ("shared", halve_and_load)],
)
def test_clearing_loading_and_counting_are_those_of_one_process(spec: str, program: Program) -> None:
    right, _ = train(program, None)
    for found, state in un.run_threads(lambda world: train(program, world, spec), 2):
        torch.testing.assert_close(found, right, rtol=1e-12, atol=1e-14)
        assert type(state) is defaultdict
        assert len(state) == 4


def zero_moment(model: nn.Sequential, optimizer: Optimizer) -> None:
    for param in model.parameters():
        if param in optimizer.state:
            optimizer.state[param]["exp_avg"].zero_()


def set_moment(model: nn.Sequential, optimizer: Optimizer) -> None:
    optimizer.state[model[0].weight]["exp_avg"] = torch.zeros(24, 5)


def set_count(model: nn.Sequential, optimizer: Optimizer) -> None:
    optimizer.state[model[0].weight]["step"].zero_()


def put_another(model: nn.Sequential, optimizer: Optimizer) -> None:
    optimizer.state = {model[0].weight: {"step": torch.tensor(0.0)}}


@pytest.mark.parametrize("spec", ZERO[:2] + ZERO[3:4])
@pytest.mark.parametrize(
    ("program", "what"),
    [
        (zero_moment, r"optimizer\.state\[p\]\['exp_avg'\] of a parameter of shape \[24, 5\]"),
        (set_moment, r"optimizer\.state\[p\]\['exp_avg'\] = "),
        (set_count, r"optimizer\.state\[p\]\['step'\] was written to"),
        (put_another, r"optimizer\.state = "),
    ],
)
def test_what_no_rank_has_whole_is_refused_by_name(spec: str, program: Program, what: str) -> None:
    with pytest.raises(ValueError, match=rf"{what}.*load_state_dict\(changed\).*optimizer\.state\.clear\(\)"):
        un.run_threads(lambda world: train(program, world, spec), 2)


def test_one_rank_that_clears_alone_is_named() -> None:
    def work(world: un.World) -> None:
        train(clear if world.rank == 0 else lambda *_: None, world, "zero(stage=2)")

    with pytest.raises(un.Mismatch, match=r"optimizer\.state\.clear\(\)"):
        un.run_threads(work, 2)


def test_an_optimizer_without_state_has_none_and_a_copy_is_possible() -> None:
    def work(_: un.World) -> None:
        model, _ = make()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        un.parallel(model, optimizer, "zero(stage=2)")
        model(torch.ones(2, 5, dtype=torch.float64)).sum().backward()
        optimizer.step()
        assert not optimizer.state
        assert model[0].weight not in optimizer.state
        assert type(copy.deepcopy(optimizer.state)) is type(pickle.loads(pickle.dumps(optimizer.state))) is defaultdict

    un.run_threads(work, 2)
