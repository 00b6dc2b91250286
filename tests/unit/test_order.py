"""The arithmetic of who gets which samples."""

from __future__ import annotations

import doctest
import itertools
import time
from typing import Any

import numpy as np
import pytest

from unisono.training.data import order as order_module
from unisono.training.data.order import balance_parts, draw_permutation, order_epoch, slice_part

SIZES = range(1, 6)
GOLDEN = [6, 7, 8, 4, 11, 0, 1, 5, 10, 3, 9, 2]


def random_classes(rng: np.random.Generator, n: int) -> np.ndarray[Any, Any]:
    kinds = int(rng.integers(1, 9))
    drawn = rng.choice(kinds, n, p=rng.dirichlet(np.full(kinds, 0.5)))
    return np.unique(drawn, return_inverse=True)[1].reshape(-1).astype(np.int32)


def test_docstring_examples_hold() -> None:
    assert doctest.testmod(order_module).failed == 0


@pytest.mark.parametrize("n", [0, 1, 2, 3, 64, 1000])
def test_permutation_holds_every_index_once(n: int) -> None:
    assert sorted(draw_permutation(n, seed=3, epoch=1).tolist()) == list(range(n))


def test_permutation_differs_by_seed_epoch_and_stream() -> None:
    keys = [(0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1), (-1, 0, 0), (2**70, 5, 0)]
    drawn = {tuple(draw_permutation(50, seed=s, epoch=e, stream=t)) for s, e, t in keys}
    assert len(drawn) == len(keys)


def test_permutation_is_the_same_for_ever() -> None:
    """A checkpoint in mid-epoch counts on this order: it may not change between versions."""
    assert draw_permutation(12, seed=7, epoch=2).tolist() == GOLDEN


def test_permutation_is_uniform() -> None:
    """Each of the 24 orders of 4 things comes up about equally often (chi-squared, 23 degrees of freedom)."""
    seen = [tuple(draw_permutation(4, seed=seed, epoch=0).tolist()) for seed in range(4800)]
    counts = np.array([seen.count(order) for order in itertools.permutations(range(4))])
    assert ((counts - 200) ** 2 / 200).sum() < 60


@pytest.mark.parametrize("how", ["contiguous", "strided"])
def test_parts_cover_a_batch_once_and_differ_by_at_most_one(how: Any) -> None:
    for m, size in itertools.product(range(30), SIZES):
        parts = [list(range(m))[slice_part(m, rank=r, size=size, partition=how)] for r in range(size)]
        assert sorted(itertools.chain(*parts)) == list(range(m))
        lengths = [len(part) for part in parts]
        assert max(lengths) - min(lengths) <= 1


@pytest.mark.parametrize("shuffle", [True, False])
def test_stratified_batches_have_the_class_mix_of_the_whole_to_within_one(shuffle: bool) -> None:
    rng = np.random.default_rng(1)
    for trial in range(300):
        n = int(rng.integers(1, 90))
        batch_size = int(rng.integers(1, n + 5))
        classes = random_classes(rng, n)
        whole = np.bincount(classes)
        order = order_epoch(n, batch_size=batch_size, seed=trial, epoch=0, shuffle=shuffle, classes=classes)
        assert sorted(order.tolist()) == list(range(n))
        for start in range(0, n, batch_size):
            batch = classes[order[start : start + batch_size]]
            exact = whole * len(batch) / n
            counts = np.bincount(batch, minlength=len(whole))
            assert (np.abs(counts - exact) < 1).all()


def test_stratified_parts_have_the_batch_mix_to_within_one_and_even_sizes() -> None:
    rng = np.random.default_rng(2)
    for trial in range(100):
        n = int(rng.integers(5, 90))
        classes = random_classes(rng, n)
        kinds = int(classes.max()) + 1
        batch_size = int(rng.integers(5, n + 1))
        order = order_epoch(n, batch_size=batch_size, seed=trial, epoch=0, shuffle=True, classes=classes)
        for start, size in itertools.product(range(0, n, batch_size), SIZES):
            batch = classes[order[start : start + batch_size]]
            mix = np.bincount(batch, minlength=kinds) / size
            parts = [batch[slice_part(len(batch), rank=r, size=size, partition="strided")] for r in range(size)]
            for part in parts:
                assert (np.abs(np.bincount(part, minlength=kinds) - mix) < 1).all()
            assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_a_rare_class_is_spread_over_the_epoch() -> None:
    classes = np.zeros(10_000, dtype=np.int32)
    classes[:10] = 1
    order = order_epoch(10_000, batch_size=100, seed=0, epoch=0, shuffle=True, classes=classes)
    batches = np.flatnonzero(classes[order].reshape(100, 100).any(axis=1))
    assert len(batches) == 10
    assert np.ptp(batches) > 30


def test_balanced_parts_cover_a_batch_once_and_keep_the_lpt_bound() -> None:
    """Graham's bound against the true optimum, found by trying every assignment."""
    rng = np.random.default_rng(3)
    for _ in range(40):
        m, size = int(rng.integers(1, 8)), int(rng.integers(1, 4))
        costs = rng.integers(0, 20, m).astype(float)
        parts = balance_parts(costs, size)
        assert sorted(np.concatenate(parts).tolist()) == list(range(m))
        heaviest = max(costs[part].sum() for part in parts)
        best = min(
            max(sum(costs[i] for i in range(m) if to[i] == r) for r in range(size))
            for to in itertools.product(range(size), repeat=m)
        )
        assert heaviest <= best * (4 / 3 - 1 / (3 * size)) + 1e-9


def test_balanced_parts_leave_nobody_without_a_sample() -> None:
    for costs in ([0.0] * 5, [9.0, 0, 0, 0, 0], [1.0, 1, 1, 1, 1]):
        assert all(len(part) for part in balance_parts(np.array(costs), 5))


def test_balanced_parts_are_far_more_even_than_contiguous_ones() -> None:
    costs = np.random.default_rng(4).lognormal(4, 1, 256)
    loads = [costs[part].sum() for part in balance_parts(costs, 4)]
    plain = costs.reshape(4, 64).sum(axis=1)
    assert max(loads) / np.mean(loads) < 1.01 < plain.max() / plain.mean()


def test_a_million_samples_are_ordered_quickly() -> None:
    """Takes 0.1 to 0.3 s of a processor; the bound only tells it from a loop over samples."""
    classes = np.random.default_rng(5).integers(0, 1000, 1_000_000).astype(np.int32)
    start = time.process_time()
    order = order_epoch(1_000_000, batch_size=256, seed=0, epoch=0, shuffle=True, classes=classes)
    assert time.process_time() - start < 5
    assert order.dtype == np.int32
