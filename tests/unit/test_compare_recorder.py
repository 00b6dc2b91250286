"""What a worker records of a program that knows nothing of it, in worlds of threads."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import unisono as un
from unisono.launchers.runtime.variables import name_observer
from unisono.predict.compare import recorder
from unisono.world.virtual import run_threads


def observe(folder: Path, monkeypatch: pytest.MonkeyPatch, steps: int | None = None) -> None:
    for name, value in name_observer("unisono.predict.compare.recorder", folder=str(folder), steps=steps).items():
        monkeypatch.setenv(name, value)


@pytest.fixture(autouse=True)
def observed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """`un.parallel` hands over to the recorder, which writes into a folder of the test."""
    observe(tmp_path, monkeypatch)
    found = torch.autograd.backward
    yield tmp_path
    for left in list(recorder._recorders.values()):
        left.close()
    assert torch.autograd.backward is found


def make(world: un.World, strategy: str = "allreduce") -> tuple[nn.Module, torch.optim.Optimizer, un.Replica]:
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return model, optimizer, un.parallel(model, optimizer, strategy, world=world)


def closing(work: Callable[[un.World], Any]) -> Callable[[un.World], Any]:
    """The program, and its end."""

    def both(world: un.World) -> Any:
        try:
            return work(world)
        finally:
            mine = recorder._recorders.get(threading.get_ident())
            if mine is not None:
                mine.close()

    return both


def read(folder: Path, rank: int) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    about, *steps = [json.loads(line) for line in (folder / f"rank-{rank}.jsonl").read_text().splitlines()]
    return about, [dict(zip(about["fields"], step, strict=True)) for step in steps]


def test_each_step_is_recorded_with_the_loss_that_backward_was_called_on(observed: Path) -> None:
    data = torch.randn(20, 4, generator=torch.Generator().manual_seed(1))

    @closing
    def work(world: un.World) -> list[float]:
        model, optimizer, _ = make(world)
        seen = []
        for batch in un.shard(data, batch_size=8, shuffle=False, world=world):
            optimizer.zero_grad()
            loss = (model(batch) ** 2).mean()
            seen.append(loss.item())
            loss.backward()
            optimizer.step()
        return seen

    seen = run_threads(work, 2)
    for rank in range(2):
        about, steps = read(observed, rank)
        assert (about["rank"], about["size"], about["strategy"]) == (rank, 2, "allreduce")
        assert [step["loss"] for step in steps] == pytest.approx(seen[rank])
        assert [step["samples"] for step in steps] == [8, 16, 20]  # of both ranks; the last batch is a short one
        assert [step["step"] for step in steps] == [1, 2, 3]
        parts = [sum(s[name] for name in ("compute", "communication", "waiting", "data")) for s in steps]
        assert parts == pytest.approx([step["wall"] for step in steps])
        assert all(step["bytes_sent"] >= 20 for step in steps)  # 2 * (N - 1) / N of 5 numbers of 4 bytes, and flags


def test_a_window_of_several_passes_has_the_mean_of_their_losses(observed: Path) -> None:
    @closing
    def work(world: un.World) -> None:
        model, optimizer, _ = make(world, "allreduce(accumulate=2)")
        for factor in (1.0, 3.0, 5.0, 7.0):
            (0 * model(torch.ones(1, 4)).sum() + factor).backward()
            if factor in (3.0, 7.0):
                optimizer.step()

    run_threads(work, 2)
    assert [step["loss"] for step in read(observed, 0)[1]] == [2.0, 6.0]


@pytest.mark.parametrize("windows", ["one", "several"])
def test_the_loss_does_not_depend_on_how_many_passes_it_is_divided_by(observed: Path, windows: str) -> None:
    """As loops do it that accumulate less on more workers; `windows` of a step: one, or one for each pass."""

    @closing
    def work(world: un.World) -> None:
        passes = 4 // world.size
        model, optimizer, _ = make(world, f"allreduce(accumulate={passes})" if windows == "one" else "allreduce")
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        for loss in (2.0, 1.5, 1.0):
            for _ in range(passes):
                scaler.scale((0 * model(torch.ones(1, 4)).sum() + loss) / passes).backward()
            scaler.step(optimizer)
            scaler.update()

    found = []
    for size in (1, 2, 4):
        run_threads(work, size)
        each = 1 if windows == "one" else 4 // size
        found.append([step["loss"] for step in read(observed, 0)[1]][each::each])  # after the first step
    assert found == [[1.5, 1.0]] * 3


def test_a_scaled_loss_counts_as_it_was_before(observed: Path) -> None:
    @closing
    def work(world: un.World) -> None:
        model, optimizer, _ = make(world)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        scaler.scale(0 * model(torch.ones(1, 4)).sum() + 2.5).backward()
        scaler.step(optimizer)

    run_threads(work, 2)
    assert [step["loss"] for step in read(observed, 1)[1]] == [2.5]


def test_a_program_ends_after_so_many_steps_on_every_rank(observed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    observe(observed, monkeypatch, steps=3)

    def work(world: un.World) -> tuple[int, object]:
        model, optimizer, _ = make(world)
        steps = 0

        def train() -> None:
            nonlocal steps
            while steps < 10:
                model(torch.ones(1, 4)).sum().backward()
                optimizer.step()
                steps += 1

        with pytest.raises(SystemExit) as end:
            train()
        return steps, end.value.code

    assert run_threads(work, 2) == [(3, 0), (3, 0)]
    assert [len(read(observed, rank)[1]) for rank in range(2)] == [3, 3]


def test_a_loss_that_is_not_a_number_is_marked(observed: Path) -> None:
    @closing
    def work(world: un.World) -> None:
        model, optimizer, _ = make(world)
        for value in (1.0, float("nan")):
            (0 * model(torch.ones(1, 4)).sum() + value).backward()
            optimizer.step()

    run_threads(work, 2)
    assert [(step["loss"], step["finite"]) for step in read(observed, 0)[1]] == [(1.0, True), (None, False)]


def test_a_backward_of_several_tensors_has_no_loss_and_samples_outside_of_un_shard_are_not_known(
    observed: Path,
) -> None:
    @closing
    def work(world: un.World) -> None:
        model, optimizer, _ = make(world)
        outputs = model(torch.ones(3, 4))
        outputs.backward(torch.ones_like(outputs))
        optimizer.step()

    run_threads(work, 2)
    (step,) = read(observed, 0)[1]
    assert (step["loss"], step["samples"], step["finite"]) == (None, None, True)


def test_what_a_reducer_does_is_told_apart_from_what_moves(observed: Path) -> None:
    @closing
    def work(world: un.World) -> None:
        model, optimizer, _ = make(world, "powersgd(rank=1)")
        for _ in range(3):
            model(torch.ones(1, 4)).sum().backward()
            optimizer.step()
        assert {span.kind for span in world.ledger.spans} >= {"reducer", "blocked"}

    run_threads(work, 2)
    for step in read(observed, 0)[1]:
        assert 0 < step["compression"] <= step["communication"]


def test_a_script_that_goes_on_from_a_checkpoint_is_refused(observed: Path) -> None:
    """The checkpoint would be that of the method before."""

    def work(world: un.World) -> None:
        model, _, _ = make(world)
        world.ledger.resume(50)
        with pytest.raises(RuntimeError, match=r"resumed from a checkpoint \(step 50\)"):
            model(torch.ones(1, 4)).sum().backward()

    run_threads(work, 2)


@pytest.mark.parametrize(
    ("spec", "begins"),
    [("allreduce", []), ("local_sgd(every=8)", ["start", 100]), ("local_sgd(every=8, start=0)", [])],
)
def test_how_long_a_method_begins_as_all_reduce_is_recorded(observed: Path, spec: str, begins: list[object]) -> None:
    run_threads(closing(lambda world: make(world, spec) and None), 2)
    assert read(observed, 0)[0]["begins"] == begins
