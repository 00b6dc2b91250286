"""What a method says of its own exchange and of what it keeps, so that `plan`, `simulate`, `auto` and `un.memory` can
predict it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from unisono.methods.facts import Convergence
from unisono.methods.reducer import Reducer
from unisono.predict.costs.anatomy import Kind

__all__ = ["Keeps", "Pattern", "Style"]

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
    spare: bool = False

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
    gathers: how often a window gathers the parameters, which are split over the workers; 0: every worker has all.
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
