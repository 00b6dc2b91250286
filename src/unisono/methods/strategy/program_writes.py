"""What a program itself writes to parameters after `un.parallel`: `load_state_dict`, `p.clamp_()`, `p.data = x`."""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from unisono.methods.exchange.windows import TrainableParameters
from unisono.methods.model_copies import add_hook

_SAMPLE = 16  # elements of a parameter that are looked at


class ProgramWrites:
    """Finds the parameters that the program wrote to by three signs: PyTorch's version counter; another place in memory
    (`p.data = x`); and, as `p.data.mul_()` changes neither, some of the values.

    Those that are trainable are compared with the last `note()`, by which a method says that they are as it and the
    optimizer left them. Frozen ones are compared with what they were when this was made, or when they were frozen.
    """

    def __init__(self, model: nn.Module) -> None:
        self._named = TrainableParameters(model.named_parameters())
        self._trained = _Seen([])
        self._frozen: dict[str, _Seen] = {}
        self.loads = 0  # calls of model.load_state_dict
        self.on_load: Callable[[], None] | None = None
        inner = getattr(model, "_orig_mod", model)  # torch.compile puts another module around it
        note = partial(_call, weakref.WeakMethod(self._note_load))
        self._hook = add_hook(inner.register_load_state_dict_post_hook, note)
        self.note()

    def _note_load(self) -> None:
        self.loads += 1
        if self.on_load is not None:
            self.on_load()

    def note(self) -> None:
        """Trainable parameters are what they should be."""
        if not self._named.have_changed():
            self._trained.look()
            return
        self._trained = _Seen(self._named.trainable)
        frozen = [(name, p) for name, p in self._named.named if not p.requires_grad]
        self._frozen = {name: self._frozen.get(name) or _Seen([(name, p)]) for name, p in frozen}

    def find(self, *, thorough: bool = False) -> list[str]:
        """Trainable parameters that the program wrote to since `note()`. `thorough`: values on a GPU count too, which
        holds the program up until it has computed them, and what was written while a parameter was frozen."""
        unfrozen = [s for s in self._frozen.values() if s.named[0][1].requires_grad] if thorough else []
        return [name for seen in (self._trained, *unfrozen) for name in seen.find(wait=thorough)]

    def find_frozen(self) -> dict[str, Parameter]:
        """Frozen parameters that the program moves by itself (a teacher that follows by a moving average)."""
        frozen = {name: p for name, p in self._named.named if not p.requires_grad and name in self._frozen}
        return {name: p for name, p in frozen.items() if self._frozen[name].find(wait=True)}

    def close(self) -> None:
        """Follow them no more."""
        self._hook.remove()


class _Seen:
    """What some parameters were at the last `look()`."""

    def __init__(self, named: Sequence[tuple[str, Parameter]]) -> None:
        self.named = list(named)
        self._signs: list[tuple[int, int]] = []
        self._samples: list[Tensor] = []  # a view of each
        self._kinds: dict[tuple[torch.dtype, torch.device], list[int]] = {}  # where they are among these
        self.look()

    def look(self) -> None:
        """They are what they should be."""
        signs = [_read_signs(p) for _, p in self.named]
        if [place for _, place in signs] != [place for _, place in self._signs]:
            self._samples = [_view_some(p) for _, p in self.named]
            self._kinds = {}
            for i, x in enumerate(self._samples):
                self._kinds.setdefault((x.dtype, x.device), []).append(i)
        self._signs = signs
        self._values = {kind: self._read(places) for kind, places in self._kinds.items()}

    def _read(self, places: Sequence[int]) -> Tensor:
        return torch.cat([self._samples[i] for i in places])

    def find(self, *, wait: bool) -> list[str]:
        """Those that are not what they were."""
        found = {i for i, (_, p) in enumerate(self.named) if _read_signs(p) != self._signs[i]}
        for kind, places in self._kinds.items():
            if kind[1].type == "cuda" and not wait:
                continue
            now, before = self._read(places), self._values[kind]
            if not now.equal(before):
                sizes = [len(self._samples[i]) for i in places]
                pairs = zip(places, now.split(sizes), before.split(sizes), strict=True)
                found |= {i for i, x, y in pairs if not x.equal(y)}
        return [name for i, (name, _) in enumerate(self.named) if i in found]


class Written:
    """Values that this rank's program wrote, by parameter, until the ranks have compared them."""

    def __init__(self) -> None:
        self.values: dict[str, Tensor] = {}
        self.loaded = False  # by model.load_state_dict

    def take(self, params: dict[str, Parameter], *, loaded: bool) -> None:
        """Keep what these parameters are now."""
        self.values.update({name: p.detach().clone() for name, p in params.items()})
        self.loaded |= loaded

    @classmethod
    def of(cls, saved: dict[str, Any] | None, device: torch.device) -> Written:
        """What `state_dict()` gave; None: nothing."""
        made = cls()
        if saved is not None:
            made.values = {name: x.to(device, copy=True) for name, x in saved["values"].items()}
            made.loaded = saved["loaded"]
        return made

    def state_dict(self) -> dict[str, Any] | None:
        """What a checkpoint needs; None where nothing was written."""
        return {"values": dict(self.values), "loaded": self.loaded} if self.values else None

    def code(self) -> int:
        """A number that is the same on ranks that wrote the same; 0: nothing was written."""
        if not self.values:
            return 0
        names = sorted(self.values)
        mark = digest([self.values[name] for name in names]) + "\n".join([str(self.loaded), *names])
        return int.from_bytes(hashlib.blake2b(mark.encode(), digest_size=7).digest(), "little") | 1


def digest(tensors: Iterable[Tensor]) -> str:
    """A mark that tensors of the same bits share."""
    mark = hashlib.blake2b(digest_size=16)
    for x in tensors:
        mark.update(x.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
    return mark.hexdigest()


def _read_signs(param: Parameter) -> tuple[int, int]:
    return param._version, param.data_ptr() if _is_plain(param) else 0


def _is_plain(param: Parameter) -> bool:
    return param.layout == torch.strided and not param.is_meta and type(param.data) is Tensor


def _view_some(param: Parameter) -> Tensor:
    """A view of some elements, from all over it."""
    n = param.numel()
    dense = sum((size - 1) * step for size, step in zip(param.shape, param.stride(), strict=True)) + 1 == n
    if not n or not dense or not _is_plain(param):
        return torch.empty(0, dtype=torch.uint8)
    count = min(n, _SAMPLE)
    return param.detach().as_strided((count,), (n // count,), param.storage_offset())


def _call(note: weakref.WeakMethod[Any], *_: Any) -> None:
    call = note()
    if call is not None:
        call()
