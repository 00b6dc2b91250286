"""A pipeline's schedule replayed: when each stage computes what, were messages to take no time, and who stands still.

An order is, for each rank, its actions one after the other: (stage, kind, microbatch). Kinds are those of torch's
schedules: "F" forward, "B" backward, "I" and "W" its two halves (gradients of inputs, of weights).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

Action = tuple[int, str, int]
UNITS = {"F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0}  # of equal stages: backward takes twice as long as forward


@dataclass(frozen=True)
class Replay:
    """A replayed schedule: how long it takes, and how long each rank computes in that time."""

    length: float
    busy: tuple[float, ...]

    @property
    def bubble(self) -> float:
        """The share of the time in which a rank stands still, in the mean over the ranks."""
        return 1.0 - sum(self.busy) / len(self.busy) / self.length if self.length else 0.0


def replay_schedule(order: Mapping[int, Sequence[Action]], seconds: Callable[[Action], float]) -> Replay:
    """Replay an order: every action begins as soon as its rank is free and its inputs have come.

    >>> found = replay_schedule(order_single("1f1b", ranks=2, microbatches=8), lambda action: UNITS[action[1]])
    >>> round(found.bubble, 9)  # 1/9
    0.111111111
    """
    ends: dict[Action, float] = {}
    last = max(stage for actions in order.values() for stage, _, _ in actions)
    rest = {rank: list(actions) for rank, actions in order.items()}
    at, free, busy = dict.fromkeys(order, 0), dict.fromkeys(order, 0.0), dict.fromkeys(order, 0.0)
    while any(at[rank] < len(actions) for rank, actions in rest.items()):
        moved = False
        for rank, actions in rest.items():
            while at[rank] < len(actions):
                action = actions[at[rank]]
                needed = [_find_end(ends, one) for one in _list_needs(action, last)]
                if any(end is None for end in needed):
                    break
                took = seconds(action)
                ends[action] = free[rank] = max([free[rank], *(end for end in needed if end is not None)]) + took
                busy[rank] += took
                at[rank], moved = at[rank] + 1, True
        if not moved:
            raise ValueError("this order never ends: an action waits for one that comes after it")
    return Replay(max(free.values()), tuple(busy[rank] for rank in sorted(order)))


def _list_needs(action: Action, last: int) -> list[tuple[int, str, int]]:
    stage, kind, micro = action
    if kind == "F":
        return [(stage - 1, "F", micro)] if stage else []
    if kind == "W":
        return [(stage, "I", micro)]
    return [(stage, "F", micro), *([(stage + 1, "B", micro)] if stage < last else [])]


def _find_end(ends: Mapping[Action, float], needed: Action) -> float | None:
    stage, kind, micro = needed
    found = ends.get(needed)
    return ends.get((stage, "I", micro)) if found is None and kind == "B" else found


def order_single(kind: str, *, ranks: int, microbatches: int, ahead: int = 0) -> dict[int, list[Action]]:
    """GPipe or 1F1B, one stage a rank. `ahead`: with 1F1B, how many more microbatches a stage has under way than those
    after it need: one hides the way of messages.

    >>> order_single("1f1b", ranks=2, microbatches=2)[1]
    [(1, 'F', 0), (1, 'B', 0), (1, 'F', 1), (1, 'B', 1)]
    """
    order: dict[int, list[Action]] = {}
    for rank in range(ranks):
        first = microbatches if kind == "gpipe" else min(microbatches, count_under_way(rank, ranks, ahead))
        actions: list[Action] = [(rank, "F", i) for i in range(first)]
        for i in range(microbatches):
            actions.append((rank, "B", i))
            if first + i < microbatches:
                actions.append((rank, "F", first + i))
        order[rank] = actions
    return order


def count_under_way(stage: int, stages: int, ahead: int) -> int:
    """Microbatches whose activations a stage of 1F1B holds at one time."""
    return (1 + ahead) * (stages - 1 - stage) + 1


def say_formula(kind: str, *, chunks: int) -> str:
    """The schedule's bubble of equal stages as one writes it, for p ranks and m microbatches.

    >>> say_formula("1f1b", chunks=1), say_formula("interleaved1f1b", chunks=2), say_formula("zbvzerobubble", chunks=2)
    ('(p-1)/(m+p-1)', '(p-1)/(2m+p-1)', '(p-1)/(6m+p-1)')
    """
    many = chunks * (3 if "zerobubble" in kind else 1)
    return f"(p-1)/({many if many > 1 else ''}m+p-1)"
