"""`unisono strategies`: the methods that `un.parallel` knows, a line each."""

from __future__ import annotations

import argparse
from pathlib import Path

from unisono.cli.arguments import Commands

__all__ = ["add_command"]


def add_command(commands: Commands) -> None:
    """Add `strategies` to the command line."""
    commands.add_parser("strategies", help="list the strategies and reducers").set_defaults(run=_list)


def _list(_: argparse.Namespace, __: argparse.ArgumentParser) -> int:
    for title, folder in (("strategies", "strategies"), ("reducers", "reducers")):
        here = Path(__file__).parents[1] / folder
        found = {file.stem: file for file in here.glob("*.py")}
        found |= {file.parent.name: file for file in here.glob("*/__init__.py")}
        methods = {name: file for name, file in sorted(found.items()) if not name.startswith("_")}
        width = max(map(len, methods), default=0)
        print(f"{title}:")
        for name, file in methods.items():
            print(f"  {name:<{width}}  {_read_summary(file)}")
    return 0


def _read_summary(file: Path) -> str:
    """First line of the docstring, read without importing the file (and torch)."""
    import ast

    return (ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or "").partition("\n")[0]
