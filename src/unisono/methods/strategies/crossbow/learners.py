"""Several learners on one worker, each with parameters, buffers, optimizer state and batches of its own; and the
central model that the learners of all workers move together.

They take turns in the program's one model, by pointers alone: whoever's turn it is has its tensors there. Or they
compute their gradients side by side, in threads (with a CUDA stream each), on copies of the module whose parameters
are the learners' own tensors.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import Optimizer

from unisono.background import Handle, SerialQueue
from unisono.methods.buckets import Bucket, group_into_buckets, on_device, widen
from unisono.methods.exchange.windows import scale_gradient
from unisono.world import World

State = dict[Any, Any]


@dataclass
class Parked:
    """A learner that waits for its turn."""

    params: list[Tensor]
    buffers: list[Tensor]
    state: State  # its optimizer's, by parameter


class ModuleCopy:
    """A copy of the module, in which a learner computes; its parts, as to walk through a module takes long."""

    def __init__(self, module: nn.Module) -> None:
        self.module, self.params, self.parts = module, list(module.parameters()), list(module.modules())
        self._slots = [(m._buffers, name, x) for m in self.parts for name, x in m._buffers.items()]

    def zero_grad(self) -> None:
        """Without gradients."""
        for param in self.params:
            param.grad = None

    @torch.no_grad()
    def keep_buffers(self) -> None:
        """Where forward has put another tensor in a buffer's place, the learner's own buffer gets what that holds."""
        for kept, name, mine in self._slots:
            made = kept.get(name)
            if made is not mine and isinstance(made, Tensor) and mine is not None and made.shape == mine.shape:
                kept[name] = mine.copy_(made)


class Batches(list[Any]):
    """Some batches, with the weight of each (see `World.weight`)."""

    def __init__(self, batches: Iterable[Any], weights: Iterable[float]) -> None:
        super().__init__(batches)
        self.weights = list(weights)


class Learners:
    """`count` learners of one model; learner `turn` is in it. `copy_model()` makes a copy of the module."""

    def __init__(self, model: nn.Module, optimizer: Optimizer, copy_model: Callable[[], nn.Module]) -> None:
        self.model, self.optimizer, self._copy_model = model, optimizer, copy_model
        self.named: list[tuple[str, Parameter]] = list(model.named_parameters())
        self.parts = list(model.modules())
        self.turn = 0
        self.parked: dict[int, Parked] = {}
        self._copies: dict[int, ModuleCopy] = {}
        self._lanes: list[SerialQueue] = []
        self._streams: list[torch.cuda.Stream] = []

    @property
    def count(self) -> int:
        """How many there are."""
        return len(self.parked) + 1

    def params(self, learner: int) -> list[Tensor]:
        """A learner's parameters, in the order of `named`."""
        if learner == self.turn:
            return [p.detach() for _, p in self.named]
        return self.parked[learner].params

    def buffers(self, learner: int) -> list[Tensor]:
        """A learner's buffers, in the model's order."""
        if learner == self.turn:
            return [b.detach() for b in self.model.buffers()]
        return self.parked[learner].buffers

    def state(self, learner: int) -> MutableMapping[Any, Any]:
        """The state of a learner's optimizer, by the model's parameters."""
        return self.optimizer.state if learner == self.turn else self.parked[learner].state

    def place(self, learner: int, params: Sequence[Tensor]) -> None:
        """Let a learner's parameters be these tensors, which hold their values."""
        if learner != self.turn:
            self.parked[learner].params = list(params)
            return
        for (_, param), tensor in zip(self.named, params, strict=True):
            param.data = tensor.detach()

    # Taking turns ------------------------------------------------------------------------------------------------

    def turn_to(self, learner: int) -> None:
        """Bring a learner into the model: nothing is copied."""
        if learner == self.turn:
            return
        comes, leaves = self.parked.pop(learner), self._as_parked()
        self.parked[self.turn], self.turn = leaves, learner
        for (_, param), tensor in zip(self.named, comes.params, strict=True):
            param.data = tensor
        for buffer, tensor in zip(self.model.buffers(), comes.buffers, strict=True):
            buffer.data = tensor
        self.optimizer.state.clear()
        self.optimizer.state.update(comes.state)

    def _as_parked(self) -> Parked:
        params, buffers = [p.data for _, p in self.named], [b.data for b in self.model.buffers()]
        return Parked(params, buffers, dict(self.optimizer.state))

    def resize(self, count: int) -> None:
        """Learners at the end go; those that come are copies of the one in the model. Only while it is turn 0."""
        assert self.turn == 0, "learners come and go between rounds"
        for learner in range(count, self.count):
            del self.parked[learner]
            self._copies.pop(learner, None)
        mine = self._as_parked()
        for learner in range(self.count, count):
            params = [torch.empty_like(p).copy_(p) for p in mine.params]
            buffers = [b.clone() for b in mine.buffers]
            self.parked[learner] = Parked(params, buffers, {p: copy.deepcopy(one) for p, one in mine.state.items()})

    def close(self) -> None:
        """The one in the model stays; threads and the others are gone."""
        for lane in self._lanes:
            lane.close()
        self._lanes, self._copies, self.parked, self.turn = [], {}, {}, 0

    # Side by side ------------------------------------------------------------------------------------------------

    def batches(self, loader: Iterable[Any], each: int, world: World) -> Iterator[Batches]:
        """The loader's batches, so many at a time as reach to the end of the round: `each` for a learner."""
        source, weight_of = iter(loader), world.batch_weights.weight_of
        for first in source:
            found, weights = [first], [weight_of(first)]
            for batch in islice(source, (self.count - self.turn) * each - 1):
                found.append(batch)
                weights.append(weight_of(batch))
            yield Batches(found, weights)

    def shares(self, batches: Sequence[Any], each: int, world: World) -> Iterator[list[Batches]]:
        """Who gets which batches, round by round; learners must have had their turns when the next round is asked."""
        weight_of = world.batch_weights.weight_of
        weights = batches.weights if isinstance(batches, Batches) else [weight_of(batch) for batch in batches]
        at = 0
        while at < len(batches):
            end = min(at + (self.count - self.turn) * each, len(batches))
            yield [Batches(batches[i : i + each], weights[i : i + each]) for i in range(at, end, each)]
            at = end

    def gradients(
        self, loss_of: Callable[[nn.Module, Any], Tensor], shares: Sequence[Batches]
    ) -> tuple[list[Tensor], list[list[Tensor | None]]]:
        """Run the next learners, from this turn on, each on its share of batches, at the same time.

        Returns all losses, in the order of the batches, and each learner's gradients, in the order of `named`.
        """
        copies = [self.prepare(self.turn + i) for i in range(len(shares))]
        while len(self._lanes) < len(shares) - 1:
            self._lanes.append(SerialQueue(f"unisono learner {len(self._lanes) + 1}"))
        streams = self.streams(len(shares))
        for stream in streams:  # they begin after what the program's stream has to do so far
            stream.wait_stream(torch.cuda.current_stream(stream.device))
        each_stream: Sequence[Any] = streams or [None] * len(shares)
        jobs = [_job(loss_of, *of) for of in zip(copies, shares, each_stream, strict=True)]
        handles = [lane.submit(job) for lane, job in zip(self._lanes, jobs[1:], strict=False)]
        losses, errors = [], []
        for handle in [Handle(jobs[0]), *handles]:  # all of them, also if one fails: they are at work on their tensors
            try:
                losses.append(handle.wait())
            except Exception as error:  # noqa: PERF203
                errors.append(error)
        for stream in streams:
            torch.cuda.current_stream(stream.device).wait_stream(stream)
        if errors:
            raise errors[0]
        grads = []
        for each in copies:
            grads.append([p.grad for p in each.params])
            each.zero_grad()  # they are the learner's now
        return [loss for each in losses for loss in each], grads

    def put(self, grads: Sequence[Tensor | None]) -> None:
        """Make these the gradients of the learner in the model."""
        for (_, param), grad in zip(self.named, grads, strict=True):
            param.grad = grad

    def streams(self, count: int) -> list[torch.cuda.Stream]:
        """A CUDA stream for each of so many learners; none where the model is on no GPU."""
        device = next((p.device for _, p in self.named if p.is_cuda), None)
        while device is not None and len(self._streams) < count:
            self._streams.append(torch.cuda.Stream(device))
        return self._streams[:count]

    def prepare(self, learner: int) -> ModuleCopy:
        """A copy of the module that computes with the learner's own tensors, in the model's modes."""
        if learner not in self._copies:
            self._copies[learner] = ModuleCopy(self._copy_model())
        made = self._copies[learner]
        for theirs, tensor, (_, mine) in zip(made.params, self.params(learner), self.named, strict=True):
            theirs.data = tensor
            if theirs.requires_grad != mine.requires_grad:
                theirs.requires_grad_(mine.requires_grad)
        for buffer, tensor in zip(made.module.buffers(), self.buffers(learner), strict=True):
            buffer.data = tensor
        for one, other in zip(made.parts, self.parts, strict=True):
            if one.training != other.training:
                one.training = other.training
        made.zero_grad()
        return made

    # State -------------------------------------------------------------------------------------------------------

    def state_dict(self) -> list[dict[str, Any]]:
        """The learners that are not in the model, in order: their tensors, optimizer states by parameter's place."""
        places = {param: i for i, (_, param) in enumerate(self.named)}
        return [
            {
                "params": list(parked.params),
                "buffers": list(parked.buffers),
                "state": {str(places[param]): dict(state) for param, state in parked.state.items()},
            }
            for _, parked in sorted(self.parked.items())
        ]

    def load_state_dict(self, states: list[dict[str, Any]], turn: int) -> None:
        """The model, as it is, becomes learner `turn`; the others are these."""
        waiting = [learner for learner in range(len(states) + 1) if learner != turn]
        self.turn, self.parked = turn, {}
        for learner, state in zip(waiting, states, strict=True):
            params = [torch.empty_like(p).copy_(x) for (_, p), x in zip(self.named, state["params"], strict=True)]
            mine = [b.detach() for b in self.model.buffers()]
            buffers = [torch.empty_like(b).copy_(x) for b, x in zip(mine, state["buffers"], strict=True)]
            kept = {self.named[int(i)][1]: one for i, one in state["state"].items()}
            placed = {p: {k: self._place(k, x, p) for k, x in one.items()} for p, one in kept.items()}
            self.parked[learner] = Parked(params, buffers, placed)

    def _place(self, key: str, value: Any, param: Parameter) -> Any:
        """A value of an optimizer's state, on the device where the learner in the model has its own."""
        if not isinstance(value, Tensor):
            return copy.deepcopy(value)
        mine = self.optimizer.state.get(param, {}).get(key)
        own_shape = value.shape == param.shape and value.dim() > 0
        device = mine.device if isinstance(mine, Tensor) else param.device if own_shape else value.device
        return value.to(device, copy=True)


