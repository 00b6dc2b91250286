"""`un.export`: a checkpoint, or a replica as it is, in the formats of others."""

from __future__ import annotations

import json
import os
import secrets
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import torch

from unisono.launchers.runtime.files import local_path
from unisono.training.checkpoint import safetensors
from unisono.training.checkpoint.checkpoint import save
from unisono.training.checkpoint.dcp import write_dcp
from unisono.training.checkpoint.folder import Contents
from unisono.training.checkpoint.foreign import INDEX, SINGLE, find_format, name_parameters
from unisono.training.checkpoint.plain import METADATA, Exported, export_model, list_entries, read_newest
from unisono.training.checkpoint.savable import Savable, is_savable
from unisono.training.checkpoint.together import do_together
from unisono.units import parse_size

Target = Literal["safetensors", "huggingface", "dcp"]
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".h5", ".msgpack", ".index.json", ".distcp")


def export(
    source: str | os.PathLike[str] | Savable,
    out: str | os.PathLike[str],
    format: Target | None = None,  # noqa: A002 - what it is called everywhere
    *,
    dtype: torch.dtype | None = None,
    like: str | os.PathLike[str] | None = None,
    optimizer: bool = True,
    shard_size: str | int = "5GB",
    overwrite: bool = False,
    average: bool = False,
) -> Exported:
    """Write a model in another format: for Hugging Face, for torch.distributed.checkpoint, or as one safetensors file.

    Args:
        source: A path as `un.load` takes it, of any format, strategy and number of workers: no workers are needed. Or a
            replica: then every rank calls it, with an `out` on a disk that all ranks see.
        format: "huggingface", a folder of safetensors files with their index and the config; "dcp", a folder that
            torch.distributed.checkpoint loads into {"model", "optimizer", "step"}; "safetensors", one file, which is
            the default for a name that ends so.
        dtype: Of the weights with a fraction ("huggingface", "safetensors"): torch.bfloat16, say. Default: as they are.
        like: A Hugging Face folder whose config, tokenizer and other files are copied. Default: the source, if it is
            one; of a replica, what its model's own `config` writes.
        optimizer: Whether "dcp" gets the optimizer too.
        shard_size: The most bytes in a file ("huggingface").
        overwrite: Replace `out` if it exists.
        average: Write the average of the weights that `un.average` kept, instead of the weights.

    It appears when all of it is on the disk; one tensor at a time is in memory.

    Example:
        >>> un.export("run/checkpoint", "my-model", "huggingface", dtype=torch.bfloat16, like="base")  # doctest: +SKIP
    """
    target = local_path(out)
    form = format or ("safetensors" if target.suffix == ".safetensors" else None)
    if form not in ("safetensors", "huggingface", "dcp"):
        raise ValueError(f'format is {format!r} for {target}; expected "huggingface", "dcp" or "safetensors"')
    if form == "dcp" and dtype is not None:
        raise ValueError("dtype is for weights alone; a folder of torch.distributed.checkpoint is to train on from")
    if form == "dcp" and average:
        raise ValueError("average is for weights alone; a folder of torch.distributed.checkpoint is to train on from")
    given: dict[str, Any] = {"dtype": dtype, "like": like, "optimizer": optimizer, "overwrite": overwrite}
    given["average"] = average
    given["shard_bytes"] = parse_size(shard_size, "shard_size")
    if is_savable(source):
        return _export_replica(source, target, form, given)
    return _export(source, target, form, **given)


def _export_replica(replica: Savable, target: Path, form: str, given: dict[str, Any]) -> Exported:
    """By way of a checkpoint beside the target: ranks write their parts of it, and rank 0 reads them one by one."""
    world, done = replica.world, list[Exported]()
    passing = Path(world.gather_objects(str(target.with_name(f".{target.name}-{secrets.token_hex(8)}")))[0])

    def write() -> list[Any] | None:
        if world.rank:
            return None
        done.append(_export(passing, target, form, config=getattr(replica.model, "config", None), **given))
        return list(done[0]._replace(checkpoint="the replica"))

    try:
        save(passing, replica, keep=None)
        found = do_together(world.gather_objects, f"{target} was not written", write)[0]
    finally:
        if world.rank == 0:
            shutil.rmtree(passing, ignore_errors=True)
    return Exported(*found)


def _export(
    source: Any,
    target: Path,
    form: str,
    *,
    shard_bytes: int,
    optimizer: bool,
    like: Any,
    config: Any = None,
    **given: Any,
) -> Exported:
    if form == "safetensors":
        return export_model(source, target, **given)
    if target.exists() and not given["overwrite"]:
        raise FileExistsError(f"{target} exists: give another name, or say that it may be replaced")
    if not target.parent.is_dir():
        raise FileNotFoundError(f"{target.parent} is no folder: make it first")
    found, folder = read_newest(source, lazy=True, stacklevel=5)
    writing = target.with_name(f".{target.name}-{secrets.token_hex(8)}")
    try:
        if form == "dcp":
            tensors = _write_dcp(writing, found, optimizer=optimizer)
        else:
            writing.mkdir()
            entries = list_entries(found, target, folder, given["dtype"], average=given["average"])
            tensors = _write_shards(writing, entries, shard_bytes)
            _copy_config(writing, like or (folder if find_format(folder) == "huggingface" else None), config)
        if target.exists():
            shutil.rmtree(target)
        os.rename(writing, target)
    finally:
        shutil.rmtree(writing, ignore_errors=True)
    size = sum(path.stat().st_size for path in target.iterdir())
    return Exported(str(target), str(folder), found.step, tensors, size)


def _write_dcp(folder: Path, found: Contents, *, optimizer: bool) -> int:
    state: dict[str, Any] = {"model": dict(found.whole["model"]), "step": found.step}
    if optimizer and (named := name_parameters(found)) is not None:
        state["optimizer"] = named
    write_dcp(folder, state)
    return len(state["model"])


def _write_shards(folder: Path, entries: Sequence[safetensors.Entry], shard_bytes: int) -> int:
    """Write safetensors files of at most so many bytes (or one tensor), and the index if there are several."""
    shards = list(_cut(entries, shard_bytes))
    places: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        name = SINGLE if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        safetensors.write_stream(folder / name, shard, metadata=METADATA)
        places |= {entry.name: name for entry in shard}
    if len(shards) > 1:
        index = {"metadata": {"total_size": sum(map(_count_bytes, entries))}, "weight_map": places}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    return len(entries)


def _cut(entries: Sequence[safetensors.Entry], shard_bytes: int) -> Iterator[list[safetensors.Entry]]:
    shard: list[safetensors.Entry] = []
    for entry in entries:
        if shard and sum(map(_count_bytes, [*shard, entry])) > shard_bytes:
            yield shard
            shard = []
        shard.append(entry)
    yield shard


def _count_bytes(entry: safetensors.Entry) -> int:
    return torch.Size(entry.shape).numel() * entry.dtype.itemsize


def _copy_config(folder: Path, like: Any, config: Any) -> None:
    """Copy what is no weights from another folder, or have the model's own config write itself."""
    if like is not None:
        given = local_path(like)
        if not (given / "config.json").is_file():
            raise ValueError(f"{given} has no config.json: like= takes a Hugging Face folder")
        for path in sorted(given.iterdir()):
            if path.is_file() and not path.name.endswith(_WEIGHTS):
                shutil.copyfile(path, folder / path.name)
    elif hasattr(config, "save_pretrained"):
        config.save_pretrained(folder)
