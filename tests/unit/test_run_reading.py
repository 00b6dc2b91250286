"""The folder of a run is read whatever state it is in: hand-written folders, complete, growing, damaged, or empty."""

from __future__ import annotations

import json
import os
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from unisono.launchers.runtime.run_folder import FORMAT
from unisono.observe.runs.reading import RunReader
from unisono.observe.runs.table import COLUMNS

HEADER = {"format": FORMAT, "rank": 0, "size": 2, "pid": 7, "unix": 1000.0, "boot": "b", "time": 1.0, "strategy": "x"}


def write_run(folder: Path, **values: Any) -> None:
    """What a launcher leaves of a run that has ended well."""
    known = {"format": FORMAT, "workers": 2, "started": 1.0, "ended": 9.0, "outcome": "ok", "versions": {}}
    (folder / "ranks").mkdir(parents=True, exist_ok=True)
    (folder / "run.json").write_text(json.dumps({**known, **values}))


def write_rank(folder: Path, place: int, *lines: Any, end: bool = True, **header: Any) -> Path:
    """A worker's file: header, lines, end."""
    every = [
        ["header", {**HEADER, "rank": place, **header}],
        *lines,
        *([["end", 9.0, {"outcome": "ok"}]] if end else []),
    ]
    path = folder / "ranks" / f"{place:05}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(line) + "\n" for line in every))
    return path


def step(number: int, wall: float = 1.0, compute: float = 0.5, sent: int = 100) -> list[Any]:
    """A line of one step."""
    return ["step", number, number * wall, wall, compute, 0.3, 0.1, 0.1, 0.0, sent, 2, 0.0]


def read(folder: Path) -> RunReader:
    reader = RunReader(folder)
    reader.poll()
    return reader


def test_a_complete_run_is_read_and_nothing_is_missing(tmp_path: Path) -> None:
    write_run(tmp_path)
    (tmp_path / "events.jsonl").write_text('{"time": 3.0, "kind": "worker started", "rank": 1}\n')
    for place in (0, 1):
        event = ["event", "straggler", 1, 1.5, {"rank": 1, "cause": "input"}]
        others = [event, ["tags", {"gradients": 200}], ["data", {"samples": 8}]]
        write_rank(tmp_path, place, step(0), step(1, sent=50), *others)
    reader = read(tmp_path)
    assert reader.missing == []
    assert reader.unreadable == 0
    assert reader.is_running is False
    assert [e["kind"] for e in reader.events] == ["worker started"]
    rank = reader.ranks[1]
    assert (rank.rows.steps, rank.last_step, rank.rows.totals["wall"], rank.rows.totals["bytes_sent"]) == (
        2,
        1,
        2.0,
        150,
    )
    assert rank.events[0] == {"kind": "straggler", "step": 1, "time": 1.5, "rank": 1, "cause": "input"}
    assert (rank.tags, rank.data, rank.rank, rank.last_unix) == ({"gradients": 200}, {"samples": 8}, 1, 1009.0)


def test_a_growing_file_is_read_on_and_a_half_line_waits_for_its_rest(tmp_path: Path) -> None:
    write_run(tmp_path, ended=None, launcher_pid=os.getpid())
    path = write_rank(tmp_path, 0, step(0), end=False)
    reader = read(tmp_path)
    assert reader.ranks[0].rows.steps == 1
    whole = json.dumps(step(1)) + "\n"
    for piece in (whole[:9], whole[9:]):
        assert reader.ranks[0].rows.steps == 1
        with path.open("a") as file:
            file.write(piece)
        reader.poll()
    assert reader.ranks[0].rows.steps == 2
    write_rank(tmp_path, 1, step(0))  # comes later
    reader.poll()
    assert list(reader.ranks) == [0, 1]
    assert reader.unreadable == 0


def test_sums_of_several_steps_count_each_of_them(tmp_path: Path) -> None:
    write_run(tmp_path)
    write_rank(tmp_path, 0, step(0), ["steps", 1, 4, 1.0, 4.0, 2.0, 1.2, 0.4, 0.4, 0.0, 400, 8, 0.0, 1.5])
    rows = read(tmp_path).ranks[0].rows
    assert (rows.steps, rows.totals["wall"], rows.totals["bytes_sent"]) == (5, 5.0, 500)
    assert rows.mean("wall").tolist() == [1.0, 1.0]
    assert rows.column("longest").tolist() == [1.0, 1.5]


