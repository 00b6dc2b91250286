"""`un.mesh`: the ranks of a world on three axes. The data axis is a world of ours, the others are torch's."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from unisono.methods.hybrid.local_tensors import (
    Copies,
    clip_gradients,
    localise,
    mark_gradients,
    refuse_whole_tensors,
)
from unisono.methods.hybrid.pipeline import AHEAD, Pipeline
from unisono.methods.hybrid.plans import tensor_plan
from unisono.methods.hybrid.saving import MeshState
from unisono.methods.strategy import ChangingReplica, Replica, share
from unisono.world import World, join
from unisono.world.backend.accounts import share_ledger

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["AXES", "Mesh", "choose_sizes", "list_fitting", "mesh"]

AXES = ("data", "tensor", "pipeline")


def mesh(
    *,
    data: int | None = None,
    tensor: int | None = None,
    pipeline: int | None = None,
    backend: str | None = None,
    world: World | None = None,
) -> Mesh:
    """The ranks of `world` (default: `un.join()`) as a mesh of data × tensor × pipeline.

    One axis may be -1: it takes the remaining ranks. If `data` is left out, the data axis takes them; the other axes
    then have one rank. Neighbouring ranks are on the tensor axis, as it sends most; the pipeline axis is the outermost.
    One process alone is a mesh of ones: every call of the mesh works there too. A simulated world has the data axis
    alone.

    `backend` is that of torch's groups for the tensor and pipeline axes: by default "unisono" if torch knows it,
    else "nccl" on CUDA devices and "gloo" on CPUs. If the program has created a default group, that is used.

    >>> mesh(data=2, tensor=2, world=World())  # one process
    Mesh(data=1, tensor=1, pipeline=1)
    """
    world = world if world is not None else join()
    if world.elastic is not None:
        raise ValueError(
            "a mesh needs every rank, and in an elastic run nobody can take a lost stage's place: use a fixed number "
            "of workers (-n N)"
        )
    if world.transport is not None and world.transport.name == "simulated":  # of which only this rank exists
        return Mesh(world, (world.size, 1, 1), backend)
    sizes = choose_sizes(world.size, data=data, tensor=tensor, pipeline=pipeline)
    return Mesh(world, sizes, backend)


class Mesh:
    """Where this rank is on each axis, and who is with it.

    data: the world of the data axis, for `un.parallel(..., world=mesh.data)` and `un.shard(..., world=mesh.data)`.
    tensor, pipeline: torch's DeviceMesh of these axes; None where the axis has one rank.
    model: the world of the ranks that hold one copy of the model together: tensor and pipeline.
    world: all ranks.
    sizes, place: (data, tensor, pipeline): how many ranks there are, and which of them this one is.
    """

    def __init__(self, world: World, sizes: tuple[int, int, int], backend: str | None = None) -> None:
        self.world, self.sizes = world, sizes
        ds, ts, ps = sizes
        self.place = (world.rank // ts % ds, world.rank % ts, world.rank // (ds * ts))
        self._ranks = ranks = torch.arange(world.size).view(ps, ds, ts)
        self.data = world.split(ranks.transpose(1, 2).reshape(-1, ds).tolist())
        self.model = world.split(ranks.transpose(0, 1).reshape(ds, -1).tolist())
        self.data.axes = self
        self.data.shards, self.data.pending_shards = world.shards, world.pending_shards  # a checkpoint is of all ranks
        self.device_mesh: DeviceMesh | None = None
        if ts * ps > 1:
            if not dist.is_initialized():
                _form_group(world, backend)
            self.device_mesh = dist.init_device_mesh(
                world.device.type, (ps, ds, ts), mesh_dim_names=("pipeline", "data", "tensor")
            )
        self._names: weakref.WeakKeyDictionary[nn.Module, list[list[str]]] = weakref.WeakKeyDictionary()
        self._pipelines: weakref.WeakSet[Pipeline] = weakref.WeakSet()
        self._reads_norms = False
        self._copies: weakref.WeakKeyDictionary[nn.Module, Copies] = weakref.WeakKeyDictionary()

    def __repr__(self) -> str:
        return "Mesh(data={}, tensor={}, pipeline={})".format(*self.sizes)

    @property
    def tensor(self) -> DeviceMesh | None:
        """torch's mesh of the tensor axis, as `parallelize_module` takes it."""
        return self.device_mesh["tensor"] if self.device_mesh is not None and self.sizes[1] > 1 else None

    @property
    def pipeline(self) -> DeviceMesh | None:
        """torch's mesh of the pipeline axis, whose group its schedules take."""
        return self.device_mesh["pipeline"] if self.device_mesh is not None and self.sizes[2] > 1 else None

    # Making a model ready ------------------------------------------------------------------------------------------

    def parallelize(self, model: nn.Module, plan: dict[str, Any] | None = None) -> nn.Module:
        """Split the model's layers over the tensor axis by a plan (default: `un.tensor_plan(model)`), in place.

        Rank 0's model becomes everyone's first. It is torch's `parallelize_module`; parameters are then this rank's
        parts, as plain tensors: make the optimizer after it. Entries of modules that the model has not are left out, as
        a stage has only some.
        """
        if self.sizes[1] == 1:
            return model
        from torch.distributed.tensor.parallel import parallelize_module

        stages = self._ranks.reshape(self.sizes[2], -1).tolist()
        share(model, self.world if len(stages) == 1 else self.world.split(stages))
        chosen = plan if plan is not None else tensor_plan(model, ranks=self.sizes[1])
        known = {name for name, _ in model.named_modules(remove_duplicate=False)}
        here = {name: style for name, style in chosen.items() if name in known}
        if here:
            assert self.tensor is not None
            parallelize_module(model, self.tensor, here)
        localise(model)
        for layer in model.modules():
            if isinstance(layer, nn.TransformerEncoderLayer):
                layer.activation_relu_or_gelu = 0  # torch's shortcut for inference takes no split weights
        return model

    def pipe(
        self,
        model: nn.Module,
        example: Any,
        loss: Callable[[Tensor, Tensor], Tensor],
        *,
        microbatches: int = 4,
        schedule: str = "1F1B",
        plan: dict[str, Any] | None = None,
        chunks: int | None = None,
        ahead: int = AHEAD,
    ) -> Pipeline:
        """Split the model into stages over the pipeline axis, and each stage over the tensor axis.

        `example` is a microbatch: what the model is called with. `schedule` is one of torch's: "GPipe", "1F1B",
        "Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble". `chunks`: stages a rank, for the last three
        (default 2). `plan`: of the tensor axis, as for `parallelize`. `ahead`: of 1F1B, how many more microbatches each
        stage has under way than the one after it needs; one hides the way of messages, 0 takes least memory.

        Give `pipe.module` to the optimizer and to `un.parallel`, and train with `pipe.step(inputs, targets)`.
        """
        made = Pipeline(
            self,
            model,
            example,
            loss,
            microbatches=microbatches,
            schedule=schedule,
            plan=plan,
            chunks=chunks,
            ahead=ahead,
        )
        self._pipelines.add(made)
        return made

    def count_microbatches(self, model: nn.Module) -> int:
        """In how many a step of this model's pipeline runs; 1 without one."""
        return max((pipe.microbatches for pipe in self._pipelines if pipe.module is model), default=1)

    def seed(self, seed: int) -> None:
        """Seed the random numbers: the same on the tensor axis, where all ranks compute the same, others elsewhere."""
        d, _, p = self.place
        torch.manual_seed(seed + 1000003 * d + 7919 * p)

    # Gradients -----------------------------------------------------------------------------------------------------

    def clip_grad_norm_(
        self, parameters: Iterable[Tensor], max_norm: float, norm_type: float = 2.0, *, error_if_nonfinite: bool = False
    ) -> Tensor:
        """What `torch.nn.utils.clip_grad_norm_` does, with the norm over all ranks that hold one model together: every
        parameter of it counts once. Every rank calls it, with the parameters of its own part."""
        self._reads_norms = True
        try:
            total = clip_gradients(self, list(parameters), float(max_norm), float(norm_type))
        finally:
            self._reads_norms = False
        if error_if_nonfinite and not bool(torch.isfinite(total)):
            raise RuntimeError(
                f"the norm of order {norm_type} of the gradients is {float(total)}, it cannot be clipped"
            )
        return total

    def clip(self, parameters: Any, max_norm: float) -> Tensor:
        """See `clip_grad_norm_`."""
        return self.clip_grad_norm_(parameters, max_norm)

    def check_norm(self) -> None:
        """Refuse the norm of a part of the model's gradients."""
        if self.model.size > 1 and not self._reads_norms:
            raise RuntimeError(
                f"a norm of gradients of which other ranks of {self} have parts: this rank's part is not the norm, and "
                "clipping by it would let the ranks' models drift apart. Use mesh.clip_grad_norm_(parameters, max_norm)"
            )

    def agree_overflow(self, found_inf: Tensor) -> None:
        """Where any rank of the model found a value that is not finite, all have."""
        self.model.all_reduce(found_inf, "max", tag="overflow").wait()

    # What a replica in the data axis asks --------------------------------------------------------------------------

    def prepare(self, model: nn.Module, optimizer: Optimizer) -> None:
        """Let model and optimizer hold this rank's parts of split parameters, and note which names it steps."""
        refuse_whole_tensors(model, optimizer)
        localise(model, optimizer)
        names = {param: name for name, param in model.named_parameters()}
        self._names[model] = [[names[p] for p in group["params"]] for group in optimizer.param_groups]

    def attach(self, replica: Replica) -> None:
        """The replica is bound: let the copies of what the tensor axis does not split stay alike."""
        if self.model.size > 1 and isinstance(replica, ChangingReplica):
            replica.close()
            raise ValueError(
                f"{type(replica.strategy).__name__} decides on each data axis by itself, and {self} has "
                f"{self.model.size}: they could choose differently. Name the method that all are to use"
            )
        pipes = [pipe for pipe in self._pipelines if pipe.module is replica.model]
        for pipe in pipes:
            if problem := pipe.refuse(replica):
                replica.close()
                raise ValueError(problem)
        if self.sizes[1] > 1:
            if (former := self._copies.get(replica.model)) is not None:
                former.close()
            self._copies[replica.model] = Copies(
                replica, self.world.split(self._ranks.reshape(-1, self.sizes[1]).tolist())
            )
        for pipe in pipes:
            pipe.replica = weakref.ref(replica)

    def end_window(self, replica: Replica) -> None:
        """Gradients are there: from here on their norms are a matter of all ranks, and so is an overflow."""
        if (copies := self._copies.get(replica.model)) is not None:
            copies.agree_on_gradients()
        if self.model.size > 1:
            mark_gradients(self, replica)

    def make_savable(self, replica: Replica) -> MeshState:
        """Model and optimizer of the whole mesh, for `un.save` and `un.load`."""
        return MeshState(self, replica, self._names[replica.model])


