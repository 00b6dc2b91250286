"""QAdam against Adam written out in plain PyTorch, in fp64; and each thing that public code loses at the switch."""

from __future__ import annotations

import copy
import math
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import unisono as un
from unisono.world import World
from unisono.world.virtual import run_threads

MODELS = threading.Lock()
TIGHT = 1e-10


def make(dtype: torch.dtype = torch.float64) -> nn.Sequential:
    with MODELS:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(5, 9), nn.Tanh(), nn.Linear(9, 3)).to(dtype)


def batch(t: int, rank: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(4, 5, generator=torch.Generator().manual_seed(100 * t + rank), dtype=torch.float64).to(dtype)


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    return (model(x) - x[:, :3]).square().mean()


def flat(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def train(model: nn.Module, optimizer: Any, rank: int, steps: range, clip: float | None = None) -> None:
    for t in steps:
        optimizer.zero_grad()
        loss_of(model, batch(t, rank, next(model.parameters()).dtype)).backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()


Options = dict[str, Any]


def reference(size: int, steps: int, warmup: int, groups: Sequence[Options], *, clip: float | None = None) -> nn.Module:
    """QAdam with an exact mean of momenta, all ranks in one process. One group of options a layer."""
    model = make()
    params = [list(model[0].parameters()), list(model[2].parameters())]
    m = {p: torch.zeros_like(p) for p in model.parameters()}
    v = {p: torch.zeros_like(p) for p in model.parameters()}
    for t in range(1, steps + 1):
        grads: dict[Tensor, list[Tensor]] = {p: [] for p in model.parameters()}
        for rank in range(size):
            model.zero_grad()
            loss_of(model, batch(t - 1, rank)).backward()
            for p in model.parameters():
                assert p.grad is not None
                grads[p].append(p.grad.clone())
        with torch.no_grad():
            mean = {p: torch.stack(g).mean(0) for p, g in grads.items()}
            if clip is not None:
                norm = torch.sqrt(sum(g.square().sum() for g in mean.values()))
                mean = {p: g * min(1.0, clip / (norm.item() + 1e-6)) for p, g in mean.items()}
            for o, layer in zip(groups, params, strict=True):
                lr, (b1, b2), wd = o.get("lr", 0.01), o.get("betas", (0.9, 0.999)), o.get("weight_decay", 0.0)
                for p in layer:
                    g = -mean[p] if o.get("maximize") else mean[p]
                    if o.get("decoupled"):
                        p.mul_(1 - lr * wd)
                    else:
                        g = g + wd * p
                    # Averaging b1 m + (1 - b1) g_i over ranks that share m is this, where the mean is exact.
                    m[p] = b1 * m[p] + (1 - b1) * g
                    if t <= warmup:
                        v[p] = b2 * v[p] + (1 - b2) * g * g
                    bias = 1 - b2 ** min(t, warmup)
                    p -= lr / (1 - b1**t) * m[p] / (torch.sqrt(v[p] / bias) + o.get("eps", 1e-8))
    return model


CASES: dict[str, tuple[type[torch.optim.Adam], list[Options]]] = {
    "plain": (torch.optim.Adam, [{}, {}]),
    "weight decay in the gradient": (torch.optim.Adam, [{"weight_decay": 0.1}, {"weight_decay": 0.3}]),
    "decoupled weight decay": (torch.optim.AdamW, [{"weight_decay": 0.1}, {"weight_decay": 0.3}]),
    "each group's betas": (torch.optim.Adam, [{"betas": (0.8, 0.9)}, {"betas": (0.95, 0.99), "lr": 0.002}]),
    "maximize and eps": (torch.optim.Adam, [{"maximize": True}, {"eps": 1e-3}]),
}


def optimizer_for(model: nn.Sequential, case: str, **more: Any) -> torch.optim.Optimizer:
    kind, groups = CASES[case]
    layers = [{"params": list(model[i].parameters()), **o} for i, o in zip((0, 2), groups, strict=True)]
    return kind(layers, lr=0.01, **({"weight_decay": 0.0} if kind is torch.optim.AdamW else {}), **more)


def expected(case: str, size: int, steps: int, warmup: int, **more: Any) -> Tensor:
    kind, groups = CASES[case]
    return flat(reference(size, steps, warmup, [{**o, "decoupled": kind is torch.optim.AdamW} for o in groups], **more))


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("clip", [None, 0.5])
def test_ten_steps_with_exact_means_equal_the_reference(case: str, size: int, clip: float | None) -> None:
    def work(world: World) -> Tensor:
        model = make()
        optimizer = optimizer_for(model, case)
        replica = un.parallel(model, optimizer, "qadam(warmup=4, reducer=dense, overlap=True)", world=world)
        train(model, optimizer, world.rank, range(10), clip)
        ended = flat(replica.consolidate())
        replica.close()
        return ended

    results = run_threads(work, size)
    for result in results:
        assert torch.equal(result, results[0])
    torch.testing.assert_close(results[0], expected(case, size, 10, 4, clip=clip), rtol=TIGHT, atol=TIGHT)


@pytest.mark.parametrize("steps", [4, 5, 6])
def test_no_gradient_is_lost_at_the_switch(steps: int) -> None:
    """Before it, at it, after it: each step equals the reference, and would not without any one gradient."""

    def work(world: World) -> Tensor:
        model = make()
        optimizer = optimizer_for(model, "plain")
        un.parallel(model, optimizer, "qadam(warmup=4, reducer=dense)", world=world)
        train(model, optimizer, world.rank, range(steps))
        return flat(model)

    torch.testing.assert_close(run_threads(work, 2)[0], expected("plain", 2, steps, 4), rtol=TIGHT, atol=TIGHT)


@pytest.mark.parametrize("size", [2, 3])
def test_a_byte_a_number_stays_near_the_exact_mean_with_the_same_bits_on_every_rank(size: int) -> None:
    def work(world: World) -> tuple[Tensor, Tensor]:
        model = make()
        optimizer = optimizer_for(model, "decoupled weight decay")
        replica = un.parallel(model, optimizer, "qadam(warmup=4)", world=world)
        train(model, optimizer, world.rank, range(12))
        replica.close()
        return flat(model), torch.cat([optimizer.state[p]["exp_avg"].reshape(-1) for p in model.parameters()])

    results = run_threads(work, size)
    exact, start = expected("decoupled weight decay", size, 12, 4), flat(make())
    for model, momenta in results:
        assert torch.equal(model, results[0][0])
        assert torch.equal(momenta, results[0][1])
    moved, apart = (exact - start).norm(), (results[0][0] - exact).norm()
    assert 0 < apart < 0.05 * moved


def test_v_stays_and_the_optimizers_state_goes_on() -> None:
    def work(world: World) -> None:
        model = make()
        optimizer = optimizer_for(model, "plain")
        replica = un.parallel(model, optimizer, "qadam(warmup=3)", world=world)
        train(model, optimizer, world.rank, range(3))
        frozen = [optimizer.state[p]["exp_avg_sq"].clone() for p in model.parameters()]
        train(model, optimizer, world.rank, range(3, 8))
        for p, v in zip(model.parameters(), frozen, strict=True):
            assert torch.equal(optimizer.state[p]["exp_avg_sq"], v)
            assert optimizer.state[p]["step"] == 8
            assert p.grad is not None, "gradients stay for those who log them"
        assert replica.step == 8
        replica.close()

    run_threads(work, 2)


def test_accumulation_a_scheduler_and_a_closure() -> None:
    def work(world: World) -> Tensor:
        model = make()
        optimizer = optimizer_for(model, "plain")
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda t: 1.0)
        replica = un.parallel(model, optimizer, "qadam(warmup=2, reducer=dense, accumulate=2)", world=world)
        for t in range(6):

            def closure(t: int = t) -> None:
                optimizer.zero_grad()
                for _ in range(2):
                    (loss_of(model, batch(t, world.rank)) / 2).backward()

            if t % 2:
                optimizer.step(closure)
            else:
                closure()
                optimizer.step()
            scheduler.step()
        assert replica.step == 6
        replica.close()
        return flat(model)

    for result in run_threads(work, 2):
        torch.testing.assert_close(result, expected("plain", 2, 6, 2), rtol=TIGHT, atol=TIGHT)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("unscale", [False, True])
@pytest.mark.parametrize("at", [1, 4])
def test_an_overflow_on_one_rank_skips_the_step_on_all(fused: bool, unscale: bool, at: int) -> None:
    """A window more than the reference has, and the scale changes on the way."""

    def work(world: World) -> tuple[Tensor, float]:
        model = make()
        optimizer = optimizer_for(model, "weight decay in the gradient", fused=fused)
        replica = un.parallel(model, optimizer, f"qadam(warmup={4 if at == 1 else 3}, reducer=dense)", world=world)
        scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=100)
        replica.watch(scaler)
        batches = iter(range(7))
        for t in range(8):
            optimizer.zero_grad()
            overflow = t == at and world.rank == 1
            loss = loss_of(model, batch(0 if t == at else next(batches), world.rank))
            scaler.scale(loss * (float("inf") if overflow else 1.0)).backward()
            if unscale:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
        assert replica.step == 8
        scale = scaler.get_scale()
        replica.close()
        return flat(model), scale

    results = run_threads(work, 2)
    for model, scale in results:
        assert torch.equal(model, results[0][0])
        assert scale == 32.0
        torch.testing.assert_close(model, expected("weight decay in the gradient", 2, 7, 3), rtol=1e-9, atol=1e-9)


