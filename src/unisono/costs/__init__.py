"""What a step costs: its anatomy as measured, a network, and the replay of one on the other. Arithmetic alone."""

from unisono.costs.anatomy import Anatomy, Job, Operation
from unisono.costs.network import Link, Network, fit
from unisono.costs.replay import Prediction, Timing, predict, replay

__all__ = ["Anatomy", "Job", "Link", "Network", "Operation", "Prediction", "Timing", "fit", "predict", "replay"]
