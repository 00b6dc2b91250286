"""Plans: a step taken apart, what a silent world sends, the choice and its reasons, and a measurement in threads."""

from __future__ import annotations

import json
import math
import random
import re
from functools import partial
from inspect import getsourcefile as read_source
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch
from torch import nn

import unisono as un
from unisono.background import SerialQueue, watched_by
from unisono.cli.command_line import main
from unisono.methods.facts import Convergence, Grade
from unisono.methods.reducers import fp16
from unisono.methods.spec import extend, names, read_facts
from unisono.predict.costs import Anatomy, Job, Link, Network, Operation, replay
from unisono.predict.planner.candidates import describe_candidate, find_candidates
from unisono.predict.planner.choice import choose, find_crossing, plan_to_dict, write_report
from unisono.predict.planner.learning import EXACT, Learning
from unisono.predict.planner.measured import Measured, MeasuredMethod
from unisono.predict.planner.measurement_plan import MeasurementPlan, PlanSettings, _count_steps, steps_needed
from unisono.predict.planner.trace import Trace, steady
from unisono.world import World
from unisono.world.transports.silent import SilentTransport

REDUCE = Operation("all_reduce", 400)


# A step taken apart ----------------------------------------------------------------------------------------------


def silent_world(trace: Trace, size: int = 2) -> World:
    hosts = [f"host{r}" for r in range(size)]
    return World(SilentTransport(0, size, trace.listen, hosts=hosts), hosts=hosts)


def test_jobs_of_a_queue_are_found_with_their_operations_and_when_they_are_due() -> None:
    trace = Trace()
    with watched_by(trace):
        channel = silent_world(trace).channel(inline=True)
        lane = SerialQueue("lane")
        trace.start()
        first = lane.submit(lambda: channel.all_reduce(torch.ones(100)).wait())
        second = lane.submit(lambda: channel.all_gather(torch.ones(3), even=True).wait())
        first.wait()
        second.wait()
        step = trace.stop()
    sent = [job for job in step.jobs if job.operations]
    assert [job.operations for job in sent] == [(REDUCE,), (Operation("all_gather", 12),)]
    assert not any(job.behind for job in sent)
    due = [job.due_s for job in step.jobs if math.isfinite(job.due_s)]
    assert len(due) == 2
    assert all(0 <= job.ready_s <= step.compute_s for job in step.jobs)
    assert due == sorted(due)
    assert 0 < step.compute_s <= step.wall_s


def test_a_message_goes_on_behind_the_lane_until_it_is_waited_for() -> None:
    trace = Trace()
    with watched_by(trace):
        channel = silent_world(trace).channel(inline=False)
        lane = SerialQueue("lane")
        x = torch.ones(300, 300)

        def compress() -> None:
            handle = channel.all_reduce(torch.ones(100))
            x.mm(x)
            handle.wait()
            x.mm(x)

        trace.start()
        lane.submit(compress).wait()
        step = trace.stop()
    sender = next(i for i, job in enumerate(step.jobs) if job.operations)
    assert step.jobs[sender].behind
    assert step.jobs[-1].awaits == sender
    assert sum(job.work_s for job in step.jobs) > 0


def test_what_the_program_sends_itself_it_waits_for_itself() -> None:
    trace = Trace()
    with watched_by(trace):
        channel = silent_world(trace).channel(inline=True)
        trace.start()
        channel.all_reduce(torch.ones(100)).wait()
        step = trace.stop()
    (job,) = step.jobs
    assert job.operations == (REDUCE,)
    assert job.ready_s == job.due_s


def test_what_is_waited_for_in_the_next_step_is_the_next_steps_from_its_beginning() -> None:
    trace = Trace()
    with watched_by(trace):
        channel = silent_world(trace).channel(inline=False)
        trace.start()
        handle = channel.all_reduce(torch.ones(100))
        assert trace.stop().jobs == ()
        trace.start()
        handle.wait()
        (job,) = trace.stop().jobs
    assert (job.operations, job.ready_s, job.behind) == ((REDUCE,), 0.0, True)


# Silent worlds ---------------------------------------------------------------------------------------------------


