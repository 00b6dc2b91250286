"""One training step on fake tensors: what it would allocate, found without allocating it.

Parameters and buffers of the model are exchanged for fakes of the same shape and dtype while the step runs, and the
optimizer for a copy that holds the fakes; both come out as they went in.
"""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only

from unisono.predict.footprint.live_bytes import LiveBytes, Peaks

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
    """Run one step of a copy of `optimizer` over fakes of those of its parameters that are in `params`."""
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
