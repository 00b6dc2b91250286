"""Buckets in the order in which gradients come."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import unisono as un
from unisono.world import World


class Backwards(nn.Module):
    """Registered against the order of use; one layer is used on some ranks only."""

    def __init__(self) -> None:
        super().__init__()
        self.last, self.some, self.first = nn.Linear(8, 2), nn.Linear(8, 8), nn.Linear(4, 8)

    def forward(self, x: Tensor, whole: bool) -> Tensor:
        hidden = self.first(x).tanh()
        return self.last(self.some(hidden) if whole else hidden)


def test_buckets_follow_the_order_in_which_gradients_came_on_rank_0() -> None:
    def work(world: World) -> tuple[list[str], list[str], list[Tensor]]:
        model = Backwards().double()
        with torch.no_grad():
            for i, p in enumerate(model.parameters()):
                p.copy_(torch.arange(p.numel(), dtype=torch.float64).view(p.shape).sin() + i)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        replica = un.parallel(model, optimizer, "allreduce(order=ready, overlap=True, bucket_bytes=64)", world=world)
        orders = []
        for t in range(3):
            x = torch.arange(8, dtype=torch.float64).view(2, 4) * (world.rank + t + 1) / 8
            optimizer.zero_grad(set_to_none=t != 1)  # gradients that stay are in the former buckets
            model(x, whole=world.rank == 0 or t == 2).square().mean().backward()
            orders.append([name for bucket in replica.windows.buckets for name in bucket.names])
            optimizer.step()
        assert orders[1] == orders[2]
        replica.close()
        return orders[0], orders[1], [p.detach().clone() for p in model.parameters()]

    results = un.run_threads(work, 2)
    model = Backwards().double()
    with torch.no_grad():
        for i, p in enumerate(model.parameters()):
            p.copy_(torch.arange(p.numel(), dtype=torch.float64).view(p.shape).sin() + i)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for t in range(3):
        optimizer.zero_grad()
        for rank in range(2):
            x = torch.arange(8, dtype=torch.float64).view(2, 4) * (rank + t + 1) / 8
            (model(x, whole=rank == 0 or t == 2).square().mean() / 2).backward()
        optimizer.step()
    for before, after, found in results:
        assert [name.partition(".")[0] for name in before[::2]] == ["first", "some", "last"]
        assert [name.partition(".")[0] for name in after[::2]] == ["last", "some", "first"]
        for x, p in zip(found, model.parameters(), strict=True):
            torch.testing.assert_close(x, p.detach(), rtol=1e-12, atol=1e-12)
