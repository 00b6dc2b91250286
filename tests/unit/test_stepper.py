"""The optimizer step on the host, against the same optimizer of PyTorch on whole parameters."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor

from unisono.methods.offload import fused
from unisono.methods.offload.blocks import Runs
from unisono.methods.offload.optimizers import make_rule
from unisono.methods.offload.stepper import Block, Run, Stepper

SIZES = (5, 300_000, 33, 16, 1, 300_001)  # several cells; borders that are no multiple of a vector
PADDING = 7.0


class Line:
    """Parameters in one line, each on a border of 64 bytes, with something in between that must stay."""

    def __init__(self, sizes: Iterable[int] = SIZES, *, dtype: torch.dtype = torch.float32, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.spans: list[tuple[int, int]] = []
        at = 0
        for size in sizes:
            self.spans.append((at, at + size))
            at += -(-size // 16) * 16
        self.master = torch.full((at + 16,), PADDING, dtype=dtype)
        self.values = [torch.randn(b - a, generator=generator).to(dtype) for a, b in self.spans]
        for (a, b), value in zip(self.spans, self.values, strict=True):
            self.master[a:b] = value
        self._generator = generator

    def views(self) -> list[torch.nn.Parameter]:
        return [torch.nn.Parameter(self.master[a:b]) for a, b in self.spans]

    def gradient(self, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(self.master.numel(), generator=self._generator).to(dtype)

    def is_padding(self) -> Tensor:
        mask = torch.ones(self.master.numel(), dtype=torch.bool)
        for a, b in self.spans:
            mask[a:b] = False
        return mask


Make = Callable[[list[dict[str, Any]]], torch.optim.Optimizer]


def two_groups(params: list[torch.nn.Parameter]) -> list[dict[str, Any]]:
    """Every other parameter in a second group with settings of its own."""
    return [{"params": params[0::2]}, {"params": params[1::2], "lr": 0.02, "weight_decay": 0.0}]


def pair(make: Make, line: Line, **options: Any) -> tuple[Stepper, torch.optim.Optimizer, list[torch.nn.Parameter]]:
    """A stepper over the line, and the same optimizer over parameters of its own."""
    whole = [torch.nn.Parameter(value.clone()) for value in line.values]
    reference = make(two_groups(whole))
    optimizer = make(two_groups(line.views()))
    runs = [Run(a, b, i % 2) for i, (a, b) in enumerate(line.spans)]
    return Stepper(optimizer, [Block(line.master, runs)], **options), reference, whole


def apply(reference: torch.optim.Optimizer, whole: list[torch.nn.Parameter], line: Line, gradient: Tensor) -> None:
    for p, (a, b) in zip(whole, line.spans, strict=True):
        p.grad = gradient[a:b].to(p.dtype)
    reference.step()


FUSED: dict[str, Make] = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, betas=(0.8, 0.95), weight_decay=0.1, fused=True),
    "adamw_amsgrad": lambda p: torch.optim.AdamW(p, lr=0.01, amsgrad=True, maximize=True, fused=True),
    "adamw_tensor_lr": lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.01), fused=True),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01, weight_decay=0.1, fused=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, weight_decay=0.1, fused=True),
    "sgd_momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.3, maximize=True, fused=True),
    "sgd_nesterov": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, fused=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1, lr_decay=0.1, initial_accumulator_value=0.5, fused=True),
}


class MyAdagrad(torch.optim.Adagrad):
    """Makes its state as it is constructed."""


class MyAdam(torch.optim.Adam):
    """A class of the user is stepped by its own `step`."""


OTHERS: dict[str, Make] = {
    "my_adagrad": lambda p: MyAdagrad(p, lr=0.1, initial_accumulator_value=0.5),
    "my_adam": lambda p: MyAdam(p, lr=0.01, fused=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.9, centered=True),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.01, weight_decay=0.1),
    "radam": lambda p: torch.optim.RAdam(p, lr=0.01),
    "adamax": lambda p: torch.optim.Adamax(p, lr=0.01),
    "adadelta": lambda p: torch.optim.Adadelta(p, lr=0.5),
    "asgd": lambda p: torch.optim.ASGD(p, lr=0.01),
    "rprop": lambda p: torch.optim.Rprop([{k: v for k, v in g.items() if k != "weight_decay"} for g in p], lr=0.01),
}


@pytest.mark.parametrize("name", FUSED)
def test_a_fused_optimizer_steps_bitwise_like_pytorch(name: str) -> None:
    line = Line()
    stepper, reference, whole = pair(FUSED[name], line, threads=3)
    for _ in range(4):
        gradient = line.gradient()
        apply(reference, whole, line, gradient)
        stepper.begin()
        stepper.step(0, gradient)
    for (a, b), p in zip(line.spans, whole, strict=True):
        assert torch.equal(line.master[a:b], p.detach())
        for key in stepper.blocks[0].names()[1:]:
            assert torch.equal(stepper.blocks[0].read(key, a, b), reference.state[p][key])
        if "step" in reference.state[p]:
            assert stepper.blocks[0].scalars(a) == {"step": reference.state[p]["step"]}
    assert (line.master[line.is_padding()] == PADDING).all()


@pytest.mark.parametrize("name", OTHERS)
def test_any_elementwise_optimizer_steps_like_itself_on_whole_parameters(name: str) -> None:
    line = Line()
    stepper, reference, whole = pair(OTHERS[name], line)
    for _ in range(3):
        gradient = line.gradient()
        apply(reference, whole, line, gradient)
        stepper.begin()
        stepper.step(0, gradient)
    for (a, b), p in zip(line.spans, whole, strict=True):
        torch.testing.assert_close(line.master[a:b], p.detach(), rtol=1e-6, atol=1e-7)
        for key, value in reference.state[p].items():
            if value.dim():
                torch.testing.assert_close(stepper.blocks[0].read(key, a, b), value, rtol=1e-5, atol=1e-7)
            else:
                torch.testing.assert_close((stepper.blocks[0].scalars(a) or {})[key], value)
    assert (line.master[line.is_padding()] == PADDING).all()


class Lion(torch.optim.Optimizer):
    """A user's own: Chen et al., 2023. It replaces tensors, keeps a Python number and writes into gradients."""

    def __init__(self, params: Any, scale: float, lr: float = 0.01) -> None:
        super().__init__(params, {"lr": lr, "beta": 0.9, "weight_decay": 0.1})
        self.scale = scale

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["momentum"], state["count"] = torch.ones_like(p), 0
                state["count"] += 1
                p.grad.mul_(self.scale)
                update = torch.sign(0.9 * state["momentum"] + 0.1 * p.grad) / state["count"]
                p.data = p.data * (1 - group["lr"] * group["weight_decay"]) - group["lr"] * update
                state["momentum"] = group["beta"] * state["momentum"] + (1 - group["beta"]) * p.grad


