"""A relay between two ends of a connection: it keeps what has passed, and breaks connections if asked."""

from __future__ import annotations

import contextlib
import socket
import threading


class Relay:
    """Passes on what comes to its port, until it is cut; keeps what has passed."""

    def __init__(self, target: tuple[str, int]) -> None:
        self._target = target
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self.seen = bytearray()
        self.cuts = 0
        self.loses_answer = False  # the next that comes back is lost, and all connections are broken
        self._cut_at: int | None = None
        self._ends: list[socket.socket] = []
        self._lock = threading.Lock()
        threading.Thread(target=self._accept, daemon=True).start()

    def cut_after(self, nbytes: int) -> None:
        """Break all connections once so many bytes more have passed; what is on its way is lost."""
        self._cut_at = len(self.seen) + nbytes

    def close(self) -> None:
        self._listener.close()
        self._break()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            try:
                far = socket.create_connection(self._target)
            except OSError:
                near.close()
                continue
            with self._lock:
                self._ends += [near, far]
            for source, target, is_answer in ((near, far, False), (far, near, True)):
                threading.Thread(target=self._pass_on, args=(source, target, is_answer), daemon=True).start()

    def _pass_on(self, source: socket.socket, target: socket.socket, is_answer: bool) -> None:
        try:
            while data := source.recv(1 << 16):
                self.seen += data
                is_lost = is_answer and self.loses_answer
                if is_lost or (self._cut_at is not None and len(self.seen) >= self._cut_at):
                    self._cut_at, self.loses_answer = None, False
                    self.cuts += 1
                    self._break()
                    return
                target.sendall(data)
        except OSError:
            pass
        for end in (source, target):
            end.close()

    def _break(self) -> None:
        with self._lock:
            ends, self._ends = self._ends, []
        for end in ends:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
