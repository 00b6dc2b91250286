"""Arguments that several commands take."""

from __future__ import annotations

import argparse
import difflib
import importlib.util
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from unisono.launchers.runtime.files import local_path
from unisono.units import parse_duration

__all__ = [
    "Command",
    "MethodsAction",
    "add_methods_option",
    "check_program",
    "find_only_run",
    "parse_count",
    "parse_folder",
    "parse_mesh",
    "parse_ports",
    "parse_seconds",
    "take_behind",
]


class Command(NamedTuple):
    """A command: the texts before and after the options in its help, and what adds its arguments and runs it."""

    description: str
    epilog: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace, argparse.ArgumentParser], int]  # gives the exit status


class MethodsAction(argparse.Action):
    """`--methods DIR`: methods of one's own, for this command and the workers that it starts. With `const`, specs of
    methods may stand there too, separated by semicolons."""

    def __call__(self, parser: argparse.ArgumentParser, options: argparse.Namespace, text: Any, *_: object) -> None:
        if self.const and not os.path.isdir(text.split(os.pathsep)[0]):
            setattr(options, self.dest, [spec.strip() for spec in text.split(";") if spec.strip()])
            return
        from unisono.methods.spec import use_methods

        try:
            use_methods(text)
        except ValueError as error:
            parser.error(str(error))


def add_methods_option(parser: argparse._ActionsContainer) -> None:
    """Have a command take `--methods DIR`."""
    parser.add_argument(
        "--methods",
        action=MethodsAction,
        default=[],
        metavar="DIR",
        help="know the methods in DIR/strategies and DIR/reducers too; the same as UNISONO_METHODS=DIR",
    )


def parse_count(text: str) -> int:
    """An argument that is a whole number from 1 up."""
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"got {text!r}; expected a whole number from 1 up")
    return number


def parse_folder(text: str) -> Path:
    """An argument that is a folder of this machine."""
    try:
        return local_path(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def parse_seconds(text: str, *, zero: bool = True) -> float:
    """An argument that is a time, such as 90, 90s or 2m; `zero`: whether 0 is one."""
    try:
        return parse_duration(text, bare=True, zero=zero)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def parse_mesh(text: str) -> dict[str, int]:
    """Axes of a mesh from text.

    >>> parse_mesh("data=2,pipeline=4")
    {'data': 2, 'pipeline': 4}
    """
    axes: dict[str, int] = {}
    for word in text.split(","):
        name, _, size = word.strip().partition("=")
        if name not in ("data", "tensor", "pipeline") or name in axes or not size.lstrip("-").isdecimal():
            raise argparse.ArgumentTypeError(f"expected axes as in data=2,tensor=2,pipeline=2; got {text!r}")
        axes[name] = int(size)
    return axes


def take_behind(
    add_options: Callable[[argparse.ArgumentParser], None], options: argparse.Namespace
) -> tuple[list[str], list[str]]:
    """Put our options among what follows the program's name, up to a --, into `options`.

    Returns the names of our options, and the rest of what follows, which is the program's own.
    """
    behind: list[str] = options.arguments
    cut = behind.index("--") if "--" in behind else len(behind)
    parser = argparse.ArgumentParser(prog=options.parser.prog, add_help=False, allow_abbrev=False)
    add_options(parser)
    found, rest = parser.parse_known_args(behind[:cut])
    for name, value in vars(found).items():
        if value is not None:
            setattr(options, name, value)
    return list(vars(found)), [*rest, *behind[cut + 1 :]]


def find_only_run(how_to_say: str, *, elastic: bool = False) -> int:
    """The launcher of the one run that is under way, or the one with -n MIN:MAX (`elastic`); raises Gone otherwise.

    Where there are several, the error lists what to add to the command, such as "--run" before a process id.
    """
    from unisono.launchers.control import Gone, list_runs

    found, wrong = list_runs()
    runs = [run for run in found if run.elastic or not elastic]
    if len(runs) == 1:
        return runs[0].pid
    if runs:
        more = {run.pid: f": {run.describe()}" if elastic else "" for run in runs}
        listed = "\n".join(f"  {how_to_say} {run.pid}   {run.program}{more[run.pid]}" for run in runs)
        raise Gone(f"there are {len(runs)} runs; name one:\n{listed}")
    notes = "".join(f"\n  {text}" for text in wrong)
    raise Gone(f"no run {'with -n MIN:MAX ' * elastic}of this user is active on this host{notes}")


def check_program(name: str, parser: argparse.ArgumentParser, *, module: bool) -> None:
    """End with an error where there is no such script, or module, that says what was perhaps meant."""
    (_check_module if module else _check_script)(name, parser)


def _check_script(name: str, parser: argparse.ArgumentParser) -> None:
    path = Path(name)
    if path.is_dir() and not (path / "__main__.py").exists():
        parser.error(f"{name} is a folder without __main__.py; name the script in it")
    if path.exists():
        return
    folder = path.parent if path.parent.is_dir() else Path()
    near = {str(file): file.name for file in [*sorted(folder.glob("*.py")), *sorted(folder.glob("*/*.py"))]}
    names = difflib.get_close_matches(path.name, near.values(), n=1, cutoff=0.6)
    hint = next((f"; did you mean {file}?" for file, short in near.items() if names and short == names[0]), "")
    if not hint and path.suffix != ".py" and os.sep not in name:
        hint = "; a module is run with -m"
    parser.error(f"no such script: {name} (looked in {path.absolute().parent}){hint}")


def _check_module(name: str, parser: argparse.ArgumentParser) -> None:
    if name.endswith(".py") and Path(name).exists():
        parser.error(f"{name} is a file, -m takes a module; a file is run without -m: unisono run -n 2 {name}")
    top = name.split(".")[0]
    sys.path.insert(0, os.getcwd())
    try:
        found = importlib.util.find_spec(top) is not None
    except (ImportError, ValueError):
        found = False
    finally:
        del sys.path[0]
    if not found:
        hint = f"; a file is run without -m: unisono run -n 2 {name}" if name.endswith(".py") else ""
        parser.error(f"no module named {top!r} here or among the installed ones{hint}")


def parse_ports(text: str) -> str:
    """A range of ports, as it was written."""
    from unisono.launchers.runtime.addresses import read_ports

    try:
        read_ports(text or "none")
    except ValueError:
        raise argparse.ArgumentTypeError(f"got {text!r}; expected a range of ports such as 40000-40100") from None
    return text
