"""A reducer at work on a model's buckets: several under way at once, and its states by parameter.

A reducer keeps a state for each bucket, but buckets are laid out anew when parameters are frozen or when a run
goes on with other settings. So states are saved, moved and given back by the parameter's name.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState
from torch.nn import Parameter
from torch.optim import Optimizer

from unisono.launchers.runtime.machine import usable_cores
from unisono.methods.buckets import Bucket
from unisono.methods.kernels.select import restore
from unisono.methods.reducer import Reducer, State, dense_bytes, find_overflow
from unisono.world import World
from unisono.world.ledger import Ledger

Entries = dict[str, dict[str, Any]]  # by parameter: by the path of a value in the state
Unit = Literal["gradients", "momenta", "parameters"]
_UNSENT = ("residual", "velocity")  # what is still to be sent: scaled with the size of the world


class Residual(NamedTuple):
    """What a rank has kept back to send later, by parameter, and in which unit: of gradients, of an optimizer's
    momenta, or of differences between parameters. A method that takes it over in another unit must convert it."""

    unit: Unit
    spec: str  # of the reducer that kept it
    shared: dict[str, Any]
    local: Entries
    scale: Callable[[], float]  # AMP's loss scale, which it is multiplied by

    @property
    def is_empty(self) -> bool:
        """Whether nothing was kept back."""
        return not any(_is_unsent(path) for entries in self.local.values() for path in entries)

    def convert(self, unit: Unit, named: Iterable[tuple[str, Parameter]], optimizer: Optimizer) -> Residual:
        """The same as gradients or as momenta of an Adam, which a gradient g moves by (1 - b1) g."""
        assert "parameters" not in (unit, self.unit), "a difference of parameters is neither"
        if unit == self.unit:
            return self
        betas = {p: group.get("betas", [0.0])[0] for group in optimizer.param_groups for p in group["params"]}
        moved = {name: 1.0 - betas.get(param, 0.0) for name, param in named}
        factors = moved if unit == "momenta" else {name: 1.0 / factor for name, factor in moved.items()}
        return self.times(factors, unit)

    def times(self, factors: Mapping[str, float | Tensor], unit: Unit) -> Residual:
        """The same in another unit: each parameter's times a number, or number by number."""
        local = {
            name: {path: x * factors.get(name, 1.0) if _is_unsent(path) else x for path, x in entries.items()}
            for name, entries in self.local.items()
        }
        return self._replace(unit=unit, local=local)

    def only(self, names: Sequence[str]) -> Residual:
        """That of some parameters."""
        each = {name: entries for name, entries in self.shared["each"].items() if name in names}
        local = {name: entries for name, entries in self.local.items() if name in names}
        return self._replace(shared={**self.shared, "each": each}, local=local)

    def total(self, name: str) -> Tensor | None:
        """All that was kept back of a parameter; None where that is nothing."""
        entries = {**self.shared["each"].get(name, {}), **self.local.get(name, {})}
        found = [entries[path] * _count_ranks(path, entries) for path in _residuals(entries)]
        return torch.stack(found).sum(0) if found else None


def read_loss_scale(scaler: torch.amp.GradScaler, optimizers: Sequence[Optimizer], *, strict: bool) -> float:
    """What gradients are multiplied by: nothing any more if the scaler has unscaled them, as it has when a window
    ends in the step (the short last one of an epoch, say). `strict`: all must be multiplied alike."""
    states = getattr(scaler, "_per_optimizer_states", {})  # one that is disabled has none
    unscaled = [id(o) in states and states[id(o)]["stage"] is OptState.UNSCALED for o in optimizers]
    if strict and any(unscaled) and not all(unscaled):
        raise ValueError(
            f"a window of {len(unscaled)} optimizers ends after the GradScaler has unscaled the gradients of some of "
            "them: call replica.sync() before the first scaler.unscale_() or scaler.step()"
        )
    return 1.0 if all(unscaled) else scaler.get_scale()


