"""The example scripts, unchanged: alone, under `unisono run` with workers that are killed, and under torchrun the
same final loss."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from preloaded import Program

pytestmark = pytest.mark.timeout(400)
ROOT = Path(__file__).parents[2]
LAUNCHERS = {
    # The other waits for the replacement, so that the loss is that of two workers.
    "unisono": ["-m", "unisono", "run", "-n", "2:2", "--faults", "kill 0@7 in backward"],
    "torchrun": ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"],
}
# Few steps: rounding differs between 1 and 2 workers, and training makes small differences grow.
EXAMPLES = {
    "digits_cnn.py": ["--steps", "60", "--width", "16", "--lr", "0.1"],
    "char_rnn.py": ["--steps", "12", "--width", "32", "--length", "32"],
    "char_transformer.py": ["--steps", "12", "--width", "32", "--length", "32"],
    "two_optimizers.py": ["--steps", "12", "--width", "32", "--length", "32"],
}


def environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "src"), "COLUMNS": "200"}


def run(file: str | Path, *arguments: str) -> str:
    """What the program printed; it must end well."""
    program = Program(ROOT / file, *arguments, env=environment(), cwd=ROOT)
    out, err = program.communicate(timeout=300)
    assert program.returncode == 0, out + err
    return out


def launch(launcher: str, *arguments: str) -> str:
    """The same of a program under a launcher."""
    command = [sys.executable, *LAUNCHERS[launcher], *arguments]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment(), timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def final_loss(printed: str) -> float:
    losses = re.findall(r"final loss ([0-9.]+)", printed)
    assert len(losses) == 1, f"one line from rank 0 expected:\n{printed}"
    return float(losses[0])


@pytest.fixture(scope="module")
def alone() -> Callable[[str], float]:
    """The loss of an example without a launcher; each is run once."""
    return cache(lambda name: final_loss(run(f"examples/{name}", *EXAMPLES[name])))


@pytest.mark.parametrize(
    ("name", "launcher"), [*((name, "unisono") for name in EXAMPLES), ("char_transformer.py", "torchrun")]
)
def test_two_workers_reach_the_loss_of_one(name: str, launcher: str, alone: Callable[[str], float]) -> None:
    loss = final_loss(launch(launcher, f"examples/{name}", *EXAMPLES[name]))
    assert loss == pytest.approx(alone(name), rel=1e-3)


def test_a_run_is_repeated_exactly(alone: Callable[[str], float]) -> None:
    name = "char_rnn.py"
    assert final_loss(run(f"examples/{name}", *EXAMPLES[name])) == alone(name)


def test_more_training_gives_a_lower_loss(alone: Callable[[str], float]) -> None:
    short = final_loss(run("examples/digits_cnn.py", *EXAMPLES["digits_cnn.py"], "--steps", "1"))
    assert alone("digits_cnn.py") < 0.9 * short


def test_a_text_can_be_given(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("to be or not to be, that is the question. " * 400)
    loss = final_loss(run("examples/char_rnn.py", *EXAMPLES["char_rnn.py"], "--text", str(text), "--steps", "60"))
    assert loss < 2.5


def test_the_demo_compares_one_worker_with_two(tmp_path: Path) -> None:
    command, picture = tmp_path / "command.py", tmp_path / "picture.png"
    command.write_text("import sys\nfrom unisono.cli import main\nsys.exit(main())\n")
    printed = run(command, "demo", "--epochs", "2", "--width", "4", "--picture", str(picture))
    for word in ("accuracy", "samples/s", "speed-up", "compute", "communication", "waiting", "data"):
        assert re.search(rf"{word}.* \d.* \d", printed), f"{word} of both runs:\n{printed}"
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("name", EXAMPLES)
def test_examples_stay_under_80_lines(name: str) -> None:
    assert len((ROOT / "examples" / name).read_text().splitlines()) < 80
