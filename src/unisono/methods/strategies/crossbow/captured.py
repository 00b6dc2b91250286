"""All learners of a worker at the same time, on one GPU: their passes and their steps are branches of one CUDA graph.

1. lay out: parameters lie in lines of memory, so that corrections are a few kernels;
2. warm up: the first rounds with batches of a kind run op by op, on a stream for each learner;
3. capture: the next one is recorded, with memory of its own for the batches;
4. replay: batches are copied there, learning rates too, and one launch computes all learners.
"""

from __future__ import annotations

import dis
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import lru_cache, partial
from types import CodeType, FunctionType, MethodType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.utils._pytree import tree_flatten, tree_unflatten

from unisono.background import is_among_ranks
from unisono.methods.exchange.windows import has_other_hooks
from unisono.methods.joined_optimizers import describe_optimizer
from unisono.methods.kernels.graphs import record
from unisono.methods.strategies.crossbow.learners import (
    Batches,
    CentralModel,
    Learners,
    ModuleCopy,
    Parked,
    compute,
)
from unisono.training.batch_norm import SyncBatchNorm

WARM_UP = 2  # rounds op by op: libraries choose their kernels, the optimizer makes its states
MOST = 8  # graphs; where batches, settings or tensors keep changing, recording does not pay
_FUSED = (SGD, Adam, AdamW)  # their fused kernels read the learning rate on the GPU
_OURS = ("lr", "foreach", "fused", "capturable", "differentiable")
_PLAIN = (int, float, str, bool, bytes, type(None))
LossOf = Callable[[nn.Module, Any], Tensor]
Gradients = list[list[Tensor | None]]


class How(NamedTuple):
    """What a round does: see `learn`. `stepping`: learners step. `corrections`: alpha and the central model's momentum,
    where no other worker is to be heard for them."""

    loss_of: LossOf
    clip_norm: float | None
    stepping: bool
    corrections: tuple[float, float] | None


class Uncapturable(Exception):
    """Why a round cannot be captured, in words for the user."""


def is_on_gpu(named: Sequence[tuple[str, Parameter]]) -> bool:
    """Whether there is a GPU to compute on."""
    return any(p.is_cuda for _, p in named)


class Lines:
    """Parameters that learners share with the central model, in memory that lies as its buckets do.

    Of each bucket: a line for each learner, one for z, one for its velocity, and [learners, n] for w_j - z.
    """

    def __init__(self, learners: Learners, center: CentralModel) -> None:
        self.buckets = center.buckets
        places = {name: i for i, (name, _) in enumerate(learners.named)}
        self.params = [list(learners.params(j)) for j in range(learners.count)]  # in the order of `named`
        self._rows: list[list[Tensor]] = []
        self._z: list[Tensor] = []
        self._velocity: list[Tensor] = []
        self._apart: list[Tensor] = []
        for bucket in self.buckets:
            n = bucket.layout.numel
            z, velocity, *rows = (bucket.flat.new_zeros(n) for _ in range(learners.count + 2))
            for line, kept in ((z, center.z), (velocity, center.velocity)):
                for name, view in zip(bucket.names, bucket.views(line), strict=True):
                    kept[name] = view.copy_(kept[name])
            for row, params in zip(rows, self.params, strict=True):
                for name, view in zip(bucket.names, bucket.views(row), strict=True):
                    params[places[name]] = view.copy_(params[places[name]])
            self._rows.append(rows)
            self._z.append(z)
            self._velocity.append(velocity)
            self._apart.append(bucket.flat.new_zeros(learners.count, n))
        for j, params in enumerate(self.params):
            learners.place(j, params)

    def remember(self) -> None:
        """Remember w_j - z, of all learners."""
        for rows, z, apart in zip(self._rows, self._z, self._apart, strict=True):
            torch._foreach_copy_(list(apart), rows)
            apart.sub_(z)

    def fill(self) -> None:
        """Remember it, and write its sum over the learners into the buckets."""
        self.remember()
        for bucket, apart in zip(self.buckets, self._apart, strict=True):
            torch.sum(apart, 0, out=bucket.flat)

    def correct(self, alpha: float, but: Collection[str] = ()) -> None:
        """w_j <- w_j - alpha (what was remembered), of all learners, but for some parameters."""
        for bucket, rows, apart in zip(self.buckets, self._rows, self._apart, strict=True):
            kept = [i for i, name in enumerate(bucket.names) if name in but]
            for line in apart if kept else ():
                views = bucket.views(line)
                torch._foreach_zero_([views[i] for i in kept])
            torch._foreach_sub_(rows, list(apart), alpha=alpha)

    def move(self, alpha: float, momentum: float) -> None:
        """`CentralModel.move` by what the buckets hold."""
        for bucket, z, velocity in zip(self.buckets, self._z, self._velocity, strict=True):
            z.add_(velocity.mul_(momentum).add_(bucket.flat, alpha=alpha))


