"""A server: it holds part of the parameters and their optimizer, and takes what workers push.

It knows nothing of messages: whoever speaks for a worker (see protocol.py) calls its methods from a thread of its
own, and is held there for as long as the worker has to wait.
"""

from __future__ import annotations

import copy
import threading
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from unisono import packing
from unisono.methods.buckets import FlatLayout
from unisono.methods.strategy.program_writes import digest

Grads = Sequence[Tensor | None]
Settings = list[dict[str, Any]]  # the options of each group of the optimizer, as a worker has them now
Values = list[tuple[int, str, Tensor]]  # what a worker's program wrote: which of my parameters, its name, its values


class Answer(NamedTuple):
    """What a worker hears with its parameters.

    ahead: how many windows it is ahead of the slowest. missed: pushes of others that were applied between its last
    pull and its push. clocks: the pushes of every worker so far; -1 for one that has left.
    """

    ahead: int
    missed: int
    clocks: list[int]


class Server(ABC):
    """Some parameters, their optimizer, and the workers that train them. A method says in `push` what becomes of what
    they bring, and in `look_at_round` whom it does not wait for any more.

    Workers that have left, or rest until all do (`settle`, `gather`), are waited for by nobody.
    """

    stands_still = False  # between a worker's pull and its next push

    def __init__(self, params: Sequence[Tensor], optimizer: Optimizer, workers: Iterable[int]) -> None:
        """`params`: my part of what `optimizer` holds; values and optimizer state are copied from there."""
        self._changed = threading.Condition(threading.RLock())
        self.layout = FlatLayout(params, torch.uint8, contiguous=True)
        self.line = torch.zeros(self.layout.numel, dtype=torch.uint8)
        self._params = [Parameter(x, x.is_floating_point() or x.is_complex()) for x in self.layout.views(self.line)]
        self.values = [p.detach() for p in self._params]
        self._optimizer = optimizer_over(optimizer, dict(zip(params, self._params, strict=True)))
        self._all = list(workers)
        self.workers = len(self._all)
        self.version = 0  # optimizer steps so far
        self._clocks = dict.fromkeys(self._all, 0)  # of those that are here: pushes so far
        self._seen = dict.fromkeys(self._all, 0)  # the version that each pulled last
        self.put(params, [optimizer.state.get(p, {}) for p in params])
        self._settings = dict.fromkeys(self._all, options_of(optimizer))
        self._failure: Exception | None = None
        self._marks: list[str] = []  # of each write that counted at once, one after the other
        self._writes = dict.fromkeys(self._all, 0)  # how many of these each worker has made
        self._rounds = 0
        self._round: dict[int, Grads | None] = {}  # what the workers pushed in this round
        self._resting: set[int] = set()
        self._unanswered: set[int] = set()  # those that have not had their answer when all rested
        self._buffers: dict[int, bytes] = {}
        self._brought: dict[int, bytes] = {}  # what workers brought to `gather`
        self._gathers = 0
        self._gathered = b""
        self._settles = 0
        self._settled: tuple[Tensor, bytes] = (self.line, b"")

    # What workers ask for ---------------------------------------------------------------------------------------

    @abstractmethod
    def push(
        self, worker: int, grads: Grads | None, settings: Settings | None = None, written: Values | None = None
    ) -> Answer:
        """What a worker brings: returns when it may go on. `grads` None: it has nothing to add. `written`: what its
        program wrote to parameters since the last one."""

    @abstractmethod
    def look_at_round(self) -> None:
        """A worker has come, gone, or rests: the others may be waited for no more. With the lock held."""

    def read(self, worker: int, into: Sequence[Tensor]) -> None:
        """Copy the parameters as they are now into `into`."""
        with self._changed:
            self._seen[worker] = self.version
            for target, param in zip(into, self._params, strict=True):
                target.copy_(param.detach())

    def settle(self, worker: int, buffers: bytes = b"", written: Values | None = None) -> tuple[Tensor, bytes]:
        """Rest until every worker does: the parameters then, and, packed, the first worker's buffers and the
        optimizer's states; alike for all."""
        with self._changed:
            self._raise_failure()
            self.note_written(worker, written or [])
            self._resting.add(worker)
            self._buffers[worker] = buffers
            number = self._settles
            self._look_again()
            self._wait(lambda: self._settles > number)
            return self._settled

    def confirm_settled(self, worker: int, *, wait: bool = False) -> None:
        """This worker has its answer to `settle`; `wait`: return when all have theirs."""
        with self._changed:
            self._unanswered.discard(worker)
            self._changed.notify_all()
            if wait:
                self._wait(lambda: not self._unanswered)

    def gather(self, worker: int, data: bytes) -> bytes:
        """Rest until every worker has come here: what each brought, as packed pairs of worker and bytes."""
        with self._changed:
            self._brought[worker] = data
            number = self._gathers
            self._look_again()
            self._wait(lambda: self._gathers > number)
            return self._gathered

    def fetch(self) -> tuple[Tensor, list[dict[str, Any]]]:
        """The parameters as they are now, and the optimizer's state of each."""
        with self._changed:
            return self.line.clone(), [copy.deepcopy(dict(self._optimizer.state.get(p, {}))) for p in self._params]

    def put(self, params: Sequence[Tensor], states: Sequence[dict[str, Any]]) -> None:
        """Go on with these parameters and optimizer states, which all workers have seen."""
        with self._changed, torch.no_grad():
            self._seen = dict.fromkeys(self._all, self.version)
            self._optimizer.state.clear()
            for param, value, state in zip(self._params, params, states, strict=True):
                param.copy_(value)
                if state:  # a server works in the memory of the host, on copies of its own
                    self._optimizer.state[param] = {
                        k: v.detach().cpu().clone() if isinstance(v, Tensor) else copy.deepcopy(v)
                        for k, v in state.items()
                    }

    def leave(self, worker: int) -> None:
        """Forget a worker that has left: nobody waits for it any more."""
        with self._changed:
            self._clocks.pop(worker, None)
            self._resting.discard(worker)
            self._brought.pop(worker, None)
            self._unanswered.discard(worker)
            self._look_again()

    def close(self) -> None:
        """Raise an error in every call that waits here."""
        with self._changed:
            self._failure = self._failure or RuntimeError("the server was closed")
            self._changed.notify_all()

    # Inside, with the lock held ---------------------------------------------------------------------------------

    def _active(self) -> set[int]:
        return set(self._clocks) - self._resting - set(self._brought)

    def _look_again(self) -> None:
        """A worker has come, gone, or rests: a round may be full, and all may rest."""
        if self._round and self._failure is None:
            self._do_or_fail(self.look_at_round)
        if self._resting and set(self._clocks) <= self._resting:
            self._do_or_fail(self._end_rest)
        if self._brought and set(self._clocks) <= set(self._brought):
            self._gathered = packing.to_bytes([[w, data] for w, data in sorted(self._brought.items())])
            self._brought.clear()
            self._gathers += 1
        self._changed.notify_all()

    def _end_rest(self) -> None:
        self.take_written(self._resting)
        line, states = self.fetch()
        self._settled = line, packing.to_bytes([self._buffers[min(self._resting)], states])
        self._unanswered = set(self._resting)
        self._resting.clear()
        self._buffers.clear()
        self._settles += 1

    def _step(self, grads: Grads, settings: Settings, *, share: float) -> None:
        for group, options in zip(self._optimizer.param_groups, settings, strict=True):
            group.update(options)
            if "lr" in group:
                group["lr"] *= share
        for param, grad in zip(self._params, grads, strict=True):
            param.grad = grad
        try:
            self._optimizer.step()
        except Exception as error:
            raise RuntimeError(f"its optimizer failed: {error!r}") from error
        finally:
            self._optimizer.zero_grad(set_to_none=True)
        self.version += 1

    def _do_or_fail(self, do: Callable[[], None]) -> None:
        """What goes wrong here is every worker's to raise: they wait for each other."""
        try:
            do()
        except Exception as error:
            self._failure = self._failure or error
            self._changed.notify_all()

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise RuntimeError(str(self._failure) or repr(self._failure)) from self._failure

    # What programs wrote ----------------------------------------------------------------------------------------

    def note_written(self, worker: int, written: Values) -> None:
        """Take the first worker's now; each of the others has to write the same in its turn."""
        if written:
            turn, mark = self._writes[worker], _mark(written)
            self._writes[worker] += 1
            if turn == len(self._marks):
                self._marks.append(mark)
                self.put_values(written)
            elif self._marks[turn] != mark:
                self._do_or_fail(lambda: refuse_written(written[0][1], [worker], "another worker wrote other values"))
                self._raise_failure()

    def take_written(self, workers: Iterable[int]) -> None:  # noqa: B027 - what counted at once is there
        """All of these rest: take what they wrote, if that did not count at once."""

    @torch.no_grad()
    def put_values(self, written: Values) -> None:
        """Let the parameters be what a program wrote."""
        for i, _, value in written:
            self._params[i].copy_(value)

    def _wait(self, ready: Callable[[], bool]) -> None:
        self._changed.wait_for(lambda: ready() or self._failure is not None)
        if not ready():
            self._raise_failure()


