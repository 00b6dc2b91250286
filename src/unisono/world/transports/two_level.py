"""Shared memory inside a host, messages between hosts: the two combined, chosen by where the ranks are.

A collective runs in up to three phases: inside the host, between the hosts' leaders (the first rank of each),
inside the host again. Each byte crosses the network once a host, whatever the number of workers on it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from functools import wraps
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from unisono.launchers.runtime.machine import read_boot_id, read_namespaces
from unisono.launchers.runtime.variables import may_share_memory, read_host
from unisono.world.transports import UNKNOWN, CallSignature, Mismatch, Op, PeerLost, Transport, find_group
from unisono.world.transports.arithmetic import widen
from unisono.world.transports.connections import limit_silence
from unisono.world.transports.mapped import open_published, publish
from unisono.world.transports.meeting_page import PAGE_NAME, is_supported
from unisono.world.transports.shared import SharedTransport
from unisono.world.transports.sockets import SocketTransport

if TYPE_CHECKING:
    from torch.distributed import Store

    from unisono.world.transports.interruption import Interruption

F = TypeVar("F", bound=Callable[..., Any])

_ASKING_S = 10.0


def connect(
    store: Store,
    rank: int,
    size: int,
    *,
    timeout_s: float,
    interruption: Interruption | None = None,
    pids: Sequence[int] = (),
) -> tuple[Transport, list[str]]:
    """Meet the other ranks in `store`; the best transport for where they are, and every rank's host.

    `interruption`: by which another thread ends what this rank waits for; `pids`: every rank's process, if known.
    """
    from torch.distributed import PrefixStore

    limit_silence(store, timeout_s)
    try:
        store.set(f"host/{rank}", json.dumps([*_identify_host(), os.environ.get("UNISONO_NET", "")]))
        found = [json.loads(store.get(f"host/{r}")) for r in range(size)]
    except RuntimeError as error:
        raise PeerLost(
            f"rank {rank} on host {_identify_host()[0]} met not all of the {size} ranks in time: some have not "
            f"started, or cannot be reached from here ({error})"
        ) from None
    hosts = [name for name, _, _ in found]
    for r, (name, _, _) in enumerate(found):  # one name, two machines (cloned images): keep them apart
        twins = list(dict.fromkeys(key for n, key, _ in found if n == name))
        if len(twins) > 1:
            hosts[r] = f"{name}#{twins.index(found[r][1])}"
    mine = [r for r in range(size) if hosts[r] == hosts[rank]]
    everywhere, inside = _share_memory(store, mine, rank, size, timeout_s, interruption, pids)
    if inside is not None and len(mine) == size:
        return inside, hosts
    try:
        prefixed = PrefixStore("messages", store)
        messages: Transport = SocketTransport(prefixed, rank, size, timeout_s=timeout_s, interruption=interruption)
        nets = [net for _, _, net in found]
        if any(nets):  # emulated hosts of one machine
            from unisono.world.transports.shaped import shape

            messages = shape(messages, nets, hosts)
        if not everywhere or len(set(hosts)) == size:
            return messages, hosts
        return TwoLevelTransport.build(messages, inside, hosts), hosts
    except PeerLost as error:
        if inside is not None:
            inside.abandon(error)
        raise


def _identify_host() -> tuple[str, str]:
    """This host's name, and a key that two ranks share just when they can share memory."""
    name = read_host()
    if not is_supported():
        return name, f"{name} {os.getpid()}"
    return name, " ".join([read_boot_id(), name, str(os.getuid()), *read_namespaces("net", "pid")])


def _share_memory(
    store: Store,
    mine: Sequence[int],
    rank: int,
    size: int,
    timeout_s: float,
    interruption: Interruption | None,
    pids: Sequence[int],
) -> tuple[bool, SharedTransport | None]:
    """Whether every rank anywhere can share memory on its host, and mine with the others of my host, if any."""
    works = is_supported() and may_share_memory()
    fd = os.memfd_create(PAGE_NAME, os.MFD_CLOEXEC) if works and rank == mine[0] else -1
    try:
        if rank == mine[0]:
            store.set(f"page/{rank}", publish(fd) if works else "")
        elif works:
            try:
                fd = open_published(store.get(f"page/{mine[0]}").decode())
            except OSError:
                works = False
        store.set(f"shares/{rank}", str(int(works)))
        if not all(store.get(f"shares/{r}") == b"1" for r in range(size)):
            return False, None
        if len(mine) == 1:
            return True, None
        # A rank waits for its host's leader, which waits for the other hosts and then asks who is missing: the wait
        # inside a host is longer, so that all of it hear what the leader found.
        wait_s = timeout_s if len(mine) == size else timeout_s + _ASKING_S
        near = [pids[r] for r in mine] if pids else ()
        check = None if interruption is None else interruption.check
        return True, SharedTransport(fd, mine.index(rank), len(mine), timeout_s=wait_s, pids=near, check=check)
    finally:
        if fd >= 0:
            os.close(fd)