def make_model() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 16))
    return model, torch.optim.SGD(model.parameters(), lr=0.01)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> None:
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()


def run_measurement(world: World, methods: list[str], saves: Path | None = None, **settings: Any) -> Measured:
    torch.manual_seed(0)
    model, optimizer = make_model()
    x = torch.randn(4, 32, generator=torch.Generator().manual_seed(world.rank))
    done: list[bool] = []
    plan = MeasurementPlan(
        model,
        optimizer,
        world,
        find_candidates(methods),
        PlanSettings(budget_s=1000.0, **settings),
        own="allreduce",
        finished=lambda: done.append(True),
    )
    while not done:
        train(model, optimizer, x)
        if saves is not None:
            un.save(saves, plan.replica)
    assert all(bool(p.isfinite().all()) for p in model.parameters())
    plan.replica.close()
    return plan.measured


def sent_for_real(world: World, spec: str) -> int:
    torch.manual_seed(0)
    model, optimizer = make_model()
    replica = un.parallel(model, optimizer, spec, world=world)
    x = torch.randn(4, 32, generator=torch.Generator().manual_seed(world.rank))
    for _ in range(3):
        before = world.ledger.sent().bytes_sent
        train(model, optimizer, x)
        sent = world.ledger.sent().bytes_sent - before
    replica.close()
    return sent


METHODS = [
    "allreduce",
    "topk(k=0.1)",
    "powersgd(rank=1, min_saving=1.0)",
    "zero(stage=1)",
    "hogwild",
    "qadam(warmup=1)",
]


@pytest.fixture(scope="module")
def measured() -> Measured:
    return un.run_threads(lambda world: run_measurement(world, METHODS), 2, hosts=["a", "b"])[0]


def test_a_course_takes_the_steps_that_it_says(measured: Measured) -> None:
    tried = [m for m in measured.methods if m.anatomy is not None or "program" in m.why]
    refused = sum("program" in m.why for m in tried)
    assert refused == 1
    most = steps_needed(len(tried) - refused, 0)
    assert len(tried) < measured.steps <= most  # on a busy machine steps are slow, and fewer are taken
    assert measured.batch == 4
    assert measured.compute_s > 0


def test_methods_that_cannot_be_predicted_or_bound_say_why(measured: Measured) -> None:
    why = {m.spec: m.why for m in measured.methods if m.anatomy is None}
    assert sorted(why) == ["hogwild", "qadam(warmup=1)"]
    assert why["hogwild"].startswith("not predicted: ")
    assert "Adam" in why["qadam(warmup=1)"]


@pytest.mark.parametrize("spec", METHODS[:4])
def test_a_silent_step_sends_what_a_real_one_sends(measured: Measured, spec: str) -> None:
    found = next(m for m in measured.methods if m.spec == describe_candidate(spec).spec)
    real = un.run_threads(lambda world: sent_for_real(world, spec), 2, hosts=["a", "b"])[0]
    assert found.bytes_sent == pytest.approx(real, abs=4)


def test_the_network_is_measured_by_operation_and_by_link(measured: Measured) -> None:
    network = measured.network
    assert network is not None
    assert network.hosts == 2
    assert set(network.fitted) >= {"all_reduce", "all_gather", "all_to_all", "reduce_scatter", "broadcast"}
    assert all(network.seconds(Operation(op, 10_000)) > 0 for op in network.fitted)
    assert [(link["first"], link["second"]) for link in measured.links] == [("a", "b")]


def test_what_was_measured_goes_through_json(measured: Measured) -> None:
    again = Measured.from_dict(json.loads(json.dumps(measured.to_dict())))
    assert json.dumps(again.to_dict()) == json.dumps(measured.to_dict())
    both = [json.dumps(plan_to_dict(found, choose(found, ["exact"]))) for found in (again, measured)]
    assert both[0] == both[1]


