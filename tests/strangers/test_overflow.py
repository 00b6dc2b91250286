"""A step that is skipped for an inf or NaN in one gradient: what compressing methods have still to send stays whole.

The gradients are given numbers, so that all that was put in is known. At the end the ranks send what they still have:
then the model has moved by the mean of all that was put in, over the steps that were made.
"""

from __future__ import annotations

import math
from collections.abc import Container
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import unisono as un
from unisono.world import World
from unisono.world.virtual import run_threads

SIZE, STEPS, LR = 2, 8, 0.5
OVERFLOWS = {2: (1, "b"), 3: (0, "a"), 6: (1, "c"), 8: (0, "e")}  # in these steps: on which rank, in which parameter
REDUCERS = [
    "topk(k=0.1)",
    "randomk(k=0.1)",
    "powersgd(rank=1, min_saving=1.0)",
    "onebit",
    "error_feedback(bytegrad)",
    "error_feedback(topk(k=0.1, feedback=False))",
    "warmup(topk(k=0.1), steps=2)",
    "masked(topk(k=0.1), skip='b')",
    "masked(powersgd(rank=1, min_saving=1.0), only='a', rest=onebit)",
    "accordion(low=dense, high=topk(k=0.1), every=1)",
    "accordion(low=onebit, high=topk(k=0.1), every=2)",
    "hierarchical(topk(k=0.1))",
]


class Given(nn.Module):
    """The gradient of each parameter is what is given for it; that of `e` is sparse."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d = (nn.Parameter(torch.zeros(s)) for s in ((6, 5), (4, 7), (9, 3), (5,)))
        self.e = nn.Embedding(3, 2, sparse=True)
        nn.init.zeros_(self.e.weight)
        self.double()

    def forward(self, wanted: dict[str, Tensor]) -> Tensor:
        rows = self.e(torch.tensor([0, 2]))
        parts = [p * wanted[n] for n, p in self.named_parameters() if n in wanted]
        return torch.stack([x.sum() for x in (*parts, rows * wanted["e"])]).sum()


def wanted(rank: int, step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(100 * rank + step)
    shapes = {"a": (6, 5), "b": (4, 7), "c": (9, 3), "d": (5,), "e": (2, 2)}
    made = {n: torch.randn(shape, generator=generator, dtype=torch.float64) for n, shape in shapes.items()}
    if OVERFLOWS.get(step, (None,))[0] == rank:
        made[OVERFLOWS[step][1]].view(-1)[-1] = math.inf if step % 2 else math.nan
    return made if step <= STEPS else {n: torch.zeros_like(x) for n, x in made.items()}


def train(world: World, strategy: str, scaled: bool, leave_out: Container[int] = ()) -> dict[str, Tensor]:
    """A loop as people write it: the step is skipped if the gradients are not finite, by AMP or by hand."""
    model = Given()
    adam = strategy.startswith("qadam")
    model.e.sparse = not adam
    optimizer = (torch.optim.Adam if adam else torch.optim.SGD)(model.parameters(), lr=LR)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=2, enabled=scaled)
    replica = un.parallel(model, optimizer, strategy, world=world)
    replica.watch(scaler)
    for step in [step for step in range(STEPS + 3) if step not in leave_out]:
        if step == STEPS:  # from here on all that is left is sent, in a step that overflows at first
            replica = replica.switch("allreduce(bucket_bytes=300)")
        optimizer.zero_grad()
        scaler.scale(model(wanted(world.rank, step))).backward()
        if scaled:
            scaler.step(optimizer)
            scaler.update()
        elif all(p.grad is None or p.grad.to_dense().isfinite().all() for p in model.parameters()):
            optimizer.step()
    replica.close()
    return {name.partition(".")[0]: p.detach() for name, p in model.named_parameters()}


@pytest.mark.parametrize(("scaled", "overlap"), [(False, False), (True, True)], ids=["by hand", "GradScaler, overlap"])
@pytest.mark.parametrize("reducer", REDUCERS)
def test_a_skipped_step_takes_nothing_of_what_is_still_to_be_sent(reducer: str, scaled: bool, overlap: bool) -> None:
    strategy = f"allreduce(reducer={reducer}, bucket_bytes=300, overlap={overlap})"
    found = run_threads(lambda world: train(world, strategy, scaled), SIZE, hosts=["x", "y"])
    made = [wanted(rank, step) for rank in range(SIZE) for step in range(STEPS) if step not in OVERFLOWS]
    for name, moved in found[0].items():
        put_in = torch.stack([given[name] for given in made]).sum(0) / SIZE
        assert torch.equal(moved, found[1][name])
        assert torch.allclose(-moved[[0, 2]] / LR if name == "e" else -moved / LR, put_in, rtol=1e-5, atol=1e-5), name


@pytest.mark.parametrize(
    "strategy",
    [
        "allreduce(reducer=topk(k=0.1, momentum=0.9), bucket_bytes=300)",
        "qadam(reducer=topk(k=0.1), warmup=1, bucket_bytes=300)",
        "shared(reducer=topk(k=0.1))",  # each rank of a host sends a part: the others' may overflow
    ],
)
def test_training_goes_on_after_a_skipped_step_as_if_it_had_not_been(strategy: str) -> None:
    ends = range(STEPS, STEPS + 3)
    found, plain = (
        run_threads(lambda world, out=out: train(world, strategy, False, out), 4, hosts=["x", "x", "y", "y"])[0]
        for out in (ends, [*ends, *OVERFLOWS])
    )
    assert all(torch.equal(found[name], plain[name]) for name in found)


class Failing(torch.autograd.Function):
    """Nothing forward; a backward pass that runs out of memory, say."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        raise MemoryError("on purpose")


def test_a_backward_pass_that_fails_half_way_takes_nothing_either() -> None:
    """When it fails, the first buckets have been exchanged."""

    def work(world: World, failing: bool) -> list[Tensor]:
        model = Given()
        optimizer = torch.optim.SGD(model.parameters(), lr=LR)
        replica = un.parallel(
            model, optimizer, "allreduce(reducer=topk(k=0.1), bucket_bytes=300, overlap=True)", world=world
        )
        for step in (0, 1, 4, 5):
            optimizer.zero_grad()
            if failing and step == 4:
                given = wanted(world.rank, 7)
                last = (Failing.apply(model.a) * given["a"]).sum()  # what was first is last in backward
                with pytest.raises(MemoryError):
                    (last + sum((p * given[n]).sum() for n, p in model.named_parameters() if n in "bcd")).backward()
                optimizer.zero_grad()
            model(wanted(world.rank, step)).backward()
            optimizer.step()
        replica.close()
        return [p.detach() for p in model.parameters()]

    found, plain = (
        run_threads(lambda world, failing=failing: work(world, failing), SIZE)[0] for failing in (True, False)
    )
    assert all(map(torch.equal, found, plain))