class Steps:
    """The learners' optimizers, as steps that a graph can hold. Their states are the learners' own.

    SGD, Adam and AdamW, by their fused kernels; the learning rate is a number on the GPU.
    """

    def __init__(self, learners: Learners, copies: Sequence[Sequence[Parameter]]) -> None:
        self._optimizer = optimizer = learners.optimizer
        self._held = self._list_held()
        self._kept = [name for name in optimizer.defaults if name not in _OURS]
        self.settings = [self._read(group) for group in self.groups]
        self._rates = [torch.zeros((), dtype=torch.float32, device=copies[0][0].device) for _ in self.groups]
        self._known: list[float | None] = [None] * len(self.groups)  # what is in these
        self._places = {param: i for i, (_, param) in enumerate(learners.named)}
        own = {"fused": True, **({"capturable": True} if "capturable" in optimizer.defaults else {})}
        kind: Any = type(optimizer)
        self._each: list[Optimizer] = []
        for j, params in enumerate(copies):
            groups = [
                {**settings, **own, "lr": rate, "params": [params[self._places[p]] for p in group["params"]]}
                for group, settings, rate in zip(self.groups, self.settings, self._rates, strict=True)
            ]
            self._each.append(kind(groups))
            self._share(learners.state(j), params, self._each[-1])

    @property
    def groups(self) -> list[dict[str, Any]]:
        """The program's; `load_state_dict` puts others in their place."""
        return self._optimizer.param_groups

    def _list_held(self) -> list[list[int]]:
        return [list(map(id, group["params"])) for group in self.groups]

    def are_current(self) -> bool:
        """Whether the optimizer's groups hold the same parameters as before."""
        return self._list_held() == self._held

    def _share(self, state: Any, params: Sequence[Parameter], made: Optimizer) -> None:
        """Let the optimizer of a learner work on the learner's state."""
        for group in self.groups:
            for p in (p for p in group["params"] if p.requires_grad):
                entry = state.setdefault(p, {})
                if group.get("momentum") and entry.get("momentum_buffer") is None:
                    entry["momentum_buffer"] = torch.zeros_like(p)  # the same as none, without dampening
                if "step" in entry:
                    entry["step"] = torch.as_tensor(entry["step"]).to(p.device, torch.float32)
                made.state[params[self._places[p]]] = entry

    def _read(self, group: dict[str, Any]) -> dict[str, Any]:
        """What a graph has for good."""
        return {name: group[name] for name in self._kept}

    @staticmethod
    def why_not(learners: Learners) -> str:
        """Why the optimizer's step is not captured; "": it is."""
        optimizer, named = learners.optimizer, {p for _, p in learners.named}
        groups = optimizer.param_groups
        if type(optimizer) not in _FUSED:
            return f"a graph can hold the steps of one SGD, Adam or AdamW, and this is {describe_optimizer(optimizer)}"
        own = vars(optimizer).get("step")  # a schedule's, or the program's
        if has_other_hooks(optimizer) or (own is not None and not hasattr(own, "_wrapped_by_lr_sched")):
            return "the optimizer's step has hooks, or is another function: a graph would not call them"
        if any(group.get("differentiable") for group in groups):
            return "the optimizer is differentiable"
        if any(group.get("momentum") and group.get("dampening") for group in groups):
            return "SGD's dampening begins with the second step"
        if any(isinstance(group[name], Tensor) for group in groups for name in optimizer.defaults if name != "lr"):
            return "some of the optimizer's settings are tensors"
        if any(p.is_complex() for p in named):
            return "some parameters are complex, which no fused kernel takes"
        if any(p not in named for group in groups for p in group["params"]):
            return "the optimizer holds parameters that the model does not have"
        return ""

    def follow(self) -> None:
        """Take the program's learning rates and its other settings."""
        for i, (group, rate) in enumerate(zip(self.groups, self._rates, strict=True)):
            lr = group["lr"]
            if isinstance(lr, Tensor):
                rate.copy_(lr)
            elif lr != self._known[i]:
                rate.fill_(lr)
            self._known[i] = None if isinstance(lr, Tensor) else lr
        settings = [self._read(group) for group in self.groups]
        if settings != self.settings:
            self.settings = settings
            for made in self._each:
                for group, values in zip(made.param_groups, settings, strict=True):
                    group.update(values)

    def step(self, j: int) -> None:
        """A learner's step, with the gradients of its copy of the module."""
        self._each[j].step()


