"""The plan of a measurement: what each step of the user's own loop is used for.

1. some steps with nothing exchanged: compute and its spread, memory;
2. between two steps: the network, each link and each operation;
3. a few steps under each method in a silent world, where messages take no time;
4. where asked for: the best methods for real, in turn;
5. torch's own DistributedDataParallel for real, to compare with.

A generator: it goes on by one `yield` a step. All ranks follow the same plan, and meet before every step, so that
each step finds the machine as busy as it is in training.
"""

from __future__ import annotations

import atexit
import copy
import gc
import json
import sys
import time
import warnings
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from unisono.background import watched_by
from unisono.launchers.runtime.machine import host_bytes, read_boot_id
from unisono.launchers.runtime.run_folder import divide_noise
from unisono.launchers.runtime.variables import read_observer_settings
from unisono.methods.facts import Convergence
from unisono.methods.joined_optimizers import describe_optimizer
from unisono.methods.model_copies import add_hook
from unisono.methods.spec import build, describe
from unisono.methods.strategy import Replica, Strategy
from unisono.methods.strategy.changing import ChangingReplica
from unisono.predict.costs import Anatomy
from unisono.predict.footprint import memory
from unisono.predict.planner.candidates import Candidate, find_candidates
from unisono.predict.planner.choice import choose, write_report
from unisono.predict.planner.measured import DDP, Measured, MeasuredMethod
from unisono.predict.planner.meshes import measure_stages, measure_tensor
from unisono.predict.planner.network_probe import probe
from unisono.predict.planner.trace import Trace, TracedStep, steady
from unisono.world import World
from unisono.world.ledger import Ledger
from unisono.world.transports.silent import SilentTransport

_WARM = 2  # steps before anything counts
_BARE = 3
_MOST_TRACED = 8  # steps a method, after a first one: as many as fit into
_ENOUGH_S = 0.8
_ROUNDS = 2
_NEVER = 1 << 30  # in steps that are timed
_VERIFIED = 3  # steps of a method in a round, after a first one
_MOST_PROBED = 8 << 20
_SHORT = 0.8  # of a worker's memory: from here on it is short


@dataclass(frozen=True)
class PlanSettings:
    """The options of `unisono plan`, as they reach its workers."""

    methods: Sequence[str] = ()
    allow: Sequence[str] = ("exact", "rounded", "compressed")
    budget_s: float = 25.0
    verify: int = 0
    file: str = ""
    started: float | None = None  # when the command was, by time.time()


def steps_needed(methods: int, verify: int) -> int:
    """Optimizer steps that a whole measurement takes, at most."""
    return _WARM + _BARE + methods * (1 + _MOST_TRACED) + verify * _ROUNDS * (1 + _VERIFIED)


