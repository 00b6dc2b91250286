"""`un.average`: a running average of a model's weights, kept beside it under any method that has one model.

EMA: Polyak and Juditsky, 1992. SWA: Izmailov et al., 2018 (arXiv:1803.05407). Schedule-free: Defazio et al., 2024
(arXiv:2405.15682).

What is averaged is what the optimizer steps, in the precision that it steps: a rank averages its own part of that, so
an average costs no message. A method says where these values lie (`Replica.averaged_values`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from unisono.launchers.runtime.frames import warn_user
from unisono.methods.buckets import find_wide_dtype
from unisono.methods.model_copies import unwrap
from unisono.training.checkpoint.slices import Piece, Stored
from unisono.world.operations import put_back

if TYPE_CHECKING:
    from unisono.methods.strategy.change import Change
    from unisono.methods.strategy.replica import Replica

Decay = float | Literal["equal"] | None
_DEFAULT_DECAY = 0.999


class Part(NamedTuple):
    """Some elements of a parameter in a line: `length` of them, from element `start` of it, at place `at`."""

    name: str
    shape: torch.Size
    at: int
    start: int
    length: int


class Source(NamedTuple):
    """Values on this rank that an average follows: a whole parameter, or a line with parts of several.

    key: what they are known by, as long as the method keeps them in this place.
    follow(): the values to be averaged, as they are now.
    read(), write(values): those that the model computes with, in the precision in which the optimizer steps them.
    parts: of a line; None: `key` is the name of a parameter, which is here whole.
    make(length, dtype): memory for the average of a line; None: memory of this rank's own.
    is_copy: another rank has the same line, and saves it.
    """

    key: Any
    follow: Callable[[], Tensor]
    read: Callable[[], Tensor]
    write: Callable[[Tensor], None]
    parts: Sequence[Part] | None = None
    make: Callable[[int, torch.dtype], Tensor] | None = None
    is_copy: bool = False


class AveragedValues:
    """The values that an average follows under a method: here, whole parameters that every rank has for itself.

    is_late: values are stepped behind the program: they are averaged before the next step.
    """

    is_late = False
    is_common = False  # ranks average parts of common memory: after a loss, one of them ends what others have not
    steps_here = True  # the optimizer's own code steps the sources

    def __init__(self, replica: Replica) -> None:
        self.replica = replica
        self.listed: list[Source] = []  # what `sources` gave

    def sources(self) -> list[Source]:
        """What to follow, in the order that all ranks have."""
        return [self.whole(name, param) for name, param in self.named_parameters()]

    def named_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Parameters that have an average, under the names that the program knows."""
        for name, param in unwrap(self.replica.model).named_parameters():
            if param.is_floating_point() or param.is_complex():
                yield name, param

    def whole(self, name: str, param: Tensor, follow: Callable[[], Tensor] | None = None) -> Source:
        """A parameter that is here whole, in whatever memory; `follow`: what is averaged, if not its values."""
        read = param.detach
        return Source(name, follow or read, read, lambda values: void(read().copy_(values)))

    def optimizing(self) -> AbstractContextManager[None]:
        """Inside the block, the optimizer holds the sources."""
        return nullcontext()

    def writing(self) -> AbstractContextManager[None]:
        """Inside the block, `Source.write` is called on every rank. After it, the model computes with what it wrote."""
        return nullcontext()

    def end_parts(self, average: Average) -> list[int]:
        """Average the parts of common memory that ranks have not averaged; gives the ranks whose part is torn."""
        return []

    def note(self, update: int, *, ended: bool) -> None:
        """This rank is about to average its part, for the time with this number, or has."""

    def collect(self, held: Mapping[Any, Tensor]) -> dict[str, Any]:
        """The averages by parameter, from those of the sources: a `Piece` of one that is split over the ranks."""
        found: dict[str, Any] = {}
        spans: dict[str, list[Any]] = {}
        kinds: dict[str, tuple[torch.Size, torch.dtype]] = {}
        for source in self.listed:
            mine = held[source.key]
            if source.parts is None:
                found[source.key] = mine
            for part in source.parts or () if not source.is_copy else ():
                kinds[part.name] = part.shape, mine.dtype
                piece = Piece.of(mine[part.at : part.at + part.length], part.start, shape=part.shape)
                spans.setdefault(part.name, []).extend(piece.spans)
        return found | {name: Piece(*kinds[name], held) for name, held in spans.items()}

    def collect_values(self) -> dict[str, Any]:
        """The values themselves, as `collect` gives averages: what the average is before the first step that counts."""
        return self.collect({source.key: source.follow() for source in self.listed})

    def fill(self, held: Mapping[Any, Tensor], values: Mapping[str, Any]) -> None:
        """Set the averages of the sources from those of whole parameters: tensors, or a `Stored` of each. A parameter
        that has none was frozen there: its average is its value."""
        for source in self.listed:
            mine = held[source.key]
            if source.parts is None:
                given = values[source.key] if source.key in values else source.follow()
                mine.copy_(given.full() if isinstance(given, Stored) else given)
            for part in source.parts or ():
                place, given = slice(part.at, part.at + part.length), values.get(part.name)
                if given is None:
                    mine[place].copy_(source.follow()[place])
                else:
                    stored = given if isinstance(given, Stored) else Stored.of(given)
                    stored.read(part.start, part.start + part.length, out=mine[place])


