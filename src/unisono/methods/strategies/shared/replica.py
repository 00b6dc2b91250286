"""This rank's part of a model that all ranks of its host share."""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import Optimizer

from unisono.launchers.runtime.frames import warn_user
from unisono.methods.exchange.overlap import split_sparse
from unisono.methods.exchange.reduction import check_real, read_loss_scale
from unisono.methods.exchange.windows import count_windows
from unisono.methods.reducers.dense import dense
from unisono.methods.strategies._crossing import Crossing, Piece
from unisono.methods.strategies._host_memory import HostMemory, Placed, Writes, move_in, move_out
from unisono.methods.strategies.shared.averages import LineValues
from unisono.methods.strategies.shared.backward import Backward
from unisono.methods.strategies.shared.lines import HostState, Line, group_lines
from unisono.methods.strategies.shared.owned import OwnedTensors
from unisono.methods.strategies.shared.step import HostStep
from unisono.methods.strategy import Change, Replica, Residual
from unisono.methods.strategy.averages import AveragedValues
from unisono.methods.strategy.mistakes import GradientProbe
from unisono.world import PeerLost, World

if TYPE_CHECKING:
    from unisono.methods.strategies.shared import shared

_DROPPED = "what the reducer between hosts had still to send is dropped, as it belongs to parts of the former ranks"


