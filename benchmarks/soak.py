"""What a long run keeps: resident memory of 2 workers with a tiny model, over 100,000 steps of each strategy.

Keys, for each strategy: mb_10_X, mb_50_X, mb_100_X (resident MB of the larger worker after 10, 50 and 100 % of the
steps), kb_per_1000_X (growth from 10 to 100 %, in kB for 1,000 steps), objects_X (Python objects that the collector
knows, after 100 % less after 10 %).
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
import time
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from measure import finish

STRATEGIES = ("allreduce", "local_sgd(every=4)")
MARKS = (10, 50, 100)  # percent of the steps


def read_resident_bytes() -> int:
    """Pages of this process that lie in memory, shared ones too."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def train(strategy: str, steps: int) -> list[tuple[int, int]]:
    """In each worker: resident bytes and Python objects at every mark."""
    import torch

    import unisono as un

    torch.set_num_threads(1)
    torch.manual_seed(0)
    world = un.join(device="cpu")
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    replica = un.parallel(model, optimizer, strategy)
    x, y = torch.randn(4096, 8), torch.randn(4096, 2)
    shard = un.shard((x, y), batch_size=16, seed=0)
    len(gc.get_objects())  # the list of them is memory too, which the process keeps
    marks, seen, step, began = {max(1, steps * m // 100) for m in MARKS}, [], 0, time.perf_counter()
    while step < steps:
        for a, b in shard:
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(model(a), b).backward()
            optimizer.step()
            step += 1
            if step in marks:
                gc.collect()
                seen.append((read_resident_bytes(), len(gc.get_objects())))
                if world.rank == 0:
                    mb, s = seen[-1][0] / 1e6, time.perf_counter() - began
                    print(f"{strategy:<28} {step:>9,} steps  {mb:7.1f} MB  {s:6.0f} s", flush=True)
            if step == steps:
                break
    replica.consolidate()
    assert world.ledger.totals().steps == step, "the totals count every step"
    return seen


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--strategy", nargs="+", default=list(STRATEGIES), help="specs, one after the other")
    asked = parser.parse_args()
    if asked.steps < 10:
        parser.error("--steps: at least 10, so that there is a first tenth")
    import unisono as un

    results: dict[str, float] = {"steps": asked.steps}
    for strategy in asked.strategy:
        workers = un.launch(partial(train, strategy, asked.steps), workers=2)
        mb = [max(seen[i][0] for seen in workers) / 1e6 for i in range(len(MARKS))]
        results |= {f"mb_{mark}_{strategy}": value for mark, value in zip(MARKS, mb, strict=True)}
        results[f"kb_per_1000_{strategy}"] = (mb[-1] - mb[0]) * 1e6 / (0.9 * asked.steps)
        results[f"objects_{strategy}"] = max(seen[-1][1] - seen[0][1] for seen in workers)
    finish(results)


if __name__ == "__main__":
    main()
