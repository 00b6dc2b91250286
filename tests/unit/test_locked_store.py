"""The store in which ranks meet: to its own it is as torch's, and strangers get nothing from it."""

from __future__ import annotations

import importlib
import random
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hostile_ports import draw_attack, knock, record, visit
from unisono.launchers.runtime import channel, store_server
from unisono.launchers.runtime.channel import connect_once, read_store_secret
from unisono.launchers.runtime.launch_env import Place
from unisono.launchers.runtime.store_server import LONGEST_MESSAGE, StoreServer
from unisono.world import PeerLost, locked_store, stores
from unisono.world.locked_store import LockedStore
from unisono.world.transports import connections

SECRET = bytes(range(32))


@pytest.fixture
def server() -> Iterator[StoreServer]:
    made = StoreServer(socket.create_server(("127.0.0.1", 0)), SECRET)
    made.start()
    yield made
    made.close()


@pytest.fixture(autouse=True)
def close_stores() -> Iterator[None]:
    yield
    for store in locked_store._kept:
        store.close()


def open_store(server: StoreServer, secret: bytes = SECRET) -> LockedStore:
    return LockedStore(*server.address, secret, timeout_s=20)


QUESTIONS: list[Callable[[Any], object]] = [
    lambda s: s.set("a", "1"),
    lambda s: s.get("a"),
    lambda s: (s.add("n", 3), s.add("n", -5), s.get("n")),
    lambda s: (s.check(["a", "n"]), s.check(["a", "none"])),
    lambda s: s.wait(["a", "n"]),
    lambda s: s.wait(["a"], timedelta(seconds=9)),
    lambda s: s.compare_set("c", "", "first"),
    lambda s: s.compare_set("c", "wrong", "second"),
    lambda s: s.compare_set("c", "first", "second"),
    lambda s: s.compare_set("none", "expected", "x"),
    lambda s: s.check(["none"]),
    lambda s: (s.delete_key("a"), s.delete_key("a"), s.check(["a"])),
    lambda s: (s.append("p", "ab"), s.append("p", "cd"), s.get("p")),
    lambda s: (s.multi_set(["x", "y"], ["1", "2"]), s.multi_get(["y", "x"])),
    lambda s: s.set("long", "z" * (3 << 20)),
    lambda s: len(s.get("long")),
    lambda s: s.has_extended_api(),
    lambda s: s.clone().get("c"),
]


@pytest.mark.parametrize("prefixed", [False, True])
def test_it_answers_as_torchs_does(server: StoreServer, prefixed: bool) -> None:
    ours: Any = open_store(server)
    torchs: Any = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    if prefixed:  # so torch's C++ asks
        ours, torchs = dist.PrefixStore("q", dist.PrefixStore("p", ours)), dist.PrefixStore("p", torchs)
    before = ours.num_keys(), torchs.num_keys()
    for number, question in enumerate(QUESTIONS):
        assert question(ours) == question(torchs), number
    assert ours.num_keys() - before[0] == torchs.num_keys() - before[1] == 6


def test_queues_hand_out_in_order(server: StoreServer) -> None:
    store, got = open_store(server), []
    takers = [threading.Thread(target=lambda: got.append(store.queue_pop("q"))) for _ in range(2)]
    for thread in takers:
        thread.start()
    for value in ("1", "2", "3"):
        store.queue_push("q", value)
    for thread in takers:
        thread.join()
    assert (sorted(got), store.queue_len("q"), store.queue_pop("q")) == ([b"1", b"2"], 1, b"3")
    with pytest.raises(dist.DistStoreError, match="is empty"):
        store.queue_pop("q", False)


def test_who_waits_is_answered_when_the_last_key_is_there_and_does_not_hold_up_others(server: StoreServer) -> None:
    store = open_store(server)
    waiting = threading.Thread(target=lambda: store.wait(["first", "second"], timedelta(seconds=60)))
    waiting.start()
    for key in ("first", "second"):
        assert waiting.is_alive()
        store.set(key, "")  # the same store, while a thread waits in it
    waiting.join(60)
    assert not waiting.is_alive()


def test_a_wait_that_is_over_names_the_keys_and_the_store_goes_on(server: StoreServer) -> None:
    store = open_store(server)
    with pytest.raises(dist.DistStoreError, match=r"wait timeout after 0\.05 s for keys never"):
        store.wait(["never"], timedelta(seconds=0.05))
    store.set_timeout(timedelta(seconds=0.05))
    with pytest.raises(RuntimeError, match="timeout"):
        dist.PrefixStore("p", store).get("never")
    store.set("never", "now")
    assert store.get("never") == b"now"


