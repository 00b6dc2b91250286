"""The backend `unisono` of torch.distributed against gloo, in the same processes; programs of PyTorch's over both."""

from __future__ import annotations

import json
import os
import pickle
import re
import subprocess
import sys
import traceback
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import backend_cases
import pytest
import torch

import unisono as un
from preloaded import Program

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


def begin_anew(shared_memory: bool) -> list[float]:
    """A default group, and one beside it, made again and again in a process under the names that torch gives them."""
    import torch.distributed as dist

    os.environ["UNISONO_SHARED_MEMORY"] = str(int(shared_memory))
    found = []
    for backend in ("gloo", "unisono") * 3:
        dist.init_process_group(backend, timeout=timedelta(seconds=20))
        x = torch.ones(9)
        dist.all_reduce(x)
        dist.all_reduce(x, group=dist.new_group([0, 1], timeout=timedelta(seconds=20)))
        dist.destroy_process_group()
        found.append(x.sum().item())
    return found


@pytest.mark.parametrize("shared_memory", [True, False])
def test_groups_are_made_anew_in_a_process(shared_memory: bool) -> None:
    assert un.launch(begin_anew, 2, args=[shared_memory], threads=1, timeout_s=100) == [[36.0] * 6] * 2


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
assert "unisono.world.backend.group" not in sys.modules and "unisono.world.world" not in sys.modules
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


@pytest.mark.parametrize("kind", [un.backend.GroupMismatch, un.backend.GroupPeerLost, un.backend.GroupTimeout])
def test_errors_can_be_pickled(kind: type[Exception]) -> None:
    """As DDP's C++ does with the value of a future, to find tensors in it."""
    found = pickle.loads(pickle.dumps(kind("why")))
    assert (type(found), str(found)) == (kind, "why")


def meet_troubles(shared_memory: bool) -> dict[str, Any]:
    """Errors of the kinds that torch's users catch, with texts that say what happened."""
    import torch.distributed as dist

    os.environ["UNISONO_SHARED_MEMORY"] = str(int(shared_memory))
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
        alone = {"timeout": timedelta(seconds=0.3), "use_local_synchronization": True}
        note("nobody", lambda: dist.new_group([0, 1], **alone))
        note("timeout", lambda: dist.all_reduce(torch.ones(3), group=short))
        note("receive", lambda: dist.recv(torch.empty(3), 1, group=short))
        work = dist.all_reduce(torch.ones(30_000), async_op=True)
        note("wait", lambda: work.wait(timedelta(seconds=0.2)))
        dist.distributed_c10d._get_default_store().set("go on", "")
        work.wait()
        found["later"] = work.is_success()
    else:
        dist.distributed_c10d._get_default_store().wait(["go on"])
        dist.all_reduce(torch.ones(30_000))
    note("mismatch", lambda: dist.all_reduce(torch.ones(30_000 + dist.get_rank()), group=odd))
    for name, call in (("swap", _swap_unevenly), ("gather", _gather_unevenly)):
        group = dist.new_group()
        note(name, partial(call, group))
    dist.destroy_process_group()
    return found


def _swap_unevenly(group: Any) -> None:
    rows = 4 + 2 * torch.distributed.get_rank()
    torch.distributed.all_to_all_single(torch.empty(rows), torch.ones(rows), group=group)


def _gather_unevenly(group: Any) -> None:
    rank = torch.distributed.get_rank()
    torch.distributed.gather(torch.ones(4 + rank), [torch.empty(4)] * 2 if rank == 0 else None, 0, group=group)


@pytest.mark.parametrize("shared_memory", [True, False])
def test_errors_are_those_that_torch_users_expect(shared_memory: bool) -> None:
    first, second = un.launch(meet_troubles, 2, args=[shared_memory], threads=1, timeout_s=100)
    assert "0.3 s for rank 1 of 2, which did not come to make the group" in first["nobody"][1]
    for is_runtime_error, text in (
        first["nobody"],
        first["timeout"],
        first["wait"],
        first["mismatch"],
        second["mismatch"],
    ):
        assert is_runtime_error, text
    assert "rank 1" in first["timeout"][1]
    assert ("hit its timeout in all_reduce" if shared_memory else "in all_reduce)") in first["timeout"][1]
    assert "This rank is in all_reduce() (test_backend.py:" in first["timeout"][1]
    assert re.search(r"in recv\(\) .*the other rank calls a send", first["receive"][1]), first["receive"]
    assert "0.2 s" in first["wait"][1]
    assert first["later"]
    assert "30000" in first["mismatch"][1]
    assert "30001" in first["mismatch"][1]
    for found in (first, second):
        assert re.search(r"rank 0 sends 2 .* rank 1, which expects 3|rank 1 sends 3 .* expects 2", found["swap"][1])
        assert "rank 1 sends 5 elements to rank 0, which expects 4" in found["gather"][1]


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
    run = Program(script, "unisono", "3", *names, "--together", env=os.environ)
    out, err = run.communicate(110)
    assert run.returncode == 0, err
    found = json.loads(out.splitlines()[-1])
    assert found["failed"] == [], found["why"]
    assert found["passed"] == names
