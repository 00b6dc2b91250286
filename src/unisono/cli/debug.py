"""`unisono debug`: the debugger's prompt for a run that is under way."""

from __future__ import annotations

import argparse
import sys

__all__ = ["DESCRIPTION", "EPILOG", "add_arguments", "run"]

DESCRIPTION = """\
The debugger's prompt for a run of yours on this host: of workers that are stopped at un.breakpoint(), or have raised
under --pdb. Where none is stopped, all are, at their next collective or step. `h` at the prompt lists its commands;
leaving it lets all workers go on. See docs/debugger.md.
"""
EPILOG = """\
examples:
  unisono debug              the one run that is under way
  unisono debug 2026-11-16_15-40-12_train
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `debug`."""
    parser.add_argument("debugged", nargs="?", metavar="RUN", help="its name, where there are several runs")


def run(options: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    """Run `debug`; gives the exit status."""
    from unisono.launchers.runtime.channel import Unreachable
    from unisono.launchers.runtime.debugger.hub import attach, list_announced
    from unisono.launchers.runtime.debugger.prompt import Prompt
    from unisono.launchers.runtime.files import NotPrivate

    try:
        runs = list_announced()
        found = [run for run in runs if options.debugged in (None, run.run, str(run.pid))]
        if len(found) != 1:
            print(f"unisono debug: {_explain(options.debugged, [(r.run, r.program) for r in runs])}", file=sys.stderr)
            return 1
        link = attach(found[0])
    except (NotPrivate, Unreachable) as error:
        print(f"unisono debug: {error}", file=sys.stderr)
        return 1
    if sys.stdin.isatty():
        import readline  # noqa: F401  # lines can be edited, and come again
    try:
        Prompt(link, input, lambda text: print(text, flush=True)).run(stop=True)
    except KeyboardInterrupt:  # the connection ends with this process, and all workers go on
        print()
        return 130
    return 0


def _explain(asked: str | None, runs: list[tuple[str, str]]) -> str:
    listed = "".join(f"\n  unisono debug {name}   {program}" for name, program in runs)
    if not runs:
        return "no run of this user with workers that have joined is under way on this host"
    if asked is None:
        return f"there are {len(runs)} runs; say which:{listed}"
    return f"there is no run {asked!r}; there are:{listed}"
