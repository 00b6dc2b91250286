"""Every method's claim, as its paper has it, beside what is measured here: one command a row.

python benchmarks/evidence.py topk                       # this row: its runs, on shaped links too, and what holds
python benchmarks/evidence.py --all --jobs 8 --part accuracy --out accuracy.jsonl
python benchmarks/evidence.py --all --part links --out links.jsonl
python benchmarks/evidence.py --page accuracy.jsonl links.jsonl    # results/evidence.jsonl and docs/evidence.md
python benchmarks/evidence.py demo ef21 --tune --out tune.jsonl    # learning rates: what exceptions come from

Each run is 4 workers, processes of one thread; a method and its reference begin with the same weights and see the same
samples, over --seeds seeds. Runs that rows have in common are made once. A run that fails is noted with its error, and
the others go on; with --resume what is in the file already is not run again. The rules by which a claim holds are in
evidence_rules.py, claims in evidence_claims.py, tasks in evidence_tasks.py, links in evidence_links.py.

Keys of the JSON line: <method>: holds, holds in part, does not hold here, not measured; runs, failed, seconds.
"""

from __future__ import annotations

import argparse
import datetime
import os
import shlex
import sys
import time
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parent))

import evidence_links
import evidence_tasks
from evidence_claims import ROWS, TWO_HOSTS, VARIANTS, links_of, of_row, variants_of
from evidence_page import PAGE, write_page
from evidence_rules import Results, read, verdict
from evidence_tasks import ALONE_ON, FINE, RATES, STEPS, TRAINED, TUNED, WORKERS, Run, append
from measure import finish

RESULTS = Path(__file__).parent / "results" / "evidence.jsonl"
TIMEOUT_S = 60  # a run, and to start: then the workers are stopped


class Bundle(NamedTuple):
    """Runs that one set of workers makes, one after the other."""

    runs: list[Run]


class Timed(NamedTuple):
    """Variants that one set of workers on emulated hosts is timed with."""

    names: list[str]
    hosts: int
    mbit: float

    def key(self, name: str) -> str:
        return f"{name} at {self.mbit:g} Mbit/s"


# What there is to do -----------------------------------------------------------------------------------------


def bundles(
    methods: list[str], seeds: int, steps: int | None, done: set[str], together: bool, tune: bool = False
) -> list[Bundle]:
    """The runs of these rows that are not done, each once: those of a variant in one bundle, or all `together`.
    `tune`: those of the search for a learning rate instead."""
    found: dict[tuple[str, str], None] = {}  # variant and task
    for method in methods:
        for task in ROWS[method].tasks:
            found |= dict.fromkeys((name, task) for name in variants_of(method, task))
    made: dict[str, Run] = {}
    grouped: dict[tuple[str, bool], list[Run]] = {}
    for name, task in found:
        count = min(steps or STEPS[task], STEPS[task]) if task not in TRAINED else steps or STEPS[task]
        if tune:
            rates = (FINE if task in ALONE_ON else RATES) if task in TRAINED else ()
            runs = [Run(task, VARIANTS[name].at(rate), TUNED, count) for rate in rates]
        else:
            runs = [Run(task, VARIANTS[name], seed, count) for seed in range(seeds)]
        kept = {run.key: run for run in runs if run.key not in done and run.key not in made}
        made |= kept
        grouped.setdefault(("" if together else name, task in ALONE_ON), []).extend(kept.values())
    return sorted((Bundle(runs) for runs in grouped.values() if runs), key=lambda b: -len(b.runs))


def timings(methods: list[str], speeds: list[float], done: set[tuple[str, float]]) -> list[Timed]:
    """The steps of these rows that were not timed, by layout and link."""
    names = list(dict.fromkeys(name for method in methods for name in links_of(method)))
    found = []
    for mbit in speeds:
        for hosts in (4, 2):
            kept = [n for n in names if (n in TWO_HOSTS) == (hosts == 2) and (n, mbit) not in done]
            found += [Timed(kept, hosts, mbit)] if kept else []
    return found


# Doing it ----------------------------------------------------------------------------------------------------


def run_bundle(bundle: Bundle, path: str, session: str) -> str:
    """All runs, in workers of one thread; what went wrong, or nothing. One that fails is noted, the rest goes on."""
    import torch  # noqa: F401  (workers are forked from a process that has it)

    import unisono as un

    left, failed = bundle.runs, []
    while left:
        given = (left, path, session)
        why = attempt(lambda given=given: un.launch(
            evidence_tasks.work, workers=1 if given[0][0].task in ALONE_ON else WORKERS, args=given, threads=1,
            output="rank0", timeout_s=sum(TIMEOUT_S * (1 + run.steps / 240) for run in given[0]),
        ))  # fmt: skip
        done = {line["key"] for line in read([Path(path)]) if line["kind"] == "run"}
        left = [run for run in left if run.key not in done]
        if why and left:
            append(path, {"kind": "error", "key": left[0].key, "error": why, "session": session})
            failed.append(f"{left[0].key}: {why}")
            left = left[1:]
    return "\n".join(failed)


