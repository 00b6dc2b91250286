"""Who this process is, told by the engine that started it: torchrun, Open MPI, MPICH (and its kin) or Slurm.

Each engine has its own names for the same four numbers. Only a process that srun started as a step is a worker: in an
allocation's own shell the variables of the whole allocation are set as well, but the process is alone.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["Place", "number", "read_place"]

_NAMES = {  # rank, size, rank on the host, workers on the host
    "torchrun": ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    "Open MPI": (
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    "MPI": ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    "Slurm": ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", ""),
}


@dataclass(frozen=True)
class Place:
    """`local_size` is 0 where the engine does not say it. `job` tells this job from others on the host."""

    engine: str
    rank: int
    size: int
    local_rank: int = 0
    local_size: int = 0
    job: str = ""
    first_host: str = ""  # where rank 0 runs, where the engine says it
    launch_address: str = ""  # of the host where the job was started, where the engine says it


def read_place(env: Mapping[str, str] = os.environ, *, engine: str | None = None) -> Place | None:
    """What the environment says; None in a process that no engine started. `engine` asks for one engine's word only.

    >>> read_place({"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "4", "PMIX_NAMESPACE": "77"})
    Place(engine='Open MPI', rank=1, size=4, local_rank=0, local_size=0, job='77', first_host='', launch_address='')
    """
    for name in [engine] if engine is not None else _NAMES:
        rank, size, local_rank, local_size = _NAMES[name]
        if size not in env or (name != "torchrun" and rank not in env):
            continue
        total = number(size, 1, env)
        mine = number(rank, 0 if total == 1 else -1, env)
        if total < 1 or not 0 <= mine < total:
            raise ValueError(
                f"the environment says {rank}={env.get(rank)} and {size}={env[size]}: expected 0 <= {rank} < {size}; "
                f"start the program with `unisono run -n N` or torchrun, or unset {size} to run alone"
            )
        place = Place(name, mine, total, number(local_rank, 0, env), number(local_size, 0, env))
        return _with_job(place, env)
    return None


def _with_job(place: Place, env: Mapping[str, str]) -> Place:
    numbers = (place.engine, place.rank, place.size)
    if place.engine == "Slurm":
        node, counts = number("SLURM_NODEID", 0, env), _counts(env.get("SLURM_STEP_TASKS_PER_NODE", ""))
        local = place.local_rank, counts[node] if node < len(counts) else 0
        if "SLURM_GPUS_PER_TASK" in env:  # each worker sees its own devices only, as number 0
            local = 0, 1
        return Place(
            *numbers,
            *local,
            job=f"{env.get('SLURM_JOB_ID', '')}.{env.get('SLURM_STEP_ID', '')}.{env.get('SLURM_RESTART_COUNT', '0')}",
            first_host=_first_name(env.get("SLURM_STEP_NODELIST", "")),
            launch_address=env.get("SLURM_LAUNCH_NODE_IPADDR", ""),
        )
    job = ""
    if place.engine == "Open MPI":
        job = env.get("PMIX_NAMESPACE", "") or env.get("OMPI_MCA_ess_base_jobid", "")
    elif place.engine == "MPI":
        job = f"{os.getppid()}"  # the proxy that started all workers of this host
    return Place(*numbers, place.local_rank, place.local_size, job=job)


def _counts(text: str) -> list[int]:
    """Slurm's short form of a list of counts.

    >>> _counts("2(x3),1")
    [2, 2, 2, 1]
    """
    found = re.findall(r"(\d+)(?:\(x(\d+)\))?", text)
    return [int(count) for count, times in found for _ in range(int(times or 1))]


def _first_name(text: str) -> str:
    """The first name in Slurm's short form of a list of hosts.

    >>> _first_name("gpu[007-012,020],login"), _first_name("a,b[1-2]"), _first_name("r[1-2]n[01-04]")
    ('gpu007', 'a', 'r1n01')
    """
    first = re.split(r",(?![^\[]*\])", text)[0]
    return re.sub(r"\[(\d+)[^\]]*\]", r"\1", first)


def number(name: str, default: int = 0, env: Mapping[str, str] = os.environ) -> int:
    """A variable of the environment that must be a whole number; `default` where it is not set.

    >>> number("LOCAL_RANK", env={"LOCAL_RANK": "3"})
    3
    """
    text = env.get(name, str(default)) if name else str(default)
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"the environment variable {name} must be a whole number, got {text!r}") from None
