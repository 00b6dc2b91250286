"""`unisono top`: in 80 columns, with one rank and with a thousand."""

from __future__ import annotations

import io
import time
from pathlib import Path

import pytest
from rich.console import Console

from simulated_run import SimulatedRun
from unisono.cli import main
from unisono.observe.live.terminal import draw_sparkline, show_top


def draw(folder: Path, width: int = 80) -> list[str]:
    out = io.StringIO()
    show_top(folder, once=True, console=Console(file=out, width=width))
    return out.getvalue().splitlines()


def test_a_frame_has_ranks_metrics_and_verdicts_in_80_columns(tmp_path: Path) -> None:
    run = SimulatedRun(tmp_path, ranks=4, steps_s=20.0, slow={2: 3.0}, began=time.time() - 30.0)
    run.write(time.time() - 1.0)
    text = "rank 2 is 3.0 times as slow as the others, in its input pipeline (data.py:31), and this is a long text"
    run.say(0, "verdict", rank=2, cause="slow input", place="data.py:31", text=text)
    run.lose(3)
    run.write()
    lines = draw(run.folder)
    assert max(map(len, lines)) <= 80
    assert lines[0].startswith("run  running  0:3")
    assert any(line.startswith("loss") and "█" in line for line in lines)
    rows = [line.split() for line in lines if line.split()[:1] in (["0"], ["1"], ["2"], ["3"])]
    assert [row[0] for row in rows] == ["0", "1", "2", "3"]
    assert [row[-1] for row in rows] == ["training", "training", "slow", "lost"]
    assert float(rows[2][-2][1:]) > 2.0
    assert text in " ".join(" ".join(lines).split())


def test_with_many_ranks_the_worst_come_first_and_the_rest_is_summed_up(tmp_path: Path) -> None:
    run = SimulatedRun(tmp_path, ranks=300, steps_s=4.0, slow={200: 3.0}, began=time.time() - 4.0)
    run.write(time.time() - 1.0)
    run.lose(123)
    run.write()
    lines = draw(run.folder)
    assert len(lines) < 35
    assert max(map(len, lines)) <= 80
    first = next(i for i, line in enumerate(lines) if line.lstrip().startswith("rank"))
    assert [lines[first + i].split()[0] for i in (1, 2)] == ["123", "200"]
    assert any("300 ranks: 299 training, 1 lost" in line for line in lines)
    assert any("and 280 more" in line for line in lines)


def test_an_ended_run_and_one_without_steps(tmp_path: Path) -> None:
    run = SimulatedRun(tmp_path / "a", ranks=2, steps_s=10.0, began=time.time() - 5.0)
    run.write()
    run.finish("failed")
    assert "failed" in draw(run.folder)[0]
    (tmp_path / "b").mkdir()
    assert any("run.json is missing" in line for line in draw(tmp_path / "b"))


def test_in_a_terminal_it_follows_the_run_to_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = SimulatedRun(tmp_path, ranks=2, steps_s=10.0, began=time.time() - 5.0)
    run.write()
    shown: list[str] = []

    def wait(_: float) -> None:
        shown.append(out.getvalue())
        run.write(time.time() + 5.0)
        run.finish()

    monkeypatch.setattr("unisono.observe.live.terminal.time.sleep", wait)
    out = io.StringIO()
    show_top(run.folder, once=False, console=Console(file=out, width=80, height=30, force_terminal=True))
    assert len(shown) == 1
    assert "running" in shown[0]
    assert "2 ended" in out.getvalue()[len(shown[0]) :]


def test_the_command_finds_a_run_and_says_what_there_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = SimulatedRun(tmp_path / "runs", ranks=2, steps_s=10.0, began=time.time() - 5.0)
    run.write()
    monkeypatch.setenv("UNISONO_RUNS", str(run.folder.parent))
    assert main(["top"]) == 0  # not a terminal: one frame
    assert "2 training" in capsys.readouterr().out
    for command in ("top", "watch"):
        with pytest.raises(SystemExit):
            main([command, "nosuch"])
        assert "no run 'nosuch'" in capsys.readouterr().err


def test_a_sparkline_is_as_long_as_asked_for() -> None:
    assert draw_sparkline([1.0] * 5, 40) == "▁" * 5
    assert draw_sparkline(list(range(100)), 10)[0] + draw_sparkline(list(range(100)), 10)[-1] == "▁█"
    assert len(draw_sparkline(list(range(1000)), 40)) == 40
    assert draw_sparkline([], 40) == ""
