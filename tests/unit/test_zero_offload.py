"""ZeRO-Offload and ZeRO-Infinity in worlds of threads: every placement, against plain PyTorch in one process."""

from __future__ import annotations

import math
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from test_zero import adam, assert_same, loss_of, text, train, words
from torch import Tensor, nn

import unisono as un
from pairs import cover_pairs
from unisono.launchers.runtime.machine import available_bytes
from unisono.methods.offload import disk
from unisono.methods.offload.disk import DiskError
from unisono.methods.strategies.zero import offloading
from unisono.world import World
from unisono.world.virtual import run_threads

PLACES = [("cpu", "device"), ("disk", "device"), ("cpu", "cpu"), ("disk", "cpu"), ("disk", "disk")]
MATRIX = [
    (stage, *place, size, passes)
    for place, stage, size, passes in cover_pairs(
        PLACES, (1, 2, 3), (1, 2), (1, 2), valid=lambda place, stage, *_: place[1] == "device" or stage == 3
    )
]
SPECS = {
    "all-reduce": "allreduce",
    "stage 1": "zero(stage=1)",
    "stage 3": "zero(stage=3, unit_bytes=2500)",
    "offload": "zero(stage=2, optimizer_on=cpu, unit_bytes=2500)",
    "ahead": "zero(stage=2, optimizer_on=cpu, step_ahead=True, unit_bytes=2500)",
    "delayed": "zero(stage=2, optimizer_on=cpu, delayed_update=True, delay_after=0, unit_bytes=2500)",
    "partly on disk": "zero(stage=1, optimizer_on=disk, spill=0.5, unit_bytes=2500)",
    "all on disk": "zero(stage=3, optimizer_on=disk, params_on=disk, unit_bytes=2500)",
}


@pytest.fixture(autouse=True)
def quiet_about_folders() -> Any:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*direct I/O.*")
        yield


@pytest.mark.parametrize(("stage", "optimizer_on", "params_on", "size", "passes"), MATRIX)
def test_every_placement_trains_as_one_process(
    stage: int, optimizer_on: str, params_on: str, size: int, passes: int
) -> None:
    spec = f"zero(stage={stage}, optimizer_on={optimizer_on}, params_on={params_on}, accumulate={passes})"

    def work(world: World) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Any]]:
        model = text()
        optimizer = adam(model)
        replica = un.parallel(model, optimizer, spec, world=world, unit_bytes=1500)
        steps(model, optimizer, passes, [world.rank])
        before = {name: value.clone() for name, value in model.state_dict().items()}
        replica.restore()
        replica.close()
        return before, dict(model.state_dict()), optimizer.state_dict()

    model = text()
    optimizer = adam(model)
    steps(model, optimizer, passes, list(range(size)))
    expected = optimizer.state_dict()["state"]
    for before, after, found in run_threads(work, size):
        assert_same(before, dict(model.state_dict()))
        assert_same(after, dict(model.state_dict()))
        assert sorted(found["state"]) == sorted(expected)
        for number, state in expected.items():
            assert_same({key: found["state"][number][key] for key in state}, state)


def steps(model: nn.Module, optimizer: Any, passes: int, ranks: list[int]) -> None:
    for t in range(4):
        optimizer.zero_grad()
        for k in range(passes):
            loss_of(model, torch.cat([words(10 * t + k, rank) for rank in ranks])).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()


@pytest.mark.parametrize("saved_by", SPECS)
def test_a_checkpoint_of_any_placement_loads_in_any_other(saved_by: str, tmp_path: Path) -> None:
    def save(world: World) -> None:
        model = text()
        optimizer = adam(model)
        replica = un.parallel(model, optimizer, SPECS[saved_by], world=world)
        train(model, optimizer, lambda t: words(t, world.rank), range(2))
        un.save(tmp_path, replica)
        replica.close()

    run_threads(save, 2)
    plain = text()
    optimizer = adam(plain)
    found = un.read_checkpoint(tmp_path)
    plain.load_state_dict(found["model"])
    optimizer.load_state_dict(found["optimizer"])
    assert found["step"] == 2
    train(plain, optimizer, lambda t: torch.cat([words(t, r) for r in range(3)]), range(2, 4))

    specs, at = list(SPECS.values()), list(SPECS).index(saved_by)
    for spec in [specs[(at + k) % len(specs)] for k in (0, 1, 3)]:  # a file does not say who wrote it: each loads three

        def load(world: World, spec: str = spec) -> dict[str, Tensor]:
            model = text()
            optimizer = adam(model)
            replica = un.parallel(
                model, optimizer, spec.replace("delayed_update=True", "delayed_update=False"), world=world
            )
            assert un.load(tmp_path, replica).step == 2
            train(model, optimizer, lambda t: words(t, world.rank), range(2, 4))
            ended = {name: value.clone() for name, value in replica.consolidate().state_dict().items()}
            replica.close()
            return ended

        for ended in run_threads(load, 3):
            assert_same(ended, dict(plain.state_dict()), 1e-10)


