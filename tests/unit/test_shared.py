"""One model for all workers of a host: the bits of allreduce, optimizers, gradients that programs look at, writes."""

from __future__ import annotations

import copy
import io
import random
import tempfile
import threading
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import unisono as un
from unisono.methods.strategies.shared.replica import SharedReplica
from unisono.world import Mismatch, PeerLost, World
from unisono.world.virtual import run_threads

MODELS = threading.Lock()
Make = Callable[[Any], torch.optim.Optimizer]


class Net(nn.Module):
    """Matrices, a kernel in another memory order, a parameter used twice, one frozen and one never used."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 5, 3, padding=1).to(memory_format=torch.channels_last)
        self.first, self.last = nn.Linear(5, 37), nn.Linear(37, 5)
        self.again = self.first.bias
        self.frozen = nn.Parameter(torch.ones(5), requires_grad=False)
        self.never = nn.Linear(7, 3)

    def forward(self, x: Tensor) -> Tensor:
        seen = self.conv(x.view(-1, 3, 2, 2)).mean((2, 3)) * self.frozen
        return self.last(torch.tanh(self.first(seen) + self.again))


def make(seed: int = 0, kind: type[nn.Module] = Net) -> nn.Module:
    with MODELS:
        torch.manual_seed(seed)
        return kind()


def batch(step: int, rank: int, n: int = 4) -> Tensor:
    return torch.randn(n, 12, generator=torch.Generator().manual_seed(100 * step + rank))


def started(
    world: World, make_optimizer: Make, spec: str = "shared", seed: int = 0
) -> tuple[nn.Module, torch.optim.Optimizer, un.Replica]:
    model = make(seed)
    optimizer = make_optimizer([p for p in model.parameters() if p.requires_grad])
    return model, optimizer, un.parallel(model, optimizer, spec, world=world)


def train(model: nn.Module, optimizer: Any, rank: int, steps: range, between: Callable[[], Any] = lambda: None) -> None:
    for t in steps:
        optimizer.zero_grad()
        model(batch(t, rank)).square().mean().backward()
        between()
        optimizer.step()


def values(model: nn.Module) -> list[Tensor]:
    return [x.detach().clone() for x in model.state_dict().values()]


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1, momentum=0.9, fused=True)


def adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=0.01, fused=True)


class Signs(torch.optim.Optimizer):
    """A program's own: steps by the sign of a mean of gradients."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    mean = self.state[p].setdefault("mean", torch.zeros_like(p))
                    mean.lerp_(p.grad, 0.1)
                    p.sub_(mean.sign(), alpha=group["lr"])


OPTIMIZERS: dict[str, Make] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, fused=True),
    "momentum": sgd,
    "nesterov": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01, fused=True),
    "loop sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=False),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True, fused=True),
    "adamw": adamw,
    "loop adamw": lambda p: torch.optim.AdamW(p, lr=0.01, fused=False),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1, initial_accumulator_value=0.1, fused=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.5, centered=True),
    "adadelta": lambda p: torch.optim.Adadelta(p, lr=1.0),
    "adamax": lambda p: torch.optim.Adamax(p, lr=0.01),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.01),
    "radam": lambda p: torch.optim.RAdam(p, lr=0.01),
    "asgd": lambda p: torch.optim.ASGD(p, lr=0.1),
    "rprop": lambda p: torch.optim.Rprop(p, lr=0.01),
    "own": lambda p: Signs(p, lr=0.01),
}


def run_both(size: int, work: Callable[[World, str], Any], **given: Any) -> None:
    """The same under both strategies gives the same bits on every rank."""
    wanted = run_threads(lambda world: work(world, "allreduce"), size, **given)
    found = run_threads(lambda world: work(world, "shared"), size, **given)
    for mine in found:
        assert same(mine, wanted[0])


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_has_the_bits_of_allreduce(name: str) -> None:
    """Parameters, the optimizer's whole state, and what goes on from it alone after `close`."""

    def work(world: World, spec: str) -> list[Tensor]:
        model, optimizer, replica = started(world, OPTIMIZERS[name], spec, seed=world.rank)
        train(model, optimizer, world.rank, range(4))
        entries = optimizer.state_dict()["state"]
        state = [v.clone() for i in sorted(entries) for _, v in sorted(entries[i].items()) if isinstance(v, Tensor)]
        found = values(model)
        world.barrier()
        replica.close()
        train(model, optimizer, 0, range(4, 6))
        return [*found, *state, *values(model)]

    run_both(3, work)


