"""Encrypted connections: who listens decides, nobody in the middle can read, change or undo it, and it is agreed on."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import pytest
import torch
from torch.distributed import HashStore

from relay import Relay
from unisono import World
from unisono.launchers.engines.ssh import Ssh
from unisono.launchers.runtime.addresses import OwnAddress, find_network, list_own_addresses, open_listener
from unisono.launchers.runtime.channel import Channel, ChannelServer, Frame, NotProven, connect_once
from unisono.launchers.runtime.debugger.hub import Hub, connect_to_hub
from unisono.launchers.runtime.encryption import is_control_encrypted, wrap_client, wrap_server
from unisono.launchers.runtime.local_channel import EventLoop
from unisono.launchers.runtime.store_server import StoreServer
from unisono.world.locked_store import LockedStore
from unisono.world.probe import EncryptionCost, measure_encryption
from unisono.world.transports.socket_links import Address, choose_addresses, choose_encryption, count_encrypted_bytes
from unisono.world.transports.sockets import SocketTransport

pytestmark = pytest.mark.timeout(60)

SECRET, OTHER = b"the secret of this run, which is long", b"another secret, which is long enough, too"
KNOWN = b"a gradient, or a key, that nobody else is to read"
SEALED, PLAIN = b"unisono channel 1 tls\n", b"unisono channel 1\n"


class Echo:
    """A ChannelServer in a thread, which sends every frame back; what became of its callers."""

    def __init__(self, *, is_encrypted: bool) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.address = self.listener.getsockname()
        self.heard: list[Frame] = []
        self.lost: list[bool] = []  # of each caller that has gone: whether it had proven itself
        self.turns = 0
        self._loop = EventLoop()
        self._server = ChannelServer(
            self._loop,
            self.listener,
            SECRET,
            self._on_frames,
            self._on_lost,
            is_encrypted=is_encrypted,
            name="the echo",
        )
        self._is_over = False
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        self._server.start()
        while not self._is_over:
            self._loop.pump(self._server.drop_late())
            self.turns += 1
        self._server.close()
        self._loop.close()

    def _on_frames(self, channel: Channel, frames: list[Frame]) -> None:
        self.heard += frames
        for kind, body in frames:
            self._server.send_frame(channel, kind, body)

    def _on_lost(self, channel: Channel) -> None:
        self.lost.append(channel.proven)

    def close(self) -> None:
        self._is_over = True
        self._loop.wake()
        self._thread.join()


@pytest.fixture
def serve() -> Iterator[Callable[..., Echo]]:
    made: list[Echo] = []

    def start(*, is_encrypted: bool) -> Echo:
        made.append(Echo(is_encrypted=is_encrypted))
        return made[-1]

    yield start
    for echo in made:
        echo.close()


def receive(channel: Channel, nbytes: int) -> bytes:
    found = b""
    while len(found) < nbytes:
        frames = channel.receive()
        assert frames is not None
        found += b"".join(frame.body for frame in frames)
    return found


@pytest.mark.parametrize("is_encrypted", [False, True])
def test_who_connects_follows_who_listens_and_messages_of_any_length_pass(serve: Any, is_encrypted: bool) -> None:
    echo = serve(is_encrypted=is_encrypted)
    relay = Relay(echo.address)
    channel = connect_once("127.0.0.1", relay.port, SECRET, timeout_s=5.0)
    assert channel.is_encrypted == is_encrypted
    body = KNOWN + os.urandom(3_000_000)  # more than a socket takes at once: it is sent and received in turns
    sender = threading.Thread(target=channel.send, args=("x", body))  # one thread sends while another receives
    sender.start()
    assert receive(channel, len(body)) == body
    sender.join()
    assert (KNOWN in relay.seen) != is_encrypted
    channel.close()
    relay.close()


@pytest.mark.timeout(20)
def test_who_looks_at_the_stacks_of_all_threads_ends_no_connection(serve: Any) -> None:
    """The search for slow ranks does: it holds the frames in which something is sent for longer than these run."""
    kept: list[Any] = []

    def keep(frame: FrameType, event: str, arg: Any) -> None:
        if event == "call" and frame.f_code.co_name == "send":
            kept.append(frame)

    echo = serve(is_encrypted=True)
    channel = connect_once(*echo.address[:2], SECRET, timeout_s=10)
    sys.setprofile(keep)
    try:
        channel.send("J", KNOWN)
    finally:
        sys.setprofile(None)
    assert any(frame.f_globals["__name__"] == "ssl" for frame in kept)
    assert receive(channel, len(KNOWN)) == KNOWN
    channel.close()


def shake(sock: socket.socket, line: bytes) -> Any:
    """The server's side of whoever stands in the middle: it says the line, and begins TLS if that says so."""
    sock.settimeout(5)
    sock.sendall(line)
    return wrap_server(sock) if line == SEALED else sock


