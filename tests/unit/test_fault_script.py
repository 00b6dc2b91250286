"""Fault scripts: what is read, what is refused and where, and what the launcher makes of faults that fired or not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from unisono.cli import main
from unisono.launchers import processes
from unisono.launchers.failures import Failure, FaultReport, Outcome, read_faults
from unisono.launchers.runtime.faults import Fault, FaultError, check_script, parse_script


def test_every_kind_of_fault_is_read() -> None:
    text = " kill 2@40; stop 1@60 for 5s;slow 3 x4@80-120 ;; full-disk@200; full-disk 1 @ 7; kill 0@3 in exchange;"
    assert parse_script(text) == [
        Fault("kill", 2, 40),
        Fault("stop", 1, 60, seconds=5.0),
        Fault("slow", 3, 80, factor=4.0, last=120),
        Fault("full-disk", None, 200),
        Fault("full-disk", 1, 7),
        Fault("kill", 0, 3, "exchange"),
    ]
    assert parse_script("stop 0@1 in save\n for 0.25 s") == [Fault("stop", 0, 1, "save", seconds=0.25)]
    assert parse_script("slow 0 x1.5@9") == [Fault("slow", 0, 9, factor=1.5, last=9)]
    assert parse_script("") == parse_script(" ; ") == []


@pytest.mark.parametrize(
    "text",
    [
        "kill 2@40",
        "kill 0@1 in backward",
        "stop 1@60 in forward for 0.000125s",
        "slow 3 x1.0000005@8-9",
        "full-disk 1@2",
    ],
)
def test_a_fault_as_text_is_read_back_as_the_same(text: str) -> None:
    (fault,) = parse_script(text)
    assert str(fault) == text
    assert parse_script(str(fault)) == [fault]


@pytest.mark.parametrize(
    ("text", "position", "problem"),
    [
        ("kil 2@40", 0, "expected kill, stop, slow or full-disk; got 'kil'"),
        ("kill 2@40; 7", 11, "expected kill, stop, slow or full-disk; got '7'"),
        ("kill", 4, "expected a rank, as in `kill RANK@STEP [in PHASE]`; got the end"),
        ("kill one@4", 5, "expected a rank, as in `kill RANK@STEP [in PHASE]`; got 'one'"),
        ("kill -1@4", 5, "expected a rank, as in `kill RANK@STEP [in PHASE]`; got '-1'"),
        ("kill 1 40", 7, "expected @ and a step, as in `kill RANK@STEP [in PHASE]`; got '40'"),
        ("kill 1@4e3", 7, "expected a step, as in `kill RANK@STEP [in PHASE]`; got '4e3'"),
        ("kill 1@0", 7, "steps count from 1 up"),
        (
            "kill 1@4 in sleep",
            12,
            "expected a phase of a step (forward, backward, exchange, step, update, save, healin",
        ),
        ("kill 1@4 for 5s", 9, "expected `;` or the end after `kill 1@4`; got 'for'"),
        ("kill 1@4 kill 2@5", 9, "expected `;` or the end after `kill 1@4`; got 'kill'"),
        ("stop 1@4", 8, "expected `for` and a time, as in `stop RANK@STEP [in PHASE] for SECONDSs`; got the end"),
        ("stop 1@4 for 5", 13, "expected seconds with an s behind"),
        ("stop 1@4 for 0s", 13, "expected a time above 0"),
        ("slow 1@4", 6, "expected x and how many times as long each step takes"),
        ("slow 1 x1@4-5", 8, "expected a factor above 1, got 1"),
        ("slow 1 x2@5-4", 12, "expected a last step from 5 up, got 4"),
        ("full-disk", 9, "expected @ and a step, as in `full-disk [RANK]@STEP`; got the end"),
        ("kill 0@1; partition 0|1@4", 10, "partition is not offered"),
    ],
)
def test_what_cannot_be_read_is_refused_with_its_place(text: str, position: int, problem: str) -> None:
    with pytest.raises(FaultError) as caught:
        parse_script(text)
    assert caught.value.position == position
    assert caught.value.problem.startswith(problem)
    assert str(caught.value).endswith(f"\n  {text}\n  {' ' * position}^")


def test_what_is_no_text_or_without_end_is_refused() -> None:
    with pytest.raises(TypeError, match=r"faults are text such as 'kill 2@40; .*'; got list"):
        parse_script(["kill 1@2"])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="9000 characters"):
        parse_script("kill 1@2;" * 1000)


@pytest.mark.parametrize(
    ("text", "position", "problem"),
    [
        ("kill 0@1; stop 2@1 for 1s", 10, "there is no rank 2 among 2 workers: they are 0 to 1"),
        ("kill 1@4; stop 1@4 for 1s", 10, "`kill 1@4` and `stop 1@4 for 1s` happen to rank 1 at one moment"),
        ("stop 1@4 for 1s; stop 1@4 for 2s", 17, "`stop 1@4 for 1s` and `stop 1@4 for 2s` happen to rank 1"),
        ("slow 1 x2@3-5; slow 1 x3@5-8", 15, "`slow 1 x2@3-5` and `slow 1 x3@5-8` slow the same steps of rank 1"),
        ("full-disk@3; full-disk@3", 13, "`full-disk@3` appears twice"),
        ("stop 1@5 for 1s; kill 1@4", 0, "rank 1 does not come to `stop 1@5 for 1s`: `kill 1@4` ends it"),
        ("kill 1@4 in save; kill 1@4", 0, "rank 1 does not come to `kill 1@4 in save`: `kill 1@4` ends it"),
    ],
)
def test_what_cannot_happen_is_refused_before_anything_starts(text: str, position: int, problem: str) -> None:
    with pytest.raises(FaultError) as caught:
        check_script(f"  {text}", 2)
    assert (caught.value.text, caught.value.position) == (text, position)
    assert caught.value.problem.startswith(problem)


def test_what_does_not_contradict_is_taken() -> None:
    check_script("kill 1@4; stop 0@4 for 1s; slow 0 x2@1-4; slow 0 x3@5-8; full-disk@3; full-disk 1@3; slow 1 x2@4", 2)
    check_script("stop 1@4 in forward for 1s; stop 1@4 in save for 1s", 2)
    check_script("kill 1@4; kill 1@8", 2, restarts=1)  # started again


def test_the_command_line_refuses_a_script_that_cannot_happen(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "train.py"
    script.write_text("raise SystemExit('it was started')")
    monkeypatch.setenv("UNISONO_FAULTS", "kil 1@2")
    for options, expected in ((["--faults", "kill 2@1"], "there is no rank 2"), ([], "got 'kil'\n  kil 1@2\n  ^")):
        with pytest.raises(SystemExit) as ended:
            main(["run", "-n", "2", *options, str(script)])
        assert ended.value.code == 2
        told = capsys.readouterr().err
        assert expected in told
        assert "it was started" not in told


# The launcher's side ---------------------------------------------------------------------------------------------


def test_each_worker_is_given_its_own_faults_that_have_not_fired() -> None:
    report = FaultReport(check_script("kill 1@4; full-disk@3; slow 0 x2@1-2", 3, restarts=1))
    assert json.loads(report.write_for(0)) == {"1": "full-disk@3", "2": "slow 0 x2@1-2"}
    assert json.loads(report.write_for(1)) == {"0": "kill 1@4", "1": "full-disk@3"}
    report.take({"kind": "fault", "number": 1})
    report.take({"kind": "done", "number": 0})
    assert json.loads(report.write_for(1)) == {"0": "kill 1@4"}  # of workers that an engine starts again
    assert report.write_for(2) == ""
    assert report.find_kill(1) == ""
    report.take({"kind": "fault", "number": 0})
    assert (report.find_kill(1), report.find_kill(0)) == ("kill 1@4", "")


def test_a_run_that_ended_well_without_its_faults_did_not_end_well() -> None:
    steps = {0: 7, 1: 3, 2: None}
    report = FaultReport(
        check_script(
            "kill 1@4; full-disk@5; kill 2@1; slow 0 x2@1; kill 0@7 in save; kill 0@6 in exchange", 3, restarts=1
        )
    )
    report.take({"kind": "fault", "number": 3})
    outcome = report.judge(Outcome(), steps.__getitem__)
    assert (outcome.exit_status, outcome.failure and outcome.failure.rank, outcome.step) == (1, 1, 3)
    assert outcome.report.splitlines() == [
        "unisono: the program ended well, but 5 of 6 faults did not fire",
        "  kill 1@4: rank 1 came to step 3 only",
        "  full-disk@5: nothing was written to a disk by un.save or an offload after step 5",
        "  kill 2@1: rank 2 counted no step; steps are those of un.parallel",
        "  kill 0@7 in save: un.save wrote nothing after step 7",
        "  kill 0@6 in exchange: rank 0 exchanged nothing from step 6 on",
    ]
    failed = Outcome(Failure(0, 1.0, "exit", 3), "another report", 2)
    assert report.judge(failed, steps.__getitem__) is failed
    for number in range(6):
        report.take({"kind": "fault", "number": number})
    assert report.judge(Outcome(), steps.__getitem__).exit_status == 0


def test_the_environment_asks_for_faults_of_this_run_and_not_of_those_inside_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("UNISONO_FAULTS", "kill 1@4")
    monkeypatch.setenv("UNISONO_WORKER_FAULTS", '{"0": "kill 0@1"}')  # of the run that this one is in
    assert read_faults(None, 2) == [Fault("kill", 1, 4)]
    assert read_faults("", 2) == []
    made = processes.worker_environment(0, 2, address=("127.0.0.1", 1), run_id="x")
    assert [name for name in made if name.endswith("FAULTS")] == []
    made = processes.worker_environment(1, 2, address=("127.0.0.1", 1), run_id="x", faults='{"0": "kill 1@4"}')
    assert made["UNISONO_WORKER_FAULTS"] == '{"0": "kill 1@4"}'
