"""Strategy: what is exchanged and when. `parallel()` binds one to a model and its optimizer and gives a `Replica`."""

from __future__ import annotations

from unisono.methods.facts import Keeps, Pattern
from unisono.methods.strategy.averages import Average, average
from unisono.methods.strategy.binding import parallel
from unisono.methods.strategy.change import Change
from unisono.methods.strategy.changing import ChangingReplica
from unisono.methods.strategy.healing import follow
from unisono.methods.strategy.periodic import PeriodicReplica
from unisono.methods.strategy.replica import (
    Accumulate,
    BucketBytes,
    Replica,
    Residual,
    Strategy,
    bound_parameters,
)
from unisono.methods.strategy.sharing import Buffers, share, share_buffers, take_weighted_mean
from unisono.training.checkpoint import ModelPart

__all__ = [
    "Accumulate",
    "Average",
    "BucketBytes",
    "Buffers",
    "Change",
    "ChangingReplica",
    "Keeps",
    "ModelPart",
    "Pattern",
    "PeriodicReplica",
    "Replica",
    "Residual",
    "Strategy",
    "average",
    "bound_parameters",
    "follow",
    "parallel",
    "share",
    "share_buffers",
    "take_weighted_mean",
]
