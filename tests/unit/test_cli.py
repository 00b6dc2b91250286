"""The command line as a whole: each command is a file, and none needs torch before it is run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from unisono import cli
from unisono.cli.command_line import COMMANDS, main
from unisono.launchers.environment import worker_environment
from unisono.launchers.job import Job

FOLDER = Path(cli.__file__).parent


def test_every_file_that_adds_a_command_is_a_command() -> None:
    found = {file.stem for file in FOLDER.glob("*.py") if "def add_command(" in file.read_text(encoding="utf-8")}
    assert found == set(COMMANDS)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_a_help_of_its_own_and_a_line_in_that_of_all(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main([name, "--help"])
    assert ended.value.code == 0
    assert f"usage: unisono {name}" in capsys.readouterr().out
    assert main([]) == 2
    assert f"\n    {name}" in capsys.readouterr().out


def test_the_command_line_runs_without_torch_and_numpy() -> None:
    program = "import sys; from unisono.cli import main; main(['strategies']); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    *listed, imported = done.stdout.splitlines()
    assert imported == "False"
    assert any(line.split()[:1] == ["allreduce"] for line in listed)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["rnu"], "there is no command 'rnu'; did you mean run?"),
        (["frobnicate"], ", ".join(COMMANDS[:5])),
        (
            ["run", "--stratgy", "topk", "train.py"],
            "unisono run: error: there is no option --stratgy; did you mean --strat",
        ),
        (["run", "--epochs=3", "train.py"], "options come after it, as in: unisono run -n 2 train.py --epochs"),
        (["strategies", "topk"], "unisono strategies: error: one word too many: 'topk'"),
        (["run", __file__], "no number of workers given; as in: unisono run -n 2"),
        (["plan", __file__], "no number of workers given; as in: unisono plan -n 2"),
    ],
)
def test_a_mistake_is_named_with_what_was_meant_on_a_few_lines(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 2
    told = capsys.readouterr().err
    assert said in told
    assert len(told.splitlines()) <= 7, "the error is not lost below a long usage"


def test_balance_reaches_the_workers_and_a_job_script(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seen: list[str] = []

    def run(job: Job) -> int:
        env = worker_environment(0, job.workers, address=("localhost", 1), run_id="x")
        seen.append(env.get("UNISONO_BALANCE", ""))
        return 0

    monkeypatch.setattr("unisono.launchers.terminal.run_in_terminal", run)
    monkeypatch.setenv("UNISONO_BALANCE", "")  # put back as it was, after this test
    program, script = tmp_path / "train.py", tmp_path / "job.sh"
    program.write_text("")
    assert main(["run", "-n", "2", str(program)]) == 0
    assert main(["run", "-n", "2", "--balance", str(program)]) == 0
    assert seen == ["", "1"]
    assert main(["run", "-n", "2", "--balance", "--on", "slurm", "--script", str(script), str(program)]) == 0
    assert " --balance " in script.read_text()


def test_workers_that_come_and_go_on_an_engine_and_in_a_job_script(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "train.py").touch()
    words = ["run", "--on", "slurm", "-n", "2:4", "--heartbeat", "5", "--adapt"]
    assert main([*words, "--script", str(tmp_path / "job.sh"), str(tmp_path / "train.py")]) == 0
    written = (tmp_path / "job.sh").read_text()
    assert "#SBATCH --ntasks=4\n" in written
    assert "#SBATCH --no-kill\n" in written
    assert " -n 2:4 " in written
    assert " --heartbeat 5.0 " in written
    assert " --adapt " in written
    with pytest.raises(SystemExit):
        main(["run", "--on", "ssh", "--hosts", "a", "-n", "2:4", "--max-restarts", "1", str(tmp_path / "train.py")])
    assert "--max-restarts starts all workers again" in capsys.readouterr().err
