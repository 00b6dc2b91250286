"""0/1 Adam: Adam whose variance is frozen by a schedule, and whose momenta meet in signs, after ever more local steps.

Lu et al. 2022, "Maximizing Communication Efficiency for Large-scale Training via 0/1 Adam", arXiv:2202.06009.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from unisono.methods.buckets import BUCKET_BYTES, Bucket
from unisono.methods.checks import AtLeast
from unisono.methods.exchange.reduction import Residual
from unisono.methods.facts import Convergence, Example, Facts
from unisono.methods.reducer import Reduced, Reducer, Stages, State, staged, stages_of
from unisono.methods.spec import build
from unisono.methods.strategies._anchored import AnchoredReplica, Rounds
from unisono.methods.strategies._fragments import Fragment
from unisono.methods.strategies._frozen_adam import FrozenAdam, Moved, check_adam
from unisono.methods.strategy import Accumulate, BucketBytes, Buffers, ChangingReplica, Pattern, Replica, Strategy
from unisono.methods.strategy.sharing import take_weighted_mean
from unisono.world import World

FACTS = Facts(
    [
        Example("zero_one_adam(warmup=1, start=1, double=1, every=4)"),
        Example("zero_one_adam(warmup=1, refresh=1, start=1, every=2, reducer=dense)"),
    ],
    refuses={
        "warmup=0": "warmup",
        "refresh=0": "refresh",
        "warmup=5, start=4": "start",
        "double=0": "double",
        "every=0": "every",
        "accumulate=0": "accumulate",
        "buffers=sometimes": "buffers",
    },
    needs_adam=True,
    own_gradients=True,
    convergence=Convergence("other", "Adam whose second moment stands still, with local steps and momenta as signs"),
    plans=["zero_one_adam(warmup=1, start=1, double=1)"],
)


@dataclass(frozen=True)
class zero_one_adam(Strategy):
    """`qadam(warmup, refresh, reducer)` for `start` windows; then v stays as it is, and workers step on their own:

        m_i <- b1 m_i + (1 - b1) g_i,   x_i <- x_i - r m_i / d,   u_i <- u_i + r m_i

    with d = sqrt(v') + eps and r = lr / (1 - b1^t); and in windows ever further apart they meet:

        u = mean of u_i, in signs;   x_i <- x0 - u / d,   m_i <- u / (sum of r),   x0 <- x_i,   u_i <- 0

    u_i is d (x0 - x_i), and takes no memory of its own. AdamW's decay counts apart: x0 decays as the workers' models
    did, and m knows nothing of it. In the means each worker counts by the samples that it saw since they last met.

    warmup, refresh: as for qadam, until `start`: v is updated from gradients that travel in full, ever less often.
    start: windows after which v is frozen for good and local steps begin.
    every: windows from one meeting to the next, at most.
    double: from `start` on it is 2 windows; after so many meetings it is twice as long, and so on, up to `every`.
    reducer: how momenta are averaged (None: onebit(shares=True), 1/32 of the bytes, with error feedback on both ways).
    buffers: when workers meet, "average" them, "broadcast" rank 0's, or leave them "local".
    accumulate, bucket_bytes: as for allreduce.

    >>> [window for window in range(20) if zero_one_adam(warmup=1, start=4, every=4, double=3).meets(window)]
    [6, 8, 10, 14, 18]
    """

    warmup: Annotated[int, AtLeast(1, "windows of plain Adam")] = 100
    refresh: Annotated[int | None, AtLeast(1, "updates of v until their interval doubles")] = 16
    start: Annotated[int, AtLeast(1, "windows until local steps begin")] = 1000
    every: Annotated[int, AtLeast(1, "windows from one meeting to the next, at most")] = 16
    double: Annotated[int, AtLeast(1, "meetings until their interval doubles")] = 250
    reducer: Reducer | None = None
    buffers: Buffers = "average"
    accumulate: Accumulate = 1
    bucket_bytes: BucketBytes = BUCKET_BYTES

    def meets(self, window: int) -> bool:
        """Whether workers meet after this window, counted from 1, once local steps have begun."""
        since, interval = window - self.start, min(2, self.every)
        while interval < self.every and since > self.double * interval:
            since -= self.double * interval
            interval = min(2 * interval, self.every)
        return since > 0 and since % interval == 0

    def check(self, model: nn.Module, optimizer: Optimizer, world: World) -> None:
        if self.start < self.warmup:
            raise ValueError(f"start={self.start} before warmup={self.warmup} is over: local steps need a frozen v")
        check_adam("zero_one_adam", model, optimizer)

    def why_torch_optimizer(self) -> str:
        return "it exchanges Adam's momenta"

    def choose_reducer(self) -> Reducer:
        """The one given, or signs."""
        made: Reducer = build("onebit(shares=True)", kind="reducer")
        return made if self.reducer is None else self.reducer

    def pattern(self) -> Pattern:
        at_once = {"warmup": 1, "refresh": None, "start": 1, "every": 1}
        return Pattern("windows", self.choose_reducer(), self.every, overlap=False, in_every_window=at_once)

    def make(self, model: nn.Module, optimizer: Optimizer, world: World) -> Replica:
        return ZeroOneAdamReplica(model, optimizer, world, self)

    def make_first(self, model: nn.Module, optimizer: Optimizer, world: World) -> Replica:
        """The replica until `start`."""
        made: Any = replace(
            build("qadam", kind="strategy"),
            warmup=self.warmup,
            refresh=self.refresh,
            reducer=self.choose_reducer(),
            accumulate=self.accumulate,
            bucket_bytes=self.bucket_bytes,
        )
        found: Replica = made.make(model, optimizer, world)
        return found

    def make_local(self, model: nn.Module, optimizer: Optimizer, world: World) -> AnchoredReplica:
        """The replica from then on."""
        rounds, reducer = LocalAdam(model, optimizer, self), self.choose_reducer()
        how = replace(self, reducer=rounds.around(reducer))
        replica = AnchoredReplica(model, optimizer, world, how, rounds)
        replica.strategy, replica.own_step = self, rounds
        return replica


class ZeroOneAdamReplica(ChangingReplica):
    """In front of a replica of qadam, and of local steps after `start`."""

    strategy: zero_one_adam
    own_gradients = True  # in the end

    def __init__(self, model: nn.Module, optimizer: Optimizer, world: World, strategy: zero_one_adam) -> None:
        super().__init__(strategy.make_first(model, optimizer, world), strategy, self._part_if_due)

    @property
    def _is_local(self) -> bool:
        return isinstance(self.inner, AnchoredReplica)

    def _part_if_due(self) -> None:
        if not self._is_local and self.inner.step >= self.strategy.start:
            self.world.run_tolerating_loss(self._part)

    def _part(self) -> None:
        """Begin with local steps: on all ranks at the same step, as all have the same gradients until here."""
        first: Any = self.inner
        first.adam.freeze(self.strategy.warmup)
        unsent = first.unsent()
        self._go_on_with(local=True)
        self.inner.rounds.adam.load(first.adam.state())  # type: ignore[attr-defined]
        self.inner.take_unsent(unsent)
        self.inner.forget_writes()
        self.world.barrier()  # a rank that was lost in it is found here

    def _go_on_with(self, *, local: bool, world: World | None = None) -> None:
        if local != self._is_local:
            make: Callable[..., Replica] = self.strategy.make_local if local else self.strategy.make_first
            self.replace(lambda: self.bind_anew(make, world or self.world))

    # State -------------------------------------------------------------------------------------------------------

    def shared_state(self) -> dict[str, Any]:
        return {**super().shared_state(), "local": self._is_local}

    def load_shared(self, shared: dict[str, Any]) -> None:
        """Go on in the checkpoint's phase; every rank calls it."""
        self._go_on_with(local=shared.get("local", False))
        super().load_shared(shared)

    def rebind(self, world: World, *, source: int = 0) -> str:
        """Go on in another world in the phase of rank `source`: others are new, or were lost before it changed."""
        local = world.broadcast_object(self._is_local, source)
        self._go_on_with(local=local, world=World(device=world.device))
        told: str = super().rebind(world, source=source)
        return told


class LocalAdam(Rounds):
    """Local steps with a frozen v. How far each rank has come travels as sums of momenta: times sqrt(v') + eps."""

    def __init__(self, model: nn.Module, optimizer: Optimizer, strategy: zero_one_adam) -> None:
        self._strategy, self._model, self._optimizer = strategy, model, optimizer
        self.adam = FrozenAdam(model, optimizer)
        self._moved: dict[str, Moved] = {}  # by parameter, since the ranks last met
        self._weight = 1.0  # of this rank, in the meeting under way

    # Steps -------------------------------------------------------------------------------------------------------

    def before_step(self) -> None:
        for name, (rate, kept) in self.adam.step().items():
            before = self._moved.get(name, Moved(0.0, 1.0))
            self._moved[name] = Moved(kept * before.rate + rate, kept * before.kept)

    def after_step(self) -> None:
        self.adam.give_back()

    # Meetings ----------------------------------------------------------------------------------------------------

    def around(self, inner: Reducer) -> Reducer:
        """Reduces x0 - x as sums of momenta by another reducer."""
        return staged(
            lambda bucket: {"momenta": inner.init(bucket)},  # as qadam keeps it
            partial(self._stages, inner),
            memory=inner.memory,
            exact=inner.exact,
            sends=inner.sends,
            check=inner.check,
        )._replace(spec=inner.spec)

    def _stages(self, inner: Reducer, bucket: Bucket, state: State, world: World) -> Stages:
        """Of x0 - x, leave out what x0 has decayed by; times sqrt(v') + eps, and back. The bucket's are the anchors."""
        if world.size == 1:
            return Reduced(bucket.tensors), state
        denominators = self.adam.denominators(bucket.names, bucket.params)
        for x, name, anchor in zip(bucket.tensors, bucket.names, bucket.params, strict=True):
            if name in self._moved and self._moved[name].kept != 1.0:
                x.add_(anchor, alpha=self._weight * (self._moved[name].kept - 1.0))
        torch._foreach_mul_(bucket.tensors, denominators)
        reduced, after = yield from stages_of(inner, bucket, state["momenta"], world)
        torch._foreach_div_(reduced.mean, denominators)
        return Reduced(reduced.mean, overflow=reduced.overflow), {"momenta": after}

    def meet(self, replica: AnchoredReplica) -> None:
        """Exchange momenta, and go on from their mean: every rank with the same model and the same momenta."""
        if not replica.fragments:  # alone, and where others come, they all begin here
            self._moved = {}
        if not self._strategy.meets(replica.met):
            return
        for fragment in replica.fragments:
            names = sorted(fragment.live)
            mine = [self._moved.get(name, Moved(0.0, 1.0)) for name in names]
            moves = torch.tensor(mine, dtype=torch.float64).view(-1, 2)
            self._weight = replica.weight(fragment.index)
            replica.run(partial(take_weighted_mean, [moves], self._weight, tag="rates"))
            replica.exchange(fragment)
            means, _ = replica.finish(fragment)
            if replica.world.size == 1:
                fragment.set_anchors(None)
                continue
            self._apply(fragment, means, dict(zip(names, moves.tolist(), strict=True)))
            fragment.return_to_anchors()
        self._moved = {}

    def _apply(self, fragment: Fragment, means: dict[str, Tensor], moves: dict[str, Sequence[float]]) -> None:
        denominators = self.adam.denominators(means, means.values())
        for (name, mean), denominator in zip(means.items(), denominators, strict=True):
            rate, kept = moves[name]
            fragment.anchors[name].mul_(kept).sub_(mean)
            if rate > 0 and name in self.adam.corrections:
                self._optimizer.state[fragment.params[name]]["exp_avg"].copy_(mean * denominator / rate)

    # State -------------------------------------------------------------------------------------------------------

    def shared_state(self, replica: AnchoredReplica) -> dict[str, Any]:
        """Where AMP skipped a step of this rank alone, how it moved differs, and is in its own part of a checkpoint."""
        return {**self.adam.state(), "moved": {name: list(moved) for name, moved in self._moved.items()}}

    def load_shared(self, replica: AnchoredReplica, shared: dict[str, Any]) -> None:
        self.adam.load(shared)
        self._moved = {name: Moved(*moved) for name, moved in shared["moved"].items()}

    def give_unsent(self, replica: AnchoredReplica, unsent: Residual) -> Residual:
        """As differences of parameters, which every method has a use for."""
        return unsent.times({name: 1 / d for name, d in self._denominators(replica).items()}, "parameters")

    def take_unsent(self, replica: AnchoredReplica, unsent: Residual) -> Residual:
        """What qadam has kept back counts at the rate of a step, of differences of parameters as they are."""
        if unsent.unit == "parameters":
            return unsent.times(self._denominators(replica), "parameters")
        momenta = unsent.convert("momenta", self._model.named_parameters(), self._optimizer)
        groups = {p: group for group in self._optimizer.param_groups for p in group["params"]}
        rates = {}
        for name, param in self._model.named_parameters():
            state = self._optimizer.state.get(param)
            if state:
                lr, beta1 = float(groups[param]["lr"]), groups[param]["betas"][0]
                sense = -1.0 if groups[param]["maximize"] else 1.0
                rates[name] = sense * lr / (1.0 - beta1 ** float(state["step"])) / unsent.scale()
        return momenta.times(rates, "parameters")

    def _denominators(self, replica: AnchoredReplica) -> dict[str, Tensor]:
        anchors = {name: fragment.anchors[name] for fragment in replica.fragments for name in fragment.live}
        return dict(zip(anchors, self.adam.denominators(anchors, anchors.values()), strict=True))
