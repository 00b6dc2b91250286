"""Crossbow's learners in one CUDA graph: what a CPU cannot show (for the rest, test_crossbow_captured.py)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import unisono as un
from unisono.world import World

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def net(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3, stride=2)]
    return nn.Sequential(*layers, nn.ReLU(), nn.Flatten(), nn.Linear(8 * 9, 4)).to("cuda", dtype)


def batches(count: int, size: int = 16) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(count, size, 3, 8, 8, generator=generator).cuda()
    return list(zip(x, torch.randint(4, (count, size), generator=generator).cuda(), strict=True))


def loss_of(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0].to(next(model.parameters()).dtype)), batch[1])


def started(model: nn.Module, spec: str = "crossbow(learners=4)", lr: float = 0.0625) -> Any:
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.5)
    return un.parallel(model, optimizer, spec, world=World(device=torch.device("cuda", 0)))


def learn(made: Any, data: list[Any], loss: Callable[..., Tensor] = loss_of, **options: Any) -> list[float]:
    found = []
    for some in made.batches(data):
        found += made.learn(loss, some, **options)
    return [x.item() for x in found]


def tensors_of(made: Any) -> list[Tensor]:
    every = [*made.learners.params(0), *made.learners.buffers(0)]
    for j in range(1, made.learners.count):
        every += [*made.learners.params(j), *made.learners.buffers(j)]
    return [x.double().cpu() for x in every]


def close(a: list[Tensor], b: list[Tensor], tolerance: float) -> None:
    for x, y in zip(a, b, strict=True):
        torch.testing.assert_close(x, y, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-7), (torch.float32, 1e-3)])
def test_a_convolutional_net_learns_as_in_threads(dtype: torch.dtype, tolerance: float, channels_last: bool) -> None:
    """Losses, parameters and the statistics of batch norms of 4 learners, after 10 rounds."""
    how = torch.channels_last if channels_last else torch.contiguous_format

    def trained(capture: bool) -> tuple[list[float], list[Tensor]]:
        made = started(net(dtype).to(memory_format=how))
        losses = learn(made, batches(40), capture=capture)
        if capture:
            assert made._captured.replayed == 8
        found = losses, tensors_of(made)
        made.close()
        return found

    (losses, tensors), (losses2, tensors2) = trained(True), trained(False)
    assert losses == pytest.approx(losses2, rel=tolerance, abs=tolerance)
    close(tensors, tensors2, tolerance)


def test_losses_are_this_rounds_also_after_the_next() -> None:
    made = started(net(), lr=0.0)
    data = batches(4)
    first = [made.learn(loss_of, data) for _ in range(4)]
    other = made.learn(loss_of, [(x.flip(0), y) for x, y in data])
    for losses in first:
        assert [x.item() for x in losses] == pytest.approx([x.item() for x in first[0]], rel=1e-4)
    assert other[0].item() != pytest.approx(first[0][0].item(), rel=1e-4)
    made.close()


class Noise(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(4096))

    def forward(self, x: Tensor) -> Tensor:
        return (F.dropout(x, 0.5) * self.w).sum()


def test_dropout_is_drawn_anew_by_each_learner_in_each_round() -> None:
    """A step of -1 times the gradient, which is what dropout left: of learners and rounds, no two are alike."""
    made = started(Noise().cuda(), "crossbow(learners=3, every=1000)", lr=1.0)
    ones, seen = torch.ones(4096, device="cuda"), []
    for _ in range(6):
        before = [made.learners.params(j)[0].clone() for j in range(3)]
        momenta = [made.learners.state(j).get(made.learners.named[0][1], {}) for j in range(3)]
        kept = [0.5 * x["momentum_buffer"] if "momentum_buffer" in x else torch.zeros(4096).cuda() for x in momenta]
        made.learn(lambda model, x: model(x), [ones] * 3)
        seen += [b - made.learners.params(j)[0] - k for j, (b, k) in enumerate(zip(before, kept, strict=True))]
    assert made._captured.replayed == 4
    for mask in seen:
        assert torch.isclose(mask, torch.zeros(())).logical_or(torch.isclose(mask, torch.full((), 2.0))).all()
        assert 0.4 < (mask > 1).float().mean().item() < 0.6
    for i, a in enumerate(seen):
        for b in seen[:i]:
            assert 0.4 < ((a > 1) == (b > 1)).float().mean().item() < 0.6
    made.close()


class Reading(Noise):
    """Asks the GPU for a number in forward."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (1.0 if x.sum().item() else 2.0)


