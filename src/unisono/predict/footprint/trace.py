"""One training step on fake tensors: what it would allocate, found without allocating it.

Parameters and buffers of the model are exchanged for fakes of the same shape and dtype while the step runs, and the
optimizer for a copy that holds the fakes; both come out as they went in. Every storage that an operation makes counts
from its birth until nothing holds it; gradients of parameters count apart, from the moment that they are complete.
"""

from __future__ import annotations

import copy
import weakref
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from unisono.methods.joined_optimizers import members_of

_SCALAR = torch.ops.aten._local_scalar_dense.default
_LSTM = torch.ops.aten.mkldnn_rnn_layer.default
_LSTM_BACKWARD = torch.ops.aten.mkldnn_rnn_layer_backward.default
_LSTM_WORKSPACE = 16  # times its output: what oneDNN keeps for backward (15.2 to 16.0, measured), which fakes leave out
_LSTM_SCRATCH = 5  # times its output, and once its weights: what backward takes besides (5.3 and 1 to 1.9, measured)


@dataclass
class _LiveStorage:
    """A storage that is alive, and the bytes that it counts for."""

    nbytes: int = 0
    narrow: int = 0  # with its floating-point numbers in 16 bits
    gradient: bool = False
    alive: Any = None  # a weak reference


@dataclass
class Peaks:
    """The most bytes that were alive at one time."""

    without_gradients: int = 0  # all but complete gradients
    with_gradients: int = 0  # all, complete gradients included
    # The same two, with floating-point numbers in 16 bits.
    without_gradients_narrow: int = 0
    with_gradients_narrow: int = 0
    rest: int = 0  # alive at the end of it all, gradients left out


