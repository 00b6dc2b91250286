"""A world that heals: how training goes on, in the same processes, when ranks have been lost or have come.

1. A rank finds that a peer is lost, in some collective, or that the launcher calls all to another generation of the
   world. It gives up the window of backward passes under way: its optimizer's step changes nothing. Before the next
   batch, or in a call of the program that needs the others, it tells them so and waits at the launcher's.
2. When all have come, they form the next generation. The rank whose model has had most steps is the source: the others
   are brought to its state by `Replica.rebind`, and a worker that has come gets all of it.
3. Every pass over data goes on from the source's last step. The batches of a window that was given up are given out
   once more, divided among the ranks that are there now; random numbers, buffers, learning-rate schedules and what
   `un.follow` was told of are what they were when these batches were first given out.

If another rank is lost meanwhile, all of it is done again. A rank that was being brought to the source's state is no
source until it has got there.
"""

from __future__ import annotations

import copy
import sys
import weakref
from collections import Counter
from collections.abc import Callable, MutableMapping
from typing import Any

import torch
from torch.optim import Optimizer

from unisono import rng
from unisono.launchers.runtime import faults
from unisono.launchers.runtime.frames import warn_user
from unisono.launchers.runtime.membership import Assignment
from unisono.methods.exchange.windows import Window
from unisono.methods.strategy.replica import Replica
from unisono.methods.strategy.schedules import find_schedules, take_plain, watch_schedules
from unisono.world import PeerLost, World, join
from unisono.world.elastic import Batches, Elastic
from unisono.world.operations import put_back

# Of ranks that differ by one exchange: how far each has come. One that was moved has no counters of its own to tell.
_FURTHEST = ("commits", "calls", "passes", "told", "whole")
MOST_ATTEMPTS = 5  # of the same processes to form a world


class Refused(RuntimeError):
    """This worker cannot join the run: it trains something else."""


class StateLost(RuntimeError):
    """No worker that is left has all of the model."""


class _Again(Exception):
    """A worker was refused: the others form the world without it."""


class Snapshot:
    """What the forward passes of a window change, and the program's own state, when its first batch was given out."""

    def __init__(self, healing: Healing, shard: str) -> None:
        self.shard = shard  # whose batch that was
        self._rng = rng.capture(healing.world.device)
        self._buffers = [(b, b.detach().clone()) for one in healing.replicas() for b in one.model.buffers()]
        self.scalers = [(s, copy.deepcopy(s.state_dict())) for s in healing.scalers()]
        self.followed = healing.followed.state()
        self.schedules: dict[str, Any] | None = None  # taken when the window is given up: it is the same till then

    @torch.no_grad()
    def restore_buffers(self) -> None:
        """At once: what other ranks are given has to be what was there before the window."""
        for buffer, saved in self._buffers:
            put_back(buffer, saved)

    def restore(self, healing: Healing) -> None:
        """Before the batches are given out once more."""
        rng.restore(self._rng, healing.world.device)
        for scaler, state in self.scalers:
            scaler.load_state_dict(state)
        healing.followed.load(self.followed)
        if self.schedules is not None:
            healing.load_schedules(self.schedules)


class _Kept:
    """Model and optimizer of a rank that is brought to another's state: what it goes back to if that one is lost
    meanwhile. Ranks differ by a step only where a loss fell into the end of an exchange, so this memory is seldom
    needed, and not for long."""

    def __init__(self, replicas: list[Replica]) -> None:
        tensors = [t for replica in replicas for t in (*replica.model.parameters(), *replica.model.buffers())]
        self._averages = [(a, a.steps, a.updates) for one in replicas if (a := one.weight_average) is not None]
        tensors += [t for average, *_ in self._averages for t in average.held.values()]
        self._tensors = [(t, t.detach().clone()) for t in tensors]
        self._replicas = [
            (replica, replica.step, copy.deepcopy(replica.optimizer.state_dict())) for replica in replicas
        ]

    @torch.no_grad()
    def restore(self) -> None:
        for tensor, saved in self._tensors:
            tensor.copy_(saved)
        for average, steps, updates in self._averages:
            average.steps, average.updates = steps, updates
        for replica, step, state in self._replicas:
            replica.step = step
            replica.optimizer.load_state_dict(state)