class SharedReplica(Replica):
    """A worker that steps its part of the host's model. In a world of one there is only counting to do."""

    strategy: shared
    slow_ranks = "deal"
    hides_gradients = True

    def __init__(self, model: nn.Module, optimizer: Optimizer, world: World, strategy: shared) -> None:
        self.reducer = strategy.reducer if strategy.reducer is not None else dense()
        if self.reducer.check is not None:
            self.reducer.check(optimizer, world)
        super().__init__(model, optimizer, world, strategy)
        self._memory: HostMemory | None = None
        self._lines: list[Line] = []
        self._owned: OwnedTensors | None = None
        self._state: HostState | None = None
        self._backward: Backward | None = None
        self._step: HostStep | None = None
        self._crossing: Crossing | None = None
        self._writes: Writes | None = None
        self._probe: GradientProbe | None = None
        self._is_stepping = False
        self.start_or_close()

    def start(self) -> None:
        """Move parameters and optimizer state into memory of the host; the values are those of its first rank."""
        if self.world.size == 1:
            self.windows = count_windows(self.model, self.strategy.accumulate, self.advance)
            return
        named, sparse = split_sparse(self.model)
        check_real(self.reducer, named)
        memory = self._memory = HostMemory(self.world, "shared")
        self._lines = group_lines(named, memory)
        for line in self._lines:
            move_in(line.params, line.view(line.values), line.views, memory)
        self._owned = OwnedTensors(self.optimizer, self._lines, memory)
        self._state = HostState(self.optimizer, self._lines, memory, self._owned.names)
        self._crossing = None
        if memory.hosts > 1:
            self._crossing = Crossing.between_hosts(self.world, self.reducer, self.optimizer)
        self._probe = GradientProbe(self.model.parameters(), self.world) if self.reducer.exact else None
        self.windows = self._backward = Backward(
            self._lines,
            sparse,
            memory,
            self.world,
            accumulate=self.strategy.accumulate,
            advance=self._end_window_here,
            share_buffers=partial(self.share_buffers, self.strategy.buffers),
            crossing=self._crossing,
        )
        self.noise = self._backward.noise
        self._step = HostStep(
            self._lines,
            self._state,
            memory,
            self._find_pieces,
            keeps_tile=self.world.elastic is not None,
            in_the_middle=None if self._faults is None else self.fault_in_update,
        )
        placed = [Placed(line.names, line.params, line.views, line.seen, line.values) for line in self._lines]
        self._writes = Writes(self.model, [*placed, *self._state.take_placed()], memory)

    def _find_pieces(self, rank: int, slots: Sequence[Container[int]]) -> list[list[Piece]]:
        """The part of a rank of my host, where these parameters of each line are stepped."""
        assert self._memory is not None
        count = self._memory.size if self._crossing is None else self._crossing.place[1]
        return [line.pieces(rank, count, some) for line, some in zip(self._lines, slots, strict=True)]

    # The loop -----------------------------------------------------------------------------------------------------

    def _end_window_here(self) -> None:
        if self._probe is not None and self._backward is not None:
            with self._backward.unnoticed():
                self._probe.compare()
        self.advance()

    def before_step(self) -> None:
        super().before_step()
        if self._backward is None or self._step is None or self._memory is None or self._writes is None:
            return
        if not self._step.is_skipped(self.stepping):
            self._step.prepare(self._backward.places, self.stepping, has_begun=self._backward.count_steps() > 0)
            self._writes.follow(self._step.state.take_placed())
            self._meet_before_step()
            self._is_stepping = True
            self._step.run()
            if self._owned is not None and self._owned.find(self.stepping):
                self._owned.begin_step(self.stepping, self._backward.places)
        self._backward.hide()  # the optimizer's own code finds nothing to step, but tensors that are stepped whole

    def _meet_before_step(self) -> None:
        """All ranks of the host are about to step. Where another of several optimizers has stepped with the same
        gradients, those who are left step what they own, whoever is lost."""
        assert self._writes is not None
        assert self._step is not None
        assert self._step.plan is not None
        try:
            self._writes.begin_step(f"optimizer.step() of window {self.step}", self._step.describe())
        except PeerLost:
            if not (self._step.plan.has_begun and self._owned is not None and self._owned.find(self.stepping)):
                raise

    def after_step(self) -> None:
        super().after_step()
        if self._backward is None or self._memory is None or self._step is None or self._writes is None:
            return
        self._backward.show()
        if self._owned is not None:
            self._owned.end_step()
        if not self._is_stepping:
            return
        self._is_stepping = False
        self._writes.end_step()
        try:
            self._memory.meet("the end of a step")
        except PeerLost as error:
            raise PeerLost(self._describe_loss(error)) from error
        several = len(self.members) > 1
        self._backward.end_step([id(p) for g in self.stepping.param_groups for p in g["params"]] if several else None)

    def _describe_loss(self, error: PeerLost) -> str:
        assert self._step is not None
        torn = self._step.find_torn() if self.world.elastic is not None else self._step.await_torn()
        if not torn:
            return str(error)
        ranks = ", ".join(map(str, torn))
        what = (
            f"{error}. It was in the middle of a step of the model that all workers of the host share: the parts of "
            f"local rank(s) {ranks} are torn, some of these parameters have had the step and some have not"
        )
        if self.world.elastic is not None:
            return what + "; the other workers finish the step"
        return what + (
            ". Do not save or use this model: restart the run from its last checkpoint. If lost workers are "
            "replaced (unisono run -n MIN:MAX) the others finish such a step"
        )

    def watch(self, scaler: torch.amp.GradScaler) -> None:
        super().watch(scaler)
        if self._crossing is not None:
            self._crossing.reduction.scale = partial(read_loss_scale, scaler, self.members, strict=True)

    def write(self, change: Callable[[], Any]) -> None:
        """Change parameters between steps: `change()` is called on one rank of each host, while the others wait.

        Every rank calls it: `replica.write(lambda: model.weight.data.mul_(0.9))`. What every rank writes alike needs no
        such care.
        """
        if self._writes is not None:
            self._writes.write(change, everywhere=True)
        else:
            with torch.no_grad():
                change()

    # State --------------------------------------------------------------------------------------------------------

    def find_differences(self) -> list[str]:
        """What the ranks do not have alike, in words; every rank calls it. [] where all is well."""
        return [] if self._writes is None else self._writes.find_differences(self.world)

    def state_dict(self) -> dict[str, Any]:
        """Every rank calls it: a checkpoint is of a model that all have alike."""
        if self._writes is not None:
            self._writes.warn_of_differences(self.world)
        return super().state_dict()

    def shared_state(self) -> dict[str, Any]:
        kept = {} if self._crossing is None else {"reducer": self._crossing.reduction.state_dict()["shared"]}
        return {**super().shared_state(), **kept}

    def local_state(self) -> dict[str, Any]:
        return {} if self._crossing is None else {"reducer": self._crossing.reduction.state_dict()["local"]}

    def load_local(self, shared: dict[str, Any], locals_: Sequence[dict[str, Any]], *, same_world: bool) -> None:
        """What a rank had still to send belongs to its part: in another world the parts are others."""
        mine = [part["reducer"] for part in locals_ if "reducer" in part]
        if self._crossing is not None and same_world and mine and "each" in shared.get("reducer", ()):
            self._crossing.reduction.load_state_dict(shared["reducer"], mine)

    @property
    def averaged_values(self) -> AveragedValues:
        if self._memory is None or self._writes is None:
            return super().averaged_values
        return LineValues(self, self._lines, self._memory, self._writes)

    def unsent(self) -> Residual | None:
        if self._crossing is not None and self._crossing.reduction.keeps_own and self.world.rank == 0:
            warn_user(_DROPPED)
        return None

    def carry(self, change: Change, shared: dict[str, Any]) -> str:
        super().carry(change, shared)
        return _DROPPED if "each" in shared.get("reducer", ()) and self.reducer.memory else ""

    # Another world, and the end -----------------------------------------------------------------------------------

    def restore(self) -> None:
        """Give every rank a model and an optimizer state of its own; every rank calls it."""
        self._share_owned(self.world)
        self._leave(keep_memory=False)

    def _share_owned(self, world: World) -> None:
        """Give every rank the optimizer's state of what others own."""
        if self._owned is not None:
            every = world.gather_objects([self._owned.states(member) for member in self.members])
            self._owned.close({member: [one[i] for one in every] for i, member in enumerate(self.members)})

    def progress(self) -> Any:
        """With what this rank owns, of all that are stepped whole: their state is nowhere else on its host."""
        if self._owned is None or not self._owned.names:
            return self.step
        return {"reached": self.step, "owned": self._owned.mine, "whole": list(self._owned.names.values())}

    def check_change(self, change: Change) -> None:
        source = change.progress[change.source]
        if not isinstance(source, dict):
            return
        there = {name for r in change.stayed for name in change.progress[r]["owned"]}
        if lost := [name for name in source["whole"] if name not in there]:
            more = f" and {len(lost) - 1} more" if len(lost) > 1 else ""
            raise ValueError(
                f"a lost rank took the optimizer's state of {lost[0]!r}{more}, stepped whole by the rank that owns it, "
                "with it: create the replica again in the new world and un.load the last checkpoint"
            )

    def stop(self, change: Change | None = None) -> None:
        """What is in the memory of the host outlives the ranks that are lost. A step that these have begun is ended, by
        the rank that all go on from. Till the new world has memory of its own, the model stays where it is."""
        if change is not None and self._step is not None and change.world.rank == change.source:
            self._step.finish()
            if self.weight_average is not None:
                self.weight_average.end_parts()
        if change is not None and isinstance(change.progress[change.source], dict):
            self._take_owned(change)
        self._leave(keep_memory=change is not None and change.world.size > 1)

    def _take_owned(self, change: Change) -> None:
        """Have all states of what is stepped whole, as those who stayed have them: the source gives them to all."""
        mine = [self._owned.states(member) for member in self.members] if self._owned and change.keeps else None
        every = [one for one in change.world.gather_objects(mine) if one is not None]
        if self._owned is not None:
            self._owned.close({member: [one[i] for one in every] for i, member in enumerate(self.members)})

    def _leave(self, *, keep_memory: bool) -> None:
        self.close_windows()
        if self.weight_average is not None and self._memory is not None and self.weight_average.is_kept:
            self.weight_average.lift()
        for part in (self._probe, self._crossing, self._owned):
            if part is not None:
                part.close()
        if not keep_memory:
            if self._state is not None:
                self._state.leave()
            for line in self._lines:
                move_out(line.params, line.views)
        if self._memory is not None:
            self._memory.close()
        self._backward = self._probe = self._crossing = self._writes = None
        self._memory = self._state = self._step = self._owned = None
        self._lines, self._is_stepping = [], False

    def take_model(self, change: Change) -> str:
        return super().take_model(change) + ", one for all ranks of a host"
