"""`unisono doctor`: each check is shown a host on which something is broken, and says so with advice."""

from __future__ import annotations

import errno
import json
import os
import resource
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from unisono.cli import machine as command
from unisono.cli.command_line import main
from unisono.launchers import WorkerError
from unisono.launchers.runtime.huge_pages import HugePages
from unisono.methods.offload import native
from unisono.observe.doctor import Finding, examine, host, network, transports, worst_of


def one(found: list[Finding], name: str = "") -> Finding:
    [finding] = [each for each in found if not name or each.name == name]
    return finding


def versions(**known: str) -> Callable[[str], str | None]:
    return known.get


# What is installed ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("version", "state"), [((3, 9, 1), "bad"), ((3, 10, 0), "ok"), ((3, 14, 4), "ok"), ((3, 15, 0), "warn")]
)
def test_pythons_that_tests_run_with_are_told_from_others(version: tuple[int, ...], state: str) -> None:
    assert one(host.check_python(version)).state == state


@pytest.mark.parametrize(
    ("system", "named"),
    [
        (("linux", "6.1.0-13-amd64", "x86_64"), ""),
        (("linux", "6.1.0-13-arm64", "aarch64"), "aarch64"),
        (("linux", "5.15.153.1-microsoft-standard-WSL2", "x86_64"), "WSL"),
        (("darwin", "25.0.0", "arm64"), "darwin"),
    ],
)
def test_systems_that_it_was_never_run_on_are_named(system: tuple[str, str, str], named: str) -> None:
    found = one(host.check_system(*system))
    assert (found.state, "never run" in found.advice) == (("warn", True) if named else ("ok", False))
    assert named in found.text


@pytest.mark.parametrize(
    ("version", "state"), [("2.10.1", "bad"), ("2.11.0", "ok"), ("2.13.0+cpu", "ok"), ("2.14.0a0", "warn")]
)
def test_versions_of_torch_are_judged(version: str, state: str) -> None:
    found = host.check_required(versions(torch=version, numpy="2", rich="15"))
    assert [each.state for each in found] == [state, "ok", "ok"]


def test_what_is_required_and_missing_is_bad_and_advice_installs_it() -> None:
    found = one(host.check_required(versions(torch="2.13", rich="15")), "numpy")
    assert (found.state, found.advice) == ("bad", "pip install numpy")


def test_a_copy_beside_the_installed_one_is_a_warning() -> None:
    assert one(host.check_package("1.0.0", Path(), versions(unisono="1.0.0"))).state == "ok"
    assert "0.9" in one(host.check_package("1.0.0", Path(), versions(unisono="0.9"))).advice
    assert one(host.check_package("1.0.0", Path(), versions())).state == "warn"


def test_extras_are_there_or_not_or_too_old() -> None:
    needs = ["numpy", 'ray[data]>=2.40; extra == "ray"', 'cloudpickle; extra == "ray"', 'wandb; extra == "wandb"']
    needs += ['xgboost-cpu>=3.0; extra == "boost"', 'pandas<3; extra == "spark"', 'pytest; extra == "dev"']
    there = {"ray": "2.39.1", "cloudpickle": "3", "pandas": "2.3.3", "xgboost": "3.1"}
    found = {each.name: each for each in host.check_extras(needs, there.get)}
    assert {name: each.state for name, each in found.items()} == {
        "[ray]": "warn",
        "[boost]": "ok",  # plain xgboost serves as well
        "[spark]": "ok",
        "other extras": "ok",
    }
    assert "ray 2.39.1, needed >=2.40" in found["[ray]"].advice
    assert found["other extras"].text == "not installed: wandb"


# The host -------------------------------------------------------------------------------------------------------------


def test_little_free_memory_is_a_warning() -> None:
    assert one(host.check_cores(2, 8 << 30, 4 << 30)).state == "ok"
    assert one(host.check_cores(2, 8 << 30, 100 << 20)).state == "warn"


