"""Ranks that share a CUDA device: each maps the memory of the others' tensors (CUDA IPC); nothing passes through the
host.

Each collective has three phases:

1. Every rank waits until its tensor is ready, then all meet on a page of the host's memory (`meeting_page`) and tell
   where their tensors lie. A rank maps an allocation of another once.
2. Each reads what it needs where it lies. An all-reduce is written by one rank to all: kernels of several processes do
   not run at the same time, so that dividing it would only make the device change between them, which takes 140 us.
3. All wait until what they read has arrived, and meet again.

No kernel and no stream ever waits for another process: a rank that dies is missed in a meeting, as on the CPU, while a
stream that waits for an event of a process that is killed waits for ever.
"""

from __future__ import annotations

import os
import struct
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate

import torch
from torch import Tensor

from unisono.world.transports import (
    DTYPES,
    CallSignature,
    Mismatch,
    Op,
    PeerLost,
    Transport,
    find_group,
)
from unisono.world.transports.arithmetic import combine
from unisono.world.transports.cuda_memory import HANDLE_BYTES, Memory, NotShareable, Segment
from unisono.world.transports.direct_messages import DirectMessages, count_outbox_bytes
from unisono.world.transports.mapped import PEER_MEMORY, MappedMemory, open_published, publish
from unisono.world.transports.meeting_page import (
    EXTRA_LIMIT,
    ITEM_LIMIT,
    PAGE_NAME,
    MeetingPage,
    is_supported,
    meet_with_plan,
)
from unisono.world.transports.sent_sizes import describe_uneven
from unisono.world.transports.stage import cut_blocks

__all__ = ["CudaSharedTransport", "reduce_lines"]

# How often I have given segments back; the segment's number and bytes; where in it the tensor begins; its handle
_WHERE = struct.Struct(f"=IQQQ{HANDLE_BYTES}s")
_LENGTH = struct.Struct("=q")
_MOST_SEGMENTS = 256  # of mine that others keep mapped
_SMALL_MESSAGE = 1 << 20  # bytes: up to here a message goes through the host, and its sender does not wait
_CLEARLY_S = 0.5e-3  # that a rank came later: on an H200 changing to another process takes 0.14 ms
_LOOKS = 8  # before a rank sleeps, some 0.3 ms: to be woken up takes as long as most of what is waited for here
_JOINED = 256 << 20  # bytes of tensors that are copied to join them
_TILE = 32 << 20  # bytes reduced at a time without a kernel of our own: its steps find them in the device's cache
_BY_KERNEL = (torch.float32, torch.float16, torch.bfloat16)
_LOOK_S, _LOOK_AGAIN_S = 0.001, 1.0  # whether another still writes; whether memory of mine is gone
assert _WHERE.size <= EXTRA_LIMIT


