"""A checkpoint's folder: how it is named, written whole or not at all, judged, and read.

path/step-0000000120/manifest.json                     sizes and checksums, world size, step
                     shared.json, shared.safetensors   what rank 0 has, and every rank has alike
                     rank-00000.json, .safetensors     where a rank differs from that, and its own part
                     pieces-00000.safetensors          what a rank holds of tensors that are split over the ranks
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import time
import warnings
import zlib
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from unisono.checkpoint import safetensors, split
from unisono.checkpoint.slices import Piece, Span, Stored
from unisono.packing import unpack

__all__ = [
    "Candidate",
    "Contents",
    "Files",
    "begin_folder",
    "find_candidates",
    "publish_folder",
    "read_folder",
    "remove_replaced",
    "write_rank",
    "write_shared",
]

Tensors = dict[str, torch.Tensor]
Files = dict[str, list[int]]  # name -> size and CRC-32

_FORMAT, _SPLIT_FORMAT = 1, 2  # the second has tensors that are split over the ranks
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
    whole: dict[str, Any]  # read lazily, its model and optimizer have a Stored in place of every tensor
    same_world: bool
    owns: list[dict[str, Any]]  # of every rank that saved; in the same world, of mine alone
    averaged: list[str]


# Writing --------------------------------------------------------------------------------------------------


def begin_folder(root: Path, step: int) -> Path:
    """A hidden folder to write in; removes what an interrupted save has left."""
    root.mkdir(parents=True, exist_ok=True)
    for stale in [*root.glob(".writing-*"), *root.glob(".removing-*")]:
        shutil.rmtree(stale, ignore_errors=True)
    writing = root / f".writing-{_name_step(step)}-{secrets.token_hex(8)}"
    writing.mkdir()
    return writing


def write_shared(folder: Path, tree: Any, tensors: Tensors) -> Files:
    """What rank 0 has."""
    return _write_pair(folder, "shared", tree, tensors)


def write_rank(
    folder: Path,
    rank: int,
    own: tuple[Any, Tensors],
    *,
    tree: Any = None,
    differs: Tensors | None = None,
    pieces: Mapping[str, Piece] | None = None,
    weights: Mapping[str, float] | None = None,
) -> Files:
    """A rank's own part, where it differs from rank 0 (the tree, None: the same, and some tensors), its pieces, and how
    much it counts in the mean of tensors (None: once)."""
    own_tree, own_tensors = own
    differs = differs or {}
    files: Files = {}
    entry = {"own": own_tree, "tree": tree, "differs": list(differs), "weights": dict(weights or {})}
    if pieces is not None:
        written, entry["pieces"] = split.write_pieces(folder, rank, pieces)
        if written:
            files[split.name_file(rank)] = list(written)
    return files | _write_pair(folder, _name_rank(rank), entry, own_tensors | differs)


def publish_folder(writing: Path, files: Files, *, step: int, world_size: int, is_split: bool = False) -> Path:
    """Complete a folder with its manifest and give it its name, in one step that happens or does not."""
    root = writing.parent
    manifest = {
        "format": _SPLIT_FORMAT if is_split else _FORMAT,
        "step": step,
        "serial": max((c.serial for c in find_candidates(root)), default=0) + 1,
        "world_size": world_size,
        "torch": torch.__version__,
        "written": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "files": files,
    }
    manifest["crc32"] = _sum_crc(manifest)
    safetensors.write_bytes(writing / _MANIFEST, [json.dumps(manifest, indent=1).encode()])
    _sync_folder(writing)
    target, again = root / _name_step(step), 1
    while target.exists():  # saved at this step before; the former one goes when this is in place
        again += 1
        target = root / f"{_name_step(step)}-{again}"
    os.rename(writing, target)
    _sync_folder(root)
    return target


def remove_replaced(newest: Path, *, step: int, keep: int | None) -> None:
    """Remove what `newest` replaces: another checkpoint of its step, and all but `keep` of the whole ones.

    Each leaves under a hidden name first, so that none is ever seen in part.
    """
    former = [c for c in find_candidates(newest.parent) if not c.problem and c.path != newest]
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
        plain: list(safetensors.write_bytes(folder / plain, [text])),
        packed: list(safetensors.write(folder / packed, tensors)),
    }


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


# Reading --------------------------------------------------------------------------------------------------


def find_candidates(root: Path) -> list[Candidate]:
    """The checkpoints in a folder, newest save first; those that cannot be judged come before all others.

    A folder that is a checkpoint itself is the only one.
    """
    if (root / _MANIFEST).exists():
        return [_judge(root)]
    folders = [folder for folder in root.glob("step-*") if folder.is_dir()]
    return sorted(map(_judge, folders), key=lambda c: (bool(c.problem), c.serial, c.path.name), reverse=True)


def read_folder(
    folder: Path, rank: int, world_size: int, strategy: str = "", *, lazy: bool = False, owns: bool = True
) -> Contents:
    """Read and verify the shared part and mine; in a world of another size, or for another strategy than that which
    saved it, those of all ranks. `lazy`: of model and optimizer, nothing is kept in memory. Not `owns`: for plain
    PyTorch, which is such another strategy.

    Files that are not read in one go are verified before, each by one of the ranks: all must have returned before
    anything is used. Raises OSError or ValueError, with the reason, for what is not whole.
    """
    manifest = _read_manifest(folder)
    source = _Source(folder, manifest["files"], lazy)
    is_split, saved_by = manifest["format"] == _SPLIT_FORMAT, manifest["world_size"]
    same_world = saved_by == world_size and owns
    all_files = is_split or lazy or not same_world or rank == 0  # rank 0 looks after all of them
    source.check_sizes("" if all_files else ("shared.", f"{_name_rank(rank)}."))
    if is_split or lazy:
        source.verify(rank, world_size)
    tree = source.tree("shared")
    wholes = tree.pop("pieces", {})
    same_world &= tree.get("strategy_type", strategy) == strategy or not strategy
    used = [rank] if same_world else list(range(saved_by))
    entries = {r: source.tree(_name_rank(r)) for r in (range(saved_by) if is_split else used)}
    tensors, kept = source.tensors("shared"), {r: source.tensors(_name_rank(r)) for r in used}
    different = [{key: kept[r][key] for key in entries[r]["differs"]} for r in used]
    averaged = []
    if same_world:
        tree |= entries[rank]["tree"] or {}
        tensors |= different[0]
    else:
        given = {f"model.{name}" for name in tree.get("consolidated", {})}
        weights = [entries[r].get("weights", {}) for r in used]
        averaged = list(_average(tensors, different, weights, {*tree.get("first", ()), *given}))
    if is_split:
        tensors = _find_absent(source, entries, tensors) | tensors
        tensors |= split.find_pieces(folder, wholes, [entries[r].get("pieces", {}) for r in entries])
    own_parts = [unpack(entries[r]["own"], _Full(kept[r])) for r in used] if owns else []
    whole = _assemble(tree, tensors, lazy)
    consolidated = whole.pop("consolidated", {})
    if not same_world:
        whole["model"] |= consolidated
    return Contents(manifest["step"], whole, same_world, own_parts, averaged)


class _Source:
    """The files of one checkpoint."""

    def __init__(self, folder: Path, files: Files, lazy: bool) -> None:
        self.folder, self.files, self.lazy = folder, files, lazy

    def check_sizes(self, start: str | tuple[str, ...]) -> None:
        """The files whose names start so are there, as long as they were."""
        for name, (size, _) in self.files.items():
            if not name.startswith(start):
                continue
            if not (self.folder / name).exists():
                raise ValueError(f"{name} is missing")
            if (got := (self.folder / name).stat().st_size) != size:
                raise ValueError(f"{name} has {got} bytes; {size} were written")

    def verify(self, rank: int, world_size: int) -> None:
        """My share of the files of tensors, by their checksums."""
        names = sorted(name for name in self.files if name.endswith(".safetensors"))
        for name in names[rank::world_size]:
            self._check(name, safetensors.checksum(self.folder / name))

    def tree(self, stem: str) -> dict[str, Any]:
        text = (self.folder / f"{stem}.json").read_bytes()
        self._check(f"{stem}.json", safetensors.Written(len(text), zlib.crc32(text)))
        return dict(json.loads(text))

    def tensors(self, stem: str) -> dict[str, Stored]:
        """In memory, and verified; or where they lie."""
        path = self.folder / f"{stem}.safetensors"
        if self.lazy:
            return safetensors.index(path)
        tensors, found = safetensors.read(path)
        self._check(path.name, found)
        return {name: Stored.of(tensor, name) for name, tensor in tensors.items()}

    def _check(self, name: str, found: safetensors.Written) -> None:
        if list(found) != self.files[name]:
            raise ValueError(f"{name} is damaged: its checksum differs")


class _Full(Mapping[str, torch.Tensor]):
    """Stored tensors, read when asked for."""

    def __init__(self, stored: Mapping[str, Stored]) -> None:
        self._stored = stored

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._stored[name].full()

    def __iter__(self) -> Iterator[str]:
        return iter(self._stored)

    def __len__(self) -> int:
        return len(self._stored)


def _assemble(tree: dict[str, Any], tensors: Mapping[str, Stored], lazy: bool) -> dict[str, Any]:
    if not lazy:
        return dict(unpack(tree, _Full(tensors)))
    large = [key for key in (*split.SPLIT, "consolidated") if key in tree]
    rest = {key: part for key, part in tree.items() if key not in large}
    return dict(unpack(rest, _Full(tensors))) | {key: split.unpack_lazily(tree[key], tensors) for key in large}


def _find_absent(source: _Source, entries: Mapping[int, Any], tensors: Mapping[str, Stored]) -> dict[str, Stored]:
    """Of tensors that rank 0 did not have: those of the first rank that had them."""
    found: dict[str, Stored] = {}
    for rank, entry in entries.items():
        if names := [name for name in entry["differs"] if name not in tensors and name not in found]:
            own = source.tensors(_name_rank(rank))
            found |= {name: own[name] for name in names}
    return found


def _average(
    tensors: dict[str, Stored],
    different: list[dict[str, Stored]],
    weights: list[dict[str, float]],
    left_out: Collection[str],
) -> Iterator[str]:
    """Put the mean over the ranks that saved in place of rank 0's, where model or optimizer differed, each rank counted
    by its weight (where it has none, once); not of those `left_out`.

    Such are parameters between two averagings of local SGD, and the statistics of a BatchNorm that is not
    synchronised. Only numbers with a fraction have a mean; of the others, rank 0's stay.
    """
    for name in sorted({name for part in different for name in part}):
        first, counted = tensors.get(name), [part.get(name, 1.0) for part in weights]
        if first is None or not name.startswith(("model.", "optimizer.", "consolidated.")) or name in left_out:
            continue
        if not first.dtype.is_floating_point:
            continue
        others = {r: part[name] for r, part in enumerate(different) if name in part}
        if any(x.shape != first.shape or x.dtype != first.dtype for x in others.values()):
            continue
        tensors[name] = _make_mean(first, others, counted if any(counted) else [1.0] * len(counted))
        yield name


def _make_mean(first: Stored, others: Mapping[int, Stored], weights: list[float]) -> Stored:
    """The mean over all ranks, by their weights; those that are not among the others have the first."""
    alike = sum(weight for rank, weight in enumerate(weights) if rank not in others)

    def read_mean(start: int, stop: int) -> torch.Tensor:
        total = torch.zeros(stop - start, dtype=torch.float64)
        for weight, x in ((alike, first), *((weights[rank], x) for rank, x in others.items())):
            if weight:  # else it may hold what is not finite
                total += x.read(start, stop).double() * weight
        return (total / sum(weights)).to(first.dtype)

    return Stored(first.shape, first.dtype, [Span(0, first.numel(), read_mean)], first.name)


def _judge(folder: Path) -> Candidate:
    try:
        manifest = _read_manifest(folder)
    except (OSError, ValueError) as error:
        return Candidate(folder, problem=str(error))
    return Candidate(folder, manifest["step"], manifest["serial"])


def _read_manifest(folder: Path) -> dict[str, Any]:
    try:
        manifest = json.loads((folder / _MANIFEST).read_bytes())
        claimed = manifest.pop("crc32")
    except FileNotFoundError:
        raise ValueError(f"it has no {_MANIFEST}") from None
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError):
        raise ValueError(f"{_MANIFEST} is damaged") from None
    if claimed != _sum_crc(manifest):
        raise ValueError(f"{_MANIFEST} is damaged: its checksum differs")
    if manifest["format"] not in (_FORMAT, _SPLIT_FORMAT):
        raise ValueError(f"it has format {manifest['format']}, this version reads {_FORMAT} and {_SPLIT_FORMAT}")
    return dict(manifest)


def _name_step(step: int) -> str:
    return f"step-{step:010d}"


def _name_rank(rank: int) -> str:
    return f"rank-{rank:05d}"


def _sum_crc(manifest: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps(manifest, sort_keys=True).encode())
