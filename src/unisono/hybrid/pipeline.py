"""Stages over the pipeline axis, by torch's schedules; one step is one pass of the strategy's window."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from unisono.hybrid.stages import split_stages
from unisono.strategy import Replica, share

if TYPE_CHECKING:
    from unisono.hybrid.axes import Mesh

__all__ = ["Bubble", "Pipeline"]

_SEVERAL = {"interleaved1f1b", "interleavedzerobubble", "zbvzerobubble", "loopedbfs"}  # stages a rank
_V_SHAPED = {"zbvzerobubble"}
_SINGLE = {"gpipe", "1f1b"}


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
    ) -> None:
        self.mesh, self.microbatches, self._loss = mesh, microbatches, loss
        self.names = [name for name, _ in model.named_parameters()]
        self.replica: weakref.ref[Replica] | None = None
        self.bubble = Bubble()
        self._scale: Callable[[Tensor], Tensor] = lambda x: x
        self._schedule: Any = None
        self._stages: list[Any] = []
        share(model, mesh.world)
        if plan is None and mesh.sizes[1] > 1:
            from unisono.hybrid.plans import tensor_plan

            plan = tensor_plan(model, ranks=mesh.sizes[1])
        kind, per_rank = _check_schedule(schedule, chunks, microbatches, mesh.sizes[2])
        if mesh.sizes[2] == 1:
            self.module = mesh.parallelize(model, plan)
            return
        parts = split_stages(model, example, mesh.sizes[2] * per_rank, world=mesh.world)
        here = _list_stages(kind, mesh.place[2], mesh.sizes[2], per_rank)
        self.module = parts[here[0]] if len(here) == 1 else _hold([parts[i] for i in here])
        mesh.parallelize(self.module, plan)
        self.module.unisono_names = self.names  # type: ignore[assignment]
        self._begin(schedule, {i: parts[i] for i in here}, len(parts))

    def _begin(self, schedule: str, parts: dict[int, nn.Module], count: int) -> None:
        from torch.distributed.pipelining import PipelineStage
        from torch.distributed.pipelining.schedules import get_schedule_class

        assert self.mesh.pipeline is not None
        group, device = self.mesh.pipeline.get_group(), self.mesh.world.device
        self._stages = [PipelineStage(part, i, count, device, group=group) for i, part in parts.items()]
        for stage in self._stages:
            self.bubble.watch(stage)
        several = schedule.lower() not in _SINGLE
        given = self._stages if several else self._stages[0]
        kind = get_schedule_class(schedule)
        self._schedule = kind(given, self.microbatches, loss_fn=self._mean_loss, scale_grads=False)

    def _mean_loss(self, output: Tensor, target: Tensor) -> Tensor:
        """A microbatch's share of the mean over all of them."""
        return self._scale(self._loss(output, target) / self.microbatches)

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
        scale = 1.0 if scaler is None else scaler.get_scale()
        if replica is None or replica.is_closed:
            loss = self._run(args, targets)
        else:
            run = partial(self._run, args, targets)
            with replica.one_pass():
                loss = self.module(run) if isinstance(self.module, _Held) else run()
        return loss / scale

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
        return self._share_loss(_add_up(losses))

    @property
    def _has_last(self) -> bool:
        return any(stage.is_last for stage in self._stages)

    def _check_batch(self, first: Tensor) -> None:
        if len(first) % self.microbatches:
            raise ValueError(
                f"a batch of {len(first)} samples in {self.microbatches} microbatches: they have to be of one size; "
                "give a batch size that divides"
            )

    def _run(self, args: tuple[Any, ...], targets: Tensor) -> Tensor:
        """The step; its end is that of the slowest stage, which tells the others the loss."""
        if self._schedule is None:
            return _add_up(self._run_alone(args, targets))
        losses: list[Tensor] = []
        first = any(stage.is_first for stage in self._stages)
        ends: dict[str, Any] = {"target": targets, "losses": losses} if self._has_last else {}
        clock = self.mesh.world.ledger.clock
        start = clock()
        self._schedule.step(*(args if first else ()), **ends)
        loss = self._share_loss(_add_up(losses))
        self.bubble.end_step(start, clock(), self.mesh.world.ledger)
        return loss

    def _run_alone(self, args: tuple[Any, ...], targets: Tensor, *, backward: bool = True) -> list[Tensor]:
        losses = []
        for i, target in enumerate(targets.chunk(self.microbatches)):
            loss = self._mean_loss(self.module(*[x.chunk(self.microbatches)[i] for x in args]), target)
            if backward:
                loss.backward()
            losses.append(loss)
        return losses

    def _share_loss(self, loss: Tensor) -> Tensor:
        """The last stage's, on every rank of the model."""
        if self._schedule is None:
            return loss
        shared = loss.double() if self._has_last and self.mesh.place[1] == 0 else torch.zeros((), dtype=torch.float64)
        self.mesh.model.all_reduce(shared, "sum", tag="loss").wait()
        return shared.to(loss.device)


