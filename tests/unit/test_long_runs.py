"""What a run keeps does not grow with its length: every container that world, replica and data can reach is counted."""

from __future__ import annotations

import functools
import gc
import threading
import time
import types
from collections import deque
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import nn

import unisono as un
from method_cases import Case, find_cases
from unisono.world import World, ledger

STEPS, STRETCHES = 12, 7
CASES = {case.name: case for case in reversed(find_cases("strategy")) if not case.example.varies}
OUTSIDE = (types.ModuleType, type, types.CodeType, types.FrameType, threading.Thread, threading.Condition)
CONTAINERS = (list, tuple, dict, set, frozenset, deque)


def count_kept(*roots: object) -> int:
    """Objects that the roots can reach, and the places in their containers; not what all of a process shares, and not
    who waits for a condition just now."""
    seen: dict[int, object] = {}
    ahead, count = list(roots), 0
    while ahead:
        one = ahead.pop()
        if id(one) in seen or isinstance(one, OUTSIDE):
            continue
        seen[id(one)] = one
        if isinstance(one, types.FunctionType):  # not the module around it
            ahead += [one.__closure__, one.__defaults__]
            continue
        count += 1 + len(one) if isinstance(one, CONTAINERS) else gc.is_tracked(one)
        ahead += gc.get_referents(one)
    return count


def train(case: Case, quiet: threading.Barrier, world: World) -> tuple[list[int], ledger.Totals, int]:
    """What is kept after N steps, 2N, 3N and so on."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
    kind = torch.optim.Adam if case.facts.needs_adam else torch.optim.SGD
    optimizer = kind(model.parameters(), lr=0.01)
    replica = un.parallel(model, optimizer, case.spec, world=world)
    batches = un.shard((torch.randn(16, 4), torch.randn(16, 1)), batch_size=4, world=world)
    kept = []
    for _ in range(STRETCHES):
        for _ in range(STEPS // len(batches)):
            for x, y in batches:
                optimizer.zero_grad()
                nn.functional.mse_loss(model(x), y).backward()
                optimizer.step()
        replica.consolidate()
        world.ledger.restart()  # what has ended since the last step, a few collectives more or less
        quiet.wait()  # no rank is on its way into a collective
        if world.rank == 0:  # a thread of the strategy may be in the middle of something
            kept.append(min(count_kept(world, replica, optimizer, batches) for _ in range(5) if not time.sleep(0.005)))
        quiet.wait()
    totals, collectives = world.ledger.totals(), world.ledger.sent().collectives
    replica.close()
    return kept, totals, collectives


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_what_is_kept_does_not_grow_with_the_steps(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("KEPT", "KEPT_EVENTS"):
        monkeypatch.setattr(ledger, name, 1)
    kept, totals, collectives = un.run_threads(functools.partial(train, case, threading.Barrier(2)), 2)[0]
    more = sorted(after - before for before, after in pairwise(kept[1:]))
    # On a busy machine now and then some dozens more, or fewer; what grows with the steps does so in every stretch.
    assert more[1] < STEPS // 2, f"{kept}: about one more in every step"
    assert totals.steps == STRETCHES * STEPS
    assert collectives >= totals.collectives > 0


def test_the_count_sees_what_grows() -> None:
    class Holder:
        pass

    holder: Any = Holder()
    holder.kept = [0.5]
    before = count_kept(holder)
    holder.kept.append(0.5)
    assert count_kept(holder) == before + 1
