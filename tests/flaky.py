"""`make flaky RUNS=10 BUSY=2 LOG=flaky.jsonl`: the whole pool again and again, and a table of the tests that failed.

    python tests/flaky.py --runs 10             a machine that does nothing else
    python tests/flaky.py --runs 10 --busy 2    beside two processes that keep a core busy each
    python tests/flaky.py --runs 10 --log FILE  runs are added to FILE, a line of JSON each; the table is of all of them
    python tests/flaky.py --runs 0 --log FILE   the table alone

With a log, the runs count that it has already of this commit beside as many busy processes: the same command, given
again after it was interrupted, makes those that are left. Exits with 1 if a run that counts has failed. The output of
every failed run stays in the folder that is named at the end.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ET
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

POOL = ("-n", "3", "--no-loadscope-reorder", "--timeout=300", "-m", "not alone", "--most", "-p", "no:cacheprovider")
BURN = "while True: pass"
Run = dict[str, Any]  # date, commit, busy, seconds, passed, failed: names of tests


def run_once(commit: str, busy: int, folder: Path) -> Run:
    """One run of the pool, beside `busy` others; its output stays in the folder if it failed."""
    date = time.strftime("%Y-%m-%dT%H:%M:%S")
    report, output = folder / f"{date}.xml", folder / f"{date}.txt"
    began = time.monotonic()
    with keep_busy(busy), output.open("w") as file:
        command = [sys.executable, "-m", "pytest", "-q", *POOL, f"--junitxml={report}", "tests"]
        status = subprocess.run(command, stdout=file, stderr=subprocess.STDOUT, check=False).returncode
    seconds = round(time.monotonic() - began, 1)
    passed, failed = read_report(report) if report.exists() else (0, [])
    if status and not failed:
        failed = [f"no test, but the run itself ended with {status}"]
    if not failed:
        output.unlink()
        report.unlink()
    return {"date": date, "commit": commit, "busy": busy, "seconds": seconds, "passed": passed, "failed": failed}


@contextmanager
def keep_busy(count: int) -> Iterator[None]:
    """So many processes that keep a core busy each."""
    burning = [subprocess.Popen([sys.executable, "-c", BURN]) for _ in range(count)]
    try:
        yield
    finally:
        for process in burning:
            process.kill()
            process.wait()


def read_report(path: Path) -> tuple[int, list[str]]:
    """Of pytest's report in XML: how many tests passed, and those that failed, or broke in their set-up or end."""
    passed, failed = set(), set()
    for case in ET.parse(path).getroot().iter("testcase"):
        name = f"{case.get('classname')}::{case.get('name')}"
        if case.find("failure") is not None or case.find("error") is not None:
            failed.add(name)
        elif case.find("skipped") is None:
            passed.add(name)
    return len(passed - failed), sorted(failed)


def read_log(path: Path) -> list[Run]:
    """The runs of a log, in the order in which they were made."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def write_table(runs: Sequence[Run]) -> str:
    """All runs by commit and by how busy the machine was, and the tests that failed in at least one of them."""
    groups: dict[tuple[str, int], list[Run]] = defaultdict(list)
    for run in runs:
        groups[run["commit"], run["busy"]].append(run)
    lines = ["| commit | busy | runs | failed | passed tests | seconds |", "|---|---|---|---|---|---|"]
    for (commit, busy), found in groups.items():
        bad = sum(bool(run["failed"]) for run in found)
        passed, seconds = ([run[name] for run in found] for name in ("passed", "seconds"))
        spans = f"{min(passed)}-{max(passed)} | {min(seconds):.0f}-{max(seconds):.0f}"
        lines.append(f"| {commit} | {busy} | {len(found)} | {bad} | {spans} |")
    counts = Counter(name for run in runs for name in run["failed"])
    if counts:
        last = {name: f"{run['date']}, {run['commit']}" for run in runs for name in run["failed"]}
        busy = Counter(name for run in runs for name in run["failed"] if run["busy"])
        lines += ["", f"| test | failed, of {len(runs)} runs | of them busy | last |", "|---|---|---|---|"]
        lines += [f"| {name} | {times} | {busy[name]} | {last[name]} |" for name, times in counts.most_common()]
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=10, help="how often (default 10)")
    parser.add_argument("--busy", type=int, default=0, help="processes that keep a core busy meanwhile (default 0)")
    parser.add_argument("--log", type=Path, help="a file of lines of JSON, a line a run, to which runs are added")
    asked = parser.parse_args(arguments)
    folder = Path(f"{asked.log}.output" if asked.log else tempfile.mkdtemp(prefix="unisono-flaky-"))
    log = asked.log or folder / "runs.jsonl"
    folder.mkdir(parents=True, exist_ok=True)
    describe = ["git", "describe", "--always", "--abbrev=12", "--exclude=*", "--dirty"]
    commit = subprocess.run(describe, capture_output=True, text=True, check=True).stdout.strip()
    is_same = not commit.endswith("-dirty")  # a tree with changes is not the same twice
    counted = [run for run in read_log(log) if is_same and (run["commit"], run["busy"]) == (commit, asked.busy)]
    while len(counted) < asked.runs:
        counted.append(run := run_once(commit, asked.busy, folder))
        with log.open("a") as file:
            file.write(json.dumps(run) + "\n")
        failed, seconds = len(run["failed"]), run["seconds"]
        print(f"run {len(counted)} of {asked.runs}: {failed} failed, {seconds:.0f} s", flush=True)
    print(f"\n{write_table(read_log(log))}\n\nlog: {log}; output of failed runs: {folder}")
    return 1 if any(run["failed"] for run in counted) else 0


if __name__ == "__main__":
    sys.exit(main())