class Bubble:
    """How long a rank stood still in the schedule's steps: their time less that of forward and backward.

    steps, seconds, idle_s: how many steps, how long they took, and how long of that nothing was computed here.
    """

    def __init__(self) -> None:
        self.steps, self.seconds, self.idle_s = 0, 0.0, 0.0
        self._busy: list[tuple[float, float]] = []

    @property
    def fraction(self) -> float:
        """The idle part of all steps."""
        return self.idle_s / self.seconds if self.seconds else 0.0

    def watch(self, stage: Any) -> None:
        """Note when a stage computes."""
        for name in ("forward_one_chunk", "backward_one_chunk", "backward_weight_one_chunk"):
            run = getattr(stage, name)

            def timed(*args: Any, _run: Any = run, **kwargs: Any) -> Any:
                start = time.perf_counter()
                try:
                    return _run(*args, **kwargs)
                finally:
                    self._busy.append((start, time.perf_counter()))

            setattr(stage, name, timed)

    def end_step(self, start: float, end: float, ledger: Any) -> None:
        """A schedule's step is over: the time between computations goes into the ledger as "bubble"."""
        at = start
        for a, b in [*sorted(self._busy), (end, end)]:
            if a > at:
                ledger.close_span("bubble", at, a)
                self.idle_s += a - at
            at = max(at, b)
        self.steps, self.seconds, self._busy = self.steps + 1, self.seconds + end - start, []

    def clear(self) -> None:
        """Begin anew: the first steps of a run are not like the others."""
        self.steps, self.seconds, self.idle_s = 0, 0.0, 0.0


def _add_up(losses: list[Tensor]) -> Tensor:
    return torch.stack([x.detach() for x in losses]).sum() if losses else torch.zeros(())


def _check_schedule(schedule: str, chunks: int | None, microbatches: int, ranks: int) -> tuple[str, int]:
    """The schedule's name in small letters, and how many stages a rank has."""
    kind = schedule.lower()
    if kind not in _SINGLE | _SEVERAL:
        raise ValueError(
            f"schedule={schedule!r}: expected GPipe, 1F1B, LoopedBFS, Interleaved1F1B, InterleavedZeroBubble or "
            "ZBVZeroBubble"
        )
    per_rank = (chunks or 2) if kind in _SEVERAL else 1
    if kind in _SINGLE and chunks not in (None, 1):
        raise ValueError(f"chunks={chunks}: {schedule} has one stage a rank; Interleaved1F1B has several")
    if kind in _V_SHAPED and per_rank != 2:
        raise ValueError(f"chunks={chunks}: {schedule} has two stages a rank")
    if microbatches < 1 or (kind == "1f1b" and microbatches < ranks):
        raise ValueError(f"microbatches={microbatches}: {schedule} on {ranks} stages needs at least {ranks}")
    return kind, per_rank


def _list_stages(kind: str, place: int, ranks: int, per_rank: int) -> list[int]:
    """Which stages a rank has: one after the other in turns, or there and back."""
    if kind in _V_SHAPED:
        return [place, 2 * ranks - 1 - place]
    return [place + ranks * turn for turn in range(per_rank)]


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
