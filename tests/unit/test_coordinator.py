"""The state machine of membership: each rule by itself, every schedule of small worlds, and random ones of larger.

The schedules interleave all that can happen to workers with the launcher's questions, in any order: workers die in any
state, come for no reason, end well, and the number that is wanted changes. `UNISONO_SCHEDULES=50` tries so many times
as many random ones, and one more death in the small worlds.
"""

from __future__ import annotations

import os
import random
from collections import deque
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field, replace

import pytest

from unisono.launchers.coordinator import Action, Coordinator, Dismiss, End, Form, GiveUp, Start, Summon, TooFew

MORE = int(os.environ.get("UNISONO_SCHEDULES", "1"))
PATIENCE_S = 10.0


# Each rule -----------------------------------------------------------------------------------------------------------


def begin(workers: int, *, least: int = 1, wanted: int | None = None) -> Coordinator:
    coordinator = Coordinator(workers if wanted is None else wanted, least, patience_s=PATIENCE_S)
    coordinator.begin(list(range(workers)))
    return coordinator


def lose(coordinator: Coordinator, worker: int) -> None:
    coordinator.ended(worker, well=False)


def test_nothing_is_done_while_all_train() -> None:
    assert begin(3).decide(0.0) == []


def test_a_lost_worker_is_replaced_and_the_others_wait_for_each_other() -> None:
    coordinator = begin(3)
    lose(coordinator, 1)
    assert coordinator.decide(0.0) == [Summon(1), Start(1)]  # also those who would not notice: they exchange nothing
    coordinator.started(3)
    coordinator.came(0)
    assert coordinator.decide(0.0) == []
    coordinator.came(2)
    assert coordinator.decide(0.0) == [Form(1, (0, 2))]


def test_a_newcomer_is_taken_in_when_all_members_have_come() -> None:
    coordinator = begin(2, wanted=3)
    assert coordinator.decide(0.0) == [Start(1)]
    coordinator.started(2)
    coordinator.came(2)
    assert coordinator.decide(0.0) == [Summon(1)]
    coordinator.came(1)
    assert coordinator.decide(0.0) == []
    coordinator.came(0)
    assert coordinator.decide(0.0) == [Form(1, (0, 1, 2))]


def test_those_above_the_number_wanted_are_dismissed() -> None:
    coordinator = begin(3)
    coordinator.wanted = 2
    assert coordinator.decide(0.0) == [Summon(1)]
    for worker in (2, 0, 1):
        coordinator.came(worker)
    assert coordinator.decide(0.0) == [Dismiss(2), Form(1, (0, 1))]


def test_a_newcomer_that_nobody_needs_any_more_is_ended() -> None:
    coordinator = begin(2, wanted=3)
    coordinator.decide(0.0)
    coordinator.started(2)
    coordinator.wanted = 2
    assert coordinator.decide(0.0) == [End(2)]
    coordinator.came(2)
    assert coordinator.decide(0.0) == []


def test_below_the_least_they_wait_and_then_leave() -> None:
    coordinator = begin(2, least=2)
    lose(coordinator, 0)
    assert coordinator.decide(0.0) == [Summon(1), Start(1)]
    coordinator.started(2)
    coordinator.came(1)
    assert coordinator.decide(1.0) == []
    assert coordinator.decide(PATIENCE_S) == []
    assert coordinator.decide(PATIENCE_S + 1.0) == [TooFew(1), Form(1, (1,)), End(2)]


def test_newcomers_are_taken_in_only_where_all_members_are_open() -> None:
    coordinator = begin(2, wanted=3, least=3)
    assert coordinator.decide(0.0) == [Summon(1), Start(1)]
    coordinator.started(2)
    coordinator.came(2)
    coordinator.came(0)
    coordinator.came(1, is_open=False)
    assert coordinator.decide(0.0) == [Summon(2), Form(1, (0, 1))]
    coordinator.came(0)
    coordinator.came(1)
    assert coordinator.decide(0.0) == [Form(2, (0, 1, 2))]


def test_newcomers_are_ended_when_those_left_are_to_leave() -> None:
    """They would wait for ever, and others that wait make a member that does not come look stuck."""
    coordinator = begin(3, least=3)
    lose(coordinator, 0)
    lose(coordinator, 1)
    assert coordinator.decide(0.0) == [Summon(1), Start(2)]
    coordinator.started(3)
    coordinator.started(4)
    coordinator.came(2)
    coordinator.came(3)
    assert coordinator.decide(0.0) == []
    assert coordinator.decide(PATIENCE_S) == [TooFew(2), Form(1, (2,)), End(3), End(4)]
    assert coordinator.decide(PATIENCE_S) == []