class Followed:
    """The program's own counters, in the order in which they were told of."""

    def __init__(self) -> None:
        self._objects: list[Any] = []

    def add(self, obj: Any) -> None:
        """Register an object whose state travels to joining ranks."""
        self._objects.append(obj)

    def state(self) -> list[Any]:
        """Deep copies of the registered objects' states."""
        return [copy.deepcopy(o.state_dict() if hasattr(o, "state_dict") else dict(o)) for o in self._objects]

    def load(self, states: list[Any]) -> None:
        """Restore the registered objects."""
        for obj, state in zip(self._objects, states, strict=False):
            if hasattr(obj, "load_state_dict"):
                obj.load_state_dict(copy.deepcopy(state))
            else:
                obj.clear()
                obj.update(copy.deepcopy(state))


_followed: weakref.WeakKeyDictionary[World, Followed] = weakref.WeakKeyDictionary()


def follow(counters: MutableMapping[str, Any] | Any, *, world: World | None = None) -> Any:
    """Keep the program's own counters in step with the training in an elastic run. Returns them.

    `counters` is a dict of plain values and tensors, or has `state_dict()` and `load_state_dict()`. If a step is
    repeated because a worker was lost in it, they are reset to their values before it; a joining worker gets the
    others' values. Every rank of `world` (default: `un.join()`) calls it, before training. In a run with a fixed number
    of workers it does nothing.

    >>> counters = follow({"seen": 0}, world=World())
    >>> counters["seen"] += 1
    """
    _followed.setdefault(join() if world is None else world, Followed()).add(counters)
    return counters


