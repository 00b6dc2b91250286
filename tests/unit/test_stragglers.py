"""Slow ranks are found, named with their cause, and given fewer samples; what is trained stays the same."""

from __future__ import annotations

import copy
import doctest
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

import unisono as un
from unisono.launchers.runtime.machine import ProcessorWait
from unisono.world import World, join, links
from unisono.world import straggler_watch as watch_module
from unisono.world import stragglers as module
from unisono.world.links import LinkProbe
from unisono.world.stragglers import Cause, Judge, Numbers, Straggler
from unisono.world.transports.threads import ThreadTransport
from unisono.world.virtual import run_threads

X = torch.randn(96, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
Y = X.sum(1, keepdim=True).tanh()
MODEL = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 1)).double()
FAST = Numbers(own_s=0.1, data_s=0.01, kept_off_s=0.01, wall_s=0.4, bytes_sent=1e6)


def test_docstring_examples_hold() -> None:
    assert doctest.testmod(module).failed == 0
    assert doctest.testmod(watch_module).failed == 0


# Verdicts ----------------------------------------------------------------------------------------------------------


def find(numbers: list[Numbers], hosts: str | None = None, work: list[float] | None = None) -> dict[int, Cause]:
    judge = Judge(list(hosts or "a" * len(numbers)))
    assert judge.judge(numbers, since=1, work=work) == ([], []), "one check alone names nobody"
    found, over = judge.judge(numbers, since=21, work=work)
    assert over == []
    assert all(one.since == 1 for one in found)
    return {one.rank: one.cause for one in found}


SLOW = FAST._replace(own_s=0.4)


@pytest.mark.parametrize(
    ("slow", "cause"),
    [
        (SLOW, "compute"),
        (SLOW._replace(data_s=0.3), "input"),
        (SLOW._replace(data_s=0.1), "compute"),  # most of the time is not the data's
        (SLOW._replace(kept_off_s=0.25), "host"),
        (SLOW._replace(kept_off_s=0.25, data_s=0.25), "input"),
        (FAST._replace(own_s=0.14), None),
        (FAST._replace(wall_s=0.0), None),
    ],
)
@pytest.mark.parametrize("size", [2, 3, 4, 7])
def test_each_cause_is_told_from_the_numbers(slow: Numbers, cause: Cause | None, size: int) -> None:
    assert find([FAST] * (size - 1) + [slow]) == ({size - 1: cause} if cause else {})


def test_times_that_are_long_everywhere_are_no_cause() -> None:
    busy = FAST._replace(kept_off_s=0.08, data_s=0.08)
    assert find([busy, busy, busy._replace(own_s=0.4)]) == {2: "compute"}


def test_half_of_the_ranks_may_be_slow() -> None:
    assert find([FAST, SLOW, FAST, SLOW]) == {1: "compute", 3: "compute"}


def test_a_host_whose_ranks_are_all_slow_is_the_cause() -> None:
    assert find([FAST, FAST, SLOW, SLOW], "aabb") == {2: "host", 3: "host"}
    assert find([FAST, FAST, FAST, SLOW], "aabb") == {3: "compute"}
    assert find([FAST, FAST, FAST, SLOW], "aaab") == {3: "compute"}, "one rank says nothing of its host"
    assert find([SLOW, SLOW._replace(data_s=0.3), FAST, FAST], "aabb") == {0: "compute", 1: "input"}


def test_less_than_a_millisecond_is_not_worth_a_word() -> None:
    quick = Numbers(own_s=0.0004, data_s=0.0, kept_off_s=0.0, wall_s=0.001)
    assert find([quick, quick._replace(own_s=0.0012)]) == {}
    assert find([quick, quick._replace(own_s=0.0016)]) == {1: "compute"}


def test_a_rank_is_slow_for_the_work_that_it_has() -> None:
    """With fewer samples it takes as long as the others, and is a straggler still; a rank with more work is none."""
    assert find([FAST, FAST], work=[26.0, 6.0]) == {1: "compute"}
    assert find([FAST, FAST._replace(own_s=0.3)], work=[10.0, 30.0]) == {}


