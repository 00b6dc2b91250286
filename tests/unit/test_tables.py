"""Data that lies with the workers: every row once, in batches of the right size, with the right weights."""

from __future__ import annotations

import os
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch

import unisono as un
from unisono.launchers.runtime.table_part import TableFiles, write_listing
from unisono.training.data.tables import TablePart, count_prefix, select_batches

COUNTS = [[5], [3, 3], [7, 1], [1, 1, 9], [4, 4, 4, 1]]


@pytest.mark.parametrize("counts", COUNTS)
def test_a_prefix_is_that_of_all_samples_sorted_by_their_places(counts: list[int]) -> None:
    places = sorted((Fraction(2 * j + 1, 2 * n), rank) for rank, n in enumerate(counts) for j in range(n))
    for total in range(len(places) + 1):
        wanted = [sum(rank == r for _, rank in places[:total]) for r in range(len(counts))]
        assert count_prefix(counts, total) == wanted


@pytest.mark.parametrize("counts", COUNTS)
@pytest.mark.parametrize("batch_size", [1, 2, 5, 100])
def test_batches_are_full_and_have_every_sample_once(counts: list[int], batch_size: int) -> None:
    number = -(-sum(counts) // batch_size)
    each = [
        list(select_batches(counts, rank=r, batch_size=batch_size, first=0, stop=number, seed=3, epoch=1, shuffle=True))
        for r in range(len(counts))
    ]
    for rank, mine in enumerate(each):
        assert sorted(i for indices, weight in mine if weight for i in indices.tolist()) == list(range(counts[rank]))
    for i in range(number):
        held = [len(mine[i][0]) if mine[i][1] else 0 for mine in each]
        assert sum(held) == min(batch_size, sum(counts) - i * batch_size)
        assert [mine[i][1] for mine in each] == pytest.approx([h * len(counts) / sum(held) for h in held])


def test_a_shard_of_placed_rows_has_the_gradient_of_the_joined_batch() -> None:
    rows = [np.arange(5.0), np.arange(5.0, 7.0)]

    def work(world: un.World) -> list[tuple[list[float], float]]:
        part = TablePart.from_columns({"y": rows[world.rank]})
        return [
            (batch["y"].tolist(), world.weight) for batch in un.shard(part, batch_size=4, shuffle=False, world=world)
        ]

    found = un.run_threads(work, 2)
    assert sorted(y for worker in found for ys, weight in worker if weight for y in ys) == list(range(7))
    for first, second in zip(*found, strict=True):
        joined = [*(first[0] if first[1] else []), *(second[0] if second[1] else [])]
        mean = sum(np.mean(ys) * weight for ys, weight in (first, second)) / 2
        assert mean == pytest.approx(np.mean(joined))


def test_a_position_in_mid_epoch_needs_the_same_division() -> None:
    def work(world: un.World, counts: list[int], state: dict[str, Any] | None) -> Any:
        shard = un.shard(TablePart.from_columns({"y": np.zeros(counts[world.rank])}), batch_size=2, world=world)
        if state is not None:
            shard.load_state_dict(state)
            return shard.batch
        next(iter(shard))
        return shard.state_dict()

    saved = un.run_threads(lambda world: work(world, [4, 2], None), 2)[0]
    assert un.run_threads(lambda world: work(world, [4, 2], saved), 2) == [1, 1]
    with pytest.raises(ValueError, match=r"with \[4, 2\] samples on the ranks, which now have \[3, 3\]"):
        un.run_threads(lambda world: work(world, [3, 3], saved), 2)
    assert un.run_threads(lambda world: work(world, [3, 3], saved | {"batch": 0}), 2) == [0, 0]


def test_a_rank_without_rows_and_settings_that_move_rows_are_refused() -> None:
    with pytest.raises(ValueError, match=r"no row lies with rank 1: the ranks have \[3, 0\]"):
        un.run_threads(
            lambda world: un.shard(TablePart.from_columns({"y": np.zeros([3, 0][world.rank])}), 2, world=world), 2
        )
    with pytest.raises(ValueError, match=r"got stratify= for a table that is divided among the workers already"):
        un.shard(TablePart.from_columns({"y": np.zeros(3)}), 2, stratify=[0, 1, 1])


# What the agent writes, the worker reads ------------------------------------------------------------------------------


def reopened(monkeypatch: pytest.MonkeyPatch, *written: TableFiles) -> list[TablePart]:
    file = write_listing(written)
    monkeypatch.setenv("UNISONO_PARTS", f"/proc/{os.getpid()}/fd/{file.fileno()}")
    parts = [TablePart(i) for i in range(len(written))]
    file.close()
    for each in written:  # what is mapped stays
        each.close()
    return parts


def test_columns_come_back_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    written = TableFiles("table")
    pieces = [(0, 3), (3, 3), (3, 5)]
    x, y = np.arange(20, dtype=np.float32).reshape(5, 2, 2), np.array([True, False, True, True, False])
    text = ["", "ä", "two words", "b", "c"]
    for first, last in pieces:
        written.add({"x": x[first:last], "y": y[first:last], "t": text[first:last]})
    (part,) = reopened(monkeypatch, written)
    assert np.array_equal(part.columns["x"], x)
    assert np.array_equal(part.columns["y"], y)
    assert [part.columns["t"][i] for i in range(5)] == text
    assert part[4]["t"] == "c"
    assert part[4]["x"].tolist() == [[16.0, 17.0], [18.0, 19.0]]
    assert len(part) == 5
    batch = next(iter(un.shard(part, batch_size=5, shuffle=False)))
    assert torch.equal(batch["x"], torch.from_numpy(x))
    assert batch["t"] == text


def test_samples_keep_their_form(monkeypatch: pytest.MonkeyPatch) -> None:
    pairs, single = TableFiles("pairs"), TableFiles("single")
    pairs.add_samples((np.full(2, i), float(i)) for i in range(3000))  # more than one piece
    single.add_samples(range(4))
    first, second = reopened(monkeypatch, pairs, single)
    assert len(first) == 3000
    assert first[2999][0].tolist() == [2999, 2999]
    assert first[2999][1] == 2999.0
    assert [second[i] for i in range(4)] == [0, 1, 2, 3]
    x, y = next(iter(un.shard(first, batch_size=3000, shuffle=False)))
    assert x.shape == (3000, 2)
    assert y.tolist() == [float(i) for i in range(3000)]


@pytest.mark.parametrize(
    ("pieces", "problem"),
    [
        ([{"a": np.zeros((1, 2))}, {"a": np.zeros((1, 3))}], r"column 'a' has rows of shape \(3,\)"),
        ([{"a": np.zeros(1)}, {"b": np.zeros(1)}], "has the columns b in one part and a in another"),
        ([{"a": [1, None]}], "column 'a' holds (int|NoneType), which cannot be given to workers"),
        ([{"when": np.zeros(1, dtype="datetime64[s]")}], r"column 'when' is of type datetime64\[s\]"),
    ],
)
def test_columns_that_cannot_be_given_are_named(pieces: list[dict[str, Any]], problem: str) -> None:
    written = TableFiles("table")
    for piece in pieces[:-1]:
        written.add(piece)
    with pytest.raises((ValueError, TypeError), match=problem):
        written.add(pieces[-1])
    written.close()
