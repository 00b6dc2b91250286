"""ZeRO with a spare copy of every shard: ranks are lost at every point of a step, in worlds of threads, against plain
PyTorch in one process that saw the same global batches, in fp64."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import unisono as un
from unisono.methods.strategies.zero.replica import ZeroReplica
from unisono.methods.strategies.zero.spare import Spare
from unisono.world import World
from unisono.world.transports import PeerLost, Transport, find_group
from unisono.world.transports.threads import Hub, ThreadTransport
from unisono.world.virtual import run_threads

MODELS = threading.Lock()  # torch.manual_seed is the process's
GLOBAL_BATCH = 12  # samples, over any number of ranks up to 4
LOST_AT = 1  # the step in which a rank is lost
stages = pytest.mark.parametrize("stage", [1, 2, 3])


class Script:
    """What happens to a rank at one of its meetings with the others in a step: it leaves them, before or after it."""

    def __init__(self) -> None:
        self.error: Exception | None = None
        self.at: int | None = None  # which meeting
        self.after = False
        self.met: list[str] = []
        self.is_on = False
        self.is_over = False

    def begin(self, error: Exception | None, at: int | None, *, after: bool) -> None:
        self.error, self.at, self.after, self.met, self.is_on = error, at, after, [], True

    def look(self, what: str, *, after: bool) -> None:
        if self.is_over:
            raise PeerLost("this rank has left")
        if self.is_on and self.error is not None and len(self.met) == self.at and self.after == after:
            self.is_over = True
            raise self.error
        if after:
            self.met.append(what)


class Scripted(ThreadTransport):
    """A rank of a world of threads that leaves it in the middle of something."""

    def __init__(self, hub: Hub, rank: int, script: Script) -> None:
        super().__init__(hub, rank)
        self.script = script

    def _meet(
        self, what: str, sign: Any, item: Any = None, near: torch.Tensor | None = None
    ) -> tuple[list[Any], float]:
        self.script.look(what, after=False)
        found = super()._meet(what, sign, item, near)
        self.script.look(what, after=True)
        return found

    def split(self, groups: Any) -> Transport:
        made = super().split(groups)
        assert isinstance(made, ThreadTransport)
        return Scripted(made.hub, find_group(groups, self.rank, self.size).index(self.rank), self.script)

    def abandon(self, why: Exception) -> None:
        self.hub.lose(str(why))


def make() -> nn.Module:
    with MODELS:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 9), nn.Tanh(), nn.Linear(9, 3), nn.Linear(3, 2))
    model[2].requires_grad_(False)
    return model.double()


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.05, weight_decay=0.1)


def momentum(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1, momentum=0.9)


def step(model: nn.Module, optimizer: Any, t: int, rank: int = 0, size: int = 1) -> None:
    """This rank's part of global batch t; clipping needs the ranks to talk between backward and step."""
    generator = torch.Generator().manual_seed(t)
    x = torch.randn(GLOBAL_BATCH, 4, generator=generator, dtype=torch.float64)
    optimizer.zero_grad()
    model(x.chunk(size)[rank]).square().mean().backward()
    nn.utils.clip_grad_norm_([p for p in model.parameters() if p.requires_grad], 0.1)
    optimizer.step()


Ended = tuple[dict[str, Tensor], list[dict[str, Any]]]


def state_of(model: nn.Module, optimizer: Any) -> Ended:
    states = [optimizer.state[p] for group in optimizer.param_groups for p in group["params"]]
    return dict(model.state_dict()), [dict(state) for state in states]


def reference(make_optimizer: Callable[[nn.Module], Any], steps: int) -> Ended:
    model = make()
    optimizer = make_optimizer(model)
    for t in range(steps):
        step(model, optimizer, t)
    return state_of(model, optimizer)


def assert_same(found: Ended, wanted: Ended) -> None:
    torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-12)


