"""Steps that one rank alone would spoil: told by its gradient norm or its loss, skipped by all ranks, and named.

A batch of broken samples, or a rank whose memory flips bits, gives one rank a gradient that is many times that of the
others and of before. If several ranks have such a one, it is the training, and nothing is skipped.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from statistics import median
from typing import TYPE_CHECKING

import torch

from unisono.launchers.runtime.frames import warn_user
from unisono.observe.runs.backward import Losses, follow_backward, leave_backward

if TYPE_CHECKING:
    from unisono.methods.strategy.replica import Replica

REMEMBERED, NEEDED = 64, 8  # steps whose medians say what is usual, and how many of them it takes
_KINDS = ("gradient norm", "loss")


def find_outlier(values: Sequence[float], usual: float | None, times: float) -> int | None:
    """The rank whose value alone is more than `times` what the others have, and what was usual; or is not finite.

    >>> find_outlier([1.0, 1.2, 30.0], usual=1.0, times=10), find_outlier([20.0, 1.2, 30.0], usual=1.0, times=10)
    (2, None)
    >>> find_outlier([1.0, math.nan], usual=None, times=10), find_outlier([1.0, 30.0], usual=25.0, times=10)
    (1, None)
    """
    found = []
    for rank, value in enumerate(values):
        others = [x for r, x in enumerate(values) if r != rank and math.isfinite(x)]
        if not others:
            continue
        if not math.isfinite(value) or (usual is not None and value > times * max(median(others), usual, 0.0)):
            found.append(rank)
    return found[0] if len(found) == 1 else None


class Outliers:
    """Judges every window of a replica, on all ranks alike, by two numbers that each rank tells the others."""

    def __init__(self, replica: Replica, times: float) -> None:
        if isinstance(times, bool) or not isinstance(times, int | float) or not times > 1:
            raise ValueError(f"got skip_outliers={times!r}, expected how many times the usual is one: 10, say")
        if replica.noise is None and replica.world.size > 1:
            raise ValueError(
                f"skip_outliers looks at each rank's own gradients before they are exchanged exactly, and "
                f"{type(replica.strategy).__name__} has none such: use allreduce, shared or zero, without a reducer "
                "that compresses"
            )
        self.replica, self.times = replica, float(times)
        self.skipped: list[dict[str, object]] = []  # what was, and why
        self.is_skipping = False  # the step under way
        self._usual: dict[str, deque[float]] = {kind: deque(maxlen=REMEMBERED) for kind in _KINDS}
        self._losses = Losses()
        self._sees_losses = follow_backward(self)
        if replica.noise is not None:
            replica.noise.keeps_norm = True

    def close(self) -> None:
        """Look at backward passes no more."""
        leave_backward(self)

    # As a listener of backward passes -------------------------------------------------------------------------------

    def before_backward(self, tensors: object) -> None:
        """See BackwardListener."""
        self._losses.note(tensors)

    def after_backward(self) -> None:
        """See BackwardListener."""

    def note_scaled(self, scaled: object, loss: object) -> None:
        """See BackwardListener."""
        self._losses.note_scaled(scaled, loss)

    def _take_loss(self) -> float:
        """This rank's loss of the window; NaN if it is not known, as where a run is recorded: see `Recorder`."""
        if self._sees_losses:
            losses = self._losses.take()
            return sum(map(float, losses)) / len(losses) if losses else math.nan
        last = getattr(self.replica.world.ledger.listener, "last_loss", None)
        return math.nan if last is None else float(last)

    # After a window, before the step --------------------------------------------------------------------------------

    def judge(self) -> None:
        """Every rank is about to step: drop the gradients, if one rank's are an outlier."""
        replica = self.replica
        self.is_skipping = False
        if replica.noise is None or replica.world.size == 1:
            return
        replica.noise.keeps_norm = True  # also in a new world
        loss = self._take_loss()
        mine = torch.tensor([replica.noise.take_norm(), 0.0 if math.isnan(loss) else loss, math.isnan(loss)])
        every = torch.stack(replica.world.all_gather(mine.double(), tag="outliers").wait()).tolist()
        known = {_KINDS[0]: [row[0] for row in every]}
        if not any(row[2] for row in every):
            known[_KINDS[1]] = [row[1] for row in every]
        for kind, values in known.items():
            past = self._usual[kind]
            usual = median(past) if len(past) >= NEEDED else None
            rank = find_outlier(values, usual, self.times)
            if rank is not None:
                self._skip(kind, rank, values, usual)
                return
        for kind, values in known.items():
            if all(map(math.isfinite, values)):
                self._usual[kind].append(median(values))

    def _skip(self, kind: str, rank: int, values: Sequence[float], usual: float | None) -> None:
        replica, world = self.replica, self.replica.world
        mine = [shard.describe_batch() for shard in world.shards.values() if shard.is_out] if world.rank == rank else []
        samples = "; ".join(world.gather_objects(mine)[rank]) or "not known: no un.shard gave them"
        others = median(x for r, x in enumerate(values) if r != rank and math.isfinite(x))
        what: dict[str, object] = {
            "rank": rank,
            "what": kind,
            "value": str(values[rank]) if not math.isfinite(values[rank]) else values[rank],
            "others": others,
            "usual": usual,
            "window": replica.step,
            "samples": samples,
        }
        self.skipped.append(what)
        self.is_skipping = True
        before = "" if usual is None else f", {usual:.4g} before"
        text = (
            f"the step of window {replica.step} is skipped on all ranks: the {kind} of rank {rank} is "
            f"{values[rank]:.4g}, that of the others {others:.4g}{before}. Its samples: {samples}"
        )
        world.ledger.event("outlier", text=text, **what)
        if world.rank == 0:
            warn_user(text)
        for optimizer in replica.members:
            optimizer.zero_grad()
        replica.model.zero_grad()
        if replica.windows is not None:
            replica.windows.before_step()  # which notices that they are gone
