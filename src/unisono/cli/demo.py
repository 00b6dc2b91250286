"""`unisono demo`: the command line of `unisono.demo`."""

from __future__ import annotations

import argparse

from unisono import demo
from unisono.cli.arguments import Commands
from unisono.cli.help_text import HelpFormatter

__all__ = ["add_command"]

_DESCRIPTION = """\
Train a small network on images of digits, with one worker and then with two: accuracy, samples a second, speed-up, and
where the time of a step goes. Nothing is downloaded. With the extra `examples` the digits are scikit-learn's, with
`plots` there is a picture.
"""
_EPILOG = """\
examples:
  unisono demo
  unisono demo -n 4 --epochs 5
  unisono demo --picture /tmp/demo.png
"""


def add_command(commands: Commands) -> None:
    """Add `demo` to the command line."""
    parser = commands.add_parser(
        "demo",
        help="train a small network with one worker and with two",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=HelpFormatter,
        allow_abbrev=False,
    )
    demo.add_options(parser)
    parser.set_defaults(run=_run, parser=parser)


def _run(options: argparse.Namespace, _: argparse.ArgumentParser) -> int:
    return demo.run(options, options.parser)