class Healing:
    """Of one world, for all its replicas and shards."""

    def __init__(self, world: World, elastic: Elastic) -> None:
        self.world, self.elastic = world, elastic
        self._replicas: list[weakref.ref[Replica]] = []
        ours = sys.modules["unisono"].__version__
        self.descriptions: list[str] = [f"unisono {ours}, torch {torch.__version__}"]
        self.followed = _followed.setdefault(world, Followed())
        self.commits = 0  # optimizer steps that are part of the model, of all replicas
        self._positions: dict[str, list[int]] = {}  # of the shards that were trained on, at the last of these
        self._trained: set[str] = set()
        self._open: Snapshot | None = None  # a batch has been given out since the last of these
        self._again: Snapshot | None = None  # its window was given up: to be restored with the next batch
        self._newcomers = False  # some have come, or were moved: told the source's schedules with the next batch
        self._is_moved = False  # this is one of them: it was behind, and has the source's model
        self._source = 0
        self._is_late = False  # this is one of them, and its program has still to come to where the others are
        self._given_up_with: list[Optimizer] = []  # in whose steps the window was given up, till the next batch
        self._is_stepping = True  # else the optimizer's step under way is of a window that was given up
        self._counted: tuple[list[int], int] = [], 0  # windows of each replica, and of the ledger, at the last of these
        self._is_member = not elastic.is_joining
        self._is_whole = True  # this rank's model is that of `commits` steps
        self._kept: _Kept | None = None  # what it had before it was brought to another rank's
        self._former: World | None = None  # the last generation that was complete
        self.is_forming = False  # the world is being formed anew: nobody answers in the former one
        world.batch_weights.is_needed = True  # so that drawing ahead is noticed, also while all parts are even
        self._has_warned = False
        watch_schedules()

    @classmethod
    def of(cls, world: World) -> Healing | None:
        """The one of this world; None where its ranks stay."""
        elastic = world.elastic
        if elastic is None:
            return None
        if elastic.healer is None:
            elastic.healer = cls(world, elastic)
        assert isinstance(elastic.healer, Healing)
        return elastic.healer

    def add(self, replica: Replica, description: list[str]) -> None:
        """Another replica in this world; `description`: what must be the same on every rank."""
        self._replicas.append(weakref.ref(replica))
        self.descriptions += description
        replica.healing = self

    # What is there -----------------------------------------------------------------------------------------------

    def replicas(self) -> list[Replica]:
        """Those that live, in the order in which they were bound."""
        return [replica for ref in self._replicas if (replica := ref()) is not None and not replica.is_closed]

    def scalers(self) -> list[torch.amp.GradScaler]:
        """The replicas' GradScalers."""
        return [replica.scaler for replica in self.replicas() if replica.scaler is not None]

    def _find_schedules(self) -> list[Any]:
        """The learning-rate schedules of their optimizers, in an order that is the same on every rank."""
        return [schedule for one in self.replicas() for member in one.members for schedule in find_schedules(member)]

    def read_schedules(self) -> dict[str, Any]:
        """The state of the schedules, and the learning rates that they have set."""
        return {
            "schedules": [take_plain(schedule.state_dict()) for schedule in self._find_schedules()],
            "groups": [
                [take_plain({k: v for k, v in group.items() if k != "params"}) for group in one.optimizer.param_groups]
                for one in self.replicas()
            ],
        }

    def load_schedules(self, state: dict[str, Any]) -> None:
        """Restore LR schedulers and optimizer param groups."""
        for schedule, saved in zip(self._find_schedules(), state["schedules"], strict=False):
            schedule.load_state_dict({**schedule.state_dict(), **saved})
        for replica, groups in zip(self.replicas(), state["groups"], strict=True):
            for group, saved in zip(replica.optimizer.param_groups, groups, strict=True):
                group.update(saved)

    # Steps -------------------------------------------------------------------------------------------------------

    def before_step(self, optimizer: Optimizer, run: Callable[[], Any]) -> Any:
        """The optimizer is about to step: `run` ends the window. Where that failed, the step changes nothing, and the
        world is formed anew with the next batch."""
        if self.is_forming:  # the step that other ranks have taken, with gradients that are here (zero's spare)
            return run()
        is_another = self._has_given_up_with_another(optimizer)
        if is_another:
            pass
        elif self.elastic.is_joining:
            self.heal(is_open=not self.world.shards)
        elif not self.elastic.is_idle or self._is_half_stepped(optimizer):
            try:
                with self.elastic.inside():
                    return run()
            except PeerLost as error:
                self.elastic.broken = error
        self._given_up_with.append(optimizer)
        if not is_another:
            self._give_up_window()
            if self.elastic.broken is not None and not self.world.shards:
                self.heal(is_open=True)
        # Until it is forgotten, a window that was given up counts: another rank may have made this step, and what the
        # program does by `replica.step` in the rest of the round (save after every tenth), all ranks have to do.
        for replica, step in zip(self.replicas(), self._counted[0], strict=False):
            if self._open is not None and optimizer in replica.members:
                replica.step = step + 1
        for replica in self.replicas():
            replica.model.zero_grad()
            replica.optimizer.zero_grad()  # which may hold parts of the parameters in their place
        self._is_stepping = False
        return None

    def after_step(self, run: Callable[[], None]) -> None:
        """The optimizer has stepped."""
        if self.is_forming:
            run()
            return
        if not self._is_stepping:
            self._is_stepping = True
            return
        self._commit()
        try:
            with self.elastic.inside():
                run()
        except PeerLost as error:
            self.elastic.broken = error
        asked = self.elastic.broken is not None or self.elastic.membership.is_regroup_requested
        if not self.world.shards and asked and not self._is_half_stepped():
            self.heal(is_open=True)  # else the next batch is the place

    def _has_given_up_with_another(self, optimizer: Optimizer) -> bool:
        """Whether the window was given up in the step of another of several optimizers, and none has ended since."""
        mine = next((r for r in self.replicas() if optimizer in r.members), None)
        ended = mine is None or mine.windows is None or mine.windows.window is Window.ENDED
        if ended or optimizer in self._given_up_with:
            self._given_up_with = []
        return mine is not None and any(other in mine.members for other in self._given_up_with)

    def _is_half_stepped(self, optimizer: Optimizer | None = None) -> bool:
        """Whether some of several optimizers have stepped with a window, and others have not: it has to be ended."""
        return any(r.is_half_stepped for r in self.replicas() if optimizer is None or optimizer in r.members)

    @property
    def is_repeating(self) -> bool:
        """Whether the batches that are out will be given out once more."""
        return self._again is not None and self._again.shard in self._positions

    def _give_up_window(self) -> None:
        """Till now nothing but its forward passes has changed what is to be restored before it is repeated."""
        if self._open is not None and self._open.schedules is None:
            self._open.schedules = self.read_schedules()

    def _count(self) -> None:
        self._counted = [replica.step for replica in self.replicas()], self.world.ledger.step_count

    def _commit(self) -> None:
        self.commits += 1
        self._open = None
        self._count()
        for shard in self.world.shards.values():
            if shard.is_out:
                self._trained.add(shard.name)
                self._positions[shard.name] = shard.position
                if self.world.batch_weights.is_ahead(shard.name) and not self._has_warned:
                    self._has_warned = True
                    warn_user(_DRAWN_AHEAD.format(shard.name))

    def before_batch(self, shard: Batches) -> None:
        """A batch is asked for: a place to be let in at, and to heal what the steps have not."""
        self._given_up_with = []
        while True:
            others_out = any(other.is_out for other in self.world.shards.values() if other is not shard)
            is_over = self._positions.get(shard.name, [-1])[0] > shard.epoch  # here, and the others are further
            is_trained = self._is_trained(shard)
            if is_trained and not self._positions and not self.elastic.is_joining:
                self._positions[shard.name] = shard.position  # the first batch of all: one who comes begins with it too
            is_open = not others_out and not is_over and is_trained
            summoned = is_open and self.elastic.membership.is_regroup_requested
            if self.elastic.is_joining or self.elastic.broken is not None or summoned:
                self.heal(is_open=is_open)
                continue  # called again where some were not open: they come here next
            if self._is_late and not self._has_caught_up(shard):
                # What all calls before were answered for, all ranks do now: the trainer's evaluation, whose shard the
                # world does not know.
                if self.elastic.is_catching_up or self.world.shards.get(shard.name) is shard:
                    shard.cut()
                return
            if self._is_moved and shard.name in self._positions:  # it may have been in an earlier pass
                shard.move_to(*self._positions[shard.name])
            if not (self._newcomers and is_trained and self._positions.get(shard.name, [-1])[0] == shard.epoch):
                return  # no newcomer begins with this batch: the pass ends here, or is another
            try:
                with self.elastic.inside():
                    self._greet()
                return
            except PeerLost as error:
                self.elastic.broken = error

    def _has_caught_up(self, shard: Batches) -> bool:
        """Whether this is the pass that the others are in; passes before it give nothing out."""
        if shard.name not in self._positions:
            return False
        shard.move_to(*self._positions[shard.name])
        return shard.epoch >= self._positions[shard.name][0]

    def find_epoch(self, shard: str) -> int:
        """The epoch of a shard that the others are in. Raises Refused in a worker that has come, if they are not
        reading it: for a library's `fit`, which such a worker cannot pass through without batches."""
        if shard not in self._positions:
            raise Refused(
                f"this worker cannot join the run: the others are not in the pass that it has come to ({shard}). In "
                "a library's own loop, only the first `fit` of a program can be joined"
            )
        return self._positions[shard][0]

    def _greet(self) -> None:
        """With the first batch after they have come (at once, where there are none), newcomers, and ranks that
        were behind, get what the program of the source has changed."""
        again = self._again
        scalers = [s.state_dict() for s in self.scalers()] if again is None else [state for _, state in again.scalers]
        mine = {
            "schedules": self.read_schedules() if again is None else again.schedules,
            "scalers": [take_plain(state) for state in scalers],
            "followed": self.followed.state() if again is None else again.followed,
        }
        packet = self.world.broadcast_object(mine, self._source)
        self._newcomers = False
        if not (self._is_late or self._is_moved):
            return
        if self._is_late:
            self.elastic.end_replay()
        self._is_late = self._is_moved = False
        self.load_schedules(packet["schedules"])
        for scaler, state in zip(self.scalers(), packet["scalers"], strict=False):
            scaler.load_state_dict(state)
        self.followed.load(packet["followed"])

    def after_batch(self, shard: Batches) -> None:
        """It is about to be given out."""
        self.elastic.is_skipping = False
        # The pass in which the window was begun: if it goes on, so does the window. It may have been validation.
        begun = None if self._open is None else self.world.shards.get(self._open.shard)
        if self._again is not None:
            self._again.restore(self)
            self._open, self._again = self._again, None
        elif self._is_trained(shard) and (begun is None or not begun.is_out):
            self._open = Snapshot(self, shard.name)
            self._count()
            if shard.name not in self._positions:
                self._positions[shard.name] = shard.locate(shard.batch - 1)

    def _is_trained(self, shard: Batches) -> bool:
        """Whether its batches lead to steps, as far as is known: a pass for validation changes nothing."""
        return shard.name in self._trained or not self._trained

    # Another generation ------------------------------------------------------------------------------------------

    def heal(self, *, is_open: bool | None = None) -> None:
        """Go on in the next generation of the world; see the top of this file.

        `is_open`: whether one who comes may begin here; None: in a call of the program, as it is between two passes.
        """
        if is_open is None:
            is_open = self.elastic.in_call and self.elastic.is_between_passes
        why = self.elastic.broken or PeerLost("the world is being formed again")
        began = self.world.ledger.clock()
        self._give_up_window()
        if self._open is not None:  # its window may have been counted
            steps, count = self._counted
            for replica, step in zip(self.replicas(), steps, strict=False):
                replica.step = step
            if self.world.ledger.step_count != count:
                self.world.ledger.resume(count)
        in_step = self._open is not None
        attempts: Counter[tuple[int, ...]] = Counter()
        self.is_forming = True
        with self.elastic.inside():
            while True:
                self.world.abandon(why)
                assigned = self.elastic.membership.join_generation(is_open=is_open)
                attempts[assigned.pids] += 1
                try:
                    self._enter(assigned)
                    break
                except PeerLost as error:
                    if attempts[assigned.pids] >= MOST_ATTEMPTS:
                        raise
                    why = error
                except _Again as error:
                    why = PeerLost(str(error))
        self.is_forming = False
        self.elastic.broken, self.elastic.is_skipping = None, in_step
        self.world.ledger.close_span("forming", began, self.world.ledger.clock())
        if self._former is not None:
            self._former.close()
            self._former = None
        self.elastic.membership.acknowledge()

    def _enter(self, assigned: Assignment) -> None:
        joins = not self._is_member
        fresh = self.elastic.form_generation(assigned, self.world.device)
        old = self.world.adopt(fresh)
        self.world.stragglers, self.world.speeds = (), None
        if joins or self._former is not None:
            old.close()  # a generation that was never complete
        else:
            self._former = old
        if self._kept is not None:  # the one that this rank was brought up to may be lost
            self._kept.restore()
            self._kept, self._is_whole = None, True
        has_all = self._is_whole and not joins and not self._is_late
        every = self.world.gather_objects(self._describe(joins, has_all))
        faults.fire_in_healing(self.world.ledger.step_count)
        source = max(range(self.world.size), key=lambda r: (*(every[r][what] for what in _FURTHEST), -r))
        if every[source]["commits"] < 0:
            raise StateLost(
                "all workers with the whole model were lost while they sent it to the others: restart the run "
                "from its last checkpoint"
            )
        self._refuse_strangers(every, source)
        behind = every[source]["commits"] > self.commits or joins
        if self._open is not None:
            self._open.restore_buffers()
        given_up = self._open or self._again
        if given_up is not None and given_up.schedules is not None:
            self.load_schedules(given_up.schedules)  # rates are sent along, and others' step may be taken here too
        if behind and has_all and all(replica.sharded_state() is None for replica in self.replicas()):
            self._kept = _Kept(self.replicas())
        self._is_whole, note = self._is_whole and not behind, ""
        for replica in self.replicas():
            replica.world = self.elastic.solo if self._former is None else self._former
            note = replica.rebind(self.world, source=source)
        self.world.ledger.event("world", generation=assigned.generation, ranks=self.world.size, what=note)
        furthest = every[source]["commits"]
        someone_joins, someone_moves = any(one["joins"] for one in every), any(o["commits"] < furthest for o in every)
        packet = self.world.broadcast_object(self._pack(someone_joins, someone_moves), source)
        for shard in list(self.world.shards.values()):
            shard.rebind(self.world)
        results = self._find_results(every)
        self.elastic.write_log()
        self.world.tell_followers()
        self.world.barrier()
        self._kept = None
        self._source, self._newcomers = source, someone_moves or any(one["late"] for one in every)
        self._take(packet, behind=behind, joins=joins)
        if self._newcomers and not any(one["reads"] for one in every):
            self._greet()  # no batch will be asked for
        self.elastic.calls = packet["calls"]  # those in a step that was given up may have made more, or fewer
        if results:
            self.elastic.calls -= len(results)
            self.elastic.hand(results)

    def _describe(self, joins: bool, has_all: bool) -> dict[str, Any]:
        """How far this rank has come, and what it trains."""
        return {
            "commits": self.commits if has_all else -1,
            "calls": self.elastic.calls if not joins else -1,
            "in call": self.elastic.in_call,
            "passes": sum(shard.epoch for name, shard in self.world.shards.items() if name in self._trained),
            "told": not self._is_moved,
            "whole": not any(replica.is_split for replica in self.replicas()),
            "joins": joins,
            "late": joins or self._is_late or self._is_moved,
            "reads": bool(self.world.shards),
            "what": self.descriptions,
            "closed": self.elastic.is_closed,
        }

    def _refuse_strangers(self, every: list[dict[str, Any]], source: int) -> None:
        """A worker that has come with another model, strategy or version is refused; the others go on without it."""
        refused = {}
        for rank, one in enumerate(every):
            if one["joins"] and every[source]["closed"]:
                refused[rank] = "what the others have told each other before is more than is remembered (64 MiB)"
            elif one["joins"] and one["what"] != every[source]["what"]:
                pairs = [*zip(one["what"], every[source]["what"], strict=False)]
                mine, theirs = next(
                    ((a, b) for a, b in pairs if a != b),
                    (f"{len(one['what'])} lines", f"{len(every[source]['what'])} lines"),
                )
                refused[rank] = f"it has {mine}, the others have {theirs}"
        if self.world.rank in refused:
            raise Refused(f"this worker cannot join the run: {refused[self.world.rank]}")
        if refused:
            if self.world.rank == source:
                for why in refused.values():
                    print(f"unisono: a worker that came was refused: {why}", file=sys.stderr)
            raise _Again("a worker that came was refused")

    def _pack(self, someone_joins: bool, someone_moves: bool) -> dict[str, Any]:
        """What the others are told by the source."""
        positions = {}
        for name, position in self._positions.items():
            shard = self.world.shards.get(name)
            if shard is not None and (name in self._trained or not self._trained):
                positions[name] = position if shard.epoch <= position[0] else [shard.epoch, 0]
        return {
            "commits": self.commits,
            "positions": positions,
            "calls": self.elastic.calls,
            "log": self.elastic.log if someone_joins else [],
            "schedules": self.read_schedules() if someone_moves else None,
        }

    def _find_results(self, every: list[dict[str, Any]]) -> list[bytes]:
        """The results of the call of the program that this rank is in, and of those after it, where others have ended
        them."""
        most = max(one["calls"] for one in every)
        if not any(one["in call"] and 0 <= one["calls"] < most for one in every):
            return []
        holder = next(rank for rank, one in enumerate(every) if one["calls"] == most)
        recent: list[bytes] = self.world.broadcast_object(list(self.elastic.recent), holder)
        behind = most - self.elastic.calls if self.elastic.in_call else 0
        return recent[-behind:] if 0 < behind <= len(recent) else [b""] * min(behind, 1)

    def _take(self, packet: dict[str, Any], *, behind: bool, joins: bool) -> None:
        self.commits, self._is_whole = packet["commits"], True
        self._count()
        self._positions = dict(packet["positions"])
        self._trained |= set(packet["positions"])
        if joins:
            self._is_member = self._is_late = True
            for member in (m for replica in self.replicas() for m in replica.members):
                member._opt_called = True  # type: ignore[attr-defined]  # else torch warns in passes without a batch
            self.elastic.replay(packet["log"], packet["calls"])
            return
        for name, position in packet["positions"].items():
            if name in self.world.shards:
                self.world.shards[name].move_to(*position)
        if behind:
            self._open = self._again = None
            self._is_moved = True
            self.load_schedules(packet["schedules"])  # once more with the next batch, if there is one
        elif self._open is not None:
            self._again, self._open = self._open, None


_DRAWN_AHEAD = (
    "batches of {} are drawn ahead of the steps that use them, in a run that survives the loss of a worker: the batch "
    "of a step that a loss breaks off would be left out, and the one drawn ahead used as it was divided before. Draw "
    "each batch after the step before it; DataLoader(..., num_workers=2) reads ahead by itself, and what it has "
    "read is divided anew"
)
