"""Our docstrings are plain text with backquotes around code: here they become what Sphinx reads.

`code` is code; `name: what it is`, a line each, is a list of names, below `Arguments:` or by itself; what stands
indented after a blank line is shown as it is. And `un.shard`, wherever it is quoted, is a link to its place in the
reference.
"""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Collection, Iterator
from typing import Any

from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.transforms.post_transforms import SphinxPostTransform
from sphinx.util.inspect import signature as read_signature
from sphinx.util.inspect import stringify_signature

SECTION = re.compile(r"(Args|Arguments|Attributes|Raises|Returns|Yields|Example):$")
TITLES = {"Args": "Arguments"}
NAMES = re.compile(r"(\*{0,2}[A-Za-z_]\w*(?:, \*{0,2}[A-Za-z_]\w*)*): (.*)")
METHODS = ("unisono.reducers.", "unisono.strategies.")
LIST = re.compile(r"(- |\d+\. )")


def convert(text: str, arguments: Collection[str] = ()) -> list[str]:
    """A docstring as reStructuredText; of a function that takes these arguments."""
    return list(_convert_blocks(_split_blocks(inspect.cleandoc(text).splitlines()), arguments))


def _split_blocks(lines: list[str]) -> list[list[str]]:
    """Lines between blank ones; the title of a section is a block by itself."""
    blocks: list[list[str]] = [[]]
    for line in lines:
        if not line.strip():
            blocks.append([])
        elif SECTION.match(line):
            blocks += [[line], []]
        elif LIST.match(line) and blocks[-1] and not LIST.match(blocks[-1][0]):
            blocks.append([line])
        else:
            blocks[-1].append(line)
    return [block for block in blocks if block]


def _convert_blocks(blocks: list[list[str]], arguments: Collection[str]) -> Iterator[str]:
    section = ""
    for block in blocks:
        indented = block[0].startswith(" ")
        if not indented:
            section = ""
        if match := SECTION.match(block[0]):
            section = match[1]
            yield f"**{TITLES.get(section, section)}**"
        elif block[0].lstrip().startswith(">>>"):
            yield from (line.removeprefix(" " * (len(block[0]) - len(block[0].lstrip()))) for line in block)
        elif indented and section:
            block = textwrap.dedent("\n".join(block)).splitlines()
            yield from _convert_names(block) if _lists_names(block) else _convert_code("\n".join(block)).splitlines()
        elif indented:
            yield from ("::", "", *block)
        elif _lists_names(block) or _name_of(block[0]) in arguments:
            yield from _convert_names(block, () if _lists_names(block) else arguments)
        else:
            yield from _convert_code("\n".join(block)).splitlines()
        yield ""


def _lists_names(block: list[str]) -> bool:
    return all(line.startswith(" ") or NAMES.match(line) for line in block)


def _name_of(line: str) -> str:
    """The first name in `name, name: text`."""
    match = NAMES.match(line)
    return re.split(r"\W", match[1].lstrip("*"))[0] if match else ""


def _convert_names(block: list[str], arguments: Collection[str] = ()) -> Iterator[str]:
    """`name: text` as a list of definitions; with `arguments`, these are the names, and other lines go on with one."""
    items: list[tuple[str, list[str]]] = []
    for line in block:
        if (match := NAMES.match(line)) and (not arguments or _name_of(line) in arguments):
            items.append((match[1], [match[2]]))
        else:
            items[-1][1].append(line.strip())
    for names, text in items:
        yield ", ".join(f"``{name}``" for name in names.split(", "))
        yield from (f"    {line}" for line in _convert_code("\n".join(text)).splitlines())


def _convert_code(text: str) -> str:
    """Backquotes are doubled, and what reStructuredText would take for a sign of its own is escaped."""
    parts = text.split("`")
    if len(parts) % 2 == 0:
        raise ValueError(f"a backquote without its other in {text!r}")
    made = ""
    for i, part in enumerate(parts):
        if i % 2:
            before = "\\ " if made[-1:].isalnum() else ""
            made += f"{before}``{part.strip()}``" + ("\\ " if parts[i + 1][:1].isalnum() else "")
        else:
            made += re.sub(r"[\\*|]|_(?!\w)", r"\\\g<0>", part)
    return made


def process_docstring(_: Sphinx, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    try:
        arguments = [*inspect.signature(obj).parameters] if callable(obj) else []
    except (TypeError, ValueError):  # a class or function of C has none that can be read
        arguments = []
    lines[:] = convert("\n".join(lines), arguments)


def process_signature(
    _: Sphinx, what: str, name: str, obj: Any, options: Any, signature: str | None, returns: str | None
) -> tuple[str, str | None] | None:
    """Of a method its settings with their defaults: what they are is in the text, how they are checked in the code. Of
    a class whose base is not imported here, its own arguments."""
    if name.startswith(METHODS) and callable(obj):
        bare = [p.replace(annotation=p.empty) for p in inspect.signature(obj).parameters.values()]
        return str(inspect.Signature(bare)), None
    if what == "class" and any(getattr(base, "__sphinx_mock__", False) for base in obj.__mro__[1:]):
        own = next((vars(base)["__init__"] for base in obj.__mro__ if "__init__" in vars(base)), None)
        if own is not None:
            return stringify_signature(read_signature(own, bound_method=True), show_return_annotation=False), None
    return None


class LinkNames(SphinxPostTransform):
    """`un.shard` and `un.shard(...)`, quoted on any page, lead to the reference."""

    default_priority = 5  # before links are looked up

    def run(self, **_: Any) -> None:
        known = self.env.domains.python_domain.objects
        for literal in list(self.document.findall(nodes.literal)):
            match = re.match(r"(?:un|unisono)\.([\w.]+)", literal.astext())
            name = f"unisono.{match[1]}" if match else ""
            if name not in known or isinstance(literal.parent, nodes.reference | addnodes.pending_xref):
                continue
            target = {"reftype": "obj", "refdomain": "py", "reftarget": name, "refexplicit": True, "refwarn": True}
            link = addnodes.pending_xref("", refdoc=self.env.docname, **target)
            literal.replace_self(link)
            link += literal


def shorten_names(_: Sphinx, __: str, ___: str, content: addnodes.desc_content) -> None:
    """In the reference, `un.` for `unisono.`, and a method without the file that it is in."""
    for place in content.parent.findall(addnodes.desc_addname):
        name = place.astext()
        place.clear()
        if not name.startswith(METHODS):
            place += nodes.Text(name.replace("unisono.", "un.", 1))


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("autodoc-process-docstring", process_docstring)
    app.connect("autodoc-process-signature", process_signature)
    app.connect("object-description-transform", shorten_names)
    app.add_post_transform(LinkNames)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
