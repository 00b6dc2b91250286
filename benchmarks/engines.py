"""The same program on every engine that is installed here: what it costs to start there, and what a step costs.

2 workers of one thread on this host, an MLP of 25 M parameters, gradients averaged in every step. Beside every run on
an engine there is a local run; the two take turns of some steps, and all processes of the one whose turn it is not,
those of the engine with them, are stopped (SIGSTOP). An engine that serves many jobs (Slurm, sshd) runs before the
first; Ray and Spark are started by the command, as `unisono run --on ray` does it.

Keys, by engine (torchrun, mpi, slurm, ssh, ray, spark; one that is not there is in `skipped`, with the reason):
  first_step_s_ENGINE       from the command to the end of the first step, median of the rounds; first_step_s_local.
  per_step_overhead_ENGINE  a step over one of the local run beside it: median of the rounds' ratios, each of medians.
  step_s_local              a step of a local run.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import secrets
import select
import shlex
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "engines"))

from measure import finish

PROGRAM = """\
import json, os, sys, time
import torch, unisono as un

folder = sys.argv[1]
world = un.join(device="cpu")
torch.manual_seed(0)
layers = [m for _ in range(6) for m in (torch.nn.Linear(2048, 2048), torch.nn.ReLU())]
model = torch.nn.Sequential(*layers[:-1])
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
un.parallel(model, optimizer)
x, y = torch.randn(8, 2048), torch.randn(8, 2048)

def step():
    optimizer.zero_grad()
    torch.nn.functional.mse_loss(model(x), y).backward()
    optimizer.step()
    return time.time()

def tell(**found):
    if world.rank == 0:
        with open(f"{folder}/told", "w") as file:
            print(json.dumps(found), file=file)

first = step()
how = {"workers": world.size, "transport": world.transport.name, "threads": torch.get_num_threads()}
tell(first=first, how=how)
with open(f"{folder}/turn-{world.rank}") as turns:
    while steps := int(turns.readline() or 0):
        tell(ends=[step() for _ in range(steps)])
