"""Programs that draw a batch of `un.shard` before they use another, or use several: a weight belongs to its batch.

Every program trains on uneven parts, and must end where plain PyTorch ends in one process on the whole batches.
"""

from __future__ import annotations

import queue
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch
from stranger_programs import furthest, mlp, values
from torch import Tensor, nn

import unisono as un
from unisono.world import World
from unisono.world.virtual import run_threads

Batch = tuple[Tensor, Tensor]
Program = Callable[[Iterable[Batch], nn.Module, torch.optim.Optimizer], None]
SAMPLES = torch.randn(23, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
TARGETS = 3 * SAMPLES.sum(1, keepdim=True).sin()
BATCH = 7  # on three ranks 3, 2 and 2; the last of 2 samples 1, 1 and none
loss_of = nn.functional.mse_loss


# Loops -----------------------------------------------------------------------------------------------------------


def one_ahead(batches: Iterable[Batch]) -> Iterator[Batch]:
    ahead: Batch | None = None
    for batch in batches:
        if ahead is not None:
            yield ahead
        ahead = batch
    assert ahead is not None
    yield ahead


def all_ahead(batches: Iterable[Batch]) -> Iterator[Batch]:
    yield from list(batches)


def converted_ahead(batches: Iterable[Batch]) -> Iterator[Batch]:
    """As prefetchers do that cast and normalise."""
    yield from one_ahead((x.float().double() + (x - x.float().double()), y.clone()) for x, y in batches)


def by_thread(batches: Iterable[Batch]) -> Iterator[Batch]:
    ready: queue.Queue[Batch | None] = queue.Queue(2)

    def fill() -> None:
        for batch in batches:
            ready.put(batch)
        ready.put(None)

    thread = threading.Thread(target=fill)
    thread.start()
    yield from iter(ready.get, None)
    thread.join()


def plain(batches: Iterable[Batch], model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for x, y in batches:
        optimizer.zero_grad()
        loss_of(model(x), y).backward()
        optimizer.step()


def prefetching(reader: Callable[[Iterable[Batch]], Iterator[Batch]]) -> Program:
    def run(batches: Iterable[Batch], model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        plain(reader(batches), model, optimizer)

    return run


def drawn_before_backward(batches: Iterable[Batch], model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    source = iter(batches)
    batch = next(source, None)
    while batch is not None:
        optimizer.zero_grad()
        loss = loss_of(model(batch[0]), batch[1])
        batch = next(source, None)
        loss.backward()
        optimizer.step()


def backward_in_another_order(batches: Iterable[Batch], model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    source = list(batches)
    for i in range(0, len(source), 2):
        optimizer.zero_grad()
        for loss in [loss_of(model(x), y) for x, y in source[i : i + 2]]:
            loss.backward()
        optimizer.step()


def in_chunks(batches: Iterable[Batch], model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Two micro-batches, views of the batch; a single sample is taken twice, for half of it each."""
    for x, y in one_ahead(batches):
        optimizer.zero_grad()
        parts, share = (x[:1], x[1:]) if len(x) > 1 else (x, x), 1.0 if len(x) > 1 else 0.5
        for part, target in zip(parts, (y[:1], y[1:]) if len(x) > 1 else (y, y), strict=True):
            (loss_of(model(part), target) * share * len(part) / len(x)).backward()
        optimizer.step()


def skipping(batches: Iterable[Batch], model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for i, (x, y) in enumerate(one_ahead(batches)):
        if i != 2:
            plain([(x, y)], model, optimizer)


def modules_one_by_one(batches: Iterable[Batch], model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    first, *others = model.children()
    for x, y in one_ahead(batches):
        optimizer.zero_grad()
        hidden = first(x)
        for module in others:
            hidden = module(hidden)
        loss_of(hidden, y).backward()
        optimizer.step()


def two_batches_a_step(batches: Iterable[Batch], model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    for i, (x, y) in enumerate(converted_ahead(batches)):
        loss_of(model(x), y).backward()
        if i % 2:
            optimizer.step()
            optimizer.zero_grad()


def last_first(batches: Iterable[Batch], model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    plain(reversed(list(batches)), model, optimizer)


PROGRAMS: dict[str, Program] = {
    "one ahead": prefetching(one_ahead),
    "all ahead": prefetching(all_ahead),
    "converted": prefetching(converted_ahead),
    "by a thread": prefetching(by_thread),
    "drawn before backward": drawn_before_backward,
    "backward in another order": backward_in_another_order,
    "in chunks": in_chunks,
    "skipping": skipping,
    "modules one by one": modules_one_by_one,
    "two batches a step": two_batches_a_step,
}
ACCUMULATING = {
    "in chunks": 2,
    "backward in another order": 2,
    "two batches a step": 2,
}  # backward passes before a step
EXACT = [
    "allreduce",
    "zero(stage=1)",
    "zero(stage=2)",
    "zero(stage=3)",
    "local_sgd(every=1, start=0)",
    "diloco(every=1, outer_lr=1.0, outer_momentum=0.0)",
    "parameter_server",
    "shared",
]


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def whole_batches() -> list[Batch]:
    return list(zip(SAMPLES.split(BATCH), TARGETS.split(BATCH), strict=True))


def in_one_process(program: Program, epochs: int = 2, model: nn.Module | None = None) -> list[Tensor]:
    model = mlp() if model is None else model
    optimizer = sgd(model)
    for _ in range(epochs):
        program(whole_batches(), model, optimizer)
    return values(model)


def on_ranks(
    program: Program, spec: str, ranks: int = 3, epochs: int = 2, make: Callable[[World], nn.Module] | None = None
) -> list[Tensor]:
    def work(world: World) -> list[Tensor]:
        model = mlp() if make is None else make(world)
        optimizer = sgd(model)
        replica = un.parallel(model, optimizer, spec, world=world)
        data = un.shard((SAMPLES, TARGETS), BATCH, shuffle=False, world=world)
        for _ in range(epochs):
            program(data, model, optimizer)
        found = values(replica.consolidate())
        replica.close()
        return found

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return run_threads(work, ranks)[0]


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_weight_belongs_to_its_batch(name: str) -> None:
    spec = f"allreduce(accumulate={ACCUMULATING.get(name, 1)})"
    assert furthest(on_ranks(PROGRAMS[name], spec), in_one_process(PROGRAMS[name])) < 1e-12


@pytest.mark.parametrize("spec", EXACT)
@pytest.mark.parametrize("name", ["one ahead", "by a thread", "drawn before backward"])
def test_under_every_method_that_is_one_process(spec: str, name: str) -> None:
    assert furthest(on_ranks(PROGRAMS[name], spec), in_one_process(PROGRAMS[name])) < 1e-12


@pytest.mark.parametrize("spec", ["gossip(every=9)", "async_average(every_s=600.0)", "crossbow", "hogwild", "qadam"])
def test_elsewhere_a_gradient_counts_by_the_part_of_its_own_batch(spec: str) -> None:
    """All batches are drawn; then the last one is used, and the first."""

    def work(world: World) -> list[float]:
        model, alone = mlp(), mlp()
        optimizer: torch.optim.Optimizer = torch.optim.Adam(model.parameters()) if spec == "qadam" else sgd(model)
        replica = un.parallel(model, optimizer, spec, world=world)
        batches = list(un.shard((SAMPLES, TARGETS), BATCH, shuffle=False, world=world))
        found = []
        for at, weight in ((3, [1.5, 1.5, 0.0][world.rank]), (0, [9 / 7, 6 / 7, 6 / 7][world.rank])):
            for each in (model, alone):
                each.zero_grad()
                loss_of(each(batches[at][0]), batches[at][1]).backward()
            mine = [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]
            wanted = [p.grad * weight for p in alone.parameters() if p.grad is not None]
            if spec == "qadam":  # the mean over all ranks
                world.all_reduce(wanted, "mean").wait()
            found.append(furthest(mine, wanted))
        replica.close()
        return found

    assert max(map(max, run_threads(work, 3))) < 1e-12


def test_learners_side_by_side_take_the_weights_of_their_batches() -> None:
    def work(world: World) -> None:
        ended = []
        for side_by_side in (False, True):
            model = mlp()
            optimizer = sgd(model)
            replica = un.parallel(model, optimizer, "crossbow", world=world)
            data = un.shard((SAMPLES, TARGETS), BATCH, shuffle=False, name=f"of {side_by_side}", world=world)
            if side_by_side:
                replica.learn(lambda module, batch: loss_of(module(batch[0]), batch[1]), list(data))
            else:
                plain(data, model, optimizer)
            ended.append(values(replica.consolidate()))
            replica.close()
        assert furthest(*ended) < 1e-12

    run_threads(work, 3)


# What else is called between --------------------------------------------------------------------------------------


def test_evaluating_between_forward_and_backward_changes_nothing_and_has_its_own_weights() -> None:
    def work(world: World) -> tuple[list[Tensor], float]:
        model = mlp()
        optimizer, mean = sgd(model), 0.0
        replica = un.parallel(model, optimizer, world=world)
        for i, (x, y) in enumerate(one_ahead(un.shard((SAMPLES, TARGETS), BATCH, shuffle=False, world=world))):
            optimizer.zero_grad()
            loss = loss_of(model(x), y)
            total = torch.zeros(1, dtype=torch.float64)
            held = un.shard((SAMPLES[:11], TARGETS[:11]), 5, shuffle=False, name="held", world=world)
            with torch.no_grad():
                for a, b in one_ahead(held):
                    total += loss_of(model(a), b) * world.weight
                    if i == 1:
                        break
            mean = float(world.all_reduce(total, "mean").wait())
            loss.backward()
            optimizer.step()
        replica.close()
        return values(model), mean

    model = mlp()
    optimizer, mean = sgd(model), 0.0
    for x, y in whole_batches():
        optimizer.zero_grad()
        loss_of(model(x), y).backward()
        parts = [slice(i, min(i + 5, 11)) for i in (0, 5, 10)]
        mean = sum(loss_of(model(SAMPLES[part]), TARGETS[part]).item() for part in parts)
        optimizer.step()
    for found, seen in run_threads(work, 3):
        assert furthest(found, values(model)) < 1e-12
        assert abs(seen - mean) < 1e-12


def test_noise_that_is_no_batch_goes_with_the_batch_in_use() -> None:
    """A discriminator sees a batch, then what a generator makes of noise; the generator has a step of its own."""
    noise = torch.randn(23, 4, generator=torch.Generator().manual_seed(2), dtype=torch.float64)

    def run(batches: Iterable[tuple[Tensor, Tensor]], critic: nn.Module, maker: nn.Module, steps: list[Any]) -> None:
        for x, z in batches:
            fake = maker(z.clone()).expand(len(x), 4)
            steps[0].zero_grad()
            critic(x).square().mean().backward()
            (critic(fake.detach()) - 1).square().mean().backward()
            steps[0].step()
            steps[1].zero_grad()
            critic(fake).square().mean().backward()
            steps[1].step()

    def work(world: World) -> list[Tensor]:
        models = mlp(), mlp()
        steps = [sgd(model) for model in models]
        specs = "allreduce(accumulate=2)", "allreduce"
        replicas = [un.parallel(m, o, s, world=world) for m, o, s in zip(models, steps, specs, strict=True)]
        run(one_ahead(un.shard((SAMPLES, noise), BATCH, shuffle=False, world=world)), *models, steps)
        for replica in replicas:
            replica.close()
        return [x for model in models for x in values(model)]

    models = mlp(), mlp()
    run([(SAMPLES[i : i + 7], noise[i : i + 7]) for i in range(0, 23, 7)], *models, [sgd(model) for model in models])
    assert furthest(run_threads(work, 3)[0], [x for model in models for x in values(model)]) < 1e-12


@pytest.mark.parametrize("name", ["one ahead", "by a thread"])
def test_batch_normalisation_over_all_ranks_takes_the_same_weights(name: str) -> None:
    found = on_ranks(PROGRAMS[name], "allreduce", make=lambda world: un.sync_batch_norm(mlp(norm=True), world))
    assert furthest(found, in_one_process(PROGRAMS[name], model=mlp(norm=True))) < 1e-12


def test_tensors_of_the_program_own_after_the_last_batch_count_as_they_are() -> None:
    def program(batches: Iterable[Batch], model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        plain(one_ahead(batches), model, optimizer)
        plain([(SAMPLES[:4], TARGETS[:4])], model, optimizer)  # the same on every rank

    assert furthest(on_ranks(program, "allreduce"), in_one_process(program)) < 1e-12


# Two shards in one backward pass ----------------------------------------------------------------------------------


PARTS = {23: BATCH, 13: 4}  # a second shard's samples, and its batch size: as many batches


def train_on_two(world: World, model: nn.Module, second: int, weigh: bool, joined: bool = False) -> list[Tensor]:
    optimizer = sgd(model)
    replica = un.parallel(model, optimizer, world=world)
    labelled = un.shard((SAMPLES, TARGETS), BATCH, shuffle=False, world=world)
    others = un.shard(-SAMPLES[:second], PARTS[second], shuffle=False, world=world)
    for (x, y), z in zip(labelled, others, strict=True):
        optimizer.zero_grad()
        if joined:
            out, free = model(torch.cat([x, z])).split([len(x), len(z)])
        else:
            out, free = model(x), model(z)
        one, other = loss_of(out, y), free.square().mean()
        loss = world.weigh(one, (x, y)) + world.weigh(other, z) if weigh else one + other
        loss.backward()
        optimizer.step()
    replica.close()
    return values(model)


def two_in_one_process(second: int) -> list[Tensor]:
    model = mlp()
    optimizer = sgd(model)
    for (x, y), z in zip(whole_batches(), (-SAMPLES[:second]).split(PARTS[second]), strict=True):
        optimizer.zero_grad()
        (loss_of(model(x), y) + model(z).square().mean()).backward()
        optimizer.step()
    return values(model)


@pytest.mark.parametrize("joined", [False, True])
def test_losses_of_two_shards_are_weighed_by_the_program(joined: bool) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = run_threads(lambda world: train_on_two(world, mlp(), 13, True, joined), 3)[0]
    assert furthest(found, two_in_one_process(13)) < 1e-12


def test_two_shards_with_the_same_weights_just_work() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = run_threads(lambda world: train_on_two(world, mlp(), 23, False), 3)[0]
    assert furthest(found, two_in_one_process(23)) < 1e-12


@pytest.mark.parametrize("joined", [False, True])
def test_different_weights_in_one_backward_pass_are_said_once_with_the_remedy(joined: bool) -> None:
    with pytest.warns(UserWarning, match=r"loss = world\.weigh\(loss, batch\)") as said:
        run_threads(lambda world: train_on_two(world, mlp(), 13, False, joined), 3)
    assert len(said) <= 3, "once a rank"


def test_a_loss_of_a_batch_that_is_not_known_is_refused() -> None:
    def work(world: World) -> None:
        x = next(iter(un.shard(SAMPLES, BATCH, world=world)))
        with pytest.raises(ValueError, match=r"not a copy \(x\.float\(\), x\.to\(device\)\)"):
            world.weigh(x.sum(), x.clone())

    run_threads(work, 2)


# The hooks on the model -------------------------------------------------------------------------------------------


def test_a_model_has_them_from_when_parts_are_uneven() -> None:
    def work(world: World) -> None:
        models = [mlp(), mlp()]
        replicas = [un.parallel(models[0], sgd(models[0]), world=world)]
        un.shard(SAMPLES, 2 * world.size, world=world, drop_last=True)
        assert not models[0]._forward_pre_hooks
        un.shard(SAMPLES, 2 * world.size + 1, world=world)
        replicas.append(un.parallel(models[1], sgd(models[1]), world=world))
        assert all(len(model._forward_pre_hooks) == len(model._forward_hooks) == 1 for model in models)
        for replica in replicas:
            replica.close()
        assert not any(model._forward_pre_hooks or model._forward_hooks for model in models)

    run_threads(work, 2)


class Own(nn.Module):
    """What torch.compile makes of it calls hooks beside the compiled code."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = mlp()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)  # type: ignore[no-any-return]


@pytest.mark.parametrize("fullgraph", [False, True])
def test_batches_of_a_compiled_model_are_followed(fullgraph: bool) -> None:
    def make(world: World) -> nn.Module:
        model = Own()
        model.compile(backend="eager", fullgraph=fullgraph)
        return model

    assert furthest(on_ranks(last_first, "allreduce", make=make), in_one_process(last_first, model=Own())) < 1e-12


def test_a_hook_of_the_program_that_copies_batches_hides_none() -> None:
    """Rank 0 has two samples of four, and then two of three."""

    def work(world: World) -> list[Tensor]:
        model = mlp()
        optimizer = sgd(model)
        replica = un.parallel(model, optimizer, world=world)
        model.register_forward_pre_hook(lambda _, inputs: (inputs[0].clone(),))
        last_first(un.shard((SAMPLES[:7], TARGETS[:7]), 4, shuffle=False, world=world), model, optimizer)
        replica.close()
        return values(model)

    alone = mlp()
    plain([(SAMPLES[4:7], TARGETS[4:7]), (SAMPLES[:4], TARGETS[:4])], alone, sgd(alone))
    assert furthest(run_threads(work, 2)[0], values(alone)) < 1e-12


def test_a_model_may_be_compiled_as_one_graph_copied_and_saved(tmp_path: Any) -> None:
    def work(world: World) -> None:
        model = mlp()
        replica = un.parallel(model, sgd(model), world=world)
        world.batch_weights.is_needed = True
        assert model._forward_pre_hooks
        if world.rank == 0:
            torch.compile(model, backend="eager", fullgraph=True)(SAMPLES[:2])
            torch.save(model, tmp_path / "model.pt")
            assert torch.equal(torch.load(tmp_path / "model.pt", weights_only=False)(SAMPLES), model(SAMPLES))
        replica.close()
        assert not model._forward_pre_hooks
        assert not model._forward_hooks

    run_threads(work, 2)