def test_no_more_are_started_after_three_that_never_trained() -> None:
    coordinator = begin(2)
    lose(coordinator, 1)
    for worker in (2, 3, 4):
        assert Start(1) in coordinator.decide(0.0)
        coordinator.started(worker)
        lose(coordinator, worker)
    assert coordinator.decide(0.0) == []
    coordinator.came(0)
    assert coordinator.decide(0.0) == [Form(1, (0,))]


def test_one_that_settled_makes_failed_starts_be_forgotten() -> None:
    coordinator = begin(1, wanted=2)
    for worker in (1, 2):
        coordinator.decide(0.0)
        coordinator.started(worker)
        lose(coordinator, worker)
    coordinator.decide(0.0)
    coordinator.started(3)
    coordinator.came(3)
    coordinator.came(0)
    assert Form(1, (0, 3)) in coordinator.decide(0.0)
    coordinator.settled(3)
    lose(coordinator, 3)
    assert coordinator.decide(0.0) == [Summon(2), Start(1)]


@pytest.mark.parametrize("lost", [0, 2])
def test_a_worker_lost_before_the_others_end_is_missed_if_it_was_rank_0(lost: int) -> None:
    """Others may end their program without noticing (`parameter_server`); what rank 0 writes at the end is missing."""
    coordinator = begin(3)
    lose(coordinator, lost)
    for worker in {0, 1, 2} - {lost}:
        coordinator.ended(worker, well=True)
    found = coordinator.decide(0.0)
    assert found == ([GiveUp("a worker was lost when the others had ended")] if lost == 0 else [])


def test_fewer_than_the_least_do_not_go_on_after_one_that_ended_early() -> None:
    coordinator = begin(3, least=2)
    coordinator.advanced(64)
    coordinator.ended(2, well=True)
    lose(coordinator, 1)
    coordinator.came(0)
    assert Form(1, (0,)) in coordinator.decide(0.0)
    coordinator.advanced(64)  # the step under way is ended
    assert coordinator.decide(0.0) == []
    coordinator.advanced(65)
    (found,) = coordinator.decide(0.0)
    assert isinstance(found, GiveUp)
    assert "1 of at least 2 workers continued to step 65" in found.why


def test_the_run_fails_when_all_members_are_lost_though_a_newcomer_waits() -> None:
    coordinator = begin(1, wanted=2)
    coordinator.decide(0.0)
    coordinator.started(1)
    coordinator.came(1)
    lose(coordinator, 0)
    assert coordinator.decide(0.0) == [GiveUp("all workers were lost")]


def test_the_run_fails_when_workers_are_lost_without_a_step_in_between() -> None:
    coordinator = begin(1, wanted=1)
    coordinator.members = list(range(7))
    for worker in range(6):
        lose(coordinator, worker)
    assert any(isinstance(action, GiveUp) for action in coordinator.decide(0.0))


def test_a_step_makes_losses_be_forgotten() -> None:
    coordinator = begin(1, wanted=1)
    coordinator.members = list(range(7))
    for worker in range(6):
        lose(coordinator, worker)
        coordinator.advanced()
    assert not any(isinstance(action, GiveUp) for action in coordinator.decide(0.0))


def test_nobody_comes_any_more_when_one_has_ended_its_program() -> None:
    coordinator = begin(2, wanted=3)
    coordinator.decide(0.0)
    coordinator.started(2)
    coordinator.ended(0, well=True)
    assert coordinator.decide(0.0) == [End(2)]
    coordinator.came(1)
    assert coordinator.decide(0.0) == [Summon(1), Form(1, (1,))]
    coordinator.ended(1, well=True)
    assert coordinator.decide(0.0) == []


# Schedules -----------------------------------------------------------------------------------------------------------