def test_a_group_of_gloo_meets_in_it(server: StoreServer) -> None:
    found: dict[int, float] = {}

    def rank(number: int) -> None:
        store = dist.PrefixStore("group", open_store(server))
        group = dist.ProcessGroupGloo(store, number, 3, timedelta(seconds=60))
        x = torch.tensor([float(number + 1)])
        group.allreduce([x]).wait()
        found[number] = x.item()

    threads = [threading.Thread(target=rank, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {0: 6.0, 1: 6.0, 2: 6.0}


def test_a_store_that_has_ended_says_so(server: StoreServer) -> None:
    store = open_store(server)
    assert not store.has_ended()
    server.close()
    assert store.has_ended()
    for _ in range(2):
        with pytest.raises(dist.DistNetworkError, match=r"the store at 127.0.0.1:\d+ does not answer"):
            store.add("n", 1)
    server.__init__(socket.create_server(("127.0.0.1", 0)), SECRET)  # type: ignore[misc]  # for the fixture


# -- strangers ---------------------------------------------------------------------------------------------------------


def test_another_secret_opens_nothing(server: StoreServer) -> None:
    with pytest.raises(PeerLost, match="is not the store of this run"):
        open_store(server, b"x" * 32)


def test_nothing_that_a_stranger_says_is_answered_and_nothing_is_changed(server: StoreServer) -> None:
    store = open_store(server)
    store.set("k", "mine")
    recording = record(server.address, SECRET, asks=True)
    assert visit([(server.address, recording)], 200, seed=1, wait=False) == (200, 200)
    assert (store.get("times asked"), store.get("k"), store.num_keys()) == (b"1", b"mine", 2)


def test_the_same_strangers_are_let_in_where_nobody_asks_for_a_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    """That they knock as one must, to be let in."""
    open_to_all = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    rng = random.Random(0)
    attack = next(one for one in iter(lambda: draw_attack(rng, b""), None) if one.kind == "torch")
    monkeypatch.setattr("hostile_ports.PATIENCE_S", 0.5)
    assert not knock(("127.0.0.1", open_to_all.port), attack)
    assert open_to_all.check(["k"])


def test_who_does_not_prove_itself_in_time_is_put_out(server: StoreServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel, "GREETING_S", 0.2)
    store = open_store(server)
    with socket.create_connection(server.address, timeout=60) as slow:
        slow.sendall(b"x" * 20)
        while slow.recv(4096):
            pass
    store.set("still", "there")


def test_strangers_drive_out_strangers_and_not_the_workers(
    server: StoreServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channel, "MOST_UNPROVEN", 4)
    store = open_store(server)
    held = [socket.create_connection(server.address, timeout=60) for _ in range(12)]
    for sock in held[:8]:
        while sock.recv(4096):
            pass
    store.set("still", "there")
    assert open_store(server).get("still") == b"there"
    for sock in held:
        sock.close()


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        ("S", b""),
        ("S", struct.pack("<I", LONGEST_MESSAGE + 1)),
        ("S", struct.pack("<II", 8, 2**32 - 1) + b"xxxx"),
        ("S", struct.pack("<I", 3) + b"abcdef"),
    ],
)
def test_a_worker_whose_messages_are_damaged_is_put_out_alone(server: StoreServer, kind: str, body: bytes) -> None:
    store = open_store(server)
    channel = connect_once(*server.address, SECRET, timeout_s=20)
    channel.send(kind, body)
    channel.sock.settimeout(60)
    assert channel.receive() is None
    channel.close()
    store.set("still", "there")


@pytest.mark.parametrize("kind", ["?", "S", "A", "M"])
def test_a_question_that_makes_no_sense_is_a_problem_and_no_end(server: StoreServer, kind: str) -> None:
    store = open_store(server)
    with pytest.raises(dist.DistStoreError, match=r"knows no question|expected|key without|holds"):
        store._ask(kind, [b"one"] if kind != "A" else [b"one", b"two"])
    store.set("still", "there")


