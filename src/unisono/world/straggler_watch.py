"""Stragglers found while training goes on: every few steps the ranks tell each other some numbers of their own.

A check begins at the same step on all ranks, with a small all-reduce behind the program; its result is taken some steps
later, again at the same step. So all ranks come to the same verdicts, and deal their batches anew after the same step.
When the next check is due follows from the steps of the slowest rank, which travel along.
"""

from __future__ import annotations

import math
import sys
import threading
import weakref
from collections.abc import Sequence
from itertools import islice
from statistics import median
from typing import Any, Literal

import torch
from torch import Tensor

from unisono.background import Handle
from unisono.launchers.runtime.machine import ProcessorWait
from unisono.launchers.runtime.stacks import PlaceSampler
from unisono.launchers.runtime.variables import are_checks_on
from unisono.world.ledger import KEPT
from unisono.world.links import LinkProbe
from unisono.world.speeds import Balance, deal_by_speed
from unisono.world.stragglers import Judge, Numbers, Straggler
from unisono.world.world import World

__all__ = ["StragglerWatch", "Treatment", "after_step"]

Treatment = Literal["deal", "name", "ignore"]
EVERY_STEPS, EVERY_S = 20, 2.0  # from one check to the next: the later of the two
_MOST_STEPS = KEPT // 2
_LEAST_LOOK_S, _MOST_LOOK_S = 0.002, 0.05  # between two looks at a program that may be slow
_BATCH = 64  # samples a rank that are assumed if a batch sampler decides


def after_step(world: World, treatment: Treatment) -> None:
    """Called by a replica when it has counted a step.

    `treatment`: what a method allows. "deal": its results stay the same if samples are dealt by speed; "name": they
    do not, so stragglers are only named; "ignore": its ranks do not wait for each other.
    """
    if world.size == 1 or treatment == "ignore" or not are_checks_on():
        return
    watch = _watches.get(world)
    if watch is None or watch.name != world.name:  # `narrow` leaves other ranks in the same object
        watch = _watches[world] = StragglerWatch(world)
        world.stragglers, world.speeds = (), None
    watch.count_step(world, treatment)


