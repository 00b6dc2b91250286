"""Windows and meetings: one meeting for each window on every rank, whatever a rank skips."""

from __future__ import annotations

import contextlib
import gc
import threading
import weakref
from collections.abc import Sequence

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounter

import unisono as un
from unisono.methods.strategy import PeriodicReplica, Strategy
from unisono.world import World
from unisono.world.virtual import run_threads


class Meets(Strategy):
    def make(self, model: nn.Module, optimizer: torch.optim.Optimizer, world: World) -> PeriodicReplica:
        raise NotImplementedError


class Recorder(PeriodicReplica):
    """Writes down which windows it met after, and what it was told that the program wrote."""

    follows_writes = True

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, world: World, accumulate: int = 1) -> None:
        self.seen: list[int] = []
        self.written: list[str] = []
        super().__init__(model, optimizer, world, Meets(), accumulate=accumulate)

    def meet(self) -> None:
        assert not torch.is_grad_enabled()
        self.seen.append(self.met)

    def take_writes(self, names: Sequence[str], *, loaded: bool) -> None:
        self.written += names


def make(accumulate: int = 1) -> tuple[nn.Module, torch.optim.Optimizer, Recorder]:
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return model, optimizer, Recorder(model, optimizer, World(), accumulate)


def test_each_window_is_met_after_its_step() -> None:
    model, optimizer, replica = make(accumulate=2)
    for i in range(6):
        model(torch.ones(1, 3)).sum().backward()
        assert replica.seen == [n + 1 for n in range(i // 2)]
        if i % 2:
            optimizer.step()
    assert replica.seen == [1, 2, 3]
    assert replica.step == 3


@pytest.mark.parametrize("watched", [True, False])
def test_a_step_that_amp_skips_is_met_too(watched: bool) -> None:
    model, optimizer, replica = make()
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    if watched:
        replica.watch(scaler)
    for i in range(4):
        optimizer.zero_grad()
        loss = model(torch.ones(1, 3)).sum() * (float("inf") if i == 1 else 1.0)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        assert replica.seen == list(range(1, i + 2 if watched or i != 1 else 2))
    assert replica.seen == [1, 2, 3, 4]


def test_windows_that_could_not_be_met_in_time_are_met_in_a_row() -> None:
    """A part of the model is called by itself, so no forward pass of the whole tells that it is time to meet."""
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    replica = Recorder(model, optimizer, World())
    for _ in range(2):
        model[1](model[0](torch.ones(1, 3))).sum().backward()
    assert replica.seen == []
    optimizer.step()
    assert replica.seen == [1, 2]


class Headless(nn.Sequential):
    """Its last parameters, by which passes are counted, are in none."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self[0](x)


@pytest.mark.parametrize("accumulate", ["in no_sync", "passes of their own"])
def test_a_window_is_not_lost_where_the_parameter_that_counts_is_unused(accumulate: str) -> None:
    model = Headless(nn.Linear(3, 1), nn.Linear(3, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    replica = Recorder(model, optimizer, World())
    for t in range(3):
        with replica.no_sync() if accumulate == "in no_sync" else contextlib.nullcontext():
            model(torch.ones(1, 3)).sum().backward()
        model(torch.ones(1, 3)).sum().backward()
        assert replica.seen == (list(range(1, t + 1)) if accumulate == "in no_sync" else list(range(1, 2 * t + 2)))
        if accumulate != "in no_sync":  # the first is over with the second's forward pass
            optimizer.step()
            assert replica.windows.window.name == "STEPPED"  # else, AMP skipped it
    replica.state_dict()
    assert replica.seen == [1, 2, 3] if accumulate == "in no_sync" else [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("calls", [1, 3])
def test_a_step_with_a_closure_is_one_window(calls: int) -> None:
    model = nn.Linear(3, 1)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=calls, tolerance_grad=0.0, tolerance_change=0.0)
    replica = Recorder(model, optimizer, World())

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = (model(torch.ones(2, 3)) - 1.0).square().sum()
        loss.backward()
        return loss

    for _ in range(3):
        optimizer.step(closure)
    assert replica.seen == [1, 2, 3]
    assert replica.step == 3
    assert replica.written == []  # LBFGS moves the parameters between two calls


def test_a_closure_that_fails_leaves_the_counting_whole() -> None:
    model, optimizer, replica = make()

    def closure() -> float:
        raise ArithmeticError

    with pytest.raises(ArithmeticError):
        optimizer.step(closure)
    for _ in range(2):
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
    assert replica.seen[-1] == replica.step


def test_asking_for_the_state_or_the_model_meets_first() -> None:
    for ask in ("state_dict", "consolidate"):
        model, _, replica = make()
        model(torch.ones(1, 3)).sum().backward()
        getattr(replica, ask)()
        assert replica.seen == [1]


def test_a_closed_replica_meets_no_more() -> None:
    model, optimizer, replica = make()
    scaler = torch.amp.GradScaler("cpu")
    replica.watch(scaler)
    model(torch.ones(1, 3)).sum().backward()
    replica.close()
    scaler.scale(model(torch.ones(1, 3)).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert replica.seen == []


def test_a_scaler_does_not_keep_a_replica_alive() -> None:
    _, _, replica = make()
    scaler = torch.amp.GradScaler("cpu")
    replica.watch(scaler)
    replica.close()
    gone = weakref.ref(replica)
    del replica
    gc.collect()
    assert gone() is None


def test_a_copy_of_the_model_belongs_to_no_replica() -> None:
    model, _, replica = make()
    copied = replica.copy_model()
    model(torch.ones(1, 3)).sum().backward()
    copied(torch.ones(1, 3)).sum().backward()
    assert replica.seen == []
    assert not copied._forward_pre_hooks
    assert model._forward_pre_hooks
    assert replica.step == 1


def test_a_stand_in_batch_has_no_gradient_in_the_new_world_either() -> None:
    def work(world: World) -> None:
        model = nn.Linear(3, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        replica = Recorder(model, optimizer, world)
        again = world.split([[0, 1]])
        model(torch.ones(1, 3)).sum().backward()
        replica.enter(again)
        assert model.weight.grad is None
        assert replica.world is again
        again.weight = 0.0
        model(torch.ones(1, 3)).sum().backward()
        assert torch.equal(model.weight.grad, torch.zeros(1, 3))
        again.weight = 1.0
        replica.close()

    run_threads(work, 2)


def test_a_scaler_is_left_as_it_was_once_nobody_watches_it() -> None:
    replica = make()[2]
    scaler = torch.amp.GradScaler("cpu")
    replica.watch(scaler)
    replica = replica.switch("local_sgd(every=2)")
    assert "update" in vars(scaler)
    replica.close()
    assert "update" not in vars(scaler)
    scaler.update = theirs = lambda: None  # type: ignore[method-assign]
    for wrapped in (False, True):
        replica = make()[2]
        replica.watch(scaler)
        if wrapped:
            scaler.update = above = lambda: None  # type: ignore[method-assign]
        replica.close()
        assert scaler.update is (above if wrapped else theirs)


class Beginner(Recorder):
    """Does a little with tensors before a forward, and makes a lock, as methods do."""

    def begin(self) -> None:
        """There is something to do."""

    def begin_window(self) -> None:
        super().begin_window()
        with threading.Lock():
            torch.zeros(2).add_(1)


class Own(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)  # type: ignore[no-any-return]


@pytest.mark.parametrize("fullgraph", [False, True])
def test_a_compiled_model_stays_one_graph(fullgraph: bool) -> None:
    """What runs before its forward is not compiled with it."""
    model = Own()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    replica = Beginner(model, optimizer, World())
    graphs = CompileCounter()
    compiled = torch.compile(model, backend=graphs, fullgraph=fullgraph)
    for _ in range(3):
        compiled(torch.ones(2, 3)).sum().backward()
        optimizer.step()
    replica.sync()
    assert (graphs.frame_count, graphs.op_count) == (1, 1)
    assert replica.seen == [1, 2, 3]


@pytest.mark.parametrize(("spec", "trains"), [("local_sgd(every=2)", True), ("diloco(every=2)", False)])
def test_what_calls_the_model_may_be_compiled_as_one_graph(spec: str, trains: bool) -> None:
    """Where nothing is to be done before a forward: in training, where a method does not look at what was written."""
    model = nn.Linear(3, 1)
    replica = un.parallel(model, torch.optim.SGD(model.parameters(), lr=0.1), spec, world=World())
    graphs = CompileCounter()
    compiled = torch.compile(lambda x: 2 * model(x), backend=graphs, fullgraph=True)
    for _ in range(3):
        with torch.set_grad_enabled(trains):
            loss = compiled(torch.ones(2, 3)).sum()
        if trains:
            loss.backward()
            replica.optimizer.step()
    assert graphs.frame_count == 1
    assert replica.step == (3 if trains else 0)
    replica.close()
