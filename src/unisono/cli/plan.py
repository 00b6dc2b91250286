"""`unisono plan`: which method trains a program fastest on these workers, and why."""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import tempfile
import textwrap
import time
from pathlib import Path
from typing import Any

from unisono.cli import run as run_workers
from unisono.cli.arguments import Command
from unisono.launchers.runtime.variables import name_observer

__all__ = ["COMMANDS"]

_DESCRIPTION = """\
Find the method that trains a program fastest on these workers and this network, without trying all of them.

The program is started in N workers as by `unisono run`, with the same options, and ended when everything is measured:
its own steps show compute and memory, pauses between them the network, and a few steps under each method with messages
that take no time show what compression costs and when gradients are ready. From these the step of every method is
predicted. Nothing is saved, and the trained model is discarded.

The ranking is by predicted time to a loss: the step, over what a method learned per sample in our measurements. It has
methods that train like all-reduce: exactly, rounded, or compressed with the error made up for later. Others (local
steps, gossip, ...) are listed below them. See docs/planning.md.
"""
_EPILOG = """\
examples:
  unisono plan -n 4 train.py --epochs 3
  unisono plan --verify -n 4 train.py
  unisono plan -n 4 --methods "allreduce; topk(k=0.01); powersgd(rank=2)" train.py
  unisono plan --on ssh -n 8 --hosts a:4,b:4 train.py
"""
_TAKEN = (  # of the options of `run`
    *("workers", "module", "threads", "output", "warm", "output_dir", "methods", "on", "program", "arguments", "help"),
    *("address", "master", "cpus", "gpus", "hosts", "net", "shaper", "python", "wait_s", "options"),
    *("encrypt", "interface", "ports"),
)
_HARMLESS = ("record", "grace", "balance")  # which nobody needs here
_GRADES = ("exact", "rounded", "compressed", "other")
_TIMES_VERIFIED = 3


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    run_workers.add_arguments(parser)
    _hide_options(parser)
    group = parser.add_argument_group("the plan")
    group.add_argument(
        "--allow",
        type=_parse_grades,
        default=list(_GRADES[:3]),
        metavar="GRADES",
        help=f"rank methods with these effects on training: {', '.join(_GRADES)}, or all; default: all but other",
    )
    group.add_argument(
        "--verify",
        nargs="?",
        type=int,
        const=_TIMES_VERIFIED,
        default=0,
        metavar="K",
        help="run the best K and show measured beside predicted steps; default: none, without a number: 3",
    )
    group.add_argument(
        "--budget",
        type=float,
        default=25.0,
        metavar="S",
        help="start no further method after this many seconds; default: 25",
    )
    group.add_argument("--json", metavar="FILE", help="write the plan and all measurements")
    parser.set_defaults(output="rank0")


def _hide_options(parser: argparse.ArgumentParser) -> None:
    """Show those of `run` that say how workers are started; what is said of them below its help is not below this."""
    for action in parser._actions:
        if action.dest not in _TAKEN:
            action.help = argparse.SUPPRESS
        elif action.help:
            action.help = action.help.replace(", see below", "")
    told = {action.dest: action for action in parser._actions}
    told["workers"].help = "how many workers, from 2 up; with emulated hosts one a host by default"
    told["methods"].const, told["methods"].metavar = "specs", "A; B"
    told["methods"].help = "predict these only, separated by ;. Or a folder of methods, as in `unisono run`"
    told["output"].help = "what becomes of the workers' output, as in `unisono run`; default: rank0"


def _refuse_options(options: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    """End with an error where an option of `run` was given that a plan has no use for."""
    for action in parser._actions:
        hidden = action.help == argparse.SUPPRESS and action.dest not in _HARMLESS
        if hidden and getattr(options, action.dest) != parser.get_default(action.dest):
            parser.error(f"{action.option_strings[-1]} goes with `unisono run`, not with a plan")


def _parse_grades(text: str) -> list[str]:
    grades = list(_GRADES) if text == "all" else re.split(r"[,\s]+", text.strip())
    if unknown := [grade for grade in grades if grade not in _GRADES]:
        raise argparse.ArgumentTypeError(f"got {unknown[0]!r}; expected some of {', '.join(_GRADES)}, or all")
    return grades


def _run(options: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    if options.program is None:
        parser.error("no program given; as in: unisono plan -n 2 train.py")
    _refuse_options(options, parser)
    if options.workers is not None and (options.workers[0] is not None or options.workers[1] < 2):
        parser.error("a plan is for a fixed number of workers, from 2 up: give one with -n")
    if options.methods:
        from unisono.predict.planner.candidates import check_specs

        if problem := check_specs(options.methods):
            parser.error(problem)
    with tempfile.TemporaryDirectory(prefix="unisono-plan-") as folder:
        file = Path(folder) / "measured.json"
        asked = {
            "methods": options.methods,
            "allow": options.allow,
            "budget_s": options.budget,
            "verify": options.verify,
            "file": str(file),
            "started": time.time(),
        }
        before = dict(os.environ)
        os.environ.update(name_observer("unisono.predict.planner.measurement_plan", **asked))
        try:
            status = run_workers.run(options, parser)
        finally:  # also where `main` was called by a program
            os.environ.clear()
            os.environ.update(before)
        found = json.loads(file.read_text()) if file.exists() else {}
    if status and (found.get("state") != "measured" or found["measured"]["unfinished"]):
        print("unisono plan: the program failed, so there is no plan", file=sys.stderr)
        return status
    return _show(found, options)


def _show(found: dict[str, Any], options: argparse.Namespace) -> int:
    if found.get("state") != "measured":
        if options.on not in ("local", "lab"):  # the worker on its host has written it to its output
            return 0
        why = "never called un.parallel" if not found else "took no optimizer step after un.parallel"
        print(f"unisono plan: {options.program} {why}, so nothing could be measured", file=sys.stderr)
        return 1

    from unisono.predict.planner.choice import choose, plan_to_dict, write_report
    from unisono.predict.planner.measured import Measured

    measured = Measured.from_dict(found["measured"])
    choice = choose(measured, options.allow)
    print(textwrap.dedent(write_report(measured, choice)))
    if options.json:
        Path(options.json).write_text(json.dumps(plan_to_dict(measured, choice), indent=1))
    return 0 if choice.ranked or choice.others else 1


COMMANDS = {"plan": Command(_DESCRIPTION, _EPILOG, _add_arguments, _run)}