def test_an_optimizer_of_the_user_steps_like_itself_and_its_hooks_are_left_alone() -> None:
    line = Line()
    make: Make = lambda p: Lion(p, scale=2.0)  # noqa: E731
    stepper, reference, whole = pair(make, line)
    stepper.optimizer.register_step_pre_hook(lambda *_: pytest.fail("a hook is for whole steps"))
    for _ in range(3):
        gradient = line.gradient()
        given = gradient.clone()
        stepper.begin()
        stepper.step(0, gradient)
        assert torch.equal(gradient, given)
        apply(reference, whole, line, gradient.clone())
    for (a, b), p in zip(line.spans, whole, strict=True):
        torch.testing.assert_close(line.master[a:b], p.detach())
        torch.testing.assert_close(stepper.blocks[0].read("momentum", a, b), reference.state[p]["momentum"])
        assert stepper.blocks[0].scalars(a) == {"count": 3}


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_master_values_of_other_precisions(dtype: torch.dtype) -> None:
    line = Line(dtype=dtype)
    stepper, reference, whole = pair(FUSED["adamw"], line)
    for _ in range(3):
        gradient = line.gradient(dtype)
        apply(reference, whole, line, gradient)
        stepper.begin()
        stepper.step(0, gradient)
    for (a, b), p in zip(line.spans, whole, strict=True):
        assert torch.equal(line.master[a:b], p.detach())


