"""Parameters that differ between ranks are found, wherever the bit is, and named with the ranks and the steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import unisono as un
from unisono import World, run_threads
from unisono.methods.strategy import watches
from unisono.methods.strategy.watches import VARIABLE

FLIPPED = 7  # the step after which a bit is flipped


def train(
    world: World, steps: int, flip: Callable[[nn.Module], None] | None, *, rank: int = 1, spec: str = "allreduce"
) -> list[dict[str, Any]]:
    """The verdicts of this rank."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 40), nn.ReLU(), nn.Linear(40, 3), nn.Linear(3, 3, dtype=torch.float32))
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    un.parallel(model, optimizer, spec)
    for step in range(steps):
        optimizer.zero_grad()
        generator = torch.Generator().manual_seed(10 * step + world.rank)
        model(torch.randn(4, 6, generator=generator)).square().sum().backward()
        optimizer.step()
        if step == FLIPPED and world.rank == rank and flip is not None:
            flip(model)
    return [event.values for event in world.ledger.events if event.kind == "verdict"]


def flip_bit(model: nn.Module, name: str, element: int, bit: int) -> None:
    line = dict(model.named_parameters())[name].detach().view(-1).view(torch.int32)
    line[element] ^= 1 << bit


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "3")


@pytest.mark.parametrize(("name", "element", "bit"), [("0.weight", 0, 20), ("2.weight", 119, 22), ("3.bias", 2, 30)])
def test_a_flipped_bit_is_named_on_every_rank(
    name: str, element: int, bit: int, capfd: pytest.CaptureFixture[str]
) -> None:
    found = run_threads(lambda w: train(w, 16, lambda m: flip_bit(m, name, element, bit)), 3)
    for verdicts in found:
        (verdict,) = [v for v in verdicts if v["parameter"] == name][:1]
        assert (verdict["rank"], verdict["ranks"], verdict["cause"]) == (1, [1], "diverged parameter")
        assert verdict["since"] <= FLIPPED < verdict["step"]
        assert name in verdict["text"]
    err = capfd.readouterr().err
    assert err.count(f"rank 1 has other values of parameter {name} than the other ranks") == 1


def test_two_ranks_cannot_tell_which_is_right() -> None:
    for verdicts in run_threads(lambda w: train(w, 16, lambda m: flip_bit(m, "0.bias", 3, 10)), 2):
        assert [v["rank"] for v in verdicts if v["parameter"] == "0.bias"] == [None]


@pytest.mark.parametrize("spec", ["allreduce", "allreduce(powersgd(rank=2))", "qadam(warmup=2)", "bytegrad"])
def test_nothing_is_said_where_all_is_well(spec: str) -> None:
    assert run_threads(lambda w: train(w, 12, None, spec=spec), 3) == [[], [], []]


def test_every_bit_has_its_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Checks of two small chunks: a bit anywhere is found after one round of them."""
    monkeypatch.setattr(watches, "CHUNK_BYTES", 64)
    monkeypatch.setattr(watches, "CHECK_BYTES", 128)
    rounds = -(-4 * (6 * 40 + 40 + 3 * 40 + 3 + 12) // 128) + 4
    for element in (0, 100, 239):
        steps = FLIPPED + 3 * (rounds + 2)
        verdicts, *_ = run_threads(
            lambda w, e=element, n=steps: train(w, n, lambda m: flip_bit(m, "0.weight", e, 22)), 3
        )
        assert "0.weight" in [v["parameter"] for v in verdicts]


def test_ranks_that_go_on_in_another_world_begin_alike() -> None:
    """One of them comes from a world of its own, and has counted other steps."""

    def work(world: World) -> list[str]:
        torch.manual_seed(0)
        model = nn.Linear(4, 4)
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        pair = world.split([[0, 1], [2]])
        replica = un.parallel(model, optimizer, world=pair)
        for step in range(21):
            if step == 8:
                replica.rebind(world)
            for _ in range(2 if step == 4 and world.rank == 2 else 1):
                optimizer.zero_grad()
                model(torch.randn(2, 4)).sum().backward()
                optimizer.step()
        return [event.kind for event in world.ledger.events if event.kind == "verdict"]

    assert run_threads(work, 3) == [[], [], []]


def test_a_method_whose_ranks_differ_is_not_compared() -> None:
    found = run_threads(lambda w: train(w, 12, None, spec="local_sgd(every=4, start=0)"), 2)
    assert found == [[], []]


@pytest.mark.parametrize(("variable", "value"), [(VARIABLE, "0"), ("UNISONO_CHECKS", "off")])
def test_it_can_be_turned_off(variable: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(variable, value)
    assert run_threads(lambda w: train(w, 16, lambda m: flip_bit(m, "0.weight", 0, 20)), 2) == [[], []]


def test_a_wrong_setting_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "often")
    with pytest.raises(ValueError, match="UNISONO_CHECK_EVERY: got 'often'"):
        train(World(), 1, None)


def test_dtypes_and_odd_sizes_are_summed_up_bit_by_bit() -> None:
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64):
        for n in (1, 3, 17):
            holder = nn.Module()
            holder.p = nn.Parameter(torch.ones(n, dtype=dtype))
            chunks = watches._list_chunks(holder)
            before = watches._sum_up(chunks)
            bits = torch.view_as_real(holder.p.detach()) if dtype.is_complex else holder.p.detach()
            bits.view(-1).view(torch.uint8)[-1] ^= 1
            assert not torch.equal(before, watches._sum_up(chunks))
