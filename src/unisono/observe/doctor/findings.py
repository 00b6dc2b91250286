"""What a check has found: one line, how bad it is, and what to do about it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

__all__ = ["Finding", "State", "judge", "run_check", "worst_of"]

State = Literal["ok", "warn", "bad"]
_ORDER: Sequence[State] = ("ok", "warn", "bad")


@dataclass(frozen=True)
class Finding:
    """`state`: "ok"; "warn", where something works less well than it could; "bad", where something does not work.

    values: the same as plain numbers and words, for `--json`.
    """

    section: str
    name: str
    state: State
    text: str
    advice: str = ""
    values: dict[str, Any] = field(default_factory=dict)


def judge(section: str, name: str, text: str, advice: str, values: dict[str, Any]) -> Finding:
    """A finding of something that works: "warn" if there is advice, else "ok"."""
    return Finding(section, name, "warn" if advice else "ok", text, advice, values)


def worst_of(findings: Iterable[Finding]) -> State:
    """The worst state among them.

    >>> worst_of([Finding("a", "b", "ok", ""), Finding("a", "c", "warn", "")])
    'warn'
    """
    return max((one.state for one in findings), key=_ORDER.index, default="ok")


def run_check(section: str, name: str, check: Callable[[], Sequence[Finding]]) -> list[Finding]:
    """What the check finds. One that fails itself is a finding too, and the others go on."""
    try:
        return list(check())
    except Exception as error:
        text = f"could not be examined: {type(error).__name__}: {error}"
        return [Finding(section, name, "bad", text, "a bug in this check: please report it, with this line")]
