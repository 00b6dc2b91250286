"""The strategy below a program changes between two steps, and the program holds the same replica."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from test_switching import started, train, values
from torch import Tensor

import unisono as un
from unisono.methods.exchange.windows import StepHooks
from unisono.methods.spec import SpecError, build, describe
from unisono.methods.strategy import Replica
from unisono.methods.strategy.changing import ChangingReplica
from unisono.observe.runs.recorder import Facts, Recorder
from unisono.observe.runs.recording import FileWriter
from unisono.world import World
from unisono.world.virtual import run_threads


def test_a_change_after_a_step_is_a_switch_at_that_step() -> None:
    def change(world: World) -> list[Tensor]:
        model, optimizer, inner = started(world, "topk(k=0.2)")

        def between_steps() -> None:
            if replica.step in (2, 4):
                replica.change("powersgd(rank=1)" if replica.step == 2 else "topk(k=0.3)")

        replica = ChangingReplica(inner, inner.strategy, between_steps)
        train(model, optimizer, world.rank, range(6))
        assert replica.step == world.ledger.step_count == 6
        assert not replica.is_closed
        replica.close()
        assert replica.inner.is_closed
        train(model, optimizer, world.rank, range(1))  # nobody watches any more
        return values(model)

    def switch(world: World) -> list[Tensor]:
        model, optimizer, replica = started(world, "topk(k=0.2)")
        train(model, optimizer, world.rank, range(2))
        replica = replica.switch("powersgd(rank=1)")
        train(model, optimizer, world.rank, range(2, 4))
        replica = replica.switch("topk(k=0.3)")
        train(model, optimizer, world.rank, range(4, 6))
        replica.close()
        train(model, optimizer, world.rank, range(1))
        return values(model)

    for a, b in zip(run_threads(change, 2), run_threads(switch, 2), strict=True):
        assert all(map(torch.equal, a, b))


def test_every_member_of_a_replica_is_that_of_the_one_at_work() -> None:
    _, _, inner = started(World(), "zero(stage=1)")
    replica = ChangingReplica(inner, build("auto", kind="strategy"), lambda: None)
    own = {"strategy", "close", "switch", "state_dict", "load_state_dict"}
    own |= {"averaged_values"}  # made anew at each call
    names = {name for name in (*dir(Replica), *vars(inner)) if not name.startswith("_")}
    assert {name for name in names if getattr(replica, name) != getattr(inner, name)} == own
    assert replica.write == inner.write  # type: ignore[attr-defined]  # which only some methods have
    replica.step = 7
    replica.world = World()
    assert (inner.step, inner.world) == (7, replica.world)
    replica.change("allreduce")
    assert replica.same_parameters
    assert not hasattr(replica, "write")
    replica.close()


def test_a_checkpoint_of_what_the_program_holds_is_that_of_the_strategy_at_work(tmp_path: Path) -> None:
    def work(world: World) -> None:
        model, optimizer, inner = started(world, "allreduce")
        replica = ChangingReplica(inner, inner.strategy, lambda: None)
        train(model, optimizer, world.rank, range(1))
        replica.change("topk(k=0.2)")
        train(model, optimizer, world.rank, range(1, 3))
        un.save(tmp_path / "changed", replica)
        before = values(model)
        kept = replica.inner.local_state()
        replica.close()

        model, optimizer, other = started(world, "topk(k=0.2)")
        assert un.load(tmp_path / "changed", other).step == 3
        assert all(map(torch.equal, values(model), before))
        loaded = other.local_state()
        assert kept["reducer"].keys() == loaded["reducer"].keys() != set()
        other.close()

    run_threads(work, 2)


def test_those_that_watch_a_step_may_come_and_go_in_it() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
    seen: list[str] = []

    def first_ended(_: torch.optim.Optimizer) -> None:
        seen.append("first")
        first.remove()
        StepHooks.of(optimizer).watch(lambda *_: seen.append("begin"), lambda _: seen.append("later"))

    first = StepHooks.of(optimizer).watch(None, first_ended)
    StepHooks.of(optimizer).watch(None, lambda _: seen.append("second"))
    optimizer.step()
    assert seen == ["first", "second"]
    optimizer.step()
    assert seen == ["first", "second", "begin", "second", "later"]


def test_the_environment_names_the_strategy(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(os.environ, "UNISONO_STRATEGY", "topk(k=0.2)")
    _, _, replica = started(World(), "allreduce(accumulate=2)")
    assert describe(replica.strategy) == "allreduce(reducer=topk(k=0.2))"
    said = "unisono: UNISONO_STRATEGY: allreduce(reducer=topk(k=0.2)) instead of allreduce(accumulate=2)\n"
    assert capsys.readouterr().err == said
    replica.close()
    monkeypatch.setitem(os.environ, "UNISONO_STRATEGY", "topkk")
    with pytest.raises(SpecError, match="did you mean 'topk'"):
        started(World(), "allreduce")


def test_what_only_the_method_at_work_has_is_reached_and_recorded(tmp_path: Path) -> None:
    def work(world: World) -> tuple[float, list[str], bool]:
        model, _, inner = started(world, "zero(stage=1)")
        recorder = Recorder(world, FileWriter(tmp_path, world.rank), Facts("auto", 10))
        replica = ChangingReplica(inner, inner.strategy, lambda: None)
        inner.not_measured = ("compression",)
        assert replica.not_measured == ("compression",)
        replica.write(lambda: model[0].weight.data.fill_(0.5))
        written = float(model[0].weight.detach().mean())
        with pytest.raises(AttributeError, match="no_such_thing"):
            replica.no_such_thing  # noqa: B018
        replica.change("parameter_server(reducer=fp16)")
        assert replica.own_optimizer == replica.inner.own_optimizer
        facts = recorder.facts
        replica.close()
        recorder.close("ok")
        return written, list(facts.not_measured), facts.bytes_by_formula

    assert run_threads(work, 2) == [(0.5, ["compression"], False)] * 2


def test_a_checkpoint_waits_for_what_the_method_at_work_has_still_to_do() -> None:
    _, _, inner = started(World(), "local_sgd(every=2)")
    replica = ChangingReplica(inner, inner.strategy, lambda: None)
    inner._unmet = 1  # AMP skipped a step
    assert replica.state_dict().keys() == {"shared", "local"}
    assert inner._unmet == 0
    replica.close()