@dataclass
class Schedule:
    """Workers that obey the coordinator, and what happens to them. A worker is, by its number:

    "starts": a newcomer; "waits": has come; "waits closed": has, from the middle of a step; "enters": has been given
    its place; "trains": has settled.
    """

    coordinator: Coordinator
    most: int
    workers: dict[int, str] = field(default_factory=dict)
    now: float = 0.0
    started: int = 0
    generation: int = 0
    formed: frozenset[int] = frozenset()  # the generation, as it was formed
    summoned: int = 0  # the newest generation that all are called to
    has_ended: bool = False
    left: bool = False  # TooFew
    given_up: bool = False
    first: int = 0  # rank 0 of the generation
    is_missed: bool = False  # it was lost, or another when the others had ended: nobody does what it had still to do

    @classmethod
    def begin(cls, workers: int, *, least: int, most: int) -> Schedule:
        coordinator = Coordinator(workers, least, patience_s=PATIENCE_S)
        coordinator.begin(list(range(workers)))
        everyone = range(workers)
        return cls(coordinator, most, dict.fromkeys(everyone, "trains"), started=workers, formed=frozenset(everyone))

    def copy(self) -> Schedule:
        old = self.coordinator
        new = replace(
            old,
            members=list(old.members),
            newcomers=list(old.newcomers),
            waiting=set(old.waiting),
            closed=set(old.closed),
            _new=set(old._new),
        )
        return replace(self, coordinator=new, workers=dict(self.workers))

    def key(self) -> Hashable:
        """What the future depends on: numbers of workers and generations do not count, but their order does."""
        c = self.coordinator
        return (
            tuple((self.workers[w], w in c._new) for w in c.members),
            tuple(self.workers[w] for w in c.newcomers),
            (c.wanted, c.ending, c.replaces, c.too_few, c._failed_starts, c._lost_at_step, c._lost),
            (c._summoned - c.generation, self.is_summoned, self.is_hurt, self.left, self.given_up, self.is_missed),
            self.first in self.workers,
            None if c._short_since is None else min(self.now - c._short_since, PATIENCE_S),
        )

    @property
    def members(self) -> list[int]:
        """Of the generation, those that live."""
        return [w for w in self.workers if w in self.formed]

    @property
    def is_hurt(self) -> bool:
        """Whether a collective of this generation fails: one is lost, or has left it to come."""
        return len(self.members) < len(self.formed) or any(self.waits(w) for w in self.members)

    @property
    def is_summoned(self) -> bool:
        return self.summoned > self.generation

    def waits(self, worker: int) -> bool:
        return self.workers.get(worker, "").startswith("waits")

    # What happens

    def events(self) -> Iterator[tuple[str, int]]:
        """All that can happen now."""
        if self.given_up or not self.workers:
            return
        yield "decide", 0
        if self.coordinator._short_since is not None and self.now < self.coordinator._short_since + PATIENCE_S:
            yield "time", 0
        if self.coordinator._lost_at_step:
            yield "advance", 0
        for worker, state in self.workers.items():
            yield "die", worker
            if not self.waits(worker):
                yield "come", worker  # for any reason, or none
                if worker in self.formed:
                    yield "come closed", worker
            if state == "enters":
                yield "settle", worker
            if state == "trains":
                yield "end", worker
        for wanted in range(self.coordinator.least, self.most + 1):
            if wanted != self.coordinator.wanted:
                yield "scale", wanted

    def happen(self, what: str, worker: int) -> None:
        c = self.coordinator
        if what == "decide":
            self.decide()
        elif what == "time":
            self.now += PATIENCE_S / 2
        elif what == "advance":
            c.advanced()
        elif what == "scale":
            c.wanted = worker
        elif what in ("come", "come closed"):
            self.workers[worker] = what.replace("come", "waits")
            c.came(worker, is_open=what == "come")
        elif what == "settle":
            self.workers[worker] = "trains"
            c.settled(worker)
        else:
            self.has_ended = self.has_ended or what == "end"
            if what == "end":  # those that are left do not wait for it
                self.formed -= {worker}
            elif worker == self.first or self.members == [worker]:
                self.is_missed = True
            del self.workers[worker]
            c.ended(worker, well=what == "end")

    # What is decided

    def decide(self) -> list[Action]:
        actions = self.coordinator.decide(self.now)
        for action in actions:
            self.act(action)
        if not self.given_up:
            assert self.coordinator.decide(self.now) == [], "the same question again gives more"
            self.check()
        return actions

    def act(self, action: Action) -> None:
        c = self.coordinator
        match action:
            case Start(count):
                assert count > 0
                assert not self.has_ended
                assert not self.left
                for _ in range(count):
                    self.workers[self.started] = "starts"
                    c.started(self.started)
                    self.started += 1
                newcomers = [w for w in self.workers if w not in self.formed]
                assert len(self.members) + len(newcomers) <= c.wanted, "more are started than wanted"
            case Summon(generation):
                assert self.summoned < generation <= self.generation + 2, "summoned twice"
                self.summoned = generation
            case Form(generation, workers):
                assert generation == self.generation + 1
                assert len(set(workers)) == len(workers)
                assert all(map(self.waits, workers)), "one has not come, or is lost"
                assert any(w in self.formed for w in workers), "nobody has the model"
                assert set(self.members) <= set(workers), "a member is neither in the next generation nor dismissed"
                assert len(workers) <= c.wanted
                newcomers = [w for w in workers if w not in self.formed]
                closed = any(self.workers[w] == "waits closed" for w in workers)
                assert not (newcomers and (self.has_ended or self.left or closed))
                assert len(workers) >= min(c.least, c.wanted) or self.left or self.has_ended or closed
                self.generation, self.formed = generation, frozenset(workers)
                self.first, self.is_missed = workers[0], False
                for worker in workers:
                    self.workers[worker] = "enters"
            case Dismiss(worker):
                assert self.waits(worker)
                assert len(self.members) > c.wanted
                self.formed -= {worker}
                del self.workers[worker]
            case End(worker):
                assert worker not in self.formed, "a member is ended"
                del self.workers[worker]
            case TooFew(left):
                assert not self.left, "told twice to leave"
                assert 0 < left < c.least
                self.left = True
            case GiveUp():
                assert not self.members or c._lost_at_step > c.wanted, "there are workers that could go on"
                assert self.members or self.is_missed or not self.has_ended, "all have ended well"
                self.given_up = True

    def check(self) -> None:
        """What holds after every decision."""
        c = self.coordinator
        assert self.members or (self.has_ended and not self.is_missed), "the run goes on without a member"
        waits = set(filter(self.waits, self.workers))
        assert sorted(c.members) == sorted(self.members)
        assert sorted(c.newcomers) == sorted(w for w in self.workers if w not in self.formed)
        assert c.waiting == waits
        some, every = bool(waits & set(c.members)), waits >= set(c.members)
        if some:
            assert self.is_summoned, "some members wait, and the others are not called"
            assert not every or c._short_since is not None, "all wait, and no generation is formed"
        if c._short_since is not None:
            assert self.now < c._short_since + PATIENCE_S, "they wait for longer than patience_s"

    def finish(self) -> None:
        """From here on nobody dies: then they end up in one generation, and train."""
        for _ in range(60):
            actions = self.decide()
            if self.given_up or not self.workers:
                return
            before = dict(self.workers)
            for worker, state in before.items():
                if self.waits(worker):
                    continue
                if worker in self.formed and self.is_hurt:
                    self.happen("come" if self.is_summoned and state == "trains" else "come closed", worker)
                elif state == "starts" or (state == "trains" and self.is_summoned):
                    self.happen("come", worker)
                elif state == "enters":
                    self.happen("settle", worker)
            if self.workers == before and not actions:
                if set(before.values()) == {"trains"}:
                    break
                self.now += PATIENCE_S
        c = self.coordinator
        assert set(self.workers.values()) == {"trains"}, f"they wait for ever: {self.workers}"
        assert self.formed == set(self.workers)
        assert len(self.workers) == c.wanted or not c.replaces or self.has_ended or self.left


