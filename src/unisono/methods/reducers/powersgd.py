"""Low-rank gradients with error feedback. Vogels, Karimireddy, Jaggi: PowerSGD (NeurIPS 2019), arXiv:1905.13727."""

from __future__ import annotations

import hashlib
import math
import operator
from collections.abc import Callable, Sequence
from functools import partial
from typing import Annotated
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from unisono.methods.buckets import Bucket, find_wide_dtype
from unisono.methods.checks import AtLeast, Range, validate
from unisono.methods.facts import Convergence, Example, Facts, Sizes
from unisono.methods.kernels import lowrank
from unisono.methods.kernels.graphs import Graphs
from unisono.methods.reducer import (
    Reduced,
    Reducer,
    SpareLines,
    Stages,
    State,
    all_reduce_bytes,
    rescale,
    residual_like,
    staged,
)
from unisono.world import World


def _count_bytes(rank: int) -> Callable[[Sizes], int]:
    """Two factors of each matrix that they make at least twice smaller; the rest goes with the first of them."""

    def count(sizes: Sizes) -> int:
        left = right = 0
        rest = sizes.in_vectors
        for shape in sizes.matrices:
            rows, columns = shape[0], math.prod(shape) // shape[0]
            small = min(rank, rows, columns)
            if rows * columns >= 2 * small * (rows + columns):
                left, right = left + small * rows, right + small * columns
            else:
                rest += rows * columns
        return sizes.all_reduce(4 * (left + rest)) + sizes.all_reduce(4 * right)

    return count


FACTS = Facts(
    [
        Example("powersgd(rank=1)", bytes=_count_bytes(1)),
        Example("powersgd(rank=2)", bytes=_count_bytes(2)),
        Example("powersgd(rank=2, feedback=False)", memory=False, bytes=_count_bytes(2)),
    ],
    refuses={"rank=0": "rank", "min_saving=0.5": "min_saving", "feedback=1": "feedback", "seed=0.5": "seed"},
    trains_as=["allreduce(reducer=powersgd(rank=1, min_saving=1.0), overlap=True, bucket_bytes=256)"],
    convergence=Convergence("compressed", "low-rank gradients; what is left out is made up for later"),
    plans=["powersgd(rank=1)", "powersgd(rank=4)"],
)


@validate
def powersgd(
    rank: Annotated[int, AtLeast(1, "the columns of the factors (2 to 4 are usual)")] = 4,
    *,
    feedback: bool = True,
    min_saving: Annotated[float, Range("how many times smaller the factors must be", at_least=1)] = 2.0,
    seed: int = 0,
) -> Reducer:
    """Send two thin factors of each matrix: one step of a power iteration, begun where the last one ended.

    A gradient G of shape (n, ...) is a matrix M = G + e of n rows, the rest its columns. In three phases:

    1. P = M Q; all-reduce P, together with the tensors that are not compressed;
    2. P <- orthonormal columns of P; Q = M^T P; e <- M - P Q^T with this Q, my own; all-reduce Q;
    3. the mean is P Q^T with the mean Q, which is kept for the next step.

    Tensors of fewer than two dimensions travel as they are, and so do matrices where factors save too little.
    In float16 and bfloat16 the factors and the residual are float32. Sends AR(4 [sum r (n + m) + vectors]).

    rank: r, columns of the factors; fewer where a matrix has fewer rows or columns.
    feedback: keep what was not sent, e, and add it to the next gradient.
    min_saving: compress a tensor only where its factors are this many times smaller.
    seed: of the first Q, which depends on the parameter's name and on nothing else.

    >>> from unisono.buckets import Bucket, find_wide_dtype
    >>> bucket = Bucket(0, [("weight", torch.zeros(64, 64))], lambda n, dtype: torch.empty(n, dtype=dtype))
    >>> _ = bucket.tensors[0].copy_(torch.outer(torch.arange(64.0), torch.ones(64)))  # a matrix of rank one
    >>> reducer = powersgd(rank=1)
    >>> reduced, state = reducer.reduce(bucket, reducer.init(bucket), World())
    >>> torch.allclose(reduced.mean[0], torch.outer(torch.arange(64.0), torch.ones(64)), atol=1e-4)
    True
    """
    plans: WeakKeyDictionary[Bucket, _Plan] = WeakKeyDictionary()

    def find_plan(bucket: Bucket) -> _Plan:
        if bucket not in plans:
            plans[bucket] = _Plan(bucket, rank, min_saving, seed)
        return plans[bucket]

    def init(bucket: Bucket) -> State:
        plan = find_plan(bucket)
        state: State = {"q": plan.keep(plan.noise.clone())}
        if feedback:
            state |= {"residual": residual_like(bucket), "lr": [None] * len(bucket.params)}
        return state

    def stages(bucket: Bucket, state: State, world: World) -> Stages:
        if feedback:
            rescale(bucket, state)
        return (yield from _phases(find_plan(bucket), bucket, state, world))

    def sends(bucket: Bucket, size: int) -> int:
        matrices, rest = _split_tensors(bucket, rank, min_saving)
        width = find_wide_dtype(bucket.dtype).itemsize
        first = sum(m.rank * m.rows for m in matrices.values()) * width
        first += sum(bucket.params[i].numel() for i in rest) * bucket.dtype.itemsize
        second = sum(m.rank * m.columns for m in matrices.values()) * width
        return all_reduce_bytes(first, size) + all_reduce_bytes(second, size)

    return staged(init, stages, memory=feedback, sends=sends)


