"""Where an extra is not installed, what needs it says which one to install."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

# Run in a process that finds none of the optional packages: what each part then says.
PROGRAM = """
import importlib, json, pathlib, sys

MISSING = set(sys.argv[1].split())

class Without:
    def __init__(self, finder):
        self.finder = finder
    def find_spec(self, name, path=None, target=None):
        return None if name.partition(".")[0] in MISSING else self.finder.find_spec(name, path, target)

sys.meta_path[:] = [Without(finder) for finder in sys.meta_path]

import unisono as un
from unisono.launchers.launch_function import _pack
from unisono.observe.reports.page import draw
from unisono.observe.runs.sinks import read_asked
from unisono.launchers.runtime.launch_env import Place
from unisono.world.stores import open_engine_store

CASES = {
    "plots": lambda: draw(None, pathlib.Path("x.png")),
    "notebook": lambda: _pack(lambda: None, (), {}),
    "sklearn": lambda: un.estimators.LeastSquares(),
    "parquet": lambda: importlib.import_module("unisono.estimators.formats")._import_parquet("x.parquet"),
    "remote": lambda: importlib.import_module("unisono.training.checkpoint.remote").find_place("s3://a/b"),
    "boost": lambda: importlib.import_module("unisono.boost.library")._import_library("xgboost"),
    "lightning": lambda: un.lightning.Strategy("allreduce"),
    "huggingface": lambda: importlib.import_module("unisono.huggingface"),
    "keras": lambda: importlib.import_module("unisono.keras"),
    "skorch": lambda: importlib.import_module("unisono.skorch"),
    "tensorboard": lambda: read_asked("tensorboard"),
    "wandb": lambda: read_asked("wandb"),
    "mlflow": lambda: read_asked("mlflow"),
    "otel": lambda: read_asked("otel"),
    "mpi": lambda: open_engine_store(Place("MPI", 0, 2, 0, 1), 0),
    "ray": lambda: un.on.ray().check(2),
    "spark": lambda: un.on.spark().check(2),
}
told = {}
for name, use in CASES.items():
    try:
        use()
        told[name] = "nothing"
    except Exception as error:
        told[name] = f"{type(error).__name__}: {error}"
print(json.dumps(told))
"""
PACKAGES = "matplotlib cloudpickle sklearn scipy pyarrow fsspec s3fs xgboost lightgbm lightning pytorch_lightning"
PACKAGES += " lightning_fabric transformers accelerate keras skorch tensorboard wandb mlflow opentelemetry mpi4py ray"
PACKAGES += " pyspark pandas"


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    command = [sys.executable, "-c", PROGRAM, PACKAGES.replace("fsspec ", "")]  # torch has that one
    folder = tmp_path_factory.mktemp("empty")
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder)
    assert done.returncode == 0, done.stderr
    found: dict[str, str] = json.loads(done.stdout)
    return found


EXTRAS = ("plots", "notebook", "sklearn", "parquet", "remote", "boost", "lightning")
EXTRAS += ("huggingface", "keras", "skorch", "tensorboard", "wandb", "mlflow", "otel", "mpi", "ray", "spark")


@pytest.mark.parametrize("extra", EXTRAS)
def test_what_is_missing_is_named_with_its_extra(told: dict[str, str], extra: str) -> None:
    assert f"unisono[{extra}]" in told[extra]


def test_every_extra_is_tried() -> None:
    if sys.version_info < (3, 11):
        pytest.skip("Python 3.10 cannot read TOML")
    import tomllib

    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    made_of_others = {"all", "dev", "docs", "examples"}  # the demo does without its data
    assert set(project["optional-dependencies"]) - made_of_others == set(EXTRAS)
