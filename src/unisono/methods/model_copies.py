"""Hooks of ours on a model: what copies a model leaves them behind, and what compiles it leaves them alone. What a
model keeps that Python cannot copy is shared with its copy."""

from __future__ import annotations

import copy
import weakref
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

MOST_SHARED = 1000  # objects that cannot be copied; more are made anew in each attempt, and sharing them leads nowhere


def add_hook(register: Callable[..., RemovableHandle], call: Callable[..., Any], **settings: Any) -> RemovableHandle:
    """Put a hook of ours on a module; `register`: its `register_forward_pre_hook`, say.

    `copy.deepcopy(model)` and `torch.save(model, file)` take a module's hooks with them, but not this one: the file can
    be read where this package is not installed, and by `torch.load` of weights only.
    """
    handle = register(_OwnHook(call), **settings)
    hooks: Any = handle.hooks_dict_ref()
    # copy and pickle ask the dict itself; one of another class in its place would be unknown to others' handles
    hooks.__reduce_ex__ = partial(_reduce_others, weakref.ref(hooks))
    return handle


class _OwnHook:
    """A hook of ours, that does what `call` does."""

    def __init__(self, call: Callable[..., Any]) -> None:
        self._call = call

    def __call__(self, *given: Any) -> Any:
        return self._call(*given)


def _reduce_others(hooks: weakref.ref[OrderedDict[int, Any]], protocol: object) -> tuple[Any, ...]:
    """What pickle makes of a module's hooks: those that are not ours (torch wraps some)."""
    every = hooks() or OrderedDict()
    others = [item for item in every.items() if not isinstance(getattr(item[1], "hook", item[1]), _OwnHook)]
    return OrderedDict, (), None, None, iter(others)


def hide_from_compiler(*functions: Any, inlined: bool = True) -> None:
    """Have torch.compile leave these functions alone, and what they call; also where what calls them is compiled, if
    `inlined`. (`torch.compiler.disable` does that too, but loads the compiler for it: seconds, also of programs that
    compile nothing.)"""
    frames: Any = torch._C._dynamo.eval_frame
    if hasattr(frames, "set_code_exec_strategy"):
        strategy = frames._FrameExecStrategy(frames._FrameAction.SKIP, frames._FrameAction.SKIP)
        for function in functions:
            if inlined:
                function._torchdynamo_disable = True
            frames.set_code_exec_strategy(function.__code__, strategy)


hide_from_compiler(_OwnHook.__call__, inlined=False)  # a hook of a model that is compiled itself is called beside it


def copy_model(model: nn.Module) -> nn.Module:
    """A deep copy of `model` without our hooks.

    Activations that it keeps are copied without their graph. Objects that cannot be copied (locks, files, generators),
    optimizers and this package's own objects are shared.
    """
    shared: dict[int, Any] = {}
    for module in model.modules():
        for value in vars(module).values():
            if isinstance(value, Tensor) and not value.is_leaf:
                shared[id(value)] = value.detach().clone()
            elif isinstance(value, Optimizer) or type(value).__module__.partition(".")[0] == "unisono":
                shared[id(value)] = value
    attempts: list[dict[int, Any]] = [shared]  # all are kept, and with them the objects whose id is a key
    while True:
        # Tensors that the attempt before this one has copied are whole; other objects may be half made.
        memo = {**{key: made for key, made in attempts[-1].items() if isinstance(made, Tensor)}, **shared}
        attempts.append(memo)
        try:
            return copy.deepcopy(model, memo)
        except Exception as error:
            failed = _find_uncopied(error)
            if isinstance(failed, (nn.Module, nn.Parameter)) or id(failed) in shared or len(attempts) > MOST_SHARED:
                raise
            shared[id(failed)] = failed.detach().clone() if isinstance(failed, Tensor) else failed


def _find_uncopied(error: Exception) -> Any:
    """The object at which `copy.deepcopy` has failed: what the innermost call of it was about."""
    found, trace = None, error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code is copy.deepcopy.__code__:
            found = trace.tb_frame.f_locals["x"]
        trace = trace.tb_next
    return found


def unwrap(model: nn.Module) -> nn.Module:
    """The module itself, where torch.compile has put another around it."""
    inner = getattr(model, "_orig_mod", model)
    return inner if isinstance(inner, nn.Module) else model
