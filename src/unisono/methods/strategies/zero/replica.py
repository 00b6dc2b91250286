"""The replica of `zero`: splits model and optimizer over the ranks, and brings them together again.

Its collaborators: `gather` brings values to the modules that compute, `reduce` brings gradients to the shards,
`optimizer_shards` lets the optimizer step them, or `offloading` steps them off the device; `spare` keeps a second copy;
`checkpoint` takes them elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from unisono.methods.exchange.reduction import overlap_pays, read_loss_scale
from unisono.methods.exchange.windows import Window, count_windows
from unisono.methods.model_copies import unwrap
from unisono.methods.offload.kinds import find_owners
from unisono.methods.strategies._host_memory import HostMemory, move_out
from unisono.methods.strategies.zero import checkpoint
from unisono.methods.strategies.zero.averages import ShardValues, join_averages
from unisono.methods.strategies.zero.gather import GatheredValues
from unisono.methods.strategies.zero.groups import DROPPED, Across, Groups, fit_groups
from unisono.methods.strategies.zero.hooks import cast_inputs
from unisono.methods.strategies.zero.offloads import Offloads, find_positions
from unisono.methods.strategies.zero.optimizer_shards import OptimizerShards
from unisono.methods.strategies.zero.reduce import Backward
from unisono.methods.strategies.zero.scatter import Scatter
from unisono.methods.strategies.zero.spare import Spare, find_holders
from unisono.methods.strategies.zero.units import (
    Replacements,
    Unit,
    adopt,
    find_device,
    materialise,
    narrow_frozen,
    swap,
    unit_bytes_for,
    units_by_module,
    units_by_size,
)
from unisono.methods.strategies.zero.values import CommonValues, Values, WholeValues
from unisono.methods.strategy import Change, Replica
from unisono.methods.strategy.averages import AveragedValues
from unisono.world import World

if TYPE_CHECKING:
    from unisono.methods.strategies.zero import zero

DTYPES = {"bf16": torch.bfloat16}


class ZeroReplica(Replica):
    """A model in units of parameters, each with one shard on every rank.

    In a world of one, with nothing to keep elsewhere, it only counts windows.

    Where something is split, `_backward`, `_values` and `_state_dict` are there from `start` to `stop`.
    """

    strategy: zero
    slow_ranks = "deal"
    hides_gradients = True

    def __init__(self, model: nn.Module, optimizer: Optimizer, world: World, strategy: zero) -> None:
        super().__init__(model, optimizer, world, strategy)
        self.units: list[Unit] = []
        self._backward: Backward | None = None
        self._values: Values | None = None
        self._state_dict: checkpoint.WholeStateDict | None = None
        self._optimizer_state: checkpoint.WholeOptimizerState | None = None
        self._offload: Offloads | None = None
        self._spare: Spare | None = None
        self._groups = Groups(world, [list(range(world.size))])
        self._across: Across | None = None  # between groups
        self._scatter: Scatter | None = None
        if strategy.reducer is not None and not strategy.reducer.exact:
            self._scatter = Scatter(strategy.reducer, optimizer)
            self.reduction = self._scatter.reduction
        self._misfit = ""  # why there are no groups as asked for
        self._stepped = 0  # `step` when the shards took their last step
        self._turns = 0  # how often the shards were set: counts of steps compare where it is the same
        self._memory: HostMemory | None = None  # for values, where all ranks have one
        self._cast: Any = None  # a hook that casts what the model is given
        self._narrowed: list[tuple[Tensor, torch.dtype]] = []  # frozen parameters that were cast, and from what
        self._shards = OptimizerShards(optimizer)
        self.start_or_close()

    @property
    def splits(self) -> bool:
        """Whether there is anything to split, or to keep in another precision or place."""
        s = self.strategy
        return self.world.size > 1 or s.precision is not None or (s.optimizer_on, s.params_on) != ("device", "device")

    @property
    def _keeps_copies(self) -> bool:
        """Whether each rank keeps a copy of another's part; also where groups would have them, and do not fit."""
        asked = self.strategy.spare or (self._misfit != "" and self.strategy.optimizer_on == "device")
        return asked and self._groups.size > 1

    # Splitting -------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Split model and optimizer over the ranks of the world, and watch them."""
        replacements: Replacements = {}
        if not self.splits:
            self._materialise_rest(replacements)
            self.windows = count_windows(self.model, self.strategy.accumulate, self.advance)
            return
        found, self._misfit = fit_groups(self.strategy.within, self.world)
        self._groups = groups = Groups(self.world, found)
        units = self._make_units(groups.rank)
        self._trainable = [unit for unit in units if unit.trainable]
        if self._keeps_copies:
            spares = self._make_units((groups.rank - 1) % groups.size)
            for unit, spare in zip(units, spares, strict=True):
                unit.spare = spare
        if self._keeps_copies or (groups.count > 1 and self.strategy.optimizer_on == "device"):
            self._spare = Spare(self._trainable, self.world)  # copies are here, or in the other groups
        self._channel = groups.inside.channel(inline=True)
        device = find_device(self.model, self.world, moves=self.strategy.params_on != "device")
        self._memory = self._find_memory(device) if units else None
        self.units, self.is_split = units, bool(units)  # a rank that is lost before this leaves all with each
        self._narrow_frozen()
        if self.strategy.optimizer_on != "device":
            away = [unit for unit in self._trainable if unit.owners is None]
            for unit in away:
                unit.steps_here = False
            if away:
                positions = find_positions(self.model, self.members)
                self._offload = Offloads(self.members, away, positions, self.strategy, device)
        self._adopt_units(replacements, device)
        self._materialise_rest(replacements)
        before = self._shards.split(self._trainable, self._offload, self._agree)
        if self._offload is not None:
            self._offload.start()
            if before:
                self._offload.load_states(before)
        self._watch()

    def _make_units(self, rank: int, size: int | None = None) -> list[Unit]:
        """Divide the model into units with so many shards (None: one for each rank of a group), of which `rank` is
        mine; they have no memory yet."""
        s = self.strategy
        size = self._groups.size if size is None else size
        dtype = None if s.precision is None else DTYPES[s.precision]
        by = units_by_module if s.stage == 3 else units_by_size
        members = {p: i for i, one in enumerate(self.members) for group in one.param_groups for p in group["params"]}
        nbytes, coded = unit_bytes_for(self.model, s.unit_bytes), s.gather is not None and size > 1
        owners = find_owners(self.model, self.optimizer, size)
        return by(self.model, nbytes, dtype=dtype, size=size, rank=rank, members=members, owners=owners, coded=coded)

    def _narrow_frozen(self) -> None:
        """Cast frozen parameters, which belong to no unit in stages 1 and 2, to the precision of the others."""
        self._narrowed = []
        if self.strategy.precision is None or self.strategy.stage == 3:
            return
        self._narrowed = narrow_frozen(self.model, DTYPES[self.strategy.precision])

    def _find_memory(self, device: torch.device) -> HostMemory | None:
        """Memory in which values lie once for all ranks: in stages 1 and 2 on one host. Not if a step goes on behind
        the program, if each rank also steps a copy of another's part, or if values are rounded on their way."""
        s = self.strategy
        if s.stage == 3 or s.optimizer_on != "device" or s.gather is not None or device.type != "cpu":
            return None
        inside = self._groups.inside
        if self._keeps_copies or inside.size == 1 or len(set(inside.hosts)) > 1:
            return None
        return HostMemory.find(inside, "zero")

    def _adopt_units(self, replacements: Replacements, device: torch.device) -> None:
        """Move the parameters into units, one after the other: the model may be larger than this rank's memory."""
        s, host, offload = self.strategy, torch.device("cpu"), self._offload
        for unit in self.units:
            materialise(self.model, self.world, replacements, unit.params)
            unit.params = [replacements.get(p, p) for p in unit.params]
            adopt(
                unit,
                self._channel.empty if self._memory is None else self._memory.line,
                whole=s.stage < 3,
                device=device,
                shard_on=device if s.params_on == "device" else host,
                master_on=device if s.optimizer_on == "device" else host,
                master_in=None if offload is None else offload.map_master(unit),
            )
            if offload is not None and not unit.steps_here:
                offload.adopt(unit)

    def _materialise_rest(self, replacements: Replacements) -> None:
        """Give values to what is still on the meta device, and let the optimizer hold it."""
        materialise(self.model, self.world, replacements)
        swap(self.optimizer, replacements)
        self._shards = OptimizerShards(self.optimizer)

    def _watch(self) -> None:
        """Put hooks on forward and backward passes; inputs are cast to the dtype that computes."""
        s, world, offload, groups = self.strategy, self.world, self._offload, self._groups
        overlap, ahead = (overlap_pays(x) if s.overlap is None else s.overlap for x in (world, groups.inside))
        if s.stage == 3:
            take = partial(checkpoint.take_written, offload)
            self._values = GatheredValues(self.model, self.units, groups, self._fetch, take, ahead=ahead)
        elif self._memory is not None:
            self._values = CommonValues(self.model, self._trainable, self._memory, world)
        else:
            wait = None if offload is None else offload.wait
            self._values = WholeValues(self.model, self._trainable, self._channel, wait)
        self._frozen = [(name, p) for name, p in self.model.named_parameters() if not p.requires_grad]
        self._across = None
        if groups.count > 1:
            self._across = Across(self._trainable, groups, s.across, self.optimizer)
        self.own_parts = {} if self._across is None else {"across": self._across}
        if self._scatter is not None:
            self._scatter.set_units([unit for unit in self._trainable if unit.owners is None])
        self.windows = self._backward = Backward(
            self._trainable,
            groups,
            stage=s.stage,
            accumulate=s.accumulate,
            overlap=overlap,
            advance=self.advance,
            values=self._values,
            on_reduced=self._take_reduced,
            on_window=partial(self.share_buffers, self.strategy.buffers),
            on_pass=self._check_pass,
            across=self._across,
            scatter=self._scatter,
        )
        self.noise = self._backward.noise
        if s.precision is not None:
            self._cast = self.model.register_forward_pre_hook(cast_inputs(DTYPES[s.precision]), with_kwargs=True)
        hooks, gather = (self._end_delay, self._note_load), self._gather_optimizer
        self._state_dict = checkpoint.WholeStateDict(self.model, self.units, self._values, offload, *hooks)
        self._optimizer_state = checkpoint.WholeOptimizerState(self._shards, self.units, offload, gather)

    def _take_reduced(self, unit: Unit, fresh: bool) -> None:
        """The gradient of my shard is that of the whole window."""
        if self._offload is not None and not unit.steps_here:
            self._offload.offer(unit, fresh)
        if self._spare is not None and unit.spare is not None:
            self._spare.send(unit)

    def _fetch(self, unit: Unit) -> Tensor:
        """Return my shard of a unit, up to date, on the device that computes."""
        found = unit.shard if self._offload is None or unit.steps_here else self._offload.values(unit)
        return found if self._groups.size == 1 else found.to(unit.full.device)

    def _check_pass(self) -> None:
        """Refuse a parameter that was frozen: it belongs to no unit, so its gradient would stay on its own rank."""
        assert self._values is not None
        self._values.gather_late()  # what no module asked for
        self._shards.end_step()  # where a step broke off
        for name, param in self._frozen:
            if param.requires_grad:
                raise RuntimeError(
                    f"{name!r} was frozen when the parameters were split, and is not now: call replica.restore() and "
                    "replica.close() on every rank, and un.parallel again"
                )

    def _unwatch(self) -> None:
        """Remove all hooks and units."""
        if self._cast is not None:
            self._cast.remove()
        self.close_windows()
        for part in (self._state_dict, self._optimizer_state, self._values, self._offload, self._spare):
            if part is not None:
                part.close()
        if self.units:
            self._channel.close()
            self._groups.close()
        self._cast = self._state_dict = self._backward = self._values = self._offload = None
        self._spare = self._memory = self._optimizer_state = self._across = None
        self.units, self.is_split = [], False

    # The loop --------------------------------------------------------------------------------------------

    @property
    def _is_stepping(self) -> bool:
        """Whether the optimizer is stepping, or a step has broken off: then shards are newer than values."""
        return self._backward is not None and self._backward.window is Window.STEPPING

    def before_step(self) -> None:
        if self._spare is None or not self._spare.is_catching_up:
            super().before_step()
            if self._values is not None:
                self._values.begin_step(self.step, self.stepping.param_groups, again=self._is_stepping)
            if self._spare is not None and self._backward is not None:
                self._backward.check_ended()
                changed = self._backward.gradients.changed
                self._spare.agree(self.step, self.stepping, changed, self.members.index(self.stepping))
        self.fault_in_update()
        if self._backward is not None:
            self._backward.begin_step()
        self._shards.begin_step()  # off the device they have no gradients: the optimizer finds nothing to step

    @torch.no_grad()
    def after_step(self) -> None:
        """Send the new values of my shards to every rank: at once, or when a module needs them."""
        self._shards.end_step()
        if self._spare is not None:
            self._spare.end_step(self.stepping)
        self._stepped = self.step
        if self._spare is not None and self._spare.is_catching_up:
            return
        if self._backward is not None and self._values is not None:
            gradients = self._backward.gradients
            stepped = [unit for unit in self._trainable if self.members[unit.member] is self.stepping]
            if self._offload is not None:
                away = [unit for unit in stepped if not unit.steps_here]
                absent = {unit: gradients.absent(unit) for unit in away}
                self._offload.step(self.members.index(self.stepping), gradients.factor(away), absent)
            self._shards.note_stepped(stepped, gradients.find_used)
            self._values.end_step(stepped, self.world)
            super().after_step()
            if self._backward.window is Window.STEPPED:
                gradients.used_up |= set(stepped)
        else:
            super().after_step()

    def _take_written(self) -> None:
        """Let what the program wrote to parameters since the last step count; not while values that were stepped are
        still to be sent."""
        if self._values is not None and not self._is_stepping:
            self._values.take_written()

    def write(self, change: Callable[[], Any]) -> None:
        """Change parameters between steps: `change()` is called on every rank that has values of its own, or on one, if
        all have the same memory. Every rank calls it: `replica.write(lambda: model.weight.data.mul_(0.9))`."""
        if self._values is not None and self._state_dict is not None:
            self._end_delay()
            self._values.write(change, partial(self._state_dict.update_shards, exactly=False))
            return
        with torch.no_grad():
            change()

    def watch(self, scaler: torch.amp.GradScaler) -> None:
        if self.strategy.optimizer_on != "device":
            raise ValueError(
                "a GradScaler looks at gradients that the optimizer holds, and here they leave for the host: compute "
                "in bf16, which needs none (precision='bf16'), or keep optimizer_on='device'"
            )
        super().watch(scaler)
        if self._across is not None:
            self._across.watch(partial(read_loss_scale, scaler, self.members, strict=True))

    # State -----------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Every rank calls it: what is saved has what the program wrote."""
        if self._values is not None:
            self._values.settle("a checkpoint")
        return super().state_dict()

    def shared_state(self) -> dict[str, Any]:
        return {**super().shared_state(), "updates": 0 if self._offload is None else self._offload.steps}

    def load_shared(self, shared: dict[str, Any]) -> None:
        super().load_shared(shared)
        if self._offload is not None:
            self._offload.steps = shared.get("updates", self.step)
        self._stepped = self.step

    def sharded_state(self) -> dict[str, Any] | None:
        """Return what this rank has of model and optimizer, with a Piece in place of each tensor that is split."""
        if self._values is None:
            return None
        self._take_written()
        self._end_delay()
        with self._pause_state_dict():
            model = checkpoint.collect_model_pieces(unwrap(self.model), self.units, self._offload)
        optimizer = self._shards.pieces()
        if self._offload is not None:
            optimizer["state"] = dict(sorted({**optimizer["state"], **self._offload.state_pieces()}.items()))
        return {"model": self._groups.share_out(model), "optimizer": self._groups.share_out(optimizer)}

    def _end_delay(self) -> None:
        """What is saved, or written over, is the latest, and the run goes on from it."""
        if self._offload is not None and self._values is not None and self.strategy.puts_off:
            self._offload.finish()
            self._values.renew(self._trainable)

    def _find_channel(self) -> World:
        """In whose order of operations a rank is next that does not call what the program calls here."""
        if isinstance(self._values, GatheredValues):
            self._values.release_all()  # nothing of it is under way
            return self._values.channel
        return self._backward.channel if self._backward is not None else self.world

    def _agree(self, what: str) -> None:
        self.world.run_tolerating_loss(lambda: self._find_channel().barrier(tag=what))  # on every rank, between steps
        self._end_delay()

    def _gather_optimizer(self, member: int) -> dict[Tensor, dict[str, Any]]:
        """For `optimizer.state_dict()`, of one of several."""
        if self.strategy.optimizer_on == "disk":
            raise ValueError(
                "optimizer.state_dict() would bring all of the optimizer's state, which is on disk here, into every "
                "rank's memory: save with un.save(folder, replica), and un.read_checkpoint(folder) reads it in plain "
                "PyTorch"
            )
        if self._offload is not None:
            self._end_delay()
            self._load_states(torch.device("cpu"))
        try:
            on = None if self.strategy.optimizer_on == "device" else torch.device("cpu")
            return self._shards.gather(self._find_channel(), on, member=member)
        finally:
            self._shards.drop_state(away=True)

    def load_sharded_state(self, whole: dict[str, Any], *, same_world: bool) -> None:
        """Load my part of any checkpoint's model and optimizer (see `unisono.training.checkpoint.slices.Stored`)."""
        whole_units = self.strategy.stage < 3
        if self._values is not None:
            self._values.begin_loading()
        with nullcontext() if self._spare is None else self._spare.changing():
            with self._pause_state_dict():
                checkpoint.load_model(
                    unwrap(self.model), self.units, whole["model"], whole=whole_units, offload=self._offload
                )
            if whole["optimizer"] is not None:
                checkpoint.load_optimizer(self._shards, self.units, whole["optimizer"], self._offload)
        if self._values is not None:
            self._values.end_loading()
        self._note_load()

    def _note_load(self) -> None:
        """My shards are other ones now."""
        self._turns += 1

    def _pause_state_dict(self) -> AbstractContextManager[None]:
        return nullcontext() if self._state_dict is None else self._state_dict.pause()

    @property
    def kept_energy(self) -> list[float]:
        """Under `defer`: of my shards' gradients' squared norm, what was not put off, in each of the last steps."""
        return [] if self._offload is None else self._offload.kept_energy

    @property
    def averaged_values(self) -> AveragedValues:
        if not self.units:
            return super().averaged_values
        if name := self.strategy.puts_off:
            raise ValueError(f"no average of the weights under {name}: steps end when others have begun. Leave it out")
        return ShardValues(self, self._trainable, self._values, self._offload, self._spare, self._shards, self._groups)

    # Another world, and the end --------------------------------------------------------------------------

    @torch.no_grad()
    def restore(self) -> None:
        """Give model and optimizer back whole, as ordinary ones; every rank calls it. Then `close()`."""
        if self.units:
            if self.weight_average is not None:
                self.weight_average.settle()
            self._take_written()
            self._load_offloaded()
            self._join(self.units, self._groups.inside, [(r, 0) for r in range(self._groups.size)])

    def progress(self) -> dict[str, Any]:
        """With copies of the shards, ranks that are a step apart go on from the same one: see `_find_holders`."""
        spare = None
        if self._spare is not None and self.units:
            by = [self.members.index(optimizer) for optimizer in self._spare.stepped]
            spare = {**self._spare.progress(), "stepped": self._stepped, "stepped by": by}
        split, turns = self.is_split, self._turns
        reached = [self.step, split, turns] if spare is None else [turns]
        found = {"reached": reached, "split": split, "turns": turns, "copies": split and self._keeps_copies}
        return {**found, "spare": spare, "place": [self._groups.rank, self._groups.size] if split else [0, 1]}

    def _who_stayed(self, world: World, source: int, every: Sequence[Any]) -> Change:
        """By the split alone: of ranks that have the same, some may not know yet that this world was complete."""
        return super()._who_stayed(world, source, [(every[source][0], rank, found) for _, rank, found in every])

    def _find_holders(self, change: Change) -> tuple[int, dict[int, checkpoint.Holder]]:
        """How many steps to go on from (with copies), and by shard who holds it then."""
        there = [(change.progress[r]["place"][0], r, change.progress[r]["spare"]) for r in change.stayed]
        if change.progress[change.source]["spare"] is None:
            return 0, {shard: (r, 0) for shard, r, _ in reversed(there)}
        size = change.progress[change.source]["place"][1]
        return find_holders(size, there, copies=change.progress[change.source]["copies"])

    def check_change(self, change: Change) -> None:
        """A rank that is lost takes its shards along, unless the next one has a copy."""
        source = change.progress[change.source]
        size = source["place"][1]
        gone = sorted(set(range(size)) - self._find_holders(change)[1].keys())
        if not source["split"] or not gone:
            return
        many = ", ".join(map(str, gone))
        hint = " (zero(spare=True) keeps every part on a second rank)"
        what = "optimizer's state" + (" and of the parameters" if self.strategy.stage == 3 else "")
        if source["spare"] is None:
            why = f"rank(s) {many} of the former {change.former_size} took their parts of the {what} with them"
        elif not source["copies"]:
            why, hint = f"in no group is a rank left that had part(s) {many} of the {size} of the {what}", ""
        else:
            why = f"the parts that rank(s) {many} of the former {change.former_size} had of the {what} are gone"
            after = ", ".join(str((r + 1) % change.former_size) for r in gone)
            why, hint = f"{why}: so are the copies on the rank(s) after them, {after}", ""
        raise ValueError(f"{why}: create the replica again in the new world and un.load the last checkpoint{hint}")

    def stop(self, change: Change | None = None) -> None:
        """For another world, model and optimizer become whole, from those who hold the shards of the source's world;
        without one, they keep what this rank has of them: `restore()` first, on every rank, for all."""
        if change is None:
            units, memory = self.units, self._memory
            self._close_units()
            for unit in units if memory is not None else ():
                move_out(unit.params, unit.views(unit.full))
            return
        if isinstance(self._values, GatheredValues):
            self._values.take_written()
        if (average := self.weight_average) is not None and average.is_lifted:
            average.place()  # a rank was lost after the last split
        if change.progress[change.source]["split"]:
            steps, holders = self._find_holders(change)
            if self._spare is not None and change.world.rank in {r for r, _ in holders.values()}:
                furthest = [change.progress[r]["spare"] for r in change.stayed]
                who = next(found["stepped by"] for found in furthest if found["steps"] == steps)
                self._spare.catch_up(steps, [self.members[i] for i in who])
            self.model.zero_grad()
            self._take_written()
            self._load_offloaded()
            size = change.progress[change.source]["place"][1]
            mine = self.units if change.keeps else self._make_units(0, size)
            self._join(mine, change.world, [holders[shard] for shard in range(size)])
            self._go_back(change, steps)
        else:
            self.model.zero_grad()
            units = self.units
            self._close_units()
            for unit in units:  # their values are out of date: memory for new ones
                for param, shape in zip(unit.params, unit.shapes, strict=True):
                    param.data = torch.empty(shape, dtype=unit.original_dtype, device=param.device)
            if average is not None:
                average.place()  # the same
        self._turns = change.progress[change.source]["turns"] + 1

    def _go_back(self, change: Change, steps: int) -> None:
        """With copies: a window that was counted, and whose gradients no rank has stepped, did not happen."""
        spares = [change.progress[r]["spare"] for r in change.stayed]
        reached = [found["stepped"] for found in spares if found is not None and found["steps"] == steps]
        if reached and change.keeps:
            ledger, back = change.world.ledger, self.step - reached[0]
            self.step = reached[0]
            if 0 < back <= ledger.step_count:
                ledger.resume(ledger.step_count - back)

    def carry(self, change: Change, shared: dict[str, Any]) -> str:
        found = [super().carry(change, {**shared, "step": self.step})]
        if self.strategy.within is not None:
            found.append(self._misfit or f"{self._groups.count} group(s) of {self._groups.size} rank(s) split it")
            if self._across is not None and any(reduction.keeps for reduction in self._across.reductions):
                found.append(DROPPED)
        return "; ".join(filter(None, found))

    def take_model(self, change: Change) -> str:
        split = f", split over {change.world.size} ranks instead of {change.former_size}"
        return super().take_model(change) + ("" if self.strategy.within is not None else split)

    def _load_offloaded(self) -> None:
        """Move the state that is off the device to where the optimizer would keep it."""
        if self.strategy.optimizer_on == "device" or self._values is None:
            return
        self._values.gather_all()
        for unit in self._trainable:
            here = unit.master if unit.steps_here or self._offload is None else self._offload.state(unit).read("master")
            unit.master = here.to(unit.params[0].device)
        if self._offload is not None:
            self._load_states(self._trainable[0].master.device)

    def _load_states(self, device: torch.device) -> None:
        """Let the optimizer have the state of its leaves, which is elsewhere."""
        assert self._offload is not None
        for (unit, i), state in self._offload.states(device).items():
            self._shards.states(unit)[unit.leaves[i]] = state

    @torch.no_grad()
    def _join(self, units: Sequence[Unit], world: World, order: Sequence[checkpoint.Holder]) -> None:
        """Put model and optimizer together from the shards of those who hold them."""
        values, states = checkpoint.join_units(units, self._shards, world, order)
        if (average := self.weight_average) is not None and average.is_kept:
            names: dict[Tensor, str] = {param: name for name, param in unwrap(self.model).named_parameters()}
            average.lift(join_averages(units, average.held, world, order, names), is_agreed=True)
        self._close_units()
        for param, value in values.items():
            param.grad = None
            param.data = value
        for param, dtype in self._narrowed:
            param.data = param.data.to(dtype)
        self._narrowed = []
        self.optimizer.state.update(states)

    def _close_units(self) -> None:
        """Make model and optimizer ordinary ones again, with what this rank has of them."""
        if self.units:
            self._shards.put_back()
        self._unwatch()
