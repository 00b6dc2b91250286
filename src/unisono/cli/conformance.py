"""`unisono conformance`: what every method must do, asked of methods of one's own."""

from __future__ import annotations

import argparse
import importlib.util
import os
from pathlib import Path

__all__ = ["DESCRIPTION", "EPILOG", "add_arguments", "run"]

DESCRIPTION = """\
Run the conformance tests over the methods in DIR/reducers and DIR/strategies: the same mean on every rank, what is not
sent is kept, bytes as stated, checkpoints, AMP, worlds that shrink and grow, and what their FACTS say. Needs pytest.
"""
EPILOG = """\
examples:
  unisono conformance my_methods
  unisono conformance my_methods -x -k terngrad      what follows DIR is for pytest
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `conformance`."""
    parser.add_argument("folder", metavar="DIR", help="the folder with reducers/ and strategies/")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="...", help="arguments of pytest")


def run(options: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    """Run `conformance`; gives the exit status."""
    from unisono.methods.spec import use_methods

    if importlib.util.find_spec("pytest") is None:
        parser.error("the tests are run by pytest: pip install pytest")
    try:
        use_methods(options.folder)
    except ValueError as error:
        parser.error(str(error))
    import pytest

    package = Path(__file__).parents[1]
    found = [package / "conformance", package.parents[1] / "tests" / "conformance"]  # in the wheel, in a checkout
    tests = next(str(folder) for folder in found if folder.is_dir())
    words = ["-q", "-c", os.devnull, "--rootdir", tests, "-p", "no:cacheprovider", tests]
    return int(pytest.main([*words, *options.arguments]))
