"""Libraries' own loops in elastic runs: a worker is killed in a step and another comes, under the real libraries; the
weights are those of one process in plain torch on the same global batches, so every sample counted once."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

SOURCES = Path(__file__).parents[2] / "src"
EPOCHS, SAMPLES, BATCH = 40, 48, 6  # of each of two workers
SETUP = f"""
import json, os, time, warnings
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset
EPOCHS, SAMPLES, BATCH = {EPOCHS}, {SAMPLES}, {BATCH}
draw = torch.Generator().manual_seed(0)
X = torch.randn(SAMPLES, 5, generator=draw, dtype=torch.float64)
Y = X @ torch.randn(5, 1, generator=draw, dtype=torch.float64)
is_late = "UNISONO_JOINING" in os.environ

def make_net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 1)).double()

def pace(step):
    "Let a worker that comes later catch up: the first wait until it has begun, and are slow until it has made a step."
    if is_late:
        open("joined", "w").close()
    elif step == 8:
        deadline = time.monotonic() + 150
        while not os.path.exists("come") and time.monotonic() < deadline:
            time.sleep(0.05)
    elif step > 8 and not os.path.exists("joined"):
        time.sleep(0.1)

def tell(net, steps):
    print(json.dumps([steps, [p.detach().flatten().tolist() for p in net.parameters()]]), flush=True)
"""
LIGHTNING = """
import logging
import lightning.pytorch as pl
import unisono.lightning
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
warnings.filterwarnings("ignore", category=UserWarning)
if is_late:
    open("come", "w").close()

class Rows(Dataset):
    def __len__(self):
        return SAMPLES

    def __getitem__(self, i):
        return X[i], Y[i]

class Module(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = make_net()

    def training_step(self, batch, _):
        x, y = batch
        return nn.functional.mse_loss(self.net(x), y)

    def on_train_batch_end(self, *_):
        pace(self.global_step)

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.9)}

module = Module()
quiet = {"enable_progress_bar": False, "logger": False, "enable_checkpointing": False, "enable_model_summary": False}
trainer = pl.Trainer(max_epochs=EPOCHS, accelerator="cpu", strategy=unisono.lightning.Strategy(),
                     accumulate_grad_batches=2, **quiet)
trainer.fit(module, DataLoader(Rows(), batch_size=BATCH, shuffle=False))
assert trainer.current_epoch == EPOCHS, trainer.current_epoch
tell(module.net, trainer.global_step)
"""
HUGGINGFACE = """
import unisono.huggingface
from transformers import Trainer, TrainerCallback, TrainingArguments
if is_late:
    open("come", "w").close()

class Rows(Dataset):
    def __len__(self):
        return SAMPLES

    def __getitem__(self, i):
        return {"x": X[i], "labels": Y[i]}

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = make_net()

    def forward(self, x, labels):
        return {"loss": nn.functional.mse_loss(self.net(x), labels)}

class InOrder(Trainer):
    def _get_train_sampler(self, *_):
        return torch.utils.data.SequentialSampler(Rows())

class Pace(TrainerCallback):
    def on_step_end(self, args, state, control, **_):
        pace(state.global_step)

model = Model()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
schedule = torch.optim.lr_scheduler.StepLR(optimizer, 10, 0.9)
args = TrainingArguments("out", per_device_train_batch_size=BATCH, num_train_epochs=EPOCHS, save_strategy="steps",
                         gradient_accumulation_steps=2, save_steps=30, save_total_limit=1, logging_strategy="no",
                         use_cpu=True, disable_tqdm=True, report_to=[], max_grad_norm=0)
trainer = InOrder(model, args, train_dataset=Rows(), optimizers=(optimizer, schedule),
                  callbacks=[unisono.huggingface.Callback(), Pace()])
trainer.train()
assert trainer.state.epoch == EPOCHS, trainer.state.epoch
tell(model.net, trainer.state.global_step)
"""
ACCELERATE = """
import unisono as un
import unisono.huggingface
if is_late:
    open("come", "w").close()

class Rows(Dataset):
    def __len__(self):
        return SAMPLES

    def __getitem__(self, i):
        return X[i], Y[i]

