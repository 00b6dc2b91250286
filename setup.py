"""What pyproject.toml cannot say: the page of this package on an index is README.md, without links into the repository.

A relative link leads nowhere there. Passages between two comments of README.md are left out: `<!-- only here -->` and
`<!-- everywhere -->`.
"""

import re
from pathlib import Path

from setuptools import setup


def write_description(readme: str) -> str:
    """The text of README.md, with the path after a name instead of a link to it.

    >>> write_description("[Start](docs/start.md) or [ask](https://example.org).")
    'Start (docs/start.md) or [ask](https://example.org).'
    """
    kept = re.sub(r"<!-- only here -->.*?<!-- everywhere -->\n*", "", readme, flags=re.DOTALL)
    return re.sub(r"\[([^]]*)\]\((?!https?://|#)([^)]*)\)", r"\1 (\2)", kept)


if __name__ == "__main__":
    text = (Path(__file__).parent / "README.md").read_text(encoding="utf-8")
    setup(long_description=write_description(text), long_description_content_type="text/markdown")
