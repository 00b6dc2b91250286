"""Bubbles of pipelines: schedules replayed against their formulas, steps taken apart by hand, and how they are told."""

from __future__ import annotations

import io
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_run_recorder import Kept
from test_run_report import read, row, write_rank, write_run
from torch import nn

import unisono as un
from unisono.cli import main
from unisono.methods.hybrid.bubbles import WARM_UP, Bubble
from unisono.methods.hybrid.pipeline import list_stages, make_schedule, read_order
from unisono.observe.live.live_run import LiveRun
from unisono.observe.live.terminal import draw_frame
from unisono.observe.reports.page import make_page
from unisono.observe.runs.recorder import Recorder
from unisono.predict.costs.pipelines import UNITS, Action, count_under_way, order_single, replay_schedule
from unisono.world.ledger import Ledger

# Schedules ------------------------------------------------------------------------------------------------------------


def replay_units(order: dict[int, list[Action]]) -> float:
    return replay_schedule(order, lambda action: UNITS[action[1]]).bubble


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize(("kind", "ahead"), [("gpipe", 0), ("1f1b", 0), ("1f1b", 1)])
def test_equal_stages_have_the_bubble_of_the_formula(kind: str, ahead: int, ranks: int) -> None:
    for micro in (ranks, 8, 13):
        order = order_single(kind, ranks=ranks, microbatches=micro, ahead=ahead)
        assert replay_units(order) == pytest.approx((ranks - 1) / (micro + ranks - 1))


def make_order(kind: str, ranks: int, microbatches: int, per_rank: int) -> dict[int, list[Action]]:
    """Of a schedule as the pipeline makes it, without other ranks."""
    stages: list[Any] = [
        SimpleNamespace(
            stage_index=i,
            num_stages=ranks * per_rank,
            group_size=ranks,
            group_rank=0,
            is_first=i == 0,
            is_last=i == ranks * per_rank - 1,
            submod=None,
        )
        for i in list_stages(kind, 0, ranks, per_rank)
    ]
    return read_order(make_schedule(kind, stages, microbatches, 1, loss_fn=nn.functional.mse_loss))


@pytest.mark.parametrize(
    ("kind", "per_rank", "many"),
    [
        ("gpipe", 1, 1),
        ("1f1b", 1, 1),
        ("loopedbfs", 2, 2),
        ("interleaved1f1b", 2, 2),
        ("interleavedzerobubble", 2, 6),  # a forward and two halves of backward, of two stages
        ("zbvzerobubble", 2, 6),
    ],
)
@pytest.mark.parametrize("ranks", [2, 4])
def test_the_orders_that_run_have_the_bubble_of_their_formula(kind: str, per_rank: int, many: int, ranks: int) -> None:
    assert replay_units(make_order(kind, ranks, 8, per_rank)) == pytest.approx((ranks - 1) / (many * 8 + ranks - 1))


def test_one_more_microbatch_under_way_hides_the_way_of_messages() -> None:
    """With it the steady part takes as long as without messages; without, each microbatch waits for one."""

    def run(ahead: int, hop: float) -> float:
        order = order_single("1f1b", ranks=2, microbatches=32, ahead=ahead)
        apart = {rank: [(2 * stage, kind, i) for stage, kind, i in actions] for rank, actions in order.items()}
        times = {0: {"F": 1.0, "B": 2.0}, 1: {"F": hop, "B": hop}, 2: {"F": 1.0, "B": 2.0}}
        link = {10 + i: [(1, kind, i) for kind in "FB"] for i in range(32)}  # a stage between, without a queue
        return replay_schedule({**apart, **link}, lambda action: times[action[0]][action[1]]).length

    at_best = 3.0 * 33
    assert run(1, 0.5) == pytest.approx(at_best + 2 * 0.5)
    assert run(0, 0.5) == pytest.approx(at_best + 32 * 0.5)
    assert [count_under_way(stage, 4, 1) for stage in range(4)] == [7, 5, 3, 1]
    assert [count_under_way(stage, 4, 0) for stage in range(4)] == [4, 3, 2, 1]


def test_an_order_that_cannot_go_on_is_refused() -> None:
    with pytest.raises(ValueError, match="never ends"):
        replay_schedule({0: [(0, "B", 0), (0, "F", 0)]}, lambda action: 1.0)


# A step taken apart ---------------------------------------------------------------------------------------------------


