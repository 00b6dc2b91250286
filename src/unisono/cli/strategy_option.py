"""`--strategy` and UNISONO_STRATEGY: what no worker could build is refused before there are any, without torch.

A program may have methods of its own (`unisono.spec.extend`), which are known in its workers only. So a name that we do
not know is left to them, if anything that the program may import looks as if it adds methods.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

__all__ = ["check_strategy"]

_VARIABLE = "UNISONO_STRATEGY"
_OURS = Path("cli", "strategy_option.py")  # in a folder that is unisono itself
_ADDS_METHODS = re.compile(
    r"unisono\.(methods\.)?(spec|strategies|reducers)\b|\bimport\b.*\bspec\b|\bspec\.extend\b|\bextend\(\s*(strategies|reducers|\*\*)"
)
_MOST_FILES, _MOST_FOLDERS = 2000, 5000


def check_strategy(options: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    """End with an error where the workers could not read the strategy, or would not know its name."""
    name, text = ("--strategy", options.strategy) if options.strategy is not None else (_VARIABLE, None)
    text = (os.environ.get(_VARIABLE, "") if text is None else text).strip()
    if not text:
        return
    from unisono.methods.spec import find_unknown

    try:
        problem = find_unknown(text)
    except ValueError as error:
        parser.error(f"{name}: {error}")
    if problem is not None and not _may_add_methods(options.program):
        parser.error(f"{name}: {problem}")


def _may_add_methods(program: str) -> bool:
    """Whether something that the program may import could make methods known; True also where there is too much to
    read."""
    folders = {Path.cwd(), Path(program).resolve().parent, *_list_import_folders()}
    top = [one for one in folders if not any(other in one.parents for other in folders)]
    files = (file for folder in top for file in _list_sources(folder))
    for count, file in enumerate(files):
        if file is None or count == _MOST_FILES or _adds_methods(file):
            return True
    return (Path(program).is_file() and _adds_methods(Path(program))) or _is_required()


def _list_import_folders() -> Iterator[Path]:
    """Folders of PYTHONPATH and of packages that are installed in place; not Python's own, nor site-packages."""
    own = [Path(prefix).resolve() for prefix in (sys.prefix, sys.base_prefix)]
    for entry in sys.path:
        path = Path(entry).resolve()
        if path.is_dir() and "site-packages" not in path.parts and not any(path.is_relative_to(one) for one in own):
            yield path


def _list_sources(folder: Path) -> Iterator[Path | None]:
    """The Python files below a folder but for ours; ends with None where there are too many folders."""
    for count, (here, folders, files) in enumerate(os.walk(folder)):
        if count == _MOST_FOLDERS:
            yield None
            return
        folders[:] = [
            name
            for name in folders
            if not name.startswith((".", "__")) and name != "site-packages" and not Path(here, name, _OURS).exists()
        ]
        yield from (Path(here, name) for name in files if name.endswith(".py"))


def _adds_methods(file: Path) -> bool:
    try:
        return _ADDS_METHODS.search(file.read_text(encoding="utf-8", errors="replace")) is not None
    except OSError:
        return True


def _is_required() -> bool:
    """Whether an installed package needs unisono: it may have methods."""
    for package in importlib.metadata.distributions():
        needed = [re.split(r"[^\w.-]", text, maxsplit=1)[0] for text in package.requires or ()]
        if "unisono" in needed and package.metadata["Name"] != "unisono":
            return True
    return False
