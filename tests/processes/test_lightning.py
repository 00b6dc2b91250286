"""`unisono.lightning.Strategy` below Lightning's own Trainer, against one process on the whole batch."""

from __future__ import annotations

import warnings
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import unisono as un

pytestmark = pytest.mark.skipif(find_spec("lightning") is None, reason="needs PyTorch Lightning")
BATCH, EPOCHS = 4, 2


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(48, 6, generator=generator, dtype=torch.float64)
    return TensorDataset(x, x @ torch.randn(6, 1, generator=generator, dtype=torch.float64))


def make_net(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1)).double()


def make_module(seed: int) -> Any:
    """As in Lightning's tutorial. Lightning is imported in the workers alone: it takes seconds."""
    import lightning.pytorch as pl
    from torchmetrics import MeanSquaredError

    class Module(pl.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.net = make_net(seed)
            self.error = MeanSquaredError().set_dtype(torch.float64)

        def forward(self, x: torch.Tensor) -> Any:
            return self.net(x)

        def training_step(self, batch: Any, _: int) -> torch.Tensor:
            x, y = batch
            return nn.functional.mse_loss(self(x), y)

        def validation_step(self, batch: Any, _: int) -> None:
            x, y = batch
            found = self.net(x)
            self.error(found, y)
            self.log("metric", self.error)
            self.log("loss", nn.functional.mse_loss(found, y), sync_dist=True)

        def predict_step(self, batch: Any, _: int) -> Any:
            return self(batch[0])

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.net.parameters(), lr=0.05, momentum=0.9)
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)]

    return Module()


def fit(folder: Path, rank: int, spec: str, resume: str | None = None, **settings: Any) -> dict[str, Any]:
    import lightning.pytorch as pl
    from lightning.pytorch.callbacks import ModelCheckpoint

    from unisono.lightning import Strategy

    every = ModelCheckpoint(folder, filename="{epoch}", save_top_k=-1, every_n_epochs=1)
    if settings.get("enable_checkpointing", True):
        settings["callbacks"] = [every]

    module = make_module(seed=rank)  # every worker begins elsewhere, and gets rank 0's
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
    trainer.fit(module, loader, DataLoader(samples, batch_size=BATCH), ckpt_path=resume)
    assert trainer.num_val_batches == [len(samples) // BATCH // un.join().size]  # that one Lightning has divided
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    assert metrics["metric"] == pytest.approx(metrics["loss"], abs=1e-12)
    found = {
        "values": [p.detach().clone() for p in module.net.parameters()],
        "loss": metrics["loss"],
        "predicted": trainer.predict(module, DataLoader(samples, batch_size=BATCH)),
        "kept": sorted(path.name for path in folder.glob("*")),
    }
    assert "forward" not in vars(module)
    return found


def work(folder: Path) -> dict[str, Any]:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    rank = un.join().rank
    found: dict[str, Any] = {
        "allreduce": fit(folder, rank, "allreduce", enable_checkpointing=False, gradient_clip_val=0.5),
        "accumulated": fit(folder, rank, "allreduce", enable_checkpointing=False, accumulate_grad_batches=2),
    }
    for name, spec in METHODS.items():
        if name == "zero":  # a folder that another method has left there
            (folder / name / "epoch=0.ckpt.unisono").mkdir(parents=True, exist_ok=True)
        found[name] = fit(folder / name, rank, spec)
        found[f"{name} again"] = fit(folder / f"{name} 2", rank, spec, resume=str(folder / name / "epoch=0.ckpt"))
    found["bytes"] = sum(un.join().ledger.by_tag().values())
    found |= gather_with_gradients(rank)
    return found


METHODS = {
    "compressed": "error_feedback(topk(k=0.3))",
    "local": "local_sgd(every=5, start=0)",  # no multiple of which is the six steps of an epoch
    "zero": "zero(stage=3)",
}


def gather_with_gradients(rank: int) -> dict[str, Any]:
    from unisono.lightning import Strategy

    x = torch.tensor([1.0 + rank], requires_grad=True)
    gathered = Strategy().all_gather(x, sync_grads=True)
    (gathered.prod() * (rank + 1)).backward()
    assert x.grad is not None
    return {"gathered": gathered.tolist(), "gradient": x.grad.item()}


def go_on(folder: Path) -> dict[str, Any]:
    """From checkpoints of two workers, on one; and what is refused."""
    import lightning.pytorch as pl

    from unisono.lightning import Strategy

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    with pytest.raises(ValueError, match=r"unisono run -n 2"):
        fit(folder, 0, "allreduce", devices=2)
    module = make_module(0)
    module.automatic_optimization = False
    module.configure_optimizers = lambda: [torch.optim.SGD(module.parameters(), lr=0.1) for _ in range(2)]
    with pytest.raises(ValueError, match=r"'net.0.weight' is in two optimizers"):
        pl.Trainer(strategy=Strategy(), accelerator="cpu", logger=False, enable_checkpointing=False).fit(
            module, DataLoader(data())
        )
    found = {
        name: fit(folder / f"{name} 1", 0, spec, resume=str(folder / name / "epoch=0.ckpt"))
        for name, spec in METHODS.items()
    }
    return {**found, "two optimizers": fit_by_hand()}


def fit_by_hand() -> dict[str, Any]:
    """A module with two optimizers, which steps them itself."""
    import lightning.pytorch as pl

    from unisono.lightning import Strategy

    module = make_module(0)
    module.automatic_optimization = False
    halves = [list(module.net[i].parameters()) for i in (0, 2)]
    module.configure_optimizers = lambda: [torch.optim.SGD(half, lr=0.05, momentum=0.9) for half in halves]

    def step(batch: Any, _: int = 0) -> None:
        for optimizer in module.optimizers():
            optimizer.zero_grad()
        module.manual_backward(nn.functional.mse_loss(module.net(batch[0]), batch[1]))
        for optimizer in module.optimizers():
            optimizer.step()

    module.training_step = step
    pl.Trainer(
        strategy=Strategy("zero"), accelerator="cpu", logger=False, enable_checkpointing=False, max_epochs=1,
        enable_progress_bar=False, use_distributed_sampler=False,
    ).fit(module, DataLoader(data(), batch_size=BATCH))  # fmt: skip
    return {"values": [p.detach() for p in module.net.parameters()]}


def alone(accumulate: int = 1, clip: float | None = None, last: int = 2 * BATCH) -> tuple[list[torch.Tensor], float]:
    """On the whole batch; in the last epoch on batches of `last` samples."""
    net = make_net(0)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    for size in (2 * BATCH, last):
        loader = DataLoader(data(), batch_size=size)
        for i, (x, y) in enumerate(loader):
            (nn.functional.mse_loss(net(x), y) / accumulate).backward()
            if (i + 1) % accumulate == 0:
                if clip is not None:
                    nn.utils.clip_grad_norm_(net.parameters(), clip)
                optimizer.step()
                optimizer.zero_grad()
        optimizer.param_groups[0]["lr"] *= 0.5
    return [p.detach() for p in net.parameters()], measure(net)


def measure(net: nn.Module) -> float:
    x, y = data().tensors
    return nn.functional.mse_loss(net(x), y).item()


def assert_same(found: list[torch.Tensor], expected: Any, atol: float = 0.0) -> None:
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=atol)