class Two:
    """Two ranks of a pipeline of one microbatch each way, with one made-up clock."""

    def __init__(self) -> None:
        self.now = 0.0
        order = order_single("1f1b", ranks=2, microbatches=2)
        self.ledgers = [Ledger(rank, clock=lambda: self.now) for rank in range(2)]
        self.bubbles = [Bubble(ledger) for ledger in self.ledgers]
        self.stages: list[Any] = [self._make_stage(rank) for rank in range(2)]
        for rank, bubble in enumerate(self.bubbles):
            about = {"rank": rank, "one_clock": True, "schedule": "1F1B", "chunks": 1}
            self.size = bubble.follow(order, **about).size  # type: ignore[arg-type]
            bubble.watch(self.stages[rank])

    def _make_stage(self, rank: int) -> Any:
        def work(micro: int, took: float, **_: Any) -> None:
            self.now += took

        names = ("forward_one_chunk", "backward_one_chunk", "backward_weight_one_chunk")
        return SimpleNamespace(stage_index=rank, **dict.fromkeys(names, work))

    def step(self, plan: list[tuple[int, str, int, float, float]], end: float) -> None:
        """`plan`: rank, kind, microbatch, when, and for how long."""
        start = self.now
        for bubble in self.bubbles:
            bubble.begin_step()
        for rank, kind, micro, at, took in plan:
            self.now = start + at
            name = {"F": "forward_one_chunk", "B": "backward_one_chunk"}[kind]
            getattr(self.stages[rank], name)(micro, took)
        self.now = start + end
        numbers = torch.zeros(self.size, dtype=torch.float64)
        for bubble in self.bubbles:
            bubble.fill(numbers)
        for bubble in self.bubbles:
            bubble.end_step(start, self.now, numbers.tolist())


# Rank 0 takes 1 and 2 seconds, rank 1 takes 1 and 1; a message takes half a second; the schedule begins at 1.
PLAN = [
    *[(0, "F", 0, 1.0, 1.0), (0, "F", 1, 2.0, 1.0), (0, "B", 0, 5.0, 2.0), (0, "B", 1, 7.5, 2.0)],
    *[(1, "F", 0, 2.5, 1.0), (1, "B", 0, 3.5, 1.0), (1, "F", 1, 4.5, 1.0), (1, "B", 1, 5.5, 1.0)],
]


def test_a_step_is_divided_into_what_makes_it_longer_than_the_formula() -> None:
    two = Two()
    two.step(sorted(PLAN, key=lambda one: one[3]), end=13.0)
    first, second = (bubble.describe() for bubble in two.bubbles)
    assert first["schedule_s"] == pytest.approx(8.5)  # from 1 to 9.5: what is around it is not the schedule's
    assert first["outside_s"] == pytest.approx(4.5)
    assert (first["fraction"], second["fraction"]) == pytest.approx((2.5 / 8.5, 4.5 / 8.5))
    assert first["ideal"] == pytest.approx(1 / 3)
    # Without messages rank 0 would wait for one second: 7 in all, of which the ranks use 6 and 4.
    without = 1 - 5.0 / 7.0
    assert first["imbalance"] == pytest.approx(without - 1 / 3)
    assert first["uneven"] == pytest.approx(0.0)
    assert first["messages"] == pytest.approx(1 - 5.0 / 8.5 - without)
    assert first["bubble"] == pytest.approx(1 - 5.0 / 8.5)
    assert {key: pytest.approx(value) for key, value in second["stages"].items()} == {"0": [1.0, 2.0], "1": [1.0, 1.0]}
    spans = [(span.start, span.end) for span in two.ledgers[1].spans if span.kind == "bubble"]
    assert spans == [(1.0, 2.5), (6.5, 9.5)]


def test_the_first_steps_do_not_count_once_there_are_more() -> None:
    two = Two()
    for number in range(WARM_UP + 2):
        slow = 10.0 if number < WARM_UP else 0.0
        two.step([(r, k, i, at + slow * (k == "B"), took) for r, k, i, at, took in PLAN], end=13.0 + slow)
    assert two.bubbles[0].steps == 2
    assert two.bubbles[0].describe()["schedule_s"] == pytest.approx(8.5)


def test_the_loss_counts_as_computed() -> None:
    two = Two()

    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        two.now += 0.5
        return output

    timed = two.bubbles[1].time_loss(loss)
    two.bubbles[1].begin_step()
    two.stages[1].forward_one_chunk(0, 1.0)
    timed(torch.ones(()), torch.ones(()))
    numbers = torch.zeros(two.size, dtype=torch.float64)
    two.bubbles[1].fill(numbers)
    course = two.bubbles[1]._times
    assert course is not None
    assert course.list_seconds(numbers.tolist())[1, "F", 0] == pytest.approx(1.5)


