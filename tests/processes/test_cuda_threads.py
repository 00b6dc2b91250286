"""Ranks that are threads and share a GPU: collectives between their streams, and every kind of method."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import unisono as un

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
RANKS, N = 4, 3_000_000


def late(value: float, n: int = N, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A tensor that the stream fills after much other work."""
    x = torch.randn(2048, 2048, device="cuda")
    for _ in range(10):
        x = torch.mm(x, x).clamp_(-1, 1)
    return torch.full((n,), float(value), device="cuda").add_(x[0, 0] * 0).to(dtype)


@pytest.mark.parametrize("inline", [True, False])
def test_collectives_between_streams(inline: bool) -> None:
    def work(world: un.World) -> None:
        r, n = world.rank, world.size
        assert world.device == torch.device("cuda:0")
        channel = world.channel(inline=inline)
        with torch.cuda.stream(torch.cuda.Stream()):
            for turn in range(5):
                base = 10.0 * turn
                mean = channel.all_reduce(late(base + r), "mean").wait()
                assert mean.unique().tolist() == [base + 1.5]
                both = channel.all_reduce([late(base + r), late(r, dtype=torch.bfloat16)], "sum").wait()
                assert [x.unique().tolist() for x in both] == [[4 * base + 6], [6.0]]
                gathered = channel.all_gather(late(base + r, 1000 + r)).wait()
                assert [(len(x), x.unique().tolist()) for x in gathered] == [(1000 + q, [base + q]) for q in range(n)]
                scattered = channel.reduce_scatter([late(base + r + d) for d in range(n)], "sum").wait()
                assert scattered.unique().tolist() == [4 * base + 6 + 4 * r]
                given = channel.broadcast(late(base + r), 2).wait()
                assert given.unique().tolist() == [base + 2]
                came = channel.all_to_all([late(10 * base + 4 * r + d, 5000) for d in range(n)]).wait()
                assert [x.unique().tolist() for x in came] == [[10 * base + 4 * q + r] for q in range(n)]
                sending = channel.send(late(base + r), (r + 1) % n)
                heard = channel.recv(torch.empty(N, device="cuda"), (r - 1) % n).wait()
                assert heard.unique().tolist() == [base + (r - 1) % n]
                sending.wait()
        channel.close()

    un.run_threads(work, RANKS, device="cuda")


def test_ranks_with_tensors_on_cpu_and_gpu_are_told() -> None:
    def work(world: un.World) -> None:
        world.all_reduce(torch.ones(10_000, device="cuda" if world.rank else "cpu")).wait()

    with pytest.raises(ValueError, match="cuda:0"):
        un.run_threads(work, 2, device="cuda", timeout_s=5.0)


def test_ranks_with_one_generator_of_random_numbers_capture_no_graph() -> None:
    """Where one captures, dropout of the others would fail."""

    def learn(world: un.World) -> tuple[bool, list[list[float]]]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 1)).to(world.device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        replica: Any = un.parallel(model, optimizer, "crossbow(learners=2)", world=world)
        batches = [torch.randn(16, 8, device=world.device) for _ in range(2)]
        for _ in range(8):
            replica.learn(lambda model, x: model(x).square().mean(), batches)
        found = replica._captured is None, [p.flatten().tolist() for p in replica.consolidate().parameters()]
        replica.close()
        return found

    [(first, here), (second, there)] = un.run_threads(learn, 2, device="cuda", timeout_s=20.0)
    assert first
    assert second
    assert here == there


SPECS = [
    *("allreduce", "allreduce(overlap=True)", "bf16", "bytegrad", "fp8", "loco", "qsgd", "onebit", "signsgd"),
    *("powersgd(rank=2)", "topk(k=0.1)", "randomk(k=0.2)", "cocktail", "ef21(topk(k=0.1, feedback=False))", "demo"),
    *("local_sgd(every=3)", "diloco(every=3)", "diloco(every=4, fragments=2, delay=1)", "sparseloco(every=3)"),
    *("sparta(share=0.1)", "gossip(exponential)", "async_average", "async_diloco(every=3)", "zero(stage=1)"),
    *("qadam(warmup=4)", "zero_one_adam(warmup=4, start=8, double=8, every=2)", "warmup(topk(k=0.1), steps=4)"),
]


@pytest.mark.parametrize("spec", SPECS)
def test_a_method_trains_as_on_the_cpu(spec: str) -> None:
    def train(world: un.World) -> tuple[float, float]:
        generator = torch.Generator().manual_seed(1)
        x, y = torch.randn(512, 16, generator=generator), torch.randint(4, (512,), generator=generator)
        x, y = x.to(world.device), y.to(world.device)
        layers = [nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 4)]
        for layer in layers[::2]:
            for p in layer.parameters():
                with torch.no_grad():
                    p.copy_(0.2 * torch.randn(p.shape, generator=generator))
        model = nn.Sequential(*layers).to(world.device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.003)
        replica = un.parallel(model, optimizer, spec, world=world)
        for step in range(24):
            mine = slice(16 * ((step * world.size + world.rank) % 32), None)
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x[mine][:16]), y[mine][:16]).backward()
            optimizer.step()
        made = replica.consolidate()
        loss = nn.functional.cross_entropy(made(x), y).item()
        norm = sum(p.detach().double().square().sum().item() for p in made.parameters()) ** 0.5
        replica.close()
        return loss, norm

    [cpu, cuda] = [un.run_threads(train, RANKS, device=device, timeout_s=20.0) for device in ("cpu", "cuda")]
    for here, there in zip(cpu, cuda, strict=True):
        assert there == pytest.approx(here, rel=0.1 if "async" in spec else 0.02), spec
