"""Several optimizers of one model under every strategy, against plain PyTorch in one process, in fp64."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import unisono as un
from pairs import cover_pairs
from unisono.methods.joined_optimizers import JoinedOptimizers
from unisono.world import World
from unisono.world.virtual import run_threads

MODELS = threading.Lock()  # torch.manual_seed is the process's
EXACT = ["allreduce", "shared", "zero(stage=1)", "zero(stage=2, unit_bytes=200)", "zero(stage=3)", "zero(spare=True)"]
AWAY = ["zero(stage=2, optimizer_on=cpu)", "zero(stage=3, optimizer_on=cpu, params_on=cpu)"]
Optimizers = list[torch.optim.Optimizer]
alike = pytest.mark.filterwarnings("ignore:the ranks train on the same samples")
exact = pytest.mark.parametrize("spec", EXACT)


def make_model() -> nn.Module:
    with MODELS:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 6), nn.LayerNorm(6), nn.Linear(6, 3)).double()


def make_optimizers(model: nn.Module) -> Optimizers:
    matrices = [p for p in model.parameters() if p.dim() == 2]
    rest = [p for p in model.parameters() if p.dim() != 2]
    return [torch.optim.SGD(matrices, lr=0.1, momentum=0.9), torch.optim.AdamW(rest, lr=0.02)]


def batch(step: int, rank: int) -> Tensor:
    return torch.randn(4, 5, generator=torch.Generator().manual_seed(100 * step + rank), dtype=torch.float64)


def values(model: nn.Module) -> list[Tensor]:
    return [x.detach().clone() for x in model.state_dict().values()]


def mean_loss(model: nn.Module, step: int, size: int) -> Tensor:
    """Of all ranks' batches, in one process."""
    return torch.stack([model(batch(step, rank)).square().mean() for rank in range(size)]).mean()


Backward = Callable[[int], None]  # of a step's batches
Program = Callable[[nn.Module, Optimizers, Backward], None]


def in_turn(model: nn.Module, optimizers: Optimizers, backward: Backward) -> None:
    for t in range(4):
        for optimizer in optimizers:
            optimizer.zero_grad()
        backward(t)
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        for optimizer in optimizers if t % 2 else reversed(optimizers):
            optimizer.step()


def one_less_often(model: nn.Module, optimizers: Optimizers, backward: Backward) -> None:
    """The second steps every other time, with the gradients of two windows."""
    first, second = optimizers
    for t in range(5):
        backward(t)
        first.step()
        first.zero_grad()
        if t % 2:
            second.step()
            second.zero_grad()


def clipped_by_themselves(model: nn.Module, optimizers: Optimizers, backward: Backward) -> None:
    for t in range(3):
        backward(t)
        for optimizer in optimizers:
            nn.utils.clip_grad_norm_([p for g in optimizer.param_groups for p in g["params"]], 0.1)
            optimizer.step()
            optimizer.zero_grad()


def with_closures(model: nn.Module, optimizers: Optimizers, backward: Backward) -> None:
    for t in range(3):
        for i, optimizer in enumerate(optimizers):

            def closure(t: int = t, i: int = i) -> Tensor:
                model.zero_grad()
                backward(2 * t + i)
                return torch.zeros(())

            optimizer.step(closure)


def with_schedules(model: nn.Module, optimizers: Optimizers, backward: Backward) -> None:
    schedules = [torch.optim.lr_scheduler.StepLR(one, 1 + i, gamma=0.5) for i, one in enumerate(optimizers)]
    for t in range(4):
        model.zero_grad()
        backward(t)
        for optimizer, schedule in zip(optimizers, schedules, strict=True):
            optimizer.step()
            schedule.step()


def made_zero(model: nn.Module, optimizers: Optimizers, backward: Backward) -> None:
    """An optimizer steps with a gradient of zeros that no pass adds to: its momentum goes on."""
    for t in range(4):
        for optimizer in optimizers:
            optimizer.zero_grad(set_to_none=False)
        model[0].requires_grad_(t % 2 == 0)
        backward(t)
        for optimizer in optimizers:
            optimizer.step()


def replaced(model: nn.Module, optimizers: Optimizers, backward: Backward) -> None:
    for t in range(4):
        model.zero_grad()
        backward(t)
        for p in model.parameters():
            p.grad = p.grad * 0.5 + 0.01
        for optimizer in optimizers:
            optimizer.step()