def test_verified_methods_have_a_measured_step_and_a_program_that_saves_writes_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint"
    plan = partial(run_measurement, methods=["allreduce", "fp16"], saves=folder, verify=1, allow=("exact",))
    found = un.run_threads(plan, 2, hosts=["a", "b"])[0]
    assert not folder.exists()
    times = {m.spec: m.verified_s for m in found.methods}
    assert times["allreduce"] is not None
    assert times["allreduce"] > 0
    assert times["fp16"] is None
    assert "measured" in write_report(found, choose(found, ["exact", "rounded"]))
    assert steps_needed(0, 1) < found.steps <= steps_needed(2, 1)


# The choice ------------------------------------------------------------------------------------------------------


def step(spec: str, work_s: float, nbytes: int) -> Anatomy:
    """Compute 1 s, then compression, then the messages."""
    return Anatomy(spec, 2, 1.0, (Job(1.0, work_s, (Operation("all_reduce", nbytes),)),))


def planned(
    *methods: tuple[str, Grade, float, int], bits_per_s: float = 8e6, learns: dict[str, Learning] | None = None
) -> Measured:
    """Messages of n bytes take n * 8 / bits_per_s. All learn as exact training does, but for those in `learns`."""
    network = Network(2, 1, Link(0.0, bits_per_s), fitted={"all_reduce": (0.0, 8 / bits_per_s)})
    rows = [
        MeasuredMethod(s, Convergence(grade, ""), step(s, work_s, nbytes), learning=(learns or {}).get(s, EXACT))
        for s, grade, work_s, nbytes in methods
    ]
    return Measured(
        2,
        ["a", "b"],
        "allreduce",
        10,
        40,
        1.0,
        batch=8,
        network=network,
        methods=rows,
        learning_rate=0.1,
        optimizer="SGD",
    )


ALLOWED = ["exact", "rounded", "compressed"]


def test_the_fastest_is_first_and_what_changes_training_is_apart() -> None:
    found = planned(
        ("allreduce", "exact", 0.0, 2_000_000), ("topk", "compressed", 0.1, 20_000), ("gossip", "other", 0.0, 0)
    )
    choice = choose(found, ALLOWED)
    assert [row.spec for row in choice.ranked] == ["topk", "allreduce"]
    assert [row.spec for row in choice.others] == ["gossip"]
    assert choice.ranked[0].seconds == pytest.approx(1.12)
    assert choose(found, [*ALLOWED, "other"]).ranked[0].spec == "gossip"
    report = write_report(found, choice)
    assert report.index("topk") < report.index("gossip")
    assert "2.00 s" in choice.reasons[0]


@pytest.mark.parametrize(
    ("is_on", "expected"),
    [
        (True, "between hosts: encrypted, 500 Mbit/s; 2 Gbit/s without (--no-encrypt)"),
        (False, "between hosts: not encrypted, 2 Gbit/s; 500 Mbit/s with --encrypt"),
    ],
)
def test_a_plan_says_whether_hosts_encrypt_and_what_it_costs(is_on: bool, expected: str) -> None:
    found = planned(("allreduce", "exact", 0.0, 2_000_000))
    found.encryption = {"is_on": is_on, "plain_bits_per_s": 2e9, "encrypted_bits_per_s": 5e8}
    assert expected in write_report(found, choose(found, ALLOWED))
    found.encryption = {}  # one host
    assert "between hosts:" not in write_report(found, choose(found, ALLOWED))


def test_among_methods_about_as_fast_the_one_with_the_least_effect_is_first() -> None:
    close = planned(("allreduce", "exact", 0.0, 40_000), ("topk", "compressed", 0.0, 0))
    assert choose(close, ALLOWED).ranked[0].spec == "allreduce"  # 1.04 s against 1.00 s
    apart = planned(("allreduce", "exact", 0.0, 60_000), ("topk", "compressed", 0.0, 0))
    assert choose(apart, ALLOWED).ranked[0].spec == "topk"


