"""Shared by all tests: the order in which they run, and the fork server that their workers come from.

Where several processes run tests (`-n 3 --no-loadscope-reorder`), the longest begin first, as
durations.json remembers them; what shares a cluster or a costly fixture stays together; and short tests travel in
handfuls. `UNISONO_RECORD_DURATIONS=1 make test`, on a machine that does nothing else, writes that file anew; a test
that it does not know takes what others of its file do.

`make test` runs most of the tests (`--most`), so that it stays short; `make thorough` runs all.

Workers that tests start are forked from one process that has imported torch, as with `unisono run --warm`. Tests of
the start itself say which way they mean; UNISONO_WARM=0 in the environment makes all of them fresh.
"""

from __future__ import annotations

import gc
import json
import os
import shutil
import signal
import sys
import tempfile
from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest

os.environ["UNISONO_RUNS"] = "off"  # those that are about records say where they go
os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: two-core machines run several workers at once
for signum in (signal.SIGINT, signal.SIGHUP):  # ignored in the background and under nohup: a handler is not inherited
    if signal.getsignal(signum) is signal.SIG_IGN:
        signal.signal(signum, signal.default_int_handler if signum == signal.SIGINT else lambda *_: None)
gc.disable()  # while tests are collected, which makes no cycles of any size: a second of each process; see below
TESTS = Path(__file__).parent
NETWORK = TESTS / "network"
DURATIONS = TESTS / "durations.json"
# Tests of one file that share a cluster, or what a fixture has computed. The network's are alone on it.
TOGETHER = {
    **{f"engines/test_{name}.py": name for name in ("ray", "slurm", "spark", "ssh")},
    "processes/test_ddp_parity.py": "ddp_parity",
    "processes/test_examples.py": "examples",
    "processes/test_browser_page.py": "browser",
    "network/test_hosts.py": "network",
    "unit/test_architecture.py": "architecture",
    "unit/test_extras.py": "extras",
    "unit/test_planner.py": "planner",
}
LONG_S, HANDFUL_S = 0.5, 3.0  # a test that travels alone; how much of short ones travels together
QUICK_CASES = 6
THOROUGH = TESTS / "thorough.txt"
# With --most: how many cases of a test that take a while. Where each case is a thing of its own (a method, a page), or
# has been computed by a fixture, all of them.
MOST_CASES, COSTLY_S = 3, 0.1
EVERY_CASE = ("conformance/", "golden/", "unit/test_docs.py", "processes/test_ddp_parity.py")


# -- the fork server ---------------------------------------------------------------------------------------------------


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "alone: compares times, so that nothing else may run beside it")
    if hasattr(config, "workerinput"):
        config.args = _begin_elsewhere(config.args, config.workerinput)
    elif "UNISONO_WARM" not in os.environ:
        _start_folder(config)


def _start_folder(config: pytest.Config) -> None:
    os.environ["UNISONO_WARM_IDLE_S"] = "300"  # where these tests are killed; those of one engine may be far apart
    os.environ["UNISONO_WARM"] = folder = tempfile.mkdtemp(prefix="unisono-tests-")  # of mode 700
    config.add_cleanup(lambda: _stop_servers(folder))


def pytest_collection_finish(session: pytest.Session) -> None:
    """Start the server here, where all is as it is for most tests: it refuses those of another group or priority.

    What is there now (torch, and thousands of tests) stays to the end: Python's collector need not go over it again,
    which takes it a second each time.
    """
    gc.enable()
    _freeze()
    if session.config.option.collectonly or os.environ["UNISONO_WARM"] == "0":
        return
    if any(item.path.parent.name in ("processes", "engines") for item in session.items):
        from unisono.launchers import forks

        with pytest.MonkeyPatch.context() as patch:
            begin = forks.server_command
            patch.setattr(forks, "server_command", lambda *given, **named: _with_pytest(begin(*given, **named)))
            forks.connect_warm().close()  # it begins to import torch


def _with_pytest(command: list[str]) -> list[str]:
    """A fork server that has imported pytest: a worker whose function is a test file's would do so itself."""
    program = "import os, pytest, runpy, sys; del sys.argv[0]; sys.path[0] = os.path.dirname(sys.argv[0])"
    return [command[0], "-c", f"{program}; runpy.run_path(sys.argv[0], run_name='__main__')", *command[1:]]


_frozen, _file = 0, Path()  # how many objects; of the test before


