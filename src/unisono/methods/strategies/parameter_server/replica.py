"""The worker's side: its copy of the model, whose optimizer steps nothing, because the servers' optimizers do."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import Optimizer

from unisono import packing
from unisono.methods.strategies.parameter_server.placement import Connections, connect, split_parameters
from unisono.methods.strategies.parameter_server.protocol import Coder, LocalLink, RemoteLink
from unisono.methods.strategies.parameter_server.server import Grads, Server, Settings, Values, options_of
from unisono.methods.strategy import Change, ModelPart, PeriodicReplica
from unisono.training.batch_norm import move_batch_norm
from unisono.world import PeerLost, World
from unisono.world.operations import put_back

if TYPE_CHECKING:
    from unisono.methods.strategies.parameter_server import parameter_server


class ServedReplica(PeriodicReplica):
    """A worker's copy of the model. Its optimizer steps nothing: the servers' optimizers do."""

    strategy: parameter_server
    slow_ranks = "ignore"
    no_average = (
        "the servers step the model, and what a worker has of it may be some steps old. Use allreduce or zero, or "
        "average the checkpoints that un.save wrote"
    )

    def __init__(self, model: nn.Module, optimizer: Optimizer, world: World, strategy: parameter_server) -> None:
        self.strategy = strategy
        self._parts: list[list[Parameter]] = []
        self._connections: Connections | None = None
        self._connect(model, optimizer, world, own=strategy.place == "own")  # servers on their own end here
        self._connected = True
        self._stashed: list[tuple[Parameter, Tensor | None]] = []
        self._pushed = False  # this window's gradients are on their link
        self._at_home = True  # the optimizer's states are here as well
        self._known: Settings | None = None  # the options that the servers know of
        self._ahead: Counter[int] = Counter()
        self._missed: Counter[int] = Counter()
        self._clocks: list[int] = []
        if strategy.reducer is not None:  # its codec runs outside of an exchange
            self.not_measured = ("compression",)
        super().__init__(model, optimizer, world, strategy)
        self._hooks.append(optimizer.register_state_dict_pre_hook(lambda _: self._bring_states()))

    def start(self) -> None:
        """In a new world, servers are beside the first ranks."""
        if not self._connected:
            self._at_home, self._known = True, None
            self._connect(self.model, self.optimizer, self.world, own=False)
            self._connected = True

    def _connect(self, model: nn.Module, optimizer: Optimizer, world: World, *, own: bool) -> None:
        """Make links to the servers, and those servers that are here."""
        strategy, n, me = self.strategy, world.size, world.rank
        count = min(strategy.servers, n)
        self._parts, self._connections = [], None
        if n == 1 and strategy.reducer is None:  # the optimizer does it all
            return
        self._parts = split_parameters([p for group in optimizer.param_groups for p in group["params"]], count)
        workers = range(n - count if own else n)
        self._connections = connect(
            world,
            self._parts,
            range(n - count, n) if own else range(count),
            workers,
            server=lambda part: Server(part, optimizer, workers, staleness=strategy.staleness, delay=strategy.delay),
            coder=lambda part, worker, server: (
                None
                if strategy.reducer is None or strategy.reducer.codec is None
                else Coder(strategy.reducer.codec, part, feedback=strategy.feedback, seed=(worker, server))
            ),
        )
        if own:
            world.narrow(workers)
        if me not in workers:
            self._connections.finish()
            raise SystemExit(0)
        if own:
            move_batch_norm(model, world)
        self._connections.leave_without(self)

    @property
    def _links(self) -> Sequence[LocalLink | RemoteLink]:
        return self._connections.links if self._connections is not None else ()

    # Training ---------------------------------------------------------------------------------------------------

    def before_step(self) -> None:
        """Push the gradients, pull the parameters, and leave the optimizer nothing to do."""
        self.windows.before_step()
        while self._unmet > 1:  # a window before this one was skipped
            self.meet_once()
        if self._connections is None:
            return
        held = [p for group in self.optimizer.param_groups for p in group["params"]]
        grads = {p: p.grad for p in held}
        if any(p not in grads for part in self._parts for p in part) or len(held) != sum(map(len, self._parts)):
            raise ValueError(
                "the optimizer's parameters have changed since un.parallel: create it again with all of them"
            )
        scale = self._unscale()
        self._stashed = list(grads.items())
        if scale is not None:
            dense = {p: g.to_dense() if g is not None and g.is_sparse else g for p, g in grads.items()}
            if scale != 1.0:
                dense = {p: None if g is None else g * scale for p, g in dense.items()}
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
        if not self._pushed and self._connections is not None:
            self._exchange([None] * len(self._parts))
        self._pushed = False

    @torch.no_grad()
    def _exchange(self, grads: Sequence[Grads | None]) -> None:
        if self._at_home:
            self.optimizer.state.clear()  # the servers go on with it
            self._at_home = False
        written = self._find_written()
        options = options_of(self.optimizer)
        settings, self._known = None if options == self._known else options, options
        rates = {p: group.get("lr", 0.0) for group in self.optimizer.param_groups for p in group["params"]}
        for link, part, given, values in zip(self._links, self._parts, grads, written, strict=True):
            code = None
            if link.coder is not None and given is not None:
                code = link.coder.encode(given, self.step, [float(rates[p]) for p in part])
            link.push(given, settings, code, values)
        answers = [link.pull() for link in self._links]
        self.writes.note()
        ahead, missed = max(a.ahead for a in answers), max(a.missed for a in answers)
        self._ahead[ahead] += 1
        self._missed[missed] += 1
        self._clocks = answers[0].clocks
        self.world.ledger.event("staleness", ahead=ahead, missed=missed, clocks=self._clocks)

    def _find_written(self) -> list[Values]:
        """For each server, what the program wrote to its parameters since they were pulled. Not what it wrote and took
        back, to within rounding (SAM)."""
        found, names = set(self.writes.find(thorough=True)), {p: name for name, p in self.model.named_parameters()}
        return [
            [
                (i, names[p], p.detach().cpu())
                for i, (p, before) in enumerate(zip(part, link.pulled, strict=True))
                if names[p] in found and _has_changed(p.detach().cpu(), before)
            ]
            for link, part in zip(self._links, self._parts, strict=True)
        ]

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
        made = self.copy_model()
        self.average_frozen(made)
        self._rest(made, buffers=True)  # the last: a rank that serves goes on when all have been answered
        return made

    def average(self, tensors: Sequence[Tensor]) -> None:
        """Replace tensors by their mean over the workers that have not left."""
        every = list(self.gather_present(list(tensors)).values()) if tensors else []
        for x, *each in zip(tensors, *every, strict=True):
            fractions = x.is_floating_point() or x.is_complex()
            x.copy_(torch.stack(each).mean(0) if fractions else each[0])

    @torch.no_grad()
    def _rest(self, model: nn.Module, *, buffers: bool) -> None:
        """When all workers rest: the servers' parameters into `model`, the optimizer's states home."""
        if self._connections is None:
            return
        mine = packing.to_bytes([b.detach() for b in model.buffers()]) if buffers else b""
        same = dict(zip(self.model.parameters(), model.parameters(), strict=True))
        settled = self._connections.settle(mine, self._find_written())
        for part, (values, theirs, states) in zip(self._parts, settled, strict=True):
            for param, value in zip(part, values, strict=True):
                if param.requires_grad:
                    same[param].copy_(value)
            self._take(part, states)
            if buffers:
                for buffer, value in zip(model.buffers(), packing.from_bytes(theirs), strict=True):
                    put_back(buffer, value)
        self._at_home = True
        self._note_pulled()

    def _take(self, part: Sequence[Parameter], states: Sequence[dict[str, Any]]) -> None:
        for param, state in zip(part, states, strict=True):
            if state:  # where the optimizer would have made it: counts stay on the host
                self.optimizer.state[param] = {
                    k: v.to(param.device) if isinstance(v, Tensor) and v.dim() else v for k, v in state.items()
                }

    def _bring_states(self) -> None:
        """Fetch the states for `optimizer.state_dict()`. In a world that is being formed anew the servers answer no
        more, and whoever asks keeps what is here."""
        if self.healing is None or not self.healing.is_forming:
            self._fetch()

    @torch.no_grad()
    def _fetch(self, *, params: bool = False) -> None:
        """Bring the optimizer's states home, as they are now, and maybe the parameters."""
        if self._at_home or self._connections is None:
            return
        for link, part in zip(self._links, self._parts, strict=True):
            values, states = link.fetch()
            for param, value in zip(part, values if params else (), strict=params):
                param.copy_(value)
            self._take(part, states)
        self._at_home = True

    def present_ranks(self) -> list[int]:
        """The workers that have not left, by what the first server knows."""
        return sorted(self.gather_present(None))

    def gather_present(self, obj: Any) -> dict[int, Any]:
        """By way of the first server: it goes on without workers that have died, as training does."""
        if self._connections is None:
            return super().gather_present(obj)
        every = packing.from_bytes(self._links[0].gather(packing.to_bytes(obj)))
        return {worker: packing.from_bytes(data) for worker, data in every}

    def model_part(self) -> ModelPart:
        return ModelPart(first=list(self.model.buffers()))

    def local_state(self) -> dict[str, Any]:
        """Every rank calls it: model and optimizer then hold what the servers do, for any strategy to go on with."""
        self._rest(self.model, buffers=False)
        named = {p: name for name, p in self.model.named_parameters()}
        return {
            "residuals": {
                named[p]: piece.clone()
                for link, part in zip(self._links, self._parts, strict=True)
                if link.coder is not None and link.coder.residual is not None
                for p, piece in zip(part, link.coder.residual.split(link.coder.counts), strict=True)
            },
            "rates": [link.coder.rates if link.coder is not None else [] for link in self._links],
        }

    @torch.no_grad()
    def load_local(self, shared: dict[str, Any], locals_: Sequence[dict[str, Any]], *, same_world: bool) -> None:
        """Model and optimizer are loaded: the first worker brings both to the servers."""
        named = {p: name for name, p in self.model.named_parameters()}
        for i, (link, part) in enumerate(zip(self._links, self._parts, strict=True)):
            if self.world.rank == 0:
                link.put(part, [dict(self.optimizer.state.get(p, {})) for p in part])
            if link.coder is not None and link.coder.residual is not None:
                for p, piece in zip(part, link.coder.residual.split(link.coder.counts), strict=True):
                    found = [own["residuals"][named[p]] for own in locals_ if named[p] in own.get("residuals", {})]
                    piece.copy_(torch.stack(found).double().sum(0) / len(locals_)) if found else piece.zero_()
                rates = locals_[0].get("rates", [])
                link.coder.rates = list(rates[i]) if len(rates) == len(self._links) else []
        self._at_home, self._known = True, None
        self._note_pulled()

    def _note_pulled(self) -> None:
        """The servers know of the parameters as they are here."""
        for link in self._links:
            link.note_pulled()
        self.writes.note()

    def settle(self, *, is_source: bool) -> None:
        """The source brings parameters and optimizer states from the servers."""
        if not is_source:
            return
        self._at_home = False
        try:
            self._fetch(params=True)
        except PeerLost:
            if self.healing is None:
                raise
            self._at_home = True  # a server was lost: go on from the parameters that this worker pulled last

    def stop(self, change: Change | None = None) -> None:
        connections, self._connections, self._connected = self._connections, None, False
        if connections is not None and change is None:
            connections.finish()
        elif connections is not None:
            connections.abandon()

    def carry(self, change: Change, shared: dict[str, Any]) -> str:
        super().carry(change, shared)
        servers = len(self._parts) or 1
        return f"on {servers} server(s) beside the first ranks; pushes that were not applied are dropped"

    def close(self) -> None:
        """The optimizer's states come home; a rank with a server stays until all workers have closed theirs.

        Where a server is gone, its states are gone with it: `PeerLost`, unless the program has had that before.
        """
        try:
            if not any(link.is_lost for link in self._links):
                self._fetch()
        finally:
            super().close()


def _has_changed(x: Tensor, before: Tensor) -> bool:
    if x.equal(before) or x.dtype.itemsize < 4 or not (x.is_floating_point() or x.is_complex()):
        return not x.equal(before)
    rounding = 2 * torch.finfo(x.dtype).eps * float(before.abs().max())
    return not torch.allclose(x, before, rtol=0.0, atol=rounding)