def reach(address: tuple[str, int]) -> Any:
    """Its other side: it follows the line that the real server says."""
    sock = socket.create_connection(address, timeout=5)
    line = sock.recv(len(PLAIN))
    if line == PLAIN:
        return sock
    sock.recv(len(SEALED) - len(PLAIN))
    return wrap_client(sock)


@pytest.mark.parametrize(("is_encrypted", "line"), [(True, SEALED), (True, PLAIN), (False, SEALED)])
def test_who_stands_in_the_middle_is_refused_on_both_sides(serve: Any, is_encrypted: bool, line: bytes) -> None:
    """It has a handshake of its own with either side, or with one of them, and passes the proofs on as they are."""
    echo, fake = serve(is_encrypted=is_encrypted), socket.create_server(("127.0.0.1", 0))

    def stand_between() -> None:
        near, far = shake(fake.accept()[0], line), reach(echo.address)
        with contextlib.suppress(OSError):
            nonce = far.recv(4096).removeprefix(PLAIN)
            near.send(nonce if line == PLAIN else PLAIN + nonce)
            far.send(near.recv(4096))  # the proof of whoever connects
            near.send(far.recv(4096))
        near.close()
        far.close()

    thread = threading.Thread(target=stand_between)
    thread.start()
    with pytest.raises((NotProven, ConnectionError)):
        connect_once(*fake.getsockname(), SECRET, timeout_s=5.0)
    thread.join()
    fake.close()
    deadline = time.monotonic() + 5
    while not echo.lost and time.monotonic() < deadline:
        time.sleep(0.01)
    assert echo.lost == [False]
    assert not echo.heard


