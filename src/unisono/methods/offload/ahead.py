"""Units that the host steps as soon as their gradient has arrived, while backward goes on.

SuperOffload (Lian et al., 2025, arXiv:2509.21271). What a step will be is known only once it is asked for: clipping
multiplies gradients then, a scheduler may have changed the learning rate, a gradient may have been cleared. So:

  begin   a unit's gradient has arrived: it is stepped as if it were applied as it is, into a second copy of its state
  claim   the step is asked for: where it is the one that was guessed, the two copies are to change places; where it is
          not, the second is forgotten, and the unit is stepped again from the first, which nothing has touched. A unit
          whose turn has not come yet is stepped in place, which takes less of the memory's time

Until then nobody sees a guess: values, state and counts are those before it, and a step that never comes leaves none.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from unisono.background import SerialQueue
from unisono.methods.offload.blocks import Block
from unisono.methods.offload.stepper import Stepper, StepSettings

if TYPE_CHECKING:
    from unisono.methods.offload.pipeline import Mark

Ranges = Sequence[tuple[int, int]]
_AT_ONCE = 2  # units


class Work(NamedTuple):
    """What stepping a block ahead reads and writes, beside its state."""

    gradient: Tensor
    out: Tensor  # the new values, where nobody computes with them
    absent: Ranges


class Guess:
    """One unit's next step, as it is taken ahead."""

    def __init__(self, settings: StepSettings, absent: Ranges, blocks: Sequence[Block]) -> None:
        self.settings, self.absent = settings, absent
        self.versions = {block: block.version for block in blocks}
        self._is_void = self._has_begun = False
        self._lock, self._started = threading.Lock(), threading.Event()
        self._calls: dict[Block, tuple[Callable[[], None], Callable[[], None]]] = {}
        self._error: BaseException | None = None

    def begin(self, arrived: Mark, start: Callable[[Block], tuple[Callable[[], None], Callable[[], None]]]) -> None:
        """Begin to step all blocks; `start` begins one and returns what waits for its end, and what takes it over."""
        try:
            arrived.wait()
            with self._lock:
                self._has_begun = not self._is_void
            for block in self.versions if self._has_begun else ():
                self._calls[block] = start(block)
        except BaseException as error:  # raised by the step that is this one, if it comes
            self._error = error
        finally:
            self._started.set()

    def drop(self, *, always: bool) -> bool:
        """Do not begin it, and whether it has not begun; `always`: it will not be used in either case."""
        with self._lock:
            self._is_void = always or not self._has_begun
            return not self._has_begun

    def wait(self) -> None:
        """Wait until nothing is under way; what went wrong is raised elsewhere."""
        self._started.wait()
        for wait, _ in self._calls.values():
            with suppress(Exception):  # not Ctrl-C
                wait()

    def find_take(self, block: Block) -> Callable[[], None]:
        """What waits for a block and lets its step have happened; raises what went wrong in the unit."""
        self._started.wait()
        if self._error is not None:
            raise self._error
        wait, take = self._calls[block]

        def end() -> None:
            wait()
            take()

        return end


class StepsAhead:
    """The guesses of a pipeline, at most one for each unit.

    lane: the thread in which blocks are stepped, in order. find_work: of a block, with the ranges of its unit that are
    taken to have no gradient. claimed, missed: how many units were stepped ahead for good, and for nothing; the others
    had not been begun when the step was asked for.
    """

    def __init__(
        self,
        stepper: Stepper,
        lane: SerialQueue,
        blocks: Sequence[Block],
        find_work: Callable[[Block, Ranges], Work],
    ) -> None:
        self._stepper, self._lane, self._find_work = stepper, lane, find_work
        self._blocks: dict[int, list[Block]] = {}
        for block in blocks:
            self._blocks.setdefault(block.unit, []).append(block)
        self._guesses: dict[int, Guess] = {}
        self._under_way: dict[int, Guess] = {}  # of the lane: threads that are done with one go on with the next
        self._absent: Mapping[int, Ranges] = {}  # in the last step: those that stay unused are guessed right
        self.claimed = self.missed = 0

    def begin(self, u: int, arrived: Mark) -> None:
        """Step unit `u` once its gradient is there, instead of with the one that it may have had before."""
        if u in self._blocks:
            if u in self._guesses:
                self._forget([self._guesses[u]])
            guess = Guess(self._stepper.foresee(), self._absent.get(u, ()), self._blocks[u])
            self._guesses[u] = guess
            self._lane.submit(partial(self._begin, u, guess, arrived))

    def _begin(self, u: int, guess: Guess, arrived: Mark) -> None:
        self.end(u)
        while len(self._under_way) >= _AT_ONCE:
            self.end(next(iter(self._under_way)))
        guess.begin(arrived, partial(self._start, guess))
        self._under_way[u] = guess

    def end(self, u: int) -> None:
        """In the lane, before unit `u` is stepped anew: wait until a guess that was forgotten no longer writes the
        second copy and the new values."""
        guess = self._under_way.pop(u, None)
        if guess is not None:
            guess.wait()

    def _start(self, guess: Guess, block: Block) -> tuple[Callable[[], None], Callable[[], None]]:
        work = self._find_work(block, guess.absent)
        return self._stepper.start_ahead(block.index, *work, settings=guess.settings)

    def wait(self, u: int) -> None:
        """Wait until nothing is under way in unit `u`, so that its state can be read."""
        if u in self._guesses:
            self._guesses[u].wait()

    def close(self) -> None:
        """Forget all, and wait until nothing is under way."""
        self._forget(self._guesses.values())
        for guess in self._guesses.values():
            guess.wait()

    def _forget(self, guesses: Collection[Guess]) -> None:
        self.missed += sum(not guess.drop(always=True) for guess in guesses)

    def claim(self, settings: StepSettings, scale: float | Tensor, absent: Mapping[int, Ranges]) -> dict[int, Guess]:
        """A step is asked for: those guesses that are it, by unit. The others are forgotten, without waiting."""
        found = {}
        plain = not isinstance(scale, Tensor) and scale == 1.0
        for u, guess in self._guesses.items():
            same = plain and list(guess.absent) == list(absent.get(u, ())) and is_same(guess.settings, settings)
            if same and all(block.version == version for block, version in guess.versions.items()):
                found[u] = guess
        self._forget([guess for u, guess in self._guesses.items() if u not in found])
        found = {u: guess for u, guess in found.items() if not guess.drop(always=False)}
        self.claimed += len(found)
        self._guesses, self._absent = {}, absent
        return found


def is_same(a: Any, b: Any) -> bool:
    """Whether two settings are known to be equal. What cannot be compared may have changed in place.

    >>> is_same({"lr": torch.tensor(0.1), "betas": (0.9, 0.99)}, {"lr": torch.tensor(0.1), "betas": (0.9, 0.99)})
    True
    >>> is_same([0.1], [0.2]), is_same(0.0, None), is_same(object(), object())
    (False, False, False)
    """
    if type(a) is not type(b):
        return False
    if isinstance(a, Tensor):
        return (a.dtype, a.device) == (b.dtype, b.device) and torch.equal(a, b)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(is_same, a, b))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(is_same(a[key], b[key]) for key in a)
    return isinstance(a, (bool, int, float, str, type(None))) and a == b