def test_lightning_trains_as_one_process(tmp_path: Path) -> None:
    every = un.launch(work, workers=2, args=(tmp_path,), timeout_s=110)
    plain = alone()
    for found in every:
        for name, expected in (
            ("allreduce", alone(clip=0.5)),
            ("accumulated", alone(accumulate=2)),
            ("zero", plain),
            ("zero again", plain),
        ):
            assert_same(found[name]["values"], expected[0], atol=1e-12)
            assert found[name]["loss"] == pytest.approx(expected[1], abs=1e-12)
        assert found["bytes"] > 0
        assert found["gathered"] == [[1.0], [2.0]]
    assert [found["gradient"] for found in every] == [6.0, 3.0]  # (1 + 2) times the other's
    for name in METHODS:
        first, second = (found[name] for found in every)
        assert_same(first["values"], second["values"])  # what ranks agree on
        net = make_net(0)
        with torch.no_grad():
            for p, value in zip(net.parameters(), first["values"], strict=True):
                p.copy_(value)
        assert first["loss"] == second["loss"] == pytest.approx(measure(net), abs=1e-12), "of the agreed model"
        assert sum(len(found[name]["predicted"]) for found in every) == 48 // BATCH
        saved = torch.load(tmp_path / name / "epoch=1.ckpt", weights_only=True)["state_dict"]
        assert_same(first["values"], [saved[f"net.{key}"] for key, _ in net.named_parameters()])
        assert_same(every[0][f"{name} again"]["values"], first["values"])  # bit by bit
        beside = [] if name == "zero" else ["epoch=0.ckpt.unisono", "epoch=1.ckpt.unisono"]
        assert [kept for kept in first["kept"] if kept.endswith("unisono")] == beside
    [others] = un.launch(go_on, workers=1, args=(tmp_path,), timeout_s=110)
    assert_same(others["zero"]["values"], alone(last=BATCH)[0], atol=1e-12)
    net = make_net(0)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    for x, y in DataLoader(data(), batch_size=BATCH):
        optimizer.zero_grad()
        nn.functional.mse_loss(net(x), y).backward()
        optimizer.step()
    assert_same(others["two optimizers"]["values"], [p.detach() for p in net.parameters()], atol=1e-12)
