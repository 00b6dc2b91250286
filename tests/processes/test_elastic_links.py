"""Workers on several hosts that come and go: worlds that are formed anew leave no thread and no open file behind."""

from __future__ import annotations

import gc
import os
import re
import threading
import time
from collections import Counter
from typing import Any

import pytest
import torch

import unisono as un

STEPS = 20
KILLS = "; ".join(f"kill 1@{step}" for step in (5, 11))


def train_and_count() -> dict[str, Any]:
    """In each worker: its weights, and of each generation of the world that it trained in, its threads and files."""
    world = un.join("cpu")
    torch.manual_seed(0)
    net = torch.nn.Linear(400, 400).double()  # 1.3 MB: exchanged in rings
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    un.parallel(net, optimizer, "allreduce")
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(STEPS * 4, 400, generator=generator, dtype=torch.float64)
    seen: dict[int, tuple[dict[str, int], int]] = {}
    steps: Counter[int] = Counter()
    for (rows,) in un.shard((x,), 4).steps(STEPS):
        optimizer.zero_grad()
        net(rows).square().mean().backward()
        optimizer.step()
        assert world.elastic is not None
        generation = world.elastic.membership.generation
        steps[generation] += 1
        if steps[generation] == 3:  # all are connected, and nobody is lost yet
            gc.collect()  # a world that was left is freed then, with the emulation of its links
            names = Counter(re.sub(r"\d+", "", thread.name) for thread in threading.enumerate())
            seen[generation] = dict(names), len(os.listdir("/proc/self/fd"))
        time.sleep(0.02)
    return {"seen": seen, "pid": os.getpid(), "weights": net.weight.detach().clone()}


@pytest.mark.timeout(300)
def test_worlds_that_are_formed_anew_leave_no_thread_and_no_open_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UNISONO_ENCRYPT", "1")
    hosts = un.on.lab(hosts=2, net="1gbit", shaper="transport")
    results = un.launch(train_and_count, workers=2, least=2, on=hosts, faults=KILLS, threads=1, output="rank0")
    assert torch.equal(results[0]["weights"], results[1]["weights"])
    keeper = max(results, key=lambda result: len(result["seen"]))["seen"]
    generations = sorted(keeper)
    assert len(generations) >= 3, generations
    after_first, last = keeper[generations[1]], keeper[generations[-1]]
    assert last == after_first, keeper
