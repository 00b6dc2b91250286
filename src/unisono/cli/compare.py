"""`unisono compare`: a script under several methods, and a table of what each costs and reaches."""

from __future__ import annotations

import argparse
import re
import shutil
import signal
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from unisono.cli.arguments import (
    Command,
    add_methods_option,
    check_program,
    parse_count,
    parse_folder,
    parse_seconds,
    take_behind,
)
from unisono.methods.spec.grammar import split_specs
from unisono.units import show_duration

if TYPE_CHECKING:
    from unisono.predict.compare.runs import Progress, Request

__all__ = ["COMMANDS"]

_DESCRIPTION = """\
Run a script under several methods, one after the other, and compare their speed, traffic and loss.

The script needs no change: the method that it gives to un.parallel is replaced, its losses are those that it calls
backward on, its samples those of un.shard. One worker is run as well, as the base of speed-ups.
"""
_EPILOG = """\
Options may also follow the script; everything after -- belongs to the script.

methods
  Those of `unisono strategies`, with arguments: 'powersgd(rank=4)', 'local_sgd(every=8)'; and torch's own to compare
  with: torch:ddp, torch:ddp_powersgd, torch:fsdp2.

when each run stops
  --steps 200            this many steps (the default)
  --until loss=1.8       until the loss, the mean over the workers and over ten steps, is there. A run that ends before
                         (by itself, or by --steps or --time) says "not reached"
  --time 5m              time limit of each run, start-up included

examples:
  unisono compare train.py --strategies allreduce,powersgd,torch:ddp
  unisono compare train.py --strategies allreduce,'powersgd(rank=4)' --hosts 4 --net 100mbit --workers 4
  unisono compare train.py --strategies allreduce,local_sgd --workers 2,4 --until loss=1.8 --time 10m
  unisono compare train.py --strategies allreduce,topk --rounds 3 --steps 100 -- --epochs 5 --lr 0.1

The report is in unisono-compare/report.html (--output), which opens without a network; results.json has all numbers,
and runs/ each run's output. See docs/compare.md.
"""
_DEFAULT_STEPS = 200


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-m", dest="module", action="store_true", help="the script is a module, as in `python -m`")
    _add_options(parser)
    parser.add_argument("program", nargs="?", metavar="script.py", help="the script (a module's name with -m)")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="...", help="our options, and its arguments")


def _add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--strategies", type=split_specs, metavar="A,B", help="the methods, separated by commas")
    add_methods_option(parser)
    add("-n", "--workers", type=_parse_counts, metavar="N,M", help="numbers of workers to compare; default: 2")
    add("--steps", type=parse_count, metavar="K", help="steps per run; default: 200, with --until no limit")
    add("--until", type=_parse_target, metavar="loss=X", help="end each run at this loss")
    add(
        "--time",
        type=partial(parse_seconds, zero=False),
        metavar="T",
        help="time limit of each run: 90, 90s, 5m; default with --until: 10m",
    )
    add(
        "--rounds", type=parse_count, metavar="K", help="repeat all runs K times, in turn, and show medians; default: 1"
    )
    add("--hosts", type=parse_count, metavar="H", help="emulated hosts, as in `unisono run`; default: none")
    add("--net", metavar="LINK", help="links of emulated hosts: 100mbit, 1gbit,20ms, ...")
    add("--shaper", choices=("auto", "kernel", "transport"), help="what throttles the links, as in `unisono run`")
    add("--threads", type=parse_count, metavar="K", help="threads per worker; default: cores / the most workers")
    add("--no-base", action="store_true", default=None, help="leave out the run with one worker, and speed-ups with it")
    add("--warm", action="store_true", default=None, help="start workers from a process that has imported torch")
    add("--output", type=parse_folder, metavar="DIR", help="folder of the report; default: unisono-compare")
    add("--json", type=Path, metavar="FILE", help="write the numbers there too")
    add("--html", type=Path, metavar="FILE", help="write the report there too")


def _parse_counts(text: str) -> list[int]:
    return list(dict.fromkeys(parse_count(part) for part in text.split(",")))


