"""A worker of an elastic run, towards its launcher: which generation of the world it is in, and the way to the next.

A world of workers that come and go has generations. Whoever finds that a peer is lost, or that the launcher calls all
to another generation (status.py), comes to the launcher and waits. When every worker that lives has come, the launcher
gives each its place in the next generation, and the memory in which they meet.

The connection is a socket that the worker inherited: no other process can write to it. On one host the launcher has
its other end. Over several hosts the worker's agent has it, and passes all on; the launcher then also says when a
generation is over, because the connections between hosts do not tell everybody.
"""

from __future__ import annotations

import os
import queue
import struct
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from unisono.launchers.runtime import status
from unisono.launchers.runtime.local_channel import LocalChannel

__all__ = [
    "JOINING",
    "LOG_VARIABLE",
    "OVER_HOSTS",
    "VARIABLE",
    "Assignment",
    "Dismissed",
    "HostsMembership",
    "Membership",
    "ResultLog",
    "cut_entries",
    "find_membership",
    "join_entries",
]

VARIABLE = "UNISONO_CONTROL_FD"
LOG_VARIABLE = "UNISONO_RESULTS_FD"
JOINING = "UNISONO_JOINING"
OVER_HOSTS = "UNISONO_OVER_HOSTS"


class Dismissed(SystemExit):
    """Ends a worker's program with status 0: the run goes on with fewer workers."""


@dataclass(frozen=True)
class Assignment:
    """A place in a generation. `page_fd`: the memory in which its ranks meet; -1 for a world of one, or over hosts."""

    generation: int
    rank: int
    size: int
    pids: tuple[int, ...] = ()
    page_fd: int = -1


class ResultLog:
    """Results that workers which come later are given, in a file without a name that all workers of the run inherit.

    Only rank 0 writes. An entry is its length and its bytes; the number of entries, at the beginning, is written last.
    """

    _COUNT = struct.Struct("<qq")  # entries, bytes

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def read(self) -> list[bytes]:
        """All entries."""
        return cut_entries(self.read_bytes(0))[0]

    def write(self, entries: list[bytes]) -> None:
        """Append those of `entries`, which are all so far, that the file does not have yet."""
        count, end = self._read_head()
        for entry in entries[count:]:
            data = join_entries([entry])
            os.pwrite(self._fd, data, self._COUNT.size + end)
            count, end = count + 1, end + len(data)
            os.pwrite(self._fd, self._COUNT.pack(count, end), 0)

    def rewrite(self, entries: list[bytes]) -> None:
        """Replace the entries."""
        if self.read() != entries[: self._read_head()[0]]:
            os.pwrite(self._fd, self._COUNT.pack(0, 0), 0)
        self.write(entries)

    def read_mark(self) -> tuple[int, ...]:
        """A value that changes whenever the file does."""
        return (os.fstat(self._fd).st_mtime_ns, *self._read_head())

    def read_bytes(self, start: int) -> bytes:
        """The entries' bytes from byte `start` on."""
        _, end = self._read_head()
        parts: list[bytes] = []
        while start < end and (part := os.pread(self._fd, end - start, self._COUNT.size + start)):
            parts.append(part)
            start += len(part)
        return b"".join(parts)

    def _read_head(self) -> tuple[int, int]:
        head = os.pread(self._fd, self._COUNT.size, 0)
        return self._COUNT.unpack(head) if len(head) == self._COUNT.size else (0, 0)


def join_entries(entries: list[bytes]) -> bytes:
    """Entries as a ResultLog's file holds them."""
    return b"".join(struct.pack("<q", len(entry)) + entry for entry in entries)


def cut_entries(data: bytes) -> tuple[list[bytes], bytes]:
    """Split a ResultLog's bytes into the entries that are complete, and the rest."""
    found, at = [], 0
    while len(data) >= at + 8 and len(data) >= at + 8 + (length := int(struct.unpack_from("<q", data, at)[0])):
        found.append(data[at + 8 : at + 8 + length])
        at += 8 + length
    return found, data[at:]


class Membership:
    """The worker's end of the connection, and its heartbeat."""

    def __init__(self, fd: int, log_fd: int, *, joining: bool) -> None:
        self._channel = LocalChannel(fd)
        self.log = ResultLog(log_fd)
        self.generation = 0
        self.joining = joining  # this process was started into a run that goes on without it
        threading.Thread(target=_beat, name="unisono heartbeat", daemon=True).start()

    @property
    def is_regroup_requested(self) -> bool:
        """Whether the launcher has asked all workers to form another generation."""
        return status.read_regroup_request() > self.generation

    def join_generation(self, *, is_open: bool = True) -> Assignment:
        """Wait for the next generation; Dismissed where that goes on without this worker.

        `is_open`: another worker may begin where this one is.
        """
        self._channel.send({"kind": "come", "generation": self.generation, "open": is_open})
        message, fds = self._await_answer()
        if message is None:
            raise Dismissed("the launcher has ended")
        if message["kind"] != "go":
            raise Dismissed(0)
        self.generation, self.joining = message["generation"], False
        page_fd = fds[0] if fds else -1
        return Assignment(
            self.generation,
            message["rank"],
            message["size"],
            tuple(message["pids"]),
            page_fd,
        )

    def _await_answer(self) -> tuple[dict[str, Any] | None, list[int]]:
        return self._channel.receive()

    def acknowledge(self) -> None:
        """Tell the launcher that this worker trains in its generation."""
        self._channel.send({"kind": "settled", "generation": self.generation})


class HostsMembership(Membership):
    """A membership over several hosts: a thread listens for the end of a generation."""

    def __init__(self, fd: int, log_fd: int, *, joining: bool) -> None:
        super().__init__(fd, log_fd, joining=joining)
        self._answers: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._over, self._why = -1, ""  # the last generation that is over
        self._watched: tuple[int, Callable[[str], None]] | None = None
        threading.Thread(target=self._listen, name="unisono membership", daemon=True).start()

    def watch(self, generation: int, end: Callable[[str], None]) -> None:
        """Have `end` called with the reason when that generation is over; at once if it is over already."""
        with self._lock:
            self._watched = generation, end
        self._tell()

    def _await_answer(self) -> tuple[dict[str, Any] | None, list[int]]:
        return self._answers.get(), []

    def _listen(self) -> None:
        while True:
            message, _ = self._channel.receive()
            if message is None or message["kind"] != "over":
                self._answers.put(message)
                if message is None:
                    return
                continue
            with self._lock:
                self._over, self._why = message["generation"], message["why"]
            self._tell()

    def _tell(self) -> None:
        with self._lock:
            watched = self._watched
            if watched is None or watched[0] > self._over:
                return
            self._watched = None
        watched[1](self._why)


def find_membership() -> Membership | None:
    """The membership of this process; None if its run is not elastic, or a worker has started it."""
    fd, log_fd = os.environ.pop(VARIABLE, ""), os.environ.pop(LOG_VARIABLE, "")
    if not fd or not status.is_attached():
        return None
    kind = HostsMembership if os.environ.pop(OVER_HOSTS, "") else Membership
    return kind(int(fd), int(log_fd), joining=JOINING in os.environ)


def _beat() -> None:
    never = threading.Event()
    while True:
        status.beat()
        never.wait(status.BEAT_S)