accelerator = unisono.huggingface.Accelerator(cpu=True, gradient_accumulation_steps=2)
net = make_net()
optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
loader = DataLoader(Rows(), batch_size=BATCH)
net, optimizer, loader = accelerator.prepare(net, optimizer, loader)
schedule = torch.optim.lr_scheduler.StepLR(optimizer.optimizer, 5, 0.9)
replica, = accelerator.replicas
for epoch in range(EPOCHS):
    for x, y in loader:
        with accelerator.accumulate(net):
            accelerator.backward(nn.functional.mse_loss(net(x), y))
            optimizer.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients:
            pace(replica.step)
    schedule.step()
net.eval()
assert sum(len(x) for x, _ in loader) == SAMPLES  # evaluation reads everything
tell(net, replica.step)
"""
KERAS = """
os.environ["KERAS_BACKEND"] = "torch"
import unisono.keras
import keras
if is_late:
    open("come", "w").close()
keras.config.set_floatx("float64")

class Pace(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        pace(int(self.model.optimizer.iterations))

class Rows(Dataset):
    def __len__(self):
        return SAMPLES

    def __getitem__(self, i):
        return X[i], Y[i]

model = keras.Sequential([keras.layers.Input((5,)), keras.layers.Dense(4, activation="tanh"), keras.layers.Dense(1)])
first, last = [layer for layer in make_net() if isinstance(layer, nn.Linear)]
model.set_weights([w.detach().numpy() for w in (first.weight.T, first.bias, last.weight.T, last.bias)])
with unisono.keras.scope():
    model.compile(optimizer=keras.optimizers.SGD(0.05, momentum=0.9), loss="mse", metrics=["mae"])
loader = DataLoader(Rows(), batch_size=2 * BATCH)
history = model.fit(loader, epochs=EPOCHS, verbose=0, callbacks=[Pace()], validation_data=(X.numpy(), Y.numpy()))
assert history.epoch[-1] == EPOCHS - 1, history.epoch
weights = [torch.as_tensor(w) for w in model.get_weights()]
found = [weights[0].T, weights[1], weights[2].T, weights[3]]
print(json.dumps([int(model.optimizer.iterations), [w.flatten().tolist() for w in found]]), flush=True)
"""


def train_alone(window: int, schedule_by: str) -> list[list[float]]:
    """The same global batches in one process, without Unisono."""
    names: dict[str, Any] = {}
    exec(SETUP, names)
    net, x, y = names["make_net"](), names["X"], names["Y"]
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    each = {"step": 10, "epoch": 5, "never": 10**9}[schedule_by]
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, each, 0.9)
    for _ in range(EPOCHS):
        for start in range(0, SAMPLES, 2 * BATCH * window):
            optimizer.zero_grad()
            for first in range(start, start + 2 * BATCH * window, 2 * BATCH):
                batch = slice(first, first + 2 * BATCH)
                (nn.functional.mse_loss(net(x[batch]), y[batch]) / window).backward()
            optimizer.step()
            if schedule_by != "epoch":
                schedule.step()
        if schedule_by == "epoch":
            schedule.step()
    return [p.detach().flatten().tolist() for p in net.parameters()]


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("library", "program", "window", "schedule_by", "tolerance"),
    [
        ("lightning", LIGHTNING, 2, "epoch", 1e-9),
        ("transformers", HUGGINGFACE, 2, "step", 1e-9),
        ("accelerate", ACCELERATE, 2, "epoch", 1e-9),
        ("keras", KERAS, 1, "never", 1e-5),  # Keras takes some means in 32 bits
    ],
)
def test_a_killed_worker_is_survived_and_another_joins(
    library: str, program: str, window: int, schedule_by: str, tolerance: float, tmp_path: Path
) -> None:
    if find_spec(library) is None:
        pytest.skip(f"needs {library}")
    (tmp_path / "train.py").write_text(SETUP + program)
    env = {**os.environ, "PYTHONPATH": str(SOURCES), "OMP_NUM_THREADS": "1", "UNISONO_RUNS": "off"}
    options = ["-n", "1:2", "--faults", "kill 1@5 in exchange", "--output", "prefix"]
    command = [sys.executable, "-m", "unisono", "run", *options, "train.py"]
    done = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=380, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "joined").exists(), done.stdout + done.stderr
    found = [json.loads(line[4:]) for line in done.stdout.splitlines() if line[4:6] in ("[" + d for d in "123456789")]
    assert len(found) == 2, done.stdout
    assert found[0] == found[1]
    steps, weights = found[0]
    assert steps == EPOCHS * SAMPLES // (2 * BATCH * window)
    expected = train_alone(window, schedule_by)
    assert weights == [pytest.approx(one, rel=tolerance, abs=tolerance) for one in expected]
