"""Tables in plain text, the same in a terminal, a file and `str(report)`.

Not rich's: those are laid out for a console's width, and read the brackets of a spec as markup.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

__all__ = ["format_rows"]


def format_rows(rows: Sequence[Sequence[str]], left: Collection[int] = (0,)) -> list[str]:
    """A line for each row, in columns of equal width; columns in `left` are aligned left, the others right.

    >>> format_rows([["method", "step"], ["bf16", "9 ms"]])
    ['method  step', 'bf16    9 ms']
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if i in left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
