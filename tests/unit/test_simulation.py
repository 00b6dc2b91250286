"""Simulated scales: steps by hand, what must only grow or fall, plans carried over, the report and the command."""

from __future__ import annotations

import inspect
import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from unisono.cli.command_line import main
from unisono.methods.buckets import Bucket
from unisono.methods.exchange.dry_run import Cost
from unisono.methods.facts import Convergence
from unisono.methods.spec import build, extend
from unisono.methods.strategies.local_sgd import local_sgd
from unisono.predict.costs import Anatomy, Job, Link, Network, Operation
from unisono.predict.planner.candidates import describe_candidate
from unisono.predict.planner.measured import Measured, MeasuredMethod
from unisono.predict.simulation import methods
from unisono.predict.simulation.cluster import Cluster, Failures
from unisono.predict.simulation.methods import DryRun, Method, Workload, make_method
from unisono.predict.simulation.plan_file import compare_with_measured, make_plan
from unisono.predict.simulation.report import write_report
from unisono.predict.simulation.steps import Outcome, simulate_method
from unisono.predict.simulation.stragglers import Stragglers
from unisono.predict.simulation.study import Study, study

LINK = Link(latency_s=0.001, bits_per_s=8e6)  # 1 MB/s
FASTER = Link(0.001, 8e8)
SMALL = Workload(80_000, 0.1)  # 8 matrices of 100 x 100: 320 kB in one bucket
SPREAD = Stragglers("lognormal", 0.2)


def run(spec: str, workers: int, *, workload: Workload = SMALL, steps: int = 60, **cluster: object) -> Outcome:
    made = Cluster(**{"between": LINK, **cluster})  # type: ignore[arg-type]
    return simulate_method(make_method(spec, workload), made, workers, steps=steps)


# Steps by hand ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [2, 8, 1000])
def test_a_ring_of_even_workers_takes_what_it_takes_on_paper(workers: int) -> None:
    step = run("allreduce(overlap=False)", workers)
    nbytes = sum(4 * math.prod(shape) for bucket in SMALL.buckets for shape in bucket)
    ring = 2 * (workers - 1) / workers * nbytes / 1e6
    messages = len(SMALL.buckets) * (1 + 2 * (workers - 1))
    padding = 8 * 64 / 1e6 * 2  # tensors start on cache lines
    assert step.step_s == pytest.approx(0.1 + ring + messages * 0.001, abs=padding)
    assert step.speed_up == pytest.approx(workers * 0.1 / step.step_s)
    assert (step.low_s, step.high_s, step.waiting_s) == pytest.approx((step.step_s, step.step_s, 0.0))


def test_what_is_hidden_behind_backward_costs_nothing_and_one_worker_pays_for_nothing() -> None:
    fast = Link(0.0, 1e15)
    for spec in ("allreduce", "local_sgd(every=4)", "gossip", "zero(stage=2)", "async_average"):
        assert run(spec, 8, between=fast, inside=fast).step_s == pytest.approx(0.1)
        assert run(spec, 1).speed_up == pytest.approx(1.0)


def test_local_windows_pay_for_an_exchange_once() -> None:
    every, once = run("local_sgd(every=10)", 8), run("allreduce(overlap=False)", 8)
    assert every.step_s - 0.1 == pytest.approx((once.step_s - 0.1) / 10)


def test_gossip_takes_the_longer_of_compute_and_two_models_on_the_link() -> None:
    assert run("gossip", 16).step_s == pytest.approx(0.001 + 2 * 0.32)
    assert run("gossip(exponential)", 16).step_s == pytest.approx(0.001 + 0.32)
    assert run("gossip(bits=8)", 16).step_s == pytest.approx(0.001 + 2 * 0.08)


def test_servers_are_the_limit_of_many_workers_and_more_servers_move_it() -> None:
    one, four = (run(f"parameter_server(servers={n}, staleness=None)", 256).step_s for n in (1, 4))
    assert one == pytest.approx(256 * 0.32, rel=0.01)
    assert four == pytest.approx(256 * 0.32 / 4, rel=0.01)


