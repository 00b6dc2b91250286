"""Commands about methods, and `--strategy`: what no worker could build is refused before there are any, without torch.

A program may have methods of its own (`unisono.spec.extend`), which are known in its workers only. So a name that we do
not know is left to them, if anything that the program may import looks as if it adds methods.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from unisono.cli.arguments import Command, add_methods_option

__all__ = ["COMMANDS", "check_strategy"]

# unisono strategies -----------------------------------------------------------------------------------------------

_STRATEGIES = """\
List the methods that un.parallel and --strategy know, one line each. docs/methods has a page for each.
"""
_STRATEGIES_MORE = """\
Settings are in parentheses, and a reducer stands for the strategy that uses it: 'powersgd(rank=4)' is
'allreduce(reducer=powersgd(rank=4))'.

examples:
  unisono strategies
  unisono run -n 4 --strategy 'local_sgd(every=8)' train.py
"""


def _add_strategies(parser: argparse.ArgumentParser) -> None:
    add_methods_option(parser)


def _run_strategies(_: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    from unisono.methods.spec import FOLDERS, Kind, names

    kinds: tuple[tuple[str, Kind], ...] = (("strategies", "strategy"), ("reducers", "reducer"))
    for title, kind in kinds:
        try:
            methods = names(kind)
        except ValueError as error:
            parser.error(str(error))
        width = max(map(len, methods), default=0)
        print(f"{title}:")
        for name in methods:
            file = importlib.util.find_spec(f"{FOLDERS[kind]}.{name}")
            print(f"  {name:<{width}}  {_read_summary(Path(str(file and file.origin)))}")
    return 0


def _read_summary(file: Path) -> str:
    """First line of the docstring, read without importing the file (and torch)."""
    import ast

    return (ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or "").partition("\n")[0]


# unisono conformance ----------------------------------------------------------------------------------------------

_CONFORMANCE = """\
Run the conformance tests over the methods in DIR/reducers and DIR/strategies: the same mean on every rank, what is not
sent is kept, bytes as stated, checkpoints, AMP, worlds that shrink and grow, and what their FACTS say. Needs pytest.
"""
_CONFORMANCE_MORE = """\
examples:
  unisono conformance my_methods
  unisono conformance my_methods -x -k terngrad      what follows DIR is for pytest
"""


def _add_conformance(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", metavar="DIR", help="the folder with reducers/ and strategies/")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="...", help="arguments of pytest")


def _run_conformance(options: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    from unisono.methods.spec import use_methods

    if importlib.util.find_spec("pytest") is None:
        parser.error("pytest is missing, which runs these tests: pip install pytest")
    try:
        use_methods(options.folder)
    except ValueError as error:
        parser.error(str(error))
    import pytest

    package = Path(__file__).parents[1]
    found = [package / "conformance", package.parents[1] / "tests" / "conformance"]  # in the wheel, in a checkout
    tests = next(str(folder) for folder in found if folder.is_dir())
    words = ["-q", "--tb=short", "-c", os.devnull, "--rootdir", tests, "-p", "no:cacheprovider", tests]
    return int(pytest.main([*words, *options.arguments]))


_VARIABLE = "UNISONO_STRATEGY"
_OURS = Path("launchers", "runtime", "launch_env.py")  # in a folder that is unisono itself
_ADDS_METHODS = re.compile(
    r"unisono\.(methods\.)?(spec|strategies|reducers)\b|\bimport\b.*\bspec\b|\bspec\.extend\b|\bextend\(\s*(strategies|reducers|\*\*)"
)
_MOST_FILES, _MOST_FOLDERS = 2000, 5000


def check_strategy(options: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    """End with an error where the workers could not read the strategy, or would not know its name."""
    name, text = ("--strategy", options.strategy) if options.strategy is not None else (_VARIABLE, None)
    text = (os.environ.get(_VARIABLE, "") if text is None else text).strip()
    if not text:
        return
    from unisono.methods.spec import find_unknown

    try:
        problem = find_unknown(text)
    except ValueError as error:
        parser.error(f"{name}: {error}")
    if problem is not None and not _may_add_methods(options.program):
        parser.error(f"{name}: {problem}")


def _may_add_methods(program: str) -> bool:
    """Whether something that the program may import could make methods known; True also where there is too much to
    read."""
    folders = {Path.cwd(), Path(program).resolve().parent, *_list_import_folders()}
    top = [one for one in folders if not any(other in one.parents for other in folders)]
    files = (file for folder in top for file in _list_sources(folder))
    for count, file in enumerate(files):
        if file is None or count == _MOST_FILES or _adds_methods(file):
            return True
    return (Path(program).is_file() and _adds_methods(Path(program))) or _is_required()


def _list_import_folders() -> Iterator[Path]:
    """Folders of PYTHONPATH and of packages that are installed in place; not Python's own, nor site-packages."""
    own = [Path(prefix).resolve() for prefix in (sys.prefix, sys.base_prefix)]
    for entry in sys.path:
        path = Path(entry).resolve()
        if path.is_dir() and "site-packages" not in path.parts and not any(path.is_relative_to(one) for one in own):
            yield path


def _list_sources(folder: Path) -> Iterator[Path | None]:
    """The Python files below a folder but for ours; ends with None where there are too many folders."""
    for count, (here, folders, files) in enumerate(os.walk(folder)):
        if count == _MOST_FOLDERS:
            yield None
            return
        folders[:] = [
            name
            for name in folders
            if not name.startswith((".", "__")) and name != "site-packages" and not Path(here, name, _OURS).exists()
        ]
        yield from (Path(here, name) for name in files if name.endswith(".py"))


def _adds_methods(file: Path) -> bool:
    try:
        return _ADDS_METHODS.search(file.read_text(encoding="utf-8", errors="replace")) is not None
    except OSError:
        return True


def _is_required() -> bool:
    """Whether an installed package needs unisono: it may have methods."""
    for package in importlib.metadata.distributions():
        needed = [re.split(r"[^\w.-]", text, maxsplit=1)[0] for text in package.requires or ()]
        if "unisono" in needed and package.metadata["Name"] != "unisono":
            return True
    return False


COMMANDS = {
    "strategies": Command(_STRATEGIES, _STRATEGIES_MORE, _add_strategies, _run_strategies),
    "conformance": Command(_CONFORMANCE, _CONFORMANCE_MORE, _add_conformance, _run_conformance),
}
