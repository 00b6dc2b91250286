"""Reports of hand-written runs: numbers worked out by hand, every form of output, and runs that are not whole."""

from __future__ import annotations

import html
import json
import math
import os
import re
import time
from pathlib import Path
from typing import Any

import pytest

from unisono.cli import main
from unisono.launchers.runtime import run_folder
from unisono.launchers.runtime.run_folder import NoSuchRun, RunFolder, find_run, list_runs, make_folder
from unisono.observe.reports.page import make_page
from unisono.observe.reports.summary import Summary, compare_with, summarise
from unisono.observe.reports.trace import find_offsets, write_trace
from unisono.observe.reports.wording import list_facts
from unisono.observe.runs.reading import RunReader


def write_run(folder: Path, **values: Any) -> None:
    known = {
        "format": 1,
        "name": folder.name,
        "command": ["unisono", "run", "-n", "2", "train.py"],
        "program": ["train.py"],
        "workers": 2,
        "started": 1000.0,
        "ended": 1010.0,
        "outcome": "ok",
        "exit_status": 0,
        "versions": {"unisono": "0.1.0"},
    }
    (folder / "ranks").mkdir(parents=True, exist_ok=True)
    (folder / "run.json").write_text(json.dumps({**known, **values}))


def write_rank(folder: Path, place: int, *lines: Any, end: bool = True, **header: Any) -> None:
    about = {"rank": place, "size": 2, "pid": 1, "unix": 990.0, "boot": "b", "time": 10.0, "host": "h", "device": "cpu"}
    about |= {"strategy": "allreduce", "parameters": 10, "hosts": 1}
    last = [["end", 20.0, {"outcome": "ok"}]] if end else []
    path = folder / "ranks" / f"{place:05}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(line) + "\n" for line in [["header", about | header], *lines, *last]))


def row(step: int, compute: float, communication: float, waiting: float, data: float, sent: int = 80) -> list[Any]:
    wall = compute + communication + waiting + data
    return ["step", step, 10 + step * wall, wall, compute, communication, waiting, data, 0.01, sent, 2, 0.0]


def make_run(folder: Path, **values: Any) -> Path:
    """Two ranks of which the second loads longer; 10 steps of 100 ms, and 4 samples each in a step."""
    write_run(folder, **values)
    for place, (compute, waiting, data) in enumerate([(0.040, 0.040, 0.010), (0.040, 0.0, 0.050)]):
        lines: list[Any] = [row(s, compute, 0.010, waiting, data) for s in range(10)]
        lines += [["metrics", s + 1, 10 + s * 0.1, {"loss": 2.0 - place - 0.1 * s}, "mean"] for s in range(10)]
        lines.append(["event", "straggler", 5, 10.5, {"rank": 1, "factor": 1.8, "cause": "input", "since": 1}])
        lines.append(["tags", {"gradients/0": 500, "gradients/1": 200, "used": 100}])
        lines.append(
            [
                "data",
                {"samples": 40, "steps": 10, "seconds": 0.1, "classes": {"0": 30 - 20 * place, "1": 10 + 20 * place}},
            ]
        )
        write_rank(folder, place, *lines)
    return folder


