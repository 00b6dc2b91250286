"""Programs that update parameters themselves, `p.data.add_(p.grad, alpha=-lr)`, and never call `optimizer.step()`."""

from __future__ import annotations

import pytest
import torch
from stranger_programs import furthest, mlp, values
from torch import Tensor, nn

import unisono as un
from unisono.world import World
from unisono.world.virtual import run_threads

REFUSED = {
    "zero(stage=1)": r"call optimizer\.step\(\)",
    "zero(stage=3)": r"call optimizer\.step\(\)",
    "parameter_server": "every rank writes the same values",
}
SPECS = ["allreduce", "local_sgd(every=1, start=0)", "shared", *REFUSED]


def train(model: nn.Module, ranks: list[int]) -> list[Tensor]:
    for step in range(4):
        model.zero_grad()
        seeds = [torch.Generator().manual_seed(10 * step + rank) for rank in ranks]
        x = torch.cat([torch.randn(4, 4, generator=g, dtype=torch.float64) for g in seeds])
        (model(x) - x.sum(1, keepdim=True)).square().mean().backward()
        for p in model.parameters():
            p.data.add_(p.grad, alpha=-0.1)
    return values(model)


@pytest.mark.parametrize("spec", SPECS)
def test_own_updates_are_those_of_one_process_or_refused(spec: str) -> None:
    def program(world: World) -> list[Tensor]:
        model = mlp()
        replica = un.parallel(model, torch.optim.SGD(model.parameters(), lr=0.1), spec, world=world)
        train(model, [world.rank])
        return values(replica.consolidate())

    if spec in REFUSED:
        with pytest.raises((NotImplementedError, RuntimeError), match=REFUSED[spec]):
            run_threads(program, 2)
        return
    expected = train(mlp(), [0, 1])
    assert max(furthest(found, expected) for found in run_threads(program, 2)) < 1e-12
