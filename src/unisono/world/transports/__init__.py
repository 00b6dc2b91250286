"""How bytes move between ranks. A transport only moves and adds; `World` schedules and records."""

from __future__ import annotations

import atexit
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from unisono.background import close_queues
from unisono.launchers.runtime.frames import CalledByAll, warn_user
from unisono.launchers.runtime.status import describe_ending

Op = Literal["sum", "mean", "max", "min", "product", "and", "or", "xor"]
UNKNOWN = float("nan")
DTYPES: list[torch.dtype] = sorted({v for v in vars(torch).values() if isinstance(v, torch.dtype)}, key=str)
DTYPE_CODES = {dtype: i for i, dtype in enumerate(DTYPES)}
SMALL_BYTES = 4096  # an all-reduce of one tensor up to this size is offered to `Transport.post`


class PeerLost(CalledByAll, RuntimeError):
    """Another rank of this world ended or died, or its connection broke, during a collective."""

    __module__ = "unisono"  # as programs know it
    ended: int | None = None  # the rank whose program has ended well, so that it will never make this call


class CallDescription(NamedTuple):
    """What one rank called, for a report: `what` and `where` are those of its signature."""

    rank: int
    what: int
    where: int
    text: str
    place: str  # "train.py:88"


class CallSignature(Protocol):
    """What a rank is about to do, in two numbers (see world/call_signatures.py); a transport compares them."""

    what: int
    where: int
    rank: int

    @property
    def place(self) -> str:
        """Where the call stands, and at which step: "train.py:88 step 12"."""

    @property
    def description(self) -> CallDescription:
        """The call in words, for the other ranks."""

    def check_places(self, wheres: Sequence[int], hear: Callable[[], Sequence[CallDescription]]) -> None:
        """Compare every rank's `where`; raises Mismatch if a rank is out of turn."""


class Mismatch(CalledByAll, ValueError):
    """Ranks called one collective with different arguments."""

    __module__ = "unisono"

    def __init__(self, *args: object, calls: Sequence[CallDescription] = ()) -> None:
        super().__init__(*args)
        self.calls = tuple(calls)  # of the ranks that said so
        self.is_noted = False  # in the ledger


