"""Checkpoints: a whole training run in a folder, written atomically, checksummed, for any number of workers."""

from __future__ import annotations

import hashlib
import io
import json
import os
import shutil
import time
import warnings
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from unisono import rng
from unisono.launchers.runtime.files import local_path
from unisono.methods.buckets import load_optimizer
from unisono.packing import pack
from unisono.training.checkpoint.folder import (
    Contents,
    Files,
    begin_folder,
    find_candidates,
    publish_folder,
    read_folder,
    remove_replaced,
    write_rank,
    write_shared,
)
from unisono.training.checkpoint.slices import Held, Piece, Stored, find_gaps
from unisono.training.checkpoint.split import SPLIT, merge_trees
from unisono.world import PeerLost, World

__all__ = ["CheckpointError", "Loaded", "ModelPart", "Savable", "find_newest", "load", "save", "warn_of_damage"]

_VISIBLE_WITHIN_S = 5.0  # a network disk may show a new folder late


class CheckpointError(RuntimeError):
    """A checkpoint that could not be written or read; raised on every rank alike."""


class Loaded(NamedTuple):
    """What `load` found: the checkpoint used, and those it had to skip, newest first, each with the reason."""

    step: int
    epoch: int
    path: str
    skipped: list[tuple[str, str]]
    extra: Any


class ModelPart(NamedTuple):
    """How one rank counts in the one model that a checkpoint gives to plain PyTorch and to other strategies.

    Keys are the model's own parameters and buffers. A tensor that is not named is taken as it is; if the ranks hold
    different values, their mean is taken, with equal weights.

    values: what to take in a tensor's place.
    weights: how much this rank counts in a tensor's mean.
    first: tensors of which rank 0's is taken instead of the mean.
    """

    values: Mapping[Tensor, Tensor] = {}
    weights: Mapping[Tensor, float] = {}
    first: Collection[Tensor] = ()


@runtime_checkable
class Savable(Protocol):
    """What saving and loading ask of a replica."""

    @property
    def world(self) -> World: ...

    @property
    def model(self) -> nn.Module: ...

    @property
    def optimizer(self) -> Optimizer: ...

    @property
    def strategy(self) -> object: ...

    @property
    def step(self) -> int: ...

    def state_dict(self) -> dict[str, Any]:
        """The strategy's own state: "shared" by all ranks, and "local" to this one."""

    def load_state_dict(self, state: dict[str, Any], *, same_world: bool) -> None:
        """Continue from a saved state; from a world of another size, `state["locals"]` has every old rank's part."""

    def present_ranks(self) -> list[int]:
        """The ranks that save: all, unless the strategy goes on without those that died."""

    def gather_present(self, obj: Any) -> dict[int, Any]:
        """The `obj` of every present rank, by rank."""

    def model_part(self) -> ModelPart:
        """How this rank counts in the model that plain PyTorch and other strategies get from the checkpoint."""

    def sharded_state(self) -> dict[str, Any] | None:
        """Model and optimizer with a `Piece` in place of each tensor that is split; None: nothing is."""

    def load_sharded_state(self, whole: dict[str, Any], *, same_world: bool) -> None:
        """Take my part of a model and an optimizer that have a `Stored` in place of each tensor."""


EVERY_RANK = {  # what errors say if some ranks do not call it (see `unisono.launchers.runtime.frames`)
    "save": "every rank calls un.save; rank 0 writes, and each rank the parts that only it has",
    "load": "every rank calls un.load",
}

# Saving ---------------------------------------------------------------------------------------------------


