"""Unisono against torch's DDP in every corner case, with real processes: the same gradients, the same parameters."""

from __future__ import annotations

import copy
import json
import os
import threading
import traceback
from datetime import timedelta
from pathlib import Path
from typing import Any

import ddp_cases
import ddp_pair
import joined_cases  # noqa: F401 (adds its cases)
import pytest
import torch

import unisono as un
from torch_groups import leave_group

ALL = list(ddp_cases.CASES)
RUNS: dict[str, tuple[list[str], dict[str, Any]]] = {
    "overlapped, many buckets": (ALL, {"overlap": True, "bucket_bytes": 400}),
    "after backward": (ALL, {"overlap": False}),
    "overlapped, by messages": (ddp_cases.MAIN, {"overlap": True, "bucket_bytes": 400}),
}


def run_cases(names: list[str], settings: dict[str, Any], folder: Path, *, shared_memory: bool) -> str:
    """In each worker: run the cases and write what each found. An error of one rank alone ends the run."""
    import torch.distributed as dist

    os.environ["UNISONO_TIMEOUT_S"] = "30"
    if not shared_memory:
        os.environ["UNISONO_SHARED_MEMORY"] = "0"
        os.environ.pop("UNISONO_SHM_FD", None)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=30))
    store = dist.PrefixStore("cases", dist.distributed_c10d._get_default_store())
    world = un.join()
    ddp_pair.settings.update(settings)
    with open(folder / f"{world.rank}.jsonl", "w") as file:
        for name in names:
            try:
                ddp_cases.CASES[name]()
                found = ddp_pair.mismatches[:3]
            except Exception:
                found = [*ddp_pair.mismatches[:3], traceback.format_exc()]
                store.set(f"{name} failed on {world.rank}", "")
                store.wait([f"{name} failed on {rank}" for rank in range(world.size)], timedelta(seconds=5))
            finally:
                file.write(json.dumps([name, found]) + "\n")
                file.flush()
            ddp_pair.mismatches.clear()
    leave_group()
    assert world.transport is not None
    return world.transport.name


class Run:
    """One launch: what each case found, rank by rank, and what stopped the launch, if anything did."""

    def __init__(self, name: str, folder: Path) -> None:
        names, settings = RUNS[name]
        self.stopped, self.transports = "", []
        try:
            self.transports = un.launch(
                run_cases,
                2,
                args=[names, settings, folder],
                kwargs={"shared_memory": "messages" not in name},
                threads=1,
                timeout_s=100,
            )
        except (un.WorkerError, TimeoutError) as error:
            self.stopped = str(error)
        self.found: dict[str, list[str]] = {}
        self.ranks: dict[str, int] = {}
        for file in sorted(folder.glob("*.jsonl")):
            for case, problems in map(json.loads, file.read_text().splitlines()):
                self.ranks[case] = self.ranks.get(case, 0) + 1
                self.found.setdefault(case, []).extend(f"rank {file.stem}: {problem}" for problem in problems)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    return Runs(tmp_path_factory)


class Runs(dict[str, Run]):
    """Launches a run when its first case is asked for."""

    def __init__(self, folders: pytest.TempPathFactory) -> None:
        self.folders = folders

    def __missing__(self, name: str) -> Run:
        self[name] = Run(name, self.folders.mktemp("cases"))
        return self[name]


@pytest.mark.parametrize(("run", "case"), [(run, case) for run, (cases, _) in RUNS.items() for case in cases])
def test_same_as_ddp(runs: dict[str, Run], run: str, case: str) -> None:
    done = runs[run]
    assert not done.found.get(case), "\n".join(done.found[case])
    assert done.ranks.get(case) == 2, f"did not finish: {done.stopped}"


@pytest.mark.parametrize("run", RUNS)
def test_ran_over_the_transport_it_is_about(runs: dict[str, Run], run: str) -> None:
    assert runs[run].transports == ["messages" if "messages" in run else "shared memory"] * 2, runs[run].stopped


# A world of one --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", ["allreduce", "allreduce(accumulate=2)", "allreduce(overlap=False)"])
def test_a_world_of_one_is_the_bare_loop_bit_by_bit(spec: str) -> None:
    threads = threading.active_count()
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 3))
    bare = copy.deepcopy(model)
    optimizers = ddp_pair.sgd(model.parameters()), ddp_pair.sgd(bare.parameters())
    replica = un.parallel(model, optimizers[0], spec, world=un.World())
    for t in range(5):
        x = torch.randn(4, 6, generator=torch.Generator().manual_seed(t))
        for side, optimizer in zip((model, bare), optimizers, strict=True):
            optimizer.zero_grad()
            side(x).square().mean().backward()
            torch.nn.utils.clip_grad_norm_(side.parameters(), 0.1)
            optimizer.step()
        for a, b in zip(model.state_dict().values(), bare.state_dict().values(), strict=True):
            assert torch.equal(a, b)
        for a, b in zip(model.parameters(), bare.parameters(), strict=True):
            assert torch.equal(a.grad, b.grad)
    assert replica.step == 5
    assert threading.active_count() <= threads, "a world of one needs no thread"