def test_the_first_choice_is_that_with_the_least_time_to_a_loss_not_that_with_the_least_step() -> None:
    # A step of 1.02 s that teaches 0.6 of an exact one: 1.7 s to what allreduce learns in 1.5 s.
    methods: Any = [("allreduce", "exact", 0.0, 500_000), ("topk", "compressed", 0.0, 20_000)]
    choice = choose(planned(*methods, learns={"topk": Learning(0.6, 0.55, 0.64, "text", 3)}), ALLOWED)
    assert [row.spec for row in choice.ranked] == ["allreduce", "topk"]
    assert [row.to_a_loss for row in choice.ranked] == pytest.approx([1.5, 1.7])
    # With 0.8 of it, 1.275 s: the first, which is 1.5 / 1.275 times as fast to a loss, and the words say so.
    found = planned(*methods, learns={"topk": Learning(0.8, 0.75, 0.85, "text", 3)})
    choice = choose(found, ALLOWED)
    assert [row.spec for row in choice.ranked] == ["topk", "allreduce"]
    report = write_report(found, choice)
    assert re.search(r"^topk .* compressed +80 % \(75 - 85\) +1\.27 s$", report, re.MULTILINE)
    assert "A sample teaches 80 % (75 - 85) of what it does under allreduce" in report
    assert "to a loss it is 1.2 times as fast (1.1 - 1.2)" in report
    assert report.splitlines()[-1].endswith("1.18 times as fast to a loss as the program's allreduce.")
    row = plan_to_dict(found, choice)["methods"][0]
    assert row["to_a_loss"] == pytest.approx(1.275)
    assert (row["learns"]["grade"], row["learns"]["low"]) == ("less", 0.75)


def test_what_nobody_measured_or_what_diverged_is_not_above_what_was_measured_and_the_plan_says_so() -> None:
    methods: Any = [("allreduce", "exact", 0.0, 500_000), ("new", "compressed", 0.0, 9), ("wild", "compressed", 0.0, 0)]
    found = planned(*methods, learns={"new": Learning(), "wild": Learning(0.0, 0.0, 0.0, "", 3)})
    choice = choose(found, ALLOWED)
    assert [row.spec for row in choice.ranked] == ["allreduce", "new", "wild"]
    report = write_report(found, choice)
    assert "so they are ranked last: new. `unisono compare`" in report
    assert re.search(r"^wild .* diverged *$", report, re.MULTILINE)
    unknown = choose(planned(*methods[1:2], learns={"new": Learning()}), ALLOWED)
    assert "ranked by their steps alone: new." in " ".join(unknown.reasons)
    early = json.loads(json.dumps(found.to_dict()))
    for method in early["methods"]:
        del method["learning"]  # of a plan from before
    assert [row.spec for row in choose(Measured.from_dict(early), ALLOWED).ranked] == ["wild", "new", "allreduce"]


def test_the_bandwidth_at_which_the_order_changes_is_where_both_take_as_long() -> None:
    # dense: 2 MB; compressed: 0.5 s of work and 20 kB. As long at 1.98 MB = 0.5 s * rate: 31.68 Mbit/s.
    dense, small = step("allreduce", 0.0, 2_000_000), step("topk", 0.5, 20_000)
    network = Network(2, 1, Link(0.0, 8e6), fitted={"all_reduce": (0.0, 1e-6)})
    at = find_crossing(small, dense, network)
    assert at == pytest.approx(31.68e6, rel=1e-3)
    there = network.with_bandwidth(at)
    assert replay(dense, there).total == pytest.approx(replay(small, there).total, rel=1e-3)
    assert find_crossing(dense, small, network.with_bandwidth(80e6)) == pytest.approx(31.68e6, rel=1e-3)
    assert find_crossing(small, step("worse", 0.6, 20_000), network) is None
    # If dense learns 0.9 of it: 1 s + 2 MB / rate = 0.9 (1.5 s + 20 kB / rate), at 1.982 MB = 0.35 s * rate.
    assert find_crossing(small, dense, network, 0.9) == pytest.approx(45.3e6, rel=1e-3)
    found = planned(("allreduce", "exact", 0.0, 2_000_000), ("topk", "compressed", 0.5, 20_000))
    assert any("above 32 Mbit/s allreduce wins" in reason for reason in choose(found, ALLOWED).reasons)


