"""Help as a manual page: every command has a summary, examples that are true, and options that say what they do."""

from __future__ import annotations

import argparse
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator

import pytest

from unisono.cli.command_line import COMMANDS, fill, make_parser


def parsers() -> dict[str, argparse.ArgumentParser]:
    whole = make_parser()
    [chosen] = [action for action in whole._actions if isinstance(action, argparse._SubParsersAction)]
    return {"": whole, **chosen.choices}


def actions(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    for action in parser._actions:
        if not isinstance(action, argparse._SubParsersAction) and action.help != argparse.SUPPRESS:
            yield action


def examples(text: str) -> list[str]:
    """The commands of a help text, without what is said about them; a line that ends with \\ goes on."""
    joined = re.sub(r" \\\n +", " ", text)
    found = [line.strip() for line in joined.splitlines() if line.startswith("  unisono ")]
    return [re.split(r"  +| > |, unisono", line)[0] for line in found]


@pytest.fixture(autouse=True)
def _wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")


@pytest.mark.parametrize("name", ["", *COMMANDS])
def test_help_has_80_columns(name: str) -> None:
    wide = [line for line in parsers()[name].format_help().splitlines() if len(line) > 80]
    assert wide == []


@pytest.mark.parametrize("name", ["", *COMMANDS])
def test_every_option_says_what_it_does_and_what_holds_without_it(name: str) -> None:
    parser = parsers()[name]
    assert [action.dest for action in actions(parser) if not (action.help or "").strip()] == []
    given = [action for action in actions(parser) if action.default not in (None, False, True, [], argparse.SUPPRESS)]
    assert [action.dest for action in given if "default" not in (action.help or "")] == []


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_a_summary_a_description_and_examples_that_parse(name: str) -> None:
    whole, parser = make_parser(), parsers()[name]
    [chosen] = [action for action in whole._actions if isinstance(action, argparse._SubParsersAction)]
    [said] = [choice.help for choice in chosen._choices_actions if choice.dest == name]
    assert 10 < len(said or "") <= 76, "one line"
    assert len(parser.description or "") > 30
    mine = examples(parser.format_help())
    assert [one for one in mine if one.split()[1:2] == [name]], "an example"
    for one in mine:
        options = whole.parse_args(shlex.split(one)[1:])  # ends with an error where it does not parse
        assert getattr(options, "program", "train.py") in ("train.py", "project.train", None), one


def test_many_options_are_in_groups() -> None:
    for name, parser in parsers().items():
        [ungrouped] = [group for group in parser._action_groups if group.title in ("options", "optional arguments")]
        assert len(ungrouped._group_actions) <= 18, name


def test_rows_commands_and_prose_are_filled() -> None:
    text = "Words that are\none paragraph.\n\n  --a  " + "what it does " * 8 + "\n  unisono run " + "--long " * 14
    text += "\n\n  Indented words that make\n  a paragraph of their own, which is longer than a line of eighty columns."
    lines = fill(text).splitlines()
    assert lines[0] == "Words that are one paragraph."
    assert lines[2].startswith("  --a  what it does")
    assert lines[3].startswith("       does")
    assert lines[4].endswith(" \\")
    assert lines[5].startswith("      --long")
    assert lines[7].startswith("  Indented words that make a paragraph of")
    assert max(map(len, lines)) <= 80
    assert fill("a\n") == "a"
    [*begun, last] = fill("  unisono run " + "--long " * 12 + "\\\n      --more 3").splitlines()
    assert (last.split()[-2:], {line[-2:] for line in begun}) == (["--more", "3"], {" \\"}), "one command"


def test_a_reader_that_goes_away_ends_a_command_without_a_traceback() -> None:
    program = "import os, sys; os.close(0); from unisono.cli import main; sys.exit(main(['strategies']))"
    process = subprocess.Popen([sys.executable, "-c", program], stdout=-1, stderr=-1, text=True)
    assert process.stdout is not None
    process.stdout.close()
    assert process.stderr is not None
    with process.stderr:
        assert process.stderr.read() == ""
    assert process.wait() == 141
