"""One bit a number: SignSGD's vote, and scaled signs with error feedback."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from method_cases import reduce_window
from unisono.methods.buckets import Bucket
from unisono.methods.reducer import Reducer
from unisono.methods.reducers.onebit import onebit
from unisono.methods.reducers.signsgd import signsgd
from unisono.methods.strategy import parallel
from unisono.world import World
from unisono.world.virtual import run_threads, simulate

SHAPES = [(40, 30), (7,), (), (0,), (1500,)]
Inputs = Callable[[int, int], list[Tensor]]


def numbers(rank: int, step: int = 0, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in SHAPES]


def bucket_of(tensors: list[Tensor], world: World) -> Bucket:
    return Bucket(0, [(str(i), torch.zeros_like(x)) for i, x in enumerate(tensors)], world.empty)


def reduced(reducer: Reducer, size: int, inputs: Inputs, steps: int = 1) -> list[list[Any]]:
    """By rank and step: the result, and the residual."""

    def work(world: World) -> list[Any]:
        bucket, found = bucket_of(inputs(world.rank, 0), world), []
        state = reducer.init(bucket)
        for step in range(steps):
            bucket.flat.zero_()
            for view, x in zip(bucket.tensors, inputs(world.rank, step), strict=True):
                view.copy_(x)
            result, state = reduce_window(reducer, bucket, state, world)
            residual = state.get("residual")
            kept = None if residual is None else [x.clone() for x in bucket.views(residual)]
            found.append(([x.clone() for x in result.mean], kept))
        return found

    return run_threads(work, size)


# The vote ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5])
def test_the_vote_is_the_majority_of_signs(size: int) -> None:
    """By one exchange or two: with 4 and 5 ranks parts are counted by their owners."""
    for rows in reduced(signsgd(), size, numbers):
        for i, vote in enumerate(rows[0][0]):
            votes = torch.stack([numbers(rank)[i].sign() for rank in range(size)]).sum(0)
            assert torch.equal(vote, votes.sign())


@pytest.mark.parametrize("size", [2, 3, 4, 6])
def test_a_rank_whose_tensor_is_zero_abstains(size: int) -> None:
    def inputs(rank: int, step: int) -> list[Tensor]:
        return [x if rank == 1 else torch.zeros_like(x) for x in numbers(rank)]

    for vote, x in zip(reduced(signsgd(), size, inputs)[0][0][0], numbers(1), strict=True):
        assert torch.equal(vote, x.sign())


@pytest.mark.parametrize("size", [2, 4])
def test_what_is_zero_everywhere_stays_zero_in_worlds_of_even_size(size: int) -> None:
    def inputs(rank: int, step: int) -> list[Tensor]:
        x = numbers(rank, step)
        x[0][10:20] = 0
        return x

    for vote, _ in reduced(signsgd(), size, inputs, 3)[0]:
        assert torch.equal(vote[0][10:20], torch.zeros(10, 30, dtype=torch.float64))


def test_zeros_among_other_numbers_vote_at_random_alike_on_resumed_runs() -> None:
    def inputs(rank: int, step: int) -> list[Tensor]:
        return [torch.cat([torch.ones(1), torch.zeros(4095)])]

    first, second = (vote[0][1:] for vote, _ in reduced(signsgd(), 1, inputs, 2)[0])
    assert set(first.tolist()) == {-1.0, 1.0}
    assert abs(first.mean()) < 0.08
    assert not torch.equal(first, second)
    assert torch.equal(first, reduced(signsgd(), 1, inputs)[0][0][0][0][1:])
    assert not torch.equal(first, reduced(signsgd(seed=1), 1, inputs)[0][0][0][0][1:])


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("method", [signsgd, onebit])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_an_overflow_makes_its_tensor_nan_on_every_rank(method: Any, size: int, dtype: torch.dtype) -> None:
    def inputs(rank: int, step: int) -> list[Tensor]:
        x = numbers(rank, 0, dtype)
        if rank == 1:
            x[0][3, 4] = math.inf
        return x

    for rows in reduced(method(), size, inputs):
        assert rows[0][0][0].isnan().all()
        assert rows[0][0][1].isfinite().all()


@pytest.mark.parametrize("size", [2, 3, 4, 8])
def test_votes_take_a_bit_a_number(size: int) -> None:
    d, each = 1 << 20, math.ceil((1 << 20) / size / 64) * 64
    bucket = bucket_of([torch.zeros(d // 2), torch.zeros(d // 2)], World())
    gathered, in_parts = d // 8 + 8, each // 8 + 8 + each // 4
    assert signsgd().sends(bucket, size) == (size - 1) * min(gathered, in_parts)
    assert (in_parts < gathered) == (size > 3)
    world = simulate(size)
    signsgd().reduce(bucket, signsgd().init(bucket), world)
    assert sum(record.bytes_sent for record in world.ledger.records) == signsgd().sends(bucket, size)


@pytest.mark.parametrize("told", [True, False])
@pytest.mark.parametrize("size", [1, 3])
def test_a_loss_scale_does_not_change_the_step_by_signs(size: int, told: bool) -> None:
    """A GradScaler divides the outcome by its scale: what the optimizer gets are signs. A replica that is not told of
    the scaler finds it."""

    def work(world: World) -> Tensor:
        model = torch.nn.Linear(3, 1, bias=False)
        torch.nn.init.zeros_(model.weight)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.25)
        replica = parallel(model, optimizer, "allreduce(reducer=signsgd)", world=world)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        if told:
            replica.watch(scaler)
        loss = model(torch.tensor([[1.0, -2.0, 3.0]])).sum()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        return model.weight.detach().clone()

    for weight in run_threads(work, size):
        assert weight.tolist() == [[-0.25, 0.25, -0.25]]


def test_a_step_without_the_scaler_of_the_loss_is_refused() -> None:
    """The generator's loss is scaled and passes through the discriminator, which trains without a scaler."""

    def work(world: World) -> None:
        model = torch.nn.Linear(3, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.25)
        parallel(model, optimizer, "allreduce(reducer=signsgd)", world=world)
        torch.amp.GradScaler("cpu").scale(model(torch.ones(1, 3)).sum()).backward()
        with pytest.raises(ValueError, match="Linear, whose SGD steps without the scaler"):
            optimizer.step()

    run_threads(work, 2)


