"""Operations of a process group, each a function that gives tensors: run over gloo and over unisono, and compared."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import Tensor
from torch.distributed import ReduceOp

Case = Callable[[Any], Any]
CASES: dict[str, Case] = {}
FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
INTEGERS = (torch.int8, torch.uint8, torch.int32, torch.int64)
# What gloo has not, or gets wrong.
OURS_ALONE = {"all_gather_uneven", "all_to_all_lists", "average_of_integers", "strided_tensors"}
OURS_ALONE |= {"gathers_of_other_shapes", "messages_of_strided_tensors", "splits"}


def case(function: Case) -> Case:
    CASES[function.__name__] = function
    return function


def mine(*shape: int, dtype: torch.dtype = torch.float32, of: int | None = None, salt: int = 0) -> Tensor:
    """Small whole numbers of one rank: exact in every dtype, whatever the order of sums."""
    rank = dist.get_rank() if of is None else of
    generator = torch.Generator().manual_seed(100 * salt + rank)
    low, high = (0, 2) if dtype == torch.bool else (1, 4)
    return torch.randint(low, high, shape, generator=generator).to(dtype)


def default_store() -> dist.Store:
    return dist.distributed_c10d._get_default_store()


def size(group: Any) -> int:
    return dist.get_world_size(group)


@case
def all_reduce_sums(group: Any) -> Any:
    found = []
    for dtype in (*FLOATS, *INTEGERS, torch.complex64):
        for shape in ((3,), (70_000,), (0,), ()):
            x = mine(*shape, dtype=dtype)
            dist.all_reduce(x, group=group)
            found.append(x)
    return found


@case
def all_reduce_operators(group: Any) -> Any:
    found = []
    for op in (ReduceOp.PRODUCT, ReduceOp.MIN, ReduceOp.MAX):
        for dtype in (*FLOATS, *INTEGERS):
            for n in (5, 40_000):
                x = mine(n, dtype=dtype)
                dist.all_reduce(x, op, group=group)
                found.append(x)
    for op in (ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR):
        for dtype in INTEGERS:
            x = mine(4_000, dtype=dtype)
            dist.all_reduce(x, op, group=group)
            found.append(x)
    return found


@case
def all_reduce_of_bools(group: Any) -> Any:
    found = []
    for op in (ReduceOp.SUM, ReduceOp.MAX, ReduceOp.MIN):
        x = mine(100, dtype=torch.bool)
        dist.all_reduce(x, op, group=group)
        found.append(x.to(torch.uint8).clamp(max=1))
    return found


@case
def average_of_integers(group: Any) -> Any:
    x, y = mine(9, dtype=torch.int64), mine(9)
    dist.all_reduce(x, ReduceOp.AVG, group=group)
    dist.all_reduce(y, ReduceOp.AVG, group=group)
    total = sum(mine(9, dtype=torch.int64, of=r) for r in range(size(group)))
    assert torch.equal(x, total // size(group))
    torch.testing.assert_close(y, total / size(group))
    return []


@case
def strided_tensors(group: Any) -> Any:
    x, y = mine(300, 200).t(), mine(64, 8)[:, ::2]
    dist.all_reduce(x, group=group)
    dist.broadcast(y, 1, group=group)
    assert torch.equal(x, sum(mine(300, 200, of=r) for r in range(size(group))).t())  # type: ignore[union-attr]
    assert torch.equal(y, mine(64, 8, of=1)[:, ::2])
    return []


@case
def coalesced(group: Any) -> Any:
    parts = [mine(4), mine(30_000), mine(2, 3)]
    with dist._coalescing_manager(group=group):
        for part in parts:
            dist.all_reduce(part, group=group)
    n = size(group)
    gathered, sums = [torch.empty(n * 6), torch.empty(n * 9_000)], [torch.empty(3), torch.empty(5_000)]
    with dist._coalescing_manager(group=group):
        for out, salt in zip(gathered, (1, 2), strict=True):
            dist.all_gather_into_tensor(out, mine(out.numel() // n, salt=salt), group=group)
    with dist._coalescing_manager(group=group):
        for out, salt in zip(sums, (3, 4), strict=True):
            dist.reduce_scatter_tensor(out, mine(out.numel() * n, salt=salt), group=group)
    return [*parts, *gathered, *sums]


@case
def broadcast_and_reduce(group: Any) -> Any:
    found = []
    for root in (0, 1):
        for dtype in (torch.float32, torch.bool, torch.complex64, torch.bfloat16):
            x = mine(10_000, dtype=dtype, salt=root)
            dist.broadcast(x, root, group=group)
            found.append(x)
        y = mine(5_000, salt=root + 5)
        dist.reduce(y, root, group=group)
        found += [y] if dist.get_rank() == root else []
    return found


@case
def gathers(group: Any) -> Any:
    n, found = size(group), []
    for dtype in (torch.float32, torch.bool, torch.complex64, torch.float16):
        for shape in ((3, 2), (50_000,), (0,)):
            outs = [torch.empty(shape, dtype=dtype) for _ in range(n)]
            dist.all_gather(outs, mine(*shape, dtype=dtype), group=group)
            found += outs
    joined = torch.empty(n * 4, 3)
    dist.all_gather_into_tensor(joined, mine(4, 3), group=group)
    return [*found, joined]


@case
def gathers_of_other_shapes(group: Any) -> Any:
    n = size(group)
    stacked, columns = torch.empty(n, 4, 3), [torch.empty(6, 4).t() for _ in range(n)]
    dist.all_gather_into_tensor(stacked, mine(3, 4).t(), group=group)
    dist.all_gather(columns, mine(4, 6), group=group)
    for r in range(n):
        assert torch.equal(stacked[r], mine(3, 4, of=r).t())
        assert torch.equal(columns[r], mine(4, 6, of=r))
    return []


@case
def all_gather_uneven(group: Any) -> Any:
    n = size(group)
    outs = [torch.empty(3 + r) for r in range(n)]
    dist.all_gather(outs, mine(3 + dist.get_rank()), group=group)
    for r, out in enumerate(outs):
        assert torch.equal(out, mine(3 + r, of=r))
    return []


@case
def gather_and_scatter(group: Any) -> Any:
    n, rank, found = size(group), dist.get_rank(), []
    for root in range(2):
        outs = [torch.empty(7) for _ in range(n)]
        dist.gather(mine(7, salt=root), outs if rank == root else None, root, group=group)
        found += outs if rank == root else []
        out = torch.empty(5, dtype=torch.int64)
        parts = [mine(5, dtype=torch.int64, salt=r) for r in range(n)]
        dist.scatter(out, parts if rank == root else None, root, group=group)
        found.append(out)
    return found


@case
def reduce_scatters(group: Any) -> Any:
    n, found = size(group), []
    for op in (ReduceOp.SUM, ReduceOp.MAX):
        for dtype in (torch.float32, torch.int64, torch.float64):
            for rows in (2, 20_000):
                out = torch.empty(rows, 3, dtype=dtype)
                dist.reduce_scatter_tensor(out, mine(n * rows, 3, dtype=dtype), op, group=group)
                found.append(out)
                out = torch.empty(rows, dtype=dtype)
                dist.reduce_scatter(out, [mine(rows, dtype=dtype, salt=r) for r in range(n)], op, group=group)
                found.append(out)
    return found


@case
def results_in_memory_of_inputs(group: Any) -> Any:
    """A rank's part of a whole tensor as the input of one operation and the output of another, as in ZeRO."""
    n, rank, found = size(group), dist.get_rank(), []
    for rows in (3, 40_000):
        whole = torch.zeros(n * rows)
        part = whole[rank * rows : (rank + 1) * rows]
        part.copy_(mine(rows))
        dist.all_gather_into_tensor(whole, part, group=group)
        found.append(whole.clone())
        dist.reduce_scatter_tensor(part, whole.mul_(rank + 1), group=group)
        found.append(part.clone())
        rest = list(whole.copy_(mine(n * rows)).split(rows))
        dist.scatter(rest[rank], rest if rank == 0 else None, 0, group=group)
        found.append(part.clone())
        dist.gather(rest[rank], rest if rank == 1 else None, 1, group=group)
        found += [whole.clone()] if rank == 1 else []
        dist.all_gather(rest, rest[rank], group=group)
        found.append(whole.clone())
    return found


