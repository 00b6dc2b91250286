"""A reducer at work on a model: buckets under way together, states that follow their parameters."""

from __future__ import annotations

import itertools
import math
import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import unisono as un
from unisono.methods.buckets import Bucket
from unisono.methods.exchange.reduction import Reduction
from unisono.methods.reducer import Reduced, Reducer, Stages, State, rescale, residual_like, staged
from unisono.methods.spec import build
from unisono.methods.strategies.allreduce import allreduce
from unisono.world import World
from unisono.world.virtual import run_threads


def halves(log: list[Any] | None = None, waits: Any = None) -> Reducer:
    """A reducer to test with: sends half of every value and keeps the other half; counts its steps."""

    def init(bucket: Bucket) -> State:
        return {
            "residual": residual_like(bucket),
            "lr": list(bucket.lr),
            "step": 0,
            "inner": {"seen": [0] * len(bucket.tensors)},
        }

    def stages(bucket: Bucket, state: State, world: World) -> Stages:
        rescale(bucket, state)
        if waits is not None:
            waits(bucket, world)
        if log is not None:
            log.append(("begin", world.rank, bucket.index))
        line = (bucket.flat + state["residual"]) / 2
        state["residual"].copy_(line)
        handle = world.all_reduce(line, "mean", tag=bucket.tag)
        yield
        handle.wait()
        if log is not None:
            log.append(("end", world.rank, bucket.index))
        state["step"] += 1
        state["inner"]["seen"] = [n + 1 for n in state["inner"]["seen"]]
        return Reduced(bucket.views(line)), state

    return staged(init, stages, memory=True)


def model_of(widths: list[int]) -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Linear(a, b, bias=False).double() for a, b in itertools.pairwise(widths)]
    return nn.Sequential(*layers)


MODELS = threading.Lock()


def started(world: World, reducer: Reducer, widths: list[int], **settings: Any) -> tuple[nn.Sequential, Any, Any]:
    with MODELS:
        model = model_of(widths)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return model, optimizer, un.parallel(model, optimizer, allreduce(reducer=reducer, **settings), world=world)


def x_of(rank: int, step: int, width: int = 4) -> Tensor:
    return torch.randn(3, width, generator=torch.Generator().manual_seed(10 * step + rank), dtype=torch.float64)


def train(model: nn.Module, optimizer: Any, world: World, steps: range, rank: int | None = None) -> None:
    for t in steps:
        optimizer.zero_grad()
        model(x_of(world.rank if rank is None else rank, t)).square().mean().backward()
        optimizer.step()


def residuals(replica: Any) -> dict[str, Tensor]:
    local = replica.state_dict()["local"]["reducer"]
    return {name: entries["*residual"].clone() for name, entries in local.items()}


# Buckets under way together ------------------------------------------------------------------------------------


def test_a_bucket_is_begun_before_the_one_ahead_of_it_is_finished() -> None:
    def work(world: World) -> list[Any]:
        log: list[Any] = []
        model, optimizer, replica = started(world, halves(log), [4, 4, 4, 4], bucket_bytes=1, overlap=False)
        train(model, optimizer, world, range(1))
        replica.close()
        return [(what, bucket) for what, _, bucket in log]

    together = [("begin", 0), ("begin", 1), ("end", 0), ("begin", 2), ("end", 1), ("end", 2)]
    assert run_threads(work, 2, hosts=["a", "b"]) == [together] * 2
    one_by_one = [(what, bucket) for bucket in range(3) for what in ("begin", "end")]
    assert run_threads(work, 1) == [one_by_one], "where nothing travels, nothing is gained"


def test_compression_goes_on_while_the_bucket_ahead_travels() -> None:
    """Rank 1 takes up bucket 0 only when rank 0 compresses bucket 1: with one bucket at a time, both would wait."""
    compressing = threading.Event()

    def waits(bucket: Bucket, world: World) -> None:
        if world.rank == 0 and bucket.index == 1:
            compressing.set()
        if world.rank == 1 and bucket.index == 0:
            assert compressing.wait(20), "rank 0 waited for bucket 0 before it took up bucket 1"

    def work(world: World) -> None:
        model, optimizer, replica = started(world, halves(waits=waits), [4, 4, 4], bucket_bytes=1, overlap=False)
        train(model, optimizer, world, range(1))
        replica.close()

    run_threads(work, 2, hosts=["a", "b"])