@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_gradients_are_cast_and_scaled_and_new_values_are_cast_out(out_dtype: torch.dtype) -> None:
    line = Line()
    stepper, reference, whole = pair(FUSED["adamw"], line)
    out = torch.full((line.master.numel(),), 3.0, dtype=out_dtype)
    for _ in range(3):
        gradient = line.gradient(torch.bfloat16)
        given = gradient.clone()
        apply(reference, whole, line, gradient.float() * 0.3)
        stepper.begin()
        stepper.step(0, gradient, out, scale=0.3)
        assert torch.equal(gradient, given)
    for (a, b), p in zip(line.spans, whole, strict=True):
        assert torch.equal(line.master[a:b], p.detach())
        assert torch.equal(out[a:b], p.detach().to(out_dtype))


def test_settings_are_those_of_begin_whatever_changes_meanwhile() -> None:
    line = Line()
    stepper, reference, whole = pair(FUSED["adamw_tensor_lr"], line)
    schedule = [0.1, 0.02, 0.005]
    settings = []
    for lr in schedule:
        for optimizer in (stepper.optimizer, reference):
            optimizer.param_groups[0]["lr"].fill_(lr)
            optimizer.param_groups[1]["lr"] = lr * 2
        settings.append(stepper.begin())
        gradient = line.gradient()
        apply(reference, whole, line, gradient)
        stepper.optimizer.param_groups[0]["lr"].fill_(99.0)
        stepper.step(0, gradient)
    for (a, b), p in zip(line.spans, whole, strict=True):
        assert torch.equal(line.master[a:b], p.detach())
    # A thread that lags behind gives the settings of its own step.
    first, second, third = Line((100,)), Line((100,)), Line((100,))
    optimizer = torch.optim.SGD([{"params": [one.master]} for one in (first, second, third)], lr=1.0)
    lagging = Stepper(optimizer, [Block(one.master, [Run(0, 100, i)]) for i, one in enumerate((first, second))])
    old = lagging.begin()
    optimizer.param_groups[0]["lr"] = optimizer.param_groups[1]["lr"] = 0.5
    lagging.begin()
    ones = torch.ones_like(first.master)
    lagging.step(0, ones, settings=old)
    lagging.step(1, ones)
    assert torch.equal(first.master[:100], third.master[:100] - 1.0)
    assert torch.equal(second.master[:100], third.master[:100] - 0.5)


@pytest.mark.parametrize("name", ["adamw", "sgd_momentum", "rmsprop"])
def test_parameters_without_a_gradient_are_skipped_as_in_pytorch(name: str) -> None:
    line = Line((40, 300_000, 33, 16))
    stepper, reference, whole = pair({**FUSED, **OTHERS}[name], line)
    out = torch.empty_like(line.master)
    for absent in ([1], [], [0, 1], [3], [2]):
        gradient = line.gradient()
        if name == "sgd_momentum":  # PyTorch's fused SGD cannot begin some parameters later than others
            for group in reference.param_groups:
                group["fused"] = False
        for i, (p, (a, b)) in enumerate(zip(whole, line.spans, strict=True)):
            p.grad = None if i in absent else gradient[a:b].clone()
        reference.step()
        stepper.begin()
        stepper.step(0, gradient, out, absent=[line.spans[i] for i in absent])
    for (a, b), p in zip(line.spans, whole, strict=True):
        torch.testing.assert_close(line.master[a:b], p.detach(), rtol=1e-6, atol=1e-7)
        assert torch.equal(out[a:b], line.master[a:b])
        if "step" in reference.state[p]:
            assert (stepper.blocks[0].scalars(a) or {})["step"] == reference.state[p]["step"]


