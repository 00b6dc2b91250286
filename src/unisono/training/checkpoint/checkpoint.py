"""Checkpoints: a whole training run in a folder, written atomically, checksummed, for any number of workers."""

from __future__ import annotations

import io
import os
import warnings
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, Literal, NamedTuple

from torch import Tensor

from unisono import rng
from unisono.methods.buckets import load_optimizer
from unisono.methods.joined_optimizers import describe_optimizer, members_of
from unisono.packing import pack
from unisono.training.checkpoint.behind import BackgroundSaves, Lost, Parts, find_saves, finish_saves
from unisono.training.checkpoint.fitting import Kind, check_model, check_optimizer
from unisono.training.checkpoint.folder import (
    Contents,
    Files,
    SharedByRuns,
    begin_folder,
    discard_folder,
    empty_folder,
    publish_folder,
    read_folder,
    remove_replaced,
    write_pair,
    write_rank,
)
from unisono.training.checkpoint.foreign import Format, find_format, fit_names, read_all, read_foreign
from unisono.training.checkpoint.remote import Place, find_place
from unisono.training.checkpoint.safetensors import SPLIT, merge_trees
from unisono.training.checkpoint.savable import Savable, is_savable, name_parameters, unwrap
from unisono.training.checkpoint.save_clock import SaveClock
from unisono.training.checkpoint.slices import Held, Piece, find_gaps
from unisono.training.checkpoint.snapshot import Snapshot
from unisono.training.checkpoint.together import CheckpointError as CheckpointError
from unisono.training.checkpoint.together import (
    digest_state,
    do_together,
    find_newest,
    shorten,
    wait_until_visible,
    warn_of_damage,
)
from unisono.world import PeerLost, World


class Loaded(NamedTuple):
    """What `load` found: the checkpoint used, and those it had to skip, newest first, each with the reason."""

    step: int
    epoch: int
    path: str
    skipped: list[tuple[str, str]]
    extra: Any


EVERY_RANK = {  # what errors say if some ranks do not call it (see `unisono.launchers.runtime.frames`)
    "save": "every rank calls un.save; rank 0 writes, and each rank the parts that only it has",
    "load": "every rank calls un.load",
}

# Saving ---------------------------------------------------------------------------------------------------


def save(
    path: str | os.PathLike[str],
    replica: Savable,
    *,
    keep: int | None = 3,
    extra: Any = None,
    background: bool = False,
    if_busy: Literal["wait", "skip"] = "wait",
    every: str | float | None = None,
) -> str:
    """Write model, optimizer, strategy, shards, RNG and step of `replica` as a new checkpoint in the folder `path`.

    Every rank calls it with a path on a disk that all ranks see, or with an address that fsspec knows (s3://, gs://).
    It appears when it is complete: a crash or a full disk leaves earlier ones intact, and a failure on any rank
    raises on every rank. The newest `keep` remain (None: all of them).
    `extra` is any nested state that `unisono.packing.pack` takes: a scheduler's state, a GradScaler's, a
    history; a rank whose `extra` is its own gets that back in a world of the same size.
    In a run that only measures (`unisono plan`) nothing is written. If the strategy continues without a dead rank
    (`parameter_server`), the others save, as a world of their number. With others every rank raises `PeerLost`.

    Args:
        background: Copy the state into host memory, which is kept for the next save, and return; a thread writes it
            during training. An error is raised by the next `un.save`, `un.wait_saved()` or `un.load`, or at
            the end of the program.
        if_busy: If one is still being written: "wait" for it, or "skip" this one.
        every: Save only if so much time has passed since the last save (or the first such call), by rank 0's clock:
            "10min", "2h", or seconds. To be called after every step.

    Returns the checkpoint's own folder; "" if it was skipped, or is not due.

    Example:
        >>> un.save("run/checkpoint", replica, extra={"scheduler": scheduler.state_dict()})  # doctest: +SKIP
    """
    if keep is not None and (type(keep) is not int or keep < 1):
        raise ValueError(f"keep is {keep!r}; expected how many checkpoints remain: at least 1, or None for all")
    if if_busy not in ("wait", "skip"):
        raise ValueError(f'if_busy is {if_busy!r}; expected "wait" or "skip"')
    _check_replica("save", replica)
    place = find_place(path)
    if getattr(replica, "is_trial", False):
        return str(path)
    if every is not None and not SaveClock.of(replica.world, place, every).is_due():
        if background:
            find_saves(replica).warm(replica)
        return ""
    elastic = getattr(replica, "elastic", None)

    def run() -> str:
        whole = replica if elastic is not None else _find_whole(replica)
        try:
            saving = _Saving(place, whole, keep, extra, find_saves(replica))
        except PeerLost as error:
            raise PeerLost(f"{_describe_none(place)}: {error}") from error
        return _save_behind(saving, if_busy) if background else _save(saving)

    if elastic is None:
        return run()
    # If a rank is lost meanwhile, the save is repeated, and not the step around it.
    return str(elastic.call(run, alone=lambda: path, raises=_ALIKE))


