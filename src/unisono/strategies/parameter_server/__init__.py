"""Parameter servers: workers push gradients to servers that hold the parameters, and pull what these have become.

Li et al., "Scaling Distributed Machine Learning with the Parameter Server" (2014); bounded staleness: Ho et al.,
"More Effective Distributed ML via a Stale Synchronous Parallel Parameter Server" (2013).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import LBFGS, Optimizer

from unisono import packing
from unisono.batch_norm import move_batch_norm
from unisono.reducer import Reducer
from unisono.strategies._periodic import PeriodicReplica
from unisono.strategies.parameter_server.placement import Party, arrange, parted, when_forgotten
from unisono.strategies.parameter_server.protocol import Coder, Local, Remote
from unisono.strategies.parameter_server.server import Grads, Layout, Server, Settings, options_of
from unisono.strategy import Replica, Strategy, share
from unisono.world import World


@dataclass(frozen=True)
class parameter_server(Strategy):
    """Workers push gradients to `servers` that hold the parameters and run the optimizer, and pull the result.

    staleness: 0: one step with the mean of all workers' gradients, as all-reduce takes it. s > 0: each push is a
        step at lr/N as it comes, and a worker waits where it is more than s windows ahead of the slowest. None:
        nobody waits.
    delay: a push is applied when so many pushes of others have come after it, and its worker waits until then.
    place: servers are threads "beside" the first ranks' programs, or the last ranks on their "own": there
        `un.parallel` serves until all workers are done and ends the program; the world is then that of the workers.
    reducer: one with a codec (qsgd, nuqsgd, bytegrad, fp16, bf16) compresses the pushes.
    feedback: what the codec did not get through is added to the next push; for codecs that round one way.
    accumulate: backward passes a window; gradients add up locally and are pushed when the optimizer steps.
    """

    servers: int = 1
    staleness: int | None = 0
    delay: int = 0
    place: Literal["beside", "own"] = "beside"
    reducer: Reducer | None = None
    feedback: bool = False
    accumulate: int = 1

    def bind(self, model: nn.Module, optimizer: Optimizer, world: World) -> Replica:
        self._check_numbers(world)
        if self.place not in ("beside", "own"):
            raise ValueError(f"place must be 'beside' or 'own', got {self.place!r}")
        if type(self.feedback) is not bool:
            raise TypeError(f"feedback must be True or False, got {self.feedback!r}")
        if self.reducer is not None and not isinstance(self.reducer, Reducer):
            raise TypeError(f"reducer must be a Reducer such as qsgd(), got {self.reducer!r}")
        if self.reducer is not None and self.reducer.codec is None:
            raise ValueError(
                f"{self.reducer.spec or 'this reducer'} has no codec: it needs all ranks at once, and a push is "
                "between two. Use qsgd, nuqsgd, bytegrad, fp16 or bf16; feedback=True adds error feedback"
            )
        if self.feedback and self.reducer is None:
            raise ValueError("feedback keeps what a reducer's codec did not get through: give a reducer, got None")
        _check_model(model, optimizer, self)
        return ServedReplica(model, optimizer, world, self)

    def _check_numbers(self, world: World) -> None:
        own = self.place == "own"
        most = world.size - 1 if own else world.size
        workers = world.size - (self.servers if own and type(self.servers) is int else 0)
        for name, low, high, meaning in (
            ("servers", 1, most, f"ranks that serve, in a world of {world.size}" + (" with a worker" if own else "")),
            ("staleness", 0, None, "windows that a worker may be ahead of the slowest (None: any)"),
            ("delay", 0, max(0, workers - 1), f"pushes of others that a worker waits for, of {workers} workers"),
            ("accumulate", 1, None, "backward passes a window"),
        ):
            value = getattr(self, name)
            if name == "staleness" and value is None:
                continue
            if type(value) is not int or value < low or (high is not None and value > high):
                bounds = f"at least {low}" if high is None else f"{low} to {high}"
                raise ValueError(f"{name} counts {meaning}: expected a whole number, {bounds}; got {value!r}")
        if self.delay and self.staleness == 0:
            raise ValueError(f"delay={self.delay} needs staleness=None or above 0: with 0 all pushes are one step")


def _check_model(model: nn.Module, optimizer: Optimizer, strategy: parameter_server) -> None:
    held = [p for group in optimizer.param_groups for p in group["params"]]
    if isinstance(optimizer, LBFGS):
        raise TypeError("a server takes one gradient a step, but LBFGS asks for several: use another optimizer")
    if strategy.servers > len(held):
        raise ValueError(f"servers={strategy.servers} for {len(held)} parameter tensors: expected at most one for each")
    if strategy.reducer is not None and any(p.is_complex() for p in held):
        raise ValueError(
            f"{strategy.reducer.spec or 'the reducer'} compresses real numbers, the model has complex ones"
        )


class ServedReplica(PeriodicReplica):
    """A worker's copy of the model. Its optimizer steps nothing: the servers' optimizers do."""

    strategy: parameter_server

    def __init__(self, model: nn.Module, optimizer: Optimizer, world: World, strategy: parameter_server) -> None:
        self.strategy = strategy
        self._start(model, optimizer, world, own=strategy.place == "own")  # servers on their own end here
        super().__init__(model, optimizer, world, strategy, accumulate=strategy.accumulate)
        self._hooks.append(optimizer.register_state_dict_pre_hook(lambda _: self._fetch()))
        self._stashed: list[tuple[Parameter, Tensor | None]] = []
        self._pushed = False  # this window's gradients are on their way
        self._home = True  # the optimizer's states are here as well
        self._told: Settings | None = None  # the options that the servers know of
        self._ahead: Counter[int] = Counter()
        self._missed: Counter[int] = Counter()
        self._clocks: list[int] = []

    def _start(self, model: nn.Module, optimizer: Optimizer, world: World, *, own: bool) -> None:
        """Make ways to the servers, and those servers that are here."""
        strategy, n, me = self.strategy, world.size, world.rank
        count = min(strategy.servers, n)
        self._parts: list[list[Parameter]] = []
        self._party: Party | None = None
        if n == 1 and strategy.reducer is None:  # the optimizer does it all
            return
        self._parts = parted([p for group in optimizer.param_groups for p in group["params"]], count)
        workers = range(n - count if own else n)
        self._party = arrange(
            world,
            self._parts,
            range(n - count, n) if own else range(count),
            workers,
            server=partial(_server, optimizer, workers, strategy),
            coder=partial(_coder, strategy),
        )
        if own:
            world.narrow(workers)
        if me not in workers:
            self._party.finish()
            raise SystemExit(0)
        if own:
            move_batch_norm(model, world)
        when_forgotten(self, self._party)

    @property
    def _ways(self) -> Sequence[Local | Remote]:
        return self._party.ways if self._party is not None else ()

    # Training ---------------------------------------------------------------------------------------------------

    def sync(self) -> None:
        """End the window; what it gave is pushed when the optimizer steps."""
        self._counter.before_step()

    def before_step(self) -> None:
        """Push the gradients, pull the parameters, and leave the optimizer nothing to do."""
        self._counter.before_step()
        while self._ended > 1:  # a window before this one was skipped
            self._ended -= 1
            self.meet()
        if self._party is None:
            return
        held = [p for group in self.optimizer.param_groups for p in group["params"]]
        grads = {p: p.grad for p in held}
        if any(p not in grads for part in self._parts for p in part) or len(held) != sum(map(len, self._parts)):
            raise ValueError("the optimizer's parameters have changed since un.parallel: make it anew with all of them")
        scale = self._unscale()
        self._stashed = list(grads.items())
        if scale is not None:
            dense = {p: None if g is None else _plain_grad(g, scale) for p, g in grads.items()}
            self._exchange([[dense[p] for p in part] for part in self._parts])
        else:
            self._exchange([None] * len(self._parts))
        for p in held:
            p.grad = None
        self._pushed = True

    def _unscale(self) -> float | None:
        """What to multiply gradients with; None: AMP found an overflow. Fused optimizers leave both to the step."""
        found, scale = (getattr(self.optimizer, name, None) for name in ("found_inf", "grad_scale"))
        if isinstance(found, Tensor) and bool(found.item()):
            return None
        return 1.0 / float(scale.item()) if isinstance(scale, Tensor) else 1.0

    def after_step(self) -> None:
        super().after_step()
        for param, grad in self._stashed:  # for those who look at them after the step
            param.grad = grad
        self._stashed, self._pushed = [], False

    def meet(self) -> None:
        """A window whose step was skipped is still a window of mine."""
        if not self._pushed and self._party is not None:
            self._exchange([None] * len(self._parts))
        self._pushed = False

    @torch.no_grad()
    def _exchange(self, grads: Sequence[Grads | None]) -> None:
        if self._home:
            self.optimizer.state.clear()  # the servers go on with it
            self._home = False
        options = options_of(self.optimizer)
        settings, self._told = None if options == self._told else options, options
        rates = {p: group.get("lr", 0.0) for group in self.optimizer.param_groups for p in group["params"]}
        for way, part, given in zip(self._ways, self._parts, grads, strict=True):
            code = None
            if way.coder is not None and given is not None:
                code = way.coder.encode(given, self.step, [float(rates[p]) for p in part])
            way.push(given, settings, code)
        answers = [way.pull() for way in self._ways]
        ahead, missed = max(a.ahead for a in answers), max(a.missed for a in answers)
        self._ahead[ahead] += 1
        self._missed[missed] += 1
        self._clocks = answers[0].clocks
        self.world.ledger.event("staleness", ahead=ahead, missed=missed, clocks=self._clocks)

    def weight_changed(self, weight: float) -> None:
        """Gradients count by their share of the global batch (uneven ends; see `World.weight`)."""
        for hook in self._zeroing:
            hook.remove()
        params = [p for p in self.model.parameters() if p.requires_grad]
        if weight == 0.0:
            self._zeroing = [p.register_hook(torch.zeros_like) for p in params]
        else:
            self._zeroing = [p.register_hook(lambda g: g * weight) for p in params] if weight != 1.0 else []

    # Progress ---------------------------------------------------------------------------------------------------

    def staleness(self) -> dict[str, dict[int, int]]:
        """Histograms over my windows: how many "ahead" of the slowest worker each began, and how many pushes of
        others it "missed": applied between its pull and its push."""
        return {"ahead": dict(sorted(self._ahead.items())), "missed": dict(sorted(self._missed.items()))}

    def progress(self) -> list[int]:
        """The windows of every worker, as I heard last; -1 for one that has left."""
        return list(self._clocks)

    # State ------------------------------------------------------------------------------------------------------

    def consolidate(self) -> nn.Module:
        """The servers' parameters when every worker has come here, with the first worker's buffers."""
        self.meet_if_due()
        made = self.copied()
        self._settle(made, buffers=True)
        return made

    @torch.no_grad()
    def _settle(self, model: nn.Module, *, buffers: bool) -> None:
        """When all workers rest: the servers' parameters into `model`, the optimizer's states home."""
        if self._party is None:
            return
        mine = packing.to_bytes([b.detach() for b in model.buffers()]) if buffers else b""
        same = dict(zip(self.model.parameters(), model.parameters(), strict=True))
        for part, (values, theirs, states) in zip(self._parts, self._party.settle(mine), strict=True):
            for param, value in zip(part, values, strict=True):
                same[param].copy_(value)
            self._take(part, states)
            if buffers:
                for buffer, value in zip(model.buffers(), packing.from_bytes(theirs), strict=True):
                    buffer.copy_(value)
        self._home = True

    def _take(self, part: Sequence[Parameter], states: Sequence[dict[str, Any]]) -> None:
        for param, state in zip(part, states, strict=True):
            if state:
                self.optimizer.state[param] = {k: _beside(v, param) for k, v in state.items()}

    @torch.no_grad()
    def _fetch(self, *, params: bool = False) -> None:
        """Bring the optimizer's states home, as they are now, and maybe the parameters."""
        if self._home or self._party is None:
            return
        for way, part in zip(self._ways, self._parts, strict=True):
            values, states = way.fetch()
            for param, value in zip(part, values if params else (), strict=params):
                param.copy_(value)
            self._take(part, states)
        self._home = True

    def state_dict(self) -> dict[str, Any]:
        """Every rank calls it: model and optimizer then hold what the servers do, for any strategy to go on with."""
        state = super().state_dict()
        self._settle(self.model, buffers=False)
        named = {p: name for name, p in self.model.named_parameters()}
        state["local"] = {
            "residuals": {
                named[p]: piece.clone()
                for way, part in zip(self._ways, self._parts, strict=True)
                if way.coder is not None and way.coder.residual is not None
                for p, piece in zip(part, way.coder.residual.split(way.coder.layout.counts), strict=True)
            }
        }
        return state

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any], *, same_world: bool = True) -> None:
        """Model and optimizer are loaded: the first worker brings both to the servers."""
        super().load_state_dict(state, same_world=same_world)
        locals_ = [state["local"]] if same_world else state["locals"]
        named = {p: name for name, p in self.model.named_parameters()}
        for way, part in zip(self._ways, self._parts, strict=True):
            if self.world.rank == 0:
                way.put(part, [dict(self.optimizer.state.get(p, {})) for p in part])
            if way.coder is not None and way.coder.residual is not None:
                for p, piece in zip(part, way.coder.residual.split(way.coder.layout.counts), strict=True):
                    found = [own["residuals"][named[p]] for own in locals_ if named[p] in own.get("residuals", {})]
                    piece.copy_(torch.stack(found).double().sum(0) / len(locals_)) if found else piece.zero_()
        self._home, self._told = True, None

    def rebind(self, world: World, *, source: int = 0) -> str:
        packed = None
        if world.rank == source:
            self._home = False
            self._fetch(params=True)
            packed = {"optimizer": self.optimizer.state_dict(), "step": self.step, "steps": world.ledger.step_count}
        packed = world.broadcast_object(packed, source)
        share(self.model, world, source)
        if world.rank != source:
            self.optimizer.load_state_dict(packed["optimizer"])
            self.step = packed["step"]
            world.ledger.resume(packed["steps"])
        if self._party is not None:
            self._party.abandon()
        self.move_to(world)
        self._home, self._told = True, None
        self._start(self.model, self.optimizer, world, own=False)
        move_batch_norm(self.model, world)
        return (
            f"model, optimizer and step {self.step} from rank {source} of {world.size}, on {len(self._parts) or 1} "
            "server(s) beside the first ranks; pushes that were not applied are dropped"
        )

    def close(self) -> None:
        """The optimizer's states come home; a rank with a server stays until all workers have closed theirs."""
        super().close()
        if self._party is not None:
            try:
                self._fetch()
            finally:
                party, self._party = self._party, None
                party.finish()


def _server(
    optimizer: Optimizer, workers: Sequence[int], strategy: parameter_server, part: Sequence[Parameter]
) -> Server:
    return Server(part, optimizer, workers, staleness=strategy.staleness, delay=strategy.delay)


def _coder(strategy: parameter_server, part: Sequence[Parameter], worker: int, server: int) -> Coder | None:
    if strategy.reducer is None or strategy.reducer.codec is None:
        return None
    return Coder(strategy.reducer.codec, Layout(part), feedback=strategy.feedback, seed=(worker, server))


def _plain_grad(grad: Tensor, scale: float) -> Tensor:
    dense = grad.to_dense() if grad.is_sparse else grad
    return dense if scale == 1.0 else dense * scale


def _beside(value: Any, param: Tensor) -> Any:
    """A state from a server, where the optimizer would have made it: counts stay on the host."""
    return value.to(param.device) if isinstance(value, Tensor) and value.dim() else value
