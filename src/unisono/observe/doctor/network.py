"""The network: which interface is used here, and with `--hosts` who is reached, how fast, and whose clock is off."""

from __future__ import annotations

import json
import os
import shlex
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

from unisono.launchers.engines.engine import split_host
from unisono.launchers.runtime.addresses import (
    INTERFACE,
    PORTS,
    address_towards,
    find_own_addresses,
    interface_of_address,
    is_public,
    read_ports,
)
from unisono.launchers.runtime.run_folder import find_version as find_own_version
from unisono.observe.doctor.findings import Finding, judge
from unisono.observe.doctor.host import find_version
from unisono.units import show_rate, show_s

__all__ = [
    "Hosts",
    "Visit",
    "check_hosts",
    "check_interface",
    "check_reach",
    "check_sockets",
    "judge_encryption",
    "judge_links",
    "judge_visits",
    "measure_links",
    "visit",
]

SECTION = "network"
Answer = dict[str, Any]
_ELSEWHERE = "192.0.2.1"  # an address of documentation: the way out of this host; nothing is sent
_PINGS = 7
_VISIT_S = 20.0
_LINKS_S = 90.0
_CLOCK_OFF_S = 0.1
_SLOW_BITS, _FAR_S = 1e9, 2e-3
# Run on each host. It answers lines: what is installed there, then the time for each line that comes.
_VISITOR = """
import json, sys, time
from importlib import metadata
def find(name):
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
try:
    import unisono
    ours = unisono.__version__
except ImportError:
    ours = None
print(json.dumps({"python": sys.version.split()[0], "unisono": ours, "torch": find("torch")}), flush=True)
for line in sys.stdin:
    print(time.time(), flush=True)
"""


class Hosts(NamedTuple):
    """Which hosts are examined, and how ssh reaches them."""

    names: Sequence[str]
    options: Sequence[str] = ()
    python: str | None = None


class Visit(NamedTuple):
    """What a host answered. `error`: in words, "" where it did."""

    host: str
    error: str = ""
    versions: Mapping[str, str | None] = {}
    clock_s: float = 0.0  # ahead of ours
    there_and_back_s: float = 0.0


# Here -----------------------------------------------------------------------------------------------------------------


def check_sockets() -> list[Finding]:
    """A connection over the loopback device: launchers, stores and the live page need it."""
    try:
        with (
            socket.create_server(("127.0.0.1", 0)) as listener,
            socket.create_connection(listener.getsockname(), timeout=2) as near,
            listener.accept()[0] as far,
        ):
            near.sendall(b"unisono")
            far.settimeout(2)
            said = far.recv(16)
    except OSError as error:
        advice = (
            "workers meet at 127.0.0.1: check that the loopback device is up (`ip link set lo up`) and not firewalled"
        )
        return [Finding(SECTION, "sockets", "bad", f"no connection over 127.0.0.1: {error}", advice)]
    assert said == b"unisono", said
    return [Finding(SECTION, "sockets", "ok", "connections over 127.0.0.1 work")]


def check_interface(
    env: Mapping[str, str] = os.environ,
    address: str | None = None,
    interfaces: Sequence[str] | None = None,
    resolve: Callable[[str], str] = socket.gethostbyname,
) -> list[Finding]:
    """The interface over which messages to other hosts would go."""
    address = address_towards(_ELSEWHERE) if address is None else address
    known = [name for _, name in socket.if_nameindex()] if interfaces is None else interfaces
    if named := env.get(INTERFACE, ""):
        return [_check_named(named)]
    asked = env.get("GLOO_SOCKET_IFNAME", "")
    if asked and not set(asked.split(",")) <= set(known):
        advice = f"set it to one of {', '.join(known)}, or unset it"
        return [Finding(SECTION, "interface", "bad", f"GLOO_SOCKET_IFNAME={asked} is not on this host", advice)]
    if asked:
        return [Finding(SECTION, "interface", "ok", f"{asked}, as GLOO_SOCKET_IFNAME says")]
    if not address:
        return [Finding(SECTION, "interface", "ok", "no route to other hosts; a run on one host needs none")]
    name = interface_of_address(address)
    values = {"interface": name, "address": address}
    text = f"{name or 'unknown'} ({address}) towards other hosts"
    host = socket.gethostname()
    try:
        mine = resolve(host)
    except OSError:
        mine = ""
    if not mine or mine.startswith("127."):
        text += f"; the name {host} resolves to {mine or 'nothing'} here; the launchers set the interface"
        advice = (
            f"for programs on several hosts without a launcher, set GLOO_SOCKET_IFNAME={name} and "
            f"NCCL_SOCKET_IFNAME={name}"
        )
        return [Finding(SECTION, "interface", "ok", text, advice, values)]
    return [Finding(SECTION, "interface", "ok", text, values=values)]


