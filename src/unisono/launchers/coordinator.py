"""Who is in a world whose workers come and go: the decisions, without processes and clocks of their own.

A world has generations. Workers of a generation are members; a worker that was started later is a newcomer, until a
generation takes it in. Whoever finds that a peer is lost comes and waits; so does a newcomer that is ready. Another
generation is formed when every member that lives has come: so no member can go on in the old one, and each worker is
in one generation at a time. There is one coordinator, in the launcher: whom it takes in is agreed on by that alone.

A newcomer begins with a batch. So it is taken in only when all members are about to ask for one, or are between two
passes: they have come "open". From anywhere else they go on among themselves first, also if they are few.
"""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = ["Action", "Coordinator", "Dismiss", "End", "Form", "GiveUp", "Start", "Summon", "TooFew"]

FAILED_STARTS = 3  # newcomers in a row that ended before they were part of the world


@dataclass(frozen=True)
class Start:
    """Start `count` workers."""

    count: int


@dataclass(frozen=True)
class Summon:
    """Ask all members to come to the launcher at their next step."""

    generation: int


@dataclass(frozen=True)
class Form:
    """These workers, in the order of their ranks, are a generation; all of them have come."""

    generation: int
    workers: tuple[int, ...]


@dataclass(frozen=True)
class Dismiss:
    """Let a waiting member go: the run is to have fewer workers."""

    worker: int


@dataclass(frozen=True)
class End:
    """Kill a newcomer that no generation will take in."""

    worker: int


@dataclass(frozen=True)
class TooFew:
    """Too few members are left and nobody joined in time: have them save and leave."""

    left: int


@dataclass(frozen=True)
class GiveUp:
    """End the run as failed."""

    why: str


Action = Start | Summon | Form | Dismiss | End | TooFew | GiveUp


