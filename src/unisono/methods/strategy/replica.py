"""Strategy and Replica: a method with its settings, and this rank's copy of the model under it."""

from __future__ import annotations

import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial, wraps
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from unisono.launchers.runtime import debug_pause, status
from unisono.launchers.runtime.frames import warn_user
from unisono.methods.buckets import load_optimizer
from unisono.methods.checks import AtLeast, check_settings
from unisono.methods.exchange.noise_scale import NoiseScale
from unisono.methods.exchange.overlap import is_held
from unisono.methods.exchange.reduction import OwnPart, Reduction, read_loss_scale
from unisono.methods.exchange.reduction import Residual as Residual
from unisono.methods.exchange.windows import StepHooks, Window, Windows, follow_optimizer, leave_optimizer, watch_steps
from unisono.methods.facts import Pattern
from unisono.methods.joined_optimizers import members_of
from unisono.methods.strategy.averages import AveragedValues
from unisono.methods.strategy.change import Change
from unisono.methods.strategy.sharing import Buffers, has_buffers, share, share_buffers
from unisono.methods.strategy.watches import FaultWatch, LateParameters, ParameterWatch
from unisono.training.batch_norm import move_batch_norm, watch_batch_norms
from unisono.training.checkpoint import ModelPart, wait_saved
from unisono.world import World
from unisono.world.batch_weights import CallHooks
from unisono.world.elastic import Elastic
from unisono.world.operations import put_back
from unisono.world.straggler_watch import Treatment, after_step

if TYPE_CHECKING:
    from unisono.methods.strategy.averages import Average
    from unisono.methods.strategy.healing import Healing
    from unisono.methods.strategy.outliers import Outliers

Accumulate = Annotated[int, AtLeast(1, "backward passes a window")]
BucketBytes = Annotated[int, AtLeast(1, "bytes a bucket")]
_replicas: weakref.WeakSet[Replica] = weakref.WeakSet()  # those that watch a model
_replicas_lock = threading.Lock()


class Strategy(ABC):
    """A method with its settings: a frozen dataclass whose fields are the settings, checked by their annotations."""

    def bind(self, model: nn.Module, optimizer: Optimizer, world: World) -> Replica:
        """Refuse what cannot work, by name and with the reason; else start watching the model."""
        check_settings(self)
        self.check(model, optimizer, world)
        replica = self.make(model, optimizer, world)
        replica.late_parameters = LateParameters(model, optimizer)  # the method may have put others in their place
        return replica

    def check(self, model: nn.Module, optimizer: Optimizer, world: World) -> None:  # noqa: B027 - most need none
        """Refuse settings that do not go together, and a model, an optimizer or a world that the method cannot take."""

    def why_torch_optimizer(self) -> str:
        """Why the method cannot go with a library's optimizer that is not torch's (Keras'); "": it can."""
        return ""

    def pattern(self) -> Pattern:
        """How the method exchanges, for predictions: of itself, gradients in every window, by all workers."""
        return Pattern(reducer=getattr(self, "reducer", None), overlap=getattr(self, "overlap", None) is not False)

    @abstractmethod
    def make(self, model: nn.Module, optimizer: Optimizer, world: World) -> Replica:
        """The replica; all has been checked."""


