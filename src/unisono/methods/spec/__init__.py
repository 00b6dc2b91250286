"""The spec language: `"local_sgd(every=8, reducer=powersgd(rank=2))"` to objects, and back."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from unisono.methods.spec.catalog import extend, names
from unisono.methods.spec.grammar import Spec, SpecError, parse

if TYPE_CHECKING:
    from unisono.methods.spec.methods import build, describe, read_facts

__all__ = ["Spec", "SpecError", "build", "describe", "extend", "names", "parse", "read_facts"]


def __getattr__(name: str) -> Any:
    """What needs torch, when it is first asked for: the launcher reads specs without it."""
    if name not in ("build", "describe", "read_facts"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from unisono.methods.spec import methods

    value = globals()[name] = getattr(methods, name)
    return value
