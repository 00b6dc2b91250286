"""Shared memory inside a host, messages between hosts: the two combined, chosen by where the ranks are.

A collective runs in up to three phases: inside the host, between the hosts' leaders (the first rank of each),
inside the host again. Each byte crosses the network once a host, whatever the number of workers on it.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from unisono.transports import Op, Transport, group_of
from unisono.transports import board as boards
from unisono.transports.messages import MessageTransport
from unisono.transports.segments import open_published, publish
from unisono.transports.shared import SharedTransport

if TYPE_CHECKING:
    from torch.distributed import Store


def connect(store: Store, rank: int, size: int, *, timeout_s: float) -> tuple[Transport, list[str]]:
    """Meet the other ranks in `store`; the best transport for where they are, and every rank's host."""
    from torch.distributed import PrefixStore

    store.set(f"host/{rank}", json.dumps(_identity()))
    found = [json.loads(store.get(f"host/{r}")) for r in range(size)]
    hosts = [name for name, _ in found]
    for r, (name, _) in enumerate(found):  # one name, two machines (cloned images): keep them apart
        twins = list(dict.fromkeys(key for n, key in found if n == name))
        if len(twins) > 1:
            hosts[r] = f"{name}#{twins.index(found[r][1])}"
    mine = [r for r in range(size) if hosts[r] == hosts[rank]]
    sharing = _share(store, mine, rank, size, timeout_s)
    if sharing is not None and len(mine) == size:
        return sharing, hosts
    messages = MessageTransport(PrefixStore("messages", store), rank, size, timeout_s=timeout_s)
    if sharing is None or len(set(hosts)) == size:
        return messages, hosts
    return HostsTransport.over(messages, sharing, hosts), hosts


def _identity() -> tuple[str, str]:
    """This host's name, and a key that two ranks share just when they can share memory."""
    name = os.environ.get("UNISONO_HOST", socket.gethostname())
    if not boards.usable():
        return name, f"{name} {os.getpid()}"
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        boot = file.read().strip()
    spaces = [os.readlink(f"/proc/self/ns/{kind}") for kind in ("net", "pid")]
    return name, " ".join([boot, name, str(os.getuid()), *spaces])


def _share(store: Store, mine: Sequence[int], rank: int, size: int, timeout_s: float) -> SharedTransport | None:
    """Shared memory with the ranks of my host; None where some rank anywhere cannot have it."""
    works = boards.usable() and os.environ.get("UNISONO_SHARED_MEMORY", "1") != "0"
    fd = os.memfd_create("unisono-board", os.MFD_CLOEXEC) if works and rank == mine[0] else -1
    try:
        if fd >= 0:
            store.set(f"board/{rank}", publish(fd))
        if works and rank != mine[0]:
            try:
                fd = open_published(store.get(f"board/{mine[0]}").decode())
            except OSError:
                works = False
        store.set(f"shares/{rank}", str(int(works)))
        if not all(store.get(f"shares/{r}") == b"1" for r in range(size)):
            return None
        return SharedTransport(fd, mine.index(rank), len(mine), timeout_s=timeout_s) if len(mine) > 1 else None
    finally:
        if fd >= 0:
            os.close(fd)


class HostsTransport(Transport):
    """Some ranks a host, on several hosts."""

    name = "shared memory and messages"

    def __init__(self, flat: Transport, inside: Transport | None, across: Transport | None, hosts: Sequence[str]):
        """`flat` joins all ranks, `inside` those of my host, `across` the leaders (None if I am not one)."""
        self.rank, self.size = flat.rank, flat.size
        self._flat, self._inside, self._across = flat, inside, across
        self._hosts = list(hosts)
        self._groups = [[r for r in range(self.size) if hosts[r] == h] for h in dict.fromkeys(hosts)]
        self._home = next(i for i, group in enumerate(self._groups) if self.rank in group)
        self._mine = self._groups[self._home]

    @classmethod
    def over(cls, flat: Transport, inside: Transport | None, hosts: Sequence[str]) -> HostsTransport:
        """Make the group of leaders (every rank calls it)."""
        leaders = [hosts.index(h) for h in dict.fromkeys(hosts)]
        rest = [r for r in range(flat.size) if r not in leaders]
        across = flat.split([leaders, rest] if rest else [leaders])
        return cls(flat, inside, across if flat.rank in leaders else None, hosts)

    def all_reduce(self, parts: Sequence[Tensor], op: Op) -> float:
        step: Op = "sum" if op == "mean" else op
        if op == "mean":
            for part in parts:
                part.mul_(1.0 / self.size)
        last = float("nan")
        if self._inside is not None:
            last = self._inside.all_reduce(parts, step)
        if self._across is not None:
            last = self._across.all_reduce(parts, step)
        if self._inside is not None:
            self._inside.broadcast(parts, 0)
        return last if len(self._groups) == 1 else float("nan")

    def reduce_scatter(self, x: Tensor, counts: Sequence[int], op: Op, out: Tensor) -> float:
        pieces = x.split(list(counts))
        lists = [[pieces[r] for r in group] for group in self._groups]
        work = torch.cat([p for group in lists for p in group]) if x.numel() else x.clone()
        if op == "mean":
            work.mul_(1.0 / self.size)
        step: Op = "sum" if op == "mean" else op
        sizes = [sum(p.numel() for p in group) for group in lists]
        mine = torch.empty(sizes[self._home], dtype=x.dtype)
        if self._inside is not None:
            self._inside.all_reduce([work], step)
        if self._across is not None:
            self._across.reduce_scatter(work, sizes, step, mine)
        if self._inside is not None:
            self._inside.broadcast([mine], 0)
        out.copy_(mine.split([counts[r] for r in self._mine])[self._mine.index(self.rank)])
        return float("nan")

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
        return float("nan")

    def broadcast(self, parts: Sequence[Tensor], src: int) -> float:
        home = next(i for i, group in enumerate(self._groups) if src in group)
        if self._inside is not None and home == self._home:
            self._inside.broadcast(parts, self._mine.index(src))
        if self._across is not None:
            self._across.broadcast(parts, home)
        if self._inside is not None and home != self._home:
            self._inside.broadcast(parts, 0)
        return float("nan")

    def all_to_all(self, parts: Sequence[Tensor], outs: Sequence[Tensor]) -> float:
        return self._flat.all_to_all(parts, outs)

    def send(self, x: Tensor, dst: int) -> None:
        if self._inside is not None and dst in self._mine:
            self._inside.send(x, self._mine.index(dst))
        else:
            self._flat.send(x, dst)

    def recv(self, x: Tensor, src: int) -> None:
        if self._inside is not None and src in self._mine:
            self._inside.recv(x, self._mine.index(src))
        else:
            self._flat.recv(x, src)

    def exchange(self, data: bytes) -> list[bytes]:
        return self._flat.exchange(data)

    def split(self, groups: Sequence[Sequence[int]]) -> Transport:
        members = group_of(groups, self.rank, self.size)
        hosts = [self._hosts[r] for r in members]
        flat = self._flat.split(groups)
        inside = self._split_inside(groups)
        if len(set(hosts)) == 1 and inside is not None:
            flat.close()
            return inside
        if len(set(hosts)) == len(hosts):
            return flat
        return HostsTransport.over(flat, inside, hosts)

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

    def close(self) -> None:
        for transport in (self._inside, self._across, self._flat):
            if transport is not None:
                transport.close()
