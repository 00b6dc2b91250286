"""ZeRO with a spare copy of every shard: ranks are lost at every point of a step, in worlds of threads, against plain
PyTorch in one process that saw the same global batches, in fp64."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import unisono as un
from unisono.strategies.zero.replica import ZeroReplica
from unisono.strategies.zero.spare import Spare
from unisono.world import World
from unisono.world.transports import PeerLost, Transport, find_group
from unisono.world.transports.threads import Hub, ThreadTransport
from unisono.world.virtual import run_threads

MODELS = threading.Lock()  # torch.manual_seed is the process's
GLOBAL_BATCH = 12  # samples, over any number of ranks up to 4
LOST_AT, GROWS_AT, STEPS = 2, 4, 5
stages = pytest.mark.parametrize("stage", [1, 2, 3])


class Died(Exception):
    """The program of this rank ends here."""


class Script:
    """What happens to a rank at one of its meetings with the others in a step."""

    def __init__(self) -> None:
        self.error: Exception | None = None
        self.at: int | None = None  # which meeting
        self.after = False  # behind it, else before it
        self.count = 0
        self.is_on = False
        self.is_over = False

    def begin(self, error: Exception | None, at: int | None, *, after: bool) -> None:
        self.error, self.at, self.after, self.count, self.is_on = error, at, after, 0, True

    def look(self, *, after: bool) -> None:
        if self.is_over:
            raise PeerLost("this rank has left")
        if self.is_on and self.error is not None and self.count == self.at and self.after == after:
            self.is_over = True
            raise self.error
        self.count += after


class Scripted(ThreadTransport):
    """A rank of a world of threads that leaves it in the middle of something."""

    def __init__(self, hub: Hub, rank: int, script: Script) -> None:
        super().__init__(hub, rank)
        self.script = script

    def _meet(self, what: str, sign: Any, item: Any = None) -> tuple[list[Any], float]:
        self.script.look(after=False)
        found = super()._meet(what, sign, item)
        self.script.look(after=True)
        return found

    def split(self, groups: Any) -> Transport:
        made = super().split(groups)
        assert isinstance(made, ThreadTransport)
        return Scripted(made.hub, find_group(groups, self.rank, self.size).index(self.rank), self.script)


def make() -> nn.Module:
    with MODELS:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 9), nn.Tanh(), nn.Linear(9, 7), nn.Tanh(), nn.Linear(7, 3), nn.Linear(3, 2))
    model[4].requires_grad_(False)
    return model.double()


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.05, weight_decay=0.1)


def momentum(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1, momentum=0.9)


def step(model: nn.Module, optimizer: Any, t: int, rank: int = 0, size: int = 1) -> None:
    """This rank's part of global batch t; clipping needs the ranks to talk between backward and step."""
    generator = torch.Generator().manual_seed(t)
    x = torch.randn(GLOBAL_BATCH, 4, generator=generator, dtype=torch.float64)
    optimizer.zero_grad()
    model(x.chunk(size)[rank]).square().mean().backward()
    nn.utils.clip_grad_norm_([p for p in model.parameters() if p.requires_grad], 0.1)
    optimizer.step()


Ended = tuple[dict[str, Tensor], list[dict[str, Any]]]


def state_of(model: nn.Module, optimizer: Any) -> Ended:
    states = [optimizer.state[p] for group in optimizer.param_groups for p in group["params"]]
    return dict(model.state_dict()), [dict(state) for state in states]


def reference(make_optimizer: Callable[[nn.Module], Any], steps: int = STEPS) -> Ended:
    model = make()
    optimizer = make_optimizer(model)
    for t in range(steps):
        step(model, optimizer, t)
    return state_of(model, optimizer)


def assert_same(found: Ended, wanted: Ended) -> None:
    torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-12)


class Run:
    """Train; lose a rank in one step, go on without it, and with a newcomer from a later step on."""

    def __init__(
        self, stage: int, size: int, make_optimizer: Callable[[nn.Module], Any], *, lost: int, extra: str = ""
    ) -> None:
        self.spec = f"zero(stage={stage}, spare=True, unit_bytes=300{extra})"
        self.size, self.lost, self.make_optimizer = size, lost, make_optimizer
        self.stayed = [r for r in range(size) if r != lost]
        self.meetings = 0  # of the lost rank in the step

    def __call__(self, at: int | None, *, behind: bool, source: int = 0) -> list[Ended]:
        """The rank is lost at a meeting of the step (None: never); with `behind`, after it, and the next survivor
        fails there too, where the others go on."""
        hub = Hub(self.size, 20.0)

        def work(outer: World) -> Ended:
            smaller = outer.split([self.stayed, [self.lost]])
            again = outer.split([list(range(self.size))])
            script = Script()
            transport = Scripted(hub, outer.rank, script)
            training = World(transport, hosts=["localhost"] * self.size, ledger=outer.ledger)
            model = make()
            optimizer = self.make_optimizer(model)
            replica = un.parallel(model, optimizer, self.spec, world=training)
            world = training
            fails: Exception | None = None
            if outer.rank == self.lost:
                fails = Died()
            elif behind and outer.rank == self.stayed[self.lost % len(self.stayed)]:
                fails = PeerLost("the connection broke")
            grows = GROWS_AT if at is not None else None
            while replica.step < STEPS:
                t = replica.step
                if t == LOST_AT and world is training and not script.is_on:
                    script.begin(fails, at, after=behind)
                if t == LOST_AT + 1 and outer.rank == self.lost:
                    self.meetings = self.meetings or script.count
                if t == grows and world is smaller:
                    replica.rebind(again, source=self.stayed[0])
                    world = again
                try:
                    step(model, optimizer, t, world.rank, world.size)
                except Died:
                    replica.close()
                    training.close()
                    model = make()
                    for p in model.parameters():
                        p.data.zero_()
                    optimizer = self.make_optimizer(model)
                    replica = un.parallel(model, optimizer, self.spec, world=World())
                    replica.rebind(again, source=self.stayed[0])
                    world = again
                except PeerLost:
                    if world is not training:
                        raise
                    script.is_over = True
                    replica.rebind(smaller, source=source % smaller.size)
                    world = smaller
                assert world.ledger.step_count == replica.step
            replica.restore()
            replica.close()
            return state_of(model, optimizer)

        return run_threads(work, self.size, timeout_s=20.0)


@pytest.mark.parametrize(("size", "lost"), [(2, 0), (3, 2), (4, 1)])
@pytest.mark.parametrize("make_optimizer", [adam, momentum], ids=["adam", "momentum"])
@stages
def test_a_rank_may_be_lost_at_any_point_of_a_step(
    stage: int, make_optimizer: Any, size: int, lost: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    caught_up = []
    true_catch_up = Spare.catch_up

    def catch_up(self: Spare, steps: int, optimizer: Any) -> None:
        caught_up.append(self.steps < steps)
        true_catch_up(self, steps, optimizer)

    monkeypatch.setattr(Spare, "catch_up", catch_up)
    run = Run(stage, size, make_optimizer, lost=lost)
    wanted = reference(make_optimizer)
    for found in run(None, behind=False):
        assert_same(found, wanted)
    assert run.meetings > 10
    for at in range(run.meetings):
        for behind in (False, True) if size > 2 else (False,):
            for found in run(at, behind=behind, source=at):
                assert_same(found, wanted)
    assert any(caught_up) == (size > 2)
