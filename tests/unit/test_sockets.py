"""Connections between ranks: strangers are refused at the door, and one that breaks is made again where it stopped."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import struct
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import TCPStore

from preloaded import Program
from relay import Relay
from socket_ranks import run_ranks
from unisono import PeerLost, World
from unisono.launchers.runtime.channel import Channel, NotProven, connect_once
from unisono.world.transports import door, rings, socket_links
from unisono.world.transports.sockets import SocketTransport

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def relays(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Relay]]:
    """A relay before each rank's door, in the order in which the doors open."""
    made: list[Relay] = []
    lock = threading.Lock()

    def find_port(listener: socket.socket) -> int:
        relay = Relay(listener.getsockname())
        with lock:
            made.append(relay)
        return int(relay.port)

    monkeypatch.setattr(socket_links, "_find_port", find_port)
    yield made
    for relay in made:
        relay.close()


def count_threads() -> int:
    return sum(thread.name.startswith(("unisono door", "unisono lane")) for thread in threading.enumerate())


@pytest.mark.parametrize("lanes", [1, 3])
@pytest.mark.parametrize("cut_at", [0, 100_000, 3_000_000])
def test_a_connection_that_breaks_in_mid_transfer_goes_on_where_it_stopped(
    relays: list[Relay], cut_at: int, lanes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(socket_links, "_count_lanes", lambda: lanes)
    monkeypatch.setattr(rings, "_LANE_BYTES", 512 << 10)  # else 7 MB are too few for three lanes
    n = 900_000
    inputs = [torch.randn(n, generator=torch.Generator().manual_seed(r), dtype=torch.float64) for r in range(3)]
    wanted = inputs[0] + inputs[1] + inputs[2]

    def work(transport: SocketTransport) -> list[torch.Tensor]:
        x = inputs[transport.rank].clone()
        transport.all_reduce([torch.ones(3)], "sum")
        if transport.rank == 0:
            for relay in relays:
                relay.cut_after(cut_at)
        transport.all_reduce([x], "sum")
        out = torch.empty(n // 3, dtype=torch.float64)
        transport.reduce_scatter(inputs[transport.rank], [n // 3] * 3, "sum", out)
        outs = [torch.empty(n // 3, dtype=torch.float64) for _ in range(3)]
        transport.all_gather(out, outs)
        return [x, torch.cat(outs)]

    found = run_ranks(work, 3)
    for each in found:
        assert not isinstance(each, Exception), each
        for x in each:
            torch.testing.assert_close(x, wanted)
    assert sum(relay.cuts for relay in relays) == 3


@pytest.mark.parametrize("encrypt", ["0", "1"])
@pytest.mark.parametrize("operation", ["broadcast", "all_gather", "all_to_all"])
def test_what_is_only_passed_on_goes_on_after_a_break_too(
    relays: list[Relay], operation: str, encrypt: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UNISONO_ENCRYPT", encrypt)
    n = 1_000_003
    inputs = [torch.randn(n, generator=torch.Generator().manual_seed(r), dtype=torch.float64) for r in range(3)]

    def work(transport: SocketTransport) -> list[torch.Tensor]:
        mine, outs = inputs[transport.rank], [torch.empty(n, dtype=torch.float64) for _ in range(3)]
        transport.all_reduce([torch.ones(3)], "sum")
        if transport.rank == 0:
            for relay in relays:
                relay.cut_after(2_500_000)
        if operation == "broadcast":
            transport.broadcast([outs[0] if transport.rank else outs[0].copy_(mine)], 0)
            return outs[:1]
        if operation == "all_gather":
            transport.all_gather(mine, outs)
        else:
            transport.all_to_all([mine + to for to in range(3)], outs)
        return outs

    for rank, outs in enumerate(run_ranks(work, 3)):
        assert not isinstance(outs, Exception), outs
        for source, out in enumerate(outs):
            assert torch.equal(out, inputs[source] + (rank if operation == "all_to_all" else 0))
    assert sum(relay.cuts for relay in relays) >= 2


def test_small_messages_survive_a_break_too(relays: list[Relay]) -> None:
    def work(transport: SocketTransport) -> list[float]:
        found = []
        for step in range(60):
            if step % 20 == 10 and transport.rank == 0:
                relays[step // 20 % 2].cut_after(50)
            x = torch.full((200,), float(transport.rank + step))
            transport.all_reduce([x], "sum")
            found.append(x[-1].item())
            if transport.rank == 0:
                transport.send(torch.full((7,), float(step)), 1)
            else:
                transport.recv(y := torch.empty(7), 0)
                found.append(y[0].item())
        return found

    first, second = run_ranks(work)
    assert first == [2.0 * step + 1 for step in range(60)]
    assert second == [value for step in range(60) for value in (2.0 * step + 1, float(step))]
    assert sum(relay.cuts for relay in relays) >= 2


@pytest.mark.parametrize("encrypt", ["0", "1"])
def test_a_rank_that_is_not_told_how_far_the_other_is_hears_it_although_that_is_busy_elsewhere(
    relays: list[Relay], encrypt: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last acknowledgement is lost with its connection; whoever sent it waits for another message by then."""
    monkeypatch.setenv("UNISONO_ENCRYPT", encrypt)

    def work(transport: SocketTransport) -> list[float]:
        x = torch.full((200_000,), float(transport.rank))
        for lost in (False, True):
            transport.all_reduce([torch.ones(3)], "sum")
            for relay in relays if transport.rank == 0 else ():
                relay.loses_answer = lost
            if transport.rank == 0:
                transport.send(x + 1, 1)
            else:
                transport.recv(x, 0)
        for _ in range(3):  # what was lost of the first is noticed in the next
            transport.all_reduce([y := torch.ones(3)], "sum")
        return [x.mean().item(), y[0].item()]

    assert run_ranks(work, timeout_s=8.0) == [[0.0, 2.0], [1.0, 2.0]]
    assert sum(relay.cuts for relay in relays) >= 1


def test_a_rank_that_left_ends_nothing_that_others_say_to_each_other() -> None:
    def work(transport: SocketTransport) -> float:
        transport.all_reduce([x := torch.ones(3)], "sum")
        if transport.rank == 0:
            time.sleep(2.0)  # one has left, and its door is closed; the other waits
            transport.send(x, 1)
        elif transport.rank == 1:
            transport.recv(x, 0)
        return x[0].item()

    assert run_ranks(work, 3) == [3.0] * 3


def test_a_rank_that_leaves_is_lost_at_once_and_nothing_is_left() -> None:
    def work(transport: SocketTransport) -> str:
        transport.all_reduce([torch.ones(3)], "sum")
        if transport.rank == 1:
            transport.close()
            return ""
        with pytest.raises(PeerLost) as caught:
            transport.all_reduce([torch.ones(300_000)], "sum")
        with pytest.raises(PeerLost, match="lost before"):
            transport.all_reduce([torch.ones(3)], "sum")
        return str(caught.value)

    before = count_threads()
    text, _ = run_ranks(work, timeout_s=50.0)
    assert "rank 1" in text
    assert count_threads() == before


@pytest.mark.parametrize("encrypt", ["0", "1"])
def test_worlds_that_are_lost_and_formed_anew_leave_no_thread_and_no_open_file(
    encrypt: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UNISONO_ENCRYPT", encrypt)
    monkeypatch.setattr(socket_links, "_count_lanes", lambda: 2)
    monkeypatch.setattr("unisono.world.transports.liveness.PATIENCE_S", 0.05)

    def work(transport: SocketTransport) -> str:
        part = transport.split([list(range(transport.size))])
        part.all_reduce([torch.ones(2_000_000)], "sum")
        transport.all_reduce([torch.ones(3)], "sum")
        if transport.rank == 1:
            transport.close()  # in the middle of what the other begins
            part.close()
            return "left"
        with pytest.raises(PeerLost):
            part.all_reduce([torch.ones(2_000_000)], "sum")
        part.close()
        return "lost"

    def count() -> tuple[int, int]:
        return count_threads(), len(os.listdir("/proc/self/fd"))

    assert run_ranks(work) == ["lost", "left"]
    before = count()
    for _ in range(3):
        assert run_ranks(work) == ["lost", "left"]
    assert count() == before


def test_strangers_are_refused_and_named_while_the_ranks_go_on(capfd: pytest.CaptureFixture[str]) -> None:
    ports: list[int] = []
    opened, done = threading.Event(), threading.Event()

    def work(transport: SocketTransport) -> float:
        if transport.rank == 0:
            ports.append(transport._links._door.ports[0])
            opened.set()
        total = 0.0
        while not done.is_set() or total < 10:
            transport.all_reduce([x := torch.ones(5000)], "sum")
            total += x[0].item()
            flag = torch.tensor([float(done.is_set())])
            transport.all_reduce([flag], "max")
            if flag.item() and total >= 10:
                break
        return total

    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.extend(run_ranks(work)))
    thread.start()
    opened.wait()
    address = ("127.0.0.1", ports[0])
    idle = [socket.create_connection(address) for _ in range(5)]  # half open
    for garbage in (b"GET / HTTP/1.1\r\n\r\n" * 10, b"\x00" * 4096, b"unisono channel 1\n" + b"x" * 64):
        with socket.create_connection(address) as sock:
            sock.sendall(garbage)
            sock.settimeout(10)
            with contextlib.suppress(ConnectionError):
                while sock.recv(4096):
                    continue
    with pytest.raises(NotProven):
        connect_once(*address, b"another secret of this length", timeout_s=5.0)
    done.set()
    thread.join()
    for sock in idle:
        sock.close()
    assert results == [results[0]] * 2
    assert results[0] >= 10
    said = capfd.readouterr().err
    assert "a connection from 127.0.0.1:" in said
    assert "to the data port of rank 0 was refused: it did not prove that it knows this run's secret" in said


def test_another_version_is_refused_by_name() -> None:
    def work(transport: SocketTransport) -> dict[str, Any] | None:
        transport.all_reduce([torch.ones(3)], "sum")
        answer = None
        if transport.rank == 0:
            peer = transport._links._peers[1]
            channel: Channel = connect_once(*peer._cards[0][0], peer._secret, timeout_s=5.0)
            channel.send_json(version=99, group="world", rank=0, to=1, lane="mail")
            frames = channel.receive()
            assert frames
            answer = json.loads(frames[0].body)
            channel.close()
        transport.all_reduce([torch.ones(3)], "sum")
        return answer

    answer, _ = run_ranks(work)
    assert "version 2" in answer["refused"]


def test_ranks_of_different_versions_do_not_begin(monkeypatch: pytest.MonkeyPatch) -> None:
    describe = socket_links._describe

    def describe_some(cards: Any) -> dict[str, Any]:
        return describe(cards) | {"version": 3 if threading.current_thread().name == "newer" else 2}

    monkeypatch.setattr(socket_links, "_describe", describe_some)
    before = count_threads()
    for error in run_ranks(lambda transport: transport.rank, names=("older", "newer")):
        assert isinstance(error, ValueError)
        assert re.search(r"speaks version 2 .*\(\{1: 3\}\): install one version of unisono on all hosts", str(error))
    assert count_threads() == before


def test_a_rank_that_announces_too_much_is_refused_by_name() -> None:
    def work(transport: SocketTransport) -> None:
        if transport.rank == 1:
            transport._links.open_out(0, "mail").push(struct.pack("<IIQ", 2**32 - 1, 0, 0))
        transport.all_reduce([torch.ones(3)], "sum")

    error = run_ranks(work)[0]
    assert isinstance(error, PeerLost)
    assert "rank 1 announced a message of 4294967295 bytes" in str(error)


def test_ranks_with_different_secrets_refuse_each_other_by_name(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(socket_links, "_find_secret", lambda _: threading.current_thread().name.encode() * 32)
    before = count_threads()
    found = run_ranks(lambda transport: transport.all_reduce([torch.ones(3)], "sum"), timeout_s=20.0, names=("a", "b"))
    assert all(isinstance(error, PeerLost) for error in found)
    assert re.search(
        r"is not rank \d of this run .* every worker must be given the same secret", " ".join(map(str, found))
    )
    assert "to the data port of rank" in capfd.readouterr().err
    assert count_threads() == before


def test_refusals_count_only_until_a_rank_was_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a run of days strangers may drive out an attempt now and then."""
    answers = iter([NotProven("driven out"), NotProven("driven out"), None] * 2)

    def connect(*_: Any, **__: Any) -> None:
        if (error := next(answers)) is not None:
            raise error

    monkeypatch.setattr(door, "connect_once", connect)
    monkeypatch.setattr(door.Peer, "_introduce", lambda *_: False)
    peer = door.Peer(1, 0, [[("127.0.0.1", 1)]], b"")
    for _ in range(6):
        peer.check("world")


def test_a_link_that_is_silent_for_a_while_changes_nothing(relays: list[Relay]) -> None:
    def work(transport: SocketTransport) -> float:
        transport.all_reduce([torch.ones(3)], "sum")
        if transport.rank == 1:
            time.sleep(1.5)
        transport.all_reduce([x := torch.ones(500_000)], "sum")
        return x.mean().item()

    assert run_ranks(work, timeout_s=10.0) == [2.0, 2.0]


def test_a_rank_that_says_nothing_for_too_long_is_lost() -> None:
    over = threading.Event()

    def work(transport: SocketTransport) -> Any:
        if transport.rank == 1:
            over.wait(30)
            return None
        try:
            transport.all_reduce([torch.ones(300_000)], "sum")
        except PeerLost as error:
            return str(error)
        finally:
            over.set()
        return "nothing was raised"

    text, _ = run_ranks(work, timeout_s=0.5)
    assert "nothing has come or gone for 0.5 s" in text


KNOWN = b"a gradient that a listener would recognise" * 3000


def send_known(transport: SocketTransport) -> list[float]:
    """A large and a small message with bytes that can be looked for."""
    x = torch.frombuffer(bytearray(KNOWN), dtype=torch.uint8).clone()
    transport.broadcast([x], 0)
    y = torch.frombuffer(bytearray(KNOWN[:420]), dtype=torch.uint8).clone()
    transport.broadcast([y], 0)
    transport.all_reduce([z := torch.ones(300_000)], "sum")
    return [z.min().item(), z.max().item(), float(bytes(x.numpy()) == KNOWN), float(bytes(y.numpy()) == KNOWN[:420])]


@pytest.mark.parametrize("encrypt", ["0", "1"])
def test_known_bytes_are_on_the_plain_wire_and_not_on_the_encrypted_one(
    relays: list[Relay], encrypt: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UNISONO_ENCRYPT", encrypt)
    assert run_ranks(send_known) == [[2.0, 2.0, 1.0, 1.0]] * 2
    seen = b"".join(bytes(relay.seen) for relay in relays)
    assert len(seen) > len(KNOWN)
    assert (KNOWN[:42] in seen) == (encrypt == "0")


@pytest.mark.parametrize("lanes", [1, 3])
def test_an_encrypted_connection_that_breaks_goes_on_too(
    relays: list[Relay], lanes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UNISONO_ENCRYPT", "1")
    monkeypatch.setattr(socket_links, "_count_lanes", lambda: lanes)

    def work(transport: SocketTransport) -> list[float]:
        transport.all_reduce([torch.ones(3)], "sum")
        if transport.rank == 0:
            for relay in relays:
                relay.cut_after(1_000_000)
        transport.all_reduce([x := torch.ones(2_000_000)], "sum")
        return [x.min().item(), x.max().item()]

    assert run_ranks(work) == [[2.0, 2.0]] * 2
    assert sum(relay.cuts for relay in relays) == 2


def test_an_outage_stands_in_the_ledger(relays: list[Relay]) -> None:
    def work(transport: SocketTransport) -> list[str]:
        world = World(transport, hosts=["a", "b"])
        world.all_reduce(torch.ones(3)).wait()
        if world.rank == 0:
            for relay in relays:
                relay.cut_after(1_000_000)
        world.all_reduce(torch.ones(2_000_000), tag="gradients").wait()
        world.all_reduce(torch.ones(2_000_000), tag="gradients").wait()
        found = [event.values for event in world.ledger.events if event.kind == "outage"]
        world.close()
        assert all(values["seconds"] > 0 for values in found)
        return [values["during"] for values in found]

    found = run_ranks(work)
    assert found[0]
    assert set(found[0] + found[1]) == {"all_reduce gradients"}


CHILD_THAT_STAYS = """
import os, sys, threading
import torch
from torch.distributed import PrefixStore, TCPStore
from unisono import PeerLost, World
from unisono.world.transports.sockets import SocketTransport

rank = int(sys.argv[1])
store = TCPStore("127.0.0.1", int(sys.argv[2]), 2, is_master=False)
transport = SocketTransport(PrefixStore("x", store), rank, 2, timeout_s=40)
transport.all_reduce([torch.ones(3)], "sum")
transport.all_reduce([torch.ones(300_000)], "sum")
if rank == 1:
    if os.fork() == 0:
        print("child", os.getpid(), flush=True)
        sys.stdin.read()  # until the test has ended
        os._exit(0)
    os.kill(os.getpid(), 9)
try:
    transport.all_reduce([torch.ones(300_000)], "sum")
except PeerLost as error:
    print(error)
"""


def test_a_rank_is_lost_at_once_although_a_child_of_it_lives_on(tmp_path: Path) -> None:
    store = TCPStore("127.0.0.1", 0, 2, is_master=True, wait_for_workers=False)
    program = tmp_path / "program.py"
    program.write_text(CHILD_THAT_STAYS)
    ranks = [Program(program, rank, store.port, env=os.environ) for rank in range(2)]
    try:
        said, _ = ranks[0].communicate(timeout=50)
        assert "rank 1" in said
        assert "nothing has come or gone" not in said
        assert ranks[1].wait(10) == -signal.SIGKILL
        assert ranks[1].stdout.readline().startswith("child")
    finally:
        ranks[1].communicate()  # the child ends with its input
