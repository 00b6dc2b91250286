"""Links from a page to Markdown that is no part of the site, as ../CONTRIBUTING.md: on the site, the file's name."""

from __future__ import annotations

import re
from pathlib import Path

from sphinx.application import Sphinx

PAGES = {"CHANGELOG.md": "/changelog.md"}  # what is included in a page
LINK = re.compile(r"\[([^\]\n]+)\]\(((?:\.\./)+[\w./-]*?([\w-]+\.md))(?:#[\w-]*)?\)")


def replace_links(text: str, page: Path, docs: Path) -> str:
    """The text of a page, without links that leave the folder of the site for a file that is there."""

    def replace(link: re.Match[str]) -> str:
        words, target, name = link.groups()
        path = (page.parent / target).resolve()
        if docs.resolve() in path.parents or not path.is_file():
            return link[0]  # inside; or lost, which Sphinx says
        return f"[{words}]({PAGES[name]})" if name in PAGES else f"{words} (`{name}`)"

    return LINK.sub(replace, text)


def read(app: Sphinx, name: str, source: list[str]) -> None:
    source[0] = replace_links(source[0], Path(app.env.doc2path(name)), Path(app.srcdir))


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("source-read", read)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
