"""Samples dealt by speed: each exactly once, in proportion, and changed only where that makes steps shorter."""

from __future__ import annotations

import doctest
import itertools
import random
from typing import Any

import numpy as np
import pytest
import torch
from test_shards import Count, FakeWorld, Squares, values
from torch.utils.data import DataLoader

from unisono.training.data import shard
from unisono.training.data.order import balance_parts, cut_by_speed
from unisono.training.data.settings import ShardSettings
from unisono.world import speeds as module
from unisono.world.speeds import LEAST_GAIN, Balance, deal_by_speed


@pytest.fixture
def rng(seed: int) -> random.Random:
    return random.Random(seed)


def draw_speeds(rng: random.Random, size: int | None = None) -> list[float]:
    return [rng.choice([1.0, 1.0, rng.uniform(0.001, 5.0)]) for _ in range(size or rng.randint(1, 7))]


def test_docstring_examples_hold() -> None:
    assert doctest.testmod(module).failed == 0


# How many ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(10))
def test_shares_add_up_and_are_proportional_with_one_sample_at_least(rng: random.Random) -> None:
    speeds, m = draw_speeds(rng), rng.randint(0, 200)
    counts = deal_by_speed(m, speeds)
    assert sum(counts) == m
    assert min(counts) >= (m >= len(speeds))
    quotas = [m * s / sum(speeds) for s in speeds]
    given = sum(q < 1 for q in quotas)  # to these a sample may have been given, by the others
    assert all(abs(n - q) < 1 + given for n, q in zip(counts, quotas, strict=True))


@pytest.mark.parametrize("partition", ["contiguous", "strided"])
@pytest.mark.parametrize("seed", range(10))
def test_parts_cover_a_batch_once(rng: random.Random, partition: Any) -> None:
    speeds, m = draw_speeds(rng), rng.randint(0, 200)
    parts = [np.arange(m)[cut_by_speed(m, speeds, rank=r, partition=partition)] for r in range(len(speeds))]
    assert [len(part) for part in parts] == deal_by_speed(m, speeds)
    assert sorted(np.concatenate(parts).tolist()) == list(range(m))


@pytest.mark.parametrize("seed", range(8))
def test_strided_parts_keep_the_class_mix(rng: random.Random) -> None:
    """Inside a batch the samples lie class by class: each rank has its share of each, to within a sample or so."""
    speeds, counts = draw_speeds(rng, 4), [rng.randint(1, 60) for _ in range(5)]
    classes = np.repeat(np.arange(5), counts)
    for rank in range(4):
        mine = cut_by_speed(len(classes), speeds, rank=rank, partition="strided")
        held = np.bincount(classes[mine], minlength=5)
        expected = np.array(counts) * len(classes[mine]) / len(classes)
        assert (abs(held - expected) <= 2.5).all()


@pytest.mark.parametrize("seed", range(8))
def test_costs_are_balanced_by_time(rng: random.Random) -> None:
    speeds, m = draw_speeds(rng), rng.randint(1, 80)
    costs = np.array([rng.choice([0.0, rng.expovariate(0.1)]) for _ in range(m)])
    parts = balance_parts(costs, len(speeds), speeds)
    assert sorted(np.concatenate(parts).tolist()) == list(range(m))
    assert min(map(len, parts)) >= (m >= len(speeds))
    longest = max(
        (costs[p].sum() - costs[p].min(initial=0.0) * (len(p) == 1)) / s
        for p, s in zip(parts, speeds, strict=True)
        if len(p)
    )
    assert longest <= 2 * max(costs.sum() / sum(speeds), costs.max() / max(speeds)) + 1e-9


def test_equal_speeds_deal_as_no_speeds() -> None:
    rng = np.random.default_rng(0)
    for m, size in itertools.product(range(1, 40), range(1, 6)):
        even = [len(part) for part in np.array_split(np.arange(m), size)]
        assert deal_by_speed(m, [1.0] * size) == even
        costs = rng.random(m)
        plain, same = balance_parts(costs, size), balance_parts(costs, size, [1.0] * size)
        if m >= size:
            assert [p.tolist() for p in plain] == [p.tolist() for p in same]


# When --------------------------------------------------------------------------------------------------------------


