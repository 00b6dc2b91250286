"""`unisono strategies`: the methods that `un.parallel` knows, a line each."""

from __future__ import annotations

import argparse
import importlib.util
from pathlib import Path

from unisono.cli.arguments import add_methods_option

__all__ = ["DESCRIPTION", "EPILOG", "add_arguments", "run"]

DESCRIPTION = """\
List the methods that un.parallel and --strategy know, a line each. docs/methods has a page each.
"""
EPILOG = """\
Settings stand in parentheses, and reducers may stand for the strategy that uses them: 'powersgd(rank=4)' is
'allreduce(reducer=powersgd(rank=4))'.

examples:
  unisono strategies
  unisono run -n 4 --strategy 'local_sgd(every=8)' train.py
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `strategies`."""
    add_methods_option(parser)


def run(_: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    """Run `strategies`; gives the exit status."""
    from unisono.methods.spec import FOLDERS, Kind, names

    kinds: tuple[tuple[str, Kind], ...] = (("strategies", "strategy"), ("reducers", "reducer"))
    for title, kind in kinds:
        try:
            methods = names(kind)
        except ValueError as error:
            parser.error(str(error))
        width = max(map(len, methods), default=0)
        print(f"{title}:")
        for name in methods:
            file = importlib.util.find_spec(f"{FOLDERS[kind]}.{name}")
            print(f"  {name:<{width}}  {_read_summary(Path(str(file and file.origin)))}")
    return 0


def _read_summary(file: Path) -> str:
    """First line of the docstring, read without importing the file (and torch)."""
    import ast

    return (ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or "").partition("\n")[0]
