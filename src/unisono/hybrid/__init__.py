"""Data × tensor × pipeline: torch's own tensor and pipeline parallelism, and any strategy on the data axis."""

from __future__ import annotations

from unisono.hybrid.axes import Mesh, mesh
from unisono.hybrid.pipeline import Pipeline
from unisono.hybrid.plans import TensorPlan, tensor_plan
from unisono.hybrid.stages import split_stages

__all__ = ["Mesh", "Pipeline", "TensorPlan", "mesh", "split_stages", "tensor_plan"]
