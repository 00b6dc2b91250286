"""The examples of the plugs, as their libraries' tutorials have them, by two workers."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

pytestmark = pytest.mark.timeout(300)
ROOT = Path(__file__).parents[2]
LAUNCHERS = {
    "unisono": ["-m", "unisono", "run", "-n", "2"],
    "torchrun": ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"],
}


@pytest.mark.parametrize(
    ("library", "file", "launcher", "least"),
    [
        ("transformers", "hf_text_classification.py", "torchrun", 0.65),
        ("keras", "keras_convnet.py", "unisono", 0.5),
        ("skorch", "skorch_quickstart.py", "unisono", 0.6),
    ],
)
def test_two_workers_learn_what_the_tutorial_teaches(library: str, file: str, launcher: str, least: float) -> None:
    if find_spec(library) is None:
        pytest.skip(f"{library} is not installed")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "src"), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, *LAUNCHERS[launcher], f"examples/{file}"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    reached = [float(x) for x in re.findall(r"(?:^|\] )(?:Test )?accuracy:? ([0-9.]+)$", done.stdout, re.M | re.I)]
    assert len(reached) in (1, 2), done.stdout
    assert len(set(reached)) == 1
    assert reached[0] > least
