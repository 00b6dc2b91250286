"""How much of a parameter an optimizer has to have for a step: an element, or the whole tensor; and who steps what.

Known by class for torch's own, said by an attribute (`optimizer.whole_tensors = True`), or tried on small tensors: a
matrix stepped whole and as two lines, and two matrices stepped together and each by itself. What steps whole tensors
gives each to one owner; owners have about equal work, by counted operations.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from unisono.methods.joined_optimizers import members_of
from unisono.methods.offload.optimizers import OwnRule, Settings, find_need_of_whole, read_settings

Kind = Literal["elements", "tensors"]
DECLARED = "whole_tensors"  # an attribute of the optimizer, or a key of a group

# An element's step depends on that element alone: a part of a parameter can be stepped by itself.
ELEMENTWISE = {
    *("SGD", "Adam", "AdamW", "NAdam", "RAdam", "Adamax", "Adadelta", "Adagrad", "ASGD", "RMSprop", "Rprop"),
}
TENSORWISE = {"Muon", "Adafactor"}  # of `WHOLE`, those whose step of a tensor needs that tensor alone


def find_kinds(optimizer: Optimizer) -> dict[Any, Kind]:
    """By parameter, what its optimizer needs of it for a step; of one optimizer, or of several that were joined."""
    found: dict[Any, Kind] = {}
    for member in members_of(optimizer):
        for group in member.param_groups:
            kind = find_kind(member, group)
            found |= dict.fromkeys(group["params"], kind)
    return found


def find_kind(optimizer: Optimizer, group: dict[str, Any]) -> Kind:
    """What an optimizer needs for a step of a group's parameters: elements, or whole tensors. Raises ValueError if
    neither will do, or if it cannot be found out."""
    bases = [base.__name__ for base in type(optimizer).__mro__ if base.__module__.startswith("torch.")]
    reason = find_need_of_whole(optimizer)
    if reason and not TENSORWISE & set(bases):
        raise ValueError(
            f"{type(optimizer).__name__} cannot be shared out among workers: {reason}. Use another optimizer (AdamW, "
            "Muon, ...), or the allreduce strategy"
        )
    _check_matrices(bases, group)
    declared = group.get(DECLARED, getattr(optimizer, DECLARED, None))
    if declared is not None:
        if not isinstance(declared, bool):
            raise TypeError(f"{DECLARED} of {type(optimizer).__name__} must be True or False, got {declared!r}")
        return "tensors" if declared else "elements"
    if reason:
        return "tensors"
    if type(optimizer).__name__ in ELEMENTWISE and type(optimizer).__module__.startswith("torch."):
        return "elements"
    rule, settings = OwnRule(optimizer, keeps_attributes=True), read_settings(group)
    kind = _try(rule, settings)
    return "tensors" if kind == "elements" and _keeps_blocks(rule, settings, group["params"]) else kind


def _check_matrices(bases: Sequence[str], group: dict[str, Any]) -> None:
    """torch's own words, which a group that was added later does not get, and what to do."""
    for param in group["params"] if "Muon" in bases else ():
        if param.dim() != 2:
            raise ValueError(
                f"Muon only supports 2D parameters whereas we found a parameter with size: {param.size()}. Give it the "
                "matrices of the hidden layers, and the rest to another: un.parallel(model, [muon, adamw])"
            )


# Trying ---------------------------------------------------------------------------------------------------------------

_SHAPE, _CUT = (4, 6), 7  # a small matrix, and where its line is cut in two
_ROUNDED = 0.05  # of a step, that one in 16 bits may differ by


def _try(rule: OwnRule, group: Settings) -> Kind:
    """Step small tensors on a copy of the optimizer."""
    generator = torch.Generator().manual_seed(0)
    starts = torch.randn(2, *_SHAPE, generator=generator, dtype=torch.float64)
    sizes = ((1.0, 30.0), (100.0, 1.0), (0.01, 3.0))  # of the two gradients: what couples the tensors shows
    grads = [torch.randn(2, *_SHAPE, generator=generator, dtype=torch.float64) for _ in sizes]
    for pair, both in zip(grads, sizes, strict=True):
        pair.mul_(torch.tensor(both, dtype=torch.float64).view(2, 1, 1))
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        try:
            first, second = _run(rule, group, list(starts), [list(pair) for pair in grads])
            alone = [_run(rule, group, [starts[i]], [[pair[i]] for pair in grads])[0] for i in (0, 1)]
        except Exception as error:
            raise _refuse(rule, f"a try on small matrices failed with {type(error).__name__}: {error}") from error
        try:
            line, lines = starts[0].flatten(), [pair[0].flatten() for pair in grads]
            parts = [_run(rule, group, [line[cut]], [[g[cut]] for g in lines])[0] for cut in _CUTS]
            if torch.allclose(first.flatten(), torch.cat(parts), rtol=1e-9, atol=1e-12):
                return "elements"
        except Exception:  # it steps matrices and no lines: what is left is whether it steps whole tensors
            pass
    moved = [(first - starts[0]).norm(), (second - starts[1]).norm()]
    apart = [(first - alone[0]).norm(), (second - alone[1]).norm()]
    if any(float(a) > _ROUNDED * float(m) for a, m in zip(apart, moved, strict=True)):
        raise _refuse(rule, "two small matrices gave different results stepped together and separately")
    return "tensors"


