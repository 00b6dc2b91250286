"""From the command to the first collective on 2 workers, against torchrun; and what `import unisono` adds.

Keys: torchrun_over_ours (median seconds of torchrun with torch.distributed over `unisono run` with ours),
import_unisono_s (over `import torch`).
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from measure import finish, interleaved

OURS = """
import torch, unisono as un
world = un.join(device="cpu")
world.all_reduce(torch.ones(1024), "sum").wait()
"""
THEIRS = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
dist.all_reduce(torch.ones(1024))
dist.destroy_process_group()
"""
IMPORT = """
import time
start = time.perf_counter()
import torch
middle = time.perf_counter()
import unisono
unisono.join, unisono.parallel, unisono.shard
print(time.perf_counter() - middle)
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=7)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        ours, theirs = Path(folder, "ours.py"), Path(folder, "theirs.py")
        ours.write_text(OURS)
        theirs.write_text(THEIRS)
        python = [sys.executable, "-m"]
        commands = {
            "torchrun": [*python, "torch.distributed.run", "--standalone", "--nproc_per_node", "2", str(theirs)],
            "ours": [*python, "unisono", "run", "-n", "2", str(ours)],
        }

        def run(name: str) -> None:
            subprocess.run(commands[name], check=True, capture_output=True)

        seconds = interleaved({n: lambda n=n: run(n) for n in commands}, repeats=asked.repeats, warmup=1)
    print(", ".join(f"{name} {s:.2f} s" for name, s in seconds.items()))
    added = []
    for _ in range(asked.repeats):
        done = subprocess.run([sys.executable, "-c", IMPORT], check=True, capture_output=True, text=True)
        added.append(float(done.stdout))
        time.sleep(0.1)
    finish({"torchrun_over_ours": seconds["torchrun"] / seconds["ours"], "import_unisono_s": statistics.median(added)})


if __name__ == "__main__":
    main()
