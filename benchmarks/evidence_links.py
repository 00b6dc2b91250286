"""Part of evidence.py: a step's time on links of 100 Mbit/s and 1 Gbit/s between emulated hosts (docs/lab.md).

An MLP of 1.05 M parameters (4.2 MB in float32), 16 samples a worker, one thread each; 4 hosts of one worker, or 2 of
two where a method is about that. Time is from a barrier to a barrier over some windows, whole periods of methods that
exchange now and then; the median of a few such stretches. All workers share the machine's cores.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

from evidence_tasks import Variant, append

SPEEDS = (100.0, 1000.0)
WIDTH, LAYERS, BATCH = 512, 4, 16
PARAMETERS = LAYERS * (WIDTH * WIDTH + WIDTH)
STRETCHES = 3


class Timing:
    """How many windows go before, and how many are timed at once."""

    def __init__(self, name: str, spec: str) -> None:
        periods = {"local_sgd_32": 32, "local_sgd": 8, "crossbow_every_4": 4, "diloco": 20, "diloco_streaming": 20}
        self.windows = periods.get(name, 4)
        self.before = self.windows if name in periods else 2
        if name == "auto":
            self.before, self.windows = 60, 8  # trials
        if name.startswith("accordion"):
            self.before = 20  # two periods are `low`; then what it has decided
        self.spec = spec.replace("{tenth}", "1").replace("{quarter}", "1")


def time_step(name: str, variant: Variant, world: Any) -> float:
    """Seconds a window, in each worker."""
    import torch

    import unisono as un

    timing = Timing(name, variant.spec)
    torch.manual_seed(0)
    layers = [layer for _ in range(LAYERS) for layer in (torch.nn.Linear(WIDTH, WIDTH), torch.nn.Tanh())]
    model = torch.nn.Sequential(*layers)
    make = torch.optim.AdamW if variant.adam else torch.optim.SGD
    optimizer = make(model.parameters(), lr=1e-4)
    replica = un.parallel(model, optimizer, timing.spec, world=world)
    x = torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(world.rank))

    def windows(count: int) -> None:
        for _ in range(count):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()

    windows(timing.before)
    taken = []
    for _ in range(STRETCHES):
        world.barrier()
        start = time.perf_counter()
        windows(timing.windows)
        world.barrier()
        taken.append((time.perf_counter() - start) / timing.windows)
    replica.close()
    return statistics.median(taken)


def work(named: list[tuple[str, Variant]], mbit: float, path: str, session: str) -> None:
    """In each worker: one variant after the other; rank 0 appends each time to the file."""
    import unisono as un

    world = un.join(device="cpu")
    for name, variant in named:
        step_s = time_step(name, variant, world)
        if world.rank == 0:
            spec = Timing(name, variant.spec).spec
            line = {"kind": "link", "variant": name, "spec": spec, "mbit": mbit, "hosts": len(set(world.hosts))}
            append(path, line | {"step_s": step_s, "session": session})
