"""Parts of tensors, read and written a bounded number of bytes at a time; checkpoints for plain PyTorch."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from split_replica import State, change_pieces, check_same, damage, make, save_split, save_whole, state_of, train

import unisono as un
from unisono import cli
from unisono.training.checkpoint import CheckpointError, safetensors, slices
from unisono.training.checkpoint.folder import read_folder
from unisono.training.checkpoint.plain import export_model
from unisono.training.checkpoint.slices import Piece, Span, Stored, find_gaps
from unisono.world import World
from unisono.world.virtual import run_threads

# Pieces ---------------------------------------------------------------------------------------------------


def test_reading_and_writing_take_a_bounded_number_of_bytes_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slices, "CHUNK_BYTES", 256)
    line, asked = torch.arange(1000.0), []

    def read(start: int, stop: int) -> torch.Tensor:
        asked.append((start, stop))
        return line[start:stop]

    piece = Piece((10, 100), torch.float32, [Span(500, 1000, read), Span(0, 500, read)])
    entries = [
        safetensors.Entry(f"{start}", piece.dtype, [stop - start], partial(piece.chunks, start, stop, reader))
        for start, stop, reader in piece.spans
    ]
    assert asked == []
    safetensors.write_stream(tmp_path / "x", entries)
    assert max(stop - start for start, stop in asked) == 64
    assert sorted(asked)[0][0] == 0
    assert [a for a, _ in sorted(asked)[1:]] == [b for _, b in sorted(asked)[:-1]]
    stored = safetensors.index(tmp_path / "x")
    whole = Stored((10, 100), torch.float32, [(500, 1000, lambda a, b: stored["500"].read(a - 500, b - 500)),
                                              (0, 500, stored["0"].read)])  # fmt: skip
    assert all(chunk.numel() <= 64 for chunk in whole.chunks())
    assert torch.equal(whole.full(), line.reshape(10, 100))
    assert torch.equal(whole.read(450, 710), line[450:710])
    out = torch.zeros(260, dtype=torch.bfloat16)
    assert whole.read(450, 710, out=out) is out
    assert torch.equal(out, line[450:710].bfloat16())


def test_every_dtype_and_shape_comes_back(tmp_path: Path) -> None:
    values = {
        "half": torch.randn(3, 5).bfloat16(),
        "bool": torch.tensor([True, False, True]),
        "scalar": torch.tensor(2.5, dtype=torch.float64),
        "empty": torch.empty(0, 3),
        "complex": torch.randn(4, dtype=torch.complex64),
        "complex128": torch.randn(2, 2, dtype=torch.complex128),
        "float8": torch.randn(7).to(torch.float8_e4m3fn),
        "uint16": torch.tensor([1, 65535], dtype=torch.uint16),
    }

    def bytes_of(x: torch.Tensor) -> tuple[Any, ...]:
        return x.dtype, x.shape, x.reshape(-1).view(torch.uint8).tolist() if x.numel() else []

    def saving(world: World) -> None:
        replica = make(world)

        def extended(model: State, rank: int) -> None:
            model.clear()
            for name, x in values.items():
                line = x.reshape(-1)
                cut = (line.numel() + 1) // 2
                start, part = (cut, line[cut:]) if rank else (0, line[:cut])
                model[f"split.{name}"] = Piece.of(part, start, shape=x.shape)
                model[f"whole.{name}"] = x

        change_pieces(replica, extended)
        un.save(tmp_path, replica)

    run_threads(saving, 2)
    model = un.read_checkpoint(tmp_path)["model"]
    lazy = read_folder(tmp_path / "step-0000000000", 0, 1, lazy=True).whole["model"]
    for name, x in values.items():
        for key in (f"split.{name}", f"whole.{name}"):
            assert bytes_of(model[key]) == bytes_of(x), key
            assert (lazy[key].shape, lazy[key].dtype) == (x.shape, x.dtype)
            assert bytes_of(lazy[key].full()) == bytes_of(x), key
    with pytest.raises(ValueError, match=r"complex128 is of torch.complex128.*read_checkpoint"):
        export_model(tmp_path, tmp_path / "m.safetensors")


def test_a_tensor_with_two_names_is_kept_once_and_exported_under_both(tmp_path: Path) -> None:
    def saving(world: World) -> None:
        replica = make(world)

        def tied(model: State, rank: int) -> None:
            model["other"] = model["0.weight"]

        change_pieces(replica, tied)
        un.save(tmp_path / "run", replica)

    run_threads(saving, 2)
    names = load_file(tmp_path / "run" / "step-0000000000" / "pieces-00000.safetensors")
    assert not any("other" in name for name in names)
    state = un.read_checkpoint(tmp_path / "run")
    assert torch.equal(state["model"]["other"], state["model"]["0.weight"])
    export_model(tmp_path / "run", tmp_path / "m.safetensors")
    assert torch.equal(load_file(tmp_path / "m.safetensors")["other"], make().model.get_parameter("0.weight"))


def test_wrong_spans_reads_and_ranges_are_refused() -> None:
    with pytest.raises(ValueError, match="a span from 3 to 7 of a tensor of 6 elements"):
        Piece.of(torch.zeros(4), 3, shape=(2, 3))
    with pytest.raises(ValueError, match="no rank holds elements 2 to 4"):
        Stored((4,), torch.float32, [(0, 2, lambda a, b: torch.zeros(b - a))])
    short = Stored((4,), torch.float32, [(0, 4, lambda a, b: torch.zeros(1))])
    with pytest.raises(RuntimeError, match=r"elements 0 to 4 gave torch.float32 of shape \(1,\); expected"):
        short.full()
    with pytest.raises(ValueError, match="elements 2 to 5"):
        short.read(2, 5)
    with pytest.raises(ValueError, match=r"out has shape \(3,\); expected \(2,\)"):
        short.read(0, 2, out=torch.zeros(3))
    assert find_gaps([{"x": ("float32", [0, 3], [])}, {}]) == []
    assert find_gaps([{}, {"x": ("float32", [4], [[0, 1], [3, 4]])}]) == ["x [4]: no rank holds elements 1 to 3"]


def test_state_larger_than_memory_is_saved_loaded_and_exported(tmp_path: Path) -> None:
    """128 MiB that are never in memory at once: the process grows by a fraction of it."""
    script = """
