"""`mapreduce` in worlds of threads: every reduction against plain Python; how data is split and handed over."""

from __future__ import annotations

import functools
import gc
import operator
import os
import weakref

import numpy as np
import pytest
import scipy.sparse
import torch

import unisono as un
from unisono.launchers.engines.engine import Packed
from unisono.tables.map_reduce import MapReduce, mapreduce, run, spark
from unisono.tables.map_reduce.worker_data import SharedArray, open_shared, share_arrays, split

SIZES = [1, 2, 3, 5]


@pytest.mark.parametrize("size", SIZES)
def test_sum_of_arrays_numbers_and_structures_equals_numpys(size):
    x = np.random.default_rng(0).standard_normal((23, 4))

    def moments(part):
        return {
            "n": len(part),
            "sums": [part.sum(axis=0), torch.from_numpy(part.T @ part)],
            "least": (float(len(part)),),
        }

    for found in un.run_threads(lambda _: mapreduce(moments, "sum", x), size):
        assert found["n"] == 23
        assert found["least"] == (23.0,)
        np.testing.assert_allclose(found["sums"][0], x.sum(axis=0))
        np.testing.assert_allclose(found["sums"][1].numpy(), x.T @ x)


@pytest.mark.parametrize("size", SIZES)
def test_a_function_reduces_in_the_order_of_the_parts(size):
    words = [f"w{i}" for i in range(17)]
    joined = un.run_threads(
        lambda _: mapreduce(lambda part: " ".join(part), lambda a, b: f"{a} {b}".strip(), words), size
    )
    assert joined == [" ".join(words)] * size


@pytest.mark.parametrize("size", SIZES)
def test_rounds_of_gradient_descent_equal_those_of_one_process(size):
    rng = np.random.default_rng(1)
    x, y = rng.standard_normal((40, 3)), rng.standard_normal(40)
    expected = np.zeros(3)
    for _ in range(7):
        expected = expected - 0.01 * x.T @ (x @ expected - y)

    def gradient(part, w):
        x, y = part
        return x.T @ (x @ w - y)

    def step(w, g):
        return w - 0.01 * g

    for reduce in ("sum", operator.add):
        found = un.run_threads(
            functools.partial(_descend, gradient, reduce, (x, y), step),
            size,
        )
        for w in found:
            np.testing.assert_allclose(w, expected, rtol=1e-12)


def _descend(gradient, reduce, data, step, _world):
    return mapreduce(gradient, reduce, data, state=np.zeros(3), update=step, rounds=7)


def test_until_stops_and_states_may_grow():
    def stopped(_):
        return mapreduce(
            lambda part, state: len(part) * [len(state)],
            operator.add,
            list(range(4)),
            state=[],
            update=lambda state, found: [*state, found],
            rounds=50,
            until=lambda old, new: len(new) == 3,
        )

    assert un.run_threads(stopped, 2) == [[[0] * 4, [1] * 4, [2] * 4]] * 2


def test_prepare_runs_once_on_each_part_and_the_part_stays():
    def counted(_):
        calls = []
        result = mapreduce(
            lambda prepared, state: prepared + state,
            "sum",
            np.arange(6.0),
            state=0.0,
            update=lambda state, found: found,
            rounds=3,
            prepare=lambda part: calls.append(1) or float(part.sum()),
        )
        return result, len(calls)

    # 15, then 15 + 2·15, then 15 + 2·45
    assert un.run_threads(counted, 2) == [(105.0, 1)] * 2


def test_own_parts_are_not_split_again():
    assert un.run_threads(lambda w: mapreduce(sum, "sum", [w.rank, 10], own=True), 3) == [33] * 3


def test_an_error_of_the_servers_program_reaches_every_rank():
    def drive(ask):
        raise ValueError("the server found something")

    def caught(_):
        with pytest.raises(ValueError, match="the server found something"):
            run(MapReduce(lambda part, state: 0, "sum", drive), [1, 2, 3])
        return True

    assert un.run_threads(caught, 3) == [True] * 3


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"map": 3}, "got 3 as map"),
        ({"reduce": "mean"}, "got reduce='mean'"),
        ({"rounds": 0}, "got rounds=0"),
        ({"rounds": 2}, "need update="),
    ],
)
def test_arguments_are_checked(arguments, expected):
    with pytest.raises((TypeError, ValueError), match=expected):
        mapreduce(**{"map": len, "reduce": "sum", "data": [1], **arguments})


