"""Evaluating at any place of the loop changes nothing."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from stranger_programs import furthest, mlp, seeded, values
from torch import Tensor

import unisono as un
from unisono.world import World
from unisono.world.virtual import run_threads

SPECS = [
    "allreduce",
    "topk(k=0.5)",
    "local_sgd(every=1, start=0)",
    "local_sgd(every=2, start=0, reducer=topk(k=0.3))",
    "diloco(every=1)",
    "diloco(every=2, fragments=2, delay=1)",
    "crossbow",
    "crossbow(learners=2)",
    "gossip",
    "gossip(bits=8)",
    "parameter_server",
    "parameter_server(reducer=bytegrad)",
    "zero(stage=1)",
    "shared",
]


@pytest.mark.parametrize("quietly", [nullcontext, torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("spec", SPECS)
def test_evaluating_between_backward_and_step_changes_no_bit(
    spec: str, quietly: Callable[[], AbstractContextManager[Any]]
) -> None:
    def work(world: World) -> list[Tensor]:
        ends = []
        for evaluates in (False, True):
            model = mlp()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
            replica = un.parallel(model, optimizer, spec, world=world)
            for t in range(5):
                x = seeded(lambda t=t: torch.randn(6, 4).double(), t)[world.rank :: 2]
                optimizer.zero_grad()
                (model(x) - x.sum(1, keepdim=True)).square().mean().backward()
                if evaluates:
                    model.eval()
                    with quietly():
                        model(x)
                    model.train()
                optimizer.step()
            ends.append(values(replica.consolidate()))
            replica.restore()
            replica.close()
        return [torch.tensor(furthest(*ends))]

    for [difference] in run_threads(work, 2):
        assert difference == 0.0


@pytest.mark.parametrize("spec", ["gossip(bits=8)", "async_diloco(every=2, quorum=2, pace=False)"])
def test_an_average_that_is_loaded_to_evaluate_and_taken_out_again_changes_no_bit(spec: str) -> None:
    def work(world: World) -> float:
        ends = []
        for evaluates in (False, True):
            model = mlp()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
            replica = un.parallel(model, optimizer, spec, world=world)
            for t in range(5):
                x = seeded(lambda t=t: torch.randn(6, 4).double(), t)[world.rank :: 2]
                optimizer.zero_grad()
                (model(x) - x.sum(1, keepdim=True)).square().mean().backward()
                optimizer.step()
                if evaluates:
                    kept = copy.deepcopy(model.state_dict())
                    model.load_state_dict({name: 0.5 * value for name, value in kept.items()})
                    model.load_state_dict(kept)
            ends.append(values(replica.consolidate()))
            replica.close()
        return furthest(*ends)

    assert run_threads(work, 2) == [0.0, 0.0]
