"""A checkpoint's folder: its names, how it is written whole or not at all, checked, and read.

path/step-0000000120/manifest.json                     sizes and checksums, world size, step
                     shared.json, shared.safetensors   the state of rank 0, which most ranks share
                     rank-00000.json, .safetensors     what differs on a rank from that, and its own part
                     pieces-00000.safetensors          what a rank holds of tensors that are split over the ranks
"""

from __future__ import annotations

import fcntl
import io
import json
import os
import secrets
import shutil
import time
import warnings
import zlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch

from unisono.packing import unpack
from unisono.training.checkpoint import safetensors
from unisono.training.checkpoint.slices import Piece, Span, Stored

T = TypeVar("T")
Tensors = dict[str, torch.Tensor]
Files = dict[str, list[int]]  # name -> size and CRC-32

_FORMAT, _SPLIT_FORMAT = 1, 2  # the second has tensors that are split over the ranks
_MANIFEST, _LOCK = "manifest.json", ".lock"
_MAX_NUMBER = 2**63 - 1
_MAX_MANIFEST_BYTES = 64 << 20  # some hundred thousand files


class Candidate(NamedTuple):
    """A folder that looks like a checkpoint; `problem` says why it is none."""

    path: Path
    step: int = -1
    serial: int = 0  # counts the saves in a folder: the steps may start again
    problem: str = ""


class Contents(NamedTuple):
    """A checkpoint that was read and verified."""

    step: int
    whole: dict[str, Any]  # read lazily, its model and optimizer have a Stored in place of every tensor
    same_world: bool
    owns: list[dict[str, Any]]  # the own parts of every rank that saved; in the same world, this rank's alone
    averaged: list[str]


# Writing --------------------------------------------------------------------------------------------------


def begin_folder(root: Path, step: int) -> tuple[Path, io.FileIO]:
    """A hidden folder to write in, and its lock, to be closed when the save is over.

    Removes what interrupted saves have left, but nothing that another run is writing.
    """
    root.mkdir(parents=True, exist_ok=True)
    for left in [*root.glob(".removing-*"), *(path for path in root.glob(".writing-*") if not _is_in_use(path))]:
        shutil.rmtree(left, ignore_errors=True)
    making = root / f".making-{secrets.token_hex(8)}"
    making.mkdir()
    lock = io.FileIO(making / _LOCK, "x")
    try:
        with suppress(OSError):  # a disk without locks
            fcntl.flock(lock, fcntl.LOCK_EX)
        return making.rename(root / f".writing-{_name_step(step)}-{secrets.token_hex(8)}"), lock
    except BaseException:
        lock.close()
        shutil.rmtree(making, ignore_errors=True)
        raise


def _is_in_use(folder: Path) -> bool:
    """Whether another run is writing this folder. On a disk without locks: whether it is less than an hour old."""
    try:
        with io.FileIO(folder / _LOCK, "r+") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        warnings.warn(
            f"another run is saving into {folder.parent}: un.load takes the newest checkpoint of either, and keep= "
            "counts those of both. Give each run a folder of its own",
            stacklevel=2,
        )
    except OSError:
        with suppress(OSError):
            return time.time() - folder.stat().st_mtime < 3600
    else:
        return False
    return True


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
    """Write what belongs to one rank.

    own: its own part.
    tree, differs: the tree (None: as rank 0's) and the tensors that differ from rank 0's.
    pieces: what it holds of split tensors.
    weights: how much it counts in the mean of tensors; 1 unless named.
    """
    own_tree, own_tensors = own
    differs = differs or {}
    files: Files = {}
    entry = {"own": own_tree, "tree": tree, "differs": list(differs), "weights": dict(weights or {})}
    if pieces is not None:
        written, entry["pieces"] = safetensors.write_pieces(folder, rank, pieces)
        if written:
            files[safetensors.name_file(rank)] = list(written)
    return files | write_pair(folder, _name_rank(rank), entry, own_tensors | differs)


def publish_folder(writing: Path, files: Files, *, step: int, world_size: int, is_split: bool = False) -> Path:
    """Complete a folder with its manifest, and give it its name in one atomic step."""
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
    with suppress(OSError):  # after the rename: a hidden folder without its lock would be taken for another run's
        (target / _LOCK).unlink()
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


