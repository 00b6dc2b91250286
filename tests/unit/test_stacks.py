"""Stacks in words, what a launcher says about a hang, and how it is asked."""

from __future__ import annotations

import doctest
import faulthandler
import json
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from unisono.launchers.control import Control, Gone, HangReports, ask_anything, find_launcher
from unisono.launchers.job import Job
from unisono.launchers.runtime import stacks
from unisono.launchers.runtime.local_channel import EventLoop
from unisono.launchers.runtime.run_folder import RunFolder
from unisono.launchers.runtime.stacks import StackFiles, WorkerStack, find_standing, judge
from unisono.launchers.runtime.status import StatusPage
from unisono.launchers.runtime.watchdog import Watchdog

HERE = Path(stacks.__file__).parents[2]
TORCH = Path(torch.__file__).parent


def stack(*frames: tuple[str | Path, int, str]) -> str:
    """A thread as faulthandler writes it, beside one of our own."""
    lines = ["Thread 0x2 (most recent call first):", f'  File "{HERE}/background.py", line 5 in _loop', ""]
    lines += ["Current thread 0x1 (most recent call first):"]
    lines += [f'  File "{file}", line {line} in {name}' for file, line, name in frames]
    return "\n".join([*lines, f'  File "{HERE}/launchers/worker/program.py", line 220 in main', ""])


WAITS = stack(
    (HERE / "world/transports/meeting_page.py", 200, "await_counter"),
    (HERE / "world/operations.py", 90, "wait"),
    ("/home/me/train.py", 88, "train"),
    ("/home/me/train.py", 120, "<module>"),
)
LOADS = stack(
    ("/home/me/data.py", 31, "__getitem__"),
    (TORCH / "utils/data/_utils/fetch.py", 54, "fetch"),
    (TORCH / "utils/data/dataloader.py", 700, "__next__"),
    ("/home/me/train.py", 80, "train"),
)
COMPUTES = stack((TORCH / "nn/functional.py", 9, "linear"), ("/home/me/model.py", 12, "forward"))


def test_docstring_examples_hold() -> None:
    assert doctest.testmod(stacks).failed == 0


def test_ranks_in_the_same_place_are_said_together_and_the_others_are_named() -> None:
    waiting = [WorkerStack(r, text=WAITS, doing="all_reduce gradients/0 (layer4.weight)") for r in (0, 1, 3)]
    text, verdicts = judge([*waiting, WorkerStack(2, text=LOADS)])
    assert text == (
        "3 ranks (0, 1, 3) wait in all_reduce gradients/0 (layer4.weight) at train.py:88; "
        "rank 2 is in its data loader at data.py:31"
    )
    assert [verdict[:3] for verdict in verdicts] == [(2, "hung loader", "data.py:31")]


@pytest.mark.parametrize(
    ("worker", "kind", "cause", "place"),
    [
        (WorkerStack(1, text=LOADS), "loader", "hung loader", "data.py:31"),
        (WorkerStack(1, text=COMPUTES), "code", "hung", "model.py:12"),
        (WorkerStack(1, text=COMPUTES, silent_s=60.0), "held", "held GIL", "model.py:12"),
        (WorkerStack(1, state="T", silent_s=60.0), "stopped", "hung", ""),
        (WorkerStack(1), "silent", "hung", ""),
    ],
)
def test_each_way_to_hang_is_told_apart(worker: WorkerStack, kind: str, cause: str, place: str) -> None:
    assert find_standing(worker)[:2] == (kind, place)
    _, verdicts = judge([WorkerStack(0, text=WAITS), worker])
    assert [verdict[:3] for verdict in verdicts] == [(1, cause, place)]


def test_a_loader_that_waits_for_its_processes_is_where_they_are() -> None:
    main = stack((TORCH / "utils/data/dataloader.py", 1200, "_get_data"), ("/home/me/train.py", 80, "train"))
    assert find_standing(WorkerStack(1, text=main)).place == "train.py:80"
    assert find_standing(WorkerStack(1, text=main, loaders=[LOADS])).place == "data.py:31"


def test_ranks_that_all_wait_in_different_calls_are_told() -> None:
    other = WAITS.replace("line 88", "line 95")
    text, verdicts = judge([WorkerStack(r, text=other if r == 2 else WAITS) for r in range(3)])
    assert "2 ranks (0, 1) wait in a collective at train.py:88; rank 2 waits in a collective at train.py:95" in text
    assert [verdict[:3] for verdict in verdicts] == [(2, "different collective", "train.py:95")]


def test_ranks_that_all_wait_in_one_call_blame_nobody() -> None:
    text, verdicts = judge([WorkerStack(r, text=WAITS) for r in range(3)])
    assert "what they send each other does not arrive" in text
    assert verdicts == []


