"""From the command to the first collective on 2 workers, against torchrun; forked starts; what `import unisono` adds.

Keys: torchrun_over_ours (median seconds of torchrun with torch.distributed over `unisono run` with ours),
import_unisono_s (over `import torch`); from the call or command until both workers are in the function, or in the
script's first line after `import torch`: launch_again_s (a second `un.launch` in a program), launch_fresh_s (the same
without the fork server), warm_run_s (`unisono run --warm`, its server running), cold_run_s (without --warm).
"""

from __future__ import annotations

import argparse
import json
import os
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

# Prints the seconds from its argument, or from each call, until both workers were there.
SCRIPT = """
import sys, time
import torch
with open(f"{sys.argv[1]}-{__import__('os').environ['RANK']}", "w") as file:
    file.write(str(time.time()))
"""
PROGRAM = """
import json, sys, time, torch, unisono as un
def arrive():
    import torch
    return time.time()
taken = []
for _ in range(int(sys.argv[1])):
    start = time.time()
    taken.append(max(un.launch(arrive, workers=2)) - start)
print(json.dumps(taken))
"""


def time_launches(repeats: int, *, forked: bool) -> float:
    """Median seconds of every `un.launch` in a program but the first."""
    env = {name: value for name, value in os.environ.items() if name != "UNISONO_WARM"}
    env |= {} if forked else {"UNISONO_WARM": "0"}
    command = [sys.executable, "-c", PROGRAM, str(repeats + 1)]
    done = subprocess.run(command, env=env, check=True, capture_output=True, text=True)
    return statistics.median(json.loads(done.stdout)[1:])


def time_runs(folder: str, repeats: int, *, warm: bool) -> float:
    """Median seconds of `unisono run` until both workers are there; not counting the first."""
    script, times = Path(folder, "arrive.py"), Path(folder, "time")
    script.write_text(SCRIPT)
    env = {**os.environ, "UNISONO_WARM": str(Path(folder, "warm")) if warm else "0"}
    taken = []
    for _ in range(repeats + 1):
        start = time.time()
        command = [sys.executable, "-m", "unisono", "run", "-n", "2", str(script), str(times)]
        subprocess.run(command, env=env, check=True)
        taken.append(max(float(Path(f"{times}-{rank}").read_text()) for rank in range(2)) - start)
    if warm:
        subprocess.run([sys.executable, "-m", "unisono", "warm", "stop"], env=env, check=True, capture_output=True)
    return statistics.median(taken[1:])


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

        starts = {
            "launch_again_s": time_launches(5, forked=True),
            "launch_fresh_s": time_launches(5, forked=False),
            "warm_run_s": time_runs(folder, 5, warm=True),
            "cold_run_s": time_runs(folder, 5, warm=False),
        }
        seconds = interleaved({n: lambda n=n: run(n) for n in commands}, repeats=asked.repeats, warmup=1)
    print(", ".join(f"{name} {s:.2f} s" for name, s in seconds.items()))
    added = []
    for _ in range(asked.repeats):
        done = subprocess.run([sys.executable, "-c", IMPORT], check=True, capture_output=True, text=True)
        added.append(float(done.stdout))
        time.sleep(0.1)
    ratio = seconds["torchrun"] / seconds["ours"]
    finish({"torchrun_over_ours": ratio, "import_unisono_s": statistics.median(added), **starts})


if __name__ == "__main__":
    main()
