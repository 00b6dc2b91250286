"""Which schedule runs the microbatches: torch's, and GPipe and 1F1B in an order in which messages cost less.

torch's own 1F1B waits for each message, sent or received, before it computes on. Here its runtime for orders (the one
of its interleaved schedules) runs them: receives are posted when the other side computes, sends are waited for at the
end, and each stage has one more microbatch under way, so that the next one to compute is there before it is needed.
"""

from __future__ import annotations

from typing import Any

from torch.distributed.pipelining.schedules import (
    _Action,
    _ComputationType,
    _PipelineScheduleRuntime,
    get_schedule_class,
)

from unisono.predict.costs.pipelines import Action, order_single

__all__ = ["AHEAD", "SEVERAL", "SINGLE", "check_schedule", "list_stages", "make_schedule", "read_order"]

AHEAD = 1  # microbatches, by default
SEVERAL = {"interleaved1f1b", "interleavedzerobubble", "zbvzerobubble", "loopedbfs"}  # stages a rank
SINGLE = {"gpipe", "1f1b"}
_V_SHAPED = {"zbvzerobubble"}


def check_schedule(schedule: str, chunks: int | None, microbatches: int, ranks: int, ahead: int) -> tuple[str, int]:
    """The schedule's name in small letters, and how many stages a rank has."""
    kind = schedule.lower()
    if kind not in SINGLE | SEVERAL:
        raise ValueError(
            f"schedule={schedule!r}: expected GPipe, 1F1B, LoopedBFS, Interleaved1F1B, InterleavedZeroBubble or "
            "ZBVZeroBubble"
        )
    per_rank = (chunks or 2) if kind in SEVERAL else 1
    if kind in SINGLE and chunks not in (None, 1):
        raise ValueError(f"chunks={chunks}: {schedule} has one stage a rank; Interleaved1F1B has several")
    if kind in _V_SHAPED and per_rank != 2:
        raise ValueError(f"chunks={chunks}: {schedule} has two stages a rank")
    if microbatches < 1 or (kind == "1f1b" and microbatches < ranks):
        raise ValueError(f"microbatches={microbatches}: {schedule} on {ranks} stages needs at least {ranks}")
    if ahead < 0:
        raise ValueError(f"ahead={ahead}: expected how many more microbatches are under way, from 0 on")
    return kind, per_rank


def list_stages(kind: str, place: int, ranks: int, per_rank: int) -> list[int]:
    """Which stages a rank has: one after the other in turns, or there and back."""
    if kind in _V_SHAPED:
        return [place, 2 * ranks - 1 - place]
    return [place + ranks * turn for turn in range(per_rank)]


def make_schedule(kind: str, stages: list[Any], microbatches: int, ahead: int, **settings: Any) -> Any:
    """The schedule of this rank's stages, as torch's are called."""
    if kind in SEVERAL:
        return get_schedule_class(kind)(stages, microbatches, **settings)
    order = order_single(kind, ranks=stages[0].group_size, microbatches=microbatches, ahead=ahead)
    return _Ordered(stages, microbatches, order, **settings)


def read_order(schedule: Any) -> dict[int, list[Action]]:
    """A schedule's computations, rank by rank."""
    return {
        rank: [
            (action.stage_index, str(action.computation_type.value), action.microbatch_index)
            for action in actions
            if action is not None and action.microbatch_index is not None
        ]
        for rank, actions in schedule.pipeline_order.items()
    }


class _Ordered(_PipelineScheduleRuntime):
    """Computations in a given order; torch puts the messages in."""

    def __init__(self, stages: list[Any], microbatches: int, order: dict[int, list[Action]], **settings: Any) -> None:
        super().__init__(stages, microbatches, **settings)  # type: ignore[no-untyped-call]
        self.pipeline_order = {
            rank: [_Action(stage, _ComputationType.from_str(kind), micro) for stage, kind, micro in actions]
            for rank, actions in order.items()
        }
        self._prepare_schedule_with_comms(self.pipeline_order)