def compute(loss_of: Callable[[nn.Module, Any], Tensor], made: ModuleCopy, share: Batches) -> list[Tensor]:
    """A learner's backward passes: their losses; its copy of the module has the gradients."""
    losses = []
    with torch.enable_grad():
        for batch, weight in zip(share, share.weights, strict=True):
            loss = loss_of(made.module, batch)
            if not isinstance(loss, Tensor):
                raise TypeError(f"the loss function must return a tensor (the loss), got {type(loss).__name__}")
            with _counting(made.params, weight):
                loss.backward()
            losses.append(loss.detach())
    made.keep_buffers()
    return losses


def _job(
    loss_of: Callable[[nn.Module, Any], Tensor], made: ModuleCopy, share: Batches, stream: Any
) -> Callable[[], list[Tensor]]:
    def run() -> list[Tensor]:
        if stream is not None:
            torch.cuda.set_device(stream.device)  # a thread of its own has no CUDA context yet
        with torch.cuda.stream(stream):  # a stream of None changes nothing
            return compute(loss_of, made, share)

    return run


@contextmanager
def _counting(params: Sequence[Parameter], weight: float) -> Iterator[None]:
    """Gradients count by the batch's weight."""
    counted = [p for p in params if p.requires_grad] if weight != 1.0 else []
    hooks = [p.register_hook(partial(scale_gradient, weight)) for p in counted]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


