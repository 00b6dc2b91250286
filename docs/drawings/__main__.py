"""`python -m drawings`, in docs/: writes the drawings of the methods' pages, or those that are named; prints how a page
shows each."""

from __future__ import annotations

import sys

from drawings.pages import FOLDER, PAGES, make, show


def main(names: list[str]) -> None:
    for name in names or PAGES:
        text = make(name)
        (FOLDER / f"{name}.svg").write_text(text, encoding="utf-8")
        print(show(name, text))


if __name__ == "__main__":
    main(sys.argv[1:])
