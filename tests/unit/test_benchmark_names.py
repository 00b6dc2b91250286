"""Benchmarks are not run by tests: the names that they take from the package are looked up here."""

from __future__ import annotations

import ast
import importlib
import types
from collections.abc import Iterator
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
FILES = sorted(BENCHMARKS.rglob("*.py"))


def find_missing(source: str) -> Iterator[str]:
    """Names of the package that `source` imports, or reads from a module that it imported, and that are not there."""
    tree = ast.parse(source)
    found: dict[str, object] = {}
    for node in ast.walk(tree):
        if not isinstance(node, ast.ImportFrom) or not (node.module or "").startswith("unisono."):
            continue
        try:
            module = importlib.import_module(node.module or "")
        except ImportError:
            yield node.module or ""
            continue
        for name in node.names:
            try:
                value = getattr(module, name.name)
            except AttributeError:
                try:
                    value = importlib.import_module(f"{node.module}.{name.name}")
                except ImportError:
                    yield f"{node.module}.{name.name}"
                    continue
            if isinstance(value, (types.ModuleType, type)):
                found[name.asname or name.name] = value
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            owner = resolve(node.value, found)
            if isinstance(owner, (types.ModuleType, type)) and not hasattr(owner, node.attr):
                yield f"{owner.__name__}.{node.attr}"


def resolve(node: ast.expr, found: dict[str, object]) -> object:
    """The module or class that an expression such as `module.Class` names; None if it names none."""
    if isinstance(node, ast.Name):
        return found.get(node.id)
    if isinstance(node, ast.Attribute):
        return getattr(resolve(node.value, found), node.attr, None)
    return None


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_what_a_benchmark_imports_is_there(file: Path) -> None:
    assert not list(find_missing(file.read_text()))


def test_a_name_that_is_gone_is_found() -> None:
    assert list(find_missing("from unisono.world import ledger\nledger.Nothing")) == ["unisono.world.ledger.Nothing"]
    assert list(find_missing("from unisono.world import ledger\nledger.Ledger.nothing")) == ["Ledger.nothing"]
    assert list(find_missing("from unisono.world import nobody")) == ["unisono.world.nobody"]
    assert list(find_missing("from unisono.nowhere import x")) == ["unisono.nowhere"]