def test_workers_that_share_cores_slow_each_other() -> None:
    fast = Link(0.0, 1e15)
    alike = {"between": fast, "inside": fast, "per_host": 8}
    assert run("allreduce", 8, cores=2, **alike).step_s == pytest.approx(0.4)
    assert run("allreduce", 8, cores=8, **alike).step_s == pytest.approx(0.1)
    assert run("allreduce", 8, cores=2, **alike).speed_up == pytest.approx(2.0)


def test_an_oversubscribed_rack_slows_what_all_send_to_all_and_no_ring() -> None:
    racks = {"rack_hosts": 4, "oversubscription": 4.0}
    assert run("allreduce", 32, **racks).step_s == pytest.approx(run("allreduce", 32).step_s)
    plain, slower = (
        Cluster(between=LINK, **kind).network(32).seconds(Operation("all_to_all", 10**6))  # type: ignore[arg-type]
        for kind in ({}, racks)
    )
    assert slower - 0.002 == pytest.approx((plain - 0.002) * 4 * 28 / 31)
    assert Cluster(between=LINK, rack_hosts=4, oversubscription=4.0).network(4).fitted == {}


def test_who_waits_for_nobody_is_told_how_often_models_meet() -> None:
    assert run("async_average(every_s=0.5)", 1000).note == "models are averaged every 3.14 s"  # 0.5 + 2 * 0.32 + 2


def test_a_cluster_that_fails_all_the_time_is_reported_so() -> None:
    found = study([make_method("allreduce", SMALL)], Cluster(failures=Failures(60.0, "restart")), [64], steps=5)
    assert "failures leave no time to train" in write_report(found, "a model")


def test_measured_links_between_hosts_say_nothing_of_the_memory_of_one() -> None:
    """Two workers a host meet in memory that takes no time, then one of each host as measured."""
    measured = Network(4, 1, LINK, fitted={"all_reduce": (0.007, 1.5e-6)})  # as the formula has it
    network = Cluster(per_host=2, inside=Link(0.0, 1e18)).measured_as(measured).network(8)
    assert network.seconds(Operation("all_reduce", 10**6)) == pytest.approx(1.507)


def test_memory_measured_by_two_ranks_is_slower_where_four_share_their_cores() -> None:
    points = [(1000.0, 0.001), (10.0**6, 0.1)]
    measured = Network(2, 2, LINK, LINK, fitted={"all_reduce": (0.001, 1e-7)}, curves={"all_reduce": points})
    cluster = Cluster(per_host=4, cores=2).measured_as(measured)
    for nbytes in (500, 500_000):
        two, four = (cluster.network(n).seconds(Operation("all_reduce", nbytes)) for n in (2, 4))
        assert four == pytest.approx(2 * two)


# What must only grow or fall -------------------------------------------------------------------------------------

METHODS = ["allreduce", "local_sgd(every=4)", "gossip", "parameter_server(servers=2, staleness=2)", "zero(stage=3)"]


@pytest.mark.parametrize("spec", METHODS)
def test_better_machines_are_never_slower(spec: str) -> None:
    base = Cluster(per_host=2, between=FASTER, stragglers=SPREAD)
    method = make_method(spec, Workload(80_000, 0.1, 2))

    def step(cluster: Cluster) -> float:
        return simulate_method(method, cluster, 32, steps=200).step_s

    now = simulate_method(method, base, 32, steps=200)
    assert step(base.with_links(rate=2.0)) <= now.step_s * 1.0001
    assert step(base.with_links(latency=0.5)) <= now.step_s * 1.0001
    assert step(replace(base, stragglers=Stragglers())) <= now.step_s
    assert step(replace(base, cores=1)) > now.step_s
    slow = replace(base, stragglers=Stragglers("lognormal", 0.2, slow_share=0.1, slow_times=3.0))
    assert step(slow) > now.step_s
    failing = replace(base, failures=Failures(1e5))
    assert simulate_method(method, failing, 32, steps=200).speed_up < now.speed_up
    assert now.efficiency <= 1.02
    assert now.low_s <= now.step_s <= now.high_s