def test_groups_schedules_and_a_group_that_comes_later_have_the_bits_of_allreduce() -> None:
    def work(world: World, spec: str) -> list[Tensor]:
        model = make(0)
        optimizer = torch.optim.AdamW([{"params": [*model.first.parameters()], "lr": 0.1}], lr=0.01, fused=True)
        optimizer.add_param_group({"params": [*model.conv.parameters()], "weight_decay": 0.5})
        replica = un.parallel(model, optimizer, spec, world=world)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 6)
        for t in range(6):
            if t == 3:
                optimizer.add_param_group({"params": [*model.last.parameters()], "lr": 0.02, "initial_lr": 0.02})
                schedule.base_lrs.append(0.02)
            train(model, optimizer, world.rank, range(t, t + 1))
            schedule.step()
        found = values(model)
        world.barrier()
        replica.close()
        return found

    run_both(2, work)


class Mixed(nn.Module):
    """Parameters of several dtypes, one of complex numbers, one without elements."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.short = nn.Linear(12, 9, dtype=torch.float64), nn.Linear(12, 9, dtype=torch.bfloat16)
        self.turn = nn.Parameter(torch.randn(9, dtype=torch.complex64))
        self.none = nn.Parameter(torch.empty(0, 3))

    def forward(self, x: Tensor) -> Tensor:
        both = self.wide(x.double()).float() * self.short(x.bfloat16()).float()
        return (both * self.turn).abs() + self.none.sum()


@pytest.mark.parametrize("name", ["momentum", "adamw", "rmsprop"])
def test_every_dtype_has_the_bits_of_allreduce(name: str) -> None:
    def work(world: World, spec: str) -> list[Tensor]:
        model = make(world.rank, Mixed)
        groups = [p for p in model.parameters() if name == "rmsprop" or not p.is_complex()]
        optimizer = OPTIMIZERS[name](groups)  # torch's fused kernels take real numbers only
        un.parallel(model, optimizer, spec, world=world)
        train(model, optimizer, world.rank, range(4))
        found = values(model)
        world.barrier()
        return found

    run_both(3, work)


def test_windows_of_several_passes_have_the_bits_of_allreduce() -> None:
    def work(world: World, spec: str) -> list[Tensor]:
        model, optimizer, replica = started(world, sgd, f"{spec}(accumulate=3)")
        for t in range(8):
            model(batch(t, world.rank)).square().mean().backward()
            if t in (2, 5, 7):  # the last one is short
                optimizer.step()
                optimizer.zero_grad()
        assert replica.step == 3
        found = values(model)
        world.barrier()
        return found

    run_both(2, work)


def test_a_window_ended_by_sync_is_clipped_and_stepped_once() -> None:
    def work(world: World, spec: str) -> list[Tensor]:
        model, optimizer, replica = started(world, sgd, f"{spec}(accumulate=3)")
        for t in range(2):
            model(batch(t, world.rank)).square().mean().backward()
        replica.sync()
        nn.utils.clip_grad_value_(model.parameters(), 1e-3)
        optimizer.step()
        assert replica.step == 1
        found = values(model)
        world.barrier()
        return found

    run_both(2, work)


def test_a_compiled_model_has_the_bits_of_allreduce() -> None:
    def work(world: World, spec: str) -> list[Tensor]:
        model, optimizer, _ = started(world, sgd, spec)
        with MODELS:
            compiled: Any = torch.compile(model, backend="eager")
        for t in range(3):
            optimizer.zero_grad()
            with MODELS:  # the compiler is the process's
                loss = compiled(batch(t, world.rank)).square().mean()
            loss.backward()
            optimizer.step()
        found = values(model)
        world.barrier()
        return found

    run_both(2, work)


def test_passes_inside_a_pass_and_several_as_one_have_the_bits_of_allreduce() -> None:
    """Re-entrant checkpointing runs a backward pass inside a backward pass, and ends a window with each."""

    def work(world: World, spec: str) -> list[Tensor]:
        model, optimizer, replica = started(world, sgd, spec)
        for t in range(3):
            optimizer.zero_grad()
            x = batch(t, world.rank).requires_grad_()
            seen = checkpoint(lambda x: model.conv(x.view(-1, 3, 2, 2)).mean((2, 3)), x, use_reentrant=True)
            model.last(checkpoint(model.first, seen, use_reentrant=True)).square().mean().backward()
            optimizer.step()
        before = replica.step
        for t in range(3):
            optimizer.zero_grad()
            with replica.one_pass():
                model(batch(t, world.rank)).square().mean().backward()
                model(batch(t + 3, world.rank)).square().mean().backward()
            optimizer.step()
        assert replica.step == before + 3
        found = values(model)
        world.barrier()
        return found

    run_both(2, work)


def test_frozen_in_mid_run_and_unused_on_some_ranks_have_the_bits_of_allreduce() -> None:
    def work(world: World, spec: str) -> list[Tensor]:
        model, optimizer, _ = started(world, adamw, spec)
        for t in range(6):
            model.first.weight.requires_grad_(t != 2)
            optimizer.zero_grad()
            (
                model(batch(t, world.rank)) if (t + world.rank) % 3 else model.never(batch(t, world.rank)[:, :7])
            ).square().mean().backward()
            optimizer.step()
        found = values(model)
        world.barrier()
        return found

    run_both(3, work)


# Whatever a program does ------------------------------------------------------------------------------------------


class Branches(nn.Module):
    """Which parameters take part is said with every batch; one has two names."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(12, 7), nn.Linear(12, 7)
        self.c, self.d = nn.Linear(7, 5, bias=False), nn.Linear(7, 5)
        self.scale, self.tied = nn.Parameter(torch.tensor(1.1)), self.d.weight
        self.double()

    def forward(self, x: Tensor, branch: int) -> Tensor:
        hidden = torch.tanh(self.a(x) + self.b(x) if branch & 1 else self.a(x))
        return (self.c if branch & 2 else self.d)(hidden) * (self.scale if branch & 4 else 1.0)


