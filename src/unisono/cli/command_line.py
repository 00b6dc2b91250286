"""The command line of `unisono`, and which commands it has."""

from __future__ import annotations

import argparse
import importlib
import os
import select
import sys
from collections.abc import Sequence

from unisono.cli.help_text import HelpFormatter
from unisono.cli.parser import Parser

__all__ = ["COMMANDS", "main", "make_parser"]

COMMANDS = (
    "run",
    "debug",
    "watch",
    "top",
    "plan",
    "runs",
    "report",
    "scale",
    "stacks",
    "export",
    "compare",
    "memory",
    "simulate",
    "strategies",
    "conformance",
    "lab",
    "warm",
    "demo",
    "doctor",
    "completion",
)  # in the order of the help; each is a file of this folder
_DESCRIPTION = "Data-parallel training under one unchanged PyTorch loop."
_EPILOG = """\
examples:
  unisono run -n 4 train.py --epochs 3     the same program in four workers on this machine
  unisono run -n 2 -m project.train        a module instead of a file
  unisono watch, unisono top               what every worker of the last run does: in a browser, in the terminal
  unisono plan -n 4 train.py               which method is fastest on these workers and this network, and why
  unisono compare train.py --strategies allreduce,powersgd    the program under several methods, in one table
  unisono debug                            stop the workers of a run, see where each is, and ask them
  unisono report last                      what the last run was, and where its time went; unisono runs lists them
  unisono scale 3                          another number of workers, for a run with -n MIN:MAX
  unisono stacks last                      what every worker of a run is doing now, and who keeps the others waiting
  unisono export run/save m.safetensors    a checkpoint's model as one file
  unisono memory train.py --workers 4      what each worker will need, and the settings that fit
  unisono simulate --plan plan.json        how methods scale to thousands of workers, and what to buy next
  unisono strategies                       the methods that un.parallel knows
  unisono lab                              emulated hosts and slow networks on this machine
  unisono doctor                           what is installed and works here, with advice
  unisono demo                             train a small network with 1 and 2 workers, and see where the time goes
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (default: this process's) and return the exit status."""
    parser = make_parser()
    options = parser.read(sys.argv[1:] if argv is None else argv)
    if options.command is None:
        parser.print_help()
        return 2
    try:
        status: int = options.run(options, parser)
        sys.stdout.flush()
    except BrokenPipeError:
        if not _has_lost_reader():
            raise
        return 141  # as a program that SIGPIPE ends: `unisono strategies | head -3`
    return status


def _has_lost_reader() -> bool:
    """Whether nobody reads what this process prints; what is left of it is dropped then."""
    poll = select.poll()
    poll.register(1, 0)
    if not any(event & select.POLLERR for _, event in poll.poll(0)):
        return False
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    return True


def make_parser() -> Parser:
    """The parser of the whole command line, with all commands."""
    parser = Parser(
        prog="unisono",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=HelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="show the version and exit")
    commands = parser.add_subparsers(dest="command", metavar="command")
    for name in COMMANDS:
        importlib.import_module(f"unisono.cli.{name}").add_command(commands)
    return parser


class _Version(argparse.Action):
    """Shows the version."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        from unisono import __version__

        print(f"unisono {__version__}")
        parser.exit()


if __name__ == "__main__":
    sys.exit(main())
