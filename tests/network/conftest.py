"""Starts a script on emulated hosts: network namespaces, each with workers of its own."""

from __future__ import annotations

import json
import os
import subprocess
import textwrap
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from preloaded import Program
from unisono.launchers.lab.hosts import EmulatedHosts
from unisono.launchers.runtime.link_emulation import Link

SOURCES = Path(__file__).parents[2] / "src"


class Run:
    """The workers of one script, rank by rank."""

    def __init__(self, workers: list[Program], hosts: EmulatedHosts) -> None:
        self.workers, self.hosts = workers, hosts

    def cut_off(self, host: int) -> None:
        """Take a host's link down."""
        link = ["ip", "link", "set", self.hosts.interface, "down"]
        subprocess.run(self.hosts.command(host, *link), check=True)

    def tell(self, word: str) -> None:
        """Write a line to each worker."""
        for worker in self.workers:
            worker.stdin.write(word + "\n")
            worker.stdin.flush()

    def hear(self, word: str) -> None:
        """Wait until each worker has printed a line."""
        for worker in self.workers:
            lines = iter(worker.stdout.readline, "")
            assert any(line == word + "\n" for line in lines), f"a worker ended before it printed {word}"

    def results(self, timeout_s: float = 90) -> list[Any]:
        """What each rank printed as JSON last (a store of torch's may log that it is cut off, even after that); fails
        with the output of a rank that failed."""
        found = []
        for rank, worker in enumerate(self.workers):
            output, _ = worker.communicate(timeout=timeout_s)
            assert worker.returncode == 0, f"rank {rank} ended with {worker.returncode}:\n{output}"
            found.append(read_last(output))
        return found

    def end(self) -> None:
        for worker in self.workers:
            worker.kill()
            worker.communicate()


def read_last(output: str) -> Any:
    """The last line that is JSON."""
    for line in reversed(output.splitlines()):
        with suppress(ValueError):
            return json.loads(line)
    raise AssertionError(f"no JSON was printed:\n{output}")


@pytest.fixture
def on_hosts(tmp_path: Path) -> Any:
    """on_hosts(script, per_host=[2, 2]) -> Run; hosts and workers are gone after the test.

    `bits_per_s`: the speed of the links; `deadline_s`: how long a rank waits; `missing`: ranks that are not started;
    `secret`: what opens the store, which is torch's own without it; `net`: a link that the transport emulates;
    `prepare`: called with the hosts before workers are started; `env`: more variables, "" for one that is to be unset.
    """
    made: list[tuple[EmulatedHosts, Run]] = []

    def start(
        script: str,
        *,
        per_host: list[int],
        bits_per_s: float | None = None,
        deadline_s: float | None = None,
        missing: Sequence[int] = (),
        secret: str = "",
        net: str = "",
        prepare: Callable[[EmulatedHosts], None] | None = None,
        env: Mapping[str, str] = {},
    ) -> Run:
        file = tmp_path / "script.py"
        file.write_text(textwrap.dedent(script))
        hosts = EmulatedHosts(len(per_host), links=[Link(bits_per_s)] * len(per_host))
        run = Run([], hosts)
        made.append((hosts, run))
        if prepare is not None:
            prepare(hosts)
        places = [(host, local) for host, count in enumerate(per_host) for local in range(count)]
        for rank, (host, local) in enumerate(places):
            if rank in missing:
                continue
            found = {
                **os.environ,
                "PYTHONPATH": str(SOURCES),
                "RANK": str(rank),
                "WORLD_SIZE": str(len(places)),
                "LOCAL_RANK": str(local),
                "LOCAL_WORLD_SIZE": str(per_host[host]),
                "MASTER_ADDR": hosts.address(0),
                "MASTER_PORT": "29400",
                "GLOO_SOCKET_IFNAME": hosts.interface,
                "UNISONO_HOST": f"host{host}",
                "OMP_NUM_THREADS": "1",
                **({"UNISONO_SECRET": secret} if secret else {}),
                **({"UNISONO_NET": net} if net else {}),
                **({} if deadline_s is None else {"UNISONO_TIMEOUT_S": str(deadline_s)}),
                **env,
            }
            found = {name: value for name, value in found.items() if value}
            run.workers.append(Program(file, env=found, stderr=None, namespaces=hosts.namespaces(host)))
        return run

    yield start
    for hosts, run in made:
        run.end()
        hosts.close()


Start = Callable[..., Run]
