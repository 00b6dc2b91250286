"""`unisono runs`: the runs that are recorded, the newest first."""

from __future__ import annotations

import argparse
import json
import sys

from unisono.cli.arguments import parse_count
from unisono.launchers.runtime.run_folder import find_runs_folder, list_runs

__all__ = ["DESCRIPTION", "EPILOG", "add_arguments", "run"]

DESCRIPTION = """\
The recorded runs, the newest first: name, when, workers, method, steps, loss, outcome. `unisono report NAME` shows
one.
"""
EPILOG = """\
They lie in $UNISONO_RUNS, or in ~/.local/state/unisono/runs. The oldest are removed beyond 50 runs or 1 GiB.

examples:
  unisono runs --last 5
  unisono runs --json
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `runs`."""
    parser.add_argument("--json", action="store_true", help="print them as JSON")
    parser.add_argument("--last", type=parse_count, metavar="N", help="only the newest N; default: all")


def run(options: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    """Run `runs`; gives the exit status."""
    from rich.console import Console

    from unisono.observe.reports.summary import show_time, summarise
    from unisono.observe.reports.text import list_run, print_runs
    from unisono.observe.runs.reading import RunReader

    found = []
    for folder in list_runs()[: options.last]:
        reader = RunReader(folder, ends=True)
        reader.poll()
        found.append(summarise(reader))
    if options.json:
        names = ("name", "folder", "started", "seconds", "workers", "strategy", "steps", "outcome", "exit_status")
        whole = [one.as_json() for one in found]
        print(json.dumps([{**{name: one[name] for name in names}, "loss": one["loss"]} for one in whole], indent=1))
        return 0
    if not found:
        print(
            f"unisono: no run is recorded in {find_runs_folder() or 'any folder (UNISONO_RUNS=off)'}", file=sys.stderr
        )
        return 0
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 140)
    print_runs([list_run(one, show_time(one.started)) for one in found], console)
    return 0
