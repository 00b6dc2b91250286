"""What a run is asked to do: the program or function, how many workers, and what becomes of their output."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from unisono.launchers.output import Mode
from unisono.launchers.runtime.run_folder import RunFolder
from unisono.launchers.runtime.status import BEAT_S
from unisono.launchers.runtime.variables import may_share_memory

__all__ = ["Adapt", "ElasticSettings", "Job", "StartMethod", "TimedOut", "check_elastic_on_one_host"]

# fresh: a new interpreter each. fork: from this program's own fork server. warm: from the user's (see forks.py).
StartMethod = Literal["fresh", "fork", "warm"]


class TimedOut(Exception):
    """The time given to the run is over; the text says what the workers were doing."""


@dataclass(frozen=True)
class Adapt:
    """How the number of workers is found by measuring; see scaling.py."""

    target: float | None = None  # steps a second that are asked for; None: as many workers as pay for themselves
    window_s: float = 3.0  # a decision takes at least three windows


@dataclass(frozen=True)
class ElasticSettings:
    """Workers that are lost are replaced, and their number may change while they train."""

    least: int  # with fewer, those left wait for others
    most: int
    patience_s: float = 60.0  # how long they wait; then they save and leave
    heartbeat_s: float = 10.0  # a worker that stands still for longer is replaced
    stuck_s: float = 600.0  # so is one that others have waited for so long
    adapt: Adapt | None = None  # None: the number is changed by `unisono scale` alone
    later: int = 0  # of `most`: places that the engine does not fill, for hosts that come by `unisono join`

    def __post_init__(self) -> None:
        if not self.heartbeat_s >= 2 * BEAT_S or not self.stuck_s > 0:
            raise ValueError(
                f"got a heartbeat of {self.heartbeat_s:g} s and a deadline of {self.stuck_s:g} s: workers are heard of "
                f"every {BEAT_S:g} s; expected a heartbeat of at least {2 * BEAT_S:g} s, and a deadline above 0"
            )
        if not 0 <= self.later <= self.most - self.least:
            raise ValueError(
                f"got {self.later} places for hosts that join later, of {self.most}: at least {self.least} workers "
                f"must start with the run; expected 0 to {self.most - self.least}, or a larger MAX (-n MIN:MAX)"
            )

    def describe_shortage(self, left: int) -> str:
        """Why the `left` workers that remain have to leave."""
        return f"only {left} of at least {self.least} workers remain, and no other joined within {self.patience_s:g} s"


def check_elastic_on_one_host() -> None:
    """ValueError if workers that come and go could not meet."""
    if not may_share_memory():
        raise ValueError("in an elastic run on one host, workers meet in shared memory: unset UNISONO_SHARED_MEMORY")


@dataclass(frozen=True)
class Job:
    """What to start, and how."""

    program: Sequence[str]  # arguments of worker/program.py: script and its arguments, or -m module ..., or --function
    workers: int
    threads: int | None = None
    output: Mode = "auto"
    output_dir: str | os.PathLike[str] | None = None
    inherit: bool = True  # rank 0 may use this process's own standard streams
    timeout_s: float | None = None
    payload_fd: int | None = None
    result_fds: Sequence[int] = ()
    start: StartMethod = "fresh"
    faults: str | None = None  # a fault script; None: that of the environment, if any
    elastic: ElasticSettings | None = None  # None: a worker that is lost ends the run
    debugpy: int | None = None  # rank 0's port for a debugger of the debugpy kind, which each worker waits for
    pdb: bool = False  # where a worker raises, stop all and open the debugger's prompt
    record: RunFolder | None = None  # where the run is recorded
    grace_s: float = 25.0  # for workers that save and leave after SIGTERM; Slurm and Kubernetes give 30 s in all

    @property
    def places(self) -> int:
        """How many workers there may be at once."""
        return self.workers if self.elastic is None else self.elastic.most

    @property
    def engine_places(self) -> int:
        """How many of them the engine fills; the others are for hosts that come later."""
        return self.places if self.elastic is None else self.places - self.elastic.later

    def describe_program(self) -> str:
        """The program and its arguments, for people."""
        return " ".join(self.program)[:200]

    def note(self, kind: str, **values: Any) -> None:
        """Enter an event into the run's record, if it has one."""
        if self.record is not None:
            self.record.event(kind, **values)

    @property
    def restarts(self) -> int:
        """How often a worker may be started again on this host."""
        return 0 if self.elastic is None else 1_000_000