PROGRAMS: list[Program] = [
    *(in_turn, one_less_often, clipped_by_themselves, with_closures, with_schedules, made_zero, replaced),
]


def can(spec: str, program: Program, size: int) -> bool:
    """Off the device a step needs a window of its own: gradients that have left cannot be added to. Those that are
    split cannot be replaced."""
    if program is replaced and "zero" in spec:
        return False
    return spec not in AWAY or program not in (one_less_often, with_closures)


def train_alone(program: Program, size: int) -> list[Tensor]:
    model = make_model()
    program(model, make_optimizers(model), lambda t: mean_loss(model, t, size).backward())
    return values(model)


def train_together(program: Program, spec: str, size: int) -> list[tuple[list[Tensor], int]]:
    def worker(world: World) -> tuple[list[Tensor], int]:
        model = make_model()
        optimizers = make_optimizers(model)
        replica = un.parallel(model, optimizers, spec, world=world)
        program(model, optimizers, lambda t: model(batch(t, world.rank)).square().mean().backward())
        return values(model), replica.step

    return run_threads(worker, size)


@pytest.mark.parametrize(("spec", "program", "size"), cover_pairs([*EXACT, *AWAY], PROGRAMS, [1, 2, 3], valid=can))
def test_the_loop_of_one_process_gives_its_numbers(spec: str, program: Program, size: int) -> None:
    alone = train_alone(program, size)
    for found, windows in train_together(program, spec, size):
        torch.testing.assert_close(found, alone, rtol=1e-10, atol=1e-12)
        assert windows == {in_turn: 4, one_less_often: 5, clipped_by_themselves: 3, with_closures: 6}.get(program, 4)


def in_turn_unclipped(model: nn.Module, optimizers: Optimizers, backward: Backward) -> None:
    for t in range(4):
        model.zero_grad()
        backward(t)
        for optimizer in optimizers:
            optimizer.step()


def with_closures_after_a_pass(model: nn.Module, optimizers: Optimizers, backward: Backward) -> None:
    """The closures' passes add to gradients that a pass before has left."""
    for t in range(3):
        model.zero_grad()
        backward(3 * t)
        for i, optimizer in enumerate(optimizers):

            def closure(t: int = 3 * t + i + 1) -> Tensor:
                backward(t)
                return torch.zeros(())

            optimizer.step(closure)


@pytest.mark.parametrize(
    ("program", "windows"), [(in_turn_unclipped, 4), (with_closures, 6), (with_closures_after_a_pass, 9)]
)
@pytest.mark.parametrize("spec", ["local_sgd(every=1)", "diloco(every=1, outer_lr=1.0, outer_momentum=0.0)"])
def test_models_meet_once_all_have_stepped(spec: str, program: Program, windows: int) -> None:
    """A mean of the models after every window is, for SGD, that of the gradients."""

    def make(model: nn.Module) -> Optimizers:
        params = list(model.parameters())
        return [torch.optim.SGD(params[:3], lr=0.1), torch.optim.SGD(params[3:], lr=0.2)]

    def worker(world: World) -> list[Tensor]:
        model = make_model()
        optimizers = make(model)
        replica = un.parallel(model, optimizers, spec, world=world)
        program(model, optimizers, lambda t: model(batch(t, world.rank)).square().mean().backward())
        assert replica.step == windows
        return values(replica.consolidate())

    alone = make_model()
    program(alone, make(alone), lambda t: mean_loss(alone, t, 2).backward())
    for found in run_threads(worker, 2):
        torch.testing.assert_close(found, values(alone), rtol=1e-10, atol=1e-12)


