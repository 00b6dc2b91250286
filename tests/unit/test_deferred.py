"""Steps that are put off, against a plain loop in double precision that puts the same ones off."""

from __future__ import annotations

import copy
import math
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from test_pipeline import LENGTHS, RUNS, LateStreams, adamw, every_run, nadam, values
from torch import Tensor, nn

import unisono as un
from unisono.methods.offload.blocks import Run
from unisono.methods.offload.deferred import Deferred, check_deferrable
from unisono.methods.offload.pipeline import Shard
from unisono.world import World
from unisono.world.virtual import run_threads

CPU = torch.device("cpu")
TILE, DEFER, REFRESH = 256, 3, 2
Ranges = Mapping[int, Sequence[tuple[int, int]]]


class Plain:
    """AdamW over lines of numbers, tile by tile, as the paper's idea is put on the page of `zero`."""

    def __init__(
        self,
        lines: list[Tensor],
        groups: list[dict[str, Any]],
        *,
        keep: float,
        defer: int = DEFER,
        runs: Sequence[Sequence[Run]] = RUNS,
    ) -> None:
        self.runs = runs
        self.now = [line.clone() for line in lines]  # stepped
        self.seen = [line.clone() for line in lines]  # what computes
        self.m, self.v, self.t = ([torch.zeros_like(line) for line in lines] for _ in range(3))
        self.groups, self.keep, self.defer = groups, keep, defer
        self.waiting: dict[int, Tensor] = {}  # values to be taken over
        self.chosen: Any = None  # by element
        self.turns, self.shares = 0, []
        count = len(lines)
        self.total, self.squares, self.count = [None] * count, [None] * count, [0] * count
        self.had: list[Tensor] = []
        self.rates: list[list[float]] = [[] for _ in lines]
        self.clear(range(count))
        sizes = [0] * defer
        self.of_group: list[list[int]] = [[] for _ in sizes]  # the largest units first, each to the emptiest group
        for u in sorted(range(count), key=lambda u: (-len(lines[u]), u)):
            emptiest = min(range(defer), key=lambda group: (sizes[group], group))
            sizes[emptiest] += len(lines[u])
            self.of_group[emptiest].append(u)

    def clear(self, units: Sequence[int]) -> None:
        for u in units:
            line = self.now[u]
            self.total[u], self.squares[u] = torch.zeros_like(line), torch.zeros(-(-line.numel() // TILE)).to(line)
            self.count[u], self.rates[u] = 0, [0.0 for _ in self.groups]

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
        found = torch.zeros(len(self.now[u]), dtype=torch.bool)
        for run in self.runs[u]:
            found[run.start : run.stop] = run.group == number
        return found

    def choose(self, given: dict[int, Tensor]) -> None:
        found = [
            (float(x), -u, -i)
            for u, g in given.items()
            for i, x in enumerate(self.tiles(g))
            if TILE * (i + 1) <= len(g)
        ]
        self.chosen = [torch.zeros(len(line), dtype=torch.bool) for line in self.now]
        for _, u, i in sorted(found, reverse=True)[: math.ceil(self.keep * len(found))]:
            self.chosen[-u][-i * TILE : (-i + 1) * TILE] = True

    def step(
        self, given: dict[int, Tensor], scale: float = 1.0, absent: Ranges | None = None, *, delay: bool = True
    ) -> None:
        had = [torch.zeros(len(line), dtype=torch.bool) for line in self.now]
        for u in given:
            had[u][:] = True
            for low, high in (absent or {}).get(u, ()):
                had[u][low:high] = False
        for mine in self.of_group:  # sums of units that leave together
            if any(self.count[u] for u in mine) and not all(torch.equal(self.had[u], had[u]) for u in mine):
                self.settle()
                break
        rates = [group["lr"] for group in self.groups]
        if not delay:
            self.settle()
            for u, g in given.items():
                self.move(u, had[u], g * scale, 1.0, 1, rates)
            self.settle()
            return
        if self.chosen is None:
            self.choose(given)
        for u, g in given.items():
            self.move(u, had[u] & self.chosen[u], g * scale, 1.0, 1, rates)
            self.seen[u][self.chosen[u]] = self.now[u][self.chosen[u]]
            self.total[u] += g * scale
            self.squares[u] += self.tiles(g * scale)
            self.count[u] += 1
            self.rates[u] = [a + b for a, b in zip(self.rates[u], rates, strict=True)]
        self.had = had
        every = sum(float((g * g).sum()) for g in given.values())
        self.shares.append(sum(float((g[self.chosen[u]] ** 2).sum()) for u, g in given.items()) / every)
        self.take()
        self.leave(self.of_group[self.turns % self.defer])
        self.turns += 1
        if self.turns == REFRESH * self.defer:
            self.settle()

    def leave(self, units: Sequence[int]) -> None:
        for u in units:
            if self.count[u]:
                total, count = self.total[u], self.count[u]
                wider = (self.squares[u] * count / self.tiles(total)).nan_to_num(1.0).clamp(1.0, 4.0 * count)
                wide = wider.repeat_interleave(TILE)[: len(total)]
                self.move(u, self.had[u] & ~self.chosen[u], total / count, wide, count, self.rates[u])
                self.waiting[u] = self.now[u].clone()
        self.clear(units)

    def take(self) -> None:
        for u, line in self.waiting.items():
            self.seen[u][:] = torch.where(self.chosen[u], self.now[u], line)
        self.waiting = {}

    def settle(self) -> None:
        self.leave(range(len(self.now)))
        self.chosen, self.turns, self.waiting = None, 0, {}
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
        {
            u: sizes[u] * (same[u] + torch.randn(n, generator=generator, dtype=torch.float64))
            for u, n in enumerate(LENGTHS)
        }
        for _ in range(steps)
    ]


def made(keep: float, **options: Any) -> tuple[Deferred, list[Tensor], Plain]:
    lines = values(torch.float64)
    shards = [Shard(line.clone(), runs) for line, runs in zip(lines, RUNS, strict=True)]
    optimizer = adamw([[torch.zeros(1)], [torch.zeros(1)]])
    settings: dict[str, Any] = {"defer": DEFER, "tile": TILE, "refresh": REFRESH, "device": CPU, **options}
    plain = Plain(lines, optimizer.param_groups, keep=keep, defer=settings["defer"])
    return Deferred(optimizer, shards, keep=keep, **settings), [shard.compute for shard in shards], plain


def feed(
    engine: Deferred, given: dict[int, Tensor], scale: float = 1.0, absent: Ranges | None = None, **more: Any
) -> None:
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
        more = {"scale": 1.0 if t % 4 else 0.0 if t == 8 else 0.25, "delay": t >= 2}
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


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("keep", [0.0, 0.2])
def test_on_a_gpu_every_value_is_that_of_a_plain_loop(keep: float) -> None:
    lines, device = values(torch.float64), torch.device("cuda")
    shards = [Shard(line.cuda(), runs) for line, runs in zip(lines, RUNS, strict=True)]
    optimizer = adamw([[torch.zeros(1)], [torch.zeros(1)]])
    engine = Deferred(optimizer, shards, device=device, defer=DEFER, keep=keep, tile=TILE, refresh=REFRESH)
    plain = Plain(lines, optimizer.param_groups, keep=keep)
    busy = torch.randn(4096, 4096, device=device)
    for t, given in enumerate(gradients(23)):
        known = {u: torch.zeros_like(line) for u, line in given.items()}
        for u, _, run in every_run():
            known[u][run.start : run.stop] = given[u][run.start : run.stop]
        for u in range(len(LENGTHS)):
            engine.wait(u)
        near([shard.compute.cpu() for shard in shards], plain.seen)
        for _ in range(10):  # the host runs ahead of the device
            busy = busy @ busy / 64.0
        for u, line in known.items():
            engine.offer(u, line.cuda(non_blocking=True))
        more = {"scale": 1.0 if t % 4 else 0.25, "delay": t >= 2}
        engine.step(**more)
        plain.step(known, **more)
    plain.settle()
    for name, expected in (("master", plain.now), ("exp_avg", plain.m), ("exp_avg_sq", plain.v)):
        near([engine.shard(u).read(name) for u in range(len(LENGTHS))], expected)
    near([shard.compute.cpu() for shard in shards], plain.now)
    engine.close()


def test_what_has_no_gradient_stays_and_is_not_counted(slow: LateStreams) -> None:
    """A run without a gradient for some steps, and a unit without any: sums of different elements are not joined."""
    engine, compute, plain = made(0.3, streams=slow)
    counts = {(u, i): 0 for u, i, _ in every_run()}
    for t, given in enumerate(gradients(16)):
        absent = {1: [(0, 4000)]} if t in (3, 4, 5, 9) else {}
        if t in (7, 8):
            del given[0]
        for u, line in given.items():
            known = torch.zeros_like(line)
            for i, run in enumerate(RUNS[u]):
                if not (u in absent and i == 0):
                    known[run.start : run.stop] = line[run.start : run.stop]
                    counts[u, i] += 1
            given[u] = known
        feed(engine, given, 0.5, absent, delay=True)
        plain.step(given, 0.5, absent)
        near(compute, plain.seen)
    plain.settle()
    near([engine.shard(u).read("exp_avg_sq") for u in range(len(LENGTHS))], plain.v)
    found = {(u, i): int(engine.shard(u).scalars(run.start)["step"]) for u, i, run in every_run()}
    assert found == counts
    engine.close()


def test_settings_that_change_end_a_sum_and_rates_add_up() -> None:
    engine, compute, plain = made(0.2)
    for t, given in enumerate(gradients(9)):
        if t == 4:
            for group in engine.optimizer.param_groups:
                group["weight_decay"] = 0.3
        feed(engine, given, delay=True)
        if t == 4:  # the plain loop ends it too
            for group in plain.groups:
                group["weight_decay"] = {0.01: 0.1, 0.003: 0.01}[group["lr"]]
            plain.settle()
            for group in plain.groups:
                group["weight_decay"] = 0.3
        plain.step(given)
        near(compute, plain.seen)
    engine.close()


@pytest.mark.parametrize("moments", [torch.float32, torch.bfloat16])
def test_in_single_precision_a_run_repeats_itself_and_steps_that_are_not_put_off_are_the_optimizers(
    moments: torch.dtype,
) -> None:
    found = []
    for _ in range(2):
        lines = values()
        shards = [Shard(line.bfloat16(), runs, line) for line, runs in zip(lines, RUNS, strict=True)]
        engine = Deferred(
            adamw([[torch.zeros(1)], [torch.zeros(1)]]),
            shards,
            device=CPU,
            defer=3,
            keep=0.1,
            tile=TILE,
            moments=moments,
        )
        for t, given in enumerate(gradients(11)):
            feed(engine, {u: g.bfloat16() for u, g in given.items()}, 0.5, delay=t > 3)
        found.append([engine.shard(u).read(name) for u in range(len(LENGTHS)) for name in ("master", "exp_avg_sq")])
        assert all(torch.equal(shard.compute, shard.read("master").bfloat16()) for shard in shards)
        engine.close()
    assert all(map(torch.equal, *found))


def test_optimizers_whose_steps_cannot_be_put_off_are_refused() -> None:
    param = [torch.zeros(1)]
    check_deferrable(torch.optim.Adam(param))
    for optimizer, why in (
        (nadam([param, param[:0] or [torch.zeros(2)]]), "got NAdam"),
        (torch.optim.SGD(param), "got SGD"),
        (torch.optim.AdamW(param, amsgrad=True), "amsgrad"),
        (torch.optim.Adam(param, weight_decay=0.1), "use AdamW"),
    ):
        with pytest.raises(ValueError, match=why):
            check_deferrable(optimizer)


def test_a_gradient_of_another_shape_and_a_second_one_are_refused() -> None:
    engine, _, _ = made(0.2)
    with pytest.raises(ValueError, match="5000 elements"):
        engine.offer(0, torch.zeros(7))
    engine.offer(0, torch.zeros(5000))
    with pytest.raises(RuntimeError, match="call step"):
        engine.offer(0, torch.zeros(5000))
    engine.close()


def test_an_error_of_the_background_thread_is_raised_by_the_next_call(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, _, _ = made(0.2)

    def fail(*_: Any, **__: Any) -> Any:
        raise MemoryError("no more")

    monkeypatch.setattr(engine.stepper, "start", fail)
    first, second = gradients(2)
    feed(engine, first, delay=True)
    assert engine._update is not None
    assert engine._update.ended.wait(30)
    with pytest.raises(MemoryError, match="no more"):
        feed(engine, second, delay=True)
    engine.close()


# Programs ------------------------------------------------------------------------------------------------------------

SEED = threading.Lock()
WARM, PROGRAM_TILE = 3, 64
SPEC = f"zero(stage={{}}, optimizer_on=cpu, unit_bytes=6000, defer={DEFER}, keep=0.25, delay_after={WARM})"


def net() -> nn.Module:
    with SEED:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 16)).double()


