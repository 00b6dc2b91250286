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
from torch.profiler import ProfilerActivity, profile, record_function

import unisono as un
from unisono.observe.reports.summary import summarise
from unisono.observe.runs.reading import RunReader

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
    microbatches: int = 2,
    scaler: torch.amp.GradScaler | None = None,
    **pipe_settings: Any,
) -> list[float]:
    """Train on a mesh, every rank with another model at first; returns the losses, or that of another batch at the end
    (`evaluate`). `bits` gets the parameters. `scaler`: AMP's, by whose scale nothing may change."""
    model = small.make(seed=mesh.world.rank)
    x, _ = small.batch(0, mesh.place[0])
    example = x[: len(x) // microbatches]
    pipe = mesh.pipe(model, example, small.loss, microbatches=microbatches, **pipe_settings)
    optimizer = small.optimizer(pipe.module)
    replica = un.parallel(pipe.module, optimizer, spec, world=mesh.data)
    if load:
        un.load(load, replica)
    losses = []
    for step in steps:
        optimizer.zero_grad()
        losses.append(float(pipe.step(*small.batch(step, mesh.place[0]), scaler=scaler)))
        if scaler is not None:
            scaler.unscale_(optimizer)
        if clip:
            mesh.clip_grad_norm_(pipe.module.parameters(), small.CLIP)
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()
    if save:
        un.save(save, replica)
    if evaluate:
        losses = [float(pipe.evaluate(*small.batch(99, mesh.place[0])))]
    if bits is not None:
        bits.append([p.detach().flatten().tolist() for p in replica.consolidate().parameters()])
    replica.close()
    return losses


def run_methods(sizes: tuple[int, int, int], names: list[str], folder: str, backend: str) -> dict[str, list[float]]:
    """Some methods on the data axis of one mesh; each ends in a checkpoint."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    mesh = un.mesh(data=sizes[0], tensor=sizes[1], pipeline=sizes[2], backend=backend)
    losses = {
        name: train(mesh, SPECS[name], range(small.STEPS), clip=name in ("allreduce", "zero"), save=f"{folder}/{name}")
        for name in names
    }
    channels = {record.channel.split()[0] for record in mesh.world.ledger.records if record.bytes_sent}
    if backend == "unisono":  # what torch's axes send is in the same ledger
        assert channels >= {"mesh_tensor", "mesh_pipeline"}, channels
    assert (mesh.world.ledger.totals().bubble > 0) == (sizes[2] > 1)
    return losses


@pytest.mark.parametrize(
    ("sizes", "names", "backend"),  # the backend is that of torch's axes; the methods are on ours
    [((2, 2, 1), ["allreduce", "zero"], "gloo"), ((2, 2, 2), list(SPECS), "unisono")],
    ids=["2x2 gloo", "2x2x2 unisono"],
)
def test_meshes_train_as_one_process_does(
    sizes: tuple[int, int, int], names: list[str], backend: str, tmp_path: Path
) -> None:
    workers = sizes[0] * sizes[1] * sizes[2]
    results = un.launch(run_methods, workers, args=(sizes, names, str(tmp_path), backend), timeout_s=300)
    for name in names:
        state = un.read_checkpoint(tmp_path / name)
        assert state["step"] == small.STEPS
        for key, value in expected(name, sizes[1]).items():
            torch.testing.assert_close(state["model"][key], value, rtol=0, atol=1e-9)
        assert len({tuple(one[name]) for one in results}) == 2, "one loss for each place on the data axis"


def run_ahead(folder: str) -> tuple[list[int], str]:
    """1F1B with more microbatches than are under way at one time: as few as can be, and one more at each border; and
    schedules of several stages a rank, with AMP, which a method that needs forward refuses."""
    torch.set_num_threads(1)
    mesh = un.mesh(data=2, pipeline=2)
    held = []
    for ahead in (0, 1):
        train(mesh, "allreduce", range(small.STEPS), save=f"{folder}/{ahead}", microbatches=4, ahead=ahead)
        held.append(mesh.world.ledger.accounts["pipeline"]()["steps"])
    for schedule in ("LoopedBFS", "ZBVZeroBubble"):
        settings: dict[str, Any] = {"schedule": schedule, "microbatches": 4}
        settings["scaler"] = torch.amp.GradScaler("cpu", init_scale=8.0)
        train(mesh, "allreduce", range(small.STEPS), save=f"{folder}/{schedule}", **settings)
    try:
        train(mesh, "zero(stage=3)", range(1), schedule="Interleaved1F1B")
    except ValueError as error:
        return held, str(error)
    return held, ""


def test_four_workers_train_as_one_process_however_many_microbatches_are_under_way(tmp_path: Path) -> None:
    for held, refused in un.launch(run_ahead, 4, args=(str(tmp_path),), timeout_s=300):
        assert held == [small.STEPS] * 2
        assert "take GPipe or 1F1B" in refused
    for name in ("0", "1", "LoopedBFS", "ZBVZeroBubble"):
        state = un.read_checkpoint(tmp_path / name)
        for key, value in expected("allreduce", 1).items():
            torch.testing.assert_close(state["model"][key], value, rtol=0, atol=1e-9)


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


def resume(spec: str, folder: str) -> bool:
    """Whether a run that was saved and loaded in the middle has the bits of one that was not."""
    torch.set_num_threads(1)
    mesh = un.mesh(data=2, tensor=2)
    bits: list[Any] = []
    train(mesh, spec, range(5), clip=False, bits=bits)
    train(mesh, spec, range(3), clip=False, save=folder)
    train(mesh, spec, range(3, 5), clip=False, load=folder, bits=bits)
    return bits[0] == bits[1]


def test_the_same_mesh_goes_on_bit_for_bit(tmp_path: Path) -> None:
    """In the middle of the second round: the ranks have models of their own, and a reducer's factors and rest."""
    spec = "local_sgd(every=2, start=0, reducer=powersgd(rank=1, min_saving=1.0))"
    assert un.launch(resume, 4, args=(spec, str(tmp_path)), timeout_s=300) == [True] * 4


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


def make_muon(model: nn.Module) -> list[Any]:
    matrices = [p for name, p in model.named_parameters() if p.dim() == 2 and "blocks" in name]
    rest = [p for p in model.parameters() if not any(p is one for one in matrices)]
    return [torch.optim.Muon(matrices, lr=small.RATE), torch.optim.AdamW(rest, lr=small.RATE)]


def train_muon(folder: str, specs: list[str]) -> str:
    """Muon for the blocks' matrices on a mesh whose ranks have these whole; and on one whose ranks do not."""
    torch.set_num_threads(1)
    for spec in specs:
        mesh = un.mesh(data=2, pipeline=2)
        x, _ = small.batch(0, mesh.place[0])
        pipe = mesh.pipe(small.make(), x[:2], small.loss, microbatches=2)
        optimizers = make_muon(pipe.module)
        replica = un.parallel(pipe.module, optimizers, spec, world=mesh.data)
        for step in range(small.STEPS):
            pipe.module.zero_grad()
            pipe.step(*small.batch(step, mesh.place[0]))
            mesh.clip_grad_norm_(pipe.module.parameters(), small.CLIP)
            for optimizer in optimizers:
                optimizer.step()
        un.save(f"{folder}/{spec}", replica)
        replica.close()
    mesh, model = un.mesh(data=2, tensor=2), small.make()
    mesh.parallelize(model)
    try:
        un.parallel(model, make_muon(model), world=mesh.data)
    except ValueError as error:
        return str(error)
    return ""


def test_whole_matrices_are_stepped_as_in_one_process_or_refused_by_name(tmp_path: Path) -> None:
    specs = ["allreduce", "zero(stage=2)"]
    for said in un.launch(train_muon, 4, args=(str(tmp_path), specs), timeout_s=300):
        assert said.startswith("Muon has to step 'blocks.0.attention.q.weight' and 11 more whole, and the tensor axis")
    alone = small.make()
    optimizers = make_muon(alone)
    for step in range(small.STEPS):
        alone.zero_grad()
        x, y = small.batch(step)
        small.loss(alone(x), y).backward()
        nn.utils.clip_grad_norm_(alone.parameters(), small.CLIP)
        for optimizer in optimizers:
            optimizer.step()
    for spec in specs:
        state = un.read_checkpoint(tmp_path / spec)
        for key, value in alone.state_dict().items():
            torch.testing.assert_close(state["model"][key], value, rtol=0, atol=1e-9)


def pipe_without_parameters(layers: list[str], schedule: str) -> str:
    torch.set_num_threads(1)
    mesh = un.mesh(pipeline=2)
    model = nn.Sequential(*(nn.Linear(4, 4) if name == "linear" else nn.Tanh() for name in layers))
    try:
        pipe = mesh.pipe(model, torch.ones(2, 4), nn.functional.mse_loss, schedule=schedule)
        torch.optim.SGD(pipe.module.parameters(), lr=0.1)
    except ValueError as error:
        return str(error)
    return "ran"


@pytest.mark.parametrize(
    ("layers", "schedule", "said"),
    [
        (["linear", "tanh"], "1F1B", "stage 1 of 2 would have no parameters that learn (_1)"),
        (["linear", "tanh", "linear", "tanh"], "Interleaved1F1B", "stages 1 and 3 of 4 would have no parameters that"),
        (["linear", "tanh", "linear"], "1F1B", "ran"),
    ],
)
def test_a_stage_without_parameters_is_refused_by_name_on_every_rank(
    layers: list[str], schedule: str, said: str
) -> None:
    for found in un.launch(pipe_without_parameters, 2, args=(layers, schedule), timeout_s=300):
        assert found.startswith(said)
        assert said == "ran" or "take fewer stages" in found


# Memory ---------------------------------------------------------------------------------------------------------


def make_blocks() -> nn.Module:
    block = [nn.Sequential(nn.Linear(128, 512), nn.GELU(), nn.Linear(512, 128)) for _ in range(8)]
    return nn.Sequential(*block)


def measure_memory(microbatches: int, rows: int) -> int:
    """The most that torch's allocator had given out in the second step of a rank of 2 x 2, from the model's making on
    (its other parts are not there)."""
    torch.set_num_threads(1)
    mesh = un.mesh(data=1, tensor=2, pipeline=2)
    x = torch.randn(microbatches * rows, 128)
    pipe = mesh.pipe(make_blocks(), x[:rows], nn.functional.mse_loss, microbatches=microbatches)
    optimizer = torch.optim.AdamW(pipe.module.parameters(), lr=1e-4)
    un.parallel(pipe.module, optimizer, world=mesh.data)
    before = sum(p.nbytes for p in pipe.module.parameters())
    peak = 0
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        for name in ("first", "second"):
            with record_function(name):
                optimizer.zero_grad()
                pipe.step(x, x)
                optimizer.step()
    events = profiler.profiler.kineto_results.events()
    begin, now = next(e.start_ns() for e in events if e.name() == "second"), 0
    for at, nbytes in sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]"):
        now += nbytes
        peak = max(peak, now) if at >= begin else peak
    return before + peak


