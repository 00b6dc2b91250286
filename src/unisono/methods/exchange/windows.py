"""Windows of backward passes: how many there were, and where each ends; and who is called around the step after one.

A window is what ends in one exchange: `accumulate` backward passes whose gradients add up, those inside `no_sync` left
out. It is followed by the optimizer's step.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from enum import Enum, auto
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.nn import Parameter
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from unisono.launchers.runtime.frames import warn_user
from unisono.methods.joined_optimizers import members_of
from unisono.world import World

Hook = TypeVar("Hook")
Begin = Callable[[Optimizer, Any, dict[str, Any]], Any]
End = Callable[[Optimizer], None]
_ATTRIBUTE = "_unisono_step_hooks"


class TrainableParameters:
    """Which of a model's parameters require gradients, followed as the program freezes and unfreezes them."""

    def __init__(self, named: Iterable[tuple[str, Parameter]]) -> None:
        self.named = list(named)
        self._required: list[bool] | None = None

    def have_changed(self) -> bool:
        """Whether some were frozen or unfrozen since this was last asked; the first time, yes."""
        required = [param.requires_grad for _, param in self.named]
        changed, self._required = required != self._required, required
        return changed

    @property
    def trainable(self) -> list[tuple[str, Parameter]]:
        """Those that require gradients now."""
        return [(name, param) for name, param in self.named if param.requires_grad]


class Window(Enum):
    """How far a window is."""

    OPEN = auto()  # backward passes add to it
    ENDED = auto()  # its gradients are what the next step is made with
    STEPPING = auto()  # the optimizer is stepping with them: see `Windows.begin_step`
    STEPPED = auto()  # the optimizer has stepped with them: the next pass opens another


