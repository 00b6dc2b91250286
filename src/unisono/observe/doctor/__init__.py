"""`unisono doctor`: what is installed, which transports and devices work here, what limits them, and what to do."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from unisono.launchers.runtime.run_folder import find_version
from unisono.observe.doctor import host, network, transports
from unisono.observe.doctor.findings import Finding, run_check, worst_of

__all__ = ["Finding", "examine", "list_checks", "worst_of"]

Check = tuple[str, str, Callable[[], Sequence[Finding]]]


def examine(hosts: network.Hosts | None = None, checks: Sequence[Check] | None = None) -> list[Finding]:
    """What all checks find; `hosts`: other hosts to be examined too."""
    found: list[Finding] = []
    for section, name, check in list_checks(hosts) if checks is None else checks:
        found += run_check(section, name, check)
    return found


def list_checks(hosts: network.Hosts | None = None) -> list[Check]:
    """Every check, with the section and the name that its findings have where it cannot be made."""
    here = Path(__file__).parents[2]
    checks: list[Check] = [
        (host.INSTALLED, "python", host.check_python),
        (host.INSTALLED, "system", host.check_system),
        (host.INSTALLED, "unisono", lambda: host.check_package(find_version(), here)),
        (host.INSTALLED, "requirements", host.check_required),
        (host.INSTALLED, "extras", host.check_extras),
        (host.SECTION, "cores and memory", host.check_cores),
        (host.SECTION, "shared memory", host.check_shared_memory),
        (host.SECTION, "huge pages", host.check_huge_pages),
        (host.SECTION, "open files", host.check_descriptors),
        (host.SECTION, "locked memory", host.check_locked_memory),
        (host.SECTION, "folder of runs", host.check_runs_folder),
        (host.SECTION, "clock", lambda: host.check_clock(matters=hosts is not None)),
        (host.SECTION, "engines", host.check_engines),
        (host.SECTION, "lab", host.check_lab),
        (transports.SECTION, "transports", transports.check_transports),
        (transports.SECTION, "Adam on the host", transports.check_host_step),
        (network.SECTION, "sockets", network.check_sockets),
        (network.SECTION, "interface", network.check_interface),
        (network.SECTION, "reach", network.check_reach),
    ]
    if hosts is not None:
        checks.append((network.SECTION, "hosts", lambda: network.check_hosts(hosts)))
    return checks
