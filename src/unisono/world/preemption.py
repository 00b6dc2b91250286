"""`un.preempted`: when to leave because the machine is wanted back, the same answer on all ranks at the same call.

A signal reaches the ranks at different steps, or only one of them. So every few calls they begin a small all-reduce
in the background, of whether a rank has been told, and take its result at the next such call. Its only cost is that a
rank waits for one that is more than such an interval behind. How many calls an interval has follows from how long the
slowest rank takes for one, which travels along: so all ranks count alike.
"""

from __future__ import annotations

import math
import time
import weakref
from collections.abc import Callable

import torch
from torch import Tensor

from unisono.background import Handle
from unisono.launchers.runtime import sigterm
from unisono.world.rendezvous import join
from unisono.world.world import World

__all__ = ["Agreement", "preempted"]

INTERVAL_S = 0.5
MOST_CALLS = 64  # in an interval: steps may become slower from one to the next


def preempted(world: World | None = None) -> bool:
    """Whether it is time to save and leave: a worker, or the launcher, has received SIGTERM.

    Every rank calls it after every step, and all get the same answer at the same call: False, then True from some call
    on. After the signal, that takes the current step and the next one, or up to a second if steps are short. The first
    call makes this process note SIGTERM instead of ending at once; a second SIGTERM, two seconds later, ends it.
    `world` is `un.join()` by default. After each step of a loop:

        if un.preempted():
            un.save("run/checkpoint", replica)
            sys.exit(143)
    """
    world = join() if world is None else world
    sigterm.watch()
    return Agreement.of(world).ask()


class Agreement:
    """Agreement of a world's ranks on when to leave; every rank makes one, at the same place of the program.

    told: whether this rank wants to leave. agreed: called when all have agreed. (Or on something else to be done.)
    """

    def __init__(
        self, world: World, told: Callable[[], bool] | None = None, agreed: Callable[[], None] | None = None
    ) -> None:
        self._told = told or (lambda: sigterm.told())
        self._agreed = agreed or (lambda: sigterm.note_agreement())
        self.reached = False
        self.world_changed(world)
        world.follow(self)

    def world_changed(self, world: World) -> None:
        """Ask the ranks that are here now: over a channel that is made with the first question, as a rank that has come
        asks it for the first time then."""
        self._world = world
        self._channel: World | None = None
        self._asked: Handle[Tensor] | None = None
        self._calls = self._due = 0
        self._interval = 1
        self._last: tuple[float, int] | None = None  # when the ranks last began to ask, and at which call

    @classmethod
    def of(cls, world: World) -> Agreement:
        """The agreement of this world, made at the first call."""
        if world not in _agreements:
            _agreements[world] = cls(world)
        return _agreements[world]

    def ask(self, *, now: bool = False) -> bool:
        """Whether to leave. `now`, the same on all ranks: wait for what all have been told by this call."""
        self._calls += 1
        elastic = self._world.elastic
        # Between two passes always: a rank that comes later gets the answers, and does not know which were left out.
        is_between = elastic is not None and bool(self._world.shards) and elastic.is_between_passes
        if self.reached or not (now or is_between or self._calls >= self._due):
            return self.reached
        if elastic is None:
            self._ask_all(now)
        else:
            self.reached = bool(elastic.call(lambda: self._ask_all(now), alone=lambda: False))
        if self.reached:
            self._agreed()
        return self.reached

    def _ask_all(self, now: bool) -> bool:
        if self._world.size == 1:
            self.reached = self._told()
        else:
            self._channel = self._channel or self._world.channel(inline=False)
            self._ask_others(self._channel, now)
        return self.reached

    def _ask_others(self, channel: World, now: bool) -> None:
        if self._asked is not None:
            self._take(self._asked)
        if not self.reached:
            self._asked = channel.all_reduce(self._vote(), "max", tag="preempted")
            if now:
                self._take(self._asked)
        self._due = self._calls + self._interval

    def _vote(self) -> Tensor:
        """This rank's vote: whether it has been told to leave, and its seconds a call."""
        clock = time.perf_counter()
        seconds = math.inf if self._last is None else (clock - self._last[0]) / (self._calls - self._last[1])
        self._last = clock, self._calls
        return torch.tensor([float(self._told()), seconds], dtype=torch.float64)

    def _take(self, asked: Handle[Tensor]) -> None:
        told, seconds = asked.wait().tolist()
        self._asked = None
        self.reached = bool(told)
        self._interval = max(1, min(MOST_CALLS, int(INTERVAL_S / max(seconds, 1e-9))))


_agreements: weakref.WeakKeyDictionary[World, Agreement] = weakref.WeakKeyDictionary()
