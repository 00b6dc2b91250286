"""Checks of settings: what each kind of annotation accepts, and what a refusal says."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import pytest

from unisono.methods.checks import (
    AtLeast,
    Note,
    Range,
    Satisfies,
    SettingTypeError,
    check_setting,
    check_settings,
    find_fault,
    read_annotations,
    validate,
)


class Method:
    """Stands for a reducer: what a setting may hold besides plain values."""


Count = Annotated[int, AtLeast(1, "backward passes a window")]
Share = Annotated[float, Range("the share that is sent", above=0, at_most=1, percent=True)]
Block = Annotated[int, Satisfies(lambda n: n >= 64 and not n & (n - 1), "a power of two from 64 on")]


@pytest.mark.parametrize(
    ("annotation", "accepted", "refused"),
    [
        (int, [0, -3], [True, 1.0, "1", None, math.nan]),
        (float, [0.5, 1, -2, math.inf], [True, "0.5", None]),
        (bool, [True, False], [0, 1, None, "True"]),
        (str, ["", "a"], [1, None, b"a"]),
        (bool | None, [True, False, None], ["yes", 0]),
        (Literal["a", 2], ["a", 2], ["b", 2.0, None, True]),
        (Literal[1, 2], [1, 2], [True, 1.0, "1"]),
        (Count, [1, 7], [0, -1, 2.5, True, "4", None]),
        (Count | None, [1, None], [0, "none"]),
        (Annotated[int | None, AtLeast(1, "bytes")], [1, None], [0]),
        (Annotated[int, AtLeast(1, "learners")] | Literal["auto"], [2, "auto"], [0, "many", True]),
        (Annotated[int | Literal["auto"], AtLeast(1, "learners")], [2, "auto"], [0, "many", True]),
        (Annotated[int, AtLeast(0, "ranks", most=3)], [0, 3], [-1, 4]),
        (Share, [1, 0.1], [0, 0.0, 1.1, math.nan, math.inf, True, "1%"]),
        (Annotated[float, Range(at_least=0, below=1)], [0, 0.99], [1, -0.1, math.nan]),
        (Annotated[float | None, Range(above=0)], [None, 3.0], [0.0, math.inf]),
        (Block, [64, 128], [32, 100, True, 64.0]),
        (Method, [Method()], ["method", None, Method]),
        (Method | None, [Method(), None], ["method"]),
        (str | list[str], ["a", ["a", "b"], ("a",), []], [3, ["a", 1], None]),
        (Sequence[int], [[1], (2, 3)], ["12", [True]]),
        (tuple[int, str], [(1, "a")], [(1,), (1, 2), ("a", 1), 1]),
        (tuple[int, ...], [(), (1, 2)], [("a",), 1]),
        (list, [[1, "a"], []], [1]),
        (Annotated[str | list[str], Note("patterns")], ["a"], [3]),
        (Any, [1, None, "x"], []),
        (object, [1, None], []),
    ],
)
def test_what_an_annotation_accepts(annotation: Any, accepted: list[Any], refused: list[Any]) -> None:
    for value in accepted:
        check_setting("it", value, annotation)
    for value in refused:
        with pytest.raises(ValueError, match=r"^it .* got "):
            check_setting("it", value, annotation)


@pytest.mark.parametrize(
    ("annotation", "value", "words"),
    [
        (Count, 0, "it counts backward passes a window: expected a whole number of at least 1, got 0"),
        (Count | None, 0, "it counts backward passes a window: expected a whole number of at least 1 or None, got 0"),
        (Annotated[int, AtLeast(0, "ranks", most=3)], 4, "it counts ranks: expected a whole number from 0 to 3, got 4"),
        (
            Annotated[int, AtLeast(1, "learners")] | Literal["auto"],
            "many",
            "it counts learners: expected a whole number of at least 1 or 'auto', got 'many'",
        ),
        (
            Share,
            5,
            "it is the share that is sent: expected a number above 0 and at most 1, got 5; for 5 %, write it=0.05",
        ),
        (
            Annotated[float | None, Range(at_least=0, below=1)],
            1,
            "it must be a number of at least 0 and below 1 or None, got 1",
        ),
        (Block, 100, "it must be a power of two from 64 on, got 100"),
        (Literal["broadcast", "average", "local"], "mean", "it must be 'broadcast', 'average' or 'local', got 'mean'"),
        (bool | None, "yes", "it must be True, False or None, got 'yes'"),
        (Annotated[bool | None, Note("as it pays")], "yes", "it must be True, False or None (as it pays), got 'yes'"),
        (int, 1.5, "it must be a whole number, got 1.5"),
        (str | list[str], 3, "it must be a string or a list, each a string, got 3"),
        (Method | None, 5, "it must be a Method object or None, got 5"),
        (
            Method | None,
            "dense",
            "it must be a Method object or None, got 'dense'; as text, write it into the spec: 'owner(it=dense)'",
        ),
    ],
)
def test_what_a_refusal_says(annotation: Any, value: Any, words: str) -> None:
    assert find_fault("it", value, annotation, owner="owner") == words


def test_a_wrong_type_is_a_type_error_and_a_wrong_value_is_not() -> None:
    for value in (2.0, True, "2", None):
        with pytest.raises(SettingTypeError):
            check_setting("accumulate", value, Count)
    with pytest.raises(ValueError, match="got 0") as caught:
        check_setting("accumulate", 0, Count)
    assert not isinstance(caught.value, TypeError)
    assert issubclass(SettingTypeError, TypeError)
    assert issubclass(SettingTypeError, ValueError)


@dataclass(frozen=True)
class Settings:
    accumulate: Count = 1
    place: Literal["beside", "own"] = "beside"
    reducer: Method | None = None
    made: list[int] = field(default_factory=list, init=False)


def test_the_fields_of_a_dataclass_are_checked() -> None:
    check_settings(Settings())
    check_settings(Settings(3, "own", Method()))
    with pytest.raises(ValueError, match="accumulate counts backward passes"):
        check_settings(Settings(0))
    with pytest.raises(ValueError, match="place must be 'beside' or 'own', got 'there'"):
        check_settings(Settings(place="there"))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"write it into the spec: 'Settings\(reducer=dense\)'"):
        check_settings(Settings(reducer="dense"))  # type: ignore[arg-type]


def test_the_arguments_of_a_function_are_checked_and_its_signature_stays() -> None:
    @validate
    def method(k: Share, *, feedback: bool = True) -> tuple[float, bool]:
        """What it does."""
        return k, feedback

    assert method(0.5, feedback=False) == (0.5, False)
    assert method.__doc__ == "What it does."
    assert set(read_annotations(method)) == {"k", "feedback", "return"}
    with pytest.raises(ValueError, match="k is the share that is sent"):
        method(0)
    with pytest.raises(TypeError, match="feedback must be True or False"):
        method(0.5, feedback=1)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="missing a required argument"):
        method()  # type: ignore[call-arg]

    @validate
    def several(*counts: Count) -> int:
        return len(counts)

    assert several(1, 2) == 2
    with pytest.raises(ValueError, match="counts backward passes a window"):
        several(1, 0)


def test_annotations_that_cannot_be_resolved_check_nothing() -> None:
    @dataclass
    class Local:
        x: Missing = 3  # type: ignore[name-defined]  # noqa: F821

    assert read_annotations(Local) == {}
    check_settings(Local("anything"))