# Scaled signs with error feedback -----------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2, 4])
def test_signs_are_sent_with_the_mean_magnitude(size: int) -> None:
    for feedback in (True, False):
        mean = reduced(onebit(feedback=feedback), size, numbers)[0][0][0]
        for i, got in enumerate(mean):
            inputs = [numbers(rank)[i] for rank in range(size)]
            sent = [torch.where(x < 0, -1.0, 1.0).double() * (x.abs().mean().float().double()) for x in inputs]
            assert torch.allclose(got, torch.stack(sent).mean(0), rtol=1e-6, atol=0)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_nothing_is_lost_over_time(size: int) -> None:
    """Sum of outputs + mean residual = sum of mean inputs, in float64."""
    steps = 30
    found = reduced(onebit(), size, numbers, steps)
    for i in range(len(SHAPES)):
        out = torch.stack([found[0][step][0][i] for step in range(steps)]).sum(0)
        residual = torch.stack([rows[-1][1][i] for rows in found]).mean(0)
        given = torch.stack([numbers(rank, step)[i] for rank in range(size) for step in range(steps)]).sum(0) / size
        assert torch.allclose(out + residual, given, rtol=0, atol=1e-13)


def test_the_residual_stays_bounded() -> None:
    generator = torch.Generator().manual_seed(0)
    reducer, world = onebit(), World()
    bucket = bucket_of([torch.zeros(64, 64)], world)
    state, norms = reducer.init(bucket), []
    for _ in range(2000):
        bucket.tensors[0].copy_(torch.randn(64, 64, generator=generator))
        _, state = reduce_window(reducer, bucket, state, world)
        norms.append(float(state["residual"].norm()))
    assert max(norms[1000:]) < 1.2 * max(norms[:200])


def test_an_overflow_leaves_every_residual_as_it_was() -> None:
    def inputs(rank: int, step: int) -> list[Tensor]:
        x = numbers(rank, step, torch.float32)
        if rank == 0 and step == 2:
            x[4][5] = math.nan
        return x

    for rows in reduced(onebit(), 3, inputs, 4):
        assert all(torch.equal(a, b) for a, b in zip(rows[1][1], rows[2][1], strict=True))
        assert not torch.equal(rows[2][1][0], rows[3][1][0])
        assert all(x.isfinite().all() for x in rows[3][0])


def test_a_new_learning_rate_scales_what_was_kept() -> None:
    reducer, world = onebit(), World()
    bucket = bucket_of([torch.zeros(100)], world)
    state = reducer.init(bucket)
    outputs = []
    for lr in (0.4, 0.1):
        bucket.lr = [lr]
        bucket.flat.zero_()
        bucket.tensors[0].copy_(torch.linspace(-1, 2, 100))
        outputs.append(reduce_window(reducer, bucket, state, world)[0].mean[0].clone())
    kept = torch.linspace(-1, 2, 100) - outputs[0]
    assert torch.allclose(outputs[1] + state["residual"][:100], torch.linspace(-1, 2, 100) + 4 * kept, atol=1e-5)


@pytest.mark.parametrize("size", [1, 2, 8])
def test_scaled_signs_send_a_bit_a_number_and_a_float_a_tensor(size: int) -> None:
    bucket = bucket_of([torch.zeros(1 << 16), torch.zeros(1 << 16)], World())
    assert onebit().sends(bucket, size) == (size - 1) * ((1 << 17) // 8 + 8)


def test_settings_are_checked() -> None:
    with pytest.raises(TypeError, match="feedback must be True"):
        onebit(feedback=1)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="seed must be a whole number"):
        signsgd(seed="x")  # type: ignore[arg-type]
    assert onebit().memory
    assert not onebit(feedback=False).memory
    assert not signsgd().memory
