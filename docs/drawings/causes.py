"""What a method really does, without times: a small model is trained by threads, and everything is noted that a rank's
program begins and waits for, in its order.

The order between ranks is left open, as it depends on the machine; what is the cause of what does not.
"""

from __future__ import annotations

import re
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor, nn

import unisono as un
from unisono.background import Handle, SerialQueue, watched_by
from unisono.world.operations import Operations

RANKS = 4
WIDTHS = (64, 64, 8)  # of the layers: 4,680 parameters
LEFT_OUT = ("stragglers", "stragglers: links", "parameters")  # these follow the clock


class Atom(NamedTuple):
    """One thing that a program does: `work` (of a kind, for a width), `begin` or `wait` (for a message), `spawn` or
    `join` (a job behind the program)."""

    what: str
    about: Any
    width: float = 0.0


@dataclass
class Message:
    """A collective, or what one rank sends to another."""

    op: str
    tag: str
    ranks: tuple[int, ...]  # who takes part; of two, the first sends
    order: str  # messages of one order follow each other
    how: str  # of an all-reduce: sum, mean, max
    sent: dict[int, int] = field(default_factory=dict)  # bytes, by rank


@dataclass
class Causes:
    """All of a run: each rank's program and the jobs behind it, and what they exchange."""

    atoms: dict[Any, list[Atom]] = field(default_factory=lambda: defaultdict(list))  # by rank, or (rank, job)
    messages: dict[Any, Message] = field(default_factory=dict)
    notes: list[Any] = field(default_factory=list)  # what the ranks' programs give


class _Here(threading.local):
    lane: Any = None  # whose atoms this thread's are
    queue: Any = None  # that a job is handed over to


_here = _Here()


class _Watch:
    """Follows the jobs of one rank's queues."""

    def __init__(self, causes: Causes, rank: int) -> None:
        self._causes, self._rank, self._jobs, self._lock = causes, rank, 0, threading.Lock()
        self._last: dict[Any, int] = {}  # job, by queue

    def submit(self, *, moves: bool) -> int:
        if moves:  # the message itself is noted
            return -1
        with self._lock:
            self._jobs += 1
            number = self._jobs
            if _here.queue in self._last:  # jobs of a queue run one after the other
                before = Atom("join", (self._rank, self._last[_here.queue]))
                self._causes.atoms[self._rank, number].append(before)
            self._last[_here.queue] = number
        _note(self._causes, Atom("spawn", (self._rank, number)))
        return number

    @contextmanager
    def run(self, job: int) -> Iterator[None]:
        before, _here.lane = _here.lane, (self._rank, job) if job > 0 else _here.lane
        try:
            yield
        finally:
            _here.lane = before

    @contextmanager
    def wait(self, job: int) -> Iterator[None]:
        if job > 0:
            _note(self._causes, Atom("join", (self._rank, job)))
        yield


def _note(causes: Causes, atom: Atom) -> None:
    if _here.lane is not None:
        causes.atoms[_here.lane].append(atom)


def _find_ranks(channel: str) -> list[int]:
    """The ranks of a world by its name: `world/1[2,3]/1[0,1]` has the second two ranks."""
    ranks = list(range(RANKS))
    for group in re.findall(r"\[([\d,]+)\]", channel):
        ranks = [ranks[int(one)] for one in group.split(",")]
    return ranks


