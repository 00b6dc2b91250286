"""Sparse sets in chunks: their wire, and topk(chunk=...), cocktail and demo against plain references in fp64."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from method_cases import reduce_window
from unisono.methods.buckets import Bucket
from unisono.methods.kernels.select import find_largest_of_rows
from unisono.methods.kernels.sets import SparseSets, cut, fit, pack, read, unpack
from unisono.methods.reducer import Reducer, all_reduce_bytes
from unisono.methods.spec import build
from unisono.world import World
from unisono.world.virtual import run_threads

SHAPES: list[tuple[int, ...]] = [(20, 30), (7,), (), (0, 3), (5, 2, 4), (64, 48)]
CPU = torch.device("cpu")


def gradients(rank: int, step: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in SHAPES]


def run(spec: str, size: int, steps: int, scales: Callable[[int], float] = lambda step: 1.0) -> list[list[Any]]:
    """By rank and step: the mean, what is kept, and the bytes sent."""

    def work(world: World) -> list[Any]:
        reducer: Reducer = build(spec, kind="reducer")
        named = [(f"p{i}", torch.zeros(shape, dtype=torch.float64)) for i, shape in enumerate(SHAPES)]
        bucket, found = Bucket(0, named, lambda n, dtype: torch.empty(n, dtype=dtype)), []
        state = reducer.init(bucket)
        for step in range(steps):
            bucket.scale = scales(step)
            for view, x in zip(bucket.tensors, gradients(world.rank, step), strict=True):
                view.copy_(x * bucket.scale)
            before = sum(r.bytes_sent for r in world.ledger.records)
            reduced, state = reduce_window(reducer, bucket, state, world)
            sent = sum(r.bytes_sent for r in world.ledger.records) - before
            line = state["residual"] if "residual" in state else state["velocity"]
            found.append(([x.clone() for x in reduced.mean], [x.clone() for x in bucket.views(line)], sent))
        return found

    return run_threads(work, size)


# A plain reference, in numpy and loops --------------------------------------------------------------------------


def bfloat(x: float) -> float:
    return float(torch.tensor(x, dtype=torch.float64).to(torch.bfloat16))


def quantise(values: list[float], bits: int) -> list[float]:
    """Nearest levels between two ends; then the ends by least squares, as numpy solves them."""
    sizes = np.abs(np.array(values))
    most = 2 ** (bits - 1) - 1
    low, high = sizes.min(), sizes.max() if most > 1 else 2 * sizes.mean() - sizes.min()
    levels = np.zeros(len(values)) if high == low else np.clip(np.round((sizes - low) / (high - low) * most), 0, most)
    if len(set(levels)) == 1:
        a, b = sizes.mean(), 0.0
        ends = (a, a)
    else:
        (a, b), *_ = np.linalg.lstsq(np.stack([np.ones(len(levels)), levels / most], 1), sizes, rcond=None)
        ends = (a, a + b)
    a, b = map(bfloat, ends)
    return [math.copysign(a + (b - a) * level / most, v) for level, v in zip(levels, values, strict=True)]


def send_chunks(p: list[float], chunk: int, k: int, bits: int | None) -> list[float]:
    """What arrives of a tensor."""
    sent = [0.0] * len(p)
    for at in range(0, len(p), chunk):
        part = p[at : at + chunk]
        kept = min(len(part), max(1, round(k / chunk * len(part))))
        top = sorted(sorted(range(len(part)), key=lambda i: (-abs(part[i]), i))[:kept])
        values = [part[i] for i in top]
        for i, v in zip(top, values if bits is None else quantise(values, bits), strict=True):
            sent[at + i] = v
    return sent


def reference(size: int, steps: int, compress: Callable[[list[float]], list[float]], decay: float) -> list[Any]:
    """By step: the mean, and by rank what is kept; vectors go in full."""
    kept = [[torch.zeros(shape, dtype=torch.float64) for shape in SHAPES] for _ in range(size)]
    found = []
    for step in range(steps):
        sent: list[list[Tensor]] = []
        for rank in range(size):
            sent.append([])
            for i, g in enumerate(gradients(rank, step)):
                p = decay * kept[rank][i] + g
                s = p if p.dim() < 2 else torch.tensor(compress(p.flatten().tolist()), dtype=p.dtype).view(p.shape)
                kept[rank][i] = p - s
                sent[-1].append(s)
        means = [torch.stack(column).mean(0) for column in zip(*sent, strict=True)]
        found.append((means, [list(map(torch.clone, row)) for row in kept]))
    return found


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize(("bits", "decay"), [(2, 0.95), (3, 1.0), (8, 0.5), (None, 0.9)])
def test_topk_in_chunks_is_the_plain_reference(size: int, bits: int | None, decay: float) -> None:
    found = run(f"topk(chunk=64, k=5, bits={bits}, decay={decay})", size, 4)
    wanted = reference(size, 4, lambda p: send_chunks(p, 64, 5, bits), decay)
    for step, (means, kept) in enumerate(wanted):
        for rank in range(size):
            for mine, x in zip(found[rank][step][0], means, strict=True):
                torch.testing.assert_close(mine, x, rtol=1e-6, atol=1e-12)
            for mine, x in zip(found[rank][step][1], kept[rank], strict=True):
                torch.testing.assert_close(mine, x, rtol=1e-6, atol=1e-12)


def test_sparse_sets_of_the_paper_take_a_141st_and_bytes_are_the_ledgers() -> None:
    """k = 64 of 4,096 in 2 bits: 64 x 14 bits and two ends a chunk."""
    n = 1 << 20

    def work(world: World) -> tuple[int, int]:
        reducer: Reducer = build("topk(chunk=4096, k=64, bits=2, decay=0.95)", kind="reducer")
        bucket = Bucket(0, [("w", torch.zeros(1024, 1024))], lambda n, dtype: torch.empty(n, dtype=dtype))
        bucket.tensors[0].copy_(torch.randn(1024, 1024, generator=torch.Generator().manual_seed(world.rank)))
        reducer.reduce(bucket, reducer.init(bucket), world)
        assert reducer.sends is not None
        return sum(r.bytes_sent for r in world.ledger.records), reducer.sends(bucket, world.size)

    closed = n // 4096 * (64 * 14 // 8 + 4)
    for size in (2, 3):
        for sent, promised in run_threads(work, size):
            assert sent == promised == (size - 1) * closed
            assert sent <= all_reduce_bytes(4 * n, size) / 90
    assert 4 * n / closed == pytest.approx(141.2, rel=1e-3)


@pytest.mark.parametrize("width", range(1, 25))
def test_whole_numbers_of_any_width_come_back_from_their_bits(width: int) -> None:
    codes = torch.randint(0, 1 << width, (101,), generator=torch.Generator().manual_seed(width))
    packed = pack(codes, width)
    assert len(packed) == math.ceil(101 * width / 8)
    assert unpack(packed, 101, width).tolist() == codes.tolist()
    written = int.from_bytes(packed.numpy().tobytes(), "little")
    assert [written >> i * width & (1 << width) - 1 for i in range(101)] == codes.tolist()


@pytest.mark.parametrize("kept", [1, 5, 15])
def test_the_largest_of_rows_are_those_of_a_stable_sort(kept: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("unisono.methods.kernels.select._CHUNK", 50)  # several blocks of rows
    rows = torch.randint(-3, 4, (40, 16), generator=torch.Generator().manual_seed(kept)).float()
    rows[0, 3], rows[1, 4], rows[2] = math.nan, -math.inf, 0.0
    sizes = rows.abs().nan_to_num(math.inf, math.inf).numpy()
    order = np.lexsort((np.broadcast_to(np.arange(16), sizes.shape), -sizes), axis=1)
    assert find_largest_of_rows(rows, kept).reshape(40, kept).tolist() == np.sort(order[:, :kept], axis=1).tolist()


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 7, 8])
@pytest.mark.parametrize("zero", [False, True])
def test_levels_never_lose_more_than_there_is(bits: int, zero: bool) -> None:
    """Contraction is what error feedback needs: also with one number far beyond the others, and with equal ones."""
    generator = torch.Generator().manual_seed(bits)
    x = torch.randn(40, 32, generator=generator, dtype=torch.float64)
    x[0, 3], x[1], x[2] = 1e6, 2.5, 0.0
    x[3] = x[3].exp().exp()
    back = read(*fit(x, bits, zero=zero), bits, torch.float64)
    lost = (x - back).square().sum(1)
    assert (lost <= x.square().sum(1) * (1 + 2**-7)).all()
    assert torch.equal(back[2].abs(), x[2])
    typical = (lost[4:] / x[4:].square().sum(1)).mean()
    assert typical < (0.4 if bits == 2 else 0.16 if bits == 3 else 0.04)


def test_where_every_number_is_sent_no_places_are() -> None:
    sets = SparseSets(cut(0, 1000, 256, 256), 256, 2, CPU)
    assert sets.nbytes(4) == 4 * 4 + 1000 * 2 // 8
    x = torch.randn(1000, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    message, places, values = sets.encode(x, torch.float64)
    there, came = sets.decode(message, torch.float64, torch.float64)
    assert torch.equal(there, places)
    assert torch.equal(came, values)
    assert sorted(there.tolist()) == list(range(1000))


# cocktail --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2])
def test_cocktail_of_all_numbers_is_topk_in_chunks_up_to_order(size: int) -> None:
    """With chunks as long as tensors, drawing all of them changes nothing but the order in which they are looked at."""
    mixed = run("cocktail(random=1.0, k=0.05, bits=4, chunk=4096)", size, 3)
    plain = run("topk(chunk=4096, k=0.05, bits=4)", size, 3)
    for mine, other in zip(mixed, plain, strict=True):
        for a, b in zip(mine, other, strict=True):
            for x, y in zip(a[0] + a[1], b[0] + b[1], strict=True):
                torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-12)


def test_cocktail_sends_only_places_that_all_ranks_drew_and_keeps_the_rest() -> None:
    size, steps = 3, 4
    found = run("cocktail(random=0.25, k=0.5, bits=8, chunk=64)", size, steps)
    for i, shape in enumerate(SHAPES):
        total = sum(gradients(r, s)[i] for r in range(size) for s in range(steps)) / size
        arrived = sum(found[0][s][0][i] for s in range(steps))
        kept = sum(found[r][-1][1][i] for r in range(size)) / size
        torch.testing.assert_close(arrived + kept, total, rtol=1e-12, atol=1e-12)
        if len(shape) >= 2 and math.prod(shape):
            for s in range(steps):
                assert (found[0][s][0][i] != 0).sum() <= max(1, round(0.25 * math.prod(shape)))


# demo ------------------------------------------------------------------------------------------------------------


def dct(x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """DCT-II along the first axis, orthonormal, by its sum."""
    n = len(x)
    rows = [sum(x[i] * math.cos(math.pi / n * (i + 0.5) * f) for i in range(n)) * math.sqrt(2 / n) for f in range(n)]
    rows[0] = rows[0] / math.sqrt(2)
    return np.stack(rows)


def idct(x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    n = len(x)
    weights = [math.sqrt((1 if f == 0 else 2) / n) for f in range(n)]
    return np.stack(
        [sum(x[f] * weights[f] * math.cos(math.pi / n * (i + 0.5) * f) for f in range(n)) for i in range(n)]
    )


def strongest(block: np.ndarray[Any, Any], k: int) -> np.ndarray[Any, Any]:
    waves = dct(dct(block).T).T
    least = np.sort(np.abs(waves).ravel())[-k]
    return np.where(np.abs(waves) >= least, waves, 0.0)


@pytest.mark.parametrize("scales", [lambda step: 1.0, lambda step: 2.0 ** (8 - step)], ids=["plain", "AMP"])
def test_demo_is_the_plain_reference(scales: Callable[[int], float]) -> None:
    """Chunks of 8 x 8 of a matrix of 64 x 48, and momenta that do not know of AMP's scale."""
    size, steps, i = 2, 3, 5
    found = run("demo(side=8, k=6, decay=0.9)", size, steps, scales)
    momenta = [np.zeros((64, 48)) for _ in range(size)]
    for step in range(steps):
        mean = np.zeros((64, 48))
        for rank in range(size):
            momenta[rank] = 0.9 * momenta[rank] + gradients(rank, step)[i].numpy()
            sent = np.zeros((64, 48))
            for a in range(0, 64, 8):
                for b in range(0, 48, 8):
                    waves = strongest(momenta[rank][a : a + 8, b : b + 8], 6)
                    sent[a : a + 8, b : b + 8] = idct(idct(waves.T).T)
            momenta[rank] = momenta[rank] - sent
            mean += sent / size
        for rank in range(size):
            out, kept, _ = found[rank][step]
            assert np.array_equal(out[i].numpy(), np.sign(mean) * scales(step))
            np.testing.assert_allclose(kept[i].numpy(), momenta[rank], rtol=1e-9, atol=1e-12)