def write_pair(folder: Path, stem: str, tree: Any, tensors: Tensors) -> Files:
    """Write a tree and its tensors: as "shared" those of rank 0."""
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
    """Read and verify the shared part and this rank's own; if another strategy or a world of another size saved it, the
    own parts of all ranks.

    lazy: keep nothing of model and optimizer in memory.
    owns: False leaves ranks' own parts out, for plain PyTorch, which counts as another strategy.

    Files that are not read in one go are verified first, each by one of the ranks: all ranks must have returned before
    anything is used. Raises OSError or ValueError, with the reason, for a checkpoint that is not whole.
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
    wholes = _check_wholes(tree.pop("pieces", {}))
    same_world &= tree.get("strategy_type", strategy) == strategy or not strategy
    used = [rank] if same_world else list(range(saved_by))
    entries = {r: _check_entry(source.tree(_name_rank(r)), r) for r in (range(saved_by) if is_split else used)}
    tensors, kept = source.tensors("shared"), {r: source.tensors(_name_rank(r)) for r in used}
    different = [_pick(kept[r], entries[r]["differs"], r) for r in used]
    averaged = []
    if same_world:
        tree |= entries[rank]["tree"] or {}
        tensors |= different[0]
    else:
        weights = [entries[r]["weights"] for r in used]
        averaged = list(_average(tensors, different, weights, _find_given(tree)))
    if is_split:
        tensors = _find_absent(source, entries, tensors) | tensors
        tensors |= safetensors.find_pieces(folder, wholes, [entries[r]["pieces"] for r in entries])
    own_parts = [_unpack_own(entries[r]["own"], kept[r], r) for r in used] if owns else []
    with _naming("shared.json"):
        whole = _check_whole(_assemble(tree, tensors, lazy))
        consolidated = _expect(dict, whole.pop("consolidated", {}), "consolidated")
    if not same_world:
        whole["model"] |= consolidated
    return Contents(manifest["step"], whole, same_world, own_parts, averaged)


class _Source:
    """The files of one checkpoint."""

    def __init__(self, folder: Path, files: Files, lazy: bool) -> None:
        self.folder, self.files, self.lazy = folder, files, lazy

    def check_sizes(self, start: str | tuple[str, ...]) -> None:
        """Check that the files whose names start so exist, with the size that was written."""
        for name, (size, _) in self.files.items():
            if not name.startswith(start):
                continue
            if not (self.folder / name).exists():
                raise ValueError(f"{name} is missing")
            if (got := (self.folder / name).stat().st_size) != size:
                raise ValueError(f"{name} has {got} bytes; {size} were written")

    def verify(self, rank: int, world_size: int) -> None:
        """Check this rank's share of the files of tensors by their checksums."""
        names = sorted(name for name in self.files if name.endswith(".safetensors"))
        for name in names[rank::world_size]:
            self._check(name, safetensors.checksum(self.folder / name))

    def tree(self, stem: str) -> dict[str, Any]:
        name = f"{stem}.json"
        text = _read_text(self.folder / name)
        self._check(name, safetensors.Written(len(text), zlib.crc32(text)))
        with _naming(name):
            return _expect(dict, json.loads(text), "the whole")

    def tensors(self, stem: str) -> dict[str, Stored]:
        """The tensors of a file: in memory and verified, or if lazy as references into the file."""
        path = self.folder / f"{stem}.safetensors"
        if self.lazy:
            return safetensors.index(path)
        tensors, found = safetensors.read(path)
        self._check(path.name, found)
        return {name: Stored.of(tensor, name) for name, tensor in tensors.items()}

    def _check(self, name: str, found: safetensors.Written) -> None:
        if name not in self.files:
            raise ValueError(f"{name} is not among the files of {_MANIFEST}")
        if list(found) != self.files[name]:
            raise ValueError(f"{name} is damaged: its checksum differs")


class _Full(dict[str, Any]):
    """Stored tensors by name, each read when it is asked for."""

    def __getitem__(self, name: str) -> torch.Tensor:
        tensor: torch.Tensor = super().__getitem__(name).full()
        return tensor


