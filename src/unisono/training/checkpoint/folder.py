"""A checkpoint's folder: its names, how it is written whole or not at all, checked, and read.

path/step-0000000120/manifest.json                     sizes and checksums, world size, step: written last
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
import weakref
import zlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch

from unisono.packing import unpack
from unisono.training.checkpoint import safetensors
from unisono.training.checkpoint.judging import (
    MAX_NUMBER,
    NewerFormat,
    check_entry,
    check_whole,
    check_wholes,
    expect,
    expect_number,
    find_given,
    get,
    is_numbers,
    name_rank,
    naming,
)
from unisono.training.checkpoint.remote import Place, RemotePath
from unisono.training.checkpoint.slices import Piece, Span, Stored

Tensors = dict[str, torch.Tensor]
Files = dict[str, list[int]]  # name -> size and CRC-32

_AVERAGED = ("model.", "optimizer.", "consolidated.", "average.")  # where tensors that ranks have for themselves lie
_FORMAT, _SPLIT_FORMAT = 1, 2  # the second has tensors that are split over the ranks
_MANIFEST, _LOCK, _BEGUN = "manifest.json", ".lock", ".begun"
_LEFT_OVER_S = 24 * 3600.0  # at an address there are no locks: a save begun so long ago is not under way any more
_RUN = secrets.token_hex(8)  # of this process, in the manifests of what it saves
_first_saves: dict[str, tuple[int, float]] = {}  # by folder: the serial before this run's first save there, and when
_MAX_MANIFEST_BYTES = 64 << 20  # some hundred thousand files


class Candidate(NamedTuple):
    """A folder that looks like a checkpoint; `problem` says why it is none."""

    path: Any  # a Place
    step: int = -1
    serial: int = 0  # counts the saves in a folder: the steps may start again
    problem: str = ""
    run: str = ""  # which process saved it, and since when it saves into the folder
    since: float = 0.0
    written_as: str = ""  # the name of its folder before it was complete
    is_newer: bool = False  # of a later version
    is_absent: bool = False  # it has no manifest


class NoManifest(ValueError):
    """A folder that is no checkpoint, or not yet."""


class SharedByRuns(Exception):
    """Another run saves into the same folder; this run's checkpoint has been written all the same."""


class Contents(NamedTuple):
    """A checkpoint that was read and verified."""

    step: int
    whole: dict[str, Any]  # read lazily, its model and optimizer have a Stored in place of every tensor
    same_world: bool
    owns: list[dict[str, Any]]  # the own parts of every rank that saved; in the same world, this rank's alone
    averaged: list[str]


# Writing --------------------------------------------------------------------------------------------------


def begin_folder(root: Place, step: int) -> tuple[Place, io.FileIO | None]:
    """A folder to write in that is no checkpoint yet (a hidden one on a disk), and its lock, to be closed when the save
    is over.

    Removes what interrupted saves have left, but nothing that another run is writing.
    """
    if str(root) not in _first_saves:
        _first_saves[str(root)] = max((c.serial for c in find_candidates(root)), default=0), time.time()
    if isinstance(root, RemotePath):
        return _begin_remote(root, step), None
    root.mkdir(parents=True, exist_ok=True)
    for left in root.glob(".removing-*"):
        shutil.rmtree(left, ignore_errors=True)
    for left in [*root.glob(".making-*"), *root.glob(".writing-*")]:
        _remove_abandoned(left)
    while True:
        making = root / f".making-{secrets.token_hex(8)}"
        making.mkdir()
        try:
            lock = take_lock(making / _LOCK)
        except (FileExistsError, FileNotFoundError):  # another run took it for abandoned
            continue
        try:
            return making.rename(root / f".writing-{_name_step(step)}-{secrets.token_hex(8)}"), lock
        except FileNotFoundError:  # likewise
            lock.close()
        except BaseException:
            lock.close()
            shutil.rmtree(making, ignore_errors=True)
            raise


def take_lock(path: Path) -> io.FileIO:
    """Lock a new file until it is closed or this process ends. A process that is forked meanwhile (a loader's) does not
    keep the lock."""
    lock = io.FileIO(path, "x")
    _locks.add(lock)
    with suppress(OSError):  # a disk without locks
        fcntl.flock(lock, fcntl.LOCK_EX)
    return lock


def _close_locks() -> None:
    for lock in list(_locks):
        lock.close()


_locks: weakref.WeakSet[io.FileIO] = weakref.WeakSet()
os.register_at_fork(after_in_child=_close_locks)


