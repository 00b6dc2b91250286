"""A checkpoint's folder: how it is named, written whole or not at all, judged, and read.

path/step-0000000120/manifest.json                     sizes and checksums, world size, step
                     shared.json, shared.safetensors   what rank 0 has, and every rank has alike
                     rank-00000.json, .safetensors     where a rank differs from that, and its own part
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import time
import warnings
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from unisono import tensorfile
from unisono.state import unpack

__all__ = ["Candidate", "Contents", "begin", "candidates", "publish", "read", "remove", "write_rank", "write_shared"]

Tensors = dict[str, torch.Tensor]
Files = dict[str, list[int]]  # name -> size and CRC-32

_FORMAT = 1
_MANIFEST = "manifest.json"


class Candidate(NamedTuple):
    """A folder that may be a checkpoint; `problem` says why it is not."""

    path: Path
    step: int = -1
    serial: int = 0  # counts the saves in a folder: the steps may start again
    problem: str = ""


class Contents(NamedTuple):
    """A checkpoint that was read and is whole; nothing of it is in use yet."""

    step: int
    whole: dict[str, Any]
    same_world: bool
    owns: list[dict[str, Any]]  # of every rank that saved; in the same world, of mine alone
    averaged: list[str]


# Writing --------------------------------------------------------------------------------------------------


def begin(root: Path, step: int) -> Path:
    """A hidden folder to write in; removes what an interrupted save has left."""
    root.mkdir(parents=True, exist_ok=True)
    for stale in [*root.glob(".writing-*"), *root.glob(".removing-*")]:
        shutil.rmtree(stale, ignore_errors=True)
    writing = root / f".writing-{_step_name(step)}-{secrets.token_hex(8)}"
    writing.mkdir()
    return writing


def write_shared(folder: Path, tree: Any, tensors: Tensors) -> Files:
    """What rank 0 has."""
    return _write_pair(folder, "shared", tree, tensors)


def write_rank(
    folder: Path, rank: int, own: tuple[Any, Tensors], *, tree: Any = None, differs: Tensors | None = None
) -> Files:
    """A rank's own part, and where it differs from rank 0: the tree (None: the same) and some tensors."""
    own_tree, own_tensors = own
    differs = differs or {}
    entry = {"own": own_tree, "tree": tree, "differs": list(differs)}
    return _write_pair(folder, _rank_name(rank), entry, own_tensors | differs)


def publish(writing: Path, files: Files, *, step: int, world_size: int) -> Path:
    """Complete a folder with its manifest and give it its name, in one step that happens or does not."""
    root = writing.parent
    manifest = {
        "format": _FORMAT,
        "step": step,
        "serial": max((c.serial for c in candidates(root)), default=0) + 1,
        "world_size": world_size,
        "torch": torch.__version__,
        "written": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "files": files,
    }
    manifest["crc32"] = _crc(manifest)
    tensorfile.write_bytes(writing / _MANIFEST, [json.dumps(manifest, indent=1).encode()])
    _sync_folder(writing)
    target, again = root / _step_name(step), 1
    while target.exists():  # saved at this step before; the former one goes when this is in place
        again += 1
        target = root / f"{_step_name(step)}-{again}"
    os.rename(writing, target)
    _sync_folder(root)
    return target


def remove(newest: Path, *, step: int, keep: int | None) -> None:
    """Remove what `newest` replaces: another checkpoint of its step, and all but `keep` of the whole ones.

    Each leaves under a hidden name first, so that none is ever seen in part.
    """
    former = [c for c in candidates(newest.parent) if not c.problem and c.path != newest]
    same_step = [c.path for c in former if c.step == step]
    others = [c.path for c in former if c.step != step]
    for folder in same_step + ([] if keep is None else others[keep - 1 :]):
        hidden = folder.with_name(f".removing-{folder.name}-{secrets.token_hex(4)}")
        try:
            os.rename(folder, hidden)
            shutil.rmtree(hidden)
        except OSError as error:
            warnings.warn(f"an old checkpoint could not be removed: {error}", stacklevel=2)


def _write_pair(folder: Path, stem: str, tree: Any, tensors: Tensors) -> Files:
    text = json.dumps(tree, separators=(",", ":")).encode()
    plain, packed = f"{stem}.json", f"{stem}.safetensors"
    return {
        plain: list(tensorfile.write_bytes(folder / plain, [text])),
        packed: list(tensorfile.write(folder / packed, tensors)),
    }


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


# Reading --------------------------------------------------------------------------------------------------


