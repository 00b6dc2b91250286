"""Top-k sparsification with error feedback: each worker sends only its largest numbers and keeps the rest for later.

Error feedback: Stich, Cordonnier and Jaggi, "Sparsified SGD with Memory" (2018). Momentum correction, momentum factor
masking, local clipping and ramped sparsity: Lin et al., "Deep Gradient Compression" (2018).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Annotated, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.optim import Optimizer

from unisono.methods.buckets import Bucket
from unisono.methods.checks import AtLeast, Range, check_setting, validate
from unisono.methods.facts import Convergence, Example, Facts, Sizes
from unisono.methods.kernels.graphs import Graphs
from unisono.methods.kernels.noise import Noise
from unisono.methods.kernels.select import Plan, Segment, count_kept, narrow_to, select_top, spread
from unisono.methods.reducer import (
    Codec,
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
from unisono.methods.reducers._chunked import Chunk, Chunks, ValueBits, build_sparse, check_count, count_chunked
from unisono.methods.reducers._subsets import Vectors
from unisono.world import World

Fraction = Annotated[float, Range("the fraction of a tensor that is sent", above=0, at_most=1, percent=True)]
_RAMP_FROM, _RAMP_BY = 0.25, 0.25  # the paper's warm-up sends 25 %, 6.25 %, 1.5625 %, ...


def _count_bytes(k: float) -> Callable[[Sizes], int]:
    """A value and a place for each number of a matrix that is sent, to every other rank; vectors in full."""

    def count(sizes: Sizes) -> int:
        kept = sum(max(1, round(k * math.prod(shape))) for shape in sizes.matrices)
        return sizes.gather(8 * kept) + sizes.all_reduce(4 * sizes.in_vectors)

    return count


FACTS = Facts(
    [
        Example("topk(k=0.1)", bytes=_count_bytes(0.1)),
        Example("topk(k=0.1, feedback=False)", memory=False, bytes=_count_bytes(0.1)),
        Example(
            "topk(k=0.1, momentum=0.9, clip=1.0, ramp=3)",
            conserves=False,
            bytes=lambda sizes: _count_bytes(0.25 if sizes.step < 3 else 0.1)(sizes),
        ),
        Example("topk(chunk=64, k=8, bits=2)", bytes=count_chunked(64, 8, 2)),
        Example("topk(chunk=256, k=0.1, decay=0.9)", conserves=False, bytes=count_chunked(256, 0.1, None)),
        Example("topk(chunk=64, k=64, bits=4, feedback=False)", memory=False, bytes=count_chunked(64, 64, 4)),
    ],
    refuses={
        "k=0": "fraction",
        "k=5": "k=0.05",
        "momentum=1": "momentum",
        "clip=0": "clip",
        "ramp=-1": "ramp",
        "chunk=100": "power of two",
        "chunk=64, k=65": "at most 64",
        "chunk=64, k=8, bits=9": "bits",
        "bits=2": "chunk=4096",
        "decay=0.5": "chunk=4096",
        "chunk=64, k=8, momentum=0.9": "no momentum",
        "chunk=64, k=8, decay=0.5, feedback=False": "feedback",
    },
    trains_as=[
        "allreduce(reducer=topk(k=0.1), overlap=True)",
        "allreduce(reducer=topk(k=0.1, clip=1.0, ramp=2))",
        "allreduce(reducer=topk(chunk=64, k=8, bits=2))",
    ],
    convergence=Convergence("compressed", "the largest numbers of each gradient; the rest is made up for later"),
    plans=["topk(k=0.01)"],
)


class _Options(NamedTuple):
    k: float
    feedback: bool
    momentum: float
    masking: bool
    clip: float | None
    ramp: int


@validate
def topk(
    k: Annotated[int | float, Range("the fraction of a tensor that is sent, or how many of a chunk", above=0)] = 0.01,
    *,
    feedback: bool = True,
    momentum: Annotated[float, Range(at_least=0, below=1)] = 0.0,
    masking: bool = True,
    clip: Annotated[float | None, Range("the largest norm of a tensor's gradient", above=0)] = None,
    ramp: Annotated[int, AtLeast(0, "steps")] = 0,
    chunk: Chunk | None = None,
    bits: ValueBits = None,
    decay: Annotated[float, Range("how much of what was kept stays", above=0, at_most=1)] = 1.0,
) -> Reducer:
    """The k largest of each tensor: p = e + g; send the top k of |p| with their places; e <- p - what was sent.

    The mean is that of the scattered tensors. Of equal magnitudes the first are taken; tensors of fewer than two
    dimensions go in full. Sends (N-1) * K * (itemsize + 4) bytes for K numbers: less than dense while k is under
    about 1/N. When the learning rate changes, e is scaled by old / new. For a dense start, see `warmup`.

    k: the fraction of a tensor that is sent, at least one number.
    feedback: keep what was not sent (e), and try again with the next gradient; otherwise it is lost.
    momentum: momentum correction, u <- m u + g; e <- e + u; the top k of e are sent. The optimizer's own momentum
        must be 0. Tensors that go in full get the momentum after the exchange.
    masking: set u to zero where numbers were sent, so that stale momentum does not carry them further.
    clip: scale each tensor's local gradient to a norm of at most clip / sqrt(N) before it is added up.
    ramp: steps in which k falls to its value from 25 % by factors of four.
    chunk: select in chunks of so many numbers, k of each (or the share k, if that is no whole number): a place then
        takes log2(chunk) bits instead of 32. Without momentum, clip and ramp.
    bits: of each value in a chunk, a sign and a level; what rounding leaves out is kept, too. None: values in full.
    decay: with chunks, e <- decay e before the gradient is added (SparseLoCo).

    >>> import torch
    >>> from unisono.world import World
    >>> bucket = Bucket(0, [("w", torch.zeros(2, 2))], lambda n, dtype: torch.empty(n, dtype=dtype))
    >>> _ = bucket.tensors[0].copy_(torch.tensor([[1.0, -4.0], [2.0, 0.5]]))
    >>> reducer = topk(0.25)
    >>> reduced, state = reducer.reduce(bucket, reducer.init(bucket), World())
    >>> reduced.mean[0].tolist(), state["residual"][:4].tolist()
    ([[0.0, -4.0], [0.0, 0.0]], [1.0, 0.0, 2.0, 0.5])
    """
    if momentum and not feedback:
        raise ValueError("momentum correction adds velocities up in the residual: it needs feedback=True")
    if chunk is not None:
        if momentum or clip is not None or ramp:
            raise ValueError("in chunks there is no momentum, clip or ramp: leave them out, or chunk")
        check_count(chunk, k)
        make_chunks = partial(Chunks, chunk=chunk, k=k, bits=bits)
        return build_sparse("topk", make_chunks, decay=decay, feedback=feedback)
    if bits is not None or decay != 1.0:
        raise ValueError("bits and decay are of sets in chunks: write topk(chunk=4096, k=64, ...)")
    check_setting("k", k, Fraction)
    options = _Options(k, feedback, momentum, masking, clip, ramp)
    works: WeakKeyDictionary[Bucket, _Workspace] = WeakKeyDictionary()

    def init(bucket: Bucket) -> State:
        if bucket.flat.numel() >= 2**31:
            raise ValueError(
                f"topk sends places as 32-bit integers, but a bucket has {bucket.flat.numel()} numbers: "
                "split the largest tensors"
            )
        state: State = {"step": 0}
        if options.feedback:
            state |= {"residual": residual_like(bucket), "lr": [None] * len(bucket.names)}
        if options.momentum:
            state["velocity"] = residual_like(bucket)
        return state

    def stages(bucket: Bucket, state: State, world: World) -> Stages:
        work = works.get(bucket)
        if work is None:
            work = works[bucket] = _Workspace(bucket)
        if options.feedback:
            rescale(bucket, state)
        if options.clip is not None:
            _clip(bucket.tensors, options.clip * bucket.scale / math.sqrt(world.size))
        return (yield from _phases(work, bucket, state, options, world))

    def sends(bucket: Bucket, size: int) -> int:
        work = _Workspace(bucket)
        full = sum(work.dense.lengths) * bucket.flat.element_size()
        each = bucket.flat.element_size() + 4
        return (size - 1) * work.find_plan(options.k).total * each + all_reduce_bytes(full, size)

    plain = not (momentum or clip is not None or ramp)
    return staged(
        init,
        stages,
        memory=options.feedback,
        sends=sends,
        check=_check_momentum if momentum else None,
        shard_codec=_make_codec(float(k)) if plain else None,
    )


def _make_codec(k: float) -> Codec:
    """The largest of a line by itself: their values in float32, then their places."""

    def encode(x: Tensor, _: Noise) -> Tensor:
        line, count = x.detach().float(), count_kept(k, len(x))
        code = torch.empty(8 * count, dtype=torch.uint8, device=x.device)
        values, places = code[: 4 * count].view(torch.float32), code[4 * count :].view(torch.int32)
        select_top(Plan([Segment(0, len(x), count)]), line, None, line, values, places)
        return code

    def decode(code: Tensor, n: int) -> Tensor:
        values, places = code.chunk(2)
        line = torch.zeros(n, dtype=torch.float32, device=code.device)
        return line.index_copy_(0, places.view(torch.int32).long(), values.view(torch.float32))

    return Codec(encode, decode, lambda n: 8 * count_kept(k, n))


def _phases(work: _Workspace, bucket: Bucket, state: State, options: _Options, world: World) -> Stages:
    """Select and send; spread what all ranks sent."""
    plan = work.find_plan(_find_fraction(state["step"], options))
    line, lines = work.find_messages(plan, bucket, world.size)
    dense, given = work.vectors, work.given
    names: list[str] = [name for name in ("residual", "velocity") if name in state]
    kept = {name: work.spare.beside(bucket, state[name], name) for name in names}
    former = [state[name] for name in kept]
    lasting = [bucket.flat, *former, *kept.values(), line, *lines]  # where these lie, all that is done is the same

    def select() -> None:
        work.take_vectors(bucket, state, kept)
        work.select(bucket, state, kept, plan, options, line)
        bucket.flat.zero_()

    work.graphs.run(("select", plan, bucket.scale), lasting, select)
    reducing = world.all_reduce(dense, "mean", tag=bucket.tag) if dense.numel() else None
    gathering = world.all_gather(line, even=True, out=lines, tag=bucket.tag) if plan.total else None
    yield
    if reducing is not None:
        reducing.wait()
    if gathering is not None:
        gathering.wait()

    def spread() -> None:
        work.overflow.copy_(work.spread(bucket, lines if plan.total else []) + dense.mul(0).sum())
        if options.momentum and dense.numel():
            work.add_momentum(state["velocity"], kept["velocity"], options.momentum, bucket.scale)
        work.dense.put(bucket.flat, dense)

    work.graphs.run(("spread", plan, bucket.scale), lasting, spread)
    state |= {**kept, "step": state["step"] + 1}
    return Reduced(bucket.tensors, lambda _: work.sent(bucket, line, given), work.overflow), state


class _Workspace:
    """What reducing a bucket needs besides its state: which tensors go how, and memory that stays where it is."""

    def __init__(self, bucket: Bucket) -> None:
        pairs = zip(bucket.starts, bucket.tensors, strict=True)
        self._sparse = [(at, x.numel()) for at, x in pairs if x.dim() >= 2 and x.numel()]
        self.dense = Vectors(bucket)
        self._plans: dict[float, Plan] = {}
        self.spare = SpareLines()
        self._messages: dict[tuple[Plan, int], tuple[Tensor, list[Tensor]]] = {}
        self._sum: Tensor | None = None
        count = sum(self.dense.lengths)
        self.vectors, self.given = bucket.flat.new_empty(count), bucket.flat.new_empty(count)
        self.overflow = torch.zeros((), dtype=torch.float32, device=bucket.device)
        self.graphs = Graphs()

    def find_plan(self, k: float) -> Plan:
        if k not in self._plans:
            self._plans[k] = Plan([Segment(start, n, count_kept(k, n)) for start, n in self._sparse])
        return self._plans[k]

    def find_messages(self, plan: Plan, bucket: Bucket, size: int) -> tuple[Tensor, list[Tensor]]:
        """Memory for my message, and for everyone's."""
        key = plan, size
        if key not in self._messages:
            new = partial(torch.empty, dtype=torch.uint8, device=bucket.device)
            nbytes = plan.total * (bucket.dtype.itemsize + 4)
            self._messages = {key: (new(nbytes), [new(nbytes) for _ in range(size)])}
        return self._messages[key]

    def take_vectors(self, bucket: Bucket, state: State, kept: State) -> None:
        """What is sent of the tensors that go in full, one after the other, with what another method kept of them."""
        if not self.dense.lengths:
            return
        if "residual" not in state:
            self.vectors.copy_(self.dense.take(bucket.flat))
        else:
            p = self.dense.take(state["residual"]).add_(self.dense.take(bucket.flat))
            self.vectors.copy_(narrow_to(p, bucket.dtype))
            self.dense.put(kept["residual"], p - self.vectors)
        self.given.copy_(self.vectors)

    def select(self, bucket: Bucket, state: State, kept: State, plan: Plan, options: _Options, line: Tensor) -> None:
        """What is sent of the others, as bytes; `kept` has the new residual and velocity after."""
        values, indices = _split_message(line, bucket.dtype)
        if not options.feedback:
            select_top(plan, bucket.flat, None, bucket.flat, values, indices)
            return
        grad = bucket.flat
        if options.momentum:  # in two roundings, so that every device has the same; without AMP's loss scale
            velocity = torch.mul(state["velocity"], options.momentum, out=kept["velocity"])
            velocity.add_(bucket.flat, alpha=1 / bucket.scale)
            grad = velocity if bucket.scale == 1 else velocity * bucket.scale
        select_top(plan, grad, state["residual"], kept["residual"], values, indices)
        if options.momentum and options.masking:
            velocity.index_fill_(0, indices.long(), 0)

    def add_momentum(self, before: Tensor, after: Tensor, momentum: float, scale: float) -> None:
        """Where all is sent, momentum is that of the mean: u <- m u + g, and u is the mean that counts."""
        wide = self.dense.take(before).mul_(momentum).add_(self.vectors, alpha=1 / scale)
        self.dense.put(after, wide)
        self.vectors.copy_(wide.mul_(scale))

    def spread(self, bucket: Bucket, lines: Sequence[Tensor]) -> Tensor:
        """Write the mean over all ranks into the bucket, which holds zeros; 16-bit numbers are added up in 32.

        Gives a flag that is NaN if a number is not finite.
        """
        opened = [_split_message(line, bucket.dtype) for line in lines]
        total, narrow = bucket.flat, bucket.dtype.itemsize < 4 and len(lines) > 1
        if narrow:
            if self._sum is None:
                self._sum = residual_like(bucket)
            total = self._sum
            for _, indices in opened:
                total.index_fill_(0, indices.long(), 0)
        flag = torch.zeros((), dtype=torch.float32, device=bucket.device)
        for i, (values, indices) in enumerate(opened):
            spread(total, values, indices, len(lines), flag, first=i == 0 and not narrow)
        if narrow:
            for _, indices in opened:
                bucket.flat.index_copy_(0, indices.long(), total.index_select(0, indices).to(bucket.dtype))
        return flag

    def sent(self, bucket: Bucket, line: Tensor, given: Tensor) -> list[Tensor]:
        """My part of the mean, as tensors."""
        values, indices = _split_message(line, bucket.dtype)
        flat = torch.zeros_like(bucket.flat).index_copy_(0, indices.long(), values)
        self.dense.put(flat, given)
        return bucket.views(flat)


