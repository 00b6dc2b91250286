"""`launch(fn, workers=N)`: results, errors, and functions that only a notebook has."""

from __future__ import annotations

import functools
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from unisono.launchers import WorkerError, launch

pytestmark = pytest.mark.usefixtures("start")
only_fresh = pytest.mark.parametrize("start", ["fresh"], indirect=True)


def ranks_of(word: str, *, times: int = 1) -> tuple[str, int]:
    return word * times, int(os.environ["RANK"])


def test_results_come_back_in_rank_order():
    assert launch(ranks_of, 3, args=["ab"], kwargs={"times": 2}) == [("abab", 0), ("abab", 1), ("abab", 2)]


def test_lambdas_closures_and_large_data_travel_both_ways():
    data = bytes(5_000_000)
    results = launch(lambda: (int(os.environ["RANK"]), data + b"x"), workers=2)
    assert results == [(0, data + b"x"), (1, data + b"x")]


def test_no_main_guard_is_needed_and_classes_of_the_program_keep_their_identity(tmp_path):
    script = tmp_path / "program.py"
    script.write_text(
        "import os\n"
        "from unisono.launchers import launch\n"
        "print('once')\n"
        "class Point:\n"
        "    pass\n"
        "def work():\n"
        "    point = Point()\n"
        "    point.rank = int(os.environ['RANK'])\n"
        "    return point\n"
        "print([isinstance(p, Point) and p.rank for p in launch(work, workers=2)])\n"
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    ended = subprocess.run([sys.executable, str(script)], env=env, capture_output=True, text=True, timeout=60)
    assert (ended.stdout, ended.stderr) == ("once\n[0, 1]\n", "")


def test_output_goes_to_this_programs_streams_with_the_rank_in_front(capsys):
    launch(lambda: print("hello"), workers=2)
    assert sorted(capsys.readouterr().out.splitlines()) == ["[0] hello", "[1] hello"]
    launch(lambda: print("hello"), workers=2, output="rank0")
    assert capsys.readouterr().out == "hello\n"


def test_a_failing_worker_raises_one_report_and_stops_the_others(tmp_path, still_running):
    def work() -> None:
        from unisono.launchers.runtime import status

        (tmp_path / f"{os.environ['RANK']}.new").write_text(str(os.getpid()))
        (tmp_path / f"{os.environ['RANK']}.new").rename(tmp_path / os.environ["RANK"])  # whole, once it is seen
        while not (tmp_path / "0").exists():
            time.sleep(0.01)
        if os.environ["RANK"] == "1":
            status.note(step=7, doing="thinking")
            raise KeyError("missing")
        time.sleep(1000)

    with pytest.raises(WorkerError) as caught:
        launch(work, workers=2)
    error = caught.value
    assert (error.rank, error.exit_status, error.step) == (1, 1, 7)
    assert error.traceback.startswith("Traceback")
    assert "KeyError: 'missing'" in error.traceback
    assert "launchers" not in error.traceback.replace("from unisono.launchers", "")
    assert str(error).count("Traceback") == 1
    assert "last step 7, doing: thinking" in str(error)
    assert still_running(file.read_text() for file in tmp_path.iterdir()) == []


def test_source_lines_of_a_notebook_cell_are_in_the_traceback():
    import linecache

    text, name = "def cell():\n    raise ValueError(1 + 1)\n", "<cell 3>"
    linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
    namespace: dict[str, object] = {"__name__": "__main__"}
    exec(compile(text, name, "exec"), namespace)
    with pytest.raises(WorkerError, match=r"raise ValueError\(1 \+ 1\)"):
        launch(namespace["cell"], workers=1)  # type: ignore[arg-type]


def test_a_killed_or_vanished_worker_is_an_error():
    with pytest.raises(WorkerError, match="killed by SIGKILL") as caught:
        launch(lambda: os.kill(os.getpid(), signal.SIGKILL), workers=1)
    assert caught.value.exit_status == 137
    with pytest.raises(WorkerError, match="before the function returned"):
        launch(lambda: os._exit(0), workers=1)


def test_a_result_that_cannot_travel_is_named():
    with pytest.raises(WorkerError, match="the function returned lock, which cannot be sent back"):
        launch(threading.Lock, workers=1)


def test_timeout_says_what_the_workers_did(still_running, tmp_path):
    def work() -> None:
        from unisono.launchers.runtime import status

        status.note(step=3, doing="waiting for the data")
        (tmp_path / os.environ["RANK"]).write_text(str(os.getpid()))
        time.sleep(1000)

    with pytest.raises(TimeoutError, match="last step 3, doing: waiting for the data"):
        launch(work, workers=1, timeout_s=3)
    assert still_running(file.read_text() for file in tmp_path.iterdir()) == []


def test_works_from_a_thread():
    results: list[list[int]] = []
    thread = threading.Thread(target=lambda: results.append(launch(lambda: 5, workers=2)))
    thread.start()
    thread.join()
    assert results == [[5, 5]]


def test_ctrl_c_in_the_program_stops_the_workers(tmp_path, still_running):
    script = tmp_path / "program.py"
    script.write_text(
        "import os, pathlib, time\n"
        "from unisono.launchers import launch\n"
        "def work():\n"
        f"    path = pathlib.Path({str(tmp_path)!r}, 'pid-' + os.environ['RANK'])\n"
        "    path.write_text(str(os.getpid()) + '\\n')\n"
        "    time.sleep(1000)\n"
        "try:\n"
        "    launch(work, workers=2)\n"
        "except KeyboardInterrupt:\n"
        "    print('interrupted')\n"
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen([sys.executable, str(script)], env=env, stdout=subprocess.PIPE, text=True) as program:
        files = [tmp_path / "pid-0", tmp_path / "pid-1"]
        while not all(file.exists() and file.read_text().endswith("\n") for file in files):
            assert program.poll() is None
            time.sleep(0.01)
        program.send_signal(signal.SIGINT)
        assert program.communicate(timeout=30)[0] == "interrupted\n"
    assert still_running(file.read_text() for file in files) == []


def test_no_descriptor_and_no_child_is_left():
    launch(lambda: 1, workers=2)  # the first may start a fork server, which this process keeps
    before, children = len(os.listdir("/proc/self/fd")), Path(f"/proc/self/task/{os.getpid()}/children")
    kept = children.read_text().split()
    for _ in range(2):
        launch(lambda: 1, workers=2)
        with pytest.raises(WorkerError):
            launch(lambda: 1 / 0, workers=2)
        with pytest.raises(TimeoutError):
            launch(time.sleep, workers=1, args=[100], timeout_s=0.3)
    assert len(os.listdir("/proc/self/fd")) == before
    assert children.read_text().split() == kept


@only_fresh
@pytest.mark.parametrize(
    ("call", "kind", "words"),
    [
        (lambda: launch(len, workers=0), ValueError, "workers=0; expected a whole number from 1 up"),
        (lambda: launch(len, workers="2"), TypeError, "workers='2'; expected a whole number"),
        (lambda: launch("train", workers=2), TypeError, "got 'train' to run; expected a function"),
        (lambda: launch(len, workers=1, output="loud"), ValueError, "output='loud'; expected one of"),
        (lambda: launch(len, workers=1, timeout_s=-1), ValueError, "timeout_s=-1; expected seconds above 0"),
        (lambda: launch(len, workers=1, args=[threading.Lock()]), TypeError, "cannot be sent to workers"),
    ],
)
def test_bad_arguments_say_what_to_do(call, kind, words):
    with pytest.raises(kind, match=words):
        call()


@only_fresh
def test_without_cloudpickle_the_extra_is_named(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert launch(ranks_of, workers=1, args=["a"]) == [("a", 0)]
    with pytest.raises(TypeError, match=r"pip install unisono\[notebook\]"):
        launch(lambda: 1, workers=1)
    monkeypatch.setattr(ranks_of, "__module__", "__main__")
    with pytest.raises(TypeError, match="which workers do not import"):
        launch(functools.partial(ranks_of, "a"), workers=1)
