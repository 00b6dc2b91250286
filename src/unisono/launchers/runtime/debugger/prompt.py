"""The prompt of the debugger: what a person types goes to all ranks, and equal answers are shown once.

In the terminal or the notebook of the hub's own process the prompt has a thread of its own. It reads the terminal by
itself, line by line: `input()` could not be given up when the run ends in between, and would take the next line that is
meant for somebody else.
"""

from __future__ import annotations

import contextvars
import os
import queue
import select
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from unisono.launchers.runtime.debugger.hub import Hub, HubConnection, connect_to_hub
from unisono.units import parse_ranks, show_ranks

__all__ = ["Prompt", "TerminalPrompt"]

_HELP = """\
  w, where          where each rank is
  p EXPRESSION      the value on every rank; equal answers are shown once (pp: in lines)
  @2 p x.shape      on rank 2 alone; @0,3 and @0-2 too. @2 on its own: for all further commands; @all: all ranks again
  l, ll             the source around; the whole function
  u, d, bt          a frame up, down; all frames
  n, s, r           all ranks together: to the next line, into a call of your code, to the return of the function
  b FILE:LINE       a breakpoint on all ranks; cl removes them
  !STATEMENT        execute a statement
  c                 all continue to the next breakpoint
  q, Ctrl-D         leave: all continue, and ignore further breakpoints
  abort             end the run
  An empty line repeats the last command. Other pdb commands (whatis, a, until, display, tbreak) go to the ranks."""
_STEPS = {"n", "next", "s", "step", "r", "return", "unt", "until"}
_LOOK_S = 0.3  # between two looks at ranks that have not stopped
_PATIENCE_S = 5.0  # for them, once another has stopped
_ANSWER_S = 20.0
_CLOSING_S = 0.2


@dataclass
class _Rank:
    """What the prompt knows of a rank."""

    stopped: str | None = None  # where; None while it runs
    why: str = ""
    text: str = ""
    running: str = "running"  # where it is, while it does
    waits: bool = False


