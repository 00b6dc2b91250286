"""Models that `copy.deepcopy` cannot copy, and whole models that are saved: under every strategy, as in one process."""

from __future__ import annotations

import copy
import io
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from stranger_programs import furthest, seeded, values
from torch import Tensor, nn
from torch.nn.utils import prune, weight_norm

import unisono as un
from unisono.model_copies import copy_model
from unisono.world import World
from unisono.world.virtual import run_threads

EXACT = ["local_sgd(every=1, start=0)", "parameter_server", "zero(stage=1)", "zero(stage=2)", "allreduce", "shared"]
MEANS = ["local_sgd(every=4)", "diloco(every=4)", "gossip"]  # of the ranks' own models
OTHERS = ["async_average", "crossbow", "hogwild"]
REFUSED = ["zero(stage=3)", "zero(stage=1, optimizer_on=cpu)"]  # to pickle: values are elsewhere


class Two(nn.Module):
    """Two layers; those of a subclass keep what `copy.deepcopy` or pickle would not take."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 1)
        self.norm = nn.BatchNorm1d(8)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.hide(x))  # type: ignore[no-any-return]

    def hide(self, x: Tensor) -> Tensor:
        return self.norm(self.first(x)).tanh()  # type: ignore[no-any-return]


class Keeping(Two):
    """Keeps activations: as an attribute, in a list, in an object, and in a tuple inside a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Tensor] = []
        self.record = SimpleNamespace(owner=self, by_name={})

    def hide(self, x: Tensor) -> Tensor:
        self.hidden = super().hide(x)
        self.seen = [self.hidden]
        self.record.last, self.record.by_name["hidden"] = self.hidden, (self.hidden,)
        return self.hidden


class Locked(Two):
    """A lock and a generator, and ways to its own layers that are no submodules."""

    def __init__(self) -> None:
        super().__init__()
        self.lock, self.batches = threading.Lock(), (i for i in range(3))
        self.layers, self.way = [self.first], SimpleNamespace(hide=self.hide, lock=self.lock)

    def hide(self, x: Tensor) -> Tensor:
        with self.lock:
            return self.norm(self.layers[0](x)).tanh()  # type: ignore[no-any-return]

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.way.hide(x))  # type: ignore[no-any-return]


def pruned() -> nn.Module:
    model = Two()
    prune.l1_unstructured(model.first, "weight", amount=0.4)
    return model


def normed() -> nn.Module:
    model = Two()
    with pytest.warns(FutureWarning):
        weight_norm(model.first)
    return model


def parametrised() -> nn.Module:
    model = Keeping()
    nn.utils.parametrizations.weight_norm(model.first)
    return model


MODELS = {
    "plain": Two,
    "keeping": Keeping,
    "locked": Locked,
    "pruned": pruned,
    "normed": normed,
    "parametrised": parametrised,
}
SAVED = ["plain", "keeping", "pruned", "normed"]  # torch itself refuses to pickle the others


def batch(rank: int, step: int) -> Tensor:
    return torch.randn(4, 4, generator=torch.Generator().manual_seed(10 * step + rank), dtype=torch.float64)


def build(kind: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = seeded(MODELS[kind]).double()
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, ranks: list[int], steps: int = 3) -> None:
    model.norm.eval()  # statistics of one process's batch are not those of two halves
    for step in range(steps):
        optimizer.zero_grad()
        model(torch.cat([batch(rank, step) for rank in ranks])).square().mean().backward()
        optimizer.step()


def evaluate(model: nn.Module) -> Tensor:
    with torch.no_grad():
        return model.eval()(batch(9, 9))  # type: ignore[no-any-return]


def evaluate_fresh(kind: str, state: dict[str, Tensor]) -> Tensor:
    """What a model that no replica has ever seen gives with these values."""
    model = build(kind)[0]
    model.load_state_dict(state)
    return evaluate(model)