def _freeze() -> None:
    global _frozen
    gc.collect()
    gc.freeze()
    _frozen = gc.get_freeze_count()


def pytest_runtest_setup(item: pytest.Item) -> None:
    """What tests leave behind that others would notice.

    Ray has breakpoint() of the process that starts it, and of all that come of it, go to a debugger of its own. Some
    tests run what ends by gc.unfreeze: with all of that to go over, later ones would take twice as long.
    """
    global _file
    os.environ.pop("PYTHONBREAKPOINT", None)
    if item.path != _file:
        _file = item.path
        if gc.get_freeze_count() < _frozen:
            _freeze()


def pytest_runtest_teardown() -> None:
    """A rank that a test lets die hears of its background save no more: the next test shall not either."""
    if behind := sys.modules.get("unisono.training.checkpoint.behind"):
        for saves in list(behind._under_way):
            saves.wait()
            behind._under_way.discard(saves)


def _stop_servers(folder: str) -> None:
    from unisono.launchers.forks import stop_warm

    stop_warm()
    shutil.rmtree(folder, ignore_errors=True)
    del os.environ["UNISONO_WARM"]


# -- a part of the tests -------------------------------------------------------------------------------------------


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--quick", action="store_true", help=f"at most {QUICK_CASES} cases of a test, and no long test")
    parser.addoption("--most", action="store_true", help=f"without {THOROUGH.name}, {MOST_CASES} cases of long tests")
    parser.addoption("--cuda", action="store_true", help="only the tests that need a CUDA device")
    parser.addoption("--reducers", action="append", default=[], help="a folder of reducers for the conformance suite")
    parser.addoption("--strategies", action="append", default=[], help="a folder of strategies for the same")
    parser.addoption("--rewrite-golden", action="store_true", help="write tests/golden/*.json anew")


def _select_cuda(items: list[pytest.Item]) -> list[pytest.Item]:
    """Those that are skipped without a CUDA device."""
    return [item for item in items if any("CUDA device" in m.kwargs["reason"] for m in item.iter_markers("skipif"))]


def _select_quick(items: list[pytest.Item]) -> list[pytest.Item]:
    """Of each test that is not long, cases spread over all that it has."""
    remembered = _read_durations()
    cases: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        if remembered.get(_key(item.nodeid), 0.0) < LONG_S:
            cases[item.nodeid.partition("[")[0]].append(item)
    chosen = set()
    for found in cases.values():
        step = max(1.0, len(found) / QUICK_CASES)
        chosen.update(found[int(i * step)] for i in range(min(len(found), QUICK_CASES)))
    return [item for item in items if item in chosen]


