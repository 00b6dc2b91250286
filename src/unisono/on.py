"""The engines that can start workers: `un.launch(fn, workers=4, on=un.on.mpi())`, `unisono run --on mpi ...`."""

from __future__ import annotations

from unisono.lab.engine import Lab as lab
from unisono.launchers.engines.mpi import Mpi as mpi
from unisono.launchers.engines.ray import Ray as ray
from unisono.launchers.engines.slurm import Slurm as slurm
from unisono.launchers.engines.spark import Spark as spark
from unisono.launchers.engines.ssh import Ssh as ssh
from unisono.launchers.engines.torchrun import Torchrun as torchrun

__all__ = ["lab", "mpi", "ray", "slurm", "spark", "ssh", "torchrun"]
