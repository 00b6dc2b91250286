"""Ranks with uneven parts against one process on the joined batch, in fp64."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import torch
import torch.distributed as dist
from ddp_cases import case, main_case
from ddp_pair import batch, expect, expect_same, mlp, settings, sgd
from torch import Tensor, nn

import unisono as un

TIGHT = 1e-12
ACCUMULATED = 2


def _data(n: int, *shape: int) -> Tensor:
    return batch(77, n, *(shape or (6,)), rank=0, dtype=torch.float64)


def _compare(ours: nn.Module, reference: nn.Module, when: str, *, grads: bool = True) -> None:
    for (name, mine), theirs in zip(ours.named_parameters(), reference.parameters(), strict=True):
        expect_same(mine, theirs, f"{name} {when}", rtol=TIGHT)
        if grads:
            expect_same(mine.grad, theirs.grad, f"gradient of {name} {when}", rtol=TIGHT)
    for (name, mine), theirs in zip(ours.named_buffers(), reference.buffers(), strict=True):
        expect_same(mine, theirs, f"{name} {when}", rtol=TIGHT)


def _windows(n: int, size: int, accumulate: int) -> Iterator[tuple[int, bool]]:
    """The start of each global batch, and whether a step follows."""
    starts = range(0, n, size)
    for i, start in enumerate(starts):
        yield start, (i + 1) % accumulate == 0 or i == len(starts) - 1


def _loop(model: nn.Module, reference: nn.Module, data: Tensor, size: int, *, accumulate: int, epochs: int) -> None:
    """Both loops side by side: ours over `un.shard`, the reference over slices of the whole."""
    optimizer, other = sgd(model.parameters()), sgd(reference.parameters())
    replica = un.parallel(model, optimizer, "allreduce", accumulate=accumulate, **settings)
    for epoch in range(epochs):
        batches = un.shard(data, batch_size=size, shuffle=False, name=f"joined {len(data)} {size} {id(replica)}")
        for x, (start, ends) in zip(batches, _windows(len(data), size, accumulate), strict=True):
            model(x).square().mean().backward()
            reference(data[start : start + size]).square().mean().backward()
            if ends:
                optimizer.step()
                other.step()
                _compare(model, reference, f"after batch {start} of epoch {epoch}")
                optimizer.zero_grad()
                other.zero_grad()
    replica.close()
    un.join().shards.clear()


@main_case
def uneven_ends_equal_one_process() -> None:
    for n, accumulate in ((11, 1), (11, ACCUMULATED), (9, 1), (9, ACCUMULATED)):  # 9: one sample for two ranks
        torch.manual_seed(3)
        model = mlp(torch.float64)
        _loop(model, copy.deepcopy(model), _data(n), 4, accumulate=accumulate, epochs=2)


@case
def uneven_ends_after_a_replica_was_closed() -> None:
    torch.manual_seed(3)
    model = mlp(torch.float64)
    reference = copy.deepcopy(model)
    for _ in range(2):  # nothing of the first replica is left at work in the second
        _loop(model, reference, _data(7), 4, accumulate=1, epochs=1)


@case
def bound_while_an_uneven_batch_is_out() -> None:
    torch.manual_seed(3)
    model = mlp(torch.float64)
    reference, data = copy.deepcopy(model), _data(3)
    for x in un.shard(data, batch_size=3, shuffle=False, name="bound late"):
        replica = un.parallel(model, sgd(model.parameters()), "allreduce", **settings)
        model(x).square().mean().backward()
        reference(data).square().mean().backward()
        _compare(model, reference, "in the first batch")
        replica.close()
    un.join().shards.clear()


@case
def unfrozen_while_an_uneven_batch_is_out() -> None:
    torch.manual_seed(3)
    model = mlp(torch.float64)
    reference, data = copy.deepcopy(model), _data(3)
    model[0].requires_grad_(False)
    replica = un.parallel(model, sgd(model.parameters()), "allreduce", **settings)
    for x in un.shard(data, batch_size=3, shuffle=False, name="unfrozen late"):
        model[0].requires_grad_(True)
        model(x).square().mean().backward()
        reference(data).square().mean().backward()
        _compare(model, reference, "in the first batch")
    replica.close()
    un.join().shards.clear()


# Batch normalisation over all ranks -----------------------------------------------------------------------


def _convolutional() -> nn.Module:
    layers = [nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.Tanh(), nn.Conv2d(3, 3, 2), nn.BatchNorm2d(3, momentum=None)]
    return nn.Sequential(*layers, nn.BatchNorm2d(3, affine=False), nn.Flatten(), nn.Linear(27, 2)).double()


def _sync_pair() -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(4)
    model = _convolutional()
    reference = copy.deepcopy(model)
    return un.sync_batch_norm(model), reference


@main_case
def sync_batch_norm_equals_the_joined_batch() -> None:
    model, reference = _sync_pair()
    expect(list(model.state_dict()) == list(reference.state_dict()), "the state-dict keys changed")
    _loop(model, reference, _data(12, 2, 6, 6), 4, accumulate=1, epochs=2)
    model.eval(), reference.eval()
    x = _data(3, 2, 6, 6)
    expect_same(model(x), reference(x), "evaluated", rtol=TIGHT)


@case
def sync_batch_norm_with_uneven_parts() -> None:
    for n in (11, 9):
        model, reference = _sync_pair()
        _loop(model, reference, _data(n, 2, 6, 6), 4, accumulate=1, epochs=2)


@case
def sync_batch_norm_outputs_and_input_gradients() -> None:
    """Parts of 5 and 2 samples, with a loss that is a sum: every weight is 1, and the mean is half the sum."""
    model, reference = _sync_pair()
    replica = un.parallel(model, sgd(model.parameters()), "allreduce", **settings)
    whole = _data(7, 2, 6, 6).requires_grad_(True)
    cut = [slice(0, 5), slice(5, 7)][dist.get_rank()]
    mine = whole.detach()[cut].clone().requires_grad_(True)
    target = _data(7, 2)
    ours, theirs = model(mine), reference(whole)
    expect_same(ours, theirs[cut], "output", rtol=TIGHT)
    (ours * target[cut]).square().sum().backward()
    (theirs * target).square().sum().backward()
    assert whole.grad is not None
    expect_same(mine.grad, whole.grad[cut], "gradient of the input", rtol=1e-9)
    for param in reference.parameters():
        assert param.grad is not None
        param.grad.mul_(0.5)
    for (name, a), b in zip(model.named_parameters(), reference.parameters(), strict=True):
        expect_same(a.grad, b.grad, f"gradient of {name}", rtol=1e-9)
    for (name, a), b in zip(model.named_buffers(), reference.buffers(), strict=True):
        expect_same(a, b, name, rtol=TIGHT)
    replica.close()


@case
def sync_batch_norm_in_half_precision_and_copied() -> None:
    model = un.sync_batch_norm(nn.BatchNorm1d(4))
    copied = copy.deepcopy(model)
    reference = nn.BatchNorm1d(4)
    parts = [batch(1, 8, 4, rank=r) for r in range(2)]
    for module in (model, copied):
        out = module(parts[dist.get_rank()].bfloat16())
        expect(out.dtype == torch.bfloat16, f"output is {out.dtype}")
        whole = reference(torch.cat(parts).bfloat16().float())
        expect_same(out.float(), whole.chunk(2)[dist.get_rank()], "output", rtol=0.02)
