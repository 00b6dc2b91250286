"""QAdam: Adam whose second moment freezes after a warm-up; from then on momenta travel, a byte a number.

BAGUA (Gan et al. 2021, arXiv:2107.01499), after 1-bit Adam (Tang et al. 2021, arXiv:2102.02888). The schedule by which
v is still updated: 0/1 Adam (Lu et al. 2022, arXiv:2202.06009).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from unisono.methods.buckets import BUCKET_BYTES, Bucket
from unisono.methods.checks import AtLeast, Note
from unisono.methods.exchange.overlap import Exchange
from unisono.methods.exchange.reduction import Reduction
from unisono.methods.exchange.windows import count_windows
from unisono.methods.facts import Convergence, Example, Facts
from unisono.methods.reducer import Reduced, Reducer, Stages, State, staged, stages_of
from unisono.methods.spec import build
from unisono.methods.strategies._frozen_adam import FrozenAdam, check_adam
from unisono.methods.strategy import Accumulate, BucketBytes, Change, Pattern, Replica, Residual, Strategy
from unisono.world import World

FACTS = Facts(
    [Example("qadam(warmup=2)"), Example("qadam(warmup=1, refresh=2, reducer=onebit)")],
    refuses={"accumulate=0": "accumulate", "warmup=0": "warmup", "refresh=0": "refresh", "bucket_bytes=0": "bucket_"},
    needs_adam=True,
    convergence=Convergence("other", "Adam whose second moment stands still after a warm-up"),
    plans=["qadam(warmup=1)"],
)


@dataclass(frozen=True)
class qadam(Strategy):
    """Adam on the mean of all gradients for a warm-up; then v stays as it is, and m is averaged, compressed.

        warm-up:     g = mean of g_i, and Adam's or AdamW's own step
        afterwards:  m = Q-mean of (b1 m + (1 - b1) g_i),  x <- x - lr (m / (1 - b1^t)) / (sqrt(v') + eps)

    with v' = v / (1 - b2^T) as it was at the end of the warm-up, T steps in. (BAGUA's code goes on correcting v by
    1 - b2^t, so its steps grow for a while after a short warm-up.) After backward, `p.grad` holds the gradient that
    leads to the averaged momentum, (m' - b1 m)/(1 - b1), the same on every rank: clipping and AMP act on that.
    Weight decay (in the gradient for Adam, decoupled for AdamW), `maximize`, learning rates and betas are those of
    each group. The optimizer's own state goes on: `exp_avg`, `step`, and the frozen `exp_avg_sq`.

    A number that had no gradient in the warm-up has v = 0 and would leap at its first: it takes the mean of the
    others' v in its tensor. A tensor that had none goes on with Adam's own v until it made `warmup` steps.

    warmup: windows before v freezes; where v changes no more, some hundreds to thousands.
    refresh: after the warm-up v is still updated now and then, from gradients that travel in full: so many times in
        every window, as often in every second, then in every fourth, ... (0/1 Adam). None: it is frozen for good.
    reducer: how momenta are averaged (None: bytegrad).
    accumulate, overlap, bucket_bytes: as for allreduce.

    >>> from unisono.spec import build
    >>> build("qadam(warmup=1000)", kind="strategy").warmup
    1000
    """

    warmup: Annotated[int, AtLeast(1, "windows of plain Adam before v freezes")] = 100
    reducer: Reducer | None = None
    accumulate: Accumulate = 1
    overlap: Annotated[bool | None, Note("None: as it pays")] = None
    bucket_bytes: BucketBytes = BUCKET_BYTES
    refresh: Annotated[int | None, AtLeast(1, "updates of v until their interval doubles")] = None

    def updates_variance(self, window: int) -> bool:
        """Whether gradients travel in full in a window, counted from 0, and v is updated."""
        after = window - self.warmup
        if after < 0 or self.refresh is None:
            return after < 0
        interval = 1 << (after // self.refresh + 1).bit_length() - 1  # from refresh (interval - 1) windows on
        return (after - self.refresh * (interval - 1)) % interval == 0

    def check(self, model: nn.Module, optimizer: Optimizer, world: World) -> None:
        check_adam("qadam", model, optimizer)

    def why_torch_optimizer(self) -> str:
        return "it exchanges Adam's momenta"

    def pattern(self) -> Pattern:
        reducer: Reducer = self.reducer if self.reducer is not None else build("bytegrad", kind="reducer")
        return replace(super().pattern(), reducer=reducer)

    def make(self, model: nn.Module, optimizer: Optimizer, world: World) -> Replica:
        return QAdamReplica(model, optimizer, world, self)


class QAdamReplica(Replica):
    """Gradients, then momenta, through buckets; the optimizer's hooks make its step once v is frozen."""

    strategy: qadam
    reduction: Reduction
    slow_ranks = "deal"
    same_parameters = True

    def __init__(self, model: nn.Module, optimizer: Optimizer, world: World, strategy: qadam) -> None:
        self.reducer: Reducer = strategy.reducer if strategy.reducer is not None else build("bytegrad", kind="reducer")
        if self.reducer.check is not None:
            self.reducer.check(optimizer, world)
        super().__init__(model, optimizer, world, strategy)
        self.reduction = Reduction(
            staged(lambda bucket: {"momenta": self.reducer.init(bucket)}, self._stages),
            optimizer,
            partial(self.share_buffers, "broadcast"),
            "momenta",
        )
        self.adam = FrozenAdam(model, optimizer)
        self.start_or_close()

    def start(self) -> None:
        if self.world.size == 1:
            self.windows = count_windows(self.model, self.strategy.accumulate, self.advance)
            return
        self.windows = Exchange(
            list(self.model.named_parameters()),
            [],
            self.world,
            self.reduction,
            bucket_bytes=self.strategy.bucket_bytes,
            overlap=self.strategy.overlap,
            accumulate=self.strategy.accumulate,
            advance=self.advance,
        )

    # The exchange ------------------------------------------------------------------------------------------------

    def _stages(self, bucket: Bucket, state: State, world: World) -> Stages:
        """The mean gradient; after the warm-up, by way of the mean momentum."""
        if self.strategy.updates_variance(self.step):
            handle = world.all_reduce(bucket.flat, "mean", tag=bucket.tag)
            yield
            handle.wait()
            return Reduced(bucket.tensors), state
        groups = {p: group for group in self.optimizer.param_groups for p in group["params"]}
        beta1 = [groups[p]["betas"][0] if p in groups else 0.0 for p in bucket.params]
        rest = [1.0 - b for b in beta1]
        former = self._momenta(bucket, groups)  # b1 m
        torch._foreach_mul_(bucket.tensors, rest)
        torch._foreach_add_(bucket.tensors, former)
        reduced, inner = yield from stages_of(self.reducer, bucket, state["momenta"], world)
        torch._foreach_sub_(reduced.mean, former)
        torch._foreach_div_(reduced.mean, rest)
        return Reduced(reduced.mean, overflow=reduced.overflow), {"momenta": inner}

    def _momenta(self, bucket: Bucket, groups: dict[Tensor, dict[str, Any]]) -> list[Tensor]:
        """b1 m of every tensor, in the units and the sense of the gradients."""
        scale = self.reduction.scale()
        views = bucket.views(torch.zeros_like(bucket.flat))
        for view, param in zip(views, bucket.params, strict=True):
            state = self.optimizer.state.get(param)
            if state:
                factor = groups[param]["betas"][0] * scale
                torch.mul(state["exp_avg"], -factor if groups[param]["maximize"] else factor, out=view)
        return views

    # The step ----------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def before_step(self) -> None:
        super().before_step()
        if self.step > self.strategy.warmup:
            self.adam.step(self.strategy.warmup, update_variance=self.strategy.updates_variance(self.step - 1))

    def after_step(self) -> None:
        self.adam.give_back()
        super().after_step()

    # Around it ---------------------------------------------------------------------------------------------------

    def shared_state(self) -> dict[str, Any]:
        return {**super().shared_state(), **self.adam.state()}

    def load_shared(self, shared: dict[str, Any]) -> None:
        super().load_shared(shared)
        self.adam.load(shared)

    def unsent(self) -> Residual:
        """As gradients, which every method has a use for."""
        return self.reduction.unsent().convert("gradients", self.model.named_parameters(), self.optimizer)

    def carry(self, change: Change, shared: dict[str, Any]) -> str:
        super().carry(change, shared)
        return "frozen v as well"
