"""`unisono run`: what a program sees, its output, its failures, and that nothing outlives a run."""

from __future__ import annotations

import json
import os
import pathlib
import pty
import signal
import subprocess
import sys

import pytest

from unisono.launchers import supervisor

pytestmark = pytest.mark.usefixtures("start")
only_fresh = pytest.mark.parametrize("start", ["fresh"], indirect=True)
PRELUDE = """
import os, signal, subprocess, sys, time
from pathlib import Path
RANK = int(os.environ["RANK"])
def ready(*pids):
    Path(f"not-yet-{RANK}").write_text(" ".join(map(str, (os.getpid(), *pids))) + "\\n")
    os.replace(f"not-yet-{RANK}", f"ready-{RANK}")  # whole, once it is seen
def all_ready():
    while not all(Path(f"ready-{rank}").exists() for rank in range(int(os.environ["WORLD_SIZE"]))):
        time.sleep(0.01)
"""


# -- what a program sees -------------------------------------------------------------------------------------------


def test_script_sees_ordinary_arguments_main_and_path(run_script, tmp_path):
    (tmp_path / "neighbour.py").write_text("WORD = 'found'\n")
    status, out, err = run_script(
        """
        import json, os, sys
        import neighbour
        names = "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "OMP_NUM_THREADS"
        facts = [sys.argv[1:], __name__, __file__, sys.path[0], neighbour.WORD, sys.modules["__main__"].__name__]
        print(json.dumps([*facts, {name: os.environ[name] for name in names}]))
        """,
        "-n",
        "2",
        "--threads",
        "3",
        args=["-n", "7", "--", "x y"],
    ).finish()
    assert (status, err) == (0, "")
    for rank, line in enumerate(sorted(out.splitlines())):
        assert line.startswith(f"[{rank}] ")
        argv, name, file, path, word, main, env = json.loads(line[4:])
        assert argv == ["-n", "7", "--", "x y"]
        assert (name, main, word) == ("__main__", "__main__", "found")
        assert (file, path) == (str(tmp_path / "script.py"), str(tmp_path))
        expected = {"RANK": rank, "WORLD_SIZE": 2, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": 2, "OMP_NUM_THREADS": 3}
        assert env == {"MASTER_ADDR": "127.0.0.1", **{key: str(value) for key, value in expected.items()}}


def test_module_runs_with_its_own_options(run_command, tmp_path):
    (tmp_path / "project").mkdir()
    (tmp_path / "project" / "train.py").write_text("import sys; print(__name__, __spec__.name, sys.argv[1:])\n")
    status, out, err = run_command("run", "-n", "1", "-m", "project.train", "--lr", "0.1", "-n", "3")
    assert (status, err) == (0, "")
    assert out == "__main__ project.train ['--lr', '0.1', '-n', '3']\n"  # one worker: no prefix


@only_fresh
def test_neither_launcher_nor_worker_imports_torch_by_itself(run_script):
    status, out, err = run_script(
        """
        import os, sys
        maps = open(f"/proc/{os.getppid()}/maps").read()
        print("torch" in sys.modules, "unisono" in sys.modules, "libtorch" in maps)
        """,
        "-n",
        "1",
    ).finish()
    assert (status, out, err) == (0, "False False False\n", "")


def test_plain_torch_distributed_script_meets_in_the_launchers_store(run_script):
    status, out, err = run_script(
        """
        import torch, torch.distributed as dist
        dist.init_process_group("gloo")
        x = torch.tensor([float(dist.get_rank() + 1)])
        dist.all_reduce(x)
        print(x.item(), flush=True)
        dist.destroy_process_group()
        """,
        "-n",
        "2",
    ).finish()
    assert (status, sorted(out.splitlines())) == (0, ["[0] 3.0", "[1] 3.0"]), err


# -- output --------------------------------------------------------------------------------------------------------


def test_prefix_shows_whole_lines_with_bars_partial_lines_and_any_bytes(run_script):
    status, out, err = run_script(
        PRELUDE
        + """
sys.stdout.buffer.write(b"caf\\xff\\nbar 1%\\rbar 2%\\rbar 3%\\nwindows\\r\\nno newline at the end")
sys.stdout.flush()
print("to stderr", file=sys.stderr)
""",
        "-n",
        "2",
    ).finish()
    assert status == 0
    for rank in (0, 1):
        mine = [line[4:] for line in out.splitlines() if line.startswith(f"[{rank}] ")]
        assert mine == ["caf\ufffd", "bar 3%", "windows", "no newline at the end"]
    assert sorted(err.splitlines()) == ["[0] to stderr", "[1] to stderr"]


def test_rank0_output_hides_the_others_until_one_fails(run_script):
    text = """
for i in range(100):
    print(f"rank {RANK} line {i}")
if RANK == 1 and "fail" in sys.argv:
    raise ValueError("told to")
"""
    assert run_script(PRELUDE + text, "-n", "2", "--output", "rank0").finish() == (
        0,
        "".join(f"rank 0 line {i}\n" for i in range(100)),
        "",
    )
    status, out, err = run_script(PRELUDE + text, "-n", "2", "--output", "rank0", args=["fail"]).finish()
    assert status == 1
    assert "rank 1" not in out
    kept = [line.strip() for line in err.splitlines() if line.strip().startswith("rank 1 line")]
    assert kept == [f"rank 1 line {i}" for i in range(60, 100)]


def test_files_take_both_streams_and_the_report_names_the_last_lines(run_script, tmp_path):
    status, out, err = run_script(
        PRELUDE
        + """
print("out", RANK)
print("err", RANK, file=sys.stderr)
ready()
all_ready()
if RANK:
    sys.exit(4)
time.sleep(1000)
""",
        "-n",
        "2",
        "--output",
        "files",
        "--output-dir",
        "logs",
    ).finish()
    assert (status, out) == (4, "")
    assert (tmp_path / "logs" / "rank-0.out").read_text() == "out 0\nerr 0\n"
    assert (tmp_path / "logs" / "rank-1.out").read_text() == "out 1\nerr 1\n"
    assert "Last output of rank 1:\n  out 1\n  err 1" in err


def test_on_a_terminal_rank_0_has_the_terminal_itself(run_script):
    ours, theirs = pty.openpty()
    launched = run_script(
        PRELUDE + "os.write(1, f'RANK {RANK} {sys.stdout.isatty()}\\n'.encode())",  # print may write a line in pieces
        "-n",
        "2",
        stdout=theirs,
        stderr=subprocess.DEVNULL,
    )
    os.close(theirs)
    status, _, _ = launched.finish()
    shown = os.read(ours, 65536).decode()
    os.close(ours)
    assert status == 0
    assert sorted(shown.splitlines()) == ["\x1b[33m[1]\x1b[0m RANK 1 False", "RANK 0 True"]


@only_fresh
def test_huge_output_from_all_ranks_on_both_streams_arrives_whole(run_script):
    status, out, err = run_script(
        PRELUDE
        + """
for i in range(500):
    print("x" * 9_999)
    print("y" * 9_999, file=sys.stderr)
print("z" * 3_000_000)
""",
        "-n",
        "2",
    ).finish()
    assert status == 0
    assert out.count("x") == err.count("y") == 2 * 500 * 9_999
    assert out.count("z") == 2 * 3_000_000


def test_a_run_whose_standard_streams_are_closed_trains(tmp_path):
    """As under a supervisor that starts it with `>&-`: no file or pipe of the run takes their places."""
    (tmp_path / "script.py").write_text('import os; open("ran-" + os.environ["RANK"], "w").write("x"); print("y")')
    closed = f"exec {sys.executable} -m unisono run -n 2 script.py <&- >&- 2>&-"
    assert subprocess.run(["sh", "-c", closed], cwd=tmp_path, check=False).returncode == 0
    assert sorted(path.name for path in tmp_path.glob("ran-*")) == ["ran-0", "ran-1"]


def test_workers_stop_when_nobody_reads_the_output(run_script, still_running):
    launched = run_script(PRELUDE + "ready()\nwhile True: print('x' * 1000)", "-n", "2")
    pids = launched.wait_for_files("ready-0", "ready-1")
    launched.process.stdout.close()
    assert launched.process.wait(timeout=120) == 128 + signal.SIGPIPE
    assert still_running(pids) == []


@pytest.mark.parametrize("options", [["-n", "2"], ["-n", "1:2"]], ids=["fixed", "come and go"])
def test_a_quiet_run_ends_when_whoever_started_it_is_gone(run_script, still_running, options):
    launched = run_script(PRELUDE + "ready()\ntime.sleep(1000)", *options, "--warm")
    pids = launched.wait_for_files("ready-0", *(["ready-1"] if options == ["-n", "2"] else []))
    launched.process.stdout.close()
    launched.process.stderr.close()
    assert launched.process.wait(timeout=120) == 128 + signal.SIGHUP
    assert still_running(pids) == []


# -- failure -------------------------------------------------------------------------------------------------------


def test_exception_in_one_rank_gives_one_report_and_stops_the_others(run_script, still_running):
    launched = run_script(
        PRELUDE
        + """
from unisono.launchers.runtime import status
def train():
    status.note(step=1234, doing="all_reduce grads/3")
    raise ValueError(" ".join(["the", "batch", "is", "bad"]))
ready()
all_ready()
if RANK == 1:
    train()
time.sleep(1000)
""",
        "-n",
        "3",
    )
    status, out, err = launched.finish()
    assert (status, out) == (1, "")
    for text in ("Traceback", "the batch is bad", "last step 1234", "doing: all_reduce grads/3", "in train", "failed"):
        assert err.count(text) == 1, err
    assert "worker 1 of 3 failed: ValueError" in err
    assert "runpy" not in err
    assert "worker.py" not in err
    assert "Ranks 0, 2 were stopped." in err
    assert still_running(launched.written("ready-0", "ready-2")) == []


def test_an_error_is_shown_once_although_torch_has_a_hook_for_it(run_script):
    text = """
        import sys, time, torch.distributed as dist
        sys.excepthook = lambda kind, error, frames: print("told of", error, file=sys.stderr)
        dist.init_process_group("gloo")
        dist.barrier()
        if dist.get_rank() == 1:
            raise ValueError("bad batch")
        time.sleep(1000)
    """
    _, _, err = run_script(text, "-n", "2").finish()
    assert (err.count("Traceback"), err.count("told of bad batch"), err.count("[rank1]")) == (1, 1, 0), err


@pytest.mark.parametrize(
    ("code", "status", "words"),
    [
        ("os._exit(7)", 7, "exit status 7"),
        ("sys.exit(3)", 3, "exit status 3"),
        ("sys.exit('no data here')", 1, "no data here"),
        ("os.kill(os.getpid(), signal.SIGKILL)", 137, "out-of-memory"),
        ("import ctypes; ctypes.string_at(0)", 139, "SIGSEGV"),
        ("1 / 0", 1, "ZeroDivisionError: division by zero"),
        ("x = (", 1, "SyntaxError"),
    ],
)
def test_exit_status_and_report_follow_the_worker_that_failed(run_script, code, status, words):
    text = "time.sleep(1000) if RANK == 0 else None\n" + code if code != "x = (" else code
    got, out, err = run_script(PRELUDE + text, "-n", "2").finish()
    assert (got, out) == (status, "")
    assert words in err
    assert err.count("unisono: worker") == 1
    assert err.count("Traceback") == (1 if status == 1 and "Error" in words and "Syntax" not in words else 0)


def test_native_crash_shows_the_python_line(run_script):
    _, _, err = run_script("import ctypes\ndef touch():\n    ctypes.string_at(0)\ntouch()\n", "-n", "1").finish()
    assert 'script.py", line 3 in touch' in err
    assert "runpy" not in err
    assert "launchers" not in err


def test_first_cause_is_reported_though_a_consequence_arrives_first(run_script):
    status, _, err = run_script(
        PRELUDE
        + """
class PeerLost(RuntimeError):
    pass
if RANK == 0:
    raise PeerLost("rank 1 has gone")
time.sleep(0.4)
raise KeyError("the true cause")
""",
        "-n",
        "2",
    ).finish()
    assert status == 1
    assert "worker 1 of 2 failed: KeyError" in err
    assert err.count("Traceback") == 1
    assert "Rank 0 failed as well (PeerLost: rank 1 has gone)." in err


def test_sys_exit_0_and_ranks_that_end_early_are_no_failure(run_script):
    status, out, err = run_script(PRELUDE + "if RANK: sys.exit(0)\ntime.sleep(0.5)\nprint('done')", "-n", "3").finish()
    assert (status, out, err) == (0, "[0] done\n", "")


def test_a_killed_worker_is_named_with_its_signal(run_script, still_running):
    launched = run_script(PRELUDE + "ready()\ntime.sleep(1000)", "-n", "2")
    pids = launched.wait_for_files("ready-0", "ready-1")
    os.kill(int(pids[1]), signal.SIGKILL)
    status, _, err = launched.finish()
    assert status == 137
    assert f"worker 1 of 2 failed: killed by SIGKILL\n  rank 1, host {os.uname().nodename}, pid {pids[1]}" in err
    assert still_running(pids) == []


# -- interruption, and nothing left --------------------------------------------------------------------------------

STUBBORN = """
child = subprocess.Popen(["sleep", "1000"])
daemon = subprocess.Popen(["setsid", "sleep", "1000"])
nameless = subprocess.Popen(["env", "-i", "sleep", "1000"])
if RANK == 1:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
try:
    ready(child.pid, daemon.pid, nameless.pid)
    while True:
        time.sleep(0.1)
finally:
    Path(f"finally-{RANK}").touch()
"""


def wait_for_child(launched):
    children = f"/proc/{launched.process.pid}/task/{launched.process.pid}/children"
    while launched.process.poll() is None:
        with open(children) as file:
            if file.read().split():
                return


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_interruption_ends_stubborn_workers_and_their_children_in_2_s(run_script, still_running, tmp_path, signum):
    launched = run_script(PRELUDE + STUBBORN, "-n", "2")
    pids = " ".join(launched.wait_for_files("ready-0", "ready-1")).split()
    launched.signal(signum)
    status, out, err = launched.finish()
    assert still_running(pids) == []
    assert supervisor._AFTER_INTERRUPT[-1][0] < 2, "then they are killed: the rest of the 2 s is for a busy machine"
    assert (status, out) == (128 + signum, "")
    assert err.count("\n") == 1
    assert err.startswith(f"unisono: interrupted ({signum.name}); 2 workers stopped in")
    assert (tmp_path / "finally-0").exists(), "the first signal is SIGINT, so that `finally` runs"


@only_fresh
def test_a_worker_that_began_unnoticed_may_tidy_up_after_ctrl_c(run_script, tmp_path):
    """Its report waits in the pipe, as the launcher of a busy machine has not come to it."""
    launched = run_script(PRELUDE + STUBBORN, "-n", "1")
    sleeps_in = pathlib.Path(f"/proc/{launched.process.pid}/wchan")
    while "poll" not in sleeps_in.read_text():  # it has started the worker, and waits for its reports
        assert launched.process.poll() is None
        if (tmp_path / "ready-0").exists():
            pytest.skip("the kernel does not say where a process sleeps")
    launched.signal(signal.SIGSTOP)
    launched.wait_for_files("ready-0")
    launched.signal(signal.SIGINT)
    launched.signal(signal.SIGCONT)
    status, out, err = launched.finish()
    assert (status, out) == (130, ""), err
    assert (tmp_path / "finally-0").exists()


def test_launcher_killed_leaves_no_process(run_script, still_running):
    launched = run_script(PRELUDE + STUBBORN, "-n", "2")
    pids = " ".join(launched.wait_for_files("ready-0", "ready-1")).split()
    launched.signal(signal.SIGKILL)
    launched.process.wait()
    assert still_running(pids, within_s=10) == []


@pytest.mark.parametrize("ending", ["", "raise ValueError", "os.kill(os.getpid(), signal.SIGKILL)"])
def test_children_of_workers_do_not_outlive_the_run(run_script, still_running, ending):
    text = 'child = subprocess.Popen(["setsid", "sleep", "1000"])\nready(child.pid)\nall_ready()\n'
    launched = run_script(PRELUDE + text + ending, "-n", "2")
    launched.finish()
    assert still_running(" ".join(launched.written("ready-0")).split()) == []


def test_ctrl_c_before_the_workers_have_begun_is_quiet(run_script):
    launched = run_script("import time\ntime.sleep(1000)", "-n", "4")
    wait_for_child(launched)
    launched.signal(signal.SIGINT)
    status, out, err = launched.finish()
    assert (status, out) == (130, ""), err
    assert err.count("\n") == 1
    assert "Traceback" not in err


@pytest.mark.parametrize("how", ["exception", "SIGINT"])
def test_shared_memory_of_data_loaders_is_removed(run_script, how):
    launched = run_script(
        PRELUDE
        + """
import torch
from torch.utils.data import DataLoader, TensorDataset
torch.multiprocessing.set_sharing_strategy("file_system")
batches = iter(DataLoader(TensorDataset(torch.zeros(100_000, 10)), batch_size=10, num_workers=1))
next(batches)
ready(*(worker.pid for worker in batches._workers))
all_ready()
if "exception" in sys.argv and RANK == 1:
    raise ValueError
time.sleep(1000)
""",
        "-n",
        "2",
        args=[how],
    )
    if how == "SIGINT":
        launched.wait_for_files("ready-0", "ready-1")
        launched.signal(signal.SIGINT)
    launched.finish()
    pids = " ".join(launched.written("ready-0", "ready-1")).split()
    assert [name for name in os.listdir("/dev/shm") if name.startswith("torch_") and name.split("_")[1] in pids] == []


# -- bad input -----------------------------------------------------------------------------------------------------


@only_fresh
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["-n", "0", "train.py"], "got '0'; expected a whole number from 1 up"),
        (["-n", "two", "train.py"], "got 'two'; expected a whole number from 1 up"),
        (["train.py"], "no number of workers given"),
        (["-n", "2"], "no program given"),
        (["-n", "2", "tain.py"], "did you mean train.py?"),
        (["-n", "2", "folder"], "folder without __main__.py"),
        (["-n", "2", "-m", "no_such_module.x"], "no module named 'no_such_module'"),
        (["-n", "2", "--output", "wrong", "train.py"], "invalid choice: 'wrong'"),
        (["-n", "2", "--output-dir", "x", "train.py"], "goes with --output files"),
    ],
)
def test_bad_command_lines_say_what_to_do(tmp_path, monkeypatch, capsys, arguments, words):
    from unisono.cli import main

    (tmp_path / "train.py").touch()
    (tmp_path / "folder").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as stop:
        main(["run", *arguments])
    assert stop.value.code == 2
    assert words in capsys.readouterr().err


