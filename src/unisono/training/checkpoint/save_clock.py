"""When the next save is due, by rank 0's clock: the same answer on all ranks at the same call.

The ranks ask each other as in `unisono.world.preemption`: now and then, in the background, over a channel of their own.
"""

from __future__ import annotations

import time
import weakref

from unisono.training.checkpoint.remote import Place
from unisono.units import parse_duration
from unisono.world import World
from unisono.world.preemption import Agreement


class SaveClock:
    """Agreement of a world's ranks on when so much time has passed since the last save."""

    def __init__(self, world: World, every_s: float) -> None:
        self.every_s = every_s
        self._since, self._world = time.monotonic(), weakref.ref(world)
        self._agreement = Agreement(world, self._is_over, lambda: None)

    @classmethod
    def of(cls, world: World, place: Place, every: str | float) -> SaveClock:
        """The clock of this world for saves to a place, begun at the first call."""
        seconds = parse_duration(every, "every") if isinstance(every, str) else float(every)
        if not seconds > 0:
            raise ValueError(f"every is {every!r}; expected a time above 0, such as '10min'")
        clocks = _clocks.setdefault(world, {})
        if (clock := clocks.get(str(place))) is None:
            clock = clocks[str(place)] = cls(world, seconds)
        clock.every_s = seconds
        return clock

    def is_due(self) -> bool:
        """Whether it is time to save, on all ranks alike; the time to the next begins now."""
        if not self._agreement.ask():
            return False
        self._agreement.reached, self._since = False, time.monotonic()
        return True

    def _is_over(self) -> bool:
        world = self._world()
        return world is not None and world.rank == 0 and time.monotonic() - self._since >= self.every_s


_clocks: weakref.WeakKeyDictionary[World, dict[str, SaveClock]] = weakref.WeakKeyDictionary()
