"""Meshes without other processes: sizes, plans, stages, pieces, and several backward passes as one."""

from __future__ import annotations

import copy
import random
import re
import sys
from collections.abc import Sequence
from itertools import combinations, pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import unisono as un
from unisono.methods.hybrid.axes import choose_sizes, list_fitting
from unisono.methods.hybrid.saving import cut_stored, spread_piece
from unisono.methods.hybrid.stages import cut_evenly
from unisono.predict.costs import Link, Network, Operation
from unisono.predict.planner.measured import Measured
from unisono.predict.planner.meshes import advise_mesh, estimate_meshes, estimate_tensor, measure_stages, measure_tensor
from unisono.training.checkpoint.slices import Piece, Stored
from unisono.world.ledger import Ledger

# Sizes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("asked", "sizes"),
    [
        ({"data": 2, "tensor": 2, "pipeline": 2}, (2, 2, 2)),
        ({"tensor": 2}, (4, 2, 1)),
        ({"data": 2, "tensor": -1}, (2, 4, 1)),
        ({"pipeline": -1}, (1, 1, 8)),
        ({}, (8, 1, 1)),
    ],
)
def test_an_axis_may_have_what_remains(asked: dict[str, int], sizes: tuple[int, int, int]) -> None:
    assert choose_sizes(8, **{"data": None, "tensor": None, "pipeline": None, **asked}) == sizes


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"tensor": 3}, "tensor=3 does not divide 8 ranks. What would fit: data=2, tensor=4, pipeline=1; "),
        (
            {"data": 3, "tensor": 2},
            "data=3 × tensor=2 makes 6 rank(s), not 8. What would fit: data=4, tensor=2, pipeline=1; ",
        ),
        ({"data": 2, "tensor": 2}, "data=2 × tensor=2 makes 4 rank(s), not 8"),
        ({"data": -1, "tensor": -1}, "only one axis"),
        ({"tensor": 0}, "tensor=0: expected a number of ranks from 1 on"),
        ({"tensor": 1.5}, "tensor=1.5"),
    ],
)
def test_a_bad_mesh_is_refused_with_what_would_fit(asked: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        choose_sizes(8, **{"data": None, "tensor": None, "pipeline": None, **asked})


def test_all_fitting_meshes_are_found() -> None:
    assert all(d * t * p == 12 for d, t, p in list_fitting(12))
    assert len(list_fitting(12)) == len(set(list_fitting(12))) == 18


def test_one_process_is_a_mesh_of_ones() -> None:
    mesh = un.mesh(data=2, tensor=2, pipeline=2, world=un.World())
    assert mesh.sizes == (1, 1, 1)
    model = nn.Linear(3, 3)
    assert mesh.parallelize(model) is model
    assert mesh.tensor is None
    assert mesh.pipeline is None


# A data axis of threads: microbatches and accumulation ---------------------------------------------------------


@pytest.mark.parametrize(
    "spec", ["allreduce", "zero(stage=1)", "zero(stage=2)", "zero(stage=3)", "local_sgd(start=99)"]
)
def test_microbatches_are_one_pass_of_the_window(spec: str) -> None:
    clips = not spec.startswith("local")  # there gradients are each rank's own; the mean of models is that of steps
    data = torch.randn(4, 8, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))

    first = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)).double()

    def make() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = copy.deepcopy(first)
        return model, torch.optim.SGD(model.parameters(), lr=0.5)

    def train(world: un.World) -> tuple[list[Tensor], int]:
        model, optimizer = make()
        mesh = un.mesh(data=2, world=world)
        pipe = mesh.pipe(model, data[0, :2], nn.functional.mse_loss, microbatches=2)
        replica = un.parallel(pipe.module, optimizer, spec, accumulate=2, world=mesh.data)
        for i in range(0, 4, 2):
            for x in (data[i], data[i + 1]):
                mine = x.chunk(2)[world.rank]
                pipe.step(mine, mine.flip(1))
            assert replica.step == 1 + i // 2, "the second pass ends the window"
            if clips:
                mesh.clip_grad_norm_(pipe.module.parameters(), 0.3)
            optimizer.step()
            optimizer.zero_grad()
        replica.restore()
        return [p.detach().clone() for p in model.parameters()], replica.step

    model, optimizer = make()
    for i in range(0, 4, 2):
        for x in (data[i], data[i + 1]):
            nn.functional.mse_loss(model(x), x.flip(1)).backward()
        if clips:
            nn.utils.clip_grad_norm_(model.parameters(), 0.3)
        optimizer.step()
        optimizer.zero_grad()
    for ours, steps in un.run_threads(train, 2):
        assert steps == 2
        for a, b in zip(ours, model.parameters(), strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


def test_passes_inside_no_sync_are_no_window() -> None:
    model = nn.Linear(2, 1)
    replica = un.parallel(model, torch.optim.SGD(model.parameters(), lr=0.1), world=un.World())
    with replica.no_sync(), replica.one_pass():
        model(torch.ones(1, 2)).sum().backward()
    assert replica.step == 0
    with replica.one_pass():
        model(torch.ones(1, 2)).sum().backward()
        model(torch.ones(1, 2)).sum().backward()
    assert replica.step == 1


def test_a_batch_has_to_divide_into_microbatches() -> None:
    mesh = un.mesh(world=un.World())
    pipe = mesh.pipe(nn.Linear(2, 2), torch.ones(1, 2), nn.functional.mse_loss, microbatches=3)
    with pytest.raises(ValueError, match="4 samples in 3 microbatches"):
        pipe.step(torch.ones(4, 2), torch.ones(4, 2))
    with pytest.raises(ValueError, match="expected GPipe, 1F1B"):
        mesh.pipe(nn.Linear(2, 2), torch.ones(1, 2), nn.functional.mse_loss, schedule="2F2B")


# Plans ----------------------------------------------------------------------------------------------------------


class _Attention(nn.Module):
    def __init__(self, heads_first: bool) -> None:
        super().__init__()
        self.heads_first = heads_first
        self.q, self.k, self.v, self.out = (nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        shape = (-1, 2) if self.heads_first else (4, -1)
        q, k, v = (f(x).unflatten(-1, shape).transpose(1, 2) for f in (self.q, self.k, self.v))
        mixed: Tensor = self.out(((q @ k.transpose(-1, -2)).softmax(-1) @ v).transpose(1, 2).flatten(-2))
        return mixed


def test_a_plan_splits_pairs_by_columns_and_rows() -> None:
    model = nn.ModuleDict(
        {"attention": _Attention(True), "mlp": nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8))}
    )
    model["layer"] = nn.TransformerEncoderLayer(8, 2, 16)
    model["embed"], model["head"], model["odd"] = nn.Embedding(10, 8), nn.Linear(8, 10), nn.Linear(8, 3)
    plan = un.tensor_plan(model)
    kinds = {name: type(style).__name__.removesuffix("wiseParallel") for name, style in plan.items()}
    assert kinds == {
        **dict.fromkeys(["attention.q", "attention.k", "attention.v", "mlp.0", "layer.linear1", "head"], "Col"),
        **dict.fromkeys(["attention.out", "mlp.2", "layer.linear2", "embed"], "Row"),
    }
    assert set(plan.reasons) > set(plan)
    assert "one parameter" in plan.reasons["layer.self_attn"]
    assert "odd" in str(plan)