_CUTS = (slice(None, _CUT), slice(_CUT, None))


def _run(rule: OwnRule, group: Settings, starts: list[Tensor], grads: list[list[Tensor]]) -> list[Tensor]:
    leaves = [torch.nn.Parameter(x.clone(), requires_grad=False) for x in starts]
    states = [rule.first_state(group, leaf) for leaf in leaves]
    for step in grads:
        for leaf, grad in zip(leaves, step, strict=True):
            leaf.grad = grad.clone()
        rule.step(dict(group), leaves, states)
    return [leaf.detach() for leaf in leaves]


def _refuse(rule: OwnRule, why: str) -> ValueError:
    name = rule.optimizer_class.__name__
    return ValueError(
        f"{name} cannot be shared out among workers without knowing what its step of a tensor needs, and {why}. Say "
        f"so: optimizer.{DECLARED} = False, if every element is stepped separately; = True, if every tensor is. If its "
        "step looks at several tensors together, use the allreduce strategy"
    )


def _keeps_blocks(rule: OwnRule, group: Settings, params: Sequence[Tensor]) -> bool:
    """Whether another state is kept for a large tensor than for a small one: codes of 8 bits, say, and what a block of
    them has in common, which go with no part of the tensor."""
    found = []
    for size in (_CUT, min(_LARGE, max((param.numel() for param in params), default=0))):
        leaf = torch.nn.Parameter(torch.ones(size, dtype=torch.float32), requires_grad=False)
        leaf.grad, state = torch.ones_like(leaf), rule.first_state(group, leaf)
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            rule.step(dict(group), [leaf], [state])
        found.append({k: v.is_floating_point() if isinstance(v, Tensor) else None for k, v in state.items()})
    return found[0] != found[1]


_LARGE = 1 << 20  # elements of a tensor that is tried, at most


# Owners ---------------------------------------------------------------------------------------------------------------


def count_work(shape: Sequence[int]) -> int:
    """Operations of a step of a whole tensor, up to a factor: of a matrix of m rows and n columns those of a product
    with its Gram matrix, min(m, n)^2 max(m, n) (Newton-Schulz, Shampoo, SOAP); of a vector, its elements."""
    if len(shape) < 2:
        return math.prod(shape)
    rows, columns = shape[0], math.prod(shape[1:])
    return min(rows, columns) ** 2 * max(rows, columns)


def choose_owners(shapes: Sequence[Sequence[int]], ranks: int) -> list[int]:
    """Who steps which tensor: the most work first, each to the rank that has the least so far. It is the same on every
    rank, and in every run: it depends on the shapes, their order and the number of ranks alone.

    >>> choose_owners([(8, 8), (8, 8), (4, 4), (8,)], 2)
    [0, 1, 0, 1]
    """
    loads = [(0, rank) for rank in range(ranks)]
    owners = [0] * len(shapes)
    for i in sorted(range(len(shapes)), key=lambda i: -count_work(shapes[i])):
        load, rank = heapq.heappop(loads)
        owners[i] = rank
        heapq.heappush(loads, (load + count_work(shapes[i]), rank))
    return owners


def find_owners(model: nn.Module, optimizer: Optimizer, ranks: int) -> dict[nn.Parameter, int]:
    """Of the trainable parameters that are stepped whole, which of so many ranks steps each."""
    kinds = find_kinds(optimizer)
    late = "tensors" if "tensors" in kinds.values() else "elements"  # what may come to the optimizer in a later group
    whole = [p for p in model.parameters() if p.requires_grad and kinds.get(p, late) == "tensors"]
    return dict(zip(whole, choose_owners([p.shape for p in whole], ranks), strict=True))