def test_a_rank_of_a_mesh_needs_what_was_predicted() -> None:
    microbatches, rows = 4, 64
    model = make_blocks()
    x = torch.empty(microbatches * rows, 128)
    predicted = un.memory(
        model,
        torch.optim.AdamW(model.parameters()),
        batch=(x, x),
        loss=nn.functional.mse_loss,
        workers=4,
        tensor=2,
        pipeline=2,
        microbatches=microbatches,
    ).need("allreduce")
    measured = un.launch(measure_memory, 4, args=(microbatches, rows), timeout_s=300)
    kept = predicted.parameters + predicted.gradients + predicted.optimizer
    print(measured, predicted, kept)
    for peak in measured:  # the tensor axis saves activations, which are counted whole, and the last stage has fewer
        assert kept < peak < 1.05 * predicted.device, (peak, predicted)
    assert max(measured) > 0.7 * predicted.device, (measured, predicted)


# Faults, and a recorded run -------------------------------------------------------------------------------------

SCRIPT = """
import os, signal, torch, unisono as un
from torch import nn

torch.manual_seed(0)
mesh = un.mesh(data=1, {axis}=2)
model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8))
x = torch.randn(8, 8, generator=torch.Generator().manual_seed(1))
pipe = mesh.pipe(model, x[:2], nn.functional.mse_loss, microbatches=4)
optimizer = torch.optim.SGD(pipe.module.parameters(), lr=0.1)
un.parallel(pipe.module, optimizer, world=mesh.data)
for step in range(5):
    if mesh.world.rank == 1 and step == 3:
        {fault}
    optimizer.zero_grad()
    pipe.step(x, x.tanh())
    optimizer.step()
"""


