"""0/1 Adam against the paper's algorithm in plain PyTorch, in fp64, all workers in one process."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import unisono as un
from unisono.methods.spec import build
from unisono.world import World
from unisono.world.virtual import run_threads

MODELS = threading.Lock()
SPEC = "zero_one_adam(warmup=2, refresh=1, start=5, double=2, every=4{})"
UPDATES = [0, 1, 2, 3]  # windows in which v is updated, from 0: the warm-up, then one at each interval of 1, 2, ...
MEETINGS = [7, 9, 13, 17]  # after 5: twice after every second window, and then after every fourth
EACH, INPUTS, OUTPUTS = 64, 40, 12  # shares of a line start at multiples of EACH
B1, B2, EPS = 0.9, 0.999, 1e-8
Mean = Callable[[list[Tensor]], Tensor]


def make() -> nn.Linear:
    with MODELS:
        torch.manual_seed(0)
        return nn.Linear(INPUTS, OUTPUTS, bias=False).double()


def batch(window: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * window + rank)
    return torch.randn(6, INPUTS, generator=generator, dtype=torch.float64)


def loss_of(weight: Tensor, x: Tensor) -> Tensor:
    return (nn.functional.linear(x, weight) - x[:, :OUTPUTS].square()).square().mean()


def rate_at(window: int) -> float:
    return 0.01 * (0.5 if window >= 11 else 1.0)


def train(model: nn.Linear, optimizer: Any, rank: int, windows: range) -> None:
    for window in windows:
        for group in optimizer.param_groups:
            group["lr"] = rate_at(window)
        optimizer.zero_grad()
        loss_of(model.weight, batch(window, rank)).backward()
        optimizer.step()


def adam(model: nn.Module, decay: float = 0.0, **more: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=decay, **more)


class OneBit:
    """The paper's 1-bit all-reduce: signs and a mean size, with what they leave out kept by every worker, and once
    more by the server of each share. Sizes travel as 4 bytes."""

    def __init__(self, size: int) -> None:
        self.workers = [torch.zeros(OUTPUTS * INPUTS, dtype=torch.float64) for _ in range(size)]
        self.servers = torch.zeros(OUTPUTS * INPUTS, dtype=torch.float64)
        self.share = -(-OUTPUTS * INPUTS // (size * EACH)) * EACH

    @staticmethod
    def compress(x: Tensor) -> Tensor:
        size = x.abs().mean().float().double()
        return torch.where(x < 0, -size, size)

    def __call__(self, given: list[Tensor]) -> Tensor:
        sent = []
        for i, x in enumerate(given):
            p = x.reshape(-1) + self.workers[i]
            sent.append(self.compress(p))
            self.workers[i] = p - sent[i]
        p = torch.stack(sent).mean(0) + self.servers
        out = torch.cat([self.compress(part) for part in p.split(self.share)])
        self.servers = p - out
        return out.view_as(given[0])

    def times(self, factor: float) -> None:
        self.workers = [x * factor for x in self.workers]
        self.servers = self.servers * factor


def exact(given: list[Tensor]) -> Tensor:
    return torch.stack(given).mean(0)


def reference(size: int, windows: int, mean: Mean, decay: float = 0.0, skips: tuple[int, int] = (-1, -1)) -> Tensor:
    """The mean of the workers' models. `skips`: a rank whose step is left out in a window (from 0). Alone, there is
    nobody to meet."""
    x = [make().weight.detach().clone() for _ in range(size)]
    m = [torch.zeros_like(x[0]) for _ in range(size)]
    v, updates, local = torch.zeros_like(x[0]), 0, [0] * size
    anchor, u = x[0].clone(), [torch.zeros_like(x[0]) for _ in range(size)]
    rates, kept = [0.0] * size, [1.0] * size
    for t in range(windows):
        grads = []
        for i in range(size):
            weight = x[i].clone().requires_grad_()
            loss_of(weight, batch(t, i)).backward()
            assert weight.grad is not None
            grads.append(weight.grad)
        lr = rate_at(t)
        shrunk = 1 - lr * decay
        if t < 5:
            if t in UPDATES:
                g = exact(grads)
                together, v, updates = B1 * m[0] + (1 - B1) * g, B2 * v + (1 - B2) * g * g, updates + 1
            else:
                together = mean([B1 * m[i] + (1 - B1) * grads[i] for i in range(size)])
            d = (v / (1 - B2**updates)).sqrt() + EPS
            gamma = lr / (1 - B1 ** (t + 1))
            m = [together.clone() for _ in range(size)]
            x = [shrunk * one - gamma * together / d for one in x]
            if t == 4:
                anchor = x[0].clone()
                if isinstance(mean, OneBit):  # from here on it keeps sums of momenta, with their rates
                    mean.times(gamma)
            continue
        for i in range(size):
            if skips == (i, t):
                continue
            local[i] += 1
            gamma = lr / (1 - B1 ** (5 + local[i]))
            m[i] = B1 * m[i] + (1 - B1) * grads[i]
            x[i] = shrunk * x[i] - gamma * m[i] / d
            u[i] = shrunk * u[i] + gamma * m[i]
            rates[i], kept[i] = shrunk * rates[i] + gamma, shrunk * kept[i]
        if t + 1 in MEETINGS and size > 1:
            total = mean(u)
            anchor = sum(kept) / size * anchor - total / d
            m = [total / (sum(rates) / size) for _ in range(size)]
            x = [anchor.clone() for _ in range(size)]
            u = [torch.zeros_like(one) for one in u]
            rates, kept = [0.0] * size, [1.0] * size
    return exact(x)


def ended(size: int, windows: int, more: str, decay: float = 0.0, **options: Any) -> list[Tensor]:
    def work(world: World) -> Tensor:
        model = make()
        optimizer = adam(model, decay, **options)
        replica = un.parallel(model, optimizer, SPEC.format(more), world=world)
        train(model, optimizer, world.rank, range(windows))
        found = replica.consolidate().weight.detach().clone()  # type: ignore[union-attr]
        replica.close()
        return found

    return run_threads(work, size)


def test_the_schedule() -> None:
    built: Any = build(SPEC.format(""), kind="strategy")
    assert [window for window in range(20) if built.meets(window)] == MEETINGS
    at_once: Any = build("zero_one_adam(warmup=1, start=3, every=1)", kind="strategy")
    assert [window for window in range(7) if at_once.meets(window)] == [4, 5, 6]


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("windows", [5, 6, 8, 19])
def test_exact_means_equal_the_paper(size: int, windows: int) -> None:
    for found in ended(size, windows, ", reducer=dense", decay=0.5):
        torch.testing.assert_close(found, reference(size, windows, exact, 0.5), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("fused", [False, True])
def test_signs_with_feedback_on_both_ways_equal_the_paper(size: int, fused: bool) -> None:
    for found in ended(size, 19, "", decay=0.1, fused=fused):
        torch.testing.assert_close(found, reference(size, 19, OneBit(size), 0.1), rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("spec", [SPEC.format(""), SPEC.format("").replace("warmup=2", "warmup=5")])
def test_after_a_meeting_ranks_have_one_model_and_one_momentum_and_v_stands_still(spec: str) -> None:
    def work(world: World) -> list[Tensor]:
        model = make()
        optimizer = adam(model)
        un.parallel(model, optimizer, spec, world=world)
        train(model, optimizer, world.rank, range(5))
        state = optimizer.state[model.weight]
        frozen = state["exp_avg_sq"].clone()
        train(model, optimizer, world.rank, range(5, 8))
        apart = model.weight.detach().clone()
        train(model, optimizer, world.rank, range(8, 9))
        assert torch.equal(state["exp_avg_sq"], frozen)
        return [apart, model.weight.detach(), state["exp_avg"], frozen]

    a, b = run_threads(work, 2)
    assert not torch.equal(a[0], b[0])
    assert all(map(torch.equal, a[1:], b[1:]))


@pytest.mark.parametrize("resumed", [False, True])
def test_a_step_that_one_rank_skips_counts_on_the_others(resumed: bool, tmp_path: Path) -> None:
    def started(world: World) -> tuple[nn.Linear, Any, un.Replica]:
        model = make()
        optimizer = adam(model, 0.5)
        return model, optimizer, un.parallel(model, optimizer, SPEC.format(", reducer=dense"), world=world)

    def work(world: World) -> Tensor:
        model, optimizer, replica = started(world)
        scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=100)
        replica.watch(scaler)
        for window in range(11):
            if resumed and window == 8:
                un.save(tmp_path, replica)
                replica.close()
                model, optimizer, replica = started(world)
                un.load(tmp_path, replica)
                replica.watch(scaler)
            optimizer.zero_grad()
            overflow = float("inf") if (world.rank, window) == (1, 7) else 1.0
            scaler.scale(loss_of(model.weight, batch(window, world.rank)) * overflow).backward()
            scaler.step(optimizer)
            scaler.update()
        found = replica.consolidate().weight.detach().clone()  # type: ignore[union-attr]
        assert scaler.get_scale() == (32.0 if world.rank == 1 else 64.0)
        replica.close()
        return found

    expected = reference(2, 11, exact, 0.5, skips=(1, 7))
    for found in run_threads(work, 2):
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("size", [2, 4])
def test_local_windows_send_nothing_and_meetings_a_bit_a_number(size: int) -> None:
    d = 256 * 1024

    def work(world: World) -> list[int]:
        with MODELS:
            model = nn.Linear(1024, 256, bias=False)
        optimizer = adam(model)
        replica, sent = un.parallel(model, optimizer, "zero_one_adam(warmup=1, start=1, every=4)", world=world), []
        for _ in range(7):
            before = sum(r.bytes_sent for r in world.ledger.records)
            optimizer.zero_grad()
            model(torch.ones(2, 1024)).square().mean().backward()
            optimizer.step()
            sent.append(sum(r.bytes_sent for r in world.ledger.records) - before)
        replica.close()
        return sent

    for sent in run_threads(work, size):
        assert [sent[i] for i in (1, 3, 5)] == [0, 0, 0], "windows of local steps"
        for meeting in (sent[2], sent[4], sent[6]):
            assert meeting == pytest.approx(2 * (size - 1) / size * d / 8, rel=0.01)


@pytest.mark.parametrize("at", [2, 5, 8, 12])
@pytest.mark.parametrize("more", ["", ", reducer=topk(k=0.3)"])
def test_a_checkpoint_goes_on_bit_by_bit_in_its_phase(at: int, more: str, tmp_path: Path) -> None:
    def work(world: World) -> None:
        model = make()
        optimizer = adam(model, 0.1)
        replica = un.parallel(model, optimizer, SPEC.format(more), world=world)
        train(model, optimizer, world.rank, range(at))
        un.save(tmp_path, replica)
        train(model, optimizer, world.rank, range(at, 19))
        other = make()
        its = adam(other, 0.1)
        again = un.parallel(other, its, SPEC.format(more), world=world)
        train(other, its, world.rank, range(7))  # in another phase for some
        un.load(tmp_path, again)
        assert again.step == at
        train(other, its, world.rank, range(at, 19))
        assert torch.equal(other.weight, model.weight)
        replica.close()
        again.close()

    run_threads(work, 2)

    def another_size(world: World) -> Tensor:
        model = make()
        optimizer = adam(model, 0.1)
        replica = un.parallel(model, optimizer, SPEC.format(more), world=world)
        un.load(tmp_path, replica)
        train(model, optimizer, world.rank, range(at, 17))  # to a meeting
        replica.close()
        return model.weight.detach()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it says what became a mean
        a, b, c = run_threads(another_size, 3)
    assert torch.equal(a, b)
    assert torch.equal(a, c)
    assert a.isfinite().all()


@pytest.mark.parametrize("at", [3, 8, 11])
def test_a_rank_is_lost_and_another_comes_in_each_phase(at: int) -> None:
    """3 ranks, then 2, then 3 again, one of them new: exact means go on as those of the ranks that are there."""
    spec = SPEC.format(", reducer=dense")

    def work(world: World) -> tuple[Tensor, int]:
        model = make()
        optimizer = adam(model)
        replica = un.parallel(model, optimizer, spec, world=world)
        train(model, optimizer, world.rank, range(at))
        two = world.split([[0, 1], [2]])
        if world.rank < 2:
            replica.rebind(two)
            train(model, optimizer, world.rank, range(at, at + 4))
        else:
            replica.close()
            model = make()
            optimizer = adam(model)
            replica = un.parallel(model, optimizer, spec, world=World())
        replica.rebind(world.split([[0, 1, 2]]), source=0)
        train(model, optimizer, world.rank, range(at + 4, 17))
        replica.close()
        return model.weight.detach(), replica.step

    results = run_threads(work, 3)
    start = loss_of(make().weight, batch(50, 0)).item()
    for weight, step in results:
        assert torch.equal(weight, results[0][0])
        assert step == 17
        assert loss_of(weight, batch(50, 0)).item() < start


@pytest.mark.parametrize("to", ["allreduce", "zero_one_adam(warmup=1, start=1)", "local_sgd(reducer=topk(k=0.1))"])
def test_what_was_kept_back_is_not_lost_in_a_switch(to: str) -> None:
    """Under exact means the next model is the mean of all models less the mean of what was kept, once that is sent."""

    def work(world: World) -> tuple[Tensor, Tensor]:
        model = make()
        optimizer = adam(model)
        replica = un.parallel(model, optimizer, SPEC.format(""), world=world)
        train(model, optimizer, world.rank, range(7))  # to a meeting
        unsent = replica.unsent()
        assert unsent is not None
        assert unsent.unit == "parameters"
        kept = unsent.total("weight")
        assert kept is not None
        expected = model.weight.detach() - world.all_reduce(kept.clone(), "mean").wait()
        replica = replica.switch(to)
        left = replica.unsent()
        kept = left.total("weight") if left is not None and left.unit == "parameters" else None
        rest = torch.zeros_like(expected) if kept is None else world.all_reduce(kept.clone(), "mean").wait()
        found = model.weight.detach() - rest
        replica.close()
        return found, expected

    for found, expected in run_threads(work, 2):
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        ("zero_one_adam(warmup=9, start=8)", "before warmup=9 is over"),
        ("zero_one_adam(every=0)", "every"),
        ("zero_one_adam(double=0)", "double"),
        ("zero_one_adam(reducer=onebit(shares=True, feedback=False))", "feedback"),
    ],
)
def test_impossible_settings_are_refused(spec: str, reason: str) -> None:
    model = make()
    with pytest.raises(ValueError, match=reason):
        un.parallel(model, adam(model), spec, world=World())
    with pytest.raises(TypeError, match=r"zero_one_adam takes over the step of torch\.optim\.Adam or AdamW, got SGD"):
        un.parallel(model, torch.optim.SGD(model.parameters(), lr=0.1), "zero_one_adam", world=World())


def test_alone_it_is_adam_with_a_frozen_v() -> None:
    [found] = ended(1, 19, "", decay=0.1)
    torch.testing.assert_close(found, reference(1, 19, exact, 0.1), rtol=1e-10, atol=1e-12)
