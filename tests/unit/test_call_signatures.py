"""Calls that differ between ranks: found at once, and told with the rank, the step and the line of both ranks."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from types import FunctionType, SimpleNamespace
from typing import Any

import pytest
import torch
from test_world import run_hosts, run_messages, run_shared

from unisono import Mismatch, PeerLost, World, run_threads
from unisono.launchers.runtime.frames import find_site
from unisono.world.transports import CallDescription
from unisono.world.transports.meeting_page import _DESCRIPTION, _DESCRIPTION_TOP, PAGE_NAME, MeetingPage

Runner = Callable[[Callable[[World], Any], int], list[Any]]
RUNNERS: dict[str, Runner] = {
    "threads": run_threads,
    "shared": run_shared,
    "messages": run_messages,
    "hosts": lambda fn, size: run_hosts(fn, "aab"[:size] if size == 3 else "ab"),
}
SMALL, LARGE = 5, 5000


@pytest.fixture(params=RUNNERS)
def runner(request: pytest.FixtureRequest) -> Runner:
    return RUNNERS[request.param]


def line_of(function: Callable[..., Any], text: str) -> str:
    lines, first = inspect.getsourcelines(function)
    (found,) = [first + i for i, line in enumerate(lines) if line.rstrip().endswith(text)]
    return f"test_call_signatures.py:{found}"


def verdict_of(world: World) -> dict[str, Any]:
    (event,) = [event for event in world.ledger.events if event.kind == "verdict"]
    return event.values


def train(world: World, size: int, *, skips: int, at: int = 2) -> tuple[str, dict[str, Any]]:
    """Two equal collectives a step; rank `skips` leaves the first out in step `at`."""
    for step in range(4):
        if not (world.rank == skips and step == at):
            world.all_reduce(torch.ones(size), "sum", tag="losses").wait()  # first
        try:
            world.all_reduce(torch.ones(size), "sum", tag="errors").wait()  # second
        except Mismatch as error:
            return str(error), verdict_of(world)
        world.ledger.step()
    raise AssertionError("nothing was found")


@pytest.mark.parametrize("size", [SMALL, LARGE])
@pytest.mark.parametrize("ranks", [2, 3])
def test_a_skipped_collective_of_the_same_shape_is_named(runner: Runner, size: int, ranks: int) -> None:
    def work(world: World) -> tuple[str, dict[str, Any]]:
        try:
            return train(world, size, skips=1)
        except Mismatch as error:  # the ranks that came to the first
            return str(error), verdict_of(world)

    first, second = line_of(train, "# first"), line_of(train, "# second")
    for text, verdict in runner(work, ranks):
        assert first in text
        assert second in text
        assert "step 2" in text
        assert (verdict["rank"], verdict["cause"], verdict["place"]) == (1, "skipped collective", first)


def test_a_rank_that_made_fewer_calls_is_named_at_the_end() -> None:
    """One line in a loop: a call that was left out looks like the next one, until the loop is over."""

    def work(world: World) -> list[dict[str, Any]]:
        try:
            for step in range(4):
                if not (world.rank == 1 and step == 2):
                    world.all_reduce(torch.ones(3), "sum", tag="losses").wait()  # the only one
        except PeerLost:
            pass
        return [event.values for event in world.ledger.events if event.kind == "verdict"]

    found = run_threads(work, 2)
    place = line_of(test_a_rank_that_made_fewer_calls_is_named_at_the_end, "# the only one")
    assert found[1] == []
    assert [(v["rank"], v["cause"], v["place"]) for v in found[0]] == [(1, "skipped collective", place)]


def test_collectives_in_another_order_are_named(runner: Runner) -> None:
    def work(world: World) -> dict[str, Any]:
        calls = [
            lambda: world.all_reduce(torch.ones(9)).wait(),
            lambda: world.all_reduce(torch.zeros(9)).wait(),
        ]
        for step in range(3):
            order = calls[::-1] if step == 2 and world.rank == 0 else calls
            try:
                for call in order:
                    call()
            except Mismatch:
                return verdict_of(world)
        raise AssertionError("nothing was found")

    for verdict in runner(work, 3):
        assert verdict["rank"] == 0
        assert verdict["cause"] in ("skipped collective", "different collective")
        assert "test_call_signatures.py" in verdict["text"]


@pytest.mark.parametrize("size", [SMALL, LARGE])
def test_another_shape_of_the_same_size_is_told_with_both_lines(runner: Runner, size: int) -> None:
    def work(world: World) -> dict[str, Any]:
        shape = (size, 2) if world.rank == 2 else (2, size)
        with pytest.raises(Mismatch) as caught:
            world.all_reduce(torch.ones(shape), "sum", tag="scores").wait()
        assert f"({size}, 2) float32 'scores' at test_call_signatures.py:" in str(caught.value)
        return verdict_of(world)

    for verdict in runner(work, 3):
        assert (verdict["rank"], verdict["cause"]) == (2, "different shape")
        assert verdict["place"].startswith("test_call_signatures.py:")


def test_another_dtype_of_a_broadcast_is_told(runner: Runner) -> None:
    def work(world: World) -> None:
        with pytest.raises(Mismatch):
            world.broadcast(torch.zeros(4, dtype=torch.int32 if world.rank == 1 else torch.float32)).wait()

    runner(work, 2)


def test_calls_that_nobody_compares_are_compared_with_the_next(runner: Runner) -> None:
    """As those are that GPUs make by themselves."""

    def work(world: World) -> float:
        operations, total = world._operations, 0.0
        for step in range(3):
            shape = (7,) if (world.rank, step) == (1, 2) else (5,)
            record = operations.record("all_reduce", "gpu", 0, how="sum", dtype=torch.float32, shapes=((shape,), 1))
            assert operations._history is not None
            operations._history.roll(record.signature)
            if step < 2:
                total += world.all_reduce(torch.ones(3), "sum").wait().sum().item()
        with pytest.raises(Mismatch, match="have called different things on their GPUs"):
            world.all_reduce(torch.ones(3), "sum").wait()
        return total

    assert runner(work, 2) == [12.0, 12.0]


def test_two_ranks_that_have_always_been_apart_may_be(recwarn: pytest.WarningsRecorder) -> None:
    """`if rank == 0: ... else: ...` around the same collective is a program that works."""

    def work(world: World) -> float:
        total = 0.0
        for step in range(3):
            x = torch.ones(3)
            if (step + world.rank) % 2:
                world.all_reduce(x, "sum").wait()
            else:
                world.all_reduce(x, "sum").wait()
            total += x.sum().item()
        return total

    for run in (run_threads, run_shared):
        recwarn.clear()
        assert run(work, 2) == [18.0, 18.0]
        assert [str(w.message).count("test_call_signatures.py") for w in recwarn] == [2]


def test_the_world_goes_on_after_what_was_told() -> None:
    def work(world: World) -> float:
        for size in (SMALL, LARGE):
            with pytest.raises(Mismatch):
                world.all_reduce(torch.ones(size, 1) if world.rank else torch.ones(1, size), "sum").wait()
        return world.all_reduce(torch.ones(()), "sum").wait().item()

    assert run_shared(work, 2) == [2.0, 2.0]


def test_nothing_is_compared_where_checks_are_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UNISONO_CHECKS", "off")

    def work(world: World) -> float:
        x = torch.ones(2, 3) if world.rank else torch.ones(3, 2)
        return world.all_reduce(x, "sum").wait().sum().item()

    for run in RUNNERS.values():
        assert run(work, 2) == [12.0, 12.0]


def test_a_site_is_the_line_of_the_program_and_the_same_number_everywhere() -> None:
    found = [find_site() for _ in range(2)]
    (site, direct), (again, _) = found
    assert site is not None
    assert direct
    assert site == again
    assert site.text == line_of(
        test_a_site_is_the_line_of_the_program_and_the_same_number_everywhere, "for _ in range(2)]"
    )


def test_what_a_rank_called_stays_beside_where_it_waits() -> None:
    """On the page they are neighbours: a long text of where it waits, and its end, take nothing from the other."""
    fd = os.memfd_create(PAGE_NAME)
    page = MeetingPage(fd, 0, 1, timeout_s=5.0, spin=False)
    os.close(fd)
    signature = SimpleNamespace(what=7, where=8, description=CallDescription(0, 7, 8, "all_reduce of 3", "train.py:5"))
    first = page.exchange_descriptions(signature)  # type: ignore[arg-type]
    page.show_wait("x" * 5000)
    assert page.read_wait(0) == "x" * 256
    page.show_wait("")
    top = _DESCRIPTION_TOP.unpack_from(page.memory, _DESCRIPTION)
    assert [page._read_description(0, top)] == first
    page.close()


def test_a_site_in_a_file_whose_name_is_not_utf8_can_be_sent() -> None:
    """As every name with other letters than English ones under LC_ALL=C."""

    def ask() -> Any:
        return find_site()

    site, _ = FunctionType(ask.__code__.replace(co_filename="tr\udce4in.py"), globals())()
    assert site.text.startswith("tr?in.py:")
