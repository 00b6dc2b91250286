"""Another strategy in mid-run."""

from __future__ import annotations

import copy
import threading

import pytest
import torch
from torch import Tensor, nn

import unisono as un
from unisono.world import World
from unisono.world.virtual import run_threads

MODELS = threading.Lock()


def started(world: World, strategy: str) -> tuple[nn.Module, torch.optim.Optimizer, un.Replica]:
    with MODELS:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return model, optimizer, un.parallel(model, optimizer, strategy, world=world)


def loss_of(model: nn.Module, t: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * t + rank)
    loss: Tensor = model(torch.randn(3, 4, generator=generator, dtype=torch.float64)).square().mean()
    return loss


def train(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, steps: range) -> None:
    for t in steps:
        optimizer.zero_grad()
        loss_of(model, t, rank).backward()
        optimizer.step()


def values(model: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("size", [1, 2, 3])
def test_switching_to_the_same_strategy_changes_nothing(size: int) -> None:
    def work(world: World, switch: bool) -> list[Tensor]:
        model, optimizer, replica = started(world, "topk(k=0.2)")
        train(model, optimizer, world.rank, range(3))
        if switch:
            former, replica = replica, replica.switch("topk(k=0.2)")
            assert former is not replica
            assert replica.step == 3
        train(model, optimizer, world.rank, range(3, 6))
        assert replica.step == world.ledger.step_count == 6
        replica.close()
        return values(model)

    stayed, switched = (run_threads(lambda world, s=s: work(world, s), size) for s in (False, True))
    for a, b in zip(stayed, switched, strict=True):
        assert all(map(torch.equal, a, b))


def test_what_was_still_to_be_sent_goes_over() -> None:
    def work(world: World) -> None:
        model, optimizer, replica = started(world, "topk(k=0.1)")
        train(model, optimizer, world.rank, range(3))
        kept = replica.state_dict()["local"]["reducer"]["0.weight"]["*residual"].clone()
        assert kept.abs().sum() > 0
        replica = replica.switch("powersgd(rank=1)")
        assert torch.equal(replica.state_dict()["local"]["reducer"]["0.weight"]["*residual"], kept)
        train(model, optimizer, world.rank, range(3, 5))
        replica.close()

    run_threads(work, 2)


@pytest.mark.filterwarnings("ignore:.*it costs accuracy")
@pytest.mark.parametrize(
    ("before", "after", "hosts"),
    [
        ("topk(k=0.1)", "allreduce", "ab"),
        ("topk(k=0.1)", "allreduce", "a"),
        ("hierarchical(topk(k=0.1))", "allreduce", "aab"),  # leaders keep it for their hosts
        ("masked(topk(k=0.1))", "topk(k=1.0)", "ab"),  # it is kept elsewhere
    ],
)
def test_what_was_still_to_be_sent_goes_out_with_the_next_mean(before: str, after: str, hosts: str) -> None:
    """Of plain SGD: all steps together are those of the mean gradients at the places that were visited."""
    rate = [0.1, 0.1, 0.1, 0.05, 0.05]  # what was met at 0.1 counts so, also where it goes out at 0.05

    def work(world: World) -> None:
        model, _, bound = started(world, "allreduce")
        bound.close()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        replica = un.parallel(model, optimizer, before, world=world)
        expected = values(model)
        for t in range(5):
            if t == 3:
                assert any(not torch.equal(x, y) for x, y in zip(values(model), expected, strict=True))
                replica = replica.switch(after)
            for group in optimizer.param_groups:
                group["lr"] = rate[t]
            for rank in range(world.size):  # in one process, without anything of ours
                twin = copy.deepcopy(model)
                twin.zero_grad()
                loss_of(twin, t, rank).backward()
                for x, p in zip(expected, twin.parameters(), strict=True):
                    x -= rate[t] * p.grad / world.size
            optimizer.zero_grad()
            loss_of(model, t, world.rank).backward()
            optimizer.step()
        for x, y in zip(values(model), expected, strict=True):
            torch.testing.assert_close(x, y, rtol=1e-9, atol=1e-9)
        replica.close()

    run_threads(work, len(hosts), hosts=list(hosts))


def test_what_goes_over_stays_in_the_units_of_amps_loss_scale() -> None:
    def work(world: World, switch: bool) -> list[Tensor]:
        model, optimizer, replica = started(world, "topk(k=0.1)")
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=1000)
        replica.watch(scaler)
        for t in range(4):
            if switch and t == 2:
                replica = replica.switch("topk(k=0.1)")
            generator = torch.Generator().manual_seed(100 * t + world.rank)
            optimizer.zero_grad()
            loss = model(torch.randn(3, 4, generator=generator, dtype=torch.float64)).square().mean()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        replica.close()
        return values(model)

    stayed, switched = (run_threads(lambda world, s=s: work(world, s), 2) for s in (False, True))
    for a, b in zip(stayed, switched, strict=True):
        assert all(map(torch.equal, a, b))