def _phases(plan: _Plan, bucket: Bucket, state: State, world: World) -> Stages:
    """The three phases of a step."""
    layout, flat, residual = plan.layout, bucket.flat, state.get("residual")
    memory, q = plan.memory, plan.read_q(state["q"])
    kept = None if residual is None else plan.spare.beside(bucket, residual)
    lasting = [flat, residual, kept, q]  # with the plan's own memory, all that kernels touch

    # 1. P = M Q, and what is not compressed
    def multiply_left() -> None:
        lowrank.make_basis(layout, q, plan.noise, memory.basis)
        lowrank.multiply_left(layout, flat, residual, memory.basis, memory.p, memory.rest)

    plan.graphs.run("left", lasting, multiply_left)
    given = memory.keep_rest() if world.size > 1 else memory.rest
    handle = world.all_reduce(memory.first, "mean", tag=bucket.tag)
    yield
    handle.wait()

    # 2. Q = M^T P
    def multiply_right() -> None:
        lowrank.orthonormalise(layout, memory.p, memory.unit)
        lowrank.multiply_right(layout, flat, residual, memory.unit, memory.q)

    if layout.matrices:
        plan.graphs.run("right", lasting, multiply_right)
    mine = memory.keep_q() if world.size > 1 else memory.q
    handle = world.all_reduce(memory.second, "mean", tag=bucket.tag)
    yield
    handle.wait()

    # 3. The mean P Q^T and the residual; where a number is not finite, on whatever rank, all ranks see it here
    def finish() -> None:
        memory.find_overflow()
        factors = (memory.unit, mine, memory.q, memory.rest)
        lowrank.finish(layout, flat, residual, kept, *factors, q, memory.overflow)

    plan.graphs.run("finish", [*lasting, mine], finish)
    after = {**state, "q": plan.kept} if kept is None else {**state, "q": plan.kept, "residual": kept}
    return Reduced(bucket.tensors, partial(plan.sent, bucket, mine, given), memory.overflow), after


def _split_tensors(bucket: Bucket, rank: int, min_saving: float) -> tuple[dict[int, lowrank.Matrix], list[int]]:
    """The tensors to compress, as matrices, and those that travel as they are.

    Rows are the outermost dimension in memory: the first one, unless a parameter is transposed.
    """
    matrices: dict[int, lowrank.Matrix] = {}
    rest = []
    widths = find_wide_dtype(bucket.dtype).itemsize, bucket.dtype.itemsize
    for i, (x, start) in enumerate(zip(bucket.tensors, bucket.starts, strict=True)):
        if x.dim() >= 2 and x.numel():
            rows = x.shape[max(range(x.dim()), key=lambda d: (x.stride(d) if x.shape[d] > 1 else 0, -d))]
            columns = x.numel() // rows
            r = min(rank, rows, columns)
            if x.numel() * widths[1] >= min_saving * r * (rows + columns) * widths[0]:
                matrices[i] = lowrank.Matrix(start, rows, columns, r)
                continue
        if x.numel():
            rest.append(i)
    return matrices, rest


