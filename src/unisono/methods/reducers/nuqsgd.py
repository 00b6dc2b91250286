"""NUQSGD: random rounding to levels that halve towards zero (Ramezani-Kebrya et al. 2021, arXiv:2104.13818)."""

from __future__ import annotations

import math

from unisono.methods.checks import validate
from unisono.methods.facts import Convergence, Example, Facts
from unisono.methods.kernels.quantise import Levels
from unisono.methods.reducer import Reducer
from unisono.methods.reducers._quantised import Bits, Block, build_quantised, count_bytes, make_wire

FACTS = Facts(
    [
        Example("nuqsgd", memory=False, bytes=count_bytes(lambda n: n // 2 + 4 * math.ceil(n / 8192))),
        Example("nuqsgd(bits=8, block=64)", memory=False, bytes=count_bytes(lambda n: n + 4 * math.ceil(n / 64))),
        Example("nuqsgd(elias=True)", memory=False),
    ],
    refuses={"bits=3": "bits", "block=100": "power of two", "elias=1": "elias", "seed=0.5": "seed"},
    convergence=Convergence("compressed", "gradients to 4 bits, at random and right in the mean: more noise"),
)


@validate
def nuqsgd(bits: Bits = 4, *, block: Block = 8192, elias: bool = False, seed: int = 0) -> Reducer:
    """Send a sign and one of the levels {0, 2^-s, ..., 1/2, 1} for every number, s = 2^(bits-1) - 2; unbiased.

    With the block's norm |v| and r = |v_i| / |v| between neighbouring levels lo and hi:

        Q(v_i) = |v| sign(v_i) hi  with probability  (r - lo)/(hi - lo),  else  |v| sign(v_i) lo

    so that E|Q(v) - v|^2 <= (1/8 + block 2^(-2s-2)) |v|^2. Most numbers of a block are small against its norm:
    on Gaussian blocks of 8192 at 4 bits the left side is 0.33 |v|^2, with uniform levels (`qsgd`) 9.3 |v|^2.

    A message of d numbers takes bits d/8 + 4 ceil(d/block) bytes. Every rank sends N - 1 of them; where it is
    less, 2(N-1) of an N-th each, and means are rounded again. A block that holds an inf or NaN is NaN everywhere.

    bits: 2, 4 or 8 for each number.
    block: numbers that share a norm: a power of two from 64 to 16384. Smaller: less noise, more norms.
    elias: code gaps between nonzero numbers and levels by Elias's code, for fewer bytes: about 2.3 bits a number
        of a Gaussian block. How many depends on the data; the coding runs on the CPU and waits for it on CUDA.
    seed: of the rounding. It differs from rank to rank, and from step to step.

    >>> from unisono.spec import build
    >>> build("nuqsgd", kind="reducer").codec.nbytes(8192)
    4100
    """
    levels = Levels(bits, block, exponential=True)
    return build_quantised("nuqsgd", make_wire(levels, elias), seed, levels.noise)