def test_what_is_kept_has_a_limit(server: StoreServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_server, "MOST_BYTES", 100)
    store = open_store(server)
    store.set("a", "x" * 90)
    with pytest.raises(dist.DistStoreError, match="the store is full"):
        store.set("b", "x" * 20)
    with pytest.raises(dist.DistStoreError, match="a key of 5000 bytes"):
        store.set("k" * 5000, "")
    store.delete_key("a")
    store.set("b", "x" * 20)


# -- how the secret reaches workers without a launcher -----------------------------------------------------------------


def test_on_one_host_the_secret_comes_through_the_local_socket() -> None:
    place = Place("MPI", 0, 2, 0, 2, job=f"test {time.monotonic_ns()}")
    found: list[Any] = []
    other = Place(**{**place.__dict__, "rank": 1, "local_rank": 1})
    thread = threading.Thread(target=lambda: found.append(stores.open_engine_store(other, 0, timeout_s=60)))
    thread.start()
    store = stores.open_engine_store(place, 0, timeout_s=60)
    thread.join()
    assert isinstance(store, LockedStore)
    store.set("from", "rank 0")
    assert found[0].get("from") == b"rank 0"


def test_another_users_socket_is_not_trusted(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the side that is told, and on the side that tells."""
    monkeypatch.setattr(stores.os, "getuid", lambda: 4_000_000)
    name = "\0unisono 4000000 MPI foreign 0"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(name)
        listener.listen()
        with pytest.raises(PermissionError, match="another user's process"):
            stores.open_engine_store(Place("MPI", 1, 2, 1, 2, job="foreign"), 0, timeout_s=5)
    told: list[bytes] = []

    def ask() -> None:
        with socket.socket(socket.AF_UNIX) as sock:
            while sock.connect_ex(name):
                time.sleep(0.01)
            told.append(sock.recv(100))

    thread = threading.Thread(target=ask)
    thread.start()
    with pytest.raises(TimeoutError):
        stores.open_engine_store(Place("MPI", 0, 2, 0, 2, job="foreign"), 0, timeout_s=0.5)
    thread.join()
    assert told == [b""]


def test_which_store_asks_for_the_secret() -> None:
    env = {"UNISONO_SECRET": "s" * 32, "UNISONO_STORE": "10.0.0.1:7"}
    ours = read_store_secret("10.0.0.1", 7, hosted=True, env=env)
    assert ours is not None
    assert ours == read_store_secret("10.0.0.9", 8, hosted=False, env=env)  # which rank 0 keeps
    assert read_store_secret("10.0.0.1", 8, hosted=True, env=env) is None  # torchrun's own
    assert read_store_secret("10.0.0.1", 7, hosted=True, env={}) is None
    with pytest.raises(ValueError, match="UNISONO_SECRET has 5 characters; expected at least 16"):
        read_store_secret("10.0.0.1", 7, hosted=False, env={"UNISONO_SECRET": "short"})


def test_a_group_that_the_program_makes_after_us_meets_in_the_same_store(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    for name, value in {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "UNISONO_SECRET": "s" * 32}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    torchs = importlib.import_module("torch.distributed.rendezvous")
    monkeypatch.setattr(torchs, "_create_c10d_store", torchs._create_c10d_store)  # back to it after the test
    ours = stores.open_store("127.0.0.1", port, serve=True)
    dist.init_process_group("gloo", rank=0, world_size=1)
    try:
        ours.set("from", "us")
        theirs = dist.distributed_c10d._get_default_store()
        while isinstance(theirs, dist.PrefixStore):
            theirs = theirs.underlying_store
        assert theirs.get("from") == b"us"
    finally:
        dist.destroy_process_group()
        stores._served[("127.0.0.1", port)].close()


@pytest.mark.parametrize("open_it", [stores.open_tcp_store, stores.open_locked_store], ids=["torch's", "ours"])
def test_who_waits_long_for_the_store_says_so_once(
    open_it: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A name that the cluster's DNS does not know, for example: the end of the wait would be five minutes away."""
    monkeypatch.setattr(connections, "SAID_AFTER_S", 0.02)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    secret = () if open_it is stores.open_tcp_store else (SECRET,)
    with pytest.raises(PeerLost, match=r"no store answers at 127\.0\.0\.1:"):
        open_it("127.0.0.1", port, *secret, serve=False, timeout_s=0.3)
    said = capsys.readouterr().err
    assert said.count("unisono: no store answers at 127.0.0.1:") == 1
    assert "Connection refused" in said
    assert said.endswith("; still trying\n")