class _Memory:
    """Memory for a step. P, what is not compressed, and Q lie in one line, where their dtypes are one."""

    def __init__(self, layout: lowrank.Factors, bucket: Bucket) -> None:
        dtype, sizes = find_wide_dtype(bucket.dtype), [layout.p_size, sum(layout.rest_sizes), layout.q_size]
        new = partial(torch.empty, device=bucket.device)
        self.unit, self.basis = new(layout.p_size, dtype=dtype), new(layout.q_size, dtype=dtype)
        if bucket.dtype == dtype:
            line = new(sum(sizes), dtype=dtype)
            self.p, self.rest, self.q = line.split(sizes)
            first = [line[: sizes[0] + sizes[1]]]
            self._shared = [line]
        else:
            line = new(sizes[0] + sizes[2], dtype=dtype)
            self.p, self.q = line.split([sizes[0], sizes[2]])
            self.rest = new(sizes[1], dtype=bucket.dtype)
            first = [self.p, self.rest]
            self._shared = [line, self.rest]
        self.first, self.second, self._shared = (
            [x for x in lines if x.numel()] for lines in (first, [self.q], self._shared)
        )

        self.overflow = torch.zeros((), dtype=dtype, device=bucket.device)
        self._kept: dict[str, Tensor] = {}

    def keep_rest(self) -> Tensor:
        """A copy of what I send as it is, until the next step."""
        return self._keep("rest", self.rest)

    def keep_q(self) -> Tensor:
        """A copy of my own Q, until the next step."""
        return self._keep("q", self.q)

    def _keep(self, name: str, line: Tensor) -> Tensor:
        if name not in self._kept:
            self._kept[name] = torch.empty_like(line)
        return self._kept[name].copy_(line)

    def find_overflow(self) -> None:
        """`overflow` is NaN if a number of what ranks have in common is not finite: no waiting for a device."""
        self.overflow.zero_()
        for x in self._shared:
            self.overflow.add_(torch.linalg.vector_norm(x, math.inf), alpha=0)


class _Plan:
    """What a bucket's shapes decide: which tensors are compressed, and where everything lies."""

    def __init__(self, bucket: Bucket, rank: int, min_saving: float, seed: int) -> None:
        matrices, rest = _split_tensors(bucket, rank, min_saving)
        self._places = {i: k for k, i in enumerate(matrices)}
        self._count = len(bucket.params)
        parts = [(bucket.starts[i], bucket.params[i].numel()) for i in rest]
        self.layout = lowrank.Factors(list(matrices.values()), parts)
        self.memory = _Memory(self.layout, bucket)
        self.noise = torch.empty(self.layout.q_size, dtype=find_wide_dtype(bucket.dtype), device=bucket.device)
        for i, view in zip(matrices, self.layout.view_q(self.noise), strict=True):
            view.copy_(_draw_first_q(seed, bucket.names[i], view.shape))
        self.graphs = Graphs()
        self.spare = SpareLines()
        self.kept: list[Tensor | None] = []
        self._line = self.noise

    def keep(self, line: Tensor) -> list[Tensor | None]:
        """A line of Q as a state holds it: one entry a tensor, all of them views of the line."""
        views = self.layout.view_q(line)
        self.kept = [views[self._places[i]] if i in self._places else None for i in range(self._count)]
        self._line = line
        return self.kept

    def read_q(self, entries: Sequence[Tensor | None]) -> Tensor:
        """The line of a state's Q. One that comes from elsewhere, of another rank say, is padded or cut."""
        if len(entries) != len(self.kept) or any(map(operator.is_not, entries, self.kept)):
            line = self.noise.clone()
            for i, view in zip(self._places, self.layout.view_q(line), strict=True):
                old = entries[i]
                if old is not None and old.dim() == 2 and old.shape[1] == view.shape[1]:
                    r = min(len(old), len(view))
                    view[:r].copy_(old[:r])
            self.keep(line)
        return self._line

    def sent(self, bucket: Bucket, mine: Tensor, given: Tensor, _: list[Tensor]) -> list[Tensor]:
        """My part of the mean: P Q^T with my own Q, and all of what was not compressed."""
        line = torch.zeros_like(bucket.flat)
        lowrank.multiply_factors(self.layout, self.memory.unit, mine, given, line)
        return bucket.views(line)


def _draw_first_q(seed: int, name: str, shape: Sequence[int]) -> Tensor:
    """Seeded normal numbers: the same on every rank, and wherever the parameter lies."""
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
    return torch.randn(tuple(shape), generator=generator, dtype=torch.float64)