def follow(slow: list[list[float]], m: int, fixed: float) -> list[list[int]]:
    """The shares after every check, where rank i takes slow[check][i] * (fixed + n_i) seconds."""
    balance, counts, seen = Balance(), deal_by_speed(m, [1.0] * len(slow[0])), []
    for now in slow:
        proposed = balance.propose([s * (fixed + n) for s, n in zip(now, counts, strict=True)], counts)
        counts = counts if proposed is None else deal_by_speed(m, proposed)
        seen.append(counts)
    return seen


def time_of(counts: list[int], slow: list[float], fixed: float) -> float:
    return max(s * (fixed + n) for s, n in zip(slow, counts, strict=True))


@pytest.mark.parametrize("fixed", [0.0, 4.0, 30.0])
@pytest.mark.parametrize("slow", [[1.0, 4.0], [1.0, 1.0, 1.0, 3.0], [2.0, 1.0, 5.0, 1.0, 1.0]], ids=str)
def test_shares_come_close_to_the_best_and_stay(slow: list[float], fixed: float) -> None:
    m = 32 * len(slow)
    found = follow([slow] * 16, m, fixed)
    assert found[0] == found[-1] or found[0] == deal_by_speed(m, [1.0] * len(slow)), "one check alone changes nothing"
    assert found[-1] == found[-4], "they have come to rest"
    # The least time: with it, ranks take as many samples as there are (at most twice an even share, at least one).
    least = max(s * (fixed + 1) for s in slow)
    times = sorted({least, *(t for s in slow for n in range(1, 65) if (t := s * (fixed + n)) > least)})
    best = next(t for t in times if sum(max(1, min(64, int(t / s - fixed + 1e-9))) for s in slow) >= m)
    assert time_of(found[-1], slow, fixed) <= best / (1.0 - LEAST_GAIN) * 1.05


@pytest.mark.parametrize("fixed", [0.0, 8.0, 50.0])
def test_what_a_step_costs_beside_its_samples_shows_when_shares_change(fixed: float) -> None:
    balance, counts = Balance(), [32, 32, 32, 32]
    for _ in range(3):
        own_s = [s * (fixed + n) for s, n in zip([1.0, 1.0, 1.0, 5.0], counts, strict=True)]
        proposed = balance.propose(own_s, counts)
        counts = counts if proposed is None else deal_by_speed(128, proposed)
    assert counts != [32, 32, 32, 32]
    assert balance.fixed == pytest.approx(fixed, rel=0.25, abs=1.5)
    work = balance.count_work(counts)
    slower = own_s[3] / work[3] / (own_s[0] / work[0])
    assert slower == pytest.approx(5.0, rel=0.1), "so it is as slow as before"


def test_shares_are_even_again_when_the_slow_rank_is_not_any_more() -> None:
    found = follow([[1.0, 4.0]] * 8 + [[1.0, 1.0]] * 12, 64, 8.0)
    assert found[7][1] < 16
    assert time_of(found[-1], [1.0, 1.0], 8.0) <= time_of([32, 32], [1.0, 1.0], 8.0) / (1.0 - LEAST_GAIN)


@pytest.mark.parametrize(
    "slow",
    [
        [[1.0, 1.05]] * 10,  # not worth a change
        [[1.0, 1.0], [1.0, 8.0], [1.0, 1.0]] * 3,  # one bad check now and then
        [[0.0, 0.0]] * 5,  # nothing was measured
    ],
    ids=["little", "now and then", "nothing"],
)
def test_shares_stay_where_nothing_is_gained(slow: list[list[float]]) -> None:
    assert follow(slow, 64, 0.0) == [[32, 32]] * len(slow)


def test_no_rank_gets_more_than_twice_its_even_share() -> None:
    found = follow([[1.0, 50.0, 50.0, 50.0]] * 12, 64, 0.0)
    assert max(found[-1]) == 32


# Shards ------------------------------------------------------------------------------------------------------------


class BalancedWorld(FakeWorld):
    speeds: tuple[float, ...] | None = None


