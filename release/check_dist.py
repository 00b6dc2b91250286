"""Checks what `make dist` has built: what is in the wheel and in the sdist, and that the sdist builds the same wheel.

    python release/check_dist.py dist [--tree .]

`--tree`: the checkout, whose own wheel is built too and compared with the one that was built from the sdist.
"""

from __future__ import annotations

import argparse
import email
import hashlib
import re
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterable, Mapping
from pathlib import Path

WANTED = (  # in the package: code, types, and what the pages are made of
    *("__init__.py", "__main__.py", "py.typed", "cli/__init__.py", "demo.py", "observe/doctor/__init__.py"),
    *(
        "observe/pages/page.css",
        "observe/pages/charts.js",
        "observe/pages/live.html",
        "observe/pages/live.css",
        "observe/pages/live.js",
    ),
    *("observe/pages/vendor/uPlot.LICENSE", "methods/strategies/allreduce.py", "methods/reducers/powersgd.py"),
)
CONFORMANCE = ("conftest.py", "method_cases.py", "test_reducers.py", "test_strategies.py")  # in the wheel alone
UNWANTED = re.compile(
    r"(^|/)tests?/(?!conformance/|method_cases\.py)|(^|/)(benchmarks|examples|docs|release|\.github)/|\.pyc$|(^|/)\.|\.png$"
)
SDIST_ONLY = ("pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md", "CITATION.cff", "PKG-INFO")
RELATIVE_LINK = re.compile(r"\]\((?!https?://|#)([^)]*)\)")
HEADERS = ("Name", "Version", "Summary", "License-Expression", "Requires-Python", "Description-Content-Type")


def read_wheel(file: Path) -> dict[str, bytes]:
    """The files of a wheel."""
    with zipfile.ZipFile(file) as archive:
        return {name: archive.read(name) for name in archive.namelist() if not name.endswith("/")}


def read_sdist(file: Path) -> dict[str, bytes]:
    """The files of an sdist, without the folder that all lie in."""
    found = {}
    with tarfile.open(file) as archive:
        for member in archive.getmembers():
            if member.isfile() and (content := archive.extractfile(member)) is not None:
                found[member.name.partition("/")[2]] = content.read()
    return found


def find_wheel_problems(files: Mapping[str, bytes], sources: Iterable[str] = ()) -> list[str]:
    """What is wrong with the contents of a wheel; `sources`: the files of the package, as the checkout has them."""
    package = {name.removeprefix("unisono/") for name in files if name.startswith("unisono/")}
    wanted = (*WANTED, *(f"conformance/{name}" for name in CONFORMANCE))
    problems = [f"the wheel has no unisono/{name}" for name in wanted if name not in package]
    problems += [f"the wheel has no unisono/{name}, the checkout does" for name in sorted(set(sources) - package)]
    problems += [f"the wheel has {name}" for name in files if UNWANTED.search(name)]
    tops = {name.partition("/")[0] for name in files}
    info = [top for top in tops if top.endswith(".dist-info")]
    problems += [f"the wheel has {top} beside the package" for top in sorted(tops - {"unisono", *info})]
    if len(info) != 1:
        return [*problems, f"the wheel has {len(info)} folders of metadata"]
    problems += [f"the wheel has no {word}" for word in ("LICENSE", "uPlot.LICENSE") if not _has(files, info[0], word)]
    told = email.message_from_bytes(files[f"{info[0]}/METADATA"])
    problems += [f"the metadata have no {name}" for name in HEADERS if not told[name]]
    leading = RELATIVE_LINK.findall(str(told.get_payload()))
    problems += [f"the description links to {link}, which a package index does not have" for link in leading]
    if f"unisono-{told['Version']}.dist-info" != info[0]:
        problems.append(f"the metadata name version {told['Version']}, the folder is {info[0]}")
    if b"unisono = unisono.cli:main" not in files.get(f"{info[0]}/entry_points.txt", b""):
        problems.append("the wheel has no command `unisono`")
    return problems


def _has(files: Mapping[str, bytes], folder: str, end: str) -> bool:
    return any(name.startswith(f"{folder}/") and name.endswith(f"/{end}") for name in files)


def find_sdist_problems(files: Mapping[str, bytes]) -> list[str]:
    """What is wrong with the contents of an sdist."""
    problems = [f"the sdist has no {name}" for name in SDIST_ONLY if name not in files]
    problems += [f"the sdist has no src/unisono/{name}" for name in WANTED if f"src/unisono/{name}" not in files]
    return problems + [f"the sdist has {name}" for name in files if UNWANTED.search(name)]


def find_differences(one: Mapping[str, bytes], other: Mapping[str, bytes]) -> list[str]:
    """Files of two wheels that differ; their lists of hashes follow from the others."""
    names = sorted({*one, *other})
    sums = [{name: hashlib.sha256(data).digest() for name, data in each.items()} for each in (one, other)]
    return [
        f"{name} is not the same in the wheel of the sdist and in that of the checkout"
        for name in names
        if not name.endswith("/RECORD") and sums[0].get(name) != sums[1].get(name)
    ]


def build_wheel(tree: Path) -> dict[str, bytes]:
    """The wheel of a checkout, built in a folder that is gone afterwards."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "build", "--no-isolation", "--wheel", "--outdir", folder, str(tree)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        return read_wheel(next(Path(folder).glob("*.whl")))


def main() -> int:
    """Check the files in a folder; print what is wrong."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path, help="where the wheel and the sdist are")
    parser.add_argument("--tree", type=Path, help="the checkout that they were built from")
    options = parser.parse_args()
    [wheel], [sdist] = list(options.folder.glob("*.whl")), list(options.folder.glob("*.tar.gz"))
    files, sources = read_wheel(wheel), []
    if options.tree is not None:
        package = options.tree / "src" / "unisono"
        sources = [path.relative_to(package).as_posix() for path in package.rglob("*") if path.suffix in (".py", ".js")]
    problems = [*find_wheel_problems(files, sources), *find_sdist_problems(read_sdist(sdist))]
    if options.tree is not None:
        problems += find_differences(files, build_wheel(options.tree))
    for problem in problems:
        print(problem, file=sys.stderr)
    size = wheel.stat().st_size / 1e6
    print(
        f"{wheel.name}: {len(files)} files, {size:.1f} MB: {len(problems) or 'no'} problem{'s' * (len(problems) != 1)}"
    )
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
