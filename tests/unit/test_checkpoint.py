"""Checkpoints: resuming changes no bit, faults leave the former checkpoint whole, another size is right."""

from __future__ import annotations

import errno
import json
import os
import random
import shutil
import subprocess
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import unisono as un
from preloaded import Program
from unisono import rng
from unisono.training.checkpoint import CheckpointError, folder, safetensors
from unisono.training.checkpoint.folder import read_folder
from unisono.world import World
from unisono.world.virtual import run_threads


def net(*, dropout: float = 0.0, norm: bool = False) -> torch.nn.Module:
    """The same weights each time; torch's own generator is shared by ranks that are threads."""
    layers = [torch.nn.Linear(5, 8), torch.nn.Tanh(), torch.nn.Dropout(dropout), torch.nn.Linear(8, 2)]
    if norm:
        layers.insert(1, torch.nn.BatchNorm1d(8))
    model, generator = torch.nn.Sequential(*layers), torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / 3)
    return model


def make(world: World | None = None, strategy: str = "allreduce", **options: object) -> un.Replica:
    model = net(**options)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    return un.parallel(model, optimizer, strategy, world=world or World())


def train(replica: un.Replica, batches: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    for x, y in batches:
        replica.optimizer.zero_grad()
        torch.nn.functional.mse_loss(replica.model(x), y).backward()
        replica.optimizer.step()


def batches(count: int, seed: int = 0) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return [(torch.randn(6, 5, generator=generator), torch.randn(6, 2, generator=generator)) for _ in range(count)]


def bits(replica: un.Replica) -> dict[str, bytes]:
    state = replica.model.state_dict()
    for index, entry in replica.optimizer.state_dict()["state"].items():
        state |= {f"{index}.{key}": value for key, value in entry.items()}
    return {name: value.contiguous().numpy().tobytes() for name, value in state.items()}


def steps(path: Path) -> list[str]:
    return sorted(os.listdir(path))


@pytest.fixture
def alone(tmp_path):
    """A replica with two checkpoints behind it, after 1 and 2 steps, and its state at each of them."""
    replica, states = make(), []
    for batch in batches(2):
        train(replica, [batch])
        un.save(tmp_path, replica)
        states.append(bits(replica))
    return replica, states


# Resuming -------------------------------------------------------------------------------------------------


def test_resuming_alone_changes_no_bit_with_dropout_and_adam(tmp_path):
    straight, data = make(dropout=0.5), batches(6)
    torch.manual_seed(1), np.random.seed(1), random.seed(1)
    train(straight, data)
    draws = (random.random(), np.random.rand(), torch.rand(1).item())

    first = make(dropout=0.5)
    torch.manual_seed(1), np.random.seed(1), random.seed(1)
    train(first, data[:3])
    un.save(tmp_path, first)
    second = make(dropout=0.5)
    torch.manual_seed(99), np.random.seed(99), random.seed(99)
    loaded = un.load(tmp_path, second)
    assert (loaded.step, second.step, second.world.ledger.step_count) == (3, 3, 3)
    train(second, data[3:])
    assert bits(second) == bits(straight)
    assert (random.random(), np.random.rand(), torch.rand(1).item()) == draws


@pytest.mark.parametrize("strategy", ["allreduce", "allreduce(buffers=local)"])
@pytest.mark.parametrize("size", [2, 3])
def test_resuming_in_a_world_changes_no_bit(tmp_path, size, strategy):
    samples = (torch.randn(40, 5, generator=torch.Generator().manual_seed(3)), torch.zeros(40, 2))

    def epoch(world, pause: bool) -> dict[str, bytes]:
        replica = make(world, strategy, norm=True)
        for i, batch in enumerate(shard_of(world)):
            train(replica, [batch])
            if pause and i == 2:
                un.save(tmp_path, replica)
                break
        return bits(replica)

    def shard_of(world):
        return un.shard(samples, batch_size=8, shuffle=True, world=world)

    def resumed(world) -> dict[str, bytes]:
        replica = make(world, strategy, norm=True)
        loaded = un.load(tmp_path, replica)
        assert (loaded.step, loaded.epoch, loaded.skipped) == (3, 0, [])
        for batch in shard_of(world):
            train(replica, [batch])
        assert replica.step == 5
        return bits(replica)

    straight = run_threads(lambda world: epoch(world, False), size)
    run_threads(lambda world: epoch(world, True), size)
    assert run_threads(resumed, size) == straight
    local = "1.running_mean"
    assert (straight[0][local] != straight[1][local]) == ("local" in strategy)


@pytest.mark.parametrize("sizes", [(1, 3), (3, 1), (2, 3), (3, 2)])
def test_resuming_at_another_size_is_right_to_rounding(tmp_path, sizes):
    samples = (torch.randn(36, 5, generator=torch.Generator().manual_seed(3)), torch.ones(36, 2))

    def run(world, parts: slice, path: Path | None = None):
        replica = make(world)
        shard = un.shard(samples, batch_size=12, world=world)
        if path and path.exists():
            un.load(path, replica)
        for i, batch in enumerate(shard, start=parts.start):
            train(replica, [batch])
            if i + 1 == parts.stop:
                break
        if path:
            un.save(path, replica)
        return [p.detach().clone() for p in replica.model.parameters()]

    expected = run_threads(lambda world: run(world, slice(0, 3)), 1)[0]
    run_threads(lambda world: run(world, slice(0, 2), tmp_path / "c"), sizes[0])
    for found in run_threads(lambda world: run(world, slice(2, 3), tmp_path / "c"), sizes[1]):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("strategy", ["allreduce", "local_sgd", "shared", "zero"])
def test_a_fused_step_goes_on_as_plain_pytorch_where_a_parameter_is_not_in_row_order(tmp_path, strategy):
    """A fused step takes parameter and state as they lie in memory; a file has both row by row."""
    generator = torch.Generator().manual_seed(1)
    data = [torch.randn(4, 3, 5, 5, generator=generator) for _ in range(4)]

    def build() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        model, weights = torch.nn.Conv2d(3, 4, 3, bias=False), torch.Generator().manual_seed(2)
        with torch.no_grad():
            model.weight.copy_(torch.randn(model.weight.shape, generator=weights))
        model.to(memory_format=torch.channels_last)
        return model, torch.optim.Adam(model.parameters(), lr=0.05, fused=True)

    def steps(model: torch.nn.Module, optimizer: torch.optim.Optimizer, batches: list[torch.Tensor]) -> None:
        for x in batches:
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()

    def work(world: World) -> torch.Tensor:
        model, optimizer = build()
        replica = un.parallel(model, optimizer, strategy, world=world)
        steps(model, optimizer, data[:2])
        un.save(tmp_path, replica)
        replica.close()
        model, optimizer = build()
        replica = un.parallel(model, optimizer, strategy, world=world)
        un.load(tmp_path, replica)
        steps(model, optimizer, data[2:])
        return next(replica.consolidate().parameters()).detach().clone()

    model, optimizer = build()
    steps(model, optimizer, data)
    for found in run_threads(work, 2):
        torch.testing.assert_close(found, model.weight.detach())


def test_parameters_stay_the_same_objects_and_shards_made_before_are_moved(tmp_path):
    data = (torch.randn(12, 5), torch.randn(12, 2))
    first = make()
    for i, batch in enumerate(un.shard(data, batch_size=4, world=first.world)):
        train(first, [batch])
        if i == 1:
            break
    un.save(tmp_path, first)
    second = make()
    before = [id(p) for p in second.model.parameters()]
    shard = un.shard(data, batch_size=4, world=second.world)
    un.load(tmp_path, second)
    assert [id(p) for p in second.model.parameters()] == before
    assert len(list(shard)) == 1
    assert second.world.pending_shards == {}


def test_a_schedulers_state_and_any_nested_extra_come_back(tmp_path):
    replica = make()
    scheduler = torch.optim.lr_scheduler.MultiStepLR(replica.optimizer, [1, 5])
    train(replica, batches(1))
    scheduler.step()
    extra = {"scheduler": scheduler.state_dict(), "best": (1, float("inf")), "t": torch.arange(3)}
    un.save(tmp_path, replica, extra=extra)
    other = make()
    back = un.load(tmp_path, other).extra
    assert back["best"] == (1, float("inf"))
    assert torch.equal(back["t"], extra["t"])
    again = torch.optim.lr_scheduler.MultiStepLR(other.optimizer, [1, 5])
    again.load_state_dict(back["scheduler"])
    assert again.state_dict() == scheduler.state_dict()


def test_what_differs_between_ranks_comes_back_to_each_and_is_averaged_at_another_size(tmp_path):
    def saving(world):
        replica = make(world)
        with torch.no_grad():
            replica.model[0].weight.fill_(world.rank)
        un.save(tmp_path, replica, extra={"mine": world.rank, "t": torch.full((world.rank + 1,), world.rank)})

    def loading(world):
        replica = make(world)
        extra = un.load(tmp_path, replica).extra
        return replica.model[0].weight.unique().tolist(), extra["mine"], extra["t"].tolist()

    run_threads(saving, 3)
    assert run_threads(loading, 3) == [([r], r, [r] * (r + 1)) for r in range(3)]
    with pytest.warns(UserWarning, match=r"1 tensors differed between its ranks \(model.0.weight\)"):
        assert run_threads(loading, 2) == [([1.0], 0, [0])] * 2
    shared = load_file(tmp_path / "step-0000000000" / "shared.safetensors")
    second = load_file(tmp_path / "step-0000000000" / "rank-00001.safetensors")
    assert "model.3.weight" in shared
    assert "model.3.weight" not in second


def test_a_new_rank_draws_other_numbers_than_the_ones_that_were_there(tmp_path):
    """In processes of their own, as ranks that are threads share one generator."""
    un.save(tmp_path, make())
    state = read_folder(next(tmp_path.iterdir()), 0, 1).owns[0]["rng"]
    draws = set()
    for rank in (None, 1, 2):
        rng.restore(state, torch.device("cpu"))
        if rank is not None:
            rng.derive(state, rank)
        draws.add((random.random(), np.random.rand(), torch.rand(1).item()))
    assert len({x for draw in draws for x in draw}) == 9


def test_the_strategy_gets_every_old_ranks_own_part_at_another_size(tmp_path):
    seen = []

    def saving(world):
        replica = make(world)
        replica.state_dict = lambda: {"shared": {"step": 4}, "local": {"residual": torch.full((2,), world.rank)}}
        un.save(tmp_path, replica)

    def loading(world):
        replica = make(world)
        replica.load_state_dict = lambda state, *, same_world: seen.append((world.size, same_world, state))
        un.load(tmp_path, replica)

    run_threads(saving, 3)
    run_threads(loading, 2)
    run_threads(loading, 3)
    other, same = [x for x in seen if x[0] == 2], [x for x in seen if x[0] == 3]
    assert [[p["residual"].tolist() for p in state["locals"]] for _, _, state in other] == [
        [[0, 0], [1, 1], [2, 2]]
    ] * 2
    assert sorted(state["local"]["residual"].tolist() for _, _, state in same) == [[0, 0], [1, 1], [2, 2]]
    assert {(size, same_world) for size, same_world, _ in seen} == {(2, False), (3, True)}
    assert all(state["shared"] == {"step": 4} for _, _, state in seen)


# Files ----------------------------------------------------------------------------------------------------


def test_the_files_are_json_and_safetensors_that_others_can_read(tmp_path, alone):
    folder = tmp_path / "step-0000000002"
    assert steps(folder) == [
        *("manifest.json", "rank-00000.json", "rank-00000.safetensors", "shared.json", "shared.safetensors"),
    ]
    tensors = load_file(folder / "shared.safetensors")
    for name, value in alone[0].model.state_dict().items():
        assert torch.equal(tensors[f"model.{name}"], value)
    manifest = json.loads((folder / "manifest.json").read_text())
    assert (manifest["step"], manifest["world_size"]) == (2, 1)


def test_a_file_of_tensors_is_read_back_and_shared_memory_is_no_obstacle(tmp_path):
    base = torch.arange(12.0)
    tensors = {
        "whole": base,
        "half": base[:6],
        "b": torch.tensor(True),
        "none": torch.empty(0, 3),
        "é": torch.tensor(1),
    }
    written = safetensors.write(tmp_path / "x", tensors)
    back, read = safetensors.read(tmp_path / "x")
    assert read == written
    for reader in (back, load_file(tmp_path / "x")):
        assert reader.keys() == tensors.keys()
        assert all(torch.equal(reader[k], v) and reader[k].dtype == v.dtype for k, v in tensors.items())
    data = (tmp_path / "x").read_bytes()
    for end in range(0, len(data), 7):
        (tmp_path / "y").write_bytes(data[:end])
        with pytest.raises(ValueError, match=r"y (is cut short|has a broken header)"):
            safetensors.read(tmp_path / "y")


def test_the_newest_k_remain_and_saving_again_at_a_step_replaces(tmp_path):
    replica = make()
    for batch in batches(4):
        train(replica, [batch])
        un.save(tmp_path, replica, keep=2)
    assert steps(tmp_path) == ["step-0000000003", "step-0000000004"]
    assert un.save(tmp_path, replica, keep=2, extra="again") == str(tmp_path / "step-0000000004-2")
    assert steps(tmp_path) == ["step-0000000003", "step-0000000004-2"]
    assert un.load(tmp_path, make()).extra == "again"
    un.save(tmp_path, replica, keep=2)
    assert steps(tmp_path) == ["step-0000000003", "step-0000000004"]
    assert un.load(tmp_path / "step-0000000003", make()).step == 3
    train(replica, batches(1))
    un.save(tmp_path, replica, keep=None)
    assert len(steps(tmp_path)) == 3


def test_the_newest_save_counts_also_when_steps_began_anew(tmp_path, alone):
    fresh = make()
    train(fresh, batches(1, seed=5))
    un.save(tmp_path, fresh, keep=1)
    assert steps(tmp_path) == ["step-0000000001-2"]
    other = make()
    un.load(tmp_path, other)
    assert bits(other) == bits(fresh)


# Faults ---------------------------------------------------------------------------------------------------


def damage(folder: Path, kind: str, file: str) -> None:
    target = folder / file
    if kind == "truncated":
        os.truncate(target, target.stat().st_size // 2)
    elif kind == "emptied":
        os.truncate(target, 0)
    elif kind == "flipped":
        data = bytearray(target.read_bytes())
        data[len(data) // 2] ^= 1
        target.write_bytes(data)
    else:
        target.unlink()


@pytest.mark.parametrize(
    "file", ["manifest.json", *(f"{s}.{e}" for s in ("shared", "rank-00000") for e in ("json", "safetensors"))]
)
@pytest.mark.parametrize("kind", ["truncated", "emptied", "flipped", "missing"])
def test_a_damaged_checkpoint_is_skipped_by_name_and_the_former_one_loaded(tmp_path, alone, kind, file):
    damage(tmp_path / "step-0000000002", kind, file)
    replica = make()
    with pytest.warns(UserWarning, match=f"skipped .*step-0000000002: .*{file.split('.')[0]}"):
        loaded = un.load(tmp_path, replica)
    assert (loaded.step, loaded.path) == (1, str(tmp_path / "step-0000000001"))
    assert loaded.skipped[0][0] == str(tmp_path / "step-0000000002")
    assert bits(replica) == alone[1][0]


@pytest.mark.parametrize(("at", "said"), [(1, "no checkpoint was written"), (2, "it is not known whether")])
def test_a_rank_that_dies_while_the_others_save_leaves_the_former_ones_whole(tmp_path, alone, at, said):
    """Under a strategy that goes on without it: those that live all hear of it."""

    class Losing(type(alone[0])):
        heard = 0

        def present_ranks(self):
            return [0, 1]

        def gather_present(self, obj):
            self.heard += 1
            return {0: obj} | ({1: [{"split": None}, None]} if self.heard <= at else {})

    replica = make()
    replica.__class__ = Losing
    with pytest.raises(un.PeerLost, match=f"{said}.*rank\\(s\\) 1 died while the others saved"):
        un.save(tmp_path, replica)
    assert not [name for name in steps(tmp_path) if name.startswith(".")]
    assert un.load(tmp_path / "step-0000000002", make()).step == 2


def test_every_flipped_byte_is_noticed(tmp_path):
    model = torch.nn.Linear(1, 1)
    replica = un.parallel(model, torch.optim.SGD(model.parameters(), lr=1), world=World())
    folder = Path(un.save(tmp_path, replica))
    for file in ("manifest.json", "shared.json", "shared.safetensors"):
        data = (folder / file).read_bytes()
        for position in range(0, len(data), 5):
            (folder / file).write_bytes(data[:position] + bytes([data[position] ^ 4]) + data[position + 1 :])
            with pytest.raises((CheckpointError, ValueError), match=r"manifest|shared"):
                read_folder(folder, 0, 1)
        (folder / file).write_bytes(data)
    read_folder(folder, 0, 1)


def test_ranks_agree_to_skip_what_one_of_them_finds_damaged(tmp_path):
    def saving(world):
        replica = make(world)
        for batch in batches(2):
            train(replica, [batch])
            un.save(tmp_path, replica)

    run_threads(saving, 3)
    damage(tmp_path / "step-0000000002", "flipped", "rank-00002.safetensors")
    with pytest.warns(UserWarning, match=r"rank 2: rank-00002.safetensors is damaged: its checksum differs"):
        loaded = run_threads(lambda world: un.load(tmp_path, make(world)), 3)
    assert [x.step for x in loaded] == [1, 1, 1]
    assert len({str(x.skipped) for x in loaded}) == 1
    damage(tmp_path / "step-0000000001", "missing", "rank-00002.json")
    for size in (1, 3):
        with pytest.raises(CheckpointError, match=r"no intact checkpoint at (.|\n)*rank-00002.json is missing"):
            run_threads(lambda world: un.load(tmp_path, make(world)), size)


def interrupt(monkeypatch, module: object, name: str, error: BaseException, *, when=lambda *args: True) -> list[int]:
    """Make `module.name` raise; returns a list that grows when it does."""
    original, fired = getattr(module, name), []

    def broken(*args, **kwargs):
        if when(*args):
            fired.append(1)
            raise error
        return original(*args, **kwargs)

    monkeypatch.setattr(module, name, broken)
    return fired


FULL = OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize(
    ("module", "name", "error"),
    [
        (os, "rename", OSError("broken rename")),
        (os, "rename", KeyboardInterrupt()),
        (os, "fsync", FULL),
        (safetensors, "write", FULL),
        (safetensors, "write_bytes", FULL),
        (Path, "mkdir", PermissionError("no")),
    ],
)
def test_an_interrupted_save_leaves_the_former_checkpoints_and_nothing_else(
    tmp_path, alone, monkeypatch, module, name, error
):
    replica, states = alone
    train(replica, batches(1))
    with monkeypatch.context() as patch:
        fired = interrupt(patch, module, name, error)
        expected = (CheckpointError, r"earlier checkpoints are unchanged.*rank 0: ")
        if isinstance(error, KeyboardInterrupt):
            expected = (KeyboardInterrupt, None)
        with pytest.raises(expected[0], match=expected[1]):
            un.save(tmp_path, replica, keep=1)
        assert fired
    assert steps(tmp_path) == ["step-0000000001", "step-0000000002"]
    other = make()
    assert un.load(tmp_path, other).skipped == []
    assert bits(other) == states[1]
    un.save(tmp_path, replica)
    assert un.load(tmp_path, make()).step == 3


def test_a_disk_that_fills_up_on_one_rank_raises_on_every_rank(tmp_path, monkeypatch):
    run_threads(lambda world: un.save(tmp_path, make(world)), 3)
    before = steps(tmp_path)
    fired = interrupt(monkeypatch, safetensors, "write", FULL, when=lambda path, _: path.name.startswith("rank-00001"))

    def saving(world):
        replica = make(world)
        train(replica, batches(1))
        with pytest.raises(CheckpointError, match=r"rank 1: OSError: \[Errno 28\] No space left"):
            un.save(tmp_path, replica)
        return world.all_reduce(torch.ones(1), "sum").wait().item()

    assert run_threads(saving, 3, timeout_s=20) == [3, 3, 3]
    assert len(fired) == 1
    assert steps(tmp_path) == before


def test_a_real_limit_on_file_size_leaves_the_former_checkpoint(tmp_path):
    script = """
import resource, sys, torch, unisono as un
from unisono.training.checkpoint import CheckpointError
def make(width):
    model = torch.nn.Linear(width, width)
    return un.parallel(model, torch.optim.SGD(model.parameters(), lr=1), world=un.World())
un.save(sys.argv[1], make(4))
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
try:
    un.save(sys.argv[1], make(400))
except CheckpointError as error:
    print(error)
un.load(sys.argv[1], make(4))
"""
    program = tmp_path.with_suffix(".py")
    program.write_text(script)
    run = Program(program, tmp_path, env=os.environ)
    out, err = run.communicate(60)
    assert run.returncode == 0, err
    assert "File too large" in out
    assert steps(tmp_path) == ["step-0000000000"]


@pytest.mark.parametrize(
    ("name", "files"),
    [(".writing-step-0000000002-abc", ("shared.json", ".lock")), (".making-abc", (".lock",)), (".making-abc", ())],
)
def test_what_a_killed_save_left_is_removed_by_the_next(tmp_path, alone, name, files):
    left = tmp_path / name
    left.mkdir()
    for file in files:
        (left / file).write_text("half")
    assert un.load(tmp_path, make()).skipped == []
    un.save(tmp_path, alone[0])
    assert not left.exists()


@pytest.mark.parametrize("locks_first", [False, True])
def test_a_save_whose_folder_another_run_takes_for_abandoned_begins_another(tmp_path, monkeypatch, locks_first):
    take_lock = folder.take_lock

    def be_late(path):
        monkeypatch.setattr(folder, "take_lock", take_lock)
        if not locks_first:
            folder._remove_abandoned(path.parent)
            return take_lock(path)
        lock = take_lock(path)
        shutil.rmtree(path.parent)
        return lock

    monkeypatch.setattr(folder, "take_lock", be_late)
    un.save(tmp_path, make())
    assert steps(tmp_path) == ["step-0000000000"]


def test_two_runs_that_save_into_one_folder_leave_each_other_alone(tmp_path, monkeypatch):
    other, write = make(), safetensors.write
    train(other, batches(1))

    def save_the_other_meanwhile(path, tensors):
        monkeypatch.setattr(safetensors, "write", write)
        with pytest.warns(UserWarning, match="another run is saving into .* Give each run a folder of its own"):
            un.save(tmp_path, other)
        return write(path, tensors)

    monkeypatch.setattr(safetensors, "write", save_the_other_meanwhile)
    un.save(tmp_path, make())
    assert steps(tmp_path) == ["step-0000000000", "step-0000000001"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        un.save(tmp_path, make())  # the first has ended


def test_a_killed_process_never_leaves_a_checkpoint_in_part(tmp_path):
    """Killed at random moments of saving over and over, what is there always loads."""
    script = """
import sys, torch, unisono as un
model = torch.nn.Linear(200, 200)
replica = un.parallel(model, torch.optim.SGD(model.parameters(), lr=1), world=un.World())
while True:
    replica.step += 1
    with torch.no_grad():
        model.weight.fill_(replica.step)
    un.save(sys.argv[1], replica, keep=2)
    if replica.step == 1:
        print("ready", flush=True)  # there is one, however slow the machine
"""
    program = tmp_path.with_suffix(".py")
    program.write_text(script)
    for delay_s in (0.05, 0.11, 0.17):
        process = Program(program, tmp_path, env=os.environ)
        process.stdout.readline()
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(delay_s)
        process.kill()
        process.communicate()
    model = torch.nn.Linear(200, 200)
    replica = un.parallel(model, torch.optim.SGD(model.parameters(), lr=1), world=World())
    loaded = un.load(tmp_path, replica)
    assert loaded.skipped == []
    assert model.weight.unique().tolist() == [loaded.step]


# Mistakes -------------------------------------------------------------------------------------------------


def test_no_checkpoint_is_said_on_every_rank(tmp_path):
    for size in (1, 2):
        with pytest.raises(FileNotFoundError, match=f"no checkpoint at {tmp_path}"):
            run_threads(lambda world: un.load(tmp_path, make(world)), size)
    with pytest.raises(FileNotFoundError, match=r"un.save"):
        un.load(tmp_path / "absent", make())


def test_a_path_that_not_all_ranks_see_is_said_with_the_remedy(tmp_path, monkeypatch):
    monkeypatch.setattr("unisono.training.checkpoint.together._VISIBLE_WITHIN_S", 0.1)

    def saving(world):
        un.save(tmp_path / str(world.rank), make(world))

    with pytest.raises(CheckpointError, match=r"rank 1: .* on b does not show the folder .* disk that all hosts share"):
        run_threads(saving, 2, hosts=["a", "b"])
    assert not (tmp_path / "0").exists() or steps(tmp_path / "0") == []
    run_threads(lambda world: un.save(tmp_path / "0", make(world)), 2)
    with pytest.raises(CheckpointError, match="rank 1: it cannot be seen from b"):
        run_threads(lambda world: un.load(tmp_path / str(world.rank), make(world)), 2, hosts=["a", "b"])


def test_a_model_that_does_not_fit_is_named_and_left_alone(tmp_path, alone):
    def other(*layers):
        model = torch.nn.Sequential(*layers)
        return un.parallel(model, torch.optim.Adam(model.parameters()), world=World())

    wide = other(torch.nn.Linear(5, 9), torch.nn.Tanh(), torch.nn.Identity(), torch.nn.Linear(9, 2))
    before = bits(wide)
    with pytest.raises(ValueError, match=r"'0.weight' has shape \(8, 5\) there, \(9, 5\) in the model"):
        un.load(tmp_path, wide)
    assert bits(wide) == before
    longer = other(torch.nn.Linear(5, 8), torch.nn.Linear(8, 8))
    with pytest.raises(ValueError, match=r"it has no '1.weight'.*the model has no '3.weight'.*strict=False"):
        un.load(tmp_path, longer)
    un.load(tmp_path, longer, strict=False)
    assert torch.equal(longer.model[0].weight, alone[0].model[0].weight)


def test_an_optimizer_that_does_not_fit_is_named(tmp_path, alone):
    model = net()
    groups = [{"params": [p]} for p in model.parameters()]
    replica = un.parallel(model, torch.optim.Adam(groups), world=World())
    with pytest.raises(ValueError, match=r"groups of \[4\] parameters, this one is Adam with groups of \[1, 1, 1, 1\]"):
        un.load(tmp_path, replica)
    with pytest.warns(UserWarning, match="its state is not loaded"):
        un.load(tmp_path, replica, strict=False)


def test_what_cannot_be_saved_is_refused_by_its_path_and_on_every_rank(tmp_path):
    with pytest.raises(TypeError, match=r"extra\.hook: got <class 'function'>"):
        un.save(tmp_path, make(), extra={"hook": lambda: 0})

    def saving(world):
        with pytest.raises(TypeError if world.rank else CheckpointError, match="extra: got <class 'object'>"):
            un.save(tmp_path, make(world), extra=object() if world.rank else None)

    run_threads(saving, 2)
    assert steps(tmp_path) == []
    for keep in (0, -1, 1.5, True):
        with pytest.raises(ValueError, match="keep is"):
            un.save(tmp_path, make(), keep=keep)


def test_tied_weights_and_a_compiled_model_are_saved_under_their_own_names(tmp_path):
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    model[1].weight = model[0].weight
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        compiled = torch.compile(model)
    replica = un.parallel(compiled, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), world=World())
    folder = Path(un.save(tmp_path, replica))
    names = set(load_file(folder / "shared.safetensors"))
    assert names == {"model.0.weight", "model.0.bias", "model.1.bias"}
    model2 = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    model2[1].weight = model2[0].weight
    un.load(tmp_path, un.parallel(model2, torch.optim.SGD(model2.parameters(), lr=0.1), world=World()))
    assert model2[1].weight is model2[0].weight
    assert torch.equal(model2[0].weight, model[0].weight)


def test_another_kind_of_optimizer_is_refused_by_name(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 2)
    replica = un.parallel(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), world=World())
    un.save(tmp_path, replica)
    replica.close()
    other = un.parallel(model, torch.optim.Adam(model.parameters()), world=World())
    with pytest.raises(ValueError, match=r"is SGD with groups of .* this one is Adam"):
        un.load(tmp_path, other)


def test_a_save_that_was_ended_just_before_it_got_its_name_is_removed_by_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writing, lock = folder.begin_folder(tmp_path, 1)

    def end(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", end)
        with pytest.raises(KeyboardInterrupt):
            folder.publish_folder(writing, {}, step=1, world_size=1)
    lock.close()  # as the kernel does where the process was killed
    another, lock = folder.begin_folder(tmp_path, 2)
    lock.close()
    assert list(tmp_path.iterdir()) == [another]
