"""Programs of PyTorch's own parallelism, each a function of a process group that gives what was learned."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

Program = Callable[[Any], list[Tensor]]
PROGRAMS: dict[str, Program] = {}
STEPS = 4


def program(function: Program) -> Program:
    PROGRAMS[function.__name__] = function
    return function


def make(width: int = 8) -> nn.Module:
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(6, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 4))


def batch(step: int, rows: int = 4, *, rank: int | None = None) -> Tensor:
    generator = torch.Generator().manual_seed(31 * step + (dist.get_rank() if rank is None else rank))
    return torch.randn(rows, 6, generator=generator)


def train(model: Any, steps: int = STEPS, same: bool = False) -> list[Tensor]:
    """The loop that every user writes."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    for step in range(steps):
        optimizer.zero_grad()
        model(batch(step, rank=0 if same else None)).square().mean().backward()
        optimizer.step()
    return _values(model)


def _values(model: Any) -> list[Tensor]:
    found = [p.detach() for p in model.parameters()]
    return [p.full_tensor() if hasattr(p, "full_tensor") else p.clone() for p in found]


# DistributedDataParallel -------------------------------------------------------------------------------------


@program
def ddp(group: Any) -> list[Tensor]:
    return train(DistributedDataParallel(make(), process_group=group))


@program
def ddp_in_many_buckets(group: Any) -> list[Tensor]:
    return train(DistributedDataParallel(make(), process_group=group, bucket_cap_mb=1e-4, gradient_as_bucket_view=True))


@program
def ddp_large_buckets(group: Any) -> list[Tensor]:
    """Whose memory ranks read from each other, also with gradients that are views of it."""
    found = []
    for is_view in (False, True):
        model = DistributedDataParallel(make(400), process_group=group, gradient_as_bucket_view=is_view)
        found += train(model, 6)
    return found


@program
def ddp_static_graph(group: Any) -> list[Tensor]:
    return train(DistributedDataParallel(make(), process_group=group, static_graph=True))


@program
def ddp_unused_parameters(group: Any) -> list[Tensor]:
    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.left, self.right, self.step = make(), make(), 0

        def forward(self, x: Tensor) -> Tensor:
            self.step += 1
            found: Tensor = (self.left if (self.step + dist.get_rank()) % 2 else self.right)(x)
            return found

    return train(DistributedDataParallel(Branches(), process_group=group, find_unused_parameters=True))


@program
def ddp_no_sync(group: Any) -> list[Tensor]:
    model = DistributedDataParallel(make(), process_group=group)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):
        with model.no_sync():
            model(batch(2 * step)).square().mean().backward()
        model(batch(2 * step + 1)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return _values(model)


@program
def ddp_uneven_inputs(group: Any) -> list[Tensor]:
    model = DistributedDataParallel(make(), process_group=group)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with model.join():
        for step in range(2 + dist.get_rank()):
            optimizer.zero_grad()
            model(batch(step)).square().mean().backward()
            optimizer.step()
    return _values(model)


@program
def ddp_with_buffers(group: Any) -> list[Tensor]:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 4))
    wrapped = DistributedDataParallel(model, process_group=group)
    return [*train(wrapped), model[1].running_mean.clone()]


@program
def ddp_compiled(group: Any) -> list[Tensor]:
    """Inside which torch's C++ calls the group: its Python is not compiled along."""
    torch._dynamo.reset()
    return train(torch.compile(DistributedDataParallel(make(), process_group=group), backend="eager"))


@program
def ddp_hook_fp16(group: Any) -> list[Tensor]:
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

    model = DistributedDataParallel(make(), process_group=group)
    model.register_comm_hook(group, fp16_compress_hook)
    return train(model)


@program
def ddp_hook_powersgd(group: Any) -> list[Tensor]:
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

    model = DistributedDataParallel(make(32), process_group=group)
    state = powerSGD_hook.PowerSGDState(group, matrix_approximation_rank=1, start_powerSGD_iter=2)
    model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    return train(model)