class Windows:
    """Where windows end: after `accumulate` backward passes, those inside `no_sync` left out. Then `advance()`."""

    def __init__(self, accumulate: int, advance: Callable[[], None]) -> None:
        self.accumulate, self._advance = accumulate, advance
        self._passes = 0  # of this window so far
        self._local = False  # inside no_sync
        self.in_closure = False  # of a step: its passes are one window, which ends after it; see `PeriodicReplica`
        self.window = Window.OPEN
        self._stepped_by: list[Optimizer] = []  # with the window that ended last

    def join(self, optimizer: Optimizer) -> None:
        """One of several optimizers is about to step: the window that ended last is its own too, unless it has stepped
        with that one."""
        stepped = any(other is optimizer for other in self._stepped_by)
        if self.window is Window.STEPPED and not stepped:
            self.window = Window.ENDED
        else:
            self._stepped_by = []

    def note_step(self, optimizer: Optimizer) -> None:
        """It has stepped; `after_step` follows."""
        self._stepped_by = [*(other for other in self._stepped_by if other is not optimizer), optimizer]

    def count_steps(self) -> int:
        """How many optimizers have stepped with the window that ended last."""
        return len(self._stepped_by)

    def begin_step(self) -> None:
        """The optimizer's code runs next. A method calls this that must know whether a step has broken off."""
        if self.window is Window.ENDED:
            self.window = Window.STEPPING

    def after_step(self) -> None:
        """The next step needs a window of its own."""
        if self.window in (Window.ENDED, Window.STEPPING):
            self.window = Window.STEPPED

    def catch_up(self) -> None:
        """Count a backward pass that has not been counted yet."""

    @property
    def is_behind(self) -> bool:
        """Whether there is one."""
        return False

    @property
    def is_local(self) -> bool:
        """Whether the program is inside `no_sync`."""
        return self._local

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Gradients of passes inside the block stay local and add up."""
        before, self._local = self._local, True
        try:
            yield
        finally:
            self._local = before

    @contextmanager
    def one_pass(self) -> Iterator[None]:
        """All passes inside the block are one of the window, which ends with the block."""
        with self.no_sync():
            yield
        if not self._local:
            self.count_pass()

    def count_pass(self) -> None:
        """A pass has ended whose gradients are all there, on this rank alone."""
        self._passes += 1
        self.window = Window.OPEN
        if self._passes >= self.accumulate:
            self.before_step()

    def before_step(self) -> None:
        """End the window, unless one has ended for the step that follows."""
        raise NotImplementedError

    def sync(self) -> None:
        """End the window, also if all of its passes were inside `no_sync`."""
        self.before_step()

    def close(self) -> None:
        """Stop watching."""
        raise NotImplementedError


class Counter(Windows):
    """Counts the windows of a model that exchanges nothing, by a hook on one parameter.

    Where that parameter takes no part in a backward pass, the optimizer's step counts instead. AMP may skip that step;
    hooks on `others`, further parameters, note a pass then, and `catch_up()` counts it. `end_pass()` is called after
    every pass that was seen, those inside `no_sync` too.

    `late`: a window is counted after the optimizer's step, or where AMP skipped that, with the next pass. A GPU is
    still at work on the step then, so counting holds nothing up. The pass counts as over with the parameter's gradient,
    so it is to be one that backward reaches last.
    """

    def __init__(
        self,
        param: Parameter,
        *,
        accumulate: int,
        advance: Callable[[], None],
        others: Sequence[Parameter] = (),
        end_pass: Callable[[], None] | None = None,
        late: bool = False,
    ) -> None:
        super().__init__(accumulate, advance)
        self._end_pass, self._late = end_pass, late
        self._due = False  # a window has ended, and is to be counted
        self._noted = False  # a pass has reached some parameter, and is not counted
        end, note = weakref.WeakMethod(self._end), weakref.WeakMethod(self._note)
        at_last = partial(if_alive, end, "") if late else partial(at_the_end, end)
        self._hooks = [param.register_post_accumulate_grad_hook(at_last)]
        self._hooks += [p.register_post_accumulate_grad_hook(partial(if_alive, note, "")) for p in others]

    def _note(self, _name: str, _param: Tensor) -> None:
        self._noted |= not self._local

    def _end(self, *_: Any) -> None:
        self._noted = False
        if self._end_pass is not None:
            self._end_pass()
        if not self._local:
            self._add_pass()

    def _add_pass(self) -> None:
        self._count_due()
        self._passes += 1
        self.window = Window.OPEN
        if self._passes >= self.accumulate and not self.in_closure:
            self._end_window()

    def after_step(self) -> None:
        super().after_step()
        self._count_due()

    @property
    def is_behind(self) -> bool:
        return self._due or self._noted

    def catch_up(self) -> None:
        """Also inside `no_sync`: what was noted came before it."""
        self._count_due()
        if self._noted:
            self._noted = False
            if self._end_pass is not None:
                self._end_pass()
            self._add_pass()

    def count_pass(self) -> None:
        self._noted = False
        super().count_pass()

    def _end_window(self) -> None:
        self._passes, self.window, self._noted = 0, Window.ENDED, False
        self._due = True
        if not self._late:
            self._count_due()

    def _count_due(self) -> None:
        if self._due:
            self._due = False
            self._advance()

    def before_step(self) -> None:
        """A step without a window, or with a short one, ends one; and one with a pass that is not counted yet."""
        if self.in_closure:
            self.catch_up()
        elif (self.window is not Window.ENDED or self._noted) and not self._local:
            self._end_window()

    def close(self) -> None:
        """Take the hooks off."""
        for hook in self._hooks:
            hook.remove()


class BackwardWatcher(Windows):
    """Watches backward passes whose gradients are exchanged; gradients are scaled by `World.weight`.

    A method calls `watch` when it is ready, and says what happens in a pass: `begin_pass`, `take` for each gradient as
    soon as it has been accumulated, and `end_pass`. If a peer is lost meanwhile and ranks may come and go, the rest of
    the pass is not exchanged.
    """

    takes_each = True  # whether `take` is called; else all gradients are seen to in `end_pass`

    def __init__(self, world: World, *, accumulate: int, advance: Callable[[], None]) -> None:
        super().__init__(accumulate, advance)
        self.world = world
        self._task = -1  # of autograd: the pass under way
        self._is_last = False  # this pass ends the window
        self._had_pass = False  # backward has added to the gradients of the next step

    def watch(self, params: Sequence[tuple[Any, Parameter]]) -> None:
        """Put hooks on parameters, each with the key by which `take` is to know it. Nothing may fail after this: hooks
        of a watcher that is half there would be called."""
        hooks = [(p, partial(_on_gradient, weakref.ref(self), key)) for key, p in params]
        self._hooks = [p.register_post_accumulate_grad_hook(hook) for p, hook in while_on(hooks)]
        self._weights = GradientWeights([p for _, p in params], self.world)

    def begin_pass(self, key: Any) -> None:
        """The first gradient of a pass is there, that of `key`."""
        raise NotImplementedError

    def take(self, key: Any) -> None:
        """The gradient of `key` has been accumulated."""
        raise NotImplementedError

    def end_pass(self) -> None:
        """All gradients of a pass are there."""
        raise NotImplementedError

    def give_up_pass(self) -> None:
        """A peer was lost: half of the gradients may be anything."""

    def _begin(self, task: int, key: Any) -> None:
        self._is_last = not self._local and self._passes + 1 >= self.accumulate
        self.begin_pass(key)
        self._task, self._had_pass = task, True
        Variable._execution_engine.queue_callback(self._end)

    def _end(self) -> None:
        self._task = -1
        self.world.run_tolerating_loss(self.end_pass)
        if self.world.elastic is not None and self.world.elastic.is_idle:
            self.give_up_pass()

    def count_pass(self) -> None:
        self.world.run_tolerating_loss(super().count_pass)

    def weigh_given(self) -> None:
        """A step without a backward pass takes the gradients that the program set: those of torch.func.grad count by
        the weight of their batch here, those of torch.autograd.grad went through the hooks of `GradientWeights`."""
        if not self._had_pass:
            self._weights.weigh_given()

    def after_step(self) -> None:
        super().after_step()
        self._had_pass = self._weights.were_used = False

    def close(self) -> None:
        self._weights.close()
        for hook in self._hooks:
            hook.remove()


def _on_gradient(watcher: weakref.ref[BackwardWatcher], key: Any, param: Tensor) -> None:
    """The hook on every parameter. Hooks that the program registered after it may change the gradient: from the next
    pass on they come first, and in this one the gradient is taken at the end."""
    alive = watcher()
    if alive is None:
        return
    hooks = param._post_accumulate_grad_hooks
    is_last = len(hooks) == 1 or getattr(next(reversed(hooks.values())), "func", None) is _on_gradient
    if not is_last:
        own = next(i for i, hook in hooks.items() if getattr(hook, "args", None) == (watcher, key))
        hooks[own] = hooks.pop(own)
    task = torch._C._current_graph_task_id()
    if task != alive._task:
        alive.world.run_tolerating_loss(partial(alive._begin, task, key))
    if is_last and alive.takes_each and (alive.world.elastic is None or not alive.world.elastic.is_idle):
        alive.take(key)


class GradientWeights:
    """Scales the gradients of the batch now at work (uneven ends; see `World.weight`)."""

    def __init__(self, params: Sequence[Parameter], world: World) -> None:
        self._params, self._world = list(params), world
        self._hooks: list[Any] = []
        self.were_used = False  # for the next step
        world.on_weight(self)
        self.weight_changed(world.weight)

    def weight_changed(self, weight: float) -> None:
        """Called by the world: batches have this weight from now on."""
        for hook in self._hooks:
            hook.remove()
        scale = partial(_weigh_gradient, weakref.ref(self), weight)
        scaled = [(p, scale) for p in self._params] if weight != 1.0 else []
        self._hooks = [p.register_hook(hook) for p, hook in while_on(scaled)]

    def weigh_given(self) -> None:
        """Scale the gradients that the program set, unless they were scaled as they were computed."""
        for p in self._params if self._world.weight != 1.0 and not self.were_used else ():
            if p.grad is not None and type(p.grad) is Tensor:  # no mean of ours, which is the same on all ranks
                p.grad = scale_gradient(self._world.weight, p.grad)

    def close(self) -> None:
        """Take the hooks off."""
        self._world.off_weight(self)
        for hook in self._hooks:
            hook.remove()


def _weigh_gradient(weights: weakref.ref[GradientWeights], weight: float, grad: Tensor) -> Tensor:
    """The hook on every parameter."""
    alive = weights()
    if alive is not None:
        alive.were_used = True
    return scale_gradient(weight, grad)


def scale_gradient(weight: float, grad: Tensor) -> Tensor:
    """A weight of zero is a batch that does not count: its gradient is zero, also where it is not finite."""
    return torch.zeros_like(grad) if weight == 0.0 else grad * weight


def count_windows(model: nn.Module, accumulate: int, advance: Callable[[], None], *, late: bool = False) -> Counter:
    """Count windows by the parameter that backward reaches first, for a model that exchanges no gradients; `late`, if
    that is on a GPU, by the one that it reaches last: see `Counter`."""
    first, *_, last = [p for p in model.parameters() if p.requires_grad] * 2
    late = late and first.is_cuda
    return Counter(first if late else last, accumulate=accumulate, advance=advance, late=late)


# A hook on a parameter is kept where Python's collector does not look: it must not hold what holds the parameter.


def while_on(hooks: Iterable[tuple[Parameter, Hook]]) -> Iterator[tuple[Parameter, Hook]]:
    """These, to set each hook on its parameter: that is only possible while gradients are on, so a frozen one's are
    on meanwhile. The hook stays for when they come on again, which those of integers never do: they get none."""
    for param, hook in hooks:
        frozen = not param.requires_grad
        if frozen and not (param.is_floating_point() or param.is_complex()):
            continue
        if frozen:
            param.requires_grad_(True)
        yield param, hook
        if frozen:
            param.requires_grad_(False)


def if_alive(ready: weakref.WeakMethod[Any], name: Any, param: Tensor) -> None:
    """A hook that keeps nothing alive: calls `ready(name, param)` while its object is there."""
    call = ready()
    if call is not None:
        call(name, param)


def at_the_end(end: weakref.WeakMethod[Any], _: Tensor) -> None:
    """A hook that keeps nothing alive: calls `end()` when the backward pass is over."""
    call = end()
    if call is not None:
        Variable._execution_engine.queue_callback(call)


# Around the optimizer's step -----------------------------------------------------------------------------------------


class StepHooks:
    """Who is called around an optimizer's step, in the order in which they came. They may come and go while they are
    called, which torch's own hooks may not: there is one pair of these an optimizer."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = weakref.ref(optimizer)
        self._watchers: list[Watcher] = []
        self._handles: list[Any] = []
        self._running = False

    @classmethod
    def of(cls, optimizer: Optimizer) -> StepHooks:
        """Those of this optimizer (a copy of it has none)."""
        found = getattr(optimizer, _ATTRIBUTE, None)
        if not isinstance(found, StepHooks) or found._optimizer() is not optimizer:
            found = cls(optimizer)
            setattr(optimizer, _ATTRIBUTE, found)
        return found

    def watch(self, begin: Begin | None, end: End) -> Watcher:
        """Call `begin` before every step, with what a pre-hook of torch gets and returns, and `end` after it."""
        optimizer = self._optimizer()
        if not self._handles and optimizer is not None:
            self._handles = [
                optimizer.register_step_pre_hook(self._begin),
                optimizer.register_step_post_hook(lambda stepped, *_: self._end(stepped)),
            ]
        watcher = Watcher(self, begin, end)
        self._watchers.append(watcher)
        return watcher

    def come_innermost(self) -> None:
        """All hooks of the program run before these before a step, and after these after it."""
        optimizer: Any = self._optimizer()
        if self._handles and not self._running and optimizer is not None:
            begin, end = self._handles
            optimizer._optimizer_step_pre_hooks.move_to_end(begin.id)
            optimizer._optimizer_step_post_hooks.move_to_end(end.id, last=False)

    def leave(self, watcher: Watcher) -> None:
        """Call it no more."""
        if watcher in self._watchers:
            self._watchers.remove(watcher)
        if not self._watchers and not self._running:
            for handle in self._handles:
                handle.remove()
            self._handles = []

    def _begin(self, optimizer: Optimizer, args: Any, kwargs: dict[str, Any]) -> Any:
        changed = None
        self._running = True
        try:
            for watcher in list(self._watchers):
                if watcher.begin is not None and watcher in self._watchers:
                    answer = watcher.begin(optimizer, args, kwargs)
                    if answer is not None:
                        changed = args, kwargs = answer
        finally:
            self._running = False
        return changed

    def _end(self, optimizer: Optimizer) -> None:
        self._running = True
        try:
            for watcher in list(self._watchers):  # one that comes meanwhile has not seen this step begin
                if watcher in self._watchers:
                    watcher.end(optimizer)
        finally:
            self._running = False


