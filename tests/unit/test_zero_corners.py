"""ZeRO where models and loops are unusual, in worlds of threads, against plain PyTorch in one process, in fp64."""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from test_zero import MODELS, adam, assert_same, loss_of, text, train, words
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import unisono as un
from unisono.world import World
from unisono.world.virtual import run_threads

N = 6
SPECS = ["zero(stage=1)", "zero(stage=2, unit_bytes=300)", "zero(stage=3, unit_bytes=300)"]
AWAY = ["zero(stage=2, optimizer_on=cpu, unit_bytes=300)", "zero(stage=3, optimizer_on=cpu, unit_bytes=300)"]
everywhere = pytest.mark.parametrize("spec", [*SPECS, *AWAY])
here = pytest.mark.parametrize("spec", SPECS)


@dataclass
class Answer:
    value: Tensor


class Wrapped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(N, N)

    def forward(self, x: Tensor) -> Any:
        return Answer(self.inner(x))


class Odd(nn.Module):
    """Outputs in a dataclass, a view of a parameter as output, a parameter used both detached and not, attention."""

    def __init__(self) -> None:
        super().__init__()
        self.first = Wrapped()
        self.table = Table()
        self.scale = Scale()
        self.attend = nn.MultiheadAttention(N, 2, batch_first=True, bias=False)
        self.extra = nn.ParameterList([nn.Parameter(torch.ones(N)), nn.Parameter(torch.full((N,), 0.5))])

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x).value + self.table(x)
        y = self.scale(y) * self.extra[0] + self.extra[1]
        return self.attend(y, y, y, need_weights=False)[0]


class Table(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(10, N))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight[: x.shape[1]]


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(N, N))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight.detach() + x.detach() @ self.weight


def made(kind: Callable[[], nn.Module]) -> nn.Module:
    with MODELS:
        torch.manual_seed(0)
        return kind().double()


def batch(step: int, rank: int) -> Tensor:
    return torch.randn(2, 4, N, generator=torch.Generator().manual_seed(10 * step + rank), dtype=torch.float64)


def fit(model: nn.Module, optimizer: Any, ranks: list[int], steps: range) -> None:
    for t in steps:
        optimizer.zero_grad()
        model(torch.cat([batch(t, r) for r in ranks])).square().mean().backward()
        optimizer.step()


@everywhere
def test_unusual_modules_train_as_in_one_process(spec: str) -> None:
    def work(world: World) -> dict[str, Tensor]:
        model = made(Odd)
        optimizer = adam(model)
        un.parallel(model, optimizer, spec, world=world)
        fit(model, optimizer, [world.rank], range(4))
        return dict(model.state_dict())

    plain = made(Odd)
    fit(plain, adam(plain), [0, 1], range(4))
    for found in run_threads(work, 2):
        assert_same(found, dict(plain.state_dict()))


@here
def test_a_parameter_that_no_rank_used_in_a_window_of_several_passes_stays(spec: str) -> None:
    class Half(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused = nn.Linear(N, N), nn.Linear(N, N)

        def forward(self, x: Tensor) -> Tensor:
            return self.used(x)

    def work(world: World) -> None:
        model = made(Half)
        before = {name: value.clone() for name, value in model.state_dict().items()}
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.5)
        un.parallel(model, optimizer, spec, world=world, accumulate=2)
        for t in range(4):
            model(batch(t, world.rank)).square().mean().backward()
            if t % 2:
                optimizer.step()
                optimizer.zero_grad()
        for name, value in model.state_dict().items():
            assert torch.equal(value, before[name]) == name.startswith("unused")

    run_threads(work, 2)


@here
def test_norms_follow_what_a_scaler_does_to_the_gradients(spec: str) -> None:
    def work(world: World) -> None:
        model = made(lambda: nn.Sequential(nn.Linear(N, N), nn.Linear(N, 1)))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        un.parallel(model, optimizer, spec, world=world)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        scaler.scale(model(batch(0, world.rank)).square().mean()).backward()
        gradient = next(model.parameters()).grad
        assert gradient is not None
        scaled = gradient.norm()
        scaler.unscale_(optimizer)
        torch.testing.assert_close(gradient.norm() * 8, scaled)

    run_threads(work, 2)


