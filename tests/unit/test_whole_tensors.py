"""Optimizers of whole tensors (Muon, SOAP, LAMB, Adafactor) where parameters are shared out among ranks, against plain
PyTorch in one process, in fp64."""

from __future__ import annotations

import copy
import itertools
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from whole_tensor_optimizers import MAKERS, Codes, Lamb, MyMuon, Signs, Soap, Together, muon

import unisono as un
from pairs import cover_pairs
from unisono.methods.joined_optimizers import members_of
from unisono.methods.offload.kinds import choose_owners, count_work, find_kind
from unisono.world import World
from unisono.world.virtual import run_threads

MODELS = threading.Lock()  # torch.manual_seed is the process's
SPECS = [
    "allreduce",
    "shared",
    "zero(stage=1)",
    "zero(stage=2, unit_bytes=300)",
    "zero(stage=3)",
    "zero(stage=2, spare=True)",
    "zero(stage=2, optimizer_on=cpu)",
    "zero(stage=3, optimizer_on=cpu, params_on=cpu)",
    "zero(stage=3, within=1)",
]  # fmt: skip
LOCAL = ["local_sgd(every=1)", "diloco(every=1, outer_lr=1.0, outer_momentum=0.0)"]


def make_model() -> nn.Module:
    with MODELS:
        torch.manual_seed(0)
        return nn.Sequential(
            nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 7), nn.LayerNorm(7), nn.Linear(7, 9), nn.Linear(9, 3)
        ).double()


def batch(step: int, rank: int) -> Tensor:
    return torch.randn(4, 5, generator=torch.Generator().manual_seed(100 * step + rank), dtype=torch.float64)


def values(model: nn.Module) -> list[Tensor]:
    return [x.detach().clone() for x in model.state_dict().values()]


def as_list(optimizers: Any) -> list[torch.optim.Optimizer]:
    return optimizers if isinstance(optimizers, list) else [optimizers]


def train(model: nn.Module, optimizers: Any, ranks: list[int], steps: range) -> None:
    for t in steps:
        model.zero_grad()
        torch.stack([model(batch(t, rank)).square().mean() for rank in ranks]).mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in as_list(optimizers):
            optimizer.step()


@pytest.mark.parametrize(("spec", "maker", "size"), cover_pairs(SPECS, list(MAKERS), [1, 2, 3, 4]))
def test_numbers_are_those_of_one_process(spec: str, maker: str, size: int) -> None:
    def worker(world: World) -> list[Tensor]:
        model = make_model()
        optimizers = MAKERS[maker](model)
        un.parallel(model, optimizers, spec, world=world)
        train(model, optimizers, [world.rank], range(4))
        return values(model)

    alone = make_model()
    train(alone, MAKERS[maker](alone), list(range(size)), range(4))
    for found in run_threads(worker, size):
        torch.testing.assert_close(found, values(alone), rtol=1e-8, atol=1e-10)


@pytest.mark.filterwarnings("ignore:the ranks train on the same samples")
@pytest.mark.parametrize("maker", ["muon", "soap", "lamb", "adafactor"])
@pytest.mark.parametrize("spec", LOCAL)
def test_methods_that_exchange_models_run_the_optimizer_itself(spec: str, maker: str) -> None:
    def worker(world: World) -> list[Tensor]:
        model = make_model()
        optimizers = MAKERS[maker](model)
        replica = un.parallel(model, optimizers, spec, world=world)
        train(model, optimizers, [0], range(3))  # all alike: the mean of the models is that of one
        return values(replica.consolidate())

    alone = make_model()
    train(alone, MAKERS[maker](alone), [0], range(3))
    for found in run_threads(worker, 2):
        torch.testing.assert_close(found, values(alone), rtol=1e-8, atol=1e-10)


HYBRID = ["zero(stage=1, within=2)", "zero(stage=2, within=2)", "zero(stage=3, within=2)"]