def _describe_none(place: Place) -> str:
    return f"no checkpoint was written to {place}, earlier checkpoints are unchanged"


def _save(saving: _Saving) -> str:
    none = _describe_none(saving.root)
    files = None
    try:
        reports = do_together(saving.gather, none, saving.prepare)
        files = do_together(saving.gather, none, lambda: saving.write(reports, reports[0]["digests"]))
        name, problem = do_together(saving.gather, none, lambda: saving.publish(files))[0]
    except BaseException as error:
        saving.discard()
        if isinstance(error, PeerLost):  # in the last phase, rank 0 may have come as far as the name
            unsure = (
                f"it is not known whether the checkpoint was written to {saving.root}, earlier checkpoints are intact"
            )
            raise PeerLost(f"{none if files is None else unsure}: {error}") from error
        raise
    finally:
        saving.close()
    if problem:
        raise CheckpointError(problem)
    return str(saving.root / name)


def _save_behind(saving: _Saving, if_busy: str) -> str:
    """Copy the state and have it written in the background; or if it cannot be copied, now."""
    none = _describe_none(saving.root)
    try:
        if (begun := _begin_behind(saving, none, if_busy)) is None:
            return ""
        reports = do_together(saving.gather, none, lambda: saving.copy(*begun))
        if any(report["on_disk"] for report in reports):
            return _finish_save(saving, none, reports)
        saving.saves.start(saving.root, saving.step, lambda: saving.write_behind(reports))
    except BaseException:
        saving.discard()
        saving.close()
        raise
    return str(saving.root / begun[1])


def _finish_save(saving: _Saving, none: str, reports: list[Any]) -> str:
    """Write at once what cannot be copied."""
    digests = do_together(saving.gather, none, lambda: {} if saving.number else saving.digest())[0]
    files = do_together(saving.gather, none, lambda: saving.write(reports, digests))
    name, problem = do_together(saving.gather, none, lambda: saving.publish(files))[0]
    saving.close()
    if problem:
        raise CheckpointError(problem)
    return str(saving.root / name)


def _begin_behind(saving: _Saving, none: str, if_busy: str) -> tuple[str, str] | None:
    try:
        begun: tuple[str, str] | None = do_together(saving.gather, none, lambda: saving.begin(if_busy))[0]
    except CheckpointError:
        with suppress(OSError):  # of the same save that rank 0 speaks of: it has been raised now
            saving.saves.finish()
        raise
    return begun


def _check_replica(what: str, replica: object) -> None:
    if not is_savable(replica):
        raise TypeError(f"un.{what} takes the replica that un.parallel returned, got {type(replica).__name__}")


def _find_whole(replica: Savable) -> Savable:
    """The replica; of a mesh, an object that saves the model which all ranks of the mesh hold together."""
    axes = replica.world.axes
    whole: Savable = replica if axes is None else axes.make_savable(replica)
    return whole