def has_other_hooks(optimizer: Optimizer) -> bool:
    """Whether others than one replica are called around its step."""
    hooks: Any = optimizer
    own = StepHooks.of(optimizer)
    return max(len(own._watchers), len(hooks._optimizer_step_pre_hooks), len(hooks._optimizer_step_post_hooks)) > 1


class Watcher:
    """What is called, and until when."""

    def __init__(self, hooks: StepHooks, begin: Begin | None, end: End) -> None:
        self._hooks, self.begin, self.end = hooks, begin, end

    def remove(self) -> None:
        """Call it no more."""
        self._hooks.leave(self)


def watch_steps(optimizer: Optimizer, begin: Begin | None, end: End) -> list[Watcher]:
    """`StepHooks.watch` of an optimizer, or of each of several that were joined: both are given the one that steps."""
    return [StepHooks.of(member).watch(begin, end) for member in members_of(optimizer)]


# An optimizer that was made anew after `un.parallel`: the one that the replica knows never steps ----------------------


class _Followed:
    """The optimizers of a replica, and who else steps its parameters."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizers = [weakref.ref(member) for member in members_of(optimizer)]
        self.params = {id(p): weakref.ref(p) for group in optimizer.param_groups for p in group["params"]}
        self.stepped_by: weakref.ref[Optimizer] | None = None  # since the replica's own last stepped

    def holds(self, optimizer: Optimizer) -> bool:
        """Whether another optimizer has one of these parameters."""
        return any(
            (known := self.params.get(id(p))) is not None and known() is p
            for group in optimizer.param_groups
            for p in group["params"]
        )


_followed: weakref.WeakKeyDictionary[object, _Followed] = weakref.WeakKeyDictionary()  # by replica
_by_optimizer: dict[int, list[_Followed]] = {}  # the same by the optimizer's id, which may be another's by now
_lock = threading.RLock()  # the collector may close a replica while this thread holds it


def follow_optimizer(replica: object, optimizer: Optimizer) -> None:
    """Notice, until `leave_optimizer`, another optimizer that steps the parameters while the replica's own does not."""
    with _lock:
        _followed[replica] = _Followed(optimizer)
        _index()


