"""Background saves of real workers: killed at any moment, and folders that FSDP2 has written on two ranks."""

from __future__ import annotations

import errno
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from test_resume import run_until_killed
from torch import nn

import unisono as un
from unisono.world import World

SCRIPT = """
import torch, unisono as un
world = un.join(device="cpu")
model = torch.nn.Linear(120, 120, bias=False)
replica = un.parallel(model, torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9), {strategy!r})
while True:
    replica.step += 1
    state = {{"0": replica.step}} | {{str(world.rank): replica.step}}
    un.save({folder!r}, replica, keep=3, background=True, extra=state)
"""


@pytest.mark.parametrize("strategy", ["allreduce", "zero(stage=3)"])
def test_two_workers_killed_during_background_saves_leave_a_whole_one(tmp_path: Path, strategy: str) -> None:
    folder, script = tmp_path / "run", tmp_path / "script.py"
    script.write_text(SCRIPT.format(folder=str(folder), strategy=strategy))
    newest = run_until_killed(script, folder)
    model = nn.Linear(120, 120, bias=False)
    replica = un.parallel(model, torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9), world=World())
    loaded = un.load(folder, replica)
    assert loaded.skipped == []
    assert loaded.step == loaded.extra["0"] == newest
    un.save(folder, replica)
    assert [path.name for path in folder.iterdir() if not path.name.startswith("step-")] == []


def save_last(folder: str, fails: bool) -> str:
    """A background save is the last that the program does; on rank 1 it takes its time, or fails."""
    from unisono.training.checkpoint import safetensors

    world = un.join(device="cpu")
    model = nn.Linear(3, 3)
    replica = un.parallel(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for x in un.shard(torch.ones(4, 3), batch_size=4):
        model(x).sum().backward()
        replica.optimizer.step()
    write = safetensors.write

    def write_late(*arguments: Any) -> Any:
        time.sleep(3.0)
        if fails:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(*arguments)

    if world.rank == 1:
        safetensors.write = write_late
    return un.save(folder, replica, background=True)


def test_the_error_of_a_last_save_is_its_workers(tmp_path: Path) -> None:
    with pytest.raises(un.WorkerError, match=f"step 1 in {tmp_path}.*could not be written.*No space left on device"):
        un.launch(save_last, workers=2, args=(str(tmp_path), True), threads=1, timeout_s=60)


def test_a_last_save_may_take_longer_than_a_process_to_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An elastic run kills processes whose program has ended, after a while."""
    monkeypatch.setattr("unisono.launchers.elastic.LEAVE_S", 0.5)
    ranks = un.launch(save_last, workers=2, least=1, args=(str(tmp_path), False), threads=1, timeout_s=60)
    assert ranks == [str(tmp_path / "step-0000000001")] * 2
    assert [path.name for path in tmp_path.iterdir()] == ["step-0000000001"]


def save_by_fsdp2(folder: str) -> dict[str, torch.Tensor]:
    """As torchtitan does: FSDP2 and torch.distributed.checkpoint on every rank; returns the whole model."""
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    world = un.join(device="cpu")
    store = dist.FileStore(f"{folder}-store", world.size)
    dist.init_process_group("gloo", store=store, rank=world.rank, world_size=world.size)
    model, optimizer = build()
    mesh = init_device_mesh("cpu", (world.size,))
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model(torch.randn(4, 5, generator=torch.Generator().manual_seed(1))).sum().backward()
    optimizer.step()
    states = get_state_dict(model, optimizer)
    dcp.save({"model": states[0], "optimizer": states[1], "step": 1}, checkpoint_id=folder)
    whole = {name: x.full_tensor().clone() for name, x in model.state_dict().items()}
    moments = {name: optimizer.state[p]["exp_avg"].full_tensor().clone() for name, p in model.named_parameters()}
    dist.destroy_process_group()
    return {**whole, **{f"exp_avg.{name}": x for name, x in moments.items()}}


def build() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def load_from_fsdp2(folder: str, strategy: str) -> dict[str, torch.Tensor]:
    world = un.join(device="cpu")
    model, optimizer = build()
    replica = un.parallel(model, optimizer, strategy)
    assert un.load(folder, replica).step == 1
    un.save(f"{folder}-ours-{world.size}", replica)
    return {name: x.clone() for name, x in replica.consolidate().state_dict().items()}


def test_what_fsdp2_saved_on_two_ranks_loads_under_other_strategies_and_worlds(tmp_path: Path) -> None:
    folder = str(tmp_path / "fsdp2")
    right = un.launch(save_by_fsdp2, workers=2, args=(folder,), threads=1, timeout_s=120)[0]
    for workers, strategy in ((3, "zero(stage=3)"), (1, "allreduce")):
        ranks = un.launch(load_from_fsdp2, workers=workers, args=(folder, strategy), threads=1, timeout_s=120)
        for state in ranks:
            assert all(torch.equal(value, right[name]) for name, value in state.items())
        saved = un.read_checkpoint(f"{folder}-ours-{workers}")["optimizer"]["state"]
        for number, (name, _) in enumerate(build()[0].named_parameters()):
            assert torch.equal(saved[number]["exp_avg"], right[f"exp_avg.{name}"])
