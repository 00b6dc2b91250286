"""The spec language: text to methods and back, and errors that point at the character."""

from __future__ import annotations

import math
import random

import pytest
import torch

from unisono.methods import spec as language
from unisono.methods.spec import Spec, SpecError, build, describe, names, parse

REDUCERS = {
    "powerlike": """
from unisono.reducer import Reducer
def powerlike(rank: int = 4, *, warm: bool = True, tail: float = 0.5) -> Reducer:
    if rank < 1:
        raise ValueError(f"rank is {rank}; expected at least 1")
    return Reducer(lambda bucket: {"rank": rank}, lambda bucket, state, world: (bucket, state))
""",
    "wrapping": """
from unisono.reducer import Reducer
def wrapping(*inner: Reducer) -> Reducer:
    return Reducer(lambda bucket: {}, lambda bucket, state, world: (inner, state))
""",
    "brokenimport": "import a_module_that_is_not_there\n",
    "nameless": "def another() -> None: ...\n",
    "_hidden": "raise AssertionError\n",
}
STRATEGIES = {
    "localish": """
from __future__ import annotations
import dataclasses
from typing import Any, Literal
import torch
from unisono.reducer import Reducer
@dataclasses.dataclass(frozen=True)
class localish:
    every: int
    lr: float = 0.7
    mode: Literal["mean", "sum"] = "mean"
    label: str = "plain"
    reducer: Reducer | str | None = None
    sizes: tuple[int, ...] = ()
    pair: tuple[int, str] | None = None
    weights: list[float] = dataclasses.field(default_factory=list)
    wire: torch.dtype | None = None
    flag: bool = False
    anything: Any = None
    def bind(self, model, optimizer, world): ...
""",
}


@pytest.fixture(autouse=True)
def catalog(tmp_path):
    for kind, files in (("strategies", STRATEGIES), ("reducers", REDUCERS)):
        (tmp_path / kind).mkdir()
        for name, source in files.items():
            (tmp_path / kind / f"{name}.py").write_text(source)
    with language.extend(strategies=tmp_path / "strategies", reducers=tmp_path / "reducers"):
        yield


@pytest.mark.parametrize(
    ("text", "spec"),
    [
        ("allreduce", Spec("allreduce")),
        (" allreduce( )\n", Spec("allreduce")),
        ("topk(0.01)", Spec("topk", (0.01,))),
        ("a(1, -2, +3, 4e-3, -inf)", Spec("a", (1, -2, 3, 0.004, -math.inf))),
        ("a(x=None, y=True, z='é, ☃')", Spec("a", (), {"x": None, "y": True, "z": "é, ☃"})),
        ("a([1, (2,), ()], word)", Spec("a", ([1, (2,), ()], Spec("word")))),
        ("a(\n  every=8,\n  b=c(rank=2),\n)", Spec("a", (), {"every": 8, "b": Spec("c", (), {"rank": 2})})),
    ],
)
def test_text_is_read_and_written_back(text, spec):
    assert parse(text) == spec
    assert parse(str(parse(text))) == spec
    assert hash(parse(text)) == hash(spec)


def random_value(rng: random.Random, depth: int) -> object:
    kinds = [
        lambda: rng.randint(-99, 99),
        lambda: rng.gauss(0, 1) * 10 ** rng.randint(-30, 30),
        lambda: rng.choice([True, False, None, math.inf, -math.inf]),
        lambda: "".join(rng.choice("ab'\"\\ \té(),=☃") for _ in range(rng.randint(0, 6))),
        lambda: Spec(rng.choice(["dense", "sum", "x1"])),
    ]
    if depth:
        kinds += [
            lambda: [random_value(rng, depth - 1) for _ in range(rng.randint(0, 3))],
            lambda: tuple(random_value(rng, depth - 1) for _ in range(rng.randint(0, 3))),
            lambda: random_spec(rng, depth - 1),
        ]
    return rng.choice(kinds)()


def random_spec(rng: random.Random, depth: int) -> Spec:
    args = tuple(random_value(rng, depth) for _ in range(rng.randint(0, 2)))
    return Spec(rng.choice("abc"), args, {k: random_value(rng, depth) for k in rng.sample("xyz", rng.randint(0, 3))})


def test_every_spec_round_trips_through_its_text():
    rng = random.Random(0)
    for _ in range(500):
        spec = random_spec(rng, 3)
        assert parse(str(spec)) == spec
        assert str(parse(str(spec))) == str(spec)


