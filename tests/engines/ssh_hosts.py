"""Hosts that are network namespaces of this machine, each with an sshd of our own."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType

import pytest
from engine_commands import SOURCES

from unisono.launchers.forks import stop_warm
from unisono.launchers.lab.hosts import EmulatedHosts
from unisono.launchers.lab.hosts import find_obstacle as why_no_hosts

CONFIG = """\
Port {port}
HostKey {folder}/host_key
AuthorizedKeysFile {folder}/user_key.pub
PidFile none
PermitRootLogin prohibit-password
PasswordAuthentication no
KbdInteractiveAuthentication no
UsePAM no
StrictModes no
SetEnv PYTHONPATH={sources} UNISONO_WARM={folder}/warm-{host} UNISONO_WARM_IDLE_S=60
"""
PORT = 2222


def why_not() -> str:
    """Empty where such hosts can be made, else the reason."""
    missing = [name for name in ("ssh", "ssh-keygen") if shutil.which(name) is None]
    if missing or not os.path.exists("/usr/sbin/sshd"):
        return f"{', '.join([*missing, 'sshd'])} not installed: apt-get install openssh-client openssh-server"
    return why_no_hosts()


def _key(file: Path) -> None:
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(file)], check=True)


class SshHosts(EmulatedHosts):
    """Two hosts, each with a fork server of its own, and a third that the launcher runs on (the last)."""

    def __init__(self, folder: Path) -> None:
        super().__init__(3)
        self.folder = folder
        self._daemons: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> SshHosts:
        super().__enter__()
        try:
            for name in ("host_key", "user_key"):
                subprocess.run(
                    ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(self.folder / name)], check=True
                )
            os.makedirs("/run/sshd", mode=0o755, exist_ok=True)
            for host in range(2):
                self._start_daemon(host)
            for host in range(2):
                self._wait_for(host)
        except BaseException:
            self.close()
            raise
        return self

    def _start_daemon(self, host: int) -> None:
        (self.folder / f"warm-{host}").mkdir(mode=0o700)
        config = self.folder / f"sshd_config-{host}"
        config.write_text(CONFIG.format(port=PORT, folder=self.folder, sources=SOURCES, host=host))
        command = ["/usr/sbin/sshd", "-D", "-e", "-f", str(config)]
        self._daemons.append(self.start(host, command, dict(os.environ), stderr=subprocess.DEVNULL))

    def options(self) -> list[str]:
        """What ssh needs to be told."""
        return [
            *("-p", str(PORT), "-i", str(self.folder / "user_key")),
            *("-o", f"UserKnownHostsFile={self.folder}/known", "-o", "StrictHostKeyChecking=accept-new"),
        ]

    def here(self, *words: str) -> list[str]:
        """The command, run on the launcher's host."""
        return self.command(2, *words)

    def _wait_for(self, host: int) -> None:
        probe = f"import socket; socket.create_connection(('{self.address(host)}', {PORT}), 1).close()"
        deadline = time.monotonic() + 20
        while subprocess.run(self.here(sys.executable, "-c", probe), capture_output=True).returncode:
            if time.monotonic() > deadline:
                raise RuntimeError(f"sshd of host {host} did not come up")
            time.sleep(0.1)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for daemon in self._daemons:
            daemon.terminate()
        for daemon in self._daemons:
            daemon.wait()
        with pytest.MonkeyPatch.context() as patch:
            for host in range(2):
                patch.setenv("UNISONO_WARM", str(self.folder / f"warm-{host}"))
                stop_warm()
        super().__exit__(kind, error, trace)
