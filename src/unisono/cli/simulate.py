"""`unisono simulate`: methods by 8 to 10,000 workers on a described cluster, from measured costs."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from unisono.cli.arguments import Command, parse_count

if TYPE_CHECKING:
    from unisono.predict.simulation.cluster import Cluster
    from unisono.predict.simulation.methods import Method
    from unisono.predict.simulation.plan_file import Plan

__all__ = ["COMMANDS"]

_DESCRIPTION = """\
Predict how methods scale on a cluster that you describe: step time, speed-up and its limit, by number of workers; where
each method stops scaling, which is best where, and what to buy next. Nothing is trained.

A step comes from a plan (unisono plan train.py --json plan.json), or from --parameters and --compute; what a method
sends is found by running its own code as one rank of many.
"""
_EPILOG = """\
examples:
  unisono simulate --parameters 25M --compute 0.1s --net 10gbit,0.1ms --workers-per-host 8
  unisono simulate --plan plan.json --workers 8,64,512,4096 --net 1gbit,0.1ms --plot scale.png
  unisono simulate --parameters 1.3B --compute 2s --net 100gbit,5us --strategies "allreduce,powersgd(rank=8)" \\
      --stragglers lognormal:0.1 --slow 1%x2 --mtbf 60d --recovery restart --checkpoint-every 1h
  unisono simulate --parameters 25M --compute 0.1s --net 10gbit --rack 16 --oversubscription 4