def _check_named(named: str) -> Finding:
    """The interfaces that UNISONO_INTERFACE names."""
    try:
        cards = find_own_addresses(named)
    except OSError as error:
        advice = "name an interface, an address or a network of this host, or unset it; on other hosts it may be right"
        return Finding(SECTION, "interface", "bad", str(error.strerror), advice)
    found = [f"{card[0].interface} ({', '.join(map(str, card))})" for card in cards]
    return Finding(SECTION, "interface", "ok", f"{', '.join(found)}, as {INTERFACE} says", values={"interface": named})


def check_reach(env: Mapping[str, str] = os.environ, address: str | None = None) -> list[Finding]:
    """What other hosts need in order to reach this one: a NAT or a firewall may stand between."""
    ports = env.get(PORTS, "")
    try:
        count = len(read_ports(ports))
    except ValueError as error:
        return [Finding(SECTION, "reach", "bad", str(error), "a run here ends with this error")]
    address = address_towards(_ELSEWHERE) if address is None else address
    where = f"ports {ports}" if ports else f"any port above 1024 ({PORTS}=40000-40100 narrows that)"
    text = f"every host must reach every other, in both directions, at {where}"
    if not address:
        return [Finding(SECTION, "reach", "ok", f"no route to other hosts; between hosts, {text}")]
    if ports and count < 4:
        advice = f"{count} ports: each rank of a host needs one, and a launcher three more; name a wider range"
        return [Finding(SECTION, "reach", "warn", text, advice, {"ports": ports})]
    advice = (
        "a host behind NAT, or with a firewall open in one direction only, cannot be reached: connect hosts by a VPN"
    )
    kind = "public: everything is encrypted there" if is_public(address) else "private"
    return [Finding(SECTION, "reach", "ok", f"{address} is {kind}; {text}", advice, {"ports": ports})]


# Other hosts ----------------------------------------------------------------------------------------------------------


def check_hosts(hosts: Hosts) -> list[Finding]:
    """Each host is visited; where all answer, one worker on each measures the links between them."""
    with ThreadPoolExecutor(len(hosts.names)) as pool:
        visits = list(pool.map(lambda host: visit(host, hosts), hosts.names))
    mine = {"python": sys.version.split()[0], "unisono": find_own_version(), "torch": find_version("torch")}
    found = judge_visits(visits, mine)
    if any(one.error for one in visits) or len(visits) < 2:
        return found
    return [*found, *_measure_between(hosts)]


def visit(host: str, hosts: Hosts) -> Visit:
    """Ask a host by ssh what it has, and for its time."""
    name = split_host(host)[0]
    there = shlex.join([hosts.python or sys.executable, "-c", _VISITOR])
    command = ["ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=5", *hosts.options, name, there]
    try:
        process = subprocess.Popen(command, stdin=-1, stdout=-1, stderr=-1, bufsize=0, start_new_session=True)
    except OSError as error:
        return Visit(host, f"ssh cannot be started: {error.strerror}; apt-get install openssh-client")
    with process:
        late = threading.Timer(_VISIT_S, process.kill)
        late.start()
        try:
            return Visit(host, "", *_ask(process))
        except (ValueError, OSError):  # it ended, or says something else
            process.kill()
            assert process.stderr is not None
            words = process.stderr.read().decode("utf-8", "replace").strip().splitlines()
            return Visit(host, words[-1] if words else f"no answer, or none in {_VISIT_S:g} s")
        finally:
            late.cancel()
            process.kill()


def _ask(process: subprocess.Popen[bytes]) -> tuple[dict[str, str | None], float, float]:
    assert process.stdin is not None
    assert process.stdout is not None
    versions = json.loads(process.stdout.readline())
    best, ahead = float("inf"), 0.0
    for _ in range(_PINGS):
        before = time.time()
        process.stdin.write(b"\n")
        there = float(process.stdout.readline())
        after = time.time()
        if after - before < best:
            best, ahead = after - before, there - (before + after) / 2
    return versions, ahead, best


def judge_visits(visits: Sequence[Visit], mine: Mapping[str, str | None]) -> list[Finding]:
    """A line for each host: reached, the same versions as here, the same time as here."""
    return [_judge_visit(one, mine) for one in visits]


