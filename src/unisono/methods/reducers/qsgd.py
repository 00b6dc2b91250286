"""QSGD: random rounding to uniform levels of a block's norm (Alistarh et al. 2017, arXiv:1610.02132)."""

from __future__ import annotations

import math

from unisono.methods.checks import validate
from unisono.methods.facts import Convergence, Example, Facts
from unisono.methods.kernels.quantise import Levels
from unisono.methods.reducer import Reducer
from unisono.methods.reducers._quantised import Bits, Block, build_quantised, count_bytes, make_wire

FACTS = Facts(
    [
        Example("qsgd", memory=False, bytes=count_bytes(lambda n: n // 2 + 4 * math.ceil(n / 8192))),
        Example("qsgd(bits=8, block=64)", memory=False, bytes=count_bytes(lambda n: n + 4 * math.ceil(n / 64))),
        Example("qsgd(elias=True)", memory=False),
    ],
    refuses={"bits=3": "bits", "block=100": "power of two", "elias=1": "elias", "seed=0.5": "seed"},
    convergence=Convergence("compressed", "gradients to 4 bits, at random and right in the mean: more noise"),
)


@validate
def qsgd(bits: Bits = 4, *, block: Block = 8192, elias: bool = False, seed: int = 0) -> Reducer:
    """Send a sign and one of s + 1 uniform levels for every number: unbiased, so no error feedback is needed.

    With the block's norm |v| and r = |v_i| / |v| between levels l/s and (l+1)/s, where s = 2^(bits-1) - 1:

        Q(v_i) = |v| sign(v_i) (l + 1)/s  with probability  r s - l,  else  |v| sign(v_i) l/s

    A message of d numbers takes bits d/8 + 4 ceil(d/block) bytes. Every rank sends N - 1 of them; where it is
    less, 2(N-1) of an N-th each, and means are rounded again. A block that holds an inf or NaN is NaN everywhere.

    bits: 2, 4 or 8 for each number.
    block: numbers that share a norm: a power of two from 64 to 16384. Smaller: less noise, more norms.
    elias: code gaps between nonzero numbers and levels by Elias's code, for fewer bytes where most are zero (with
        4 bits nearly all are). How many depends on the data; the coding runs on the CPU and waits for it on CUDA.
    seed: of the rounding. It differs from rank to rank, and from step to step.

    >>> from unisono.spec import build
    >>> build("qsgd(bits=8)", kind="reducer").codec.nbytes(8192)
    8196
    """
    levels = Levels(bits, block, exponential=False)
    return build_quantised("qsgd", make_wire(levels, elias), seed, levels.noise)
