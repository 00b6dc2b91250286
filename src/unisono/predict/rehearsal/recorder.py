"""In a worker of `unisono run --small`: notes inputs, losses, gradients and parameters of a few steps.

`un.parallel` calls `bind` here instead of binding itself (UNISONO_OBSERVER). All worlds begin with the parameters that
the world of one had. Dropout is switched off: by chance alone no two worlds would agree.
"""

from __future__ import annotations

import atexit
import hashlib
import json
import sys
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from unisono.launchers.runtime.variables import read_observer_settings
from unisono.methods.model_copies import add_hook
from unisono.methods.spec import describe
from unisono.methods.strategy import Replica, Strategy, binding
from unisono.predict.compare.recorder import StepRecorder
from unisono.world import World

_DROPPING = [f"{kind}dropout{end}" for kind in ("", "alpha_", "feature_", "feature_alpha_") for end in ("", "_")]
_recorders: list[_NoteTaker] = []


@dataclass(frozen=True)
class Settings:
    """`start`: a file with the parameters to begin with; written by the world of one."""

    folder: str
    start: str
    steps: int


@dataclass
class _Notes:
    """What a rank writes about itself, for the comparison."""

    strategy: str
    shards: int = 0
    seeded: bool = True  # the script itself begins with the same parameters each time
    dropout: list[str] = field(default_factory=list)  # what was switched off
    batch_norms: list[str] = field(default_factory=list)  # with statistics of a worker's own samples
    samples: int | None = None  # of the first forward pass
    total: float = 0.0  # the sum of its numbers
    digest: str = ""
    steps: int = 0


def bind(model: nn.Module, optimizer: Optimizer, strategy: Strategy, world: World) -> Replica:
    """Bind the strategy, and record what follows; of several models, the first one's."""
    settings = Settings(**read_observer_settings())
    if _recorders:
        replica = binding.bind_for(model, optimizer, strategy, world)
    else:
        _recorders.append(recorder := _NoteTaker(settings, model, strategy, world))
        replica = binding.bind_for(model, optimizer, strategy, world)
        losses = StepRecorder(replica, strategy, Path(settings.folder), settings.steps)
        atexit.register(losses.close)
        recorder.follow(replica, optimizer)
    replica.is_trial = True  # type: ignore[attr-defined]  # un.save writes nothing
    return replica


class _NoteTaker:
    """Notes one rank's inputs, gradients and parameters."""

    def __init__(self, settings: Settings, model: nn.Module, strategy: Strategy, world: World) -> None:
        self._settings, self._model, self._world = settings, model, world
        self._folder = Path(settings.folder)
        self.notes = _Notes(describe(strategy))
        self.notes.dropout = _switch_off_dropout(model)
        plain = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
        self.notes.batch_norms = [name for name, m in model.named_modules() if isinstance(m, plain)]
        self._begin_alike()

    def _begin_alike(self) -> None:
        start = Path(self._settings.start)
        if not start.exists():
            torch.save({name: p.detach().cpu() for name, p in self._model.named_parameters()}, start)
            return
        known = torch.load(start, weights_only=True)
        with torch.no_grad():
            for name, parameter in self._model.named_parameters():
                if name in known and known[name].shape == parameter.shape:
                    self.notes.seeded = self.notes.seeded and torch.equal(known[name], parameter.detach().cpu())
                    parameter.copy_(known[name])

    def follow(self, replica: Replica, optimizer: Optimizer) -> None:
        """Watch forward passes and steps."""
        add_hook(self._model.register_forward_pre_hook, self._note_inputs, with_kwargs=True)
        self._replica = replica
        optimizer.register_step_pre_hook(self._note_gradients)
        optimizer.register_step_post_hook(self._count_step)
        atexit.register(self._write_end)

    def _note_inputs(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self.notes.samples is not None or not model.training:
            return
        tensors = [x.detach().cpu() for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
        if tensors and tensors[0].dim():
            self.notes.samples = tensors[0].shape[0]
            self.notes.total = sum(float(x.double().abs().sum()) for x in tensors if not x.is_complex())
            digest = hashlib.sha256()
            for x in tensors:
                digest.update(x.contiguous().view(torch.uint8).numpy().tobytes())
            self.notes.digest = digest.hexdigest()

    def _note_gradients(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self.notes.steps == 0 and self._world.rank == 0:
            self._save("gradients.pt", {name: p.grad for name, p in self._model.named_parameters()})

    def _count_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self.notes.steps += self._replica.is_first_step
        if self._replica.is_first_step and self.notes.steps == self._settings.steps:
            self._write_end()

    def _write_end(self) -> None:
        """Write notes and parameters, after the last step or at the script's own end."""
        atexit.unregister(self._write_end)
        self.notes.shards = len(self._world.shards)
        if self._world.rank == 0:
            self._save("parameters.pt", dict(self._model.named_parameters()))
        (self._folder / f"notes-{self._world.rank}.json").write_text(json.dumps(vars(self.notes)))

    def _save(self, name: str, values: dict[str, Any]) -> None:
        """Save tensors that are whole on this rank, and not those that a method has split over the ranks."""
        shapes = torch.load(self._settings.start, weights_only=True)
        whole = {
            key: value.detach().cpu().clone()
            for key, value in values.items()
            if type(value) in (Tensor, nn.Parameter) and key in shapes and value.shape == shapes[key].shape
        }
        torch.save(whole, self._folder / name)


def _switch_off_dropout(model: nn.Module) -> list[str]:
    """In modules, and where the model calls the function; which there were."""
    found = []
    for name, module in model.named_modules():
        for field_name in ("p", "dropout"):
            value = getattr(module, field_name, None)
            is_dropout = isinstance(module, nn.modules.dropout._DropoutNd | nn.RNNBase | nn.MultiheadAttention)
            if is_dropout and isinstance(value, float) and value > 0:
                setattr(module, field_name, 0.0)
                found.append(name or type(module).__name__)
    for name in _DROPPING:  # what the functions of torch.nn.functional call, whoever imported them by which name
        setattr(torch._VF, name, partial(_keep_all, getattr(torch._VF, name), found, name.removesuffix("_")))
    attend = nn.functional.scaled_dot_product_attention
    attend_to_all = partial(_attend_to_all, attend, found)
    for module in list(sys.modules.values()):  # it is not Python: modules that imported it by name have their own
        for name, value in list(getattr(module, "__dict__", {}).items()):
            if value is attend:
                setattr(module, name, attend_to_all)
    return found


def _keep_all(drop: Any, found: list[str], name: str, input: Tensor, p: float, train: bool) -> Tensor:  # noqa: A002
    if train and p > 0:
        _note(found, name)
    return drop(input, 0.0, train)  # type: ignore[no-any-return]


def _attend_to_all(attend: Any, found: list[str], *args: Any, dropout_p: float = 0.0, **kwargs: Any) -> Any:
    if len(args) > 4:  # query, key, value, attn_mask, dropout_p, is_causal
        dropout_p, args = args[4], (*args[:4], 0.0, *args[5:])
    if dropout_p > 0:
        _note(found, "scaled_dot_product_attention")
    return attend(*args, **kwargs)


def _note(found: list[str], function: str) -> None:
    if (name := f"torch.nn.functional.{function}") not in found:
        found.append(name)
