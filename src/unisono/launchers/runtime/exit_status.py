"""How this process's program ends, in words for the ranks that still wait for it."""

from __future__ import annotations

import sys
import time

from unisono.launchers.runtime import status

__all__ = ["ENDED", "describe_ending", "describe_failure", "note_ending", "note_failure"]

ENDED = "has ended its program"
_noted = ""


def note_ending(text: str) -> None:
    """Note how the program ended, such as "has ended its program with status 0"."""
    global _noted
    _noted = text


def note_failure(error: BaseException) -> None:
    """Note that an error ended the program."""
    note_ending(describe_failure(error))


def describe_ending() -> str:
    """How it ends, when, and after which step; asked when the interpreter shuts down.

    >>> describe_ending().startswith("has ended its program")
    True
    """
    error = getattr(sys, "last_value", None)  # set for an error that nobody caught
    how = _noted or (ENDED if error is None else describe_failure(error))
    step = status.read_step()
    return f"{how} at {time.strftime('%H:%M:%S')}" + (f", after step {step}" if step is not None else "")


def describe_failure(error: BaseException) -> str:
    """An error in one line.

    >>> describe_failure(ValueError("a bad batch"))
    'has failed (ValueError: a bad batch)'
    """
    lines = str(error).splitlines()
    return f"has failed ({type(error).__name__}{f': {lines[0][:160]}' if lines else ''})"
