"""`auto` at work in worlds of threads, whose link is as slow as a test says, on a clock of its own."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import unisono as un
from unisono.methods.spec import build, describe
from unisono.methods.strategies.auto import auto, measuring
from unisono.methods.strategies.auto.replica import AutoReplica
from unisono.world import World, probe, straggler_watch
from unisono.world.transports.threads import ThreadTransport
from unisono.world.virtual import run_threads

MODELS = threading.Lock()
FAST, SLOW = 1e-9, 2e-5  # seconds a byte
COMPUTE_S, LATENCY_S = 0.05, 1e-4
DENSE, FACTORS = "allreduce(overlap=False)", "allreduce(reducer=powersgd(rank=1), overlap=False)"
TWO = f"auto(among=[{DENSE}, {FACTORS}], check_every=3, trial_steps=2)"


class Probed:
    """The ranks' clocks, which all-reduces move on."""

    def __init__(self) -> None:
        self.s_per_byte = FAST
        self.clocks = [0.0] * 8

    def attach(self, world: World) -> None:
        self.clocks[world.rank] = 0.0
        world.ledger.clock = lambda: self.clocks[world.rank]

    def compute(self, world: World) -> None:
        self.clocks[world.rank] += COMPUTE_S


@pytest.fixture
def link(monkeypatch: pytest.MonkeyPatch) -> Probed:
    made = Probed()
    real: Callable[..., float] = ThreadTransport.all_reduce

    def all_reduce(self: ThreadTransport, parts: Any, op: Any) -> float:
        real(self, parts, op)
        nbytes = sum(part.numel() * part.element_size() for part in parts)
        made.clocks[self.rank] += LATENCY_S + 2 * (self.size - 1) / self.size * nbytes * made.s_per_byte
        return math.nan

    monkeypatch.setattr(ThreadTransport, "all_reduce", all_reduce)
    monkeypatch.setattr(straggler_watch, "EVERY_STEPS", 100_000)  # its exchange runs behind the program
    monkeypatch.setattr(probe, "_LARGE_BYTES", [1 << 12, 1 << 14])
    return made


def started(world: World, spec: str, link: Probed | None = None) -> tuple[nn.Module, Any, AutoReplica]:
    if link is not None:
        link.attach(world)
    with MODELS:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(16, 48), nn.Tanh(), nn.Linear(48, 16)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    replica = un.parallel(model, optimizer, spec, world=world)
    assert isinstance(replica, AutoReplica)
    return model, optimizer, replica


def loss_of(model: nn.Module, t: int, rank: int) -> Tensor:
    x = torch.randn(4, 16, generator=torch.Generator().manual_seed(1000 * t + rank), dtype=torch.float64)
    loss: Tensor = (model(x) - x.flip(1)).square().mean()
    return loss


def train(model: nn.Module, optimizer: Any, world: World, steps: range, link: Probed | None = None) -> None:
    for t in steps:
        optimizer.zero_grad()
        loss_of(model, t, world.rank).backward()
        if link is not None:
            link.compute(world)
        optimizer.step()


def values(model: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def decisions(world: World) -> list[tuple[int, str, str]]:
    return [(e.step, e.values["decision"], e.values["to"]) for e in world.ledger.events if e.kind == "auto"]


def test_a_link_slowed_in_mid_run_makes_it_change_and_recover(link: Probed, capsys: pytest.CaptureFixture[str]) -> None:
    gate = threading.Barrier(2)

    def work(world: World) -> tuple[list[str], list[float], list[Tensor], list[Any]]:
        model, optimizer, replica = started(world, TWO, link)
        at_work, took = [], []
        for phase, (rate, steps) in enumerate([(FAST, 12), (SLOW, 24), (FAST, 24)]):
            gate.wait()
            link.s_per_byte = rate
            gate.wait()
            train(model, optimizer, world, range(1000 * phase, 1000 * phase + steps), link)
            at_work.append(replica.at_work)
            took.append(world.ledger.rows[-1].wall)
        made = decisions(world)
        replica.close()
        return at_work, took, values(model), made

    results = run_threads(work, 2)
    for at_work, took, found, made in results:
        assert at_work == [DENSE, FACTORS, DENSE]
        assert took[1] < 2 * took[0], "6 times as long with what was at work before"
        assert took[2] == pytest.approx(took[0], rel=0.01)
        assert all(map(torch.equal, found, results[0][2]))
        assert made == results[0][3]
        assert [kind for _, kind, _ in made if kind in ("try", "change")] == ["try", "change"] * 2
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("unisono auto, ")]
    assert len(said) == 5, "one rank says it: where it settled, and two changes of two lines"
    assert said[0].startswith(f"unisono auto, step 6: {DENSE}: ")
    assert f"{DENSE} -> {FACTORS}: communication takes 257 ms of 307 ms per step since step 12 (0.1" in said[1]
    assert "; predicted " in said[1]
    assert "; achieved " in said[2]