@pytest.mark.parametrize("spec", EXACT + MEANS + OTHERS)
def test_a_model_that_cannot_be_copied_deeply_is_consolidated(spec: str) -> None:
    def consolidated(world: World, kind: str) -> tuple[list[Tensor], list[Tensor]]:
        model, optimizer = build(kind)
        replica = un.parallel(model, optimizer, spec, world=world)
        train(model, optimizer, [world.rank])
        own = values(model)
        agreed = replica.consolidate()
        found = values(agreed)
        off = float((evaluate(agreed) - evaluate_fresh(kind, agreed.state_dict())).abs().max())
        assert off < 1e-12, kind  # nothing in the copy computes with the model's own values
        replica.close()
        return own, found

    every = run_threads(lambda world: [consolidated(world, kind) for kind in MODELS], 2)
    for kind, (own, agreed), (other, theirs) in zip(MODELS, *every, strict=True):
        assert furthest(agreed, theirs) == 0.0, kind
        if spec in EXACT:
            alone, optimizer = build(kind)
            train(alone, optimizer, [0, 1])
            assert furthest(agreed, values(alone)) < 1e-12, kind
        elif spec in MEANS:
            assert furthest(agreed, [(x + y) / 2 for x, y in zip(own, other, strict=True)]) < 1e-12, kind


@pytest.mark.parametrize("spec", EXACT + MEANS + OTHERS + REFUSED)
def test_a_whole_model_is_pickled_as_in_one_process(spec: str) -> None:
    def saved(world: World, kind: str) -> bytes | None:
        model, optimizer = build(kind)
        replica = un.parallel(model, optimizer, spec, world=world)
        train(model, optimizer, [world.rank])
        world.barrier()  # the others' steps are over, where the model is in the memory of all
        if spec in REFUSED:
            with pytest.raises(TypeError, match=r"un\.save"):
                torch.save(model, io.BytesIO())
            replica.close()
            return None
        written, step = io.BytesIO(), replica.step
        torch.save(model, written)
        assert b"unisono" not in written.getvalue()  # it can be read where this package is not installed
        written.seek(0)
        read = torch.load(written, weights_only=False)
        assert furthest(values(read), values(model)) == 0.0, kind
        assert torch.equal(evaluate(read), evaluate_fresh(kind, model.state_dict())), kind
        train(read, torch.optim.SGD(read.parameters(), lr=0.1), [world.rank], steps=1)
        assert replica.step == step, kind  # its passes are none of the replica's
        replica.close()
        return written.getvalue()

    plain = run_threads(lambda world: [saved(world, kind) for kind in SAVED], 2)[0][0]
    if plain is not None:
        with torch.serialization.safe_globals([Two, nn.Linear, nn.BatchNorm1d]):
            torch.load(io.BytesIO(plain), weights_only=True)  # as programs do that keep to what they name


@pytest.mark.parametrize("spec", ["local_sgd(every=4)", "crossbow", "zero(stage=1)", "shared"])
def test_passes_of_a_deep_copy_are_none_of_the_replica(spec: str) -> None:
    """As those of a target network, which the program loads and evaluates at times that are a rank's own."""

    def program(world: World) -> None:
        model, optimizer = build("plain")
        replica = un.parallel(model, optimizer, spec, world=world)
        target = copy.deepcopy(model)
        train(model, optimizer, [world.rank], steps=2)
        state = model.state_dict()
        if world.rank == 0:
            target.load_state_dict(state)
            train(target, torch.optim.SGD(target.parameters(), lr=0.1), [0])
        train(model, optimizer, [world.rank], steps=2)
        assert replica.step == 4
        replica.close()

    run_threads(program, 2)


def test_batch_normalisation_over_all_ranks_is_saved_and_joins_the_world_that_reads_it() -> None:
    def program(world: World) -> bytes:
        model = un.sync_batch_norm(seeded(Two).double(), world)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        un.parallel(model, optimizer, "local_sgd", world=world)
        model(batch(world.rank, 0)).sum().backward()
        torch.save(model, written := io.BytesIO())
        return written.getvalue()

    read = torch.load(io.BytesIO(run_threads(program, 2)[0]), weights_only=False)
    assert furthest([read.norm.running_mean], [torch.zeros(8)]) > 0
    found, alone = values(read), seeded(Two).double()
    alone.load_state_dict(read.state_dict())
    assert torch.equal(evaluate(read), evaluate(alone))
    assert torch.equal(read.train()(batch(0, 1)), alone.train()(batch(0, 1)))  # a world of one
    assert furthest(values(read), found) > 0


def test_what_makes_a_new_object_for_each_attempt_is_no_endless_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("unisono.model_copies.MOST_SHARED", 5)
    model = nn.Linear(2, 2)
    model.odd = Odd()
    with pytest.raises(TypeError, match="cannot pickle"):
        copy_model(model)


class Odd:
    """Its state is another lock each time."""

    def __getstate__(self) -> Any:
        return {"lock": threading.Lock()}