def test_a_refused_strategy_leaves_the_run_as_it_was() -> None:
    def work(world: World) -> list[Tensor]:
        model, optimizer, replica = started(world, "allreduce")
        train(model, optimizer, world.rank, range(2))
        with pytest.raises(ValueError, match="accumulate"):
            replica.switch("allreduce(accumulate=0)")
        train(model, optimizer, world.rank, range(2, 4))
        assert replica.step == 4
        return values(model)

    results = run_threads(work, 2)

    def plain(world: World) -> list[Tensor]:
        model, optimizer, _ = started(world, "allreduce")
        train(model, optimizer, world.rank, range(4))
        return values(model)

    assert all(map(torch.equal, results[0], run_threads(plain, 2)[0]))


def test_ranks_that_do_not_switch_alike_are_told() -> None:
    def work(world: World) -> None:
        _, _, replica = started(world, "allreduce")
        replica.switch("allreduce" if world.rank else "allreduce(accumulate=2)")

    with pytest.raises(ValueError, match="rank 1 asks for allreduce at step 0"):
        run_threads(work, 2)


# What is still to be sent has a unit -----------------------------------------------------------------------------


def residual_of(replica: un.Replica, name: str) -> Tensor:
    unsent = replica.unsent()
    assert unsent is not None
    total = unsent.total(name)
    assert total is not None
    return total.clone()


def adam(world: World, strategy: str) -> tuple[nn.Module, torch.optim.Optimizer, un.Replica]:
    with MODELS:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2)).double()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, betas=(0.75, 0.999))
    return model, optimizer, un.parallel(model, optimizer, strategy, world=world)


def test_gradients_become_momenta_and_gradients_again() -> None:
    """A gradient g moves an Adam's momentum by (1 - b1) g: so much of what was kept back is in the units of momenta."""

    def work(world: World) -> None:
        model, optimizer, replica = adam(world, "topk(k=0.1)")
        train(model, optimizer, world.rank, range(3))
        gradients = replica.state_dict()["local"]["reducer"]["0.weight"]["*residual"].clone()
        assert gradients.abs().sum() > 0
        replica = replica.switch("qadam(warmup=1, reducer=topk(k=0.1))")
        momenta = replica.state_dict()["local"]["reducer"]["0.weight"]["*residual"].clone()
        torch.testing.assert_close(momenta, gradients * 0.25)
        replica = replica.switch("topk(k=0.1)")
        torch.testing.assert_close(residual_of(replica, "0.weight"), gradients)
        replica.close()

    run_threads(work, 2)


def test_differences_of_parameters_go_over_to_a_method_that_exchanges_such() -> None:
    def work(world: World) -> None:
        model, optimizer, replica = started(world, "local_sgd(every=1, start=0, reducer=topk(k=0.1))")
        train(model, optimizer, world.rank, range(3))
        kept = residual_of(replica, "0.weight")
        replica = replica.switch("diloco(every=2, fragments=2, reducer=topk(k=0.1))")
        assert torch.equal(residual_of(replica, "0.weight"), kept)
        replica.close()

    run_threads(work, 2)


