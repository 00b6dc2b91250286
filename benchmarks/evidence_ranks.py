"""Part of evidence_large.py: all ranks of a run on one device, as threads of one process.

On a GPU forward and backward of all ranks' models are branches of one CUDA graph, which the last rank to come replays
for all: small kernels of several ranks run side by side, and Python does next to nothing. For autograd each rank's part
is one node with the model's parameters as inputs, so that gradients come to parameters, and hooks to their turn, as
always. Losses are computed under bf16 autocast there; parameters and what is exchanged are float32.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

Loss = Callable[..., Tensor]  # of a model and a batch's parts
WARM_UPS = 3


class Rank(nn.Module):
    """One rank's model; called with a batch it gives the loss."""

    def __init__(self, body: nn.Module, ranks: Ranks, place: int) -> None:
        super().__init__()
        self.body = body
        self._call = ranks.at(place)

    def forward(self, *batch: Tensor) -> Tensor:
        loss: Tensor = self._call(self.body, batch)
        return loss


class Ranks:
    """What the ranks' threads have in common: the graph, and where they meet to replay it."""

    def __init__(self, size: int, loss: Loss, device: torch.device) -> None:
        self.size, self._loss, self._device = size, loss, device
        self._bodies: list[nn.Module] = [nn.Module()] * size
        self._batches: list[Sequence[Tensor]] = [()] * size
        self._losses: list[Tensor] = []
        self.gradients: list[Sequence[Tensor]] = []
        self._graph: torch.cuda.CUDAGraph | None = None
        self._meeting = threading.Barrier(size, self._run_all, timeout=120.0)

    def __deepcopy__(self, memo: Any) -> Ranks:
        return self  # a copy of a model is no other rank

    def at(self, place: int) -> _Place:
        return _Place(self, place)

    def give_up(self) -> None:
        """Let nobody wait for a rank that has failed."""
        self._meeting.abort()

    def compute(self, place: int, body: nn.Module, batch: Sequence[Tensor]) -> Tensor:
        """The loss of a rank's batch."""
        if self._device.type != "cuda":
            return self._loss(body, *batch)
        if self._graph is None:
            self._bodies[place], self._batches[place] = body, [part.clone() for part in batch]
        else:
            torch._foreach_copy_(self._batches[place], batch)
        self._meeting.wait()
        loss: Tensor = _Replayed.apply(self, place, *body.parameters())
        return loss

    def loss_of(self, place: int) -> Tensor:
        return self._losses[place].detach()

    def _run_all(self) -> None:
        """By the last rank to come."""
        if self._graph is None:
            self._record()
        assert self._graph is not None
        self._graph.replay()

    def _record(self) -> None:
        streams = [torch.cuda.Stream(self._device) for _ in range(self.size)]
        torch.cuda.synchronize(self._device)
        with torch.cuda.stream(streams[0]):
            for _ in range(WARM_UPS):  # libraries choose their kernels
                self._differentiate(0)
        torch.cuda.synchronize(self._device)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, capture_error_mode="thread_local"):
            here = torch.cuda.current_stream(self._device)
            for place, stream in enumerate(streams):
                stream.wait_stream(here)
                with torch.cuda.stream(stream):
                    loss, gradients = self._differentiate(place)
                self._losses.append(loss)
                self.gradients.append(gradients)
            for stream in streams:
                here.wait_stream(stream)

    def _differentiate(self, place: int) -> tuple[Tensor, Sequence[Tensor]]:
        body = self._bodies[place]
        with torch.enable_grad(), torch.autocast("cuda", torch.bfloat16, cache_enabled=False):
            loss = self._loss(body, *self._batches[place])
        return loss.detach(), torch.autograd.grad(loss, list(body.parameters()))


class _Place:
    """A rank's place, as its model holds it: a copy of the model holds the same."""

    def __init__(self, ranks: Ranks, place: int) -> None:
        self._ranks, self._place = ranks, place

    def __deepcopy__(self, memo: Any) -> _Place:
        return self

    def __call__(self, body: nn.Module, batch: Sequence[Tensor]) -> Tensor:
        return self._ranks.compute(self._place, body, batch)


class _Replayed(torch.autograd.Function):
    """A rank's loss, and its gradients, as the graph has left them."""

    @staticmethod
    def forward(ctx: Any, ranks: Ranks, place: int, *params: Tensor) -> Tensor:
        ctx.gradients = ranks.gradients[place]
        return ranks.loss_of(place)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> Any:
        return (None, None, *[x.detach() for x in ctx.gradients])


# Optimizers --------------------------------------------------------------------------------------------------


class BatchedMuon(torch.optim.Muon):
    """torch.optim.Muon's step on all matrices of a shape at once."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        assert closure is None
        for group in self.param_groups:
            params: list[Tensor] = []
            grads: list[Tensor] = []
            buffers: list[Tensor] = []
            self._init_group(group, params, grads, buffers)
            if not params:
                continue
            torch._foreach_lerp_(buffers, grads, 1 - group["momentum"])
            updates = torch._foreach_lerp(grads, buffers, group["momentum"]) if group["nesterov"] else buffers
            torch._foreach_mul_(params, 1 - group["lr"] * group["weight_decay"])
            for shape in dict.fromkeys(p.shape for p in params):
                mine = [i for i, p in enumerate(params) if p.shape == shape]
                steps = orthogonalise(torch.stack([updates[i] for i in mine]), group)
                rate = group["lr"] * max(1.0, shape[0] / shape[1]) ** 0.5
                torch._foreach_add_([params[i] for i in mine], [x.float() for x in steps.unbind()], alpha=-rate)


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
