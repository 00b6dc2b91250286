"""Rules of the whole package, kept by tests: who may import whom, sizes, names, and what is never called."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import json
import pkgutil
import re
import subprocess
import sys
from pathlib import Path

import pytest
from architecture import (
    Module,
    Package,
    find_halved_classes,
    find_long_code,
    find_method_problems,
    find_other_imports,
    find_upward_imports,
    part_of,
)

from unisono.methods import strategies
from unisono.methods.strategy import Replica

SRC = Path(__file__).parents[2] / "src" / "unisono"
UNISONO = Package(SRC)
MODULES = list(UNISONO.modules)

# An import goes to a line above, or stays inside its own part (see `part_of`).
LAYERS = [
    "methods training observe predict tables plugs",  # rooms: they hold parts, and no code of their own
    "units",
    "launchers.runtime packing background rng methods.checks predict.costs observe.pages "
    "methods.model_copies text_table old_paths",
    "methods.kernels",
    "world methods.buckets methods.joined_optimizers",
    "methods.reducer observe.runs world.backend",
    "methods.facts",
    "methods.reducers methods.exchange methods.offload training.checkpoint training.data methods.spec "
    "training.batch_norm methods.autograd",
    "methods.strategy plugs.comm_hook",
    "methods.strategies methods.hybrid plugs.elastic_batches",
    "launchers predict.footprint plugs.horovod plugs.lightning plugs.huggingface plugs.keras plugs.skorch",
    "launchers.lab observe.live",
    "predict.planner",
    "predict.simulation",
    "predict.compare observe.reports training.trainer launchers.on",
    "tables.map_reduce predict.rehearsal observe.doctor",
    "tables.estimators",
    "tables.boost",
    "unisono",  # what `import unisono` offers, each part when it is asked for
    "demo",
    "cli",
    "__main__",
]
# What users derive from may have one heir of ours.
PUBLIC_BASES = {
    "unisono.methods.strategy.Strategy",
    "unisono.methods.strategy.Replica",
    "unisono.methods.strategy.changing.ChangingReplica",
    "unisono.methods.reducer.Reducer",
    "unisono.callbacks.Callback",
    "unisono.world.transports.Transport",
    "unisono.world.transports.Mismatch",  # and torch's error of a backend
}


# Who may import whom -----------------------------------------------------------------------------------------


def test_imports_go_to_lower_layers() -> None:
    assert find_upward_imports(UNISONO, LAYERS) == []


def test_launchers_know_only_the_runtime() -> None:
    assert find_other_imports(UNISONO, "launchers", {"launchers.runtime", "units"}) == []


@pytest.mark.parametrize("folder", ["methods.reducers", "methods.strategies"])
def test_a_method_is_a_file_or_a_folder_and_knows_no_other(folder: str) -> None:
    assert find_method_problems(UNISONO, folder) == []


def test_no_class_is_continued_in_another_file() -> None:
    assert find_halved_classes(UNISONO, PUBLIC_BASES) == []


def test_files_and_functions_are_short() -> None:
    assert find_long_code(UNISONO, file_lines=600, function_lines=52) == []


def test_a_method_overrides_few_members_of_a_replica() -> None:
    for found in pkgutil.walk_packages(strategies.__path__, "unisono.methods.strategies."):
        importlib.import_module(found.name)

    def find_methods(cls: type) -> set[str]:
        return {name for name, member in vars(cls).items() if inspect.isfunction(member) and name[0] != "_"}

    heirs = [Replica]
    for cls in heirs:
        heirs += [heir for heir in cls.__subclasses__() if heir.__module__.startswith("unisono.methods.strateg")]
    overridden = {cls.__name__: sorted(find_methods(Replica) & find_methods(cls)) for cls in heirs[1:]}
    assert len(overridden) > 10
    assert {name: found for name, found in overridden.items() if len(found) > 15} == {}


# The rules themselves, on trees made up for them --------------------------------------------------------------


def make_package(folder: Path, files: dict[str, str]) -> Package:
    """A package `unisono` of these files."""
    for name, text in files.items():
        path = folder / "unisono" / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return Package(folder / "unisono")


@pytest.mark.parametrize(
    "text",
    [
        "import unisono.launchers",
        "from unisono import launchers",
        "from unisono.launchers.local import run",
        "from ..launchers import local",
        "def run():\n    from unisono.launchers import local\n",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from unisono.launchers.local import Job\n",
        "import importlib\nlocal = importlib.import_module('unisono.launchers.local')\n",
    ],
)
def test_the_world_may_not_import_launchers(tmp_path: Path, text: str) -> None:
    package = make_package(tmp_path, {"launchers/local": "", "launchers/__init__": "", "world/rendezvous": text})
    (problem,) = find_upward_imports(package, LAYERS)
    assert re.fullmatch(r"unisono.world.rendezvous:\d imports unisono.launchers\S*, which is not below it", problem)


def test_imports_down_and_inside_are_allowed_but_not_sideways_or_of_what_has_no_layer(tmp_path: Path) -> None:
    package = make_package(
        tmp_path,
        {
            "packing": "",
            "methods/buckets": "import unisono.packing",
            "world/world": "from unisono import packing\nfrom unisono.world import ledger",
            "world/ledger": "from unisono.world.world import World",
        },
    )
    assert find_upward_imports(package, LAYERS) == []
    package = make_package(
        tmp_path, {"methods/buckets": "import unisono.world.world", "other": "import unisono.packing"}
    )
    sideways, homeless = sorted(find_upward_imports(package, LAYERS))
    assert sideways == "unisono.methods.buckets:1 imports unisono.world.world, which is not below it"
    assert homeless == "unisono.other has no layer"


def test_launchers_may_not_import_even_what_is_below_them(tmp_path: Path) -> None:
    text = "from unisono.launchers.runtime import place\nfrom unisono.launchers import local\nimport unisono.packing\n"
    files = {"launchers/runtime/place": "", "packing": "", "launchers/local": "", "launchers/remote": text}
    package = make_package(tmp_path, files)
    assert find_other_imports(package, "launchers", {"launchers.runtime"}) == [
        "unisono.launchers.remote:3 imports unisono.packing"
    ]


def test_methods_share_what_has_an_underscore_only(tmp_path: Path) -> None:
    package = make_package(
        tmp_path,
        {
            "methods/reducers/_cast": "",
            "methods/reducers/fp16": "from unisono.methods.reducers import _cast",
            "methods/reducers/bf16": "from unisono.methods.reducers.fp16 import Fp16",
            "methods/reducers/topk": "",
            "methods/reducers/topk/__init__": "",
            "methods/reducers/topk/choice": "import unisono.methods.reducers.topk\n",
            "methods/reducers/_signs": "import unisono.methods.reducers.fp16",
        },
    )
    assert sorted(find_method_problems(package, "methods.reducers")) == [
        "unisono.methods.reducers._signs:1 imports unisono.methods.reducers.fp16, another method",
        "unisono.methods.reducers.bf16:1 imports unisono.methods.reducers.fp16, another method",
        "unisono.methods.reducers.topk is a file and a folder",
    ]


def test_a_class_that_goes_on_in_another_file_is_found_and_an_abstraction_is_not(tmp_path: Path) -> None:
    package = make_package(
        tmp_path,
        {
            "zero/first": "class Keeping:\n    def keep(self): pass\n",
            "zero/__init__": "from unisono.zero.first import Keeping\n",
            "zero/second": "from unisono.zero import Keeping\nclass Backward(Keeping):\n    pass\n",
            "base": "class Shared:\n    def run(self): pass\nclass Open:\n    def run(self): pass\n",
            "faces": "class Asked(Protocol):\n    def run(self): ...\n"
            "class Told(ABC):\n    @abstractmethod\n    def run(self): ...\n",
            "one": "from unisono.base import Open, Shared\nclass A(Shared): pass\nclass B(Open): pass\n",
            "two": "import unisono.base as base\nimport unisono.faces as faces\nclass C(base.Shared): pass\n"
            "class D(faces.Asked): pass\nclass E(faces.Told): pass\nclass F(C):\n    pass\n",
        },
    )
    assert find_halved_classes(package, {"unisono.base.Open"}) == [
        "unisono.zero.first.Keeping is continued by unisono.zero.second.Backward alone: make it a collaborator"
    ]


def test_long_files_and_functions_are_found_and_docstrings_not_counted(tmp_path: Path) -> None:
    body = "".join("    x = 1\n" for _ in range(10))
    long = f'def run():\n    """One.\n\n\n    Two."""\n{body}'
    package = make_package(tmp_path, {"one": long, "two": long + "    x = 1\n"})
    assert find_long_code(package, file_lines=15, function_lines=10) == [
        "unisono.two has 16 lines",
        "unisono.two.run has 11 lines",
    ]


# Single files ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [m for m in MODULES if part_of(m) in ("launchers", "cli")])
def test_the_command_line_starts_without_torch(name: str) -> None:
    assert not _find_outside_imports(UNISONO.modules[name]) & {"torch", "numpy"}


def _find_outside_imports(module: Module) -> set[str]:
    """The first names of what a file imports when it is imported itself."""
    skipped: set[ast.AST] = set()
    for node in module.nodes:
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            skipped.update(inner for child in node.body for inner in ast.walk(child))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            skipped.update(inner for inner in ast.walk(node) if inner is not node)
    found: set[str] = set()
    for node in module.nodes:
        if isinstance(node, ast.Import) and node not in skipped:
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node not in skipped:
            found.add((node.module or "").split(".")[0])
    return found


def test_every_module_says_what_it_is_and_is_not_called_utils() -> None:
    silent = [module.path for module in UNISONO.modules.values() if not ast.get_docstring(module.tree)]
    assert silent == [], "a module docstring of one or two lines"
    vague = {"utils", "util", "helpers", "common", "misc"}
    assert [
        module.path for module in UNISONO.modules.values() if vague & {module.path.stem, module.path.parent.name}
    ] == []


def test_nothing_read_can_run_code() -> None:
    """No eval or exec, no unpickling, and torch.load only of weights."""
    problems = []
    for module in UNISONO.modules.values():
        path = module.path
        for node in module.nodes:
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name | ast.Attribute):
                continue
            called = ast.unparse(node.func)
            options = {word.arg: ast.unparse(word.value) for word in node.keywords if word.arg == "weights_only"}
            bare_load = called == "torch.load" and options.get("weights_only") != "True"
            pickled = part_of_pickle(called) and module.part != "launchers"
            if called in {"eval", "exec"} or bare_load or pickled:
                problems.append(f"{path.relative_to(SRC)}:{node.lineno}: {called}")
    assert problems == []


def part_of_pickle(called: str) -> bool:
    """Unpickling is for the launcher's own pipe only: functions given to `un.launch`."""
    return called.split(".")[0] in {"pickle", "cloudpickle"} and called.split(".")[-1] in {
        "load",
        "loads",
        "Unpickler",
    }


