"""`unisono run --dry` and `--small`: the options, and what is done instead of the run."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from unisono.cli.arguments import parse_count
from unisono.launchers.runtime.machine import usable_cores

__all__ = ["add_options", "check_options", "rehearse"]


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options of dry and small runs."""
    group = parser.add_argument_group("before the run (docs/dry_runs.md)")
    group.add_argument(
        "--dry",
        action="store_true",
        help="run a few steps of one worker in a simulated world of N, in one process: shapes, memory, traffic and "
        "settings that would not work; nothing is sent, and un.save writes nothing",
    )
    group.add_argument(
        "--small",
        action="store_true",
        help="run a few real steps with one worker and with N, and check that they agree; un.save writes nothing",
    )
    group.add_argument("--steps", type=parse_count, metavar="K", help="steps of --dry (3) or of --small (5)")
    group.add_argument(
        "--workers-per-host",
        type=parse_count,
        metavar="K",
        help="workers per host in a dry run; default: all, on an engine as many as this host has cores",
    )
    group.add_argument("--device-memory", metavar="SIZE", help="memory of each worker's device in a dry run")
    group.add_argument("--host-memory", metavar="SIZE", help="memory of a host in a dry run; default: this one's")


def check_options(options: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    """End with an error if options do not go together."""
    if options.dry and options.small:
        parser.error("--dry and --small are two kinds of run: give one of them")
    for name, goes_with in (
        ("steps", options.dry or options.small),
        ("workers_per_host", options.dry),
        ("device_memory", options.dry),
        ("host_memory", options.dry),
    ):
        if getattr(options, name) is not None and not goes_with:
            kinds = "--dry or --small" if name == "steps" else "--dry"
            parser.error(f"--{name.replace('_', '-')} goes with {kinds}")
    if options.small and options.workers is not None and options.workers[1] < 2:
        parser.error("--small compares one worker with several: give -n 2 or more")
    if options.small and options.on != "local":
        parser.error("--small runs on this machine: leave --on, --hosts and --net out")


def rehearse(options: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    """Make the dry or small run and print what was found; returns the exit status."""
    return _run_dry(options, parser) if options.dry else _run_small(options)


def _run_dry(options: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    from unisono.launchers.runtime.link_emulation import parse_link
    from unisono.predict.rehearsal.dry import DryRequest, write_dry_report
    from unisono.predict.rehearsal.dry import rehearse as run_dry

    workers = options.workers[1]
    per_host = options.workers_per_host or workers
    if options.workers_per_host is None and options.on == "lab" and options.hosts is not None:
        per_host = -(-workers // options.hosts)
    elif options.workers_per_host is None and options.on != "local":
        per_host = min(workers, usable_cores())
    more = {}
    try:
        if options.net is not None:
            more["link"] = parse_link(options.net.partition("/")[0].rpartition("x")[2])
        request = DryRequest(
            options.program,
            options.arguments,
            workers,
            min(per_host, workers),
            module=options.module,
            steps=options.steps or 3,
            device_memory=options.device_memory,
            host_memory=options.host_memory,
            **more,
        )
        result = run_dry(request, _show)
    except ValueError as error:
        parser.error(str(error))
    print(write_dry_report(result))
    return result.exit_status


def _run_small(options: argparse.Namespace) -> int:
    from unisono.predict.rehearsal.small import SmallRequest, compare_worlds

    program = [*(["-m"] if options.module else []), options.program, *options.arguments]
    request = SmallRequest(
        program, options.workers[1], options.steps or 5, threads=options.threads, is_warm=options.warm
    )
    verdict = compare_worlds(request, _show)
    print(verdict.text)
    if verdict.log is not None:
        print(f"\n{Path(verdict.log).read_text(errors='replace')[-4000:]}", file=sys.stderr)
    return verdict.exit_status


def _show(text: str) -> None:
    print(f"unisono: {text}", file=sys.stderr, flush=True)
