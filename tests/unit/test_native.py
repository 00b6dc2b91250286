"""The compiled step of Adam against torch's fused one, bit by bit; where there is no compiler, torch's steps."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from unisono.methods.offload import native
from unisono.methods.offload.stepper import Block, Run, Stepper

needs_compiler = pytest.mark.skipif(shutil.which("c++") is None, reason="needs a C++ compiler")


@needs_compiler
def test_it_is_compiled_and_gives_torchs_bits() -> None:
    assert native.load() is not None


@needs_compiler
@pytest.mark.parametrize("make", [torch.optim.Adam, torch.optim.AdamW])
@pytest.mark.parametrize("n", [1, 15, 4096, 70_001])
@pytest.mark.parametrize("ahead", [False, True])
def test_steps_are_bit_by_bit_those_of_torch(make: Any, n: int, ahead: bool) -> None:
    generator = torch.Generator().manual_seed(n)
    param = torch.nn.Parameter(torch.randn(n, generator=generator))
    settings = {"lr": 0.01, "betas": (0.8, 0.95), "weight_decay": 0.1, "fused": True}
    optimizer = make([param], **settings)
    values = param.detach().clone()
    stepper = Stepper(make([values], **settings), [Block(values, [Run(0, n, 0)])], threads=3, ahead=ahead)
    assert stepper._pool is not None
    out = torch.zeros(n)
    for _ in range(4):
        gradient = torch.randn(n, generator=generator)
        param.grad = gradient.clone()
        optimizer.step()
        now = stepper.begin()
        if ahead:
            wait, take = stepper.start_ahead(0, gradient, out, (), settings=now)
            wait()
            wait()  # once more changes nothing
            take()
        else:
            stepper.step(0, gradient, out)
    state = optimizer.state[param]
    assert torch.equal(out, param.detach())
    assert torch.equal(stepper.blocks[0].read("master"), param.detach())
    for name in ("exp_avg", "exp_avg_sq"):
        assert torch.equal(stepper.blocks[0].read(name), state[name])
    stepper.close()


def test_without_a_compiler_or_a_place_to_keep_it_torch_steps(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    native.load.cache_clear()
    try:
        assert native.load() is None
        values = torch.zeros(4)
        stepper = Stepper(torch.optim.AdamW([values], lr=0.5, weight_decay=0.0), [Block(values, [Run(0, 4, 0)])])
        stepper.begin()
        stepper.step(0, torch.ones(4))
        assert values.tolist() == pytest.approx([-0.5] * 4)
        stepper.close()
        monkeypatch.undo()
        native.load.cache_clear()
        (tmp_path / "file").touch()
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))  # no folder can be made there
        assert (native.load() is None) == (shutil.which("c++") is None)
    finally:
        native.load.cache_clear()


def test_what_it_does_not_step_is_left_to_torch() -> None:
    line = torch.zeros(4)
    assert native.fits({"master": line, "exp_avg": line, "exp_avg_sq": line}, line.bfloat16(), None)
    assert not native.fits({"master": line.double(), "exp_avg": line, "exp_avg_sq": line}, line, None)
    assert not native.fits({"master": line, "exp_avg": line, "exp_avg_sq": line}, line.half(), None)
    assert not native.fits({"master": line, "sum": line}, line, None)
