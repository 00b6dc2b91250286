"""The weight of the batch in use: each batch that a shard gives out has its own, and a program may draw it long before.

A batch is known by its memory: when the model is called, its inputs are looked up among the batches that were given out
(also views of them). A prefetcher may have copied them, to another dtype say: then the number of samples tells batches
apart, or else the order in which they were drawn. The weight holds for the backward pass of that call, whatever is
drawn or called in between: the call's outputs carry it.

All this matters only where batches with different weights are about. Else the weight is that of the batch drawn last.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from unisono.background import in_background
from unisono.launchers.runtime.frames import warn_user
from unisono.methods.model_copies import add_hook
from unisono.world.transports.arithmetic import count_span_bytes

__all__ = ["BatchWeights", "CallHooks", "Drawn", "WeightListener"]

MemorySpan = tuple[StorageWeakRef, int, int]  # of a tensor: its storage, first byte and end
_MOST_BATCHES, _MOST_TENSORS = 64, 32  # that are remembered, and looked at in a batch


class WeightListener(Protocol):
    """An object that is told of changes of this rank's batch weight (`World.weight`)."""

    def weight_changed(self, weight: float, /) -> None:
        """Called when the weight has changed."""


class Drawn:
    """A batch that a shard has given out, known by the memory of its tensors, which are not kept alive."""

    def __init__(
        self, weight: float, batch: Any = None, shard: str = "", *, about: Any = None, by_thread: bool = False
    ) -> None:
        self.weight, self.shard, self.about = weight, shard, about
        self.by_thread = by_thread  # one of the program's, that draws ahead
        tensors = list(_list_tensors(batch))
        self._spans = [_find_span(x) for x in tensors]
        self.sizes = _list_sizes(tensors)
        self.is_used = False  # the model was called with it, or with one that was drawn later
        self.is_done = False  # and gradients were taken since, if they are enabled
        self.is_known = False  # by its memory: the program has not copied it

    @property
    def is_alive(self) -> bool:
        """Whether some of the batch's memory is still in use."""
        return any(not storage.expired() for storage, _, _ in self._spans)

    def holds(self, place: MemorySpan) -> bool:
        """Whether a tensor at this place lies in the batch's memory, or a part of it does."""
        storage, start, stop = place
        return any(storage == known and start < end and begin < stop for known, begin, end in self._spans)


class _Call:
    """A call of the model. `is_sure`: whether its batch is known; None: it belongs to none, and uses the last one."""

    def __init__(self, drawn: Drawn, is_sure: bool | None) -> None:
        self.drawn, self.is_sure = drawn, is_sure