def _mark(written: Values) -> str:
    return digest(value for _, _, value in written) + ",".join(str(i) for i, _, _ in written)


def refuse_written(name: str, workers: Sequence[int], others: str) -> None:
    """Raise the error of workers whose programs wrote different values."""
    raise ValueError(
        f"the program of worker(s) {', '.join(map(str, workers))} wrote to parameter {name!r} since the last step (as "
        f"load_state_dict, clamp_ or p.data = x do), and {others}. The servers hold one model: every rank writes the "
        "same values; what depends on a worker's own values needs staleness=0, under which all have the same"
    )


def optimizer_over(like: Optimizer, params: dict[Tensor, Parameter]) -> Optimizer:
    """An optimizer of the same class and settings over other parameters; those that are not named are left out.

    Its constructor is not called: it does not take all that an optimizer holds.
    """
    made: Optimizer = copy.copy(like)
    for name, value in vars(like).items():  # what a class of the user's own keeps beside its groups
        if name not in vars(made) and not callable(value):
            setattr(made, name, value)
    made.defaults = dict(like.defaults)
    made.state = defaultdict(dict)
    made.param_groups = [
        {**group, "params": [params[p] for p in group["params"] if p in params]} for group in like.param_groups
    ]
    return made


def options_of(optimizer: Optimizer) -> Settings:
    """The options of each group that text can hold: learning rates, momenta, decay."""
    return [
        {name: _plain(value) for name, value in group.items() if name != "params" and _is_plain(_plain(value))}
        for group in optimizer.param_groups
    ]


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, Tensor) and value.numel() == 1 else value


def _is_plain(value: Any) -> bool:
    if isinstance(value, tuple | list):
        return all(_is_plain(one) for one in value)
    return value is None or isinstance(value, bool | int | float | str)
