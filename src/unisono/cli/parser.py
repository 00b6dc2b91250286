"""The parser of the command line: its errors fit on a screen, and say what was perhaps meant."""

from __future__ import annotations

import argparse
import difflib
import textwrap
from collections.abc import Sequence
from typing import NoReturn

__all__ = ["Parser"]

_MOST_USAGE_LINES = 4


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