class Transport(ABC):
    """Blocking collectives on flat, contiguous tensors of one device.

    Every collective returns when the last rank arrived, in seconds of `time.perf_counter`, or NaN if the
    transport cannot know. A tensor list stands for its concatenation: nothing is copied to join it.
    """

    name = "transport"
    rank: int
    size: int
    meets_on_host = True  # a collective returns when all ranks have come; else a stream has its order and its result
    takes_parts = False  # an all-reduce of several large tensors works on them where they are, one after the other
    takes_cuda = False  # collectives work on CUDA tensors, in the order of the streams that are current in each rank
    reads_peers = False  # reductions of large private tensors read them where they are, not in memory of `empty`
    sequence = 0  # the number of the collective now running, from 1: the same on every rank, or orders differ
    signature: CallSignature | None = None  # what it is, and where it was called
    timeout_s = float("inf")  # that a rank waits for another
    paused_s = 0.0  # that connections of this rank were broken, before they were made again
    is_encrypted = False  # nobody else can read what ranks of several hosts send to each other

    def begin(self, sequence: int, signature: CallSignature | None) -> None:
        """Take the number and the signature of the collective that follows."""
        self.sequence, self.signature = sequence, signature

    def connect_again(self, *, is_encrypted: bool) -> Transport | None:
        """The same ranks over further connections between hosts, encrypted or not; None if there are none to make."""
        return None

    def serves(self, device: torch.device) -> bool:
        """Whether it moves tensors of this device."""
        return True

    @abstractmethod
    def all_reduce(self, parts: Sequence[Tensor], op: Op) -> float:
        """Replace `parts` by their reduction over the ranks."""

    @abstractmethod
    def reduce_scatter(self, x: Tensor, counts: Sequence[int], op: Op, out: Tensor) -> float:
        """Reduce `x`; rank r's `counts[r]` elements of the result go to its `out`."""

    def reduce_scatter_parts(self, parts: Sequence[Tensor], counts: Sequence[int], op: Op, out: Tensor) -> float:
        """Reduce-scatter the concatenation of `parts`."""
        return self.reduce_scatter(parts[0] if len(parts) == 1 else torch.cat(list(parts)), counts, op, out)

    @abstractmethod
    def all_gather(self, x: Tensor, outs: Sequence[Tensor]) -> float:
        """Write every rank's `x` into `outs`, on every rank; sizes may differ."""

    @abstractmethod
    def broadcast(self, parts: Sequence[Tensor], src: int) -> float:
        """Replace `parts` by rank `src`'s."""

    @abstractmethod
    def all_to_all(self, parts: Sequence[Tensor], outs: Sequence[Tensor]) -> float:
        """Send `parts[r]` to rank r; what rank r sent arrives in `outs[r]`."""

    @abstractmethod
    def send(self, x: Tensor, dst: int) -> None:
        """Send `x` to rank `dst`."""

    @abstractmethod
    def recv(self, x: Tensor, src: int) -> None:
        """Receive into `x` from rank `src`."""

    def send_labelled(self, x: Tensor, dst: int, label: int) -> None:
        """Send `x` with a number that says what it is, to `recv_labelled` of rank `dst`."""
        self.send(torch.tensor([label, x.numel(), DTYPE_CODES[x.dtype]]), dst)
        self.send(x, dst)

    def recv_labelled(self, src: int, find: Callable[[int, int, torch.dtype], Tensor]) -> None:
        """Receive the next message of rank `src` into the line of memory that `find(label, numel, dtype)` gives."""
        head = torch.empty(3, dtype=torch.int64)
        self.recv(head, src)
        label, numel, code = head.tolist()
        self.recv(find(label, numel, DTYPES[code]), src)

    def has_room(self, dst: int, nbytes: int) -> bool:
        """Whether `send_labelled` of so many bytes to rank `dst` would end at once."""
        return False

    @abstractmethod
    def exchange(self, data: bytes) -> list[bytes]:
        """Every rank's `data`, on every rank: how ranks agree on shapes, hosts and names."""

    @abstractmethod
    def split(self, groups: Sequence[Sequence[int]]) -> Transport:
        """The transport of my group; every rank of this one calls it with the same groups."""

    def post(
        self, x: Tensor, op: Op, sequence: int, signature: CallSignature | None = None
    ) -> tuple[Callable[[], float], Callable[[], bool]] | None:
        """Begin a small all-reduce without blocking: what ends it, and whether that would be at once.

        None where it is not offered. `sequence` and `signature` are the collective's.
        """
        return None

    def empty(self, n: int, dtype: torch.dtype) -> Tensor:
        """Memory that this transport moves fastest; every rank asks alike."""
        return torch.empty(n, dtype=dtype)

    def shared(self, n: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Memory that all ranks see, zero at first, and this rank's view of it: what it writes there, it alone sees.
        Every rank asks alike."""
        raise ValueError(f"ranks that talk by {self.name} have no memory in common: start them on one host")

    def release(self, x: Tensor) -> None:  # noqa: B027 (only shared memory has something to do)
        """Free memory that came from `empty`."""

    def exchange_descriptions(self) -> list[CallDescription]:
        """Every rank's call, exchanged after ranks were found to disagree; [] if that cannot be done."""
        return []

    def set_timeout(self, seconds: float) -> None:  # noqa: B027 (not every transport waits by itself)
        """Set how long to wait for another rank from now on."""

    def has_message(self, src: int) -> bool:
        """Whether `recv` from rank `src` would begin at once."""
        raise NotImplementedError(
            f"ranks that talk by {self.name} cannot look who has sent something: receive from a rank that you name"
        )

    def abandon(self, why: Exception) -> None:  # noqa: B027 (threads share their fate anyway)
        """Tell the other ranks that this one gives up, so that they do not wait for it."""

    def close(self) -> None:  # noqa: B027 (not every transport holds something)
        """Release sockets, threads and memory."""


class _Ending(Protocol):
    def end(self, how: str, /) -> None:
        """Tell the other ranks that this program has ended: "has ended its program with status 0"."""


_told_at_exit: weakref.WeakSet[_Ending] = weakref.WeakSet()


def tell_at_exit(one: _Ending) -> None:
    """Have `one.end(how)` called at the end of the program."""
    _told_at_exit.add(one)


@atexit.register
def _tell_the_others() -> None:
    """Send what is queued, then tell the other ranks, so that none waits for this one any more."""
    known = list(_told_at_exit)
    if known:
        close_queues()
    for one in known:
        one.end(describe_ending())


def warn_of_each_other(mine: str, rank: int, theirs: str) -> None:
    """Say that this rank and another wait for each other, in different calls of the program."""
    warn_user(
        f"this rank waits in {mine} for rank {rank}, which waits in {theirs}: they have come to "
        "different places of the program and wait for each other. Every rank makes the same calls in the same order, "
        "and as many passes over data as the others"
    )


def gather_bytes(data: bytes, sizes: Sequence[int], gather: Callable[[Tensor, list[Tensor]], object]) -> list[bytes]:
    """Every rank's bytes, by an all-gather of tensors; `sizes`: how many each rank has."""
    mine = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
    outs = [torch.empty(n, dtype=torch.uint8) for n in sizes]
    gather(mine, outs)
    return [out.numpy().tobytes() for out in outs]


def find_group(groups: Sequence[Sequence[int]], rank: int, size: int) -> list[int]:
    """The group that holds `rank`, after checking that the groups part all ranks."""
    flat = sorted(r for group in groups for r in group)
    if flat != list(range(size)):
        raise ValueError(
            f"split needs every rank of 0..{size - 1} in exactly one group, got {[list(g) for g in groups]}"
        )
    return next(list(group) for group in groups if rank in group)
