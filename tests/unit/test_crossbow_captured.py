"""Rounds of all learners at the same time, against learners simulated one by one in float64.

On a CPU a round that would be captured runs op by op each time, in the same memory; on a GPU it is replayed.
"""

from __future__ import annotations

import copy
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from test_crossbow import Reference, batch, check_all, close, loss_of, make, noisy, params
from torch import Tensor, nn

import unisono as un
from unisono.methods.strategies.crossbow import captured, replica
from unisono.world import World
from unisono.world.virtual import run_threads

LR = 0.125  # float32 has it exactly, and the fused kernels take it as that
NEEDS_CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=NEEDS_CUDA)])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> torch.device:
    monkeypatch.setattr(replica, "is_on_gpu", lambda named: True)
    return torch.device(request.param, 0 if request.param == "cuda" else None)


def sgd(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), **{"lr": LR, "momentum": 0.5, "weight_decay": 0.01, **options})


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=LR / 8)


def rmsprop(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.RMSprop(model.parameters(), lr=LR / 8)


def started(
    spec: str, world: World, optimizer: Callable[[nn.Module], Any] = sgd, model: nn.Module | None = None
) -> tuple[Any, Any, Any]:
    placed = (make() if model is None else model).to(world.device)
    chosen = optimizer(placed)
    return placed, chosen, un.parallel(placed, chosen, spec, world=world)


def train(made: Any, rounds: range, learners: int, **options: Any) -> list[Tensor]:
    losses = []
    each = made.strategy.accumulate * learners
    for t in rounds:
        data = [batch(t * each + j, made.world.rank).to(made.world.device) for j in range(each)]
        losses += made.learn(loss_of, data, **options)
    return losses


def replays(made: Any) -> int:
    return 0 if made._captured is None else made._captured.replayed


def seen(made: Any) -> tuple[list[Tensor], list[list[Tensor]]]:
    """The central model, and every learner here, on the CPU."""
    made.meet_if_due()
    own = [[w.cpu().clone() for w in made.learners.params(j)] for j in range(made.learners.count)]
    return [p.cpu() for p in params(made.consolidate())], own


def apart(a: Any, b: Any) -> float:
    return max((x - y).abs().max().item() for x, y in zip(a, b, strict=True))


SETTINGS = {"": {}, "every=3, ": {"every": 3}, "alpha=0.2, momentum=0.5, ": {"alpha": 0.2, "momentum": 0.5}}


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("optimizer", [sgd, adam])
@pytest.mark.parametrize("learners", [1, 3])
def test_rounds_are_those_of_the_equations(
    device: torch.device, learners: int, optimizer: Callable[[nn.Module], Any], settings: str
) -> None:
    _, _, made = started(f"crossbow({settings}learners={learners})", World(device=device), optimizer)
    train(made, range(12), learners)
    assert replays(made) == 12 - captured.WARM_UP
    assert made.step == 12 * learners
    assert made.world.ledger.step_count == 12 * learners
    reference = Reference(1, learners, optimizer=optimizer, **SETTINGS[settings])  # type: ignore[arg-type]
    for t in range(12):
        reference.round(t)
    check_all([seen(made)], reference)
    made.close()


@pytest.mark.parametrize(("learners", "every"), [(1, 1), (2, 2), (3, 1)])
def test_workers_meet_between_rounds(monkeypatch: pytest.MonkeyPatch, learners: int, every: int) -> None:
    monkeypatch.setattr(replica, "is_on_gpu", lambda named: True)

    def work(world: World) -> Any:
        _, _, made = started(f"crossbow(learners={learners}, every={every}, bucket_bytes=256)", world)
        train(made, range(10), learners)
        assert replays(made) == 10 - captured.WARM_UP
        result = seen(made)
        made.close()
        return result

    reference = Reference(2, learners, every=every, optimizer=sgd)
    for t in range(10):
        reference.round(t)
    check_all(run_threads(work, 2), reference)


@pytest.mark.parametrize("optimizer", [sgd, adam, rmsprop])
@pytest.mark.parametrize("how", ["", "adjust", "clip_norm", "both"])
def test_captured_and_in_threads_are_the_same(
    device: torch.device, optimizer: Callable[[nn.Module], Any], how: str
) -> None:
    """With batch norms, two passes a window, gradients that are clipped or changed, and any optimizer's steps."""

    def trained(capture: bool) -> Any:
        model, _, made = started("crossbow(learners=3, accumulate=2)", World(device=device), optimizer, noisy())

        def halve() -> None:
            for p in model.parameters():
                p.grad.div_(2)

        options: dict[str, Any] = {"adjust": halve} if how in ("adjust", "both") else {}
        options |= {"clip_norm": 0.5} if how in ("clip_norm", "both") else {}
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*steps are not", UserWarning)
            losses = train(made, range(6), 3, capture=capture, **options)
        assert replays(made) == (4 if capture else 0)
        z, own = seen(made)
        buffers = [b.cpu().double() for j in range(3) for b in made.learners.buffers(j)]
        made.close()
        return [*z, *(w for each in own for w in each), *buffers, *(x.cpu() for x in losses)]

    close(trained(True), trained(False), 1e-9)


def test_an_optimizer_whose_steps_no_graph_can_hold_is_named_and_its_gradients_are_captured(
    device: torch.device,
) -> None:
    _, _, made = started("crossbow(learners=2)", World(device=device), rmsprop)
    with pytest.warns(UserWarning, match=r"gradients are captured, steps are not: .* RMSprop"):
        train(made, range(1), 2)
    train(made, range(1, 6), 2)
    assert replays(made) == 4
    made.close()


def test_hooks_of_the_optimizers_step_are_called_for_each_learner(device: torch.device) -> None:
    _, optimizer, made = started("crossbow(learners=2)", World(device=device))
    reference, calls = Reference(1, 2, optimizer=sgd), []
    train(made, range(4), 2)
    hook = optimizer.register_step_post_hook(lambda *_: calls.append(1))
    with pytest.warns(UserWarning, match="step has hooks, or is another function"):
        train(made, range(4, 5), 2)
    train(made, range(5, 8), 2)
    hook.remove()
    train(made, range(8, 10), 2)
    assert len(calls) == 8
    for t in range(10):
        reference.round(t)
    check_all([seen(made)], reference)
    made.close()


def test_a_step_that_the_program_has_replaced_is_called_for_each_learner(device: torch.device) -> None:
    _, optimizer, made = started("crossbow(learners=2)", World(device=device))
    calls, step = [], optimizer.step

    def counted() -> None:
        calls.append(1)
        step()

    optimizer.step = counted
    with pytest.warns(UserWarning, match="step has hooks, or is another function"):
        train(made, range(1), 2)
    train(made, range(1, 4), 2)
    assert len(calls) == 8
    made.close()


def test_a_learning_rate_changes_between_replays_and_its_drop_restarts(device: torch.device) -> None:
    rates = [LR, LR, LR, LR, LR / 2, LR / 2, LR / 2, LR, 2 * LR, LR, LR]
    _, optimizer, made = started("crossbow(learners=2, every=2)", World(device=device))
    reference = Reference(1, 2, every=2, optimizer=sgd)
    for t, lr in enumerate(rates):
        optimizer.param_groups[0]["lr"] = torch.tensor(lr) if t == 8 else lr
        reference.rates(lr)
        train(made, range(t, t + 1), 2)
        reference.round(t, restart=t == 5)
    assert replays(made) == len(rates) - captured.WARM_UP
    assert len(made._captured._rounds) == 1, "one graph for all rates"
    check_all([seen(made)], reference)
    made.close()


def test_a_schedule_that_is_stepped_does_not_complain(device: torch.device) -> None:
    _, optimizer, made = started("crossbow(learners=2)", World(device=device))
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
    for t in range(5):
        train(made, range(t, t + 1), 2)
        scheduler.step()
    made.close()


def test_other_settings_of_the_optimizer_are_followed(device: torch.device) -> None:
    _, optimizer, made = started("crossbow(learners=2)", World(device=device))
    reference = Reference(1, 2, optimizer=sgd)
    for t in range(9):
        for one in (optimizer, *reference.optimizers.values()):
            one.param_groups[0]["momentum"] = 0.5 if t < 4 else 0.25
        train(made, range(t, t + 1), 2)
        reference.round(t)
    assert len(made._captured._rounds) == 2
    check_all([seen(made)], reference)
    made.close()


def test_groups_that_are_loaded_or_added_count(device: torch.device) -> None:
    """Without momentum the optimizer has no state that would be another afterwards."""

    def trained(capture: bool) -> list[Tensor]:
        model, optimizer, made = started(
            "crossbow(learners=2)",
            World(device=device),
            lambda m: torch.optim.SGD(m[0].parameters(), lr=LR),  # type: ignore[index, operator]
        )
        train(made, range(4), 2, capture=capture)
        optimizer.load_state_dict(optimizer.state_dict())
        optimizer.param_groups[0]["lr"] = LR / 2
        train(made, range(4, 8), 2, capture=capture)
        optimizer.add_param_group({"params": model[2].parameters(), "lr": LR / 4})
        train(made, range(8, 12), 2, capture=capture)
        z, own = seen(made)
        made.close()
        return [*z, *(w for each in own for w in each)]

    close(trained(True), trained(False), 1e-9)


def test_batches_of_other_sizes_and_a_round_cut_short(device: torch.device) -> None:
    """The last batches of an epoch: one size more, then fewer batches than learners."""
    _, _, made = started("crossbow(learners=2)", World(device=device))
    reference = Reference(1, 2, optimizer=sgd)
    sizes = [4, 4, 4, 4, 3, 4, 3, 3, 4, 4]
    data = [batch(t, 0)[: sizes[t // 2]] for t in range(20)]
    for t in range(10):
        for j in range(2):
            before = [p.detach().clone() for p in reference.models[0, j].parameters()]
            model, optimizer = reference.models[0, j], reference.optimizers[0, j]
            optimizer.zero_grad()
            loss_of(model, data[2 * t + j]).backward()
            optimizer.step()
            moved = [p.detach() - b for p, b in zip(model.parameters(), before, strict=True)]
            with torch.no_grad():
                for p, b in zip(model.parameters(), before, strict=True):
                    p.copy_(b)
            reference.models[0, j]._moved = moved  # type: ignore[assignment]
        reference.round(t, frozenset({(2 * t, 0), (2 * t + 1, 0)}))
        with torch.no_grad():
            for j in range(2):
                for p, m in zip(reference.models[0, j].parameters(), reference.models[0, j]._moved, strict=True):  # type: ignore[arg-type]
                    p.add_(m)
    on_device = [x.to(device) for x in data]
    for t in range(4):
        made.learn(loss_of, on_device[2 * t : 2 * t + 2])
    made.learn(loss_of, on_device[8:9])  # half a round
    for some in made.batches(on_device[9:]):
        made.learn(loss_of, some)
    assert replays(made) == 5
    check_all([seen(made)], reference)
    made.close()


def test_more_kinds_of_batches_than_graphs_are_named(device: torch.device) -> None:
    _, _, made = started("crossbow(learners=2)", World(device=device))
    data = [torch.ones(n, 4, dtype=torch.float64, device=device) for n in range(1, captured.MOST + 2)]
    with pytest.warns(UserWarning, match=f"more than {captured.MOST} kinds"):
        made.learn(loss_of, [x for x in data for _ in range(2)])
    made.close()


def test_values_that_a_loss_function_was_made_with_count_and_lambdas_of_one_line_are_the_same(
    device: torch.device,
) -> None:
    _, _, made = started("crossbow(learners=2)", World(device=device))
    _, _, other = started("crossbow(learners=2)", World(device=device))
    for t in range(8):
        factor = 1.0 if t < 4 else 3.0
        data = [batch(2 * t + j, 0).to(device) for j in range(2)]
        for one, capture in ((made, True), (other, False)):
            one.learn(lambda m, x, factor=factor: factor * loss_of(m, x), data, capture=capture)
            one.learn(lambda m, x: factor * loss_of(m, x), data, capture=capture)  # noqa: B023
    assert len(made._captured._rounds) == 4
    close(seen(made)[0], seen(other)[0], 1e-9)
    made.close()
    other.close()


FACTOR = 1.0  # a script's numbers are its module's


def scaled(model: nn.Module, x: Tensor) -> Tensor:
    return sum(factor * loss_of(model, x) for factor in (FACTOR, 2.0))  # type: ignore[return-value]


def test_values_that_a_loss_function_reads_from_its_module_count(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, _, made = started("crossbow(learners=2)", World(device=device))
    _, _, other = started("crossbow(learners=2)", World(device=device))
    for t in range(8):
        monkeypatch.setattr(sys.modules[__name__], "FACTOR", 1.0 if t < 4 else 3.0)
        data = [batch(2 * t + j, 0).to(device) for j in range(2)]
        made.learn(lambda m, x: scaled(m, x), data)
        other.learn(scaled, data, capture=False)
    assert len(made._captured._rounds) == 2
    assert replays(made) == 4
    close(seen(made)[0], seen(other)[0], 1e-9)
    made.close()
    other.close()


def test_a_layer_thawed_while_an_exchange_is_under_way_takes_part_from_the_next(device: torch.device) -> None:
    """A forward pass begins the exchange: one that looks at the loss before the round, say."""

    def trained(capture: bool) -> list[Tensor]:
        model: Any = make()
        model[0].requires_grad_(False)
        _, _, made = started("crossbow(learners=2)", World(device=device), model=model)
        train(made, range(4), 2, capture=capture)
        loss_of(model, batch(0, 0).to(device))
        model[0].requires_grad_(True)
        train(made, range(4, 10), 2, capture=capture)
        z, own = seen(made)
        assert replays(made) > 0 or not capture
        made.close()
        return [*z, *(w for each in own for w in each)]

    close(trained(True), trained(False), 1e-9)


class Odd(nn.Module):
    """Sparse gradients, or complex parameters, or a buffer that forward puts another tensor in place of."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.table = kind, nn.Embedding(8, 4, sparse=kind == "sparse", dtype=torch.float64)
        self.turn = nn.Parameter(torch.ones(4, dtype=torch.complex128 if kind == "complex" else torch.float64))
        self.register_buffer("mean", torch.zeros(4, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        found = self.table(x.abs().long() % 8).mean(1)
        if self.kind == "buffer":
            self.mean = 0.5 * self.mean + found.detach().mean(0)
        return (found - self.mean) * self.turn.abs()


@pytest.mark.parametrize(
    ("kind", "why"), [("sparse", "sparse gradients"), ("complex", "parameters are complex"), ("buffer", "")]
)
def test_sparse_gradients_complex_parameters_and_buffers_that_are_replaced(
    device: torch.device, kind: str, why: str
) -> None:
    """The same numbers as in the plain loop, in which learners take turns."""

    def trained(capture: bool | None) -> list[Tensor]:
        torch.manual_seed(0)
        model, optimizer, made = started(
            "crossbow(learners=2)", World(device=device), lambda m: sgd(m, weight_decay=0.0), Odd(kind)
        )
        data = [8 * batch(t, 0).to(device) for t in range(8)]
        if capture is None:
            for x in data:
                optimizer.zero_grad()
                model(x).square().mean().backward()
                optimizer.step()
        else:
            for i in range(0, 8, 2):
                made.learn(lambda m, x: m(x).square().mean(), data[i : i + 2], capture=capture)
        z, own = seen(made)
        buffers = [b.cpu() for j in range(2) for b in made.learners.buffers(j)]
        assert replays(made) == (2 if capture and kind != "sparse" else 0)
        made.close()
        return [*z, *(w for each in own for w in each), *buffers]

    plain = trained(None)
    close(trained(False), plain, 1e-9)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        close(trained(True), plain, 1e-9)
    assert [why in str(one.message) for one in told if "crossbow" in str(one.message)] == ([True] if why else [])


def test_modes_and_what_is_frozen_are_followed(device: torch.device) -> None:
    def trained(capture: bool) -> list[Tensor]:
        model, _, made = started("crossbow(learners=2)", World(device=device), sgd, noisy())
        for t, (is_training, is_free) in enumerate([(True, True)] * 4 + [(False, True)] * 3 + [(True, False)] * 4):
            model.train(is_training)
            model[0].weight.requires_grad_(is_free)
            train(made, range(t, t + 1), 2, capture=capture)
        z, own = seen(made)
        buffers = [b.cpu().double() for j in range(2) for b in made.learners.buffers(j)]
        made.close()
        return [*z, *(w for each in own for w in each), *buffers]

    close(trained(True), trained(False), 1e-9)


def test_what_the_program_writes_becomes_the_central_model(device: torch.device) -> None:
    def trained(capture: bool) -> list[Tensor]:
        model, optimizer, made = started("crossbow(learners=2)", World(device=device))
        train(made, range(5), 2, capture=capture)
        model.load_state_dict(make(seed=3).state_dict())
        train(made, range(5, 8), 2, capture=capture)
        model[0].weight.data = torch.ones_like(model[0].weight)
        optimizer.state.clear()
        train(made, range(8, 12), 2, capture=capture)
        z, own = seen(made)
        made.close()
        return [*z, *(w for each in own for w in each)]

    close(trained(True), trained(False), 1e-9)


@pytest.mark.parametrize("optimizer", [sgd, adam])
def test_a_checkpoint_goes_on_with_the_same_numbers(
    tmp_path: Path, device: torch.device, optimizer: Callable[[nn.Module], Any]
) -> None:
    _, _, first = started("crossbow(learners=2)", World(device=device), optimizer)
    train(first, range(5), 2)
    un.save(tmp_path, first)
    train(first, range(5, 9), 2)
    _, _, second = started("crossbow(learners=2)", World(device=device), optimizer, make(seed=3))
    train(second, range(7), 2)  # it has a graph, and was somewhere else
    un.load(tmp_path, second)
    assert second.step == 10
    train(second, range(5, 9), 2)
    (z, own), (z2, own2) = seen(first), seen(second)
    for a, b in zip([z, *own], [z2, *own2], strict=True):
        close(a, b, 1e-12)
    first.close()
    second.close()


def test_the_plain_loop_and_learn_take_turns(device: torch.device) -> None:
    model, optimizer, made = started("crossbow(learners=2)", World(device=device))
    reference = Reference(1, 2, optimizer=sgd)
    for t in range(12):
        reference.round(t)
        if t % 6 < 4:
            train(made, range(t, t + 1), 2)
            continue
        for j in range(2):
            optimizer.zero_grad()
            loss_of(model, batch(2 * t + j, 0).to(device)).backward()
            optimizer.step()
    check_all([seen(made)], reference)
    made.close()


def test_the_tuner_adds_learners_and_stops_where_no_more_fit(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(captured.CapturedLearners, "has_room", lambda self: len(self._copies) < 3)
    _, _, made = started("crossbow(learners=auto, tune_every=4)", World(device=device))
    made.tuning._learners.gain = -1.0  # each one pays
    for t in range(60):
        made.learn(loss_of, [batch(2 * t + j, 0).to(device) for j in range(made.learners.count)])
    told = [event.values for event in made.world.ledger.events if event.kind == "crossbow"]
    assert [(one["learners"], one["why"]) for one in told][-1] == (3, "one more would not fit into memory")
    assert made.learners.count == 3
    assert replays(made) > 0
    made.close()


def test_learners_that_do_not_fit_are_named(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    _, _, made = started("crossbow(learners=2)", World(device=device))

    def full(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(captured.CapturedLearners, "_compute", full)
    with pytest.raises(torch.OutOfMemoryError, match=r"2 learner\(s\).*do not fit.*fewer learners"):
        train(made, range(1), 2)
    made.close()


def test_a_batch_elsewhere_or_of_other_things_is_named_and_the_round_runs_in_threads(device: torch.device) -> None:
    _, _, made = started("crossbow(learners=2)", World(device=device))
    data = [batch(j, 0).to(device) for j in range(2)]
    with pytest.warns(UserWarning, match="a batch holds a complex: give tensors"):
        made.learn(lambda m, b: loss_of(m, b[0]), [(x, 1j) for x in data])
    elsewhere = torch.device("meta" if device.type == "cpu" else "cpu")
    with pytest.warns(UserWarning, match=f"a batch is on {elsewhere}: bring it to {device}"):
        made.learn(lambda m, b: loss_of(m, b[0]), [(x, torch.ones(1, device=elsewhere)) for x in data])
    made.learn(lambda m, b: loss_of(m, b["x"]) * b["n"], [{"x": x, "n": 2} for x in data])
    assert made.step == 6
    made.close()


def test_sixteen_bit_parameters_are_named(device: torch.device) -> None:
    _, _, made = started("crossbow(learners=2)", World(device=device), sgd, make(dtype=torch.bfloat16))
    with pytest.warns(UserWarning, match="16 bits: keep parameters in float32"):
        train(made, range(1), 2)
    train(made, range(1, 3), 2)
    made.close()


def test_a_batch_norm_that_hears_other_workers_is_named(device: torch.device) -> None:
    world = World(device=device)
    _, _, made = started("crossbow", world, sgd, un.sync_batch_norm(noisy(), world))
    with pytest.warns(UserWarning, match="SyncBatchNorm hears other workers"):
        train(made, range(1), 1)
    made.close()


@pytest.mark.parametrize(("every", "error"), [(1, ArithmeticError), (1, KeyboardInterrupt), (2, ArithmeticError)])
def test_an_error_comes_through_and_no_learner_steps(
    device: torch.device, every: int, error: type[BaseException]
) -> None:
    _, _, made = started(f"crossbow(learners=2, every={every})", World(device=device))
    reference = Reference(1, 2, every=every, optimizer=sgd)

    def failing(module: nn.Module, x: Tensor) -> Tensor:
        if x.shape[0] == 1:
            raise error("a bad batch")
        return loss_of(module, x)

    for t in range(8):
        train(made, range(t, t + 1), 2)
        reference.round(t)
        before = seen(made)
        with pytest.raises(error, match="a bad batch"):
            made.learn(failing, [batch(0, 0).to(device), batch(1, 0)[:1].to(device)])
        after = seen(made)
        close(before[0], after[0], 0.0)
        for a, b in zip(before[1], after[1], strict=True):
            close(a, b, 0.0)
    check_all([seen(made)], reference)
    made.close()


def test_a_state_that_is_cleared_after_a_first_round_that_failed_is_the_optimizers_own(device: torch.device) -> None:
    def trained(capture: bool) -> list[Tensor]:
        model, optimizer, made = started("crossbow(learners=1)", World(device=device), adam)

        def failing(module: nn.Module, x: Tensor) -> Tensor:
            raise ArithmeticError("a bad batch")

        with pytest.raises(ArithmeticError):
            made.learn(failing, [batch(0, 0).to(device)], capture=capture)
        optimizer.state.clear()
        train(made, range(4), 1, capture=capture)
        moments = [optimizer.state[p]["exp_avg"].cpu() for p in model.parameters()]
        made.close()
        return moments

    close(trained(True), trained(False), 1e-9)


@pytest.mark.parametrize("clip_norm", [0.0, -1.0, float("inf"), float("nan")])
def test_a_norm_that_is_none_is_refused(device: torch.device, clip_norm: float) -> None:
    _, _, made = started("crossbow(learners=2)", World(device=device))
    with pytest.raises(ValueError, match=r"clip_norm=.*positive"):
        train(made, range(1), 2, clip_norm=clip_norm)
    made.close()


@pytest.mark.parametrize("capture", [True, False])
def test_inside_no_sync_it_is_refused(device: torch.device, capture: bool) -> None:
    _, _, made = started("crossbow(learners=2)", World(device=device))
    with made.no_sync(), pytest.raises(ValueError, match=r"set `accumulate`, without no_sync"):
        train(made, range(1), 2, capture=capture)
    made.close()


def test_batch_norms_count_what_they_have_seen(device: torch.device) -> None:
    """Also one that is called twice, one that is not, and one that needs its counter in forward."""

    class Several(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.twice, self.unused = nn.BatchNorm1d(4), nn.BatchNorm1d(4)
            self.by_count = nn.BatchNorm1d(4, momentum=None)

        def forward(self, x: Tensor) -> Tensor:
            return self.twice(self.twice(x)) + (self.by_count(x) if x.device.type == "cpu" else 0.0)

    _, _, made = started("crossbow(learners=2)", World(device=device), sgd, Several().double())
    train(made, range(5), 2)
    assert replays(made) == 3
    for j in range(2):
        counts = [b.item() for b in made.learners.buffers(j) if b.dtype == torch.int64]
        assert counts == [10, 0, 5 if device.type == "cpu" else 0]
    made.close()


def test_another_world_and_the_end(device: torch.device) -> None:
    model, optimizer, made = started("crossbow(learners=2)", World(device=device), lambda m: sgd(m, momentum=0.0))
    train(made, range(4), 2)
    z = seen(made)[0]
    made.rebind(World(device=device))
    reference = Reference(1, 2, optimizer=lambda m: sgd(m, momentum=0.0))
    reference.z = z
    reference.restart()
    for t in range(4, 8):
        train(made, range(t, t + 1), 2)
        reference.round(t)
    check_all([seen(made)], reference)
    z = seen(made)[0]
    made.close()
    close([p.cpu() for p in params(model)], z, 0.0)
    assert all(p.untyped_storage().nbytes() == p.nbytes for p in model.parameters()), "no line is kept alive"
    twin = copy.deepcopy(model)
    for one in (model, twin):
        loss_of(one, batch(9, 0).to(device)).backward()
    optimizer.step()
    assert apart(model.parameters(), twin.parameters()) > 0