def test_what_does_not_add_up_stays_whole() -> None:
    """Heads that are counted, not found out: each part would mix two heads, and no error would say so."""
    between = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8))
    tied = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    tied[2].weight = tied[0].weight
    uneven = nn.Sequential(nn.Linear(8, 7), nn.ReLU(), nn.Linear(7, 8))
    plan = un.tensor_plan(nn.ModuleDict({"a": _Attention(False), "between": between, "tied": tied, "uneven": uneven}))
    assert dict(plan) == {}
    assert "does not add up" in plan.reasons["a.out"]
    assert "shared" in plan.reasons["tied.2"]
    assert "7 inputs do not divide by 2" in plan.reasons["uneven.2"]


# Stages ---------------------------------------------------------------------------------------------------------


class _Text(nn.Module):
    def __init__(self, layers: int = 3) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(7, 4), nn.Parameter(torch.randn(5, 4))
        layer = nn.TransformerEncoderLayer(4, 2, 8, 0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, layers, nn.LayerNorm(4), enable_nested_tensor=False)
        self.head = nn.Linear(4, 7)

    def forward(self, x: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        out: Tensor = self.head(self.encoder(self.embed(x) + self.place[: x.size(1)], mask, is_causal=True))
        return out


@pytest.mark.parametrize("count", [1, 2, 4])
def test_stages_one_after_the_other_are_the_model(count: int) -> None:
    model, x = _Text(), torch.randint(7, (2, 5))
    stages = un.split_stages(model, x, count)
    value: Any = (x,)
    for stage in stages:
        given = stage(*value)
        value = given if isinstance(given, tuple) else (given,)
    torch.testing.assert_close(value[0], model(x))
    names = [name for stage in stages for name, _ in stage.named_parameters()]
    assert sorted(names) == sorted(name for name, _ in model.named_parameters())
    every = {name: p for stage in stages for name, p in stage.named_parameters()}
    assert all(every[name] is p for name, p in model.named_parameters())
    assert not any("constant" in name for stage in stages for name in stage.state_dict())


def test_values_that_later_layers_need_go_along() -> None:
    class Skip(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            first = self.a(x)
            out: Tensor = self.c(self.b(first)) + first
            return out

    model, x = Skip(), torch.randn(2, 3)
    first, middle, last = un.split_stages(model, x, 3, costs=[1, 1, 1, 0])
    torch.testing.assert_close(last(*middle(first(x))), model(x))


def test_ranks_whose_times_do_not_count_leave_the_machine_to_the_one_that_measures() -> None:
    def count(world: un.World) -> int:
        calls = []

        class Counted(nn.Linear):
            def forward(self, x: Tensor) -> Tensor:
                calls.append(1)
                return super().forward(x)

        model = nn.Sequential(Counted(2, 2), nn.Tanh(), nn.Linear(2, 2))
        un.split_stages(model, torch.ones(1, 2), 2, world=world)
        return len(calls)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)  # threads in which torch.fx follows a model do not get into each other's way
    try:
        first, second = un.run_threads(count, 2)
    finally:
        sys.setswitchinterval(interval)
    assert first >= 5
    assert second == 2


def test_cuts_make_the_slowest_stage_fastest() -> None:
    costs = [3.0, 1.0, 1.0, 5.0, 1.0, 1.0]
    best = min(max(sum(costs[:i]), sum(costs[i:j]), sum(costs[j:])) for i in range(1, 6) for j in range(i + 1, 6))
    i, j = cut_evenly(costs, 3)
    assert max(sum(costs[:i]), sum(costs[i:j]), sum(costs[j:])) == best
    assert cut_evenly([1, 1, 1, 1], 2, allowed=[3]) == [3]


@pytest.mark.parametrize("seed", range(5))
def test_cuts_leave_few_parts_that_do_not_learn_and_then_make_the_slowest_fastest(seed: int) -> None:
    numbers = random.Random(seed)
    costs, learning = [numbers.random() for _ in range(8)], [numbers.random() < 0.4 for _ in range(8)]

    def rate(cuts: Sequence[int]) -> tuple[int, float]:
        bounds = list(pairwise([0, *cuts, len(costs)]))
        return sum(not any(learning[a:b]) for a, b in bounds), max(sum(costs[a:b]) for a, b in bounds)

    best = min(map(rate, combinations(range(1, 8), 3)))
    assert rate(cut_evenly(costs, 4, learning=learning)) == pytest.approx(best)


def test_a_stage_has_parameters_where_it_can_have_some() -> None:
    class Weighted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.last = nn.Parameter(torch.ones(2, 2)), nn.Linear(2, 2)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.last(torch.tanh(torch.tanh(x @ self.weight)))
            return out

    slow = nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Tanh(), nn.Linear(2, 2), nn.Linear(2, 2))
    stages = un.split_stages(slow, torch.ones(1, 2), 3, costs=[1, 9, 9, 1, 1])
    assert [len(list(stage.parameters())) for stage in stages] == [2, 2, 2]
    stages = un.split_stages(Weighted(), torch.ones(1, 2), 2, costs=[1, 1, 9, 1])
    assert [len(list(stage.parameters())) for stage in stages] == [1, 2]


