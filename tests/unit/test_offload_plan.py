"""How shards are divided between the CPU, the GPU and the disk; queues and slabs of host memory."""

from __future__ import annotations

import pytest
import torch

from unisono.methods.offload import plan
from unisono.methods.offload.blocks import Run
from unisono.methods.offload.device import Slab
from unisono.methods.offload.pipeline import Streams, clip_ranges
from unisono.methods.offload.plan import clip, cut, find_gaps, resident_units, staged_share


def test_blocks_cover_every_shard_once_and_share_as_asked() -> None:
    lengths = [50_331_648, 4096, 7, 103_000_000, 50_331_648, 0, 2048]
    blocks = cut(lengths, share=0.48, resident={4}, disk={6})
    for unit, length in enumerate(lengths):
        mine = [(start, stop, home) for u, start, stop, home in blocks if u == unit]
        borders = [0, *(stop for _, stop, _ in mine)]
        assert [start for start, _, _ in mine] == borders[:-1]
        assert borders[-1] == length
        for start, stop, home in mine:
            assert 0 < stop - start <= (4 if home == "cpu" else 1) * plan.BLOCK_ELEMENTS
        assert [home for *_, home in mine] == sorted(home for *_, home in mine)  # the CPU's come first
    staged = sum(stop - start for _, start, stop, home in blocks if home == "staged")
    host = sum(stop - start for _, start, stop, home in blocks if home == "cpu")
    assert staged / (staged + host) == pytest.approx(0.48, abs=0.001)
    assert {home for u, _, _, home in blocks if u == 4} == {"resident"}
    assert {block for block in blocks if block[0] == 6} == {(6, 0, 2048, "disk")}
    assert cut(lengths, share=0.48, resident={4}, disk={6}) == blocks


def test_fewer_threads_give_the_device_more() -> None:
    shares = [staged_share(threads) for threads in (1, 4, 16, 64, 1000)]
    assert shares == sorted(shares, reverse=True)
    assert all(0 <= share <= 1 for share in shares)


def test_resident_units_fill_the_budget_and_no_more() -> None:
    lengths = [50_000_000] * 24
    chosen = [len(resident_units(lengths, gib * 2**30, share=0.48, buffers=6)) for gib in (0, 2, 6, 10, 14, 20)]
    assert chosen == sorted(chosen)
    assert chosen[0] == 0
    assert chosen[-1] == 24
    assert 0 < chosen[2] < 24


def test_queues_of_the_cpu_work_at_once() -> None:
    done: list[int] = []
    streams = Streams(torch.device("cpu"))
    streams.queue().run(lambda: done.append(1), after=[streams.now()]).wait()
    assert done == [1]


def test_lines_of_a_slab_do_not_touch_and_fill_it() -> None:
    sizes = [(1000, torch.bfloat16), (1, torch.float64), (0, torch.float32), (777, torch.float32)]
    slab = Slab(sum(Slab.bytes_for(n, dtype) for n, dtype in sizes))
    lines = [slab.take_line(n, dtype) for n, dtype in sizes]
    for i, line in enumerate(lines):
        assert not line.any()
        line.fill_(i + 1)
    assert [line.unique().tolist() for line in lines] == [[1.0], [2.0], [], [4.0]]
    with pytest.raises(AssertionError, match="was asked for"):
        slab.take_line(1, torch.float32)
    slab.close()


def test_runs_and_their_gaps_make_up_every_block() -> None:
    runs = [Run(3, 10, 0), Run(10, 20, 1), Run(25, 40, 0)]
    for start in range(0, 50, 7):
        for stop in range(start, 51):
            inside = clip(runs, start, stop)
            covered = [at for low, high in find_gaps(inside, stop - start) for at in range(low, high)]
            covered += [at for run in inside for at in range(run.start, run.stop)]
            assert sorted(covered) == list(range(stop - start))
            assert clip_ranges([(r.start, r.stop) for r in runs], start, stop) == [(r.start, r.stop) for r in inside]
