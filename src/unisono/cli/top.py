"""`unisono top`: what every rank of a run does, in the terminal."""

from __future__ import annotations

import argparse

__all__ = ["DESCRIPTION", "EPILOG", "add_arguments", "run"]

DESCRIPTION = """\
Show what every rank of a run does: its step, how fast it is, where its time goes, who is slow, lost or silent; the
loss, and verdicts. It follows the run until that is over. Where there are more ranks than lines, the worst come first.
"""
EPILOG = """\
examples:
  unisono top                      the newest run of this folder, until it is over
  unisono top last --once          one picture, for a log
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `top`."""
    parser.add_argument("run_name", nargs="?", default="last", metavar="RUN", help="a name or a folder; default: last")
    parser.add_argument("--once", action="store_true", help="print one picture and end; so it is without a terminal")


def run(options: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    """Run `top`; gives the exit status."""
    from unisono.launchers.runtime.run_folder import NoSuchRun, find_run
    from unisono.observe.live.terminal import show_top

    try:
        folder = find_run(options.run_name)
    except NoSuchRun as error:
        parser.error(str(error))
    show_top(folder, once=options.once)
    return 0