def run_timed(timed: Timed, path: str, session: str) -> str:
    """All variants on one link; what went wrong, or nothing."""
    import unisono as un

    left, failed = timed.names, []
    net = f"{timed.mbit:g}mbit"
    while left:
        given = ([(name, VARIANTS[name]) for name in left], timed.mbit, path, session)
        why = attempt(lambda given=given: un.launch(
            evidence_links.work, workers=WORKERS, args=given, threads=1, output="rank0",
            timeout_s=TIMEOUT_S * (1 + len(given[0])), on=un.on.lab(hosts=timed.hosts, net=net),
        ))  # fmt: skip
        lines = read([Path(path)])
        done = {line["variant"] for line in lines if line["kind"] == "link" and line["mbit"] == timed.mbit}
        left = [name for name in left if name not in done]
        if why and left:
            append(path, {"kind": "error", "key": timed.key(left[0]), "error": why, "session": session})
            failed.append(f"{timed.key(left[0])}: {why}")
            left = left[1:]
    return "\n".join(failed)


def attempt(call: Any) -> str:
    """Why it failed, in a line; nothing where it did not."""
    try:
        call()
    except Exception as error:  # whatever it is, the other runs can still be made
        lines = [line for line in str(error).splitlines() if line.strip()]
        return f"{type(error).__name__}: {' / '.join([*lines[:1], *lines[-1:]])[:300]}"
    return ""


class Bar:
    """Progress with the time that is left: a line that is written over, or a line now and then where there is no
    terminal."""

    def __init__(self, total: int, path: Path) -> None:
        self.total, self.path, self.start, self.said = total, path, time.monotonic(), 0.0
        self.before = self._lines()

    def _lines(self) -> int:
        return sum(line["kind"] in ("run", "link", "error") for line in read([self.path])) if self.path.exists() else 0

    def show(self, *, last: bool = False) -> None:
        live, now = sys.stderr.isatty(), time.monotonic()
        if not last and now - self.said < (0.5 if live else 15):
            return
        self.said, done = now, self._lines() - self.before
        left = f"{(now - self.start) * (self.total - done) / done:.0f} s left" if done else "time left not known yet"
        filled = 30 * done // max(1, self.total)
        text = f"[{'#' * filled}{'.' * (30 - filled)}] {done}/{self.total}, {now - self.start:.0f} s, {left}"
        print(f"\r{text}   " if live else text, end="" if live and not last else "\n", file=sys.stderr, flush=True)


def run_all(todo: list[Bundle], timed: list[Timed], asked: argparse.Namespace, session: str) -> list[str]:
    """Accuracy with several rows at a time, then links one after the other; what failed."""
    path, failed = str(asked.out), []
    bar = Bar(sum(len(b.runs) for b in todo) + sum(len(t.names) for t in timed), asked.out)
    with ProcessPoolExecutor(asked.jobs, mp_context=get_context("spawn")) as pool:
        waiting: set[Future[str]] = {pool.submit(run_bundle, bundle, path, session) for bundle in todo}
        while waiting:
            done, waiting = wait(waiting, timeout=1, return_when=FIRST_COMPLETED)
            failed += [why for future in done for why in _outcome(future)]
            bar.show()
    for part in timed:
        failed += [why for why in [run_timed(part, path, session)] if why]
        bar.show(last=True)
    bar.show(last=True)
    return failed


def _outcome(future: Future[str]) -> list[str]:
    try:
        return [why for why in [future.result()] if why]
    except Exception as error:  # a process of the pool that was killed: the rest goes on, --resume makes it up
        return [f"{type(error).__name__}: {error}"]


# The command -------------------------------------------------------------------------------------------------


def begin_session(path: Path, part: str) -> str:
    """A line that says when, where and by which command the next lines were made."""
    import platform

    import torch

    now = datetime.datetime.now(datetime.timezone.utc)
    session = f"{now:%Y-%m-%d %H:%M:%S}"
    line = {"kind": "session", "session": session, "date": f"{now:%Y-%m-%d}", "part": part}
    line |= {"torch": torch.__version__, "python": platform.python_version()}
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    given = [Path(word).name if os.sep in word else word for word in sys.argv[1:]]  # where files are is of no interest
    line |= {"machine": f"{cores} cores", "command": shlex.join(["python", "benchmarks/evidence.py", *given])}
    path.parent.mkdir(parents=True, exist_ok=True)
    append(path, line)
    return session