def test_a_model_that_cannot_be_cut_says_why() -> None:
    class Branch(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x if x.sum() > 0 else -x

    with pytest.raises(ValueError, match="cannot be followed"):
        un.split_stages(Branch(), torch.ones(2), 2)
    with pytest.raises(ValueError, match="3 stages of a model whose forward has 2 steps"):
        un.split_stages(nn.Sequential(nn.Linear(2, 2), nn.ReLU()), torch.ones(1, 2), 3)
    tied = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))
    tied[2].weight = tied[0].weight
    with pytest.raises(ValueError, match="in stages 0 and 1"):
        un.split_stages(tied, torch.ones(1, 2), 2, costs=[1, 0, 1])


# Pieces ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_parts_of_every_rank_make_up_the_whole(dim: int) -> None:
    whole = torch.arange(4 * 6 * 2.0).reshape(4, 6, 2)
    stored, spans = Stored.of(whole), []
    for rank, part in enumerate(whole.chunk(2, dim)):
        offset = [0, 0, 0]
        offset[dim] = rank * part.shape[dim]
        split: Any = SimpleNamespace(shape=whole.shape, block=(tuple(part.shape), tuple(offset)))
        assert torch.equal(cut_stored(stored, split).full(), part)
        line = part.reshape(-1)
        halves = [(0, 7, lambda a, b, x=line: x[a:b]), (7, line.numel(), lambda a, b, x=line: x[a:b])]
        spans += spread_piece(Piece(part.shape, part.dtype, halves), split).spans
    assert torch.equal(Stored(whole.shape, whole.dtype, spans).full(), whole)


# Bubbles --------------------------------------------------------------------------------------------------------


