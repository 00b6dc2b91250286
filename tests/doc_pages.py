"""The code in README.md and docs: its blocks, and the methods that the pages on writing one build."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
_FENCE = re.compile(r"^( *)```(?:(\w*)|\{[\w-]+\}.*?) *$")  # a directive of the site has braces, and no language
_COMMENT = re.compile(r"^ *<!-- *(.*?) *--> *$")


class Block(NamedTuple):
    """A block of code: where it is, its language, its text, and the HTML comment right above it."""

    page: Path
    line: int  # of its first line, from 1
    language: str
    text: str
    comment: str = ""

    @property
    def file(self) -> str:
        """The file that it is a piece of: `<!-- file: reducers/terngrad.py -->`."""
        return self.comment.removeprefix("file:").strip() if self.comment.startswith("file:") else ""

    @property
    def why_not(self) -> str:
        """Why it is not run: `<!-- not run: needs a Spark cluster -->`."""
        return self.comment.removeprefix("not run:").strip() if self.comment.startswith("not run:") else ""

    @property
    def source(self) -> str:
        """What is run: the text, with a smaller number where `<!-- smaller: 2048 -> 64 -->` says so."""
        if not self.comment.startswith("smaller:"):
            return self.text
        large, small = self.comment.removeprefix("smaller:").split("->")
        return re.sub(rf"\b{large.strip()}\b", small.strip(), self.text)


def blocks(page: Path) -> Iterator[Block]:
    """The blocks of a page, in order."""
    lines, at = page.read_text(encoding="utf-8").splitlines(), 0
    while at < len(lines):
        opened = _FENCE.match(lines[at])
        if opened is None:
            at += 1
            continue
        indent, language = opened[1], opened[2] if opened[2] is not None else "directive"
        end = next(i for i in range(at + 1, len(lines)) if lines[i].strip() == "```")
        text = "\n".join(line.removeprefix(indent) for line in lines[at + 1 : end]) + "\n"
        above = _COMMENT.match(lines[at - 1]) if at else None
        yield Block(page, at + 2, language, text, above.group(1) if above else "")
        at = end + 1


def write_methods(folder: Path) -> None:
    """Write the files that pages build, each from its pieces in order, below `folder`: reducers/, strategies/."""
    for kind in ("reducers", "strategies"):
        (folder / kind).mkdir(parents=True, exist_ok=True)
    for page in PAGES:
        for block in blocks(page):
            if block.file:
                with open(folder / block.file, "a", encoding="utf-8") as file:
                    file.write(("\n\n" if file.tell() else "") + block.text)
