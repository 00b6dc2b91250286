"""Anchors: the last model that all ranks agreed on, and the exchange of how far each has moved from it since.

`Anchors` holds all fragments of a model and what of them is under way. `AnchoredReplica` is the replica of local_sgd
and of diloco; their `Rounds` say when to exchange, and what to do with the mean.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from unisono.background import Handle
from unisono.methods.buckets import split_evenly
from unisono.methods.checks import AtLeast
from unisono.methods.exchange.reduction import LearningRates, Residual, check_real, overlap_pays
from unisono.methods.exchange.side_channel import SideChannel
from unisono.methods.reducer import Reducer
from unisono.methods.reducers.dense import dense
from unisono.methods.strategies._fragment import Fragment
from unisono.methods.strategy import Buffers, Change, ModelPart, PeriodicReplica, Strategy, share
from unisono.methods.strategy.mistakes import SameData
from unisono.methods.strategy.program_writes import Written
from unisono.methods.strategy.replica import share_buffers, take_weighted_mean
from unisono.world import World
from unisono.world.operations import put_back

T = TypeVar("T")
Every = Annotated[int, AtLeast(1, "windows from one exchange to the next")]


@dataclass
class PendingExchange:
    """An exchange of a fragment that is under way: applied after window `due`."""

    due: int
    handle: Handle[tuple[bool, bool]]  # whether a learning rate fell on some rank, and whether all wrote the same
    means: Callable[[], dict[str, Tensor]]
    buffers: list[Tensor]
    written: Written


class Anchors:
    """The fragments of a model, and their exchanges: `begin` takes a fragment's differences and starts to send them,
    `finish` waits for them and gives their mean.

    `behind`: exchanges run behind the program. `always`: also where there is nobody to exchange with.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        *,
        reducer: Reducer | None,
        buffers: Buffers,
        bucket_bytes: int,
        fragments: int = 1,
        behind: bool = False,
        always: bool = False,
    ) -> None:
        self._model, self._optimizer = model, optimizer
        self.reducer = reducer if reducer is not None else dense()
        self._buffers, self._bucket_bytes, self._count = buffers, bucket_bytes, fragments
        self._behind, self._always = behind, always
        self.fragments: list[Fragment] = []
        self.pending: dict[int, PendingExchange] = {}
        self._learning_rates = LearningRates(optimizer)
        self._rates = self._learning_rates.by_group()
        self.fell = [False] * fragments  # a learning rate fell since a fragment was exchanged
        self._agreed = [0] * fragments  # the window in which each fragment's anchors were last agreed on
        self._weights: list[list[float]] = [[] for _ in range(fragments)]  # of the windows since its last exchange
        self._begun: set[int] = set()  # what was under way when the world ended
        self.follows_writes = always or not self.reducer.exact  # else the mean of what ranks have is what they wrote
        self.loaded: list[str] = []  # what the program loaded, and the ranks agreed on with the last exchange
        self._side: SideChannel | None = None
        self._world, self._channel = World(), None  # type: tuple[World, World | None]
        self._same_data = SameData(self._world)

    # A world -----------------------------------------------------------------------------------------------------

    def start(self, world: World) -> None:
        """Fragments, where they are needed, with buckets in this world."""
        self._world, self._same_data = world, SameData(world)
        if world.size == 1 and self.reducer.exact and not self._always:
            self.fragments = []
            return
        if not self.fragments:
            if self.reducer.check is not None:
                self.reducer.check(self._optimizer, world)
            parts = split_evenly(list(self._model.named_parameters()), self._count)
            check_real(self.reducer, [named for part in parts for named in part])
            self.fragments = [Fragment(i, part, self.reducer, self._optimizer) for i, part in enumerate(parts)]
        inline = self._behind or self.reducer.stages is None or not overlap_pays(world)
        if self._behind and world.size > 1:
            device = next((p.device for p in self._model.parameters() if p.is_cuda), None)
            self._side = SideChannel(world, device, inline=inline, behind=True)
            self._channel = self._side.channel
        else:
            self._channel = world.channel(inline=inline)
        for fragment in self.fragments:
            self._build(fragment)

    def warn_if_more_than_dense(self) -> None:
        """Say so where the reducer would send more than the exact mean does."""
        for fragment in self.fragments:
            fragment.reduction.warn_if_more_than_dense(self._world)

    def _build(self, fragment: Fragment) -> None:
        self.run(lambda channel: fragment.build(channel, self._bucket_bytes))

    def stop(self) -> None:
        """Let go of buckets, thread and channel; what is under way ends first."""
        if self._side is not None:
            self._side.finish()
        if self._channel is not None:
            for fragment in self.fragments:
                fragment.release(self._channel)
            self._channel.close()
        self._side = self._channel = None

    def run(self, job: Callable[[World], T]) -> T:
        """Run a job on the channel after what is under way there, and wait for it."""
        return self._submit(job).wait()

    def _submit(self, job: Callable[[World], T]) -> Handle[T]:
        if self._side is not None:
            return self._side.start(job)
        assert self._channel is not None, "a world that exchanges something"
        return Handle.of(job(self._channel))

    # Exchanges ---------------------------------------------------------------------------------------------------

    def before_step(self) -> None:
        """The optimizer is about to move the parameters: what has become trainable takes part from here."""
        for fragment in self.fragments:
            fragment.follow()
            fragment.together = False

    def take_writes(self, names: Sequence[str], *, loaded: bool) -> None:
        """Keep what the program wrote to these parameters, until the next exchange compares it."""
        for fragment in self.fragments:
            fragment.follow()
            found = {name: fragment.params[name] for name in names if name in fragment.live}
            if found:
                fragment.written.take(found, loaded=loaded)
                fragment.together = False

    def update_learning_rates(self) -> None:
        """Remember that a learning rate fell, until every fragment's exchange has said so."""
        now = self._learning_rates.by_group()
        if any(new < old for new, old in zip(now, self._rates, strict=False)):
            self.fell = [True] * self._count
        self._rates = now

    def count_window(self, weight: float) -> None:
        """A window has ended whose batches had this weight (`World.weight`)."""
        for fragment in self.fragments:
            self._weights[fragment.index].append(weight)

    def weight(self, fragment: int) -> float:
        """How much this rank counts: its part of all samples since the fragment's last exchange, times the ranks."""
        weights = self._weights[fragment]
        return sum(weights) / len(weights) if weights else 1.0

    def begin(self, fragment: Fragment, window: int, *, delay: int = 0, agree_on_decay: bool = False) -> float:
        """Take the fragment's differences and start their exchange, to be applied `delay` windows later. They count by
        the samples that this rank saw since the fragment's last exchange: gives how much.

        `agree_on_decay`: all ranks hear whether a learning rate fell on some rank (always, under a reducer that
        compresses).
        """
        if not fragment.has_its_buckets:
            self._build(fragment)
        weight, self._weights[fragment.index] = self.weight(fragment.index), []
        written = fragment.hand_over_written()
        fragment.fill(weight, written.values)
        mine, self.fell[fragment.index] = self.fell[fragment.index], False
        asks, code = agree_on_decay or self.follows_writes, written.code()
        watches = fragment.index == 0 and self.reducer.exact
        buffers = self._buffers_to_share() if fragment.index == 0 else []
        if delay:
            buffers = [b.clone() for b in buffers]

        def exchange(channel: World) -> tuple[bool, bool]:
            fell, agreed = mine, False
            if asks:
                flags = torch.tensor([mine, code, -code])
                fell, most, least = channel.all_reduce(flags, "max", tag="decay").wait().tolist()
                agreed = 0 < most == -least
                fragment.reduction.set_decayed(bool(fell))
            if not agreed:
                fragment.count_as_training(written.values, weight)
            elif written.loaded:
                fragment.reduction.drop_unsent(written.values)
            with self._same_data.watching(fragment.widest if watches else None):
                fragment.reduce(channel)
            share_buffers(buffers, self._buffers, channel, weight)
            return bool(fell), agreed

        handle = self._submit(exchange)
        self.pending[fragment.index] = PendingExchange(window + delay, handle, fragment.means, buffers, written)
        return weight

    def finish(self, fragment: Fragment, window: int) -> tuple[dict[str, Tensor], bool]:
        """The mean of the differences, and whether a learning rate fell on some rank (if the ranks agreed on it)."""
        pending = self.pending.pop(fragment.index)
        fell, wrote_alike = self._wait_for(pending)
        if wrote_alike:
            fragment.agree_on(pending.written.values)
        self.loaded = list(pending.written.values) if wrote_alike and pending.written.loaded else []
        for mine, agreed in zip(self._buffers_to_share(), pending.buffers, strict=False):
            put_back(mine, agreed)
        self._agreed[fragment.index] = window
        return pending.means(), fell

    def _wait_for(self, pending: PendingExchange) -> tuple[bool, bool]:
        ledger = self._world.ledger
        start = ledger.clock()
        found = pending.handle.wait()
        if self._behind:
            ledger.close_span("blocked", start, ledger.clock())
        return found

    def _buffers_to_share(self) -> list[Tensor]:
        if self._buffers == "local" or self._world.size == 1:
            return []
        return [b.detach() for b in self._model.buffers()]

    @torch.no_grad()
    def fill_with_means(self, model: nn.Module) -> None:
        """Give a copy of the model the mean of all ranks' parameters and buffers, by `weight` (every rank calls it)."""
        if self._world.size > 1:
            self.run(partial(self._fill_with_means, model))

    def _fill_with_means(self, model: nn.Module, channel: World) -> None:
        theirs = dict(model.named_parameters())
        for fragment in self.fragments:
            differences = [fragment.difference(name) for name in fragment.live]
            take_weighted_mean(differences, self.weight(fragment.index), channel, tag="consolidate")
            for name, difference in zip(fragment.live, differences, strict=True):
                theirs[name].detach().copy_(fragment.anchors[name] - difference)
        share_buffers([b.detach() for b in model.buffers()], "average", channel, self.weight(0))

    def weights(self) -> dict[Tensor, float]:
        """By parameter and buffer: how much this rank counts in the mean over the ranks, as it is now."""
        found: dict[Tensor, float] = {f.params[n]: self.weight(f.index) for f in self.fragments for n in f.live}
        return found | dict.fromkeys(self._model.buffers(), self.weight(0))

    # State -------------------------------------------------------------------------------------------------------

    def shared_state(self) -> dict[str, Any]:
        """Anchors are left out where they are the model's parameters, bit by bit, on every rank."""
        under_way = {}
        for index, pending in sorted(self.pending.items()):
            fell, agreed = self._wait_for(pending)  # every rank has begun it, so it ends without more
            under_way[str(index)] = {
                "due": pending.due,
                "heard": fell,
                "written": pending.written.state_dict() if agreed else None,
                "means": {name: mean.clone() for name, mean in sorted(pending.means().items())},
                "buffers": pending.buffers,
            }
        same = all(f.together and all(f.anchors[n].dtype == f.params[n].dtype for n in f.live) for f in self.fragments)
        anchors = {name: f.anchors[name] for f in self.fragments for name in f.live}
        return {
            "anchors": None if same else anchors,
            "fragments": len(self.fragments),
            "under way": under_way,
            "reducer": [f.reduction.state_dict()["shared"] for f in self.fragments],
            "rates": list(self._rates),
            "fell": list(self.fell),
            "agreed": list(self._agreed),
        }

    def local_state(self) -> dict[str, Any]:
        """What this rank's reducers keep, and what it saw since the last exchanges."""
        return {
            "reducer": [f.reduction.state_dict()["local"] for f in self.fragments],
            "weights": [list(weights) for weights in self._weights],
            "written": [f.written.state_dict() for f in self.fragments],
        }

    @torch.no_grad()
    def load_shared(self, shared: dict[str, Any]) -> None:
        """Anchors, and exchanges that were under way."""
        count = shared["fragments"]
        if self.fragments and count not in (0, len(self.fragments)):
            raise ValueError(
                f"the checkpoint has {count} fragment(s), this strategy {len(self.fragments)}: go on with the "
                "number of fragments it was saved with"
            )
        self.forget_pending()
        self._rates, self._agreed = list(shared["rates"]), list(shared["agreed"])
        self.fell = list(shared["fell"])
        for fragment in self.fragments:
            fragment.set_anchors(shared["anchors"])
        for index, saved in shared["under way"].items() if self.fragments else ():
            anchors = self.fragments[int(index)].anchors
            means = {name: torch.empty_like(anchors[name]).copy_(mean) for name, mean in saved["means"].items()}
            buffers = [b.to(self._world.device, copy=True) for b in saved["buffers"]]
            written = saved.get("written")
            handle = Handle.of((saved["heard"], written is not None))
            self.pending[int(index)] = PendingExchange(
                saved["due"], handle, partial(dict, means), buffers, Written.of(written, self._world.device)
            )

    def load_locals(self, shared: dict[str, Any], locals_: Sequence[dict[str, Any]], *, same_world: bool) -> None:
        """What the ranks' reducers kept, if the fragments are the same; in the same world, what this rank saw."""
        self.forget_weights()
        if same_world and len(locals_[0].get("weights", ())) == self._count:
            self._weights = [list(weights) for weights in locals_[0]["weights"]]
        if len(self.fragments) == shared["fragments"]:
            for i, fragment in enumerate(self.fragments):
                fragment.reduction.load_state_dict(shared["reducer"][i], [part["reducer"][i] for part in locals_])
                saved = locals_[0].get("written") if same_world else None
                fragment.written = Written.of(saved[i] if saved else None, self._world.device)

    def forget_weights(self) -> None:
        """All ranks have the same parameters: what each saw until now counts no more."""
        self._weights = [[] for _ in range(self._count)]

    def forget_pending(self, *, keep_arrived: bool = False) -> list[int]:
        """Wait for what is under way, and forget it, or keep what arrived; gives the fragments that arrived."""
        arrived, self._begun = [], set(self.pending)
        for index, pending in sorted(self.pending.items()):
            try:
                pending.handle.wait()
                arrived.append(index)
            except Exception:  # noqa: PERF203 - a lost rank: what was under way does not arrive
                continue
        self.pending = {i: self.pending[i] for i in arrived} if keep_arrived else {}
        return arrived

    # Another world, another strategy -----------------------------------------------------------------------------

    def progress(self) -> dict[str, Any]:
        """When each fragment was last agreed on, which exchanges begun since arrived, and how much this rank counts."""
        return {
            "reached": list(self._agreed),
            "begun": sorted(self._begun),
            "arrived": sorted(self.pending),
            "weights": [self.weight(i) for i in range(self._count)],
        }

    def move_reducers(self, change: Change, shared: dict[str, Any], dropped: set[int]) -> None:
        """Bring the reducers' states over; not what belongs to exchanges that were `dropped`."""
        for fragment, kept in zip(self.fragments, shared["reducer"], strict=False):
            keep = change.keeps and fragment.index not in dropped
            fragment.reduction.move(kept, keep=keep, factor=change.factor)

    def average_parameters(self, change: Change) -> None:
        """The anchors are the source's now: parameters become x0 - mean(x0 - x_i) of all who stayed, by `weight`."""
        world, stayed = change.world, change.stayed
        named = [(f, name) for f in self.fragments for name in f.live]
        sums = [torch.zeros_like(f.anchors[name]) for f, name in named]
        for (fragment, name), mine in zip(named, sums, strict=True):
            total = sum(change.progress[r]["weights"][fragment.index] for r in stayed)
            weight = self.weight(fragment.index) * len(stayed) / total if total else 1.0
            if change.keeps and weight:
                mine.copy_(fragment.difference(name)).mul_(weight)
        world.all_reduce(sums, "sum", tag="rebind").wait()
        share(self._model, world, change.source)
        for (fragment, name), total in zip(named, sums, strict=True):
            fragment.params[name].detach().copy_(fragment.anchors[name] - total / len(stayed))

    def unsent(self) -> Residual | None:
        """What the fragments' reducers have kept back, of all parameters."""
        parts = [fragment.reduction.unsent() for fragment in self.fragments]
        if not parts:
            return None
        shared = {
            "each": {name: entries for part in parts for name, entries in part.shared["each"].items()},
            "decayed": any(part.shared["decayed"] for part in parts),
            "rates": {name: rate for part in parts for name, rate in part.shared["rates"].items()},
        }
        local = {name: entries for part in parts for name, entries in part.local.items()}
        return parts[0]._replace(shared=shared, local=local)

    def take_unsent(self, unsent: Residual) -> None:
        """Each fragment's reducer goes on with what was kept back of its parameters."""
        for fragment in self.fragments:
            fragment.reduction.take_unsent(unsent.only(list(fragment.params)))