def test_advice_names_the_batch_accumulation_and_learning_rate_where_messages_take_long() -> None:
    slow = choose(planned(("allreduce", "exact", 0.0, 1_000_000)), ALLOWED)  # 1 s of compute, 1 s of messages
    text = " ".join(slow.advice)
    assert "accumulate=9" in text  # 9 s of compute, 1 s of messages: a tenth
    assert "72 samples per worker" in text
    assert "0.1 would become 0.9" in text
    fast = choose(planned(("allreduce", "exact", 0.0, 1_000)), ALLOWED)
    assert "keep it" in " ".join(fast.advice)


def test_a_report_begins_with_what_is_missing_and_ends_with_what_to_do() -> None:
    found = planned(("allreduce", "exact", 0.0, 800_000), ("topk", "compressed", 0.1, 20_000))
    exact = Convergence("exact", "")
    found.methods += [MeasuredMethod(spec, exact, why="not measured: no time") for spec in ("fp16", "bf16")]
    found.methods.append(MeasuredMethod("torch:ddp", exact, None, 1 << 20, verified_s=2.5))
    report = write_report(found, choose(found, ALLOWED))
    assert re.search(r"^torch:ddp +1\.00 MiB +exact +2\.50 s$", report, re.MULTILINE)
    assert "\nfp16, bf16: not measured: no time\n" in report
    assert report.splitlines()[-1] == (
        "In short: use topk (--strategy 'topk'), 1.12 s per step; 1.61 times as fast to a loss as the program's "
        "allreduce; torch:ddp took 2.50 s."
    )
    found.unfinished = "the program ended after 3 optimizer steps"
    assert write_report(found, choose(found, ALLOWED)).startswith("Incomplete: the program ended after 3 optimizer")


def test_a_plan_says_where_one_worker_is_faster() -> None:
    found = planned(("allreduce", "exact", 0.0, 2_000_000))  # 3 s a step, of which one computes the two parts in 2 s
    last = write_report(found, choose(found, ALLOWED)).splitlines()[-1]
    assert last.startswith(
        "In short: one worker is faster for this model: what 2 do in 3.00 s, it does in 2.00 s; use -n 1"
    )


def test_a_plan_without_most_methods_asks_for_a_longer_budget() -> None:
    found = planned(("allreduce", "exact", 0.0, 2_000_000))
    late = [MeasuredMethod(spec, Convergence("exact", ""), why="the 25 s of --budget were over") for spec in ("a", "b")]
    found.methods += late
    last = write_report(found, choose(found, ALLOWED)).splitlines()[-1]
    assert last == (
        "In short: of the methods that were measured allreduce is the fastest, 3.00 s per step. 2 others were not: run "
        "this again with a longer --budget, in seconds, before you choose."
    )


def test_slow_steps_get_their_share_of_the_budget() -> None:
    """16 methods in 17 s, steps of half a second: one after the first, not two for some and none for others."""
    assert _count_steps(0.5, 17 / 16) == 1
    assert _count_steps(0.1, 17 / 16) == 8


# Methods say of themselves what they do to training ----------------------------------------------------------------


@pytest.mark.parametrize(("staleness", "grade"), [("0", "exact"), ("2", "other"), ("None", "other")])
def test_settings_may_decide_what_a_method_does_to_training(staleness: str, grade: str) -> None:
    assert describe_candidate(f"parameter_server(staleness={staleness})").convergence.grade == grade


@pytest.mark.parametrize(("name", "kind"), [(n, k) for k in ("strategy", "reducer") for n in names(k)])  # type: ignore[arg-type]
def test_what_a_method_proposes_can_be_built_and_is_its_own(name: str, kind: Any) -> None:
    facts = read_facts(name, kind)
    for spec in facts.plans or ():
        assert describe_candidate(spec).spec == spec
        assert spec.partition("(")[0] == name
    assert facts.convergence is not None or not facts.plans


def test_a_method_that_does_not_say_what_it_does_to_training_changes_it(tmp_path: Path) -> None:
    source = Path(read_source(fp16)).read_text()
    plain = re.sub(r"^FACTS = .*?\n\)\n", "", source, flags=re.DOTALL | re.MULTILINE).replace("fp16", "mine16")
    (tmp_path / "mine16.py").write_text(plain)
    with extend(reducers=tmp_path):
        assert describe_candidate("allreduce(reducer=mine16)").convergence.grade == "other"
        assert "mine16" not in [candidate.spec for candidate in find_candidates()]
    assert describe_candidate("allreduce(reducer=fp16)").convergence.grade == "rounded"


