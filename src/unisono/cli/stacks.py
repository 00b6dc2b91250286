"""`unisono stacks`: what every worker of a run is doing now."""

from __future__ import annotations

import argparse
import sys

from unisono.cli.arguments import find_only_run

__all__ = ["DESCRIPTION", "EPILOG", "add_arguments", "run"]

DESCRIPTION = """\
Show what every worker of a run is doing: workers that are in the same place are said together, and those that keep the
others waiting are named. It needs no root, and works while native code holds Python's lock. The run goes on.

RUN is the folder in which the run is recorded or its name, `last`, or the process id of `unisono run`; it may be left
out where one run of yours is under way on this host.
"""
EPILOG = """\
exit status: 0, or 1 where there is no such run.

examples:
  unisono stacks                   of the one run that is under way
  unisono stacks last --full
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `stacks`."""
    parser.add_argument("name", nargs="?", metavar="RUN", help="a run: its folder, its name, last, or a process id")
    parser.add_argument("--full", action="store_true", help="the whole stacks of all threads, too")


def run(options: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    """Run `stacks`; gives the exit status."""
    from unisono.launchers.control import Gone, ask_for_report
    from unisono.launchers.runtime.files import NotPrivate

    try:
        found = ask_for_report(find_only_run("unisono stacks") if options.name is None else options.name)
    except (Gone, NotPrivate, ValueError, LookupError) as error:
        print(f"unisono stacks: {error}", file=sys.stderr)
        return 1
    print("\n".join(found["text"].split("; ")))
    if options.full:
        for rank in sorted(found["stacks"], key=int):
            print(f"\n{found['stacks'][rank]}")
    return 0
