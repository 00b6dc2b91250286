"""Gossip: each graph's mixing, its bytes, and parity with a plain reference in which one process plays all ranks."""

from __future__ import annotations

import copy
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import unisono as un
from pairs import cover_pairs
from unisono.methods.kernels.quantise import bytes_nbytes
from unisono.methods.strategies._graphs import neighbours
from unisono.methods.strategies.gossip import LowPrecisionReplica
from unisono.world import World
from unisono.world.virtual import run_threads

MODELS = threading.Lock()
GRAPHS = ["ring", "shift_one", "exponential", "all"]


def make(dtype: torch.dtype = torch.float64) -> nn.Module:
    with MODELS:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).to(dtype)


def momentum(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def batch(t: int, rank: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(4, 5, generator=torch.Generator().manual_seed(100 * t + rank), dtype=torch.float64).to(dtype)


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    return (model(x) - x[:, :3]).square().mean()


def train(model: nn.Module, optimizer: Any, rank: int, steps: range) -> None:
    for t in steps:
        optimizer.zero_grad()
        loss_of(model, batch(t, rank, next(model.parameters()).dtype)).backward()
        optimizer.step()


def flat(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def matrix(graph: str, t: int, size: int) -> Tensor:
    """The mixing matrix from METHODS' text, not from the code."""
    w = torch.zeros(size, size, dtype=torch.float64)
    for r in range(size):
        if size == 1:
            w[r, r] = 1
        elif graph == "all":
            w[r] = 1 / size
        elif graph == "ring":
            near = {(r - 1) % size, (r + 1) % size}
            for j in (r, *near):
                w[r, j] = 1 / (1 + len(near))
        elif graph == "shift_one":
            if r < size // 2:
                peer = ((t + r) % (size // 2)) + size // 2
                for a, b in ((r, r), (r, peer), (peer, r), (peer, peer)):
                    w[a, b] = 0.5
        else:
            hops = 0
            while 2**hops < size:
                hops += 1
            w[r, r] += 0.5
            w[r, (r - 2 ** (t % hops)) % size] += 0.5
    return w


def mixed(models: list[nn.Module], w: Tensor) -> None:
    """x_i <- sum_j W_ij x_j."""
    with torch.no_grad():
        for params in zip(*(m.parameters() for m in models), strict=True):
            rows = torch.stack([p.reshape(-1) for p in params])
            for p, row in zip(params, w @ rows, strict=True):
                p.copy_(row.view_as(p))


def reference(
    graph: str, size: int, steps: int, optimizer_of: Callable[..., Any], *, every: int = 1, skip: Any = None
) -> list[nn.Module]:
    """All ranks in one process: gradients at x_i, mix, step."""
    models = [make() for _ in range(size)]
    optimizers = [optimizer_of(m) for m in models]
    for t in range(steps):
        for r, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            optimizer.zero_grad()
            loss_of(model, batch(t, r)).backward()
        if (t + 1) % every == 0:
            mixed(models, matrix(graph, (t + 1) // every, size))
        for r, optimizer in enumerate(optimizers):
            if (t, r) != skip:
                optimizer.step()
    return models


# Graphs --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("graph", GRAPHS)
@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 6, 7, 8, 12])
def test_mixing_is_doubly_stochastic_and_those_heard_are_those_that_send(graph: str, size: int) -> None:
    if graph == "shift_one" and size > 1 and size % 2:
        return
    for t in range(7):
        w, sent = torch.zeros(size, size, dtype=torch.float64), set()
        heard = set()
        for r in range(size):
            who = neighbours(graph, t, r, size)
            w[r, r] += who.own
            for other in who.heard:
                w[r, other] += who.weight
            sent |= {(r, to) for to in who.to}
            heard |= {(other, r) for other in who.heard}
            assert r not in who.to
        torch.testing.assert_close(w, matrix(graph, t, size))
        torch.testing.assert_close(w.sum(0), torch.ones(size, dtype=torch.float64))
        torch.testing.assert_close(w.sum(1), torch.ones(size, dtype=torch.float64))
        assert sent == heard


def test_after_log2_exchanges_of_the_exponential_graph_all_have_the_mean() -> None:
    product = torch.eye(8, dtype=torch.float64)
    for t in range(5, 8):
        product = matrix("exponential", t, 8) @ product
    torch.testing.assert_close(product, torch.full((8, 8), 1 / 8, dtype=torch.float64))


def test_shift_one_meets_every_rank_of_the_other_half() -> None:
    assert {neighbours("shift_one", t, 1, 8).to[0] for t in range(4)} == {4, 5, 6, 7}


# Training ------------------------------------------------------------------------------------------------------


def has_graph(graph: str, size: int, *_: object) -> bool:
    return (graph, size) != ("shift_one", 3)


@pytest.mark.parametrize(
    ("graph", "size", "overlap"), cover_pairs(list(GRAPHS), [1, 2, 3, 4], [True, False], valid=has_graph)
)
def test_ten_steps_equal_the_reference(graph: str, size: int, overlap: bool) -> None:
    optimizer_of = momentum if overlap else adamw

    def work(world: World) -> Tensor:
        model = make()
        optimizer = optimizer_of(model)
        replica = un.parallel(model, optimizer, f"gossip({graph}, overlap={overlap})", world=world)
        train(model, optimizer, world.rank, range(10))
        ended = flat(model)
        replica.close()
        return ended

    results = run_threads(work, size)
    for mine, model in zip(results, reference(graph, size, 10, optimizer_of), strict=True):
        torch.testing.assert_close(mine, flat(model), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("every", [2, 3])
def test_exchanges_only_in_every_nth_window_with_accumulation_and_a_scheduler(every: int) -> None:
    """Two passes a window add up: the reference has them as one."""

    def work(world: World) -> Tensor:
        model = make()
        optimizer = momentum(model)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
        replica = un.parallel(model, optimizer, f"gossip(exponential, every={every}, accumulate=2)", world=world)
        for t in range(7):
            optimizer.zero_grad()
            for _ in range(2):
                (loss_of(model, batch(t, world.rank)) / 2).backward()
            optimizer.step()
            scheduler.step()
        assert replica.step == 7
        ended = flat(model)
        replica.close()
        return ended

    def with_schedule(model: nn.Module) -> Any:
        optimizer = momentum(model)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
        optimizer.register_step_post_hook(lambda *_: scheduler.step())
        return optimizer

    results = run_threads(work, 3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        models = reference("exponential", 3, 7, with_schedule, every=every)
    for mine, model in zip(results, models, strict=True):
        torch.testing.assert_close(mine, flat(model), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("watched", [True, False])
def test_an_overflow_on_one_rank_skips_its_step_alone_and_no_mixing(watched: bool) -> None:
    def work(world: World) -> Tensor:
        model = make()
        optimizer = momentum(model)
        replica = un.parallel(model, optimizer, "gossip", world=world)
        scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=100)
        if watched:
            replica.watch(scaler)
        for t in range(5):
            optimizer.zero_grad()
            loss = loss_of(model, batch(t, world.rank))
            if (t, world.rank) == (2, 1):
                loss = loss * float("inf")
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        replica.consolidate()
        assert replica.step == 5
        ended = flat(model)
        replica.close()
        return ended

    results = run_threads(work, 3)
    for mine, model in zip(results, reference("ring", 3, 5, momentum, skip=(2, 1)), strict=True):
        torch.testing.assert_close(mine, flat(model), rtol=1e-12, atol=1e-12)


def test_a_step_with_a_closure_is_one_window() -> None:
    def work(world: World) -> int:
        model = make()
        optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=2)
        replica = un.parallel(model, optimizer, "gossip", world=world)
        optimizer.param_groups[0]["max_iter"] += world.rank

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = loss_of(model, batch(0, world.rank))
            loss.backward()
            return loss

        for _ in range(3):
            optimizer.step(closure)
        replica.close()
        return replica.step

    assert run_threads(work, 3) == [3, 3, 3]


# Low precision -------------------------------------------------------------------------------------------------


def quantised(z: Tensor) -> Tensor:
    """256 steps from the least to the greatest of all (fewer than a block), zero on a step; plain PyTorch."""
    x = z.float()
    low, high = x.min(), x.max()
    step = (high - low) / 255
    low = torch.round(low / step) * step
    codes = torch.round((x - low) / step).clamp(0, 255)
    return codes.to(z.dtype) * step.to(z.dtype) + low.to(z.dtype)


def low_precision_reference(size: int, steps: int, every: int = 1) -> list[nn.Module]:
    models = [make() for _ in range(size)]
    optimizers = [momentum(m) for m in models]
    w = [flat(m) for m in models]
    for t in range(steps):
        for r, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            optimizer.zero_grad()
            loss_of(model, batch(t, r)).backward()
            optimizer.step()
        if (t + 1) % every == 0:
            z = []
            for r, model in enumerate(models):
                if size == 2:
                    z.append(flat(model) + w[1 - r] / 2 - 3 / 2 * w[r])
                else:
                    z.append(flat(model) + (w[r - 1] + w[(r + 1) % size]) / 3 - 5 / 3 * w[r])
            w = [x + quantised(y) for x, y in zip(w, z, strict=True)]
            for model, x in zip(models, w, strict=True):
                nn.utils.vector_to_parameters(x.clone(), model.parameters())
    return models


@pytest.mark.parametrize("size", [2, 3, 4, 5])
@pytest.mark.parametrize(("overlap", "every"), [(True, 1), (False, 1), (True, 3)])
def test_ten_steps_at_8_bits_equal_the_reference(size: int, overlap: bool, every: int) -> None:
    def work(world: World) -> Tensor:
        model = make()
        optimizer = momentum(model)
        replica = un.parallel(model, optimizer, f"gossip(bits=8, overlap={overlap}, every={every})", world=world)
        train(model, optimizer, world.rank, range(10))
        ended = flat(model)
        replica.close()
        return ended

    results = run_threads(work, size)
    for mine, model in zip(results, low_precision_reference(size, 10, every), strict=True):
        torch.testing.assert_close(mine, flat(model), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_a_copy_of_a_neighbours_weights_is_those_weights_bit_by_bit(dtype: torch.dtype, size: int) -> None:
    def work(world: World) -> tuple[list[Tensor], list[list[Tensor]], Tensor]:
        model = make(dtype)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        replica = un.parallel(model, optimizer, "gossip(bits=8)", world=world)
        assert isinstance(replica, LowPrecisionReplica)
        train(model, optimizer, world.rank, range(12))
        replica.state_dict()  # what is under way arrives
        found = replica.own, replica.copies, flat(model)
        replica.close()
        return found

    results = run_threads(work, size)
    for r, (own, copies, model) in enumerate(results):
        assert torch.isfinite(model).all()
        assert torch.equal(own[0].to(dtype), model)
        for copy_of, other in zip(copies, dict.fromkeys([(r - 1) % size, (r + 1) % size]), strict=True):
            assert torch.equal(copy_of[0], results[other][0][0])


def test_8_bits_learn_as_well_as_full_precision() -> None:
    def loss_with(spec: str) -> float:
        def work(world: World) -> float:
            model = make(torch.float32)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
            replica = un.parallel(model, optimizer, spec, world=world)
            train(model, optimizer, world.rank, range(150))
            with torch.no_grad():
                ended = sum(
                    loss_of(replica.consolidate(), batch(t, 99, torch.float32)).item() for t in range(1000, 1010)
                )
            replica.close()
            return ended

        return run_threads(work, 4)[0]

    assert loss_with("gossip(bits=8)") < 1.05 * loss_with("gossip")


# Bytes ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "size", "per"),
    [
        ("gossip(shift_one)", 4, lambda d, n: 4 * d),
        ("gossip(exponential)", 3, lambda d, n: 4 * d),
        ("gossip", 4, lambda d, n: 8 * d),
        ("gossip", 2, lambda d, n: 4 * d),
        ("gossip(all)", 4, lambda d, n: -(-2 * (n - 1) * 4 * d // n)),
        ("gossip(bits=8)", 4, lambda d, n: 2 * (bytes_nbytes(d, 2048) + 8)),
        ("gossip(bits=8)", 2, lambda d, n: bytes_nbytes(d, 2048) + 8),
    ],
)
def test_bytes_a_step_are_those_of_the_closed_form(spec: str, size: int, per: Callable[[int, int], int]) -> None:
    def work(world: World) -> tuple[int, int]:
        model = make(torch.float32)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        replica = un.parallel(model, optimizer, spec, world=world)
        train(model, optimizer, world.rank, range(6))
        replica.close()
        records = [r for r in world.ledger.records if r.tag == "gossip"]
        return sum(r.bytes_sent for r in records), 6 * per(flat(model).numel(), size)

    for sent, expected in run_threads(work, size):
        assert sent == expected


# State ---------------------------------------------------------------------------------------------------------


def test_consolidate_is_the_mean_on_every_rank_and_disturbs_nothing() -> None:
    def work(world: World) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        model = make()
        model.register_buffer("seen", torch.full((), float(world.rank), dtype=torch.float64))
        optimizer = momentum(model)
        replica = un.parallel(model, optimizer, "gossip", world=world)
        model.seen.fill_(world.rank)
        train(model, optimizer, world.rank, range(3))
        before = flat(model)
        mean = replica.consolidate()
        assert torch.equal(flat(model), before)
        assert mean is not model
        mean(batch(0, 0))  # belongs to no replica: nobody is waited for
        train(model, optimizer, world.rank, range(3, 5))
        after = flat(model)
        replica.close()
        return before, flat(mean), mean.seen, after

    results = run_threads(work, 3)
    for before, mean, seen, _ in results:
        assert torch.equal(mean, results[0][1])
        torch.testing.assert_close(mean, torch.stack([r[0] for r in results]).mean(0))
        assert seen == 1.0
        assert not torch.equal(before, results[(0 if before is not results[0][0] else 1)][0])
    for (*_, after), model in zip(results, reference("ring", 3, 5, momentum), strict=True):
        torch.testing.assert_close(after, flat(model), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("spec", ["gossip", "gossip(shift_one)", "gossip(exponential, every=2)", "gossip(bits=8)"])
def test_a_checkpoint_goes_on_bit_by_bit_and_in_another_world_from_the_mean(spec: str, tmp_path: Path) -> None:
    def first(world: World) -> tuple[Tensor, Tensor]:
        model = make()
        optimizer = momentum(model)
        replica = un.parallel(model, optimizer, spec, world=world)
        train(model, optimizer, world.rank, range(3))
        un.save(tmp_path, replica)
        saved = flat(model)
        train(model, optimizer, world.rank, range(3, 7))
        ended = flat(model)
        other = make()
        optimizer = momentum(other)
        again = un.parallel(other, optimizer, spec, world=world)
        train(other, optimizer, world.rank, range(2))  # an exchange is under way when it loads
        un.load(tmp_path, again)
        assert again.step == 3
        train(other, optimizer, world.rank, range(3, 7))
        assert torch.equal(flat(other), ended)
        replica.close()
        again.close()
        return saved, ended

    results = run_threads(first, 4)
    mean = torch.stack([saved for saved, _ in results]).mean(0)

    def second(world: World) -> Tensor:
        model = make()
        optimizer = momentum(model)
        replica = un.parallel(model, optimizer, spec, world=world)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # says that tensors became their mean
            un.load(tmp_path, replica)
        torch.testing.assert_close(flat(model), mean)
        assert replica.step == 3
        train(model, optimizer, world.rank, range(3, 6))
        ended = flat(replica.consolidate())
        replica.close()
        return ended

    results = run_threads(second, 2)
    assert torch.equal(results[0], results[1])


@pytest.mark.parametrize("spec", ["gossip", "gossip(exponential)", "gossip(bits=8)"])
@pytest.mark.parametrize("new", [True, False])
def test_4_ranks_become_3_and_4_again(spec: str, new: bool) -> None:
    def work(world: World) -> tuple[Tensor, int, list[str]]:
        model = make()
        optimizer = momentum(model)
        replica = un.parallel(model, optimizer, spec, world=world)
        train(model, optimizer, world.rank, range(3))
        three, told = world.split([[0, 1, 2], [3]]), []
        if world.rank < 3:
            mean = torch.stack(world_gather(three, flat(model))).mean(0)
            told.append(replica.rebind(three))
            torch.testing.assert_close(flat(model), mean)
            train(model, optimizer, world.rank, range(3, 5))
        elif new:
            replica.close()
            model = make()
            optimizer = momentum(model)
            replica = un.parallel(model, optimizer, spec, world=World())
        told.append(replica.rebind(world.split([[0, 1, 2, 3]]), source=0))
        train(model, optimizer, world.rank, range(5, 8))
        ended = flat(replica.consolidate()), replica.step, told
        replica.close()
        return ended

    results = run_threads(work, 4)
    for mean, step, told in results:
        assert torch.equal(mean, results[0][0])
        assert step == 8
        assert "3 rank(s) that stayed" in told[-1]


def world_gather(world: World, x: Tensor) -> list[Tensor]:
    return world.all_gather(x, even=True).wait()


def test_a_rebind_to_an_odd_world_is_refused_by_shift_one_and_changes_nothing() -> None:
    def work(world: World) -> None:
        model = make()
        optimizer = momentum(model)
        replica = un.parallel(model, optimizer, "gossip(shift_one)", world=world)
        train(model, optimizer, world.rank, range(2))
        three = world.split([[0, 1, 2], [3]])
        if world.rank < 3:
            with pytest.raises(ValueError, match="even world"):
                replica.rebind(three)
        train(model, optimizer, world.rank, range(2, 4))
        assert replica.step == 4
        replica.close()

    run_threads(work, 4)


def test_unfreezing_is_noticed_and_a_rebind_takes_it_in() -> None:
    def work(world: World) -> tuple[Tensor, Tensor]:
        model = make()
        model[0].requires_grad_(False)
        optimizer = momentum(model)
        replica = un.parallel(model, optimizer, "gossip(all)", world=world)
        train(model, optimizer, world.rank, range(1))
        model[0].requires_grad_(True)
        with pytest.raises(RuntimeError, match="rebind"):
            train(model, optimizer, world.rank, range(1, 3))
        replica.rebind(world)
        train(model, optimizer, world.rank, range(3, 5))
        optimizer.param_groups[0]["lr"] = 0.0
        train(model, optimizer, world.rank, range(5, 6))
        ended = flat(model)
        replica.close()
        return ended

    a, b = run_threads(work, 2)
    assert torch.equal(a, b)


# Settings ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "size", "reason"),
    [
        ("gossip(shift_one)", 3, "even world, got 3"),
        ("gossip(graph=star)", 2, "graph"),
        ("gossip(bits=4)", 2, r"bits=\.\.\.\) takes one of 8 or None"),
        ("gossip(exponential, bits=8)", 2, "ring"),
        ("gossip(every=0)", 1, "every"),
        ("gossip(accumulate=0)", 1, "accumulate"),
        ("gossip(overlap=3)", 1, "overlap"),
    ],
)
def test_impossible_settings_are_refused(spec: str, size: int, reason: str) -> None:
    def work(world: World) -> None:
        model = make()
        with pytest.raises((ValueError, TypeError), match=reason):
            un.parallel(model, momentum(model), spec, world=world)
        un.parallel(model, momentum(model), "gossip", world=world).close()

    run_threads(work, size)


def test_a_world_of_one_is_the_bare_loop() -> None:
    for spec in ("gossip", "gossip(shift_one)", "gossip(bits=8)"):
        model = make()
        bare = copy.deepcopy(model)
        optimizer, other = momentum(model), momentum(bare)
        replica = un.parallel(model, optimizer, spec, world=World())
        train(model, optimizer, 0, range(4))
        train(bare, other, 0, range(4))
        assert torch.equal(flat(model), flat(bare))
        assert torch.equal(flat(replica.consolidate()), flat(bare))
        replica.close()
