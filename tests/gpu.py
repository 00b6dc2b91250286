"""`make gpu PYTHON=python3`: every CUDA test and every benchmark that has a part for GPUs, in pieces of a few minutes.

    python tests/gpu.py                    pieces one after the other, for 8 minutes; the same again: what is left
    python tests/gpu.py --minutes 30       for half an hour
    python tests/gpu.py --list             the pieces, and what became of each
    python tests/gpu.py --again            those that failed or took too long too

A piece counts for the files that it was run with (src, tests, benchmarks): after a change of one all are left again. A
piece that the end of the time cuts is left. One that had 8 minutes and twice what it is thought to take, or as the
first of a call all of the time, and needed more, counts as failed. Each benchmark's line is appended to
benchmarks/results/gpu.jsonl with its date and versions, and one for the tests when the last of them has been run. Lines
stay in the state too, so that none is lost where the next call begins with another copy of the results.

Exits with 1 if a piece has failed, or where there is no CUDA device.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

from flaky import read_log, read_report

ROOT = Path(__file__).parents[1]
STATE = ROOT / "build" / "gpu" / "state.jsonl"
RESULTS = ROOT / "benchmarks" / "results" / "gpu.jsonl"
NEEDS_CUDA = re.compile(r'reason="[^"]*CUDA device')  # by which --cuda selects tests (tests/conftest.py)
MINUTES = 8.0
PROBE = """
import json, platform, torch
found = torch.cuda.is_available() and torch.cuda.get_device_name()
print(json.dumps({"gpu": found, "torch": torch.__version__, "python": platform.python_version()}))
"""
BENCHMARKS = {  # with arguments that take a few minutes, and the minutes that they are known to take
    "step.py --gpu": 1.0,
    "step.py --gpt": 4.0,
    "learners.py --gpu": 1.0,
    "gpu_ipc.py": 1.0,
    "zero.py --optimizer muon --gpu": 3.0,
    "checkpoints.py --gpu --layers 14 --repeats 2": 5.0,
    "gpu_offload.py --parts floors": 2.0,
    "gpu_offload.py --parts speed": 5.0,
    "gpu_offload.py --parts budget": 5.0,
    "gpu_offload.py --parts disk": 5.0,
    "gpu_offload.py --parts largest --layers 64": 6.0,
    "gpu_reducers.py --repeats 15 --only dense bf16 fp16 powersgd_r1 powersgd_r4 topk topk_dgc": 4.0,
    "gpu_reducers.py --repeats 15 --only randomk qsgd nuqsgd bytegrad signsgd onebit": 4.0,
    "gpu_reducers.py --repeats 15 --only error_feedback_nuqsgd warmup_topk masked_powersgd accordion_powersgd": 4.0,
}
DATA = "build/evidence"  # of Fashion-MNIST: what `evidence_large.py prepare --data build/evidence` has made, if it has
if (ROOT / DATA / "images.npz").exists():
    BENCHMARKS[f"learners.py --gpu --data {DATA}"] = 4.0


class Piece(NamedTuple):
    """A file of tests, or a benchmark with its arguments; `minutes`: what it is thought to take."""

    name: str
    minutes: float
    is_test: bool

    def command(self, report: Path) -> list[str]:
        """What is run."""
        if self.is_test:
            options = ["-q", "-p", "no:cacheprovider", "--cuda", f"--junitxml={report}"]
            return [sys.executable, "-m", "pytest", *options, self.name]
        return [sys.executable, *f"benchmarks/{self.name}".split()]


Record = dict[str, Any]  # tree, piece, date, seconds, status, failed: names of tests, passed, line: of results


def find_pieces() -> list[Piece]:
    """Tests first: what they find wrong no benchmark makes good."""
    files = sorted(path.relative_to(ROOT) for path in (ROOT / "tests").rglob("test_*.py"))
    tests = [Piece(str(path), 1.0, True) for path in files if NEEDS_CUDA.search((ROOT / path).read_text("utf-8"))]
    return [*tests, *(Piece(name, minutes, False) for name, minutes in BENCHMARKS.items())]


def name_tree() -> str:
    """The files that a piece is run with: where they are copied to there may be no git."""
    found = sha256()
    for folder in ("src", "tests", "benchmarks"):
        for path in sorted(path for kind in ("*.py", "*.cpp") for path in (ROOT / folder).rglob(kind)):
            found.update(f"{path.relative_to(ROOT)}\0".encode() + path.read_bytes())
    return found.hexdigest()[:12]


# One piece ---------------------------------------------------------------------------------------------------


def run(piece: Piece, limit_s: float, folder: Path) -> Record:
    """Run it; its output stays in the folder unless all went well. `status`: passed, failed or too long."""
    date, began = time.strftime("%Y-%m-%d"), time.monotonic()
    name = "".join(letter if letter.isalnum() else "_" for letter in piece.name)[:80]
    report, output = folder / f"{name}.xml", folder / f"{name}.txt"
    report.unlink(missing_ok=True)
    path = os.pathsep.join(filter(None, [str(ROOT / "src"), os.environ.get("PYTHONPATH")]))
    with output.open("w") as file:
        how: Any = {"stdin": subprocess.DEVNULL, "stdout": file, "stderr": subprocess.STDOUT, "cwd": ROOT}
        process = subprocess.Popen(
            piece.command(report), env=os.environ | {"PYTHONPATH": path}, start_new_session=True, **how
        )
        try:
            ended = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            ended = None
        finally:  # also where somebody interrupts: nothing is left on the GPU
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    found: Record = {"piece": piece.name, "date": date, "seconds": round(time.monotonic() - began, 1)}
    found |= read_tests(report) if piece.is_test else {"line": read_line(output.read_text("utf-8", "replace"))}
    is_good = ended == 0 and (piece.is_test or found["line"])
    found["status"] = "too long" if ended is None else "passed" if is_good else "failed"
    for path_ in [output, report] if is_good else []:
        path_.unlink(missing_ok=True)
    return found


def read_tests(report: Path) -> Record:
    """How many passed, and which failed; nothing where pytest itself ended before its report."""
    if not report.exists():
        return {"passed": 0, "failed": []}
    passed, failed = read_report(report)
    return {"passed": passed, "failed": failed}


def read_line(output: str) -> Record | None:
    """The last line, if it is a benchmark's JSON with results in it."""
    last = output.strip().rpartition("\n")[2]
    try:
        found = json.loads(last)
    except json.JSONDecodeError:
        return None
    return found if isinstance(found, dict) and "skipped" not in found else None


