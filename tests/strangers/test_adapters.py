"""What people put around a model or its optimizer, by the real library, under each strategy: the table of
docs/adapters.md, which is what is asserted here."""

from __future__ import annotations

import re
import shutil
import threading
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint

import unisono as un
from unisono.world import World
from unisono.world.virtual import run_threads

PAGE = Path(__file__).parents[2] / "docs" / "adapters.md"
STRATEGIES = {
    "allreduce": "allreduce",
    "powersgd": "powersgd(rank=2)",
    "shared": "shared",
    "zero 1": "zero(stage=1)",
    "zero 2": "zero(stage=2)",
    "zero 3": "zero(stage=3)",
    "offload": "zero(stage=2, optimizer_on=cpu)",
    "local_sgd": "local_sgd(every=1, start=0)",
    "diloco": "diloco(every=2)",
}
making = threading.Lock()
EXACT = ("allreduce", "shared", "zero 1", "zero 2", "zero 3", "offload", "local_sgd")  # as one process on both batches


class Blocks(nn.Module):
    """Two blocks; `run` says how each is run."""

    def __init__(self, run: Callable[[nn.Module, Tensor], Tensor] = lambda block, x: block(x)) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 8)
        self.run = run

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self.second, self.run(self.first, x).tanh())


def lora() -> nn.Module:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(target_modules=["first"], modules_to_save=["second"], r=2, init_lora_weights=False)
    made: nn.Module = peft.get_peft_model(Blocks(), config)
    return made


def offloaded(block: nn.Module, x: Tensor) -> Tensor:
    with save_on_cpu():
        return block(x)  # type: ignore[no-any-return]


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)


def eight_bits(model: nn.Module) -> torch.optim.Optimizer:
    optim = pytest.importorskip("torchao.optim")
    made: torch.optim.Optimizer = optim.AdamW8bit(model.parameters(), lr=1e-3)
    return made


def eight_bits_of_another(model: nn.Module) -> torch.optim.Optimizer:
    bitsandbytes = pytest.importorskip("bitsandbytes")
    made: torch.optim.Optimizer = bitsandbytes.optim.AdamW8bit(model.parameters(), lr=1e-3, min_8bit_size=64)
    return made


ADAPTERS: dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Module], torch.optim.Optimizer]]] = {
    "LoRA (peft)": (lora, sgd),
    "AdamW8bit (torchao)": (Blocks, eight_bits),
    "AdamW8bit (bitsandbytes)": (Blocks, eight_bits_of_another),
    "checkpoint": (lambda: Blocks(lambda block, x: checkpoint(block, x, use_reentrant=False)), sgd),
    "checkpoint, reentrant": (lambda: Blocks(lambda block, x: checkpoint(block, x, use_reentrant=True)), sgd),
    "save_on_cpu": (lambda: Blocks(offloaded), sgd),
    "torch.compile": (lambda: torch.compile(Blocks(), backend="aot_eager"), sgd),  # type: ignore[list-item, return-value]
    "torch.compile, inductor": (lambda: torch.compile(Blocks()), sgd),  # type: ignore[list-item, return-value]
}


def read_table() -> dict[tuple[str, str], str]:
    """What the page says of each pair: works, or refused."""
    rows = [re.findall(r"(?<=\|)[^|]*(?=\|)", line) for line in PAGE.read_text().splitlines() if line.startswith("|")]
    head = [cell.strip() for cell in rows[0]]
    cells = [[cell.strip() for cell in row] for row in rows[2 : 2 + len(ADAPTERS)]]
    return {
        (row[0].strip("`"), strategy): cell for row in cells for strategy, cell in zip(head[1:], row[1:], strict=True)
    }


def train(adapter: str, spec: str, world: World, parts: int) -> list[Tensor]:
    """Three steps, on this rank's part of each batch or, with one part, on all of it."""
    make_model, make_optimizer = ADAPTERS[adapter]
    with making:  # ranks are threads, which draw from one generator
        torch.manual_seed(0)
        model = make_model()
    optimizer = make_optimizer(model)
    replica = un.parallel(model, optimizer, spec, world=world)
    generator = torch.Generator().manual_seed(1)
    for _ in range(3):
        x, y = torch.randn(8, 64, generator=generator), torch.randn(8, 8, generator=generator)
        mine = slice(world.rank * 8 // parts, (world.rank + 1) * 8 // parts)
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x[mine].requires_grad_()), y[mine]).backward()
        optimizer.step()
    return [p.detach().clone() for p in replica.consolidate().parameters() if p.requires_grad]


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("adapter", ADAPTERS)
def test_the_table_is_true(adapter: str, strategy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if "inductor" in adapter and shutil.which("g++") is None:
        pytest.skip("inductor needs a C++ compiler")
    if "torchao" in adapter:  # which compiles its step in C++, for many seconds: the same numbers come without
        monkeypatch.setattr(torch, "compile", lambda step, **_: step)
    check(adapter, strategy)


@pytest.mark.skipif(shutil.which("g++") is None, reason="torchao compiles its step in C++")
@pytest.mark.parametrize("strategy", ["allreduce", "zero 2"])
def test_torchaos_own_compiled_step_is_one_of_the_table(strategy: str) -> None:
    check("AdamW8bit (torchao)", strategy)


def check(adapter: str, strategy: str) -> None:
    said, spec = read_table()[adapter, strategy], STRATEGIES[strategy]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if said != "works":
            with pytest.raises((ValueError, TypeError, RuntimeError)):
                run_threads(lambda world: train(adapter, spec, world, 2), 2)
            return
        both = run_threads(lambda world: train(adapter, spec, world, 2), 2)
        torch.testing.assert_close(both[0], both[1], rtol=0, atol=0)
        if strategy in EXACT and not (strategy == "local_sgd" and "8bit" in adapter):  # each has moments of its own
            alone = train(adapter, "allreduce", World(), 1)
            atol = 2e-4 if "8bit" in adapter else 1e-6  # a moment may be rounded to the next of 256 values
            torch.testing.assert_close(both[0], alone, rtol=1e-4, atol=atol)


def test_the_page_has_every_pair() -> None:
    assert set(read_table()) == {(adapter, strategy) for adapter in ADAPTERS for strategy in STRATEGIES}