@pytest.mark.parametrize("spec", ["allreduce", *METHODS[1:4]])
def test_the_same_seed_gives_the_same_numbers_and_another_one_others(spec: str) -> None:
    cluster = Cluster(between=FASTER, stragglers=SPREAD, failures=Failures(1e6))
    method = make_method(spec, SMALL)
    first, again, other = (simulate_method(method, cluster, 16, steps=50, seed=seed) for seed in (3, 3, 4))
    assert first == again
    assert first.step_s != other.step_s


@pytest.mark.parametrize("spec", METHODS)
def test_ten_thousand_workers_can_be_simulated(spec: str) -> None:
    outcome = run(spec, 10_000, stragglers=SPREAD, steps=5)
    assert 0 < outcome.speed_up < 10_000


# What a reducer sends --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", ["dense", "bf16", "topk(k=0.1)", "powersgd(rank=2)", "bytegrad", "nuqsgd", "signsgd"])
def test_what_many_ranks_send_is_what_the_method_says_that_it_sends(spec: str) -> None:
    reducer, shapes, ranks = build(spec, "reducer"), ((512, 512), (1024, 256), (64,)), 100
    found = DryRun(reducer, shapes).at(ranks)
    shares = {"all_reduce": 2 * 99 / 100, "all_to_all": 99 / 100, "all_gather": 99.0}
    sent = sum(shares[o.op] * o.nbytes for o in found.operations if o.op != "exchange")  # of shapes: not counted
    bucket = Bucket(0, [(str(s), torch.empty(s)) for s in shapes], lambda n, dtype: torch.zeros(n, dtype=dtype))
    told = reducer.sends(bucket, ranks) if reducer.sends else 2 * 99 / 100 * bucket.nbytes
    assert sent == pytest.approx(told, rel=0.05)


@pytest.mark.parametrize("spec", ["nuqsgd({})", "qsgd({})", "error_feedback(nuqsgd({}))"])
@pytest.mark.parametrize("ranks", [3, 4, 7])
def test_codes_whose_length_the_data_decide_are_sent_as_often_as_those_of_fixed_length(spec: str, ranks: int) -> None:
    """The last share of a line is shorter than the others: 60,000 numbers in 4 shares, 100 in 4 of 64."""
    for shape in ((300, 200), (100,)):
        fixed, short = (
            DryRun(build(spec.format(option), "reducer"), (shape,)).at(ranks)
            for option in ("elias=False", "elias=True")
        )
        moved = [operation for operation in short.operations if operation.op != "exchange"]
        assert [operation.op for operation in moved] == [operation.op for operation in fixed.operations]
        assert all(operation.nbytes > 0 for operation in moved)


def test_bytes_of_many_ranks_go_on_as_those_of_few() -> None:
    """Tried with 8 and 16, and for real with 64: shares of a rank shrink, shapes of all ranks' parts grow."""
    for spec in ("bytegrad", "nuqsgd", "bf16", "topk(k=0.1)"):
        reducer = build(spec, "reducer")
        found = DryRun(reducer, ((256, 256),)).at(64).operations
        real = methods._run(reducer, ((256, 256),), 64, 1).operations
        assert [o.op for o in found] == [o.op for o in real]
        assert [o.nbytes for o in found] == pytest.approx([o.nbytes for o in real], rel=0.2)


def test_work_grows_with_the_ranks_only_where_all_of_their_bytes_come(monkeypatch: pytest.MonkeyPatch) -> None:
    real = methods._run

    def measure(reducer: object, shapes: object, ranks: int, per_host: int) -> Cost:
        return replace(real(reducer, shapes, ranks, per_host), work_s=1.0 + 0.5 * ranks)  # type: ignore[arg-type]

    monkeypatch.setattr(methods, "_run", measure)
    shapes = ((64, 64),)
    assert DryRun(build("topk(k=0.1)", "reducer"), shapes).at(100).work_s == pytest.approx(51.0)
    assert DryRun(build("powersgd(rank=2)", "reducer"), shapes).at(100).work_s == pytest.approx(5.0)


def test_two_levels_send_across_hosts_what_their_number_asks_for() -> None:
    run = DryRun(build("hierarchical(bf16)", "reducer"), ((64, 64),), per_host=4)
    for ranks in (8, 400):
        kinds = [(o.op, o.among) for o in run.at(ranks).operations]
        assert ("all_reduce", "inside") in kinds
        assert ("all_reduce", "across") in kinds
        across = next(o for o in run.at(ranks).operations if o.among == "across" and o.nbytes > 100)
        assert across.nbytes == 2 * 64 * 64


