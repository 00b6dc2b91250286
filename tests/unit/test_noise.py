"""Random bits from counters: the same everywhere, uniform, and unrelated between streams and neighbours."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from unisono.methods.kernels.noise import CHUNK, MIX, WEYL, Noise, bits, noise


def words(source: Noise, n: int) -> np.ndarray:
    return bits(source, n).numpy().view(np.uint32)


def test_words_are_those_of_the_formula() -> None:
    source = noise(3, 5, 7, 11).after(2**32 - 2)  # the counter runs over the end of 32 bits
    for i, word in enumerate(words(source, 5).tolist()):
        x = ((i + source.start) * WEYL + source.shift) % 2**32
        x = ((x ^ (x >> 16)) * MIX) % 2**32
        assert word == ((x ^ (x >> 15)) * source.factor) % 2**32


def test_a_stream_is_one_whatever_the_pieces() -> None:
    source, n = noise(0, 1), CHUNK + 1000
    whole = bits(source, n)
    assert torch.equal(torch.cat([bits(source.after(a), min(777, n - a)) for a in range(0, n, 777)]), whole)


def test_other_devices_draw_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """The formula in int64, as it runs where numpy does not reach."""
    expected = bits(noise(1, 2), 5000)
    kept = torch.arange
    monkeypatch.setattr(torch, "arange", lambda *a, device, **k: kept(*a, **k))
    assert torch.equal(bits(noise(1, 2), 5000, "meta"), expected)


def test_every_part_of_a_key_counts() -> None:
    keys = [noise(*(int(i == k) for i in range(5))) for k in range(6)]
    assert len(set(keys)) == 6
    assert all(key.factor % 2 for key in keys)
    assert noise(-1, 0) != noise(1, 0)


@pytest.mark.parametrize("shift", [24, 16, 9])
def test_the_high_bits_are_uniform(shift: int) -> None:
    drawn = words(noise(0, 1), 1 << 20) >> shift & 0xFF
    assert abs(chi_squared(drawn, 256)) < 4.5


def test_neighbours_are_independent() -> None:
    high = (words(noise(0, 2), 1 << 20) >> 28).astype(np.int64)
    for lag in (1, 2, 64, 8192):
        assert abs(chi_squared(high[:-lag] * 16 + high[lag:], 256)) < 4.5, lag


def test_streams_are_independent() -> None:
    """Correlations between the streams of neighbouring steps, ranks and buckets are those of chance."""
    keys = [noise(0, step, rank, bucket) for step in range(4) for rank in range(4) for bucket in range(4)]
    uniform = np.stack([words(key, 8192) for key in keys]) / 2**32
    scores = np.corrcoef(uniform)[np.triu_indices(len(keys), 1)] * math.sqrt(8192)
    assert abs(scores.std() - 1) < 0.1
    assert abs(scores).max() < 5
    by_element = np.corrcoef(uniform[:, :200].T)[np.triu_indices(200, 1)] * math.sqrt(len(keys))
    assert abs(by_element.std() - 1) < 0.05


def chi_squared(values: np.ndarray, kinds: int) -> float:
    """How far counts are from equal, in standard deviations."""
    counts = np.bincount(values, minlength=kinds)
    expected = len(values) / kinds
    return float((((counts - expected) ** 2 / expected).sum() - (kinds - 1)) / math.sqrt(2 * (kinds - 1)))
