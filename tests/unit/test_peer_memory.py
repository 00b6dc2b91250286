"""Private memory that the ranks of a host read through the kernel, between threads, against plain PyTorch."""

from __future__ import annotations

import copy
import os
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import unisono as un
from unisono import World
from unisono.methods.exchange.overlap import own_gradient
from unisono.world.transports import arithmetic, shared
from unisono.world.transports.arithmetic import SpareCores
from unisono.world.transports.meeting_page import PAGE_NAME
from unisono.world.transports.shared import Pieces, SharedTransport


def run_shared(fn: Callable[[World], Any], size: int) -> list[Any]:
    """`fn(world)` on threads that talk as processes of one host do."""
    fd = os.memfd_create(PAGE_NAME)
    results: list[Any] = [None] * size
    errors: list[BaseException] = []

    def work(rank: int) -> None:
        try:
            world = World(SharedTransport(fd, rank, size, timeout_s=20.0), hosts=["localhost"] * size)
            results[rank] = fn(world)
            world.close()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(r,), daemon=True) for r in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    os.close(fd)
    if errors:
        raise errors[0]
    return results


def parts_of(rank: int, dtype: torch.dtype, numbers: tuple[int, ...] = (70_001, 3, 0, 99_999)) -> list[Tensor]:
    """Tensors of odd sizes, more than are copied over the stage."""
    made = torch.Generator().manual_seed(rank)
    return [(100 * torch.randn(n, generator=made)).to(dtype) for n in numbers]


def add_up(every: list[Tensor], op: str) -> Tensor:
    """The sum in the order of the ranks; the mean as its N-th."""
    total = every[0].clone()
    for x in every[1:]:
        total += x
    return total * (1.0 / len(every)) if op == "mean" else total


def has_helpers(world: World) -> bool:
    """Whether threads have helped this rank."""
    return bool(world.transport._spare._queues)


@pytest.mark.parametrize("cores", [1, 64])
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize(("dtype", "op"), [(torch.float32, "mean"), (torch.float64, "sum"), (torch.int64, "sum")])
def test_private_tensors_are_reduced_in_rank_order_to_the_bit(
    size: int, dtype: torch.dtype, op: Any, cores: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arithmetic, "usable_cores", lambda: cores)
    monkeypatch.setattr(
        shared, "_BLOCK", 160_000
    )  # several blocks and tiles, whose borders are in the middle of tensors
    monkeypatch.setattr(shared, "_READ", 48_000)
    monkeypatch.setattr(arithmetic, "_LEAST_ITEMS", 1)

    def work(world: World) -> list[Tensor]:
        assert world.reads_peers
        given = parts_of(world.rank, dtype)
        found = world.all_reduce(given, op).wait()
        assert has_helpers(world) == (cores > 1)
        return found

    expected = [add_up(list(each), op) for each in zip(*(parts_of(r, dtype) for r in range(size)), strict=True)]
    for found in run_shared(work, size):
        assert all(torch.equal(x, y) for x, y in zip(found, expected, strict=True))


def test_memory_that_only_some_have_apart_is_reduced_too() -> None:
    def work(world: World) -> Tensor:
        common = world.empty(100_000)
        x = common if world.rank == 0 else torch.empty(100_000)
        return world.all_reduce(x.fill_(world.rank + 1.0), "sum").wait()

    for found in run_shared(work, 2):
        assert found.eq(3.0).all()


def test_joined_lines_are_reduced_to_parts() -> None:
    def work(world: World) -> Tensor:
        out = torch.empty(170_004 // 3, dtype=torch.float32)
        return world.reduce_joined([*parts_of(world.rank, torch.float32), torch.zeros(1)], out=out).wait()

    every = [torch.cat([*parts_of(r, torch.float32), torch.zeros(1)]) for r in range(3)]
    assert torch.equal(torch.cat(run_shared(work, 3)), add_up(every, "mean"))


def test_private_tensors_are_gathered() -> None:
    def work(world: World) -> list[Tensor]:
        return world.all_gather(torch.full((100_000 + world.rank,), float(world.rank))).wait()

    for found in run_shared(work, 3):
        assert [x.numel() for x in found] == [100_000, 100_001, 100_002]
        assert all(x.eq(r).all() for r, x in enumerate(found))


def test_ranks_that_may_not_read_each_other_go_over_the_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UNISONO_PEER_MEMORY", "0")

    def work(world: World) -> tuple[bool, list[Tensor], Tensor]:
        out = torch.empty(50_000)
        joined = world.reduce_joined([torch.full((100_000,), world.rank + 1.0)], out=out).wait()
        return world.reads_peers, world.all_reduce(parts_of(world.rank, torch.float64), "sum").wait(), joined

    every = zip(*(parts_of(r, torch.float64) for r in range(2)), strict=True)
    expected = [add_up(list(each), "sum") for each in every]
    for reads, found, joined in run_shared(work, 2):
        assert not reads
        assert all(torch.equal(x, y) for x, y in zip(found, expected, strict=True))
        assert joined.eq(1.5).all()


def test_pieces_are_cut_where_they_lie() -> None:
    pieces = Pieces([(1000, 10), (5000, 0), (2000, 20), (9000, 5)])
    assert pieces.cut(0, 35) == [(1000, 10), (2000, 20), (9000, 5)]
    assert pieces.cut(8, 12) == [(1008, 2), (2000, 2)]
    assert pieces.cut(12, 30) == [(2002, 18)]
    assert pieces.cut(30, 30) == []


def test_helpers_reduce_memory_that_all_ranks_map_to_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arithmetic, "usable_cores", lambda: 64)
    monkeypatch.setattr(shared, "_TILE", 16 << 10)
    every = [parts_of(rank, torch.float32, (300_000,))[0] for rank in range(3)]

    def work(world: World) -> tuple[Tensor, Tensor]:
        mine = world.empty(300_000)
        mine.copy_(every[world.rank])
        part = world.reduce_scatter(mine, "sum").wait()
        assert has_helpers(world)
        return part, world.all_reduce(mine, "mean").wait().clone()

    parts, means = zip(*run_shared(work, 3), strict=True)
    assert torch.equal(torch.cat(parts), add_up(every, "sum"))
    assert all(torch.equal(mean, add_up(every, "mean")) for mean in means)


