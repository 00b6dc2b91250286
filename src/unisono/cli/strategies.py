"""`unisono strategies`: the methods that `un.parallel` knows, a line each."""

from __future__ import annotations

import argparse
import importlib.util
from pathlib import Path

from unisono.cli.arguments import Commands, add_methods_option
from unisono.cli.help_text import HelpFormatter

__all__ = ["add_command"]

_EPILOG = """\
Settings stand in parentheses, and reducers may stand for the strategy that uses them: 'powersgd(rank=4)' is
'allreduce(reducer=powersgd(rank=4))'.

examples:
  unisono strategies
  unisono run -n 4 --strategy 'local_sgd(every=8)' train.py
"""


def add_command(commands: Commands) -> None:
    """Add `strategies` to the command line."""
    parser = commands.add_parser(
        "strategies",
        help="list the strategies and reducers",
        description="List the methods that un.parallel and --strategy know, a line each. docs/methods has a page each.",
        epilog=_EPILOG,
        formatter_class=HelpFormatter,
        allow_abbrev=False,
    )
    add_methods_option(parser)
    parser.set_defaults(run=_list)


def _list(_: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    from unisono.spec.catalog import FOLDERS, Kind, names

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