def test_a_model_that_waits_for_the_gpu_is_named_and_trains_on() -> None:
    """Also with random numbers, which belong to a capture that has failed."""
    made = started(Reading().cuda(), "crossbow(learners=2)", lr=1.0)
    ones = torch.ones(4096, device="cuda")
    with pytest.warns(UserWarning, match="a round runs in threads, and is not captured as a CUDA graph"):
        learn(made, [ones] * 6, lambda model, x: model(x))
    learn(made, [ones] * 6, lambda model, x: model(x))
    F.dropout(ones)
    torch.cuda.synchronize()
    assert made.step == 12
    assert made._captured.replayed == 0
    made.close()
    other = started(Noise().cuda(), "crossbow(learners=2)")  # and another one can be captured
    for _ in range(4):
        other.learn(lambda model, x: model(x), [ones] * 2)
    assert other._captured.replayed == 2
    other.close()


def test_a_shape_that_depends_on_the_data_is_named() -> None:
    made = started(net(), "crossbow(learners=2)")

    def some(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return loss_of(model, (batch[0][batch[1] < 2], batch[1][batch[1] < 2]))

    with pytest.warns(UserWarning, match="not captured as a CUDA graph"):
        learn(made, batches(8), some)
    assert made.step == 8
    made.close()


def test_autocast_inside_the_loss_learns_as_in_threads() -> None:
    def cast(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        with torch.autocast("cuda", dtype=torch.bfloat16):
            return loss_of(model, batch)

    def trained(capture: bool) -> list[Tensor]:
        made = started(net())
        learn(made, batches(32), cast, capture=capture)
        found = tensors_of(made)
        made.close()
        return found

    close(trained(True), trained(False), 3e-2)


def test_the_tuner_finds_learners_and_graphs_of_other_numbers_are_given_back() -> None:
    made = started(net(), "crossbow(learners=auto, tune_every=40)")
    data = batches(16)
    for _ in range(400):
        made.learn(loss_of, data[: made.learners.count])
        if made.tuning._learners.settled:
            break
    assert made.tuning._learners.settled
    assert made.learners.count > 1
    assert len({event.values["learners"] for event in made.world.ledger.events if event.kind == "crossbow"}) > 1
    losses = learn(made, data * 4)
    assert all(x == x for x in losses)
    made.close()


def test_learners_that_do_not_fit_into_memory_are_named() -> None:
    torch.cuda.empty_cache()
    made = started(net(), "crossbow(learners=2)")
    total = torch.cuda.mem_get_info()[1]
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + (256 << 20)) / total)
    try:
        with pytest.raises(torch.OutOfMemoryError, match=r"2 learner\(s\) on this worker do not fit"):
            learn(made, batches(2), lambda m, b: loss_of(m, b) + torch.ones(100 << 20, device="cuda").sum())
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    made.close()


def on_one_device() -> list[list[list[float]]]:
    world, every = un.join(device="cuda:0"), []
    for capture in (True, False):
        model = net(torch.float64)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0625, momentum=0.5)
        made: Any = un.parallel(model, optimizer, "crossbow(learners=2, every=2)")
        data = batches(40)[world.rank :: 2]
        for i in range(0, 20, 2):
            made.learn(loss_of, data[i : i + 2], capture=capture)
        if capture:
            assert made._captured.replayed == 8
        every.append([p.detach().flatten().tolist() for p in made.consolidate().parameters()])
        made.close()
    return every


def test_workers_that_share_a_device_meet_between_replays() -> None:
    (first, threads), (second, _) = un.launch(on_one_device, workers=2)
    for found in (second, threads):
        for a, b in zip(first, found, strict=True):
            assert a == pytest.approx(b, rel=1e-7, abs=1e-9)


def test_what_is_saved_of_the_model_is_no_more_than_the_model(tmp_path: Any) -> None:
    made = started(net(), "crossbow(learners=8)")
    before = sum(p.nbytes for p in made.model.parameters())
    learn(made, batches(32))
    torch.save(made.model.state_dict(), tmp_path / "model.pt")
    assert (tmp_path / "model.pt").stat().st_size < 2 * before + 8192
    made.close()