@pytest.mark.parametrize(
    ("spec", "style", "grade"),
    [
        ("allreduce", "synchronous", "exact"),
        ("topk(k=0.01)", "synchronous", "compressed"),
        ("gossip('all')", "synchronous", "other"),
        ("gossip", "neighbours", "other"),
        ("diloco(every=8, delay=2)", "windows", "other"),
        ("parameter_server", "servers", "exact"),
        ("parameter_server(reducer=bf16)", "servers", "rounded"),
        ("parameter_server(staleness=2)", "servers", "other"),
        ("hogwild", "alone", "other"),
        ("zero(stage=3)", "synchronous", "exact"),
    ],
)
def test_who_waits_for_whom_is_read_from_the_spec(spec: str, style: str, grade: str) -> None:
    method = make_method(spec, SMALL)
    assert (method.pattern.style, method.grade) == (style, grade)


def test_a_method_of_ones_own_is_simulated_from_what_it_says_of_itself(tmp_path: Path) -> None:
    source = Path(inspect.getfile(local_sgd)).read_text()
    (tmp_path / "seldom.py").write_text(source.replace("class local_sgd(", "class seldom("))
    with extend(strategies=tmp_path):
        seldom, known = run("seldom(every=10)", 8), run("local_sgd(every=10)", 8)
        assert describe_candidate("seldom(every=10)").pattern.in_every_window == {"every": 1, "start": 0}
    assert replace(seldom, spec=known.spec) == known


# Plans -----------------------------------------------------------------------------------------------------------


def plan_of(spec: str, ranks: int, *operations: Operation, work_s: float = 0.0, compute_s: float = 1.0) -> Measured:
    step = Anatomy(spec, ranks, compute_s, (Job(compute_s, work_s, operations, compute_s),))
    measured = Measured(ranks, [f"host{r}" for r in range(ranks)], spec, 80_000, 320_000, compute_s=compute_s)
    measured.network = Network(ranks, 1, Link(0.001, 8e6), fitted={"all_reduce": (0.007, 3e-6)})
    measured.methods = [MeasuredMethod(spec, Convergence("exact", ""), step)]
    return Measured.from_dict(json.loads(json.dumps(measured.to_dict())))


def test_a_plan_made_with_four_workers_tells_the_step_of_two_and_eight() -> None:
    """The measured all-reduce takes twice the bytes of a ring at 1 MB/s: so it does with more and fewer workers."""
    plan = make_plan(plan_of("allreduce", 4, Operation("all_reduce", 10**6)))
    by_hand = {n: 1.0 + 0.001 * (1 + 2 * (n - 1)) + 2 * 2 * (n - 1) / n for n in (2, 4, 8)}
    rows = compare_with_measured(plan, {n: {"allreduce": seconds} for n, seconds in by_hand.items()})
    assert [row.workers for row in rows] == [2, 4, 8]
    assert [row.error for row in rows] == pytest.approx([0.0, 0.0, 0.0], abs=1e-9)


def test_cores_shared_at_the_plan_are_taken_out_and_put_in_again() -> None:
    """Four workers on 2 cores took 1 s: alone they take 0.5 s, and eight take 2 s."""
    plan = make_plan(plan_of("allreduce", 4))
    measured = {n: {"allreduce": seconds} for n, seconds in ((2, 0.5), (4, 1.0), (8, 2.0))}
    rows = compare_with_measured(plan, measured, cores=2, one_machine=True)
    assert [row.error for row in rows] == pytest.approx([0.0, 0.0, 0.0])
    with pytest.raises(ValueError, match="was not measured in the plan"):
        compare_with_measured(plan, {2: {"bf16": 1.0}})


