"""Counts the bytes of the tensors that are alive while a program runs, real or fake ones.

Every storage that an operation makes is counted from its birth until nothing holds it; storages that were there
before are not. Gradients of parameters are counted apart, from the moment that they are complete.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_SCALAR = torch.ops.aten._local_scalar_dense.default
_LSTM = torch.ops.aten.mkldnn_rnn_layer.default
_LSTM_BACKWARD = torch.ops.aten.mkldnn_rnn_layer_backward.default
_LSTM_WORKSPACE = 16  # times its output: what oneDNN keeps for backward (15.2 to 16.0, measured), which fakes leave out
_LSTM_SCRATCH = 5  # times its output, and once its weights: what backward takes besides (5.3 and 1 to 1.9, measured)


@dataclass
class _Entry:
    """A storage that is alive: what it counts, and as what."""

    nbytes: int = 0
    narrow: int = 0  # with its floating-point numbers in 16 bits
    gradient: bool = False
    alive: Any = None  # a weak reference


@dataclass
class Peaks:
    """The most bytes that were alive at one time."""

    flow: int = 0  # all but complete gradients
    kept: int = 0  # all, complete gradients included
    flow_narrow: int = 0  # as `flow` and `kept`, with floating-point numbers in 16 bits
    kept_narrow: int = 0
    rest: int = 0  # alive at the end of it all, gradients left out


class Watch(TorchDispatchMode):
    """Inside it, tensors of `device` are counted while `counting` is set.

    `scalar` is what a fake tensor answers when it is asked for its value; a bool is always False.
    """

    def __init__(self, device: str = "cpu", *, scalar: int = 0, counting: bool = True) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.device, self.scalar, self.counting = device, scalar, counting
        self.peaks = Peaks()
        self.backwards: Counter[Tensor] = Counter()  # how often each parameter's gradient was complete
        self._entries: dict[int, _Entry] = {}
        self._flow = self._flow_narrow = self._gradients = self._gradients_narrow = 0

    def __torch_dispatch__(
        self, func: Any, types: Iterable[Any], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is _SCALAR and isinstance(args[0], FakeTensor):
            return _stand_in(args[0].dtype, self.scalar)
        if not self.counting:
            return func(*args, **(kwargs or {}))
        for tensor in _tensors((args, kwargs)):
            self._entry(tensor)  # one that is new to us here was made outside: it counts nothing
        out = func(*args, **(kwargs or {}))
        if func is _LSTM and isinstance(out[-1], FakeTensor):
            self.count(out[-1], nbytes=_LSTM_WORKSPACE * out[0].nbytes)
        if func is _LSTM_BACKWARD and isinstance(args[0], FakeTensor):
            self._note(_LSTM_SCRATCH * args[7].nbytes + args[1].nbytes + args[2].nbytes)
        for tensor in _tensors(out):
            self.count(tensor)
        return out

    def count(self, tensor: Tensor, nbytes: int | None = None) -> None:
        """Count a tensor's storage, unless it is known; `nbytes` where it does not know its size itself."""
        storage = tensor.untyped_storage()
        if id(storage) in self._entries or tensor.device.type != self.device:
            return
        entry = self._entry(tensor)
        entry.nbytes = storage.nbytes() if nbytes is None else nbytes
        wide = tensor.is_floating_point() and tensor.element_size() > 2
        entry.narrow = entry.nbytes * 2 // tensor.element_size() if wide else entry.nbytes
        self._flow += entry.nbytes
        self._flow_narrow += entry.narrow
        self._note()

    def gradient(self, tensor: Tensor) -> None:
        """`tensor` is a parameter's gradient, and complete."""
        self.count(tensor)
        entry = self._entry(tensor)
        if not entry.gradient:
            entry.gradient = True
            self._flow -= entry.nbytes
            self._flow_narrow -= entry.narrow
            self._gradients += entry.nbytes
            self._gradients_narrow += entry.narrow

    def follow(self, params: Iterable[Tensor]) -> list[Any]:
        """Take note of these parameters' gradients as they come; returns the hooks."""

        def complete(param: Tensor) -> None:
            if self.counting:
                self.backwards[param] += 1
                if param.grad is not None and not param.grad.is_sparse:
                    self.gradient(param.grad)

        return [p.register_post_accumulate_grad_hook(complete) for p in params if p.requires_grad]

    def restart(self) -> None:
        """Forget the peaks so far, but not what is alive."""
        self.peaks = Peaks()
        self._note()

    def finish(self) -> Peaks:
        """The peaks, with what is still alive."""
        self.peaks.rest = self._flow
        return self.peaks

    @property
    def alive(self) -> int:
        """Bytes alive now, gradients included."""
        return self._flow + self._gradients

    def _note(self, scratch: int = 0) -> None:
        """Take the peaks; `scratch`: bytes that are there for this moment."""
        peaks, flow, narrow = self.peaks, self._flow + scratch, self._flow_narrow + scratch // 2
        peaks.flow = max(peaks.flow, flow)
        peaks.kept = max(peaks.kept, flow + self._gradients)
        peaks.flow_narrow = max(peaks.flow_narrow, narrow)
        peaks.kept_narrow = max(peaks.kept_narrow, narrow + self._gradients_narrow)

    def _entry(self, tensor: Tensor) -> _Entry:
        storage = tensor.untyped_storage()
        key = id(storage)
        known = self._entries.get(key)
        if known is None:
            known = self._entries[key] = _Entry()
            known.alive = weakref.ref(storage, self._death_of(key, known))
        return known

    def _death_of(self, key: int, entry: _Entry) -> Callable[[Any], None]:
        me = weakref.ref(self)

        def died(_: Any) -> None:
            watch = me()
            if watch is None:
                return
            watch._entries.pop(key, None)
            if entry.gradient:
                watch._gradients -= entry.nbytes
                watch._gradients_narrow -= entry.narrow
            else:
                watch._flow -= entry.nbytes
                watch._flow_narrow -= entry.narrow

        return died


def _tensors(tree: Any) -> Iterator[Tensor]:
    for leaf in tree_leaves(tree):
        if isinstance(leaf, Tensor) and leaf.layout is torch.strided:
            yield leaf


def _stand_in(dtype: torch.dtype, scalar: int) -> bool | int | float:
    if dtype == torch.bool:
        return False
    return float(scalar) if dtype.is_floating_point else scalar
