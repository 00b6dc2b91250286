"""The compiled step of Adam against torch's fused one, bit by bit; where there is no compiler, torch's steps."""

from __future__ import annotations

import ctypes
import gc
import os
import shutil
import signal
import subprocess
import tempfile
import time
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


def test_without_a_compiler_torch_steps(monkeypatch: pytest.MonkeyPatch) -> None:
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
    finally:
        native.load.cache_clear()


def test_what_it_does_not_step_is_left_to_torch() -> None:
    line = torch.zeros(4)
    assert native.fits({"master": line, "exp_avg": line, "exp_avg_sq": line}, line.bfloat16(), None)
    assert not native.fits({"master": line.double(), "exp_avg": line, "exp_avg_sq": line}, line, None)
    assert not native.fits({"master": line, "exp_avg": line, "exp_avg_sq": line}, line.half(), None)
    assert not native.fits({"master": line, "sum": line}, line, None)
    assert not native.fits({"master": line}, line, None)


def test_a_gradient_whose_elements_are_apart_is_refused() -> None:
    stepper = make_stepper()
    stepper.begin()
    for gradient in (torch.ones(8)[::2], torch.ones(()).expand(4)):
        with pytest.raises(ValueError, match="expected a contiguous"):
            stepper.step(0, gradient)
    stepper.close()


@needs_compiler
@pytest.mark.parametrize("ahead", [False, True])
def test_moments_of_16_bits_are_those_of_torchs_kernel_in_tiles(ahead: bool) -> None:
    found, n = [], 5003
    for compiled in (True, False):
        generator = torch.Generator().manual_seed(0)
        values = torch.randn(n, generator=generator)
        block = Block(values, [Run(0, 3001, 0), Run(3001, n, 0)])
        optimizer = torch.optim.AdamW([values], lr=0.01, betas=(0.8, 0.95))
        stepper = Stepper(optimizer, [block], moments=torch.bfloat16, threads=2, ahead=ahead)
        stepper._pool = stepper._pool if compiled else None
        out = torch.zeros(n, dtype=torch.bfloat16)
        for i in range(4):
            gradient, absent = torch.randn(n, generator=generator).bfloat16(), [(0, 3001)] if i == 2 else []
            now = stepper.begin()
            if ahead:
                wait, take = stepper.start_ahead(0, gradient, out, absent, settings=now)
                wait()
                take()
            else:
                stepper.step(0, gradient, out, absent=absent)
        found.append([out, *(block.chunks[0].open().values())])
        stepper.close()
    assert [x.dtype for x in found[0][2:]] == [torch.bfloat16] * 2
    assert all(map(torch.equal, *found))


@needs_compiler
@pytest.mark.parametrize(
    ("start", "lr", "betas", "decay"),
    [
        (0, 1e-3, (0.9, 0.999), 0.1),
        (2**24 - 2, torch.tensor(0.01), (torch.tensor(0.0), torch.tensor(0.9)), 0.0),  # a count in fp32 goes no further
        (100_000, 0.0, (0.4, 0.0), 0.3),
    ],
)
@pytest.mark.parametrize("make", [torch.optim.Adam, torch.optim.AdamW])
def test_numbers_at_the_ends_of_their_range_are_torchs_too(
    make: Any, start: int, lr: Any, betas: Any, decay: float
) -> None:
    generator, n = torch.Generator().manual_seed(1), 1003
    settings = {"lr": lr, "betas": betas, "weight_decay": decay}
    param = torch.nn.Parameter(torch.randn(n, generator=generator))
    plain = {**settings, "lr": float(lr), "betas": tuple(map(float, betas)), "fused": True}
    optimizer, values = make([param], **plain), param.detach().clone()
    stepper = Stepper(make([values], **settings), [Block(values, [Run(0, n, 0)])], threads=2)
    if start:
        moments = torch.rand(2, n, generator=generator) * torch.tensor([[1e-3], [1e-6]])
        state = {"step": torch.tensor(float(start)), "exp_avg": moments[0], "exp_avg_sq": moments[1]}
        optimizer.state[param] = {name: x.clone() for name, x in state.items()}
        stepper.blocks[0].load(state)
    for _ in range(3):
        gradient = torch.randn(n, generator=generator)
        gradient[3:10] = torch.tensor([torch.nan, torch.inf, -torch.inf, 1e-40, -3e-42, 1e30, -0.0])
        gradient[100:200] *= 1e-25
        param.grad = gradient.clone()
        optimizer.step()
        stepper.begin()
        stepper.step(0, gradient)
    mine = stepper.blocks[0]
    for name, expected in {"master": param.detach(), **optimizer.state[param]}.items():
        found = mine.steps.scalars(0)["step"] if name == "step" else mine.read(name)  # type: ignore[index]
        torch.testing.assert_close(found, expected, rtol=0.0, atol=0.0, equal_nan=True)
    stepper.close()


# In strangers' hands --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if shutil.which("c++") is None:
        pytest.skip("needs a C++ compiler")
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder))
        native.find()
    [library] = (folder / "unisono").iterdir()
    return library


