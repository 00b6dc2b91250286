"""Every environment variable of this package with its meaning, and how those are read that several modules ask for.

A test compares the two tables with the names that stand in the source. A variable that only a launcher and its own
workers use belongs into `INTERNAL`; before adding one there, look whether an existing one can carry the value.
"""

from __future__ import annotations

import json
import os
import socket
from typing import Any

__all__ = [
    "FOR_USERS",
    "INTERNAL",
    "are_checks_on",
    "may_share_memory",
    "name_observer",
    "read_attempt",
    "read_encrypt",
    "read_host",
    "read_observer_module",
    "read_observer_settings",
    "read_timeout_s",
    "read_worker_number",
]

# Documented: users set them.
FOR_USERS = {
    "UNISONO_BALANCE": "1: deal samples by the ranks' speeds, for every un.shard",
    "UNISONO_CHECKS": "off: compare no calls and parameters between ranks, and watch for no slow ones",
    "UNISONO_CHECK_EVERY": "steps from one comparison of parameters to the next; 0: never",
    "UNISONO_COMPILED_STEP": "0: compile no step of Adam for the host: torch's kernel steps there",
    "UNISONO_DEBUGGER": "0: no debugger. In a worker: the addresses of the launcher's debugger hub",
    "UNISONO_DEBUG_WAIT_S": "how long stopped workers wait for a prompt if there is no terminal",
    "UNISONO_DISK": "folder for the scratch files of zero(optimizer_on='disk')",
    "UNISONO_ENCRYPT": "1: encrypt everything that hosts send to each other; 0: nothing; default: docs/networks.md",
    "UNISONO_FAULTS": "fault script of every run that is started with it",
    "UNISONO_HOST": "name of this host; default: the system's",
    "UNISONO_HUGE_PAGES": "0: ask for no huge pages",
    "UNISONO_INTERFACE": "network interfaces of the ranks: a name, an address, a network, or several with commas",
    "UNISONO_LEDGER": "file for the trace of a program that uses the backend of torch.distributed",
    "UNISONO_LOG": "where metrics are sent: tensorboard, wandb, ...",
    "UNISONO_METHODS": "folders of the user's own methods, separated by colons",
    "UNISONO_NET": "link of an emulated host, such as 100mbit,20ms",
    "UNISONO_PEER_MEMORY": "0: never read the private memory of other workers, on the host or on a GPU",
    "UNISONO_PORTS": "ports at which ranks and launchers may listen for other hosts, such as 40000-40100; default: any",
    "UNISONO_RUNS": "folder in which runs are recorded; off: record none",
    "UNISONO_SECRET": "secret of the run, which its store asks for",
    "UNISONO_SHARED_MEMORY": "0: workers of one host exchange messages instead of sharing memory",
    "UNISONO_SPOT": "aws or gcp: save and leave when the cloud says that it takes this machine away",
    "UNISONO_STRATEGY": "spec that overrides the strategy given to un.parallel",
    "UNISONO_TIMEOUT_S": "how long a rank waits for another one; 1800 by default",
    "UNISONO_TRACEBACK": "full: show this package's own frames in errors",
    "UNISONO_WARM": "0: start every worker afresh; 1, or a folder: use the user's warm server",
}

