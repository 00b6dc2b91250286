"""The command line of `unisono`: which commands it has, how their help is laid out, and errors that fit on a screen.

Texts of help are written in paragraphs, tables and examples, and filled to 80 columns.
"""

from __future__ import annotations

import argparse
import difflib
import importlib
import os
import re
import select
import shutil
import sys
import textwrap
from collections.abc import Collection, Sequence
from itertools import groupby
from typing import Any, NoReturn

from unisono.launchers.runtime.files import open_closed_streams

__all__ = ["COMMANDS", "HelpFormatter", "Parser", "fill", "main", "make_parser"]

COMMANDS = {
    "run": "run a program in N workers, on this machine or on an engine",
    "debug": "stop the workers of a run and inspect them at one prompt",
    "watch": "serve the live page of a run in a browser",
    "top": "show in the terminal what every rank of a run is doing",
    "plan": "find the fastest method for a program on these workers",
    "runs": "list the recorded runs",
    "report": "report where the time of a run went, or compare two runs",
    "scale": "show or change the number of workers of a run with -n MIN:MAX",
    "join": "let this host join a run that is active on others",
    "stacks": "show what every worker of a run is doing now",
    "export": "write a checkpoint's model as one safetensors file",
    "compare": "run a script under several methods and compare them",
    "memory": "predict each worker's memory, and list the settings that fit",
    "simulate": "predict how methods scale to thousands of workers on a cluster",
    "strategies": "list the strategies and reducers",
    "conformance": "run the conformance tests over your own methods",
    "lab": "emulated hosts: show what this machine supports, or clean up",
    "warm": "show or stop the process that `unisono run --warm` keeps",
    "demo": "train a small network with one worker and with two",
    "doctor": "check what is installed and works here, with advice",
    "completion": "print a script that completes this command line in your shell",
}  # in the order of the help
# Commands that share a file of this folder; each of the others has the file of its name. A file is imported when the
# arguments of one of its commands are needed.
_FILES = {
    "under_way": "debug watch top scale join stacks",
    "records": "runs report export",
    "methods": "strategies conformance",
    "machine": "lab warm demo doctor",
}
_NEEDED = ("torch", "numpy", "rich")  # an image may have been built without them
WIDTH = 80
_MOST_USAGE_LINES = 4
_MOST_COLUMN = 40  # where the second column of a table may begin
_ROW = re.compile(r"( +)(\S+(?: \S+)*)( {2,})(\S.*)")
_DESCRIPTION = "Data-parallel training under one unchanged PyTorch loop."
_EPILOG = """\
examples:
  unisono run -n 4 train.py --epochs 3     the same program in four workers on this machine
  unisono run -n 2 -m project.train        a module instead of a file
  unisono watch, unisono top               what every worker of the last run does: in a browser, in the terminal
  unisono plan -n 4 train.py               which method is fastest on these workers and this network, and why
  unisono compare train.py --strategies allreduce,powersgd    the program under several methods, in one table
  unisono debug                            stop the workers of a run and inspect each of them
  unisono report last                      what the last run was, and where its time went; unisono runs lists them
  unisono scale 3                          another number of workers, for a run with -n MIN:MAX
  unisono join 10.0.0.5:40123              let this host join a run that is active on others
  unisono stacks last                      what every worker of a run is doing now, and who keeps the others waiting
  unisono export run/save m.safetensors    a checkpoint's model as one file
  unisono memory train.py --workers 4      predict each worker's memory, and the settings that fit
  unisono simulate --plan plan.json        how methods scale to thousands of workers, and what to buy next
  unisono strategies                       the methods that un.parallel knows
  unisono lab                              emulated hosts and slow networks on this machine
  unisono doctor                           check what is installed and works here, with advice
  unisono demo                             train a small network with 1 and 2 workers, and see where the time goes
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (default: this process's) and return the exit status."""
    words = sys.argv[1:] if argv is None else argv
    open_closed_streams()
    try:
        parser = make_parser(words[:1])
        options = parser.read(words)
        if options.command is None:
            parser.print_help()
            return 2
        status: int = options.run(options, options.parser)
        sys.stdout.flush()
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in _NEEDED:
            raise
        advice = f"pip install {package}; `unisono doctor` says what else is missing"
        print(f"unisono {words[0]}: needs {package}, which is not installed here: {advice}", file=sys.stderr)
        return 1
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

    A file has its commands in `COMMANDS`, by name.
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
            file = next((file for file, names in _FILES.items() if name in names.split()), name)
            found = importlib.import_module(f"unisono.cli.{file}").COMMANDS[name]
            command.description, command.epilog = found.description, found.epilog
            command.set_defaults(run=found.run, parser=command)
            found.add_arguments(command)
    return parser


