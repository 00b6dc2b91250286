"""Checkpoints of split parameters: each rank saves and loads its own elements; and units that are put together again,
to be split anew over the ranks of another world."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from unisono.methods.joined_optimizers import members_of
from unisono.methods.model_copies import add_hook
from unisono.methods.strategies.zero.hooks import ModelHook
from unisono.methods.strategies.zero.offloads import Offloads
from unisono.methods.strategies.zero.optimizer_shards import OptimizerShards, as_stored
from unisono.methods.strategies.zero.units import Unit
from unisono.methods.strategies.zero.values import Values
from unisono.training.checkpoint.slices import Piece, Stored
from unisono.world import World

Holder = tuple[int, int]  # of the shards of one former rank: a rank, and 0 for its own or 1 for the copy that it keeps


def collect_model_pieces(model: nn.Module, units: Sequence[Unit], offload: Offloads | None) -> dict[str, Any]:
    """Collect the model's state: a Piece for each parameter that is split, in the precision that the optimizer steps.

    `model.state_dict()` must leave the values where they are while this runs.
    """
    state: dict[str, Any] = dict(model.state_dict())
    made: dict[Tensor, Piece] = {}
    for unit in units:
        for slot, param in enumerate(unit.params):
            if offload is not None and not unit.steps_here:
                made[param] = offload.piece(unit, slot)
                continue
            line = unit.master if unit.trainable else unit.shard
            mine = [part for part in unit.parts if part.slot == slot]
            if mine:
                part = mine[0]
                made[param] = Piece.of(line[part.at : part.at + part.length], part.start, shape=unit.shapes[slot])
            else:
                made[param] = Piece(unit.shapes[slot], line.dtype)
    for name, param in model.named_parameters(remove_duplicate=False):
        if name in state and param in made:
            state[name] = made[param]
    return state


@torch.no_grad()
def load_model(
    model: nn.Module, units: Sequence[Unit], saved: Mapping[str, Any], *, whole: bool, offload: Offloads | None
) -> None:
    """Load saved values: my elements of them, or all of them where a rank keeps `whole` units."""
    places = {param: (unit, slot) for unit in units for slot, param in enumerate(unit.params)}
    done: set[Tensor] = set()
    for name, param in model.named_parameters(remove_duplicate=False):
        if name not in saved or param in done or param not in places:
            continue
        done.add(param)
        unit, slot = places[param]
        stored = as_stored(saved[name])
        if whole:
            start = unit.layout.starts[slot]
            stored.read(0, stored.numel(), out=unit.full[start : start + stored.numel()])
        for one, part in ((u, part) for u in unit.held for part in u.parts):
            if part.slot == slot and offload is not None and not unit.steps_here:
                offload.load_values(unit, part, stored)
            elif part.slot == slot:
                for line in dict.fromkeys((one.shard, one.master) if unit.trainable else (one.shard,)):
                    stored.read(part.start, part.start + part.length, out=line[part.at : part.at + part.length])
    rest = {name: load_whole(value) for name, value in saved.items() if not _is_split(model, name, places)}
    model.load_state_dict(rest, strict=False)


def _is_split(model: nn.Module, name: str, places: Mapping[Any, Any]) -> bool:
    owner, _, leaf = name.rpartition(".")
    try:
        return model.get_submodule(owner)._parameters.get(leaf) in places
    except AttributeError:
        return False


def load_whole(value: Any) -> Any:
    """Read every tensor of a saved state whole."""
    if isinstance(value, Stored):
        return value.full()
    if isinstance(value, dict):
        return {key: load_whole(x) for key, x in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(load_whole(x) for x in value)
    return value


def load_optimizer(
    shards: OptimizerShards, units: Sequence[Unit], saved: Any, offload: Offloads | None, member: int | None = None
) -> None:
    """Load saved state; `member`: of one of several optimizers alone."""
    if not units:
        shards.optimizer.load_state_dict(load_whole(saved))
        return
    shards.load(saved, member)
    if offload is not None:
        offload.load_states(saved["state"], member)
        shards.drop_state(away=True)


@torch.no_grad()
def take_written(offload: Offloads | None, unit: Unit, before: Sequence[Tensor] | None) -> None:
    """Take the elements of a unit's whole values that the program has changed into my shards. The others keep what
    they have beyond the precision that computes.

    before: what the shards of `unit.held` were, if a step may have changed them since.
    """
    for i, one in enumerate(unit.held):
        now = one.my_shard(unit.full)
        if offload is None or unit.steps_here:
            changed = now != (one.shard if before is None else before[i])
            for line in dict.fromkeys((one.shard, one.master) if unit.trainable else (one.shard,)):
                line.copy_(torch.where(changed.to(line.device), now.to(line.device, line.dtype), line))
            continue
        changed = (now != (offload.values(unit).to(now.device) if before is None else before[i])).cpu()
        if changed.any():
            master = offload.state(unit).read("master")
            offload.set_master(unit, torch.where(changed, now.to("cpu", master.dtype), master))


class WholeStateDict:
    """Lets `model.state_dict()` and `model.load_state_dict()` see whole values, by hooks on the model.

    end_delay(), on_load(): no step may be under way; the shards have other values. Methods of the replica, which lives
        as long as the model by these hooks: those on parameters and modules keep nothing.
    """

    def __init__(
        self,
        model: nn.Module,
        units: Sequence[Unit],
        values: Values,
        offload: Offloads | None,
        end_delay: Callable[[], None],
        on_load: Callable[[], None],
    ) -> None:
        self._end_delay, self._on_load = end_delay, on_load
        self._model, self._units, self._values, self._offload = model, list(units), values, offload
        self._paused = False
        add = add_hook if values.always_here else lambda register, call: register(ModelHook(call))
        self._hooks = [
            add(model.register_state_dict_pre_hook, lambda *_: self._gather()),
            add(model.register_state_dict_post_hook, lambda *given: self._copy(*given)),
            add(model.register_load_state_dict_pre_hook, lambda *_: self._begin_loading()),
            add(model.register_load_state_dict_post_hook, lambda *_: self.update_shards()),
        ]

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Inside the block the values are left where they are."""
        self._paused = True
        try:
            yield
        finally:
            self._paused = False

    def _gather(self) -> None:
        if self._paused:
            self._values.gather_late()
        else:
            self._values.gather_all("model.state_dict()")

    def _begin_loading(self) -> None:
        if self._paused:
            self._values.gather_late()
        else:
            self._end_delay()  # what it steps would replace what is written
            self._values.begin_writing()

    def _copy(self, _module: nn.Module, state: dict[str, Any], prefix: str, _metadata: Any) -> None:
        """Copy what `state_dict()` gives out, so that it stays when the values are released."""
        if self._values.always_here or self._paused:
            return
        copies: dict[tuple[int, torch.Size], Tensor] = {}
        for name, _ in self._model.named_parameters(remove_duplicate=False):
            if prefix + name in state:
                value = state[prefix + name]
                state[prefix + name] = copies.setdefault((value.data_ptr(), value.shape), value.detach().clone())
        self._values.release_all()

    @torch.no_grad()
    def update_shards(self, *, exactly: bool = True) -> None:
        """Copy whole values that someone has set into my shards; `exactly`: also where what is there rounds to them."""
        if self._paused:
            return
        for unit in self._units:
            if self._offload is not None and not unit.steps_here:
                self._offload.set_master(unit, unit.my_shard(unit.full))
                continue
            unit.bring_back()
            for one in unit.held:
                one.take_written(unit.full)
                if exactly and one.master is not one.shard:
                    one.master.copy_(one.shard)
        self._values.release_all()
        self._on_load()

    def close(self) -> None:
        """Take the hooks off."""
        for hook in self._hooks:
            hook.remove()


