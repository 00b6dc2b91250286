"""`unisono.lightning.Strategy` below Lightning's own Trainer, against one process on the whole batch."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import unisono as un

pl = pytest.importorskip("lightning.pytorch", reason="needs PyTorch Lightning")
BATCH, EPOCHS = 4, 2


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(48, 6, generator=generator, dtype=torch.float64)
    return TensorDataset(x, x @ torch.randn(6, 1, generator=generator, dtype=torch.float64))


def make_net(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1)).double()


class Module(pl.LightningModule):  # type: ignore[name-defined,misc]
    """As in Lightning's tutorial."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.net = make_net(seed)

    def training_step(self, batch: Any, _: int) -> torch.Tensor:
        x, y = batch
        return nn.functional.mse_loss(self.net(x), y)

    def validation_step(self, batch: Any, _: int) -> None:
        x, y = batch
        self.log("loss", nn.functional.mse_loss(self.net(x), y), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.net.parameters(), lr=0.05, momentum=0.9)


def fit(folder: Path, rank: int, spec: str, **settings: Any) -> tuple[list[torch.Tensor], float]:
    from unisono.lightning import Strategy

    module = Module(seed=rank)  # every worker begins elsewhere, and gets rank 0's
    trainer = pl.Trainer(
        strategy=Strategy(spec),
        accelerator="cpu",
        max_epochs=EPOCHS,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
        **settings,
    )
    samples = data()
    parts = DistributedSampler(samples, un.join().size, rank, shuffle=False)  # Lightning's own would shuffle
    loader = DataLoader(samples, batch_size=BATCH, sampler=parts)
    trainer.fit(module, loader, DataLoader(samples, batch_size=BATCH))
    assert trainer.num_val_batches == [len(samples) // BATCH // un.join().size]  # that one Lightning has divided
    return [p.detach().clone() for p in module.net.parameters()], float(trainer.callback_metrics["loss"])


def work(folder: Path) -> dict[str, Any]:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    rank = un.join().rank
    found: dict[str, Any] = {
        "allreduce": fit(folder, rank, "allreduce", enable_checkpointing=False, gradient_clip_val=0.5),
        "accumulated": fit(folder, rank, "allreduce", enable_checkpointing=False, accumulate_grad_batches=2),
        "local_sgd": fit(folder, rank, "local_sgd(every=3)"),
    }
    found["bytes"] = sum(un.join().ledger.by_tag().values())
    return found


def alone(accumulate: int = 1, clip: float | None = None) -> tuple[list[torch.Tensor], float]:
    net, loader = make_net(0), DataLoader(data(), batch_size=2 * BATCH)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    for _ in range(EPOCHS):
        for i, (x, y) in enumerate(loader):
            (nn.functional.mse_loss(net(x), y) / accumulate).backward()
            if (i + 1) % accumulate == 0:
                if clip is not None:
                    nn.utils.clip_grad_norm_(net.parameters(), clip)
                optimizer.step()
                optimizer.zero_grad()
    x, y = data().tensors
    return [p.detach() for p in net.parameters()], nn.functional.mse_loss(net(x), y).item()


def test_lightning_trains_as_one_process(tmp_path: Path) -> None:
    every = un.launch(work, workers=2, args=(tmp_path,))
    for name, expected in (("allreduce", alone(clip=0.5)), ("accumulated", alone(accumulate=2))):
        for found in every:
            for mine, theirs in zip(found[name][0], expected[0], strict=True):
                torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-12)
            assert found[name][1] == pytest.approx(expected[1], abs=1e-12)
    saved = torch.load(next((tmp_path / "checkpoints").glob("*.ckpt")), weights_only=True)
    assert every[0]["bytes"] > 0
    for mine, other, kept in zip(
        every[0]["local_sgd"][0], every[1]["local_sgd"][0], saved["state_dict"].values(), strict=True
    ):
        torch.testing.assert_close(mine, other)  # twelve steps end a window of three
        torch.testing.assert_close(kept, mine)