class _Saving:
    """One save, in three phases; after each, the ranks agree that all went well.

    In the background the third begins when the state has been copied, and the ranks agree by files (see `Parts`).
    """

    def __init__(
        self, root: Place, replica: Savable, keep: int | None, extra: Any, saves: BackgroundSaves | None = None
    ) -> None:
        self.root, self.replica, self.keep, self.extra = root, replica, keep, extra
        self.saves = saves or BackgroundSaves()
        self.world, self.step = replica.world, replica.step
        self.ranks = replica.present_ranks()
        self.number = self.ranks.index(self.world.rank)  # this rank's number among those that save
        self.writing: Place | None = None
        self.lock: io.FileIO | None = None  # held by rank 0 on the folder that it writes
        self.parts: Parts | None = None
        self.on_disk = False  # a part of the state, which the disk has no room to keep as it is

    def gather(self, obj: Any) -> list[Any]:
        """Every saving rank's `obj`, in order; all raise alike if one was lost since the save began."""
        every = self.replica.gather_present(obj)
        if lost := [rank for rank in self.ranks if rank not in every]:
            raise PeerLost(f"rank(s) {', '.join(map(str, lost))} died while the others saved; save again")
        return [every[rank] for rank in self.ranks]

    def prepare(self) -> dict[str, Any]:
        """1. Take the state apart; rank 0 makes the hidden folder and says what its tensors are."""
        finish_saves(self.saves, self.root)
        report = self._collect()
        if self.number == 0:
            self.writing, self.lock = begin_folder(self.root, self.step)
            report |= {"name": self.writing.name, "digests": self.digest()}
        return report

    def begin(self, if_busy: str) -> tuple[str, str] | None:
        """In the background, 1. Rank 0 makes the folder; returns the name that it has and will have. None: skip."""
        if self.number:
            return None
        if self.saves.is_busy and if_busy == "skip":
            return None
        finish_saves(self.saves, self.root)
        self.writing, self.lock = begin_folder(self.root, self.step)
        name = self.writing.name
        return name, name.removeprefix(".writing-").rpartition("-")[0] if name.startswith(".") else name

    def copy(self, name: str, _target: str) -> dict[str, Any]:
        """In the background, 2. Take the state apart and copy it, unless a part of it is on a disk."""
        self.saves.finish()
        self.writing = self.root / name
        wait_until_visible(self.writing, self.world.host)
        self.parts = Parts(self.writing, self.number, len(self.ranks))
        self.parts.enter()
        self.world.follow(self.parts)
        report = self._collect(self.saves.snapshot)
        return report | {"name": name, "on_disk": self.on_disk}

    def _collect(self, snapshot: Snapshot | None = None) -> dict[str, Any]:
        """Take the state apart, into a copy if there is room for one; returns what the other ranks have to know."""
        state, parts = self.replica.state_dict(), self.replica.sharded_state()
        model = unwrap(self.replica.model)
        part, named = self.replica.model_part(), list[tuple[str, Tensor]]()
        if parts is None:  # each name of a tensor that has several
            named = [(name, x) for name, x in model.state_dict(keep_vars=True).items() if isinstance(x, Tensor)]
        whole = {
            "model": model.state_dict() if parts is None else parts["model"],
            "versions": {name: {"version": x._version} for name, x in model.named_modules(remove_duplicate=False)},
            "optimizer": self.replica.optimizer.state_dict() if parts is None else parts["optimizer"],
            "optimizer_type": describe_optimizer(self.replica.optimizer),
            "optimizer_groups": [len(member.param_groups) for member in members_of(self.replica.optimizer)],
            "optimizer_names": name_parameters(model, self.replica),
            "average": None if (average := _find_average(self.replica)) is None else average.state(),
            "strategy": state["shared"],
            "strategy_type": type(self.replica.strategy).__name__,
            "consolidated": {name: part.values[x].detach().to(x.dtype) for name, x in named if x in part.values},
            "first": [f"model.{name}" for name, x in named if any(x is y for y in part.first)],
            "shards": {name: shard.state_dict() for name, shard in self.world.shards.items()},
            "ledger": {"step_count": self.world.ledger.step_count},
            "extra": self.extra,
        }
        found: dict[str, Any]
        to_cpu = snapshot is None
        self.tree, found = pack(whole, leaves=() if parts is None else Piece, to_cpu=to_cpu)
        own_tree, own = pack({"local": state["local"], "rng": rng.capture(self.world.device)}, to_cpu=to_cpu)
        if snapshot is not None:
            found = snapshot.freeze(found)
            self.on_disk = any(isinstance(x, Piece) and x.freeze is not None for x in found.values())
            if not self.on_disk:
                found, own = snapshot.take([found, own])
        pieces = {name: x for name, x in found.items() if isinstance(x, Piece)}
        self.pieces = None if parts is None else pieces
        self.tensors: dict[str, Tensor] = {name: x for name, x in found.items() if name not in pieces}
        weights = {f"model.{name}": float(part.weights[x]) for name, x in named if x in part.weights}
        self.weights = {name: weight for name, weight in weights.items() if weight != 1.0}
        self.own = own_tree, own
        if parts is None:
            return {"split": None}
        held = {name: piece.describe() for name, piece in pieces.items()}
        return {"split": [{key: self.tree[key] for key in SPLIT}, held]}

    def digest(self) -> dict[str, str]:
        """What rank 0's tensors are, for the others to compare."""
        return {} if len(self.ranks) == 1 else digest_state(self._compared(), self.tensors)

    def _share_digests(self, parts: Parts) -> dict[str, str]:
        """Rank 0's digests, by a file."""
        if self.number:
            return dict(parts.take(".digests", 0))
        if digests := self.digest():
            parts.give(".digests", digests)
        return digests

    def write(self, reports: Sequence[Mapping[str, Any]], digests: Mapping[str, str]) -> Files:
        """2. Rank 0 writes the shared state; every rank writes what differs from that, and its own state."""
        rank, self.writing = self.number, self.root / reports[0]["name"]
        wholes = self._merge([report["split"] for report in reports])
        wait_until_visible(self.writing, self.world.host)
        if rank == 0:
            tree = self.tree if self.pieces is None else self.tree | {"pieces": wholes}
            files = write_pair(self.writing, "shared", tree, self.tensors)
            return files | write_rank(self.writing, rank, self.own, pieces=self.pieces, weights=self.weights)
        mine = digest_state(self._compared(), self.tensors)
        differs = {key: tensor for key, tensor in self.tensors.items() if mine[key] != digests.get(key)}
        differing_tree = self._compared() if mine[""] != digests[""] else None
        return write_rank(
            self.writing, rank, self.own, tree=differing_tree, differs=differs, pieces=self.pieces, weights=self.weights
        )

    def write_behind(self, reports: Sequence[Mapping[str, Any]]) -> None:
        """In the background, 3. Write the copy; rank 0 waits for the others' parts and makes it a checkpoint."""
        parts = self.parts
        assert parts is not None
        try:
            self.saves.snapshot.wait()
            files = self.write(reports, self._share_digests(parts))
            if self.number:
                parts.give(f".part-{self.number:05d}", {"files": files})
                parts.take_outcome()
                return
            published = self.publish([files, *(parts.take_files(rank) for rank in range(1, parts.size))])
            if published is not None and published[1]:
                raise SharedByRuns(published[1])
        except Exception as error:
            self._tell_failure(error)
            if parts.ranks_changed:  # a disk that was closed for the new world, say
                raise Lost(f"ranks have joined or left ({shorten(error)})") from error
            raise
        finally:
            self.close()

    def _tell_failure(self, error: BaseException) -> None:
        """Tell the other ranks why this one could not write its part (rank 0: why there will be no checkpoint)."""
        if self.writing is None:
            return
        assert self.parts is not None
        try:
            if self.number == 0:
                empty_folder(self.writing)
            self.parts.give_failure(error)
        except OSError:  # a full disk, say; the others find out by the lock of this rank, or by the folder's absence
            if self.number == 0:
                discard_folder(self.writing)

    def discard(self) -> None:
        """Remove what was written, where this save ends without a checkpoint."""
        if self.number == 0 and self.writing is not None:
            discard_folder(self.writing)

    def close(self) -> None:
        """Let go of the locks, and of what was kept on a disk."""
        self.saves.snapshot.release()
        if self.lock is not None:
            self.lock.close()
        if self.parts is not None:
            self.parts.leave()

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

    def publish(self, files: list[Files]) -> tuple[str, str] | None:
        """3. Rank 0 makes the folder a checkpoint, and removes the oldest; returns its name, and what is wrong with the
        other checkpoints there."""
        if self.number:
            return None
        assert self.writing is not None
        joined = {name: entry for part in files for name, entry in part.items()}
        is_split = self.pieces is not None
        made = publish_folder(self.writing, joined, step=self.step, world_size=len(self.ranks), is_split=is_split)
        self.writing = None
        try:
            remove_replaced(made, step=self.step, keep=self.keep)
        except SharedByRuns as error:
            return made.name, str(error)
        return made.name, ""


