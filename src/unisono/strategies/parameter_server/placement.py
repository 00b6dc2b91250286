"""Who serves whom: parameters parted among servers, a world of two for each worker and server, and the leaving.

Worker and server ranks are those of the world in which all of them meet.
"""

from __future__ import annotations

import atexit
import sys
import threading
import weakref
from collections.abc import Callable, Sequence

from torch import Tensor
from torch.nn import Parameter

from unisono.strategies.parameter_server.protocol import Coder, Desk, Local, Remote, Settled
from unisono.strategies.parameter_server.server import Server
from unisono.world import World


class Party:
    """My ways to the servers, and the desks of the server that is here, if one is."""

    def __init__(self, ways: Sequence[Local | Remote], desks: Sequence[Desk]) -> None:
        self.ways, self.desks = list(ways), list(desks)
        self._lock = threading.Lock()
        self._left = False
        _parties.add(self)

    def settle(self, buffers: bytes) -> list[Settled]:
        """What every server holds when all workers rest; a rank that serves goes on when all have been told."""
        found = [way.settle(buffers) for way in self.ways]
        for way in self.ways:
            if isinstance(way, Local):
                way.server.told(way.worker, wait=True)
        return found

    def leave(self) -> None:
        """Tell the servers that I come no more."""
        with self._lock:
            left, self._left = self._left, True
        if not left:
            for way in self.ways:
                way.bye()

    def finish(self) -> None:
        """Leave, and serve the others until they have left too."""
        self.leave()
        for desk in self.desks:
            desk.wait()
        self._let_go()

    def abandon(self) -> None:
        """End at once, also where others have not left."""
        self._left = True
        for desk in self.desks:
            desk.close()
        self._let_go()

    def _let_go(self) -> None:
        for way in self.ways:
            if isinstance(way, Remote):
                way.pair.close()
        for desk in self.desks:
            desk.pair.close()
        _parties.discard(self)


_parties: set[Party] = set()


@atexit.register
def _see_off() -> None:
    """At the end of the program: serve those that still train, unless this program has failed.

    All servers are told first: a rank that waits for the others of one may be what they wait for at another.
    """
    parties, failed = list(_parties), getattr(sys, "last_value", None) is not None
    for party in parties:
        if not failed:
            party.leave()
    for party in parties:
        if failed:
            party.abandon()
        else:
            party.finish()


def when_forgotten(owner: object, party: Party) -> None:
    """Leave when `owner` is gone without a close."""
    weakref.finalize(owner, party.leave).atexit = False


def arrange(
    world: World,
    parts: Sequence[Sequence[Parameter]],
    places: Sequence[int],
    workers: Sequence[int],
    *,
    server: Callable[[Sequence[Parameter]], Server],
    coder: Callable[[Sequence[Parameter], int, int], Coder | None],
) -> Party:
    """Every rank's ways and desks: `parts[i]` of the parameters is served on rank `places[i]`.

    `server(part)` makes a server; `coder(part, worker, i)` what its pushes are compressed with.
    """
    me = world.rank
    pairs = _pairs(world, [(w, s) for s in places for w in workers if w != s])
    ways: list[Local | Remote] = []
    desks: list[Desk] = []
    for i, (place, part) in enumerate(zip(places, parts, strict=True)):
        here = server(part) if place == me else None
        if here is not None:
            desks += [Desk(here, pairs[w, me], w, part, coder(part, w, i)) for w in workers if w != me]
        if me in workers:
            targets: Sequence[Tensor] = part  # wherever their memory will be: another replica may move it
            mine = coder(part, me, i)
            if here is not None:
                ways.append(Local(here, me, targets, mine))
            else:
                ways.append(Remote(pairs[me, place], place, len(workers), targets, mine))
    return Party(ways, desks)


def parted(params: Sequence[Parameter], count: int) -> list[list[Parameter]]:
    """Whole tensors, the largest first to the part that has least; in their own order there.

    >>> import torch
    >>> [[p.numel() for p in part] for part in parted([Parameter(torch.zeros(n)) for n in (3, 9, 4, 1)], 2)]
    [[9], [3, 4, 1]]
    """
    loads = [0] * count
    chosen: list[list[int]] = [[] for _ in range(count)]
    sizes = [p.numel() * p.element_size() for p in params]
    for i in sorted(range(len(params)), key=lambda i: -sizes[i]):
        least = min(range(count), key=lambda s: (loads[s], len(chosen[s])))
        loads[least] += sizes[i]
        chosen[least].append(i)
    return [[params[i] for i in sorted(part)] for part in chosen]


def _pairs(world: World, wanted: Sequence[tuple[int, int]]) -> dict[tuple[int, int], World]:
    """A world of two for each worker and server, several made at a time; those that hold me."""
    made: dict[tuple[int, int], World] = {}
    left = list(wanted)
    while left:
        now: list[tuple[int, int]] = []
        busy: set[int] = set()
        for pair in left:
            if not busy & {*pair}:
                now.append(pair)
                busy.update(pair)
        left = [pair for pair in left if pair not in now]
        groups = [list(pair) for pair in now] + [[r] for r in range(world.size) if r not in busy]
        mine = world.split(groups, inline=True)
        made.update({pair: mine for pair in now if world.rank in pair})
    return made
