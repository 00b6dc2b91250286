"""A parameter server: it steps an optimizer with the gradients that workers push."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import Tensor
from torch.optim import Optimizer

from unisono.methods.strategies._serving.server import Answer, Grads, Server, Settings, Values, refuse_written


class GradientServer(Server):
    """Gradients, in rounds of all workers or as they come.

    staleness 0: a round ends when every worker has pushed; one step is taken with the mean of what they pushed.
    Else every push is a step of its own, at 1/N of its learning rate, so that a round of all N workers moves the
    parameters about as far; a worker more than `staleness` windows ahead of the slowest waits (None: nobody does).
    delay: a push is applied when so many pushes of others have come after it; its worker waits for that.

    What workers' programs wrote to parameters comes with their pushes. With staleness 0 all have to write the same in a
    round. Else the first one's counts at once, and each worker has to write the same in its turn.
    """

    def __init__(
        self,
        params: Sequence[Tensor],
        optimizer: Optimizer,
        workers: Iterable[int],
        *,
        staleness: int | None,
        delay: int = 0,
    ) -> None:
        self.staleness, self.delay = staleness, delay
        self.stands_still = staleness == 0
        self._written: dict[int, Values] = {}  # of the workers that push in this round, or rest
        super().__init__(params, optimizer, workers)

    def push(
        self, worker: int, grads: Grads | None, settings: Settings | None = None, written: Values | None = None
    ) -> Answer:
        """One window of a worker: returns when it may go on. `grads` None: it has nothing to add. `written`: what its
        program wrote to parameters since the last one."""
        with self._changed:
            self._raise_failure()
            if settings is not None:
                self._settings[worker] = settings
            self._clocks[worker] += 1
            self.note_written(worker, written or [])
            missed = 0
            if self.staleness == 0:
                number = self._rounds
                self._round[worker] = grads
                self._look_again()
                self._wait(lambda: self._rounds > number)
            else:
                missed = self._apply_alone(worker, grads)
            return Answer(
                self._clocks[worker] - self._slowest(worker), missed, [self._clocks.get(w, -1) for w in self._all]
            )

    def _apply_alone(self, worker: int, grads: Grads | None) -> int:
        """A step by one worker's push; gives how many steps by others' it has not seen."""
        before = dict(self._clocks)

        def has_waited() -> bool:  # for pushes of those that are here: where one has left, for one fewer
            pushes = sum(clock - before[w] for w, clock in self._clocks.items() if w != worker)
            return pushes >= min(self.delay, len(self._active()) - 1)

        self._changed.notify_all()
        self._wait(has_waited)
        missed = self.version - self._seen[worker]
        if grads is not None:
            self._do_or_fail(lambda: self._step(grads, self._settings[worker], share=1.0 / len(self._clocks)))
            self._raise_failure()
        self._changed.notify_all()
        staleness = self.staleness
        if staleness is not None:
            self._wait(lambda: self._clocks[worker] - self._slowest(worker) <= staleness)
        return missed

    def _slowest(self, worker: int) -> int:
        return min(self._clocks[w] for w in {*self._active(), worker})

    def look_at_round(self) -> None:
        if self._active() <= set(self._round):
            self._end_round()

    def _end_round(self) -> None:
        given = {w: grads for w, grads in sorted(self._round.items()) if grads is not None}
        workers, self._round = set(self._round), {}
        self.take_written(workers)
        if given:
            first = next(iter(given))
            self._step(_mean(list(given.values())), self._settings[first], share=1.0)
        self._rounds += 1

    def note_written(self, worker: int, written: Values) -> None:
        """Keep it until all have said what they wrote; without rounds, take the first worker's now."""
        if self.staleness == 0:
            self._written[worker] = written
        else:
            super().note_written(worker, written)

    def take_written(self, workers: Iterable[int]) -> None:
        """Compare what these workers' programs wrote, refuse differences, and write it to the parameters."""
        written = {w: self._written.pop(w, []) for w in sorted(workers)}
        first = next((values for values in written.values() if values), [])
        wrote = [w for w, values in written.items() if _are_equal(values, first)]
        if others := [str(w) for w in written if w not in wrote]:
            refuse_written(first[0][1], wrote, f"worker(s) {', '.join(others)} did not, or wrote other values")
        self.put_values(first)


def _are_equal(some: Values, others: Values) -> bool:
    pairs = zip(some, others, strict=False)
    return len(some) == len(others) and all(i == j and x.equal(y) for (i, _, x), (j, _, y) in pairs)


def _mean(given: Sequence[Grads]) -> list[Tensor | None]:
    """The mean over those that pushed; one without a gradient counts as zero, if another has one."""
    means: list[Tensor | None] = []
    for each in zip(*given, strict=True):
        there = [g for g in each if g is not None]
        total = there[0] / len(given) if there else None  # divided before it is added: 16 bits do not overflow
        for g in there[1:]:
            total = total.add_(g / len(given)) if total is not None else None
        means.append(total)
    return means
