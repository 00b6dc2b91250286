"""A user's script on a simulated world: a few steps of one worker of N, in this process, and what they show.

1. Memory, by footprint/script.py: up to the first optimizer step, on parameters without memory.
2. The steps, on real tensors: the method is bound and sends into a world of which only this rank exists.
"""

from __future__ import annotations

import traceback
import warnings
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from unisono.launchers.runtime.link_emulation import Link
from unisono.launchers.runtime.machine import host_bytes, usable_cores
from unisono.methods.model_copies import add_hook
from unisono.methods.spec import build, describe
from unisono.methods.strategy import Replica, Strategy, binding
from unisono.predict.footprint.formula import KINDS, Need
from unisono.predict.footprint.memory_report import MemoryReport, describe_shortage
from unisono.predict.footprint.script import (
    Enough,
    ScriptError,
    StepsAlone,
    pose_as_worker,
    predict_for_script,
    run_program,
)
from unisono.predict.planner.candidates import describe_candidate
from unisono.text_table import format_rows
from unisono.training.data import Shard
from unisono.units import show_s, show_size
from unisono.world import World
from unisono.world.transports.simulated import SimulatedTransport
from unisono.world.virtual import simulate


@dataclass(frozen=True)
class DryRequest:
    """What a dry run is to rehearse."""

    program: str
    arguments: Sequence[str]
    workers: int
    per_host: int
    module: bool = False
    steps: int = 3
    link: Link = field(default_factory=lambda: Link(1e9, 1e-4))
    device_memory: str | None = None
    host_memory: str | None = None


@dataclass
class Traffic:
    """What one worker sends in a step by one kind of operation."""

    calls: float = 0.0
    sent: float = 0.0


@dataclass
class DryResult:
    """What was found. `problems`: why the run would not work; `notes`: what else is to be known."""

    request: DryRequest
    memory: MemoryReport | None = None
    strategy: str = ""
    model: str = ""
    inputs: list[str] = field(default_factory=list)  # of the first forward pass, one worker's
    data: list[str] = field(default_factory=list)
    traffic: dict[str, Traffic] = field(default_factory=dict)
    exchange_s: float | None = None  # of a step, over the link
    steps: int = 0
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    is_short_of_memory: bool = False

    @property
    def exit_status(self) -> int:
        """0: it would work. 3: there is too little memory. 1: another reason why not."""
        return 0 if not self.problems else 3 if self.is_short_of_memory and len(self.problems) == 1 else 1


def rehearse(request: DryRequest, show: Callable[[str], None] = lambda text: None) -> DryResult:
    """Run the script twice, as far as is needed; `show` is told where this stands."""
    result = DryResult(request)
    show("memory: the script up to its first optimizer step, without memory for parameters")
    try:
        result.memory = predict_for_script(
            request.program,
            request.arguments,
            workers=request.workers,
            module=request.module,
            workers_per_host=request.per_host,
            device_memory=request.device_memory,
            host_memory=request.host_memory,
        )
    except ScriptError as error:
        result.notes.append(f"memory is not known: {error}")
    needed = [row.need.device + row.need.host for row in result.memory.rows] if result.memory is not None else [0]
    if min(needed) >= host_bytes():
        result.problems.append("a single worker does not fit into the memory of this machine: its steps were not run")
        return result
    show(f"{request.steps} steps, as one of {request.workers} workers")
    _DryScript(request, result).run()
    _judge(result)
    return result