class Run:
    """Train; lose a rank in one step, go on without it, and with a newcomer in its place from step `grows` on."""

    def __init__(
        self,
        stage: int,
        size: int,
        make_optimizer: Callable[[nn.Module], Any] = adam,
        *,
        lost: int,
        grows: int | None = None,
        extra: str = ", spare=True",
    ) -> None:
        self.spec = f"zero(stage={stage}, unit_bytes=300{extra})"
        self.size, self.lost, self.grows, self.make_optimizer = size, lost, grows, make_optimizer
        self.stayed = [r for r in range(size) if r != lost]
        self.steps = 3 if grows is None else grows + 1
        self.wanted = reference(make_optimizer, self.steps)
        self.met: list[str] = []  # what the rank does together with the others in the step that it is lost in
        self.check(None)
        self.agreement = max(i for i, what in enumerate(self.met) if what == "all_reduce")  # the last: all may step

    def check(self, at: int | None, *, behind: int | None = None, source: int = 0, clears: bool = False) -> None:
        """The rank is lost before a meeting of the step (None: never). `behind`: after it, and this rank fails there
        too, where the others go on; `clears`: it makes its gradients zero then."""
        hub = Hub(self.size, 20.0)

        def work(outer: World) -> Ended | None:
            smaller = outer.split([self.stayed, [self.lost]])
            again = outer.split([list(range(self.size))])
            script, fails = Script(), None
            transport = Scripted(hub, outer.rank, script)
            world = training = World(transport, hosts=["localhost"] * self.size, ledger=outer.ledger)
            model = make()
            optimizer = self.make_optimizer(model)
            replica = un.parallel(model, optimizer, self.spec, world=world)
            if outer.rank in (self.lost, behind):
                fails = PeerLost("this rank is lost" if outer.rank == self.lost else "the connection broke")
            while replica.step < self.steps:
                t = replica.step
                if t == LOST_AT and world is training and not script.is_on:
                    script.begin(fails, at, after=behind is not None)
                if t == LOST_AT + 1 and world is training and outer.rank == self.lost and at is None:
                    self.met = list(script.met)
                if t == self.grows and world is smaller:
                    replica.rebind(again, source=self.stayed[0])
                    world = again
                try:
                    step(model, optimizer, t, world.rank, world.size)
                except PeerLost as error:
                    assert world is training
                    script.is_over = True
                    training.abandon(error)  # some wait in a group of which none is lost
                    if outer.rank in (self.lost, behind):
                        training.close()  # the others do not wait for it
                    if outer.rank == self.lost:
                        replica.close()
                        if self.grows is None:
                            return None
                        model, optimizer, replica, world = self.come_anew(again)
                        continue
                    if clears and outer.rank == behind:
                        optimizer.zero_grad(set_to_none=False)
                    replica.rebind(smaller, source=source % smaller.size)
                    world = smaller
                assert world.ledger.step_count == replica.step
            replica.restore()
            replica.close()
            return state_of(model, optimizer)

        for found in run_threads(work, self.size, timeout_s=20.0):
            if found is not None:
                assert_same(found, self.wanted)

    def come_anew(self, world: World) -> tuple[nn.Module, Any, un.Replica, World]:
        """A process that knows nothing joins."""
        model = make()
        for p in model.parameters():
            p.data.zero_()
        optimizer = self.make_optimizer(model)
        replica = un.parallel(model, optimizer, self.spec, world=World())
        replica.rebind(world, source=self.stayed[0])
        return model, optimizer, replica, world


