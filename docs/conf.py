"""How the pages become a site: `make docs` writes docs/_build/html."""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "docs" / "_ext")]

project = author = "Unisono"
SOURCE = (ROOT / "src" / "unisono" / "__init__.py").read_text(encoding="utf-8")
[release] = re.findall(r'^__version__ = "(.+)"', SOURCE, re.MULTILINE)
version = release
html_title = f"Unisono {release}"

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx_copybutton",
    "docstrings",
    "commands",
    "short_titles",
    "outside",
    "mathml",
    "local_links",
]
exclude_patterns = ["_build", "_ext", "_static"]
highlight_language = "none"  # of a block that names none: most show what a program prints

myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 4  # a heading's link is that of a forge: `## A lost rank` is #a-lost-rank
myst_dmath_double_inline = True

autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
autodoc_class_signature = "mixed"
python_maximum_signature_line_length = 90
# What only plugs and estimators import: not needed for the text, and slow.
autodoc_mock_imports = ["lightning", "transformers", "accelerate", "datasets", "keras", "skorch"]
autodoc_mock_imports += ["lightgbm", "sklearn", "scipy", "xgboost", "pyarrow", "fsspec", "pandas"]


class Unread:
    """Sphinx looks for the source of a mocked class's module, and so would import it after all."""

    def find_spec(self, name: str, *_: object) -> None:
        if name.partition(".")[0] in autodoc_mock_imports:
            raise ModuleNotFoundError(f"{name} is not imported for the site", name=name)


sys.meta_path.insert(0, Unread())  # the mocks, while they are wanted, come before it
suppress_warnings = ["ref.python"]  # `Strategy` in a signature may be ours or the one for Lightning
smartquotes = False  # "mean" in a text is what a program takes

# To check the pages (-t check) a plain theme does: half of the time goes into a list of all pages beside each.
html_theme = "basic" if tags.has("check") else "furo"  # noqa: F821 (Sphinx adds it)
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_js_files = ["site.js"]
html_copy_source = False
html_show_sphinx = False
html_show_copyright = False
html_theme_options = {} if html_theme == "basic" else {"navigation_with_keys": True}
html_math_renderer = "mathml"

copybutton_exclude = ".linenos, .gp, .go"  # of an interactive session, what was typed

linkcheck_timeout = 10
