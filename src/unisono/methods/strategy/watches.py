"""What a replica watches beside its training: faults on purpose that are due (`FaultWatch`), parameters that came after
`un.parallel` (`LateParameters`), and those that have become different between ranks (`ParameterWatch`). For the last
the ranks compare sums of some bits every few steps.

A check takes a part of all parameters, the next one the part after it: a bit that differs anywhere is found once all of
them had their turn, after `rounds` checks at the latest. The sums of all ranks are equal just when their largest and
their smallest are: so two numbers are exchanged, behind the program. Who differs, and where, is asked if they are not.
When the next check is due follows from the steps of the slowest rank, which travel along.
"""

from __future__ import annotations

import math
import os
import sys
import weakref
from collections import Counter
from collections.abc import Sequence
from functools import partial
from time import sleep
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from unisono.background import Handle
from unisono.launchers.runtime import faults
from unisono.launchers.runtime.faults import Armed, Fault
from unisono.launchers.runtime.variables import are_checks_on
from unisono.methods.exchange.windows import if_alive
from unisono.methods.model_copies import add_hook
from unisono.world import World
from unisono.world.ledger import Record

if TYPE_CHECKING:
    from unisono.methods.strategy.replica import Replica

VARIABLE = "UNISONO_CHECK_EVERY"  # steps from one check to the next; 0: never
EVERY_STEPS, EVERY_S = 20, 0.4  # the later of the two, where the variable is not set
CHUNK_BYTES, CHECK_BYTES, CHECK_CHUNKS = 1 << 20, 8 << 20, 64  # of parameters, in a sum and in a check
_ON_GPU = 32  # times as many bytes there
_LEAST, _MOST_STEPS = 3, 10_000
_FACTOR, _PRIME = 1_000_003, (1 << 61) - 1
_SHOWN = 4  # parameters that are named
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class _Chunk(NamedTuple):
    """Some bytes of a parameter."""

    name: str
    param: nn.Parameter
    start: int
    stop: int