class OwnPart(Protocol):
    """State that belongs to this rank's place in its world: another world, or another method, drops it."""

    def state_dict(self) -> dict[str, Any]:
        """It, for a checkpoint."""

    def load_state_dict(self, state: dict[str, Any], /) -> None:
        """Take it from a checkpoint of a world of this size."""

    def describe_loss(self) -> str:
        """What is lost if it is dropped; "": nothing."""


def _key(path: str) -> str:
    return path.rpartition("/")[2].lstrip("*")


def _is_unsent(path: str) -> bool:
    return path.startswith("*") and _key(path) in _UNSENT


class LearningRates:
    """What an optimizer's groups are stepped with: by group, and by parameter (NaN where it is not known)."""

    def __init__(self, optimizer: Optimizer, owners: Mapping[Tensor, Tensor] | None = None) -> None:
        """`owners`: the parameters that other tensors belong to, whose rates may be asked for too."""
        self._optimizer, self._owners = optimizer, {} if owners is None else owners
        self._groups: dict[Tensor, int] = {}

    def by_group(self) -> list[float]:
        """Each group's rate, now."""
        return [_rate(group) for group in self._optimizer.param_groups]

    def of(self, param: Tensor) -> float:
        """A parameter's rate, now."""
        param = self._owners.get(param, param)
        if param not in self._groups:
            return math.nan
        return _rate(self._optimizer.param_groups[self._groups[param]])

    def find_groups(self) -> dict[Tensor, int]:
        """Find out anew which group each parameter belongs to."""
        groups = enumerate(self._optimizer.param_groups)
        self._groups = {param: i for i, group in groups for param in group["params"]}
        return self._groups


def _rate(group: dict[str, Any]) -> float:
    lr = group.get("lr", math.nan)
    if isinstance(lr, Tensor) and lr.is_cuda:
        return math.nan  # reading it from the device would hold the program up
    return float(lr)


class _Reduced(NamedTuple):
    """A bucket of the window under way, and the lines of what it has still to send: each with what it was before."""

    bucket: Bucket
    overflow: Tensor | None  # None: not looked for
    lines: list[tuple[Tensor, Tensor]]

    def find_overflow(self) -> Tensor:
        """One number: NaN if the mean is not finite."""
        return find_overflow(self.bucket.tensors) if self.overflow is None else self.overflow