class Prompt:
    """Over a link to the hub. `read` gives a line (EOFError: no more), `write` shows one."""

    def __init__(self, link: HubConnection, read: Callable[[str], str], write: Callable[[str], None]) -> None:
        self._link, self._read, self._write = link, read, write
        self._ranks: dict[int, _Rank] = {}
        self._messages: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        self._answers: dict[int, dict[int, dict[str, Any]]] = {}  # by number of the question and rank
        self._number = 0
        self._size = 0  # ranks that there are, with those that have yet to come
        self._is_ready = False  # the hub has told of all that are there
        self._is_over = False  # the run has ended, or somebody else has the prompt
        self._is_closing = False  # there are no more lines
        self._is_released = False  # the hub let all go on by itself
        self._pause, self._over = 0, 0  # the last that ranks have stopped in, and the last that was ended here
        self._chosen: list[int] | None = None
        self._last = ""
        threading.Thread(target=self._listen, name="unisono prompt", daemon=True).start()

    def run(self, *, stop: bool = False) -> None:
        """Converse until the prompt is left or the run is over. `stop`: stop all workers now, if none is stopped."""
        self._link.send(kind="prompt")
        self._await(lambda: self._is_ready)
        if stop and not self._is_over and not any(rank.stopped for rank in self._ranks.values()):
            self._link.send(kind="stop", rank=-1, place="")
        while not self._is_over:
            self._is_released = False
            self._await(lambda: any(rank.stopped for rank in self._ranks.values()))
            if not self._is_over:
                self._gather()
                self._show_stops()
                self._converse()
        self._link.shut()

    # Messages ---------------------------------------------------------------------------------------------------------

    def _listen(self) -> None:
        for message in self._link.messages():
            self._messages.put(message)
        self._messages.put(None)

    def _await(self, is_there: Callable[[], bool], limit_s: float | None = None) -> bool:
        """Handle messages until a condition holds; False if it did not in time, or all is over."""
        deadline = None if limit_s is None else time.monotonic() + limit_s
        while not is_there():
            if self._is_over:
                return False
            try:
                left = None if deadline is None else max(0.0, deadline - time.monotonic())
                self._take(self._messages.get(timeout=left))
            except queue.Empty:
                return is_there()
        return True

    def _take(self, message: dict[str, Any] | None) -> None:
        if message is None:
            self._is_over = True
            return
        rank = self._ranks.setdefault(message["rank"], _Rank()) if "rank" in message else _Rank()
        match message["kind"]:
            case "ready":
                self._is_ready = True
            case "busy":
                self._write("Another prompt is attached to this run already.")
                self._is_over = True
            case "stopped" if message["pause"] <= self._over:
                pass  # it was on its way when all were let go
            case "stopped":
                self._pause = message["pause"]
                rank.stopped, rank.why, rank.text = message["place"], message["why"], message["text"]
            case "worker":
                self._size = message["size"]
            case "answer":
                if message.get("goes_on"):
                    rank.stopped = None
                if "running" in message:
                    rank.running, rank.waits = message["running"], bool(message.get("waits"))
                self._answers.setdefault(message["id"], {})[message["rank"]] = message
            case "gone":
                self._lose(message["rank"], died=message["died"])

    def _lose(self, number: int, *, died: bool) -> None:
        was_stopped = any(rank.stopped for rank in self._ranks.values())
        del self._ranks[number]
        for found in self._answers.values():
            found.setdefault(number, {"text": "*** it has ended"})
        self._size -= 1
        if self._is_closing:
            return
        if was_stopped and not died:
            self._write(f"rank {number} has ended its program")
        elif was_stopped:
            self._write(f"rank {number} has died: all others continue")
            self._forget_stops()
            self._is_released = True

    def _forget_stops(self) -> None:
        for rank in self._ranks.values():
            rank.stopped = None

    def _ask(self, ranks: Sequence[int], line: str) -> dict[int, dict[str, Any]]:
        """Every rank's answer to a command; those that do not answer in time are left out."""
        self._number += 1
        number = self._number
        found = self._answers[number] = {}
        alone = set(ranks) != set(self._ranks) or not all(rank.stopped for rank in self._ranks.values())
        self._link.send(kind="line", id=number, text=line, ranks=list(ranks), alone=alone)
        self._await(lambda: found.keys() >= set(ranks) & self._ranks.keys(), _ANSWER_S)
        del self._answers[number]
        return {rank: found[rank] for rank in ranks if rank in found}

    # Where all are ----------------------------------------------------------------------------------------------------

    def _gather(self) -> None:
        """Until all have stopped. One that waits for others in a collective cannot; nor do long computations count."""
        deadline = time.monotonic() + _PATIENCE_S
        before: dict[int, str] = {}
        while not self._is_over and not self._is_released:
            moving = [number for number, rank in self._ranks.items() if rank.stopped is None]
            if not moving and len(self._ranks) >= self._size:
                return
            if len(moving) == len(self._ranks):
                deadline = time.monotonic() + _PATIENCE_S
            else:
                self._ask(moving, "")
                now = {number: self._ranks[number].running for number in moving if number in self._ranks}
                waiting = all(self._ranks[number].waits or self._ranks[number].stopped for number in now)
                waiting = waiting and len(self._ranks) >= self._size
                if (waiting and now == before) or time.monotonic() > deadline:
                    return
                before = now
            self._await(
                lambda: len(self._ranks) >= self._size and all(rank.stopped for rank in self._ranks.values()), _LOOK_S
            )

    def _show_stops(self) -> None:
        """Show where all ranks have stopped, with the line or the error there."""
        if self._is_over or self._is_released:
            return
        shown: dict[str, list[int]] = {}
        for number, rank in sorted(self._ranks.items()):
            if rank.stopped is not None:
                lines = rank.text.splitlines()
                source = [line for line in lines if line.startswith("-> ")]  # of the program, as pdb shows it
                text = rank.text if rank.why == "exception" else "\n".join(source)
                shown.setdefault(f"at {rank.stopped}\n{text}".rstrip(), []).append(number)
            else:
                shown.setdefault(rank.running, []).append(number)
        for text, ranks in shown.items():
            self._write(f"{show_ranks(ranks)} {text}")

    def _show_places(self) -> None:
        self._ask([number for number, rank in self._ranks.items() if rank.stopped is None], "")
        places: dict[str, list[int]] = {}
        for number, rank in sorted(self._ranks.items()):
            places.setdefault(f"at {rank.stopped}" if rank.stopped else rank.running, []).append(number)
        self._write(", ".join(f"{show_ranks(ranks)} {place}" for place, ranks in places.items()))

    # What is typed ----------------------------------------------------------------------------------------------------

    def _converse(self) -> None:
        """Read and execute commands until all ranks go on."""
        while not self._is_over and not self._is_released:
            try:
                line = self._read("(unisono) ").strip()
            except (EOFError, KeyboardInterrupt):
                line = "q"
                self._write("")
                self._is_closing = True
                self._await(lambda: self._is_over, _CLOSING_S)  # no more lines: perhaps the run has ended
            while not self._messages.empty():
                self._take(self._messages.get())
            if self._is_over or self._is_released:
                return
            line = self._last = line or self._last
            if line and self._do(line):
                return

    def _do(self, line: str) -> bool:
        """Execute one command; True if all ranks go on after it."""
        ranks: Sequence[int] = self._chosen if self._chosen is not None else sorted(self._ranks)
        if line.startswith("@"):
            which, _, line = line[1:].partition(" ")
            try:
                ranks = sorted(self._ranks) if which == "all" else parse_ranks(which, self._ranks)
            except ValueError as error:
                self._write(f"*** {error}")
                return False
            line = line.strip()
            if not line:
                self._chosen = None if which == "all" else list(ranks)
                self._write(f"commands go to {'all ranks' if self._chosen is None else show_ranks(ranks)}")
                return False
        match line.split()[0]:
            case "c" | "cont" | "continue":
                return self._release("continue")
            case "q" | "quit" | "exit" | "EOF":
                self._release("leave")
                self._write("left: all workers continue, and ignore further breakpoints")
                self._is_over = True
                return True
            case "abort":
                self._is_over = self._release("abort")
                return True
            case "w" | "where":
                self._show_places()
            case "h" | "help" | "?":
                self._write(_HELP)
            case word if word in _STEPS:
                self._step(ranks, line)
            case word:
                self._show_answers(self._ask(ranks, "where" if word == "bt" else line), ranks)
        return False

    def _release(self, how: str) -> bool:
        self._forget_stops()
        self._over = self._pause
        self._link.send(kind=how, pause=self._pause)
        return True

    def _step(self, ranks: Sequence[int], line: str) -> None:
        """Together; whoever then waits for one that is stopped is shown so."""
        stopped = [number for number in ranks if self._ranks[number].stopped]
        answers = self._ask(stopped, line)
        wrong = {rank: answer for rank, answer in answers.items() if answer["text"].startswith("***")}
        if wrong:
            self._show_answers(wrong, list(wrong))
            return
        for number in set(stopped) & self._ranks.keys():
            rank = self._ranks[number]
            rank.running = "running"
        self._await(lambda: any(rank.stopped for rank in self._ranks.values()))
        self._gather()
        self._show_stops()

    def _show_answers(self, answers: dict[int, dict[str, Any]], ranks: Sequence[int]) -> None:
        """Show the ranks' answers, equal ones once."""
        groups: dict[str, list[int]] = {}
        for rank, answer in answers.items():
            groups.setdefault(answer["text"], []).append(rank)
        late = [rank for rank in ranks if rank not in answers and rank in self._ranks]
        for text, found in groups.items():
            if len(groups) == 1 and not late:
                if text:
                    self._write(text)
            elif "\n" in text:
                self._write(f"{show_ranks(found)}:\n{text}")
            else:
                self._write(f"{show_ranks(found)}: {text}")
        if late:
            self._write(f"{show_ranks(late)}: no answer within {_ANSWER_S:g} s")


