"""The evidence: every method has a claim, rules decide by what was measured, and the page is what the results say."""

from __future__ import annotations

import json
import math
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import unisono as un
from unisono.methods.spec import build
from unisono.methods.spec.methods import names

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
evidence: Any = import_module("evidence")
evidence_claims: Any = import_module("evidence_claims")
evidence_page: Any = import_module("evidence_page")
rules: Any = import_module("evidence_rules")
tasks: Any = import_module("evidence_tasks")
ROWS, VARIANTS = evidence_claims.ROWS, evidence_claims.VARIANTS
ALONE, STEPS, Run, Variant = tasks.ALONE, tasks.STEPS, tasks.Run, tasks.Variant
Results = rules.Results
NAMED = {"exact": Variant("allreduce"), "other": Variant("topk(k=0.01)")}


def runs(variant: str, task: str, losses: list[float | None], **also: Any) -> list[dict[str, Any]]:
    """Lines as a run of evidence.py writes them."""
    made = [Run(task, NAMED[variant], seed, STEPS[task]) for seed in range(len(losses))]
    return [
        {"kind": "run", "key": r.key, "task": task, "seed": r.seed, "steps": r.steps, "session": "s", "loss": loss}
        | also
        for r, loss in zip(made, losses, strict=True)
    ]


def results(*lines: list[dict[str, Any]]) -> Any:
    return Results([line for some in lines for line in some], NAMED)


# Rows --------------------------------------------------------------------------------------------------------


def test_every_method_has_a_row_and_every_row_is_of_a_method() -> None:
    assert sorted(ROWS) == sorted([*names("strategy"), *names("reducer")])


def test_every_variant_can_be_built_and_is_run_in_some_row() -> None:
    for name, variant in VARIANTS.items():
        if variant.spec != ALONE:
            build(variant.told(240), kind="strategy")
        assert any(name in row.variants for row in ROWS.values()), name


def test_every_row_measures_all_that_its_checks_ask_for() -> None:
    lines: list[dict[str, Any]] = []
    for bundle in evidence.bundles(list(ROWS), 3, None, set(), together=False):
        for run in bundle.runs:
            line = {
                "kind": "run",
                "key": run.key,
                "task": run.task,
                "seed": run.seed,
                "steps": run.steps,
                "session": "",
            }
            found = {"loss": 1.0, "accuracy": 0.9, "bytes": 9.0, "parameters": 1, "kept_bytes": 9, "ahead": 0}
            lines.append(line | found | {"noise": 1.0, "bias": 1.0, "windows_s": 1.0})
    for timed in evidence.timings(list(ROWS), [100.0, 1000.0], set()):
        lines += [{"kind": "link", "variant": name, "mbit": timed.mbit, "step_s": 1.0} for name in timed.names]
    measured = Results(lines, VARIANTS)
    missing = [c.text for row in ROWS.values() for c in row.checks if c.judge(measured).holds is None]
    assert missing == []


def test_a_run_that_several_rows_need_is_made_once_and_not_again_when_resumed() -> None:
    bundles = evidence.bundles(["topk", "randomk", "warmup"], 2, 40, set(), together=False)
    keys = [run.key for bundle in bundles for run in bundle.runs]
    assert len(keys) == len(set(keys))
    assert evidence.bundles(["topk", "randomk", "warmup"], 2, 40, set(keys), together=False) == []
    [left] = evidence.bundles(["topk", "randomk", "warmup"], 2, 40, set(keys[1:]), together=True)
    assert [run.key for run in left.runs] == keys[:1]


# Rules -------------------------------------------------------------------------------------------------------


def test_as_good_allows_a_hundredth_of_the_loss_or_the_spread_of_the_reference_and_no_more() -> None:
    exact = runs("exact", "text", [2.0, 2.0, 2.0])
    for loss, holds in [(2.019, True), (2.021, False), (1.5, True)]:
        [check] = rules.as_good("other", "exact", "text")
        assert check.judge(results(exact, runs("other", "text", [loss] * 3))).holds is holds
    wide = runs("exact", "text", [1.8, 2.0, 2.2])  # standard deviation 0.2
    assert check.judge(results(wide, runs("other", "text", [2.1] * 3))).holds is True
    erratic = runs("other", "text", [2.0, 2.0, 8.0])  # its own spread makes nothing good
    assert check.judge(results(exact, erratic)).holds is False