def test_without_memfd_nothing_runs_and_without_dev_shm_loaders_do_not(tmp_path: Path) -> None:
    def refuse() -> int:
        raise OSError(errno.ENOSYS, "Function not implemented")

    found = host.check_shared_memory(tmp_path / "shm", refuse)
    assert [(each.name, each.state) for each in found] == [("memfd", "bad"), ("/dev/shm", "warn")]


def test_a_small_dev_shm_names_the_option_of_docker(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    real = os.statvfs(tmp_path)
    small = os.statvfs_result((1024, 1024, 65536, 65536, 65536, *real[5:]))  # 64 MiB, as docker gives
    monkeypatch.setattr(os, "statvfs", lambda _: small)
    found = one(host.check_shared_memory(tmp_path), "/dev/shm")
    assert found.state == "warn"
    assert "--shm-size" in found.advice


@pytest.mark.parametrize(
    ("own", "shared", "state"), [("madvise", "advise", "ok"), ("never", "never", "warn"), ("always", "deny", "warn")]
)
def test_huge_pages_that_are_turned_off_are_a_warning(own: str, shared: str, state: str) -> None:
    found = one(host.check_huge_pages(HugePages(own, shared)))
    assert found.state == state
    assert ("echo" in found.advice) == (state == "warn")


@pytest.mark.parametrize(
    ("soft", "state"), [(64, "bad"), (256, "warn"), (20_000, "ok"), (resource.RLIM_INFINITY, "ok")]
)
def test_few_open_files_are_told(soft: int, state: str) -> None:
    found = one(host.check_descriptors((soft, 4096)))
    assert found.state == state
    assert ("ulimit -n 4096" in found.advice) == (state != "ok")


def test_locked_memory_matters_where_there_is_infiniband(tmp_path: Path) -> None:
    assert one(host.check_locked_memory((8 << 20, 8 << 20), tmp_path)).state == "ok"
    (tmp_path / "mlx5_0").mkdir()
    assert one(host.check_locked_memory((8 << 20, 8 << 20), tmp_path)).state == "warn"
    assert one(host.check_locked_memory((resource.RLIM_INFINITY, -1), tmp_path)).state == "ok"


def test_a_clock_that_nobody_sets_matters_between_hosts() -> None:
    assert one(host.check_clock(lambda: 5)).state == "ok"
    assert one(host.check_clock(lambda: 5, matters=True)).state == "warn"
    assert one(host.check_clock(lambda: 0, matters=True)).state == "ok"


@pytest.mark.parametrize(
    ("kind", "state"), [("ext4", "ok"), ("nfs4", "warn"), ("lustre", "warn"), ("tmpfs", "warn"), ("fuse.sshfs", "warn")]
)
def test_the_file_system_of_the_folder_of_runs_is_that_of_the_longest_mount(
    tmp_path: Path, kind: str, state: str
) -> None:
    mounts = f"root / ext4 rw 0 0\nserver:/x {tmp_path} {kind} rw 0 0\nother /elsewhere nfs rw 0 0\n"
    found = one(host.check_runs_folder(tmp_path / "not" / "yet", mounts))
    assert (found.state, found.values["file_system"]) == (state, kind)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_of_runs_that_cannot_be_written_is_bad(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    found = one(host.check_runs_folder(tmp_path / "file" / "runs", "root / ext4 rw 0 0"))
    assert found.state == "bad"
    assert "UNISONO_RUNS" in found.advice


def test_engines_are_found_and_spark_without_java_is_a_warning() -> None:
    there = {"mpirun": "/usr/bin/mpirun"}
    found = host.check_engines(there.get, versions(torch="2.13", pyspark="4.3"), {})
    assert one(found, "spark").state == "warn"
    assert set(one(found, "engines").values["engines"]) == {"mpi", "torchrun", "spark"}
    assert "missing: slurm, ssh, ray" in one(found, "engines").text
    assert len(host.check_engines(there.get, versions(pyspark="4.3"), {"JAVA_HOME": "/opt/java"})) == 1


def test_a_lab_that_cannot_be_made_says_why() -> None:
    found = one(host.check_lab(lambda: "`tc` is not installed: apt-get install iproute2"))
    assert found.state == "warn"
    assert "apt-get install iproute2" in found.text
    assert one(host.check_lab(lambda: "")).state == "ok"


def test_what_steps_adam_on_the_host_is_told_and_nothing_is_left(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(native, "_compile", lambda command: shutil.copy(sys.executable, command[-1]))
    found = one(transports.check_host_step())
    assert (found.state, "does not work here" in found.text) == ("warn", True)
    assert not list(tmp_path.iterdir())
    monkeypatch.setenv("UNISONO_COMPILED_STEP", "0")
    found = one(transports.check_host_step())
    assert (found.state, "UNISONO_COMPILED_STEP=0" in found.text) == ("ok", True)
    assert "compiled code" in one(transports.check_host_step(lambda keep: None)).text


# Transports -----------------------------------------------------------------------------------------------------------


def answers(**changes: Any) -> list[dict[str, Any]]:
    good = {"seconds": 0.004, "bytes": 4 << 20}
    whole = {"torch": "2.13.0", "cuda_build": None, "gpus": [], "reads_peers": True}
    whole |= {
        "shared memory": good,
        "messages between hosts": good,
        "encrypted messages": good,
        "backend": {"registered": True},
    }
    return [whole, {**whole, **changes}]


def states(found: list[Finding]) -> dict[str, str]:
    return {each.name: each.state for each in found if each.state != "ok"}


def test_workers_that_find_nothing_wrong_are_six_good_lines() -> None:
    assert [each.state for each in transports.judge_answers(answers())] == ["ok"] * 6


@pytest.mark.parametrize(
    ("changes", "wrong"),
    [
        ({"shared memory": {"error": "ArithmeticError: the sum is 1"}}, {"shared memory": "bad"}),
        ({"messages between hosts": {"error": "PeerLost: connection refused"}}, {"messages between hosts": "warn"}),
        ({"encrypted messages": {"error": "OSError: no cipher"}}, {"encrypted messages": "warn"}),
        ({"reads_peers": False}, {"process_vm_readv": "warn"}),
        ({"backend": {"registered": False}}, {"torch backend": "warn"}),
    ],
)
def test_a_transport_that_fails_for_one_rank_is_named(changes: dict[str, Any], wrong: dict[str, str]) -> None:
    found = transports.judge_answers(answers(**changes))
    assert states(found) == wrong
    assert all(each.advice for each in found if each.state != "ok")


def test_a_strict_yama_is_named(tmp_path: Path) -> None:
    scope = tmp_path / "ptrace_scope"
    scope.write_text("2\n")
    found = one(transports.judge_answers(answers(reads_peers=False), yama=scope), "process_vm_readv")
    assert "ptrace_scope 2" in found.text
    assert "sysctl kernel.yama.ptrace_scope=1" in found.advice


def test_a_gpu_that_torch_does_not_see_is_a_warning(tmp_path: Path) -> None:
    device = tmp_path / "nvidia0"
    device.touch()
    found = one(transports.judge_answers(answers(), devices=device), "devices")
    assert found.state == "warn"
    assert "build for CPUs" in found.advice


def test_nccl_is_judged_where_there_are_gpus() -> None:
    gpus, good = [{"name": "H1", "memory_bytes": 80 << 30}], {"seconds": 0.001, "bytes": 4 << 20, "ranks": 1}
    fine = [{**each, "gpus": gpus, "NCCL": good, "one GPU": good} for each in answers()]
    assert one(transports.judge_answers(fine), "NCCL").state == "ok"
    assert "as there is one GPU" in one(transports.judge_answers(fine), "NCCL").text
    broken = [fine[0], {**fine[1], "NCCL": {"error": "DistBackendError: unhandled system error"}}]
    assert states(transports.judge_answers(broken)) == {"NCCL": "bad"}


def test_workers_that_cannot_share_a_gpu_are_told_what_happens_instead() -> None:
    gpus, good = [{"name": "H1", "memory_bytes": 80 << 30}], {"seconds": 0.001, "bytes": 4 << 20, "ranks": 2}
    refused = {"error": "NotShareable: rank 1: cuIpcOpenMemHandle: operation not permitted (800)"}
    found = one(
        transports.judge_answers([{**a, "gpus": gpus, "NCCL": good, "one GPU": refused} for a in answers()]), "one GPU"
    )
    assert found.state == "warn"
    assert "through host memory" in found.advice


LOST = WorkerError("worker 0 of 2 failed: ImportError", rank=0, exit_status=1, step=None, traceback="")


@pytest.mark.parametrize("error", [TimeoutError("late"), LOST])
def test_workers_that_cannot_be_run_are_one_bad_line(error: Exception) -> None:
    def launch(*_: Any, **__: Any) -> list[dict[str, Any]]:
        raise error

    assert one(transports.check_transports(launch)).state == "bad"


# The network ----------------------------------------------------------------------------------------------------------


def test_an_interface_that_is_not_there_is_bad() -> None:
    found = one(network.check_interface({"GLOO_SOCKET_IFNAME": "eth7"}, "10.0.0.1", ["lo", "eth0"]))
    assert found.state == "bad"
    assert "lo, eth0" in found.advice
    assert one(network.check_interface({"GLOO_SOCKET_IFNAME": "eth0"}, "10.0.0.1", ["lo", "eth0"])).state == "ok"


def test_a_name_that_means_the_loopback_device_is_told() -> None:
    found = one(network.check_interface({}, "127.0.0.1", ["lo"], lambda _: "127.0.1.1"))
    assert "resolves to 127.0.1.1" in found.text
    assert one(network.check_interface({}, "", ["lo"])).state == "ok"


def test_no_loopback_device_is_bad(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(errno.EADDRNOTAVAIL, "Cannot assign requested address")

    assert one(network.check_sockets()).state == "ok"
    monkeypatch.setattr("socket.create_server", refuse)
    assert one(network.check_sockets()).state == "bad"


MINE = {"python": "3.11.7", "unisono": "1.0.0", "torch": "2.13.0+cpu"}


@pytest.mark.parametrize(
    ("visit", "state", "word"),
    [
        (network.Visit("a", "", MINE, 0.01, 0.002), "ok", ""),
        (network.Visit("a", "", {**MINE, "torch": "2.13.0+cu130"}, 0.01, 0.002), "ok", ""),
        (network.Visit("a", "Permission denied (publickey)."), "bad", "without a password"),
        (network.Visit("a", "", {**MINE, "unisono": None}, 0.0, 0.002), "bad", "install unisono there"),
        (network.Visit("a", "", {**MINE, "torch": "2.11.0"}, 0.0, 0.002), "warn", "differ from this host"),
        (network.Visit("a", "", MINE, -7.5, 0.002), "warn", "chrony"),
        (network.Visit("a", "", MINE, 0.3, 0.8), "ok", ""),  # no more than the way there and back leaves open
    ],
)
def test_hosts_are_judged_by_what_they_answer(visit: network.Visit, state: str, word: str) -> None:
    found = one(network.judge_visits([visit], MINE))
    assert found.state == state
    assert word in found.advice


def test_links_are_judged_against_each_other() -> None:
    links = [
        {"between": [0, 1], "bits_per_s": 9.4e9, "latency_s": 5e-5},
        {"between": [0, 2], "bits_per_s": 9.1e9, "latency_s": 5e-5},
        {"between": [1, 2], "bits_per_s": 0.9e9, "latency_s": 5e-5},
    ]
    found = network.judge_links(links, ["a", "b", "c"])
    assert states(found) == {"b – c": "warn"}
    assert "wait for the slowest link" in one(found, "b – c").advice
    assert states(network.judge_links([{**links[0], "latency_s": 0.04}], ["a", "b"])) == {"a – b": "warn"}


FAKE_SSH = """#!{python}
import subprocess, sys, shlex
host, command = sys.argv[-2:]
if host == "closed":
    sys.exit("ssh: connect to host closed port 22: Connection refused")
sys.exit(subprocess.run(shlex.split(command)).returncode)
"""


def test_a_visit_asks_for_versions_and_the_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ssh = tmp_path / "ssh"
    ssh.write_text(FAKE_SSH.format(python=sys.executable))
    ssh.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    found = network.visit("here", network.Hosts(["here"]))
    assert not found.error
    assert found.versions["python"] == sys.version.split()[0]
    assert abs(found.clock_s) <= found.there_and_back_s / 2  # it is the same clock
    assert "Connection refused" in network.visit("closed", network.Hosts(["closed"])).error


# All of it ------------------------------------------------------------------------------------------------------------


def test_a_check_that_fails_itself_is_a_bad_line_and_the_others_go_on() -> None:
    def fail() -> list[Finding]:
        raise KeyError("x")

    good = Finding("b", "c", "ok", "fine")
    found = examine(checks=[("a", "b", fail), ("b", "c", lambda: [good])])
    assert found[0].state == "bad"
    assert "KeyError" in found[0].text
    assert found[1] is good
    assert worst_of(found) == "bad"


def test_the_exit_status_says_whether_something_is_bad(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for state, status in (("ok", 0), ("warn", 0), ("bad", 1)):
        found = [Finding("here", "thing", state, "said", "do this")]  # type: ignore[arg-type]
        monkeypatch.setattr("unisono.observe.doctor.examine", lambda hosts, found=found: found)
        assert main(["doctor"]) == status
        assert f"  {state:<4}  thing: said\n" in capsys.readouterr().out
        assert main(["doctor", "--json"]) == status
        told = json.loads(capsys.readouterr().out)
        assert (told["state"], told["findings"][0]["advice"]) == (state, "do this")


def test_long_lines_are_wrapped_and_nothing_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    words = " ".join(f"word{i}" for i in range(60))
    text = command._write([Finding("here", "thing", "warn", words, words)])
    assert max(map(len, text.splitlines())) <= 80
    assert text.count("word59") == 2


def test_whether_hosts_encrypt_is_said_with_what_it_costs() -> None:
    cost = {"is_on": True, "plain_bits_per_s": 9e9, "encrypted_bits_per_s": 3e9}
    (found,) = network.judge_encryption(cost)
    assert found.text.startswith("on: ")
    assert "3 Gbit/s encrypted, 9 Gbit/s plain" in found.text
    assert "--no-encrypt" in found.advice
    (found,) = network.judge_encryption({**cost, "is_on": False})
    assert found.text.startswith("off")
    assert not network.judge_encryption(None)


def test_a_named_interface_and_ports_are_looked_at() -> None:
    good = one(network.check_interface({"UNISONO_INTERFACE": "127.0.0.0/8"}))
    assert (good.state, "lo (127.0.0.1)" in good.text) == ("ok", True)
    bad = one(network.check_interface({"UNISONO_INTERFACE": "eth99"}))
    assert bad.state == "bad"
    assert "UNISONO_INTERFACE=eth99" in bad.text
    assert "there are lo (127.0.0.1/8)" in bad.text
    assert one(network.check_reach({"UNISONO_PORTS": "70000"}, "10.0.0.1")).state == "bad"
    assert one(network.check_reach({"UNISONO_PORTS": "40000-40001"}, "10.0.0.1")).state == "warn"
    found = one(network.check_reach({}, "8.8.8.8"))
    assert (found.state, "public" in found.text, "NAT" in found.advice) == ("ok", True, True)
