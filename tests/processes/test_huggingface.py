"""`unisono.huggingface` below the Trainer of transformers and below Accelerate's own loop, against one process on the
whole batch, and against the libraries' own DistributedDataParallel."""

from __future__ import annotations

import os
import warnings
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, SequentialSampler, TensorDataset

import unisono as un

pytestmark = pytest.mark.skipif(
    None in (find_spec("transformers"), find_spec("accelerate")), reason="transformers or accelerate is not installed"
)
ROWS, BATCH, EPOCHS, LR = 48, 4, 2, 0.05
STEPS = EPOCHS * ROWS // BATCH // 2
Values = list[Tensor]


class Rows(Dataset[Any]):
    """Numbers and their sums."""

    def __init__(self) -> None:
        self.x = torch.randn(ROWS, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        self.y = self.x.sum(1, keepdim=True)

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        return {"x": self.x[i], "labels": self.y[i]}


class Net(nn.Module):
    """As transformers' models do, it gives loss and logits."""

    def __init__(self, seed: int, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1)).to(dtype)

    def forward(self, x: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        logits = self.net(x.to(self.net[0].weight.dtype))
        assert labels is not None
        return {"loss": nn.functional.mse_loss(logits, labels.to(logits.dtype)), "logits": logits}


def values(model: nn.Module) -> Values:
    return [p.detach().clone() for p in model.parameters()]


# The Trainer -------------------------------------------------------------------------------------------------


def make_trainer(folder: Path, spec: str | None, dtype: torch.dtype = torch.float64, **asked: Any) -> Any:
    from transformers import Trainer, TrainingArguments

    import unisono.huggingface

    class InOrder(Trainer):
        def _get_train_sampler(self, *_: Any) -> Any:
            return SequentialSampler(self.train_dataset)

    settings = {"save_strategy": "no", "max_grad_norm": 0.5, "logging_steps": 4, **asked}
    arguments = TrainingArguments(
        str(folder),
        num_train_epochs=EPOCHS,
        per_device_train_batch_size=BATCH,
        learning_rate=LR,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        **settings,
    )
    return InOrder(
        Net(un.join().rank, dtype),  # every worker begins elsewhere, and gets rank 0's
        arguments,
        train_dataset=Rows(),
        eval_dataset=Rows(),
        callbacks=[unisono.huggingface.Callback(spec)] if spec is not None else [],
    )


def fit(folder: Path, spec: str | None, *, resume: str | None = None, **asked: Any) -> dict[str, Any]:
    trainer = make_trainer(folder, spec, **asked)
    trainer.train(resume_from_checkpoint=resume)
    assert trainer.state.global_step == STEPS // asked.get("gradient_accumulation_steps", 1)
    return {
        "values": values(trainer.model),
        "loss": trainer.evaluate()["eval_loss"],
        "history": [(row["step"], row["eval_loss"]) for row in trainer.state.log_history if "eval_loss" in row],
        "around": type(trainer.model_wrapped).__name__,
        "best": trainer.state.best_global_step,
    }


def refuse(folder: Path) -> dict[str, str]:
    """What is said where a model cannot be left alone."""
    late = make_trainer(folder, "allreduce")
    late.model_init = lambda: Net(0)
    attempts = {"model_init": late.train, "torch_compile": lambda: make_trainer(folder, "zero", torch_compile=True)}
    found = {}
    for name, attempt in attempts.items():
        with pytest.raises(ValueError, match=name) as caught:
            attempt()
        found[name] = str(caught.value)
    return found


# Accelerate --------------------------------------------------------------------------------------------------


def loop(
    folder: Path, spec: str | None, *, stop: int = 99, resume: bool = False, scaled: bool = False
) -> dict[str, Any]:
    """Accelerate's own loop, accumulating two batches; saves at step `stop`, or begins there. `scaled`: with a loss
    scale (Accelerate's fp16 is for GPUs), so large at first that steps are skipped."""
    import accelerate

    import unisono.huggingface

    make = accelerate.Accelerator if spec is None else partial(unisono.huggingface.Accelerator, strategy=spec)
    accelerator = make(cpu=True, gradient_accumulation_steps=2)
    model, rows = Net(accelerator.process_index, torch.float32 if scaled else torch.float64), Rows()
    if scaled:
        accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.0)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=STEPS)
    batches = DataLoader(TensorDataset(rows.x, rows.y), batch_size=BATCH)
    trained, optimizer, batches, scheduler = accelerator.prepare(model, optimizer, batches, scheduler)
    if resume:
        accelerator.load_state(str(folder / "state"))
    step = stop if resume else 0
    for i, (x, y) in enumerate(row for _ in range(EPOCHS) for row in batches):
        if i < 2 * step:
            continue
        with accelerator.accumulate(trained):
            accelerator.backward(trained(x, y)["loss"])
            if accelerator.sync_gradients and not scaled:
                accelerator.clip_grad_norm_(trained.parameters(), 0.5)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        step += accelerator.sync_gradients
        if accelerator.sync_gradients and step == stop and not resume:
            accelerator.save_state(str(folder / "state"))
    state = accelerator.get_state_dict(trained)
    accelerator.save_model(trained, folder / "model")
    accelerator.save(model.state_dict(), folder / "saved.safetensors", safe_serialization=True)
    accelerator.free_memory()
    assert_same(list(state.values()), values(model))
    return {"values": values(model), "around": type(trained).__name__}