def test_better_needs_more_than_the_margin() -> None:
    exact = runs("exact", "text", [2.0, 2.0])
    [check] = rules.better("other", "exact", "text")
    found = [check.judge(results(exact, runs("other", "text", [x, x]))).holds for x in (1.97, 1.99, 2.0, 2.1)]
    assert found == [True, False, False, False]
    wide = runs("other", "text", [1.7, 2.1])  # mean 1.9, standard deviation 0.28
    assert check.judge(results(exact, wide)).holds is False


def test_only_runs_of_one_place_are_compared() -> None:
    def session(name: str, python: str) -> dict[str, Any]:
        return {"kind": "session", "session": name, "machine": "m", "torch": "t", "python": python}

    here, there = (runs("exact", "text", [loss] * 2) for loss in (2.0, 3.0))
    other = [line | {"session": "b"} for line in runs("other", "text", [3.0, 3.0])]
    lines = [session("s", "3.12"), session("b", "3.11"), *here, *other]
    [check] = rules.as_good("other", "exact", "text")
    wanted = [("exact", "text"), ("other", "text")]
    assert check.judge(Results(lines, NAMED).of_one_place(wanted)).holds is None  # each was made elsewhere
    lines += [line | {"session": "b"} for line in there]
    assert check.judge(Results(lines, NAMED).of_one_place(wanted)).holds is True


def test_digits_are_judged_by_accuracy() -> None:
    exact = runs("exact", "digits", [0.1], accuracy=0.980)
    [check] = rules.as_good("other", "exact", "digits")
    found = [check.judge(results(exact, runs("other", "digits", [9.0], accuracy=a))).holds for a in (0.976, 0.974)]
    assert found == [True, False]


@pytest.mark.parametrize("loss", [None, 25.0])
def test_what_diverged_is_worse_than_all(loss: float | None) -> None:
    measured = results(runs("exact", "text", [2.0, 2.0]), runs("other", "text", [2.0, loss]))
    assert [c.judge(measured).holds for c in rules.as_good("other", "exact", "text")] == [False]
    assert [c.judge(measured).holds for c in rules.better("exact", "other", "text")] == [True]
    assert [c.judge(measured).told for c in rules.as_good("other", "exact", "text")] == [
        "diverged against 2.000 ± 0.000"
    ]


def test_equal_compares_seed_by_seed() -> None:
    exact = runs("exact", "text", [2.0, 3.0])
    [check] = rules.equal("other", "exact", "text", 1e-3)
    assert check.judge(results(exact, runs("other", "text", [2.001, 3.0]))).holds is True
    assert check.judge(results(exact, runs("other", "text", [3.0, 2.0]))).holds is False  # the same mean


def test_a_row_holds_in_part_or_not_at_all_by_its_main_checks() -> None:
    checks = [
        *rules.as_good("other", "exact", "text"),
        *rules.fewer_bytes("other", "exact", 0.5),
        *rules.faster("other", "exact", 100),
    ]
    exact = runs("exact", "text", [2.0], bytes=100.0)

    def judged(loss: float, nbytes: float, step_s: float | None = None) -> str:
        steps = [("exact", 1.0), ("other", step_s)] if step_s is not None else []
        links = [{"kind": "link", "variant": name, "mbit": 100.0, "step_s": s} for name, s in steps]
        return rules.verdict(checks, results(exact, runs("other", "text", [loss], bytes=nbytes), links))

    assert judged(2.0, 10.0) == rules.HOLDS  # time was not measured
    assert judged(2.0, 10.0, 0.5) == rules.HOLDS
    assert judged(2.0, 10.0, 1.5) == rules.PART
    assert judged(2.0, 90.0) == rules.PART
    assert judged(2.5, 10.0) == rules.NOT
    assert rules.verdict(checks, results(exact)) == rules.UNKNOWN


