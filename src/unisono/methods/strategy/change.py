"""From one world to another: who stayed, and where they come from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from unisono.world import World


@dataclass(frozen=True)
class Change:
    """From one world to another: who stayed, in the ranks of the new world.

    A rank stayed if it was in the same world as rank `source` and had got as far (see `Replica.progress`).
    """

    world: World  # the new one
    source: int  # the rank whose state all go on from
    former_size: int  # of the world that `source` comes from
    former_ranks: tuple[int, ...]  # of every rank of the new world, in the world that it comes from
    progress: tuple[Any, ...]  # of every rank of the new world: how far it got
    stayed: tuple[int, ...]

    @property
    def keeps(self) -> bool:
        """Whether this rank stayed."""
        return self.world.rank in self.stayed

    @property
    def lost(self) -> int:
        """How many ranks of the former world are not here any more."""
        return self.former_size - len(self.stayed)

    @property
    def factor(self) -> float:
        """New size over former size: what the ranks that stayed had still to send counts so many times, so that it
        weighs the same in the mean over the ranks."""
        return self.world.size / self.former_size

    def describe_unsent(self) -> str:
        """What becomes of what the former ranks had still to send."""
        text = f"what {len(self.stayed)} of the {self.former_size} former ranks had still to send stays with them"
        if self.world.size != self.former_size:
            text += f", times {self.world.size}/{self.former_size}"
        return text + (f"; that of {self.lost} lost rank(s) is gone" if self.lost > 0 else "")