@pytest.mark.parametrize(
    ("text", "at"),
    [
        ("", ""),
        ("3", "3"),
        ("'allreduce'", "'"),
        ("[a]", "["),
        ("a(", "("),
        ("a(b=1, 2)", ")"),
        ("a(é='ü', c=d.e)", "d.e"),
        ("a(b=__import__('os').system('true'))", "__import__('os').system"),
        ("a(b=lambda: 0)", "lambda"),
        ("a(b=1 if x else 2)", "1 if"),
        ("a(b=x[0])", "x[0]"),
        ("a(b=f'{x}')", "f'"),
        ("a(b={1: 2})", "{1"),
        ("a(*b)", "*b"),
        ("a(**b)", "**b"),
        ("a(b=...)", "..."),
        ("a(b=b'x')", "b'x'"),
        ("a(b=1j)", "1j"),
        ("a(b=-'x')", "-'x'"),
        ("a(b=not 1)", "not"),
        ("a(b=1, b=2)", "b=2"),
        ("a(b := 3)", "b :="),
        ("local-sgd", "local-sgd"),
        ("a()()", "a()()"),
        ("a;b", ";"),
    ],
)
def test_what_is_not_in_the_language_is_refused_at_its_character(text, at):
    with pytest.raises(SpecError) as caught:
        parse(text)
    error = caught.value
    assert error.text[error.position :].startswith(at) or text == ""
    lines = str(error).splitlines()
    assert lines[-1] == "  " + " " * error.position + "^"
    assert lines[-2] == "  " + text


@pytest.mark.parametrize("text", ["(" * 3000 + "a", "-" * 4000 + "1", "a(" * 1000 + ")" * 1000, "a" * 5000, "a\x00b"])
def test_hostile_text_is_refused_without_harm(text):
    with pytest.raises(ValueError, match="spec"):
        parse(text)


def test_a_method_is_found_by_the_name_of_its_file():
    assert {"allreduce", "localish"} <= set(names("strategy"))
    assert {"dense", "powerlike"} <= set(names("reducer"))
    assert "_hidden" not in names("reducer")
    assert build("localish(8)").every == 8


def test_values_become_what_the_annotations_ask_for():
    built = build(
        "localish(every=3, lr=1, mode=sum, label=word, reducer=powerlike(rank=2), sizes=[1, 2], "
        "pair=(1, b), weights=(1, 2.5), wire=bfloat16, flag=True, anything=[1, x])"
    )
    assert type(built.lr) is float
    assert (built.mode, built.label, built.sizes, built.pair) == ("sum", "word", (1, 2), (1, "b"))
    assert built.weights == [1.0, 2.5]
    assert built.wire is torch.bfloat16
    assert built.reducer.init(None) == {"rank": 2}
    assert build("localish(1, anything=powerlike)").anything.spec == "powerlike"


def test_a_bare_word_is_a_reducer_where_one_is_named_so_and_a_string_otherwise():
    assert build("localish(1, reducer=powerlike)").reducer.init(None) == {"rank": 4}
    assert build("localish(1, reducer=something)").reducer == "something"
    assert build("localish(1, reducer='powerlike')").reducer == "powerlike"


def test_a_reducer_where_a_strategy_is_wanted_means_allreduce_with_it():
    built = build("powerlike(rank=1)")
    assert type(built).__name__ == "allreduce"
    assert built.reducer is build("powerlike(1)", "reducer")
    assert build(built.reducer) == built


def test_an_object_comes_back_as_it_is():
    strategy = build("localish(2)")
    reducer = build("dense", "reducer")
    assert build(strategy) is strategy
    assert build(reducer, "reducer") is reducer
    assert build(Spec("localish", (2,))) == strategy


@pytest.mark.parametrize(
    ("text", "at", "message"),
    [
        ("localsh(8)", "localsh", "unknown strategy 'localsh'; did you mean 'localish'?"),
        ("powerlik", "powerlik", "did you mean 'powerlike'?"),
        ("LOCALISH(8)", "LOCALISH", "did you mean 'localish'?"),
        ("zzzzzzzz", "zzzz", "known: accordion, allreduce,"),
        (
            "localish(8, reducer=powerlike(rnak=2))",
            "rnak",
            "powerlike has no argument 'rnak'; did you mean 'rank'?",
        ),
        (
            "localish(8, reducer=powerlik(2))",
            "powerlik(2",
            "unknown reducer 'powerlik'; did you mean 'powerlike'?",
        ),
        (
            "localish(8, reducer=localish(8))",
            "localish(8))",
            "'localish' is a strategy; a reducer is needed here",
        ),
        ("localish(every=8.5)", "8.5", "localish(every=...) takes an int; got 8.5"),
        ("localish(every=True)", "True", "takes an int; got True"),
        ("localish(eight)", "eight", "takes an int; got eight"),
        ("localish(8, mode=man)", "man", "takes one of 'mean', 'sum'; got man; did you mean 'mean'?"),
        ("localish(8, flag=true)", "true", "takes True or False; got true; did you mean True?"),
        ("localish(8, flag=1)", "1", "takes True or False; got 1"),
        ("localish(8, label=3)", "3", "takes a string; got 3"),
        ("localish(8, pair=(1,))", "(1,)", "got (1,)"),
        ("localish(8, sizes=3)", "3", "tuple[int, ...]; got 3"),
        ("localish(8, sizes=(1, x))", "(1, x)", "got (1, x)"),
        ("localish(8, reducer=4)", "4", "takes a reducer or a string or None; got 4"),
        ("localish(8, wire=float99)", "float99", "got float99"),
        ("localish()", "localish", "missing a required argument: 'every'; expected localish(every"),
        ("localish(8, every=8)", "every", "given twice"),
        ("localish(8, reducer=powerlike(1, True))", "True", "takes no more than 1 without a name"),
        ("powerlike(rank=0)", "0", "powerlike: rank is 0; expected at least 1"),
        ("wrapping(inner=powerlike)", "inner", "wrapping has no argument 'inner'"),
        ("topk(k=5)", "5", "topk: k is the fraction of a tensor that is sent: expected a number above 0 and at most 1"),
        ("qsgd(bits=3)", "3", "qsgd(bits=...) takes one of 2, 4, 8 (a sign and a level: so they fill bytes); got 3"),
    ],
)
def test_a_wrong_spec_is_named_pointed_at_and_put_right(text, at, message):
    with pytest.raises(SpecError) as caught:
        build(text)
    assert message in str(caught.value)
    assert caught.value.text[caught.value.position :].startswith(at)


