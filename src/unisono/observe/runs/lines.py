"""Where a worker's lines go: into the run's folder, or over the report pipe to the launcher that has it."""

from __future__ import annotations

import json
import os
import select
import sys
from pathlib import Path
from typing import Protocol

from unisono.launchers.runtime.run_folder import FOLDER, FOLDER_ID, append, name_rank_file, read_run

__all__ = ["FileWriter", "LineWriter", "PipeWriter", "find_writer"]

_PIECE = 1_900  # characters of a message: as JSON in JSON at most twice that, and a pipe takes 4 KiB in one piece
_MOST_HELD = 4 << 20  # characters that wait for a launcher that does not read


class LineWriter(Protocol):
    """Writes whole lines of a worker's record; never raises."""

    def write(self, text: str, *, last: bool = False) -> None: ...


class FileWriter:
    """A file of the folder. Opened for each piece: no other process inherits it."""

    def __init__(self, folder: Path, place: int) -> None:
        self.path = folder / name_rank_file(place)
        self.is_lost = False

    def write(self, text: str, *, last: bool = False) -> None:
        """Append it; where that fails, it is said, and nothing more is written."""
        if self.is_lost:
            return
        try:
            if not self.path.exists():
                self.path.parent.mkdir(parents=True, exist_ok=True)
            append(self.path, text.encode())
        except OSError as error:
            self.is_lost = True
            why = (error.strerror or str(error)).rstrip(".")
            print(
                f"unisono: this worker is no longer recorded: {self.path}: {why}; training goes on",
                file=sys.stderr,
                flush=True,
            )


class PipeWriter:
    """The pipe of error reports, whose other end is the launcher's, or its agent's on this host."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._held = ""

    def write(self, text: str, *, last: bool = False) -> None:
        """Send what the pipe takes now; the rest waits for the next call, so that training does not wait for it."""
        self._held += text
        while self._held and (last or self._is_free()):
            piece, self._held = self._held[:_PIECE], self._held[_PIECE:]
            line = json.dumps({"kind": "lines", "text": piece}) + "\n"
            try:
                os.write(self._fd, line.encode())
            except OSError:  # the launcher is gone, and this process is about to go
                self._held = ""
                return
        if len(self._held) > _MOST_HELD:  # the line that it was cut in is counted as unreadable
            self._held = ""

    def _is_free(self) -> bool:
        return bool(select.select([], [self._fd], [], 0.0)[1])


def find_writer(place: int) -> LineWriter | None:
    """Where the worker in `place` writes, as the environment says; None: nobody records this run."""
    folder = os.environ.get(FOLDER, "")
    if not folder:
        return None
    path, wanted = Path(folder), os.environ.get(FOLDER_ID, "")
    if not wanted or (read_run(path) or {}).get("id") == wanted:
        return FileWriter(path, place)
    report = os.environ.get("UNISONO_REPORT_FD", "")
    return PipeWriter(int(report)) if report.isdigit() else None