@pytest.mark.parametrize("is_encrypted", [False, True])
def test_another_secret_is_refused_on_both_sides_and_named(
    serve: Any, is_encrypted: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    echo = serve(is_encrypted=is_encrypted)
    with pytest.raises(NotProven):
        connect_once(*echo.address, OTHER, timeout_s=5.0)
    connect_once(*echo.address, SECRET, timeout_s=5.0).close()
    said = capfd.readouterr().err
    assert "unisono: a connection from 127.0.0.1:" in said
    assert "to the echo was refused: it did not prove that it knows this run's secret" in said


@pytest.mark.parametrize("is_encrypted", [False, True])
def test_who_only_looks_whether_somebody_listens_is_not_told_of(
    serve: Any, is_encrypted: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    echo = serve(is_encrypted=is_encrypted)
    for _ in range(10):
        socket.create_connection(echo.address).close()
    connect_once(*echo.address, SECRET, timeout_s=5.0).close()
    while len(echo.lost) < 11:
        time.sleep(0.01)
    assert capfd.readouterr().err == ""


def test_a_caller_that_says_nothing_costs_no_time(serve: Any) -> None:
    """Half-open connections wait for the handshake: the server sleeps meanwhile, and serves others."""
    echo = serve(is_encrypted=True)
    silent = [socket.create_connection(echo.address) for _ in range(20)]
    time.sleep(0.3)
    before = echo.turns
    time.sleep(0.3)
    assert echo.turns - before < 20
    channel = connect_once(*echo.address, SECRET, timeout_s=5.0)
    channel.send("x", KNOWN)
    assert receive(channel, len(KNOWN)) == KNOWN
    channel.close()
    for sock in silent:
        sock.close()


def test_what_else_may_listen_is_told_apart() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        for line, words in (
            (b"SSH-2.0-OpenSSH_9\r\n", "something else"),
            (b"unisono channel 7\n", "another version"),
        ):

            def speak(line: bytes = line) -> None:
                with contextlib.suppress(ConnectionError), listener.accept()[0] as sock:
                    sock.sendall(line + bytes(40))
                    sock.recv(1)

            thread = threading.Thread(target=speak)
            thread.start()
            with pytest.raises(NotProven, match=words):
                connect_once(*listener.getsockname(), SECRET, timeout_s=5.0)
            thread.join()


@pytest.mark.parametrize("is_encrypted", [False, True])
def test_what_lies_in_the_store_is_on_the_plain_wire_and_not_on_the_encrypted_one(is_encrypted: bool) -> None:
    """A known object that rank 0 leaves in the store, and another reads there."""
    server = StoreServer(socket.create_server(("127.0.0.1", 0)), SECRET, is_encrypted=is_encrypted)
    server.start()
    relay = Relay(server.address)
    stores = [LockedStore("127.0.0.1", relay.port, SECRET, timeout_s=10) for _ in range(2)]
    waited: list[bytes] = []
    waiting = threading.Thread(target=lambda: waited.append(stores[1].get("later")))
    waiting.start()
    stores[0].set("now", KNOWN * 1000)
    assert stores[1].get("now") == KNOWN * 1000
    stores[0].set("later", KNOWN[::-1])
    waiting.join()
    assert waited == [KNOWN[::-1]]
    assert [text in relay.seen for text in (KNOWN, KNOWN[::-1], b"later")] == [not is_encrypted] * 3
    for store in stores:
        store.close()
    server.close()
    relay.close()


@pytest.mark.parametrize("is_encrypted", [False, True])
def test_what_is_typed_in_the_debugger_is_hidden_as_well(is_encrypted: bool) -> None:
    hub = Hub(socket.create_server(("127.0.0.1", 0)), SECRET, lambda _: None, is_encrypted)
    hub.start()
    relay = Relay(hub.address)
    worker, prompt = (connect_to_hub([("127.0.0.1", relay.port)], SECRET) for _ in range(2))
    worker.send(kind="worker", rank=0, size=1, pid=1, host=KNOWN.decode())
    prompt.send(kind="prompt")
    said = prompt.messages()
    assert any(message.get("host") == KNOWN.decode() for message in (next(said) for _ in range(2)))
    assert (KNOWN in relay.seen) != is_encrypted
    for link in (worker, prompt):
        link.close()
    hub.close()
    relay.close()


# -- whether ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("asked", "is_one_host", "expected"),
    [("", True, False), ("", False, True), ("0", False, False), ("1", True, True)],
)
def test_the_control_plane_between_hosts_is_encrypted_unless_asked_not_to(
    monkeypatch: pytest.MonkeyPatch, asked: str, is_one_host: bool, expected: bool
) -> None:
    monkeypatch.setenv("UNISONO_ENCRYPT", asked)
    assert is_control_encrypted(is_one_host=is_one_host) == expected


def place(text: str) -> Address:
    """10.0.0.7/24, as a rank describes it."""
    one = ipaddress.ip_interface(text)
    return Address(str(one.ip), 1, find_network(str(one.ip), [OwnAddress("eth0", one)]))


@pytest.mark.parametrize(
    ("addresses", "expected"),
    [
        (["10.0.0.7/24", "10.0.0.8/24"], False),
        (["10.0.0.7/24", "10.0.1.8/24"], True),
        (["10.0.0.7/32", "10.0.1.8/32"], False),  # the kernel knows no network: a cloud's
        (["192.168.0.2/24", "10.0.0.8/32"], True),
        (["8.8.8.8/24", "8.8.8.9/24"], True),
        (["10.0.0.7/24", "8.8.8.9/24"], True),
        (["fd00::1/64", "fd00::2/64"], False),
        (["127.0.0.1/8", "127.0.0.1/8"], False),
        (["::1/128", "::1/128"], False),
    ],
)
def test_ranks_on_different_networks_or_at_public_addresses_are_exposed(addresses: list[str], expected: bool) -> None:
    is_exposed, cards = choose_addresses([[[place(address)]] for address in addresses])
    assert is_exposed == expected
    assert [card for ((card,),) in cards] == [(address.partition("/")[0], 1) for address in addresses]


def test_a_private_network_of_all_ranks_is_the_only_one_that_is_used() -> None:
    """They have public addresses, and others, too: bytes that are not encrypted do not go there."""
    first = [place("10.0.0.7/24"), place("2600::7/64"), place("192.168.0.2/24")]
    second = [place("192.168.1.2/24"), place("2600::8/64"), place("10.0.0.8/24")]
    assert choose_addresses([[first], [second]]) == (False, [[[("10.0.0.7", 1)]], [[("10.0.0.8", 1)]]])


def test_a_card_that_is_in_no_common_network_is_used_and_exposes() -> None:
    ranks = [[[place(f"10.0.0.{rank}/24")], [place(f"10.7.{rank}.1/24")]] for rank in (1, 2)]
    is_exposed, cards = choose_addresses(ranks)
    assert is_exposed
    assert [len(each) for each in cards] == [2, 2]


def test_one_rank_that_asks_is_enough_and_a_no_stands_against_the_default_only() -> None:
    assert choose_encryption([None, None], is_exposed=True)
    assert not choose_encryption([None, None], is_exposed=False)
    assert not choose_encryption([None, False], is_exposed=True)
    assert choose_encryption([True, False], is_exposed=False)


def test_launchers_and_ranks_listen_at_the_ports_that_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    first = next(port for port in range(42_000, 60_000, 4) if all(map(is_free, range(port, port + 3))))
    monkeypatch.setenv("UNISONO_PORTS", f"{first}-{first + 2}")
    listeners = [Ssh(["a"]).listen(8) for _ in range(3)]
    assert {listener.getsockname()[1] for listener in listeners} == {first, first + 1, first + 2}
    with pytest.raises(OSError, match="in use"):
        Ssh(["a"]).listen(8)
    for listener in listeners:
        listener.close()


def is_free(port: int) -> bool:
    try:
        open_listener("", ports=str(port)).close()
    except OSError:
        return False
    return True


@pytest.mark.parametrize("host", ["::1", "127.0.0.1"])
@pytest.mark.parametrize("is_encrypted", [False, True])
def test_ranks_meet_over_either_protocol(host: str, is_encrypted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if host not in map(str, list_own_addresses()):
        pytest.skip(f"this host has no address {host}")
    monkeypatch.setenv("UNISONO_ENCRYPT", str(int(is_encrypted)))
    before = count_encrypted_bytes()
    server = StoreServer(open_listener(host), SECRET, is_encrypted=is_encrypted)
    server.start()
    stores = [LockedStore(host, server.address[1], SECRET, timeout_s=10) for _ in range(2)]
    results: list[Any] = [None, None]

    def run(rank: int) -> None:
        transport = SocketTransport(stores[rank], rank, 2, timeout_s=20)
        x = torch.full((100_000,), float(rank + 1))
        transport.all_reduce([x], "sum")
        places = [place for card in transport._links._peers[1 - rank]._cards for place, _ in card]
        results[rank] = x.unique().tolist(), places, transport.is_encrypted
        transport.close()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [([3.0], [host], is_encrypted)] * 2
    moved = count_encrypted_bytes() - before
    assert 4 * 400_000 < moved < 5 * 400_000 if is_encrypted else not moved  # sent by each, and received by each
    for store in stores:
        store.close()
    server.close()


def test_what_encryption_costs_is_measured_between_hosts() -> None:
    """Two ranks that count as hosts: their link is measured over further connections, encrypted and not."""
    store, found = HashStore(), [None, None]

    def run(rank: int) -> None:
        world = World(SocketTransport(store, rank, 2, timeout_s=20), hosts=["a", "b"])
        found[rank] = measure_encryption(world)  # type: ignore[call-overload]
        world.close()

    before = threading.enumerate()
    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    cost = found[0]
    assert isinstance(cost, EncryptionCost)
    assert found[1] == cost
    assert not cost.is_on
    assert cost.plain_bits_per_s > 0 < cost.encrypted_bits_per_s
    left = [thread.name for thread in threading.enumerate() if thread not in before]
    assert not any(name.startswith(("unisono door", "unisono lane")) for name in left), left
    assert measure_encryption(World()) is None


def test_a_port_in_use_is_named_with_what_to_do() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as taken,
        pytest.raises(OSError, match=r"in use on host .* one for each rank"),
    ):
        open_listener("127.0.0.1", ports=str(taken.getsockname()[1]))
