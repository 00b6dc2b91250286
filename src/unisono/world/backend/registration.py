"""The name `unisono` among torch's backends: there as soon as torch is. All else is imported when a group is made.

torch calls `register` when it is imported, by an entry point of this package (group `torch.backends`); `import unisono`
calls it too, for where that is switched off (TORCH_DEVICE_BACKEND_AUTOLOAD=0) or torch is imported later.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

__all__ = ["register"]

NAME = "unisono"
_HOME = "torch.distributed.distributed_c10d"


def register() -> None:
    """Make the backend known to torch: now, or as soon as torch.distributed is imported."""
    home = sys.modules.get(_HOME)
    if home is not None and hasattr(home, "Backend"):
        if NAME.upper() not in home.Backend._plugins:
            home.Backend.register_backend(NAME, _make_group, extended_api=True, devices=["cpu", "cuda"])
    elif not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


def _make_group(options: Any, own: Any) -> Any:
    """What torch calls for each group; `own`: options that the program gave."""
    from unisono.world.backend.group import Group

    return Group.meet(options)


class _Finder(MetaPathFinder):
    """Waits for the import of torch.distributed, and registers the backend after it."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != _HOME:
            return None
        sys.meta_path.remove(self)
        spec = PathFinder.find_spec(name, path, target)
        if spec is None or spec.loader is None:
            return None
        run = spec.loader.exec_module

        def run_and_register(module: ModuleType) -> None:
            run(module)
            register()

        spec.loader.exec_module = run_and_register  # type: ignore[method-assign]
        return spec
