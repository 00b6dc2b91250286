"""A task for SkyPilot, which rents the machines: `unisono run --on skypilot --print -n 4 train.py >task.yaml`."""

from __future__ import annotations

import os
import secrets
import shlex
from dataclasses import dataclass
from typing import ClassVar

from unisono.launchers.engines.kubernetes import KEPT, PORT, Manifests, name_job, write_yaml
from unisono.launchers.job import Job

__all__ = ["Skypilot"]


@dataclass(frozen=True)
class Skypilot(Manifests):
    """A SkyPilot task: one worker per machine, started again where spot machines are taken away.

    Arguments:
        cpus: cores that a machine has at least.
        accelerators: GPUs of a machine, as SkyPilot writes them: A100:1.
    """

    name: ClassVar[str] = "skypilot"

    cpus: float = 1
    accelerators: str = ""

    def _hand_over(self) -> str:
        return "`sky jobs launch`, in a file"

    def manifest(self, job: Job) -> str:
        if job.elastic is not None:
            raise ValueError("machines are as many as the task says: give -n MAX")
        resources = {"cpus": f"{self.cpus:g}+", "use_spot": True} | (
            {"accelerators": self.accelerators} if self.accelerators else {}
        )
        settings = {key: os.environ[key] for key in KEPT if key in os.environ}
        lines = [
            f"export RANK=$SKYPILOT_NODE_RANK WORLD_SIZE=$SKYPILOT_NUM_NODES MASTER_PORT={PORT}",
            'export MASTER_ADDR=$(echo "$SKYPILOT_NODE_IPS" | head -n 1)',
            f"exec {shlex.join(['python', *job.program])}",
        ]
        task = {
            "name": name_job(job),
            "num_nodes": job.workers,
            "resources": resources,
            "workdir": ".",
            "envs": settings,
            "secrets": {"UNISONO_SECRET": secrets.token_hex(32)},
            "setup": "pip install ./unisono-*.whl",  # on an index the name could be a stranger's
            "run": "\n".join(lines),
        }
        return write_yaml({key: value for key, value in task.items() if value != {}})
