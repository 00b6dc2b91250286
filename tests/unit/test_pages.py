"""Pages: well-formed, with all that they need in them."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path

from unisono.observe.pages import Bars, Lines, Pairs, Section, Series, Table, write_page
from unisono.predict.compare.report import as_json, make_page
from unisono.predict.compare.results import ONE_WORKER, PARTS, Curve, Trial, compare
from unisono.predict.compare.runs import Request

VOID = {"meta", "br", "hr", "img", "input", "link"}


class Page(HTMLParser):
    """Checks that tags are closed in their order, and keeps what is in the page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[tuple[str, str]] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append((self.open[-1] if self.open else "", data))

    def find(self, tag: str, **attributes: str) -> list[dict[str, str | None]]:
        wanted = attributes.items()
        return [attrs for name, attrs in self.seen if name == tag and wanted <= attrs.items()]

    @property
    def charts(self) -> list[dict]:
        (text,) = [data for tag, data in self.texts if tag == "script" and data.lstrip().startswith("[")]
        return json.loads(text)


def check_offline(text: str) -> None:
    """Nothing is fetched: no address in an attribute, a style or a call; comments may name where a library is from."""
    page = Page(text)
    for tag, attrs in page.seen:
        assert tag not in {"link", "img", "iframe", "object"}
        assert not {"src", "href", "srcset", "data"} & set(attrs)
    code = re.sub(r"/\*.*?\*/", "", text, flags=re.DOTALL)
    assert not re.search(r"https?://|@import|url\(|fetch\(|XMLHttpRequest|WebSocket|import\(", code)
    (policy,) = [a["content"] for a in page.find("meta") if a.get("http-equiv") == "Content-Security-Policy"]
    assert policy is not None
    assert "default-src 'none'" in policy


def test_a_page_is_one_file_with_its_charts_as_data() -> None:
    lines = Lines("Loss", "seconds", "loss", [Series("a", [1.0, 2.0, 3.0], [3.0, None, 1.0], colour=9)])
    bars = Bars("Step", "ms", ["compute", "waiting"], [("a", [3.0, None]), ("b", [1.0, 1.0])])
    table = Table([("method", ""), ("step", "ms")], [["a", "3"]], [True], ["a note"])
    text = write_page("A <page>", "what & why", [Section("One", [lines, bars, table, Pairs([("k", "v")]), "text"])])
    check_offline(text)
    page = Page(text)
    assert len(page.find("div", **{"class": "chart"})) == 1
    assert (
        page.charts[0]["series"][0] | {"name": "a", "xs": [1.0, 3.0], "ys": [3.0, 1.0]} == page.charts[0]["series"][0]
    )
    widths = [attrs["style"] for attrs in page.find("i") if "style" in attrs]
    assert widths == ["width:100.000%", "width:33.333%", "width:33.333%"]
    assert ("title", "A <page>") in page.texts
    assert len(page.find("tr", **{"class": "marked"})) == 1


def test_text_of_others_cannot_end_the_data_or_add_a_tag() -> None:
    name = "</script><script>alert(1)</script>"
    text = write_page(name, name, [Section(name, [Lines(name, name, name, [Series(name, [1.0], [1.0])]), name])])
    assert len(Page(text).find("script")) == 2
    assert Page(text).charts[0]["series"][0]["name"] == name


def test_long_lines_are_thinned_out_and_keep_their_ends() -> None:
    xs = [float(x) for x in range(10_001)]
    text = write_page("t", "l", [Section("s", [Lines("t", "x", "y", [Series("a", xs, xs)])])])
    (series,) = Page(text).charts[0]["series"]
    assert len(series["xs"]) <= 602
    assert (series["xs"][0], series["xs"][-1]) == (0.0, 10_000.0)


def make_trial(method: str, workers: int, step_s: float, **more: object) -> Trial:
    steps = Curve(
        times=[step_s * (i + 1) for i in range(12)],
        losses=[3.0 - 0.1 * i for i in range(12)],
        samples=[8 * (i + 1) for i in range(12)],
        sent=[1e6 * (workers > 1) * (i + 1) for i in range(12)],
        parts={name: [step_s / 5] * 12 for name in PARTS},
        about={"parameters": 10, "device": "cpu"},
    )
    return Trial(method, workers, 0, steps, **more)


def test_the_report_of_a_comparison_has_its_charts_and_numbers() -> None:
    trials = [
        make_trial(ONE_WORKER, 1, 1.0),
        make_trial("allreduce", 2, 0.5),
        make_trial("allreduce", 4, 0.3),
        Trial("bad", 2, 0, Curve(), failure="ValueError: <b>", output="runs/x"),
    ]
    found = compare(trials, target=2.4)
    request = Request(["train.py"], ["allreduce", "bad"], workers=[2, 4], target=2.4, folder=Path("x"))
    text = make_page(found, request, {"script": "train.py"})
    check_offline(text)
    charts = Page(text).charts
    assert [chart["x"] for chart in charts] == ["seconds", "MB sent by a worker", "workers"]
    speed = {series["name"]: series for series in charts[2]["series"]}
    assert speed["ideal"]["ys"] == [1.0, 2.0, 4.0]
    assert speed["allreduce"]["ys"] == [1.0, 2.0, 3.33333]
    assert "ValueError: &lt;b&gt;" in text
    numbers = json.loads(json.dumps(as_json(found, request, {}), allow_nan=False))
    assert numbers["best"] == {"method": "allreduce", "workers": 4}
    assert [run["failure"] for run in numbers["runs"]] == ["", "", "", "ValueError: <b>"]
