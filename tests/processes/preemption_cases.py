"""Trainings that are interrupted by SIGTERM: with the trainer, and in a loop. Run by scripts and by `un.launch`."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import torch
from torch import nn

import unisono as un
from unisono.launchers.runtime import sigterm

STEPS, EPOCH = 150, 30  # the loop leaves at the latest two intervals of 64 calls after step 5


def pause(rank: int, step: int, who: str) -> None:
    """In step 5 of the first run, say that this worker is there, and wait until those that are to be told have been."""
    if step == 5 and who:
        Path(f"ready-{rank}").write_text(f"{os.getpid()}\n")
        while not sigterm.told() and str(rank) in who:
            time.sleep(0.005)


class Pause(un.Callback):
    def __init__(self, who: str) -> None:
        self.who = who

    def on_step_end(self, trainer: un.Trainer, logs: dict[str, float]) -> None:
        pause(trainer.world.rank, trainer.replica.step, self.who)


def make() -> tuple[nn.Module, torch.optim.Optimizer, tuple[torch.Tensor, torch.Tensor]]:
    """A model whose training depends on the random numbers of each worker."""
    torch.manual_seed(un.join(device="cpu").rank)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Dropout(0.2), nn.Linear(8, 1)).double()
    x = torch.randn(EPOCH * 4, 6, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
    return model, torch.optim.Adam(model.parameters(), lr=0.01), (x, x.sum(1, keepdim=True))


def with_trainer(folder: str | None, who: str) -> nn.Module:
    model, optimizer, data = make()
    work = un.Trainer(model, optimizer, loss=nn.MSELoss(), checkpoint=folder, callbacks=[Pause(who)], progress=False)
    work.fit(data, epochs=STEPS // EPOCH, batch_size=4)
    return model


def in_a_loop(folder: str | None, who: str) -> nn.Module:
    model, optimizer, data = make()
    replica = un.parallel(model, optimizer, "allreduce")
    if folder is not None and Path(folder).exists():
        un.load(folder, replica)
    while replica.step < STEPS:
        for x, y in un.shard(data, batch_size=4):
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
            leave = folder is not None and un.preempted()
            if leave:
                un.save(folder, replica)
                sys.exit(143)
            pause(un.join().rank, replica.step, who)
    return model


def train(kind: str, folder: str | None = None, who: str = "") -> list[torch.Tensor]:
    model = with_trainer(folder, who) if kind == "trainer" else in_a_loop(folder, who)
    return [p.detach().clone() for p in model.parameters()]
