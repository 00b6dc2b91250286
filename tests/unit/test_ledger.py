"""The ledger: where a step's time went, what was sent, and every rank's account on one clock."""

from __future__ import annotations

import json
import math
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from unisono import World, run_threads
from unisono.world import ledger
from unisono.world.ledger import Ledger, Record
from unisono.world.timeline import Report
from unisono.world.transports.sockets import SocketTransport


class Clock:
    """A clock that stands where it is put."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def book() -> Ledger:
    return Ledger(clock=Clock())


def collective(book: Ledger, start: float, last: float, end: float, nbytes: int = 100, sequence: int = 0) -> None:
    book.close_record(Record("all_reduce", "gradients", nbytes, "world", sequence, 0, start, last, end))


def step_at(book: Ledger, now: float, owner: object | None = None) -> None:
    book.clock.now = now  # type: ignore[attr-defined]
    book.step(owner)


def parts(row: ledger.Row) -> dict[str, float]:
    names = ("wall", "compute", "communication", "waiting", "data", "hidden")
    return {name: round(getattr(row, name), 9) for name in names}


# One step, by hand -------------------------------------------------------------------------------------------


def test_the_time_in_which_the_world_is_formed_anew_is_waiting(book: Ledger) -> None:
    collective(book, 102.0, 102.0, 103.0)  # of those that form it
    book.close_span("blocked", 102.0, 103.0)
    book.close_span("forming", 101.0, 106.0)
    step_at(book, 110.0)
    found = parts(book.rows[0])
    assert (found["waiting"], found["communication"], found["compute"]) == (5.0, 0.0, 5.0)


def test_a_step_is_parted_into_compute_communication_waiting_and_data(book: Ledger) -> None:
    book.close_span("data", 100.0, 101.0)
    collective(book, 103.0, 105.0, 106.0)  # arrived at 103, the last rank at 105, done at 106
    book.close_span("blocked", 104.0, 106.0)  # the program stood still from 104 on
    step_at(book, 110.0)
    assert parts(book.rows[0]) == {
        "wall": 10.0,
        "compute": 7.0,  # what is left: also the second behind which the exchange began
        "communication": 1.0,
        "waiting": 1.0,
        "data": 1.0,
        "hidden": 0.0,
    }
    assert (book.rows[0].bytes_sent, book.rows[0].collectives, book.step_count) == (100, 1, 1)


def test_communication_behind_compute_is_hidden(book: Ledger) -> None:
    collective(book, 101.0, 101.0, 104.0)
    book.close_span("blocked", 103.5, 104.0)
    step_at(book, 105.0)
    assert parts(book.rows[0]) == {
        "wall": 5.0,
        "compute": 4.5,
        "communication": 0.5,
        "waiting": 0.0,
        "data": 0.0,
        "hidden": 2.5,
    }


def test_spans_that_hold_each_other_or_pass_the_border_are_counted_once(book: Ledger) -> None:
    collective(book, 102.0, 103.0, 104.0)
    collective(book, 102.0, 103.0, 104.0, sequence=1)
    book.close_span("blocked", 102.0, 104.0)
    book.close_span("blocked", 102.5, 104.0)  # a wait inside a wait
    book.close_span("data", 99.0, 102.5)  # began before the step, and reaches into a wait
    step_at(book, 106.0)
    row = book.rows[0]
    assert parts(row) == {
        "wall": 6.0,
        "compute": 2.0,
        "communication": 1.0,
        "waiting": 1.0,
        "data": 2.0,
        "hidden": 0.0,
    }


def test_an_unknown_last_arrival_counts_as_communication_until_it_is_settled(book: Ledger) -> None:
    collective(book, 101.0, math.nan, 104.0, sequence=7)
    book.close_span("blocked", 101.0, 104.0)
    step_at(book, 105.0)
    assert (book.rows[0].communication, book.rows[0].waiting) == (3.0, 0.0)
    book.fill_in_arrivals({("world", 7): 103.0, ("world", 8): 1.0, ("other", 7): 104.0})
    assert (book.rows[0].communication, book.rows[0].waiting) == (1.0, 2.0)
    book.fill_in_arrivals({("world", 7): 101.0})  # known now: it stays
    assert book.rows[0].waiting == 2.0


def test_settling_leaves_out_what_came_before_the_first_step(book: Ledger) -> None:
    collective(book, 100.0, math.nan, 101.0, nbytes=5000)
    book.clock.now = 102.0  # type: ignore[attr-defined]
    book.restart()
    collective(book, 103.0, math.nan, 104.0, sequence=1)
    step_at(book, 105.0)
    book.fill_in_arrivals({("world", 0): 100.5, ("world", 1): 103.5})
    assert (book.rows[0].start, book.rows[0].bytes_sent, book.rows[0].collectives) == (102.0, 100, 1)
    assert book.by_tag() == {"gradients": 5100}


def test_the_first_replica_counts_the_steps_until_it_is_gone(book: Ledger) -> None:
    class Replica:
        pass

    first, second = Replica(), Replica()
    for now, owner in ((101.0, first), (101.5, second), (102.0, first), (102.5, second)):
        step_at(book, now, owner)
    assert (book.step_count, [r.wall for r in book.rows]) == (2, [1.0, 1.0])
    del first, owner
    step_at(book, 103.0, second)
    assert book.step_count == 3
    book.resume(40)
    step_at(book, 104.0, second)
    assert [r.step for r in book.rows] == [0, 1, 2, 40]


def test_memory_is_bounded_and_totals_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger, "KEPT", 10)
    book = Ledger(clock=Clock())
    for i in range(50):
        now = 101.0 + i
        for k in range(3):
            collective(book, now - 0.5, math.nan, now - 0.4, nbytes=7, sequence=3 * i + k)
        book.close_span("blocked", now - 0.5, now - 0.4)
        step_at(book, now)
    assert [len(kept) for kept in (book.rows, book.records, book.spans)] == [10, 10, 10]
    totals = book.totals()
    assert (totals.steps, totals.bytes_sent, totals.collectives) == (50, 1050, 150)
    assert totals.wall == pytest.approx(50)
    assert totals.communication == pytest.approx(5.0)
    assert (book.totals(last=4).steps, book.totals(last=0).steps) == (4, 0)
    assert book.by_tag() == {"gradients": 1050}, "all of them, not only those kept"
    assert (book.sent().collectives, book.sent().bytes_sent) == (150, 1050)
    book.fill_in_arrivals({("world", n): 1e9 for n in range(150)})
    assert book.totals().bytes_sent == 1050, "steps whose records were dropped are left as they were"
    assert book.totals().waiting == pytest.approx(0.3), "of the three steps whose records are all there"
    assert book.totals().communication == pytest.approx(4.7)
    for i in range(100):  # a program that never steps
        collective(book, 0.0, 0.0, 0.0, sequence=i)
        book.close_span("data", 0.0, 0.0)
    assert len(book._fresh) == len(book._fresh_spans) == 10


def test_after_ten_thousand_steps_nothing_more_is_kept() -> None:
    """The bound of docs/ledger.md: what is kept after 10,000 steps and after 20,000 is the same."""
    book, kept = Ledger(clock=Clock()), []
    for i in range(20_000):
        now = 101.0 + i
        collective(book, now - 0.5, now - 0.4, now - 0.3, nbytes=7, sequence=i)
        book.close_span("blocked", now - 0.5, now - 0.3)
        book.event("decision", number=i)
        step_at(book, now)
        if i in (9_999, 19_999):
            kept.append([len(x) for x in (book.rows, book.records, book.spans, book.events, book.by_tag())])
    assert kept[0] == kept[1]
    assert max(kept[1]) <= 10_000
    assert (book.totals().steps, book.sent().bytes_sent) == (20_000, 140_000)
    assert f"{ledger.KEPT:,}" in (Path(__file__).parents[2] / "docs" / "ledger.md").read_text()


def test_a_difference_of_totals_is_exact_beyond_what_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger, "KEPT", 2)
    book = Ledger(clock=Clock())
    for i in range(8):
        if i == 3:
            before = book.totals()
        book.close_span("data", 100.0 + i, 100.25 + i)
        step_at(book, 101.0 + i)
    since = book.totals() - before
    assert (since.steps, since.wall, since.data, since.compute) == (5, 5.0, 1.25, 3.75)
    assert book.totals(last=5).steps == 2, "only those that are kept"


def test_tags_without_end_are_summed_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger, "KEPT_TAGS", 2)
    book = Ledger(clock=Clock())
    for i in range(6):
        book.close_record(Record("send", f"step {i}", 10, "world", i))
    assert book.by_tag() == {"step 0": 10, "step 1": 10, ledger.OTHER_TAGS: 40}


def test_table_and_json_lines(book: Ledger, tmp_path: Path) -> None:
    collective(book, 101.0, math.nan, 104.0, nbytes=2_000_000)
    book.close_span("blocked", 101.0, 104.0)
    step_at(book, 105.0)
    head, line = book.table().splitlines()
    assert head.split() == ["step", "wall", "compute", "comm", "waiting", "data", "hidden", "MB", "sent"]
    assert line.split() == ["0", "5000.00", "2000.00", "3000.00", "0.00", "0.00", "0.00", "2.000"]
    book.write_jsonl(tmp_path / "ledger.jsonl")
    rows = [json.loads(line) for line in (tmp_path / "ledger.jsonl").read_text().splitlines()]
    assert [r["type"] for r in rows] == ["step", "collective", "span"]
    assert rows[0]["wall"] == 5.0
    assert rows[1]["last"] is None
    assert rows[1]["tag"] == "gradients"
    assert rows[2]["kind"] == "blocked"


# Worlds that run ---------------------------------------------------------------------------------------------


def exact(row: ledger.Row) -> bool:
    return math.isclose(row.compute + row.communication + row.waiting + row.data, row.wall, abs_tol=1e-9)


def test_waiting_for_a_late_rank_is_told_apart_from_communication() -> None:
    late_s = 0.08

    def work(world: World) -> Report:
        world.barrier()
        world.ledger.restart()
        for _ in range(3):
            with world.ledger.span("data"):
                time.sleep(0.01)
            if world.rank == 2:
                time.sleep(late_s)
            world.all_reduce(torch.ones(10_000), tag="gradients").wait()
            world.ledger.step()
        return world.ledger.gather(world)

    reports = run_threads(work, 3)
    for report in reports:
        assert report.ranks == reports[0].ranks, "every rank has the same report"
        for rows in report.rows:
            assert all(exact(row) for row in rows)
        for rank in (0, 1):
            assert report.ranks[rank].waiting > 2.4 * late_s
            assert report.ranks[rank].communication < 0.5 * late_s
        assert report.ranks[2].waiting < 0.5 * late_s
        assert report.ranks[2].compute > 2.9 * late_s
        assert all(0.029 < t.data < 0.06 for t in report.ranks)
        assert all(t.bytes_sent == 3 * math.ceil(2 * 2 / 3 * 40_000) for t in report.ranks)
    table = reports[0].table().splitlines()
    assert len(table) == 4
    assert set(reports[0].split()) == {"compute", "communication", "waiting", "data", "hidden", "wall"}


def test_work_behind_the_program_is_hidden_and_a_wait_in_a_lane_does_not_block_it() -> None:
    def work(world: World) -> ledger.Row:
        world.barrier()
        world.ledger.restart()
        if world.rank == 1:
            time.sleep(0.05)
        handle = world.all_reduce(torch.ones(2_000_000))
        time.sleep(0.25)  # the program computes
        handle.wait()
        world.ledger.step()
        return world.ledger.rows[-1]

    for rank, row in enumerate(run_threads(work, 2)):
        assert exact(row)
        assert row.communication + row.waiting < 0.1
        assert row.hidden > 0
        assert row.compute > 0.2
        assert row.waiting < 0.02, f"rank {rank}: what was waited for in the background cost nothing"


def test_messages_learn_the_last_arrival_when_the_ledgers_are_gathered(tmp_path: Path) -> None:
    store, late_s = dist.HashStore(), 0.1
    reports: list[Report] = []

    def work(rank: int) -> None:
        world = World(SocketTransport(store, rank, 2, timeout_s=20), hosts=["a", "b"])
        world.barrier()
        world.ledger.restart()
        for _ in range(2):
            if rank == 1:
                time.sleep(late_s)
            world.all_reduce(torch.ones(100), tag="gradients").wait()
            world.ledger.step()
        assert world.ledger.totals().waiting == 0.0
        report = world.ledger.gather(world)
        if rank == 0:
            assert world.ledger.totals().waiting > 1.8 * late_s
            reports.append(report)
        world.close()

    threads = [threading.Thread(target=work, args=(r,)) for r in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    (report,) = reports
    assert report.ranks[0].waiting > 1.8 * late_s
    assert report.ranks[1].waiting < 0.5 * late_s
    assert abs(report.offsets[1]) < 0.05, "two hosts' clocks, which are one here"
    assert all(exact(row) for rows in report.rows for row in rows)
    report.trace(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    together = [e for e in events if e["name"] == "all_reduce gradients"]
    ends = [{e["pid"]: e["ts"] + e["dur"] for e in together[k::2]} for k in range(2)]
    for found in ends:
        assert abs(found[0] - found[1]) < 50_000, "an all_reduce ends at the same time on every rank"


def test_a_trace_has_every_rank_and_is_what_chrome_reads(tmp_path: Path) -> None:
    def work(world: World) -> None:
        world.ledger.restart()
        for _ in range(2):
            with world.ledger.span("data"):
                pass
            if world.rank == 1:
                time.sleep(0.01)
            world.all_reduce(torch.ones(3000), tag="gradients").wait()
            world.split([[1, 0]]).all_reduce(torch.ones(3000), tag="inside").wait()
            world.ledger.step()
        report = world.ledger.gather(world)
        if world.rank == 0:
            report.trace(tmp_path / "trace.json")

    run_threads(work, 2)
    events = json.loads((tmp_path / "trace.json").read_text(), parse_constant=pytest.fail)["traceEvents"]
    assert {e["ph"] for e in events} == {"M", "X"}
    assert {e["pid"] for e in events} == {0, 1}
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert {"steps", "program", "world"} < set(names.values())
    for event in (e for e in events if e["ph"] == "X"):
        assert isinstance(event["tid"], int)
        assert event["ts"] >= 0
        assert event["dur"] >= 0
        assert (event["pid"], event["tid"]) in names
    found = {e["name"] for e in events}
    assert {"step 0", "step 1", "data", "blocked", "all_reduce gradients", "waiting for the last rank"} <= found


def test_records_name_operation_tag_bytes_and_number() -> None:
    def work(world: World) -> list[tuple[str, str, int, int]]:
        world.all_reduce(torch.ones(8), tag="a").wait()
        world.broadcast(torch.ones(8), tag="b").wait()
        world.all_gather(torch.ones(8, dtype=torch.float64), tag="c").wait()
        world.barrier()
        return [(r.op, r.tag, r.bytes_sent, r.sequence) for r in world.ledger.records]

    first, second = run_threads(work, 2)
    assert first == [
        ("all_reduce", "a", 32, 0),
        ("broadcast", "b", 32, 1),
        ("all_gather", "c", 64, 2),
        ("all_reduce", "barrier", 1, 3),
    ]
    assert second[1] == ("broadcast", "b", 0, 1), "the end of the chain sends nothing"


def test_a_world_of_one_records_nothing() -> None:
    world = World()
    world.all_reduce(torch.ones(3)).wait()
    assert len(world.ledger.records) == len(world.ledger.spans) == 0
    report = world.ledger.gather(world)
    assert len(report.ranks) == 1
    assert report.offsets == [0.0]


# Events --------------------------------------------------------------------------------------------------------


def test_an_event_is_kept_with_its_step_and_time(book: Ledger) -> None:
    step_at(book, 101.0)
    book.event("accordion", levels={"w": "low"}, norms=[1.0, 2.5], why=None)
    (event,) = book.events
    assert (event.kind, event.step, event.start) == ("accordion", 1, 101.0)
    assert event.values == {"levels": {"w": "low"}, "norms": [1.0, 2.5], "why": None}
    step_at(book, 102.0)
    assert book.rows[1].compute == 1.0  # an event takes no time


def test_events_are_told_a_line_each(book: Ledger) -> None:
    book.event("resized", size=3)
    step_at(book, 101.0)
    book.event("accordion", levels={str(i): "low" for i in range(100)})
    assert book.format_events() == "step 0: resized: size=3\nstep 1: accordion: levels=100 values"
    assert book.format_events(kind="resized") == "step 0: resized: size=3"
    assert book.format_events(last=1).startswith("step 1")


@pytest.mark.parametrize("bad", [{1, 2}, torch.ones(1), {1: "a"}, [object()], b"bytes"])
def test_an_event_refuses_what_is_not_plain(book: Ledger, bad: object) -> None:
    with pytest.raises(TypeError, match="plain values"):
        book.event("odd", value=bad)
    assert not book.events


def test_events_are_written_as_json_lines(book: Ledger, tmp_path: Path) -> None:
    book.event("accordion", norms={"w": math.nan, "v": 1.5}, ranks=(0, 1))
    book.write_jsonl(tmp_path / "ledger.jsonl")
    (line,) = (tmp_path / "ledger.jsonl").read_text().splitlines()
    assert json.loads(line) == {
        "type": "event",
        "rank": 0,
        "kind": "accordion",
        "start": 100.0,
        "step": 0,
        "values": {"norms": {"w": None, "v": 1.5}, "ranks": [0, 1]},
    }


def test_every_ranks_events_are_gathered_and_traced(tmp_path: Path) -> None:
    def work(world: World) -> Report:
        world.ledger.event("decided", rank=world.rank, norm=math.inf)
        return world.ledger.gather(world)

    report = run_threads(work, 2)[0]
    assert [[event.values["rank"] for event in events] for events in report.events] == [[0], [1]]
    report.trace(tmp_path / "trace.json")
    trace = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    moments = [entry for entry in trace if entry["ph"] == "i"]
    assert [(entry["pid"], entry["name"], entry["args"]["rank"]) for entry in moments] == [
        (0, "decided", 0),
        (1, "decided", 1),
    ]
    assert all(entry["ts"] >= 0 and entry["args"]["norm"] is None for entry in moments)


def test_a_reducer_at_work_is_compression_where_the_program_stands_still_and_nothing_moves(book: Ledger) -> None:
    book.close_span("reducer", 101.0, 103.0)  # behind compute until 102
    collective(book, 102.5, 102.5, 104.0)
    book.close_span("reducer", 103.5, 105.0)  # the first half of it while bytes move
    book.close_span("blocked", 102.0, 106.0)
    step_at(book, 107.0)
    assert book.rows[0].compression == pytest.approx(0.5 + 1.0)
    assert book.rows[0].communication == pytest.approx(4.0)  # which it is a part of
    assert book.totals().compression == pytest.approx(1.5)