def two_groups(model: nn.Module) -> torch.optim.Optimizer:
    matrices, vectors = ([p for p in model.parameters() if (p.dim() > 1) == is_matrix] for is_matrix in (True, False))
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0, "lr": 0.003}]
    return torch.optim.AdamW(groups, lr=0.01, betas=(0.8, 0.95))


def loss_of(model: nn.Module, t: int, ranks: Sequence[int]) -> Tensor:
    parts = [torch.randn(4, 32, generator=torch.Generator().manual_seed(99 * t + r)).double() for r in ranks]
    x = torch.cat(parts)
    return nn.functional.mse_loss(model(x[:, :16]), x[:, 16:]) * (30.0 if t % 7 == 4 else 1.0)


def left_out(t: int) -> bool:
    return t % 9 == 5


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(Deferred.__init__.__kwdefaults__, "tile", PROGRAM_TILE)
    monkeypatch.setitem(Deferred.__init__.__kwdefaults__, "refresh", REFRESH)
    monkeypatch.setattr(f"{__name__}.TILE", PROGRAM_TILE)


class PlainProgram:
    """One process with all ranks' batches, whose numbers are stepped shard by shard."""

    def __init__(self, units: list[Any]) -> None:
        self.model = net()
        self.params = dict(self.model.named_parameters())
        self.optimizer, self.steps = two_groups(self.model), 0
        group_of = {id(p): i for i, group in enumerate(self.optimizer.param_groups) for p in group["params"]}
        self.units = units  # by rank: of each unit its length, and (name, at, start, length) of its parts
        self.ranks = []
        for mine in units:
            runs = [[Run(at, at + n, group_of[id(self.params[name])]) for name, at, _, n in parts] for _, parts in mine]
            lines = self.take([[p.detach() for p in self.params.values()]], mine)[0]
            self.ranks.append(Plain(lines, self.optimizer.param_groups, keep=0.25, runs=runs))

    def take(self, lists: list[list[Tensor]], mine: Any) -> list[list[Tensor]]:
        found = []
        for tensors in lists:
            by = dict(zip(self.params, tensors, strict=True))
            lines = [torch.zeros(length, dtype=torch.float64) for length, _ in mine]
            for line, (_, parts) in zip(lines, mine, strict=True):
                for name, at, start, n in parts:
                    line[at : at + n] = by[name].flatten()[start : start + n]
            found.append(lines)
        return found

    def step(self, t: int, size: int) -> None:
        self.model.zero_grad()
        loss_of(self.model, t, range(size)).backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        if left_out(t):
            return
        self.steps += 1
        for plain, mine in zip(self.ranks, self.units, strict=True):
            lines = self.take([[p.grad for p in self.params.values()]], mine)[0]  # type: ignore[misc]
            plain.step(dict(enumerate(lines)), delay=self.steps > WARM)
        self.show()

    def settle(self) -> None:
        for plain in self.ranks:
            plain.settle()
        self.show()

    @torch.no_grad()
    def show(self) -> None:
        for plain, mine in zip(self.ranks, self.units, strict=True):
            for line, (_, parts) in zip(plain.seen, mine, strict=True):
                for name, at, start, n in parts:
                    self.params[name].view(-1)[start : start + n] = line[at : at + n]


