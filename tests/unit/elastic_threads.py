"""A run whose workers come and go, with threads for processes: the library's own coordinator, shards, replicas and
healing, over a transport in which workers die at chosen operations."""

from __future__ import annotations

import os
import threading
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from unisono import World
from unisono.launchers.coordinator import Action, Coordinator, Dismiss, End, Form, GiveUp, Start, Summon
from unisono.launchers.runtime.files import anonymous_file
from unisono.launchers.runtime.membership import Assignment, Dismissed, ResultLog
from unisono.world import PeerLost
from unisono.world.elastic import Elastic
from unisono.world.rendezvous import enter
from unisono.world.transports import Op, Transport
from unisono.world.transports.threads import Hub, ThreadTransport

PATIENCE_S = 60.0  # a run that takes longer stands still


@dataclass(frozen=True)
class Event:
    """What happens at a worker's operation of that number, from its first batch on (a newcomer's: from its start).

    "die before": it takes no part in the operation. "die in": it does, and those in `lucky` have the result; the others
    have garbage in place of it, or half of what is gathered or broadcast. "die coming": it dies as it waits for
    its n-th next generation. "scale": so many are wanted from then on.
    """

    what: str
    worker: int
    at: int
    lucky: frozenset[int] = frozenset()
    wanted: int = 0


class Died(Exception):
    """This worker is no more."""


@dataclass
class Life:
    """A worker."""

    number: int
    run: Run
    is_armed: bool = False
    is_dead: bool = False
    operations: int = 0
    comings: int = 0
    transports: list[FaultyTransport] = field(default_factory=list)

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name == "is_armed":
            self.run.note_armed(self)

    def find_event(self, at: int, *, coming: bool) -> Event | None:
        """The one that is due."""
        if self.is_dead:
            raise Died
        due = [e for e in self.run.events if e.worker == self.number and e.at == at and e not in self.run.happened]
        due = [e for e in due if (e.what == "die coming") == coming]
        if not self.is_armed or not due:
            return None
        self.run.happened.append(due[0])
        return due[0]

    def die(self) -> None:
        self.is_dead = True
        for transport in list(self.transports):
            transport.close()
        raise Died


class FaultyTransport(ThreadTransport):
    """One rank of a generation."""

    def __init__(self, hub: Hub, rank: int, life: Life) -> None:
        super().__init__(hub, rank)
        self.life = life
        self._operations = 0
        life.transports.append(self)

    def _do(self, run: Callable[[], Any], spoil: Callable[[], None] = lambda: None) -> Any:
        life = self.life
        number, self._operations = self._operations, self._operations + 1
        event = life.find_event(life.operations, coming=False)
        life.operations += life.is_armed
        if event is not None and event.what == "scale":
            life.run.scale(event.wanted)
            event = None
        if event is not None and event.what == "die before":
            life.die()
        if self.hub.left:  # a thread behind a program that has died may have left its part of an operation there
            raise PeerLost("a peer was lost before this operation")
        torn = life.run.torn
        if event is not None:
            torn[self.hub, number] = event.lucky
        result = run()
        if event is not None:
            life.die()
        if life.number not in torn.get((self.hub, number), {life.number}):
            spoil()
            raise PeerLost("a peer was lost in this operation")
        return result

    def all_reduce(self, parts: Sequence[Tensor], op: Op) -> float:
        return float(self._do(lambda: super(FaultyTransport, self).all_reduce(parts, op), partial(_fill, parts)))

    def reduce_scatter(self, x: Tensor, counts: Sequence[int], op: Op, out: Tensor) -> float:
        return float(
            self._do(lambda: super(FaultyTransport, self).reduce_scatter(x, counts, op, out), partial(_fill, [out]))
        )

    def all_gather(self, x: Tensor, outs: Sequence[Tensor]) -> float:
        return float(self._do(lambda: super(FaultyTransport, self).all_gather(x, outs), _take_back_half(outs)))

    def broadcast(self, parts: Sequence[Tensor], src: int) -> float:
        return float(self._do(lambda: super(FaultyTransport, self).broadcast(parts, src), _take_back_half(parts)))

    def exchange(self, data: bytes) -> list[bytes]:
        found: list[bytes] = self._do(lambda: super(FaultyTransport, self).exchange(data))
        return found

    def split(self, groups: Sequence[Sequence[int]]) -> Transport:
        made: ThreadTransport = self._do(lambda: super(FaultyTransport, self).split(groups))
        return FaultyTransport(made.hub, made.rank, self.life)

    def abandon(self, why: Exception) -> None:
        self.close()


