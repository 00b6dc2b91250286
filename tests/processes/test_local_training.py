"""Local SGD and DiLoCo between real workers, on CPU and CUDA: as in a world of threads."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import unisono as un
from unisono.world import World
from unisono.world.virtual import run_threads

SPECS = [
    "local_sgd(every=3, start=2, momentum=average)",
    "diloco(every=4, fragments=3, delay=2, bucket_bytes=4096)",
    "diloco(every=4, delay=1, reducer=topk(k=0.2))",
]


def net() -> nn.Module:
    generator = torch.Generator().manual_seed(0)
    model = nn.Sequential(nn.Linear(40, 64), nn.BatchNorm1d(64), nn.Tanh(), nn.Linear(64, 3)).double()
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=generator, dtype=torch.float64) / 8)
    return model


def trained(world: World, spec: str, aside: bool = False) -> list[Tensor]:
    model = net().to(world.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    replica = un.parallel(model, optimizer, spec, world=world)
    stream = torch.cuda.Stream() if aside else None
    with torch.cuda.stream(stream):  # None: where it is
        for t in range(13):
            x = torch.randn(5, 40, generator=torch.Generator().manual_seed(100 * t + world.rank), dtype=torch.float64)
            optimizer.zero_grad()
            loss = model(x.to(world.device)).square().mean()
            if aside:
                torch.cuda._sleep(20_000_000)  # parameters change long after the program has gone on
            loss.backward()
            optimizer.step()
        made = replica.consolidate()
        found = [x.detach().cpu() for x in (*model.state_dict().values(), *made.state_dict().values())]
    replica.close()
    return found


def worker(spec: str, device: str, aside: bool) -> list[Tensor]:
    return trained(un.join(device=device), spec, aside)


@pytest.mark.parametrize("spec", SPECS)
def test_workers_train_as_threads_do(spec: str) -> None:
    threads = run_threads(lambda world: trained(world, spec), 3)
    for mine, theirs in zip(un.launch(worker, workers=3, args=(spec, "cpu", False)), threads, strict=True):
        for found, right in zip(mine, theirs, strict=True):
            torch.testing.assert_close(found, right, rtol=1e-12, atol=1e-12)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("aside", [False, True], ids=["default stream", "own stream"])
@pytest.mark.parametrize("spec", SPECS[:2])
def test_workers_that_share_a_device_train_as_threads_on_the_cpu_do(spec: str, aside: bool) -> None:
    threads = run_threads(lambda world: trained(world, spec), 2)
    for mine, theirs in zip(un.launch(worker, workers=2, args=(spec, "cuda:0", aside)), threads, strict=True):
        for found, right in zip(mine, theirs, strict=True):
            torch.testing.assert_close(found, right, rtol=1e-7, atol=1e-9)