@pytest.mark.parametrize(
    ("edges", "named"),
    [
        # Seconds from the host before and the one after, host by host.
        ([(0.1, 0.1)] * 4, []),
        ([(0.1, 0.1), (0.1, 1.0), (1.0, 1.0), (1.0, 0.1)], [2]),
        ([(0.1, 0.1), (0.1, 1.0), (0.1, 0.1), (1.0, 0.1)], [2]),  # only what it sends is slow
        ([(0.1, 0.1), (0.1, 1.0), (1.0, 0.1), (0.1, 0.1)], []),  # one link between two hosts: neither's
        ([(0.1, 0.2), (0.2, 0.1), (0.1, 0.1), (0.1, 0.1)], []),
        ([(0.0, 0.0), (0.1, 1.0), (1.0, 1.0), (1.0, 0.1)], []),  # not measured everywhere
    ],
)
def test_a_slow_network_is_that_of_a_host_with_all_its_links(
    edges: list[tuple[float, float]], named: list[int]
) -> None:
    numbers = [FAST._replace(from_previous_s=a / 1e3, from_next_s=b / 1e3) for a, b in edges]
    assert find(numbers, "abcd") == dict.fromkeys(named, "network")
    idle = [n._replace(bytes_sent=100.0) for n in numbers]
    assert find(idle, "abcd") == {}, "where little is sent, it costs nothing"
    assert find(numbers[1:3], "bc") == {}, "of two hosts it cannot be told"


def test_a_verdict_comes_and_goes_after_two_checks_in_a_row() -> None:
    judge, told = Judge("ab"), []
    for check, own in enumerate([0.4, 0.1, 0.4, 0.1, 0.4, 0.4, 0.3, 0.1, 0.4, 0.1, 0.13, 0.1, 0.1, 0.1]):
        found, over = judge.judge([FAST, FAST._replace(own_s=own)], since=20 * check)
        told += [(check, "found", round(one.factor, 1), one.since) for one in found]
        told += [(check, "over", round(one.factor, 1), one.since) for one in over]
        if check == 6:
            assert judge.stragglers == (Straggler(1, "b", pytest.approx(3.0), "compute", 80),), "the factor of now"
    assert told == [(5, "found", 4.0, 80), (12, "over", 4.0, 80)]  # at check 10 it is 1.3 times as slow
    assert judge.stragglers == ()


# In a world --------------------------------------------------------------------------------------------------------


class Timed(Dataset[tuple[Tensor, Tensor]]):
    """Rows that take a time to read, on the clock of the rank that reads."""

    def __init__(self, read_s: Callable[[int], float]) -> None:
        self.read_s = read_s

    def __len__(self) -> int:
        return len(X)

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        clock = join().ledger.clock
        clock.now += self.read_s(join().rank)  # type: ignore[attr-defined]
        return X[i], Y[i]


class Clock:
    """Stands still but for what a rank says that it computes."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Run:
    """What became of a run in threads, as each rank saw it."""

    def __init__(self, size: int, **settings: Any) -> None:
        self.ranks = run_threads(lambda world: train(world, **settings), size)
        self.weights = [weights for _, weights, _, _ in self.ranks]
        self.events = [events for _, _, events, _ in self.ranks]
        self.verdicts = [verdicts for _, _, _, verdicts in self.ranks]

    @property
    def models(self) -> list[list[Tensor]]:
        return [model for model, _, _, _ in self.ranks]


def train(
    world: World,
    spec: str = "allreduce",
    *,
    slow: Callable[[int, int], float] = lambda rank, step: 1.0,
    read_s: Callable[[int], float] | None = None,
    steps: int = 120,
    late: int = -1,
    **options: Any,
) -> tuple[list[Tensor], list[float], list[str], tuple[Straggler, ...]]:
    """A step takes slow(rank, step) * (5 ms + 1 ms a sample). `late`: this rank reads a batch ahead of the others."""
    world.ledger.clock = clock = Clock()
    world.ledger.restart()
    model = copy.deepcopy(MODEL)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.5)
    replica = un.parallel(model, optimizer, spec, world=world)
    data = (X, Y) if read_s is None else Timed(read_s)
    shard = un.shard(data, 24, world=world, **options)
    batches, weights = iterate(shard), []
    ahead = next(batches) if world.rank == late else None
    for step in range(1, steps + 1):
        x, y = next(batches) if ahead is None else ahead
        ahead = None if world.rank != late else next(batches)
        weights.append(world.weight)
        clock.now += slow(world.rank, step) * (0.005 + 0.001 * len(x))
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
    model = replica.consolidate()
    replica.close()
    return list(model.parameters()), weights, world.ledger.format_events().splitlines(), world.stragglers


def iterate(shard: Any) -> Iterator[Any]:
    while True:
        yield from shard


@cache
def train_alone(steps: int) -> list[Tensor]:
    """The same in plain PyTorch, on whole batches in the order of one worker."""
    model = copy.deepcopy(MODEL)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.5)
    shard = un.shard((X, Y), 24, world=World(), name="alone")
    for _, (x, y) in zip(range(steps), iterate(shard), strict=False):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
    return list(model.parameters())


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Checks every 20 steps, and nothing measured of the machine."""
    monkeypatch.setattr(watch_module, "EVERY_S", 0.0)
    monkeypatch.setattr(ProcessorWait, "take", lambda self, busy_s: 0.0)


def slow_between(rank: int, first: int, last: int, factor: float = 4.0) -> Callable[[int, int], float]:
    return lambda r, step: factor if r == rank and first <= step <= last else 1.0