def layout(replica: Any) -> Any:
    return [
        (unit.shard_length, [(unit.names[p.slot], p.at, p.start, p.length) for p in unit.parts])
        for unit in replica.units
    ]


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range, rank: int) -> None:
    for t in steps:
        optimizer.zero_grad()
        loss_of(model, t, [rank]).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        if not left_out(t):
            optimizer.step()


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize(("stage", "size"), [(2, 1), (2, 2), (1, 2), (3, 2), (3, 1)])
def test_a_program_trains_as_the_plain_loop(stage: int, size: int, tmp_path: Path) -> None:
    """Clipping, steps that are left out, a checkpoint on the way (everything is settled then) and another run that goes
    on from it."""

    def work(world: World, first: int, at: Path | None) -> Any:
        model = net()
        optimizer = two_groups(model)
        replica = un.parallel(model, optimizer, SPEC.format(stage), world=world)
        if at is not None:
            un.load(at, replica)
        train(model, optimizer, range(first, 17), world.rank)
        un.save(tmp_path / f"{first}", replica)
        train(model, optimizer, range(17, 31), world.rank)
        state = {k: v.detach().clone() for k, v in model.state_dict().items()}
        mine = layout(replica)
        replica.restore()
        replica.close()
        return mine, state, {k: v.detach().clone() for k, v in model.state_dict().items()}

    found = run_threads(lambda world: work(world, 0, None), size)
    again = run_threads(lambda world: work(world, 17, tmp_path / "0"), size)
    plain = PlainProgram([mine for mine, *_ in found])
    for t in range(31):
        if t == 17:
            plain.settle()
        plain.step(t, size)
    seen = {k: v.detach().clone() for k, v in plain.model.state_dict().items()}
    plain.settle()
    ended = plain.model.state_dict()
    for _, state, last in [*found, *again]:
        for name in seen:
            torch.testing.assert_close(state[name], seen[name], rtol=1e-6, atol=1e-8)
            torch.testing.assert_close(last[name], ended[name], rtol=1e-6, atol=1e-8)