@case
def all_to_all_lists(group: Any) -> Any:
    n, rank = size(group), dist.get_rank()
    outs = [torch.empty(1 + r + rank) for r in range(n)]
    dist.all_to_all(outs, [mine(1 + rank + r, salt=r) for r in range(n)], group=group)
    for r, out in enumerate(outs):
        assert torch.equal(out, mine(1 + r + rank, of=r, salt=rank))
    return []


@case
def all_to_all_rows(group: Any) -> Any:
    n, rank = size(group), dist.get_rank()
    even, uneven = torch.empty(n * 3, 2), torch.empty(sum(1 + r for r in range(n)), 2)
    dist.all_to_all_single(even, mine(n * 3, 2), group=group)
    dist.all_to_all_single(uneven, mine(n * (1 + rank), 2), [1 + r for r in range(n)], [1 + rank] * n, group=group)
    return [even, uneven]


@case
def messages(group: Any) -> Any:
    n, rank = size(group), dist.get_rank()
    following, previous = (rank + 1) % n, (rank - 1) % n
    found = []
    for shape in ((3,), (700_000,), (0,)):
        x = torch.empty(shape)
        works = [dist.isend(mine(*shape), following, group=group), dist.irecv(x, previous, group=group)]
        for work in works:
            work.wait()
        found.append(x)
    x = torch.empty(4, 8)
    operations = [dist.P2POp(dist.isend, mine(4, 8), following, group), dist.P2POp(dist.irecv, x, previous, group)]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    return [*found, x]


