"""The commonest mistakes, each with the words that it ends in."""

from __future__ import annotations

import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import unisono as un
from torch_groups import leave_group
from unisono.launchers.runtime.status import describe_ending, describe_failure, note_ending
from unisono.world import rendezvous

SAME_SAMPLES = "the ranks train on the same samples"


def make_model() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> None:
    optimizer.zero_grad()
    model(x).square().sum().backward()
    optimizer.step()  # of train


def line_of(text: str) -> int:
    """Where this file has it."""
    lines = Path(__file__).read_text().splitlines()
    [found] = [i for i, line in enumerate(lines, 1) if line.strip() == text]
    return found


# A rank that does not come --------------------------------------------------------------------------------------


def save_on_rank_0(world: un.World, tmp_path: Path) -> None:
    replica = un.parallel(*make_model())
    if world.rank == 0:
        un.save(tmp_path, replica)


def leave_early(world: un.World, _: Path) -> None:
    model, optimizer = make_model()
    un.parallel(model, optimizer)
    for step in range(3):
        if world.rank == 1 and step == 2:
            return
        optimizer.zero_grad()
        model(torch.full((2, 4), 1.0 + world.rank)).square().sum().backward()
        optimizer.step()


def leave_early_under_local_sgd(world: un.World, _: Path) -> None:
    model, optimizer = make_model()
    un.parallel(model, optimizer, "local_sgd(every=1, start=0)")
    if world.rank == 0:
        model(torch.ones(2, 4)).square().sum().backward()
        optimizer.step()  # meets the others


def evaluate_on_rank_0(world: un.World, _: Path) -> None:
    model, optimizer = make_model()
    un.parallel(model, optimizer, "zero(stage=3)")
    if world.rank == 0:
        model(torch.ones(2, 4))


def gather_on_rank_0(world: un.World, _: Path) -> None:
    if world.rank == 0:
        world.gather_objects(1)


@pytest.mark.parametrize(
    ("work", "call", "line", "rule"),
    [
        (save_on_rank_0, "un.save", "un.save(tmp_path, replica)", "every rank calls un.save; rank 0 writes"),
        (
            leave_early,
            "backward()",
            "model(torch.full((2, 4), 1.0 + world.rank)).square().sum().backward()",
            "every rank runs as many passes as the others: give each as many batches (un.shard does)",
        ),
        (
            leave_early_under_local_sgd,
            "optimizer.step()",
            "optimizer.step()  # meets the others",
            "every rank runs as many passes",
        ),
        (evaluate_on_rank_0, "a forward pass", "model(torch.ones(2, 4))", "also to evaluate it"),
        (gather_on_rank_0, "world.gather_objects", "world.gather_objects(1)", "every rank calls world.gather_objects"),
    ],
)
def test_a_rank_that_returned_is_missed_at_once_and_the_call_is_named(
    work: Callable[[un.World, Path], None], call: str, line: str, rule: str, tmp_path: Path
) -> None:
    with pytest.raises(un.PeerLost) as caught:  # a rank that was not missed would be waited for longer than any test
        un.run_threads(lambda world: work(world, tmp_path), 2, timeout_s=1e6)
    text = str(caught.value)
    assert "rank 1 has returned from its function" in text
    assert f"This rank is in {call} (test_mistakes.py:{line_of(line)}): " in text
    assert rule in text
    frames = traceback.extract_tb(caught.value.__traceback__)
    assert frames[-1].filename == __file__
    assert frames[-1].lineno == line_of(line)
    assert "Frames of unisono and torch are left out" in text
    assert "UNISONO_TRACEBACK=full shows them" in text


def test_all_frames_are_there_where_they_are_asked_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("UNISONO_TRACEBACK", "full")
    with pytest.raises(un.PeerLost) as caught:
        un.run_threads(lambda world: save_on_rank_0(world, tmp_path), 2, timeout_s=1e6)
    assert "left out" not in str(caught.value)
    assert "/unisono/world/" in "".join(traceback.format_exception(caught.value))


def test_a_rank_that_closed_its_world_is_not_said_to_have_returned() -> None:
    def work(world: un.World) -> None:
        if world.rank == 1:
            world.close()
            return
        world.barrier()

    with pytest.raises(un.PeerLost, match="rank 1 has closed this world"):
        un.run_threads(work, 2, timeout_s=1e6)


