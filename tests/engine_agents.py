"""Agents that a test's own engine has started on this host: see unisono.launchers.engines.engine.Started."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Sequence


class Agents:
    """Their processes. `status`: what the engine is to say of its end, instead of theirs."""

    def __init__(self, processes: list[subprocess.Popen[bytes]]) -> None:
        self.processes = processes
        self.status: int | None = None

    def poll(self) -> int | None:
        if self.status is not None:
            return self.status
        found = [process.poll() for process in self.processes]
        return None if None in found else max(abs(status or 0) for status in found)

    def stop(self, signum: signal.Signals) -> None:
        for process in self.processes:
            process.send_signal(signum)

    def words(self) -> str:
        return "the engine's own words"

    def sessions(self) -> Sequence[int]:
        return [process.pid for process in self.processes]

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()