def test_a_delayed_update_applies_each_gradient_one_step_later() -> None:
    """After the warm-up, step t computes with the values that the gradients up to t - 2 have made."""

    def work(world: World) -> dict[str, Tensor]:
        model = text()
        optimizer = adam(model)
        spec = "zero(stage=2, optimizer_on=cpu, delayed_update=True, delay_after=2, unit_bytes=1500)"
        replica = un.parallel(model, optimizer, spec, world=world)
        train(model, optimizer, lambda t: words(t, world.rank), range(6))
        replica.restore()
        return dict(model.state_dict())

    model, stepped = text(), text()
    optimizer = adam(stepped)
    for t in range(6):
        model.zero_grad()
        loss_of(model, torch.cat([words(t, r) for r in range(2)])).backward()
        if t >= 2:
            model.load_state_dict(stepped.state_dict())  # what the former steps made is taken over now
        for p, q in zip(stepped.parameters(), model.parameters(), strict=True):
            p.grad = q.grad
        optimizer.step()
        if t < 2:
            model.load_state_dict(stepped.state_dict())
    for found in run_threads(work, 2):
        assert_same(found, dict(stepped.state_dict()))


@pytest.mark.parametrize("place", ["optimizer_on=cpu", "optimizer_on=disk", "optimizer_on=disk, params_on=disk"])
def test_bf16_with_fp32_values_away_equals_bf16_with_them_here(place: str) -> None:
    def work(world: World, spec: str) -> dict[str, Tensor]:
        model = text().float()
        optimizer = adam(model)
        replica = un.parallel(model, optimizer, spec, world=world)
        train(model, optimizer, lambda t: words(t, world.rank), range(5))
        replica.restore()
        return dict(model.state_dict())

    base = "zero(stage=3, precision=bf16, unit_bytes=1500"
    away = run_threads(lambda world: work(world, f"{base}, {place})"), 2)[0]
    here = run_threads(lambda world: work(world, f"{base})"), 2)[0]
    assert_same(away, here, 1e-6)


@pytest.mark.parametrize("room", [True, False])
def test_master_values_wait_on_disk_if_there_is_room_for_them(room: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[int] = []

    def map_file(folder: str, n: int, dtype: torch.dtype) -> Tensor:
        if not room:
            raise DiskError(28, "No space left on device")
        waited.append(n)
        return disk.map_file(folder, n, dtype)

    monkeypatch.setattr(offloading, "map_file", map_file)
    found = {}
    for place in ("device", "disk"):
        model = text().float()
        optimizer = adam(model)
        spec = f"zero(stage=2, precision=bf16, optimizer_on={place}, unit_bytes=1500)"
        replica = un.parallel(model, optimizer, spec, world=World())
        train(model, optimizer, lambda t: words(t, 0), range(5))
        replica.restore()
        found[place] = dict(model.state_dict())
    assert_same(found["disk"], found["device"], 1e-6)
    assert sum(waited) >= room * sum(p.numel() for p in text().parameters())
    assert bool(waited) == room


def test_units_on_the_device_leave_the_hosts_memory_to_others() -> None:
    model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(4)))
    state = 12 * 64 * 64
    spec = f"zero(stage=2, optimizer_on=disk, host_memory={2 * state}, unit_bytes=16384)"
    replica: Any = un.parallel(model, torch.optim.AdamW(model.parameters()), spec, world=World())
    assert replica._offload.of(replica.units[0]).placement.homes == ["cpu", "cpu", "disk", "disk"]
    assert replica._offload.of(replica.units[0]).placement.choose_homes({0}) == ["cpu", "cpu", "cpu", "disk"]
    replica.close()


def test_moments_in_16_bits_train_nearly_as_well() -> None:
    def work(world: World) -> float:
        model = text().float()
        optimizer = adam(model)
        replica = un.parallel(model, optimizer, "zero(optimizer_on=cpu, moments=bf16)", world=world)
        train(model, optimizer, lambda t: words(t % 4, world.rank), range(40))
        ended = loss_of(model, words(0, world.rank)).item()
        replica.close()
        return ended

    model = text().float()
    train(model, adam(model), lambda t: words(t % 4, 0), range(40))
    start, plain = loss_of(text().float(), words(0, 0)).item(), loss_of(model, words(0, 0)).item()
    found = work(World())
    assert abs(found - plain) < 0.05 * (start - plain)


