"""Workers started by Slurm's srun, inside an allocation or in one that srun asks for; and job scripts for sbatch."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from unisono.launchers.engines.engine import Engine, EngineError, ProcessStarted, Work, find_program

__all__ = ["Slurm", "job_script", "submit"]

_INSTALL = "Run it on a node of the Slurm cluster (login or compute), where Slurm's commands are."
_TOO_SMALL = (
    "More processors requested than permitted",
    "Requested node configuration is not available",
    "Unable to create step",
    "Unable to allocate resources",
    "Node count specification invalid",
)
_UNREACHABLE = ("Unable to contact slurm controller", "establish configuration", "establish a configuration")


@dataclass(frozen=True)
class Slurm(Engine):
    """`srun`, in the allocation this runs in (sbatch, salloc), else in one that srun asks for.

    Arguments:
        options: further options of srun, such as ["--gpus-per-task=1", "--partition=gpu"].
        hosts: nodes to use.
        wait_s: how long srun may wait for free nodes.
        python: the Python of the nodes, where it is not where this host has it.
    """

    name: ClassVar[str] = "srun"

    options: Sequence[str] = ()
    hosts: Sequence[str] = ()
    wait_s: int = 30
    python: str | None = None

    def environment(self) -> str:
        return "Slurm"

    def python_there(self) -> str | None:
        return self.python

    @property
    def start_s(self) -> float:
        return self.wait_s + 60.0

    def hosts_to_reach(self) -> Sequence[str]:
        return self.hosts

    def check(self, workers: int) -> None:
        find_program("srun", advice=_INSTALL)
        allocated = os.environ.get("SLURM_NTASKS", "")
        if "SLURM_JOB_ID" in os.environ and allocated.isdigit() and int(allocated) < workers and not self.options:
            raise EngineError(
                f"this allocation (job {os.environ['SLURM_JOB_ID']}) is for {allocated} tasks, not {workers} workers: "
                f"ask for fewer workers, or for an allocation with --ntasks={workers}"
            )
        if "SLURM_JOB_ID" not in os.environ:
            self._ask_for_room(workers)

    def _ask_for_room(self, workers: int) -> None:
        """Whether the cluster is there, and has as many CPUs in all: srun itself would wait."""
        command = [find_program("sinfo", advice=_INSTALL), "--noheader", "--format=%C"]
        try:
            answer = subprocess.run(command, capture_output=True, text=True, timeout=30)
        except subprocess.TimeoutExpired:
            raise EngineError(f"`sinfo` had no answer after 30 s. {_no_controller()}") from None
        if answer.returncode:
            words = "; ".join(line.strip() for line in answer.stderr.splitlines())
            raise EngineError(f"`sinfo` failed. {self.explain(answer.stderr, workers)}\nIt said: {words}")
        cpus = sum(int(line.rpartition("/")[2]) for line in answer.stdout.split())  # allocated/idle/other/total
        if cpus < workers:
            raise EngineError(
                f"the cluster has {cpus} CPUs in all, too few for {workers} workers (`sinfo` shows them): ask for fewer"
            )

    def start(self, work: Work) -> ProcessStarted:
        command = [
            find_program("srun", advice=_INSTALL),
            f"--ntasks={work.workers}",
            f"--immediate={self.wait_s}",
            "--export=ALL",
            "--kill-on-bad-exit=0",  # the launcher knows which worker failed first, and stops the others
            "--input=none",
        ]
        if work.elastic:
            command.append("--no-kill")  # the loss of a node is not the end of the others
        if self.hosts:
            command.append(f"--nodelist={','.join(self.hosts)}")
        cpus = os.environ.get("SLURM_CPUS_PER_TASK")
        if cpus and not any(option.startswith(("-c", "--cpus-per-task")) for option in self.options):
            command.append(f"--cpus-per-task={cpus}")  # srun does not take it over from the allocation since 22.05
        return ProcessStarted([*command, *self.options, *work.agent], work.env)

    def explain(self, words: str, workers: int) -> str:
        if any(text in words for text in _UNREACHABLE):
            return _no_controller()
        if any(text in words for text in _TOO_SMALL):
            return f"There is no room for {workers} workers: `sinfo` shows the nodes, `squeue` who has them"
        return ""


def _no_controller() -> str:
    where = os.environ.get("SLURM_CONF", "/etc/slurm/slurm.conf")
    if not os.path.exists(where):
        return f"There is no {where} here: run it on a node of the cluster, or name that file with SLURM_CONF"
    with open(where, encoding="utf-8", errors="replace") as file:
        lines = [line.strip() for line in file if line.startswith(("SlurmctldHost", "SlurmctldPort"))]
    found = f": {', '.join(lines)}" if lines else ""
    return f"Slurm's controller does not answer (its address is in {where}{found}); `scontrol ping` asks it"


def job_script(
    engine: Slurm,
    program: Sequence[str],
    workers: int,
    *,
    least: int | None = None,
    run_options: Sequence[str] = (),
) -> str:
    """A script for sbatch that runs the program in `workers` tasks; `run_options` are further ones of `unisono run`.

    `least`: workers may come and go, and there are at least so many.

    >>> print(job_script(Slurm(options=["--time=10:00"]), ["train.py", "--lr", "0.1"], 4).splitlines()[1])
    #SBATCH --job-name=train
    """
    name = Path(program[1] if program[0] == "-m" else program[0]).stem
    lines = [f"--job-name={name}", f"--ntasks={workers}", f"--output={name}-%j.out", *engine.options]
    if engine.hosts:
        lines.append(f"--nodelist={','.join(engine.hosts)}")
    python = engine.python or sys.executable
    count = str(workers)
    if least is not None:
        lines.append("--no-kill")
        count = f"{least}:{workers}"
    command = [python, "-m", "unisono", "run", "--on", "slurm", "-n", count, *run_options, *program]
    return "\n".join(
        [
            "#!/bin/bash",
            *(f"#SBATCH {line}" for line in lines),
            "",
            "# One launcher on the first node; it starts the workers with srun and ends with the first error's status.",
            f"cd {shlex.quote(os.getcwd())}",
            f"exec {shlex.join(command)}",
            "",
        ]
    )


def submit(script: str) -> str:
    """Hand a script to sbatch and return what it says, such as "Submitted batch job 17"."""
    program = find_program("sbatch", advice=_INSTALL)
    done = subprocess.run([program], input=script, capture_output=True, text=True)
    if done.returncode:
        engine, words = Slurm(), done.stderr.strip()
        advice = engine.explain(words, 0) if any(text in words for text in _UNREACHABLE) else ""
        raise EngineError(f"sbatch refused the script (exit status {done.returncode}). {advice}\nIt said: {words}")
    return done.stdout.strip()