class Adversaries(nn.Module):
    """A GAN in small: two nets, each trained by an optimizer of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.makes, self.judges = nn.Linear(5, 4), nn.Linear(4, 1)


def train_adversaries(model: Adversaries, optimizers: Optimizers, rank: int) -> None:
    generator, judge = optimizers
    for t in range(4):
        x = batch(t, rank)
        made = model.makes(x)
        judge.zero_grad()
        (model.judges(made.detach()).square().mean() - model.judges(x[:, :4]).mean()).backward()
        judge.step()
        generator.zero_grad()
        model.judges(made).square().mean().backward()
        generator.step()


def make_adversaries() -> tuple[Adversaries, Optimizers]:
    with MODELS:
        torch.manual_seed(0)
        model = Adversaries().double()
    adam = [torch.optim.Adam(part.parameters(), lr=0.01) for part in (model.makes, model.judges)]
    return model, adam  # type: ignore[return-value]


@alike
@pytest.mark.parametrize("spec", ["allreduce", "shared", "zero(stage=2)", "local_sgd(every=3)", "gossip", "hogwild"])
def test_adversaries_take_turns(spec: str) -> None:
    def worker(world: World) -> list[Tensor]:
        model, optimizers = make_adversaries()
        replica = un.parallel(model, optimizers, spec, world=world)
        train_adversaries(model, optimizers, 0)  # all alike: the mean is what one has
        assert replica.step == 8
        return values(replica.consolidate())

    model, optimizers = make_adversaries()
    train_adversaries(model, optimizers, 0)
    for found in run_threads(worker, 1 if spec == "hogwild" else 2):
        torch.testing.assert_close(found, values(model), rtol=1e-9, atol=1e-12)


@exact
@pytest.mark.parametrize("whose", [0, 1])
def test_an_overflow_in_the_gradients_of_one_skips_its_step_alone(spec: str, whose: int) -> None:
    """As torch.amp.GradScaler does in one process: it looks at the gradients of each optimizer by itself."""

    def train(model: nn.Module, optimizers: Optimizers, forward: Callable[[int], Tensor], scaler: Any) -> None:
        bad = next(p for p in optimizers[whose].param_groups[0]["params"])
        for t in range(3):
            model.zero_grad()
            hook = bad.register_hook(lambda g: g * float("inf")) if t == 1 else None
            scaler.scale(forward(t)).backward()
            if hook is not None:
                hook.remove()
            for optimizer in optimizers:
                scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_([p for g in optimizers[1 - whose].param_groups for p in g["params"]], 0.5)
            for optimizer in optimizers:
                scaler.step(optimizer)
            scaler.update()

    def worker(world: World) -> list[Tensor]:
        model, scaler = make_model(), torch.amp.GradScaler("cpu", init_scale=8.0)
        optimizers = make_optimizers(model)
        replica = un.parallel(model, optimizers, spec, world=world)
        replica.watch(scaler)
        train(model, optimizers, lambda t: model(batch(t, world.rank)).square().mean(), scaler)
        return values(model)

    model = make_model()
    train(model, make_optimizers(model), lambda t: mean_loss(model, t, 2), torch.amp.GradScaler("cpu", init_scale=8.0))
    for found in run_threads(worker, 2):
        torch.testing.assert_close(found, values(model), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("spec", ["allreduce(accumulate=2)", "shared(accumulate=2)", "zero(stage=3, accumulate=2)"])
def test_a_window_of_two_passes_is_one_step_of_each(spec: str) -> None:
    def worker(world: World) -> list[Tensor]:
        model = make_model()
        optimizers = make_optimizers(model)
        replica = un.parallel(model, optimizers, spec, world=world)
        for t in range(0, 6, 2):
            model.zero_grad()
            for i in (t, t + 1):
                model(batch(i, world.rank)).square().mean().backward()
            for optimizer in optimizers:
                optimizer.step()
        assert replica.step == 3
        return values(model)

    model = make_model()
    optimizers = make_optimizers(model)
    for t in range(0, 6, 2):
        model.zero_grad()
        for i in (t, t + 1):
            mean_loss(model, i, 2).backward()
        for optimizer in optimizers:
            optimizer.step()
    for found in run_threads(worker, 2):
        torch.testing.assert_close(found, values(model), rtol=1e-10, atol=1e-12)


# State ---------------------------------------------------------------------------------------------------------------


@exact
def test_each_has_the_state_dict_of_one_process_and_takes_it_back(spec: str) -> None:
    def worker(world: World) -> list[dict[str, Any]]:
        model = make_model()
        optimizers = make_optimizers(model)
        un.parallel(model, optimizers, spec, world=world)
        backward = lambda t: model(batch(t, world.rank)).square().mean().backward()  # noqa: E731
        in_turn(model, optimizers, backward)
        states = [copy.deepcopy(optimizer.state_dict()) for optimizer in optimizers]
        in_turn(model, optimizers, backward)
        for optimizer, state in zip(optimizers, states, strict=True):
            optimizer.load_state_dict(state)
        return [*states, *(optimizer.state_dict() for optimizer in optimizers)]

    model = make_model()
    optimizers = make_optimizers(model)
    in_turn(
        model,
        optimizers,
        lambda t: mean_loss(model, t, 2).backward(),
    )
    for first, second, *again in run_threads(worker, 2):
        for found, back, alone in zip((first, second), again, optimizers, strict=True):
            assert_same_state(found, alone.state_dict(), rtol=1e-9)
            assert_same_state(back, found, rtol=0.0)


def assert_same_state(found: dict[str, Any], wanted: dict[str, Any], *, rtol: float) -> None:
    assert found["param_groups"] == wanted["param_groups"]
    assert found["state"].keys() == wanted["state"].keys()
    for number, entry in wanted["state"].items():
        for key, value in entry.items():
            torch.testing.assert_close(found["state"][number][key], value, rtol=rtol, atol=rtol, check_dtype=False)


@pytest.mark.parametrize("after", [*EXACT, *AWAY])
@pytest.mark.parametrize("before", ["allreduce", "zero(stage=3)", "shared"])
def test_a_checkpoint_moves_between_layouts_bit_by_bit(before: str, after: str, tmp_path: Path) -> None:
    def save(world: World) -> list[Tensor]:
        model = make_model()
        optimizers = make_optimizers(model)
        replica = un.parallel(model, optimizers, before, world=world)
        in_turn(model, optimizers, lambda t: model(batch(t, world.rank)).square().mean().backward())
        un.save(tmp_path, replica)
        return values(model)

    def load(world: World) -> tuple[list[Tensor], list[dict[str, Any]]]:
        model = make_model()
        optimizers = make_optimizers(model)
        replica = un.parallel(model, optimizers, after, world=world)
        un.load(tmp_path, replica)
        return values(model), [optimizer.state_dict() for optimizer in optimizers]

    saved = run_threads(save, 2)[0]
    plain = un.read_checkpoint(tmp_path)
    assert len(plain["optimizers"]) == 2
    assert "optimizer" not in plain
    model = make_model()
    for optimizer, state in zip(make_optimizers(model), plain["optimizers"], strict=True):
        optimizer.load_state_dict(state)
    for found, states in run_threads(load, 3):
        assert all(torch.equal(x, y) for x, y in zip(found, saved, strict=True))
        for state, own in zip(states, plain["optimizers"], strict=True):
            assert_same_state(state, own, rtol=0.0)


def test_a_checkpoint_of_another_number_of_optimizers_is_refused_by_name(tmp_path: Path) -> None:
    def replica_of(optimizers: Callable[[nn.Module], Any]) -> un.Replica:
        model = make_model()
        return un.parallel(model, optimizers(model), world=World())

    un.save(tmp_path, replica_of(make_optimizers))
    with pytest.raises(ValueError, match=r"is 2 optimizers, SGD \+ AdamW with groups of \[3\], \[5\] par.*AdamW"):
        un.load(tmp_path, replica_of(lambda model: torch.optim.AdamW(model.parameters())))
    with pytest.warns(UserWarning, match="its state is not loaded"):
        un.load(tmp_path, replica_of(lambda model: torch.optim.AdamW(model.parameters())), strict=False)


@alike
@pytest.mark.parametrize("after", ["shared", "zero(stage=2)", "local_sgd(every=1)"])
def test_a_switch_in_mid_run_goes_on_with_both(after: str) -> None:
    def worker(world: World) -> list[Tensor]:
        model = make_model()
        optimizers = make_optimizers(model)
        replica = un.parallel(model, optimizers, "allreduce", world=world)
        backward = lambda t: model(batch(t, 0)).square().mean().backward()  # noqa: E731
        in_turn(model, optimizers, backward)
        replica = replica.switch(after)
        in_turn(model, optimizers, backward)
        return values(replica.consolidate())

    model = make_model()
    optimizers = make_optimizers(model)
    for _ in range(2):
        in_turn(model, optimizers, lambda t: model(batch(t, 0)).square().mean().backward())
    for found in run_threads(worker, 2):
        torch.testing.assert_close(found, values(model), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("spec", ["allreduce", "shared", "zero(spare=True)"])
def test_a_smaller_world_goes_on_with_both(spec: str) -> None:
    def worker(world: World) -> list[Tensor] | None:
        model = make_model()
        optimizers = make_optimizers(model)
        replica = un.parallel(model, optimizers, spec, world=world)
        in_turn(model, optimizers, lambda t: model(batch(t, world.rank)).square().mean().backward())
        smaller = world.split([[0, 1], [2]])
        if world.rank == 2:
            return None
        replica.rebind(smaller)
        in_turn(model, optimizers, lambda t: model(batch(t, world.rank)).square().mean().backward())
        return values(model)

    model = make_model()
    optimizers = make_optimizers(model)
    for size in (3, 2):
        in_turn(model, optimizers, lambda t, size=size: mean_loss(model, t, size).backward())
    for found in run_threads(worker, 3)[:2]:
        torch.testing.assert_close(found, values(model), rtol=1e-9, atol=1e-12)


def test_the_trainer_steps_all_of_them_by_their_schedules(tmp_path: Path) -> None:
    x = torch.randn(32, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)

    def worker(world: World) -> list[Tensor]:
        model = make_model()
        optimizers = make_optimizers(model)
        schedules = [torch.optim.lr_scheduler.StepLR(one, 1, gamma=0.5) for one in optimizers]
        trainer = un.Trainer(
            model, optimizers, "zero", loss=nn.MSELoss(), scheduler=schedules, clip_norm=1.0, progress=False,
            checkpoint=tmp_path, world=world,
        )  # fmt: skip
        trainer.fit((x, x[:, :3]), epochs=2, batch_size=16, shuffle=False)
        assert [one.param_groups[0]["lr"] for one in optimizers] == [0.025, 0.005]
        return values(model)

    model = make_model()
    optimizers = make_optimizers(model)
    for _ in range(2):
        for part in x.split(16):
            model.zero_grad()
            nn.functional.mse_loss(model(part), part[:, :3]).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            for optimizer in optimizers:
                optimizer.step()
        for optimizer in optimizers:
            optimizer.param_groups[0]["lr"] *= 0.5
    for found in run_threads(worker, 2):
        torch.testing.assert_close(found, values(model), rtol=1e-9, atol=1e-12)


# What is refused ------------------------------------------------------------------------------------------------------


def refused(make: Callable[[nn.Module], Any], match: str, spec: str = "allreduce", error: type = ValueError) -> None:
    model = make_model()
    with pytest.raises(error, match=match):
        un.parallel(model, make(model), spec, world=World())


def test_bad_lists_are_refused_by_name() -> None:
    sgd = torch.optim.SGD
    refused(lambda m: [], "empty list of optimizers")
    refused(lambda m: "muon", "got str: give one, or a list of several", error=TypeError)
    refused(lambda m: [sgd(m.parameters(), lr=1.0), 3], "optimizer 1 of the list must be .* got int", error=TypeError)
    refused(
        lambda m: [sgd(m.parameters(), lr=1.0), torch.optim.Adam(m[0].parameters())],
        r"parameter '0.weight' is in two optimizers, number 0 \(SGD\) and number 1 \(Adam\)",
    )
    refused(
        lambda m: [sgd(m[0].parameters(), lr=1.0), sgd(m[2].parameters(), lr=1.0)],
        "no optimizer holds '3.weight', '3.bias', '4.weight' and 1 more",
    )
    for spec in ("qadam", "parameter_server"):
        refused(make_optimizers, rf"{spec} takes one optimizer, got SGD \+ AdamW", spec)


def test_a_list_of_one_is_that_one() -> None:
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    assert un.parallel(model, [optimizer], world=World()).optimizer is optimizer


def test_joined_state_is_that_of_the_members() -> None:
    model = make_model()
    members = make_optimizers(model)
    joined = JoinedOptimizers(members)
    model(batch(0, 0)).sum().backward()
    joined.step()
    assert len(joined.state) == 8
    assert set(joined.state) == set(model.parameters())
    weight, bias = model[0].weight, model[0].bias
    assert joined.state[weight] is members[0].state[weight]
    assert joined.state.get(torch.zeros(1)) is None
    taken = joined.state.pop(bias)
    assert bias not in joined.state
    joined.state[bias] = taken
    assert members[1].state[bias] is taken
    fresh = JoinedOptimizers(make_optimizers(model))
    fresh.load_state_dict(joined.state_dict())
    assert_same_state(fresh.state_dict(), joined.state_dict(), rtol=0.0)
    assert copy.deepcopy(joined).members[0] is not members[0]
    joined.zero_grad()
    assert all(p.grad is None for p in model.parameters())
