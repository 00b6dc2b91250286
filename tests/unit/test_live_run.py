"""A run folder followed while it grows: sums, metrics, marks, states; and what the page is sent."""

from __future__ import annotations

import base64
import json
import subprocess
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from simulated_run import SimulatedRun
from unisono.observe.live.bins import COLUMNS, PARTS, STEPS, Bins, StepSeries
from unisono.observe.live.feed import MANY, WORST, Feed
from unisono.observe.live.live_run import LiveRun, Marks


def read_lines(folder: Path, kind: str) -> list[tuple[int, list[Any]]]:
    """The lines of a kind in all files, with their rank."""
    found = []
    for path in sorted(folder.glob("ranks/*.jsonl")):
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        found += [(int(path.stem), line) for line in lines if line[0] == kind]
    return found


def follow(folder: Path) -> LiveRun:
    live = LiveRun(folder)
    live.read()
    return live


def find_states(live: LiveRun) -> dict[int, str]:
    """What each rank does, at the moment of the last line."""
    return live.describe_places(max(place.last for place in live.places.values()))


# Sums -----------------------------------------------------------------------------------------------------------------


def test_bins_hold_what_the_lines_say(tmp_path: Path) -> None:
    run = SimulatedRun(tmp_path, ranks=3, steps_s=7.0, slow={1: 2.0}, began=time.time() - 40.0)
    run.write()
    live = follow(run.folder)
    for rank in range(3):
        lines = [line for place, line in read_lines(run.folder, "step") if place == rank]
        told = live.whole.sums(0)[:, rank].sum(0)
        assert told[COLUMNS.index("compute")] == pytest.approx(sum(line[4] for line in lines))
        assert told[COLUMNS.index("communication")] == pytest.approx(sum(line[5] - line[11] for line in lines))
        assert told[COLUMNS.index("compression")] == pytest.approx(sum(line[11] for line in lines))
        assert told[COLUMNS.index("waiting")] == pytest.approx(sum(line[6] for line in lines), abs=1e-6)
        assert told[COLUMNS.index("bytes")] == pytest.approx(sum(line[9] for line in lines))
        assert told[STEPS] == pytest.approx(len(lines))
    assert np.allclose(live.recent.sums(0).sum(0), live.whole.sums(0).sum(0))


def test_a_long_step_is_divided_among_the_bins_it_lies_in() -> None:
    bins = Bins(1.0, 16, slides=True)
    bins.begin = 100.0
    bins.add(0, np.array([[101.5, 4.0, 4.0, 0.0, 0.0, 0.0, 0.0, 8.0, 1.0]]))
    assert bins.sums(0)[:, 0, 0].tolist() == [0.0, 0.5, 1.0, 1.0, 1.0, 0.5]
    assert bins.sums(0)[:, 0, STEPS].sum() == pytest.approx(1.0)


def test_a_day_fits_into_as_many_bins_as_a_minute_and_nothing_is_lost() -> None:
    bins, recent = Bins(0.5, 256, slides=False), Bins(0.5, 240, slides=True)
    starts = np.arange(0.0, 86_400.0, 20.0)
    rows = np.column_stack([1000.0 + starts, np.full_like(starts, 20.0), *[np.full_like(starts, 4.0)] * 5])
    rows = np.column_stack([rows, np.full_like(starts, 100.0), np.full_like(starts, 10.0)])
    for some in np.array_split(rows, 40):
        bins.add(0, some)
        recent.add(0, some)
    assert len(bins.sums(0)) <= 256
    assert bins.sums(0)[:, 0, STEPS].sum() == pytest.approx(10.0 * len(starts))
    assert len(recent.sums(0)) == 240
    assert recent.sums(0)[:, 0, : len(PARTS)].sum() == pytest.approx(120.0, rel=0.05)


def test_metrics_are_the_mean_over_ranks(tmp_path: Path) -> None:
    run = SimulatedRun(tmp_path, ranks=4, steps_s=10.0, began=time.time() - 20.0)
    run.write()
    expected: dict[int, list[float]] = {}
    for _, (_, step, _, values, _) in read_lines(run.folder, "metrics"):
        expected.setdefault(step, []).append(values["loss"])
    points = follow(run.folder).metrics["loss"].since(0)
    assert [p[0] for p in points] == sorted(expected)
    for step, _, value, low, high in points:
        assert value == pytest.approx(sum(expected[step]) / 4)
        assert (low, high) == (min(expected[step]), max(expected[step]))


