"""Anchors: the last model that all ranks agreed on, and the exchange of how far each has moved from it since."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from unisono.background import Handle
from unisono.batch_norm import move_batch_norm
from unisono.exchange.reduction import check_real, overlap_pays
from unisono.reducer import Reducer
from unisono.reducers.dense import dense
from unisono.strategies._fragments import Courier, Fragment, divided
from unisono.strategies._periodic import PeriodicReplica
from unisono.strategy import Buffers, Strategy, share, share_buffers
from unisono.world import World

T = TypeVar("T")


@dataclass
class Trip:
    """An exchange of a fragment that is under way: applied after window `due`."""

    due: int
    handle: Handle[bool]  # gives whether a learning rate fell, on some rank
    means: Callable[[], dict[str, Tensor]]
    buffers: list[Tensor]


class AnchoredReplica(PeriodicReplica):
    """Local training whose differences to the last agreed model are exchanged, all at once or in fragments.

    `begin(fragment)` takes the differences and starts their exchange, `arrive(fragment)` waits for it and gives
    their mean. `streaming`: exchanges run behind the program.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        world: World,
        strategy: Strategy,
        *,
        reducer: Reducer | None,
        buffers: Buffers,
        accumulate: int,
        bucket_bytes: int,
        fragments: int = 1,
        streaming: bool = False,
    ) -> None:
        super().__init__(model, optimizer, world, strategy, accumulate=accumulate)
        self.reducer = reducer if reducer is not None else dense()
        self.streaming, self._buffers, self._bucket_bytes = streaming, buffers, bucket_bytes
        self._count = fragments
        self.fragments: list[Fragment] = []
        self.trips: dict[int, Trip] = {}
        self._courier: Courier | None = None
        self._rates = self._rates_now()
        self._fell = [False] * fragments  # a learning rate fell since a fragment was exchanged
        self._agreed = [0] * fragments  # the window in which each fragment's anchors were last agreed on
        self._begun: set[int] = set()  # what was under way when the world ended
        try:
            if self.reducer.check is not None:
                self.reducer.check(optimizer, world)
            self._start()
            for fragment in self.fragments:
                fragment.reduction.warn_if_more_than_dense(world)
        except BaseException:
            self.close()
            raise

    @property
    def needed(self) -> bool:
        """Whether there is anything to do at a meeting in this world."""
        return self.world.size > 1 or not self.reducer.exact

    @property
    def hears_of_decay(self) -> bool:
        """Whether an exchange brings to every rank that a learning rate fell on some rank."""
        return not self.reducer.exact

    def _start(self) -> None:
        """Fragments, where they are needed, with buckets in this world."""
        if not self.needed:
            self.fragments = []
            return
        if not self.fragments:
            parts = divided(list(self.model.named_parameters()), self._count)
            check_real(self.reducer, [named for part in parts for named in part])
            self.fragments = [Fragment(i, part, self.reducer, self.optimizer) for i, part in enumerate(parts)]
        inline = self.streaming or self.reducer.stages is None or not overlap_pays(self.world)
        device = next((p.device for p in self.model.parameters() if p.is_cuda), None)
        self._courier = Courier(self.world, device, inline=inline, behind=self.streaming and self.world.size > 1)
        for fragment in self.fragments:
            self._build(fragment)

    def _build(self, fragment: Fragment) -> None:
        self.in_order(lambda channel: fragment.build(channel, self._bucket_bytes))

    def _stop(self) -> None:
        """Let go of buckets, thread and channel; what is under way ends first."""
        if self._courier is not None:
            self._courier.finish()
            for fragment in self.fragments:
                fragment.release(self._courier.channel)
            self._courier.channel.close()
            self._courier = None

    def in_order(self, job: Callable[[World], T]) -> T:
        """Run a job on the channel after what is under way there, and wait for it."""
        return self._start_job(job).wait()

    def _start_job(self, job: Callable[[World], T]) -> Handle[T]:
        assert self._courier is not None, "a world that exchanges something"
        return self._courier.start(job)

    # Meetings ----------------------------------------------------------------------------------------------------

    def advance(self) -> None:
        for fragment in self.fragments:
            fragment.follow()  # before the optimizer moves what has become trainable
            fragment.together = False
        super().advance()

    def note_rates(self) -> None:
        """Remember that a learning rate fell, until every fragment's exchange has said so."""
        now = self._rates_now()
        if any(new < old for new, old in zip(now, self._rates, strict=False)):
            self._fell = [True] * self._count
        self._rates = now

    def _rates_now(self) -> list[float]:
        return [_plain(group.get("lr", math.nan)) for group in self.optimizer.param_groups]

    def begin(self, fragment: Fragment, delay: int = 0) -> None:
        """Take the fragment's differences and start their exchange, to be applied `delay` windows later."""
        if not fragment.laid_out:
            self._build(fragment)
        fragment.take()
        fell, self._fell[fragment.index] = self._fell[fragment.index], False
        asks = self.hears_of_decay
        buffers = self._buffers_to_share() if fragment.index == 0 else []
        if delay:
            buffers = [b.clone() for b in buffers]

        def exchange(channel: World) -> bool:
            heard = fell
            if asks:
                flag = torch.tensor([fell], dtype=torch.uint8)
                channel.all_reduce(flag, "max", tag="decay").wait()
                heard = bool(flag.item())
                fragment.reduction.heard(heard)
            fragment.reduce(channel)
            share_buffers(buffers, self._buffers, channel)
            return heard

        self.trips[fragment.index] = Trip(self.met + delay, self._start_job(exchange), fragment.means, buffers)

    def arrive(self, fragment: Fragment) -> tuple[dict[str, Tensor], bool]:
        """The mean of the differences, and whether a learning rate fell on some rank (if `hears_of_decay`)."""
        trip = self.trips.pop(fragment.index)
        heard = self._awaited(trip)
        for mine, agreed in zip(self._buffers_to_share(), trip.buffers, strict=False):
            if mine.data_ptr() != agreed.data_ptr():
                mine.copy_(agreed)
        self._agreed[fragment.index] = self.met
        return trip.means(), heard

    def _awaited(self, trip: Trip) -> bool:
        ledger = self.world.ledger
        start = ledger.clock()
        heard = trip.handle.wait()
        if self.streaming:
            ledger.close_span("blocked", start, ledger.clock())
        return heard

    def _buffers_to_share(self) -> list[Tensor]:
        if self._buffers == "local" or self.world.size == 1:
            return []
        return [b.detach() for b in self.model.buffers()]

    # The model to evaluate ---------------------------------------------------------------------------------------

    def consolidate(self) -> nn.Module:
        """A copy of the model with the mean of all ranks' parameters and buffers (every rank calls it)."""
        super().consolidate()
        made = self.copied()
        if self.world.size > 1:
            with torch.no_grad():
                self.in_order(partial(self._fill_with_means, made))
        return made

    def _fill_with_means(self, made: nn.Module, channel: World) -> None:
        theirs = dict(made.named_parameters())
        for fragment in self.fragments:
            moved = [fragment.moved(name) for name in fragment.live]
            channel.all_reduce(moved, "mean", tag="consolidate").wait()
            for name, difference in zip(fragment.live, moved, strict=True):
                theirs[name].detach().copy_(fragment.anchors[name] - difference)
        share_buffers([b.detach() for b in made.buffers()], "average", channel)

    # State -------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Anchors are left out where they are the model's parameters, bit by bit, on every rank."""
        shared = super().state_dict()["shared"]
        under_way = {}
        for index, trip in sorted(self.trips.items()):
            heard = self._awaited(trip)  # every rank has begun it, so it ends without more
            under_way[str(index)] = {
                "due": trip.due,
                "heard": heard,
                "means": {name: mean.clone() for name, mean in sorted(trip.means().items())},
                "buffers": trip.buffers,
            }
        kept = [fragment.reduction.state_dict() for fragment in self.fragments]
        same = all(f.together and all(f.anchors[n].dtype == f.params[n].dtype for n in f.live) for f in self.fragments)
        anchors = {name: f.anchors[name] for f in self.fragments for name in f.live}
        shared |= {
            "anchors": None if same else anchors,
            "fragments": len(self.fragments),
            "under way": under_way,
            "reducer": [k["shared"] for k in kept],
            "rates": list(self._rates),
            "fell": list(self._fell),
            "agreed": list(self._agreed),
        }
        return {"shared": shared, "local": {"reducer": [k["local"] for k in kept]}}

    def load_state_dict(self, state: dict[str, Any], *, same_world: bool = True) -> None:
        """At another world size the parameters are the mean of the former ranks' (see `un.load`): with the anchors
        as they were, the next exchange gives what theirs would have given."""
        if "anchors" not in state["shared"]:
            raise ValueError(
                "the checkpoint is of a strategy that keeps no anchors: load it with the strategy that it was saved "
                f"with, then call replica.switch({type(self.strategy).__name__!r})"
            )
        super().load_state_dict(state, same_world=same_world)
        self._take_shared(state["shared"])
        parts = [state["local"]] if same_world else state["locals"]
        if len(self.fragments) == state["shared"]["fragments"]:
            for i, fragment in enumerate(self.fragments):
                fragment.reduction.load_state_dict(state["shared"]["reducer"][i], [p["reducer"][i] for p in parts])

    @torch.no_grad()
    def _take_shared(self, shared: dict[str, Any]) -> None:
        """Anchors, and exchanges that were under way: the part of a state that all ranks share."""
        count = shared["fragments"]
        if self.fragments and count not in (0, len(self.fragments)):
            raise ValueError(
                f"the checkpoint has {count} fragment(s), this strategy {len(self.fragments)}: go on with the "
                "number of fragments it was saved with"
            )
        self._forget_trips()
        self._rates, self._agreed = list(shared["rates"]), list(shared["agreed"])
        self._fell = list(shared["fell"])
        for fragment in self.fragments:
            _take_anchors(fragment, shared["anchors"])
        for index, trip in shared["under way"].items() if self.fragments else ():
            anchors = self.fragments[int(index)].anchors
            means = {name: torch.empty_like(anchors[name]).copy_(mean) for name, mean in trip["means"].items()}
            buffers = [b.to(self.world.device, copy=True) for b in trip["buffers"]]
            self.trips[int(index)] = Trip(trip["due"], Handle.of(trip["heard"]), partial(dict, means), buffers)

    # Another world -----------------------------------------------------------------------------------------------

    def rebind(self, world: World, *, source: int = 0) -> str:
        """Those who stayed (they last agreed on the same anchors as `source`, in a world of its size) bring their
        parameters: everyone goes on from their mean. They keep their optimizer's state; others get `source`'s."""
        self._ended = 0
        size, arrived = self.world.size, self._forget_trips(keep=True)
        state = self.state_dict()["shared"]
        mine = {"size": size, "agreed": state["agreed"], "arrived": arrived, "begun": sorted(self._begun)}
        self._stop()
        self.move_to(world)
        every = world.gather_objects(mine)
        stayed, dropped = _stayed(every, source)
        state, steps, optimizer = world.broadcast_object(
            [state, world.ledger.step_count, self.optimizer.state_dict()] if world.rank == source else None, source
        )
        if world.rank not in stayed:
            self.optimizer.load_state_dict(optimizer)
        if world.ledger.step_count != steps:
            world.ledger.resume(steps)
        self.step = state["step"]
        state["under way"] = {i: trip for i, trip in state["under way"].items() if int(i) not in dropped}
        self._start()
        with torch.no_grad():
            self._gather(state, stayed, source)
        for fragment, kept in zip(self.fragments, state["reducer"], strict=False):
            keep = world.rank in stayed and fragment.index not in dropped
            fragment.reduction.move(kept, keep=keep, factor=world.size / size)
        move_batch_norm(self.model, world)
        return _told(every[source]["size"], len(stayed), dropped, self.step, source, world.size)

    def _gather(self, state: dict[str, Any], stayed: list[int], source: int) -> None:
        """Anchors from `source`, parameters from all who stayed: x0 - mean(x0 - x_i)."""
        if state["anchors"] is None or not self.fragments:  # they have the same
            share(self.model, self.world, source)
            self._take_shared(state)
            return
        self._take_shared(state)
        stays = self.world.rank in stayed
        named = [(f, name) for f in self.fragments for name in f.live]
        moved = [f.moved(name) if stays else torch.zeros_like(f.anchors[name]) for f, name in named]
        self.world.all_reduce(moved, "sum", tag="rebind").wait()
        share(self.model, self.world, source)
        for (fragment, name), total in zip(named, moved, strict=True):
            fragment.params[name].detach().copy_(fragment.anchors[name] - total / len(stayed))

    def _forget_trips(self, *, keep: bool = False) -> list[int]:
        """Wait for what is under way, and forget it, or keep what arrived; gives the fragments that arrived."""
        arrived, self._begun = [], set(self.trips)
        for index, trip in sorted(self.trips.items()):
            try:
                trip.handle.wait()
                arrived.append(index)
            except Exception:  # noqa: PERF203 - a lost rank: what was under way does not arrive
                continue
        self.trips = {i: self.trips[i] for i in arrived} if keep else {}
        return arrived

    def close(self) -> None:
        super().close()
        self._stop()
        self.trips = {}


