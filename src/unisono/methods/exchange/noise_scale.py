"""The gradient noise scale: how large a batch may be before a larger one stops saving steps.

McCandlish, Kaplan, Amodei et al., "An Empirical Model of Large-Batch Training", 2018 (arXiv:1812.06162), appendix A.1:
from one rank's gradient g, of 1/N of the batch, and the mean G of all N ranks', the expectations of
    signal = (N |G|^2 - |g|^2) / (N - 1)    and    noise = (|g|^2 - |G|^2) / (N - 1)
are the true gradient's square, and the trace of its covariance over the batch. B_simple = noise / signal, in batches.

Both are there in every window that is exchanged exactly, so nothing is sent for it. Where a rank has the mean of a part
only (zero, shared), it takes the same numbers of that part: their sums over the ranks make the same quotient.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from unisono.launchers.runtime.run_folder import NOISE, SIGNAL, divide_noise
from unisono.world import World

EVERY = 16  # windows from one measurement to the next: each costs a pass over a rank's gradients, and one over the mean
DECAY = 0.95  # of both numbers, from one measurement to the next


class NoiseScale:
    """Measures both, in every so many windows."""

    def __init__(self, world: World, *, every: int = EVERY) -> None:
        self.world, self.every = world, every
        self.windows = self.measured = 0
        self.keeps_norm = False  # of every window
        self.scale: Callable[[], float] = lambda: 1.0  # AMP's loss scale: gradients come multiplied by it
        self._own: list[Tensor] = []  # squares of norms, of the part whose mean is here
        self._whole: list[Tensor] = []  # of all of this rank's gradients
        self._mean: list[Tensor] = []
        self._smooth: Tensor | None = None  # noise and signal

    @property
    def is_due(self) -> bool:
        """Whether this window is measured."""
        return self.world.size > 1 and (self.windows + 1) % self.every == 0 and self.world.weight == 1.0

    def add_own(self, parts: Iterable[Tensor]) -> None:
        """This rank's gradients, before the exchange: of the part whose mean it will have."""
        self._own.append(sum_squares(parts))

    def add_whole(self, gradients: Iterable[Tensor]) -> None:
        """All of this rank's gradients, before the exchange."""
        self._whole.append(sum_squares(gradients))

    def add_mean(self, parts: Iterable[Tensor]) -> None:
        """The means that are here, after it."""
        self._mean.append(sum_squares(parts))

    def take_norm(self) -> float:
        """The norm of this rank's gradients in the window that has ended."""
        whole, self._whole = self._whole, []
        return math.sqrt(float(torch.stack(whole).sum())) if whole else 0.0

    def end_window(self) -> None:
        """All means are there."""
        self.windows += 1
        own, mean, self._own, self._mean = self._own, self._mean, [], []
        if not own or not mean:
            return
        loss_scale = self.scale()
        mine, all_ = torch.stack(own).sum() / loss_scale**2, torch.stack(mean).sum() / loss_scale**2
        n = self.world.size
        now = torch.stack([mine - all_, n * all_ - mine]) / (n - 1)
        finite = torch.isfinite(now).all()
        now = torch.where(finite, now, torch.zeros_like(now))  # a GPU is not waited for
        weight = finite.to(now.dtype)
        before = torch.zeros(3, dtype=now.dtype, device=now.device) if self._smooth is None else self._smooth
        fresh = torch.cat([now, weight.reshape(1)])
        self._smooth = torch.where(finite, DECAY * before + (1 - DECAY) * fresh, before)
        self.measured += 1
        log = getattr(self.world.ledger.listener, "log", None)
        if log is not None:
            noise, signal, total = self._smooth
            log({NOISE: noise / total, SIGNAL: signal / total})

    def read(self) -> tuple[float, float]:
        """Noise and signal of what is measured here, smoothed; zeros: nothing was."""
        noise, signal, total = (0.0, 0.0, 1.0) if self._smooth is None else self._smooth.tolist()
        return (noise / total, signal / total) if total else (0.0, 0.0)

    @property
    def batches(self) -> float | None:
        """B_simple of what is measured here, in global batches; None: not known, or lost in the noise (the gradient's
        own square is not above zero)."""
        return divide_noise(*self.read())


@torch.no_grad()
def sum_squares(tensors: Iterable[Tensor]) -> Tensor:
    """The sum of the squares of all their elements, in float64 from norms in at least float32."""
    found: Sequence[Tensor] = [x.detach() for x in tensors if x.numel()]
    if not found:
        return torch.zeros((), dtype=torch.float64)
    of_kind: dict[torch.dtype, list[Tensor]] = {}
    for x in found:
        of_kind.setdefault(x.dtype, []).append(x)
    norms: list[Tensor] = []
    for kind, some in of_kind.items():
        wide = torch.float32 if kind in (torch.float16, torch.bfloat16) else None
        norms += [x.double() for x in torch._foreach_norm(some, 2, dtype=wide)]
    return torch.stack(norms).square().sum()
