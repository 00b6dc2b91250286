"""The backend `unisono` of torch.distributed against gloo, in the same processes; programs of PyTorch's over both."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import traceback
from datetime import timedelta
from pathlib import Path
from typing import Any

import backend_cases
import pytest
import torch

import unisono as un

PATIENCE = timedelta(seconds=60)


def compare(names: list[str], *, shared_memory: bool = True) -> list[str]:
    """In each worker: every case over both backends; what differs, and from which rank."""
    import torch.distributed as dist

    os.environ["UNISONO_SHARED_MEMORY"] = str(int(shared_memory))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=PATIENCE)
    theirs, ours = (dist.new_group(backend=backend, timeout=PATIENCE) for backend in ("gloo", "unisono"))
    problems = []
    for name in names:
        run = backend_cases.CASES[name]
        expected = run(theirs) if name not in backend_cases.OURS_ALONE else None
        try:
            expect_same(run(ours), expected)
        except Exception:
            problems.append(f"{name}, rank {dist.get_rank()}: {traceback.format_exc()}")
        went_well: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(went_well, not problems)
        if not all(went_well):
            break
    dist.destroy_process_group()
    return problems


def expect_same(found: Any, expected: Any) -> None:
    """The same bits; None: the case has checked it itself."""
    if expected is not None and all(isinstance(each, torch.Tensor) for each in found):
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
    elif expected is not None:
        assert found == expected


@pytest.mark.parametrize("workers", [2, 3])
def test_every_operation_gives_gloos_numbers(workers: int) -> None:
    names = list(backend_cases.CASES) if workers == 2 else [n for n in backend_cases.CASES if n != "compiled"]
    problems = [p for rank in un.launch(compare, workers, args=[names], threads=1, timeout_s=100) for p in rank]
    assert problems == [], "\n".join(problems)


def test_operations_by_messages_give_gloos_numbers() -> None:
    """Where ranks cannot share memory, as on two hosts."""
    left_out = ("messages_from_anyone", "compiled", "subgroups")
    names = [name for name in backend_cases.CASES if name not in left_out]
    found = un.launch(compare, 2, args=[names], kwargs={"shared_memory": False}, threads=1, timeout_s=100)
    problems = [p for rank in found for p in rank]
    assert problems == [], "\n".join(problems)


# Programs ----------------------------------------------------------------------------------------------------


def run_programs(names: list[str]) -> list[str]:
    """In each worker: every program over both backends; what differs."""
    import backend_programs
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=PATIENCE)
    groups = [dist.new_group(backend=backend, timeout=PATIENCE) for backend in ("gloo", "unisono")]
    problems = []
    for name in names:
        theirs, ours = (backend_programs.PROGRAMS[name](group) for group in groups)
        try:
            torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)
        except AssertionError as error:
            problems.append(f"{name}, rank {dist.get_rank()}: {error}")
    dist.destroy_process_group()
    return problems


def test_programs_of_pytorch_learn_what_they_learn_over_gloo() -> None:
    import backend_programs

    found = un.launch(run_programs, 2, args=[list(backend_programs.PROGRAMS)], threads=1, timeout_s=100)
    assert found == [[], []]


def train_with_powersgd() -> float:
    """PowerSGD's hook with several buckets: collectives begun in callbacks keep one order (gloo hangs in this)."""
    import backend_programs
    import torch.distributed as dist
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
    from torch.nn.parallel import DistributedDataParallel

    dist.init_process_group("unisono", timeout=PATIENCE)
    model = DistributedDataParallel(backend_programs.make(32), bucket_cap_mb=1e-3)
    state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2)
    model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    total = sum(p.double().sum().item() for p in backend_programs.train(model, 6))
    dist.destroy_process_group()
    return total


def test_collectives_begun_in_callbacks_keep_one_order() -> None:
    first, second = un.launch(train_with_powersgd, 2, threads=1, timeout_s=100)
    assert first == second