class BatchWeights:
    """The batch weights of one world on this rank; nothing is tracked while all parts are even."""

    def __init__(self) -> None:
        self._is_needed = False
        self._calls: weakref.WeakSet[CallHooks] = weakref.WeakSet()  # of the models that are bound
        self._listeners: weakref.WeakSet[WeightListener] = weakref.WeakSet()
        self._lock = threading.RLock()  # a thread of the program's may draw ahead, and the collector may end a pass
        self._drawn: list[Drawn] = []  # in their order
        self._out: dict[str, Drawn] = {}  # by shard, the last batch of each pass under way
        self._trained: set[str] = set()  # the shards whose passes go on while the model is trained
        self._current = Drawn(1.0)
        self._set: Drawn | None = None  # what the program set itself
        self._call: _Call | None = None  # the one under way
        self._pending: weakref.ref[_Call] | None = None  # the last one, while a backward pass may follow
        self._thread: int | None = None  # that calls the model
        self._draws_ahead = True  # batches were left to be used, at the last call; True before the first
        self._is_steady = True  # every call to train was one with the next batch of a single shard
        self._task = -1  # the backward pass under way, and whether the program weighs its losses itself
        self._is_weighed = False
        self._is_seen = False  # the model was called, since the last window ended
        self._has_spoken = False

    # What is at work ---------------------------------------------------------------------------------------------

    @property
    def weight(self) -> float:
        """The weight of the batch in use."""
        return self._current.weight

    @property
    def is_needed(self) -> bool:
        """Whether some shard has uneven parts, or batches are followed for another reason."""
        return self._is_needed

    @is_needed.setter
    def is_needed(self, value: bool) -> None:
        with self._lock:
            self._is_needed = value
            for calls in self._calls if value else ():
                calls.put_on()

    def about(self, shard: str) -> Any:
        """What a shard noted of the batch in use as it gave it out; None if that is not known to be one of its own."""
        return self._current.about if self._current.shard == shard else None

    def set(self, weight: float) -> None:
        """Use a weight that the program gives, until the next batch is drawn."""
        self._set = Drawn(weight)
        self._take(self._set)

    def _take(self, drawn: Drawn) -> None:
        before, self._current = self._current, drawn
        if drawn.weight != before.weight:
            for listener in list(self._listeners):
                listener.weight_changed(drawn.weight)

    def add(self, listener: WeightListener) -> None:
        """Call `listener.weight_changed(weight)` when the weight changes."""
        self._listeners.add(listener)

    def remove(self, listener: WeightListener) -> None:
        """Remove a listener."""
        self._listeners.discard(listener)

    # Shards ------------------------------------------------------------------------------------------------------

    def draw(self, shard: str, batch: Any, weight: float, *, about: Any = None) -> None:
        """A shard gives out a batch. It counts as in use, unless a backward pass is still to come. `about`: what the
        shard wants to know of the batch in use (see `about`)."""
        self.is_needed |= weight != 1.0  # ranks may have become fewer since the shard was made
        if not self.is_needed:
            return
        drawn = Drawn(weight, batch, shard, about=about, by_thread=self._thread not in (None, threading.get_ident()))
        with self._lock:
            kept = [d for d in self._drawn if d.is_alive or self._is_waiting(d)]
            self._drawn = [*kept[1 - _MOST_BATCHES :], drawn]
            self._out.pop(shard, None)  # the last one drawn is the last in here
            self._out[shard] = drawn
        if self._is_free():
            self._set = None
            self._take(drawn)

    def end_pass(self, shard: str) -> None:
        """A pass is over; what was drawn may still be to come. In an outer loop, another shard's batch is in use."""
        with self._lock:
            self._out.pop(shard, None)
        if self._is_free():
            self._set = None
            self._take(self._find_outer())

    def forget(self, shard: str) -> None:
        """Forget the batches of a shard: they belong to a former generation of the world."""
        with self._lock:
            self._drawn = [d for d in self._drawn if d.shard != shard]

    def is_ahead(self, shard: str) -> bool:
        """Whether the program has drawn a batch of this shard beyond the one that it used last."""
        with self._lock:
            used = [d.is_used for d in self._drawn if d.shard == shard]
        return any(used) and not used[-1]

    def _find_outer(self) -> Drawn:
        return next(reversed(self._out.values()), None) or Drawn(1.0)

    def _is_free(self) -> bool:
        """Whether no call of the model waits for its backward pass, and this is no thread that only draws."""
        call = self._pending() if self._pending is not None else None
        return (call is None or call.drawn.is_done) and self._thread in (None, threading.get_ident())

    # Calls of the model ------------------------------------------------------------------------------------------

    def watch(self, calls: CallHooks) -> None:
        """Called when a model is bound, in the thread that will call it."""
        self._thread = threading.get_ident()
        with self._lock:
            self._calls.add(calls)
            if self.is_needed:
                calls.put_on()

    def begin_call(self, inputs: Any, *, is_whole: bool) -> None:
        """Find the batch that the model (without `is_whole`: a module in it) is called with."""
        self._thread = threading.get_ident()
        if self._set is not None:
            self._is_seen, self._call = True, _Call(self._set, True)
            self._take(self._set)
            return
        with self._lock:
            if torch.is_grad_enabled():
                self._trained |= self._out.keys()
            call = self._find(inputs) if is_whole else self._find_by_memory(inputs)
            if call is None:
                return
            self._note_use(call)
        self._is_seen, self._call = True, call
        self._take(call.drawn)
        if call.is_sure is False and not torch.is_grad_enabled():
            self._speak(_UNSURE)

    def _is_waiting(self, drawn: Drawn) -> bool:
        """Whether a batch is still to be used; one from a pass without training may never be."""
        return not drawn.is_used and (drawn.by_thread or drawn.shard in self._trained)

    def _find(self, inputs: Any) -> _Call:
        known, current = self._find_by_memory(inputs), self._current
        if known is not None:
            return known
        if current.is_done and not self._is_around(current, inputs):
            current = self._find_outer()
        waiting = [d for d in self._drawn if self._is_waiting(d)]
        is_between = current.is_used and not current.is_done  # the call before this one waits for its backward pass
        if torch.is_grad_enabled() and (is_between or len({d.shard for d in waiting}) != 1):
            self._is_steady = False
        following = current if is_between or not waiting else waiting[0 if self._draws_ahead else -1]
        around = [d for d in self._drawn if d.is_alive or d in waiting]
        batches = [d for d in (current, *around) if d.shard] or [current]
        differ = len({d.weight for d in batches}) > 1
        if differ and (known := _find_by_size(batches, inputs)) is not None:
            return known
        if current.is_known:
            return _Call(current, None)
        return _Call(following, self._is_steady or not differ)

    def _is_around(self, drawn: Drawn, inputs: Any) -> bool:
        """Whether the program may still be at work with a batch that it has used: that which was drawn last, or one
        that it holds; after the end of the pass, with inputs of as many samples."""
        if drawn is self._out.get(drawn.shard):
            return True
        fits = drawn.shard in self._out or not drawn.sizes.isdisjoint(_list_sizes(inputs))
        return drawn.is_known and drawn.is_alive and fits

    def _find_by_memory(self, inputs: Any) -> _Call | None:
        """Find the batch of a call by the first input that lies in one; others may lie in batches of other weights."""
        found = []
        for x in _list_tensors(inputs) if self._drawn else ():
            owners = self._find_owners(x)
            if len({d.weight for d in owners}) == 1:
                found.append(owners[-1])
        if not found:
            return None
        found[0].is_known = True
        return _Call(found[0], len({d.weight for d in found}) == 1)

    def _find_owners(self, x: Tensor) -> list[Drawn]:
        place = _find_span(x)
        return [d for d in self._drawn if d.holds(place)]

    def _note_use(self, call: _Call) -> None:
        drawn = call.drawn
        drawn.is_used, drawn.is_done = True, not torch.is_grad_enabled()
        if call.is_sure is not None and drawn in self._drawn:
            for earlier in self._drawn[: self._drawn.index(drawn)]:
                earlier.is_used |= earlier.shard == drawn.shard  # the program has passed it over
            if drawn.shard in self._out:  # else nothing more is there to be drawn
                self._draws_ahead = any(self._is_waiting(d) or d.by_thread for d in self._drawn)

    def end_call(self, outputs: Any) -> None:
        """Have the backward pass through these outputs set the weight of their batch."""
        call, self._call = self._call or (self._pending() if self._pending is not None else None), None
        if call is None or not torch.is_grad_enabled():
            return
        nodes = {x.grad_fn for x in _list_tensors(outputs) if x.grad_fn is not None}
        for node in nodes:
            node.register_prehook(_Arrival(self, call))
        if nodes:
            self._pending = weakref.ref(call)

    def arrive(self, call: _Call) -> None:
        """Called when a backward pass has reached the outputs of a call."""
        call.drawn.is_done = True
        task = torch._C._current_graph_task_id()
        if task != self._task:
            self._task, self._is_weighed = task, False
            self._take(call.drawn)
            if call.is_sure is False:
                self._speak(_UNSURE)
        elif call.is_sure is not None and not self._is_weighed and call.drawn.weight != self.weight:
            self._speak(_MIXED)

    def end_window(self) -> bool:
        """End a window of backward passes; False if no call of the model was seen in it."""
        was_seen, self._is_seen = self._is_seen, False
        if was_seen or self._set is not None or not self._drawn:
            return True
        with self._lock:
            alive = [d for d in self._drawn if d.is_alive and not d.is_used]
        if len({d.weight for d in alive}) > 1:
            self._speak(_UNSURE)
        return False

    # By the batch itself -----------------------------------------------------------------------------------------

    def weight_of(self, batch: Any) -> float:
        """The weight of a batch, which counts as used, as whoever asks weighs it; if no shard gave it out, that of the
        batch in use."""
        drawn = self._find_batch(batch) or self._current
        drawn.is_used = True
        return drawn.weight

    def _find_batch(self, batch: Any) -> Drawn | None:
        with self._lock:
            return next((d for x in _list_tensors(batch) for d in reversed(self._find_owners(x))), None)

    def weigh(self, loss: Tensor, batch: Any) -> Tensor:
        """See `World.weigh`."""
        if not self.is_needed:
            return loss
        drawn = self._find_batch(batch)
        if drawn is None:
            raise ValueError(
                "world.weigh got a batch that is not known. Expected a batch as un.shard gave it out, or a tensor of "
                "it: not a copy (x.float(), x.to(device)), which has other memory."
            )
        weighed = loss * drawn.weight
        if weighed.grad_fn is not None:
            weighed.grad_fn.register_prehook(_Arrival(self, None))
        return weighed

    def arrive_weighed(self) -> None:
        """Called when a backward pass begins from a loss that the program has weighed itself."""
        self._task, self._is_weighed = torch._C._current_graph_task_id(), True
        self._take(Drawn(1.0))

    def _speak(self, text: str) -> None:
        if not self._has_spoken:
            self._has_spoken = True
            warn_user(text)


