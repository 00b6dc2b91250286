"""Real torchrun: the same program as local, and a clean restart after a killed worker, on gloo too."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from engine_cases import EVERYTHING, KILLED, NETWORKED, check_network, network_options, right_loss, specs
from engine_commands import Command, only, unisono_run
from stranger import visit

from unisono.launchers.lab.hosts import EmulatedHosts, find_obstacle

pytestmark = pytest.mark.timeout(300)

# Through messages (gloo), not shared memory, in a world of ours.
MESSAGES = KILLED + "assert un.join().transport.name == 'messages', un.join().transport.name"
# On a page of the host, a new one after the kill, beside a gloo group that the program makes itself, before and after.
OWN_GROUP = f"""
import os, torch, torch.distributed as dist, unisono as un
has_page = "UNISONO_SHM_FD" in os.environ
un.join(device="cpu")
dist.init_process_group("gloo")
x = torch.ones(3)
dist.all_reduce(x)
{KILLED}
assert has_page and un.join().transport.name == 'shared memory'
dist.all_reduce(x)
assert x.tolist() == [4.0] * 3, x
dist.destroy_process_group()
"""


def test_the_same_program_has_the_same_loss_and_every_strategy_runs(command: Command) -> None:
    wanted = specs()
    ended = command(*unisono_run("--on", "torchrun", "-n", "2", "script.py", json.dumps(wanted)), script=EVERYTHING)
    found = only(ended)
    assert found["loss"] == pytest.approx(right_loss(), rel=1e-12)
    assert found["size"] == 2
    assert set(found["strategies"]) == set(wanted)
    assert all(0 < loss < 20 for loss in found["strategies"].values())


def test_interface_ports_and_encryption_are_the_users(command: Command) -> None:
    words = unisono_run("--on", "torchrun", "-n", "2", *network_options(), "script.py")
    ended = command(*words, script=NETWORKED, env={"UNISONO_SHARED_MEMORY": "0"})
    assert ended.status == 0, ended
    check_network(ended.json())


def test_after_a_kill_all_start_again_on_a_new_page_with_gloo_groups_of_their_own_too(command: Command) -> None:
    options = ("--on", "torchrun", "--max-restarts", "1", "-n", "2")
    ended = command(*unisono_run(*options, "script.py"), script=OWN_GROUP)
    assert ended.status == 0, ended
    assert ended.json() == [{"loss": pytest.approx(right_loss(), rel=1e-12), "attempt": "1"}] * 2
    assert ended.err == "unisono: worker 1 failed: killed by SIGKILL; all workers start again (restart 1 of 1)\n"


def test_plain_torchrun_restarts_a_world_of_ours(command: Command) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--max-restarts=1", "--nproc-per-node=2"]
    ended = command(*torchrun, "script.py", script=MESSAGES, env={"UNISONO_SHARED_MEMORY": "0"})
    assert ended.status == 0, ended
    assert ended.json() == [{"loss": pytest.approx(right_loss(), rel=1e-12), "attempt": "1"}] * 2


PLAIN = [sys.executable, "-m", "torch.distributed.run", "--master-port=29411", "--max-restarts=1", "--nproc-per-node=2"]


@pytest.mark.skipif(bool(find_obstacle()), reason=find_obstacle())
@pytest.mark.parametrize(
    "words",
    [
        pytest.param(unisono_run("--on", "torchrun", "--max-restarts", "1", "-n", "2"), id="unisono run"),
        pytest.param(PLAIN, id="torchrun"),
    ],
)
def test_a_stranger_runs_no_code_in_a_run(words: list[str], tmp_path: Path) -> None:
    """Plain torchrun as docs/security.md has it: without --standalone, whose store is unpickled."""
    with EmulatedHosts(1) as hosts:
        command = hosts.command(0, *words, "script.py", str(tmp_path))
        near = ["127.0.0.1", hosts.address(0)]
        ended = visit(command, tmp_path, hosts.namespaces(0), [(hosts.command(0), near)])
    assert ended.status == 0, ended
