"""Bad input to `un.parallel` and `un.join`: the error says what was got, what was expected and what to do."""

from __future__ import annotations

import dataclasses
import gc
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import unisono as un
from unisono.methods.reducers.dense import dense
from unisono.methods.spec import SpecError
from unisono.methods.strategies.allreduce import allreduce
from unisono.world import World
from unisono.world.virtual import run_threads


def sgd(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), **{"lr": 0.1, **options})


def bind(model: Any = None, optimizer: Any = None, strategy: Any = "allreduce", **settings: Any) -> un.Replica:
    model = nn.Linear(2, 2) if model is None else model
    optimizer = sgd(model) if optimizer is None else optimizer
    return un.parallel(model, optimizer, strategy, world=World(), **settings)


# What is given -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("strategy", "words"),
    [
        ("allreduse", ["unknown strategy 'allreduse'", "did you mean 'allreduce'?"]),
        ("allreduce(acumulate=4)", ["no argument 'acumulate'", "did you mean 'accumulate'?"]),
        ("allreduce(accumulate=many)", ["accumulate=...) takes an int", "got many"]),
        ("allreduce(buffers=averaged)", ["'broadcast', 'average', 'local'", "did you mean 'average'?"]),
        ("allreduce(reducer=dens)", ["unknown reducer 'dens'", "did you mean 'dense'?"]),
        ("allreduce(", ["allreduce("]),
    ],
)
def test_a_spec_that_cannot_be_built_is_pointed_at(strategy: str, words: list[str]) -> None:
    with pytest.raises(SpecError) as caught:
        bind(strategy=strategy)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize("strategy", ["alreduce", "allreduce(", "allreduce(acumulate=4)", "topk(k=2.0)"])
