"""Programs that write parameters by themselves: loaded weights, clamps after each step, a teacher that follows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from stranger_programs import furthest, mlp, seeded, values
from torch import Tensor, nn
from torch.nn.utils import vector_to_parameters

import unisono as un
from unisono.world import World
from unisono.world.virtual import run_threads

OWN = [  # each rank has a model of its own between two exchanges
    "local_sgd(every=2, start=0)",
    "local_sgd(every=2, start=0, reducer=topk(k=0.3))",
    "diloco(every=2)",
    "diloco(every=2, fragments=2, delay=1)",
    "crossbow",
    "crossbow(learners=2, every=2)",
    "gossip",
    "gossip(bits=8)",
    "async_average(every_s=0.0)",
]
SERVED = [
    "parameter_server",
    "parameter_server(servers=2)",
    "parameter_server(staleness=1)",
    "parameter_server(reducer=bytegrad, feedback=True)",
]
SAME = ["allreduce", "topk(k=0.5)", "powersgd(min_saving=1.0)", "qadam(warmup=2)", "hogwild", "auto"]


def batch(t: int, rank: int, size: int = 2) -> Tensor:
    """Rank `rank`'s part of the samples of step t."""
    return seeded(lambda: torch.randn(6, 4).double(), 100 + t)[rank::size]


def load(model: nn.Module, value: float) -> None:
    model.load_state_dict({name: torch.full_like(x, value) for name, x in model.state_dict().items()})


@torch.no_grad()
def copy(model: nn.Module, value: float) -> None:
    for p in model.parameters():
        p.copy_(torch.full_like(p, value))


def copy_data(model: nn.Module, value: float) -> None:
    for p in model.parameters():
        p.data.fill_(value)


def replace(model: nn.Module, value: float) -> None:
    params = list(model.parameters())
    vector_to_parameters(torch.full((sum(p.numel() for p in params),), value).double(), params)


def steps(model: nn.Module, optimizer: Any, world: World, ts: range, after: Callable[[], Any] = lambda: None) -> None:
    for t in ts:
        optimizer.zero_grad()
        x = batch(t, world.rank, world.size)
        (model(x) - x.sum(1, keepdim=True)).square().mean().backward()
        optimizer.step()
        after()


@pytest.mark.parametrize("put", [load, copy, copy_data, replace])
@pytest.mark.parametrize("spec", [*SAME, *OWN, *SERVED])
def test_the_model_stays_where_the_program_put_it(spec: str, put: Callable[[nn.Module, float], None]) -> None:
    """Before the first step, and in mid-run; with a learning rate that moves nothing, as one process has it."""

    def work(world: World) -> list[list[Tensor]]:
        model = mlp()
        kind = torch.optim.Adam if spec.startswith("qadam") else torch.optim.SGD
        optimizer = kind(model.parameters(), lr=1e-9)
        replica = un.parallel(model, optimizer, spec, world=world)
        put(model, 5.0)
        steps(model, optimizer, world, range(3))
        found = [values(replica.consolidate())]
        put(model, 3.0)
        found.append(values(replica.consolidate()))  # without a step after it
        steps(model, optimizer, world, range(3, 8))
        found.append(values(replica.consolidate()))
        replica.close()
        return found

    within = 0.05 if spec == "gossip(bits=8)" and put is not load else 1e-5  # differences go through a byte
    if put is not load and ("async" in spec or "delay" in spec):
        pytest.skip("like a rank's own step, mixed with what is on its way: only what is loaded replaces the model")
    for found in run_threads(work, 2):
        for got, value in zip(found, (5.0, 3.0, 3.0), strict=True):
            assert max(float((x - value).abs().max()) for x in got) < within


@pytest.mark.parametrize("way", ["p.clamp_()", "p.data.clamp_()"])
@pytest.mark.parametrize("spec", ["allreduce", "parameter_server", "parameter_server(servers=2)"])
def test_a_clamp_after_each_step_is_that_of_one_process(spec: str, way: str) -> None:
    def work(world: World) -> list[Tensor]:
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        replica = un.parallel(model, optimizer, spec, world=world) if world.size > 1 else None

        @torch.no_grad()
        def clamp() -> None:
            for p in model.parameters():
                (p if way == "p.clamp_()" else p.data).clamp_(-0.2, 0.2)

        steps(model, optimizer, world, range(6), clamp)
        found = values(model if replica is None else replica.consolidate())
        if replica is not None:
            replica.close()
        return found

    [expected] = run_threads(work, 1)
    for found in run_threads(work, 2):
        assert furthest(found, expected) < 1e-12
    assert max(float(x.abs().max()) for x in expected) == 0.2


@pytest.mark.parametrize("spec", OWN)
def test_a_clamp_under_models_of_their_own_is_part_of_training(spec: str) -> None:
    """Models meet, and training goes on; the mean of clamped models is in reach (a central model has momentum, and a
    mean that comes late is of models before their clamp)."""

    def work(world: World) -> tuple[list[Tensor], list[Tensor]]:
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        replica = un.parallel(model, optimizer, spec, world=world)
        before = values(model)

        @torch.no_grad()
        def clamp() -> None:
            for p in model.parameters():
                p.clamp_(-0.4, 0.4)

        steps(model, optimizer, world, range(12), clamp)
        found = values(replica.consolidate())
        replica.close()
        return found, before

    (first, before), (second, _) = run_threads(work, 2)
    assert furthest(first, second) == 0.0
    assert furthest(first, before) > 0.05
    if "crossbow" not in spec and "async" not in spec:
        assert max(float(x.abs().max()) for x in first) < 0.4 + 1e-9


