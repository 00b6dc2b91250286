"""`unisono compare`: its arguments, the order of its runs, and what it says of one that failed."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from unisono.cli import main
from unisono.methods.spec.grammar import split_specs
from unisono.predict.compare.results import ONE_WORKER, compare
from unisono.predict.compare.runs import NothingToCompare, Progress, Request, Runs, _find_reason, list_runs


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


# Runs that are made up -----------------------------------------------------------------------------------------------

WORKER = """
import json, os, sys, time
from pathlib import Path
losses, sleep_s, status = json.loads(sys.argv[1])
if losses is None:
    sys.exit("said")
folder = Path(json.loads(os.environ["UNISONO_OBSERVER"].partition(" ")[2])["folder"])
fields = ["step", "end", "wall", "compute", "communication", "waiting", "compression", "data", "hidden"]
fields += ["bytes_sent", "loss", "finite", "samples", "arrivals"]
about = {"start": 0.0, "not_measured": [], "bytes_by_formula": False, "fields": fields}
steps = [[i, 1.0 * i, 1.0, 1.0, 0, 0, 0, 0, 0, 8, x, x is not None, 4 * i, []] for i, x in enumerate(losses, 1)]
lines = [about, *steps]
(folder / "pid").write_text(str(os.getpid()))
(folder / "new").write_text("".join(json.dumps(line) + chr(10) for line in lines))
(folder / "new").rename(folder / "rank-0.jsonl")
print("said", flush=True)
time.sleep(sleep_s)
sys.exit(status)
"""


FOREVER = 600.0


class MadeUp(Runs):
    """Runs whose launcher is a short program: it writes these losses, sleeps, and ends with a status."""

    def __init__(
        self, request: Request, behaviours: list[tuple[list[float | None] | None, float, int]], **more: Any
    ) -> None:
        super().__init__(request, **more)
        self.behaviours = iter(behaviours)

    def _write_command(self, run: Any, folder: Path) -> list[str]:
        return [sys.executable, "-S", "-c", WORKER, json.dumps(next(self.behaviours))]


def request(folder: Path, count: int, **more: Any) -> Request:
    return Request(["train.py"], [f"m{i}" for i in range(count)], workers=[2], base=False, folder=folder, **more)


def test_a_run_is_ended_at_the_target_and_when_it_diverges(tmp_path: Path) -> None:
    behaviours = [([3.0] * 5 + [1.0] * 12, FOREVER, 0), ([3.0, None], FOREVER, 0)]
    runs = MadeUp(request(tmp_path, 2, target=1.0), behaviours)
    runs.make_all()
    assert [len(trial.curve) for trial in runs.trials] == [17, 2]
    assert [trial.failure for trial in runs.trials] == ["", ""]
    assert runs.trials[1].curve.broke_at == 2
    found = compare(runs.trials, target=1.0)
    assert [row.time_to_target_s for row in found.rows] == [15.0, None]


def test_a_run_that_fails_and_one_without_a_step_have_their_reasons(tmp_path: Path) -> None:
    failed = MadeUp(request(tmp_path, 1), [([3.0], 0.0, 7)])
    failed.make_all()
    assert [trial.failure for trial in failed.trials] == ["said"]
    late = MadeUp(request(tmp_path, 1, time_s=0.3), [([], FOREVER, 0)])
    late.make_all()
    assert [trial.failure for trial in late.trials] == ["made no step in 0.3 s"]
    with pytest.raises(NothingToCompare, match="without a training step"):
        MadeUp(request(tmp_path, 1), [([], 0.0, 0)]).make_all()


def test_an_interruption_ends_the_run_under_way_and_keeps_those_that_are_complete(tmp_path: Path) -> None:
    def interrupt(progress: Progress) -> None:
        if progress.number == 2 and progress.step:
            raise KeyboardInterrupt

    runs = MadeUp(request(tmp_path, 2), [([2.0], 0.0, 0), ([2.0], FOREVER, 0)], show=interrupt)
    with pytest.raises(KeyboardInterrupt):
        runs.make_all()
    assert [trial.method for trial in runs.trials] == ["m0"]
    (pid,) = tmp_path.glob("runs/02-*/pid")
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid.read_text()), 0)


def test_what_others_have_in_a_folder_of_that_name_stays(tmp_path: Path) -> None:
    theirs = tmp_path / "runs" / "10-mine"
    theirs.mkdir(parents=True)
    former = tmp_path / "runs" / "01-m0-2-workers-round-1"
    former.mkdir()
    (former / "run.log").write_text("")
    (former / "rank-1.jsonl").write_text("not of this run")
    MadeUp(request(tmp_path, 1), [([2.0], 0.0, 0)]).make_all()
    assert theirs.is_dir()
    assert not (former / "rank-1.jsonl").exists()


def test_a_script_that_fails_alone_before_any_method_ends_it_at_once(tmp_path: Path) -> None:
    asked = Request(["train.py"], ["a"], folder=tmp_path)
    runs = MadeUp(asked, [(None, 0.0, 3)])
    with pytest.raises(NothingToCompare, match=r"train\.py failed with one worker, before any method came in: said"):
        runs.make_all()