def save(path: str | os.PathLike[str], replica: Savable, *, keep: int | None = 3, extra: Any = None) -> str:
    """Write model, optimizer, strategy, shards, RNG and step as a new checkpoint in the folder `path`.

    Every rank calls it with a path on a disk that all ranks see. It is written beside the others under a
    hidden name and renamed when all of it is on the disk: a crash or a full disk leaves the former ones whole,
    and a failure on any rank raises on every rank. The newest `keep` remain (None: all of them).
    `extra` is any nested state that `unisono.packing.pack` takes: a scheduler's state, a GradScaler's, a
    history; a rank whose `extra` is its own gets that back in a world of the same size.
    In a run that only measures (`unisono plan`) nothing is written.
    If the strategy goes on without a rank that died (`parameter_server`), the others save, as a world of their number.
    With other strategies every rank raises `PeerLost`.

    Returns the checkpoint's own folder.

    Example:
        >>> un.save("run/checkpoint", replica, extra={"scheduler": scheduler.state_dict()})  # doctest: +SKIP
    """
    if keep is not None and (type(keep) is not int or keep < 1):
        raise ValueError(f"keep is {keep!r}; expected how many checkpoints remain: at least 1, or None for all")
    _check_replica("save", replica)
    local_path(path)
    if getattr(replica, "is_trial", False):
        return str(path)
    elastic = getattr(replica, "elastic", None)
    if elastic is None:
        return _save(path, _find_whole(replica), keep, extra)
    # If a rank is lost meanwhile, the save is repeated, and not the step around it.
    return str(elastic.call(lambda: _save(path, replica, keep, extra), alone=lambda: path, raises=_ALIKE))


def _save(path: str | os.PathLike[str], replica: Savable, keep: int | None, extra: Any) -> str:
    none = f"no checkpoint was written to {path}, the former ones are as they were"
    saving, files = None, None
    try:
        saving = _Saving(Path(path), replica, keep, extra)
        reports = _do_together(saving.gather, none, saving.prepare)
        files = _do_together(saving.gather, none, lambda: saving.write(reports))
        name = _do_together(saving.gather, none, lambda: saving.publish(files))[0]
    except BaseException as error:
        if saving is not None and saving.number == 0 and saving.writing is not None:
            shutil.rmtree(saving.writing, ignore_errors=True)
        if isinstance(error, PeerLost):  # in the last phase, rank 0 may have come as far as the name
            unsure = f"it is not known whether the checkpoint was written to {path}, the former ones are whole"
            raise PeerLost(f"{none if files is None else unsure}: {error}") from error
        raise
    finally:
        if saving is not None and saving.lock is not None:
            saving.lock.close()
    return str(Path(path) / name)


def _check_replica(what: str, replica: object) -> None:
    if not isinstance(replica, Savable):
        raise TypeError(f"un.{what} takes the replica that un.parallel returned, got {type(replica).__name__}")


def _find_whole(replica: Savable) -> Savable:
    """The replica; of a mesh, an object that saves the model which all ranks of the mesh hold together."""
    axes = replica.world.axes
    whole: Savable = replica if axes is None else axes.make_savable(replica)
    return whole


