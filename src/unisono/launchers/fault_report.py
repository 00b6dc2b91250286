"""The launcher's side of a fault script: which worker gets which faults, which have fired, and that all did."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from typing import Any

from unisono.launchers.failures import Failure, Outcome
from unisono.launchers.runtime.faults import Fault, check_script

__all__ = ["VARIABLE", "FaultReport", "read_faults"]

VARIABLE = "UNISONO_FAULTS"


def read_faults(given: str | None, workers: int, *, restarts: int = 0) -> list[Fault]:
    """The faults of a run: those given, or those that the environment asks for (None). Raises FaultError."""
    return check_script(os.environ.get(VARIABLE, "") if given is None else given, workers, restarts=restarts)


class FaultReport:
    """The faults of one run. Each fires once, even if an engine starts the workers again."""

    def __init__(self, faults: list[Fault]) -> None:
        self.faults = faults
        self.fired: list[int] = []  # by their places in the script, in the order in which the launcher heard of them

    def write_for(self, rank: int) -> str:
        """The faults of a worker that have not fired, as JSON by number; "" if there are none."""
        mine = {n: str(fault) for n, fault in enumerate(self.faults) if fault.is_for(rank) and n not in self.fired}
        return json.dumps(mine) if mine else ""

    def take(self, message: dict[str, Any]) -> None:
        """Note a fault that has fired, if a worker's message says so."""
        number = message.get("number")
        if message.get("kind") == "fault" and isinstance(number, int) and 0 <= number < len(self.faults):
            self.fired.append(number)

    def find_kill(self, rank: int) -> str:
        """The last fault that killed this rank; "" if none did."""
        kills = [self.faults[number] for number in self.fired if self.faults[number].kind == "kill"]
        return next((str(fault) for fault in reversed(kills) if fault.rank == rank), "")

    def judge(self, outcome: Outcome, last_step: Callable[[int], int | None]) -> Outcome:
        """The outcome of the run: a failure if a fault did not fire. `last_step(rank)` is how far a rank came."""
        left = [fault for number, fault in enumerate(self.faults) if number not in self.fired]
        if outcome.failure is not None or not left:
            return outcome
        many = f"{len(left)} of {len(self.faults)} faults" if len(self.faults) > 1 else "the fault"
        lines = [f"unisono: the program ended well, but {many} did not fire"]
        lines += [f"  {fault}: {_explain(fault, last_step(fault.rank or 0))}" for fault in left]
        failure = Failure(left[0].rank or 0, time.monotonic(), "fault", 1, message=lines[0])
        return Outcome(failure, "\n".join(lines), last_step(failure.rank))


def _explain(fault: Fault, last: int | None) -> str:
    rank = fault.rank or 0
    if last is None:
        return f"rank {rank} counted no step; steps are those of un.parallel"
    if last < fault.step:
        return f"rank {rank} came to step {last} only"
    if fault.kind == "full-disk":
        return f"nothing was written to a disk by un.save or an offload after step {fault.step}"
    if fault.phase == "save":
        return f"un.save wrote nothing after step {fault.step}"
    if fault.phase == "healing":
        return f"the world was not formed anew after step {fault.step}, with rank {rank} in it"
    if fault.phase == "exchange":
        return f"rank {rank} exchanged nothing from step {fault.step} on"
    return f"rank {rank} came to step {last}, but not through this moment"
