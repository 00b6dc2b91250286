"""Import paths of before the package had rooms: `unisono.reducer` is `unisono.methods.reducer`, the same module. And of
modules with public classes that have become a part of another.

Programs, methods of one's own, pickles and recorded runs name modules by these paths. One finder serves them all, so
that a module is one object under both names.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Sequence
from importlib.abc import InspectLoader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import CodeType, ModuleType

__all__ = ["find_new_path", "serve_old_paths"]

_MOVED = {
    "world": "backend",
    "methods": "autograd buckets checks exchange facts hybrid kernels model_copies offload reducer "
    "reducers spec strategies strategy",
    "training": "batch_norm checkpoint data progress trainer",
    "launchers": "lab on runtime",
    "observe": "doctor live pages reports runs",
    "predict": "compare costs footprint planner rehearsal simulation",
    "tables": "boost estimators map_reduce",
    "plugs": "comm_hook horovod huggingface keras lightning skorch",
}
_NEW_PATHS = {f"unisono.{name}": f"unisono.{room}.{name}" for room, names in _MOVED.items() for name in names.split()}
_MERGED = {  # into another module
    "unisono.predict.simulation.validation": "unisono.predict.simulation.plan_file",
    "unisono.tables.boost.ensembles": "unisono.tables.boost.boosted",
    "unisono.tables.boost.shared_model": "unisono.tables.boost.boosted",
    "unisono.tables.estimators.online": "unisono.tables.estimators.logistic",
}


def find_new_path(name: str) -> str | None:
    """Where a module is now; None if it has not moved.

    >>> find_new_path("unisono.strategies.zero.units"), find_new_path("unisono.world")
    ('unisono.methods.strategies.zero.units', None)
    """
    head = ".".join(name.split(".", 2)[:2])
    new = _NEW_PATHS[head] + name.removeprefix(head) if head in _NEW_PATHS else name
    new = _MERGED.get(new, new)
    return new if new != name else None


def serve_old_paths() -> None:
    """Let imports by old paths find the modules. First of all finders: the others would load a second copy."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


class _Finder(MetaPathFinder, InspectLoader):
    """Gives a module by its old path: the one that is imported by its new path."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        new = find_new_path(name)
        found = None if new is None else importlib.util.find_spec(new)
        return (
            None if found is None else ModuleSpec(name, self, is_package=found.submodule_search_locations is not None)
        )

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = importlib.import_module(find_new_path(spec.name) or "")
        spec.loader_state = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        """It has been run. The import system has just given it the spec of the old path: take that back."""
        assert module.__spec__ is not None
        module.__spec__ = module.__spec__.loader_state

    def get_code(self, fullname: str) -> CodeType | None:
        """For `python -m`."""
        spec = importlib.util.find_spec(find_new_path(fullname) or "")
        assert spec is not None
        assert isinstance(spec.loader, InspectLoader)
        return spec.loader.get_code(spec.name)

    def get_source(self, fullname: str) -> str | None:
        """For debuggers and tracebacks."""
        spec = importlib.util.find_spec(find_new_path(fullname) or "")
        return spec.loader.get_source(spec.name) if spec and isinstance(spec.loader, InspectLoader) else None
