"""The drawings on the methods' pages are what the methods do, and every page shows its own."""

from __future__ import annotations

import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from doc_pages import ROOT

sys.path.insert(0, str(ROOT / "docs"))

from drawings.pages import FOLDER, PAGES, make, show

OVERVIEWS = {"README", "map", "index"}
SHOWN_ON = {"allreduce": "dense", "bf16": "casts", "fp16": "casts"}  # methods without a page of their name


def drawings() -> list[Path]:
    return sorted(FOLDER.glob("*.svg"))


def test_every_method_has_a_page() -> None:
    found = [path for kind in ("reducers", "strategies") for path in (ROOT / "src/unisono/methods" / kind).iterdir()]
    methods = {path.stem for path in found if not path.name.startswith("_")}
    pages = {page.stem for page in FOLDER.glob("*.md")} - OVERVIEWS
    assert {SHOWN_ON.get(method, method) for method in methods} == pages


def test_every_page_of_a_method_shows_its_drawing() -> None:
    assert {path.stem for path in drawings()} == set(PAGES)
    pages = {page.stem: page.read_text(encoding="utf-8") for page in FOLDER.glob("*.md") if page.stem not in OVERVIEWS}
    assert set(pages) <= set(PAGES)
    for path in drawings():
        line = show(path.stem, path.read_text(encoding="utf-8"))
        assert line in pages[path.stem.partition("-")[0]], f"the page should have: {line}"


@pytest.mark.parametrize("name", ["topk", "hierarchical", "gossip", "parameter_server-1"])
def test_a_drawing_is_what_happens(name: str) -> None:
    assert make(name) == (FOLDER / f"{name}.svg").read_text(encoding="utf-8"), "in docs/: python -m drawings"


@pytest.mark.parametrize("path", drawings(), ids=lambda path: path.stem)
def test_nothing_of_a_drawing_lies_outside_of_it(path: Path) -> None:
    root = ElementTree.parse(path).getroot()  # our own file
    _, _, width, height = map(float, root.get("viewBox", "").split())
    for element in root.iter():
        for name, most in (("x", width), ("x1", width), ("x2", width), ("cx", width), ("y", height), ("cy", height)):
            value = float(element.get(name, "0"))
            assert 0 <= value <= most, (element.tag, name, value)


def test_every_page_of_a_method_says_how_its_costs_were_measured() -> None:
    for page in FOLDER.glob("*.md"):
        if page.stem not in OVERVIEWS:
            text = page.read_text(encoding="utf-8")
            assert "benchmarks/" in text, f"{page.name}: no command that measured it"
            assert "$$" in text or "$t = " in text, f"{page.name}: no formula"