def test_differences_of_parameters_are_applied_where_the_next_method_has_no_use_for_them() -> None:
    def work(world: World) -> None:
        model, optimizer, replica = started(world, "local_sgd(every=1, start=0, reducer=topk(k=0.1))")
        train(model, optimizer, world.rank, range(3))
        agreed = dict(replica.consolidate().named_parameters())
        kept = residual_of(replica, "0.weight")
        mean = sum(torch.tensor(x, dtype=torch.float64) for x in world.gather_objects(kept.tolist())) / world.size
        assert mean.abs().sum() > 0
        replica = replica.switch("allreduce")
        after = dict(model.named_parameters())["0.weight"].detach()
        torch.testing.assert_close(after, agreed["0.weight"].detach() - mean, rtol=0, atol=1e-15)
        replica.close()

    run_threads(work, 2)


@pytest.mark.parametrize("after", ["local_sgd(every=2, start=0, reducer=topk(k=0.1))", "gossip", "parameter_server"])
def test_gradients_are_not_taken_for_something_else(after: str) -> None:
    def work(world: World, refused: bool) -> list[Tensor]:
        model, optimizer, replica = started(world, "topk(k=0.1)")
        train(model, optimizer, world.rank, range(3))
        if refused:
            with pytest.raises(ValueError, match=r"topk.*kept back gradients.*switch to 'allreduce' first"):
                replica.switch(after)
        train(model, optimizer, world.rank, range(3, 6))
        replica.close()
        return values(model)

    stayed, refused = (run_threads(lambda world, r=r: work(world, r), 2) for r in (False, True))
    for a, b in zip(stayed, refused, strict=True):
        assert all(map(torch.equal, a, b))


@pytest.mark.parametrize("is_old", [False, True])
def test_a_checkpoint_of_momenta_is_loaded_as_gradients(is_old: bool) -> None:
    """By allreduce, from qadam: the next mean gradient has what was kept back, over 1 - b1 (here 1/4). Checkpoints of
    before said nothing of the unit."""

    def work(world: World) -> None:
        model, optimizer, replica = adam(world, "qadam(warmup=1, reducer=topk(k=0.1))")
        train(model, optimizer, world.rank, range(4))
        state = copy.deepcopy(replica.state_dict())
        if is_old:
            state["shared"]["reducer"].pop("unit", None)
        momenta = state["local"]["reducer"]["0.weight"]["*momenta/residual"]
        assert momenta.abs().sum() > 0
        replica.close()

        again = un.parallel(model, optimizer, "allreduce", world=world)
        again.load_state_dict(state)
        optimizer.zero_grad()
        loss_of(model, 9, world.rank).backward()
        found = next(model.parameters()).grad
        assert found is not None
        mine = torch.autograd.grad(loss_of(model, 9, world.rank), list(model.parameters()))[0] + momenta / 0.25
        every = [torch.tensor(x, dtype=torch.float64) for x in world.gather_objects(mine.tolist())]
        torch.testing.assert_close(found, torch.stack(every).mean(0), rtol=0, atol=1e-12)
        again.close()

    run_threads(work, 2)


def test_a_checkpoint_of_gradients_is_loaded_as_momenta() -> None:
    def work(world: World) -> None:
        model, optimizer, replica = adam(world, "topk(k=0.1)")
        train(model, optimizer, world.rank, range(3))
        state = copy.deepcopy(replica.state_dict())
        replica.close()
        again = un.parallel(model, optimizer, "qadam(warmup=1, reducer=topk(k=0.1))", world=world)
        again.load_state_dict(state)
        gradients = state["local"]["reducer"]["0.weight"]["*residual"]
        momenta = again.state_dict()["local"]["reducer"]["0.weight"]["*residual"]
        torch.testing.assert_close(momenta, gradients * 0.25)
        again.close()

    run_threads(work, 2)