@pytest.mark.parametrize(
    ("spec", "options"),
    [
        ("allreduce", {}),
        ("allreduce", {"partition": "strided"}),
        ("allreduce", {"cost": [1.0] * len(X)}),
        ("zero(stage=2)", {}),
    ],
    ids=["contiguous", "strided", "cost", "zero"],
)
def test_what_is_trained_is_that_of_one_process(spec: str, options: dict[str, Any]) -> None:
    run = Run(3, spec=spec, slow=slow_between(2, 10, 90), balance=True, **options)
    assert min(run.weights[2]) < 0.5, "it got fewer samples"
    assert [sum(each) for each in zip(*run.weights, strict=True)] == pytest.approx([3.0] * 120)
    for model in run.models:
        torch.testing.assert_close(model, train_alone(120), rtol=1e-9, atol=1e-11)


def test_with_accumulation_it_is_the_undisturbed_run() -> None:
    settings = {"spec": "allreduce(accumulate=2)", "steps": 100}
    slow, even = Run(2, slow=slow_between(1, 1, 100), balance=True, **settings), Run(2, **settings)
    assert min(slow.weights[1]) < 0.6
    assert set(even.weights[1]) == {1.0}
    torch.testing.assert_close(slow.models[0], even.models[0], rtol=1e-9, atol=1e-11)


def test_a_slow_rank_is_named_gets_fewer_samples_and_gets_them_back(capsys: pytest.CaptureFixture[str]) -> None:
    run = Run(2, slow=slow_between(1, 1, 100), balance=True, steps=300)
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith("unisono: rank 1 is 4.0x slower than the others since step 1: compute; its share of a ")
    assert lines[0].endswith("batch goes from 12 to 5 samples")
    assert any("rank 1 is as fast as the others again at step" in line for line in lines)
    assert run.events[0] == run.events[1], "every rank has the same in its ledger"
    found = next(event for event in run.events[0] if " straggler:" in event)
    assert found.startswith("step 50: straggler: rank=1, host=localhost, factor=")
    assert found.endswith("cause=compute, since=1")
    assert any("straggler over: rank=1" in event for event in run.events[0])
    assert run.weights[1][40:49] == [1.0] * 9
    assert run.weights[1][52] == 5 * 2 / 24
    assert min(run.weights[1][60:100]) < 0.5
    assert run.weights[1][-1] > 0.8
    assert run.verdicts == [(), ()]


def test_verdicts_are_there_for_others_to_act_on(capsys: pytest.CaptureFixture[str]) -> None:
    run = Run(4, slow=slow_between(2, 15, 999), steps=75)
    for verdicts in run.verdicts:
        [one] = verdicts
        assert replace(one, factor=round(one.factor, 3)) == Straggler(2, "localhost", 4.0, "compute", 21)
    assert {weight for weights in run.weights for weight in weights} == {1.0}, "nobody asked for other shares"
    assert capsys.readouterr().err == (
        "unisono: rank 2 is 4.0x slower than the others since step 21: compute; un.shard(..., balance=True) or "
        "`unisono run --balance` gives it fewer samples\n"
    )


def test_slow_input_is_named_from_the_spans_of_data() -> None:
    run = Run(2, read_s=lambda rank: 0.01 * rank, balance=True, steps=70)
    [one] = run.verdicts[0]
    assert (one.rank, one.cause) == (1, "input")
    assert run.weights[1][-1] < 0.6


def test_a_busy_host_is_named_from_what_the_system_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ProcessorWait, "take", lambda self, busy_s: 0.7 * busy_s * (join().rank == 0))
    [one] = Run(3, slow=slow_between(0, 1, 99), steps=60).verdicts[1]
    assert (one.rank, one.cause) == (0, "host")


@pytest.mark.parametrize("spec", ["local_sgd(every=4)", "diloco(every=5)"])
def test_methods_that_weigh_models_by_samples_deal_them_by_speed(spec: str) -> None:
    assert min(Run(2, spec=spec, slow=slow_between(1, 1, 999), balance=True, steps=60).weights[1]) < 0.6


def test_methods_whose_result_depends_on_the_shares_only_name_a_slow_rank() -> None:
    run = Run(2, spec="gossip", slow=slow_between(1, 1, 999), balance=True, steps=60)
    assert {weight for weights in run.weights for weight in weights} == {1.0}
    assert [one.rank for one in run.verdicts[0]] == [1]


def test_methods_that_do_not_wait_tell_each_other_nothing() -> None:
    def work(world: World) -> int:
        world.barrier()
        train(world, "async_average", slow=slow_between(1, 1, 999), steps=45)
        return sum(record.tag == "stragglers" for record in world.ledger.records)

    assert run_threads(work, 2) == [0, 0]


