"""How much a method learns from a sample: from runs to the planner's file, and what is looked up in it."""

from __future__ import annotations

import json
import math
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from scipy import stats
from sklearn.isotonic import IsotonicRegression

from unisono.methods.spec import build
from unisono.predict.planner import learning
from unisono.predict.planner.candidates import describe_candidate
from unisono.predict.planner.learning import EXACT, NOT_MEASURED, Learning

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
made: Any = import_module("evidence_learning")
rules: Any = import_module("evidence_rules")
Run = import_module("evidence_tasks").Run
STRAIGHT = [2 - share for share in made.SHARES]  # a quarter more loss at a quarter less samples


def test_the_planners_file_is_what_the_results_say() -> None:
    large = rules.read([made.LARGE]) if made.LARGE.exists() else []
    text = made.make_file(rules.read([made.RESULTS]), rules.read([made.CURVES]), large)
    assert learning.FILE.read_text(encoding="utf-8") == text, "make it anew: make results"


# From losses to shares ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("loss", "share"), [(1.0, 1.0), (0.9, 1.0), (1.2, 0.8), (1.25, 0.75), (1.875, 0.125), (1.88, 0.0)]
)
def test_a_loss_is_worth_the_share_of_the_samples_after_which_the_reference_has_it(loss: float, share: float) -> None:
    assert made.share_at(STRAIGHT, loss) == pytest.approx(share)


def test_where_a_curve_is_flat_the_largest_share_counts() -> None:
    flat = [1.9, 1.8, 1.7, 1.6, 1.2, 1.2, 1.1, 1.0]
    assert made.share_at(flat, 1.2) == pytest.approx(0.75)
    assert made.share_at(flat, 1.2001) == pytest.approx(0.625, abs=1e-3)
    assert made.share_at([1.9, 1.8, 1.7, 1.6, 1.1, 1.3, 1.1, 1.0], 1.2) == pytest.approx(0.75)  # by chance


@pytest.mark.parametrize(
    "values", [[3.0, 2.0, 1.0], [1.0, 2.0, 3.0], [5.0, 1.0, 4.0, 2.0, 3.0, 0.0], [1.0, 1.5, 0.5, 0.9, 1.1]]
)
def test_a_curve_falls_as_isotonic_regression_has_it(values: list[float]) -> None:
    wanted = IsotonicRegression(increasing=False).fit_transform(range(len(values)), values)
    assert made.falling(values) == pytest.approx(list(wanted))


def test_the_interval_is_students_of_the_methods_seeds_and_the_curves() -> None:
    ours, theirs = {0: 2.4, 1: 1.1, 2: 3.9, 7: 9.0}, {0: 2.0, 1: 1.0, 2: 3.0, 9: 9.0}  # seeds 0 to 2 are common
    curves = [[1 + slope * (1 - share) for share in made.SHARES] for slope in (0.9, 1.0, 1.1)]
    found = made.compare(ours, theirs, curves)
    by_seed, by_curve = [0.8, 0.9, 0.7], [1 - 0.2 / slope for slope in (0.9, 1.0, 1.1)]
    half = stats.t.ppf(0.9, 2) * math.hypot(stats.sem(by_seed), stats.sem(by_curve))
    assert found[:3] == pytest.approx((0.8, 0.8 - half, 0.8 + half), rel=1e-4)
    assert found.seeds == 3
    for degrees, value in made.T80.items():
        assert value == pytest.approx(stats.t.ppf(0.9, degrees), rel=1e-3)


def test_one_seed_says_nothing_and_a_seed_that_diverged_says_all() -> None:
    others = dict.fromkeys(range(3), 2.0)
    for loss in (2.0, None):
        assert made.compare({0: loss}, others, [STRAIGHT] * 2) is None
    assert made.compare(others, {0: 2.0, 1: 2.0, 2: None}, [STRAIGHT] * 2).seeds == 2
    assert made.compare(others, others, [STRAIGHT]) is None
    assert made.compare(others, others, [STRAIGHT] * 2)[:3] == (1.0, 1.0, 1.0)
    for loss in (None, 21.0):
        assert made.compare(others | {1: loss}, others, [STRAIGHT] * 2)[:3] == (0.0, 0.0, 0.0)
    assert made.compare(dict.fromkeys(range(3), 6.0), others, [STRAIGHT] * 2)[:3] == (0.0, 0.0, 0.125)


