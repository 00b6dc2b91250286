"""What the benchmarks share: both sides in one run, interleaved; medians; one JSON line at the end."""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any


def interleaved(
    sides: Mapping[str, Callable[[], Any]],
    *,
    repeats: int,
    warmup: int = 2,
    before: Callable[[], Any] | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, float]:
    """Median seconds of each side, taken in turn; `before` (a barrier) runs untimed before each."""
    times: dict[str, list[float]] = {name: [] for name in sides}
    for i in range(warmup + repeats):
        for name, run in sides.items():
            if before is not None:
                before()
            start = clock()
            run()
            if i >= warmup:
                times[name].append(clock() - start)
    return {name: statistics.median(taken) for name, taken in times.items()}


def added(
    sides: Mapping[str, Callable[[], Any]], to: Callable[[], Any], *, repeats: int, warmup: int = 2
) -> tuple[float, dict[str, float]]:
    """Median seconds of `to`, and the median of what each side takes longer than the `to` right before it: a host
    whose clock goes up and down does it to both."""
    own: list[float] = []
    more: dict[str, list[float]] = {name: [] for name in sides}
    for i in range(warmup + repeats):
        for name, run in sides.items():
            start = time.perf_counter()
            to()
            between = time.perf_counter()
            run()
            if i >= warmup:
                own.append(between - start)
                more[name].append(time.perf_counter() - between - own[-1])
    return statistics.median(own), {name: statistics.median(taken) for name, taken in more.items()}


@contextmanager
def keep_busy(processes: int) -> Iterator[None]:
    """So many other processes compute meanwhile, as on a machine that others use too."""
    others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(processes)]
    try:
        yield
    finally:
        for other in others:
            other.kill()
            other.wait()


def finish(results: Mapping[str, Any]) -> None:
    """Print the one JSON line, with what it was measured on."""
    import torch

    kept = {k: _rounded(v) if isinstance(v, float) else v for k, v in results.items()}
    where = {"torch": torch.__version__, "python": platform.python_version(), "machine": platform.machine()}
    print(json.dumps({**kept, **where}))


def _rounded(x: float) -> float:
    """Four places, or four digits where that is more."""
    return round(x, 4) if abs(x) >= 0.1 else float(f"{x:.4g}")


def on_hosts(
    arguments: Sequence[str], *, hosts: int, mbit: float | None, timeout_s: float = 600, by_transport: bool = False
) -> dict[str, Any]:
    """Run this script with `arguments` once on each of `hosts` emulated hosts; what rank 0 gave to `tell`.

    `mbit`: None for messages over loopback as fast as they go; needs no rights. `by_transport`: the workers' own
    transport holds bytes back, instead of the kernel; needs none either.
    """
    from unisono.launchers.lab.hosts import EmulatedHosts
    from unisono.launchers.runtime.link_emulation import Link

    link = Link() if mbit is None else Link(mbit * 1e6)
    with nullcontext() if by_transport or mbit is None else EmulatedHosts(hosts, links=[link] * hosts) as net:
        workers = []
        for rank in range(hosts):
            env = {
                **os.environ,
                "RANK": str(rank),
                "WORLD_SIZE": str(hosts),
                "LOCAL_RANK": "0",
                "LOCAL_WORLD_SIZE": "1",
                "MASTER_ADDR": "127.0.0.1" if net is None else net.address(0),
                "MASTER_PORT": "29500",
                "GLOO_SOCKET_IFNAME": "lo" if net is None else net.interface,
                "OMP_NUM_THREADS": "1",
            }
            command, how = (
                [sys.executable, sys.argv[0], *arguments],
                {"stdout": -1 if rank == 0 else None, "text": True},
            )
            if net is None:
                env |= {"UNISONO_NET": "" if mbit is None else str(link), "UNISONO_HOST": f"host{rank}"}
                workers.append(subprocess.Popen(command, env=env, **how))
            else:
                workers.append(net.start(rank, command, env, **how))
        try:
            output, _ = workers[0].communicate(timeout=timeout_s)
        finally:
            for worker in workers:
                worker.kill()
                worker.wait()
    told: dict[str, Any] = json.loads(next(line for line in output.splitlines() if line.startswith("RESULT "))[7:])
    return told


def tell(found: Mapping[str, Any]) -> None:
    """Hand results to the process that started the hosts."""
    print("RESULT " + json.dumps(found), flush=True)
