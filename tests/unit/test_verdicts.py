"""Slow ranks as verdicts: who, why, and at which line of the program. (Skipped collectives:
test_call_signatures.py; flipped bits: test_parameter_watch.py; hangs: processes/test_hang_reports.py.)"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from test_stragglers import Clock
from torch import nn
from torch.utils.data import Dataset

import unisono as un
from unisono import World, run_threads
from unisono.launchers.runtime.machine import ProcessorWait
from unisono.world import straggler_watch
from unisono.world.ledger import Ledger
from unisono.world.links import LinkProbe

STEPS = 72


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(straggler_watch, "EVERY_S", 0.0)
    monkeypatch.setattr(ProcessorWait, "take", lambda self, busy_s: 0.0)


class Rows(Dataset[torch.Tensor]):
    """Of which rank 1 needs long to read one, on its clock; and for as long as it takes to be seen there."""

    def __init__(self, world: World, clock: Clock, read_s: float) -> None:
        self.world, self.clock, self.read_s = world, clock, read_s

    def __len__(self) -> int:
        return 4 * STEPS

    def __getitem__(self, i: int) -> torch.Tensor:
        if self.world.rank == 1 and self.read_s:
            time.sleep(0.004)  # the rows
            self.clock.now += self.read_s
        return torch.randn(4)


def train(world: World, *, read_s: float = 0.0, compute_s: float = 0.0) -> list[dict[str, Any]]:
    """Steps of 10 ms, but for what rank 1 takes longer; the verdicts."""
    world.ledger.clock = clock = Clock()
    world.ledger.restart()
    model = nn.Linear(4, 200)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    un.parallel(model, optimizer, world=world)
    for batch in un.shard(Rows(world, clock, read_s), 4, world=world):
        clock.now += 0.01
        if world.rank == 1 and compute_s:
            time.sleep(0.004)  # the computation
            clock.now += compute_s
        optimizer.zero_grad()
        model(batch).sum().backward()
        optimizer.step()
    return [event.values for event in world.ledger.events if event.kind == "verdict"]


def line_of(text: str) -> str:
    lines = Path(__file__).read_text().splitlines()
    (found,) = [number for number, line in enumerate(lines, 1) if line.endswith(f"# {text}")]
    return f"{Path(__file__).name}:{found}"


@pytest.mark.parametrize(
    ("slow", "cause", "line"),
    [({"read_s": 0.04}, "slow input", "the rows"), ({"compute_s": 0.04}, "slow compute", "the computation")],
)
def test_a_slow_rank_is_named_with_the_line_that_takes_long(slow: dict[str, float], cause: str, line: str) -> None:
    for verdicts in run_threads(lambda world: train(world, **slow), 2):
        (verdict,) = verdicts
        assert (verdict["rank"], verdict["cause"], verdict["place"]) == (1, cause, line_of(line))
        assert verdict["place"] in verdict["text"]


def test_nobody_is_named_where_all_take_as_long() -> None:
    assert run_threads(train, 2) == [[], []]


def test_a_slow_network_is_named_with_its_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four hosts, and messages from and to one of them take twenty times as long."""

    def measure(self: LinkProbe, channel: World, ledger: Ledger) -> list[float]:
        around = [(channel.rank - 1) % 4, (channel.rank + 1) % 4]
        return [0.02 if 2 in (channel.rank, other) else 0.001 for other in around]

    monkeypatch.setattr(LinkProbe, "end", measure)
    for verdicts in run_threads(train, 4, hosts=["a", "b", "c", "d"]):
        assert [(v["rank"], v["cause"], v["place"]) for v in verdicts] == [(2, "slow network", "host c")]