def _judge_visit(one: Visit, mine: Mapping[str, str | None]) -> Finding:
    name = f"host {one.host}"
    if one.error:
        advice = "`ssh HOST true` must work without a password, with Python at the same path as here (or pass --python)"
        return Finding(SECTION, name, "bad", f"not reached: {one.error}", advice)
    listed = ", ".join(f"{what} {version or 'missing'}" for what, version in one.versions.items())
    off = f"clock {1e3 * one.clock_s:+.0f} ms (± {1e3 * one.there_and_back_s / 2:.0f})"
    text, values = f"reached; {listed}; {off}", {"clock_s": one.clock_s, "versions": dict(one.versions)}
    missing = [what for what in ("unisono", "torch") if not one.versions.get(what)]
    if missing:
        advice = f"install {' and '.join(missing)} there, for the Python in use ({one.versions.get('python')})"
        return Finding(SECTION, name, "bad", text, advice, values)
    advice = ""
    other = [what for what, version in one.versions.items() if _lead(version) != _lead(mine.get(what))]
    if other:
        advice = f"versions of {', '.join(other)} differ from this host: all workers of a run should have the same"
    elif abs(one.clock_s) > _CLOCK_OFF_S + one.there_and_back_s / 2:
        advice = "times in logs cannot be compared: run chrony or systemd-timesyncd on each host"
    return judge(SECTION, name, text, advice, values)


def _lead(version: str | None) -> str:
    """A version without what is added for a build, and without the last number of Python's: these go together.

    >>> _lead("2.13.0+cpu"), _lead("3.11.7")
    ('2.13', '3.11')
    """
    return ".".join((version or "").partition("+")[0].split(".")[:2])


def _measure_between(hosts: Hosts) -> list[Finding]:
    from unisono.launchers import EngineError, WorkerError
    from unisono.launchers.engines.ssh import Ssh

    names = [split_host(host)[0] for host in hosts.names]
    engine = Ssh(names, options=list(hosts.options), python=hosts.python)
    try:
        answers = engine.call(measure_links, len(names), threads=1, output="rank0", timeout_s=_LINKS_S)
    except (EngineError, WorkerError, TimeoutError) as error:
        advice = "workers start there but cannot reach each other or this host: check firewalls and `ip route`"
        return [Finding(SECTION, "between hosts", "bad", f"one worker on each: {error}", advice)]
    return [*judge_links(answers[0]["links"], names), *judge_encryption(answers[0]["encryption"])]


def measure_links() -> Answer:
    """Run by a worker on each host: the probe of each link that `unisono plan` uses, and of encryption."""
    from unisono.world import join
    from unisono.world.probe import measure_encryption
    from unisono.world.probe import measure_links as probe

    world = join("cpu")
    order = {host: rank for rank, host in enumerate(world.hosts)}
    channel = world.channel()
    try:
        found, encryption = probe(channel), measure_encryption(channel)
    finally:
        channel.close()
    links = [
        {"between": [order[one.first], order[one.second]], "latency_s": one.latency_s, "bits_per_s": one.bits_per_s}
        for one in found
    ]
    return {"links": links, "encryption": None if encryption is None else vars(encryption)}


def judge_encryption(cost: Mapping[str, Any] | None) -> list[Finding]:
    """Whether tensors between these hosts are encrypted, and what that costs."""
    if cost is None:
        return []
    plain, sealed = cost["plain_bits_per_s"], cost["encrypted_bits_per_s"]
    more = f"{show_rate(sealed)} encrypted, {show_rate(plain)} plain between the first two hosts"
    if cost["is_on"]:
        text = f"on: {more}"
        advice = "" if sealed > plain / 2 else "on a network that is yours alone, --no-encrypt makes messages faster"
        return [Finding(SECTION, "encryption", "ok", text, advice, dict(cost))]
    return [
        Finding(SECTION, "encryption", "ok", f"off, as the hosts are on one private network: {more}", "", dict(cost))
    ]


def judge_links(links: Sequence[Mapping[str, Any]], names: Sequence[str]) -> list[Finding]:
    """A line for each link, and a warning for one that is much slower than the others."""
    found = []
    typical = statistics.median(link["bits_per_s"] for link in links) if links else 0.0
    for link in links:
        first, second = (names[rank] for rank in link["between"])
        rate, late = link["bits_per_s"], link["latency_s"]
        text = f"{show_rate(rate)}, {show_s(late)} one way"
        advice = ""
        if rate < typical / 2:
            advice = f"less than half of what others have ({show_rate(typical)}): all workers wait for the slowest link"
        elif rate < _SLOW_BITS or late > _FAR_S:
            advice = "slow for exact gradients: `unisono plan` says which method suits this network"
        found.append(judge(SECTION, f"{first} – {second}", text, advice, dict(link)))
    return found