# Set by this package for processes that it starts itself.
INTERNAL = {
    "UNISONO_AGENT": "launcher: everything that a host's agent needs, in JSON",
    "UNISONO_AGENT_PID": "agent: its own process, for the worker",
    "UNISONO_ATTEMPT": "launcher: name of this start of the workers, the prefix of their keys in the store",
    "UNISONO_CONTROL_FD": "elastic runs: socket to the launcher or agent",
    "UNISONO_HEARTBEAT_S": "elastic runs: after how long without a heartbeat a worker counts as lost",
    "UNISONO_JOINING": "elastic runs: this worker is started into a run that is under way",
    "UNISONO_LAB": "lab: which process laid out the hosts, to clean up after it",
    "UNISONO_LAUNCHER_PID": "launcher: process with which a worker ends",
    "UNISONO_OBSERVER": "module that binds in place of un.parallel (plan, compare, rehearsal), and its settings",
    "UNISONO_OVER_HOSTS": "elastic runs: the workers are on several hosts",
    "UNISONO_PAGE": "live page: token, address, descriptor and parent, in JSON",
    "UNISONO_PARTS": "engines with tables: file that lists this worker's rows",
    "UNISONO_PAYLOAD_FD": "un.launch: descriptor of the function to run",
    "UNISONO_PDB": "1: stop in the debugger where a worker raises; debugpy:PORT: wait for an editor's, at PORT + rank",
    "UNISONO_PLACE": "elastic runs: number of this worker among all, which stays when ranks change",
    "UNISONO_REPORT_FD": "launcher: pipe for short lines to it",
    "UNISONO_RESULTS_FD": "elastic runs: file with results for workers that join later",
    "UNISONO_RESULT_FD": "un.launch: descriptor for the function's result",
    "UNISONO_RUN": "launcher: ids of the runs that this process belongs to",
    "UNISONO_RUN_FOLDER": "launcher: folder in which the run is recorded",
    "UNISONO_RUN_FOLDER_ID": "launcher: id of that folder; a worker that does not find it there is on another host",
    "UNISONO_SHM_FD": "launcher: descriptor of the meeting page of this host",
    "UNISONO_STACKS_FD": "launcher: file for this worker's stacks",
    "UNISONO_STATUS_FD": "launcher: page with each worker's step and activity",
    "UNISONO_STORE": "launcher: address of its store, which its secret opens",
    "UNISONO_WARM_IDLE_S": "how long an unused warm server stays",
    "UNISONO_WORKER_FAULTS": "launcher: faults of its workers, by number, in JSON",
}

_TIMEOUT_S = 1800.0


def read_timeout_s() -> float:
    """How long a rank waits for another one."""
    return float(os.environ.get("UNISONO_TIMEOUT_S", _TIMEOUT_S))


def read_host() -> str:
    """The name of this host, as other ranks and reports know it."""
    return os.environ.get("UNISONO_HOST") or socket.gethostname()


def are_checks_on() -> bool:
    """Whether ranks compare their calls and parameters; the same on every rank."""
    return os.environ.get("UNISONO_CHECKS", "on") != "off"


def may_share_memory() -> bool:
    """Whether the workers of one host may exchange tensors in memory that they share."""
    return os.environ.get("UNISONO_SHARED_MEMORY", "1") != "0"


def read_encrypt() -> bool | None:
    """Whether the user asks for encryption, or for none; None if neither."""
    text = os.environ.get("UNISONO_ENCRYPT", "")
    if text not in ("", "0", "1"):
        raise ValueError(f"UNISONO_ENCRYPT is 1 or 0, got {text!r}")
    return text == "1" if text else None


def read_attempt() -> str:
    """The name of this start of the workers, from our launcher or torchrun: a restart uses other keys of the store."""
    return os.environ.get("UNISONO_ATTEMPT") or os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")


def read_worker_number() -> int | None:
    """This worker's number among all that its launcher has started; its rank, unless ranks change in the run."""
    text = os.environ.get("UNISONO_PLACE") or os.environ.get("RANK")
    return int(text) if text else None


def name_observer(module: str, **settings: Any) -> dict[str, str]:
    """The variable that has `module.bind` called in place of un.parallel's own, with settings for it."""
    return {"UNISONO_OBSERVER": f"{module} {json.dumps(settings)}"}


def read_observer_module() -> str:
    """The module whose `bind` stands in for un.parallel's; empty if there is none."""
    return os.environ.get("UNISONO_OBSERVER", "").partition(" ")[0]


def read_observer_settings() -> dict[str, Any]:
    """What whoever named the observer wants it to know."""
    settings: dict[str, Any] = json.loads(os.environ.get("UNISONO_OBSERVER", "").partition(" ")[2] or "{}")
    return settings
