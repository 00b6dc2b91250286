"""Checkpoints outside of training: full tensors for plain PyTorch, and models exported as safetensors files."""

from __future__ import annotations

import os
import secrets
import warnings
from collections import OrderedDict
from pathlib import Path
from typing import Any, NamedTuple

from unisono.launchers.runtime.files import local_path
from unisono.training.checkpoint import safetensors
from unisono.training.checkpoint.checkpoint import find_newest, warn_of_damage
from unisono.training.checkpoint.folder import Contents, read_folder
from unisono.training.checkpoint.slices import Stored
from unisono.world import World

__all__ = ["Exported", "export_model", "read_checkpoint"]


class Exported(NamedTuple):
    """What `export_model` wrote, and the checkpoint that it was read from."""

    path: str
    checkpoint: str
    step: int
    tensors: int
    size_bytes: int


def read_checkpoint(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Model and optimizer of the newest whole checkpoint in the folder `path` (or of `path` itself), in full.

    Needs no world and no replica; the checkpoint may be of any strategy, placement and number of workers. Tensors
    that differed between the ranks become their mean, with a warning. Everything lies in this process's memory.

    Returns {"model": for `model.load_state_dict`, "optimizer": for `optimizer.load_state_dict`, "step": int}.

    Raises:
        FileNotFoundError: there is no checkpoint.
        CheckpointError: there are some, and none is whole.

    Example:
        >>> import tempfile, torch, unisono as un
        >>> model = torch.nn.Linear(2, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> replica = un.parallel(model, optimizer, "allreduce", world=un.World())
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     _ = un.save(folder, replica)
        ...     state = un.read_checkpoint(folder)
        >>> torch.nn.Linear(2, 1).load_state_dict(state["model"])
        <All keys matched successfully>
        >>> state["optimizer"]["param_groups"][0]["lr"], state["step"]
        (0.1, 0)
    """
    found, _ = _read(path, lazy=False, stacklevel=4)
    model = OrderedDict(found.whole["model"])
    model._metadata = found.whole["versions"]  # type: ignore[attr-defined]
    return {"model": model, "optimizer": found.whole["optimizer"], "step": found.step}


def export_model(path: str | os.PathLike[str], out: str | os.PathLike[str], *, overwrite: bool = False) -> Exported:
    """Write the model of the newest whole checkpoint at `path` as the safetensors file `out`, names as in its
    `state_dict`.

    The tensors stream from the one to the other: memory stays at some ten MiB whatever the model's size. The file
    appears when all of it is on the disk. A tensor with several names is written under each of them. What is no
    tensor (a module's extra state) has no place in such a file and is left out, with a warning.

    Raises:
        ValueError: `out` does not end in ".safetensors", or a tensor's dtype is none of that format's.
        FileExistsError: `out` exists, and not `overwrite`.
    """
    target = local_path(out)
    _check_target(target, overwrite=overwrite)
    found, folder = _read(path, lazy=True, stacklevel=4)
    model: dict[str, Any] = found.whole["model"]
    stored = {name: value for name, value in model.items() if isinstance(value, Stored)}
    if left := [name for name in model if name not in stored]:
        warnings.warn(f"{target} is without {', '.join(left)}: no tensors, they stay in {folder}", stacklevel=2)
    for name, value in stored.items():
        if not safetensors.is_storable(value.dtype):
            raise ValueError(
                f"{name} is of {value.dtype}, which a safetensors file has no name for; "
                "un.read_checkpoint gives it in Python"
            )
    entries = [safetensors.Entry(name, x.dtype, x.shape, x.chunks()) for name, x in stored.items()]
    writing = target.with_name(f".{target.name}-{secrets.token_hex(8)}")
    try:
        metadata = {"format": "pt", "step": str(found.step)}  # readers of such files ask for "format"
        size_bytes, _ = safetensors.write_stream(writing, entries, metadata=metadata)
        os.replace(writing, target)
    finally:
        writing.unlink(missing_ok=True)
    return Exported(str(target), str(folder), found.step, len(stored), size_bytes)


def _read(path: str | os.PathLike[str], *, lazy: bool, stacklevel: int) -> tuple[Contents, Path]:
    root = local_path(path)
    found, folder, skipped = find_newest(root, World(), lambda folder: read_folder(folder, 0, 1, lazy=lazy, owns=False))
    warn_of_damage(found, folder, skipped, stacklevel=stacklevel)
    return found, folder


def _check_target(target: Path, *, overwrite: bool) -> None:
    if target.suffix in (".pt", ".pth", ".bin"):
        raise ValueError(
            f"{target} would be a pickle, which can run code when it is read: name it {target.stem}.safetensors. "
            "If you must: torch.save(un.read_checkpoint(path), file) in Python"
        )
    if target.suffix != ".safetensors":
        raise ValueError(f"{target} should end in .safetensors, the form that is written")
    if target.exists() and not overwrite:
        raise FileExistsError(f"{target} exists: give another name, or say that it may be replaced")
    if not target.parent.is_dir():
        raise FileNotFoundError(f"{target.parent} is no folder: make it first")
