"""Between workers and servers: what is asked and answered, over one world of two for each pair.

A request is a head of numbers and, where the head says so, settings and a line of bytes; so is an answer. A worker
asks from its own thread; at the server a thread for each worker takes its requests in turn: a worker that has to
wait, or has died, holds up nobody else.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from unisono import packing
from unisono.background import Handle, SerialQueue
from unisono.methods.buckets import FlatLayout
from unisono.methods.kernels.noise import noise
from unisono.methods.reducer import Codec
from unisono.methods.strategies._serving.server import Answer, Grads, Server, Settings, Values
from unisono.world import PeerLost, World
from unisono.world.ledger import Record

PUSH, TICK, SETTLE, FETCH, PUT, LEAVE, GATHER = range(1, 8)
Settled = tuple[list[Tensor], bytes, list[dict[str, Any]]]  # parameters, buffers, states of the optimizer
_WORKER, _SERVER = 0, 1  # ranks in the world of a pair


class Coder:
    """Gradients as bytes by a codec; with `feedback`, what did not get through is added to the next ones."""

    def __init__(self, codec: Codec, like: Iterable[Tensor], *, feedback: bool, seed: tuple[int, int]) -> None:
        """`like`: tensors of the gradients' shapes. `seed`: the worker and the server, so that each pair draws its own
        random numbers."""
        self.codec, self.seed = codec, seed
        self.counts = [x.numel() for x in like]
        self.residual = torch.zeros(sum(self.counts), dtype=torch.float32) if feedback else None
        self.rates: list[float] = []  # that the residual was met with

    def encode(self, grads: Grads, step: int, rates: list[float]) -> Tensor:
        """The code of gradients (None: zeros); `rates` are their learning rates now."""
        line = torch.zeros(sum(self.counts), dtype=torch.float32)
        for part, grad in zip(line.split(self.counts), grads, strict=True):
            if grad is not None:
                part.copy_(grad.reshape(-1))
        if self.residual is not None:  # what was kept counts at the learning rate that it was met with
            for part, old, new in zip(self.residual.split(self.counts), self.rates, rates, strict=False):
                if old > 0 and new > 0 and old != new:
                    part.mul_(old / new)
            self.rates = rates
            line += self.residual
        code = self.codec.encode(line, noise(0, step, *self.seed))
        if self.residual is not None and bool(torch.isfinite(line).all()):
            self.residual = line - self.codec.decode(code, line.numel())
        return code

    def decode(self, code: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
        """Decode gradients, into tensors of the shapes and dtypes of `like`."""
        parts = self.codec.decode(code, sum(self.counts)).split(self.counts)
        return [part.view(x.shape).to(x.dtype) for part, x in zip(parts, like, strict=True)]


class LocalLink:
    """A worker's link to the server in its own process."""

    is_lost = False

    def __init__(self, server: Server, worker: int, targets: Sequence[Tensor], coder: Coder | None) -> None:
        self.server, self.worker, self.targets, self.coder = server, worker, targets, coder
        # What the targets were made.
        self.pulled = server.values if server.stands_still else server.layout.views(torch.zeros_like(server.line))
        self.note_pulled()
        self._given: tuple[Grads | None, Settings | None, Values] = (None, None, [])

    def push(self, grads: Grads | None, settings: Settings | None, code: Tensor | None, written: Values) -> None:
        """Begin a window's push; `pull` ends it. `written`: what the program wrote to parameters."""
        if code is not None and grads is not None and self.coder is not None:
            found = self.coder.decode(code, self.targets)
            grads = [None if g is None else f for g, f in zip(grads, found, strict=True)]
        elif grads is not None:
            grads = [None if g is None else g.detach().cpu() for g in grads]
        self._given = grads, settings, written

    def pull(self) -> Answer:
        """Wait until this worker may go on, and copy the server's parameters into its own."""
        answer = self.server.push(self.worker, *self._given)
        self._given = (None, None, [])
        if self.pulled is not self.server.values:
            self.server.read(self.worker, self.pulled)
        _copy_trainable(self.pulled, self.targets)
        return answer

    def note_pulled(self) -> None:
        """Note that the targets now hold what the server holds."""
        if self.pulled is not self.server.values:
            _copy_all(self.targets, self.pulled)

    def settle(self, buffers: bytes, written: Values) -> Settled:
        line, rest = self.server.settle(self.worker, buffers, written)
        return self.server.layout.views(line), *packing.from_bytes(rest)

    def gather(self, data: bytes) -> bytes:
        return self.server.gather(self.worker, data)

    def fetch(self) -> tuple[list[Tensor], list[dict[str, Any]]]:
        line, states = self.server.fetch()
        return self.server.layout.views(line), states

    def put(self, params: Sequence[Tensor], states: Sequence[dict[str, Any]]) -> None:
        self.server.put(params, states)

    def wait_until_all_settled(self) -> None:
        """A rank that serves goes on when all workers have their answers."""
        self.server.confirm_settled(self.worker, wait=True)

    def disconnect(self) -> None:
        """Tell the server that this worker has left."""
        self.server.leave(self.worker)

    def close(self) -> None:
        """No-op: there is no connection."""