_REMEDY = (
    "Let the program weigh each batch's loss: loss = world.weigh(loss, batch), with the batch as un.shard gave it out; "
    "or leave uneven parts out, with a batch_size that the number of workers divides and drop_last=True"
)
_UNSURE = (
    "several batches of un.shard have been drawn whose parts on this rank have different weights, and the one that was "
    f"just used could not be told by its memory or its number of samples: it was guessed. {_REMEDY}"
)
_MIXED = (
    "batches of un.shard whose parts on this rank have different weights were used in one backward pass, which has one "
    f"weight: that of the batch used last was taken for all. {_REMEDY}"
)


class _Arrival:
    """A hook on a node of the graph; it keeps `call` alive as long as a backward pass may come."""

    def __init__(self, weights: BatchWeights, call: _Call | None) -> None:
        self._weights, self._call = weights, call

    def __call__(self, _grads: Any) -> None:
        if self._call is None:
            self._weights.arrive_weighed()
        else:
            self._weights.arrive(self._call)


class _CallHook:
    """A hook on a module whose calls the weights of `owner().world` follow."""

    def __init__(self, owner: weakref.ref[Any], is_whole: bool) -> None:
        self._owner, self._is_whole = owner, is_whole

    def __call__(self, module: nn.Module, args: Any, kwargs: Any, *outputs: Any) -> None:
        # compiled with what calls the model, which must stay one graph; `is_compiling` is true for other threads too
        if torch.compiler.is_dynamo_compiling() or torch.compiler.is_exporting():
            return
        owner = self._owner()
        if owner is None or not owner.world.batch_weights.is_needed or in_background():
            return
        weights: BatchWeights = owner.world.batch_weights
        if outputs:
            weights.end_call(outputs)
        else:
            weights.begin_call((args, kwargs), is_whole=self._is_whole)