def test_all_steps_are_steps_of_the_training(link: Probed) -> None:
    """However often it changes between exact candidates, the model is that of one process on all batches."""
    spec = "auto(among=[{}], check_every=1, trial_steps=1)".format(
        ", ".join(f"allreduce(overlap=False, bucket_bytes={1 << k})" for k in (6, 9, 12))
    )

    def work(world: World) -> tuple[list[Tensor], list[Any]]:
        model, optimizer, replica = started(world, spec, link)
        train(model, optimizer, world, range(30), link)
        replica.close()
        return values(model), decisions(world)

    with MODELS:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(16, 48), nn.Tanh(), nn.Linear(48, 16)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    for t in range(30):
        optimizer.zero_grad()
        sum((loss_of(model, t, rank) / 3 for rank in range(3)), torch.zeros(())).backward()
        optimizer.step()
    for found, made in run_threads(work, 3):
        assert [kind for _, kind, _ in made][:3] == ["trial", "trial", "settle"]
        for x, p in zip(found, model.parameters(), strict=True):
            torch.testing.assert_close(x, p.detach(), rtol=1e-12, atol=1e-12)


def test_a_checkpoint_goes_on_with_what_was_at_work(link: Probed, tmp_path: Path) -> None:
    def work(world: World) -> None:
        link.s_per_byte = SLOW
        model, optimizer, replica = started(world, TWO, link)
        train(model, optimizer, world, range(12), link)
        assert replica.at_work == FACTORS
        un.save(tmp_path / "run", replica)
        kept = replica.local_state()["reducer"]["0.weight"]["*residual"].clone()
        before = values(model)
        replica.close()
        world.barrier()
        link.s_per_byte = FAST

        world.barrier()
        model, optimizer, replica = started(world, TWO, link)
        assert replica.at_work == DENSE
        assert un.load(tmp_path / "run", replica).step == replica.step == 12
        assert replica.at_work == FACTORS
        assert torch.equal(replica.local_state()["reducer"]["0.weight"]["*residual"], kept)
        assert all(map(torch.equal, values(model), before))
        train(model, optimizer, world, range(12, 30), link)
        assert replica.at_work == DENSE, "a first round begins anew"
        every = world.gather_objects([x.tolist() for x in values(model)])
        assert every[0] == every[1]
        replica.close()

    run_threads(work, 2)


def test_a_newcomer_gets_what_is_at_work(link: Probed) -> None:
    def work(world: World) -> list[Tensor]:
        link.s_per_byte = SLOW
        link.attach(world)
        two = world.split([[0, 1], [2]])
        alone = World() if world.rank == 2 else two
        if world.rank == 2:
            alone.ledger.clock = world.ledger.clock
        model, optimizer, replica = started(alone, TWO)
        if world.rank < 2:
            train(model, optimizer, two, range(12), link)
        assert replica.at_work == (DENSE if world.rank == 2 else FACTORS)
        three = world.split([[0, 1, 2]])
        told = replica.rebind(three, source=0)
        assert told.endswith(f"; {FACTORS} is at work")
        assert replica.at_work == FACTORS
        assert replica.step == 12
        train(model, optimizer, three, range(12, 24), link)
        assert [kind for _, kind, _ in decisions(three)][-1] == "settle", "decisions begin anew"
        replica.close()
        return values(model)

    results = run_threads(work, 3)
    for found in results:
        assert all(map(torch.equal, found, results[0]))


