"""A mesh's model and optimizer as one, for checkpoints: every rank saves and loads its part of whole tensors.

What lies in the folder is the whole model under its own names, with the optimizer's state numbered as plain PyTorch
would: any other mesh can go on from it, a world without one, and plain PyTorch. A strategy's own state (residuals,
anchors) goes over where the tensor and pipeline axes are the same; elsewhere it begins anew.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from unisono.launchers.runtime.frames import warn_user
from unisono.methods.hybrid.local_tensors import Split, find_split
from unisono.methods.strategy import Replica
from unisono.training.checkpoint import ModelPart
from unisono.training.checkpoint.slices import Piece, Span, Stored, list_runs

if TYPE_CHECKING:
    from unisono.methods.hybrid.axes import Mesh

__all__ = ["MeshState", "cut_stored", "spread_piece"]


class MeshState:
    """What `un.save` and `un.load` ask of a replica, answered for the whole mesh. Every rank makes one together.

    names: of the parameters in the optimizer's groups on this rank.
    """

    def __init__(self, mesh: Mesh, replica: Replica, names: Sequence[Sequence[str]]) -> None:
        self.mesh, self.replica = mesh, replica
        self.world, self.model, self.optimizer, self.step = mesh.world, replica.model, replica.optimizer, replica.step
        self.strategy = type(f"{type(replica.strategy).__name__} on {mesh}", (), {})()
        self._names = [list(group) for group in names]
        self._params = dict(replica.model.named_parameters(remove_duplicate=False))
        self._own_state = replica.state_dict()
        self._own_values: dict[str, Any] | None = None
        parts = replica.sharded_state()
        self._parts: dict[str, Any] = self._average_where_different() if parts is None else parts
        self._wholes, self._owner = self._gather_wholes()
        self._groups = self._gather_groups()
        self._counted = self._gather_counts()

    # What a replica says of itself -----------------------------------------------------------------------------------

    def present_ranks(self) -> list[int]:
        """All ranks."""
        return list(range(self.world.size))

    def gather_present(self, obj: Any) -> dict[int, Any]:
        """Every rank's `obj`, in the order of ranks."""
        return dict(enumerate(self.world.gather_objects(obj)))

    def model_part(self) -> ModelPart:
        """No part of the model stands for the whole: it is saved in pieces."""
        return ModelPart()

    @property
    def optimizer_names(self) -> list[str]:
        """The names of the optimizer's parameters, by their numbers."""
        return [name for group in self._groups for name in group]

    # What all ranks know ---------------------------------------------------------------------------------------------

    def _average_where_different(self) -> dict[str, Any]:
        """Model and optimizer of this rank; where the ranks of the data axis have their own, the mean of the models,
        with the optimizer of the first (and what is this rank's own is kept for itself)."""
        model, optimizer = self.replica.model, self.replica.optimizer
        parts = {"model": dict(model.state_dict()), "optimizer": optimizer.state_dict()}
        data = self.mesh.data
        if len(set(data.gather_objects(_digest(parts)))) == 1:
            return parts
        self._own_values = {"model": dict(parts["model"]), "optimizer": parts["optimizer"]}
        part = self.replica.model_part()
        for name, x in model.state_dict(keep_vars=True).items():
            if isinstance(x, Tensor) and x.is_floating_point() and not any(x is y for y in part.first):
                weight = float(part.weights.get(x, 1.0))
                value = part.values.get(x, x).detach().to(torch.float64) * weight
                total = torch.tensor([weight], dtype=torch.float64, device=value.device)
                data.all_reduce([value, total], "sum", tag="checkpoint").wait()
                parts["model"][name] = (value / total).to(x.dtype)
        return parts

    def _gather_wholes(self) -> tuple[dict[str, list[Any]], dict[str, int]]:
        """Dtype and shape of every tensor of the whole model, and the first stage that has it."""
        mine = {}
        for name, value in self._parts["model"].items():
            if isinstance(value, Tensor | Piece):
                split = self._find_split(name)
                shape = value.shape if split is None else split.shape
                mine[name] = [value.dtype, list(shape)]
        wholes: dict[str, list[Any]] = {}
        owner: dict[str, int] = {}
        for place, found in enumerate(self.mesh.model.gather_objects({k: [str(d), s] for k, (d, s) in mine.items()})):
            for name, (dtype, shape) in found.items():
                wholes.setdefault(name, [getattr(torch, dtype.removeprefix("torch.")), shape])
                owner.setdefault(name, place // self.mesh.sizes[1])
        return wholes, owner

    def _gather_groups(self) -> list[list[str]]:
        """The names in each group of the optimizer of the whole model, in the model's order."""
        every = self.mesh.model.gather_objects(self._names)
        if len({len(groups) for groups in every}) > 1:
            raise ValueError(
                f"the optimizers of the stages have {sorted({len(groups) for groups in every})} groups of parameters: "
                "give every stage as many, if need be with no parameters"
            )
        order: list[str] = getattr(self.replica.model, "unisono_names", [])
        place = {name: i for i, name in enumerate(order)}
        merged = []
        for groups in zip(*every, strict=True):
            names = list(dict.fromkeys(name for group in groups for name in group))
            merged.append(sorted(names, key=lambda name: place.get(name, 0)) if place else names)
        return merged

    def _gather_counts(self) -> set[tuple[str, str]]:
        """Of state without an element for each of a parameter's (a count of steps): what this rank is to save."""
        mine = [[name, key] for name, key, value in self._list_states() if not self._is_spread(name, key, value)]
        every = self.mesh.data.gather_objects(mine)
        first: dict[tuple[str, str], int] = {}
        for place, found in enumerate(every):
            for name, key in found:
                first.setdefault((name, key), place)
        return {one for one, place in first.items() if place == self.mesh.data.rank}

    def _list_states(self) -> Iterator[tuple[str, str, Any]]:
        flat = [name for group in self._names for name in group]
        for number, entry in self._parts["optimizer"]["state"].items():
            for key, value in entry.items():
                yield flat[number], key, value

    def _is_spread(self, name: str, key: str, value: Any) -> bool:
        """Whether a state has an element for each of the parameter's."""
        return isinstance(value, Piece) or (
            isinstance(value, Tensor) and key != "step" and value.shape == self._params[name].shape
        )

    def _find_split(self, name: str) -> Split | None:
        return find_split(self._params[name]) if name in self._params else None

    # Saving ------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """All that is a strategy's own is this rank's: ranks of other stages have other parameters."""
        shared = {
            "step": self.replica.step,
            "mesh": list(self.mesh.sizes),
            "of": type(self.replica.strategy).__name__,
        }
        return {"shared": shared, "local": {**self._own_state, "values": self._own_values}}

    def sharded_state(self) -> dict[str, Any]:
        """Pieces of whole tensors, each element held by one rank."""
        made: dict[int, Piece] = {}
        values = self._parts["model"]
        model: dict[str, Any] = {}
        for name, (dtype, shape) in self._wholes.items():
            if name not in values:
                model[name] = Piece(shape, dtype)
                continue
            value = values[name]
            key = id(self._params.get(name, value))
            if key not in made:
                made[key] = self._spread(value, self._find_split(name), self._owner[name])
            model[name] = made[key]
        model |= {name: value for name, value in values.items() if name not in self._wholes}
        return {"model": model, "optimizer": self._spread_optimizer()}

    def _spread(self, value: Tensor | Piece, split: Split | None, stage: int) -> Piece:
        d, t, p = self.mesh.place
        mine = p == stage and (split is not None or t == 0)
        held = _give(value, mine and (d == 0 or isinstance(value, Piece)))
        return held if split is None else spread_piece(held, split)

    def _spread_optimizer(self) -> dict[str, Any]:
        numbers = {name: i for i, name in enumerate(name for group in self._groups for name in group)}
        state: dict[int, dict[str, Any]] = {}
        for name, key, value in self._list_states():
            if self._is_spread(name, key, value):
                value = self._spread(value, self._find_split(name), self.mesh.place[2])
            elif isinstance(value, Tensor):
                value = _give(value, self.mesh.place[1] == 0 and (name, key) in self._counted)
            state.setdefault(numbers[name], {})[key] = value
        groups = []
        for group, names in zip(self._parts["optimizer"]["param_groups"], self._groups, strict=True):
            groups.append({**group, "params": [numbers[name] for name in names]})
        return {"state": dict(sorted(state.items())), "param_groups": groups}

    # Loading -----------------------------------------------------------------------------------------------------

    def load_sharded_state(self, whole: dict[str, Any], *, same_world: bool) -> None:
        """Take this rank's part of a whole model and optimizer."""
        values = self._parts["model"]
        model = {
            name: self._cut(value, self._find_split(name)) for name, value in whole["model"].items() if name in values
        }
        optimizer = None if whole["optimizer"] is None else self._cut_optimizer(whole["optimizer"])
        if self.replica.sharded_state() is not None:
            self.replica.load_sharded_state({"model": model, "optimizer": optimizer}, same_world=same_world)
            return
        self.replica.model.load_state_dict(_read_all(model), strict=False)
        if optimizer is not None:
            self.replica.optimizer.load_state_dict(_read_all(optimizer))

    def _cut(self, value: Any, split: Split | None) -> Any:
        if isinstance(value, Tensor):
            value = Stored.of(value)
        return cut_stored(value, split) if split is not None and isinstance(value, Stored) else value

    def _cut_optimizer(self, whole: dict[str, Any]) -> dict[str, Any]:
        every = [name for group in self._groups for name in group]
        saved = dict(zip(every, (n for group in whole["param_groups"] for n in group["params"]), strict=True))
        state: dict[int, dict[str, Any]] = {}
        position, groups = 0, []
        for group, names in zip(whole["param_groups"], self._names, strict=True):
            for number, name in enumerate(names, position):
                for key, value in whole["state"].get(saved[name], {}).items():
                    split = self._find_split(name)
                    fits = split is not None and key != "step" and getattr(value, "shape", None) == split.shape
                    state.setdefault(number, {})[key] = self._cut(value, split if fits else None)
            groups.append({**group, "params": list(range(position, position + len(names)))})
            position += len(names)
        return {"state": state, "param_groups": groups}

    def load_state_dict(self, state: dict[str, Any], *, same_world: bool) -> None:
        """Take the strategy's own state, where it was saved for parameters that are split as here."""
        shared = state["shared"]
        if same_world:
            own = state["local"]
            if own["values"] is not None:
                self.replica.model.load_state_dict(own["values"]["model"])
                self.replica.optimizer.load_state_dict(own["values"]["optimizer"])
            self.replica.load_state_dict({"shared": own["shared"], "local": own["local"]}, same_world=True)
            return
        kin = self._find_kin(shared, state["locals"])
        if kin:
            fitting = {"shared": kin[0]["shared"], "locals": [one["local"] for one in kin]}
            self.replica.load_state_dict(fitting, same_world=False)
            return
        held = [_holds_tensors(one.get("local")) for one in state["locals"] if isinstance(one, dict)]
        if self.world.rank == 0 and any(held):
            warn_user(
                f"the checkpoint was saved where parameters were not split as in {self.mesh}: model and optimizer are "
                "loaded; what the strategy kept for itself (residuals still to be sent) is reset"
            )
        fresh = self.replica.shared_state() | {"step": shared["step"]}
        if "anchors" in fresh:
            fresh["anchors"] = None  # the model as it is now
        self.replica.load_state_dict({"shared": fresh, "local": self.replica.local_state()}, same_world=True)

    def _find_kin(self, shared: Mapping[str, Any], locals_: Sequence[Any]) -> list[Any]:
        """The states of the former ranks that had the same part of the model, under the same strategy."""
        ds, ts, ps = shared.get("mesh", (0, 0, 0))
        if (ts, ps) != self.mesh.sizes[1:] or shared["of"] != type(self.replica.strategy).__name__:
            return []
        _, t, p = self.mesh.place
        return [locals_[(p * ds + d) * ts + t] for d in range(ds)]


def _give(value: Tensor | Piece, mine: bool) -> Piece:
    """A tensor as a piece: with all its elements, or with none if another rank gives them."""
    if not mine:
        return Piece(value.shape, value.dtype)
    return value if isinstance(value, Piece) else Piece.of(value.detach().reshape(-1), 0, shape=value.shape)


def _digest(value: Any) -> str:
    """A digest of all tensors in nested state."""
    summed = hashlib.blake2b(digest_size=16)

    def add(x: Any) -> None:
        if isinstance(x, Tensor):
            summed.update(x.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
        elif isinstance(x, Mapping):
            for one in x.values():
                add(one)

    add(value)
    return summed.hexdigest()


def _holds_tensors(state: Any) -> bool:
    if isinstance(state, Mapping):
        return any(_holds_tensors(x) for x in state.values())
    return isinstance(state, Tensor) or (isinstance(state, list) and any(_holds_tensors(x) for x in state))


def _read_all(value: Any) -> Any:
    """The same with every stored tensor read."""
    if isinstance(value, Stored):
        return value.full()
    if isinstance(value, dict):
        return {key: _read_all(x) for key, x in value.items()}
    return [_read_all(x) for x in value] if isinstance(value, list) else value


# A part of a tensor, in the order of the whole -----------------------------------------------------------------


def spread_piece(piece: Piece, split: Split) -> Piece:
    """A piece of this rank's part, as a piece of the whole."""
    length, starts = list_runs(split.shape, *split.block)
    spans = []
    for start, stop, read in piece.spans:
        for run in range(start // length, -(-stop // length)):
            first, last = max(start, run * length), min(stop, (run + 1) * length)
            shift = starts[run] - run * length
            spans.append(Span(first + shift, last + shift, partial(_read_shifted, read, -shift)))
    return Piece(split.shape, piece.dtype, spans)


def cut_stored(stored: Stored, split: Split) -> Stored:
    """This rank's part of a whole tensor that lies in a checkpoint."""
    length, starts = list_runs(split.shape, *split.block)
    spans = [
        Span(run * length, (run + 1) * length, partial(_read_shifted, stored.read, start - run * length))
        for run, start in enumerate(starts)
    ]
    return Stored(split.block[0], stored.dtype, spans, stored.name)


def _read_shifted(read: Any, shift: int, first: int, last: int) -> Tensor:
    found: Tensor = read(first + shift, last + shift)
    return found
