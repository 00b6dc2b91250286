"""What is installed: Python, torch, the extras, and whether these versions are known to work."""

from __future__ import annotations

import platform
import re
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable
from importlib import metadata
from pathlib import Path

from unisono.observe.doctor.findings import Finding, judge

__all__ = ["check_extras", "check_package", "check_python", "check_required", "find_version", "read_requirements"]

SECTION = "installed"
PYTHONS = ((3, 10), (3, 13))  # the oldest and the newest with which the tests run
TORCHES = ((2, 11), (2, 13))
_DEVELOPERS = ("dev", "docs", "all")  # extras that are made of others, or of tools
_REQUIREMENT = re.compile(r"([A-Za-z0-9_.-]+)(?:\[[^]]*\])?\s*([^;]*)(?:;.*extra\s*==\s*['\"]([^'\"]+)['\"])?")
_BOUND = re.compile(r"(>=|<=|==|!=|<|>)\s*([0-9][0-9A-Za-z.]*)")

_SERVES_AS_WELL = {"xgboost-cpu": "xgboost"}

FindVersion = Callable[[str], "str | None"]


def find_version(name: str) -> str | None:
    """The version of an installed distribution; None where there is none."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def read_requirements() -> list[str]:
    """What this package says it needs, with the extras; empty where it is not installed but found by a path."""
    try:
        return metadata.requires("unisono") or []
    except metadata.PackageNotFoundError:
        return []


def check_python(version: tuple[int, ...] = sys.version_info[:3]) -> list[Finding]:
    """Whether the tests run with this Python."""
    text = f"{platform.python_implementation()} {_show(version)} ({sys.executable})"
    return [_compare("python", text, _show(version), PYTHONS, "install a newer Python")]


def check_package(version: str, folder: Path, find: FindVersion = find_version) -> list[Finding]:
    """This package, and whether what is imported is what was installed."""
    installed = find("unisono")
    text, values = f"{version} ({folder})", {"version": version, "folder": str(folder)}
    advice = ""
    if installed is None:
        advice = "found by its path, not installed: torch does not know the backend `unisono` then; pip install -e ."
    elif installed != version:
        advice = (
            f"pip knows version {installed}: another copy is in the way (PYTHONPATH), or run pip install -e . again"
        )
    return [judge(SECTION, "unisono", text, advice, values)]


def check_required(find: FindVersion = find_version) -> list[Finding]:
    """torch, numpy and rich, without which nothing runs."""
    found = []
    for name in ("torch", "numpy", "rich"):
        version = find(name)
        if version is None:
            found.append(Finding(SECTION, name, "bad", "not installed", f"pip install {name}"))
        elif name == "torch":
            found.append(_compare(name, version, version, TORCHES, "pip install --upgrade 'torch>=2.11'"))
        else:
            found.append(Finding(SECTION, name, "ok", version, values={"version": version}))
    return found


def _compare(name: str, text: str, version: str, tested: tuple[tuple[int, int], ...], remedy: str) -> Finding:
    """Whether a version is among those that the tests run with: an older one is bad, a newer one a warning."""
    oldest, newest = tested
    number, values = _read(version)[:2], {"version": version}
    known = f"the tests run with {_show(oldest)} to {_show(newest)}"
    if number < oldest:
        return Finding(SECTION, name, "bad", text, f"{known}: {remedy}", values)
    return judge(SECTION, name, text, f"newer than what was tried: {known}" if number > newest else "", values)


# Extras ---------------------------------------------------------------------------------------------------------------


def check_extras(requirements: Iterable[str] | None = None, find: FindVersion = find_version) -> list[Finding]:
    """A line for each extra that is there, one for all others; what is too old or half there is a warning."""
    found, absent = [], []
    for extra, needed in _sort_by_extra(read_requirements() if requirements is None else requirements).items():
        versions = {name: find(name) or find(_SERVES_AS_WELL.get(name, name)) for name, _ in needed}
        missing = [name for name, version in versions.items() if version is None]
        wrong = [
            f"{name} {versions[name]}, needed {bounds}" for name, bounds in needed if _is_wrong(versions[name], bounds)
        ]
        if len(missing) == len(versions):
            absent.append(extra)
            continue
        text = ", ".join(f"{name} {version}" for name, version in versions.items() if version is not None)
        advice = "; ".join([*wrong, *(f"{name} is missing" for name in missing if wrong)])
        if wrong:
            found.append(Finding(SECTION, f"[{extra}]", "warn", text, f"{advice}: pip install 'unisono[{extra}]'"))
        elif missing:  # a part of it may be there for other reasons
            absent.append(f"{extra} (without {', '.join(missing)})")
        else:
            found.append(Finding(SECTION, f"[{extra}]", "ok", text, values={"versions": versions}))
    if absent:
        text = f"not installed: {', '.join(absent)}"
        found.append(Finding(SECTION, "other extras", "ok", text, "where wanted: pip install 'unisono[NAME]'"))
    return found


def _sort_by_extra(requirements: Iterable[str]) -> dict[str, list[tuple[str, str]]]:
    """Names and bounds by extra.

    >>> _sort_by_extra(["numpy", 'ray[data]>=2.40; extra == "ray"'])
    {'ray': [('ray', '>=2.40')]}
    """
    found: dict[str, list[tuple[str, str]]] = defaultdict(list)
    for text in requirements:
        match = _REQUIREMENT.match(text)
        if match is not None and match[3] and match[3] not in _DEVELOPERS:
            found[match[3]].append((match[1], match[2].strip(" ()")))
    return dict(found)


def _is_wrong(version: str | None, bounds: str) -> bool:
    """Whether a version is outside of bounds such as ">=2.40,<3".

    >>> _is_wrong("2.39.1", ">=2.40"), _is_wrong("2.40", ">=2.40"), _is_wrong("3.0", "<3")
    (True, False, True)
    """
    if version is None:
        return False
    mine = _read(version)
    for sign, text in _BOUND.findall(bounds):
        other = _read(text)
        length = max(len(mine), len(other))
        a, b = mine + (0,) * (length - len(mine)), other + (0,) * (length - len(other))
        held = {">=": a >= b, "<=": a <= b, "==": a == b, "!=": a != b, "<": a < b, ">": a > b}
        if not held[sign]:
            return True
    return False


def _read(version: str) -> tuple[int, ...]:
    """The numbers that a version begins with.

    >>> _read("2.13.0+cpu"), _read("2.14.0a0")
    ((2, 13, 0), (2, 14, 0))
    """
    match = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(part) for part in match[0].split(".")) if match else ()


def _show(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))
