"""Workers on this host that are joined by other hosts: agents as on an engine, started by this process."""

from __future__ import annotations

import socket
from dataclasses import dataclass
from typing import ClassVar

from unisono.launchers.engines.engine import Engine, Work, agent_command
from unisono.launchers.engines.ssh import HostCommand, HostsStarted, write_setup

__all__ = ["Here"]


@dataclass(frozen=True)
class Here(Engine):
    """This host as an engine, for `unisono run -n MIN:MAX --later K` without another."""

    name: ClassVar[str] = "this host"

    def environment(self) -> str:
        return "torchrun"

    def start(self, work: Work) -> HostsStarted:
        ranks = range(work.workers)
        command = HostCommand(agent_command(None, "host"), write_setup(work, ranks), ranks)
        return HostsStarted({socket.gethostname(): command}, elastic=work.elastic)
