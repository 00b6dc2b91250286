"""`unisono plan` with real workers: a plan, a program that ends too soon, one that never calls un.parallel."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from unisono.cli import main

PROGRAM = """
import sys, torch, unisono as un
world = un.join()
model = torch.nn.Linear(8, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
if "alone" not in sys.argv:
    un.parallel(model, optimizer)
x = torch.randn(2, 8, generator=torch.Generator().manual_seed(world.rank))
for _ in range(int(sys.argv[1])):
    optimizer.zero_grad()
    model(x).square().sum().backward()
    optimizer.step()
print("ended by itself")
"""
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Run:
    """The command in this process, which has imported what it predicts with."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(PROGRAM)

    def run(*words: str) -> tuple[int, str, str]:
        status = main(["plan", "-n", "2", "--methods", "allreduce; topk(k=0.5); torch:ddp", *words])
        return status, *capfd.readouterr()

    return run


def test_a_plan_is_made_of_the_programs_own_steps_and_the_program_is_ended(tmp_path: Path, plan: Run) -> None:
    status, out, err = plan("--json", "plan.json", "train.py", "100000")
    assert status == 0, err
    assert "ended by itself" not in out
    written = json.loads((tmp_path / "plan.json").read_text())
    assert {row["spec"] for row in written["methods"]} == {"allreduce", "topk(k=0.5)"}
    assert written["first"] in out
    assert all(0 < row["low"] <= row["seconds"] <= row["high"] for row in written["methods"])
    assert "\ntorch:ddp " in out
    assert out.splitlines()[-1].startswith("In short: ")


def test_a_program_that_ends_too_soon_gives_what_there_is_and_says_how_many_steps_it_takes(plan: Run) -> None:
    status, out, err = plan("train.py", "15")  # 2 to warm up, 3 of compute, up to 9 of a method
    assert status == 0, err
    assert "ended by itself" in out
    assert "after 15 optimizer steps, and the plan needs 32" in out
    assert "allreduce" in out


def test_a_program_that_never_calls_parallel_is_told_so(plan: Run) -> None:
    status, _, err = plan("train.py", "1", "alone")
    assert status == 1
    assert "never called un.parallel" in err
