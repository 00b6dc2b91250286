"""Checkpoints outside of training: full tensors for plain PyTorch, and models exported as safetensors files."""

from __future__ import annotations

import os
import secrets
import warnings
from collections import OrderedDict
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from unisono.launchers.runtime.files import local_path
from unisono.methods.joined_optimizers import split_state
from unisono.training.checkpoint import safetensors
from unisono.training.checkpoint.folder import Contents, read_folder
from unisono.training.checkpoint.foreign import find_format, read_all, read_foreign
from unisono.training.checkpoint.remote import Place, find_place
from unisono.training.checkpoint.slices import Stored
from unisono.training.checkpoint.together import CheckpointError, find_newest, shorten, warn_of_damage
from unisono.world import World

METADATA = {"format": "pt"}  # readers of such files ask for it


class Exported(NamedTuple):
    """What `export_model` wrote, and the checkpoint that it was read from."""

    path: str
    checkpoint: str
    step: int
    tensors: int
    size_bytes: int


def read_checkpoint(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Model and optimizer of the newest intact checkpoint in the folder `path` (or of `path` itself), in full.

    `path` may also be of another format: see `un.load`. Needs no world and no replica; the checkpoint may be of any
    strategy, placement and number of workers. Tensors that differed between the ranks become their mean, with a
    warning. Everything lies in this process's memory.

    Returns {"model": for `model.load_state_dict`, "optimizer": for `optimizer.load_state_dict` (None if it is missing),
    "step": int}; if it was saved with several optimizers, "optimizers" in place of "optimizer": a list of their states,
    in their order; if the run kept an average of its weights (`un.average`), also "average": the same as "model", with
    these weights.

    Raises:
        FileNotFoundError: there is no checkpoint.
        CheckpointError: no checkpoint is intact.

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
    found, _ = read_newest(path, lazy=False, stacklevel=4)
    model = OrderedDict(found.whole["model"])
    model._metadata = found.whole["versions"]  # type: ignore[attr-defined]
    optimizer, counts = found.whole["optimizer"], found.whole.get("optimizer_groups", [1])
    made: dict[str, Any] = {"model": model}
    made |= {"optimizers": split_state(optimizer, counts)} if len(counts) > 1 else {"optimizer": optimizer}
    if found.whole.get("average") is not None:
        made["average"] = OrderedDict(_find_average(found))
        made["average"]._metadata = found.whole["versions"]
    return {**made, "step": found.step}


def export_model(
    path: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    dtype: torch.dtype | None = None,
    overwrite: bool = False,
    average: bool = False,
) -> Exported:
    """Write the model of the newest intact checkpoint at `path` as the safetensors file `out`, names as in its
    `state_dict`.

    The tensors stream from the one to the other: memory stays at some ten MiB whatever the model's size. The file
    appears when all of it is on the disk. A tensor with several names is written under each of them. What is no
    tensor (a module's extra state) has no place in such a file and is left out, with a warning.

    average: with the average of the weights that the run kept (`un.average`), in the precision of that; buffers are
        the model's.

    Raises:
        ValueError: `out` does not end in ".safetensors", a tensor's dtype is none of that format's, or the checkpoint
            has no average.
        FileExistsError: `out` exists, and not `overwrite`.
    """
    target = local_path(out)
    _check_target(target, overwrite=overwrite)
    found, folder = read_newest(path, lazy=True, stacklevel=4)
    entries = list_entries(found, target, folder, dtype, average=average)
    writing = target.with_name(f".{target.name}-{secrets.token_hex(8)}")
    try:
        size_bytes, _ = safetensors.write_stream(writing, entries, metadata={**METADATA, "step": str(found.step)})
        os.replace(writing, target)
    finally:
        writing.unlink(missing_ok=True)
    return Exported(str(target), str(folder), found.step, len(entries), size_bytes)


def list_entries(
    found: Contents, target: Path, folder: Place, dtype: torch.dtype | None = None, *, average: bool = False
) -> list[safetensors.Entry]:
    """The model's tensors as safetensors files take them; those with a fraction in another dtype, if one is given."""
    model: dict[str, Any] = found.whole["model"] if not average else _find_average(found)
    stored = {name: value for name, value in model.items() if isinstance(value, Stored)}
    if left := [name for name in model if name not in stored]:
        warnings.warn(f"{target} is without {', '.join(left)}: no tensors, they stay in {folder}", stacklevel=3)
    entries = []
    for name, x in stored.items():
        kind = dtype if dtype is not None and x.dtype.is_floating_point else x.dtype
        if not safetensors.is_storable(kind):
            raise ValueError(
                f"{name} is of {kind}, which a safetensors file has no name for; un.read_checkpoint gives it in Python"
            )
        entries.append(safetensors.Entry(name, kind, x.shape, partial(_convert, x, kind)))
    return entries


def _convert(stored: Stored, dtype: torch.dtype) -> Iterator[torch.Tensor]:
    return (chunk.to(dtype) for chunk in stored.chunks())


def read_newest(path: str | os.PathLike[str], *, lazy: bool, stacklevel: int) -> tuple[Contents, Place]:
    """The newest intact checkpoint at a path, or a checkpoint there in another format."""
    root = find_place(path)
    if isinstance(root, Path) and (kind := find_format(root)) != "unisono":
        try:
            contents = read_foreign(root, kind)
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{root} could not be read: {shorten(error)}") from error
        return contents if lazy else contents._replace(whole=read_all(contents.whole)), root
    found, folder, skipped = find_newest(root, World(), lambda folder: read_folder(folder, 0, 1, lazy=lazy, owns=False))
    warn_of_damage(found, folder, skipped, stacklevel=stacklevel)
    return found, folder


def _find_average(found: Contents) -> dict[str, Any]:
    """The model with the average of its weights; before the first step that counted, that is the model."""
    saved = found.whole.get("average")
    if saved is None:
        raise ValueError("the checkpoint holds no average of the weights: the run did not call un.average")
    return {
        **found.whole["model"],
        **(saved["values"] if saved["updates"] or saved["decay"] == "schedule_free" else {}),
    }


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
