"""The spec language: `"local_sgd(every=8, reducer=powersgd(rank=2))"` to objects, and back.

A method is found by its name as a file: `strategies/NAME.py` or `reducers/NAME.py` defines NAME, a class or
a function. The text is parsed, never evaluated: it can name methods and plain values, nothing else.
"""

from __future__ import annotations

import dataclasses
import difflib
import importlib
import inspect
import keyword
import sys
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from unisono.methods.checks import Annotation, find_fault, read_annotation, read_annotations
from unisono.methods.facts import Example, Facts
from unisono.methods.spec import FOLDERS, TORCH, Kind, describe_unknown, find_names, names, suggest
from unisono.methods.spec.grammar import NUMBERS, Spec, SpecError, parse, write

_ELSEWHERE = "..."  # stands for a value that text cannot hold


# ---------------------------------------------------------------------------------------------- loading


def read_facts(name: str, kind: Kind) -> Facts:
    """What a method says of itself: `FACTS` in its file. Without them, its bare name is an example of it."""
    return typing.cast(Facts, getattr(_load_module(name, kind), "FACTS", Facts([Example(name)])))


def _load_module(name: str, kind: Kind) -> types.ModuleType:
    return importlib.import_module(f"{FOLDERS[kind]}.{name}")


def _load_factory(name: str, kind: Kind) -> Callable[..., Any]:
    """The class or function a method's file defines. An error in the file itself comes through as it is."""
    module = _load_module(name, kind)
    factory = getattr(module, name, None)
    if not callable(factory):
        raise ImportError(f"{module.__file__} must define a class or function named {name!r}")
    return typing.cast(Callable[..., Any], factory)


# --------------------------------------------------------------------------------------------- building


def build(spec: str | Spec | Any, kind: Kind = "strategy") -> Any:
    """The strategy or reducer that a spec names; an object that already is one comes back as it is.

    Where a strategy is wanted, a reducer (its name or itself) means `allreduce` with that reducer, and "torch:ddp" the
    DistributedDataParallel of torch (`names("torch strategy")`). Arguments are checked against the method's signature
    and annotations. Building a reducer twice from one spec gives one object: a reducer is two pure functions, so it can
    be shared.

    Raises:
        SpecError: text that cannot be read, an unknown name or argument, a value of a wrong type.
        TypeError: an object that is neither text nor a method.
    """
    if isinstance(spec, str):
        if kind == "strategy" and spec.strip().startswith(TORCH):
            return _build(parse(spec.strip().removeprefix(TORCH)), "torch strategy")
        return _build(parse(spec), kind)
    if isinstance(spec, Spec):
        return _build(spec if spec.text else parse(str(spec)), kind)
    if inspect.isfunction(spec) or inspect.isclass(spec):
        raise TypeError(f"expected a {kind}, got {spec!r} itself; call it: {spec.__name__}(...)")
    if _is_reducer(spec):
        return spec if kind == "reducer" else _load_factory("allreduce", "strategy")(reducer=spec)
    if kind == "strategy" and callable(getattr(spec, "bind", None)):
        return spec
    raise TypeError(
        f"expected a {kind} or its spec, such as {'allreduce' if kind == 'strategy' else 'dense'!r}; "
        f"got {type(spec)}; known: {', '.join(names(kind))}"
    )


_reducers: dict[tuple[Callable[..., Any], str], Any] = {}  # built reducers, by factory and canonical text


def _build(spec: Spec, kind: Kind) -> Any:
    if spec.name not in find_names(kind):
        if kind == "strategy" and spec.name in find_names("reducer"):
            return _load_factory("allreduce", "strategy")(reducer=_build(spec, "reducer"))
        if spec.name in find_names("strategy"):
            spec.fail(f"{spec.name!r} is a strategy; a reducer is needed here, such as 'dense'")
        spec.fail(describe_unknown(spec.name, kind))
    factory = _load_factory(spec.name, kind)
    bound = _bind(spec, factory)
    canonical = _write_canonical(spec.name, bound)
    if kind == "reducer" and (factory, canonical) in _reducers:
        return _reducers[factory, canonical]
    try:
        built = factory(*bound.args, **bound.kwargs)
    except ValueError as error:
        if isinstance(error, SpecError):
            raise
        at = spec.spots.get(str(error).partition(" ")[0], spec.at)  # a message that begins with an argument is about it
        raise SpecError(f"{spec.name}: {error}", spec.text, at) from error
    if kind == "reducer" and _ELSEWHERE not in canonical:
        built = _reducers.setdefault((factory, canonical), built._replace(spec=canonical))
    return built


