"""Runs a user's script until its first optimizer step, on parameters that hold no memory.

The script is given a world of N workers of which only one exists, so that its batches are one worker's. Its data is
real; every parameter becomes a fake as soon as a module has it, and whatever is computed from one is fake too.
"""

from __future__ import annotations

import itertools
import os
import runpy
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, redirect_stdout
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from unisono.methods.hybrid import Mesh
from unisono.methods.hybrid.axes import AXES, choose_sizes
from unisono.methods.strategy import Replica, Strategy, binding
from unisono.predict.footprint.facts import MeshShare, estimate_from, find_facts, format_error
from unisono.predict.footprint.memory_report import MemoryReport, find_capacity
from unisono.predict.footprint.trace import LiveBytes, make_fake, make_fake_mode
from unisono.world import World, enter
from unisono.world.virtual import simulate

MOST_STEPS_ALONE = 10  # optimizer steps that a script may make before it calls un.parallel (to prepare something, say)


class ScriptError(RuntimeError):
    """A script from which nothing could be learned; the message says why and what to do."""


class StepsAlone(BaseException):
    """Ends a script that trains without un.parallel, perhaps for ever. No Exception: the script would catch it."""

    def __init__(self) -> None:
        super().__init__(
            f"the script made {MOST_STEPS_ALONE} optimizer steps without calling un.parallel(model, optimizer, ...), "
            "and was ended: nothing would be trained together. Add the call (un.Trainer makes it too); where the "
            "script decides by its environment whether it trains together, look there: RANK, WORLD_SIZE and the like "
            "are set as a worker has them"
        )


class Enough(BaseException):
    """Ends the script: all is known. No Exception, so that the script does not catch it."""


def predict_for_script(
    program: str,
    arguments: Sequence[str] = (),
    *,
    workers: int = 1,
    module: bool = False,
    workers_per_host: int | None = None,
    mesh: Mapping[str, int] | None = None,
    microbatches: int | None = None,
    schedule: str = "1F1B",
    device_memory: str | int | None = None,
    host_memory: str | int | None = None,
    disk: str | int | Path | None = None,
) -> MemoryReport:
    """`un.memory` for the model, optimizer and batches of a script that calls `un.parallel`.

    The script runs in this process, with `arguments` as its own, up to its first optimizer step. Where it does not
    run on fake tensors that far, activations are left out of the numbers, and the report says so. `mesh`: what a worker
    of {"data": 2, "pipeline": 2} has of it; the script may use a mesh itself, or data parallelism alone.
    """
    asked = {name: (mesh or {}).get(name) for name in AXES}
    sizes = choose_sizes(workers, **asked) if workers > 1 else (1, 1, 1)
    there = find_capacity(device_memory, host_memory, disk, workers=min(workers, workers_per_host or workers))
    left_out: list[str] = []
    per_host = min(sizes[0], workers_per_host or sizes[0])
    run = _ScriptRun(sizes[0], per_host)
    error = run.run_script(program, arguments, module=module, mode=make_fake_mode())
    if run.model is None and error is not None and not isinstance(error, SystemExit | StepsAlone):
        first = error
        run = _ScriptRun(sizes[0], per_host, stop_at_parallel=True)  # with memory, but no further than the model
        error = run.run_script(program, arguments, module=module, mode=None)
        left_out.append(f"activations: on fake tensors the script failed before un.parallel ({format_error(first)})")
    if run.model is None or run.optimizer is None:
        raise ScriptError(_explain_no_model(program, error)) from error
    step_memory = None
    if run.has_stepped:
        step_memory = estimate_from(run.watch.peaks)
    elif not left_out:
        why = f"the script failed before its first optimizer step ({format_error(error)})" if error is not None else ""
        left_out.append(f"activations: {why or 'the script ended without an optimizer step'}")
    backwards = max(run.watch.backwards.values(), default=1)
    micro = microbatches or (run.microbatches if run.microbatches > 1 else max(4, sizes[2]))
    share = MeshShare(sizes[1], sizes[2], micro, schedule, traced=run.microbatches)
    facts, more = find_facts(run.model, run.optimizer, share, step_memory=step_memory, backwards=backwards)
    title = f"{program}, {type(run.model).__name__}"
    return MemoryReport(facts, there, workers, (*left_out, *more), title=title, mesh=(sizes[1], sizes[2]))