@pytest.mark.usefixtures("small_tiles")
def test_a_run_of_two_ranks_goes_on_with_one_and_under_another_method(tmp_path: Path) -> None:
    def work(world: World, spec: str, steps: range, at: Path | None = None) -> Any:
        model = net()
        optimizer = two_groups(model)
        replica = un.parallel(model, optimizer, spec, world=world)
        if at is not None:
            un.load(at, replica)
        before = copy.deepcopy(optimizer.state_dict())
        train(model, optimizer, steps, 0)
        un.save(tmp_path / f"{world.size} {steps.stop}", replica)
        return before

    run_threads(lambda world: work(world, SPEC.format(2), range(14)), 2)
    saved = un.read_checkpoint(tmp_path / "2 14")["optimizer"]["state"]
    for spec in (SPEC.format(3), "zero(stage=2)", "allreduce"):
        (state,) = run_threads(lambda world, spec=spec: work(world, spec, range(14, 16), tmp_path / "2 14"), 1)
        for number, one in saved.items():
            for name, x in one.items():
                torch.testing.assert_close(torch.as_tensor(state["state"][number][name]), torch.as_tensor(x))


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("how", [SPEC, SPEC.replace(f"defer={DEFER}, keep=0.25", "delayed_update=True")])
@pytest.mark.parametrize(("stage", "size"), [(1, 2), (2, 1), (3, 2)])
def test_what_a_program_writes_is_not_overwritten_by_what_was_put_off(how: str, stage: int, size: int) -> None:
    wanted = [{k: torch.randn_like(v) for k, v in net().state_dict().items()} for _ in range(2)]

    def work(world: World) -> Any:
        model = net()
        optimizer = two_groups(model)
        replica = un.parallel(model, optimizer, how.format(stage), world=world)
        found = []
        for first, given in zip((0, 8), wanted, strict=True):
            train(model, optimizer, range(first, first + 8), world.rank)
            if first:
                replica.write(lambda: [p.data.copy_(wanted[1][name]) for name, p in model.named_parameters()])
            else:
                model.load_state_dict(given)
            found.append({k: v.clone() for k, v in model.state_dict().items()})
        for group in optimizer.param_groups:
            group.update(lr=0.0, weight_decay=0.0)
        train(model, optimizer, range(16, 23), world.rank)
        replica.restore()
        return [*found, {k: v.detach() for k, v in model.state_dict().items()}]

    for found in run_threads(work, size):
        for mine, expected in zip(found, [*wanted, wanted[1]], strict=True):
            assert all(torch.equal(mine[name], x) for name, x in expected.items())


