"""Memory that all workers of a host have in common, in parts, and where these workers meet.

For methods that keep something once a host instead of once a worker:

    memory = HostMemory(world, "zero")            # every rank; on several hosts each has memory of its own
    line = memory.line(unit.numel, dtype)         # zero at first; what one rank of the host writes, all of it read
    start, stop = memory.part(line)               # what this rank is to write: borders lie on cache lines
    memory.meet("values")                         # all ranks of the host have come: what each wrote is there

`move_in` lets parameters lie in a view of such a line, with the values of the host's first rank, and `move_out` gives
every rank its own again. Nobody may write to a part while another reads it: a meeting lies between the two. What a rank
writes to its view of a line stays there, until it is taken over (see `_writes`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import zip_longest
from typing import Any, NamedTuple
from zlib import crc32

import torch
from torch import Tensor, nn

from unisono.launchers.runtime.frames import warn_user
from unisono.launchers.runtime.huge_pages import drop_copied, find_copied
from unisono.methods.buckets import alignment
from unisono.methods.strategy.program_writes import digest
from unisono.world import Mismatch, World

_NUMBERS = 6  # that travel with a meeting: all meetings are alike, so that ranks in different ones can say so


class HostMemory:
    """Lines of memory of my host.

    home: the ranks of my host. every: all ranks. Both have an order of their own, and run in the thread that calls;
    on one host they are the same.
    """

    def __init__(self, world: World, method: str) -> None:
        """Every rank makes it; `method` is named where there is no such memory."""
        self._method = method
        self.home = world.split("host", inline=True)
        self.hosts = len(set(world.hosts))
        self.every = self.home if self.hosts == 1 else world.channel(inline=True)
        self._views: dict[int, Tensor] = {}  # of lines, by where these lie

    @classmethod
    def find(cls, world: World, method: str) -> HostMemory | None:
        """None for ranks that talk by messages, on one host."""
        memory = cls(world, method)
        try:
            memory.line(1, torch.uint8)
        except ValueError:
            memory.close()
            return None
        return memory

    @property
    def rank(self) -> int:
        """This process's rank within its host."""
        return self.home.rank

    @property
    def size(self) -> int:
        """How many ranks this host has."""
        return self.home.size

    def line(self, n: int, dtype: torch.dtype) -> Tensor:
        """`n` elements that all ranks of my host see, zero at first; each of these ranks asks alike."""
        try:
            line, view = self.home.shared_view(max(1, n), dtype)
        except ValueError as error:
            raise ValueError(
                f"{self._method} keeps one model for all workers of a host in memory that they share, and here they "
                f"have none ({error}): UNISONO_SHARED_MEMORY must not be 0, and all workers of a host must run as "
                "one user, in one container; else use allreduce or zero"
            ) from None
        self._views[line.untyped_storage().data_ptr()] = view
        return line[:n]

    def view(self, line: Tensor) -> Tensor:
        """A line as this rank's program sees it: what is written to it here, no other rank sees."""
        return self._views[line.untyped_storage().data_ptr()][: line.numel()]

    def lines(self, n: int, dtype: torch.dtype) -> list[Tensor]:
        """Such a line for each rank of my host; the others see mine too."""
        step = alignment(dtype)
        room = -(-n // step) * step
        whole = self.line(room * self.size, dtype)
        return [whole[r * room : r * room + n] for r in range(self.size)]

    def part(self, line: Tensor) -> tuple[int, int]:
        """Where my part of a line begins and ends."""
        return cut(line.numel(), self.rank, self.size, step=alignment(line.dtype))

    def meet(self, what: str, numbers: Sequence[int] = (), *, everywhere: bool = False) -> list[int]:
        """Wait until all ranks of my host have come (`everywhere`: those of all hosts) to do the same; gives the
        largest of every rank's `numbers` (at most six, of 32 bits)."""
        world = self.every if everywhere else self.home
        code = crc32(what.encode()) & 0x7FFFFFFF
        found = torch.tensor([code, -code, *numbers, *[0] * (_NUMBERS - len(numbers))], dtype=torch.int32)
        world.all_reduce(found, "max", tag=what.rstrip("0123456789 ")).wait()  # tags are few
        most, least, *largest = found.tolist()
        if most != -least:
            each = "; ".join(f"rank {r} came for: {text}" for r, text in enumerate(world.gather_objects(what)))
            raise Mismatch(
                f"the workers of one model have come to different places of their program ({each}). Every rank makes "
                "as many backward passes and optimizer steps as the others, in the same order"
            )
        return largest[: len(numbers)]

    def close(self) -> None:
        """Close the worlds in which ranks meet. Memory stays as long as a tensor lies in it."""
        self._views.clear()
        for world in dict.fromkeys((self.every, self.home)):
            world.close()


def cut(length: int, rank: int, size: int, *, step: int = 1) -> tuple[int, int]:
    """The part of `rank` in so many elements: all about equal, borders at multiples of `step`.

    >>> [cut(100, rank, 3, step=16) for rank in range(3)]
    [(0, 48), (48, 96), (96, 100)]
    """
    each = -(-length // (size * step)) * step
    return min(rank * each, length), min((rank + 1) * each, length)


@torch.no_grad()
def move_in(params: Sequence[Tensor], places: Sequence[Tensor], views: Sequence[Tensor], memory: HostMemory) -> None:
    """Let parameters lie at `views` of a line, with the values that they have on the host's first rank; `places`: the
    same places in the line itself."""
    if memory.rank == 0:
        for param, place in zip(params, places, strict=True):
            place.copy_(param)
    memory.meet("moving in")
    for param, view in zip(params, views, strict=True):
        param.data = view


@torch.no_grad()
def move_out(params: Sequence[Tensor], views: Sequence[Tensor]) -> None:
    """Give parameters memory of this rank's own, unless another has moved them since."""
    for param, view in zip(params, views, strict=True):
        if param.data_ptr() == view.data_ptr():
            param.data = param.detach().clone(memory_format=torch.preserve_format)


Written = dict[str, str]  # by parameter: how often since the last step, and a digest of what is there


class Placed(NamedTuple):
    """Parameters, or what is kept for each, and their names: they lie at `views` of what this rank sees of a line of
    the host's memory."""

    names: list[str]
    params: Sequence[Tensor]
    views: list[Tensor]
    seen: Tensor
    line: Tensor

    @property
    def is_own(self) -> bool:
        """Whether no other rank of the host uses the line: then there is no view beside it."""
        return self.seen.data_ptr() == self.line.data_ptr()

    def find_copied(self) -> list[tuple[int, int]]:
        """Where this rank has copies of its own: their first elements, and those behind them."""
        if self.is_own:
            return []
        size, nbytes = self.line.itemsize, self.line.nbytes
        found = find_copied(self.seen.data_ptr(), nbytes)
        if found is None:  # the kernel does not say
            is_same = torch.equal(self.seen.view(torch.uint8), self.line.view(torch.uint8))
            found = [] if is_same else [(0, nbytes)]
        return [(low // size, -(-high // size)) for low, high in found]

    def drop_copied(self) -> None:
        """See what is there for all, again."""
        if not self.is_own:
            drop_copied(self.seen.data_ptr(), self.line.nbytes)


class Writes:
    """Follows the parameters of some lines."""

    def __init__(
        self,
        model: nn.Module,
        placed: Sequence[Placed],
        memory: HostMemory,
        on_taken: Callable[[], None] = lambda: None,
    ) -> None:
        """`on_taken`: the lines have other values now."""
        self._model, self._placed, self._memory, self._on_taken = model, list(placed), memory, on_taken
        self._versions: list[list[int]] = []
        self._is_stepping = self._has_copies = False
        self._note()

    def follow(self, placed: Sequence[Placed]) -> None:
        """Follow others, too."""
        self._placed += placed
        self._versions += [[param._version for param in one.params] for one in placed]

    def _note(self) -> None:
        """Parameters are what they should be."""
        self._versions = [[param._version for param in one.params] for one in self._placed]

    @torch.no_grad()
    def _bring_back(self) -> None:
        """Values that were given other memory (`p.data = x`) are what was written."""
        for one in self._placed:
            for param, view in zip(one.params, one.views, strict=True):
                if param.data_ptr() != view.data_ptr():
                    view.copy_(param)
                    param.data = view

    def _find_written(self) -> Written:
        """What this rank's program has written since."""
        self._bring_back()
        self._has_copies, found = False, {}
        for one, versions in zip(self._placed, self._versions, strict=True):
            copied = one.find_copied()
            if not copied and [param._version for param in one.params] == versions:
                continue
            self._has_copies |= bool(copied)
            for name, param, view, before in zip(one.names, one.params, one.views, versions, strict=True):
                first = int(view.storage_offset() - one.seen.storage_offset())
                mine, count = slice(first, first + view.numel()), param._version - before
                if count or any(low < mine.stop and mine.start < high for low, high in copied):
                    seen, shared = one.seen[mine].view(torch.uint8), one.line[mine].view(torch.uint8)
                    if count or not torch.equal(seen, shared):  # else a page that another's lies in
                        found[name] = f"{count} {crc32(seen.numpy().data if len(seen) else b'')}"
        return found

    # When the ranks of a host meet ---------------------------------------------------------------------------------

    def begin_step(self, what: str, settings: Sequence[str]) -> None:
        """All ranks of the host are about to step, which is `what`, by the same `settings`."""
        self.settle(what, settings)
        self._is_stepping = True

    def end_step(self) -> None:
        """This rank has stepped its part."""
        stepping, self._is_stepping = self._is_stepping, False
        for one, versions in zip(self._placed, self._versions, strict=True) if stepping else ():
            for name, param, before in zip(one.names, one.params, versions, strict=True):
                if param._version != before:
                    raise ValueError(
                        f"parameter {name!r} was written to inside optimizer.step(), while other workers of the host "
                        "step their parts of it: a hook on the optimizer's step that writes is registered after "
                        "un.parallel"
                    )

    def settle(self, what: str, settings: Sequence[str] = ()) -> None:
        """Meet, and let what all ranks wrote alike count once; raise where ranks wrote different things or have
        different `settings`."""
        written = self._find_written()
        code = crc32(repr(written).encode()) & 0x7FFFFFFF if written else 0
        same = crc32("\n".join(settings).encode()) & 0x7FFFFFFF
        most, least, most_same, least_same = self._memory.meet(what, [code, -code, same, -same])
        if most != -least:
            raise ValueError(_name_writers(self._memory.home.gather_objects(written)))
        if most_same != -least_same:
            raise ValueError(_name_settings(self._memory.home.gather_objects(list(settings))))
        if written:
            for one in self._placed:
                if not one.is_own and any(name in written for name in one.names):
                    start, stop = self._memory.part(one.line)
                    one.line[start:stop].copy_(one.seen[start:stop])
            self._take_over("what the program wrote")
        elif self._has_copies:
            self._drop()

    @torch.no_grad()
    def write(self, change: Callable[[], Any], *, everywhere: bool = False) -> None:
        """Let one rank change parameters, while the others wait; `everywhere`: one of each host."""
        self._memory.meet("replica.write", everywhere=everywhere)
        self.settle("what was written before replica.write")
        if self._memory.rank == 0:
            change()
            self._bring_back()
            for one in self._placed:
                one.line.copy_(one.seen)
        self._take_over("the end of replica.write", everywhere=everywhere)

    def take_loaded(self, what: str) -> None:
        """The lines themselves were written to, by every rank its part: see what is there."""
        self._take_over(what)

    def _take_over(self, what: str, *, everywhere: bool = False) -> None:
        self._memory.meet(what, everywhere=everywhere)
        self._drop()
        self._on_taken()

    def _drop(self) -> None:
        for one in self._placed:
            one.drop_copied()
        self._note()

    # On demand ----------------------------------------------------------------------------------------------------

    def find_differences(self, world: World) -> list[str]:
        """By name, what ranks have not alike: parameters of different hosts, and who wrote where others did not."""
        shared = {id(param) for one in self._placed for param in one.params}
        named = list(self._model.named_parameters())
        mine: dict[str, Any] = {
            "written": self._find_written(),
            "digests": {n: digest([p]) for n, p in named if self._memory.rank == 0 or id(p) not in shared},
        }
        every = world.gather_objects(mine)
        found = []
        for name, _ in named:
            digests = {r: one["digests"][name] for r, one in enumerate(every) if name in one["digests"]}
            others = [str(r) for r, digest in digests.items() if digest != digests[0]]
            if others:
                found.append(f"parameter {name!r} of rank(s) {', '.join(others)} is not that of rank 0")
        for name in dict.fromkeys(name for rank in every for name in rank["written"]):
            wrote = [str(r) for r, rank in enumerate(every) if name in rank["written"]]
            if len(wrote) < world.size:
                found.append(f"rank(s) {', '.join(wrote)} alone wrote to parameter {name!r}")
            elif len({rank["written"][name] for rank in every}) > 1:
                found.append(f"the ranks wrote different values to parameter {name!r}")
        return found

    def warn_of_differences(self, world: World) -> None:
        """At a checkpoint."""
        found = self.find_differences(world)
        if found and world.rank == 0:
            more = f"; and {len(found) - 3} more" if len(found) > 3 else ""
            warn_user(f"the ranks that share a model do not have it alike: {'; '.join(found[:3])}{more}")


def describe_settings(group: Mapping[str, Any]) -> list[str]:
    """The numbers of a param group, in words.

    >>> describe_settings({"params": [], "lr": torch.tensor(0.5), "betas": (0.9, 0.99), "fused": None})
    ['lr=0.5', 'betas=(0.9, 0.99)']
    """
    plain = {k: v.item() if isinstance(v, Tensor) and v.numel() == 1 else v for k, v in group.items() if k != "params"}
    return [f"{k}={v!r}" for k, v in plain.items() if isinstance(v, bool | int | float | tuple)]


def _name_writers(every: Sequence[Written]) -> str:
    names = dict.fromkeys(name for written in every for name in written)
    first = next(name for name in names if len({written.get(name) for written in every}) > 1)
    counts = {written.get(first, "").partition(" ")[0] for written in every}
    wrote = [str(r) for r, written in enumerate(every) if first in written]
    others = [str(r) for r in range(len(every)) if str(r) not in wrote]
    if len(counts) == 1:
        other = next(r for r, written in enumerate(every) if written[first] != every[0][first])
        what = f"what was written to parameter {first!r} since the last step differs between local ranks 0 and {other}"
    else:
        what = f"local rank(s) {', '.join(wrote)} wrote to parameter {first!r} since the last step" + (
            f", and rank(s) {', '.join(others)} did not" if others else ", not equally often"
        )
    return (
        f"{what}. The workers of a host share one model: every rank makes the same changes, or all call "
        "replica.write(function), which makes them on one worker of each host"
    )


def _name_settings(every: Sequence[Sequence[str]]) -> str:
    found = next(lines for lines in zip_longest(*every, fillvalue="no more settings") if len(set(lines)) > 1)
    each = "; ".join(f"local rank {r} has {line}" for r, line in enumerate(found))
    return (
        f"the ranks of a host are about to step one model differently: {each}. Every rank sets its optimizer alike: a "
        "learning rate that follows what a rank has measured has to follow the mean over all ranks"
    )
