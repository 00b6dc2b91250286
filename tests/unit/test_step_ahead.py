"""Units that are stepped while backward goes on: what is seen of them, and that a wrong guess leaves nothing."""

from __future__ import annotations

import copy
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from test_pipeline import (
    LENGTHS,
    PLACES,
    RUNS,
    Gradients,
    LateStreams,
    Make,
    adamw,
    assert_same,
    built,
    every_run,
    masters,
    nadam,
    plain,
    random_gradients,
    train,
    values,
)
from torch import Tensor

from unisono.methods.offload import plan
from unisono.methods.offload.ahead import Guess, StepsAhead
from unisono.methods.offload.blocks import Block
from unisono.methods.offload.pipeline import Pipeline
from unisono.methods.offload.stepper import Stepper

UNITS = range(len(LENGTHS))


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "_BORDER", 64)
    monkeypatch.setattr(plan, "_LEAST", 128)


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step is asked for when all units have had their turn."""
    claim = StepsAhead.claim

    def later(ahead: StepsAhead, *args: Any) -> Any:
        for guess in ahead._guesses.values():
            assert guess._started.wait(30)
        return claim(ahead, *args)

    monkeypatch.setattr(StepsAhead, "claim", later)


@pytest.fixture
def slow() -> Iterator[LateStreams]:
    streams = LateStreams(3)
    yield streams
    streams.close()


def sgd(groups: list[list[Tensor]]) -> torch.optim.Optimizer:
    return torch.optim.SGD([{"params": p} for p in groups], lr=0.1, momentum=0.9, dampening=0.5, fused=True)


def amsgrad(groups: list[list[Tensor]]) -> torch.optim.Optimizer:
    """One group keeps a line more than the other."""
    settings = [{"params": params, "amsgrad": i == 1} for i, params in enumerate(groups)]
    return torch.optim.Adam(settings, lr=0.02, fused=True)


def offer(pipeline: Pipeline, gradients: dict[int, Tensor]) -> None:
    for u in sorted(gradients, reverse=True):
        pipeline.offer(u, gradients[u].clone())


def settle(pipeline: Pipeline) -> StepsAhead:
    """Everything that can be stepped ahead has been."""
    assert pipeline.ahead is not None
    for u in UNITS:
        pipeline.ahead.wait(u)
    return pipeline.ahead


def state(pipeline: Pipeline) -> list[Any]:
    shards = [pipeline.shard(u) for u in UNITS]
    counts = [shards[u].scalars(run.start) for u, _, run in every_run()]
    return [[shard.read(name) for shard in shards for name in shard.names()], counts]


def equal(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(a[key], b[key]) for key in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(map(equal, a, b))
    return bool(a == b)


SCALES = [1.0, 0.5, 1.0, 1.0, 0.25, 1.0, 1.0, 1.0]
HOLES = {2: 1, 5: 1, 6: 1}  # of the unit 1 run 0 has no gradient in these steps


def reference(make: Make, gradients: Gradients) -> list[Tensor]:
    scaled = [{u: g.float() * scale for u, g in given.items()} for given, scale in zip(gradients, SCALES, strict=True)]
    return plain(make, scaled, holes=HOLES)


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("make", [adamw, sgd, nadam, amsgrad])
@pytest.mark.parametrize("place", ["host", "half staged", "some resident", "at once"])
def test_guesses_right_and_wrong_give_what_the_optimizer_gives(make: Make, place: str, slow: LateStreams) -> None:
    """Some steps are clipped, some runs have no gradient, and a unit gets none at all."""
    gradients = random_gradients(len(SCALES))
    del gradients[3][0], gradients[4][2]
    streams = None if place == "at once" else slow
    where = PLACES.get(place, {})
    pipeline, compute = built(make, streams=streams, ahead=True, block=1024, threads=2, **where)
    for t, (given, scale) in enumerate(zip(gradients, SCALES, strict=True)):
        train(pipeline, [given], scale=scale, absent={1: [(0, 4000)]} if t in HOLES else {})
    pipeline.finish()
    expected = reference(make, gradients)
    assert_same(masters(pipeline), expected)
    assert_same(compute, [line.to(torch.bfloat16) for line in expected])
    here = {block.unit for block in pipeline._host}
    asked = [(t, u) for t, given in enumerate(gradients) for u in given if u in here]
    missed = {(t, u) for t, u in asked if SCALES[t] != 1.0 or (u == 1 and (t in HOLES) != (t - 1 in HOLES))}
    assert pipeline.ahead is not None
    assert (pipeline.ahead.claimed, pipeline.ahead.missed) == (len(asked) - len(missed), len(missed))
    pipeline.close()


@pytest.mark.parametrize("moments", [torch.float32, torch.bfloat16])
def test_the_state_is_bit_by_bit_that_of_steps_that_are_not_taken_ahead(moments: torch.dtype) -> None:
    gradients = random_gradients(len(SCALES))
    found = []
    for ahead in (False, True):
        pipeline, compute = built(adamw, ahead=ahead, moments=moments, threads=2)
        for t, (given, scale) in enumerate(zip(gradients, SCALES, strict=True)):
            train(pipeline, [given], scale=scale, absent={1: [(0, 4000)]} if t in HOLES else {})
        found.append([state(pipeline), [line.clone() for line in compute]])
        pipeline.close()
    assert equal(*found)


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("place", ["host", "half staged"])
def test_nothing_is_seen_before_the_step_is_asked_for_nor_if_it_never_is(place: str, slow: LateStreams) -> None:
    gradients = random_gradients(4)
    pipeline, compute = built(adamw, streams=slow, ahead=True, block=1024, **PLACES[place])
    train(pipeline, gradients[:2])
    pipeline.finish()
    before, here = copy.deepcopy(state(pipeline)), [line.clone() for line in compute]
    offer(pipeline, gradients[2])
    settle(pipeline)
    assert equal(state(pipeline), before)
    assert equal(compute, here)
    pipeline.finish()
    assert equal(state(pipeline), before)
    for u in UNITS:  # the batch is dropped, and another takes its place
        pipeline.offer(u, gradients[3][u].clone(), replace=True)
    pipeline.step()
    pipeline.finish()
    expected = plain(adamw, [*gradients[:2], gradients[3]])
    assert_same(masters(pipeline), expected)
    assert_same(compute, [line.to(torch.bfloat16) for line in expected])
    assert pipeline.stepper.steps == 3
    ahead = settle(pipeline)
    assert ahead.claimed == 3 * ahead.missed > 0
    pipeline.close()


def halve(group: dict[str, Any]) -> None:
    group["lr"] = group["lr"] * 0.5


def halve_in_place(group: dict[str, Any]) -> None:
    group["lr"].mul_(0.5)


def change_list(group: dict[str, Any]) -> None:
    group["betas"][0] = 0.5


@pytest.mark.parametrize("change", [halve, halve_in_place, change_list])
def test_settings_that_change_after_the_gradients_came_count(change: Callable[[dict[str, Any]], None]) -> None:
    def make(groups: list[list[Tensor]]) -> torch.optim.Optimizer:
        optimizer = torch.optim.Adam([{"params": params} for params in groups], lr=torch.tensor(0.02), fused=True)
        for group in optimizer.param_groups:
            group["betas"] = list(group["betas"])
        return optimizer

    gradients = random_gradients(3)
    pipeline, _ = built(make, ahead=True)
    params = [torch.nn.Parameter(values()[u][r.start : r.stop].clone()) for u, _, r in every_run()]
    groups = [[p for p, (_, _, r) in zip(params, every_run(), strict=True) if r.group == g] for g in (0, 1)]
    optimizer = make(groups)
    for t, given in enumerate(gradients):
        for u in UNITS:
            pipeline.wait(u)
        offer(pipeline, given)
        settle(pipeline)
        for p, (u, _, r) in zip(params, every_run(), strict=True):
            p.grad = given[u][r.start : r.stop].float()
        if t == 1:
            change(pipeline.optimizer.param_groups[0])
            change(optimizer.param_groups[0])
        pipeline.step()
        optimizer.step()
    found = masters(pipeline)
    assert_same([found[u][r.start : r.stop] for u, _, r in every_run()], [p.detach() for p in params])
    ahead = settle(pipeline)
    assert (ahead.claimed, ahead.missed) == (8, 4)
    pipeline.close()


def test_state_that_is_set_after_the_gradients_came_is_what_is_stepped() -> None:
    gradients = random_gradients(2)
    pipeline, compute = built(adamw, ahead=True)
    train(pipeline, gradients[:1])
    start = values()
    offer(pipeline, gradients[1])
    settle(pipeline)
    for u, run in ((u, run) for u, runs in enumerate(RUNS) for run in runs):
        shard, span = pipeline.shard(u), {"start": run.start, "stop": run.stop}
        shard.load({"master": start[u][run.start : run.stop]}, **span)
        shard.reset(**span)
    pipeline.step()
    assert_same(masters(pipeline), plain(adamw, gradients[1:]))
    assert_same(compute, [line.to(torch.bfloat16) for line in masters(pipeline)])
    pipeline.close()


def test_padding_is_what_it_was_set_to_in_either_copy() -> None:
    pipeline, _ = built(adamw, ahead=True)
    pipeline.shard(1).load({"master": torch.ones(LENGTHS[1])})
    for given in random_gradients(2):
        offer(pipeline, given)
        pipeline.step()
        assert pipeline.shard(1).read("master", 4000, 4096).tolist() == [1.0] * 96
    pipeline.close()


def test_reading_state_costs_no_guess() -> None:
    gradients = random_gradients(3)
    pipeline, _ = built(adamw, ahead=True)
    for given in gradients:
        offer(pipeline, given)
        state(pipeline)
        pipeline.step()
    pipeline.finish()
    ahead = settle(pipeline)
    assert (ahead.claimed, ahead.missed) == (3 * len(LENGTHS), 0)
    assert_same(masters(pipeline), plain(adamw, gradients))
    pipeline.close()


def test_a_count_of_steps_that_is_set_counts() -> None:
    """Rounding depends on it: what was guessed was rounded for another step."""
    gradients = random_gradients(2)
    found = []
    for ahead in (False, True):
        pipeline, _ = built(adamw, ahead=ahead, moments=torch.bfloat16)
        train(pipeline, gradients[:1])
        offer(pipeline, gradients[1])
        pipeline.stepper.steps = 40
        pipeline.step()
        found.append(state(pipeline))
        pipeline.close()
    assert equal(*found)


def test_an_error_in_a_step_that_was_taken_ahead_is_raised_by_that_step(monkeypatch: pytest.MonkeyPatch) -> None:
    gradients = random_gradients(3)
    pipeline, compute = built(adamw, ahead=True)
    train(pipeline, gradients[:1])
    pipeline.finish()
    real = Stepper.start_ahead

    def failing(self: Any, index: int, *args: Any, **options: Any) -> Any:
        if index == 2:
            raise MemoryError("no more")
        return real(self, index, *args, **options)

    monkeypatch.setattr(Stepper, "start_ahead", failing)
    offer(pipeline, gradients[1])
    settle(pipeline)
    assert_same(compute, [line.to(torch.bfloat16) for line in plain(adamw, gradients[:1])])
    pipeline.step()
    with pytest.raises(MemoryError, match="no more"):
        pipeline.finish()
    pipeline.retry()  # from the old values, which nothing has touched
    monkeypatch.undo()
    train(pipeline, gradients[2:])
    pipeline.finish()
    assert_same(compute, [line.to(torch.bfloat16) for line in plain(adamw, gradients)])
    pipeline.close()


def test_an_interrupt_while_guesses_are_waited_for_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    pipeline, _ = built(adamw, ahead=True)

    def interrupt() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Stepper, "start_ahead", lambda *_, **__: (interrupt, interrupt))
    pipeline.offer(3, random_gradients(1)[0][3].clone())
    assert pipeline.ahead is not None
    with pytest.raises(KeyboardInterrupt):
        pipeline.ahead.wait(3)
    pipeline.ahead._guesses = {}
    pipeline.ahead._under_way = {}
    pipeline.close()


def test_units_whose_turn_has_not_come_are_stepped_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    gradients = random_gradients(3)
    pipeline, compute = built(adamw, ahead=True)
    for given in gradients:
        gate = Gate(monkeypatch, "claim")
        pipeline.offer(3, given[3].clone())
        assert gate.under_way.wait(30)
        for u in (2, 1, 0):
            pipeline.offer(u, given[u].clone())
        pipeline.step()
        pipeline.finish()
        monkeypatch.undo()
        assert len(gate.started) == 1
    assert pipeline.ahead is not None
    assert (pipeline.ahead.claimed, pipeline.ahead.missed) == (3, 0)
    expected = plain(adamw, gradients)
    assert_same(masters(pipeline), expected)
    assert_same(compute, [line.to(torch.bfloat16) for line in expected])
    pipeline.close()


@pytest.fixture
def last(monkeypatch: pytest.MonkeyPatch) -> None:
    """A guess is stepped when it is waited for; if it is not, after what next steps its block has ended."""
    waiting: dict[int, Callable[[], Any]] = {}
    start_ahead, start = Stepper.start_ahead, Stepper.start

    def late_ahead(self: Any, index: int, gradient: Tensor, *args: Any, **options: Any) -> Any:
        here, former = gradient.clone(), waiting.pop(index, lambda: None)

        @functools.cache
        def step() -> Callable[[], None]:
            wait, take = start_ahead(self, index, here, *args, **options)
            wait()
            former()
            return take

        waiting[index] = step
        return step, lambda: step()()

    def start_and_more(self: Any, index: int, *args: Any, **options: Any) -> Callable[[], None]:
        wait, former = start(self, index, *args, **options), waiting.pop(index, lambda: None)

        def end() -> None:
            wait()
            former()

        return end

    monkeypatch.setattr(Stepper, "start_ahead", late_ahead)
    monkeypatch.setattr(Stepper, "start", start_and_more)


@pytest.mark.usefixtures("patient", "last")
def test_a_wrong_guess_has_ended_when_its_unit_is_stepped_again(slow: LateStreams) -> None:
    gradients = random_gradients(2)
    pipeline, compute = built(adamw, streams=slow, ahead=True)
    train(pipeline, gradients, scale=0.5)
    pipeline.finish()
    expected = plain(adamw, gradients, scale=0.5)
    assert_same(masters(pipeline), expected)
    assert_same(compute, [line.to(torch.bfloat16) for line in expected])
    pipeline.close()


@pytest.mark.usefixtures("patient", "last")
def test_a_guess_has_ended_when_its_unit_gets_another_gradient(slow: LateStreams) -> None:
    gradients = random_gradients(2)
    pipeline, compute = built(adamw, streams=slow, ahead=True)
    for u in reversed(UNITS):
        pipeline.offer(u, gradients[0][u].clone())
        assert pipeline.ahead is not None
        assert pipeline.ahead._guesses[u]._started.wait(30)
        pipeline.offer(u, gradients[1][u].clone(), replace=True)
    pipeline.step()
    pipeline.finish()
    expected = plain(adamw, gradients[1:])
    assert_same(masters(pipeline), expected)
    assert_same(compute, [line.to(torch.bfloat16) for line in expected])
    assert (pipeline.ahead.claimed, pipeline.ahead.missed) == (4, 4)
    pipeline.close()


@pytest.mark.usefixtures("patient", "last")
def test_guesses_have_ended_when_an_update_that_failed_goes_on(
    monkeypatch: pytest.MonkeyPatch, slow: LateStreams
) -> None:
    gradients = random_gradients(1)
    pipeline, compute = built(adamw, streams=slow, ahead=True)
    find_take = Guess.find_take

    def failing(guess: Guess, block: Block) -> Callable[[], None]:
        if block.index == 0:
            raise MemoryError("no more")
        return find_take(guess, block)

    monkeypatch.setattr(Guess, "find_take", failing)
    train(pipeline, gradients)
    with pytest.raises(MemoryError, match="no more"):
        pipeline.finish()
    pipeline.retry()
    expected = plain(adamw, gradients)
    assert_same(masters(pipeline), expected)
    assert_same(compute, [line.to(torch.bfloat16) for line in expected])
    pipeline.close()


def test_a_delay_and_steps_ahead_are_refused_together() -> None:
    with pytest.raises(ValueError, match="delayed=True and ahead=True"):
        built(adamw, ahead=True, delayed=True)


class Gate:
    """The first unit's step ahead begins, and goes on once the pipeline has called a method of `StepsAhead`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, until: str) -> None:
        self.started: list[int] = []
        self.under_way, self._open = threading.Event(), threading.Event()
        step, call = Stepper.start_ahead, getattr(StepsAhead, until)

        def start(stepper: Any, index: int, *args: Any, **options: Any) -> Any:
            self.started.append(index)
            self.under_way.set()
            assert self._open.wait(30)
            return step(stepper, index, *args, **options)

        def then(ahead: Any, *args: Any) -> Any:
            if until in ("_forget", "claim"):  # what is forgotten is forgotten before anything goes on
                found = call(ahead, *args)
                self._open.set()
                return found
            self._open.set()
            return call(ahead, *args)

        monkeypatch.setattr(Stepper, "start_ahead", start)
        monkeypatch.setattr(StepsAhead, until, then)


def test_state_is_read_when_its_step_is_not_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    pipeline, _ = built(adamw, ahead=True)
    gate = Gate(monkeypatch, "wait")
    pipeline.offer(2, random_gradients(1)[0][2])
    assert gate.under_way.wait(30)
    assert pipeline.ahead is not None
    guess = pipeline.ahead._guesses[2]
    pipeline.shard(2)
    assert guess._started.is_set()
    pipeline.close()


def test_closing_waits_for_what_is_under_way_and_begins_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    pipeline, compute = built(adamw, ahead=True)
    here = [line.clone() for line in compute]
    gate = Gate(monkeypatch, "_forget")
    pipeline.offer(3, random_gradients(1)[0][3])
    assert gate.under_way.wait(30)
    assert pipeline.ahead is not None
    first = pipeline.ahead._guesses[3]
    pipeline.offer(2, random_gradients(1)[0][2])
    pipeline.close()
    assert first._started.is_set()
    assert len(gate.started) == 1
    assert equal(compute, here)