def test_unbiased_tells_random_rounding_from_rounding_to_the_nearest() -> None:
    for spec, holds in [("qsgd(bits=4, block=512)", True), ("bytegrad", False)]:
        run = Run("noise", Variant(spec), 0, STEPS["noise"])
        line = {"kind": "run", "key": run.key, "task": "noise", "seed": 0, "steps": run.steps, "session": "s"}
        found = tasks.noise(run, None)
        [check] = rules.unbiased("it")
        assert check.judge(Results([line | found], {"it": run.variant})).holds is holds


# Runs --------------------------------------------------------------------------------------------------------


def small_task() -> Any:
    generator = torch.Generator().manual_seed(3)
    x, y = torch.randn(320, 6, generator=generator), torch.randint(3, (320,), generator=generator)
    return tasks.Data(nn.Linear(6, 3), (x[:256], y[:256]), (x[256:], y[256:]), "made")


@pytest.mark.parametrize("spec", ["allreduce", ALONE])
def test_a_run_is_the_training_of_one_process_on_the_same_samples(spec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(tasks.DATA, "digits", small_task)
    run = Run("digits", Variant(spec), 1, 10)
    found = un.run_threads(lambda world: tasks.train(run, world), 1)[0]  # threads share the random numbers
    torch.manual_seed(1)
    data, step = small_task(), 0
    optimizer = torch.optim.SGD(data.model.parameters(), lr=0.05, momentum=0.9)
    alone = un.World(None, hosts=["localhost"])
    for epoch in range(3):
        for x, y in un.shard(data.train, batch_size=64, seed=1, epoch=epoch, name=f"test {spec} {epoch}", world=alone):
            optimizer.param_groups[0]["lr"] = 0.05 * (0.2 if step >= 6 else 1.0) * (0.2 if step >= 8 else 1.0)
            if step < 10:
                optimizer.zero_grad()
                nn.functional.cross_entropy(data.model(x), y).backward()
                optimizer.step()
            step += 1
    loss = nn.functional.cross_entropy(data.model(data.held_out[0]), data.held_out[1]).item()
    assert found["loss"] == pytest.approx(loss, rel=1e-5)
    assert found["parameters"] == 21


def test_what_a_rank_keeps_is_counted_once_where_parts_lie_inside_a_parameter() -> None:
    model = nn.Linear(10, 10, bias=False)
    optimizer = torch.optim.SGD([model.weight.data.view(-1)[10:30].requires_grad_()], lr=0.1, momentum=0.9)
    assert tasks.kept_bytes(model, [optimizer]) == 400
    optimizer.param_groups[0]["params"][0].grad = torch.ones(20)
    optimizer.step()
    assert tasks.kept_bytes(model, [optimizer]) == 400 + 80


def test_a_run_that_fails_is_noted_and_the_others_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = [Run("text", NAMED["other"], seed, 4) for seed in range(4)]

    def launch(work: Any, workers: int, args: Any, **how: Any) -> None:
        for run in args[0]:
            if run.seed == 1:
                raise RuntimeError("rank 0 failed: out of luck")
            tasks.append(args[1], {"kind": "run", "key": run.key, "loss": math.nan})

    monkeypatch.setattr(un, "launch", launch)
    path = tmp_path / "out.jsonl"
    path.touch()
    why = evidence.run_bundle(evidence.Bundle(made), str(path), "now")
    lines = rules.read([path])
    assert [line["key"] for line in lines if line["kind"] == "run"] == [made[i].key for i in (0, 2, 3)]
    assert [line["key"] for line in lines if line["kind"] == "error"] == [made[1].key]
    assert "out of luck" in why
    assert lines[0]["loss"] is None  # JSON has no NaN


def test_a_line_that_was_cut_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "cut.jsonl").write_text('{"kind": "run", "key": "a"}\n{"kind": "run", "ke')
    assert [line["key"] for line in rules.read([tmp_path / "cut.jsonl"])] == ["a"]


