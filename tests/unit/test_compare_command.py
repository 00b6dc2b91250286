"""`unisono compare`: its arguments, the order of its runs, and what it says of one that failed."""

from __future__ import annotations

from pathlib import Path

import pytest

from unisono.cli import main
from unisono.cli.compare import split_specs
from unisono.compare.results import ONE_WORKER
from unisono.compare.runs import Request, Runs, _find_reason, list_runs


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "train.py"
    path.write_text("raise AssertionError('it was started')\n")
    return path


def test_commas_inside_parentheses_do_not_separate_methods() -> None:
    text = "allreduce,local_sgd(every=8, reducer=topk(k=0.1)), torch:ddp,allreduce"
    assert split_specs(text) == ["allreduce", "local_sgd(every=8, reducer=topk(k=0.1))", "torch:ddp"]


def test_runs_go_round_by_round_with_one_worker_once_in_each() -> None:
    runs = list_runs(Request(["train.py"], ["a", "b"], workers=[1, 2, 4], rounds=2))
    one = [(ONE_WORKER, 1), ("a", 2), ("b", 2), ("a", 4), ("b", 4)]
    assert [(run.method, run.workers) for run in runs] == one + one
    assert [run.round for run in runs] == [0] * 5 + [1] * 5
    alone = list_runs(Request(["train.py"], ["a"], workers=[2], base=False))
    assert [(run.method, run.workers) for run in alone] == [("a", 2)]


def test_workers_have_as_many_threads_in_all_runs() -> None:
    """With all cores for one worker and half of them for two, a speed-up would compare different things."""
    runs = Runs(Request(["train.py"], ["a"], workers=[2, 10_000], base=True))
    assert runs.threads == 1
    commands = [runs._write_command(run, Path("x")) for run in runs.planned]
    assert [command[command.index("--threads") + 1] for command in commands] == ["1", "1", "1"]


def test_emulated_hosts_are_passed_on_but_not_to_one_worker() -> None:
    runs = Runs(Request(["train.py"], ["a"], workers=[2, 8], hosts=4, net="100mbit"))
    alone, two, eight = (" ".join(runs._write_command(run, Path("x"))) for run in runs.planned)
    assert "--hosts" not in alone
    assert "--hosts 2 --net 100mbit" in two
    assert "--hosts 4 --net 100mbit" in eight


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--strategies", "allreduce,powersdg"], "did you mean 'powersgd'?"),
        (["--strategies", "torch:dpp"], "did you mean 'ddp'?"),
        (["--strategies", "topk(ratio=1)"], "topk has no argument 'ratio'"),
        ([], "no methods given"),
        (["--strategies", "allreduce", "--until", "1.8"], "--until loss=1.8"),
        (["--strategies", "allreduce", "--net", "100parsec"], "100parsec"),
        (["--strategies", "allreduce", "--workers", "0"], "whole number from 1 up"),
        (["--strategies", "allreduce", "--time", "soon"], "a time such as 90s"),
    ],
)
def test_bad_input_is_refused_before_anything_is_started(
    script: Path, arguments: list[str], message: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        main(["compare", str(script), *arguments])
    assert end.value.code == 2
    assert message in capfd.readouterr().err
    assert not Path("unisono-compare").exists()


def test_the_reason_of_a_failure_is_the_line_of_its_error() -> None:
    log = """unisono: worker 1 of 2 failed: ValueError
  rank 1, host here, pid 3470, after 4.8 s

Traceback (most recent call last):
  File "train.py", line 3, in <module>
    raise project.errors.ValueError("x")
project.errors.ValueError: bad things
second line

Rank 0 was stopped.
"""
    assert _find_reason(log, 1) == "ValueError: bad things"
    assert _find_reason("unisono: worker 0 of 2 failed: exit status 3\n  rank 0", 3) == (
        "worker 0 of 2 failed: exit status 3"
    )
    assert _find_reason("", 9) == "ended with status 9"