class Reduction:
    """A reducer, the states it keeps, and the buckets it is working on.

    Buckets are begun in one order on every rank. Each time one is begun, those under way go on by one stage:
    so bucket i is compressed while bucket i-1 travels, and the collectives have one order on every rank too.
    Where collectives run in the thread that calls them, each bucket is finished before the next.
    """

    def __init__(
        self,
        reducer: Reducer,
        optimizer: Optimizer,
        after_last_bucket: Callable[[World], None],
        unit: Unit,
        owners: Mapping[Tensor, Tensor] | None = None,
    ) -> None:
        """`owners`: the parameters that the tensors of buckets belong to, where these are parts of them."""
        self.reducer, self.after_last_bucket, self.unit = reducer, after_last_bucket, unit
        self._learning_rates = LearningRates(optimizer, owners)
        self._buckets: Sequence[Bucket] = []
        self._states: dict[Bucket, State] = {}
        self._under_way: list[Iterator[None]] = []
        self._window: list[_Reduced] = []  # what was reduced since the last window ended
        self._leftovers: dict[Bucket, Entries] = {}  # what another reducer kept, and the window under way sends
        self._parked: Entries = {}  # values of parameters that are in no bucket, or whose bucket has no state yet
        self._decayed = False
        self._rates: dict[str, float] = {}
        self._groups: dict[Bucket, list[int]] = {}  # of each parameter of a bucket
        self._compared: list[float] = []  # the groups' rates when `_rates` was filled
        self.scale: Callable[[], float] = lambda: 1.0  # AMP's loss scale: gradients come multiplied by it
        self._scale: float | None = None

    @property
    def keeps(self) -> bool:
        """Whether what was not sent is kept, and sent later."""
        return self.reducer.memory

    @property
    def carries(self) -> bool:
        """Whether the reducer takes the mean of a bucket's lines as they are."""
        return self.reducer.apart

    # Reducing ---------------------------------------------------------------------------------------------------

    def begin(self, bucket: Bucket, world: World) -> None:
        """Start on a bucket, and take those under way a stage further."""
        if self._scale is None:  # once a window: on a GPU, asking for it holds the program up
            self._scale = self.scale()
        scale = self._scale
        rates = [*self._learning_rates.by_group(), math.nan]  # the last: of no group
        bucket.lr = [rates[group] / scale for group in self._groups[bucket]]
        bucket.decayed, bucket.scale = self._decayed, scale
        if not self.reducer.exact:
            bucket.zero_gaps()
        work, older = self._work(bucket, world), self._under_way
        if not self.reducer.exact:
            work = _time_stages(work, world.ledger)
        if world.inline:  # nothing would travel meanwhile: finish it while it is in the cache
            for _ in work:
                pass
            return
        self._under_way = []  # where one fails, nothing is left of the others
        begun = [work] if _advance(work) else []
        self._under_way = [*filter(_advance, older), *begun]

    def drain(self) -> None:
        """Finish what is under way: every bucket then holds its mean."""
        self._scale = None
        while self._under_way:
            works, self._under_way = self._under_way, []
            self._under_way = [*filter(_advance, works)]

    def _work(self, bucket: Bucket, world: World) -> Iterator[None]:
        if bucket not in self._states:
            self._states[bucket] = self._fresh(bucket)
        reducer, state = self.reducer, self._states[bucket]
        before = unsent_lines(state)
        if reducer.stages is not None:
            reduced, state = yield from reducer.stages(bucket, state, world)
        else:
            reduced, state = reducer.reduce(bucket, state, world)
        self._states[bucket] = state
        after = unsent_lines(state)
        lines = [(old, after[path]) for path, old in before.items() if after[path] is not old]
        self._window.append(_Reduced(bucket, reduced.find_overflow() if lines else reduced.overflow, lines))
        pairs = [
            (view, mean)
            for view, mean in zip(bucket.tensors, reduced.mean, strict=True)
            if view is not mean and (view.data_ptr() != mean.data_ptr() or view.stride() != mean.stride())
        ]
        if pairs:
            torch._foreach_copy_([view for view, _ in pairs], [mean for _, mean in pairs])

    def find_overflow(self, others: Sequence[Tensor] = ()) -> Tensor:
        """One number: NaN if a number of the window's means, or of `others`, is not finite."""
        found = [reduced.find_overflow() for reduced in self._window]
        if others or not found:
            found.append(find_overflow(others))
        if len(found) == 1:
            return found[0]
        return torch.stack([x.to(found[0].device) for x in found]).sum(dtype=torch.float32)

    def end_window(self, others: Sequence[Tensor] = (), *, void: bool = False) -> None:
        """Every bucket of the window holds its mean. If a number of it is not finite, the program skips the step, and
        what was sent goes nowhere: then what each rank has still to send becomes what it was before. All ranks have
        the same means, and so decide alike. (Differences of parameters are applied bucket by bucket, whatever they
        are: there each bucket counts for itself.)

        others: means that go with those of the buckets. void: the window counts for nothing, whatever it holds.
        """
        lines = any(reduced.lines for reduced in self._window)
        overflow = self.find_overflow(others) if lines or self._leftovers else None
        if void and overflow is not None:
            overflow = torch.full_like(overflow, math.nan)
        if self._leftovers and overflow is not None and math.isnan(overflow.item()):
            for bucket, entries in self._leftovers.items():
                self._parked |= entries
                self._states.pop(bucket, None)
        for reduced in self._window:
            for old, new in reduced.lines:
                assert overflow is not None
                restore(reduced.find_overflow() if self.unit == "parameters" else overflow, old, new)
        self._window, self._leftovers = [], {}

    def set_buckets(self, buckets: Sequence[Bucket]) -> None:
        """The buckets are others from now on."""
        for bucket, state in self._states.items():
            self._parked |= _split_by_parameter(bucket, state)
        self._states, self._buckets = {}, buckets
        groups = self._learning_rates.find_groups()
        self._groups = {bucket: [groups.get(param, -1) for param in bucket.params] for bucket in buckets}
        self._compared = []

    def warn_if_more_than_dense(self, world: World) -> None:
        """Say so where the reducer would send more than the exact mean does."""
        if self.reducer.sends is None or world.size == 1 or world.rank != 0 or self.reducer.exact:
            return
        sends = sum(self.reducer.sends(bucket, world.size) for bucket in self._buckets)
        dense = sum(dense_bytes(bucket, world.size) for bucket in self._buckets)
        if sends >= dense:
            warnings.warn(
                f"{self.reducer.spec or 'this reducer'} sends {sends:,} bytes per rank and step in a world of "
                f"{world.size}; the exact mean (dense) sends {dense:,}: it costs accuracy and saves nothing here",
                stacklevel=6,
            )

    # Learning rates ---------------------------------------------------------------------------------------------

    def learning_rate_fell(self) -> bool:
        """Whether a learning rate fell since the last window; ranks agree on it after every window."""
        by_group = self._learning_rates.by_group()
        if by_group == self._compared:
            return False
        rates = [*by_group, math.nan]
        now = {name: rates[i] for b in self._buckets for name, i in zip(b.names, self._groups[b], strict=True)}
        self._compared = by_group
        fell = any(lr < self._rates.get(name, lr) for name, lr in now.items())
        self._rates = now
        return fell

    def set_decayed(self, decayed: bool) -> None:
        """What the ranks agreed on: some rank's learning rate fell."""
        self._decayed = decayed

    # State, by parameter ----------------------------------------------------------------------------------------

    def _fresh(self, bucket: Bucket) -> State:
        """A new state, with what is known of the bucket's parameters filled in."""
        state = self.reducer.init(bucket)
        known = [self._parked.pop(name, {}) for name in bucket.names]
        for path, holder, key in _walk(state):
            value = holder[key]
            if isinstance(value, Tensor):
                _check_line(value, bucket, path)
                for view, entries in zip(bucket.views(value), known, strict=True):
                    if path in entries:
                        view.copy_(entries.pop(path))
            elif isinstance(value, list):
                holder[key] = [e.pop(path, v) for v, e in zip(value, known, strict=True)]
            else:
                found = [e.pop(path) for e in known if path in e]
                holder[key] = max(found) if found and type(found[0]) is int else next(iter(found), value)
        if not _add_leftovers(known, bucket, state):
            before = dict(zip(bucket.names, map(dict, known), strict=True))
            if _send_leftovers(known, bucket):
                self._leftovers[bucket] = before
        _warn_of_leftovers(known, bucket, self.reducer)
        return state

    def _each(self) -> Entries:
        """Every parameter's values, those in use and those parked."""
        found = dict(self._parked)
        for bucket, state in self._states.items():
            found |= _split_by_parameter(bucket, state)
        return found

    def state_dict(self) -> dict[str, Any]:
        """ "shared" by all ranks, and "local" to this one; empty for a reducer that keeps nothing."""
        each = sorted(self._each().items())
        local = {name: {p: v for p, v in e.items() if p.startswith("*")} for name, e in each}
        shared = {name: {p: v for p, v in e.items() if not p.startswith("*")} for name, e in each}
        return {
            "shared": {
                "unit": self.unit,
                "each": {name: e for name, e in shared.items() if e},
                "decayed": self._decayed,
                "rates": dict(self._rates),
            },
            "local": {name: e for name, e in local.items() if e},
        }

    def load_state_dict(self, shared: dict[str, Any], locals_: Sequence[Entries]) -> None:
        """Take a saved state. With the parts of several ranks, every rank gets their mean: what was still to be
        sent, in the mean over the ranks, then stays the same."""
        self._states = {}
        self._decayed, self._rates, self._compared = shared["decayed"], dict(shared["rates"]), []
        own = locals_[0] if len(locals_) == 1 else _mean(locals_)
        self._parked = {}
        for name in dict.fromkeys([*shared["each"], *own]):
            entries = {**shared["each"].get(name, {}), **own.get(name, {})}
            self._parked[name] = {path: x.clone() if isinstance(x, Tensor) else x for path, x in entries.items()}

    def move(self, shared: dict[str, Any], *, keep: bool, factor: float) -> None:
        """Go on in another world with `shared` of the rank that all go on from. `keep`: I was one of the former
        ranks, so what I had still to send counts, times `factor` (new size / former size): in the mean over the
        ranks it then weighs what it did. A window that did not end counts for nothing."""
        self._under_way = []
        self.end_window(void=True)
        local = self.state_dict()["local"] if keep else {}
        for entries in local.values():
            for path, value in entries.items():
                if _is_unsent(path):
                    value.mul_(factor)
        each = {  # of as many ranks as when this was last reduced, perhaps, but of others
            name: {path: 0 if _key(path) == "size" else value for path, value in entries.items()}
            for name, entries in shared["each"].items()
        }
        self.load_state_dict({**shared, "each": each}, [local])

    def drop_unsent(self, names: Iterable[str]) -> None:
        """Send no more what was kept back of these parameters: they have been replaced."""
        kept = self.state_dict()
        for name in names:
            entries = kept["local"].get(name, {})
            kept["local"][name] = {path: value for path, value in entries.items() if not _is_unsent(path)}
        self.load_state_dict(kept["shared"], [kept["local"]])

    def unsent(self) -> Residual:
        """What this rank has kept back, with what all ranks know of it."""
        kept = self.state_dict()
        return Residual(self.unit, self.reducer.spec or "the reducer", kept["shared"], kept["local"], self.scale)

    def take_unsent(self, unsent: Residual) -> None:
        """Go on with what another method kept back, in this one's unit."""
        assert unsent.unit == self.unit, f"{unsent.unit} where {self.unit} are sent"
        self.load_state_dict(unsent.shared, [unsent.local])
        self.scale = unsent.scale

    @property
    def keeps_own(self) -> bool:
        """Whether this rank holds something that other ranks do not."""
        return any(path.startswith("*") for entries in self._each().values() for path in entries)