class _Saving:
    """One save, in three phases; after each, the ranks agree that all went well."""

    def __init__(self, root: Path, replica: Savable, keep: int | None, extra: Any) -> None:
        self.root, self.replica, self.keep, self.extra = root, replica, keep, extra
        self.world = replica.world
        self.ranks = replica.present_ranks()
        self.number = self.ranks.index(self.world.rank)  # this rank's number among those that save
        self.writing: Path | None = None
        self.lock: io.FileIO | None = None  # held by rank 0 on the folder that it writes

    def gather(self, obj: Any) -> list[Any]:
        """Every saving rank's `obj`, in order; all raise alike if one was lost since the save began."""
        every = self.replica.gather_present(obj)
        if lost := [rank for rank in self.ranks if rank not in every]:
            raise PeerLost(f"rank(s) {', '.join(map(str, lost))} died while the others saved; save again")
        return [every[rank] for rank in self.ranks]

    def prepare(self) -> dict[str, Any]:
        """1. Take the state apart; rank 0 makes the hidden folder and says what its tensors are."""
        state, parts = self.replica.state_dict(), self.replica.sharded_state()
        model = _unwrap(self.replica.model)
        part, named = self.replica.model_part(), list[tuple[str, Tensor]]()
        if parts is None:  # each name of a tensor that has several
            named = [(name, x) for name, x in model.state_dict(keep_vars=True).items() if isinstance(x, Tensor)]
        whole = {
            "model": model.state_dict() if parts is None else parts["model"],
            "versions": {name: {"version": x._version} for name, x in model.named_modules(remove_duplicate=False)},
            "optimizer": self.replica.optimizer.state_dict() if parts is None else parts["optimizer"],
            "optimizer_type": type(self.replica.optimizer).__name__,
            "strategy": state["shared"],
            "strategy_type": type(self.replica.strategy).__name__,
            "consolidated": {name: part.values[x].detach().to(x.dtype) for name, x in named if x in part.values},
            "first": [f"model.{name}" for name, x in named if any(x is y for y in part.first)],
            "shards": {name: shard.state_dict() for name, shard in self.world.shards.items()},
            "ledger": {"step_count": self.world.ledger.step_count},
            "extra": self.extra,
        }
        self.tree, found = pack(whole, leaves=() if parts is None else Piece)
        pieces = {name: x for name, x in found.items() if isinstance(x, Piece)}
        self.pieces = None if parts is None else pieces
        self.tensors = {name: x for name, x in found.items() if name not in pieces}
        weights = {f"model.{name}": float(part.weights[x]) for name, x in named if x in part.weights}
        self.weights = {name: weight for name, weight in weights.items() if weight != 1.0}
        self.own = pack({"local": state["local"], "rng": rng.capture(self.world.device)})
        report: dict[str, Any] = {"split": None}
        if parts is not None:
            held = {name: piece.describe() for name, piece in pieces.items()}
            report["split"] = [{key: self.tree[key] for key in SPLIT}, held]
        if self.number == 0:
            self.writing, self.lock = begin_folder(self.root, self.replica.step)
            alone = len(self.ranks) == 1
            report |= {"name": self.writing.name, "digests": {} if alone else self._digest()}
        return report

    def write(self, reports: Sequence[Mapping[str, Any]]) -> Files:
        """2. Rank 0 writes the shared state; every rank writes what differs from that, and its own state."""
        rank, self.writing = self.number, self.root / reports[0]["name"]
        wholes = self._merge([report["split"] for report in reports])
        _wait_until_visible(self.writing, self.world.host)
        if rank == 0:
            tree = self.tree if self.pieces is None else self.tree | {"pieces": wholes}
            files = write_shared(self.writing, tree, self.tensors)
            return files | write_rank(self.writing, rank, self.own, pieces=self.pieces, weights=self.weights)
        mine, digests = self._digest(), reports[0]["digests"]
        differs = {key: tensor for key, tensor in self.tensors.items() if mine[key] != digests.get(key)}
        tree = self._compared() if mine[""] != digests[""] else None
        return write_rank(
            self.writing, rank, self.own, tree=tree, differs=differs, pieces=self.pieces, weights=self.weights
        )

    def _merge(self, parts: Sequence[tuple[Any, dict[str, Held]] | None]) -> dict[str, list[Any]]:
        """Merge the trees of a state that is split over the ranks; returns dtype and shape of each whole tensor."""
        split = [part for part in parts if part is not None]
        if not split:
            return {}
        if len(split) < len(parts):
            raise CheckpointError(
                f"{len(split)} of {len(parts)} ranks have split their state; give every rank the same strategy"
            )
        problems = find_gaps([held for _, held in split])
        wholes = {name: [dtype, shape] for _, held in split for name, (dtype, shape, _) in held.items()}
        problems += [f"{name} is split elsewhere, and whole here" for name in self.tensors if name in wholes]
        if problems:
            more = f"; and {len(problems) - 4} more" if len(problems) > 4 else ""
            raise CheckpointError(f"the ranks' parts do not make up the whole: {'; '.join(problems[:4])}{more}")
        self.tree |= merge_trees([tree for tree, _ in split])
        return wholes

    def _compared(self) -> dict[str, Any]:
        """The part of the tree in which ranks may differ: without model and optimizer if those are split."""
        return {key: part for key, part in self.tree.items() if self.pieces is None or key not in SPLIT}

    def _digest(self) -> dict[str, bytes]:
        return _digest(self._compared(), self.tensors)

    def publish(self, files: list[Files]) -> str | None:
        """3. Rank 0 gives the folder its name, and removes the oldest."""
        if self.number:
            return None
        assert self.writing is not None
        joined = {name: entry for part in files for name, entry in part.items()}
        step = self.replica.step
        is_split = self.pieces is not None
        made = publish_folder(self.writing, joined, step=step, world_size=len(self.ranks), is_split=is_split)
        self.writing = None
        remove_replaced(made, step=step, keep=self.keep)
        return made.name