class RemoteLink:
    """A worker's link to a server in another process."""

    def __init__(self, pair: World, rank: int, workers: int, targets: Sequence[Tensor], coder: Coder | None) -> None:
        """`rank`: the server's rank in the world of all workers."""
        self.pair, self.rank, self.targets, self.coder = pair, rank, targets, coder
        self.layout = FlatLayout(targets, torch.uint8, contiguous=True)
        self._line = torch.zeros(self.layout.numel, dtype=torch.uint8)
        self._views = self.pulled = self.layout.views(self._line)  # from pull to push: what the targets were made
        self.note_pulled()
        self._head = torch.zeros(4 + workers, dtype=torch.int64)
        self._answers = 0
        self._owed = 0  # answers that are still to come
        self.is_lost = False  # the server is gone, and the program has heard of it

    def push(self, grads: Grads | None, settings: Settings | None, code: Tensor | None, written: Values) -> None:
        text = packing.to_bytes([settings, written]) if settings is not None or written else b""
        if grads is None:
            self._ask(TICK, text)
            return
        if code is None:
            for view, grad in zip(self._views, grads, strict=True):
                view.zero_() if grad is None else view.copy_(grad)
        self._ask(PUSH, text, self._line if code is None else code, [g is not None for g in grads])

    def pull(self) -> Answer:
        head, _ = self._answer(self._line)
        _copy_trainable(self.pulled, self.targets)
        return Answer(head[2], head[3], head[4:])

    def note_pulled(self) -> None:
        _copy_all(self.targets, self.pulled)

    def settle(self, buffers: bytes, written: Values) -> Settled:
        self._ask(SETTLE, packing.to_bytes([buffers, written]))
        line = self._answer(torch.empty_like(self._line))[1]
        return self.layout.views(line), *packing.from_bytes(_bytes(self._answer()[1]))

    def gather(self, data: bytes) -> bytes:
        self._ask(GATHER, data)
        return _bytes(self._answer()[1])

    def fetch(self) -> tuple[list[Tensor], list[dict[str, Any]]]:
        self._ask(FETCH)
        line, states = packing.from_bytes(_bytes(self._answer()[1]))
        return self.layout.views(line), states

    def put(self, params: Sequence[Tensor], states: Sequence[dict[str, Any]]) -> None:
        self._ask(PUT, packing.to_bytes([[p.detach() for p in params], list(states)]))
        self._answer()

    def wait_until_all_settled(self) -> None:
        """No-op: the server itself waits until all have their answers."""

    def close(self) -> None:
        """Close the world of worker and server."""
        self.pair.close()

    def disconnect(self) -> None:
        with suppress(PeerLost, RuntimeError, ValueError):  # it may be gone as well
            if not self._owed:
                self._ask(LEAVE)
            elif self.pair.transport is not None:  # it is still at my last request, and would not hear me
                self.pair.transport.abandon(PeerLost("the worker left before it was answered"))
                self.pair.close()

    def _ask(self, kind: int, text: bytes = b"", line: Tensor | None = None, there: Sequence[bool] = ()) -> None:
        if self.is_lost:  # what it sent in its last moments would pass for the answer
            raise self._lost(PeerLost("it was lost before"))
        flags = [int(x) for x in there] or [0] * len(self.targets)
        head = torch.tensor([kind, len(text), 0 if line is None else line.numel(), *flags])
        self._owed = {LEAVE: 0, SETTLE: 2}.get(kind, 1)
        try:
            self.pair.send(head, _SERVER, tag="ask").wait()
            if text:
                self.pair.send(_line_of(text), _SERVER, tag="ask").wait()
            if line is not None:
                self.pair.send(line, _SERVER, tag="push").wait()
        except PeerLost as error:
            raise self._lost(error) from error

    def _answer(self, line: Tensor | None = None) -> tuple[list[int], Tensor]:
        try:
            self._await_head()
            head: list[int] = self._head.tolist()
            if line is None or head[0]:
                line = torch.empty(head[1], dtype=torch.uint8)
            if head[1]:
                self.pair.recv(line, _SERVER, tag="pull").wait()
        except PeerLost as error:
            raise self._lost(error) from error
        self._owed = 0 if head[0] else self._owed - 1
        if head[0]:
            raise RuntimeError(f"the parameter server on rank {self.rank} could not continue: {_bytes(line).decode()}")
        return head, line

    def _await_head(self) -> None:
        """Until the server answers, I am waiting for others, and nothing moves: so the ledger counts it."""
        ledger = self.pair.ledger
        began = ledger.clock()
        assert self.pair.transport is not None
        self.pair.transport.recv(self._head, _SERVER)
        ended = ledger.clock()
        record = Record("recv", "answer", 0, f"{self.pair.name}:answers", self._answers)
        record.start, record.last, record.end = began, ended, ended
        self._answers += 1
        ledger.close_record(record)
        ledger.close_span("blocked", began, ended)

    def _lost(self, error: PeerLost) -> PeerLost:
        self.is_lost = True
        return PeerLost(
            f"the parameter server on rank {self.rank} is gone, and its part of the parameters with it: start the "
            f"run again from its last checkpoint (in the world of the two of us, where it is rank 1: {error})"
        )


