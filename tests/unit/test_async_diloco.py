"""Asynchronous DiLoCo against plain loops in float64: the recursion, rounds, staleness, tokens, pace, bytes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import unisono as un
from unisono.methods.spec import build
from unisono.methods.strategies._serving.protocol import RemoteLink
from unisono.methods.strategies.async_diloco.outer import DelayedNesterov, OuterServer
from unisono.world import PeerLost, World
from unisono.world.transports.threads import Hub, ThreadTransport
from unisono.world.virtual import run_threads

N, LR, BETA = 3, 0.7, 0.9


def make() -> nn.Module:
    generator = torch.Generator().manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)).double()
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=generator, dtype=torch.float64) / 2)
    return model


def train(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, steps: range) -> None:
    for t in steps:
        optimizer.zero_grad()
        x = torch.randn(4, 4, generator=torch.Generator().manual_seed(1000 * t + rank), dtype=torch.float64)
        model(x).square().mean().backward()
        optimizer.step()


def values(model: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def assert_close(a: list[Tensor], b: list[Tensor]) -> None:
    for x, y in zip(a, b, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-12)


def delayed(x: float, differences: list[float], c: float) -> list[float]:
    """The paper's Algorithm, written out for one number: x after each difference."""
    m, total, found = 0.0, 0.0, []
    for t, g in enumerate(differences):
        total += g
        if (t + 1) % N == 0:
            m = BETA * m + total / N
            x -= LR * ((1 - c * N + c) * BETA * m + g / N)
            total = 0.0
        else:
            x -= LR * (c * BETA * m + g / N)
        found.append(x)
    return found


def server(workers: int = N, **settings: Any) -> OuterServer:
    param = nn.Parameter(torch.ones(1, dtype=torch.float64))
    strategy: Any = build(f"async_diloco({', '.join(f'{k}={v}' for k, v in settings.items())})")
    outer = DelayedNesterov([param], lr=LR, momentum=BETA, spread=strategy.spread)
    return OuterServer([param], outer, range(workers), strategy)


def visit(s: OuterServer, worker: int, g: float, samples: float = 1.0, seconds: float = 1.0, windows: int = 1) -> Any:
    """Bring a difference of one number, and take the model."""
    brought = {"samples": samples, "windows": windows, "seconds": seconds}
    answer = s.push(worker, [torch.tensor([g], dtype=torch.float64)], [brought])
    s.read(worker, [torch.zeros(1, dtype=torch.float64)])
    return answer


def behind(do: Callable[..., Any], *args: Any) -> threading.Thread:
    thread = threading.Thread(target=do, args=args, daemon=True)
    thread.start()
    return thread


@pytest.mark.parametrize("spread", [0.0, 0.4, 1.0])
def test_delayed_nesterov_is_the_papers_recursion(spread: float) -> None:
    differences = torch.randn(11, generator=torch.Generator().manual_seed(2), dtype=torch.float64).tolist()
    s = server(spread=spread)
    found = []
    for t, g in enumerate(differences):
        visit(s, t % N, g)
        found.append(s.values[0].item())
    assert found == pytest.approx(delayed(1.0, differences, spread / N), rel=1e-12)


@pytest.mark.parametrize("size", [1, 3])
def test_all_workers_at_once_are_diloco(size: int) -> None:
    def work(world: World, spec: str) -> list[Tensor]:
        model = make()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
        replica = un.parallel(model, optimizer, spec, world=world)
        train(model, optimizer, world.rank, range(6))
        found = values(replica.consolidate())
        replica.close()
        return found

    for found, wanted in zip(
        run_threads(lambda w: work(w, "async_diloco(every=2, quorum=3, pace=False)"), size),
        run_threads(lambda w: work(w, "diloco(every=2)"), size),
        strict=True,
    ):
        assert_close(found, wanted)


def test_a_difference_counts_by_its_samples() -> None:
    s, lone = server(2, quorum=2), server(2)
    thread = behind(visit, s, 0, 3.0, 10.0)
    visit(s, 1, -2.0, 30.0)
    thread.join(5)
    mean = (10.0 * 3.0 - 30.0 * 2.0) / 40.0  # by samples; as one step of Nesterov's momentum
    assert s.values[0].item() == pytest.approx(1.0 - LR * (mean + BETA * mean), rel=1e-12)
    visit(lone, 0, 3.0, 10.0)
    visit(lone, 1, -2.0, 30.0)  # the second knows of both: 30 of a mean of 20
    m = (3.0 - 3.0) / 2
    assert lone.values[0].item() == pytest.approx(1.0 - LR * 3.0 / 2 + LR * 3.0 / 2 - LR * BETA * m, rel=1e-12)


def test_what_is_too_old_is_dropped_and_its_worker_goes_on() -> None:
    s = server(staleness=2)
    for _ in range(2 * N):
        assert visit(s, 0, 0.1).ahead > 0
    assert visit(s, 1, 0.1).missed == 2 * N  # the last that counts
    visit(s, 0, 0.1)
    before = s.values[0].item()
    late = visit(s, 2, 100.0)
    assert (late.missed, late.ahead < 0) == (2 * N + 2, True)
    assert s.values[0].item() == before
    assert visit(s, 2, 0.1).missed == 0


