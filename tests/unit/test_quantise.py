"""Codes of a few bits: against the formulas in float64, one number at a time; packing; Elias's code."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from unisono.methods.kernels import bits as truth
from unisono.methods.kernels import elias, quantise
from unisono.methods.kernels.noise import Noise, bits, noise
from unisono.methods.kernels.quantise import Levels

LEVELS = [Levels(b, block, exponential) for b in (2, 4, 8) for block in (64, 8192) for exponential in (False, True)]
each_grid = pytest.mark.parametrize("levels", LEVELS, ids=str)


def grid(levels: Levels) -> Tensor:
    """The levels by their definition: {0, 2^-s, ..., 1/2, 1} or {0, 1/s, ..., 1}."""
    if levels.exponential:
        s = 2 ** (levels.bits - 1) - 2
        return torch.tensor([0.0, *(2.0**-k for k in range(s, -1, -1))], dtype=torch.float64)
    s = 2 ** (levels.bits - 1) - 1
    return torch.arange(s + 1, dtype=torch.float64) / s


def message(x: Tensor, levels: Levels, source: Noise) -> Tensor:
    out = torch.empty(levels.nbytes(x.numel()), dtype=torch.uint8)
    quantise.encode(x, levels, source, out)
    return out


def through(x: Tensor, levels: Levels, source: Noise, dtype: torch.dtype = torch.float32) -> Tensor:
    out = torch.empty(x.numel(), dtype=dtype)
    quantise.decode(message(x, levels, source), levels, out)
    return out


def reference(x: Tensor, levels: Levels, source: Noise) -> Tensor:
    """Stochastic rounding in float64, with the stream's uniform numbers: up where u >= 1 - p."""
    uniform = (bits(source, x.numel()).numpy().view(np.uint32) >> 9) / 2.0**23
    at, out = grid(levels), torch.empty(x.numel(), dtype=torch.float64)
    for a in range(0, x.numel(), levels.block):
        v = x[a : a + levels.block].double()
        norm = v.norm().float().double()
        r = (v.abs() / norm).nan_to_num(0.0)
        low = (torch.searchsorted(at, r, right=True) - 1).clamp(0, len(at) - 2)
        p = (r - at[low]) / (at[low + 1] - at[low])
        up = torch.from_numpy(uniform[a : a + levels.block]) >= 1 - p
        out[a : a + levels.block] = v.sign() * norm * at[low + up.long()]
    return out


@each_grid
@pytest.mark.parametrize("n", [1, 63, 8192, 20001])
def test_rounding_is_that_of_the_definition(levels: Levels, n: int) -> None:
    x = torch.randn(n, generator=torch.Generator().manual_seed(n))
    got, wanted = through(x, levels, noise(0, n), torch.float64), reference(x, levels, noise(0, n))
    different = (got - wanted).abs() > 1e-6 * wanted.abs()
    assert different.sum() <= 1 + n * 1e-4  # a uniform number that falls on p, to the last of 23 bits


@each_grid
def test_rounding_is_unbiased(levels: Levels) -> None:
    """The mean over many draws is as near to the input as the draws' variance lets it be."""
    x = torch.randn(2048, generator=torch.Generator().manual_seed(1))
    total, squares, draws = torch.zeros(2048, dtype=torch.float64), torch.zeros(2048, dtype=torch.float64), 400
    for step in range(draws):
        error = through(x, levels, noise(0, step)).double() - x.double()
        total += error
        squares += error**2
    ratio = (total**2).sum() / squares.sum()  # 1 if errors are independent with mean 0
    assert 0.85 < ratio < 1.15
    assert abs((total * x.sign()).sum() / squares.sum().sqrt()) < 4  # nor is there a pull to zero


def test_variance_is_that_of_the_papers() -> None:
    """METHODS' check values: Gaussian numbers, blocks of 8192, 4 bits."""
    found = {}
    for exponential in (True, False):
        levels = Levels(4, 8192, exponential)
        ratios = []
        for seed in range(200):
            x = torch.randn(8192, generator=torch.Generator().manual_seed(seed))
            ratios.append(((through(x, levels, noise(seed, 0)) - x) ** 2).sum() / (x**2).sum())
        found[exponential] = float(torch.stack(ratios).mean())
    assert found[True] == pytest.approx(0.335, abs=0.002)
    assert found[False] == pytest.approx(9.31, abs=0.06)