def _bind(spec: Spec, factory: Callable[..., Any]) -> inspect.BoundArguments:
    """Check a spec's arguments against the method's signature and turn each into what its parameter takes."""
    signature, hints = inspect.signature(factory), read_annotations(factory)
    parameters = signature.parameters
    bare = [p.replace(annotation=p.empty) for p in parameters.values()]
    usage = f"{spec.name}{signature.replace(parameters=bare, return_annotation=signature.empty)}"
    plain = [p for p in parameters.values() if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    rest = next((p for p in parameters.values() if p.kind is p.VAR_POSITIONAL), None)
    args = []
    for i, value in enumerate(spec.args):
        if i >= len(plain) and rest is None:
            spec.fail(f"{usage} takes no more than {len(plain)} without a name", spec.spots[i])
        parameter = plain[i] if i < len(plain) else typing.cast(inspect.Parameter, rest)
        args.append(_read_argument(spec, parameter.name, value, hints, spec.spots[i]))
    named = [p.name for p in parameters.values() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    kwargs = {}
    for name, value in spec.kwargs.items():
        if name not in named:
            spec.fail(f"{spec.name} has no argument {name!r}{suggest(name, named)}", spec.keys[name])
        if name in [p.name for p in plain[: len(args)]]:
            spec.fail(f"{name!r} is given twice: by position and by name", spec.keys[name])
        kwargs[name] = _read_argument(spec, name, value, hints, spec.spots[name])
    try:
        return signature.bind(*args, **kwargs)
    except TypeError as error:
        return spec.fail(f"{spec.name}: {error}; expected {usage}")


def _read_argument(spec: Spec, name: str, value: Any, hints: Mapping[str, Any], position: int) -> Any:
    hint = read_annotation(hints.get(name, Any))
    try:
        converted = _convert(value, hint)
    except _MismatchError as mismatch:
        got = f"got {write(value)}{mismatch}"
        return spec.fail(f"{spec.name}({name}=...) takes {_describe_hint(hint)}; {got}", position)
    fault = find_fault(name, converted, hints.get(name, Any))
    return spec.fail(f"{spec.name}: {fault}", position) if fault else converted


class _MismatchError(Exception):
    """A value that does not fit its parameter; carries a hint."""


def _convert(value: Any, hint: Annotation) -> Any:
    """`value` as an object of the annotated type; a word becomes a string or a method as the type asks."""
    if hint.kind == "union":
        return _convert_union(value, hint.members)
    if hint.kind == "choice":
        word = value.name if isinstance(value, Spec) and not value.called else value
        if word in hint.members and type(word) in map(type, hint.members):
            return word
        raise _MismatchError(suggest(str(word), [m for m in hint.members if isinstance(m, str)]))
    if hint.kind == "list":
        return _convert_list(value, hint)
    if (kind := _kind_of(hint)) is not None:
        if isinstance(value, str | Spec):
            return build(value, kind)
        raise _MismatchError
    if isinstance(value, Spec):
        return _convert_word(value, hint)
    if hint.type is float and type(value) is int:
        return float(value)
    if hint.kind == "any" or hint.type is type(value):
        return value
    raise _MismatchError


def _convert_union(value: Any, members: Sequence[Annotation]) -> Any:
    if any(member.type is type(value) for member in members):
        return value
    method = isinstance(value, Spec) and (
        value.called or value.name in (find_names("reducer") | find_names("strategy"))
    )
    mismatches = []
    for member in sorted(members, key=lambda m: (_kind_of(m) is not None) != method):
        try:
            return _convert(value, member)
        except _MismatchError as mismatch:  # noqa: PERF203 - a handful of members
            mismatches.append(str(mismatch))
    raise _MismatchError(next(filter(None, mismatches), ""))


def _convert_list(value: Any, hint: Annotation) -> Any:
    if not isinstance(value, list | tuple):
        raise _MismatchError
    if hint.is_fixed and len(hint.members) != len(value):
        raise _MismatchError(f" with {len(value)} values")
    members = hint.members if hint.is_fixed else (hint.members or (Annotation("any", Any),)) * len(value)
    items = [_convert(x, member) for x, member in zip(value, members, strict=True)]
    return items if (typing.get_origin(hint.type) or hint.type) is list else tuple(items)


def _convert_word(value: Spec, hint: Annotation) -> Any:
    """A bare word: a string for `str`, a dtype for `torch.dtype`, the method of that name if any value fits."""
    if hint.kind == "any":
        if value.called or value.name in find_names("reducer"):
            return _build(value, "strategy" if value.name in find_names("strategy") else "reducer")
        return value.name
    if not value.called and hint.type is str:
        return value.name
    if not value.called and hint.type is torch.dtype and isinstance(getattr(torch, value.name, None), torch.dtype):
        return getattr(torch, value.name)
    words = {bool: ["True", "False"], types.NoneType: ["None"]}
    near = difflib.get_close_matches(value.name.capitalize(), words.get(hint.type, []), n=1)
    raise _MismatchError(f"; did you mean {near[0]}?" if near else "")


def _kind_of(hint: Annotation) -> Kind | None:
    name = getattr(hint.type, "__name__", "")
    return "reducer" if name == "Reducer" else "strategy" if name == "Strategy" else None


def _is_reducer(obj: Any) -> bool:
    return callable(getattr(obj, "init", None)) and callable(getattr(obj, "reduce", None))


def _describe_hint(hint: Annotation) -> str:
    plain = {int: "an int", float: "a number", str: "a string", bool: "True or False", types.NoneType: "None"}
    if hint.kind == "union":
        words = " or ".join(map(_describe_hint, hint.members))
    elif hint.kind == "choice":
        words = "one of " + ", ".join(map(repr, hint.members))
    elif (kind := _kind_of(hint)) is not None:
        words = f"a {kind}"
    else:
        name = hint.type if typing.get_args(hint.type) else getattr(hint.type, "__name__", hint.type)
        words = plain.get(hint.type) or str(name)
    for rule in hint.rules:
        words = rule.expected(words)
    return words


# ------------------------------------------------------------------------------------------ writing back


def describe(obj: Any) -> str:
    """The spec of a built strategy or reducer, with the arguments that differ from the defaults.

    `build(describe(x))` equals x. A value that text cannot hold (a function, say) is written as `...`, which
    `build` refuses.

    Example:
        >>> describe(build("dense", "reducer"))
        'dense'
    """
    if dataclasses.is_dataclass(obj) and not isinstance(obj, type):
        fields = [f for f in dataclasses.fields(obj) if f.init]
        values = {f.name: getattr(obj, f.name) for f in fields}
        defaults = {
            f.name: f.default if f.default_factory is dataclasses.MISSING else f.default_factory() for f in fields
        }
        parts = [f"{k}={write(v, _write_other)}" for k, v in values.items() if not _is_same(v, defaults[k])]
        name = (TORCH if type(obj).__module__.startswith(FOLDERS["torch strategy"]) else "") + type(obj).__name__
        return f"{name}({', '.join(parts)})" if parts else name
    if _is_reducer(obj):
        if getattr(obj, "spec", ""):
            return str(obj.spec)
        module, name = obj.reduce.__module__, obj.reduce.__module__.rpartition(".")[2]
        factory = getattr(sys.modules.get(module), name, None)
        exact = callable(factory) and not inspect.signature(factory).parameters
        return name if exact else f"{name}({_ELSEWHERE})"
    return f"{type(obj).__name__}({_ELSEWHERE})"


def _write_canonical(name: str, bound: inspect.BoundArguments) -> str:
    parts = []
    for key, value in bound.arguments.items():
        parameter = bound.signature.parameters[key]
        if parameter.kind is parameter.VAR_POSITIONAL:
            parts += [write(x, _write_other) for x in value]
        elif not _is_same(value, parameter.default):
            prefix = "" if parameter.kind is parameter.POSITIONAL_ONLY else f"{key}="
            parts.append(prefix + write(value, _write_other))
    return f"{name}({', '.join(parts)})" if parts else name


def _is_same(a: Any, b: Any) -> bool:
    return a is b or (type(a) is type(b) and bool(a == b))


def _write_other(value: Any) -> str:
    """What the grammar cannot hold itself: words without quotes, dtypes by name, methods by their specs."""
    if isinstance(value, str):
        word = value.isidentifier() and value.isascii() and not keyword.iskeyword(value)
        taken = value in NUMBERS or value in find_names("reducer") | find_names("strategy")
        return value if word and not taken else repr(value)
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    if dataclasses.is_dataclass(value) or _is_reducer(value):
        return describe(value)
    return _ELSEWHERE
