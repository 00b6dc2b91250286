"""Models and optimizers that others have saved: which format a path has, read without running code from it."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from unisono.training.checkpoint import safetensors
from unisono.training.checkpoint.folder import Contents
from unisono.training.checkpoint.remote import Place
from unisono.training.checkpoint.slices import Stored

Format = Literal["unisono", "dcp", "huggingface", "safetensors", "torch"]
INDEX, SINGLE, DCP_METADATA = "model.safetensors.index.json", "model.safetensors", ".metadata"
_TORCH_ENDINGS = (".pt", ".pth", ".bin", ".ckpt", ".tar")
_MODEL_KEYS = ("model", "state_dict", "model_state_dict", "module")
_OPTIMIZER_KEYS = ("optimizer", "optimizer_state_dict", "optim")
_STEP_KEYS = ("step", "global_step", "iteration")
_BUFFERS = ("running_mean", "running_var", "num_batches_tracked")  # of torch's own modules
_PREFIXES = ("module.", "_orig_mod.", "model.")


def find_format(place: Place) -> Format:
    """Which format lies at a path; what looks like none of the others is ours."""
    if not isinstance(place, Path):
        return "unisono"
    if place.is_file():
        return (
            "safetensors"
            if place.suffix == ".safetensors"
            else "torch"
            if place.suffix in _TORCH_ENDINGS
            else "unisono"
        )
    if (place / DCP_METADATA).is_file():
        return "dcp"
    if (place / INDEX).is_file() or (place / SINGLE).is_file():
        return "huggingface"
    return "unisono"


def read_foreign(path: Path, kind: Format) -> Contents:
    """Model, optimizer (None if there is none) and step of another format; tensors are read when they are needed.

    Raises OSError or ValueError, with the reason, for what cannot be read.
    """
    if kind == "dcp":
        from unisono.training.checkpoint.dcp import read_dcp

        return _find_parts(read_dcp(path), path)
    if kind == "torch":
        return _find_parts(_read_torch(path), path)
    return _make_contents(_read_huggingface(path) if kind == "huggingface" else safetensors.index(path), None, [], 0)


def _make_contents(
    model: Mapping[str, Any], optimizer: Mapping[str, Any] | None, names: Sequence[str], step: int
) -> Contents:
    """What `read_folder` gives, of a model and an optimizer alone."""
    stored = {name: Stored.of(x, name) if isinstance(x, Tensor) else x for name, x in model.items()}
    whole = {"model": stored, "optimizer": optimizer, "optimizer_type": "", "optimizer_names": names, "versions": {}}
    return Contents(step, whole, False, [], [])


def _read_huggingface(folder: Path) -> dict[str, Stored]:
    if not (folder / INDEX).is_file():
        return safetensors.index(folder / SINGLE)
    try:
        places = json.loads((folder / INDEX).read_bytes())["weight_map"]
        files = sorted(set(places.values()))
        if any(Path(name).name != name for name in files):
            raise ValueError("a file outside of the folder")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{folder / INDEX} is no index of safetensors files: {error!r}") from None
    tensors = {file: safetensors.index(folder / file) for file in files}
    if absent := [name for name, file in places.items() if name not in tensors[file]]:
        raise ValueError(f"{folder / places[absent[0]]} has no tensor {absent[0]!r}, which {INDEX} expects there")
    return {name: tensors[file][name] for name, file in places.items()}


def _read_torch(path: Path) -> dict[str, Any]:
    try:
        found = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except pickle.UnpicklingError as error:
        raise ValueError(
            f"{path} holds more than tensors and plain values, and reading that could run code: save the state_dicts "
            f"alone, or read it in Python where you trust it ({str(error).splitlines()[0]})"
        ) from None
    except RuntimeError as error:
        if "mmap" not in str(error):
            raise ValueError(f"{path} is no file of torch.save: {error}") from None
        found = torch.load(path, map_location="cpu", weights_only=True)
    if not isinstance(found, dict):
        raise ValueError(f"{path} holds a {type(found).__name__}; expected a state_dict, or a dict of several")
    return found


def _find_parts(found: Mapping[str, Any], path: Path) -> Contents:
    """Model, optimizer and step in a dict that may hold them under various names, or be a model's state itself."""
    model = next((found[key] for key in _MODEL_KEYS if isinstance(found.get(key), Mapping)), None)
    if model is None:
        model = {key: value for key, value in found.items() if isinstance(value, Tensor | Stored)}
    if not model:
        raise ValueError(f"{path} holds no model: expected tensors by name, or a dict of them under 'model'")
    given = next((found[key] for key in _OPTIMIZER_KEYS if isinstance(found.get(key), Mapping)), None)
    if given is None and isinstance(found.get("optimizer_states"), list) and found["optimizer_states"]:
        given = found["optimizer_states"][0]  # Lightning's
    optimizer, names = (None, []) if given is None else number_parameters(given, [*model])
    step = next((value for key in _STEP_KEYS if isinstance(value := _read_number(found.get(key)), int)), 0)
    return _make_contents(model, optimizer, names, step)


