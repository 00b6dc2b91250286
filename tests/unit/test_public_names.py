"""The public names are exactly the exported ones, each with a docstring; everything else is internal."""

from __future__ import annotations

import ast
import importlib
import inspect
from pathlib import Path
from types import ModuleType

import pytest

import unisono as un

SRC = Path(un.__file__).parent
MODULES = {
    ".".join(file.relative_to(SRC.parent).with_suffix("").parts).removesuffix(".__init__"): file
    for file in sorted(SRC.rglob("*.py"))
}
PACKAGES = [name for name, file in MODULES.items() if file.name == "__init__.py" and name != "unisono"]
LARGE = {"huggingface", "keras", "skorch"}  # modules whose import takes seconds; tests of their own import them
WANTED = {"join", "World", "parallel", "shard", "save", "load", "launch", "Trainer", "estimators", "boost"}


def test_dir_lists_exactly_the_exported_names() -> None:
    assert dir(un) == un.__all__ == sorted(set(un.__all__))
    assert set(un.__all__) >= WANTED


@pytest.mark.parametrize("name", un.__all__)
def test_every_exported_name_is_there_and_says_what_it_is(name: str) -> None:
    if name in LARGE:
        assert ast.get_docstring(ast.parse(MODULES[f"unisono.{name}"].read_text(encoding="utf-8")))
        return
    value = getattr(un, name)
    assert inspect.getdoc(value), f"un.{name} has no docstring"
    if not isinstance(value, str | ModuleType):
        assert value.__module__.partition(".")[0] == "unisono"


def test_what_is_not_exported_is_not_there() -> None:
    with pytest.raises(AttributeError, match="module 'unisono' has no attribute 'paralel'"):
        _ = un.paralel
    assert "internal" in (un.__doc__ or "")


@pytest.mark.parametrize("package", [un, un.boost, un.estimators], ids=lambda package: package.__name__)
def test_type_checkers_see_the_names_that_there_are(package: ModuleType) -> None:
    """The imports for type checkers cannot be computed: they are compared with the table that programs use."""
    tree = ast.parse(MODULES[package.__name__].read_text(encoding="utf-8"))
    block = next(node for node in tree.body if isinstance(node, ast.If))
    imports = [node for node in block.body if isinstance(node, ast.ImportFrom)]
    seen = {alias.asname: node.module for node in imports for alias in node.names}
    assert seen == package._MODULE_OF
    assert sorted(seen) == [name for name in dir(package) if name != "__version__"]


@pytest.mark.parametrize("name", PACKAGES)
def test_what_a_package_exports_says_what_it_is(name: str) -> None:
    package = importlib.import_module(name)
    exported = getattr(package, "__all__", [])
    assert len(exported) == len(set(exported))
    for each in exported:
        value = getattr(package, each)
        if inspect.isclass(value) or inspect.isfunction(value):
            assert inspect.getdoc(value), f"{name}.{each} has no docstring"


def _defined(tree: ast.Module) -> set[str]:
    """Functions and classes of a module, without those that start with an underscore."""
    kinds = (ast.FunctionDef, ast.ClassDef)
    return {node.name for node in tree.body if isinstance(node, kinds) and not node.name.startswith("_")}


def test_where_a_module_lists_its_names_everything_else_is_underscored() -> None:
    unlisted = {}
    for name in sorted(set(MODULES) - set(PACKAGES) - {"unisono", "unisono.__main__"}):
        tree = ast.parse(MODULES[name].read_text(encoding="utf-8"))
        lists = [n.value for n in tree.body if isinstance(n, ast.Assign) and ast.unparse(n.targets[0]) == "__all__"]
        for listed in lists:
            if missing := _defined(tree) - set(ast.literal_eval(listed)):
                unlisted[name] = missing
    assert unlisted == {}