def test_the_example_learns_what_it_learns_over_gloo(run_command: Any) -> None:
    file = Path(__file__).parents[2] / "examples" / "gpt_ddp.py"
    losses = []
    for backend in ("gloo", "unisono"):
        status, out, errors = run_command("run", "-n", "2", str(file), backend)
        assert status == 0, errors
        losses.append(float(re.findall(rf"{backend}: final loss ([0-9.]+)", out)[0]))
    assert losses[1] == pytest.approx(losses[0], abs=2e-4)


# The other way round -----------------------------------------------------------------------------------------


def join_a_program(backend: str) -> dict[str, Any]:
    """un.join and un.parallel in a program that has a default group, and a mesh."""
    import backend_programs
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    dist.init_process_group(backend, timeout=PATIENCE)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "other"))
    world = un.join()
    assert (world.rank, world.size) == (dist.get_rank(), 4)
    found: dict[str, Any] = {}
    for name, where in (("mesh", mesh["data"]), ("group", mesh["data"].get_group())):
        model = backend_programs.make()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        replica = un.parallel(model, optimizer, "allreduce", world=where)
        assert replica.world.size == 2
        for step in range(3):
            optimizer.zero_grad()
            model(backend_programs.batch(step)).square().mean().backward()
            optimizer.step()
        found[name] = [p.detach() for p in model.parameters()]
        replica.close()
    try:
        un.parallel(model, optimizer, world=mesh)
    except ValueError as error:
        found["whole mesh"] = str(error)
    dist.destroy_process_group()
    return found


@pytest.mark.parametrize("backend", ["gloo", "unisono"])
def test_un_parallel_trains_over_one_dimension_of_a_mesh(backend: str) -> None:
    import backend_programs

    found = un.launch(join_a_program, 4, args=[backend], threads=1, timeout_s=100)
    for rank in range(4):
        reference = backend_programs.make()
        optimizer = torch.optim.SGD(reference.parameters(), lr=0.1)
        for step in range(3):  # ranks r and r + 2 or r - 2 train together
            optimizer.zero_grad()
            batches = [backend_programs.batch(step, rank=r) for r in (rank % 2, rank % 2 + 2)]
            (sum(reference(x).square().mean() for x in batches) / 2).backward()  # type: ignore[union-attr]
            optimizer.step()
        for how in ("mesh", "group"):
            torch.testing.assert_close(found[rank][how], [p.detach() for p in reference.parameters()])
        assert "give the one whose ranks train together" in found[rank]["whole mesh"]


# Memory that is moved ----------------------------------------------------------------------------------------


def move_memory() -> dict[str, Any]:
    """all_reduce of memory that was offered: what becomes of it, of its views, and of what takes its place."""
    world = un.join()
    offered, seen_by_numpy, part = torch.zeros(100_000), torch.zeros(100_000), torch.zeros(200_000)[:100_000]
    view, array = offered[10:20], seen_by_numpy.numpy()
    before = {name: x.data_ptr() for name, x in (("offered", offered), ("numpy", seen_by_numpy), ("part", part))}
    found: dict[str, Any] = {"sums": []}
    for step in range(4):
        for x in (offered, seen_by_numpy, part):
            x.fill_(world.rank + step)
            world.offer(x)
            world.all_reduce(x, "sum").wait()
            found["sums"].append([x.min().item(), x.max().item()])
    found["view"] = view.tolist() == offered[10:20].tolist() and view.data_ptr() == offered.data_ptr() + 40
    found["array"] = array.max().item()
    found["moved"] = [offered.data_ptr() != before["offered"], seen_by_numpy.data_ptr() != before["numpy"]]
    found["moved"].append(part.data_ptr() != before["part"])
    if world.rank == 0:  # the others' memory stays where it is: all go over the stage
        del view
        offered = torch.zeros(100_000)
    offered.fill_(1.0)
    world.all_reduce(offered, "sum").wait()
    found["after"] = [offered.min().item(), offered.max().item()]
    world.close()
    return found


