"""The launcher's parts: lines, the choice of the first failure, the status page, the environment."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from types import SimpleNamespace

import pytest

from unisono.launchers import fork_context, forks, guard, launch, launch_function, processes
from unisono.launchers.failures import Failure, first_failure
from unisono.launchers.job import Job
from unisono.launchers.output import Lines, Output
from unisono.launchers.runtime import status
from unisono.launchers.runtime.local_channel import LocalChannel


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
def test_lines_do_not_depend_on_how_the_stream_was_cut(size):
    stream = b"one\n\ntwo\r\nbar 1\rbar 2\rbar 3\n\xff\xfe\nlast"
    lines, got = Lines(), []
    for start in range(0, len(stream), size):
        got += lines.feed(stream[start : start + size])
    assert got + lines.flush() == [b"one", b"", b"two", b"bar 3", b"\xff\xfe", b"last"]


def test_a_progress_bar_is_shown_now_and_then_and_takes_no_memory(monkeypatch):
    now = 0.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    lines, got = Lines(), []
    for i in range(10_000):
        now = i / 1000  # ten seconds in all
        got += lines.feed(b"\r%5d" % i)
    assert 9 <= len(got) <= 10
    assert len(lines._rest) < 20
    assert lines.flush() == [b" 9999"]


def test_what_workers_elsewhere_print_goes_to_files_too(tmp_path, capfd):
    (tmp_path / "rank-1.out").write_text("of a run before\n")
    output = Output("files", 2, tmp_path, inherit=False)
    assert output.unseen(0) == []  # it has printed nothing
    output.feed(1, "stdout", b"one\ntw")
    output.feed(1, "stdout", b"o\nthree")
    output.flush(1)
    assert (tmp_path / "rank-1.out").read_text() == "one\ntwo\nthree\n"
    assert output.unseen(1) == ["one", "two", "three"]
    assert capfd.readouterr() == ("", "")


def test_what_a_lost_worker_here_wrote_stays_in_its_file(tmp_path):
    (tmp_path / "rank-0.out").write_text("of a run before\n")
    output = Output("files", 1, tmp_path, inherit=False)
    for text in (b"the one that was lost\n", b"its replacement\n"):
        with output.open(0)["stdout"] as file:
            file.write(text)
    assert output.unseen(0) == ["the one that was lost", "its replacement"]


def test_a_line_without_end_is_passed_on_in_pieces():
    lines = Lines()
    pieces = [piece for _ in range(300) for piece in lines.feed(b"x" * 10_000)] + lines.flush()
    assert b"".join(pieces) == b"x" * 3_000_000


def failed(rank: int, time: float, kind: str = "exception", *names: str, message: str = "") -> Failure:
    return Failure(rank, time, kind, 1, names or ("ValueError",), message)  # type: ignore[arg-type]


def test_the_earliest_failure_is_the_first():
    assert first_failure([failed(0, 5.0), failed(1, 4.9), failed(2, 6.0)]).rank == 1


@pytest.mark.parametrize(
    "consequence",
    [
        failed(0, 4.0, "exception", "PeerLost", "RuntimeError"),
        failed(0, 4.0, "exception", "MyPeerLost", "PeerLost", "RuntimeError"),
        failed(
            0, 4.0, "exception", "RuntimeError", message="[gloo/transport/tcp/pair.cc:534] Connection closed by peer"
        ),
        failed(0, 4.0, "exception", "RuntimeError", message="GroupPeerLost: rank 1 (process 7) has died: killed"),
        failed(0, 4.0, "signal", message="SIGABRT"),
    ],
)
def test_a_cause_within_a_second_goes_before_its_consequence(consequence):
    assert first_failure([consequence, failed(1, 4.8, "signal", message="SIGKILL")]).rank == 1
    assert first_failure([consequence, failed(1, 4.8)]).rank == 1
    assert first_failure([consequence, failed(1, 5.2)]).rank == 0
    assert first_failure([consequence]).rank == 0


def test_status_is_read_as_it_was_noted():
    page = status.StatusPage.create(3)
    code = (
        "from unisono.launchers.runtime import status\n"
        "status.note(step=41, doing='old')\nstatus.note(step=42)\nstatus.note(doing='é' * 500)\n"
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "RANK": "1", "UNISONO_STATUS_FD": str(page.fd)}
    subprocess.run([sys.executable, "-c", code], env=env, pass_fds=[page.fd], check=True)
    assert page.read(1).step == 42
    assert page.read(1).doing == "é" * 88  # cut to the room there is
    assert page.read(0) == page.read(2) == status.WorkerStatus(None, "", 0.0)
    page.close()


def test_note_does_nothing_outside_a_launcher_or_with_another_file_behind_the_descriptor(tmp_path):
    status.note(step=1, doing="nothing")
    (tmp_path / "file").write_bytes(b"not a page" * 100)
    with open(tmp_path / "file", "r+b") as file:
        env = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(sys.path),
            "RANK": "0",
            "UNISONO_STATUS_FD": str(file.fileno()),
        }
        code = "from unisono.launchers.runtime import status\nstatus.note(step=1, doing='x')"
        subprocess.run([sys.executable, "-c", code], env=env, pass_fds=[file.fileno()], check=True)
    assert (tmp_path / "file").read_bytes() == b"not a page" * 100


def test_threads_are_shared_fairly_unless_set(monkeypatch):
    monkeypatch.setattr(processes, "usable_cores", lambda: 8)
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)

    def threads(workers: int, asked: int | None = None) -> tuple[str | None, str | None]:
        made = processes.worker_environment(0, workers, address=("127.0.0.1", 1), run_id="x", threads=asked)
        return made.get("OMP_NUM_THREADS"), made.get("MKL_NUM_THREADS")

    assert threads(3) == ("2", "2")
    assert threads(16) == ("1", "1")
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    assert threads(3) == ("5", None)
    assert threads(3, asked=4) == ("4", "4")


def test_workers_keep_freed_memory_unless_the_user_set_the_allocator(monkeypatch):
    names = ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_")
    for name in names:
        monkeypatch.delenv(name, raising=False)

    def allocator() -> list[str | None]:
        made = processes.worker_environment(0, 2, address=("127.0.0.1", 1), run_id="x")
        return [made.get(name) for name in names]

    assert allocator() == [str(32 << 20), str(1 << 30)]
    for i, name in enumerate(names):
        with monkeypatch.context() as context:
            context.setenv(name, "65536")
            assert allocator() == [("65536" if k == i else None) for k in range(2)]


def test_a_run_inside_a_worker_of_another_run_belongs_to_both(monkeypatch):
    monkeypatch.setenv("UNISONO_RUN", "outer")
    monkeypatch.setenv("UNISONO_SHM_FD", "99")
    made = processes.worker_environment(1, 2, address=("127.0.0.1", 1), run_id="inner")
    assert made["UNISONO_RUN"] == "outer:inner"
    assert "UNISONO_SHM_FD" not in made


def test_ones_own_group_may_be_among_the_supplementary_ones_or_not(monkeypatch):
    """A job of Slurm's and the root of a container differ in this only, and share a fork server."""
    contexts = []
    for groups in ([], [os.getegid()], [os.getegid() + 1]):
        monkeypatch.setattr(os, "getgroups", lambda groups=groups: groups)
        contexts.append(fork_context.process_context())
    assert contexts[0] == contexts[1]
    assert fork_context.find_difference(contexts[0], contexts[2]) == "users and groups"