class LiveBytes(TorchDispatchMode):
    """Inside it, tensors of `device` are counted while `counting` is set.

    `scalar` is what a fake tensor answers when it is asked for its value; a bool is always False.
    """

    def __init__(self, device: str = "cpu", *, scalar: int = 0, counting: bool = True) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.device, self.scalar, self.counting = device, scalar, counting
        self.peaks = Peaks()
        self.backwards: Counter[Tensor] = Counter()  # how often each parameter's gradient was complete
        self._entries: dict[int, _LiveStorage] = {}
        self._without_gradients = self._without_gradients_narrow = self._gradients = self._gradients_narrow = 0

    def __torch_dispatch__(
        self, func: Any, types: Iterable[Any], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is _SCALAR and isinstance(args[0], FakeTensor):
            dtype = args[0].dtype
            return False if dtype == torch.bool else float(self.scalar) if dtype.is_floating_point else self.scalar
        if not self.counting:
            return func(*args, **(kwargs or {}))
        for tensor in _iterate_tensors((args, kwargs)):
            self._find_entry(tensor)  # one that is new to us here was made outside: it counts nothing
        out = func(*args, **(kwargs or {}))
        if func is _LSTM and isinstance(out[-1], FakeTensor):
            self.count(out[-1], nbytes=_LSTM_WORKSPACE * out[0].nbytes)
        if func is _LSTM_BACKWARD and isinstance(args[0], FakeTensor):
            self._update_peaks(_LSTM_SCRATCH * args[7].nbytes + args[1].nbytes + args[2].nbytes)
        for tensor in _iterate_tensors(out):
            self.count(tensor)
        return out

    def count(self, tensor: Tensor, nbytes: int | None = None) -> None:
        """Count a tensor's storage, unless it is known; `nbytes` where it does not know its size itself."""
        storage = tensor.untyped_storage()
        if id(storage) in self._entries or tensor.device.type != self.device:
            return
        entry = self._find_entry(tensor)
        entry.nbytes = storage.nbytes() if nbytes is None else nbytes
        wide = tensor.is_floating_point() and tensor.element_size() > 2
        entry.narrow = entry.nbytes * 2 // tensor.element_size() if wide else entry.nbytes
        self._without_gradients += entry.nbytes
        self._without_gradients_narrow += entry.narrow
        self._update_peaks()

    def _mark_gradient(self, tensor: Tensor) -> None:
        """`tensor` is a parameter's gradient, and complete."""
        self.count(tensor)
        entry = self._find_entry(tensor)
        if not entry.gradient:
            entry.gradient = True
            self._without_gradients -= entry.nbytes
            self._without_gradients_narrow -= entry.narrow
            self._gradients += entry.nbytes
            self._gradients_narrow += entry.narrow

    def follow(self, params: Iterable[Tensor]) -> list[Any]:
        """Mark these parameters' gradients as they come; returns the hooks."""

        def complete(param: Tensor) -> None:
            if self.counting:
                self.backwards[param] += 1
                if param.grad is not None and not param.grad.is_sparse:
                    self._mark_gradient(param.grad)

        return [p.register_post_accumulate_grad_hook(complete) for p in params if p.requires_grad]

    def restart(self) -> None:
        """Forget the peaks so far, but not what is alive."""
        self.peaks = Peaks()
        self._update_peaks()

    def finish(self) -> Peaks:
        """Stop counting: the peaks, with what is still alive as their `rest`."""
        self.peaks.rest = self._without_gradients
        return self.peaks

    @property
    def alive(self) -> int:
        """Bytes alive now, gradients included."""
        return self._without_gradients + self._gradients

    def _update_peaks(self, scratch: int = 0) -> None:
        """Raise the peaks to what is alive now; `scratch`: bytes that exist at this moment only."""
        peaks, now = self.peaks, self._without_gradients + scratch
        narrow = self._without_gradients_narrow + scratch // 2
        peaks.without_gradients = max(peaks.without_gradients, now)
        peaks.with_gradients = max(peaks.with_gradients, now + self._gradients)
        peaks.without_gradients_narrow = max(peaks.without_gradients_narrow, narrow)
        peaks.with_gradients_narrow = max(peaks.with_gradients_narrow, narrow + self._gradients_narrow)

    def _find_entry(self, tensor: Tensor) -> _LiveStorage:
        storage = tensor.untyped_storage()
        key = id(storage)
        known = self._entries.get(key)
        if known is None:
            known = self._entries[key] = _LiveStorage()
            known.alive = weakref.ref(storage, self._make_death_callback(key, known))
        return known

    def _make_death_callback(self, key: int, entry: _LiveStorage) -> Callable[[Any], None]:
        me = weakref.ref(self)

        def forget(_: Any) -> None:
            watch = me()
            if watch is None:
                return
            watch._entries.pop(key, None)
            if entry.gradient:
                watch._gradients -= entry.nbytes
                watch._gradients_narrow -= entry.narrow
            else:
                watch._without_gradients -= entry.nbytes
                watch._without_gradients_narrow -= entry.narrow

        return forget


def _iterate_tensors(tree: Any) -> Iterator[Tensor]:
    for leaf in tree_leaves(tree):
        if isinstance(leaf, Tensor) and leaf.layout is torch.strided:
            yield leaf


Loss = Callable[[Any, Any], Tensor]


@dataclass(frozen=True)
class OptimizerState:
    """What an optimizer keeps between steps and takes during one, in bytes."""

    elements: int = 0  # elements of state that has the shape of its parameter
    element_bytes: int = 0
    other_bytes: int = 0  # step counts and the like
    step_bytes: int = 0  # temporaries of a step, at its worst moment


def make_fake_mode() -> FakeTensorMode:
    """Fakes that may meet real tensors: what comes of both is fake."""
    return FakeTensorMode(allow_non_fake_inputs=True)


def make_fake(tensor: Tensor, mode: FakeTensorMode, *, dtype: torch.dtype | None = None) -> Tensor:
    """A tensor like this one that holds no memory; one on the meta device becomes one of the CPU."""
    device = torch.device("cpu") if tensor.is_meta else tensor.device
    narrowed = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
    with mode, torch.no_grad():
        if tensor.layout is not torch.strided:
            return torch.empty(tensor.shape, dtype=narrowed, device=device)
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=narrowed, device=device)


@contextmanager
def replace_by_fakes(
    model: nn.Module, mode: FakeTensorMode, *, dtype: torch.dtype | None = None
) -> Iterator[dict[Tensor, Any]]:
    """Exchange the model's parameters and buffers for fakes inside the block; gives each one's fake."""
    fakes: dict[Tensor, Any] = {}
    spots: list[tuple[nn.Module, str, Tensor]] = []
    for module in model.modules():
        for name, param in module._parameters.items():
            if param is not None:
                spots.append((module, name, param))
                if param not in fakes:
                    fakes[param] = nn.Parameter(make_fake(param, mode, dtype=dtype), requires_grad=param.requires_grad)
        for name, buffer in module._buffers.items():
            if buffer is not None:
                spots.append((module, name, buffer))
                if buffer not in fakes:
                    fakes[buffer] = make_fake(buffer, mode, dtype=dtype)
    try:
        for module, name, tensor in spots:
            setattr(module, name, fakes[tensor])  # not into the dict: an LSTM keeps lists of its own
        yield fakes
    finally:
        for module, name, tensor in spots:
            setattr(module, name, tensor)


