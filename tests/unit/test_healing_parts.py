"""Parts of healing by themselves: what is kept for those who come later, and the schedules of an optimizer."""

from __future__ import annotations

import copy
import gc
import os
import pickle
import weakref
from typing import Any

import pytest
import torch

from unisono.launchers.runtime.files import anonymous_file
from unisono.launchers.runtime.membership import ResultLog
from unisono.methods.strategy import schedules
from unisono.methods.strategy.schedules import find_schedules


def test_results_that_only_a_lost_rank_had_are_not_given_to_those_who_come() -> None:
    fd = anonymous_file("unisono-results")
    log = ResultLog(fd)
    log.write([b"both had this", b"only the lost rank had this"])
    log.rewrite([b"both had this"])
    assert log.read() == [b"both had this"]
    log.write([b"both had this", b"another"])
    log.rewrite([b"both had this", b"another", b"one more"])
    assert log.read() == [b"both had this", b"another", b"one more"]
    os.close(fd)


def test_the_schedules_of_an_optimizer_are_found_in_one_order() -> None:
    weights = [torch.nn.Parameter(torch.zeros(1)) for _ in range(2)]
    optimizer, other = (torch.optim.SGD([w], lr=0.1) for w in weights)
    kinds = torch.optim.lr_scheduler
    late, early = kinds.StepLR(optimizer, 30), kinds.StepLR(optimizer, 3)
    plateau, foreign = kinds.ReduceLROnPlateau(optimizer), kinds.StepLR(other, 3)
    assert [s is t for s, t in zip(find_schedules(optimizer), [plateau, early, late], strict=True)] == [True] * 3
    assert find_schedules(other) == [foreign]


def test_a_chain_of_schedules_is_found_once_its_dict_has_been_asked_for() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    kinds = torch.optim.lr_scheduler
    parts = [kinds.StepLR(optimizer, 30), kinds.StepLR(optimizer, 3)]
    chain = kinds.ChainedScheduler(parts, optimizer)
    vars(chain)  # from now on the dict holds the optimizer, not the chain itself; it has no `last_epoch`
    assert {id(s) for s in find_schedules(optimizer)} == {id(s) for s in (chain, *parts)}


class Named:
    def __new__(cls, *args: Any, **settings: Any) -> Any:
        assert args, "the arguments of the schedule"
        return super().__new__(cls)


class NamedSchedule(torch.optim.lr_scheduler.StepLR, Named):
    pass


def test_schedules_are_found_whenever_they_were_made(monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = torch.optim.lr_scheduler
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)

    def are_found() -> bool:
        return {*map(id, find_schedules(optimizer))} == {*map(id, made)}

    made: list[Any] = [NamedSchedule(optimizer, 2), kinds.ReduceLROnPlateau(optimizer)]
    monkeypatch.setattr(schedules, "_known", weakref.WeakValueDictionary())  # as if these had been made before
    monkeypatch.setattr(schedules, "_is_watching", False)
    assert are_found()
    made += [NamedSchedule(optimizer, 3), kinds.StepLR(optimizer, 3), kinds.ReduceLROnPlateau(optimizer)]
    made.append(copy.copy(made[3]))
    assert are_found()
    apart = pickle.loads(pickle.dumps(made[3]))
    assert find_schedules(apart.optimizer) == [apart]
    del made[2:4]
    gc.collect()
    assert are_found()