class StragglerWatch:
    """One rank's part in the checks in one world."""

    def __init__(self, world: World) -> None:
        self.name = world.name
        self._channel: World | None = None  # made at the first check: most tests and trials are over before
        self._judge, self._balance, self._links = Judge(world.hosts), Balance(), LinkProbe(world)
        self._processor = ProcessorWait()
        self._link_s = [0.0, 0.0]  # of the check before
        self._asked: Handle[Tensor] | None = None
        self._counted = -1  # the ledger's count of steps: several replicas may share a world
        self._steps = self._opened = self._begun = 0  # all so far; at the first of this check; at the last check
        self._due, self._answer_due = EVERY_STEPS, 0
        self._is_told = False
        self._sampler: PlaceSampler | None = None  # while this rank is suspected

    def count_step(self, world: World, treatment: Treatment) -> None:
        """Called after each step: begin a check or take its result, if that is due."""
        if world.ledger.step_count == self._counted:
            return
        self._counted = world.ledger.step_count
        self._steps += 1
        if self._steps == self._due:
            self._begin(world, treatment)
        elif self._steps == self._answer_due:
            self._end(world, treatment)

    def _begin(self, world: World, treatment: Treatment) -> None:
        if self._channel is None:
            self._channel = world.channel(inline=False)
        numbers = torch.zeros(world.size, len(Numbers._fields), dtype=torch.float64)
        self._since = self._counted - (self._steps - self._opened) + 1
        numbers[world.rank] = torch.tensor(self._measure(world, treatment), dtype=torch.float64)
        self._asked = self._channel.all_reduce(numbers, "sum", tag="stragglers")
        self._links.begin(self._channel)
        self._opened = self._begun = self._steps
        self._answer_due = self._steps + EVERY_STEPS // 2

    def _measure(self, world: World, treatment: Treatment) -> Numbers:
        rows = list(islice(reversed(world.ledger.rows), max(1, self._steps - self._opened)))
        busy_s = sum(row.compute + row.data for row in rows) / len(rows) * (self._steps - self._begun)
        return Numbers(
            own_s=median(row.compute + row.data for row in rows),
            data_s=median(row.data for row in rows),
            kept_off_s=self._processor.take(busy_s) / (self._steps - self._begun),
            wall_s=median(row.wall for row in rows),
            bytes_sent=median(row.bytes_sent for row in rows),
            samples=_count_samples(world) if treatment == "deal" else 0.0,
            from_previous_s=self._link_s[0],
            from_next_s=self._link_s[1],
        )

    def _end(self, world: World, treatment: Treatment) -> None:
        assert self._asked is not None
        assert self._channel is not None
        numbers = [Numbers(*row) for row in self._asked.wait().tolist()]
        self._asked = None
        self._link_s = self._links.end(self._channel, world.ledger)
        slowest_s = max(n.wall_s for n in numbers)
        interval = max(EVERY_STEPS, min(_MOST_STEPS, math.ceil(EVERY_S / max(slowest_s, 1e-9))))
        self._due = self._begun + interval
        if min(n.wall_s for n in numbers) <= 0.0:  # a simulated world: the others are not there
            return
        shares = self._find_shares(world, numbers)
        changed = self._deal(world, numbers, shares) if shares is not None else None
        work = self._balance.count_work(shares) if shares is not None else None
        found, over = self._judge.judge(numbers, since=self._since, work=work)
        world.stragglers = self._judge.stragglers
        places = self._find_places(world, found)
        self._sample(world, numbers)
        self._say(world, found, over, changed, can_deal=treatment == "deal")
        for one in found:
            self._enter_verdict(world, one, places[one.rank])

    # Where a slow rank spends its time ---------------------------------------------------------------------------

    def _sample(self, world: World, numbers: Sequence[Numbers]) -> None:
        """If the next check may find this rank slow, sample its program until then."""
        if self._sampler is not None:
            self._sampler.stop("code")
            self._sampler = None
        if world.rank in self._judge.suspects:
            interval_s = min(_MOST_LOOK_S, max(_LEAST_LOOK_S, numbers[world.rank].wall_s / 5))
            self._sampler = PlaceSampler(threading.get_ident(), interval_s)

    def _find_places(self, world: World, found: Sequence[Straggler]) -> list[str]:
        """For every rank that was found to be slow, the place where it spends its time; exchanged if there is one."""
        if not found:
            return []
        assert self._channel is not None
        mine = next((one for one in found if one.rank == world.rank), None)
        place = ""
        if mine is not None and mine.cause == "network":
            place = f"host {mine.host}"
        elif mine is not None and self._sampler is not None:
            place = self._sampler.stop("loader" if mine.cause == "input" else "code")
        return [str(theirs) for theirs in self._channel.gather_objects(place)]

    def _enter_verdict(self, world: World, one: Straggler, place: str) -> None:
        cause = "slow compute" if one.cause == "host" else f"slow {one.cause}"
        at = f", most often at {place}" if place and one.cause != "network" else ""
        text = one.describe(with_host=len(set(world.hosts)) > 1) + at
        world.ledger.event("verdict", rank=one.rank, cause=cause, place=place, text=text)

    # Treatment -------------------------------------------------------------------------------------------------------

    def _find_shares(self, world: World, numbers: Sequence[Numbers]) -> list[int] | None:
        """The samples of each rank in a full batch; None if they are not dealt by speed."""
        batches = {int(n.samples) for n in numbers}
        if len(batches) > 1 or min(batches) < world.size:
            return None
        return deal_by_speed(batches.pop(), world.speeds or [1.0] * world.size)

    def _deal(
        self, world: World, numbers: Sequence[Numbers], shares: Sequence[int]
    ) -> tuple[Sequence[int], Sequence[int]] | None:
        """Deal by new speeds if that makes steps shorter; returns the shares before and after, None if they stay."""
        speeds = self._balance.propose([n.own_s for n in numbers], shares)
        if speeds is None or not self._agree(world, speeds):
            return None
        new = deal_by_speed(sum(shares), speeds)
        world.speeds = None if max(new) - min(new) <= 1 else speeds
        for shard in _list_balanced(world):
            shard.redistribute()
        self._opened = self._steps  # what was measured before says nothing of the new shares
        return shares, new

    def _agree(self, world: World, speeds: Sequence[float]) -> bool:
        """Whether all ranks have the same speeds and are at the same batches: else samples would be read twice, or
        never."""
        assert self._channel is not None
        mine = [sorted([shard.name, shard.epoch, shard.batch] for shard in _list_balanced(world)), list(speeds)]
        every = self._channel.gather_objects(mine)
        is_one = all(other == every[0] for other in every)
        if not is_one and not self._is_told and world.rank == 0:
            self._is_told = True
            _print(
                "batches stay dealt as they are: after the same step the ranks are at different batches "
                f"({'; '.join(f'rank {r}: {places}' for r, (places, _) in enumerate(every))}). Samples can be dealt by "
                "speed where every rank reads a batch in the step that uses it"
            )
        return is_one

    # What is said ----------------------------------------------------------------------------------------------------

    def _say(
        self,
        world: World,
        found: Sequence[Straggler],
        over: Sequence[Straggler],
        changed: tuple[Sequence[int], Sequence[int]] | None,
        *,
        can_deal: bool,
    ) -> None:
        ledger, step, lines = world.ledger, self._counted, []
        with_host = len(set(world.hosts)) > 1

        def tell_share(rank: int) -> str:
            if changed is None or changed[0][rank] == changed[1][rank]:
                return ""
            return f"; its share of a batch goes from {changed[0][rank]} to {changed[1][rank]} samples"

        for one in found:
            ledger.event("straggler", rank=one.rank, host=one.host, factor=one.factor, cause=one.cause, since=one.since)
            could = can_deal and one.cause != "network" and world.shards and not _list_balanced(world)
            advice = "; un.shard(..., balance=True) or `unisono run --balance` gives it fewer samples" if could else ""
            lines.append(one.describe(with_host=with_host) + (tell_share(one.rank) or advice))
        for one in over:
            ledger.event("straggler over", rank=one.rank, host=one.host, since=one.since)
            who = f"rank {one.rank} (host {one.host})" if with_host else f"rank {one.rank}"
            lines.append(f"{who} is as fast as the others again at step {step}{tell_share(one.rank)}")
        if changed is not None:
            ledger.event("shares", before=list(changed[0]), after=list(changed[1]))
            if not lines:
                lines.append(f"from step {step + 1} on a batch is dealt by speed: {_list_shares(*changed)}")
        if world.rank == 0:
            for line in lines:
                _print(line)


def _list_shares(before: Sequence[int], after: Sequence[int]) -> str:
    """The shares that change, the first of them.

    >>> _list_shares([16, 16, 16], [20, 20, 8])
    'rank 0 16 to 20, rank 1 16 to 20, rank 2 16 to 8 samples'
    """
    changes = [f"rank {r} {a} to {b}" for r, (a, b) in enumerate(zip(before, after, strict=True)) if a != b]
    more = f", and {len(changes) - 8} more" if len(changes) > 8 else ""
    return ", ".join(changes[:8]) + more + " samples"


def _list_balanced(world: World) -> list[Any]:
    return [shard for shard in world.shards.values() if shard.balances]


def _count_samples(world: World) -> float:
    """Samples in a global batch of the shard that is being read, if it is dealt by speed; else 0."""
    reading = [shard for shard in _list_balanced(world) if shard.is_out]
    return float(reading[0].batch_size or _BATCH * world.size) if reading else 0.0


def _print(line: str) -> None:
    print(f"unisono: {line}", file=sys.stderr, flush=True)


_watches: weakref.WeakKeyDictionary[World, StragglerWatch] = weakref.WeakKeyDictionary()