def _assemble(tree: dict[str, Any], tensors: Mapping[str, Stored], lazy: bool) -> dict[str, Any]:
    if not lazy:
        return _expect(dict, unpack(tree, _Full(tensors)), "the whole")
    large = [*safetensors.SPLIT, *(["consolidated"] if "consolidated" in tree else [])]
    rest = {key: part for key, part in tree.items() if key not in large}
    lazily = {key: safetensors.unpack_lazily(_get(tree, key), tensors) for key in large}
    return _expect(dict, unpack(rest, _Full(tensors)), "the whole") | lazily


def _find_absent(source: _Source, entries: Mapping[int, Any], tensors: Mapping[str, Stored]) -> dict[str, Stored]:
    """Tensors that rank 0 did not have, from the first rank that had them."""
    found: dict[str, Stored] = {}
    for rank, entry in entries.items():
        if names := [name for name in entry["differs"] if name not in tensors and name not in found]:
            found |= _pick(source.tensors(_name_rank(rank)), names, rank)
    return found


def _average(
    tensors: dict[str, Stored],
    different: list[dict[str, Stored]],
    weights: list[dict[str, float]],
    left_out: Collection[str],
) -> Iterator[str]:
    """Replace tensors of model and optimizer that differed between the ranks by their mean; yields their names.

    Each rank counts by its weight (1 unless named). Tensors in `left_out`, and those of whole numbers, stay rank 0's.
    Ranks differ, for example, between two averagings of local SGD, or in the statistics of an unsynchronised BatchNorm.
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
    """The weighted mean over all ranks; a rank that is not in `others` has the values of `first`."""
    alike = sum(weight for rank, weight in enumerate(weights) if rank not in others)

    def read_mean(start: int, stop: int) -> torch.Tensor:
        total = torch.zeros(stop - start, dtype=torch.float64)
        for weight, x in ((alike, first), *((weights[rank], x) for rank, x in others.items())):
            if weight:  # values without weight may be NaN, which times 0 is NaN
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
        text = _read_text(folder / _MANIFEST, _MAX_MANIFEST_BYTES)
    except FileNotFoundError:
        raise ValueError(f"it has no {_MANIFEST}") from None
    try:
        manifest = json.loads(text)
        claimed = manifest.pop("crc32")
        same = claimed == _sum_crc(manifest)
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError):
        raise ValueError(f"{_MANIFEST} is damaged") from None
    if not same:
        raise ValueError(f"{_MANIFEST} is damaged: its checksum differs")
    with _naming(_MANIFEST):
        form = _expect_number(manifest, "format")
        if form not in (_FORMAT, _SPLIT_FORMAT):
            raise ValueError(f"it has format {form}, this version reads {_FORMAT} and {_SPLIT_FORMAT}")
        for name, least in (("step", 0), ("serial", 0), ("world_size", 1)):
            _expect_number(manifest, name, least)
        files = _expect(dict, _get(manifest, "files"), "files")
        for name, entry in files.items():
            if name == ".." or Path(name).name != name or not _is_numbers(entry, 2):
                raise ValueError(f"expected a file's name with its size and checksum, got {name[:200]!r}")
        if manifest["world_size"] > len(files):
            raise ValueError(f"{manifest['world_size']} workers have written {len(files)} files")
    return dict(manifest)


def _read_text(path: Path, most: int = _MAX_NUMBER) -> bytes:
    file, size = safetensors.open_file(path)
    with file:
        if size > most:
            raise ValueError(f"{path.name} has {size} bytes; at most {most} are read")
        return file.read()


# Judging --------------------------------------------------------------------------------------------------
#
# A checkpoint may come from anywhere. Whatever `save` would not have written is refused before it is used, by a
# ValueError that names the file.


@contextmanager
def _naming(file: str) -> Iterator[None]:
    """Turn errors inside the block into a ValueError that names the file."""
    try:
        yield
    except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RuntimeError) as error:
        text = str(error) if isinstance(error, ValueError) else repr(error)
        raise ValueError(text if file in text else f"{file} is not as it was written: {text}") from error


def _expect(kind: type[T], value: Any, what: str) -> T:
    if not isinstance(value, kind):
        raise ValueError(f"{what[:200]} should be a {kind.__name__}, not a {type(value).__name__}")
    return value


def _get(tree: Mapping[str, Any], name: str) -> Any:
    if name not in tree:
        raise ValueError(f"it has no {name!r}")
    return tree[name]


def _expect_number(tree: Mapping[str, Any], name: str, least: int = 0) -> int:
    value = _get(tree, name)
    if type(value) is not int or not least <= value <= _MAX_NUMBER:
        raise ValueError(f"{name} should be a whole number from {least} on, below 2^63")
    return value


def _is_numbers(value: Any, count: int) -> bool:
    is_list = isinstance(value, list) and len(value) == count
    return is_list and all(type(n) is int and 0 <= n <= _MAX_NUMBER for n in value)


def _check_wholes(wholes: Any) -> dict[str, Sequence[Any]]:
    """Check the list of split tensors: a dtype and a shape by name."""
    with _naming("shared.json"):
        for name, whole in _expect(dict, wholes, "pieces").items():
            if not isinstance(whole, list) or len(whole) != 2:
                raise ValueError(f"the piece {name[:200]!r} should have a dtype and a shape")
    return dict(wholes)


def _check_entry(entry: dict[str, Any], rank: int) -> dict[str, Any]:
    """Check the contents of a rank's own file."""
    with _naming(f"{_name_rank(rank)}.json"):
        _get(entry, "own")
        if (tree := _get(entry, "tree")) is not None:
            _expect(dict, tree, "tree")
        for name in _expect(list, _get(entry, "differs"), "differs"):
            _expect(str, name, "a name in differs")
        weights = _expect(dict, entry.get("weights", {}), "weights")
        for weight in weights.values():
            if type(weight) not in (int, float) or not 0 <= weight <= _MAX_NUMBER:
                raise ValueError("a weight should be a number from 0 on")
        pieces = _expect(dict, entry.get("pieces", {}), "pieces")
        for name, spans in pieces.items():
            if not all(_is_numbers(span, 2) for span in _expect(list, spans, name)):
                raise ValueError(f"the piece {name[:200]!r} should have a start and a stop for each span")
    return entry | {"pieces": pieces, "weights": weights}


