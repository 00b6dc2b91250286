"""ZeRO in real workers: against FSDP2, under a real limit of memory, and killed in the middle of a step."""

from __future__ import annotations

import os
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from test_resume import run_until_killed
from torch import Tensor, nn

import unisono as un
from preloaded import Program

SIZE, STEPS = 64, 6


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(m for _ in range(4) for m in (nn.Linear(SIZE, SIZE), nn.Tanh())))


def batch(step: int, rank: int) -> Tensor:
    return torch.randn(4, SIZE, generator=torch.Generator().manual_seed(100 * step + rank))


SIDES = ["fsdp2", "zero(stage=1)", "zero(stage=2)", "zero(stage=3)", "zero(stage=3, optimizer_on=disk, params_on=disk)"]


def beside_fsdp2() -> list[list[Tensor]]:
    """Train the same network under FSDP2 and under ours, with the same batches, accumulation and clipping."""
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard

    world = un.join(device="cpu")
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    ends = []
    for side in SIDES:
        model = network()
        if side == "fsdp2":
            for layer in (*model, model):
                if next(layer.parameters(), None) is not None:
                    fully_shard(layer)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        if side != "fsdp2":
            replica = un.parallel(model, optimizer, side, accumulate=2, unit_bytes=20000, world=world)
        for t in range(STEPS):
            optimizer.zero_grad()
            for k in range(2):
                model(batch(2 * t + k, world.rank)).square().mean().backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.01)
            optimizer.step()
        if side != "fsdp2":
            replica.restore()
            ends.append([p.detach().clone() for p in model.parameters()])
        else:
            ends.append([p.full_tensor().detach().clone() for p in model.parameters()])  # type: ignore[attr-defined]
    dist.destroy_process_group()
    return ends


def test_it_ends_where_fsdp2_ends() -> None:
    for theirs, *ours in un.launch(beside_fsdp2, workers=2, threads=1):
        for side, found in zip(SIDES[1:], ours, strict=True):
            for x, y in zip(found, theirs, strict=True):
                torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-5, msg=side)


def beside_hsdp() -> list[list[Tensor]]:
    """The same on a mesh of 2 x 2: FSDP2's hybrid sharding, and ours in the groups of its second dimension."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    world = un.join(device="cpu")
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    ends = []
    for within in (None, mesh["shard"], mesh["replicate"].get_group(), 2, "host"):
        model = network()
        for layer in (*model, model) if within is None else ():
            if next(layer.parameters(), None) is not None:
                fully_shard(layer, mesh=mesh)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        if within is not None:
            replica = un.parallel(model, optimizer, "zero(stage=3)", within=within, unit_bytes=20000, world=world)
        for t in range(STEPS):
            optimizer.zero_grad()
            model(batch(t, world.rank)).square().mean().backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.01)
            optimizer.step()
        if within is not None:
            replica.restore()
            replica.close()
        ends.append([getattr(p, "full_tensor", lambda p=p: p)().detach().clone() for p in model.parameters()])
    dist.destroy_process_group()
    return ends


def test_groups_end_where_fsdp2_ends_on_a_mesh() -> None:
    for theirs, *ours in un.launch(beside_hsdp, workers=4, threads=1):
        for found in ours:
            for x, y in zip(found, theirs, strict=True):
                torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-5)


# A lost worker -------------------------------------------------------------------------------------------------


def with_a_lost_worker(spec: str) -> list[Tensor] | None:
    """Worker 1 ends in the middle of a backward pass; the others go on, with the same global batches."""

    class Ends(Exception):
        pass

    def end(_: Tensor) -> None:
        if replica.step == 2:
            raise Ends

    world = un.join(device="cpu")
    smaller = world.split([[0, 2], [1]])
    model = network().double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    replica = un.parallel(model, optimizer, spec, unit_bytes=20000, world=world)
    if world.rank == 1:
        model[4].weight.register_post_accumulate_grad_hook(end)
    try:
        go_on(model, optimizer, replica)
    except Ends:
        return None
    except un.PeerLost:
        replica.rebind(smaller)
        go_on(model, optimizer, replica)
    replica.restore()
    return [p.detach().clone() for p in model.parameters()]


def go_on(model: nn.Module, optimizer: Any, replica: un.Replica) -> None:
    while replica.step < STEPS:
        step_on_part(model, optimizer, replica.step, replica.world.rank, replica.world.size)


def step_on_part(model: nn.Module, optimizer: Any, t: int, rank: int, size: int) -> None:
    x = torch.randn(6, SIZE, generator=torch.Generator().manual_seed(t), dtype=torch.float64)
    optimizer.zero_grad()
    model(x.chunk(size)[rank]).square().mean().backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    optimizer.step()


@pytest.mark.parametrize("spec", ["zero(stage=2, spare=True)", "zero(stage=3, spare=True, overlap=True)"])
def test_a_worker_that_ends_in_backward_is_not_missed(spec: str) -> None:
    model = network().double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for t in range(STEPS):
        step_on_part(model, optimizer, t, 0, 1)
    results = un.launch(with_a_lost_worker, workers=3, args=[spec], threads=1)
    assert results[1] is None
    for found in (results[0], results[2]):
        torch.testing.assert_close(found, list(model.parameters()), rtol=1e-9, atol=1e-12)


# A real limit --------------------------------------------------------------------------------------------------

LARGE = """
import resource, sys
import torch
from torch import nn
import unisono as un

