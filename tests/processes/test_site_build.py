"""Some pages as a site, with the settings of docs/conf.py: they are built without warnings, their links are checked,
formulas are MathML, and the search finds a page in a browser that has nothing but files."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from browser import Browser, find_chromium

ROOT = Path(__file__).parents[2]
LIGHT = "myst_parser,sphinx_copybutton,short_titles,mathml,local_links"  # without the reference, which imports torch
INDEX = "# Pages\n\n```{toctree}\npowersgd\nother\n```\n"
OTHER = "# Other: a page\n\nThe mean is $\\frac{1}{N} \\sum_i g_i$; see [that](powersgd.md#cost).\n"
POWERSGD = "# powersgd: two thin factors\n\n## Cost\n\nA raw <a href='other.html'>link</a>.\n"

pytest.importorskip("furo", reason="the extra docs is not installed")


def build(folder: Path, **pages: str) -> subprocess.CompletedProcess[str]:
    """Write the pages and build them, into `folder`/out."""
    for name, text in {"index": INDEX, "other": OTHER, "powersgd": POWERSGD, **pages}.items():
        (folder / f"{name}.md").write_text(text)
    options = ("-q", "-W", "--keep-going", "-c", str(ROOT / "docs"), "-D", f"extensions={LIGHT}")
    command = [sys.executable, "-m", "sphinx", *options, str(folder), str(folder / "out")]
    environment = {**os.environ, "PYTHONWARNINGS": ""}
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)


def test_formulas_links_and_search_work_without_a_network(tmp_path: Path) -> None:
    done = build(tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    page = (tmp_path / "out" / "other.html").read_text()
    assert "<mfrac>" in page
    assert 'href="powersgd.html#cost"' in page
    assert ">Other</a>" in page, "the sidebar has the title up to its colon"
    assert "https://" not in page.partition("<body>")[0], "nothing is loaded from elsewhere"
    if find_chromium() is None:
        return
    browser = Browser(tmp_path / "profile")
    try:
        browser.open((tmp_path / "out" / "search.html").as_uri() + "?q=powersgd")
        browser.wait_for("document.querySelector('#search-results li a')")
        found = browser.evaluate("[...document.querySelectorAll('#search-results li a')].map(a => a.href)")
        assert any("powersgd.html" in link for link in found), found
        # The text beside a result is fetched, which browsers refuse to pages that are files.
        assert [error for error in browser.find_errors() if "fetch" not in error and "ERR_FAILED" not in error] == []
    finally:
        browser.close()


def test_what_does_not_lead_anywhere_or_is_no_formula_fails_the_build(tmp_path: Path) -> None:
    done = build(
        tmp_path,
        other="# Other\n\n[a](gone.md) [b](powersgd.md#gone) $\\nonsense{x}$\n",
        powersgd="# P\n\nA raw <a href='lost.html'>link</a>.\n",
    )
    assert done.returncode != 0
    for text in ("gone.md", "'gone'", "nonsense", "powersgd.html: lost.html"):
        assert text in done.stderr, done.stderr