def describe(path: list[tuple[str, int]]) -> str:
    return ", ".join(f"{what} {worker}" for what, worker in path)


@pytest.mark.parametrize(("workers", "least", "most", "deaths"), [(2, 1, 2, 1), (2, 2, 3, 1)])
def test_every_schedule_of_a_small_world(workers: int, least: int, most: int, deaths: int) -> None:
    """All orders of all events, with so many workers lost at any point; from each state the run goes on or ends."""
    deaths += MORE > 1
    first = Schedule.begin(workers, least=least, most=most)
    seen: set[Hashable] = {(first.key(), deaths)}
    queue: deque[tuple[Schedule, int, list[tuple[str, int]]]] = deque([(first, deaths, [])])
    while queue:
        here, left, path = queue.popleft()
        for event in here.events():
            if event[0] == "die" and not left:
                continue
            after, along = here.copy(), [*path, event]
            rest = left - (event[0] == "die")
            try:
                after.happen(*event)
                key = (after.key(), rest)
                if key in seen:
                    continue
                seen.add(key)
                after.copy().finish()
            except AssertionError as error:
                raise AssertionError(f"{error}, after {describe(along)}") from error
            queue.append((after, rest, along))
    assert len(seen) > 100


@pytest.mark.parametrize("seed", range(20 * MORE))
def test_random_schedules_of_larger_worlds(seed: int) -> None:
    draw = random.Random(seed)
    for _ in range(40):
        most = draw.randint(1, 6)
        least = draw.randint(1, most)
        schedule, path = Schedule.begin(draw.randint(least, most), least=least, most=most), []
        rare = draw.choice([1.0, 0.3, 0.05])  # how often workers are lost
        weights = {"die": rare, "end": 0.02, "scale": 0.2, "time": 0.5, "decide": 4.0, "advance": 0.2}
        try:
            for _ in range(draw.randint(1, 80)):
                events = list(schedule.events())
                if not events:
                    break
                path += draw.choices(events, [weights.get(what, 1.0) for what, _ in events])
                schedule.happen(*path[-1])
            schedule.finish()
        except AssertionError as error:
            raise AssertionError(f"{error}, with {least} to {most} workers after {describe(path)}") from error
