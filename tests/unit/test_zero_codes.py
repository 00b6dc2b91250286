"""ZeRO whose gathers travel in 8 bits: what is exact, what is rounded, what is sent."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from test_zero import adam, assert_same, loss_of, text, train, words
from test_zero_hybrid import HOSTS
from torch import Tensor, nn

import unisono as un
from unisono.methods.strategies.zero.codes import BLOCK, round_line
from unisono.world import World
from unisono.world.virtual import run_threads

stages = pytest.mark.parametrize("stage", [1, 2, 3])


def round_by_hand(x: Tensor) -> Tensor:
    """256 steps from the least to the greatest of each 256 numbers, without the kernel."""
    line = torch.cat([x.detach().reshape(-1), x.new_zeros(-x.numel() % BLOCK)]).view(-1, BLOCK).float()
    low, high = line.amin(1, keepdim=True), line.amax(1, keepdim=True)
    step = (high - low) / 255
    at = torch.where(step > 0, low / step, 0.0).round() * step
    low = torch.where(step > 0, at, low)
    codes = torch.where(step > 0, (line - low) / step, 0.0).round().clamp(0, 255)
    return (low + codes * step).view(-1)[: x.numel()].view(x.shape).to(x.dtype)


def test_a_line_arrives_to_half_a_step_of_its_blocks() -> None:
    x = torch.randn(40 * BLOCK) * torch.logspace(-3, 3, 40).repeat_interleave(BLOCK)
    steps = (x.view(-1, BLOCK).amax(1) - x.view(-1, BLOCK).amin(1)) / 255
    off = (round_line(x) - x).view(-1, BLOCK).abs().amax(1)
    assert bool((off <= 1.01 * steps).all())
    assert round_line(torch.zeros(BLOCK)).eq(0).all()


def reference(size: int, steps: int) -> dict[str, Tensor]:
    """One process that computes with rounded values, and steps exact ones."""
    exact = text().float()
    optimizer = adam(exact)
    for t in range(steps):
        rounded = copy.deepcopy(exact)
        for p in rounded.parameters():
            p.data = round_by_hand(p)
        loss_of(rounded, torch.cat([words(t, r) for r in range(size)])).backward()
        for p, q in zip(exact.parameters(), rounded.parameters(), strict=True):
            p.grad = q.grad
        optimizer.step()
    return dict(exact.state_dict())


@stages
@pytest.mark.parametrize(("size", "extra"), [(2, ""), (3, ", overlap=True"), (4, ", within=2"), (3, ", spare=True")])
def test_modules_compute_with_rounded_values_and_exact_ones_are_stepped(stage: int, size: int, extra: str) -> None:
    def work(world: World) -> dict[str, Tensor]:
        model = text().float()
        optimizer = adam(model)
        spec = f"zero(stage={stage}, gather=int8, unit_bytes=2000{extra})"
        replica = un.parallel(model, optimizer, spec, world=world)
        train(model, optimizer, lambda t: words(t, world.rank), range(4))
        seen: list[Tensor] = []
        hook = model.head.register_forward_hook(lambda m, *_: seen.append(m.weight.detach().clone()))  # type: ignore
        loss_of(model, words(0, 0))
        hook.remove()
        found = dict(model.state_dict())
        assert torch.allclose(seen[0], round_by_hand(found["head.weight"]), rtol=0, atol=1e-6)
        assert not torch.equal(seen[0], found["head.weight"]), "state_dict() is exact, forward is not"
        replica.restore()
        replica.close()
        assert_same(dict(model.state_dict()), found, 0.0)
        return found

    wanted = reference(size, 4)
    found = run_threads(work, size)
    for one in found:
        assert_same(one, found[0], 0.0)
        assert_same(one, wanted, 2e-3)  # a gradient of rounding errors may move a number by a step of Adam


@stages
def test_reading_and_writing_parameters_leaves_what_is_exact_exact(stage: int) -> None:
    def work(world: World) -> None:
        model = text().float()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        replica = un.parallel(model, optimizer, f"zero(stage={stage}, gather=int8, unit_bytes=2000)", world=world)
        exact = {name: x.clone() for name, x in text().float().state_dict().items()}
        train(model, optimizer, lambda t: words(t, world.rank), range(2))
        assert_same(dict(model.state_dict()), exact, 0.0)
        sum(float(p.detach().norm()) for p in model.parameters())
        train(model, optimizer, lambda t: words(t, world.rank), range(1))
        assert_same(dict(model.state_dict()), exact, 0.0)
        with torch.no_grad():
            model.head.weight.mul_(0.5)  # type: ignore[union-attr, operator]
        train(model, optimizer, lambda t: words(t, world.rank), range(1))
        half = exact.pop("head.weight") * 0.5
        found = dict(model.state_dict())
        torch.testing.assert_close(found.pop("head.weight"), half, rtol=0, atol=0.002)  # of what this rank saw
        assert_same(found, exact, 0.0)
        with torch.no_grad():
            model.embed.weight.fill_(0.25)  # type: ignore[union-attr, operator]
        exact["embed.weight"].fill_(0.25)
        found = dict(model.state_dict())  # without a step before it
        del found["head.weight"]
        assert_same(found, exact, 0.0)
        replica.write(lambda: model.blocks[0].out.weight.mul_(2.0))  # type: ignore[index, union-attr]
        exact["blocks.0.out.weight"] *= 2.0
        found = dict(model.state_dict())
        del found["head.weight"]
        assert_same(found, exact, 0.0)
        model.load_state_dict(text().float().state_dict())
        assert_same(dict(model.state_dict()), dict(text().float().state_dict()), 0.0)

    run_threads(work, 2)


@stages
def test_checkpoints_hold_exact_values_and_a_resumed_run_goes_on_bit_by_bit(stage: int, tmp_path: Path) -> None:
    spec = f"zero(stage={stage}, gather=int8, unit_bytes=2000)"

    def work(world: World, spec: str, steps: range, load: bool, save: bool) -> dict[str, Tensor]:
        model = text().float()
        optimizer = adam(model)
        replica = un.parallel(model, optimizer, spec, world=world)
        if load:
            un.load(tmp_path, replica)
        train(model, optimizer, lambda t: words(t, world.rank), steps)
        found = dict(model.state_dict())
        if save:
            un.save(tmp_path, replica)
        return found

    saved = run_threads(lambda w: work(w, spec, range(3), False, True), 2)[0]
    assert_same(dict(un.read_checkpoint(tmp_path)["model"]), saved, 0.0)
    whole = run_threads(lambda w: work(w, spec, range(5), False, False), 2)[0]
    resumed = run_threads(lambda w: work(w, spec, range(3, 5), True, False), 2)[0]
    assert_same(resumed, whole, 0.0)
    for other in ("zero(stage=3)", "allreduce"):
        assert_same(run_threads(lambda w, o=other: work(w, o, range(0), True, False), 3)[0], saved, 0.0)


@stages
def test_a_gather_sends_about_a_quarter(stage: int) -> None:
    """By the ledger, closed form: (N - 1) (1 + 8/256) bytes a number of the shard, beside 4 in fp32."""

    def work(world: World, gather: str) -> tuple[int, int]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 512))
        optimizer = torch.optim.AdamW(model.parameters())
        replica: Any = un.parallel(model, optimizer, f"zero(stage={stage}{gather})", world=world)
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.randn(2, 512)).sum().backward()
            optimizer.step()
        records = [r for r in world.ledger.records if r.op == "all_gather" and r.tag.startswith("unit/")]
        sent = sum(r.bytes_sent for r in records)
        if gather:
            lengths = {unit.tag: unit.shard_length for unit in replica.units}
            assert sent == sum((world.size - 1) * (lengths[r.tag] + 8 * lengths[r.tag] // BLOCK) for r in records)
        return sent, len(records)

    hosts = HOSTS[:2] if stage == 3 else ["a", "b"]  # on one host stages 1 and 2 send nothing
    coded, exact = (run_threads(lambda w, g=g: work(w, g), 2, hosts=hosts)[0] for g in (", gather=int8", ""))
    assert coded[1] == exact[1] > 0
    assert coded[0] <= 0.27 * exact[0]
