"""Strangers at the control ports of a run (the launcher's, the store's), or at its ranks' data ports: what they send
is drawn from a seed.

`attack_training(300)` trains with two workers while that many messages arrive, and says what came of both.
`python benchmarks/faults.py` does so with 10,000, and with 10,000 to each data port.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import random
import socket
import ssl
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch

import unisono as un
from engine_agents import Agents
from unisono.launchers.engines.engine import Engine, Work
from unisono.launchers.runtime.channel import Channel, connect_once, read_store_secret
from unisono.launchers.runtime.encryption import wrap_client
from unisono.launchers.runtime.store_server import send_message

GREETING = b"unisono channel 1\n"
GREETING_BYTES = len(GREETING) + 32  # all that a stranger is told
SEALED = b"unisono channel 1 tls\n"
HELLO_BYTES = 4096  # that TLS answers to a hello, at most: it says nothing of the run
PATIENCE_S = 20.0  # for a port to close; it gives a stranger ten seconds to prove itself
KINDS = ("noise", "text", "oversized", "unproven", "replayed", "truncated", "torch", "pickle")
TEXTS = (b"GET / HTTP/1.1\r\nHost: a\r\n\r\n", b"SSH-2.0-a\r\n", b"\x16\x03\x01\x02\x00" * 20, b"\n" * 80)
SLOW = 8  # connections a port on which a byte comes now and then
Address = tuple[str, int]


class Attack(NamedTuple):
    """`finish`: nothing more follows, and the port is told so."""

    kind: str
    data: bytes
    finish: bool


def draw_attack(rng: random.Random, recording: bytes) -> Attack:
    """A message of somebody without the secret; `recording`: what somebody with it said in another conversation."""
    kind = rng.choice(KINDS)
    if kind == "noise":
        data = rng.randbytes(rng.choice([0, 1, 17, 63, 64, 65, 300]))
    elif kind == "text":
        data = rng.choice(TEXTS)
    elif kind == "oversized":
        data = rng.randbytes(64) + struct.pack("<cI", b"J", rng.choice([2**31, 2**32 - 1, 64 << 20])) + bytes(1 << 17)
    elif kind == "unproven":  # a frame as it should be, but for the proof
        parts = struct.pack("<IIcIc", 10, 1, b"k", 1, b"v")
        data = rng.randbytes(64) + struct.pack("<cI32s", b"S", len(parts), bytes(32)) + parts
    elif kind == "replayed":
        data = recording
    elif kind == "truncated":
        data = recording[: rng.randrange(1, 64)]
    elif kind == "torch":  # as torch's own client asks its store: validate, set
        key = struct.pack("<Q", 2) + b"/k"
        data = b"\0" + struct.pack("<I", 0x3C85F7CE) + b"\x01" + key + key + b"\x0d" + bytes(4)
    else:
        data = pickle.dumps({"kind": "hello", "rank": 0}) * rng.randint(1, 50)
    return Attack(kind, data, len(data) < 64)


def knock(address: Address, attack: Attack) -> bool:
    """Send it; whether the port closed the connection, and had told no more than it tells everybody."""
    with socket.create_connection(address, timeout=PATIENCE_S) as sock:
        got = b""
        try:
            sock.sendall(attack.data)
            if attack.finish:
                sock.shutdown(socket.SHUT_WR)
            while data := sock.recv(4096):
                got += data
        except TimeoutError:
            return False
        except OSError:
            pass  # it was closed before all was sent
        if SEALED.startswith(got[: len(SEALED)]):
            return len(got) <= len(SEALED) + HELLO_BYTES
        return len(got) <= GREETING_BYTES and (GREETING + got[len(GREETING) :]).startswith(got)


def knock_inside(address: Address, data: bytes) -> bool:
    """Shake hands as TLS does, and send something that proves nothing inside it; whether the port closed it then."""
    with socket.create_connection(address, timeout=PATIENCE_S) as sock:
        assert sock.recv(len(SEALED)) == SEALED
        with wrap_client(sock) as inside:
            got = b""
            try:
                inside.send(data[:4096] + bytes(64))
                while more := inside.recv(4096):
                    got += more
            except TimeoutError:
                return False
            except OSError:
                pass  # it was closed before all was sent
            return len(got) <= GREETING_BYTES


def make_tls_hello() -> bytes:
    """What a TLS client says first."""
    context, said = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT), ssl.MemoryBIO()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_ciphers("ADH-AES128-GCM-SHA256:@SECLEVEL=0")
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    with contextlib.suppress(ssl.SSLWantReadError):
        context.wrap_bio(ssl.MemoryBIO(), said).do_handshake()
    return said.read()


def hold_slowly(address: Address) -> Iterator[bool]:
    """A connection on which a byte comes at each turn; True once the port has closed it."""
    with socket.create_connection(address, timeout=PATIENCE_S) as sock:
        sock.setblocking(False)
        for _ in range(60):  # fewer than a proof has
            try:
                sock.send(b"x")
                closed = len(sock.recv(4096)) == 0
            except BlockingIOError:
                closed = False
            except OSError:
                closed = True
            yield closed


def visit(
    ports: Sequence[tuple[Address, bytes]], count: int, *, seed: int, wait: bool, sealed: bool = False
) -> tuple[int, int]:
    """Send `count` messages, in turns to every port, beside slow ones; how many, and how many were refused.

    `ports`: addresses, and a recording of each. `wait`: also for the end of the slow ones, and count them.
    `sealed`: the ports encrypt, and every 20th stranger does, too.
    """
    rng, sent, refused = random.Random(seed), 0, 0
    slow = [hold_slowly(address) for address, _ in ports for _ in range(SLOW)]
    ended = [next(one) for one in slow]
    for turn in range(count - (len(slow) if wait else 0)):
        address, recording = ports[turn % len(ports)]
        attack = draw_attack(rng, recording)
        if sealed and turn % 20 == 0:
            refused += knock_inside(address, attack.data)
        else:  # what TLS has not heard to its end, it waits for
            refused += knock(address, attack._replace(finish=True) if sealed else attack)
        sent += 1
    deadline = time.monotonic() + PATIENCE_S
    while wait and not all(ended) and time.monotonic() < deadline:
        ended = [was or next(one, False) for was, one in zip(ended, slow, strict=True)]
        time.sleep(1.0)
    for one in slow:
        one.close()
    return (sent + len(slow), refused + sum(ended)) if wait else (sent, refused)


class _Heard(socket.socket):
    """A socket that remembers what was said on it."""

    said = b""

    def send(self, data: Any, *flags: Any) -> int:
        done = super().send(data, *flags)
        self.said += bytes(data[:done])
        return done


def record(address: Address, secret: bytes, *, asks: bool) -> bytes:
    """What one who knows the secret says to a port; `asks`: also a question to a store.

    A port that encrypts: what any client of TLS says first.
    """
    with connect_once(*address, secret, timeout_s=PATIENCE_S).sock as sock:
        if hasattr(sock, "binding"):
            channel = connect_once(*address, secret, timeout_s=PATIENCE_S)
            if asks:
                send_message(channel, "A", [b"times asked", b"1"])
                assert channel.receive()
            channel.close()
            return make_tls_hello() + bytes(300)
    with _Heard(socket.AF_INET, socket.SOCK_STREAM) as sock:
        sock.connect(address)
        channel = Channel(sock, secret, server=False)
        while not channel.proven:
            assert channel.receive() is not None
        if asks:
            send_message(channel, "A", [b"times asked", b"1"])
            assert channel.receive()
        return sock.said


# -- a training that goes on ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Visited(Engine):
    """Starts agents on this host, and `visitors` once the launcher listens."""

    name: ClassVar[str] = "visited"
    visitors: Any = None
    started: list[threading.Thread] = field(default_factory=list)

    @property
    def local(self) -> bool:
        return True

    def environment(self) -> str:
        return "torchrun"

    def start(self, work: Work) -> Agents:
        agents = []
        for rank in range(work.workers):
            env = {**os.environ, **work.env, "RANK": str(rank), "WORLD_SIZE": str(work.workers)}
            agents.append(subprocess.Popen(list(work.agent), env=env, start_new_session=True))
        thread = threading.Thread(target=self.visitors, args=(work.addresses[0], bytes.fromhex(work.token)))
        thread.start()
        self.started.append(thread)
        return Agents(agents)


def make_problem() -> tuple[torch.nn.Module, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    return torch.nn.Linear(6, 3).double(), torch.randn(16, 6).double(), torch.randn(16, 3).double()


def train(folder: Path, encrypt: bool) -> tuple[int, list[float], int]:
    """In each worker: train until told to stop; steps, weights, and how often the recorded question was asked."""
    os.environ.pop("UNISONO_SHM_FD", None)  # as on several hosts: they meet in the store
    os.environ["UNISONO_SHARED_MEMORY"] = "0"
    os.environ["UNISONO_ENCRYPT"] = str(int(encrypt))
    world, step, stopping = un.join(device="cpu"), 0, False
    model, x, y = make_problem()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    un.parallel(model, optimizer, "allreduce")
    mine = slice(world.rank * 8, world.rank * 8 + 8)
    address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    secret = read_store_secret(*address, hosted=True)
    assert secret is not None
    while not stopping:
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(x[mine]), y[mine]).backward()
        optimizer.step()
        step += 1
        if step == 2:
            tell_door(world, folder)
        if step == 3 and world.rank == 0:
            told = json.dumps([*address, record(address, secret, asks=True).hex()])
            (folder / "store.part").write_text(told)
            (folder / "store.part").rename(folder / "store")
        flag = torch.tensor([float((folder / "visited").exists())])
        world.all_reduce(flag, "max").wait()
        stopping = bool(flag)
    world.channel()  # a new group, which meets in the store once more
    from unisono.world.locked_store import LockedStore

    asked = LockedStore(*address, secret, timeout_s=20).add("times asked", 0)
    return step, torch.nn.utils.parameters_to_vector(model.parameters()).tolist(), asked


def tell_door(world: un.World, folder: Path) -> None:
    """Write where the other rank is reached, and what one says there that knows the secret."""
    other: Any = world.transport._links._peers[1 - world.rank]  # type: ignore[union-attr]
    address = other._cards[0][0]
    told = json.dumps([*address, record(address, other._secret, asks=False).hex()])
    (folder / f"part{other.rank}").write_text(told)
    (folder / f"part{other.rank}").rename(folder / f"door{other.rank}")


def train_alone(steps: int) -> list[float]:
    """The same on all rows in plain PyTorch."""
    model, x, y = make_problem()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for _ in range(steps):
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
    return torch.nn.utils.parameters_to_vector(model.parameters()).tolist()


def attack_training(
    messages: int, *, seed: int = 0, wait: bool = False, data: bool = False, encrypt: bool = False
) -> dict[str, Any]:
    """Train with two workers while strangers send `messages` to the launcher's port and the store's; see `visit`.

    `data`: so many to each rank's data port instead. `encrypt`: these ports encrypt.
    """
    counts = [0, 0]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)

        def read(name: str) -> tuple[Address, bytes]:
            deadline = time.monotonic() + 90
            while not (folder / name).exists() and time.monotonic() < deadline:
                time.sleep(0.01)
            host, port, said = json.loads((folder / name).read_text())
            return (host, port), bytes.fromhex(said)

        def visitors(launcher: Address, token: bytes) -> None:
            try:
                recording = record(launcher, token, asks=False)
                ports = [read("door0"), read("door1")] if data else [(launcher, recording), read("store")]
                count = messages * len(ports) if data else messages
                counts[:] = visit(ports, count, seed=seed, wait=wait, sealed=encrypt)
            finally:
                read("store")
                (folder / "visited").touch()

        engine, before = Visited(visitors=visitors), os.environ.get("UNISONO_ENCRYPT")
        os.environ["UNISONO_ENCRYPT"] = str(int(encrypt))
        try:
            found = un.launch(train, args=(folder, encrypt), workers=2, on=engine, timeout_s=1200)
        finally:
            os.environ.pop("UNISONO_ENCRYPT")
            if before is not None:
                os.environ["UNISONO_ENCRYPT"] = before
        for thread in engine.started:
            thread.join()
    steps, weights, asked = found[0]
    return {
        "hostile_sent": counts[0],
        "hostile_refused": counts[1],
        "training_went_on": steps > 3 and asked == 1,
        "weights_equal": found[1][1] == weights and torch.allclose(*map(torch.tensor, (weights, train_alone(steps)))),
    }


if __name__ == "__main__":
    print(json.dumps(attack_training(int(sys.argv[1]) if len(sys.argv) > 1 else 300)))
