"""Installs a wheel into an empty environment and uses it there, far from any checkout.

    python release/try_wheel.py dist/unisono-1.0.0-py3-none-any.whl [--constraints constraints.txt]

Runs `unisono --version`, `demo`, `doctor`, a program in two workers, and the conformance tests over a method of one's
own, from an empty folder.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

PROGRAM = """\
import torch, unisono as un

world = un.join("cpu")
torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
un.parallel(model, optimizer, "allreduce")
x, y = torch.randn(64, 4), torch.randn(64, 1)
for epoch in range(3):
    for a, b in un.shard((x, y), batch_size=16, seed=0):
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(a), b).backward()
        optimizer.step()
weights = world.gather_objects(model.weight.tolist())
assert all(each == weights[0] for each in weights), weights
print(f"rank {world.rank} of {world.size}: {un.__file__}")
"""

METHOD = """\
from unisono.facts import Example, Facts
from unisono.reducer import Reduced, staged


def mine():
    def stages(bucket, state, world):
        handle = world.all_reduce(bucket.flat, "mean", tag=bucket.tag)
        yield
        handle.wait()
        return Reduced(bucket.tensors), state

    return staged(lambda bucket: {}, stages, exact=True)


FACTS = Facts([Example("mine", exact=True, memory=False)])
"""


def make_environment(python: str, folder: Path, wheel: str, *packages: str, constraints: Path | None = None) -> Path:
    """A new environment with the wheel in it; its folder of programs."""
    subprocess.run([python, "-m", "venv", "--clear", str(folder)], check=True)
    programs = folder / "bin"
    bound = [] if constraints is None else ["-c", str(constraints)]
    command = [str(programs / "python"), "-m", "pip", "install", "-q", "--no-cache-dir", *bound, wheel, *packages]
    subprocess.run(command, check=True, env=clean_environment())
    return programs


def clean_environment(**more: str) -> dict[str, str]:
    """This environment, without what would lead to a checkout."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "UNISONO", "VIRTUAL"))}
    return {**kept, **more}


def run(words: Sequence[str], folder: Path, wanted: Sequence[str]) -> None:
    """Run a command in a folder; end where it fails, or does not say what is wanted."""
    print("$", *words, flush=True)
    env = clean_environment(UNISONO_RUNS=str(folder / "runs"))
    done = subprocess.run(words, cwd=folder, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    print(done.stdout, flush=True)
    missing = [word for word in wanted if word not in done.stdout]
    if done.returncode or missing:
        sys.exit(f"{' '.join(words)}: exit status {done.returncode}, missing in its output: {missing}")


def main() -> int:
    """Install, and run each command."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("wheel", type=Path)
    parser.add_argument("--python", default=sys.executable, help="the Python of the environment; default: this one")
    parser.add_argument("--constraints", type=Path, help="versions of what is installed with it")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="unisono-wheel-") as place:
        environment, empty = Path(place, "environment"), Path(place, "empty")
        empty.mkdir()
        wheel = options.wheel.resolve()
        programs = make_environment(options.python, environment, str(wheel), "pytest", constraints=options.constraints)
        unisono, version = str(programs / "unisono"), wheel.name.split("-")[1]
        run([unisono, "--version"], empty, [f"unisono {version}"])
        run([unisono, "demo", "--epochs", "3", "--width", "8"], empty, ["2 workers", "speed-up", "unisono[plots]"])
        run(
            [unisono, "doctor"], empty, ["shared memory: works", "messages between hosts: works", f"unisono: {version}"]
        )
        (empty / "train.py").write_text(PROGRAM)
        where = str(environment)
        run([unisono, "run", "-n", "2", "train.py"], empty, [f"rank 0 of 2: {where}", f"rank 1 of 2: {where}"])
        run([unisono, "report", "last"], empty, ["allreduce"])
        (empty / "methods/reducers").mkdir(parents=True)
        (empty / "methods/reducers/mine.py").write_text(METHOD)
        run(
            [unisono, "run", "-n", "2", "--methods", "methods", "--strategy", "mine", "train.py"],
            empty,
            ["rank 1 of 2"],
        )
        run([unisono, "conformance", "methods"], empty, [" passed"])
    print(f"{wheel.name} works in an empty environment")
    return 0


if __name__ == "__main__":
    sys.exit(main())