def test_ranks_that_wait_for_each_other_in_different_calls_are_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("unisono.background.LONG_S", 0.0)

    def work(world: un.World) -> None:
        model, optimizer = make_model()
        replica = un.parallel(model, optimizer)
        if world.rank == 0:
            model(torch.ones(3, 4)).sum().backward()
        un.save(tmp_path / "late", replica)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with pytest.raises(un.PeerLost):
            un.run_threads(work, 2, timeout_s=1.0)
    backward = f"backward() (test_mistakes.py:{line_of('model(torch.ones(3, 4)).sum().backward()')})"
    line = line_of('un.save(tmp_path / "late", replica)')
    save = f"un.save (test_mistakes.py:{line})"
    [said] = [str(w.message) for w in caught]
    assert said.startswith(f"this rank waits in {backward} for rank 1, which waits in {save}: they have come to")


def test_an_error_that_was_not_called_by_a_program_of_the_user_keeps_its_text() -> None:
    assert str(un.PeerLost("gone")) == "gone"


def test_how_a_program_ends_is_put_into_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("unisono.launchers.runtime.status._noted", "")
    monkeypatch.setattr("unisono.launchers.runtime.status._step", 7)
    assert describe_ending().startswith("has ended its program at ")
    assert describe_ending().endswith(", after step 7")
    monkeypatch.setattr("sys.last_value", ValueError("a bad batch\nand more"), raising=False)
    assert describe_ending().startswith("has failed (ValueError: a bad batch) at ")
    note_ending("has ended its program with status 3")
    assert describe_ending().startswith("has ended its program with status 3 at ")
    assert describe_failure(KeyError()) == "has failed (KeyError)"


# More workers than GPUs -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("devices", "local_rank", "said"), [(1, 0, True), (1, 1, False), (0, 0, False), (2, 0, False)])
def test_workers_without_a_gpu_each_are_said_once_to_train_on_the_cpu(
    devices: int, local_rank: int, said: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: devices > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: devices)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        chosen = rendezvous._choose_device(None, local_rank, 2)
    assert chosen.type == ("cuda" if devices == 2 else "cpu")
    assert [str(w.message).partition(":")[0] for w in caught] == (
        ["this host has 1 CUDA device(s) for 2 workers, so all of them train on the CPU"] if said else []
    )


# An optimizer made anew -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", ["allreduce", "local_sgd", "zero(stage=1)"])
def test_an_optimizer_made_anew_is_noticed_once(strategy: str) -> None:
    model, optimizer = make_model()
    replica = un.parallel(model, optimizer, strategy, world=un.World())
    anew = torch.optim.Adam(model.parameters())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(5):
            train(model, anew, torch.ones(2, 4))
    [said] = caught
    assert "another optimizer (Adam) steps parameters of the model" in str(said.message)
    assert (said.filename, said.lineno) == (__file__, line_of("optimizer.step()  # of train"))
    replica.close()
    train(model, anew, torch.ones(2, 4))


@pytest.mark.parametrize("strategy", ["allreduce", "shared", "local_sgd", "zero(stage=1)", "zero(stage=3)"])
def test_parameters_that_come_after_parallel_are_refused_by_name(strategy: str) -> None:
    """Those that were in the model before may come to the optimizer later, as a program thaws them."""

    def work(world: un.World) -> None:
        model, _ = make_model()
        optimizer = torch.optim.SGD(model[2].parameters(), lr=0.1)  # type: ignore[index]
        replica = un.parallel(model, optimizer, strategy, world=world)
        optimizer.add_param_group({"params": model[0].parameters()})  # type: ignore[index]
        train(model, optimizer, torch.full((2, 4), 1.0 + world.rank))
        model.append(nn.Linear(3, 3))  # type: ignore[operator]
        optimizer.add_param_group({"params": model[3].parameters()})  # type: ignore[index]
        with pytest.raises(ValueError, match=r"parameter 3\.weight \(2 in all\) came .* after un\.parallel"):
            train(model, optimizer, torch.full((2, 4), 1.0 + world.rank))
        replica.close()

    un.run_threads(work, 2)


