"""Checkpoints of real workers: resume bitwise at the same size, to rounding at another, and after a kill."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import torch
from torch import nn

import unisono as un

STEPS = 9  # of 5 batches an epoch: a save in mid-epoch


def train(folder: str, until: int, resume: bool, every: int = 0) -> tuple[int, list[torch.Tensor], list[float]]:
    """Train to step `until` and save there; dropout, Adam and batch norm all carry state."""
    world = un.join(device="cpu")
    torch.manual_seed(100 + world.rank)
    layers = [nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 1)]
    model = nn.Sequential(*layers).double()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    replica = un.parallel(model, optimizer, "allreduce")
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(30, 6, generator=generator, dtype=torch.float64)
    y = x.sum(1, keepdim=True)
    if resume:
        un.load(folder, replica)
    losses: list[float] = []
    while replica.step < until:
        for a, b in un.shard((x, y), batch_size=6, seed=3):
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(a), b)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            if replica.step == until or (every and replica.step % every == 0):
                un.save(folder, replica)
            if replica.step == until:
                break
    return replica.step, [p.detach().clone() for p in model.parameters()], losses


def test_a_resumed_run_is_bitwise_the_run_that_never_stopped(tmp_path: Path) -> None:
    whole = un.launch(train, workers=2, args=(str(tmp_path / "whole"), STEPS, False))
    un.launch(train, workers=2, args=(str(tmp_path / "cut"), 7, False))
    rest = un.launch(train, workers=2, args=(str(tmp_path / "cut"), STEPS, True))
    for rank in range(2):
        assert rest[rank][0] == STEPS
        assert rest[rank][2] == whole[rank][2][7:]
        for found, right in zip(rest[rank][1], whole[rank][1], strict=True):
            assert torch.equal(found, right)


def plain(folder: str, until: int, resume: bool) -> tuple[int, list[torch.Tensor]]:
    """Like `train`, without what depends on the number of workers (dropout, local batch statistics)."""
    world = un.join(device="cpu")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1)).double()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    replica = un.parallel(model, optimizer, "allreduce")
    x = torch.randn(31, 6, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
    y = x.sum(1, keepdim=True)
    if resume:
        un.load(folder, replica)
    while replica.step < until:
        for a, b in un.shard((x, y), batch_size=6, seed=3):
            optimizer.zero_grad()
            nn.functional.mse_loss(model(a), b).backward()
            optimizer.step()
            if replica.step == until:
                break
    un.save(folder, replica)
    return world.size, [p.detach().clone() for p in model.parameters()]


def test_a_run_resumed_at_other_world_sizes_equals_one_process_to_rounding(tmp_path: Path) -> None:
    (_, expected), *_ = un.launch(plain, workers=1, args=(str(tmp_path / "one"), 15, False))
    folder = str(tmp_path / "changing")
    for workers, until in ((2, 4), (3, 9), (1, 15)):
        ranks = un.launch(plain, workers=workers, args=(folder, until, until > 4))
        assert [size for size, _ in ranks] == [workers] * workers
    for found, right in zip(ranks[0][1], expected, strict=True):
        torch.testing.assert_close(found, right, rtol=1e-9, atol=1e-12)


SCRIPT = """
import sys
sys.path.insert(0, {here!r})
from test_resume import train
train({folder!r}, 10_000, False, every=1)
"""


def run_until_killed(script: Path, folder: Path, **variables: str) -> int:
    """Run a script in two workers, kill the launcher when there are three checkpoints; the newest one's step."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(p for p in sys.path if p), **variables}
    command = [sys.executable, "-m", "unisono", "run", "-n", "2", str(script)]
    process = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    deadline = time.monotonic() + 200
    while len(list(folder.glob("step-*"))) < 3:
        assert time.monotonic() < deadline, process.communicate()
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    time.sleep(1.0)  # the workers go with the launcher
    return max(int(path.name.split("-")[1]) for path in folder.glob("step-*"))


def test_a_run_killed_at_any_moment_resumes_from_a_whole_checkpoint(tmp_path: Path) -> None:
    folder, script = tmp_path / "run", tmp_path / "script.py"
    script.write_text(SCRIPT.format(here=str(Path(__file__).parent), folder=str(folder)))
    newest = run_until_killed(script, folder)
    (step, _, _), _ = un.launch(train, workers=2, args=(str(folder), newest + 3, True))
    assert step == newest + 3
    assert len(list(folder.glob("step-*"))) <= 3
    assert [path.name for path in folder.iterdir() if not path.name.startswith("step-")] == []