def test_backward_goes_on_while_a_bucket_is_compressed() -> None:
    """The first bucket's compression ends only when backward has reached the first layer."""
    reached = {0: threading.Event(), 1: threading.Event()}

    def waits(bucket: Bucket, world: World) -> None:
        if bucket.index == 0:
            assert reached[world.rank].wait(20), "backward stood still while a bucket was compressed"

    def work(world: World) -> None:
        model, optimizer, replica = started(world, halves(waits=waits), [4, 4, 4], bucket_bytes=1, overlap=True)
        model[0].weight.register_hook(lambda grad: reached[world.rank].set())
        train(model, optimizer, world, range(1))
        replica.close()

    run_threads(work, 2, hosts=["a", "b"])


def test_a_reducer_of_one_function_still_works() -> None:
    def reduce(bucket: Bucket, state: State, world: World) -> tuple[Reduced, State]:
        votes = [world.all_reduce(g.sign(), "sum") for g in bucket.tensors]
        return Reduced([v.wait().sign() for v in votes]), state

    def work(world: World) -> list[Tensor]:
        model, _, _ = started(world, Reducer(lambda bucket: {}, reduce), [4, 4, 4])
        model(x_of(world.rank, 0)).square().mean().backward()
        return [p.grad.clone() for p in model.parameters()]

    for grads in run_threads(work, 2):
        assert all(set(g.unique().tolist()) <= {-1.0, 0.0, 1.0} for g in grads)


# States follow their parameters ----------------------------------------------------------------------------------


def test_freezing_and_unfreezing_keeps_every_parameters_residual() -> None:
    """A frozen parameter leaves its bucket; what it had still to send waits for it."""

    def work(world: World) -> None:
        model, optimizer, replica = started(world, halves(), [4, 4, 4, 4], bucket_bytes=200)
        train(model, optimizer, world, range(2))
        before = residuals(replica)
        model[1].weight.requires_grad_(False)
        train(model, optimizer, world, range(2, 4))
        frozen = residuals(replica)
        assert torch.equal(frozen["1.weight"], before["1.weight"])
        assert not torch.equal(frozen["0.weight"], before["0.weight"])
        model[1].weight.requires_grad_(True)
        train(model, optimizer, world, range(4, 5))
        assert not torch.equal(residuals(replica)["1.weight"], before["1.weight"])
        each = replica.state_dict()["shared"]["reducer"]["each"]
        counted = {"0.weight": 5, "1.weight": 3, "2.weight": 5}  # also where a bucket was laid out anew
        assert {name: entries["inner/seen"] for name, entries in each.items()} == counted
        assert {name: entries["step"] for name, entries in each.items()} == counted
        replica.close()

    run_threads(work, 2)


@pytest.mark.parametrize("size", [1, 2])
def test_a_parameter_that_no_rank_used_still_gets_what_was_kept_of_it(size: int) -> None:
    def work(world: World) -> tuple[Tensor, Tensor]:
        model, optimizer, replica = started(world, halves(), [4, 4, 4])
        for layer in model:
            layer(x_of(world.rank, 0)).square().mean().backward()
        before = residuals(replica)["1.weight"]
        optimizer.zero_grad()
        model[0](x_of(world.rank, 1)).square().mean().backward()
        assert model[1].weight.grad is not None
        found = model[1].weight.grad.clone()
        for _ in range(80):  # until nothing is left
            optimizer.zero_grad()
            model[0](x_of(world.rank, 1)).square().mean().backward()
            found += 0 if model[1].weight.grad is None else model[1].weight.grad
        replica.close()
        return before, found

    results = run_threads(work, size)
    expected = torch.stack([before for before, _ in results]).mean(0)
    torch.testing.assert_close(results[0][1], expected, rtol=1e-12, atol=1e-12)


