"""What a program writes to parameters by itself: found before the next step, and named where ranks differ.

All ranks of a host write to one memory. What gives the same however often it is done (`clamp_`, `copy_`,
`load_state_dict`) is right when every rank does it. What starts from the value that is there (`mul_`, `add_`) counts
once for each rank: `replica.write` does it once.
"""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple
from zlib import crc32

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from unisono.runtime.frames import warn_user
from unisono.strategies._host_memory import HostMemory
from unisono.world import World


class Placed(NamedTuple):
    """Parameters, their names, and the host's memory in which they lie."""

    names: list[str]
    params: list[Parameter]
    views: list[Tensor]


class Writes:
    """Follows the parameters of some lines, by their version counters and by where they lie."""

    def __init__(self, model: nn.Module, placed: Sequence[Placed], memory: HostMemory) -> None:
        self._model, self._memory = model, memory
        self._places = [
            (name, param, view)
            for one in placed
            for name, param, view in zip(one.names, one.params, one.views, strict=True)
        ]
        self._has_warned = False
        self._versions: list[int] = []
        note = partial(_note, weakref.ref(self))
        inner = getattr(model, "_orig_mod", model)  # torch.compile puts another module around it
        self._hook = inner.register_load_state_dict_post_hook(note)
        self.note()

    def note(self) -> None:
        """Parameters are what they should be."""
        self._versions = [param._version for _, param, _ in self._places]

    def _find_written(self) -> list[str]:
        """Which parameters this rank's program has written to since."""
        now = zip(self._places, self._versions, strict=True)
        return [f"{name} {param._version - before}" for (name, param, _), before in now if param._version != before]

    def _find_moved(self) -> list[str]:
        """Which parameters have other memory than the host's (`p.data = x`)."""
        return [name for name, param, view in self._places if param.data_ptr() != view.data_ptr()]

    def describe(self) -> list[int]:
        """What the ranks of a host compare as they meet for a step."""
        written = self._find_written()
        code = crc32(repr(written).encode()) & 0x7FFFFFFF if written else 0
        return [code, -code, bool(self._find_moved())]

    def check(self, largest: Sequence[int]) -> None:
        """Raise where ranks wrote different things, and bring back what was moved elsewhere; `largest`: of all ranks'
        `describe()`."""
        most, least, any_moved = largest
        written = self._find_written()
        if most != -least:
            raise ValueError(self._name_writers(self._memory.home.gather_objects(written)))
        if any_moved:
            self._bring_back()
        if written and not self._has_warned:
            self._has_warned = True
            if self._memory.rank == 0:
                warn_user(
                    f"every worker of the host wrote to {written[0].rpartition(' ')[0]!r}, which is one for all of "
                    "them. That is right for what gives the same however often it is done (clamp_, copy_). What "
                    f"starts from the old value (mul_, add_) was done {self._memory.size} times: do it in "
                    "replica.write(function), which calls it on one worker of each host. This is said once"
                )
        self.note()

    def _name_writers(self, every: Sequence[Sequence[str]]) -> str:
        names = dict.fromkeys(one for written in every for one in written)
        first = next(one for one in names if any(one not in written for written in every))
        wrote = [str(r) for r, written in enumerate(every) if first in written]
        others = [str(r) for r in range(len(every)) if str(r) not in wrote]
        return (
            f"local rank(s) {', '.join(wrote)} wrote to parameter {first.rpartition(' ')[0]!r} since the last step; "
            f"rank(s) {', '.join(others)} did not, or not as often. The workers of a host share one model: every rank "
            "makes the same changes, or all call replica.write(function), which makes them on one worker of each host"
        )

    @torch.no_grad()
    def _bring_back(self) -> None:
        """Values that lie elsewhere go into the host's memory, if all ranks have the same."""
        every = self._memory.home.gather_objects({name: _digest(p) for name, p, _ in self._places})
        for name in every[0]:
            found = [digests[name] for digests in every]
            if len(set(found)) > 1:
                other = next(r for r, digest in enumerate(found) if digest != found[0])
                raise ValueError(
                    f"parameter {name!r} was given other memory (p.data = ...), and its values differ between local "
                    f"ranks 0 and {other}: give all ranks the same, or write in place: p.data.copy_(x)"
                )
        if self._memory.rank == 0:
            for _, param, view in self._places:
                if param.data_ptr() != view.data_ptr():
                    view.copy_(param)
        self._memory.meet("parameters that were moved")
        for _, param, view in self._places:
            param.data = view

    # On demand ----------------------------------------------------------------------------------------------------

    def find_differences(self, world: World) -> list[str]:
        """By name, what ranks have not alike: parameters of different hosts, and who wrote where others did not."""
        shared = {id(param) for _, param, _ in self._places}
        named = list(self._model.named_parameters())
        mine: dict[str, Any] = {
            "written": self._find_written(),
            "digests": {n: _digest(p) for n, p in named if self._memory.rank == 0 or id(p) not in shared},
        }
        every = world.gather_objects(mine)
        found = []
        for name, _ in named:
            digests = {r: one["digests"][name] for r, one in enumerate(every) if name in one["digests"]}
            others = [str(r) for r, digest in digests.items() if digest != digests[0]]
            if others:
                found.append(f"parameter {name!r} of rank(s) {', '.join(others)} is not that of rank 0")
        names = dict.fromkeys(one for rank in every for one in rank["written"])
        for one in names:
            wrote = [str(r) for r, rank in enumerate(every) if one in rank["written"]]
            if len(wrote) < world.size:
                found.append(f"rank(s) {', '.join(wrote)} alone wrote to parameter {one.rpartition(' ')[0]!r}")
        return found

    def warn_of_differences(self, world: World) -> None:
        """At a checkpoint."""
        found = self.find_differences(world)
        if found and world.rank == 0:
            more = f"; and {len(found) - 3} more" if len(found) > 3 else ""
            warn_user(f"the ranks that share a model do not have it alike: {'; '.join(found[:3])}{more}")

    def close(self) -> None:
        """Follow them no more."""
        self._hook.remove()


def _note(writes: weakref.ref[Writes], *_: Any) -> None:
    found = writes()
    if found is not None:
        found.note()


def _digest(x: Tensor) -> str:
    line = x.detach().contiguous().view(-1)
    raw = line.view(torch.uint8).numpy().data if line.numel() else b""
    return hashlib.blake2b(raw, digest_size=16).hexdigest()
