"""`un.tensor_plan`: which layers are split over the tensor axis, and how: torch's plan for `parallelize_module`.

A pair of layers is split by columns and then by rows, so that one sum over the ranks follows both. Whether a module can
be split so is tried, not guessed: its own forward runs on each part, and the parts have to add up to the whole.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from unisono.text_table import format_rows

__all__ = ["TensorPlan", "tensor_plan"]

_LAST = ("o", "o_proj", "out", "out_proj", "wo", "proj", "c_proj", "dense", "w2", "down", "down_proj", "fc2")
_HEADS = ("head", "lm_head", "output", "decoder", "fc_out", "classifier")
_ENCODERS = (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)


class TensorPlan(dict[str, Any]):
    """torch's plan, by the names of modules. `reasons` says why each is split so, and why others are not.

    It is a dict: `plan.pop("head")` leaves a layer whole, `plan["head"] = ColwiseParallel()` splits one.
    """

    def __init__(self) -> None:
        super().__init__()
        self.reasons: dict[str, str] = {}

    def __str__(self) -> str:
        """A line for each module."""
        rows = [(name, _name_style(self.get(name)), why) for name, why in self.reasons.items()]
        return "\n".join(format_rows(rows, left=(0, 1, 2)))


def tensor_plan(model: nn.Module, *, ranks: int = 2) -> TensorPlan:
    """Propose how `model` is split over a tensor axis of `ranks`.

    Linear layers that follow each other in a module (an MLP; query, key, value and output of attention), the two of
    torch's transformer layers, embeddings, and the last layer. Print it to see the reasons; change it as a dict.

    >>> print(tensor_plan(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))))
    0  by columns  its parts go into 2, tried on 2 ranks
    2  by rows     adds up the parts of 0
    """
    plan = TensorPlan()
    tied = _find_tied(model)
    tried: dict[Any, str] = {}
    for name, module in model.named_modules():
        if isinstance(module, _ENCODERS):
            _plan_encoder(plan, name, module, ranks, tied)
        elif isinstance(module, nn.MultiheadAttention):
            plan.reasons[name] = "torch keeps query, key and value in one parameter: it stays whole"
        else:
            _plan_pairs(plan, name, module, ranks, tied, tried)
    for name, module in model.named_modules():
        if name not in plan.reasons and isinstance(module, nn.Embedding):
            _plan_embedding(plan, name, module, ranks, tied)
        elif name not in plan.reasons and isinstance(module, nn.Linear):
            _plan_single(plan, name, module, ranks, tied)
    order = [name for name, _ in model.named_modules() if name in plan.reasons]
    plan.reasons = {name: plan.reasons[name] for name in order}
    return plan


def _find_tied(model: nn.Module) -> set[Tensor]:
    """Parameters that several modules share: torch would split each use by itself."""
    seen: dict[Tensor, int] = {}
    for module in model.modules():
        for param in module.parameters(recurse=False):
            seen[param] = seen.get(param, 0) + 1
    return {param for param, uses in seen.items() if uses > 1}


def _plan_encoder(plan: TensorPlan, name: str, layer: Any, ranks: int, tied: set[Tensor]) -> None:
    first, last = _join(name, "linear1"), _join(name, "linear2")
    if layer.linear1.out_features % ranks or _is_tied([layer.linear1, layer.linear2], tied):
        plan.reasons[first] = f"{layer.linear1.out_features} columns do not divide by {ranks}, or it is shared"
        return
    _add_pair(plan, [first], last, f"its parts go into {last}: torch's own transformer layer")


def _plan_pairs(
    plan: TensorPlan, name: str, module: nn.Module, ranks: int, tied: set[Tensor], tried: dict[Any, str]
) -> None:
    for firsts, last in _find_pairs(module):
        names, end = [_join(name, n) for n in firsts], _join(name, last)
        layers: list[Any] = [module.get_submodule(n) for n in (*firsts, last)]
        width: int = layers[-1].in_features
        if any(n in plan for n in (*names, end)):
            continue
        if width % ranks:
            plan.reasons[end] = f"its {width} inputs do not divide by {ranks} ranks"
        elif _is_tied(layers, tied):
            plan.reasons[end] = "its parameters are shared with another module: torch would split each separately"
        elif problem := _try_once(tried, module, firsts, last, ranks):
            plan.reasons[end] = problem
        else:
            _add_pair(plan, names, end, f"its parts go into {end}, tried on {ranks} ranks")


def _find_pairs(module: nn.Module) -> Iterator[tuple[list[str], str]]:
    """Linear children that may be split by columns, and the one after them, by rows."""
    linears = {name: child for name, child in module.named_children() if isinstance(child, nn.Linear)}
    if isinstance(module, nn.Sequential):
        names = list(linears)
        for one, two in pairwise(names):
            if linears[one].out_features == linears[two].in_features:
                yield [one], two
        return
    if len(linears) < 2:
        return
    last = next((name for name in _LAST if name in linears), list(linears)[-1])
    width = linears[last].in_features
    firsts = [name for name, child in linears.items() if name != last and child.out_features == width]
    if firsts:
        yield firsts, last


def _try_once(tried: dict[Any, str], module: nn.Module, firsts: Sequence[str], last: str, ranks: int) -> str:
    """What `_try_pair` says; of modules of one class with the same settings, the first is tried."""
    plain = {k: v for k, v in vars(module).items() if isinstance(v, bool | int | float | str | tuple)}
    key = (type(module), repr(module), repr(plain), tuple(firsts), last)
    if key not in tried:
        tried[key] = _try_pair(module, firsts, last, ranks)
    return tried[key]


@torch.no_grad()
def _try_pair(module: nn.Module, firsts: Sequence[str], last: str, ranks: int) -> str:
    """Run the module's forward on each part; says what is wrong, or nothing."""
    if isinstance(module, nn.Sequential):
        children = list(module.named_children())
        places = [i for i, (name, _) in enumerate(children) if name in (*firsts, last)]
        module = nn.Sequential()
        for name, child in children[places[0] : places[-1] + 1]:
            module.add_module(name, child)
    whole = _make_trial(module)
    width: int = whole.get_submodule(firsts[0]).in_features  # type: ignore[assignment]
    x = torch.randn(2, 3, width, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    parts = []
    try:
        wanted = _first(whole(x))
        for rank in range(ranks):
            part = copy.deepcopy(whole)
            for name in firsts:
                _cut(part.get_submodule(name), 0, rank, ranks)
            _cut(part.get_submodule(last), 1, rank, ranks)
            parts.append(_first(part(x)))
    except Exception as error:  # a user's forward may raise anything: it is a reason, shown with the plan
        return (
            f"stays whole: forward on a part of {', '.join(firsts)} failed ({type(error).__name__}: "
            f"{str(error).splitlines()[0][:80] if str(error) else ''})"
        )
    bias: Any = whole.get_submodule(last).bias
    total = torch.stack(parts).sum(0) - (0 if bias is None else (ranks - 1) * bias)
    if total.shape != wanted.shape or not torch.allclose(total, wanted, atol=1e-9):
        return f"stays whole: on parts of {', '.join(firsts)}, forward does not add up to the whole (heads as -1?)"
    return ""


def _make_trial(module: nn.Module) -> nn.Module:
    """A copy in fp64; one on the meta device with values of its own, as any will do."""
    made = copy.deepcopy(module).eval()
    if any(x.is_meta for x in (*made.parameters(), *made.buffers())):
        made = made.to_empty(device="cpu")
        for x in made.state_dict().values():
            x.normal_(0.0, 0.1) if x.is_floating_point() else x.zero_()
    return made.to("cpu", torch.float64)


def _first(output: Any) -> Tensor:
    found: Tensor = output[0] if isinstance(output, tuple) else output
    return found


def _cut(layer: Any, dim: int, rank: int, ranks: int) -> None:
    """Keep a rank's rows (0) or columns (1) of a Linear layer."""
    layer.weight = nn.Parameter(layer.weight.chunk(ranks, dim)[rank])
    if dim == 0 and layer.bias is not None:
        layer.bias = nn.Parameter(layer.bias.chunk(ranks)[rank])


def _add_pair(plan: TensorPlan, firsts: Sequence[str], last: str, why: str) -> None:
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

    for name in firsts:
        plan[name] = ColwiseParallel()
        plan.reasons[name] = why
    plan[last] = RowwiseParallel()
    plan.reasons[last] = f"adds up the parts of {', '.join(firsts)}"


def _plan_embedding(plan: TensorPlan, name: str, module: nn.Embedding, ranks: int, tied: set[Tensor]) -> None:
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import RowwiseParallel

    if _is_tied([module], tied):
        plan.reasons[name] = "its parameter is shared with another module: torch would split each separately"
    elif (
        module.num_embeddings % ranks or module.sparse or module.max_norm is not None or module.padding_idx is not None
    ):
        plan.reasons[name] = f"{module.num_embeddings} rows do not divide by {ranks} ranks, or rows are special"
    else:
        plan[name] = RowwiseParallel(input_layouts=Replicate())
        plan.reasons[name] = f"{module.num_embeddings // ranks} of {module.num_embeddings} rows a rank"


def _plan_single(plan: TensorPlan, name: str, module: nn.Linear, ranks: int, tied: set[Tensor]) -> None:
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel

    if name.rpartition(".")[2] not in _HEADS:
        plan.reasons[name] = "no other layer goes with it: it stays whole"
    elif module.out_features % ranks or _is_tied([module], tied):
        plan.reasons[name] = f"{module.out_features} columns do not divide by {ranks} ranks, or it is shared"
    else:
        plan[name] = ColwiseParallel(output_layouts=Replicate())
        plan.reasons[name] = f"{module.out_features // ranks} of {module.out_features} outputs a rank, gathered"


def _is_tied(modules: Sequence[nn.Module], tied: set[Tensor]) -> bool:
    return any(param in tied for module in modules for param in module.parameters())


def _join(name: str, child: str) -> str:
    return f"{name}.{child}" if name else child


def _name_style(style: Any) -> str:
    names = {"ColwiseParallel": "by columns", "RowwiseParallel": "by rows"}
    return "whole" if style is None else names.get(type(style).__name__, type(style).__name__)