def test_made_digits_can_be_learned_and_are_the_same_every_time() -> None:
    x, y = tasks.made_digits()
    assert torch.equal(x, tasks.made_digits()[0])
    means = torch.stack([x[:1500][y[:1500] == c].mean(0) for c in range(10)])
    nearest = (x[1500:, None] - means).square().sum((2, 3, 4)).argmin(1)
    assert 0.5 < (nearest == y[1500:]).double().mean() < 0.99  # and there is something left to learn


def test_without_scikit_learn_digits_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    data = tasks.digits()
    assert data.source.startswith("made digits")
    assert data.model(data.held_out[0]).shape == (len(data.held_out[1]), 10)


# The page ----------------------------------------------------------------------------------------------------


def test_the_page_is_what_the_results_say() -> None:
    large = rules.read([evidence_page.LARGE]) if evidence_page.LARGE.exists() else []
    made = evidence_page.page(Results(rules.read([evidence.RESULTS]), VARIANTS), large)
    assert evidence_page.PAGE.read_text(encoding="utf-8") == made, "make it anew: python benchmarks/evidence.py --page"


def test_the_page_shows_what_does_not_hold_and_what_failed_like_the_rest() -> None:
    topk = VARIANTS["topk_1"]
    about = dict.fromkeys(("date", "machine", "torch", "python", "command"), "x")
    lines: list[dict[str, Any]] = [{"kind": "session", "session": "s"} | about]
    for name, loss in [("allreduce", 2.0), ("topk_1", 3.0)]:
        run = Run("text", VARIANTS[name], 0, 240)
        line = {"kind": "run", "key": run.key, "task": "text", "seed": 0, "steps": 240, "session": "s", "loss": loss}
        lines.append(line | {"accuracy": 0.5, "bytes": 1.0, "parameters": 1})
    lines.append({"kind": "error", "key": Run("text", topk, 1, 240).key, "error": "OSError: no more", "session": "s"})
    page = evidence_page.page(Results(lines, VARIANTS))
    assert "| [topk](#topk) | " + ROWS["topk"].claim + " | **does not hold here** | 0 of 2 |" in page
    assert "| text: `topk_1` is as good as `allreduce` | **no** | 3.000 ± 0.000 against 2.000 ± 0.000 |" in page
    failed = "text: `topk_1` is as good as `allreduce` | 3.000 ± 0.000 against 2.000 ± 0.000 |"
    assert f"| [topk](#topk) | {failed}" in page
    assert "OSError: no more" in page
    assert "from a small run" in page


def test_new_files_take_the_place_of_their_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evidence_page, "PAGE", tmp_path / "page.md")

    def session(name: str) -> dict[str, Any]:
        return {
            "kind": "session",
            "session": name,
            "date": "d",
            "machine": "m",
            "torch": "t",
            "python": "p",
            "command": "c",
        }

    old = [session("old"), {"kind": "link", "variant": "adam", "mbit": 100.0, "step_s": 1.0, "session": "old"}]
    run = {"kind": "run", "task": "text", "seed": 0, "steps": 3, "loss": 1.0, "accuracy": 0.1, "bytes": 1.0, "data": ""}
    old += [run | {"key": "gone", "session": "old"}]
    new = [session("new"), run | {"key": "kept", "session": "new"}]
    for name, lines in [("old", old), ("new", new)]:
        (tmp_path / name).write_text("".join(json.dumps(line) + "\n" for line in lines))
    evidence_page.write_page(tmp_path / "old", [tmp_path / "new"])
    merged = Results(rules.read([tmp_path / "old"]), VARIANTS)
    assert list(merged.runs) == ["kept"]
    assert list(merged.links) == [("adam", 100.0)]
    assert sorted(merged.sessions) == ["new", "old"]


def test_links_are_timed_against_the_reference_with_the_same_optimizer_and_hosts() -> None:
    assert evidence_claims.links_of("diloco")[0] == "adam"
    assert evidence_claims.links_of("topk") == ["allreduce", "topk_1"]
    assert evidence_claims.links_of("hierarchical")[0] == "two_hosts"
    assert evidence_claims.links_of("hogwild") == []