def work(folder: Path) -> dict[str, Any]:
    """What both do under each method, on one worker of two."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_VERBOSITY="error", ACCELERATE_LOG_LEVEL="error")
    float32 = torch.float32
    watching = {"save_strategy": "steps", "save_steps": 5, "eval_strategy": "steps", "eval_steps": 5}
    kept = {
        "compressed": "error_feedback(topk(k=0.3))",
        "local": "local_sgd(every=4, start=0)",
        "zero": "zero(stage=3)",
    }
    found: dict[str, Any] = {
        "ddp": fit(folder, None),
        "allreduce": fit(folder, "allreduce"),
        "accumulated": fit(folder, "allreduce", gradient_accumulation_steps=2),
        "bf16": [fit(folder, spec, dtype=float32, bf16=True) for spec in (None, "allreduce")],
        "refused": refuse(folder),
    }
    for name, spec in kept.items():
        best = {**watching, "load_best_model_at_end": True}
        found[name] = fit(folder / name, spec, **best)
        found[f"{name} again"] = fit(folder / name, spec, resume=str(folder / name / "checkpoint-5"), **best)
    for spec in (None, "allreduce", "local_sgd(every=2, start=0)", "zero(stage=2)"):
        found[f"loop {spec}"] = loop(folder / f"loop {spec}", spec, stop=3)
    found["scaled"] = [loop(folder, spec, scaled=True)["values"] for spec in (None, "allreduce")]
    found["loop again"] = loop(
        folder / "loop local_sgd(every=2, start=0)", "local_sgd(every=2, start=0)", stop=3, resume=True
    )
    return found


# One process -------------------------------------------------------------------------------------------------


def alone(accumulate: int = 1, last: float = 0.0) -> tuple[Values, float]:
    """The same in plain PyTorch, on the batches of both workers together; the learning rate falls to `last` of it."""
    model, rows = Net(0), Rows()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.0)
    total, step = STEPS // accumulate, 0
    for _ in range(EPOCHS):
        for i, (x, y) in enumerate(DataLoader(TensorDataset(rows.x, rows.y), batch_size=2 * BATCH)):
            (model(x, y)["loss"] / accumulate).backward()
            if (i + 1) % accumulate == 0:
                nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                for group in optimizer.param_groups:
                    group["lr"] = LR * (1 - (1 - last) * step / total)
                optimizer.step()
                optimizer.zero_grad()
                step += 1
    return values(model), model(rows.x, rows.y)["loss"].item()


def assert_same(found: Values, expected: Values, atol: float = 0.0) -> None:
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=atol)


def test_the_trainer_and_accelerate_train_as_one_process(tmp_path: Path) -> None:
    every = un.launch(work, workers=2, args=(tmp_path,), timeout_s=110)
    for found in every:
        for name, expected in (("allreduce", alone()), ("accumulated", alone(accumulate=2))):
            assert_same(found[name]["values"], expected[0], atol=1e-12)
            assert found[name]["loss"] == pytest.approx(expected[1], abs=1e-12)
        assert_same(found["loop allreduce"]["values"], alone(2, last=0.1)[0], atol=1e-12)
        # Against the libraries' own DistributedDataParallel.
        assert [found[name]["around"] for name in ("ddp", "allreduce", "zero")] == [
            "DistributedDataParallel",
            *["Net"] * 2,
        ]
        assert_same(found["allreduce"]["values"], found["ddp"]["values"])
        assert_same(found["loop allreduce"]["values"], found["loop None"]["values"])
        assert_same(found["bf16"][1]["values"], found["bf16"][0]["values"])
        assert_same(found["scaled"][1], found["scaled"][0])
        assert not torch.equal(found["scaled"][1][0], values(Net(0, torch.float32))[0]), "every step was skipped"
        # Resumed from the middle, with what ranks had kept back and their own models.
        for name in ("compressed", "local", "zero", "loop"):
            first = found["loop local_sgd(every=2, start=0)" if name == "loop" else name]
            assert_same(found[f"{name} again"]["values"], first["values"])
    for name in ("model/model.safetensors", "saved.safetensors"):
        saved = load_file(tmp_path / "loop zero(stage=2)" / name)
        assert_same([saved[key] for key, _ in Net(0).named_parameters()], every[0]["loop zero(stage=2)"]["values"])
    for name in ("compressed", "local", "zero"):
        first, second = (found[name] for found in every)
        assert_same(first["values"], second["values"])  # what ranks agree on
        saved = load_file(tmp_path / name / f"checkpoint-{first['best']}" / "model.safetensors")
        assert_same(first["values"], [saved[key] for key, _ in Net(0).named_parameters()])
        assert first["history"] == second["history"]
        assert first["loss"] == pytest.approx(dict(first["history"])[first["best"]], abs=1e-12)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("spec", ["local_sgd(every=2)", "zero(stage=3)"])
def test_accelerate_binds_models_with_one_optimizer_and_refuses_what_it_would_not_exchange(spec: str) -> None:
    """In a world of one; an optimizer that holds two models is how a text encoder is trained with a denoiser."""
    from unisono.huggingface import Accelerator

    def make() -> tuple[Any, torch.optim.Optimizer]:
        model = Net(0).net
        return model, torch.optim.Adam(model.parameters(), lr=LR)

    def train(encode: Any, decode: Any, optimizer: Any, backward: Any) -> None:
        for x in Rows().x.split(BATCH):
            optimizer.zero_grad()
            backward(decode(torch.tanh(encode(x))).square().mean())
            optimizer.step()

    accelerator = Accelerator(cpu=True, strategy=spec)
    model, optimizer = make()
    train(model[0], model[2], optimizer, torch.Tensor.backward)
    other, prepared = make()
    *layers, prepared = accelerator.prepare(other[0], other[2], prepared)
    with pytest.raises(NotImplementedError, match=r"LocalSGD is for DDP.*local_sgd\(every=8\)"):
        layers[0].no_sync()  # as `accelerate.local_sgd.LocalSGD` does first
    train(*layers, prepared, accelerator.backward)
    states = [accelerator.get_state_dict(layer) for layer in layers]
    assert len(accelerator.replicas) == 1
    accelerator.free_memory()
    assert not hasattr(layers[0], "no_sync")
    for found in (values(other), [x for state in states for x in state.values()]):
        assert_same(found, values(model), atol=1e-12)
    other, _ = make()
    with pytest.raises(ValueError, match=r"Linear was prepared without an optimizer, and gets gradients"):
        accelerator.backward(accelerator.prepare(other[0])(Rows().x).sum())
    accelerator.free_memory()
    first, second = (torch.optim.SGD(other[i].parameters(), lr=LR) for i in (0, 2))
    accelerator.prepare(other, first)
    with pytest.raises(ValueError, match=r"SGD is a model's second optimizer: prepare both in one call"):
        accelerator.prepare(second)
    accelerator.free_memory()
