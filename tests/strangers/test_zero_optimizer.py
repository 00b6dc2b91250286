"""What programs do with the optimizer's groups and state under `zero`: clipping, norms, GradScaler, `ckpt.pt`."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from stranger_programs import furthest, mlp, values
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_, clip_grads_with_norm_, get_total_norm

import unisono as un
from unisono.world import Mismatch, World
from unisono.world.virtual import run_threads

SIZE = 2
SPECS = ["zero(stage=1)", "zero(stage=2, unit_bytes=64)", "zero(stage=3)", "zero(stage=2, spare=True)"]
every_stage = pytest.mark.parametrize("spec", SPECS)
Loop = Callable[[nn.Module, Any, list[int]], Any]


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """As frameworks make it: weights and biases in groups of their own, out of the model's order."""
    named = list(model.named_parameters())
    groups = [[p for n, p in named if "bias" in n], [p for n, p in named if "bias" not in n]]
    return torch.optim.AdamW([{"params": groups[0]}, {"params": groups[1], "weight_decay": 0.1}], lr=0.05)


def held(optimizer: Any) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def batch(step: int, ranks: list[int]) -> Tensor:
    each = [torch.Generator().manual_seed(10 * step + rank) for rank in ranks]
    return torch.cat([torch.randn(3, 4, dtype=torch.float64, generator=g) for g in each])


def train(model: nn.Module, optimizer: Any, ranks: list[int], steps: range, change: Callable[[], Any]) -> list[Any]:
    found = []
    for t in steps:
        optimizer.zero_grad()
        model(batch(t, ranks)).square().mean().backward()
        found.append(change())
        optimizer.step()
    return found


def run_both(spec: str, loop: Loop) -> None:
    """The loop in one process on all samples, and on every rank on its own: the same model and the same answers."""
    alone = mlp()
    expected = loop(alone, adamw(alone), list(range(SIZE)))

    def work(world: World) -> tuple[list[Tensor], Any]:
        model = mlp()
        optimizer = adamw(model)
        un.parallel(model, optimizer, spec, world=world)
        answer = loop(model, optimizer, [world.rank])
        return values(model), answer

    for found, answer in run_threads(work, SIZE):
        assert furthest(found, values(alone)) < 1e-12
        torch.testing.assert_close(answer, expected, rtol=1e-12, atol=1e-12)


def manual_norm(params: list[Tensor]) -> Tensor:
    return torch.norm(torch.stack([p.grad.data.norm(2) for p in params if p.grad is not None]))


def two_calls(params: list[Tensor]) -> Tensor:
    total = get_total_norm([p.grad for p in params if p.grad is not None])
    clip_grads_with_norm_(params, 0.01, total)
    return total


CLIPS: dict[str, Callable[[list[Tensor]], Any]] = {
    "norm": lambda params: clip_grad_norm_(params, 0.01),
    "foreach": lambda params: clip_grad_norm_(params, 0.01, foreach=True),
    "infinity": lambda params: clip_grad_norm_(params, 0.01, norm_type=float("inf"), foreach=False),
    "value": lambda params: clip_grad_value_(params, 1e-3),
    "value foreach": lambda params: clip_grad_value_(params, 1e-3, foreach=True),
    "two calls": two_calls,
    "by hand": manual_norm,
}


@pytest.mark.parametrize("clip", CLIPS)
@every_stage
def test_clipping_what_the_optimizer_holds_is_that_of_one_process(spec: str, clip: str) -> None:
    def loop(model: nn.Module, optimizer: Any, ranks: list[int]) -> Any:
        return [
            train(model, optimizer, ranks, range(2), lambda: CLIPS[clip](held(optimizer))),
            train(model, optimizer, ranks, range(2, 4), lambda: CLIPS[clip](list(model.parameters()))),
        ]

    run_both(spec, loop)


@every_stage
def test_a_scaler_unscales_clips_and_skips_as_in_one_process(spec: str) -> None:
    def loop(model: nn.Module, optimizer: Any, ranks: list[int]) -> Any:
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        norms = []
        for t in range(4):
            optimizer.zero_grad(set_to_none=t % 2 == 0)
            x = batch(t, ranks)
            if t == 1 and 1 in ranks:
                x[-1] = float("inf")
            scaler.scale(model(x).square().mean()).backward()
            scaler.unscale_(optimizer)
            norms.append(clip_grad_norm_(held(optimizer), 0.01).nan_to_num(0.0))
            scaler.step(optimizer)
            scaler.update()
        return [scaler.get_scale(), norms]

    run_both(spec, loop)