_ENDED = object()


def _advance(work: Iterator[None]) -> bool:
    """Take it a stage further; False at its end."""
    return next(work, _ENDED) is not _ENDED


def _time_stages(work: Iterator[None], ledger: Ledger) -> Iterator[None]:
    """The same, with each stage noted in the ledger."""
    while True:
        start = ledger.clock()
        goes_on = _advance(work)
        ledger.close_span("reducer", start, ledger.clock())
        if not goes_on:
            return
        yield


def _walk(state: State, prefix: str = "") -> Iterator[tuple[str, State, str]]:
    """Every value: its path, the dict that holds it, its key there. A rank's own begins with a star."""
    for key in sorted(state):
        value = state[key]
        if isinstance(value, dict):
            yield from _walk(value, f"{prefix}{key}/")
        else:
            yield ("*" if isinstance(value, Tensor) else "") + prefix + key, state, key


def unsent_lines(state: State) -> dict[str, Tensor]:
    """What is still to be sent, by its path."""
    return {path: holder[key] for path, holder, key in _walk(state) if _is_unsent(path)}


def _split_by_parameter(bucket: Bucket, state: State) -> Entries:
    """A bucket's state, by parameter; tensors as views in the parameters' shapes, a plain value with each."""
    each: Entries = {name: {} for name in bucket.names}
    for path, holder, key in _walk(state):
        value = holder[key]
        if isinstance(value, Tensor):
            values: Sequence[Any] = bucket.views(value)
        else:
            values = value if isinstance(value, list) else [value] * len(each)
        for name, one in zip(bucket.names, values, strict=True):
            each[name][path] = one
    return each