class _ScriptRun:
    """One run of a script up to its first optimizer step; what it gave to un.parallel, and how far it got."""

    def __init__(self, workers: int, per_host: int, *, stop_at_parallel: bool = False) -> None:
        self.workers, self.per_host, self.stop_at_parallel = workers, per_host, stop_at_parallel
        self.model: nn.Module | None = None
        self.optimizer: Optimizer | None = None
        self.microbatches = 1  # of its pipeline
        self.has_stepped = False
        self.watch = LiveBytes("cpu", counting=False)

    def run_script(
        self, program: str, arguments: Sequence[str], *, module: bool, mode: FakeTensorMode | None
    ) -> BaseException | None:
        """Run the script; returns the error that ended it, if any."""
        world = simulate(self.workers, per_host=self.per_host)
        if torch.cuda.is_available():
            world.device = torch.device("cuda")
        with ExitStack() as stack:
            stack.enter_context(pose_as_worker(program, arguments, world, self._observe_parallel, module=module))
            if mode is not None:
                stack.enter_context(_make_parameters_fake(mode))
                stack.enter_context(torch.compiler.set_stance("force_eager"))
                stack.enter_context(self.watch)
            return run_program(program, module=module)

    def _observe_parallel(self, model: nn.Module, optimizer: Optimizer, strategy: Strategy, world: World) -> Replica:
        """Called by un.parallel in place of binding the strategy: note model and optimizer, and watch the step."""
        if self.model is not None:  # a second model: only the first counts
            return Replica(model, optimizer, world, strategy)
        self.model, self.optimizer = model, optimizer
        if isinstance(world.axes, Mesh):
            self.microbatches = world.axes.count_microbatches(model)
        if self.stop_at_parallel:
            raise Enough
        self.watch.device = next(model.parameters()).device.type
        self.watch.counting = True
        self.watch.follow(model.parameters())
        observer = _Observer(model, optimizer, world, strategy)
        observer.run = self
        return observer


class _Observer(Replica):
    """A replica that exchanges nothing, and ends the run when the optimizer is about to step."""

    run: _ScriptRun

    def before_step(self) -> None:
        self.run.has_stepped = bool(self.run.watch.backwards)
        self.run.watch.finish()
        raise Enough

    def sync(self) -> None:
        """The gradients are as they should be; the step is still to come."""


