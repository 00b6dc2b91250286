"""A Slurm cluster on this host: two slurmd, slurmctld and munged of our own, in a folder of the test's."""

from __future__ import annotations

import os
import random
import secrets
import shutil
import socket
import subprocess
import time
from collections.abc import Callable
from itertools import islice
from pathlib import Path

CONF = """\
ClusterName=unisono
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
ReturnToService=2
SchedulerType=sched/backfill
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
SlurmctldParameters=enable_configless
InactiveLimit=0
KillWait=2
NodeName=n1 NodeHostname=localhost NodeAddr=127.0.0.1 Port={ports[1]} CPUs=1 RealMemory=1000 State=UNKNOWN
NodeName=n2 NodeHostname=localhost NodeAddr=127.0.0.1 Port={ports[2]} CPUs=1 RealMemory=1000 State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def why_not() -> str:
    """Empty where a cluster can be started, else the reason."""
    if os.geteuid() != 0:
        return "a Slurm cluster of our own needs root"
    missing = [name for name in ("slurmctld", "slurmd", "srun", "munged") if shutil.which(name) is None]
    return f"{', '.join(missing)} not installed: apt-get install slurm-wlm munge" if missing else ""


class SlurmCluster:
    """Started by `start`, gone after `stop`: every process was started by this object and is ended by its id."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.conf = folder / "slurm.conf"
        self.env = {**os.environ, "SLURM_CONF": str(self.conf)}
        self._processes: list[subprocess.Popen[bytes]] = []

    def start(self) -> None:
        self.folder.chmod(0o755)
        ports = _free_ports(3)
        (self.folder / "state").mkdir()
        for node in ("n1", "n2"):
            (self.folder / f"spool-{node}").mkdir()
        self.conf.write_text(CONF.format(ports=ports, folder=self.folder))
        key = self.folder / "munge.key"
        key.write_bytes(secrets.token_bytes(128))
        key.chmod(0o600)
        self._run(
            "munged", "--foreground", f"--key-file={key}", f"--socket={self.folder}/munge.socket", "--force",
            f"--pid-file={self.folder}/munged.pid", f"--log-file={self.folder}/munged.log",
            f"--seed-file={self.folder}/munged.seed",
        )  # fmt: skip
        self._wait(lambda: (self.folder / "munge.socket").exists(), "munged")
        self._run("slurmctld", "-D", "-f", str(self.conf))
        for node in ("n1", "n2"):
            self._run("slurmd", "-D", "-N", node, "-f", str(self.conf))
        self._wait(self._idle, "the nodes")

    def _run(self, *command: str) -> None:
        log = (self.folder / f"{command[0]}-{len(self._processes)}.out").open("wb")
        with log:
            self._processes.append(subprocess.Popen(command, env=self.env, stdout=log, stderr=log))

    def _idle(self) -> bool:
        told = subprocess.run(["sinfo", "-h", "-o", "%T %D"], env=self.env, capture_output=True, text=True).stdout
        return told.strip() == "idle 2"

    def _wait(self, ready: Callable[[], bool], what: str, timeout_s: float = 60) -> None:
        deadline = time.monotonic() + timeout_s
        while not ready():
            dead = [process.args for process in self._processes if process.poll() is not None]
            if dead or time.monotonic() > deadline:
                raise RuntimeError(f"{what} did not come up ({dead or 'too late'}): {self.logs()}")
            time.sleep(0.05)

    def logs(self) -> str:
        files = [*self.folder.glob("*.log"), *self.folder.glob("*.out")]
        return "\n".join(f"-- {file.name}\n{file.read_text(errors='replace')[-1500:]}" for file in files)

    def stop(self) -> None:
        for process in reversed(self._processes):
            process.terminate()
        for process in self._processes:
            _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _free_ports(count: int) -> list[int]:
    """Below those that the system gives to connections: none of them is taken before the daemons listen."""
    return list(islice(filter(_is_free, random.SystemRandom().sample(range(20_000, 32_000), 1000)), count))


def _is_free(port: int) -> bool:
    try:
        socket.create_server(("", port)).close()
    except OSError:
        return False
    return True
