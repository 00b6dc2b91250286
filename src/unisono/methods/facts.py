"""What a method says of itself: `Facts`, in its own file, for the conformance suite to hold it to; and a `Pattern` of
its exchange and of what it keeps, with which `plan`, `simulate`, `auto` and `un.memory` predict it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, fields
from typing import Any, Literal

from unisono.methods.reducer import Reducer
from unisono.predict.costs import all_reduce_bytes
from unisono.predict.costs.anatomy import Kind

# exact: as one process on the joined batches. rounded: each number is off by a little. compressed: most is left out,
# and made up for later or in the mean over steps. other: another course of training, which may end elsewhere.
Grade = Literal["exact", "rounded", "compressed", "other"]


@dataclass(frozen=True)
class Sizes:
    """What the bytes of a reduction depend on: the shapes of a bucket's float32 tensors, the ranks, the step.

    >>> Sizes([(10, 3), (5,)], ranks=4, step=0).all_reduce(100)
    150
    """

    shapes: Sequence[tuple[int, ...]]
    ranks: int
    step: int
    look_up: Callable[[str, Sizes], int] = field(default=lambda spec, sizes: 0, repr=False)

    @property
    def numbers(self) -> int:
        """Numbers in the bucket's line: every tensor starts on a cache line of 64 bytes."""
        return sum(16 * -(-_count(shape) // 16) for shape in self.shapes)

    @property
    def matrices(self) -> list[tuple[int, ...]]:
        """The shapes of two dimensions or more, the empty ones left out."""
        return [shape for shape in self.shapes if len(shape) >= 2 and _count(shape)]

    @property
    def in_vectors(self) -> int:
        """Numbers in tensors of fewer than two dimensions."""
        return sum(_count(shape) for shape in self.shapes if len(shape) < 2)

    def all_reduce(self, nbytes: int) -> int:
        """What one rank sends to all-reduce so many bytes."""
        return all_reduce_bytes(nbytes, self.ranks)

    def gather(self, nbytes: int) -> int:
        """What one rank sends so that every other rank has these bytes."""
        return (self.ranks - 1) * nbytes

    def share(self, n: int) -> int:
        """Numbers in one rank's share of a line of n: shares start at multiples of 64."""
        return 64 * math.ceil(n / self.ranks / 64)

    def sent_by(self, spec: str, shapes: Sequence[tuple[int, ...]] | None = None) -> int:
        """Bytes that another method's example sends for these tensors (None: all); for methods that wrap others."""
        return self.look_up(spec, self if shapes is None else Sizes(shapes, self.ranks, self.step, self.look_up))


def _count(shape: Sequence[int]) -> int:
    return math.prod(shape)


@dataclass(frozen=True)
class Example:
    """A spec that the suite tests a method with, and what is true of it.

    exact: a reducer's mean is the true mean; training under a strategy is one process's on the joined batches.
    rounds_mean: the mean itself is rounded, on all ranks alike, and no rank keeps that part.

    Of a reducer:
    memory: it keeps what it did not send, and sends it later.
    conserves: what was given and not sent is what is kept (not if momentum is kept too).
    bytes: a closed form of the bytes that one rank sends, which the ledger's count must equal (None: the data decide).

    Of a strategy:
    varies: what meets what depends on time, so two runs differ.
    by_clock: it decides by times that it measured, so another machine may decide otherwise.
    splits_state: a rank that is lost takes its part of the state along.
    one_model: the ranks of a host have one model in common: what one writes to it, all have.
    """

    spec: str
    _: KW_ONLY
    exact: bool = False
    rounds_mean: bool = False
    memory: bool = True
    conserves: bool = True
    bytes: Callable[[Sizes], int] | None = None
    varies: bool = False
    by_clock: bool = False
    splits_state: bool = False
    one_model: bool = False


@dataclass(frozen=True)
class Convergence:
    """What a method does to training: how much, and in words."""

    grade: Grade
    note: str


@dataclass(frozen=True)
class Facts:
    """What is true of a method. Its module has them as `FACTS`; the first example is used if one is enough.

    refuses: settings that it refuses, and a word of the reason: `{"k=0": "fraction"}`.
    convergence: its effect on training; None: that of the methods that it is put around. `unisono plan` tries a method
        of itself where it says that.
    plans: specs that `unisono plan` tries (None: its bare name).
    unpredicted: why their step time cannot be predicted; empty: it can.

    Of a reducer:
    trains_as: specs of strategies to train with (none: `allreduce` with the first example).

    Of a strategy:
    own_gradients: gradients and momenta are each rank's own.
    needs_adam: it takes over the step of an Adam.
    """

    examples: Sequence[Example]
    refuses: Mapping[str, str] = field(default_factory=dict)
    _: KW_ONLY
    convergence: Convergence | None = None
    plans: Sequence[str] | None = None
    unpredicted: str = ""
    trains_as: Sequence[str] = ()
    own_gradients: bool = False
    needs_adam: bool = False


# Who waits for whom. synchronous: all workers for each other in every window, bucket by bucket. windows: all for each
# other, but only once in `every` windows. neighbours: each worker for those that it hears. servers: each for the
# servers that it pushes to and pulls from. alone: nobody.
Style = Literal["synchronous", "windows", "neighbours", "servers", "alone"]


@dataclass(frozen=True)
class Keeps:
    """What a worker keeps of parameters, gradients and optimizer state, and where.

    stage: what is split over the workers. 0: nothing; 1: what the optimizer steps, and its state; 2: gradients too;
        3: parameters too.
    once_a_host: the workers of a host have parameters and state in common, and each has gradients of its own.
    The others are settings of `zero`, and mean what they mean there.
    """

    stage: int = 0
    once_a_host: bool = False
    accumulate: int = 1
    precision: str | None = None
    optimizer_on: str = "device"
    params_on: str = "device"
    moments: str = "fp32"
    delayed_update: bool = False
    step_ahead: bool = False
    defer: int | None = None
    kept_share: float = 0.0
    spare: bool = False
    within: Any = None
    across: Reducer | None = None
    gather: str | None = None

    def count_shards(self, workers: int, per_host: int) -> int:
        """Into how many parts that which is split is split: as many as a group has workers."""
        if self.within is None:
            return workers
        if self.within == "host":
            size = per_host
        else:
            size = self.within if isinstance(self.within, int) else self.within.size()
        return size if workers % size == 0 else workers

    @classmethod
    def as_set(cls, strategy: object, **known: Any) -> Keeps:
        """From the settings of a strategy that have these names."""
        names = [each.name for each in fields(cls) if hasattr(strategy, each.name)]
        return cls(**{name: getattr(strategy, name) for name in names}, **known)


@dataclass(frozen=True)
class Pattern:
    """How a method with its settings exchanges (`Strategy.pattern`).

    reducer: how means are taken; None: exactly.
    every: windows from one exchange to the next.
    delay: windows that may pass until an exchange is used; 0: the program waits for it.
    overlap: exchanges go on while the program computes.
    in_every_window: settings under which the method exchanges in each window, to measure an exchange in few steps.
    convergence: the effect on training, if these settings decide about it; None: what the method's FACTS say.
    one_host, even_world: it needs all workers on one host, or an even number of them.
    gathers: how often a window gathers the parameters, which are split over the workers (or over those of a group, see
        `Keeps.within`); 0: every worker has all.
    gathered: bytes that are sent for each byte of them: less than 1 if they travel in fewer bits.
    hears: of neighbours: `hears(exchange, rank, workers).heard` are the ranks whose models a rank gets. `rank` may be
        an array of ranks.
    next_door: neighbours are the ranks before and after, so that few models leave a host.
    bits: of a number in a model on its way to neighbours; None: as it is.
    servers: how many there are.
    staleness: of servers: windows that a worker may be ahead of the slowest; None: any number.
    round_every_s: nobody waits, and models are averaged this long after the last average.
    keeps: what a worker keeps; None: the method does not say, and its memory is not known.
    """

    style: Style = "synchronous"
    reducer: Reducer | None = None
    every: int = 1
    delay: int = 0
    overlap: bool = True
    in_every_window: Mapping[str, Any] = field(default_factory=dict)
    convergence: Convergence | None = None
    one_host: bool = False
    even_world: bool = False
    gathers: int = 0
    gathered: float = 1.0
    hears: Callable[..., Any] | None = None
    next_door: bool = False
    bits: int | None = None
    servers: int = 1
    staleness: int | None = 0
    round_every_s: float | None = None
    keeps: Keeps | None = None

    @property
    def kind(self) -> Kind:
        """Whether a step waits for its own exchange, for an earlier one, or for none."""
        return "delayed" if self.delay else "asynchronous" if self.style == "alone" else "synchronous"
