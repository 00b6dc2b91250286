"""What the tutorials of PyTorch, Accelerate, Lightning and the Hugging Face Trainer have their readers write, over the
backend: the same programs with one word changed, small, and without downloads."""

from __future__ import annotations

import importlib.util
import os
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import unisono as un
from torch_groups import leave_group

BACKENDS = ("gloo", "unisono")
ROWS, WIDTH, LENGTH = 24, 6, 8


def needs(name: str) -> Any:
    return pytest.mark.skipif(importlib.util.find_spec(name) is None, reason=f"{name} is not installed")


def values(model: nn.Module) -> list[float]:
    return [float(p.detach().double().sum()) for p in model.parameters()]


def over_both(train: Any, folder: str) -> list[dict[str, list[float]]]:
    """In each worker: what `train` has learned over gloo, and over unisono."""
    import torch.distributed as dist

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    os.environ["HF_HUB_OFFLINE"] = "1"
    found = []
    for backend in BACKENDS:
        torch.manual_seed(11)
        found.append(train(backend, f"{folder}/{backend}"))
        assert dist.get_backend() == backend
        leave_group()
    return found


def check(train: Any, folder: Path) -> None:
    """Both ranks have learned the same, and over both backends; metrics are of all ranks' samples."""
    first, second = un.launch(over_both, 2, args=[train, str(folder)], threads=1, timeout_s=110)
    theirs, ours = first
    assert first == second
    for key in ("before", "after", "metrics"):
        assert ours[key] == pytest.approx(theirs[key], abs=1e-6), key
    assert ours["after"] != pytest.approx(ours["before"], abs=1e-3), "nothing was learned"


# PyTorch -----------------------------------------------------------------------------------------------------


def follow_tutorials(folder: str) -> list[str]:
    """In each worker: every tutorial over both backends; what differs."""
    import backend_tutorials
    import torch.distributed as dist

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    problems = []
    for name, run in backend_tutorials.TUTORIALS.items():
        found = []
        for backend in BACKENDS:
            dist.init_process_group(backend, timeout=timedelta(seconds=60))
            place = Path(folder) / f"{name}-{backend}"
            place.mkdir(exist_ok=True)
            found.append(run(str(place)))
            leave_group()
        try:
            torch.testing.assert_close(found[1], found[0], rtol=1e-6, atol=1e-6)
        except AssertionError as error:
            problems.append(f"{name}, rank {os.environ['RANK']}: {error}")
    return problems


def test_tutorials_of_pytorch(tmp_path: Path) -> None:
    assert un.launch(follow_tutorials, 4, args=[str(tmp_path)], threads=1, timeout_s=110) == [[]] * 4


# Accelerate: its first tutorial, and states that are saved ----------------------------------------------------


def make_classifier() -> Any:
    """The tutorials fine-tune BERT: a small one, not trained yet."""
    from transformers import BertConfig, BertForSequenceClassification

    torch.manual_seed(11)
    settings: dict[str, Any] = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    dropouts = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    config = BertConfig(vocab_size=30, intermediate_size=32, max_position_embeddings=LENGTH, **settings, **dropouts)
    return BertForSequenceClassification(config)


def make_texts() -> list[dict[str, Tensor]]:
    """Rows as a tokenizer leaves them; the label is whether the first word is of the larger half."""
    words = torch.randint(30, (ROWS, LENGTH), generator=torch.Generator().manual_seed(5))
    return [{"input_ids": row, "attention_mask": row * 0 + 1, "labels": (row[0] >= 15).long()} for row in words]


def forget_state() -> None:
    from accelerate.state import AcceleratorState, PartialState

    AcceleratorState._reset_state(reset_partial_state=True)
    PartialState._reset_state()