def test_a_gradient_scaler_is_refused_where_gradients_leave() -> None:
    model = text()
    replica = un.parallel(model, adam(model), "zero(optimizer_on=cpu)", world=World())
    with pytest.raises(ValueError, match="bf16"):
        replica.watch(torch.amp.GradScaler("cpu"))


def test_clipping_by_a_norm_that_is_no_number_spoils_the_values_as_in_one_process() -> None:
    """The factor is no number either, and the same for all gradients."""
    model = text()
    optimizer = adam(model)
    replica = un.parallel(model, optimizer, "zero(optimizer_on=cpu, unit_bytes=1500)", world=World())
    (loss_of(model, words(0, 0)) * math.nan).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    assert all(value.isnan().all() for value in model.state_dict().values())
    replica.close()


def test_too_little_host_memory_is_said_before_training_with_what_would_fit() -> None:
    model = nn.Linear(512, 512)
    optimizer = torch.optim.AdamW(model.parameters())
    with pytest.raises(ValueError, match=r"3.\d+ MiB does not fit into the 2.00 MiB .* spill=0\.\d+"):
        un.parallel(model, optimizer, "zero(optimizer_on=cpu, host_memory='2MiB')", world=World())


def test_a_second_copy_of_the_state_needs_as_much_host_memory_again() -> None:
    model = nn.Linear(512, 512)
    optimizer = torch.optim.AdamW(model.parameters())
    spec = "zero(optimizer_on=cpu, step_ahead={}, host_memory='4MiB')"
    with pytest.raises(ValueError, match=r"doubled state of 6.\d+ MiB .* into the 4.00 MiB .* step_ahead=False"):
        un.parallel(model, optimizer, spec.format(True), world=World())
    un.parallel(model, optimizer, spec.format(False), world=World())


def test_too_little_room_on_disk_is_said_before_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    model = nn.Linear(512, 512)
    optimizer = torch.optim.AdamW(model.parameters())

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OSError, match=r"3\d+ bytes.* are free there"):
        un.parallel(model, optimizer, f"zero(optimizer_on=disk, disk={str(tmp_path)!r})", world=World())


def test_available_memory_knows_a_limit_of_the_process() -> None:
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    before = available_bytes()
    try:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
        resource.setrlimit(resource.RLIMIT_AS, (pages * 4096 + (300 << 20), hard))
        assert available_bytes() <= 300 << 20
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
    assert before > 300 << 20


@pytest.mark.parametrize(
    ("settings", "word"),
    [
        ("stage=2, params_on=cpu, optimizer_on=cpu", "stage=3"),
        ("stage=3, params_on=cpu", "optimizer_on"),
        ("stage=3, params_on=disk, optimizer_on=cpu", "optimizer_on"),
        ("spill=0.5", "spill"),
        ("optimizer_on=disk, spill=1.5", "spill"),
        ("optimizer_on=cpu, device_memory=lots", "device_memory"),
        ("moments=bf16", "moments"),
        ("delayed_update=True", "delayed_update"),
        ("step_ahead=True", "step_ahead"),
        ("step_ahead=True, optimizer_on=disk", "step_ahead"),
        ("step_ahead=True, optimizer_on=cpu, delayed_update=True", "step_ahead"),
        ("optimizer_on=gpu", "optimizer_on"),
    ],
)
def test_placements_that_make_no_sense_are_refused(settings: str, word: str) -> None:
    model = nn.Linear(3, 3)
    with pytest.raises(ValueError, match=word):
        un.parallel(model, torch.optim.AdamW(model.parameters()), f"zero({settings})", world=World())


@pytest.mark.parametrize("place", ["optimizer_on=cpu", "optimizer_on=disk, params_on=disk, stage=3"])
def test_a_window_may_be_dropped_but_not_added_to_when_its_gradients_have_left(place: str) -> None:
    model = text()
    optimizer = adam(model)
    un.parallel(model, optimizer, f"zero({place})", world=World())
    loss_of(model, words(7, 0)).backward()
    optimizer.zero_grad()  # a batch that is skipped
    loss_of(model, words(0, 0)).backward()
    optimizer.step()
    plain = text()
    train(plain, adam(plain), lambda t: words(t, 0), range(1))
    assert_same(dict(model.state_dict()), dict(plain.state_dict()))
    with pytest.raises(RuntimeError, match="used up"):
        loss_of(model, words(1, 0)).backward()
    optimizer.zero_grad()
    loss_of(model, words(1, 0)).backward()
    with pytest.raises(RuntimeError, match="accumulate=2"):
        loss_of(model, words(2, 0)).backward()
