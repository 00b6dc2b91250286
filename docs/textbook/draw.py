"""Run the code of the textbook's pages, which draws their pictures anew: `python docs/textbook/draw.py [PAGE ...]`."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import matplotlib

FOLDER = Path(__file__).parent
STYLE = {
    "figure.figsize": (7.2, 3.6),
    "figure.constrained_layout.use": True,
    "figure.facecolor": "white",  # not transparent: readable on a dark page too
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#e6e6e6",
    "axes.axisbelow": True,
    "legend.frameon": False,
    "font.size": 9,
    "savefig.dpi": 130,
}


def main(names: list[str]) -> None:
    """Draw the pictures of the pages of these names, or of all."""
    os.chdir(FOLDER)
    matplotlib.use("Agg")
    matplotlib.rcParams.update(STYLE)
    pages = [FOLDER / name for name in names] or sorted(FOLDER.glob("*.md"))
    for page in pages:
        source = page.read_text(encoding="utf-8")
        blocks = re.findall(r"^```python\n(.*?)^```", source, flags=re.DOTALL | re.MULTILINE)
        exec(compile("\n".join(blocks), str(page), "exec"), {"__name__": "__main__"})
        print(f"{page.name}: done")


if __name__ == "__main__":
    main(sys.argv[1:])
