"""The command line of `unisono`, and which commands it has."""

from __future__ import annotations

import argparse
import importlib
import os
import select
import sys
from collections.abc import Collection, Sequence

from unisono.cli.help_text import HelpFormatter
from unisono.cli.parser import Parser

__all__ = ["COMMANDS", "main", "make_parser"]

COMMANDS = {
    "run": "run a program in N workers, on this machine or on an engine",
    "debug": "stop the workers of a run, and ask them",
    "watch": "the live page of a run, in a browser",
    "top": "what every rank of a run does, in the terminal",
    "plan": "find the fastest method for a program on these workers",
    "runs": "the runs that are recorded",
    "report": "what a run was and where its time went; two of them compared",
    "scale": "show or change the number of workers of a run with -n MIN:MAX",
    "stacks": "show what every worker of a run is doing now",
    "export": "write a checkpoint's model as one safetensors file",
    "compare": "run a script under several methods, and compare",
    "memory": "what each worker will need, and the settings that fit",
    "simulate": "how methods scale to thousands of workers on a described cluster",
    "strategies": "list the strategies and reducers",
    "conformance": "test methods of your own as ours are tested",
    "lab": "emulated hosts: what is possible on this machine; cleaning up",
    "warm": "show or stop the process that `unisono run --warm` keeps",
    "demo": "train a small network with one worker and with two",
    "doctor": "what is installed and works here, with advice",
    "completion": "a script that completes this command line in your shell",
}  # in the order of the help; each is a file of this folder, imported when its arguments are needed
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
    words = sys.argv[1:] if argv is None else argv
    parser = make_parser(words[:1])
    options = parser.read(words)
    if options.command is None:
        parser.print_help()
        return 2
    try:
        status: int = options.run(options, options.parser)
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


def make_parser(wanted: Collection[str] = COMMANDS.keys()) -> Parser:
    """The parser of the whole command line. It names all commands; those `wanted` are imported, with their arguments.

    A command's module has DESCRIPTION and EPILOG for its help, `add_arguments(parser)`, and `run(options, parser)`,
    which does what was asked and returns the exit status.
    """
    parser = Parser(
        prog="unisono",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=HelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="show the version and exit")
    commands = parser.add_subparsers(dest="command", metavar="command")
    for name, summary in COMMANDS.items():
        command = commands.add_parser(name, help=summary, formatter_class=HelpFormatter, allow_abbrev=False)
        if name in wanted:
            module = importlib.import_module(f"unisono.cli.{name}")
            command.description, command.epilog = module.DESCRIPTION, module.EPILOG
            command.set_defaults(run=module.run, parser=command)
            module.add_arguments(command)
    return parser


class _Version(argparse.Action):
    """Prints the version and exits."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        from unisono import __version__

        print(f"unisono {__version__}")
        parser.exit()


if __name__ == "__main__":
    sys.exit(main())
