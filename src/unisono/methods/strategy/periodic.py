"""Replicas that train alone and meet the others between windows: what the model-exchanging strategies share."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from unisono.methods.exchange.overlap import Exchange
from unisono.methods.exchange.windows import Counter, scale_gradient
from unisono.methods.model_copies import add_hook, copy_model, hide_from_compiler
from unisono.methods.strategy.change import Change
from unisono.methods.strategy.program_writes import ProgramWrites, digest
from unisono.methods.strategy.replica import Replica, Strategy
from unisono.methods.strategy.sharing import share, share_buffers
from unisono.world import World


class OwnStep(Protocol):
    """Makes the optimizer's step in its place."""

    def before_step(self) -> None:
        """The window has ended, and the optimizer is about to step."""

    def after_step(self) -> None:
        """It has stepped what was left to it."""


class PeriodicReplica(Replica):
    """Counts windows of backward passes; after each, `meet()` may exchange parameters.

    `meet()` runs exactly once per window, after the optimizer's step. AMP may skip the step on one rank alone: then it
    runs late, before the next forward pass or when the model or its state is asked for, back to back with the next, so
    that ranks never drift apart. `replica.watch(scaler)` lets it run in time, so that no rank waits for that one. A
    step with a closure (LBFGS) is one window, however often it calls the closure.

    Where the ranks' parts of a batch differ in size, a gradient counts by its part (`World.weight`), as it does where
    gradients are averaged: so the mean of the models counts every sample once, under SGD. A method that weighs the
    models instead overrides `weight_changed()` and `count_window()`.

    What the program itself writes to trainable parameters between its steps is this rank's own training, like a step;
    a method that keeps another copy of the model sets `follows_writes` and overrides `take_writes()`. Frozen parameters
    are this rank's own too: where the program moves them, `consolidate()` gives the mean over the ranks.

    A method overrides `start()` (called at the end of the construction, and again in every new world), `stop()`,
    `meet()`, and `begin()`.
    """

    windows: Counter | Exchange
    own_gradients: ClassVar[bool] = True
    counts_steps: ClassVar[bool] = False  # but windows: AMP may skip the step of one rank alone
    own_models: ClassVar[bool] = False  # ranks' parameters differ: the model to evaluate is their mean
    follows_writes = False  # hears of what the program writes to trainable parameters
    own_step: OwnStep | None = None

    def __init__(
        self, model: nn.Module, optimizer: Optimizer, world: World, strategy: Strategy, *, accumulate: int | None = None
    ) -> None:
        """`accumulate`: backward passes a window; None: as the strategy's setting of that name says, else 1."""
        super().__init__(model, optimizer, world, strategy)
        self.accumulate: int = getattr(strategy, "accumulate", 1) if accumulate is None else accumulate
        self.windows = self.new_counter()
        self._unmet = 0  # windows that have ended, and after which the ranks have not met
        self._ended: list[float] = []  # of each of these, the mean weight of its batches
        self._passes: list[float] = []  # the weights of this window's batches so far
        self._forward = add_hook(model.register_forward_pre_hook, partial(_before_forward, weakref.ref(self)))
        self.writes = ProgramWrites(model)
        self._weighting: list[Any] = []
        self._unwatch: list[Callable[[], None]] = []  # for each watched GradScaler
        self._follow_weight()
        self.start_or_close()

    def new_counter(self) -> Counter:
        """Counts windows from now on, by hooks on the parameters."""
        *others, last = [p for p in self.model.parameters() if p.requires_grad]  # the last: backward reaches it first
        return Counter(
            last,
            accumulate=self.accumulate,
            advance=self.advance,
            others=others,
            end_pass=lambda: self._passes.append(self.world.weight),
        )

    @property
    def met(self) -> int:
        """The number of the window that `meet()` is about: windows so far, less those that are still to be met."""
        return self.step - self._unmet

    def meet(self) -> None:
        """Between two windows: exchange what is due. Every rank comes here after every window."""
        raise NotImplementedError

    @property
    def _shows_average(self) -> bool:
        """Whether the model has an average of the weights for now: it is not to be exchanged, and no write of the
        program's."""
        return self.weight_average is not None and self.weight_average.is_applied

    @property
    def awaits_forward(self) -> bool:
        """Whether `begin_window` has anything to do."""
        begins = type(self).begin is not PeriodicReplica.begin
        return begins or self.follows_writes or self._unmet > 0 or self.windows.is_behind

    def begin_window(self) -> None:
        """Before a forward of training."""
        if self._shows_average:
            return
        self.meet_if_due()
        with torch.no_grad():
            self.begin()

    def begin(self) -> None:
        """A forward of training is about to run: start what may travel while this window computes."""

    def meet_if_due(self) -> None:
        """Meet, if a window has ended since."""
        if not self.is_closed and not self._shows_average:
            self.look_for_writes()
            self.windows.catch_up()
            if self._unmet:
                self._meet_all()

    def _meet_all(self) -> None:
        while self._unmet:
            self.meet_once()
        if self.follows_writes:
            self.writes.note()

    def look_for_writes(self) -> None:
        """Hand over what the program has written since the method or the optimizer last wrote."""
        if self.is_closed or not self.follows_writes or self.windows.in_closure:  # there, the optimizer writes
            return
        loads = self.writes.loads
        # Alone, a write cannot be compared with other ranks': to evaluate an average and go on is none
        found = self.writes.find(confirm=self.world.size == 1 and not loads)
        if found:
            self.take_writes(found, loaded=loads > 0)
        if found or loads:
            self.writes.loads = 0
            self.writes.note()

    def take_writes(self, names: Sequence[str], *, loaded: bool) -> None:
        """The program wrote these parameters; `loaded`: by `model.load_state_dict`. Other ranks may not have."""

    def meet_once(self) -> None:
        """Meet after the first window that has not been met."""
        self._unmet -= 1
        if self._ended:
            self.count_window(self._ended.pop(0))
        with torch.no_grad():
            self.meet()
        if self.weight_average is not None:
            self.weight_average.count_step()
            self.weight_average.update()

    def count_window(self, weight: float) -> None:
        """A window is about to be met; `weight`: the mean of `World.weight` over its batches."""

    # Around the optimizer's step ---------------------------------------------------------------------------------

    def advance(self) -> None:
        if self.elastic is not None and self.elastic.is_skipping:
            return
        super().advance()
        self._unmet += 1
        passes, self._passes = self._passes or [self.world.weight], []
        self._ended.append(sum(passes) / len(passes))

    def begin_step(self, *, has_closure: bool) -> None:
        self.windows.in_closure = False  # of a step before this one that failed
        self.look_for_writes()
        if has_closure:  # ranks may call their closures more or less often
            self.windows.catch_up()  # with the passes before it
            self.windows.in_closure = True

    def before_step(self) -> None:
        super().before_step()
        if len(self.members) > 1 and self._unmet > 1:  # not all stepped with a window before this one
            while self._unmet > 1:
                self.meet_once()
            if self.follows_writes:
                self.writes.note()
        if self.own_step is not None:
            with torch.no_grad():
                self.own_step.before_step()

    def after_step(self) -> None:
        if self.own_step is not None:
            self.own_step.after_step()
        if self.windows.in_closure:
            self.windows.in_closure = False
            self.windows.before_step()
        super().after_step()
        self.windows.catch_up()
        if self.is_stepped:  # else when the others have stepped too, or before the next forward pass
            self._meet_all()
        elif self.follows_writes:  # this optimizer's are none of the program's
            self.writes.note()

    def watch(self, scaler: torch.amp.GradScaler) -> None:
        """Meet after `scaler.update()` where the step was skipped."""
        if scaler is self.scaler:
            return
        super().watch(scaler)
        update, me = scaler.update, weakref.ref(self)

        def update_and_meet(*args: Any, **kwargs: Any) -> None:
            update(*args, **kwargs)
            alive = me()
            if alive is not None:
                alive.world.run_tolerating_loss(alive.meet_if_due)

        def restore() -> None:
            """Give the scaler the `update` that it had, unless somebody else has replaced ours."""
            if vars(scaler).get("update") is update_and_meet:
                del scaler.update
                if scaler.update != update:  # it was not the class's own
                    scaler.update = update  # type: ignore[method-assign]

        scaler.update = update_and_meet  # type: ignore[method-assign]
        self._unwatch.append(restore)

    def _follow_weight(self) -> None:
        self.world.on_weight(self)
        self.weight_changed(self.world.weight)

    def weight_changed(self, weight: float) -> None:
        """Gradients count by their part of the global batch (see `World.weight`): those of weight zero are zero."""
        self.weigh_gradients(None if weight == 1.0 else partial(scale_gradient, weight))

    def weigh_gradients(self, change: Any) -> None:
        """Let every gradient be what `change(gradient)` gives; None: leave them as they are."""
        for hook in self._weighting:
            hook.remove()
        params = [p for p in self.model.parameters() if p.requires_grad] if change is not None else []
        self._weighting = [p.register_hook(change) for p in params]

    # The model, and state ----------------------------------------------------------------------------------------

    def consolidate(self) -> nn.Module:
        """The model; where ranks have their own, a copy that holds their mean, with the same bits on each (every
        rank calls it, and training goes on undisturbed)."""
        self.meet_if_due()
        if not self.own_models:
            return self.model
        made = self.copy_model()
        average_models(made, self.world)
        return made

    @torch.no_grad()
    def average_frozen(self, made: nn.Module) -> None:
        """Give a copy of the model the mean over the ranks of frozen parameters that the program moves, where ranks
        have not the same (every rank calls it). Those that nobody wrote to cost nothing."""
        mine = self.writes.find_frozen()
        every = self.gather_present({name: digest([p]) for name, p in mine.items()})
        names = dict.fromkeys(name for theirs in every.values() for name in theirs)
        differ = [name for name in names if len({theirs.get(name) for theirs in every.values()}) > 1]
        copies = dict(made.named_parameters())
        self.average([copies[name].detach() for name in differ])

    def average(self, tensors: Sequence[Tensor]) -> None:
        """Make them the mean over the ranks (rank 0's where numbers have no fraction)."""
        share_buffers(tensors, "average", self.world)

    def copy_model(self) -> nn.Module:
        """A copy of the model that belongs to no replica."""
        return copy_model(self.model)

    def state_dict(self) -> dict[str, Any]:
        self.meet_if_due()  # ranks that did not skip their step have met, or wait for this one
        return super().state_dict()

    def load_state_dict(self, state: dict[str, Any], *, same_world: bool = True) -> None:
        super().load_state_dict(state, same_world=same_world)
        self.forget_writes()

    def forget_writes(self) -> None:
        self.writes.loads = 0
        self.writes.note()

    def load_shared(self, shared: dict[str, Any]) -> None:
        super().load_shared(shared)
        self._forget_windows()

    def _forget_windows(self) -> None:
        self._unmet, self._ended, self._passes = 0, [], []

    # Another world -----------------------------------------------------------------------------------------------

    def rebind(self, world: World, *, source: int = 0) -> str:
        told = super().rebind(world, source=source)
        self.forget_writes()
        return told

    def enter(self, world: World) -> None:
        self.world.off_weight(self)
        super().enter(world)
        self._forget_windows()
        self.windows = self.new_counter()
        self._follow_weight()

    def take_model(self, change: Change) -> str:
        """Where ranks have their own models: the mean of those that stayed."""
        if not self.own_models:
            return super().take_model(change)
        if len(change.stayed) == 1:
            share(self.model, change.world, change.source)
        else:
            average_models(self.model, change.world, change.stayed, change.source)
        others = change.world.size - len(change.stayed)
        return (
            f"the mean of the models of {len(change.stayed)} rank(s) that stayed; these keep their optimizers, "
            f"{others} other(s) have rank {change.source}'s"
        )

    def close(self) -> None:
        if self.follows_writes:
            self.look_for_writes()
        self.world.off_weight(self)
        self._forward.remove()
        self.writes.close()
        self._forget_windows()
        self.weigh_gradients(None)
        for restore in self._unwatch:
            restore()
        self._unwatch = []
        super().close()


