"""What the pages of docs/plugs show as changed lines is what is changed, and as many as their table says."""

from __future__ import annotations

import ast
import difflib
import re
from pathlib import Path

import pytest

from doc_pages import ROOT, blocks

PLUGS = ROOT / "docs" / "plugs"
EXAMPLES = {
    "huggingface": "hf_text_classification.py",
    "keras": "keras_convnet.py",
    "skorch": "skorch_quickstart.py",
}


def read_table() -> dict[str, int]:
    """By page, the lines that it says are added or changed."""
    rows = re.findall(r"^\| \[.*\]\((\w+)\.md\) \|.*\| (\d+) \|$", (PLUGS / "index.md").read_text(), re.MULTILINE)
    return {page: int(count) for page, count in rows}


def shown(page: str) -> list[str]:
    """The lines of its first diff that begin with + or -."""
    [first, *_] = [block.text for block in blocks(PLUGS / f"{page}.md") if block.language == "diff"]
    return [line for line in first.splitlines() if line.startswith(("+", "-"))]


def read_program(path: Path) -> list[str]:
    """Its lines, without the docstring and blank ones."""
    text = path.read_text(encoding="utf-8")
    begins = ast.parse(text).body[0].end_lineno or 0
    return [line for line in text.splitlines()[begins:] if line.strip()]


def test_the_table_has_every_page() -> None:
    assert set(read_table()) == {path.stem for path in PLUGS.glob("*.md")} - {"index"}


@pytest.mark.parametrize("page", read_table())
def test_as_many_lines_are_shown_as_the_table_says(page: str) -> None:
    assert sum(line.startswith("+") for line in shown(page)) == read_table()[page]


@pytest.mark.parametrize("page", EXAMPLES)
def test_the_lines_shown_are_those_between_tutorial_and_example(page: str) -> None:
    before = read_program(ROOT / "tests" / "tutorials" / EXAMPLES[page])
    after = read_program(ROOT / "examples" / EXAMPLES[page])
    found = [line for line in difflib.ndiff(before, after) if line.startswith(("+ ", "- "))]
    assert sorted(line[0] + line[2:] for line in found) == sorted(shown(page))
