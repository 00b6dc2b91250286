"""Which network ranks use: several cards, IPv6 alone, different networks, ports; and a link that is cut for a while."""

from __future__ import annotations

import subprocess
import time
from typing import Any

import pytest

from unisono.launchers.lab.hosts import EmulatedHosts

EXCHANGE = """
    import json, os, torch, unisono as un


    def count():
        with open("/proc/net/dev") as file:
            lines = [line.split() for line in file if ":" in line]
        return {words[0].rstrip(":"): int(words[1]) for words in lines}  # bytes received

    world = un.join("cpu")
    before = count()
    x = torch.arange(4_000_000, dtype=torch.float64) + world.rank
    world.all_reduce(x, "mean").wait()
    assert torch.equal(x, torch.arange(4_000_000, dtype=torch.float64) + (world.size - 1) / 2)
    after = count()
    door = world.transport._links._door
    print(json.dumps({
        "came": {name: after[name] - before[name] for name in after},
        "encrypted": world.transport.is_encrypted,
        "ports": door.ports,
        "cards": [[host for host, _ in card] for card in world.transport._links._peers[1 - world.rank]._cards],
    }))
"""


def run_on(hosts: EmulatedHosts, host: int, *commands: str) -> None:
    for command in commands:
        subprocess.run(hosts.command(host, *command.split()), check=True, capture_output=True, text=True)


def add_card(hosts: EmulatedHosts) -> None:
    """A second cable between hosts 0 and 1, in a network of its own."""
    run_on(hosts, 0, f"ip link add eth1 type veth peer name eth1 netns {hosts.namespaces(1)[-1]}")
    for host in range(2):
        run_on(hosts, host, f"ip addr add 10.78.0.{host + 1}/24 dev eth1", "ip link set eth1 up")


def use_ipv6_alone(hosts: EmulatedHosts) -> None:
    for host in range(hosts.count):
        run_on(hosts, host, "ip -4 addr flush dev eth0", f"ip -6 addr add fd77::{host + 1}/64 dev eth0 nodad")


def move_apart(hosts: EmulatedHosts) -> None:
    """Host 1 in another network, which is reached all the same."""
    run_on(
        hosts, 1, "ip addr flush dev eth0", "ip addr add 10.78.5.2/24 dev eth0", "ip route add 10.77.0.0/16 dev eth0"
    )
    run_on(hosts, 0, "ip route add 10.78.5.0/24 dev eth0")


@pytest.mark.parametrize(("named", "other"), [("eth0,eth1", ""), ("10.78.0.0/24", "eth0"), ("eth1", "eth0")])
def test_bytes_take_the_cards_that_are_named(on_hosts, named: str, other: str) -> None:
    """Both carry their part of a large operation; or one is named, by its name or its network, and has all of it."""
    results = on_hosts(EXCHANGE, per_host=[1, 1], prepare=add_card, env={"UNISONO_INTERFACE": named}).results()
    for found in results:
        came = found["came"]
        if not other:
            assert min(came["eth0"], came["eth1"]) > 12e6, came  # of 32 MB
            assert len(found["cards"]) == len(found["ports"]) == 2
        else:
            assert came["eth1"] > 30e6 > 3e6 > came[other], came
        assert not found["encrypted"]


@pytest.mark.parametrize("secret", ["", "s" * 32])
def test_ranks_meet_where_there_is_ipv6_alone(on_hosts, secret: str) -> None:
    run = on_hosts(
        EXCHANGE,
        per_host=[1, 1],
        prepare=use_ipv6_alone,
        env={"MASTER_ADDR": "fd77::1", "GLOO_SOCKET_IFNAME": ""},
        secret=secret,
    )
    found = run.results()
    assert [each["cards"] for each in found] == [[["fd77::2"]], [["fd77::1"]]]
    assert not any(each["encrypted"] for each in found)  # one private network


@pytest.mark.parametrize(("asked", "expected"), [("", True), ("0", False)])
def test_hosts_on_different_networks_encrypt_unless_told_not_to(on_hosts, asked: str, expected: bool) -> None:
    run = on_hosts(EXCHANGE, per_host=[1, 1], prepare=move_apart, env={"UNISONO_ENCRYPT": asked}, secret="s" * 32)
    assert [each["encrypted"] for each in run.results()] == [expected] * 2


def test_ranks_listen_at_the_ports_that_are_named(on_hosts) -> None:
    run = on_hosts(EXCHANGE, per_host=[2, 2], env={"UNISONO_PORTS": "41000-41004", "UNISONO_SHARED_MEMORY": "0"})
    assert all(41000 <= port <= 41004 for found in run.results() for port in found["ports"])


OUTAGE = """
    import json, sys, time, torch, unisono as un
    world = un.join("cpu")
    net = torch.nn.Linear(700, 700, bias=False, dtype=torch.float64)
    torch.nn.init.constant_(net.weight, 0.01)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-4)
    replica = un.parallel(net, optimizer, "allreduce")
    calls, stop = 0, 0.0
    print("training", flush=True)
    import select
    while not stop:
        optimizer.zero_grad()
        x = torch.full((2, 700), float(calls % 7 + world.rank), dtype=torch.float64)
        net(x).square().mean().backward()
        optimizer.step()
        calls += 1
        flag = torch.tensor([float(bool(select.select([sys.stdin], [], [], 0)[0]))])
        stop = world.all_reduce(flag, "max").wait().item()
    print(json.dumps({
        "calls": calls, "steps": replica.step, "sum": net.weight.sum().item(),
    }), flush=True)
"""


@pytest.mark.parametrize("encrypt", ["0", "1"])
def test_a_link_that_is_cut_for_a_while_in_mid_step_heals_with_no_step_repeated(on_hosts, encrypt: str) -> None:
    run = on_hosts(OUTAGE, per_host=[1, 1], secret="s" * 32, env={"UNISONO_ENCRYPT": encrypt})
    run.hear("training")
    time.sleep(0.5)
    run.cut_off(1)
    time.sleep(1.0)
    run_on(run.hosts, 1, f"ip link set {run.hosts.interface} up")
    time.sleep(1.0)
    run.tell("stop")
    first, second = run.results()
    assert first["calls"] == first["steps"] == second["steps"] == second["calls"]
    assert first["sum"] == second["sum"] == pytest.approx(train_alone(first["calls"]), rel=1e-12)


def train_alone(steps: int) -> float:
    """The same in plain PyTorch, on the rows of both ranks."""
    import torch

    net: Any = torch.nn.Linear(700, 700, bias=False, dtype=torch.float64)
    torch.nn.init.constant_(net.weight, 0.01)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-4)
    for step in range(steps):
        optimizer.zero_grad()
        rows = [torch.full((2, 700), float(step % 7 + rank), dtype=torch.float64) for rank in range(2)]
        net(torch.cat(rows)).square().mean().backward()
        optimizer.step()
    return float(net.weight.detach().sum())
