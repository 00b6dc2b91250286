"""`unisono strategies`: the methods that `un.parallel` knows, a line each."""

from __future__ import annotations

import argparse
from pathlib import Path

from unisono.cli.arguments import Commands
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
    parser.set_defaults(run=_list)


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