class MeasurementPlan:
    """Drives a measurement from the end of each optimizer step."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        world: World,
        candidates: list[Candidate],
        settings: PlanSettings,
        *,
        own: str,
        finished: Callable[[], None],
    ) -> None:
        """`finished`: called when all is measured."""
        self.model, self.optimizer, self.world = model, optimizer, world
        self.settings, self._candidates = settings, candidates
        params, rate = [p for p in model.parameters() if p.requires_grad], optimizer.param_groups[0].get("lr")
        self.measured = Measured(
            world.size,
            list(world.hosts),
            own,
            sum(p.numel() for p in params),
            sum(p.numel() * p.element_size() for p in params),
            learning_rate=None if rate is None else float(rate),
            optimizer=describe_optimizer(optimizer),
        )
        self._began = time.monotonic()
        since = time.time() - settings.started if settings.started is not None else 0.0
        self._before_s = min(max(0.0, since), settings.budget_s / 2)  # another host's clock may be off
        gc.freeze()  # so that looking for what a method left behind does not look through all modules
        self._snapshot: tuple[dict[str, Any], dict[str, Any]] | None = None
        quiet: Strategy = build("allreduce", kind="strategy")
        self.replica = ChangingReplica(quiet.bind(model, optimizer, World(device=world.device)), quiet, self.next)
        self.replica.is_trial = True
        self._example: tuple[torch.Tensor, ...] | None = None  # a batch, as the model is called with
        self._bare_s = 0.0  # this rank's step with nothing exchanged
        self._has_unused = False  # parameters without a gradient, on any rank
        self._finished = finished
        self.is_comparing = False  # all is measured but methods of torch's own
        self._steps = self._run()
        self._batch = add_hook(model.register_forward_pre_hook, self._note_batch, with_kwargs=True)
        next(self._steps)

    def next(self) -> None:
        """Called after each optimizer step: go on to what the next one is used for."""
        self.measured.steps += 1
        done = next(self._steps, True)
        self.measured.seconds = time.monotonic() - self._began
        if done:
            gc.unfreeze()
            self._finished()

    def _note_batch(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """How many samples: the rows of the first tensor that the model is given."""
        first = next((x for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor) and x.dim()), None)
        self.measured.batch = first.shape[0] if first is not None else None
        if not kwargs and args and all(isinstance(x, torch.Tensor) and x.dim() for x in args):
            self._example = tuple(x.detach().clone() for x in args)
        self._batch.remove()

    # The plan ----------------------------------------------------------------------------------------------------

    def _run(self) -> Iterator[None]:
        for _ in range(_WARM):
            yield
        self._snapshot = (
            {name: x.clone() for name, x in self.model.state_dict().items() if isinstance(x, torch.Tensor)},
            copy.deepcopy(self.optimizer.state_dict()),
        )
        yield from self._measure_bare()
        self._tell("the network")
        most = min(self.measured.gradient_bytes, _MOST_PROBED)
        network, links, encryption = probe(self.world, most)
        self.measured.network = network
        self.measured.links = [vars(link) for link in links]
        self.measured.encryption = {} if encryption is None else vars(encryption)
        predicted = [c for c in self._candidates if not c.unpredicted and not c.is_of_torch]
        for i, candidate in enumerate(predicted):
            left_s = self.settings.budget_s - self._before_s - (time.monotonic() - self._began)
            left_s = float(self.world.broadcast_object(left_s))
            if left_s <= 0:
                self._add(candidate, why=f"not measured: the {self.settings.budget_s:g} s of --budget were over")
            else:
                self._tell(f"{candidate.spec} ({i + 1} of {len(predicted)})")
                yield from self._measure_method(candidate, left_s / (len(predicted) - i))
        for candidate in self._candidates:
            if candidate.unpredicted:
                self._add(candidate, why=f"not predicted: {candidate.unpredicted}")
        found = [m.anatomy for m in self.measured.methods if m.anatomy is not None and m.anatomy.every == 1]
        steadied = {anatomy.spec: anatomy for anatomy in steady(found)}
        self.measured.methods = [replace(m, anatomy=steadied.get(m.spec, m.anatomy)) for m in self.measured.methods]
        if self.settings.verify:
            yield from self._verify()
        self._go_quiet()
        self._look_at_memory()
        self._look_at_stages()
        self.is_comparing = True
        for candidate in self._candidates:
            if candidate.is_of_torch:
                yield from self._measure_torch(candidate)
        self._tell("")

    def _measure_bare(self) -> Iterator[None]:
        """Time steps in which nothing is exchanged: compute, its spread, and memory."""
        self._tell("compute")
        _reset_peak(self.world.device)
        taken = yield from self._time_steps(_BARE)
        self._bare_s = median(taken)
        mine = any(p.grad is None for p in self.model.parameters() if p.requires_grad)
        self._has_unused = any(self.world.gather_objects(mine))
        everyone = self.world.gather_objects(taken)
        self.measured.bare_samples_s = [seconds for each in everyone for seconds in each]
        self.measured.compute_s = median(max(step) for step in zip(*everyone, strict=True))
        self.measured.memory_bytes = max(self.world.gather_objects(_read_peak(self.world.device)))

    def _time_steps(self, count: int) -> Generator[None, None, list[float]]:
        """Seconds that each of the next steps takes on this rank; all ranks begin them together."""
        taken = []
        for _ in range(count):
            self.world.barrier()
            began = time.perf_counter()
            yield
            self._settle()
            taken.append(time.perf_counter() - began)
        return taken

    def _try(self, candidate: Candidate, strategy: Strategy, make_world: Callable[[], World], said: str) -> bool:
        """Go on under a strategy; if it refuses on some rank, note why for its candidate."""
        problem = ""
        try:
            self.replica.replace(lambda: self._bind(strategy, make_world()))
        except (ValueError, TypeError, RuntimeError, NotImplementedError) as error:
            problem = str(error).partition("\n")[0]
        problems = list(filter(None, self.world.gather_objects(problem)))
        if problems:
            self._add(candidate, why=f"{said}: {problems[0]}")
        return not problems

    def _measure_torch(self, candidate: Candidate) -> Iterator[None]:
        """For real: what torch sends does not pass through our worlds."""
        self._tell(candidate.spec)
        _reset_peak(self.world.device)
        strategy: Any = candidate.strategy
        if candidate.spec == DDP and self._has_unused:  # torch would raise in the program
            strategy = replace(strategy, find_unused=True)
        if not self._try(candidate, strategy, lambda: self.world, "not measured"):
            return
        yield
        taken = yield from self._time_steps(_VERIFIED)
        slowest = [max(step) for step in zip(*self.world.gather_objects(taken), strict=True)]
        peak = max(self.world.gather_objects(_read_peak(self.world.device)))
        self._add(candidate, memory_bytes=peak, verified_s=median(slowest))

    def _measure_method(self, candidate: Candidate, share_s: float) -> Iterator[None]:
        """Take a method's steps apart in a silent world; it may use `share_s` of the time that is left."""
        gc.collect()  # its memory is to be its own
        trace = Trace()
        _reset_peak(self.world.device)
        with watched_by(trace):
            fits = self._try(candidate, candidate.for_measuring(), lambda: self._silence(trace), "not for this program")
        if not fits:
            self._go_quiet()
            return
        taken: list[TracedStep] = []
        with watched_by(trace):
            began = time.perf_counter()
            yield
            for _ in range(_count_steps(max(self.world.gather_objects(time.perf_counter() - began)), share_s)):
                self.world.barrier()
                trace.start()
                yield
                self._settle()
                taken.append(trace.stop())
        peak = _read_peak(self.world.device)
        mine = [_to_anatomy(candidate, step, self.world.size, self._bare_s).to_dict() for step in taken]
        everyone = self.world.gather_objects({"steps": mine, "walls": [step.wall_s for step in taken], "peak": peak})
        self._add(candidate, anatomy=_choose_anatomy(everyone), memory_bytes=max(each["peak"] for each in everyone))

    def _verify(self) -> Iterator[None]:
        """For real, in turn; the first step after each change does not count."""
        first = choose(self.measured, self.settings.allow).ranked[: self.settings.verify]
        chosen = self.world.broadcast_object([row.spec for row in first])
        taken: dict[str, list[float]] = {spec: [] for spec in chosen}
        noises: list[tuple[float, float]] = []  # and signals
        for turn in range(_ROUNDS):
            for spec in chosen:
                self._tell(f"verifying {spec} ({turn + 1} of {_ROUNDS})")
                self.replica.replace(lambda spec=spec: self._bind(build(spec, kind="strategy"), self.world))  # type: ignore[misc]
                noise = self.replica.inner.noise
                if noise is not None:  # in this step, which is not timed
                    noise.every = 1
                yield
                if noise is not None:
                    noise.every = _NEVER
                    noises.append(noise.read())
                every = self.replica.inner.strategy.pattern().every
                taken[spec] += yield from self._time_steps(max(_VERIFIED, every))
        everyone = self.world.gather_objects(taken)
        sums = self.world.gather_objects([sum(column) for column in zip(*noises, strict=True)])
        if noises:
            self.measured.noise_batches = divide_noise(*(sum(column) for column in zip(*sums, strict=True)))
        for spec in chosen:
            slowest = [max(step) for step in zip(*(each[spec] for each in everyone), strict=True)]
            seconds = sum(slowest) / len(slowest) if build(spec).pattern().every > 1 else median(slowest)
            self.measured.methods = [
                replace(m, verified_s=seconds) if m.spec == spec else m for m in self.measured.methods
            ]

    def _look_at_memory(self) -> None:
        """Find out how much memory a worker has and, if that is short, which settings of `un.memory` fit."""
        boots = self.world.gather_objects(read_boot_id())
        each = host_bytes() // boots.count(read_boot_id())
        if self.world.device.type == "cuda":
            each = self.measured.device_bytes = torch.cuda.get_device_properties(self.world.device).total_memory
        self.measured.host_bytes = host_bytes()
        if self.world.rank == 0 and self.measured.memory_bytes > _SHORT * each:
            report = memory(self.model, self.optimizer, workers=self.world.size, host_memory=self.measured.host_bytes)
            self.measured.settings = list(report.fits())

    def _look_at_stages(self) -> None:
        """Measure parts of the model on one rank, so that meshes can be priced."""
        if self.world.rank == 0 and self._example is not None:
            self._tell("stages")
            self.measured.stages = measure_stages(self.model, self._example, self.world.size)
            self.measured.tensor = measure_tensor(self.model, self._example, self.world.size)
        self._example = None

    # Between steps -----------------------------------------------------------------------------------------------

    def _bind(self, strategy: Strategy, world: World) -> Replica:
        """Begin with a method where the snapshot was taken."""
        inner = self.replica.inner
        if not inner.is_closed:
            inner.restore()
            inner.close()
            if inner.world is not self.world:
                inner.world.close()
        assert self._snapshot is not None, "taken before any method is bound"
        values, state = self._snapshot
        with torch.no_grad():
            mine = self.model.state_dict()
            for name, value in values.items():
                mine[name].copy_(value)
        self.optimizer.load_state_dict(copy.deepcopy(state))
        self.optimizer.zero_grad(set_to_none=True)
        replica = strategy.bind(self.model, self.optimizer, world)
        if inner.scaler is not None:
            replica.watch(inner.scaler)
        return replica

    def _go_quiet(self) -> None:
        """Bind a world of one, in which nothing is exchanged until the next method."""
        quiet: Strategy = build("allreduce", kind="strategy")
        self.replica.replace(lambda: self._bind(quiet, World(device=self.world.device)))

    def _silence(self, trace: Trace) -> World:
        """A copy of this world in which messages take no time; `trace` hears of every operation."""
        real, name = self.world, self.world.transport.name if self.world.transport is not None else ""
        how: Any = {"hosts": real.hosts, "by_messages": name == "messages", "posts": name == "shared memory"}
        make = partial(SilentTransport, real.rank, real.size, trace.listen, **how)
        options: Any = {"device": real.device, "hosts": real.hosts, "ledger": Ledger(real.rank), "name": "silent"}
        return World(make(), accelerated=make() if real.has_nccl else None, **options)

    def _add(self, candidate: Candidate, **found: Any) -> None:
        known = MeasuredMethod(candidate.spec, candidate.convergence, learning=candidate.learning)
        self.measured.methods.append(replace(known, **found))

    def _settle(self) -> None:
        if self.world.device.type == "cuda":
            torch.cuda.synchronize(self.world.device)

    def _tell(self, what: str) -> None:
        """Tell where the measurement stands: on a terminal one line, which the next one overwrites."""
        if self.world.rank == 0 and sys.stderr.isatty():
            print(f"\r\033[Kunisono plan: {what}" if what else "\r\033[K", end="", file=sys.stderr, flush=True)
        elif self.world.rank == 0 and what:
            print(f"unisono plan: {what}", file=sys.stderr)


