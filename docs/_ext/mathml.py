"""Formulas as MathML, which browsers draw themselves: no script, no font, no network.

`$...$` and `$$...$$` are turned by docutils. A formula that it does not know is a warning, so the build fails.
"""

from __future__ import annotations

import html
import re
from itertools import pairwise
from typing import Any
from xml.etree import ElementTree

from docutils.nodes import SkipNode
from docutils.utils.math import MathError
from docutils.utils.math.latex2mathml import tex2mathml
from sphinx.application import Sphinx
from sphinx.util import logging

logger = logging.getLogger(__name__)
MATHML = "http://www.w3.org/1998/Math/MathML"
ElementTree.register_namespace("", MATHML)


def convert(tex: str, *, block: bool) -> str:
    """A formula as MathML, with what docutils does not know, or leaves to a style sheet that browsers do not have."""
    tex = re.sub(r"(\\[td]?frac)\s*([0-9A-Za-z])\s*([0-9A-Za-z])", r"\1{\2}{\3}", tex)
    made = str(tex2mathml(tex.replace(r"\operatorname*", r"\operatorname"), as_block=block))
    tree = ElementTree.fromstring(re.sub(r"&(?!lt;|gt;|amp;|quot;)\w+;", lambda name: html.unescape(name[0]), made))
    for element in tree.iter():
        kind, children = element.tag.rpartition("}")[2], list(element)
        if kind == "mo" and element.text in ("‖", "|"):
            element.attrib.update(stretchy="false", lspace="0", rspace="0")  # else as tall as its exponent
        elif kind == "msub" and any(mo.text == "⏟" for mo in children[0]):
            element.tag = f"{{{MATHML}}}munder"
        elif kind == "mtable" and element.get("class") == "ams-align":
            element.set("displaystyle", "true")
        for applied, argument in pairwise(children):
            if applied.text == "\u2061" and argument.text not in ("(", "[", "{"):
                applied.set("rspace", "0.17em")  # between log and N
    return ElementTree.tostring(tree, encoding="unicode").replace(r"\,", "\u2009")


def formula(translator: Any, node: Any, *, block: bool) -> str:
    try:
        return convert(node.astext(), block=block)
    except MathError as error:
        logger.warning("formula %r: %s", node.astext(), error, location=node)
        return f"<code>{translator.encode(node.astext())}</code>"


def inline(translator: Any, node: Any) -> None:
    translator.body.append(formula(translator, node, block=False))
    raise SkipNode


def display(translator: Any, node: Any) -> None:
    translator.body.append(f'<div class="math">{formula(translator, node, block=True)}</div>\n')
    raise SkipNode


def setup(app: Sphinx) -> dict[str, bool]:
    app.add_html_math_renderer("mathml", (inline, None), (display, None))
    return {"parallel_read_safe": True, "parallel_write_safe": True}