def best_rates(methods: list[str], results: Results, steps: int | None) -> dict[tuple[str, str], float]:
    """Of the search, for each variant and task: the rate with the least held-out loss; all are printed."""
    found = {}
    named = {(name, task): None for m in methods for task in ROWS[m].tasks for name in variants_of(m, task)}
    for name, task in named:
        rates = FINE if task in ALONE_ON else RATES
        lines = {r: results.runs.get(Run(task, VARIANTS[name].at(r), TUNED, steps or STEPS[task]).key) for r in rates}
        losses = {rate: line["loss"] for rate, line in lines.items() if line and line.get("loss") is not None}
        if losses:
            found[name, task] = min(losses, key=losses.__getitem__)
            print(f"{name}, {task}: " + ", ".join(f"x {rate:g} {loss:.4f}" for rate, loss in losses.items()))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("methods", nargs="*", choices=[*ROWS, []], metavar="METHOD", help="rows to run (--list)")
    parser.add_argument("--all", action="store_true", help="all rows")
    parser.add_argument("--list", action="store_true", help="name the rows and their claims")
    parser.add_argument("--seeds", type=int, default=3, help="runs of each variant (default 3)")
    parser.add_argument("--steps", type=int, help="of each run (default: by the task)")
    rates = ", ".join(f"{rate:g}" for rate in RATES)
    parser.add_argument(
        "--tune", action="store_true", help=f"try learning rates {rates} times the variant's, with a seed of their own"
    )
    parser.add_argument("--jobs", type=int, default=1, help="sets of workers at the same time (default 1)")
    parser.add_argument("--part", choices=("accuracy", "links", "both"), default="both")
    parser.add_argument(
        "--mbit", type=float, nargs="+", default=list(evidence_links.SPEEDS), help="speeds of the links"
    )
    parser.add_argument(
        "--out", type=Path, default=Path("evidence.jsonl"), help="the file that results are appended to"
    )
    parser.add_argument("--resume", action="store_true", help="go on with the file: what is in it is not run again")
    told = f"make {PAGE.name} from these files, which become results/{RESULTS.name} (none: from that file as it is)"
    parser.add_argument("--page", type=Path, nargs="*", metavar="FILE", help=told)
    asked = parser.parse_args()
    asked.out = asked.out.absolute()
    if asked.page is not None:
        write_page(RESULTS, asked.page)
        finish({"page": PAGE.name})
        return
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # all of it is about CPUs
    methods = list(ROWS) if asked.all else asked.methods
    if asked.list or not methods:
        for method, row in ROWS.items():
            print(f"{method:<18}{row.claim} {row.source}")
        finish({"rows": len(ROWS)})
        return
    measure(methods, asked)


def measure(methods: list[str], asked: argparse.Namespace) -> None:
    """The rows, and the JSON line."""
    if asked.out.exists() and not asked.resume:
        raise SystemExit(f"{asked.out} exists: go on with it by --resume, or give another --out")
    lines = read([asked.out]) if asked.out.exists() else []
    before, start = Results(lines, VARIANTS), time.monotonic()
    together, done = asked.jobs == 1, set(before.runs)
    todo = [] if asked.part == "links" else bundles(methods, asked.seeds, asked.steps, done, together, asked.tune)
    timed = [] if asked.part == "accuracy" or asked.tune else timings(methods, asked.mbit, set(before.links))
    failed = run_all(todo, timed, asked, begin_session(asked.out, asked.part))
    for why in failed:
        print(f"failed: {why}", file=sys.stderr)
    results = Results(read([asked.out]), VARIANTS)
    if asked.tune:
        finish({f"{name}, {task}": rate for (name, task), rate in best_rates(methods, results, asked.steps).items()})
        return
    verdicts = {}
    for method in methods:
        mine = of_row(method, results)
        verdicts[method] = verdict(ROWS[method].checks, mine)
        print(f"{method}: {verdicts[method]}")
        for check in ROWS[method].checks:
            outcome = check.judge(mine)
            mark = {True: "yes", False: "NO ", None: " ? "}[outcome.holds]
            print(f"  {mark}  {check.text}: {outcome.told}")
    made = {"runs": sum(len(b.runs) for b in todo) + sum(len(t.names) for t in timed), "failed": len(failed)}
    finish({**verdicts, **made, "seeds": asked.seeds, "seconds": time.monotonic() - start})


if __name__ == "__main__":
    main()
