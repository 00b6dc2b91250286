"""`unisono demo`: the command line of `unisono.demo`."""

from __future__ import annotations

import argparse

from unisono import demo

__all__ = ["DESCRIPTION", "EPILOG", "add_arguments", "run"]

DESCRIPTION = """\
Train a small network on images of digits, with one worker and then with two: accuracy, samples a second, speed-up, and
where the time of a step goes. Nothing is downloaded. With the extra `examples` the digits are scikit-learn's, with
`plots` there is a picture.
"""
EPILOG = """\
examples:
  unisono demo
  unisono demo -n 4 --epochs 5
  unisono demo --picture /tmp/demo.png
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `demo`."""
    demo.add_options(parser)


def run(options: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    """Run `demo`; gives the exit status."""
    return demo.run(options, parser)
