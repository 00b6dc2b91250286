"""What a step costs: its anatomy as measured, a network, and the replay of one on the other. Arithmetic alone."""

from unisono.predict.costs.anatomy import Anatomy, Job, Operation
from unisono.predict.costs.network import Link, Network, all_reduce_bytes, fit, sent_share
from unisono.predict.costs.replay import Prediction, Timing, predict, replay

__all__ = [
    "Anatomy",
    "Job",
    "Link",
    "Network",
    "Operation",
    "Prediction",
    "Timing",
    "all_reduce_bytes",
    "fit",
    "predict",
    "replay",
    "sent_share",
]
