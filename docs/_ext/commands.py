"""The directive `commands`: every command of `unisono` with its options, as its help says."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator

from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

from unisono.cli.command_line import COMMANDS, make_parser


class Commands(SphinxDirective):
    """A section for each command."""

    def run(self) -> list[nodes.Node]:
        [commands] = [a for a in make_parser()._actions if isinstance(a, argparse._SubParsersAction)]
        return [self._make_section(name, COMMANDS[name], parser) for name, parser in commands.choices.items()]

    def _make_section(self, name: str, summary: str, parser: argparse.ArgumentParser) -> nodes.section:
        section = nodes.section(ids=[f"unisono-{name}"], names=[f"unisono {name}"])
        section += nodes.title("", "", nodes.literal("", f"unisono {name}"))
        self.state.document.note_implicit_target(section, section)
        section += list(_format_text(parser.description or f"{summary[:1].upper()}{summary[1:]}."))
        section += nodes.literal_block("", _format_usage(parser), language="none")
        for group in parser._action_groups:
            shown = [a for a in group._group_actions if a.help is not argparse.SUPPRESS and a.dest != "help"]
            if shown and group.title not in ("positional arguments", "options"):
                section += nodes.paragraph("", "", nodes.strong("", f"{group.title}"))
            if shown:
                section += nodes.definition_list("", *(_format_option(a) for a in shown))
        section += list(_format_text(parser.epilog or ""))
        return section


def _format_usage(parser: argparse.ArgumentParser) -> str:
    places = [a for a in parser._actions if not a.option_strings and a.help is not argparse.SUPPRESS]
    optional = any(a.option_strings and a.dest != "help" for a in parser._actions)
    return " ".join([parser.prog, *(["[options]"] if optional else []), *(_name_place(a) for a in places)])


def _name_place(action: argparse.Action) -> str:
    name = f"{action.metavar or ('{' + ','.join(map(str, action.choices)) + '}' if action.choices else action.dest)}"
    return {"?": f"[{name}]", "*": f"[{name} ...]", "+": f"{name} ...", "...": "..."}.get(f"{action.nargs}", name)


def _format_option(action: argparse.Action) -> nodes.definition_list_item:
    value = "" if action.nargs == 0 else _name_place(action)
    names = [f"{name} {value}".strip() for name in action.option_strings] or [value]
    term = nodes.term("", "", nodes.literal("", ", ".join(names)))
    text = (action.help or "") % {**vars(action), "prog": "unisono"} if action.help else ""
    return nodes.definition_list_item("", term, nodes.definition("", _format_paragraph(text)))


def _format_text(text: str) -> Iterator[nodes.Node]:
    """Paragraphs; those with lines that are indented or set in columns stay as they are."""
    for block in re.split(r"\n\s*\n", text.strip("\n")):
        if re.search(r"^ |\S   +\S", block, re.MULTILINE):
            yield nodes.literal_block("", block, language="none")
        elif block.strip():
            yield _format_paragraph(block)


def _format_paragraph(text: str) -> nodes.paragraph:
    """Backquotes around code, and names of pages as links to them."""
    parts = text.split("`")
    inside = [nodes.literal("", part) if i % 2 else nodes.Text(part) for i, part in enumerate(parts)]
    made = nodes.paragraph()
    for node in inside if len(parts) % 2 else [nodes.Text(text)]:
        made += node if isinstance(node, nodes.literal) else list(_link_pages(node))
    return made


def _link_pages(text: str) -> Iterator[nodes.Node]:
    for i, part in enumerate(re.split(r"docs/([\w/-]+)\.md", text)):
        if i % 2:
            target = {"reftype": "doc", "refdomain": "std", "reftarget": f"/{part}", "refexplicit": False}
            yield addnodes.pending_xref("", nodes.inline("", part), refwarn=True, refdoc="api/commands", **target)
        else:
            yield nodes.Text(part)


def setup(app: Sphinx) -> dict[str, bool]:
    app.add_directive("commands", Commands)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