def void(_: Any) -> None:
    """Drop a value, in an expression."""


def average(replica: Replica, decay: Decay = None, *, start: int = 0, every: int = 1) -> Average:
    """Keep a running average of the weights that `replica` trains, updated after every step of the optimizer from
    here on. Every rank makes the same call.

    The first step that counts sets it to the weights; from then on a <- decay * a + (1 - decay) * w, as
    `torch.optim.swa_utils` does. Steps that AMP skips do not count. Buffers have no average: evaluated and exported
    are those of the model, as with `AveragedModel(use_buffers=False)`.

    decay: of an exponential average; "equal": the mean of all weights that counted (SWA). None: 0.999, or for a
        schedule-free optimizer (one with `train()` and `eval()`) the point that it evaluates at, which it keeps itself.
    start: steps before the first that counts.
    every: one step in so many counts.

    `un.save` and `un.load` include it: create it before you load.

    >>> import unisono as un
    >>> model = nn.Linear(2, 1)
    >>> replica = un.parallel(model, torch.optim.SGD(model.parameters(), lr=0.1), world=un.World())
    >>> average = un.average(replica, decay=0.99)
    >>> with average.applied():
    ...     _ = model(torch.ones(1, 2))  # evaluated with the average
    """
    from unisono.methods.strategy.replica import Replica

    if not isinstance(replica, Replica):
        raise TypeError(f"un.average takes the replica that un.parallel returned, got {type(replica).__name__}")
    settings = _check(replica, decay, start, every)
    if replica.elastic is not None:
        with replica.elastic.inside():
            made = _make(replica, settings)
        assert replica.healing is not None
        replica.healing.descriptions.append(f"average: {settings}")
        return made
    return _make(replica, settings)


class Settings(NamedTuple):
    """How an average is taken: `decay` is a number, "equal", or "schedule_free"."""

    decay: float | str
    start: int
    every: int


def _check(replica: Replica, decay: Decay, start: int, every: int) -> Settings:
    free = all(callable(getattr(o, "eval", None)) and callable(getattr(o, "train", None)) for o in _members(replica))
    kind: float | str = ("schedule_free" if free else _DEFAULT_DECAY) if decay is None else decay
    if isinstance(kind, bool) or not (isinstance(kind, float | int) or kind in ("equal", "schedule_free")):
        raise ValueError(f'got decay={decay!r}, expected a number from 0 to below 1, or "equal" for the mean (SWA)')
    if not isinstance(kind, str) and not 0 <= kind < 1:
        raise ValueError(
            f"got decay={decay!r}, expected 0 <= decay < 1: 0.999 looks back about 1,000 steps"
            + (". For an equal mean of all weights say decay='equal'" if kind == 1 else "")
        )
    for name, value, least in (("start", start, 0), ("every", every, 1)):
        if type(value) is not int or value < least:
            raise ValueError(f"got {name}={value!r}, expected a whole number of steps, {least} or more")
    if kind == "schedule_free" and (start or every > 1):
        raise ValueError("a schedule-free optimizer does its own averaging, every step: leave start and every out")
    if replica.is_closed:
        raise ValueError("un.average of a replica that is closed: call un.parallel first, then un.average")
    if replica.weight_average is not None:
        raise ValueError("this replica has an average already: keep the one that un.average returned")
    method = type(replica.strategy).__name__
    if replica.world.axes is not None:
        raise ValueError("un.average on a mesh: there is none for a model that is split over tensor or pipeline ranks")
    if replica.no_average:
        raise ValueError(f"there is no average of the weights under {method}: {replica.no_average}")
    if kind == "schedule_free" and (replica.own_gradients or not replica.averaged_values.steps_here):
        raise ValueError(
            f"{method} has no evaluation point of a schedule-free optimizer: that one does not step the model of all "
            "ranks itself. Use allreduce or zero, or give a decay"
        )
    return Settings(kind if isinstance(kind, str) else float(kind), start, every)


