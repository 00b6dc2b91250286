"""The lab's command line and what it refuses; what killed runs left, and how it is found."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import unisono as un
from unisono.cli.command_line import main
from unisono.launchers.lab import engine, hosts
from unisono.launchers.lab.engine import Lab, measure_wire
from unisono.launchers.runtime.link_emulation import Link


@pytest.fixture
def script(tmp_path: Path) -> str:
    names = ["UNISONO_HOST", "UNISONO_NET", "LOCAL_RANK", "LOCAL_WORLD_SIZE"]
    (tmp_path / "script.py").write_text(f"import os\nprint(*[os.environ[name] for name in {names}])\n")
    return str(tmp_path / "script.py")


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (["-n", "2", "--net", "fast"], "'fast' is no rate"),
        (["--hosts", "0"], "got --hosts 0; expected a number of emulated hosts"),
        (["--hosts", "-1"], "got --hosts -1; expected a number of emulated hosts"),
        (["--hosts", "1000"], "expected a number of emulated hosts, 1 to 200"),
        (["-n", "2", "--hosts", "4"], "got 4 hosts and 2 workers"),
        (["-n", "1", "--hosts", "2"], "got 2 hosts and 1 worker;"),
        (["--net", "1gbit"], "no number of workers given"),
        (["-n", "2", "--on", "ray", "--net", "1gbit"], "--net does not go with --on ray"),
        (["-n", "4", "--on", "lab", "--hosts", "a:2,b:2"], "got --hosts a:2,b:2; expected a number of emulated hosts"),
        (["-n", "4", "--hosts", "a:2,b:2"], "--hosts does not go with --on local"),
        (["--hosts", "2", "--net", "1gbit/1gbit/1gbit"], "names the links of 3 hosts, and there are 2"),
    ],
)
def test_what_cannot_be_is_refused(
    script: str, options: list[str], why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["run", *options, script])
    assert ended.value.code == 2
    assert why in capsys.readouterr().err


def test_a_rate_out_of_reach_is_an_error_that_names_what_is_reached(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(engine, "measure_wire", lambda links: ([4e9] * len(links), 1e-5))
    with pytest.raises(un.EngineError, match=r"asked for 100 Gbit/s, and 4 Gbit/s pass .* of all 2 hosts"):
        Lab(net="100gbit", shaper="transport").open(2)
    assert "warning" not in capsys.readouterr().err
    Lab(net="6gbit", shaper="transport").open(2)
    assert "warning: host0 was asked for 6 Gbit/s, and 4 Gbit/s pass" in capsys.readouterr().err
    Lab(hosts=3, net="2x4gbit/1gbit,2ms", shaper="transport").open(3)
    assert capsys.readouterr().err.splitlines() == [
        "unisono: 3 emulated hosts, hosts 0, 1: asked 4 Gbit/s, measured 4 Gbit/s of payload, latency 0.01 ms",
        "unisono: 3 emulated hosts, host 2: asked 1 Gbit/s, 2 ms, measured 4 Gbit/s of payload, latency 0.01 ms",
    ]


def test_no_more_passes_over_an_emulated_link_than_was_asked_for() -> None:
    rates, latency_s = measure_wire([Link(50e6, 0.01), Link(5e6)])
    assert rates[0] < 50e6
    assert rates[1] < 5e6
    assert latency_s >= 0.005  # half of it on the first link, nothing on the second


def test_without_namespaces_the_transport_shapes_and_it_is_said_so(script: str, tmp_path: Path) -> None:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "PATH": str(tmp_path)}
    command = [sys.executable, "-m", "unisono", "run", "-n", "3", "--hosts", "2", "--net", "50mbit,1ms", script]
    ended = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
    assert sorted(ended.stdout.splitlines()) == [
        "[0] host0 50mbit,1ms 0 2",
        "[1] host0 50mbit,1ms 1 2",
        "[2] host1 50mbit,1ms 0 1",
    ]
    assert (
        "`ip` is not installed: apt-get install iproute2; the workers' own transport throttles the links"
        in ended.stderr
    )
    ended = subprocess.run([*command[:-1], "--shaper", "kernel", script], env=env, capture_output=True, text=True)
    assert ended.returncode == 1
    assert "unisono run: the lab cannot create hosts here: `ip` is not installed" in ended.stderr


def test_processes_of_a_run_whose_launcher_is_gone_are_ended_and_no_others(capsys: pytest.CaptureFixture[str]) -> None:
    with subprocess.Popen(["true"]) as gone:
        gone.wait()
    marks = [f"{gone.pid}:1", hosts.mark_of_this_process()]
    sleepers = [subprocess.Popen(["sleep", "600"], env={**os.environ, "UNISONO_LAB": mark}) for mark in marks]
    try:
        while sleepers[0].pid not in hosts.find_processes():  # it has become `sleep` by then
            assert sleepers[0].poll() is None
        assert main(["lab", "clean"]) == 0
        assert f"ended 1 process of a run whose launcher ({gone.pid}) is gone\n" in capsys.readouterr().out
        assert sleepers[0].wait(30) == -15
        assert sleepers[1].poll() is None
    finally:
        for sleeper in sleepers:
            sleeper.kill()
            sleeper.wait()
