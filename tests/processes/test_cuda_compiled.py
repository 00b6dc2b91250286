"""A GPT that inductor has compiled, under every strategy, in a world of one and of two ranks that share a GPU: it
trains as the same model does uncompiled."""

from __future__ import annotations

import functools
import math
import traceback
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import unisono as un
from method_cases import find_cases
from unisono.world import World

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

STAGES = ("zero(stage=1)", "zero(stage=3)", "zero(stage=3, gather=int8)")
STEPS, VOCABULARY, LENGTH, WIDTH = 3, 64, 16, 32
OF_HOST_MEMORY = ("shared", "hogwild")  # workers that have one model in host memory: these refuse a model on a GPU
CASES = {
    case.spec: case
    for case in find_cases("strategy")
    if case.name not in OF_HOST_MEMORY and (case.spec in STAGES or case.example is case.facts.examples[0])
}
REDUCERS = ("powersgd(rank=2)", "topk(k=0.1)", "nuqsgd", "masked(onebit, min_size=100)")
SPECS = [*CASES, *(f"allreduce(reducer={reducer})" for reducer in REDUCERS)]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)  # that of K has no gradient but noise, which Adam would step
        self.out = nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:  # (batch, time, width)
        q, k, v = (part.unflatten(2, (2, -1)).transpose(1, 2) for part in self.qkv(self.norms[0](x)).chunk(3, 2))
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norms[1](x))))


class Gpt(nn.Module):
    """One block; the head has the embedding's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.block, self.norm = Block(), nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.words.weight

    def forward(self, tokens: Tensor) -> Tensor:  # (batch, time)
        x = self.words(tokens) + self.places.weight
        return F.cross_entropy(self.head(self.norm(self.block(x))).flatten(0, 1)[:-1], tokens.flatten()[1:])


def train(spec: str, world: World, *, compiled: bool) -> list[Tensor]:
    """The weights after some steps, in float64: a method that selects or rounds does the same with both models."""
    torch.manual_seed(0)
    model = Gpt().to(world.device, torch.float64)
    needs_adam = spec in CASES and CASES[spec].facts.needs_adam
    optimizer: torch.optim.Optimizer
    if needs_adam:
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-3)  # which tiny gradients do not reach
    else:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    called = torch.compile(model) if compiled else model
    replica = un.parallel(model, optimizer, spec, world=world)
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(10 * step + world.rank)
        tokens = torch.randint(VOCABULARY, (2, LENGTH), generator=generator).to(world.device)
        optimizer.zero_grad()
        called(tokens).backward()
        optimizer.step()
    weights = [p.detach().cpu().clone() for p in replica.consolidate().parameters()]
    replica.close()
    return weights


def compare(specs: list[str], device: str = "cuda:0") -> dict[str, Any]:
    """Under each strategy, how far the compiled model is from the other in the end, NaN where that is not finite; or
    what went wrong, which ends it: tests of further ones do not wait for a launch each."""
    torch._dynamo.config.cache_size_limit = 1000  # hooks differ from method to method
    world, found = un.join(device=device), dict.fromkeys(specs, "one before it went wrong")
    for spec in specs:
        try:
            plain, compiled = (train(spec, world, compiled=how) for how in (False, True))
        except Exception:
            found[spec] = traceback.format_exc()
            break
        found[spec] = max(float((a - b).abs().max()) for a, b in zip(plain, compiled, strict=True))
    found["graphs"] = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    return found


@functools.cache
def found_by(workers: int) -> list[dict[str, Any]]:
    """All strategies in one launch, so that most of what inductor does is done once."""
    return un.launch(compare, workers=workers, args=(SPECS,))


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.filterwarnings("ignore")
def test_a_compiled_model_trains_as_the_same_uncompiled(spec: str, workers: int) -> None:
    depends_on_time = spec in CASES and (CASES[spec].example.varies or CASES[spec].example.by_clock)
    for found in found_by(workers):
        assert not isinstance(found[spec], str), found[spec]
        assert found["graphs"] > 0
        assert math.isfinite(found[spec])
        assert depends_on_time or found[spec] < 1e-7
