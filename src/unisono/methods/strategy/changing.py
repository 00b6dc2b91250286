"""What changes in mid-run: `switch`, to another strategy; the replica that a program holds meanwhile; and, for
libraries that evaluate and save what they were given, the model that ranks agree on in the place of each one's own."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from unisono.methods.buckets import load_optimizer
from unisono.methods.exchange.reduction import Residual
from unisono.methods.exchange.windows import watch_steps
from unisono.methods.spec import build, describe
from unisono.methods.strategy.outliers import Outliers
from unisono.methods.strategy.program_writes import digest
from unisono.methods.strategy.replica import Replica, Strategy
from unisono.observe.runs import recording
from unisono.packing import pack
from unisono.training.checkpoint import save
from unisono.world import World


class ChangingReplica(Replica):
    """Stands in front of `inner`, the replica at work. What this class does not define is inner's: the members of
    `Replica`, which the class gets below its definition, and whatever else the method at work has.

    `between_steps` is called after each step of the optimizer, once `inner` has done its part: there, and nowhere
    else, the strategy may change, by `change` or `replace`.
    """

    is_trial = False  # nothing of it is to be kept: `un.save` writes nothing

    def __init__(self, inner: Replica, strategy: Strategy, between_steps: Callable[[], None]) -> None:
        # Replica's own would watch the optimizer and the model a second time.
        self.inner, self.strategy = inner, strategy
        self._between_steps = between_steps
        self._hooks_after: list[Any] = []
        self._follow_inner()

    def change(self, strategy: str | Strategy) -> None:
        """Go on with another strategy: see `Replica.switch`. Every rank calls it at the same step."""
        self.replace(lambda: switch(self.inner, strategy))

    def replace(self, make: Callable[[], Replica]) -> None:
        """Put what `make` gives in the place of `inner`, which `make` has closed."""
        healing = self.inner.healing
        average = self.inner.weight_average
        self.inner = make()
        self.inner.healing = healing
        if average is not None and self.inner.weight_average is None:
            average.move(self.inner)
        self._follow_inner()
        recording.note_method(self.world, self.inner.not_measured, bytes_by_formula=self.inner.bytes_by_formula)

    def bind_anew(self, make: Callable[[nn.Module, Optimizer, World], Replica], world: World) -> Replica:
        """Another replica in the place of `inner`, with nothing but the model, the optimizer and the step."""
        old = self.inner
        old.restore()
        old.close()
        new = make(old.model, old.optimizer, world)
        new.step = old.step
        if old.scaler is not None:
            new.watch(old.scaler)
        return new

    def _follow_inner(self) -> None:
        """Be called after `inner`: in the order in which they came."""
        for hook in self._hooks_after:
            hook.remove()
        self._hooks_after = watch_steps(self.inner.optimizer, None, self._on_inner_stepped)

    def _on_inner_stepped(self, _: Optimizer) -> None:
        """Not between the steps of several optimizers with one window: these belong together."""
        if self.inner.is_stepped:
            self._between_steps()

    def __getattr__(self, name: str) -> Any:
        if name == "inner":  # it is about to be made
            raise AttributeError(name)
        return getattr(self.inner, name)

    def __setattr__(self, name: str, value: Any) -> None:
        mine = name in ("inner", "strategy") or name.startswith("_") or not hasattr(vars(self).get("inner"), name)
        if mine:
            super().__setattr__(name, value)
        else:
            setattr(self.inner, name, value)

    def state_dict(self) -> dict[str, Any]:
        return {**self.inner.state_dict(), "shared": self.shared_state()}

    def load_state_dict(self, state: dict[str, Any], *, same_world: bool = True) -> None:
        super().load_state_dict(state, same_world=same_world)  # by `load_shared`, which may put another to work
        self.forget_writes()

    def switch(self, strategy: str | Strategy) -> Replica:
        new = self.inner.switch(strategy)
        self.close()
        return new

    def close(self) -> None:
        for hook in self._hooks_after:
            hook.remove()
        self._hooks_after = []
        self.inner.close()


def _of_inner(name: str) -> property:
    return property(
        lambda replica: getattr(replica.inner, name), lambda replica, value: setattr(replica.inner, name, value)
    )


for _name in vars(Replica):
    if not _name.startswith("__") and _name not in vars(ChangingReplica):
        setattr(ChangingReplica, _name, _of_inner(_name))


def switch(replica: Replica, strategy: str | Strategy) -> Replica:
    """Bind `strategy` to the replica's model and optimizer, on every rank; a refusal leaves everything as it was.

    1. agree: every rank asks for the same strategy at the same step;
    2. gather: the model becomes the one that `consolidate()` gives, and the optimizer's states their mean, on every
       rank (where ranks had the same, nothing changes);
    3. go on: the new replica counts on, and takes over what a reducer had still to send, in its own unit.
    """
    built: Strategy = build(strategy, kind="strategy")
    world, model = replica.world, replica.model
    _agree(describe(built), replica.step, world)
    average = replica.weight_average
    if average is not None:
        average.leave()
        average.agree()
    consolidated = replica.consolidate()
    unsent = replica.unsent()
    replica.restore()
    before = copy.deepcopy([model.state_dict(), replica.optimizer.state_dict()])
    _gather(model, consolidated)
    _average_optimizer(replica.optimizer, world)
    new: Replica | None = None
    try:
        new = built.bind(model, replica.optimizer, world)
        new.step = replica.step
        if unsent is not None:
            _hand_over(unsent, new)
        if replica.outliers is not None:
            new.outliers = Outliers(new, replica.outliers.times)
        if average is not None:
            average.move(new)
    except BaseException:
        if new is not None:
            new.restore()
            new.close()
        model.load_state_dict(before[0])
        replica.optimizer.load_state_dict(before[1])
        replica.split_again()
        raise
    replica.close()  # before the next one wraps the scaler's update: each unwraps only its own
    if replica.scaler is not None:
        new.watch(replica.scaler)
    new.forget_writes()
    if world.axes is not None:
        world.axes.attach(new)
    return new


def _agree(strategy: str, step: int, world: World) -> None:
    every = world.gather_objects([strategy, step])
    if any(other != every[0] for other in every):
        asked = "; ".join(f"rank {r} asks for {text} at step {at}" for r, (text, at) in enumerate(every))
        raise ValueError(f"the ranks do not switch alike: {asked}. Every rank must call switch() at the same step")


@torch.no_grad()
def _gather(model: nn.Module, consolidated: nn.Module) -> None:
    if consolidated is not model:
        theirs = consolidated.state_dict()
        for name, value in model.state_dict().items():
            if isinstance(value, Tensor):
                value.copy_(theirs[name])


@torch.no_grad()
def _hand_over(unsent: Residual, new: Replica) -> None:
    """What was still to be sent goes to the new replica. Differences of parameters that it has no use for are applied
    now: that is what sending them would have done."""
    taken = new.unsent()
    if unsent.unit != "parameters" or (taken is not None and taken.unit == "parameters"):
        new.take_unsent(unsent)
        return
    for name, param in new.model.named_parameters():
        total = unsent.total(name)
        if total is not None:
            new.world.all_reduce(total, "mean", tag="switch").wait()
            param.detach().sub_(total)


@torch.no_grad()
def _average_optimizer(optimizer: Optimizer, world: World) -> None:
    """Momenta that differ between ranks become their mean: ranks with one model and other momenta would part."""
    if world.size == 1:
        return
    states: list[dict[str, Any]] = [optimizer.state.get(p, {}) for g in optimizer.param_groups for p in g["params"]]
    floats = [v for s in states for _, v in sorted(s.items()) if isinstance(v, Tensor) and v.is_floating_point()]
    shapes = [[len(s) for s in states], [list(x.shape) for x in floats]]
    every = world.gather_objects({"shapes": shapes, "digest": digest(floats)})
    if all(other["digest"] == every[0]["digest"] for other in every):
        return
    if any(other["shapes"] != shapes for other in every):  # some rank has not stepped yet: rank 0's count
        load_optimizer(optimizer, world.broadcast_object(optimizer.state_dict(), 0))
        return
    for device in dict.fromkeys(x.device for x in floats):
        world.all_reduce([x for x in floats if x.device == device], "mean", tag="optimizer").wait()


class Agreed:
    """Puts the values of `replica.consolidate()` into the model, and brings this rank's own back.

    Where model and optimizer are split over the ranks, they are whole meanwhile. Every rank calls each method, inside
    `torch.inference_mode()` too: memory that is made here is used outside it.
    """

    def __init__(self, replica: Replica) -> None:
        self.replica = replica
        self._own: list[tuple[Tensor, Tensor]] | None = None  # tensors that were changed, and what they held
        self._is_whole = False

    @torch.inference_mode(False)
    @torch.no_grad()
    def put(self, *, whole: bool = True) -> None:
        """Let the model be the agreed one. `whole`: with all values of a model that is split, as saving needs it."""
        if whole and not self._is_whole:
            self.replica.restore()
            self._is_whole = True
        if self._own is None:
            self._own = []
            agreed = self.replica.consolidate()
            if agreed is not self.replica.model:
                for mine, theirs in zip(_tensors(self.replica.model), _tensors(agreed), strict=True):
                    if not torch.equal(mine, theirs):
                        self._own.append((mine, mine.clone()))
                        mine.copy_(theirs)

    @torch.inference_mode(False)
    @torch.no_grad()
    def take_back(self) -> None:
        """Let the model be this rank's own again, as it was before `put`."""
        for mine, before in self._own or []:
            mine.copy_(before)
        self._own = None
        if self._is_whole:
            self._is_whole = False
            self.replica.split_again()

    @torch.inference_mode(False)
    def finish(self, *, keep: bool = False) -> None:
        """End the training: the model is an ordinary one, with the agreed values (`keep`: with those that it has)."""
        if not keep:
            self.put()
        elif not self._is_whole:
            self.replica.restore()
        self.replica.close()
        self._own, self._is_whole = None, False


@torch.inference_mode(False)
def save_own(folder: Path, replica: Replica) -> bool:
    """Write what a library's checkpoint of the agreed model and rank 0's optimizer does not hold, where there is any:
    what a reducer has kept back, ranks' own models and optimizers. Every rank calls it."""
    mine = replica.own_optimizer or getattr(replica, "own_models", False) or bool(pack(replica.state_dict())[1])
    if not any(replica.world.gather_objects(mine)):
        if replica.world.rank == 0:  # what another method left there
            shutil.rmtree(folder, ignore_errors=True)
        return False
    save(folder, replica, keep=1)
    return True


def separate(state: Any) -> Any:
    """A state dict in which no two tensors lie in one line, as they may in a model that is bound: some libraries take
    them for one tensor, and save one. Tied ones stay tied."""
    apart: dict[Any, Tensor] = {}
    return {
        name: apart.setdefault((x.data_ptr(), x.shape), x.clone())
        if isinstance(x, Tensor) and x.untyped_storage().nbytes() > x.nbytes
        else x
        for name, x in state.items()
    }


def _tensors(model: nn.Module) -> Iterator[Tensor]:
    for x in (*model.parameters(), *model.buffers()):
        yield x.detach()