See docs/simulation.md for the assumptions.
"""


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    _add_step(parser)
    _add_cluster(parser)
    _add_accidents(parser)
    out = parser.add_argument_group("the simulation and its answer")
    out.add_argument("--workers", metavar="N,…", default="8,64,512,4096,10000", help="default: %(default)s")
    out.add_argument(
        "--steps", type=parse_count, metavar="S", default=1000, help="simulated steps per method; default: %(default)s"
    )
    out.add_argument(
        "--seed",
        type=int,
        default=0,
        help="random seed; default: 0. (Without a plan, reducers are timed in every call)",
    )
    out.add_argument("--json", metavar="FILE", help="write all numbers there; - for standard output, instead of text")
    out.add_argument("--plot", metavar="FILE.png", help='draw speed-up curves (needs the extra "plots")')


def _add_step(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("the step")
    group.add_argument(
        "--plan", metavar="FILE", help="output of `unisono plan --json FILE`: measured steps and network"
    )
    group.add_argument("--parameters", metavar="N", help="without a plan: size of the model, such as 25M")
    group.add_argument("--compute", metavar="TIME", help="without a plan: time of a step on one worker, such as 0.1s")
    group.add_argument("--strategies", metavar="A,B", help="specs; default: the plan's, or ten of different kinds")
    group.add_argument(
        "--compressors",
        metavar="X",
        type=float,
        default=1.0,
        help="without a plan: speed of reducers relative to one core here; inf: no time; default: 1",
    )


def _add_cluster(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("the cluster")
    group.add_argument("--workers-per-host", type=parse_count, metavar="K", help="default: the plan's, or 1")
    group.add_argument("--net", metavar="LINK", help="between hosts: 1gbit,0.1ms (default without a plan)")
    group.add_argument("--inside", metavar="LINK", help="between workers of a host; default: the plan's, or 80gbit,5us")
    group.add_argument(
        "--cores", type=parse_count, metavar="N", help="cores of a host; default: enough for its workers"
    )
    group.add_argument(
        "--threads", type=parse_count, metavar="N", default=1, help="cores that a worker needs; default: 1"
    )
    group.add_argument("--rack", type=parse_count, metavar="HOSTS", help="hosts that share a switch; default: all")
    group.add_argument(
        "--oversubscription",
        type=float,
        metavar="X",
        default=1.0,
        help="oversubscription of a rack's uplink; default: 1",
    )


def _add_accidents(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("stragglers and failures")
    group.add_argument(
        "--stragglers",
        metavar="KIND",
        help="lognormal:0.1, exponential:0.2, pauses:1%%x3 or none; default: as measured in the plan, or none",
    )
    group.add_argument("--slow", metavar="SHARExTIMES", help="workers that are always slow, such as 1%%x3")
    group.add_argument(
        "--mtbf", metavar="TIME", help="mean time between failures of a host, such as 30d; default: none"
    )
    group.add_argument("--recovery", choices=("elastic", "restart"), default="elastic", help="default: %(default)s")
    group.add_argument(
        "--detect", metavar="TIME", default="10s", help="time until a lost host is noticed; default: 10s"
    )
    group.add_argument("--start", metavar="TIME", default="60s", help="time until a replacement is ready; default: 60s")
    group.add_argument(
        "--checkpoint-every",
        metavar="TIME",
        default="30min",
        help="time between checkpoints, with restart; default: 30min",
    )
    group.add_argument("--checkpoint", metavar="TIME", default="5s", help="duration of a checkpoint; default: 5s")


def _run(options: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    if options.plan is None and (options.parameters is None or options.compute is None):
        parser.error("no step to simulate: give --plan plan.json, or --parameters 25M --compute 0.1s")
    if options.plan is not None and (options.parameters is not None or options.compute is not None):
        parser.error("--plan has the step already: leave out --parameters and --compute, or --plan")

    from unisono.predict.simulation.report import check_path, draw, write_report
    from unisono.predict.simulation.study import study
    from unisono.units import parse_counts

    try:
        workers = parse_counts(options.workers, "--workers")
        if options.plot is not None:
            check_path(options.plot)
        _check_rest(options)
        cluster, methods, title = _read(options)
        _check_workers(workers, cluster.per_host)
        found = study(methods, cluster, workers, steps=options.steps, seed=options.seed)
    except (ValueError, TypeError) as error:
        parser.error(str(error))
    plain = json.dumps({"title": title, **found.as_json()}, indent=1)
    if options.json == "-":
        print(plain)
    else:
        print(write_report(found, title))
        if options.json is not None:
            Path(options.json).write_text(plain + "\n", encoding="utf-8")
    if options.plot is not None:
        try:
            draw(found, options.plot, title)
        except ImportError as error:
            print(f"unisono simulate: {error}", file=sys.stderr)
            return 1
    return 0


def _check_rest(options: argparse.Namespace) -> None:
    if options.seed < 0:
        raise ValueError(f"--seed: got {options.seed}, expected a number from 0 up")
    if options.json not in (None, "-") and not Path(options.json).absolute().parent.is_dir():
        raise ValueError(f"--json: the folder of {options.json!r} does not exist: make it first")


def _check_workers(workers: list[int], per_host: int) -> None:
    if workers[0] < per_host:
        raise ValueError(
            f"--workers {workers[0]} are fewer than the {per_host} of one host (--workers-per-host): ask for at least "
            f"{per_host} workers, or for fewer per host"
        )


def _read(options: argparse.Namespace) -> tuple[Cluster, list[Method], str]:
    """The cluster, the methods, and a title, from the options."""
    from unisono.methods.spec.grammar import split_specs
    from unisono.predict.simulation.methods import DEFAULT_METHODS, Workload, make_method
    from unisono.predict.simulation.plan_file import read_plan
    from unisono.units import parse_duration, parse_number, show_duration

    specs = split_specs(options.strategies or "")
    if options.plan is not None:
        plan = read_plan(options.plan)
        cluster = _read_cluster(options, plan)
        title = f"{options.plan}: {plan.parameters:,} parameters, {show_duration(plan.compute_s)} a step"
        return cluster, plan.make_methods(specs, cluster), f"{title}, measured with {plan.ranks} workers"
    if not options.compressors > 0:
        raise ValueError(f"--compressors: got {options.compressors:g}, expected above 0, such as 10, or inf")
    parameters = parse_number(options.parameters, "--parameters")
    compute_s = parse_duration(options.compute, "--compute")
    cluster = _read_cluster(options, None)
    workload = Workload(parameters, compute_s, cluster.per_host, options.compressors)
    title = f"{parameters:,} parameters, {show_duration(compute_s)} a step"
    return cluster, [make_method(spec, workload) for spec in specs or DEFAULT_METHODS], title


def _read_cluster(options: argparse.Namespace, plan: Plan | None) -> Cluster:
    from dataclasses import replace

    from unisono.predict.costs import Link
    from unisono.predict.simulation.cluster import Cluster, Failures
    from unisono.predict.simulation.stragglers import parse_stragglers
    from unisono.units import parse_duration

    failures = Failures(
        mtbf_s=parse_duration(options.mtbf, "--mtbf") if options.mtbf is not None else float("inf"),
        way=options.recovery,
        detect_s=parse_duration(options.detect, "--detect"),
        start_s=parse_duration(options.start, "--start"),
        checkpoint_every_s=parse_duration(options.checkpoint_every, "--checkpoint-every"),
        checkpoint_s=parse_duration(options.checkpoint, "--checkpoint"),
    )
    cluster = Cluster(
        options.workers_per_host or (plan.per_host if plan is not None else 1),
        cores=options.cores,
        threads=options.threads,
        rack_hosts=options.rack or 0,
        oversubscription=options.oversubscription,
        stragglers=parse_stragglers(options.stragglers, options.slow, plan.samples if plan is not None else ()),
        failures=failures,
    )
    if plan is not None and plan.network is not None:
        cluster = cluster.measured_as(plan.network)
    if options.net is None and plan is not None and plan.network is not None and plan.network.hosts == 1:
        raise ValueError(
            "--net: the plan was made on one host, so it says nothing of links between hosts: give theirs, such as "
            "--net 10gbit,0.1ms"
        )
    if options.net is not None:  # other links than those measured
        cluster = replace(cluster, between=Link(*_read_link(options.net, "--net")), measured=None)
    if options.inside is not None:
        cluster = replace(cluster, inside=Link(*_read_link(options.inside, "--inside")), measured=None)
    return cluster


def _read_link(text: str, name: str) -> tuple[float, float]:
    from unisono.launchers.runtime.link_emulation import parse_link

    try:
        link = parse_link(text)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None
    if link.bits_per_s is None:
        raise ValueError(f"{name}: got {text!r} without a rate; expected such as 10gbit,0.1ms")
    return link.latency_s, link.bits_per_s


COMMANDS = {"simulate": Command(_DESCRIPTION, _EPILOG, _add_arguments, _run)}
