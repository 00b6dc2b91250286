"""SparseLoCo against a plain reference in one process; and MuLoCo: Muon inside diloco, with 2 bits outside."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import unisono as un
from unisono.methods.reducer import all_reduce_bytes
from unisono.methods.spec import build
from unisono.world import World
from unisono.world.virtual import run_threads

RANKS, WINDOWS, EVERY = 3, 9, 3


def make() -> nn.Module:
    generator = torch.Generator().manual_seed(5)
    model = nn.Sequential(nn.Linear(12, 16), nn.Tanh(), nn.Linear(16, 4)).double()
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.rand(p.shape, generator=generator, dtype=torch.float64) - 0.5)
    return model


def loss_of(model: nn.Module, window: int, rank: int) -> Tensor:
    x = torch.randn(5, 12, generator=torch.Generator().manual_seed(100 * window + rank), dtype=torch.float64)
    return (model(x) - x[:, :4].sin()).square().mean()


def train(model: nn.Module, optimizers: list[Any], rank: int, windows: range) -> None:
    for window in windows:
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss_of(model, window, rank).backward()
        for optimizer in optimizers:
            optimizer.step()


def largest(p: Tensor, chunk: int, k: int) -> Tensor:
    """Of each chunk the k largest, as they are."""
    sent = torch.zeros_like(p).flatten()
    for at in range(0, p.numel(), chunk):
        part = p.flatten()[at : at + chunk]
        top = part.abs().argsort(descending=True, stable=True)[: max(1, round(k / chunk * len(part)))]
        sent[at + top] = part[top]
    return sent.view(p.shape)


def test_it_is_the_plain_reference() -> None:
    def work(world: World) -> list[Tensor]:
        model = make()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        spec = f"sparseloco(every={EVERY}, chunk=32, k=4, bits=None, decay=0.9, outer_lr=0.8)"
        replica = un.parallel(model, optimizer, spec, world=world)
        train(model, [optimizer], world.rank, range(WINDOWS))
        ended = [p.detach().clone() for p in replica.consolidate().parameters()]
        replica.close()
        return ended

    models = [make() for _ in range(RANKS)]
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.01) for m in models]
    anchors = [p.detach().clone() for p in models[0].parameters()]
    kept = [[torch.zeros_like(p) for p in anchors] for _ in range(RANKS)]
    for window in range(WINDOWS):
        for rank in range(RANKS):
            train(models[rank], [optimizers[rank]], rank, range(window, window + 1))
        if (window + 1) % EVERY == 0:
            for i, anchor in enumerate(anchors):
                sent = []
                for rank in range(RANKS):
                    p = 0.9 * kept[rank][i] + anchor - list(models[rank].parameters())[i].detach()
                    sent.append(p if p.dim() < 2 else largest(p, 32, 4))
                    kept[rank][i] = p - sent[-1]
                anchor -= 0.8 * torch.stack(sent).mean(0)
                for model in models:
                    list(model.parameters())[i].data.copy_(anchor)
    for found in run_threads(work, RANKS):
        for mine, wanted in zip(found, anchors, strict=True):
            torch.testing.assert_close(mine, wanted, rtol=1e-10, atol=1e-12)


def test_an_exchange_sends_at_most_a_ninetieth_of_the_dense_one() -> None:
    def work(world: World, spec: str) -> int:
        model = nn.Linear(512, 512, bias=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        replica = un.parallel(model, optimizer, spec, world=world)
        before = sum(r.bytes_sent for r in world.ledger.records)
        for window in range(2):
            optimizer.zero_grad()
            x = torch.randn(4, 512, generator=torch.Generator().manual_seed(window + 10 * world.rank))
            model(x).square().mean().backward()
            optimizer.step()
        sent = sum(r.bytes_sent for r in world.ledger.records) - before
        replica.close()
        return int(sent)

    dense = run_threads(lambda world: work(world, "diloco(every=2)"), 2)[0]
    sparse = run_threads(lambda world: work(world, "sparseloco(every=2)"), 2)[0]
    closed = 64 * (64 * 14 // 8 + 4)  # 64 chunks
    assert closed <= sparse <= 1.01 * closed + 24  # and a word about writes and learning rates
    assert dense >= all_reduce_bytes(4 * 512 * 512, 2)
    assert sparse <= dense / 90


def test_its_replica_and_its_spec_have_its_name() -> None:
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    replica = un.parallel(model, optimizer, "sparseloco(every=4)", world=World())
    assert replica.strategy == build("sparseloco(every=4)")
    assert build("sparseloco(every=4)").pattern().every == 4
    replica.close()


# MuLoCo ----------------------------------------------------------------------------------------------------------

MULOCO = f"diloco(every={EVERY}, outer_momentum=0.6, reducer=topk(chunk=4096, k=4096, bits=2))"


def split_optimizers(model: nn.Module) -> list[torch.optim.Optimizer]:
    """AdamW for vectors, Muon for matrices: the one that un.parallel knows steps last."""
    vectors = [p for p in model.parameters() if p.dim() != 2]
    matrices = [p for p in model.parameters() if p.dim() == 2]
    return [torch.optim.AdamW(vectors, lr=0.01), torch.optim.Muon(matrices, lr=0.02)]


def test_muon_inside_diloco_with_two_optimizers_keeps_one_model_and_learns() -> None:
    def work(world: World) -> tuple[list[Tensor], float, float]:
        model = make().float()
        with torch.no_grad():
            first = sum(_loss32(model, w).item() for w in range(100, 110))
        optimizers = split_optimizers(model)
        replica = un.parallel(model, optimizers[-1], MULOCO, world=world)
        for window in range(150):
            for optimizer in optimizers:
                optimizer.zero_grad()
            _loss32(model, 10 * window + world.rank).backward()
            for optimizer in optimizers:
                optimizer.step()
        ended = [p.detach().clone() for p in model.parameters()]  # 150 is a multiple of `every`: the anchors
        replica.close()
        with torch.no_grad():
            return ended, first, sum(_loss32(model, w).item() for w in range(100, 110))

    results = run_threads(work, 2)
    for ended, first, last in results:
        assert all(map(torch.equal, ended, results[0][0]))  # vectors, too, which another optimizer steps
        assert last < 0.5 * first


def _loss32(model: nn.Module, seed: int) -> Tensor:
    x = torch.randn(16, 12, generator=torch.Generator().manual_seed(seed))
    return (model(x) - x[:, :4].sin()).square().mean()


def test_muon_refuses_vectors_by_name() -> None:
    with pytest.raises(ValueError, match="2D"):
        torch.optim.Muon(make().parameters(), lr=0.02)


def test_two_bits_a_number_and_nothing_else_travel() -> None:
    def work(world: World) -> int:
        model = nn.Linear(256, 256, bias=False)
        optimizer = torch.optim.Muon(model.parameters(), lr=0.02)
        replica = un.parallel(model, optimizer, MULOCO, world=world)
        before = sum(r.bytes_sent for r in world.ledger.records)
        for _ in range(EVERY):
            optimizer.zero_grad()
            model(torch.ones(2, 256)).square().mean().backward()
            optimizer.step()
        sent = sum(r.bytes_sent for r in world.ledger.records) - before
        replica.close()
        return int(sent)

    closed = 256 * 256 * 2 // 8 + 4 * 16
    assert closed <= run_threads(work, 2)[0] <= 1.01 * closed + 24