class Ahead(torch.optim.Optimizer):
    """Steps another optimizer, as Lookahead does."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        super().__init__(inner.param_groups, {})
        self.inner = inner

    def step(self, closure: Any = None) -> None:
        self.inner.step()


@pytest.mark.parametrize("bound", ["inner", "outer"])
def test_an_optimizer_around_another_is_no_mistake(bound: str) -> None:
    model, inner = make_model()
    outer = Ahead(inner)
    un.parallel(model, inner if bound == "inner" else outer, world=un.World())
    for _ in range(4):
        train(model, outer, torch.ones(2, 4))


def test_optimizers_for_different_parameters_are_no_mistake() -> None:
    model, _ = make_model()
    first, second = (torch.optim.SGD(model[i].parameters(), lr=0.1) for i in (0, 2))  # type: ignore[index]
    un.parallel(model, first, world=un.World())
    for _ in range(4):  # one of them rests, as a generator does
        train(model, second, torch.ones(2, 4))


# A model that torch wraps ---------------------------------------------------------------------------------------


@pytest.fixture
def process_group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    leave_group()


@pytest.mark.usefixtures("process_group")
def test_a_model_in_torchs_wrapper_is_refused() -> None:
    model, optimizer = make_model()
    wrapped = DistributedDataParallel(model)
    for given in (wrapped, model, nn.Sequential(wrapped)):
        with pytest.raises(ValueError, match="DistributedDataParallel, which exchanges its gradients too"):
            un.parallel(given, optimizer, world=un.World())
    other, its_optimizer = make_model()
    un.parallel(other, its_optimizer, world=un.World())


# Ranks with the same samples ------------------------------------------------------------------------------------


def same_samples(strategy: str, seed: Callable[[int], int], *, size: int = 2, windows: int = 5) -> list[str]:
    """The warnings of a run in which a rank's data come from `seed(rank)`."""

    def work(world: un.World) -> None:
        model, optimizer = make_model()
        un.parallel(model, optimizer, strategy)
        generator = torch.Generator().manual_seed(seed(world.rank))
        for _ in range(windows):
            train(model, optimizer, torch.randn(5, 4, generator=generator))

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        un.run_threads(work, size)
    return [str(w.message) for w in caught]


STRATEGIES = [
    "allreduce",
    "allreduce(overlap=False)",
    "allreduce(accumulate=2)",
    "local_sgd(every=1, start=0)",
    "diloco(every=1)",
    "zero(stage=1)",
    "zero(stage=3)",
]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_ranks_that_train_on_the_same_samples_are_told_once(strategy: str) -> None:
    [said] = same_samples(strategy, lambda rank: 1, windows=8)
    assert said.startswith(SAME_SAMPLES)
    assert "2 workers do the work of one" in said
    assert "un.shard" in said


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_ranks_with_samples_of_their_own_are_not_suspected(strategy: str) -> None:
    assert same_samples(strategy, lambda rank: rank) == []


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, torch.complex64])
@pytest.mark.parametrize("same", [True, False])
def test_parameters_of_every_dtype_are_compared(dtype: torch.dtype, same: bool) -> None:
    def work(world: un.World) -> None:
        weight = nn.Parameter(torch.ones(5, 4, dtype=dtype))
        model = nn.ParameterList([weight])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        un.parallel(model, optimizer)
        generator = torch.Generator().manual_seed(0 if same else world.rank)
        for _ in range(4):
            optimizer.zero_grad()
            (weight * torch.randn(5, 4, generator=generator).to(dtype)).sum().abs().backward()
            optimizer.step()

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        un.run_threads(work, 2)
    assert [str(w.message).partition(":")[0] for w in caught] == [SAME_SAMPLES] * same


def test_three_ranks_whose_mean_is_rounded_are_told_too() -> None:
    [said] = same_samples("allreduce", lambda rank: 1, size=3)
    assert said.startswith(SAME_SAMPLES)


def test_two_ranks_of_three_with_the_same_samples_are_not_all() -> None:
    assert same_samples("allreduce", lambda rank: min(rank, 1), size=3) == []


def test_one_rank_alone_is_not_suspected() -> None:
    assert same_samples("allreduce", lambda rank: 1, size=1) == []


def test_fewer_windows_than_needed_say_nothing() -> None:
    assert same_samples("allreduce", lambda rank: 1, windows=2) == []


def test_gradients_that_do_not_depend_on_the_data_say_nothing() -> None:
    def work(world: un.World) -> None:
        model = nn.Linear(4, 3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        un.parallel(model, optimizer)
        for _ in range(5):
            optimizer.zero_grad()
            (model.weight.sum() + 0 * model(torch.full((2, 4), float(world.rank))).sum()).backward()
            optimizer.step()

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        un.run_threads(work, 2)
    assert caught == []


def test_the_warning_can_be_silenced_and_the_hook_goes() -> None:
    hooks: list[int] = []

    def work(world: un.World) -> None:
        model, optimizer = make_model()
        un.parallel(model, optimizer)
        weight = next(p for p in reversed(list(model.parameters())) if p.dim() > 1)
        before = len(weight._post_accumulate_grad_hooks)
        for _ in range(4):
            train(model, optimizer, torch.randn(5, 4, generator=torch.Generator().manual_seed(1)))
        hooks.append(before - len(weight._post_accumulate_grad_hooks))

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warnings.filterwarnings("ignore", message=SAME_SAMPLES)
        un.run_threads(work, 2)
    assert caught == []
    assert hooks == [1, 1]
