"""Local SGD and post-local SGD: workers train alone and average their models every `every` windows.

Local SGD: Stich, 2019 (arXiv:1805.09767). Post-local SGD: Lin, Stich, Patel, Jaggi, 2020 (arXiv:1808.07217).
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from unisono.methods.buckets import BUCKET_BYTES
from unisono.methods.checks import AtLeast
from unisono.methods.facts import Convergence, Example, Facts
from unisono.methods.reducer import Reducer
from unisono.methods.strategies._anchored import AnchoredReplica, Every, Rounds
from unisono.methods.strategy import Accumulate, BucketBytes, Buffers, Pattern, Replica, Strategy, take_weighted_mean
from unisono.world import World

FACTS = Facts(
    [
        Example("local_sgd(every=3, start=1)"),
        Example("local_sgd(every=2, start=0, momentum=average)"),
        Example("local_sgd(every=2, start=1, reducer=topk(k=0.2))"),
        Example("local_sgd(every=3, start=decay)"),
    ],
    refuses={
        "every=0": "every",
        "start=-1": "start",
        "start=soon": "start",
        "momentum=both": "momentum",
        "buffers=sometimes": "buffers",
        "accumulate=0": "accumulate",
    },
    own_gradients=True,
    convergence=Convergence("other", "workers part for `every` steps and average their models"),
    plans=["local_sgd(every=8, start=0)"],
)


@dataclass(frozen=True)
class local_sgd(Strategy):
    """Local steps; then, with the last agreed model x0 and each worker's x_i: x0 <- x0 - mean(x0 - x_i), x_i <- x0.

    In the mean each worker counts by the samples that it saw since the last exchange.

    every: windows from one exchange to the next, once the start is over (H).
    start: windows at the start in which models are averaged after each, as in synchronous training; or "decay":
        until a learning rate falls for the first time (post-local SGD).
    reducer: how the mean of the differences x0 - x_i is taken (None: exactly).
    momentum: optimizer states stay "local", or "average" those of a parameter's shape in every exchange.
    buffers: in every exchange, "average" them, "broadcast" rank 0's, or leave them "local".
    accumulate: backward passes a window.
    bucket_bytes: how much travels together.

    >>> local_sgd(every=8, start="decay").every
    8
    """

    every: Every = 16
    start: Annotated[int, AtLeast(0, "windows of synchronous training")] | Literal["decay"] = 100
    reducer: Reducer | None = None
    momentum: Literal["local", "average"] = "local"
    buffers: Buffers = "average"
    accumulate: Accumulate = 1
    bucket_bytes: BucketBytes = BUCKET_BYTES

    def why_torch_optimizer(self) -> str:
        return "it averages the optimizer's states" if self.momentum == "average" else ""

    def pattern(self) -> Pattern:
        return Pattern("windows", self.reducer, self.every, overlap=False, in_every_window={"every": 1, "start": 0})

    def make(self, model: nn.Module, optimizer: Optimizer, world: World) -> Replica:
        return AnchoredReplica(model, optimizer, world, self, LocalSGD(self))


class LocalSGD(Rounds):
    """All parameters together, exchanged between two windows while the program waits."""

    def __init__(self, strategy: local_sgd) -> None:
        self._strategy = strategy
        self._since: int | None = strategy.start if strategy.start != "decay" else None  # local from here on

    def meet(self, replica: AnchoredReplica) -> None:
        window, since = replica.met, self._since
        if since is not None and window > since and (window - since) % self._strategy.every:
            return
        fell = replica.fell[0]  # of a learning rate
        for fragment in replica.fragments:  # one, or none in a world of one
            weight = replica.exchange(fragment, agree_on_decay=since is None)
            means, fell = replica.finish(fragment)
            torch._foreach_sub_([fragment.anchors[name] for name in means], list(means.values()))  # x0 - mean(x0 - x_i)
            fragment.return_to_anchors()
            if self._strategy.momentum == "average" and replica.world.size > 1:
                replica.run(partial(average_momentum, replica.optimizer, weight))
        if fell and since is None:
            self._since = window
            replica.world.ledger.event("local phase", since=window, every=self._strategy.every)

    def shared_state(self, replica: AnchoredReplica) -> dict[str, Any]:
        return {"since": self._since}

    def load_shared(self, replica: AnchoredReplica, shared: dict[str, Any]) -> None:
        if self._strategy.start == "decay":
            self._since = shared.get("since")


def average_momentum(optimizer: Optimizer, weight: float, world: World) -> None:
    """The mean of every optimizer state that has its parameter's shape and that all ranks have; this one's counts
    `weight` times.

    A rank whose parameter never had a gradient has no state of it yet: then the others keep theirs.
    """
    params = [p for group in optimizer.param_groups for p in group["params"]]
    found = {
        f"{i}/{key}": value
        for i, param in enumerate(params)
        for key, value in sorted(optimizer.state.get(param, {}).items())
        if isinstance(value, Tensor) and value.is_floating_point() and value.shape == param.shape
    }
    mark = hashlib.blake2b("\n".join(found).encode(), digest_size=7).digest()
    code = int.from_bytes(mark, "little")
    marks = torch.tensor([code, -code])
    world.all_reduce(marks, "max", tag="momentum").wait()
    if marks[0] != -marks[1]:  # the ranks have not the same
        everywhere = set.intersection(*map(set, world.gather_objects(list(found))))
        found = {path: value for path, value in found.items() if path in everywhere}
    for device in dict.fromkeys(x.device for x in found.values()):
        take_weighted_mean([x for x in found.values() if x.device == device], weight, world, tag="momentum")
