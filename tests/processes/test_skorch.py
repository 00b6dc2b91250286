"""`unisono.skorch` below skorch's own `fit`, against skorch in one process on the whole batch."""

from __future__ import annotations

import pickle
import warnings
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import unisono as un

pytestmark = pytest.mark.skipif(find_spec("skorch") is None, reason="skorch is not installed")
ROWS, BATCH, EPOCHS = 43, 8, 3  # the last batch of the 35 to train on has three rows


def data() -> tuple[Any, Any]:
    x = np.random.default_rng(0).normal(size=(ROWS, 6))
    return x, (x.sum(1) > 0).astype(np.int64)


class Module(nn.Module):
    """As in skorch's quickstart: it gives probabilities. Counts the rows that it is trained on."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.rows = 0
        self.net = nn.Sequential(nn.Linear(6, width), nn.Tanh(), nn.Linear(width, 2), nn.Softmax(-1)).double()

    def forward(self, x: Tensor) -> Tensor:
        self.rows += len(x) * self.training
        found: Tensor = self.net(x)
        return found


def mean_probability(net: Any, x: Any, y: Any) -> float:
    return float(net.predict_proba(x)[np.arange(len(y)), y].mean())


def settings() -> dict[str, Any]:
    import skorch

    return {
        "max_epochs": EPOCHS,
        "lr": 0.1,
        "batch_size": BATCH,
        "optimizer": torch.optim.Adam,
        "train_split": skorch.dataset.ValidSplit(5),
        "callbacks": [
            ("clip", skorch.callbacks.GradientNormClipping(0.5)),
            ("acc", skorch.callbacks.EpochScoring("accuracy", False, on_train=True, name="train_acc")),
            ("batch", skorch.callbacks.BatchScoring(mean_probability, False, on_train=True, name="train_log")),
        ],
    }


def collect(net: Any) -> dict[str, Any]:
    names = ["train_loss", "valid_loss", "valid_acc", *(n for n in ("train_acc", "train_log") if n in net.history[0])]
    return {
        "values": [p.detach().clone() for p in net.module_.parameters()],
        "history": np.array(net.history[:, names]),
        "proba": net.predict_proba(data()[0]),
        "type": type(net.module_).__name__,
        "rows": net.module_.rows,
    }


def fit(spec: str, **more: Any) -> dict[str, Any]:
    from unisono.skorch import NeuralNetClassifier

    torch.manual_seed(un.join().rank)  # every worker begins elsewhere, and gets rank 0's
    net = NeuralNetClassifier(Module, strategy=spec, **{**settings(), **more})
    return collect(net.fit(*data()))


def work(folder: Path) -> dict[str, Any]:
    import skorch

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    found = {spec: fit(spec) for spec in ("allreduce", "zero(stage=3)", "local_sgd(every=3, start=0)")}
    kept = skorch.callbacks.Checkpoint(dirname=str(folder), monitor="valid_loss_best", load_best=True)
    found["best"] = fit("gossip", callbacks=[kept])
    found["losing"] = fit("allreduce", batch_size=2, max_epochs=1)  # 35 rows: in the last batch one worker has none
    return found


def alone(**more: Any) -> dict[str, Any]:
    """skorch itself, in one process."""
    import skorch

    torch.manual_seed(0)
    return collect(skorch.NeuralNetClassifier(Module, verbose=0, **{**settings(), **more}).fit(*data()))


def test_skorch_trains_as_one_process(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    every = un.launch(work, workers=2, args=(tmp_path,), timeout_s=110)
    printed = capfd.readouterr().out
    assert printed.count("train_loss") == 5, "on rank 0 alone"
    expected, short = alone(), alone(batch_size=2, max_epochs=1)
    for found in every:
        for name, theirs in (("allreduce", expected), ("zero(stage=3)", expected), ("losing", short)):
            mine = found[name]
            for a, b in zip(mine["values"], theirs["values"], strict=True):
                torch.testing.assert_close(a, b, rtol=0, atol=1e-12)
            np.testing.assert_allclose(mine["history"], theirs["history"], rtol=0, atol=1e-6)
            np.testing.assert_allclose(mine["proba"], theirs["proba"], rtol=0, atol=1e-12)
            assert mine["type"] == "Module"
    for name in ("allreduce", "zero(stage=3)"):
        assert sum(found[name]["rows"] for found in every) == expected["rows"], "each row was one worker's"
    for name in ("local_sgd(every=3, start=0)", "best"):
        first, second = (found[name] for found in every)
        np.testing.assert_array_equal(first["history"], second["history"])
        np.testing.assert_array_equal(first["proba"], second["proba"])
    assert (tmp_path / "params.pt").is_file()


def test_grid_search_and_pickle_work_on_one_worker() -> None:
    from sklearn.model_selection import GridSearchCV

    from unisono.skorch import NeuralNetClassifier

    net = NeuralNetClassifier(Module, max_epochs=1, verbose=0, train_split=None)
    grid = {"strategy": ["allreduce", "powersgd(rank=1)"], "module__width": [4, 8], "lr": [0.1]}
    search = GridSearchCV(net, grid, cv=2, scoring="accuracy", refit=True).fit(*data())
    assert set(search.best_params_) == set(grid)
    best = search.best_estimator_
    assert best.strategy == search.best_params_["strategy"]
    again = pickle.loads(pickle.dumps(best))
    np.testing.assert_array_equal(again.predict_proba(data()[0]), best.predict_proba(data()[0]))
