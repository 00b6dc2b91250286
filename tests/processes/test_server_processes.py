"""Parameter servers and Hogwild between real processes: the death of a worker, of a server, and one model for all."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import unisono as un
from preloaded import Program

SOURCES = Path(un.__file__).parents[1]

PROGRAM = """
    import json, os, signal, sys, time, torch, unisono as un
    from torch import nn

    spec, dies_at, steps, folder = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
    world = un.join(device="cpu")
    rank = world.rank
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 300), nn.Tanh(), nn.Linear(300, 2)).double()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    if os.environ.get("DIES") == str(rank) and "own" in spec:  # a server: it dies while it serves
        from unisono.strategies.parameter_server import server
        push = server.GradientServer.push
        def deadly(self, *given):
            if self.version == dies_at:
                os.kill(os.getpid(), signal.SIGKILL)
            return push(self, *given)
        server.GradientServer.push = deadly
    replica = un.parallel(model, optimizer, spec)
    if os.environ.get("RESUME"):
        un.load(folder, replica)
    found = {"rank": rank, "error": ""}
    try:
        while replica.step < steps:
            generator = torch.Generator().manual_seed(1000 * replica.step + rank)
            x = torch.randn(8, 4, generator=generator, dtype=torch.float64)
            optimizer.zero_grad()
            (model(x) - x[:, :2].sin()).square().mean().backward()
            if os.environ.get("DIES") == str(rank) and replica.step == dies_at + 1:
                os.kill(os.getpid(), signal.SIGKILL)
            optimizer.step()
            if replica.step == 2 and not os.environ.get("RESUME"):
                un.save(folder, replica)
        whole = replica.consolidate()
        found["sum"] = [p.double().sum().item() for p in whole.parameters()]
        found["clocks"] = replica.progress()
        found["events"] = [e.kind for e in world.ledger.events if e.kind == "worker lost"]
        if os.environ.get("DIES"):
            un.save(f"{folder}/after", replica)
        replica.close()
    except un.PeerLost as error:
        found["error"] = str(error)
    with open(f"{folder}/rank{rank}.json", "w") as file:
        json.dump(found, file)
"""


class Ranks:
    """Processes that no launcher looks after: the death of one is the others' affair."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.processes: list[Program] = []

    def run(self, size: int, *args: object, shared: bool = True, **variables: str) -> list[int]:
        (self.folder / "program.py").write_text(textwrap.dedent(PROGRAM))
        attempt = str(len(self.processes))  # each start meets under a name of its own
        started = []
        for rank in range(size):
            env = {k: v for k, v in os.environ.items() if not k.startswith("UNISONO_")}
            env |= {"RANK": str(rank), "WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": "1"}
            env |= {"MASTER_PORT": str(self.store.port), "TORCHELASTIC_USE_AGENT_STORE": "True", **variables}
            env |= {"TORCHELASTIC_RESTART_COUNT": attempt, "UNISONO_SHARED_MEMORY": str(int(shared))}
            env["PYTHONPATH"] = str(SOURCES)
            program = self.folder / "program.py"
            started.append(Program(program, *args, self.folder, cwd=self.folder, env=env, stderr=None))
        self.processes += started
        for process in started:
            print(process.communicate(timeout=280)[0])
        return [process.wait() for process in started]

    def found(self, *ranks: int) -> list[dict[str, Any]]:
        return [json.loads((self.folder / f"rank{r}.json").read_text()) for r in ranks]


@pytest.fixture
def ranks(tmp_path: Path) -> Iterator[Ranks]:
    running = Ranks(tmp_path)
    yield running
    for process in running.processes:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("shared", [True, False], ids=["shared memory", "messages"])
@pytest.mark.parametrize("spec", ["parameter_server(servers=2)", "parameter_server(staleness=2)"])
def test_a_dead_worker_does_not_stop_the_others(spec: str, shared: bool, ranks: Ranks) -> None:
    assert ranks.run(4, spec, 4, 12, shared=shared, DIES="3") == [0, 0, 0, -9]
    found = ranks.found(0, 1, 2)
    for one in found:
        assert one["error"] == ""
        assert one["sum"] == found[0]["sum"]
        assert one["clocks"][3] == -1
    assert found[0]["events"] == ["worker lost"]
    saved = un.read_checkpoint(ranks.folder / "after")  # those that live have saved
    assert saved["step"] == 12
    assert [x.sum().item() for x in saved["model"].values()] == found[0]["sum"]


