"""What a forked worker has from its fork server and cannot be given afterwards, so that both must agree on it.

A worker that is forked from a process that has imported torch gets its own environment, streams, folder, limits,
cores and signals after the fork. What counts only when an interpreter or a library starts cannot be given to it:

- variables that Python, the C library, OpenMP, MKL, OpenBLAS, NumPy, torch or CUDA read once (`start_variables`);
- what the kernel ties to a process: namespaces, control group, groups, capabilities, hard limits, priority.

Where a request differs from the server in any of these, its worker is started as a fresh process.
"""

from __future__ import annotations

import os
import re
import resource
from collections.abc import Mapping

__all__ = ["THREAD_VARIABLES", "find_difference", "process_context", "soft_limits", "start_variables"]

THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")  # set again in the worker
# Read once, when the interpreter or a library starts.
_PREFIXES = (
    *("LD_", "GLIBC_", "MALLOC_", "LC_"),
    *("OMP_", "KMP_", "GOMP_", "MKL_", "OPENBLAS_", "GOTO_", "BLIS_", "NPY_", "NUMPY_"),
    *("TORCH", "PYTORCH_", "ATEN_", "C10_", "DNNL_", "ONEDNN_", "TRITON_", "CUDA_", "NVIDIA_"),
)
_NAMES = {"LANG", "PYTHON_GIL", "PYTHON_JIT", "PYTHON_CPU_COUNT"}
_OF_PYTHON = re.compile("PYTHON[A-Z0-9]+")  # the interpreter's own: engines add others, with an underscore
_APPLIED = {  # begin like those, and take effect in the worker
    *THREAD_VARIABLES,
    "PYTHONPATH",
    "PYTHONBREAKPOINT",  # read when it is needed
    "CUDA_VISIBLE_DEVICES",  # CUDA starts after the fork
    "TORCHINDUCTOR_CACHE_DIR",  # torch sets it itself, in a program that has compiled something
    "TORCH_NCCL_ASYNC_ERROR_HANDLING",  # torchrun sets these: read where a group of NCCL's is made,
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE",  # and by torchrun itself
}
_PRIVILEGES = ("NoNewPrivs", "Seccomp", "CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")
_LIMITS = sorted(name for name in dir(resource) if name.startswith("RLIMIT_") and name != "RLIMIT_OFILE")


def start_variables(env: Mapping[str, str]) -> dict[str, str]:
    """The variables of `env` that count only when an interpreter or a library starts.

    >>> start_variables({"HOME": "/root", "TORCH_LOGS": "dynamo", "OMP_NUM_THREADS": "2", "TORCHELASTIC_RUN_ID": "1"})
    {'TORCH_LOGS': 'dynamo'}
    >>> start_variables({"TORCHINDUCTOR_CACHE_DIR": "/tmp/torchinductor_me"})
    {}
    """
    return {
        name: value
        for name, value in env.items()
        if (name in _NAMES or name.startswith(_PREFIXES) or _OF_PYTHON.fullmatch(name))
        and name not in _APPLIED
        and not name.startswith("TORCHELASTIC_")
    }


def process_context() -> dict[str, object]:
    """What the kernel ties to this process, in a form that survives JSON."""
    with open("/proc/self/status") as file:
        status = dict(line.rstrip("\n").split(":", 1) for line in file if ":" in line)
    with open("/proc/self/cgroup") as file:
        control_group = file.read()
    spaces = sorted(name for name in os.listdir("/proc/self/ns") if not name.endswith("_for_children"))
    return {
        "namespaces": [os.readlink(f"/proc/self/ns/{name}") for name in spaces],
        "root folder": os.readlink("/proc/self/root"),
        "control group": control_group,
        # A group that one is in anyway may be listed once more: Slurm's jobs have it so, a container's root has not.
        "users and groups": [*os.getresuid(), *os.getresgid(), *sorted({os.getegid(), *os.getgroups()})],
        "privileges": [status.get(name, "").strip() for name in _PRIVILEGES],
        "hard limits": [resource.getrlimit(getattr(resource, name))[1] for name in _LIMITS],
        "priority": [os.getpriority(os.PRIO_PROCESS, 0), os.sched_getscheduler(0)],
    }


def soft_limits() -> dict[str, int]:
    """The limits that a worker is given after the fork."""
    return {name: resource.getrlimit(getattr(resource, name))[0] for name in _LIMITS}


def find_difference(theirs: Mapping[str, object], ours: Mapping[str, object]) -> str:
    """The first entry that differs; "" if there is none.

    >>> find_difference({"LANG": "C"}, {"LANG": "C", "TORCH_LOGS": "dynamo"})
    'TORCH_LOGS'
    """
    return next((name for name in sorted({*theirs, *ours}) if theirs.get(name) != ours.get(name)), "")
