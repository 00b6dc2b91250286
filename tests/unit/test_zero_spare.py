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
LOST_AT = 1  # the step in which a rank is lost
stages = pytest.mark.parametrize("stage", [1, 2, 3])


class Script:
    """What happens to a rank at one of its meetings with the others in a step: it leaves them, before or after it."""

    def __init__(self) -> None:
        self.error: Exception | None = None
        self.at: int | None = None  # which meeting
        self.after = False
        self.met: list[str] = []
        self.is_on = False
        self.is_over = False

    def begin(self, error: Exception | None, at: int | None, *, after: bool) -> None:
        self.error, self.at, self.after, self.met, self.is_on = error, at, after, [], True

    def look(self, what: str, *, after: bool) -> None:
        if self.is_over:
            raise PeerLost("this rank has left")
        if self.is_on and self.error is not None and len(self.met) == self.at and self.after == after:
            self.is_over = True
            raise self.error
        if after:
            self.met.append(what)


class Scripted(ThreadTransport):
    """A rank of a world of threads that leaves it in the middle of something."""

    def __init__(self, hub: Hub, rank: int, script: Script) -> None:
        super().__init__(hub, rank)
        self.script = script

    def _meet(self, what: str, sign: Any, item: Any = None) -> tuple[list[Any], float]:
        self.script.look(what, after=False)
        found = super()._meet(what, sign, item)
        self.script.look(what, after=True)
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


def reference(make_optimizer: Callable[[nn.Module], Any], steps: int) -> Ended:
    model = make()
    optimizer = make_optimizer(model)
    for t in range(steps):
        step(model, optimizer, t)
    return state_of(model, optimizer)


def assert_same(found: Ended, wanted: Ended) -> None:
    torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-12)


class Run:
    """Train; lose a rank in one step, go on without it, and with a newcomer in its place from step `grows` on."""

    def __init__(
        self,
        stage: int,
        size: int,
        make_optimizer: Callable[[nn.Module], Any] = adam,
        *,
        lost: int,
        grows: int | None = None,
        extra: str = "",
    ) -> None:
        self.spec = f"zero(stage={stage}, spare=True, unit_bytes=300{extra})"
        self.size, self.lost, self.grows, self.make_optimizer = size, lost, grows, make_optimizer
        self.stayed = [r for r in range(size) if r != lost]
        self.steps = 3 if grows is None else grows + 1
        self.wanted = reference(make_optimizer, self.steps)
        self.met: list[str] = []  # what the rank does together with the others in the step that it is lost in
        self.check(None)
        self.agreement = max(i for i, what in enumerate(self.met) if what == "all_reduce")  # the last: all may step

    def check(self, at: int | None, *, behind: int | None = None, source: int = 0, clears: bool = False) -> None:
        """The rank is lost before a meeting of the step (None: never). `behind`: after it, and this rank fails there
        too, where the others go on; `clears`: it makes its gradients zero then."""
        hub = Hub(self.size, 20.0)

        def work(outer: World) -> Ended | None:
            smaller = outer.split([self.stayed, [self.lost]])
            again = outer.split([list(range(self.size))])
            script, fails = Script(), None
            transport = Scripted(hub, outer.rank, script)
            world = training = World(transport, hosts=["localhost"] * self.size, ledger=outer.ledger)
            model = make()
            optimizer = self.make_optimizer(model)
            replica = un.parallel(model, optimizer, self.spec, world=world)
            if outer.rank in (self.lost, behind):
                fails = PeerLost("this rank is lost" if outer.rank == self.lost else "the connection broke")
            while replica.step < self.steps:
                t = replica.step
                if t == LOST_AT and world is training and not script.is_on:
                    script.begin(fails, at, after=behind is not None)
                if t == LOST_AT + 1 and world is training and outer.rank == self.lost and at is None:
                    self.met = list(script.met)
                if t == self.grows and world is smaller:
                    replica.rebind(again, source=self.stayed[0])
                    world = again
                try:
                    step(model, optimizer, t, world.rank, world.size)
                except PeerLost:
                    assert world is training
                    script.is_over = True
                    if outer.rank in (self.lost, behind):
                        training.close()  # the others do not wait for it
                    if outer.rank == self.lost:
                        replica.close()
                        if self.grows is None:
                            return None
                        model, optimizer, replica, world = self.come_anew(again)
                        continue
                    if clears and outer.rank == behind:
                        optimizer.zero_grad(set_to_none=False)
                    replica.rebind(smaller, source=source % smaller.size)
                    world = smaller
                assert world.ledger.step_count == replica.step
            replica.restore()
            replica.close()
            return state_of(model, optimizer)

        for found in run_threads(work, self.size, timeout_s=20.0):
            if found is not None:
                assert_same(found, self.wanted)

    def come_anew(self, world: World) -> tuple[nn.Module, Any, un.Replica, World]:
        """A process that knows nothing joins."""
        model = make()
        for p in model.parameters():
            p.data.zero_()
        optimizer = self.make_optimizer(model)
        replica = un.parallel(model, optimizer, self.spec, world=World())
        replica.rebind(world, source=self.stayed[0])
        return model, optimizer, replica, world


@pytest.fixture
def caught_up(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The steps that ranks took after a loss because others had taken them."""
    found: list[int] = []
    true_catch_up = Spare.catch_up

    def catch_up(self: Spare, steps: int, optimizer: Any) -> None:
        if self.steps < steps:
            found.append(steps)
        true_catch_up(self, steps, optimizer)

    monkeypatch.setattr(Spare, "catch_up", catch_up)
    return found


# Every operation between ranks is two meetings: one may leave before it, in it, or after it.


@stages
def test_a_rank_may_be_lost_before_anything_that_the_ranks_do_together(stage: int, caught_up: list[int]) -> None:
    run = Run(stage, 3, lost=2)
    for at in range(0, len(run.met), 2):
        run.check(at, source=at)
    assert not caught_up  # where nobody has got through, nobody is behind


@stages
def test_a_rank_may_be_lost_and_another_be_behind_the_rest(stage: int, caught_up: list[int]) -> None:
    run = Run(stage, 3, lost=1)
    for at in range(1, len(run.met), 2):
        run.check(at, behind=2 * (at // 2 % 2), source=at // 4)
    assert caught_up == [LOST_AT + 1]  # only at the agreement can one have stepped and another not


@pytest.mark.parametrize(("size", "lost"), [(2, 0), (3, 2), (4, 1)])
@pytest.mark.parametrize("make_optimizer", [adam, momentum], ids=["adam", "momentum"])
@stages
def test_a_world_goes_on_without_a_rank_and_with_another(
    stage: int, make_optimizer: Any, size: int, lost: int, caught_up: list[int]
) -> None:
    run = Run(stage, size, make_optimizer, lost=lost, grows=3)
    run.check(run.agreement, behind=run.stayed[-1], source=1)
    assert len(caught_up) == (size > 2)


@stages
def test_a_rank_is_lost_while_exchanges_go_on_behind_the_program(stage: int) -> None:
    run = Run(stage, 3, lost=0, extra=", overlap=True")
    for at in range(1, len(run.met), 6):
        run.check(at)
        run.check(at, behind=1)
    run.check(run.agreement, behind=1)


def test_a_rank_that_cleared_its_gradients_counts_as_lost_where_others_stepped() -> None:
    """It cannot take the step any more; the copies of its shards have taken it."""
    run = Run(2, 4, lost=1)
    run.check(run.agreement, behind=3, clears=True)
    run.check(run.agreement, behind=3, clears=True, source=2)  # it may be the source: the shards say where to go on