class CudaSharedTransport(Transport):
    """One rank of a group of processes that share a device."""

    name = "CUDA IPC"

    def __init__(
        self,
        fd: int,
        rank: int,
        size: int,
        memory: Memory,
        *,
        timeout_s: float,
        pids: Sequence[int] = (),
        check: Callable[[], None] | None = None,
        works: bool = False,
    ) -> None:
        """`fd`: a memfd that every rank of the group has open, empty when the first comes; `pids`: every rank's
        process, one of which may die before it comes; `check`: raises PeerLost where waiting is to end; `works`:
        mapping has been tried out before. NotShareable, on every rank, if one cannot map the others' memory."""
        self.rank, self.size, self.timeout_s, self._check = rank, size, timeout_s, check
        spin = size <= len(os.sched_getaffinity(0))
        self._page = MeetingPage(fd, rank, size, timeout_s=timeout_s, spin=spin, pids=pids, check=check)
        self._page.looks = _LOOKS
        boxes = MappedMemory(count_outbox_bytes(size), rank, lambda mine: self._page.meet(mine, "sharing memory"))
        self._direct = DirectMessages(self._page, boxes.ranks)
        self._memory = memory
        self._mine: dict[int, Segment] = {}  # that others may have mapped
        self._given_back = 0  # times
        self._theirs: list[dict[int, Tensor]] = [{} for _ in range(size)]  # by the segment's number
        self._seen = [0] * size  # how often each had given back
        self._look_at = 0.0
        self._scratch: Tensor | None = None
        self._writer = 0  # the rank that reduced last
        if not works:
            try:
                self._try_out()
            except BaseException:
                self.close()
                raise

    @classmethod
    def connect(
        cls,
        base: Transport,
        memory: Callable[[], Memory],
        *,
        timeout_s: float,
        check: Callable[[], None] | None = None,
    ) -> CudaSharedTransport:
        """The same ranks as those of `base`. NotShareable, on every rank, if it does not work."""
        if os.environ.get(PEER_MEMORY) == "0":
            why = f"{PEER_MEMORY}=0"
        else:
            why = "" if is_supported() else "this system has no memfd or futex"
        fd, found = -1, None
        try:
            if not why:
                found = memory()
                fd = os.memfd_create(PAGE_NAME, os.MFD_CLOEXEC) if base.rank == 0 else -1
        except (RuntimeError, OSError) as error:
            why = str(error)
        address = base.exchange(publish(fd).encode() if fd >= 0 else b"")[0].decode()
        try:
            if fd < 0 and address and not why:
                fd = open_published(address)
        except OSError as error:
            why = f"the page of rank 0 cannot be opened: {error}"
        try:
            told = [one.decode().partition(" ")[::2] for one in base.exchange(f"{os.getpid()} {why}".encode())]
            if reasons := [f"rank {r}: {w}" for r, (_, w) in enumerate(told) if w]:
                raise NotShareable("; ".join(reasons))
            assert found is not None
            pids = [int(pid) for pid, _ in told]
            return cls(fd, base.rank, base.size, found, timeout_s=timeout_s, pids=pids, check=check)
        finally:
            if fd >= 0:
                os.close(fd)

    def _try_out(self) -> None:
        """Each rank maps a word of every other's, and reads it."""
        why, told = "", b""
        try:
            word = self._memory.allocate(8)[:8]
            word.copy_(torch.tensor([self.rank + 1] * 8, dtype=torch.uint8))
            self._memory.settle()
            told = self._describe(word, self._memory.find(word, {}))
        except RuntimeError as error:
            why = str(error)
        items = self._page.meet(told, "mapping memory")
        try:
            for r in self._page.peers if all(items) else ():
                if self._view(r, items[r], 8, torch.uint8).tolist() != [r + 1] * 8:
                    raise NotShareable(f"the memory of rank {r} has other numbers here")
        except RuntimeError as error:
            why = str(error)
        for rank in range(self.size):
            self._unmap(rank)
        reasons = self._page.meet(why.encode("ascii", "replace")[:ITEM_LIMIT], "mapping memory")
        if any(reasons):
            each = (f"rank {r}: {reason.decode()}" for r, reason in enumerate(reasons) if reason)
            raise NotShareable("; ".join(each))

    def serves(self, device: torch.device) -> bool:
        return device == self._memory.device

    def begin(self, sequence: int, signature: CallSignature | None) -> None:
        self.sequence = self._page.sequence = sequence
        self.signature = self._page.signature = signature

    # Collectives -----------------------------------------------------------------------------------------

    def all_reduce(self, parts: Sequence[Tensor], op: Op) -> float:
        return self._change("all_reduce", op, parts, lambda lines: reduce_lines(lines, op, lines))

    def reduce_scatter(self, x: Tensor, counts: Sequence[int], op: Op, out: Tensor) -> float:
        _, lines, last = self._announce(f"reduce_scatter of {list(counts)}", op, x)
        start = sum(counts[: self.rank])
        reduce_lines([line[start : start + out.numel()] for line in lines], op, [out])
        self._end("reduce_scatter")
        return last

    def all_gather(self, x: Tensor, outs: Sequence[Tensor]) -> float:
        _, lines, last = self._announce("all_gather", "sum", x, same=False)
        if any(out.numel() != line.numel() for out, line in zip(outs, lines, strict=True)):
            each = ", ".join(f"rank {r} has {line.numel()}" for r, line in enumerate(lines))
            raise Mismatch(f"all_gather: the ranks have sizes that were not expected ({each}): are they even?")
        for out, line in zip(outs, lines, strict=True):
            out.copy_(line)
        self._end("all_gather")
        return last

    def broadcast(self, parts: Sequence[Tensor], src: int) -> float:
        def write(lines: Sequence[Tensor]) -> None:
            for line in lines:
                if line is not lines[src]:
                    line.copy_(lines[src])

        return self._change(f"broadcast from {src}", "sum", parts, write)

    def all_to_all(self, parts: Sequence[Tensor], outs: Sequence[Tensor]) -> float:
        sizes = [part.numel() for part in parts], [out.numel() for out in outs]
        _, lines, last = self._announce("all_to_all", "sum", _join(parts), same=False)
        each = [struct.unpack(f"={2 * self.size}q", one) for one in self._exchange(_pack(*sizes))]
        every = [(list(one[: self.size]), list(one[self.size :])) for one in each]
        if any(every[a][0][b] != every[b][1][a] for a in range(self.size) for b in range(self.size)):
            raise Mismatch(describe_uneven(every), calls=self._page.exchange_descriptions(self.signature))
        for (sent, _), line, out in zip(every, lines, outs, strict=True):
            start = sum(sent[: self.rank])
            out.copy_(line[start : start + out.numel()])
        self._end("all_to_all")
        return last

    # Messages --------------------------------------------------------------------------------------------

    def send(self, x: Tensor, dst: int) -> None:
        if x.nbytes <= _SMALL_MESSAGE:
            self._direct.send(x.cpu(), dst)
            return
        mine = self._shareable(x)
        self._memory.settle()
        told = _LENGTH.pack(x.numel()) + self._describe(mine, self._segment_of(mine))
        row, counters = self._done(self.rank, dst), self._page.counters
        number = counters[row] + 1
        self._direct.send(torch.frombuffer(bytearray(told), dtype=torch.uint8), dst, 1 + DTYPES.index(x.dtype))
        self._page.await_counter(row, number, dst, f"send to rank {dst}")

    def recv(self, x: Tensor, src: int) -> None:
        labels: list[int] = []
        found: list[Tensor] = []

        def find(label: int, numel: int, dtype: torch.dtype) -> Tensor:
            labels.append(label)
            sent = numel if not label else -1
            if (label and label != 1 + DTYPES.index(x.dtype)) or (not label and (sent, dtype) != (x.numel(), x.dtype)):
                what = DTYPES[label - 1] if label else f"{numel} x {dtype}"
                raise Mismatch(f"recv from rank {src}: it sent {what}, I receive into {x.numel()} x {x.dtype}")
            found.append(torch.empty(numel, dtype=dtype))
            return found[0]

        self._direct.recv_labelled(src, find)
        if not labels[0]:
            x.copy_(found[0])
            return
        told = found[0].numpy().tobytes()
        (numel,) = _LENGTH.unpack_from(told)
        if numel != x.numel():
            raise Mismatch(f"recv from rank {src}: it sent {numel} x {x.dtype}, I receive into {x.numel()}")
        x.copy_(self._view(src, told[_LENGTH.size :], numel, x.dtype))
        self._memory.settle()
        row = self._done(src, self.rank)
        self._page.counters.publish(row, self._page.counters[row] + 1)

    def has_message(self, src: int) -> bool:
        return self._direct.has_message(src)

    def exchange(self, data: bytes) -> list[bytes]:
        raise AssertionError("objects travel over the CPU transport")

    # Groups ----------------------------------------------------------------------------------------------

    def split(self, groups: Sequence[Sequence[int]]) -> Transport:
        mine = find_group(groups, self.rank, self.size)
        fd = os.memfd_create(PAGE_NAME, os.MFD_CLOEXEC) if mine[0] == self.rank else -1
        addresses = self._page.meet(publish(fd).encode() if fd >= 0 else b"", "a split")
        if fd < 0:
            fd = open_published(addresses[mine[0]].decode())
        try:
            self._page.meet()  # all have opened before the maker may close
            return CudaSharedTransport(
                fd,
                mine.index(self.rank),
                len(mine),
                self._memory,
                timeout_s=self.timeout_s,
                pids=[self._page.pids[r] for r in mine],
                check=self._check,
                works=True,
            )
        finally:
            os.close(fd)

    def set_timeout(self, seconds: float) -> None:
        self.timeout_s = self._page.timeout_s = seconds

    def abandon(self, why: Exception) -> None:
        self._page.give_up(why)

    def close(self) -> None:
        self._memory.settle()
        for rank in range(self.size):
            self._unmap(rank)
        self._scratch = None
        self._page.close()

    # Where tensors lie -----------------------------------------------------------------------------------

    def _announce(
        self,
        what: str,
        op: Op,
        x: Tensor,
        *,
        same: bool = True,
    ) -> tuple[Tensor, list[Tensor], float]:
        """Phase 1. Returns what the others see of mine (`x`, or a copy of it), every rank's line, and when the last
        came."""
        mine = self._shareable(x)
        extra = self._describe(mine, self._segment_of(mine)) if x.numel() else bytes(_WHERE.size)
        self._memory.settle()
        heads, extras, last = meet_with_plan(self._page, what, op, x.dtype, x.numel(), same=same, extra=extra)
        lines = [mine[:0] for _ in heads]
        for r, (head, told) in enumerate(zip(heads, extras, strict=True)):
            if head[3]:
                lines[r] = mine if r == self.rank else self._view(r, told, head[3], x.dtype)
        return mine, lines, last

    def _shareable(self, x: Tensor) -> Tensor:
        """`x`, or a copy of it where others can map it."""
        if not x.numel():
            return x
        try:
            self._segment_of(x)
        except NotShareable:
            if self._scratch is None or self._scratch.numel() < x.nbytes:
                self._scratch = None
                self._scratch = self._memory.allocate(x.nbytes)
            mine = self._scratch[: x.nbytes].view(x.dtype)
            mine.copy_(x)
            return mine
        return x

    def _segment_of(self, x: Tensor) -> Segment:
        """The allocation that `x` lies in. Those that are gone are given back by the others too."""
        segment = self._memory.find(x, self._mine)
        self._mine[segment.number] = segment
        if (now := time.monotonic()) >= self._look_at or len(self._mine) > _MOST_SEGMENTS:
            self._look_at = now + _LOOK_AGAIN_S
            there = [s for s in self._mine.values() if self._memory.is_there(s)]
            if len(there) < len(self._mine) or len(there) > _MOST_SEGMENTS:
                self._mine = {segment.number: segment}
                self._given_back += 1
        return segment

    def _describe(self, x: Tensor, segment: Segment) -> bytes:
        offset = x.data_ptr() - segment.address
        return _WHERE.pack(self._given_back, segment.number, segment.nbytes, offset, segment.handle)

    def _view(self, rank: int, told: bytes, count: int, dtype: torch.dtype) -> Tensor:
        """A line of another rank's, where it lies."""
        given_back, number, nbytes, offset, handle = _WHERE.unpack(told)
        if given_back != self._seen[rank]:
            self._unmap(rank)
            self._seen[rank] = given_back
        if number not in self._theirs[rank]:
            try:
                self._theirs[rank][number] = self._memory.map(handle, nbytes)
            except RuntimeError as error:
                raise self._page.lose(rank, "mapping memory", f"its memory cannot be mapped ({error})") from error
        return self._theirs[rank][number][offset : offset + count * dtype.itemsize].view(dtype)

    def _unmap(self, rank: int) -> None:
        for line in self._theirs[rank].values():
            self._memory.unmap(line)
        self._theirs[rank].clear()

    # Inside ----------------------------------------------------------------------------------------------

    def _change(self, what: str, op: Op, parts: Sequence[Tensor], write: Callable[[Sequence[Tensor]], None]) -> float:
        """One rank changes the parts of all, by `write`; several are copied into one line, some at a time."""
        came = []
        blocks: list[Sequence[Tensor]] = [parts]
        if len(parts) > 1:
            blocks = [*cut_blocks(parts, _JOINED // parts[0].element_size())] or [parts[:1]]
        for block in blocks:
            whole = _join(block)
            mine, lines, last = self._announce(what, op, whole)
            self._write(what, partial(write, lines))
            if mine is not block[0]:
                _put(mine, block)
            came.append(last)
        return came[0]

    def _write(self, what: str, write: Callable[[], object]) -> None:
        """Phases 2 and 3, where one rank writes to the memory of all: who came last, as the device has just run its
        kernels, or the former one if that came at about the same time."""
        came, page = self._page.read_arrivals(), self._page
        if came[self._writer] < max(came) - _CLEARLY_S:
            self._writer = came.index(max(came))
        row = self._done(self._writer, self._writer)
        if self.rank == self._writer:
            page.counters.publish(row, 1)  # a rank that leaves from now on waits until I have ended
            try:
                if left := [r for r in page.peers if page.has_left(r)]:  # it may use its memory for something else
                    raise page.lose(left[0], what, "it has left")
                write()
                self._memory.settle()
            finally:
                page.counters.publish(row, 0)
        try:
            self._end(what)
        except BaseException as error:  # whatever happens, my memory is my own again after it
            page.give_up(error if isinstance(error, Exception) else PeerLost("interrupted"))
            while self.rank != self._writer and page.counters[row] and not page.has_died(self._writer):
                time.sleep(_LOOK_S)
            raise

    def _end(self, what: str) -> None:
        """Phase 3."""
        self._memory.settle()
        self._page.meet(what=what)

    def _exchange(self, data: bytes) -> list[bytes]:
        """Every rank's bytes, as many on each."""
        found = [b""] * self.size
        for at in range(0, len(data), ITEM_LIMIT):
            items = self._page.meet(data[at : at + ITEM_LIMIT], "all_to_all")
            found = [whole + item for whole, item in zip(found, items, strict=True)]
        return found

    def _done(self, src: int, dst: int) -> int:
        """The counter of messages that `dst` has read in the memory of `src`; of a rank and itself: whether it writes
        to the memory of others now."""
        return self._direct.row(src, dst) + 8


def _join(parts: Sequence[Tensor]) -> Tensor:
    """The lines as one: the only one itself, or a copy of all."""
    if len(parts) == 1:
        return parts[0]
    return torch.cat([part.view(torch.uint8) for part in parts]).view(parts[0].dtype)


def _put(whole: Tensor, parts: Sequence[Tensor]) -> None:
    """Copy a line into parts of it."""
    for part, end in zip(parts, accumulate(part.numel() for part in parts), strict=True):
        source = whole[end - part.numel() : end]
        if part.numel() and part.data_ptr() != source.data_ptr():
            part.copy_(source)


def reduce_lines(lines: Sequence[Tensor], op: Op, outs: Sequence[Tensor]) -> None:
    """Write the reduction of `lines`, taken in rank order, into each of `outs`, which may be the lines."""
    if not lines[0].numel():
        return
    if lines[0].is_cuda and op in ("sum", "mean") and lines[0].dtype in _BY_KERNEL and _is_aligned((*lines, *outs)):
        try:
            from unisono.world.transports.reduce_triton import reduce_to_all
        except ImportError:
            pass  # torch's own kernels do it in more steps
        else:
            reduce_to_all(lines, outs, mean=op == "mean")
            return
    room = _TILE // lines[0].element_size()
    for tiles in zip(*(line.split(room) for line in (*lines, *outs)), strict=True):
        values, targets = tiles[: len(lines)], tiles[len(lines) :]
        combine(values, op, targets[0])
        for target in targets[1:]:
            target.copy_(targets[0])


def _is_aligned(lines: Sequence[Tensor]) -> bool:
    return not any(line.data_ptr() % 16 for line in lines)


def _pack(*sizes: Sequence[int]) -> bytes:
    return b"".join(struct.pack(f"={len(some)}q", *some) for some in sizes)
