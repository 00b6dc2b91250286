"""Replicas with several learners around a central model: what each worker does in a round, and what is kept of it."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from unisono.background import Handle
from unisono.batch_norm import move_batch_norm
from unisono.strategies._fragments import Courier
from unisono.strategies._periodic import PeriodicReplica
from unisono.strategies.crossbow.central_model import Center
from unisono.strategies.crossbow.learners import Learners
from unisono.strategy import Strategy, share, share_buffers, taken
from unisono.world import World

T = TypeVar("T")


@dataclass
class Sum:
    """The sum of w_j - z over all learners, on its way; `heard`: a learning rate dropped on some rank."""

    heard: Handle[bool]
    sums: Callable[[], dict[str, Tensor]]


class CenteredReplica(PeriodicReplica):
    """A round is one window of each learner of this worker, in turn; all workers have the same number of learners.

    1. begin: before the first forward of a round that synchronises, w_j - z is summed over the learners here, and the
       sum over all workers is begun, behind the program: it depends on no gradient of the round;
    2. step: each learner takes its optimizer's step, and then its correction, from before the step;
    3. end: the sum has arrived, and moves the central model.

    `every`: rounds from one that synchronises to the next. `alpha`: None is 1 / (learners in all). A learning rate has
    dropped when it is at most `drop` of its highest since the last drop.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        world: World,
        strategy: Strategy,
        *,
        learners: int,
        every: int,
        alpha: float | None,
        momentum: float,
        drop: float,
        accumulate: int,
        bucket_bytes: int,
    ) -> None:
        super().__init__(model, optimizer, world, strategy, accumulate=accumulate)
        self._ahead = model.register_forward_pre_hook(partial(_begin_if_due, weakref.ref(self)))
        self.wanted, self.every = learners, every
        self._alpha, self.momentum, self.drop, self._bucket_bytes = alpha, momentum, drop, bucket_bytes
        self.learners = Learners(model, optimizer, self.copied)
        self.center = Center(self.learners.named)
        self.rounds, self._alone = 0, 0  # rounds so far; those since the last that synchronised
        self._looked = False  # the learner at work was looked at before its step
        self._exchange: Sum | None = None
        self._stale: Sum | None = None  # begun on every rank, and no longer wanted
        self._high, self._dropped = self._rates(), False
        self._courier: Courier | None = None
        self.learners.resize(learners)
        try:
            self._start()
        except BaseException:
            self.close()
            raise

    @property
    def alpha(self) -> float:
        """The part of its difference to the central model that a learner gives up."""
        given = self._alpha
        return given if given is not None else 1.0 / (self.world.size * self.learners.count)

    @property
    def due(self) -> bool:
        """Whether this round synchronises."""
        return self._alone + 1 >= self.every

    def _start(self) -> None:
        device = next((p.device for p in self.model.parameters() if p.is_cuda), None)
        self._courier = Courier(self.world, device, inline=True, behind=self.world.size > 1)
        self._build()

    def _build(self) -> None:
        self.start_job(lambda channel: self.center.build(channel, self._bucket_bytes)).wait()

    def start_job(self, job: Callable[[World], T]) -> Handle[T]:
        """Run a job on the replica's channel, after those before it; where there are others, behind the program."""
        assert self._courier is not None, "a replica that is not closed"
        return self._courier.start(job)

    def _stop(self) -> None:
        if self._courier is not None:
            self._courier.finish()
            self.center.release(self._courier.channel)
            self._courier.channel.close()
            self._courier = None

    # A round: begin, step, end -----------------------------------------------------------------------------------

    @torch.no_grad()
    def begin(self) -> None:
        """Start this round's exchange, if there is to be one and it is not under way."""
        if not self.due or self._exchange is not None:
            return
        if self._stale is not None:
            self._awaited(self._stale)
            self._stale = None
        self.center.follow()
        if not self.center.laid_out():
            self._build()
        self.center.fill([self.learners.params(j) for j in range(self.learners.count)])
        self._note_rates()
        dropped = torch.tensor([self._dropped], dtype=torch.uint8)

        def exchange(channel: World) -> bool:
            for handle in [channel.all_reduce(b.flat, "sum", tag=b.tag) for b in self.center.buckets]:
                handle.wait()
            channel.all_reduce(dropped, "max", tag="drop").wait()
            return bool(dropped.item())

        self._exchange = Sum(self.start_job(exchange), self.center.sums)

    def _about_to_step(self, optimizer: Optimizer, args: Any, kwargs: dict[str, Any]) -> Any:
        self._take()
        return super()._about_to_step(optimizer, args, kwargs)

    @torch.no_grad()
    def _take(self) -> None:
        """How far the learner at work is from z, as it is before the step."""
        self.center.follow()
        self.begin()
        if self.due:
            self.center.take(self.learners.params(self.learners.turn))
            self._looked = True

    def meet(self) -> None:
        if not self._looked:  # the step was skipped
            self._take()
        if self.due:
            self.center.correct(self.learners.params(self.learners.turn), self.alpha)
        self._looked = False
        following = (self.learners.turn + 1) % self.learners.count
        if following == 0:
            self._end_round()
        self.learners.turn_to(following)

    def _end_round(self) -> None:
        if self.due:
            assert self._exchange is not None, "begun before the round's first step"
            dropped = self._awaited(self._exchange)
            self.center.move(self._exchange.sums(), self.alpha, self.momentum)
            self._exchange, self._alone = None, 0
            if dropped:
                self._high, self._dropped = self._rates(), False
                self.restart()
                self.world.ledger.event("crossbow", restart=self.met, why="a learning rate dropped")
        else:
            self._alone += 1
        self.rounds += 1
        self.after_round()

    def _awaited(self, exchange: Sum) -> bool:
        ledger = self.world.ledger
        start = ledger.clock()
        heard = exchange.heard.wait()
        if self.world.size > 1:
            ledger.close_span("blocked", start, ledger.clock())
        return heard

    @torch.no_grad()
    def restart(self) -> None:
        """w_j <- z for every learner here, and the central model comes to rest."""
        for j in range(self.learners.count):
            self.center.copy_to(self.learners.params(j))
        self.center.rest()

    def _rates(self) -> list[float]:
        rates = [group.get("lr", math.nan) for group in self.optimizer.param_groups]
        return [math.nan if isinstance(r, Tensor) and r.is_cuda else float(r) for r in rates]

    def _note_rates(self) -> None:
        """Whether a rate has dropped from its highest. A schedule that falls a little in each window must not restart
        in each: a restart takes back what the learners did since the central model last moved."""
        now, most = self._rates(), self.drop * (1.0 + 1e-9)
        self._dropped |= any(new < high and new <= most * high for new, high in zip(now, self._high, strict=False))
        if not self._dropped:
            self._high = [max(pair) for pair in zip(now, self._high, strict=False)] + now[len(self._high) :]

    def after_round(self) -> None:
        """Between two rounds, on every rank."""

    def resize(self, count: int) -> None:
        """Between two rounds: learners that are new begin at z, with the optimizer state of the first."""
        before, self.wanted = self.learners.count, count
        self.learners.turn_to(0)
        self.learners.resize(count)
        for j in range(before, count):
            self.center.copy_to(self.learners.params(j))

    # The model to evaluate, and state ----------------------------------------------------------------------------

    def copied(self) -> nn.Module:
        made = super().copied()
        made._forward_pre_hooks.pop(self._ahead.id, None)
        return made

    @torch.no_grad()
    def consolidate(self) -> nn.Module:
        """A copy that holds the central model, and the mean of all learners' buffers (every rank calls it)."""
        super().consolidate()
        made = self.copied()
        self.center.copy_to([p.detach() for p in made.parameters()])
        buffers = [b.detach() for b in made.buffers()]
        for i, buffer in enumerate(buffers):
            if buffer.is_floating_point() or buffer.is_complex():
                every = [self.learners.buffers(j)[i] for j in range(self.learners.count)]
                buffer.copy_(torch.stack(every).mean(0))
            else:
                buffer.copy_(self.learners.buffers(0)[i])
        share_buffers(buffers, "average", self.world)
        return made

    def shared_state(self) -> dict[str, Any]:
        """What all ranks have alike, between rounds."""
        return {
            **super().state_dict()["shared"],
            **self.center.state_dict(),
            "learners": self.learners.count,
            "rounds": self.rounds,
            "alone": self._alone,
            "high": list(self._high),
            "dropped": self._dropped,
        }

    def state_dict(self) -> dict[str, Any]:
        """In mid-round the sum is part of it: what learners that have stepped gave to it is gone."""
        shared = self.shared_state()
        sums, exchange = None, self._exchange
        if self.learners.turn and exchange is not None:  # begun on every rank, so it ends without more
            sums = {"heard": self._awaited(exchange), "sums": {n: x.clone() for n, x in exchange.sums().items()}}
        shared |= {"turn": self.learners.turn, "under way": sums}
        return {"shared": shared, "local": {"others": self.learners.state_dict()}}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any], *, same_world: bool = True) -> None:
        """In another world, or with another number of learners, all learners begin at the central model."""
        shared = state["shared"]
        if "center" not in shared:
            raise ValueError(
                "the checkpoint is of a strategy without a central model: load it with the strategy that it was "
                "saved with, then call replica.switch('crossbow')"
            )
        self._forget()
        super().load_state_dict(state, same_world=same_world)
        self.take_shared(shared)
        if same_world and shared["learners"] == self.wanted:
            self.learners.load_state_dict(state["local"]["others"], shared["turn"])
            if shared["under way"] is not None:
                sums = {name: x.to(self.center.z[name]) for name, x in shared["under way"]["sums"].items()}
                self._exchange = Sum(Handle.of(shared["under way"]["heard"]), partial(dict, sums))
        else:
            self._all_at_center()

    def take_shared(self, shared: dict[str, Any]) -> None:
        """Go on from another's `shared_state`; sets `wanted`, where the number of learners is part of it."""
        self.step, self.rounds, self._alone = shared["step"], shared["rounds"], shared["alone"]
        self.center.load_state_dict(shared)
        self._high, self._dropped = list(shared["high"]), shared["dropped"]
        self._looked = False

    def _all_at_center(self) -> None:
        """The model's optimizer state is every learner's, and a round begins."""
        self.learners.load_state_dict([], 0)
        self.learners.resize(self.wanted)
        self.restart()

    def _forget(self) -> None:
        """An exchange under way is for nothing; where some rank has begun it, every rank must."""
        if self.due and self._exchange is None and self.world.size > 1:
            self.begin()
        self._stale, self._exchange = self._exchange or self._stale, None

    # Another world -----------------------------------------------------------------------------------------------

    @torch.no_grad()
    def rebind(self, world: World, *, source: int = 0) -> str:
        """All learners begin at `source`'s central model; who was in its world keeps its optimizer's state."""
        self._ended = 0
        size = self.world.size
        self._stop()
        self._exchange = self._stale = None
        self.learners.turn_to(0)
        self.move_to(world)
        every = world.gather_objects([size, self.rounds])
        mine = [self.shared_state(), world.ledger.step_count, self.optimizer.state_dict()]
        shared, steps, optimizer = world.broadcast_object(mine if world.rank == source else None, source)
        share(self.model, world, source)
        stayed = size == every[source][0] > 1 and self.rounds >= every[source][1] - 1
        if not stayed and world.rank != source:
            self.optimizer.load_state_dict(optimizer)
        if world.ledger.step_count != steps:
            world.ledger.resume(steps)
        self.take_shared(shared)
        if stayed and self.learners.count == self.wanted:
            self.restart()
        else:
            self._all_at_center()
        self._start()
        move_batch_norm(self.model, world)
        return (
            f"every learner begins at the central model of rank {source} of {world.size}, at rest, in step "
            f"{self.step}; optimizer states: their own where ranks stayed, else that of rank {source}; gradients "
            "that were not stepped are dropped"
        )

    def close(self) -> None:
        """The model holds the central model (unless another replica trains it by now)."""
        super().close()
        self._ahead.remove()
        self._stop()
        if not taken({param: name for name, param in self.learners.named}):
            with torch.no_grad():
                self.center.copy_to(self.learners.params(self.learners.turn))
        self.learners.leave()
        self._exchange = self._stale = None


def _begin_if_due(replica: weakref.ref[CenteredReplica], model: nn.Module, _: Any) -> None:
    alive = replica()
    if alive is not None and model.training and torch.is_grad_enabled():
        alive.begin()
