"""Messages between hosts through torch.distributed's gloo, with our own rings in place of gloo's slow ones.

Gloo's all-reduce is near the bandwidth bound. Its reduce-scatter sends as much as an all-reduce and its
broadcast is an unpipelined tree: here they are a segmented ring and a pipelined chain of sends and receives.
"""

from __future__ import annotations

import struct
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from datetime import timedelta
from functools import wraps
from typing import TYPE_CHECKING, Any, TypeVar
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor

from unisono.world.transports import (
    UNKNOWN,
    CallDescription,
    CallSignature,
    Mismatch,
    Op,
    PeerLost,
    Transport,
    find_group,
    gather_bytes,
)
from unisono.world.transports.arithmetic import NATIVE, combine
from unisono.world.transports.liveness import Liveness

if TYPE_CHECKING:
    from torch.distributed import Store

    from unisono.world.transports.interruption import Interruption

F = TypeVar("F", bound=Callable[..., Any])

SEGMENT = 256 << 10  # bytes a message of a ring carries
_AHEAD = 8  # receives posted before they are needed
SMALL = 64 << 10
_LARGE = 4 << 20  # bytes from which on a mean goes in two parts
_HEAD = 8  # the first is an eighth: on 10 Gbit/s the rest is divided in less time than that takes
_OPS = {
    "sum": dist.ReduceOp.SUM,
    "mean": dist.ReduceOp.SUM,
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
    "product": dist.ReduceOp.PRODUCT,
}
_DIRECT_TAG = 1 << 30  # the tag of `send` and `recv`, apart from those of the rings
TINY = 512  # bytes that go to all ranks at once, as flags and barriers do
_FEW = 8  # ranks up to which they do
_TINY_TAG = _DIRECT_TAG + 1  # and the number of the round: apart from all other tags
_SIGN = 128  # bytes that a rank tells its neighbour before an operation
_PLACE = "\x1f"  # in it, before where the call stands
_ATTEMPTS = 3  # to connect
_PATIENCE_S = 30.0  # for the others to fail as well
_TO_BE_TOLD_S = 1.0  # that the launcher has to say who is lost
_INLINE = 512 - 8  # bytes of an object that travel with its size


def _connect(store: Store, rank: int, size: int, timeout_s: float, interruption: Interruption | None) -> Any:
    """A gloo group of all ranks. Its connections fail now and then for no reason that lasts (about one group in a
    thousand on a busy machine): the ranks tell each other in the store, and all try again."""
    try:
        with nullcontext() if interruption is None else interruption.connecting():
            return _connect_together(store, rank, size, timeout_s)
    except PeerLost:
        raise
    except RuntimeError as error:
        problem = str(error)
        traceback.clear_frames(error.__traceback__)
    if interruption is not None:
        interruption.check()
    raise PeerLost(f"the {size} ranks could not connect: the store in which they meet does not answer ({problem})")


def _connect_together(store: Store, rank: int, size: int, timeout_s: float) -> Any:
    problem = ""
    for attempt in range(_ATTEMPTS):
        fresh = dist.PrefixStore(f"mesh/{attempt}", store)
        try:
            group, mine = dist.ProcessGroupGloo(fresh, rank, size, timedelta(seconds=timeout_s)), 0
        except RuntimeError as error:
            group, mine, problem = None, 1, str(error)
            traceback.clear_frames(error.__traceback__)
        fresh.add("failed", mine)
        if fresh.add("tried", 1) == size:
            fresh.set("outcome", str(fresh.add("failed", 0)))
        try:
            fresh.wait(["outcome"], timedelta(seconds=min(timeout_s, _PATIENCE_S) if mine else timeout_s))
        except RuntimeError as error:
            raise PeerLost(f"not all of the {size} ranks came to connect: {problem or error}") from None
        failed = int(fresh.get("outcome"))
        if not failed:
            return group
        problem = problem or f"rank {rank} could, {failed} other(s) could not"
    raise PeerLost(f"the {size} ranks could not connect in {_ATTEMPTS} attempts: {problem}")