class _Counts:
    """How many batches the batch norms of all learners have seen: a kernel for all, instead of one in each forward."""

    def __init__(self, copies: Sequence[ModuleCopy]) -> None:
        kinds = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
        found: list[Any] = [m for made in copies for m in made.parts]
        compiled = any(hasattr(m, "_orig_mod") or m._compiled_call_impl is not None for m in found)
        norms = [m for m in found if type(m) in kinds and m.momentum is not None and not compiled]
        self._norms = [m for m in norms if m.num_batches_tracked is not None]

    @contextmanager
    def kept_aside(self) -> Iterator[list[tuple[Tensor, int]]]:
        """Inside, forward counts in Python; then the list has which counters are to grow, and by how much."""
        grown: list[tuple[Tensor, int]] = []
        counters = [norm._buffers["num_batches_tracked"] for norm in self._norms]
        calls = [_Calls() for _ in counters]
        for norm, one in zip(self._norms, calls, strict=True):
            norm._buffers["num_batches_tracked"] = one
        try:
            yield grown
        finally:
            for norm, counter in zip(self._norms, counters, strict=True):
                norm._buffers["num_batches_tracked"] = counter
            grown += [(x, one.count) for x, one in zip(counters, calls, strict=True) if one.count]


class _Calls:
    """Stands in a batch norm where its counter was."""

    def __init__(self) -> None:
        self.count = 0

    def add_(self, count: int) -> None:
        self.count += count


class _Round:
    """A round that was recorded: what it is for, and where its batches, losses and gradients lie."""

    def __init__(self, key: list[Any], held: list[Any]) -> None:
        self.key, self.held = key, held  # objects that the key knows by where they are
        self.seen = 0
        self.why_not = ""
        self.inputs: list[tuple[list[int], list[Tensor]]] = []  # places among the leaves of the batches
        self.losses: Tensor | None = None
        self.grads: Gradients = []
        self.replay: Callable[[], object] | None = None