def _begin_remote(root: RemotePath, step: int) -> RemotePath:
    for name in root.list_names():
        folder = root / name
        if name.startswith("step-") and not (folder / _MANIFEST).exists() and (folder / _BEGUN).exists():
            with suppress(FileNotFoundError, ValueError):
                if time.time() - float((folder / _BEGUN).read_bytes()) > _LEFT_OVER_S:
                    folder.remove()
    writing = root / f"{_name_step(step)}-{secrets.token_hex(4)}"
    (writing / _BEGUN).write_bytes(repr(time.time()).encode())
    return writing


def discard_folder(writing: Place) -> None:
    """Remove what has been written of a save that failed."""
    if isinstance(writing, Path):
        shutil.rmtree(writing, ignore_errors=True)
    else:
        with suppress(OSError):  # it failed for a reason that is told; the next run removes it
            writing.remove()


def empty_folder(writing: Place) -> None:
    """Give back the space of a save that failed, while other ranks may still ask its folder why."""
    with suppress(OSError):
        if isinstance(writing, RemotePath):
            for name in writing.list_names():
                if not name.startswith("."):
                    (writing / name).remove()
        else:
            for path in writing.glob("[!.]*"):
                path.unlink()


def _remove_abandoned(folder: Path) -> None:
    """Remove what an interrupted save has left, under its lock: a run about to take that begins another folder.
    On a disk without locks: what is an hour old."""
    try:
        with io.FileIO(folder / _LOCK, "r+" if (folder / _LOCK).exists() else "x") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
    except BlockingIOError:
        warnings.warn(
            f"another run is saving into {folder.parent}: un.load takes the newest checkpoint of either, and keep= "
            "counts those of both. Give each run a folder of its own",
            stacklevel=2,
        )
    except OSError:
        with suppress(OSError):
            if time.time() - folder.stat().st_mtime >= 3600:
                shutil.rmtree(folder, ignore_errors=True)


