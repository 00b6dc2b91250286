"""The update beside the computation against plain AdamW; side queues run late and in their own threads here."""

from __future__ import annotations

import queue
import random
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from unisono.methods.offload import plan
from unisono.methods.offload.disk import Disk, DiskError
from unisono.methods.offload.pipeline import Mark, Pipeline, Queue, Run, Shard
from unisono.methods.offload.plan import resident_units
from unisono.methods.offload.stepper import Block, Stepper, disk_bytes

CPU = torch.device("cpu")
LENGTHS = [5000, 12_288, 300, 9000]
RUNS = [
    [Run(0, 5000, 0)],
    [Run(0, 4000, 0), Run(4096, 7000, 1), Run(7008, 12_280, 0)],
    [Run(0, 290, 1)],
    [Run(0, 9000, 0)],
]


class LateMark:
    """A mark in a `LateQueue`: the current stream of a CPU is the thread itself, so that holding is waiting."""

    def __init__(self) -> None:
        self.reached = threading.Event()

    def hold(self) -> None:
        self.wait()

    def wait(self) -> None:
        assert self.reached.wait(30), "a queue waits for something that never comes"


class LateQueue:
    """Work in a thread of its own, as late as a GPU's streams may be; errors are kept for the test."""

    def __init__(self, owner: LateStreams) -> None:
        self._owner = owner
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._loop, daemon=True)
        self._thread.start()

    def run(self, work: Callable[[], Any], after: Iterable[Mark] = ()) -> Mark:
        marks, mark = list(after), LateMark()

        def later() -> None:
            try:
                for one in marks:
                    one.wait()
                time.sleep(self._owner.delay())
                work()
            except BaseException as error:
                self._owner.errors.append(error)
            finally:
                mark.reached.set()

        self._work.put(later)
        return mark

    def _loop(self) -> None:
        while (work := self._work.get()) is not None:
            work()

    def close(self) -> None:
        self._work.put(None)
        self._thread.join(30)


class LateStreams:
    """Queues that run late, each at its own pace."""

    def __init__(self, seed: int, longest_s: float = 0.0008) -> None:
        self.device, self.immediate = CPU, False
        self.errors: list[BaseException] = []
        self._queues: list[LateQueue] = []
        self._random, self._longest_s = random.Random(seed), longest_s

    def delay(self) -> float:
        return self._random.random() * self._longest_s

    def queue(self) -> Queue:
        self._queues.append(LateQueue(self))
        return self._queues[-1]

    def now(self) -> Mark:
        mark = LateMark()
        mark.reached.set()
        return mark

    def lend(self, tensor: Tensor, queue: Queue) -> None: ...

    def close(self) -> None:
        for one in self._queues:
            one.close()
        assert self.errors == []


@pytest.fixture
def late() -> Iterator[LateStreams]:
    streams = LateStreams(7)
    yield streams
    streams.close()


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "_BORDER", 64)
    monkeypatch.setattr(plan, "_LEAST", 128)


Gradients = list[dict[int, Tensor]]


