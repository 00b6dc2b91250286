"""Every collective on every op, dtype and shape, against plain torch in one process; for any kind of world.

Each rank can make every other rank's input itself, so each checks its own results.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from unisono import World

FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
FP8 = [torch.float8_e4m3fn, torch.float8_e5m2]
INTEGERS = [
    *(torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.uint8, torch.uint16, torch.uint32, torch.uint64),
]
COMPLEX = [torch.complex64, torch.complex128]
DTYPES = [*FLOATS, *FP8, *INTEGERS, torch.bool, *COMPLEX]
TOLERANCE = {
    torch.float64: 1e-12,
    torch.complex128: 1e-12,
    torch.float32: 1e-6,
    torch.complex64: 1e-6,
    torch.float16: 4e-3,
    torch.bfloat16: 3e-2,
}


def ops_of(dtype: torch.dtype) -> list[str]:
    if dtype == torch.bool:
        return ["max", "min"]
    if dtype.is_complex:
        return ["sum", "mean"]
    return ["sum", "mean", "max", "min"] if dtype.is_floating_point else ["sum", "max", "min"]


def values(rank: int, shape: Sequence[int], dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Rank `rank`'s input: random, and large enough to wrap where the dtype is an integer."""
    rng = torch.Generator().manual_seed(1000 * seed + rank)
    if dtype.is_complex:
        return torch.randn(*shape, 2, generator=rng, dtype=torch.float64).view(torch.complex128).squeeze(-1).to(dtype)
    if dtype in FP8:
        return torch.randint(-4, 5, tuple(shape), generator=rng).float().to(dtype)
    if dtype.is_floating_point:
        return torch.randn(tuple(shape), generator=rng, dtype=torch.float64).to(dtype)
    raw = torch.randint(-(2**63), 2**63 - 1, tuple(shape), generator=rng)
    return raw > 0 if dtype == torch.bool else raw.to(dtype)


def reference(inputs: Sequence[Tensor], op: str) -> Tensor:
    """What the reduction should be: in fp64 or in whole numbers, rounded once."""
    dtype = inputs[0].dtype
    if dtype == torch.uint64:
        columns = zip(*(x.flatten().tolist() for x in inputs), strict=True)
        reduced = [{"sum": sum, "max": max, "min": min}[op](column) % 2**64 for column in columns]
        return torch.tensor(reduced, dtype=torch.uint64).view(inputs[0].shape)
    wide = torch.complex128 if dtype.is_complex else torch.float64 if dtype.is_floating_point else torch.int64
    stack = torch.stack([x.to(wide) for x in inputs])
    reduced_ = {"sum": stack.sum, "mean": stack.mean, "max": stack.amax, "min": stack.amin}[op](0)
    return reduced_.to(dtype)


def check_equal(got: Tensor, expected: Tensor, what: str, *, exact: bool = True) -> None:
    assert got.dtype == expected.dtype, f"{what}: dtype {got.dtype}, expected {expected.dtype}"
    assert got.shape == expected.shape, f"{what}: shape {got.shape}, expected {expected.shape}"
    if exact or got.dtype not in TOLERANCE:
        same = got.contiguous().view(-1).view(torch.uint8).equal(expected.contiguous().view(-1).view(torch.uint8))
        same = same or got.double().equal(expected.double()) if got.dtype.is_floating_point else same
        assert same, f"{what}: got {got.flatten()[:8]}, expected {expected.flatten()[:8]}"
    else:
        near = TOLERANCE[got.dtype]
        wide = torch.complex128 if got.dtype.is_complex else torch.float64
        torch.testing.assert_close(got.to(wide), expected.to(wide), rtol=near, atol=near, msg=what)


def check_all_reduce(world: World, dtype: torch.dtype, op: str, shape: Sequence[int]) -> None:
    what = f"all_reduce {op} {dtype} {tuple(shape)}"
    inputs = [values(r, shape, dtype) for r in range(world.size)]
    x = inputs[world.rank].clone()
    assert world.all_reduce(x, op, tag=what).wait() is x
    check_equal(x, reference(inputs, op), what, exact=op in ("max", "min"))
    if x.numel():
        theirs = world.all_gather(x, even=True, tag=what).wait()
        for other in theirs:  # the same bits on every rank
            check_equal(other, x, f"{what}, bits")


def check_reduce_scatter(world: World, dtype: torch.dtype, op: str) -> None:
    what = f"reduce_scatter {op} {dtype}"
    inputs = [values(r, [world.size * 3, 5], dtype) for r in range(world.size)]
    rows = slice(3 * world.rank, 3 * world.rank + 3)
    got = world.reduce_scatter(inputs[world.rank].clone(), op, tag=what).wait()
    check_equal(got, reference(inputs, op)[rows], what, exact=op in ("max", "min"))
    lists = [[values(10 * r + k, [k * 7], dtype) for k in range(world.size)] for r in range(world.size)]  # uneven
    got = world.reduce_scatter(lists[world.rank], op, tag=what).wait()
    expected = reference([parts[world.rank] for parts in lists], op)
    check_equal(got, expected, f"{what}, uneven", exact=op in ("max", "min"))


