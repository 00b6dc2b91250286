"""The engines that can start workers: `un.launch(fn, workers=4, on=un.on.mpi())`, `unisono run --on mpi ...`.

Each is imported when it is first asked for: a run on this host needs none.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from unisono.launchers.engines.kubernetes import Kubernetes as kubernetes
    from unisono.launchers.engines.mpi import Mpi as mpi
    from unisono.launchers.engines.ray import Ray as ray
    from unisono.launchers.engines.skypilot import Skypilot as skypilot
    from unisono.launchers.engines.slurm import Slurm as slurm
    from unisono.launchers.engines.spark import Spark as spark
    from unisono.launchers.engines.ssh import Ssh as ssh
    from unisono.launchers.engines.torchrun import Torchrun as torchrun
    from unisono.launchers.lab.engine import Lab as lab

__all__ = ["kubernetes", "lab", "mpi", "ray", "skypilot", "slurm", "spark", "ssh", "torchrun"]


def __getattr__(name: str) -> Any:
    """An engine, imported when it is first asked for: a run needs one of them at most."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = "unisono.launchers.lab.engine" if name == "lab" else f"unisono.launchers.engines.{name}"
    engine = globals()[name] = getattr(importlib.import_module(module), name.capitalize())
    return engine


def __dir__() -> list[str]:
    return __all__
