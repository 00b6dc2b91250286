"""What docs/architecture.md says of the tree is true: its files, its layers; and paths and links on all pages lead
somewhere."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from architecture import ROOMS, Package, part_of

from doc_pages import PAGES, ROOT, blocks

SRC = ROOT / "src" / "unisono"
PAGE = ROOT / "docs" / "architecture.md"


def listed() -> list[str]:
    """The files and folders in the tree on the page, a folder with a slash at its end."""
    [tree] = [block.text for block in blocks(PAGE) if block.text.startswith("src/unisono/\n")]
    found: list[str] = []
    folders: list[str] = []
    for line in tree.splitlines()[1:]:
        depth = (len(line) - len(line.lstrip())) // 2 - 1
        names = re.split(r"  +", line.strip())[0].split(", ")
        found += ["".join(folders[:depth]) + name for name in names]
        folders[depth:] = names[-1:]
    return found


def existing() -> set[str]:
    """The packages and modules of `unisono`; a folder stands for its `__init__.py`."""
    files = {path.relative_to(SRC).as_posix() for path in SRC.rglob("*.py")}
    return {name.removesuffix("__init__.py") if name != "__init__.py" else name for name in files}


def test_the_tree_on_the_page_is_the_tree() -> None:
    shown = listed()
    assert len(shown) == len(set(shown)), "a file is listed twice"
    assert set(shown) == set(existing())


def test_the_layers_on_the_page_name_every_package_and_module_once() -> None:
    names = [name for line in layers() for name in line]
    parts = {part_of(name) for name in Package(SRC).modules}
    assert sorted(names) == sorted(parts - ROOMS - {"unisono", "__main__"})


def test_the_layers_on_the_page_are_those_of_the_architecture_test() -> None:
    source = ast.parse((ROOT / "tests/unit/test_architecture.py").read_text())
    values = [n.value for n in source.body if isinstance(n, ast.Assign) and ast.unparse(n.targets[0]) == "LAYERS"]
    if not values or not isinstance(values[0], ast.List):
        pytest.skip("the architecture test has no list of layers")
    theirs = [line.split() for line in ast.literal_eval(values[0])]
    order = {name: i for i, line in enumerate(theirs) for name in line}
    ours = [sorted(order[name] for name in line if name in order) for line in layers()]
    assert all(len(set(line)) <= 1 for line in ours), "a line of the page holds several layers"
    firsts = [line[0] for line in ours if line]
    assert firsts == sorted(set(firsts))


def layers() -> list[list[str]]:
    [text] = [block.text for block in blocks(PAGE) if block.comment == "layers"]
    return [line.split() for line in text.splitlines()]


def paths() -> Iterator[tuple[Path, str]]:
    """Names of files in backquotes with a folder, outside blocks of code; commands and patterns left out."""
    for page in PAGES:
        prose = re.sub(r"^ *```.*?^ *```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
        for name in re.findall(r"`([\w./-]+/[\w.-]+\.(?:py|md|jsonl|png|svg))`", prose):
            yield page, name
        for target in re.findall(r"\]\((?!https?:)([^)#\s]+)", prose):
            yield page, target


def test_paths_and_links_lead_somewhere() -> None:
    lost = [
        f"{page.relative_to(ROOT)}: {name}"
        for page, name in paths()
        if not any((base / name).exists() for base in (page.parent, ROOT, SRC))
    ]
    assert lost == []
