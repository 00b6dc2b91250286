"""Workers started by mpirun: Open MPI, or MPICH and its kin. The ranks are MPI's own, so mpi4py agrees with us."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import ClassVar

from unisono.launchers.engines.engine import Engine, EngineError, ProcessStarted, Work, find_program, split_host

__all__ = ["Mpi"]

_INSTALL = "Debian and Ubuntu: apt-get install openmpi-bin; on a cluster: module load openmpi."
_ALLOCATIONS = ("SLURM_JOB_ID", "PBS_NODEFILE", "LSB_HOSTS", "PE_HOSTFILE")  # mpirun takes its hosts from these


@dataclass(frozen=True)
class Mpi(Engine):
    """`mpirun`, on this host, on `hosts` (["a:4", "b:4"]; the number is a host's slots), or in the allocation around.

    Arguments:
        hosts: names with slots; without them mpirun decides: this host, or the allocation it is in.
        options: further options of mpirun, such as ["--oversubscribe"].
        command: the program, where it has another name or place.
        python: the Python of the hosts, where it is not where this host has it.
    """

    name: ClassVar[str] = "mpirun"

    hosts: Sequence[str] = ()
    options: Sequence[str] = ()
    command: str = "mpirun"
    python: str | None = None

    def environment(self) -> str:
        return "Open MPI" if self._kind() == "Open MPI" else "MPI"

    def python_there(self) -> str | None:
        return self.python

    @property
    def local(self) -> bool:
        return not self.hosts and not self.options and not any(name in os.environ for name in _ALLOCATIONS)

    def hosts_to_reach(self) -> Sequence[str]:
        return [split_host(host)[0] for host in self.hosts]

    def check(self, workers: int) -> None:
        self._kind()

    def start(self, work: Work) -> ProcessStarted:
        return ProcessStarted([*self._command(work), *work.agent], work.env)

    def explain(self, words: str, workers: int) -> str:
        if "not enough slots" in words:
            return (
                f"There are fewer than {workers} slots: ask for fewer workers, name hosts with more "
                "(--hosts a:4,b:4), or allow more workers than cores (--options=--oversubscribe)"
            )
        if self.hosts and ("unable to reliably start" in words or "resolve hostname" in words):
            return (
                f"It could not start its daemon on each of {','.join(self.hosts)}: `ssh HOST mpirun --version` must "
                "work there without a password"
            )
        return ""

    def _kind(self) -> str:
        return _kind(find_program(self.command, advice=_INSTALL))

    def _command(self, work: Work) -> list[str]:
        program = find_program(self.command, advice=_INSTALL)
        if self._kind() != "Open MPI":
            hosts = ["-hosts", ",".join(self.hosts)] if self.hosts else []
            return [program, "-n", str(work.workers), *hosts, *self.options]
        command = [program, "-np", str(work.workers)]
        if work.elastic:
            command.append("--enable-recovery")  # else the loss of one agent is the end of all
        if os.geteuid() == 0:
            command.append("--allow-run-as-root")
        if self.hosts:
            command += ["--host", ",".join(self.hosts)]
        if not any("bind-to" in option or "map-by" in option for option in self.options):
            command += ["--bind-to", "none"]  # a worker has threads, and Open MPI would give it one core
        for name in work.env:  # only the names: what a command line holds can be seen by everyone
            command += ["-x", name]
        return [*command, *self.options]


@cache
def _kind(program: str) -> str:
    """ "Open MPI" or another, by the program's own words."""
    try:
        answer = subprocess.run([program, "--version"], capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise EngineError(f"`{program} --version` does not work: {error}") from error
    return "Open MPI" if "Open MPI" in answer.stdout or "open-mpi" in answer.stdout else "MPI"