class RequestLoop:
    """Where a server takes one worker's requests, in a thread of its own."""

    def __init__(self, server: Server, pair: World, worker: int, like: Sequence[Tensor], coder: Coder | None) -> None:
        self.server, self.pair, self.worker, self.coder = server, pair, worker, coder
        self._head = torch.zeros(3 + len(like), dtype=torch.int64)
        self._line, self._copy = torch.zeros_like(server.line), torch.zeros_like(server.line)
        self._views = server.layout.views(self._line)
        self._copies = server.layout.views(self._copy)
        self._closing = False
        self._lane = SerialQueue(f"unisono server for worker {worker}")
        self._ended: Handle[None] = self._lane.submit(self._run)

    def wait(self) -> None:
        """Return when the worker has left."""
        self._ended.wait()
        self._lane.close()

    def close(self) -> None:
        """Stop serving, though the worker has not left."""
        self._closing = True
        self.server.close()
        self.pair.close()
        self._lane.close(1.0)

    def _run(self) -> None:
        try:
            while self._serve():
                pass
        except (PeerLost, RuntimeError, ValueError) as error:  # it died, or this end was closed under me
            if not self._closing:
                self.pair.ledger.event("worker lost", worker=self.worker, why=str(error) or repr(error))
        finally:
            self.server.leave(self.worker)

    def _serve(self) -> bool:
        """Serve one request; returns False once the worker has left."""
        assert self.pair.transport is not None
        self.pair.transport.recv(self._head, _WORKER)  # not in the ledger: an idle server moves nothing
        kind, text_bytes, line_bytes, *there = self._head.tolist()
        if kind == LEAVE:
            return False
        text = torch.empty(text_bytes, dtype=torch.uint8)
        if text_bytes:
            self.pair.recv(text, _WORKER, tag="ask").wait()
        code = self._line if self.coder is None else torch.empty(line_bytes, dtype=torch.uint8)
        if line_bytes:
            self.pair.recv(code, _WORKER, tag="push").wait()
        try:
            self._do(kind, _bytes(text), code, there)
        except PeerLost:
            raise
        except Exception as error:  # what goes wrong here is the worker's to raise
            self._send(_line_of((str(error) or repr(error)).encode()), wrong=True)
        return True

    def _do(self, kind: int, text: bytes, code: Tensor, there: Sequence[int]) -> None:
        if kind in (PUSH, TICK):
            grads: Grads | None = None
            if kind == PUSH:
                found = self._views if self.coder is None else self.coder.decode(code, self._views)
                grads = [g if is_there else None for g, is_there in zip(found, there, strict=True)]
            answer = self.server.push(self.worker, grads, *(packing.from_bytes(text) if text else ()))
            self.server.read(self.worker, self._copies)
            self._send(self._copy, answer)
        elif kind == SETTLE:
            line, rest = self.server.settle(self.worker, *packing.from_bytes(text))
            self._send(line)
            self._send(_line_of(rest))
            self.server.confirm_settled(self.worker)
        elif kind == FETCH:
            self._send(_line_of(packing.to_bytes(list(self.server.fetch()))))
        elif kind == GATHER:
            self._send(_line_of(self.server.gather(self.worker, text)))
        elif kind == PUT:
            self.server.put(*packing.from_bytes(text))
            self._send(torch.empty(0, dtype=torch.uint8))

    def _send(self, line: Tensor, answer: Answer | None = None, *, wrong: bool = False) -> None:
        ahead, missed, clocks = answer or Answer(0, 0, [0] * self.server.workers)
        head = [int(wrong), line.numel(), ahead, missed, *clocks]
        self.pair.send(torch.tensor(head), _WORKER, tag="answer").wait()
        if line.numel():
            self.pair.send(line, _WORKER, tag="pull").wait()


def _copy_all(values: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
    for value, target in zip(values, targets, strict=True):
        target.copy_(value.detach())


def _copy_trainable(values: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
    """Frozen parameters are the worker's own: its program may move them (a teacher)."""
    for value, target in zip(values, targets, strict=True):
        if target.requires_grad:
            target.copy_(value)


def _line_of(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)


def _bytes(line: Tensor) -> bytes:
    return line.numpy().tobytes()