class Wide(nn.Module):
    """Computes in the precision of its parameters, and returns doubles."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = net().float()

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.inner(x.to(self.inner[0].weight.dtype))
        return found.double()


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("more", ["precision=bf16", "precision=bf16, accumulate=2", "moments=bf16", "accumulate=2"])
def test_sums_of_several_passes_and_16_bits_train(more: str) -> None:
    model = Wide()

    def find_loss() -> float:
        with torch.no_grad():
            return sum(float(loss_of(model, t, [0])) for t in range(4))

    first, optimizer = find_loss(), two_groups(model)
    replica = un.parallel(model, optimizer, f"{SPEC.format(2)[:-1]}, {more})", world=World())
    for t in range(80):
        loss_of(model, t % 4, [0]).backward()
        if t % 2 or "accumulate" not in more:
            optimizer.step()
            optimizer.zero_grad()
    replica.restore()
    assert find_loss() < 0.3 * first


def test_an_average_of_the_weights_and_whole_tensors_are_refused() -> None:
    model = net()
    replica = un.parallel(model, two_groups(model), SPEC.format(2), world=World())
    with pytest.raises(ValueError, match="under defer"):
        un.average(replica)
    other = net()
    muon = torch.optim.Muon([p for p in other.parameters() if p.dim() == 2])
    rest = torch.optim.AdamW([p for p in other.parameters() if p.dim() < 2])
    with pytest.raises(ValueError, match="defer=3"):
        un.parallel(other, [muon, rest], SPEC.format(2), world=World())
    third = net()
    with pytest.raises(ValueError, match="got SGD"):
        un.parallel(third, torch.optim.SGD(third.parameters(), lr=0.1), SPEC.format(2), world=World())
