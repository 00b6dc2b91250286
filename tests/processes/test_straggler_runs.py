"""A worker that a fault script makes slow: named on standard error, and given fewer samples of every batch."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn

import unisono as un
from unisono.world import straggler_watch

MOST_STEPS = 600


def train() -> tuple[list[int], list[float], list[str]]:
    """Until all ranks know of a straggler and deal by speed: the named ranks, the weights and the kinds of events."""
    straggler_watch.EVERY_S = 0.0
    world = un.join(device="cpu")
    model = nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    un.parallel(model, optimizer)
    x = torch.randn(64 * MOST_STEPS, 64, generator=torch.Generator().manual_seed(0))
    weights = []
    for batch in un.shard(x, 64):
        weights.append(world.weight)
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()
        if any(one.rank == 1 for one in world.stragglers) and weights[-1] != 1.0:
            break
    return [one.rank for one in world.stragglers], weights, [event.kind for event in world.ledger.events]


def test_a_slow_worker_is_named_and_gets_fewer_samples(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("UNISONO_BALANCE", "1")
    (named, fast, events), (_, slow, _) = un.launch(train, workers=2, faults=f"slow 1 x8@1-{MOST_STEPS}")
    assert 1 in named
    assert slow[0] == 1.0
    assert slow[-1] < 0.7 < fast[-1]
    assert slow[-1] + fast[-1] == pytest.approx(2.0)
    assert "straggler" in events
    assert "shares" in events
    line = re.search(
        r"unisono: rank 1 is ([\d.]+)x slower than the others since step \d+: (\w+)", capfd.readouterr().err
    )
    assert line is not None
    assert float(line[1]) >= 1.5
    assert line[2] in ("compute", "host", "input")