class CentralModel:
    """The central model z and its velocity v = z - z_before (float32 for 16-bit parameters), the same on every rank.

    Learners are given as lists of tensors in the order of `named`. A parameter takes part from when it is trainable.
    """

    def __init__(self, named: Sequence[tuple[str, Parameter]]) -> None:
        self.named = list(named)
        self.z: dict[str, Tensor] = {}
        self.velocity: dict[str, Tensor] = {}
        self.buckets: list[Bucket] = []
        self._difference: dict[str, Tensor] = {}  # w - z of the learner at work
        self.follow()

    def follow(self) -> None:
        """Parameters that have become trainable take part, from where they are: called before any learner steps."""
        for name, param in self.named:
            if param.requires_grad and name not in self.z:
                self._add(name, param.detach())

    def _add(self, name: str, value: Tensor) -> None:
        self.z[name] = widen(value)
        self.velocity[name] = torch.zeros_like(self.z[name])
        self._difference[name] = torch.zeros_like(self.z[name])

    def _of(self, learner: Sequence[Tensor]) -> list[Tensor]:
        """A learner's tensors that take part, in the order of z."""
        by_name = {name: x for (name, _), x in zip(self.named, learner, strict=True)}
        return [by_name[name] for name in self.z]

    # Buckets -----------------------------------------------------------------------------------------------------

    def build(self, channel: World, bucket_bytes: int) -> None:
        """Lay the buckets out; the memory is the channel's (every rank calls it alike)."""
        self.release(channel)
        named: list[Any] = list(self.z.items())
        for i, some in enumerate(group_into_buckets(named, bucket_bytes)):
            device = some[0][1].device
            bucket = Bucket(i, some, channel.empty if device.type == "cpu" else partial(on_device, device))
            bucket.tag = f"corrections/{i}"
            self.buckets.append(bucket)

    def release(self, channel: World) -> None:
        """Give the buckets' memory back."""
        for bucket in self.buckets:
            channel.release(bucket.flat)
        self.buckets = []

    def sums(self) -> dict[str, Tensor]:
        """What the buckets hold, by parameter."""
        return {n: x for bucket in self.buckets for n, x in zip(bucket.names, bucket.tensors, strict=True)}

    # The method --------------------------------------------------------------------------------------------------

    def fill(self, learners: Sequence[Sequence[Tensor]]) -> None:
        """Write the sum of w_j - z over these learners into the buckets."""
        held = self.sums()
        sums, scratch, z = [held[n] for n in self.z], list(self._difference.values()), list(self.z.values())
        _difference(sums, self._of(learners[0]), z)
        for learner in learners[1:]:
            _difference(scratch, self._of(learner), z)
            torch._foreach_add_(sums, scratch)

    def remember(self, learner: Sequence[Tensor]) -> None:
        """Remember w - z."""
        _difference(list(self._difference.values()), self._of(learner), list(self.z.values()))

    def correct(self, learner: Sequence[Tensor], alpha: float, but: Collection[str] = ()) -> None:
        """w <- w - alpha (what `remember` took), but for some parameters."""
        both = zip(self.z, self._of(learner), self._difference.values(), strict=True)
        pairs = [(w, x) for name, w, x in both if name not in but]
        if not pairs:
            return
        mine, kept = [w for w, _ in pairs], [x for _, x in pairs]
        if all(w.dtype == x.dtype for w, x in pairs):
            torch._foreach_sub_(mine, kept, alpha=alpha)
        else:
            torch._foreach_copy_(mine, [w.to(x.dtype) - alpha * x for w, x in pairs])

    def move(self, sums: dict[str, Tensor], alpha: float, momentum: float) -> None:
        """z <- z + alpha sums + momentum (z - z_before), by its velocity: v <- alpha sums + momentum v; z <- z + v.

        What came to take part in mid-round is not in the sum: no learner had moved it before.
        """
        v = [self.velocity[name] for name in sums]
        torch._foreach_mul_(v, momentum)
        torch._foreach_add_(v, list(sums.values()), alpha=alpha)
        torch._foreach_add_([self.z[name] for name in sums], v)

    def replace(self, values: dict[str, Tensor]) -> None:
        """z <- what the program wrote on every rank, at rest; numbers that it did not change keep their precision."""
        for name, value in values.items():
            z = self.z[name]
            z.copy_(torch.where(value == z.to(value.dtype), z, value.to(z.dtype)))
            self.velocity[name].zero_()

    def rest(self) -> None:
        """z_before <- z."""
        torch._foreach_zero_(list(self.velocity.values()))

    def copy_to(self, learner: Sequence[Tensor]) -> None:
        """w <- z."""
        torch._foreach_copy_(self._of(learner), list(self.z.values()))

    # State -------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The same on every rank."""
        return {"center": dict(self.z), "velocity": dict(self.velocity)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """What was not trainable then begins where the model is."""
        params = dict(self.named)
        for name, param in self.named:
            if name in state["center"] and name not in self.z:
                self._add(name, param.detach())
        for name, z in self.z.items():
            z.copy_(state["center"].get(name, params[name].detach()))
            self.velocity[name].copy_(state["velocity"].get(name, torch.zeros_like(z)))


def _difference(out: list[Tensor], w: list[Tensor], z: list[Tensor]) -> None:
    """w - z, with z as w's dtype holds it: a learner that stands at z has none."""
    if all(x.dtype == y.dtype for x, y in zip(w, out, strict=True)):
        torch._foreach_copy_(out, w)
        torch._foreach_sub_(out, z)
    else:
        torch._foreach_copy_(out, [x.to(c.dtype) - c.to(x.dtype).to(c.dtype) for x, c in zip(w, z, strict=True)])