def _parse_target(text: str) -> float:
    found = re.fullmatch(r"loss\s*=\s*([+-]?\d+(?:\.\d*)?(?:[eE][+-]?\d+)?|\.\d+)", text.strip())
    if found is None:
        raise argparse.ArgumentTypeError(f"got {text!r}; expected a loss, as in: --until loss=1.8")
    return float(found[1])


# Running -------------------------------------------------------------------------------------------------------------


def _run(options: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    if options.program is None:
        parser.error("no script given; as in: unisono compare train.py --strategies allreduce,powersgd")
    check_program(options.program, parser, module=options.module)
    _, own = take_behind(_add_options, options)
    if not options.strategies:
        parser.error("no methods given; as in: --strategies allreduce,powersgd,torch:ddp")
    request = _read_request(options, own)
    _check_methods(request, parser)

    from unisono.predict.compare.report import format_table, write_report
    from unisono.predict.compare.results import compare
    from unisono.predict.compare.runs import NothingToCompare, Runs

    line = _ProgressLine()
    runs = Runs(request, line.show)
    interrupted = False
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)  # as Ctrl-C: no run outlives this command
    try:
        runs.make_all()
    except NothingToCompare as error:
        line.clear()
        print(f"unisono compare: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        interrupted = True
    line.clear()
    if interrupted:
        print(
            f"unisono compare: interrupted; {len(runs.trials)} of {len(runs.planned)} runs are complete",
            file=sys.stderr,
        )
    if not runs.trials:
        return 130
    found = compare(runs.trials, request.target)
    print(format_table(found))
    for trial in (trial for trial in runs.trials if trial.failure):
        print(f"{trial.describe()} failed: its output is in {trial.output}", file=sys.stderr)
    written = write_report(found, runs, html=options.html, json_file=options.json)
    print(f"\nreport: {written}")
    return 130 if interrupted else 1 if all(row.failed for row in found.rows) else 0


def _read_request(options: argparse.Namespace, own: list[str]) -> Request:
    from unisono.predict.compare.runs import Request

    until = options.until is not None
    return Request(
        [*(["-m"] if options.module else []), options.program, *own],
        options.strategies,
        workers=options.workers or [options.hosts or 2],
        rounds=options.rounds or 1,
        steps=options.steps or (None if until or options.time else _DEFAULT_STEPS),
        target=options.until,
        time_s=options.time or (600.0 if until else None),
        hosts=options.hosts,
        net=options.net,
        shaper=options.shaper,
        threads=options.threads,
        warm=bool(options.warm),
        base=not options.no_base,
        folder=options.output or Path("unisono-compare"),
    )


def _check_methods(request: Request, parser: argparse.ArgumentParser) -> None:
    """Refuse what cannot be built or parsed, before anything is started."""
    from unisono.launchers.runtime.link_emulation import parse_links
    from unisono.methods.spec import build

    try:
        for spec in request.strategies:
            build(spec, kind="strategy")
    except (ValueError, TypeError) as error:
        parser.error(f"--strategies: {error}")
    if request.net is not None:
        try:
            for workers in request.workers:
                parse_links(request.net, min(request.hosts or workers, workers))
        except ValueError as error:
            parser.error(f"--net: {error}")


class _ProgressLine:
    """Where the runs stand: one line that is written anew on a terminal, a line for each run elsewhere."""

    def __init__(self) -> None:
        self._live = sys.stderr.isatty()
        self._number = 0

    def show(self, at: Progress) -> None:
        head = f"[{at.number}/{at.count}] {at.run.describe()}"
        if not self._live:
            if at.number != self._number:
                print(head, file=sys.stderr, flush=True)
            self._number = at.number
            return
        loss = "" if at.loss is None else f", loss {at.loss:.4g}"
        left = "" if at.left_s is None else f"; about {show_duration(round(at.left_s))} left"
        where = f"step {at.step}{loss}" if at.step else "starting"
        text = f"{head}: {where}, {show_duration(round(at.seconds))}{left}"
        width = shutil.get_terminal_size().columns - 1  # a line that wraps could not be written anew
        print(f"\r\033[K{text[:width]}", end="", file=sys.stderr, flush=True)

    def clear(self) -> None:
        """Remove the line from the terminal."""
        if self._live:
            print("\r\033[K", end="", file=sys.stderr, flush=True)


COMMANDS = {"compare": Command(_DESCRIPTION, _EPILOG, _add_arguments, _run)}