# Loading --------------------------------------------------------------------------------------------------


def load(path: str | os.PathLike[str], replica: Savable, *, strict: bool = True) -> Loaded:
    """Load the newest intact checkpoint in the folder `path` (or `path` itself, if it is one) into `replica`.

    `path` may also be a folder of torch.distributed.checkpoint, a Hugging Face folder, a .safetensors file or one that
    torch.save wrote: model, optimizer and step are loaded if it has them, and no code in it is run.

    Every rank calls it. All ranks load the same one; damaged ones are skipped, with a warning that says why.
    Parameters stay the same objects. In a world of the same size training continues bit for bit as if it had
    not stopped; in another, ranks that are new draw their RNG from rank 0's, the strategy redistributes its
    per-rank state, and tensors of model and optimizer that differed between the ranks become their mean. They also do
    if another strategy saved them: this one may need the same model on every rank.
    Shards created after this call start at their saved position.
    A worker that replaces a lost one gets what the first workers got, whatever the folder holds by now
    (as `extra`, rank 0's); its model comes from the others.

    Args:
        strict: The model has exactly the saved names. Otherwise what fits is loaded, and the optimizer only
            if its groups of parameters have the saved sizes.

    Raises:
        FileNotFoundError: there is no checkpoint.
        CheckpointError: no checkpoint is intact.
        ValueError: the checkpoint does not fit the model or the optimizer.
    """
    _check_replica("load", replica)
    elastic = getattr(replica, "elastic", None)
    if elastic is None:
        return Loaded(*_load(path, _find_whole(replica), strict, find_saves(replica), stacklevel=4)["loaded"])
    is_late = elastic.is_catching_up

    def run() -> dict[str, Any]:
        return _load(path, replica, strict, find_saves(replica), stacklevel=7)

    found = elastic.call(run, alone=run, raises=_ALIKE)
    if is_late:
        _place_shards(found["shards"], elastic.world)
    return Loaded(*found["loaded"])