def test_bubbles_are_summed_by_step() -> None:
    now = [0.0]
    ledger = Ledger(clock=lambda: now[0])
    ledger.close_span("bubble", 1.0, 3.0)
    ledger.close_span("blocked", 2.5, 4.0)
    now[0] = 10.0
    ledger.step()
    [row] = ledger.rows
    assert (row.bubble, row.compute) == (2.0, 8.5)
    assert ledger.totals().bubble == 2.0


# Memory, and when a mesh is worth trying -------------------------------------------------------------------------


def test_memory_of_a_mesh_is_that_of_a_ranks_part() -> None:
    with torch.device("meta"):
        layers = [nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64)) for _ in range(4)]
        model = nn.Sequential(*layers)
    there = {"device_memory": "1GiB", "host_memory": "1GiB", "disk": "1GiB"}
    whole = un.memory(model, workers=8, **there).need("allreduce")
    part = un.memory(model, workers=8, tensor=2, pipeline=2, **there)
    weights = sum(p.numel() for p in model.parameters()) * 4
    biases = 4 * 64 * 4  # of the second layers: added once
    assert whole.parameters == weights
    assert part.need("allreduce").parameters == pytest.approx(((weights - biases) / 2 + biases) / 2, rel=1e-6)
    assert part.replicas == 2
    assert un.memory(model, workers=8, pipeline=8, **there).replicas == 1
    assert "data=2, tensor=2, pipeline=2" in str(part)
    with pytest.raises(ValueError, match="tensor=3 does not divide 8"):
        un.memory(model, workers=8, tensor=3, **there)


def test_a_mesh_is_proposed_where_exchange_takes_most_of_a_step_and_not_elsewhere() -> None:
    slow = Network(8, 1, Link(1e-4, 1e8))
    measured = Measured(8, ["a"] * 8, "allreduce", 10**7, 4 * 10**7, compute_s=0.1, network=slow)
    step = 0.1 + slow.seconds(Operation("all_reduce", 4 * 10**7))
    said = advise_mesh(measured, step, step - 0.1)
    fastest = min(estimate_meshes(8, 0.1, 4 * 10**7, slow), key=lambda mesh: mesh.seconds)
    assert f"un.mesh(pipeline={fastest.pipeline})" in said[0]
    assert "Not known" in said[-1]
    assert fastest.bubble == pytest.approx((fastest.pipeline - 1) / (8 + fastest.pipeline - 1))
    (none,) = advise_mesh(measured, 0.11, 0.01)
    assert none.startswith("No mesh is proposed: 9% of a step is exchange, and the best mesh, un.mesh(pipeline=")
    measured.settings = ["zero(stage=3)"]
    assert "un.mesh(pipeline=2) holds 50%" in advise_mesh(measured, 0.11, 0.01)[0]


def test_a_proposal_is_made_of_measured_stages_and_layers() -> None:
    """Stages of 30 and 70 %, so that the larger one sets the pace; and what they send takes time."""
    link = Link(1e-3, 8e6)  # a megabyte a second
    network = Network(2, 1, link)
    uneven = {"2": {"shares": [0.3, 0.7], "bytes": [4000]}}
    (found,) = estimate_meshes(2, 1.0, 0, network, uneven)
    hop = 1e-3 + 2 * 4000 / 8 / 1e6
    slow, fast = 1.4 / 8, 0.6 / 8  # of a microbatch, on each stage
    assert found.seconds == pytest.approx(8 * slow + fast + 2 * hop)
    assert found.bubble == pytest.approx(1 - 1 / found.seconds)
    (even,) = estimate_meshes(2, 1.0, 0, network)
    assert even.seconds == pytest.approx(9 / 8)

    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 8))
    x = torch.randn(16, 8)
    tensor = measure_tensor(model, (x,), 2)
    assert tensor["bytes"] == [16 * 8 * 4]
    (split,) = estimate_tensor(2, 1.0, 0, network, {"split": 1.0, "bytes": [1000]})
    assert split.seconds == pytest.approx(1.0 + 2 * network.seconds(Operation("all_reduce", 2000)))
    stages = measure_stages(model, (x,), 2)
    assert sum(stages["2"]["shares"]) == pytest.approx(1.0)
    assert stages["2"]["bytes"] in ([16 * 32 * 4], [16 * 8 * 4])

    class Branch(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x if x.sum() > 0 else -x

    why = measure_stages(Branch(), (x,), 2)
    assert "cannot be followed" in why["why"]
    measured = Measured(2, ["a"] * 2, "allreduce", 1, 4, compute_s=0.1, network=network, stages=why)
    measured.tensor = {"why": "un.tensor_plan splits no pair of its layers"}
    (said,) = advise_mesh(measured, 0.2, 0.1)
    assert "cannot be followed" in said
    assert "splits no pair" in said
