"""`unisono doctor`: what is installed and works here, line by line, with advice."""

from __future__ import annotations

import argparse
import json
import shlex
import shutil
import sys
import textwrap
import time
from collections.abc import Sequence
from dataclasses import asdict
from itertools import groupby
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from unisono.observe.doctor import Finding

__all__ = ["DESCRIPTION", "EPILOG", "add_arguments", "run"]

DESCRIPTION = """\
Examine this environment: what is installed, and whether its versions are known
to work; which transports work (each is tried by two workers); devices, memory,
limits, huge pages; the network; engines and the lab. Nothing is left behind.

Each line is ok, warn (it works, and could work better) or bad, with advice.
"""
EPILOG = """\
exit status: 0 where nothing is bad, 1 otherwise.

examples:
  unisono doctor                       this host, in a few seconds
  unisono doctor --hosts a,b,c         and these, by ssh: are they reached, which
                                       versions, clocks, the speed of each link
  unisono doctor --json > doctor.json  for a bug report
"""
_COLOURS = {"ok": "\033[32m", "warn": "\033[33m", "bad": "\033[31m"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `doctor`."""
    parser.add_argument("--json", action="store_true", help="print everything as JSON")
    group = parser.add_argument_group("other hosts")
    group.add_argument("--hosts", type=_parse_hosts, metavar="A,B", help="hosts that ssh reaches without a password")
    group.add_argument("--options", type=shlex.split, default=[], metavar="TEXT", help="more options for ssh")
    group.add_argument("--python", metavar="PATH", help="the hosts' Python; default: where this host has it")


def _parse_hosts(text: str) -> list[str]:
    names = [name for name in text.split(",") if name]
    if not names or len(set(names)) != len(names):
        raise argparse.ArgumentTypeError(f"got {text!r}; expected different hosts, as in a,b")
    return names


def run(options: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    """Run `doctor`; gives the exit status."""
    from unisono.launchers.runtime.run_folder import find_version
    from unisono.observe.doctor import examine, worst_of
    from unisono.observe.doctor.network import Hosts

    if options.hosts is None and (options.options or options.python):
        parser.error("--options and --python go with --hosts")
    began = time.monotonic()
    found = examine(None if options.hosts is None else Hosts(options.hosts, options.options, options.python))
    worst = worst_of(found)
    if options.json:
        whole = {"unisono": find_version(), "state": worst, "seconds": round(time.monotonic() - began, 1)}
        print(json.dumps({**whole, "findings": [asdict(one) for one in found]}, indent=1))
    else:
        print(_write(found, colours=sys.stdout.isatty()))
    return 1 if worst == "bad" else 0


def _write(found: Sequence[Finding], *, colours: bool = False) -> str:
    """The report as text, section by section."""
    width = max(60, shutil.get_terminal_size((100, 24)).columns)
    lines = []
    for section, each in groupby(found, key=lambda one: one.section):
        lines += [section, *(line for one in each for line in _write_one(one, width, colours=colours)), ""]
    counts = {state: sum(one.state == state for one in found) for state in _COLOURS}
    lines.append(", ".join(f"{count} {state}" for state, count in counts.items() if count))
    return "\n".join(lines)


def _write_one(one: Finding, width: int, *, colours: bool) -> list[str]:
    head = f"  {one.state:<4}  "
    lines = textwrap.wrap(
        f"{one.name}: {one.text}", width, initial_indent=head, subsequent_indent=" " * 10, break_on_hyphens=False
    )
    if colours:
        lines[0] = lines[0].replace(one.state, f"{_COLOURS[one.state]}{one.state}\033[0m", 1)
    if one.advice:
        lines += textwrap.wrap(
            one.advice, width, initial_indent=" " * 8 + "-> ", subsequent_indent=" " * 11, break_on_hyphens=False
        )
    return lines
