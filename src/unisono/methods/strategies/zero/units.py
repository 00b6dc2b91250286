"""Units: parameters that are gathered and reduced together, in one flat line that is cut into one shard a rank.

Who steps what: a `Unit` has a shard on each rank, and a rank steps the elements in its shard; a `Part` is what lies of
one parameter there. Then: which parameters make a unit, memory for their values, and values for parameters that were
made on the meta device.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise, product
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import Optimizer

from unisono.methods.buckets import FlatLayout, alignment, find_wide_dtype, group_into_buckets
from unisono.methods.offload.device import copy_to
from unisono.methods.strategies.zero.codes import BLOCK, round_line
from unisono.world import World

_SMALL = 64  # a module this many times smaller than a unit may be stays with its parent
_SAMPLE = 16  # values of a parameter that are looked at
_TILE = 1 << 20  # elements that are compared at a time
UNCALLED = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)  # these have no forward
WHOLE = (nn.MultiheadAttention,)  # their forward reads parameters of modules inside that it does not call
_SHARED = (nn.Embedding, nn.EmbeddingBag)  # whose parameters others like to use: they stay with the parent


class Part(NamedTuple):
    """The elements of one parameter that lie in my shard."""

    slot: int  # which parameter of the unit
    at: int  # where in my shard
    start: int  # from this element of the parameter, row by row
    length: int


@dataclass(eq=False, repr=False)
class Unit:
    """Some parameters of one dtype, and the memory of their values and gradients.

    full: the values of all of them, one behind the other, padded to a multiple of the ranks.
    shard: my share of `full`, the only one that stays where parameters are split.
    master: what the optimizer steps: `shard` itself, or a line of higher precision, or of exact values.
    gradient: the mean gradient of my shard, once there is one, in the dtype of `master`.
    parts: what lies in my shard, in order. leaves: what the optimizer holds for each of them.
    member: which of several optimizers steps them.
    owners: by parameter, in order, the rank that steps all of it; the line is cut between them. None: it is cut evenly.
    spare: the same unit with the shard of the rank before me, of which a copy is kept here (see `spare`).
    """

    index: int
    names: list[str]
    params: list[Parameter]
    owner: nn.Module | None  # whose forward needs them; None: the model's
    dtype: torch.dtype  # of the values that compute
    size: int  # ranks
    rank: int
    trainable: bool
    master_dtype: torch.dtype  # what the optimizer steps in
    original_dtype: torch.dtype  # that the parameters came in
    steps_here: bool = True  # the optimizer steps `leaves`; else someone else does (see offload)
    coded: bool = False  # values travel in 8 bits, and are computed with as they arrive (see `codes`)
    layout: FlatLayout = field(init=False)
    full: Tensor = field(init=False)
    shard: Tensor = field(init=False)
    master: Tensor = field(init=False)
    gradient: Tensor | None = field(init=False, default=None)
    leaves: list[Parameter] = field(init=False, default_factory=list)
    member: int = field(init=False, default=0)
    owners: list[int] | None = None
    spare: Unit | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self.coded = self.coded and self.dtype.is_floating_point
        step = BLOCK if self.coded else alignment(self.dtype)
        self.layout = FlatLayout(self.params, self.dtype, align_bytes=step * self.dtype.itemsize, contiguous=True)
        self.shapes = self.layout.shapes
        if self.owners is None:
            even = -(-self.layout.numel // (self.size * step)) * step
            self.bounds = [even * rank for rank in range(self.size + 1)]
        else:
            ends = [*self.layout.starts, -(-self.layout.numel // step) * step]
            self.bounds = [ends[bisect_left(self.owners, rank)] for rank in range(self.size + 1)]
        self.numel = self.bounds[-1]
        self.lengths = [stop - start for start, stop in pairwise(self.bounds)]
        self.shard_length = self.lengths[self.rank]
        self.parts = self.parts_of(self.rank)

    def parts_of(self, rank: int) -> list[Part]:
        """Who steps what: a rank steps what lies in its shard, an equal cut of the line or whole parameters."""
        low, high = self.bounds[rank : rank + 2]
        return [
            Part(slot, first - low, first - self.layout.starts[slot], last - first)
            for slot, first, last in self.layout.overlaps(low, high)
        ]

    @property
    def nbytes(self) -> int:
        """Bytes of all values in the dtype that computes."""
        return self.numel * self.dtype.itemsize

    @property
    def held(self) -> list[Unit]:
        """What is kept here: my shard, and where there is one, the copy of another's."""
        return [self] if self.spare is None else [self, self.spare]

    @property
    def tag(self) -> str:
        """The name of this unit's messages in the ledger."""
        return f"unit/{self.index}"

    def views(self, line: Tensor) -> list[Tensor]:
        """Views of a line of this layout, in the parameters' shapes."""
        return self.layout.views(line)

    def shards(self, line: Tensor) -> list[Tensor]:
        """Every rank's shard of a line of this layout."""
        return list(line.split(self.lengths))

    @property
    def first(self) -> int:
        """Where my shard begins in a line of this layout."""
        return self.rank * self.shard_length

    def my_shard(self, line: Tensor) -> Tensor:
        """My shard of a line of this layout."""
        return line[self.bounds[self.rank] : self.bounds[self.rank + 1]]

    def shape(self, part: Part, values: Tensor) -> Tensor:
        """The values of a part as the optimizer steps them: a line, or in the shape of a whole parameter."""
        return values if self.owners is None else values.view(self.shapes[part.slot])

    def seen(self, values: Tensor) -> Tensor:
        """Exact values as they are computed with."""
        narrow = values.to(self.dtype)
        return round_line(narrow) if self.coded else narrow

    def update_shard(self) -> None:
        """Copy what the optimizer has stepped to the values that compute."""
        if self.master is not self.shard:
            self.shard.copy_(self.master)

    def find_moved(self) -> list[int]:
        """Which parameters the program gave other memory than that of the values here (`p.data = x`)."""
        begin, size = self.full.data_ptr(), self.dtype.itemsize
        every = enumerate(zip(self.params, self.layout.starts, strict=True))
        return [i for i, (p, start) in every if p.numel() and p.data_ptr() != begin + start * size]

    @cached_property
    def _some(self) -> Tensor:
        starts, lengths = (torch.tensor(x).unsqueeze(1) for x in (self.layout.starts, self.layout.lengths))
        return (starts + torch.arange(_SAMPLE) * lengths // _SAMPLE).clamp(max=self.numel - 1)

    def read_some(self) -> Tensor:
        """The bytes of some of the values here, from all over them: a row for each parameter."""
        return self.full[self._some].view(torch.uint8)

    @torch.no_grad()
    def bring_back(self) -> None:
        """Parameters that the program gave other memory lie among the values again, with what they have."""
        if moved := self.find_moved():
            views = self.views(self.full)
            for slot in moved:
                views[slot].copy_(self.params[slot])
                self.params[slot].data = views[slot]

    @torch.no_grad()
    def take_written(self, full: Tensor) -> None:
        """Let what the optimizer steps have what the program wrote to the values that compute, all of which are in
        `full`. Where it is of higher precision, it stays as it is where its rounded value was left alone."""
        mine = self.my_shard(full)
        if mine.data_ptr() != self.shard.data_ptr():
            self.shard.copy_(mine)
        if self.master is not self.shard:
            for master, values in zip(self.master.split(_TILE), self.shard.split(_TILE), strict=True):
                values = values.to(master.device)
                rounded = self.seen(master)
                if values.is_cpu and torch.equal(rounded.view(torch.int64), values.view(torch.int64)):
                    continue  # most often; a GPU would have to be waited for
                torch.where(rounded == values, master, values.to(master.dtype), out=master)

    def lines(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Tensors in the parameters' shapes as flat ones, whose concatenation is a line of this layout: with zeros in
        its gaps, and behind them."""
        found, starts = [], self.layout.starts
        for tensor, start, after in zip(tensors, starts, [*starts[1:], self.numel], strict=True):
            found.append(tensor.contiguous().view(-1))
            if gap := after - start - tensor.numel():
                found.append(torch.zeros(gap, dtype=self.dtype))
        return found

    def zero_gaps(self, line: Tensor) -> None:
        """Make what lies between the parameters, and behind them, zero."""
        for gap in self.layout.gaps(line):
            gap.zero_()


# Which parameters make a unit --------------------------------------------------------------------------------

Named = list[tuple[str, Parameter]]
Members = Mapping[Parameter, int]  # by parameter: which of several optimizers has it, or which rank steps all of it
NONE: Members = {}


def units_by_size(
    model: nn.Module,
    unit_bytes: int,
    *,
    dtype: torch.dtype | None,
    size: int,
    rank: int,
    members: Members = NONE,
    owners: Members = NONE,
    coded: bool = False,
) -> list[Unit]:
    """Trainable parameters in the order of the model, `unit_bytes` at a time; frozen ones stay as they are."""
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    order = {p: i for i, (_, p) in enumerate(named)}
    wide = find_batch_norm_parameters(model) if dtype is not None else set()
    found = []
    kinds = {p: _find_kind(p, members, owners) for _, p in named}
    for own, kind in product((False, True), sorted(set(kinds.values()))):
        some = [(name, p) for name, p in named if (p in wide) == own and kinds[p] == kind]
        found += [(list(reversed(group)), None if own else dtype) for group in group_into_buckets(some, unit_bytes)]
    found.sort(key=lambda one: order[one[0][0][1]])
    more = (size, rank, members, owners, coded)
    return [_make_unit(i, group, None, compute, *more) for i, (group, compute) in enumerate(found)]


def units_by_module(
    model: nn.Module,
    unit_bytes: int,
    *,
    dtype: torch.dtype | None,
    size: int,
    rank: int,
    members: Members = NONE,
    owners: Members = NONE,
    coded: bool = False,
) -> list[Unit]:
    """All parameters, by the module whose forward needs them: the largest modules of at most `unit_bytes`.

    Small modules, embeddings, and parameters that several such modules share, belong to the next module around them;
    what is left belongs to the model. Those of another dtype or optimizer, and frozen ones, are units of their own.
    """
    chosen = choose_modules(model, unit_bytes)
    holders: dict[Parameter, nn.Module | None] = {}
    names: dict[Parameter, str] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        path = [m for m in _modules_around(model, name) if m in chosen]
        if param not in names:
            names[param], holders[param] = name, (path[-1] if path else None)
        else:  # shared: the deepest module around all of its uses
            before = holders[param]
            around = path if before is None else [m for m in path if before in set(m.modules())]
            holders[param] = around[-1] if around and before is not None else None
    wide = find_batch_norm_parameters(model) if dtype is not None else set()
    groups: dict[tuple[nn.Module | None, torch.dtype, bool, bool, tuple[int, bool]], Named] = {}
    for param, name in names.items():
        kind = _find_kind(param, members, owners)
        key = holders[param], param.dtype, param.requires_grad, param in wide, kind
        groups.setdefault(key, []).append((name, param))
    order = {None: -1} | {module: i for i, module in enumerate(model.modules())}
    keys = sorted(groups, key=lambda key: order[key[0]])
    return [
        _make_unit(i, groups[key], key[0], None if key[3] else dtype, size, rank, members, owners, coded)
        for i, key in enumerate(keys)
    ]


def _find_kind(param: Parameter, members: Members, owners: Members) -> tuple[int, bool]:
    """What parameters of a unit have in common beside their dtype: who steps them, and whether each has one owner."""
    return members.get(param, 0), param in owners


def find_batch_norm_parameters(model: nn.Module) -> set[Parameter]:
    """Parameters of batch normalisation: it wants them in the precision of its running statistics."""
    norms = [m for m in model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
    return {p for m in norms for p in m.parameters(recurse=False)}


def narrow_frozen(model: nn.Module, dtype: torch.dtype) -> list[tuple[Tensor, torch.dtype]]:
    """Cast frozen parameters to `dtype`, but those of batch normalisation; returns them, and from what."""
    wide, found = find_batch_norm_parameters(model), list[tuple[Tensor, torch.dtype]]()
    for param in model.parameters():
        if not param.requires_grad and param not in wide and param.is_floating_point():
            found.append((param, param.dtype))
            param.data = param.data.to(dtype)
    return found


def choose_modules(model: nn.Module, unit_bytes: int) -> set[nn.Module]:
    """The modules that are units: those of at most `unit_bytes` whose parent is larger."""
    chosen: set[nn.Module] = set()

    def walk(module: nn.Module) -> None:
        for child in module.children():
            nbytes = sum(p.numel() * p.element_size() for p in child.parameters())
            if nbytes * _SMALL < unit_bytes or child in chosen or isinstance(child, _SHARED):
                continue
            grandchildren = any(next(c.parameters(), None) is not None for c in child.children())
            called = not isinstance(child, UNCALLED)
            if called and (nbytes <= unit_bytes or not grandchildren or isinstance(child, WHOLE)):
                chosen.add(child)
            else:
                walk(child)

    walk(model)
    return chosen


def unit_bytes_for(model: nn.Module, asked: int | None) -> int:
    """How large a unit may be: as asked, or a sixteenth of the model, from 1 to 128 MiB."""
    if asked is not None:
        return asked
    total = sum(p.numel() * p.element_size() for p in model.parameters())
    return min(max(total // 16, 1 << 20), 128 << 20)


def _modules_around(model: nn.Module, name: str) -> list[nn.Module]:
    """The modules around a parameter, the model itself left out, from the outside in."""
    path, module = [], model
    for part in name.split(".")[:-1]:
        module = getattr(module, part)
        path.append(module)
    return path


def _make_unit(
    index: int, named: Sequence[tuple[str, Parameter]], owner: nn.Module | None, dtype: torch.dtype | None,
    size: int, rank: int, members: Members, owners: Members, coded: bool,
) -> Unit:  # fmt: skip
    if named[0][1] in owners:
        named = sorted(named, key=lambda one: owners[one[1]])
    first = named[0][1]
    compute = dtype if dtype is not None and first.is_floating_point() else first.dtype
    names, params = [n for n, _ in named], [p for _, p in named]
    master = first.dtype if first.requires_grad else compute
    unit = Unit(
        index, names, params, owner, compute, size, rank, first.requires_grad, find_wide_dtype(master), first.dtype,
        owners=[owners[p] for p in params] if first in owners else None, coded=coded and first not in owners,
    )  # fmt: skip
    unit.member = members.get(first, 0)
    return unit


# Memory and values ---------------------------------------------------------------------------------------------------


@torch.no_grad()
def adopt(
    unit: Unit,
    empty: Callable[[int, torch.dtype], Tensor],
    *,
    whole: bool,
    device: torch.device,
    shard_on: torch.device,
    master_on: torch.device,
    master_in: Tensor | None = None,
) -> None:
    """Move a unit's parameters into a line of its own. `whole`: all of it stays on the device; else only my shard.

    empty: memory for what stays, if the device is the host. Ranks may all have the same memory, as they have the same
        values.
    master_in: memory for values of higher precision, instead of new memory on `master_on`.
    """

    def line(n: int, dtype: torch.dtype, *, shared: bool) -> Tensor:
        if shared and device.type == "cpu":
            return empty(n, dtype)
        return torch.empty(n, dtype=dtype, device=device)

    unit.full = line(unit.numel, unit.dtype, shared=whole)
    unit.zero_gaps(unit.full)
    wide = unit.trainable and (unit.master_dtype != unit.dtype or (unit.coded and whole))
    before = torch.zeros(unit.numel, dtype=unit.master_dtype, device=device) if wide else unit.full
    for view, param in zip(unit.views(before), unit.params, strict=True):
        view.copy_(param)
    if wide:
        unit.full.copy_(before)
    for view, param in zip(unit.views(unit.full), unit.params, strict=True):
        param.grad = None  # of before: the optimizer, which clears gradients, will not see it
        param.data = view
    if whole:
        unit.shard = unit.my_shard(unit.full)
    else:
        unit.shard = (
            line(unit.shard_length, unit.dtype, shared=unit.owners is None)  # only equal shards can be shared memory
            if shard_on == device
            else torch.empty(unit.shard_length, dtype=unit.dtype, pin_memory=torch.cuda.is_available())
        )
        unit.shard.copy_(unit.my_shard(unit.full))
    apart = unit.owners is not None and master_on != unit.shard.device
    if not wide and not apart:
        unit.master = unit.shard
    elif master_in is not None:
        unit.master = master_in.copy_(unit.my_shard(before))
    else:
        unit.master = copy_to(unit.my_shard(before), master_on)
    if unit.spare is not None:
        _adopt_spare(unit.spare, unit, before, whole=whole)
    if not whole:
        unit.full.untyped_storage().resize_(0)


def _adopt_spare(spare: Unit, unit: Unit, before: Tensor, *, whole: bool) -> None:
    """Take the shard of the rank before me while all values are here. Where they stay, it lies among them."""
    spare.params, spare.full = unit.params, unit.full
    wide = before is not unit.full
    mine = spare.my_shard(before)
    spare.master = mine if whole and not wide else mine.clone()
    spare.shard = spare.my_shard(unit.full) if whole and wide else spare.master


Replacements = dict[nn.Parameter, nn.Parameter]  # parameters on the meta device, and what took their places


@torch.no_grad()
def materialise(
    model: nn.Module, world: World, replacements: Replacements, wanted: Iterable[nn.Parameter] | None = None
) -> None:
    """Give values to modules whose tensors are on the meta device: their own `reset_parameters()`, rank 0's for all.

    wanted: only modules that hold one of these parameters. The parameters become other objects: see `replacements`.
    """
    chosen = None if wanted is None else set(wanted)
    for name, module in model.named_modules():
        held = {key: p for key, p in module._parameters.items() if p is not None}
        if not any(x.is_meta for x in own_tensors(module)) or (chosen is not None and chosen.isdisjoint(held.values())):
            continue
        reset = getattr(module, "reset_parameters", None)
        if reset is None:
            raise ValueError(
                f"{name or 'the model'} ({type(module).__name__}) has parameters or buffers on the meta device and no "
                "reset_parameters(): give it one, or make it on a real device"
            )
        tied = {key: replacements[p] for key, p in held.items() if p in replacements}
        module.to_empty(device=world.device, recurse=False)
        reset()
        for key, old in held.items():
            new = module._parameters[key]
            assert new is not None
            if key in tied:  # another module made it
                module._parameters[key] = tied[key]
            else:
                replacements[old] = new
        if world.size > 1:
            world.broadcast([x.detach() for x in own_tensors(module)], tag="initial state").wait()


def swap(optimizer: Optimizer, replacements: Replacements) -> None:
    """Let the optimizer hold the parameters that have values."""
    for group in optimizer.param_groups:
        group["params"] = [replacements.get(p, p) for p in group["params"]]


def find_device(model: nn.Module, world: World, *, moves: bool) -> torch.device:
    """Find the device on which a model computes: its own, or if its parameters rest elsewhere (`moves`) the world's, to
    which its buffers are moved."""
    on = next(model.parameters()).device
    if not moves and on.type != "meta":
        return on
    for buffer in model.buffers():
        if not buffer.is_meta:
            buffer.data = buffer.data.to(world.device)
    return world.device


def own_tensors(module: nn.Module) -> list[Tensor]:
    """List a module's own parameters and buffers."""
    return [x for x in (*module._parameters.values(), *module._buffers.values()) if x is not None]