def test_a_hang_is_said_once_at_each_time_and_recorded(tmp_path: Path) -> None:
    record = RunFolder.create(["train.py"], folder=tmp_path / "run", workers=2, command=["unisono"])
    said: list[str] = []
    found = [WorkerStack(0, 7, text=WAITS, doing="all_reduce x"), WorkerStack(1, 8, text=LOADS)]
    hangs = HangReports(Job(["train.py"], 2, record=record), lambda: (found, []), said.append)
    message = {"kind": "waiting", "what": "all_reduce x", "waited_s": 450.0, "deadline_s": 1800.0}
    for each in (message, message, {**message, "kind": "hang", "waited_s": 1795.0}, {"kind": "ready"}):
        hangs.take(each)
    assert [line.partition(";")[0] for line in said] == [
        "unisono: a collective has taken 450 s: rank 0 waits in all_reduce x at train.py:88",
        "unisono: a collective has taken 1795 s: rank 0 waits in all_reduce x at train.py:88",
    ]
    events = [json.loads(line) for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()]
    verdicts = [event for event in events if event["kind"] == "verdict"]
    assert [(v["rank"], v["cause"], v["place"]) for v in verdicts] == [(1, "hung loader", "data.py:31")] * 2
    assert "data.py" in (tmp_path / "run" / "hangs" / "2.txt").read_text()


def test_a_process_writes_its_stacks_when_it_gets_the_signal() -> None:
    """And another one that has no handler is left alone: see the test of processes."""
    files, page = StackFiles(), StatusPage.create(1)
    file, (ready, told) = files.open(0), os.pipe()
    child = os.fork()  # without the threads that other tests have left: faulthandler shows a hundred
    if child == 0:
        faulthandler.register(stacks.SIGNAL, file=file, all_threads=True)
        os.write(told, b"x")
        while True:
            time.sleep(60)
    try:
        os.read(ready, 1)
        (worker,) = files.gather({0: child}, page)
        assert "test_a_process_writes_its_stacks_when_it_gets_the_signal" in worker.text
        assert Path(__file__).name in find_standing(worker).place
        (again,) = files.gather({0: child}, page)
        assert len(again.text) < 2 * len(worker.text), "what was written before is forgotten"
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(ready)
        os.close(told)
        files.close()
        page.close()


def test_an_answer_may_be_longer_than_a_socket_takes_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UNISONO_WARM", str(tmp_path))
    tmp_path.chmod(0o700)
    loop, answers = EventLoop(), []
    control = Control(loop, lambda request: {"stacks": {"0": "x" * 5_000_000}})
    control.open()
    asking = threading.Thread(target=lambda: answers.append(ask_anything(os.getpid(), {"do": "stacks"})))
    asking.start()
    try:
        while asking.is_alive():
            loop.pump(0.05)
    finally:
        control.close()
        loop.close()
    assert len(answers[0]["stacks"]["0"]) == 5_000_000


def test_a_run_is_found_by_its_number_or_folder(tmp_path: Path) -> None:
    assert find_launcher(4711) == find_launcher("4711") == 4711
    record = RunFolder.create(["train.py"], folder=tmp_path / "run", workers=2, command=["unisono"])
    assert record is not None
    assert find_launcher(tmp_path / "run") == os.getpid()
    record.finish("ok", exit_status=0)
    for run, why in ((tmp_path / "run", "is over"), (tmp_path / "none", "no run")):
        with pytest.raises(Gone, match=why):
            find_launcher(run)


def test_a_watchdog_says_each_word_once() -> None:
    told: list[tuple[Any, ...]] = []
    watchdog = Watchdog(lambda *words: told.append(words), lambda: None)
    watchdog.enter("all_reduce x", 100.0)
    (wait,) = watchdog._waits.values()
    for after in (20.0, 26.0, 30.0, 94.0, 96.0, 99.0):
        watchdog.look(wait.began + after)
    assert [(kind, what, round(waited_s)) for kind, what, waited_s, _ in told] == [
        ("waiting", "all_reduce x", 26),
        ("hang", "all_reduce x", 96),
    ]
    watchdog.leave()
    watchdog.look(wait.began + 1000)
    assert len(told) == 2


def test_the_line_where_a_thread_is_most_often_is_found() -> None:
    begun, over = threading.Event(), threading.Event()

    def work() -> None:
        begun.set()
        over.wait()  # here

    thread = threading.Thread(target=work)
    thread.start()
    begun.wait()
    sampler = stacks.PlaceSampler(thread.ident or 0, 0.001)
    while sum(sampler._found.values()) < 3:
        threading.Event().wait(0.001)
    place = sampler.stop("code")
    over.set()
    thread.join()
    lines = Path(__file__).read_text().splitlines()
    assert place == f"{Path(__file__).name}:{next(i for i, t in enumerate(lines, 1) if t.endswith('# here'))}"