# Shards ------------------------------------------------------------------------------------------------------


@program
def fsdp2(group: Any) -> list[Tensor]:
    from torch.distributed.fsdp import fully_shard

    model, mesh = make(), DeviceMesh.from_group(group, "cpu")
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return train(model)


@program
def tensor_parallel(group: Any) -> list[Tensor]:
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = DeviceMesh.from_group(group, "cpu")
    model = parallelize_module(make(), mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    return train(model, same=True)


@program
def sequence_parallel(group: Any) -> list[Tensor]:
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = DeviceMesh.from_group(group, "cpu")
    plan = {
        "0": ColwiseParallel(input_layouts=Replicate(), output_layouts=Shard(-1)),
        "2": RowwiseParallel(output_layouts=Shard(0)),
        "4": ColwiseParallel(input_layouts=Shard(0), output_layouts=Replicate()),
    }
    return train(parallelize_module(make(), mesh, plan), same=True)


@program
def distributed_tensors(group: Any) -> list[Tensor]:
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = DeviceMesh.from_group(group, "cpu")
    x, y = (
        distribute_tensor(batch(0, 6, rank=0), mesh, [Shard(0)]),
        distribute_tensor(batch(1, 6, rank=0), mesh, [Shard(1)]),
    )
    return [
        (x.redistribute(mesh, [Shard(1)]) + y).full_tensor(),
        (x.t() @ x).redistribute(mesh, [Replicate()]).to_local(),
        x.sum().full_tensor(),
    ]


# Pipelines ---------------------------------------------------------------------------------------------------


def _pipeline(group: Any, schedule_name: str) -> list[Tensor]:
    from torch.distributed import pipelining

    whole = make()
    rank, size = dist.get_rank(), dist.get_world_size()
    cut = [0, 2, len(whole)] if size == 2 else [0, *range(1, size), len(whole)]
    model = copy.deepcopy(whole[cut[rank] : cut[rank + 1]])
    stage = pipelining.PipelineStage(model, rank, size, torch.device("cpu"), group=group)
    schedule = getattr(pipelining, schedule_name)(stage, n_microbatches=4, loss_fn=nn.functional.mse_loss)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses: list[Tensor] = []
    for step in range(STEPS):
        optimizer.zero_grad()
        given = [batch(step, 8, rank=0)] if rank == 0 else []
        last = {"target": batch(50 + step, 8, rank=0)[:, :4], "losses": losses} if rank == size - 1 else {}
        schedule.step(*given, **last)
        optimizer.step()
    return [*_values(model), *losses]


@program
def pipeline_gpipe(group: Any) -> list[Tensor]:
    return _pipeline(group, "ScheduleGPipe")


@program
def pipeline_1f1b(group: Any) -> list[Tensor]:
    return _pipeline(group, "Schedule1F1B")


# Checkpoints -------------------------------------------------------------------------------------------------


@program
def checkpoints(group: Any) -> list[Tensor]:
    """Sharded values saved by torch.distributed.checkpoint, and loaded into another model."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.fsdp import fully_shard

    made = tempfile.TemporaryDirectory()
    folder = [made.name]
    dist.broadcast_object_list(folder, 0, group=group)  # rank 0's
    mesh = DeviceMesh.from_group(group, "cpu")
    first, second = make(), make()
    fully_shard(first, mesh=mesh)
    trained = train(first, 2)
    dcp.save({"model": first.state_dict()}, checkpoint_id=folder[0], process_group=group)
    fully_shard(second, mesh=mesh)
    state = {"model": second.state_dict()}
    dcp.load(state, checkpoint_id=folder[0], process_group=group)
    second.load_state_dict(state["model"])
    for before, after in zip(trained, _values(second), strict=True):
        assert torch.equal(before, after)
    dist.barrier(group=group)  # all have read
    made.cleanup()
    return trained
