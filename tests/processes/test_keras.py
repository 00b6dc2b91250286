"""`unisono.keras` below Keras' own `fit`, against Keras in one process on the whole batch."""

from __future__ import annotations

import os
import warnings
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import unisono as un

pytestmark = pytest.mark.skipif(find_spec("keras") is None, reason="Keras is not installed")
os.environ.setdefault("KERAS_BACKEND", "torch")
ROWS, BATCH, EPOCHS = 43, 8, 3
# What depends on where numbers are added up: Keras computes losses and metrics in float32.
ROUNDING = {"rtol": 0, "atol": 2e-6}


def data(rows: int = ROWS) -> tuple[Any, Any]:
    x = np.random.default_rng(0).normal(size=(rows, 6))
    return x, x.sum(1, keepdims=True)


seen: dict[str, int] = {}


def make(seed: int, *more: Any, counts: bool = False) -> Any:
    import keras

    class Count(keras.layers.Layer):  # type: ignore[misc]
        """Counts the rows that the model is trained on."""

        def call(self, x: Any, training: bool = False) -> Any:
            if training and x.device.type != "meta":
                seen["rows"] = seen.get("rows", 0) + len(x)
            return x

    keras.config.set_floatx("float64")
    keras.utils.set_random_seed(seed)
    layers = [
        *([Count()] if counts else []),
        keras.layers.Dense(8, activation="tanh", kernel_regularizer="l2"),
        *more,
        keras.layers.Dense(1),
    ]
    return keras.Sequential(layers)  # without an input: fit builds it


def compile_model(model: Any) -> None:
    import keras

    falling = keras.optimizers.schedules.ExponentialDecay(0.05, 5, 0.9)
    model.compile(keras.optimizers.Adam(falling, clipnorm=0.5), loss="mse", metrics=["mae"])


def collect(model: Any, fitted: Any, **more: Any) -> dict[str, Any]:
    return {
        "weights": model.get_weights(),
        "history": fitted.history,
        "evaluated": model.evaluate(*data(21), verbose=0),
        "few": model.evaluate(*data(1), verbose=0),
        "predicted": model.predict(data(21)[0], verbose=0),
        **more,
    }


def fit(spec: str, *layers: Any, **asked: Any) -> dict[str, Any]:
    import unisono.keras

    model = make(
        un.join().rank, *layers, counts=spec == "allreduce"
    )  # every worker begins elsewhere, and gets rank 0's
    with unisono.keras.scope(spec):
        compile_model(model)
    common = {"batch_size": BATCH, "epochs": EPOCHS, "shuffle": False, "validation_data": data(13)}
    fitted = model.fit(*data(), **{**common, **asked})
    found = collect(model, fitted, applies="apply" in vars(model.optimizer))
    again = model.evaluate(*data(13), verbose=0)
    return found | {"rows": seen.pop("rows", 0), "validated": again}


def fit_weighted() -> dict[str, Any]:
    """From a DataLoader, and from arrays with weights of classes; with shuffling, which must be alike everywhere."""
    import unisono.keras

    model = make(0)
    compile_model(model)
    unisono.keras.parallel(model)
    x, y = data()
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*map(torch.tensor, (x, y))), batch_size=BATCH)
    model.fit(loader, epochs=1, verbose=0)
    labels = (y > 0).astype(int)
    found = model.fit(x, labels, BATCH, 2, verbose=0, class_weight={0: 0.5, 1: 2.0}, validation_split=0.25)
    steps = model.fit(x, y, batch_size=BATCH, epochs=2, verbose=0, steps_per_epoch=4, shuffle=False)
    return collect(model, found, steps=steps.history)


def refuse(specs: list[str]) -> dict[str, str]:
    import unisono.keras

    model = make(0)
    compile_model(model)
    found = {}
    for spec in specs:
        with pytest.raises(ValueError, match="does not go with Keras") as caught:
            unisono.keras.parallel(model, spec)
        found[spec] = str(caught.value)
    unisono.keras.parallel(model)
    with pytest.raises(TypeError, match="got list_iterator"):
        model.fit(iter([data()] * 3), verbose=0)
    return found


