"""The worker's side: its own model, and the outer one that it began from when it last came to the server."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import Optimizer

from unisono import packing
from unisono.launchers.runtime.frames import warn_user
from unisono.methods.buckets import widen
from unisono.methods.strategies._serving.placement import connect
from unisono.methods.strategies._serving.server import Values
from unisono.methods.strategies._serving.worker import ServedWorker
from unisono.methods.strategies.async_diloco.outer import DelayedNesterov, OuterServer, Visit
from unisono.methods.strategy import Change, ModelPart
from unisono.world import PeerLost, World
from unisono.world.operations import put_back

if TYPE_CHECKING:
    from unisono.methods.strategies.async_diloco import async_diloco


class AsyncDiLoCoReplica(ServedWorker):
    """Trains alone; x0 (`_base`, in host memory) is what the server gave it last. The first rank keeps the server."""

    strategy: async_diloco
    own_optimizer = follows_writes = True
    no_average = (
        "the model that counts lies with the server, and workers take it in at different times. Use diloco, or average "
        "the checkpoints that un.save wrote"
    )

    def __init__(self, model: nn.Module, optimizer: Optimizer, world: World, strategy: async_diloco) -> None:
        self._params = dict(model.named_parameters())
        wide = {name: widen(p).cpu() for name, p in self._params.items()}
        self._base = {n: Parameter(x, x.is_floating_point() or x.is_complex()) for n, x in wide.items()}
        self._states: dict[str, dict[str, Any]] = {}  # of the outer optimizer, as of the last rest
        self._outer: dict[str, Tensor] = {}  # the outer model, as of the last rest
        self._is_home = False  # that was brought here for another world, which is still to begin
        self._trained: set[str] = set()  # parameters that are, or were, trainable
        self._forget_visit(strategy.every)
        self._worlds = 0  # that it was in before this one
        self._missed: Counter[int] = Counter()
        self._dropped = 0
        super().__init__(model, optimizer, world, strategy)

    def _forget_visit(self, goal: int) -> None:
        """Begin anew, `goal` windows from the next visit."""
        self._goal, self._windows, self._samples = goal, 0, 0.0
        self._written: Values = []  # what the program loaded
        self._sent = False  # a difference is on its way, and the answer has not come
        self._since: float | None = None  # when the first window began; None: before this world

    def start(self) -> None:
        strategy, ranks = self.strategy, range(self.world.size)
        outer = DelayedNesterov(
            self._base.values(), lr=strategy.outer_lr, momentum=strategy.outer_momentum, spread=strategy.spread
        )
        self._connections = connect(
            self.world,
            [list(self._base.values())],
            [0],
            ranks,
            server=lambda part: OuterServer(part, outer, ranks, strategy),
            coder=lambda part, worker, server: None,
        )
        self._connections.leave_without(self)
        self._since = self.world.ledger.clock()

    # Training ---------------------------------------------------------------------------------------------------

    def advance(self) -> None:
        self._trained |= {name for name, p in self._params.items() if p.requires_grad}
        super().advance()

    def weight_changed(self, weight: float) -> None:
        """A batch of weight zero stands in for one that is missing; the others count with the differences."""
        self.weigh_gradients(None if weight else torch.zeros_like)

    def count_window(self, weight: float) -> None:
        self._samples += weight

    def take_writes(self, names: Sequence[str], *, loaded: bool) -> None:
        """A model that is loaded is everyone's from the next visit on; other writes are this worker's training."""
        for i, (name, base) in enumerate(self._base.items() if loaded else ()):
            if name in names:
                base.data.copy_(self._params[name].detach())
                self._written = [one for one in self._written if one[0] != i]
                self._written.append((i, name, base.detach().clone()))

    def meet(self) -> None:
        self._windows += 1
        if self._windows >= self._goal:
            self._visit()

    def _visit(self) -> None:
        """1. bring the difference; 2. begin anew from what the server has made of the model."""
        [link], ledger = self._links, self.world.ledger
        took = ledger.clock() - self._since if self._since is not None else 0.0
        visit = Visit(samples=self._samples, windows=self._windows, seconds=took)
        moved = [
            base.detach() - self._params[name].detach().to(base) if name in self._trained else None
            for name, base in self._base.items()
        ]
        self._sent = True
        link.push(moved, [visit._asdict()], None, self._written)
        answer = link.pull()
        self._take_base()
        counted = answer.ahead > 0
        ledger.event("visit", **visit._asdict(), missed=answer.missed, counted=counted, clocks=answer.clocks)
        if counted:
            self._missed[answer.missed] += 1
        else:
            self._dropped += 1
            if self._dropped == 1:
                warn_user(
                    f"async_diloco: {answer.missed} differences of others were taken in since this worker came last, "
                    f"more than staleness={self.strategy.staleness} rounds, so that its own of {visit.windows} "
                    "windows is dropped; it continues from the current model"
                )
        self._forget_visit(abs(answer.ahead))
        self._since = ledger.clock()

    def _take_base(self) -> None:
        for name in self._trained:
            self._params[name].detach().copy_(self._base[name].detach())

    def staleness(self) -> dict[str, Any]:
        """A histogram over my differences of how many of others each "missed": taken in after my last visit but one and
        before it came; and how many were "dropped" because that was too many."""
        return {"missed": dict(sorted(self._missed.items())), "dropped": self._dropped}

    # State ------------------------------------------------------------------------------------------------------

    def consolidate(self) -> nn.Module:
        """The outer model when every worker has come here, with the first worker's buffers. What a worker has trained
        since its last visit is not in it."""
        self.meet_if_due()
        made = self.copy_model()
        self.average_frozen(made)
        theirs = self._rest()
        with torch.no_grad():
            for name, param in made.named_parameters():
                if name in self._trained:
                    param.copy_(self._outer[name])
            for buffer, value in zip(made.buffers(), theirs, strict=True):
                put_back(buffer, value)
        return made

    def _rest(self) -> list[Tensor]:
        """When all workers rest: keep the outer model and its optimizer's state; gives the first worker's buffers."""
        assert self._connections is not None
        mine = packing.to_bytes([b.detach() for b in self.model.buffers()])
        [(values, theirs, states)] = self._connections.settle(mine, [self._written])
        self._written = []
        self._note_outer(values, states)
        buffers: list[Tensor] = packing.from_bytes(theirs)
        return buffers

    def _note_outer(self, values: Sequence[Tensor], states: Sequence[dict[str, Any]]) -> None:
        self._outer = {name: value.clone() for name, value in zip(self._base, values, strict=True)}
        self._states = {name: state for name, state in zip(self._base, states, strict=True) if state}

    def model_part(self) -> ModelPart:
        values: dict[Tensor, Tensor] = {p: self._outer[n] for n, p in self._params.items() if n in self._trained}
        return ModelPart(values=values, first=list(self.model.buffers()))

    def state_dict(self) -> dict[str, Any]:
        """Every rank calls it: the outer model is saved as it is when all rest."""
        self.meet_if_due()
        self._rest()
        return super().state_dict()

    def shared_state(self) -> dict[str, Any]:
        kept = {"outer": self._outer, "momenta": self._states, "worlds": self._worlds}
        return {**super().shared_state(), **kept, "trained": sorted(self._trained)}

    def local_state(self) -> dict[str, Any]:
        """With x0 where that is not the outer model any more."""
        base = {name: x.detach() for name, x in self._base.items() if not x.equal(self._outer[name])}
        return {"base": base, "visit": [self._goal, self._windows, self._samples]}

    def load_shared(self, shared: dict[str, Any]) -> None:
        if "outer" not in shared or "momenta" not in shared:
            raise ValueError(
                "the checkpoint is of a strategy that keeps no outer model: load it with the strategy that it was "
                "saved with, then call replica.switch('async_diloco')"
            )
        super().load_shared(shared)
        self._trained |= set(shared["trained"])
        self._outer = {name: x.cpu() for name, x in shared["outer"].items()}
        self._states = shared["momenta"]

    @torch.no_grad()
    def load_local(self, shared: dict[str, Any], locals_: Sequence[dict[str, Any]], *, same_world: bool) -> None:
        """In the same world each goes on from where it was, as if it had just come; else all begin from the model."""
        mine: dict[str, Any] = locals_[0] if same_world else {"base": {}, "visit": [self.strategy.every, 0, 0.0]}
        goal, windows, samples = mine["visit"]
        self._begin_from({**self._outer, **mine["base"]}, goal)
        self._windows, self._samples = windows, samples
        if not same_world:
            self._take_base()

    @torch.no_grad()
    def _begin_from(self, base: dict[str, Tensor], goal: int) -> None:
        """Go on from an x0; the first rank brings the outer model to the server, before any worker comes."""
        for name, x in self._base.items():
            x.copy_(base[name])
        self._forget_visit(goal)
        self._is_home = False
        self._since = self.world.ledger.clock()
        if self.world.rank == 0:
            values = [self._outer[name] for name in self._base]
            self._links[0].put(values, [self._states.get(name, {}) for name in self._base])
        self.world.barrier(tag="outer")
        for link in self._links:
            link.note_pulled()

    # Another world ----------------------------------------------------------------------------------------------

    def settle(self, *, is_source: bool) -> None:
        """The rank that all go on from has the outer model from the server; if that was lost, its own x0."""
        if not is_source or self._is_home:
            return
        try:
            if not self._links:
                raise PeerLost("an attempt to form the world let go of the server, and broke off")
            values, states = self._links[0].fetch()
        except PeerLost:
            if self.healing is None:
                raise
            values, states = list(self._base.values()), [{}] * len(self._base)
        self._note_outer([x.detach() for x in values], states)
        self._is_home = True

    def progress(self) -> dict[str, Any]:
        """Workers go at paces of their own: all of one world got as far."""
        return {"reached": self._worlds}

    @torch.no_grad()
    def take_model(self, change: Change) -> str:
        mine = {name: self._params[name].detach().clone() for name in self._trained} if change.keeps else {}
        super().take_model(change)
        for name, value in mine.items():
            self._params[name].detach().copy_(value)
        return f"the outer model from rank {change.source}; {len(change.stayed)} remaining rank(s) keep their own state"

    def carry(self, change: Change, shared: dict[str, Any]) -> str:
        stays, goal = change.keeps and not self._sent, self._goal
        windows, samples = self._windows, self._samples
        super().carry(change, shared)
        self._worlds = shared["worlds"] + 1
        base = {name: x.detach().clone() for name, x in self._base.items()} if stays else self._outer
        self._begin_from(base, goal if stays else self.strategy.every)
        if stays:
            self._windows, self._samples = windows, samples
        else:
            self._take_base()
        lost = "" if shared["momenta"] else ", its momentum begins anew"
        return f"server on rank 0{lost}; differences that were on their way are with it or dropped"
