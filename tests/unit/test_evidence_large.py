"""The large tasks at tiny sizes: a run in pieces is the run in one, searches come first, and pictures can be drawn."""

from __future__ import annotations

import sys
import threading
import time
import zipfile
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import unisono as un
import unisono.background

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
large: Any = import_module("evidence_large")
tasks: Any = import_module("evidence_tasks")
made: Any = import_module("evidence_large_tasks")
results: Any = import_module("evidence_large_results")
ranks: Any = import_module("evidence_ranks")
STEPS = 20


def tiny(folder: Path) -> Any:
    generator = torch.Generator().manual_seed(3)
    x, y = torch.randn(320, 6, generator=generator), torch.randint(3, (320,), generator=generator)
    return tasks.Data(nn.Linear(6, 3), (x[:256], y[:256]), (x[256:], y[256:]), "made")


def tiny_score(model: Any, x: Any, y: Any) -> Any:
    return model(x), y


@pytest.fixture
def task(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(large, "_loaded", {})
    monkeypatch.setitem(large.TASKS, "text3", large.Large("text", STEPS, 32, 0.01, 0.1, tiny, tiny_score))
    monkeypatch.setitem(tasks.ADAM, "text3", 0.01)
    return "text3"


def run_whole(run: Any, folder: Path) -> Any:
    return large.train(run, folder, "cpu", float("inf"))


def test_a_run_is_plain_training_at_the_rates_that_it_says(task: str, tmp_path: Path) -> None:
    run = large.Run(task, large.VARIANTS["adam"].at(0.5), 1, STEPS, 1)
    found = run_whole(run, tmp_path)
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
    assert found["loss"] == found["course"][-1][1] < found["course"][0][1]


def test_exact_training_is_the_same_with_any_number_of_workers(task: str, tmp_path: Path) -> None:
    losses = [run_whole(large.Run(task, large.VARIANTS["adam"], 1, STEPS, n), tmp_path)["loss"] for n in (1, 4)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


def test_bytes_are_those_of_training_alone(task: str, tmp_path: Path) -> None:
    """Of three exchanges of models, after windows 1, 2 and 18, and not of those by which it is judged twenty times."""
    found = run_whole(large.Run(task, large.VARIANTS["local_sgd"], 1, STEPS, 2), tmp_path)
    model = 4 * (32 + 16)  # on cache lines; an all-reduce of two sends its bytes once
    assert 3 * model <= found["bytes"] < 4.5 * model  # with a few numbers about who is slow
    assert [row[0] for row in found["course"]] == list(range(1, STEPS + 1))


def test_long_runs_are_judged_when_local_methods_have_just_met() -> None:
    places = made.find_places(2040)
    assert len(places) == made.PLACES
    assert places[-1] == 2040
    assert not any(place % 30 for place in places)
    assert made.find_places(8) == list(range(1, 9))


def test_a_search_is_judged_at_its_end_alone_and_a_run_ends_when_the_time_is_over(task: str, tmp_path: Path) -> None:
    run = large.Run(task, large.VARIANTS["adam"], tasks.TUNED, STEPS, 2)
    assert [row[0] for row in run_whole(run, tmp_path)["course"]] == [STEPS]
    assert large.train(run, tmp_path, "cpu", 0.0) is None


def test_a_rank_that_fails_ends_the_run(task: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(model: Any, x: Any, y: Any) -> Any:
        raise RuntimeError("no such score")

    monkeypatch.setitem(large.TASKS, task, large.TASKS[task]._replace(score=fail))
    with pytest.raises(RuntimeError, match="no such score"):
        run_whole(large.Run(task, large.VARIANTS["adam"], 1, STEPS, 2), tmp_path)


def test_each_variant_is_searched_first_and_then_run_at_its_best() -> None:
    names = ["topk", "adam", "diloco"]
    lines: dict[str, dict[str, float]] = {}

    def make(count: int) -> list[Any]:
        todo = made.left("text25_128", names, 2, 2040, 8, lines)
        assert len(todo) == count
        lines.update({run.key: {"loss": abs(run.share - 3) + abs(run.variant.outer - 0.4)} for run in todo})
        return todo

    todo = make(3 * len(made.RATES))
    assert {(run.seed, run.steps, run.workers) for run in todo} == {(tasks.TUNED, 510, 8)}
    assert "topk" in todo[-1].variant.spec, "what comes first is made before the others"
    todo = make(2 + 2 + 6 + 2)
    assert [(run.variant.told(2040), run.share, run.seed, run.steps) for run in todo] == [
        *((f"diloco(every=30, outer_lr={outer})", 3.0, tasks.TUNED, 510) for outer in (0.4, 1.0)),
        *(("allreduce", 3.0, seed, 2040) for seed in (0, 1)),
        *(("allreduce", 3.0, seed, steps) for seed in (0, 1) for steps in (510, 1020, 1530)),
        *(("warmup(topk(k=0.01), steps=204)", 3.0, seed, 2040) for seed in (0, 1)),
    ]
    todo = make(2)
    assert [(run.variant.told(2040), run.seed) for run in todo] == [
        ("diloco(every=30, outer_lr=0.4)", seed) for seed in (0, 1)
    ]
    make(0)
    assert {
        name: len(each) for name, each in results.chosen("text25_128", names, 2040, 8, lines).items()
    } == dict.fromkeys(names, 2)


def test_a_search_goes_on_above_the_highest_outer_rate_while_it_is_the_best() -> None:
    lines: dict[str, dict[str, float]] = {}
    tried = []
    while todo := made.search("text25_128", "sparseloco", 2040, 8, lines)[1]:
        tried += [run.variant.outer for run in todo]
        lines.update({run.key: {"loss": 1 + abs(run.variant.outer - 1.4) + abs(run.share - 1)} for run in todo})
    assert tried == [1.0, 1.0, 1.0, 0.4, 0.7, 1.5, 2.2]
    assert made.best(made.search("text25_128", "sparseloco", 2040, 8, lines)[0], lines).outer == 1.5


def test_every_variant_can_be_built_and_every_task_makes_its_model() -> None:
    from unisono.methods.spec import build

    for variant in large.VARIANTS.values():
        build(variant.told(2000), kind="strategy")
    assert {*large.TASKS, "long"} == set(tasks.LIKE)
    assert {"muon", "muloco"} & {*made.variants_of("text25_128")} == {"muon", "muloco"}
    assert not any(large.VARIANTS[name].muon for name in made.variants_of("images"))
    resnet = made.make_resnet()
    assert resnet(torch.zeros(2, 1, 28, 28)).shape == (2, 10)
    with torch.device("meta"):
        for width, layers, millions in [(192, 6, 2.8), (512, 8, 25.6), (896, 13, 126.0)]:
            model = made.make_gpt(width, layers)
            assert sum(p.numel() for p in model.parameters()) / 1e6 == pytest.approx(millions, rel=0.02)


def test_a_gpt_predicts_from_what_came_before() -> None:
    torch.manual_seed(0)
    model, rows = made.make_gpt(64, 2), torch.randint(256, (3, 257), dtype=torch.uint8)
    loss = large.TASKS["text25"].loss(model, rows)
    assert loss.item() == pytest.approx(5.545, abs=0.1)  # of 256 bytes, each as probable
    other = rows.clone()
    other[:, 200:] = 0
    a, b = (model(x[:, :-1].long()) for x in (rows, other))
    torch.testing.assert_close(a[:, :200], b[:, :200])
    assert (a[:, 200:] - b[:, 200:]).abs().max() > 0.01


def test_ranks_together_compute_what_each_does_alone() -> None:
    torch.manual_seed(0)
    bodies = [made.make_gpt(64, 2) for _ in range(3)]
    rows = torch.randint(256, (3, 2, 257), dtype=torch.uint8)
    loss = large.TASKS["text25"].loss
    wanted = []
    for body, mine in zip(bodies, rows, strict=True):
        each = loss(body, mine)
        wanted.append((each.detach(), torch.autograd.grad(each, list(body.parameters()))))
    together = ranks.Ranks(bodies, loss, torch.device("cpu"))
    together.stack()
    losses, gradients = together.differentiate([rows])
    for place, (one, theirs) in enumerate(wanted):
        torch.testing.assert_close(losses[place], one)
        for mine, other in zip(gradients[place], theirs, strict=True):
            torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-7)
            assert mine.is_contiguous()
    bodies[1].head.data = bodies[1].head.data.clone()
    with pytest.raises(RuntimeError, match="elsewhere"):
        together.differentiate([rows])


def test_threads_take_turns_and_give_them_away_while_they_wait(
    task: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("threading.Condition.wait", threading.Condition.wait)  # to be put back
    monkeypatch.setattr("unisono.background._Job.__call__", un.background._Job.__call__)
    turns, running, most = ranks.Turns(), [], []

    def score(model: Any, x: Any, y: Any) -> Any:
        running.append(1)
        time.sleep(0.001)
        most.append(len(running))
        running.pop()
        return model(x), y

    monkeypatch.setitem(large.TASKS, task, large.TASKS[task]._replace(score=score))
    run = large.Run(task, large.VARIANTS["adam"], 1, STEPS, 4)
    found = large.train(run, tmp_path, "cpu", float("inf"), turns)
    assert found["loss"] == run_whole(run, tmp_path)["loss"]
    assert most[: 4 * STEPS] == [1] * 4 * STEPS


def test_muon_on_stacks_is_torchs() -> None:
    torch.manual_seed(0)
    params = [nn.Parameter(torch.randn(shape)) for shape in [(24, 8), (8, 24), (24, 8), (8, 8)]]
    others = [nn.Parameter(p.detach().clone()) for p in params]
    every = torch.optim.Muon(params, lr=0.02), ranks.BatchedMuon(others, lr=0.02)
    for _ in range(3):
        for p, q in zip(params, others, strict=True):
            p.grad = torch.randn_like(p)
            q.grad = p.grad.clone()
        for one in every:
            one.step()
    for p, q in zip(params, others, strict=True):
        torch.testing.assert_close(p, q, rtol=0.0, atol=1e-3)


def test_text_is_made_of_wheels_in_one_order_each_text_once(tmp_path: Path) -> None:
    for name, files in [
        ("a", {"b.py": "second", "a.py": "first", "c.bin": "no"}),
        ("b", {"d.rst": "first", "e.md": "third"}),
    ]:
        with zipfile.ZipFile(tmp_path / name, "w") as wheel:
            for path, text in files.items():
                wheel.writestr(path, text)
    assert list(made.read_texts([tmp_path / "a", tmp_path / "b"])) == [b"first\n", b"second\n", b"third\n"]


def test_images_are_moved_and_mirrored_and_the_same_for_one_seed() -> None:
    x = torch.zeros(64, 28, 28, dtype=torch.uint8)
    x[:, 10, 5] = 255
    moved = made.augment(x, made.draw_moves(64, 1))
    assert moved.shape == (64, 1, 28, 28)
    assert torch.equal(moved, made.augment(x, made.draw_moves(64, 1)))
    assert not torch.equal(moved, made.augment(x, made.draw_moves(64, 2)))
    assert torch.equal(moved.sum((1, 2, 3)), torch.ones(64))
    _, rows, columns = moved[:, 0].nonzero(as_tuple=True)
    assert {*rows.tolist()} == {8, 9, 10, 11, 12}
    assert {*columns.tolist()} == {3, 4, 5, 6, 7, 20, 21, 22, 23, 24}


def test_time_to_a_loss_is_compute_and_then_bytes() -> None:
    course = [[10, 2.0, 0.5, 1e6, 9.0], [20, 1.0, 0.6, 2e6, 18.0]]
    assert results.seconds_to(course, 1.5, 0.1, 8.0) == 2.0 + 2.0
    assert results.seconds_to(course, 0.5, 0.1, 8.0) is None


def test_the_picture_has_every_method(task: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    course = [[10, 2.0, 0.5, 1e6, 9.0], [20, 1.0, 0.6, 2e6, 18.0]]
    results.draw({name: [{"course": course}] for name in ("adam", "topk")}, "made", tmp_path / "made.svg")
    assert "<svg" in (tmp_path / "made.svg").read_text()
    adam = {"loss": 2.0, "bytes": 1.0, "course": course, "variant": large.VARIANTS["adam"]}
    told = results.tell({"adam": [adam]}, 0.1)
    assert told["adam"]["effect"] == 0.0
    assert told["adam"]["faster_100"] == 1.0


def test_fashions_files_are_read(tmp_path: Path) -> None:
    import gzip

    (tmp_path / "x.gz").write_bytes(gzip.compress(bytes([0, 0, 8, 2, 0, 0, 0, 2, 0, 0, 0, 3, 1, 2, 3, 4, 5, 6])))
    assert made.read_idx(tmp_path / "x.gz").tolist() == [[1, 2, 3], [4, 5, 6]]


def make_lines(losses: dict[str, list[float]]) -> list[dict[str, Any]]:
    """What a file has, of runs whose learning rate makes no difference; exact training with fewer samples is worse."""
    lines: dict[str, dict[str, Any]] = {}
    while todo := made.left("text25_128", list(losses), 3, 2040, 8, lines):
        for run in todo:
            name = next(name for name in losses if made.VARIANTS[name].spec == run.variant.spec)
            loss = losses[name][run.seed % 3] * (2040 / run.steps) ** 0.1 + 0.01 * (run.share != 1)
            course = [[run.steps // 2, 2 * loss, 0.5, 5e8], [run.steps, loss, 0.5, 1e9 if name == "adam" else 1e7]]
            lines[run.key] = {
                "kind": "run",
                "key": run.key,
                "task": "text25_128",
                "workers": 8,
                "spec": "",
                "bytes": course[1][3],
            }
            lines[run.key] |= {"seed": run.seed, "steps": run.steps, "loss": loss, "course": course}
            lines[run.key] |= {"session": "now", "accuracy": 0.5, "parameters": 25_600_000}
    start = {"kind": "session", "session": "now", "date": "2026-11-19", "torch": "2.11", "python": "3.12"}
    alone = {
        "kind": "compute",
        "key": "text25_128 | x",
        "task": "text25_128",
        "workers": 8,
        "step_s": 0.004,
        "session": "now",
    }
    return [start, alone, *lines.values()]


def test_the_page_compares_with_exact_training() -> None:
    losses = {"adam": [1.00, 1.01, 0.99], "sparseloco": [1.02] * 3, "topk": [1.2] * 3, "bf16": [1.005] * 3}
    page = results.section(make_lines(losses))
    assert "**holds in part** (+2.00 %, with 100 times fewer bytes)" in page
    rows = {line.split("`")[1]: line for line in page.splitlines() if line.startswith("| `")}
    assert list(rows) == ["adam", "bf16", "sparseloco", "topk"]
    assert "| 1.0000 ± 0.0100 | 3 | +0.00 % | reference | 1,000 | 1 |" in rows["adam"]
    assert rows["adam"].endswith("| 88 s | 16 s | 9 s |")
    assert "| +0.50 % | **holds** | 10 | 100 |" in rows["bf16"]
    assert "**does not hold here**" in rows["topk"]
    assert rows["topk"].endswith("| not reached | not reached | not reached |")


def test_the_planner_learns_from_the_large_runs() -> None:
    learning: Any = import_module("evidence_learning")
    lines = make_lines(
        {"adam": [1.0, 1.1, 0.9], "topk": [0.75**-0.1 * x for x in (1.0, 1.1, 0.9)], "bf16": [1.0, 1.1, 0.9]}
    )
    found = {variant.spec: one for variant, one in learning.judge_large(lines)}
    assert found["warmup(topk(k=0.01), steps={tenth})"].share == pytest.approx(0.75, abs=1e-6)
    assert found["bf16"][:4] == (1.0, 1.0, 1.0, "text25_128")
    rows = learning.make_file([], [], lines)
    assert '"task": "text25_128", "seeds": 3' in rows
    assert "allreduce(reducer=warmup(inner=topk))" in rows
