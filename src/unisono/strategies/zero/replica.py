"""The replica of `zero`: splits model and optimizer over the ranks, and brings them together again."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from unisono.exchange.reduction import overlap_pays
from unisono.exchange.windows import Counter
from unisono.strategies.zero import checkpoint as saving
from unisono.strategies.zero import optimizer_shards as optimizers
from unisono.strategies.zero.gather import Arrival, Gathering
from unisono.strategies.zero.materialise import Swapped, adopt, materialise, swap
from unisono.strategies.zero.offloading import Numbers, Offloading, Place
from unisono.strategies.zero.reduce import Backward
from unisono.strategies.zero.reshard import Movable
from unisono.strategies.zero.units import Unit, keeps_its_dtype, unit_bytes_for, units_by_module, units_by_size
from unisono.strategy import share_buffers
from unisono.world import World

if TYPE_CHECKING:
    from unisono.strategies.zero import zero

DTYPES = {"bf16": torch.bfloat16}


class ZeroReplica(Movable):
    """Units of parameters, each with one shard a rank; in a world of one with nothing to move, only counting."""

    strategy: zero

    def __init__(self, model: nn.Module, optimizer: Optimizer, world: World, strategy: zero) -> None:
        super().__init__(model, optimizer, world, strategy)
        self.units: list[Unit] = []
        self._backward: Backward | Counter | None = None
        self._gathering: Gathering | None = None
        self._arrival: Arrival | None = None
        self._offload: Offloading | None = None
        self._late: set[Unit] = set()  # units whose new values no module has asked for yet
        self._model_hooks: list[Any] = []
        self._narrowed: list[tuple[Tensor, torch.dtype]] = []
        self._quiet = False  # the model's own hooks do nothing now
        self._original = [list(group["params"]) for group in optimizer.param_groups]
        try:
            self._start()
        except BaseException:
            self.close()
            raise

    @property
    def splits(self) -> bool:
        """Whether there is anything to split, or to keep in another precision or place."""
        s = self.strategy
        return self.world.size > 1 or s.precision is not None or (s.optimizer_on, s.params_on) != ("device", "device")

    # Splitting -------------------------------------------------------------------------------------------

    def _start(self) -> None:
        swapped: Swapped = {}
        if not self.splits:
            self._settle(swapped)
            last = [p for p in self.model.parameters() if p.requires_grad][-1]
            self._backward = Counter(last, accumulate=self.strategy.accumulate, advance=self.advance)
            return
        self.units = self._made(self.world.size, self.world.rank)
        self._memory = self.world.channel(inline=True)
        self._narrow_frozen()
        device = self._device()
        if self.strategy.optimizer_on != "device":
            self._offload = Offloading(self.optimizer, self._trainable, self._numbers(), self.strategy, device)
        self._adopt_units(swapped, device)
        self._settle(swapped)
        before = optimizers.split(self.optimizer, self._trainable)
        stand_in = self._stand_in()
        if self._offload is not None:
            self._offload.start()
            if before:
                self._offload.load_states(before)
        self._watch_passes()
        assert isinstance(self._backward, Backward)
        self._backward.stand_in = stand_in
        self._watch_model()

    def _stand_in(self) -> Tensor | None:
        """Something for the optimizer to hold where no element of any parameter is mine: a GradScaler asks for it."""
        if self._offload is not None or any(unit.held for unit in self._trainable):
            return None
        made = nn.Parameter(torch.zeros(1, device=self._trainable[0].params[0].device))
        self.optimizer.param_groups[0]["params"] = [made]
        return made

    def _device(self) -> torch.device:
        """Where the model computes; its buffers are there."""
        on = next(self.model.parameters()).device
        if self.strategy.params_on == "device" and on.type != "meta":
            return on
        on = self.world.device
        for buffer in self.model.buffers():
            if not buffer.is_meta:
                buffer.data = buffer.data.to(on)
        return on

    def _adopt_units(self, swapped: Swapped, device: torch.device) -> None:
        """One unit after the other: a model may be larger than this rank's memory."""
        s, host = self.strategy, torch.device("cpu")
        for unit in self.units:
            materialise(self.model, self.world, swapped, unit.params)
            unit.params = [swapped.get(p, p) for p in unit.params]
            unit.steps_here = self._offload is None
            adopt(
                unit,
                self._memory,
                whole=s.stage < 3,
                device=device,
                shard_on=device if s.params_on == "device" else host,
                master_on=device if self._offload is None else host,
                master_in=None if self._offload is None else self._offload.waiting_room(unit),
            )
            if self._offload is not None and unit.trainable:
                self._offload.take(unit)

    def _watch_passes(self) -> None:
        s, world = self.strategy, self.world
        overlap = overlap_pays(world) if s.overlap is None else s.overlap
        if s.stage == 3:
            self._gathering = Gathering(self.model, self.units, world, self._values, ahead=overlap)
        elif self._offload is not None:
            self._arrival = Arrival(self.model, self._trainable, self._arrive)
        self._frozen = [(name, p) for name, p in self.model.named_parameters() if not p.requires_grad]
        self._backward = Backward(
            self._trainable,
            world,
            stage=s.stage,
            accumulate=s.accumulate,
            overlap=overlap,
            advance=self.advance,
            arrived=self._gathering.arrived if self._gathering is not None else lambda unit, slot: None,
            complete=self._gathering.complete if self._gathering is not None else lambda unit: None,
            reduced=self._offload.offer if self._offload is not None else lambda unit, fresh: None,
            finished=self._share_buffers,
            check=self._check_frozen,
        )

    def _made(self, size: int, rank: int) -> list[Unit]:
        """The units of the model for a world of this size; without memory."""
        s = self.strategy
        dtype = None if s.precision is None else DTYPES[s.precision]
        by = units_by_module if s.stage == 3 else units_by_size
        return by(self.model, unit_bytes_for(self.model, s.unit_bytes), dtype=dtype, size=size, rank=rank)

    def _numbers(self) -> Numbers:
        names = {p: name for name, p in self.model.named_parameters()}
        every = [(names[p], g) for g, group in enumerate(self.optimizer.param_groups) for p in group["params"]]
        return {name: Place(g, number) for number, (name, g) in enumerate(every)}

    def _settle(self, swapped: Swapped) -> None:
        """What is still on the meta device gets values; the optimizer holds what has them."""
        materialise(self.model, self.world, swapped)
        swap(self.optimizer, swapped)
        self._original = [list(group["params"]) for group in self.optimizer.param_groups]

    def _narrow_frozen(self) -> None:
        """In stages 1 and 2 frozen parameters belong to no unit: they compute in the precision of the others."""
        self._narrowed = []
        if self.strategy.precision is None or self.strategy.stage == 3:
            return
        wide, dtype = keeps_its_dtype(self.model), DTYPES[self.strategy.precision]
        for param in self.model.parameters():
            if not param.requires_grad and param not in wide and param.is_floating_point():
                self._narrowed.append((param, param.dtype))
                param.data = param.data.to(dtype)

    def _check_frozen(self) -> None:
        """A parameter that learns from now on belongs to no unit: its gradient would stay on its own rank."""
        self._arrive_until()  # what no module asked for
        for name, param in self._frozen:
            if param.requires_grad:
                raise RuntimeError(
                    f"{name!r} was frozen when the parameters were split, and is not now: call replica.restore() and "
                    "replica.close() on every rank, and un.parallel again"
                )

    def _values(self, unit: Unit) -> Tensor:
        """My shard of a unit, up to date, where it computes."""
        if self._offload is None or not unit.trainable:
            return unit.shard if self.world.size == 1 else unit.shard.to(unit.full.device)
        found = self._offload.values(unit)
        return found if self.world.size == 1 else found.to(unit.full.device)

    def _arrive(self, unit: Unit) -> None:
        """A module needs a unit whose new values may still be on their way."""
        if unit in self._late:
            self._arrive_until(unit.index)

    def _arrive_until(self, index: int | None = None) -> None:
        """In the order of the units, whichever a rank needs first: gathering them is a matter of all ranks."""
        for unit in sorted(self._late, key=lambda unit: unit.index):
            if index is not None and unit.index > index:
                return
            assert self._offload is not None
            self._late.discard(unit)
            self._offload.wait(unit)
            if self.world.size > 1:
                self._memory.all_gather(unit.shard, even=True, out=unit.parts(unit.full), tag=unit.tag).wait()

    def _new_values(self) -> None:
        """My shards have new values, which modules will ask for."""
        if self._gathering is None:
            self._late = set(self._trainable)
        else:
            self._gathering.let_go_all()

    def _take_over(self) -> None:
        """Values whose update was delayed, too: what is saved is the latest, and the run goes on from it."""
        if self._offload is not None and self.strategy.delayed_update:
            self._offload.finish()
            self._new_values()

    def _share_buffers(self, world: World) -> None:
        share_buffers([b.detach() for b in self.model.buffers()], self.strategy.buffers, world)

    def _watch_model(self) -> None:
        """Inputs take the dtype that computes; `state_dict()` and `load_state_dict()` see whole values."""
        model = self.model
        if self.strategy.precision is not None:
            cast = _to(DTYPES[self.strategy.precision])
            self._model_hooks.append(
                model.register_forward_pre_hook(
                    lambda _, args, kwargs: torch.utils._pytree.tree_map(cast, (args, kwargs)), with_kwargs=True
                )
            )
        if self._gathering is not None or self._offload is not None:
            self._model_hooks += [
                model.register_state_dict_pre_hook(lambda *_: self._gather_all()),
                model.register_state_dict_post_hook(lambda *given: self._take_out(*given)),
            ]
        self._model_hooks += [
            model.register_load_state_dict_pre_hook(lambda *_: self._gather_all()),
            model.register_load_state_dict_post_hook(lambda *_: self._values_changed()),
        ]

    def _gather_all(self) -> None:
        self._arrive_until()
        if self._gathering is not None and not self._quiet:
            for unit in self.units:
                self._gathering.gather(unit)

    def _take_out(self, _module: nn.Module, state: dict[str, Any], prefix: str, _metadata: Any) -> None:
        """What `state_dict()` gives stays, when the values are let go."""
        if self._gathering is None or self._quiet:
            return
        copies: dict[tuple[int, torch.Size], Tensor] = {}
        for name, _ in self.model.named_parameters(remove_duplicate=False):
            if prefix + name in state:
                value = state[prefix + name]
                state[prefix + name] = copies.setdefault((value.data_ptr(), value.shape), value.detach().clone())
        self._gathering.let_go_all()

    @torch.no_grad()
    def _values_changed(self) -> None:
        """Someone wrote into the whole values: my shards follow."""
        if self._quiet:
            return
        for unit in self.units:
            if unit.trainable and self._offload is not None:
                self._offload.set_master(unit, unit.mine(unit.full))
                continue
            if unit.shard.data_ptr() != unit.mine(unit.full).data_ptr():
                unit.shard.copy_(unit.mine(unit.full))
            if unit.trainable and unit.master is not unit.shard:
                unit.master.copy_(unit.shard)
        if self._gathering is not None:
            self._gathering.let_go_all()

    # The loop --------------------------------------------------------------------------------------------

    def before_step(self) -> None:
        if self._backward is not None:
            self._backward.before_step()
        if self._offload is not None:  # the optimizer itself finds nothing to step
            for unit in self._trainable:
                for leaf in unit.leaves:
                    leaf.grad = None

    @torch.no_grad()
    def after_step(self) -> None:
        self._spread()
        if self._backward is not None:
            self._backward.after_step()
        if self._offload is not None and isinstance(self._backward, Backward):
            self._backward.mark()

    def _spread(self) -> None:
        """The new values of my shards go to everyone: at once, or when a module needs them."""
        if self._offload is not None:
            assert isinstance(self._backward, Backward)
            self._offload.step(self._backward.factor(), {unit: self._backward.absent(unit) for unit in self._trainable})
            self._new_values()
            return
        for unit in self._trainable:
            if unit.master is not unit.shard:
                unit.shard.copy_(unit.master)
            if self._gathering is None:
                self._memory.all_gather(unit.shard, even=True, out=unit.parts(unit.full), tag=unit.tag).wait()
        if self._gathering is not None:
            self._gathering.let_go_all()

    def watch(self, scaler: torch.amp.GradScaler) -> None:
        if self._offload is not None:
            raise ValueError(
                "a GradScaler looks at gradients that the optimizer holds, and here they leave for the host: compute "
                "in bf16, which needs none (precision='bf16'), or keep optimizer_on='device'"
            )
        super().watch(scaler)

    def no_sync(self) -> AbstractContextManager[None]:
        """The window does not end with passes inside the block. Stage 1 keeps their gradients whole; stages 2 and 3,
        which are there to avoid that, reduce them at once and add up shards: the sum is the same."""
        return self._backward.no_sync() if self._backward is not None else super().no_sync()

    def state_dict(self) -> dict[str, Any]:
        updates = 0 if self._offload is None else self._offload.steps
        return {"shared": {"step": self.step, "updates": updates}, "local": {}}

    def load_state_dict(self, state: dict[str, Any], *, same_world: bool = True) -> None:
        super().load_state_dict(state, same_world=same_world)
        if self._offload is not None:
            self._offload.steps = state["shared"].get("updates", self.step)

    # Checkpoints -----------------------------------------------------------------------------------------

    def sharded_state(self) -> dict[str, Any] | None:
        """Model and optimizer as far as this rank has them, with a Piece in place of each tensor that is split."""
        if not self.units:
            return None
        self._take_over()
        self._quiet = True
        try:
            model = saving.model_pieces(bare(self.model), self.units, self._offload)
        finally:
            self._quiet = False
        state = optimizers.pieces(self.optimizer, self._trainable, self._original)
        if self._offload is not None:
            state["state"] = dict(sorted(self._offload.state_pieces().items()))
        return {"model": model, "optimizer": state}

    def load_sharded_state(self, whole: dict[str, Any], *, same_world: bool) -> None:
        """Take my part of any checkpoint's model and optimizer (see `unisono.checkpoint.slices.Stored`)."""
        self._quiet = True
        try:
            whole_units = self._gathering is None
            saving.load_model(bare(self.model), self.units, whole["model"], whole=whole_units, offload=self._offload)
        finally:
            self._quiet = False
        if self._gathering is not None:
            self._gathering.let_go_all()
        if whole["optimizer"] is not None:
            saving.load_optimizer(self.optimizer, self._trainable, self._original, whole["optimizer"])
            if self._offload is not None:
                self._offload.load_states(whole["optimizer"]["state"])
                self.optimizer.state.clear()

    # The end ---------------------------------------------------------------------------------------------

    def _take_off(self) -> None:
        """No more hooks, no more units."""
        for hook in self._model_hooks:
            hook.remove()
        self._model_hooks = []
        for part in (self._backward, self._gathering, self._arrival, self._offload):
            if part is not None:
                part.close()
        if self.units:
            self._memory.close()
        self._backward = self._gathering = self._arrival = self._offload = None
        self._late = set()
        self.units = []

    def close(self) -> None:
        """Stop watching. The model keeps what this rank has of it: `restore()` first, on every rank, for all."""
        super().close()
        if self.units:
            self._put_back()
        self._take_off()


def bare(model: nn.Module) -> nn.Module:
    """The module itself, where torch.compile has put another around it."""
    inner = getattr(model, "_orig_mod", model)
    return inner if isinstance(inner, nn.Module) else model


def _to(dtype: torch.dtype) -> Any:
    def cast(x: Any) -> Any:
        return x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() else x

    return cast