@pytest.mark.parametrize(
    ("before", "size", "maker"),
    [
        *itertools.product(["allreduce", "shared", "zero(stage=3)"], [3], ["muon", "soap", "adafactor"]),
        ("zero(stage=2, optimizer_on=cpu)", 2, "muon"),
        ("zero(stage=3, within=2)", 4, "muon"),
        ("zero(stage=2)", 2, "codes"),
        ("shared", 3, "codes"),
    ],
)
def test_a_checkpoint_moves_between_all_layouts_bit_by_bit(before: str, size: int, maker: str, tmp_path: Path) -> None:
    def save(world: World) -> None:
        model = make_model()
        optimizers = MAKERS[maker](model)
        replica = un.parallel(model, optimizers, before, world=world)
        train(model, optimizers, [world.rank], range(2))
        un.save(tmp_path, replica)

    def load(world: World, spec: str) -> tuple[list[Tensor], list[Any]]:
        model = make_model()
        optimizers = MAKERS[maker](model)
        replica = un.parallel(model, optimizers, spec, world=world)
        un.load(tmp_path, replica)
        states = [copy.deepcopy(one.state_dict()["state"]) for one in as_list(optimizers)]
        train(model, optimizers, [0], range(1))
        return values(model), states

    run_threads(save, size)
    plain = un.read_checkpoint(tmp_path)
    saved = plain["optimizers"] if "optimizers" in plain else [plain["optimizer"]]
    model = make_model()
    model.load_state_dict(plain["model"])
    optimizers = MAKERS[maker](model)
    for optimizer, state in zip(as_list(optimizers), saved, strict=True):
        optimizer.load_state_dict(copy.deepcopy(state))
    train(model, optimizers, [0], range(1))
    for spec in SPECS:
        for found, states in run_threads(lambda world, spec=spec: load(world, spec), 2):
            for state, own in zip(states, saved, strict=True):
                assert_same(state, own["state"])
            torch.testing.assert_close(found, values(model), rtol=1e-9, atol=1e-12)


def assert_same(found: Any, wanted: Any) -> None:
    """Bit by bit."""
    if isinstance(wanted, Tensor):
        assert torch.equal(found, wanted.to(found.dtype))
    elif isinstance(wanted, dict):
        assert found.keys() == wanted.keys()
        for key, value in wanted.items():
            assert_same(found[key], value)
    elif isinstance(wanted, list):
        for one, other in zip(found, wanted, strict=True):
            assert_same(one, other)
    else:
        assert found == wanted


@pytest.mark.parametrize("stage", [2, 3])
def test_a_lost_owner_is_replaced_by_the_spare_or_named(stage: int) -> None:
    """Rank 2 goes; what it owned is on rank 0 too, or nowhere."""

    def worker(world: World, spec: str) -> list[Tensor] | str | None:
        model = make_model()
        optimizers = muon(model)
        replica = un.parallel(model, optimizers, spec, world=world)
        train(model, optimizers, [world.rank], range(2))
        smaller = world.split([[0, 1], [2]])
        if world.rank == 2:
            return None
        try:
            replica.rebind(smaller)
        except ValueError as error:
            return str(error)
        train(model, optimizers, [world.rank], range(2, 4))
        return values(model)

    alone = make_model()
    optimizers = muon(alone)
    train(alone, optimizers, [0, 1, 2], range(2))
    train(alone, optimizers, [0, 1], range(2, 4))
    for found in run_threads(lambda world: worker(world, f"zero(stage={stage}, spare=True)"), 3)[:2]:
        torch.testing.assert_close(found, values(alone), rtol=1e-8, atol=1e-10)
    for said in run_threads(lambda world: worker(world, f"zero(stage={stage})"), 3)[:2]:
        assert isinstance(said, str)
        assert "un.load the last checkpoint" in said


@pytest.mark.parametrize("stage", [2, 3])
def test_off_the_device_muon_is_bit_by_bit_that_of_the_host(stage: int) -> None:
    """Plain Muon, given the gradients of the run."""

    def worker(world: World) -> None:
        model = make_model().float()
        hidden, rest = muon(model)
        un.parallel(model, [hidden, rest], f"zero(stage={stage}, optimizer_on=cpu)", world=world)
        matrices = hidden.param_groups[0]["params"]
        twins = [nn.Parameter(p.detach().clone()) for p in matrices]
        plain = torch.optim.Muon(twins, lr=0.05)
        for t in range(4):
            model.zero_grad()
            model(batch(t, world.rank).float()).square().mean().backward()
            for twin, p in zip(twins, matrices, strict=True):
                twin.grad = p.grad.full()
            for optimizer in (hidden, rest, plain):
                optimizer.step()
        for twin, p in zip(twins, matrices, strict=True):
            assert torch.equal(p.detach(), twin)

    run_threads(worker, 2)


def test_only_the_owner_ever_has_the_update_and_its_state() -> None:
    def worker(world: World) -> tuple[list[int], int]:
        model = make_model()
        optimizers: Any = muon(model)
        replica: Any = un.parallel(model, optimizers, "zero(stage=3)", world=world)
        train(model, optimizers, [world.rank], range(1))
        whole = [unit for unit in replica.units if unit.owners is not None]
        assert all(unit.shard_length == unit.lengths[world.rank] for unit in whole)
        owned = [unit.params[part.slot].numel() for unit in whole for part in unit.parts]
        kept = [x.numel() for state in optimizers[0].state.own.values() for x in state.values()]
        assert sorted(owned) == sorted(kept)
        return sorted(owned), sum(unit.numel for unit in whole)

    every = run_threads(worker, 2)
    assert sum(sum(owned) for owned, _ in every) == 5 * 7 + 7 * 7 + 7 * 9 + 9 * 3


