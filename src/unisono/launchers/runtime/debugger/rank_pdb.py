"""Python's own debugger for one rank, which gets its commands from afar and stops in the user's code alone."""

from __future__ import annotations

import io
import pdb
import sys
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any

from unisono.launchers.runtime.debugger.hub import TEXT_CHARACTERS
from unisono.launchers.runtime.frames import describe_place, find_user_frame, is_of_user

if TYPE_CHECKING:
    from unisono.launchers.runtime.debugger.agent import Agent

__all__ = ["RankPdb"]

# What would read a terminal that is not here, or would not come back.
_REFUSED = {
    "interact": "the prompt has no interpreter of its own: use ! and a statement",
    "debug": "it reads a terminal, and a worker has none",
    "commands": "it reads a terminal, and a worker has none",
    "run": "workers are started again by their launcher",
    "restart": "workers are started again by their launcher",
}


_making = threading.Lock()  # ranks may be threads


@contextmanager
def _without_readline() -> Iterator[None]:
    """pdb imports it, and it may write to a terminal at once; a worker has no line to edit."""
    with _making:
        if "readline" in sys.modules:
            yield
            return
        sys.modules["readline"] = None  # type: ignore[assignment]
        try:
            yield
        finally:
            del sys.modules["readline"]


class RankPdb(pdb.Pdb):
    """Python's pdb, whose commands come from the hub instead of a terminal."""

    def __init__(self, commands: Agent) -> None:
        self._text = io.StringIO()
        with _without_readline():
            super().__init__(stdin=io.StringIO(), stdout=self._text, nosigint=True, readrc=False)
        self.commands_of_rank = commands
        self._why = "asked"
        self._error: BaseException | None = None  # raised once the interaction is over

    # Ways to stop -----------------------------------------------------------------------------------------------------

    def stop_at(self, frame: FrameType, why: str) -> None:
        """Stop now, in `frame` of this thread; then go on as asked: on, or to the next line."""
        self.reset()
        self._mark(frame)
        self._why = why
        self.interaction(frame, None)
        if self.stoplineno != -1 or self.breaks:  # it is to stop again
            sys.settrace(self.trace_dispatch)

    def stop_after(self, error: BaseException, frames: TracebackType) -> None:
        """Stop where an error was raised."""
        self.reset()
        self._why = "exception"
        self.message("".join(traceback.format_exception(type(error), error, frames)).rstrip())
        self.interaction(None, frames)

    def stop_soon(self, frame: FrameType) -> None:
        """Stop at the next line of the user's code."""
        self.reset()
        self._mark(frame)
        self._why = "asked"
        self.set_step()
        sys.settrace(self.trace_dispatch)

    def look_at(self, frame: FrameType, line: str) -> str:
        """What a command prints for a frame that is not stopped here, but waits in another thread."""
        self.reset()
        self.setup(frame, None)
        self.run_line(line)
        return self.take_text()

    def _mark(self, frame: FrameType | None) -> None:
        while frame is not None:
            if is_of_user(frame):
                frame.f_trace = self.trace_dispatch
            self.botframe = frame
            frame = frame.f_back

    # Of bdb and pdb ---------------------------------------------------------------------------------------------------

    def reset(self) -> None:
        """Begin anew. bdb first checks all files in linecache, which all threads share: where another rank, or a
        traceback, drops one of them meanwhile, that check fails and is made again."""
        while True:
            try:
                super().reset()
            except KeyError:
                continue
            return

    def stop_here(self, frame: FrameType) -> bool:
        """Whether to stop in this frame: not in unisono, torch or Python's library."""
        return is_of_user(frame) and bool(super().stop_here(frame))

    def user_line(self, frame: FrameType) -> None:
        """At a line: a breakpoint of the prompt, or where a step ends."""
        if getattr(self, "currentbp", 0):
            self._why = "breakpoint"
        super().user_line(frame)

    def get_stack(self, f: FrameType | None, t: TracebackType | None) -> tuple[list[tuple[FrameType, int]], int]:
        """The stack without the frames that started the program."""
        stack, at = super().get_stack(f, t)
        first = next((i for i, (frame, _) in enumerate(stack) if is_of_user(frame)), 0)
        return stack[first:], max(0, at - first)

    def interaction(self, frame: FrameType | None, tb: Any) -> None:
        """Execute the prompt's commands until this rank is to go on."""
        if not self.commands_of_rank.may_stop(self._why):
            self._go_on()
            return
        super().interaction(frame, tb)
        self._why = "step"
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def cmdloop(self, intro: Any = None) -> None:
        """Commands from afar. An interruption is raised later: pdb would take it for its own."""
        while self.cmdqueue:  # since Python 3.13 the place is shown by a command that waits here
            self.onecmd(self.cmdqueue.pop(0))
        shown = self.take_text()
        where, line = self.stack[self.curindex]
        user = find_user_frame(where) or where
        place = describe_place(user, line if user is where else None)
        self.commands_of_rank.stopped(place, self._why, shown)
        try:
            self._follow_commands()
        except BaseException as error:
            self._error = error
            self._go_on()

    def _follow_commands(self) -> None:
        while True:
            command = self.commands_of_rank.next_command()
            if command is None:
                self._go_on()
                return
            number, line = command
            stop = self.run_line(line)
            self.commands_of_rank.answer(number, self.take_text(), goes_on=stop)
            if stop:
                return

    def _go_on(self) -> None:
        if self.commands_of_rank.is_off:
            self.clear_all_breaks()
        self.set_continue()

    def run_line(self, line: str) -> bool:
        """Execute one command; True if the rank goes on after it."""
        word = line.split(maxsplit=1)[0] if line.split() else ""
        if word in _REFUSED:
            self.error(f"{word}: {_REFUSED[word]}")
            return False
        self.lastcmd = ""  # an empty line repeats at the prompt, not here
        try:
            stop = self.onecmd(self.precmd(line))
            while self.cmdqueue and not stop:  # what came after ;;
                stop = self.onecmd(self.cmdqueue.pop(0))
            return bool(stop)
        except Exception as error:
            self.error(f"{type(error).__name__}: {error}")
            return False

    def do_clear(self, arg: str) -> None:
        """cl(ear): all breakpoints without a word, where none is named; pdb would ask at a terminal."""
        if arg:
            super().do_clear(arg)
        else:
            self.clear_all_breaks()

    do_cl = do_clear

    def take_text(self) -> str:
        """Return and clear what was printed since the last call."""
        text = self._text.getvalue()
        self._text.seek(0)
        self._text.truncate()
        if len(text) > TEXT_CHARACTERS:
            text = f"{text[:TEXT_CHARACTERS]}\n... ({len(text) - TEXT_CHARACTERS} characters more)"
        return text.rstrip("\n")
