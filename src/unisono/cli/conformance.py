"""`unisono conformance`: what every method must do, asked of methods of one's own."""

from __future__ import annotations

import argparse
import importlib.util
import os
from pathlib import Path

from unisono.cli.arguments import Commands
from unisono.cli.help_text import HelpFormatter

__all__ = ["add_command"]

_DESCRIPTION = """\
Run the conformance tests over the methods in DIR/reducers and DIR/strategies: the same mean on every rank, what is not
sent is kept, bytes as stated, checkpoints, AMP, worlds that shrink and grow, and what their FACTS say. Needs pytest.
"""
_EPILOG = """\
examples:
  unisono conformance my_methods
  unisono conformance my_methods -x -k terngrad      what follows DIR is for pytest
"""


def add_command(commands: Commands) -> None:
    """Add `conformance` to the command line."""
    parser = commands.add_parser(
        "conformance",
        help="test methods of your own as ours are tested",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=HelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("folder", metavar="DIR", help="the folder with reducers/ and strategies/")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="...", help="arguments of pytest")
    parser.set_defaults(run=_run, parser=parser)


def _run(options: argparse.Namespace, _: argparse.ArgumentParser) -> int:
    from unisono.spec.catalog import use_methods

    if importlib.util.find_spec("pytest") is None:
        options.parser.error("the tests are run by pytest: pip install pytest")
    try:
        use_methods(options.folder)
    except ValueError as error:
        options.parser.error(str(error))
    import pytest

    package = Path(__file__).parents[1]
    found = [package / "conformance", package.parents[1] / "tests" / "conformance"]  # in the wheel, in a checkout
    tests = next(str(folder) for folder in found if folder.is_dir())
    words = ["-q", "-c", os.devnull, "--rootdir", tests, "-p", "no:cacheprovider", tests]
    return int(pytest.main([*words, *options.arguments]))
