"""The debugger at a terminal: four workers, driven through a pseudo-terminal, and a prompt that attaches."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import signal
import subprocess
import sys
import termios
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from launched import SOURCES, Launched

PROMPT = "(unisono) "
LIMIT_S = 60.0  # for a prompt to come, on a machine that does other things as well

PROGRAM = """
    import os, torch, unisono as un
    world = un.join(device="cpu")
    open(f"pid-{world.rank}", "w").write(f"{os.getpid()}\\n")

    def check(x):
        if FAILS and world.rank == 1:
            raise ValueError(f"rank {world.rank} has {x.item():g}")
        return x

    def train():
        x = torch.tensor(7.0 if world.rank == 2 else 1.0)
        for step in range(4):
            if step == 1:
                un.breakpoint(BREAKS)
            x += 1
            world.all_reduce(x, "mean").wait()
            if step == 2:
                check(x)
        print("end", x.item())

    train()
"""


class Terminal:
    """`unisono run` at a terminal of its own."""

    def __init__(self, folder: Path, *options: str, breaks: str = "", fails: bool = False) -> None:
        text = textwrap.dedent(PROGRAM).replace("FAILS", str(fails)).replace("BREAKS", breaks)
        (folder / "train.py").write_text(text)
        self.folder = folder
        self._master, slave = pty.openpty()
        env = {**os.environ, "PYTHONPATH": str(SOURCES), "OMP_NUM_THREADS": "1", "NO_COLOR": "1"}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "unisono", "run", "-n", "4", "--warm", *options, "train.py"],
            cwd=folder,
            env=env,
            stdin=slave,
            stdout=slave,
            stderr=slave,
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )
        os.close(slave)
        self._text = ""

    def read_prompt(self) -> str:
        """What is shown up to the next prompt."""
        deadline = time.monotonic() + LIMIT_S
        while PROMPT not in self._text:
            assert self._read(deadline), f"no prompt; shown: {self._text}"
        shown, _, self._text = self._text.partition(PROMPT)
        return shown.replace("\r\n", "\n").rstrip("\n")

    def ask(self, line: str) -> str:
        """Type a line; what is shown then, up to the next prompt."""
        self.type(line + "\n")
        return self.read_prompt().partition("\n")[2]

    def type(self, text: str) -> None:
        os.write(self._master, text.encode())

    def finish(self) -> tuple[int, str]:
        """Exit status, and what was shown till the end."""
        deadline = time.monotonic() + LIMIT_S
        while self._read(deadline):
            pass
        return self.process.wait(LIMIT_S), self._text.replace("\r\n", "\n")

    def _read(self, deadline: float) -> bool:
        ready, _, _ = select.select([self._master], [], [], max(0.0, deadline - time.monotonic()))
        try:
            data = os.read(self._master, 1 << 16) if ready else b""
        except OSError:  # nobody has the other end any more
            data = b""
        self._text += data.decode()
        return bool(data)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._master)


@pytest.fixture
def open_terminal(tmp_path: Path) -> Iterator[Callable[..., Terminal]]:
    opened: list[Terminal] = []

    def start(*options: str, **how: object) -> Terminal:
        opened.append(Terminal(tmp_path, *options, **how))  # type: ignore[arg-type]
        return opened[-1]

    yield start
    for terminal in opened:
        terminal.close()


def test_four_workers_are_asked_stepped_and_continued(open_terminal: Callable[..., Terminal]) -> None:
    terminal = open_terminal()
    assert terminal.read_prompt() == "ranks 0-3 at train.py:15 in train\n-> un.breakpoint()"
    assert terminal.ask("w") == "ranks 0-3 at train.py:15 in train"
    assert terminal.ask("p x.item(), world.size") == "(3.5, 4)"
    assert terminal.ask("p world.rank") == "rank 0: 0\nrank 1: 1\nrank 2: 2\nrank 3: 3"
    assert terminal.ask("@2 !x += 4") == ""
    assert terminal.ask("p x.item()") == "ranks 0-1, 3: 3.5\nrank 2: 7.5"
    assert terminal.ask("n") == "ranks 0-3 at train.py:16 in train\n-> x += 1"
    assert terminal.ask("") == 'ranks 0-3 at train.py:17 in train\n-> world.all_reduce(x, "mean").wait()'
    assert terminal.ask("") == "ranks 0-3 at train.py:18 in train\n-> if step == 2:"
    assert terminal.ask("p x.item()") == "5.5"
    terminal.type("c\n")
    status, shown = terminal.finish()
    assert status == 0
    assert len(re.findall(r"end 7\.5", shown)) == 4


def test_one_rank_at_a_breakpoint_stops_all_and_q_lets_all_go_on(open_terminal: Callable[..., Terminal]) -> None:
    terminal = open_terminal(breaks="rank=3")
    shown = terminal.read_prompt()
    assert "rank 3 at train.py:15 in train" in shown
    assert "train.py:17 in train" in shown.replace("rank 3 at", "")  # the others are at their collective
    assert terminal.ask("@3 p step") == "1"  # another may still be in the collective before
    terminal.type("q\n")
    status, shown = terminal.finish()
    assert status == 0
    assert "left: all workers continue" in shown
    assert len(re.findall(r"end 6\.5", shown)) == 4


def test_a_worker_killed_at_the_prompt_ends_the_run_and_strands_nobody(open_terminal: Callable[..., Terminal]) -> None:
    terminal = open_terminal()
    terminal.read_prompt()
    os.kill(int((terminal.folder / "pid-2").read_text()), signal.SIGKILL)
    status, shown = terminal.finish()
    assert status == 128 + signal.SIGKILL
    assert "worker 2 of 4 failed: killed by SIGKILL" in shown


def test_an_error_opens_the_prompt_where_it_was_raised(open_terminal: Callable[..., Terminal]) -> None:
    terminal = open_terminal("--pdb", breaks="rank=9", fails=True)
    shown = terminal.read_prompt()
    assert "rank 1 at train.py:8 in check\nTraceback (most recent call last):" in shown
    assert "ValueError: rank 1 has 5.5" in shown
    assert terminal.ask("@1 p x.item()") == "5.5"
    assert terminal.ask("@1 u").endswith("-> check(x)")
    assert terminal.ask("@1 p step") == "2"
    terminal.type("q\n")
    status, shown = terminal.finish()
    assert status == 1
    assert "worker 1 of 4 failed: ValueError" in shown
    assert "were stopped" in shown


def test_ctrl_c_at_the_prompt_ends_the_run(open_terminal: Callable[..., Terminal]) -> None:
    terminal = open_terminal()
    terminal.read_prompt()
    terminal.type("\x03")
    status, shown = terminal.finish()
    assert status == 128 + signal.SIGINT
    assert "interrupted (SIGINT); 4 workers stopped" in shown


ATTACHED = """
    import torch, unisono as un
    world = un.join(device="cpu")
    un.breakpoint(rank=1)
    x = world.all_reduce(torch.tensor(float(world.rank)), "sum").wait()
    breakpoint()
    print("sum", x.item())
