"""`un.ddp_hook` below torch's DistributedDataParallel, against what plain torch computes."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import unisono as un
from torch_groups import leave_group

STEPS = 4  # after the first, DDP lays its buckets out anew


def make(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(12, 40), nn.Tanh(), nn.Linear(40, 30), nn.Tanh(), nn.Linear(30, 3)).double()


def batches(rank: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(7 + rank)
    return [torch.randn(5, 12, generator=generator, dtype=torch.float64) for _ in range(STEPS)]


def every_rank(x: torch.Tensor) -> list[torch.Tensor]:
    found = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(found, x.contiguous())
    return found


def gradients_of(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    alone = copy.deepcopy(model)
    alone(x).pow(2).mean().backward()
    return [p.grad for p in alone.parameters() if p.grad is not None]


def by_hand(model: nn.Module, x: torch.Tensor, kept: list[torch.Tensor], k: float) -> list[torch.Tensor]:
    """The mean over ranks of the largest k of each matrix of (gradient + what was kept); vectors in full."""
    means = []
    for g, e in zip(gradients_of(model, x), kept, strict=True):
        p = g + e
        sent = p.clone()
        if p.dim() > 1:
            count = max(1, round(k * p.numel()))
            sent = torch.zeros_like(p).view(-1)
            places = p.abs().view(-1).topk(count).indices
            sent[places] = p.view(-1)[places]
            sent = sent.view_as(p)
        e.copy_(p - sent)
        means.append(torch.stack(every_rank(sent)).mean(0))
    return means


def compare(
    spec: str, k: float, *, scales: Sequence[float] = (1.0,) * STEPS, rates: Sequence[float] | None = None
) -> float:
    """The largest difference from what is computed by hand, over some steps. By hand, there is no loss scale, and what
    was kept counts at the rate that it was met with."""
    model = make()
    wrapped = DistributedDataParallel(copy.deepcopy(model), bucket_cap_mb=0.002)
    optimizer = None if rates is None else torch.optim.SGD(wrapped.parameters(), lr=rates[0])
    scaler = torch.amp.GradScaler("cpu", init_scale=scales[0], enabled=len(set(scales)) > 1)
    wrapped.register_comm_hook(None, un.ddp_hook(spec, optimizer=optimizer, scaler=scaler))
    kept = [torch.zeros_like(p) for p in model.parameters()]
    worst, last = 0.0, None if rates is None else rates[0]
    for x, scale, rate in zip(batches(dist.get_rank()), scales, rates or [0.1] * STEPS, strict=True):
        if optimizer is not None and last is not None:
            torch._foreach_mul_(kept, last / rate)
            optimizer.param_groups[0]["lr"] = last = rate
        means = by_hand(model, x, kept, k)
        wrapped.zero_grad()
        loss = wrapped(x).pow(2).mean()
        scaler.scale(loss)  # a scaler has a scale from its first use on
        scaler.update(scale)
        scaler.scale(loss).backward()
        for p, q, mean in zip(model.parameters(), wrapped.parameters(), means, strict=True):
            assert q.grad is not None
            worst = max(worst, float((q.grad / scale - mean).abs().max()))
            with torch.no_grad():
                p.sub_(0.1 * mean)
                q.copy_(p)
    return worst


def work() -> dict[str, Any]:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    found: dict[str, Any] = {"dense": compare("dense", 1.0), "topk": compare("topk(k=0.1)", 0.1)}
    scales = [64.0, 128.0, 16.0, 16.0]
    found["scaled"] = compare("topk(k=0.1)", 0.1, scales=scales)
    found["scaled rates"] = compare("topk(k=0.1)", 0.1, scales=scales, rates=[0.1, 0.1, 0.05, 0.2])
    found["bytes"] = sum(un.join().ledger.by_tag().values())
    model = DistributedDataParallel(nn.Embedding(5, 2, sparse=True))
    model.register_comm_hook(None, un.ddp_hook("bf16"))
    try:
        model(torch.tensor([1])).sum().backward()
    except Exception as error:
        found["sparse"] = str(error)
    leave_group()
    return found


def test_the_mean_is_what_the_reducer_says() -> None:
    for found in un.launch(work, workers=2):
        assert found["dense"] < 1e-15
        assert found["topk"] < 1e-15
        assert found["scaled"] < 1e-15, "what is kept follows the loss scale"
        assert found["scaled rates"] < 1e-15, "and learning rates besides"
        assert found["bytes"] > 0
        assert "sparse" in found["sparse"]