def _before_forward(replica: weakref.ref[PeriodicReplica], model: nn.Module, _: Any) -> None:
    """Of training: one that evaluates may come between backward and the optimizer's step, and must exchange nothing. A
    model that is trained in eval mode meets with its next step. Compiled with what calls the model, if that is."""
    alive = replica()
    if alive is not None and model.training and torch.is_grad_enabled() and alive.awaits_forward:
        _begin_window(alive)


def _begin_window(replica: PeriodicReplica) -> None:
    replica.world.run_tolerating_loss(replica.begin_window)


hide_from_compiler(_begin_window)


@torch.no_grad()
def average_models(model: nn.Module, world: World, ranks: Sequence[int] | None = None, source: int = 0) -> None:
    """Numbers with a fraction become the mean over the ranks (or over some of them), others rank `source`'s."""
    if world.size == 1:
        return
    tensors = [t.detach() for t in (*model.parameters(), *model.buffers())]
    means: list[Tensor] = [t for t in tensors if t.is_floating_point() or t.is_complex()]
    if ranks is None:
        world.all_reduce(means, "mean", tag="consolidate").wait()
    else:  # where a rank is lost meanwhile, the model is still what it was
        shares = [t / len(ranks) if world.rank in ranks else torch.zeros_like(t) for t in means]
        world.all_reduce(shares, "sum", tag="consolidate").wait()
        torch._foreach_copy_(means, shares)
    world.broadcast([t for t in tensors if not (t.is_floating_point() or t.is_complex())], source).wait()