WHAT = ("local", "double", "clipped", "assigned", "dropped", "skipped", "frozen", "written", "slower", "read")


def run_random_program(seed: int, ranks: list[int], size: int, replica: Callable[[Any, Any], Any]) -> list[Tensor]:
    """50 steps, each drawn from what loops do; `ranks`: whose batches are trained on here, of so many."""
    draw, model = random.Random(seed), make(seed, Branches)
    adam = torch.optim.AdamW(model.parameters(), lr=0.02)
    optimizer = adam if seed % 2 else torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.8)
    bound = replica(model, optimizer)
    for t in range(50):
        branches = [draw.randrange(8) for _ in range(size)]
        clear, reader = draw.random(), draw.randrange(size)
        does = {what: draw.random() < 0.15 for what in WHAT}
        model.b.weight.requires_grad_(not does["frozen"])
        if clear < 0.8:
            optimizer.zero_grad(set_to_none=clear < 0.5)

        def backward(number: int) -> None:
            losses = [model(batch(number, r).double(), branches[r]).square().mean() for r in ranks]  # noqa: B023
            (sum(losses) / len(ranks)).backward()  # type: ignore[union-attr, arg-type]

        if does["local"]:
            with nullcontext() if bound is None else bound.no_sync():
                backward(200 + t)
        backward(t)
        if does["double"]:
            backward(100 + t)
        if does["read"] and ranks == [reader] and model.a.weight.grad is not None:
            float(model.a.weight.grad.abs().sum())
        if does["clipped"]:
            nn.utils.clip_grad_norm_(model.parameters(), 0.3)
        if does["assigned"]:
            model.a.bias.grad = model.a.bias.grad * 0.5
        if does["dropped"]:
            model.a.weight.grad = None
        if does["slower"]:
            optimizer.param_groups[0]["lr"] *= 0.9
        if not does["skipped"]:
            optimizer.step()
        if does["written"]:
            change = lambda: model.c.weight.data.mul_(0.99)  # noqa: E731
            change() if bound is None else bound.write(change)
    return values(model)


