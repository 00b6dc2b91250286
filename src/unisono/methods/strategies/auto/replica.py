"""The replica of `auto`: measures between steps, tells what is decided, and puts the candidate to work. What decisions
are made from is agreed on by all ranks: the link, the steps, what candidates cost."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from itertools import islice
from statistics import median
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import Optimizer

from unisono.methods.buckets import BUCKET_BYTES, LARGE_BUCKET_BYTES, Bucket, group_into_buckets, on_device
from unisono.methods.exchange.dry_run import run_reducer
from unisono.methods.exchange.overlap import split_sparse
from unisono.methods.exchange.reduction import overlap_pays
from unisono.methods.reducer import Reducer, dense_bytes
from unisono.methods.spec import build, describe
from unisono.methods.strategies.auto.decisions import Costs, Decision, PricedCandidate, Probed, StepTimes, Tuner
from unisono.methods.strategy import ChangingReplica, Strategy
from unisono.predict.costs import sent_share
from unisono.world import World, probe
from unisono.world.probe import take_slowest

if TYPE_CHECKING:
    from unisono.methods.strategies.auto import auto

_SAID = ("settle", "try", "change", "back")  # on standard error; the ledger has all


class AutoReplica(ChangingReplica):
    """Stands in front of the candidate at work. In a world of one there is nothing to choose."""

    strategy: auto

    def __init__(self, model: nn.Module, optimizer: Optimizer, world: World, strategy: auto) -> None:
        self.strategy = strategy
        self._known: dict[str, Strategy] = {}  # candidates by spec
        self._candidates: list[PricedCandidate] = []  # with what they cost in this world; none: there is no choice
        self._link = Probed(0.0, 0.0)
        self._survey(model, world)
        tuner = self._make_tuner(None, 0)
        first = tuner.candidates[tuner.at_work].spec if tuner is not None else next(iter(self._known))
        super().__init__(self._known[first].bind(model, optimizer, world), strategy, self._look_if_due)
        self._tuner = tuner
        self._seen, self._opened = 0, 1
        self._next = ""  # a candidate that is put to work after one more window

    @property
    def at_work(self) -> str:
        """The spec of the strategy that trains now."""
        return describe(self.inner.strategy)

    # Candidates --------------------------------------------------------------------------------------------------

    def _survey(self, model: nn.Module, world: World) -> None:
        """Find the candidates, what they cost in this world, and how fast its link is; every rank calls it."""
        found = self.strategy.find_candidates(model, world)
        self._candidates = []
        if world.size > 1:
            costs = [estimate_costs(one, model, world) for one in found]
            if not self.strategy.among:
                found, costs = _drop_useless(found, costs)
            self._candidates = [PricedCandidate(describe(one), cost) for one, cost in zip(found, costs, strict=True)]
            self._link = measure_link(world)
        self._known = {describe(one): one for one in found}

    def _make_tuner(self, at_work: str | None, step: int) -> Tuner | None:
        """The decisions from this step on; None if there is no choice."""
        if len(self._candidates) < 2:
            return None
        specs = [candidate.spec for candidate in self._candidates]
        return Tuner(
            self._candidates,
            self._link,
            trial_steps=self.strategy.trial_steps,
            check_every=self.strategy.check_every,
            step=step,
            at_work=None if at_work is None else specs.index(at_work),
        )

    def _decide_anew(self) -> None:
        """Begin the decisions anew at this step, with the candidate at work."""
        if self._candidates and self.at_work not in self._known:  # a candidate of the former world only
            self._known[self.at_work] = self.inner.strategy
            costs = estimate_costs(self.inner.strategy, self.model, self.world)
            self._candidates.append(PricedCandidate(self.at_work, costs))
        self._tuner = self._make_tuner(self.at_work, self.step)
        self._seen, self._opened, self._next = self.step, self.step + 1, ""

    # Between steps -----------------------------------------------------------------------------------------------

    def _look_if_due(self) -> None:
        if self._tuner is None or self.step == self._seen:  # a step that was given up counts for nothing
            return
        self._seen = self.step
        if self._next:
            spec, self._next = self._next, ""
            self.world.run_tolerating_loss(lambda: self._put_to_work(spec))
            self._tuner.due += 1
        elif self.step >= self._tuner.due:
            if self.own_gradients and self.scaler is not None:
                raise ValueError(
                    f"{self.at_work} under auto cannot follow a GradScaler: one rank alone may skip a step, and the "
                    "ranks would not decide at the same one. Leave it out of among, or train without a GradScaler"
                )
            self.world.run_tolerating_loss(self._look)

    def _look(self) -> None:
        """Measure, and do what follows from that. All ranks have the same numbers, so they decide alike."""
        tuner, world = self._tuner, self.world
        assert tuner is not None
        link = measure_link(world) if tuner.wants_link else None
        measured = measure_steps(world, self.step - self._opened)
        self._opened = self.step
        for decision in tuner.look(self.step, measured, link):
            self._carry_out(decision)

    def _carry_out(self, decision: Decision) -> None:
        self.world.ledger.event(
            "auto",
            decision=decision.kind,
            origin=decision.origin,
            to=decision.to,
            why=decision.why,
            predicted=decision.predicted,
            achieved=decision.achieved,
        )
        if self.world.rank == 0 and decision.kind in _SAID:
            print(f"unisono auto, {decision}", file=sys.stderr, flush=True)
        if decision.to != self.at_work:
            self._put_to_work(decision.to)

    def _put_to_work(self, spec: str) -> None:
        """Change to a candidate; by way of one window of exact means, where it has no place for what is still to be
        sent (`zero` after `topk`, say)."""
        try:
            self.change(self._known[spec])
        except ValueError:  # nothing has changed
            unsent = self.inner.unsent()
            if unsent is None or unsent.is_empty:
                raise
            self.change(self.strategy.complete(build("allreduce", kind="strategy")))
            self._next = spec
        self.world.barrier()  # a rank that was lost in it is found here, and not in a channel that it never came to
        self._opened = self.step + 1  # the step after a change begins with new buckets

    # State -------------------------------------------------------------------------------------------------------

    def shared_state(self) -> dict[str, Any]:
        return {**super().shared_state(), "at_work": self.at_work}

    def load_shared(self, shared: dict[str, Any]) -> None:
        """Go on with what was at work; every rank calls it."""
        saved = shared.get("at_work")
        if self.world.size > 1 and saved in self._known and saved != self.at_work:
            self.replace(lambda: self.bind_anew(self._known[saved].bind, self.world))
        super().load_shared(shared)
        self._decide_anew()

    # Another world -----------------------------------------------------------------------------------------------

    def rebind(self, world: World, *, source: int = 0) -> str:
        """Go on in another world with what is at work on rank `source`; decisions begin anew."""
        spec = world.broadcast_object(self.at_work, source)
        if spec != self.at_work:  # one that has come, or that a loss kept from changing with the others
            strategy = self._known.get(spec) or build(spec, kind="strategy")
            self.replace(lambda: self.bind_anew(strategy.bind, World(device=world.device)))
        told = super().rebind(world, source=source)
        self._survey(self.model, world)
        self._decide_anew()
        return f"{told}; {spec} is at work"


def _drop_useless(found: list[Strategy], costs: list[Costs | None]) -> tuple[list[Strategy], list[Costs | None]]:
    """Without those that compress and would send no less than the first, which is exact."""
    first = costs[0]
    kept = [
        (one, cost)
        for one, cost in zip(found, costs, strict=True)
        if first is None
        or cost is None
        or cost.bytes_sent < first.bytes_sent
        or (reducer := one.pattern().reducer) is None
        or reducer.exact
    ]
    return [one for one, _ in kept], [cost for _, cost in kept]


TAG = "auto"
_SAMPLE_NUMBERS = 1 << 20  # of a dry run


# The link ---------------------------------------------------------------------------------------------------------


def measure_link(world: World) -> Probed:
    """How fast the link is, by some all-reduces, and how long finding out took; every rank calls it."""
    began = world.ledger.clock()
    latency_s, s_per_byte = probe.measure_link(world, tag=TAG)
    return Probed(latency_s, s_per_byte, take_slowest(world, [world.ledger.clock() - began], TAG)[0])


# Steps ------------------------------------------------------------------------------------------------------------


def measure_steps(world: World, count: int) -> StepTimes:
    """The last `count` steps in the ledger, as all ranks agree on them: of each time, the slowest rank's median."""
    rows = list(islice(reversed(world.ledger.rows), max(1, count)))
    mine = [
        median(row.wall for row in rows),
        median(row.compute + row.data for row in rows),
        median(row.hidden for row in rows),
        median(float(row.bytes_sent) for row in rows),
    ]
    return StepTimes(*take_slowest(world, mine, TAG))