@pytest.mark.parametrize("spec", [*SPECS, AWAY[0]])
@pytest.mark.parametrize("how", ["one gradient is taken away", "the model's gradients are cleared"])
def test_gradients_taken_away_before_the_step_are_not_stepped(spec: str, how: str) -> None:
    def loop(model: nn.Module, optimizer: Any, ranks: list[int]) -> None:
        for t in range(3):
            optimizer.zero_grad()
            model(torch.cat([batch(t, r) for r in ranks])).square().mean().backward()
            if t == 1 and how.startswith("one"):
                model[0].weight.grad = None  # type: ignore[index, union-attr]
            elif t == 1:
                model.zero_grad()
            optimizer.step()

    def kind() -> nn.Module:
        return nn.Sequential(nn.Linear(N, N), nn.Linear(N, 1))

    def work(world: World) -> dict[str, Tensor]:
        model = made(kind)
        optimizer = adam(model)
        un.parallel(model, optimizer, spec, world=world)
        loop(model, optimizer, [world.rank])
        return dict(model.state_dict())

    plain = made(kind)
    loop(plain, adam(plain), [0, 1])
    for found in run_threads(work, 2):
        assert_same(found, dict(plain.state_dict()))


@here
def test_a_scaler_works_on_a_rank_without_any_element(spec: str) -> None:
    def work(world: World) -> list[float]:
        model = made(lambda: nn.Linear(N, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        un.parallel(model, optimizer, spec, world=world)
        scaler, scales = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=100), []
        for t in range(3):
            optimizer.zero_grad()
            x = batch(t, world.rank) * (float("inf") if t == 1 and world.rank == 1 else 1.0)
            scaler.scale(model(x).square().mean()).backward()
            scaler.step(optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
        assert all(torch.isfinite(x).all() for x in model.state_dict().values())
        return scales

    assert run_threads(work, 3) == [[64.0, 32.0, 32.0]] * 3


@here
def test_values_can_be_clipped_too(spec: str) -> None:
    def work(world: World) -> Tensor:
        model = made(lambda: nn.Linear(N, 1, bias=False))
        un.parallel(model, torch.optim.SGD(model.parameters(), lr=0.1), spec, world=world)
        model(batch(0, world.rank)).square().mean().backward()
        nn.utils.clip_grad_value_(model.parameters(), 0.1)
        gradient: Any = next(model.parameters()).grad
        return gradient.full()

    plain = made(lambda: nn.Linear(N, 1, bias=False))
    plain(torch.cat([batch(0, r) for r in range(2)])).square().mean().backward()
    nn.utils.clip_grad_value_(plain.parameters(), 0.1)
    for found in run_threads(work, 2):
        torch.testing.assert_close(found, next(plain.parameters()).grad)


@pytest.mark.parametrize("stage", [2, 3])
def test_re_entrant_checkpointing_is_refused_with_the_way_out(stage: int) -> None:
    class Again(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(N, N), nn.Linear(N, N)

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.b, self.a(x), use_reentrant=True)

    def work(world: World) -> None:
        model = made(Again)
        un.parallel(model, adam(model), f"zero(stage={stage})", world=world)
        with pytest.raises(RuntimeError, match="use_reentrant=False"):
            model(batch(0, world.rank)).sum().backward()

    run_threads(work, 2)


class Fails(torch.autograd.Function):
    """Passes values on; its backward pass raises, if told so."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, fails: bool) -> Tensor:  # type: ignore[override]
        ctx.fails = fails
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        if ctx.fails:
            raise ZeroDivisionError
        return grad, None


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("stage", [1, 2])
def test_a_backward_pass_that_failed_leaves_nothing_in_the_next(stage: int, first: int) -> None:
    """Once cleared; else it is refused, as some units are reduced by then and others are not."""

    def run(model: Any, optimizer: Any, ranks: list[int], *, clears: bool = True) -> list[Tensor]:
        for t in range(4):
            if clears:
                optimizer.zero_grad()
            hidden = Fails.apply(model[0](torch.cat([batch(t, rank) for rank in ranks])), t == first)
            try:
                model[2](model[1](hidden)).square().mean().backward()
            except ZeroDivisionError:
                continue
            optimizer.step()
        return [p.detach().clone() for p in model.parameters()]

    def start() -> tuple[Any, Any]:
        model = made(lambda: nn.Sequential(nn.Linear(N, N), nn.Linear(N, N), nn.Linear(N, 2)))
        return model, torch.optim.SGD(model.parameters(), lr=0.1)

    def work(world: World) -> list[Tensor]:
        model, optimizer = start()
        replica = un.parallel(model, optimizer, f"zero(stage={stage})", world=world)
        with pytest.raises(RuntimeError, match=r"failed half-way.*call optimizer.zero_grad\(\)"):
            run(model, optimizer, [world.rank], clears=False)
        world.barrier()
        replica.close()
        model, optimizer = start()
        un.parallel(model, optimizer, f"zero(stage={stage})", world=world)
        found = run(model, optimizer, [world.rank])
        world.barrier()
        return found

    model, optimizer = start()
    alone = run(model, optimizer, [0, 1])
    for found in run_threads(work, 2):
        torch.testing.assert_close(found, alone, rtol=1e-5, atol=1e-6)


def test_saving_takes_a_delayed_update_over_on_every_rank(tmp_path: Path) -> None:
    spec = "zero(stage=2, optimizer_on=cpu, delayed_update=True, delay_after=0, unit_bytes=1500)"

    def work(world: World) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        model = text()
        optimizer = adam(model)
        replica = un.parallel(model, optimizer, spec, world=world)
        train(model, optimizer, lambda t: words(t, world.rank), range(3))
        with torch.no_grad():
            loss_of(model, words(9, 0))  # by now all values have arrived, but for those that are delayed
        un.save(tmp_path, replica)
        now = {name: value.clone() for name, value in model.state_dict().items()}
        train(model, optimizer, lambda t: words(t, world.rank), range(3, 5))
        un.save(tmp_path / "after", replica)
        return now, dict(model.state_dict())

    def resumed(world: World) -> dict[str, Tensor]:
        model = text()
        optimizer = adam(model)
        replica = un.parallel(model, optimizer, spec, world=world)
        un.load(tmp_path, replica)
        train(model, optimizer, lambda t: words(t, world.rank), range(3, 5))
        un.save(tmp_path / "again", replica)
        return dict(model.state_dict())

    (first, end), (second, other) = run_threads(work, 2)
    assert_same(first, second, 0.0)
    assert_same(end, other, 0.0)
    for found in run_threads(resumed, 2):
        assert_same(found, end, 0.0)


def test_parameters_that_learn_outside_the_optimizer_are_refused_off_the_device() -> None:
    model = nn.Sequential(nn.Linear(N, N), nn.Linear(N, N))
    optimizer = torch.optim.AdamW(model[0].parameters())
    with pytest.raises(ValueError, match=r"2 parameter\(s\) learn .* '1\.weight'"):
        un.parallel(model, optimizer, "zero(optimizer_on=cpu)", world=World())


# A model that is pickled -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", [SPECS[-1], *AWAY, "zero(stage=2, precision=bf16)"])
def test_pickling_the_model_is_refused_and_what_the_error_says_works(spec: str, tmp_path: Path) -> None:
    def work(world: World) -> None:
        model = text()
        optimizer = adam(model)
        replica = un.parallel(model, optimizer, spec, world=world)
        loss_of(model, words(0, world.rank)).backward()
        optimizer.step()
        for call in (lambda: torch.save(model, io.BytesIO()), lambda: pickle.dumps(nn.Sequential(model))):
            with pytest.raises(TypeError, match=r"under `zero` to pickle.* Save with un\.save\(folder, replica\), or"):
                call()
        un.save(tmp_path / "saved", replica)
        state = model.state_dict()
        torch.save(state, io.BytesIO())
        replica.restore()
        replica.close()
        found = pickle.loads(pickle.dumps(model)).state_dict()
        assert_same({name: x.to(state[name].dtype) for name, x in found.items()}, dict(state))

    run_threads(work, 2)