def test_memory_that_comes_again_is_moved_to_where_all_see_it() -> None:
    for found in un.launch(move_memory, 2, threads=1, timeout_s=100):
        assert found["sums"] == [[1.0 + 2 * step] * 2 for step in range(4) for _ in range(3)]
        assert found["view"]
        assert found["array"] == 7.0
        assert found["moved"] == [True, False, False]
        assert found["after"] == [2.0, 2.0]


# The ledger --------------------------------------------------------------------------------------------------

PLAIN = """
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
{imports}
dist.init_process_group("unisono")
group = dist.new_group([0, 1], group_desc="pair")
model = DistributedDataParallel(torch.nn.Linear(300, 100))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    model(torch.randn(4, 300)).sum().backward()
    optimizer.step()
    dist.all_reduce(torch.ones(5000), group=group)
{end}
"""


@pytest.mark.parametrize("end", ["dist.destroy_process_group()", ""])
def test_a_program_that_knows_nothing_of_it_has_a_ledger(
    end: str, run_script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UNISONO_LEDGER", str(tmp_path / "trace.json"))
    status, _, errors = run_script(PLAIN.format(imports="import unisono", end=end), "-n", "2").finish()
    assert status == 0, errors
    files = [tmp_path / "trace.json"] if end else [tmp_path / f"trace-rank{r}.json" for r in range(2)]
    for file in files:
        events = json.loads(file.read_text())["traceEvents"]
        lines = {e["args"]["name"] for e in events if e["name"] == "thread_name"}
        assert {"default", "steps"} <= lines
        assert any(line.startswith("pair ") for line in lines), lines
        assert sum(e["name"].startswith("step ") for e in events) == 3 * (2 if end else 1)
    assert "MB sent" in errors


def test_import_unisono_makes_it_known_once_torch_is_imported() -> None:
    code = """
import sys
import unisono
assert "torch" not in sys.modules
import torch.distributed as dist
assert "unisono" in dist.Backend.backend_list, dist.Backend.backend_list
assert dist.Backend.default_device_backend_map["cpu"] == "gloo"
"""
    env = {**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    found = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=100)
    assert found.returncode == 0, found.stderr


def test_the_entry_point_makes_it_known_without_an_import_of_ours(tmp_path: Path) -> None:
    project = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    [target] = re.findall(r'entry-points."torch.backends"[^\n]*\nunisono = "([^"]*)"', project)
    folder = tmp_path / "named_otherwise-1.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: named-otherwise\nVersion: 1\n")
    (folder / "entry_points.txt").write_text(f"[torch.backends]\nours = {target}\n")
    code = """
import sys
import torch
assert "unisono.backend.group" not in sys.modules and "unisono.world" not in sys.modules
import torch.distributed as dist
assert "unisono" in dist.Backend.backend_list, dist.Backend.backend_list
"""
    sources = str(Path(un.__file__).parents[1])
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), sources])}
    found = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=100)
    assert found.returncode == 0, found.stderr


# What goes wrong ---------------------------------------------------------------------------------------------

STEPS = """
import os, signal, torch, torch.distributed as dist, unisono
from torch.nn.parallel import DistributedDataParallel
dist.init_process_group("unisono")
rank = dist.get_rank()
model = DistributedDataParallel(torch.nn.Linear(300, 100))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(5):
    if rank == 1 and step == 3:
        {fault}
    model(torch.randn(4, 300)).sum().backward()
    optimizer.step()
"""


@pytest.mark.parametrize(
    ("fault", "text"),
    [
        ("os.kill(os.getpid(), signal.SIGKILL)", r"worker 1 of 2 failed: killed by SIGKILL\n.*\n? *.*last step 3"),
        ("dist.all_reduce(torch.ones(7))", r"failed: RuntimeError|GroupMismatch"),
    ],
    ids=["killed", "mismatch"],
)
def test_a_fault_under_it_ends_in_one_report(fault: str, text: str, run_script: Any) -> None:
    status, _, errors = run_script(STEPS.format(fault=fault), "-n", "2").finish()
    assert status != 0
    assert errors.count("unisono: worker") == 1, errors
    assert re.search(text, errors), errors
    if "all_reduce" in fault:
        assert "the ranks disagree" in errors


