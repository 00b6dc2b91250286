"""Whether the live page keeps up: 64 simulated ranks that make 50 steps a second, a server on one core.

page_lag_s: from a line being written to its being in what the server has sent, the worst over all ranks and messages of
    a minute. Target 1.
page_busy: the part of that core that the server took.
page_memory_mb, page_memory_later_mb: of the server, after a quarter of the time and at the end.

The ranks' lines are written by one process, each when its step ends; a client takes the server's stream as a page does.
With more ranks (`--ranks 1000 --steps-a-second 5`) the figures are those of a large run.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))


def measure_page(*, ranks: int = 64, steps_s: float = 50.0, seconds: float = 60.0) -> dict[str, Any]:
    """The figures, as a dict."""
    from unisono.observe.live.beside import PageBeside, open_address

    with tempfile.TemporaryDirectory() as folder:
        writer = subprocess.Popen(
            [sys.executable, __file__, "--write", folder, "--ranks", str(ranks), "--steps-a-second", str(steps_s)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert writer.stdout is not None
        assert writer.stdin is not None
        run = Path(writer.stdout.readline().strip())
        opened = open_address()
        page = PageBeside(run, opened, stays=True)
        try:
            cores = sorted(os.sched_getaffinity(0))
            os.sched_setaffinity(page.pid, {cores[-1]})
            return _listen(opened.port, opened.token, run / "times", page.pid, seconds)
        finally:
            writer.stdin.close()
            writer.wait()
            writer.stdout.close()
            page.stop()


def _listen(port: int, token: str, times: Path, pid: int, seconds: float) -> dict[str, Any]:
    """Take the stream, and compare what is in it with when it was written."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    connection.request("GET", f"/{token}/events?view=recent")
    lines = iter(connection.getresponse())
    written = _Written(times)
    seen: dict[int, int] = {}
    lags: list[float] = []
    memory: list[float] = []
    begin = time.monotonic()
    busy = _read_busy(pid)
    while (passed := time.monotonic() - begin) < seconds:
        line = next(lines)
        now = time.time()
        if not line.startswith(b"data: "):
            continue
        memory += [_read_memory(pid)] * (len(memory) == int(4 * passed / seconds))
        for rank, _, _, step, *_ in json.loads(line[6:]).get("ranks", []):
            before = seen.get(rank, -1)
            if step > before >= 0:  # the oldest that is new has waited longest
                lags.append(now - written.when(before + 1))
            seen[rank] = step
    took = _read_busy(pid) - busy
    connection.close()
    steps = min(seen.values())
    return {
        "page_lag_s": max(lags),
        "page_lag_median_s": sorted(lags)[len(lags) // 2],
        "page_busy": took / seconds,
        "page_steps": steps,
        "page_memory_mb": memory[1],
        "page_memory_later_mb": _read_memory(pid),
    }


class _Written:
    """When each step was written, as the writer notes it."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("rb")
        self._times: list[float] = []

    def when(self, step: int) -> float:
        self._times += [float(line) for line in self._file.read().split()]
        return self._times[step]


def _read_busy(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _read_memory(pid: int) -> float:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


def _write(folder: Path, ranks: int, steps_s: float) -> None:
    """Write each step when it ends, until standard input is closed."""
    import select

    sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
    from simulated_run import SimulatedRun

    run = SimulatedRun(folder, ranks=ranks, steps_s=steps_s)
    with (run.folder / "times").open("w") as times:
        print(run.folder, flush=True)
        while not select.select([sys.stdin], [], [], 0.5 / steps_s)[0]:
            now = time.time()
            count = run.write(now)
            times.write(f"{now:.6f}\n" * count)
            times.flush()
    run.finish()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=64)
    parser.add_argument("--steps-a-second", type=float, default=50.0)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--write", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.write is not None:
        _write(options.write, options.ranks, options.steps_a_second)
        return
    from measure import finish

    finish(measure_page(ranks=options.ranks, steps_s=options.steps_a_second, seconds=options.seconds))


if __name__ == "__main__":
    main()