def test_what_a_method_sends_grows_as_its_code_says() -> None:
    """Two ranks of qsgd gather all; more scatter parts and gather their means."""
    two = make_plan(plan_of("qsgd", 2, Operation("all_gather", 160_000)))
    (method,) = two.make_methods(["qsgd"], Cluster())
    assert [o.op for o in method.at(2).operations] == ["all_gather"]
    later = method.at(100).operations
    assert [o.op for o in later] == ["all_to_all", "all_gather"]  # and no shapes ahead: they are known
    assert [o.nbytes for o in later] == pytest.approx([160_000, 1600], rel=0.3)
    gathered = make_plan(plan_of("topk(k=0.01)", 2, Operation("all_gather", 6400)))
    (topk,) = gathered.make_methods([], Cluster())
    assert topk.at(1000).operations == [Operation("all_gather", 6400)]
    (other,) = gathered.make_methods(["bf16"], Cluster())
    assert other.note.startswith("not measured in the plan")
    split = make_plan(plan_of("zero(stage=2)", 4, Operation("reduce_scatter", 800), Operation("all_gather", 200)))
    (zero,) = split.make_methods([], Cluster())
    assert [o.nbytes for o in zero.at(100).operations] == [800, 8]


def test_stragglers_are_drawn_from_what_the_plan_measured() -> None:
    measured = plan_of("allreduce", 2)
    step = measured.methods[0].anatomy
    assert step is not None
    measured.methods = [replace(measured.methods[0], anatomy=replace(step, samples_s=(0.8, 1.0, 1.2, 1.0)))]
    plan = make_plan(measured)
    assert plan.samples == pytest.approx([0.8, 1.0, 1.2, 1.0])
    (row,) = compare_with_measured(plan, {64: {"allreduce": 1.0}}, steps=50)
    assert row.simulated_s == pytest.approx(1.2, rel=0.01)  # of 64 workers one is nearly always the slowest kind


# The study -------------------------------------------------------------------------------------------------------


def synthetic(spec: str, steps: dict[int, float]) -> Method:
    """A method with these step times, by number of workers."""
    return replace(make_method(spec, SMALL), at=lambda n: Anatomy(spec, n, steps[n]), alone_s=steps[1])


def test_a_method_stops_scaling_where_no_doubling_gains_a_tenth() -> None:
    # throughput 1, 2, 1.5 (a dip between host and network), 6, 8, 8.4: stops at 16
    through = {1: 1.0, 2: 2.0, 4: 1.5, 8: 6.0, 16: 8.0, 32: 8.4, 64: 8.5}
    grows = dict.fromkeys(through, 1.0)
    methods = [
        synthetic("allreduce", {n: n / x for n, x in through.items()}),
        synthetic("bf16", grows),
    ]
    found = study(methods, Cluster(between=LINK), [8, 32], steps=10)
    assert found.stops_at("allreduce") == 16
    assert found.stops_at("bf16") is None
    best = found.best(32)
    assert best is not None
    assert best.spec == "bf16"
    exact = found.best(32, ("exact",))
    assert exact is not None
    assert exact.spec == "allreduce"


@pytest.mark.parametrize(
    ("cluster", "compute_s", "what"),
    [
        (Cluster(between=Link(0.0, 8e6)), 0.01, "links between hosts twice as fast"),
        (Cluster(between=Link(0.1, 1e12)), 0.01, "half the latency between hosts"),
        (Cluster(between=Link(0.0, 1e12), stragglers=Stragglers("lognormal", 1.0)), 0.1, "workers that are all alike"),
        (
            Cluster(between=Link(0.0, 1e14), failures=Failures(2e4, "restart", checkpoint_every_s=600.0)),
            1e-9,
            "hosts that fail half as often",
        ),
    ],
)
def test_what_to_buy_next_is_what_holds_it_up(cluster: Cluster, compute_s: float, what: str) -> None:
    method = make_method("allreduce(overlap=False)", Workload(80_000, compute_s))
    _, bought = study([method], cluster, [64], steps=100).purchases[64]
    best = max((p for p in bought if p.what != "twice as many workers"), key=lambda p: p.gain)
    assert best.what == what
    assert best.gain > 1.2


def make_study(**cluster: object) -> Study:
    made = Cluster(**{"between": LINK, "per_host": 2, **cluster})  # type: ignore[arg-type]
    methods = [make_method(s, Workload(80_000, 0.1, 2)) for s in ("allreduce", "bf16", "gossip", "hogwild")]
    return study(methods, made, [2, 8, 32], steps=30)


