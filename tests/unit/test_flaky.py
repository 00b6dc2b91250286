"""tests/flaky.py: reports of runs read, a log that is added to and gone on with, and the table over all of it."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

import flaky

REPORT = """<testsuites><testsuite name="pytest" tests="5">
<testcase classname="tests.unit.test_a" name="test_good"/>
<testcase classname="tests.unit.test_a" name="test_bad"><failure message="assert 1 == 2">...</failure></testcase>
<testcase classname="tests.unit.test_a" name="test_broken[1]"><error message="failed on setup"/></testcase>
<testcase classname="tests.unit.test_a" name="test_left"><skipped message="needs CUDA"/></testcase>
<testcase classname="tests.unit.test_a" name="test_torn"/>
<testcase classname="tests.unit.test_a" name="test_torn"><error message="failed on teardown"/></testcase>
</testsuite></testsuites>"""


def make_run(commit: str = "abc", busy: int = 0, *failed: str, seconds: float = 600.0, day: int = 1) -> dict[str, Any]:
    date = f"2026-01-{day:02}T10:00:00"
    return {"date": date, "commit": commit, "busy": busy, "seconds": seconds, "passed": 9, "failed": list(failed)}


def test_what_broke_in_its_set_up_or_end_has_failed_and_what_was_skipped_has_not_passed(tmp_path: Path) -> None:
    (tmp_path / "report.xml").write_text(REPORT)
    passed, failed = flaky.read_report(tmp_path / "report.xml")
    names = ("test_bad", "test_broken[1]", "test_torn")
    assert (passed, failed) == (1, [f"tests.unit.test_a::{name}" for name in names])


def test_the_table_counts_runs_by_commit_and_failures_by_test() -> None:
    runs = [
        make_run("abc", 0, seconds=640.0),
        make_run("abc", 0, "t::one", seconds=600.0, day=2),
        make_run("abc", 2, "t::one", "t::two", seconds=900.0, day=3),
        make_run("def", 0, "t::one", seconds=610.0, day=4),
    ]
    assert flaky.write_table(runs).splitlines() == [
        "| commit | busy | runs | failed | passed tests | seconds |",
        "|---|---|---|---|---|---|",
        "| abc | 0 | 2 | 1 | 9-9 | 600-640 |",
        "| abc | 2 | 1 | 1 | 9-9 | 900-900 |",
        "| def | 0 | 1 | 1 | 9-9 | 610-610 |",
        "",
        "| test | failed, of 4 runs | of them busy | last |",
        "|---|---|---|---|",
        "| t::one | 3 | 1 | 2026-01-04T10:00:00, def |",
        "| t::two | 1 | 1 | 2026-01-03T10:00:00, abc |",
    ]
    assert "| test |" not in flaky.write_table(runs[:1])


def test_a_log_is_gone_on_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    commit, made = "abc", list[int]()

    def run_once(commit: str, busy: int, folder: Path) -> dict[str, Any]:
        made.append(busy)
        return make_run(commit, busy, *(["t::one"] if busy else []))

    def describe(*_: Any, **__: Any) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess([], 0, f"{commit}\n")

    monkeypatch.setattr(flaky, "run_once", run_once)
    monkeypatch.setattr(flaky.subprocess, "run", describe)
    log = tmp_path / "log.jsonl"
    log.write_text(json.dumps(make_run("abc", 0)) + "\n" + json.dumps(make_run("old", 0, "t::old")) + "\n")
    asked = ["--log", str(log), "--runs"]
    assert flaky.main([*asked, "3"]) == 0
    assert made == [0, 0], "the log has one of three already, and that of another commit does not count"
    assert len(log.read_text().splitlines()) == 4
    assert flaky.main([*asked, "3"]) == 0
    assert made == [0, 0], "all three are there"
    assert flaky.main([*asked, "1", "--busy", "2"]) == 1
    assert made == [0, 0, 2]
    assert flaky.main([*asked, "0"]) == 0
    assert "| t::one | 1 | 1 |" in capsys.readouterr().out
    commit = "abc-dirty"
    for _ in range(2):
        assert flaky.main([*asked, "1"]) == 0
    assert made == [0, 0, 2, 0, 0], "changes that are not committed may be others each time"
