"""Decentralised averaging: ranks mix their models with a few neighbours', while they compute.

BAGUA (Gan et al. 2021, arXiv:2107.01499); D-PSGD (Lian et al. 2017, arXiv:1705.09056); compressed differences (Tang
et al. 2018, arXiv:1803.06443); the exponential graph (Ying et al. 2021, arXiv:2110.13363).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from unisono.methods.checks import AtLeast, Note
from unisono.methods.exchange.windows import Window
from unisono.methods.facts import Convergence, Example, Facts
from unisono.methods.kernels.quantise import bytes_nbytes, decode_bytes, encode_bytes
from unisono.methods.strategies._graphs import ExchangedParameters, Graph, Lines, Neighbours, Received, neighbours, swap
from unisono.methods.strategy import Accumulate, Change, Pattern, PeriodicReplica, Replica, Strategy
from unisono.methods.strategy.program_writes import digest
from unisono.world import World

_BLOCK = 2048  # numbers that share a least and a greatest

FACTS = Facts(
    [Example("gossip"), Example("gossip(bits=8)", rounds_mean=True), Example("gossip(exponential)")],
    refuses={
        "accumulate=0": "accumulate",
        "every=0": "every",
        "bits=4": "bits",
        "graph=star": "graph",
        "'all', bits=8": "ring",
    },
    own_gradients=True,
    convergence=Convergence("other", "each worker has a model of its own, mixed with its neighbours' only"),
)


@dataclass(frozen=True)
class gossip(Strategy):
    """Mix models with neighbours, and step with the gradient of one's own: x_i <- sum_j W_ij x_j - lr g(x_i).

    The models of a window's beginning travel while it computes, and are mixed before the optimizer steps.

    graph: who hears whom. "ring": both neighbours, 1/3 each (of 2 ranks: 1/2). "shift_one" (even worlds): rank
        r < N/2 and rank ((t + r) mod N/2) + N/2, 1/2 each. "exponential": rank r hears r - 2^k, 1/2 each, k going
        round through 0 .. ceil(log2 N) - 1; after that many exchanges of a power of two of ranks all have heard all.
        "all": the mean of all ranks.
    bits: 8 sends on the ring what a model differs from its neighbours' copies of it, a byte a number: with w, l and
        r for my model and my neighbours' as they know them, z = x + (l + r)/3 - 5/3 w after the optimizer's step;
        w, l and r each change by Q(own z, left's, right's), and x = w. None sends models as they are.
    every: windows between two exchanges.
    overlap: exchange while the next window computes, or stand still for it. The result is the same.
    accumulate: backward passes a window.

    >>> from unisono.spec import build
    >>> build("gossip(shift_one, every=2)", kind="strategy").every
    2
    """

    graph: Graph = "ring"
    bits: Annotated[Literal[8] | None, Note("8: a byte a number; None: models as they are")] = None
    every: Annotated[int, AtLeast(1, "windows between two exchanges")] = 1
    overlap: bool = True
    accumulate: Accumulate = 1

    def check(self, model: nn.Module, optimizer: Optimizer, world: World) -> None:
        self.check_world(world)
        if self.bits is None:
            return
        if self.graph != "ring":
            raise ValueError(
                f"bits=8 keeps a copy of each neighbour's model, so neighbours must stay: use graph='ring', got "
                f"{self.graph!r}"
            )
        for name, param in model.named_parameters():
            if param.requires_grad and param.is_complex():
                raise ValueError(f"bits=8 sends real numbers, but {name!r} is {param.dtype}: use bits=None")

    def pattern(self) -> Pattern:
        return Pattern(
            "synchronous" if self.graph == "all" else "neighbours",
            every=self.every,
            overlap=self.overlap,
            in_every_window={"every": 1},
            even_world=self.graph == "shift_one",
            hears=partial(neighbours, self.graph),
            next_door=self.graph == "ring",
            bits=self.bits,
        )

    def make(self, model: nn.Module, optimizer: Optimizer, world: World) -> Replica:
        kind = GossipReplica if self.bits is None else LowPrecisionReplica
        return kind(model, optimizer, world, self)

    def check_world(self, world: World) -> None:
        """Refuse a world that the graph cannot pair."""
        if self.graph == "shift_one" and world.size > 1 and world.size % 2:
            raise ValueError(
                f"graph='shift_one' pairs ranks, so it needs an even world, got {world.size} ranks: use 'ring' or "
                "'exponential', or one rank more or fewer"
            )


class GossipReplica(PeriodicReplica):
    """Models as they are."""

    strategy: gossip
    own_models = own_optimizer = True

    def check_world(self, world: World) -> None:
        self.strategy.check_world(world)

    def start(self) -> None:
        self._exchanged = ExchangedParameters(self.model)
        self.lines = Lines(self._exchanged.params)
        self._channel = self.world.channel(inline=False) if self.world.size > 1 else None
        self._finish: Callable[[], Received] | None = None
        self._mine = self.lines.new()
        self._before: list[Tensor] | None = None  # my model when a step with a closure began
        self._theirs: list[list[Tensor]] = []
        self._unmixed = 0  # windows that have ended, whose exchange is not mixed in yet

    def stop(self, change: Change | None = None) -> None:
        self._finish = None
        if self._channel is not None:
            self._channel.close()
            self._channel = None

    def _due(self, window: int) -> bool:
        return self._channel is not None and window % self.strategy.every == 0

    def _who(self, window: int) -> Neighbours:
        return neighbours(self.strategy.graph, window // self.strategy.every, self.world.rank, self.world.size)

    def _begin(self, window: int) -> None:
        """Let my model as it is now travel, and the neighbours' come."""
        if self._finish is not None or not self._due(window):
            return
        assert self._channel is not None
        self._exchanged.check()
        self.lines.fill(self._mine)
        if self.strategy.graph == "all":
            handle = self._channel.all_reduce(self._mine, "mean", tag="gossip")
            self._finish = lambda: [handle.wait()]
            return
        who = self._who(window)
        self._theirs += [self.lines.new() for _ in range(len(who.heard) - len(self._theirs))]
        self._finish = swap(self._channel, self._mine, who, self._theirs[: len(who.heard)], "gossip")

    def _mix(self, window: int) -> None:
        """Take the neighbours' models in; what the optimizer did since mine was sent (with a closure) stays."""
        if not self._due(window):
            return
        self._begin(window)
        assert self._finish is not None
        finish, self._finish = self._finish, None
        stepped = None
        if self._before is not None:
            stepped = self.lines.copy()
            torch._foreach_sub_(stepped, self._before)
            self.lines.put(self._before)
            self._before = None
        came = finish()
        params = [p.detach() for p in self.lines.params]
        if self.strategy.graph == "all":
            self.lines.put(came[0])
        else:
            who = self._who(window)
            torch._foreach_mul_(params, who.own)
            for lines in came:
                torch._foreach_add_(params, self.lines.views(lines), alpha=who.weight)
        if stepped is not None:
            torch._foreach_add_(params, self.lines.views(stepped))

    def _mix_all(self, later: int) -> None:
        """Mix what was exchanged for windows that have ended, but for the last `later`."""
        while self._unmixed > later:
            self._unmixed -= 1
            with torch.no_grad():
                self._mix(self.step - self._unmixed)

    def advance(self) -> None:
        super().advance()
        self._unmixed += 1

    def before_step(self) -> None:
        super().before_step()
        self._mix_all(0)
        comes = self.windows.in_closure and self.windows.window is not Window.ENDED
        if comes and self._before is None and self._due(self.step + 1):  # the window ends after the step: mix then
            with torch.no_grad():
                self._begin(self.step + 1)
                self._before = self.lines.copy()

    def meet(self) -> None:
        self._mix_all(self._unmet)

    def begin(self) -> None:
        """Not before: what the program writes after a step (a clamp, a loaded model) travels too."""
        if self.strategy.overlap:
            self._begin(self.met + 1)

    def load_shared(self, shared: dict[str, Any]) -> None:
        super().load_shared(shared)
        self._unmixed = 0
        if self._finish is not None:  # of the model that was there before
            self._finish()
            self._finish = None