@pytest.mark.parametrize(
    ("axis", "fault", "texts"),
    [
        ("pipeline", "os.kill(os.getpid(), signal.SIGKILL)", ["worker 1 of 2 failed: killed by SIGKILL", "last step"]),
        ("tensor", "x = x[:4]", ["the ranks disagree"]),
    ],
    ids=["a stage is killed", "shapes differ on the tensor axis"],
)
def test_a_fault_in_a_hybrid_ends_in_one_report(axis: str, fault: str, texts: list[str], run_script: Any) -> None:
    status, _, errors = run_script(SCRIPT.format(axis=axis, fault=fault), "-n", "2").finish()
    assert status != 0
    assert errors.count("unisono: worker") == 1, errors
    for text in texts:
        assert text in errors, errors


def test_a_recorded_pipeline_is_reported_with_its_mesh(
    run_script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UNISONO_RUNS", str(tmp_path))
    folder = tmp_path / "run"
    run_script(SCRIPT.format(axis="pipeline", fault="pass"), "-n", "2", "--run-dir", str(folder)).finish()
    reader = RunReader(folder)
    reader.poll()
    found = summarise(reader)
    assert (found.workers, found.mesh) == (2, "data=1, tensor=1, pipeline=2")
    assert [(rank.rank, rank.mesh_place) for rank in found.ranks] == [(0, "pipeline 0"), (1, "pipeline 1")]
    assert found.pipeline is not None
    assert found.pipeline.ideal == pytest.approx(1 / 5)
    assert [one.stages for one in found.pipeline.members] == [[0], [1]]
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(8, 8, generator=torch.Generator().manual_seed(1))
    losses = []
    for _ in range(5):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), x.tanh())
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
    assert found.metrics[0].values == pytest.approx(losses, rel=1e-4)


def run_example(arguments: list[str]) -> str:
    torch.set_num_threads(1)
    said = io.StringIO()
    sys.argv = ["hybrid.py", "--steps", "3", "--width", "16", "--length", "8", *arguments]
    with contextlib.redirect_stdout(said):
        runpy.run_path(str(EXAMPLE), run_name="__main__")
    return said.getvalue()


def test_the_example_is_the_same_on_a_mesh_and_on_one_process() -> None:
    [alone] = un.launch(run_example, 1, args=([],), timeout_s=300)
    [together, *_] = un.launch(run_example, 4, args=(["--tensor", "2"],), timeout_s=300)
    assert alone.startswith("Mesh(data=1, tensor=1, pipeline=1): final loss")
    assert together.startswith("Mesh(data=2, tensor=2, pipeline=1): final loss")
    a, b = (float(text.rpartition(" ")[2]) for text in (alone, together))
    assert a == pytest.approx(b, abs=1e-5)
    code = [line for line in EXAMPLE.read_text(encoding="utf-8").splitlines() if line.strip()]
    assert len(code) < 80