"""


def test_without_a_terminal_a_prompt_attaches(run_script: Callable[..., Launched]) -> None:
    launched = run_script(ATTACHED, "-n", "2", "--warm")
    assert launched.process.stderr is not None
    told = re.search(r"Attach with: unisono (debug \w+)", launched.process.stderr.readline().decode())
    assert told is not None
    prompt = Launched(told[1].split(), launched.folder, stdin=subprocess.PIPE)
    out, _ = prompt.process.communicate(b"p world.rank\nc\np x.item()\nc\n", timeout=LIMIT_S)
    status, shown, err = launched.finish()
    assert "rank 0: 0\nrank 1: 1\n" in out.decode()
    assert "ranks 0-1 at script.py:6" in out.decode(), (status, shown, err)  # Python's own, which all come to
    assert "(unisono) 1.0\n" in out.decode()
    assert status == 0
    assert shown.count("sum 1.0") == 2


def test_a_prompt_that_is_killed_lets_all_go_on(run_script: Callable[..., Launched]) -> None:
    launched = run_script(ATTACHED, "-n", "2", "--warm")
    assert launched.process.stderr is not None
    told = re.search(r"Attach with: unisono (debug \w+)", launched.process.stderr.readline().decode())
    assert told is not None
    prompt = Launched(told[1].split(), launched.folder, stdin=subprocess.PIPE)
    assert prompt.process.stdout is not None
    while b"rank 1 at" not in prompt.process.stdout.readline():
        pass
    prompt.process.kill()
    prompt.finish()
    status, shown, _ = launched.finish()
    assert status == 0
    assert shown.count("sum 1.0") == 2