@every_stage
def test_gradients_by_autograd_grad_step_as_in_one_process(spec: str) -> None:
    def loop(model: nn.Module, optimizer: Any, ranks: list[int]) -> None:
        for t in range(3):
            params = held(optimizer)
            found = torch.autograd.grad(model(batch(t, ranks)).square().mean(), params)
            for p, grad in zip(params, found, strict=True):
                p.grad = grad
            optimizer.step()

    run_both(spec, loop)


@every_stage
def test_a_gradient_kept_over_zero_grad_is_refused_by_name(spec: str) -> None:
    def work(world: World) -> None:
        model = mlp()
        optimizer = adamw(model)
        un.parallel(model, optimizer, spec, world=world)
        kept = []
        for t in range(2):
            optimizer.zero_grad()
            model(batch(t, [world.rank])).square().mean().backward()
            kept.append(model[0].weight.grad)
        kept[1].norm()
        with pytest.raises(RuntimeError, match=r"gradient of '0\.weight' was cleared .* take grad\.full\(\)"):
            kept[0].norm()

    run_threads(work, SIZE)


@pytest.mark.parametrize("spec", [*SPECS, "zero(stage=2, optimizer_on=cpu)", "zero(stage=3, optimizer_on=cpu)"])
def test_a_file_with_the_states_of_model_and_optimizer_goes_on_anywhere(spec: str) -> None:
    """nanoGPT's ckpt.pt: by parameter as in one process, from ranks to one process, and back to ranks."""

    def save(model: nn.Module, optimizer: Any) -> bytes:
        file = io.BytesIO()
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
        return file.getvalue()

    def resume(ckpt: bytes | None, ranks: list[int], steps: range, world: World | None = None) -> Any:
        model = mlp()
        optimizer = adamw(model)
        if world is not None:
            un.parallel(model, optimizer, spec, world=world)
        if ckpt is not None:
            state = torch.load(io.BytesIO(ckpt))
            model.load_state_dict(state["model"])
            optimizer.load_state_dict(state["optimizer"])
            assert optimizer.param_groups[1]["lr"] == 0.01
        train(model, optimizer, ranks, steps, lambda: None)
        optimizer.param_groups[1]["lr"] = 0.01
        found = save(model, optimizer)
        train(model, optimizer, ranks, range(9, 10), lambda: None)  # what was saved does not change with it
        return found, values(model)

    def states(ckpt: bytes) -> Any:
        return torch.load(io.BytesIO(ckpt))["optimizer"]

    whole = [0, 1]
    alone, _ = resume(None, whole, range(2))
    [(first, _), (second, _)] = run_threads(lambda world: resume(None, [world.rank], range(2), world), SIZE)
    assert states(first)["state"].keys() == states(alone)["state"].keys()
    for one in (first, second):
        torch.testing.assert_close(states(one), states(alone), rtol=1e-12, atol=1e-12)
    _, expected = resume(alone, whole, range(2, 4))
    assert furthest(resume(first, whole, range(2, 4))[1], expected) < 1e-12
    for ckpt in (alone, first):
        for _, found in run_threads(lambda world, c=ckpt: resume(c, [world.rank], range(2, 4), world), SIZE):  # type: ignore[misc]
            assert furthest(found, expected) < 1e-12


@every_stage
def test_a_state_that_one_rank_alone_asks_for_is_named(spec: str) -> None:
    def work(world: World) -> None:
        model = mlp()
        optimizer = adamw(model)
        un.parallel(model, optimizer, spec, world=world)
        train(model, optimizer, [world.rank], range(1), lambda: None)
        if world.rank == 0:
            optimizer.state_dict()
        train(model, optimizer, [world.rank], range(1, 2), lambda: None)

    with pytest.raises(Mismatch, match=r"'optimizer\.state_dict\(\)' at .*test_zero_optimizer.py:\d+"):
        run_threads(work, SIZE, timeout_s=10.0)


def test_a_state_on_disk_is_refused_with_what_to_use(tmp_path: Any) -> None:
    def work(world: World) -> None:
        model = mlp()
        optimizer = adamw(model)
        un.parallel(model, optimizer, f"zero(stage=2, optimizer_on=disk, disk='{tmp_path}')", world=world)
        train(model, optimizer, [world.rank], range(1), lambda: None)
        with pytest.raises(ValueError, match=r"on disk here.*un\.save\(folder, replica\)"):
            optimizer.state_dict()

    run_threads(work, SIZE)