def read(folder: Path) -> Summary:
    reader = RunReader(folder)
    reader.poll()
    return summarise(reader)


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where runs lie."""
    monkeypatch.setenv("UNISONO_RUNS", str(tmp_path / "runs"))
    return tmp_path / "runs"


# Numbers -------------------------------------------------------------------------------------------------------------


def test_the_cost_of_a_step_bytes_and_balance_are_what_they_are_by_hand(tmp_path: Path) -> None:
    found = read(make_run(tmp_path / "a"))
    assert {
        name: found.cost[name] for name in ("wall", "compute", "communication", "waiting", "data")
    } == pytest.approx({"wall": 0.1, "compute": 0.040, "communication": 0.010, "waiting": 0.020, "data": 0.030})
    assert found.steps == 10
    assert found.seconds == 10.0
    assert found.bytes_by_kind == {"gradients": 1400, "used": 200}
    assert found.cost["bytes_sent"] == 80
    assert found.samples_a_step == 8
    assert found.samples_a_second == pytest.approx(80.0)
    # One worker would need 50 ms and 90 ms for what the two do in 100 ms.
    assert found.speed_up.times == pytest.approx(1.4)
    assert found.speed_up.efficiency == pytest.approx(0.7)
    assert found.speed_up.how.startswith("estimated from the ledger")
    assert found.slowest is not None
    assert (found.slowest.rank, found.slowest.cause) == (1, "input")
    assert found.slowest.factor == pytest.approx(0.09 / 0.05)
    (loss,) = found.metrics
    assert loss.values == pytest.approx([1.5 - 0.1 * s for s in range(10)])
    assert loss.times == pytest.approx([0.1 * s for s in range(10)])  # since the first step, not since the start
    assert found.loss == pytest.approx(0.6)
    assert len(found.verdicts) == 1  # both ranks wrote the same
    assert found.verdicts[0]["text"] == "rank 1 is 1.8x slower than the others since step 1: input"
    assert found.missing == []


def test_a_straggler_that_has_a_verdict_is_told_once_with_its_place(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "a")
    slow = ["event", "straggler", 5, 10.5, {"rank": 1, "factor": 1.8, "cause": "input", "since": 1}]
    verdict = ["event", "verdict", 5, 10.6, {"rank": 1, "cause": "slow input", "text": "slow, at data.py:31"}]
    other = ["event", "straggler", 9, 11.0, {"rank": 0, "factor": 2.0, "cause": "host", "since": 6}]
    for place in (0, 1):
        write_rank(folder, place, row(0, 0.1, 0, 0, 0), slow, verdict, other)
    texts = [event["text"] for event in read(folder).verdicts]
    assert texts == ["slow, at data.py:31", "rank 0 is 2.0x slower than the others since step 6: host"]


def test_the_first_steps_of_a_longer_run_do_not_count(tmp_path: Path) -> None:
    write_run(tmp_path, workers=1)
    write_rank(tmp_path, 0, *(row(s, 5.0 if s < 3 else 0.1, 0, 0, 0) for s in range(23)), size=1)
    assert read(tmp_path).cost["wall"] == pytest.approx(0.1)


def test_a_baseline_measures_the_speed_up(tmp_path: Path) -> None:
    found = read(make_run(tmp_path / "two"))
    write_run(tmp_path / "one", workers=1)
    data = ["data", {"samples": 80, "steps": 10}]
    write_rank(tmp_path / "one", 0, *(row(s, 0.16, 0, 0, 0, 0) for s in range(10)), data, size=1)
    gained = compare_with(found, read(tmp_path / "one"))
    assert gained.times == pytest.approx(1.6)  # 80 samples per second, and 50
    assert gained.efficiency == pytest.approx(0.8)
    assert gained.how == "measured: samples per second, against one with 1 worker"


@pytest.mark.parametrize(
    ("costs", "samples", "cause"),
    [
        ([(0.1, 0.0), (0.1, 0.0), (0.105, 0.0)], [8, 8, 8], ""),
        ([(0.1, 0.0), (0.1, 0.0), (0.3, 0.0)], [8, 8, 8], "compute"),
        ([(0.1, 0.0), (0.1, 0.0), (0.1, 0.2)], [8, 8, 8], "input"),
        ([(0.1, 0.0), (0.1, 0.0), (0.3, 0.0)], [8, 8, 24], "samples"),
    ],
)
def test_the_slowest_rank_is_named_with_its_cause(
    tmp_path: Path, costs: list[tuple[float, float]], samples: list[int], cause: str
) -> None:
    write_run(tmp_path, workers=3)
    for place, (compute, data) in enumerate(costs):
        lines = [row(s, compute, 0.0, 0.3 - compute, data) for s in range(5)]
        write_rank(tmp_path, place, *lines, ["data", {"samples": 5 * samples[place], "steps": 5}], size=3)
    slowest = read(tmp_path).slowest
    assert slowest is not None
    assert (slowest.rank, slowest.cause) == (2, cause)


def test_what_a_method_cannot_tell_apart_is_not_guessed(tmp_path: Path) -> None:
    write_run(tmp_path)
    for place in (0, 1):
        write_rank(tmp_path, place, row(0, 0.1, 0, 0, 0), not_measured=["communication"], hosts=2)
    found = read(tmp_path)
    assert found.speed_up.times is None
    assert "cannot tell communication" in found.speed_up.how
    assert found.not_measured == ["communication", "waiting"]


def test_a_change_of_the_world_is_told_once_and_ranks_keep_their_places(tmp_path: Path) -> None:
    write_run(tmp_path, workers=3)
    lines = ['{"time": 1001.0, "kind": "worker lost", "rank": 1, "text": "killed by SIGKILL"}']
    lines.append('{"time": 1002.0, "kind": "world", "generation": 1, "size": 2}')
    (tmp_path / "events.jsonl").write_text("\n".join(lines) + "\n")
    formed = ["event", "world", 4, 12.1, {"generation": 1, "ranks": 2, "what": "model from rank 0"}]
    write_rank(tmp_path, 0, row(0, 0.1, 0, 0, 0), formed)
    write_rank(tmp_path, 2, row(0, 0.1, 0, 0, 0), ["header", {"rank": 1, "size": 2, "generation": 1}], formed)
    found = read(tmp_path)
    texts = [event["text"] for event in found.changes]
    assert texts == ["worker 1 was lost: killed by SIGKILL", "2 workers continue (generation 1): model from rank 0"]
    assert [rank.label for rank in found.ranks] == ["0", "worker 2"]


def test_a_worker_whose_place_is_not_its_rank_has_one_name(tmp_path: Path) -> None:
    """Worker 2 has the rank of worker 1, which was lost: nobody is called "rank worker 2", nor "rank 1" for both."""
    write_run(tmp_path, workers=3)
    samples = ["data", {"samples": 40, "steps": 10, "classes": {"0": 10, "1": 30}}]
    for place, compute in enumerate((0.04, 0.04, 0.09)):
        rank = min(place, 1)
        write_rank(tmp_path, place, *(row(s, compute, 0, 0, 0) for s in range(10)), samples, rank=rank)
    found = read(tmp_path)
    assert found.slowest is not None
    assert found.slowest.text.startswith("worker 2 takes")
    page = make_page([found])
    assert "rank worker" not in page
    assert page.count(">worker 2<") >= 2
    assert page.count(">rank 1<") >= 2


def test_runs_are_compared_on_a_page_also_if_a_worker_lost_its_first_line(tmp_path: Path) -> None:
    whole, cut = make_run(tmp_path / "a"), make_run(tmp_path / "b")
    for place in (0, 1):
        path = cut / "ranks" / f"{place:05}.jsonl"
        path.write_text("".join(path.read_text().splitlines(keepends=True)[1:]))
    page = make_page([read(whole), read(cut)])
    assert "loss against time" in page
    assert "nan s" not in make_page([read(cut)])


def test_between_hosts_waiting_is_found_from_all_ranks_arrivals(tmp_path: Path) -> None:
    """Steps of 100 ms; the first rank stands still from 40 ms on, the other comes at 70 ms, and all is over at 90."""
    write_run(tmp_path)
    for place, (compute, arrived) in enumerate([(0.05, 0.040), (0.08, 0.070)]):
        lines: list[Any] = []
        for s in range(10):
            start, begun = 10 + 0.1 * s, 10 + 0.1 * s + arrived
            lines.append(["step", s, start, 0.1, compute, 0.1 - compute, 0.0, 0.0, 0.0, 80, 1, 0.0])
            lines.append(["span", "blocked", s, begun, start + 0.09])
            lines.append(["record", "all_reduce", "gradients/0", 80, "world", s, s, begun, None, start + 0.09])
        write_rank(tmp_path, place, *lines, hosts=2, host=f"h{place}")
    first, second = read(tmp_path).ranks
    assert first.cost["waiting"] == pytest.approx(0.030)
    assert first.cost["communication"] == pytest.approx(0.020)
    assert second.cost["waiting"] == pytest.approx(0.0, abs=1e-9)
    assert second.cost["communication"] == pytest.approx(0.020)
    assert read(tmp_path).not_measured == []


# Runs that are not whole ---------------------------------------------------------------------------------------------


def test_a_killed_run_gives_a_report_that_says_what_is_missing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make_run(tmp_path / "a", ended=None, outcome=None, launcher_pid=2**22 + 1, workers=3)
    write_rank(folder, 1, row(0, 0.1, 0, 0, 0), end=False)
    files = ["--html", str(tmp_path / "a.html"), "--png", str(tmp_path / "a.png"), "--trace", str(tmp_path / "a.json")]
    assert main(["report", str(folder), *files]) == 0
    out = capsys.readouterr().out
    assert "killed: its launcher wrote no end" in out or "not known" in out
    assert "worker 2: nothing was written there" in out
    assert "the end of worker 1: killed" in out
    assert "worker 2: nothing was written there" in (tmp_path / "a.html").read_text()
    assert (tmp_path / "a.png").stat().st_size > 10_000


@pytest.mark.parametrize("left", ["nothing", "run.json", "a header", "garbage"])
def test_a_folder_with_almost_nothing_in_it_gives_a_report(
    tmp_path: Path, left: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "ranks").mkdir()
    if left == "run.json":
        write_run(tmp_path)
    elif left == "a header":
        write_rank(tmp_path, 0, end=False)
    elif left == "garbage":
        (tmp_path / "ranks" / "00000.jsonl").write_bytes(os.urandom(5000))
        (tmp_path / "run.json").write_text('{"workers": "many", "hosts": 3, "command": 7, "started": "then"}')
    files = ["--html", str(tmp_path / "a.html"), "--png", str(tmp_path / "a.png")]
    assert main(["report", str(tmp_path), *files]) == 0
    assert "what is missing" in capsys.readouterr().out
    assert main(["report", str(tmp_path), "--json"]) == 0
    json.loads(capsys.readouterr().out)


# Forms ---------------------------------------------------------------------------------------------------------------


def test_the_page_needs_no_network_and_runs_nothing_that_a_run_was_called(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "a", command=["<script>alert(1)</script>"], report="<img src=x onerror=alert(1)>")
    write_rank(folder, 0, row(0, 0.1, 0, 0, 0), ["metrics", 1, 1.0, {"</script><b>": 1.0}, "mean"], host="<i>")
    page = make_page([read(folder)])
    assert "<script>alert" not in page
    assert "<img" not in page
    assert "</script><b>" not in page
    assert not re.findall(r"""(?:src|href)\s*=\s*["']?(?:https?:)?//""", page)
    assert "Content-Security-Policy" in page


