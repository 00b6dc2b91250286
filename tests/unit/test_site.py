"""The site: its reference has every public name, its page of results is what the lines of the benchmarks say."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

import unisono as un
from doc_pages import ROOT, blocks

DOCS = ROOT / "docs"
METHODS = [
    f"unisono.{kind}.{file.stem}.{file.stem}"
    for kind in ("reducers", "strategies")
    for file in (
        *(ROOT / "src/unisono/methods" / kind).glob("[!_]*.py"),
        *(ROOT / "src/unisono/methods" / kind).glob("[!_]*/"),
    )
]


def load(name: str, folder: Path) -> ModuleType:
    """A module of the folder, which is no package."""
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
    spec = importlib.util.spec_from_file_location(name, folder / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look there
    spec.loader.exec_module(module)
    return module


results = load("results", DOCS)


def documented() -> set[str]:
    pages = "\n".join(page.read_text(encoding="utf-8") for page in (DOCS / "api").glob("*.md"))
    return set(re.findall(r"^\.\. auto\w+:: ([\w.]+)", pages, re.MULTILINE))


def test_every_public_name_is_in_the_reference() -> None:
    names = {f"unisono.{name}" for name in un.__all__ if name != "__version__"}
    assert names - documented() == set()


def test_every_method_is_in_the_reference() -> None:
    assert set(METHODS) - documented() == set()


def test_the_page_of_results_is_what_the_lines_say() -> None:
    made = results.make_page(results.read_lines(ROOT / "benchmarks" / "results"))
    assert (DOCS / "results.md").read_text(encoding="utf-8") == made, "run `make results`"


def test_the_words_of_the_landing_picture_are_its_line() -> None:
    pytest.importorskip("matplotlib")
    pictures = load("pictures", DOCS)
    lines = results.read_lines(ROOT / "benchmarks" / "results")
    race = pictures.find_line(lines, *(f"{name}_seconds" for name in pictures.RACERS))
    [words] = re.findall(r"!\[(.*?)\]\(time_to_loss\.png\)", (DOCS / "index.md").read_text(encoding="utf-8"))
    seconds = [int(number) for number in re.findall(r"\b\d+\b", words.replace("100 Mbit/s", ""))]
    assert seconds == [round(race[f"{name}_seconds"]) for name in pictures.RACERS]


def test_every_benchmark_with_lines_has_a_section() -> None:
    assert results.list_unknown(results.read_lines(ROOT / "benchmarks" / "results")) == []


def test_what_is_slower_than_the_other_is_listed_as_lost() -> None:
    line = {"date": "2026-01-01", "benchmark": "step.py", "file": "cpu", "torch": "2", "python": "3"}
    lost = "\n".join(results.make_lost([{**line, "ddp_over_ours_2": 0.5, "ddp_over_ours_4": 1.5}]))
    assert "[A training step](#a-training-step): MLP of 25 M parameters, 2 workers | 0.50×" in lost
    assert "4 workers" not in lost
    assert "Short of a target" not in lost


def test_what_is_faster_but_short_of_its_target_is_listed_apart() -> None:
    line = {"date": "2026-01-01", "benchmark": "step.py", "file": "gpu"}
    slower = {"ddp_over_shared_adamw_2": 0.9, "ddp_over_shared_adamw_4": 1.7, "ours_over_bare_gpu": 1.0142}
    lost, _, short = "\n".join(results.make_lost([line | slower])).partition("Short of a target")
    assert "shared, adamw, 2 workers | 0.90× | at least 1.40×" in lost
    assert "shared, adamw, 4 workers | 1.70× | at least 1.80×" in short
    assert "on the GPU: MLP | 1.0142× | at most 1.01×" in short  # 1.01 would look as if it were reached


def test_what_a_reducer_may_add_on_a_gpu_depends_on_who_is_the_bottleneck() -> None:
    line = {"date": "2026-01-01", "benchmark": "gpu_reducers.py", "file": "gpu", "topk_adds_ms": 1.5}
    lines = [line | {"busy_ms": 19.5, "compute_ms": 28.0}, line | {"busy_ms": 43.0, "compute_ms": 45.4}]
    lost = "\n".join(results.make_lost(lines))
    assert "(45 ms of work for the GPU) | topk: 1.5 ms | at most 1 ms" in lost
    assert "the host is the bottleneck" not in lost


def test_what_fell_short_before_and_not_in_the_newest_run_is_said_apart() -> None:
    line = {"date": "2026-01-01", "benchmark": "planner.py", "file": "cpu"}
    table, _, before = "\n".join(
        results.make_lost([{**line, "plan_s": 40.0}, {**line, "date": "2026-01-02", "plan_s": 20.0}])
    ).partition("in an earlier run")
    assert "unisono plan" not in table
    assert "unisono plan` in all: 20 s; 20 – 40 in 2 runs" in before


def test_only_runs_in_the_same_conditions_are_joined() -> None:
    line = {"date": "2026-01-01", "benchmark": "step.py --busy", "file": "cpu", "ddp_over_ours_2": 1.5}
    page = results.make_page([line | {"busy": 2}, line])
    assert "in 2 runs" not in page
    assert page.count("MLP of 25 M parameters, 2 workers") == 2


def test_a_line_with_several_values_is_several_runs_and_cores_name_the_machine(tmp_path: Path) -> None:
    line = '{"date": "2026-01-01", "benchmark": "step, by hand", "cores": 16, "ddp_over_ours_2": [1.5, 2.5]}\n'
    (tmp_path / "cpu.jsonl").write_text(line)
    (tmp_path / "gpu.jsonl").write_text("")
    assert "| 2.5× | 1.50 – 2.5 in 2 runs | H200 |" in results.make_page(results.read_lines(tmp_path))


convert = pytest.importorskip("sphinx") and load("docstrings", DOCS / "_ext").convert


@pytest.mark.parametrize(
    ("text", "made"),
    [
        ("Gives `un.World` and `a\nb`s.", ["Gives ``un.World`` and ``a", "b``\\ s.", ""]),
        ("every: windows.\nstart, end: from `a`\n    to b.", None),
        ("As in:\n\n    x = *y\n\nEnd.", ["As in:", "", "::", "", "    x = *y", "", "End.", ""]),
        ("f(*args) and |x| and name_ there", ["f(\\*args) and \\|x\\| and name\\_ there", ""]),
        (">>> 2 * 3\n6", [">>> 2 * 3", "6", ""]),
    ],
)
def test_docstrings_become_what_sphinx_reads(text: str, made: list[str] | None) -> None:
    names = ["``every``", "    windows.", "``start``, ``end``", "    from ``a``", "    to b.", ""]
    assert convert(text) == (names if made is None else made)


def test_arguments_below_a_title_are_a_list_of_names() -> None:
    made = convert(
        "Do it.\n\nArgs:\n    fn: what\n        to call.\n    **more: too\n\nRaises:\n    ValueError: never."
    )
    assert made == [
        *("Do it.", "", "**Arguments**", "", "``fn``", "    what", "    to call."),
        *("``**more``", "    too", ""),
        *("**Raises**", "", "``ValueError``", "    never.", ""),
    ]


def test_a_line_that_begins_with_no_argument_goes_on_with_the_last_one() -> None:
    text = "optimizer: whose rates\nchange: never.\nworld: its ranks."
    made = convert(f"{text}\nso", ["optimizer", "world"])
    assert made == [
        "``optimizer``",
        "    whose rates",
        "    change: never.",
        "``world``",
        "    its ranks.",
        "    so",
        "",
    ]
    assert convert("Note: this\nis prose.", ["world"]) == ["Note: this", "is prose.", ""]


def test_links_to_files_outside_the_site_are_their_names(tmp_path: Path) -> None:
    (tmp_path / "docs" / "a").mkdir(parents=True)
    for name in ("CONTRIBUTING.md", "CHANGELOG.md", "docs/in.md"):
        (tmp_path / name).touch()
    text = "[how](../../CONTRIBUTING.md#x) [what](../../CHANGELOG.md) [in](../in.md) [lost](../../lost.md)"
    made = load("outside", DOCS / "_ext").replace_links(text, tmp_path / "docs/a/page.md", tmp_path / "docs")
    assert made == "how (`CONTRIBUTING.md`) [what](/changelog.md) [in](../in.md) [lost](../../lost.md)"


@pytest.mark.parametrize(
    ("tex", "parts"),
    [
        (r"\tfrac12 x", ("<mn>1</mn>", "<mn>2</mn>", "<mi>x</mi>")),
        (r"\|x\|^2", ('stretchy="false"', ">‖</mo>", "<msup>")),
        (r"\underbrace{a}_{b}", ("<munder>", "⏟")),
        (r"a < b", ("&lt;",)),
        (r"\log N", ('rspace="0.17em"',)),
        (r"\begin{aligned} a &= b \end{aligned}", ('displaystyle="true"',)),
    ],
)
def test_formulas_become_mathml(tex: str, parts: tuple[str, ...]) -> None:
    made = load("mathml", DOCS / "_ext").convert(tex, block=True)
    assert made.startswith('<math xmlns="http://www.w3.org/1998/Math/MathML"')
    assert [part for part in parts if part not in made] == [], made
    assert "<msub>" not in made


def test_a_link_that_leads_nowhere_is_found(tmp_path: Path) -> None:
    links = load("local_links", DOCS / "_ext")
    (tmp_path / "a.html").write_text('<p id="x"><a href="b.html#y">1</a><a href="b.html#z">2</a><a href="#x">3</a>')
    (tmp_path / "b.html").write_text('<p id="y"><a href="c.html">4</a><a href="https://x.org">5</a><img src="d.png">')
    assert links.lost_links(tmp_path) == ["a.html: b.html#z", "b.html: c.html", "b.html: d.png"]


def test_a_directive_of_the_site_is_no_code_and_ends_at_its_fence(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("```{toctree}\n:hidden:\n\na\n```\n\n```python\n1\n```\n\n```{figure} a.svg\n```\n\n```\nls\n```\n")
    assert [(block.language, block.text) for block in blocks(page)] == [
        *(("directive", ":hidden:\n\na\n"), ("python", "1\n"), ("directive", "\n"), ("", "ls\n")),
    ]