def _count_steps(step_s: float, share_s: float) -> int:
    """How many steps are measured where one takes so long, and the method may take `share_s` with the first one.

    >>> [_count_steps(seconds, 1.0) for seconds in (0.01, 0.15, 0.25, 2.0)]
    [8, 5, 3, 1]
    """
    return min(_MOST_TRACED, max(1, int(min(_ENOUGH_S, share_s - step_s) / step_s)))


def _to_anatomy(candidate: Candidate, step: TracedStep, ranks: int, bare_s: float) -> Anatomy:
    """Where an exchange comes in one step of several, what the program does for it comes as seldom."""
    compute_s, jobs = step.compute_s, step.jobs
    pattern = candidate.pattern
    if pattern.every > 1:
        compute_s = min(compute_s, bare_s + max(0.0, compute_s - bare_s) / pattern.every)
        jobs = tuple(replace(job, ready_s=min(job.ready_s, compute_s), due_s=min(job.due_s, compute_s)) for job in jobs)
    return Anatomy(candidate.spec, ranks, compute_s, jobs, every=pattern.every, kind=pattern.kind)


def _choose_anatomy(everyone: list[dict[str, Any]]) -> Anatomy:
    """In each step the slowest rank holds up the others: of these, the step of middle length."""
    steps = range(len(everyone[0]["walls"]))
    slowest = {i: max(everyone, key=lambda each, i=i: each["walls"][i]) for i in steps}  # type: ignore[misc]
    middle = sorted(steps, key=lambda i: slowest[i]["walls"][i])[len(steps) // 2]
    chosen = Anatomy.from_dict(slowest[middle]["steps"][middle])
    samples = tuple(step["compute_s"] for each in everyone for step in each["steps"])
    return replace(chosen, samples_s=samples)


# Memory -----------------------------------------------------------------------------------------------------------


def _reset_peak(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return
    with suppress(OSError):  # then the peak of the whole run is shown
        Path("/proc/self/clear_refs").write_text("5")


def _read_peak(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) << 10
    return 0


# In a worker of `unisono plan` ----------------------------------------------------------------------------------------

_plans: list[MeasurementPlan] = []


def bind(model: nn.Module, optimizer: Optimizer, strategy: Strategy, world: World) -> Replica:
    """What `un.parallel` calls: the program trains on, and its steps are used to measure."""
    settings = PlanSettings(**read_observer_settings())
    if _plans:
        raise RuntimeError(
            "unisono plan: the program calls un.parallel a second time, and a plan is for one model: plan each by a "
            "script of its own"
        )
    # In a silent world the others count as equal to this rank.
    warnings.filterwarnings("ignore", message="the ranks train on the same samples")
    own = describe(strategy)
    also = [*([own] if "..." not in own else []), DDP] if not settings.methods else []
    candidates = find_candidates(settings.methods, also, ranks=world.size)
    needed = steps_needed(sum(not candidate.unpredicted for candidate in candidates), settings.verify)
    plan = MeasurementPlan(
        model,
        optimizer,
        world,
        candidates,
        settings,
        own=own,
        finished=lambda: _end(plan),
    )
    _plans.append(plan)
    if world.rank == 0:
        atexit.register(_write_unfinished, plan, needed)
        _write(settings.file, {"state": "bound"})
    return plan.replica


def _end(plan: MeasurementPlan) -> None:
    """Hand over what was measured, and end the program."""
    if plan.world.rank == 0:
        atexit.unregister(_write_unfinished)
        _hand_over(plan)
    plan.world.barrier()
    raise SystemExit(0)


def _write_unfinished(plan: MeasurementPlan, needed: int) -> None:
    """The program has ended by itself: what there is."""
    if plan.is_comparing:
        plan.measured.methods.append(
            MeasuredMethod(DDP, Convergence("exact", ""), why="not measured: the program ended in it")
        )
    else:
        plan.measured.unfinished = (
            f"the program ended after {plan.measured.steps} optimizer steps, and the plan needs {needed}: give it more "
            "(more epochs, or more data), or fewer --methods"
        )
    _hand_over(plan)


def _hand_over(plan: MeasurementPlan) -> None:
    """To the command: by a file where there is its folder, else as text, as from another host."""
    measured, settings = plan.measured, plan.settings
    if not _write(settings.file, {"state": "measured", "measured": measured.to_dict()}):
        print(write_report(measured, choose(measured, settings.allow)), flush=True)


def _write(file: str, what: dict[str, Any]) -> bool:
    if not file or not Path(file).parent.is_dir():
        return False
    Path(file).write_text(json.dumps(what))
    return True
