"""A divided stream in real processes: a worker is killed, and each sample still counts once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

import unisono as un

SAMPLES, BATCH, EPOCHS = 100, 10, 2


def collate(samples: list[dict[str, Any]]) -> torch.Tensor:
    return torch.tensor([sample["id"] for sample in samples])


def read(folder: str, world: un.World, workers: int) -> un.Shard:
    data = un.records(folder)
    return un.shard(data, BATCH, buffer=24, num_workers=workers, collate_fn=collate, name="train", world=world)


def train(folder: str, workers: int) -> list[float]:
    """How often each sample was used, times 1/m for a batch of m."""
    world = un.join(device="cpu")
    model = torch.nn.ParameterList([torch.zeros(SAMPLES, dtype=torch.float64)])
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    un.parallel(model, optimizer)
    shard = read(folder, world, workers)
    for _ in range(EPOCHS):
        for numbers in shard:
            optimizer.zero_grad()
            (-model[0][numbers].sum() / len(numbers)).backward()
            optimizer.step()
    return model[0].tolist()


def test_the_rest_of_a_killed_workers_part_is_read_by_the_others(tmp_path: Path) -> None:
    for i in range(5):
        lines = [json.dumps({"id": n}) + "\n" for n in range(i, SAMPLES, 5)]
        (tmp_path / f"{i}.jsonl").write_text("".join(lines))
    expected = torch.zeros(SAMPLES, dtype=torch.float64)
    shard = read(str(tmp_path), un.World(), 0)
    for _ in range(EPOCHS):
        for numbers in shard:
            expected[numbers] += 1 / len(numbers)
    found = un.launch(train, workers=3, least=2, args=(str(tmp_path), 1), faults="kill 1@4; kill 2@13 in exchange")
    for uses in found:
        torch.testing.assert_close(torch.tensor(uses, dtype=torch.float64), expected, rtol=0, atol=1e-12)
