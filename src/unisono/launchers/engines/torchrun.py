"""Workers started by torchrun (torch.distributed.run) on this host, which starts all of them again after a failure.

torchrun 2.13 hands every attempt the same store, and gloo then meets the addresses of the attempt before. Here the
launcher hosts the store, and each attempt has one of its own.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from unisono.launchers.engines.engine import Engine, EngineError, ProcessStarted, Work

__all__ = ["Torchrun", "refused_options", "torchrun_command"]


@dataclass(frozen=True)
class Torchrun(Engine):
    """torchrun on this host.

    Arguments:
        max_restarts: how often all workers are started again after one has failed.
        options: further options of torchrun.
    """

    name: ClassVar[str] = "torchrun"

    max_restarts: int = 0
    options: Sequence[str] = ()

    def environment(self) -> str:
        return "torchrun"

    @property
    def local(self) -> bool:
        return True

    @property
    def restarts(self) -> int:
        return self.max_restarts

    def check(self, workers: int) -> None:
        if self.max_restarts < 0:
            raise ValueError(f"torchrun: got max_restarts={self.max_restarts}; expected a whole number from 0 up")
        if importlib.util.find_spec("torch") is None:
            raise EngineError("torchrun is a part of PyTorch, which is not installed here: pip install torch")

    def start(self, work: Work) -> ProcessStarted:
        command = torchrun_command(sys.executable, work.workers, self.max_restarts, self.options)
        return ProcessStarted([*command, "--standalone", "--no-python", *work.agent], work.env)

    def explain(self, words: str, workers: int) -> str:
        return refused_options(words)


def refused_options(words: str) -> str:
    """The line in which torchrun says that it does not know an option; "" where there is none."""
    lines = [line for line in words.splitlines() if "error: " in line and "argument" in line]
    return f"torchrun does not take these options: {lines[-1].partition('error: ')[2]}" if lines else ""


def torchrun_command(python: str, workers: int, max_restarts: int, options: Sequence[str]) -> list[str]:
    """The part of the command line that one host and many have in common."""
    return [
        python,
        "-m",
        "torch.distributed.run",
        f"--nproc-per-node={workers}",
        f"--max-restarts={max_restarts}",
        "--monitor-interval=0.1",
        *options,
    ]