def test_a_fork_server_that_is_slow_is_not_taken_for_the_end_of_a_jobs_time(monkeypatch):
    monkeypatch.setattr(forks, "_ANSWER_S", 0.01)
    ours, theirs = LocalChannel.pair()
    starter, command = forks.ForkStarter(ours), processes.Command(["train.py"], {})
    with pytest.raises(RuntimeError, match=r"has not answered for 0\.01 s; UNISONO_WARM=0"):
        starter.fork(command, None)
    with pytest.raises(TimeoutError):
        starter.fork(command, 0.001)
    starter.close()
    theirs.close()


@pytest.mark.parametrize(
    ("run_id", "sessions"), [("", []), ("x", []), ("a" * 24 + "\n", []), ("a" * 24, [0]), ("a" * 24, [1])]
)
def test_what_is_no_run_is_never_swept(run_id, sessions):
    with pytest.raises(ValueError, match="expected 24 hex digits"):
        guard.members(run_id, sessions)


def test_a_process_belongs_to_a_run_by_a_whole_word_of_one_variable_or_by_its_session():
    mine, other = "a" * 24, "b" * 24

    def start(session: bool = False, **env: str) -> subprocess.Popen[bytes]:
        return subprocess.Popen(["sleep", "60"], env={**os.environ, **env}, start_new_session=session)

    inside = [start(UNISONO_RUN=mine), start(UNISONO_RUN=f"{other}:{mine}"), start(session=True)]
    outside = [start(UNISONO_RUN=other), start(UNISONO_RUN=mine + "a"), start(OTHER_VARIABLE=mine), start()]
    try:
        assert set(guard.members(mine, [inside[2].pid])) == {process.pid for process in inside}
        guard.sweep(mine, [inside[2].pid], patience_s=0.02)
        assert [process.wait(timeout=10) for process in inside] == [-signal.SIGTERM] * 3
        assert [process.poll() for process in outside] == [None] * 4
    finally:
        for process in inside + outside:
            process.kill()
            process.wait()


def test_workers_of_an_elastic_call_are_forked_also_in_a_program_without_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = []

    def note(job: Job) -> None:
        jobs.append(job)
        raise InterruptedError

    monkeypatch.setattr(launch_function, "LocalRun", note)
    monkeypatch.setattr(launch_function, "sys", SimpleNamespace(modules={}, path=[], argv=[]))
    for least in (None, 1):
        with pytest.raises(InterruptedError):
            launch(int, workers=2, least=least)
    assert [job.start for job in jobs] == ["fresh", "fork"]