class _DryScript:
    """Runs the script's steps as one worker, and notes what they show."""

    def __init__(self, request: DryRequest, result: DryResult) -> None:
        self.request, self.result = request, result
        self._replica: Replica | None = None
        self._is_replaced = False  # the method, by one that can be simulated
        self._seconds: list[float] = []  # of the simulated network, after each step

    def run(self) -> None:
        """To the last of the steps, or the script's end."""
        request, result = self.request, self.result
        link = request.link
        world = simulate(
            request.workers,
            per_host=request.per_host,
            bits_per_s=link.bits_per_s or 1e12,
            latency_s=link.latency_s,
        )
        if torch.cuda.is_available():
            world.device = torch.device("cuda")
        with ExitStack() as stack:
            stack.enter_context(
                pose_as_worker(request.program, request.arguments, world, self._bind, module=request.module)
            )
            stack.enter_context(warnings.catch_warnings())
            # The other ranks count as equal to this one.
            warnings.filterwarnings("ignore", message="the ranks train on the same samples")
            error = run_program(request.program, module=request.module)
            if error is not None and not (isinstance(error, SystemExit) and error.code in (None, 0)):
                result.problems.append(_describe_error(error, request))
            _look_at_shards(world, result)
            self._look_at_traffic(world)
        if not result.problems and self._replica is None:
            result.problems.append("the script ended without calling un.parallel: nothing would be trained together")
        elif not result.problems and not result.steps:
            result.problems.append("the script ended without an optimizer step")

    def _bind(self, model: nn.Module, optimizer: Optimizer, strategy: Strategy, world: World) -> Replica:
        """Stands in for the binding of a strategy: binds it, and watches what follows; of several models, the first."""
        result = self.result
        if self._replica is None:
            result.strategy = describe(strategy)
            result.model = _describe_model(model)
            if result.strategy.startswith("torch:"):
                why = "torch's own methods need processes of their own"
            else:
                why = describe_candidate(result.strategy).unpredicted
            if why:  # it cannot be run as one rank whose others do not exist
                self._is_replaced = True
                result.notes.append(f"the steps were run under allreduce, and traffic is not known: {why}")
                hosts = len(set(world.hosts))
                if hosts > 1 and strategy.pattern().one_host:
                    raise ValueError(f"{result.strategy} needs all workers on one host, got {hosts}")
        if self._is_replaced:
            strategy = build("allreduce", kind="strategy")
        replica = binding.bind_for(model, optimizer, strategy, world)
        replica.is_trial = True  # type: ignore[attr-defined]  # un.save writes nothing
        if self._replica is None:
            self._replica = replica
            add_hook(model.register_forward_pre_hook, self._note_inputs, with_kwargs=True)
            optimizer.register_step_post_hook(self._count_step)
        return replica

    def _note_inputs(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not self.result.inputs:
            named = [*((str(i), x) for i, x in enumerate(args)), *kwargs.items()]
            self.result.inputs = [
                f"{tuple(x.shape)} {str(x.dtype).removeprefix('torch.')}" for _, x in named if isinstance(x, Tensor)
            ] or ["no tensor"]

    def _count_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        assert self._replica is not None
        if not self._replica.is_first_step:
            return
        self.result.steps += 1
        transport = self._replica.world.transport
        self._seconds.append(transport.seconds if isinstance(transport, SimulatedTransport) else 0.0)
        if self.result.steps >= self.request.steps:
            raise Enough

    def _look_at_traffic(self, world: World) -> None:
        """By kind, over the steps after the first, which may set things up."""
        if self._is_replaced:
            return
        records = [record for record in world.ledger.records if record.op != "call"]
        steps = {record.step for record in records if 0 < record.step < self.result.steps} or {0}
        for record in records:
            if record.step in steps:
                kind = f"{record.op} {record.tag.partition('/')[0]}".strip()
                found = self.result.traffic.setdefault(kind, Traffic())
                found.calls += 1 / len(steps)
                found.sent += record.bytes_sent / len(steps)
        if len(self._seconds) > 1:
            self.result.exchange_s = (self._seconds[-1] - self._seconds[0]) / (len(self._seconds) - 1)


def _describe_model(model: nn.Module) -> str:
    parameters = list(model.parameters())
    count = sum(p.numel() for p in parameters)
    size = sum(p.numel() * p.element_size() for p in parameters)
    return f"{type(model).__name__}: {count:,} parameters in {len(parameters)} tensors ({show_size(size)})"


def _describe_error(error: BaseException, request: DryRequest) -> str:
    """What the script raised, and the line of it."""
    if isinstance(error, StepsAlone):
        return str(error)
    if isinstance(error, SystemExit):
        return f"the script ended itself: {error.code if isinstance(error.code, str) else f'status {error.code}'}"
    frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename.endswith(request.program)]
    where = f" (line {frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {error}{where}"


