"""The environment of a worker: torchrun's variables, Unisono's descriptors, its share of the cores, its allocator."""

from __future__ import annotations

import os

from unisono.launchers.runtime.channel import SECRET, STORE
from unisono.launchers.runtime.huge_pages import are_wanted
from unisono.launchers.runtime.machine import usable_cores
from unisono.launchers.runtime.run_folder import FOLDER, FOLDER_ID, RunFolder

__all__ = ["ALLOCATOR", "set_allocator", "threads_per_worker", "worker_environment"]

# glibc gives freed memory back to the kernel and takes it anew, page by page, in every training step: keep up to 1 GiB.
ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": str(32 << 20), "MALLOC_TRIM_THRESHOLD_": str(1 << 30)}
_TUNABLES, _HUGE_PAGES = "GLIBC_TUNABLES", "glibc.malloc.hugetlb"  # 1: ask the kernel for them, where it lets one ask


def worker_environment(
    rank: int,
    workers: int,
    *,
    address: tuple[str, int],
    run_id: str,
    threads: int | None = None,
    most: int | None = None,
    faults: str = "",
    record: RunFolder | None = None,
) -> dict[str, str]:
    """This process's environment with what `rank` needs to know about itself; `faults`: see fault_report.py.

    `most`: how many workers there may be on this host, where that is more than `workers`.
    """
    env = {name: value for name, value in os.environ.items() if not _is_of_another_run(name)}
    host, port = address
    env.update(
        RANK=str(rank),
        WORLD_SIZE=str(workers),
        LOCAL_RANK=str(rank),
        LOCAL_WORLD_SIZE=str(workers),
        GROUP_RANK="0",
        GROUP_WORLD_SIZE="1",
        MASTER_ADDR=host,
        MASTER_PORT=str(port),
        TORCHELASTIC_USE_AGENT_STORE="True",
        UNISONO_LAUNCHER_PID=str(os.getpid()),
        # A run inside a worker of another run belongs to both.
        UNISONO_RUN=":".join(filter(None, [os.environ.get("UNISONO_RUN"), run_id])),
    )
    if faults:
        env["UNISONO_WORKER_FAULTS"] = faults
    if record is not None:
        env.update(record.variables)
    share = str(threads or threads_per_worker(most or workers))
    if threads is not None or "OMP_NUM_THREADS" not in env:
        env["OMP_NUM_THREADS"] = share
        if threads is not None or "MKL_NUM_THREADS" not in env:
            env["MKL_NUM_THREADS"] = share
    set_allocator(env)
    return env


def set_allocator(env: dict[str, str]) -> None:
    """Have the C library keep freed memory for the next step, unless the user has set its variables.

    >>> env = {"GLIBC_TUNABLES": "glibc.malloc.check=1"}
    >>> set_allocator(env)
    >>> env["GLIBC_TUNABLES"]
    'glibc.malloc.check=1:glibc.malloc.hugetlb=1'
    """
    if not ALLOCATOR.keys() & env.keys():
        env.update(ALLOCATOR)
    given = [one for one in env.get(_TUNABLES, "").split(":") if one]
    if are_wanted() and not any(one.startswith(_HUGE_PAGES + "=") for one in given):
        env[_TUNABLES] = ":".join([*given, f"{_HUGE_PAGES}=1"])


def _is_of_another_run(name: str) -> bool:
    of_a_worker = ("UNISONO_PLACE", "UNISONO_JOINING", "UNISONO_OVER_HOSTS", FOLDER, FOLDER_ID)
    if name.startswith("TORCHELASTIC_") or name in (SECRET, STORE, *of_a_worker):
        return True
    return name.startswith("UNISONO_") and name.endswith(("_FD", "_FAULTS"))


def threads_per_worker(workers: int) -> int:
    """The cores divided among the workers, at least one each."""
    return max(1, usable_cores() // workers)