@case
def messages_of_strided_tensors(group: Any) -> Any:
    n, rank, x = size(group), dist.get_rank(), torch.empty(8, 4).t()
    works = [dist.irecv(x, (rank - 1) % n, group=group), dist.isend(mine(8, 4).t(), (rank + 1) % n, group=group)]
    for work in works:
        work.wait()
    assert torch.equal(x, mine(8, 4, of=(rank - 1) % n).t())
    return []


@case
def messages_in_another_order(group: Any) -> Any:
    """Receives are matched by tag, not by the order in which messages were sent."""
    rank = dist.get_rank()
    if rank == 0:
        works = [dist.isend(mine(5, salt=tag), 1, group=group, tag=tag) for tag in (7, 8, 9)]
        for work in works:
            work.wait()
        return []
    if rank > 1:
        return []
    outs = {tag: torch.empty(5) for tag in (9, 7, 8)}
    works = [dist.irecv(out, 0, group=group, tag=tag) for tag, out in outs.items()]
    for i in (2, 0, 1):
        works[i].wait()
    return list(outs.values())


@case
def messages_that_wait_for_others(group: Any) -> Any:
    """A receive ends though one that was begun before it still waits: its message is sent only then."""
    rank, early, late = dist.get_rank(), torch.empty(5), torch.empty(5)
    if rank == 0:
        dist.send(mine(5, salt=2), 1, group=group, tag=2)
        dist.recv(early, 1, group=group, tag=3)
        dist.send(mine(5, salt=1), 1, group=group, tag=1)
        return [early]
    if rank > 1:
        return []
    work = dist.irecv(late, 0, group=group, tag=1)
    dist.recv(early, 0, group=group, tag=2)
    dist.send(mine(5, salt=3), 0, group=group, tag=3)
    work.wait()
    return [early, late]


@case
def messages_that_nobody_waits_for_yet(group: Any) -> Any:
    """More of them than an outbox holds: the sender ends, though the receiver waits for something else first. What was
    sent may be overwritten then."""
    rank, lengths = dist.get_rank(), [5, 200_000, 0, 262_144] * 4
    if rank == 0:
        parts = [mine(n, salt=i) for i, n in enumerate(lengths)]
        works = [dist.isend(part, 1, group=group) for part in parts]
        for work, part in zip(works, parts, strict=True):
            work.wait()
            part.zero_()
        default_store().set(f"all sent {group.group_name}", "yes")
        return []
    if rank > 1:
        return []
    outs = [torch.empty(n) for n in lengths]
    works = [dist.irecv(out, 0, group=group) for out in outs]
    default_store().wait([f"all sent {group.group_name}"])
    for work in works:
        work.wait()
    return outs


@case
def messages_from_anyone(group: Any) -> Any:
    n, rank = size(group), dist.get_rank()
    if rank:
        dist.send(mine(6), 0, group=group)
        return []
    found = {}
    for _ in range(n - 1):
        x = torch.empty(6)
        found[dist.recv(x, group=group)] = x
    return [found[r] for r in sorted(found)]


