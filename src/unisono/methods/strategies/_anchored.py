"""Anchors: the last model that all ranks agreed on, and the exchange of how far each has moved from it since.

`AnchoredReplica` is the replica of local_sgd, of diloco and of 0/1 Adam; their `Rounds` say when to exchange, and what
to do with the mean.
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
from unisono.methods.exchange.overlap import SideChannel
from unisono.methods.exchange.reduction import LearningRates, Residual, check_real, overlap_pays
from unisono.methods.reducer import Reducer
from unisono.methods.reducers.dense import dense
from unisono.methods.strategies._fragments import Fragment
from unisono.methods.strategy import Change, ModelPart, PeriodicReplica, share
from unisono.methods.strategy.averages import AveragedValues, Source
from unisono.methods.strategy.mistakes import SameData
from unisono.methods.strategy.program_writes import Written
from unisono.methods.strategy.sharing import share_buffers, take_weighted_mean
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
    weights: Sequence[float] = ()  # of the windows that it is about, until it has arrived


class Rounds(ABC):
    """A method: when the ranks exchange their differences to the last agreed model, and what follows from the mean."""

    @abstractmethod
    def meet(self, replica: AnchoredReplica) -> None:
        """Window `replica.met` has ended on every rank: exchange what is due, by `exchange` and `finish`."""

    @abstractmethod
    def shared_state(self, replica: AnchoredReplica) -> dict[str, Any]:
        """What all ranks have alike, and the method has to go on with."""

    @abstractmethod
    def load_shared(self, replica: AnchoredReplica, shared: dict[str, Any]) -> None:
        """Take it, from a checkpoint or from the rank that all go on from in a new world."""

    def give_unsent(self, replica: AnchoredReplica, unsent: Residual) -> Residual:
        """What reducers kept back, as differences of parameters: here it is that."""
        return unsent

    def take_unsent(self, replica: AnchoredReplica, unsent: Residual) -> Residual:
        """What another method kept back, as this one's reducers keep it."""
        return unsent


class AgreedValues(AveragedValues):
    """The anchors: an average of the weights is that of the model which all ranks agree on, after every window. Between
    two exchanges that model stands still, and counts once a window."""

    replica: AnchoredReplica

    def sources(self) -> list[Source]:
        anchors: dict[Tensor, tuple[dict[str, Tensor], str]] = {
            param: (f.anchors, name) for f in self.replica.fragments for name, param in f.params.items()
        }

        def follow(param: Tensor) -> Callable[[], Tensor] | None:
            known, name = anchors.get(param, ({}, ""))
            return (lambda: known.get(name, param).detach()) if name else None

        return [self.whole(name, param, follow(param)) for name, param in self.named_parameters()]


