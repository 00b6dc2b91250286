"""Lays out emulated hosts: network namespaces without names, joined by a bridge, with links of given speeds.

Run by file (`python -I -S namespaces.py FD`) in a process of its own, since whoever enters a user namespace must have
one thread, and a program's own network is left alone. It hands the descriptors of what it made to the launcher. Then it
ends. Namespaces live as long as a descriptor or a process holds them: when both have gone the kernel removes them with
their links, however the launcher ended.

1. Unshare: a network namespace for the bridge; without root in a user namespace, in which this user is root.
2. Lay out: a namespace and a link for each host, `tc tbf` on both ends.
3. Measure: bytes over every link at once, in both directions, and the time of a byte from host to host.
4. Hand over: the namespaces, and sockets that listen at the bridge's address.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

__all__ = ["ADDRESS", "INTERFACE", "find_address"]

INTERFACE = "eth0"
ADDRESS = "10.77.255.254"  # of the bridge, where the launcher listens
_CLONE_NEWNET, _CLONE_NEWUSER = 0x40000000, 0x10000000
_PR_SET_PDEATHSIG = 1
_WARM_S, _MEASURED_S, _LONGEST_S = 0.1, 0.2, 3.0
_LEAST_BYTES = 32 << 10  # that pass over a link before it counts as measured
_PINGS = 40
_ATTEMPTS, _REACHED = 3, 0.9


class _Obstacle(Exception):
    """Why hosts cannot be emulated by namespaces here."""


def find_address(host: int) -> str:
    """The address of a host.

    >>> find_address(0), find_address(300)
    ('10.77.0.1', '10.77.1.45')
    """
    return f"10.77.{(host + 1) // 256}.{(host + 1) % 256}"


# -- 1. unshare --------------------------------------------------------------------------------------------------------


def _unshare(flags: int) -> None:
    if ctypes.CDLL(None, use_errno=True).unshare(flags):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def _open_switch(is_user: bool) -> tuple[int, int]:
    """Enter the namespace of the bridge: its descriptor, and that of the user namespace (-1 where there is none)."""
    try:
        ids = os.geteuid(), os.getegid()
        _unshare(_CLONE_NEWUSER | _CLONE_NEWNET if is_user else _CLONE_NEWNET)
        maps = {"setgroups": "deny", "uid_map": f"0 {ids[0]} 1", "gid_map": f"0 {ids[1]} 1"}  # it is root there
        for name, text in maps.items() if is_user else ():
            with open(f"/proc/self/{name}", "w", encoding="ascii") as file:
                file.write(text)
    except OSError as error:
        what = "user and network namespaces" if is_user else "a network namespace"
        raise _Obstacle(f"{what} cannot be made here: {error.strerror}") from None
    user = os.open("/proc/self/ns/user", os.O_RDONLY | os.O_CLOEXEC) if is_user else -1
    return _own_network(), user


def _own_network() -> int:
    return os.open("/proc/self/ns/net", os.O_RDONLY | os.O_CLOEXEC)


@contextlib.contextmanager
def _inside(network: int, switch: int) -> Iterator[None]:
    """Enter another network namespace for the block; sockets and programs made inside stay in it."""
    _enter(network)
    try:
        yield
    finally:
        _enter(switch)


def _enter(network: int) -> None:
    if ctypes.CDLL(None, use_errno=True).setns(network, _CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


# -- 2. lay out --------------------------------------------------------------------------------------------------------


def _run_batch(program: str, lines: Sequence[str], keep: Sequence[int] = ()) -> None:
    """Run several commands of `ip` or `tc` in one call."""
    try:
        done = subprocess.run(
            [program, "-batch", "-"], input="\n".join(lines) + "\n", capture_output=True, text=True, pass_fds=keep
        )
    except FileNotFoundError:
        raise _Obstacle(f"`{program}` is not installed: apt-get install iproute2") from None
    if done.returncode:
        words = " ".join(done.stderr.split())
        raise _Obstacle(f"`{program}` failed: {words or done.returncode}")


def _lay_out(switch: int, rates: Sequence[float | None]) -> list[int]:
    """Make the namespaces of the hosts and their links; returns their descriptors."""
    spaces = []
    for _ in rates:
        _unshare(_CLONE_NEWNET)
        spaces.append(_own_network())
    _enter(switch)
    lines = ["link set lo up", "link add lab type bridge", f"addr add {ADDRESS}/16 dev lab", "link set lab up"]
    for host, space in enumerate(spaces):
        lines.append(f"link add host{host} type veth peer name {INTERFACE} netns /proc/self/fd/{space}")
        lines.append(f"link set host{host} master lab up")
    _run_batch("ip", lines, keep=spaces)
    for host, space in enumerate(spaces):
        with _inside(space, switch):
            address = f"addr add {find_address(host)}/16 dev {INTERFACE}"
            _run_batch("ip", ["link set lo up", address, f"link set {INTERFACE} up"])
            if rates[host] is not None:
                _run_batch("tc", [f"qdisc add dev {INTERFACE} {_shape(rates[host])}"])
    shaped = [f"qdisc add dev host{host} {_shape(rate)}" for host, rate in enumerate(rates) if rate is not None]
    if shaped:
        _run_batch("tc", shaped)
    return spaces


def _shape(bits_per_s: float | None) -> str:
    """4 ms of bytes may pass at once: with less a flow does not reach the rate, and what passes is not held back."""
    assert bits_per_s is not None
    burst = int(max(10_000, min(1_000_000, bits_per_s / 8 * 0.004)))
    limit = int(max(400_000, bits_per_s / 8 * 0.05)) + burst  # 50 ms; with a shorter queue, slow links lose packets
    return f"root tbf rate {int(bits_per_s)}bit burst {burst} limit {limit}"


# -- 3. measure --------------------------------------------------------------------------------------------------------


def _connect(switch: int, here: int, there: int, address: str) -> tuple[socket.socket, socket.socket]:
    """A connection from a namespace to another, both of whose ends are in this process."""
    with _inside(there, switch):
        listener = socket.create_server((address, 0))
    with _inside(here, switch):
        near = socket.create_connection(listener.getsockname(), timeout=5)
    listener.settimeout(5)
    far, _ = listener.accept()
    listener.close()
    for sock in (near, far):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return near, far


def _measure_latency(switch: int, spaces: Sequence[int]) -> float:
    """Measure the seconds that a message takes from one host to another."""
    there = spaces[1] if len(spaces) > 1 else switch
    near, far = _connect(switch, spaces[0], there, find_address(1) if len(spaces) > 1 else ADDRESS)
    times = []
    with near, far:
        for _ in range(_PINGS):
            began = time.perf_counter()
            near.send(b"x")
            far.recv(1)
            far.send(b"x")
            near.recv(1)
            times.append(time.perf_counter() - began)
    return sorted(times)[len(times) // 2] / 2


def _measure_rates(switch: int, spaces: Sequence[int]) -> list[float]:
    """Bits of payload a second over each link, the slower way, while the links of all hosts are in use."""
    pairs = [_connect(switch, space, switch, ADDRESS) for space in spaces]
    up = _pour([(near, far) for near, far in pairs])
    for sock in (sock for pair in pairs for sock in pair):
        sock.close()
    pairs = [_connect(switch, space, switch, ADDRESS) for space in spaces]
    down = _pour([(far, near) for near, far in pairs])
    for sock in (sock for pair in pairs for sock in pair):
        sock.close()
    return [min(rates) for rates in zip(up, down, strict=True)]


def _measure_until_reached(switch: int, spaces: Sequence[int], asked: Sequence[float | None]) -> list[float]:
    """Measure again, and keep the best, as other programs may use the machine at the same time."""
    best = [0.0] * len(spaces)
    for _ in range(_ATTEMPTS):
        best = [max(pair) for pair in zip(best, _measure_rates(switch, spaces), strict=True)]
        if all(rate is None or found >= _REACHED * rate for found, rate in zip(best, asked, strict=True)):
            break
    return best


def _pour(pairs: Sequence[tuple[socket.socket, socket.socket]]) -> list[float]:
    """Bits a second that arrive, of all that one end of each pair can send to the other."""
    data, room = bytes(1 << 18), bytearray(1 << 20)
    poll = select.poll()
    flows = {end.fileno(): _Flow() for _, end in pairs}
    sockets = {sock.fileno(): sock for pair in pairs for sock in pair}
    for source, target in pairs:
        source.setblocking(False)
        poll.register(source, select.POLLOUT)
        poll.register(target, select.POLLIN)
    began = time.perf_counter()
    while time.perf_counter() < began + _LONGEST_S and not all(flow.is_measured for flow in flows.values()):
        for number, _ in poll.poll(100):
            if number in flows:
                flows[number].add(sockets[number].recv_into(room), time.perf_counter() - began)
            else:
                with contextlib.suppress(BlockingIOError):
                    sockets[number].send(data)
    return [flow.rate for flow in flows.values()]


class _Flow:
    """What arrives over a link, after what passes at once at the beginning."""

    def __init__(self) -> None:
        self._first = self._last = (0.0, 0)
        self._came = 0

    def add(self, count: int, at_s: float) -> None:
        self._came += count
        self._last = (at_s, self._came)
        if at_s < _WARM_S or not self._first[1]:
            self._first = self._last

    @property
    def is_measured(self) -> bool:
        return self._last[0] - self._first[0] >= _MEASURED_S and self._last[1] - self._first[1] >= _LEAST_BYTES

    @property
    def rate(self) -> float:
        passed_s = self._last[0] - self._first[0]
        return 8.0 * (self._last[1] - self._first[1]) / passed_s if passed_s else 0.0


# -- 4. hand over ------------------------------------------------------------------------------------------------------


def _serve(asked: dict[str, Any]) -> tuple[dict[str, Any], list[int]]:
    """What is told to the launcher, and the descriptors that go with it: network namespaces, listeners, user."""
    switch, user = _open_switch(asked["user"])
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # after unshare, which may undo it
    if os.getppid() != asked["launcher"]:
        sys.exit(1)
    spaces = _lay_out(switch, asked["rates"])
    found: dict[str, Any] = {}
    if asked["measure"]:
        rates = _measure_until_reached(switch, spaces, asked["rates"])
        found = {"latency_s": _measure_latency(switch, spaces), "bits_per_s": rates}
    listeners = [socket.create_server((ADDRESS, 0), backlog=asked["backlog"]) for _ in range(asked["listeners"])]
    fds = [switch, *spaces, *(listener.detach() for listener in listeners)]
    return found, fds + ([user] if user >= 0 else [])


def _main(fd: int) -> None:
    launcher = socket.socket(fileno=fd)
    asked = json.loads(launcher.recv(1 << 16))
    fds: list[int] = []
    try:
        found, fds = _serve(asked)
    except _Obstacle as error:
        found = {"obstacle": str(error)}
    socket.send_fds(launcher, [json.dumps(found).encode()], fds)


if __name__ == "__main__":
    _main(int(sys.argv[1]))