def test_what_cannot_be_added_is_refused_by_name():
    with pytest.raises(TypeError, match="got str"):
        mapreduce(lambda part: "text", "sum", [1])


def test_workers_are_not_launched_from_inside_a_world(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="already runs on 2 workers"):
        mapreduce(len, "sum", [1], workers=2)


# Data ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 3, 7, 20])
def test_parts_put_together_are_the_whole(size):
    x = np.arange(26.0).reshape(13, 2)
    forms = [x, torch.from_numpy(x), list(range(13)), scipy.sparse.csr_matrix(x)]
    for whole in forms:
        parts = [split(whole, rank, size) for rank in range(size)]
        rows = [row for part in parts for row in _listed(part)]
        assert rows == _listed(whole)
    pairs = [split((x, None, list(range(13))), rank, size) for rank in range(size)]
    assert [i for _, _, numbers in pairs for i in numbers] == list(range(13))
    assert all(len(a) == len(b) for a, _, b in pairs)


def _listed(x):
    return x.toarray().tolist() if scipy.sparse.issparse(x) else x.tolist() if hasattr(x, "tolist") else list(x)


def test_unequal_lengths_are_refused():
    with pytest.raises(ValueError, match=r"equal lengths, got \[2, 3\]"):
        split(([1, 2], [1, 2, 3]), 0, 2)


def test_large_arrays_are_handed_over_as_they_are_and_small_ones_travel():
    rng = np.random.default_rng(0)
    c, f = rng.standard_normal((600, 400)), np.asfortranarray(rng.standard_normal((600, 400)))
    sparse = scipy.sparse.random(2000, 1000, density=0.1, format="csr", random_state=0)
    small = np.arange(5)
    with share_arrays((c, f, sparse, small, None)) as sent:
        assert isinstance(sent[0], SharedArray)
        assert sent[3] is small
        got = open_shared(sent)
        np.testing.assert_array_equal(got[0], c)
        np.testing.assert_array_equal(got[1], f)
        assert got[1].flags.f_contiguous
        assert (got[2] != sparse).nnz == 0
        assert not got[0].flags.writeable
    assert not os.path.exists(sent[0].path)


def test_an_array_that_is_mapped_from_a_file_is_not_copied(tmp_path):
    np.save(tmp_path / "x.npy", np.arange(300_000.0).reshape(1000, 300))
    x = np.load(tmp_path / "x.npy", mmap_mode="r")
    with share_arrays((x, np.asarray(x))) as sent:
        assert [item.path for item in sent] == [str(tmp_path / "x.npy")] * 2
        np.testing.assert_array_equal(open_shared(sent)[1], x)
    with share_arrays((x[5:], x[:, 5:], np.asfortranarray(x))) as sent:  # rows of it, columns of it, a copy of it
        assert sent[0].path == str(tmp_path / "x.npy")
        assert sent[1].path != str(tmp_path / "x.npy") != sent[2].path
        for got, given in zip(open_shared(sent), (x[5:], x[:, 5:], x), strict=True):
            np.testing.assert_array_equal(got, given)


def test_blocks_in_a_spark_process_are_left_out_of_its_garbage_collection_while_they_are_there():
    class Circle:
        def __init__(self):
            self.me = self

    program = Packed((None, None, lambda rows: [Circle() for _ in rows]))
    try:
        spark._keep("run", program, 0, [1, 2, 3])
        block = spark._prepared["run", 0]
        assert len(block) == 3
        assert gc.get_freeze_count() > 0
        assert not any(item is block for item in gc.get_objects())  # frozen: not looked through after every task
        seen = weakref.ref(block[0])
        del block
    finally:
        assert list(spark._forget("run", iter(["marker"]))) == [0]
    assert gc.get_freeze_count() == 0
    gc.collect()
    assert seen() is None  # and collected afterwards
