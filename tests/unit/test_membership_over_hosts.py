"""What a worker on one of several hosts is told by its launcher, and how that ends its waiting for a lost peer."""

from __future__ import annotations

import socket
import threading
from datetime import timedelta

import pytest
import torch
from torch.distributed import HashStore, PrefixStore, TCPStore

from unisono.launchers.runtime.files import anonymous_file
from unisono.launchers.runtime.local_channel import LocalChannel
from unisono.launchers.runtime.membership import HostsMembership, ResultLog, cut_entries, join_entries
from unisono.world.transports import PeerLost, Transport
from unisono.world.transports.interruption import InterruptibleStore, Interruption
from unisono.world.transports.sockets import SocketTransport
from unisono.world.transports.two_level import TwoLevelTransport

pytestmark = pytest.mark.timeout(60)


def connect_pair(interruptions: list[Interruption]) -> list[SocketTransport]:
    """Two ranks of a group, both in this process."""
    store = HashStore()
    made: dict[int, SocketTransport] = {}

    def connect(rank: int) -> None:
        mine = InterruptibleStore(PrefixStore("pair", store), interruptions[rank])
        made[rank] = SocketTransport(mine, rank, 2, timeout_s=40, interruption=interruptions[rank])

    threads = [threading.Thread(target=connect, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [made[0], made[1]]


def test_a_collective_that_waits_for_a_lost_peer_ends_when_that_is_known() -> None:
    interruption = Interruption()
    first, second = connect_pair([interruption, Interruption()])
    errors: list[BaseException] = []
    waits = threading.Event()

    def reduce() -> None:
        waits.set()
        try:
            first.all_reduce([torch.ones(3)], "sum")
        except PeerLost as error:
            errors.append(error)

    thread = threading.Thread(target=reduce)
    thread.start()
    waits.wait()
    interruption.end("worker 1 is lost")
    thread.join()
    (error,) = errors
    assert str(error).startswith("worker 1 is lost; waited for it in all_reduce")
    second.close()


def test_waiting_in_the_store_ends_too_and_its_connection_stays() -> None:
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    client = TCPStore("127.0.0.1", server.port, is_master=False, timeout=timedelta(seconds=40))
    interruption = Interruption()
    store = InterruptibleStore(PrefixStore("generation/3", client), interruption)
    store.set("host/0", "here")
    assert store.get("host/0") == b"here"
    waits = threading.Event()

    def end() -> None:
        waits.wait()
        interruption.end("worker 1 is lost")

    thread = threading.Thread(target=end)
    thread.start()
    waits.set()
    with pytest.raises(PeerLost, match="worker 1 is lost"):
        store.get("host/1")
    thread.join()
    with pytest.raises(PeerLost):
        store.set("host/0", "a generation that is over does not meet")
    client.set("still", "there")
    assert server.get("still") == b"there"


@pytest.mark.parametrize("comes_first", [True, False])
def test_the_end_of_a_generation_is_told_once_whenever_it_comes(comes_first: bool) -> None:
    ours, theirs = LocalChannel.pair()
    membership = HostsMembership(theirs.sock.detach(), anonymous_file("results"), joining=False)
    ended: list[str] = []
    told = threading.Event()

    def end(why: str) -> None:
        ended.append(why)
        told.set()

    over = {"kind": "over", "generation": 0, "why": "worker 1 is lost"}
    if comes_first:
        ours.send(over)
    membership.watch(0, end)
    if not comes_first:
        ours.send(over)
    told.wait()
    ours.send(over)
    ours.send({"kind": "go", "generation": 1, "rank": 0, "size": 1, "pids": [7]})
    given = membership.join_generation()
    assert (given.generation, given.rank, given.size, given.page_fd) == (1, 0, 1, -1)
    membership.watch(1, end)  # the end of generation 0 is not that of 1
    assert ours.receive()[0] == {"kind": "come", "generation": 0, "open": True}
    assert ended == ["worker 1 is lost"]
    ours.sock.shutdown(socket.SHUT_WR)
    with pytest.raises(SystemExit, match="the launcher has ended"):
        membership.join_generation()
    ours.close()
    membership._channel.close()


def test_results_travel_in_pieces_and_only_new_ones() -> None:
    log = ResultLog(anonymous_file("results"))
    log.write([b"one", b"", b"three" * 50])
    stream = log.read_bytes(0)
    assert stream == join_entries([b"one", b"", b"three" * 50])
    found, rest = [], b""
    for at in range(0, len(stream), 7):
        entries, rest = cut_entries(rest + stream[at : at + 7])
        found += entries
    assert (found, rest) == ([b"one", b"", b"three" * 50], b"")
    log.write([b"one", b"", b"three" * 50, b"four"])
    assert cut_entries(log.read_bytes(len(stream))) == ([b"four"], b"")
    assert log.read() == [b"one", b"", b"three" * 50, b"four"]


def test_other_connections_of_the_program_are_left_alone() -> None:
    server = socket.create_server(("127.0.0.1", 0))
    mine = socket.create_connection(server.getsockname())
    theirs, _ = server.accept()
    interruption = Interruption()
    first, second = connect_pair([interruption, Interruption()])
    interruption.end("worker 1 is lost")
    mine.send(b"word")
    assert theirs.recv(4) == b"word"
    with pytest.raises(PeerLost, match="worker 1 is lost"):
        first.all_reduce([torch.ones(3)], "sum")
    for sock in (mine, theirs, server):
        sock.close()
    second.close()


class Recorder(Transport):
    """Notes what is asked of it."""

    def __init__(self) -> None:
        self.rank, self.size = 0, 2
        self.calls: list[str] = []

    def __getattribute__(self, name: str) -> object:
        if name in Transport.__abstractmethods__ or name == "abandon":
            return lambda *_: self.calls.append(name)
        return super().__getattribute__(name)

    all_reduce = reduce_scatter = all_gather = broadcast = all_to_all = send = recv = exchange = split = None


def test_after_a_loss_a_host_does_not_begin_another_collective() -> None:
    flat, inside, across = Recorder(), Recorder(), Recorder()
    transport = TwoLevelTransport(flat, inside, across, ["a", "b"])
    transport.abandon(PeerLost("worker 1 is lost"))
    with pytest.raises(PeerLost, match="lost before"):
        transport.all_reduce([torch.ones(3)], "max")
    assert inside.calls == across.calls == flat.calls == ["abandon"]