def data_bytes():
    line = next(l for l in open("/proc/self/status") if l.startswith("VmData"))
    return int(line.split()[1]) << 10

torch.set_num_threads(1)
width, layers = 1024, 40                                    # 42 M parameters: 480 MiB of values and moments
torch.nn.functional.linear(torch.ones(2, 2), torch.ones(2, 2))
if sys.argv[1] == "plain":
    strategy, limit = "allreduce", None
else:
    strategy, limit = sys.argv[1], int(sys.argv[2])
    resource.setrlimit(resource.RLIMIT_DATA, (data_bytes() + limit, -1))
with torch.device("cpu" if strategy == "allreduce" else "meta"):
    model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers)))
for i, layer in enumerate(model):                           # the same start, whoever makes it, layer by layer
    def reset(layer=layer, i=i):
        with torch.no_grad():
            torch.nn.init.normal_(layer.weight, std=0.03, generator=torch.Generator().manual_seed(i))
    layer.reset_parameters = reset
    if strategy == "allreduce":
        reset()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
replica = un.parallel(model, optimizer, strategy)
for step in range(2):
    optimizer.zero_grad()
    x = torch.randn(4, width, generator=torch.Generator().manual_seed(step))
    model(x).square().mean().backward()
    optimizer.step()
probe = torch.randn(4, width, generator=torch.Generator().manual_seed(99))
with torch.no_grad():
    out = model(probe)
torch.save(out, sys.argv[-1])
print("peak", data_bytes() >> 20)
"""


def run_large(script: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p), "MALLOC_ARENA_MAX": "2"}
    return subprocess.run(
        [sys.executable, str(script), *arguments], env=env, capture_output=True, text=True, timeout=200, check=False
    )


def test_state_larger_than_the_memory_allowed_trains_and_ends_with_the_right_weights(tmp_path: Path) -> None:
    limit = str(380 << 20)  # what the optimizer steps takes 480 MiB, the parameters would take 160 more
    script = tmp_path / "large.py"
    script.write_text(LARGE)
    spec = f"zero(stage=3, optimizer_on=disk, params_on=disk, disk={str(tmp_path)!r})"
    ended = run_large(script, spec, limit, str(tmp_path / "ours.pt"))
    assert ended.returncode == 0, ended.stderr[-3000:]
    without = run_large(script, "allreduce", limit, str(tmp_path / "none.pt"))
    assert without.returncode != 0, "the limit is a real one"
    right = Program(script, "plain", tmp_path / "plain.pt", env=os.environ)  # of no limit: it can be forked
    _, wrong = right.communicate(timeout=200)
    assert right.returncode == 0, wrong[-3000:]
    ours, plain = (torch.load(tmp_path / f"{name}.pt", weights_only=True) for name in ("ours", "plain"))
    torch.testing.assert_close(ours, plain, rtol=1e-4, atol=1e-5)


# Killed ---------------------------------------------------------------------------------------------------------

KILLED = "zero(stage=3, optimizer_on=disk, params_on=disk, unit_bytes=20000)"


def train(folder: str, until: int, resume: bool) -> tuple[int, dict[str, Tensor]]:
    """Save every second step."""
    world = un.join(device="cpu")
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    replica = un.parallel(model, optimizer, KILLED, world=world)
    if resume:
        un.load(folder, replica)
    while replica.step < until:
        optimizer.zero_grad()
        model(batch(replica.step, world.rank)).square().mean().backward()
        optimizer.step()
        if replica.step % 2 == 0:
            un.save(folder, replica)
    return replica.step, {name: value.clone() for name, value in model.state_dict().items()}


SCRIPT = """
import sys
sys.path.insert(0, {here!r})
from test_zero_processes import train
train({folder!r}, 100_000, False)
"""


def test_a_run_killed_in_the_middle_of_its_steps_goes_on_to_the_same_weights(tmp_path: Path) -> None:
    folder, script = tmp_path / "run", tmp_path / "script.py"
    script.write_text(SCRIPT.format(here=str(Path(__file__).parent), folder=str(folder)))
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    newest = run_until_killed(script, folder, UNISONO_DISK=str(scratch))
    assert list(scratch.iterdir()) == [], "a scratch file has no name"
    resumed: list[Any] = un.launch(train, workers=2, args=(str(folder), newest + 3, True), threads=1)
    whole: list[Any] = un.launch(train, workers=2, args=(str(tmp_path / "whole"), newest + 3, False), threads=1)
    for (step, found), (_, right) in zip(resumed, whole, strict=True):
        assert step == newest + 3
        for name, value in right.items():
            assert torch.equal(found[name], value), name
