"""A world whose ranks come and go: what this process knows of that, and the calls of its program that survive it.

A collective that the program calls by itself (the sum of a metric, say) is done over the ranks that are left, where one
is lost in it. A rank that had the result before the loss gives it to those that had not. What was called between two
passes over data is remembered: a worker that comes later runs the program from its beginning, is given these results,
and so comes to the place where the others are.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from unisono import packing
from unisono.background import Handle, in_background
from unisono.launchers.runtime.membership import Assignment, Membership
from unisono.world.transports import PeerLost

if TYPE_CHECKING:
    from unisono.world.world import World


class Batches(Protocol):
    """What elastic runs need to know of a shard of `un.shard`."""

    name: str
    epoch: int
    batch: int

    @property
    def is_out(self) -> bool:
        """Whether a batch has been given out, and the next has not been asked for."""

    @property
    def position(self) -> list[Any]:
        """The epoch, the batches of it that were given out, and whatever else `move_to` takes."""

    def locate(self, batch: int) -> list[Any]:
        """The position before a batch of this epoch."""

    def move_to(self, epoch: int, batch: int, place: Any = None) -> None:
        """Continue this pass at another rank's position."""

    def cut(self) -> None:
        """End the pass that is under way."""

    def describe_batch(self) -> str:
        """The samples of the batch that was given out last, in words."""


class Healer(Protocol):
    """Forms the world anew, and knows which batches the model has been trained on (see strategy/healing.py)."""

    def heal(self) -> None:
        """Wait for the next generation of the world and continue in it."""

    @property
    def is_repeating(self) -> bool:
        """Whether the batches that are out will be given out once more."""

    def before_batch(self, shard: Batches, /) -> None:
        """Called when the program asks for a batch."""

    def after_batch(self, shard: Batches, /) -> None:
        """Called before a batch is given to the program."""


LOG_BYTES = 64 << 20  # of results that are remembered for those who come later


