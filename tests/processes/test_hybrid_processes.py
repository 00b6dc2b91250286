"""Meshes of real workers against one process in fp64: every axis, several methods on the data axis, checkpoints."""

from __future__ import annotations

import contextlib
import io
import runpy
import sys
import warnings
from functools import cache
from pathlib import Path
from typing import Any

import hybrid_models as small
import pytest
import torch
from torch import nn

import unisono as un

EXAMPLE = Path(__file__).parents[2] / "examples" / "hybrid.py"
SPECS = {
    "allreduce": "allreduce",
    "powersgd": "powersgd(rank=1, min_saving=1.0)",
    "local_sgd": "local_sgd(every=2, start=0)",
    "zero": "zero",
}


@cache
def expected(spec: str, tensor: int) -> dict[str, torch.Tensor]:
    makers = {
        "allreduce": lambda: small.train_alone(small.CLIP),
        "powersgd": lambda: small.train_compressed(tensor),
        "local_sgd": lambda: small.train_local(2),
        "zero": lambda: small.train_alone(small.CLIP),
    }
    return dict(makers[spec]().state_dict())


def train(
    mesh: un.Mesh,
    spec: str,
    steps: range,
    *,
    clip: bool = True,
    load: str = "",
    save: str = "",
    evaluate: bool = False,
    bits: list[Any] | None = None,
    **pipe_settings: Any,
) -> list[float]:
    """Train on a mesh, every rank with another model at first; returns the losses, or that of another batch at the end
    (`evaluate`). `bits` gets the parameters."""
    model = small.make(seed=mesh.world.rank)
    x, _ = small.batch(0, mesh.place[0])
    pipe = mesh.pipe(model, x[:2], small.loss, microbatches=2, **pipe_settings)
    optimizer = small.optimizer(pipe.module)
    replica = un.parallel(pipe.module, optimizer, spec, world=mesh.data)
    if load:
        un.load(load, replica)
    losses = []
    for step in steps:
        optimizer.zero_grad()
        losses.append(float(pipe.step(*small.batch(step, mesh.place[0]))))
        if clip:
            mesh.clip_grad_norm_(pipe.module.parameters(), small.CLIP)
        optimizer.step()
    if save:
        un.save(save, replica)
    if evaluate:
        losses = [float(pipe.evaluate(*small.batch(99, mesh.place[0])))]
    if bits is not None:
        bits.append([p.detach().flatten().tolist() for p in replica.consolidate().parameters()])
    replica.close()
    return losses


def run_methods(sizes: tuple[int, int, int], folder: str, backend: str) -> dict[str, list[float]]:
    """Every method on the data axis of one mesh; each ends in a checkpoint."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    mesh = un.mesh(data=sizes[0], tensor=sizes[1], pipeline=sizes[2], backend=backend)
    losses = {
        name: train(mesh, spec, range(small.STEPS), clip=name in ("allreduce", "zero"), save=f"{folder}/{name}")
        for name, spec in SPECS.items()
    }
    channels = {record.channel.split()[0] for record in mesh.world.ledger.records if record.bytes_sent}
    if backend == "unisono":  # what torch's axes send is in the same ledger
        assert channels >= {"mesh_tensor", "mesh_pipeline"}, channels
    assert (mesh.world.ledger.totals().bubble > 0) == (sizes[2] > 1)
    return losses


@pytest.mark.parametrize(
    ("sizes", "backend"), [((2, 2, 1), "gloo"), ((2, 2, 2), "unisono")], ids=["2x2 gloo", "2x2x2 unisono"]
)
def test_meshes_train_as_one_process_does(sizes: tuple[int, int, int], backend: str, tmp_path: Path) -> None:
    workers = sizes[0] * sizes[1] * sizes[2]
    results = un.launch(run_methods, workers, args=(sizes, str(tmp_path), backend), timeout_s=300)
    for name in SPECS:
        state = un.read_checkpoint(tmp_path / name)
        assert state["step"] == small.STEPS
        for key, value in expected(name, sizes[1]).items():
            torch.testing.assert_close(state["model"][key], value, rtol=0, atol=1e-9)
        assert len({tuple(one[name]) for one in results}) == 2, "one loss for each place on the data axis"


def go_on(meshes: list[tuple[int, int, int]], spec: str, folder: str) -> tuple[int, list[float]]:
    """A run that goes on from each mesh's checkpoint on the next mesh, a step each; every schedule in turn."""
    torch.set_num_threads(1)
    schedules = ["GPipe", "Interleaved1F1B", "InterleavedZeroBubble"]
    for step, sizes in enumerate(meshes):
        mesh = un.mesh(data=sizes[0], tensor=sizes[1], pipeline=sizes[2])
        go_on_from = folder if step else ""
        settings: dict[str, Any] = {"schedule": schedules[step], "evaluate": True}
        losses = train(mesh, spec, range(step, step + 1), load=go_on_from, save=folder, **settings)
    return step + 1, losses