def test_a_parameter_that_was_never_stepped_has_no_scalars_and_its_state_is_as_at_first() -> None:
    line = Line((40, 33))
    stepper, _, _ = pair(FUSED["adagrad"], line)
    assert stepper.blocks[0].scalars() is None
    stepper.begin()
    stepper.step(0, line.gradient(), absent=[line.spans[0]])
    assert stepper.blocks[0].scalars(line.spans[0][0]) is None
    assert (stepper.blocks[0].read("sum", *line.spans[0]) == 0.5).all()
    assert stepper.blocks[0].scalars(line.spans[1][0]) == {"step": 1.0}
    with pytest.raises(ValueError, match="padding"):
        stepper.blocks[0].scalars(40)


@pytest.mark.parametrize("name", ["adamw_amsgrad", "sgd_momentum", "nadam", "rprop", "adagrad"])
def test_state_goes_out_of_one_stepper_and_into_another(name: str) -> None:
    make = {**FUSED, **OTHERS}[name]
    line = Line()
    stepper, _, _ = pair(make, line)
    gradients = [line.gradient() for _ in range(4)]
    for gradient in gradients[:2]:
        stepper.begin()
        stepper.step(0, gradient)
    other_line = Line(seed=1)
    other, _, _ = pair(make, other_line)
    for a, b in line.spans:
        half = (a + b) // 2  # lines come in pieces
        for low, high in ((a, half), (half, b)):
            other.blocks[0].load(
                {k: stepper.blocks[0].read(k, low, high) for k in stepper.blocks[0].names()}, start=low, stop=high
            )
        other.blocks[0].load(stepper.blocks[0].scalars(a) or {}, start=a, stop=b)
    other.steps = stepper.steps
    for gradient in gradients[2:]:
        for one in (stepper, other):
            one.begin()
            one.step(0, gradient)
    for a, b in line.spans:
        assert torch.equal(line.master[a:b], other_line.master[a:b])


def test_a_reset_makes_the_next_step_the_first() -> None:
    line = Line((100,))
    stepper, _, _ = pair(FUSED["adamw"], line)
    begun = line.master.clone()
    gradient = line.gradient()
    results = []
    for _ in range(2):
        stepper.blocks[0].load({"master": begun})
        stepper.begin()
        stepper.step(0, gradient)
        results.append(line.master.clone())
        stepper.blocks[0].reset()
    assert torch.equal(*results)


def test_many_blocks_are_stepped_one_by_one() -> None:
    lines = [Line((100, 20), seed=i) for i in range(3)]
    optimizer = torch.optim.AdamW([v for line in lines for v in line.views()], lr=0.1)
    stepper = Stepper(optimizer, [Block(line.master, [Run(*span, 0) for span in line.spans]) for line in lines])
    stepper.begin()
    for i in (2, 0):
        stepper.step(i, lines[i].gradient())
    a, b = lines[1].spans[0]
    assert torch.equal(lines[1].master[a:b], lines[1].values[0])
    assert not torch.equal(lines[2].master[a:b], lines[2].values[0])
    assert stepper.blocks[1].scalars() is None
    assert stepper.blocks[2].scalars() == {"step": 1.0}


def test_cells_are_counted_from_the_beginning_of_a_chunk() -> None:
    runs = Runs([Run(0, 150, 0), Run(160, 1000, 1)], 1000, 2)
    sgd = torch.optim.SGD([torch.zeros(1)], lr=0.1)
    batches = runs.batches([], make_rule(sgd), [sgd.defaults, sgd.defaults])
    cells = runs.cells(batches, 100, 500, 128)
    assert cells == [{0: [0, 50], 1: [60, 128]}, {1: [128, 256]}, {1: [256, 384]}, {1: [384, 400]}]