@pytest.mark.parametrize(
    ("times", "words"),
    [
        ((0.02, 0.07, 0.01, 0.0), "One worker is faster for this model: 2 workers do at most 0.40 times the work "
            "of one, as communication takes 70 % of a step. Use -n 1"),
        ((0.06, 0.03, 0.01, 0.0), "at most 1.20 times the work of one, as communication takes 30 % .*unisono plan"),
        ((0.03, 0.0, 0.01, 0.06), "1.80 times the work of one: little is left to gain"),
        ((0.05, 0.01, 0.04, 0.0), "as waiting takes 40 % of a step: more samples per step help"),
    ],
)  # fmt: skip
def test_a_report_ends_with_a_verdict(
    tmp_path: Path, times: tuple[float, ...], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(tmp_path)
    for place in (0, 1):
        write_rank(tmp_path, place, *(row(s, *times) for s in range(10)), ["data", {"samples": 40, "steps": 10}])
    assert main(["report", str(tmp_path), "--html", str(tmp_path / "a.html")]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "steps 10, 8 samples each" in out
    assert re.search(words, out.rpartition("in short")[2])
    assert re.search(words, " ".join(html.unescape((tmp_path / "a.html").read_text()).split()))


def test_a_slow_rank_is_named_before_the_model_is_called_too_small(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(tmp_path)
    write_rank(tmp_path, 0, *(row(s, 0.004, 0.006, 0.03, 0.0) for s in range(10)))
    write_rank(tmp_path, 1, *(row(s, 0.034, 0.006, 0.0, 0.0) for s in range(10)))
    assert main(["report", str(tmp_path)]) == 0
    verdict = " ".join(capsys.readouterr().out.split()).rpartition("in short")[2]
    assert "at most 0.95 times the work of one, as waiting takes 38 % of a step: rank 1 takes 8.50 times" in verdict
    assert "Use -n 1" not in verdict


def test_all_numbers_are_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = make_run(tmp_path / "a")
    assert main(["report", str(folder), "--json"]) == 0
    numbers = json.loads(capsys.readouterr().out, parse_constant=lambda text: pytest.fail(text))
    assert numbers["cost"]["wall"] == pytest.approx(0.1)
    assert numbers["loss"] == pytest.approx(0.6)
    assert [rank["samples"] for rank in numbers["ranks"]] == [40, 40]


def test_two_runs_side_by_side(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = make_run(tmp_path / "first"), make_run(tmp_path / "second")
    for place in (0, 1):
        write_rank(second, place, *(row(s, 0.05, 0, 0, 0) for s in range(10)), strategy="powersgd(rank=2)")
    assert main(["report", str(first), str(second), "--html", str(tmp_path / "ab.html")]) == 0
    out = capsys.readouterr().out
    assert re.search(r"step, ms +100 +50 +\(0\.50x\)", out)
    assert re.search(r"method +allreduce +powersgd\(rank=2\)", out)
    assert "powersgd(rank=2)" in (tmp_path / "ab.html").read_text()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--html", "{tmp}/no/such/folder/a.html"], "No such file or directory"),
        (["--png", "{tmp}/a.txt"], "a picture file ends in .png, .svg, .pdf"),
        (["--trace", "{tmp}"], "Is a directory"),
    ],
)
def test_a_file_that_cannot_be_written_is_said(
    tmp_path: Path, arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make_run(tmp_path / "a")
    assert main(["report", str(folder), *(text.format(tmp=tmp_path) for text in arguments)]) == 1
    assert words in capsys.readouterr().err


def test_a_trace_has_all_ranks_on_one_clock(tmp_path: Path) -> None:
    write_run(tmp_path)
    clocks = [0.0, 4321.0]  # the second machine's clock, and its idea of unix time, are off
    for place, ahead in enumerate(clocks):
        records = []
        for i in range(20):
            begun = 10.0 + i + 0.002 * ((i + place) % 3)
            times = [begun + ahead, None, 10.01 + i + ahead]
            records.append(["record", "all_reduce", "gradients/0", 8, "world", i, i, *times])
        lines = [
            ["step", 0, 10.0 + ahead, 1.0, 0.5, 0.2, 0.2, 0.1, 0.0, 8, 1, 0.0],
            ["span", "data", 0, 10.0 + ahead, 10.1 + ahead],
        ]
        write_rank(tmp_path, place, *lines, *records, boot=f"boot {place}", unix=990.0 - ahead + 0.5 * place)
    reader = RunReader(tmp_path)
    reader.poll()
    offsets = find_offsets(list(reader.ranks.values()))
    assert offsets[0] + clocks[0] == pytest.approx(offsets[1] + clocks[1], abs=0.005)  # half a second by unix time
    write_trace(reader, tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    steps = {e["pid"]: e["ts"] for e in events if e["ph"] == "X" and e["name"] == "step 0"}
    assert abs(steps[0] - steps[1]) < 5000
    assert min(e["ts"] for e in events if "ts" in e) >= -5000
    assert {e["args"]["name"] for e in events if e["name"] == "process_name"} == {"rank 0 (h)", "rank 1 (h)"}
    assert math.isfinite(sum(e.get("dur", 0.0) for e in events))


def test_last_is_the_newest_run_of_this_folder(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    mine, other = tmp_path / "mine", tmp_path / "other"
    mine.mkdir()
    monkeypatch.chdir(mine)
    make_run(runs / "a", started=1000.0, cwd=str(other))
    assert find_run("last").name == "a", "the only one"
    make_run(runs / "b", started=1500.0, cwd=str(other))
    assert main(["report", "last"]) == 1
    assert f"no run was started in {mine}" in (told := capsys.readouterr().err)
    assert f"b, started in {other}\n  a, started in {other}" in told
    make_run(runs / "c", started=500.0, cwd=str(mine))
    assert find_run("last").name == "c"


# Runs by name --------------------------------------------------------------------------------------------------------


def test_runs_are_listed_and_found_by_name_and_last(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_run(runs / "2026-01-01_train", started=1000.0, cwd=os.getcwd())
    make_run(runs / "2026-01-02_train", started=2000.0, cwd=os.getcwd(), outcome="failed", exit_status=1)
    (runs / "something else").mkdir()
    assert [path.name for path in list_runs()] == ["2026-01-02_train", "2026-01-01_train"]
    assert find_run("last").name == "2026-01-02_train"
    assert find_run("2026-01-01").name == "2026-01-01_train"
    assert find_run(str(runs / "2026-01-01_train")).name == "2026-01-01_train"
    for name, words in (
        ("2026", "may be any of"),
        ("train", "no run 'train'"),
        (str(runs), "no run is recorded in it"),
    ):
        with pytest.raises(NoSuchRun, match=words):
            find_run(name)
    assert main(["report", "nothing"]) == 1
    assert "no run 'nothing': there are 2026-01-02_train" in capsys.readouterr().err
    assert main(["runs"]) == 0
    out = capsys.readouterr().out
    assert re.search(r"2026-01-02_train .* 2 +allreduce +10 +0\.6 +failed", out)
    assert main(["runs", "--json", "--last", "1"]) == 0
    (listed,) = json.loads(capsys.readouterr().out)
    assert (listed["name"], listed["steps"], listed["outcome"]) == ("2026-01-02_train", 10, "failed")
    assert listed["loss"] == pytest.approx(0.6)


def test_without_runs_that_is_said(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["runs"]) == 0
    assert "no run is recorded in" in capsys.readouterr().err
    assert main(["report", "last"]) == 1
    assert "no run 'last': no run is recorded in" in capsys.readouterr().err


def test_a_list_reads_the_ends_of_long_files_only(runs: Path) -> None:
    folder = make_run(runs / "long")
    lines = [["metrics", s, 10.0, {"loss": float(s)}, "mean"] for s in range(20_000)]
    write_rank(folder, 0, *(row(s, 0.1, 0, 0, 0) for s in range(2000)), *lines, row(2000, 0.1, 0, 0, 0))
    reader = RunReader(folder, ends=True)
    reader.poll()
    rank = reader.ranks[0]
    assert (rank.last_step, rank.metrics["loss"].last, rank.header["strategy"]) == (2000, 19999.0, "allreduce")
    assert rank.end is not None
    assert rank.rows.steps < 100
    assert reader.unreadable == 0


# The folder ----------------------------------------------------------------------------------------------------------


def test_folders_of_the_same_second_have_names_of_their_own(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_folder.time, "strftime", lambda *_: "2026-11-16_15-40-12")
    names = [make_folder(["dir/train it.py", "-x"]).name for _ in range(3)]
    assert names == [f"2026-11-16_15-40-12_train-it{tail}" for tail in ("", "-2", "-3")]
    assert (runs / names[0]).stat().st_mode & 0o777 == 0o700


def test_the_oldest_runs_are_removed_but_none_that_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("UNISONO_RUNS")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setattr(run_folder, "MOST_RUNS", 3)
    place = tmp_path / "unisono" / "runs"
    mine = {"launcher_pid": os.getpid(), "launcher_start": run_folder.read_start(os.getpid())}
    mine["boot"] = run_folder.find_boot()
    make_run(place / "running", started=1.0, ended=None, outcome=None, **mine)
    for i in range(4):
        make_run(place / f"old-{i}", started=10.0 + i)
    fresh = make_folder(["train.py"])
    assert sorted(path.name for path in place.iterdir()) == sorted(["running", "old-2", "old-3", fresh.name])


def test_runs_beyond_the_bytes_are_removed_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("UNISONO_RUNS")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setattr(run_folder, "MOST_BYTES", 60_000)
    place = tmp_path / "unisono" / "runs"
    for i in range(4):
        make_run(place / f"old-{i}", started=10.0 + i)
        (place / f"old-{i}" / "large").write_bytes(bytes(25_000))
    make_folder(["train.py"])
    assert {path.name for path in place.glob("old-*")} == {"old-3", "old-2"}


def test_one_large_run_is_removed_without_the_older_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("UNISONO_RUNS")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setattr(run_folder, "MOST_BYTES", 60_000)
    place = tmp_path / "unisono" / "runs"
    mine = {"launcher_pid": os.getpid(), "launcher_start": run_folder.read_start(os.getpid())}
    mine["boot"] = run_folder.find_boot()
    make_run(place / "running", started=30.0, ended=None, outcome=None, **mine)
    for i in range(4):
        make_run(place / f"old-{i}", started=10.0 + i)
    for name in ("running", "old-3"):
        (place / name / "large").write_bytes(bytes(100_000))
    make_folder(["train.py"])
    assert {path.name for path in place.glob("[or]*")} == {"running", "old-0", "old-1", "old-2"}


def test_a_place_that_cannot_be_written_is_said_and_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("UNISONO_RUNS", str(tmp_path / "file" / "runs"))
    assert RunFolder.create(["train.py"], workers=2, command=[]) is None
    assert "this run is not recorded" in capsys.readouterr().err
    monkeypatch.setenv("UNISONO_RUNS", str(tmp_path / "runs"))
    named = tmp_path / "named"
    make_run(named)
    assert RunFolder.create(["train.py"], folder=named, workers=2, command=[]) is None
    assert "a run is recorded in" in capsys.readouterr().err


def test_nobody_else_reads_the_address_of_the_page(tmp_path: Path) -> None:
    """The page's token is in run.json."""
    before = os.umask(0o022)
    try:
        record = RunFolder.create(["train.py"], folder=tmp_path / "record", workers=2, command=[])
        assert record is not None
        record.update(page="http://127.0.0.1:1/token/")
    finally:
        os.umask(before)
    assert (tmp_path / "record").stat().st_mode & 0o777 == 0o700
    assert (tmp_path / "record/run.json").stat().st_mode & 0o777 == 0o600
    assert [path.name for path in (tmp_path / "record").iterdir() if path.name.startswith(".")] == []


def test_a_folder_that_vanishes_is_said_once(runs: Path) -> None:
    import shutil

    said: list[str] = []
    record = RunFolder.create(["train.py"], workers=2, command=[])
    assert record is not None
    record._say = said.append
    shutil.rmtree(runs)
    for _ in range(3):
        record.event("worker started", rank=0)
    record.finish("ok", exit_status=0)
    assert len(said) == 1
    assert "no longer recorded" in said[0]


def test_a_run_whose_launcher_is_gone_does_not_run_any_more(tmp_path: Path) -> None:
    mine = {"launcher_pid": os.getpid(), "launcher_start": run_folder.read_start(os.getpid())}
    mine |= {"boot": run_folder.find_boot(), "started": time.time(), "ended": None}
    assert run_folder.is_running(mine) is True
    assert run_folder.is_running({**mine, "launcher_start": 1}) is False  # another process has its number
    assert run_folder.is_running({**mine, "ended": 1.0}) is False
    assert run_folder.is_running({**mine, "boot": "another", "machine": {"host": "elsewhere"}}) is None


@pytest.mark.parametrize(
    ("hosts", "encrypted", "expected"),
    [
        (1, False, ""),
        (2, False, "tensors between hosts are not encrypted"),
        (2, True, "3 MB, about 2 s of a core's time per worker"),
    ],
)
def test_whether_a_run_was_encrypted_is_told_with_what_it_cost(
    tmp_path: Path, hosts: int, encrypted: bool, expected: str
) -> None:
    write_run(tmp_path)
    for place in range(2):
        counted = [["encryption", {"bytes": 1.5e6, "seconds": 1.0 + place}]] if encrypted else []
        lines = [row(0, 0.1, 0.1, 0.0, 0.0), *counted]
        write_rank(tmp_path, place, *lines, hosts=hosts, encrypted=encrypted, not_measured=["waiting"])
    found = read(tmp_path)
    assert expected in found.encryption
    assert bool(found.encryption) == bool(expected)
    assert ("encryption" in dict(list_facts(found))) == bool(expected)