def _take_back_half(parts: Sequence[Tensor]) -> Callable[[], None]:
    """Half of them have not come. (None is garbage: a rank's own part may lie among them.)"""
    before = [part.clone() for part in parts]

    def spoil() -> None:
        for part, old in zip(parts[len(parts) // 2 :], before[len(parts) // 2 :], strict=True):
            part.copy_(old)

    return spoil


def _fill(outs: Sequence[Tensor]) -> None:
    for out in outs:
        out.view(torch.uint8).fill_(0xFF)  # not a number


class ThreadMembership:
    """Stands for `Membership`: the launcher is in this process."""

    def __init__(self, life: Life, *, joining: bool) -> None:
        self._life = life
        self.log = life.run.log
        self.generation, self.joining = 0, joining

    @property
    def is_regroup_requested(self) -> bool:
        return self._life.run.summoned > self.generation

    def join_generation(self, *, is_open: bool = True) -> Assignment:
        given = self._life.run.come(self._life, is_open=is_open)
        self.generation, self.joining = given.generation, False
        return given

    def acknowledge(self) -> None:
        self._life.run.settle(self._life)


class Run:
    """A program that workers run, which come and go. `program(world, life)` sets `life.is_armed` before its first
    batch."""

    def __init__(
        self, program: Callable[[World, Life], Any], workers: int, events: Sequence[Event] = (), *, wanted: int = 0
    ) -> None:
        self.program, self.events = program, list(events)
        self.happened: list[Event] = []
        self.torn: dict[tuple[Hub, int], frozenset[int]] = {}
        self.coordinator = Coordinator(wanted or workers, 1)
        self.summoned = 0
        self.given_up = ""
        self.results: dict[int, Any] = {}  # of the workers that ended well
        self.errors: dict[int, str] = {}  # of those that failed by themselves
        self.generations: list[tuple[int, ...]] = [tuple(range(workers))]
        self._log_fd = anonymous_file("unisono-results")
        self.log = ResultLog(self._log_fd)
        self._hubs = {0: Hub(workers, PATIENCE_S)}
        self._answers: dict[int, Assignment | None] = {}
        self._changed = threading.Condition()
        self._threads: list[threading.Thread] = []
        self._live = 0
        self._is_noted = False  # worker 0 has written the results of the calls before its first batch, or has ended

    def play(self) -> Run:
        """Run it to its end."""
        with self._changed:
            self.coordinator.begin(list(range(len(self.generations[0]))))
            for worker in self.coordinator.members:
                self._start(worker, joining=False)
            self._decide()
            if not self._changed.wait_for(lambda: self._live == 0, PATIENCE_S):
                raise AssertionError(f"the run stands still: {self.describe()}\n{_describe_threads()}")
        for thread in self._threads:
            thread.join()
        os.close(self._log_fd)
        return self

    def describe(self) -> str:
        return f"events {self.happened}, generations {self.generations}, errors {self.errors}, {self.coordinator}"

    def scale(self, wanted: int) -> None:
        with self._changed:
            self.coordinator.wanted = wanted
            self._decide()

    def note_armed(self, life: Life) -> None:
        with self._changed:
            self._is_noted |= life.number == 0 and life.is_armed
            self._changed.notify_all()

    def wait_for_newcomer(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self.summoned > 0)

    # A worker's end

    def come(self, life: Life, *, is_open: bool) -> Assignment:
        with self._changed:
            event = life.find_event(life.comings, coming=True)
            life.comings += 1
            self.coordinator.came(life.number, is_open=is_open)
            if event is not None:
                life.die()
            self._decide()
            self._changed.wait_for(lambda: life.number in self._answers or bool(self.given_up))
            if self.given_up:
                raise Died
            given = self._answers.pop(life.number)
        if given is None:
            raise Dismissed(0)
        return given

    def settle(self, life: Life) -> None:
        with self._changed:
            self.coordinator.settled(life.number)
            self._decide()

    def advance(self) -> None:
        with self._changed:
            self.coordinator.advanced()

    # The launcher's

    def _decide(self) -> None:
        if not self.given_up:
            for action in self.coordinator.decide(0.0):
                self._act(action)
        self._changed.notify_all()

    def _act(self, action: Action) -> None:
        match action:
            case Start(count):
                for _ in range(count):
                    worker = len(self._threads)
                    self.coordinator.started(worker)
                    self._start(worker, joining=True)
            case Summon(generation):
                self.summoned = generation
            case Form(generation, workers):
                self.generations.append(workers)
                self._hubs[generation] = Hub(len(workers), PATIENCE_S)
                for rank, worker in enumerate(workers):
                    self._answers[worker] = Assignment(generation, rank, len(workers), workers)
            case Dismiss(worker) | End(worker):
                self._answers[worker] = None
            case GiveUp(why):
                self.given_up = why
            case _:
                raise AssertionError(action)

    def _start(self, worker: int, *, joining: bool) -> None:
        life = Life(worker, self, is_armed=joining)
        thread = threading.Thread(target=self._work, args=(life,), kwargs={"joining": joining}, daemon=True)
        self._threads.append(thread)
        self._live += 1
        thread.start()

    def _work(self, life: Life, *, joining: bool) -> None:
        with self._changed:  # a process takes longer to start than the others need for this
            self._changed.wait_for(lambda: self._is_noted or not joining)
        world = self._join(life, joining=joining)
        enter(world)
        well = False
        try:
            result = self.program(world, life)
            with self._changed:
                self.results[life.number] = result
            well = True
        except (Died, Dismissed):
            pass
        except BaseException:
            self.errors[life.number] = traceback.format_exc()
        finally:
            enter(None)
            life.is_dead = not well
            for transport in list(life.transports):
                transport.close()
            with suppress(Died, PeerLost):
                world.close()
            with self._changed:
                self._is_noted |= life.number == 0
                self._leave_generations(life.number)
                self.coordinator.ended(life.number, well=well)
                self._live -= 1
                self._decide()

    def _leave_generations(self, worker: int) -> None:
        """Others find its process gone, also in a generation that it never entered."""
        for generation, workers in enumerate(self.generations):
            if worker in workers:
                hub = self._hubs[generation]
                with hub.changed:
                    hub.left.setdefault(workers.index(worker), "has died")
                    hub.changed.notify_all()

    def _join(self, life: Life, *, joining: bool) -> World:
        """As `un.join()` does it."""

        def form_generation(given: Assignment, device: torch.device) -> World:
            transport = FaultyTransport(self._hubs[given.generation], given.rank, life) if given.size > 1 else None
            name = f"world.{given.generation}"
            return World(transport, device=device, hosts=["localhost"] * given.size, name=name)

        if joining:
            world = World()
            size = len(self.coordinator.members)
            world.rank, world.size, world.hosts = size, size + 1, ("localhost",) * (size + 1)
        else:
            first = self.generations[0]
            world = form_generation(Assignment(0, life.number, len(first), first), torch.device("cpu"))
        membership: Any = ThreadMembership(life, joining=joining)
        world.elastic = Elastic(world, membership, World(), form_generation)
        return world


def _describe_threads() -> str:
    import sys

    frames = sys._current_frames()
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    return "\n".join(f"{names.get(ident)}:\n{''.join(traceback.format_stack(f)[-9:])}" for ident, f in frames.items())