def begun_pair(threads: int) -> tuple[Stepper, list[Tensor], list[torch.nn.Parameter], torch.optim.Optimizer]:
    values = [torch.linspace(-1.0, 1.0, 300_000), torch.linspace(0.0, 2.0, 500_000)]
    whole = [torch.nn.Parameter(line.clone()) for line in values]
    blocks = [Block(line, [Run(0, line.numel(), 0)]) for line in values]
    stepper = Stepper(torch.optim.AdamW([torch.zeros(1)], lr=0.01), blocks, threads=threads)
    return stepper, values, whole, torch.optim.AdamW(whole, lr=0.01, fused=True)


def test_blocks_may_be_begun_together() -> None:
    stepper, values, whole, reference = begun_pair(threads=3)
    for step in range(3):
        for p in whole:
            p.grad = torch.cos(p.detach() + step)
        stepper.begin()
        ends = [stepper.start(i, torch.cos(line + step)) for i, line in enumerate(values)]
        reference.step()
        for end in reversed(ends):
            end()
    for line, p in zip(values, whole, strict=True):
        assert torch.equal(line, p.detach())


def test_an_error_of_a_block_is_raised_by_its_end_and_the_other_is_stepped(monkeypatch: pytest.MonkeyPatch) -> None:
    stepper, values, whole, reference = begun_pair(threads=2)
    stepper._pool = None
    for worker in stepper._workers._idle:
        real = worker.step_tiles

        def failing(*arguments: Any, real: Any = real) -> int:
            if any(isinstance(a, Tensor) and a.numel() == 300_000 for a in arguments):
                raise RuntimeError("out of luck")
            done: int = real(*arguments)
            return done

        monkeypatch.setattr(worker, "step_tiles", failing)
    stepper.begin()
    ends = [stepper.start(i, torch.cos(line)) for i, line in enumerate(values)]
    with pytest.raises(RuntimeError, match="out of luck"):
        ends[0]()
    ends[1]()
    whole[1].grad = torch.cos(whole[1].detach())
    reference.step()
    assert torch.equal(values[1], whole[1].detach())
    assert stepper.blocks[0].scalars() is None


def test_a_block_may_be_empty_or_all_padding() -> None:
    values = torch.ones(40)
    optimizer = torch.optim.AdamW([values])
    stepper = Stepper(optimizer, [Block(torch.zeros(0), []), Block(values, [])], threads=2)
    stepper.begin()
    out = torch.zeros(40)
    stepper.step(0, torch.zeros(0), torch.zeros(0))
    stepper.step(1, torch.ones(40), out)
    assert (values == 1).all()
    assert (out == 0).all()
    assert [block.names() for block in stepper.blocks] == [["master"], ["master"]]
    assert stepper.blocks[1].scalars() is None
    stepper.flush()


# Moments in 16 bits


@pytest.mark.parametrize("name", ["adamw", "rmsprop"])
def test_bf16_moments_stay_close_to_fp32(name: str) -> None:
    """Twenty steps: the ways taken differ by a few percent of their length."""
    lines = [Line(), Line()]
    steppers = [
        pair({**FUSED, **OTHERS}[name], line, moments=m)[0]
        for line, m in zip(lines, (torch.float32, torch.bfloat16), strict=True)
    ]
    begun = lines[0].master.clone()
    for _ in range(20):
        gradient = lines[0].gradient() * 0.1 + 0.05
        for stepper in steppers:
            stepper.begin()
            stepper.step(0, gradient)
    exact, near = (line.master - begun for line in lines)
    assert 0 < (near - exact).norm() / exact.norm() < 0.02
    for key in steppers[1].blocks[0].names()[1:]:
        assert steppers[1].blocks[0].read(key).dtype == torch.float32
        assert steppers[1].blocks[0].chunks[0].open()[key].dtype == torch.bfloat16