@pytest.mark.parametrize("seed", range(4))
def test_random_programs_are_one_process_on_the_joined_batches(seed: int) -> None:
    """In fp64, against plain PyTorch: unused, frozen and tied parameters, and what programs do to gradients."""
    size, hosts = [(2, None), (3, None), (4, "aabb"), (3, "aab")][seed]
    alone = run_random_program(seed, list(range(size)), size, lambda *_: None)

    def work(world: World) -> list[Tensor]:
        found = run_random_program(
            seed, [world.rank], size, lambda model, optimizer: un.parallel(model, optimizer, "shared", world=world)
        )
        world.barrier()
        return found

    for found in run_threads(work, size, hosts=hosts):
        torch.testing.assert_close(found, alone, rtol=0, atol=1e-12)


# Gradients that programs look at -------------------------------------------------------------------------------


@pytest.mark.parametrize("fused", [True, False])
def test_a_scaler_clipping_and_an_overflow_have_the_bits_of_allreduce(fused: bool) -> None:
    def work(world: World, spec: str) -> list[Tensor]:
        model, optimizer, replica = started(world, lambda p: torch.optim.AdamW(p, lr=0.01, fused=fused), spec)
        scaler = torch.amp.GradScaler("cpu", init_scale=16.0, growth_interval=2)
        replica.watch(scaler)
        for t in range(6):
            optimizer.zero_grad()
            x = batch(t, world.rank) * (float("inf") if t == 3 and world.rank == 1 else 1.0)
            scaler.scale(model(x).square().mean()).backward()
            if t % 2:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), 0.05)
            scaler.step(optimizer)
            scaler.update()
        found = [*values(model), torch.tensor(scaler.get_scale())]
        world.barrier()
        return found

    run_both(2, work)


def test_a_gradient_reads_and_changes_like_any_other() -> None:
    """In the first window, where nobody knew that it would be read, and in those after it."""

    def work(world: World, spec: str) -> list[Tensor]:
        model, optimizer, _ = started(world, sgd, spec)
        found: list[Tensor] = []

        def look() -> None:
            grad = model.first.weight.grad
            found.extend([grad.clone(), grad + 1, grad[3].clone(), grad.abs().sum(), grad.norm(), grad.norm(1)])
            if world.rank == 0:  # one rank alone may look
                float(model.last.weight.grad.max())
            grad.mul_(0.5)
            found.append(grad.norm())
            grad.clamp_(-0.001, 0.001)
            grad[0] = 0.0
            grad.view(-1)[5:9].add_(0.25)
            model.last.bias.grad.data.div_(2.0)
            model.conv.weight.grad = None  # not stepped
            model.last.weight.grad = model.last.weight.grad * 0.5 + 0.01  # this one is
            model.never.bias.grad = torch.full((3,), 0.25)  # so is this: no rank used it
            again = copy.deepcopy(model.first.bias.grad)
            found.extend([again, torch.tensor(again.tolist()), torch.from_numpy(model.first.bias.grad.numpy()).clone()])
            torch._foreach_mul_([model.conv.bias.grad, model.first.bias.grad], 3.0)
            found.append(model.first.weight.grad.clone())

        train(model, optimizer, world.rank, range(4), look)
        found += values(model)
        world.barrier()
        return found

    run_both(2, work)


@pytest.mark.parametrize("set_to_none", [True, False, None])
def test_gradients_add_up_over_windows_as_under_allreduce(set_to_none: bool | None) -> None:
    """Cleared to None, to zeros, or not at all: each backward pass then adds to the mean of the one before."""

    def work(world: World, spec: str) -> list[Tensor]:
        model, optimizer, _ = started(world, sgd, spec)
        for t in range(6):
            model(batch(t, world.rank)).square().mean().backward()
            if t % 2 or set_to_none is not None:
                optimizer.step()
            if set_to_none is not None:
                optimizer.zero_grad(set_to_none=set_to_none)
        found = values(model)
        world.barrier()
        return found

    run_both(2, work)


