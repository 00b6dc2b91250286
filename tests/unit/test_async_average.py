"""Asynchronous averaging: what is conserved, that nobody waits, and that all agree when it ends and goes on."""

from __future__ import annotations

import copy
import gc
import threading
import time
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import unisono as un
from unisono.methods.strategies.async_average import AsyncAverageReplica
from unisono.world import World
from unisono.world.transports import PeerLost
from unisono.world.virtual import run_threads

MODELS = threading.Lock()


def make() -> nn.Module:
    with MODELS:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).double()


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def batch(t: int, rank: int) -> Tensor:
    return torch.randn(4, 5, generator=torch.Generator().manual_seed(100 * t + rank), dtype=torch.float64)


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    return (model(x) - x[:, :3]).square().mean()


def step(model: nn.Module, optimizer: Any, t: int, rank: int) -> None:
    optimizer.zero_grad()
    loss_of(model, batch(t, rank)).backward()
    optimizer.step()


def train(model: nn.Module, optimizer: Any, rank: int, steps: range) -> None:
    for t in steps:
        step(model, optimizer, t, rank)


def flat(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def started(world: World, spec: str = "async_average(every_s=0)") -> tuple[nn.Module, Any, AsyncAverageReplica]:
    model = make()
    optimizer = sgd(model)
    replica = un.parallel(model, optimizer, spec, world=world)
    assert isinstance(replica, AsyncAverageReplica)
    return model, optimizer, replica


def until(ready: Callable[[], bool], what: str, timeout_s: float = 20.0) -> None:
    end = time.monotonic() + timeout_s
    while not ready():
        assert time.monotonic() < end, what
        time.sleep(0.002)


def gathered(world: World, x: Tensor) -> Tensor:
    return torch.stack(world.all_gather(x, even=True).wait())


# The mean ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [2, 3, 4])
def test_without_gradients_every_rank_reaches_the_mean(size: int) -> None:
    """x += mean - copy keeps the sum over the ranks, and at rest one round makes all equal."""

    def work(world: World) -> None:
        model, optimizer, replica = started(world)
        train(model, optimizer, world.rank, range(6))
        replica.abort()
        until(lambda: not replica.averaging, "no end of averaging")
        world.barrier()
        train(model, optimizer, world.rank, range(6, 8))  # alone: a last round may have made all equal
        replica.state_dict()  # what is pending is added
        before = gathered(world, flat(model))
        assert not torch.equal(before[0], before[1])
        optimizer.param_groups[0]["lr"] = 0.0
        rounds = replica.rounds
        replica.resume()
        until(lambda: replica.rounds >= rounds + 2, "no averaging")
        train(model, optimizer, world.rank, range(8, 10))
        world.barrier()
        torch.testing.assert_close(flat(model), before.mean(0), rtol=1e-12, atol=1e-12)
        replica.close()

    run_threads(work, size)


def test_consolidate_has_the_last_round_in_it_on_every_rank() -> None:
    """One rank has added what a round left, the other has not yet: the mean is that of what both learned alone."""

    def work(world: World) -> Tensor:
        model, optimizer, replica = started(world, "async_average(every_s=600.0)")
        step(model, optimizer, 0, world.rank)
        until(lambda: replica.rounds == 1, "no averaging")
        world.barrier()
        optimizer.param_groups[0]["lr"] = 0.0
        if world.rank == 0:
            step(model, optimizer, 1, 0)  # adds what is pending, and nothing else
        found = flat(replica.consolidate())
        world.barrier()
        replica.close()
        return found

    alone = []
    for rank in range(2):
        model = make()
        step(model, sgd(model), 0, rank)
        alone.append(flat(model))
    for found in run_threads(work, 2):
        torch.testing.assert_close(found, torch.stack(alone).mean(0), rtol=1e-12, atol=1e-12)


def test_consolidate_while_rounds_go_on_is_the_mean_of_what_all_learned() -> None:
    """Rounds leave the sum over the ranks as it is, if all ranks have the same rounds in them."""

    def work(world: World) -> list[Tensor]:
        model, optimizer, replica = started(world)
        train(model, optimizer, world.rank, range(3))
        optimizer.param_groups[0]["lr"] = 0.0
        found = []
        for t in range(20):
            for _ in range((t + world.rank) % 3):
                step(model, optimizer, t, world.rank)
            found.append(flat(replica.consolidate()))
        world.barrier()
        replica.close()
        return found

    for found in run_threads(work, 3):
        for later in found[1:]:
            torch.testing.assert_close(later, found[0], rtol=1e-12, atol=1e-12)


def test_ranks_learn_together_what_none_sees_alone() -> None:
    """Each rank has its own targets; the consolidated model is near the optimum of all.

    Ranks step in turn with each other: one that came late on a busy machine would pull the model to its own target.
    """
    together = threading.Barrier(3)

    def work(world: World) -> tuple[Tensor, float]:
        with MODELS:
            torch.manual_seed(0)
            model = nn.Linear(1, 1, bias=False).double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
        replica = un.parallel(model, optimizer, "async_average(every_s=0)", world=world)
        for t in range(200):
            optimizer.zero_grad()
            (model(torch.ones(1, 1, dtype=torch.float64)) - world.rank).square().sum().backward()
            optimizer.step()
            together.wait(60)
            until(lambda: replica.rounds >= t // 4, "no averaging")  # noqa: B023  # a busy machine may fall behind
        mean = flat(replica.consolidate())
        replica.close()
        return mean, model.weight.item()

    results = run_threads(work, 3)
    for mean, mine in results:
        assert torch.equal(mean, results[0][0])
        assert abs(mean.item() - 1.0) < 0.2
        assert abs(mine - 1.0) < 0.6, "alone, ranks end at 0, 1 and 2"


def test_the_warm_up_is_synchronous() -> None:
    def work(world: World) -> tuple[Tensor, Tensor, bool]:
        model, optimizer, replica = started(world, "async_average(every_s=0, warmup=4, accumulate=2)")
        for t in range(4):
            optimizer.zero_grad()
            for _ in range(2):
                (loss_of(model, batch(t, world.rank)) / 2).backward()
            optimizer.step()
            if t < 3:
                assert not replica.averaging
                assert replica.rounds == 0
        until(lambda: replica.averaging, "averaging does not begin")
        ended = flat(model)
        for t in range(4, 8):
            for _ in range(2):
                loss_of(model, batch(t, world.rank)).backward()
            assert model[0].weight.grad is not None
            mine = model[0].weight.grad.clone()
            optimizer.step()
            optimizer.zero_grad()
        assert replica.step == 8
        gradients = gathered(world, mine.reshape(-1))
        replica.close()
        return ended, gradients

    bare = make()
    optimizer = sgd(bare)
    for t in range(4):
        optimizer.zero_grad()
        loss_of(bare, torch.cat([batch(t, rank) for rank in range(3)])).backward()
        optimizer.step()
    for ended, gradients in run_threads(work, 3):
        torch.testing.assert_close(ended, flat(bare), rtol=1e-12, atol=1e-12)
        assert not torch.equal(gradients[0], gradients[1]), "afterwards gradients are local"


# Nobody waits --------------------------------------------------------------------------------------------------


def test_a_slow_rank_does_not_slow_the_others() -> None:
    """It stands still in the middle of its program till they have made all their steps."""
    ended = [threading.Event(), threading.Event()]

    def work(world: World) -> int:
        model, optimizer, replica = started(world, "async_average(every_s=0.01)")
        world.barrier()
        for t in range(40):
            step(model, optimizer, t, world.rank)
            time.sleep(0.01)
            if world.rank == 2 and t == 5:
                assert all(event.wait(60.0) for event in ended)
        if world.rank < 2:
            ended[world.rank].set()
        until(lambda: replica.rounds > 5, "no averaging")
        replica.consolidate()
        replica.close()
        return int(replica.step)

    assert run_threads(work, 3) == [40, 40, 40]


def test_a_rank_in_a_long_window_takes_part_in_many_rounds() -> None:
    """Its thread copies the model with what is pending; all of it is added when the window ends."""

    def work(world: World) -> int:
        model, optimizer, replica = started(world)
        step(model, optimizer, 0, world.rank)
        until(lambda: replica.averaging, "averaging does not begin")
        if world.rank == 0:
            loss = loss_of(model, batch(1, 0))
            rounds = replica.rounds
            until(lambda: replica.rounds > rounds + 3, "the others' rounds wait for my window")
            loss.backward()  # the parameters have not been written since the forward pass
            optimizer.step()
        else:
            step(model, optimizer, 1, world.rank)
        world.barrier()
        replica.close()
        return replica.step

    assert run_threads(work, 3) == [2, 2, 2]


# Agreement -----------------------------------------------------------------------------------------------------


def test_one_rank_aborts_for_all_and_resumes_for_all() -> None:
    def work(world: World) -> None:
        model, optimizer, replica = started(world)
        step(model, optimizer, 0, world.rank)
        until(lambda: replica.rounds > 0, "averaging does not begin")
        world.barrier()
        if world.rank == 1:
            replica.abort()
        until(lambda: not replica.averaging, "the others did not hear of it")
        world.barrier()
        rounds = replica.rounds
        train(model, optimizer, world.rank, range(1, 6))
        time.sleep(0.05)
        assert replica.rounds == rounds
        world.barrier()
        if world.rank == 1:
            replica.resume()
        until(lambda: replica.rounds > rounds, "averaging does not go on")
        replica.close()

    run_threads(work, 3)


def test_a_rank_that_closes_leaves_nobody_waiting() -> None:
    def work(world: World) -> int:
        model, optimizer, replica = started(world, "async_average(every_s=0.01)")
        train(model, optimizer, world.rank, range(3))
        until(lambda: replica.rounds > 0, "averaging does not begin")
        if world.rank == 0:
            replica.close()
            return replica.step
        until(lambda: not replica.averaging, "rank 0's end is not heard of")
        train(model, optimizer, world.rank, range(3, 10))
        replica.close()
        return replica.step

    assert run_threads(work, 3) == [3, 10, 10]


def test_a_lost_rank_is_an_error_in_the_loop() -> None:
    def work(world: World) -> None:
        model, optimizer, replica = started(world)
        step(model, optimizer, 0, world.rank)
        until(lambda: replica.rounds > 0, "averaging does not begin")
        if world.rank == 1:
            raise KeyError("lost on purpose")
        with pytest.raises(PeerLost):
            train(model, optimizer, world.rank, range(1, 10_000))

    with pytest.raises(KeyError, match="on purpose"):
        run_threads(work, 2)


def test_a_step_that_fails_holds_nobody_up() -> None:
    def work(world: World) -> None:
        model, optimizer, replica = started(world)
        step(model, optimizer, 0, world.rank)

        def closure() -> float:
            raise ArithmeticError("the closure fails")

        with pytest.raises(ArithmeticError):
            optimizer.step(closure)
        step(model, optimizer, 1, world.rank)
        rounds = replica.rounds
        until(lambda: replica.rounds > rounds + 1, "the thread waits for a step that failed")
        replica.close()

    run_threads(work, 2)


def test_a_replica_that_nobody_holds_ends_its_thread() -> None:
    def work(world: World) -> None:
        model, optimizer, replica = started(world, "async_average(every_s=0.01)")
        step(model, optimizer, 0, world.rank)
        averager = weakref.ref(replica._averager)
        assert averager() is not None
        del model, optimizer, replica
        until(lambda: (gc.collect(), averager())[1] is None, "its thread goes on")

    run_threads(work, 2)


# State ---------------------------------------------------------------------------------------------------------


def test_an_overflow_on_one_rank_skips_its_step_alone() -> None:
    def work(world: World) -> tuple[Tensor, int]:
        model, optimizer, replica = started(world)
        scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
        replica.watch(scaler)
        for t in range(6):
            optimizer.zero_grad()
            loss = loss_of(model, batch(t, world.rank)) * (float("inf") if (t, world.rank) == (2, 1) else 1.0)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        assert scaler.get_scale() == (32.0 if world.rank == 1 else 64.0)
        mean = flat(replica.consolidate())
        replica.close()
        return mean, replica.step

    results = run_threads(work, 3)
    for mean, steps in results:
        assert torch.equal(mean, results[0][0])
        assert torch.isfinite(mean).all()
        assert steps == 6


def test_consolidate_is_a_copy_with_the_same_bits_everywhere() -> None:
    def work(world: World) -> tuple[Tensor, Tensor]:
        model, optimizer, replica = started(world, "async_average(every_s=1000)")
        train(model, optimizer, world.rank, range(4))
        before = flat(model)
        mean = replica.consolidate()
        assert torch.equal(flat(model), before)
        replica.state_dict()  # a round that has ended is then in the model
        replica.close()
        return flat(model), flat(mean)

    results = run_threads(work, 3)
    for _, mean in results:
        assert torch.equal(mean, results[0][1])
        torch.testing.assert_close(mean, torch.stack([mine for mine, _ in results]).mean(0))


def test_a_loaded_model_is_not_mixed_with_the_former_one(tmp_path: Path) -> None:
    """Ranks load while rounds are under way: what was averaged of the model before does not count."""

    def work(world: World) -> tuple[Tensor, Tensor]:
        model, optimizer, replica = started(world)
        train(model, optimizer, world.rank, range(4))
        until(lambda: replica.rounds > 0, "averaging does not begin")
        un.save(tmp_path, replica)
        saved = flat(model)
        with torch.no_grad():
            for p in model.parameters():
                p.fill_(1e6)
        for _ in range(3):
            time.sleep(0.003 * world.rank)
            un.load(tmp_path, replica)
            assert replica.step == 4
            assert torch.equal(flat(model), saved)
            optimizer.param_groups[0]["lr"] = 0.0
            train(model, optimizer, world.rank, range(4, 8))
            assert flat(model).abs().max() < 10
        replica.close()
        return saved

    saved = run_threads(work, 3)

    def another_size(world: World) -> None:
        model, _, replica = started(world)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # says that tensors became their mean
            un.load(tmp_path, replica)
        torch.testing.assert_close(flat(model), torch.stack(saved).mean(0))
        replica.close()

    run_threads(another_size, 2)


@pytest.mark.parametrize("warmup", [0, 3, 6])
@pytest.mark.parametrize("new", [True, False])
def test_4_ranks_become_3_and_4_again(warmup: int, new: bool) -> None:
    spec = f"async_average(every_s=0.001, warmup={warmup})"

    def work(world: World) -> tuple[Tensor, int, str]:
        model, optimizer, replica = started(world, spec)
        train(model, optimizer, world.rank, range(3))
        three = world.split([[0, 1, 2], [3]])
        if world.rank < 3:
            replica.rebind(three)
            train(model, optimizer, world.rank, range(3, 5))
        elif new:
            replica.close()
            model, optimizer, replica = started(World(), spec)
        told = replica.rebind(world.split([[0, 1, 2, 3]]), source=0)
        train(model, optimizer, world.rank, range(5, 8))
        until(lambda: replica.rounds > 0, "averaging does not begin")
        ended = flat(replica.consolidate()), replica.step, told
        replica.close()
        return ended

    results = run_threads(work, 4)
    for mean, steps, told in results:
        assert torch.equal(mean, results[0][0])
        assert steps == 8
        assert "3 rank(s) that stayed" in told


def test_a_world_of_one_is_the_bare_loop_without_a_thread() -> None:
    threads = set(threading.enumerate())
    model, optimizer, replica = started(World(), "async_average(warmup=2)")
    bare = copy.deepcopy(model)
    train(model, optimizer, 0, range(4))
    train(bare, sgd(bare), 0, range(4))
    assert torch.equal(flat(replica.consolidate()), flat(bare))
    assert set(threading.enumerate()) <= threads
    replica.abort()
    replica.resume()
    replica.close()


# Settings and the ledger ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "setting", ["every_s=-1.0", "every_s=nan", "every_s=inf", "warmup=-1", "accumulate=0", "every_s=True"]
)
@pytest.mark.parametrize("size", [1, 2])
def test_impossible_settings_are_refused(setting: str, size: int) -> None:
    def work(world: World) -> None:
        model = make()
        with pytest.raises((ValueError, TypeError), match=setting.split("=")[0]):
            un.parallel(model, sgd(model), f"async_average({setting})", world=world)
        un.parallel(model, sgd(model), "async_average", world=world).close()

    run_threads(work, size)


def test_bytes_and_staleness_are_in_the_ledger() -> None:
    def work(world: World) -> None:
        model, optimizer, replica = started(world)
        train(model, optimizer, world.rank, range(5))
        until(lambda: replica.rounds > 2, "no averaging")
        replica.close()
        d = flat(model).numel()
        sent = {r.bytes_sent for r in world.ledger.records if r.tag == "average"}
        assert sent == {-(-2 * 2 * 8 * d // 3)}
        told = [e.values["staleness"] for e in world.ledger.events if "staleness" in e.values]
        assert len(told) == replica.rounds or replica.rounds == 0
        assert all(0 <= n <= 5 for n in told)

    run_threads(work, 3)