def _digest(tree: Any, tensors: Mapping[str, torch.Tensor]) -> dict[str, bytes]:
    """A digest of every tensor (dtype, shape, bytes) by name, and of the tree under the empty name."""

    def digest(*parts: Any) -> bytes:
        summed = hashlib.blake2b(digest_size=16)
        for part in parts:
            summed.update(part)
        return summed.digest()

    found = {"": digest(json.dumps(tree).encode())}
    for name, tensor in tensors.items():
        raw = tensor.reshape(-1).view(torch.uint8).numpy().data if tensor.numel() else b""
        found[name] = digest(f"{tensor.dtype}{tuple(tensor.shape)}".encode(), raw)
    return found


def _wait_until_visible(folder: Path, host: str) -> None:
    end = time.monotonic() + _VISIBLE_WITHIN_S
    while not folder.is_dir():
        if time.monotonic() > end:
            raise CheckpointError(
                f"{folder.parent} on {host} does not show the folder that rank 0 just made there; "
                "give every rank a path on one disk that all hosts share"
            )
        time.sleep(0.05)


# Loading --------------------------------------------------------------------------------------------------


def load(path: str | os.PathLike[str], replica: Savable, *, strict: bool = True) -> Loaded:
    """Take up the newest whole checkpoint in the folder `path` (or `path` itself, if it is one).

    Every rank calls it. All ranks load the same one; what is damaged is skipped, with a warning that says why.
    Parameters stay the same objects. In a world of the same size training goes on bit for bit as if it had
    not stopped; in another, ranks that are new draw their RNG from rank 0's, the strategy redistributes its
    per-rank state, and tensors of model and optimizer that differed between the ranks become their mean. They also do
    if another strategy saved them: this one may need the same model on every rank.
    Shards that are made after this call find their position when they are made.
    A worker that replaces a lost one is given what the first workers were, whatever lies in the folder by now
    (as `extra`, rank 0's); its model comes from the others.

    Args:
        strict: The model has exactly the saved names. Otherwise what fits is loaded, and the optimizer only
            if its groups of parameters have the saved sizes.

    Raises:
        FileNotFoundError: there is no checkpoint.
        CheckpointError: there are some, and none is whole.
        ValueError: the checkpoint does not fit the model or the optimizer; or `path` is an address such as s3://...
    """
    _check_replica("load", replica)
    elastic = getattr(replica, "elastic", None)
    if elastic is None:
        return Loaded(*_load(path, _find_whole(replica), strict, stacklevel=4)["loaded"])
    is_late = elastic.is_catching_up

    def run() -> dict[str, Any]:
        return _load(path, replica, strict, stacklevel=7)

    found = elastic.call(run, alone=run, raises=_ALIKE)
    if is_late:
        _place_shards(found["shards"], elastic.world)
    return Loaded(*found["loaded"])


_ALIKE = (FileNotFoundError, CheckpointError, ValueError, TypeError)  # what `load` raises, and `save`


def _load(path: str | os.PathLike[str], replica: Savable, strict: bool, *, stacklevel: int) -> dict[str, Any]:
    """Load the newest whole checkpoint. Returns the fields of `Loaded`, and the positions of the shards."""
    world, root = replica.world, local_path(path)
    strategy, what = type(replica.strategy).__name__, f"{root} could not be loaded"
    gather = world.gather_objects
    is_split = _do_together(gather, what, lambda: replica.sharded_state() is not None)[world.rank]
    found, folder, skipped = find_newest(
        root, world, lambda folder: read_folder(folder, world.rank, world.size, strategy, lazy=is_split)
    )
    if world.rank == 0:
        warn_of_damage(found, folder, skipped, stacklevel=stacklevel)
    _do_together(gather, f"{folder} could not be loaded", lambda: _apply_or_refuse(found, replica, strict=strict))
    shards = found.whole["shards"]
    epoch = next((state["epoch"] for state in shards.values() if "epoch" in state), 0)
    return {"loaded": (found.step, epoch, str(folder), skipped, found.whole["extra"]), "shards": shards}


