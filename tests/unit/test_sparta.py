"""SPARTA: random parameters averaged behind each window, against a plain reference."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import unisono as un
from unisono.methods.reducer import all_reduce_bytes
from unisono.world import World
from unisono.world.virtual import run_threads

RANKS = 3


class Scaled(nn.Sequential):
    """With a parameter of no dimensions."""

    def __init__(self, *modules: nn.Module) -> None:
        super().__init__(*modules)
        self.scale = nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.scale


def make() -> nn.Module:
    generator = torch.Generator().manual_seed(1)
    model = Scaled(nn.Conv2d(2, 4, 3), nn.Flatten(), nn.Linear(16, 3)).double()
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.rand(p.shape, generator=generator, dtype=torch.float64) - 0.5)
    return model.to(memory_format=torch.channels_last)


def train(world: World, spec: str, windows: int) -> tuple[list[list[Tensor]], list[int]]:
    """After each window this rank's parameters, and the bytes it sent in it."""
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    replica = un.parallel(model, optimizer, spec, world=world)
    models, sent = [], []
    for window in range(windows):
        before = sum(r.bytes_sent for r in world.ledger.records if r.tag == "sparta")
        x = torch.randn(
            4, 2, 4, 4, generator=torch.Generator().manual_seed(100 * window + world.rank), dtype=torch.float64
        )
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
        models.append([p.detach().clone() for p in model.parameters()])
        sent.append(sum(r.bytes_sent for r in world.ledger.records if r.tag == "sparta") - before)
    replica.close()
    return models, sent


def step_alone(params: list[Tensor], window: int, rank: int) -> list[Tensor]:
    """One window of plain SGD from these parameters."""
    model = make()
    with torch.no_grad():
        for p, value in zip(model.parameters(), params, strict=True):
            p.copy_(value)
    x = torch.randn(4, 2, 4, 4, generator=torch.Generator().manual_seed(100 * window + rank), dtype=torch.float64)
    model(x).square().mean().backward()
    return [(p - 0.1 * p.grad).detach() for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("every", [1, 2])
def test_some_numbers_become_their_mean_from_before_the_window_plus_the_own_step(every: int) -> None:
    found = run_threads(lambda world: train(world, f"sparta(share=0.25, every={every})", 6)[0], RANKS)
    before = [[p.detach().clone() for p in make().parameters()] for _ in range(RANKS)]
    drawn = []
    for window in range(6):
        alone = [step_alone(before[rank], window, rank) for rank in range(RANKS)]
        after = [found[rank][window] for rank in range(RANKS)]
        means = [torch.stack(column).mean(0) for column in zip(*before, strict=True)]
        for i, mean in enumerate(means):
            moved = torch.stack([(after[r][i] - alone[r][i]).abs() > 1e-12 for r in range(RANKS)])
            due = (window + 1) % every == 0
            count = max(1, round(0.25 * mean.numel()))
            if window and due:  # in the first window all are alike: their mean changes nothing
                assert moved.any(0).sum() == count
                drawn.append(moved.any(0).flatten().nonzero().flatten().tolist())
            elif not due:
                assert not moved.any()
            for rank in range(RANKS):
                wanted = torch.where(moved.any(0), alone[rank][i] + mean - before[rank][i], alone[rank][i])
                torch.testing.assert_close(after[rank][i], wanted, rtol=1e-12, atol=1e-12)
        before = after
    assert drawn[1] != drawn[6]  # the same tensor, in the next exchange


def test_bytes_are_those_of_the_numbers_drawn() -> None:
    kept = sum(max(1, round(0.1 * p.numel())) for p in make().parameters())
    for _, sent in run_threads(lambda world: train(world, "sparta(share=0.1, every=2)", 4), RANKS):
        assert sum(sent) == pytest.approx(2 * all_reduce_bytes(8 * kept, RANKS), abs=2 * len(sent))