def _mean(parts: Sequence[Entries]) -> Entries:
    """The mean of every rank's own values, in float64."""
    names = dict.fromkeys(name for part in parts for name in part)
    means: Entries = {}
    for name in names:
        paths = dict.fromkeys(path for part in parts for path in part.get(name, {}))
        means[name] = {}
        for path in paths:
            found = [part[name][path] for part in parts if path in part.get(name, {})]
            total = torch.stack([x.double() for x in found]).sum(0) / len(parts)
            means[name][path] = total.to(found[0].dtype)
    return means


def _check_line(value: Tensor, bucket: Bucket, path: str) -> None:
    if value.shape != bucket.flat.shape:
        raise TypeError(
            f"a reducer's state[{path.lstrip('*')!r}] must be a line as long as bucket.flat "
            f"({tuple(bucket.flat.shape)}), got {tuple(value.shape)}: put tensors of other shapes into a list, "
            "one for each tensor of the bucket"
        )


def _add_leftovers(known: Sequence[dict[str, Any]], bucket: Bucket, state: State) -> bool:
    """What was still to be sent, kept elsewhere in another reducer's state: to the first place for such here. False
    where there is none."""
    places = [holder for path, holder, key in _walk(state) if path[0] == "*" and key == "residual"]
    if not places:
        return False
    rates = places[0].get("lr", list(bucket.lr))
    for i, (view, entries) in enumerate(zip(bucket.views(places[0]["residual"]), known, strict=True)):
        for path in _residuals(entries):
            if rates[i] is None:
                rates[i] = _rate_met(path, entries)
            factor = _weigh_leftover(path, entries, rates[i])
            view.add_(entries.pop(path), alpha=factor)
    return True