def test_a_saved_state_fits_other_buckets() -> None:
    def work(world: World) -> None:
        model, optimizer, replica = started(world, halves(), [4, 4, 4, 4], bucket_bytes=1)
        train(model, optimizer, world, range(3))
        saved = replica.state_dict()
        other, other_optimizer, again = started(world, halves(), [4, 4, 4, 4])
        other.load_state_dict(model.state_dict())
        again.load_state_dict(saved)
        train(model, optimizer, world, range(3, 5))
        train(other, other_optimizer, world, range(3, 5))
        for a, b in zip(model.parameters(), other.parameters(), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
        for name, residual in residuals(replica).items():
            torch.testing.assert_close(residual, residuals(again)[name], rtol=1e-12, atol=1e-12)
        for replica_ in (replica, again):
            replica_.close()

    run_threads(work, 2)


def test_memory_order_does_not_matter_for_a_saved_state() -> None:
    param = torch.arange(24.0).view(1, 2, 3, 4)
    bucket = Bucket(0, [("w", param)], World().empty)
    optimizer = torch.optim.SGD([param.requires_grad_()], lr=0.1)
    reduction = Reduction(halves(), optimizer, lambda world: None, "gradients")
    reduction.set_buckets([bucket])
    bucket.tensors[0].copy_(param.detach())
    reduction.begin(bucket, World())
    reduction.drain()
    saved = reduction.state_dict()
    last = param.detach().to(memory_format=torch.channels_last).requires_grad_()
    other = Reduction(halves(), torch.optim.SGD([last], lr=0.1), lambda world: None, "gradients")
    turned = Bucket(0, [("w", last)], World().empty)
    other.set_buckets([turned])
    other.load_state_dict(saved["shared"], [saved["local"]])
    turned.tensors[0].zero_()
    other.begin(turned, World())
    other.drain()
    assert torch.equal(turned.tensors[0], param.detach() / 4)


@pytest.mark.parametrize(("old", "new"), [(3, 2), (2, 3), (2, 1), (1, 3)])
def test_at_another_world_size_what_was_still_to_be_sent_is_the_same(old: int, new: int) -> None:
    """The mean over the ranks of what they keep; and the sum of all that is sent later."""

    def first(world: World) -> dict[str, Any]:
        model, optimizer, replica = started(world, halves(), [4, 4])
        train(model, optimizer, world, range(3))
        return {"state": replica.state_dict(), "residual": residuals(replica)["0.weight"]}

    parts = run_threads(first, old)
    before = torch.stack([part["residual"] for part in parts]).mean(0)
    saved = {"shared": parts[0]["state"]["shared"], "locals": [part["state"]["local"] for part in parts]}

    def second(world: World) -> Tensor:
        _, _, replica = started(world, halves(), [4, 4])
        replica.load_state_dict(saved, same_world=False)
        assert replica.step == 3
        return residuals(replica)["0.weight"]

    after = torch.stack(run_threads(second, new)).mean(0)
    torch.testing.assert_close(after, before, rtol=1e-14, atol=1e-14)


def test_a_lost_ranks_residual_is_told_and_the_others_keep_theirs() -> None:
    def work(world: World) -> tuple[list[str], Tensor, Tensor] | None:
        model, optimizer, replica = started(world, halves(), [4, 4])
        train(model, optimizer, world, range(2))
        before = residuals(replica)["0.weight"]
        smaller = world.split([[0, 1], [2]])
        if world.rank == 2:
            smaller = None
        else:
            told = [replica.rebind(smaller)]
            torch.testing.assert_close(residuals(replica)["0.weight"], before * 2 / 3)
            train(model, optimizer, smaller, range(2, 4))
            before = residuals(replica)["0.weight"]
        again = world.split([[0, 1, 2]])
        if smaller is None:
            replica.close()
            model, optimizer, replica = started(World(), halves(), [4, 4])
            told = []
            before = torch.zeros_like(before)
        told.append(replica.rebind(again))
        after = residuals(replica).get("0.weight", torch.zeros_like(before))
        torch.testing.assert_close(after, before * 3 / 2)
        train(model, optimizer, again, range(4, 6))
        assert replica.state_dict()["shared"]["reducer"]["each"]["0.weight"]["step"] == 6
        return told

    for rank, told in enumerate(run_threads(work, 3)):
        if rank < 2:
            assert "1 lost rank(s) is gone" in told[0]
            assert "2 of the 3 former ranks" in told[0]
        assert "2 of the 2 former ranks" in told[-1]
        assert "lost" not in told[-1]


def test_in_a_smaller_world_what_is_unsent_is_scaled_and_the_size_is_met_anew() -> None:
    """What docs/writing-a-reducer.md promises of a state where ranks are lost."""
    met: dict[tuple[int, int], tuple[float, float, int]] = {}

    def init(bucket: Bucket) -> State:
        return {name: torch.zeros_like(bucket.flat) for name in ("residual", "velocity", "other")} | {"size": 0}

    def stages(bucket: Bucket, state: State, world: World) -> Stages:
        met[world.size, world.rank] = (*(float(state[name][0]) for name in ("residual", "other")), state["size"])
        handle = world.all_reduce(bucket.flat, "mean")
        yield
        handle.wait()
        kept = {name: torch.full_like(bucket.flat, 1.0 + world.rank) for name in ("residual", "velocity", "other")}
        return Reduced(bucket.tensors), kept | {"size": world.size}

    def work(world: World) -> None:
        model = nn.Linear(3, 1, bias=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        replica = un.parallel(model, optimizer, allreduce(reducer=staged(init, stages)), world=world)
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
        smaller = world.split([[0, 2], [1], [3]])
        if world.rank in (0, 2):
            replica.rebind(smaller)
            model(torch.ones(1, 3)).sum().backward()
            optimizer.step()
        replica.close()

    run_threads(work, 4)
    assert met[2, 0] == (1.0 * 2 / 4, 1.0, 0)
    assert met[2, 1] == (3.0 * 2 / 4, 3.0, 0)


def test_a_state_that_another_reducer_kept_is_not_dropped_silently() -> None:
    model, optimizer, replica = started(World(), halves(), [4, 4])
    train(model, optimizer, World(), range(2))
    saved = replica.state_dict()
    kept = saved["local"]["reducer"]["0.weight"]
    kept["*velocity"] = kept["*residual"].clone()  # a residual would go out with the next gradient
    replica.close()

    def plain(bucket: Bucket, state: State, world: World) -> tuple[Reduced, State]:
        return Reduced(bucket.tensors), state

    model, optimizer, replica = started(World(), Reducer(lambda bucket: {}, plain), [4, 4])
    replica.load_state_dict(saved)
    with pytest.warns(UserWarning, match=r"\(velocity\): it is dropped"):
        train(model, optimizer, World(), range(1))


@pytest.mark.parametrize(
    ("old", "new"),
    [("topk(k=0.1)", "warmup(topk(k=0.1), steps=9)"), ("accordion(topk(k=0.3), topk(k=0.1), every=1)", "onebit")],
)
def test_a_residual_finds_its_place_in_another_reducer(old: str, new: str) -> None:
    def total(replica: Any) -> Tensor:
        local = replica.state_dict()["local"]["reducer"]["0.weight"]
        return torch.stack([x for path, x in local.items() if path.endswith("residual")]).sum(0)

    model, optimizer, replica = started(World(), build(old, kind="reducer"), [4, 4])
    train(model, optimizer, World(), range(6))
    before = total(replica).clone()
    assert before.abs().sum() > 0
    replica = replica.switch(new)
    seen = []
    replica.reduction.reducer = replica.reduction.reducer._replace(
        stages=None, reduce=lambda bucket, state, world: seen.append(state) or (Reduced(bucket.tensors), state)
    )
    train(model, optimizer, World(), range(6, 7))
    torch.testing.assert_close(total(replica), before)


def test_a_state_of_a_wrong_shape_is_named() -> None:
    bad = Reducer(lambda bucket: {"velocity": torch.zeros(3)}, lambda bucket, state, world: None)  # type: ignore
    model, optimizer, _ = started(World(), bad, [4, 4])
    with pytest.raises(TypeError, match="velocity"):
        train(model, optimizer, World(), range(1))


# Learning rates --------------------------------------------------------------------------------------------------


def test_a_residual_counts_at_the_rate_it_was_met_with() -> None:
    model, optimizer, replica = started(World(), halves(), [4, 4])
    train(model, optimizer, World(), range(1))
    before = residuals(replica)["0.weight"]
    optimizer.param_groups[0]["lr"] = 0.05
    optimizer.zero_grad()
    (model(x_of(0, 1)) * 0).sum().backward()
    torch.testing.assert_close(residuals(replica)["0.weight"], before * 2 / 2)  # doubled, and half of it sent
    torch.testing.assert_close(model[0].weight.grad, before)


def test_ranks_agree_that_a_learning_rate_fell() -> None:
    """Also where only one rank's fell: what follows from it changes collectives."""

    def work(world: World) -> list[bool]:
        seen: list[bool] = []
        reducer = halves(waits=lambda bucket, _: seen.append(bucket.decayed))
        model, optimizer, replica = started(world, reducer, [4, 4])
        for t in range(5):
            if t == 2 and world.rank == 1:
                optimizer.param_groups[0]["lr"] = 0.01
            train(model, optimizer, world, range(t, t + 1))
        replica.close()
        return seen

    assert run_threads(work, 2) == [[False, False, False, True, False]] * 2


def test_a_tensor_as_learning_rate_is_read() -> None:
    param = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([param], lr=torch.tensor(0.25))
    bucket = Bucket(0, [("w", param)], World().empty)
    reduction = Reduction(halves(), optimizer, lambda world: None, "gradients")
    reduction.set_buckets([bucket])
    reduction.begin(bucket, World())
    assert bucket.lr == [0.25]


@pytest.mark.parametrize("by_hand", [False, True])
def test_a_window_that_ends_after_the_scaler_has_unscaled_counts_what_was_kept_as_it_does(by_hand: bool) -> None:
    """The short last window of an epoch, and gradients that the program puts there itself: they end in the step."""
    weight = torch.nn.Linear(5, 4, bias=False).double()
    with torch.no_grad():
        weight.weight.zero_()
    optimizer, scaler = torch.optim.SGD(weight.parameters(), lr=0.1), torch.amp.GradScaler("cpu", init_scale=65536.0)
    un.parallel(weight, optimizer, "allreduce(reducer=topk(k=0.2), accumulate=2)", world=World())
    given = torch.randn(5, 4, 5, generator=torch.Generator().manual_seed(0)).double()
    kept, expected = torch.zeros(4, 5).double(), torch.zeros(4, 5).double()
    for window in ([0, 1], [2, 3], [4]):
        optimizer.zero_grad()
        for i in window:
            loss = scaler.scale((weight.weight * given[i]).sum())
            if by_hand and i == 4:
                [weight.weight.grad] = torch.autograd.grad(loss, [weight.weight])
            else:
                loss.backward()
        scaler.step(optimizer)
        scaler.update()
        kept += given[window].sum(0)
        sent = torch.where(kept.abs() >= kept.abs().flatten().sort().values[-4], kept, 0.0)
        kept, expected = kept - sent, expected - 0.1 * sent
    torch.testing.assert_close(weight.weight.detach(), expected, rtol=1e-9, atol=1e-9)


def test_with_amp_a_residual_follows_the_loss_scale() -> None:
    """Training under a scale that doubles every second step equals training without one."""

    def work(world: World, amp: bool) -> list[Tensor]:
        model, optimizer, replica = started(world, halves(), [4, 4, 4])
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2, enabled=amp)
        replica.watch(scaler)
        for t in range(7):
            optimizer.zero_grad()
            scaler.scale(model(x_of(world.rank, t)).square().mean()).backward()
            scaler.step(optimizer)
            scaler.update()
        assert scaler.get_scale() == (64.0 if amp else 1.0)
        return [p.detach().clone() for p in model.parameters()]

    with_amp, without = (run_threads(lambda world, amp=amp: work(world, amp), 2)[0] for amp in (True, False))
    for a, b in zip(with_amp, without, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


# Warnings and refusals -------------------------------------------------------------------------------------------


def test_sending_more_than_dense_is_warned_about_with_the_numbers() -> None:
    def work(world: World) -> None:
        wasteful = halves()._replace(sends=lambda bucket, size: 10 * bucket.nbytes, spec="wasteful")
        started(world, wasteful, [4, 4])

    run_threads(work, 1)  # alone nothing is sent
    with pytest.raises(UserWarning, match=r"wasteful sends 1,280 bytes .* in a world of 2; .* sends 128"):
        run_threads(work, 2)

    def quiet(world: World) -> None:
        thrifty = halves()._replace(sends=lambda bucket, size: 1)
        started(world, thrifty, [4, 4])

    run_threads(quiet, 2)  # a warning would be an error


def test_a_reducers_own_check_refuses_at_bind() -> None:
    def check(optimizer: Any, world: World) -> None:
        raise ValueError("the optimizer's momentum must be 0")

    with pytest.raises(ValueError, match="momentum"):
        started(World(), halves()._replace(check=check), [4, 4])


def test_gaps_between_tensors_are_zero_when_a_reducer_sees_them() -> None:
    seen = []

    def reduce(bucket: Bucket, state: State, world: World) -> tuple[Reduced, State]:
        seen.append(float(bucket.flat.sum()))
        bucket.flat.fill_(math.pi)
        return Reduced(bucket.tensors), state

    bucket = Bucket(0, [("a", torch.zeros(3)), ("b", torch.zeros(5, 5)), ("c", torch.zeros(()))], World().empty)
    reduction = Reduction(
        Reducer(lambda bucket: {}, reduce), torch.optim.SGD([torch.zeros(1)], lr=1), lambda world: None, "gradients"
    )
    reduction.set_buckets([bucket])
    for _ in range(2):
        for view in bucket.tensors:
            view.fill_(1.0)
        reduction.begin(bucket, World())
        reduction.drain()
    assert seen == [29.0, 29.0]