class _Version(argparse.Action):
    """Prints the version and exits."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        from unisono import __version__

        print(f"unisono {__version__}")
        parser.exit()


class Parser(argparse.ArgumentParser):
    """A parser whose errors are short. The commands of one are such parsers too."""

    def error(self, message: str) -> NoReturn:
        """End with exit status 2; usage is shown where it does not hide the error."""
        usage = self.format_usage()
        if usage.count("\n") > _MOST_USAGE_LINES:
            places = " ".join(self._format_place(action) for action in self._get_positional_actions())
            usage = f"usage: {self.prog} [options] {places}".rstrip() + "\n"
        self.exit(2, f"{usage}{self.prog}: error: {message}\n`{self.prog} --help` says more.\n")

    def read(self, words: Sequence[str]) -> argparse.Namespace:
        """The options of a command line; an error names the command that does not know a word."""
        [chosen] = [action for action in self._actions if isinstance(action, argparse._SubParsersAction)]
        commands: dict[str, Parser] = dict(chosen.choices)
        if words and not words[0].startswith("-") and words[0] not in commands:
            listed = textwrap.fill(", ".join(commands), 78, initial_indent="  ", subsequent_indent="  ")
            self.error(f"there is no command {words[0]!r}{_guess(words[0], list(commands), 0.6)}\nThere are:\n{listed}")
        options, unknown = self.parse_known_args(words)
        if unknown:
            commands.get(options.command, self)._refuse(unknown[0])
        return options

    def _refuse(self, word: str) -> NoReturn:
        if not word.startswith("-"):
            self.error(f"one word too many: {word!r}")
        name = word.partition("=")[0]
        hint = _guess(name, [flag for action in self._actions for flag in action.option_strings], 0.8)
        if not hint and any(action.dest == "program" for action in self._actions):
            hint = f"; the program's own options come after it, as in: {self.prog} -n 2 train.py {name}"
        self.error(f"there is no option {name}{hint}")

    def _format_place(self, action: argparse.Action) -> str:
        name = str(action.metavar or action.dest)
        return f"[{name}]" if action.nargs == "?" else name


def _guess(word: str, known: Sequence[str], cutoff: float) -> str:
    near = difflib.get_close_matches(word, known, n=1, cutoff=cutoff)
    return f"; did you mean {near[0]}?" if near else ""


class HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Options as argparse has them, texts by `fill`; 80 columns, or fewer where the terminal has fewer."""

    def __init__(self, prog: str, **options: Any) -> None:
        options.setdefault("width", min(WIDTH, shutil.get_terminal_size((WIDTH, 24)).columns))
        super().__init__(prog, **options)

    def add_argument(self, action: argparse.Action) -> None:
        """The column of help has room for the names of commands, which stand further in than argparse counts."""
        super().add_argument(action)
        if isinstance(action, argparse._SubParsersAction):
            names = max(len(name) for name in action.choices)
            self._action_max_length = max(self._action_max_length, names + 2 * self._indent_increment)

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return textwrap.indent(fill(text, width), indent) + "\n"


def fill(text: str, width: int = WIDTH) -> str:
    r"""The text in lines of at most `width`: paragraphs, rows of two columns, and commands, which go on after a \.

    >>> print(fill("Some words that make a line.\n\n  --net 1gbit  what passes over a link", 27))
    Some words that make a
    line.
    <BLANKLINE>
      --net 1gbit
                 what passes
                 over a link
    """
    lines: list[str] = []
    whole = re.sub(r" \\\n +", " ", text.rstrip("\n"))
    for indented, block in groupby(whole.split("\n"), key=lambda line: line.startswith(" ") or not line):
        found = list(block)
        if indented:
            lines += _fill_rows(found, width)
        else:
            lines += textwrap.wrap(" ".join(found), width, break_on_hyphens=False, break_long_words=False)
    return "\n".join(lines)


def _fill_rows(lines: list[str], width: int) -> list[str]:
    """Rows of two columns, with what goes on in the second column; and commands."""
    filled: list[str] = []
    rows: list[list[str]] = []
    column = 0
    for line in lines:
        row = _ROW.fullmatch(line)
        indent = len(line) - len(line.lstrip())
        if row is not None and not (rows and indent == column):
            column = row.end(3)
            rows.append([row[1] + row[2], row[4]])
        elif rows and column and indent == column:
            rows[-1][1] += " " + line.strip()
        elif rows and _is_prose(line) and _is_prose(rows[-1][0]) and len(rows[-1]) == 1 and not column:
            rows[-1][0] += " " + line.strip()
        else:
            column = 0
            rows.append([line])
    for each in rows:
        filled += _fill_command(each[0], width) if len(each) == 1 else _fill_row(each[0], each[1], rows, width)
    return filled


def _is_prose(line: str) -> bool:
    return bool(line.strip()) and not line.lstrip().startswith(("unisono ", "python "))


def _fill_row(left: str, right: str, rows: list[list[str]], width: int) -> list[str]:
    """The second column begins at one place for all rows, or on a line of its own where the first is too long."""
    column = min(_MOST_COLUMN, width // 2, 2 + max(len(row[0]) for row in rows if len(row) == 2))
    words = textwrap.wrap(right, width - column, break_on_hyphens=False, break_long_words=False)
    if len(left) + 2 > column:
        return [*_fill_command(left, width), *(" " * column + line for line in words)]
    return [left.ljust(column) + words[0], *(" " * column + line for line in words[1:])]


def _fill_command(line: str, width: int) -> list[str]:
    if len(line) <= width:
        return [line]
    if _is_prose(line):
        margin = " " * (len(line) - len(line.lstrip()))
        return textwrap.wrap(
            line.strip(), width, initial_indent=margin, subsequent_indent=margin, break_on_hyphens=False
        )
    indent = " " * (len(line) - len(line.lstrip()) + 4)
    found = textwrap.wrap(
        line.strip(), width - 2, initial_indent=indent[4:], subsequent_indent=indent, break_on_hyphens=False
    )
    return [f"{each} \\" for each in found[:-1]] + found[-1:]
