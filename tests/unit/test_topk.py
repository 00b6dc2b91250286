"""Top-k with error feedback and Deep Gradient Compression's options, against plain references in one process."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from method_cases import reduce_window
from unisono.methods.buckets import Bucket
from unisono.methods.reducer import Reducer
from unisono.methods.reducers.topk import topk
from unisono.world import World
from unisono.world.virtual import run_threads

SHAPES: list[tuple[int, ...]] = [(20, 30), (7,), (), (0, 3), (5, 2, 4), (200, 150), (1, 1)]
Inputs = Callable[[int, int], list[Tensor]]


class Step(NamedTuple):
    mean: list[Tensor]
    sent: list[Tensor]
    state: dict[str, Any]
    bytes_sent: int


def gradients(rank: int, step: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in SHAPES]


def run(
    make: Callable[[], Reducer], inputs: Inputs, size: int, steps: int, lr: Callable[[int], float] = lambda step: 1.0
) -> list[list[Step]]:
    """By rank and step: copies of what came out."""

    def work(world: World) -> list[Step]:
        reducer, found = make(), []
        named = [(f"p{i}", torch.zeros_like(x)) for i, x in enumerate(inputs(world.rank, 0))]
        bucket = Bucket(0, named, world.empty)
        state = reducer.init(bucket)
        for step in range(steps):
            for view, x in zip(bucket.tensors, inputs(world.rank, step), strict=True):
                view.copy_(x)
            bucket.lr = [lr(step)] * len(named)
            before = sum(r.bytes_sent for r in world.ledger.records)
            reduced, state = reduce_window(reducer, bucket, state, world)
            assert callable(reduced.sent)
            copied = {k: [v.clone() for v in bucket.views(x)] if isinstance(x, Tensor) else x for k, x in state.items()}
            after = sum(r.bytes_sent for r in world.ledger.records)
            found.append(Step([x.clone() for x in reduced.mean], reduced.sent_of([]), copied, after - before))
        return found

    return run_threads(work, size)


def largest(x: Tensor, k: float) -> Tensor:
    """A mask of the k largest magnitudes, by a stable sort."""
    count = max(1, round(k * x.numel()))
    mask = torch.zeros(x.numel(), dtype=torch.bool)
    mask[torch.sort(x.abs().flatten(), descending=True, stable=True).indices[:count]] = True
    return mask.view(x.shape)


def mean_of(parts: list[Tensor]) -> Tensor:
    """Divide, then sum, in rank order."""
    total = torch.zeros_like(parts[0])
    for part in parts:
        total += part * (1 / len(parts))
    return total


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("k", [0.01, 0.1, 1.0])
def test_every_step_equals_the_definition(size: int, k: float) -> None:
    found = run(lambda: topk(k), gradients, size, 5)
    residuals = [[torch.zeros(shape, dtype=torch.float64) for shape in SHAPES] for _ in range(size)]
    for step in range(5):
        for i, shape in enumerate(SHAPES):
            p = [residuals[r][i] + gradients(r, step)[i] for r in range(size)]
            full = len(shape) < 2 or 0 in shape
            sent = p if full else [x * largest(x, k) for x in p]
            mean = mean_of(sent)
            for r in range(size):
                residuals[r][i] = p[r] - sent[r]
                assert torch.equal(found[r][step].state["residual"][i], residuals[r][i])
                assert torch.equal(found[r][step].sent[i], sent[r])
                if full:
                    assert torch.allclose(found[r][step].mean[i], mean, rtol=1e-15)
                else:
                    assert torch.equal(found[r][step].mean[i], mean)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_outputs_and_residuals_add_up_to_the_inputs(dtype: torch.dtype) -> None:
    steps, size = 8, 3
    found = run(lambda: topk(0.02), lambda r, s: gradients(r, s, dtype), size, steps)
    eps = torch.finfo(dtype if dtype.itemsize >= 4 else torch.float32).eps
    for i in range(len(SHAPES)):
        if len(SHAPES[i]) < 2:
            continue
        given = sum(gradients(r, s, dtype)[i].double() for r in range(size) for s in range(steps)) / size
        sent = sum(found[r][s].sent[i].double() for r in range(size) for s in range(steps)) / size
        kept = sum(found[r][-1].state["residual"][i].double() for r in range(size)) / size
        assert torch.allclose(sent + kept, given, rtol=0, atol=40 * eps)
        out = sum(found[0][s].mean[i].double() for s in range(steps))
        bound = 40 * torch.finfo(dtype).eps  # the mean itself is rounded to the gradient's dtype
        assert torch.allclose(out + kept, given, rtol=0, atol=bound)


def test_conservation_is_exact_in_fp64() -> None:
    """Whole numbers have no rounding: the sums are equal bit by bit."""
    steps, size = 20, 4

    def whole(rank: int, step: int) -> list[Tensor]:
        return [torch.round(x * 1000) for x in gradients(rank, step)]

    found = run(lambda: topk(0.01), whole, size, steps)
    for i in range(len(SHAPES)):
        given = sum(whole(r, s)[i] for r in range(size) for s in range(steps)) / size
        kept = sum(found[r][-1].state["residual"][i] for r in range(size)) / size
        assert torch.equal(sum(found[0][s].mean[i] for s in range(steps)) + kept, given)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_k_of_one_is_the_mean(size: int, dtype: torch.dtype) -> None:
    found = run(lambda: topk(1.0), lambda r, s: gradients(r, s, dtype), size, 2)
    for i in range(len(SHAPES)):
        wanted = torch.stack([gradients(r, 1, dtype)[i].double() for r in range(size)]).mean(0)
        eps = torch.finfo(dtype).eps
        assert torch.allclose(found[0][1].mean[i].double(), wanted, rtol=eps, atol=eps)
        assert not found[0][1].state["residual"][i].any()


def test_narrow_means_are_rounded_once() -> None:
    """Three thirds of a number in bf16 are that number."""
    x = gradients(0, 0, torch.bfloat16)
    found = run(lambda: topk(1.0, feedback=False), lambda r, s: x, 3, 1)
    assert all(map(torch.equal, found[0][0].mean, x))


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64], ids=str)
def test_bytes_are_values_and_places_for_every_other_rank(size: int, dtype: torch.dtype) -> None:
    found = run(lambda: topk(0.1), lambda r, s: gradients(r, s, dtype), size, 1)
    numbers = 60 + 4 + 3000 + 1  # a tenth of each matrix, at least one
    full = 7 + 1
    wanted = (size - 1) * numbers * (dtype.itemsize + 4) + math.ceil(2 * (size - 1) * full * dtype.itemsize / size)
    assert {rows[0].bytes_sent for rows in found} == {wanted}
    bucket = Bucket(
        0, [(str(i), x) for i, x in enumerate(gradients(0, 0, dtype))], lambda n, d: torch.empty(n, dtype=d)
    )
    sends = topk(0.1).sends
    assert sends is not None
    assert sends(bucket, size) == wanted


def test_what_is_kept_gets_its_turn() -> None:
    """A constant gradient: on average it goes through, and the residual stays bounded."""
    g = gradients(0, 0)
    found = run(lambda: topk(0.1), lambda r, s: g, 1, 200)[0]
    for i in (0, 4, 5):
        through = sum(step.mean[i] for step in found) / 200
        assert (through - g[i]).abs().max() < 0.1
        assert found[-1].state["residual"][i].abs().max() < 15 * g[i].abs().max()


def test_without_feedback_nothing_is_kept() -> None:
    reducer = topk(0.1, feedback=False)
    found = run(lambda: topk(0.1, feedback=False), gradients, 2, 2)
    assert not reducer.memory
    assert set(found[0][-1].state) == {"step"}
    wanted = mean_of([x * largest(x, 0.1) for x in (gradients(0, 1)[0], gradients(1, 1)[0])])
    assert torch.equal(found[0][1].mean[0], wanted)


def test_the_residual_follows_the_learning_rate() -> None:
    """What was kept at rate 0.4 counts four times as much at rate 0.1."""
    rates = [0.4, 0.4, 0.1]
    found = run(lambda: topk(0.01), gradients, 1, 3, lr=lambda step: rates[step])[0]
    p = found[1].state["residual"][5] * (0.4 / 0.1) + gradients(0, 2)[5]
    assert torch.equal(found[2].mean[5], p * largest(p, 0.01))


# Awkward numbers and shapes ------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("where", [5, 1], ids=["in a matrix", "in a vector"])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_an_overflow_on_one_rank_changes_no_state_on_any(
    bad: float, where: int, momentum: float, dtype: torch.dtype
) -> None:
    def inputs(rank: int, step: int) -> list[Tensor]:
        made = gradients(rank, step, dtype)
        if step == 2 and rank == 1:
            made[where].view(-1)[3] = bad
        return made

    found = run(lambda: topk(0.01, momentum=momentum), inputs, 3, 4)
    for rows in found:
        assert not all(x.isfinite().all() for x in rows[2].mean)
        for name in ("residual", "velocity") if momentum else ("residual",):
            assert all(map(torch.equal, rows[1].state[name], rows[2].state[name]))
            assert not all(map(torch.equal, rows[2].state[name], rows[3].state[name]))
        assert all(x.isfinite().all() for x in rows[3].mean)
        assert rows[3].state["step"] == 4


def test_the_step_after_an_overflow_is_as_if_it_had_not_been() -> None:
    def inputs(rank: int, step: int) -> list[Tensor]:
        made = gradients(rank, step - (step > 1))
        if step == 1:
            made[0][0, 0] = math.nan
        return made

    found, plain = run(lambda: topk(0.01), inputs, 2, 4), run(lambda: topk(0.01), gradients, 2, 3)
    for there, here in ((0, 0), (2, 1), (3, 2)):
        assert all(map(torch.equal, found[0][there].mean, plain[0][here].mean))


def test_large_16_bit_numbers_add_up_without_overflow() -> None:
    found = run(lambda: topk(0.25), lambda r, s: [torch.full((4, 4), 60000.0, dtype=torch.float16)], 2, 6)
    for step in found[0]:
        assert step.mean[0].isfinite().all()
    kept, sent = found[0][-1].state["residual"][0].double(), sum(s.sent[0].double() for s in found[0])
    assert torch.equal(sent + kept, torch.full((4, 4), 360000.0, dtype=torch.float64))


def test_memory_formats_give_the_same_numbers() -> None:
    torch.manual_seed(0)
    x = torch.randn(8, 3, 5, 5)
    last = x.contiguous(memory_format=torch.channels_last)
    plain = run(lambda: topk(0.1), lambda r, s: [x], 2, 1)[0][0]
    other = run(lambda: topk(0.1), lambda r, s: [last], 2, 1)[0][0]
    assert torch.equal(plain.mean[0], other.mean[0])
    assert torch.equal(plain.state["residual"][0], other.state["residual"][0])


def test_what_lies_between_tensors_is_never_selected() -> None:
    reducer = topk(1.0)
    bucket = Bucket(0, [("a", torch.zeros(3, 3)), ("b", torch.zeros(2, 2))], lambda n, d: torch.empty(n, dtype=d))
    state = reducer.init(bucket)
    state["residual"].fill_(1000.0)
    for view in bucket.views(state["residual"]):
        view.zero_()
    for view in bucket.tensors:
        view.fill_(1.0)
    reduced, state = reducer.reduce(bucket, state, World())
    assert all((x == 1).all() for x in reduced.mean)
    assert not any(x.any() for x in bucket.views(state["residual"]))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_what_another_method_kept_of_a_vector_is_sent(dtype: torch.dtype) -> None:
    reducer = topk(0.1)
    named = [("w", torch.zeros(9, 9, dtype=dtype)), ("b", torch.zeros(5, dtype=dtype))]
    bucket = Bucket(0, named, lambda n, d: torch.empty(n, dtype=d))
    state = reducer.init(bucket)
    bucket.views(state["residual"])[1].fill_(3.0)
    bucket.tensors[1].fill_(4.0)
    reduced, state = reducer.reduce(bucket, state, World())
    assert reduced.mean[1].tolist() == [7.0] * 5
    assert not state["residual"].any()


def test_a_bucket_of_vectors_is_exact() -> None:
    found = run(lambda: topk(0.01), lambda r, s: [torch.arange(5.0) + r], 2, 1)
    assert found[0][0].mean[0].tolist() == [0.5, 1.5, 2.5, 3.5, 4.5]


def test_a_bucket_too_long_for_32_bit_places_is_refused() -> None:
    class Long:
        flat = torch.empty(2**31, dtype=torch.uint8, device="meta")
        names = ("w",)

    with pytest.raises(ValueError, match="32-bit"):
        topk().init(Long())  # type: ignore[arg-type]


# Deep Gradient Compression -------------------------------------------------------------------------------------


class Paper:
    """The paper's algorithm for one tensor and N workers, as it is written there."""

    def __init__(self, size: int, shape: tuple[int, ...], m: float, clip: float | None, masking: bool) -> None:
        self.m, self.clip, self.masking, self.size = m, clip, masking, size
        self.u = [torch.zeros(shape, dtype=torch.float64) for _ in range(size)]
        self.v = [torch.zeros(shape, dtype=torch.float64) for _ in range(size)]

    def step(self, grads: list[Tensor], k: float) -> Tensor:
        total = torch.zeros_like(grads[0])
        for n, g in enumerate(grads):
            if self.clip is not None:
                threshold = self.clip * self.size**-0.5
                g = g * min(1.0, threshold / g.norm().item())
            self.u[n] = self.m * self.u[n] + g
            self.v[n] = self.v[n] + self.u[n]
            mask = largest(self.v[n], k)
            total += self.v[n] * mask / self.size
            self.v[n] = self.v[n] * ~mask
            if self.masking:
                self.u[n] = self.u[n] * ~mask
        return total


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize(("masking", "clip"), [(True, None), (False, None), (True, 2.0)])
def test_momentum_correction_masking_and_clipping_follow_the_paper(
    size: int, masking: bool, clip: float | None
) -> None:
    found = run(lambda: topk(0.02, momentum=0.9, masking=masking, clip=clip), gradients, size, 20)
    for i in (0, 4, 5, 6):
        paper = Paper(size, SHAPES[i], 0.9, clip, masking)
        for step in range(20):
            wanted = paper.step([gradients(r, step)[i] for r in range(size)], 0.02)
            assert torch.allclose(found[0][step].mean[i], wanted, rtol=1e-12, atol=1e-13), f"step {step}"
        for r in range(size):
            assert torch.allclose(found[r][-1].state["residual"][i], paper.v[r], rtol=1e-12, atol=1e-13)
            assert torch.allclose(found[r][-1].state["velocity"][i], paper.u[r], rtol=1e-12, atol=1e-13)