class LowPrecisionReplica(PeriodicReplica):
    """Differences from what the neighbours know, a byte a number.

    My own copy and the neighbours' copies of it change by the same bytes, so they stay the same bit by bit. Only the
    own bytes are needed to go on: the neighbours' may come until the next exchange.
    """

    strategy: gossip
    own_models = own_optimizer = True

    def start(self) -> None:
        self._exchanged = ExchangedParameters(self.model)
        self._channel = self.world.channel(inline=False) if self.world.size > 1 else None
        self._finish: Callable[[], Received] | None = None
        self._loaded = 0  # a mark of the model that the program loaded, if the neighbours are still to compare it
        self.follows_writes = self.world.size > 1
        self._who = neighbours("ring", 0, self.world.rank, self.world.size)
        self._copies_of_mine()

    def _copies_of_mine(self) -> None:
        """All ranks have one model: so it is what everyone knows of the others."""
        self._wide = Lines(self._exchanged.params, wide=True)
        self.own = self._wide.copy()
        self.copies = [self._wide.copy() for _ in self._who.heard]

    def take_writes(self, names: Sequence[str], *, loaded: bool) -> None:
        """A model that is loaded is what all ranks know of each other from now on, which they check with the next
        exchange. Other writes are this rank's own, and pass through the bytes like its steps."""
        if loaded:
            self._hear()
            self._copies_of_mine()
            self._loaded = int(digest(self.own)[:15], 16)

    def stop(self, change: Change | None = None) -> None:
        self._finish = None
        if self._channel is not None:
            self._channel.close()
            self._channel = None

    def meet(self) -> None:
        if self._channel is None or self.met % self.strategy.every:
            return
        self._exchanged.check()
        self._hear()
        changes = self._wide.copy()  # x after the optimizer's step
        torch._foreach_add_(changes, self.own, alpha=self._who.own - 2.0)
        for copy in self.copies:
            torch._foreach_add_(changes, copy, alpha=self._who.weight)
        codes = []
        for own, change in zip(self.own, changes, strict=True):
            code = torch.empty(bytes_nbytes(change.numel(), _BLOCK), dtype=torch.uint8, device=change.device)
            encode_bytes(change, _BLOCK, code)
            decode_bytes(code, _BLOCK, own, add=True)
            codes.append(code)
        self._wide.put(self.own)
        mark, self._loaded = torch.tensor([self._loaded]), 0
        sent = [*codes, mark]
        into = [[torch.empty_like(x) for x in sent] for _ in self._who.heard]
        theirs = swap(self._channel, sent, self._who, into, "gossip")
        self._finish = lambda: self._compare(mark, theirs())
        if not self.strategy.overlap:
            self._hear()

    def _compare(self, mark: Tensor, came: Received) -> Received:
        """The codes that came, if the neighbours loaded the same model, or none, as this rank."""
        other = [rank for rank, lines in zip(self._who.heard, came, strict=True) if not lines[-1].equal(mark)]
        if other:
            raise ValueError(
                f"model.load_state_dict() was called since the last exchange by one of ranks {self.world.rank} and "
                f"{other[0]} alone, or with other values: under gossip(bits=8) every rank loads the same model"
            )
        return [lines[:-1] for lines in came]

    def _hear(self) -> None:
        """Bring my copies of the neighbours up to date."""
        if self._finish is not None:
            finish, self._finish = self._finish, None
            for copy, codes in zip(self.copies, finish(), strict=True):
                for line, code in zip(copy, codes, strict=True):
                    decode_bytes(code, _BLOCK, line, add=True)

    def local_state(self) -> dict[str, Any]:
        self._hear()
        return {"own": self.own, "copies": self.copies}

    def load_local(self, shared: dict[str, Any], locals_: Sequence[dict[str, Any]], *, same_world: bool) -> None:
        self._hear()
        self._copies_of_mine()  # in another world all ranks have the mean of those that saved
        if same_world:
            [local] = locals_
            if "own" not in local:
                raise ValueError(
                    "the checkpoint is of gossip without bits=8, whose ranks know nothing of each other's models: load "
                    f"it as it was saved, then call replica.switch({'gossip(bits=8)'!r})"
                )
            torch._foreach_copy_(self.own, local["own"])
            for copy, saved in zip(self.copies, local["copies"], strict=True):
                torch._foreach_copy_(copy, saved)
