"""Memory of a host: what one rank writes, all ranks of its host read, and no other."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from unisono.methods.strategies._host_memory import HostMemory, cut, move_in, move_out
from unisono.world import Mismatch, World
from unisono.world.virtual import run_threads

HOSTS = ["a", "a", "b", "b", "b"]


def test_every_rank_writes_its_part_and_all_of_the_host_read_it() -> None:
    def work(world: World) -> list[float]:
        memory = HostMemory(world, "some")
        line = memory.line(100, torch.float64)
        start, stop = memory.part(line)
        line[start:stop] = world.rank + 1
        memory.meet("written")
        found = line.tolist()
        memory.close()
        return found

    results = run_threads(work, 5, hosts=HOSTS)
    assert results[0] == results[1] == [1.0] * 56 + [2.0] * 44  # borders at multiples of 64 bytes
    assert results[2] == results[3] == results[4] == [3.0] * 40 + [4.0] * 40 + [5.0] * 20


@pytest.mark.parametrize("length", [0, 1, 15, 16, 1000])
@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_parts_cover_all_elements_once(length: int, size: int) -> None:
    parts = [cut(length, rank, size, step=16) for rank in range(size)]
    assert [i for start, stop in parts for i in range(start, stop)] == list(range(length))


def test_lines_of_all_ranks_are_seen_by_each() -> None:
    def work(world: World) -> list[list[float]]:
        memory = HostMemory(world, "some")
        lines = memory.lines(3, torch.float32)
        lines[memory.rank].fill_(world.rank)
        memory.meet("written")
        return [line.tolist() for line in lines]

    assert run_threads(work, 3) == [[[0.0] * 3, [1.0] * 3, [2.0] * 3]] * 3


def test_parameters_move_in_with_the_first_ranks_values_and_out_again() -> None:
    def work(world: World) -> None:
        memory = HostMemory(world, "some")
        model = nn.Linear(3, 2)
        with torch.no_grad():
            model.weight.fill_(world.rank)
        line = memory.line(6, torch.float32)
        seen = memory.view(line).view(2, 3)
        move_in([model.weight], [line.view(2, 3)], [seen], memory)
        assert model.weight.eq(0).all()
        memory.meet("looked")
        if world.rank == 1:
            line.fill_(7)
        memory.meet("written")
        assert model.weight.eq(7).all()
        with torch.no_grad():
            model.weight.fill_(world.rank)  # in this rank's view alone
        memory.meet("written to views")
        assert line.eq(7).all()
        assert model.weight.eq(world.rank).all()
        move_out([model.weight], [seen])
        memory.meet("moved out")
        with torch.no_grad():
            model.weight.fill_(world.rank)
        memory.meet("written again")
        assert model.weight.eq(world.rank).all()

    run_threads(work, 2)


@pytest.mark.filterwarnings("ignore:ranks make one collective at different places")  # said beside it
def test_ranks_that_come_for_different_things_are_named() -> None:
    def work(world: World) -> None:
        HostMemory(world, "some").meet("a step" if world.rank else "a backward pass")

    with pytest.raises(Mismatch, match="rank 0 came for: a backward pass; rank 1 came for: a step"):
        run_threads(work, 2)
