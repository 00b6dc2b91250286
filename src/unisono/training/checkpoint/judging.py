"""Judging what is read: a checkpoint may come from anywhere.

Whatever `save` would not have written is refused before it is used, by a ValueError that names the file.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

T = TypeVar("T")
MAX_NUMBER = 2**63 - 1


class NewerFormat(ValueError):
    """A checkpoint of a later version: whole, but not for this one."""


@contextmanager
def naming(file: str) -> Iterator[None]:
    """Turn errors inside the block into a ValueError that names the file."""
    try:
        yield
    except NewerFormat:
        raise
    except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RuntimeError) as error:
        text = str(error) if isinstance(error, ValueError) else repr(error)
        raise ValueError(text if file in text else f"{file} is not as it was written: {text}") from error


def expect(kind: type[T], value: Any, what: str) -> T:
    """The value, if it is of this type."""
    if not isinstance(value, kind):
        raise ValueError(f"{what[:200]} should be a {kind.__name__}, not a {type(value).__name__}")
    return value


def get(tree: Mapping[str, Any], name: str) -> Any:
    """The entry of this name."""
    if name not in tree:
        raise ValueError(f"it has no {name!r}")
    return tree[name]


def expect_number(tree: Mapping[str, Any], name: str, least: int = 0) -> int:
    """The entry of this name, a whole number."""
    value = get(tree, name)
    if type(value) is not int or not least <= value <= MAX_NUMBER:
        raise ValueError(f"{name} should be a whole number from {least} on, below 2^63")
    return value


def is_numbers(value: Any, count: int) -> bool:
    """Whether it is a list of so many whole numbers."""
    is_list = isinstance(value, list) and len(value) == count
    return is_list and all(type(n) is int and 0 <= n <= MAX_NUMBER for n in value)


def check_wholes(wholes: Any) -> dict[str, Sequence[Any]]:
    """Check the list of split tensors: a dtype and a shape by name."""
    with naming("shared.json"):
        for name, whole in expect(dict, wholes, "pieces").items():
            if not isinstance(whole, list) or len(whole) != 2:
                raise ValueError(f"the piece {name[:200]!r} should have a dtype and a shape")
    return dict(wholes)


def check_entry(entry: dict[str, Any], rank: int) -> dict[str, Any]:
    """Check the contents of a rank's own file."""
    with naming(f"{name_rank(rank)}.json"):
        get(entry, "own")
        if (tree := get(entry, "tree")) is not None:
            expect(dict, tree, "tree")
        for name in expect(list, get(entry, "differs"), "differs"):
            expect(str, name, "a name in differs")
        weights = expect(dict, entry.get("weights", {}), "weights")
        for weight in weights.values():
            if type(weight) not in (int, float) or not 0 <= weight <= MAX_NUMBER:
                raise ValueError("a weight should be a number from 0 on")
        pieces = expect(dict, entry.get("pieces", {}), "pieces")
        for name, spans in pieces.items():
            if not all(is_numbers(span, 2) for span in expect(list, spans, name)):
                raise ValueError(f"the piece {name[:200]!r} should have a start and a stop for each span")
    return entry | {"pieces": pieces, "weights": weights}


def find_given(tree: Mapping[str, Any]) -> set[str]:
    """The names of the tensors that are not averaged: consolidated ones, and those taken from the first rank."""
    with naming("shared.json"):
        first = [expect(str, name, "a name in first") for name in expect(list, tree.get("first", []), "first")]
        consolidated = expect(dict, tree.get("consolidated", {}), "consolidated")
    return {*first, *(f"model.{name}" for name in consolidated)}


def check_whole(whole: dict[str, Any]) -> dict[str, Any]:
    """Check that everything `load` and `read_checkpoint` use is there, and of the right type."""
    for name in ("model", "versions", "optimizer", "shards", "ledger"):
        expect(dict, get(whole, name), name)
    for name in ("optimizer_type", "strategy_type"):
        expect(str, get(whole, name), name)
    for name in ("strategy", "extra"):
        get(whole, name)
    if not all(isinstance(name, str) for name in whole["model"]):
        raise ValueError("the names in model should be text")
    expect(dict, get(whole["optimizer"], "state"), "the optimizer's state")
    for group in expect(list, get(whole["optimizer"], "param_groups"), "param_groups"):
        expect(list, get(expect(dict, group, "a group of parameters"), "params"), "params")
    counts = expect(list, whole.get("optimizer_groups", []), "optimizer_groups")
    if counts and (set(map(type, counts)) != {int} or sum(counts) != len(whole["optimizer"]["param_groups"])):
        raise ValueError(f"optimizer_groups should share out the groups of the optimizer, got {counts}")
    for name, state in whole["shards"].items():
        for number in ("epoch", "batch"):
            expect_number(expect(dict, state, f"shard {name}"), number)
        for other in ("samples", "settings"):
            get(state, other)
        expect(int, get(state, "seed"), "seed")
        expect(list, state.get("counts", []), "counts")
    expect_number(whole["ledger"], "step_count")
    return whole


def name_rank(rank: int) -> str:
    """The files of a rank, without their endings."""
    return f"rank-{rank:05d}"
