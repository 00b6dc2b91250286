"""The command line as a whole: which commands there are, and that none needs torch before it is run."""

from __future__ import annotations

import importlib
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from unisono import cli
from unisono.cli import command_line
from unisono.cli.command_line import COMMANDS, main, make_parser
from unisono.launchers.job import Job
from unisono.launchers.processes import worker_environment

FOLDER = Path(cli.__file__).parent


def test_every_command_of_a_file_is_a_command() -> None:
    found = [importlib.import_module(f"unisono.cli.{file.stem}") for file in FOLDER.glob("[a-z]*.py")]
    listed = [name for module in found if module is not command_line for name in getattr(module, "COMMANDS", ())]
    assert sorted(listed) == sorted(COMMANDS)


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


@pytest.mark.parametrize("package", ["torch", "rich"])
def test_a_command_without_what_it_needs_says_so_in_a_line(package: str) -> None:
    program = f"import sys; sys.modules[{package!r}] = None; from unisono.cli import main; sys.exit(main(['demo']))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.startswith(f"unisono demo: needs {package}, which is not installed here: pip install {package}")
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["rnu"], "there is no command 'rnu'; did you mean run?"),
        (["frobnicate"], ", ".join(list(COMMANDS)[:5])),
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


def call_run(folder: Path, *words: str, **environment: str) -> tuple[str, list[str]]:
    """Standard output and the lines of standard error of `unisono run` in a folder, with no workers: "ran" instead."""
    program = """
import sys
from unisono.cli import main
from unisono.launchers import terminal

terminal.run_in_terminal = lambda job: print("ran") or 0
try:
    status = main(["run", *sys.argv[1:]])
except SystemExit as ended:
    status = ended.code
print(status, "torch" in sys.modules)
"""
    command = [sys.executable, "-c", program, "-n", "2", *words, "train.py"]
    env = {**os.environ, "UNISONO_RUNS": "off", **environment}
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=folder, env=env)
    return done.stdout, done.stderr.splitlines()


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("alreduce", "unknown strategy 'alreduce'; did you mean 'allreduce'?"),
        ("torch:dpd", "unknown torch strategy 'dpd'; did you mean 'ddp'?"),
        ("local_sgd(reducer=powersdg(rank=2))", "unknown reducer 'powersdg'; did you mean 'powersgd'?"),
        ("powersgd(rank=4", "the spec cannot be read: '(' was never closed"),
    ],
)
def test_a_strategy_that_no_worker_could_build_is_refused_before_there_are_any(
    spec: str, said: str, tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text("losses = []\nlosses.extend([1.0])\n")
    ended, told = call_run(tmp_path, "--strategy", spec)
    assert ended == "2 False\n", "no worker was started, and torch was not imported"
    assert f"unisono run: error: --strategy: {said}" in told
    ended, told = call_run(tmp_path, UNISONO_STRATEGY=spec)
    assert ended == "2 False\n"
    assert f"unisono run: error: UNISONO_STRATEGY: {said}" in told


@pytest.mark.parametrize("spec", ["allreduce", "'powersgd(rank=4)'", "torch:ddp", "local_sgd(reducer=topk)", ""])
def test_a_strategy_that_may_be_built_is_left_to_the_workers(spec: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()
    assert call_run(tmp_path, "--strategy", spec.strip("'")) == ("ran\n0 False\n", [])


@pytest.mark.parametrize("file", ["train.py", "project/training.py"])
def test_a_strategy_that_the_program_may_add_itself_is_left_to_the_workers(file: str, tmp_path: Path) -> None:
    (tmp_path / "project").mkdir()
    (tmp_path / "train.py").touch()
    (tmp_path / file).write_text("from unisono.spec import extend\nwith extend(strategies='methods'):\n    train()\n")
    assert call_run(tmp_path, "--strategy", "alreduce") == ("ran\n0 False\n", [])


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


def test_a_job_script_starts_workers_as_the_command_would(tmp_path: Path) -> None:
    program, script = tmp_path / "train.py", tmp_path / "job.sh"
    program.write_text("")
    assert main(["run", "-n", "2", "--pdb", "--warm", "--on", "slurm", "--script", str(script), str(program)]) == 0
    assert {"--pdb", "--warm"} <= set(script.read_text().split())


def test_a_job_script_repeats_every_option_of_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    program, script = tmp_path / "train.py", tmp_path / "job.sh"
    program.write_text("")
    repeated = ["--wait", "90", "--page", "--page-port", "8080", "--page-bind", "0.0.0.0", "--page-stay"]
    repeated += ["--grace", "90.0", "--threads", "3", "--output", "rank0", "--faults", "kill 1@4", "--no-record"]
    words = ["--on", "slurm", "-n", "2", *repeated, "--options=--time=5", "--hosts", "a,b"]
    assert main(["run", *words, "--script", str(script), str(program), "--lr", "1"]) == 0
    assert capsys.readouterr().err == ""  # the page is of the run, not of this command
    started = shlex.split(script.read_text().splitlines()[-1])
    again = make_parser(["run"]).read(started[started.index("run") :])
    first = make_parser(["run"]).read(["run", *words, str(program), "--lr", "1"])
    given_to_sbatch = {"options": None, "hosts": None}
    assert vars(again) | {"parser": None} == vars(first) | given_to_sbatch | {"parser": None}


def test_what_no_run_could_begin_with_is_said_in_a_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "train.py").touch()
    (tmp_path / "file").touch()
    for words, said in (
        (["-n", "1", "--output", "files", "--output-dir", str(tmp_path / "file/logs")], "file/logs: Not a directory"),
        (["-n", "1", "--run-dir", "s3://bucket/run"], "--run-dir: s3://bucket/run has the scheme s3"),
        (["-n", "1:2", "--heartbeat", "0"], "expected a heartbeat of at least 1 s"),
    ):
        with pytest.raises(SystemExit) as ended:
            main(["run", *words, str(tmp_path / "train.py")])
        told = capsys.readouterr().err
        assert (ended.value.code, said in told, "Traceback" in told) == (2, True, False), told


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


@pytest.mark.parametrize(
    ("words", "imported"),
    [(["--help"], set()), (["runs", "--help"], {"records"}), (["scale", "--help"], {"under_way"})],
)
def test_a_command_is_imported_when_it_is_called(words: list[str], imported: set[str]) -> None:
    program = (
        f"import sys; from unisono.cli import main\ntry: main({words})\nfinally: print(*sys.modules, file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    found = set(done.stderr.split())
    files = {file.stem for file in FOLDER.glob("[a-z]*.py")} - {"command_line", "arguments"}
    assert {name for name in files if f"unisono.cli.{name}" in found} == imported
    assert not found & {"torch", "numpy", "unisono.launchers.lab.engine", "unisono.launchers.engines.ray"}