def test_the_report_says_what_is_best_what_stops_and_what_cannot_run() -> None:
    text = write_report(make_study(failures=Failures(1e6, "restart")), "a model")
    assert text.startswith("a model\n2 workers per host")
    assert "the best that trains exactly as one process: allreduce (2 to 32)" in text
    assert "hogwild, 32 workers: needs all workers on one host, which has 2" in text
    assert "what to buy next" in text
    assert "a checkpoint every" in text
    assert "stops scaling at" in text


# The command -----------------------------------------------------------------------------------------------------

STEP = ["simulate", "--parameters", "80k", "--compute", "0.1s", "--workers", "4,16", "--steps", "20"]


def test_the_command_writes_numbers_and_a_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    file, picture = tmp_path / "out.json", tmp_path / "out.png"
    options = ["--strategies", "allreduce, parameter_server(servers=2, staleness=4)", "--net", "1gbit,0.1ms"]
    assert main([*STEP, *options, "--json", str(file), "--plot", str(picture)]) == 0
    assert "speed-up over one worker, by method" in capsys.readouterr().out
    found = json.loads(file.read_text())
    assert [m["spec"] for m in found["methods"]] == ["allreduce", "parameter_server(servers=2, staleness=4)"]
    assert [o["workers"] for o in found["methods"][0]["outcomes"]] == [1, 2, 4, 8, 16]
    assert found["cluster"]["between"] == {"latency_s": 1e-4, "bits_per_s": 1e9}
    assert picture.read_bytes()[:4] == b"\x89PNG"


def test_the_command_takes_a_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "plan.json"
    plan = plan_of("allreduce", 4, Operation("all_reduce", 10**6))
    file.write_text(json.dumps({"first": "allreduce", "measured": plan.to_dict()}))
    assert main(["simulate", "--plan", str(file), "--workers", "8,64", "--json", "-"]) == 0
    found = json.loads(capsys.readouterr().out)
    by_workers = {o["workers"]: o["step_s"] for o in found["methods"][0]["outcomes"]}
    assert by_workers[8] == pytest.approx(1 + 0.015 + 2 * 2 * 7 / 8)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--workers", "4", "--workers-per-host", "8"], "fewer than the 8 of one host"),
        (["--strategies", "alreduce"], "did you mean 'allreduce'"),
        (["--net", "10gb"], "bits or bytes"),
        (["--net", "5ms"], "without a rate"),
        (["--workers", "0"], "expected counts from 1"),
        (["--compute", "0s"], "expected a time above 0"),
        (["--compute", "3"], "with its unit"),
        (["--parameters", "many"], "25M"),
        (["--oversubscription", "4"], "--rack 16"),
        (["--oversubscription", "0.5", "--rack", "4"], "at least 1"),
        (["--slow", "200%x3"], "below 100%"),
        (["--slow", "1%"], "such as 1%x3"),
        (["--mtbf", "soon"], "30d"),
        (["--plan", "plan.json"], "leave out --parameters"),
        (["--plot", "curve.txt"], ".png"),
        (["--compressors", "0"], "above 0"),
        (["--seed", "-1"], "from 0 up"),
        (["--json", "no/such/folder/out.json"], "does not exist"),
        (["--plot", "no/such/folder/out.png"], "does not exist"),
    ],
)
def test_bad_input_is_refused_with_what_to_do(
    options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main([*STEP, *options])
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def test_without_a_step_or_with_a_plan_that_is_none_it_says_what_to_give(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "other.json").write_text("{}")
    one_host = plan_of("allreduce", 2)
    one_host.hosts, one_host.network = ["a", "a"], Network(2, 2, LINK)
    (tmp_path / "one.json").write_text(json.dumps({"measured": one_host.to_dict()}))
    for options, message in (
        ([], "--plan plan.json, or --parameters 25M --compute 0.1s"),
        (["--plan", str(tmp_path / "none.json")], "cannot read"),
        (["--plan", str(tmp_path / "other.json")], "write it again"),
        (["--plan", str(tmp_path / "one.json")], "says nothing of links between hosts"),
    ):
        with pytest.raises(SystemExit):
            main(["simulate", *options])
        assert message in " ".join(capsys.readouterr().err.split())
