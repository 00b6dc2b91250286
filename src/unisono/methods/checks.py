"""Checks of settings, driven by their annotations: the same ones that the spec language reads.

`Annotated[int, AtLeast(1, "backward passes a window")]` says all: what is accepted, and the words of the refusal.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


class SettingTypeError(TypeError, ValueError):
    """A setting of a wrong type; a ValueError too, so that one `except ValueError` catches every refused setting."""


# What an annotation may say besides the type ----------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class AtLeast:
    """A whole number from `least` on, to `most` if that is given; `counts` says what it counts.

    >>> check_setting("accumulate", 0, typing.Annotated[int, AtLeast(1, "backward passes a window")])
    Traceback (most recent call last):
        ...
    ValueError: accumulate counts backward passes a window: expected a whole number of at least 1, got 0
    """

    least: int
    counts: str = ""
    most: int | None = None

    def accepts(self, value: Any) -> bool:
        return bool(self.least <= value) and (self.most is None or bool(value <= self.most))

    def expected(self, kind: str) -> str:
        return f"{kind} of at least {self.least}" if self.most is None else f"{kind} from {self.least} to {self.most}"

    @property
    def meaning(self) -> str:
        return f"counts {self.counts}" if self.counts else ""


@dataclasses.dataclass(frozen=True)
class Range:
    """A finite number within bounds; `meaning` says what it is. `percent`: a fraction that may be given as a
    percentage by mistake.

    >>> check_setting("mix", 1.0, typing.Annotated[float, Range("the share that stays local", at_least=0, below=1)])
    Traceback (most recent call last):
        ...
    ValueError: mix is the share that stays local: expected a number of at least 0 and below 1, got 1.0
    """

    means: str = ""
    _: dataclasses.KW_ONLY
    at_least: float | None = None
    above: float | None = None
    at_most: float | None = None
    below: float | None = None
    percent: bool = False

    def accepts(self, value: Any) -> bool:
        return (
            math.isfinite(value)
            and (self.at_least is None or value >= self.at_least)
            and (self.above is None or value > self.above)
            and (self.at_most is None or value <= self.at_most)
            and (self.below is None or value < self.below)
        )

    def expected(self, kind: str) -> str:
        bounds = [
            f"{words} {bound:g}"
            for words, bound in (
                ("of at least", self.at_least),
                ("above", self.above),
                ("at most", self.at_most),
                ("below", self.below),
            )
            if bound is not None
        ]
        return f"{kind} {' and '.join(bounds)}" if bounds else kind

    @property
    def meaning(self) -> str:
        return f"is {self.means}" if self.means else ""


@dataclasses.dataclass(frozen=True)
class Satisfies:
    """A value of the type that passes a test; `words` say which those are.

    >>> even = typing.Annotated[int, Satisfies(lambda n: n % 2 == 0, "an even number")]
    >>> find_fault("pairs", 3, even)
    'pairs must be an even number, got 3'
    """

    test: Callable[[Any], bool]
    words: str
    meaning: str = ""

    def accepts(self, value: Any) -> bool:
        return bool(self.test(value))

    def expected(self, kind: str) -> str:
        return self.words


@dataclasses.dataclass(frozen=True)
class Note:
    """Accepts what the type accepts; the words follow in parentheses.

    >>> find_fault("overlap", "yes", typing.Annotated[bool | None, Note("None: where it pays")])
    "overlap must be True, False or None (None: where it pays), got 'yes'"
    """

    words: str
    meaning: str = ""

    def accepts(self, value: Any) -> bool:
        return True

    def expected(self, kind: str) -> str:
        return f"{kind} ({self.words})"


Rule = AtLeast | Range | Satisfies | Note

# Checks -----------------------------------------------------------------------------------------------------------


def check_settings(settings: Any) -> None:
    """Refuse a dataclass (a strategy, say) with a field that its annotation does not accept. What is no dataclass has
    no settings.

    Raises:
        SettingTypeError: a value of a wrong type. It is a TypeError and a ValueError.
        ValueError: a value out of its range.
    """
    hints = read_annotations(type(settings))
    for field in dataclasses.fields(settings) if dataclasses.is_dataclass(settings) else ():
        if field.init:
            value = getattr(settings, field.name)
            check_setting(field.name, value, hints.get(field.name, Any), owner=type(settings).__name__)


def validate(method: Callable[P, R]) -> Callable[P, R]:
    """The same for a function: its arguments are checked before it runs.

    >>> @validate
    ... def slowly(every: typing.Annotated[int, AtLeast(1, "steps")] = 4) -> int:
    ...     return every
    >>> slowly(0)
    Traceback (most recent call last):
        ...
    ValueError: every counts steps: expected a whole number of at least 1, got 0
    """
    signature = inspect.signature(method)

    @functools.wraps(method)
    def check_and_call(*args: P.args, **kwargs: P.kwargs) -> R:
        hints = read_annotations(method)
        for name, value in signature.bind(*args, **kwargs).arguments.items():
            several = signature.parameters[name].kind is inspect.Parameter.VAR_POSITIONAL
            for one in value if several else [value]:
                check_setting(name, one, hints.get(name, Any), owner=method.__name__)
        return method(*args, **kwargs)

    return check_and_call


def check_setting(name: str, value: Any, annotation: Any, *, owner: str = "") -> None:
    """Refuse one value that its annotation does not accept; `owner` is the method that it is a setting of."""
    fault = find_fault(name, value, annotation, owner=owner)
    if fault:
        fits = _accepts(value, read_annotation(annotation), rules=False)
        raise ValueError(fault) if fits else SettingTypeError(fault)


def find_fault(name: str, value: Any, annotation: Any, *, owner: str = "") -> str:
    """Why an annotation does not accept a value: what the setting is, what was expected, what was got. Empty: it does.

    >>> find_fault("place", "there", Literal["beside", "own"] | None)
    "place must be 'beside', 'own' or None, got 'there'"
    """
    hint = read_annotation(annotation)
    if _accepts(value, hint):
        return ""
    meaning, expected = _meaning(hint), _join(_expected(hint))
    said = f"{name} {meaning}: expected {expected}" if meaning else f"{name} must be {expected}"
    return f"{said}, got {value!r}{_advise(name, value, hint, owner)}"


# Reading annotations ----------------------------------------------------------------------------------------------


class Annotation(NamedTuple):
    """An annotation taken apart.

    kind: how a value fits: it is one of `members` ("choice"), fits one of them ("union"), is a list whose items fit
        them ("list"), or is of a class ("type"); "any": the annotation says nothing of values.
    type: The annotation itself, without its rules.
    members: Values of a choice; else annotations: of a union's alternatives, or of a list's items (one for all).
    is_fixed: Whether a list has exactly one item for each member.
    """

    kind: Literal["any", "type", "choice", "union", "list"]
    type: Any
    members: tuple[Any, ...] = ()
    is_fixed: bool = False
    rules: tuple[Rule, ...] = ()


def read_annotation(hint: Any) -> Annotation:
    """Take an annotation apart, for whoever checks, converts or describes values by it."""
    origin, members = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Annotated:
        rules = tuple(rule for rule in hint.__metadata__ if isinstance(rule, Rule))
        return read_annotation(members[0])._replace(rules=rules)
    if origin in (typing.Union, types.UnionType):
        return Annotation("union", hint, tuple(map(read_annotation, members)))
    if origin is Literal:
        return Annotation("choice", hint, members)
    if (origin or hint) in (list, tuple, Sequence):
        is_fixed = origin is tuple and members[-1] is not Ellipsis
        items = members if is_fixed else members[:1]
        return Annotation("list", hint, tuple(map(read_annotation, items)), is_fixed)
    if origin is not None or not isinstance(hint, type) or hint in (Any, object):
        return Annotation("any", hint)
    return Annotation("type", hint)


def read_annotations(method: Callable[..., Any]) -> dict[str, Any]:
    """The annotations of a method's settings, by name; none if they cannot be resolved."""
    plain_class = inspect.isclass(method) and not dataclasses.is_dataclass(method)
    try:
        return typing.get_type_hints(method.__init__ if plain_class else method, include_extras=True)
    except (NameError, TypeError):
        return {}


