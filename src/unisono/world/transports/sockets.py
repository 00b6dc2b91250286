"""Messages between hosts over connections of our own: each proven, each made again if it breaks.

Small operations send every rank's numbers to every rank at once, each with a sign that says what the rank is about to
do. Larger ones tell the sign to the next rank, and move their bytes in rings and chains, piece by piece, over several
connections if there are cores for that.
"""

from __future__ import annotations

import struct
import traceback
from collections.abc import Callable, Sequence
from functools import partial, wraps
from typing import TYPE_CHECKING, Any, TypeVar
from zlib import crc32

import torch
from torch import Tensor

from unisono.background import in_background
from unisono.world.transports import (
    DTYPE_CODES,
    DTYPES,
    SMALL_BYTES,
    UNKNOWN,
    CallDescription,
    CallSignature,
    Mismatch,
    Op,
    PeerLost,
    Transport,
    find_group,
)
from unisono.world.transports.arithmetic import combine, count_bytes
from unisono.world.transports.flows import Copy, Flow, Helpers, Piece, as_bytes
from unisono.world.transports.liveness import Liveness
from unisono.world.transports.mailbox import Key, Mailbox
from unisono.world.transports.rings import IN_RINGS, Rings, cut_evenly
from unisono.world.transports.signs import ALIGNED, Sign, make_sign, open_message
from unisono.world.transports.socket_links import Links, meet, meet_again
from unisono.world.transports.stage import copy_to_parts, join_parts
from unisono.world.transports.streams import LinkLost, Patience

if TYPE_CHECKING:
    from torch.distributed import Store

    from unisono.world.transports.interruption import Interruption

F = TypeVar("F", bound=Callable[..., Any])

SMALL = 256 << 10  # bytes up to which an operation goes from each rank to each, in one round or two
INLINE = 64 << 10  # bytes of an object that travel with its size
_MESSAGE = struct.Struct("<qqi")  # label, elements, dtype
_LOOK_S = 100e-6  # that a rank looks for what comes next before it sleeps
_TO_BE_TOLD_S = 1.0  # that the launcher has to say who is lost


def goes_at_once(nbytes: int) -> bool:
    """Whether so many bytes are all-reduced in one way through the network, from each rank to each."""
    return 0 < nbytes <= SMALL_BYTES


def _translate_errors(method: F) -> F:
    """Turn a lost connection into `PeerLost`, and close the others, so that the other ranks notice too."""

    @wraps(method)
    def run(self: SocketTransport, *args: Any) -> Any:
        try:
            return method(self, *args)
        except PeerLost:
            raise
        except (Mismatch, OSError) as error:
            problem, calls = str(error), error.calls if isinstance(error, Mismatch) else None
            traceback.clear_frames(error.__traceback__)
        if args and isinstance(args[0], Sign):  # begun earlier than what has run since
            self.signature = args[0].signature
        raise self._explain_failure(method.__name__, problem, calls)

    return run  # type: ignore[return-value]