_ALIKE = (FileNotFoundError, CheckpointError, ValueError, TypeError)  # what `load` raises, and `save`


def _load(
    path: str | os.PathLike[str], replica: Savable, strict: bool, saves: BackgroundSaves, *, stacklevel: int
) -> dict[str, Any]:
    """Load the newest intact checkpoint. Returns the fields of `Loaded`, and the positions of the shards."""
    world, root = replica.world, find_place(path)
    strategy, what = type(replica.strategy).__name__, f"{root} could not be loaded"
    gather = world.gather_objects
    do_together(gather, "a save in the background failed", lambda: finish_saves(saves, root))
    if (kind := do_together(gather, what, lambda: find_format(root))[0]) != "unisono":
        return _load_foreign(root, kind, replica, strict)
    is_split = do_together(gather, what, lambda: replica.sharded_state() is not None)[world.rank]
    found, folder, skipped = find_newest(
        root, world, lambda folder: read_folder(folder, world.rank, world.size, strategy, lazy=is_split)
    )
    if world.rank == 0:
        warn_of_damage(found, folder, skipped, stacklevel=stacklevel)
    do_together(gather, f"{folder} could not be loaded", lambda: _apply(found, replica, strict=strict))
    shards = found.whole["shards"]
    epoch = next((state["epoch"] for state in shards.values() if "epoch" in state), 0)
    return {"loaded": (found.step, epoch, str(folder), skipped, found.whole["extra"]), "shards": shards}


