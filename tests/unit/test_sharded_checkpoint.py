"""Checkpoints of state that is split over the ranks: any number of ranks, split or not, loads any other."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from split_replica import (
    Split,
    State,
    change_pieces,
    check_same,
    damage,
    load_split,
    load_whole,
    make,
    save_split,
    save_whole,
    state_of,
    train,
)

import unisono as un
from unisono.training.checkpoint import CheckpointError
from unisono.training.checkpoint.slices import Piece
from unisono.world import World
from unisono.world.virtual import run_threads


@pytest.fixture
def right() -> State:
    """The state after three steps in one process."""
    return state_of(train(make(), 3))


# Any loads any --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sizes", [(1, 1), (1, 3), (2, 2), (2, 4), (3, 2), (4, 1), (4, 3)], ids=str)
def test_parts_saved_by_some_ranks_are_read_by_any_number_and_changed_by_no_bit(
    tmp_path: Path, sizes: tuple[int, int]
) -> None:
    saved = save_split(tmp_path, sizes[0])
    for found, same_world, _ in load_split(tmp_path, sizes[1]):
        check_same(found, saved)
        assert same_world == (sizes[0] == sizes[1])


@pytest.mark.parametrize("sizes", [(1, 2), (2, 2), (3, 1), (4, 3)], ids=str)
def test_parts_load_into_a_replica_that_holds_all(tmp_path: Path, sizes: tuple[int, int]) -> None:
    saved = save_split(tmp_path, sizes[0])
    for found in load_whole(tmp_path, sizes[1]):
        check_same(found, saved)


@pytest.mark.parametrize("sizes", [(1, 2), (2, 2), (3, 1), (2, 4)], ids=str)
def test_a_checkpoint_of_whole_tensors_loads_in_parts(tmp_path: Path, sizes: tuple[int, int]) -> None:
    saved = save_whole(tmp_path, sizes[0])
    for found, same_world, _ in load_split(tmp_path, sizes[1]):
        check_same(found, saved)
        assert same_world == (sizes[0] == sizes[1])


def test_training_goes_on_from_parts_as_if_it_had_not_stopped(tmp_path: Path, right: State) -> None:
    straight = state_of(train(train(make(), 3), 2, seed=1))
    check_same(save_split(tmp_path, 1), right)
    replica = make()
    un.load(tmp_path, replica)
    check_same(state_of(train(replica, 2, seed=1)), straight)


def test_a_learning_rate_that_is_a_tensor_comes_back_as_one(tmp_path: Path) -> None:
    def make_replica(world: World) -> Any:
        model = torch.nn.Linear(8, 8)
        optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.25))
        return un.parallel(model, optimizer, "zero(stage=1)", world=world)

    def load(world: World) -> Any:
        replica = make_replica(world)
        replica.optimizer.param_groups[0]["lr"].fill_(1.0)
        un.load(tmp_path, replica)
        return replica.optimizer.param_groups[0]["lr"]

    run_threads(lambda world: un.save(tmp_path, make_replica(world)), 2)
    for found in run_threads(load, 2):
        assert torch.equal(found, torch.tensor(0.25))


def test_a_rank_reads_its_own_part_and_little_more(tmp_path: Path) -> None:
    saved = save_split(tmp_path, 2)
    parts = sum(x.numel() for name, x in saved.items() if x.dim() and "running" not in name)
    others = sum(x.numel() for x in saved.values()) - parts
    for _, _, read in load_split(tmp_path, 4):
        assert read <= parts / 4 + 3 + others


def test_each_rank_writes_its_own_elements_and_nobody_all_of_them(tmp_path: Path) -> None:
    saved = save_split(tmp_path, 4)
    folder = tmp_path / "step-0000000003"
    files = [load_file(folder / f"pieces-{rank:05d}.safetensors") for rank in range(4)]
    counts = [sum(x.numel() for x in file.values()) for file in files]
    weights = [name for name, x in saved.items() if x.dim() and "running" not in name]
    assert sum(counts) == sum(saved[name].numel() for name in weights)
    assert max(counts) - min(counts) <= 3 * 4
    assert not set(load_file(folder / "shared.safetensors")) & {name for name in weights if name.startswith("model")}
    first = files[0]["model.0.weight[0:23]"]
    assert torch.equal(first, saved["model.0.weight"].reshape(-1)[:23])
    assert json.loads((folder / "manifest.json").read_text())["format"] == 2


def test_what_differs_between_ranks_beside_the_parts_comes_back_to_each(tmp_path: Path) -> None:
    save_split(tmp_path, 3)

    def loading(world: World) -> Any:
        replica = make(world)
        split = Split(replica)
        mine = un.load(tmp_path, replica).extra["mine"]
        assert split.loaded is not None
        return mine, sorted(split.loaded)

    same = run_threads(loading, 3)
    assert [mine for mine, _ in same] == [0, 1, 2]
    assert len({str(names) for _, names in same}) == 1
    assert [mine for mine, _ in run_threads(loading, 2)] == [0, 0]


def test_parts_of_tensors_that_differed_between_ranks_are_of_their_mean(tmp_path: Path) -> None:
    def saving(world: World) -> None:
        replica = make(world)
        with torch.no_grad():
            replica.model.get_parameter("0.weight").fill_(world.rank)
        un.save(tmp_path, replica)

    def loading(world: World) -> list[float]:
        replica = make(world)
        split = Split(replica)
        un.load(tmp_path, replica)
        return list(split.collect()["model.0.weight"].unique().tolist())

    run_threads(saving, 3)
    with pytest.warns(UserWarning, match=r"1 tensors differed between its ranks \(model.0.weight\)"):
        assert run_threads(loading, 2) == [[1.0]] * 2


def test_a_model_or_optimizer_that_does_not_fit_is_refused_or_left_out(tmp_path: Path) -> None:
    save_split(tmp_path, 2)

    def other(strict: bool) -> Split:
        model = torch.nn.Sequential(torch.nn.Linear(5, 8), torch.nn.Linear(8, 8))
        split = Split(un.parallel(model, torch.optim.Adam(model.parameters()), world=World()))
        un.load(tmp_path, split.replica, strict=strict)
        return split

    with pytest.raises(ValueError, match=r"'1.weight' has shape \(8,\) there, \(8, 8\) in the model"):
        other(strict=True)

    def without_the_last(strict: bool) -> Split:
        model = torch.nn.Sequential(torch.nn.Linear(5, 8))
        split = Split(un.parallel(model, torch.optim.Adam(model.parameters()), world=World()))
        un.load(tmp_path, split.replica, strict=strict)
        return split

    with pytest.raises(ValueError, match=r"the model has no '3.weight'.*strict=False"):
        without_the_last(strict=True)
    with pytest.warns(UserWarning, match="its state is not loaded"):
        split = without_the_last(strict=False)
    assert split.loaded is not None
    assert sorted(split.loaded) == ["model.0.bias", "model.0.weight"]


# Faults ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["truncated", "flipped", "missing"])
@pytest.mark.parametrize("file", ["pieces-00000.safetensors", "pieces-00001.safetensors", "rank-00001.json"])
def test_a_damaged_part_is_found_at_every_size_and_the_former_checkpoint_loaded(
    tmp_path: Path, kind: str, file: str
) -> None:
    save_split(tmp_path, 2, count=2)
    saved = save_split(tmp_path, 2)
    damage(tmp_path / "step-0000000003" / file, kind)
    for size in (1, 2, 3):
        with pytest.warns(UserWarning, match=f"skipped .*step-0000000003: .*{file}"):
            found = load_whole(tmp_path, size)[-1]
        assert not torch.equal(found["model.0.weight"], saved["model.0.weight"])

        def loading(world: World) -> int:
            replica = make(world)
            Split(replica)
            return un.load(tmp_path, replica).step

        with pytest.warns(UserWarning, match=f"skipped .*step-0000000003: .*{file}"):
            assert run_threads(loading, size) == [2] * size


def test_a_damaged_checkpoint_of_whole_tensors_is_found_when_it_is_read_in_parts(tmp_path: Path) -> None:
    save_whole(tmp_path, 2)
    for file in ("shared.safetensors", "rank-00001.safetensors", "rank-00000.safetensors"):
        data = (tmp_path / "step-0000000003" / file).read_bytes()
        damage(tmp_path / "step-0000000003" / file, "flipped")
        with pytest.raises(CheckpointError, match=f"{file} is damaged: its checksum differs"):
            load_split(tmp_path, 2)
        (tmp_path / "step-0000000003" / file).write_bytes(data)
    load_split(tmp_path, 2)


def hole(model: State, rank: int) -> None:
    if rank == 1:
        model["0.weight"] = Piece((8, 5), torch.float32)


def overlap(model: State, rank: int) -> None:
    model["0.weight"] = Piece.of(torch.zeros(40 if rank else 10), 0, shape=(8, 5))


def shapes(model: State, rank: int) -> None:
    model["0.weight"] = Piece.of(torch.zeros(40), 0, shape=(5, 8) if rank else (8, 5))


def whole_and_split(model: State, rank: int) -> None:
    model["0.weight"] = torch.zeros(8, 5) if rank else Piece.of(torch.zeros(40), 0, shape=(8, 5))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (hole, r"model.0.weight \[8, 5\]: no rank holds elements \d+ to 40"),
        (overlap, r"model.0.weight \[8, 5\]: elements 0 to 10 are held twice"),
        (shapes, r"model.0.weight is float32 \[8, 5\] on rank 0, float32 \[5, 8\] on rank 1"),
        (whole_and_split, r"model.0.weight is split elsewhere, and whole here"),
    ],
)
def test_parts_that_do_not_make_up_the_whole_are_not_saved(
    tmp_path: Path, change: Callable[[State, int], None], message: str
) -> None:
    def saving(world: World) -> None:
        replica = make(world)
        change_pieces(replica, change)
        with pytest.raises(CheckpointError, match=f"no checkpoint was written(.|\n)*{message}"):
            un.save(tmp_path, replica)

    run_threads(saving, 3 if change is hole else 2)
    assert os.listdir(tmp_path) == []


def test_state_that_cannot_be_read_on_one_rank_raises_on_every_rank_and_leaves_the_former(tmp_path: Path) -> None:
    saved = save_split(tmp_path, 3)

    def broken(start: int, stop: int) -> torch.Tensor:
        raise OSError(5, "Input/output error")

    def saving(world: World) -> None:
        replica = train(make(world), 1)

        def last(model: State, rank: int) -> None:
            if rank == 2:
                model["3.weight"] = Piece((3, 8), torch.float32, [(*split.range_of("3.weight"), broken)])

        split = change_pieces(replica, last)
        with pytest.raises(CheckpointError, match=r"rank 2: OSError: \[Errno 5\] Input/output error"):
            un.save(tmp_path, replica)

    run_threads(saving, 3)
    assert os.listdir(tmp_path) == ["step-0000000003"]
    check_same(load_whole(tmp_path, 1)[0], saved)


def test_ranks_that_split_and_ranks_that_do_not_cannot_save_together(tmp_path: Path) -> None:
    def saving(world: World) -> None:
        replica = make(world)
        if world.rank:
            Split(replica)
        with pytest.raises(CheckpointError, match="1 of 2 ranks have split their state"):
            un.save(tmp_path, replica)

    run_threads(saving, 2)
