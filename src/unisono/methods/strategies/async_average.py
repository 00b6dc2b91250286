"""Asynchronous averaging: every rank trains alone, and threads behind the programs average the models.

BAGUA (Gan et al. 2021, arXiv:2107.01499).
"""

from __future__ import annotations

import atexit
import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from unisono.background import SerialQueue
from unisono.methods.buckets import BUCKET_BYTES
from unisono.methods.checks import AtLeast, Range
from unisono.methods.exchange.overlap import Exchange, split_sparse
from unisono.methods.exchange.reduction import Reduction
from unisono.methods.facts import Convergence, Example, Facts
from unisono.methods.reducers.dense import dense
from unisono.methods.strategies._graphs import ExchangedParameters, Lines
from unisono.methods.strategy import Accumulate, Change, Pattern, PeriodicReplica, Replica, Strategy
from unisono.world import World

_ROUND_S = 2.0  # a round, when the program ends
_PAUSED = 2  # what a rank asks for that has aborted averaging; 1 leaves out this round only

FACTS = Facts(
    [Example("async_average", varies=True), Example("async_average(warmup=1)", varies=True)],
    refuses={"accumulate=0": "accumulate", "every_s=-1.0": "every_s", "warmup=-1": "warmup"},
    own_gradients=True,
    convergence=Convergence("other", "models are averaged in the background; no worker waits"),
    unpredicted="how often models meet depends on the time that a round takes",
)


@dataclass(frozen=True)
class async_average(Strategy):
    """Train alone, and take in the mean of all models as it comes: x <- x + (mean - copy).

    A thread of each rank copies its model, averages the copies with the other ranks' threads, and leaves mean - copy
    for the program, which adds it between two windows. No window waits for another rank, however slow.

    every_s: seconds from the end of one averaging to the beginning of the next.
    warmup: windows at the start in which gradients are averaged, synchronously; then the threads begin.
    accumulate: backward passes a window.

    `replica.abort()` on any rank ends averaging on all, until `replica.resume()` is called there.

    >>> from unisono.spec import build
    >>> build("async_average(every_s=0.1, warmup=100)", kind="strategy").warmup
    100
    """

    every_s: Annotated[float, Range("seconds between averagings", at_least=0)] = 0.5
    warmup: Annotated[int, AtLeast(0, "synchronous windows at the start")] = 0
    accumulate: Accumulate = 1

    def pattern(self) -> Pattern:
        return Pattern("alone", round_every_s=self.every_s)

    def make(self, model: nn.Module, optimizer: Optimizer, world: World) -> Replica:
        return AsyncAverageReplica(model, optimizer, world, self)