def test_bytes_are_a_quarter_after_the_warm_up() -> None:
    def work(world: World) -> tuple[int, int, int]:
        with MODELS:
            torch.manual_seed(0)
            model = nn.Linear(64, 256)
        optimizer = torch.optim.Adam(model.parameters())
        replica = un.parallel(model, optimizer, "qadam(warmup=2)", world=world)
        sent = []
        for _ in range(4):
            before = sum(r.bytes_sent for r in world.ledger.records if r.tag.startswith("gradients"))
            optimizer.zero_grad()
            model(torch.ones(2, 64)).square().mean().backward()
            optimizer.step()
            sent.append(sum(r.bytes_sent for r in world.ledger.records if r.tag.startswith("gradients")) - before)
        replica.close()
        d = 64 * 256 + 256
        assert sent[0] == sent[1] == math.ceil(2 * 3 / 4 * 4 * d)
        assert sent[2] == sent[3]
        return sent[0], sent[2], d

    dense, compressed, d = run_threads(work, 4)[0]
    assert 2 * 3 / 4 * d <= compressed < 1.01 * 2 * 3 / 4 * d
    assert 3.9 < dense / compressed <= 4.0


class Late(nn.Module):
    """The second way is used from step 5 on; of the first, two inputs are never seen before."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(5, 3), nn.Linear(5, 3)

    def forward(self, x: Tensor, t: int) -> Tensor:
        seen = x if t >= 5 else x * torch.tensor([1.0, 1, 1, 0, 0], dtype=x.dtype)
        return self.first(seen) + (self.second(x) if t >= 5 else 0)


def test_what_had_no_gradient_in_the_warm_up_does_not_leap() -> None:
    def work(world: World) -> Tensor:
        with MODELS:
            torch.manual_seed(0)
            model = Late().double()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        replica = un.parallel(model, optimizer, "qadam(warmup=3)", world=world)
        for t in range(20):
            before = flat(model)
            optimizer.zero_grad()
            x = batch(t, world.rank)
            (model(x, t) - x[:, :3]).square().mean().backward()
            optimizer.step()
            assert (flat(model) - before).abs().max() < 0.1, f"step {t}"
        assert len(replica.state_dict()["shared"]["frozen"]) == 4
        replica.close()
        return flat(model)

    a, b = run_threads(work, 2)
    assert torch.equal(a, b)


# State ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("at", [2, 3, 5])
@pytest.mark.parametrize("spec", ["qadam(warmup=3)", "qadam(warmup=3, reducer=topk(k=0.3))"])
def test_a_checkpoint_goes_on_bit_by_bit(at: int, spec: str, tmp_path: Path) -> None:
    def work(world: World) -> None:
        model = make()
        optimizer = optimizer_for(model, "each group's betas")
        replica = un.parallel(model, optimizer, spec, world=world)
        train(model, optimizer, world.rank, range(at))
        un.save(tmp_path, replica)
        train(model, optimizer, world.rank, range(at, 8))
        other = make()
        its = optimizer_for(other, "each group's betas")
        again = un.parallel(other, its, spec, world=world)
        un.load(tmp_path, again)
        train(other, its, world.rank, range(at, 8))
        assert torch.equal(flat(other), flat(model))
        replica.close()
        again.close()

    run_threads(work, 2)

    def another_size(world: World) -> Tensor:
        model = make()
        optimizer = optimizer_for(model, "each group's betas")
        replica = un.parallel(model, optimizer, spec, world=world)
        un.load(tmp_path, replica)
        assert replica.step == at
        train(model, optimizer, world.rank, range(at, 8))
        replica.close()
        return flat(model)

    results = run_threads(another_size, 3)
    assert all(torch.equal(result, results[0]) for result in results)
    assert torch.isfinite(results[0]).all()


@pytest.mark.parametrize("new", [True, False])
def test_4_ranks_become_3_and_4_again(new: bool) -> None:
    spec = "qadam(warmup=2, reducer=dense)"

    def work(world: World) -> tuple[Tensor, int, str]:
        model = make()
        optimizer = optimizer_for(model, "plain")
        replica = un.parallel(model, optimizer, spec, world=world)
        train(model, optimizer, world.rank, range(3))
        three = world.split([[0, 1, 2], [3]])
        if world.rank < 3:
            replica.rebind(three)
            train(model, optimizer, world.rank, range(3, 5))
        elif new:
            replica.close()
            model = make()
            optimizer = optimizer_for(model, "plain")
            replica = un.parallel(model, optimizer, spec, world=World())
        told = replica.rebind(world.split([[0, 1, 2, 3]]), source=0)
        train(model, optimizer, world.rank, range(5, 8))
        replica.close()
        return flat(model), replica.step, told

    results = run_threads(work, 4)
    for model, step, told in results:
        assert torch.equal(model, results[0][0])
        assert step == 8
        assert "frozen v" in told


def test_a_switch_from_allreduce_freezes_what_adam_had() -> None:
    def work(world: World) -> tuple[Tensor, list[Tensor]]:
        model = make()
        optimizer = optimizer_for(model, "plain")
        replica = un.parallel(model, optimizer, "allreduce", world=world)
        train(model, optimizer, world.rank, range(4))
        replica = replica.switch("qadam(warmup=3, reducer=dense)")
        train(model, optimizer, world.rank, range(4, 8))
        replica.close()
        return flat(model)

    for result in run_threads(work, 2):
        torch.testing.assert_close(result, expected("plain", 2, 8, 4), rtol=TIGHT, atol=TIGHT)


# Settings ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("optimizer_of", "spec", "reason"),
    [
        (lambda p: torch.optim.SGD(p, lr=0.1), "qadam", "got SGD"),
        (lambda p: torch.optim.NAdam(p), "qadam", "got NAdam"),
        (lambda p: torch.optim.Adam(p, amsgrad=True), "qadam", "amsgrad"),
        (lambda p: torch.optim.Adam(p), "qadam(warmup=0)", "warmup"),
        (lambda p: torch.optim.Adam(p), "qadam(accumulate=0)", "accumulate"),
        (lambda p: torch.optim.Adam(p), "qadam(bucket_bytes=0)", "bucket_bytes"),
    ],
)
@pytest.mark.parametrize("size", [1, 2])
def test_impossible_settings_are_refused(optimizer_of: Callable[..., Any], spec: str, reason: str, size: int) -> None:
    def work(world: World) -> None:
        model = make()
        with pytest.raises((ValueError, TypeError), match=reason):
            un.parallel(model, optimizer_of(model.parameters()), spec, world=world)
        un.parallel(model, torch.optim.Adam(model.parameters()), "qadam", world=world).close()

    run_threads(work, size)


def test_a_sparse_embedding_is_refused() -> None:
    model = nn.Embedding(4, 2, sparse=True)
    with pytest.raises(ValueError, match="sparse"):
        un.parallel(model, torch.optim.Adam(model.parameters()), "qadam", world=World())


def test_after_close_the_optimizer_is_adam_again() -> None:
    model = make()
    optimizer = optimizer_for(model, "plain")
    replica = un.parallel(model, optimizer, "qadam(warmup=1)", world=World())
    train(model, optimizer, 0, range(3))
    replica.close()
    twin = copy.deepcopy(model)
    its = optimizer_for(twin, "plain")
    its.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    train(model, optimizer, 0, range(3, 5))
    train(twin, its, 0, range(3, 5))
    assert torch.equal(flat(model), flat(twin))


def test_v_is_updated_at_intervals_that_double_and_stands_still_between() -> None:
    """0/1 Adam's schedule, against Adam with its v updated by hand in the same windows."""
    windows, warmup, refresh, lr, eps = 14, 2, 2, 0.01, 1e-8
    updated = [2, 3, 4, 6, 8, 12]  # two in every window, two in every second, ...

    def gradients(window: int, rank: int) -> Tensor:
        return torch.randn(4, 3, generator=torch.Generator().manual_seed(10 * window + rank), dtype=torch.float64)

    def work(world: World) -> Tensor:
        model = nn.Linear(3, 4, bias=False).double()
        nn.init.zeros_(model.weight)
        optimizer = torch.optim.Adam(model.parameters(), lr=lr, eps=eps)
        spec = f"qadam(warmup={warmup}, refresh={refresh}, reducer=dense)"
        replica = un.parallel(model, optimizer, spec, world=world)
        for window in range(windows):
            optimizer.zero_grad()
            (model.weight * gradients(window, world.rank)).sum().backward()
            optimizer.step()
        replica.close()
        return model.weight.detach().clone()

    x, m, v = (torch.zeros(4, 3, dtype=torch.float64) for _ in range(3))
    times = 0
    for window in range(windows):
        g = (gradients(window, 0) + gradients(window, 1)) / 2
        m = 0.9 * m + 0.1 * g
        if window < warmup or window in updated:
            v = 0.999 * v + 0.001 * g * g
            times += 1
        x = x - lr * (m / (1 - 0.9 ** (window + 1))) / ((v / (1 - 0.999**times)).sqrt() + eps)
    for found in un.run_threads(work, 2):
        torch.testing.assert_close(found, x, rtol=1e-9, atol=1e-12)
