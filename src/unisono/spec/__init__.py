"""The spec language: `"local_sgd(every=8, reducer=powersgd(rank=2))"` to objects, and back."""

from __future__ import annotations

from unisono.spec.grammar import Spec, SpecError, parse
from unisono.spec.methods import build, describe, extend, names, read_facts

__all__ = ["Spec", "SpecError", "build", "describe", "extend", "names", "parse", "read_facts"]