@pytest.mark.filterwarnings("ignore:.*more than staleness=4 rounds.*:UserWarning")
def test_a_worker_that_was_away_holds_up_nobody_and_returns() -> None:
    others = threading.Barrier(3)

    def work(world: World) -> tuple[dict[str, Any], list[dict[str, Any]], bool]:
        model = make()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        replica: Any = un.parallel(model, optimizer, "async_diloco(every=1, pace=False)", world=world)
        if world.rank < 2:
            train(model, optimizer, world.rank, range(12))
        others.wait(20)
        if world.rank == 2:
            train(model, optimizer, 2, range(4))
        finite = all(x.isfinite().all().item() for x in values(replica.consolidate()))
        events = [e.values for e in world.ledger.events if e.kind == "visit"]
        stale = replica.staleness()
        replica.close()
        return stale, events, finite

    results = run_threads(work, 3)
    assert [stale["dropped"] for stale, _, _ in results] == [0, 0, 1]
    assert [e["missed"] for e in results[2][1]] == [24, 0, 0, 0]
    for stale, events, finite in results:
        assert finite
        assert all(e["counted"] == (e["missed"] <= 4 * 3) for e in events)
        assert sum(stale["missed"].values()) + stale["dropped"] == len(events)


def test_a_quorum_is_waited_for_and_its_grace_lets_others_in() -> None:
    patient, s = server(quorum=2, grace_s=60.0), server(quorum=2, grace_s=0.02)
    first = behind(visit, patient, 0, 1.0)
    first.join(0.1)
    assert first.is_alive()
    assert patient.version == 0
    second = behind(visit, patient, 1, 1.0)
    visit(patient, 2, 1.0)  # all are there: nobody waits for the end of the grace
    first.join(5)
    second.join(5)
    assert patient.version == 3
    third = behind(visit, s, 0, 1.0)
    visit(s, 1, 1.0)  # a quorum, and the third worker does not come
    third.join(5)
    assert s.version == 2
    waiting = behind(visit, s, 0, 1.0)
    s.leave(1)
    s.leave(2)
    waiting.join(5)
    assert not waiting.is_alive()


def test_windows_go_by_measured_speed() -> None:
    s = server(every=40)
    assert visit(s, 0, 0.0, windows=40, seconds=4.0).ahead == 40
    assert visit(s, 1, 0.0, windows=40, seconds=16.0).ahead == 10
    assert visit(s, 2, 0.0, windows=1, seconds=100.0).ahead == 1
    assert visit(s, 1, 0.0, windows=10, seconds=0.5).ahead == 40
    assert visit(s, 0, 0.0, windows=40, seconds=4.0).ahead == 20
    assert visit(server(every=40, pace=False), 0, 0.0, seconds=9.0).ahead == 40


def test_a_visit_sends_and_gets_the_model_once() -> None:
    def work(world: World) -> list[dict[str, int]]:
        model = make()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        replica = un.parallel(model, optimizer, "async_diloco(every=3, pace=False)", world=world)
        train(model, optimizer, world.rank, range(6))
        sent = world.ledger.by_tag()
        replica.consolidate()
        after = world.ledger.by_tag()
        replica.close()
        return [sent, after]

    model = 8 * sum(-(-p.numel() // 8) * 8 for p in make().parameters())  # each tensor from a cache line of 64 bytes on
    first, *others = run_threads(work, 3)
    for sent, _ in others:
        assert sent.get("push", 0) == 2 * model
        assert sent["ask"] <= 2 * 400
    assert first[0].get("push", 0) == 0  # its server is beside it
    assert first[1]["pull"] >= 4 * model


def test_a_checkpoint_goes_on_bit_by_bit(tmp_path: Path) -> None:
    spec = "async_diloco(every=2, quorum=3, pace=False)"

    def work(world: World) -> None:
        replicas = []
        for _ in range(2):
            model = make()
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
            replicas.append((model, optimizer, un.parallel(model, optimizer, spec, world=world)))
        (model, optimizer, replica), (other, other_optimizer, other_replica) = replicas
        train(model, optimizer, world.rank, range(5))  # one window after a visit
        un.save(tmp_path, replica)
        train(model, optimizer, world.rank, range(5, 9))
        un.load(tmp_path, other_replica)
        train(other, other_optimizer, world.rank, range(5, 9))
        for x, y in zip(values(other), values(model), strict=True):
            assert torch.equal(x, y)
        assert_close(values(other_replica.consolidate()), values(replica.consolidate()))
        replica.close()
        other_replica.close()

    run_threads(work, 3)


@pytest.mark.parametrize(
    ("spec", "reason"),
    [("async_diloco(grace_s=1.0)", "how many differences to wait for"), ("async_diloco(staleness=0)", "staleness")],
)
def test_what_cannot_work_is_refused(spec: str, reason: str) -> None:
    model = make()
    with pytest.raises(ValueError, match=reason):
        un.parallel(model, torch.optim.SGD(model.parameters(), lr=0.1), spec, world=World())


def test_an_answer_that_a_lost_server_had_sent_is_not_that_of_a_later_request() -> None:
    hub = Hub(2, 10.0)
    pair, server = World(ThreadTransport(hub, 0), hosts=["localhost"] * 2), ThreadTransport(hub, 1)
    link = RemoteLink(pair, 0, 1, [torch.zeros(3)], None)
    link.push([torch.ones(3)], None, None, [])
    hub.left[1] = "has died"
    with pytest.raises(PeerLost):
        link.pull()
    line = torch.zeros(12, dtype=torch.uint8)
    for sent in (torch.tensor([0, len(line), 1, 0, 0]), line):
        server.send(sent, 0)
    with pytest.raises(PeerLost):
        link.fetch()
