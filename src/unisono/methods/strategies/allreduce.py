"""Synchronous all-reduce: after backward, every gradient is the mean over the workers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Any, Literal

import torch
from torch import nn
from torch.optim import LBFGS, Optimizer

from unisono.methods.buckets import ALONE_BUCKET_BYTES, BUCKET_BYTES, LARGE_BUCKET_BYTES
from unisono.methods.checks import Note
from unisono.methods.exchange.noise_scale import NoiseScale
from unisono.methods.exchange.overlap import Exchange, split_sparse
from unisono.methods.exchange.reduction import Reduction, Residual, check_real, overlap_pays
from unisono.methods.exchange.windows import count_windows
from unisono.methods.facts import Convergence, Example, Facts
from unisono.methods.reducer import Reducer
from unisono.methods.reducers.dense import dense
from unisono.methods.strategy import Accumulate, BucketBytes, Buffers, Change, Keeps, Pattern, Replica, Strategy
from unisono.methods.strategy.mistakes import GradientProbe
from unisono.world import World

FACTS = Facts(
    [Example("allreduce", exact=True), Example("allreduce(order=ready, overlap=True, bucket_bytes=256)", exact=True)],
    refuses={
        "accumulate=0": "accumulate",
        "accumulate=-3": "accumulate",
        "buffers=sometimes": "buffers",
        "bucket_bytes=0": "bucket_bytes",
        "order=random": "order",
    },
    convergence=Convergence("exact", "as one process on the joined batches"),
)


@dataclass(frozen=True)
class allreduce(Strategy):
    """Exchange gradients in every window: g = (1/N) sum of all g_i, while backward goes on.

    reducer: how the mean is taken (None: exactly).
    accumulate: backward passes a window; gradients add up locally and are exchanged with the last one.
    buffers: "broadcast" rank 0's after every exchange, "average" them, or leave them "local".
    overlap: exchange a bucket as soon as it is full, or all after backward. None: as soon as it is full, but
        where workers share memory and leave no core free, an exchange would only take compute's place: after.
    bucket_bytes: how much travels together. None: 25 MiB, or 128 MiB where a GPU compresses (1 GiB in a world of one).
    order: of the gradients in the buckets: against that in which parameters are "registered", or as they were "ready"
        in the first window on rank 0.
    """

    reducer: Reducer | None = None
    accumulate: Accumulate = 1
    buffers: Buffers = "broadcast"
    overlap: Annotated[bool | None, Note("None: as it pays")] = None
    bucket_bytes: BucketBytes | None = None
    order: Literal["registered", "ready"] = "registered"

    def pattern(self) -> Pattern:
        return replace(super().pattern(), keeps=Keeps.as_set(self))

    def make(self, model: nn.Module, optimizer: Optimizer, world: World) -> Replica:
        return AllReduceReplica(model, optimizer, world, self)


class AllReduceReplica(Replica):
    """Gradients through buckets and a reducer; in a world of one there is only counting to do."""

    strategy: allreduce
    reduction: Reduction
    slow_ranks = "deal"
    same_parameters = True

    def __init__(self, model: nn.Module, optimizer: Optimizer, world: World, strategy: allreduce) -> None:
        self.reducer = strategy.reducer if strategy.reducer is not None else dense()
        if self.reducer.check is not None:
            self.reducer.check(optimizer, world)
        super().__init__(model, optimizer, world, strategy)
        self.reduction = Reduction(self.reducer, optimizer, partial(self.share_buffers, strategy.buffers), "gradients")
        self._probe: GradientProbe | None = None
        self.start_or_close()

    def start(self) -> None:
        alone = self.world.size == 1 and self.reducer.exact
        if alone and not self.reduction.keeps_own:
            self.windows = count_windows(self.model, self.strategy.accumulate, self.advance, late=True)
            return
        dense_ones, sparse_ones = split_sparse(self.model)
        check_real(self.reducer, dense_ones)
        if self.reducer.exact and not alone:
            self._probe = GradientProbe(self.model.parameters(), self.world)
        apart = self.reducer.apart and self.world.takes_parts
        self.windows = Exchange(
            dense_ones,
            sparse_ones,
            self.world,
            self.reduction,
            bucket_bytes=self._find_bucket_bytes(apart),
            overlap=self.strategy.overlap,
            accumulate=self.strategy.accumulate,
            advance=self.advance,
            by_ready=self.strategy.order == "ready",
            apart=apart,
        )
        self.noise = self.windows.noise = NoiseScale(self.world) if self.reducer.exact and not alone else None
        self.reduction.warn_if_more_than_dense(self.world)

    def _find_bucket_bytes(self, apart: bool) -> int:
        if self.strategy.bucket_bytes is not None:
            return self.strategy.bucket_bytes
        on_gpu = any(p.is_cuda for p in self.model.parameters())
        if on_gpu and self.world.size == 1:  # nothing travels meanwhile
            return ALONE_BUCKET_BYTES
        overlap = overlap_pays(self.world) if self.strategy.overlap is None else self.strategy.overlap
        large = not self.reducer.exact if on_gpu else apart and not overlap  # nothing then waits to be filled
        return LARGE_BUCKET_BYTES if large else BUCKET_BYTES

    def take_loss(self, closure: Callable[[], Any]) -> Any:
        """LBFGS decides by the loss how far it steps, and when to stop: by that of all ranks."""
        loss = closure()
        if not isinstance(self.stepping, LBFGS) or self.world.size == 1:
            return loss
        mean = torch.as_tensor(loss).detach().double() * self.world.weight
        self.world.run_tolerating_loss(lambda: self.world.all_reduce(mean, "mean", tag="loss of LBFGS").wait())
        return mean

    def advance(self) -> None:
        if self._probe is not None:
            self._probe.compare()
        super().advance()

    def shared_state(self) -> dict[str, Any]:
        if self.windows is not None:
            self.windows.catch_up()
        return super().shared_state()

    def take_unsent(self, unsent: Residual) -> None:
        super().take_unsent(unsent)
        self._send_alone()

    def load_local(self, shared: dict[str, Any], locals_: Sequence[dict[str, Any]], *, same_world: bool) -> None:
        super().load_local(shared, locals_, same_world=same_world)
        self._send_alone()

    def _send_alone(self) -> None:
        """What was kept back goes with the next gradients, also where there is nobody to send it to."""
        if self.world.size == 1 and self.reducer.exact and self.reduction.keeps_own and self.windows is not None:
            self.windows.close()
            self.start()

    def stop(self, change: Change | None = None) -> None:
        if self._probe is not None:
            self._probe.close()
            self._probe = None

    def progress(self) -> list[Any]:
        return [self.step, self.reduction.keeps_own]

    def carry(self, change: Change, shared: dict[str, Any]) -> str:
        """Bring the reducer's state into the new world."""
        super().carry(change, shared)
        _, keeps_own = change.progress[change.source]
        return change.describe_unsent() if keeps_own else ""