@contextmanager
def _noted_messages(causes: Causes) -> Iterator[None]:
    """Every operation of every world is noted where it begins and where it is waited for."""
    run, submit, lock = Operations.run, SerialQueue.submit, threading.Lock()

    def submit_noted(self: SerialQueue, *args: Any, **kwargs: Any) -> Handle[Any]:
        _here.queue = self
        return submit(self, *args, **kwargs)

    def noted(self: Operations, record: Any, like: Any, work: Any, queue: str = "main") -> Handle[Any]:
        if record.tag in LEFT_OUT or _here.lane is None:
            return run(self, record, like, work, queue)
        world, _, side = record.channel.partition(":")
        ranks, me = _find_ranks(world), self.base.rank
        if side:
            kind, _, other = side.partition("-")
            pair = (me, int(other)) if kind == "send" else (int(other), me)
            ranks = [ranks[one] for one in pair]
            key: Any = (world, *ranks, record.sequence)
        else:
            key = (world, record.sequence)
        if record.op != "recv":
            with lock:
                how = record.signature.describe().split()[1] if record.op == "all_reduce" else ""
                new = Message(record.op, record.tag, tuple(ranks), str(key[:-1]), how)
                causes.messages.setdefault(key, new).sent[_find_ranks(world)[me]] = record.bytes_sent
            _note(causes, Atom("begin", key))
        handle = run(self, record, like, work, queue)
        if record.op == "send":  # who sends goes on
            return handle
        if self.inline:
            _note(causes, Atom("wait", key))
            return handle

        def wait() -> Any:
            _note(causes, Atom("wait", key))
            return handle.wait()

        return Handle(wait, handle.done)

    with patch.object(Operations, "run", noted), patch.object(SerialQueue, "submit", submit_noted):
        yield


@dataclass(frozen=True)
class Course:
    """How a model is trained for a drawing: `windows` are drawn, after `skip` others and before more `until` all that
    goes on behind the program was seen."""

    spec: str
    windows: int = 2
    skip: int = 0
    optimizer: str = "SGD"
    hosts: Sequence[str] = ("a", "b", "c", "d")
    until: Callable[[Any], bool] = lambda replica: True
    widths: Sequence[int] = WIDTHS

    def make_model(self) -> nn.Module:
        """Layers with Tanh between them."""
        layers: list[nn.Module] = []
        for before, after in zip(self.widths, self.widths[1:], strict=False):
            layers += [nn.Linear(before, after), nn.Tanh()]
        return nn.Sequential(*layers[:-1])


def watch(course: Course) -> Causes:
    """Train, and give what was done in the windows to draw."""
    causes = Causes()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with _noted_messages(causes):
            causes.notes = un.run_threads(lambda world: _train(world, course, causes), RANKS, hosts=course.hosts)
    finally:
        torch.set_num_threads(threads)
    return causes


def _train(world: un.World, course: Course, causes: Causes) -> dict[str, Any]:
    """One rank's program; gives what else is worth knowing of it."""
    torch.manual_seed(0)
    model = course.make_model()
    optimizer: torch.optim.Optimizer = getattr(torch.optim, course.optimizer)(model.parameters(), lr=0.01)
    _follow_compute(causes, model)
    with watched_by(_Watch(causes, world.rank)):
        try:
            replica = un.parallel(model, optimizer, course.spec)
        except SystemExit:  # a server, whose work is done
            return {}
        optimizer.register_step_pre_hook(lambda *_: _note(causes, Atom("work", "step", 1.0)))
        for window in range(course.skip + course.windows):
            if window == course.skip:
                world.barrier()
                _here.lane = world.rank
            _note(causes, Atom("window", window))
            _train_window(model, optimizer, 100 * window + world.rank)
        _here.lane = None
        while not course.until(replica):
            _train_window(model, optimizer, world.rank)
        events = [dict(event.values, kind=event.kind) for event in world.ledger.events]
        noted = {"places": [p.data_ptr() for p in model.parameters()], "events": events}
        world.barrier()  # no rank leaves while another goes on
        replica.close()
    return noted


def _train_window(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
    batch = torch.randn(4, WIDTHS[0], generator=torch.Generator().manual_seed(seed))
    optimizer.zero_grad()
    model(batch).square().mean().backward()
    optimizer.step()


def _follow_compute(causes: Causes, model: nn.Module) -> None:
    """Forward in parts, by module; backward in parts, by gradient."""
    layers = [module for module in model.modules() if isinstance(module, nn.Linear)]
    for layer in layers:
        layer.register_forward_hook(lambda *_: _note(causes, Atom("work", "forward", 1 / len(layers))))
    parameters = list(model.parameters())

    def note_gradient(_: Tensor) -> None:
        _note(causes, Atom("work", "backward", 1 / len(parameters)))

    for parameter in parameters:
        parameter.register_post_accumulate_grad_hook(note_gradient)