@pytest.mark.parametrize(("how", "value"), [("mean", 2.0), ("sum", 6.0), ("min", 1.0), ("max", 3.0)])
def test_a_long_series_stays_short_and_true(how: str, value: float) -> None:
    series = StepSeries(how)
    for chunk in range(0, 20_000, 500):  # files are read one after the other
        for own in (1.0, 2.0, 3.0):
            for step in range(chunk, chunk + 500):
                series.add(step, float(step), own)
    points = series.since(0)
    assert len(points) <= 800
    assert [p[2] for p in points] == pytest.approx([value] * len(points))
    assert points[-1][0] == 19_999


def test_a_worker_whose_first_line_is_lost_does_not_end_the_page(tmp_path: Path) -> None:
    """Without its header nobody knows its clock: what it says has no time."""
    run = SimulatedRun(tmp_path, ranks=2, steps_s=5.0, began=time.time() - 10.0)
    run.write()
    run.say(1, "verdict", rank=1, cause="slow", text="rank 1 is slow")
    path = run.folder / "ranks" / "00001.jsonl"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[1:]))
    live = follow(run.folder)
    message = json.loads(Feed(live).make_snapshot("recent", time.time()))
    assert message["marks"] == []
    assert live.unreadable > 0


@pytest.mark.parametrize("time_text", ["NaN", "1e999"])
def test_a_line_with_no_time_does_not_end_the_page(tmp_path: Path, time_text: str) -> None:
    run = SimulatedRun(tmp_path, ranks=1, steps_s=5.0, began=time.time() - 10.0)
    run.write()
    with (run.folder / "ranks" / "00000.jsonl").open("a") as file:
        file.write(
            f'["event","verdict",3,{time_text},{{"text":"?"}}]\n["metrics",3,{time_text},{{"loss":1.0}},"mean"]\n'
        )
    live = follow(run.folder)
    json.loads(Feed(live).make_snapshot("recent", time.time()))
    assert live.unreadable == 2


def test_the_heat_map_has_a_cell_for_the_highest_place_also_if_others_never_wrote(tmp_path: Path) -> None:
    run = SimulatedRun(tmp_path, ranks=MANY + 6, steps_s=2.0, began=time.time() - 10.0)
    run.write()
    (run.folder / "ranks" / "00003.jsonl").unlink()
    message = json.loads(Feed(follow(run.folder)).make_snapshot("recent", time.time()))
    assert {len(base64.b64decode(cell)) for cell in message["heat"]["cells"]} == {MANY + 6}


# Marks and states -----------------------------------------------------------------------------------------------------


def test_what_all_ranks_say_is_one_mark() -> None:
    marks = Marks()
    for rank in range(8):
        marks.add("verdict", 100.0 + rank / 100, 7, {"rank": 2, "cause": "slow input", "text": "rank 2 is slow"})
    marks.add("verdict", 101.0, 9, {"rank": 3, "cause": "held GIL", "text": "rank 3 holds the GIL"})
    assert [(m.rank, m.cause, m.times) for m in marks.kept] == [(2, "slow input", 8), (3, "held GIL", 1)]
    assert marks.slow == {2: "slow input"}
    marks.add("straggler over", 102.0, 20, {"rank": 2})
    assert marks.slow == {}


def test_marks_stay_bounded_and_verdicts_outlive_decisions() -> None:
    marks = Marks()
    marks.add("verdict", 1.0, 1, {"rank": 0, "text": "first"})
    for i in range(2000):
        marks.add("accordion", float(i), i, {"level": i})
    assert len(marks.kept) <= 400
    assert marks.kept[0].text == "first"


