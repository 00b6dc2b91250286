"""Commands about this machine: what works here, emulated hosts, the warm server, and a first training."""

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

from unisono.cli.arguments import Command

if TYPE_CHECKING:
    from unisono.observe.doctor import Finding

__all__ = ["COMMANDS"]

# unisono doctor ---------------------------------------------------------------------------------------------------

_DOCTOR = """\
Examine this environment: what is installed, and whether its versions are known
to work; which transports work (two workers try each); devices, memory,
limits, huge pages; the network; engines and the lab. It leaves nothing behind.

Each line is ok, warn (works, but could work better) or bad, with advice.
"""
_DOCTOR_MORE = """\
exit status: 0 if nothing is bad, 1 otherwise.

examples:
  unisono doctor                       this host, in a few seconds
  unisono doctor --hosts a,b,c         and these, by ssh: are they reached, which
                                       versions, clocks, the speed of each link
  unisono doctor --json > doctor.json  for a bug report
"""
_COLOURS = {"ok": "\033[32m", "warn": "\033[33m", "bad": "\033[31m"}


def _add_doctor(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print everything as JSON")
    group = parser.add_argument_group("other hosts")
    group.add_argument("--hosts", type=_parse_hosts, metavar="A,B", help="hosts that ssh reaches without a password")
    group.add_argument("--options", type=shlex.split, default=[], metavar="TEXT", help="more options for ssh")
    group.add_argument("--python", metavar="PATH", help="the hosts' Python; default: the path of this host's")


def _parse_hosts(text: str) -> list[str]:
    names = [name for name in text.split(",") if name]
    if not names or len(set(names)) != len(names):
        raise argparse.ArgumentTypeError(f"got {text!r}; expected different hosts, as in a,b")
    return names


def _run_doctor(options: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
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


# unisono lab ------------------------------------------------------------------------------------------------------

_LAB = """\
Show whether this machine can create hosts from network namespaces, or clean up after killed runs.
"""
_ABOUT = """\
`unisono run` creates emulated hosts:

  unisono run -n 4 --hosts 4 --net 100mbit train.py

Each has an address and a link of its own on this machine. They end with the run, also when its launcher is killed
(SIGKILL). `unisono lab clean` is for processes of runs whose launcher and guard were both killed, and for the named
network namespaces of earlier versions. See docs/lab.md.
"""
_LAB_MORE = f"""\
{_ABOUT}
examples:
  unisono lab
  unisono lab clean
"""


def _add_lab(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "action", choices=("status", "clean"), nargs="?", default="status", help="what to do; default: status"
    )


def _run_lab(options: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    from unisono.launchers.lab.hosts import clean, find_obstacle, find_processes

    if options.action == "clean":
        for line in clean() or ["nothing to clean up"]:
            print(line)
        return 0
    if obstacle := find_obstacle():
        print(f"Hosts cannot be network namespaces here: {obstacle}.")
        print("`unisono run --hosts` still works: the workers' own transport throttles the links.")
    else:
        print("Hosts can be network namespaces here, with links that the kernel throttles.")
    left = find_processes()
    if left:
        print(f"{len(left)} process(es) of runs whose launcher is gone: `unisono lab clean` ends them.")
    print(_ABOUT, end="")
    return 0


# unisono warm -----------------------------------------------------------------------------------------------------

_WARM = """\
Show or stop the process that `unisono run --warm` keeps for ten minutes: it has imported torch, and the workers of
the next run are forked from it.
"""
_WARM_MORE = """\
examples:
  unisono run --warm -n 2 train.py    the first run starts it; later ones begin at once
  unisono warm                        is there one, and how many runs has it served
  unisono warm stop
"""


def _add_warm(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "action", choices=("status", "stop"), nargs="?", default="status", help="what to do; default: status"
    )


def _run_warm(options: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    from unisono.launchers.forks import list_warm, stop_warm

    servers = stop_warm() if options.action == "stop" else list_warm()
    for server in servers:
        text = f"process {server.pid}, started {server.age_s:.0f} s ago, {server.runs} runs"
        print(f"warm server: {text}{'; it ends after its runs' if options.action == 'stop' else ''}")
    if not servers:
        print("no warm server is running")
    return 0


# unisono demo -----------------------------------------------------------------------------------------------------

_DEMO = """\
Train a small network on images of digits, with one worker and then with two: accuracy, samples per second, speed-up,
and where the time of each step goes. Nothing is downloaded. With the extra `examples` the digits are
scikit-learn's, with `plots` there is a picture.
"""
_DEMO_MORE = """\
examples:
  unisono demo
  unisono demo -n 4 --epochs 5
  unisono demo --picture /tmp/demo.png
"""


def _add_demo(parser: argparse.ArgumentParser) -> None:
    from unisono import demo

    demo.add_options(parser)


def _run_demo(options: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    from unisono import demo

    return demo.run(options, parser)


COMMANDS = {
    "doctor": Command(_DOCTOR, _DOCTOR_MORE, _add_doctor, _run_doctor),
    "lab": Command(_LAB, _LAB_MORE, _add_lab, _run_lab),
    "warm": Command(_WARM, _WARM_MORE, _add_warm, _run_warm),
    "demo": Command(_DEMO, _DEMO_MORE, _add_demo, _run_demo),
}
