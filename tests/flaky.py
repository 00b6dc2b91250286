"""`make flaky RUNS=10`: the whole pool again and again, and a table of the tests that failed at least once.

    python tests/flaky.py --runs 10             a machine that does nothing else
    python tests/flaky.py --runs 10 --busy 2    beside two processes that keep a core busy each

Exits with 1 if anything failed. The output of every failed run stays in the folder that is named at the end.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ET
from collections import Counter
from pathlib import Path

POOL = ("-n", "3", "--no-loadscope-reorder", "--timeout=300", "-m", "not alone", "--most", "-p", "no:cacheprovider")
BURN = "while True: pass"


def run_once(number: int, folder: Path) -> tuple[list[str], float]:
    """The tests that failed or broke in one run of the pool, and its seconds."""
    report, log = folder / f"{number}.xml", folder / f"{number}.log"
    began = time.monotonic()
    with log.open("w") as output:
        command = [sys.executable, "-m", "pytest", "-q", *POOL, f"--junitxml={report}", "tests"]
        status = subprocess.run(command, stdout=output, stderr=subprocess.STDOUT, check=False).returncode
    seconds = time.monotonic() - began
    if not report.exists():
        return [f"the run itself ended with {status}: {log}"], seconds
    cases = ET.parse(report).getroot().iter("testcase")
    failed = [f"{case.get('classname')}::{case.get('name')}" for case in cases if find_failure(case)]
    if not failed and status == 0:
        log.unlink()
    return failed or ([f"no test failed, but the run ended with {status}: {log}"] if status else []), seconds


def find_failure(case: ET.Element) -> bool:
    """Whether a test failed, or broke in its set-up or end."""
    return case.find("failure") is not None or case.find("error") is not None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=10, help="how often (default 10)")
    parser.add_argument("--busy", type=int, default=0, help="processes that keep a core busy meanwhile (default 0)")
    asked = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="unisono-flaky-"))
    busy = [subprocess.Popen([sys.executable, "-c", BURN]) for _ in range(asked.busy)]
    failures: Counter[str] = Counter()
    bad = 0
    try:
        for number in range(1, asked.runs + 1):
            failed, seconds = run_once(number, folder)
            failures.update(failed)
            bad += bool(failed)
            print(f"run {number} of {asked.runs}: {len(failed)} failed, {seconds:.0f} s", flush=True)
    finally:
        for process in busy:
            process.kill()
            process.wait()
    print(f"\n{bad} of {asked.runs} runs failed beside {asked.busy} busy processes; logs in {folder}")
    if failures:
        print("\n| test | runs it failed in |\n|---|---|")
        for name, times in failures.most_common():
            print(f"| {name} | {times} |")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