def test_ranks_at_different_batches_keep_their_shares(capsys: pytest.CaptureFixture[str]) -> None:
    """A program that reads ahead on one rank alone: shares changed now would lose a sample, or read it twice."""
    run = Run(2, slow=slow_between(1, 1, 999), balance=True, steps=90, late=0)
    assert {weight for weights in run.weights for weight in weights} == {1.0}
    lines = [line for line in capsys.readouterr().err.splitlines() if "stay dealt as they are" in line]
    assert len(lines) == 1, "said once"
    assert "rank 0: [['shard0', 12, 3]]; rank 1: [['shard0', 12, 2]]" in lines[0]


def test_a_second_replica_of_a_world_counts_no_steps() -> None:
    def work(world: World) -> int:
        pairs = []
        for _ in range(2):
            model = copy.deepcopy(MODEL)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            pairs.append((model, optimizer, un.parallel(model, optimizer, world=world)))
        for _ in range(19):
            for model, optimizer, _ in pairs:
                model(X[:4]).mean().backward()
                optimizer.step()
        return sum(record.tag == "stragglers" for record in world.ledger.records)

    assert run_threads(work, 2) == [0, 0]


def test_a_world_that_is_narrowed_begins_anew() -> None:
    def work(world: World) -> set[int]:
        for _ in range(2):
            model = copy.deepcopy(MODEL)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            replica = un.parallel(model, optimizer, world=world)
            for _ in range(35):
                model(X[:4]).mean().backward()
                optimizer.step()
            replica.close()
            if world.size == 4:
                world.narrow([0, 1])
        checks = [record for record in world.ledger.records if record.tag == "stragglers"]
        return {
            record.bytes_sent * world_size // (world_size - 1)
            for record, world_size in zip(checks, [4, 2], strict=True)
        }

    numbers = 8 * len(Numbers._fields)
    assert run_threads(work, 4) == [{2 * 4 * numbers, 2 * 2 * numbers}] * 4, "the numbers of four ranks, then of two"


def test_steps_are_counted_until_the_next_check_is_due(monkeypatch: pytest.MonkeyPatch) -> None:
    """The later of 20 steps and two seconds of the slowest rank: here 2 s / (4 * 17 ms) = 30 steps."""
    monkeypatch.setattr(watch_module, "EVERY_S", 2.0)
    begun: list[int] = []
    measure = watch_module.StragglerWatch._measure

    def note(self: Any, world: World, treatment: Any) -> Numbers:
        if world.rank == 0:
            begun.append(world.ledger.step_count)
        return measure(self, world, treatment)

    monkeypatch.setattr(watch_module.StragglerWatch, "_measure", note)
    Run(2, slow=lambda rank, step: 4.0, steps=120)
    assert begun == [20, 50, 80, 110]


# What is measured --------------------------------------------------------------------------------------------------


def test_links_are_measured_between_the_first_ranks_of_neighbouring_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ThreadTransport, "name", "messages")

    def work(world: World) -> tuple[list[int], list[float], int]:
        probe, channel = LinkProbe(world), world.channel(inline=False)
        probe.begin(channel)
        seconds = probe.end(channel, world.ledger)
        return probe.peers, seconds, sum(r.op == "recv" for r in world.ledger.records)

    found = run_threads(work, 5, hosts=list("aabcd"))
    assert [peers for peers, _, _ in found] == [[4, 2], [], [0, 3], [2, 4], [3, 0]]
    for peers, seconds, messages in found:
        assert all(s > 0 for s in seconds) == bool(peers)
        assert messages == 2 * links._MESSAGES * bool(peers)


def test_two_hosts_or_shared_memory_are_not_measured() -> None:
    assert run_threads(lambda world: LinkProbe(world).peers, 3, hosts=list("abc")) == [[], [], []]


def test_time_without_a_core_is_what_the_system_counts(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    from unisono.launchers.runtime import machine

    monkeypatch.undo()
    monkeypatch.setattr(machine, "_TASKS", tmp_path)
    monkeypatch.setattr(machine, "_read_steal", lambda: (0, 0))
    (tmp_path / "7").mkdir()
    (tmp_path / "8").mkdir()
    (tmp_path / "7" / "schedstat").write_text("5000 1000 3\n")
    (tmp_path / "8" / "schedstat").write_text("5000 9000000000 3\n")
    wait = ProcessorWait()
    (tmp_path / "7" / "schedstat").write_text("5000 51000 3\n")
    assert wait.take(1.0) == pytest.approx(50e-6), "of the thread that waited longest since"
    assert wait.take(1.0) == 0.0
    for name in ("7", "8"):
        (tmp_path / name / "schedstat").unlink()
    assert ProcessorWait().take(1e6) > 1e5, "where nothing is counted: by the clock, and not by the processor"
