"""How many ranks each axis of a mesh has: arithmetic alone."""

from __future__ import annotations

import math

__all__ = ["AXES", "choose_sizes", "list_fitting"]

AXES = ("data", "tensor", "pipeline")
_SHOWN = 8


def choose_sizes(ranks: int, *, data: int | None, tensor: int | None, pipeline: int | None) -> tuple[int, int, int]:
    """How many ranks (data, tensor, pipeline) have; ValueError with what would fit.

    -1 is what remains. An axis that is left out has 1 rank, but the data axis what remains, unless another is -1. One
    process alone is a mesh of ones, whatever is asked for.

    >>> choose_sizes(8, data=None, tensor=2, pipeline=None)
    (4, 2, 1)
    """
    asked = {"data": data, "tensor": tensor, "pipeline": pipeline}
    for name, size in asked.items():
        if size is not None and (type(size) is not int or (size < 1 and size != -1)):
            raise ValueError(f"{name}={size!r}: expected a number of ranks from 1 on, or -1 for what remains")
    rest = [name for name, size in asked.items() if size == -1]
    if len(rest) > 1:
        raise ValueError(f"{' and '.join(f'{name}=-1' for name in rest)}: only one axis can have what remains")
    if ranks == 1:
        return 1, 1, 1
    if not rest and data is None:
        rest = ["data"]
    given = {name: size or 1 for name, size in asked.items() if name not in rest}
    product = math.prod(given.values())
    if rest and ranks % product == 0:
        given[rest[0]] = ranks // product
    elif rest or product != ranks:
        shown = " × ".join(f"{name}={size}" for name, size in given.items() if size != 1) or "data=1"
        wrong = f"does not divide {ranks} ranks" if rest else f"makes {product} rank(s), not {ranks}"
        raise ValueError(f"{shown} {wrong}. What would fit: {_suggest(ranks, given)}")
    return given["data"], given["tensor"], given["pipeline"]


def list_fitting(ranks: int) -> list[tuple[int, int, int]]:
    """Every mesh (data, tensor, pipeline) of so many ranks.

    >>> list_fitting(2)
    [(1, 1, 2), (1, 2, 1), (2, 1, 1)]
    """
    divisors = [n for n in range(1, ranks + 1) if ranks % n == 0]
    return [(d, t, ranks // d // t) for d in divisors for t in divisors if ranks % (d * t) == 0]


def _suggest(ranks: int, given: dict[str, int]) -> str:
    """The meshes nearest to what was asked for."""

    def distance(sizes: tuple[int, int, int]) -> float:
        return sum(abs(math.log2(size / given.get(name, size))) for name, size in zip(AXES, sizes, strict=True))

    nearest = sorted(list_fitting(ranks), key=distance)[:_SHOWN]
    return "; ".join(", ".join(f"{name}={n}" for name, n in zip(AXES, sizes, strict=True)) for sizes in nearest)
