"""`unisono compare` with real workers, and torch's own methods below an unchanged program."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import unisono as un
from unisono.cli import main

SCRIPT = """
import itertools, os, sys
import torch
from torch import nn
import unisono as un

world = un.join(device="cpu")
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
if os.environ["UNISONO_STRATEGY"] == "bf16" and world.rank == 1:
    raise ValueError("no bf16 today")
un.parallel(model, optimizer)
x = torch.randn(64, 6, generator=torch.Generator().manual_seed(1))
y = x[:, :3].argmax(1)
for epoch in itertools.count():  # it never ends by itself
    for inputs, labels in un.shard((x, y), batch_size=16, seed=0):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), labels).backward()
        optimizer.step()
"""


def reference_losses(steps: int) -> list[float]:
    """The same in one process, without un.parallel: the losses of the joined batches."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    x = torch.randn(64, 6, generator=torch.Generator().manual_seed(1))
    y = x[:, :3].argmax(1)
    losses = []
    for inputs, labels in un.shard((x, y), batch_size=16, seed=0, world=un.World()).steps(steps):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(inputs), labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(SCRIPT)
    return tmp_path / "train.py"


def test_a_script_that_knows_nothing_of_it_is_compared(script: Path, capfd: pytest.CaptureFixture[str]) -> None:
    methods = "allreduce,torch:ddp,bf16"
    assert main(["compare", "train.py", "--strategies", methods, "--steps", "12", "--json", "numbers.json"]) == 0
    out, err = capfd.readouterr()
    numbers = json.loads(Path("numbers.json").read_text())
    expected = reference_losses(12)
    for run in numbers["runs"][:3]:  # one worker, ours and torch's: the same gradients to rounding
        assert run["losses"] == pytest.approx(expected, rel=1e-4), run["method"]
        assert run["samples"] == [16 * (i + 1) for i in range(12)]
        assert all(a < b for a, b in pairwise(run["times_s"]))
    rows = {row["method"]: row for row in numbers["rows"]}
    assert rows["allreduce"]["speed_up"] is not None
    assert rows["torch:ddp"]["bytes_a_step"] == 4 * (6 * 8 + 8 + 8 * 3 + 3)  # 2 * (N - 1) / N of all gradients
    assert rows["bf16"]["note"] == "ValueError: no bf16 today"
    assert "ValueError: no bf16 today" in out
    assert "its output is in unisono-compare/runs/04-bf16" in err
    assert "no bf16 today" in next(Path("unisono-compare/runs").glob("04-bf16*/run.log")).read_text()
    assert "Content-Security-Policy" in Path("unisono-compare/report.html").read_text()


def test_a_run_ends_at_the_target(script: Path, capfd: pytest.CaptureFixture[str]) -> None:
    target = sum(reference_losses(40)[-10:]) / 10
    command = ["compare", "train.py", "--strategies", "allreduce", "--until", f"loss={target:.4f}", "--no-base"]
    assert main([*command, "--output", "out"]) == 0
    numbers = json.loads(Path("out/results.json").read_text())
    (row,) = numbers["rows"]
    assert row["time_to_target_s"] in numbers["runs"][0]["times_s"][35:45]
    assert "is the first to reach loss" in capfd.readouterr().out


def test_a_script_without_un_parallel_is_an_error_that_says_so(script: Path, capfd: pytest.CaptureFixture[str]) -> None:
    script.write_text("import unisono as un\nun.join(device='cpu')\n")
    assert main(["compare", "train.py", "--strategies", "allreduce,topk", "--no-base"]) == 1
    assert "train.py ended without calling un.parallel(model, optimizer, ...)" in capfd.readouterr().err


# Torch's own methods --------------------------------------------------------------------------------------------------


def train_under(specs: list[str]) -> dict[str, Any]:
    """In each worker: a small transformer under each, with clipping and a stateful optimizer."""
    world = un.join(device="cpu")
    found = {}
    for spec in specs:
        torch.manual_seed(0)
        model = make_model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        called = []
        model.register_forward_hook(lambda *_, called=called: called.append(1))
        replica = un.parallel(model, optimizer, spec)
        x = torch.randn(8, 5, 4, generator=torch.Generator().manual_seed(3))
        for inputs in un.shard(x, batch_size=4, shuffle=False, name=spec).steps(4):
            optimizer.zero_grad()
            (model(inputs) ** 2).mean().backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
        with torch.no_grad():
            outputs = model(x)
            if spec == "torch:ddp" and world.rank == 0:
                model(x[:1])  # a rank may evaluate alone
                called.pop()
        held = sum(p.numel() for p in optimizer.state)
        bytes_sent = world.ledger.rows[-1].bytes_sent
        found[spec] = (outputs, len(called), len(world.ledger.rows), held, bytes_sent)
        replica.close()
    return found


def test_torchs_own_methods_train_an_unchanged_program() -> None:
    (plain,) = un.launch(train_under, 1, (["allreduce"],))
    outputs, calls, _, whole, _ = plain["allreduce"]
    specs = ["torch:ddp", "torch:fsdp2", "torch:ddp_powersgd"]
    ranks = un.launch(train_under, 2, (specs,))
    total = 4 * sum(p.numel() for p in make_model().parameters())
    for found in ranks:
        for spec in specs[:2]:
            torch.testing.assert_close(found[spec][0], outputs, rtol=1e-4, atol=1e-5)
        assert [found[spec][1] for spec in specs] == [calls] * 3  # hooks on the model run once a call
        assert [found[spec][2] for spec in specs] == [4, 8, 12]  # a row of the ledger for each step
        assert found["torch:ddp"][4] == total
        assert found["torch:ddp_powersgd"][4] < total
        assert not torch.equal(found["torch:ddp_powersgd"][0], outputs)
    torch.testing.assert_close(ranks[0]["torch:ddp_powersgd"][0], ranks[1]["torch:ddp_powersgd"][0])
    assert whole == total // 4


def make_model() -> nn.Module:
    block = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    return nn.Sequential(nn.Linear(4, 8), nn.TransformerEncoder(block, 2), nn.Linear(8, 1))
