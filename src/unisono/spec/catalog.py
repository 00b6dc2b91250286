"""Which methods there are, by the names of their files. Nothing is imported: the launcher, without torch, asks too."""

from __future__ import annotations

import difflib
import importlib
import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from unisono.spec.grammar import Spec, parse

__all__ = ["FOLDERS", "TORCH", "Kind", "describe_unknown", "extend", "find_names", "find_unknown", "names", "suggest"]

Kind = Literal["strategy", "reducer", "torch strategy"]
FOLDERS: dict[str, str] = {
    "strategy": "unisono.strategies",
    "reducer": "unisono.reducers",
    "torch strategy": "unisono.strategies._torch",
}
TORCH = "torch:"  # before the name of a method of torch's own, to compare with


def names(kind: Kind) -> list[str]:
    """The methods of a kind, by the names of their files."""
    return sorted(find_names(kind))


@contextmanager
def extend(*, strategies: str | Path | None = None, reducers: str | Path | None = None) -> Iterator[None]:
    """Look for methods in these folders as well, while the context lasts. For the whole process."""
    asked = [(FOLDERS["strategy"], strategies), (FOLDERS["reducer"], reducers)]
    added = [(name, str(Path(folder).resolve())) for name, folder in asked if folder is not None]
    for name, folder in added:
        importlib.import_module(name).__path__.append(folder)
    importlib.invalidate_caches()
    try:
        yield
    finally:
        for name, folder in added:
            importlib.import_module(name).__path__.remove(folder)
            for key, module in list(sys.modules.items()):
                if os.path.dirname(getattr(module, "__file__", None) or "/") == folder:
                    del sys.modules[key]


def find_names(kind: Kind) -> set[str]:
    """Of files, and of folders that are packages; `_x` is for several methods. Every build asks: so without Path."""
    found = set()
    for folder in importlib.import_module(FOLDERS[kind]).__path__:
        for entry in os.listdir(folder) if os.path.isdir(folder) else ():
            is_package = "." not in entry and os.path.isfile(f"{folder}/{entry}/__init__.py")
            if not entry.startswith("_") and (is_package or entry.endswith(".py")):
                found.add(entry.removesuffix(".py"))
    return found


def find_unknown(text: str) -> str | None:
    """What is wrong with the first name in a strategy's spec that no method has; None where all are known.

    Arguments are not looked at, but for the methods among them that are written with parentheses.

    >>> find_unknown("powersgd(rank=4)"), find_unknown("alreduce")
    (None, "unknown strategy 'alreduce'; did you mean 'allreduce'?")

    Raises:
        SpecError: text that cannot be read.
    """
    is_torch = text.strip().startswith(TORCH)
    spec = parse(text.strip().removeprefix(TORCH))
    methods = find_names("strategy") | find_names("reducer")
    if spec.name not in (find_names("torch strategy") if is_torch else methods):
        return describe_unknown(spec.name, "torch strategy" if is_torch else "strategy")
    inner = (value for value in _list_arguments(spec) if value.called and value.name not in methods)
    return next((describe_unknown(value.name, "reducer") for value in inner), None)


def _list_arguments(value: Any) -> Iterator[Spec]:
    """The specs among the arguments of a spec, and among theirs."""
    inner = [*value.args, *value.kwargs.values()] if isinstance(value, Spec) else value
    for one in inner if isinstance(inner, list | tuple) else ():
        if isinstance(one, Spec):
            yield one
        yield from _list_arguments(one)


def describe_unknown(name: str, kind: Kind) -> str:
    """The name that no method of this kind has, in words, with the one that was perhaps meant."""
    known = {*names(kind), *(names("reducer") if kind == "strategy" else ())}
    return f"unknown {kind} {name!r}{suggest(name, sorted(known))}"


def suggest(word: str, known: Iterable[str]) -> str:
    """Words that end an error: what was perhaps meant, or all that is known."""
    known = list(known)
    near = difflib.get_close_matches(word.lower(), known, n=1) or difflib.get_close_matches(word, known, n=1)
    if near:
        return f"; did you mean {near[0]!r}?"
    return f"; known: {', '.join(known)}" if known else ""