class Rounds(ABC):
    """A method: when the ranks exchange their differences to the last agreed model, and what follows from the mean."""

    @abstractmethod
    def meet(self, replica: AnchoredReplica) -> None:
        """Window `replica.met` has ended on every rank: exchange what is due, by `replica.anchors`."""

    @abstractmethod
    def shared_state(self, replica: AnchoredReplica) -> dict[str, Any]:
        """What all ranks have alike, and the method has to go on with."""

    @abstractmethod
    def load_shared(self, replica: AnchoredReplica, shared: dict[str, Any]) -> None:
        """Take it, from a checkpoint or from the rank that all go on from in a new world."""


class AnchoredReplica(PeriodicReplica):
    """Local training whose differences to the last agreed model are exchanged in the `rounds` of a method."""

    own_optimizer: ClassVar[bool] = True
    slow_ranks = "deal"

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        world: World,
        strategy: Strategy,
        anchors: Anchors,
        rounds: Rounds,
        *,
        accumulate: int,
    ) -> None:
        self.anchors, self.rounds = anchors, rounds
        super().__init__(model, optimizer, world, strategy, accumulate=accumulate)
        anchors.warn_if_more_than_dense()

    def start(self) -> None:
        self.anchors.start(self.world)
        self.follows_writes = self.anchors.follows_writes and bool(self.anchors.fragments)

    def meet(self) -> None:
        self.anchors.update_learning_rates()
        self.rounds.meet(self)

    def take_writes(self, names: Sequence[str], *, loaded: bool) -> None:
        self.anchors.take_writes(names, loaded=loaded)

    def stop(self, change: Change | None = None) -> None:
        self.anchors.stop()
        if change is None:
            self.anchors.pending = {}

    def advance(self) -> None:
        self.anchors.before_step()
        super().advance()

    def weight_changed(self, weight: float) -> None:
        """A batch of weight zero stands in for one that is missing; the others count in the mean of the models."""
        self.weigh_gradients(None if weight else torch.zeros_like)

    def count_window(self, weight: float) -> None:
        self.anchors.count_window(weight)

    def consolidate(self) -> nn.Module:
        """A copy with the mean of all ranks' parameters and buffers, by their samples (every rank calls it)."""
        self.meet_if_due()
        made = self.copy_model()
        self.anchors.fill_with_means(made)
        self.average_frozen(made)
        return made

    def model_part(self) -> ModelPart:
        return ModelPart(weights=self.anchors.weights())

    def shared_state(self) -> dict[str, Any]:
        return {**super().shared_state(), **self.anchors.shared_state(), **self.rounds.shared_state(self)}

    def local_state(self) -> dict[str, Any]:
        return self.anchors.local_state()

    def load_shared(self, shared: dict[str, Any]) -> None:
        """At another world size the parameters are the mean of the former ranks' (see `un.load`): with the anchors
        as they were, the next exchange gives what theirs would have given."""
        if "anchors" not in shared:
            raise ValueError(
                "the checkpoint is of a strategy that keeps no anchors: load it with the strategy that it was saved "
                f"with, then call replica.switch({type(self.strategy).__name__!r})"
            )
        super().load_shared(shared)
        self.anchors.load_shared(shared)
        self.rounds.load_shared(self, shared)

    def load_local(self, shared: dict[str, Any], locals_: Sequence[dict[str, Any]], *, same_world: bool) -> None:
        self.anchors.load_locals(shared, locals_, same_world=same_world)

    def unsent(self) -> Residual | None:
        return self.anchors.unsent()

    def take_unsent(self, unsent: Residual) -> None:
        if unsent.unit == "parameters" and self.anchors.fragments:
            self.anchors.take_unsent(unsent)
        else:
            super().take_unsent(unsent)

    # Another world: those who stayed last agreed on the same anchors as the source, in a world of its size. They bring
    # their parameters, and keep their optimizer's state.

    def settle(self, *, is_source: bool) -> None:
        self._unmet = 0
        self.anchors.forget_pending(keep_arrived=True)

    def progress(self) -> dict[str, Any]:
        return self.anchors.progress()

    def take_model(self, change: Change) -> str:
        """With the anchors: see `carry`."""
        return (
            f"parameters: the mean of {len(change.stayed)} of the {change.former_size} former ranks; anchors and "
            f"buffers from rank {change.source} of {change.world.size}; optimizer states: their own where ranks "
            f"stayed, else that of rank {change.source}"
        )

    def carry(self, change: Change, shared: dict[str, Any]) -> str:
        """An exchange counts if it has arrived at all who stayed."""
        every = [change.progress[r] for r in change.stayed]
        dropped = {i for mine in every for i in mine["begun"] if any(i not in other["arrived"] for other in every)}
        shared["under way"] = {i: saved for i, saved in shared["under way"].items() if int(i) not in dropped}
        if shared["anchors"] is None or not self.anchors.fragments:  # all who stayed have the same parameters
            share(self.model, change.world, change.source)
            self.load_shared(shared)
        else:
            self.load_shared(shared)
            self.anchors.average_parameters(change)
        self.anchors.forget_weights()
        self.anchors.move_reducers(change, shared, dropped)
        if not dropped:
            return ""
        return (
            f"the exchange of {len(dropped)} fragment(s) did not arrive: their differences go with the next "
            "one, what their reducers kept back is gone"
        )