@pytest.mark.parametrize(
    ("more", "grade"),
    [("step_ahead=True", "exact"), ("moments=bf16", "rounded"), ("delayed_update=True", "other"), ("defer=4", "other")],
)
def test_steps_off_the_device_that_come_late_are_no_exact_training(more: str, grade: str) -> None:
    assert describe_candidate(f"zero(optimizer_on=cpu, {more})").convergence.grade == grade


def test_the_effect_of_a_method_around_others_is_that_of_the_one_with_the_greatest() -> None:
    assert describe_candidate("allreduce(reducer=warmup(topk(k=0.1), steps=2))").convergence.grade == "compressed"
    assert describe_candidate("local_sgd(reducer=fp16)").convergence.grade == "other"
    assert describe_candidate("allreduce").convergence.grade == "exact"


def test_candidates_come_in_the_order_of_their_promise() -> None:
    found = [candidate.spec for candidate in find_candidates()]
    assert found[0] == "allreduce"
    for promising in ("powersgd(rank=1)", "topk(k=0.01)", "fp16"):
        assert found.index(promising) < found.index("nuqsgd") < found.index("gossip")


def test_local_steps_are_measured_with_an_exchange_in_each() -> None:
    candidate = describe_candidate("diloco(every=50, delay=5)")
    measuring: Any = candidate.for_measuring()
    assert (measuring.every, measuring.delay) == (1, 0)
    assert (candidate.pattern.every, candidate.pattern.kind) == (50, "delayed")


# The command ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["-n", "2:4", "{script}"], "fixed number of workers"),
        (["-n", "1", "{script}"], "from 2 up"),
        (["-n", "2", "--methods", "topkk", "{script}"], "topkk"),
        (["-n", "2", "--allow", "fast", "{script}"], "'fast'"),
        (["-n", "2"], "no program"),
        (["-n", "2", "--dry", "{script}"], "--dry goes with `unisono run`"),
        (["-n", "2", "--run-dir", "x", "{script}"], "--run-dir goes with `unisono run`"),
    ],
)
def test_a_plan_that_cannot_be_made_says_why(
    arguments: list[str], said: str, tmp_path: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "train.py"
    script.write_text("")
    with pytest.raises(SystemExit) as ended:
        main(["plan", *(word.format(script=script) for word in arguments)])
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


def test_compute_of_a_few_steps_is_steadier_with_that_of_other_methods_and_a_clear_difference_stays() -> None:
    generator = random.Random(0)
    truths = [0.1] * 11 + [0.15]
    before, after, kept = [], [], []
    for _ in range(50):
        steps = [tuple(generator.gauss(truth, 0.008) for _ in range(6)) for truth in truths]
        measured = [Anatomy(f"m{i}", 2, median(map(max, s[:3], s[3:])), samples_s=s) for i, s in enumerate(steps)]
        steadied = steady(measured)
        middle = median(each.compute_s for each in measured)
        before += [(each.compute_s - middle) ** 2 for each in measured[:-1]]
        after += [(each.compute_s - middle) ** 2 for each in steadied[:-1]]
        kept.append(steadied[-1].compute_s / measured[-1].compute_s)
    assert sum(after) < 0.3 * sum(before)
    assert median(kept) == 1.0


def test_jobs_move_with_compute() -> None:
    job = Job(0.05, 0.01, (Operation("all_reduce", 8),), due_s=0.09)
    odd = Anatomy("odd", 1, 0.09, (job,), samples_s=(0.07, 0.09, 0.11))
    others = [Anatomy(f"m{i}", 1, 0.1, samples_s=(0.08, 0.1, 0.12)) for i in range(3)]
    found = steady([odd, *others])[0]
    assert found.compute_s == pytest.approx(0.1)
    assert found.jobs[0] == Job(pytest.approx(0.05 / 0.9), 0.01, job.operations, due_s=pytest.approx(0.1))
    assert steady(others) == others  # three say nothing