class SocketTransport(Transport):
    """One rank of several that reach each other by TCP."""

    name = "messages"
    takes_parts = True

    def __init__(
        self,
        store: Store,
        rank: int,
        size: int,
        *,
        timeout_s: float,
        interruption: Interruption | None = None,
        links: Links | None = None,
    ) -> None:
        """`interruption`: by which another thread ends what this rank waits for. `links`: of a group that was split off
        another; the ranks meet in `store` otherwise."""
        self.rank, self.size, self.timeout_s = rank, size, timeout_s
        self._store, self._interruption = store, interruption
        self._liveness = Liveness(store, rank, size)
        self._links = meet(store, rank, size, timeout_s=timeout_s) if links is None else links
        if interruption is not None:
            interruption.tell(self._links.end)
        self._mail = Mailbox(
            lambda to: self._links.open_out(to, "mail"), lambda source: self._links.open_in(source, "mail")
        )
        self._rings = Rings(self._links)
        self._helpers = Helpers()
        self._others = [r for r in range(size) if r != rank]
        self._next, self._previous = (rank + 1) % size, (rank - 1) % size
        self._part = 0  # operations since `begin`
        self._splits = 0
        self._is_closed = False

    def begin(self, sequence: int, signature: CallSignature | None) -> None:
        if sequence != self.sequence:
            self._part = 0
        super().begin(sequence, signature)

    # Collectives -----------------------------------------------------------------------------------------

    @_translate_errors
    def all_reduce(self, parts: Sequence[Tensor], op: Op) -> float:
        nbytes, dtype = count_bytes(parts), parts[0].dtype
        sign = self._sign(f"all_reduce {op} of {sum(p.numel() for p in parts)} x {dtype}")
        if goes_at_once(nbytes):
            x = join_parts(parts)
            key = self._send_to_all(sign, as_bytes(x))
            self._combine_all(sign, self._take(self._others, key), op, x)
            copy_to_parts(x, parts)
        elif nbytes <= SMALL or dtype not in IN_RINGS:
            x = join_parts(parts)
            self._reduce_in_parts(x, op, sign)
            copy_to_parts(x, parts)
        else:
            self._agree(sign, self._rings.all_reduce(parts, op))
        return UNKNOWN

    def _reduce_in_parts(self, x: Tensor, op: Op, sign: Sign) -> None:
        """Each rank reduces a part, in the order of ranks, and sends it to all: two ways through the network."""
        edges = cut_evenly(x.numel(), self.size)
        mine = x[slice(*edges[self.rank])]
        if x.numel() * x.element_size() <= SMALL:
            key = self._next_key()
            for r in self._others:
                self._mail.send([r], key, sign.packed, as_bytes(x[slice(*edges[r])]))
            self._combine_all(sign, self._take(self._others, key), op, mine)
            key = self._send_to_all(sign, as_bytes(mine))
            for r, body in zip(self._others, self._take(self._others, key), strict=True):
                as_bytes(x[slice(*edges[r])])[:] = self._open(sign, r, body)
            return
        came = [torch.empty_like(mine) for _ in range(self.size)]
        parts = [x[slice(*edge)] for edge in edges]
        self._agree(sign, self._rings.swap(parts, came))
        combine(came, op, mine)
        self._run(self._rings.all_gather(mine, parts))

    def _combine_all(self, sign: Sign, bodies: Sequence[bytearray], op: Op, x: Tensor) -> None:
        """Reduce `x` with what the other ranks sent, in the order of ranks."""
        opened = [self._open(sign, r, body) for r, body in zip(self._others, bodies, strict=True)]
        if x.numel():
            came = [_as_tensor(body, x.dtype) for body in opened]
            came.insert(self.rank, x)
            combine(came, op, x)

    @_translate_errors
    def reduce_scatter(self, x: Tensor, counts: Sequence[int], op: Op, out: Tensor) -> float:
        """A ring: what arrives has come through all ranks before me; I add mine and pass it on."""
        sign = self._sign(f"reduce_scatter {op} of {x.numel()} x {x.dtype} ({_digest(counts)})")
        chunks = x.split(list(counts))
        if x.dtype not in IN_RINGS or count_bytes([x]) <= SMALL:
            came = [torch.empty_like(out) for _ in range(self.size)]
            self._trade(sign, chunks, came)
            if out.numel():
                combine(came, op, out)
            return UNKNOWN
        self._agree(sign, self._rings.reduce_scatter(chunks, op, out))
        return UNKNOWN

    @_translate_errors
    def all_gather(self, x: Tensor, outs: Sequence[Tensor]) -> float:
        """A ring: each rank passes on what it receives, piece by piece."""
        sizes = [out.numel() for out in outs]
        sign = self._sign(f"all_gather {sum(sizes)} x {x.dtype} ({_digest(sizes)})")
        if count_bytes(outs) <= SMALL:
            key = self._send_to_all(sign, as_bytes(x) if x.numel() else b"")
            outs[self.rank].copy_(x)
            for r, body in zip(self._others, self._take(self._others, key), strict=True):
                _fill(outs[r], self._open(sign, r, body))
            return UNKNOWN
        self._agree(sign, self._rings.all_gather(x, outs))
        return UNKNOWN

    @_translate_errors
    def broadcast(self, parts: Sequence[Tensor], src: int) -> float:
        """A chain from `src` on: each rank passes a piece on while the next one comes. Few bytes go to all at once."""
        views = [as_bytes(part) for part in parts if part.numel()]
        nbytes = sum(map(len, views))
        sign = self._sign(f"broadcast {nbytes} bytes from rank {src}")
        if nbytes * (self.size - 1) <= SMALL:
            key = self._send_to_all(sign, b"".join(views) if self.rank == src else b"")
            bodies = self._take(self._others, key)
            for r, body in zip(self._others, bodies, strict=True):
                told, at = self._open(sign, r, body), 0
                for view in views if r == src else ():
                    view[:] = told[at : at + len(view)]
                    at += len(view)
            return UNKNOWN
        flows = self._rings.broadcast(parts, (self.rank - src) % self.size)
        self._agree(sign, flows, early=False)  # a rank that has all its bytes would not hear that another disagrees
        return UNKNOWN

    @_translate_errors
    def all_to_all(self, parts: Sequence[Tensor], outs: Sequence[Tensor]) -> float:
        sign = self._sign(f"all_to_all {parts[0].dtype}")
        pairs = [(part.numel(), out.numel()) for part, out in zip(parts, outs, strict=True)]
        key = self._next_key()
        small = [count_bytes([part]) <= INLINE for part in parts]
        for r in self._others:
            head = struct.pack("<qq", *pairs[r])
            body = as_bytes(parts[r]) if small[r] and parts[r].numel() else b""
            self._mail.send([r], key, sign.packed, head, body)
        bodies = [
            self._open(sign, r, body) for r, body in zip(self._others, self._take(self._others, key), strict=True)
        ]
        self._compare_sizes(pairs, dict(zip(self._others, bodies, strict=True)))
        for r, body in zip(self._others, bodies, strict=True):
            if count_bytes([outs[r]]) <= INLINE:
                _fill(outs[r], body[16:])
        flows = self._rings.swap(parts, outs, least=INLINE)
        if flows:
            self._run(flows)
        return UNKNOWN

    def _compare_sizes(self, pairs: Sequence[tuple[int, int]], bodies: dict[int, memoryview]) -> None:
        """Whether each rank expects what I send it, and sends what I expect."""
        for r, body in bodies.items():
            (sent, expected), (comes, awaited) = pairs[r], struct.unpack_from("<qq", body)
            for source, n, target, m in ((self.rank, sent, r, awaited), (r, comes, self.rank, expected)):
                if n != m:
                    raise Mismatch(
                        f"all_to_all: the ranks disagree; rank {source} sends {n} elements to rank {target}, which "
                        f"expects {m}"
                    )

    def _trade(self, sign: Sign, parts: Sequence[Tensor], outs: Sequence[Tensor]) -> None:
        """Send each rank its part and receive mine of each, whose sizes are known; few bytes go as messages."""
        if sum(part.numel() for part in parts) * parts[0].element_size() > SMALL:
            self._agree(sign, self._rings.swap(parts, outs))
            return
        key = self._next_key()
        for r in self._others:
            self._mail.send([r], key, sign.packed, as_bytes(parts[r]) if parts[r].numel() else b"")
        outs[self.rank].copy_(parts[self.rank])
        for r, body in zip(self._others, self._take(self._others, key), strict=True):
            _fill(outs[r], self._open(sign, r, body))

    # From one rank to another ----------------------------------------------------------------------------

    @_translate_errors
    def send(self, x: Tensor, dst: int) -> None:
        self._send(x, dst, 0)

    @_translate_errors
    def recv(self, x: Tensor, src: int) -> None:
        def find(label: int, numel: int, dtype: torch.dtype) -> Tensor:
            if (numel, dtype) != (x.numel(), x.dtype):
                theirs, mine = f"{numel} x {dtype}", f"{x.numel()} x {x.dtype}"
                raise Mismatch(f"recv from rank {src}: it sent {theirs}, I receive into {mine}")
            return x

        self._recv(src, find)

    @_translate_errors
    def send_labelled(self, x: Tensor, dst: int, label: int) -> None:
        self._send(x, dst, label)

    @_translate_errors
    def recv_labelled(self, src: int, find: Callable[[int, int, torch.dtype], Tensor]) -> None:
        self._recv(src, find)

    def has_message(self, src: int) -> bool:
        return self._links.open_in(src, "direct").can_read()

    def _send(self, x: Tensor, dst: int, label: int) -> None:
        self._check_open()
        stream = self._links.open_out(dst, "direct")
        stream.push(_MESSAGE.pack(label, x.numel(), DTYPE_CODES[x.dtype]))
        Flow(stream, None, [as_bytes(x)] if x.numel() else [], []).run(self._patience())

    def _recv(self, src: int, find: Callable[[int, int, torch.dtype], Tensor]) -> None:
        self._check_open()
        source, head = self._links.open_in(src, "direct"), bytearray(_MESSAGE.size)
        Flow(None, source, [], [Piece(memoryview(head))]).run(self._patience())
        label, numel, code = _MESSAGE.unpack(head)
        if not 0 <= code < len(DTYPES) or numel < 0:
            raise LinkLost(f"rank {src} announced {numel} elements of dtype number {code}")
        x = find(label, numel, DTYPES[code])
        if numel:
            Flow(None, source, [], [Piece(as_bytes(x))]).run(self._patience())

    # All else --------------------------------------------------------------------------------------------

    @_translate_errors
    def exchange(self, data: bytes) -> list[bytes]:
        """Every rank's size and bytes in one round; those of long ones in another."""
        sign = self._sign("exchange of objects or shapes")
        head = struct.pack("<q", len(data))
        key = self._send_to_all(sign, head + (data if len(data) <= INLINE else b""))
        found: list[bytes | bytearray] = []
        long: list[Tensor] = []
        for r, body in zip(self._others, self._take(self._others, key), strict=True):
            told = self._open(sign, r, body)
            (size,) = struct.unpack_from("<q", told)
            found.append(bytes(told[8:]) if size <= INLINE else bytearray(size))
        found.insert(self.rank, data)
        empty = torch.empty(0, dtype=torch.uint8)
        outs = [_as_tensor(x, torch.uint8) if isinstance(x, bytearray) else empty for x in found]
        mine = _as_tensor(bytearray(data), torch.uint8) if len(data) > INLINE else empty
        long = [empty if r == self.rank else mine for r in range(self.size)]
        flows = self._rings.swap(long, outs, least=1)
        if flows:
            self._run(flows)
        return [bytes(x) for x in found]

    def post(
        self, x: Tensor, op: Op, sequence: int, signature: CallSignature | None = None
    ) -> tuple[Callable[[], float], Callable[[], bool]] | None:
        if not goes_at_once(x.numel() * x.element_size()):
            return None
        x, key = x.detach().view(-1), (sequence, 0)
        sign = make_sign(f"all_reduce {op} of {x.numel()} x {x.dtype}", sequence, signature, self.rank)
        self._post(sign, key, x)
        return partial(self._end_post, sign, key, x, op), partial(self._has_come, key)

    @_translate_errors
    def _post(self, sign: Sign, key: Key, x: Tensor) -> None:
        self._send_to_all(sign, as_bytes(x), key)

    @_translate_errors
    def _end_post(self, sign: Sign, key: Key, x: Tensor, op: Op) -> float:
        self._combine_all(sign, self._take(self._others, key), op, x)
        return UNKNOWN

    def _has_come(self, key: Key) -> bool:
        try:
            return self._is_closed or self._mail.has_come(self._others, key)
        except OSError:
            return True  # whoever waits is told

    def split(self, groups: Sequence[Sequence[int]]) -> Transport:
        from torch.distributed import PrefixStore

        mine = find_group(groups, self.rank, self.size)
        self._splits += 1
        name = f"{self._splits}/{'-'.join(map(str, mine))}"
        return SocketTransport(
            PrefixStore(name, self._store),
            mine.index(self.rank),
            len(mine),
            timeout_s=self.timeout_s,
            interruption=self._interruption,
            links=self._links.split(mine, name),
        )

    def exchange_descriptions(self) -> list[CallDescription]:
        return self._liveness.exchange_descriptions(self.signature.description) if self.signature is not None else []

    def set_timeout(self, seconds: float) -> None:
        self.timeout_s = seconds

    def abandon(self, why: Exception) -> None:
        self._liveness.report(why)
        self.close()

    def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self._links.end("the connections of this world were closed, or lost before")
            self._helpers.close()
            self._links.close()

    @property
    def paused_s(self) -> float:  # type: ignore[override]
        return self._links.paused_s

    @property
    def is_encrypted(self) -> bool:  # type: ignore[override]
        return self._links.is_encrypted

    def connect_again(self, *, is_encrypted: bool) -> SocketTransport:
        from torch.distributed import PrefixStore

        self._splits += 1
        links = meet_again(self._store, self.rank, self.exchange, is_encrypted=is_encrypted)
        store = PrefixStore(f"again/{self._splits}", self._store)
        return SocketTransport(store, self.rank, self.size, timeout_s=self.timeout_s, links=links)

    # Inside ----------------------------------------------------------------------------------------------

    def _patience(self, look_s: float = 0.0) -> Patience:
        """`look_s`: as of `Patience`, if this host has a core for it."""
        look_s = look_s if self._links.lanes > 1 else 0.0
        return Patience(self.timeout_s, self._links.check, self._links.tend, look_s=look_s)

    def _check_open(self) -> None:
        if self._is_closed:
            raise PeerLost("the connections of this world were closed, or lost before")

    def _run(self, flows: Sequence[Flow | Copy]) -> None:
        """Run flows, each in a thread if there are cores for that; fewer threads if the program computes meanwhile. All
        ranks begin with the first flows, so those of one rank may wait while others run theirs together."""
        width = -(-self._links.lanes // (2 if in_background() else 1))
        if len(flows) == 1 or width == 1:
            for flow in flows:
                flow.begin()
            if len(flows) > 1:
                _run_together(flows, self._patience())
            else:
                flows[0].run(self._patience(_LOOK_S))
            return
        groups = [flows[i::width] for i in range(min(width, len(flows)))]
        jobs: list[Callable[[], None]] = [partial(_run_together, group, self._patience()) for group in groups]
        self._helpers.run(jobs, lambda: self._links.end("another lane of this operation has failed"))

    def _agree(self, sign: Sign, flows: Sequence[Flow | Copy], *, early: bool = True) -> None:
        """Tell the next rank what I am about to do, and hear it from the previous one, while the first bytes leave."""
        key = self._next_key()
        self._mail.send([self._next], key, sign.packed)
        if early:
            flows[0].begin()
        self._open(sign, self._previous, self._take([self._previous], key)[0])
        self._run(flows)

    def _next_key(self) -> Key:
        self._check_open()
        key = (self.sequence, self._part)
        self._part += 1
        return key

    def _send_to_all(self, sign: Sign, payload: bytes | memoryview, key: Key | None = None) -> Key:
        self._check_open()
        key = self._next_key() if key is None else key
        self._mail.send(self._others, key, sign.packed, payload)
        return key

    def _take(self, sources: Sequence[int], key: Key) -> list[bytearray]:
        return self._mail.take(sources, key, self._patience(_LOOK_S))

    def _sign(self, operation: str) -> Sign:
        return make_sign(operation, self.sequence, self.signature, self.rank)

    def _open(self, mine: Sign, rank: int, body: bytearray) -> memoryview:
        return open_message(mine, self.rank, rank, body)

    def _explain_failure(self, what: str, problem: str, calls: Sequence[CallDescription] | None) -> Exception:
        """What to raise: my own finding, another rank's, or who is missing. The others learn it, or see me leave.

        `calls`: of ranks that disagree; None where they do not.
        """
        if calls is not None:
            self.abandon(found := Mismatch(problem, calls=calls))
            found.calls = tuple(self.exchange_descriptions()) or found.calls
            return found
        self.close()
        if self._interruption is not None and self._interruption.has_ended(_TO_BE_TOLD_S):
            return PeerLost(f"{self._interruption.why}; waited for it in {what}")
        if (report := self._liveness.read_report()) is not None:
            if isinstance(report, Mismatch):
                report.calls = tuple(self.exchange_descriptions()) or report.calls
            return report
        missing, is_certain = self._liveness.describe_missing()
        if is_certain:
            return PeerLost(f"{missing}; waited for it in {what}")
        return PeerLost(f"{what}: {missing} ({problem})")


def _run_together(flows: Sequence[Flow | Copy], patience: Patience) -> None:
    """Run flows in one thread: one after the other, as each has its own peers and their memory holds what comes."""
    for flow in flows:
        flow.run(patience)


def _as_tensor(data: bytearray | memoryview, dtype: torch.dtype) -> Tensor:
    """The same memory, if numbers may lie there."""
    x = torch.frombuffer(data, dtype=dtype)
    return x if x.data_ptr() % ALIGNED == 0 else torch.frombuffer(bytearray(data), dtype=dtype)


def _fill(x: Tensor, data: memoryview) -> None:
    if x.numel():
        as_bytes(x)[:] = data


def _digest(counts: Sequence[int]) -> str:
    """A short text that differs between lists of sizes."""
    return f"{crc32(str(list(counts)).encode()):08x}"