def test_a_gradient_that_was_stepped_with_is_not_read() -> None:
    def work(world: World) -> None:
        model, optimizer, _ = started(world, sgd)
        train(model, optimizer, world.rank, range(1))
        with pytest.raises(RuntimeError, match=r"first.weight.*before optimizer.step"):
            model.first.weight.grad.norm()

    run_threads(work, 2)


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
def test_sparse_gradients_are_those_of_one_process() -> None:
    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.last = nn.Embedding(9, 4, sparse=True), nn.Linear(4, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.words(x).mean(1))

    def work(world: World) -> list[Tensor]:
        model = make(0, Words)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if world.size > 1:
            un.parallel(model, optimizer, "shared", world=world)
        for t in range(4):
            rows = torch.randint(9, (2, 3, 2), generator=torch.Generator().manual_seed(t))
            mine = rows[world.rank] if world.size > 1 else rows.flatten(0, 1)
            optimizer.zero_grad()
            model(mine).square().mean().backward()
            optimizer.step()
        found = values(model)
        world.barrier()
        return found

    alone = work(World())
    for result in run_threads(work, 2):
        torch.testing.assert_close(result, alone)


# Several hosts -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("hosts", [["a", "a", "b", "b"], ["a", "b", "a", "b", "b"], ["a", "b"]])
def test_between_hosts_it_is_one_process_on_the_joined_batches(hosts: list[str]) -> None:
    size = len(hosts)

    def work(world: World) -> list[Tensor]:
        model, optimizer, _ = started(world, sgd, seed=world.rank)
        train(model, optimizer, world.rank, range(4), lambda: nn.utils.clip_grad_norm_(model.parameters(), 0.1))
        found = values(model)
        world.barrier()
        return found

    model = make(0)
    optimizer = sgd([p for p in model.parameters() if p.requires_grad])
    for t in range(4):
        optimizer.zero_grad()
        model(torch.cat([batch(t, r) for r in range(size)])).square().mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
    results = run_threads(work, size, hosts=hosts)
    for result in results:
        assert same(result, results[0])
        torch.testing.assert_close(result, values(model), rtol=1e-4, atol=1e-6)