def _load_foreign(root: Any, kind: Format, replica: Savable, strict: bool) -> dict[str, Any]:
    """Load the model (and the optimizer, if it is there) of another format; the strategy begins with them."""
    read: list[Contents] = []

    def apply() -> None:
        found = read[0]
        whole, parts = found.whole, replica.sharded_state()
        mine = unwrap(replica.model).state_dict() if parts is None else parts["model"]
        whole |= {"model": fit_names(whole["model"], mine), "optimizer_type": describe_optimizer(replica.optimizer)}
        _apply_model_and_optimizer(found, replica, strict=strict)
        state, step = replica.state_dict(), {"step": found.step}
        if "anchors" in state["shared"]:  # None: the model as it is now
            replica.load_state_dict({**state, "shared": {**state["shared"], **step, "anchors": None}}, same_world=True)
        else:
            replica.load_state_dict({"shared": step, "locals": [{}]}, same_world=False)
        replica.world.ledger.resume(found.step)

    for phase in (lambda: read.append(read_foreign(root, kind)), apply):
        do_together(replica.world.gather_objects, f"{root} could not be loaded", phase)
    return {"loaded": (read[0].step, 0, str(root), [], None), "shards": {}}


def _apply(found: Contents, replica: Savable, *, strict: bool) -> None:
    """Load everything into the replica and its world; checks come before the first change. If it does not fit, the
    caller is wrong; if parts have a wrong type, it is broken."""
    world, whole = replica.world, found.whole
    try:
        _apply_model_and_optimizer(found, replica, strict=strict)
        locals_ = [own["local"] for own in found.owns]
        own_part = {"local": locals_[0]} if found.same_world else {"locals": locals_}
        replica.load_state_dict({"shared": whole["strategy"], **own_part}, same_world=found.same_world)
        _apply_average(whole.get("average"), replica)
        world.ledger.resume(whole["ledger"]["step_count"])
        _place_shards(whole["shards"], world)
    except (TypeError, AttributeError, LookupError, ArithmeticError) as error:
        raise CheckpointError(f"its parts are not as un.save writes them: {error!r}") from error
    _apply_rng([own["rng"] for own in found.owns], found, world)


def _find_average(replica: Savable) -> Any:
    """The average of the weights that a replica keeps (see `un.average`), or None."""
    return getattr(replica, "weight_average", None)


def _apply_average(saved: Any, replica: Savable) -> None:
    average, problem = _find_average(replica), ""
    if average is not None:
        average.load(saved)
        if saved is None:
            problem = "it holds no average of the weights: the average restarts with the next step that counts"
    elif saved is not None:
        problem = (
            f"it holds an average of the weights (decay={saved['decay']!r}, {saved['updates']} updates), and this run "
            "keeps none: call un.average(replica) before un.load, else it is lost with the next save"
        )
    if problem and replica.world.rank == 0:
        warnings.warn(f"the checkpoint was loaded, and {problem}", stacklevel=2)


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
        raise CheckpointError(
            f"{file} has a state of the random number generators that cannot be restored: {error!r}"
        ) from error


def _apply_model_and_optimizer(found: Contents, replica: Savable, *, strict: bool) -> None:
    model, saved, optimizer = unwrap(replica.model), OrderedDict(found.whole["model"]), found.whole["optimizer"]
    parts = replica.sharded_state()
    mine = model.state_dict() if parts is None else parts["model"]
    groups = replica.optimizer.param_groups if parts is None else parts["optimizer"]["param_groups"]
    check_model(mine, saved, strict=strict)
    fits = False
    if optimizer is not None:
        counts = [len(member.param_groups) for member in members_of(replica.optimizer)]
        mine_kind = Kind(describe_optimizer(replica.optimizer), counts, groups)
        saved_counts = found.whole.get("optimizer_groups", [len(optimizer["param_groups"])])
        saved_kind = Kind(found.whole["optimizer_type"], saved_counts, optimizer["param_groups"])
        fits = check_optimizer(mine_kind, saved_kind, strict=strict)
    if parts is not None:
        fitting = {name: value for name, value in saved.items() if name in mine}
        whole = {"model": fitting, "optimizer": optimizer if fits else None}
        replica.load_sharded_state(whole, same_world=found.same_world)
        return
    saved = OrderedDict(read_all(dict(saved)))
    saved._metadata = found.whole["versions"]  # type: ignore[attr-defined]
    model.load_state_dict(saved, strict=strict)
    if fits:
        load_optimizer(replica.optimizer, read_all(optimizer))
