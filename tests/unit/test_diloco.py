"""DiLoCo and its streaming form against plain PyTorch: N workers simulated in one process, in float64."""

from __future__ import annotations

import copy
import math
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import unisono as un
from unisono import packing
from unisono.background import Handle
from unisono.methods.buckets import split_evenly
from unisono.world import PeerLost, World
from unisono.world.transports.threads import ThreadTransport
from unisono.world.virtual import run_threads

TWO = [["0.weight"], ["0.bias", "2.weight", "2.bias"]]  # what two fragments of the model are


def make(seed: int = 0) -> nn.Module:
    generator = torch.Generator().manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)).double()
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=generator, dtype=torch.float64) / 2)
    return model


def batch(step: int, rank: int) -> Tensor:
    return torch.randn(4, 4, generator=torch.Generator().manual_seed(1000 * step + rank), dtype=torch.float64)


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.02)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, steps: range) -> None:
    for t in steps:
        optimizer.zero_grad()
        model(batch(t, rank)).square().mean().backward()
        optimizer.step()


def params(model: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def close(a: Sequence[Tensor], b: Sequence[Tensor], tolerance: float = 1e-12) -> None:
    for x, y in zip(a, b, strict=True):
        torch.testing.assert_close(x, y, rtol=tolerance, atol=tolerance)


class Outer:
    """Nesterov's momentum as the paper has it, written out: v <- m v + d; x0 <- x0 - lr (d + m v)."""

    def __init__(self, model: nn.Module, lr: float, momentum: float, nesterov: bool) -> None:
        self.lr, self.momentum, self.nesterov = lr, momentum, nesterov
        self.x0 = {name: p.detach().clone() for name, p in model.named_parameters()}
        self.v = {name: torch.zeros_like(x) for name, x in self.x0.items()}

    def step(self, name: str, d: Tensor) -> None:
        self.v[name] = self.momentum * self.v[name] + d
        self.x0[name] -= self.lr * (d + self.momentum * self.v[name] if self.nesterov else self.v[name])


@torch.no_grad()
def reference(
    size: int,
    steps: int,
    every: int,
    *,
    fragments: list[list[str]] | None = None,
    delay: int = 0,
    mix: float = 0.0,
    lr: float = 0.7,
    momentum: float = 0.9,
    nesterov: bool = True,
) -> list[nn.Module]:
    models = [make() for _ in range(size)]
    optimizers = [adam(m) for m in models]
    outer = Outer(models[0], lr, momentum, nesterov)
    fragments = fragments or [[name for name, _ in models[0].named_parameters()]]
    sent: dict[int, tuple[int, dict[str, Tensor]]] = {}
    for t in range(1, steps + 1):
        for rank, (m, o) in enumerate(zip(models, optimizers, strict=True)):
            with torch.enable_grad():
                train(m, o, rank, range(t - 1, t))
        for f, names in enumerate(fragments):
            if (t - (f + 1) * every // len(fragments)) % every == 0:
                moved = {n: torch.stack([outer.x0[n] - m.get_parameter(n) for m in models]).mean(0) for n in names}
                sent[f] = (t + delay, moved)
            if f in sent and sent[f][0] == t:
                for name, d in sent.pop(f)[1].items():
                    outer.step(name, d)
                    for m in models:
                        p = m.get_parameter(name)
                        p.copy_(mix * p + (1 - mix) * outer.x0[name])
    return models


def run(size: int, steps: int, spec: str, seed: int = 0) -> list[list[Tensor]]:
    def work(world: World) -> list[Tensor]:
        model = make(seed)
        optimizer = adam(model)
        replica = un.parallel(model, optimizer, spec, world=world)
        train(model, optimizer, world.rank, range(steps))
        assert replica.step == steps
        replica.close()
        return params(model)

    return run_threads(work, size)


# The method -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize(
    ("settings", "options"),
    [
        ("every=3", {"every": 3}),
        ("every=2, outer_lr=1.0, outer_momentum=0.0", {"every": 2, "lr": 1.0, "momentum": 0.0}),
        ("every=3, nesterov=False, outer_lr=0.5", {"every": 3, "nesterov": False, "lr": 0.5}),
        ("every=4, fragments=2", {"every": 4, "fragments": TWO}),
        ("every=4, delay=2", {"every": 4, "delay": 2, "mix": 0.5}),
        ("every=5, fragments=2, delay=3, mix=0.2", {"every": 5, "fragments": TWO, "delay": 3, "mix": 0.2}),
        ("every=2, fragments=2, delay=1, mix=0", {"every": 2, "fragments": TWO, "delay": 1}),
    ],
)
def test_it_is_what_the_papers_say(size: int, settings: str, options: dict[str, Any]) -> None:
    got = run(size, 13, f"diloco({settings}, bucket_bytes=256)")
    for mine, theirs in zip(got, reference(size, 13, **options), strict=True):
        close(mine, params(theirs))


def swap_by_copies(model: nn.Module) -> None:
    kept = params(model)
    with torch.no_grad():
        for p, value in zip(model.parameters(), kept, strict=True):
            p.mul_(0.5)
            p.copy_(value)


def swap_by_loading(model: nn.Module) -> None:
    kept = copy.deepcopy(model.state_dict())
    model.load_state_dict({name: 0.5 * x for name, x in kept.items()})
    model.load_state_dict(kept)


@pytest.mark.parametrize("swap", [swap_by_copies, swap_by_loading])
@pytest.mark.parametrize("settings", ["every=3", "every=5, fragments=2, delay=3, mix=0.2"])
@pytest.mark.parametrize("size", [1, 2])
def test_other_weights_put_in_to_evaluate_and_out_again_change_nothing(
    size: int, settings: str, swap: Callable[[nn.Module], None]
) -> None:
    def work(world: World) -> list[Tensor]:
        model = make()
        optimizer = adam(model)
        replica = un.parallel(model, optimizer, f"diloco({settings})", world=world)
        for t in range(13):
            train(model, optimizer, world.rank, range(t, t + 1))
            swap(model)
        replica.close()
        return params(model)

    options: dict[str, Any] = {"every": 3}
    if "delay" in settings:
        options = {"every": 5, "fragments": TWO, "delay": 3, "mix": 0.2}
    for mine, theirs in zip(run_threads(work, size), reference(size, 13, **options), strict=True):
        close(mine, params(theirs))


@pytest.mark.parametrize("size", [1, 2])
def test_the_steps_of_several_optimizers_are_no_writes_of_the_program(size: int) -> None:
    def work(world: World) -> list[Tensor]:
        model = make()
        halves = [list(part.parameters()) for part in (model[0], model[2])]  # type: ignore[index]
        optimizers = [torch.optim.AdamW(half, lr=0.02) for half in halves]
        replica: Any = un.parallel(model, optimizers, "diloco(every=3, delay=1)", world=world)
        for t in range(8):
            model.zero_grad()
            model(batch(t, world.rank)).square().mean().backward()
            for optimizer in optimizers:
                optimizer.step()
            assert not any(fragment.written.values for fragment in replica.fragments)
        replica.close()
        return params(model)

    for mine, theirs in zip(run_threads(work, size), reference(size, 8, every=3, delay=1, mix=0.5), strict=True):
        close(mine, params(theirs))


def test_a_plain_outer_optimizer_is_local_sgd() -> None:
    outer = run(3, 9, "diloco(every=3, outer_lr=1.0, outer_momentum=0.0)")
    local = run(3, 9, "local_sgd(every=3, start=0)")
    for a, b in zip(outer, local, strict=True):
        close(a, b, 0.0)


def test_fragments_have_about_equal_bytes_and_hold_every_parameter_once() -> None:
    model = nn.Sequential(*(nn.Linear(n, n) for n in (40, 40, 30, 30, 20, 50, 50, 10)))
    named = list(model.named_parameters())
    parts = split_evenly(named, 3)
    assert sorted(name for part in parts for name, _ in part) == sorted(name for name, _ in named)
    loads = [sum(p.numel() for _, p in part) for part in parts]
    assert max(loads) < 1.2 * min(loads)
    order = [name for name, _ in named]
    for part in parts:
        assert [name for name, _ in part] == sorted((name for name, _ in part), key=order.index)


def test_bytes_are_those_of_an_all_reduce_every_h_windows_also_in_fragments() -> None:
    size, every, windows = 3, 4, 16

    def work(world: World) -> tuple[int, list[int]]:
        model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        replica = un.parallel(model, optimizer, f"diloco(every={every}, fragments=2)", world=world)
        for _ in range(windows):
            optimizer.zero_grad()
            model(torch.ones(2, 32)).square().mean().backward()
            optimizer.step()
        replica.close()
        sent = [r.bytes_sent for r in world.ledger.records if r.tag.startswith("differences")]
        return sum(sent), sent

    for total, sent in run_threads(work, size):
        d = 2 * (32 * 32 + 32)
        assert total == 2 * windows // every * math.ceil(2 * (size - 1) / size * 4 * d / 2)
        assert len(sent) == 2 * windows // every


def test_a_program_trains_while_its_fragments_are_exchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every exchange of a fragment ends only after the program has made another window since it began."""
    exchange = ThreadTransport.all_reduce
    made, trained, held = [0, 0], threading.Condition(), [0, 0]

    def hold(self: ThreadTransport, parts: Any, op: Any) -> float:
        last = exchange(self, parts, op)
        if sum(part.numel() for part in parts) > 20 and made[self.rank]:
            with trained:
                begun = (
                    made[self.rank] + 1
                ) // 4 * 4 - 1  # every fourth window begins an exchange; this thread may be late
                assert trained.wait_for(lambda: made[self.rank] > begun, timeout=60), "the program waits for it"
            held[self.rank] += 1
        return last

    monkeypatch.setattr(ThreadTransport, "all_reduce", hold)

    def work(world: World) -> float:
        model = make()
        optimizer = adam(model)
        replica = un.parallel(model, optimizer, "diloco(every=8, fragments=2, delay=3)", world=world)
        for t in range(34):
            train(model, optimizer, world.rank, range(t, t + 1))
            with trained:
                made[world.rank] += 1
                trained.notify_all()
        replica.close()
        return world.ledger.totals().hidden

    assert all(hidden > 0 for hidden in run_threads(work, 2))
    assert held == [8, 8]


# Reducers, AMP, learning rates -----------------------------------------------------------------------------------


@pytest.mark.parametrize("reducer", ["topk(k=0.2)", "qsgd(bits=8)", "powersgd(rank=1, min_saving=1.0)", "bf16"])
def test_differences_of_fragments_go_through_any_reducer(reducer: str) -> None:
    def work(world: World) -> list[Tensor]:
        model = make()
        optimizer = adam(model)
        spec = f"diloco(every=4, fragments=2, delay=1, reducer={reducer})"
        replica = un.parallel(model, optimizer, spec, world=world)
        train(model, optimizer, world.rank, range(9))
        assert not replica.pending
        anchors = [a.clone() for fragment in replica.fragments for a in fragment.anchors.values()]
        replica.close()
        return anchors

    results = run_threads(work, 3)
    start = [p for _, p in make().named_parameters()]
    for anchors in results:
        close(anchors, results[0], 0.0)
        assert all(torch.isfinite(x).all() for x in anchors)
    assert not torch.equal(results[0][0], start[0])


def test_overflow_on_one_rank_skips_its_step_alone() -> None:
    def work(world: World) -> tuple[list[Tensor], float]:
        model = make()
        optimizer = adam(model)
        replica = un.parallel(model, optimizer, "diloco(every=2)", world=world)
        scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=100)
        replica.watch(scaler)
        for t in range(6):
            optimizer.zero_grad()
            loss = model(batch(t, world.rank)).square().mean()
            scaler.scale(loss * (float("inf") if t == 3 and world.rank == 1 else 1.0)).backward()
            scaler.step(optimizer)
            scaler.update()
        replica.close()
        return params(model), scaler.get_scale()

    results = run_threads(work, 3)
    for rank, (mine, scale) in enumerate(results):
        close(mine, results[0][0], 0.0)
        assert scale == (32.0 if rank == 1 else 64.0)
        assert all(torch.isfinite(x).all() for x in mine)


# The model to evaluate, checkpoints, other worlds ---------------------------------------------------------------------


def test_consolidate_gives_the_mean_also_while_an_exchange_is_under_way() -> None:
    def work(world: World) -> tuple[list[Tensor], list[Tensor]]:
        model = make()
        optimizer = adam(model)
        replica = un.parallel(model, optimizer, "diloco(every=4, delay=2)", world=world)
        train(model, optimizer, world.rank, range(5))
        assert replica.pending
        own, agreed = params(model), params(replica.consolidate())
        close(params(model), own, 0.0)
        replica.close()
        return own, agreed

    results = run_threads(work, 3)
    for _, agreed in results:
        close(agreed, results[0][1], 0.0)
        close(agreed, [torch.stack([r[0][k] for r in results]).mean(0) for k in range(4)])


@pytest.mark.parametrize(
    "settings", ["every=4", "every=4, fragments=2, delay=3", "every=4, delay=2, reducer=topk(k=0.3)"]
)
@pytest.mark.parametrize("at", [5, 8, 9])
def test_a_checkpoint_at_any_window_goes_on_bit_by_bit(tmp_path: Path, at: int, settings: str) -> None:
    def first(world: World) -> tuple[list[Tensor], bytes]:
        model = make()
        optimizer = adam(model)
        replica = un.parallel(model, optimizer, f"diloco({settings})", world=world)
        train(model, optimizer, world.rank, range(at))
        un.save(tmp_path, replica)
        train(model, optimizer, world.rank, range(at, 14))
        ended = params(model), packing.to_bytes(replica.state_dict())
        replica.close()
        return ended

    def second(world: World) -> tuple[list[Tensor], bytes]:
        model = make(seed=3)
        optimizer = adam(model)
        replica = un.parallel(model, optimizer, f"diloco({settings})", world=world)
        train(model, optimizer, world.rank, range(4))  # what it did before does not matter
        un.load(tmp_path, replica)
        assert replica.step == at
        train(model, optimizer, world.rank, range(at, 14))
        ended = params(model), packing.to_bytes(replica.state_dict())
        replica.close()
        return ended

    for (a, a_state), (b, b_state) in zip(run_threads(first, 3), run_threads(second, 3), strict=True):
        close(a, b, 0.0)
        assert a_state == b_state


@pytest.mark.parametrize("new_size", [1, 2, 4])
@pytest.mark.filterwarnings("ignore:.*is of another world size")
def test_a_checkpoint_goes_on_from_the_mean_in_a_world_of_another_size(tmp_path: Path, new_size: int) -> None:
    """Nothing is lost of what the outer optimizer would have seen: with a learning rate of 0 it sees the same."""

    def work(after: Callable[[un.Replica, nn.Module], None], world: World) -> list[Tensor]:
        model = make()
        optimizer = adam(model)
        replica = un.parallel(model, optimizer, "diloco(every=4, fragments=2, delay=1)", world=world)
        after(replica, model)
        for group in optimizer.param_groups:
            group["lr"] = 0.0
        train(model, optimizer, world.rank, range(7, 10))
        ended = params(replica.consolidate())
        replica.close()
        return ended

    def saves(replica: un.Replica, model: nn.Module) -> None:
        train(model, replica.optimizer, replica.world.rank, range(7))
        un.save(tmp_path, replica)

    stayed = run_threads(lambda world: work(saves, world), 3)
    moved = run_threads(lambda world: work(lambda replica, _: un.load(tmp_path, replica), world), new_size)
    for other in (*stayed, *moved):
        close(other, stayed[0])


def test_another_number_of_fragments_than_the_checkpoint_has_is_refused(tmp_path: Path) -> None:
    def work(spec: str, load: bool) -> None:
        model = make()
        optimizer = adam(model)
        replica = un.parallel(model, optimizer, spec, world=World())
        if load:
            un.load(tmp_path, replica)
        else:
            train(model, optimizer, 0, range(3))
            un.save(tmp_path, replica)
        replica.close()

    work("diloco(every=4, fragments=2)", False)
    with pytest.raises(ValueError, match="2 fragment"):
        work("diloco(every=4, fragments=3)", True)


@pytest.mark.parametrize("comes_back", ["as it left", "as a new process"])
@pytest.mark.parametrize("settings", ["every=4", "every=4, fragments=2, delay=2"])
def test_worlds_that_shrink_and_grow(settings: str, comes_back: str) -> None:
    def work(world: World) -> tuple[list[list[Tensor]], list[str], bytes]:
        model = make()
        optimizer = adam(model)
        replica = un.parallel(model, optimizer, f"diloco({settings})", world=world)
        train(model, optimizer, world.rank, range(7))
        seen, told = [params(model)], []
        smaller = world.split([[0, 1, 2], [3]])
        if world.rank < 3:
            told.append(replica.rebind(smaller))
            seen.append(params(model))
            train(model, optimizer, world.rank, range(7, 11))
        elif comes_back == "as a new process":
            replica.close()
            model = make(seed=5)
            optimizer = adam(model)
            replica = un.parallel(model, optimizer, f"diloco({settings})", world=World())
        told.append(replica.rebind(world.split([[0, 1, 2, 3]])))
        train(model, optimizer, world.rank, range(11, 16))
        assert replica.step == 16
        ended = params(replica.consolidate())
        shared = packing.to_bytes(replica.state_dict()["shared"])
        replica.close()
        return [*seen, ended], told, shared

    results = run_threads(work, 4)
    mean = [torch.stack([results[r][0][0][k] for r in range(3)]).mean(0) for k in range(4)]
    for rank, (seen, told, shared) in enumerate(results):
        close(seen[-1], results[0][0][-1], 0.0)
        assert shared == results[0][2]
        assert all("mean of 3 of the" in text for text in told)
        if rank < 3:
            close(seen[1], mean)


@pytest.mark.parametrize("reducer", ["dense", "topk(k=0.3)"])
def test_an_exchange_that_did_not_arrive_everywhere_is_dropped_everywhere(reducer: str) -> None:
    def work(world: World) -> tuple[list[Tensor], str, dict[str, Any]]:
        model = make()
        optimizer = adam(model)
        replica = un.parallel(model, optimizer, f"diloco(every=4, delay=2, reducer={reducer})", world=world)
        train(model, optimizer, world.rank, range(5))
        if world.rank == 1:
            replica.pending[0].handle.wait()
            replica.pending[0].handle = Handle(lost)
        told = replica.rebind(world.split([[0, 1, 2]]))
        assert not replica.pending
        kept = replica.state_dict()["local"]["reducer"][0]
        train(model, optimizer, world.rank, range(5, 11))
        ended = params(replica.consolidate())
        replica.close()
        return ended, told, kept

    def lost() -> bool:
        raise PeerLost("gone")

    results = run_threads(work, 3)
    for ended, told, kept in results:
        close(ended, results[0][0], 0.0)
        assert "did not arrive" in told
        assert not kept


@pytest.mark.parametrize("strategy", ["diloco(every=8)", "local_sgd(every=8, start=0)"])
def test_ranks_that_are_windows_apart_count_by_what_each_has_trained(strategy: str) -> None:
    """One without any window since the last exchange is still where that ended: it does not halve the others' way."""
    windows = (0, 1, 3)

    def work(world: World) -> tuple[list[Tensor], list[Tensor]]:
        model = make()
        optimizer = adam(model)
        replica = un.parallel(model, optimizer, strategy, world=world)
        train(model, optimizer, world.rank, range(windows[world.rank]))
        before = params(model)
        replica.rebind(world.split([[0, 1, 2]]), source=2)
        after = params(model)
        replica.close()
        return before, after

    results = run_threads(work, 3)
    trained = [before for before, _ in results]
    expected = [sum(n * t for n, t in zip(windows, each, strict=True)) / 4 for each in zip(*trained, strict=True)]
    for _, after in results:
        close(after, expected)


def test_switching_to_it_and_back_carries_the_model_on() -> None:
    def work(world: World) -> list[Tensor]:
        model = make()
        optimizer = adam(model)
        replica = un.parallel(model, optimizer, "allreduce", world=world)
        train(model, optimizer, world.rank, range(3))
        before = params(model)
        replica = replica.switch("diloco(every=4, fragments=2, delay=1)")
        close(params(replica.consolidate()), before, 0.0)
        train(model, optimizer, world.rank, range(3, 10))
        mean = params(replica.consolidate())
        replica = replica.switch("local_sgd(every=3, start=0)")
        close(params(model), mean, 0.0)
        train(model, optimizer, world.rank, range(10, 14))
        replica = replica.switch("allreduce")
        train(model, optimizer, world.rank, range(14, 15))
        assert replica.step == 15
        replica.close()
        return params(model)

    results = run_threads(work, 2)
    close(results[0], results[1], 0.0)


def test_a_checkpoint_of_another_strategy_is_refused(tmp_path: Path) -> None:
    model = make()
    optimizer = adam(model)
    replica = un.parallel(model, optimizer, "allreduce", world=World())
    un.save(tmp_path, replica)
    replica.close()
    other = un.parallel(model, optimizer, "diloco(every=4)", world=World())
    with pytest.raises(ValueError, match="switch"):
        un.load(tmp_path, other)
    other.close()


# Settings ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("setting", "word"),
    [
        ("every=0", "every"),
        ("outer_lr=0.0", "outer_lr"),
        ("outer_lr=-1", "outer_lr"),
        ("outer_momentum=1.0", "outer_momentum"),
        ("fragments=0", "fragments"),
        ("fragments=5", "4 trainable tensors"),
        ("fragments=4, every=3", "at most `every`"),
        ("delay=-1", "delay"),
        ("delay=5, every=5", "below `every`"),
        ("mix=1.0", "mix"),
        ("nesterov=1", "nesterov"),
        ("buffers=never", "buffers"),
        ("bucket_bytes=-1", "bucket_bytes"),
    ],
)
def test_impossible_settings_are_refused(setting: str, word: str) -> None:
    model = make()
    with pytest.raises((ValueError, TypeError), match=word):
        un.parallel(model, adam(model), f"diloco({setting})", world=World())
    un.parallel(model, adam(model), "diloco", world=World()).close()  # nothing was left behind
