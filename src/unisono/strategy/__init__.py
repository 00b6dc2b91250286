"""Strategy: what is exchanged and when. `parallel()` binds one to a model and its optimizer and gives a `Replica`."""

from __future__ import annotations

from unisono.checkpoint import ModelPart
from unisono.strategy.binding import parallel
from unisono.strategy.changing import ChangingReplica
from unisono.strategy.healing import follow
from unisono.strategy.pattern import Pattern
from unisono.strategy.periodic import PeriodicReplica
from unisono.strategy.replica import (
    Accumulate,
    BucketBytes,
    Buffers,
    Change,
    Replica,
    Residual,
    Strategy,
    bound_parameters,
    share,
    share_buffers,
    take_weighted_mean,
)

__all__ = [
    "Accumulate",
    "BucketBytes",
    "Buffers",
    "Change",
    "ChangingReplica",
    "ModelPart",
    "Pattern",
    "PeriodicReplica",
    "Replica",
    "Residual",
    "Strategy",
    "bound_parameters",
    "follow",
    "parallel",
    "share",
    "share_buffers",
    "take_weighted_mean",
]
