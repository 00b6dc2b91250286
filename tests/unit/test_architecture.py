"""Rules of the whole package, kept by tests: who may import whom, sizes, names, and what is never called."""

from __future__ import annotations

import ast
import importlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

SRC = Path(__file__).parents[2] / "src" / "unisono"
FILES = sorted(SRC.rglob("*.py"))
MODULES = {".".join(f.relative_to(SRC.parent).with_suffix("").parts).removesuffix(".__init__"): f for f in FILES}

# Imports point from a higher layer to a lower or the same one, never up.
LAYERS = {
    **dict.fromkeys(["world", "ledger", "report", "transports", "lanes", "schedule", "collectives", "state"], 0),
    **dict.fromkeys(["rendezvous", "meeting"], 0),
    **dict.fromkeys(
        ["buckets", "exchange", "reducer", "reduction", "kernels", "parts", "quantised", "signs", "normalization"], 1
    ),
    "reducers": 2,
    "offload": 2,
    **dict.fromkeys(["strategy", "switching", "periodic", "serving", "neighbours", "anchors", "fragments"], 3),
    **dict.fromkeys(["learners", "center", "rounds", "tuning", "sharding"], 3),
    "strategies": 4,
    **dict.fromkeys(["trainer", "callbacks", "planner", "lab", "watch", "footprint"], 5),
    **dict.fromkeys(["map_reduce", "estimators", "boost"], 5),
    **dict.fromkeys(["cli", "demo", "__main__"], 6),
}
# These stand beside the layers: they know the world, and each other.
BESIDE = {
    *("data", "partition", "sources", "arrays", "shard_settings", "placed"),
    *("checkpoint", "checkpoint_folder", "checkpoint_pieces", "checkpoint_plain", "pieces", "tensorfile", "rng"),
    *("spec", "grammar", "sizes"),
}
LAUNCHERS_MAY_IMPORT = {"launchers", "world", "state", "placed"}
LINES, FUNCTION_LINES = 480, 52  # "about 400" and "about 40", with room for one that is better left whole


def imports(path: Path, *, top_level_only: bool = False) -> Iterator[str]:
    """The modules that a file imports, those for type checking left out."""
    tree = ast.parse(path.read_text())
    skipped: set[ast.AST] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            skipped.update(inner for child in node.body for inner in ast.walk(child))
        if top_level_only and isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            skipped.update(inner for inner in ast.walk(node) if inner is not node)
    for node in ast.walk(tree):
        if node in skipped:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            yield from (f"{base}.{alias.name}" if f"{base}.{alias.name}" in MODULES else base for alias in node.names)


def part(module: str) -> str:
    """`unisono.world.transports.threads` belongs to `transports`."""
    return module.split(".")[1] if "." in module else ""


@pytest.mark.parametrize("name", [m for m in MODULES if part(m) in LAYERS])
def test_imports_point_from_higher_layers_to_lower_ones(name: str) -> None:
    for other in imports(MODULES[name]):
        if other.startswith("unisono.") and part(other) in LAYERS:
            assert LAYERS[part(other)] <= LAYERS[part(name)], f"{name} imports {other}, which is above it"


@pytest.mark.parametrize("name", [m for m in MODULES if part(m) in BESIDE])
def test_data_checkpoints_and_specs_know_only_the_world(name: str) -> None:
    for other in imports(MODULES[name]):
        if other.startswith("unisono.") and part(other) not in BESIDE:
            assert LAYERS[part(other)] == 0, f"{name} imports {other}"


def test_every_module_has_a_place() -> None:
    assert {part(name) for name in MODULES} - set(LAYERS) - BESIDE - {"launchers", ""} == set()


@pytest.mark.parametrize("name", [m for m in MODULES if part(m) == "launchers"])
def test_launchers_know_only_the_world(name: str) -> None:
    ours = {part(other) for other in imports(MODULES[name]) if other.startswith("unisono.")}
    assert ours <= LAUNCHERS_MAY_IMPORT


@pytest.mark.parametrize("folder", ["reducers", "strategies"])
def test_methods_never_import_each_other(folder: str) -> None:
    for name, path in MODULES.items():
        if part(name) == folder and path.name != "__init__.py":
            others = [m for m in imports(path) if m.startswith(f"unisono.{folder}.") and m != name]
            assert not others, f"{name} imports {others}"


@pytest.mark.parametrize("name", [m for m in MODULES if part(m) in ("launchers", "cli")])
def test_the_command_line_starts_without_torch(name: str) -> None:
    assert not {m.split(".")[0] for m in imports(MODULES[name], top_level_only=True)} & {"torch", "numpy"}


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(SRC)))
def test_files_and_functions_are_short(path: Path) -> None:
    text = path.read_text()
    assert text.count("\n") <= LINES
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef) and node.end_lineno:
            first = node.body[1 if ast.get_docstring(node) and len(node.body) > 1 else 0]
            body = node.end_lineno - first.lineno + 1
            assert body <= FUNCTION_LINES, f"{node.name} has {body} lines"


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(SRC)))
def test_every_module_says_what_it_is_and_is_not_called_utils(path: Path) -> None:
    assert ast.get_docstring(ast.parse(path.read_text())), "a module docstring of one or two lines"
    assert not {"utils", "util", "helpers", "common", "misc"} & {path.stem, path.parent.name}


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(SRC)))
def test_nothing_read_can_run_code(path: Path) -> None:
    """No eval or exec, no unpickling, and torch.load only of weights."""
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.Call):
            continue
        called = ast.unparse(node.func)
        assert called not in {"eval", "exec"}, f"line {node.lineno}"
        if called == "torch.load":
            options = {word.arg: ast.unparse(word.value) for word in node.keywords}
            assert options.get("weights_only") == "True", f"line {node.lineno}"
        if part_of_pickle(called):
            assert path.relative_to(SRC).parts[0] == "launchers", f"line {node.lineno}: {called}"


def part_of_pickle(called: str) -> bool:
    """Unpickling is for the launcher's own pipe only: functions given to `un.launch`."""
    return called.split(".")[0] in {"pickle", "cloudpickle"} and called.split(".")[-1] in {
        "load",
        "loads",
        "Unpickler",
    }


@pytest.mark.parametrize("name", sorted(set(MODULES) - {"unisono.__main__"}))
def test_all_lists_only_what_exists(name: str) -> None:
    if name.endswith("_triton"):
        pytest.importorskip("triton", reason="kernels for GPUs")
    module = importlib.import_module(name)
    for public in getattr(module, "__all__", []):
        assert hasattr(module, public), f"{name}.__all__ names {public}"


def test_import_is_cheap() -> None:
    """Nothing that only some programs need is imported by `import unisono`."""
    listing = "print(json.dumps(sorted(set(sys.modules) - before)))"
    program = f"import json, sys, torch; before = set(sys.modules); import unisono; {listing}"
    printed = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    added = {name.split(".")[0] for name in json.loads(printed)}
    assert not added & {"rich", "safetensors", "matplotlib", "sklearn", "scipy", "cloudpickle"}
