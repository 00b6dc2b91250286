"""Stages over the pipeline axis, by torch's schedules; one step is one pass of the strategy's window.

torch's own 1F1B waits for each message, sent or received, before it computes on. Here its runtime for orders (the one
of its interleaved schedules) runs GPipe and 1F1B: receives are posted when the other side computes, sends are waited
for at the end, and each stage has one more microbatch under way, so that the next one to compute is there before it is
needed.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import (
    _Action,
    _ComputationType,
    _PipelineScheduleRuntime,
    get_schedule_class,
)

from unisono.methods.hybrid.bubbles import Bubble
from unisono.methods.hybrid.plans import tensor_plan
from unisono.methods.hybrid.stages import split_stages
from unisono.methods.strategy import Replica, share
from unisono.observe.runs.recording import note_loss
from unisono.predict.costs.pipelines import Action, order_single

if TYPE_CHECKING:
    from unisono.methods.hybrid.axes import Mesh

__all__ = ["Pipeline", "check_schedule", "list_stages", "make_schedule", "read_order"]

AHEAD = 1  # microbatches that 1F1B has under way beside those that it needs, by default
SEVERAL = {"interleaved1f1b", "interleavedzerobubble", "zbvzerobubble", "loopedbfs"}  # stages a rank
SINGLE = {"gpipe", "1f1b"}
_V_SHAPED = {"zbvzerobubble"}


class Pipeline:
    """A model's stages on this rank, and the schedule that runs microbatches through all of them.

    module: this rank's part of the model, for the optimizer and `un.parallel`; its names are the whole model's.
    names: all parameters of the whole model, in order.
    bubble: how long this rank stood still in the steps so far.
    """

    def __init__(
        self,
        mesh: Mesh,
        model: nn.Module,
        example: Any,
        loss: Callable[[Tensor, Tensor], Tensor],
        *,
        microbatches: int,
        schedule: str,
        plan: dict[str, Any] | None,
        chunks: int | None,
        ahead: int,
    ) -> None:
        self.mesh, self.microbatches, self._loss = mesh, microbatches, loss
        self.names = [name for name, _ in model.named_parameters()]
        self.replica: weakref.ref[Replica] | None = None
        self.bubble = Bubble(mesh.world.ledger)
        self._scale: Callable[[Tensor], Tensor] = lambda x: x
        self._schedule: Any = None
        self._stages: list[Any] = []
        if mesh.model.size > 1:  # else un.parallel does it
            share(model, mesh.world)
        if plan is None and mesh.sizes[1] > 1:
            plan = tensor_plan(model, ranks=mesh.sizes[1])
        kind, per_rank = check_schedule(schedule, chunks, microbatches, mesh.sizes[2], ahead)
        if mesh.sizes[2] == 1:
            self.module = mesh.parallelize(model, plan)
            return
        parts = split_stages(model, example, mesh.sizes[2] * per_rank, world=mesh.world)
        _refuse_idle(parts, [list_stages(kind, place, mesh.sizes[2], per_rank) for place in range(mesh.sizes[2])])
        here = list_stages(kind, mesh.place[2], mesh.sizes[2], per_rank)
        self.module = parts[here[0]] if len(here) == 1 else _hold([parts[i] for i in here])
        mesh.parallelize(self.module, plan)
        self.module.unisono_names = self.names  # type: ignore[assignment]
        self._begin(schedule, {i: parts[i] for i in here}, len(parts), ahead)

    def _begin(self, schedule: str, parts: dict[int, nn.Module], count: int, ahead: int) -> None:
        assert self.mesh.pipeline is not None
        group, device = self.mesh.pipeline.get_group(), self.mesh.world.device
        self._stages = [PipelineStage(part, i, count, device, group=group) for i, part in parts.items()]
        for stage in self._stages:
            self.bubble.watch(stage)
        loss = self.bubble.time_loss(self._mean_loss)
        settings = {"loss_fn": loss, "scale_grads": False}
        self._schedule = make_schedule(schedule.lower(), self._stages, self.microbatches, ahead, **settings)
        self._numbers = (
            1
            + self.bubble.follow(
                read_order(self._schedule),
                rank=self.mesh.place[2],
                one_clock=len(set(self.mesh.model.hosts)) == 1,
                schedule=schedule,
                chunks=len(self._stages),
            ).size
        )

    def _mean_loss(self, output: Tensor, target: Tensor) -> Tensor:
        """A microbatch's share of the mean over all of them."""
        return self._scale(self._loss(output, target) / self.microbatches)

    def refuse(self, replica: Replica) -> str:
        """Why the schedule cannot run with a replica; nothing where it can."""
        strategy: Any = replica.strategy
        by_forward = getattr(strategy, "stage", 0) == 3 or getattr(strategy, "precision", None) is not None
        if len(self._stages) < 2 or not by_forward:
            return ""
        return (
            f"{strategy} prepares parameters where forward runs, and this schedule runs {len(self._stages)} "
            "stages of it on each rank by themselves: take GPipe or 1F1B, or zero(stage=2) without a precision"
        )

    # Training ------------------------------------------------------------------------------------------------------

    def step(self, inputs: Any, targets: Tensor, *, scaler: torch.amp.GradScaler | None = None) -> Tensor:
        """Forward and backward of a batch, in microbatches; then the strategy's part, as after a backward pass.

        Every rank gives the batch of its place on the data axis. Returns the loss, the mean over the microbatches, on
        every rank. With a `scaler` the loss is scaled by it.
        """
        replica = self.replica() if self.replica is not None else None
        args = inputs if isinstance(inputs, tuple) else (inputs,)
        self._check_batch(args[0])
        self._scale = (lambda x: x) if scaler is None else scaler.scale
        if scaler is not None and not self._has_last:  # a scaler begins with what it scales first
            scaler.scale(torch.zeros((), dtype=torch.float32, device=self.mesh.world.device))
        run = partial(self._run, args, targets, 1.0 if scaler is None else scaler.get_scale())
        if replica is None or replica.is_closed:
            return run()
        with replica.one_pass():
            loss: Tensor = self.module(run) if isinstance(self.module, _Held) else run()
        return loss

    @torch.no_grad()
    def evaluate(self, inputs: Any, targets: Tensor) -> Tensor:
        """The loss of a batch, the mean over its microbatches, without gradients; on every rank of the model."""
        args = inputs if isinstance(inputs, tuple) else (inputs,)
        self._check_batch(args[0])
        self._scale = lambda x: x
        if self._schedule is None:
            losses = self._run_alone(args, targets, backward=False)
        else:
            losses = []
            first = any(stage.is_first for stage in self._stages)
            ends: dict[str, Any] = {"target": targets, "losses": losses} if self._has_last else {}
            self._schedule.eval(*(args if first else ()), **ends)
        return self._share(_add_up(losses))[0]

    @property
    def _has_last(self) -> bool:
        return any(stage.is_last for stage in self._stages)

    def _check_batch(self, first: Tensor) -> None:
        if len(first) % self.microbatches:
            raise ValueError(
                f"a batch of {len(first)} samples in {self.microbatches} microbatches: they have to be of one size; "
                "give a batch size that divides"
            )

    def _run(self, args: tuple[Any, ...], targets: Tensor, scale: float) -> Tensor:
        """The step, and its loss for who records it."""
        with note_loss(self.mesh.world) as note:
            if self._schedule is None:
                loss = _add_up(self._run_alone(args, targets))
            else:
                loss = self._run_schedule(args, targets)
            loss = loss / scale
            note(loss)
        return loss

    def _run_schedule(self, args: tuple[Any, ...], targets: Tensor) -> Tensor:
        """The schedule's step; its end is that of the slowest stage, which tells the others the loss."""
        losses: list[Tensor] = []
        first = any(stage.is_first for stage in self._stages)
        ends: dict[str, Any] = {"target": targets, "losses": losses} if self._has_last else {}
        clock = self.mesh.world.ledger.clock
        start = clock()
        self.bubble.begin_step()
        self._schedule.step(*(args if first else ()), return_outputs=False, **ends)
        loss, numbers = self._share(_add_up(losses), self.bubble.fill)
        self.bubble.end_step(start, clock(), numbers)
        return loss

    def _run_alone(self, args: tuple[Any, ...], targets: Tensor, *, backward: bool = True) -> list[Tensor]:
        losses = []
        for i, target in enumerate(targets.chunk(self.microbatches)):
            loss = self._mean_loss(self.module(*[x.chunk(self.microbatches)[i] for x in args]), target)
            if backward:
                loss.backward()
            losses.append(loss)
        return losses

    def _share(self, loss: Tensor, fill: Callable[[Tensor], None] | None = None) -> tuple[Tensor, list[float]]:
        """The last stage's loss on every rank of the model, and what every rank has filled in."""
        if self._schedule is None:
            return loss, []
        shared = torch.zeros(self._numbers if fill else 1, dtype=torch.float64)
        if self.mesh.place[1] == 0:
            shared[0] = loss.double() if self._has_last else 0.0
            if fill is not None:
                fill(shared[1:])
        self.mesh.model.all_reduce(shared, "sum", tag="loss").wait()
        return shared[0].to(loss.device), shared[1:].tolist()