def test_what_the_next_candidate_has_no_place_for_is_sent_first(link: Probed) -> None:
    """`zero` does not keep gradients for later: one window of exact means goes before it."""

    def work(world: World) -> tuple[list[str], list[Tensor]]:
        spec = "auto(among=[zero(stage=1), topk(k=0.1)], trial_steps=1, accumulate=2)"
        model, optimizer, replica = started(world, spec, link)
        at_work = []
        for t in range(6):
            optimizer.zero_grad()
            for k in range(2):
                loss_of(model, 2 * t + k, world.rank).backward()
            link.compute(world)
            optimizer.step()
            at_work.append(replica.at_work.partition("(")[0] + ("+" if "topk" in replica.at_work else ""))
        assert replica.step == 6
        replica.restore()
        replica.close()
        return at_work, values(model)

    results = run_threads(work, 2)
    for at_work, found in results:
        assert at_work[:4] == ["allreduce+", "allreduce", "zero", "zero"]
        assert all(map(torch.equal, found, results[0][1]))


def test_alone_it_is_the_first_candidate_and_says_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    world = World()
    model, optimizer, replica = started(world, "auto(check_every=1, trial_steps=1)")
    train(model, optimizer, world, range(5))
    assert replica.at_work == "allreduce(order=ready)"
    assert not decisions(world)
    replica.close()
    assert capsys.readouterr().err == ""


def test_its_own_settings_are_those_of_every_candidate() -> None:
    with MODELS:
        model = nn.Linear(4, 4)
    chosen = auto(among=["allreduce", "local_sgd(every=4)"], accumulate=4, buffers="average")
    found = [describe(one) for one in chosen.find_candidates(model, World())]
    assert found[0] == "allreduce(accumulate=4, buffers=average)"
    assert "accumulate=4" in found[1]
    assert "every=4" in found[1]


def test_by_default_it_chooses_from_what_trains_like_all_reduce() -> None:
    with MODELS:
        model = nn.Linear(2048, 2048)
    (alone,) = {tuple(map(describe, auto().find_candidates(model, world))) for world in [World()]}
    assert alone[0] == "allreduce(order=ready)"
    assert alone[-1] == "allreduce(reducer=powersgd)"
    world = un.simulate(8, per_host=4)
    over_hosts = [describe(one) for one in auto().find_candidates(model, world)]
    assert over_hosts[:2] == ["allreduce(order=ready)", "allreduce(bucket_bytes=4194304, order=ready)"]
    assert over_hosts[-2:] == ["allreduce(reducer=powersgd)", "allreduce(reducer=hierarchical(across=powersgd))"]
    model.weight = nn.Parameter(torch.zeros(8, 8, dtype=torch.complex64))
    complex_ones = [describe(one) for one in auto().find_candidates(model, world)]
    assert not any("reducer" in spec for spec in complex_ones)


def test_candidates_that_would_send_no_less_are_left_out(link: Probed) -> None:
    """Of a model this small PowerSGD compresses nothing."""

    def work(world: World) -> list[str]:
        link.attach(world)
        with MODELS:
            model = nn.Linear(8, 16, bias=False)
        replica = un.parallel(model, torch.optim.SGD(model.parameters(), lr=0.1), "auto", world=world)
        assert isinstance(replica, AutoReplica)
        found = [candidate.spec for candidate in replica._candidates]
        replica.close()
        return found

    found = run_threads(work, 2)[0]
    assert "allreduce(reducer=bf16)" in found
    assert not any("powersgd" in spec for spec in found)


def test_over_hosts_only_what_leaves_a_host_counts(link: Probed) -> None:
    def work(world: World) -> list[float]:
        link.attach(world)
        with MODELS:
            model = nn.Linear(64, 64, bias=False)
        specs = ["powersgd(rank=4)", "hierarchical(powersgd(rank=4))"]
        found = [measuring.estimate_costs(build(spec), model, world) for spec in specs]
        return [costs.bytes_sent for costs in found if costs is not None]

    for plain, in_levels in run_threads(work, 4, hosts=["a", "a", "b", "b"]):
        factors = 4 * 4 * (64 + 64)  # 4 bytes, rank 4
        assert plain == 1.5 * factors  # among 4 ranks
        assert in_levels == pytest.approx(factors, abs=16)  # between 2 leaders, and what they say to each other


def test_methods_whose_ranks_may_skip_steps_alone_are_refused_with_a_scaler(link: Probed) -> None:
    def work(world: World) -> None:
        spec = "auto(among=[local_sgd(every=2), local_sgd(every=4)], trial_steps=1)"
        model, optimizer, replica = started(world, spec, link)
        replica.watch(torch.amp.GradScaler("cpu"))
        with pytest.raises(ValueError, match="cannot follow a GradScaler"):
            train(model, optimizer, world, range(4), link)
        replica.close()

    run_threads(work, 2)
