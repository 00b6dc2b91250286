"""Kinds of numbers: frozen integer parameters, and another default dtype of torch, under every method."""

from __future__ import annotations

import ast
import copy
from pathlib import Path

import pytest
import torch
from stranger_programs import furthest, seeded, values
from torch import Tensor, nn

import unisono as un
from method_cases import Case, find_cases
from unisono.facts import Example
from unisono.spec import read_facts
from unisono.world import World
from unisono.world.virtual import run_threads

MORE = {"parameter_server": "parameter_server(reducer=bytegrad)", "zero": "zero(stage=2, optimizer_on=cpu)"}
CASES = [case for case in find_cases("strategy") if not case.example.by_clock]
CASES += [Case(name, read_facts(name, "strategy"), Example(spec)) for name, spec in MORE.items()]
STEPS, SIZE = 4, 2
every_method = pytest.mark.parametrize("case", CASES, ids=lambda case: case.spec)


class Quantised(nn.Module):
    """A linear layer on frozen int8 weights, as quantised bases of adapters have them."""

    def __init__(self, n: int, m: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randint(-9, 9, (m, n), dtype=torch.int8), requires_grad=False)
        self.adapter = nn.Linear(n, m)

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight.to(x.dtype).t() * 0.05 + self.adapter(x)


def train(case: Case, world: World | None, like: nn.Module) -> list[Tensor]:
    """What a copy of the model is in the end: a rank's, or that of one process on all samples."""
    model, dtype = copy.deepcopy(like), like[2].weight.dtype  # type: ignore[index]
    rates = {"lr": 0.01} if case.facts.needs_adam else {"lr": 0.1, "momentum": 0.9}
    optimizer = (torch.optim.AdamW if case.facts.needs_adam else torch.optim.SGD)(model.parameters(), **rates)
    replica = None if world is None else un.parallel(model, optimizer, case.spec, world=world)
    data = torch.randn(STEPS, SIZE, 3, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(dtype)
    for batch in data:
        optimizer.zero_grad()
        model(batch.view(-1, 4) if world is None else batch[world.rank]).square().mean().backward()
        optimizer.step()
    if replica is None:
        return values(model)
    found = values(replica.consolidate())
    replica.close()
    return found


@every_method
def test_a_frozen_integer_parameter_stays_where_it_is(case: Case) -> None:
    model = seeded(lambda: nn.Sequential(Quantised(4, 8), nn.Tanh(), nn.Linear(8, 2)).double())
    alone = train(case, None, model)
    for found in run_threads(lambda world: train(case, world, model), SIZE):
        assert [x.dtype for x in found] == [x.dtype for x in alone]
        assert torch.equal(found[0], alone[0])
        assert not case.example.exact or furthest(found, alone) < 1e-12


@every_method
def test_the_default_dtype_changes_nothing_of_a_model_in_float32(case: Case) -> None:
    model = seeded(lambda: nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)))
    ends, before = [], torch.get_default_dtype()
    try:
        for dtype in (torch.float32, torch.float64, torch.bfloat16):
            torch.set_default_dtype(dtype)
            ends.append(run_threads(lambda world: train(case, world, model), SIZE)[0])
    finally:
        torch.set_default_dtype(before)
    for end in ends[1:]:
        assert [x.dtype for x in end] == [torch.float32] * len(end)
        assert case.example.varies or furthest(end, ends[0]) == 0.0


def test_every_allocation_names_its_dtype() -> None:
    """Without one it is the program's default: sizes in bytes are then others, and counts in bfloat16 end at 256."""
    makers = {"empty", "zeros", "ones", "full", "rand", "randn", "linspace", "eye"}
    found = []
    for path in Path(un.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in makers:
                of_torch = isinstance(node.func.value, ast.Name) and node.func.value.id == "torch"
                if of_torch and not {"dtype", None} & {word.arg for word in node.keywords}:
                    found.append(f"{path.name}:{node.lineno}: {ast.unparse(node)}")
    assert not found