@pytest.mark.parametrize("spec", ["parameter_server", "parameter_server(servers=2)", "parameter_server(staleness=1)"])
def test_other_values_on_each_rank_are_refused_by_name_at_the_next_step(spec: str) -> None:
    def work(world: World) -> str:
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        un.parallel(model, optimizer, spec, world=world)
        steps(model, optimizer, world, range(2))
        copy(model, 1.0 + world.rank)
        with pytest.raises(RuntimeError) as error:
            steps(model, optimizer, world, range(2, 6))
        world.barrier()  # a rank that ends takes its server with it
        return str(error.value)

    for text in run_threads(work, 2):
        assert "wrote to parameter '0.weight'" in text
        assert "every rank writes the same" in text


def test_a_write_that_is_taken_back_is_none() -> None:
    """SAM climbs by each rank's own gradient, and comes back to within rounding."""

    def work(world: World) -> list[Tensor]:
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        replica = un.parallel(model, optimizer, "parameter_server", world=world)
        for t in range(4):
            x = batch(t, world.rank)
            optimizer.zero_grad()
            with replica.no_sync():
                model(x).square().mean().backward()
            climbs = [0.05 * p.grad / p.grad.norm() for p in model.parameters() if p.grad is not None]
            with torch.no_grad():
                torch._foreach_add_(list(model.parameters()), climbs)
            optimizer.zero_grad()
            model(x).square().mean().backward()
            with torch.no_grad():
                torch._foreach_sub_(list(model.parameters()), climbs)
            optimizer.step()
        found = values(replica.consolidate())
        replica.close()
        return found

    first, second = run_threads(work, 2)
    assert furthest(first, second) == 0.0


class Taught(nn.Module):
    """A student, and a frozen teacher that the program moves."""

    def __init__(self) -> None:
        super().__init__()
        self.student, self.teacher, self.frozen = mlp(), mlp(), mlp()
        self.teacher.requires_grad_(False)
        self.frozen.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.student(x) - 0.1 * self.teacher(x)

    def follow(self) -> None:
        for t, s in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
            t.data.mul_(0.5).add_(s.data, alpha=0.5)


@pytest.mark.parametrize("held", ["student", "all"])
@pytest.mark.parametrize("spec", [*SAME, *OWN, *SERVED])
def test_a_teacher_is_the_same_on_all_ranks_and_the_mean_of_theirs(spec: str, held: str) -> None:
    def work(world: World) -> tuple[list[Tensor], list[Tensor]]:
        model = Taught()
        kind = torch.optim.Adam if spec.startswith("qadam") else torch.optim.SGD
        optimizer = kind(model.student.parameters() if held == "student" else model.parameters(), lr=0.05)
        replica = un.parallel(model, optimizer, spec, world=world)
        before = values(model.frozen)
        steps(model, optimizer, world, range(5), model.follow)
        mine = values(model.teacher)
        made: Any = replica.consolidate()
        assert furthest(values(made.frozen), before) == 0.0
        found = values(made.teacher)
        replica.close()
        return found, mine

    (first, mine), (second, others) = run_threads(work, 2)
    assert furthest(first, second) == 0.0
    if "learners" not in spec and spec != "hogwild":  # a teacher for each learner; one that all write
        assert furthest(first, [(x + y) / 2 for x, y in zip(mine, others, strict=True)]) < 1e-12
    assert furthest(first, values(Taught().teacher)) > 1e-3


def test_what_a_server_cannot_do_is_raised_by_every_worker() -> None:
    """Not only by the last that came: the others would wait for ever."""

    def work(world: World) -> str:
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        un.parallel(model, optimizer, "parameter_server", world=world)
        steps(model, optimizer, world, range(2))
        optimizer.param_groups[0]["lr"] = "high"
        with pytest.raises(RuntimeError) as error:
            steps(model, optimizer, world, range(2, 3))
        world.barrier()
        return str(error.value)

    assert len(run_threads(work, 3, timeout_s=20)) == 3


def test_a_served_checkpoint_at_a_change_of_the_learning_rate_goes_on_bit_by_bit(tmp_path: Any) -> None:
    def work(world: World) -> tuple[list[Tensor], list[Tensor]]:
        ends = []
        for resumes in (False, True):
            model = mlp()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            spec = "parameter_server(reducer=bytegrad, feedback=True)"
            replica = un.parallel(model, optimizer, spec, world=world)
            if resumes:
                un.load(tmp_path, replica)
            else:
                steps(model, optimizer, world, range(3))
                un.save(tmp_path, replica)
            optimizer.param_groups[0]["lr"] = 0.02
            steps(model, optimizer, world, range(3, 6))
            ends.append(values(replica.consolidate()))
            replica.close()
        return ends[0], ends[1]

    for whole, resumed in run_threads(work, 2):
        assert furthest(whole, resumed) == 0.0