def test_the_second_moment_in_bf16_decays_without_bias() -> None:
    """Rounded to nearest it would stand still at beta2 = 0.999: 0.999 of a number rounds to the number."""
    n, steps = 4096, 600
    values = torch.zeros(n)
    optimizer = torch.optim.Adam([values], lr=0.0)
    stepper = Stepper(optimizer, [Block(values, [Run(0, n, 0)])], moments=torch.bfloat16)
    stepper.blocks[0].load({"exp_avg": torch.ones(n), "exp_avg_sq": torch.ones(n), "step": 10.0})
    for _ in range(steps):
        stepper.begin()
        stepper.step(0, torch.zeros(n))
    found = stepper.blocks[0].read("exp_avg_sq")
    assert found.mean().item() == pytest.approx(0.999**steps, rel=0.01)
    assert found.std().item() < 0.05
    assert found.unique().numel() > 10


def test_bf16_moments_do_not_depend_on_how_the_work_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    results = []
    for threads, cell in ((1, 1 << 18), (3, 1 << 12), (None, 5 << 14)):
        line = Line()
        stepper, _, _ = pair(FUSED["adamw"], line, moments=torch.bfloat16, threads=threads, seed=5)
        monkeypatch.setattr(stepper._workers, "choose_cell", lambda *_, cell=cell: cell)
        for _ in range(3):
            stepper.begin()
            stepper.step(0, line.gradient(torch.bfloat16))
        results.append((line.master, stepper.blocks[0].read("exp_avg_sq")))
    for master, second in results[1:]:
        assert torch.equal(master, results[0][0])
        assert torch.equal(second, results[0][1])


# The inner loop in its two forms


@pytest.mark.parametrize("kind", [fused.ADAM, fused.ADAMW, fused.SGD, fused.ADAGRAD])
def test_a_form_of_the_inner_loop_that_drops_or_changes_a_step_is_found_out(kind: int) -> None:
    def idle(*arguments: Any) -> int:
        return 0

    def rough(*arguments: Any) -> int:
        done = fused.step_tiles(*arguments)
        arguments[10][-1].mul_(1.01)  # the last of the lines
        return done

    assert fused.agrees(fused.step_tiles, kind)
    assert not fused.agrees(idle, kind)
    assert not fused.agrees(rough, kind)


def test_the_inner_loop_is_compiled_where_torchscript_is_there_and_plain_otherwise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert isinstance(fused.compile_step_tiles(), torch.jit.ScriptFunction)

    def gone(function: Any) -> Any:
        raise RuntimeError("TorchScript has been removed")

    monkeypatch.setattr(torch.jit, "script", gone)
    assert fused.compile_step_tiles.__wrapped__() is fused.step_tiles
    monkeypatch.setattr(torch.jit, "script", lambda function: lambda *_: 0)
    assert fused.compile_step_tiles.__wrapped__() is fused.step_tiles


@pytest.mark.parametrize("moments", [torch.float32, torch.bfloat16])
def test_the_plain_inner_loop_steps_bitwise_like_the_compiled_one(
    moments: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = [Line(), Line()]
    steppers = [pair(FUSED["adamw_amsgrad"], line, moments=moments, threads=2)[0] for line in lines]
    for worker in steppers[1]._workers._idle:
        monkeypatch.setattr(worker, "step_tiles", fused.step_tiles)
    for _ in range(3):
        gradient = lines[0].gradient(torch.bfloat16)
        for stepper in steppers:
            stepper.begin()
            stepper.step(0, gradient, scale=0.5)
    assert torch.equal(lines[0].master, lines[1].master)


# What is refused


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda p: torch.optim.LBFGS(p), "closure"),
        (lambda p: torch.optim.SparseAdam(p), "sparse"),
        (lambda p: torch.optim.Adafactor(p), "rows and columns"),
        (lambda p: torch.optim.Muon([torch.nn.Parameter(torch.zeros(2, 2))]), "matrices"),
        (lambda p: torch.optim.Adam(p, differentiable=True), "differentiable=False"),
    ],
)
def test_optimizers_that_look_at_more_than_an_element_are_refused(make: Make, reason: str) -> None:
    line = torch.nn.Parameter(torch.zeros(20))
    with pytest.raises(ValueError, match=reason):
        Stepper(make([line]), [])  # type: ignore[list-item]