class AnchoredReplica(PeriodicReplica):
    """Local training whose differences to the last agreed model are exchanged in the `rounds` of a method: `exchange`
    takes a fragment's differences and starts to send them, `finish` waits for them and gives their mean.

    `strategy` has the settings reducer, buffers, accumulate and bucket_bytes. `count`: of fragments. `behind`:
    exchanges run behind the program. `always`: also where there is nobody to exchange with.
    """

    own_optimizer: ClassVar[bool] = True
    slow_ranks = "deal"
    strategy: Any

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        world: World,
        strategy: Any,
        rounds: Rounds,
        *,
        count: int = 1,
        behind: bool = False,
        always: bool = False,
    ) -> None:
        self.rounds, self._count, self._behind, self._always = rounds, count, behind, always
        self.reducer: Reducer = strategy.reducer if strategy.reducer is not None else dense()
        self.fragments: list[Fragment] = []
        self.pending: dict[int, PendingExchange] = {}
        self._learning_rates = LearningRates(optimizer)
        self._rates = self._learning_rates.by_group()
        self.fell = [False] * count  # a learning rate fell since a fragment was exchanged
        self._agreed = [0] * count  # the window in which each fragment's anchors were last agreed on
        self._weights: list[list[float]] = [[] for _ in range(count)]  # of the windows since its last exchange
        self._begun: set[int] = set()  # what was under way when the world ended
        self.loaded: list[str] = []  # what the program loaded, and the ranks agreed on with the last exchange
        self._side: SideChannel | None = None
        self._channel: World | None = None
        super().__init__(model, optimizer, world, strategy)
        for fragment in self.fragments:
            fragment.reduction.warn_if_more_than_dense(world)

    # A world -----------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Fragments, where they are needed, with buckets in this world."""
        world, reducer = self.world, self.reducer
        self._same_data = SameData(world) if reducer.exact else None  # None: it has seen enough
        if world.size == 1 and reducer.exact and not self._always:
            self.fragments, self.follows_writes = [], False
            return
        if not self.fragments:
            if reducer.check is not None:
                reducer.check(self.optimizer, world)
            parts = split_evenly(list(self.model.named_parameters()), self._count)
            check_real(reducer, [named for part in parts for named in part])
            self.fragments = [Fragment(i, part, reducer, self.optimizer) for i, part in enumerate(parts)]
        self.follows_writes = self._always or not reducer.exact  # else the mean of what ranks have is what they wrote
        inline = self._behind or reducer.stages is None or not overlap_pays(world)
        if self._behind and world.size > 1:
            device = next((p.device for p in self.model.parameters() if p.is_cuda), None)
            self._side = SideChannel(world, device, inline=inline, behind=True)
            self._channel = self._side.channel
        else:
            self._channel = world.channel(inline=inline)
        for fragment in self.fragments:
            self.run(partial(fragment.build, self.strategy.bucket_bytes))

    def stop(self, change: Change | None = None) -> None:
        """Let go of buckets, thread and channel; what is under way ends first."""
        if self._side is not None:
            self._side.finish()
        if self._channel is not None:
            for fragment in self.fragments:
                fragment.release(self._channel)
            self._channel.close()
        self._side = self._channel = None
        self.pending = {} if change is None else self.pending

    def run(self, job: Callable[[World], T]) -> T:
        """Run a job on the channel after what is under way there, and wait for it."""
        return self._submit(job).wait()

    def _submit(self, job: Callable[[World], T]) -> Handle[T]:
        if self._side is not None:
            return self._side.start(job)
        assert self._channel is not None, "a world that exchanges something"
        return Handle.of(job(self._channel))

    # Windows -----------------------------------------------------------------------------------------------------

    def advance(self) -> None:
        """The optimizer is about to move the parameters: what has become trainable takes part from here."""
        for fragment in self.fragments:
            fragment.follow()
            fragment.together = False
        super().advance()

    def take_writes(self, names: Sequence[str], *, loaded: bool) -> None:
        """Keep what the program wrote to these parameters, until the next exchange compares it."""
        for fragment in self.fragments:
            fragment.follow()
            found = {name: fragment.params[name] for name in names if name in fragment.live}
            if found:
                fragment.written.take(found, loaded=loaded)
                fragment.together = False

    def weight_changed(self, weight: float) -> None:
        """A batch of weight zero stands in for one that is missing; the others count in the mean of the models."""
        self.weigh_gradients(None if weight else torch.zeros_like)

    def count_window(self, weight: float) -> None:
        for fragment in self.fragments:
            self._weights[fragment.index].append(weight)

    def weight(self, fragment: int) -> float:
        """How much this rank counts: its part of all samples since the fragment's last exchange, times the ranks."""
        weights = self._weights[fragment]
        return sum(weights) / len(weights) if weights else 1.0

    def meet(self) -> None:
        now = self._learning_rates.by_group()
        if any(new < old for new, old in zip(now, self._rates, strict=False)):
            self.fell = [True] * self._count  # until every fragment's exchange has said so
        self._rates = now
        self.rounds.meet(self)

    def exchange(self, fragment: Fragment, *, delay: int = 0, agree_on_decay: bool = False) -> float:
        """Take the fragment's differences and start their exchange, to be applied `delay` windows later. They count by
        the samples that this rank saw since the fragment's last exchange: gives how much.

        `agree_on_decay`: all ranks hear whether a learning rate fell on some rank (always, under a reducer that
        compresses).
        """
        if {name for bucket in fragment.buckets for name in bucket.names} != set(fragment.live):
            self.run(partial(fragment.build, self.strategy.bucket_bytes))
        index, weight, weights = fragment.index, self.weight(fragment.index), self._weights[fragment.index]
        written, code, fragment.written = fragment.written, 0, Written()  # from here on, the next one's
        if written.values:
            written.values = {name: value for name, value in written.values.items() if name in fragment.live}
            code = written.code()
        fragment.fill(weight, written.values)
        mine, self.fell[index] = self.fell[index], False
        asks = agree_on_decay or self.follows_writes
        buffers = [b.clone() if delay else b for b in (self._buffers_to_share() if index == 0 else [])]

        def run(channel: World) -> tuple[bool, bool]:
            fell, agreed = mine, False
            if asks:
                flags = torch.tensor([mine, code, -code])
                fell, most, least = channel.all_reduce(flags, "max", tag="decay").wait().tolist()
                agreed = 0 < most == -least
                fragment.reduction.set_decayed(bool(fell))
            if not agreed:
                means = fragment.means() if written.values else {}
                for name, value in written.values.items():  # becomes part of how far this rank has come
                    anchor = fragment.anchors[name]
                    means[name].add_(anchor.to(value.dtype).to(anchor.dtype) - value.to(anchor.dtype), alpha=weight)
            elif written.loaded:
                fragment.reduction.drop_unsent(written.values)
            self._reduce(fragment, channel)
            share_buffers(buffers, self.strategy.buffers, channel, weight)
            return bool(fell), agreed

        handle = self._submit(run)  # if a rank is lost in it, the windows still count
        self._weights[index] = []
        self.pending[index] = PendingExchange(self.met + delay, handle, fragment.means, buffers, written, weights)
        return weight

    def _reduce(self, fragment: Fragment, channel: World) -> None:
        """To the mean; in the first windows, all ranks' first differences are compared with it (see `SameData`)."""
        if self._same_data is None or fragment.index:
            fragment.reduce(channel)
            return
        with self._same_data.watching(max(fragment.means().values(), key=Tensor.numel)):
            fragment.reduce(channel)
        if not self._same_data.is_looking:
            self._same_data = None

    def finish(self, fragment: Fragment) -> tuple[dict[str, Tensor], bool]:
        """The mean of the differences, and whether a learning rate fell on some rank (if the ranks agreed on it)."""
        pending, since = self.pending.pop(fragment.index), self._weights[fragment.index]
        self._weights[fragment.index] = [*pending.weights, *since]  # if it does not arrive
        fell, wrote_alike = self._wait_for(pending)
        self._weights[fragment.index] = since
        for name, value in pending.written.values.items() if wrote_alike else ():
            anchor = fragment.anchors[name]  # becomes that; numbers that were not changed keep their precision
            anchor.copy_(torch.where(value == anchor.to(value.dtype), anchor, value.to(anchor.dtype)))
        self.loaded = list(pending.written.values) if wrote_alike and pending.written.loaded else []
        for mine, agreed in zip(self._buffers_to_share(), pending.buffers, strict=False):
            put_back(mine, agreed)
        self._agreed[fragment.index] = self.met
        return pending.means(), fell

    def _wait_for(self, pending: PendingExchange) -> tuple[bool, bool]:
        ledger = self.world.ledger
        start = ledger.clock()
        found = pending.handle.wait()
        if self._behind:
            ledger.close_span("blocked", start, ledger.clock())
        return found

    def _buffers_to_share(self) -> list[Tensor]:
        if self.strategy.buffers == "local" or self.world.size == 1:
            return []
        return [b.detach() for b in self.model.buffers()]

    # The model, and state ----------------------------------------------------------------------------------------

    def consolidate(self) -> nn.Module:
        """A copy with the mean of all ranks' parameters and buffers, by their samples (every rank calls it)."""
        self.meet_if_due()
        made = self.copy_model()
        if self.world.size > 1:
            self.run(partial(self._fill_with_means, made))
        self.average_frozen(made)
        return made

    @torch.no_grad()
    def _fill_with_means(self, made: nn.Module, channel: World) -> None:
        theirs = dict(made.named_parameters())
        for fragment in self.fragments:
            differences = [fragment.difference(name) for name in fragment.live]
            take_weighted_mean(differences, self.weight(fragment.index), channel, tag="consolidate")
            for name, difference in zip(fragment.live, differences, strict=True):
                theirs[name].detach().copy_(fragment.anchors[name] - difference)
        share_buffers([b.detach() for b in made.buffers()], "average", channel, self.weight(0))

    def model_part(self) -> ModelPart:
        found: dict[Tensor, float] = {f.params[n]: self.weight(f.index) for f in self.fragments for n in f.live}
        return ModelPart(weights=found | dict.fromkeys(self.model.buffers(), self.weight(0)))

    @property
    def averaged_values(self) -> AveragedValues:
        return AgreedValues(self)

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
        return {
            **super().shared_state(),
            "anchors": None if same else {name: f.anchors[name] for f in self.fragments for name in f.live},
            "fragments": len(self.fragments),
            "under way": under_way,
            "reducer": [f.reduction.state_dict()["shared"] for f in self.fragments],
            "rates": list(self._rates),
            "fell": list(self.fell),
            "agreed": list(self._agreed),
            **self.rounds.shared_state(self),
        }

    def local_state(self) -> dict[str, Any]:
        return {
            "reducer": [f.reduction.state_dict()["local"] for f in self.fragments],
            "weights": [list(weights) for weights in self._weights],
            "written": [f.written.state_dict() for f in self.fragments],
        }

    @torch.no_grad()
    def load_shared(self, shared: dict[str, Any]) -> None:
        """Anchors, and exchanges that were under way. At another world size the parameters are the mean of the former
        ranks' (see `un.load`): with the anchors as they were, the next exchange gives what theirs would have given."""
        if "anchors" not in shared:
            raise ValueError(
                "the checkpoint is of a strategy that keeps no anchors: load it with the strategy that it was saved "
                f"with, then call replica.switch({type(self.strategy).__name__!r})"
            )
        super().load_shared(shared)
        count = shared["fragments"]
        if self.fragments and count not in (0, len(self.fragments)):
            raise ValueError(
                f"the checkpoint has {count} fragment(s), this strategy {len(self.fragments)}: resume with the "
                "number of fragments it was saved with"
            )
        self._forget_pending(keep_arrived=False)
        self._rates, self._agreed = list(shared["rates"]), list(shared["agreed"])
        self.fell = list(shared["fell"])
        for fragment in self.fragments:
            fragment.set_anchors(shared["anchors"])
        for index, saved in shared["under way"].items() if self.fragments else ():
            anchors = self.fragments[int(index)].anchors
            means = {name: torch.empty_like(anchors[name]).copy_(mean) for name, mean in saved["means"].items()}
            buffers = [b.to(self.world.device, copy=True) for b in saved["buffers"]]
            written = saved.get("written")
            handle = Handle.of((saved["heard"], written is not None))
            self.pending[int(index)] = PendingExchange(
                saved["due"], handle, partial(dict, means), buffers, Written.of(written, self.world.device)
            )
        self.rounds.load_shared(self, shared)

    def load_local(self, shared: dict[str, Any], locals_: Sequence[dict[str, Any]], *, same_world: bool) -> None:
        """What the ranks' reducers kept, if the fragments are the same; in the same world, what this rank saw."""
        self._weights = [[] for _ in range(self._count)]
        if same_world and len(locals_[0].get("weights", ())) == self._count:
            self._weights = [list(weights) for weights in locals_[0]["weights"]]
        if len(self.fragments) == shared["fragments"]:
            for i, fragment in enumerate(self.fragments):
                fragment.reduction.load_state_dict(shared["reducer"][i], [part["reducer"][i] for part in locals_])
                saved = locals_[0].get("written") if same_world else None
                fragment.written = Written.of(saved[i] if saved else None, self.world.device)

    def _forget_pending(self, *, keep_arrived: bool) -> None:
        """Wait for what is under way, and forget it, or keep what arrived."""
        arrived, self._begun = {}, set(self.pending)
        for index, pending in sorted(self.pending.items()):
            try:
                pending.handle.wait()
                arrived[index] = pending
            except Exception:  # noqa: PERF203 - a lost rank: what was under way does not arrive
                self._weights[index] = [*pending.weights, *self._weights[index]]
        self.pending = arrived if keep_arrived else {}

    def unsent(self) -> Residual | None:
        """What the fragments' reducers have kept back, of all parameters."""
        if not (parts := [fragment.reduction.unsent() for fragment in self.fragments]):
            return None
        shared = {
            "each": {name: entries for part in parts for name, entries in part.shared["each"].items()},
            "decayed": any(part.shared["decayed"] for part in parts),
            "rates": {name: rate for part in parts for name, rate in part.shared["rates"].items()},
        }
        local = {name: entries for part in parts for name, entries in part.local.items()}
        return self.rounds.give_unsent(self, parts[0]._replace(shared=shared, local=local))

    def take_unsent(self, unsent: Residual) -> None:
        """Each fragment's reducer goes on with what was kept back of its parameters."""
        unsent = self.rounds.take_unsent(self, unsent)
        if unsent.unit != "parameters" or not self.fragments:
            super().take_unsent(unsent)
            return
        for fragment in self.fragments:
            fragment.reduction.take_unsent(unsent.only(list(fragment.params)))

    # Another world: those who stayed last agreed on the same anchors as the source, in a world of its size. They bring
    # their parameters, and keep their optimizer's state.

    def settle(self, *, is_source: bool) -> None:
        self._unmet = 0
        self._forget_pending(keep_arrived=True)

    def progress(self) -> dict[str, Any]:
        """When each fragment was last agreed on, which exchanges begun since arrived, and how much this rank has
        trained since: ranks may be some windows apart, and one without any does not hold the others back."""
        return {
            "reached": list(self._agreed),
            "begun": sorted(self._begun),
            "arrived": sorted(self.pending),
            "weights": [sum(weights) for weights in self._weights],
        }

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
        if shared["anchors"] is None or not self.fragments:  # all who stayed have the same parameters
            share(self.model, change.world, change.source)
            self.load_shared(shared)
        else:
            self.load_shared(shared)
            self._average_parameters(change)
        self._weights = [[] for _ in range(self._count)]  # all ranks have the same parameters
        for fragment, kept in zip(self.fragments, shared["reducer"], strict=False):
            keep = change.keeps and fragment.index not in dropped
            fragment.reduction.move(kept, keep=keep, factor=change.factor)
        if not dropped:
            return ""
        return (
            f"the exchange of {len(dropped)} fragment(s) did not arrive: their differences go with the next "
            "one, what their reducers kept back is lost"
        )

    def _average_parameters(self, change: Change) -> None:
        """The anchors are the source's now: parameters become x0 - mean(x0 - x_i) of all who stayed, by `progress`."""
        world, stayed = change.world, change.stayed
        named = [(f, name) for f in self.fragments for name in f.live]
        sums = [torch.zeros_like(f.anchors[name]) for f, name in named]
        for (fragment, name), mine in zip(named, sums, strict=True):
            trained = [change.progress[r]["weights"][fragment.index] for r in stayed]
            weight = sum(self._weights[fragment.index]) * len(stayed) / sum(trained) if any(trained) else 1.0
            if change.keeps and weight:
                mine.copy_(fragment.difference(name)).mul_(weight)
        world.all_reduce(sums, "sum", tag="rebind").wait()
        share(self.model, world, change.source)
        for (fragment, name), total in zip(named, sums, strict=True):
            fragment.params[name].detach().copy_(fragment.anchors[name] - total / len(stayed))