@pytest.mark.parametrize("bits_", [4, 8])
@pytest.mark.parametrize("shape", ["gaussian", "heavy", "equal", "one"])
def test_variance_keeps_its_bound(bits_: int, shape: str) -> None:
    """E|Q(v) - v|^2 <= (1/8 + d 2^(-2s-2)) |v|^2 for exponential levels."""
    d, levels = 1024, Levels(bits_, 1024, True)
    generator = torch.Generator().manual_seed(0)
    x = {
        "gaussian": torch.randn(d, generator=generator),
        "heavy": torch.randn(d, generator=generator) ** 5,
        "equal": torch.ones(d),
        "one": torch.eye(1, d)[0],
    }[shape]
    s = 2 ** (bits_ - 1) - 2
    mean = sum(float(((through(x, levels, noise(0, k)) - x) ** 2).sum()) for k in range(100)) / 100
    assert mean <= (1 / 8 + d * 2.0 ** (-2 * s - 2)) * float((x**2).sum()) * 1.05 + 1e-12


@each_grid
def test_zeros_stay_zeros_and_a_block_of_zeros_is_zero(levels: Levels) -> None:
    x = torch.randn(20000)
    x[::3] = 0
    x[8192:16384] = 0
    out = through(x, levels, noise(0, 0))
    assert torch.equal(out[x == 0], torch.zeros(int((x == 0).sum())))


@each_grid
@pytest.mark.parametrize("scale", [1e-42, 1e-30, 1e30])
def test_small_and_large_numbers_round_as_others_do(levels: Levels, scale: float) -> None:
    x = torch.randn(64, generator=torch.Generator().manual_seed(3)).double() * scale
    x = x.float()
    mean = sum(through(x, levels, noise(0, k)).double() for k in range(300)) / 300
    assert (mean - x.double()).norm() < 1.3 * math.sqrt(64 / 300) * x.double().norm()


@each_grid
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_a_block_that_is_not_finite_is_nan_and_others_are_not(levels: Levels, bad: float) -> None:
    x = torch.randn(3 * levels.block)
    x[levels.block + 5] = bad
    out = through(x, levels, noise(0, 0)).view(3, -1)
    assert out[1].isnan().all()
    assert out[0].isfinite().all()
    assert out[2].isfinite().all()


@each_grid
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_dtypes_are_their_float32_values(levels: Levels, dtype: torch.dtype) -> None:
    x = torch.randn(9000).to(dtype)
    assert torch.equal(message(x, levels, noise(1, 1)), message(x.float(), levels, noise(1, 1)))


@each_grid
def test_a_message_has_the_bytes_of_its_formula(levels: Levels) -> None:
    for n in (0, 1, 7, 8192, 8193, 100_000):
        assert levels.nbytes(n) == math.ceil(n * levels.bits / 8) + 4 * math.ceil(n / levels.block)
        message(torch.zeros(n), levels, noise(0, 0))


@each_grid
def test_decoding_adds_and_divides(levels: Levels) -> None:
    x, y = torch.randn(9000), torch.randn(9000)
    out = torch.empty(9000, dtype=torch.float64)
    for i, line in enumerate((x, y)):
        quantise.decode(message(line, levels, noise(0, i)), levels, out, ranks=2, add=i > 0)
    wanted = sum(through(line, levels, noise(0, i), torch.float64) for i, line in enumerate((x, y))) / 2
    assert torch.allclose(out, wanted, rtol=1e-14, atol=1e-14)


@each_grid
def test_codes_unpack_and_pack_again(levels: Levels) -> None:
    x = torch.randn(9001)
    code = message(x, levels, noise(0, 0))
    codes = quantise.unpack(code, 9001, levels)
    values = quantise.level_values(levels)[codes.long()]
    assert torch.equal(values < 0, through(x, levels, noise(0, 0)) < 0)
    again = code.clone()
    again[4 * math.ceil(9001 / levels.block) :] = 0
    quantise.pack(codes, levels, again)
    assert torch.equal(again, code)


