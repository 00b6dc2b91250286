"""The commonest mistakes in a program that several processes run: what the user reads."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

import unisono as un
from unisono.launchers.runtime.frames import VARIABLE

PRELUDE = """
import os, torch, unisono as un
world = un.join()
model = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Tanh(), torch.nn.Linear(6, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
replica = un.parallel(model, optimizer, {strategy!r})
def step(x):
    optimizer.zero_grad()
    model(x).square().sum().backward()
    optimizer.step()
torch.manual_seed(world.rank)
step(torch.randn(3, 4))
"""
SAVE = """
if world.rank == 0:
    un.save("checkpoint", replica)
"""
LEAVE = """
for i in range(3):
    if world.rank == 1 and i == 1:
        break
    step(torch.randn(3, 4))
"""
LENGTHS = """
data = torch.utils.data.TensorDataset(torch.randn(12 - 4 * world.rank, 4))
for [x] in torch.utils.data.DataLoader(data, batch_size=2, shuffle=True):
    step(x)
"""
EVALUATE = """
if world.rank == 0:
    with torch.no_grad():
        model(torch.randn(3, 4))
"""


def run(run_script: Callable[..., Any], text: str, strategy: str = "allreduce") -> tuple[int, str, str]:
    """Exit status, output and errors of two workers; a program that hangs fails here."""
    found: tuple[int, str, str] = run_script(PRELUDE.format(strategy=strategy) + text, "-n", "2").finish(timeout_s=45)
    return found


@pytest.mark.parametrize(
    ("text", "strategy", "call", "rule", "step"),
    [
        (SAVE, "allreduce", "un.save (script.py:15)", "every rank calls un.save; rank 0 writes", 1),
        (LEAVE, "allreduce", "backward() (script.py:9)", "every rank runs as many passes", 2),
        (LENGTHS, "allreduce", "backward() (script.py:9)", "un.shard does", 5),
        (EVALUATE, "zero(stage=3)", "a forward pass (script.py:16)", "also to evaluate it", 1),
    ],
    ids=["save", "leave", "lengths", "evaluate"],
)
def test_a_rank_that_ended_its_program_well_has_not_died(
    text: str, strategy: str, call: str, rule: str, step: int, run_script: Callable[..., Any]
) -> None:
    status, _, err = run(run_script, text, strategy)
    assert status == 1
    assert re.search(
        rf"rank 1 \(process \d+\) has ended its program with status 0 at \S+, after step {step}; waited", err
    )
    assert f"This rank is in {call}: " in err
    assert rule in err
    assert "has died" not in err
    assert "was stopped" not in err
    assert "src/unisono" not in err, "a frame of ours"
    assert f"{VARIABLE}=full shows them" in err


def test_all_frames_are_shown_where_they_are_asked_for(
    run_script: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, "full")
    _, _, err = run(run_script, SAVE)
    assert "src/unisono" in err
    assert "left out" not in err


def test_a_training_loop_in_a_forked_child_is_told_whose_the_world_is(run_script: Callable[..., Any]) -> None:
    text = """
    child = os.fork()
    if not child:
        for work in (lambda: world.barrier(), lambda: step(torch.randn(3, 4)), lambda: un.save("here", replica)):
            try:
                work()
            except RuntimeError as error:
                print(error, flush=True)
        assert un.join() is world and world.size == 2  # a data loader's worker may ask
        os._exit(0)
    os.waitpid(child, 0)
    step(torch.randn(3, 4))
    print("the parent", world.rank, "trains", os.getpid(), flush=True)
    """
    status, out, err = run(run_script, "\n".join(line[4:] for line in text.splitlines()))
    assert status == 0, err
    for rank in (0, 1):
        [pid] = re.findall(rf"the parent {rank} trains (\d+)", out)
        assert out.count(f"this process was forked from process {pid}, which is rank {rank} of the world") == 3


def test_ranks_that_wait_for_each_other_in_different_calls_are_told(run_script: Callable[..., Any]) -> None:
    text = """
import unisono.background
unisono.background.LONG_S = 0.2
if world.rank == 0:
    step(torch.randn(3, 4))
un.save("checkpoint", replica)
"""
    launched = run_script(
        "import os\nos.environ['UNISONO_TIMEOUT_S'] = '1'" + PRELUDE.format(strategy="allreduce") + text, "-n", "2"
    )
    status, _, err = launched.finish(timeout_s=45)
    assert status == 1
    assert "this rank waits in backward() (script.py:10) for rank 1, which waits in un.save (script.py:19): they" in err


@pytest.mark.parametrize("hosts", ["aa", "ab"])
def test_a_rank_that_ended_is_said_to_have_ended_where_messages_are_sent(hosts: str) -> None:
    def work() -> str:
        os.environ.pop("UNISONO_SHM_FD")
        os.environ["UNISONO_HOST"] = hosts[int(os.environ["RANK"])]
        os.environ["UNISONO_SHARED_MEMORY"] = "0"
        world = un.join()
        if world.rank == 0:
            try:
                world.all_reduce(torch.ones(5000)).wait()
            except un.PeerLost as error:
                return str(error)
        return repr(world)

    said, other = un.launch(work, workers=2, timeout_s=100)
    assert "messages" in other
    assert re.search(r"rank 1 \(process \d+ on \w\S*\) has ended its program with status 0 at \S+; waited for it", said)
    assert re.search(r"This rank is in wait\(\) \(test_mistaken_programs.py:\d+\): every rank", said)
