"""`unisono stacks`: what every worker of a run is doing now."""

from __future__ import annotations

import argparse
import sys

from unisono.cli.arguments import Commands
from unisono.cli.help_text import HelpFormatter

__all__ = ["add_command"]

_DESCRIPTION = """\
Show what every worker of a run is doing: workers that are in the same place are said together, and those that keep the
others waiting are named. It needs no root, and works while native code holds Python's lock. The run goes on.

RUN is the folder in which the run is recorded or its name, `last`, or the process id of `unisono run`; it may be left
out where one run of yours is under way on this host.
"""
_EPILOG = """\
exit status: 0, or 1 where there is no such run.

examples:
  unisono stacks                   of the one run that is under way
  unisono stacks last --full
"""


def add_command(commands: Commands) -> None:
    """Add `stacks` to the command line."""
    parser = commands.add_parser(
        "stacks",
        help="show what every worker of a run is doing now",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=HelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("name", nargs="?", metavar="RUN", help="a run: its folder, its name, last, or a process id")
    parser.add_argument("--full", action="store_true", help="the whole stacks of all threads, too")
    parser.set_defaults(run=_show)


def _show(options: argparse.Namespace, _: argparse.ArgumentParser) -> int:
    from unisono.launchers.control import Gone
    from unisono.launchers.stacks import ask_for_report
    from unisono.runtime.private_folder import NotPrivate

    try:
        found = ask_for_report(_find_run(options.name))
    except (Gone, NotPrivate, ValueError, LookupError) as error:
        print(f"unisono stacks: {error}", file=sys.stderr)
        return 1
    print("\n".join(found["text"].split("; ")))
    if options.full:
        for rank in sorted(found["stacks"], key=int):
            print(f"\n{found['stacks'][rank]}")
    return 0


def _find_run(name: str | None) -> str | int:
    """What was named, or the launcher of the one run that there is."""
    from unisono.launchers.control import Gone, list_runs

    if name is not None:
        return name
    runs, wrong = list_runs()
    if len(runs) == 1:
        return runs[0].pid
    if runs:
        listed = "\n".join(f"  unisono stacks {run.pid}   {run.program}" for run in runs)
        raise Gone(f"there are {len(runs)} runs; say which:\n{listed}")
    notes = "".join(f"\n  {text}" for text in wrong)
    raise Gone(f"no run of this user is under way on this host{notes}")