def test_all_lists_only_what_exists() -> None:
    missing = []
    for name in sorted(set(MODULES) - {"unisono.__main__"}):
        if name.endswith("_triton") and importlib.util.find_spec("triton") is None:
            continue  # kernels for GPUs
        if part_of(name) in ("plugs.huggingface", "plugs.keras", "plugs.skorch"):
            continue  # with large libraries: their own tests import them
        module = importlib.import_module(name)
        missing += [f"{name}.{public}" for public in getattr(module, "__all__", []) if not hasattr(module, public)]
    assert missing == []


def test_no_module_hides_a_public_name() -> None:
    """`import unisono.memory` would put a module where `un.memory` is a function."""
    import unisono as un

    named = {name for name, module in un._MODULE_OF.items() if module != "unisono"}
    assert not named & {part_of(name) for name in MODULES}


def test_import_is_cheap() -> None:
    """Nothing that only some programs need is imported by `import unisono`."""
    listing = "print(json.dumps(sorted(set(sys.modules) - before)))"
    program = f"import json, sys, torch; before = set(sys.modules); import unisono; {listing}"
    printed = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    added = {name.split(".")[0] for name in json.loads(printed)}
    assert not added & {"rich", "safetensors", "matplotlib", "sklearn", "scipy", "cloudpickle"}
