"""CUDA tensors: through NCCL, in memory of the device that ranks share, and a world of one."""

from __future__ import annotations

import pytest
import torch

import unisono as un

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def collectives() -> dict[str, object]:
    world = un.join(device="cuda:0")  # one device for all ranks: NCCL refuses that
    r, n = world.rank, world.size
    x = torch.full((300_001,), float(r + 1), device=world.device, dtype=torch.float64)
    mean = world.all_reduce(x.clone(), "mean").wait()
    half = world.all_reduce(torch.full((1000,), float(r + 1), device=world.device, dtype=torch.float16), "sum").wait()
    gathered = world.all_gather(torch.full((r + 1,), r, device=world.device)).wait()
    scattered = world.reduce_scatter([torch.full((5,), float(r + d), device=world.device) for d in range(n)], "sum")
    sent = torch.full((7,), float(r), device=world.device)
    world.broadcast(sent, 1).wait()
    return {
        "device": str(world.device),
        "nccl": world.has_nccl,
        "mean": mean.unique().tolist(),
        "half": half.unique().tolist(),
        "gathered": [t.tolist() for t in gathered],
        "scattered": scattered.wait().tolist(),
        "sent": sent.tolist(),
    }


def test_collectives_of_ranks_that_share_a_device() -> None:
    for rank, found in enumerate(un.launch(collectives, workers=2)):
        assert found == {
            "device": "cuda:0",
            "nccl": False,
            "mean": [1.5],
            "half": [3.0],
            "gathered": [[0], [1, 1]],
            "scattered": [2.0 * rank + 1] * 5,
            "sent": [1.0] * 7,
        }


def net(dtype: torch.dtype = torch.float64) -> torch.nn.Module:
    torch.manual_seed(0)
    layers = [torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8), torch.nn.ReLU(), torch.nn.Flatten()]
    return torch.nn.Sequential(*layers, torch.nn.Linear(8 * 36, 4)).to(dtype)


def batches() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(22, 3, 8, 8, generator=generator, dtype=torch.float64)
    return x, torch.randn(22, 4, generator=generator, dtype=torch.float64)


def train(overlap: bool, aside: bool) -> list[torch.Tensor]:
    world = un.join(device="cuda:0")
    model = un.sync_batch_norm(net().to(world.device), world)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    un.parallel(model, optimizer, "allreduce(bucket_bytes=4096)", overlap=overlap)
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream() if aside else torch.cuda.current_stream()):
        for _ in range(2):
            for a, b in un.shard(batches(), batch_size=8, shuffle=False):
                optimizer.zero_grad()
                loss = torch.nn.functional.mse_loss(model(a), b)
                if aside:
                    torch.cuda._sleep(50_000_000)  # the gradients come long after the hooks
                loss.backward()
                optimizer.step()
    torch.cuda.synchronize()
    return [p.detach().cpu() for p in model.parameters()]


@pytest.mark.parametrize(("overlap", "aside"), [(True, False), (False, False), (True, True), (False, True)])
def test_training_on_a_shared_device_equals_one_process(overlap: bool, aside: bool) -> None:
    """`aside`: on a stream of the program's own, which no other thread knows."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    x, y = batches()
    for _ in range(2):
        for a, b in zip(x.split(8), y.split(8), strict=True):
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(model(a), b).backward()
            optimizer.step()
    for weights in un.launch(train, workers=2, args=(overlap, aside)):
        for found, right in zip(weights, model.parameters(), strict=True):
            torch.testing.assert_close(found, right.detach(), rtol=1e-9, atol=1e-11)


def nccl_alone() -> dict[str, object]:
    """Every operation of the NCCL transport, in a group of one: what one device can show of it."""
    import torch.distributed as dist

    from unisono.world import World
    from unisono.world.transports.nccl import NcclTransport

    device = torch.device("cuda", 0)
    store = dist.HashStore()
    transport = NcclTransport(store, 0, 1, device, timeout_s=60)
    x = torch.arange(6.0, device=device)
    out = torch.empty(6, device=device)
    transport.all_reduce([x], "mean")
    transport.broadcast([x], 0)
    transport.reduce_scatter(x, [6], "sum", out)
    gathered = torch.empty(6, device=device)
    transport.all_gather(x, [gathered])
    torch.cuda.synchronize()
    transport.close()
    alone = World(None, device=device)
    return {"x": x.tolist(), "out": out.tolist(), "gathered": gathered.tolist(), "alone": alone.has_nccl}


def test_the_nccl_transport_in_a_group_of_one() -> None:
    (found,) = un.launch(nccl_alone, workers=1)
    line = [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
    assert found == {"x": line, "out": line, "gathered": line, "alone": False}


def amp() -> list[float]:
    world = un.join(device="cuda:0")
    model = net(torch.float32).to(world.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    un.parallel(model, optimizer)
    scaler = torch.amp.GradScaler("cuda", init_scale=2.0**16)
    x, y = (t.float().to(world.device) for t in batches())
    scales = []
    for step in range(4):
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            loss = torch.nn.functional.mse_loss(model(x), y)
        if step == 1 and world.rank == 1:
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return [*scales, float(sum(p.double().sum() for p in model.parameters()))]


def test_an_overflow_on_one_rank_skips_the_step_on_all() -> None:
    first, second = un.launch(amp, workers=2)
    assert first == second
    assert first[1] == first[0] / 2
