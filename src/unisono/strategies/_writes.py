"""What a program writes to parameters by itself: found before the next step, and named where ranks differ.

All ranks of a host write to one memory. What gives the same however often it is done (`clamp_`, `copy_`,
`load_state_dict`) is right when every rank does it. What starts from the value that is there (`mul_`, `add_`) counts
once for each rank: `replica.write` does it once.
"""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Any, NamedTuple
from zlib import crc32

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from unisono.runtime.frames import warn_user
from unisono.strategies._host_memory import HostMemory
from unisono.world import World

_LOADED = "load_state_dict"  # beside the names of parameters
_SAMPLE = 16  # elements of a parameter that are looked at


class Placed(NamedTuple):
    """Parameters, their names, and the host's memory in which they lie: views of a line."""

    names: list[str]
    params: list[Parameter]
    views: list[Tensor]
    line: Tensor


class Writes:
    """Follows the parameters of some lines: by their version counters, by where they lie, and by a sample of the
    values, as `p.data.mul_()` is not counted."""

    def __init__(self, model: nn.Module, placed: Sequence[Placed], memory: HostMemory) -> None:
        self._model, self._memory = model, memory
        self._places = [
            (name, param, view)
            for one in placed
            for name, param, view in zip(one.names, one.params, one.views, strict=True)
        ]
        self._samples = [(one.line, _find_sample(one)[memory.rank :: memory.size]) for one in placed]
        self._has_warned = False
        self._versions: list[int] = []
        self._sampled: list[Tensor] = []
        self._loads = 0  # of a whole state
        inner = getattr(model, "_orig_mod", model)  # torch.compile puts another module around it
        self._hook = inner.register_load_state_dict_post_hook(_Noting(self))
        self.note()

    def note(self) -> None:
        """Parameters are what they should be."""
        self._note_versions()
        self._loads = 0
        self._sampled = self._take_sample()

    def note_load(self) -> None:
        """The program has loaded a state: right, where all ranks do."""
        loads = self._loads + 1
        self.note()
        self._loads = loads

    def _note_versions(self) -> None:
        self._versions = [param._version for _, param, _ in self._places]

    def _find_written(self) -> list[str]:
        """Which parameters this rank's program has written to since."""
        now = zip(self._places, self._versions, strict=True)
        return [f"{name} {param._version - before}" for (name, param, _), before in now if param._version != before]

    def _find_actions(self) -> list[str]:
        """What ranks have to do alike."""
        return [*self._find_written(), *([f"{_LOADED} {self._loads}"] if self._loads else [])]

    def _take_sample(self) -> list[Tensor]:
        """Some values: each rank looks at others of them."""
        return [line.index_select(0, places) for line, places in self._samples]

    def _has_changed(self) -> bool:
        """Whether a value of my sample is another, though no counter says that somebody wrote."""
        pairs = zip(self._take_sample(), self._sampled, strict=True)
        return not all(torch.equal(x.view(torch.uint8), y.view(torch.uint8)) for x, y in pairs)

    def _find_moved(self) -> list[str]:
        """Which parameters have other memory than the host's (`p.data = x`)."""
        return [name for name, param, view in self._places if param.data_ptr() != view.data_ptr()]

    def describe(self, settings: Sequence[str]) -> list[int]:
        """What the ranks of a host compare as they meet for a step; `settings`: those of the step."""
        found = self._find_actions()
        code = crc32(repr(found).encode()) & 0x7FFFFFFF if found else 0
        same = crc32("\n".join(settings).encode()) & 0x7FFFFFFF
        has_changed = not found and self._has_changed()
        return [code, -code, same, -same, bool(self._find_moved()), has_changed]

    def check(self, largest: Sequence[int], settings: Sequence[str]) -> None:
        """Raise where ranks wrote different things or step differently, and bring back what was moved elsewhere;
        `largest`: of all ranks' `describe(settings)`."""
        most, least, same, least_same, any_moved, any_changed = largest
        written = self._find_written()
        if most != -least:
            raise ValueError(self._name_writers(self._memory.home.gather_objects(self._find_actions())))
        if same != -least_same:
            raise ValueError(_name_settings(self._memory.home.gather_objects(list(settings))))
        if any_moved:
            self._bring_back()
        if (written or any_changed) and not self._has_warned:
            self._has_warned = True
            if self._memory.rank == 0:
                self._warn(written)
        self._note_versions()

    def _warn(self, written: Sequence[str]) -> None:
        if written:
            what = f"every worker of the host wrote to {written[0].rpartition(' ')[0]!r}, which is one for all of them"
        else:
            what = (
                "parameters have changed since the last step, past PyTorch's counters (p.data), so that nothing tells "
                "which workers did it. The workers of a host have one model"
            )
        warn_user(
            f"{what}. That is right for what gives the same however often it is done (clamp_, copy_). What starts from "
            f"the old value (mul_, add_) was done {self._memory.size} times, if every worker did it: do it in "
            "replica.write(function), which calls it on one worker of each host. This is said once"
        )

    def _name_writers(self, every: Sequence[Sequence[str]]) -> str:
        names = dict.fromkeys(one for written in every for one in written)
        first = next(one for one in names if any(one not in written for written in every))
        wrote = [str(r) for r, written in enumerate(every) if first in written]
        others = [str(r) for r in range(len(every)) if str(r) not in wrote]
        name = first.rpartition(" ")[0]
        what = "called model.load_state_dict()" if name == _LOADED else f"wrote to parameter {name!r}"
        return (
            f"local rank(s) {', '.join(wrote)} {what} since the last step; "
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
            "written": self._find_actions(),
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
            name = one.rpartition(" ")[0]
            what = "called model.load_state_dict()" if name == _LOADED else f"wrote to parameter {name!r}"
            if len(wrote) < world.size:
                found.append(f"rank(s) {', '.join(wrote)} alone {what}")
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


class _Noting:
    """The hook on the model that notes when a state was loaded. A copy of the model has one that does nothing."""

    def __init__(self, writes: Writes | None = None) -> None:
        self._writes = None if writes is None else weakref.ref(writes)

    def __call__(self, *_: Any) -> None:
        found = None if self._writes is None else self._writes()
        if found is not None:
            found.note_load()

    def __reduce__(self) -> tuple[type[_Noting], tuple[()]]:
        return _Noting, ()


def describe_settings(group: Mapping[str, Any]) -> list[str]:
    """The numbers of a param group, in words.

    >>> describe_settings({"params": [], "lr": torch.tensor(0.5), "betas": (0.9, 0.99), "fused": None})
    ['lr=0.5', 'betas=(0.9, 0.99)']
    """
    plain = {k: v.item() if isinstance(v, Tensor) and v.numel() == 1 else v for k, v in group.items() if k != "params"}
    return [f"{k}={v!r}" for k, v in plain.items() if isinstance(v, bool | int | float | tuple)]


def _name_settings(every: Sequence[Sequence[str]]) -> str:
    found = next(lines for lines in zip_longest(*every, fillvalue="no more settings") if len(set(lines)) > 1)
    each = "; ".join(f"local rank {r} has {line}" for r, line in enumerate(found))
    return (
        f"the ranks of a host are about to step one model differently: {each}. Every rank sets its optimizer alike: a "
        "learning rate that follows what a rank has measured has to follow the mean over all ranks"
    )


def _find_sample(placed: Placed) -> Tensor:
    """Where in its line some elements of each parameter are, from all over it."""
    found = []
    for view in placed.views:
        first, n = int(view.storage_offset() - placed.line.storage_offset()), view.numel()
        found.append(torch.arange(min(n, _SAMPLE)) * n // max(1, min(n, _SAMPLE)) + first)
    return torch.cat(found)


def _digest(x: Tensor) -> str:
    line = x.detach().contiguous().view(-1)
    raw = line.view(torch.uint8).numpy().data if line.numel() else b""
    return hashlib.blake2b(raw, digest_size=16).hexdigest()