# In the run's folder, and in reports ----------------------------------------------------------------------------------


def test_a_worker_writes_its_mesh_its_rank_among_all_and_the_loss_of_all_microbatches() -> None:
    x = torch.randn(8, 3, generator=torch.Generator().manual_seed(0))

    def train(world: un.World) -> tuple[Kept, list[float]]:
        kept = Kept()
        recorder = Recorder(world, kept)
        mesh = un.mesh(data=2, world=world)
        torch.manual_seed(0)
        pipe = mesh.pipe(nn.Linear(3, 3), x[:2], nn.functional.mse_loss, microbatches=2)
        optimizer = torch.optim.SGD(pipe.module.parameters(), lr=0.5)
        un.parallel(pipe.module, optimizer, world=mesh.data)
        losses = []
        for _ in range(3):
            optimizer.zero_grad()
            mine = x.chunk(2)[world.rank]
            losses.append(
                float(nn.functional.mse_loss(pipe.module(mine), mine).detach())
            )  # of the whole batch, in plain torch
            pipe.step(mine, mine)
            optimizer.step()
        recorder.close("ok")
        return kept, losses

    for rank, (kept, losses) in enumerate(un.run_threads(train, 2)):
        header = kept.of("header")[-1][1]
        assert (header["rank"], header["size"], header["mesh"], header["at"]) == (rank, 2, [2, 1, 1], [rank, 0, 0])
        assert [line[3]["loss"] for line in kept.of("metrics")] == pytest.approx(losses)


def make_pipeline_run(folder: Path) -> Path:
    two = Two()
    two.step(PLAN, end=13.0)
    write_run(folder, workers=4)
    for place in range(4):
        told = {**two.bubbles[place // 2].describe()}
        data = ["data", {"samples": 40, "steps": 10, "seconds": 0.1}]
        lines = [*(row(s, 0.05, 0.0, 0.05, 0.0) for s in range(10)), data, ["pipeline", told]]
        write_rank(folder, place, *lines, size=4, mesh=[2, 1, 2], at=[place % 2, 0, place // 2], parameters=100)
    return folder


def test_a_report_has_the_mesh_and_what_makes_the_bubble(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = make_pipeline_run(tmp_path / "a")
    found = read(folder)
    assert found.mesh == "data=2, tensor=1, pipeline=2"
    assert [rank.mesh_place for rank in found.ranks][2] == "data 0, pipeline 1"
    assert found.samples_a_step == 8, "two places on the data axis, of 4 samples each; stages have the same ones"
    assert found.parameters == 200, "of both stages"
    pipe = found.pipeline
    assert pipe is not None
    assert pipe.bubble == pytest.approx(pipe.ideal + pipe.imbalance + pipe.uneven + pipe.messages)
    assert [(one.rank, one.stages) for one in pipe.members] == [(0, [0]), (1, [0]), (2, [1]), (3, [1])]
    assert [one.busy for one in pipe.members] == pytest.approx([6 / 8.5] * 2 + [4 / 8.5] * 2)

    assert main(["report", str(folder)]) == 0
    said = capsys.readouterr().out
    for text in ("41.2 % of the", "(p-1)/(m+p-1) is 33.3 %", "stages that differ", "messages and waiting", "70.6 %"):
        assert text in said.replace("\n", " "), text
    assert "data=2, tensor=1, pipeline=2" in said
    page = make_page([found])
    assert "The pipeline" in page
    assert "Of equal stages each would wait 33.3 % of it" in page
    assert main(["report", str(folder), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["pipeline"]["members"][3]["place"] == "data 1, pipeline 1"
    assert told["mesh"] == "data=2, tensor=1, pipeline=2"


def test_live_views_name_the_place_on_the_mesh(tmp_path: Path) -> None:
    from rich.console import Console

    live = LiveRun(make_pipeline_run(tmp_path / "a"))
    live.read()
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(draw_frame(live, 1010.0, rows=None))
    assert "d1 p1" in console.export_text()


def test_what_is_damaged_is_left_out(tmp_path: Path) -> None:
    folder = make_pipeline_run(tmp_path / "a")
    write_rank(folder, 1, row(0, 0.1, 0, 0, 0), ["pipeline", {"steps": 3}], ["pipeline", 7], size=4)
    write_rank(folder, 2, row(0, 0.1, 0, 0, 0), size=4, mesh=[2, 1], at=[0])
    assert read(folder).pipeline is None