def _accepts(value: Any, hint: Annotation, *, rules: bool = True) -> bool:
    if hint.kind == "union":
        fits = any(_accepts(value, member, rules=rules) for member in hint.members)
    elif hint.kind == "choice":
        fits = any(value == member and type(value) is type(member) for member in hint.members)
    elif hint.kind == "list":
        if not isinstance(value, list | tuple):
            return False
        items = hint.members if hint.is_fixed else (hint.members or (Annotation("any", Any),)) * len(value)
        fits = len(items) == len(value) and all(_accepts(x, m, rules=rules) for x, m in zip(value, items, strict=True))
    elif hint.type in (int, float):
        fits = type(value) is int or (hint.type is float and isinstance(value, float))
    else:
        fits = hint.kind == "any" or isinstance(value, hint.type)
    return fits and not (rules and any(_applies(rule, value) and not rule.accepts(value) for rule in hint.rules))


def _applies(rule: Rule, value: Any) -> bool:
    """Whether a rule speaks of such a value: bounds only of numbers, as None or a word may be accepted as well."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return number if isinstance(rule, AtLeast | Range) else value is not None


_KINDS: Mapping[Any, list[str]] = {
    int: ["a whole number"],
    float: ["a number"],
    str: ["a string"],
    bool: ["True", "False"],
    types.NoneType: ["None"],
}


def _expected(hint: Annotation) -> list[str]:
    """What is accepted, as alternatives."""
    if hint.kind == "union":
        found = [words for member in hint.members for words in _expected(member)]
    elif hint.kind == "choice":
        found = [repr(member) for member in hint.members]
    elif hint.kind == "list":
        each = _join(_expected(hint.members[0])) if hint.members and not hint.is_fixed else ""
        found = [f"a list, each {each}" if each else f"a list such as {hint.type}" if hint.members else "a list"]
    else:
        name = getattr(hint.type, "__name__", str(hint.type))
        found = _KINDS.get(hint.type) or [f"{'an' if name[0] in 'AEIOUaeiou' else 'a'} {name} object"]
    for rule in hint.rules:
        if isinstance(rule, Note):
            found = [rule.expected(_join(found))]
        else:  # bounds stand with the number, which is named first: `int | None`
            found = [rule.expected(found[0]), *found[1:]]
    return found


def _meaning(hint: Annotation) -> str:
    found = [rule.meaning for rule in hint.rules if rule.meaning]
    inside = (_meaning(member) for member in hint.members if hint.kind != "choice")
    return found[0] if found else next((words for words in inside if words), "")


def _join(words: Sequence[str]) -> str:
    return " or ".join(filter(None, [", ".join(words[:-1]), words[-1]]))


def _advise(name: str, value: Any, hint: Annotation, owner: str) -> str:
    """What to do instead, if that is known."""
    if isinstance(value, str) and owner and _takes_object(hint):
        return f"; as text, write it into the spec: '{owner}({name}={value})'"
    percent = any(getattr(rule, "percent", False) for rule in hint.rules)
    if percent and isinstance(value, int | float) and 1 < value <= 100:
        return f"; for {value:g} %, write {name}={value / 100:g}"
    return ""


def _takes_object(hint: Annotation) -> bool:
    """Whether it takes what only a spec can write as text: a reducer, say."""
    if hint.kind in ("union", "list"):
        return any(_takes_object(member) for member in hint.members)
    return isinstance(hint.type, type) and hint.type.__module__ != "builtins"