class Averager:
    """The thread behind a rank: in each round, the ranks agree, copy their models, and average the copies.

    `pending` is what the program has still to add. A copy is the model with what is pending: so a rank whose program
    is in a long window takes part in many rounds meanwhile. The condition guards `pending`, and that a copy is not
    made while the optimizer steps.
    """

    def __init__(self, lines: Lines, world: World, every_s: float) -> None:
        self._lines, self._channel, self._every_s, self._ledger = lines, world.channel(), every_s, world.ledger
        self._changed = threading.Condition()
        self._lane = SerialQueue("unisono async_average")
        self._pending = [torch.zeros_like(line) for line in lines.new()]
        self._fresh = False  # something is pending
        self._stepping, self._closing, self._paused = False, False, False
        self._holding = False  # this rank waits until no round is under way
        self._entered, self._ended = 0, 0  # rounds that this rank entered ready to average; rounds that have ended
        self._over = False  # there are no more rounds
        self._generation = 0  # of the model: a round that began with another one does not count
        self._started = False
        self.steps, self.rounds = 0, 0
        self.averaging = False  # what the ranks last agreed on
        self.error: Exception | None = None
        _averagers.add(self)

    # From the program --------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Begin with the rounds; the first waits for all ranks to begin."""
        if not self._started:
            self._started = True
            self._lane.submit(self._run)

    def stepping(self, now: bool) -> None:
        """The optimizer writes parameters from now on, or no more."""
        with self._changed:
            self.steps += self._stepping and not now
            self._stepping = now
            self._changed.notify_all()

    def pause(self, now: bool) -> None:
        """Take part in no averaging, or again."""
        with self._changed:
            self._paused = now

    def apply(self) -> None:
        """Add what is pending to the parameters."""
        if self.error is not None:
            raise self.error
        with self._changed:
            if self._fresh:
                torch._foreach_add_([p.detach() for p in self._lines.params], self._lines.views(self._pending))
                torch._foreach_zero_(self._pending)
                self._fresh = False
                _finish_on_device(self._pending)

    def add_pending(self, copies: dict[Tensor, Tensor]) -> None:
        """Add what is pending to copies of the parameters, by parameter; it stays pending."""
        with self._changed:
            torch._foreach_add_([copies[p].detach() for p in self._lines.params], self._lines.views(self._pending))

    def hold(self, world: World) -> None:
        """Return when no round is under way on any rank: what the rounds so far left is then pending, or applied, on
        all of them. Every rank calls it; `release()` follows.

        Rounds that a rank enters from here on average nothing. A round averages if every rank entered it before that:
        so all rounds up to the least number entered end, and none after it.
        """
        with self._changed:
            self._holding, mine = True, torch.tensor([self._entered, self._generation, -self._generation])
        last, least, most = world.all_reduce(mine, "min", tag="hold").wait().tolist()
        if least != -most:
            self.release()
            raise ValueError(
                f"some ranks called model.load_state_dict() {least} time(s), others {-most}, and models are not "
                "averaged until all have loaded: every rank loads the model"
            )
        with self._changed:
            self._changed.wait_for(lambda: self._ended >= last or self._over)

    def release(self) -> None:
        """Average again."""
        with self._changed:
            self._holding = False

    def forget(self) -> None:
        """The model is another one: what was averaged of the former does not count."""
        with self._changed:
            self._generation += 1
            torch._foreach_zero_(self._pending)
            self._fresh = False

    def end(self) -> None:
        """Tell the other ranks in the next round that there are no more."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()

    def close(self) -> None:
        """End the thread."""
        self.end()
        self._lane.close()
        self._channel.close()

    # In the thread -----------------------------------------------------------------------------------------------

    @torch.no_grad()
    def _run(self) -> None:
        try:
            while self._round():
                with self._changed:
                    self._changed.wait_for(lambda: self._closing, self._every_s)
        except Exception as error:
            if not self._closing:  # else the world ended before all had heard of it
                self.error = error
        finally:
            with self._changed:
                self.averaging, self._over = False, True
                self._changed.notify_all()
            self._lane.close()  # this thread's own: it ends

    def _round(self) -> bool:
        """1. agree; 2. copy; 3. average; 4. leave the difference. False: a rank ends, so all do."""
        with self._changed:
            if not self._holding:
                self._entered = self._ended + 1
            pause = _PAUSED if self._paused else int(self._holding)
            asked = [self._generation, -self._generation, pause, int(self._closing)]
        goes_on = self._average_if_agreed(asked)
        with self._changed:
            self._ended += 1
            self._changed.notify_all()
        return goes_on

    def _average_if_agreed(self, asked: list[int]) -> bool:
        agreed: list[int] = self._channel.all_reduce(torch.tensor(asked), "max", tag="agree").wait().tolist()
        generation, paused, closing = agreed[0], agreed[2], agreed[3]
        self.averaging = paused < _PAUSED and not closing
        if closing:
            self._ledger.event("async_average", round=self.rounds, ended=True)
            return False
        if paused or generation != -agreed[1]:
            return True
        copy, at = self._copy()
        means = [line.cpu() if line.is_cuda else line.clone() for line in copy]
        self._channel.all_reduce(means, "mean", tag="average").wait()
        with self._changed:
            if generation == self._generation:
                for pending, mean, mine in zip(self._pending, means, copy, strict=True):
                    pending.add_(mean.to(pending.device)).sub_(mine)
                _finish_on_device(self._pending)
                self._fresh = True
                self.rounds += 1
                self._ledger.event("async_average", round=self.rounds, staleness=self.steps - at)
        return True

    def _copy(self) -> tuple[list[Tensor], int]:
        """The model with what is pending, and the number of steps made."""
        with self._changed:
            self._changed.wait_for(lambda: not self._stepping or self._closing)
            copy = self._lines.copy()
            torch._foreach_add_(copy, self._pending)
            _finish_on_device(copy)
            return copy, self.steps


def _finish_on_device(lines: Sequence[Tensor]) -> None:
    """The other thread may work on another stream."""
    for device in dict.fromkeys(line.device for line in lines if line.is_cuda):
        torch.cuda.synchronize(device)


_averagers: weakref.WeakSet[Averager] = weakref.WeakSet()


@atexit.register  # before the lanes end: theirs was registered first
def _end_all() -> None:
    for averager in list(_averagers):
        averager.end()
    for averager in list(_averagers):  # stay until the others have had their next round: they would take me for dead
        averager._lane.close(averager._every_s + _ROUND_S)


class AsyncAverageReplica(PeriodicReplica):
    """A model that the program alone writes; the averager's part is added between windows."""

    strategy: async_average
    own_models = own_optimizer = True
    no_average = (
        "the mean of the models is taken behind the program, between any two steps. Use local_sgd or gossip, which "
        "meet after a step"
    )
    slow_ranks = "ignore"

    def __init__(self, model: nn.Module, optimizer: Optimizer, world: World, strategy: async_average) -> None:
        self._averager: Averager | None = None
        self._warming = False
        super().__init__(model, optimizer, world, strategy)

    def start(self) -> None:
        self._warming = False
        self._exchanged = ExchangedParameters(self.model)
        if self.world.size == 1:
            return
        self._averager = Averager(Lines(self._exchanged.params), self.world, self.strategy.every_s)
        weakref.finalize(self, self._averager.end).atexit = False
        self.writes.on_load = self._averager.forget
        self._warming = self.step < self.strategy.warmup
        if self._warming:
            self.windows.close()
            self.windows = Exchange(  # counts windows as a Counter does, and leaves the mean gradients
                *split_sparse(self.model),
                self.world,
                Reduction(dense(), self.optimizer, lambda world: None, "gradients"),
                bucket_bytes=BUCKET_BYTES,
                overlap=None,
                accumulate=self.strategy.accumulate,
                advance=self.advance,
            )
        self.weight_changed(self.world.weight)

    def stop(self, change: Change | None = None) -> None:
        if self._averager is not None:
            self._averager.close()
            self._averager = None

    @property
    def rounds(self) -> int:
        """Averagings that this rank took part in."""
        return 0 if self._averager is None else self._averager.rounds

    @property
    def averaging(self) -> bool:
        """Whether the ranks' threads average: they have begun, and no rank has aborted it or closed."""
        return self._averager is not None and self._averager.averaging

    def abort(self) -> None:
        """Average no more, on any rank, from the next round on. Returns at once; what is under way is still added.
        Any rank may call it: the ranks' threads agree in every round, and go on agreeing while they average nothing."""
        if self._averager is not None:
            self._averager.pause(True)

    def resume(self) -> None:
        """Average again: from the first round in which no rank has averaging aborted."""
        if self._averager is not None:
            self._averager.pause(False)

    def begin_step(self, *, has_closure: bool) -> None:
        if self._averager is not None:
            self._averager.stepping(True)
        if not self._warming:  # else, with a closure, each call's gradients are averaged
            super().begin_step(has_closure=has_closure)

    def after_step(self) -> None:
        if self._averager is not None:
            self._averager.stepping(False)
        super().after_step()

    def weight_changed(self, weight: float) -> None:
        super().weight_changed(1.0 if self._warming else weight)  # the exchange of the warm-up weighs them itself

    def meet(self) -> None:
        if self._averager is None:
            return
        self._exchanged.check()
        if self.met < self.strategy.warmup:
            return
        if self._warming and not self._unmet:
            self._warming = False
            self.windows.close()
            self.windows = self.new_counter()
            self.weight_changed(self.world.weight)
        self._averager.start()
        self._averager.apply()

    @torch.no_grad()
    def copy_model(self) -> nn.Module:
        """With what the rounds so far left, on every rank the same rounds (every rank calls it)."""
        if self._averager is None:
            return super().copy_model()
        self._averager.hold(self.world)
        try:
            made = super().copy_model()
            self._averager.add_pending(dict(zip(self.model.parameters(), made.parameters(), strict=True)))
        finally:
            self._averager.release()
        return made

    def state_dict(self) -> dict[str, Any]:
        """Every rank calls it: the models are saved with the same rounds in them."""
        state = super().state_dict()
        if self._averager is not None:
            self._averager.hold(self.world)
            try:
                with torch.no_grad():
                    self._averager.apply()
            finally:
                self._averager.release()
        return state

    def load_shared(self, shared: dict[str, Any]) -> None:
        super().load_shared(shared)
        if self._averager is not None:
            self._averager.forget()
