"""The grammar of specs: text to a tree of names and plain values, and back. Parsed, never evaluated."""

from __future__ import annotations

import ast
import dataclasses
import math
import re
import threading
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from unisono.launchers.runtime.frames import cut_below_user, has_user_frame

NUMBERS = {"inf": math.inf, "nan": math.nan}  # words that are numbers
_PARSING = threading.Lock()  # in CPython 3.11 two threads that parse at once may end in a SystemError
_MAX_CHARACTERS = 4096
_MAX_BITS = 64  # of a whole number


class SpecError(ValueError):
    """A spec that cannot be read or built; the message shows the text and points at the character."""

    def __init__(self, problem: str, text: str, position: int) -> None:
        self.problem, self.text, self.position = problem, text, position
        super().__init__(f"{problem}\n  {text}\n  {' ' * position}^")

    def hide_frames(self) -> None:
        """For reports: keep the frame of the user's line with the spec, and drop those of the parser."""
        if cut_below_user(self) and self.__cause__ is not None and not has_user_frame(self.__cause__):
            self.__cause__ = None  # its text is in ours


@dataclasses.dataclass(frozen=True)
class Spec:
    """A method's name and arguments; arguments are plain values, lists, tuples or further specs.

    `str(spec)` gives text that `parse` reads back to an equal spec. `at` is the position of the name in
    `text`, `spots` those of the arguments (by index or keyword) and `keys` those of the keywords.
    """

    name: str
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    called: bool = dataclasses.field(default=True, compare=False, repr=False)  # written with parentheses
    text: str = dataclasses.field(default="", compare=False, repr=False)
    at: int = dataclasses.field(default=0, compare=False, repr=False)
    spots: Mapping[int | str, int] = dataclasses.field(default_factory=dict, compare=False, repr=False)
    keys: Mapping[str, int] = dataclasses.field(default_factory=dict, compare=False, repr=False)

    def __str__(self) -> str:
        parts = [write(x) for x in self.args] + [f"{k}={write(v)}" for k, v in self.kwargs.items()]
        return f"{self.name}({', '.join(parts)})" if parts else self.name

    def __hash__(self) -> int:
        return hash(str(self))

    def fail(self, problem: str, position: int | None = None) -> NoReturn:
        raise SpecError(problem, self.text or str(self), self.at if position is None else position)


def parse(text: str) -> Spec:
    """Read one method and its arguments.

    Values are ints, floats (also `inf` and `nan`), strings, True, False, None, lists, tuples, further methods
    and bare words.

    Example:
        >>> parse("local_sgd(every=8, reducer=powersgd(rank=2))").kwargs["every"]
        8

    Raises:
        SpecError: anything else; the message points at the character.
    """
    if not isinstance(text, str):
        raise TypeError(f"a spec is text such as 'allreduce' or 'allreduce(accumulate=4)'; got {type(text)}")
    text = re.sub(r"\s", " ", text).strip()
    if not text:
        raise SpecError("the spec is empty; expected a method such as 'allreduce(accumulate=4)'", text, 0)
    if len(text) > _MAX_CHARACTERS:
        raise ValueError(f"the spec has {len(text)} characters; at most {_MAX_CHARACTERS} are read")
    try:
        with _PARSING:
            node = ast.parse(text, mode="eval").body
        value = _Reader(text).value(node)
    except SyntaxError as error:
        position = min(max((error.offset or 1) - 1, 0), len(text))
        raise SpecError(f"the spec cannot be read: {error.msg}", text, position) from None
    except (RecursionError, MemoryError, ValueError) as error:
        if isinstance(error, SpecError):
            raise
        raise ValueError(f"the spec cannot be read: {error or 'it is nested too deeply'}") from None
    if not isinstance(value, Spec):
        raise SpecError(f"a spec starts with a method's name; got {write(value)}", text, 0)
    return value


class _Reader:
    """Turns Python's syntax tree of a spec into values, and refuses every other kind of node."""

    def __init__(self, text: str) -> None:
        self.text = text
        self._bytes = text.encode("utf-8", "surrogatepass")

    def position(self, node: ast.expr | ast.keyword) -> int:
        """The position in characters; the tree counts bytes."""
        return len(self._bytes[: node.col_offset].decode("utf-8", "surrogatepass"))

    def fail(self, problem: str, node: ast.expr | ast.keyword) -> NoReturn:
        raise SpecError(problem, self.text, self.position(node))

    def value(self, node: ast.expr) -> Any:
        if isinstance(node, ast.Constant) and isinstance(node.value, bool | int | float | str | None):
            if isinstance(node.value, int) and node.value.bit_length() > _MAX_BITS:
                self.fail(f"expected a whole number of at most {_MAX_BITS} bits", node)
            return node.value
        if isinstance(node, ast.Name):
            if node.id in NUMBERS:
                return NUMBERS[node.id]
            return Spec(node.id, called=False, text=self.text, at=self.position(node))
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.UAdd):
            number = self.value(node.operand)
            if isinstance(number, bool) or not isinstance(number, int | float):
                self.fail("only a number can have a sign", node)
            return -number if isinstance(node.op, ast.USub) else number
        if isinstance(node, ast.List):
            return [self.value(x) for x in node.elts]
        if isinstance(node, ast.Tuple):
            return tuple(self.value(x) for x in node.elts)
        if isinstance(node, ast.Call):
            return self._call(node)
        hint = "; names are written with _, not -" if isinstance(node, ast.BinOp) else ""
        what = "a number, string, True, False, None, list, tuple, word or method"
        return self.fail(f"expected {what}, got `{ast.unparse(node)}`{hint}", node)

    def _call(self, node: ast.Call) -> Spec:
        if not isinstance(node.func, ast.Name):
            self.fail(f"expected a method's name before the parenthesis, got `{ast.unparse(node.func)}`", node)
        args = tuple(self.value(x) for x in node.args)
        spots: dict[int | str, int] = {i: self.position(x) for i, x in enumerate(node.args)}
        kwargs: dict[str, Any] = {}
        keys: dict[str, int] = {}
        for item in node.keywords:
            if item.arg is None:
                self.fail("expected name=value, got **", item)
            if item.arg in kwargs:
                self.fail(f"{item.arg!r} is given twice", item)
            kwargs[item.arg] = self.value(item.value)
            keys[item.arg], spots[item.arg] = self.position(item), self.position(item.value)
        return Spec(node.func.id, args, kwargs, True, self.text, self.position(node.func), spots, keys)


def write(value: Any, other: Callable[[Any], str] = repr) -> str:
    """A value as text; `other` writes strings and whatever a parsed spec does not hold."""
    if value is None or isinstance(value, bool | int | float | Spec):
        return str(value)
    if isinstance(value, list):
        return f"[{', '.join(write(x, other) for x in value)}]"
    if type(value) is tuple:
        return f"({', '.join(write(x, other) for x in value)}{',' if len(value) == 1 else ''})"
    return other(value)


def split_specs(text: str) -> list[str]:
    """Different specs between commas or semicolons; what stands inside brackets belongs to its spec.

    >>> split_specs("allreduce, parameter_server(servers=2, staleness=4); torch:ddp")
    ['allreduce', 'parameter_server(servers=2, staleness=4)', 'torch:ddp']
    """
    found, depth, begun = [], 0, 0
    for i, letter in enumerate(text):
        depth += (letter in "([{") - (letter in ")]}")
        if letter in ",;" and depth == 0:
            found.append(text[begun:i])
            begun = i + 1
    return list(dict.fromkeys(spec.strip() for spec in [*found, text[begun:]] if spec.strip()))