def goes_at_once(nbytes: int, ranks: int) -> bool:
    """Whether so many bytes are all-reduced in one way through the network, from each rank to each."""
    return 0 < nbytes <= TINY and ranks <= _FEW


def _translate_errors(method: F) -> F:
    """Turn a broken connection into `PeerLost`, and let go of the group, so that the other ranks notice too.

    Nothing may keep the group alive: the frames of the error are cleared, and it is no cause or context.
    """

    @wraps(method)
    def run(self: GlooTransport, *args: Any) -> Any:
        try:
            return method(self, *args)
        except (PeerLost, NotImplementedError):
            raise
        except (Mismatch, RuntimeError) as error:
            problem, mismatch = str(error), error if isinstance(error, Mismatch) else None
            calls = mismatch.calls if mismatch is not None else None
            traceback.clear_frames(error.__traceback__)
            del mismatch
        raise self._explain_failure(method.__name__, problem, calls)

    return run  # type: ignore[return-value]


class GlooTransport(Transport):
    """One rank of a gloo group of our own: the default group of torch.distributed is left alone.

    Before an operation each rank tells the next what it is about to do: gloo ends the process when sizes differ.
    """

    name = "messages"

    def __init__(
        self, store: Store, rank: int, size: int, *, timeout_s: float, interruption: Interruption | None = None
    ) -> None:
        """`interruption`: by which another thread ends what this rank waits for."""
        self.rank, self.size = rank, size
        self._store, self.timeout_s, self._interruption = store, timeout_s, interruption
        self._liveness = Liveness(store, rank, size)
        self._gloo: Any = _connect(store, rank, size, timeout_s, interruption)
        self._splits = 0
        self._rounds = 0

    # Collectives -----------------------------------------------------------------------------------------

    @_translate_errors
    def all_reduce(self, parts: Sequence[Tensor], op: Op) -> float:
        x = _join(parts)
        what, sign = "all_reduce", f"{op} of {x.numel()} x {x.dtype}"
        if goes_at_once(x.numel() * x.element_size(), self.size):
            self._at_once(x, op, what, sign)
        else:
            self._agree(what, sign)
            self._reduce(x, op)
        if len(parts) > 1:
            _copy_parts(x, parts)
        return UNKNOWN

    def _reduce(self, x: Tensor, op: Op) -> None:
        if x.numel():
            if op not in _OPS or (op == "product" and x.dtype.is_complex):
                self._narrow(x, op)
            elif x.dtype in NATIVE:
                self._native(x, op)
            elif x.dtype.is_complex:
                self._native(torch.view_as_real(x).view(-1), op)
            elif x.dtype == torch.bool:
                self._native(x.view(torch.uint8), op)
            else:
                self._narrow(x, op)

    def _at_once(self, x: Tensor, op: Op, what: str, sign: str) -> None:
        """Every rank's numbers to every rank: one way through the network, where agreeing and a ring take 2N - 1.

        They carry the sign, as some rank may be the only one that disagrees; it is told to the next rank as well, which
        may be in another operation. Messages have one size, whatever the ranks disagree on.
        """
        mine, theirs, works = self._begin_to_agree(what, sign)
        tag, group, nbytes = _TINY_TAG + self._rounds, self.group, x.numel() * x.element_size()
        came = list(torch.zeros(self.size, _SIGN + TINY, dtype=torch.uint8))
        came[self.rank][:_SIGN] = mine
        came[self.rank][_SIGN : _SIGN + nbytes] = x.view(torch.uint8)
        others = [r for r in range(self.size) if r != self.rank]
        given = [group.recv([came[r]], r, tag) for r in others]
        given += [group.send([came[self.rank]], r, tag) for r in others]
        self._end_to_agree(what, mine, theirs, works)
        for work in given:
            work.wait()
        for r in others:
            self._compare(what, mine, came[r][:_SIGN], r)
        combine([line[_SIGN : _SIGN + nbytes].view(x.dtype) for line in came], op, x)

    def _native(self, x: Tensor, op: Op) -> None:
        """All-reduce by gloo. A mean is divided first, so that nothing overflows: a large one in two parts."""
        first = x.numel() // _HEAD if op == "mean" and x.numel() * x.element_size() >= _LARGE else 0
        works = []
        for part in (x[:first], x[first:]) if first else (x,):
            if op == "mean":
                part.mul_(1.0 / self.size)
            works.append(self.group.allreduce([part], _OPS[op]))
        for work in works:
            work.wait()

    def _narrow(self, x: Tensor, op: Op) -> None:
        """For dtypes that gloo cannot add, or would round at each hop: each rank adds a part, and rounds once."""
        each, more = divmod(x.numel(), self.size)
        counts = [each + (r < more) for r in range(self.size)]
        outs = list(x.split(counts))
        self._direct(x, counts, op, mine := torch.empty_like(outs[self.rank]))
        self._ring(mine, outs)

    def _direct(self, x: Tensor, counts: Sequence[int], op: Op, out: Tensor) -> None:
        """Reduce-scatter without a ring: the same bytes, and one rounding."""
        came = [torch.empty_like(out) for _ in range(self.size)]
        self._swap(x.split(list(counts)), came)
        combine(came, op, out)

    @_translate_errors
    def reduce_scatter(self, x: Tensor, counts: Sequence[int], op: Op, out: Tensor) -> float:
        """A ring: what arrives has come through all ranks before me; I add mine and pass it on."""
        self._agree("reduce_scatter", f"{op} of {x.numel()} x {x.dtype} ({_digest(counts)})")
        if x.dtype not in NATIVE and not x.dtype.is_complex:
            self._direct(x, counts, op, out)
            return UNKNOWN
        chunks = x.split(list(counts))
        room = max(1, SEGMENT // x.element_size())
        order = [(self.rank - s - 1) % self.size for s in range(self.size)]  # order[s]: sent in step s, mine last
        scratch = [torch.empty(max(counts), dtype=x.dtype) for _ in range(min(3, self.size - 2))]
        step_of: list[int] = []
        own: list[Tensor] = []
        came: list[Tensor] = []
        for step, chunk in enumerate(order[1:]):
            target = out if chunk == self.rank else scratch[step % 3][: counts[chunk]]
            own += _cut_pieces(chunks[chunk], room)
            came += _cut_pieces(target, room)
            step_of += [step] * (len(came) - len(step_of))

        def arrived(i: int) -> None:
            combine([came[i], own[i]], "sum" if op == "mean" else op, came[i])
            if step_of[i] < self.size - 2:
                flow.send(came[i])

        flow = _Flow(self, _cut_pieces(chunks[order[0]], room))
        flow.receive(came, arrived)
        flow.finish()
        if op == "mean":
            out.mul_(1.0 / self.size)
        return UNKNOWN

    @_translate_errors
    def all_gather(self, x: Tensor, outs: Sequence[Tensor]) -> float:
        """A ring: each rank passes on what it receives, segment by segment."""
        sizes = [out.numel() for out in outs]
        self._agree("all_gather", f"{sum(sizes)} x {x.dtype} ({_digest(sizes)})")
        self._ring(x, outs)
        return UNKNOWN

    def _ring(self, x: Tensor, outs: Sequence[Tensor]) -> None:
        if self.size == 2:  # nothing to pass on: as a whole it goes faster than in segments
            self._swap([x, x], outs)
            return
        outs[self.rank].copy_(x)
        room = max(1, SEGMENT // x.element_size())
        order = [(self.rank - s) % self.size for s in range(self.size)]  # order[s]: sent in step s; the last is kept
        lists = [_cut_pieces(outs[r], room) for r in order]
        pieces = [piece for pieces in lists[1:] for piece in pieces]
        passed = len(pieces) - len(lists[-1])
        flow = _Flow(self, lists[0])
        flow.receive(pieces, lambda i: flow.send(pieces[i]) if i < passed else None)
        flow.finish()

    @_translate_errors
    def broadcast(self, parts: Sequence[Tensor], src: int) -> float:
        """A chain from `src` on: each rank passes a segment on while the next one comes."""
        parts = [p.view(torch.uint8) for p in parts]
        nbytes = sum(p.numel() for p in parts)
        self._agree("broadcast", f"{nbytes} bytes from rank {src}")
        if not nbytes:
            return UNKNOWN
        if nbytes <= SMALL or self.size == 2:
            x = _join(parts)
            options = dist.BroadcastOptions()
            options.rootRank, options.rootTensor = src, 0
            self.group.broadcast([x], options).wait()
            if len(parts) > 1:
                _copy_parts(x, parts)
            return UNKNOWN
        pieces = [piece for part in parts for piece in _cut_pieces(part, SEGMENT)]
        place = (self.rank - src) % self.size
        flow = _Flow(self, pieces if place == 0 else [])
        if place > 0:
            last = place == self.size - 1
            flow.receive(pieces, lambda i: None if last else flow.send(pieces[i]))
        flow.finish()
        return UNKNOWN

    @_translate_errors
    def all_to_all(self, parts: Sequence[Tensor], outs: Sequence[Tensor]) -> float:
        self._agree("all_to_all", str(parts[0].dtype))
        self._compare_sizes(parts, outs)
        self._swap(parts, outs)
        return UNKNOWN

    def _compare_sizes(self, parts: Sequence[Tensor], outs: Sequence[Tensor]) -> None:
        """Whether each rank expects what I send it, and sends what I expect."""
        mine = [torch.tensor([part.numel(), out.numel()]) for part, out in zip(parts, outs, strict=True)]
        theirs = [torch.empty_like(pair) for pair in mine]
        self._swap(mine, theirs)
        for r, (here, there) in enumerate(zip(mine, theirs, strict=True)):
            (sent, expected), (comes, awaited) = here.tolist(), there.tolist()
            for source, n, target, m in ((self.rank, sent, r, awaited), (r, comes, self.rank, expected)):
                if n != m:
                    raise Mismatch(
                        f"all_to_all: the ranks disagree; rank {source} sends {n} elements to rank {target}, which "
                        f"expects {m}"
                    )

    def _swap(self, parts: Sequence[Tensor], outs: Sequence[Tensor]) -> None:
        outs[self.rank].copy_(parts[self.rank])
        tag, group = self.next_round(), self.group
        works = []
        for distance in range(1, self.size):
            source, target = (self.rank - distance) % self.size, (self.rank + distance) % self.size
            if outs[source].numel():
                works.append(group.recv([outs[source]], source, tag))
            if parts[target].numel():
                works.append(group.send([parts[target]], target, tag))
        for work in works:
            work.wait()

    @_translate_errors
    def send(self, x: Tensor, dst: int) -> None:
        sign = _encode(f"{x.numel()} x {x.dtype}")
        sending = self.group.send([sign], dst, _DIRECT_TAG)
        if x.numel():
            self.group.send([x], dst, _DIRECT_TAG).wait()
        sending.wait()

    @_translate_errors
    def recv(self, x: Tensor, src: int) -> None:
        sign = torch.empty(_SIGN, dtype=torch.uint8)
        self.group.recv([sign], src, _DIRECT_TAG).wait()
        mine = _encode(f"{x.numel()} x {x.dtype}")
        if not sign.equal(mine):
            raise Mismatch(f"recv from rank {src}: it sent {_decode(sign)}, I receive into {_decode(mine)}")
        if x.numel():
            self.group.recv([x], src, _DIRECT_TAG).wait()

    @_translate_errors
    def exchange(self, data: bytes) -> list[bytes]:
        """Every rank's size and first bytes in one round; the rest, if there is any, in another."""
        self._agree("exchange", "of objects or shapes")
        mine = torch.zeros(8 + _INLINE, dtype=torch.uint8)
        head = bytearray(struct.pack("q", len(data)) + data[:_INLINE])
        mine[: len(head)] = torch.frombuffer(head, dtype=torch.uint8)
        found = [torch.empty_like(mine) for _ in range(self.size)]
        self.group.allgather([found], [mine]).wait()
        texts = [each.numpy().tobytes() for each in found]
        sizes = [struct.unpack_from("q", text)[0] for text in texts]
        if max(sizes) <= _INLINE:
            return [text[8 : 8 + n] for text, n in zip(texts, sizes, strict=True)]
        return gather_bytes(data, sizes, self._ring)

    def split(self, groups: Sequence[Sequence[int]]) -> Transport:
        mine = find_group(groups, self.rank, self.size)
        self._splits += 1
        name = f"{self._splits}/{'-'.join(map(str, mine))}"
        store = dist.PrefixStore(name, self._store)
        return GlooTransport(
            store, mine.index(self.rank), len(mine), timeout_s=self.timeout_s, interruption=self._interruption
        )

    def exchange_descriptions(self) -> list[CallDescription]:
        return self._liveness.exchange_descriptions(self.signature.description) if self.signature is not None else []

    def set_timeout(self, seconds: float) -> None:
        self.timeout_s = seconds
        self.group._set_default_timeout(timedelta(seconds=seconds))

    def abandon(self, why: Exception) -> None:
        self._liveness.report(why)
        self._gloo = None

    def close(self) -> None:
        self._gloo = None

    # Inside ----------------------------------------------------------------------------------------------

    @property
    def group(self) -> Any:
        """The gloo group, unless it was lost."""
        if self._gloo is None:
            raise PeerLost("the connections of this world were closed, or lost before")
        return self._gloo

    def next_round(self) -> int:
        """A tag for the messages of one operation, the same on every rank."""
        self._rounds = (self._rounds + 1) % 4096
        return self._rounds << 18

    def _agree(self, what: str, sign: str) -> None:
        """Tell the next rank what I am about to do, and hear it from the previous one."""
        self._end_to_agree(what, *self._begin_to_agree(what, sign))

    def _begin_to_agree(self, what: str, sign: str) -> tuple[Tensor, Tensor, list[Any]]:
        """My sign, the memory for the previous rank's, and the messages that are under way."""
        mine = _encode(f"{what} {sign}" + (f" as collective {self.sequence}" if self.sequence else ""), self.signature)
        theirs = torch.empty(_SIGN, dtype=torch.uint8)
        tag = self.next_round()
        receiving = self.group.recv([theirs], (self.rank - 1) % self.size, tag)
        return mine, theirs, [receiving, self.group.send([mine], (self.rank + 1) % self.size, tag)]

    def _end_to_agree(self, what: str, mine: Tensor, theirs: Tensor, works: list[Any]) -> None:
        for work in works:
            work.wait()
        self._compare(what, mine, theirs, (self.rank - 1) % self.size)

    def _compare(self, what: str, mine: Tensor, theirs: Tensor, rank: int) -> None:
        if theirs.equal(mine):
            if self.signature is not None:
                self.signature.check_places([self.signature.where], list)
            return
        (here, my_call), (there, their_call) = _split_sign(mine, self.rank), _split_sign(theirs, rank)
        calls = [call for call in (my_call, their_call) if call.what]
        if here != there or (len(calls) == 2 and my_call.what != their_call.what):
            both = " and ".join(f"rank {call.rank} has {call.text}" for call in (their_call, my_call))
            raise Mismatch(f"{what}: the ranks disagree; {both}", calls=calls)
        if self.signature is not None:
            self.signature.check_places([call.where for call in (my_call, their_call)], lambda: calls)

    def _explain_failure(self, what: str, problem: str, calls: Sequence[CallDescription] | None) -> Exception:
        """What to raise: my own finding, another rank's, or who is missing. The others learn it, or see me leave.

        `calls`: of ranks that disagree; None where they do not.
        """
        if calls is not None:
            self.abandon(found := Mismatch(problem, calls=calls))
            found.calls = tuple(self.exchange_descriptions()) or found.calls
            return found
        self._gloo = None
        if self._interruption is not None and self._interruption.has_ended(_TO_BE_TOLD_S):
            return PeerLost(f"{self._interruption.why}; waited for it in {what}")
        if (report := self._liveness.read_report()) is not None:
            if isinstance(report, Mismatch):
                report.calls = tuple(self.exchange_descriptions()) or report.calls
            return report
        missing, is_certain = self._liveness.describe_missing()
        if is_certain:
            return PeerLost(f"{missing}; waited for it in {what}")
        return PeerLost(f"{what}: {missing} ({problem.split('. This is typically')[0]})")


class _Flow:
    """The messages of one ring or chain: to the next rank and from the previous one, in order.

    Receives are posted ahead, so that a message finds its place ready. If memory is used again (`receive`
    of a piece that was sent before), what was sent from it must have left.
    """

    def __init__(self, transport: GlooTransport, first: Sequence[Tensor]) -> None:
        self._transport = transport
        self._tag = transport.next_round()
        self._next = (transport.rank + 1) % transport.size
        self._previous = (transport.rank - 1) % transport.size
        self._sent = 0
        self._sending: dict[int, Any] = {}  # by address; dicts keep order
        for piece in first:
            self.send(piece)

    def send(self, piece: Tensor) -> None:
        self._sending[piece.data_ptr()] = (
            self._transport.group.send([piece], self._next, self._tag + self._sent),
            piece,
        )
        self._sent += 1

    def receive(self, pieces: Sequence[Tensor], arrived: Callable[[int], None]) -> None:
        """Receive `pieces` in order, some ahead, and call `arrived(i)` after each."""
        posted: deque[Any] = deque()
        for i in range(len(pieces)):
            for k in range(i + len(posted), min(i + _AHEAD, len(pieces))):
                if any(pieces[k].data_ptr() == pieces[j].data_ptr() for j in range(i, k)):
                    break  # it is still to arrive there, and to be sent on
                leaving = self._sending.pop(pieces[k].data_ptr(), None)
                if leaving is not None:
                    leaving[0].wait()
                posted.append(self._transport.group.recv([pieces[k]], self._previous, self._tag + k))
            posted.popleft().wait()
            arrived(i)

    def finish(self) -> None:
        """Wait until all that was sent has left."""
        for work, _ in self._sending.values():
            work.wait()
        self._sending.clear()


def _cut_pieces(x: Tensor, room: int) -> list[Tensor]:
    return list(x.split(room)) if x.numel() else []


def _join(parts: Sequence[Tensor]) -> Tensor:
    if len(parts) == 1:
        return parts[0]
    return torch.cat([p.view(torch.uint8) for p in parts]).view(parts[0].dtype)


def _copy_parts(x: Tensor, parts: Sequence[Tensor]) -> None:
    for part, done in zip(parts, x.split([p.numel() for p in parts]), strict=True):
        part.copy_(done)


def _encode(text: str, signature: CallSignature | None = None) -> Tensor:
    """A sign of `_SIGN` bytes: the signature's numbers, the text, and as much as fits of where the call stands."""
    if signature is not None:
        call = signature.description
        numbers = f"{call.what:08x}{call.where:08x}{call.rank:06x}"
        text = f"{numbers}{text}{_PLACE}{call.place} {call.text.rpartition(', ')[2]}"
    return torch.frombuffer(bytearray(text.encode()[:_SIGN].ljust(_SIGN)), dtype=torch.uint8)


def _split_sign(sign: Tensor, rank: int) -> tuple[str, CallDescription]:
    """What a sign says of the operation, and the call of its rank."""
    text, _, place = _decode(sign).partition(_PLACE)
    if not place:  # without a signature
        return text, CallDescription(rank, 0, 0, text, "")
    what, where, rank = (int(text[i:j], 16) for i, j in ((0, 8), (8, 16), (16, 22)))
    text, line = text[22:], place.partition(" ")[0]
    return text, CallDescription(rank, what, where, f"{text} at {place}" if line else f"{text},{place}", line)


def _decode(sign: Tensor) -> str:
    return sign.numpy().tobytes().decode("utf-8", "replace").strip()


def _digest(counts: Sequence[int]) -> str:
    """A short text that differs between lists of sizes."""
    return f"{crc32(str(list(counts)).encode()):08x}"
