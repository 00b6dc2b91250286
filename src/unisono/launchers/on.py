"""The engines that can start workers: `un.launch(fn, workers=4, on=un.on.mpi())`, `unisono run --on mpi ...`."""

from __future__ import annotations

from unisono.launchers.mpi import Mpi as mpi
from unisono.launchers.ray import Ray as ray
from unisono.launchers.slurm import Slurm as slurm
from unisono.launchers.spark import Spark as spark
from unisono.launchers.ssh import Ssh as ssh
from unisono.launchers.torchrun import Torchrun as torchrun

__all__ = ["mpi", "ray", "slurm", "spark", "ssh", "torchrun"]