def lines(task: str, losses: dict[str, list[float]], steps: float = 1.0) -> list[dict[str, Any]]:
    """Runs of variants, seed by seed."""
    runs = [
        (Run(task, made.EVERY[name], seed, round(steps * made.STEPS[task])), loss)
        for name, each in losses.items()
        for seed, loss in enumerate(each)
    ]
    about = {"kind": "run", "task": task, "session": "s"}
    return [about | {"key": r.key, "seed": r.seed, "steps": r.steps, "loss": loss} for r, loss in runs]


def test_of_several_tasks_that_counts_in_which_the_method_is_worst_as_far_as_can_be_told() -> None:
    """The reference's loss is 2 - share, so that a loss of 1.2 is worth 0.8."""
    curves = [
        line for task in made.BOTH for share in made.SHARES
        for line in lines(task, {"allreduce": [2 - share] * 2}, share)
    ]  # fmt: skip
    found = [
        *lines("text", {"topk_1": [1.2, 1.2], "powersgd_4": [1.1, 1.1], "bf16": [1.0, 1.0]}),
        *lines("digits", {"topk_1": [0.9, 1.3], "powersgd_4": [1.5, 1.5], "bf16": [0.9, 1.15]}),
        *lines("text", {"local_sgd": [1.25, 1.25], "qadam": [1.0, 1.0]}),  # of qadam's reference there is no curve
    ]
    rows = {row["spec"]: row for row in json.loads(made.make_file(found, curves))["methods"]}
    assert {spec: (row["share"], row["task"]) for spec, row in rows.items()} == {
        "allreduce(reducer=topk)": (0.8, "text"),
        "allreduce(reducer=powersgd)": (0.5, "digits"),
        "allreduce(reducer=bf16)": (1.0, "text"),
        "local_sgd(every=8)": (0.75, "text"),
    }
    assert rows["local_sgd(every=8)"]["free"] == ["start"]
    assert rows["allreduce(reducer=topk)"]["low"] == 0.8


# What is looked up -------------------------------------------------------------------------------------------


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    rows = [
        ("local_sgd(every=8)", ["start"], 0.7),
        ("local_sgd(every=8, start=5)", [], 0.6),
        ("allreduce(reducer=powersgd)", [], 0.8),
    ]
    rows += [("allreduce(reducer=warmup(inner=topk))", ["steps"], 0.5), ("qadam(warmup=5)", [], 0.0)]
    keys = ("spec", "free", "share")
    (tmp_path / "table.json").write_text(json.dumps({"methods": [dict(zip(keys, row, strict=True)) for row in rows]}))
    monkeypatch.setattr(learning, "FILE", tmp_path / "table.json")
    learning._read.cache_clear()
    yield
    learning._read.cache_clear()


@pytest.mark.usefixtures("table")
@pytest.mark.parametrize(
    ("spec", "share"),
    [
        ("powersgd", 0.8),
        ("allreduce(reducer=powersgd(rank=4))", 0.8),
        ("powersgd(rank=8)", None),
        ("powersgd(rank=4, min_saving=3.0)", None),
        ("local_sgd(every=8, start=0)", 0.7),
        ("local_sgd(every=8, start=5)", 0.6),
        ("local_sgd(every=16, start=0)", None),
        ("warmup(topk(k=0.01), steps=3)", 0.5),
        ("warmup(topk(k=0.1), steps=3)", None),
        ("qadam(warmup=5)", 0.0),
    ],
)
def test_a_method_is_found_by_its_settings_but_for_those_that_were_a_share_of_the_run(spec: str, share: float) -> None:
    assert learning.look_up(build(spec)).share == share


def test_what_is_exact_learns_as_exact_and_what_nobody_measured_is_not_measured() -> None:
    assert describe_candidate("zero(stage=2)").learning == EXACT
    assert describe_candidate("powersgd(rank=77)").learning == NOT_MEASURED
    diverged, little = Learning(0.0, 0.0, 0.0), Learning(0.0, 0.0, 0.125)
    some = (EXACT, NOT_MEASURED, Learning(0.9, 0.8, 0.95), Learning(0.9, 0.8, 1.0), diverged, little)
    assert [x.grade for x in some] == ["as exact", "not measured", "less", "as exact", "diverged", "less"]
    words = ["100 %", "not measured", "90 % (80 - 95)", "90 % (80 - 100)", "diverged", "under 12 %"]
    assert [x.words for x in some] == words
