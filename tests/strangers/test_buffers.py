"""Buffers: shared between ranks while graphs still need them, expanded views, and embeddings tied to linear layers."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from stranger_programs import furthest, mlp, seeded, values
from torch import Tensor, nn

import unisono as un
from unisono.world import World
from unisono.world.virtual import run_threads

SIZE = 2
EXACT = [
    "allreduce",
    "allreduce(buffers=average)",
    "allreduce(overlap=True, bucket_bytes=64)",
    "zero(stage=1)",
    "zero(stage=2)",
    "zero(stage=3)",
    "shared",
]
OTHERS = ["topk(k=0.5)", "local_sgd(every=2)", "diloco(every=2)", "gossip", "parameter_server", "crossbow", "hogwild"]
Loop = Callable[[nn.Module, Tensor, Callable[[Tensor], object]], object]


def data(rank: int, step: int) -> Tensor:
    return torch.randn(6, 4, generator=torch.Generator().manual_seed(10 * step + rank), dtype=torch.float64)


def two_losses(model: nn.Module, x: Tensor, backward: Callable[..., object]) -> None:
    y = model(x)
    backward(y.square().mean(), retain_graph=True)
    backward((y - 1).abs().mean())


def two_forwards(model: nn.Module, x: Tensor, backward: Callable[..., object]) -> None:
    first, second = model(x).square().mean(), (model(x + 1) - 1).abs().mean()
    backward(first)
    backward(second)


class Masked(nn.Module):
    """Uses a part of a constant buffer, which the graph then holds."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(4, 8), nn.BatchNorm1d(8)
        self.register_buffer("mask", torch.arange(20.0).view(1, 20).expand(3, 20))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.norm(self.first(x))) * self.mask[:1, :8]


def train(world: World | None, spec: str, make: Callable[[], nn.Module], loop: Loop) -> list[Tensor]:
    """What the model's parameters are in the end: of a rank, or of one process that takes the mean over all parts."""
    model = make()
    adam = spec.startswith("qadam")
    optimizer = (torch.optim.Adam if adam else torch.optim.SGD)(model.parameters(), lr=0.05)
    replica = None if world is None else un.parallel(model, optimizer, spec, world=world)
    for step in range(3):
        optimizer.zero_grad()
        for rank in range(SIZE) if world is None else [world.rank]:
            part = 1 / SIZE if world is None else 1.0
            loop(model, data(rank, step), lambda loss, part=part, **more: (loss * part).backward(**more))
        optimizer.step()
    if replica is None:
        return values(model)
    model.eval()
    own, found = model(data(0, 0)), values(replica.consolidate())
    assert own.isfinite().all()
    replica.close()
    return found


@pytest.mark.parametrize(
    "make", [lambda: mlp(norm=True), lambda: seeded(Masked).double()], ids=["BatchNorm", "a part of an expanded mask"]
)
@pytest.mark.parametrize("loop", [two_losses, two_forwards])
@pytest.mark.parametrize("spec", [*EXACT, "qadam(warmup=1)", *OTHERS])
def test_several_backward_passes_through_one_graph(spec: str, loop: Loop, make: Callable[[], nn.Module]) -> None:
    ranks = run_threads(lambda world: train(world, spec, make, loop), SIZE, timeout_s=15.0)
    if spec in EXACT:
        alone = train(None, spec, make, loop)
        names = list(make().state_dict())
        learnt = [i for i, name in enumerate(names) if "running" not in name and "tracked" not in name]
        assert furthest([ranks[0][i] for i in learnt], [alone[i] for i in learnt]) < 1e-12
    assert spec == "hogwild" or furthest(ranks[0], ranks[1]) == 0.0


class Tied(nn.Module):
    """A language model whose embedding, with sparse gradients, is also its last layer; on some ranks' data only one."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(6, 4, sparse=True), nn.Linear(4, 6, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, words: Tensor, uses_head: bool) -> Tensor:
        hidden = self.embedding(words)
        return self.head(hidden) if uses_head else hidden


def learn(world: World | None, spec: str) -> list[Tensor]:
    model = seeded(Tied).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    replica = None if world is None else un.parallel(model, optimizer, spec, world=world)
    for step in range(4):
        optimizer.zero_grad()
        for rank in range(SIZE) if world is None else [world.rank]:
            words = torch.tensor([step, rank, 5])
            loss = model(words, uses_head=step < 2 or (step == 2 and rank == 1)).square().mean()
            (loss / (SIZE if world is None else 1)).backward()
        optimizer.step()
    found = values(model if replica is None else replica.consolidate())
    if replica is not None:
        replica.close()
    return found


@pytest.mark.parametrize("spec", [spec for spec in EXACT if not spec.startswith("zero")])  # which refuses sparse ones
def test_an_embedding_with_sparse_gradients_that_is_also_a_linear_layer(spec: str) -> None:
    alone = learn(None, spec)
    for found in run_threads(lambda world: learn(world, spec), SIZE, timeout_s=15.0):
        assert furthest(found, alone) < 1e-12
