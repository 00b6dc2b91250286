"""The worst patterns of our English stay out of the pages and the help (docs/style.md)."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from doc_pages import ROOT
from unisono.cli.command_line import make_parser

PATTERNS = {
    r"what there is": "name the thing",
    r"(?:those|all|what) that (?:are|is) (?:left|there)\b": "the other workers, the remaining samples",
    r"(?:of|by|with|for|on) which there (?:is|are)\b": "with many ...",
    r"(?:goes|go|going) on (?:after|from|where|within|with|bit)\b": "resumes, continues",
    r"\b(?:others|runs?|training|workers?|it) go(?:es)? on\b(?! your)": "continues",
    r"(?:takes?|took) up what\b": "loads",
    r"(?:steps?|samples|bits|bytes|tokens|times) a second\b": "per second",
    r"\ba (?:step|second|worker) takes? up\b": "uses",
    r"\d (?:ms|s|MB|kB|bytes) a step\b": "per step",
    r"workers that come and go": "elastic run",
    r"none is whole|(?:newest|earlier) whole\b": "intact",
    r"takes? along\b": "what is lost with it",
    r"(?:which|what) [\w ]+ (?:is|are) mine\b": "this worker's",
    r"(?:that|which) (?:is|are) not there\b": "missing",
    r"[Ww]hat (?:is|was) (?:had|got)\b": "received",
    r"means against\b": "ways to reduce",
    r"[Ww]ho (?:sends|does|says|gets) what\b": "a heading that says what is below",
    r"faults on purpose": "fault injection",
    r"a machine with one memory": "a machine whose processes can share memory",
    r"with the loop that you have|the loop is the one that you have": "without rewriting your loop",
    r"[Ss]ay the same before": "make start-up deterministic",
    r"other systems do not\b": "are unsupported",
}
# The changelog keeps what it said of released versions; the page on style names the patterns.
LEFT_OUT = {"CHANGELOG.md", "docs/style.md"}
PAGES = [
    name
    for page in [*ROOT.glob("*.md"), *sorted((ROOT / "docs").rglob("*.md"))]
    if (name := page.relative_to(ROOT).as_posix()) not in LEFT_OUT and not name.startswith("docs/_build/")
]
LISTS = {"docs/index.md"}  # of links: its own summary


def find_patterns(text: str) -> list[str]:
    """Each pattern in the prose, with what to write instead; code and the targets of links do not count."""
    prose = re.sub(r"^ *```.*?^ *```", "", text, flags=re.DOTALL | re.MULTILINE)
    prose = re.sub(r"`[^`]*`|!\[[^]]*\]|\]\([^)]*\)", "", prose)
    prose = " ".join(prose.split())
    found = [(match, better) for pattern, better in PATTERNS.items() for match in re.finditer(pattern, prose, re.I)]
    return [f"...{prose[max(m.start() - 30, 0) : m.end() + 20]}...: {better}" for m, better in found]


@pytest.mark.parametrize("name", PAGES)
def test_a_page_has_none_of_the_patterns(name: str) -> None:
    assert find_patterns(Path(ROOT / name).read_text(encoding="utf-8")) == []


def list_texts(file: Path) -> Iterator[str]:
    """The strings of a module that are sentences; docstrings are for readers of the code."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    nodes = list(ast.walk(tree))
    documented = (node for node in nodes if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef))
    left_out = {id(node.body[0].value) for node in documented if node.body and isinstance(node.body[0], ast.Expr)}
    for node in nodes:
        if isinstance(node, ast.JoinedStr):
            left_out |= set(map(id, node.values))
            yield "".join(str(part.value) if isinstance(part, ast.Constant) else "0" for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in left_out:
            yield node.value


def test_messages_have_none_of_the_patterns() -> None:
    found = {
        f"{file.relative_to(ROOT)}: {wrong}"
        for file in (ROOT / "src").rglob("*.py")
        for text in list_texts(file)
        if text.count(" ") >= 2
        for wrong in find_patterns(text)
    }
    assert found == set()


def test_a_message_is_found_in_one_piece(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text(
        'def f(n):\n    """It goes on with n."""\n    raise E(f"{n} goes on "\n            "with that")\n'
    )
    [text] = list_texts(tmp_path / "a.py")
    assert find_patterns(text) != []


THREE_SCREENS = 150  # lines of 110 characters, blank ones left out


def count_lines(text: str) -> int:
    return sum(-(-len(line) // 110) for line in text.splitlines())


def list_summary(text: str) -> list[str]:
    """Links to sections of the page itself, in a table or a list before the second section."""
    top = "\n## ".join(text.split("\n## ")[:2])
    rows = re.findall(r"^ *(?:\||[-*] |\d+\. ).*(?:\n +\S.*)*", top, re.MULTILINE)
    return [anchor for row in rows for anchor in re.findall(r"\]\(#([\w-]+)\)", row)]


@pytest.mark.parametrize("name", [name for name in PAGES if name not in LISTS and "/decisions/" not in name])
def test_a_page_beyond_three_screens_begins_with_a_summary(name: str) -> None:
    text = Path(ROOT / name).read_text(encoding="utf-8")
    if (lines := count_lines(text)) > THREE_SCREENS:
        assert len(list_summary(text)) >= 3, f"{lines} lines: a table or list at the top, with links to the parts"


def test_a_summary_is_links_to_sections_in_a_table_or_a_list_at_the_top() -> None:
    head, rest = "# Title\n\nText with [a link](#one).\n\n", "\n\n## One\n\nText.\n\n## Two\n\n| [late](#one) |\n"
    assert list_summary(head + rest) == []
    assert list_summary(f"{head}| how | [One](#one), [Two](#two) |{rest}") == ["one", "two"]
    assert list_summary(f"{head}- see\n  [One](#one) and [elsewhere](other.md#two){rest}") == ["one"]
    assert count_lines("a" * 111 + "\n\nb\n") == 3


def test_the_help_of_run_has_none_and_begins_with_the_five_common_options() -> None:
    [commands] = [action.choices for action in make_parser()._actions if isinstance(action.choices, dict)]
    run = commands["run"]
    assert find_patterns(run.format_help()) == []
    first = [action.option_strings[-1] for action in run._optionals._group_actions]
    assert first == ["--help", "--workers", "--strategy", "--page", "--on", "--dry"]


@pytest.mark.parametrize(
    ("text", "is_found"),
    [
        ("Before the loop it takes up what there is.", True),
        ("It makes 12 steps a second.", True),
        ("It goes on\nafter a stop.", True),
        ("It resumes after an interruption, at 12 steps per second.", False),
        ("`what there is` and\n\n```\nwhat there is\n```\n", False),
        ("There is a page that goes on your server; a worker takes 12 seconds.", False),
    ],
)
def test_what_is_a_pattern_and_what_is_not(text: str, is_found: bool) -> None:
    assert bool(find_patterns(text)) is is_found
