"""`unisono warm`: the process that `unisono run --warm` keeps for the next run."""

from __future__ import annotations

import argparse

__all__ = ["DESCRIPTION", "EPILOG", "add_arguments", "run"]

DESCRIPTION = """\
Show or stop the process that `unisono run --warm` keeps for ten minutes: it has imported torch, and the workers of
the next run are forked from it.
"""
EPILOG = """\
examples:
  unisono run --warm -n 2 train.py    the first starts it; later ones begin at once
  unisono warm                        is there one, and how many runs has it served
  unisono warm stop
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `warm`."""
    parser.add_argument(
        "action", choices=("status", "stop"), nargs="?", default="status", help="what to do; default: status"
    )


def run(options: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    """Run `warm`; gives the exit status."""
    from unisono.launchers.forks import list_warm, stop_warm

    servers = stop_warm() if options.action == "stop" else list_warm()
    for server in servers:
        text = f"process {server.pid}, started {server.age_s:.0f} s ago, {server.runs} runs"
        print(f"warm server: {text}{'; it ends after them' if options.action == 'stop' else ''}")
    if not servers:
        print("no warm server is running")
    return 0