class CapturedLearners:
    """The learners of a replica, laid out to be computed at the same time. Made anew when their tensors change."""

    def __init__(self, learners: Learners, center: CentralModel) -> None:
        self._learners = learners
        self.lines = Lines(learners, center)
        self._params = [p for _, p in learners.named]
        self._device = self._params[0].device
        self._slots = [(m._buffers, name) for m in learners.model.modules() for name in m._buffers]
        self._copies = [learners.prepare(j) for j in range(learners.count)]
        self._steps: Steps | None = None  # made when they are first asked for
        self._counts = _Counts(self._copies)
        self._streams = learners.streams(learners.count + 1)  # the last one is the central model's
        self._modes = self._read_modes()
        self._rounds: list[_Round] = []
        self._pool: Any = None
        self.replayed = 0
        self.graph_bytes = 0
        self._trainable: list[bool] = []
        self._parked: list[Parked] = []
        self._places: list[list[int]] = []
        self._take_places()

    def close(self) -> None:
        """Give the graphs and their memory back."""
        self._rounds = []
        if self._streams:
            torch.cuda.synchronize(self._device)
            torch.cuda.empty_cache()

    @property
    def why_no_steps(self) -> str:
        """Why learners do not step in the graph, as the optimizer is now; "": they do."""
        return Steps.why_not(self._learners)

    # Whether all is where it was ---------------------------------------------------------------------------------

    def is_current(self, center: CentralModel) -> bool:
        """Whether these are still the learners, and all of their tensors where they were."""
        if center.buckets is not self.lines.buckets or self._learners.count != len(self._copies):
            return False
        if [p.requires_grad for p in self._params] != self._trainable:
            return False
        if self._steps is not None and not self._steps.are_current():
            return False
        parked = list(self._learners.parked.values())
        if any(a is not b for a, b in zip(parked, self._parked, strict=True)):
            if [self._find_places(j) for j in range(1, len(self._copies))] != self._places[1:]:
                return False
            self._parked = parked
        return self._find_places(0) == self._places[0]

    def _take_places(self) -> None:
        self._trainable = [p.requires_grad for p in self._params]
        self._parked = list(self._learners.parked.values())
        self._places = [self._find_places(j) for j in range(len(self._copies))]

    def _find_places(self, j: int) -> list[int]:
        """Where a learner's tensors lie, and the dicts that have those of its optimizer's state."""
        buffers: Any = [kept.get(name) for kept, name in self._slots] if j == 0 else self._learners.buffers(j)
        tensors = [*(self._params if j == 0 else self._learners.params(j)), *(b for b in buffers if b is not None)]
        entries = [] if self._steps is None else [self._learners.state(j).get(p) for p in self._params]
        tensors += [x for entry in entries for x in (entry or {}).values() if isinstance(x, Tensor)]
        return [*map(id, entries), *(x.data_ptr() for x in tensors)]

    def _read_modes(self) -> list[bool]:
        return [m.training for m in self._learners.parts]

    # A round -----------------------------------------------------------------------------------------------------

    def run(self, how: How, shares: Sequence[Batches]) -> tuple[list[Tensor], Gradients]:
        """A batch, or several, for each learner: all losses, and the gradients unless the learners have stepped."""
        leaves, spec = tree_flatten([list(share) for share in shares])
        found = self._find(how, leaves, spec)
        if found.why_not:
            raise Uncapturable(found.why_not)
        if found.seen < WARM_UP:
            losses = self._compute(how, tree_unflatten(leaves, spec))
            found.seen, found.losses = found.seen + 1, torch.stack(losses)
            grads = self._take_gradients()
            self._take_places()
            return losses, grads
        if found.replay is None:
            self._record(found, how, leaves, spec)
        assert found.replay is not None
        assert found.losses is not None
        for places, inputs in found.inputs:
            torch._foreach_copy_(inputs, [leaves[i] for i in places])
        found.replay()
        self.replayed += 1
        return list(found.losses.clone().unbind()), found.grads

    def _find(self, how: How, leaves: list[Any], spec: Any) -> _Round:
        """The graph for such a round, or where it is to be."""
        modes = self._read_modes()
        if modes != self._modes:
            self._modes = modes
            for j in range(len(self._copies)):
                self._learners.prepare(j)
        held: list[Any] = []
        key = [spec, [self._describe(x) for x in leaves], _mark(how.loss_of, held), modes, how[1:]]
        key += [torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")]
        if how.stepping:
            if self._steps is None:
                self._steps = Steps(self._learners, [made.params for made in self._copies])
            self._steps.follow()
            key.append(self._steps.settings)
        found = next((one for one in self._rounds if one.key == key), None)
        if found is None:
            if len(self._rounds) == MOST:
                raise Uncapturable(f"batches, settings or what the loss function uses came in more than {MOST} kinds")
            found = _Round(key, held)
            self._rounds.append(found)
        return found

    def _compute(self, how: How, batches: Any) -> list[Tensor]:
        """Each learner on a stream of its own; none steps before all have gradients, so that an error changes none."""
        here = torch.cuda.current_stream(self._device) if self._streams else None
        losses: list[Tensor] = []
        with self._counts.kept_aside() as grown:
            for j, made in enumerate(self._copies):
                with self._on_stream(j, after=here):
                    made.zero_grad()
                    losses += compute(how.loss_of, made, Batches(batches[j], [1.0] * len(batches[j])))
        with self._on_stream(-1, after=here):
            if how.corrections is not None:
                self.lines.fill()
            if grown:
                torch._foreach_add_([x for x, _ in grown], [count for _, count in grown])
        for j, made in enumerate(self._copies):
            with self._on_stream(j, after=self._streams[-1] if self._streams else None):
                if how.clip_norm is not None:
                    nn.utils.clip_grad_norm_(made.params, how.clip_norm)
                if how.stepping and self._steps is not None:
                    self._steps.step(j)
                    made.zero_grad()
        for stream in self._streams:
            assert here is not None
            here.wait_stream(stream)
        if how.corrections is not None:
            self.lines.correct(how.corrections[0])
            self.lines.move(*how.corrections)
        return losses

    @contextmanager
    def _on_stream(self, j: int, *, after: torch.cuda.Stream | None = None) -> Iterator[None]:
        stream = self._streams[j] if self._streams else None
        if stream is not None and after is not None:
            stream.wait_stream(after)
        with torch.cuda.stream(stream):  # None changes nothing
            yield

    def _take_gradients(self) -> Gradients:
        found = [[p.grad for p in made.params] for made in self._copies]
        for made in self._copies:
            made.zero_grad()
        return found

    def _record(self, found: _Round, how: How, leaves: list[Any], spec: Any) -> None:
        """Record a round, which computes nothing yet."""
        kept = [torch.empty_like(x) if isinstance(x, Tensor) else x for x in leaves]
        batches, losses = tree_unflatten(kept, spec), found.losses
        for dtype in dict.fromkeys(x.dtype for x in kept if isinstance(x, Tensor)):  # a kernel for each
            places = [i for i, x in enumerate(kept) if isinstance(x, Tensor) and x.dtype == dtype]
            found.inputs.append((places, [kept[i] for i in places]))

        def run() -> None:
            torch.stack(self._compute(how, batches), out=losses)
            found.grads = self._take_gradients()

        if not self._streams:
            found.replay = run
            return
        before = torch.cuda.memory_reserved(self._device)
        buffers = [[b.data_ptr() for b in made.module.buffers()] for made in self._copies]
        pool, self._pool = self._pool or torch.cuda.graph_pool_handle(), None  # of no use after an error
        torch.clear_autocast_cache()
        try:
            graph = record(run, self._device, pool)
            if [[b.data_ptr() for b in made.module.buffers()] for made in self._copies] != buffers:
                raise Uncapturable("the model puts other tensors in place of its buffers")
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            known = "" if isinstance(error, Uncapturable) else f"{type(error).__name__}: "
            found.why_not = f"{known}{error}".strip().splitlines()[0]
            self._take_gradients()
            raise Uncapturable(found.why_not) from error
        found.replay, self._pool = graph.replay, pool
        self.graph_bytes += max(0, torch.cuda.memory_reserved(self._device) - before)

    def _describe(self, leaf: Any) -> Any:
        """What a graph relies on in a part of a batch."""
        if isinstance(leaf, Tensor):
            if leaf.device != self._device:
                raise Uncapturable(f"a batch is on {leaf.device}: bring it to {self._device} before `learn`")
            if leaf.requires_grad or leaf.layout != torch.strided:
                raise Uncapturable("a batch is sparse, or requires gradients")
            return leaf.shape, leaf.dtype
        if not isinstance(leaf, _PLAIN):
            raise Uncapturable(f"a batch holds a {type(leaf).__name__}: give tensors")
        return leaf

    # Memory ------------------------------------------------------------------------------------------------------

    def has_room(self) -> bool:
        """Whether another learner would fit beside these, by what these take."""
        if not self._streams:
            return True
        count = len(self._copies)
        tensors = [*self._learners.params(0), *self._learners.buffers(0)]
        tensors += [x for entry in self._learners.state(0).values() for x in entry.values() if isinstance(x, Tensor)]
        own = sum(x.numel() * x.element_size() for x in tensors) + sum(x.nbytes for x in self.lines.params[0])
        cached = torch.cuda.memory_reserved(self._device) - torch.cuda.memory_allocated(self._device)
        free = torch.cuda.mem_get_info(self._device)[0] + cached
        return free > 1.2 * (own + self.graph_bytes / count)


def why_not_laid_out(learners: Learners, center: CentralModel) -> str:
    """Why learners cannot be computed at the same time; "": they can."""
    places = {p.device for _, p in learners.named}
    if len(places) > 1:
        return f"parameters are on {' and '.join(sorted(map(str, places)))}"
    if any(isinstance(m, (SyncBatchNorm, nn.SyncBatchNorm)) for m in learners.parts):
        return "SyncBatchNorm hears other workers in forward"
    if any(isinstance(m, (nn.Embedding, nn.EmbeddingBag)) and m.sparse for m in learners.parts):
        return "an embedding has sparse gradients, which no fused kernel takes"
    if is_among_ranks() and learners.named[0][1].is_cuda:
        return "ranks are threads, and draw random numbers from one generator while one of them captures"
    short = [name for name, p in learners.named if name in center.z and p.dtype != center.z[name].dtype]
    return f"{short[0]!r} has 16 bits: keep parameters in float32, and use autocast" if short else ""


@contextmanager
def naming_learners(count: int) -> Iterator[None]:
    """Where memory is short, say for how many learners."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise torch.OutOfMemoryError(
            f"crossbow: {count} learner(s) on this worker do not fit into the GPU's memory: give fewer learners ("
            f"'auto' stops where no more fit), smaller batches, or learn(..., capture=False). {error}"
        ) from error


def _mark(x: Any, held: list[Any], home: dict[str, Any] | None = None, depth: int = 4) -> Any:
    """What a function is, what it was made with, and what it and others of its module (`home`) read there: numbers and
    texts by value, others by where they are (`held`)."""
    if isinstance(x, _PLAIN):
        return type(x), x
    mark = partial(_mark, held=held, home=home, depth=depth)
    if isinstance(x, MethodType):
        return "method", mark(x.__func__), mark(x.__self__)
    if isinstance(x, partial):
        return ["partial", *map(mark, (x.func, *x.args, *x.keywords.items()))]
    if isinstance(x, tuple):
        return [*map(mark, x)]
    is_new = not any(x is one for one in held)
    held.append(x)
    if not isinstance(x, FunctionType) or not depth or not is_new:
        return id(x)
    parts = [*(x.__defaults__ or ()), *(x.__kwdefaults__ or {}).items()]
    for cell in x.__closure__ or ():
        with suppress(ValueError):  # it is empty
            parts.append(cell.cell_contents)
    home = x.__globals__ if home is None else home
    if x.__globals__ is home:
        parts += [(name, home[name]) for name in _find_globals(x.__code__) if name in home]
    return ["function", id(x.__code__), *(_mark(part, held, home, depth - 1) for part in parts)]


@lru_cache
def _find_globals(code: CodeType) -> list[str]:
    """The names that code reads from its module."""
    found = {one.argval for one in dis.get_instructions(code) if one.opname == "LOAD_GLOBAL"}
    return sorted(found.union(*(_find_globals(inner) for inner in code.co_consts if isinstance(inner, CodeType))))
