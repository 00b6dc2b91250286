"""Data × tensor × pipeline: torch's own tensor and pipeline parallelism, and any strategy on the data axis."""

from __future__ import annotations

from unisono.methods.hybrid.axes import Mesh, mesh
from unisono.methods.hybrid.pipeline import Pipeline
from unisono.methods.hybrid.plans import TensorPlan, tensor_plan
from unisono.methods.hybrid.stages import split_stages

__all__ = ["Mesh", "Pipeline", "TensorPlan", "mesh", "split_stages", "tensor_plan"]
