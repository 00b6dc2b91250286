"""After the site is built, every link inside it leads to a file, and to a place in it that exists."""

from __future__ import annotations

from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

from sphinx.application import Sphinx
from sphinx.util import logging

logger = logging.getLogger(__name__)


class Links(HTMLParser):
    """The links of a page, and the places in it that a link can name."""

    def __init__(self, page: Path) -> None:
        super().__init__()
        self.links: set[str] = set()
        self.places: set[str] = {""}
        self.feed(page.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name in ("href", "src") and value:
                self.links.add(value)
            elif name == "id" and value:
                self.places.add(value)


def lost_links(folder: Path) -> list[str]:
    """`PAGE: LINK` for each link that leads nowhere; those to other sites are not followed."""
    pages = {path.resolve(): Links(path) for path in sorted(folder.rglob("*.html"))}
    lost = []
    for page, found in pages.items():
        for link in sorted(found.links):
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (page.parent / unquote(parts.path)).resolve() if parts.path else page
            known = pages[target].places if target in pages else None
            if not target.is_file() or (known is not None and unquote(parts.fragment) not in known):
                lost.append(f"{page.relative_to(folder.resolve())}: {link}")
    return lost


def check(app: Sphinx, exception: Exception | None) -> None:
    if exception is None and app.builder.format == "html":
        for line in lost_links(Path(app.outdir)):
            logger.warning("a link leads nowhere: %s", line)


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("build-finished", check)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