def write_rank(
    folder: Place,
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
    return files | write_pair(folder, name_rank(rank), entry, own_tensors | differs)


def publish_folder(writing: Place, files: Files, *, step: int, world_size: int, is_split: bool = False) -> Place:
    """Complete a folder with its manifest, which makes it a checkpoint; on a disk it gets its name in one step."""
    root = writing.parent
    manifest = {
        "format": _SPLIT_FORMAT if is_split else _FORMAT,
        "step": step,
        "serial": max((c.serial for c in find_candidates(root)), default=0) + 1,
        "world_size": world_size,
        "torch": torch.__version__,
        "written": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "written_as": writing.name,
        "run": _RUN,
        "since": _first_saves.get(str(root), (0, 0.0))[1],
        "files": files,
    }
    manifest["crc32"] = _sum_crc(manifest)
    text = json.dumps(manifest, indent=1).encode()
    if isinstance(writing, RemotePath):
        (writing / _MANIFEST).write_bytes(text)
        return writing
    assert isinstance(root, Path)
    safetensors.write_bytes(writing / _MANIFEST, lambda: [text])
    _sync_folder(writing)
    target, again = root / _name_step(step), 1
    while target.exists():  # saved at this step before; the former one goes when this is in place
        again += 1
        target = root / f"{_name_step(step)}-{again}"
    os.rename(writing, target)
    for left in target.glob(
        ".*"
    ):  # after the rename: a hidden folder without its lock would be taken for another run's
        with suppress(OSError):
            left.unlink()
    _sync_folder(root)
    return target


def remove_replaced(newest: Place, *, step: int, keep: int | None) -> None:
    """Remove what `newest` replaces: another checkpoint of its step, and all but `keep` of the whole ones.

    Each leaves under a hidden name (at an address: without its manifest) first, so that none is ever seen in part.
    Raises `SharedByRuns`, and removes nothing, if another run saves here too that began before this one.
    """
    former = [c for c in find_candidates(newest.parent) if not c.problem and c.path != newest]
    _look_for_other_run(newest, former)
    same_step = [c.path for c in former if c.step == step]
    others = [c.path for c in former if c.step != step]
    for folder in same_step + ([] if keep is None else others[keep - 1 :]):
        try:
            if isinstance(folder, RemotePath):
                (folder / _MANIFEST).remove()
                folder.remove()
                continue
            hidden = folder.with_name(f".removing-{folder.name}-{secrets.token_hex(4)}")
            os.rename(folder, hidden)
            shutil.rmtree(hidden)
        except OSError as error:
            warnings.warn(f"an old checkpoint could not be removed: {error}", stacklevel=2)


def _look_for_other_run(newest: Place, former: Sequence[Candidate]) -> None:
    """Both runs' checkpoints would count for `keep`, and each would resume from the other's."""
    before, since = _first_saves.get(str(newest.parent), (0, 0.0))
    others = [c for c in former if c.serial > before and c.run not in ("", _RUN)]
    if not others:
        return
    text = (
        f"another run is saving into {newest.parent}: {others[0].path.name} is not of this one. un.load takes the "
        "newest checkpoint of either. Give each run a folder of its own"
    )
    if (since, _RUN) > (others[0].since, others[0].run):
        raise SharedByRuns(f"{text}; the checkpoints of both remain, nothing was removed, {newest.name} was written")
    warnings.warn(text, stacklevel=2)


def write_pair(folder: Place, stem: str, tree: Any, tensors: Tensors) -> Files:
    """Write a tree and its tensors: as "shared" those of rank 0."""
    text = json.dumps(tree, separators=(",", ":")).encode()
    plain, packed = f"{stem}.json", f"{stem}.safetensors"
    return {
        plain: list(safetensors.write_bytes(folder / plain, lambda: [text])),
        packed: list(safetensors.write(folder / packed, tensors)),
    }


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


# Reading --------------------------------------------------------------------------------------------------


def find_candidates(root: Place) -> list[Candidate]:
    """The checkpoints in a folder, newest save first; those that cannot be judged come before all others.

    A folder that is a checkpoint itself is the only one. At an address a folder without its manifest is none: it is
    being written, or its save was interrupted.
    """
    if isinstance(root, RemotePath):
        return _find_remote(root)
    if (root / _MANIFEST).exists():
        return [_judge(root)]
    return _sort(_judge(folder) for folder in root.glob("step-*") if folder.is_dir())


def _find_remote(root: RemotePath) -> list[Candidate]:
    if root.name.startswith("step-") and (root / _MANIFEST).exists():  # no listing is asked
        return [_judge(root)]
    names = root.list_names()
    if _MANIFEST in names:
        return [_judge(root)]
    judged = (_judge(root / name) for name in names if name.startswith("step-"))
    return _sort(one for one in judged if not one.is_absent)


def _sort(candidates: Iterable[Candidate]) -> list[Candidate]:
    return sorted(candidates, key=lambda c: (bool(c.problem), c.serial, c.path.name), reverse=True)


def is_visible(folder: Place) -> bool:
    """Whether this process sees the checkpoint's folder."""
    return folder.is_dir() if isinstance(folder, Path) else (folder / _MANIFEST).exists()


def read_folder(
    folder: Place, rank: int, world_size: int, strategy: str = "", *, lazy: bool = False, owns: bool = True
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
    source.check_sizes("" if all_files else ("shared.", f"{name_rank(rank)}."))
    if is_split or lazy:
        source.verify(rank, world_size)
    tree = source.tree("shared")
    wholes = check_wholes(tree.pop("pieces", {}))
    same_world &= tree.get("strategy_type", strategy) == strategy or not strategy
    used = [rank] if same_world else list(range(saved_by))
    entries = {r: check_entry(source.tree(name_rank(r)), r) for r in (range(saved_by) if is_split else used)}
    tensors, kept = source.tensors("shared"), {r: source.tensors(name_rank(r)) for r in used}
    different = [_pick(kept[r], entries[r]["differs"], r) for r in used]
    averaged = []
    if same_world:
        tree |= entries[rank]["tree"] or {}
        tensors |= different[0]
    else:
        weights = [entries[r]["weights"] for r in used]
        averaged = list(_average(tensors, different, weights, find_given(tree)))
    if is_split:
        tensors = _find_absent(source, entries, tensors) | tensors
        tensors |= safetensors.find_pieces(folder, wholes, [entries[r]["pieces"] for r in entries])
    own_parts = [_unpack_own(entries[r]["own"], kept[r], r) for r in used] if owns else []
    with naming("shared.json"):
        whole = check_whole(_assemble(tree, tensors, lazy))
        consolidated = expect(dict, whole.pop("consolidated", {}), "consolidated")
    if not same_world:
        whole["model"] |= consolidated
    return Contents(manifest["step"], whole, same_world, own_parts, averaged)


class _Source:
    """The files of one checkpoint."""

    def __init__(self, folder: Place, files: Files, lazy: bool) -> None:
        self.folder, self.files, self.lazy = folder, files, lazy

    def check_sizes(self, start: str | tuple[str, ...]) -> None:
        """Check that the files whose names start so exist, with the size that was written."""
        for name, (size, _) in self.files.items():
            if not name.startswith(start):
                continue
            try:
                got = _find_size(self.folder / name)
            except FileNotFoundError:
                raise ValueError(f"{name} is missing") from None
            if got != size:
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
        with naming(name):
            return expect(dict, json.loads(text), "the whole")

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
        return expect(dict, unpack(tree, _Full(tensors)), "the whole")
    large = [key for key in (*safetensors.SPLIT, "consolidated") if key in tree]  # older ones have no average
    rest = {key: part for key, part in tree.items() if key not in large}
    lazily = {key: safetensors.unpack_lazily(get(tree, key), tensors) for key in large}
    return expect(dict, unpack(rest, _Full(tensors)), "the whole") | lazily


def _find_absent(source: _Source, entries: Mapping[int, Any], tensors: Mapping[str, Stored]) -> dict[str, Stored]:
    """Tensors that rank 0 did not have, from the first rank that had them."""
    found: dict[str, Stored] = {}
    for rank, entry in entries.items():
        if names := [name for name in entry["differs"] if name not in tensors and name not in found]:
            found |= _pick(source.tensors(name_rank(rank)), names, rank)
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
        if first is None or not name.startswith(_AVERAGED) or name in left_out:
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


def _find_size(path: Place) -> int:
    return path.size() if isinstance(path, RemotePath) else path.stat().st_size


def _judge(folder: Place) -> Candidate:
    try:
        manifest = _read_manifest(folder)
    except NewerFormat as error:
        return Candidate(folder, problem=str(error), is_newer=True)
    except (OSError, ValueError) as error:
        return Candidate(folder, problem=str(error), is_absent=isinstance(error, NoManifest))
    told = {key: manifest[key] for key in ("run", "since", "written_as") if key in manifest}  # older ones have none
    return Candidate(folder, manifest["step"], manifest["serial"], **told)


def _read_manifest(folder: Place) -> dict[str, Any]:
    try:
        text = _read_text(folder / _MANIFEST, _MAX_MANIFEST_BYTES)
    except FileNotFoundError:
        raise NoManifest(f"it has no {_MANIFEST}") from None
    try:
        manifest = json.loads(text)
        claimed = manifest.pop("crc32")
        same = claimed == _sum_crc(manifest)
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError):
        raise ValueError(f"{_MANIFEST} is damaged") from None
    if not same:
        raise ValueError(f"{_MANIFEST} is damaged: its checksum differs")
    with naming(_MANIFEST):
        form = expect_number(manifest, "format")
        if form > _SPLIT_FORMAT:
            raise NewerFormat(
                f"{folder} is of a later version of Unisono (format {form}; this one reads {_FORMAT} and "
                f"{_SPLIT_FORMAT}): load it with that version, or give the path of an older checkpoint beside it"
            )
        if form not in (_FORMAT, _SPLIT_FORMAT):
            raise ValueError(f"it has format {form}, this version reads {_FORMAT} and {_SPLIT_FORMAT}")
        for name, least in (("step", 0), ("serial", 0), ("world_size", 1)):
            expect_number(manifest, name, least)
        for name in ("run", "written_as"):
            expect(str, manifest.get(name, ""), name)
        expect(float, manifest.get("since", 0.0), "since")
        files = expect(dict, get(manifest, "files"), "files")
        for name, entry in files.items():
            if name == ".." or Path(name).name != name or not is_numbers(entry, 2):
                raise ValueError(f"expected a file's name with its size and checksum, got {name[:200]!r}")
        if manifest["world_size"] > len(files):
            raise ValueError(f"{manifest['world_size']} workers have written {len(files)} files")
    return dict(manifest)


def _read_text(path: Place, most: int = MAX_NUMBER) -> bytes:
    if isinstance(path, RemotePath):
        return path.read_bytes()
    file, size = safetensors.open_file(path)
    with file:
        if size > most:
            raise ValueError(f"{path.name} has {size} bytes; at most {most} are read")
        return file.read()


def _pick(stored: Mapping[str, Stored], names: Sequence[str], rank: int) -> dict[str, Stored]:
    if absent := [name for name in names if name not in stored]:
        raise ValueError(f"{name_rank(rank)}.safetensors has no tensor {absent[0][:200]!r}")
    return {name: stored[name] for name in names}


def _unpack_own(tree: Any, kept: Mapping[str, Stored], rank: int) -> dict[str, Any]:
    with naming(f"{name_rank(rank)}.json"):
        own = expect(dict, unpack(tree, _Full(kept)), "own")
        for name in ("local", "rng"):
            get(own, name)
    return own


def _name_step(step: int) -> str:
    return f"step-{step:010d}"


def _sum_crc(manifest: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps(manifest, sort_keys=True).encode())
