"""Cases for tests of several axes that interact by two at most: every pair of two axes' values is in some case."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

__all__ = ["cover_pairs"]

Case = tuple[Any, ...]


def cover_pairs(*axes: Sequence[Any], valid: Callable[..., bool] = lambda *_: True) -> list[Case]:
    """Few valid cases, in the order of the product, in which all pairs are that a valid case has.

    >>> len(cover_pairs("abc", "xyz", [1, 2], [True, False]))
    9
    """
    cases = [case for case in itertools.product(*axes) if valid(*case)]
    pairs = [_find_pairs(axes, case) for case in cases]
    missing = set().union(*pairs)
    chosen = set()
    while missing:
        best = max(range(len(cases)), key=lambda i: len(pairs[i] & missing))
        missing -= pairs[best]
        chosen.add(best)
    return [cases[i] for i in sorted(chosen)]


def _find_pairs(axes: Sequence[Sequence[Any]], case: Case) -> set[tuple[tuple[int, int], tuple[int, int]]]:
    places = [(axis, list(values).index(value)) for axis, (values, value) in enumerate(zip(axes, case, strict=True))]
    return set(itertools.combinations(places, 2))
