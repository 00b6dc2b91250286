"""Steps that are put off, against a plain loop in double precision that puts the same ones off."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pytest
import torch
from test_pipeline import LENGTHS, PLACES, RUNS, LateStreams, adamw, built, every_run, masters, nadam, values
from torch import Tensor

from unisono.methods.offload.deferred import Deferred, check_deferrable
from unisono.methods.offload.pipeline import Shard

CPU = torch.device("cpu")
TILE, DEFER, REFRESH = 256, 3, 2
Ranges = Mapping[int, Sequence[tuple[int, int]]]


class Plain:
    """AdamW over lines of numbers, tile by tile, as the paper's idea is put on the page of `zero`."""

    def __init__(self, lines: list[Tensor], groups: list[dict[str, Any]], *, keep: float, defer: int = DEFER) -> None:
        self.now = [line.clone() for line in lines]  # stepped
        self.seen = [line.clone() for line in lines]  # what computes
        self.m, self.v, self.t = ([torch.zeros_like(line) for line in lines] for _ in range(3))
        self.groups, self.keep, self.defer = groups, keep, defer
        self.waiting: list[Tensor] | None = None  # values to be taken over
        self.chosen: list[Tensor] | None = None  # by element
        self.sums, self.shares = 0, []
        self.clear()

    def clear(self) -> None:
        self.count, self.rates = 0, [0.0 for _ in self.groups]
        self.total = [torch.zeros_like(line) for line in self.now]
        self.squares = [torch.zeros(-(-line.numel() // TILE), dtype=line.dtype) for line in self.now]
        self.had: list[Tensor] | None = None

    def tiles(self, line: Tensor) -> Tensor:
        return torch.stack([part.square().sum() for part in line.split(TILE)])

    def move(self, u: int, where: Tensor, g: Tensor, wider: Tensor | float, count: int, rates: list[float]) -> None:
        for number, group in enumerate(self.groups):
            mine = where & self.of(u, number)
            b1, b2 = (beta**count for beta in group["betas"])
            m = b1 * self.m[u] + (1 - b1) * g
            v = b2 * self.v[u] + (1 - b2) * g * g * wider
            t = self.t[u] + count
            beta1, beta2 = group["betas"]
            step = (m / (1 - beta1**t)) / ((v / (1 - beta2**t)).sqrt() + group["eps"])
            new = self.now[u] * (1 - rates[number] * group["weight_decay"]) - rates[number] * step
            for old, x in ((self.now[u], new), (self.m[u], m), (self.v[u], v), (self.t[u], t)):
                old[mine] = x[mine]

    def of(self, u: int, number: int) -> Tensor:
        found = torch.zeros(LENGTHS[u], dtype=torch.bool)
        for run in RUNS[u]:
            found[run.start : run.stop] = run.group == number
        return found

    def choose(self, given: dict[int, Tensor]) -> None:
        found = [(float(x), -u, -i) for u, g in given.items() for i, x in enumerate(self.tiles(g)) if TILE * (i + 1) <= len(g)]
        self.chosen = [torch.zeros(n, dtype=torch.bool) for n in LENGTHS]
        for _, u, i in sorted(found, reverse=True)[: math.ceil(self.keep * len(found))]:
            self.chosen[-u][-i * TILE : (-i + 1) * TILE] = True

    def step(self, given: dict[int, Tensor], scale: float = 1.0, absent: Ranges | None = None, *, delay: bool = True) -> None:
        had = [torch.zeros(n, dtype=torch.bool) for n in LENGTHS]
        for u in given:
            had[u][:] = True
            for low, high in (absent or {}).get(u, ()):
                had[u][low:high] = False
        if self.count and not all(map(torch.equal, self.had or [], had)):
            self.settle()
        rates = [group["lr"] for group in self.groups]
        if not delay:
            self.settle()
            for u, g in given.items():
                self.move(u, had[u], g * scale, 1.0, 1, rates)
            self.settle()
            return
        if self.chosen is None:
            self.choose(given)
        assert self.chosen is not None
        for u, g in given.items():
            self.move(u, had[u] & self.chosen[u], g * scale, 1.0, 1, rates)
            self.seen[u][self.chosen[u]] = self.now[u][self.chosen[u]]
            self.total[u] += g * scale
            self.squares[u] += self.tiles(g * scale)
        every = sum(float((g * g).sum()) for g in given.values())
        self.shares.append(sum(float((g[self.chosen[u]] ** 2).sum()) for u, g in given.items()) / every)
        self.had, self.count = had, self.count + 1
        self.rates = [a + b for a, b in zip(self.rates, rates, strict=True)]
        if self.count == self.defer:
            self.take()
            self.leave()
            if self.sums == REFRESH:
                self.settle()

    def leave(self) -> None:
        assert self.chosen is not None and self.had is not None
        for u, total in enumerate(self.total):
            wider = (self.squares[u] * self.count / self.tiles(total)).nan_to_num(1.0).clamp(1.0, 4.0 * self.count)
            wide = wider.repeat_interleave(TILE)[: LENGTHS[u]]
            self.move(u, self.had[u] & ~self.chosen[u], total / self.count, wide, self.count, self.rates)
        self.waiting = [line.clone() for line in self.now]
        self.sums += 1
        self.clear()

    def take(self) -> None:
        for u, line in enumerate(self.waiting or []):
            self.seen[u][:] = torch.where(self.chosen[u], self.now[u], line) if self.chosen else line
        self.waiting = None

    def settle(self) -> None:
        self.take()
        if self.count:
            self.leave()
        self.chosen, self.sums, self.waiting = None, 0, None
        for seen, line in zip(self.seen, self.now, strict=True):
            seen.copy_(line)


@pytest.fixture
def slow() -> Iterator[LateStreams]:
    streams = LateStreams(5)
    yield streams
    streams.close()


def gradients(steps: int) -> list[dict[int, Tensor]]:
    """Some tiles have larger ones than others, and part of them is the same in every step."""
    generator = torch.Generator().manual_seed(2)
    sizes = [torch.rand(n, generator=generator, dtype=torch.float64).pow(4) for n in LENGTHS]
    sizes = [torch.cat([part * (1 + 9 * (i % 5 == 2)) for i, part in enumerate(size.split(TILE))]) for size in sizes]
    same = [torch.randn(n, generator=generator, dtype=torch.float64) for n in LENGTHS]
    return [
        {u: sizes[u] * (same[u] + torch.randn(n, generator=generator, dtype=torch.float64)) for u, n in enumerate(LENGTHS)}
        for _ in range(steps)
    ]


def made(keep: float, **options: Any) -> tuple[Deferred, list[Tensor], Plain]:
    lines = values(torch.float64)
    shards = [Shard(line.clone(), runs) for line, runs in zip(lines, RUNS, strict=True)]
    optimizer = adamw([[torch.zeros(1)], [torch.zeros(1)]])
    settings: dict[str, Any] = {"defer": DEFER, "tile": TILE, "refresh": REFRESH, "device": CPU, **options}
    plain = Plain(lines, optimizer.param_groups, keep=keep, defer=settings["defer"])
    return Deferred(optimizer, shards, keep=keep, **settings), [shard.compute for shard in shards], plain


def feed(engine: Deferred, given: dict[int, Tensor], scale: float = 1.0, absent: Ranges | None = None, **more: Any) -> None:
    for u in sorted(given, reverse=True):
        padded = given[u].clone()
        engine.offer(u, padded)
    engine.step(scale, absent, **more)
    for u in range(len(LENGTHS)):
        engine.wait(u)


def near(found: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    for u, (x, y) in enumerate(zip(found, expected, strict=True)):
        for run in RUNS[u]:
            torch.testing.assert_close(x[run.start : run.stop], y[run.start : run.stop], rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("keep", [0.0, 0.2, 0.9])
@pytest.mark.parametrize("late", [False, True])
def test_every_value_is_that_of_a_plain_loop(keep: float, late: bool, slow: LateStreams) -> None:
    """Warm-up, sums of several steps, scales, a schedule, settling: what computes and, at the end, all state."""
    engine, compute, plain = made(keep, threads=2, **({"streams": slow} if late else {}))
    for t, given in enumerate(gradients(23)):
        for u, line in given.items():
            gaps = torch.ones_like(line, dtype=torch.bool)
            for run in RUNS[u]:
                gaps[run.start : run.stop] = False
            line[gaps] = 0.0
        more = {"scale": 1.0 if t % 4 else 0.25, "delay": t >= 2}
        feed(engine, given, **more)
        plain.step(given, **more)
        near(compute, plain.seen)
        for group in engine.optimizer.param_groups:  # the plain loop reads the same groups
            group["lr"] *= 0.97
    shares = plain.shares[: len(engine.shares)]
    assert len(shares) >= 18
    assert list(engine.shares) == pytest.approx(shares, rel=1e-5)
    plain.settle()
    shards = [engine.shard(u) for u in range(len(LENGTHS))]
    for name, lines in (("master", plain.now), ("exp_avg", plain.m), ("exp_avg_sq", plain.v)):
        near([shard.read(name) for shard in shards], lines)
    assert all(float(shards[u].scalars(run.start)["step"]) == 23 for u, _, run in every_run())
    near(compute, plain.now)
    engine.close()