def trace_activations(
    model: nn.Module, batch: Any, loss: Loss | None, *, mode: FakeTensorMode, dtype: torch.dtype | None = None
) -> Peaks:
    """Run forward, loss and backward on fakes. `dtype`: parameters, buffers and inputs are cast to it first.

    The batch is counted too. It is the model's input; a tuple or list are its inputs and, where there is a `loss`,
    last the target; a dict are its keyword arguments. Without a loss, backward starts from the sum of the output.
    """
    device = next(_find_device(p) for p in model.parameters())
    watch = LiveBytes(device)
    with replace_by_fakes(model, mode, dtype=dtype), watch, torch.compiler.set_stance("force_eager"):
        given = tree_map_only(
            Tensor, lambda t: make_fake(t, mode, dtype=dtype).to(device).requires_grad_(t.requires_grad), batch
        )
        hooks = watch.follow(model.parameters())
        try:
            end = _run_forward(model, given, loss)
            torch.autograd.backward(end)
            return watch.finish()
        finally:
            for hook in hooks:
                hook.remove()


def _run_forward(model: nn.Module, batch: Any, loss: Loss | None) -> Tensor:
    if isinstance(batch, Mapping):
        out = model(**batch)
        return _sum_outputs(out) if loss is None else loss(out, batch)
    inputs: Sequence[Any] = batch if isinstance(batch, (tuple, list)) else [batch]
    if loss is None:
        return _sum_outputs(model(*inputs))
    if len(inputs) < 2:
        raise ValueError("with a loss, batch is a tuple: the model's inputs, then the target; got one item")
    return loss(model(*inputs[:-1]), inputs[-1])


def _sum_outputs(out: Any) -> Tensor:
    """A scalar to start backward from: the output's own loss, or the sum of all outputs."""
    own = getattr(out, "loss", None)
    if isinstance(own, Tensor):
        return own
    leaves = [t for t in torch.utils._pytree.tree_leaves(out) if isinstance(t, Tensor) and t.requires_grad]
    if not leaves:
        raise TypeError(
            f"the model gave {type(out).__name__}, in which nothing depends on a trainable parameter: give a loss="
        )
    return torch.stack([t.sum() for t in leaves]).sum()


def trace_optimizer(optimizer: Optimizer, params: Sequence[Tensor], *, mode: FakeTensorMode) -> OptimizerState:
    """Run one step of a copy of `optimizer` over fakes of those of its parameters that are in `params`; of several that
    were joined, one after the other."""
    if len(members := members_of(optimizer)) > 1:
        every = [trace_optimizer(member, params, mode=mode) for member in members]
        return OptimizerState(
            sum(one.elements for one in every),
            sum(one.element_bytes for one in every),
            sum(one.other_bytes for one in every),
            max(one.step_bytes for one in every),
        )
    known = set(params)
    groups, fakes = [], []
    for group in optimizer.param_groups:
        mine = [nn.Parameter(make_fake(p, mode)) for p in group["params"] if p in known and p.requires_grad]
        fakes += mine
        groups.append({**group, "params": mine})
    if not fakes:
        return OptimizerState()
    twin = copy.copy(optimizer)
    twin.param_groups, twin.state = groups, defaultdict(dict)
    twin._optimizer_step_pre_hooks, twin._optimizer_step_post_hooks = OrderedDict(), OrderedDict()
    for param in fakes:
        param.grad = make_fake(param, mode)
    with LiveBytes(_find_device(fakes[0]), scalar=1) as watch:
        twin.step()
        kept = watch.alive
        watch.restart()
        twin.step()  # the second finds the state there: what it adds is temporary
    element_bytes = elements = other = 0
    for held, state in twin.state.items():
        for value in state.values():
            if isinstance(value, Tensor):
                like = value.numel() == held.numel() and value.numel() > 1
                element_bytes += value.nbytes if like else 0
                elements += value.numel() if like else 0
                other += 0 if like else value.nbytes
    return OptimizerState(elements, element_bytes, other, max(0, watch.peaks.with_gradients - kept))


def _find_device(tensor: Tensor) -> str:
    return "cpu" if tensor.is_meta else tensor.device.type
