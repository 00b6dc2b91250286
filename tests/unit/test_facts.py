"""Facts: every method of the package has them, and the sizes that closed forms are written in."""

from __future__ import annotations

import dataclasses
import importlib
import math
import re
from pathlib import Path

import pytest
import torch

from unisono.methods.buckets import Bucket
from unisono.methods.facts import Example, Facts, Sizes
from unisono.methods.reducer import all_reduce_bytes
from unisono.methods.spec import extend, names, parse, read_facts
from unisono.methods.spec.methods import Kind

METHODS = [(kind, name) for kind in ("reducer", "strategy") for name in names(kind)]  # type: ignore[arg-type]
SHAPES = [(6, 5), (7,), (), (0,), (2, 0), (3, 2, 4), (40, 30)]


@pytest.mark.parametrize(("kind", "name"), METHODS)
def test_every_method_says_what_is_true_of_it(kind: Kind, name: str) -> None:
    folder = "reducers" if kind == "reducer" else "strategies"
    assert isinstance(importlib.import_module(f"unisono.{folder}.{name}").FACTS, Facts)
    facts = read_facts(name, kind)
    assert facts.examples
    specs = [example.spec for example in facts.examples]
    assert {parse(spec).name for spec in specs} == {name}
    assert len(set(specs)) == len(specs)
    for setting, word in facts.refuses.items():
        assert parse(f"{name}({setting})").name == name
        assert word


@pytest.mark.parametrize("told", [Facts, Example])
def test_the_page_on_writing_a_method_has_every_field(told: type) -> None:
    page = (Path(__file__).parents[2] / "docs/writing-a-reducer.md").read_text()
    table = page.partition(f"`{told.__name__}` | meaning |")[2].partition("\n\n")[0]
    assert re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE) == [field.name for field in dataclasses.fields(told)]


def test_a_method_without_facts_is_tried_by_its_bare_name(tmp_path: Path) -> None:
    (tmp_path / "silent.py").write_text("def silent(): ...\n")
    with extend(reducers=tmp_path):
        assert read_facts("silent", "reducer") == Facts([Example("silent")])


def test_sizes_count_what_a_bucket_holds() -> None:
    named = [(str(i), torch.zeros(shape)) for i, shape in enumerate(SHAPES)]
    bucket = Bucket(0, named, lambda n, dtype: torch.empty(n, dtype=dtype))
    sizes = Sizes(SHAPES, ranks=3, step=0)
    assert sizes.numbers == bucket.flat.numel()
    assert sizes.matrices == [(6, 5), (3, 2, 4), (40, 30)]
    assert sizes.in_vectors == 7 + 1


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_sizes_count_what_collectives_send(ranks: int) -> None:
    sizes = Sizes(SHAPES, ranks, step=0)
    assert sizes.all_reduce(1000) == all_reduce_bytes(1000, ranks) == math.ceil(2 * (ranks - 1) * 1000 / ranks)
    assert sizes.gather(10) == 10 * (ranks - 1)
    assert sizes.share(1000) % 64 == 0
    assert (ranks - 1) * sizes.share(1000) < 1000 + 64 * ranks
    assert ranks * sizes.share(1000) >= 1000


def test_a_method_around_others_asks_for_what_those_send() -> None:
    def look_up(spec: str, sizes: Sizes) -> int:
        return len(sizes.shapes) * (10 if spec == "dense" else 1)

    sizes = Sizes(SHAPES, 2, 0, look_up)
    assert sizes.sent_by("dense") == 10 * len(SHAPES)
    assert sizes.sent_by("topk", SHAPES[:2]) == 2
