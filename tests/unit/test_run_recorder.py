"""What a worker writes of its run: in worlds of threads, with made-up clocks, and where it cannot be written."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import unisono as un
from unisono.launchers.runtime import run_folder
from unisono.observe.runs import backward, recorder, recording
from unisono.observe.runs.reading import RankLog, RunReader
from unisono.observe.runs.recorder import Arriving, Facts, Recorder
from unisono.observe.runs.recording import FileWriter, PipeWriter, find_writer, log
from unisono.world.ledger import Ledger, Row
from unisono.world.virtual import run_threads


@pytest.fixture(autouse=True)
def torch_is_left_as_it_was() -> Iterator[None]:
    before = torch.autograd.backward
    yield
    assert torch.autograd.backward is before


class Kept:
    """Lines in memory."""

    def __init__(self) -> None:
        self.text = ""

    def write(self, text: str, *, last: bool = False) -> None:
        self.text += text

    @property
    def lines(self) -> list[Any]:
        return [json.loads(line) for line in self.text.splitlines()]

    def of(self, kind: str) -> list[Any]:
        return [line for line in self.lines if line[0] == kind]


def train(world: un.World, steps: int = 6, **options: Any) -> tuple[list[float], Ledger]:
    """A small training; the losses of this rank."""
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    un.parallel(model, optimizer, world=world)
    x = torch.randn(24, 4, generator=torch.Generator().manual_seed(1))
    y = torch.arange(24) % 2
    losses = []
    for inputs, labels in un.shard((x, y), batch_size=8, world=world, seed=0).steps(steps):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(inputs), labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, world.ledger


def read(folder: Path) -> dict[int, RankLog]:
    reader = RunReader(folder)
    reader.poll()
    assert reader.unreadable == 0
    return reader.ranks


def test_what_is_read_is_what_the_ledger_counted_and_what_the_program_computed(tmp_path: Path) -> None:
    def work(world: un.World) -> Any:
        mine = Recorder(world, FileWriter(tmp_path, world.rank), Facts("allreduce", 10))
        losses, ledger = train(world)
        ledger.event("decision", why="a test")
        mine.close("ok")
        return losses, ledger.totals(), ledger.by_tag()

    (tmp_path / "ranks").mkdir()
    every = run_threads(work, 2)
    ranks = read(tmp_path)
    for rank, (losses, totals, tags) in enumerate(every):
        found = ranks[rank]
        assert found.rows.steps == totals.steps == 6
        for name in ("wall", "compute", "communication", "waiting", "data"):
            assert found.rows.totals[name] == pytest.approx(getattr(totals, name), abs=6 * 1e-6)
        assert found.rows.totals["bytes_sent"] == totals.bytes_sent == tags["gradients/0"]
        assert found.metrics["loss"].values.tolist() == pytest.approx(losses)
        assert found.metrics["loss"].steps.tolist() == [1, 2, 3, 4, 5, 6]
        assert found.tags == tags
        assert found.data["samples"] == 24
        assert [e["kind"] for e in found.events] == ["decision"]
        assert found.header["strategy"] == "allreduce"
        assert len(found.records) >= 8
        assert found.end is not None
    both = [found.data["classes"] for found in ranks.values()]
    assert {name: both[0][name] + both[1][name] for name in "01"} == {"0": 24, "1": 24}  # two epochs of 12 each


def test_a_loss_that_the_program_logs_stands_in_place_of_the_one_that_was_noticed() -> None:
    kept, world = Kept(), un.World()
    mine = Recorder(world, kept)
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    un.parallel(model, optimizer, world=world)
    for step in range(3):
        loss = model(torch.ones(1, 2)).sum()
        loss.backward()
        optimizer.step()
        mine.log({"loss": 7.0 + step})
    mine.close("ok")
    assert [line[3] for line in kept.of("metrics")] == [{"loss": 7.0}, {"loss": 8.0}, {"loss": 9.0}]


def test_accumulated_losses_are_one_value_a_window_and_scaled_ones_count_unscaled() -> None:
    kept, world = Kept(), un.World()
    mine = Recorder(world, kept)
    model = nn.Linear(1, 1, bias=False)
    nn.init.constant_(model.weight, 1.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    un.parallel(model, optimizer, "allreduce(accumulate=2)", world=world)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for value in (1.0, 3.0, 5.0, 5.0):
        scaler.scale(model(torch.tensor([[value]])).sum()).backward()
    mine.close("ok")
    assert [line[3]["loss"] for line in kept.of("metrics")] == [2.0, 5.0]


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def record_long_run(monkeypatch: pytest.MonkeyPatch, steps: int, step_s: float) -> tuple[Kept, int]:
    """A recorder that is told of so many steps; the bytes that were sent in them."""
    clock, kept = Clock(), Kept()
    world = un.World(ledger=Ledger(clock=clock))
    mine = Recorder(world, kept)
    sent = 0
    for i in range(steps):
        clock.now += step_s
        sent += i % 5
        mine.on_row(Row(i, clock.now - step_s, step_s, step_s / 2, 0.0, 0.0, 0.0, 0.0, i % 5, 1))
        if i % 3 == 0:
            mine.log({"accuracy": float(i)})
    mine.close("ok")
    return kept, sent


def test_a_long_run_stays_bounded_and_its_sums_exact(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(recorder, "DETAILED_STEPS", 100)
    monkeypatch.setattr(recorder, "DETAILED_VALUES", 50)
    monkeypatch.setattr(run_folder, "WRITES_A_RUN", 200)
    kept, sent = record_long_run(monkeypatch, 50_000, 1.0)
    assert len(kept.of("step")) == 100
    # A line each 1/200 of the time so far: 200 times the logarithm of how often 200 s fit in it, and rounding up.
    assert 1000 < len(kept.of("steps")) < 1500
    assert len(kept.of("metrics")) < 1600
    (tmp_path / "ranks").mkdir()
    (tmp_path / "ranks" / "00000.jsonl").write_text(kept.text)
    rows = read(tmp_path)[0].rows
    assert rows.steps == 50_000
    assert rows.totals["wall"] == pytest.approx(50_000.0)
    assert rows.totals["bytes_sent"] == sent


def test_lines_come_about_twice_a_second_and_a_verdict_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, kept = Clock(), Kept()
    world = un.World(ledger=Ledger(clock=clock))
    mine = Recorder(world, kept)
    for i in range(4):
        clock.now += 0.2
        mine.on_row(Row(i, clock.now - 0.2, 0.2, 0.2, 0.0, 0.0, 0.0, 0.0, 0, 0))
        assert len(kept.of("step")) == (0 if i < 2 else 3)
    world.ledger.event("verdict", rank=1, cause="slow input", text="...")
    assert kept.of("event")[0][1] == "verdict"
    assert len(kept.of("step")) == 4
    mine.close("ok")


def test_many_events_and_long_ones_stay_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder, "DETAILED_EVENTS", 10)
    kept, world = Kept(), un.World()
    mine = Recorder(world, kept)
    for i in range(5):
        world.ledger.event("round", number=i, norms={f"layer{n}.weight": 0.5 for n in range(400)})
    mine.write()
    assert [line[4] for line in kept.of("event")] == [{"number": i, "norms": "400 values"} for i in range(5)]
    for i in range(20):
        world.ledger.event("round", number=i)
        world.ledger.event("straggler", rank=i)
    mine.close("ok")
    kinds = [line[1] for line in kept.of("event")][5:]
    assert kinds.count("straggler") == 20
    assert kinds.count("round") == 1
    assert [line[4]["number"] for line in kept.of("event") if line[1] == "round"][-1] == 19


def test_a_change_of_the_world_writes_another_header() -> None:
    kept, world = Kept(), un.World()
    mine = Recorder(world, kept)
    world.name, world.rank, world.size = "world.3", 2, 5
    mine.write()
    mine.close("ok")
    headers = [line[1] for line in kept.of("header")]
    assert [(h["generation"], h["rank"], h["size"]) for h in headers] == [(0, 0, 1), (3, 2, 5)]


def test_a_full_disk_is_said_once_and_training_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def no_room(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    (tmp_path / "ranks").mkdir()
    world = un.World()
    mine = Recorder(world, FileWriter(tmp_path, 0))
    before = (tmp_path / "ranks" / "00000.jsonl").read_bytes()
    monkeypatch.setattr(run_folder.os, "write", no_room)
    for _ in range(3):
        mine.log({"loss": 1.0})
        mine.write()
    monkeypatch.undo()
    mine.close("ok")
    said = capfd.readouterr().err
    assert said.count("no longer recorded") == 1
    assert "No space left on device; training continues" in said
    assert (tmp_path / "ranks" / "00000.jsonl").read_bytes() == before


def test_a_folder_that_a_user_names_is_made(tmp_path: Path) -> None:
    lines = FileWriter(tmp_path / "not" / "there", 2)
    lines.write("[]\n")
    assert (tmp_path / "not" / "there" / "ranks" / "00002.jsonl").read_text() == "[]\n"


def test_half_a_line_on_a_full_disk_is_taken_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.write
    pieces = iter([lambda fd, data: real(fd, bytes(data)[:3]), None])

    def fail_later(fd: int, data: bytes) -> int:
        do = next(pieces)
        if do is None:
            raise OSError(errno.ENOSPC, "full")
        return do(fd, data)

    path = tmp_path / "file"
    path.write_bytes(b"whole\n")
    monkeypatch.setattr(run_folder.os, "write", fail_later)
    with pytest.raises(OSError, match="full"):
        run_folder.append(path, b"another\n")
    assert path.read_bytes() == b"whole\n"


def test_lines_of_a_host_without_the_folder_travel_in_pieces_that_are_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, theirs = os.pipe()
    monkeypatch.setenv(run_folder.FOLDER, str(tmp_path / "elsewhere"))
    monkeypatch.setenv(run_folder.FOLDER_ID, "1234")
    monkeypatch.setenv("UNISONO_REPORT_FD", str(theirs))
    lines = find_writer(3)
    assert isinstance(lines, PipeWriter)
    text = "".join(f'["event","x",{i},1.0,{{"text":"{chr(92)}{chr(34)}"}}]\n' for i in range(400))
    lines.write(text)
    os.close(theirs)
    with open(ours, "rb") as file:
        messages = [json.loads(line) for line in file.read().splitlines()]
    assert "".join(message["text"] for message in messages) == text
    assert {message["kind"] for message in messages} == {"lines"}
    assert len(messages) > 5


def test_a_pipe_that_nobody_reads_does_not_hold_training_up() -> None:
    ours, theirs = os.pipe()
    lines = PipeWriter(theirs)
    for _ in range(100):
        lines.write("x" * 10_000 + "\n")  # far more than a pipe holds
    os.close(ours)
    os.close(theirs)


def test_a_worker_of_another_folder_id_does_not_write_into_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "run.json").write_text('{"id": "right"}')
    monkeypatch.setenv(run_folder.FOLDER, str(tmp_path))
    monkeypatch.delenv("UNISONO_REPORT_FD", raising=False)
    for word, expected in (("right", FileWriter), ("wrong", type(None))):
        monkeypatch.setenv(run_folder.FOLDER_ID, word)
        assert isinstance(find_writer(0), expected)


# un.log --------------------------------------------------------------------------------------------------------------


def test_log_does_nothing_where_nobody_records() -> None:
    un.log(loss=0.5, how="sum")
    un.log({"val/loss": torch.tensor(3.0)}, step=4)
    assert recording.find_recorder() is None


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda: log(loss=torch.zeros(3)), TypeError, "loss: float32 of shape (3,); expected one number"),
        (lambda: log(loss="low"), TypeError, "got loss='low'"),
        (lambda: log(loss=None), TypeError, "got loss=None"),
        (lambda: log({3: 1.0}), TypeError, "a value called 3"),  # type: ignore[dict-item]
        (lambda: log(loss=1.0, how="median"), ValueError, "got how='median'; expected one of 'mean', 'sum'"),  # type: ignore[arg-type]
    ],
)
def test_log_refuses_what_is_not_a_number_recorded_or_not(call: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error) as caught:
        call()
    assert text in str(caught.value)


def test_log_takes_numbers_of_all_kinds() -> None:
    import numpy as np

    def work(world: un.World) -> list[Any]:
        kept = Kept()
        mine = Recorder(world, kept)
        running = torch.zeros(())  # changed in place: it is logged as it is then
        for i in range(2):
            running += 1.5
            un.log(
                running=running, count=np.int64(i), flag=True, bad=float("nan")
            )  # changed later on: logged as it is now
        un.log({"lr": 0.25}, how="rank", step=40)
        mine.close("ok")
        return kept.of("metrics")

    first, second, third = run_threads(work, 2)[1]
    assert first[3:] == [{"running": 1.5, "count": 0.0, "flag": 1.0, "bad": None}, "mean"]
    assert second[3]["running"] == 3.0
    assert (third[1], third[3:]) == (40, [{"lr": 0.25}, "rank"])


@pytest.mark.parametrize("told", [True, False])
def test_the_loss_of_a_step_is_the_same_whether_the_strategy_knows_of_its_passes_or_not(told: bool) -> None:
    """Four passes of a quarter of the loss each. If each is exchanged, the first step tells how many there are."""
    kept, world = Kept(), un.World()
    mine, model = Recorder(world, kept), nn.Linear(1, 1, bias=False)
    nn.init.ones_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    replica = un.parallel(model, optimizer, "allreduce", world=world, accumulate=4 if told else 1)
    for _ in range(3):
        for _ in range(4):
            (model(torch.ones(1, 1)).sum() * 8 / 4).backward()
        optimizer.step()
        optimizer.zero_grad()
    replica.close()
    mine.close("ok")
    losses = [line[3]["loss"] for line in kept.of("metrics")]
    assert losses == ([8.0] * 3 if told else [2.0] * 4 + [8.0] * 8)


class Later:
    """A CUDA event whose work is done when it is told so."""

    done = False

    def query(self) -> bool:
        return self.done

    def synchronize(self) -> None:
        self.done = True


def test_values_of_a_gpu_are_written_when_they_have_arrived_and_in_their_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(recorder, "start_copies", dict)  # some are on their way already
    kept, world = Kept(), un.World()
    mine, event = Recorder(world, kept), Later()
    mine.log({"loss": Arriving(torch.tensor(2.0), event)})
    mine.log({"loss": 3.0})
    mine.write()
    assert kept.of("metrics") == []
    event.done = True
    mine.write()
    assert [line[3]["loss"] for line in kept.of("metrics")] == [2.0, 3.0]
    mine.log({"loss": Arriving(torch.tensor(4.0), Later())})
    mine.close("ok")
    assert [line[3]["loss"] for line in kept.of("metrics")] == [2.0, 3.0, 4.0]


# Other libraries that replace torch's backward ------------------------------------------------------------------------


class Listening:
    """Counts the calls of backward."""

    def __init__(self) -> None:
        self.calls = 0

    def before_backward(self, tensors: Any) -> None:
        self.calls += 1

    def after_backward(self) -> None: ...

    def note_scaled(self, scaled: Any, loss: Any) -> None: ...


def patch_backward(monkeypatch: pytest.MonkeyPatch, seen: list[str], name: str) -> None:
    """Replace torch's backward as another library does: by a function that calls what was there."""
    before = torch.autograd.backward

    def patched(*args: Any, **kwargs: Any) -> None:
        seen.append(name)
        before(*args, **kwargs)

    monkeypatch.setattr(torch.autograd, "backward", patched)


def call_backward() -> None:
    x = torch.ones(2, requires_grad=True)
    x.sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [1.0, 1.0], "once"


@pytest.mark.parametrize("when", ["before", "meanwhile"])
def test_a_patch_of_another_library_outlives_our_own(monkeypatch: pytest.MonkeyPatch, when: str) -> None:
    seen: list[str] = []
    first, second = Listening(), Listening()
    if when == "before":
        patch_backward(monkeypatch, seen, "theirs")
    assert backward.follow_backward(first)
    if when == "meanwhile":
        patch_backward(monkeypatch, seen, "theirs")
    call_backward()
    backward.leave_backward(first)
    call_backward()
    assert (seen, first.calls) == (["theirs"] * 2, 1)
    assert backward.follow_backward(second)
    call_backward()
    backward.leave_backward(second)
    assert (seen, first.calls, second.calls) == (["theirs"] * 3, 1, 1)
    monkeypatch.undo()  # their patch is taken away
    backward.leave_backward(second)
