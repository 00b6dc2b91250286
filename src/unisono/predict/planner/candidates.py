"""The methods that a plan is made of: which are tried, and what each says of its effect on training."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from unisono.methods.buckets import Bucket, on_device
from unisono.methods.facts import Convergence, Grade
from unisono.methods.spec import TORCH, SpecError, build, names, parse, read_facts
from unisono.methods.spec.grammar import Spec
from unisono.methods.strategy import Pattern, Strategy
from unisono.predict.planner.learning import EXACT, Learning, look_up

GRADES: tuple[Grade, ...] = ("exact", "rounded", "compressed", "other")


@dataclass(frozen=True)
class Candidate:
    """A method that a plan may measure. `unpredicted`: why its step cannot be predicted; empty if it can."""

    spec: str
    convergence: Convergence
    unpredicted: str = ""

    @property
    def strategy(self) -> Strategy:
        """The strategy that the spec builds."""
        built: Strategy = build(self.spec, kind="strategy")
        return built

    @property
    def pattern(self) -> Pattern:
        """What the method says of its exchange."""
        return self.strategy.pattern()

    @property
    def learning(self) -> Learning:
        """How much it learns from a sample, as far as that was measured."""
        return EXACT if self.convergence.grade == "exact" else look_up(self.strategy)

    @property
    def is_of_torch(self) -> bool:
        """Whether the method is torch's own, which is measured for comparison."""
        return self.spec.startswith(TORCH)

    def for_measuring(self) -> Strategy:
        """The same with an exchange after each step, so that every step shows it."""
        strategy: Any = self.strategy
        changed: Strategy = replace(strategy, **self.pattern.in_every_window) if self.pattern.every > 1 else strategy
        return changed


def find_candidates(asked: Iterable[str] = (), also: Iterable[str] = (), *, ranks: int = 4) -> list[Candidate]:
    """Those asked for, or what every method proposes; `also`: added where it is not among them.

    In the order of their promise, as there may not be time for all: exact ones, then in turn those that send least (for
    slow networks) and most (for fast ones), then those that change training.
    """
    specs = list(asked) or [*_proposed("strategy"), *_proposed("reducer")]
    found: dict[str, Candidate] = {}
    for spec in [*specs, *also]:
        candidate = describe_candidate(spec)
        found.setdefault(candidate.spec, candidate)
    sample = Bucket(
        0,
        [("weight", nn.Parameter(torch.empty(256, 256, dtype=torch.float32)))],
        partial(on_device, torch.device("cpu")),
    )

    def count_sent(candidate: Candidate) -> int:
        reducer = candidate.pattern.reducer
        return int(reducer.sends(sample, ranks)) if reducer is not None and reducer.sends is not None else 0

    exact = [candidate for candidate in found.values() if candidate.convergence.grade == "exact"]
    other = [candidate for candidate in found.values() if candidate.convergence.grade == "other"]
    between = deque(sorted((c for c in found.values() if c not in exact and c not in other), key=count_sent))
    taken = [between.pop() if i % 2 else between.popleft() for i in range(len(between))]
    return [*exact, *taken, *other]


def _proposed(kind: Any) -> list[str]:
    found = []
    for name in names(kind):
        facts = read_facts(name, kind)
        if facts.convergence is not None:
            found += [name] if facts.plans is None else list(facts.plans)
    return found


def describe_candidate(spec: str) -> Candidate:
    """A spec with what its methods say of themselves: of several, the one that changes training most counts."""
    worst, why = Convergence("exact", "as one process on the joined batches"), ""
    if spec.startswith(TORCH):
        build(spec, kind="strategy")
        return Candidate(spec, worst)
    tree = parse(spec)
    built: Strategy = build(tree, kind="strategy")  # an error in the text shows here
    for name, kind, is_around in _methods_in(tree):
        facts = read_facts(name, kind)
        found = facts.convergence
        if found is None:
            found = worst if is_around else Convergence("other", "it does not say what it does to training")
        if GRADES.index(found.grade) >= GRADES.index(worst.grade):
            worst = found
        why = why or facts.unpredicted
    own = built.pattern().convergence
    if own is not None and GRADES.index(own.grade) >= GRADES.index(worst.grade):
        worst = own
    return Candidate(str(tree), worst, why)


def _methods_in(tree: Spec) -> Iterable[tuple[str, Any, bool]]:
    """Names and kinds of all methods in a spec, and whether each is around others."""
    strategies, reducers = names("strategy"), names("reducer")
    inside = [x for x in (*tree.args, *tree.kwargs.values()) if isinstance(x, Spec) and x.name in reducers]
    if tree.name in strategies or tree.name in reducers:
        yield tree.name, "strategy" if tree.name in strategies else "reducer", bool(inside)
    for inner in inside:
        yield from _methods_in(inner)


def check_specs(specs: Iterable[str]) -> str:
    """What is wrong with the first spec that cannot be read; empty if all can."""
    try:
        for spec in specs:
            describe_candidate(spec)
    except (SpecError, TypeError, ValueError) as error:
        return str(error)
    return ""
