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
            return _make_scalar(args[0].dtype, self.scalar)
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

    def mark_gradient(self, tensor: Tensor) -> None:
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
                    self.mark_gradient(param.grad)

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


def _make_scalar(dtype: torch.dtype, scalar: int) -> bool | int | float:
    if dtype == torch.bool:
        return False
    return float(scalar) if dtype.is_floating_point else scalar