class Normed(torch.optim.SGD):
    """Divides a gradient by its norm: not elementwise."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            p -= self.param_groups[0]["lr"] * p.grad / p.grad.norm()


class Counting(torch.optim.SGD):
    """Keeps its step in itself."""

    count = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.count += 1
        for p in self.param_groups[0]["params"]:
            p -= self.param_groups[0]["lr"] / self.count * p.grad


@pytest.mark.parametrize(("kind", "reason"), [(Normed, "differently"), (Counting, "changes its own settings")])
def test_an_optimizer_of_the_user_that_is_make_refusal_is_refused(kind: type[torch.optim.SGD], reason: str) -> None:
    state = torch.get_rng_state()
    with pytest.raises(ValueError, match=reason):
        Stepper(kind([torch.nn.Parameter(torch.zeros(3))], lr=0.1), [])
    assert torch.equal(torch.get_rng_state(), state)


def test_wrong_arguments_are_refused_with_what_was_expected() -> None:
    line = Line((40,))
    stepper, _, _ = pair(FUSED["adamw"], line)
    n = line.master.numel()
    with pytest.raises(RuntimeError, match="begin"):
        stepper.step(0, line.gradient())
    stepper.begin()
    with pytest.raises(ValueError, match=f"{n} elements"):
        stepper.step(0, torch.zeros(n - 1))
    with pytest.raises(ValueError, match="floating point"):
        stepper.step(0, torch.zeros(n), torch.zeros(n, dtype=torch.int32))
    with pytest.raises(ValueError, match="no line 'momentum'"):
        stepper.blocks[0].read("momentum")
    with pytest.raises(ValueError, match="elements 0 to 999"):
        stepper.blocks[0].read("master", 0, 999)
    with pytest.raises(ValueError, match="expected lines"):
        stepper.blocks[0].load({"exp_avg": torch.zeros(n), "stride": 3})
    with pytest.raises(ValueError, match="3 elements of 'exp_avg'"):
        stepper.blocks[0].load({"exp_avg": torch.zeros(3)})
    sgd = torch.optim.SGD([torch.zeros(3)], lr=0.1)
    with pytest.raises(ValueError, match="do not overlap"):
        Stepper(sgd, [Block(torch.zeros(9), [Run(0, 5, 0), Run(4, 9, 0)])])
    with pytest.raises(ValueError, match="1 param groups"):
        Stepper(sgd, [Block(torch.zeros(9), [Run(0, 5, 1)])])
    with pytest.raises(ValueError, match="1-D"):
        Block(torch.zeros(3, 3), [])
    with pytest.raises(ValueError, match="no disk"):
        Stepper(sgd, [Block(torch.zeros(9), [], "disk")])
    with pytest.raises(ValueError, match="bfloat16"):
        Stepper(sgd, [], moments=torch.float16)
    with pytest.raises(TypeError, match="Optimizer"):
        Stepper(object(), [])  # type: ignore[arg-type]


def test_a_setting_that_needs_state_which_is_not_there_is_refused() -> None:
    line = Line((40,))
    stepper, _, _ = pair(FUSED["sgd"], line)
    stepper.optimizer.param_groups[0]["momentum"] = 0.9
    stepper.begin()
    with pytest.raises(ValueError, match="momentum_buffer"):
        stepper.step(0, line.gradient())


def test_torch_keeps_its_number_of_threads() -> None:
    before = torch.get_num_threads()
    stepper = Stepper(torch.optim.SGD([torch.zeros(3)], lr=0.1), [], threads=3)
    assert stepper._workers._pool is not None
    inside = [stepper._workers._pool.submit(torch.get_num_threads).result() for _ in range(9)]
    found = []
    thread = threading.Thread(target=lambda: found.append(torch.get_num_threads()))
    thread.start()
    thread.join()
    stepper.close()
    assert [torch.get_num_threads(), *found] == [before, before]
    assert inside == [1] * 9
