"""What a step of a small model exchanges: one bucket, in one message, with the flags of its parameters."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import unisono as un
from unisono.methods.buckets import group_into_buckets
from unisono.world import World

MIB = 1 << 20


class Branches(nn.Module):
    """One parameter that all ranks use, one a rank, and one that none uses."""

    def __init__(self, ranks: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.common = nn.Parameter(torch.ones(5, dtype=dtype))
        self.own = nn.ParameterList(nn.Parameter(torch.ones(3, dtype=dtype)) for _ in range(ranks))
        self.unused = nn.Parameter(torch.ones(2, dtype=dtype))

    def forward(self, rank: int) -> Tensor:
        return self.common.sum() * (rank + 1) + self.own[rank].sum() * 4


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
def test_flags_travel_with_the_gradients_and_say_what_some_rank_used(overlap: bool, dtype: torch.dtype) -> None:
    def work(world: World) -> tuple[list[Tensor | None], list[str]]:
        model = Branches(world.size, dtype)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        replica = un.parallel(model, optimizer, f"allreduce(overlap={overlap})", world=world)
        for _ in range(3):
            before = world.ledger.sent().collectives
            optimizer.zero_grad()
            model(world.rank).backward()
            optimizer.step()
        count = world.ledger.sent().collectives - before
        tags = [record.tag for record in list(world.ledger.records)[-count:]]
        replica.close()
        return [p.grad for p in model.parameters()], tags

    for grads, tags in un.run_threads(work, 4):
        common, unused, *own = grads
        assert common is not None
        assert common.tolist() == [2.5] * 5  # the mean of 1, 2, 3, 4
        assert [grad.tolist() for grad in own if grad is not None] == [[1.0] * 3] * 4  # 4 on one rank of 4
        assert unused is None
        assert tags == ["gradients/0"]


def test_a_learning_rate_that_fell_on_one_rank_is_known_to_all_without_another_message() -> None:
    def work(world: World) -> list[bool]:
        model = nn.Linear(3, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        replica: Any = un.parallel(model, optimizer, "allreduce", world=world)
        fell = []
        for t in range(3):
            optimizer.zero_grad()
            model(torch.ones(1, 3)).sum().backward()
            optimizer.step()
            fell.append(replica.reduction._decayed)
            if t == 0 and world.rank == 1:
                optimizer.param_groups[0]["lr"] = 0.05
        replica.close()
        return fell

    assert un.run_threads(work, 3) == [[False, True, False]] * 3


def group(*sizes: int, bucket_bytes: int = 25 * MIB) -> list[int]:
    """Bytes of each bucket, for parameters of so many bytes in the order in which backward reaches them."""
    named = [(str(i), nn.Parameter(torch.empty(n // 4, device="meta"))) for i, n in enumerate(reversed(sizes))]
    return [sum(p.numel() * 4 for _, p in some) for some in group_into_buckets(named, bucket_bytes)]


def test_a_model_of_two_mebibytes_is_one_bucket() -> None:
    assert group(MIB // 2, MIB, MIB // 2) == [2 * MIB]


def test_only_the_last_bucket_may_be_smaller_than_a_mebibyte() -> None:
    assert group(MIB // 8, 25 * MIB, MIB // 2) == [25 * MIB + MIB // 8, MIB // 2]
    assert group(MIB // 2, MIB // 2, 20 * MIB, 4 * MIB, 4 * MIB) == [MIB, 24 * MIB, 4 * MIB]


def test_buckets_that_are_asked_for_small_hold_no_more_than_that() -> None:
    assert group(400, 400, 400, 400, bucket_bytes=800) == [800, 800]