def test_the_report_of_a_spec_ends_at_the_programs_line(strategy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def report() -> str:
        with pytest.raises(SpecError) as caught:
            bind()
        caught.value.hide_frames()
        return "".join(traceback.format_exception(caught.value))

    monkeypatch.setenv("UNISONO_STRATEGY", strategy)
    assert Path(un.__file__).parent.as_posix() not in report()
    assert "SpecError: UNISONO_STRATEGY: " in report(), "the program's line has another spec"
    monkeypatch.setenv("UNISONO_TRACEBACK", "full")
    assert Path(un.__file__).parent.as_posix() in report()


@pytest.mark.parametrize(
    ("settings", "kind", "words"),
    [
        ({"acumulate": 4}, TypeError, "allreduce has no setting 'acumulate'; did you mean 'accumulate'?"),
        ({"colour": 1}, TypeError, "has no setting 'colour'; it has reducer, accumulate, buffers"),
        ({"accumulate": 0}, ValueError, "accumulate counts backward passes a window: .* at least 1, got 0"),
        ({"accumulate": 2.5}, ValueError, "whole number of at least 1, got 2.5"),
        ({"accumulate": "4"}, ValueError, "whole number of at least 1, got '4'"),
        ({"accumulate": True}, ValueError, "whole number of at least 1, got True"),
        ({"bucket_bytes": -1}, ValueError, "bucket_bytes counts bytes a bucket: .* got -1"),
        ({"buffers": "mean"}, ValueError, "buffers must be 'broadcast', 'average' or 'local', got 'mean'"),
        ({"overlap": "yes"}, ValueError, "overlap must be True, False or None .* got 'yes'"),
        ({"reducer": "dense"}, TypeError, "must be a Reducer .* got 'dense'; .* 'allreduce\\(reducer=dense\\)'"),
    ],
)
def test_settings_are_checked(settings: dict[str, Any], kind: type[Exception], words: str) -> None:
    with pytest.raises(kind, match=words):
        bind(**settings)


def test_settings_of_a_strategy_without_fields() -> None:
    class Bare(un.Strategy):
        def make(self, model: nn.Module, optimizer: torch.optim.Optimizer, world: World) -> un.Replica:
            return un.Replica(model, optimizer, world, self)

    with pytest.raises(TypeError, match="Bare has no setting 'every'; it has none"):
        bind(strategy=Bare(), every=8)
    assert bind(strategy=Bare()).step == 0


def test_settings_override_the_spec_and_leave_the_strategy_as_it_was() -> None:
    strategy = allreduce(accumulate=2)
    assert bind(strategy=strategy, accumulate=3, reducer=dense()).strategy.accumulate == 3
    assert strategy.accumulate == 2
    with pytest.raises(dataclasses.FrozenInstanceError):
        strategy.accumulate = 5


@pytest.mark.parametrize(
    ("strategy", "words"),
    [
        (7, "expected a strategy or its spec, such as 'allreduce'; got <class 'int'>"),
        (None, "expected a strategy or its spec"),
        (allreduce, "call it: allreduce"),
    ],
)
def test_a_strategy_that_is_none(strategy: Any, words: str) -> None:
    with pytest.raises(TypeError, match=words):
        bind(strategy=strategy)


def test_something_that_is_not_a_module_or_not_an_optimizer() -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(TypeError, match=r"model must be a torch.nn.Module, got list"):
        bind(list(model.parameters()), sgd(model))
    with pytest.raises(TypeError, match=r"model must be a torch.nn.Module, got function"):
        bind(lambda x: x, sgd(model))
    with pytest.raises(TypeError, match=r"optimizer must be a torch.optim.Optimizer, got float"):
        bind(model, 0.1)
    with pytest.raises(TypeError, match=r"optimizer must be a torch.optim.Optimizer, got Linear"):
        bind(model, model)


def test_a_model_without_trainable_parameters() -> None:
    model = nn.Linear(2, 2)
    optimizer = sgd(model)
    model.requires_grad_(False)
    with pytest.raises(ValueError, match=r"Linear has no trainable parameters \(2 in all\).*requires_grad_\(True\)"):
        bind(model, optimizer)
    with pytest.raises(ValueError, match=r"Tanh has no trainable parameters \(0 in all\)"):
        bind(nn.Tanh(), sgd(nn.Linear(1, 1)))


def test_an_optimizer_that_holds_other_parameters() -> None:
    other = nn.Linear(3, 5)
    with pytest.raises(ValueError, match=r"holds 2 parameter\(s\) that are not the model's, .* shape \(5, 3\)"):
        bind(nn.Linear(2, 2), sgd(other))
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    part = torch.optim.SGD(model[1].parameters(), lr=0.1)
    assert bind(model, part).step == 0  # a part of the model's is fine


# Bound twice ---------------------------------------------------------------------------------------------------


def test_a_model_is_bound_once() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    optimizer = sgd(model)
    replica = bind(model, optimizer)
    for again in (model, model[1], nn.Sequential(nn.Linear(2, 2), model[1]), torch.compile(model, backend="eager")):
        with pytest.raises(ValueError, match=r"already trained by another replica: call close\(\) on that one first"):
            bind(again, sgd(again))
    with pytest.raises(ValueError, match=r"4 parameter\(s\) of the model, the first '0.weight'"):
        bind(model, optimizer)
    replica.close()
    replica = bind(model, optimizer)
    replica.close()
    replica.close()  # twice is fine
    bind(model, optimizer)


def test_a_replica_that_nobody_holds_is_not_in_the_way() -> None:
    model = nn.Linear(2, 2)
    gc.disable()
    try:
        bind(model, sgd(model))  # a notebook's cell, run again
        bind(model, sgd(model))
    finally:
        gc.enable()


def test_a_refused_binding_leaves_nothing_behind() -> None:
    model = nn.Linear(2, 2)
    optimizer = sgd(model)
    with pytest.raises(ValueError, match="accumulate"):
        bind(model, optimizer, accumulate=0)
    assert not optimizer._optimizer_step_pre_hooks
    assert bind(model, optimizer).step == 0


# Ranks that differ ---------------------------------------------------------------------------------------------


def on_ranks(make: Callable[[int], tuple[nn.Module, dict[str, Any], str]], size: int = 3) -> list[str]:
    """Every rank's error."""

    def work(world: World) -> str:
        model, options, strategy = make(world.rank)
        with pytest.raises(ValueError, match="the ranks do not train the same thing") as caught:
            un.parallel(model, sgd(model, **options), strategy, world=world)
        return str(caught.value)

    return run_threads(work, size)


def differing(rank: int, usual: Any, odd: Any) -> Any:
    return odd if rank == 1 else usual


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (
            lambda r: (nn.Sequential(nn.Linear(4, 4), nn.Linear(4, differing(r, 3, 2))), {}, "allreduce"),
            [
                "rank 0 has parameter 1.weight: float32 [3, 4]",
                "rank 1 has parameter 1.weight: float32 [2, 4]",
                "rank 2 has parameter 1.weight: float32 [3, 4]",
            ],
        ),
        (
            lambda r: (nn.Linear(4, 4, dtype=differing(r, torch.float32, torch.float64)), {}, "allreduce"),
            ["rank 0 has parameter weight: float32", "rank 1 has parameter weight: float64"],
        ),
        (
            lambda r: (nn.Linear(4, 4, bias=differing(r, True, False)), {}, "allreduce"),
            ["rank 0 has parameter bias: float32 [4]", "rank 1 has optimizer"],
        ),
        (
            lambda r: (
                (nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4, affine=False)), {}, "allreduce")
                if r != 1
                else (nn.Sequential(nn.Linear(4, 4)), {}, "allreduce")
            ),
            ["rank 0 has buffer 1.running_mean: float32 [4]"],
        ),
        (
            lambda r: (
                nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4).requires_grad_(differing(r, True, False))),
                {},
                "allreduce",
            ),
            ["rank 0 has parameter 1.weight: float32 [4, 4]; rank 1 has parameter 1.weight: float32 [4, 4], frozen"],
        ),
        (
            lambda r: (
                nn.Conv2d(3, 4, 3).to(memory_format=differing(r, torch.contiguous_format, torch.channels_last)),
                {},
                "allreduce",
            ),
            ["rank 0 has parameter weight: float32 [4, 3, 3, 3]; rank 1", "[4, 3, 3, 3], strides [27, 1, 9, 3]"],
        ),
        (
            lambda r: (nn.Linear(4, 4), {"lr": differing(r, 0.1, 0.2)}, "allreduce"),
            ["rank 0 has optimizer: SGD, group 0 of 2 tensors, lr=0.1", "rank 1 has optimizer", "lr=0.2"],
        ),
        (
            lambda r: (nn.Linear(4, 4), {}, differing(r, "allreduce", "allreduce(accumulate=2)")),
            ["rank 0 has strategy: allreduce;", "rank 1 has strategy: allreduce(accumulate=2);"],
        ),
    ],
    ids=[
        "shape",
        "dtype",
        "missing parameter",
        "missing buffer",
        "frozen",
        "memory order",
        "learning rate",
        "strategy",
    ],
)
def test_ranks_that_differ_are_named_on_every_rank(make: Any, words: list[str]) -> None:
    errors = on_ranks(make)
    assert len(set(errors)) == 1
    for word in [*words, "Every rank must build the same"]:
        assert word in errors[0]


