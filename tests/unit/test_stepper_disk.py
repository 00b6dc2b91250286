"""The optimizer step with blocks on disk: as in memory, with bounded memory, and nothing lost when the disk fails."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from unisono.background import Handle
from unisono.methods.offload import disk as disk_module
from unisono.methods.offload.chunks import CHUNK_BUFFERS
from unisono.methods.offload.disk import Disk, DiskError, Region
from unisono.methods.offload.stepper import Block, Run, Stepper, disk_bytes

CHUNK = 4096  # elements in a chunk
LENGTHS = (3 * CHUNK + 100, 70, 8 * CHUNK, CHUNK)
SETTINGS: dict[str, Any] = {"lr": 0.01, "weight_decay": 0.1, "amsgrad": True}


class Faulty(Disk):
    """A disk whose reads or writes can be made to fail."""

    failing = ""

    def read(self, region: Region, into: Tensor) -> Handle[Tensor]:
        return self._maybe("read") or super().read(region, into)

    def write(self, region: Region, source: Tensor) -> Handle[Tensor]:
        return self._maybe("write") or super().write(region, source)

    def _maybe(self, kind: str) -> Handle[Tensor] | None:
        def fail() -> Tensor:
            raise DiskError(errno.EIO, f"the {kind} failed")

        return Handle(fail) if self.failing == kind else None


def optimizer_over(masters: list[Tensor]) -> torch.optim.Optimizer:
    groups: list[dict[str, Any]] = [{"params": masters[:2]}, {"params": masters[2:], "lr": 0.02}]
    return torch.optim.AdamW(groups, **SETTINGS)


def blocks_of(masters: list[Tensor], home: Any) -> list[Block]:
    """Two runs in each, the last few elements padding."""
    blocks = []
    for i, master in enumerate(masters):
        group, n = i // 2, master.numel()
        blocks.append(Block(master, [Run(0, 32, group), Run(48, n - 2, group)], home))
    return blocks


def masters() -> list[Tensor]:
    draw = torch.Generator().manual_seed(0)
    return [torch.randn(n, generator=draw) for n in LENGTHS]


def gradients(step: int) -> list[Tensor]:
    draw = torch.Generator().manual_seed(1 + step)
    return [torch.randn(n, generator=draw).to(torch.bfloat16) for n in LENGTHS]


class Setup:
    """A stepper with all blocks on disk, and one with the same in memory."""

    def __init__(self, folder: Path, moments: torch.dtype = torch.float32) -> None:
        self.moments = moments
        given = masters()
        optimizer = optimizer_over(given)
        need = disk_bytes(optimizer, blocks_of(given, "disk"), moments=moments, chunk_elements=CHUNK)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(disk_module, "_warn_of_page_cache", lambda _: None)
            self.disk = Faulty(folder, need)
        self.blocks = blocks_of(given, "disk")
        options: dict[str, Any] = {"moments": moments, "chunk_elements": CHUNK, "threads": 2}
        self.stepper = Stepper(optimizer, self.blocks, disk=self.disk, **options)
        self.values = masters()
        self.memory = Stepper(optimizer_over(self.values), blocks_of(self.values, "cpu"), **options)

    def step(self, number: int, *, order: tuple[int, ...] = (0, 1, 2, 3), only: Stepper | None = None) -> list[Tensor]:
        """One step of both; returns the new values of the last in bfloat16."""
        outs = []
        for stepper in [only] if only else [self.memory, self.stepper]:
            stepper.begin()
            given = gradients(number)
            outs = [torch.zeros(n, dtype=torch.bfloat16) for n in LENGTHS]
            for place, i in enumerate(order):
                if place + 1 < len(order):
                    stepper.prefetch(order[place + 1])
                stepper.step(i, given[i], outs[i], scale=0.5, absent=[(0, 32)] if number == 1 else [])
        return outs

    def compare(self) -> None:
        for i in range(len(LENGTHS)):
            for name in self.memory.blocks[i].names():
                assert torch.equal(self.stepper.blocks[i].read(name), self.memory.blocks[i].read(name)), (i, name)
            assert self.stepper.blocks[i].scalars(0) == self.memory.blocks[i].scalars(0)
            assert self.stepper.blocks[i].scalars(48) == self.memory.blocks[i].scalars(48)


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def setup(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Setup]:
    found = Setup(tmp_path, request.param)
    yield found
    for stepper in (found.stepper, found.memory):
        stepper.close()
    found.disk.close()


def test_blocks_on_disk_step_bitwise_like_blocks_in_memory(setup: Setup) -> None:
    assert all(block.master is None for block in setup.blocks)
    setup.compare()
    for number in range(4):
        outs = setup.step(number, order=(0, 1, 2, 3) if number % 2 else (3, 1, 0, 2))
        for out, value in zip(outs, setup.values, strict=True):
            assert torch.equal(out[48:-2], value[48:-2].to(torch.bfloat16))
    setup.compare()
    setup.stepper.flush()
    setup.compare()
    assert setup.disk.moved["read"] > 0


def test_memory_is_bounded_whatever_the_size(setup: Setup) -> None:
    for number in range(2):
        setup.step(number, only=setup.stepper)
    largest = disk_bytes(
        setup.stepper.optimizer,
        [Block(None, [Run(0, CHUNK, 0)], "disk", length=CHUNK)],
        moments=setup.moments,
        chunk_elements=CHUNK,
    )
    assert setup.stepper.buffers is not None
    assert 0 < setup.stepper.buffers.nbytes <= CHUNK_BUFFERS * largest
    assert setup.disk.nbytes > 2 * setup.stepper.buffers.nbytes


def test_a_failed_write_is_told_keeps_the_state_and_is_tried_again(setup: Setup) -> None:
    setup.step(0)
    setup.disk.failing = "write"
    setup.memory.begin()
    setup.stepper.begin()
    given = gradients(1)
    broken = []
    for i in range(len(LENGTHS)):
        setup.memory.step(i, given[i])
        try:
            setup.stepper.step(i, given[i])
        except DiskError:
            broken.append(i)
    assert broken
    with pytest.raises(DiskError, match="the write failed"):
        setup.stepper.flush()
    setup.disk.failing = ""
    with pytest.raises(DiskError, match="the write failed"):  # nothing goes on before a flush
        setup.stepper.step(broken[0], given[broken[0]])
    setup.stepper.flush()
    for i in broken:
        setup.stepper.step(i, given[i])
    setup.stepper.flush()
    setup.compare()
    setup.step(2)
    setup.compare()


def test_a_failed_read_is_told_and_the_step_goes_on_where_it_ended(setup: Setup) -> None:
    setup.step(0)
    setup.stepper.flush()
    setup.memory.begin()
    setup.stepper.begin()
    given = gradients(1)
    setup.disk.failing = "read"
    with pytest.raises(DiskError, match="the read failed"):
        setup.stepper.step(2, given[2])
    setup.disk.failing = ""
    setup.stepper.step(2, given[2])
    setup.memory.step(2, given[2])
    setup.compare()


def test_state_on_disk_goes_out_in_pieces_and_into_another(setup: Setup, tmp_path: Path) -> None:
    for number in range(2):
        setup.step(number)
    other = Setup(tmp_path, setup.moments)
    for i, n in enumerate(LENGTHS):
        for start in range(0, n, 3000):
            stop = min(n, start + 3000)
            values = {name: setup.stepper.blocks[i].read(name, start, stop) for name in setup.stepper.blocks[i].names()}
            other.stepper.blocks[i].load(values, start=start, stop=stop)
        for start, stop in ((0, 32), (48, n - 2)):
            other.stepper.blocks[i].load(setup.stepper.blocks[i].scalars(start) or {}, start=start, stop=stop)
    other.stepper.steps = setup.stepper.steps
    other.memory = setup.memory
    other.compare()
    other.stepper.flush()
    other.step(2)
    other.compare()
    other.stepper.close()
    other.disk.close()


def test_a_block_may_begin_on_disk_without_values(tmp_path: Path) -> None:
    values = torch.zeros(1)
    optimizer = torch.optim.Adagrad([values], initial_accumulator_value=0.25)
    block = Block(None, [Run(0, 2 * CHUNK, 0)], "disk", length=2 * CHUNK)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(disk_module, "_warn_of_page_cache", lambda _: None)
        disk = Disk(tmp_path, disk_bytes(optimizer, [block], chunk_elements=CHUNK))
    stepper = Stepper(optimizer, [block], disk=disk, chunk_elements=CHUNK, threads=1)
    assert stepper.buffers is not None
    assert stepper.buffers.nbytes == 0
    assert not stepper.blocks[0].read("master").any()
    assert (stepper.blocks[0].read("sum") == 0.25).all()
    stepper.blocks[0].load({"master": torch.ones(100)}, start=CHUNK - 50, stop=CHUNK + 50)
    assert stepper.blocks[0].read("master").sum() == 100
    disk.close()


def test_memory_and_disk_may_be_mixed(tmp_path: Path) -> None:
    first, second = masters()[:2]
    optimizer = torch.optim.AdamW([first, second])
    blocks = [Block(first, [Run(0, LENGTHS[0], 0)]), Block(second, [Run(0, LENGTHS[1], 0)], "disk")]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(disk_module, "_warn_of_page_cache", lambda _: None)
        disk = Disk(tmp_path, disk_bytes(optimizer, blocks))
    assert disk.nbytes == 3 * 4096
    stepper = Stepper(optimizer, blocks, disk=disk, threads=1)
    stepper.begin()
    for i in range(2):
        stepper.prefetch(i)
        stepper.step(i, torch.ones(LENGTHS[i]))
    assert blocks[0].master is first
    assert stepper.blocks[1].scalars() == {"step": 1.0}
    stepper.flush()
    disk.close()