class ParameterWatch:
    """One rank's side of the checks, for one replica whose parameters are the same on every rank."""

    def __init__(self, every: int | None) -> None:
        """`every`: steps from one check to the next; None: as many as cost little."""
        self._every = every if every is None else max(_LEAST, every)
        self._world: tuple[weakref.ref[World], str] | None = None  # the one that the checks are in, and its name then
        self._parts: list[list[_Chunk]] = []  # what each check takes, in turn
        self._steps = self._turn = self._begun = self._checked = 0
        self._due = self._post_due = self._answer_due = 0
        self._sums: Tensor | list[int] = []
        self._asked: Handle[Tensor] | None = None
        self._channel: World | None = None
        self._equal_at: dict[tuple[str, int], int] = {}  # of each chunk: the last step at which all had the same
        self._begun_at = 0
        self._told: set[tuple[str, int]] = set()

    @classmethod
    def find(cls) -> ParameterWatch | None:
        """None where nothing is to be compared."""
        text = os.environ.get(VARIABLE, "").strip()
        if text and not text.isdigit():
            raise ValueError(f"{VARIABLE}: got {text!r}; expected a whole number of steps, or 0 for no checks")
        return None if text == "0" or not are_checks_on() else cls(int(text) if text else None)

    @property
    def rounds(self) -> int:
        """How many checks it takes until every bit was compared."""
        return len(self._parts)

    def count_step(self, replica: Replica) -> None:
        """A step has been counted: begin a check, or take its result, where that is due."""
        world = replica.world
        if self._world is None or self._world[0]() is not world or self._world[1] != world.name:
            self._enter(replica)
        if world.size == 1:
            return
        self._steps += 1
        if self._steps == self._due:
            self._begin(replica)
        elif self._steps == self._post_due:
            self._post(world)
        elif self._steps == self._answer_due:
            self._end(world)

    def _enter(self, replica: Replica) -> None:
        """The first step, or the first in another world: all ranks have just been given the same, and begin alike."""
        self._world = weakref.ref(replica.world), replica.world.name
        self._parts = _divide(_list_chunks(replica.model))
        self._steps = self._turn = self._post_due = self._answer_due = 0
        self._due = self._every or EVERY_STEPS
        self._asked, self._channel = None, None
        self._equal_at.clear()
        self._told.clear()
        self._begun_at = replica.world.ledger.step_count

    def _begin(self, replica: Replica) -> None:
        every = self._every or EVERY_STEPS
        is_new_round = not self._parts or self._turn % len(self._parts) == 0
        if is_new_round and {n for n, p in replica.model.named_parameters() if p.requires_grad} != self._names():
            self._parts, self._turn = _divide(_list_chunks(replica.model)), 0
        if not self._parts:
            self._due = self._steps + every
            return
        self._begun, self._checked = self._steps, replica.world.ledger.step_count
        self._sums = _sum_up(self._parts[self._turn % len(self._parts)])
        self._post_due = self._steps + 1  # a GPU has summed up by then
        self._answer_due = self._steps + max(2, every // 2)

    def _names(self) -> set[str]:
        return {chunk.name for part in self._parts for chunk in part}

    def _post(self, world: World) -> None:
        assert isinstance(self._sums, Tensor)
        self._sums = self._sums.tolist()
        whole = 0
        for one in self._sums:
            whole = (whole * _FACTOR + one) % _PRIME
        rows = world.ledger.rows
        wall_us = round(1e6 * rows[-1].wall) if rows else 0
        known = _channels.get(world)
        if known is None or known[0] != world.name:  # one a world: replicas come and go in it
            known = _channels[world] = (world.name, world.channel(inline=False))
        self._channel = known[1]
        numbers = torch.tensor([whole, -whole, wall_us], dtype=torch.int64)
        self._asked = self._channel.all_reduce(numbers, "max", tag="parameters")

    def _end(self, world: World) -> None:
        assert self._asked is not None
        assert self._channel is not None
        most, least, wall_us = self._asked.wait().tolist()
        self._asked = None
        steps = max(EVERY_STEPS, min(_MOST_STEPS, math.ceil(EVERY_S * 1e6 / max(wall_us, 1))))
        self._due = self._begun + (self._every or steps)
        part = self._parts[self._turn % len(self._parts)]
        self._turn += 1
        if most == -least:
            self._equal_at.update(dict.fromkeys(((c.name, c.start) for c in part), self._checked))
        else:
            self._tell(world, part, self._channel.gather_objects(self._sums))

    def _tell(self, world: World, part: Sequence[_Chunk], every: Sequence[Sequence[int]]) -> None:
        """Name the parameters that differ, and the ranks whose values most others do not have."""
        found: dict[str, tuple[list[int], int]] = {}
        for i, chunk in enumerate(part):
            sums, key = [theirs[i] for theirs in every], (chunk.name, chunk.start)
            if len(set(sums)) == 1:
                self._equal_at[key] = self._checked
            elif key not in self._told:
                self._told.add(key)
                found.setdefault(chunk.name, (_find_odd(sums), self._equal_at.get(key, self._begun_at)))
        lines = [self._enter_verdict(world, name, odd, since) for name, (odd, since) in found.items()]
        if lines and world.rank == 0:
            more = f"\n  and {len(lines) - _SHOWN} parameters more" if len(lines) > _SHOWN else ""
            advice = (
                "Every rank continues with its own values: load an earlier checkpoint, or find out what changed them"
            )
            print("\n".join(f"unisono: {line}" for line in lines[:_SHOWN]) + f"{more}. {advice}", file=sys.stderr)

    def _enter_verdict(self, world: World, name: str, odd: Sequence[int], since: int) -> str:
        when = f"at step {self._checked}, where all had the same at step {since}"
        if not odd:
            text = f"the ranks have different values of parameter {name} {when}; nothing tells which are right"
        else:
            who = f"rank {odd[0]} has" if len(odd) == 1 else f"ranks {', '.join(map(str, odd))} have"
            text = f"{who} other values of parameter {name} than the other ranks {when}"
        world.ledger.event(
            "verdict",
            rank=odd[0] if odd else None,
            ranks=list(odd),
            cause="diverged parameter",
            place=name,
            parameter=name,
            step=self._checked,
            since=since,
            text=text,
        )
        return text


def _list_chunks(model: nn.Module) -> list[_Chunk]:
    chunks = []
    for name, param in model.named_parameters():
        if not param.requires_grad or param.is_meta or param.layout != torch.strided:
            continue
        nbytes = param.numel() * param.element_size()
        length = CHUNK_BYTES * (_ON_GPU if param.is_cuda else 1)
        chunks += [_Chunk(name, param, start, min(start + length, nbytes)) for start in range(0, nbytes, length)]
    return chunks


def _divide(chunks: Sequence[_Chunk]) -> list[list[_Chunk]]:
    """What each check takes: so many chunks, and so many bytes."""
    parts: list[list[_Chunk]] = []
    room = 0
    for chunk in chunks:
        limit = CHECK_BYTES * (_ON_GPU if chunk.param.is_cuda else 1)
        if not parts or len(parts[-1]) >= CHECK_CHUNKS or chunk.stop - chunk.start > room:
            parts.append([])
            room = limit
        parts[-1].append(chunk)
        room -= chunk.stop - chunk.start
    return parts


@torch.no_grad()
def _sum_up(part: Sequence[_Chunk]) -> Tensor:
    """A number for each chunk, which one flipped bit changes: the sum of its words, which wraps around."""
    sums = [_sum_bits(chunk) for chunk in part]
    devices = {x.device for x in sums}
    return torch.stack(sums if len(devices) == 1 else [x.cpu() for x in sums])


def _sum_bits(chunk: _Chunk) -> Tensor:
    param = chunk.param.detach()
    line = param.view(-1) if param.is_contiguous() else param.reshape(-1)  # all ranks have one layout
    size = 8 if line.data_ptr() % 8 == 0 else min(8, param.element_size())
    data = (torch.view_as_real(line).view(-1) if line.is_complex() else line).view(torch.uint8)[
        chunk.start : chunk.stop
    ]
    whole = data.numel() // size * size
    total = data[:whole].view(_INTEGERS[size]).sum(dtype=torch.int64)
    return total + data[whole:].sum(dtype=torch.int64) if whole < data.numel() else total


def _find_odd(sums: Sequence[int]) -> list[int]:
    """The ranks that do not have what most have; none where no value has the most."""
    ((value, count), *rest) = Counter(sums).most_common()
    if rest and rest[0][1] == count:
        return []
    return [rank for rank, one in enumerate(sums) if one != value]


_channels: weakref.WeakKeyDictionary[World, tuple[str, World]] = weakref.WeakKeyDictionary()


class LateParameters:
    """Parameters that model and optimizer got after `un.parallel`: no method exchanges them."""

    def __init__(self, model: nn.Module, optimizer: Optimizer) -> None:
        self._model, self._optimizer = model, optimizer
        self._known = {id(p): weakref.ref(p) for p in model.parameters()}
        self._count = self._count_params()

    def _count_params(self) -> int:
        return sum(len(group["params"]) for group in self._optimizer.param_groups)

    def refuse(self) -> None:
        """Called before a step, so without a line of Python for each parameter while there are as many."""
        if self._count_params() == self._count:
            return
        stepped = {id(p) for group in self._optimizer.param_groups for p in group["params"]}
        known = {key for key, ref in self._known.items() if ref() is not None}
        late = [name for name, p in self._model.named_parameters() if id(p) in stepped - known]
        if late:
            raise ValueError(
                f"parameter {late[0]} ({len(late)} in all) came to the model and its optimizer after un.parallel, and "
                "its gradients are not exchanged: ranks would train apart. Add parameters before, or call close() on "
                "the replica and un.parallel again"
            )
        self._count = self._count_params()


class FaultWatch:
    """Watches a replica's model and ledger, and fires what is due. Step n lasts until the ledger counts n steps."""

    def __init__(self, model: nn.Module, world: World, armed: Sequence[Armed]) -> None:
        self._armed = list(armed)
        self.enter(world)
        self._hooks: list[Any] = []
        if self._in_phase("forward"):
            self._hooks.append(add_hook(model.register_forward_pre_hook, self._on_forward))
        if self._in_phase("backward"):
            last = [p for p in model.parameters() if p.requires_grad][-1]  # the first that backward reaches
            ready = weakref.WeakMethod(self._on_gradient)
            self._hooks.append(last.register_post_accumulate_grad_hook(partial(if_alive, ready, "")))

    def enter(self, world: World) -> None:
        """Go on in a world: its ledger counts."""
        self._ledger = world.ledger
        ledger = weakref.ref(world.ledger)

        def note(fault: Fault, step: int) -> None:
            book = ledger()
            if book is not None:
                book.event("fault", fault=str(fault), at=step)

        faults.listen(note)
        if self._in_phase("exchange"):
            world.ledger.on_record = weakref.WeakMethod(self._on_record)

    @classmethod
    def find(cls, model: nn.Module, world: World) -> FaultWatch | None:
        """One for the faults of this worker; None where it has none."""
        armed = faults.find_armed()
        return cls(model, world, armed) if armed else None

    def _in_phase(self, phase: str) -> list[Armed]:
        return [one for one in self._armed if one.fault.phase == phase and not one.fired]

    # Steps -------------------------------------------------------------------------------------------------------

    def before_count(self, owner: object) -> None:
        """The step is about to be counted: make it longer, where it is to be slow."""
        step = self._ledger.step_count + 1
        for one in self._armed:
            if one.fault.kind == "slow" and one.fault.step <= step <= one.fault.last:
                row = self._ledger.measure(owner)
                if row is not None:
                    one.fire(step)
                    sleep((one.fault.factor - 1.0) * row.compute)

    def after_count(self) -> None:
        """The step has been counted."""
        for one in self._in_phase("step"):
            if one.fault.kind in ("kill", "stop") and one.is_due(self._ledger.step_count):
                one.fire(self._ledger.step_count)

    def in_update(self) -> None:
        """The optimizer steps."""
        for one in self._in_phase("update"):
            if one.is_due(self._ledger.step_count):
                one.fire(self._ledger.step_count)

    # Inside a step -----------------------------------------------------------------------------------------------

    def _on_forward(self, _module: nn.Module, _args: Any) -> None:
        if torch.is_grad_enabled():  # else the model is being evaluated
            self._fire_now("forward")

    def _on_gradient(self, _name: str, _param: torch.Tensor) -> None:
        self._fire_now("backward")

    def _fire_now(self, phase: str) -> None:
        for one in self._in_phase(phase):
            if one.is_due(self._ledger.step_count + 1):
                one.fire(self._ledger.step_count + 1)

    def _on_record(self, record: Record) -> None:
        """A collective has ended. Not every step has one: the first from that step on is the one that is meant."""
        for one in self._in_phase("exchange"):
            if record.op != "objects" and one.fault.step <= self._ledger.step_count + 1:
                one.fire(self._ledger.step_count + 1)

    def close(self) -> None:
        """Take the hooks off."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