def test_another_strategy_after_a_refused_one_still_works() -> None:
    def work(world: World) -> float:
        model = nn.Linear(2, 2)
        with pytest.raises(ValueError, match="do not train the same thing"):
            un.parallel(model, sgd(model, lr=0.1 + world.rank), world=world)
        replica = un.parallel(model, sgd(model), world=world)
        replica.close()
        return float(model.weight.detach().sum())

    assert len(set(run_threads(work, 2))) == 1


# The world -----------------------------------------------------------------------------------------------------


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """environment(RANK="0", ...) sets what a launcher would, and nothing else."""
    names = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "UNISONO_SHM_FD"]

    def set_to(**values: str) -> None:
        for name in names:
            monkeypatch.delenv(name, raising=False)
        for name, value in values.items():
            monkeypatch.setenv(name, value)

    monkeypatch.setattr("unisono.world.rendezvous._process", [])
    return set_to


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"RANK": "3", "WORLD_SIZE": "2"}, "RANK=3 and WORLD_SIZE=2: expected 0 <= RANK < WORLD_SIZE; start"),
        ({"RANK": "-1", "WORLD_SIZE": "2"}, "RANK=-1 and WORLD_SIZE=2"),
        ({"WORLD_SIZE": "2"}, "RANK=None and WORLD_SIZE=2: .* or unset WORLD_SIZE to run alone"),
        ({"RANK": "0", "WORLD_SIZE": "0"}, "RANK=0 and WORLD_SIZE=0"),
        ({"RANK": "0", "WORLD_SIZE": "two"}, "WORLD_SIZE must be a whole number, got 'two'"),
        ({"RANK": "first", "WORLD_SIZE": "2"}, "RANK must be a whole number, got 'first'"),
        ({"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": ""}, "LOCAL_RANK must be a whole number, got ''"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "MASTER_ADDR is not set, so the other ranks cannot be found: start"),
        (
            {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"},
            "MASTER_PORT is not set, so the other ranks cannot be found",
        ),
    ],
)
def test_an_environment_that_makes_no_sense(environment: Any, values: dict[str, str], words: str) -> None:
    environment(**values)
    with pytest.raises(ValueError, match=words):
        un.join("cpu")


def test_outside_any_launcher_there_is_a_world_of_one(environment: Any) -> None:
    environment()
    world = un.join("cpu")
    assert (world.rank, world.size) == (0, 1)
    assert un.join() is world


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is CUDA here")
def test_cuda_where_there_is_none(environment: Any) -> None:
    environment()
    for asked in ("cuda", "cuda:1", torch.device("cuda")):
        with pytest.raises(ValueError, match=r"PyTorch sees no CUDA device here .*: use device='cpu', or install"):
            un.join(asked)
    with pytest.raises(ValueError, match="device must be 'cpu' or 'cuda', got 'mps'"):
        un.join("mps")
    assert un.join().device.type == "cpu"
    with pytest.raises(ValueError, match="already joined with device 'cpu', got device='cuda'"):
        un.join("cuda")
