"""Who serves whom: parameters split among servers, a world of two for each worker and server, and the leaving.

Worker and server ranks are those of the world in which all of them meet.
"""

from __future__ import annotations

import atexit
import sys
import threading
import weakref
from collections.abc import Callable, Sequence

from torch.nn import Parameter

from unisono.methods.strategies._serving.protocol import Coder, LocalLink, RemoteLink, RequestLoop, Settled
from unisono.methods.strategies._serving.server import Server, Values
from unisono.world import World


class Connections:
    """My links to the servers, and the loops of the server that is here, if one is."""

    def __init__(self, links: Sequence[LocalLink | RemoteLink], loops: Sequence[RequestLoop]) -> None:
        self.links, self.loops = list(links), list(loops)
        self._lock = threading.Lock()
        self._left = False
        self._forgotten: weakref.finalize[..., object] | None = None
        _connected.add(self)

    def settle(self, buffers: bytes, written: Sequence[Values]) -> list[Settled]:
        """What every server holds when all workers rest; a rank that serves goes on when all have been told.
        `written`: for each server, what the program wrote to its parameters."""
        found = [link.settle(buffers, values) for link, values in zip(self.links, written, strict=True)]
        for link in self.links:
            link.wait_until_all_settled()
        return found

    def leave(self) -> None:
        """Tell the servers that this worker has left."""
        with self._lock:
            left, self._left = self._left, True
        if not left:
            for link in self.links:
                link.disconnect()

    def finish(self) -> None:
        """Leave, and serve the others until they have left too."""
        self.leave()
        for loop in self.loops:
            loop.wait()
        self._release()

    def abandon(self) -> None:
        """End at once, also where others have not left."""
        self._left = True
        for loop in self.loops:
            loop.close()
        self._release()

    def leave_without(self, owner: object) -> None:
        """Leave when `owner` is gone without a close; a server that is here goes on behind the program."""

        def finish_behind() -> None:
            # All of it in a thread: `owner` may be collected while this one holds a lock that the server's step needs.
            threading.Thread(target=self.finish, name="unisono leaving", daemon=True).start()

        self._forgotten = weakref.finalize(owner, finish_behind)
        self._forgotten.atexit = False

    def _release(self) -> None:
        if self._forgotten is not None:  # else a thread would begin to leave once more, when the owner is collected
            self._forgotten.detach()
        for link in self.links:
            link.close()
        for loop in self.loops:
            loop.pair.close()
        _connected.discard(self)


_connected: set[Connections] = set()


@atexit.register
def _drain_at_exit() -> None:
    """At the end of the program: serve those that still train, unless this program has failed.

    All servers are told first: a rank that waits for the others of one may be what they wait for at another.
    """
    connected, failed = list(_connected), getattr(sys, "last_value", None) is not None
    for connections in connected:
        if not failed:
            connections.leave()
    for connections in connected:
        if failed:
            connections.abandon()
        else:
            connections.finish()


def connect(
    world: World,
    parts: Sequence[Sequence[Parameter]],
    places: Sequence[int],
    workers: Sequence[int],
    *,
    server: Callable[[Sequence[Parameter]], Server],
    coder: Callable[[Sequence[Parameter], int, int], Coder | None],
) -> Connections:
    """Every rank's links and loops: `parts[i]` of the parameters is served on rank `places[i]`.

    `server(part)` makes a server; `coder(part, worker, i)` what its pushes are compressed with.
    """
    me = world.rank
    pairs = _pairs(world, [(w, s) for s in places for w in workers if w != s])
    links: list[LocalLink | RemoteLink] = []
    loops: list[RequestLoop] = []
    for i, (place, part) in enumerate(zip(places, parts, strict=True)):
        here = server(part) if place == me else None
        if here is not None:
            loops += [RequestLoop(here, pairs[w, me], w, part, coder(part, w, i)) for w in workers if w != me]
        if me in workers:
            mine = coder(part, me, i)
            if here is not None:
                links.append(LocalLink(here, me, part, mine))
            else:
                links.append(RemoteLink(pairs[me, place], place, len(workers), part, mine))
    return Connections(links, loops)


def split_parameters(params: Sequence[Parameter], count: int) -> list[list[Parameter]]:
    """Whole tensors, the largest first to the part that has least; in their own order there.

    >>> import torch
    >>> [[p.numel() for p in part] for part in split_parameters([Parameter(torch.zeros(n)) for n in (3, 9, 4, 1)], 2)]
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