def _look_at_shards(world: World, result: DryResult) -> None:
    """How the data are dealt to so many workers."""
    workers = world.size
    shards: dict[str, Shard] = world.shards
    for name, shard in shards.items():
        size, samples = shard.batch_size, shard.samples
        each = ""
        if size is not None:
            more = f" or {size // workers + 1}" if size % workers else ""
            each = f", {size // workers}{more} each"
        if samples is None or size is None:
            result.data.append(f"{name}: a stream, global batches of {size or '?'}{each}")
            continue
        result.data.append(
            f"{name}: {samples:,} samples, {len(shard):,} steps per epoch, global batches of {size}{each}"
        )
        if size % workers:
            result.notes.append(
                f"batch_size={size} does not divide by {workers} workers: {size % workers} of them have a sample more, "
                f"and the others wait for them; {size - size % workers} or {size + workers - size % workers} would"
            )
        last = samples % size
        if last and not shard.drop_last and last < workers:
            result.notes.append(
                f"{name}: the last batch of an epoch has {last} samples for {workers} workers, so that "
                f"{workers - last} have none; drop_last=True leaves it out"
            )
    if not shards and result.steps and workers > 1:
        result.notes.append(
            "un.shard was not used: unless the script divides its data itself, every worker trains on all of it"
        )


def _judge(result: DryResult) -> None:
    """Memory under the method that the script asks for, and what the machine is asked for."""
    request, memory = result.request, result.memory
    cores = usable_cores()
    if request.per_host == request.workers > cores and not torch.cuda.is_available():
        result.notes.append(
            f"{request.workers} workers on one host of {cores} cores take turns; --workers-per-host K for several hosts"
        )
    if memory is None or not result.strategy:
        return
    need, is_known = _find_need(result.strategy, memory)
    if not is_known:
        result.notes.append(f"memory is that of allreduce; what {result.strategy} keeps in addition is not included")
    if shortage := describe_shortage(need, memory.machine):
        result.is_short_of_memory = True
        fitting = memory.fits()
        hint = f": {', '.join(fitting[:3])} would fit" if fitting else "; nothing else would fit either"
        result.problems.append(f"memory: short of {shortage}{hint}")


def _find_need(spec: str, memory: MemoryReport) -> tuple[Need, bool]:
    """What a worker needs under a method, or else under allreduce; and whether that of the method is known."""
    try:
        return memory.need(spec), True
    except ValueError:
        return memory.need("allreduce"), False


# In words ------------------------------------------------------------------------------------------------------------


def write_dry_report(result: DryResult) -> str:
    """The report of a dry run as text."""
    parts = [_write_head(result), _write_shapes(result), _write_memory(result), _write_traffic(result)]
    for title, lines in (("problems", result.problems), ("notes", result.notes)):
        if lines:
            parts.append("\n".join([title, *(f"  - {line}" for line in lines)]))
    parts.append("this run would not work" if result.problems else "this run would work")
    return "\n\n".join(part for part in parts if part)


def _write_head(result: DryResult) -> str:
    request = result.request
    hosts = -(-request.workers // request.per_host)
    where = "one host" if hosts == 1 else f"{hosts} hosts, {request.per_host} on each"
    method = f", {result.strategy}" if result.strategy else ""
    return (
        f"dry run of {request.program}: {request.workers} workers on {where}{method}; {result.steps} steps of one of "
        "them\nNothing was sent, and un.save wrote nothing. Everything else that the script does really happened."
    )


def _write_shapes(result: DryResult) -> str:
    lines = [f"  model           {result.model}"] if result.model else []
    lines += [f"  a worker's part {text}" for text in result.inputs]
    lines += [f"  data            {text}" for text in result.data]
    return "\n".join(["shapes", *lines]) if lines else ""


def _write_memory(result: DryResult) -> str:
    if result.memory is None:
        return ""
    need, _ = _find_need(result.strategy or "allreduce", result.memory)
    total = need.device + (need.host if result.memory.machine.device is None else 0)
    kinds = ", ".join(f"{kind} {show_size(getattr(need, kind))}" for kind in KINDS if getattr(need, kind))
    lines = ["memory per worker", f"  {show_size(total)}: {kinds}", f"  available: {result.memory.machine.describe()}"]
    lines += [f"  not included: {what}" for what in result.memory.left_out]
    return "\n".join(lines)


def _write_traffic(result: DryResult) -> str:
    if not result.traffic:
        return ""
    rows = sorted(result.traffic.items(), key=lambda item: -item[1].sent)
    table = [["", kind, show_size(round(t.sent)), f"in {t.calls:.3g} calls"] for kind, t in rows]
    table.append(["", "in all", show_size(round(sum(t.sent for _, t in rows))), ""])
    lines = ["traffic per step, sent by each worker", *format_rows(table, left=(1, 3))]
    if result.exchange_s is not None:
        link = result.request.link
        lines.append(f"  over links of {link.describe()} (--net), one after the other: {show_s(result.exchange_s)}")
    return "\n".join(lines)
