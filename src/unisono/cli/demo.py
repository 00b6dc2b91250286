"""`unisono demo`: the command line of `unisono.demo`."""

from __future__ import annotations

import argparse

from unisono import demo
from unisono.cli.arguments import Commands

__all__ = ["add_command"]


def add_command(commands: Commands) -> None:
    """Add `demo` to the command line."""
    parser = commands.add_parser(
        "demo",
        help="train a small network with 1 and 2 workers; shows where the time goes",
        description=demo.__doc__,
    )
    demo.add_options(parser)
    parser.set_defaults(run=_run, parser=parser)


def _run(options: argparse.Namespace, _: argparse.ArgumentParser) -> int:
    return demo.run(options, options.parser)