# All of them -------------------------------------------------------------------------------------------------


def run_all(left: Sequence[Piece], tree: str, asked: argparse.Namespace) -> None:
    """One after the other until the time is over; each is written down when it has ended."""
    until = time.monotonic() + 60 * asked.minutes
    for i, piece in enumerate(left):
        rest = until - time.monotonic()
        if i and rest < 60 * piece.minutes:
            continue  # a shorter one may still fit
        most = 60 * max(MINUTES, 2 * piece.minutes)  # else one that hangs takes all of a long call
        found = run(piece, max(min(rest, most), 0.0), asked.state.parent)
        if i and found["status"] == "too long" and rest < most:
            print(f"{piece.name}: cut by the end of the time, left", flush=True)
            return
        with asked.state.open("a") as file:
            file.write(json.dumps({"tree": tree, **found}) + "\n")
        told = f", {found['passed']} tests" if piece.is_test else ""
        print(f"{piece.name}: {found['status']}{told}, {found['seconds']:.0f} s", flush=True)


def add_results(path: Path, records: Sequence[Record], pieces: Sequence[Piece], machine: Record) -> None:
    """Append the lines that the file has not: of benchmarks, and one of the tests if all of them have been run."""
    has = set(path.read_text("utf-8").splitlines()) if path.exists() else set()
    made = [record for record in records if record.get("line")]
    lines = [{"date": r["date"], "benchmark": r["piece"], **machine, **r["line"]} for r in made]
    tests = [r for r in records if r["piece"] in {piece.name for piece in pieces if piece.is_test}]
    if tests and len(tests) == sum(piece.is_test for piece in pieces):
        bad = [r["piece"] for r in tests if r["status"] != "passed"]
        counted = {"passed": sum(r["passed"] for r in tests), "failed": sum(len(r["failed"]) for r in tests)}
        when = {"date": max(r["date"] for r in tests), "benchmark": "tests --cuda"}
        lines.append({**when, **counted, "files_not_passed": bad, **machine})
    new = [text for text in map(json.dumps, lines) if text not in has]
    if new:
        with path.open("a", encoding="utf-8") as file:
            file.write("".join(f"{text}\n" for text in new))


