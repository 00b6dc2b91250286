"""In the sidebar, a page's title ends at its colon: `# topk: the largest numbers` is `topk` there."""

from __future__ import annotations

from docutils import nodes
from sphinx.application import Sphinx


def shorten(app: Sphinx, _: nodes.document) -> None:
    title = next(app.env.tocs[app.env.current_document.docname].findall(nodes.reference), None)
    if title is not None and ": " in title.astext():
        short = title.astext().partition(": ")[0]
        title.clear()
        title += nodes.Text(short)


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("doctree-read", shorten, priority=900)  # after the table of contents was made
    return {"parallel_read_safe": True, "parallel_write_safe": True}
