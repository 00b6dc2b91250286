"""`unisono memory`: what each worker of a program will need, and the settings that fit."""

from __future__ import annotations

import argparse
import math
import sys
from typing import Any

from unisono.cli.arguments import Command, check_program, parse_count, parse_mesh, take_behind

__all__ = ["COMMANDS"]

_DESCRIPTION = """\
Predict the memory of each worker of a program for every stage and placement of zero, and list the settings that fit.

The program runs up to its first optimizer step, on parameters without memory; nothing is trained or exchanged, but what
it does before that really happens (it reads data and makes folders). Its output goes to standard error.
"""
_EPILOG = """\
Long options may also follow the program; everything after -- belongs to the program.
Sizes: 24GiB (powers of 1024), 500MB (powers of 1000), or bytes. Default: this machine's; without a GPU
and --device-memory, the workers compute in the host's memory. The exit status is 3 if nothing fits.

examples:
  unisono memory train.py --workers 4
  unisono memory train.py --workers 8 --device-memory 24GiB --host-memory 256GiB --disk /scratch --epochs 3
  unisono memory train.py --mesh data=2,tensor=2,pipeline=2 --microbatches 8
"""


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-m", dest="module", action="store_true", help="the program is a module, as in `python -m`")
    _add_sizes(parser, "-n")
    parser.add_argument("program", nargs="?", metavar="script.py", help="the program (a module's name with -m)")
    parser.add_argument(
        "arguments", nargs=argparse.REMAINDER, metavar="...", help="its arguments, and our long options"
    )


def _add_sizes(parser: argparse.ArgumentParser, *short: str) -> None:
    add = parser.add_argument
    add(*short, "--workers", type=parse_count, metavar="N", help="total number of workers; default: 1")
    add("--workers-per-host", type=parse_count, metavar="K", help="workers per host; default: all")
    add("--mesh", type=parse_mesh, metavar="AXES", help="as in data=2,pipeline=2: a worker's part of the model")
    add(
        "--microbatches",
        type=parse_count,
        metavar="M",
        help="microbatches of a pipeline; default: the program's own, or 4",
    )
    add("--schedule", metavar="NAME", help="schedule of a pipeline, as in mesh.pipe; default: 1F1B")
    add("--device-memory", metavar="SIZE", help="memory of each worker's device")
    add("--host-memory", metavar="SIZE", help="memory of a host, for all of its workers")
    add("--disk", metavar="SIZE|DIR", help="free space on a host's disk, or a folder on that disk")


def _run(options: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    if options.program is None:
        parser.error("no program given; as in: unisono memory train.py --workers 2")
    check_program(options.program, parser, module=options.module)
    names, arguments = take_behind(_add_sizes, options)
    sizes: dict[str, Any] = {name: getattr(options, name) for name in names}
    mesh: dict[str, int] = sizes["mesh"] or {}
    sizes["workers"] = sizes["workers"] or (math.prod(mesh.values()) if all(n > 0 for n in mesh.values()) else 1)
    sizes["schedule"] = sizes["schedule"] or "1F1B"

    from unisono.predict.footprint.script import ScriptError, predict_for_script

    try:
        report = predict_for_script(options.program, arguments, module=options.module, **sizes)
    except ScriptError as error:
        print(f"unisono memory: {error}", file=sys.stderr)
        return 1
    except ValueError as error:
        parser.error(str(error))
    print(report)
    return 0 if report.fits() else 3


COMMANDS = {"memory": Command(_DESCRIPTION, _EPILOG, _add_arguments, _run)}
