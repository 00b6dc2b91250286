"""Signs on the wire: a bit for every number of a bucket, and a float for each of its tensors."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from itertools import pairwise

import torch
from torch import Tensor

from unisono.methods.buckets import Bucket
from unisono.methods.kernels import bits
from unisono.methods.kernels.graphs import Graphs
from unisono.methods.kernels.noise import CHUNK
from unisono.methods.kernels.select import has_triton


class Signs:
    """The messages of a bucket. One of n numbers, from `lo` on in the bucket's line, has the floats of all the
    bucket's tensors and n bits, 1 where a number is negative: 4 T + n/8 bytes."""

    def __init__(self, bucket: Bucket) -> None:
        self.layout = bucket.layout
        self.starts, self.counts = self.layout.starts, self.layout.lengths
        self.n, self.device = bucket.flat.numel(), bucket.device
        if bucket.flat.is_cuda:  # whose each eight numbers are: tensors start at multiples of eight
            eights = torch.tensor([(b - a) // 8 for a, b in pairwise([*self.starts, self.n])])
            whose = torch.repeat_interleave(torch.arange(len(eights), dtype=torch.int32), eights)
            self._whose = whose.to(self.device)

    def nbytes(self, n: int) -> int:
        """Bytes of a message of n numbers, a multiple of 8."""
        return 4 * len(self.starts) + n // 8

    def average_magnitudes(self, line: Tensor, lo: int = 0) -> Tensor:
        """The mean magnitude of each tensor's numbers in a line: T floats; 0 where it has none, NaN where one is
        not finite."""
        floats = torch.zeros(len(self.starts), dtype=torch.float32, device=self.device)
        found = list(self.layout.overlaps(lo, lo + line.numel()))
        if found:
            wide = torch.float64 if line.dtype == torch.float64 else torch.float32
            pieces_of = [line[a - lo : b - lo] for _, a, b in found]
            norms = (
                torch._foreach_norm(pieces_of, 1, dtype=wide) if line.is_cuda else [*map(_sum_magnitudes, pieces_of)]
            )
            sizes = torch._foreach_div(norms, [float(b - a) for _, a, b in found])
            pieces = dict(zip((i for i, _, _ in found), sizes, strict=True))
            empty = floats.new_zeros((), dtype=wide)
            floats.copy_(torch.stack([pieces.get(i, empty) for i in range(len(self.starts))]))
        return floats + (floats - floats)

    def encode(
        self, line: Tensor, floats: Tensor, zeros: Callable[[int, int], Tensor] | None = None, room: int = 0
    ) -> Tensor:
        """A message, with room for that many numbers. `zeros(from, to)` says which zeros of the line count as
        negative: none by default."""
        n = max(line.numel(), room)
        message = torch.empty(self.nbytes(n), dtype=torch.uint8, device=line.device)
        head = 4 * len(self.starts)
        message[head + line.numel() // 8 :] = 0
        message[:head].view(torch.float32).copy_(floats)
        for a in range(0, line.numel(), self._chunk_length()):
            part = line[a : a + self._chunk_length()]
            negative = part < 0
            if zeros is not None and (line.is_cuda or int(torch.count_nonzero(part)) < part.numel()):
                negative |= (part == 0) & zeros(a, a + part.numel())
            message[head + a // 8 : head + (a + part.numel()) // 8] = bits.pack(negative)
        return message

    def read_floats(self, message: Tensor) -> Tensor:
        """The floats of a message."""
        return message[: 4 * len(self.starts)].view(torch.float32)

    def decode(self, message: Tensor, out: Tensor, lo: int = 0, *, over: int = 1, add: bool = False) -> None:
        """Write each tensor's float over `over`, with the signs of its numbers, into `out`, or add it. On CUDA
        the gaps between tensors get numbers too."""
        floats = self.read_floats(message).to(out.dtype) / over
        packed = message[4 * len(self.starts) :]
        if out.is_cuda:
            size = floats.index_select(0, self._whose[lo // 8 : (lo + out.numel()) // 8])[:, None]
            negative = bits.unpack(packed[: out.numel() // 8]).view(-1, 8)
            values = torch.where(negative, -size, size).view(-1)
            out.add_(values) if add else out.copy_(values)
            return
        for i, first, last in self.layout.overlaps(lo, lo + out.numel()):
            for a in range(first - lo, last - lo, CHUNK):
                b = min(a + CHUNK, last - lo)
                negative = bits.unpack(packed[a // 8 : -(-b // 8)])[: b - a]
                values = negative.to(out.dtype).mul_(-2).add_(1).mul_(floats[i])
                if add:
                    out[a:b].add_(values)
                else:
                    out[a:b] = values

    def zero_gaps(self, line: Tensor) -> None:
        """Zeros between the tensors, where `decode` left others."""
        if line.is_cuda and (gaps := self.layout.gaps(line)):
            torch._foreach_zero_(gaps)

    def _chunk_length(self) -> int:
        return CHUNK if self.device.type == "cpu" else max(self.n, 1)


class SignsOnCuda:
    """The messages of a bucket on CUDA, in memory that stays where it is; a few launches for all of its tensors."""

    def __init__(self, bucket: Bucket, signs: Signs) -> None:
        from unisono.methods.kernels import signs_triton

        self.kernels = signs_triton
        self.tables = signs_triton.Tables(signs.starts, signs.counts, signs.n, signs.device)
        self.mine = torch.empty(signs.nbytes(signs.n), dtype=torch.uint8, device=signs.device)
        self.graphs = Graphs()
        wide = torch.float64 if bucket.dtype == torch.float64 else torch.float32
        self._wide = None if bucket.dtype == wide else torch.empty_like(bucket.flat, dtype=wide)
        self._messages = self.mine[None]

    def find_line(self, bucket: Bucket) -> Tensor:
        """Memory for sums: the bucket's own, or one of float32 where it has 16 bits."""
        return bucket.flat if self._wide is None else self._wide

    def find_messages(self, size: int) -> Tensor:
        """Memory for every rank's message, a row each, on boundaries of 16 bytes."""
        if len(self._messages) != size or size == 1:
            n = len(self.mine)
            self._messages = self.mine[None] if size == 1 else self.mine.new_empty(size, -(-n // 16) * 16)[:, :n]
        return self._messages


def on_cuda(bucket: Bucket) -> SignsOnCuda | None:
    """A bucket's messages where Triton can make them; made once."""
    if not bucket.flat.is_cuda or not has_triton():
        return None
    if bucket not in _on_cuda:
        _on_cuda[bucket] = SignsOnCuda(bucket, messages_of(bucket))
    return _on_cuda[bucket]


_on_cuda: weakref.WeakKeyDictionary[Bucket, SignsOnCuda] = weakref.WeakKeyDictionary()


def _sum_magnitudes(line: Tensor) -> Tensor:
    """The sum of magnitudes, piece by piece: `norm` is slower on the CPU."""
    wide = torch.float64 if line.dtype == torch.float64 else torch.float32
    return torch.stack([part.to(wide).abs().sum() for part in line.split(CHUNK)]).sum()


def messages_of(bucket: Bucket) -> Signs:
    """A bucket's messages; made once."""
    if bucket not in _messages:
        _messages[bucket] = Signs(bucket)
    return _messages[bucket]


_messages: weakref.WeakKeyDictionary[Bucket, Signs] = weakref.WeakKeyDictionary()