class Replica:
    """This rank's copy of the model under a strategy. The defaults do nothing; a method overrides what it needs.

    Three groups of methods:

    - during training, called by hooks on the optimizer: `before_step`, `after_step`. A method sets `windows`, which
      watches backward passes, in `start`, and `reduction` if a reducer may keep something back to send it later;
    - state: `shared_state`, `load_shared`, `local_state` and `load_local` for checkpoints and new worlds, `unsent` and
      `take_unsent` for `switch`;
    - another world: the steps of `rebind`: `check_change`, `settle`, `stop`, `take_model`, `start` and `carry`.
    """

    own_gradients: ClassVar[bool] = False  # ranks' gradients differ: AMP may skip the step of one rank alone
    own_optimizer: ClassVar[bool] = False  # ranks' optimizer states differ: those that stay in a new world keep theirs
    # What may be done about slow ranks. "deal": give them fewer samples, as the mean over the ranks counts each sample
    # once (`World.weight`), whatever the optimizer; "name": only say so; "ignore": no rank waits for them.
    slow_ranks: ClassVar[Treatment] = "name"
    not_measured: tuple[str, ...] = ()  # the parts of a step that the ledger's rows cannot tell from others
    same_parameters: ClassVar[bool] = False  # after every step, bit by bit: ranks compare them now and then
    counts_steps: ClassVar[bool] = True  # every step of the optimizer counts in an average of the weights
    hides_gradients: bool = False  # in the optimizer's step: the program's hooks run around that
    is_split: bool = False  # over the ranks: this one has a part of model and optimizer
    no_average: ClassVar[str] = ""  # why there can be none of the weights under this method, and what to do instead
    bytes_by_formula: ClassVar[bool] = False  # the ledger's bytes are not counted where they are sent

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "consolidate" in vars(cls):
            cls.consolidate = _survive_losses(cls.consolidate)  # type: ignore[method-assign, assignment]

    def __init__(self, model: nn.Module, optimizer: Optimizer, world: World, strategy: Strategy) -> None:
        self.model, self.optimizer, self.world, self.strategy = model, optimizer, world, strategy
        self.members = members_of(optimizer)  # the program's own optimizers: one, or several that were joined
        self.stepping = self.members[0]  # the one whose step is under way, or was the last
        self.windows: Windows | None = None  # ends windows of backward passes
        self.reduction: Reduction | None = None  # a reducer at work on gradients
        self.own_parts: dict[str, OwnPart] = {}  # further state of this rank's own, by its name in checkpoints
        self.scaler: torch.amp.GradScaler | None = None  # the one that it was told to watch
        self._late_buffers: list[tuple[Tensor, Tensor]] = []  # and what they are to be after the step
        self.step = 0  # windows of backward passes so far (not optimizer steps: AMP may skip those)
        self._faults = FaultWatch.find(model, world)  # None: no fault script asks for any
        self._parameter_watch = ParameterWatch.find() if self.same_parameters else None
        self.late_parameters: LateParameters | None = None
        self.healing: Healing | None = None  # where ranks come and go
        self.weight_average: Average | None = None  # see `un.average`
        self.outliers: Outliers | None = None  # steps that one rank alone would spoil are skipped
        self.noise: NoiseScale | None = None  # of gradients that are exchanged exactly
        self.is_closed = False
        self._hooks: list[Any] = [*watch_steps(optimizer, self._on_step_begin, self._on_step_end)]
        self._hooks += watch_batch_norms(model, world)
        self._calls = [CallHooks([model], self, is_whole=True)]
        if world.rank == 0:  # what it finds is said once
            follow_optimizer(self, optimizer)
        with _replicas_lock:
            _replicas.add(self)

    @property
    def elastic(self) -> Elastic | None:
        """Where ranks come and go: what this process knows of that."""
        return None if self.healing is None else self.healing.elastic

    # Training ----------------------------------------------------------------------------------------------------

    def _on_step_begin(self, optimizer: Optimizer, args: Any, kwargs: dict[str, Any]) -> Any:
        if self.weight_average is not None:
            self.weight_average.refuse_step()
        if self.late_parameters is not None and self.world.size > 1:
            self.late_parameters.refuse()
        closure = kwargs["closure"] if "closure" in kwargs else args[1] if len(args) > 1 else None
        self.stepping = optimizer
        if self.healing is None or closure is not None:
            return self._prepare_step(closure, args, kwargs)
        return self.healing.before_step(optimizer, lambda: self._prepare_step(closure, args, kwargs))

    def _prepare_step(self, closure: Callable[[], Any] | None, args: Any, kwargs: dict[str, Any]) -> Any:
        """With a closure (LBFGS, Lightning), backward happens inside the step, as often as it is called: `before_step`
        comes after each call of it. Where ranks come and go, a window that is given up leaves no gradients there."""
        if closure is None:
            self.begin_step(has_closure=False)
            self._end_window()
            return None
        self.world.run_tolerating_loss(lambda: self.begin_step(has_closure=True))

        def compute() -> Any:
            loss = self.take_loss(closure)
            if self.healing is None:
                self._end_window()
            else:
                self.healing.before_step(self.stepping, self._end_window)
            return loss

        return (args[0], compute, *args[2:]), {name: value for name, value in kwargs.items() if name != "closure"}

    def take_loss(self, closure: Callable[[], Any]) -> Any:
        """The loss that the closure of a step gives, which an optimizer may decide by."""
        return closure()

    def _end_window(self) -> None:
        if self.windows is not None and len(self.members) > 1:
            self.windows.join(self.stepping)
        self.before_step()
        self.fault_in_update()

    @property
    def is_stepped(self) -> bool:
        """Whether all optimizers have stepped with the window that ended last."""
        return len(self.members) == 1 or self.windows is None or self.windows.count_steps() == len(self.members)

    @property
    def is_first_step(self) -> bool:
        """Whether no other optimizer has stepped with the window of the step that ended last."""
        return self.windows is None or self.windows.count_steps() <= 1

    @property
    def is_half_stepped(self) -> bool:
        """Whether some of several optimizers have stepped with the window that ended last, and others have not."""
        return self.windows is not None and self.windows.window is Window.STEPPED and not self.is_stepped

    def _on_step_end(self, optimizer: Optimizer) -> None:
        if self.windows is not None and len(self.members) > 1:
            self.windows.note_step(optimizer)
        for buffer, value in self._late_buffers:
            put_back(buffer, value)
        self._late_buffers = []
        self._finish_step() if self.healing is None else self.healing.after_step(self._finish_step)

    def _finish_step(self) -> None:
        """Values that were stepped count in the average, also if a rank is lost while they are sent."""
        average = self.weight_average if self.counts_steps else None
        if average is not None and self.is_first_step:
            outlier = self.outliers is not None and self.outliers.is_skipping
            average.count_step(is_skipped=outlier or bool(getattr(self.stepping, "found_inf", False)))
        self.after_step()
        if average is not None and self.is_stepped:
            average.update()

    def fault_in_update(self) -> None:
        """A fault on purpose in the optimizer's step happens here, unless it has."""
        if self._faults is not None:
            self._faults.in_update()

    def begin_step(self, *, has_closure: bool) -> None:
        """`optimizer.step()` was called; if it has a closure, backward is still to come."""

    def before_step(self) -> None:
        """The optimizer is about to step with the gradients that there are: end the window."""
        if self.windows is not None:
            self.windows.before_step()
        if self.outliers is not None and (self.windows is None or not self.windows.count_steps()):
            self.outliers.judge()

    def after_step(self) -> None:
        """The optimizer has stepped."""
        if self.windows is not None:
            self.windows.after_step()

    def share_buffers(self, how: Buffers, world: World) -> None:
        """Make the model's buffers the same on every rank. Those that a graph still holds are written after the step:
        a further backward pass through it would refuse them, and rightly."""
        tensors: list[Tensor] = []
        self._late_buffers = []
        if world.size == 1:
            return
        for buffer in self.model.buffers() if has_buffers(self.model) else ():
            if is_held(buffer):
                self._late_buffers.append((buffer, buffer.detach().clone()))
                tensors.append(self._late_buffers[-1][1])
            else:
                tensors.append(buffer.detach())
        share_buffers(tensors, how, world)

    def advance(self) -> None:
        """Count a window, and end the ledger's step."""
        self.step += 1
        for member in self.members if self.hides_gradients else ():
            StepHooks.of(member).come_innermost()
        if not self.world.batch_weights.end_window() and len(self._calls) == 1:  # a program that calls modules itself
            self._calls.append(CallHooks(list(self.model.modules())[1:], self, is_whole=False))
        if self.world.axes is not None:
            self.world.axes.end_window(self)
        if self._faults is not None:
            self._faults.before_count(self)
        self.world.ledger.step(self)
        status.note(step=self.world.ledger.step_count)
        if debug_pause.active:
            debug_pause.look("step")
        self.world.run_tolerating_loss(self._compare_ranks)
        if self._faults is not None:
            self._faults.after_count()

    def _compare_ranks(self) -> None:
        """Who is slow, and whether the ranks still have the same parameters."""
        after_step(self.world, self.slow_ranks)
        if self._parameter_watch is not None:
            self._parameter_watch.count_step(self)

    def forget_writes(self) -> None:
        """Parameters are what a checkpoint, another world or a switch made them: the program did not write them."""

    def no_sync(self) -> AbstractContextManager[None]:
        """Exchange nothing inside the block: gradients stay local and add up."""
        return nullcontext() if self.windows is None else self.windows.no_sync()

    def one_pass(self) -> AbstractContextManager[None]:
        """Count all backward passes inside the block as one, which ends with the block: those of microbatches, say.
        The gradients are exchanged after it, where that pass is the window's last."""
        if self.windows is None:
            raise ValueError(f"{type(self.strategy).__name__} cannot take several backward passes as one")
        return self.windows.one_pass()

    def sync(self) -> None:
        """End the window now, on every rank: what has added up so far is exchanged. `optimizer.step()` does it
        too; call it before clipping or AMP's unscaling where the last window of an epoch may be short."""
        self.world.run_tolerating_loss(self.before_step if self.windows is None else self.windows.sync)

    def watch(self, scaler: torch.amp.GradScaler) -> None:
        """Follow the loss scale of AMP: a method that keeps part of a gradient for later keeps it in the units of
        its step. Without it, that part counts twice or half once, after each change of the scale."""
        self.scaler = scaler
        if self.reduction is not None:
            strict = not self.reduction.reducer.exact
            self.reduction.scale = partial(read_loss_scale, scaler, self.members, strict=strict)
        if self.noise is not None:
            self.noise.scale = partial(read_loss_scale, scaler, self.members, strict=False)

    def consolidate(self) -> nn.Module:
        """The model to evaluate or to save: here, the model itself."""
        return self.model

    def restore(self) -> None:
        """Give model and optimizer back whole where they are split over the ranks; every rank calls it.

        `close()` follows, or `split_again()`.
        """

    def split_again(self) -> None:
        """Take them back after `restore()`."""
        if type(self).restore is not Replica.restore:
            self.start()
            if self.weight_average is not None:
                self.weight_average.place()

    def close(self) -> None:
        """Stop watching; the model is an ordinary one again. Waits for a save in the background, and raises what went
        wrong with it."""
        try:
            wait_saved(self)
        finally:
            self._close()

    def _close(self) -> None:
        self.is_closed = True
        for hook in (*self._hooks, *self._calls):
            hook.remove()
        self._hooks = []
        if self._faults is not None:
            self._faults.close()
        leave_optimizer(self)
        self.world.ledger.leave(self)
        with _replicas_lock:
            _replicas.discard(self)
        self.stop()
        self.close_windows()
        if self.outliers is not None:
            self.outliers.close()
        if self.weight_average is not None:
            self.weight_average.end()

    def close_windows(self) -> None:
        """Watch backward passes no more."""
        windows, self.windows = self.windows, None
        if windows is not None:
            windows.close()

    # State -------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint needs beside model and optimizer: "shared" by all ranks, and "local" to this one."""
        return {"shared": self.shared_state(), "local": self.local_state()}

    def load_state_dict(self, state: dict[str, Any], *, same_world: bool = True) -> None:
        """Take `state_dict()`'s state; at another world size `state["locals"]` has every old rank's part."""
        locals_ = [state["local"]] if same_world else state["locals"]
        self.load_shared(state["shared"])
        self.load_local(state["shared"], locals_, same_world=same_world)

    def shared_state(self) -> dict[str, Any]:
        """What all ranks have alike, beside model and optimizer. It takes no other rank to find out."""
        kept = {} if self.reduction is None else {"reducer": self.reduction.state_dict()["shared"]}
        return {"step": self.step, **kept}

    def local_state(self) -> dict[str, Any]:
        """What is this rank's own."""
        kept = {} if self.reduction is None else {"reducer": self.reduction.state_dict()["local"]}
        return {**kept, **{name: part.state_dict() for name, part in self.own_parts.items()}}

    def load_shared(self, shared: dict[str, Any]) -> None:
        """Take `shared_state()`: a checkpoint's, or that of the rank that all go on from in a new world."""
        self.step = shared["step"]

    def load_local(self, shared: dict[str, Any], locals_: Sequence[dict[str, Any]], *, same_world: bool) -> None:
        """Take `local_state()`: in the same world mine is the only one of `locals_`, else every former rank's is
        there. `shared` is the checkpoint's, and has been taken."""
        for name, part in self.own_parts.items():
            if same_world and name in locals_[0]:
                part.load_state_dict(locals_[0][name])
        kept = shared.get("reducer", ())
        if self.reduction is None or "each" not in kept:  # of a strategy that keeps nothing, or other things
            return
        unit = kept.get("unit", "momenta" if "frozen" in shared else "gradients")  # qadam's, before there were units
        every = [Residual(unit, "the checkpoint", kept, part["reducer"], self.reduction.scale) for part in locals_]
        self.reduction.load_state_dict(kept, [self._convert(one, self.reduction).local for one in every])

    def _convert(self, unsent: Residual, reduction: Reduction) -> Residual:
        return unsent.convert(reduction.unit, self.model.named_parameters(), self.optimizer)

    def model_part(self) -> ModelPart:
        """What stands for this rank in the model that a checkpoint gives to plain PyTorch and to other strategies: it
        must be the one that `consolidate()` gives. Here the model as it is. Must not talk to other ranks."""
        return ModelPart()

    def present_ranks(self) -> list[int]:
        """The ranks that `gather_present` hears: all, unless a method goes on without those that died."""
        return list(range(self.world.size))

    def gather_present(self, obj: Any) -> dict[int, Any]:
        """By rank, the `obj` of every rank that is there (every such rank calls it)."""
        return dict(enumerate(self.world.gather_objects(obj)))

    def sharded_state(self) -> dict[str, Any] | None:
        """Where model and optimizer are split over the ranks: what this one holds, as {"model", "optimizer"} with a
        `unisono.checkpoint.slices.Piece` in place of each tensor that is split. None where they are whole. Must not
        talk to other ranks."""
        return None

    def load_sharded_state(self, whole: dict[str, Any], *, same_world: bool) -> None:
        """Take my part of a checkpoint's model and optimizer, with a `unisono.checkpoint.slices.Stored` in place of
        every tensor: where `sharded_state()` is not None."""
        raise TypeError(f"{type(self.strategy).__name__} does not split model and optimizer over the ranks")

    @property
    def averaged_values(self) -> AveragedValues:
        """Where the values lie that an average of the weights follows (see `un.average`)."""
        return AveragedValues(self)

    # Another strategy --------------------------------------------------------------------------------------------

    def switch(self, strategy: str | Strategy) -> Replica:
        """Go on with another strategy, from here on: `replica = replica.switch("powersgd(rank=2)")`.

        Every rank calls it at the same step. Returns the replica to use from now on; this one is closed. What a
        reducer had still to send goes over to the next, where that keeps such a memory too.
        """
        from unisono.methods.strategy.changing import switch

        return switch(self, strategy)

    def unsent(self) -> Residual | None:
        """What this rank has kept back to send later, with the unit it is in; None where a method keeps nothing."""
        for part in self.own_parts.values():
            if self.world.rank == 0 and (dropped := part.describe_loss()):
                warn_user(dropped)
        return None if self.reduction is None else self.reduction.unsent()

    def take_unsent(self, unsent: Residual) -> None:
        """Send later what another method has kept back; ValueError where there is no way to do that."""
        if self.reduction is not None and unsent.unit != "parameters":
            self.reduction.take_unsent(self._convert(unsent, self.reduction))
            return
        if unsent.is_empty:
            return
        name = type(self.strategy).__name__
        raise ValueError(
            f"{unsent.spec} has kept back {unsent.unit} that it has still to send, and {name} has no place for them: "
            "switch to 'allreduce' first, which sends them with the next gradients"
        )

    # Another world -----------------------------------------------------------------------------------------------

    def rebind(self, world: World, *, source: int = 0) -> str:
        """Go on in another world; rank `source` of it has the state to go on from. Says what was done.

        1. who stayed: every rank says where it comes from and how far it got; a world that cannot work is refused;
        2. stop: let go of all that belongs to the former world;
        3. take over: model, optimizer, step and the ledger's count of steps;
        4. start: begin to exchange with the ranks of the new world;
        5. carry: bring the method's own state over.
        """
        self.check_world(world)
        self.settle(is_source=world.rank == source)
        mine = [self.world.size, self.world.rank, self.progress()]
        change = self._who_stayed(world, source, world.gather_objects(mine))
        self.check_change(change)
        shared = self.shared_state() if world.rank == source else None
        average = self.weight_average
        if average is not None:
            average.leave(change)
        self.stop(change)
        self.enter(world)
        taken = self.take_model(change)
        shared = self._follow_source(change, shared)
        move_batch_norm(self.model, world)
        if average is not None:
            average.follow(change)
        self.start()
        if average is not None:
            average.place()
        with torch.no_grad():
            carried = self.carry(change, shared)
        dropped = "gradients that were not stepped are dropped"
        return "; ".join(filter(None, [f"step {self.step}: {taken}", carried, dropped]))

    def _who_stayed(self, world: World, source: int, every: Sequence[Any]) -> Change:
        size, _, progress = every[source]
        same = [r for r, (n, _, theirs) in enumerate(every) if n == size and self.got_as_far(theirs, progress)]
        stayed = same if size > 1 else [source]
        _, ranks, progresses = zip(*every, strict=True)
        return Change(world, source, size, tuple(ranks), tuple(progresses), tuple(stayed))

    def _follow_source(self, change: Change, shared: dict[str, Any] | None) -> dict[str, Any]:
        """The optimizer's state, the step and the ledger's count, and the method's `shared_state()` of the source."""
        world = change.world
        if world.rank == change.source:
            packed = {
                "optimizer": self.optimizer.state_dict(),
                "step": self.step,
                "steps": world.ledger.step_count,
                "shared": shared,
            }
        else:
            packed = {}
        packed = world.broadcast_object(packed, change.source)
        if world.rank != change.source:
            if not (self.own_optimizer and change.keeps):
                load_optimizer(self.optimizer, packed["optimizer"])
            self.step = packed["step"]
            if world.ledger.step_count != packed["steps"]:
                world.ledger.resume(packed["steps"])
        return packed["shared"]  # type: ignore[no-any-return]

    def check_world(self, world: World) -> None:
        """Refuse a world that the method cannot work in."""

    def settle(self, *, is_source: bool) -> None:
        """The former world ends: wait for what still arrives, forget what does not."""

    def progress(self) -> Any:
        """How far this rank got: plain values, the same on ranks that went through the same exchanges. A dict may have
        these as "reached", and beside them what others have to know (`Change.progress`)."""
        return self.step

    def got_as_far(self, progress: Any, source: Any) -> bool:
        """Whether a rank of the source's former world got as far as the source, by what `progress` gave."""
        mine, theirs = (x["reached"] if isinstance(x, dict) and "reached" in x else x for x in (progress, source))
        return bool(mine == theirs)

    def check_change(self, change: Change) -> None:
        """Refuse a change that loses what is needed; nothing has changed yet."""

    def stop(self, change: Change | None = None) -> None:
        """Let go of channels, threads and memory of the former world. `close()` calls it too, without a change."""

    def enter(self, world: World) -> None:
        """Be in another world. Gradients that were not stepped are those of the former one: a rank that comes has
        none."""
        self.close_windows()
        self.world = world
        for calls in self._calls:
            calls.follow(world)
        if self._faults is not None:
            self._faults.enter(world)
        self.model.zero_grad()

    def take_model(self, change: Change) -> str:
        """Make the model the one to go on from; says which that is."""
        if change.world.size > 1:
            share(self.model, change.world, change.source)
        return f"model and optimizer from rank {change.source} of {change.world.size}"

    def start(self) -> None:
        """Begin to exchange with the ranks of `self.world`; model and optimizer are those to go on from."""

    def start_or_close(self) -> None:
        """The last line of a method's `__init__`: start, or leave nothing behind on model and optimizer."""
        try:
            self.start()
        except BaseException:
            self.close()
            raise

    def carry(self, change: Change, shared: dict[str, Any]) -> str:
        """Take the source's `shared_state()`, and keep what is this rank's own; says what became of that, or ""."""
        self.load_shared(shared)
        if self.reduction is not None:
            self.reduction.move(shared["reducer"], keep=change.keeps, factor=change.factor)
        return ""


def _survive_losses(consolidate: Callable[[Any], nn.Module]) -> Callable[[Any], nn.Module]:
    """Where ranks come and go, one call of the program, which is done again where a rank is lost in it. A worker that
    comes later gets its own model there: its evaluations of past epochs see no batch."""

    @wraps(consolidate)
    def call(self: Replica) -> nn.Module:
        elastic, made = self.elastic, self.model
        if elastic is None or elastic.is_inside:
            return consolidate(self)

        def run() -> None:
            nonlocal made
            made = consolidate(self)
            self.world.barrier(tag="consolidate")  # no rank goes on while another has to do it again

        elastic.call(run, alone=lambda: None)
        return made

    return call


def bound_parameters(names: dict[nn.Parameter, str]) -> list[str]:
    """Which of these parameters a replica watches, by name."""
    with _replicas_lock:
        return [names[p] for replica in _replicas for p in replica.model.parameters() if p in names]
