"""`un.split_stages`: a model cut into stages of about equal cost, as measured; names stay those of the model.

The model's forward is traced (torch.fx), where each layer is one step: children of the model, and the elements of its
lists of layers. A cut lies between two steps. What later steps need of earlier ones is handed from stage to stage.
"""

from __future__ import annotations

import operator
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, fx, nn

from unisono.world import World

__all__ = ["StepCosts", "cut_evenly", "measure_steps", "split_stages"]

_RUNS, _MOST_RUNS, _ENOUGH_S = 5, 30, 0.3  # of which the fastest counts; of a small model more, for so long
_TURN = threading.Lock()  # torch.fx follows every module that is called meanwhile, also in a thread of another rank
_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


def split_stages(
    model: nn.Module, example: Any, stages: int, *, costs: Sequence[float] | None = None, world: World | None = None
) -> list[fx.GraphModule]:
    """Cut `model` into `stages` modules, each of which takes the previous one's output.

    `example` is what the model is called with: a tensor, or a tuple of arguments; a microbatch. Every step of forward
    is run with it, forward and backward, and timed; the cuts make the slowest stage as fast as possible. `costs` (one
    for each step that takes part, see `list_steps`) replaces the measurement. With `world`, rank 0's times are
    everyone's. As many stages as possible get parameters that learn, because an optimizer needs at least one.

    The stages share the model's layers and parameters, under the same names.

    >>> first, last = split_stages(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)), torch.ones(2, 4), 2)
    >>> [name for stage in (first, last) for name, _ in stage.named_parameters()]
    ['0.weight', '0.bias', '2.weight', '2.bias']
    """
    counts = costs is None and (world is None or world.rank == 0)  # the others leave it the machine
    measured = _Measuring(model, example, counts=counts)
    steps = measured.steps
    if stages < 1 or stages > len(steps):
        raise ValueError(f"{stages} stages of a model whose forward has {len(steps)} steps: give 1 to {len(steps)}")
    seconds = [measured.seconds[node] for node in steps] if costs is None else list(costs)
    if len(seconds) != len(steps):
        raise ValueError(f"{len(seconds)} costs for {len(steps)} steps of forward: {', '.join(n.name for n in steps)}")
    if world is not None and costs is None:
        seconds = world.broadcast_object(seconds)
    allowed = measured.find_cuts()
    if len(allowed) < stages - 1:
        raise ValueError(
            f"{stages} stages need {stages - 1} places to cut, and forward has {len(allowed)} at which "
            "only tensors with gradients are passed on"
        )
    cuts = cut_evenly(seconds, stages, allowed, learning=[_learns(node, model) for node in steps])
    bounds = [0, *cuts, len(steps)]
    made = [_make_stage(model, measured, a, b) for a, b in pairwise(bounds)]
    _refuse_shared(made)
    return made


@dataclass(frozen=True)
class StepCosts:
    """The steps of a model's forward: seconds of each, forward and backward; where stages may begin, and the bytes that
    go from one to the other there."""

    seconds: list[float]
    cuts: dict[int, int]

    def divide(self, stages: int) -> tuple[list[float], list[int]] | None:
        """Each stage's part of the cost and the bytes between them, cut as evenly as can be; None: there are too few
        places to cut."""
        if len(self.cuts) < stages - 1 or not sum(self.seconds):
            return None
        cuts = cut_evenly(self.seconds, stages, sorted(self.cuts))
        sums = [sum(self.seconds[a:b]) for a, b in pairwise([0, *cuts, len(self.seconds)])]
        return [one / sum(sums) for one in sums], [self.cuts[cut] for cut in cuts]


def measure_steps(model: nn.Module, example: Any) -> StepCosts:
    """What `split_stages` measures, without cutting."""
    measured = _Measuring(model, example)
    live = {i: measured.find_live(i) for i in measured.find_cuts()}
    nbytes = {i: sum(measured.values[node].nbytes for node in nodes) for i, nodes in live.items()}
    return StepCosts([measured.seconds[node] for node in measured.steps], nbytes)


def _refuse_shared(stages: Sequence[nn.Module]) -> None:
    """Refuse a parameter that two stages use: each would have a gradient of its own."""
    seen: dict[nn.Parameter, int] = {}
    for number, stage in enumerate(stages):
        for name, param in stage.named_parameters():
            if seen.setdefault(param, number) != number:
                raise ValueError(
                    f"{name!r} would be in stages {seen[param]} and {number}, each with a gradient of its own: do not "
                    "share it between layers that far apart, or take fewer stages"
                )


