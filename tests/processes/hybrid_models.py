"""A small transformer, and what plain PyTorch makes of it in one process: what meshes are compared with."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import Tensor, nn

from unisono.methods.reducers.powersgd import _draw_first_q

RANKS, STEPS, WORDS, LENGTH, WIDTH = 2, 3, 12, 5, 8
RATE, CLIP = 0.02, 0.2


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (f(x).unflatten(-1, (-1, WIDTH // 2)).transpose(1, 2) for f in (self.q, self.k, self.v))
        mixed = (q @ k.transpose(-1, -2)).softmax(-1) @ v
        out: Tensor = self.o(mixed.transpose(1, 2).flatten(-2))
        return out


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(WIDTH), Attention()
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm(x))
        return x + self.mlp(x)


class Transformer(nn.Module):
    def __init__(self, blocks: int = 2) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.places = nn.Parameter(torch.randn(LENGTH, WIDTH) / 10)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, x: Tensor) -> Tensor:
        x = self.words(x) + self.places
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.head(x)
        return out


def make(seed: int = 0) -> Transformer:
    torch.manual_seed(seed)
    return Transformer().double()


def batch(step: int, rank: int | None = None, size: int = 4) -> tuple[Tensor, Tensor]:
    """The part of a data rank; None: those of all."""
    text = torch.randint(WORDS, (RANKS * size, LENGTH + 1), generator=torch.Generator().manual_seed(step))
    part = text if rank is None else text[rank * size : (rank + 1) * size]
    return part[:, :-1], part[:, 1:]


def loss(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output.flatten(0, 1), target.flatten())


def optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=RATE)


def train_alone(clip: float | None = None, steps: int = STEPS) -> nn.Module:
    """One process, on the batches of all ranks."""
    model = make()
    stepper = optimizer(model)
    for step in range(steps):
        x, y = batch(step)
        stepper.zero_grad()
        loss(model(x), y).backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        stepper.step()
    return model


def train_local(every: int) -> nn.Module:
    """As many models as data ranks, whose parameters become their mean now and then."""
    models = [make() for _ in range(RANKS)]
    steppers = [optimizer(model) for model in models]
    for step in range(STEPS):
        for rank, (model, stepper) in enumerate(zip(models, steppers, strict=True)):
            x, y = batch(step, rank)
            stepper.zero_grad()
            loss(model(x), y).backward()
            stepper.step()
        if (step + 1) % every == 0:
            _average(models)
    mean = copy.deepcopy(models[0])
    with torch.no_grad():
        for p, *others in zip(mean.parameters(), *(m.parameters() for m in models), strict=True):
            p.copy_(torch.stack([x.detach() for x in others]).mean(0))
    return mean


@torch.no_grad()
def _average(models: list[Transformer]) -> None:
    for same in zip(*(m.parameters() for m in models), strict=True):
        mean = torch.stack([p.detach() for p in same]).mean(0)
        for p in same:
            p.copy_(mean)


def split_dimension(name: str) -> int | None:
    """Along which dimension the tensor axis splits a parameter of the model."""
    if ".q." in name or ".k." in name or ".v." in name or "mlp.0" in name or name.startswith(("head", "words")):
        return 0
    return 1 if name.endswith(("attention.o.weight", "mlp.2.weight")) else None


def train_compressed(tensor_ranks: int) -> nn.Module:
    """PowerSGD of rank 1 between the data ranks, on each part that a rank of the tensor axis has."""
    model = make()
    stepper = optimizer(model)
    states: dict[tuple[str, int], _Matrix] = {}
    for step in range(STEPS):
        every = []
        for rank in range(RANKS):
            x, y = batch(step, rank)
            model.zero_grad()
            loss(model(x), y).backward()
            every.append({name: p.grad.clone() for name, p in model.named_parameters()})
        for name, p in model.named_parameters():
            dim = split_dimension(name)
            cut: Callable[[Tensor], tuple[Tensor, ...]] = (
                (lambda g: (g,)) if dim is None else (lambda g, dim=dim: g.chunk(tensor_ranks, dim))
            )
            means = []
            for part, gradients in enumerate(zip(*(cut(grads[name]) for grads in every), strict=True)):
                state = states.setdefault((name, part), _Matrix(name, gradients[0]))
                means.append(state.reduce(list(gradients)))
            p.grad = means[0] if dim is None else torch.cat(means, dim)
        stepper.step()
    return model


class _Matrix:
    """The paper's algorithm for one matrix, with what every rank has not sent yet."""

    def __init__(self, name: str, like: Tensor) -> None:
        rows, columns = (like.shape[0], like[0].numel()) if like.dim() > 1 else (0, 0)
        self.compresses = like.dim() > 1 and like.numel() >= rows + columns
        if self.compresses:
            self.q = _draw_first_q(0, name, (1, columns)).T.contiguous()
            self.errors = [torch.zeros_like(like) for _ in range(RANKS)]

    def reduce(self, gradients: list[Tensor]) -> Tensor:
        if not self.compresses:
            return torch.stack(gradients).mean(0)
        matrices = [g + e for g, e in zip(gradients, self.errors, strict=True)]
        p = torch.linalg.qr(torch.stack([m @ self.q for m in matrices]).mean(0)).Q
        factors = [m.T @ p for m in matrices]
        self.errors = [m - p @ q.T for m, q in zip(matrices, factors, strict=True)]
        self.q = torch.stack(factors).mean(0)
        return p @ self.q.T