@pytest.mark.parametrize("exists", [True, False])
def test_an_empty_folder_says_what_is_missing(tmp_path: Path, exists: bool) -> None:
    reader = read(tmp_path if exists else tmp_path / "nowhere")
    text = "; ".join(reader.missing)
    assert "run.json is missing" in text
    assert "no worker wrote anything" in text


def test_a_killed_run_says_so(tmp_path: Path) -> None:
    write_run(tmp_path, ended=None, launcher_pid=2**22 + 1, launcher_start=5, workers=3, machine={"host": "?"})
    write_rank(tmp_path, 0, step(0))
    write_rank(tmp_path, 1, step(0), end=False)
    path = tmp_path / "ranks" / "00001.jsonl"
    path.write_text(path.read_text() + '["step", 1, 0.5')
    reader = read(tmp_path)
    text = "; ".join(reader.missing)
    assert "worker 2: nothing was written there" in text
    assert "the end of worker 1: killed" in text
    assert "its end: the launcher was killed" in text
    assert reader.unreadable == 0  # the unfinished line is no damage


HOSTILE = [
    b"\xff\xfe\x00garbage",
    b"null",
    b"{}",
    b"[]",
    b'["unknown"]',
    b'["step", 1]',
    b'["step", 1, 0, 1, 1, 0, 0, 0, 0, "many", 1, 0]',
    b'["step", 1, 0, NaN, 1, 0, 0, 0, 0, 1, 1, 0]',
    b'["steps", 5, 1, 0, 1, 1, 0, 0, 0, 0, 1, 1, 0, 1]',
    b'["metrics", 1, 2.0, {"loss": "low"}, "mean"]',
    b'["metrics", 1]',
    b'["header", 5]',
    b'["tags", {"x": "y"}]',
    b'["record", "op"]',
    b'["end"]',
    b'["event", "x"]',
    b"[" * 5000,
]


@pytest.mark.parametrize("line", HOSTILE, ids=lambda line: line[:20].decode("latin1"))
def test_a_line_that_makes_no_sense_is_counted_and_the_rest_is_read(tmp_path: Path, line: bytes) -> None:
    write_run(tmp_path)
    path = write_rank(tmp_path, 0, step(0), end=False)
    path.write_bytes(path.read_bytes() + line + b"\n" + json.dumps(step(1)).encode() + b"\n")
    (tmp_path / "events.jsonl").write_bytes(line + b"\n")
    (tmp_path / "ranks" / "notes.txt").write_bytes(line)
    reader = read(tmp_path)
    assert reader.ranks[0].rows.steps == 2
    assert reader.unreadable >= 1
    assert any("could not be read" in text for text in reader.missing)


@pytest.mark.parametrize(
    "text", ["", "[]", '"run"', "{", '{"ended": null, "machine": 5, "workers": "x", "versions": 1}']
)
def test_a_damaged_run_json_does_not_hide_the_ranks(tmp_path: Path, text: str) -> None:
    write_rank(tmp_path, 0, step(0))
    (tmp_path / "run.json").write_text(text)
    reader = read(tmp_path)
    assert reader.ranks[0].rows.steps == 1
    assert reader.missing