def _find_given(tree: Mapping[str, Any]) -> set[str]:
    """The names of the tensors that are not averaged: consolidated ones, and those taken from the first rank."""
    with _naming("shared.json"):
        first = [_expect(str, name, "a name in first") for name in _expect(list, tree.get("first", []), "first")]
        consolidated = _expect(dict, tree.get("consolidated", {}), "consolidated")
    return {*first, *(f"model.{name}" for name in consolidated)}


def _pick(stored: Mapping[str, Stored], names: Sequence[str], rank: int) -> dict[str, Stored]:
    if absent := [name for name in names if name not in stored]:
        raise ValueError(f"{_name_rank(rank)}.safetensors has no tensor {absent[0][:200]!r}")
    return {name: stored[name] for name in names}


def _unpack_own(tree: Any, kept: Mapping[str, Stored], rank: int) -> dict[str, Any]:
    with _naming(f"{_name_rank(rank)}.json"):
        own = _expect(dict, unpack(tree, _Full(kept)), "own")
        for name in ("local", "rng"):
            _get(own, name)
    return own


def _check_whole(whole: dict[str, Any]) -> dict[str, Any]:
    """Check that everything `load` and `read_checkpoint` use is there, and of the right type."""
    for name in ("model", "versions", "optimizer", "shards", "ledger"):
        _expect(dict, _get(whole, name), name)
    for name in ("optimizer_type", "strategy_type"):
        _expect(str, _get(whole, name), name)
    for name in ("strategy", "extra"):
        _get(whole, name)
    if not all(isinstance(name, str) for name in whole["model"]):
        raise ValueError("the names in model should be text")
    _expect(dict, _get(whole["optimizer"], "state"), "the optimizer's state")
    for group in _expect(list, _get(whole["optimizer"], "param_groups"), "param_groups"):
        _expect(list, _get(_expect(dict, group, "a group of parameters"), "params"), "params")
    for name, state in whole["shards"].items():
        for number in ("epoch", "batch"):
            _expect_number(_expect(dict, state, f"shard {name}"), number)
        for other in ("samples", "settings"):
            _get(state, other)
        _expect(int, _get(state, "seed"), "seed")
        _expect(list, state.get("counts", []), "counts")
    _expect_number(whole["ledger"], "step_count")
    return whole


def _name_step(step: int) -> str:
    return f"step-{step:010d}"


def _name_rank(rank: int) -> str:
    return f"rank-{rank:05d}"


def _sum_crc(manifest: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps(manifest, sort_keys=True).encode())
