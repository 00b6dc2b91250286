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
from torch.optim import Adam, AdamW, Optimizer

from unisono.methods.buckets import BUCKET_BYTES, Bucket
from unisono.methods.checks import AtLeast, Note
from unisono.methods.exchange.overlap import Exchange
from unisono.methods.exchange.reduction import Reduction
from unisono.methods.exchange.windows import count_windows
from unisono.methods.facts import Convergence, Example, Facts
from unisono.methods.joined_optimizers import refuse_several
from unisono.methods.reducer import Reduced, Reducer, Stages, State, staged, stages_of
from unisono.methods.spec import build
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
        refuse_several(optimizer, "qadam", "it takes over the step of one Adam, whose momenta it exchanges")
        if type(optimizer) not in (Adam, AdamW):
            raise TypeError(
                f"qadam takes over the step of torch.optim.Adam or AdamW, got {type(optimizer).__name__}: make one of "
                "those, or use allreduce(reducer=bytegrad), which works with any optimizer"
            )
        for group in optimizer.param_groups:
            for option in ("amsgrad", "capturable", "differentiable"):
                if group.get(option):
                    raise ValueError(f"qadam has no {option} once v is frozen: make the optimizer with {option}=False")
        if any(getattr(module, "sparse", False) is True for module in model.modules()):
            raise ValueError("Adam cannot step sparse gradients: make the embeddings with sparse=False")
        for name, param in model.named_parameters():
            if param.is_complex():
                raise ValueError(f"qadam averages momenta of real numbers, but {name!r} is {param.dtype}")

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
        self._frozen: dict[str, float] = {}  # by parameter: 1 - b2^T
        self._switched = False
        self._held: list[tuple[Tensor, Tensor]] = []  # gradients that the optimizer is not to see
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
        overflow = getattr(self.optimizer, "found_inf", None)  # a fused Adam is asked to step, and does not
        if self.step <= self.strategy.warmup or (overflow is not None and float(overflow)):
            return
        self._freeze()
        names = {p: name for name, p in self.model.named_parameters()}
        for group in self.optimizer.param_groups:
            params = [p for p in group["params"] if p.grad is not None and names[p] in self._frozen]
            if params and self.strategy.updates_variance(self.step - 1):
                self._update_variance(group, {names[p]: p for p in params})
            if params:
                self._step(group, params, [self._frozen[names[p]] for p in params])
            self._held += [(p, p.grad) for p in params]
        for param, _ in self._held:
            param.grad = None

    def _freeze(self) -> None:
        """Freeze v of what has made its steps: all that has made any, the first time."""
        enough = self.strategy.warmup if self._switched else 1
        self._switched = True
        beta2 = {p: group["betas"][1] for group in self.optimizer.param_groups for p in group["params"]}
        for name, param in self.model.named_parameters():
            state = self.optimizer.state.get(param)
            if name in self._frozen or not state or float(state["step"]) < enough:
                continue
            v = state["exp_avg_sq"]
            present = torch.count_nonzero(v)
            if present:
                v.copy_(torch.where(v == 0, v.sum() / present, v))
                self._frozen[name] = 1.0 - float(beta2[param] ** float(state["step"]))

    def _update_variance(self, group: dict[str, Any], params: dict[str, Tensor]) -> None:
        """v <- b2 v + (1 - b2) g^2, with the gradients of all; and its correction, as after so many updates."""
        beta2, scale = group["betas"][1], getattr(self.optimizer, "grad_scale", None)
        for name, param in params.items():
            assert param.grad is not None
            grad = param.grad if scale is None else param.grad / float(scale)
            if group["weight_decay"] and not group["decoupled_weight_decay"]:
                grad = grad.add(param, alpha=-group["weight_decay"] if group["maximize"] else group["weight_decay"])
            self.optimizer.state[param]["exp_avg_sq"].mul_(beta2).addcmul_(grad, grad, value=1.0 - beta2)
            self._frozen[name] = 1.0 - (1.0 - self._frozen[name]) * beta2

    def _step(self, group: dict[str, Any], params: list[Tensor], corrections: list[float]) -> None:
        """Adam's step with v as it is; the gradients lead to the averaged momenta."""
        states = [self.optimizer.state[p] for p in params]
        grads = [p.grad for p in params if p.grad is not None]
        scale = getattr(self.optimizer, "grad_scale", None)
        if scale is not None:
            grads = list(torch._foreach_div(grads, float(scale)))
        if group["maximize"]:
            grads = list(torch._foreach_neg(grads))
        lr, beta1, decay = float(group["lr"]), group["betas"][0], group["weight_decay"]
        if decay and group["decoupled_weight_decay"]:
            torch._foreach_mul_(params, 1.0 - lr * decay)
        elif decay:
            grads = list(torch._foreach_add(grads, params, alpha=decay))
        torch._foreach_add_([s["step"] for s in states], 1.0)
        momenta = [s["exp_avg"] for s in states]
        torch._foreach_lerp_(momenta, grads, 1.0 - beta1)
        roots = torch._foreach_sqrt([s["exp_avg_sq"] for s in states])
        torch._foreach_div_(roots, [c**0.5 for c in corrections])
        torch._foreach_add_(roots, group["eps"])
        rates = [-lr / (1.0 - beta1 ** float(s["step"])) for s in states]
        torch._foreach_addcdiv_(params, momenta, roots, rates)

    def after_step(self) -> None:
        for param, grad in self._held:
            param.grad = grad
        self._held = []
        super().after_step()

    # Around it ---------------------------------------------------------------------------------------------------

    def shared_state(self) -> dict[str, Any]:
        return {**super().shared_state(), "frozen": dict(self._frozen), "switched": self._switched}

    def load_shared(self, shared: dict[str, Any]) -> None:
        super().load_shared(shared)
        self._frozen, self._switched = dict(shared.get("frozen", {})), shared.get("switched", False)

    def unsent(self) -> Residual:
        """As gradients, which every method has a use for."""
        return self.reduction.unsent().convert("gradients", self.model.named_parameters(), self.optimizer)

    def carry(self, change: Change, shared: dict[str, Any]) -> str:
        super().carry(change, shared)
        return "frozen v as well"
