"""Parameter servers: synchronous, bounded and asynchronous, against one process in float64."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import unisono as un
from unisono.methods.exchange import windows
from unisono.methods.strategies._serving.server import optimizer_over
from unisono.methods.strategies.parameter_server.server import GradientServer
from unisono.world import World
from unisono.world.virtual import run_threads

MODELS = threading.Lock()  # torch.manual_seed is the process's
Make = Callable[[nn.Module], torch.optim.Optimizer]
OPTIMIZERS: dict[str, Make] = {
    "sgd": lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01, nesterov=True),
    "adamw": lambda m: torch.optim.AdamW(
        [{"params": list(m.parameters())[:2], "lr": 0.01}, {"params": list(m.parameters())[2:], "weight_decay": 0.3}],
        lr=0.03,
    ),
    "plain": lambda m: torch.optim.SGD(m.parameters(), lr=0.05),
    "fast": lambda m: torch.optim.SGD(m.parameters(), lr=0.6),
}


def make(seed: int = 0) -> nn.Module:
    with MODELS:
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2)).double()


def batch(step: int, rank: int) -> Tensor:
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(1000 * step + rank), dtype=torch.float64)


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    return (model(x) - x[:, :2].sin()).square().mean()


def train(model: nn.Module, optimizer: Any, rank: int, steps: range, pause: float = 0.0) -> None:
    for t in steps:
        optimizer.zero_grad()
        loss_of(model, batch(t, rank)).backward()
        time.sleep(pause)
        optimizer.step()


def values(model: nn.Module) -> list[Tensor]:
    return [x.detach().clone() for x in model.state_dict().values()]


def assert_same(a: list[Tensor], b: list[Tensor], tolerance: float = 0.0) -> None:
    for x, y in zip(a, b, strict=True):
        torch.testing.assert_close(x, y, rtol=tolerance, atol=tolerance)


def one_process(kind: str, size: int, steps: range) -> tuple[nn.Module, Any]:
    """The reference: plain PyTorch on the joined batches."""
    model = make()
    optimizer = OPTIMIZERS[kind](model)
    for t in steps:
        optimizer.zero_grad()
        loss_of(model, torch.cat([batch(t, r) for r in range(size)])).backward()
        optimizer.step()
    return model, optimizer


def served(world: World, spec: str, kind: str = "sgd", seed: int = 0) -> tuple[nn.Module, Any, Any]:
    model = make(seed)
    optimizer = OPTIMIZERS[kind](model)
    return model, optimizer, un.parallel(model, optimizer, spec, world=world)


def consolidated(replica: Any) -> list[Tensor]:
    return values(replica.consolidate())


# Synchronous -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["sgd", "adamw"])
@pytest.mark.parametrize(("size", "servers"), [(1, 1), (2, 1), (3, 2), (3, 3), (4, 4)])
def test_synchronous_equals_one_process_on_the_joined_batch(kind: str, size: int, servers: int) -> None:
    def work(world: World) -> tuple[list[Tensor], list[Tensor], dict[str, Any]]:
        model, optimizer, replica = served(world, f"parameter_server(servers={servers})", kind, seed=world.rank)
        train(model, optimizer, world.rank, range(6))
        mine, whole, stale = values(model), consolidated(replica), replica.staleness()
        replica.close()
        return mine, whole, stale

    reference, _ = one_process(kind, size, range(6))
    for mine, whole, stale in run_threads(work, size):
        assert_same(mine, values(reference), 1e-12)
        assert_same(mine, whole)
        assert stale == ({"ahead": {0: 6}, "missed": {0: 6}} if size > 1 else {"ahead": {}, "missed": {}})


def test_the_optimizers_state_comes_home_and_a_scheduler_reaches_the_servers() -> None:
    def work(world: World) -> tuple[list[Tensor], Any, Any]:
        model, optimizer, replica = served(world, "parameter_server(servers=2)", "adamw")
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.05, total_steps=9)  # momenta move as well
        for t in range(4):
            train(model, optimizer, world.rank, range(t, t + 1))
            schedule.step()
        assert not optimizer.state
        replica.close()
        train(model, optimizer, 7, range(4, 6))  # an ordinary model and optimizer again
        return values(model), optimizer.state_dict(), schedule.last_epoch

    model = make()
    optimizer = OPTIMIZERS["adamw"](model)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.05, total_steps=9)
    for t in range(4):
        optimizer.zero_grad()
        loss_of(model, torch.cat([batch(t, r) for r in range(3)])).backward()
        optimizer.step()
        schedule.step()
    train(model, optimizer, 7, range(4, 6))
    for found, state, _ in run_threads(work, 3):
        assert_same(found, values(model), 1e-12)
        for i, mine in state["state"].items():
            assert_same(list(mine.values()), list(optimizer.state_dict()["state"][i].values()), 1e-12)


def test_uneven_batches_count_by_their_share() -> None:
    data = torch.randn(11, 4, generator=torch.Generator().manual_seed(3), dtype=torch.float64)

    def work(world: World) -> list[Tensor]:
        model, optimizer, replica = served(world, "parameter_server")
        for x in un.shard(data, batch_size=5, shuffle=False, world=world):  # 5, 5, and 1 for three ranks
            optimizer.zero_grad()
            loss_of(model, x).backward()
            optimizer.step()
        whole = consolidated(replica)
        replica.close()
        return whole

    model = make()
    optimizer = OPTIMIZERS["sgd"](model)
    for x in data.split(5):
        optimizer.zero_grad()
        loss_of(model, x).backward()
        optimizer.step()
    for whole in run_threads(work, 3):
        assert_same(whole, values(model), 1e-12)


def test_an_overflow_of_one_worker_leaves_the_step_to_the_others() -> None:
    def work(world: World, watched: bool) -> tuple[list[Tensor], list[float], int]:
        model, optimizer, replica = served(world, "parameter_server", "plain")
        scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=100)
        if watched:
            replica.watch(scaler)
        scales = []
        for t in range(3):
            optimizer.zero_grad()
            x = batch(t, world.rank) * (float("inf") if t == 1 and world.rank == 1 else 1.0)
            scaler.scale(loss_of(model, x)).backward()
            scaler.step(optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
        whole = consolidated(replica), scales, replica.step
        replica.close()
        return whole

    model = make()
    optimizer = OPTIMIZERS["plain"](model)
    for t in range(3):
        optimizer.zero_grad()
        loss_of(model, torch.cat([batch(t, r) for r in range(3) if (t, r) != (1, 1)])).backward()
        optimizer.step()
    for watched in (True, False):
        results = run_threads(lambda world, w=watched: work(world, w), 3)  # type: ignore[misc]
        for rank, (whole, scales, step) in enumerate(results):
            assert_same(whole, values(model), 1e-12)
            assert scales == ([64.0, 32.0, 32.0] if rank == 1 else [64.0] * 3)
            assert step == 3


def test_gradients_are_still_there_after_the_step_and_are_pushed_once() -> None:
    def work(world: World) -> None:
        model, optimizer, replica = served(world, "parameter_server")
        loss_of(model, batch(0, world.rank)).backward()
        replica.sync()
        before = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        optimizer.step()
        assert_same(before, [p.grad for p in model.parameters() if p.grad is not None])
        assert replica.progress() == [1, 1]
        world.barrier()  # nobody goes on before all have looked
        optimizer.step(closure=lambda: loss_of(model, batch(1, world.rank)).backward())
        assert replica.progress() == [2, 2]
        assert replica.step == 2
        world.barrier()  # one that has left would count as -1
        replica.close()

    run_threads(work, 2)


# Staleness -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("servers", [1, 3])
@pytest.mark.parametrize("staleness", [1, 3])
def test_staleness_is_bounded_and_reached_and_the_others_keep_their_pace(staleness: int, servers: int) -> None:
    ahead = [threading.Event(), threading.Event()]

    def work(world: World) -> tuple[dict[str, Any], list[Any]]:
        slow = world.rank == 2
        model, optimizer, replica = served(
            world, f"parameter_server(servers={servers}, staleness={staleness})", "plain"
        )
        if slow:  # up to the bound nobody waits for it
            assert all(event.wait(60.0) for event in ahead)
        train(model, optimizer, world.rank, range(staleness), 0.02)
        if not slow:
            ahead[world.rank].set()
        train(model, optimizer, world.rank, range(staleness, 9), 0.025 if slow else 0.005)
        stale, events = replica.staleness(), [e.values for e in world.ledger.events if e.kind == "staleness"]
        replica.close()
        return stale, events

    results = run_threads(work, 3)
    assert max(max(stale["ahead"]) for stale, _ in results) == staleness
    for stale, events in results:
        assert sum(stale["ahead"].values()) == sum(stale["missed"].values()) == len(events) == 9
        assert all(0 <= e["ahead"] <= staleness for e in events)
        assert max(stale["missed"]) <= 2 * (2 * staleness + 1)


def test_asynchronous_workers_wait_for_nobody_and_converge() -> None:
    steps = 60

    def work(world: World) -> tuple[float, float, float, int]:
        slow = world.rank == 1
        model, optimizer, replica = served(world, "parameter_server(staleness=None)", "fast")
        began, before = time.perf_counter(), loss_of(model, batch(999, 0)).item()
        train(model, optimizer, world.rank, range(steps // (5 if slow else 1)), 0.015 if slow else 0.003)
        took = time.perf_counter() - began
        whole = replica.consolidate()
        ended = before, loss_of(whole, batch(999, 0)).item(), took, max(replica.staleness()["ahead"])
        replica.close()
        return ended

    results = run_threads(work, 3)
    for before, after, _, _ in results:
        assert after == results[0][1]
        assert after < 0.5 * before
    assert max(ahead for _, _, _, ahead in results) > 10


def test_bounded_staleness_converges_with_a_worker_five_times_slower() -> None:
    def work(world: World) -> tuple[float, float]:
        model, optimizer, replica = served(world, "parameter_server(servers=2, staleness=4)", "fast")
        before = loss_of(model, batch(999, 0)).item()
        train(model, optimizer, world.rank, range(40), 0.01 if world.rank == 0 else 0.002)
        after = loss_of(replica.consolidate(), batch(999, 0)).item()
        replica.close()
        return before, after

    results = run_threads(work, 3)
    assert results[0][1] == results[1][1] == results[2][1]
    assert results[0][1] < 0.5 * results[0][0]


def test_asynchronous_pushes_of_equal_gradients_move_as_far_as_one_synchronous_step() -> None:
    """With gradients that do not depend on the parameters, N pushes at lr/N are one step at lr."""

    def work(world: World, staleness: object) -> Tensor:
        model = nn.Linear(3, 1, bias=False).double()
        nn.init.ones_(model.weight)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        replica = un.parallel(model, optimizer, f"parameter_server(staleness={staleness})", world=world)
        for t in range(4):
            optimizer.zero_grad()
            model(batch(t, world.rank)[:, :3]).mean().backward()
            optimizer.step()
        whole = replica.consolidate()
        replica.close()
        return whole.weight.detach()

    sync = run_threads(lambda w: work(w, 0), 3)[0]
    for found in run_threads(lambda w: work(w, None), 3):
        torch.testing.assert_close(found, sync, rtol=1e-12, atol=1e-12)


# The server by itself ----------------------------------------------------------------------------------------------


def server(workers: int, **settings: Any) -> tuple[GradientServer, nn.Parameter]:
    param = nn.Parameter(torch.zeros(1, dtype=torch.float64))
    return GradientServer([param], torch.optim.SGD([param], lr=1.0), range(workers), **settings), param


def value(s: GradientServer) -> float:
    out = torch.zeros(1, dtype=torch.float64)
    s.read(0, [out])
    return out.item()


def in_thread(fn: Callable[..., Any], *args: Any) -> threading.Thread:
    thread = threading.Thread(target=fn, args=args, daemon=True)
    thread.start()
    return thread


def grad(x: float) -> list[Tensor | None]:
    return [torch.tensor([x], dtype=torch.float64)]


def test_a_delayed_push_waits_for_so_many_pushes_of_others() -> None:
    s, _ = server(3, staleness=None, delay=2)
    first = in_thread(s.push, 0, grad(3.0))
    time.sleep(0.05)
    second = in_thread(s.push, 1, grad(30.0))
    time.sleep(0.05)
    assert first.is_alive()
    assert value(s) == 0.0
    third = in_thread(s.push, 2, grad(300.0))
    first.join(2)
    assert not first.is_alive()
    assert value(s) == -1.0  # lr/3
    assert second.is_alive()
    s.leave(0)  # one fewer to wait for
    second.join(2)
    assert not second.is_alive()
    s.leave(1)
    third.join(2)
    assert not third.is_alive()


def test_delays_and_bounds_do_not_lock_each_other() -> None:
    def work(world: World) -> int:
        model, optimizer, replica = served(world, "parameter_server(staleness=1, delay=2)", "plain")
        train(model, optimizer, world.rank, range(12), 0.004 * world.rank)
        consolidated(replica)
        replica.close()
        return int(replica.step)

    assert run_threads(work, 3, timeout_s=20) == [12, 12, 12]


def test_a_worker_that_leaves_is_waited_for_no_more() -> None:
    s, _ = server(3, staleness=0)
    waiting = [in_thread(s.push, w, grad(float(w + 1))) for w in (0, 1)]
    time.sleep(0.05)
    assert all(t.is_alive() for t in waiting)
    s.leave(2)
    for thread in waiting:
        thread.join(2)
        assert not thread.is_alive()
    assert value(s) == -1.5  # the mean of those that are there


def test_an_optimizer_that_fails_is_an_error_at_every_worker() -> None:
    class Broken(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            raise ArithmeticError("no more steps")

    def work(world: World) -> str:
        model = make()
        replica = un.parallel(model, Broken(model.parameters(), lr=0.1), "parameter_server", world=world)
        with pytest.raises(RuntimeError, match="no more steps") as caught:
            train(model, replica.optimizer, world.rank, range(1))
        world.barrier()
        replica._connections.abandon()
        return str(caught.value)

    assert len(run_threads(work, 2)) == 2


def test_an_optimizer_over_others_has_the_class_groups_and_own_attributes() -> None:
    class Mine(torch.optim.AdamW):
        def __init__(self, params: Any) -> None:
            super().__init__(params, lr=0.5)
            self.extra = 3

    a, b, c = (nn.Parameter(torch.ones(2)) for _ in range(3))
    mine = Mine([{"params": [a, b], "lr": 0.25}, {"params": [c]}])
    other = nn.Parameter(torch.ones(2))
    made = optimizer_over(mine, {b: other})
    assert type(made) is Mine
    assert made.extra == 3  # type: ignore[attr-defined]
    assert [(g["lr"], len(g["params"])) for g in made.param_groups] == [(0.25, 1), (0.5, 0)]
    other.grad = torch.ones(2)
    made.step()
    assert not torch.equal(other, b)
    assert not mine.state


# Compression -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", ["reducer=qsgd(bits=8, block=64)", "reducer=bytegrad, feedback=True", "reducer=bf16"])
@pytest.mark.parametrize("size", [1, 3])
def test_compressed_pushes_converge_and_send_less(spec: str, size: int) -> None:
    def work(world: World) -> tuple[float, float, int, list[Tensor]]:
        model, optimizer, replica = served(world, f"parameter_server({spec})", "fast")
        before = loss_of(model, batch(999, 0)).item()
        train(model, optimizer, world.rank, range(40))
        pushed = world.ledger.by_tag().get("push", 0)
        whole = replica.consolidate()
        replica.close()
        return before, loss_of(whole, batch(999, 0)).item(), pushed, values(whole)

    results = run_threads(work, size)
    dense = 40 * sum(p.numel() * 8 for p in make().parameters())
    for before, after, pushed, whole in results:
        assert after < 0.4 * before
        assert pushed < 0.4 * dense
        assert_same(whole, results[0][3])


def test_feedback_sends_in_time_what_did_not_get_through() -> None:
    from unisono.methods.kernels.noise import Noise
    from unisono.methods.reducer import Codec
    from unisono.methods.strategies._serving.protocol import Coder

    def half(x: Tensor, _: Noise) -> Tensor:
        return x.round().view(torch.uint8)

    codec = Codec(half, lambda code, n: code.view(torch.float32), lambda n: 4 * n)
    like = [torch.zeros(3), torch.zeros(2, 2)]
    coder = Coder(codec, like, feedback=True, seed=(0, 0))
    grads = [torch.tensor([0.3, 0.2, -0.7]), torch.full((2, 2), 0.125)]
    total = [torch.zeros(3), torch.zeros(2, 2)]
    for step in range(40):
        for sum_, got in zip(total, coder.decode(coder.encode(grads, step, [0.1, 0.1]), like), strict=True):
            sum_ += got
    kept = coder.residual
    assert kept is not None
    for sum_, g, part in zip(total, grads, kept.split([3, 4]), strict=True):
        torch.testing.assert_close(sum_ + part.view(g.shape), 40 * g, rtol=1e-5, atol=1e-5)


# State -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", ["parameter_server(servers=2)", "parameter_server(reducer=bytegrad, feedback=True)"])
@pytest.mark.parametrize("kind", ["sgd", "adamw"])
def test_a_checkpoint_goes_on_bit_by_bit(tmp_path: Path, spec: str, kind: str) -> None:
    def work(world: World) -> None:
        model, optimizer, replica = served(world, spec, kind)
        train(model, optimizer, world.rank, range(3))
        un.save(tmp_path, replica)
        train(model, optimizer, world.rank, range(3, 6))
        other, other_optimizer, other_replica = served(world, spec, kind, seed=5)
        un.load(tmp_path, other_replica)
        assert other_replica.step == 3
        train(other, other_optimizer, world.rank, range(3, 6))
        assert_same(values(other), values(model))
        assert_same(consolidated(other_replica), consolidated(replica))
        replica.close()
        other_replica.close()

    run_threads(work, 3)


@pytest.mark.parametrize("after", ["parameter_server", "parameter_server(servers=4, staleness=0)"])
def test_a_checkpoint_goes_on_with_other_ranks_and_servers(tmp_path: Path, after: str) -> None:
    def before(world: World) -> None:
        model, optimizer, replica = served(world, "parameter_server(servers=3)", "adamw")
        train(model, optimizer, world.rank, range(3))
        un.save(tmp_path, replica)
        replica.close()

    def then(world: World) -> list[Tensor]:
        model, optimizer, replica = served(world, after, "adamw", seed=6)
        un.load(tmp_path, replica)
        train(model, optimizer, world.rank, range(3, 6))
        whole = consolidated(replica)
        replica.close()
        return whole

    run_threads(before, 3)
    model, optimizer = one_process("adamw", 3, range(3))
    for t in range(3, 6):
        optimizer.zero_grad()
        loss_of(model, torch.cat([batch(t, r) for r in range(4)])).backward()
        optimizer.step()
    for whole in run_threads(then, 4):
        assert_same(whole, values(model), 1e-12)


def test_a_checkpoint_of_asynchronous_workers_holds_every_push(tmp_path: Path) -> None:
    def work(world: World) -> tuple[list[Tensor], list[Tensor]]:
        model, optimizer, replica = served(world, "parameter_server(staleness=None, servers=2)", "plain")
        train(model, optimizer, world.rank, range(8), 0.003 * world.rank)
        un.save(tmp_path, replica)
        whole = consolidated(replica)
        mine = values(model)
        replica.close()
        return whole, mine

    for whole, mine in run_threads(work, 3):
        assert_same(whole, mine)


def test_buffers_of_the_first_worker_are_everyones_when_consolidated() -> None:
    def work(world: World) -> tuple[list[Tensor], Tensor]:
        model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)).double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        replica = un.parallel(model, optimizer, "parameter_server(servers=2)", world=world)
        for t in range(3):
            optimizer.zero_grad()
            model(batch(t, world.rank)).square().mean().backward()
            optimizer.step()
        whole = values(replica.consolidate())
        mine = model[1].running_mean.clone()
        replica.close()
        return whole, mine

    results = run_threads(work, 3)
    for whole, _ in results:
        assert_same(whole, results[0][0])
        assert torch.equal(whole[4], results[0][1])
    assert not torch.equal(results[1][1], results[0][1])


def test_a_world_that_shrinks_and_grows_goes_on_as_one_process() -> None:
    def work(world: World) -> tuple[list[Tensor], str]:
        model, optimizer, replica = served(world, "parameter_server(servers=2)", "adamw")
        train(model, optimizer, world.rank, range(2))
        smaller, told = world.split([[0, 1, 2], [3]]), ""
        if world.rank < 3:
            told = replica.rebind(smaller)
            train(model, optimizer, world.rank, range(2, 4))
        again = world.split([[0, 1, 2, 3]])
        told = replica.rebind(again, source=1)
        train(model, optimizer, world.rank, range(4, 6))
        whole = consolidated(replica)
        replica.close()
        return whole, told

    model = make()
    optimizer = OPTIMIZERS["adamw"](model)
    for t in range(6):
        optimizer.zero_grad()
        loss_of(model, torch.cat([batch(t, r) for r in range(3 if t in (2, 3) else 4)])).backward()
        optimizer.step()
    for whole, told in run_threads(work, 4):
        assert_same(whole, values(model), 1e-12)
        assert "rank 1 of 4" in told


def test_switching_to_and_from_servers_carries_the_optimizer() -> None:
    def work(world: World) -> list[Tensor]:
        model, optimizer, replica = served(world, "parameter_server(servers=2)", "adamw")
        train(model, optimizer, world.rank, range(2))
        replica = replica.switch("allreduce")
        train(model, optimizer, world.rank, range(2, 4))
        replica = replica.switch("parameter_server")
        train(model, optimizer, world.rank, range(4, 6))
        whole = consolidated(replica)
        replica.close()
        return whole

    reference, _ = one_process("adamw", 3, range(6))
    for whole in run_threads(work, 3):
        assert_same(whole, values(reference), 1e-12)


# Servers of their own ------------------------------------------------------------------------------------------------


def on_their_own(work: Callable[[World], Any], size: int) -> list[Any]:
    """`work` on every rank; servers end there, and say so."""

    def guarded(world: World) -> Any:
        try:
            return work(world)
        except SystemExit as end:
            return f"ended with {end.code}"

    return run_threads(guarded, size)


def test_servers_of_their_own_leave_the_workers_a_world_of_theirs(tmp_path: Path) -> None:
    data = torch.randn(12, 4, generator=torch.Generator().manual_seed(3), dtype=torch.float64)

    def work(world: World) -> tuple[list[Tensor], int, int]:
        batches = un.shard(data, batch_size=6, shuffle=False, world=world)  # made before the servers leave
        model, optimizer, replica = served(world, "parameter_server(servers=2, place=own)")
        assert un.join() is world
        for x in batches:
            assert len(x) == 2
            optimizer.zero_grad()
            loss_of(model, x).backward()
            optimizer.step()
        world.barrier()
        un.save(tmp_path, replica)
        un.load(tmp_path, replica)
        whole = consolidated(replica)
        replica.close()
        return whole, world.size, world.rank

    model = make()
    optimizer = OPTIMIZERS["sgd"](model)
    for x in data.split(6):
        optimizer.zero_grad()
        loss_of(model, x).backward()
        optimizer.step()
    results = on_their_own(work, 5)
    assert results[3:] == ["ended with 0"] * 2
    for rank, (whole, size, seen) in enumerate(results[:3]):
        assert_same(whole, values(model), 1e-12)
        assert (size, seen) == (3, rank)


@pytest.mark.parametrize("spec", ["parameter_server(place=own)", "parameter_server(place=own, staleness=None)"])
def test_one_worker_with_a_server_of_its_own(spec: str) -> None:
    def work(world: World) -> list[Tensor]:
        model, optimizer, replica = served(world, spec)
        train(model, optimizer, 0, range(3))
        whole = consolidated(replica)
        replica.close()
        return whole

    reference, _ = one_process("sgd", 1, range(3))
    assert_same(on_their_own(work, 2)[0], values(reference), 1e-12)


# Settings ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("setting", "size", "reason"),
    [
        ("servers=0", 2, "servers"),
        ("servers=3", 2, "servers"),
        ("servers=2, place=own", 2, "servers"),
        ("place=own", 1, "servers"),
        ("staleness=-1", 2, "staleness"),
        ("delay=-1", 2, "delay"),
        ("delay=2, staleness=None", 2, "delay"),
        ("delay=1", 2, "staleness"),
        ("accumulate=0", 2, "accumulate"),
        ("reducer=powersgd", 2, "codec"),
        ("feedback=True", 2, "feedback"),
    ],
)
def test_impossible_settings_are_refused_with_the_reason(setting: str, size: int, reason: str) -> None:
    def work(world: World) -> None:
        model = make()
        with pytest.raises(ValueError, match=reason):
            un.parallel(model, OPTIMIZERS["sgd"](model), f"parameter_server({setting})", world=world)

    run_threads(work, size)


def test_lbfgs_and_more_servers_than_tensors_are_refused() -> None:
    model = nn.Linear(2, 1, bias=False)
    with pytest.raises(TypeError, match="LBFGS"):
        un.parallel(model, torch.optim.LBFGS(model.parameters()), "parameter_server", world=World())

    def work(world: World) -> None:
        model = nn.Linear(2, 1, bias=False)
        with pytest.raises(ValueError, match="tensors"):
            un.parallel(model, torch.optim.SGD(model.parameters(), lr=1.0), "parameter_server(servers=2)", world=world)

    run_threads(work, 2)


def test_bytes_sent_are_a_gradient_a_push_and_the_parameters_a_pull() -> None:
    def work(world: World) -> dict[str, int]:
        model, optimizer, replica = served(world, "parameter_server(servers=1)")
        train(model, optimizer, world.rank, range(5))
        world.barrier()
        sums = world.ledger.by_tag()
        world.barrier()  # a worker that closes fetches the end state, which is a pull as well
        replica.close()
        return sums

    from unisono.methods.buckets import FlatLayout

    nbytes = FlatLayout(list(make().parameters()), torch.uint8).numel
    server_side, *workers = run_threads(work, 3)
    assert server_side["pull"] == 2 * 5 * nbytes
    for sums in workers:
        assert sums["push"] == 5 * nbytes


# Workers that died -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", ["parameter_server", "parameter_server(servers=2, staleness=2)"])
def test_those_who_live_save_and_the_checkpoint_is_of_a_world_of_as_many(tmp_path: Path, spec: str) -> None:
    def work(world: World) -> list[Tensor]:
        model, optimizer, replica = served(world, spec)
        train(model, optimizer, world.rank, range(2))
        if world.rank == 2:
            replica.close()
            return []
        train(model, optimizer, world.rank, range(2, 4))
        un.save(tmp_path, replica)
        found = consolidated(replica)
        replica.close()
        return found

    first, second, _ = run_threads(work, 3)

    def resumed(world: World) -> list[Tensor]:
        _, _, replica = served(world, spec, seed=5)
        assert un.load(tmp_path, replica).step == 4
        found = consolidated(replica)
        replica.close()
        return found

    for found in (second, *run_threads(resumed, 2)):
        assert_same(found, first)


def test_a_server_that_is_gone_is_told_of_once() -> None:
    """`PeerLost` where the program first meets it; `un.save` says that nothing was written, and `close` is quiet."""

    def work(world: World) -> None:
        model, optimizer, replica = served(world, "parameter_server")
        train(model, optimizer, world.rank, range(2))
        world.barrier()
        if world.rank == 0:
            replica._connections.abandon()  # as the end of its process would
        world.barrier()
        if world.rank == 0:
            return
        with pytest.raises(un.PeerLost, match="the parameter server on rank 0 is gone"):
            train(model, optimizer, world.rank, range(2, 3))
        with pytest.raises(un.PeerLost, match=r"no checkpoint was written .* the parameter server on rank 0 is gone"):
            un.save("nowhere", replica)
        replica.close()
        train(model, optimizer, world.rank, range(3, 4))  # an ordinary model

    run_threads(work, 2)


def test_a_server_is_asked_for_nothing_while_the_world_is_formed_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that is behind the others keeps what is here, before it is brought up to them."""

    def refuse(_: Any) -> Any:
        raise un.PeerLost("the world is formed anew")

    def work(world: World) -> bool:
        model, optimizer, replica = served(world, "parameter_server")
        train(model, optimizer, world.rank, range(2))
        with monkeypatch.context() as patch:
            for kind in {type(link) for link in replica._links}:
                patch.setattr(kind, "fetch", refuse)
            with pytest.raises(un.PeerLost):
                optimizer.state_dict()
            replica.healing = SimpleNamespace(is_forming=True)
            kept = optimizer.state_dict()
            replica.healing = None
            world.barrier()
        replica.close()
        return "param_groups" in kept

    assert run_threads(work, 2) == [True, True]


def test_a_replica_may_be_forgotten_in_the_middle_of_anything() -> None:
    """Python's collector runs where it likes: here with the lock held that every optimizer's step takes."""
    ended, other = threading.Event(), nn.Linear(1, 1)
    windows.follow_optimizer(other, torch.optim.SGD(other.parameters(), lr=0.1))  # as of another replica

    def work(world: World) -> int:
        model, optimizer, replica = served(world, "parameter_server")
        train(model, optimizer, world.rank, range(1))
        if world.rank == 0:
            server = replica._links[0].server
            deadline = time.monotonic() + 60
            while not server._round and time.monotonic() < deadline:  # the other's push waits for this rank
                time.sleep(0.001)
            with windows._lock:
                del replica, optimizer, model
                gc.collect()
            assert ended.wait(60), "the other rank still waits"
            return 1
        train(model, optimizer, world.rank, range(1, 3))  # the server leaves rank 0 out and goes on
        replica.close()
        ended.set()
        return int(replica.step)

    try:
        assert run_threads(work, 2) == [1, 3]
    finally:
        windows.leave_optimizer(other)
