"""The methods that the suite runs over: the package's, those that pages of docs build, and those of folders given.

Every method brings its own examples and facts (`unisono.facts`), so a new file is tested without an edit here.
`pytest tests/conformance --reducers FOLDER --strategies FOLDER` runs it over methods of one's own as well, and
`unisono conformance DIR`, also from the wheel, which has these files, over those in UNISONO_METHODS alone.
"""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from functools import cache
from pathlib import Path

import pytest

from method_cases import Case, find_cases
from unisono.methods.spec import extend
from unisono.methods.spec.methods import Kind

OWN = [folder for folder in os.environ.get("UNISONO_METHODS", "").split(os.pathsep) if folder]


@cache
def page_methods() -> Path:
    """A folder with the methods that pages build; it goes when the process ends."""
    import doc_pages

    holder = tempfile.TemporaryDirectory(prefix="unisono-pages-")
    page_methods.holder = holder  # type: ignore[attr-defined]
    doc_pages.write_methods(Path(holder.name))
    return Path(holder.name)


def extended(config: pytest.Config) -> ExitStack:
    """The catalog with every folder in it, while the stack is open."""
    stack = ExitStack()
    if OWN:
        return stack
    pages = page_methods()
    stack.enter_context(extend(reducers=pages / "reducers", strategies=pages / "strategies"))
    for option in ("reducers", "strategies"):
        for folder in config.getoption(option):
            stack.enter_context(extend(**{option: folder}))
    return stack


@pytest.fixture(autouse=True, scope="module")
def catalog(request: pytest.FixtureRequest) -> Iterator[None]:
    with extended(request.config):
        yield


@cache
def cases_of(kind: Kind, config: pytest.Config) -> list[Case]:
    with extended(config):
        cases = find_cases(kind)
    if not OWN:
        return cases
    own = {file.stem for folder in OWN for part in ("reducers", "strategies") for file in Path(folder, part).glob("*")}
    return [case for case in cases if own & set(re.findall(r"\w+", case.spec))]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test's `case` is an example of a method of its module's KIND, `refusal` a case and a setting it refuses."""
    if not {"case", "refusal"} & set(metafunc.fixturenames):
        return
    cases = cases_of(metafunc.module.KIND, metafunc.config)
    if "case" in metafunc.fixturenames:
        metafunc.parametrize("case", cases, ids=[case.spec for case in cases])
    else:
        first = {case.name: case for case in reversed(cases)}
        refusals = [(case, setting) for _, case in sorted(first.items()) for setting in case.facts.refuses]
        metafunc.parametrize("refusal", refusals, ids=[f"{case.name}({setting})" for case, setting in refusals])