@dataclass
class Coordinator:
    """`wanted` workers are aimed at, and there is no world of fewer than `least`, unless none come for `patience_s`."""

    wanted: int
    least: int
    patience_s: float = 60.0
    generation: int = 0
    members: list[int] = field(default_factory=list)  # of this generation, those that live, by their ranks
    newcomers: list[int] = field(default_factory=list)
    waiting: set[int] = field(default_factory=set)  # those that have come
    closed: set[int] = field(default_factory=set)  # of these, members that are in the middle of a step
    ending: bool = False  # a member has ended its program well: nobody comes any more
    replaces: bool = True  # whether workers are started in place of lost ones
    too_few: bool = False  # those left have been told to leave
    _summoned: int = 0
    _failed_starts: int = 0
    _lost_at_step: int = 0  # members lost since the last step
    _short_since: float | None = None
    _lost: bool = False  # a member, since this generation was formed
    _unreplaced: bool = False  # rank 0 of this generation, or one that was lost when the others had ended
    _first: int = -1  # rank 0 of this generation
    _step: int = -1  # the furthest that any has come
    _ended_at: tuple[int, int] = (-1, -1)  # generation and step at which a member ended its program
    _new: set[int] = field(default_factory=set)  # taken in, and not yet settled

    # What happens -------------------------------------------------------------------------------------------------

    def begin(self, workers: list[int]) -> None:
        """Make these workers the first generation."""
        self.members = list(workers)
        self._first = workers[0]

    def started(self, worker: int) -> None:
        """Note that a newcomer has been started."""
        self.newcomers.append(worker)

    def came(self, worker: int, *, is_open: bool = True) -> None:
        """A worker waits for the next generation; `is_open`: newcomers may be taken in where it is."""
        if worker in self.members or worker in self.newcomers:
            self.waiting.add(worker)
            if not is_open:
                self.closed.add(worker)

    def aim_at(self, workers: int) -> None:
        """Aim at this number of workers, and try newcomers again if some have failed."""
        self.wanted = workers
        self.replaces, self._failed_starts = True, 0

    def settled(self, worker: int) -> None:
        """Note that a worker trains in this generation."""
        if worker in self._new:
            self._new.discard(worker)
            self._failed_starts = 0

    def advanced(self, step: int = -1) -> None:
        """Note that the members have made step number `step`."""
        self._lost_at_step = 0
        self._step = step

    def ended(self, worker: int, *, well: bool) -> None:
        """A worker was lost, or (`well`) has ended its program: its process may end later, and that is no loss."""
        was_member, was_new = worker in self.members, worker in self._new or worker in self.newcomers
        for group in (self.members, self.newcomers):
            if worker in group:
                group.remove(worker)
        self.waiting.discard(worker)
        self.closed.discard(worker)
        self._new.discard(worker)
        if well and was_member:
            self.ending = True
            self._ended_at = self.generation, self._step
        elif was_new:
            self._failed_starts += 1
        if was_member and not well:
            self._lost_at_step += 1
            self._lost = True
            self._unreplaced |= worker == self._first or not self.members

    # What is to be done --------------------------------------------------------------------------------------------

    def decide(self, now: float) -> list[Action]:
        """The actions that are due; asked again, there are no more until something happens."""
        if not self.members and (self._unreplaced or not self.ending):
            return [GiveUp("a worker was lost when the others had ended" if self.ending else "all workers were lost")]
        if self._goes_on_too_few():
            return [
                GiveUp(
                    f"{len(self.members)} of at least {self.least} workers continued to step {self._step}, after "
                    f"another had ended its program at step {self._ended_at[1]}: all must make the same steps"
                )
            ]
        actions = self._end_unwanted()
        if not self.members:
            return actions
        if self._lost_at_step > 2 * self.wanted + 3:
            return [GiveUp(f"{self._lost_at_step} workers were lost one after the other, without a step in between")]
        if self._failed_starts >= FAILED_STARTS:
            self.replaces = False
        actions += self._summon()
        if self._is_due() and all(worker in self.waiting for worker in self.members):
            formed = self._form(now)
            # Where they were not open, and others wait: called before they go on, so that all see it where they are.
            actions += [*self._summon(), *formed, *self._end_unwanted()]
        missing = self.wanted - len(self.members) - len(self.newcomers)
        if missing > 0 and self.replaces and not self.ending and not self.too_few:
            actions.append(Start(missing))
        return actions

    def _summon(self) -> list[Action]:
        if not self._is_due() or self._summoned > self.generation:
            return []
        self._summoned = self.generation + 1
        return [Summon(self._summoned)]

    def _end_unwanted(self) -> list[Action]:
        """End newcomers that no generation will take in; they would wait forever."""
        room = 0 if self.ending or self.too_few else max(0, self.wanted - len(self.members))
        unwanted = self.newcomers[room:]
        self.newcomers = self.newcomers[:room]
        self.waiting.difference_update(unwanted)
        return [End(worker) for worker in unwanted]

    def _ready(self) -> list[int]:
        """The waiting newcomers that there is room for."""
        if self.ending or self.too_few:
            return []
        ready = [worker for worker in self.newcomers if worker in self.waiting]
        return ready[: max(0, self.wanted - len(self.members))]

    def _goes_on_too_few(self) -> bool:
        """Whether too few members have gone on past the step at which another ended its program."""
        generation, step = self._ended_at
        is_short = 0 < len(self.members) < min(self.least, self.wanted)
        return is_short and not self.too_few and self.generation > generation >= 0 and self._step > step >= 0

    def _is_due(self) -> bool:
        """Whether another generation has to be formed."""
        lost = self._lost or any(worker in self.waiting for worker in self.members)
        return lost or bool(self._ready()) or len(self.members) > self.wanted or self._is_short(len(self.members))

    def _is_short(self, total: int) -> bool:
        """Whether `total` members are too few to train."""
        return total < min(self.least, self.wanted) and not self.ending and not self.too_few

    def _form(self, now: float) -> list[Action]:
        staying = self.members[: self.wanted]
        is_open = not self.closed.intersection(staying)
        ready = self._ready() if is_open else []
        total = len(staying) + len(ready)
        actions: list[Action] = []
        if is_open and self._is_short(total):
            if self._short_since is None:
                self._short_since = now
            hope = self.replaces or any(worker not in self.waiting for worker in self.newcomers)
            if hope and now < self._short_since + self.patience_s:
                return []
            self.too_few = True
            ready = self._ready()
            actions.append(TooFew(total))
        if is_open:
            self._short_since = None
        self._lost = self._unreplaced = False
        dismissed = self.members[self.wanted :]
        self.generation += 1
        self._summoned = self.generation
        self.members = [*staying, *ready]
        self._first = self.members[0]
        self._new |= set(ready)
        self.newcomers = [worker for worker in self.newcomers if worker not in ready]
        self.waiting -= {*self.members, *dismissed}
        self.closed.clear()
        actions += [Dismiss(worker) for worker in dismissed]
        return [*actions, Form(self.generation, tuple(self.members))]