def _split_message(line: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The values and places in a line of bytes: the wider ones first, so that both are aligned."""
    count = line.numel() // (dtype.itemsize + 4)
    if dtype.itemsize >= 4:
        return line[: count * dtype.itemsize].view(dtype), line[count * dtype.itemsize :].view(torch.int32)
    return line[count * 4 :].view(dtype), line[: count * 4].view(torch.int32)


def _clip(tensors: list[Tensor], most: float) -> None:
    """Scale each tensor to a norm of at most `most`; NaN and infinity still show afterwards."""
    for x in tensors:
        norm = torch.linalg.vector_norm(x, dtype=torch.float64)
        x.mul_((most / norm).clamp(max=1.0))


def _find_fraction(step: int, options: _Options) -> float:
    """The fraction that is sent at a step: a quarter, a sixteenth, ..., each for an equal share of the ramp."""
    if step >= options.ramp or options.k >= _RAMP_FROM:
        return options.k
    levels = math.ceil(math.log(options.k / _RAMP_FROM, _RAMP_BY) - 1e-9)
    return float(_RAMP_FROM * _RAMP_BY ** (step * levels // options.ramp))


def _check_momentum(optimizer: Optimizer, world: World) -> None:
    for group in optimizer.param_groups:
        own = group.get("momentum", 0) or group.get("betas", (0,))[0]
        if own:
            raise ValueError(
                f"topk with momentum does the work of the optimizer's momentum, but {type(optimizer).__name__} has "
                f"{own:g} of its own: give torch.optim.SGD with momentum=0, or topk without momentum"
            )
