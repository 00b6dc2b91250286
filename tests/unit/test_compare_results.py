"""What the runs of a comparison amount to: speed-ups, losses at equal time and samples, targets, and the table."""

from __future__ import annotations

import math

import pytest

from unisono.predict.compare.report import format_table
from unisono.predict.compare.results import (
    ONE_WORKER,
    STEP_FIELDS,
    Comparison,
    Curve,
    RankSteps,
    Trial,
    compare,
    find_target,
    loss_at,
    merge_ranks,
    smooth,
)


def curve(
    step_s: float, losses: list[float | None], *, batch: int | None = 8, sent: float = 100.0, first_s: float = 0.0
) -> Curve:
    """Steps of one length, after a first one that takes `first_s` more."""
    count = len(losses)
    return Curve(
        times=[first_s + step_s * (i + 1) for i in range(count)],
        losses=losses,
        samples=[None if batch is None else batch * (i + 1) for i in range(count)],
        sent=[sent * (i + 1) for i in range(count)],
        parts={name: [step_s / 5] * count for name in ("compute", "communication", "waiting", "compression", "data")},
        broke_at=next((i + 1 for i, x in enumerate(losses) if x is not None and math.isnan(x)), None),
    )


def falling(count: int, start: float = 4.0, by: float = 0.1) -> list[float | None]:
    return [start - by * i for i in range(count)]


def row(found: Comparison, method: str, workers: int = 2):
    return next(r for r in found.rows if (r.method, r.workers) == (method, workers))


# Speed -----------------------------------------------------------------------------------------------------------


def test_speed_up_is_the_ratio_of_times_for_the_same_samples() -> None:
    found = compare(
        [
            Trial(ONE_WORKER, 1, 0, curve(1.0, falling(20))),
            Trial("a", 2, 0, curve(0.625, falling(20))),
            Trial("b", 4, 0, curve(1.0, falling(20), batch=32)),  # four times the samples in the same time
        ]
    )
    assert row(found, "a").speed_up == pytest.approx(1.6)
    assert row(found, "a").efficiency == pytest.approx(0.8)
    assert row(found, "b", 4).speed_up == pytest.approx(4.0)
    assert row(found, ONE_WORKER, 1).efficiency == pytest.approx(1.0)


def test_the_first_steps_are_left_out_of_times_but_not_of_the_time_to_a_target() -> None:
    found = compare([Trial("a", 2, 0, curve(0.5, falling(20), first_s=60.0))], target=3.0)
    assert row(found, "a").step_s == pytest.approx(0.5)
    assert row(found, "a").time_to_target_s == pytest.approx(60.0 + 0.5 * 16)  # the mean of steps 7 to 16 is 2.95


def test_a_run_that_is_mostly_the_beginning_of_its_method_is_noted() -> None:
    """local_sgd(every=8) averages after each of its first 100 windows: it sends as much as allreduce till then."""
    short, long = curve(0.5, falling(30)), curve(0.5, falling(300, by=0.01))
    short.about, long.about = {"begins": ["start", 100]}, {"begins": ["start", 100]}
    found = compare([Trial("local_sgd(every=8)", 2, 0, short), Trial("b", 2, 0, long)])
    noted = row(found, "local_sgd(every=8)")
    assert noted.note.startswith("its first 100 steps exchange as allreduce does (start=100), and the run had 30")
    assert (noted.diverged, row(found, "b").note) == (False, "")