def test_what_is_neither_text_nor_a_method_is_refused():
    with pytest.raises(TypeError, match=r"expected a strategy or its spec.*got <class 'int'>; known: allreduce"):
        build(3)
    with pytest.raises(TypeError, match=r"call it: localish\(\.\.\.\)"):
        build(type(build("localish(1)")))
    with pytest.raises(TypeError, match="a spec is text"):
        parse(None)


def test_an_error_in_a_methods_own_file_comes_through():
    with pytest.raises(ModuleNotFoundError, match="a_module_that_is_not_there"):
        build("brokenimport")
    with pytest.raises(ImportError, match=r"nameless\.py must define a class or function named 'nameless'"):
        build("nameless", "reducer")


@pytest.mark.parametrize(
    ("text", "canonical"),
    [
        ("allreduce", "allreduce"),
        ("localish(8, lr=0.7, mode='mean')", "localish(every=8)"),
        ("localish(8, lr=1, label='a b', mode=sum)", "localish(every=8, lr=1.0, mode=sum, label='a b')"),
        ("localish(8, label='powerlike')", "localish(every=8, label='powerlike')"),
        ("localish(8, reducer=powerlike(2))", "localish(every=8, reducer=powerlike(rank=2))"),
        (
            "localish(8, reducer=wrapping(powerlike(4), dense))",
            "localish(every=8, reducer=wrapping(powerlike, dense))",
        ),
        (
            "localish(1, wire=float16, sizes=(1,), pair=(1, 'True'))",
            "localish(every=1, sizes=(1,), pair=(1, 'True'), wire=float16)",
        ),
        ("powerlike(2, tail=1)", "allreduce(reducer=powerlike(rank=2, tail=1.0))"),
    ],
)
def test_a_built_method_describes_itself_and_builds_again_equal(text, canonical):
    built = build(text)
    assert describe(built) == canonical
    assert build(describe(built)) == built


def test_what_text_cannot_hold_is_shown_and_refused():
    strategy = type(build("localish(1)"))(1, anything=lambda: 0)
    assert describe(strategy) == "localish(every=1, anything=...)"
    with pytest.raises(SpecError, match="expected a number"):
        build(describe(strategy))
    from unisono.methods.reducers.dense import dense

    assert describe(dense()) == "dense"
    powerlike = build("powerlike", "reducer")._replace(spec="")
    assert describe(powerlike) == "powerlike(...)"


def test_the_catalog_is_as_before_after_an_extension(tmp_path):
    (tmp_path / "more").mkdir()
    (tmp_path / "more" / "extra.py").write_text("def extra(): raise ValueError('made')")
    before = names("reducer")
    with language.extend(reducers=tmp_path / "more"):
        assert "extra" in names("reducer")
        with pytest.raises(SpecError, match="made"):
            build("extra", "reducer")
    assert names("reducer") == before
    with pytest.raises(SpecError, match="unknown reducer 'extra'"):
        build("extra", "reducer")


def test_methods_of_torchs_own_are_named_with_its_name_before() -> None:
    built = build("torch:ddp_powersgd(rank=3)")
    assert describe(built) == "torch:ddp_powersgd(rank=3)"
    assert describe(build("torch:ddp")) == "torch:ddp"
    assert {"ddp", "ddp_powersgd", "fsdp2"} == set(names("torch strategy"))
    assert not {"ddp", "fsdp2"} & set(names("strategy"))
    with pytest.raises(SpecError, match=r"unknown torch strategy 'dpp'; did you mean 'ddp'\?"):
        build("torch:dpp")
