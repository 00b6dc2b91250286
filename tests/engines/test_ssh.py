"""Real ssh to two hosts (network namespaces): torchrun on each, one world over both."""

from __future__ import annotations

import json
import shlex
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from engine_cases import COMMON, EVERYTHING, KILLED, NETWORKED, check_network, network_options, right_loss, specs
from engine_commands import Command, only, unisono_run
from ssh_hosts import SshHosts, why_not
from stranger import visit

import unisono as un

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SshHosts]:
    if reason := why_not():
        pytest.skip(reason)
    with SshHosts(tmp_path_factory.mktemp("ssh")) as found:
        yield found


def on_hosts(hosts: SshHosts, *words: str) -> list[str]:
    """`unisono run --on ssh` on the launcher's host, for one worker on each of the two."""
    names = ",".join(hosts.address(host) for host in range(2))
    options = f"--options={shlex.join(hosts.options())}"
    return hosts.here(*unisono_run("--on", "ssh", "--hosts", names, "-n", "2", options, *words))


def test_the_same_program_has_the_same_loss_and_every_strategy_runs(command: Command, hosts: SshHosts) -> None:
    wanted = specs()
    del wanted["hogwild"]  # memory shared by all workers: one host only
    ended = command(*on_hosts(hosts, "script.py", json.dumps(wanted)), script=EVERYTHING)
    found = only(ended)
    assert found["loss"] == pytest.approx(right_loss(), rel=1e-12)
    assert (found["size"], found["how"]) == (2, "messages")
    assert set(found["strategies"]) == set(wanted)
    assert all(0 < loss < 20 for loss in found["strategies"].values())


def test_interface_ports_and_encryption_are_the_users(command: Command, hosts: SshHosts) -> None:
    words = on_hosts(hosts, *network_options("10.77.0.0/24"), "script.py")
    ended = command(*words, script=NETWORKED, env={"UNISONO_SHARED_MEMORY": "0"})
    assert ended.status == 0, ended
    check_network(ended.json(), "10.77.0.")


def test_the_doctor_visits_both_hosts_and_measures_the_link(command: Command, hosts: SshHosts) -> None:
    names = [hosts.address(host) for host in range(2)]
    script = """
        import json, sys
        from dataclasses import asdict
        from unisono.observe.doctor.network import Hosts, check_hosts
        print(json.dumps([asdict(one) for one in check_hosts(Hosts(*json.loads(sys.argv[1])))]))
    """
    asked = json.dumps([names, hosts.options()])
    ended = command(*hosts.here(sys.executable, "script.py", asked), script=script)
    [told] = ended.json()
    found = {one["name"]: one for one in told}
    for name in names:
        assert found[f"host {name}"]["text"].startswith("reached; python "), found[f"host {name}"]
        assert abs(found[f"host {name}"]["values"]["clock_s"]) < 5  # it is the same clock
    assert found[" – ".join(names)]["values"]["bits_per_s"] > 1e6


def test_after_a_kill_the_workers_of_both_hosts_start_again(command: Command, hosts: SshHosts) -> None:
    ended = command(*on_hosts(hosts, "--max-restarts", "1", "script.py"), script=KILLED)
    assert ended.status == 0, ended
    assert ended.json() == [{"loss": pytest.approx(right_loss(), rel=1e-12), "attempt": "1"}] * 2
    said = [line for line in ended.err.splitlines() if "unisono" in line]  # torch warns of addresses without names
    assert said == ["unisono: worker 1 failed: killed by SIGKILL; all workers start again (restart 1 of 1)"]


def test_an_error_on_another_host_ends_in_one_report(command: Command, hosts: SshHosts) -> None:
    script = COMMON + "if un.join().rank == 1:\n    raise LookupError('no such sample')\ntrain()"
    ended = command(*on_hosts(hosts, "script.py"), script=script)
    assert ended.status == 1
    assert "unisono: worker 1 of 2 failed: LookupError\n" in ended.err
    assert "LookupError: no such sample" in ended.err
    assert ended.err.count("unisono:") == 1


def test_a_stranger_runs_no_code_in_a_run(hosts: SshHosts, tmp_path: Path) -> None:
    words = on_hosts(hosts, "--max-restarts", "1", "script.py", str(tmp_path))
    places = [(hosts.command(host), [hosts.address(host)]) for host in range(3)]
    ended = visit(words, tmp_path, hosts.namespaces(1), places)
    assert ended.status == 0, ended


def test_hosts_whose_workers_ended_well_start_again_too(command: Command, hosts: SshHosts) -> None:
    script = """
        import os, pathlib, time
        file = pathlib.Path("agent")
        if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            if os.environ["RANK"] == "0":
                file.with_suffix(".new").write_text(os.environ["UNISONO_AGENT_PID"])
                file.with_suffix(".new").rename(file)
            else:
                while not file.exists() or os.path.exists(f"/proc/{file.read_text()}"):
                    time.sleep(0.05)
                raise SystemExit(3)
        print("{}")
    """
    ended = command(*on_hosts(hosts, "--max-restarts", "1", "script.py"), script=script)
    assert (ended.status, ended.json()) == (0, [{}, {}, {}]), ended


def test_a_host_that_cannot_be_reached_is_named(command: Command, hosts: SshHosts) -> None:
    words = on_hosts(hosts, "script.py")
    lost = hosts.address(1)
    words = [word.replace(lost, "127.0.0.1") for word in words]  # no sshd there
    ended = command(*words, script="")
    assert (ended.status, ended.out) == (1, "")
    assert "127.0.0.1: ssh: connect to host 127.0.0.1 port 2222: Connection refused" in ended.err


@pytest.mark.skipif(shutil.which("ssh") is None, reason="no ssh: apt-get install openssh-client")
@pytest.mark.parametrize(
    ("names", "told"),
    [
        (["a:2", "b:1"], "have 3 slots, too few for 4 workers"),
        ([], "expected a list of hosts"),
        ("a,b", "expected a list of hosts"),
        (["a", "a"], "expected different names"),
        (["a:0"], "expected different names, with a number"),
        (["a:2", "b"], "a number for all of them, or for none"),
    ],
)
def test_hosts_that_do_not_do_are_refused_at_once(names: list[str], told: str) -> None:
    with pytest.raises((un.EngineError, ValueError), match=told):
        un.launch(pow, workers=4, args=(2, 3), on=un.on.ssh(hosts=names))


def test_a_missing_ssh_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(un.EngineError, match=r"`ssh` is not installed here"):
        un.launch(pow, workers=2, args=(2, 3), on=un.on.ssh(hosts=["a"]))
