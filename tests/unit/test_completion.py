"""`unisono completion`: the scripts, asked in the shells themselves."""

from __future__ import annotations

import contextlib
import os
import pty
import re
import select
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from unisono.cli.command_line import COMMANDS, make_parser
from unisono.cli.completion import SHELLS, read_commands

SCRIPTS = {name: write(read_commands(make_parser())) for name, write in SHELLS.items()}


def needs(shell: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(shutil.which(shell) is None, reason=f"{shell} is not installed: apt-get install {shell}")


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A folder with two runs, a script and a folder."""
    for name in ("runs/2026-11-16_a", "runs/2026-11-17_b", "logs"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "train.py").touch()
    return tmp_path


def ask_bash(place: Path, *words: str) -> set[str]:
    """What bash would offer for the last word."""
    ask = 'COMP_WORDS=("$@"); COMP_CWORD=$(( $# - 1 )); _unisono; '
    program = SCRIPTS["bash"] + ask + '(( ${#COMPREPLY[@]} )) && printf "%s\\n" "${COMPREPLY[@]}"'
    return _run(place, "bash", "--norc", "-c", program, "bash", "unisono", *words)


def ask_fish(place: Path, *words: str) -> set[str]:
    """What fish would offer for the last word."""
    program = SCRIPTS["fish"] + f"complete -C {' '.join(['unisono', *words])!r}"
    return {line.partition("\t")[0].rstrip("/") for line in _run(place, "fish", "--no-config", "-c", program)}


def _run(place: Path, *command: str) -> set[str]:
    env = {"PATH": os.environ["PATH"], "HOME": str(place), "UNISONO_RUNS": str(place / "runs")}
    done = subprocess.run(command, cwd=place, env=env, capture_output=True, text=True)
    assert done.stderr == ""
    return {line.rstrip("/") for line in done.stdout.splitlines()}


CASES = [
    (["ru"], {"run", "runs"}),
    (["comp"], {"compare", "completion"}),
    (["run", "--max"], {"--max-restarts"}),
    (["run", "--output", "f"], {"files"}),
    (["run", "--on", "s"], {"skypilot", "slurm", "spark", "ssh"}),
    (["run", "--strategy", "powers"], {"powersgd"}),
    (["run", "-n", "2", "tr"], {"train.py"}),
    (["run", "--run-dir", "l"], {"logs"}),
    (["report", "l"], {"last", "logs"}),
    (["report", "2026"], {"2026-11-16_a", "2026-11-17_b"}),
    (["top", "2026-11-17"], {"2026-11-17_b"}),
    (["lab", "c"], {"clean"}),
    (["completion", "z"], {"zsh"}),
    (["doctor", "--j"], {"--json"}),
]


@needs("bash")
@pytest.mark.parametrize(("words", "offered"), CASES, ids=lambda value: " ".join(sorted(value)))
def test_bash_offers(place: Path, words: list[str], offered: set[str]) -> None:
    assert ask_bash(place, *words) == offered - ({"logs"} if words[0] == "report" else set())


@needs("bash")
def test_bash_offers_values_after_an_equals_sign_and_methods_after_a_comma(place: Path) -> None:
    assert ask_bash(place, "run", "--output", "=", "pre") == {"prefix"}
    assert "auto" in ask_bash(place, "run", "--output", "=")
    assert ask_bash(place, "compare", "--strategies", "allreduce,powers") == {"allreduce,powersgd"}
    assert ask_bash(place, "report", "./l") == {"./logs"}


@needs("fish")
@pytest.mark.parametrize(("words", "offered"), CASES, ids=lambda value: " ".join(sorted(value)))
def test_fish_offers(place: Path, words: list[str], offered: set[str]) -> None:
    assert ask_fish(place, *words) >= offered - ({"logs"} if words[0] == "report" else set())


@needs("fish")
def test_fish_offers_values_after_an_equals_sign_and_methods_after_a_comma(place: Path) -> None:
    assert ask_fish(place, "run", "--output=pre") == {"--output=prefix"}
    assert ask_fish(place, "compare", "--strategies", "allreduce,powers") == {"allreduce,powersgd"}
    assert ask_fish(place, "compare", "--strategies=allreduce,powers") == {"--strategies=allreduce,powersgd"}


def type_into(place: Path, lines: list[str], *command: str) -> str:
    """What a shell prints on a terminal to which these lines are typed; it ends by itself."""
    child, master = pty.fork()
    if child == 0:
        os.chdir(place)
        env = {"PATH": os.environ["PATH"], "HOME": str(place), "UNISONO_RUNS": str(place / "runs"), "TERM": "dumb"}
        os.execve(str(shutil.which(command[0])), list(command), env)
    os.write(master, "".join(f"{line}\n" for line in [*lines, "exit"]).encode())
    told = b""
    with contextlib.suppress(OSError):  # when the shell has ended
        while select.select([master], [], [], 60)[0]:
            told += os.read(master, 1 << 16)
    os.close(master)
    os.waitpid(child, 0)
    return told.decode("utf-8", "replace")


@needs("zsh")
def test_zsh_completes_what_has_one_answer(place: Path) -> None:
    (place / "script.zsh").write_text(SCRIPTS["zsh"])
    typed = [
        "dem\t",
        "run --max\t",
        "run --output f\t",
        "run --output=f\t",
        "run --strategy powers\t",
        "run -n 2 tr\t",
        "run --run-dir l\t",
    ]
    typed += [
        "top 2026-11-17\t",
        "lab c\t",
        "completion z\t",
        "doctor --j\t",
        "compare --strategies allreduce,powers\t",
    ]
    setup = [
        "autoload -Uz compinit && compinit -u -D; source ./script.zsh; unsetopt zle_bracketed_paste 2>/dev/null",
        "unisono() { print -r -- GOT:$*: }",
    ]
    told = type_into(place, [*setup, *(f"unisono {line}" for line in typed)], "zsh", "-f", "-i")
    found = [re.sub(r"[ /]*$", "", line) for line in re.findall(r"^GOT:(.*):\r?$", told, re.MULTILINE)]
    assert found == [
        "demo",
        "run --max-restarts",
        "run --output files",
        "run --output=files",
        "run --strategy powersgd",
        "run -n 2 train.py",
        "run --run-dir logs",
        "top 2026-11-17_b",
        "lab clean",
        "completion zsh",
        "doctor --json",
        "compare --strategies allreduce,powersgd",
    ]


@pytest.mark.parametrize("shell", sorted(SHELLS))
def test_every_command_and_option_is_in_the_script(shell: str) -> None:
    script = SCRIPTS[shell]
    for command in read_commands(make_parser()):
        assert re.search(rf"\b{command.name}\b", script)
        for option in command.options:
            for flag in option.flags:
                word = flag if shell != "fish" else f"-l {flag[2:]}" if flag.startswith("--") else f"-s {flag[1:]}"
                assert word in script
    assert {command.name for command in read_commands(make_parser())} == set(COMMANDS)


def test_the_command_prints_the_script(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "unisono", "completion", "bash"]
    assert subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=True).stdout == SCRIPTS["bash"]