@pytest.fixture
def caught_up(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The steps that ranks took after a loss because others had taken them."""
    found: list[int] = []
    true_catch_up = Spare.catch_up

    def catch_up(self: Spare, steps: int, optimizers: Any) -> None:
        if self.steps < steps:
            found.append(steps)
        true_catch_up(self, steps, optimizers)

    monkeypatch.setattr(Spare, "catch_up", catch_up)
    return found


# Every operation between ranks is two meetings: one may leave before it, in it, or after it.


@stages
def test_a_rank_may_be_lost_before_anything_that_the_ranks_do_together(stage: int, caught_up: list[int]) -> None:
    run = Run(stage, 3, lost=2)
    for at in range(0, len(run.met), 2):
        run.check(at, source=at)
    assert not caught_up  # where nobody has got through, nobody is behind


@stages
def test_a_rank_may_be_lost_and_another_be_behind_the_rest(stage: int, caught_up: list[int]) -> None:
    run = Run(stage, 3, lost=1)
    for at in range(1, len(run.met), 2):
        run.check(at, behind=2 * (at // 2 % 2), source=at // 4)
    assert caught_up == [LOST_AT + 1]  # only at the agreement can one have stepped and another not


@pytest.mark.parametrize(
    ("make_optimizer", "size", "lost"),
    [(adam, 2, 0), (momentum, 3, 2), (adam, 4, 1)],
    ids=["adam-2", "momentum-3", "adam-4"],
)
@stages
def test_a_world_goes_on_without_a_rank_and_with_another(
    stage: int, make_optimizer: Any, size: int, lost: int, caught_up: list[int]
) -> None:
    run = Run(stage, size, make_optimizer, lost=lost, grows=3)
    run.check(run.agreement, behind=run.stayed[-1], source=1)
    assert len(caught_up) == (size > 2)


@stages
def test_a_rank_is_lost_while_exchanges_go_on_behind_the_program(stage: int) -> None:
    run = Run(stage, 3, lost=0, extra=", spare=True, overlap=True")
    for at in range(1, len(run.met), 6):
        run.check(at)
        run.check(at, behind=1)
    run.check(run.agreement, behind=1)


@stages
def test_where_groups_have_copies_a_rank_may_be_lost_at_any_point(stage: int, caught_up: list[int]) -> None:
    """Two groups of two: then three ranks, which are one group, and four again."""
    run = Run(stage, 4, lost=3, grows=3, extra=", within=2")
    for at in range(0, len(run.met), 4):
        run.check(at, source=at)
    assert not caught_up
    agreement = run.agreement - (2 if stage < 3 else 0)  # after it the ranks of a host meet, with their new values
    for behind in (0, 1, 2):
        run.check(agreement, behind=behind, source=1)
    assert caught_up == [LOST_AT + 1] * 2  # rank 2 need not: rank 0 has taken the step, and has the same shard


def test_a_rank_that_cleared_its_gradients_counts_as_lost_where_others_stepped() -> None:
    """It cannot take the step any more; the copies of its shards have taken it."""
    run = Run(2, 4, lost=1)
    run.check(run.agreement, behind=3, clears=True)
    run.check(run.agreement, behind=3, clears=True, source=2)  # it may be the source: the shards say where to go on


# What a program may do to gradients and values: the copy follows ---------------------------------------------------

Loop = Callable[[nn.Module, Any, Any, int, Callable[[int], Tensor]], None]  # model, optimizer, replica, t, batch


def batch_for(rank: int, size: int) -> Callable[[int], Tensor]:
    def batch(t: int) -> Tensor:
        x = torch.randn(GLOBAL_BATCH, 4, generator=torch.Generator().manual_seed(t), dtype=torch.float64)
        return x.chunk(size)[rank]

    return batch


def clamped(model: nn.Module, optimizer: Any, replica: Any, t: int, batch: Callable[[int], Tensor]) -> None:
    optimizer.zero_grad()
    model(batch(t)).square().mean().backward()
    nn.utils.clip_grad_value_([p for p in model.parameters() if p.requires_grad], 0.02)
    optimizer.step()


def in_two_passes(model: nn.Module, optimizer: Any, replica: Any, t: int, batch: Callable[[int], Tensor]) -> None:
    model.zero_grad()
    with nullcontext() if replica is None else replica.no_sync():
        model(batch(t)).square().mean().backward()
    model(batch(t + 50)).square().mean().backward()
    optimizer.step()


def in_two_windows(model: nn.Module, optimizer: Any, replica: Any, t: int, batch: Callable[[int], Tensor]) -> None:
    """Gradients that add up because nobody clears them."""
    if t % 3 == 0:
        optimizer.zero_grad()
    model(batch(t)).square().mean().backward()
    optimizer.step()


def with_unused(model: nn.Module, optimizer: Any, replica: Any, t: int, batch: Callable[[int], Tensor]) -> None:
    """The first layer learns in some steps only."""
    optimizer.zero_grad()
    x = model[0](batch(t)) if t % 2 else torch.nn.functional.pad(batch(t), (0, 5))
    model[1:](x).square().mean().backward()
    optimizer.step()


def with_dropped(model: nn.Module, optimizer: Any, replica: Any, t: int, batch: Callable[[int], Tensor]) -> None:
    """A gradient is taken away after backward."""
    optimizer.zero_grad()
    model(batch(t)).square().mean().backward()
    if t % 2:
        model[0].weight.grad = None
    optimizer.step()


def changed_in_place(model: nn.Module, optimizer: Any, replica: Any, t: int, batch: Callable[[int], Tensor]) -> None:
    step_plainly(model, optimizer, replica, t, batch)
    with torch.no_grad():
        for p in model.parameters():
            p.clamp_(-0.3, 0.3)


def loaded(model: nn.Module, optimizer: Any, replica: Any, t: int, batch: Callable[[int], Tensor]) -> None:
    step_plainly(model, optimizer, replica, t, batch)
    model.load_state_dict({name: 0.9 * x for name, x in model.state_dict().items()})


def step_plainly(model: nn.Module, optimizer: Any, replica: Any, t: int, batch: Callable[[int], Tensor]) -> None:
    optimizer.zero_grad()
    model(batch(t)).square().mean().backward()
    optimizer.step()


class Scaled:
    """AMP, with an overflow on one rank in step 1."""

    def __init__(self) -> None:
        self.scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)

    def __call__(self, model: nn.Module, optimizer: Any, replica: Any, t: int, batch: Callable[[int], Tensor]) -> None:
        optimizer.zero_grad()
        loss = model(batch(t)).square().mean()
        if t == 1 and (replica is None or replica.world.rank == 2):
            loss = loss * torch.inf
        self.scaler.scale(loss).backward()
        self.scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_([p for p in model.parameters() if p.requires_grad], 0.1)
        self.scaler.step(optimizer)
        self.scaler.update()


def always(loop: Loop) -> Callable[[], Loop]:
    def get() -> Loop:
        return loop

    get.__name__ = loop.__name__  # type: ignore[attr-defined]
    return get


def compare_after_a_loss(make_loop: Callable[[], Loop], spec: str, *, lost: int, build: Any = make) -> None:
    """Three ranks; one leaves between two steps."""

    def work(world: World) -> Ended | None:
        stayed = [r for r in range(3) if r != lost]
        smaller = world.split([stayed, [lost]])
        model, loop = build(), make_loop()
        optimizer = adam(model)
        replica = un.parallel(model, optimizer, spec, world=world)
        for t in range(3):
            loop(model, optimizer, replica, t, batch_for(world.rank, 3))
        if world.rank == lost:
            return None
        assert "split over 2 ranks instead of 3" in replica.rebind(smaller)
        for t in range(3, 5):
            loop(model, optimizer, replica, t, batch_for(smaller.rank, 2))
        replica.restore()
        replica.close()
        return state_of(model, optimizer)

    model, loop = build(), make_loop()
    optimizer = adam(model)
    for t in range(5):
        loop(model, optimizer, None, t, batch_for(0, 1))
    for found in run_threads(work, 3):
        if found is not None:
            assert_same(found, state_of(model, optimizer))


@pytest.mark.parametrize(
    ("make_loop", "settings"),
    [
        (always(clamped), "stage=1"),
        (always(in_two_passes), "stage=2"),
        (always(in_two_passes), "stage=1"),
        (always(in_two_windows), "stage=3"),
        (always(with_unused), "stage=2, unit_bytes=300"),
        (always(with_dropped), "stage=2"),
        (always(changed_in_place), "stage=2"),
        (always(loaded), "stage=1"),
        (always(loaded), "stage=3"),
        (Scaled, "stage=2"),
        (Scaled, "stage=3, overlap=True"),
    ],
)
def test_the_copy_follows_what_a_program_does(make_loop: Callable[[], Loop], settings: str) -> None:
    compare_after_a_loss(make_loop, f"zero({settings}, spare=True)", lost=1)


@pytest.mark.parametrize("lost", [0, 1])
@pytest.mark.parametrize("make_loop", [always(step_plainly), Scaled])
def test_fewer_elements_than_ranks(make_loop: Callable[[], Loop], lost: int) -> None:
    """Rank 0 has all elements, the others have none."""

    def build() -> nn.Module:
        with MODELS:
            torch.manual_seed(0)
            return nn.Linear(4, 1, bias=False).double()

    compare_after_a_loss(make_loop, "zero(spare=True)", lost=lost, build=build)


@stages
def test_a_loaded_checkpoint_reaches_the_copies(stage: int, tmp_path: Path) -> None:
    def work(world: World) -> Ended | None:
        smaller = world.split([[0, 2], [1]])
        model = make()
        optimizer = adam(model)
        replica = un.parallel(model, optimizer, f"zero(stage={stage}, spare=True)", world=world)
        for t in range(2):
            step(model, optimizer, t, world.rank, 3)
        un.save(tmp_path, replica)
        step(model, optimizer, 70, world.rank, 3)
        un.load(tmp_path, replica)
        if world.rank == 1:
            return None
        assert replica.rebind(smaller).startswith("step 2")
        step(model, optimizer, 2, smaller.rank, 2)
        replica.restore()
        replica.close()
        return state_of(model, optimizer)

    for found in run_threads(work, 3):
        if found is not None:
            assert_same(found, reference(adam, 3))


@pytest.mark.parametrize("stage", [2, 3])
def test_in_bf16_the_copy_has_the_same_bits(stage: int) -> None:
    def work(world: World) -> tuple[list[Tensor], list[Tensor]]:
        model = make().float()
        optimizer = adam(model)
        spec = f"zero(stage={stage}, precision=bf16, spare=True)"
        replica = un.parallel(model, optimizer, spec, world=world)
        for t in range(3):
            step_plainly(model, optimizer, replica, t, lambda t: batch_for(world.rank, 3)(t).float())
        assert isinstance(replica, ZeroReplica)
        units = [unit for unit in replica.units if unit.trainable]
        return [both_of(unit, optimizer) for unit in units], [both_of(unit.spare, optimizer) for unit in units]

    def both_of(unit: Any, optimizer: Any) -> Any:
        assert unit.master.dtype == torch.float32
        return unit.master.clone(), [optimizer.state[leaf]["exp_avg_sq"].clone() for leaf in unit.leaves]

    results = run_threads(work, 3)
    for rank, (own, _) in enumerate(results):
        torch.testing.assert_close(results[(rank + 1) % 3][1], own, rtol=0, atol=0)


# What is refused, what is lost, what it costs ----------------------------------------------------------------------


def test_two_neighbours_lost_at_once_are_named_and_two_others_are_not_missed() -> None:
    def work(world: World) -> Ended | None:
        neighbours, others = world.split([[0, 3], [1, 2]]), world.split([[1, 3], [0, 2]])
        model = make()
        optimizer = adam(model)
        replica = un.parallel(model, optimizer, "zero(stage=3, spare=True)", world=world)
        for t in range(2):
            step(model, optimizer, t, world.rank, 4)
        if world.rank in (0, 3):
            wanted = r"parts that rank\(s\) 1 of the former 4 .* on the rank\(s\) after them, 2: .* last checkpoint"
            with pytest.raises(ValueError, match=wanted):
                replica.rebind(neighbours)
        world.barrier()
        if world.rank in (0, 2):
            return None
        replica.rebind(others)  # the refusal has changed nothing
        step(model, optimizer, 2, others.rank, 2)
        replica.restore()
        replica.close()
        return state_of(model, optimizer)

    for found in run_threads(work, 4):
        if found is not None:
            assert_same(found, reference(adam, 3))


def test_a_rank_that_broke_off_inside_the_step_counts_as_lost() -> None:
    class AdamW(torch.optim.AdamW):
        breaks = False

        def step(self, closure: Any = None) -> Any:
            if self.breaks:
                with torch.no_grad():
                    self.param_groups[0]["params"][0].add_(1.0)
                raise MemoryError
            return super().step(closure)

    def work(world: World) -> Ended:
        again = world.split([[0, 1, 2]])
        model = make()
        optimizer = AdamW([p for p in model.parameters() if p.requires_grad], lr=0.05, weight_decay=0.1)
        replica = un.parallel(model, optimizer, "zero(stage=3, spare=True)", world=world)
        for t in range(2):
            optimizer.breaks = t == 1 and world.rank == 1
            with suppress(MemoryError):
                step(model, optimizer, t, world.rank, 3)
        optimizer.breaks = False
        assert replica.rebind(again, source=1).startswith("step 2")
        step(model, optimizer, 2, world.rank, 3)
        replica.restore()
        replica.close()
        return state_of(model, optimizer)

    for found in run_threads(work, 3):
        assert_same(found, reference(adam, 3))


def test_a_rank_that_comes_back_with_old_shards_gives_none_of_them() -> None:
    """It was in a world of as many ranks, and its shards have taken as many steps."""
    worlds = [([0, 1, 2], 3), ([0, 1, 3], 2), ([0, 1, 2], 3)]

    def work(world: World) -> Ended | None:
        first, second, third = (world.split([ranks, [rest]]) for ranks, rest in worlds)
        model = make()
        optimizer = adam(model)
        replica = un.parallel(model, optimizer, "zero(stage=3, spare=True)", world=first if world.rank < 3 else World())
        if world.rank < 3:
            train(model, optimizer, range(2), first)
        if world.rank != 2:
            replica.rebind(second)
            train(model, optimizer, range(2, 4), second)
        if world.rank == 3:
            return None
        replica.rebind(third)
        train(model, optimizer, range(4, 5), third)
        replica.restore()
        replica.close()
        return state_of(model, optimizer)

    def train(model: nn.Module, optimizer: Any, steps: range, world: World) -> None:
        for t in steps:
            step(model, optimizer, t, world.rank, 3)

    for found in run_threads(work, 4):
        if found is not None:
            assert_same(found, reference(adam, 5))


def test_a_step_inside_a_window_is_refused() -> None:
    def work(world: World) -> None:
        model = make()
        optimizer = adam(model)
        replica = un.parallel(model, optimizer, "zero(spare=True)", world=world)
        with replica.no_sync():
            model(torch.randn(2, 4, dtype=torch.float64)).square().mean().backward()
            with pytest.raises(RuntimeError, match="whole window"):
                optimizer.step()
        replica.close()

    run_threads(work, 2)


def test_a_step_sends_a_reduced_gradient_more_and_no_state() -> None:
    def work(world: World) -> list[int]:
        sent = []
        for spare in (False, True):
            model = make()
            optimizer = adam(model)
            replica = un.parallel(model, optimizer, f"zero(stage=2, spare={spare})", world=world)
            step(model, optimizer, 0, world.rank, 3)
            before = world.ledger.totals()
            step(model, optimizer, 1, world.rank, 3)
            sent.append((world.ledger.totals() - before).bytes_sent)
            assert isinstance(replica, ZeroReplica)
            shards = 8 * sum(unit.shard_length for unit in replica.units)
            replica.close()
        return [sent[1] - sent[0], shards]

    for more, shards in run_threads(work, 3):
        # The agreement is an all-reduce of one byte. Copies need values of each rank's own, which are gathered from two
        # others; without, all have one memory, and meet twice with 32 bytes.
        assert more == shards + 2 + 2 * shards - 2 * math.ceil(2 * 2 / 3 * 32)
