"""Shared by all tests: network tests need root, iproute2 and the right to make a network namespace."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from functools import cache
from pathlib import Path

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: two-core machines run several workers at once
for signum in (signal.SIGINT, signal.SIGHUP):  # ignored in the background and under nohup: a handler is not inherited
    if signal.getsignal(signum) is signal.SIG_IGN:
        signal.signal(signum, lambda *_: None)
NETWORK = Path(__file__).parent / "network"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--reducers", action="append", default=[], help="a folder of reducers for the conformance suite")
    parser.addoption("--strategies", action="append", default=[], help="a folder of strategies for the same")
    parser.addoption("--rewrite-golden", action="store_true", help="write tests/golden/*.json anew")


@cache
def why_no_network() -> str:
    """Empty where network namespaces can be made; otherwise the reason to skip."""
    if os.geteuid() != 0:
        return "network tests lay out hosts as network namespaces: run as root"
    if shutil.which("ip") is None:
        return "network tests need iproute2: apt-get install iproute2"
    name = f"unisono-probe-{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
    if made.returncode:
        return f"network namespaces cannot be made here: {made.stderr.strip()}"
    subprocess.run(["ip", "netns", "del", name], check=True)
    return ""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if NETWORK in item.path.parents and (reason := why_no_network()):
            item.add_marker(pytest.mark.skip(reason=reason))
