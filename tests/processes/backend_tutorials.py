"""PyTorch's own tutorials in small: the programs that they have their readers write, each over a default group.

DDP with torchrun (a trainer class, a sampler, snapshots), FSDP2 (a transformer, mixed precision, clipping, distributed
checkpoints), tensor parallelism (Llama-like blocks with sequence parallelism, sharded over the other dimension of a 2-D
mesh), pipelining (a traced transformer, cut where it says, by GPipe). Data is drawn, and models are small.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

TUTORIALS: dict[str, Callable[[str], list[Tensor]]] = {}
WIDTH, HEADS, LENGTH, WORDS = 16, 4, 8, 32


def tutorial(function: Callable[[str], list[Tensor]]) -> Callable[[str], list[Tensor]]:
    TUTORIALS[function.__name__] = function
    return function


def read_values(model: nn.Module) -> list[Tensor]:
    found: list[Any] = [p.detach() for p in model.parameters()]
    return [p.full_tensor() if hasattr(p, "full_tensor") else p.clone() for p in found]


def draw_text(rows: int, seed: int) -> Tensor:
    return torch.randint(WORDS, (rows, LENGTH), generator=torch.Generator().manual_seed(seed))


# Distributed data parallel, started by torchrun ---------------------------------------------------------------


class Trainer:
    """Epochs over a loader with a sampler; goes on from a snapshot where there is one."""

    def __init__(self, model: nn.Module, loader: Any, optimizer: torch.optim.Optimizer, snapshot: Path) -> None:
        from torch.nn.parallel import DistributedDataParallel

        self.local_rank, self.global_rank = int(os.environ["LOCAL_RANK"]), int(os.environ["RANK"])
        self.loader, self.optimizer, self.snapshot, self.epochs_run = loader, optimizer, snapshot, 0
        if snapshot.exists():
            found = torch.load(snapshot, map_location="cpu")
            model.load_state_dict(found["MODEL_STATE"])
            self.epochs_run = found["EPOCHS_RUN"]
        self.model = DistributedDataParallel(model)

    def train(self, epochs: int) -> None:
        for epoch in range(self.epochs_run, epochs):
            self.loader.sampler.set_epoch(epoch)
            for source, targets in self.loader:
                self.optimizer.zero_grad()
                F.mse_loss(self.model(source), targets).backward()
                self.optimizer.step()
            if self.local_rank == 0:
                torch.save({"MODEL_STATE": self.model.module.state_dict(), "EPOCHS_RUN": epoch + 1}, self.snapshot)
            dist.barrier()


@tutorial
def ddp_with_torchrun(folder: str) -> list[Tensor]:
    from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

    generator = torch.Generator().manual_seed(1)
    rows = TensorDataset(torch.rand(40, 20, generator=generator), torch.rand(40, 1, generator=generator))
    loader = DataLoader(rows, batch_size=4, shuffle=False, sampler=DistributedSampler(rows), num_workers=1)
    for epochs in (2, 3):  # the second one goes on from the snapshot
        torch.manual_seed(0)
        model = nn.Linear(20, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
        trainer = Trainer(model, loader, optimizer, Path(folder) / "snapshot.pt")
        trainer.train(epochs)
    assert trainer.epochs_run == 2
    return read_values(trainer.model)


# Fully sharded -------------------------------------------------------------------------------------------------


class Block(nn.Module):
    """Attention and an MLP, each behind a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm, self.ffn_norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.w1, self.w2 = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        normed = self.attention_norm(x)
        q, k, v = (f(normed).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for f in (self.wq, self.wk, self.wv))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.wo(mixed)
        found: Tensor = x + self.w2(F.silu(self.w1(self.ffn_norm(x))))
        return found


class Transformer(nn.Module):
    """Layers by name, as the tutorials have them."""

    def __init__(self, blocks: int = 2) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(blocks))
        self.norm, self.output = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tok_embeddings(tokens)
        for layer in self.layers:
            x = layer(x)
        found: Tensor = self.output(self.norm(x))
        return found


