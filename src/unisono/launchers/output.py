"""What becomes of the workers' standard output and error: prefixed lines, rank 0 only, or files."""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import sys
import time
from collections import deque
from pathlib import Path
from typing import IO, Literal, TextIO

__all__ = ["FOLDER", "MODES", "Lines", "Mode", "Output", "OutputClosed", "Sink"]

Mode = Literal["auto", "prefix", "rank0", "files"]
MODES: tuple[Mode, ...] = ("auto", "prefix", "rank0", "files")
FOLDER = "unisono-output"
TAIL_LINES = 40
_LONGEST_LINE_BYTES = 1 << 20
_PROGRESS_EVERY_S = 1.0
_COLOURS = (36, 33, 35, 32, 34, 31)  # cyan, yellow, magenta, green, blue, red


class OutputClosed(Exception):
    """Our own output cannot be written any more: the reader of the pipe has left, or the disk is full."""


class Lines:
    r"""Cuts a stream of bytes into lines.

    A line that is rewritten with carriage returns (a progress bar) counts once with its last state, and at most once a
    second while it lasts.

    >>> lines = Lines()
    >>> lines.feed(b"one\ntw"), lines.feed(b"o\r\nbar 1%\rbar 2%"), lines.flush()
    ([b'one'], [b'two'], [b'bar 2%'])
    """

    def __init__(self) -> None:
        self._rest = b""
        self._shown = b""
        self._shown_at = time.monotonic()

    def feed(self, data: bytes) -> list[bytes]:
        """The lines that `data` completes."""
        *whole, rest = (self._rest + data).split(b"\n")
        lines = [_last_state(line) if b"\r" in line else line for line in whole]
        if whole:
            self._shown = b""
        if b"\r" in rest:
            rest = self._progress(rest, lines)
        if len(rest) > _LONGEST_LINE_BYTES:
            lines.append(rest)
            rest = b""
        self._rest = rest
        return lines

    def flush(self) -> list[bytes]:
        """The unfinished last line, if there is one."""
        state, self._rest = _last_state(self._rest), b""
        return [state] if state and state != self._shown else []

    def _progress(self, rest: bytes, lines: list[bytes]) -> bytes:
        """Show a rewritten line now and then; keep only its newest state."""
        before, _, newest = rest.rpartition(b"\r")
        state = _last_state(before)
        now = time.monotonic()
        if state.strip() and state != self._shown and now - self._shown_at >= _PROGRESS_EVERY_S:
            lines.append(state)
            self._shown, self._shown_at = state, now
        return newest if newest.strip() else state + b"\r"


def _last_state(line: bytes) -> bytes:
    return next((state for state in reversed(line.split(b"\r")) if state.strip()), b"")


class Sink:
    """Where lines go in the end: the descriptor of this program's own stream, or a notebook's stream object.

    Writes wait for a slow reader until `deadline` (monotonic; None: as long as it takes), after which they are dropped.
    """

    def __init__(self, stream: TextIO, original: TextIO | None) -> None:
        self._stream = stream
        self._fd = stream.fileno() if stream is original else None
        self.tty = self._fd is not None and os.isatty(self._fd)
        self.deadline: float | None = None
        self._broken = False

    def write(self, data: bytes) -> None:
        """Write it all. Raises OutputClosed the first time that this fails, and drops everything after that."""
        if self._broken or not data:
            return
        if self._fd is None:
            self._stream.write(data.decode("utf-8", "replace"))
            self._stream.flush()
            return
        self._stream.flush()
        try:
            self._write_fd(self._fd, memoryview(data))
        except OSError as error:
            self._broken = True
            raise OutputClosed(str(error)) from error

    def _write_fd(self, fd: int, data: memoryview) -> None:
        ready = select.poll()
        ready.register(fd, select.POLLOUT)
        while data:
            wait_s = None if self.deadline is None else max(0.0, self.deadline - time.monotonic())
            if not ready.poll(None if wait_s is None else wait_s * 1000):
                return
            try:
                data = data[os.write(fd, data[: select.PIPE_BUF]) :]  # what fits a writable pipe without blocking
            except BlockingIOError:
                continue


