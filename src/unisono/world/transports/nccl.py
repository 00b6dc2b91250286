"""CUDA tensors from device to device through NCCL, in the order of the stream they are called on."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from unisono.world.transports import UNKNOWN, Op, Transport, find_group

if TYPE_CHECKING:
    from torch.distributed import Store

_OPS: dict[str, Any] = {
    "sum": dist.ReduceOp.SUM,
    "mean": dist.ReduceOp.AVG,
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
    "product": dist.ReduceOp.PRODUCT,
}


class NcclTransport(Transport):
    """One rank with a CUDA device of its own. Calls return at once; the current stream has the result."""

    name = "NCCL"
    meets_on_host = False

    def __init__(self, store: Store, rank: int, size: int, device: torch.device, *, timeout_s: float) -> None:
        self.rank, self.size, self._device = rank, size, device
        self._store, self._timeout_s = store, timeout_s
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=timeout_s)
        self._group: Any = dist.ProcessGroupNCCL(store, rank, size, options)
        self._splits = 0

    def all_reduce(self, parts: Sequence[Tensor], op: Op) -> float:
        options = dist.AllreduceOptions()
        options.reduceOp = _OPS[op]
        for part in parts:
            if part.numel():
                self._group.allreduce([part], options).wait()
        return UNKNOWN

    def reduce_scatter(self, x: Tensor, counts: Sequence[int], op: Op, out: Tensor) -> float:
        if len(set(counts)) == 1:
            options = dist.ReduceScatterOptions()
            options.reduceOp = _OPS[op]
            self._group._reduce_scatter_base(out, x, options).wait()
        else:
            whole = x.clone()
            self.all_reduce([whole], op)
            out.copy_(whole.split(list(counts))[self.rank])
        return UNKNOWN

    def all_gather(self, x: Tensor, outs: Sequence[Tensor]) -> float:
        longest = max(o.numel() for o in outs)
        mine = torch.zeros(longest, dtype=x.dtype, device=x.device)
        mine[: x.numel()] = x
        every = torch.empty(longest * self.size, dtype=x.dtype, device=x.device)
        if longest:
            self._group._allgather_base(every, mine).wait()
        for r, out in enumerate(outs):
            out.copy_(every[r * longest : r * longest + out.numel()])
        return UNKNOWN

    def broadcast(self, parts: Sequence[Tensor], src: int) -> float:
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = src, 0
        for part in parts:
            if part.numel():
                self._group.broadcast([part], options).wait()
        return UNKNOWN

    def all_to_all(self, parts: Sequence[Tensor], outs: Sequence[Tensor]) -> float:
        self._group.alltoall(list(outs), list(parts)).wait()
        return UNKNOWN

    def send(self, x: Tensor, dst: int) -> None:
        self._group.send([x], dst, 0).wait()

    def recv(self, x: Tensor, src: int) -> None:
        self._group.recv([x], src, 0).wait()

    def exchange(self, data: bytes) -> list[bytes]:
        raise AssertionError("objects travel over the CPU transport")

    def split(self, groups: Sequence[Sequence[int]]) -> Transport:
        mine = find_group(groups, self.rank, self.size)
        self._splits += 1
        store = dist.PrefixStore(f"{self._splits}/{'-'.join(map(str, mine))}", self._store)
        return NcclTransport(store, mine.index(self.rank), len(mine), self._device, timeout_s=self._timeout_s)

    def close(self) -> None:
        self._group.abort()