def test_memory_stays_bounded_and_the_sums_exact(tmp_path: Path) -> None:
    write_run(tmp_path)
    walls = [0.001 * (1 + i % 7) for i in range(20_000)]
    lines = [step(i, wall) for i, wall in enumerate(walls)]
    values = [["metrics", i, float(i), {"loss": float(i)}, "mean"] for i in range(20_000)]
    write_rank(tmp_path, 0, *lines, *values)
    rank = read(tmp_path).ranks[0]
    assert len(rank.rows) <= 8192
    assert len(rank.metrics["loss"]) <= 8192
    assert rank.rows.array.shape == (len(rank.rows), len(COLUMNS))
    assert rank.rows.steps == 20_000
    assert rank.rows.totals["wall"] == pytest.approx(sum(walls))
    assert rank.rows.column("wall").sum() == pytest.approx(sum(walls))
    assert rank.rows.column("longest").max() == pytest.approx(0.007)
    widths = [b - a for a, b in pairwise(rank.rows.column("first"))]
    assert max(widths[:-8]) <= 8 * min(widths[:-8])  # the beginning is seen as well as the end
    assert rank.metrics["loss"].values[::1000].tolist() == pytest.approx(rank.metrics["loss"].steps[::1000], abs=8)


@pytest.mark.parametrize(
    ("how", "expected"),
    [("mean", [1.0, 3.0, 4.0]), ("sum", [1.0, 6.0, 8.0]), ("min", [1.0, 2.0, 3.0]), ("max", [1.0, 4.0, 5.0])],
)
def test_ranks_are_joined_by_step(tmp_path: Path, how: str, expected: list[float]) -> None:
    write_run(tmp_path)
    write_rank(tmp_path, 0, *(["metrics", s, s + 0.5, {"v": v}, how] for s, v in ((1, 1.0), (2, 2.0), (3, 3.0))))
    write_rank(tmp_path, 1, *(["metrics", s, s + 0.6, {"v": v}, how] for s, v in ((2, 4.0), (3, 5.0))))
    joined = read(tmp_path).join_metric("v")
    assert joined is not None
    assert joined.steps.tolist() == [1, 2, 3]
    assert joined.values.tolist() == expected
    assert joined.times.tolist() == [1001.5, 1002.5, 1003.5]
    assert (joined.ranks, joined.how) == (2, how)


def test_the_last_value_of_a_lost_rank_is_not_carried_on(tmp_path: Path) -> None:
    """Rank 1 is lost after step 2, and has logged most values until then; rank 0 logs every other step, and lives."""
    write_run(tmp_path)
    values = [["metrics", s, float(s), {"loss": 1.0}, "mean"] for s in (1, 3, 5, 7)]
    write_rank(tmp_path, 0, *(step(s) for s in range(1, 8)), *values)
    lost = [["metrics", s, float(s), {"loss": 9.0}, "mean"] for s in (1, 2, 2, 2, 2)]
    write_rank(tmp_path, 1, *(step(s) for s in (1, 2)), *lost, end=False)
    joined = read(tmp_path).join_metric("loss")
    assert joined is not None
    assert joined.steps.tolist() == [1, 2, 3, 5, 7]
    assert joined.values.tolist() == [5.0, 5.0, 5.0, 1.0, 1.0]  # at 3 it was about to make that step


def test_a_loss_that_is_not_finite_on_one_rank_is_not_hidden_by_the_others(tmp_path: Path) -> None:
    write_run(tmp_path)
    write_rank(tmp_path, 0, ["metrics", 1, 1.0, {"loss": None}, "mean"])
    write_rank(tmp_path, 1, ["metrics", 1, 1.0, {"loss": 2.0}, "mean"], ["metrics", 1, 1.0, {"lr": 2.0}, "rank"])
    reader = read(tmp_path)
    joined = reader.join_metric("loss")
    assert joined is not None
    assert joined.values[0] != joined.values[0]
    assert reader.join_metric("lr") is None
    assert reader.join_metric("nothing") is None
    assert reader.metric_names == ["loss", "lr"]


def test_a_replacement_in_the_same_place_adds_to_the_sums(tmp_path: Path) -> None:
    write_run(tmp_path, workers=1)
    second = ["header", {**HEADER, "pid": 8, "generation": 1}]
    lines = [step(0), ["tags", {"g": 5}], second, step(1), ["tags", {"g": 7}]]
    rank = read_rank(tmp_path, *lines)
    assert rank.rows.steps == 2
    assert rank.tags == {"g": 12}
    assert [header["pid"] for header in rank.headers] == [7, 8]


def read_rank(folder: Path, *lines: Any) -> Any:
    write_rank(folder, 0, *lines)
    return read(folder).ranks[0]