def test_a_host_sends_what_one_rank_of_as_many_hosts_would() -> None:
    """Four hosts of two: each byte of the gradients crosses once, in two parts."""
    hosts = [f"h{r // 2}" for r in range(8)]
    model = make(0)
    elements = sum(-(-p.numel() // 16) * 16 for p in model.parameters() if p.requires_grad)

    def work(world: World) -> int:
        model, optimizer, _ = started(world, sgd)
        train(model, optimizer, world.rank, range(2))
        sent = [r.bytes_sent for r in world.ledger.records if r.tag.startswith("gradients")]
        world.barrier()
        return sum(sent) // 2

    sent = run_threads(work, 8, hosts=hosts)
    for host in range(4):
        assert sum(sent[2 * host : 2 * host + 2]) == pytest.approx(2 * 3 / 4 * 4 * elements, rel=0.05)


@pytest.mark.parametrize("reducer", ["bf16", "topk(k=0.25)", "powersgd(rank=1)", "error_feedback(onebit)"])
def test_a_reducer_works_between_hosts_and_nowhere_else(reducer: str, tmp_path: Path) -> None:
    def work(world: World) -> list[Tensor]:
        model, optimizer, replica = started(world, sgd, f"shared(reducer={reducer})")
        train(model, optimizer, world.rank, range(3))
        un.save(tmp_path / str(len(set(world.hosts))), replica)
        train(model, optimizer, world.rank, range(3, 5))
        found = values(model)
        world.barrier()
        replica.close()
        model, optimizer, replica = started(world, sgd, f"shared(reducer={reducer})", seed=3)
        un.load(tmp_path / str(len(set(world.hosts))), replica)
        train(model, optimizer, world.rank, range(3, 5))
        assert same(values(model), found)
        world.barrier()
        return found

    exact = run_threads(lambda world: work(world), 4)
    across = run_threads(work, 4, hosts=["a", "a", "b", "b"])
    for result in across:
        assert same(result, across[0])
    plain = [x for x, y in zip(across[0], exact[0], strict=True) if not torch.equal(x, y)]
    assert plain, "it compressed"
    for x, y in zip(across[0], exact[0], strict=True):
        torch.testing.assert_close(x, y, rtol=0.5, atol=0.3)


# What a program writes by itself -------------------------------------------------------------------------------


def test_a_rank_that_writes_alone_is_named() -> None:
    def work(world: World) -> list[str]:
        model, optimizer, replica = started(world, sgd)
        train(model, optimizer, world.rank, range(1))
        if world.rank == 1:
            with torch.no_grad():
                model.last.weight.mul_(0.9)
        found = replica.find_differences()
        with pytest.raises(ValueError, match=r"local rank\(s\) 1 wrote to parameter 'last.weight'"):
            train(model, optimizer, world.rank, range(1, 2))
        return found

    for found in run_threads(work, 2):
        assert found == ["rank(s) 1 alone wrote to parameter 'last.weight'"]


def set_rate(model: nn.Module, optimizer: Any, old: Any) -> None:
    optimizer.param_groups[0]["lr"] = 0.02


def load_optimizer(model: nn.Module, optimizer: Any, old: Any) -> None:
    optimizer.load_state_dict(old["optimizer"])


def load_model(model: nn.Module, optimizer: Any, old: Any) -> None:
    model.load_state_dict(old["model"])


def clear_one(model: nn.Module, optimizer: Any, old: Any) -> None:
    model.last.bias.grad = None


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (set_rate, "local rank 0 has lr=0.01; local rank 1 has lr=0.02"),
        (
            load_optimizer,
            "rank.* 1 wrote to parameter '.* .exp_avg in optimizer.state.' since the last step, and rank.* 0 did not",
        ),
        (load_model, r"local rank\(s\) 1 wrote to parameter 'again'"),
        (clear_one, "local rank 0 has 6 parameters to step .* local rank 1 has 5 parameters to step"),
    ],
)
def test_what_one_rank_alone_sets_or_loads_is_named(change: Callable[[nn.Module, Any, Any], None], named: str) -> None:
    """All of it would tear the one model, or change it under the others."""

    def work(world: World) -> None:
        model, optimizer, _ = started(world, adamw)
        train(model, optimizer, world.rank, range(1))
        old = copy.deepcopy({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
        train(model, optimizer, world.rank, range(1, 2))
        world.barrier()
        optimizer.zero_grad()
        model(batch(2, world.rank)).square().mean().backward()
        if world.rank == 1:
            change(model, optimizer, old)
        optimizer.step()

    with pytest.raises(ValueError, match=named):
        run_threads(work, 2)


@pytest.mark.parametrize("spec", ["shared", "zero(stage=2)"])
def test_writes_between_a_checkpoint_and_a_load_are_those_of_one_rank(spec: str) -> None:
    def work(world: World) -> None:
        model, optimizer, replica = started(world, sgd, spec)
        train(model, optimizer, world.rank, range(2))
        replica.write(lambda: model.last.weight.data.mul_(0.5))  # type: ignore[attr-defined]
        model.last.weight.data.mul_(0.5)
        kept = values(model)
        un.save(folder, replica)
        train(model, optimizer, world.rank, range(2, 4))
        model.last.weight.data.mul_(0.5)
        un.load(folder, replica)
        assert same(values(model), kept)
        train(model, optimizer, world.rank, range(4, 5))

    with tempfile.TemporaryDirectory() as folder:
        run_threads(work, 2)


def test_what_every_rank_writes_counts_once() -> None:
    def work(world: World, spec: str) -> list[Tensor]:
        model, optimizer, replica = started(world, sgd, spec)
        ema = {name: x.detach().clone() for name, x in model.state_dict().items()}
        for t in range(6):
            train(model, optimizer, world.rank, range(t, t + 1))
            with torch.no_grad():
                if t == 0:
                    for p in model.parameters():
                        p.clamp_(-0.2, 0.2)
                elif t == 1:
                    change = lambda: model.first.weight.mul_(0.5)  # noqa: E731
                    change()
                    replica.write(change) if spec == "shared" else change()
                elif t == 2:
                    model.load_state_dict(ema)
                elif t == 3:
                    model.last.weight.data = torch.full_like(model.last.weight, 0.125)
                elif t == 4:
                    model.last.bias.data[0] += 1.0
        return values(model)

    run_both(2, work)


def test_a_hook_of_the_optimizer_writes_after_all_have_stepped() -> None:
    def work(world: World) -> Tensor:
        model = make()
        optimizer = sgd(model.parameters())
        optimizer.register_step_post_hook(lambda *_: [nn.init.ones_(model.last.weight)].clear())  # type: ignore[arg-type]
        replica = un.parallel(model, optimizer, "shared", world=world)
        train(model, optimizer, world.rank, range(2))
        assert not replica.find_differences()
        return model.last.weight.detach().clone()  # type: ignore[union-attr, operator, no-any-return]

    for found in run_threads(work, 2):
        assert found.eq(1.0).all()


def test_values_that_differ_between_ranks_are_named() -> None:
    def work(world: World) -> None:
        model, optimizer, _ = started(world, sgd)
        train(model, optimizer, world.rank, range(1))
        model.last.weight.data = torch.full_like(model.last.weight, float(world.rank))
        train(model, optimizer, world.rank, range(1, 2))

    with pytest.raises(ValueError, match=r"'last.weight'.*differs between local ranks 0 and 1"):
        run_threads(work, 2)


@pytest.mark.filterwarnings("ignore:ranks make one collective at different places")  # said beside it
def test_a_rank_that_does_not_step_is_named() -> None:
    def work(world: World) -> None:
        model, optimizer, _ = started(world, sgd)
        train(model, optimizer, world.rank, range(1))
        for t in (1, 2):
            optimizer.zero_grad()
            model(batch(t, world.rank)).square().mean().backward()
            if world.rank == 0 or t == 2:
                optimizer.step()

    with pytest.raises(Mismatch, match="different places of their program"):
        run_threads(work, 2)


class Killed(Exception):
    """A rank that is no more."""


def test_a_rank_lost_in_its_step_leaves_a_torn_model_and_the_others_say_so() -> None:
    said: list[str] = []

    def work(world: World) -> None:
        model, optimizer, replica = started(world, adamw)
        train(model, optimizer, world.rank, range(2))

        def die() -> None:
            raise Killed

        if world.rank == 1:
            replica._step._in_the_middle = die  # type: ignore[attr-defined]
        try:
            train(model, optimizer, world.rank, range(2, 3))
        except PeerLost as error:
            said.append(str(error))

    with pytest.raises(Killed):
        run_threads(work, 3)
    assert len(said) == 2
    for text in said:
        assert "in the middle of a step of the model that all workers of the host share" in text
        assert "the parts of local rank(s) 1 are torn" in text  # those still at theirs were waited for
        assert "restart the run from its last checkpoint" in text


# What is refused, other strategies, and the end ------------------------------------------------------------------


@pytest.mark.parametrize(
    "optimizer",
    [
        lambda p: torch.optim.LBFGS(p),
        lambda p: torch.optim.SparseAdam(p),
        lambda p: torch.optim.SGD(p, lr=0.1, differentiable=True),
    ],
)
def test_optimizers_that_cannot_be_shared_out_are_refused(optimizer: Make) -> None:
    model = nn.Linear(3, 2)
    with pytest.raises(ValueError, match=type(optimizer([*model.parameters()])).__name__):
        un.parallel(model, optimizer([*model.parameters()]), "shared", world=World())


@pytest.mark.parametrize("spec", ["shared", "zero(stage=1)"])
def test_two_parameters_in_one_memory_are_refused(spec: str) -> None:
    """Moved to memory of the host, each would have values of its own, without a word."""

    def work(world: World) -> None:
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
        model[1].weight = nn.Parameter(model[0].weight.detach())
        un.parallel(model, sgd(model.parameters()), spec, world=world)

    with pytest.raises(ValueError, match=r"'0.weight' and '1.weight' lie in one memory.*make them one parameter"):
        run_threads(work, 2)


def test_another_dtype_in_mid_run_is_refused() -> None:
    def work(world: World) -> None:
        model, optimizer, _ = started(world, sgd)
        train(model, optimizer, world.rank, range(1))
        optimizer.zero_grad()
        model.double()(batch(1, world.rank).double()).sum().backward()

    with pytest.raises(TypeError, match=r"is torch.float64 now, and was torch.float32.*before un.parallel"):
        run_threads(work, 2)


def test_copies_and_files_of_the_model_are_ordinary_ones() -> None:
    def work(world: World) -> None:
        model, optimizer, replica = started(world, sgd)
        train(model, optimizer, world.rank, range(2))
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        for copied in (copy.deepcopy(model), torch.load(file, weights_only=False)):
            assert same(values(copied), values(model))
            if world.rank == 1:
                copied.load_state_dict(make(3).state_dict())  # what happens to a copy is no rank's affair
        assert not replica.find_differences()  # type: ignore[attr-defined]
        train(model, optimizer, world.rank, range(2, 3))

    run_threads(work, 2)


def test_a_model_on_a_device_is_refused() -> None:
    model = nn.Linear(3, 2, device="meta")
    with pytest.raises(ValueError, match="'weight' is on meta: keep the model on the CPU"):
        un.parallel(model, sgd(model.parameters()), "shared", world=World())


@pytest.mark.parametrize("other", ["allreduce", "zero(stage=2)", "local_sgd(every=2)"])
def test_checkpoints_and_switches_go_to_other_strategies_and_back(other: str, tmp_path: Path) -> None:
    def work(world: World, spec: str) -> list[Tensor]:
        model, optimizer, replica = started(world, lambda p: torch.optim.AdamW(p, lr=0.01), spec)
        train(model, optimizer, world.rank, range(2))
        un.save(tmp_path / spec[:4], replica)
        replica = replica.switch(other if spec == "shared" else "shared")
        train(model, optimizer, world.rank, range(2, 3))
        replica = replica.switch(spec)
        train(model, optimizer, world.rank, range(3, 4))
        replica.restore()
        found = values(replica.consolidate())
        world.barrier()
        replica.close()
        return found

    if other.startswith("local"):
        results = run_threads(lambda world: work(world, "shared"), 2)
        assert same(results[0], results[1])
        return
    wanted = run_threads(lambda world: work(world, "allreduce"), 2)  # between allreduce and shared
    for result in run_threads(lambda world: work(world, "shared"), 2):
        torch.testing.assert_close(result, wanted[0])

    def load(world: World, spec: str, saved: str) -> list[Tensor]:
        model, optimizer, replica = started(world, lambda p: torch.optim.AdamW(p, lr=0.01), spec, seed=5)
        un.load(tmp_path / saved[:4], replica)
        train(model, optimizer, world.rank, range(2, 4))
        replica.restore()
        found = values(replica.consolidate())
        world.barrier()
        return found

    for spec, saved in (("shared", "allreduce"), (other, "shared"), ("shared", "shared")):
        for result in run_threads(lambda world, s=spec, f=saved: load(world, s, f), 2):  # type: ignore[misc]
            torch.testing.assert_close(result, wanted[0])


def test_ranks_of_a_host_have_one_model_and_one_state_and_each_its_own_after_close() -> None:
    def work(world: World) -> tuple[int, int]:
        model, optimizer, replica = started(world, adamw)
        train(model, optimizer, world.rank, range(2))
        assert isinstance(replica, SharedReplica)
        view, state = model.first.weight.data_ptr(), optimizer.state[model.first.weight]["exp_avg"].data_ptr()
        assert replica._state is not None
        places = (
            replica._lines[0].values.data_ptr(),
            replica._state.tiles(replica._lines[0], ["exp_avg"], 0, 1)[0].data_ptr(),
        )
        world.barrier()
        replica.close()
        assert model.first.weight.data_ptr() != view
        assert optimizer.state[model.first.weight]["exp_avg"].data_ptr() != state
        return places

    first, second = run_threads(work, 2)
    assert first == second