def _refuse_idle(parts: Sequence[fx.GraphModule], places: Sequence[Sequence[int]]) -> None:
    """Refuse stages (of each place on the axis) without a parameter that learns: on every rank, as all know them."""
    for place, stages in enumerate(places):
        if not any(param.requires_grad for i in stages for param in parts[i].parameters()):
            steps = [node.name for i in stages for node in parts[i].graph.nodes if node.op.startswith("call_")]
            which = f"stage {stages[0]}" if len(stages) == 1 else f"stages {' and '.join(map(str, stages))}"
            raise ValueError(
                f"{which} of {len(parts)} would have no parameters that learn ({', '.join(steps)}), and ranks at place "
                f"{place} of the pipeline axis none for their optimizer: take fewer stages (pipeline= of un.mesh, "
                "chunks= of mesh.pipe), or put steps without parameters into modules with layers that learn"
            )


def _add_up(losses: list[Tensor]) -> Tensor:
    return torch.stack([x.detach() for x in losses]).sum() if losses else torch.zeros((), dtype=torch.float32)


class _Held(nn.Module):
    """Several stages' parts; its forward is a step of the schedule, for those that watch the model's forward."""

    def forward(self, run: Callable[[], Tensor]) -> Tensor:
        """Run the step."""
        return run()


