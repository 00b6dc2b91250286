"""SparseLoCo: DiLoCo whose differences travel as a few numbers of 2 bits; what is kept back replaces outer momentum.

Sarfi et al. 2025, arXiv:2508.15706.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from torch import nn
from torch.optim import Optimizer

from unisono.methods.buckets import BUCKET_BYTES
from unisono.methods.checks import AtLeast, Range
from unisono.methods.facts import Convergence, Example, Facts
from unisono.methods.reducers._chunked import Chunk, ValueBits
from unisono.methods.spec import build
from unisono.methods.strategies._anchored import Every
from unisono.methods.strategy import Accumulate, BucketBytes, Buffers, Pattern, Replica, Strategy
from unisono.world import World

FACTS = Facts(
    [
        Example("sparseloco(every=3, k=8, chunk=64)"),
        Example("sparseloco(every=4, k=4, chunk=32, bits=4, fragments=2, delay=1)"),
    ],
    refuses={
        "every=0": "every",
        "k=0": "numbers of a chunk",
        "chunk=64, k=65": "at most 64",
        "chunk=100": "power of two",
        "bits=1": "bits",
        "decay=0.0": "decay",
        "outer_lr=0.0": "outer_lr",
        "delay=5, every=5": "below",
    },
    own_gradients=True,
    convergence=Convergence("other", "models meet every `every` steps by their largest differences; tuned apart"),
)


@dataclass(frozen=True)
class sparseloco(Strategy):
    """Local steps; every H windows a few numbers of how far each worker has come:

        e_i <- decay e_i + (x0 - x_i),  s_i = the k largest of each chunk of e_i in 2 bits,  e_i <- e_i - s_i
        x0 <- x0 - outer_lr mean(s_i),  x_i <- x0

    It is `diloco(outer_momentum=0, outer_lr=1, reducer=topk(chunk=4096, k=64, bits=2, decay=0.95))` by one name. A
    message takes 14 bits for each number that is sent and 4 bytes a chunk: 1/141 of the model in float32.

    every: windows from one exchange of a parameter to the next (H).
    k, chunk, bits: so many numbers of each chunk are sent, so many bits each (None: in full).
    decay: how much of what was kept back stays from one exchange to the next.
    outer_lr: of the step on x0.
    fragments, delay, mix, buffers, accumulate, bucket_bytes: as for diloco.

    >>> sparseloco(every=30).decay
    0.95
    """

    every: Every = 30
    k: Annotated[int, AtLeast(1, "numbers of a chunk that are sent")] = 64
    chunk: Chunk = 4096
    bits: ValueBits = 2
    decay: Annotated[float, Range("how much of what was kept stays", above=0, at_most=1)] = 0.95
    outer_lr: Annotated[float, Range(above=0)] = 1.0
    fragments: Annotated[int, AtLeast(1, "parts of the model")] = 1
    delay: Annotated[int, AtLeast(0, "windows until an exchange is used")] = 0
    mix: Annotated[float | None, Range("the share that stays local", at_least=0, below=1)] = None
    buffers: Buffers = "average"
    accumulate: Accumulate = 1
    bucket_bytes: BucketBytes = BUCKET_BYTES

    def as_diloco(self) -> Strategy:
        """The same as diloco with a reducer."""
        reducer = f"topk(chunk={self.chunk}, k={self.k}, bits={self.bits}, decay={self.decay!r})"
        made: Strategy = build(
            f"diloco(every={self.every}, outer_lr={self.outer_lr!r}, outer_momentum=0.0, fragments={self.fragments}, "
            f"delay={self.delay}, mix={self.mix!r}, reducer={reducer}, buffers={self.buffers}, "
            f"accumulate={self.accumulate}, bucket_bytes={self.bucket_bytes})"
        )
        return made

    def check(self, model: nn.Module, optimizer: Optimizer, world: World) -> None:
        self.as_diloco().check(model, optimizer, world)

    def pattern(self) -> Pattern:
        return self.as_diloco().pattern()

    def make(self, model: nn.Module, optimizer: Optimizer, world: World) -> Replica:
        replica = self.as_diloco().make(model, optimizer, world)
        replica.strategy = self
        return replica
