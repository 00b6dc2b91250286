"""Hosts that ask to join a run: which places they get, and what they are refused for."""

from __future__ import annotations

import io
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from unisono.launchers import joining
from unisono.launchers.coordinator import Coordinator
from unisono.launchers.job import ElasticSettings, Job
from unisono.launchers.joining import CannotJoin, OpenPlaces, join_run, parse_address, read_secret
from unisono.launchers.runtime.channel import ChannelServer
from unisono.launchers.runtime.local_channel import EventLoop

TOKEN = bytes(range(32))


class Run:
    """What the places ask of a run: places 0 and 1 are the engine's, 2 is left to others."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.sent: list[dict[str, Any]] = []
        self.output = SimpleNamespace(say=self.lines.append)
        self.server: Any = SimpleNamespace(send=lambda channel, **fields: self.sent.append(fields))
        self.job = Job(["train.py"], 3, elastic=ElasticSettings(1, 3, later=1))
        coordinator = Coordinator(3, 1, members=[0, 1])
        self.elastic = SimpleNamespace(coordinator=coordinator, heartbeat_s=10.0)
        self.agents = {place: SimpleNamespace(rank=place) for place in (0, 1)}
        self.waiting: dict[int, Any] = {}
        self.has_begun, self.stop_time, self.offered_page = True, None, ""
        self.places = OpenPlaces(self, TOKEN)  # type: ignore[arg-type]

    def ask(self, channel: Any, workers: int = 1) -> dict[str, Any]:
        self.places.take(channel, {"workers": workers, "host": "c"})
        return self.sent[-1]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("print(1)\n")
    return Run()


def test_a_host_gets_the_place_that_the_engine_leaves_and_no_other_gets_it(run: Run) -> None:
    assert run.ask("c")["places"] == [2]
    answer = run.ask("d")
    assert answer["kind"] == "refused"
    assert answer["full"]
    assert "3 workers at most" in answer["why"]
    run.places.release("c")  # type: ignore[arg-type]
    assert run.ask("d")["places"] == [2]


def test_the_place_of_a_lost_agent_of_the_engine_is_free_once_the_run_has_begun(run: Run) -> None:
    del run.agents[0]
    assert run.ask("c", workers=2)["places"] == [2, 0]
    run.places.release("c")  # type: ignore[arg-type]
    run.has_begun = False
    assert "1 free, and 2 are asked for" in run.ask("c", workers=2)["why"]


def test_a_run_that_is_about_to_end_takes_nobody(run: Run) -> None:
    run.elastic.coordinator.ending = True
    assert run.ask("c") == {"kind": "refused", "why": "the run is about to end", "full": False}


def test_more_places_for_later_than_the_least_leaves_are_refused() -> None:
    with pytest.raises(ValueError, match="expected 0 to 2"):
        ElasticSettings(2, 4, later=3)


def test_the_secret_comes_from_a_file_standard_input_or_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "secret").write_text(TOKEN.hex() + "\n")
    assert read_secret(str(tmp_path / "secret")) == TOKEN
    monkeypatch.setattr(sys, "stdin", io.StringIO(TOKEN.hex()))
    assert read_secret("-") == TOKEN
    monkeypatch.setenv("UNISONO_SECRET", TOKEN.hex())
    assert read_secret(None) == TOKEN


@pytest.mark.parametrize(
    ("text", "why"),
    [("", "no secret in UNISONO_SECRET"), ("0123", "is no secret of a run"), ("zz" * 32, "no secret of")],
)
def test_what_is_no_secret_is_named(text: str, why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UNISONO_SECRET", text)
    with pytest.raises(CannotJoin, match=why):
        read_secret(None)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(CannotJoin, match="cannot be read from"):
        read_secret(str(tmp_path / "nowhere"))


@pytest.mark.parametrize("text", ["host", "host:", "host:0", "host:99999", ":80", "host:http"])
def test_an_address_without_a_port_is_named(text: str) -> None:
    with pytest.raises(ValueError, match="expected HOST:PORT"):
        parse_address(text)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"versions": {**joining.read_versions(), "torch": "1.0"}}, "has torch .*, the run has 1.0"),
        ({"versions": {**joining.read_versions(), "Unisono": "0.0"}}, "has Unisono .*, the run has 0.0"),
        ({"folder": "/there/is/none"}, "/there/is/none, where the run was started, cannot be used"),
        ({"digest": "0" * 64}, "train.py differs from that of the run"),
        ({"program": ["other.py"], "file": "other.py"}, "other.py is missing"),
    ],
)
def test_a_host_that_differs_is_refused_with_the_difference(run: Run, change: dict[str, Any], why: str) -> None:
    given = run.ask("c")
    joining._compare(given)
    with pytest.raises(CannotJoin, match=why):
        joining._compare({**given, **change})


@pytest.fixture
def address(run: Run) -> Iterator[tuple[str, int]]:
    """Where the run's launcher answers, from a thread."""
    import socket

    loop, listener = EventLoop(), socket.create_server(("127.0.0.1", 0))
    where, over = listener.getsockname(), threading.Event()
    server = run.server = ChannelServer(
        loop, listener, TOKEN, lambda c, frames: run.places.take(c, frames[0].json()), run.places.release
    )
    server.start()

    def serve() -> None:
        while not over.is_set():
            loop.pump(0.02)

    thread = threading.Thread(target=serve)
    thread.start()
    yield where
    over.set()
    thread.join()
    server.close()
    loop.close()


def test_a_wrong_secret_and_an_address_without_a_run_are_refused(run: Run, address: tuple[str, int]) -> None:
    with pytest.raises(CannotJoin, match="does not accept this secret"):
        join_run(address, bytes(32))
    with pytest.raises(CannotJoin, match=r"nothing listens at 127.0.0.1:1: the run is over"):
        join_run(("127.0.0.1", 1), TOKEN)
    with pytest.raises(CannotJoin, match="2 are asked for"):
        join_run(address, TOKEN, workers=2)