def _members(replica: Replica) -> list[Any]:
    return list(getattr(replica, "members", None) or [replica.optimizer])


def _make(replica: Replica, settings: Settings) -> Average:
    every = replica.world.gather_objects(list(settings)) if replica.world.size > 1 else []
    if any(other != every[0] for other in every):
        asked = "; ".join(f"rank {r} asks for {Settings(*other)}" for r, other in enumerate(every))
        raise ValueError(f"the ranks do not keep the same average: {asked}. Every rank calls un.average alike")
    return Average(getattr(replica, "inner", replica), settings)  # the one at work, if a strategy changes


class Average:
    """The running average that `un.average` returned."""

    def __init__(self, replica: Replica, settings: Settings) -> None:
        self.replica, self.settings = replica, settings
        self.steps = 0  # of the optimizer, since `un.average`
        self.updates = 0  # those that counted
        self._due = False  # a step counts that has not been averaged yet
        self._sources: list[Source] = []
        self._averages: list[Tensor] = []  # of each source
        self._whole: dict[str, Tensor] | None = None  # all averages, while the method keeps no parts
        self._is_agreed = False  # these are the same on every rank of the next world
        self._saved: list[Tensor] | None = None  # the weights, while the model has the average
        self._buffers: list[tuple[Tensor, Tensor]] = []
        self.is_applied = self._is_gone = False
        self.place()
        replica.weight_average = self

    def __repr__(self) -> str:
        return f"Average({self.settings.decay}, {self.updates} of {self.steps} steps)"

    @property
    def is_kept(self) -> bool:
        """Whether it is kept here, and not by the optimizer."""
        return self.settings.decay != "schedule_free"

    # Training -----------------------------------------------------------------------------------------------------

    def refuse_step(self) -> None:
        """The optimizer is about to step. What its last step left is averaged now, if it was not before."""
        if self.is_applied:
            raise RuntimeError(
                "optimizer.step() inside average.applied(): the model has the average of the weights there, and the "
                "step would be lost. Leave the block before you train on"
            )
        if not self.replica.is_half_stepped:  # else another of several optimizers is about to end the step
            self.settle()

    def count_step(self, *, is_skipped: bool = False) -> None:
        """The optimizer has stepped; the values may still be on their way."""
        if is_skipped:
            return
        self.settle()
        self.steps += 1
        after = self.steps - self.settings.start
        self._due = self.is_kept and after > 0 and (after - 1) % self.settings.every == 0
        self.updates += self._due

    def update(self) -> None:
        """The values are there, unless they are late."""
        if not self._values.is_late:
            self.settle()

    def settle(self) -> None:
        """Average what is due."""
        if self._due:
            self._due = False
            self._values.note(self.updates, ended=False)
            every = list(zip(self._averages, self._sources, strict=True))
            for some in [[one] for one in every] if self._values.is_late else [every]:
                self.blend([mine for mine, _ in some], [source.follow() for _, source in some])
            self._values.note(self.updates, ended=True)

    @torch.no_grad()
    def blend(self, averages: Sequence[Tensor], values: Sequence[Tensor]) -> None:
        """Let these values count in their averages; the update that is under way has been counted."""
        decay = self.settings.decay
        weight = 1 / self.updates if decay == "equal" else 1 - float(decay)
        if self.updates == 1:
            torch._foreach_copy_(list(averages), list(values))
        elif averages:
            alike = [x.to(a.device, a.dtype) for a, x in zip(averages, values, strict=True)]
            torch._foreach_lerp_(list(averages), alike, weight)

    # Evaluating ---------------------------------------------------------------------------------------------------

    @contextmanager
    def applied(self) -> Iterator[nn.Module]:
        """Inside the block the model computes with the average; after it, weights and buffers are what they were, bit
        by bit. Every rank enters and leaves it. A step inside is refused.

        Before the first step that counts, the average is the weights. What the block does to buffers stays in it:
        `torch.optim.swa_utils.update_bn(loader, model)` gives BatchNorms the statistics of the average.
        """
        if self.is_applied:
            raise RuntimeError("average.applied() inside average.applied(): the model has the average already")
        if self._is_gone:
            raise RuntimeError(
                "average.applied() of a replica that was closed while its model was split: call replica.restore() on "
                "every rank before replica.close()"
            )
        if self._values.is_common and self.replica.elastic is not None:
            raise ValueError(
                "average.applied() under shared, in an elastic run: with a worker that is lost inside the block, its "
                "part of the weights would be lost. Evaluate un.read_checkpoint(path)['average'], or train with "
                "allreduce or zero"
            )
        self.settle()
        self.replica.world.run_tolerating_loss(self._show)
        try:
            yield self.replica.model
        finally:
            self.replica.world.run_tolerating_loss(self._put_back)

    @torch.no_grad()
    def _show(self) -> None:
        meet = getattr(self.replica, "meet_if_due", None)
        if meet is not None:
            meet()
        shown = self._agree() if self.is_kept and self.updates else None
        self._buffers = [(b, b.detach().clone()) for b in self.replica.model.buffers()]
        self.is_applied = True
        if shown is None and self.is_kept:
            return
        with self._values.writing():  # which takes what the program wrote before
            self._saved = [source.read().clone() for source in self._sources]
            if not self.is_kept:
                self._call_optimizers("eval")
            for source, values in zip(self._sources, shown or [], strict=self.is_kept):
                source.write(values)

    @torch.no_grad()
    def _put_back(self) -> None:
        if not self.is_applied:  # the world was formed anew inside the block
            return
        if self._saved is not None:
            with self._values.writing():
                self._write_saved()
        self._end_applied()

    def _end_applied(self) -> None:
        for buffer, before in self._buffers:
            put_back(buffer, before)
        self._buffers = []
        self.is_applied = False
        self.replica.forget_writes()

    def _write_saved(self) -> None:
        saved, self._saved = self._saved, None
        if saved is not None and not self.is_kept:
            self._call_optimizers("train")
        for source, values in zip(self._sources, saved or [], strict=saved is not None):
            source.write(values)

    def _call_optimizers(self, method: str) -> None:
        with self._values.optimizing():
            for optimizer in _members(self.replica):
                getattr(optimizer, method)()

    def _agree(self) -> list[Tensor]:
        """The averages; if ranks have models of their own, the mean of theirs: that is the average of the mean."""
        if not getattr(self.replica, "own_models", False) or self.replica.world.size == 1:
            return self._averages
        means = [x.clone() for x in self._averages]
        self.replica.world.all_reduce(means, "mean", tag="average").wait()
        return means

    # Checkpoints --------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """What a checkpoint holds of it: a `Piece` of what is split over the ranks. Takes no other rank."""
        if self.is_applied:
            raise RuntimeError(
                "un.save inside average.applied() would save the average as the model: save outside the block, the "
                "checkpoint holds both"
            )
        self.settle()
        if self.is_kept:
            values = self._name_all(self._values.collect(self.held) if self.updates else self._values.collect_values())
        else:
            values = self._evaluate_locally()
        return {**self.settings._asdict(), "steps": self.steps, "updates": self.updates, "values": values}

    def _name_all(self, values: dict[str, Any]) -> dict[str, Any]:
        """A tensor that has several names in the model has one average under all of them."""
        model = unwrap(self.replica.model)
        first = {param: name for name, param in reversed(list(model.named_parameters(remove_duplicate=False)))}
        every = {name: first[param] for name, param in model.named_parameters(remove_duplicate=False)}
        return {name: values[known] for name, known in every.items() if known in values}

    @torch.no_grad()
    def _evaluate_locally(self) -> dict[str, Any]:
        """The point that a schedule-free optimizer evaluates at, of what this rank has."""
        saved = [source.read().clone() for source in self._sources]
        self._call_optimizers("eval")
        shown = [source.read().clone() for source in self._sources]
        self._saved = saved
        self._write_saved()
        self.replica.forget_writes()
        keys = (source.key for source in self._sources)
        return self._name_all(self._values.collect(dict(zip(keys, shown, strict=True))))

    @torch.no_grad()
    def load(self, state: Mapping[str, Any] | None) -> None:
        """Take a checkpoint's average, of any layout; None: it has none, and the average begins anew."""
        self._due = False
        self.steps = self.updates = 0
        if state is None or not self.is_kept or state["decay"] == "schedule_free":
            return
        self.steps, self.updates = state["steps"], state["updates"]
        self._values.fill(self.held, state["values"])
        self._note_place()

    # Other places -------------------------------------------------------------------------------------------------

    @property
    def held(self) -> dict[Any, Tensor]:
        """The averages that this rank has, by the key of their source."""
        return {source.key: mine for source, mine in zip(self._sources, self._averages, strict=True)}

    @property
    def is_lifted(self) -> bool:
        """Whether it is to be placed anew."""
        return self._whole is not None

    def leave(self, change: Change | None = None) -> None:
        """The method is about to keep its values elsewhere: in another world (`change`), or under another method."""
        if self.is_applied:
            warn_user(
                "the world was formed again inside average.applied(): the rest of the block evaluates the "
                "current weights, not their average"
            )
            with torch.no_grad():
                self._write_saved()
                self._end_applied()
        if change is None or not self._values.is_common:
            self.settle()

    def end_parts(self) -> None:
        """All go on from this rank in another world; steps that lost ranks had begun are ended."""
        self._due = False
        if torn := self._values.end_parts(self) if self.is_kept else []:
            warn_user(
                f"local rank(s) {', '.join(map(str, torn))} were lost while they moved the average of the weights: "
                "some elements of their part have this step in it and some have not"
            )

    def lift(self, whole: dict[str, Tensor] | None = None, *, is_agreed: bool = False) -> None:
        """The method keeps its parts no more: all averages, by name (None: as it gives them). `is_agreed`: every rank
        has the same."""
        if whole is None:
            whole = {name: x.clone() for name, x in self._values.collect(self.held).items()}
        self._whole, self._is_agreed = whole, is_agreed

    def end(self) -> None:
        """The replica is closed, and the model an ordinary one."""
        if self._whole is None and any(source.parts is not None for source in self._sources):
            self._is_gone = True  # no rank has all of it
        else:
            self.place()

    def follow(self, change: Change) -> None:
        """In a new world: have what the source has; if ranks have models of their own, the mean of those who stayed."""
        world, source = change.world, change.source
        self.steps, self.updates = world.broadcast_object([self.steps, self.updates], source)
        whole = self._take_whole()
        tensors = [whole[name] for name in sorted(whole)]
        if world.size > 1 and not self._is_agreed and tensors:
            if getattr(self.replica, "own_models", False) and len(change.stayed) > 1:
                torch._foreach_mul_(tensors, 1 / len(change.stayed) if change.keeps else 0.0)
                world.all_reduce(tensors, "sum", tag="average").wait()
            else:
                world.broadcast(tensors, source, tag="average").wait()

    def _take_whole(self) -> dict[str, Tensor]:
        if self._whole is None:
            self._whole = {s.key: x for s, x in zip(self._sources, self._averages, strict=True) if s.parts is None}
        return self._whole

    @torch.no_grad()
    def place(self) -> None:
        """Keep the averages where the method keeps its values now; the first time, from these values."""
        replica = self.replica
        self._values = AveragedValues(replica) if replica.is_closed else replica.averaged_values
        before = self._take_whole()
        self._sources = self._values.listed = self._values.sources()
        self._averages = [self._make_room(source, before) for source in self._sources] if self.is_kept else []
        if before and self.is_kept:
            self._values.fill(self.held, before)
        self._whole, self._is_agreed, self._due = None, False, False
        self._note_place()

    def _note_place(self) -> None:
        """All updates so far are in what is here."""
        for ended in (False, True):
            self._values.note(self.updates, ended=ended)

    @staticmethod
    def _make_room(source: Source, before: Mapping[str, Tensor]) -> Tensor:
        values = source.follow()
        dtype, mine = find_wide_dtype(values.dtype), before.get(source.key) if source.parts is None else None
        if mine is not None and mine.dtype == dtype and mine.device == values.device:
            return mine
        if source.make is None:
            return values.to(dtype, copy=True)
        return source.make(values.numel(), dtype).copy_(values)

    def move(self, replica: Replica) -> None:
        """Go on under another method, which has the same model."""
        self.replica.weight_average, self.replica = None, replica
        replica.weight_average = self
        self.place()

    def agree(self) -> None:
        """Where ranks have models of their own, and are about to have one: so with their averages."""
        for mine, mean in zip(self._averages, self._agree() if self.is_kept else [], strict=True):
            if mean is not mine:
                mine.copy_(mean)