@pytest.mark.parametrize("spec", ["allreduce", "zero(stage=3)"])
def test_any_mesh_goes_on_from_any_other(spec: str, tmp_path: Path) -> None:
    meshes = [(2, 1, 2), (2, 2, 1)] if spec == "zero(stage=3)" else [(2, 2, 1), (2, 1, 2), (2, 1, 2)]
    every = un.launch(go_on, 4, args=(meshes, spec, str(tmp_path)), timeout_s=300)
    steps = every[0][0]
    state = un.read_checkpoint(tmp_path)
    model = small.make()
    model.load_state_dict(state["model"])
    for ours, reference in zip(model.parameters(), small.train_alone(small.CLIP, steps).parameters(), strict=True):
        torch.testing.assert_close(ours, reference, rtol=0, atol=1e-9)
    for rank in (0, 1):
        x, y = small.batch(99, rank)
        there = [losses for _, [losses] in every]
        assert any(loss == pytest.approx(small.loss(model(x), y).item(), abs=1e-9) for loss in there)
    optimizer = small.optimizer(model)
    optimizer.load_state_dict(state["optimizer"])  # numbered as plain PyTorch does
    for param in model.parameters():
        assert optimizer.state[param]["exp_avg"].shape == param.shape
        assert float(optimizer.state[param]["step"]) == steps


def resume(specs: list[str], folder: str) -> list[bool]:
    """Whether a run that was saved and loaded in the middle has the bits of one that was not."""
    torch.set_num_threads(1)
    mesh = un.mesh(data=2, tensor=2)
    same = []
    for i, spec in enumerate(specs):
        bits: list[Any] = []
        train(mesh, spec, range(4), clip=False, bits=bits)
        train(mesh, spec, range(2), clip=False, save=f"{folder}/{i}")
        train(mesh, spec, range(2, 4), clip=False, load=f"{folder}/{i}", bits=bits)
        same.append(bits[0] == bits[1])
    return same


def test_the_same_mesh_goes_on_bit_for_bit(tmp_path: Path) -> None:
    specs = [SPECS["powersgd"], "local_sgd(every=3, start=0)"]
    assert un.launch(resume, 4, args=(specs, str(tmp_path)), timeout_s=300) == [[True, True]] * 4


def keep_copies_alike() -> list[list[float]]:
    """What a reducer makes of a parameter depends on those beside it, which differ on the tensor axis."""
    torch.set_num_threads(1)
    mesh = un.mesh(data=2, tensor=2)
    model = small.make()
    mesh.parallelize(model)
    optimizer = small.optimizer(model)
    replica = un.parallel(model, optimizer, "local_sgd(every=1, start=0, reducer=qsgd(bits=4))", world=mesh.data)
    for step in range(4):
        if step == 2:
            replica = replica.switch("qsgd(bits=4)")
        optimizer.zero_grad()
        x, y = small.batch(step, mesh.place[0])
        small.loss(model(x), y).backward()
        optimizer.step()
    return [p.flatten().tolist() for name, p in model.named_parameters() if small.split_dimension(name) is None]


def test_what_is_not_split_stays_alike_on_the_tensor_axis() -> None:
    every = un.launch(keep_copies_alike, 4, timeout_s=300)
    first = small.make()
    start = [p.flatten().tolist() for n, p in first.named_parameters() if small.split_dimension(n) is None]
    assert every[0] != start
    assert every[0] == every[1]
    assert every[2] == every[3]


def refuse_and_agree() -> list[str]:
    """What a rank alone must not decide: norms, and AMP's overflow. The model was split by torch's own function."""
    from torch.distributed.tensor.parallel import parallelize_module

    torch.set_num_threads(1)
    mesh = un.mesh(tensor=2)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))
    parallelize_module(model, mesh.tensor, un.tensor_plan(model))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()  # a state of DTensors
    optimizer.zero_grad()
    un.parallel(model, optimizer, "allreduce", world=mesh.data)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(model(torch.ones(2, 4)).sum()).backward()
    said = []
    try:
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    except RuntimeError as error:
        said.append(str(error))
    before = [p.detach().clone() for p in model.parameters()]
    if mesh.place[1] == 1:  # one rank alone overflows
        next(model.parameters()).grad[0, 0] = float("inf")
    scaler.step(optimizer)
    scaler.update()
    same = all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    plain = all(type(x) is torch.Tensor for state in optimizer.state.values() for x in state.values())
    return [*said, str(same), str(scaler.get_scale()), str(plain), str(len(optimizer.state))]


def test_a_norm_of_a_part_is_refused_and_an_overflow_is_everyones() -> None:
    for said in un.launch(refuse_and_agree, 2, timeout_s=300):
        assert "mesh.clip_grad_norm_" in said[0]
        assert said[1:] == ["True", "2.0", "True", "4"]


def run_example(arguments: list[str]) -> str:
    torch.set_num_threads(1)
    said = io.StringIO()
    sys.argv = ["hybrid.py", "--steps", "3", "--width", "16", "--length", "8", *arguments]
    with contextlib.redirect_stdout(said):
        runpy.run_path(str(EXAMPLE), run_name="__main__")
    return said.getvalue()


def test_the_example_is_the_same_on_a_mesh_and_on_one_process() -> None:
    [alone] = un.launch(run_example, 1, args=([],), timeout_s=300)
    [together, *_] = un.launch(run_example, 2, args=(["--pipeline", "2"],), timeout_s=300)
    assert alone.startswith("Mesh(data=1, tensor=1, pipeline=1): final loss")
    assert together.startswith("Mesh(data=1, tensor=1, pipeline=2): final loss")
    a, b = (float(text.rpartition(" ")[2]) for text in (alone, together))
    assert a == pytest.approx(b, abs=1e-5)
    code = [line for line in EXAMPLE.read_text(encoding="utf-8").splitlines() if line.strip()]
    assert len(code) < 80
