"""What pyproject.toml cannot say: the page on an index, and that the wheel has the conformance tests.

The page of this package on an index is README.md, without links into the repository.

A relative link leads nowhere there. Passages between two comments of README.md are left out: `<!-- only here -->` and
`<!-- everywhere -->`.
"""

import re
import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py


def write_description(readme: str) -> str:
    """The text of README.md, with the path after a name instead of a link to it.

    >>> write_description("[Start](docs/start.md) or [ask](https://example.org).")
    'Start (docs/start.md) or [ask](https://example.org).'
    """
    kept = re.sub(r"<!-- only here -->.*?<!-- everywhere -->\n*", "", readme, flags=re.DOTALL)
    return re.sub(r"\[([^]]*)\]\((?!https?://|#)([^)]*)\)", r"\1 (\2)", kept)


class BuildWithConformance(build_py):
    """The package, and in it the tests that `unisono conformance` runs; in a checkout it finds them where they are."""

    def run(self) -> None:
        super().run()
        if self.editable_mode:
            return
        tests, target = Path(__file__).parent / "tests", Path(self.build_lib, "unisono", "conformance")
        target.mkdir(parents=True, exist_ok=True)
        for file in [*sorted((tests / "conformance").glob("*.py")), tests / "method_cases.py"]:
            shutil.copyfile(file, target / file.name)


if __name__ == "__main__":
    text = (Path(__file__).parent / "README.md").read_text(encoding="utf-8")
    setup(
        long_description=write_description(text),
        long_description_content_type="text/markdown",
        cmdclass={"build_py": BuildWithConformance},
    )