@case
def objects(group: Any) -> Any:
    n, rank = size(group), dist.get_rank()
    all_of_them: list[Any] = [None] * n
    dist.all_gather_object(all_of_them, {"rank": rank, "text": "x" * 3000 * rank}, group=group)
    told = [{"a": rank}, rank]
    dist.broadcast_object_list(told, 1, group=group)
    at_root: list[Any] = [None] * n
    dist.gather_object((rank,), at_root if rank == 0 else None, 0, group=group)
    mine_now: list[Any] = [None]
    dist.scatter_object_list(mine_now, [f"for {r}" for r in range(n)] if rank == 0 else None, 0, group=group)
    return [all_of_them, told, at_root, mine_now]


@case
def functional(group: Any) -> Any:
    n = size(group)
    return [
        funcol.wait_tensor(funcol.all_reduce(mine(40_000), "sum", group)),
        funcol.wait_tensor(funcol.all_gather_tensor(mine(4, 6), 1, group)),
        funcol.wait_tensor(funcol.reduce_scatter_tensor(mine(4 * n, 6), "sum", 0, group)),
        funcol.wait_tensor(funcol.broadcast(mine(5), 1, group)),
        funcol.wait_tensor(funcol.all_to_all_single(mine(n * 2), None, None, group)),
        *(funcol.wait_tensor(x) for x in funcol.all_reduce_coalesced([mine(3), mine(9_000)], "max", group)),
    ]


@case
def compiled(group: Any) -> Any:
    """torch.compile of functional collectives."""

    @torch.compile(backend="eager", fullgraph=True)
    def double(x: Tensor) -> Tensor:
        return funcol.all_reduce(x * 2, "sum", group) + 1

    return [double(mine(100))]


@case
def async_works(group: Any) -> Any:
    x, y = mine(60_000), mine(10)
    first, second = (dist.all_reduce(each, group=group, async_op=True) for each in (x, y))
    doubled = first.get_future().then(lambda future: [part * 2 for part in future.value()])
    second.wait()
    first.wait()
    assert first.is_completed()
    assert second.is_completed()
    return [x, y, doubled.wait()[0]]


@case
def barriers(group: Any) -> Any:
    dist.barrier(group=group)
    work = dist.barrier(group=group, async_op=True)
    work.wait()
    return []


@case
def sparse(group: Any) -> Any:
    rank = dist.get_rank()
    where = torch.tensor([[rank, 2, 3]])
    x = torch.sparse_coo_tensor(where, torch.tensor([1.0, 2.0, 3.0 + rank]), (5,)).coalesce()
    dist.all_reduce(x, group=group)
    return [x.to_dense()]


@case
def subgroups(group: Any) -> Any:
    """Groups of some ranks, and both dimensions of a mesh."""
    from torch.distributed.device_mesh import init_device_mesh

    backend = dist.get_backend(group)
    alone = dist.new_group([1], backend=backend)
    both = dist.new_group([1, 0], backend=backend)
    x, y = mine(5), mine(5)
    dist.all_reduce(x, group=both)
    if dist.get_rank() == 1:
        dist.all_reduce(y, group=alone)
    mesh = init_device_mesh(
        "cpu", (1, size(group)), mesh_dim_names=("a", "b"), backend_override={"a": backend, "b": backend}
    )
    z, w = mine(7), mine(7)
    dist.all_reduce(z, group=mesh["b"].get_group())
    dist.all_reduce(w, group=mesh["a"].get_group())
    return [x, y, z, w]


@case
def splits(group: Any) -> Any:
    """Groups that a group is split into, twice of the same ranks, which keep their rank; other ranks get none. (gloo
    mixes up two of the same ranks.)"""
    rank = dist.get_rank()
    for salt in range(2):
        made = group.split_group([0, 1], group_desc="half")
        assert (made is None) == (rank > 1)
        if made is not None:
            x = mine(9, salt=salt)
            made.allreduce([x]).wait()
            assert torch.equal(x, mine(9, of=0, salt=salt) + mine(9, of=1, salt=salt))
            assert (made.rank(), made.size(), made.group_desc) == (rank, 2, "half")
            made.shutdown()
    return []