@pytest.fixture
def calls(compiled: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[list[str]]:
    """Those of the compiler, which takes no time here; the cache is empty."""
    found: list[list[str]] = []
    monkeypatch.setattr(native, "_compile", lambda command: found.append(command) or shutil.copy(compiled, command[-1]))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return found


def test_it_is_compiled_once_and_kept_where_only_its_user_writes(
    calls: list[list[str]], compiled: Path, tmp_path: Path
) -> None:
    former = os.umask(0)
    try:
        native.find()
        native.find()
    finally:
        os.umask(former)
    assert len(calls) == 1
    kept = tmp_path / "unisono"
    assert [(path.name, path.stat().st_mode & 0o777) for path in kept.iterdir()] == [(compiled.name, 0o700)]
    assert kept.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("whose", ["writable file", "writable folder", "another's"])
def test_code_that_others_may_have_written_is_not_run(
    whose: str, calls: list[list[str]], compiled: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "unisono").mkdir(mode=0o700)
    planted = Path(shutil.copy(compiled, tmp_path / "unisono"))
    if whose == "another's":
        monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    else:
        (planted if whose == "writable file" else planted.parent).chmod(0o777)
    load, loaded = ctypes.CDLL, []
    monkeypatch.setattr(ctypes, "CDLL", lambda path: loaded.append(path) or load(path))
    native.find()
    assert loaded == [calls[0][-1]]
    assert [*tmp_path.iterdir()] == [planted.parent]


def test_half_a_file_is_replaced(calls: list[list[str]], compiled: Path, tmp_path: Path) -> None:
    (tmp_path / "unisono").mkdir(mode=0o700)
    (tmp_path / "unisono" / compiled.name).touch(0o700)
    native.find()
    native.find()
    assert len(calls) == 1


@pytest.mark.parametrize("what", ["no home", "a file", "read-only"])
def test_without_a_cache_it_is_compiled_for_this_process(
    what: str, calls: list[list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unknown() -> Path:
        raise RuntimeError("no home")

    (tmp_path / "file").touch()
    if what == "no home":
        monkeypatch.setenv("XDG_CACHE_HOME", "relative")
        monkeypatch.setattr(Path, "home", unknown)
    elif what == "a file":
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    else:
        (tmp_path / "unisono").mkdir(mode=0o700)
        access = os.access
        monkeypatch.setattr(os, "access", lambda path, mode: path != tmp_path / "unisono" and access(path, mode))
    native.find()
    assert len(calls) == 1
    assert not [path for path in tmp_path.rglob("*") if path.name not in ("file", "unisono")]


def test_a_compiler_that_fails_is_quoted_and_one_that_hangs_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(RuntimeError, match=r"sh failed: a\.cpp: error: no such flag"):
        native._compile(["sh", "-c", "echo 'a.cpp: error: no such flag' >&2; exit 1"])
    monkeypatch.setattr(native, "_COMPILE_S", 0.5)
    with pytest.raises(subprocess.TimeoutExpired):
        native._compile(["sh", "-c", f"sleep 60 & echo $! > {tmp_path}/pid; wait"])
    stat = Path("/proc") / (tmp_path / "pid").read_text().strip() / "stat"
    deadline = time.monotonic() + 10
    while stat.exists() and ") Z " not in stat.read_text() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert time.monotonic() < deadline


def test_who_waited_for_a_compiler_is_told_how_to_turn_it_off(monkeypatch: pytest.MonkeyPatch) -> None:
    def hang(*, keep: bool) -> None:
        raise subprocess.TimeoutExpired("c++", 60)

    monkeypatch.setattr(native, "_open", hang)
    native.load.cache_clear()
    try:
        with pytest.warns(UserWarning, match="UNISONO_COMPILED_STEP=0"):
            assert native.load() is None
        monkeypatch.setenv("UNISONO_COMPILED_STEP", "0")
        with pytest.raises(native.NotCompiled):
            native.find()
    finally:
        native.load.cache_clear()


def stepped(stepper: Stepper) -> list[float]:
    stepper.begin()
    stepper.step(0, torch.ones(4))
    return [round(x, 4) for x in stepper.blocks[0].read("master").tolist()]


def make_stepper(threads: int = 1) -> Stepper:
    values = torch.zeros(4)
    optimizer = torch.optim.AdamW([values], lr=0.5, weight_decay=0.0)
    return Stepper(optimizer, [Block(values, [Run(0, 4, 0)])], threads=threads)


@needs_compiler
def test_a_forked_child_steps_with_threads_of_its_own() -> None:
    stepper = make_stepper()
    assert stepped(stepper) == [-0.5] * 4
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(20)  # ends a child that waits for threads that it does not have
        try:
            right = stepped(stepper) == [-1.0] * 4
            stepper.close()
            os._exit(0 if right else 1)
        finally:
            os._exit(2)
    assert os.waitpid(child, 0)[1] == 0
    assert stepped(stepper) == [-1.0] * 4
    stepper.close()


@needs_compiler
def test_threads_end_with_their_stepper_and_a_closed_one_says_so() -> None:
    stepper = make_stepper()
    before = len(os.listdir("/proc/self/task"))
    other = make_stepper(3)
    assert stepped(other) == [-0.5] * 4
    assert len(os.listdir("/proc/self/task")) > before
    other._workers.close()
    del other
    gc.collect()
    assert len(os.listdir("/proc/self/task")) == before
    stepper.close()
    stepper.close()
    with pytest.raises(RuntimeError, match="its threads have ended"):
        stepped(stepper)


@needs_compiler
def test_threads_that_cannot_be_started_are_an_error_and_no_crash() -> None:
    with pytest.raises(RuntimeError, match="ulimit -u"):
        native.NativePool(-1)