class _Tracer(fx.Tracer):
    """Goes into containers and torch's own encoder: every other module is one step, whatever its forward does."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return not isinstance(m, _CONTAINERS)

    def call_module(self, m: nn.Module, forward: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if isinstance(m, nn.TransformerEncoder):
            return _encode(m, *args, **kwargs)
        return super().call_module(m, forward, args, kwargs)


def _encode(
    encoder: nn.TransformerEncoder, src: Any, mask: Any = None, src_key_padding_mask: Any = None, is_causal: Any = None
) -> Any:
    """What the encoder does with its layers, but for its shortcuts."""
    for layer in encoder.layers:
        src = layer(src, src_mask=mask, src_key_padding_mask=src_key_padding_mask, is_causal=bool(is_causal))
    return src if encoder.norm is None else encoder.norm(src)


def _trace(model: nn.Module) -> fx.Graph:
    inner = getattr(model, "_orig_mod", model)
    try:
        return _Tracer().trace(inner)
    except Exception as error:  # a forward may raise anything when it is traced
        raise ValueError(
            f"the forward of {type(model).__name__} cannot be followed ({type(error).__name__}: {error}): it may call "
            "layers and torch's functions, without branches on values or shapes. Give an nn.Sequential of your blocks, "
            "or cut it yourself and give torch's schedules the stages"
        ) from error


class _Measuring(fx.Interpreter):
    """Follows a model's forward, runs every step of it with an example, forward and backward, and keeps the fastest
    time of each and its value."""

    def __init__(self, model: nn.Module, example: Any, *, counts: bool = True) -> None:
        """`counts`: its times do; else it runs as often as is needed to know what is drawn anew each time."""
        with _TURN:
            super().__init__(fx.GraphModule(model, _trace(model)))
            self._measure(example if isinstance(example, tuple) else (example,), counts=counts)

    def _measure(self, args: tuple[Any, ...], *, counts: bool) -> None:
        module = self.module
        self.steps = [n for n in self.graph.nodes if n.op not in ("placeholder", "output", "get_attr")]
        self.seconds: dict[fx.Node, float] = {}
        self.values: dict[fx.Node, Any] = {}
        self.fixed: set[fx.Node] = set()  # whose value depends on the shapes of the inputs alone
        states = {name: buffer.clone() for name, buffer in module.named_buffers()}
        with torch.random.fork_rng(devices=[]):  # dropout, say
            began, runs = time.perf_counter(), 0
            least, most = (_RUNS, _MOST_RUNS) if counts else (2, 2)
            while runs < least or (runs < most and time.perf_counter() - began < _ENOUGH_S):
                self.run(*args)
                runs += 1
        with torch.no_grad():
            for name, buffer in module.named_buffers():
                buffer.copy_(states[name])

    def run_node(self, n: fx.Node) -> Any:
        value, before = self._run_node(n), self.values.get(n)
        asked = n.target is getattr or (n.op == "call_method" and n.target in ("size", "dim", "numel"))
        inputs = n.all_input_nodes
        if n.op in ("call_function", "call_method") and (asked or all(x in self.fixed for x in inputs)):
            if before is None or _is_same(before, value):
                self.fixed.add(n)
            else:  # drawn anew each time
                self.fixed.discard(n)
        self.values[n] = value
        return value

    def _run_node(self, n: fx.Node) -> Any:
        if n.op in ("placeholder", "output", "get_attr"):
            return super().run_node(n)
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        args = fx.node.map_aggregate(args, _detach)
        start = time.perf_counter()
        value = getattr(self, n.op)(n.target, args, kwargs)
        if isinstance(value, Tensor) and value.requires_grad:
            inputs = [x for x in [*args, *kwargs.values()] if isinstance(x, Tensor) and x.requires_grad]
            params = list(self.fetch_attr(str(n.target)).parameters()) if n.op == "call_module" else []
            wanted = [x for x in (*inputs, *params) if x.requires_grad]
            torch.autograd.grad(value.sum(), wanted, retain_graph=True, allow_unused=True)
        seconds = time.perf_counter() - start
        self.seconds[n] = min(seconds, self.seconds.get(n, seconds))
        return value

    def find_cuts(self) -> list[int]:
        """Before which steps a stage can begin: what it needs of earlier ones are tensors with gradients (inputs of the
        model go to the first stage alone)."""
        found = []
        for at in range(1, len(self.steps)):
            live = self.find_live(at)
            values = [self.values[node] for node in live]
            inputs = any(node.op == "placeholder" for node in live)
            if not inputs and all(isinstance(x, Tensor) and x.requires_grad for x in values):
                found.append(at)
        return found

    def find_live(self, at: int) -> list[fx.Node]:
        """What was made before step `at` and is needed from it on; parameters, and what depends on shapes alone (a
        mask, say), are not handed over."""
        later = set(self.steps[at:]) | {node for node in self.graph.nodes if node.op == "output"}
        made = [node for node in self.graph.nodes if node.op == "placeholder"] + self.steps[:at]
        later -= self.fixed
        return [node for node in made if node not in self.fixed and any(user in later for user in node.users)]


def _is_same(a: Any, b: Any) -> bool:
    return bool(torch.equal(a, b)) if isinstance(a, Tensor) and isinstance(b, Tensor) else bool(a == b)


def _detach(x: Any) -> Any:
    if isinstance(x, Tensor) and x.requires_grad and not isinstance(x, nn.Parameter):
        return x.detach().requires_grad_()
    return x


def _learns(step: fx.Node, model: nn.Module) -> bool:
    """Whether a step has parameters that learn: those of its module, or such that it is given."""
    if step.op == "call_module":
        params: list[Any] = list(model.get_submodule(str(step.target)).parameters())
    else:
        params = [operator.attrgetter(str(x.target))(model) for x in step.all_input_nodes if x.op == "get_attr"]
    return any(isinstance(x, nn.Parameter) and x.requires_grad for x in params)


def cut_evenly(
    costs: Sequence[float],
    parts: int,
    allowed: Sequence[int] | None = None,
    *,
    learning: Sequence[bool] | None = None,
) -> list[int]:
    """Where to cut a line of costs (before which numbers) so that the largest part is smallest; where several are as
    good, the first cuts are the earliest. First of all, few parts have none that is `learning`.

    >>> cut_evenly([1, 1, 1, 3, 1, 1], 2)
    [3]
    """
    learning = [True] * len(costs) if learning is None else learning
    places = list(range(1, len(costs)) if allowed is None else allowed)
    ends = [0, *places, len(costs)]
    sums = [0.0]
    for cost in costs:
        sums.append(sums[-1] + cost)
    # For each number of parts and place where the last one ends: parts that do not learn, the largest, its beginning.
    best: list[dict[int, tuple[int, float, int]]] = [{0: (0, 0.0, -1)}]
    for part in range(1, parts + 1):
        best.append({})
        for j in range(part, len(ends)):
            best[part][j] = min(
                (idle + (not any(learning[ends[i] : ends[j]])), max(largest, sums[ends[j]] - sums[ends[i]]), i)
                for i, (idle, largest, _) in best[part - 1].items()
                if i < j
            )
    cuts, j = [], len(ends) - 1
    for part in range(parts, 1, -1):
        j = best[part][j][2]
        cuts.append(ends[j])
    return cuts[::-1]


def _make_stage(model: nn.Module, measured: _Measuring, start: int, stop: int) -> fx.GraphModule:
    """The steps from `start` to `stop` as a module with the model's names."""
    graph, steps = measured.graph, measured.steps
    made, copies = fx.Graph(), {}  # type: tuple[fx.Graph, dict[fx.Node, fx.Node]]
    constants: dict[str, Tensor] = {}
    given = measured.find_live(start) if start else [n for n in graph.nodes if n.op == "placeholder"]
    for node in given:
        copies[node] = made.placeholder(node.name)

    def find(node: fx.Node) -> Any:
        if node in copies:
            return copies[node]
        if node.op == "get_attr":
            copies[node] = made.node_copy(node)
        elif isinstance(value := measured.values[node], Tensor):
            constants[f"constant_{node.name}"] = value.detach()
            copies[node] = made.get_attr(f"constant_{node.name}")
        else:
            return value
        return copies[node]

    for node in steps[start:stop]:
        if start and node in measured.fixed:
            continue  # it may need what only the first stage has
        for needed in node.all_input_nodes:
            find(needed)  # before it, in the order of the graph
        copies[node] = made.node_copy(node, find)
    if stop < len(steps):
        out: Any = tuple(copies[node] for node in measured.find_live(stop))
        made.output(out[0] if len(out) == 1 else out)
    else:
        end = next(node for node in graph.nodes if node.op == "output")
        made.output(fx.node.map_arg(end.args[0], find))
    for name, value in constants.items():
        model.register_buffer(name, value, persistent=False)
    stage = fx.GraphModule(model, made)
    for name, value in constants.items():
        delattr(model, name)
        stage.register_buffer(name, value, persistent=False)
    made.lint()
    return stage
