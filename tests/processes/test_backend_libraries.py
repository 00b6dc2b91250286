"""Accelerate, Lightning and the Hugging Face Trainer over the backend: their own loops, with one word changed."""

from __future__ import annotations

import importlib.util
import os
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import unisono as un

BACKENDS = ("gloo", "unisono")
ROWS, WIDTH = 24, 6


def needs(name: str) -> Any:
    return pytest.mark.skipif(importlib.util.find_spec(name) is None, reason=f"{name} is not installed")


def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(ROWS, WIDTH, generator=generator)
    return x, x.sum(1, keepdim=True)


def make() -> nn.Module:
    torch.manual_seed(11)
    return nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, 1))


def values(model: nn.Module) -> list[float]:
    return [float(p.detach().double().sum()) for p in model.parameters()]


def over_both(train: Any, *args: Any) -> list[list[float]]:
    """In each worker: what `train(backend)` has learned over gloo, and over unisono."""
    import torch.distributed as dist

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    os.environ["HF_HUB_OFFLINE"] = "1"
    found = []
    for backend in BACKENDS:
        found.append(train(backend, *args))
        assert dist.get_backend() == backend
        dist.destroy_process_group()
    return found


def check(train: Any, *args: Any) -> None:
    """Both ranks have learned the same, and over both backends."""
    first, second = un.launch(over_both, 2, args=[train, *args], threads=1, timeout_s=110)
    assert first == second
    theirs, ours = first
    assert ours == pytest.approx(theirs, abs=1e-6)
    assert theirs != pytest.approx(values(make()), abs=1e-3), "nothing was learned"


# Accelerate --------------------------------------------------------------------------------------------------


def train_with_accelerate(backend: str) -> list[float]:
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, PartialState
    from torch.utils.data import DataLoader, TensorDataset

    AcceleratorState._reset_state(reset_partial_state=True)
    PartialState._reset_state()
    torch.distributed.init_process_group(backend)  # on CPUs, Accelerate would itself choose gloo, whatever it is told
    accelerator = Accelerator(cpu=True)
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    batches = DataLoader(TensorDataset(*data()), batch_size=4)
    model, optimizer, batches = accelerator.prepare(model, optimizer, batches)
    assert accelerator.num_processes == 2
    for _ in range(2):
        for x, y in batches:
            optimizer.zero_grad()
            accelerator.backward(nn.functional.mse_loss(model(x), y))
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
    total = accelerator.gather_for_metrics(torch.ones(3)).sum()
    assert total == 6
    return values(accelerator.unwrap_model(model))


@needs("accelerate")
def test_accelerate() -> None:
    check(train_with_accelerate)


# Lightning ---------------------------------------------------------------------------------------------------


def train_with_lightning(backend: str, folder: str) -> list[float]:
    import lightning
    from lightning.pytorch.plugins.environments import TorchElasticEnvironment
    from lightning.pytorch.strategies import DDPStrategy
    from torch.utils.data import DataLoader, TensorDataset

    class Regression(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = make()

        def training_step(self, batch: Any, _: int) -> Tensor:
            loss = nn.functional.mse_loss(self.net(batch[0]), batch[1])
            self.log("loss", loss, sync_dist=True)
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.05)

    model = Regression()
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=2,
        max_epochs=2,
        strategy=DDPStrategy(process_group_backend=backend),
        plugins=[TorchElasticEnvironment()],
        default_root_dir=folder,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, DataLoader(TensorDataset(*data()), batch_size=4))
    return values(model.net)


@needs("lightning")
def test_lightning(tmp_path: Path) -> None:
    check(train_with_lightning, str(tmp_path))


# The Hugging Face Trainer ------------------------------------------------------------------------------------


def train_with_transformers(backend: str, folder: str) -> list[float]:
    from accelerate.state import AcceleratorState, PartialState
    from torch.utils.data import Dataset
    from transformers import Trainer, TrainingArguments

    class Rows(Dataset[Any]):
        def __len__(self) -> int:
            return ROWS

        def __getitem__(self, i: int) -> dict[str, Tensor]:
            x, y = data()
            return {"x": x[i], "y": y[i]}

    class Regression(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = make()

        def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
            found = self.net(x)
            return {"loss": nn.functional.mse_loss(found, y), "logits": found}

    AcceleratorState._reset_state(reset_partial_state=True)
    PartialState._reset_state()
    torch.distributed.init_process_group(backend)
    model = Regression()
    arguments = TrainingArguments(
        output_dir=folder,
        use_cpu=True,
        num_train_epochs=2,
        per_device_train_batch_size=4,
        learning_rate=0.05,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        remove_unused_columns=False,
        seed=1,
    )
    trainer = Trainer(model=model, args=arguments, train_dataset=Rows())
    trainer.train()
    return values(model.net)


@needs("transformers")
@needs("accelerate")
def test_the_trainer_of_transformers(tmp_path: Path) -> None:
    check(train_with_transformers, str(tmp_path))