def train_with_accelerate(backend: str, folder: str) -> dict[str, list[float]]:
    from accelerate import Accelerator
    from torch.utils.data import DataLoader
    from transformers import get_scheduler

    forget_state()
    torch.distributed.init_process_group(backend)  # on CPUs, Accelerate would itself choose gloo, whatever it is told
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = make_classifier()
    before = values(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    train_batches: Any = DataLoader(make_texts(), batch_size=3, shuffle=True)  # type: ignore[arg-type]
    eval_batches: Any = DataLoader(make_texts()[:7], batch_size=2)  # type: ignore[arg-type]
    schedule = get_scheduler("linear", optimizer, num_warmup_steps=0, num_training_steps=2 * len(train_batches))
    model, optimizer, train_batches, eval_batches, schedule = accelerator.prepare(
        model, optimizer, train_batches, eval_batches, schedule
    )
    assert accelerator.num_processes == 2
    for epoch in range(2):
        model.train()
        for batch in train_batches:
            with accelerator.accumulate(model):
                accelerator.backward(model(**batch).loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
        if epoch == 0:
            accelerator.save_state(folder)
            accelerator.wait_for_everyone()  # the main process writes what all read
            accelerator.load_state(folder)
    model.eval()
    guesses = [
        accelerator.gather_for_metrics((model(**batch).logits.argmax(-1).detach(), batch["labels"]))
        for batch in eval_batches
    ]
    right = torch.cat([guess == label for guess, label in guesses])
    assert len(right) == 7, "samples that fill the last batch are not counted"
    return {
        "before": before,
        "after": values(accelerator.unwrap_model(model)),
        "metrics": [right.float().mean().item()],
    }


@needs("transformers")
@needs("accelerate")
def test_accelerate(tmp_path: Path) -> None:
    check(train_with_accelerate, tmp_path)


# Lightning: its first tutorial, an autoencoder ----------------------------------------------------------------


def train_with_lightning(backend: str, folder: str) -> dict[str, list[float]]:
    import lightning
    from lightning.pytorch.plugins.environments import TorchElasticEnvironment
    from lightning.pytorch.strategies import DDPStrategy
    from torch.utils.data import DataLoader, TensorDataset

    class LitAutoEncoder(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(11)
            self.encoder = nn.Sequential(nn.Linear(WIDTH, 8), nn.ReLU(), nn.Linear(8, 3))
            self.decoder = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, WIDTH))

        def _loss(self, batch: Any) -> Tensor:
            return nn.functional.mse_loss(self.decoder(self.encoder(batch[0])), batch[0])

        def training_step(self, batch: Any, _: int) -> Tensor:
            loss = self._loss(batch)
            self.log("train_loss", loss, sync_dist=True)
            return loss

        def validation_step(self, batch: Any, _: int) -> None:
            self.log("val_loss", self._loss(batch), sync_dist=True)

        def configure_optimizers(self) -> Any:
            return torch.optim.Adam(self.parameters(), lr=0.01)

    model = LitAutoEncoder()
    before = values(model)
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=2,
        max_epochs=2,
        gradient_clip_val=1.0,
        strategy=DDPStrategy(process_group_backend=backend),
        plugins=[TorchElasticEnvironment()],
        default_root_dir=folder,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    rows = TensorDataset(torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(5)))
    trainer.fit(model, DataLoader(rows, batch_size=4, shuffle=True), DataLoader(rows, batch_size=4))
    trained = values(model)
    saved = trainer.checkpoint_callback.best_model_path  # type: ignore[union-attr]
    found = LitAutoEncoder.load_from_checkpoint(saved)
    assert values(found) == trained
    return {"before": before, "after": trained, "metrics": [float(trainer.callback_metrics["val_loss"])]}


@needs("lightning")
def test_lightning(tmp_path: Path) -> None:
    check(train_with_lightning, tmp_path)


# The Hugging Face Trainer: its tutorial of fine-tuning --------------------------------------------------------


def train_with_transformers(backend: str, folder: str) -> dict[str, list[float]]:
    from transformers import Trainer, TrainingArguments

    forget_state()
    torch.distributed.init_process_group(backend)
    model = make_classifier()
    before = values(model)
    arguments = TrainingArguments(
        output_dir=folder,
        use_cpu=True,
        eval_strategy="epoch",
        save_strategy="epoch",
        num_train_epochs=2,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        learning_rate=0.01,
        report_to=[],
        disable_tqdm=True,
        seed=1,
    )

    def compute_metrics(found: Any) -> dict[str, float]:
        assert len(found.label_ids) == 7
        return {"accuracy": float((found.predictions.argmax(-1) == found.label_ids).mean())}

    rows: Any = make_texts()
    trainer = Trainer(
        model=model, args=arguments, train_dataset=rows, eval_dataset=rows[:7], compute_metrics=compute_metrics
    )
    trainer.train()
    found = trainer.evaluate()
    assert (Path(folder) / "checkpoint-4" / "model.safetensors").exists()
    return {"before": before, "after": values(model), "metrics": [found["eval_accuracy"], found["eval_loss"]]}


@needs("transformers")
@needs("accelerate")
def test_the_trainer_of_transformers(tmp_path: Path) -> None:
    check(train_with_transformers, tmp_path)