def _fail_together(method: F) -> F:
    """Decorate a collective: if a phase fails here, tell the ranks that wait for this one, on all hosts."""

    @wraps(method)
    def run(self: TwoLevelTransport, *args: Any) -> Any:
        if self._is_lost:  # the others of this host would take it for the collective that failed
            raise PeerLost("the connections of this world were closed, or lost before")
        try:
            return method(self, *args)
        except (Mismatch, PeerLost) as error:
            text = str(error)
            why = type(error)(text if text.startswith("on host ") else f"on host {self._hosts[self.rank]}: {text}")
            calls = error.calls if isinstance(error, Mismatch) else ()
        self.abandon(why)
        if isinstance(why, Mismatch):
            why.calls = tuple(self._flat.exchange_descriptions()) or calls
        raise why

    return run  # type: ignore[return-value]


class TwoLevelTransport(Transport):
    """One rank of several hosts with several ranks each."""

    name = "shared memory and messages"

    def __init__(self, flat: Transport, inside: Transport | None, across: Transport | None, hosts: Sequence[str]):
        """`flat` joins all ranks, `inside` those of my host, `across` the leaders (None if I am not one)."""
        self.rank, self.size, self.timeout_s = flat.rank, flat.size, flat.timeout_s
        self._flat, self._inside, self._across = flat, inside, across
        self._levels = [transport for transport in (inside, across, flat) if transport is not None]
        self._hosts = list(hosts)
        self._is_lost = False
        self._groups = [[r for r in range(self.size) if hosts[r] == h] for h in dict.fromkeys(hosts)]
        self._home = next(i for i, group in enumerate(self._groups) if self.rank in group)
        self._mine = self._groups[self._home]
        if isinstance(inside, SharedTransport):
            inside.call_others("local rank")

    def begin(self, sequence: int, signature: CallSignature | None) -> None:
        super().begin(sequence, signature)
        for transport in self._levels:  # without a number: the collective may be several operations of theirs
            transport.begin(0, signature)

    @classmethod
    def build(cls, flat: Transport, inside: Transport | None, hosts: Sequence[str]) -> TwoLevelTransport:
        """Make the group of leaders (every rank calls it)."""
        leaders = [hosts.index(h) for h in dict.fromkeys(hosts)]
        rest = [r for r in range(flat.size) if r not in leaders]
        across: Transport | None = flat.split([leaders, rest] if rest else [leaders])
        if across is not None and flat.rank not in leaders:
            across.close()
            across = None
        return cls(flat, inside, across, hosts)

    @_fail_together
    def all_reduce(self, parts: Sequence[Tensor], op: Op) -> float:
        if parts[0].dtype.itemsize == 1 and parts[0].is_floating_point():  # eight bits do not bear three roundings
            wide = [widen(p) for p in parts]
            self.all_reduce(wide, op)
            for part, done in zip(parts, wide, strict=True):
                part.copy_(done)
            return UNKNOWN
        self._reduce_inside(parts, op)
        if self._across is not None:
            self._across.all_reduce(parts, "sum" if op == "mean" else op)
        if self._inside is not None:
            self._inside.broadcast(parts, 0)
        return UNKNOWN

    @_fail_together
    def reduce_scatter(self, x: Tensor, counts: Sequence[int], op: Op, out: Tensor) -> float:
        pieces = [widen(p) if p.dtype.itemsize == 1 else p for p in x.split(list(counts))]
        lists = [[pieces[r] for r in group] for group in self._groups]
        work = torch.cat([p for group in lists for p in group])
        sizes = [sum(p.numel() for p in group) for group in lists]
        mine = torch.empty(sizes[self._home], dtype=work.dtype)
        self._reduce_inside([work], op)
        if self._across is not None:
            self._across.reduce_scatter(work, sizes, "sum" if op == "mean" else op, mine)
        if self._inside is not None:
            self._inside.broadcast([mine], 0)
        out.copy_(mine.split([counts[r] for r in self._mine])[self._mine.index(self.rank)])
        return UNKNOWN

    def _reduce_inside(self, parts: Sequence[Tensor], op: Op) -> None:
        """Reduce over my host; a mean's part of the whole mean, so that the sum over the hosts is the mean."""
        if self._inside is not None:
            self._inside.all_reduce(parts, op)
        if op == "mean" and self._across is not None:
            for part in parts:
                part.mul_(len(self._mine) / self.size)

    @_fail_together
    def all_gather(self, x: Tensor, outs: Sequence[Tensor]) -> float:
        local = [outs[r] for r in self._mine]
        if self._inside is not None:
            self._inside.all_gather(x, local)
        else:
            outs[self.rank].copy_(x)
        blocks = [torch.cat([outs[r] for r in group]) for group in self._groups]
        if self._across is not None:
            self._across.all_gather(blocks[self._home].clone(), blocks)
        if self._inside is not None:
            self._inside.broadcast(blocks, 0)
        for group, block in zip(self._groups, blocks, strict=True):
            for r, piece in zip(group, block.split([outs[r].numel() for r in group]), strict=True):
                outs[r].copy_(piece)
        return UNKNOWN

    @_fail_together
    def broadcast(self, parts: Sequence[Tensor], src: int) -> float:
        home = next(i for i, group in enumerate(self._groups) if src in group)
        if self._inside is not None and home == self._home:
            self._inside.broadcast(parts, self._mine.index(src))
        if self._across is not None:
            self._across.broadcast(parts, home)
        if self._inside is not None and home != self._home:
            self._inside.broadcast(parts, 0)
        return UNKNOWN

    @_fail_together
    def all_to_all(self, parts: Sequence[Tensor], outs: Sequence[Tensor]) -> float:
        return self._flat.all_to_all(parts, outs)

    def _reach(self, rank: int) -> tuple[Transport, int]:
        """The transport for messages between `rank` and me, and its rank there."""
        if self._inside is not None and rank in self._mine:
            return self._inside, self._mine.index(rank)
        return self._flat, rank

    def send(self, x: Tensor, dst: int) -> None:
        transport, number = self._reach(dst)
        transport.send(x, number)

    def recv(self, x: Tensor, src: int) -> None:
        transport, number = self._reach(src)
        transport.recv(x, number)

    def send_labelled(self, x: Tensor, dst: int, label: int) -> None:
        transport, number = self._reach(dst)
        transport.send_labelled(x, number, label)

    def recv_labelled(self, src: int, find: Callable[[int, int, torch.dtype], Tensor]) -> None:
        transport, number = self._reach(src)
        transport.recv_labelled(number, find)

    def has_room(self, dst: int, nbytes: int) -> bool:
        transport, number = self._reach(dst)
        return transport.has_room(number, nbytes)

    @_fail_together
    def exchange(self, data: bytes) -> list[bytes]:
        return self._flat.exchange(data)

    def set_timeout(self, seconds: float) -> None:
        self.timeout_s = seconds
        for transport in self._levels:
            transport.set_timeout(seconds)

    def split(self, groups: Sequence[Sequence[int]]) -> Transport:
        members = find_group(groups, self.rank, self.size)
        hosts = [self._hosts[r] for r in members]
        flat = self._flat.split(groups)
        inside = self._split_inside(groups)
        if len(set(hosts)) == 1 and inside is not None:
            flat.close()
            return inside
        if len(set(hosts)) == len(hosts):
            return flat
        return TwoLevelTransport.build(flat, inside, hosts)

    def _split_inside(self, groups: Sequence[Sequence[int]]) -> Transport | None:
        """Shared memory among the ranks that are in my group and on my host."""
        if self._inside is None:
            return None
        here = [[self._mine.index(r) for r in group if r in self._mine] for group in groups]
        part = self._inside.split([group for group in here if group])
        if part.size > 1:
            return part
        part.close()
        return None

    def empty(self, n: int, dtype: torch.dtype) -> Tensor:
        return self._inside.empty(n, dtype) if self._inside is not None else torch.empty(n, dtype=dtype)

    def release(self, x: Tensor) -> None:
        if self._inside is not None:
            self._inside.release(x)

    @property
    def paused_s(self) -> float:  # type: ignore[override]
        return sum(transport.paused_s for transport in self._levels)

    @property
    def is_encrypted(self) -> bool:  # type: ignore[override]
        return self._flat.is_encrypted

    def connect_again(self, *, is_encrypted: bool) -> Transport | None:
        return self._flat.connect_again(is_encrypted=is_encrypted)

    def abandon(self, why: Exception) -> None:
        self._is_lost = True
        for transport in self._levels:
            transport.abandon(why)

    def close(self) -> None:
        for transport in self._levels:
            transport.close()