def test_a_lost_worker_is_named_and_a_replacement_trains(tmp_path: Path) -> None:
    run = SimulatedRun(tmp_path, ranks=3, steps_s=20.0, began=time.time() - 5.0)
    run.write(time.time() - 1.0)
    run.lose(1)
    run.write()
    live = follow(run.folder)
    assert find_states(live) == {0: "training", 1: "lost", 2: "training"}
    run.lost.clear()
    header = json.loads((run.folder / "ranks/00001.jsonl").read_text().splitlines()[0])
    header[1].update(time=time.time() - run.began, pid=999)
    run._append(1, [json.dumps(header)])
    run.write(time.time() + 1.0)
    live.read()
    assert find_states(live)[1] == "training"


def test_a_silent_rank_and_a_slow_one(tmp_path: Path) -> None:
    run = SimulatedRun(tmp_path, ranks=3, steps_s=20.0, slow={2: 3.0}, began=time.time() - 60.0)
    run.write(time.time() - 40.0)
    run.silent.add(0)
    run.say(1, "straggler", rank=2, factor=3.0, cause="compute")
    run.write()
    live = follow(run.folder)
    states, speeds = find_states(live), live.measure_speeds()
    assert states == {0: "silent", 1: "training", 2: "slow"}
    assert speeds[2].factor > 2.0
    assert live.order_places(speeds, states)[:2] == [0, 2]


def test_the_end_of_a_run_and_a_launcher_that_was_killed(tmp_path: Path) -> None:
    run = SimulatedRun(tmp_path / "a", ranks=2, steps_s=20.0, began=time.time() - 5.0)
    run.write()
    assert follow(run.folder).describe_state() == "running"
    run.finish("failed", report="rank 1 raised ValueError")
    live = follow(run.folder)
    assert (live.describe_state(), live.run["report"]) == ("failed", "rank 1 raised ValueError")
    killed = SimulatedRun(tmp_path / "b", ranks=2, steps_s=20.0, began=time.time() - 5.0)
    killed.write()
    ended = subprocess.Popen(["true"])
    ended.wait()
    killed.record.update(launcher_pid=ended.pid, launcher_start=0)
    live = follow(killed.folder)
    assert live.describe_state() == "launcher gone"
    assert set(find_states(live).values()) == {"gone"}


# Folders that are not whole -------------------------------------------------------------------------------------------


def test_an_empty_folder_is_no_error(tmp_path: Path) -> None:
    live = LiveRun(tmp_path)
    assert not live.read()
    message = json.loads(Feed(live).make_snapshot("whole", time.time()))
    assert message["run"]["state"] == "no run.json"
    assert message["run"]["missing"]


def test_damaged_lines_are_counted_and_the_rest_is_shown(tmp_path: Path) -> None:
    run = SimulatedRun(tmp_path, ranks=2, steps_s=20.0, began=time.time() - 3.0)
    run.write()
    good = follow(run.folder).whole.sums(0).sum()
    now = time.time() - run.began
    far = ["step", 9, now + 1e9, 1.0, 1.0, 0.0, 0.0, 0.0, 0.0, 5, 1, 0.0]
    not_a_number = '["step",9,1.0,NaN,1.0,0,0,0,0,5,1,0]'
    run._append(0, ["{", '["step"]', "null", "[]", '["metrics",1,2]', json.dumps(far), not_a_number])
    with (run.folder / "ranks/00001.jsonl").open("a") as file:
        file.write('["step",77,')  # a line that is being written
    live = follow(run.folder)
    assert live.whole.sums(0).sum() == good
    assert live.unreadable == 7
    json.loads(Feed(live).make_snapshot("recent", time.time()), parse_constant=lambda text: pytest.fail(text))


# What the page is sent ------------------------------------------------------------------------------------------------


