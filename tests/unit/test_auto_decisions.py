"""What `auto` decides, from made-up measurements."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import pairwise

import pytest

from unisono.methods.strategies.auto.decisions import (
    FREE_TRIALS,
    IN_A_ROW,
    TRIAL_SHARE,
    Costs,
    Decision,
    PricedCandidate,
    Probed,
    StepTimes,
    Tuner,
)

FAST, SLOW = Probed(1e-4, 1e-9, 0.02), Probed(1e-4, 1e-7, 0.5)  # about 8 Gbit/s and 80 Mbit/s
OWN_S = 0.1
DENSE, BYTES, RANK = Costs(20e6), Costs(5e6, work_s=0.03), Costs(2e5, work_s=0.06)
CANDIDATES = [PricedCandidate("dense", DENSE), PricedCandidate("bytes", BYTES), PricedCandidate("rank", RANK)]


class Run:
    """Steps of a cluster that is what `link` says at each step."""

    def __init__(
        self,
        link: Callable[[int], Probed],
        *,
        candidates: list[PricedCandidate] = CANDIDATES,
        truth: list[Costs] | None = None,
        noise: Callable[[], float] = lambda: 1.0,
        own_s: Callable[[int], float] = lambda step: OWN_S,
        check_every: int = 10,
        trial_steps: int = 3,
    ) -> None:
        self.link, self.noise, self.own_s = link, noise, own_s
        self.truth = truth or [c.costs for c in candidates if c.costs is not None]
        self.tuner = Tuner(candidates, link(0), trial_steps=trial_steps, check_every=check_every)
        self.made: list[Decision] = []
        self.at_work: list[str] = []  # by step
        self.seconds = 0.0

    def step_s(self, index: int, step: int) -> float:
        costs = self.truth[index]
        return self.own_s(step) + self.link(step).seconds(costs) + costs.work_s

    def go(self, steps: int) -> Run:
        tuner = self.tuner
        for step in range(1, steps + 1):
            self.at_work.append(tuner.candidates[tuner.at_work].spec)
            self.seconds += self.step_s(tuner.at_work, step)
            if step == tuner.due:
                wall, factor = self.step_s(tuner.at_work, step), self.noise()
                own = self.own_s(step)
                measured = StepTimes(own + (wall - own) * factor, own, 0.0, self.truth[tuner.at_work].bytes_sent)
                link = self.link(step)
                seen = Probed(link.latency_s, link.s_per_byte * self.noise(), link.took_s)
                self.made += tuner.look(step, measured, seen if tuner.wants_link else None)
        return self

    def kinds(self, *kinds: str) -> list[Decision]:
        return [d for d in self.made if d.kind in kinds]


@pytest.mark.parametrize(("link", "best"), [(FAST, "dense"), (SLOW, "rank")])
def test_it_begins_with_the_best_predicted_and_settles_on_the_best_measured(link: Probed, best: str) -> None:
    run = Run(lambda step: link).go(100)
    assert run.at_work[0] == best
    assert set(run.at_work[40:]) == {best}
    (settled,) = run.kinds("settle")
    assert settled.to == best


def test_a_prediction_that_was_wrong_is_corrected_by_the_trial() -> None:
    """Compression takes ten times as long as in the dry run."""
    truth = [DENSE, BYTES._replace(work_s=0.04), RANK._replace(work_s=3.0)]
    run = Run(lambda step: SLOW, truth=truth).go(200)
    assert run.at_work[0] == "rank"
    assert set(run.at_work[60:]) == {"bytes"}


def test_what_is_predicted_to_be_much_slower_is_not_tried() -> None:
    run = Run(lambda step: SLOW).go(100)
    assert "dense" not in run.at_work  # 2.1 s where the best takes 0.18
    (settled,) = run.kinds("settle")
    assert "not tried dense (predicted 2.1 s)" in settled.why


def test_a_trial_that_was_held_up_keeps_no_other_from_its_own() -> None:
    """The machine had something else to do in the second trial."""
    run = Run(lambda step: SLOW, own_s=lambda step: 5.0 if 4 < step <= 8 else OWN_S)
    run.tuner.at_work = 1
    run.go(60)
    assert run.at_work[4] == "rank"
    assert "dense" not in run.at_work
    run = Run(lambda step: FAST, own_s=lambda step: 5.0 if 4 < step <= 8 else OWN_S).go(60)
    assert set(run.at_work[:12]) == {"dense", "bytes", "rank"}


def test_of_those_about_as_fast_the_first_one_named_is_taken() -> None:
    link = Probed(1e-4, 3e-9)
    truth = [Costs(20e6), Costs(20e6, work_s=-0.008)]  # 5 % faster
    run = Run(
        lambda step: link, candidates=[PricedCandidate("a", truth[0]), PricedCandidate("b", truth[0])], truth=truth
    ).go(60)
    assert set(run.at_work[30:]) == {"a"}
    truth[1] = Costs(20e6, work_s=-0.03)  # 19 %
    run = Run(
        lambda step: link, candidates=[PricedCandidate("a", truth[0]), PricedCandidate("b", truth[0])], truth=truth
    ).go(60)
    assert set(run.at_work[30:]) == {"b"}


def test_a_candidate_of_which_nothing_is_known_is_tried_once() -> None:
    candidates = [PricedCandidate("dense", DENSE), PricedCandidate("other")]
    run = Run(lambda step: FAST, candidates=candidates, truth=[DENSE, Costs(1e6, work_s=0.5)]).go(300)
    assert run.at_work.count("other") == 4  # one trial: 3 steps and the first
    assert set(run.at_work[20:]) == {"dense"}


@pytest.mark.parametrize(("before", "after", "best"), [(FAST, SLOW, "rank"), (SLOW, FAST, "dense")])
def test_a_link_that_drifts_makes_it_change_once_with_the_reason(before: Probed, after: Probed, best: str) -> None:
    run = Run(lambda step: before if step < 100 else after).go(400)
    first, last = run.at_work[90], run.at_work[-1]
    assert last == best != first
    assert set(run.at_work[100 + 10 * (IN_A_ROW + 2) + 10 :]) == {best}, "within a few checks"
    (tried,), (changed,) = run.kinds("try"), run.kinds("change")
    if after is SLOW:
        assert tried.why.startswith("communication takes 2 s of 2.1 s per step since step ")
        assert tried.why.endswith("(20.1 ms before)")
    else:
        assert tried.why.startswith("communication takes 60.3 ms of 160 ms per step since step ")
    assert tried.predicted == pytest.approx(changed.achieved, rel=0.1)
    assert str(tried).startswith(f"step {tried.step}: {first} -> {best}: ")
    assert f"{best}: " in str(changed)
    assert "achieved" in str(changed)


def test_a_link_that_drifts_is_seen_where_the_candidate_at_work_hardly_uses_it() -> None:
    """Its own bytes say nothing: the link itself is measured now and then, for little."""
    work = [PricedCandidate("dense", Costs(20e6)), PricedCandidate("rank", Costs(1e3, work_s=0.06))]
    run = Run(lambda step: SLOW if step < 100 else FAST, candidates=work).go(3000)
    assert run.at_work[90] == "rank"
    (tried,) = run.kinds("try")
    assert tried.why.startswith("the link is 91 times as fast since step ")
    assert run.at_work[-1] == "dense"


def test_compute_that_drifts_is_a_drift_too() -> None:
    """With less compute nothing else is faster by more than it was: it stays."""
    run = Run(lambda step: SLOW, own_s=lambda step: 0.1 if step < 100 else 0.03).go(300)
    (stayed,) = run.kinds("stay")
    assert stayed.why.startswith("compute takes 30 ms since step ")
    assert len(set(run.at_work[60:])) == 1


@pytest.mark.parametrize("seed", range(20))
def test_noise_without_a_drift_never_makes_it_change(seed: int) -> None:
    draw = random.Random(seed)

    def noise() -> float:
        spike = 4.0 if draw.random() < 0.1 else 1.0
        return spike * draw.lognormvariate(0.0, 0.1)

    link = Probed(1e-4, 1.8e-9)  # the candidates are not far apart
    run = Run(lambda step: link, noise=noise).go(3000)
    assert not run.kinds("change")
    assert len(run.kinds("try")) <= 2


def test_a_link_that_flaps_makes_it_change_ever_more_seldom() -> None:
    steps = 6000
    run = Run(lambda step: FAST if step // 60 % 2 else SLOW).go(steps)
    changes = run.kinds("change")
    assert 2 <= len(changes) <= 5 + steps // 320, [d.step for d in changes]
    distances = [b.step - a.step for a, b in pairwise(changes)]
    assert min(distances[5:], default=320) >= 300


def test_trials_take_a_bounded_part_of_the_steps() -> None:
    """A candidate that always promises to be faster, and never is, as the link drifts on and on."""
    links = [Probed(1e-4, 1e-8 * 1.5 ** (k % 12)) for k in range(101)]
    truth = [DENSE, Costs(1e6, work_s=40.0)]
    candidates = [PricedCandidate("dense", DENSE), PricedCandidate("other", Costs(1e6))]
    steps = 4000
    run = Run(lambda step: links[step // 40], candidates=candidates, truth=truth)
    run.tuner.predictor.learn = lambda index, measured: setattr(run.tuner.predictor, "own_s", measured.own_s)  # type: ignore[method-assign]
    run.go(steps)
    spent = sum(a == "other" for a in run.at_work[20:])
    assert run.kinds("back")
    assert spent <= FREE_TRIALS * 4 + TRIAL_SHARE * steps