def check_movers(world: World, dtype: torch.dtype) -> None:
    """all_gather (even and uneven), broadcast, all_to_all: bits do not change."""
    size, me = world.size, world.rank
    for shape in ([2, 3], [], [0]):
        every = [values(r, shape, dtype) for r in range(size)]
        for even in (False, True):
            for got, expected in zip(world.all_gather(every[me], even=even).wait(), every, strict=True):
                check_equal(got, expected, f"all_gather {dtype} {shape}")
    uneven = [values(r, [r, 2], dtype) for r in range(size)]
    for got, expected in zip(world.all_gather(uneven[me]).wait(), uneven, strict=True):
        check_equal(got, expected, f"all_gather {dtype}, uneven")
    for src in range(size):
        x = values(me, [4, 3], dtype)
        assert world.broadcast(x, src).wait() is x
        check_equal(x, values(src, [4, 3], dtype), f"broadcast {dtype} from {src}")
    sent = [[values(10 * r + k, [(r + 2 * k) % 4, 2], dtype) for k in range(size)] for r in range(size)]
    for r, got in enumerate(world.all_to_all(sent[me]).wait()):
        check_equal(got, sent[r][me], f"all_to_all {dtype} from {r}")
    into = [torch.empty_like(sent[r][me]) for r in range(size)]
    world.all_to_all(sent[me], out=into).wait()
    for r, got in enumerate(into):
        check_equal(got, sent[r][me], f"all_to_all {dtype} from {r} into given memory")


def check_lists_and_layouts(world: World) -> None:
    size, me = world.size, world.rank
    dtypes = [torch.float32, torch.int64, torch.bfloat16, torch.float32, torch.complex64, torch.uint16]
    shapes: list[list[int]] = [[3], [], [2, 2], [0], [5], [300]]
    make = [[values(r, s, d, seed=i) for i, (s, d) in enumerate(zip(shapes, dtypes, strict=True))] for r in range(size)]
    mine = [x.clone() for x in make[me]]
    assert world.all_reduce(mine, "sum", tag="mixed list").wait() is mine
    for i, x in enumerate(mine):
        check_equal(x, reference([parts[i] for parts in make], "sum"), f"list {i}", exact=False)
    mine = [x.clone() for x in make[me]]
    assert world.broadcast(mine, size - 1).wait() is mine
    for x, expected in zip(mine, make[size - 1], strict=True):
        check_equal(x, expected, "broadcast list")

    def strided(rank: int) -> Tensor:
        return values(rank, [6, 8], torch.float32).t()[::2]

    one = [values(me, [3], torch.float32)]
    assert world.all_reduce(one, "sum").wait() is one
    x = strided(me).contiguous() if me == 0 else strided(me)
    world.all_reduce(x, "sum").wait()
    check_equal(x, reference([strided(r) for r in range(size)], "sum"), "orders of memory that differ", exact=False)
    base = values(me, [6, 8], torch.float32)
    x = base.t()[::2]
    world.all_reduce(x, "sum").wait()
    check_equal(x, reference([strided(r) for r in range(size)], "sum"), "non-contiguous all_reduce", exact=False)
    check_equal(base.t()[1::2], values(me, [6, 8], torch.float32).t()[1::2], "what lies between is left alone")
    x = strided(me)
    world.broadcast(x, 0).wait()
    check_equal(x, strided(0), "non-contiguous broadcast")
    for got, r in zip(world.all_gather(strided(me)).wait(), range(size), strict=True):
        check_equal(got, strided(r), "non-contiguous all_gather")
    parts = [strided(10 * me + k) for k in range(size)]
    for r, got in enumerate(world.all_to_all(parts).wait()):
        check_equal(got, strided(10 * r + me), "non-contiguous all_to_all")
    got = world.reduce_scatter([strided(10 * me + k) for k in range(size)], "sum").wait()
    check_equal(got, reference([strided(10 * r + me) for r in range(size)], "sum"), "non-contiguous parts", exact=False)
    lazy = values(me, [4], torch.complex64).conj()
    world.all_reduce(lazy, "sum").wait()
    expected = reference([values(r, [4], torch.complex64).conj().resolve_conj() for r in range(size)], "sum")
    check_equal(lazy.resolve_conj(), expected, "a lazy conjugate", exact=False)


def check_outs(world: World) -> None:
    """Results into memory that is given, and into memory of the world's own."""
    size, me = world.size, world.rank
    for make in (torch.empty, world.empty):
        out = make(4, dtype=torch.float32)
        inputs = [values(r, [4 * size], torch.float32) for r in range(size)]
        assert world.reduce_scatter(inputs[me], "mean", out=out).wait().data_ptr() == out.data_ptr()
        expected = reference(inputs, "mean")[4 * me : 4 * me + 4]
        check_equal(out, expected, "reduce_scatter(out=)", exact=False)
        outs = [make(3, dtype=torch.int64) for _ in range(size)]
        world.all_gather(torch.full((3,), me), even=True, out=outs).wait()
        assert [o.tolist() for o in outs] == [[r] * 3 for r in range(size)]


