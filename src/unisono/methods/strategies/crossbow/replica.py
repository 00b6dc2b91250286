"""The replica of crossbow: what each worker does in a round with its learners and the central model."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from unisono.background import Handle
from unisono.launchers.runtime.frames import warn_user
from unisono.methods.exchange.overlap import SideChannel
from unisono.methods.exchange.reduction import LearningRates
from unisono.methods.strategies.crossbow.captured import (
    MOST,
    CapturedLearners,
    How,
    Lines,
    Uncapturable,
    is_on_gpu,
    naming_learners,
    why_not_laid_out,
)
from unisono.methods.strategies.crossbow.learners import Batches, CentralModel, Learners
from unisono.methods.strategies.crossbow.tuning import Tuning
from unisono.methods.strategy import Change, ModelPart, PeriodicReplica, bound_parameters, share, share_buffers
from unisono.methods.strategy.program_writes import Written
from unisono.training.batch_norm import SyncBatchNorm
from unisono.world import World

if TYPE_CHECKING:
    from unisono.methods.strategies.crossbow import crossbow

T = TypeVar("T")


@dataclass
class Sum:
    """The sum of w_j - z over all learners, on its way; `heard`: a learning rate dropped on some rank, and all ranks
    wrote the same."""

    heard: Handle[tuple[bool, bool]]
    sums: Callable[[], dict[str, Tensor]]
    written: Written


class CrossbowReplica(PeriodicReplica):
    """A round is one window of each learner of this worker, in turn; all workers have the same number of learners.

    1. begin: before the first forward of a round that synchronises, w_j - z is summed over the learners here, and the
       sum over all workers is begun, behind the program: it depends on no gradient of the round;
    2. step: each learner takes its optimizer's step, and then its correction, from before the step;
    3. end: the sum has arrived, and moves the central model. At intervals, the tuners change the number of learners, or
       how often they meet.
    """

    strategy: crossbow
    own_optimizer: ClassVar[bool] = True
    follows_writes = True
    no_average = (
        "its central model is an average of all learners, over the steps too, and is the one that "
        "replica.consolidate() gives: evaluate that"
    )

    def __init__(self, model: nn.Module, optimizer: Optimizer, world: World, strategy: crossbow) -> None:
        self.tuning = Tuning(strategy.learners, strategy.every, strategy.tune_every)
        self._side_by_side = False  # `learn` ran since the tuners last decided
        self.wanted, self.every = self.tuning.learners, self.tuning.every
        self.rounds, self._alone = 0, 0  # rounds so far; those since the last that synchronised
        self._looked = False  # the learner at work was looked at before its step
        self._exchange: Sum | None = None
        self._stale: Sum | None = None  # begun on every rank, and no longer wanted
        self._learning_rates = LearningRates(optimizer)
        self._high, self._dropped = self._learning_rates.by_group(), False
        self._side: SideChannel | None = None
        self._written = Written()  # by the program, since the last exchange began
        self._writer = 0  # the learner that it last wrote to
        self._common: dict[str, Tensor] = {}  # when the state was last asked for, what all had written alike
        self._captured: CapturedLearners | None = None
        self._laid_out = 0  # times since the last replay
        self._in_lines = False  # parameters lie in lines, which they keep alive
        self._is_whole = False  # the round that runs has its corrections in it
        self._stepped = 0  # learners that have stepped and are corrected, and are not counted yet
        self._told: set[str] = set()
        self.learners = Learners(model, optimizer, self.copy_model)
        self.center = CentralModel(self.learners.named)
        super().__init__(model, optimizer, world, strategy)

    @property
    def alpha(self) -> float:
        """The part of its difference to the central model that a learner gives up."""
        given = self.strategy.alpha
        return given if given is not None else 1.0 / (self.world.size * self.learners.count)

    @property
    def due(self) -> bool:
        """Whether this round synchronises."""
        return self._alone + 1 >= self.every

    def start(self) -> None:
        device = next((p.device for p in self.model.parameters() if p.is_cuda), None)
        self._side = SideChannel(self.world, device, inline=True, behind=self.world.size > 1)
        if self.learners.count < self.wanted:
            with naming_learners(self.wanted):
                self.learners.resize(self.wanted)
        if device is not None:
            self.tuning.measure_on(device)
        self._build()

    def _build(self) -> None:
        self._submit(lambda channel: self.center.build(channel, self.strategy.bucket_bytes)).wait()

    def _submit(self, job: Callable[[World], T]) -> Handle[T]:
        """Run a job on the replica's channel, after those before it; where there are others, behind the program."""
        assert self._side is not None, "a replica that is not closed"
        return self._side.start(job)

    def stop(self, change: Change | None = None) -> None:
        self._drop_graphs()
        if self._side is not None:
            self._side.finish()
            self.center.release(self._side.channel)
            self._side.channel.close()
            self._side = None
        if change is not None:
            return
        # Unless another replica trains it by now, the model holds the central one, or what the program loaded since.
        if not bound_parameters({param: name for name, param in self.learners.named}):
            with torch.no_grad():
                self.center.copy_to(self.learners.params(self.learners.turn))
                loaded = {name: x for one in self._list_written() if one.loaded for name, x in one.values.items()}
                for name, param in self.learners.named:
                    if name in loaded:
                        param.copy_(loaded[name])
                    if self._in_lines:
                        param.data = param.data.clone()
        self.learners.close()
        self._exchange = self._stale = None

    # A round: begin, step, end -----------------------------------------------------------------------------------

    @torch.no_grad()
    def begin(self, lines: Lines | None = None) -> None:
        """Start this round's exchange, if there is to be one and it is not under way. `lines`: the learners', where all
        of them are about to step."""
        if lines is not None and self.due and self._exchange is not None:
            lines.remember()
        if not self.due or self._exchange is not None:
            return
        if self._stale is not None:
            self._wait_for(self._stale)
            self._stale = None
        self._follow()
        if lines is None:
            self.center.fill([self.learners.params(j) for j in range(self.learners.count)])
        elif not self._is_whole:
            lines.fill()
        self._update_learning_rates()
        written, self._written = self._written, Written()
        code = written.code()
        flags = torch.tensor([self._dropped, code, -code])

        def exchange(channel: World) -> tuple[bool, bool]:
            for handle in [channel.all_reduce(b.flat, "sum", tag=b.tag) for b in self.center.buckets]:
                handle.wait()
            dropped, most, least = channel.all_reduce(flags, "max", tag="drop").wait().tolist()
            return bool(dropped), 0 < most == -least

        self._exchange = Sum(self._submit(exchange), self.center.sums, written)

    def _follow(self) -> None:
        """Parameters that have become trainable take part; in what is exchanged, from the next time on."""
        self.center.follow()
        named = {name for bucket in self.center.buckets for name in bucket.names}
        if self._exchange is None and named != set(self.center.z):
            self._build()

    def take_writes(self, names: Sequence[str], *, loaded: bool) -> None:
        self.center.follow()
        params, self._writer = dict(self.learners.named), self.learners.turn
        self._written.take({name: params[name] for name in names}, loaded=loaded)

    def before_step(self) -> None:
        if not (self._looked and self.windows.in_closure):  # which may be called again, amid the step
            self._look()
        super().before_step()

    @torch.no_grad()
    def _look(self) -> None:
        """How far the learner at work is from z, as it is before the step."""
        self.center.follow()
        self.begin()
        if self.due:
            self.center.remember(self.learners.params(self.learners.turn))
            self._looked = True

    def meet(self) -> None:
        if self._stepped:
            self._stepped -= 1
            if not self._stepped:
                self._end_round()
            return
        if not self._looked:  # the step was skipped
            self._look()
        if self.due:
            self.center.correct(self.learners.params(self.learners.turn), self.alpha, self._find_agreed())
        self._looked = False
        following = (self.learners.turn + 1) % self.learners.count
        if following == 0:
            self._end_round()
        self.learners.turn_to(following)

    def _find_agreed(self) -> Collection[str]:
        """What every rank's program wrote alike before this round, the central model is to become: a learner has
        nothing of it to give up. Waits for the others only where this rank wrote."""
        exchange = self._exchange
        wrote = exchange is not None and exchange.written.values and self._wait_for(exchange)[1]
        return exchange.written.values if exchange is not None and wrote else ()

    def _end_round(self) -> None:
        if self.due:
            assert self._exchange is not None, "begun before the round's first step"
            dropped, agreed = self._wait_for(self._exchange)
            lines = None if self._captured is None else self._captured.lines
            if self._is_whole:
                pass
            elif lines is not None and lines.buckets is self.center.buckets and self._exchange.sums == self.center.sums:
                lines.move(self.alpha, self.strategy.momentum)
            else:
                self.center.move(self._exchange.sums(), self.alpha, self.strategy.momentum)
            if agreed:  # z becomes what every rank's program wrote, and so do learners that were not in the model then
                self.center.replace(self._exchange.written.values)
                for j in range(self.learners.count):
                    if j != self._writer:
                        self.center.copy_to(self.learners.params(j))
            self._exchange, self._alone = None, 0
            if dropped:
                self._high, self._dropped = self._learning_rates.by_group(), False
                self.restart()
                self.world.ledger.event("crossbow", restart=self.met, why="a learning rate dropped")
        else:
            self._alone += 1
        self.rounds += 1
        self._tune()

    def _wait_for(self, exchange: Sum) -> tuple[bool, bool]:
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

    def _update_learning_rates(self) -> None:
        """Whether a rate has dropped from its highest. A schedule that falls a little in each window must not restart
        in each: a restart takes back what the learners did since the central model last moved."""
        now, most = self._learning_rates.by_group(), self.strategy.drop * (1.0 + 1e-9)
        self._dropped |= any(new < high and new <= most * high for new, high in zip(now, self._high, strict=False))
        if not self._dropped:
            self._high = [max(pair) for pair in zip(now, self._high, strict=False)] + now[len(self._high) :]

    def _tune(self) -> None:
        """Between rounds: at intervals, change the number of learners, or how often they meet."""
        observed = self.tuning.observe(self.met, self.world.ledger)
        if observed is None:
            return
        full = self._captured is not None and not self._captured.has_room()
        sums = torch.tensor([*observed, self._side_by_side, full], dtype=torch.float64)
        self._submit(lambda channel: channel.all_reduce(sums, "sum", tag="tuning").wait()).wait()
        *found, users, full_ranks = sums.tolist()
        why = self.tuning.decide(*found, side_by_side=users == self.world.size, has_room=not full_ranks)
        self._side_by_side = False
        if why:
            self.every = self.tuning.every
            self.resize(self.tuning.learners)
            decided = {"learners": self.tuning.learners, "every": self.tuning.every, "throughput": found[0]}
            self.world.ledger.event("crossbow", **decided, why=why)

    def resize(self, count: int) -> None:
        """Between two rounds: learners that are new begin at z, with the optimizer state of the first."""
        before, self.wanted = self.learners.count, count
        if before == count:
            return
        self._drop_graphs()
        self.learners.turn_to(0)
        with naming_learners(count):
            self.learners.resize(count)
        for j in range(before, count):
            self.center.copy_to(self.learners.params(j))

    # Side by side ------------------------------------------------------------------------------------------------

    def batches(self, loader: Iterable[Any]) -> Iterator[Batches]:
        """The loader's batches, so many at a time as `learn` runs side by side."""
        return self.learners.batches(loader, self.strategy.accumulate, self.world)

    def learn(
        self,
        loss_of: Callable[[nn.Module, Any], Tensor],
        batches: Sequence[Any],
        *,
        adjust: Callable[[], object] | None = None,
        clip_norm: float | None = None,
        capture: bool = True,
    ) -> list[Tensor]:
        """Run the learners side by side: `accumulate` batches each, and a step each. Returns the losses.

        `loss_of(model, batch)` computes the loss with the model it is given; enter autocast inside it. `clip_norm`: the
        largest norm of a learner's gradients. `adjust()` is called before each learner's step, with its gradients in
        `replica.model`: to change them otherwise. The loop has no backward and no step of its own. The arithmetic is
        that of the plain loop.

        On a GPU, rounds are captured as a CUDA graph: after the first few, Python in `loss_of` and in the model runs no
        more. What cannot be captured runs in threads, as on CPUs, and a warning names it. `capture=False`: never.

        for batches in replica.batches(loader):
            replica.learn(lambda model, batch: loss_fn(model(batch[0]), batch[1]), batches)
        """
        if self.learners.count > 1 and any(isinstance(m, SyncBatchNorm) for m in self.learners.parts):
            raise ValueError(
                "SyncBatchNorm cannot run in several learners at a time, as their collectives would mix: use "
                "BatchNorm, or the plain loop, in which learners take turns"
            )
        if clip_norm is not None and not 0.0 < clip_norm < math.inf:
            raise ValueError(f"clip_norm={clip_norm}: expected a positive number, the largest norm of the gradients")
        if self.windows.is_local:
            raise ValueError(
                "learn() makes all of a window's passes, and the step: set `accumulate`, without no_sync()"
            )
        losses, self._side_by_side = [], True
        self.meet_if_due()
        self.windows.after_step()  # of a window whose step was skipped, which learn's first would be taken for
        for shares in self.learners.shares(batches, self.strategy.accumulate, self.world):
            with naming_learners(self.learners.count):
                losses += self._learn_round(loss_of, shares, adjust, clip_norm, capture)
        return losses

    def _learn_round(
        self,
        loss_of: Callable[[nn.Module, Any], Tensor],
        shares: Sequence[Batches],
        adjust: Callable[[], object] | None,
        clip_norm: float | None,
        capture: bool,
    ) -> list[Tensor]:
        captured = self._lay_out(shares) if capture else None
        if captured is None:
            self.begin()
        else:
            why_no_steps = captured.why_no_steps
            stepping = adjust is None and not why_no_steps
            if adjust is None and why_no_steps:
                self._tell(f"gradients are captured, steps are not: {why_no_steps}")
            alone = stepping and self.every == 1 and self.world.size == 1
            self._is_whole = alone and self._exchange is None and not self._written.values
            corrections = (self.alpha, self.strategy.momentum) if self._is_whole else None
            self.begin(captured.lines)
            try:
                found, grads = captured.run(How(loss_of, clip_norm, stepping, corrections), shares)
            except BaseException as error:  # no learner has stepped
                if self._is_whole:
                    captured.lines.fill()
                self._is_whole = False
                if not isinstance(error, Uncapturable):
                    raise
                self._tell(f"a round runs in threads, and is not captured as a CUDA graph: {error}")
                captured = None
            else:
                self._laid_out = 0 if captured.replayed else self._laid_out
                if stepping:
                    self._count_steps(captured)
                    return found
        if captured is None:
            found, grads = self.learners.gradients(loss_of, shares)
        for each in grads:
            self.learners.put(each)
            if captured is None and clip_norm is not None:
                nn.utils.clip_grad_norm_(self.model.parameters(), clip_norm)
            if adjust is not None:
                adjust()
            self.optimizer.step()  # ends the window, and with it this learner's turn
            self.learners.put([None] * len(each))
        return found

    def _count_steps(self, captured: CapturedLearners) -> None:
        """All learners have stepped: the rest of a step, of each."""
        with torch.no_grad():
            if self.due and not self._is_whole:
                captured.lines.correct(self.alpha, self._find_agreed())
        self._stepped = self.learners.count
        for _ in range(self._stepped):
            self.windows.before_step()
            self.fault_in_update()
            self.windows.after_step()
        self.optimizer._opt_called = True  # type: ignore[attr-defined]  # else a schedule warns
        try:
            self._meet_all()
        finally:
            self._stepped, self._is_whole = 0, False

    def _lay_out(self, shares: Sequence[Batches]) -> CapturedLearners | None:
        """The learners as they can be computed at the same time; None: they cannot."""
        if not is_on_gpu(self.learners.named):
            return None
        each, count = self.strategy.accumulate, self.learners.count
        whole = len(shares) == count and all(len(share) == each for share in shares)
        if self.learners.turn or not whole or any(weight != 1.0 for share in shares for weight in share.weights):
            return None  # a round that begins or ends in the middle, or a batch that counts less
        with torch.no_grad():
            self._follow()
            if self._captured is not None and not self._captured.is_current(self.center):
                self._drop_graphs()
            if self._captured is None:
                why_not = why_not_laid_out(self.learners, self.center)
                if self.healing is not None:
                    why_not = "ranks come and go (an elastic run)"
                elif self._laid_out > MOST:
                    why_not = "parameters, buffers or optimizer states are replaced by other tensors all the time"
                if why_not:
                    self._tell(f"rounds run in threads, and are not captured as CUDA graphs: {why_not}")
                    return None
                self._laid_out, self._in_lines = self._laid_out + 1, True
                self._captured = CapturedLearners(self.learners, self.center)
                self.writes.note()  # parameters are elsewhere now, and the program did not do it
        return self._captured

    def _tell(self, text: str) -> None:
        if text not in self._told:
            self._told.add(text)
            warn_user(f"crossbow: {text}")

    def _drop_graphs(self) -> None:
        captured, self._captured = self._captured, None
        if captured is not None:
            captured.close()

    # The model to evaluate, and state ----------------------------------------------------------------------------

    @torch.no_grad()
    def consolidate(self) -> nn.Module:
        """A copy that holds the central model, and the mean of all learners' buffers (every rank calls it)."""
        self.meet_if_due()
        made = self.copy_model()
        self.center.copy_to([p.detach() for p in made.parameters()])
        copies = dict(made.named_parameters())
        for name, value in self._find_common().items():
            copies[name].copy_(value)
        self.average_frozen(made)
        buffers = [b.detach() for b in made.buffers()]
        for buffer, mean in zip(buffers, self._mean_buffers(), strict=True):
            buffer.copy_(mean)
        share_buffers(buffers, "average", self.world)
        return made

    def _mean_buffers(self) -> list[Tensor]:
        """In the model's order: the mean of the learners' here; of numbers without a fraction, the first learner's."""
        every = [self.learners.buffers(j) for j in range(self.learners.count)]
        return [
            torch.stack(each).mean(0) if each[0].is_floating_point() or each[0].is_complex() else each[0]
            for each in zip(*every, strict=True)
        ]

    def _list_written(self) -> list[Written]:
        """What the program wrote before the exchange that is under way, and since that began."""
        return [Written() if self._exchange is None else self._exchange.written, self._written]

    def _find_common(self) -> dict[str, Tensor]:
        """What every rank's program wrote alike since the central model last moved (every rank calls it)."""
        waiting = self._list_written()
        every = list(self.gather_present([one.code() for one in waiting]).values())
        common = [one.values for i, one in enumerate(waiting) if all(codes[i] == every[0][i] for codes in every)]
        return {name: value for values in common for name, value in values.items()}

    @torch.no_grad()
    def model_part(self) -> ModelPart:
        """The central model, not a learner; and all learners' buffers."""
        values = dict(zip(self.model.buffers(), self._mean_buffers(), strict=True))
        central = self.center.z | self._common
        values |= {param: central[name] for name, param in self.learners.named if name in central}
        return ModelPart(values)

    def shared_state(self) -> dict[str, Any]:
        """In mid-round the sum is part of it: what learners that have stepped gave to it is gone."""
        sums, exchange = None, self._exchange
        if self.learners.turn and exchange is not None:  # begun on every rank, so it ends without more
            dropped, agreed = self._wait_for(exchange)
            sums = {
                "heard": dropped,
                "sums": {n: x.clone() for n, x in exchange.sums().items()},
                "written": exchange.written.state_dict() if agreed else None,
            }
        return {
            **super().shared_state(),
            **self.center.state_dict(),
            "learners": self.learners.count,
            "rounds": self.rounds,
            "alone": self._alone,
            "high": list(self._high),
            "dropped": self._dropped,
            "tuning": self.tuning.state_dict(),
            "turn": self.learners.turn,
            "under way": sums,
        }

    def local_state(self) -> dict[str, Any]:
        self._common = self._find_common()  # for `model_part`, which must not ask
        return {"others": self.learners.state_dict(), "written": self._written.state_dict()}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any], *, same_world: bool = True) -> None:
        if "center" not in state["shared"]:
            raise ValueError(
                "the checkpoint is of a strategy without a central model: load it with the strategy that it was "
                "saved with, then call replica.switch('crossbow')"
            )
        self._forget()
        super().load_state_dict(state, same_world=same_world)

    def load_shared(self, shared: dict[str, Any]) -> None:
        super().load_shared(shared)
        self.rounds, self._alone = shared["rounds"], shared["alone"]
        self.center.load_state_dict(shared)
        self._high, self._dropped = list(shared["high"]), shared["dropped"]
        self._looked, self._written = False, Written()
        self.tuning.load_state_dict(shared["tuning"])
        self.wanted, self.every = self.tuning.learners, self.tuning.every

    def load_local(self, shared: dict[str, Any], locals_: Sequence[dict[str, Any]], *, same_world: bool) -> None:
        """In another world, or with another number of learners, all learners begin at the central model."""
        if not same_world or shared["learners"] != self.wanted:
            self._all_at_center()
            return
        self.learners.load_state_dict(locals_[0]["others"], shared["turn"])
        self._written = Written.of(locals_[0].get("written"), self.world.device)
        under_way = shared["under way"]
        if under_way is not None:
            sums = {name: x.to(self.center.z[name]) for name, x in under_way["sums"].items()}
            written = under_way.get("written")
            heard = Handle.of((under_way["heard"], written is not None))
            self._exchange = Sum(heard, partial(dict, sums), Written.of(written, self.world.device))

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

    # Another world: all learners begin at the source's central model; who was in its world keeps its optimizer's state.

    def settle(self, *, is_source: bool) -> None:
        self._unmet = 0
        self._exchange = self._stale = None  # its world ends
        self.learners.turn_to(0)

    def progress(self) -> int:
        return self.rounds

    def got_as_far(self, progress: int, source: int) -> bool:
        """A rank may have been lost in mid-round: some have ended it, some have not."""
        return progress >= source - 1

    def take_model(self, change: Change) -> str:
        share(self.model, change.world, change.source)
        return (
            f"every learner begins at the central model of rank {change.source} of {change.world.size}, at rest; "
            f"optimizer states: their own where ranks stayed, else that of rank {change.source}"
        )

    def carry(self, change: Change, shared: dict[str, Any]) -> str:
        self.load_shared(shared)
        if change.keeps and self.learners.count == self.wanted and change.former_size > 1:
            self.restart()
        else:
            self._all_at_center()
        return ""