def _take_anchors(fragment: Fragment, anchors: dict[str, Tensor] | None) -> None:
    """Set a fragment's anchors; None: they are the parameters."""
    fragment.live = [n for n, p in fragment.params.items() if p.requires_grad or n in (anchors or {})]
    for name in fragment.live:
        fragment.set_anchor(name, (anchors or {}).get(name, fragment.params[name].detach()))
    fragment.together = anchors is None


def _stayed(every: list[dict[str, Any]], source: int) -> tuple[list[int], set[int]]:
    """Who was in `source`'s world and last agreed on what it did; which exchanges did not arrive at all of them."""
    former = every[source]
    same = [r for r, o in enumerate(every) if (o["size"], o["agreed"]) == (former["size"], former["agreed"])]
    stayed = [source] if former["size"] == 1 else same
    begun = {index for r in stayed for index in every[r]["begun"]}
    return stayed, {index for index in begun if any(index not in every[r]["arrived"] for r in stayed)}


def _told(former: int, stayed: int, dropped: set[int], step: int, source: int, size: int) -> str:
    text = (
        f"parameters: the mean of {stayed} of the {former} former ranks; anchors, buffers and step {step} from rank "
        f"{source} of {size}; optimizer states: their own where ranks stayed, else that of rank {source}; gradients "
        "that were not stepped are dropped"
    )
    if dropped:
        text += (
            f"; the exchange of {len(dropped)} fragment(s) did not arrive: their differences go with the next one, "
            "what their reducers kept back is gone"
        )
    return text


def _plain(lr: Any) -> float:
    if isinstance(lr, Tensor):
        return math.nan if lr.is_cuda else float(lr)  # reading one from a device would hold the program up
    return float(lr)
