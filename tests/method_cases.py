"""What there is to test: every method's examples, with what it says of itself."""

from __future__ import annotations

from typing import Any, NamedTuple

from unisono.methods.buckets import Bucket
from unisono.methods.exchange.reduction import unsent_lines
from unisono.methods.facts import Example, Facts, Sizes
from unisono.methods.kernels.select import restore
from unisono.methods.reducer import Reduced, Reducer, State
from unisono.methods.spec import names, read_facts
from unisono.methods.spec.methods import Kind
from unisono.world import World


class Case(NamedTuple):
    """An example of a method."""

    name: str
    facts: Facts
    example: Example

    @property
    def spec(self) -> str:
        return self.example.spec


def find_cases(kind: Kind) -> list[Case]:
    """The examples of all methods of a kind; among the strategies also reducers, under those they train with."""
    cases = [
        Case(name, facts, example)
        for name, facts in ((name, read_facts(name, kind)) for name in names(kind))
        for example in facts.examples
    ]
    if kind == "strategy":
        for name in names("reducer"):
            facts = read_facts(name, "reducer")
            first = facts.examples[0]
            examples = [Example(spec) for spec in facts.trains_as] or [
                Example(f"allreduce(reducer={first.spec})", exact=first.exact)
            ]
            for example in examples:
                strategy = example.spec.partition("(")[0]
                cases.append(Case(strategy, read_facts(strategy, "strategy"), example))
    return cases


def count_bytes(spec: str, sizes: Sizes) -> int:
    """What an example of a reducer sends, by its own closed form."""
    examples: dict[str, Any] = {case.spec: case.example for case in find_cases("reducer")}
    form = examples[spec].bytes
    assert form is not None, f"{spec} has no closed form"
    return int(form(sizes))


def reduce_window(reducer: Reducer, bucket: Bucket, state: State, world: World) -> tuple[Reduced, State]:
    """`reducer.reduce` of a window that has this bucket alone: if it overflows, what is kept becomes what it was."""
    before = unsent_lines(state)
    reduced, state = reducer.reduce(bucket, state, world)
    for path, line in unsent_lines(state).items():
        if line is not before[path]:
            restore(reduced.find_overflow(), before[path], line)
    return reduced, state