# Bytes between two ends ----------------------------------------------------------------------------------------


def bytes_through(x: Tensor, block: int = 2048) -> Tensor:
    code = torch.empty(quantise.bytes_nbytes(x.numel(), block), dtype=torch.uint8)
    quantise.encode_bytes(x, block, code)
    out = torch.empty(x.numel())
    quantise.decode_bytes(code, block, out)
    return out


@pytest.mark.parametrize("shift", [0.0, 0.5, -3.0, 100.0])
@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e20])
def test_bytes_are_within_half_a_step(shift: float, scale: float) -> None:
    x = (torch.rand(5000, generator=torch.Generator().manual_seed(0)) - 0.3 + shift) * scale
    out = bytes_through(x)
    for a in range(0, 5000, 2048):
        block = x[a : a + 2048].double()
        step = (block.max() - block.min()) / 255
        assert (out[a : a + 2048].double() - block).abs().max() <= 0.5 * step + 4e-7 * block.abs().max()


def test_bytes_keep_zeros_and_constants() -> None:
    x = torch.randn(4096)
    x[::5] = 0
    assert torch.equal(bytes_through(x)[::5], torch.zeros(820))
    for value in (0.0, 3.3, -1e-44, 1e30):
        assert torch.equal(bytes_through(torch.full((3000,), value)), torch.full((3000,), value))


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_bytes_that_are_not_finite_are_nan(bad: float) -> None:
    x = torch.randn(4096)
    x[7] = bad
    out = bytes_through(x)
    assert out[:2048].isnan().all()
    assert out[2048:].isfinite().all()


# Elias's code, truth values ------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [2, 4, 8])
@pytest.mark.parametrize("density", [0.0, 0.01, 0.5, 1.0])
@pytest.mark.parametrize("n", [0, 1, 9, 20000])
def test_elias_code_is_read_as_it_was_written(width: int, density: float, n: int) -> None:
    generator = torch.Generator().manual_seed(n)
    codes = torch.randint(0, 1 << width, (n,), generator=generator, dtype=torch.uint8)
    codes[torch.rand(n, generator=generator) >= density] = 0
    data = elias.encode(codes, width)
    wanted = torch.where(codes == (1 << width) - 1, 0, codes)  # minus zero is zero
    assert torch.equal(elias.decode(data, n, width), wanted)


def test_elias_code_has_the_length_of_elias_gamma_codes() -> None:
    codes = torch.zeros(100_000, dtype=torch.uint8)
    where = torch.randperm(100_000, generator=torch.Generator().manual_seed(0))[:3000].sort().values
    codes[where] = torch.arange(3000).to(torch.uint8) % 7 + 1
    gaps = torch.diff(where, prepend=torch.tensor([-1]))
    total = sum(2 * (int(v).bit_length() - 1) + 1 for v in [*gaps.tolist(), *codes[where].tolist()]) + 3000
    assert total / 8 <= len(elias.encode(codes, 4)) <= total / 8 + 8 + 3


def test_elias_code_is_shorter_for_gaussian_gradients() -> None:
    x, n = torch.randn(1 << 16, generator=torch.Generator().manual_seed(0)), 1 << 16
    sizes = {}
    for exponential in (False, True):
        levels = Levels(4, 8192, exponential)
        codes = quantise.unpack(message(x, levels, noise(0, 0)), n, levels)
        sizes[exponential] = len(elias.encode(codes, 4)) * 8 / n
    assert sizes[False] < 0.75  # bits a number, of 4
    assert sizes[True] < 2.7


def test_a_damaged_elias_code_is_refused() -> None:
    data = elias.encode(torch.tensor([1, 0, 3], dtype=torch.uint8), 4)
    data[0] = 7
    with pytest.raises(ValueError, match="damaged"):
        elias.decode(data, 3, 4)


def test_truth_values_fill_bytes() -> None:
    values = torch.rand(8 * 1001) < 0.5
    packed = truth.pack(values)
    assert np.array_equal(packed.numpy(), np.packbits(values.numpy(), bitorder="little"))
    assert torch.equal(truth.unpack(packed), values)