def probe() -> Record:
    """The GPU's name and versions, asked by a process of its own: this one is to hold nothing of the GPU."""
    asked = subprocess.run([sys.executable, "-c", PROBE], capture_output=True, text=True, check=False)
    if asked.returncode:
        return {"gpu": "", "torch": (asked.stderr.strip().splitlines() or ["no torch"])[-1]}
    found: Record = json.loads(asked.stdout)
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=MINUTES, help=f"of this call (default {MINUTES:g})")
    parser.add_argument("--state", type=Path, default=STATE, help="what has been run, a line of JSON each")
    parser.add_argument("--results", type=Path, default=RESULTS, help="the file that benchmarks' lines are added to")
    parser.add_argument("--again", action="store_true", help="what failed counts as left")
    parser.add_argument("--list", action="store_true", help="run nothing")
    asked = parser.parse_args(arguments)
    machine = {} if asked.list else probe()
    if not asked.list and not machine["gpu"]:
        print(
            f"no CUDA device for {sys.executable} (torch: {machine['torch']}): where there is one, name a Python whose "
            "torch is built for it, as in `make gpu PYTHON=python3`",
            file=sys.stderr,
        )
        return 1
    asked.state.parent.mkdir(parents=True, exist_ok=True)
    pieces, tree = find_pieces(), name_tree()
    before = select(read_log(asked.state), tree, pieces)
    left = [p for p in pieces if p.name not in before or (asked.again and before[p.name]["status"] != "passed")]
    if not asked.list:
        run_all(left, tree, asked)
    done = select(read_log(asked.state), tree, pieces)
    if not asked.list:
        add_results(asked.results, list(done.values()), pieces, machine)
    return tell(pieces, done, asked)


def select(records: Sequence[Record], tree: str, pieces: Sequence[Piece]) -> dict[str, Record]:
    """Of each piece the last record with these files, in the order of the pieces."""
    last = {record["piece"]: record for record in records if record["tree"] == tree}
    return {piece.name: last[piece.name] for piece in pieces if piece.name in last}


def tell(pieces: Sequence[Piece], done: dict[str, Record], asked: argparse.Namespace) -> int:
    """What became of all, and the exit status."""
    left = [piece.name for piece in pieces if piece.name not in done]
    bad = [record for record in done.values() if record["status"] != "passed"]
    if asked.list:
        print("\n".join(f"{done[p.name]['status'] if p.name in done else 'left':<9}{p.name}" for p in pieces))
    for record in bad:
        tests = "".join(f"\n    {name}" for name in record.get("failed", ()))
        print(f"{record['status']}: {record['piece']}, output in {asked.state.parent}{tests}")
    print(f"{len(done) - len(bad)} of {len(pieces)} pieces passed, {len(bad)} did not, {len(left)} are left", end="")
    print(f" (the same command runs them): {', '.join(left)}" if left and not asked.list else "")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