def _select_most(items: list[pytest.Item]) -> list[pytest.Item]:
    """All but what `make thorough` is for, and of costly cases of one test a few, spread over all that it has."""
    remembered = _read_durations()
    left_out = _read_thorough()
    costly: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        key = _key(item.nodeid)
        takes_s = remembered.get(key, remembered.get(key.partition("::")[0], 0.0))
        if takes_s >= COSTLY_S and "[" in key and not key.startswith(EVERY_CASE):
            costly[key.partition("[")[0]].append(item)
    dropped = {item for item in items if _key(item.nodeid) in left_out}
    files = {_key(item.nodeid).partition("::")[0] for item in items}
    gone = {key for key in left_out if key.partition("::")[0] in files} - {_key(item.nodeid) for item in dropped}
    if gone:
        raise pytest.UsageError(f"{THOROUGH} names tests that are not there: {', '.join(sorted(gone))}")
    for cases in costly.values():
        found = [item for item in cases if item not in dropped]
        kept = {found[i * len(found) // MOST_CASES] for i in range(MOST_CASES)} if found else set()
        dropped.update(item for item in found if item not in kept)
    return [item for item in items if item not in dropped]


def _read_thorough() -> set[str]:
    lines = (line.strip() for line in THOROUGH.read_text().splitlines())
    return {line for line in lines if line and not line.startswith("#")}


# -- the order ---------------------------------------------------------------------------------------------------------


def _begin_elsewhere(paths: Sequence[str], worker: Mapping[str, Any]) -> list[str]:
    """The files of these folders, where each worker reads others first.

    The first time, pytest compiles each file and keeps the result: so each is compiled by one worker, not by all.
    """
    found = [file for path in paths for file in (sorted(Path(path).rglob("test_*.py")) or [path])]
    first = len(found) * int(worker["workerid"].removeprefix("gw")) // int(worker["workercount"])
    return [str(file) for file in found[first:] + found[:first]]


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if "network/" in item.nodeid and item.path.parent == NETWORK and (reason := why_no_network()):
            item.add_marker(pytest.mark.skip(reason=reason))
    for option, select in (("--cuda", _select_cuda), ("--quick", _select_quick), ("--most", _select_most)):
        if config.getoption(option):
            chosen = select(items)
            kept = set(chosen)
            config.hook.pytest_deselected(items=[item for item in items if item not in kept])
            items[:] = chosen
    if hasattr(config, "workerinput"):
        items.sort(key=lambda item: item.nodeid.partition("::")[0])  # whichever file was read first
        place = {nodeid: i for i, nodeid in enumerate(_group_tests([item.nodeid for item in items]))}
        items.sort(key=lambda item: place[item.nodeid])


def _group_tests(nodeids: Sequence[str]) -> dict[str, str]:
    """The group that each test travels in, in the order to run them: the group that takes longest first."""
    remembered = _read_durations()
    groups: dict[str, list[str]] = defaultdict(list)
    seconds: dict[str, float] = defaultdict(float)
    handfuls: dict[str, int] = defaultdict(int)
    for nodeid in nodeids:
        file = _key(nodeid).partition("::")[0]
        takes_s = remembered.get(_key(nodeid), remembered.get(file, 0.02))
        if file in TOGETHER:
            name = TOGETHER[file]
        elif takes_s >= LONG_S or not file.startswith(("unit/", "strangers/", "conformance/")):
            name = nodeid
        else:
            if seconds[f"{file}-{handfuls[file]}"] > HANDFUL_S:
                handfuls[file] += 1
            name = f"{file}-{handfuls[file]}"
        groups[name].append(nodeid)
        seconds[name] += takes_s
    ordered = sorted(groups, key=lambda name: -seconds[name])
    return {nodeid: name for name in ordered for nodeid in groups[name]}


@pytest.hookimpl(optionalhook=True)  # with -p no:xdist nobody asks
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Groups by name: xdist's own are lost where the names of tests cannot be changed."""
    from xdist.scheduler import LoadScopeScheduling

    class Pool(LoadScopeScheduling):  # type: ignore[misc]
        def schedule(self) -> None:
            if self.collection is None and self.registered_collections:
                self.groups = _group_tests(next(iter(self.registered_collections.values())))
            super().schedule()

        def _split_scope(self, nodeid: str) -> str:
            return self.groups[nodeid]

    return Pool(config, log)


def _read_durations() -> dict[str, float]:
    """Seconds by test, for the costly ones, and by file for a test of the others."""
    found: dict[str, float] = json.loads(DURATIONS.read_text()) if DURATIONS.exists() else {}
    return found


def _key(nodeid: str) -> str:
    return nodeid.removeprefix("tests/")


class _Recorder:
    """Remembers how long tests took: costly ones by name, the others by the mean of their file."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.seconds[_key(report.nodeid)] += report.duration

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        long = {name: round(s, 1) for name, s in self.seconds.items() if s >= COSTLY_S}
        short: dict[str, list[float]] = defaultdict(list)
        for name, s in self.seconds.items():
            if name not in long:
                short[name.partition("::")[0]].append(s)
        means = {file: round(sum(each) / len(each), 3) for file, each in short.items()}
        files = {name.partition("::")[0] for name in self.seconds}
        others = {name: s for name, s in _read_durations().items() if name.partition("::")[0] not in files}
        if session.config.getoption("--most"):  # the cases that it leaves out are still costly
            tests = {name.partition("[")[0] for name in long}
            left_out = _read_thorough()
            others |= {
                name: s
                for name, s in _read_durations().items()
                if name in left_out or ("[" in name and name not in self.seconds and name.partition("[")[0] in tests)
            }
        DURATIONS.write_text(json.dumps({**others, **means, **long}, indent=0, sort_keys=True) + "\n")


@pytest.hookimpl(trylast=True)
def pytest_sessionstart(session: pytest.Session) -> None:
    if os.environ.get("UNISONO_RECORD_DURATIONS") and not hasattr(session.config, "workerinput"):
        session.config.pluginmanager.register(_Recorder())


# -- what is there -----------------------------------------------------------------------------------------------------


@cache
def why_no_network() -> str:
    """Empty where network namespaces can be made; otherwise the reason to skip."""
    from unisono.launchers.lab.hosts import find_obstacle

    return find_obstacle()