class CallHooks:
    """Hooks on the calls of some modules, which the weights of `owner.world` follow. They are put on when batches are
    first followed: until then a call costs nothing."""

    def __init__(self, modules: Iterable[nn.Module], owner: Any, *, is_whole: bool) -> None:
        self._modules, self._hook = list(modules), _CallHook(weakref.ref(owner), is_whole)
        self._handles: list[Any] = []
        owner.world.batch_weights.watch(self)

    def put_on(self) -> None:
        """Put them on the modules, once."""
        modules, self._modules = self._modules, []
        for module in modules:
            for register in (module.register_forward_pre_hook, module.register_forward_hook):
                # first: a hook of the program's may copy what the model is called with
                self._handles.append(add_hook(register, self._hook, with_kwargs=True, prepend=True))

    def follow(self, world: Any) -> None:
        """The owner is in another world."""
        world.batch_weights.watch(self)

    def remove(self) -> None:
        """Take them off, for good."""
        self._modules = []
        for handle in self._handles:
            handle.remove()


def _find_by_size(batches: Sequence[Drawn], inputs: Any) -> _Call | None:
    """Find the batch of a call by sizes of a first dimension that some of the batches have, and not all."""
    sizes = _list_sizes(inputs)
    common = set.intersection(*(d.sizes for d in batches))
    found = [d for d in batches if (d.sizes - common) & sizes]
    return _Call(found[0], True) if len({d.weight for d in found}) == 1 else None


def _find_span(x: Tensor) -> MemorySpan:
    start = int(x.storage_offset()) * x.element_size()
    return StorageWeakRef(x.untyped_storage()), start, start + count_span_bytes(x)


def _list_sizes(values: Any) -> set[int]:
    """The sizes of the first dimensions of the tensors in `values`."""
    return {x.shape[0] for x in _list_tensors(values) if x.dim()}


def _list_tensors(values: Any, depth: int = 4) -> Iterator[Tensor]:
    """The plain tensors in a batch, in inputs or outputs: in lists, dicts and objects, up to some number."""
    stack, found = [(values, depth)], 0
    while stack and found < _MOST_TENSORS:
        value, left = stack.pop()
        if isinstance(value, Tensor):
            if value.layout == torch.strided and not torch.utils._python_dispatch.is_traceable_wrapper_subclass(value):
                found += 1
                yield value
            continue
        if isinstance(value, Mapping):
            inner: Iterable[Any] = value.values()
        elif isinstance(value, list | tuple):
            inner = value
        else:
            inner = vars(value).values() if hasattr(value, "__dict__") and not isinstance(value, type) else ()
        if left:
            stack += reversed([(x, left - 1) for x in list(inner)[:_MOST_TENSORS]])