def _hold(parts: list[Any]) -> nn.Module:
    """A module that has all that several stages have, under the model's names."""
    held = _Held()
    for part in parts:
        for node in part.graph.nodes:
            if node.op in ("call_module", "get_attr"):
                _put(held, node.target, part)
    return held


def _put(root: nn.Module, name: str, part: nn.Module) -> None:
    *path, last = name.split(".")
    owner = part.get_submodule(".".join(path))
    for step in path:
        if step not in root._modules:
            root.add_module(step, nn.Module())
        root = root.get_submodule(step)
    for kind in ("_modules", "_parameters", "_buffers"):
        if last in getattr(owner, kind):
            getattr(root, kind)[last] = getattr(owner, kind)[last]


# Which schedule runs the microbatches --------------------------------------------------------------------------------


def check_schedule(schedule: str, chunks: int | None, microbatches: int, ranks: int, ahead: int) -> tuple[str, int]:
    """The schedule's name in small letters, and how many stages a rank has."""
    kind = schedule.lower()
    if kind not in SINGLE | SEVERAL:
        raise ValueError(
            f"schedule={schedule!r}: expected GPipe, 1F1B, LoopedBFS, Interleaved1F1B, InterleavedZeroBubble or "
            "ZBVZeroBubble"
        )
    per_rank = (chunks or 2) if kind in SEVERAL else 1
    if kind in SINGLE and chunks not in (None, 1):
        raise ValueError(f"chunks={chunks}: {schedule} has one stage a rank; Interleaved1F1B has several")
    if kind in _V_SHAPED and per_rank != 2:
        raise ValueError(f"chunks={chunks}: {schedule} has two stages a rank")
    if microbatches < 1 or (kind == "1f1b" and microbatches < ranks):
        raise ValueError(f"microbatches={microbatches}: {schedule} on {ranks} stages needs at least {ranks}")
    if ahead < 0:
        raise ValueError(f"ahead={ahead}: expected how many more microbatches are under way, from 0 on")
    return kind, per_rank


def list_stages(kind: str, place: int, ranks: int, per_rank: int) -> list[int]:
    """Which stages a rank has: one after the other in turns, or there and back."""
    if kind in _V_SHAPED:
        return [place, 2 * ranks - 1 - place]
    return [place + ranks * turn for turn in range(per_rank)]


def make_schedule(kind: str, stages: list[Any], microbatches: int, ahead: int, **settings: Any) -> Any:
    """The schedule of this rank's stages, as torch's are called."""
    if kind in SEVERAL:
        return get_schedule_class(kind)(stages, microbatches, **settings)
    order = order_single(kind, ranks=stages[0].group_size, microbatches=microbatches, ahead=ahead)
    return _Ordered(stages, microbatches, order, **settings)


def read_order(schedule: Any) -> dict[int, list[Action]]:
    """A schedule's computations, rank by rank."""
    return {
        rank: [
            (action.stage_index, str(action.computation_type.value), action.microbatch_index)
            for action in actions
            if action is not None and action.microbatch_index is not None
        ]
        for rank, actions in schedule.pipeline_order.items()
    }


class _Ordered(_PipelineScheduleRuntime):
    """Computations in a given order; torch puts the messages in."""

    def __init__(self, stages: list[Any], microbatches: int, order: dict[int, list[Action]], **settings: Any) -> None:
        super().__init__(stages, microbatches, **settings)  # type: ignore[no-untyped-call]
        self.pipeline_order = {
            rank: [_Action(stage, _ComputationType.from_str(kind), micro) for stage, kind, micro in actions]
            for rank, actions in order.items()
        }
        self._prepare_schedule_with_comms(self.pipeline_order)
