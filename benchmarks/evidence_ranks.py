"""Part of evidence_large.py: all ranks of a run on one device, as threads of one process.

On a GPU forward and backward of all ranks' models are one CUDA graph, which the last rank to come replays for all. A
model that can compute all ranks' at once (`losses_of_all`, of their parameters stacked) does: kernels are large then.
For autograd each rank's part is one node with the model's parameters as inputs, so that gradients come to parameters,
and hooks to their turn, as always. Activations are bfloat16 there; parameters and what is exchanged are float32.

Threads take turns in Python: one runs, till it waits for others. Otherwise each call into torch, which gives Python's
lock away, would have to fight for it.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from unisono import background

Loss = Callable[..., Tensor]  # of a model and a batch's parts
WARM_UPS = 3


class Rank(nn.Module):
    """One rank's model; called with a batch it gives the loss."""

    def __init__(self, body: nn.Module, ranks: Ranks, place: int) -> None:
        super().__init__()
        self.body = body
        self._call = _Place(ranks, place)

    def forward(self, *batch: Tensor) -> Tensor:
        return self._call(self.body, batch)


class _Place:
    """A rank's place, as its model holds it: a copy of the model holds the same."""

    def __init__(self, ranks: Ranks, place: int) -> None:
        self._ranks, self._place = ranks, place

    def __deepcopy__(self, memo: Any) -> _Place:
        return self

    def __call__(self, body: nn.Module, batch: Sequence[Tensor]) -> Tensor:
        return self._ranks.compute(self._place, body, batch)


class Ranks:
    """What the ranks' threads have in common: the graph, and where they meet to replay it."""

    def __init__(self, bodies: Sequence[nn.Module], loss: Loss, device: torch.device) -> None:
        self._bodies, self._loss, self._device = list(bodies), loss, device
        self.params = [list(body.parameters()) for body in bodies]
        self.losses: Sequence[Tensor] = []
        self.gradients: list[Sequence[Tensor]] = []
        self._batches: list[Sequence[Tensor]] = [()] * len(bodies)
        self._graph: torch.cuda.CUDAGraph | None = None
        self._stacks: list[Tensor] = []
        if hasattr(bodies[0], "losses_of_all") and device.type == "cuda":
            self.stack()
        self._meeting = threading.Barrier(len(bodies), self._run_all, timeout=120.0)

    def stack(self) -> None:
        """Let parameters of the ranks lie one after the other."""
        for every in zip(*self.params, strict=True):
            together = torch.stack([p.detach() for p in every]).requires_grad_()
            for p, mine in zip(every, together.detach().unbind(), strict=True):
                p.data = mine
            self._stacks.append(together)

    def give_up(self) -> None:
        """Let nobody wait for a rank that has failed."""
        self._meeting.abort()

    def compute(self, place: int, body: nn.Module, batch: Sequence[Tensor]) -> Tensor:
        """The loss of a rank's batch."""
        if self._device.type != "cuda":
            return self._loss(body, *batch)
        if self._graph is None:
            self._batches[place] = [part.clone() for part in batch]
        else:
            torch._foreach_copy_(self._batches[place], batch)
        self._meeting.wait()
        loss: Tensor = _Replayed.apply(self, place, *self.params[place])
        return loss

    def _run_all(self) -> None:
        """By the last rank to come."""
        if self._graph is None:
            self._record()
        assert self._graph is not None
        self._graph.replay()

    def _record(self) -> None:
        torch.cuda.synchronize(self._device)
        together = [torch.stack(parts) for parts in zip(*self._batches, strict=True)]
        self._batches = [[part[place] for part in together] for place in range(len(self._bodies))]
        stream = torch.cuda.Stream(self._device)
        with torch.cuda.stream(stream):
            for _ in range(WARM_UPS):  # libraries choose their kernels
                self.differentiate(together)
        torch.cuda.synchronize(self._device)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, stream=stream, capture_error_mode="thread_local"):
            self.losses, self.gradients = self.differentiate(together)

    def differentiate(self, batch: Sequence[Tensor]) -> tuple[Sequence[Tensor], list[Sequence[Tensor]]]:
        """Each rank's loss, and its gradients, by its part of the stacked batches."""
        if self._stacks:
            for every, stack in zip(zip(*self.params, strict=True), self._stacks, strict=True):
                if [p.data_ptr() for p in every] != [mine.data_ptr() for mine in stack]:
                    raise RuntimeError("parameters have been put elsewhere: this method cannot be run so")
            body: Any = self._bodies[0]
            with torch.enable_grad():
                losses = body.losses_of_all(self._stacks, *batch)
            found = torch.autograd.grad(losses.sum(), self._stacks)
            return list(losses.detach()), [[x[place] for x in found] for place in range(len(self._bodies))]
        each = []
        for place, body in enumerate(self._bodies):
            with torch.enable_grad(), torch.autocast(self._device.type, torch.bfloat16, cache_enabled=False):
                loss = self._loss(body, *[part[place] for part in batch])
            each.append((loss.detach(), torch.autograd.grad(loss, self.params[place])))
        return [loss for loss, _ in each], [gradients for _, gradients in each]