def loss_of(output: Tensor, tokens: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1).float(), tokens.roll(-1, 1).flatten())


@tutorial
def fsdp2(folder: str) -> list[Tensor]:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))

    def make(offload: OffloadPolicy) -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = Transformer()
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for layer in model.layers:
            fully_shard(layer, mesh=mesh, mp_policy=policy, offload_policy=offload)
        fully_shard(model, mesh=mesh, mp_policy=policy, offload_policy=offload)
        return model, torch.optim.Adam(model.parameters(), lr=1e-2)

    def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
        for step in steps:
            tokens = draw_text(2, 10 * step + dist.get_rank())
            loss_of(model(tokens), tokens).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
            optimizer.step()
            optimizer.zero_grad()

    model, optimizer = make(OffloadPolicy())
    train(model, optimizer, range(2))
    state = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    dcp.async_save(state, checkpoint_id=f"{folder}/dcp", process_group=dist.new_group(backend="gloo")).result()
    model, optimizer = make(CPUOffloadPolicy(pin_memory=False))
    state = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    dcp.load(state, checkpoint_id=f"{folder}/dcp")
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    train(model, optimizer, range(2, 4))
    return read_values(model)


# Tensor parallel, and sharded over the other dimension ---------------------------------------------------------


@tutorial
def tensor_parallel(folder: str) -> list[Tensor]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        RowwiseParallel,
        SequenceParallel,
        loss_parallel,
        parallelize_module,
    )

    mesh = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    whole = {
        "tok_embeddings": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "output": ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False),
    }
    model = parallelize_module(Transformer(), mesh["tp"], whole)
    gathered = {"input_layouts": Shard(1)}
    for layer in model.layers:
        plan = {
            "attention_norm": SequenceParallel(),
            **{name: ColwiseParallel(**gathered) for name in ("wq", "wk", "wv")},
            "wo": RowwiseParallel(output_layouts=Shard(1)),
            "ffn_norm": SequenceParallel(),
            "w1": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
            "w2": RowwiseParallel(output_layouts=Shard(1)),
        }
        parallelize_module(layer, mesh["tp"], plan)
        parallelize_module(layer, mesh["tp"], {"w1": ColwiseParallel()})
    fully_shard(model, mesh=mesh["dp"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=True)
    for step in range(3):
        tokens = draw_text(2, 10 * step + mesh["dp"].get_local_rank())
        with loss_parallel():
            loss_of(model(tokens), tokens).backward()
        optimizer.step()
        optimizer.zero_grad()
    return read_values(model)


# A pipeline ----------------------------------------------------------------------------------------------------


@tutorial
def pipeline(folder: str) -> list[Tensor]:
    from torch.distributed.pipelining import ScheduleGPipe, SplitPoint, pipeline

    rank, stages, parts = dist.get_rank(), dist.get_world_size(), 4
    torch.manual_seed(0)
    model = Transformer(blocks=stages)
    tokens = draw_text(2 * parts, 3)
    cuts = {f"layers.{i}": SplitPoint.BEGINNING for i in range(1, stages)}
    pipe = pipeline(module=model, mb_args=(tokens.chunk(parts)[0],), split_spec=cuts)
    stage = pipe.build_stage(rank, torch.device("cpu"), dist.group.WORLD)
    schedule = ScheduleGPipe(stage, n_microbatches=parts, loss_fn=loss_of)
    optimizer = torch.optim.SGD(stage.submod.parameters(), lr=0.1)
    losses: list[Tensor] = []
    for _ in range(2):
        optimizer.zero_grad()
        if rank == 0:
            schedule.step(tokens)
        elif rank == stages - 1:
            schedule.step(target=tokens, losses=losses)
        else:
            schedule.step()
        optimizer.step()
    return [*read_values(stage.submod), *[x.detach() for x in losses]]