import resource, sys, torch, unisono as un
from unisono.training.checkpoint.plain import export_model
from unisono.training.checkpoint.slices import Piece
count = 32 << 20
model = torch.nn.Linear(1, 1, bias=False)
replica = un.parallel(model, torch.optim.SGD(model.parameters(), lr=1), world=un.World())
piece = Piece((count,), torch.float32, [(0, count, lambda a, b: torch.arange(a, b, dtype=torch.float32))])
plain = replica.optimizer.state_dict()
replica.sharded_state = lambda: {"model": {"weight": piece}, "optimizer": plain}
def load(whole, *, same_world):
    stored, line = whole["model"]["weight"], torch.empty(1 << 20)
    for start in range(0, count, 1 << 20):
        stored.read(start, start + (1 << 20), out=line)
        assert line[0] == start and line[-1] == start + (1 << 20) - 1
replica.load_sharded_state = load
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
un.save(sys.argv[1], replica)
un.load(sys.argv[1], replica)
export_model(sys.argv[1], sys.argv[1] + "/m.safetensors")
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)
"""
    run = subprocess.run([sys.executable, "-c", script, tmp_path], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert int(run.stdout) < 80
    assert (tmp_path / "m.safetensors").stat().st_size > 128 << 20


# Into plain PyTorch ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("save", [save_split, save_whole])
def test_plain_pytorch_goes_on_from_a_checkpoint_of_three_ranks(
    tmp_path: Path, save: Callable[[Path, int], State]
) -> None:
    saved = save(tmp_path, 3)
    state = un.read_checkpoint(tmp_path)
    assert state.keys() == {"model", "optimizer", "step"}
    assert state["step"] == 3
    replica = make()
    replica.model.load_state_dict(state["model"])
    replica.optimizer.load_state_dict(state["optimizer"])
    check_same(state_of(replica), saved)
    train(replica, 1)


@pytest.mark.parametrize("save", [save_split, save_whole])
def test_export_writes_the_model_for_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], save: Callable[[Path, int], State]
) -> None:
    saved = save(tmp_path / "run", 3)
    out = tmp_path / "model.safetensors"
    assert cli.main(["export", str(tmp_path / "run"), str(out)]) == 0
    assert "9 tensors" in capsys.readouterr().out
    model = {name.removeprefix("model."): x for name, x in saved.items() if name.startswith("model.")}
    check_same(load_file(out), model)
    assert sorted(os.listdir(tmp_path)) == ["model.safetensors", "run"]
    with pytest.raises(SystemExit):
        cli.main(["export", str(tmp_path / "run"), str(out)])
    assert "exists" in capsys.readouterr().err
    assert cli.main(["export", str(tmp_path / "run" / "step-0000000003"), str(out), "--overwrite"]) == 0


@pytest.mark.parametrize(
    ("out", "message"),
    [
        ("model.pt", r"would be a pickle.*model.safetensors.*torch.save"),
        ("model.ckpt", r"should end in .safetensors"),
        ("absent/model.safetensors", r"absent is no folder"),
    ],
)
def test_export_refuses_what_it_cannot_write(tmp_path: Path, out: str, message: str) -> None:
    save_split(tmp_path, 1)
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        export_model(tmp_path, tmp_path / out)


def test_an_interrupted_export_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_split(tmp_path / "run", 2)
    monkeypatch.setattr(os, "fsync", lambda _: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(OSError, match="No space left"):
        export_model(tmp_path / "run", tmp_path / "m.safetensors")
    assert os.listdir(tmp_path) == ["run"]


def test_no_checkpoint_and_a_damaged_one_are_said_without_a_world(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(FileNotFoundError, match="no checkpoint at"):
        un.read_checkpoint(tmp_path)
    save_split(tmp_path, 2)
    damage(tmp_path / "step-0000000003" / "pieces-00001.safetensors", "flipped")
    with pytest.raises(CheckpointError, match=r"pieces-00001.safetensors is damaged"):
        un.read_checkpoint(tmp_path)
    assert cli.main(["export", str(tmp_path), str(tmp_path / "m.safetensors")]) == 1
    assert "pieces-00001.safetensors is damaged" in capsys.readouterr().err
