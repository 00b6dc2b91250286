"""One rank of N that need not exist: nothing moves, but every operation has its bytes and its seconds."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from unisono.predict.costs import sent_share
from unisono.world.transports import UNKNOWN, Op, Transport, find_group
from unisono.world.transports.arithmetic import count_bytes, multiply


class SimulatedTransport(Transport):
    """Costs of rings over links of `bits_per_s` and `latency_s`; `seconds` sums them up.

    Tensors are left as they are: the other ranks count as equal to this one. Meta tensors serve as well.
    """

    name = "simulated"

    def __init__(
        self, rank: int, size: int, *, bits_per_s: float, latency_s: float, parent: SimulatedTransport | None = None
    ) -> None:
        self.rank, self.size = rank, size
        self.bits_per_s, self.latency_s = bits_per_s, latency_s
        self._spent: list[float] = parent._spent if parent is not None else [0.0]  # one clock for worlds inside worlds

    @property
    def seconds(self) -> float:
        """What all operations so far would have taken, one after the other."""
        return self._spent[0]

    def _cost(self, nbytes: float, messages: int) -> float:
        self._spent[0] += nbytes * 8 / self.bits_per_s + messages * self.latency_s
        return UNKNOWN

    def all_reduce(self, parts: Sequence[Tensor], op: Op) -> float:
        n = self.size
        if op == "sum":
            for part in parts:
                multiply(part, n)
        return self._cost(sent_share("all_reduce", n) * count_bytes(parts), 2 * (n - 1))

    def reduce_scatter(self, x: Tensor, counts: Sequence[int], op: Op, out: Tensor) -> float:
        out.copy_(x.split(list(counts))[self.rank])
        if op == "sum":
            multiply(out, self.size)
        return self._cost(sent_share("reduce_scatter", self.size) * count_bytes([x]), self.size - 1)

    def all_gather(self, x: Tensor, outs: Sequence[Tensor]) -> float:
        for out in outs:
            out.copy_(x)
        return self._cost((self.size - 1) * count_bytes([x]), self.size - 1)

    def broadcast(self, parts: Sequence[Tensor], src: int) -> float:
        return self._cost(count_bytes(parts), self.size - 1)

    def all_to_all(self, parts: Sequence[Tensor], outs: Sequence[Tensor]) -> float:
        for part, out in zip(parts, outs, strict=True):
            if out.shape == part.shape:
                out.copy_(part)
            else:  # what another sends that is not as I do
                out.zero_()
        return self._cost(count_bytes([p for r, p in enumerate(parts) if r != self.rank]), self.size - 1)

    def send(self, x: Tensor, dst: int) -> None:
        self._cost(count_bytes([x]), 1)

    def recv(self, x: Tensor, src: int) -> None:
        self._cost(count_bytes([x]), 1)

    def exchange(self, data: bytes) -> list[bytes]:
        self._cost((self.size - 1) * len(data), self.size - 1)
        return [data] * self.size

    def split(self, groups: Sequence[Sequence[int]]) -> Transport:
        mine = find_group(groups, self.rank, self.size)
        return SimulatedTransport(
            mine.index(self.rank), len(mine), bits_per_s=self.bits_per_s, latency_s=self.latency_s, parent=self
        )