def test_memory_that_ranks_share_is_asked_for_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that are processes map it together, and refuse anything else; whole tensors are not of one size."""
    empty = World.empty

    def ask(world: World, n: int, dtype: torch.dtype = torch.float32) -> Tensor:
        assert world.gather_objects(n) == [n] * world.size
        return empty(world, n, dtype)

    monkeypatch.setattr(World, "empty", ask)

    def worker(world: World) -> None:
        model = make_model()
        un.parallel(model, muon(model), "zero(stage=3)", world=world)

    run_threads(worker, 3)


def test_owners_have_about_equal_work() -> None:
    shapes = [(64, 64)] * 4 + [(64, 256), (256, 64)] * 4 + [(1000,)] * 3
    for ranks in (1, 2, 3, 4):
        loads = [0] * ranks
        for shape, owner in zip(shapes, choose_owners(shapes, ranks), strict=True):
            loads[owner] += count_work(shape)
        assert max(loads) <= 1.4 * sum(loads) / ranks
    assert count_work((10, 1000)) == count_work((1000, 10)) == 100_000
    assert count_work((8, 3, 5)) == 8 * 8 * 15
    assert count_work((7,)) == 7


# What an optimizer is -------------------------------------------------------------------------------------------------


def kind_of(make: Callable[[list[nn.Parameter]], torch.optim.Optimizer]) -> str:
    optimizer = make([nn.Parameter(torch.ones(4, 6, dtype=torch.float64))])
    before = copy.deepcopy(optimizer.state_dict())
    found = find_kind(optimizer, optimizer.param_groups[0])
    assert_same(optimizer.state_dict(), before)  # a try leaves nothing behind
    return found


def test_kinds_are_known_declared_or_tried() -> None:
    for name in ("SGD", "Adam", "AdamW", "RMSprop", "Adagrad"):
        assert kind_of(getattr(torch.optim, name)) == "elements"
    for tensorwise in (torch.optim.Muon, MyMuon, torch.optim.Adafactor, Lamb, Soap):
        assert kind_of(tensorwise) == "tensors"
    assert kind_of(Signs) == "elements"
    assert kind_of(Codes) == "elements"  # all its tensors are small
    assert kind_of(lambda params: Codes(params, large=24)) == "tensors"
    assert kind_of(lambda params: declare(Together(params), True)) == "tensors"
    assert kind_of(lambda params: declare(Signs(params), True)) == "tensors"
    groups = [{"params": [nn.Parameter(torch.ones(2, 2))], "whole_tensors": True}]
    optimizer = torch.optim.SGD(groups, lr=0.1)
    assert find_kind(optimizer, optimizer.param_groups[0]) == "tensors"


def declare(optimizer: Any, whole: Any) -> Any:
    optimizer.whole_tensors = whole
    return optimizer


@pytest.mark.parametrize("spec", ["shared", "zero(stage=3)"])
def test_what_cannot_be_shared_out_is_refused_with_what_to_do(spec: str) -> None:
    def refused(make: Callable[[nn.Module], Any], match: str, error: type[Exception] = ValueError) -> None:
        model = make_model()
        with pytest.raises(error, match=match):
            un.parallel(model, make(model), spec, world=World())

    refused(lambda m: Together(m.parameters()), r"together and separately. Say so: optimizer.whole_tensors = False")
    refused(lambda m: torch.optim.LBFGS(m.parameters()), "LBFGS cannot be shared out among workers: it calls a closure")
    refused(lambda m: declare(Signs(m.parameters()), "yes"), "must be True or False, got 'yes'", TypeError)

    def with_vector(model: nn.Module) -> Any:
        optimizers = muon(model)
        bias = optimizers[1].param_groups[0]["params"].pop()
        optimizers[0].param_groups[0]["params"].append(bias)
        return optimizers

    disk = spec.replace("stage=3", "stage=3, optimizer_on=disk")
    model = make_model()
    if disk != spec:
        with pytest.raises(ValueError, match=r"Muon \+ AdamW has to step whole ones: use optimizer_on='cpu'"):
            un.parallel(model, muon(model), disk, world=World())
    refused(with_vector, r"Muon only supports 2D parameters .* Give it the matrices .*\[muon, adamw\]")


def test_members_of_a_list_keep_their_kinds_apart() -> None:
    def worker(world: World) -> list[tuple[int, bool]]:
        model = make_model()
        replica: Any = un.parallel(model, muon(model), "zero(stage=2)", world=world)
        assert len(members_of(replica.optimizer)) == 2
        return [(unit.member, unit.owners is not None) for unit in replica.units]

    assert all(set(found) == {(0, True), (1, False)} for found in run_threads(worker, 2))


def test_shared_between_hosts_has_an_owner_on_each() -> None:
    def worker(world: World) -> list[Tensor]:
        model = make_model()
        optimizers = muon(model)
        un.parallel(model, optimizers, "shared", world=world)
        train(model, optimizers, [world.rank], range(3))
        return values(model)

    alone = make_model()
    train(alone, muon(alone), [0, 1, 2], range(3))
    for found in run_threads(worker, 3, hosts=["a", "a", "b"]):
        torch.testing.assert_close(found, values(alone), rtol=1e-8, atol=1e-10)


def test_a_lost_owner_under_shared_is_named() -> None:
    """One that goes with its state; and a world that shrinks and grows goes on where none was lost."""

    def worker(world: World) -> str | list[Tensor]:
        model = make_model()
        optimizers = muon(model)
        replica = un.parallel(model, optimizers, "shared", world=world)
        train(model, optimizers, [world.rank], range(2))
        smaller = world.split([[0, 1], [2]])
        if world.rank < 2:
            with pytest.raises(ValueError, match=r"stepped whole by .* un.load the last checkpoint"):
                replica.rebind(smaller)
        again = world.split([[2, 1, 0]])  # the same ranks in another order: other owners
        replica.rebind(again)
        train(model, optimizers, [world.rank], range(2, 4))
        return values(model)

    alone = make_model()
    train(alone, muon(alone), [0, 1, 2], range(4))
    for found in run_threads(worker, 3):
        torch.testing.assert_close(found, values(alone), rtol=1e-8, atol=1e-10)


@pytest.mark.filterwarnings("ignore:the ranks train on the same samples")
@pytest.mark.parametrize(("before", "after"), [("shared", "zero(stage=3)"), ("zero(stage=2)", "shared")])
def test_a_switch_takes_the_state_of_whole_tensors_along(before: str, after: str) -> None:
    def worker(world: World) -> list[Tensor]:
        model = make_model()
        optimizers = MAKERS["soap"](model)
        replica = un.parallel(model, optimizers, before, world=world)
        train(model, optimizers, [0], range(2))
        replica.switch(after)
        train(model, optimizers, [0], range(2, 4))
        return values(model)

    alone = make_model()
    train(alone, MAKERS["soap"](alone), [0], range(4))
    for found in run_threads(worker, 2):
        torch.testing.assert_close(found, values(alone), rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("maker", ["muon", "soap", "lamb", "adafactor"])
@pytest.mark.parametrize("spec", [*HYBRID, "zero(stage=3, within=2, optimizer_on=cpu)"])
def test_two_groups_of_two_have_the_numbers_of_one_process(spec: str, maker: str) -> None:
    def worker(world: World) -> list[Tensor]:
        model = make_model()
        optimizers = MAKERS[maker](model)
        un.parallel(model, optimizers, spec, world=world)
        train(model, optimizers, [world.rank], range(3))
        return values(model)

    alone = make_model()
    train(alone, MAKERS[maker](alone), [0, 1, 2, 3], range(3))
    for found in run_threads(worker, 4):
        torch.testing.assert_close(found, values(alone), rtol=1e-8, atol=1e-10)


def test_whole_tensors_stay_exact_beside_what_is_compressed() -> None:
    """Matrices go to their owners exactly; the rest in 16 bits, and back in 8."""

    def worker(world: World) -> list[Tensor]:
        model = make_model()
        optimizers = muon(model)
        un.parallel(model, optimizers, "zero(stage=2, reducer=bf16, gather=int8)", world=world)
        train(model, optimizers, [world.rank], range(2))
        return values(model)

    alone = make_model()
    train(alone, muon(alone), [0, 1], range(2))
    for found in run_threads(worker, 2):
        torch.testing.assert_close(found, values(alone), rtol=0.05, atol=0.05)


@pytest.mark.parametrize("late", [False, True])
def test_a_matrix_of_one_row_has_a_state_of_its_own_kind(late: bool) -> None:
    """Adafactor keeps means of columns: of one row they have the row's shape, of other matrices another. `late`: it
    comes to the optimizer in a later group."""

    def work(world: World | None) -> dict[int, dict[str, Any]]:
        model = nn.Sequential(make_model(), nn.Linear(3, 1).double())
        for p in model[1].parameters():
            nn.init.constant_(p, 0.5)
        optimizer = torch.optim.Adafactor(model[0].parameters() if late else model.parameters(), lr=0.1)
        replica = None if world is None else un.parallel(model, optimizer, "zero(stage=2)", world=world)
        if late:
            optimizer.add_param_group({"params": model[1].parameters()})
        train(model, optimizer, [0, 1] if world is None else [world.rank], range(2))
        state: dict[int, dict[str, Any]] = optimizer.state_dict()["state"]
        del replica
        return state

    expected = work(None)
    for found in run_threads(work, 2):
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)