class Output:
    """The output of all workers of one run.

    auto: rank 0 writes to a terminal itself, so that its progress bar works; other ranks, and all ranks where the
    output is not a terminal, are shown by lines with the rank in front. One worker alone is passed through.
    """

    def __init__(self, mode: Mode, workers: int, folder: str | os.PathLike[str] | None, *, inherit: bool) -> None:
        self.mode = mode
        self._workers = workers
        self._inherit = inherit
        self._sinks = {"stdout": Sink(sys.stdout, sys.__stdout__), "stderr": Sink(sys.stderr, sys.__stderr__)}
        self._lines: dict[tuple[int, str], Lines] = {}
        self._tails: dict[int, deque[bytes]] = {}
        self._begun: set[int] = set()  # ranks whose files this run has begun: a replacement's lines are appended
        self.folder = Path(folder or FOLDER) if mode == "files" else None
        if self.folder is not None:
            self.folder.mkdir(parents=True, exist_ok=True)

    def open(self, rank: int) -> dict[str, int | IO[bytes] | None]:
        """`stdin`, `stdout` and `stderr` to start the worker with."""
        stdin = None if self._inherit and rank == 0 else subprocess.DEVNULL
        if self.mode == "files":
            return {"stdin": stdin, "stdout": self._open_file(rank), "stderr": subprocess.STDOUT}
        through = {name: self._passes_through(rank, sink) for name, sink in self._sinks.items()}
        return {"stdin": stdin, **{name: None if through[name] else subprocess.PIPE for name in self._sinks}}

    def _passes_through(self, rank: int, sink: Sink) -> bool:
        if not self._inherit or self.mode == "prefix" or rank != 0:
            return False
        return self.mode == "rank0" or self._workers == 1 or sink.tty

    def path(self, rank: int) -> Path:
        """The file of `rank` in mode "files"."""
        assert self.folder is not None
        return self.folder / f"rank-{rank}.out"

    def _open_file(self, rank: int) -> IO[bytes]:
        if rank not in self._begun:
            self.path(rank).write_bytes(b"")
            self._begun.add(rank)
        return open(self.path(rank), "ab")

    def feed(self, rank: int, name: str, data: bytes) -> None:
        """Take what `rank` wrote to its `name` ("stdout" or "stderr")."""
        lines = self._lines.setdefault((rank, name), Lines())
        self._show(rank, name, lines.feed(data))

    def flush(self, rank: int) -> None:
        """Show unfinished lines: `rank` has ended."""
        for name in self._sinks:
            if (rank, name) in self._lines:
                self._show(rank, name, self._lines[rank, name].flush())

    def _show(self, rank: int, name: str, lines: list[bytes]) -> None:
        if not lines:
            return
        if self.mode == "files":  # of a worker elsewhere: those here write to their files themselves
            with self._open_file(rank) as file:
                file.write(b"".join(line + b"\n" for line in lines))
            return
        if self.mode == "rank0" and rank != 0:
            self._tails.setdefault(rank, deque(maxlen=TAIL_LINES)).extend(lines)
            return
        sink = self._sinks[name]
        prefix = b"" if self.mode == "rank0" else self._prefix(rank, sink.tty)
        sink.write(b"".join(prefix + line + b"\n" for line in lines))

    def _prefix(self, rank: int, colour: bool) -> bytes:
        text = f"[{rank:>{len(str(self._workers - 1))}}]"
        if colour and not os.environ.get("NO_COLOR"):
            text = f"\x1b[{_COLOURS[rank % len(_COLOURS)]}m{text}\x1b[0m"
        return text.encode() + b" "

    def unseen(self, rank: int) -> list[str]:
        """The last lines of `rank` that were kept from the screen."""
        lines = list(self._tails.get(rank, ()))
        if self.mode == "files" and self.path(rank).exists():
            with open(self.path(rank), "rb") as file:
                file.seek(max(0, os.fstat(file.fileno()).st_size - (64 << 10)))
                lines = file.read().splitlines()[-TAIL_LINES:]
        return [line.decode("utf-8", "backslashreplace") for line in lines]

    def say(self, text: str) -> None:
        """Show the launcher's own words on standard error."""
        with contextlib.suppress(OutputClosed):
            self._sinks["stderr"].write(text.encode("utf-8", "backslashreplace") + b"\n")

    @property
    def colour(self) -> bool:
        """Whether the launcher's own words may be coloured."""
        return self._sinks["stderr"].tty and not os.environ.get("NO_COLOR")

    def hurry(self, deadline: float) -> None:
        """From now on, do not wait for a slow reader beyond `deadline`."""
        for sink in self._sinks.values():
            sink.deadline = deadline
