"""Random bits from counters: every number is a function of who draws it, when, and for which element.

Nothing is kept between draws, so a resumed run repeats them, and CPU and CUDA draw the same.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Words = npt.NDArray[Any]

WEYL, MIX = 0x9E3779B9, 0x7FEB352D  # the golden ratio's odd fraction; a multiplier whose bits spread well
CHUNK = 1 << 17  # numbers worked on at a time: a few such lines stay in a core's cache
_MASK = (1 << 64) - 1
_WORD = 0xFFFFFFFF


class Noise(NamedTuple):
    """A stream of random words. Word i, all modulo 2^32, with c = i + start:

    x = c * WEYL + shift;  x ^= x >> 16;  x *= MIX;  x ^= x >> 15;  word = x * factor

    `factor` is odd. The high bits of a word are its best: take as many as you need from the top.
    """

    shift: int
    factor: int
    start: int = 0

    def after(self, n: int) -> Noise:
        """The same stream without its first n words."""
        return self._replace(start=self.start + n)


def noise(seed: int, step: int, rank: int = 0, bucket: int = 0, stream: int = 0) -> Noise:
    """The stream of one rank's bucket in one step; `stream` tells several draws of a step apart.

    >>> noise(0, 1) == noise(0, 1), noise(0, 1) == noise(0, 2)
    (True, False)
    """
    state = 0
    for word in (seed, step, rank, bucket, stream):
        state = _mix((state + word * 0x9E3779B97F4A7C15 + 0x632BE59BD9B4E019) & _MASK)
    return Noise(state & _WORD, state >> 32 | 0x40000001)


def _mix(z: int) -> int:
    """SplitMix64's finaliser."""
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)


def bits(source: Noise, n: int, device: torch.device | str = "cpu") -> Tensor:
    """The first n words of a stream, as int32 (their bits are those of uint32)."""
    if torch.device(device).type == "cpu":
        out = torch.empty(n, dtype=torch.int32)
        words, spare = out.numpy().view(np.uint32), np.empty(min(n, CHUNK), np.uint32)
        for at in range(0, n, CHUNK):
            chunk = words[at : at + CHUNK]
            draw(source.after(at), chunk, spare[: len(chunk)])
        return out
    if torch.device(device).type == "cuda":
        try:
            from unisono.methods.kernels import noise_triton
        except ImportError:
            pass
        else:
            return noise_triton.bits(source, n, torch.device(device))
    x = torch.arange(source.start, source.start + n, dtype=torch.int64, device=device)
    x = (x * WEYL + source.shift) & _WORD
    x = ((x ^ (x >> 16)) * MIX) & _WORD
    x = ((x ^ (x >> 15)) * source.factor) & _WORD
    return torch.where(x > 0x7FFFFFFF, x - (1 << 32), x).to(torch.int32)


def uniform(source: Noise, n: int, device: torch.device | str = "cpu") -> Tensor:
    """The first n numbers of a stream, float32 from 0 to below 1 in steps of 2^-24.

    >>> x = uniform(noise(0, 1), 1000)
    >>> bool((x >= 0).all()), bool((x < 1).all()), round(float(x.mean()), 1)
    (True, True, 0.5)
    """
    return ((bits(source, n, device) >> 8) & 0xFFFFFF) * 2.0**-24


def draw(source: Noise, out: Words, spare: Words) -> None:
    """Fill `out`, at most CHUNK words of uint32, using `spare` of the same length."""
    np.add(_COUNTER[: len(out)], np.uint32((source.start * WEYL + source.shift) & _WORD), out=out)
    np.right_shift(out, np.uint32(16), out=spare)
    np.bitwise_xor(out, spare, out=out)
    np.multiply(out, np.uint32(MIX), out=out)
    np.right_shift(out, np.uint32(15), out=spare)
    np.bitwise_xor(out, spare, out=out)
    np.multiply(out, np.uint32(source.factor), out=out)


_COUNTER = np.arange(CHUNK, dtype=np.uint32) * np.uint32(WEYL)