class Client:
    """Keeps what a page would keep of the messages."""

    def __init__(self) -> None:
        self.bins: dict[int, Any] = {}
        self.strips: dict[int, dict[int, bytes]] = {}
        self.metrics: dict[str, list[Any]] = {}
        self.marks: dict[int, Any] = {}
        self.ranks: Any = None
        self.first = 0

    def take(self, text: str) -> dict[str, Any]:
        message: dict[str, Any] = json.loads(text)
        if message.get("all"):
            self.__init__()  # type: ignore[misc]
        for name, more in message.get("metrics", {}).items():
            kept = [p for p in self.metrics.get(name, []) if p[0] < more["from"]]
            self.metrics[name] = kept + more["points"]
        self.marks.update({mark[0]: mark for mark in message.get("marks", [])})
        self.ranks = message.get("ranks", self.ranks)
        bins, strips = message["bins"], message["strips"]
        self.first = bins["first"]
        self.bins.update({bins["from"] + i: row for i, row in enumerate(bins["rows"])})
        for i, cells in enumerate(strips["cells"]):
            all_cells, size = base64.b64decode(cells), len(PARTS)
            rows = {p: all_cells[r * size : (r + 1) * size] for r, p in enumerate(strips["places"])}
            self.strips[strips["from"] + i] = rows
        return message

    def known(self) -> Any:
        bins = {n: row for n, row in self.bins.items() if n >= self.first}
        strips = {n: rows for n, rows in self.strips.items() if n >= self.first}
        return bins, strips, self.metrics, self.marks, self.ranks


@pytest.mark.parametrize(("view", "ranks"), [("recent", 3), ("whole", 3), ("recent", MANY + 6)])
def test_updates_lead_to_what_a_page_sees_that_opens_now(tmp_path: Path, view: str, ranks: int) -> None:
    """Whenever a page opens: the whole, and then what has changed, is the same as the whole later."""
    rounds, seconds = (60, 400.0) if ranks < MANY else (10, 60.0)
    began = time.time() - seconds
    run = SimulatedRun(tmp_path, ranks=ranks, steps_s=4.0 if ranks < MANY else 1.0, began=began)
    live, first, late = LiveRun(run.folder), Client(), Client()
    feed = Feed(live)
    for i in range(1, rounds + 1):  # 400 s: the bins of the whole run fold, those of the last minutes slide
        now = began + i * seconds / rounds
        run.slow = {i % ranks: 3.0}  # with many ranks, those that have rows change
        run.write(now)
        if i % 9 == 0:
            run.say(i % 3, "verdict", rank=1, cause="slow compute", text=f"number {i}")
            slow = [
                "metrics",
                max(0, run.step - 40),
                now - began,
                {"loss": float(i)},
                "mean",
            ]  # a rank that writes late
            run._append(1, [json.dumps(slow)])
        live.read()
        if i == 1:
            first.take(feed.make_snapshot(view, now))
        if i == rounds // 3:
            late.take(feed.make_snapshot(view, now))
        update = feed.make_updates({view}, now)[view]
        first.take(update)
        if i >= rounds // 3:
            late.take(update)
    fresh = Client()
    fresh.take(feed.make_snapshot(view, now))
    assert first.known() == fresh.known() == late.known()
    assert len(fresh.marks) == rounds // 9


def test_an_update_is_short_where_the_history_is_long(tmp_path: Path) -> None:
    run = SimulatedRun(tmp_path, ranks=8, steps_s=10.0, began=time.time() - 100.0)
    run.write(time.time() - 1.0)
    live = LiveRun(run.folder)
    live.read()
    feed = Feed(live)
    whole = feed.make_snapshot("recent", time.time())
    feed.make_updates({"recent"}, time.time())
    run.write()
    live.read()
    update = feed.make_updates({"recent"}, time.time())["recent"]
    assert len(update) < len(whole) / 5
    assert json.loads(update)["ranks"][0][3] == run.step - 1


def test_with_many_ranks_the_worst_have_rows_and_all_are_on_the_map(tmp_path: Path) -> None:
    ranks = MANY + 40
    run = SimulatedRun(tmp_path, ranks=ranks, steps_s=4.0, slow={77: 3.0, 9: 2.0}, began=time.time() - 8.0)
    run.write(time.time() - 2.0)
    run.lose(50)
    run.write()
    message = json.loads(Feed(follow(run.folder)).make_snapshot("recent", time.time()))
    assert message["run"]["many"]
    assert message["strips"]["places"][:3] == [50, 77, 9]
    assert len(message["strips"]["places"]) == WORST
    levels = base64.b64decode(message["heat"]["cells"][-4])
    assert len(levels) == ranks
    assert levels[77] > 150 > levels[3] > 100  # 128 is the median, 160 twice that
    slowest, median = message["bins"]["rows"][-4][10], message["bins"]["rows"][-4][8]
    assert slowest > 2 * median