# What a candidate costs -------------------------------------------------------------------------------------------


def estimate_costs(strategy: Strategy, model: nn.Module, world: World) -> Costs | None:
    """Bytes and collectives of a step, and seconds of compression: by closed forms and a dry run on a part of the
    model. None for a method other than all-reduce. Every rank calls it."""
    if type(strategy).__name__ != "allreduce":
        return None
    settings: Any = strategy
    reducer: Reducer | None = settings.reducer
    named = [(name, p) for name, p in split_sparse(model)[0] if p.requires_grad]
    overlaps = overlap_pays(world) if settings.overlap is None else settings.overlap
    compresses = reducer is not None and not reducer.exact
    large = compresses and any(p.is_cuda for _, p in named)
    bucket_bytes = settings.bucket_bytes or (LARGE_BUCKET_BYTES if large else BUCKET_BYTES)
    on_meta = partial(on_device, torch.device("meta"))
    buckets = [Bucket(i, group, on_meta) for i, group in enumerate(group_into_buckets(named, bucket_bytes))]
    if reducer is None or not buckets:
        sent = sum(dense_bytes(bucket, world.size) for bucket in buckets)
        return Costs(sent, max(1, len(buckets)), 0.0, overlaps)
    sample, share = _make_sample(named)
    bucket = Bucket(0, sample, partial(on_device, sample[0][1].device))
    by_messages = world.transport is not None and world.transport.name == "messages"
    clock = world.ledger.clock
    cost = run_reducer(reducer, bucket, world.hosts, rank=world.rank, by_messages=by_messages, repeats=2, clock=clock)
    hosts = len(set(world.hosts))
    crossing = [o for o in cost.operations if hosts == 1 or o.among != "inside"]
    if reducer.sends is not None:
        sent = sum(reducer.sends(bucket, world.size) for bucket in buckets)
    else:
        sizes = {"all": world.size, "inside": world.local_size, "across": hosts}
        sent = round(share * sum(sent_share(o.op, sizes[o.among]) * o.nbytes for o in crossing))
    messages = max(1, len(crossing)) * len(buckets)
    agreed = take_slowest(world, [sent, messages, cost.work_s * share], TAG)
    return Costs(agreed[0], agreed[1], agreed[2], overlaps)


def _make_sample(named: Sequence[tuple[str, Parameter]]) -> tuple[list[tuple[str, Tensor]], float]:
    """Tensors like the parameters of the commonest kind, up to some numbers; how many times the model is that."""
    kinds = [(p.dtype, p.device) for _, p in named]
    kind = max(kinds, key=kinds.count)
    sample: list[tuple[str, Tensor]] = []
    taken = 0
    for name, p in named:
        if (p.dtype, p.device) != kind or taken >= _SAMPLE_NUMBERS or not p.numel():
            continue
        rows = max(1, min(len(p), _SAMPLE_NUMBERS * len(p) // p.numel())) if p.dim() else 0
        sample.append((name, torch.empty_like(p[:rows] if p.dim() else p, requires_grad=False)))
        taken += sample[-1][1].numel()
    return sample, sum(p.numel() for _, p in named) / max(1, taken)