def leave_optimizer(replica: object) -> None:
    """The replica is closed."""
    with _lock:
        _followed.pop(replica, None)
        _index()


def _index() -> None:
    """Made anew, not changed: steps of other threads look it up without the lock."""
    global _by_optimizer
    found: dict[int, list[_Followed]] = {}
    for followed in _followed.values():
        for optimizer in (ref() for ref in followed.optimizers):
            if optimizer is not None:
                found.setdefault(id(optimizer), []).append(followed)
    _by_optimizer = found


def _notice_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """Before any optimizer's step. One that wraps the replica's own, or is wrapped by it, steps in turn with it."""
    own = False
    for followed in _by_optimizer.get(id(optimizer), ()):
        if any(ref() is optimizer for ref in followed.optimizers):
            followed.stepped_by, own = None, True
    if own or not _followed:
        return
    with _lock:
        every = list(_followed.values())
    for followed in every:
        if followed.stepped_by is _SAID or not followed.holds(optimizer):
            continue
        if followed.stepped_by is None or followed.stepped_by() is not optimizer:
            followed.stepped_by = weakref.ref(optimizer)
            continue
        followed.stepped_by = _SAID
        warn_user(
            f"another optimizer ({type(optimizer).__name__}) steps parameters of the model, while the one that "
            "un.parallel was given does not: the replica never learns of these steps, and does nothing after them. "
            "Make the optimizer before un.parallel, and give it that one; to change it later, call close() on the "
            "replica and un.parallel again"
        )


_SAID: Any = object()
register_optimizer_step_pre_hook(_notice_step)