def _form_group(world: World, backend: str | None) -> None:
    """Make torch's default process group of the world's ranks."""
    if backend is None:
        cuda = world.device.type == "cuda"
        backend = "unisono" if "unisono" in dist.Backend.backend_list else "nccl" if cuda else "gloo"
    if backend == "unisono":
        share_ledger(world.ledger)
    dist.init_process_group(backend, timeout=timedelta(minutes=10))


# How many ranks each axis has ----------------------------------------------------------------------------------------


def choose_sizes(ranks: int, *, data: int | None, tensor: int | None, pipeline: int | None) -> tuple[int, int, int]:
    """How many ranks (data, tensor, pipeline) have; ValueError with what would fit.

    -1 is what remains. An axis that is left out has 1 rank, but the data axis what remains, unless another is -1. One
    process alone is a mesh of ones, whatever is asked for.

    >>> choose_sizes(8, data=None, tensor=2, pipeline=None)
    (4, 2, 1)
    """
    asked = {"data": data, "tensor": tensor, "pipeline": pipeline}
    for name, size in asked.items():
        if size is not None and (type(size) is not int or (size < 1 and size != -1)):
            raise ValueError(f"{name}={size!r}: expected a number of ranks from 1 on, or -1 for what remains")
    rest = [name for name, size in asked.items() if size == -1]
    if len(rest) > 1:
        raise ValueError(f"{' and '.join(f'{name}=-1' for name in rest)}: only one axis can have what remains")
    if ranks == 1:
        return 1, 1, 1
    if not rest and data is None:
        rest = ["data"]
    given = {name: size or 1 for name, size in asked.items() if name not in rest}
    product = math.prod(given.values())
    if rest and ranks % product == 0:
        given[rest[0]] = ranks // product
    elif rest or product != ranks:
        shown = " × ".join(f"{name}={size}" for name, size in given.items() if size != 1) or "data=1"
        wrong = f"does not divide {ranks} ranks" if rest else f"makes {product} rank(s), not {ranks}"
        raise ValueError(f"{shown} {wrong}. What would fit: {_suggest(ranks, given)}")
    return given["data"], given["tensor"], given["pipeline"]


def list_fitting(ranks: int) -> list[tuple[int, int, int]]:
    """Every mesh (data, tensor, pipeline) of so many ranks.

    >>> list_fitting(2)
    [(1, 1, 2), (1, 2, 1), (2, 1, 1)]
    """
    divisors = [n for n in range(1, ranks + 1) if ranks % n == 0]
    return [(d, t, ranks // d // t) for d in divisors for t in divisors if ranks % (d * t) == 0]


def _suggest(ranks: int, given: dict[str, int]) -> str:
    """The meshes nearest to what was asked for."""

    def distance(sizes: tuple[int, int, int]) -> float:
        return sum(abs(math.log2(size / given.get(name, size))) for name, size in zip(AXES, sizes, strict=True))

    nearest = sorted(list_fitting(ranks), key=distance)[:8]
    return "; ".join(", ".join(f"{name}={n}" for name, n in zip(AXES, sizes, strict=True)) for sizes in nearest)