KINDS: dict[str, tuple[Any, dict[str, Any]]] = {
    "tensor": (torch.arange(103), {}),
    "strided": (torch.arange(103), {"partition": "strided"}),
    "map": (Squares(103), {}),
    "stream": (Count(103), {}),
    "strided stream": (Count(103), {"partition": "strided"}),
    "loader": (DataLoader(Squares(103), batch_size=16, shuffle=True), {"batch_size": None}),
    "stratify": (torch.arange(103), {"stratify": torch.arange(103) % 5}),
    "cost": (torch.arange(103), {"cost": torch.arange(103) % 7 + 1.0}),
    "cost of tokens": (torch.arange(103), {"cost": torch.arange(103) % 7 + 1.0, "weigh_by": "cost"}),
    "read ahead": (Squares(103), {"num_workers": 1}),
    "kept readers": (
        DataLoader(Squares(103), batch_size=16, num_workers=1, persistent_workers=True),
        {"batch_size": None},
    ),
}


def read_all(data: Any, options: dict[str, Any], size: int, rng: random.Random) -> list[list[tuple[list[int], float]]]:
    """An epoch of all ranks, batch by batch; between two batches the speeds may change."""
    worlds = [BalancedWorld(rank, size) for rank in range(size)]
    ranks = [shard(data, **{"batch_size": 16, **options}, balance=True, world=world) for world in worlds]  # type: ignore[arg-type]
    seen = []
    for batches in zip(*ranks, strict=True):
        seen.append([(values(b), world.weight) for b, world in zip(batches, worlds, strict=True)])
        if rng.random() < 0.6:
            speeds = rng.choice([None, tuple(draw_speeds(rng, size))])
            for world, one in zip(worlds, ranks, strict=True):
                world.speeds = speeds
                one.redistribute()
    return seen


@pytest.mark.parametrize("kind", KINDS)
def test_every_sample_comes_once_over_any_change_of_speeds(kind: str) -> None:
    data, options = KINDS[kind]
    for seed, size in enumerate([2] if kind in ("read ahead", "kept readers") else [1, 2, 3, 5]):
        seen = read_all(data, options, size, random.Random(seed))
        even = [counted(one) for one in read_all(data, options, 1, random.Random(0))]
        assert [counted(one) for one in seen] == even, "global batches stay what they are"
        assert sorted(itertools.chain(*even)) == list(range(103))
        for one in seen:
            assert sum(weight for _, weight in one) == pytest.approx(size)
            if kind != "cost of tokens":
                m = sum(len(part) for part, weight in one if weight)
                assert all(weight in (0.0, pytest.approx(len(part) * size / m)) for part, weight in one)


def test_ranks_that_read_ahead_deal_by_new_speeds_from_the_next_batch_on() -> None:
    """Each has read ahead as far as it likes: without reading again, some samples would come twice and others never."""
    worlds = [BalancedWorld(rank, 2) for rank in range(2)]
    readers = zip(worlds, [0, 1], strict=True)
    ranks: list[Any] = [shard(Squares(64), 16, num_workers=n, balance=True, world=w) for w, n in readers]  # type: ignore[arg-type]
    seen, lengths = [], []
    for batches in zip(*ranks, strict=True):
        seen += [v for batch in batches for v in values(batch)]
        lengths.append([len(values(batch)) for batch in batches])
        for world, one in zip(worlds, ranks, strict=True):
            world.speeds = (1.5, 0.5) if one.batch < 3 else None
            one.redistribute()
    assert lengths == [[8, 8], [12, 4], [12, 4], [8, 8]]
    assert sorted(seen) == list(range(64))


def counted(one_round: list[tuple[list[int], float]]) -> list[int]:
    return sorted(v for part, weight in one_round if weight for v in part)


def test_shards_follow_speeds_only_where_that_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    def lengths(**options: Any) -> list[int]:
        worlds = [BalancedWorld(rank, 2) for rank in range(2)]
        for world in worlds:
            world.speeds = (1.5, 0.5)
        return [len(next(iter(shard(torch.arange(16), 8, world=w, **options)))) for w in worlds]  # type: ignore[arg-type]

    assert lengths() == [4, 4]
    assert lengths(balance=True) == [6, 2]
    monkeypatch.setenv("UNISONO_BALANCE", "1")
    assert lengths() == [6, 2]
    assert lengths(balance=False) == [4, 4]
    monkeypatch.setenv("UNISONO_BALANCE", "yes")
    with pytest.raises(ValueError, match="UNISONO_BALANCE='yes'"):
        lengths()
    with pytest.raises(ValueError, match=r"balance='speed'\. Expected True or False"):
        ShardSettings(balance="speed")  # type: ignore[arg-type]