class Elastic:
    """State of a world whose launcher replaces lost workers; `World.elastic` of what `un.join()` returned."""

    def __init__(
        self, world: World, membership: Membership, solo: World, form: Callable[[Assignment, torch.device], World]
    ) -> None:
        self.membership = membership
        self.form_generation = form  # makes the world of a generation
        self.solo = solo  # stands for the world in a worker that has not been let in yet
        self.is_closed = False  # the run goes on, but cannot be joined: too much would have to be remembered
        self.broken: PeerLost | None = None  # a peer is lost, and the world has not been formed anew
        self.is_skipping = False  # it has, in the middle of a step: the rest of that step is not done
        self.healer: Healer | None = None
        self.calls = 0  # of the program, that have ended
        self.in_call = False  # one has not
        self.recent: deque[bytes] = deque(maxlen=2)  # results of the last of these
        self.log = membership.log.read() if membership.joining else []  # results of calls outside of passes
        self._log_bytes = sum(map(len, self.log))
        self._done = 0  # of these, the calls that this program has made
        self._handed: list[bytes] = []  # results that others had before the loss
        self._inside = 0
        self.world = world

    @property
    def is_idle(self) -> bool:
        """Whether nothing is to be exchanged before the next batch."""
        return self.broken is not None or self.is_skipping

    @property
    def is_repeating(self) -> bool:
        """Whether the batches that are out will be given out once more."""
        return self.healer is not None and self.healer.is_repeating

    @property
    def is_joining(self) -> bool:
        """Whether this worker still waits to join the others: until then it is alone."""
        return self.membership.joining

    @property
    def is_catching_up(self) -> bool:
        """Whether this worker's program has yet to reach the position of the others."""
        return self._done < len(self.log)

    @property
    def is_between_passes(self) -> bool:
        """Whether no batch is out: a worker that joins later makes this call too."""
        return not any(shard.is_out for shard in self.world.shards.values())

    @contextmanager
    def inside(self) -> Iterator[None]:
        """Mark collectives in this block as the library's own, not the program's."""
        self._inside += 1
        try:
            yield
        finally:
            self._inside -= 1

    @property
    def is_inside(self) -> bool:
        """Whether a collective called now is the library's own."""
        return self._inside > 0 or in_background()

    def before_batch(self, shard: Batches) -> None:
        """Called when the program asks for a batch."""
        self._handed = []
        if self.healer is not None:
            self.healer.before_batch(shard)

    def after_batch(self, shard: Batches) -> None:
        """Called before a batch is given to the program."""
        if self.healer is not None:
            self.healer.after_batch(shard)

    def run_tolerating_loss(self, call: Callable[[], Any]) -> Any:
        """See `World.run_tolerating_loss`."""
        if self.is_idle:
            return None
        try:
            if in_background():
                return call()
            with self.inside():
                return call()
        except PeerLost as error:
            self.broken = error
            return None

    # Calls of the program ----------------------------------------------------------------------------------------

    def call(
        self,
        run: Callable[[], Any],
        inputs: tuple[Any, ...] = (),
        *,
        alone: Callable[[], Any],
        raises: tuple[type[Exception], ...] = (),
    ) -> Any:
        """Run a call of the program; if a peer is lost in it, run it again in the world that is left.

        `inputs`: what the call may change before it fails. `alone`: what it gives in the rest of a step that was given
        up. The others may not have begun that step, and it is repeated, with this call. `raises`: errors that all
        ranks get alike, and that a program may go on from: a worker that comes later gets them too.
        """
        if self.is_catching_up:
            self._done += 1
            return self._take(self.log[self._done - 1], inputs, raises)
        if self.is_joining:
            raise RuntimeError(
                "this worker joins a run that is under way, and its program asks for more of the other workers, before "
                "its first batch, than theirs did: what a program calls before training must be the same each time"
            )
        if self._handed:
            return self._take_handed(inputs, raises)
        if self.is_repeating:
            return alone()
        before = [x.detach().clone() for x in _list_tensors(inputs)]
        self.in_call = True
        try:
            with self.inside():
                return self._run(run, inputs, before, alone, raises)
        finally:
            self.in_call = False

    def _run(
        self,
        run: Callable[[], Any],
        inputs: tuple[Any, ...],
        before: list[Tensor],
        alone: Callable[[], Any],
        raises: tuple[type[Exception], ...],
    ) -> Any:
        while True:
            if self.broken is None:
                try:
                    value = run()
                    value = value.wait() if isinstance(value, Handle) else value
                except PeerLost as error:
                    self.broken = error
                except raises as error:
                    kind = next(kind for kind in raises if isinstance(error, kind))
                    self._note([None, kind.__name__, str(error)])
                    raise
                else:
                    self._note([value])
                    return value
            if self.healer is None:
                raise self.broken
            self.healer.heal()
            if self._handed:
                return self._take_handed(inputs, raises)
            with torch.no_grad():
                for x, saved in zip(_list_tensors(inputs), before, strict=True):
                    x.copy_(saved)
            if self.is_repeating:
                return alone()

    def _note(self, outcome: list[Any]) -> None:
        """Remember [the result], or [None, the kind of an error, its text]."""
        try:
            packed = packing.to_bytes(outcome)
        except TypeError:  # a model, say: nobody else can be given it
            packed = b""
        self._note_packed(packed)

    def _note_packed(self, packed: bytes) -> None:
        self.calls += 1
        self.recent.append(packed)
        if not self.is_between_passes:
            return  # one who comes later does not come through here
        if self.is_closed:
            return
        self.log.append(packed)
        self._done += 1
        self._log_bytes += len(packed)
        if self._log_bytes > LOG_BYTES:
            self.is_closed = True
            self.log, self._done = [], 0
        elif self.world.rank == 0:
            self.membership.log.write(self.log)

    def hand(self, results: list[bytes]) -> None:
        """The results of the call that this rank is in, and of those after it that others have ended: a call that waits
        for nobody (`un.preempted`) may follow the one in which a rank was lost."""
        if not all(results):
            raise PeerLost(
                "another rank was lost in a call whose result cannot be sent to the ranks that have not got it"
            )
        self._handed = results

    def _take_handed(self, inputs: tuple[Any, ...], raises: tuple[type[Exception], ...]) -> Any:
        packed = self._handed.pop(0)
        self._note_packed(packed)
        return self._take(packed, inputs, raises)

    def replay(self, log: list[bytes], calls: int) -> None:
        """Catch up with the others: these are the results of all their calls outside of passes."""
        if log[: self._done] != self.log[: self._done]:  # read before a call was done again by those left
            raise RuntimeError("this worker began with results that the others have changed since: another is started")
        self.calls, self.log = calls, list(log)
        self._log_bytes = sum(map(len, log))

    def end_replay(self) -> None:
        """The program has reached the position of the others."""
        self._done = len(self.log)

    def write_log(self) -> None:
        """On rank 0, perhaps a new one: rewrite the shared log with this rank's, not what only its predecessor had."""
        if self.world.rank == 0 and not self.is_closed:
            self.membership.log.rewrite(self.log)

    def _take(self, packed: bytes, inputs: tuple[Any, ...], raises: tuple[type[Exception], ...]) -> Any:
        """The result as the call would have returned it: written to its inputs if it changes them."""
        value, *error = packing.from_bytes(packed)
        for kind in raises:
            if error and kind.__name__ == error[0]:
                raise kind(error[1])
        tensors, results = _list_tensors(inputs), _list_tensors((value,))
        if (
            tensors
            and len(tensors) == len(results)
            and all(a.shape == b.shape for a, b in zip(tensors, results, strict=True))
        ):
            with torch.no_grad():
                for x, result in zip(tensors, results, strict=True):
                    x.copy_(result)
            return inputs[0]
        return value


def _list_tensors(values: tuple[Any, ...]) -> list[Tensor]:
    found: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, list | tuple):
            found += _list_tensors(tuple(value))
    return found