def work(folder: Path) -> dict[str, Any]:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    import keras

    callbacks = [
        keras.callbacks.ModelCheckpoint(str(folder / f"rank{un.join().rank}.keras")),
        keras.callbacks.EarlyStopping(monitor="val_loss", patience=5, restore_best_weights=True),
        keras.callbacks.TerminateOnNaN(),
    ]
    found: dict[str, Any] = {
        "allreduce": fit("allreduce"),
        "losing": fit("allreduce", batch_size=2, epochs=1),  # 43 rows: in the last batch one worker has none
        "dropout": fit("allreduce", keras.layers.Dropout(0.5), keras.layers.BatchNormalization()),
        "local_sgd": fit("local_sgd(every=4, start=0)", callbacks=callbacks, verbose=0),
        "weighted": fit_weighted(),
        "refused": refuse(["zero(stage=1)", "qadam", "shared", "crossbow", "parameter_server", "torch:ddp"]),
    }
    un.join().barrier()
    loaded = keras.saving.load_model(folder / "rank0.keras")
    return found | {"loaded": loaded.get_weights(), "bytes": un.join().ledger.by_tag()}


def alone(*, batch_size: int = BATCH, epochs: int = EPOCHS) -> dict[str, Any]:
    """Keras itself, in one process."""
    model = make(0)
    compile_model(model)
    fitted = model.fit(
        *data(), batch_size=batch_size, epochs=epochs, shuffle=False, verbose=0, validation_data=data(13)
    )
    return collect(model, fitted)


def one_worker() -> dict[str, Any]:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    return {"allreduce": alone(), "losing": alone(batch_size=2, epochs=1), "weighted": fit_weighted()}


def assert_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    for name in ("weights", "evaluated", "few", "predicted"):
        for mine, theirs in zip(found[name], expected[name], strict=True):
            np.testing.assert_allclose(mine, theirs, **ROUNDING, err_msg=name)
    assert found["history"].keys() == expected["history"].keys()
    for name, values in expected["history"].items():
        np.testing.assert_allclose(found["history"][name], values, **ROUNDING, err_msg=name)


def test_keras_trains_as_one_process(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    [expected] = un.launch(one_worker, workers=1, timeout_s=110)
    capfd.readouterr()
    every = un.launch(work, workers=2, args=(tmp_path,), timeout_s=110)
    assert "[1]" not in capfd.readouterr().out, "the progress bar is on rank 0 alone"
    for found in every:
        for name in ("allreduce", "losing", "weighted"):
            assert_same(found[name], expected[name])
        assert not found["allreduce"]["applies"], "Keras' own optimizer after fit"
        last = [found["local_sgd"]["history"][name][-1] for name in ("val_loss", "val_mae")]
        np.testing.assert_allclose(last, found["local_sgd"]["validated"], **ROUNDING, err_msg="of the agreed model")
        for spec, said in found["refused"].items():
            assert spec in said
    assert sum(found["allreduce"]["rows"] for found in every) == EPOCHS * ROWS, "each row was one worker's"
    np.testing.assert_allclose(every[0]["weighted"]["steps"]["loss"], expected["weighted"]["steps"]["loss"], **ROUNDING)
    for name in ("dropout", "local_sgd"):  # what all agree on
        first, second = (found[name] for found in every)
        assert first["history"] == second["history"]
        for mine, other in zip(first["weights"], second["weights"], strict=True):
            np.testing.assert_array_equal(mine, other)
        np.testing.assert_array_equal(first["predicted"], second["predicted"])
    assert [path.name for path in tmp_path.iterdir()] == ["rank0.keras"]
    for mine, saved in zip(every[1]["local_sgd"]["weights"], every[1]["loaded"], strict=True):
        np.testing.assert_array_equal(mine, saved)
