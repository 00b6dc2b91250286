"""The table of environment variables: complete, and read in one way."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from unisono.launchers.runtime import variables

ROOT = Path(__file__).parents[2]
SRC = ROOT / "src" / "unisono"
NAME = re.compile(r"UNISONO_[A-Z_]+")


def find_names() -> set[str]:
    texts = (path.read_text() for path in SRC.rglob("*.py") if path.name != "variables.py")
    return {name for text in texts for name in NAME.findall(text)}


def test_every_variable_in_the_source_stands_in_the_table_and_the_other_way_round() -> None:
    table = variables.FOR_USERS.keys() | variables.INTERNAL.keys()
    read_here = set(
        NAME.findall((SRC / "launchers" / "runtime" / "variables.py").read_text().partition("_TIMEOUT_S = ")[2])
    )
    assert find_names() | read_here == table


def test_variables_for_users_are_documented_and_the_others_are_not() -> None:
    pages = "".join(path.read_text() for path in (ROOT / "docs").rglob("*.md") if "decisions" not in path.parts)
    documented = set(NAME.findall(pages))
    assert variables.FOR_USERS.keys() <= documented
    assert not variables.INTERNAL.keys() & documented


def test_the_tables_only_shrink() -> None:
    assert len(variables.FOR_USERS) <= 26
    assert len(variables.INTERNAL) <= 27


def test_an_observer_gets_its_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("UNISONO_OBSERVER", raising=False)
    assert (variables.read_observer_module(), variables.read_observer_settings()) == ("", {})
    for name, value in variables.name_observer("a.module", folder="with space", steps=3).items():
        monkeypatch.setenv(name, value)
    assert variables.read_observer_module() == "a.module"
    assert variables.read_observer_settings() == {"folder": "with space", "steps": 3}


def test_a_workers_number_is_its_place_or_else_its_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("UNISONO_PLACE", raising=False)
    monkeypatch.delenv("RANK", raising=False)
    assert variables.read_worker_number() is None
    monkeypatch.setenv("RANK", "3")
    assert variables.read_worker_number() == 3
    monkeypatch.setenv("UNISONO_PLACE", "5")
    assert variables.read_worker_number() == 5