@pytest.mark.parametrize("shared", [False], ids=["messages"])  # both would take a minute
def test_a_dead_server_is_named_and_the_run_resumes_from_its_checkpoint(shared: bool, ranks: Ranks) -> None:
    spec = "parameter_server(servers=2, place=own)"
    assert ranks.run(4, spec, 5, 9, shared=shared, DIES="3") == [0, 0, 0, -9]
    for one in ranks.found(0, 1):
        assert "the parameter server on rank 3 is gone" in one["error"]
        assert "checkpoint" in one["error"]
    assert ranks.run(4, spec, 99, 9, shared=shared, RESUME="1") == [0, 0, 0, 0]
    resumed = ranks.found(0, 1)
    assert resumed[0]["sum"] == resumed[1]["sum"]
    ranks.folder = ranks.folder / "other"
    ranks.folder.mkdir()
    assert ranks.run(4, spec, 99, 9, shared=shared) == [0, 0, 0, 0]
    assert ranks.found(0)[0]["sum"] == resumed[0]["sum"]  # bit by bit the run that never stopped


def test_programs_that_close_nothing_end_by_themselves(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent(
            """
            import time, torch, unisono as un
            world = un.join(device="cpu")
            model = torch.nn.Linear(4, 1)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            un.parallel(model, optimizer, "parameter_server(staleness=None)")
            for _ in range(20):
                optimizer.zero_grad()
                model(torch.ones(2, 4)).square().mean().backward()
                time.sleep(0.02 * world.rank)
                optimizer.step()
            print("done", world.rank)
            """
        )
    )
    env = {**os.environ, "PYTHONPATH": str(SOURCES), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "unisono", "run", "-n", "3", str(script)]
    ended = subprocess.run(command, env=env, capture_output=True, text=True, timeout=280, check=False)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("done") == 3


def test_hogwild_shares_memory_between_processes() -> None:
    def work() -> tuple[float, list[float], int]:
        world = un.join(device="cpu")
        torch.manual_seed(world.rank)
        generator = torch.Generator().manual_seed(1)
        truth = torch.randn(60, 1, generator=generator, dtype=torch.float64)
        rows = torch.randint(60, (180, 3), generator=generator)
        y = truth[rows].sum(1).squeeze(1)
        model = nn.EmbeddingBag(60, 1, mode="sum", sparse=True, dtype=torch.float64)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
        replica = un.parallel(model, optimizer, "hogwild")
        if world.rank == 1:
            with torch.no_grad():
                model.weight.fill_(0.5)
        world.barrier()
        seen = model.weight[7].item()
        world.barrier()  # before anyone steps
        for _ in range(25):
            for a, b in un.shard((rows, y), batch_size=12, seed=2):
                optimizer.zero_grad()
                (model(a).squeeze(1) - b).square().sum().mul(0.5).backward()
                optimizer.step()
        whole = replica.consolidate()
        loss = (whole(rows).squeeze(1) - y).square().mean().item() / y.square().mean().item()
        replica.close()
        return seen, whole.weight.flatten().tolist(), int(loss < 1e-3)

    results = un.launch(work, workers=3, timeout_s=280)
    for seen, weights, converged in results:
        assert seen == 0.5
        assert weights == results[0][1]
        assert converged


def test_hogwild_without_shared_memory_is_refused() -> None:
    def work() -> str:
        os.environ.pop("UNISONO_SHM_FD")
        os.environ["UNISONO_SHARED_MEMORY"] = "0"
        model = nn.Linear(2, 1)
        try:
            un.parallel(model, torch.optim.SGD(model.parameters(), lr=0.1), "hogwild")
        except ValueError as error:
            return str(error)
        return ""

    for told in un.launch(work, workers=2, timeout_s=280):
        assert "memory in common" in told
