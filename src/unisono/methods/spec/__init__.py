"""The spec language: `"local_sgd(every=8, reducer=powersgd(rank=2))"` to objects, and back. Here, which methods there
are, by the names of their files: nothing of them is imported, as the launcher, without torch, asks too."""

from __future__ import annotations

import difflib
import functools
import importlib
import importlib.metadata
import importlib.util
import os
import sys
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

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


Kind = Literal["strategy", "reducer", "torch strategy"]
FOLDERS: dict[str, str] = {
    "strategy": "unisono.methods.strategies",
    "reducer": "unisono.methods.reducers",
    "torch strategy": "unisono.methods.strategies._torch",
}
METHODS = "UNISONO_METHODS"  # folders of methods of one's own, separated by colons; the workers have it too
_ENTRY_POINTS = "unisono.methods"  # packages with such methods
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


def use_methods(folders: str) -> None:
    """Make the methods in these folders (separated by colons) known to this process and those that it starts.

    Raises:
        ValueError: a folder without `strategies/` and `reducers/` in it, or a method with the name of another.
    """
    given = [os.path.abspath(folder) for folder in folders.split(os.pathsep) if folder]
    before = [folder for folder in os.environ.get(METHODS, "").split(os.pathsep) if folder]
    every = os.pathsep.join(dict.fromkeys([*given, *before]))
    _load(every)
    os.environ[METHODS] = every


@functools.cache
def _load(folders: str) -> None:
    """Make the user's own methods known: those in these folders, and in installed packages with our entry point."""
    for folder in filter(None, folders.split(os.pathsep)):
        _add(os.path.abspath(folder), METHODS)
    for point in importlib.metadata.entry_points(group=_ENTRY_POINTS):
        said = f"the entry point {point.name} of {_ENTRY_POINTS}"
        try:
            found = importlib.util.find_spec(point.value)
            for folder in (found.submodule_search_locations if found is not None else None) or ():
                _add(folder, said)
        except (ImportError, ValueError) as error:  # another package's mistake, perhaps of one that nobody uses here
            warnings.warn(f"{said} ({point.value}) adds no methods: {error}", stacklevel=2)


def _add(folder: str, said: str) -> None:
    inside = {FOLDERS["strategy"]: f"{folder}/strategies", FOLDERS["reducer"]: f"{folder}/reducers"}
    if not any(map(os.path.isdir, inside.values())):
        raise ValueError(f"{said}: {folder} has neither a folder strategies nor a folder reducers, with methods in it")
    for package, path in inside.items():
        known = importlib.import_module(package).__path__
        if path in known or not os.path.isdir(path):
            continue
        if taken := _list_methods([path]) & _list_methods(known):
            raise ValueError(f"{said}: {path} has {min(taken)!r}, which is the name of another method: rename it")
        known.append(path)
    importlib.invalidate_caches()


def find_names(kind: Kind) -> set[str]:
    """The names of the methods of a kind; fast, since every build asks."""
    _load(os.environ.get(METHODS, ""))
    return _list_methods(importlib.import_module(FOLDERS[kind]).__path__)


def _list_methods(folders: Iterable[str]) -> set[str]:
    """Names of method files and packages in these folders, but for those that begin with `_`. Path is slower."""
    found = set()
    for folder in folders:
        for entry in os.listdir(folder) if os.path.isdir(folder) else ():
            is_package = "." not in entry and os.path.isfile(f"{folder}/{entry}/__init__.py")
            if not entry.startswith("_") and (is_package or entry.endswith(".py")):
                found.add(entry.removesuffix(".py"))
    return found


def find_unknown(text: str) -> str | None:
    """What is wrong with the first name in a strategy's spec that no method has; None if all are known.

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
    """The specs among the arguments of a spec, at any depth."""
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
