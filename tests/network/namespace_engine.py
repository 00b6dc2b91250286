"""An engine whose hosts are network namespaces: `namespace_engine.py MIN MAX HEARTBEAT SPACE=ADDRESS,... script.py`.

It is run in a namespace of its own, in which the launcher is then. Workers are dealt to the hosts in turn.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import ClassVar

from unisono.launchers.engines.engine import Engine, Work
from unisono.launchers.job import ComeAndGo, Job


@dataclass(frozen=True)
class Namespaces(Engine):
    """One agent for each worker, as an engine that starts no other one would."""

    name: ClassVar[str] = "namespaces"

    spaces: Sequence[str] = ()  # with the address of each: SPACE=ADDRESS

    def environment(self) -> str:
        return "torchrun"

    def hosts_to_reach(self) -> Sequence[str]:
        return [space.partition("=")[2] for space in self.spaces]

    def start(self, work: Work) -> Agents:
        return Agents(self.spaces, work)


class Agents:
    """See Started."""

    def __init__(self, spaces: Sequence[str], work: Work) -> None:
        self._agents = []
        for rank in range(work.workers):
            host = rank % len(spaces)
            place = {"RANK": rank, "WORLD_SIZE": work.workers, "LOCAL_RANK": rank // len(spaces), "LOCAL_WORLD_SIZE": 1}
            env = {**os.environ, **work.env, **{name: str(value) for name, value in place.items()}}
            command = ["ip", "netns", "exec", spaces[host].partition("=")[0], *work.agent]
            self._agents.append(
                subprocess.Popen(command, env={**env, "UNISONO_HOST": f"host{host}"}, start_new_session=True)
            )

    def poll(self) -> int | None:
        found = [agent.poll() for agent in self._agents]
        return None if None in found else max(found)

    def stop(self, signum: signal.Signals) -> None:
        for agent in self._agents:
            agent.send_signal(signum)

    def words(self) -> str:
        return ""

    def sessions(self) -> Sequence[int]:
        return [agent.pid for agent in self._agents]

    def revive(self, missing: AbstractSet[int]) -> None:
        pass

    def close(self) -> None:
        for agent in self._agents:
            agent.kill()
            agent.wait()


def main() -> int:
    least, most, heartbeat_s, spaces, *program = sys.argv[1:]
    elastic = ComeAndGo(int(least), int(most), heartbeat_s=float(heartbeat_s))
    job = Job(program, int(most), output="prefix", elastic=elastic, threads=1)
    return Namespaces(spaces=spaces.split(",")).run(program, int(most), job=job)


if __name__ == "__main__":
    sys.exit(main())
