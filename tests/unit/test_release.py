"""What is released: one version everywhere, archives with the right contents, texts that are true."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest
import yaml

import unisono as un
from unisono.observe.doctor.host import PYTHONS, TORCHES

ROOT = Path(__file__).parents[2]
if sys.version_info >= (3, 11):
    import tomllib

    PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
else:
    PROJECT = None
needs_toml = pytest.mark.skipif(PROJECT is None, reason="Python 3.10 cannot read TOML")


def load(path: str) -> ModuleType:
    """A script that is in no package."""
    spec = importlib.util.spec_from_file_location(Path(path).stem, ROOT / path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


check_dist = load("release/check_dist.py")


def make_wheel(**changes: bytes | None) -> dict[str, bytes]:
    wanted = (*check_dist.WANTED, *(f"conformance/{name}" for name in check_dist.CONFORMANCE))
    files = {f"unisono/{name}": b"" for name in wanted}
    info = "unisono-1.0.0.dist-info"
    files[f"{info}/METADATA"] = "\n".join(f"{n}: 1.0.0" for n in check_dist.HEADERS).encode()
    files[f"{info}/entry_points.txt"] = b"[console_scripts]\nunisono = unisono.cli:main\n"
    files[f"{info}/licenses/LICENSE"] = files[f"{info}/licenses/src/uPlot.LICENSE"] = b"x"
    files |= {name: data for name, data in changes.items() if data is not None}
    return {name: data for name, data in files.items() if name not in changes or changes[name] is not None}


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({}, ""),
        ({"unisono/py.typed": None}, "the wheel has no unisono/py.typed"),
        ({"tests/unit/test_x.py": b""}, "the wheel has tests/unit/test_x.py"),
        ({"benchmarks/steps.py": b""}, "the wheel has benchmarks/steps.py"),
        ({"unisono-1.0.0.dist-info/licenses/LICENSE": None}, "the wheel has no LICENSE"),
        ({"unisono-1.0.0.dist-info/entry_points.txt": b""}, "the wheel has no command `unisono`"),
        ({"unisono-1.0.0.dist-info/METADATA": b"Name: unisono\nVersion: 0.1.0\n"}, "the metadata have no Summary"),
    ],
)
def test_what_is_missing_from_a_wheel_or_too_much_is_named(changes: dict[str, bytes | None], problem: str) -> None:
    found = check_dist.find_wheel_problems(make_wheel(**changes))
    assert problem in found if problem else found == []


def test_the_page_on_a_package_index_has_no_link_into_the_repository() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    text = load("setup.py").write_description(readme)
    head = "\n".join(f"{name}: 1.0.0" for name in check_dist.HEADERS) + "\n\n"
    metadata = "unisono-1.0.0.dist-info/METADATA"
    assert check_dist.find_wheel_problems(make_wheel(**{metadata: (head + text).encode()})) == []
    found = check_dist.find_wheel_problems(make_wheel(**{metadata: (head + readme).encode()}))
    assert "the description links to docs/network.png, which a package index does not have" in found
    assert "## Try it" in text
    assert "`unisono strategies` lists them, Methods (docs/methods/README.md) says" in text


def test_files_of_the_checkout_are_in_the_wheel_and_wheels_are_compared() -> None:
    assert check_dist.find_wheel_problems(make_wheel(), ["new.py"]) == [
        "the wheel has no unisono/new.py, the checkout does"
    ]
    one, other = make_wheel(**{"x/RECORD": b"1"}), make_wheel(**{"x/RECORD": b"2"})
    assert check_dist.find_differences(one, other) == []
    assert len(check_dist.find_differences(one, {**other, "unisono/demo.py": b"changed"})) == 1


def test_an_sdist_without_its_changelog_or_with_tests_is_refused() -> None:
    files = {f"src/unisono/{name}": b"" for name in check_dist.WANTED} | dict.fromkeys(check_dist.SDIST_ONLY, b"")
    assert check_dist.find_sdist_problems(files) == []
    del files["CHANGELOG.md"]
    assert check_dist.find_sdist_problems({**files, "tests/conftest.py": b""}) == [
        "the sdist has no CHANGELOG.md",
        "the sdist has tests/conftest.py",
    ]


def test_the_version_is_one_everywhere() -> None:
    assert re.fullmatch(r"\d+\.\d+\.\d+", un.__version__)
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert cited["version"] == un.__version__
    assert f"Version {un.__version__}." in (ROOT / "README.md").read_text(encoding="utf-8")
    head = f"## [{un.__version__}] - {cited['date-released']}"
    assert head in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), "version and date"


@needs_toml
def test_pythons_and_torches_are_those_that_the_doctor_knows() -> None:
    assert PROJECT is not None
    assert PROJECT["dynamic"] == ["version", "readme"]
    named = re.findall(r"Python :: 3\.(\d+)", " ".join(PROJECT["classifiers"]))
    assert [int(minor) for minor in named] == list(range(PYTHONS[0][1], PYTHONS[1][1] + 1))
    assert PROJECT["requires-python"] == ">=" + ".".join(map(str, PYTHONS[0]))
    assert "torch>=" + ".".join(map(str, TORCHES[0])) in PROJECT["dependencies"]


@needs_toml
def test_all_has_every_extra_that_a_user_may_want() -> None:
    assert PROJECT is not None
    extras = PROJECT["optional-dependencies"]
    [whole] = extras["all"]
    named = set(whole.removeprefix("unisono[").removesuffix("]").split(","))
    assert named <= set(extras)
    rest = set(extras) - named - {"all", "dev", "docs"}
    packages = {need for name in named for need in extras[name]}
    assert [name for name in sorted(rest) if not set(extras[name]) <= packages] == []


def test_forms_for_issues_are_readable_and_ask_for_the_doctor() -> None:
    folder = ROOT / ".github" / "ISSUE_TEMPLATE"
    forms = {file.stem: yaml.safe_load(file.read_text(encoding="utf-8")) for file in folder.glob("*.yml")}
    assert set(forms) == {"bug", "method", "config"}
    for name in ("bug", "method"):
        assert {"name", "description", "body"} <= set(forms[name])
        assert all(part["attributes"]["label"] for part in forms[name]["body"])
    assert any("unisono doctor --json" in part["attributes"]["label"] for part in forms["bug"]["body"])


@pytest.mark.parametrize("name", ["CONTRIBUTING.md", "SECURITY.md"])
def test_paths_and_commands_in_the_texts_exist(name: str) -> None:
    text = (ROOT / name).read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    assert set(re.findall(r"make ([a-z-]+)", text)) - {"itself"} <= targets
    for path in re.findall(r"\]\(([^)#]+)\)|`((?:src|tests|docs|release)/[\w./-]+)`", text):
        assert (ROOT / "".join(path)).exists(), path


def test_the_demo_needs_no_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    from unisono import demo

    real = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == "sklearn" else real(name, *rest)
    )
    images, labels = demo.load_digits()
    assert (tuple(images.shape), labels.bincount().tolist()) == ((1797, 1, 8, 8), [180] * 7 + [179] * 3)
    assert set(labels[::6].tolist()) == set(range(10)), "those that are held out"
    means = [images[labels == digit].mean(0).flatten() for digit in range(10)]
    nearest = [min(range(10), key=lambda d: float((image.flatten() - means[d]).norm())) for image in images[:100]]
    right = sum(a == b for a, b in zip(nearest, labels[:100].tolist(), strict=True))
    assert 10 < right < 95  # digits that can be told apart, and not by their place