def meet_troubles() -> dict[str, Any]:
    """Errors of the kinds that torch's users catch, with texts that say what happened."""
    import torch.distributed as dist

    dist.init_process_group("unisono", timeout=PATIENCE)
    found: dict[str, Any] = {}

    def note(name: str, call: Any) -> None:
        try:
            call()
            found[name] = (False, "")
        except dist.DistBackendError as error:
            found[name] = (isinstance(error, RuntimeError), str(error))

    short, odd = (dist.new_group(timeout=timedelta(seconds=limit)) for limit in (0.3, 60))
    if dist.get_rank() == 0:
        note("timeout", lambda: dist.all_reduce(torch.ones(3), group=short))
        work = dist.all_reduce(torch.ones(30_000), async_op=True)
        note("wait", lambda: work.wait(timedelta(seconds=0.2)))
        dist.distributed_c10d._get_default_store().set("go on", "")
        work.wait()
        found["later"] = work.is_success()
    else:
        dist.distributed_c10d._get_default_store().wait(["go on"])
        dist.all_reduce(torch.ones(30_000))
    note("mismatch", lambda: dist.all_reduce(torch.ones(30_000 + dist.get_rank()), group=odd))
    dist.destroy_process_group()
    return found


def test_errors_are_those_that_torch_users_expect() -> None:
    first, second = un.launch(meet_troubles, 2, threads=1, timeout_s=100)
    for is_runtime_error, text in (first["timeout"], first["wait"], first["mismatch"], second["mismatch"]):
        assert is_runtime_error, text
    assert "for rank 1" in first["timeout"][1]
    assert "hit its timeout in all_reduce" in first["timeout"][1]
    assert "0.2 s" in first["wait"][1]
    assert first["later"]
    assert "30000" in first["mismatch"][1]
    assert "30001" in first["mismatch"][1]


# PyTorch's own tests -----------------------------------------------------------------------------------------

TORCHS = """
    all_gather all_gather_coalesced_complex all_gather_coalesced_full_group all_gather_coalesced_simple
    all_gather_coalesced_with_empty all_gather_complex all_gather_full_group all_gather_object_default_pg
    all_gather_object_subgroup all_reduce_coalesced_full_group_sum all_reduce_coalesced_max
    all_reduce_coalesced_max_complex_unsupported all_reduce_coalesced_min all_reduce_coalesced_product
    all_reduce_coalesced_sum all_reduce_complex_unsupported_ops all_reduce_full_group_max all_reduce_max
    all_reduce_min all_reduce_product all_reduce_sum all_reduce_sum_async all_reduce_sum_complex all_to_all
    all_to_all_complex all_to_all_full_group all_to_all_single_equal_split all_to_all_single_unequal_split
    all_to_all_single_unequal_split_complex batch_isend_irecv_gloo batch_isend_irecv_gloo_tags
    batch_isend_irecv_op_list_err broadcast broadcast_full_group gather gather_checks gather_full_group gather_object
    gather_object_subgroup get_future get_rank get_rank_size_full_group get_rank_size_group irecv isend reduce_max
    reduce_min reduce_product reduce_sum reduce_sum_twice scatter scatter_checks scatter_complex scatter_full_group
    scatter_object_list send_recv send_recv_any_source send_recv_with_tag sparse_all_reduce_sum static_graph_api_cpu
"""


def test_pytorchs_own_assertions_hold() -> None:
    """Its tests of collectives, in three processes; docs/backend.md has the counts of all of them."""
    names = [f"test_{name}" for name in TORCHS.split()]
    script = Path(__file__).with_name("torch_suite.py")
    run = [sys.executable, str(script), "unisono", "3", *names, "--together"]
    done = subprocess.run(run, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["failed"] == [], found["why"]
    assert found["passed"] == names
