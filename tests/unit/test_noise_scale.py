"""The gradient noise scale against a closed form: gradients drawn with a known mean and covariance."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import unisono as un
from unisono.launchers.runtime.run_folder import divide_noise
from unisono.methods.exchange.noise_scale import NoiseScale, sum_squares
from unisono.observe.reports.summary import summarise
from unisono.observe.reports.wording import list_facts
from unisono.observe.runs.reading import RunReader
from unisono.observe.runs.recorder import Facts, Recorder
from unisono.observe.runs.recording import FileWriter
from unisono.world import World
from unisono.world.virtual import run_threads

SIZE, EACH, SIGMA = 40, 4, 0.5  # parameters, samples a rank, standard deviation of a sample's gradient
TRUE = torch.linspace(-0.3, 0.3, SIZE, dtype=torch.float64)


class Given(nn.Module):
    """Its gradient is what it is called with, averaged over the samples."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.zeros(SIZE // 2, dtype=torch.float64))
        self.b = nn.Parameter(torch.zeros(SIZE - SIZE // 2, dtype=torch.float64))

    def forward(self, wanted: Tensor) -> Tensor:
        return (torch.cat([self.a, self.b]) * wanted).sum(1).mean()


def measure(spec: str, world: World, windows: int, *, scale: float = 1.0) -> tuple[float, float]:
    model = Given()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    replica = un.parallel(model, optimizer, spec, world=world)
    noise = replica.noise
    assert noise is not None
    noise.every, noise.scale = 1, lambda: scale
    seen = torch.zeros(2, dtype=torch.float64)
    generator = torch.Generator().manual_seed(world.rank)
    for _ in range(windows):
        drawn = TRUE + SIGMA * torch.randn(EACH, SIZE, dtype=torch.float64, generator=generator)
        (scale * model(drawn)).backward()
        optimizer.step()
        optimizer.zero_grad()
        assert noise._smooth is not None
        seen += noise._smooth[:2] / noise._smooth[2]
    assert noise.measured == windows
    replica.close()
    return float(seen[0]) / windows, float(seen[1]) / windows


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("spec", ["allreduce", "shared", "zero(stage=1)", "zero(stage=2)", "zero(stage=3)"])
def test_it_is_that_of_gaussian_gradients(spec: str, size: int) -> None:
    """trace / B and |G|^2, in sums over the ranks where each has a part; within five standard errors of 120 windows."""
    found = run_threads(lambda world: measure(spec, world, 120), size)
    parts = size if spec == "allreduce" else 1  # there every rank measures all of it
    noise, signal = sum(n for n, _ in found) / parts, sum(s for _, s in found) / parts
    trace, square = SIZE * SIGMA**2 / (EACH * size), float(TRUE.square().sum())
    assert noise == pytest.approx(trace, rel=0.2)
    assert signal == pytest.approx(square, rel=0.2)
    assert divide_noise(noise, signal) == pytest.approx(trace / square, rel=0.3)


def test_the_loss_scale_of_amp_does_not_change_it() -> None:
    plain = run_threads(lambda world: measure("allreduce", world, 5), 2)
    scaled = run_threads(lambda world: measure("allreduce", world, 5, scale=1024.0), 2)
    assert scaled[0] == pytest.approx(plain[0])


def test_it_sends_nothing_and_is_measured_in_few_windows() -> None:
    def run(world: World, every: int) -> tuple[int, int]:
        model = Given()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        replica = un.parallel(model, optimizer, "allreduce", world=world)
        assert replica.noise is not None
        if every:
            replica.noise.every = every
        for _ in range(33):
            model(TRUE.expand(EACH, SIZE) * (1 + world.rank)).backward()
            optimizer.step()
            optimizer.zero_grad()
        return replica.noise.measured, world.ledger.totals().bytes_sent

    few = run_threads(lambda world: run(world, 0), 2)
    all_windows = run_threads(lambda world: run(world, 1), 2)
    assert [n for n, _ in few] == [2, 2]
    assert [n for n, _ in all_windows] == [33, 33]
    assert [b for _, b in few] == [b for _, b in all_windows]


def test_a_window_that_is_not_finite_and_one_of_uneven_parts_do_not_count() -> None:
    meter = NoiseScale(World())
    assert meter.batches is None
    assert not meter.is_due  # alone there is nothing to compare with

    def run(world: World) -> float | None:
        meter = NoiseScale(world, every=1)
        for value in (0.0, float("inf"), 0.0):
            meter.add_own([torch.tensor([2.5, value])])
            meter.add_mean([torch.tensor([2.0, value])])
            meter.end_window()
        assert meter.windows == 3
        return meter.batches

    assert run_threads(run, 2) == [pytest.approx((6.25 - 4) / (2 * 4 - 6.25))] * 2


def test_numbers_of_all_dtypes_are_squared_wide() -> None:
    many = torch.full((100_000,), 1e-3, dtype=torch.bfloat16)
    assert float(sum_squares([many, torch.empty(0)])) == pytest.approx(0.1, rel=0.01)
    assert float(sum_squares([torch.tensor([3 + 4j])])) == pytest.approx(25.0)
    assert float(sum_squares([])) == 0.0


def test_compressed_exchanges_and_methods_that_exchange_no_gradients_have_none() -> None:
    for spec in ("powersgd(rank=1)", "local_sgd"):
        replicas = run_threads(lambda world, spec=spec: _bind(spec, world).noise, 2)
        assert replicas == [None, None]


def _bind(spec: str, world: World) -> un.Replica:
    model = nn.Linear(8, 8)
    return un.parallel(model, torch.optim.SGD(model.parameters(), lr=0.1), spec, world=world)


@pytest.mark.parametrize("spec", ["allreduce", "zero(stage=2)"])
def test_the_record_the_report_and_the_page_have_it(spec: str, tmp_path: Path) -> None:
    """As the quotient of sums over the ranks: under zero each has measured another part."""

    def run(world: World) -> tuple[float, float]:
        model = Given()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        recorder = Recorder(world, FileWriter(tmp_path, world.rank), Facts(spec, SIZE))
        replica = un.parallel(model, optimizer, spec, world=world)
        assert replica.noise is not None
        replica.noise.every = 1
        for window in range(8):
            generator = torch.Generator().manual_seed(9 * window + world.rank)
            model(TRUE + SIGMA * torch.randn(EACH, SIZE, dtype=torch.float64, generator=generator)).backward()
            optimizer.step()
            optimizer.zero_grad()
        recorder.close("ok")
        return replica.noise.read()

    found = run_threads(run, 2)
    expected = sum(noise for noise, _ in found) / sum(signal for _, signal in found)
    reader = RunReader(tmp_path)
    reader.poll()
    summary = summarise(reader)
    assert summary.noise_batches == pytest.approx(expected, rel=1e-4)
    assert dict(list_facts(summary))["noise scale"].startswith(f"{expected:.3g} times the global batch")
