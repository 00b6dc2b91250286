"""What the architecture test checks, as functions over the folder of a package: each returns what it found wrong."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

ROOMS = {"methods", "training", "observe", "predict", "tables", "plugs"}  # folders of parts
APART = {
    "world.backend",
    "launchers.lab",
    "launchers.on",
    "launchers.runtime",
}  # parts in folders that are parts themselves


def part_of(name: str) -> str:
    """The part that a module belongs to: a folder or file of a room, or of the package.

    `unisono.methods.spec.grammar` belongs to `methods.spec`, `unisono.world.transports.threads` to `world`, and
    `unisono` to itself.
    """
    words = name.split(".")[1:3] or [name]
    return ".".join(words) if words[0] in ROOMS or ".".join(words) in APART else words[0]


@dataclass(frozen=True)
class Module:
    """A file of the package, by the name under which it is imported."""

    name: str
    path: Path

    @property
    def part(self) -> str:
        """The part that it belongs to."""
        return part_of(self.name)

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.path.read_text())

    @cached_property
    def nodes(self) -> list[ast.AST]:
        """All of the tree, walked once for all rules."""
        return list(ast.walk(self.tree))


class Package:
    """A package as it lies in a folder; nothing of it is imported."""

    def __init__(self, folder: Path) -> None:
        self.name = folder.name
        files = sorted(folder.rglob("*.py"))
        named = {
            ".".join(f.relative_to(folder.parent).with_suffix("").parts).removesuffix(".__init__"): f for f in files
        }
        self.modules = {name: Module(name, path) for name, path in named.items()}

    def find_imports(self, module: Module) -> Iterator[tuple[int, str]]:
        """Line and name of every module of the package that `module` imports: lazily and for typing too."""
        for node in module.nodes:
            names: list[str] = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                base = self.resolve(module, node)
                names = [f"{base}.{a.name}" if f"{base}.{a.name}" in self.modules else base for a in node.names]
            elif isinstance(node, ast.Call) and _called(node).endswith("import_module"):
                names = [str(arg.value) for arg in node.args[:1] if isinstance(arg, ast.Constant)]
            for name in dict.fromkeys(names):
                if name.split(".")[0] == self.name:
                    yield node.lineno, name

    def resolve(self, module: Module, node: ast.ImportFrom) -> str:
        """The module that `from ... import` names, where that is relative too."""
        if not node.level:
            return node.module or ""
        package = module.name if module.path.name == "__init__.py" else module.name.rpartition(".")[0]
        for _ in range(node.level - 1):
            package = package.rpartition(".")[0]
        return f"{package}.{node.module}" if node.module else package


def _called(node: ast.Call) -> str:
    """The last word of what is called."""
    return node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")


def find_upward_imports(package: Package, layers: Sequence[str]) -> list[str]:
    """Imports that neither go to a lower layer nor stay in their part; `layers` are lines of parts, lowest first."""
    heights = {part: height for height, parts in enumerate(layers) for part in parts.split()}
    found = [f"{module.name} has no layer" for module in package.modules.values() if module.part not in heights]
    for module in package.modules.values():
        for line, name in package.find_imports(module):
            other = part_of(name)
            if other != module.part and heights.get(other, -1) >= heights.get(module.part, len(layers)):
                found.append(f"{module.name}:{line} imports {name}, which is not below it")
    return found


def find_other_imports(package: Package, part: str, allowed: Collection[str]) -> list[str]:
    """Imports of `part` from anything but itself and `allowed`."""
    found = []
    for module in package.modules.values():
        if module.part == part:
            for line, name in package.find_imports(module):
                if part_of(name) not in {part, *allowed}:
                    found.append(f"{module.name}:{line} imports {name}")
    return found


def find_method_problems(package: Package, folder: str) -> list[str]:
    """In a folder of methods, each is a file or a folder of its name and imports no other; `_x` is for several."""
    start = f"{package.name}.{folder}."
    found = []
    for module in package.modules.values():
        if module.part != folder:
            continue
        own = module.name.removeprefix(start).split(".")[0] if module.name.startswith(start) else ""
        for line, name in package.find_imports(module):
            other = name.removeprefix(start).split(".")[0] if name.startswith(start) else own
            if other != own and not other.startswith("_"):
                found.append(f"{module.name}:{line} imports {name}, another method")
        if own and module.path.name == f"{own}.py" and module.path.with_suffix("").is_dir():
            found.append(f"{module.name} is a file and a folder")
    return found


# Classes in two files ----------------------------------------------------------------------------------------


def find_halved_classes(package: Package, bases: Collection[str]) -> list[str]:
    """Classes that are continued in another file: only one class of the package derives from them, elsewhere.

    A base that several derive from is an abstraction, and so is one without code of its own: a protocol, or a class
    all of whose methods are abstract. `bases` names the classes that users derive from.
    """
    classes = {f"{m.name}.{c.name}": (m, c) for m in package.modules.values() for c in _find_classes(m)}
    derived: dict[str, list[str]] = defaultdict(list)
    for name, (module, node) in classes.items():
        known = _find_names(package, module)
        for base in node.bases:
            written = ast.unparse(base).split("[")[0]
            head, _, rest = written.partition(".")
            target = known.get(head, f"{module.name}.{head}") + (f".{rest}" if rest else "")
            if target in classes:
                derived[target].append(name)
    found = []
    for base, heirs in derived.items():
        module, node = classes[base]
        if len(heirs) == 1 and classes[heirs[0]][0] is not module and base not in bases and _has_code(node):
            found.append(f"{base} is continued by {heirs[0]} alone: make it a collaborator")
    return found


def _find_classes(module: Module) -> list[ast.ClassDef]:
    return [node for node in module.nodes if isinstance(node, ast.ClassDef)]


def _find_names(package: Package, module: Module) -> dict[str, str]:
    """What the imports of a module call what: a name in it -> where that is defined."""
    found = {}
    for node in module.nodes:
        if isinstance(node, ast.ImportFrom):
            base = package.resolve(module, node)
            for alias in node.names:
                found[alias.asname or alias.name] = _follow(package, f"{base}.{alias.name}")
        elif isinstance(node, ast.Import):
            found |= {alias.asname: alias.name for alias in node.names if alias.asname}
    return found


def _follow(package: Package, name: str) -> str:
    """Where a name that a package re-exports is defined."""
    owner, _, leaf = name.rpartition(".")
    module = package.modules.get(owner)
    if module is None or name in package.modules:
        return name
    for node in module.tree.body:
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                if (alias.asname or alias.name) == leaf:
                    return _follow(package, f"{package.resolve(module, node)}.{alias.name}")
    return name


def _has_code(node: ast.ClassDef) -> bool:
    if any(ast.unparse(base).split("[")[0].endswith("Protocol") for base in node.bases):
        return False
    methods = [item for item in node.body if isinstance(item, ast.FunctionDef)]
    return any("abstractmethod" not in ast.unparse(d) for m in methods for d in m.decorator_list or [ast.Name("own")])


# Sizes -------------------------------------------------------------------------------------------------------


def find_long_code(package: Package, *, file_lines: int, function_lines: int) -> list[str]:
    """Files and functions with more lines than that; a docstring is not counted."""
    found = []
    for module in package.modules.values():
        lines = module.path.read_text().count("\n")
        if lines > file_lines:
            found.append(f"{module.name} has {lines} lines")
        for node in module.nodes:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno:
                first = node.body[1 if ast.get_docstring(node) and len(node.body) > 1 else 0]
                body = node.end_lineno - first.lineno + 1
                if body > function_lines:
                    found.append(f"{module.name}.{node.name} has {body} lines")
    return found