"""
SAME = {"workers": 2, "transport": "shared memory", "threads": 1}  # on every engine
DROPPED = 2  # steps at the beginning of a turn


@dataclass
class Engine:
    """How the program is started on one engine: the options of `unisono run`, and variables."""

    options: Sequence[str] = ()
    env: dict[str, str] = field(default_factory=dict)


class Missing(Exception):
    """This engine is not here; the text says what is missing."""


# -- the engines -----------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def torchrun() -> Iterator[Engine]:
    yield Engine(["--on", "torchrun"])


@contextlib.contextmanager
def mpi() -> Iterator[Engine]:
    if shutil.which("mpirun") is None:
        raise Missing("mpirun not installed: apt-get install openmpi-bin")
    yield Engine(["--on", "mpi"])


@contextlib.contextmanager
def slurm() -> Iterator[Engine]:
    """A cluster of our own: two nodes of one CPU, both on this host."""
    from slurm_cluster import SlurmCluster, why_not

    if reason := why_not():
        raise Missing(reason)
    with tempfile.TemporaryDirectory(prefix="slurm-") as folder:
        cluster = SlurmCluster(Path(folder))
        try:
            cluster.start()
            yield Engine(["--on", "slurm"], {"SLURM_CONF": str(cluster.conf)})
        finally:
            cluster.stop()


@contextlib.contextmanager
def ssh() -> Iterator[Engine]:
    """An sshd of our own on this host, which both workers are on."""
    from ssh_hosts import CONFIG

    if missing := [name for name in ("ssh", "ssh-keygen", "/usr/sbin/sshd") if shutil.which(name) is None]:
        raise Missing(f"{', '.join(missing)} not installed: apt-get install openssh-client openssh-server")
    if os.geteuid() != 0:
        raise Missing("an sshd of our own needs root")
    with tempfile.TemporaryDirectory(prefix="ssh-") as folder:
        for name in ("host_key", "user_key"):
            subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", f"{folder}/{name}"], check=True)
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        Path(folder, "sshd_config").write_text(
            CONFIG.format(port=port, folder=folder) + "ListenAddress 127.0.0.1\n", encoding="ascii"
        )
        os.makedirs("/run/sshd", mode=0o755, exist_ok=True)
        command = ["/usr/sbin/sshd", "-D", "-e", "-f", f"{folder}/sshd_config"]
        daemon = subprocess.Popen(command, stderr=subprocess.DEVNULL)
        try:
            wait_for("127.0.0.1", port)
            options = f"-p {port} -i {folder}/user_key -o UserKnownHostsFile={folder}/known"
            options += " -o StrictHostKeyChecking=accept-new"
            yield Engine(["--on", "ssh", "--hosts", "127.0.0.1:2", f"--options={options}"])
        finally:
            daemon.terminate()
            daemon.wait()


@contextlib.contextmanager
def ray() -> Iterator[Engine]:
    if importlib.util.find_spec("ray") is None:
        raise Missing("Ray not installed: pip install 'unisono[ray]'")
    yield Engine(["--on", "ray"])


@contextlib.contextmanager
def spark() -> Iterator[Engine]:
    if importlib.util.find_spec("pyspark") is None:
        raise Missing("PySpark not installed: pip install 'unisono[spark]'")
    if shutil.which("java") is None and "JAVA_HOME" not in os.environ:
        raise Missing("Java not installed: apt-get install openjdk-17-jre-headless")
    yield Engine(["--on", "spark"])


ENGINES: dict[str, Callable[[], contextlib.AbstractContextManager[Engine]]] = {
    make.__name__: make for make in (torchrun, mpi, slurm, ssh, ray, spark)
}


def wait_for(host: str, port: int, timeout_s: float = 20) -> None:
    """Until something listens there."""
    deadline = time.monotonic() + timeout_s
    with socket.socket() as probe:
        while probe.connect_ex((host, port)) and time.monotonic() < deadline:
            time.sleep(0.05)


@contextlib.contextmanager
def noted(skipped: dict[str, str], name: str) -> Iterator[None]:
    """Note an engine that is missing, and go on."""
    try:
        yield
    except Missing as missing:
        skipped[name] = str(missing)
        print(f"{name}: skipped, {missing}")


# -- measuring -------------------------------------------------------------------------------------------------------


class Job:
    """One run of the program, which does steps when it is told to and is stopped otherwise."""

    def __init__(self, engine: Engine, folder: Path, timeout_s: float = 120) -> None:
        self._folder, self._timeout_s, self._mark = folder, timeout_s, secrets.token_hex(12)
        folder.mkdir()
        (folder / "program.py").write_text(PROGRAM)
        for name in ("turn-0", "turn-1", "told"):
            os.mkfifo(folder / name)
        self._turns = [(folder / f"turn-{rank}").open("r+b", buffering=0) for rank in range(2)]
        self._told = (folder / "told").open("r+b", buffering=0)
        self._said = (folder / "said").open("w+b")
        self.command = [sys.executable, "-m", "unisono", "run", "-n", "2", "--threads", "1", *engine.options]
        self.command += [str(folder / "program.py"), str(folder)]
        env = {**os.environ, **engine.env, "UNISONO_RUN": self._mark}  # every process of a run has this variable
        began = time.time()
        self._process = subprocess.Popen(self.command, env=env, cwd=folder, stdout=self._said, stderr=self._said)
        try:
            found = self._answer()
        except BaseException:
            self._process.terminate()
            self._process.wait()
            raise
        self.how, self.first_step_s = found["how"], found["first"] - began
        self._signal(signal.SIGSTOP)

    def turn(self, steps: int) -> list[float]:
        """Seconds of each of so many steps."""
        self._signal(signal.SIGCONT)
        self._tell(DROPPED + steps)
        ends = self._answer()["ends"]
        self._signal(signal.SIGSTOP)
        return [b - a for a, b in pairwise(ends[DROPPED - 1 :])]

    def close(self) -> None:
        """Let it end, and wait for that."""
        self._signal(signal.SIGCONT)
        self._tell(0)
        try:
            if self._process.wait(self._timeout_s):
                raise self._failed()
        finally:
            self._process.kill()
            self._process.wait()
            for file in (*self._turns, self._told, self._said):
                file.close()

    def _tell(self, steps: int) -> None:
        for turn in self._turns:
            turn.write(b"%d\n" % steps)

    def _answer(self) -> dict[str, Any]:
        """The next line of rank 0."""
        deadline, line = time.monotonic() + self._timeout_s, b""
        while not line.endswith(b"\n"):
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise self._failed()
            if select.select([self._told], [], [], 0.2)[0]:
                line += self._told.read(1 << 16)
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _failed(self) -> RuntimeError:
        text = (self._folder / "said").read_text(errors="replace")
        return RuntimeError(f"{shlex.join(self.command)} (exit status {self._process.poll()})\n{text}")

    def _signal(self, signum: signal.Signals) -> None:
        """To every process of the run: they inherit its variable."""
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError):  # gone, or another user's
                if entry.name.isdigit() and self._mark.encode() in (entry / "environ").read_bytes():
                    os.kill(int(entry.name), signum)


class Pair(NamedTuple):
    """A run on an engine and the local run beside it."""

    first_step_s: float
    first_step_s_local: float
    step_s: float
    step_s_local: float


def measure(engine: Engine, turns: int, steps: int, *, engine_first: bool) -> Pair:
    """Start both, and let them take turns."""
    sides = {"local": Engine(), "engine": engine}
    order = sorted(sides) if engine_first else sorted(sides, reverse=True)
    with tempfile.TemporaryDirectory(prefix="engines-") as folder, contextlib.ExitStack() as open_jobs:
        jobs = {}
        for name in order:
            jobs[name] = Job(sides[name], Path(folder, name))
            open_jobs.callback(jobs[name].close)
            if jobs[name].how != SAME:
                raise RuntimeError(f"{shlex.join(jobs[name].command)}: got {jobs[name].how}, expected {SAME}")
        times: dict[str, list[float]] = {name: [] for name in jobs}
        for _ in range(turns):
            for name, job in jobs.items():
                times[name] += job.turn(steps)
    here, there = jobs["local"], jobs["engine"]
    medians = {name: statistics.median(taken) for name, taken in times.items()}
    return Pair(there.first_step_s, here.first_step_s, medians["engine"], medians["local"])


def one_round(engines: dict[str, Engine], turns: int, steps: int, number: int) -> dict[str, Pair]:
    """Every engine once; in every other round it goes before the local run."""
    found = {}
    for name, engine in engines.items():
        found[name] = pair = measure(engine, turns, steps, engine_first=number % 2 == 1)
        print(
            f"{name}: first step {pair.first_step_s:.2f} s (local {pair.first_step_s_local:.2f}), "
            f"a step {pair.step_s * 1e3:.1f} ms (local {pair.step_s_local * 1e3:.1f})",
            flush=True,
        )
    return found


def results(rounds: list[dict[str, Pair]]) -> dict[str, float]:
    """The keys of this benchmark."""
    every = [pair for found in rounds for pair in found.values()]
    keys = {
        "step_s_local": statistics.median(pair.step_s_local for pair in every),
        "first_step_s_local": statistics.median(pair.first_step_s_local for pair in every),
    }
    for name in rounds[0]:
        pairs = [found[name] for found in rounds]
        keys[f"first_step_s_{name}"] = statistics.median(pair.first_step_s for pair in pairs)
        keys[f"per_step_overhead_{name}"] = statistics.median(pair.step_s / pair.step_s_local for pair in pairs)
    return keys


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=4, help="an even number: the order is turned around")
    parser.add_argument("--turns", type=int, default=8, help="of each side in a round")
    parser.add_argument("--steps", type=int, default=8, help="in a turn")
    parser.add_argument("--engines", default=",".join(ENGINES), help="which, with commas between; default: all")
    asked = parser.parse_args()
    names = [name for name in asked.engines.split(",") if name]
    if unknown := [name for name in names if name not in ENGINES]:
        parser.error(f"no engine {', '.join(unknown)}; expected some of {', '.join(ENGINES)}")
    engines: dict[str, Engine] = {}
    skipped: dict[str, str] = {}
    with contextlib.ExitStack() as standing:
        for name in names:
            with noted(skipped, name):
                engines[name] = standing.enter_context(ENGINES[name]())
        rounds = [one_round(engines, asked.turns, asked.steps, number) for number in range(asked.rounds)]
    finish({**results(rounds), "skipped": skipped})


if __name__ == "__main__":
    main()