def test_steps_of_two_lengths_count_with_their_mean() -> None:
    """As with models that are exchanged now and then: a median would not see the exchange."""
    times = curve(0.1, falling(25))
    times.times = [0.1 * (i + 1) + 1.0 * ((i + 1) // 5) for i in range(25)]
    assert row(compare([Trial("local", 2, 0, times)]), "local").step_s == pytest.approx(0.3)


def test_rounds_give_their_median() -> None:
    found = compare([Trial("a", 2, k, curve(s, falling(20))) for k, s in enumerate((1.0, 9.0, 2.0))])
    assert row(found, "a").step_s == pytest.approx(2.0)
    assert row(found, "a").rounds == 3


def test_without_samples_there_is_no_speed_up_and_no_guess() -> None:
    found = compare(
        [Trial(ONE_WORKER, 1, 0, curve(1.0, falling(20), batch=None)), Trial("a", 2, 0, curve(0.5, falling(20)))]
    )
    assert (row(found, "a").speed_up, found.equal_samples) == (None, None)
    assert row(found, ONE_WORKER, 1).samples_a_second is None


# Losses ----------------------------------------------------------------------------------------------------------


def test_a_smoothed_loss_is_the_mean_of_the_last_ten_steps() -> None:
    losses = [float(i) for i in range(30)]
    assert smooth(losses)[29] == pytest.approx(sum(range(20, 30)) / 10)
    assert smooth(losses)[1] == pytest.approx(0.5)
    assert smooth([1.0, None, 3.0])[2] is None


def test_between_two_steps_a_loss_is_on_the_line_between_them() -> None:
    steps = curve(2.0, [8.0, 4.0])  # smoothed: 8 at 2 s, 6 at 4 s
    assert loss_at(steps, steps.times, 3.0) == pytest.approx(7.0)
    assert loss_at(steps, steps.samples, 16) == pytest.approx(6.0)
    assert loss_at(steps, steps.times, 1.0) is None
    assert loss_at(steps, steps.times, 5.0) is None


def test_losses_are_compared_at_the_largest_time_and_samples_that_all_reached() -> None:
    fast, slow = curve(0.5, falling(40)), curve(2.0, falling(20), batch=16)
    found = compare([Trial("fast", 2, 0, fast), Trial("slow", 2, 0, slow)])
    assert found.equal_time_s == pytest.approx(20.0)
    assert found.equal_samples == 320
    assert row(found, "fast").loss_at_time == pytest.approx(smooth(fast.losses)[-1])
    assert row(found, "slow").loss_at_time == pytest.approx(smooth(slow.losses)[9])
    assert row(found, "slow").loss_at_samples == pytest.approx(smooth(slow.losses)[19])


def test_a_run_that_broke_off_does_not_shorten_what_the_others_are_compared_at() -> None:
    broken = curve(1.0, [5.0, math.nan])
    found = compare([Trial("a", 2, 0, curve(1.0, falling(30))), Trial("b", 2, 0, broken)])
    assert found.equal_time_s == pytest.approx(30.0)
    assert row(found, "b").diverged
    assert "step 2" in row(found, "b").note


# Targets and ends ------------------------------------------------------------------------------------------------


def test_a_target_is_reached_by_the_smoothed_loss_and_not_by_one_lucky_step() -> None:
    lucky = [4.0] * 15 + [0.0] + [4.0] * 15
    assert find_target(curve(1.0, lucky), 1.0) is None
    assert find_target(curve(1.0, [1.0] * 12), 1.0) == pytest.approx(10.0)


def test_a_target_that_is_never_reached_is_said_in_its_row() -> None:
    trials = [Trial("a", 2, 0, curve(1.0, falling(30))), Trial("b", 2, 0, curve(1.0, falling(30, by=0.01)))]
    found = compare(trials, target=3.0)
    assert found.best is not None
    assert found.best.method == "a"
    line = next(line for line in format_table(found).splitlines() if line.strip().startswith("b "))
    assert line.endswith("not reached")


def test_a_loss_that_ends_above_its_start_has_diverged() -> None:
    found = compare([Trial("up", 2, 0, curve(1.0, falling(20, by=-0.1))), Trial("a", 2, 0, curve(2.0, falling(20)))])
    assert row(found, "up").diverged
    assert not row(found, "up").is_best
    assert "diverged: its loss began at 4 and ended at" in format_table(found)


def test_a_run_that_failed_has_a_row_with_the_reason() -> None:
    failed = Trial("bad", 2, 0, Curve(), failure="ValueError: no such thing", output="runs/02-bad")
    found = compare([failed, Trial("a", 2, 0, curve(1.0, falling(20)))])
    assert row(found, "bad").failed
    assert "ValueError: no such thing" in format_table(found)
    assert found.finding.startswith("a on 2 workers")


def test_where_nothing_ran_the_sentence_says_so() -> None:
    found = compare([Trial("bad", 2, 0, Curve(), failure="ValueError: x")])
    assert found.finding == "No method has run to its end and learned."
    assert found.best is None


def test_what_is_not_measured_is_a_dash_and_formulas_are_marked() -> None:
    steps = curve(1.0, falling(20))
    steps.not_measured, steps.bytes_by_formula = frozenset({"waiting"}), True
    text = format_table(compare([Trial("torch:ddp", 2, 0, steps)]))
    cells = next(line for line in text.splitlines() if "torch:ddp" in line).split()
    assert cells[:9] == ["*", "torch:ddp", "2", "1000", "200", "200", "-", "200", "200"]
    assert cells[9:11] == ["≈100", "B"]
    assert "≈ bytes by a formula" in text


# All ranks as one ------------------------------------------------------------------------------------------------


def rank_steps(start: float, **columns: list) -> RankSteps:
    count = len(columns["end"])
    filled = {name: columns.get(name, [0.0] * count) for name in STEP_FIELDS}
    filled |= {"finite": columns.get("finite", [True] * count), "arrivals": columns.get("arrivals", [[]] * count)}
    about = {"start": start, "not_measured": columns.get("not_measured", []), "bytes_by_formula": False}
    return RankSteps(about, filled)


def test_a_step_is_over_when_the_last_rank_has_made_it_and_losses_are_means() -> None:
    one = rank_steps(100.0, end=[101.0, 102.0], loss=[4.0, 2.0], bytes_sent=[10, 10], samples=[8, 16])
    two = rank_steps(
        100.5, end=[102.0, 103.0, 104.0], loss=[2.0, 1.0, 0.0], bytes_sent=[30, 30, 30], samples=[8, 16, 24]
    )
    merged = merge_ranks([one, two])
    assert merged.times == [1.5, 2.5]
    assert merged.losses == [3.0, 1.5]
    assert merged.sent == [20.0, 40.0]
    assert merged.samples == [8, 16]


def test_compression_and_waits_between_hosts_are_taken_out_of_communication() -> None:
    early = [("world/7", 10.0, 10.0, 14.0)]  # arrived at 10, stood still until 14
    late = [("world/7", 13.0, 13.0, 14.0)]
    one = rank_steps(9.0, end=[14.0], communication=[4.0], compression=[0.5], loss=[1.0], arrivals=[early])
    two = rank_steps(9.0, end=[14.0], communication=[1.0], compression=[0.5], loss=[1.0], arrivals=[late])
    parts = merge_ranks([one, two]).parts
    assert parts["waiting"] == [1.5]  # three seconds of one of two ranks
    assert parts["compression"] == [0.5]
    assert parts["communication"] == [0.5]


def test_ranks_without_steps_such_as_servers_are_left_out() -> None:
    worker = rank_steps(0.0, end=[1.0], loss=[2.0])
    server = rank_steps(0.0, end=[])
    assert merge_ranks([server, worker]).losses == [2.0]
    assert len(merge_ranks([server])) == 0