# In this process's terminal or notebook ------------------------------------------------------------------------------


class TerminalPrompt:
    """For the hub of this process; `open` is its `open_prompt`. Made where the terminal belongs to: its context."""

    def __init__(self, hub: Hub) -> None:
        self._hub = hub
        self._console: _Terminal | _Notebook | None = None
        self._context = contextvars.copy_context()  # by which a notebook knows the cell

    def open(self) -> bool:
        """Show the prompt; False if there is no terminal."""
        self._console = _find_console()
        if self._console is None:
            return False
        threading.Thread(
            target=self._context.copy().run, args=(self._converse, self._console), name="unisono prompt", daemon=True
        ).start()
        return True

    def _converse(self, console: _Terminal | _Notebook) -> None:

        try:
            link = connect_to_hub([("127.0.0.1", self._hub.address[1])], self._hub.token)
        except ConnectionError:  # the hub was closed in this moment
            return
        Prompt(link, console.read, console.write).run()
        link.close()

    def close(self) -> None:
        """End a read that is under way, and read no more."""
        if self._console is not None:
            self._console.close()


class _Terminal:
    """Reads and writes a terminal, whatever the standard streams are."""

    def __init__(self, descriptor: int) -> None:
        self._fd = descriptor
        self._wakes, self._waker = os.pipe()
        self._rest = b""

    def read(self, prompt: str) -> str:
        os.write(self._fd, prompt.encode())
        while b"\n" not in self._rest:
            ready, _, _ = select.select([self._fd, self._wakes], [], [])
            if self._wakes in ready:
                raise EOFError
            data = os.read(self._fd, 4096)
            if not data:
                raise EOFError
            self._rest += data
        line, _, self._rest = self._rest.partition(b"\n")
        return line.decode("utf-8", "replace")

    def write(self, text: str) -> None:
        os.write(self._fd, (text + "\n").encode())

    def close(self) -> None:
        os.write(self._waker, b"x")


class _Notebook:
    """Asks and prints in a notebook's cell."""

    def read(self, prompt: str) -> str:
        return input(prompt)

    def write(self, text: str) -> None:
        print(text, flush=True)

    def close(self) -> None:
        """The kernel's own: the cell may show a field that nobody reads any more."""


def _find_console() -> _Terminal | _Notebook | None:
    if "ipykernel" in sys.modules:
        return _Notebook()
    try:
        descriptor = os.open("/dev/tty", os.O_RDWR | os.O_CLOEXEC)
    except OSError:  # none, as under a batch system
        return None
    try:
        is_ours = os.tcgetpgrp(descriptor) == os.getpgrp()
    except OSError:
        is_ours = False
    if not is_ours:  # in the background: reading would stop this process
        os.close(descriptor)
        return None
    return _Terminal(descriptor)