def test_tensors_in_full_get_plain_momentum() -> None:
    """Over any number of steps, as torch.optim.SGD(momentum=0.9) would move them."""
    found = run(lambda: topk(0.02, momentum=0.9), gradients, 3, 10)
    param = torch.zeros(7, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.SGD([param], lr=1.0, momentum=0.9)
    moved = torch.zeros(7, dtype=torch.float64)
    for step in range(10):
        param.grad = torch.stack([gradients(r, step)[1] for r in range(3)]).mean(0)
        optimizer.step()
        moved -= found[0][step].mean[1]
        assert torch.allclose(moved, param.detach(), rtol=1e-12)


def test_momentum_with_k_of_one_and_no_masking_is_plain_momentum() -> None:
    found = run(lambda: topk(1.0, momentum=0.9, masking=False), gradients, 2, 5)
    u = torch.zeros(20, 30, dtype=torch.float64)
    for step in range(5):
        u = 0.9 * u + (gradients(0, step)[0] + gradients(1, step)[0]) / 2
        assert torch.allclose(found[0][step].mean[0], u, rtol=1e-12)


def test_clipping_limits_each_tensor_to_its_share_of_the_norm() -> None:
    found = run(lambda: topk(1.0, clip=0.5), gradients, 4, 1)
    for i in (0, 1, 4, 5):
        assert math.isclose(found[2][0].sent[i].norm().item(), 0.5 / math.sqrt(4), rel_tol=1e-12)
    small = run(lambda: topk(1.0, clip=0.5), lambda r, s: [torch.full((2, 2), 0.01)], 4, 1)
    assert torch.equal(small[0][0].sent[0], torch.full((2, 2), 0.01))
    zero = run(lambda: topk(1.0, clip=0.5), lambda r, s: [torch.zeros(2, 2)], 1, 1)
    assert not zero[0][0].mean[0].any()


def test_amps_loss_scale_changes_neither_velocity_nor_clipping() -> None:
    """Gradients come multiplied by the scale; it may change from step to step."""
    scales = [64.0, 64.0, 32.0, 128.0, 128.0]

    def work(scaled: bool) -> list[list[Tensor]]:
        reducer, found, world = topk(0.1, momentum=0.9, clip=2.0), [], World()
        bucket = Bucket(0, [(f"p{i}", torch.zeros_like(x)) for i, x in enumerate(gradients(0, 0))], world.empty)
        state = reducer.init(bucket)
        for step, scale in enumerate(scales):
            bucket.scale = scale if scaled else 1.0
            bucket.lr = [0.1 / bucket.scale] * len(bucket.names)
            for view, x in zip(bucket.tensors, gradients(0, step), strict=True):
                view.copy_(x * bucket.scale)
            reduced, state = reduce_window(reducer, bucket, state, world)
            found.append([x / bucket.scale for x in reduced.mean])
        return found

    for plain, scaled in zip(work(False), work(True), strict=True):
        assert all(torch.allclose(a, b, rtol=1e-12, atol=1e-13) for a, b in zip(plain, scaled, strict=True))


def test_sparsity_ramps_up_as_in_the_paper() -> None:
    """To 99.9 % over 75, 93.75, 98.4375 and 99.609375 %."""
    found = run(lambda: topk(0.001, ramp=8), lambda r, s: [torch.randn(64, 64)], 2, 10)[0]
    sent = [step.bytes_sent // 8 for step in found]
    assert sent == [1024, 1024, 256, 256, 64, 64, 16, 16, 4, 4]


@pytest.mark.parametrize(
    ("k", "ramp", "wanted"), [(0.25, 4, [25] * 5), (0.1, 2, [25, 25, 10, 10]), (1.0, 3, [100] * 4)]
)
def test_a_ramp_ends_at_k(k: float, ramp: int, wanted: list[int]) -> None:
    found = run(lambda: topk(k, ramp=ramp), lambda r, s: [torch.randn(10, 10)], 1, len(wanted))[0]
    assert [int((step.sent[0] != 0).sum()) for step in found] == wanted


def test_the_optimizers_own_momentum_is_refused() -> None:
    params = [torch.nn.Parameter(torch.zeros(2))]
    check = topk(momentum=0.9).check
    assert check is not None
    check(torch.optim.SGD(params, lr=0.1), World())
    with pytest.raises(ValueError, match=r"SGD has 0\.8 of its own"):
        check(torch.optim.SGD(params, lr=0.1, momentum=0.8), World())
    with pytest.raises(ValueError, match=r"AdamW has 0\.9 of its own"):
        check(torch.optim.AdamW(params), World())
    assert topk().check is None


@pytest.mark.parametrize(
    ("options", "error"),
    [
        *(({"k": bad}, ValueError) for bad in (0, 0.0, -0.1, 1.1, 10, math.nan, math.inf)),
        *(({"k": bad}, TypeError) for bad in ("1%", True, None, [0.1])),
        ({"feedback": 1}, TypeError),
        ({"masking": "no"}, TypeError),
        ({"momentum": 1.0}, ValueError),
        ({"momentum": -0.1}, ValueError),
        ({"momentum": math.nan}, ValueError),
        ({"momentum": "0.9"}, TypeError),
        ({"momentum": 0.9, "feedback": False}, ValueError),
        ({"clip": 0.0}, ValueError),
        ({"clip": math.inf}, ValueError),
        ({"clip": math.nan}, ValueError),
        ({"clip": "1"}, TypeError),
        ({"ramp": -1}, ValueError),
        ({"ramp": 2.0}, TypeError),
        ({"ramp": True}, TypeError),
    ],
)
def test_bad_settings_are_refused(options: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error, match=next(iter(options))):
        topk(**options)
