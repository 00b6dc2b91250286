"""`un.sync_batch_norm` in worlds of threads, against plain batch normalisation on the joined batch in fp64."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import unisono as un
from unisono.training.batch_norm import SyncBatchNorm
from unisono.world import World
from unisono.world.virtual import run_threads

TIGHT = 1e-11


def plain() -> nn.Module:
    layers = [nn.BatchNorm1d(3), nn.Linear(3, 4), nn.BatchNorm1d(4, momentum=None), nn.Linear(4, 2)]
    model = nn.Sequential(*layers).double()
    with torch.no_grad():
        for i, param in enumerate(model.parameters()):  # no random numbers: threads share the generator
            param.copy_(torch.linspace(-1, 1 + i, param.numel(), dtype=torch.float64).sin().view(param.shape))
    return model


def numbers(n: int, seed: int = 0) -> Tensor:
    return torch.randn(n, 3, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def close(a: Tensor | None, b: Tensor | None) -> None:
    torch.testing.assert_close(a, b, rtol=TIGHT, atol=TIGHT)


def same_as(model: nn.Module, reference: nn.Module) -> None:
    for a, b in zip(model.state_dict().values(), reference.state_dict().values(), strict=True):
        close(a, b)
    for x, y in zip(model.parameters(), reference.parameters(), strict=True):
        close(x.grad, y.grad)


@pytest.mark.parametrize("parts", [[4, 4, 4], [5, 3, 1], [2, 1, 0]])
def test_uneven_parts_with_their_weights_are_the_joined_batch(parts: list[int]) -> None:
    """The loss is a mean over samples, so a rank counts by its part; one without any reads along with weight 0."""
    whole = numbers(sum(parts))

    def work(world: World) -> None:
        model, reference = un.sync_batch_norm(plain(), world), plain()
        replica = un.parallel(model, torch.optim.SGD(model.parameters(), lr=0.1), world=world)
        for step in range(3):
            n, start = parts[world.rank], sum(parts[: world.rank])
            world.weight = n * world.size / len(whole)
            model.zero_grad()
            reference.zero_grad()
            mine = whole[start : start + n] if n else torch.full((1, 3), 1e30, dtype=torch.float64)
            out, expected = model(mine + step), reference(whole + step)
            if n:
                close(out, expected[start : start + n])
            out.square().mean().backward()
            expected.square().mean().backward()
            same_as(model, reference)
        replica.close()

    run_threads(work, 3)


def test_it_follows_the_replica_to_another_world() -> None:
    def work(world: World) -> None:
        model, reference = un.sync_batch_norm(plain(), world), plain()
        replica = un.parallel(model, torch.optim.SGD(model.parameters(), lr=0.1), world=world)
        smaller = world.split([[0, 1], [2]])
        if world.rank == 2:
            return
        replica.rebind(smaller)
        model(numbers(4, smaller.rank)).square().mean().backward()
        reference(torch.cat([numbers(4, 0), numbers(4, 1)])).square().mean().backward()
        same_as(model, reference)

    run_threads(work, 3)


def test_alone_and_in_evaluation_it_is_plain_batch_normalisation() -> None:
    def work(world: World) -> None:
        model, reference = un.sync_batch_norm(plain(), world), plain()
        if world.size > 1:
            model.eval()
            reference.eval()
        out = model(numbers(5, world.rank))  # other numbers, and no exchange
        assert torch.equal(out, reference(numbers(5, world.rank)))
        assert all(map(torch.equal, model.state_dict().values(), reference.state_dict().values()))

    run_threads(work, 1)
    run_threads(work, 2)


def test_parameters_keys_and_copies() -> None:
    model = plain()
    keys, params = list(model.state_dict()), list(model.parameters())
    changed = un.sync_batch_norm(model, World())
    assert changed is model
    assert list(model.state_dict()) == keys
    assert all(a is b for a, b in zip(model.parameters(), params, strict=True))
    assert un.sync_batch_norm(model, World())[0] is model[0], "twice changes nothing"
    twin = copy.deepcopy(model)
    assert isinstance(twin[0], SyncBatchNorm)
    assert twin[0].weight is not model[0].weight
    assert twin[0].link is model[0].link
    with pytest.raises(ValueError, match="at least 2 dimensions, got 1"):
        model[0](torch.ones(3, dtype=torch.float64))
    assert isinstance(un.sync_batch_norm(nn.BatchNorm2d(3), World()), SyncBatchNorm)


# A part of one sample -----------------------------------------------------------------------------------------


def train_uneven(model: nn.Module, world: World, samples: int, **settings: object) -> list[Tensor]:
    """Two steps a pass over `samples` in batches of 4: the last one leaves rank 1 a single sample or none."""
    data = torch.linspace(-1, 2, 3 * samples, dtype=torch.float64).cos().view(samples, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    replica = un.parallel(model, optimizer, world=world)
    try:
        for (x,) in un.shard((data,), batch_size=4, shuffle=False, world=world, **settings):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
    finally:
        replica.close()
    return list(model.state_dict().values())


def train_alone(samples: int) -> list[Tensor]:
    model = plain()
    data = torch.linspace(-1, 2, 3 * samples, dtype=torch.float64).cos().view(samples, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x in data.split(4):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    return list(model.state_dict().values())


@pytest.mark.parametrize("samples", [7, 6])  # 2 + 1 at the end, and 1 + 1
def test_a_part_of_one_sample_trains_where_the_statistics_are_over_all_ranks(samples: int) -> None:
    found = run_threads(lambda world: train_uneven(un.sync_batch_norm(plain(), world), world, samples), 2)
    for values in found:
        for a, b in zip(values, train_alone(samples), strict=True):
            close(a, b)


def test_one_sample_in_all_is_refused_on_every_rank() -> None:
    def work(world: World) -> None:
        with pytest.raises(ValueError, match=r"one value for each channel over all 2 ranks.*drop_last=True"):
            train_uneven(un.sync_batch_norm(plain(), world), world, 5)  # 1 + a stand-in at the end

    run_threads(work, 2)


@pytest.mark.parametrize("samples", [6, 5])
def test_plain_batch_normalisation_says_what_to_do_with_a_part_of_one_sample(samples: int) -> None:
    def work(world: World) -> None:
        model = plain()
        with pytest.raises(ValueError, match=r"0 \(BatchNorm1d\).*single sample.*sync_batch_norm.*drop_last=True"):
            train_uneven(model, world, samples)
        assert not model[0]._forward_pre_hooks, "none is left on a model that no replica watches"
        train_uneven(model, world, samples, drop_last=True)
        with pytest.raises(ValueError, match="Expected more than 1 value"):  # PyTorch's own again
            model(numbers(1))
        model.eval()
        model(numbers(1))

    run_threads(work, 2)


def test_a_copy_of_the_model_is_watched_no_more() -> None:
    def work(world: World) -> None:
        model = plain()
        replica = un.parallel(model, torch.optim.SGD(model.parameters(), lr=0.1), "local_sgd(every=4)", world=world)
        assert all(len(module._forward_pre_hooks) == 1 for module in (model[0], model[2]))
        model(numbers(2, world.rank)).sum().backward()
        replica.optimizer.step()
        assert not any(module._forward_pre_hooks for module in replica.consolidate().modules())
        replica.close()

    run_threads(work, 2)
