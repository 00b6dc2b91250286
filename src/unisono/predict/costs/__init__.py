"""What a step costs: its anatomy as measured, a network, and the replay of one on the other. Arithmetic alone."""

from unisono.predict.costs.anatomy import Anatomy, Job, Prediction, Timing, predict, replay
from unisono.predict.costs.network import Link, Network, Operation, all_reduce_bytes, fit, sent_share

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