def test_helpers_do_each_item_once_and_an_error_ends_after_all_have_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arithmetic, "usable_cores", lambda: 64)
    crew, done, inside = SpareCores(2), [], []

    def do(item: int) -> None:
        inside.append(item)
        torch.ones(10_000).sum()
        if item == 77:
            inside.remove(item)
            raise ValueError("item 77")
        done.append(item)
        inside.remove(item)

    crew.each(do, ((i,) for i in range(70)))
    assert sorted(done) == list(range(70))
    with pytest.raises(ValueError, match="item 77"):
        crew.each(do, ((i,) for i in range(70, 140)))
    assert not inside
    crew.close()


def test_more_pieces_than_one_call_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared, "_MOST_PIECES", 4)
    monkeypatch.setattr(shared, "_MOST_BYTES", 5000)

    def work(world: World) -> list[Tensor]:
        return world.all_reduce([torch.full((701 + i,), world.rank + float(i)) for i in range(100)], "sum").wait()

    for found in run_shared(work, 2):
        assert [x.unique().tolist() for x in found] == [[2.0 * i + 1] for i in range(100)]


# Gradients ------------------------------------------------------------------------------------------------------------


class Aliased(nn.Module):
    """Two parameters whose gradients may have one memory, one in another memory order, a small and an unused one."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.randn(300, 300))
        self.b = nn.Parameter(torch.randn(90_000))
        self.c = nn.Parameter(torch.randn(300, 300).t())
        self.small = nn.Parameter(torch.randn(7))
        self.unused = nn.Parameter(torch.randn(300, 300))

    def forward(self, x: Tensor) -> Tensor:
        both = self.a.view(-1) + self.b
        return (both.view(300, 300) @ x).square().sum() + (self.c @ x).sum() * self.small.sum()


def test_gradients_stay_where_autograd_put_them_and_are_the_mean_to_the_bit() -> None:
    torch.manual_seed(0)
    start = Aliased()

    def inputs(rank: int) -> Tensor:
        return torch.randn(300, 2, generator=torch.Generator().manual_seed(rank))

    def work(world: World) -> list[Tensor | None]:
        model = copy.deepcopy(start)
        seen: dict[str, int] = {}
        model.c.register_post_accumulate_grad_hook(lambda p: seen.update(c=p.grad.data_ptr()))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        un.parallel(model, optimizer, "allreduce", world=world)
        for _ in range(2):
            optimizer.zero_grad()
            if world.rank == 0:
                loss = model(inputs(world.rank)) + model.unused.sum()  # the others count as zero
            else:
                loss = model(inputs(world.rank))
            loss.backward()
        assert model.c.grad is not None
        assert model.c.grad.data_ptr() == seen["c"]
        assert model.a.grad.data_ptr() != model.b.grad.data_ptr()  # type: ignore[union-attr]
        return [None if p.grad is None else p.grad.clone() for p in model.parameters()]

    every = []
    for rank in range(2):
        model = copy.deepcopy(start)
        loss = model(inputs(rank))
        (loss + model.unused.sum() if rank == 0 else loss).backward()
        every.append([torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()])
    expected = [add_up(list(each), "mean") for each in zip(*every, strict=True)]
    for found in run_shared(work, 2):
        assert all(x is not None and torch.equal(x, y) for x, y in zip(found, expected, strict=True))


def test_a_gradient_is_taken_over_only_if_its_memory_is_its_own() -> None:
    param = torch.zeros(4, 6)
    alone = torch.ones(4, 6)
    assert own_gradient(param, alone) is alone
    base = torch.ones(48)
    for shown in (
        base[:24].view(4, 6),
        base[:24].view(4, 6).expand(4, 6),
        torch.ones(6, 4).t(),
        torch.ones(1, 6).expand(4, 6),
    ):
        taken = own_gradient(param, shown)
        assert taken.eq(1).all()
        assert taken.stride() == (6, 1)
        assert taken.data_ptr() != shown.data_ptr()
    turned = torch.empty_strided((4, 6), (1, 4))
    assert own_gradient(torch.zeros(6, 4).t(), turned) is turned
    assert own_gradient(param, None).eq(0).all()


def test_a_gradient_that_a_program_keeps_stays_as_it_is() -> None:
    def work(world: World) -> bool:
        model = nn.Linear(300, 300, bias=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        un.parallel(model, optimizer, "allreduce", world=world)
        kept = []
        for step in range(2):
            optimizer.zero_grad()
            model(torch.full((1, 300), step + 1.0)).sum().backward()
            kept.append(model.weight.grad)
        return bool(kept[0].eq(1).all() and kept[1].eq(2).all())  # type: ignore[union-attr]

    assert all(run_shared(work, 2))
