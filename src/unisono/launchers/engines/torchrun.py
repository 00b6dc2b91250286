"""Workers started by torchrun (torch.distributed.run) on this host, which starts all of them again after a failure.

torchrun 2.13 hands every attempt the same store, and gloo then meets the addresses of the attempt before. Here the
launcher hosts the store, and each attempt has one of its own.

torchrun's own store would listen on all interfaces, and torchrun unpickles what it finds there. Here it keeps its state
in a file in memory instead, which only processes of this user can open, and listens nowhere.
"""

from __future__ import annotations

import importlib.util
import os
import secrets
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from unisono.launchers.engines.engine import Engine, EngineError, ProcessStarted, Work
from unisono.launchers.runtime.files import anonymous_file

__all__ = ["Torchrun", "refused_options"]


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
        if taken := [option for option in self.options if option.startswith(("--standalone", "--rdzv"))]:
            raise ValueError(
                f"torchrun: got the option {taken[0]}; how its processes meet is given here, so that no store of "
                "torchrun's is open to the network (docs/security.md)"
            )
        if importlib.util.find_spec("torch") is None:
            raise EngineError("torchrun is a part of PyTorch, which is not installed here: pip install torch")

    def start(self, work: Work) -> ProcessStarted:
        state = anonymous_file("unisono-rendezvous")
        # Where there is no /proc, torchrun makes a file of its own in the folder for temporary ones.
        there = [f"--rdzv-endpoint=/proc/{os.getpid()}/fd/{state}"] if sys.platform == "linux" else []
        command = [
            *(sys.executable, "-m", "torch.distributed.run"),
            *(f"--nproc-per-node={work.workers}", f"--max-restarts={self.max_restarts}", "--monitor-interval=0.1"),
            *self.options,
            *("--rdzv-backend=c10d", "--rdzv-conf=store_type=file", *there),
            *(f"--rdzv-id={secrets.token_hex(8)}", "--local-addr=127.0.0.1", "--no-python"),
            *work.agent,
        ]
        # Without it torchrun opens a store for the workers too, which have the launcher's.
        env = {**work.env, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        return ProcessStarted(command, env, keep=[state])

    def explain(self, words: str, workers: int) -> str:
        return refused_options(words)


def refused_options(words: str) -> str:
    """The line in which torchrun says that it does not know an option; "" where there is none."""
    lines = [line for line in words.splitlines() if "error: " in line and "argument" in line]
    return f"torchrun does not take these options: {lines[-1].partition('error: ')[2]}" if lines else ""
