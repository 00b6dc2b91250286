"""Synchronous all-reduce: after backward, every gradient is the mean over the workers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Literal

import torch
from torch import nn
from torch.optim import Optimizer

from unisono.buckets import BUCKET_BYTES, LARGE_BUCKET_BYTES
from unisono.checks import Note
from unisono.exchange.overlap import Exchange, split_sparse
from unisono.exchange.reduction import Reduction, check_real, overlap_pays
from unisono.exchange.windows import Counter, Windows
from unisono.facts import Convergence, Example, Facts
from unisono.reducer import Reducer
from unisono.reducers.dense import dense
from unisono.strategy import Accumulate, BucketBytes, Buffers, Change, Replica, Residual, Strategy
from unisono.strategy.mistakes import GradientProbe
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
    bucket_bytes: how much travels together. None: 25 MiB, or 128 MiB where a GPU compresses.
    order: of the gradients in the buckets: against that in which parameters are "registered", or as they were "ready"
        in the first window on rank 0.
    """

    reducer: Reducer | None = None
    accumulate: Accumulate = 1
    buffers: Buffers = "broadcast"
    overlap: Annotated[bool | None, Note("None: as it pays")] = None
    bucket_bytes: BucketBytes | None = None
    order: Literal["registered", "ready"] = "registered"

    def make(self, model: nn.Module, optimizer: Optimizer, world: World) -> Replica:
        return AllReduceReplica(model, optimizer, world, self)


class AllReduceReplica(Replica):
    """Gradients through buckets and a reducer; in a world of one there is only counting to do."""

    strategy: allreduce
    slow_ranks = "deal"
    same_parameters = True

    def __init__(self, model: nn.Module, optimizer: Optimizer, world: World, strategy: allreduce) -> None:
        super().__init__(model, optimizer, world, strategy)
        self.reducer = strategy.reducer if strategy.reducer is not None else dense()
        if self.reducer.check is not None:
            self.reducer.check(optimizer, world)
        self._reduction = Reduction(self.reducer, optimizer, partial(self.share_buffers, strategy.buffers), "gradients")
        self._exchange: Exchange | Counter | None = None
        self._probe: GradientProbe | None = None
        try:
            self.start()
        except BaseException:
            self.close()
            raise

    def start(self) -> None:
        if self.world.size == 1 and self.reducer.exact:
            last = [p for p in self.model.parameters() if p.requires_grad][-1]  # the first that backward reaches
            accumulate = self.strategy.accumulate
            self._exchange = Counter(last, accumulate=accumulate, advance=self.advance, late=last.is_cuda)
            return
        dense_ones, sparse_ones = split_sparse(self.model)
        check_real(self.reducer, dense_ones)
        if self.reducer.exact:
            self._probe = GradientProbe(self.model.parameters(), self.world)
        pays = overlap_pays(self.world)
        overlap = pays if self.strategy.overlap is None else self.strategy.overlap
        self._exchange = Exchange(
            dense_ones,
            sparse_ones,
            self.world,
            self._reduction,
            bucket_bytes=self._bucket_bytes(overlap),
            overlap=overlap,
            inline=self.reducer.stages is None or not pays,
            accumulate=self.strategy.accumulate,
            advance=self.advance,
            by_ready=self.strategy.order == "ready",
            apart=self._apart,
        )
        self._reduction.warn_if_more_than_dense(self.world)

    @property
    def _apart(self) -> bool:
        """Whether large gradients are exchanged where autograd put them."""
        return self.reducer.apart and self.world.reads_peers

    def _bucket_bytes(self, overlap: bool) -> int:
        if self.strategy.bucket_bytes is not None:
            return self.strategy.bucket_bytes
        on_gpu = any(p.is_cuda for p in self.model.parameters())
        large = not self.reducer.exact if on_gpu else self._apart and not overlap  # nothing then waits to be filled
        return LARGE_BUCKET_BYTES if large else BUCKET_BYTES

    def advance(self) -> None:
        if self._probe is not None:
            self._probe.compare()
        super().advance()

    def before_step(self) -> None:
        if self._exchange is not None:
            self._exchange.before_step()

    def after_step(self) -> None:
        if self._exchange is not None:
            self._exchange.after_step()

    def find_windows(self) -> Windows | None:
        return self._exchange

    def watch(self, scaler: torch.amp.GradScaler) -> None:
        super().watch(scaler)
        self._reduction.scale = scaler.get_scale

    def shared_state(self) -> dict[str, Any]:
        if self._exchange is not None:
            self._exchange.catch_up()
        return {**super().shared_state(), "reducer": self._reduction.state_dict()["shared"]}

    def local_state(self) -> dict[str, Any]:
        return {"reducer": self._reduction.state_dict()["local"]}

    def load_local(self, shared: dict[str, Any], locals_: Sequence[dict[str, Any]], *, same_world: bool) -> None:
        if "each" in shared.get("reducer", ()):  # else it is another strategy's checkpoint
            self._reduction.load_state_dict(shared["reducer"], [part["reducer"] for part in locals_])

    def unsent(self) -> Residual:
        return self._reduction.unsent()

    def take_unsent(self, unsent: Residual) -> None:
        if unsent.unit == "gradients":
            self._reduction.take_unsent(unsent)
        else:
            super().take_unsent(unsent)

    def stop(self, change: Change | None = None) -> None:
        if self._exchange is not None:
            self._exchange.close()
            self._exchange = None
        if self._probe is not None:
            self._probe.close()
            self._probe = None

    def progress(self) -> list[Any]:
        return [self.step, self._reduction.keeps_own]

    def carry(self, change: Change, shared: dict[str, Any]) -> str:
        """Bring the reducer's state into the new world."""
        self._reduction.move(shared["reducer"], keep=change.keeps, factor=change.factor)
        _, keeps_own = change.progress[change.source]
        return change.describe_unsent() if keeps_own else ""

    def close(self) -> None:
        super().close()
        self.stop()