def find_newest(
    root: Path, world: World, read: Callable[[Path], Contents]
) -> tuple[Contents, Path, list[tuple[str, str]]]:
    """The newest checkpoint that every rank could `read`, its folder, and the skipped ones with reasons."""

    def list_candidates() -> list[list[str]]:
        found = find_candidates(root) if world.rank == 0 else []
        return [[str(c.path.relative_to(root)), c.problem] for c in found]

    names = _do_together(world.gather_objects, f"{root} could not be read", list_candidates)[0]
    if not names:
        raise FileNotFoundError(f"no checkpoint at {root}: expected a folder that un.save has written to")
    skipped: list[tuple[str, str]] = []
    for name, problem in names:
        result: Contents | str = problem or _try_to_read(root / name, world, read)
        reasons = world.gather_objects(result if isinstance(result, str) else "")
        if isinstance(result, Contents) and not any(reasons):
            return result, root / name, skipped
        why = {reason: rank for rank, reason in reversed(list(enumerate(reasons))) if reason}
        found_by = [reason if reasons[0] == reason else f"rank {rank}: {reason}" for reason, rank in why.items()]
        skipped.append((str(root / name), "; ".join(reversed(found_by))))
    lines = "".join(f"\n  {where}: {why}" for where, why in skipped)
    raise CheckpointError(f"no whole checkpoint at {root}; restore one from a copy, or give another path:{lines}")


def _try_to_read(folder: Path, world: World, read: Callable[[Path], Contents]) -> Contents | str:
    if not folder.is_dir():
        return f"it cannot be seen from {world.host}; give a path on one disk that all hosts share"
    try:
        return read(folder)
    except (OSError, ValueError) as error:
        return _shorten(error)


def warn_of_damage(found: Contents, folder: Path, skipped: list[tuple[str, str]], *, stacklevel: int) -> None:
    """Warn of damaged checkpoints, and of tensors that became the mean over ranks."""
    if skipped:
        lines = "".join(f"\n  skipped {where}: {why}" for where, why in skipped)
        warnings.warn(f"loaded {folder}; others beside it are damaged:{lines}", stacklevel=stacklevel)
    if found.averaged:
        some = ", ".join(found.averaged[:3]) + (", ..." if len(found.averaged) > 3 else "")
        warnings.warn(
            f"{folder} is of another world size or strategy, and {len(found.averaged)} tensors differed between its "
            f"ranks ({some}): each became their mean",
            stacklevel=stacklevel,
        )


def _apply_or_refuse(found: Contents, replica: Savable, *, strict: bool) -> None:
    """Apply a checkpoint. If it does not fit, the caller is wrong; if parts have a wrong type, it is broken."""
    try:
        _apply(found, replica, strict=strict)
    except (TypeError, AttributeError, LookupError, ArithmeticError) as error:
        raise CheckpointError(f"its parts are not as un.save writes them: {error!r}") from error


def _apply(found: Contents, replica: Savable, *, strict: bool) -> None:
    """Load everything into the replica and its world; checks come before the first change."""
    world, whole = replica.world, found.whole
    _apply_model_and_optimizer(found, replica, strict=strict)
    locals_ = [own["local"] for own in found.owns]
    own_part = {"local": locals_[0]} if found.same_world else {"locals": locals_}
    replica.load_state_dict({"shared": whole["strategy"], **own_part}, same_world=found.same_world)
    world.ledger.resume(whole["ledger"]["step_count"])
    _place_shards(whole["shards"], world)
    _apply_rng([own["rng"] for own in found.owns], found, world)


def _place_shards(states: Mapping[str, Any], world: World) -> None:
    """Move the shards of `world` to saved positions; those that are not made yet find theirs when they are."""
    for name, state in states.items():
        if name in world.shards:
            world.shards[name].load_state_dict(state)
        else:
            world.pending_shards[name] = state


def _apply_rng(states: list[Any], found: Contents, world: World) -> None:
    try:
        if found.same_world or world.rank < len(states):
            rng.restore(states[0 if found.same_world else world.rank], world.device)
        else:
            rng.derive(states[0], world.rank)
    except (ValueError, TypeError, RuntimeError, LookupError, ArithmeticError, AttributeError) as error:
        file = f"rank-{world.rank if found.same_world else min(world.rank, len(states) - 1):05d}.json"
        raise CheckpointError(f"{file} has a state of random numbers that cannot be taken up: {error!r}") from error


