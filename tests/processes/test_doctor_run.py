"""`unisono doctor` for real: two workers try the transports, nothing is bad, and nothing is left behind."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from unisono.cli.command_line import main


def test_transports_are_tried_by_workers_and_nothing_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "temporary").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "temporary"))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("UNISONO_RUNS", str(tmp_path / "runs"))
    monkeypatch.chdir(tmp_path)
    status = main(["doctor", "--json"])
    told = json.loads(capsys.readouterr().out)
    found = {one["name"]: one for one in told["findings"]}
    bad = [one for one in told["findings"] if one["state"] == "bad"]
    assert (status, bad) == (0, [])
    for name in ("shared memory", "messages between hosts"):
        assert found[name]["state"] == "ok", found[name]
        assert found[name]["values"]["ranks"] == 2
    assert found["folder of runs"]["text"].startswith(str(tmp_path / "runs"))
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["temporary"]