def values(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Random where there are parameters, zero in the padding."""
    generator = torch.Generator().manual_seed(0)
    lines = []
    for n, runs in zip(LENGTHS, RUNS, strict=True):
        line = torch.zeros(n, dtype=dtype)
        for run in runs:
            line[run.start : run.stop] = torch.randn(run.stop - run.start, generator=generator, dtype=dtype)
        lines.append(line)
    return lines


def random_gradients(steps: int, dtype: torch.dtype = torch.bfloat16) -> Gradients:
    """One of each unit in each step; what lies in the padding must not matter."""
    generator = torch.Generator().manual_seed(1)
    return [{u: torch.randn(n, generator=generator).to(dtype) for u, n in enumerate(LENGTHS)} for _ in range(steps)]


def adamw(groups: list[list[Tensor]]) -> torch.optim.Optimizer:
    settings: list[dict[str, Any]] = [{"lr": 0.01, "weight_decay": 0.1}, {"lr": 0.003, "betas": (0.8, 0.95)}]
    return torch.optim.AdamW([dict[str, Any](params=p, **s) for p, s in zip(groups, settings, strict=True)], fused=True)


def sgd(groups: list[list[Tensor]]) -> torch.optim.Optimizer:
    return torch.optim.SGD([{"params": p} for p in groups], lr=0.1, momentum=0.9, dampening=0.5)


def nadam(groups: list[list[Tensor]]) -> torch.optim.Optimizer:
    return torch.optim.NAdam([{"params": p} for p in groups], lr=0.01)


Make = Callable[[list[list[Tensor]]], torch.optim.Optimizer]


def plain(
    make: Make, gradients: Gradients, *, scale: float = 1.0, holes: Mapping[int, int] | None = None
) -> list[Tensor]:
    """The reference: one parameter for each run, stepped by the optimizer itself; `holes`: run 0 of a unit gets no
    gradient in a step."""
    lines = values()
    params = {(u, i): torch.nn.Parameter(lines[u][r.start : r.stop].clone()) for u, i, r in every_run()}
    optimizer = make([[params[u, i] for u, i, r in every_run() if r.group == group] for group in (0, 1)])
    for step, given in enumerate(gradients):
        for u, i, r in every_run():
            missing = u not in given or (holes is not None and holes.get(step) == u and i == 0)
            params[u, i].grad = None if missing else given[u][r.start : r.stop].float().mul_(scale)
        optimizer.step()
    for u, i, r in every_run():
        lines[u][r.start : r.stop] = params[u, i].detach()
    return lines


def every_run() -> Iterator[tuple[int, int, Run]]:
    for u, runs in enumerate(RUNS):
        for i, run in enumerate(runs):
            yield u, i, run


def placeholder(make: Make) -> torch.optim.Optimizer:
    return make([[torch.zeros(1)], [torch.zeros(1)]])


def built(make: Make, **options: Any) -> tuple[Pipeline, list[Tensor]]:
    lines = [Shard(line.to(torch.bfloat16), runs, line) for line, runs in zip(values(), RUNS, strict=True)]
    homes = options.pop("homes", {})
    lines = [replace(line, home=homes.get(u, "cpu")) for u, line in enumerate(lines)]
    return Pipeline(placeholder(make), lines, device=CPU, **options), [line.compute for line in lines]


def train(pipeline: Pipeline, gradients: Gradients, **settings: Any) -> None:
    """Forward waits unit by unit, backward gives gradients in the reverse order."""
    for given in gradients:
        for u in range(len(LENGTHS)):
            pipeline.wait(u)
        for u in sorted(given, reverse=True):
            gradient = given[u].clone()
            pipeline.offer(u, gradient).hold()
            gradient.fill_(torch.nan)  # it was copied away
        pipeline.step(**settings)


def masters(pipeline: Pipeline) -> list[Tensor]:
    return [pipeline.shard(u).read("master") for u in range(len(LENGTHS))]


def assert_same(found: list[Tensor], expected: list[Tensor]) -> None:
    for u, (x, y) in enumerate(zip(found, expected, strict=True)):
        torch.testing.assert_close(x, y, rtol=0, atol=0, msg=lambda text, u=u: f"unit {u}: {text}")  # type: ignore[misc]


PLACES: dict[str, dict[str, Any]] = {
    "host": {"gpu_share": False},
    "staged": {"gpu_share": 1.0},
    "half staged": {"gpu_share": 0.5},
    "some resident": {"gpu_share": 0.4, "resident": frozenset({0, 2})},
    "all resident": {"resident": frozenset(range(4))},
}


@pytest.mark.parametrize("make", [adamw, sgd, nadam])
@pytest.mark.parametrize("place", PLACES)
def test_every_placement_equals_the_plain_optimizer(make: Make, place: str, late: LateStreams) -> None:
    gradients = random_gradients(6)
    pipeline, compute = built(make, streams=late, block=1024, buffers=3, threads=2, **PLACES[place])
    train(pipeline, gradients, scale=0.5)
    pipeline.finish()
    expected = plain(make, gradients, scale=0.5)
    assert_same(masters(pipeline), expected)
    assert_same(compute, [line.to(torch.bfloat16) for line in expected])
    pipeline.close()


def test_work_on_the_cpu_needs_no_streams_and_one_block_each() -> None:
    gradients = random_gradients(4)
    pipeline, compute = built(adamw, threads=1)
    homes = [[block.home for block in pipeline.shard(u).blocks] for u in range(len(LENGTHS))]
    assert homes == [["cpu"]] * len(LENGTHS)
    train(pipeline, gradients)
    pipeline.finish()
    assert_same(compute, [line.to(torch.bfloat16) for line in plain(adamw, gradients)])
    pipeline.close()


@pytest.mark.parametrize("seed", range(4))
def test_queues_at_any_pace_give_the_same(seed: int) -> None:
    late = LateStreams(seed, longest_s=0.003)
    gradients = random_gradients(5)
    options = {"gpu_share": 0.6, "resident": frozenset({3}), "block": 700, "buffers": 2}
    pipeline, compute = built(adamw, streams=late, delayed=seed % 2 == 1, **options)
    train(pipeline, gradients)
    pipeline.finish()
    assert_same(compute, [line.to(torch.bfloat16) for line in plain(adamw, gradients)])
    pipeline.close()
    late.close()


def test_delayed_values_are_those_of_the_step_before(late: LateStreams) -> None:
    gradients = random_gradients(4)
    pipeline, compute = built(adamw, streams=late, delayed=True, gpu_share=0.5, resident=frozenset({1}), block=2048)
    for step in range(4):
        train(pipeline, gradients[step : step + 1])
        expected = plain(adamw, gradients[:step])  # the gradients of this step are still on their way
        assert_same(compute, [line.to(torch.bfloat16) for line in expected])
    pipeline.finish()
    assert_same(compute, [line.to(torch.bfloat16) for line in plain(adamw, gradients)])
    pipeline.close()


def test_a_delay_begins_after_a_warm_up(late: LateStreams) -> None:
    gradients = random_gradients(5)
    pipeline, compute = built(adamw, streams=late, delayed=True, gpu_share=0.5, block=2048)
    train(pipeline, gradients[:2], delay=False)
    for u in range(4):
        pipeline.wait(u)
    assert_same(compute, [line.to(torch.bfloat16) for line in plain(adamw, gradients[:2])])
    train(pipeline, gradients[2:3], delay=True)
    assert_same(compute, [line.to(torch.bfloat16) for line in plain(adamw, gradients[:2])])
    train(pipeline, gradients[3:4], delay=True)
    assert_same(compute, [line.to(torch.bfloat16) for line in plain(adamw, gradients[:3])])
    train(pipeline, gradients[4:], delay=False)
    pipeline.finish()
    assert_same(compute, [line.to(torch.bfloat16) for line in plain(adamw, gradients)])
    pipeline.close()


def test_a_delay_without_memory_for_it_is_refused() -> None:
    pipeline, _ = built(adamw)
    with pytest.raises(ValueError, match="delayed=True"):
        pipeline.step(delay=True)
    pipeline.close()


@pytest.mark.parametrize("place", PLACES)
def test_absent_ranges_and_units_keep_their_values_and_their_count(place: str, late: LateStreams) -> None:
    gradients = random_gradients(4)
    del gradients[1][3], gradients[2][0]
    pipeline, compute = built(adamw, streams=late, block=1000, **PLACES[place])
    train(pipeline, gradients[:1])
    train(pipeline, gradients[1:2], absent={1: [(0, 4000)]})
    train(pipeline, gradients[2:])
    pipeline.finish()
    expected = plain(adamw, gradients, holes={1: 1})
    assert_same(masters(pipeline), expected)
    assert_same(compute, [line.to(torch.bfloat16) for line in expected])
    assert pipeline.shard(1).scalars(0) == {"step": torch.tensor(3.0)}
    assert pipeline.shard(1).scalars(5000) == {"step": torch.tensor(4.0)}
    pipeline.close()


def test_a_scale_that_is_still_on_its_way_is_waited_for() -> None:
    late = LateStreams(3, longest_s=0.02)
    gradients = random_gradients(3)
    pipeline, compute = built(adamw, streams=late, gpu_share=0.5, resident=frozenset({0}))
    scales = [0.25, 0.5, 0.125]
    for scale, given in zip(scales, gradients, strict=True):
        train(pipeline, [given], scale=torch.tensor(scale))
    pipeline.finish()
    scaled = [{u: g * scale for u, g in given.items()} for scale, given in zip(scales, gradients, strict=True)]
    assert_same(compute, [line.to(torch.bfloat16) for line in plain(adamw, scaled)])
    pipeline.close()
    late.close()


def test_gradients_of_higher_precision_are_kept_so(late: LateStreams) -> None:
    gradients = random_gradients(3, torch.float32)
    pipeline, compute = built(adamw, streams=late, gpu_share=0.5, gradients=torch.float32)
    train(pipeline, gradients)
    pipeline.finish()
    assert_same(compute, [line.to(torch.bfloat16) for line in plain(adamw, gradients)])
    pipeline.close()


def test_double_precision_lines_are_stepped_in_double_precision(late: LateStreams) -> None:
    line = torch.randn(3000, dtype=torch.float64)
    reference = torch.nn.Parameter(line.clone())
    optimizer = torch.optim.AdamW([reference], lr=0.1, fused=True)
    placed = torch.optim.AdamW([torch.zeros(1)], lr=0.1)
    pipeline = Pipeline(placed, [Shard(line, [Run(0, 3000, 0)])], device=CPU, gpu_share=0.5, streams=late)
    for _ in range(3):
        reference.grad = torch.randn(3000, dtype=torch.float64)
        optimizer.step()
        pipeline.offer(0, reference.grad)
        pipeline.step()
    pipeline.finish()
    torch.testing.assert_close(line, reference.detach(), rtol=0, atol=0)
    pipeline.close()


@pytest.mark.parametrize("place", ["host", "half staged", "some resident"])
def test_sixteen_bit_moments_stay_near_full_ones(place: str, late: LateStreams) -> None:
    gradients = random_gradients(5)
    pipeline, _ = built(adamw, streams=late, moments=torch.bfloat16, block=2048, **PLACES[place])
    train(pipeline, gradients)
    for found, expected, start in zip(masters(pipeline), plain(adamw, gradients), values(), strict=True):
        change = (expected - start).norm()
        assert 0 < (found - expected).norm() < 0.02 * change
    pipeline.close()


@pytest.mark.parametrize(
    ("source", "target"), [("host", "some resident"), ("half staged", "host"), ("all resident", "staged")]
)
def test_state_moves_between_placements(source: str, target: str, late: LateStreams) -> None:
    gradients = random_gradients(6)
    first, _ = built(adamw, streams=late, block=1500, **PLACES[source])
    train(first, gradients[:3])
    second, compute = built(adamw, streams=late, block=900, buffers=2, **PLACES[target])
    train(second, gradients[5:])  # something else was there
    for u in range(4):
        for run in RUNS[u]:
            lines = {name: first.shard(u).read(name, run.start, run.stop) for name in first.shard(u).names()}
            second.shard(u).load({**lines, **(first.shard(u).scalars(run.start) or {})}, start=run.start, stop=run.stop)
    assert_same(compute, [line.to(torch.bfloat16) for line in plain(adamw, gradients[:3])])
    train(second, gradients[3:])
    second.finish()
    assert_same(compute, [line.to(torch.bfloat16) for line in plain(adamw, gradients)])
    first.close()
    second.close()


def test_reset_makes_the_next_step_the_first(late: LateStreams) -> None:
    gradients = random_gradients(2)
    pipeline, _ = built(adamw, streams=late, gpu_share=0.5, resident=frozenset({1}))
    train(pipeline, gradients[:1])
    for u, line in enumerate(values()):
        pipeline.shard(u).reset()
        pipeline.shard(u).load({"master": line})
    assert pipeline.shard(0).scalars() is None
    train(pipeline, gradients[1:])
    assert_same(masters(pipeline), plain(adamw, gradients[1:]))
    pipeline.close()


def test_units_on_disk_are_stepped_there(tmp_path: Path, late: LateStreams) -> None:
    gradients = random_gradients(4)
    homes = {1: "disk", 3: "disk"}
    blocks = [Block(None, RUNS[u], "disk", length=LENGTHS[u]) for u in homes]
    disk = Disk(tmp_path, disk_bytes(placeholder(adamw), blocks))
    pipeline, compute = built(adamw, streams=late, homes=homes, disk=disk, gpu_share=0.5)
    train(pipeline, gradients)
    assert_same(masters(pipeline), plain(adamw, gradients))
    assert_same(compute, [line.to(torch.bfloat16) for line in plain(adamw, gradients)])
    assert disk.moved["write"] > 0
    pipeline.close()
    disk.close()


def test_an_error_in_the_background_is_raised_and_the_update_can_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    gradients = random_gradients(3)
    pipeline, compute = built(adamw)
    train(pipeline, gradients[:1])
    pipeline.finish()
    real, calls = Stepper.start, 0

    def failing(self: Any, index: int, *args: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise DiskError("the disk is full")
        return real(self, index, *args, **options)

    monkeypatch.setattr(Stepper, "start", failing)
    for u, gradient in gradients[1].items():
        pipeline.offer(u, gradient)
    pipeline.step()
    with pytest.raises(DiskError, match="full"):
        pipeline.wait(3)
    with pytest.raises(DiskError, match="full"):
        pipeline.step()
    with pytest.raises(DiskError, match="full"):
        pipeline.finish()
    pipeline.retry()
    train(pipeline, gradients[2:])
    pipeline.finish()
    assert_same(compute, [line.to(torch.bfloat16) for line in plain(adamw, gradients)])
    pipeline.close()


def test_a_schedule_that_moves_on_does_not_reach_the_step_under_way(late: LateStreams) -> None:
    gradients = random_gradients(1)
    pipeline, compute = built(adamw, streams=late, gpu_share=0.5, block=512)
    optimizer = pipeline.optimizer
    train(pipeline, gradients)
    for group in optimizer.param_groups:
        group["lr"] = 1e9
    pipeline.finish()
    assert_same(compute, [line.to(torch.bfloat16) for line in plain(adamw, gradients)])
    pipeline.close()


def test_wrong_gradients_are_refused() -> None:
    pipeline, _ = built(adamw)
    with pytest.raises(ValueError, match="5000 elements"):
        pipeline.offer(0, torch.zeros(4999))
    pipeline.offer(0, torch.zeros(5000))
    with pytest.raises(RuntimeError, match="has a gradient already"):
        pipeline.offer(0, torch.zeros(5000))
    pipeline.close()


@pytest.mark.parametrize("delayed", [False, True])
@pytest.mark.parametrize("resident", [0, 1, 3])
def test_memory_held_is_what_was_planned(resident: int, delayed: bool) -> None:
    lengths = [8192, 8192, 8192]
    lines = [Shard(torch.zeros(n, dtype=torch.bfloat16), [Run(0, n, 0)]) for n in lengths]
    optimizer, chosen = torch.optim.AdamW([torch.zeros(1)]), frozenset(range(resident))
    settings: dict[str, Any] = {"delayed": delayed, "buffers": 2, "block": 2048}
    pipeline = Pipeline(optimizer, lines, device=CPU, gpu_share=0.5, resident=chosen, **settings)
    held = pipeline.device_bytes
    assert resident_units(lengths, held * 1.02, share=0.5, **settings) == chosen
    assert len(resident_units(lengths, held * 0.98, share=0.5, **settings)) == max(0, resident - 1)
    pipeline.close()