class _Replayed(torch.autograd.Function):
    """A rank's loss, and its gradients, as the graph has left them."""

    @staticmethod
    def forward(ctx: Any, ranks: Ranks, place: int, *params: Tensor) -> Tensor:
        ctx.gradients = ranks.gradients[place]
        return ranks.losses[place].detach()

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> Any:
        return (None, None, *[x.detach() for x in ctx.gradients])


# Turns -------------------------------------------------------------------------------------------------------


class Turns:
    """Of the threads that are inside (`with turns:`) one runs at a time; one that waits for a condition gives its turn
    away. What queues of threads run behind them is inside too. It takes the place of `threading.Condition.wait` in this
    process."""

    def __init__(self) -> None:
        self._turn, self._inside = threading.Lock(), threading.local()
        self._wait = threading.Condition.wait
        turns = self

        def wait(condition: Any, timeout: float | None = None) -> bool:
            return turns._wait_outside(condition, timeout)

        threading.Condition.wait = wait  # type: ignore[method-assign]
        run_job = background._Job.__call__

        def run(job: Any) -> None:
            with contextlib.nullcontext() if turns.has_mine else turns:
                run_job(job)

        background._Job.__call__ = run  # type: ignore[method-assign]

    @property
    def has_mine(self) -> bool:
        return getattr(self._inside, "is_mine", False)

    def __enter__(self) -> None:
        self._turn.acquire()
        self._inside.is_mine = True

    def __exit__(self, *_: object) -> None:
        self._inside.is_mine = False
        self._turn.release()

    def _wait_outside(self, condition: Any, timeout: float | None) -> bool:
        if not self.has_mine:
            return self._wait(condition, timeout)
        waiter = threading.Lock()
        waiter.acquire()
        condition._waiters.append(waiter)
        state = condition._release_save()
        self._turn.release()
        came = False
        try:
            came = waiter.acquire(True, -1 if timeout is None else max(0.0, timeout))
        finally:
            self._turn.acquire()  # before the condition's lock: who holds that may be waiting for nobody
            condition._acquire_restore(state)
            if not came:
                with contextlib.suppress(ValueError):
                    condition._waiters.remove(waiter)
        return came


# Optimizers --------------------------------------------------------------------------------------------------


class BatchedMuon(torch.optim.Muon):
    """torch.optim.Muon's step on all matrices of a shape at once; on a GPU all but the last part of it is a CUDA graph,
    if gradients stay where they are."""

    _places: tuple[int, ...] = ()
    _graph: torch.cuda.CUDAGraph | None = None
    _steps: Sequence[Tensor] = ()

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        assert closure is None
        [group] = self.param_groups
        params: list[Tensor] = []
        grads: list[Tensor] = []
        buffers: list[Tensor] = []
        self._init_group(group, params, grads, buffers)
        places = tuple(x.data_ptr() for x in (*grads, *buffers))
        if not grads[0].is_cuda or places != self._places:
            self._steps, self._graph = find_steps(grads, buffers, group), None
        elif self._graph is None:
            self._graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._graph, capture_error_mode="thread_local"):
                self._steps = find_steps(grads, buffers, group)
        if self._graph is not None:
            self._graph.replay()
        self._places = places
        torch._foreach_mul_(params, 1 - group["lr"] * group["weight_decay"])
        torch._foreach_add_(params, self._steps, alpha=-group["lr"])


def find_steps(grads: Sequence[Tensor], buffers: Sequence[Tensor], group: dict[str, Any]) -> list[Tensor]:
    """Where each matrix goes, at a learning rate of 1."""
    torch._foreach_lerp_(buffers, grads, 1 - group["momentum"])
    updates = torch._foreach_lerp(grads, buffers, group["momentum"]) if group["nesterov"] else buffers
    found: dict[int, Tensor] = {}
    for shape in dict.fromkeys(x.shape for x in grads):
        mine = [i for i, x in enumerate(grads) if x.shape == shape]
        steps = orthogonalise(torch.stack([updates[i] for i in mine]), group).float()
        found |= zip(mine, (steps * max(1.0, shape[0] / shape[1]) ** 0.5).unbind(), strict=True)
    return [found[i] for i in range(len(grads))]


def orthogonalise(x: Tensor, group: dict[str, Any]) -> Tensor:
    """Newton-Schulz of a stack of matrices, in bfloat16."""
    a, b, c = group["ns_coefficients"]
    is_tall = x.shape[1] > x.shape[2]
    x = x.bfloat16().transpose(1, 2) if is_tall else x.bfloat16()
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=group["eps"])
    for _ in range(group["ns_steps"]):
        gram = x @ x.transpose(1, 2)
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.transpose(1, 2) if is_tall else x
