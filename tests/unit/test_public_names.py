"""The public names are exactly the exported ones, each with a docstring; everything else is internal."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import unisono as un
from unisono.old_paths import find_new_path

SRC = Path(un.__file__).parent
ROOT = SRC.parents[1]
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
        assert ast.get_docstring(ast.parse(MODULES[f"{un._MODULE_OF[name]}.{name}"].read_text(encoding="utf-8")))
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


# Paths of before there were rooms --------------------------------------------------------------------------------

DOCUMENTED = {
    match
    for page in [*ROOT.glob("docs/**/*.md"), *ROOT.glob("*.md"), *ROOT.glob("examples/*.py")]
    for match in re.findall(r"(?:^|\s)(?:from|import) (unisono(?:\.\w+)+)", page.read_text(encoding="utf-8"))
}


@pytest.mark.parametrize("name", sorted(name for name in DOCUMENTED if not LARGE & {*name.split(".")}))
def test_paths_in_the_documentation_are_there(name: str) -> None:
    assert importlib.import_module(name) is importlib.import_module(find_new_path(name) or name)


def test_a_module_is_one_object_under_both_names() -> None:
    text = """
import sys, pickle
import unisono.strategies.local_sgd as old
import unisono.methods.strategies.local_sgd as new
from unisono.strategy import changing
import unisono.spec.grammar
from unisono.strategy.switching import switch
from unisono.progress import History
from unisono.data.tables import TablePart
import unisono.methods.strategy.watches as watch
assert old is new is sys.modules["unisono.strategies.local_sgd"]
assert old.__name__ == old.__spec__.name == "unisono.methods.strategies.local_sgd"
assert changing is sys.modules["unisono.methods.strategy.changing"]
assert switch is changing.switch
assert History.__module__ == "unisono.training.trainer"
assert watch.__name__ == "unisono.methods.strategy.watches"
assert unisono.spec.grammar is sys.modules["unisono.methods.spec.grammar"]
assert pickle.loads(b"cunisono.world.ledger\\nRow\\n.").__name__ == "Row"
assert pickle.loads(b"cunisono.strategies.local_sgd\\nlocal_sgd\\n.") is new.local_sgd
import unisono.simulation.validation as merged
from unisono.predict.simulation import plan_file
assert merged is plan_file is sys.modules["unisono.predict.simulation.plan_file"]
compare = pickle.loads(b"cunisono.predict.simulation.validation\\ncompare_with_measured\\n.")
assert compare is plan_file.compare_with_measured
try:
    import unisono.strategies.no_such_method
except ModuleNotFoundError as error:
    assert "no_such_method" in str(error)
"""
    ended = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")


def explains(text: str, name: str) -> bool:
    """Whether a docstring says what an argument is: in a list of arguments, or in backquotes."""
    return (
        re.search(rf"^ *(?:[*\w]+, )*{name}(?:, [*\w]+)*:|`[^`]*\b{name}\b[^`]*`|\. {name}:", text, re.MULTILINE)
        is not None
    )


def test_every_argument_of_a_public_function_is_explained() -> None:
    modules = LARGE | {"lightning"}  # which may not be installed
    values = {name: getattr(un, name) for name in un.__all__ if name not in modules}
    functions = {name: value for name, value in values.items() if inspect.isfunction(value) or value is un.Trainer}
    assert len(functions) > 25
    assert [
        f"{name}: {argument}"
        for name, function in functions.items()
        for argument in inspect.signature(function).parameters
        if not explains(inspect.getdoc(function) or "", argument)
    ] == []


def test_an_argument_is_explained_in_a_list_or_in_backquotes() -> None:
    assert explains("Do it.\n\nArgs:\n    size: of it.", "size")
    assert explains("fn, size: see above.", "size")
    assert explains("Do `f(size)` times.", "size")
    assert not explains("Of any size, a size: small.", "size")