@torch.no_grad()
def _send_leftovers(known: Sequence[dict[str, Any]], bucket: Bucket) -> bool:
    """What was still to be sent, under a reducer that keeps nothing: it goes with the gradients that are about to be
    sent, at the rate that it was met with (see `rescale` in reducer.py). Whether there was any."""
    any_sent = False
    for view, rate, entries in zip(bucket.tensors, bucket.lr, known, strict=True):
        for path in _residuals(entries):
            factor = _weigh_leftover(path, entries, rate)
            view.add_(entries.pop(path), alpha=factor)
            any_sent = True
    return any_sent


def _residuals(entries: dict[str, Any]) -> list[str]:
    return [path for path in entries if path[0] == "*" and _key(path) == "residual"]


def _rate_met(path: str, entries: dict[str, Any]) -> float | None:
    rate: float | None = entries.get(path[1:].removesuffix("residual") + "lr")
    return rate


def _weigh_leftover(path: str, entries: dict[str, Any], rate: float | None) -> float:
    """How much what was kept at `path` counts, among what counts at this learning rate."""
    met = _rate_met(path, entries)
    factor = met / rate if met is not None and rate is not None and met > 0 and rate > 0 else 1.0
    return factor * _count_ranks(path, entries)


def _count_ranks(path: str, entries: dict[str, Any]) -> float:
    """What `hierarchical` keeps on the leaders of hosts is of a mean over these: it counts for so many ranks each."""
    outer, across, _ = path[1:].rpartition("across/")
    size, _, leaders = str(entries.get(f"{outer}ranks", "")).partition(": ") if across else ("", "", "")
    return int(size) / len(leaders.split()) if leaders else 1.0


def _warn_of_leftovers(known: Sequence[dict[str, Any]], bucket: Bucket, reducer: Reducer) -> None:
    for name, entries in zip(bucket.names, known, strict=True):
        lost = [path.lstrip("*") for path in entries if _key(path) in _UNSENT]
        if lost:
            warnings.warn(
                f"{reducer.spec or 'the reducer'} has no place for what another one kept of {name!r} and of others "
                f"({', '.join(lost)}): it is dropped",
                stacklevel=2,
            )
            return


def overlap_pays(world: World) -> bool:
    """Whether exchanging during backward gains time: not if the exchange is work for cores that are all busy."""
    one_host = len(set(world.hosts)) == 1
    busy = world.local_size * torch.get_num_threads() >= usable_cores()
    return not (one_host and busy) or world.has_nccl


def check_real(reducer: Reducer, named: Sequence[tuple[str, Parameter]]) -> None:
    """Refuse complex parameters under a reducer that compresses."""
    for name, param in named:
        if param.is_complex() and not reducer.exact:
            raise ValueError(
                f"{reducer.spec or 'the reducer'} compresses real numbers, but {name!r} is {param.dtype}: use the "
                "reducer 'dense', or keep real and imaginary parts as parameters of their own"
            )