@only_fresh
def test_version_and_strategies_need_no_torch(run_command):
    status, out, _ = run_command("--version")
    assert (status, out.split()[0].strip(",")) == (0, "unisono")
    status, out, _ = run_command("strategies")
    assert status == 0
    assert "strategies:" in out


# -- worlds --------------------------------------------------------------------------------------------------------

JOIN = """
import torch, unisono as un
world = un.join()
total = world.all_reduce(torch.tensor([world.rank + 1.0]), "sum").wait().item()
print(f"total {total} of {world.size} over {world.transport.name}\\n", end="")
world.close()
"""


@pytest.mark.parametrize(("shares", "over"), [("1", "shared memory"), ("0", "messages")])
def test_join_meets_under_our_launcher(run_script, monkeypatch, shares, over):
    monkeypatch.setenv("UNISONO_SHARED_MEMORY", shares)
    status, out, err = run_script(JOIN, "-n", "2").finish()
    wanted = [f"[{rank}] total 3.0 of 2 over {over}" for rank in range(2)]
    assert (status, sorted(out.splitlines())) == (0, wanted), err


@only_fresh
def test_workers_that_come_and_go_on_one_host_need_shared_memory(tmp_path, monkeypatch, capsys):
    from unisono.cli import main

    (tmp_path / "train.py").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("UNISONO_SHARED_MEMORY", "0")
    with pytest.raises(SystemExit):
        main(["run", "-n", "1:2", "train.py"])
    assert "unset UNISONO_SHARED_MEMORY" in capsys.readouterr().err
