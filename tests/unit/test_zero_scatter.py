"""ZeRO whose gradients travel to their shards through a reducer, in worlds of threads, against plain PyTorch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from test_zero import adam, assert_same, loss_of, text, train, words
from torch import Tensor, nn

import unisono as un
from unisono.methods.spec import build
from unisono.world import World
from unisono.world.virtual import run_threads

stages = pytest.mark.parametrize("stage", [1, 2, 3])
REDUCERS = ["bf16", "fp16", "fp8", "bytegrad", "qsgd(bits=8)", "nuqsgd(elias=True)", "topk(k=0.2)"]
REDUCERS += ["error_feedback(bytegrad)", "error_feedback(topk(k=0.2, feedback=False))"]


class Given(nn.Module):
    """A model whose gradients are what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.zeros(30, 20)), nn.Parameter(torch.zeros(50))

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return (self.a * a).sum() + (self.b * b).sum()


def draw(step: int, rank: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(97 * step + rank)
    return torch.randn(30, 20, generator=generator), torch.randn(50, generator=generator)


@pytest.mark.parametrize("reducer", REDUCERS)
@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_receiver_adds_what_arrives_and_a_sender_keeps_what_does_not(reducer: str, size: int) -> None:
    """SGD at rate 1 adds up means: after each step, what was given is what has arrived and what is kept."""
    keeps = build(reducer, "reducer").memory

    def work(world: World) -> None:
        model = Given()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        replica: Any = un.parallel(model, optimizer, f"zero(stage=2, reducer={reducer})", world=world)
        wanted = [torch.zeros(30, 20), torch.zeros(50)]
        for t in range(4):
            optimizer.zero_grad()
            model(*draw(t, world.rank)).backward()
            optimizer.step()
            for total, *given in zip(wanted, *(draw(t, r) for r in range(size)), strict=True):
                total -= torch.stack(given).mean(0)
            kept = replica.local_state().get("reducer", {})
            for name, total in zip("ab", wanted, strict=True):
                found = dict(model.state_dict())[name].clone()
                if keeps and size > 1:
                    rest = kept[name]["*residual"].clone()
                    world.all_reduce(rest, "mean").wait()
                    torch.testing.assert_close(found - rest, total, rtol=0, atol=1e-5)
                elif size == 1:
                    torch.testing.assert_close(found, total)
                else:
                    assert (found - total).norm() < (0.8 if "sgd" in reducer else 0.1) * total.norm()

    run_threads(work, size)


@stages
@pytest.mark.parametrize("reducer", ["bf16", "error_feedback(bytegrad)", "topk(k=0.5)"])
def test_training_is_close_to_that_of_one_process(stage: int, reducer: str) -> None:
    def work(world: World) -> dict[str, Tensor]:
        model = text().float()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        spec = f"zero(stage={stage}, reducer={reducer}, unit_bytes=1500, accumulate=2)"
        un.parallel(model, optimizer, spec, world=world)
        for t in range(20):
            optimizer.zero_grad()
            for passes in (0, 50):
                loss_of(model, words(t + passes, world.rank)).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 5.0)
            optimizer.step()
        return dict(model.state_dict())

    plain = text()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for t in range(20):
        optimizer.zero_grad()
        for passes in (0, 50):
            loss_of(plain, torch.cat([words(t + passes, r) for r in range(3)])).backward()
        nn.utils.clip_grad_norm_(plain.parameters(), 5.0)
        optimizer.step()
    start = text().state_dict()
    found = run_threads(work, 3)
    for one in found:
        assert_same(one, found[0], 0.0)
        off = sum((one[n] - x).square().sum() for n, x in plain.state_dict().items())
        moved = sum((start[n] - x).square().sum() for n, x in plain.state_dict().items())
        assert off < 0.05 * moved


@stages
def test_a_skipped_step_takes_nothing_of_what_is_kept(stage: int) -> None:
    def work(world: World, overflows: bool) -> dict[str, Tensor]:
        model = text().float()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        replica = un.parallel(model, optimizer, f"zero(stage={stage}, reducer=topk(k=0.1))", world=world)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=1000)
        replica.watch(scaler)
        for t in range(5):
            if t == 2 and not overflows:
                scaler.update(2.0)
                continue
            optimizer.zero_grad()
            bad = torch.inf if t == 2 and world.rank == 1 else 1.0
            scaler.scale(loss_of(model, words(t, world.rank)) * bad).backward()
            scaler.step(optimizer)
            scaler.update()
        assert scaler.get_scale() == 2.0
        return dict(model.state_dict())

    found, wanted = (run_threads(lambda w, bad=bad: work(w, bad), 2)[0] for bad in (True, False))
    assert_same(found, wanted, 1e-6)


@stages
def test_a_resumed_run_has_what_was_kept_and_a_switch_takes_it_over(stage: int, tmp_path: Path) -> None:
    spec = f"zero(stage={stage}, reducer=topk(k=0.1), unit_bytes=2000)"

    def work(world: World, steps: range, load: bool, save: bool, then: str = "") -> dict[str, Tensor]:
        model = text().float()
        optimizer = adam(model)
        replica = un.parallel(model, optimizer, spec, world=world)
        if load:
            un.load(tmp_path, replica)
        train(model, optimizer, lambda t: words(t, world.rank), steps)
        if save:
            un.save(tmp_path, replica)
        if then:
            replica = replica.switch(then)
            train(model, optimizer, lambda t: words(t, world.rank), range(1))
        return dict(model.state_dict())

    run_threads(lambda w: work(w, range(3), False, True), 2)
    whole = run_threads(lambda w: work(w, range(5), False, False), 2)[0]
    assert_same(run_threads(lambda w: work(w, range(3, 5), True, False), 2)[0], whole, 0.0)
    run_threads(lambda w: work(w, range(3, 5), True, False), 3)  # another world: the mean of what all kept
    run_threads(lambda w: work(w, range(2), False, False, "allreduce(reducer=topk(k=0.1))"), 2)


@pytest.mark.parametrize("reducer", ["bytegrad", "topk(k=0.01)", "bf16"])
def test_bytes_are_those_of_the_messages(reducer: str) -> None:
    """Closed form: a message for each other rank's shard; of a byte a number about a quarter of fp32's."""

    def work(world: World) -> None:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 512))
        optimizer = torch.optim.AdamW(model.parameters())
        replica: Any = un.parallel(model, optimizer, f"zero(stage=2, reducer={reducer})", world=world)
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.randn(2, 512)).sum().backward()
            optimizer.step()
        message = {
            "bytegrad": lambda n: n + 8 * -(-n // 2048),
            "topk(k=0.01)": lambda n: 8 * round(0.01 * n),
            "bf16": lambda n: 2 * n,
        }[reducer]
        sent = sum(r.bytes_sent for r in world.ledger.records if r.op == "all_to_all")
        assert sent == 3 * sum((world.size - 1) * message(unit.shard_length) for unit in replica.units)
        assert not [r for r in world.ledger.records if r.op == "reduce_scatter"]

    run_threads(work, 4)


@pytest.mark.parametrize("reducer", ["powersgd", "onebit", "signsgd", "randomk", "demo", "loco", "topk(ramp=2)"])
def test_reducers_without_a_meaning_for_shards_are_refused(reducer: str) -> None:
    model = text()
    with pytest.raises(ValueError, match=rf"reducer={reducer.partition('(')[0]}.* no meaning for shards.*across="):
        un.parallel(model, adam(model), f"zero(stage=2, reducer={reducer})", world=World())
