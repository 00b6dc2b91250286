"""What the benchmarks share: both sides in one run, interleaved; medians; one JSON line at the end."""

from __future__ import annotations

import json
import platform
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any


def interleaved(
    sides: Mapping[str, Callable[[], Any]], *, repeats: int, warmup: int = 2, before: Callable[[], Any] | None = None
) -> dict[str, float]:
    """Median seconds of each side, taken in turn; `before` (a barrier) runs untimed before each."""
    times: dict[str, list[float]] = {name: [] for name in sides}
    for i in range(warmup + repeats):
        for name, run in sides.items():
            if before is not None:
                before()
            start = time.perf_counter()
            run()
            if i >= warmup:
                times[name].append(time.perf_counter() - start)
    return {name: statistics.median(taken) for name, taken in times.items()}


def finish(results: Mapping[str, Any]) -> None:
    """Print the one JSON line, with what it was measured on."""
    import torch

    where = {"torch": torch.__version__, "python": platform.python_version(), "machine": platform.machine()}
    print(json.dumps({**{k: round(v, 4) if isinstance(v, float) else v for k, v in results.items()}, **where}))