def check_direct_messages(world: World) -> None:
    """Neighbours send to each other, all beginning with the send; small, empty, and larger than any box."""
    size, me = world.size, world.rank
    after, before = (me + 1) % size, (me - 1) % size
    for shape in ([3], [], [0], [1_500_000]):
        for dtype in (torch.float32, torch.bool):
            x = values(me, shape, dtype)
            into = torch.zeros(shape, dtype=dtype)
            sent = world.send(x, after)
            assert world.recv(into, before).wait() is into
            assert sent.wait() is x
            check_equal(into, values(before, shape, dtype), f"send {dtype} {shape}")
    strided = torch.zeros(4, 6).t()[::2]
    sent = world.send(values(me, [6, 4], torch.float32)[::2], after)
    world.recv(strided, before).wait()
    sent.wait()
    check_equal(strided, values(before, [6, 4], torch.float32)[::2], "non-contiguous direct messages")
    handles = [world.send(torch.tensor([me, i]), after) for i in range(5)]  # in order, several on their way
    for i in range(5):
        assert world.recv(torch.zeros(2, dtype=torch.int64), before).wait().tolist() == [before, i]
    for handle in handles:
        handle.wait()


def check_async(world: World, *, large: int = 50_000) -> None:
    """Many in flight, large and small mixed, waited for in another order."""
    size, me = world.size, world.rank
    lengths = [1, large, 17, 3, large + 1, 1000] * 7
    tensors = [torch.full((n,), float(me + i), dtype=torch.float64) for i, n in enumerate(lengths)]
    handles = [world.all_reduce(x, "sum", tag=f"async/{i}") for i, x in enumerate(tensors)]
    for i in sorted(range(len(handles)), key=lambda i: (i * 5) % 7):
        got = handles[i].wait()
        assert handles[i].done()
        assert got is tensors[i]
        assert got.eq(sum(range(size)) + size * i).all(), f"async {i}"
        assert handles[i].wait() is got


def check_objects(world: World) -> None:
    def thing(rank: int) -> dict[str, object]:
        long = "x" * (rank * 5000)
        return {"rank": rank, "text": long, "bytes": bytes([rank]) * 300, "list": [None, 1.5, float("inf")]}

    assert world.gather_objects(thing(world.rank)) == [thing(r) for r in range(world.size)]
    for src in range(world.size):
        assert world.broadcast_object(thing(world.rank), src) == thing(src)
    state = {"w": torch.arange(70_000, dtype=torch.int32), 3: (torch.tensor(2.0, dtype=torch.bfloat16),)}
    got = world.broadcast_object(state if world.rank == 0 else None)
    assert got["w"].equal(state["w"])
    assert got[3][0].item() == 2.0


def check_worlds_inside(world: World) -> None:
    """Groups of ranks, in the order given; groups of groups; a channel beside the world."""
    size, me = world.size, world.rank
    reverse = world.split([list(range(size))[::-1]])
    assert (reverse.rank, reverse.size) == (size - 1 - me, size)
    assert reverse.broadcast_object(me) == size - 1
    assert [int(x) for x in reverse.all_gather(torch.tensor(me)).wait()] == list(range(size))[::-1]
    groups = [[r for r in range(size) if r % 2 == k] for k in (0, 1)]
    half = world.split([g for g in groups if g])
    mine = groups[me % 2]
    assert half.gather_objects(me) == mine
    x = torch.full((5000,), float(me))
    assert half.all_reduce(x, "sum").wait().eq(sum(mine)).all()
    quarter = half.split([[r] for r in range(half.size)])
    assert quarter.size == 1
    assert quarter.all_reduce(torch.ones(2), "sum").wait().tolist() == [1.0, 1.0]
    channel = world.channel()
    a, b = torch.tensor([1.0 + me]), torch.tensor([2.0 * me])
    behind = world.all_reduce(a, "max")
    channel.all_reduce(b, "max").wait()
    assert (behind.wait().item(), b.item()) == (float(size), 2.0 * (size - 1))
    hosts = world.split("host")
    same = [r for r in range(size) if world.hosts[r] == world.host]
    assert hosts.gather_objects(me) == same
    assert (world.local_rank, world.local_size) == (same.index(me), len(same))
    for inner in (reverse, half, quarter, channel, hosts):
        inner.close()


CHECKS: dict[str, Callable[[World], None]] = {
    "lists and layouts": check_lists_and_layouts,
    "outs": check_outs,
    "direct messages": lambda world: check_direct_messages(world) if world.size > 1 else None,
    "async": check_async,
    "objects": check_objects,
    "worlds inside": check_worlds_inside,
}


def check_dtype(world: World, dtype: torch.dtype) -> None:
    for op in ops_of(dtype):
        for shape in ([7], [], [0], [2, 700]):
            check_all_reduce(world, dtype, op, shape)
        check_reduce_scatter(world, dtype, op)
    check_movers(world, dtype)


def check_everything(world: World) -> str:
    """All of the above in one world."""
    for dtype in DTYPES:
        check_dtype(world, dtype)
    for check in CHECKS.values():
        check(world)
    world.barrier()
    return repr(world)
