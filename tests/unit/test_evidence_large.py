"""The large tasks at tiny sizes: a run in pieces is the run in one, searches come first, and pictures can be drawn."""

from __future__ import annotations

import sys
import zipfile
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import unisono as un

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
large: Any = import_module("evidence_large")
tasks: Any = import_module("evidence_tasks")
STEPS = 20


def tiny(folder: Path) -> Any:
    generator = torch.Generator().manual_seed(3)
    x, y = torch.randn(320, 6, generator=generator), torch.randint(3, (320,), generator=generator)
    return tasks.Data(nn.Linear(6, 3), (x[:256], y[:256]), (x[256:], y[256:]), "made")


@pytest.fixture
def task(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setitem(large.TASKS, "text3", large.Large("text", STEPS, 32, 0.01, 0.1, tiny))
    monkeypatch.setitem(tasks.ADAM, "text3", 0.01)
    return "text3"


@pytest.mark.parametrize("name", ["adam", "sparseloco", "zero_one_adam"])
def test_a_run_in_pieces_is_the_run_in_one(task: str, name: str, tmp_path: Path) -> None:
    run = large.Run(task, large.VARIANTS[name], 1, STEPS, 2)

    def whole(world: Any) -> Any:
        return large.train(run, world, tmp_path, tmp_path / "whole.jsonl", float("inf"))

    def piece(world: Any) -> Any:
        return large.train(run, world, tmp_path, tmp_path / "pieces.jsonl", 0.0)

    [wanted] = un.run_threads(whole, 1)  # threads share the random numbers, so one
    pieces = 0
    while (found := un.run_threads(piece, 1)[0]) is None:
        pieces += 1
    assert pieces == STEPS - 1
    assert found["loss"] == wanted["loss"]
    assert [row[:3] for row in found["course"]] == [row[:3] for row in wanted["course"]]
    assert wanted["loss"] == wanted["course"][-1][1] < wanted["course"][0][1]
    assert not list(tmp_path.glob("pieces-*"))


def test_a_run_is_plain_training_at_the_rates_that_it_says(task: str, tmp_path: Path) -> None:
    run = large.Run(task, large.VARIANTS["adam"].at(0.5), 1, STEPS, 1)
    [found] = un.run_threads(lambda world: large.train(run, world, tmp_path, tmp_path / "x.jsonl", float("inf")), 1)
    torch.manual_seed(1)
    data, step = tiny(tmp_path), 0
    optimizer = torch.optim.AdamW(data.model.parameters())
    alone = un.World(None, hosts=["localhost"])
    for epoch in range(3):
        for x, y in un.shard(data.train, batch_size=32, seed=1, epoch=epoch, name=f"plain {epoch}", world=alone):
            if step < STEPS:
                optimizer.param_groups[0]["lr"] = 0.005 * large.rate_at(step, STEPS)
                optimizer.zero_grad()
                nn.functional.cross_entropy(data.model(x), y).backward()
                optimizer.step()
            step += 1
    loss = nn.functional.cross_entropy(data.model(data.held_out[0]), data.held_out[1]).item()
    assert found["loss"] == pytest.approx(loss, rel=1e-5)


def test_bytes_are_those_of_training_alone(task: str, tmp_path: Path) -> None:
    """Of three exchanges of models, after windows 1, 2 and 18, and not of those by which it is judged twenty times."""
    run = large.Run(task, large.VARIANTS["local_sgd"], 1, STEPS, 2)
    found = un.run_threads(lambda world: large.train(run, world, tmp_path, tmp_path / "x.jsonl", float("inf")), 2)
    model = 4 * (32 + 16)  # on cache lines; an all-reduce of two sends its bytes once
    assert 3 * model <= found[0]["bytes"] < 4.5 * model  # with a few numbers about who is slow
    assert [row[0] for row in found[0]["course"]] == list(range(1, STEPS + 1))


def test_each_variant_is_searched_first_and_then_run_at_its_best() -> None:
    names = ["adam", "diloco"]
    todo = large.left("text25", names, 2, 2000, 8, {})
    assert len(todo) == len(large.RATES) * (1 + len(large.OUTERS))
    assert {(run.seed, run.steps, run.workers) for run in todo} == {(tasks.TUNED, 500, 8)}
    lines = {run.key: {"loss": abs(run.share - 3) + abs(run.variant.outer - 0.4)} for run in todo}
    runs = large.left("text25", names, 2, 2000, 8, lines)
    assert [(run.variant.told(2000), run.share, run.seed, run.steps) for run in runs] == [
        *(("allreduce", 3.0, seed, 2000) for seed in (0, 1)),
        *(("diloco(every=30, outer_lr=0.4)", 3.0, seed, 2000) for seed in (0, 1)),
    ]
    assert large.left("text25", names, 2, 2000, 8, lines | {run.key: {"loss": 1.0} for run in runs}) == []


def test_every_variant_can_be_built_and_every_task_makes_its_model() -> None:
    from unisono.methods.spec import build

    for variant in large.VARIANTS.values():
        build(variant.told(2000), kind="strategy")
    assert set(large.TASKS) == set(tasks.LIKE)
    resnet = large.make_resnet()
    assert resnet(torch.zeros(2, 1, 28, 28)).shape == (2, 10)
    with torch.device("meta"):
        for width, layers, millions in [(192, 6, 2.8), (512, 8, 25.6), (896, 13, 126.0)]:
            model = tasks.make_transformer(256, width, layers, max(1, width // 64), large.LENGTH)
            assert sum(p.numel() for p in model.parameters()) / 1e6 == pytest.approx(millions, rel=0.02)


def test_text_is_made_of_wheels_in_one_order_each_text_once(tmp_path: Path) -> None:
    for name, files in [
        ("a", {"b.py": "second", "a.py": "first", "c.bin": "no"}),
        ("b", {"d.rst": "first", "e.md": "third"}),
    ]:
        with zipfile.ZipFile(tmp_path / name, "w") as wheel:
            for path, text in files.items():
                wheel.writestr(path, text)
    assert list(large.read_texts([tmp_path / "a", tmp_path / "b"])) == [b"first\n", b"second\n", b"third\n"]


def test_images_are_moved_and_mirrored_and_the_same_for_one_seed() -> None:
    x = torch.zeros(64, 28, 28, dtype=torch.uint8)
    x[:, 10, 5] = 255
    moved = large.augment(x, 1)
    assert moved.shape == (64, 1, 28, 28)
    assert torch.equal(moved, large.augment(x, 1))
    assert torch.equal(moved.sum((1, 2, 3)), torch.ones(64))
    _, rows, columns = moved[:, 0].nonzero(as_tuple=True)
    assert {*rows.tolist()} == {8, 9, 10, 11, 12}
    assert {*columns.tolist()} == {3, 4, 5, 6, 7, 20, 21, 22, 23, 24}


def test_time_to_a_loss_is_compute_and_then_bytes() -> None:
    course = [[10, 2.0, 0.5, 1e6, 9.0], [20, 1.0, 0.6, 2e6, 18.0]]
    assert large.seconds_to(course, 1.5, 0.1, 8.0) == 2.0 + 2.0
    assert large.seconds_to(course, 0.5, 0.1, 8.0) is None


def test_the_picture_has_every_method(task: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    course = [[10, 2.0, 0.5, 1e6, 9.0], [20, 1.0, 0.6, 2e6, 18.0]]
    large.draw({name: [{"course": course}] for name in ("adam", "topk")}, "made", tmp_path / "made.svg")
    assert "<svg" in (tmp_path / "made.svg").read_text()
    told = large.tell({"adam": [{"loss": 2.0, "bytes": 1.0, "course": course, "variant": large.VARIANTS["adam"]}]}, 0.1)
    assert told["adam"]["effect"] == 0.0
    assert told["adam"]["faster_100"] == 1.0


def test_fashions_files_are_read(tmp_path: Path) -> None:
    import gzip

    (tmp_path / "x.gz").write_bytes(gzip.compress(bytes([0, 0, 8, 2, 0, 0, 0, 2, 0, 0, 0, 3, 1, 2, 3, 4, 5, 6])))
    assert large.read_idx(tmp_path / "x.gz").tolist() == [[1, 2, 3], [4, 5, 6]]
