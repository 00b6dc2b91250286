"""How help is laid out: texts are written in paragraphs, tables and examples, and filled to 80 columns."""

from __future__ import annotations

import argparse
import re
import shutil
import textwrap
from itertools import groupby
from typing import Any

__all__ = ["HelpFormatter", "fill"]

WIDTH = 80
_MOST_COLUMN = 40  # where the second column of a table may begin
_ROW = re.compile(r"( +)(\S+(?: \S+)*)( {2,})(\S.*)")


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
