"""`unisono scale`: how many workers a run has, and another number of them."""

from __future__ import annotations

import argparse
import sys
import time

from unisono.cli.arguments import find_only_run, parse_count

__all__ = ["DESCRIPTION", "EPILOG", "add_arguments", "run"]

DESCRIPTION = """\
Change the number of workers of a run that was started with `unisono run -n MIN:MAX` by you on this host; without N,
show it. New workers take part as soon as they have come to where the others are; workers that are too many leave after
a step. The answer comes when the run has accepted the number (with --wait: when it has so many workers).
"""
EPILOG = """\
exit status: 0 where the run has accepted the number, 1 where there is no such run or it refuses.

examples:
  unisono scale                    how many workers the run has
  unisono scale 3 --wait           three, and come back when they are there
  unisono scale 3 --run 4711       of the run whose `unisono run` has this process id
"""
_POLL_S = 0.1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `scale`."""
    parser.add_argument("workers", type=parse_count, nargs="?", metavar="N", help="how many workers, from MIN to MAX")
    parser.add_argument(
        "--run",
        dest="pid",
        type=parse_count,
        metavar="PID",
        help="process id of `unisono run`, where there are several",
    )
    parser.add_argument("--wait", action="store_true", help="until the run has so many workers")


def run(options: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    """Run `scale`; gives the exit status."""
    from unisono.launchers.control import Gone
    from unisono.launchers.runtime.files import NotPrivate

    try:
        _change(options)
    except (Gone, NotPrivate, ValueError) as error:
        print(f"unisono scale: {error}", file=sys.stderr)
        return 1
    return 0


def _change(options: argparse.Namespace) -> None:
    """Do what the command line asks for. Raises Gone or NotPrivate, and ValueError where the run refuses."""
    from unisono.launchers.control import Gone, ask

    pid = find_only_run("--run", elastic=True) if options.pid is None else options.pid
    if options.workers is None:
        print(ask(pid, {"do": "status"}).describe())
        return
    now = ask(pid, {"do": "scale", "workers": options.workers})
    while options.wait and now.workers != options.workers:
        time.sleep(_POLL_S)
        now = ask(pid, {"do": "status"})
        if now.wanted != options.workers:
            raise Gone(f"the run aims at {now.wanted} workers now: someone has asked for another number")
    print(now.describe())
