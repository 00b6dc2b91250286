"""Runs the quick tests against the built wheel, on each Python that is found, and prints a table.

    python release/try_pythons.py dist/unisono-1.0.0-py3-none-any.whl [--constraints FILE]
        [--python PATH_OR_NAME ...] [--torch 2.13.0 ...] [--environment DIR]

Without --python: python3.10 to python3.14, as far as they are on the PATH. Each has an environment of its own, which is
removed at the end. Where pip cannot install, that is said with its error. With --environment, an environment that is
there already is used as it is, and its wheel is replaced.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from try_wheel import clean_environment, make_environment

NAMES = ("python3.10", "python3.11", "python3.12", "python3.13", "python3.14")
TESTS = Path(__file__).parents[1] / "tests"
COUNTS = re.compile(r"^(?:\S+ )?((?:\d+ \w+(?:, )?)+) in [\d.]+s", re.MULTILINE)


def run_tests(python: Path, more: list[str]) -> tuple[int, str]:
    """Exit status of the quick tests, and their counts."""
    command = [str(python), "-m", "pytest", "-q", "--quick", "-p", "no:cacheprovider", *more]
    command += [str(TESTS / "unit"), str(TESTS / "conformance")]
    done = subprocess.run(command, cwd=TESTS.parent, env=clean_environment(), stdout=subprocess.PIPE, text=True)
    print(done.stdout[-6000:], flush=True)
    found = COUNTS.findall(done.stdout)
    return done.returncode, found[-1] if found else "no result"


def find_versions(python: Path) -> str:
    """Those of Python, torch and of this package, and where that lies."""
    program = "import sys, torch, unisono; print(sys.version.split()[0], torch.__version__, unisono.__file__)"
    done = subprocess.run([str(python), "-c", program], capture_output=True, text=True, check=True, cwd="/")
    version, torch, place = done.stdout.split()
    if TESTS.parent / "src" in Path(place).parents:
        sys.exit(f"{python} imports the checkout ({place}), not the wheel")
    return f"Python {version}, torch {torch}"


def bind(constraints: Path | None, torch: str | None, folder: Path) -> Path | None:
    """The constraints, with another torch where one is asked for."""
    lines = [] if constraints is None else constraints.read_text(encoding="utf-8").splitlines()
    if torch is not None:
        free = ("torch==", "setuptools==")  # torch has its own bounds of setuptools, others in each version
        lines = [line for line in lines if not line.startswith(free)] + [f"torch=={torch}"]
    file = folder / "constraints.txt"
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return file if lines else None


def try_one(python: str, torch: str | None, options: argparse.Namespace) -> tuple[bool, str]:
    """One Python with one torch: whether all is well, and a line of the table."""
    with tempfile.TemporaryDirectory(prefix="unisono-python-") as place:
        bound = bind(options.constraints, torch, Path(place))
        wheel = f"{options.wheel.resolve()}[dev]"
        try:
            programs = make_environment(python, Path(place, "environment"), wheel, constraints=bound)
        except subprocess.CalledProcessError as error:
            return False, f"{python}, torch {torch or 'as bound'}: pip could not install ({error})"
        status, counts = run_tests(programs / "python", options.pytest)
        return status == 0, f"{find_versions(programs / 'python')}: {counts}"


def main() -> int:
    """Try each, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("wheel", type=Path)
    parser.add_argument("--constraints", type=Path, help="versions of what is installed with it")
    parser.add_argument("--python", action="append", help="a Python; may be given several times")
    parser.add_argument("--torch", action="append", help="a version of torch; may be given several times")
    parser.add_argument("--environment", type=Path, action="append", help="use this environment, as it is")
    parser.add_argument("--pytest", action="append", default=[], help="more arguments for pytest, as in --pytest=-n3")
    options = parser.parse_args()
    rows = []
    for environment in options.environment or ():
        python = environment / "bin" / "python"
        command = [str(python), "-m", "pip", "install", "-q", "--no-deps", "--force-reinstall", str(options.wheel)]
        subprocess.run(command, check=True)
        status, counts = run_tests(python, options.pytest)
        rows.append((status == 0, f"{find_versions(python)}: {counts}"))
    pythons = options.python or ([] if options.environment else [name for name in NAMES if shutil.which(name)])
    for python in pythons:
        rows += [try_one(python, torch, options) for torch in options.torch or [None]]
    for good, line in rows:
        print("ok  " if good else "BAD ", line)
    if not rows:
        print(f"none of {', '.join(NAMES)} is on the PATH: name one by --python", file=sys.stderr)
    return 0 if rows and all(good for good, _ in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