class WholeOptimizerState:
    """Lets `optimizer.state_dict()` give the state of whole parameters, as that of one process, and
    `optimizer.load_state_dict()` take my part of such a state, by hooks on the optimizer.

    gather(i): the state by parameter, of one of several optimizers, from all ranks, which all have to call it.
    """

    def __init__(
        self,
        shards: OptimizerShards,
        units: Sequence[Unit],
        offload: Offloads | None,
        gather: Callable[[int], dict[Tensor, dict[str, Any]]],
    ) -> None:
        self._shards, self._units, self._offload, self._gather = shards, list(units), offload, gather
        self._own: Any = None  # the optimizer's state by leaf, while it shows another
        self._given: Any = None  # what is being loaded
        optimizer = shards.optimizer
        self._hooks = [
            optimizer.register_state_dict_pre_hook(self._show_whole),
            optimizer.register_state_dict_post_hook(lambda which, _: self._show_own(which)),
            optimizer.register_load_state_dict_pre_hook(self._begin_loading),
            optimizer.register_load_state_dict_post_hook(self._load),
        ]

    def _number(self, optimizer: Optimizer) -> int:
        """Which of several optimizers this is."""
        return next(i for i, member in enumerate(members_of(self._shards.optimizer)) if member is optimizer)

    def _show_whole(self, optimizer: Optimizer) -> None:
        self._shards.settle()
        whole = self._gather(self._number(optimizer))
        self._own = optimizer.state
        held = (p for group in optimizer.param_groups for p in group["params"])
        every = {p: whole.get(p) or self._own.get(p) for p in held}
        optimizer.state = defaultdict(dict, {p: state for p, state in every.items() if state})

    def _show_own(self, optimizer: Optimizer) -> None:
        optimizer.state, self._own = self._own, None

    def _begin_loading(self, optimizer: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        """Leave to torch what is not split: it would cast all of it, on every rank."""
        first, numbers = self._shards.find_split_numbers(self._number(optimizer))
        self._given = {**state, "state": {first + k: one for k, one in state["state"].items()}}
        return {**state, "state": {k: one for k, one in state["state"].items() if k not in numbers}}

    def _load(self, optimizer: Optimizer) -> None:
        self._shards.take_loaded(optimizer)
        load_optimizer(self._shards, self._units, self._given, self._offload, self._number(optimizer))
        self._given = None

    def close(self) -> None:
        """Take the hooks off."""
        for hook in self._hooks:
            hook.remove()


# Whole again ---------------------------------------------------------------------------------------------------------


def find_given(world: World, order: Sequence[Holder]) -> list[int]:
    """Which of `unit.held` this rank gives to the whole."""
    return [which for which in (0, 1) if (world.rank, which) in order]


def join_lines(world: World, order: Sequence[Holder], unit: Unit, lines: Sequence[Tensor], empty: Tensor) -> Tensor:
    """The whole line of a unit, from the shards that each rank gives of it, in `order`."""
    found = world.all_gather(torch.cat([empty, *lines]), tag="restore").wait()
    joined = []
    for length, (r, which) in zip(unit.lengths, order, strict=True):
        both = (r, 1 - which) in order  # then it gave its own before the copy
        joined.append(found[r][-length or len(found[r]) :] if both and which else found[r][:length])
    return torch.cat(joined)


def join_units(
    units: Sequence[Unit], shards: OptimizerShards, world: World, order: Sequence[Holder]
) -> tuple[dict[Tensor, Tensor], dict[Tensor, dict[str, Any]]]:
    """Gather the values and the optimizer's state of whole parameters from those who hold the shards, in `order`.

    A rank that is not among them has `units` of the same layout, and nothing in them.
    """

    def given(unit: Unit) -> list[Unit]:
        return [unit.held[which] for which in find_given(world, order)]

    join_shards = partial(join_lines, world, order)
    states = shards.join([unit for unit in units if unit.trainable], given, world, join_shards)
    values: dict[Tensor, Tensor] = {}
    for unit in units:
        dtype = unit.master_dtype if unit.trainable else unit.dtype
        empty = torch.empty(0, dtype=dtype, device=unit.params[0].device)
        full = join_shards(unit, [one.master if unit.trainable else one.shard for one in given(unit)], empty)
        views = zip(unit.params, unit.views(full), strict=True)
        values |= {param: view.to(unit.original_dtype, copy=True) for param, view in views}
    return values, states