def _apply_model_and_optimizer(found: Contents, replica: Savable, *, strict: bool) -> None:
    model, saved, optimizer = _unwrap(replica.model), OrderedDict(found.whole["model"]), found.whole["optimizer"]
    parts = replica.sharded_state()
    mine = model.state_dict() if parts is None else parts["model"]
    groups = replica.optimizer.param_groups if parts is None else parts["optimizer"]["param_groups"]
    _check_model(mine, saved, strict=strict)
    kinds = (type(replica.optimizer).__name__, found.whole["optimizer_type"])
    fits = _check_optimizer(groups, optimizer["param_groups"], kinds, strict=strict)
    if parts is not None:
        fitting = {name: value for name, value in saved.items() if name in mine}
        whole = {"model": fitting, "optimizer": optimizer if fits else None}
        replica.load_sharded_state(whole, same_world=found.same_world)
        return
    saved._metadata = found.whole["versions"]  # type: ignore[attr-defined]
    model.load_state_dict(saved, strict=strict)
    if fits:
        load_optimizer(replica.optimizer, optimizer)


def _check_model(mine: Mapping[str, Any], saved: Mapping[str, Any], *, strict: bool) -> None:
    problems = []
    if strict:
        problems += [f"it has no {name!r}" for name in mine if name not in saved]
        problems += [f"the model has no {name!r}" for name in saved if name not in mine]
    for name, value in mine.items():
        other: Any = saved.get(name)
        if not isinstance(value, Tensor | Piece) or not isinstance(other, Tensor | Stored):
            continue  # a module's extra state
        if isinstance(value, Tensor) and nn.parameter.is_lazy(value):
            continue
        if value.shape != other.shape:
            problems.append(f"{name!r} has shape {tuple(other.shape)} there, {tuple(value.shape)} in the model")
    if problems:
        more = f"; and {len(problems) - 8} more" if len(problems) > 8 else ""
        raise ValueError(
            f"the checkpoint does not fit the model: {'; '.join(problems[:8])}{more}. "
            "Build the model it was saved from" + (", or load with strict=False" if strict else "")
        )


def _check_optimizer(mine: Sequence[Any], saved: Sequence[Any], kinds: tuple[str, str], *, strict: bool) -> bool:
    """Whether the saved optimizer has the class (`kinds`: mine, saved) and the parameter groups of this one."""
    here, there = [len(group["params"]) for group in mine], [len(group["params"]) for group in saved]
    kind, saved_type = kinds
    if (there, saved_type) == (here, kind):
        return True
    problem = (
        f"the checkpoint's optimizer is {saved_type} with groups of {there} parameters, this one is {kind} with {here}"
    )
    if strict:
        raise ValueError(f"{problem}: make the optimizer as it was made for the checkpoint")
    warnings.warn(f"{problem}: its state is not loaded", stacklevel=2)
    return False


# Inside ---------------------------------------------------------------------------------------------------


def _do_together(gather: Callable[[Any], list[Any]], what: str, do: Callable[[], Any]) -> list[Any]:
    """Every rank's result of `do`, which must not talk to others; if it fails on any rank, all ranks raise.

    A TypeError or ValueError stays itself on its own rank, as it is about what the caller gave.
    """
    result, error = None, None
    try:
        result = do()
    except Exception as caught:
        error = caught
    answers = gather([result, None if error is None else _shorten(error)])
    failed = [f"rank {rank}: {problem}" for rank, (_, problem) in enumerate(answers) if problem is not None]
    if isinstance(error, TypeError | ValueError):
        raise error
    if failed:
        same = len(failed) == len(answers) > 1 and len({problem for _, problem in answers}) == 1
        raise CheckpointError(f"{what}: {f'every rank: {answers[0][1]}' if same else '; '.join(failed)}") from error
    return [answer[0] for answer in answers]


def _unwrap(model: nn.Module) -> nn.Module:
    """The user's module, without the wrapper of torch.compile."""
    inner = getattr(model, "_orig_mod", model)
    return inner if isinstance(inner, nn.Module) else model


def _shorten(error: BaseException) -> str:
    plain = isinstance(error, ValueError | CheckpointError)
    return str(error) if plain else f"{type(error).__name__}: {error}"