def run_program(program: str, *, module: bool) -> BaseException | None:
    """Run a script or a module as the main program, inside `pose_as_worker`; returns the error that ended it, if any.
    Python's own exit and the end of training alone (`StepsAlone`) count as errors here, `Enough` does not."""
    try:
        if module:
            runpy.run_module(program, run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(program, run_name="__main__")
    except Enough:
        return None
    except (Exception, SystemExit, StepsAlone) as error:
        return error
    return None


def _explain_no_model(program: str, error: BaseException | None) -> str:
    if isinstance(error, StepsAlone):
        return f"{program}: {error}"
    if isinstance(error, SystemExit) and error.code not in (None, 0):
        return f"{program} ended with status {error.code} before it called un.parallel; see its own message above"
    if error is not None and not isinstance(error, SystemExit):
        return f"{program} failed before it called un.parallel: {format_error(error)}"
    return (
        f"{program} ended without calling un.parallel(model, optimizer, ...), from which model and optimizer are "
        "learned. Add the call (un.Trainer makes it too), or use un.memory(model, optimizer, ...) in a program"
    )


@contextmanager
def pose_as_worker(
    program: str, arguments: Sequence[str], world: World, observer: Callable[..., Replica], *, module: bool
) -> Iterator[None]:
    """Inside, this process is as a worker of `world` that runs the program, and the only one there is.

    - arguments, import path and the environment are as the program would find them; what it prints goes to stderr;
    - `un.join()` gives `world`, and a process group of torch's that the program makes sends nothing;
    - `un.parallel` hands what it was given to `observer`; a program that trains without it is ended (`StepsAlone`).
    """
    argv, path, environment = sys.argv, list(sys.path), dict(os.environ)
    sys.argv = [program, *arguments]
    sys.path.insert(0, os.getcwd() if module else str(Path(program).resolve().parent))
    hosts = list(dict.fromkeys(world.hosts))
    os.environ |= {  # as a launcher tells a worker its rank and world
        "RANK": str(world.rank),
        "WORLD_SIZE": str(world.size),
        "LOCAL_RANK": str(world.local_rank),
        "LOCAL_WORLD_SIZE": str(world.local_size),
        "GROUP_RANK": str(hosts.index(world.host)),
        "GROUP_WORLD_SIZE": str(len(hosts)),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29500",  # nobody listens there, and nobody is asked
    }
    steps = itertools.count(1)

    def count_step(*_: Any) -> None:
        if next(steps) >= MOST_STEPS_ALONE:
            raise StepsAlone

    def bind(*given: Any) -> Replica:
        counting.remove()
        return observer(*given)

    counting = register_optimizer_step_post_hook(count_step)
    make_group = torch.distributed.init_process_group if torch.distributed.is_available() else None
    enter(world)
    binding.observer = bind
    if make_group is not None:
        torch.distributed.init_process_group = partial(_make_silent_group, make_group, world)
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        counting.remove()
        if make_group is not None:
            torch.distributed.init_process_group = make_group
            if torch.distributed.is_initialized() and torch.distributed.get_backend() == "fake":
                torch.distributed.destroy_process_group()
        binding.observer = None
        enter(None)
        world.close()
        os.environ.clear()
        os.environ.update(environment)
        sys.argv, sys.path[:] = argv, path


def _make_silent_group(make: Callable[..., None], world: World, *_: Any, **__: Any) -> None:
    """In the place of torch's `init_process_group`, which would wait for workers that do not exist."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    make("fake", store=FakeStore(), rank=world.rank, world_size=world.size)


@contextmanager
def _make_parameters_fake(mode: FakeTensorMode) -> Iterator[None]:
    """Inside, parameters become fake tensors when a module registers them."""
    register, apply = nn.Module.register_parameter, nn.Module._apply

    def register_fake(self: nn.Module, name: str, param: Any) -> None:
        if isinstance(param, nn.Parameter) and not isinstance(param, FakeTensor) and not is_lazy(param):
            twin = getattr(param, "_fake", None)  # a parameter of two modules stays one
            if twin is None:
                twin = nn.Parameter(make_fake(param, mode), requires_grad=param.requires_grad)
                param._fake = twin  # type: ignore[attr-defined]
            param = twin
        register(self, name, param)

    nn.Module.register_parameter = register_fake  # type: ignore[method-assign]
    nn.Module._apply = _apply_to_fakes  # type: ignore[method-assign]
    FakeTensor.__deepcopy__ = _copy_fake  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]
        nn.Module._apply = apply  # type: ignore[method-assign]
        del FakeTensor.__deepcopy__


def _apply_to_fakes(self: nn.Module, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> nn.Module:
    """`model.to(...)` and the like: torch's own cannot exchange a fake that something refers to weakly."""
    for child in self.children() if recurse else ():
        child._apply(fn)
    for param in self._parameters.values():
        if param is not None:
            with torch.no_grad():
                moved = fn(param)
            if moved is not param:
                param.data = moved
            if isinstance(param, FakeTensor) and isinstance(moved, FakeTensor):
                param.fake_device = moved.fake_device
    for name, buffer in self._buffers.items():
        if buffer is not None:
            self._buffers[name] = fn(buffer)
    return self


def _copy_fake(self: FakeTensor, memo: dict[int, Any]) -> Any:
    """`copy.deepcopy` of a module: torch's own asks for the address of a tensor, and a fake has none."""
    if id(self) not in memo:
        twin: torch.Tensor = self.detach().clone()
        memo[id(self)] = nn.Parameter(twin, self.requires_grad) if isinstance(self, nn.Parameter) else twin
    return memo[id(self)]