def candidates(root: Path) -> list[Candidate]:
    """The checkpoints in a folder, newest save first; those that cannot be judged come before all others.

    A folder that is a checkpoint itself is the only one.
    """
    if (root / _MANIFEST).exists():
        return [_judge(root)]
    folders = [folder for folder in root.glob("step-*") if folder.is_dir()]
    return sorted(map(_judge, folders), key=lambda c: (bool(c.problem), c.serial, c.path.name), reverse=True)


def read(folder: Path, rank: int, world_size: int, strategy: str = "") -> Contents:
    """Read and verify the shared part and mine; in a world of another size, or for another strategy than that which
    saved it, those of all ranks.

    Raises OSError or ValueError, with the reason, for what is not whole.
    """
    manifest = _manifest(folder)
    files: Files = manifest["files"]
    same_world = manifest["world_size"] == world_size
    mine = ("shared.", f"{_rank_name(rank)}.") if same_world and rank else ""  # rank 0 looks after all files
    for name, (size, _) in files.items():
        if not name.startswith(mine):
            continue
        if not (folder / name).exists():
            raise ValueError(f"{name} is missing")
        if (got := (folder / name).stat().st_size) != size:
            raise ValueError(f"{name} has {got} bytes; {size} were written")
    tree, tensors = _read_pair(folder, "shared", files)
    same_world &= tree.get("strategy_type", strategy) == strategy or not strategy
    owns, different = [], []
    for other in [rank] if same_world else range(manifest["world_size"]):
        entry, own_tensors = _read_pair(folder, _rank_name(other), files)
        owns.append(unpack(entry["own"], own_tensors))
        different.append({key: own_tensors[key] for key in entry["differs"]})
        if same_world:
            tree, tensors = entry["tree"] or tree, tensors | different[0]
    averaged = [] if same_world else list(_average(tensors, different))
    return Contents(manifest["step"], unpack(tree, tensors), same_world, owns, averaged)


def _average(tensors: Tensors, different: list[Tensors]) -> Iterator[str]:
    """Put the mean over the ranks that saved in place of rank 0's, where model or optimizer differed.

    Such are parameters between two averagings of local SGD, and the statistics of a BatchNorm that is not
    synchronised. Only numbers with a fraction have a mean; of the others, rank 0's stay.
    """
    for name in sorted({name for part in different for name in part}):
        first, others = tensors.get(name), [part[name] for part in different if name in part]
        if first is None or not name.startswith(("model.", "optimizer.")) or not first.is_floating_point():
            continue
        if any(x.shape != first.shape or x.dtype != first.dtype for x in others):
            continue
        total = first.double() * (len(different) - len(others))  # ranks that do not differ have the first
        for x in others:
            total += x.double()
        tensors[name] = (total / len(different)).to(first.dtype)
        yield name


def _judge(folder: Path) -> Candidate:
    try:
        manifest = _manifest(folder)
    except (OSError, ValueError) as error:
        return Candidate(folder, problem=str(error))
    return Candidate(folder, manifest["step"], manifest["serial"])


def _manifest(folder: Path) -> dict[str, Any]:
    try:
        manifest = json.loads((folder / _MANIFEST).read_bytes())
        claimed = manifest.pop("crc32")
    except FileNotFoundError:
        raise ValueError(f"it has no {_MANIFEST}") from None
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError):
        raise ValueError(f"{_MANIFEST} is damaged") from None
    if claimed != _crc(manifest):
        raise ValueError(f"{_MANIFEST} is damaged: its checksum differs")
    if manifest["format"] != _FORMAT:
        raise ValueError(f"it has format {manifest['format']}, this version reads {_FORMAT}")
    return dict(manifest)


def _read_pair(folder: Path, stem: str, files: Mapping[str, list[int]]) -> tuple[Any, Tensors]:
    text = (folder / f"{stem}.json").read_bytes()
    if zlib.crc32(text) != files[f"{stem}.json"][1]:
        raise ValueError(f"{stem}.json is damaged: its checksum differs")
    tensors, found = tensorfile.read(folder / f"{stem}.safetensors")
    if list(found) != files[f"{stem}.safetensors"]:
        raise ValueError(f"{stem}.safetensors is damaged: its checksum differs")
    return json.loads(text), tensors


def _step_name(step: int) -> str:
    return f"step-{step:010d}"


def _rank_name(rank: int) -> str:
    return f"rank-{rank:05d}"


def _crc(manifest: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps(manifest, sort_keys=True).encode())