def _read_number(value: Any) -> int | None:
    if isinstance(value, Tensor | Stored) and value.numel() == 1:
        value = (value if isinstance(value, Tensor) else value.full()).item()
    return int(value) if isinstance(value, int | float) and not isinstance(value, bool) and value >= 0 else None


# Optimizers -----------------------------------------------------------------------------------------------


def number_parameters(optimizer: Mapping[str, Any], order: Sequence[str]) -> tuple[dict[str, Any] | None, list[str]]:
    """The optimizer's state with numbers for parameters, as `optimizer.state_dict()` has it, of one with names; and the
    names by number, if it has them.

    order: of the names, where the groups do not say it.
    """
    if "param_groups" not in optimizer:
        optimizer = _unflatten(optimizer, order)
    groups: list[dict[str, Any]] = [dict(group) for group in optimizer["param_groups"]]
    names = [name for group in groups for name in group["params"]]
    if not groups:
        return None, []
    if all(type(name) is int for name in names):
        return {"state": dict(optimizer.get("state", {})), "param_groups": groups}, []
    numbers = {name: number for number, name in enumerate(names)}
    for group in groups:
        group["params"] = [numbers[name] for name in group["params"]]
    state = {numbers[name]: one for name, one in optimizer.get("state", {}).items() if name in numbers}
    return {"state": state, "param_groups": groups}, names


def _unflatten(optimizer: Mapping[str, Any], order: Sequence[str]) -> dict[str, Any]:
    """Of torch's flattened form, state.NAME.KEY and param_groups.NAME.KEY: one group for each set of settings."""
    parts: dict[str, dict[str, dict[str, Any]]] = {"state": {}, "param_groups": {}}
    for key, value in optimizer.items():
        kind, _, rest = key.partition(".")
        name, _, leaf = rest.rpartition(".")
        if kind in parts and name:
            parts[kind].setdefault(name, {})[leaf] = value
    groups: list[dict[str, Any]] = []
    for name in sorted(parts["param_groups"], key=lambda name: order.index(name) if name in order else len(order)):
        settings = parts["param_groups"][name]
        same = next((group for group in groups if {k: v for k, v in group.items() if k != "params"} == settings), None)
        if same is None:
            groups.append({**settings, "params": [name]})
        else:
            same["params"].append(name)
    return {"state": parts["state"], "param_groups": groups}


def name_parameters(found: Contents) -> dict[str, Any] | None:
    """The optimizer's state with names for parameters, as torch's distributed checkpoints have it."""
    optimizer, model = found.whole["optimizer"], found.whole["model"]
    if optimizer is None:
        return None
    # A file of torch.save has numbers alone: those of the model's parameters in order, as all optimizers have them
    # that are given model.parameters(). Each one's shape is compared.
    names = found.whole.get("optimizer_names") or [name for name in model if not name.endswith(_BUFFERS)]
    numbers = sorted(number for group in optimizer["param_groups"] for number in group["params"])
    named = dict(zip(numbers, names, strict=False))
    for number, state in optimizer["state"].items():
        shapes = {tuple(x.shape) for x in state.values() if isinstance(x, Tensor | Stored) and len(x.shape)}
        owner = model.get(named.get(number, ""))
        if owner is None or len(names) != len(numbers) or (shapes and tuple(owner.shape) not in shapes):
            raise ValueError(
                "the optimizer's parameters have no names there, and are not in the model's order: save it again with "
                "this version, or export the model alone (optimizer=False)"
            )
    groups = [{**group, "params": [named[number] for number in group["params"]]} for group in optimizer["param_groups"]]
    return {"state": {named[number]: dict(one) for number, one in optimizer["state"].items()}, "param_groups": groups}


def fit_names(saved: Mapping[str, Any], mine: Mapping[str, Any]) -> dict[str, Any]:
    """The saved tensors under the model's names: wrappers put a prefix before all of them."""
    found = dict(saved)
    for prefix in _PREFIXES:
        if not found.keys() & mine.keys() and all(name.startswith(prefix) for name in found):
            found = {name.removeprefix(prefix): value for name, value in found.items()}
    return found


def read_all(value: Any, read: Callable[[Stored], Tensor] = Stored.full) -> Any:
    """Nested state with every stored tensor read."""
    if isinstance(value, Stored):
        return read(value)
    if isinstance(value, dict):
        return {key: read_all(x, read) for key, x in value.items()}
    return [read_all(x, read) for x in value] if isinstance(value, list) else value
